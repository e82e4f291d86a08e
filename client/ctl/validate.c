/* SPDX-License-Identifier: MIT */
/* fmhactl validate: judges kernel specs: names, CSV rows, JSON files. No daemon. */
#include "ctl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <catalogue/backends.h>
#include <specs/row.h>
#include <specs/validate.h>

struct judge {
	struct spec_catalog *catalog;
	bool quiet;
	uint64_t n_specs, n_invalid, n_warned;
	struct ctl_progress progress;
};

static const struct cli_option own_options[] = {
	{"quiet", 'q', NULL, "print only the summary", CLI_TO(FLAG, struct judge, quiet)}, CLI_END};

/* @label: where the spec comes from, for specs that have no name yet. */
static void report_broken(struct judge *judge, const char *label, const char *msg)
{
	judge->n_specs++;
	judge->n_invalid++;
	if (judge->quiet)
		return;
	ctl_progress_end(&judge->progress);
	(void)printf("%s: error: %s\n", label, msg);
}

static void judge_spec(struct judge *judge, const struct kernel_spec *spec)
{
	char name[SPEC_NAME_BYTES];
	struct spec_findings findings;

	judge->n_specs++;
	(void)spec_validate(judge->catalog, spec, &findings);
	judge->n_invalid += findings.n_errors > 0;
	judge->n_warned += findings.n_warnings > 0;
	if (findings.n == 0 || judge->quiet)
		return;
	ctl_progress_end(&judge->progress);
	(void)spec_name_format(judge->catalog, spec, name);
	for (int i = 0; i < findings.n; i++)
		(void)printf("%s: %s: %s\n", name[0] ? name : "(a name that is too long)",
			     findings.finding[i].is_warning ? "warning" : "error",
			     findings.finding[i].msg);
}

static int judge_json(void *owner, int index, const struct kernel_spec *spec,
		      const struct fmha_error *fault)
{
	struct judge *judge = (struct judge *)owner;
	char label[24];

	if (spec) {
		judge_spec(judge, spec);
	} else {
		(void)snprintf(label, sizeof(label), "spec %d", index);
		report_broken(judge, label, fault->msg);
	}
	return 0;
}

/* A name, or a CSV row: only rows have commas. */
static void judge_line(struct judge *judge, const char *label, const char *line)
{
	struct fmha_error err = {0};
	struct kernel_spec spec;
	int r = strchr(line, ',') ? spec_csv_parse(judge->catalog, line, &spec, &err)
				  : spec_name_parse(judge->catalog, line, &spec, &err);

	if (r < 0)
		report_broken(judge, label, err.msg);
	else
		judge_spec(judge, &spec);
}

static int judge_lines(struct judge *judge, const char *path)
{
	FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
	char *line = NULL, label[32];
	size_t allocated = 0;
	uint64_t number = 0;
	ssize_t length;
	int failed;

	if (!file)
		return ctl_file_error(path);
	while ((length = getline(&line, &allocated, file)) >= 0) {
		number++;
		while (length > 0 && strchr("\r\n", line[length - 1]))
			line[--length] = '\0';
		/* The header of a CSV file is known by its first column. */
		if (length == 0 || (number == 1 && strncmp(line, "family,", 7) == 0))
			continue;
		(void)snprintf(label, sizeof(label), "line %llu", (unsigned long long)number);
		judge_line(judge, label, line);
		if ((number & 0x3fff) == 0)
			ctl_progress(&judge->progress, number, 0);
	}
	failed = ferror(file);
	free(line);
	if (file != stdin)
		(void)fclose(file);
	if (failed)
		(void)fprintf(stderr, "fmhactl: %s: cannot be read\n", path);
	return failed ? CTL_IO : CTL_OK;
}

static int judge_argument(struct judge *judge, const char *argument)
{
	struct fmha_error err = {0};
	size_t length = strlen(argument);
	FILE *file;

	if (length > 5 && strcmp(argument + length - 5, ".json") == 0) {
		if (spec_json_read(judge->catalog, argument, judge_json, judge, &err) == 0)
			return CTL_OK;
		(void)fprintf(stderr, "fmhactl: %s\n", err.msg);
		return CTL_IO;
	}
	/* A name is never a path: "-" is the only thing they share. */
	file = strcmp(argument, "-") == 0 || strchr(argument, '/') ? NULL : fopen(argument, "re");
	if (!file && strcmp(argument, "-") != 0 && !strchr(argument, '/')) {
		judge_line(judge, argument, argument);
		return CTL_OK;
	}
	if (file)
		(void)fclose(file);
	return judge_lines(judge, argument);
}

static int validate(int argc, char **argv)
{
	struct judge judge = {.progress = {.title = "validating"}};
	struct fmha_error err = {0};
	int r = CTL_OK;

	if (cli_next(&ctl_validate.usage, argc, argv, &judge) != -1)
		return CTL_USAGE;
	if (optind == argc)
		return ctl_usage_error("validate: no spec is given");
	if (spec_catalog_load(NULL, fmha_backends, &judge.catalog, &err) < 0)
		return ctl_error(&err);
	for (int i = optind; i < argc && r == CTL_OK; i++)
		r = judge_argument(&judge, argv[i]);
	ctl_progress_end(&judge.progress);
	(void)fprintf(stderr, "%llu specs, %llu invalid, %llu with warnings\n",
		      (unsigned long long)judge.n_specs, (unsigned long long)judge.n_invalid,
		      (unsigned long long)judge.n_warned);
	spec_catalog_free(judge.catalog);
	return r != CTL_OK ? r : judge.n_invalid ? CTL_FAILED : CTL_OK;
}

const struct ctl_command ctl_validate = {
	.usage =
		{.name = "fmhactl validate",
		 .brief = "is this kernel spec one that can exist? (no daemon)",
		 .synopsis = "[--quiet] SPEC...",
		 .text = "Each SPEC is a kernel's canonical name, a .json file with one spec or a "
			 "list of them, or another file (- is standard input) with a name or a CSV "
			 "row a line, as written by `fmhactl enumerate`. A spec in JSON is an "
			 "object "
			 "of the record's fields; family and gfx_arch are required, and tile, "
			 "wave, "
			 "warp and pads may be lists.\n\n"
			 "Exit code 0 when every spec is valid, 1 when one is not, 5 when a file "
			 "cannot be read.",
		 .operands = "FILE",
		 .tables = {own_options}},
	.run = validate,
};
