/* SPDX-License-Identifier: MIT */
/* registry.c: the kernels of one device: seen as JSON, merged, preferred, and chosen in sets. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "registry_files.h"
#include "ctl.h"

struct request {
	struct ctl_target target;
	const char *filter, *out, *name;
	const char *operand; /* FILE, NAME or KERNEL */
	const char *second;  /* FILE of merge and compare, PRIORITY */
	const char *shape;
};

static const struct cli_option own_options[] = {
	{"filter", 'f', "EXPR",
	 "export: only kernels for which this holds, as in \"hdim_q == 128 and pipeline == 'qr'\"",
	 CLI_TO(TEXT, struct request, filter)},
	{"out", 'o', "FILE", "export: write there instead of to stdout",
	 CLI_TO(TEXT, struct request, out)},
	{"name", 'n', "NAME", "load: what the set is called (default: as the file)",
	 CLI_TO(TEXT, struct request, name)},
	{"shape", 's', "WORD", "forget: only times at this shape, as `get` prints it",
	 CLI_TO(TEXT, struct request, shape)},
	CLI_END};

static int do_export(struct fmha_device *device, const struct request *request)
{
	struct fmha_error err = {0};
	char *json;
	int r;

	if (fmha_registry_export(device, request->filter, &json, &err) < 0)
		return ctl_error(&err);
	r = registry_write_file(request->out, json);
	free(json);
	return r;
}

/* "sets/small.json" is called "small". */
static void name_from_path(const char *path, char name[FMHA_NAME_BYTES])
{
	const char *base = strrchr(path, '/');
	size_t n;

	base = base ? base + 1 : path;
	n = strlen(base);
	if (n > 5 && !strcmp(base + n - 5, ".json"))
		n -= 5;
	if (n >= FMHA_NAME_BYTES)
		n = FMHA_NAME_BYTES - 1;
	memcpy(name, base, n);
	name[n] = '\0';
}

static int do_import(struct fmha_device *device, const struct request *request)
{
	struct fmha_error err = {0};
	char *text = NULL;
	uint64_t n_kernels = 0;
	size_t n = 0;
	int r = ctl_read_file(request->operand, &text, &n);

	if (r != 0)
		return r;
	r = fmha_registry_import(device, text, n, &n_kernels, &err);
	free(text);
	if (r < 0)
		return ctl_error(&err);
	(void)printf("%llu kernels\n", (unsigned long long)n_kernels);
	return CTL_OK;
}

/* A set that offers nothing is a mistake in its patterns: it is not left there. */
static int take_empty_set_back(struct fmha_device *device, const struct request *request,
			       const char *name)
{
	struct fmha_error err = {0};

	if (fmha_registry_unload(device, name, NULL, &err) < 0)
		return ctl_error(&err);
	(void)fprintf(
		stderr,
		"fmhactl: %s: no kernel of this device has a name that its patterns match; set "
		"%s is not loaded (`fmhactl plan` prints such names)\n",
		request->operand, name);
	return CTL_FAILED;
}

static int do_load(struct fmha_device *device, const struct request *request)
{
	struct fmha_error err = {0};
	char *text = NULL, from_path[FMHA_NAME_BYTES];
	const char *name = request->name ? request->name : from_path;
	uint64_t n_kernels = 0;
	size_t n = 0;
	int r = ctl_read_file(request->operand, &text, &n);

	if (r != 0)
		return r;
	name_from_path(request->operand, from_path);
	r = fmha_registry_load(device, name, text, n, &n_kernels, &err);
	free(text);
	if (r < 0)
		return ctl_error(&err);
	if (n_kernels == 0)
		return take_empty_set_back(device, request, name);
	(void)printf("set %s: %llu kernels\n", name, (unsigned long long)n_kernels);
	return CTL_OK;
}

static int do_unload(struct fmha_device *device, const struct request *request)
{
	struct fmha_error err = {0};
	uint64_t n_kernels = 0;

	if (fmha_registry_unload(device, request->operand, &n_kernels, &err) < 0)
		return ctl_error(&err);
	(void)printf("set %s: unloaded, %llu kernels are not offered any more\n", request->operand,
		     (unsigned long long)n_kernels);
	return CTL_OK;
}

static int registry_parse(struct request *request, int argc, char **argv)
{
	int r = ctl_options_before(&ctl_registry, argc, argv, &request->target, NULL, request);

	if (r != 0)
		return r;
	if (optind < argc)
		request->operand = argv[optind++];
	if (optind < argc)
		request->second = argv[optind++];
	if (optind < argc)
		return ctl_usage_error("registry: what is '%s'?", argv[optind]);
	return 0;
}

static int do_get(struct fmha_device *device, const struct request *request)
{
	struct fmha_error err = {0};
	char *json;

	if (fmha_registry_get(device, request->operand, &json, &err) < 0)
		return ctl_error(&err);
	(void)puts(json);
	free(json);
	return CTL_OK;
}

/* What a restart does to a change. */
static const char *lasting(bool stored)
{
	return stored ? "" : " (until the daemon restarts: it is not on disk)";
}

static int do_set_priority(struct fmha_device *device, const struct request *request)
{
	struct fmha_error err = {0};
	int32_t priority = 0;
	bool stored = false;
	int r = ctl_parse_int32("PRIORITY", request->second, INT32_MIN, INT32_MAX, &priority);

	if (r != 0)
		return r;
	if (fmha_registry_set_priority(device, request->operand, priority, &stored, &err) < 0)
		return ctl_error(&err);
	(void)printf("%s: priority %d%s\n", request->operand, priority, lasting(stored));
	return CTL_OK;
}

static int do_lift(struct fmha_device *device, const struct request *request)
{
	struct fmha_error err = {0};
	bool stored = false;

	if (fmha_registry_lift(device, request->operand, &stored, &err) < 0)
		return ctl_error(&err);
	(void)printf("%s: not in quarantine any more%s\n", request->operand, lasting(stored));
	return CTL_OK;
}

static int do_forget(struct fmha_device *device, const struct request *request)
{
	struct fmha_error err = {0};
	bool stored = false;
	uint64_t n = 0;

	if (fmha_registry_forget(device, request->operand, request->shape, &n, &stored, &err) < 0)
		return ctl_error(&err);
	(void)printf("%llu measured times forgotten%s\n", (unsigned long long)n, lasting(stored));
	return CTL_OK;
}

static const struct verb {
	const char *name, *operand, *second; /* NULL: none; in [ ]: it may be left out */
	int (*run)(struct fmha_device *device, const struct request *request);
	int (*with_files)(const char *first, const char *second, const char *out);
} verbs[] = {
	{"export", NULL, NULL, do_export, NULL},
	{"import", "FILE", NULL, do_import, NULL},
	{"load", "FILE", NULL, do_load, NULL},
	{"unload", "NAME", NULL, do_unload, NULL},
	{"get", "KERNEL", NULL, do_get, NULL},
	{"set-priority", "KERNEL", "PRIORITY", do_set_priority, NULL},
	{"lift", "KERNEL", NULL, do_lift, NULL},
	{"forget", "[PATTERN]", NULL, do_forget, NULL},
	{"merge", "FIRST", "SECOND", NULL, registry_merge_files},
	{"compare", "FIRST", "SECOND", NULL, registry_compare_files},
};

static const struct verb *find_verb(const char *name)
{
	for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++)
		if (strcmp(verbs[i].name, name) == 0)
			return &verbs[i];
	return NULL;
}

/* @expected: as verbs[] names it. */
static int check_operand(const char *verb, const char *expected, const char *operand)
{
	if (!expected && operand)
		return ctl_usage_error("registry %s: what is '%s'?", verb, operand);
	if (expected && expected[0] != '[' && !operand)
		return ctl_usage_error("registry %s: %s is missing", verb, expected);
	return 0;
}

static int run_registry(int argc, char **argv)
{
	const char *name = ctl_take_verb(&argc, &argv);
	const struct verb *verb = find_verb(name);
	struct request request = {.target = CTL_TARGET_INIT};
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	_cleanup_(ctl_device_freep) struct fmha_device *device = NULL;
	int r = registry_parse(&request, argc, argv);

	if (r != 0)
		return r;
	if (!verb)
		return ctl_usage_error("registry: export, import, load, unload, get, set-priority, "
				       "lift, forget, merge or compare, not '%s'",
				       name);
	r = check_operand(name, verb->operand, request.operand);
	if (r == 0)
		r = check_operand(name, verb->second, request.second);
	if (r != 0)
		return r;
	if (verb->with_files)
		return verb->with_files(request.operand, request.second, request.out);
	r = ctl_open(&request.target, &client, &device);
	return r == 0 ? verb->run(device, &request) : r;
}

const struct ctl_command ctl_registry = {
	.usage = {.name = "fmhactl registry",
		  .brief = "a device's kernels: seen, preferred, chosen, forgotten",
		  .synopsis = "export [--filter EXPR] [--out FILE] [OPTION...]\n"
			      "import FILE [OPTION...]\n"
			      "load SET.json [--name NAME] [OPTION...]\n"
			      "unload NAME [OPTION...]\n"
			      "get KERNEL [OPTION...]\n"
			      "set-priority KERNEL PRIORITY [OPTION...]\n"
			      "lift KERNEL [OPTION...]\n"
			      "forget [PATTERN] [--shape WORD] [OPTION...]\n"
			      "merge FIRST SECOND [--out FILE]\n"
			      "compare FIRST SECOND",
		  .text = "`export` prints a device's kernels with their state, statistics and "
			  "tuned "
			  "results as JSON; without --filter those that something is known "
			  "about.\n\n"
			  "`import` merges an export of another machine that has the same "
			  "device; measured times of another driver, compiler or other kernel "
			  "sources are refused.\n\n"
			  "`load` offers the kernels of a set: a JSON list of patterns over kernel "
			  "names, as in [\"fwd-bf16-*\", \"!*-h256-*\"].\n\n"
			  "`unload` takes a set back.\n\n"
			  "`get` prints what is known of one kernel.\n\n"
			  "`set-priority` prefers a kernel to all of a lower priority, before what "
			  "was measured; 0 is none.\n\n"
			  "`lift` ends a kernel's quarantine.\n\n"
			  "`forget` forgets measured times: of kernels that match a pattern with * "
			  "and ?, or all.\n\n"
			  "`merge` puts two exports of one device model together, and `compare` "
			  "says what they remember differently (exit code 1); neither needs a "
			  "daemon.\n\n"
			  "What changes a device's kernels is for administrators. It takes effect "
			  "on "
			  "all devices of the model, and a restart keeps it.",
		  .operands = "export|import|load|unload|get|set-priority|lift|forget|merge|"
			      "compare",
		  .tables = {own_options, ctl_target_options}},
	.run = run_registry,
};
