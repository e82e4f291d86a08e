/* SPDX-License-Identifier: MIT */
/* status.c: what the daemon says of itself, and of its devices. --all knows the shape of JSON and not the
 * daemon's keys, so a key that the daemon gains shows up there without a change. */
#include "ctl.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "status_view.h"
#include "json.h"

#define MAX_COLUMNS 24

/* What --all and --limits ask for. */
struct view {
	bool everything, all_limits;
};

static const struct cli_option status_options[] = {
	{"all", 'a', NULL, "everything that the daemon counts",
	 CLI_TO(FLAG, struct view, everything)},
	{"limits", 'l', NULL, "all limits; without it only those that somebody ran into",
	 CLI_TO(FLAG, struct view, all_limits)},
	CLI_END};

/* A scalar as text; "" for what is no scalar. */
static void scalar_text(const cJSON *item, char *text, size_t n)
{
	text[0] = '\0';
	if (cJSON_IsString(item))
		(void)snprintf(text, n, "%s", item->valuestring);
	else if (cJSON_IsBool(item))
		(void)snprintf(text, n, "%s", cJSON_IsTrue(item) ? "yes" : "no");
	else if (cJSON_IsNull(item))
		(void)snprintf(text, n, "-");
	else if (cJSON_IsNumber(item) && floor(item->valuedouble) == item->valuedouble &&
		 fabs(item->valuedouble) < 1e15)
		(void)snprintf(text, n, "%.0f", item->valuedouble);
	else if (cJSON_IsNumber(item))
		(void)snprintf(text, n, "%.6g", item->valuedouble);
}

static bool is_scalar(const cJSON *item)
{
	return !cJSON_IsObject(item) && !cJSON_IsArray(item);
}

/* A table when the array's objects have scalars only. */
static bool is_table(const cJSON *array)
{
	const cJSON *row, *cell;

	if (!cJSON_IsArray(array) || !array->child)
		return false;
	cJSON_ArrayForEach(row, array)
	{
		if (!cJSON_IsObject(row))
			return false;
		cJSON_ArrayForEach(cell, row)
		{
			if (!is_scalar(cell))
				return false;
		}
	}
	return true;
}

/* Columns are the first row's keys: the daemon gives all rows of an array the same ones. */
static void status_print_table(const cJSON *array, int indent)
{
	const char *names[MAX_COLUMNS];
	size_t widths[MAX_COLUMNS], n = 0;
	const cJSON *row, *cell;
	char text[256];

	cJSON_ArrayForEach(cell, array->child)
	{
		if (n < MAX_COLUMNS) {
			names[n] = cell->string;
			widths[n++] = strlen(cell->string);
		}
	}
	cJSON_ArrayForEach(row, array)
	{
		for (size_t i = 0; i < n; i++) {
			scalar_text(ctl_member(row, names[i]), text, sizeof(text));
			if (strlen(text) > widths[i])
				widths[i] = strlen(text);
		}
	}
	(void)printf("%*s", indent, "");
	for (size_t i = 0; i < n; i++)
		(void)printf("%-*s%s", (int)widths[i], names[i], i + 1 < n ? "  " : "\n");
	cJSON_ArrayForEach(row, array)
	{
		(void)printf("%*s", indent, "");
		for (size_t i = 0; i < n; i++) {
			const cJSON *item = ctl_member(row, names[i]);

			scalar_text(item, text, sizeof(text));
			(void)printf(cJSON_IsNumber(item) ? "%*s%s" : "%-*s%s", (int)widths[i],
				     text, i + 1 < n ? "  " : "\n");
		}
	}
}

static void print_value(const cJSON *value, int indent)
{
	const cJSON *item;
	size_t width = 0;
	char text[1024];

	cJSON_ArrayForEach(item, value)
	{
		if (item->string && is_scalar(item) && strlen(item->string) > width)
			width = strlen(item->string);
	}
	cJSON_ArrayForEach(item, value)
	{
		const char *name = item->string ? item->string : "-";

		if (is_scalar(item)) {
			scalar_text(item, text, sizeof(text));
			(void)printf("%*s%-*s  %s\n", indent, "", (int)width, name, text);
			continue;
		}
		if (cJSON_IsNumber(item->child) && cJSON_IsArray(item))
			continue; /* a histogram: for programs */
		if (!item->child) {
			(void)printf("%*s%s: none\n", indent, "", name);
			continue;
		}
		(void)printf("%*s%s:\n", indent, "", name);
		if (is_table(item))
			status_print_table(item, indent + 2);
		else
			print_value(item, indent + 2);
	}
}

static int print_status(const char *json, bool everything, bool all_limits)
{
	cJSON *root = cJSON_Parse(json);

	if (!root) {
		(void)fputs("fmhactl: the daemon's status is no JSON\n", stderr);
		return CTL_REFUSED;
	}
	if (everything)
		print_value(root, 0);
	else
		status_view(root, all_limits);
	cJSON_Delete(root);
	return CTL_OK;
}

static int status(int argc, char **argv)
{
	struct ctl_target target = CTL_TARGET_INIT;
	struct view view = {0};
	char *json;
	int r = ctl_options(&ctl_status, argc, argv, &target, NULL, &view);

	if (r == 0)
		r = ctl_ask_status(&target, &json);
	if (r != 0)
		return r;
	if (target.json)
		r = puts(json) < 0 ? CTL_IO : CTL_OK;
	else
		r = print_status(json, view.everything, view.all_limits);
	free(json);
	return r;
}

static int print_devices_json(const struct fmha_device_info *devices, size_t n)
{
	cJSON *list = cJSON_CreateArray();

	for (size_t i = 0; i < n; i++) {
		cJSON *item = ctl_add_item(list);

		cJSON_AddNumberToObject(item, "device", devices[i].device);
		cJSON_AddStringToObject(item, "backend", devices[i].backend);
		cJSON_AddStringToObject(item, "arch", devices[i].arch);
		cJSON_AddStringToObject(item, "state", devices[i].state);
		cJSON_AddNumberToObject(item, "compute_units", devices[i].compute_units);
		cJSON_AddNumberToObject(item, "memory_bytes", (double)devices[i].memory_bytes);
		if (devices[i].pci[0])
			cJSON_AddStringToObject(item, "pci", devices[i].pci);
		cJSON_AddStringToObject(item, "name", devices[i].name);
	}
	return ctl_print_json(list);
}

static int list_devices(struct fmha_client *client, bool as_json)
{
	struct fmha_device_info devices[64];
	struct fmha_error err = {0};
	size_t n;

	if (fmha_client_devices(client, devices, sizeof(devices) / sizeof(devices[0]), &n, &err) <
	    0)
		return ctl_error(&err);
	if (n > sizeof(devices) / sizeof(devices[0]))
		n = sizeof(devices) / sizeof(devices[0]);
	if (as_json)
		return print_devices_json(devices, n);
	(void)printf("%-6s  %-8s  %-16s  %-10s  %5s  %12s  %s\n", "device", "backend", "arch",
		     "state", "units", "memory MiB", "name");
	for (size_t i = 0; i < n; i++)
		(void)printf("%-6u  %-8s  %-16s  %-10s  %5u  %12llu  %s\n", devices[i].device,
			     devices[i].backend, devices[i].arch, devices[i].state,
			     devices[i].compute_units,
			     (unsigned long long)(devices[i].memory_bytes >> 20), devices[i].name);
	return CTL_OK;
}

static int devices(int argc, char **argv)
{
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	struct ctl_target target = CTL_TARGET_INIT;
	int r = ctl_options(&ctl_devices, argc, argv, &target, NULL, NULL);

	if (r == 0)
		r = ctl_connect(&target, &client);
	return r == 0 ? list_devices(client, target.json) : r;
}

const struct ctl_command ctl_status = {
	.usage = {.name = "fmhactl status",
		  .brief = "processes, devices, sessions, buffers, queues, latencies",
		  .synopsis = "[--all | --json] [OPTION...]",
		  .text = "Prints what is served, who uses it, and what is not well. Of sessions a "
			  "user sees the own ones, an administrator all.",
		  .tables = {status_options, ctl_json_option, ctl_target_options}},
	.run = status,
};

const struct ctl_command ctl_devices = {
	.usage = {.name = "fmhactl devices",
		  .brief = "the daemon's devices",
		  .synopsis = "[OPTION...]",
		  .text = "Lists the daemon's devices.",
		  .tables = {ctl_json_option, ctl_target_options}},
	.run = devices,
};
