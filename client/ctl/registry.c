/* SPDX-License-Identifier: MIT */
/* registry.c: the kernels of one device: seen as JSON, merged, and chosen in sets. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "registry_files.h"
#include "ctl.h"

static const struct cli_option own_options[] = {
	{"filter", 'f', "EXPR",
	 "export: only kernels for which this holds, as in \"hdim_q == 128 and pipeline == 'qr'\""},
	{"out", 'o', "FILE", "export: write there instead of to stdout"},
	{"name", 'n', "NAME", "load: what the set is called (default: as the file)"},
	CLI_END};

struct request {
	struct ctl_target target;
	const char *filter, *out, *name;
	const char *operand; /* FILE or NAME */
	const char *second;  /* FILE of merge and compare */
};

static int write_file(const char *path, const char *text)
{
	FILE *file = fopen(path, "we");
	bool written;

	if (!file)
		return ctl_file_error(path);
	written = fputs(text, file) >= 0 && fputc('\n', file) != EOF;
	if (fclose(file) != 0 || !written)
		return ctl_file_error(path);
	return CTL_OK;
}

static int do_export(struct fmha_device *device, const struct request *request)
{
	struct fmha_error err = {0};
	char *json;
	int r;

	if (fmha_registry_export(device, request->filter, &json, &err) < 0)
		return ctl_error(&err);
	if (request->out)
		r = write_file(request->out, json);
	else
		r = puts(json) < 0 ? CTL_IO : CTL_OK;
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

static int parse(struct request *request, int argc, char **argv)
{
	int option, r;

	while ((option = cli_next(&ctl_registry.usage, argc, argv)) != -1) {
		switch (option) {
		case 'f':
			request->filter = optarg;
			break;
		case 'o':
			request->out = optarg;
			break;
		case 'n':
			request->name = optarg;
			break;
		default:
			r = ctl_target_option(&request->target, option, optarg);
			if (r != 0)
				return r;
		}
	}
	if (optind < argc)
		request->operand = argv[optind++];
	if (optind < argc)
		request->second = argv[optind++];
	if (optind < argc)
		return ctl_usage_error("registry: what is '%s'?", argv[optind]);
	return 0;
}

static int with_files(const char *verb, bool merges, const struct request *request)
{
	if (!request->second)
		return ctl_usage_error("registry %s: two exports", verb);
	if (merges)
		return registry_merge_files(request->operand, request->second, request->out);
	return registry_compare_files(request->operand, request->second);
}

static int run_registry(int argc, char **argv)
{
	const char *verb = ctl_take_verb(&argc, &argv);
	bool exports = !strcmp(verb, "export"), imports = !strcmp(verb, "import");
	bool loads = !strcmp(verb, "load"), unloads = !strcmp(verb, "unload");
	bool merges = !strcmp(verb, "merge");
	struct request request = {.target = CTL_TARGET_INIT};
	struct fmha_client *client;
	struct fmha_device *device;
	int r = parse(&request, argc, argv);

	if (r != 0)
		return r;
	if (merges || !strcmp(verb, "compare"))
		return with_files(verb, merges, &request);
	if (!exports && !imports && !loads && !unloads)
		return ctl_usage_error(
			"registry: export, import, load, unload, merge or compare, not '%s'", verb);
	if (!exports && !request.operand)
		return ctl_usage_error("registry %s: %s is missing", verb,
				       unloads ? "NAME" : "FILE");
	if ((exports && request.operand) || request.second)
		return ctl_usage_error("registry %s: what is '%s'?", verb,
				       request.second ? request.second : request.operand);
	r = ctl_open(&request.target, &client, &device);
	if (r != 0)
		return r;
	if (exports)
		r = do_export(device, &request);
	else if (unloads)
		r = do_unload(device, &request);
	else if (loads)
		r = do_load(device, &request);
	else
		r = do_import(device, &request);
	device = fmha_device_free(device);
	client = fmha_client_free(client);
	return r;
}

const struct ctl_command ctl_registry = {
	.usage = {.name = "fmhactl registry",
		  .brief = "a device's kernels: export, import, load, unload",
		  .synopsis = "export [--filter EXPR] [--out FILE] [OPTION...]\n"
			      "import FILE [OPTION...]\n"
			      "load SET.json [--name NAME] [OPTION...]\n"
			      "unload NAME [OPTION...]\n"
			      "merge FIRST SECOND [--out FILE]\n"
			      "compare FIRST SECOND",
		  .text = "`export` prints a device's kernels with their state, statistics and "
			  "tuned "
			  "results as JSON; without --filter those that something is known "
			  "about.\n\n"
			  "`import` merges an export of another machine that has the same "
			  "device.\n\n"
			  "`load` offers the kernels of a set: a JSON list of patterns over kernel "
			  "names, as in [\"fwd-bf16-*\", \"!*-h256-*\"].\n\n"
			  "`unload` takes a set back.\n\n"
			  "`merge` puts two exports of one device model together, and `compare` "
			  "says what they remember differently (exit code 1); neither needs a "
			  "daemon.",
		  .operands = "export|import|load|unload|merge|compare",
		  .tables = {own_options, ctl_target_options}},
	.run = run_registry,
};
