/* SPDX-License-Identifier: MIT */
/* fmhactl enumerate: the kernels that an arch can have, counted or written out. No daemon. */
#include "ctl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <catalogue/backends.h>
#include <specs/row.h>
#include <specs/set.h>
#include <specs/space.h>
#include <specs/validate.h>

#define MAX_HEAD_DIMS 32
#define MAX_FILES     16

enum format { FORMAT_CSV, FORMAT_JSON, FORMAT_NAMES };

struct request {
	struct ctl_target target;
	struct spec_space_options space;
	struct spec_head_dims head_dims[MAX_HEAD_DIMS];
	const char *profile_name;
	const char *receipt_text; /* NULL: none is asked for */
	const char *filter_text;
	struct cli_texts filter_files, set_files;
	const char *out_path;
	uint32_t format; /* enum format */
	bool count_only;
};

struct job {
	struct spec_catalog *catalog;
	struct spec_filter *filter;
	struct spec_filter *file_filters[MAX_FILES]; /* all of them have to hold */
	int n_file_filters;
	struct spec_space *space; /* NULL: a set's kernels */
	struct spec_set *set;
	int profile; /* -1: none */
	bool is_own; /* of this build's kernels, which have more columns */
};

enum { OPTION_HDIMS = 1 };

static const struct cli_option own_options[] = {
	{"arch", 0, "ARCH", "see `fmhactl archs`", CLI_TO(TEXT, struct request, space.arch)},
	{"rules", 0, "gpu|cpu|ck",
	 "which of the arch's kernel spaces: gpu or cpu, what this build can run (default), or ck, "
	 "AMD's, which --config, --receipt and --mode exhaustive are about",
	 CLI_TO(TEXT, struct request, space.rules)},
	{"variant", 0, "fwd|splitkv|pagedkv|appendkv|batch_prefill|bwd",
	 "only these, as shipped (default: all of them)",
	 CLI_TO(TEXT, struct request, space.variant)},
	{"config", 0, "SWEEP", "a shipped sweep by name (receipt0_fwd, fwd_ci, ...) or a JSON file",
	 CLI_TO(TEXT, struct request, space.config)},
	{"receipt", 0, "N", "one of `fmhactl profiles`, by number or name (default 0)",
	 CLI_TO(TEXT, struct request, receipt_text)},
	{"profile", 0, "P",
	 "the profile's receipt, and of that what validates and it keeps; by name or number",
	 CLI_TO(TEXT, struct request, profile_name)},
	{"mode", 0, "rules|exhaustive", "default: rules",
	 CLI_TO(WORD, struct request, space.exhaustive)},
	{"hdims", OPTION_HDIMS, "LIST", "only these head dims, such as 64,192x128", CLI_OWN},
	{"filter", 0, "EXPR", "such as \"hdim_q == 128 and pipeline == 'qr_async' and not lse\"",
	 CLI_TO(TEXT, struct request, filter_text)},
	{"filter-file", 0, "FILE",
	 "a file with such an expression, of any number of lines, with # before comments; may be "
	 "given again; what is kept, all of them and --filter let through",
	 CLI_RANGE(TEXTS, struct request, filter_files, 0, MAX_FILES)},
	{"set", 0, "FILE",
	 "the kernels that a kernel set declares, a JSON file as specs/README.md explains it; "
	 "may be given again: all of them together",
	 CLI_RANGE(TEXTS, struct request, set_files, 0, MAX_FILES)},
	{"count", 0, NULL, "print the number of kernels and nothing else",
	 CLI_TO(FLAG, struct request, count_only)},
	{"format", 0, "csv|json|names", "default: csv, 59 columns with a header",
	 CLI_TO(WORD, struct request, format)},
	{"out", 0, "FILE", "write there instead of to standard output",
	 CLI_TO(TEXT, struct request, out_path)},
	CLI_END};

/* "64,192x128" */
static int parse_head_dims(void *owner, int option, const char *text)
{
	struct request *request = owner;
	size_t n = 0;

	(void)option;
	while (*text) {
		char *end;
		unsigned long q = strtoul(text, &end, 10), v = q;

		if (end != text && *end == 'x') {
			text = end + 1;
			v = strtoul(text, &end, 10);
		}
		if (end == text || (*end && *end != ',') || q == 0 || v == 0 || q > 65535 ||
		    v > 65535 || n == MAX_HEAD_DIMS)
			return ctl_usage_error("--hdims: expected a list such as 64,192x128");
		request->head_dims[n++] = (struct spec_head_dims){(uint16_t)q, (uint16_t)v};
		text = end + (*end == ',');
	}
	request->space.restrict_hdims = request->head_dims;
	request->space.n_restrict_hdims = n;
	return 0;
}

static int parse_options(int argc, char **argv, struct request *request)
{
	int r = ctl_options(&ctl_enumerate, argc, argv, &request->target, parse_head_dims, request);

	if (r != 0)
		return r;
	if (request->target.json)
		request->format = FORMAT_JSON;
	if (!request->space.arch && !request->set_files.n)
		return ctl_usage_error("enumerate: --arch is missing; see `fmhactl archs`");
	if (request->profile_name && request->receipt_text)
		return ctl_usage_error("enumerate: --profile and --receipt exclude each other");
	if (request->set_files.n &&
	    (request->space.variant || request->space.config || request->receipt_text ||
	     request->space.exhaustive || request->space.restrict_hdims))
		return ctl_usage_error("enumerate: a kernel set says all that --variant, --config, "
				       "--receipt, --mode and --hdims say; use --filter");
	return 0;
}

/* A receipt that no profile is named for would be enumerated as the rules' "otherwise". */
static int take_receipt(struct request *request, const struct spec_catalog *catalog)
{
	int profile = spec_profile_parse(catalog, request->receipt_text);

	if (profile >= 0 && spec_profile_receipt(catalog, profile) >= 0) {
		request->space.receipt = spec_profile_receipt(catalog, profile);
		return 0;
	}
	if (profile >= 0)
		return ctl_usage_error("--receipt %s: the profile has none", request->receipt_text);
	(void)fprintf(stderr, "fmhactl: --receipt %s: there is none; there are",
		      request->receipt_text);
	for (int i = 0; i < spec_profile_count(catalog); i++) {
		if (spec_profile_receipt(catalog, i) >= 0)
			(void)fprintf(stderr, " %d (%s)", spec_profile_receipt(catalog, i),
				      spec_profile_name(catalog, i));
	}
	(void)fputc('\n', stderr);
	return CTL_USAGE;
}

/*
 * A profile names what an integration asks for, of whichever kernels: of ours, unless --rules says
 * otherwise. Receipts, sweeps and exhaustive mode are words of CK alone: whoever uses them is told.
 */
static void choose_rules(struct request *request, const struct spec_catalog *catalog)
{
	int arch = spec_arch_find(catalog, request->space.arch);
	const char *second = arch < 0 ? NULL : spec_arch_rules(catalog, arch, 1);
	bool of_ck = request->receipt_text || request->space.config || request->space.exhaustive;

	if (request->space.rules || !second)
		return;
	if (!of_ck)
		request->space.rules = spec_arch_rules(catalog, arch, 0);
	else
		(void)fprintf(stderr,
			      "fmhactl: by the rules '%s', whose kernels are described here but "
			      "are not this build's\n",
			      second);
}

static int compile_filter(const struct job *job, const char *text, struct spec_filter **ret,
			  const char *where)
{
	char explain[SPEC_EXPLAIN_BYTES];
	struct fmha_error err = {0};

	if (spec_filter_compile(job->catalog, text, ret, explain, &err) == 0)
		return 0;
	(void)fprintf(stderr, "fmhactl: %s: %s\n", where, explain);
	return CTL_USAGE;
}

static int read_filter_file(struct job *job, const char *path)
{
	char explain[SPEC_EXPLAIN_BYTES];
	struct fmha_error err = {0};

	if (spec_filter_read(job->catalog, path, &job->file_filters[job->n_file_filters], explain,
			     &err) == 0) {
		job->n_file_filters++;
		return 0;
	}
	if (err.code != FMHA_EINVAL)
		return ctl_error(&err);
	return ctl_usage_error("%s%s%s", explain[0] ? path : "", explain[0] ? ": " : "",
			       explain[0] ? explain : err.msg);
}

/* By its name or number; what it is made of. */
static int take_profile(struct request *request, struct job *job)
{
	job->profile = spec_profile_parse(job->catalog, request->profile_name);
	if (job->profile < 0)
		return ctl_usage_error("profile '%s': there is none; see `fmhactl profiles`",
				       request->profile_name);
	if (spec_profile_kernels_of(job->catalog, job->profile) >= 0)
		request->space.receipt = spec_profile_kernels_of(job->catalog, job->profile);
	request->space.all_types = spec_profile_all_types(job->catalog, job->profile);
	return 0;
}

static int read_filters(const struct request *request, struct job *job)
{
	int r = request->filter_text
			? compile_filter(job, request->filter_text, &job->filter, "filter")
			: 0;

	for (int i = 0; i < (int)request->filter_files.n && r == 0; i++)
		r = read_filter_file(job, request->filter_files.at[i]);
	return r;
}

static int read_sets(const struct request *request, struct job *job)
{
	struct fmha_error err = {0};

	job->set = spec_set_new(job->catalog);
	if (!job->set)
		return ctl_error(&(struct fmha_error){.code = FMHA_ENOMEM});
	for (int i = 0; i < (int)request->set_files.n; i++)
		if (spec_set_add_file(job->set, request->set_files.at[i], request->space.arch,
				      request->space.rules, &err) < 0)
			return err.code == FMHA_EINVAL ? ctl_usage_error("%s", err.msg)
						       : ctl_error(&err);
	for (size_t i = 0; i < spec_set_size(job->set); i++) {
		bool is_own = spec_pipeline_flags(job->catalog,
						  spec_set_at(job->set, i)->pipeline) >= 0;

		if (i == 0)
			job->is_own = is_own;
		else if (is_own != job->is_own && request->format == FORMAT_CSV &&
			 !request->count_only)
			return ctl_usage_error(
				"enumerate: AMD's kernels and this build's in one table, which "
				"have not the same columns: --rules picks, --format json has both");
	}
	return 0;
}

static int make_space(struct request *request, struct job *job)
{
	struct fmha_error err = {0};

	choose_rules(request, job->catalog);
	if (spec_space_new(job->catalog, &request->space, &job->space, &err) < 0)
		return err.code == FMHA_EINVAL ? ctl_usage_error("%s", err.msg) : ctl_error(&err);
	job->is_own = spec_space_is_own(job->space);
	if (spec_space_count(job->space) == 0)
		(void)fputs("fmhactl: this space is empty\n", stderr);
	return 0;
}

static int prepare(struct request *request, struct job *job)
{
	struct fmha_error err = {0};
	int r = 0;

	job->profile = -1;
	if (spec_catalog_load(NULL, fmha_backends, &job->catalog, &err) < 0)
		return ctl_error(&err);
	if (request->receipt_text)
		r = take_receipt(request, job->catalog);
	if (r == 0 && request->profile_name)
		r = take_profile(request, job);
	if (r == 0)
		r = read_filters(request, job);
	if (r == 0)
		r = request->set_files.n ? read_sets(request, job) : make_space(request, job);
	return r;
}

static bool keeps(const struct job *job, const struct kernel_spec *spec)
{
	for (int i = 0; i < job->n_file_filters; i++)
		if (!spec_filter_match(job->file_filters[i], spec))
			return false;
	return job->profile < 0 || (spec_profile_keeps(job->catalog, job->profile, spec) &&
				    spec_validate(job->catalog, spec, NULL) == 0);
}

/* The kernels of a space or of a set, those that the filters and the profile keep. */
struct walk {
	const struct job *job;
	struct spec_iter *iter; /* NULL: of a set */
	size_t index;
};

static const struct kernel_spec *walk_next(struct walk *walk)
{
	const struct job *job = walk->job;
	const struct kernel_spec *spec;

	do {
		if (walk->iter)
			spec = spec_iter_next(walk->iter);
		else if (walk->index < spec_set_size(job->set))
			spec = spec_set_at(job->set, walk->index++);
		else
			spec = NULL;
		if (spec && !walk->iter && job->filter && !spec_filter_match(job->filter, spec))
			continue;
		if (!spec || keeps(job, spec))
			return spec;
	} while (true);
}

static size_t format_spec(const struct job *job, enum format format, bool is_first,
			  const struct kernel_spec *spec, char *text)
{
	size_t n;

	switch (format) {
	case FORMAT_CSV:
		return spec_csv_row(job->catalog, spec, text);
	case FORMAT_JSON:
		text[0] = is_first ? ' ' : ',';
		n = 1 + spec_json(job->catalog, spec, text + 1);
		break;
	case FORMAT_NAMES:
	default:
		n = spec_name_format(job->catalog, spec, text);
	}
	text[n] = '\n';
	return n + 1;
}

static size_t format_head(const struct job *job, enum format format, char *text)
{
	if (format == FORMAT_CSV)
		return spec_csv_header(job->is_own, text);
	if (format == FORMAT_NAMES)
		return 0;
	text[0] = '[';
	text[1] = '\n';
	return 2;
}

/* Writes everything, or only counts when @out is NULL. */
static int walk_all(const struct job *job, enum format format, FILE *out, uint64_t *ret_n)
{
	struct ctl_progress progress = {.title = "enumerating"};
	struct walk walk = {.job = job};
	const struct kernel_spec *spec;
	char text[SPEC_JSON_BYTES + 2];
	bool failed = false;
	uint64_t n = 0;

	if (job->space) {
		walk.iter = spec_iter_new(job->space, job->filter);
		if (!walk.iter)
			return ctl_error(&(struct fmha_error){.code = FMHA_ENOMEM});
	}
	if (out)
		failed = fwrite(text, 1, format_head(job, format, text), out) == 0 &&
			 format != FORMAT_NAMES;
	while (!failed && (spec = walk_next(&walk))) {
		if (out) {
			size_t length = format_spec(job, format, n == 0, spec, text);

			failed = fwrite(text, 1, length, out) != length;
		}
		if ((++n & 0x3fff) == 0)
			ctl_progress(&progress, n, 0);
	}
	if (out && format == FORMAT_JSON && !failed)
		failed = fputs("]\n", out) < 0;
	ctl_progress_end(&progress);
	spec_iter_free(walk.iter);
	*ret_n = n;
	if (!failed)
		return CTL_OK;
	(void)fprintf(stderr, "fmhactl: cannot write: %s\n", strerror(errno));
	return CTL_IO;
}

static int write_out(const struct job *job, const struct request *request)
{
	FILE *out = request->out_path ? fopen(request->out_path, "we") : stdout;
	uint64_t n;
	int r;

	if (!out)
		return ctl_file_error(request->out_path);
	r = walk_all(job, request->format, out, &n);
	if (request->out_path && fclose(out) != 0 && r == CTL_OK)
		return ctl_file_error(request->out_path);
	return r;
}

static int count(const struct job *job)
{
	bool is_plain = job->space && !job->filter && !job->n_file_filters && job->profile < 0;
	uint64_t n = is_plain ? spec_space_count(job->space) : 0;
	int r = CTL_OK;

	if (!is_plain)
		r = walk_all(job, FORMAT_CSV, NULL, &n);
	if (r == CTL_OK) /* JSON, too */
		(void)printf("%llu\n", (unsigned long long)n);
	return r;
}

static int enumerate(int argc, char **argv)
{
	struct request request = {0};
	struct job job = {0};
	int r = parse_options(argc, argv, &request);

	if (r != 0)
		return r;
	r = prepare(&request, &job);
	if (r == 0)
		r = request.count_only ? count(&job) : write_out(&job, &request);
	spec_space_free(job.space);
	spec_set_free(job.set);
	spec_filter_free(job.filter);
	for (int i = 0; i < job.n_file_filters; i++)
		spec_filter_free(job.file_filters[i]);
	spec_catalog_free(job.catalog);
	return r;
}

const struct ctl_command ctl_enumerate = {
	.usage = {.name = "fmhactl enumerate",
		  .brief = "the kernels that an arch can have (no daemon)",
		  .synopsis = "--arch ARCH | --set FILE [OPTION...]",
		  .text = "Counts or writes out the kernels that an arch can have.",
		  .tables = {own_options, ctl_json_option}},
	.run = enumerate,
};
