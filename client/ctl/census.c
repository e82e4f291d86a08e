/* SPDX-License-Identifier: MIT */
/* census.c: what a device has been asked for, and what of it is measured. */
#include "ctl.h"
#include "json.h"

#include <stdio.h>
#include <stdlib.h>

#include <cjson/cJSON.h>

static void print_shapes(const cJSON *shapes)
{
	const cJSON *item;
	char share[SHARE_BYTES];

	if (cJSON_GetArraySize(shapes) == 0) {
		(void)puts("nothing has been run on this device since its worker started");
		return;
	}
	(void)printf("%8s  %10s  %12s  %7s  %-8s  %s\n", "user", "runs", "device ms", "of roof",
		     "measured", "shape, and its kernel");
	cJSON_ArrayForEach(item, shapes)
	{
		const cJSON *settled = ctl_member(item, "settled");
		double splits = ctl_number(item, "n_splits");

		(void)printf("%8.0f  %10.0f  %12.3f  %7s  %-8s  %s\n", ctl_number(item, "uid"),
			     ctl_number(item, "runs"), ctl_number(item, "device_ns") / 1e6,
			     ctl_share(item, "of_roof", share),
			     cJSON_IsTrue(settled) ? "yes" : "no", ctl_text(item, "shape"));
		(void)printf("%53s%s", "", ctl_text(item, "kernel"));
		if (splits > 0)
			(void)printf(", %.0f splits", splits);
		if (cJSON_IsTrue(ctl_member(item, "general")))
			(void)printf(", a loop for every arch");
		(void)putchar('\n');
	}
}

static int print_census(struct fmha_device *device, bool as_json)
{
	struct fmha_error err = {0};
	cJSON *root;
	char *json;

	if (fmha_census(device, &json, &err) < 0)
		return ctl_error(&err);
	root = cJSON_Parse(json);
	free(json);
	if (as_json)
		return ctl_print_json(root);
	print_shapes(ctl_member(root, "shapes"));
	cJSON_Delete(root);
	return CTL_OK;
}

static int census(int argc, char **argv)
{
	struct ctl_target target = CTL_TARGET_INIT;
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	_cleanup_(ctl_device_freep) struct fmha_device *device = NULL;
	int r = ctl_options(&ctl_census, argc, argv, &target, NULL, NULL);

	if (r == 0)
		r = ctl_open(&target, &client, &device);
	return r == 0 ? print_census(device, target.json) : r;
}

const struct ctl_command ctl_census = {
	.usage = {.name = "fmhactl census",
		  .brief = "the shapes that a device has been asked for",
		  .synopsis = "[OPTION...]",
		  .text = "Lists the shapes that were run on a device since its worker started, "
			  "what "
			  "took most of the device's time first: how near they come to what the "
			  "device's roof allows, whether everything was measured that is worth it, "
			  "and the kernel that runs them. Everybody sees what is their own; "
			  "administrators see all. `fmhactl tune --census` measures them.",
		  .tables = {ctl_json_option, ctl_target_options}},
	.run = census,
};
