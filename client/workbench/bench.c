/* SPDX-License-Identifier: MIT */
/* bench.c: measures kernels: the command, its options, and the order of its work. */
#include "bench.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include <catalogue/backends.h>
#include <proto/error.h>
#include <proto/problem.h>
#include <specs/filter.h>
#include <specs/space.h>

#define SAVE_EVERY_NS 10000000000

struct request {
	struct bench_options options;
	struct bench_sweep *sweep; /* NULL: all */
	struct recipe recipe;
	struct bench_report report;
	const char *from;
	bool compare;
	double tolerance;
};

/* ---- options ---- */

static const struct cli_option own_options[] = {
	{"tier", 0, "smoke|full|nightly|FILE",
	 "a tier of the shape matrix; or FILE.json, a sweep of one's own",
	 CLI_TO(TEXT, struct request, options.tier)},
	{"kernels", 0, "chosen|all",
	 "the kernel that the planner takes (default), or every one that can run the shape",
	 CLI_TO(WORD, struct request, options.all_kernels)},
	{"filter", 0, "EXPR", "of all kernels those for which this holds, as in \"tile_m0 == 128\"",
	 CLI_TO(TEXT, struct request, options.kernel_filter)},
	{"filter-file", 0, "FILE",
	 "a file with such an expression, of any number of lines, with # before comments; may be "
	 "given again; all of them and --filter have to hold",
	 CLI_RANGE(TEXTS, struct request, options.filter_files, 0, BENCH_MAX_FILTERS)},
	{"shapes", 0, "EXPR",
	 "of the tier those for which this holds, as in \"op == 'forward' and hdim_q == 128\"",
	 CLI_TO(TEXT, struct request, options.shape_filter)},
	{"config", 0, "SWEEP",
	 "kernels and shapes that a sweep of AMD's dispatcher asks for: a shipped one by name, or "
	 "a "
	 "JSON file",
	 CLI_TO(TEXT, struct request, options.sweep)},
	{"variant", 0, "fwd|splitkv|pagedkv|appendkv|batch_prefill|bwd",
	 "only kernels of these families, and shapes that they can run",
	 CLI_TO(TEXT, struct request, options.variant)},
	{"max-kernels", 0, "N", "at most N kernels a shape, the likeliest first",
	 CLI_RANGE(INT, struct request, options.max_kernels, 1, INT32_MAX)},
	{"max-shapes", 0, "N", "the first N shapes",
	 CLI_RANGE(INT, struct request, options.max_shapes, 1, INT32_MAX)},
	{"workers", 0, "N",
	 "compile so many kernels at once before measuring (default: half the cores)",
	 CLI_RANGE(INT, struct request, options.workers, 0, 64)},
	{"warmup", 0, "N", "runs that are not counted (default 5)",
	 CLI_RANGE(INT, struct request, options.warmup, 0, 1000000)},
	{"repeat", 0, "N", "runs that are (default 20)",
	 CLI_RANGE(INT, struct request, options.repeat, 1, 1000000)},
	{"limit-ms", 0, "N",
	 "no further run of a kernel after so long, but three at least (default 1000)",
	 CLI_RANGE(INT, struct request, options.limit_ms, 1, 86400000)},
	{"cache", 0, "warm|rotate|flush",
	 "what a run finds in the caches: the last run's tensors (default); another copy's; those "
	 "of a large copy between runs",
	 CLI_TO(WORD, struct request, options.cache)},
	{"cache-mib", 0, "N", "what exceeds them (default 256)",
	 CLI_RANGE(INT, struct request, options.cache_mib, 1, 65536)},
	{"check", 0, NULL, "compare each kernel's results with the reference",
	 CLI_TO(FLAG, struct request, options.check)},
	{"all-devices", 0, NULL, "one after the other",
	 CLI_TO(FLAG, struct request, options.all_devices)},
	{"no-roofs", 0, NULL, "do not measure the device's roofs",
	 CLI_TO(FLAG, struct request, options.no_roofs)},
	{"roof-tflops", 0, "X", "take this for all data types",
	 CLI_RANGE(REAL, struct request, options.roof_tflops, -DBL_MAX, DBL_MAX)},
	{"roof-gbs", 0, "X", "take this for the memory",
	 CLI_RANGE(REAL, struct request, options.roof_gbs, -DBL_MAX, DBL_MAX)},
	{"out", 0, "FILE", "the report as JSON, saved as it grows",
	 CLI_TO(TEXT, struct request, options.out)},
	{"csv", 0, "FILE", "a line for each row", CLI_TO(TEXT, struct request, options.csv)},
	{"html", 0, "FILE", "a page with drawings", CLI_TO(TEXT, struct request, options.html)},
	{"resume", 0, NULL, "go on where --out's FILE ends",
	 CLI_TO(FLAG, struct request, options.resume)},
	{"from", 0, "FILE", "measure nothing: summary, --csv and --html of that report",
	 CLI_TO(TEXT, struct request, from)},
	{"compare", 0, NULL,
	 "of two reports, BEFORE and AFTER; exit code 1 when the second is worse",
	 CLI_TO(FLAG, struct request, compare)},
	{"tolerance", 0, "PERCENT", "slower by less than this is the same (default 5)",
	 CLI_RANGE(REAL, struct request, tolerance, -DBL_MAX, DBL_MAX)},
	{"verbose", 0, NULL, "every row", CLI_TO(FLAG, struct request, options.verbose)},
	CLI_END};

static int take_shape(void *owner, int option, const char *value)
{
	struct request *request = owner;

	if (problem_is_option(option))
		return problem_option(&request->recipe.problem, option, value);
	return recipe_option(&request->recipe, option, value);
}

static int request_parse(struct request *request, int argc, char **argv)
{
	struct bench_options *o = &request->options;
	int r = ctl_options_before(&ctl_bench, argc, argv, &o->target, take_shape, request);

	if (r != 0)
		return r;
	o->all_kernels |= o->kernel_filter || o->filter_files.n > 0 || o->sweep;
	if (request->compare && argc - optind != 2)
		return ctl_usage_error("bench --compare: two reports, BEFORE and AFTER");
	if (!request->compare && optind < argc)
		return ctl_usage_error("bench: what is '%s'?", argv[optind]);
	if (o->resume && !o->out)
		return ctl_usage_error("bench --resume: needs --out");
	return 0;
}

/* ---- what a report says of its surroundings ---- */

/* The first line of a file, or @otherwise. Given. */
static char *first_line(const char *path, const char *key, const char *otherwise)
{
	FILE *file = fopen(path, "re");
	char line[256], *found = NULL;

	while (file && !found && fgets(line, sizeof(line), file)) {
		char *value = strchr(line, ':');

		if (strncmp(line, key, strlen(key)) != 0)
			continue;
		line[strcspn(line, "\n")] = '\0';
		found = strdup(value ? value + 1 + strspn(value + 1, " ") : line);
	}
	if (file)
		(void)fclose(file);
	return found ? found : strdup(otherwise);
}

static char *host_text(void)
{
	char *model = first_line("/proc/cpuinfo", "model name", "unknown CPU"), *text = NULL;
	struct utsname name;

	if (uname(&name) < 0 ||
	    asprintf(&text, "%s, %ld cores, %s %s", model ? model : "",
		     sysconf(_SC_NPROCESSORS_ONLN), name.sysname, name.release) < 0)
		text = NULL;
	free(model);
	return text;
}

static char *driver_text(const struct fmha_device_info *info)
{
	struct utsname name;
	char text[192] = "";

	if (!strcmp(info->backend, "cuda"))
		return first_line("/proc/driver/nvidia/version", "NVRM", "");
	if (!strcmp(info->backend, "hip"))
		return first_line("/sys/module/amdgpu/version", "", "amdgpu");
	if (uname(&name) == 0)
		(void)snprintf(text, sizeof(text), "%s %s", name.sysname, name.release);
	return strdup(text);
}

/* What compiled the kernels: a CPU's are part of this build. */
static char *compiler_text(const struct fmha_device_info *info)
{
	if (!strcmp(info->backend, "cpu") || !strcmp(info->backend, "fake"))
		return strdup("cc " __VERSION__);
	return strdup("");
}

static void request_describe(struct request *request, int argc, char **argv)
{
	const struct bench_options *o = &request->options;
	struct bench_report *report = &request->report;
	size_t n = sizeof("fmhactl bench") + 1;
	char now[64];
	time_t seconds = time(NULL);
	struct tm tm;

	(void)strftime(now, sizeof(now), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&seconds, &tm));
	report->created = strdup(now);
	for (int i = 1; i < argc; i++)
		n += strlen(argv[i]) + 1;
	report->command = malloc(n);
	if (report->command)
		(void)strcpy(report->command, "fmhactl bench");
	for (int i = 1; report->command && i < argc; i++) {
		(void)strcat(report->command, " ");
		(void)strcat(report->command, argv[i]);
	}
	report->host = host_text();
	report->settings = cJSON_CreateObject();
	cJSON_AddStringToObject(report->settings, "shapes", o->tier ? o->tier : "options");
	cJSON_AddStringToObject(report->settings, "kernels", o->all_kernels ? "all" : "chosen");
	cJSON_AddNumberToObject(report->settings, "warmup", (double)o->warmup);
	cJSON_AddNumberToObject(report->settings, "repeat", (double)o->repeat);
	cJSON_AddStringToObject(report->settings, "cache",
				o->cache == BENCH_WARM     ? "warm"
				: o->cache == BENCH_ROTATE ? "rotate"
							   : "flush");
	cJSON_AddBoolToObject(report->settings, "checked", o->check);
}

/* ---- measuring ---- */

/* A shape that nothing runs is a row, too. */
static int note_unsupported(struct bench_device *report, const struct bench_shape *shape,
			    const struct fmha_error *err)
{
	struct bench_row *row = bench_add_row(report);

	if (!row)
		return ctl_usage_error("out of memory");
	row->shape = strdup(shape->text);
	row->group = strdup(shape->group);
	row->kernel = strdup("");
	row->failure = strdup(err->msg);
	row->sizes = shape->shape;
	return 0;
}

static int list_items(const struct bench_lister *lister, const struct bench_shapes *shapes,
		      struct bench_device *report, struct bench_items *items)
{
	struct ctl_progress progress = {.title = "shapes planned"};
	int r = 0;

	for (size_t i = 0; i < shapes->n && r == 0; i++) {
		struct fmha_error err = {0};

		ctl_progress(&progress, i, shapes->n);
		if (bench_list_kernels(lister, shapes, i, items, &err) == 0)
			continue;
		ctl_progress_end(&progress);
		if (err.code == FMHA_ECONN)
			r = ctl_error(&err);
		else if (!bench_find_row(report, shapes->list[i].text, ""))
			r = note_unsupported(report, &shapes->list[i], &err);
	}
	ctl_progress_end(&progress);
	return r;
}

/* Those that the resumed report has are left out. */
static void drop_measured(const struct bench_device *report, const struct bench_shapes *shapes,
			  struct bench_items *items)
{
	size_t n = 0;

	for (size_t i = 0; i < items->n; i++) {
		struct bench_item *item = &items->list[i];

		if (bench_find_row(report, shapes->list[item->shape].text, item->kernel))
			free(item->kernel);
		else
			items->list[n++] = *item;
	}
	items->n = n;
}

static int measure_items(struct request *request, struct bench_run *run,
			 const struct bench_shapes *shapes, const struct bench_items *items)
{
	struct ctl_progress progress = {.title = "kernels measured", .shows_time_left = true};
	int64_t saved = ctl_now_ns();
	int r = 0;

	for (size_t i = 0; i < items->n && r == 0;) {
		size_t end = i;

		while (end < items->n && items->list[end].shape == items->list[i].shape)
			end++;
		ctl_progress(&progress, i, items->n);
		r = bench_measure(run, shapes, items, i, end);
		i = end;
		if (r == 0 && request->options.out && ctl_now_ns() - saved > SAVE_EVERY_NS) {
			saved = ctl_now_ns();
			r = bench_write(&request->report, request->options.out);
		}
	}
	ctl_progress_end(&progress);
	return r;
}

/* @path: of a file, or NULL: @text is the expression. */
static int add_filter(struct bench_lister *lister, const char *path, const char *text)
{
	struct spec_filter **filter = &lister->filters[lister->n_filters];
	char explain[SPEC_EXPLAIN_BYTES] = "";
	struct fmha_error err = {0};
	int r = path ? spec_filter_read(lister->catalog, path, filter, explain, &err)
		     : spec_filter_compile(lister->catalog, text, filter, explain, &err);

	lister->n_filters += r == 0;
	if (r == 0)
		return 0;
	if (err.code != FMHA_EINVAL)
		return ctl_error(&err);
	(void)fprintf(stderr, "fmhactl: %s: %s\n", path ? path : "--filter",
		      explain[0] ? explain : err.msg);
	return CTL_USAGE;
}

static int lister_init(struct bench_lister *lister, const struct bench_options *options)
{
	struct fmha_error err = {0};
	int r = 0;

	if (!options->kernel_filter && options->filter_files.n == 0)
		return 0;
	if (spec_catalog_load(NULL, fmha_backends, &lister->catalog, &err) < 0)
		return ctl_error(&err);
	if (options->kernel_filter)
		r = add_filter(lister, NULL, options->kernel_filter);
	for (uint32_t i = 0; i < options->filter_files.n && r == 0; i++)
		r = add_filter(lister, options->filter_files.at[i], NULL);
	return r;
}

static int measure_device(struct request *request, struct fmha_device *device,
			  struct bench_device *report, const struct bench_shapes *shapes)
{
	const struct bench_options *o = &request->options;
	struct bench_lister lister = {.options = o, .sweep = request->sweep, .device = device};
	struct bench_run run = {.options = o, .device = device, .report = report};
	struct bench_items items = {0};
	struct fmha_error err = {0};
	int r = lister_init(&lister, o);

	if (r == 0)
		r = list_items(&lister, shapes, report, &items);
	if (r == 0)
		drop_measured(report, shapes, &items);
	/* A CPU's kernels are part of the daemon. */
	if (r == 0 && strcmp(report->info.backend, "cpu") != 0 && o->workers > 0)
		bench_compile(o, shapes, &items);
	if (r == 0)
		bench_measure_roofs(report, device, o, shapes);
	if (r == 0 && o->cache == BENCH_FLUSH &&
	    bench_flush_init(&run.flush, device, o->cache_mib, &err) < 0)
		r = ctl_error(&err);
	if (r == 0)
		r = measure_items(request, &run, shapes, &items);
	bench_apply_roofs(report);
	bench_flush_deinit(&run.flush);
	bench_items_deinit(&items);
	for (int i = 0; i < lister.n_filters; i++)
		spec_filter_free(lister.filters[i]);
	lister.catalog = spec_catalog_free(lister.catalog);
	return r;
}

/* The device's part of the report: the resumed one, or a new one. */
static struct bench_device *part_of(struct bench_report *report,
				    const struct fmha_device_info *info)
{
	struct bench_device *devices;

	for (size_t i = 0; i < report->n_devices; i++)
		if (report->devices[i].info.device == info->device)
			return &report->devices[i];
	devices = realloc(report->devices, (report->n_devices + 1) * sizeof(*devices));
	if (!devices)
		return NULL;
	report->devices = devices;
	devices[report->n_devices] = (struct bench_device){
		.info = *info, .driver = driver_text(info), .compiler = compiler_text(info)};
	return &devices[report->n_devices++];
}

static int measure_on(struct request *request, uint32_t index, const struct bench_shapes *shapes)
{
	struct ctl_target *target = &request->options.target;
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	_cleanup_(ctl_device_freep) struct fmha_device *device = NULL;
	struct fmha_device_info info;
	struct bench_device *part;
	struct fmha_error err = {0};
	int r;

	target->device = index;
	r = ctl_open(target, &client, &device);
	if (r != 0)
		return r;
	if (fmha_device_info(device, &info, &err) < 0)
		return ctl_error(&err);
	part = part_of(&request->report, &info);
	return part ? measure_device(request, device, part, shapes)
		    : ctl_usage_error("out of memory");
}

static int measure_all(struct request *request, const struct bench_shapes *shapes)
{
	struct fmha_client_info info;
	struct fmha_client *client;
	struct fmha_error err = {0};
	int r = ctl_connect(&request->options.target, &client);

	if (r != 0)
		return r;
	if (fmha_client_info(client, &info, &err) < 0)
		r = ctl_error(&err);
	client = fmha_client_free(client);
	if (r != 0)
		return r;
	free(request->report.server);
	request->report.server = strdup(info.server);
	if (!request->options.all_devices)
		return measure_on(request, request->options.target.device, shapes);
	for (uint32_t i = 0; i < info.n_devices && r == 0; i++)
		r = measure_on(request, i, shapes);
	return r;
}

/* ---- the command ---- */

static int write_out(struct request *request)
{
	const struct bench_options *o = &request->options;
	int r = 0;

	if (o->out && !request->from)
		r = bench_write(&request->report, o->out);
	if (r == 0 && o->csv)
		r = bench_write_csv(&request->report, o->csv);
	if (r == 0 && o->html)
		r = bench_write_html(&request->report, o->html);
	if (r != 0)
		return r;
	if (o->target.json)
		return ctl_print_json(bench_to_json(&request->report));
	bench_print_summary(&request->report, o->verbose || !o->tier);
	return CTL_OK;
}

/* A result that is wrong is a failed check; a shape that nothing runs is not. */
static int verdict(const struct bench_report *report)
{
	for (size_t d = 0; d < report->n_devices; d++)
		for (size_t i = 0; i < report->devices[d].n_rows; i++)
			if (report->devices[d].rows[i].error > report->devices[d].rows[i].allowed)
				return CTL_FAILED;
	return CTL_OK;
}

static int measure(struct request *request, int argc, char **argv)
{
	struct bench_shapes shapes = {0};
	int64_t start = ctl_now_ns();
	int r = bench_sweep_new(&request->options, &request->sweep);

	if (r == 0)
		r = bench_list_shapes(&request->options, request->sweep, &request->recipe, &shapes);
	if (r == 0 && shapes.n == 0)
		r = ctl_usage_error("bench: no shape is left of %s",
				    request->options.tier ? request->options.tier : "the options");
	if (r == 0 && request->options.resume && access(request->options.out, F_OK) == 0)
		r = bench_read(request->options.out, &request->report);
	else if (r == 0)
		request_describe(request, argc, argv);
	if (r == 0)
		r = measure_all(request, &shapes);
	request->report.seconds += (double)(ctl_now_ns() - start) / 1e9;
	bench_shapes_deinit(&shapes);
	request->sweep = bench_sweep_free(request->sweep);
	return r;
}

static int compare(const char *before_path, const char *after_path, double tolerance)
{
	struct bench_report before = {0}, after = {0};
	int r = bench_read(before_path, &before);

	if (r == 0)
		r = bench_read(after_path, &after);
	if (r == 0)
		r = bench_compare(&before, &after, tolerance / 100);
	bench_report_deinit(&before);
	bench_report_deinit(&after);
	return r;
}

static int bench(int argc, char **argv)
{
	struct request request = {.options = {.target = CTL_TARGET_INIT,
					      .warmup = 5,
					      .repeat = 20,
					      .limit_ms = 1000,
					      .cache_mib = 256,
					      .workers = (sysconf(_SC_NPROCESSORS_ONLN) + 1) / 2},
				  .tolerance = 5};
	char **all = argv;
	int n_all = argc, r;
	const char *verb = ctl_take_verb(&argc, &argv);
	uint32_t op = FMHA_FORWARD;

	if (verb[0] && problem_parse_op(verb, &op) < 0)
		return ctl_usage_error("bench: forward, backward, append or merge, not '%s'", verb);
	recipe_init(&request.recipe, op);
	r = request_parse(&request, argc, argv);
	if (r == 0 && request.compare) {
		r = compare(argv[optind], argv[optind + 1], request.tolerance);
	} else if (r == 0) {
		r = request.from ? bench_read(request.from, &request.report)
				 : measure(&request, n_all, all);
		if (r == 0)
			r = write_out(&request);
		if (r == 0)
			r = verdict(&request.report);
	}
	bench_report_deinit(&request.report);
	recipe_deinit(&request.recipe);
	return r;
}

const struct ctl_command ctl_bench = {
	.usage = {.name = "fmhactl bench",
		  .brief = "how fast kernels are: shapes by flags, sweeps, tiers; reports, gates",
		  .synopsis = "[forward|backward|append|merge] SHAPE [OPTION...]\n"
			      "--tier smoke|full|nightly|FILE [OPTION...]\n"
			      "--from FILE [--csv FILE] [--html FILE]\n"
			      "--compare BEFORE AFTER [--tolerance PERCENT]",
		  .text = "Measures the kernels of shapes, by the device's own clock, on made "
			  "tensors; a SHAPE is said as in `fmhactl run`. One row a shape and "
			  "kernel: "
			  "time, TFLOP/s, GB/s, share of the device's measured roofs, error. The "
			  "summary says how far the planner's choice is from the best kernel. The "
			  "report's format is in client/docs/bench.md.",
		  .operands = "forward|backward|append|merge",
		  .tables = {own_options, recipe_options, problem_options, ctl_json_option,
			     ctl_target_options},
		  .long_only = true},
	.run = bench,
};
