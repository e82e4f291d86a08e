/* SPDX-License-Identifier: MIT */
/* pool.c: caches that outlive their users, as the daemon has them. */
#include "ctl.h"
#include "json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

static void print_pools(const cJSON *pools)
{
	const cJSON *item;

	if (cJSON_GetArraySize(pools) == 0) {
		(void)puts("no pools");
		return;
	}
	(void)printf("%-20s %8s %6s %6s %10s %8s %8s %8s %8s %8s %6s %7s %10s %8s  %s\n", "pool",
		     "user", "open", "shared", "page KiB", "pages", "free", "leased", "sealed",
		     "pinned", "lost", "hits", "evictions", "in file", "layout");
	cJSON_ArrayForEach(item, pools)
	{
		double hits = ctl_number(item, "hits"), asked = hits + ctl_number(item, "misses");

		(void)printf("%-20s %8.0f %6.0f %6.0f %10.0f %8.0f %8.0f %8.0f %8.0f %8.0f %6.0f",
			     ctl_text(item, "name"), ctl_number(item, "uid"),
			     ctl_number(item, "users"), ctl_number(item, "shares"),
			     ctl_number(item, "page_bytes") / 1024, ctl_number(item, "pages"),
			     ctl_number(item, "free"), ctl_number(item, "leased"),
			     ctl_number(item, "sealed"), ctl_number(item, "pinned"),
			     ctl_number(item, "lost"));
		if (asked > 0)
			(void)printf(" %6.1f%%", 100 * hits / asked);
		else
			(void)printf(" %7s", "-");
		(void)printf(" %10.0f %8.0f  %s\n", ctl_number(item, "evictions"),
			     ctl_number(item, "filed"), ctl_text(item, "layout"));
	}
}

static int list(const struct ctl_target *target)
{
	const cJSON *pools;
	cJSON *root;
	char *json;
	int r = ctl_ask_status(target, &json);

	if (r != 0)
		return r;
	root = cJSON_Parse(json);
	free(json);
	pools = ctl_member(ctl_member(root, "front"), "pools");
	if (target->json) {
		cJSON *copy = cJSON_Duplicate(pools, true);

		cJSON_Delete(root);
		return ctl_print_json(copy);
	}
	print_pools(pools);
	cJSON_Delete(root);
	return CTL_OK;
}

static int pool_drop_named(const struct ctl_target *target, const char *name)
{
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	struct fmha_error err = {0};
	int r = ctl_connect(target, &client);

	if (r == 0 && fmha_pool_drop(client, name, &err) < 0)
		r = ctl_error(&err);
	return r;
}

/* Prints by what the other user opens it. */
static int share(const struct ctl_target *target, char **words)
{
	static const char *const accesses[] = {"none", "read", "write"};
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	uint8_t found[FMHA_POOL_SHARE_BYTES];
	struct fmha_error err = {0};
	size_t access = 0;
	char *end;
	unsigned long uid = strtoul(words[1], &end, 10);
	int r;

	while (access < 3 && strcmp(words[2], accesses[access]) != 0)
		access++;
	if (!*words[1] || *end || uid > UINT32_MAX || access == 3)
		return ctl_usage_error("pool share: NAME UID none, read or write");
	r = ctl_connect(target, &client);
	if (r == 0 && fmha_pool_share(client, words[0], (uint32_t)uid,
				      (enum fmha_pool_access)access, found, &err) < 0)
		r = ctl_error(&err);
	for (size_t i = 0; r == CTL_OK && access > 0 && i < sizeof(found); i++)
		(void)printf("%02x%s", found[i], i + 1 < sizeof(found) ? "" : "\n");
	return r;
}

static int pool(int argc, char **argv)
{
	struct ctl_target target = CTL_TARGET_INIT;
	int r = ctl_options_before(&ctl_pool, argc, argv, &target, NULL, NULL);

	if (r != 0)
		return r;
	if (optind == argc)
		return list(&target);
	if (strcmp(argv[optind], "share") == 0 && optind + 4 == argc)
		return share(&target, argv + optind + 1);
	if (strcmp(argv[optind], "drop") != 0 || optind + 2 != argc)
		return ctl_usage_error("pool: list the pools, drop NAME, or share NAME UID ACCESS");
	return pool_drop_named(&target, argv[optind + 1]);
}

const struct ctl_command ctl_pool = {
	.usage = {.name = "fmhactl pool",
		  .brief = "caches of keys and values that outlive their users",
		  .synopsis = "[OPTION...] [drop NAME | share NAME UID ACCESS]",
		  .text = "Lists the caller's pools, administrators' view has everybody's: who has "
			  "each open, and how many of its pages are free, leased to be written, "
			  "sealed to be found by others, pinned by somebody who reads them, and "
			  "lost until the process that may still write them has ended. `drop` ends "
			  "one of the caller's that nobody has open. `share` lets user UID `read` "
			  "or "
			  "`write` one of the caller's from now on, and prints by what that user, "
			  "and "
			  "nobody else, opens it; `none` ends that.",
		  .tables = {ctl_json_option, ctl_target_options}},
	.run = pool,
};
