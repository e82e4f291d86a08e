/* SPDX-License-Identifier: MIT */
/* run.c: attention on .npy files. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <proto/error.h>
#include <proto/problem.h>

#include "files.h"
#include "judge.h"
#include "problem.h"
#include "tensors.h"

/* One run: its end by CLOCK_MONOTONIC, by which processes can compare. */
struct sample {
	int64_t end_ns;
	double kernel_ms;
};

struct run {
	struct ctl_target target;
	struct files files;
	struct fmha_problem problem; /* tensors in the buffer */
	struct tensors tensors;
	struct problem_kernels kernels;
	bool check, discard, json;
	int64_t repeat;
	double seconds;

	struct fmha_plan_info info;
	struct sample *samples; /* of every run */
	size_t n_samples, capacity;
	double kernel_ms, client_ms; /* of the fastest run */
	int n_verdicts;              /* -1: not checked */
	struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS];
};

enum {
	OPTION_CHECK = 'c',
	OPTION_DISCARD = 'd',
	OPTION_REPEAT = 'n',
	OPTION_SECONDS = 's',
	OPTION_LAYOUT = 'l',
	OPTION_FP8 = '8',
	OPTION_KERNEL = 'k'
};

static int parse_option(struct run *run, int option, const char *value)
{
	int r;

	if (problem_is_option(option))
		return problem_option(&run->problem, option, value);
	if (option >= FILES_OPTION_BASE)
		return files_option(&run->files, option, value);
	switch (option) {
	case OPTION_CHECK:
		run->check = true;
		return 0;
	case OPTION_DISCARD:
		run->discard = true;
		return 0;
	case CTL_OPT_JSON:
		run->json = true;
		return 0;
	case OPTION_REPEAT:
		return ctl_parse_int("--repeat", value, 1, 1000000, &run->repeat);
	case OPTION_SECONDS:
		r = ctl_parse_double("--seconds", value, &run->seconds);
		if (r == 0 && (run->seconds < 0 || run->seconds > 1e6))
			return ctl_usage_error("--seconds %s: 0 to 1000000", value);
		return r;
	case OPTION_LAYOUT:
		run->files.heads_first = !strcmp(value, "bhsd");
		if (!run->files.heads_first && strcmp(value, "bshd") != 0)
			return ctl_usage_error("--layout '%s': bshd or bhsd", value);
		return 0;
	case OPTION_FP8:
		run->files.fp8_is_e5m2 = !strcmp(value, "e5m2");
		if (!run->files.fp8_is_e5m2 && strcmp(value, "e4m3") != 0)
			return ctl_usage_error("--fp8 '%s': e4m3 or e5m2", value);
		return 0;
	case OPTION_KERNEL:
		return problem_add_kernel(&run->kernels, value);
	default:
		return ctl_target_option(&run->target, option, value);
	}
}

static const struct cli_option own_options[] = {
	{"layout", OPTION_LAYOUT, "bshd|bhsd",
	 "the order of dimensions in all files (default bshd)"},
	{"fp8", OPTION_FP8, "e4m3|e5m2", "what uint8 files hold (default e4m3)"},
	{"check", OPTION_CHECK, NULL,
	 "compare with the double-precision reference; exit code 1 when beyond the bar"},
	{"discard", OPTION_DISCARD, NULL, "keep no result: for timing alone"},
	{"repeat", OPTION_REPEAT, "N", "run N times, report the fastest"},
	{"seconds", OPTION_SECONDS, "S", "go on for this long, whatever N is"},
	{"kernel", OPTION_KERNEL, "NAME", problem_kernel_help},
	CLI_END};

/* Return: 0, or an exit code. */
static int parse(struct run *run, int argc, char **argv)
{
	int option, r;

	while ((option = cli_next(&ctl_run.usage, argc, argv)) != -1) {
		r = parse_option(run, option, optarg);
		if (r != 0)
			return r;
	}
	if (optind < argc)
		return ctl_usage_error("run: what is '%s'?", argv[optind]);
	if (!files_keep(&run->files) && !run->check && !run->discard)
		return ctl_usage_error("run: no file is named for a result: %s, or --check, or "
				       "--discard for timing alone",
				       run->files.op == FMHA_FORWARD    ? "--out"
				       : run->files.op == FMHA_BACKWARD ? "--dq, --dk, --dv"
									: "--k-out, --v-out");
	return 0;
}

/* ---- running ---- */

static int add_sample(struct run *run, int64_t end_ns, double kernel_ms, struct fmha_error *err)
{
	if (run->n_samples == run->capacity) {
		size_t capacity = run->capacity ? 2 * run->capacity : 64;
		struct sample *samples = realloc(run->samples, capacity * sizeof(*samples));

		if (!samples)
			return fmha_error_set(err, FMHA_ENOMEM, "the runs' times: out of memory");
		run->samples = samples;
		run->capacity = capacity;
	}
	run->samples[run->n_samples++] = (struct sample){end_ns, kernel_ms};
	return 0;
}

static int run_once(struct run *run, struct fmha_plan *plan, struct fmha_error *err)
{
	struct fmha_run_result result = {0};
	int64_t start = ctl_now_ns(), end;
	double client_ms, kernel_ms;
	int r = fmha_plan_run(plan, NULL, &result, err);

	if (r < 0)
		return r;
	end = ctl_now_ns();
	client_ms = (double)(end - start) / 1e6;
	kernel_ms = (double)result.kernel_ns / 1e6;
	if (run->n_samples == 0 || kernel_ms < run->kernel_ms)
		run->kernel_ms = kernel_ms;
	if (run->n_samples == 0 || client_ms < run->client_ms)
		run->client_ms = client_ms;
	return add_sample(run, end, kernel_ms, err);
}

static int plan_and_run(struct run *run, struct fmha_device *device,
			const struct fmha_problem *problem, const struct fmha_plan_options *options,
			int64_t repeat, double seconds, struct fmha_error *err)
{
	struct ctl_progress progress = {.title = "runs"};
	int64_t until = ctl_now_ns() + (int64_t)(seconds * 1e9);
	struct fmha_plan *plan;
	int r = fmha_plan_new(device, problem, options, &plan, err);

	if (r < 0)
		return r;
	run->n_samples = 0;
	r = fmha_plan_info(plan, &run->info, err);
	for (int64_t i = 0; r == 0 && (i < repeat || ctl_now_ns() < until); i++) {
		ctl_progress(&progress, (uint64_t)i, seconds > 0 ? 0 : (uint64_t)repeat);
		r = run_once(run, plan, err);
	}
	ctl_progress_end(&progress);
	plan = fmha_plan_free(plan);
	return r;
}

/* O and LSE for a backward pass that were not given. */
static int run_forward_first(struct run *run, struct fmha_device *device, struct fmha_error *err)
{
	static const uint32_t not_forward[] = {FMHA_T_DO, FMHA_T_DQ,    FMHA_T_DK,
					       FMHA_T_DV, FMHA_T_DBIAS, FMHA_T_DSINK};
	struct fmha_problem forward = run->problem;

	forward.op = FMHA_FORWARD;
	forward.deterministic = 0;
	for (size_t i = 0; i < sizeof(not_forward) / sizeof(not_forward[0]); i++)
		memset(&forward.tensor[not_forward[i]], 0, sizeof(forward.tensor[0]));
	return plan_and_run(run, device, &forward, NULL, 1, 0, err);
}

/*
 * After the run: by then the daemon has judged the problem and what its integer tensors hold, which
 * the reference believes. It reads the files' own memory, which a run cannot have written to.
 */
static int check(struct run *run, struct fmha_error *err)
{
	struct fmha_problem inputs, outputs;
	struct judge *judge;
	int r;

	tensors_point(&run->tensors, &run->problem, &outputs);
	inputs = outputs;
	files_point(&run->files, &inputs);
	r = judge_new(&inputs, &judge, err);
	if (r < 0)
		return r;
	run->n_verdicts = judge_compare(judge, &outputs, run->verdicts);
	judge = judge_free(judge);
	return 0;
}

/* Repeating an append writes the same rows again. */
static int execute(struct run *run, struct fmha_device *device, struct fmha_error *err)
{
	const struct fmha_plan_options options = problem_plan_options(&run->kernels);
	int r = 0;

	if (run->problem.op == FMHA_BACKWARD &&
	    !(run->files.in[FMHA_T_O] && run->files.in[FMHA_T_LSE]))
		r = run_forward_first(run, device, err);
	if (r == 0)
		r = plan_and_run(run, device, &run->problem, &options, run->repeat, run->seconds,
				 err);
	if (r == 0 && run->check)
		r = check(run, err);
	return r;
}

/* ---- the report ---- */

static double gflops(const struct run *run)
{
	return run->kernel_ms > 0 ? run->info.flops / (run->kernel_ms * 1e6) : 0;
}

static void print_text(const struct run *run)
{
	char text[256];

	problem_describe(&run->problem, text, sizeof(text));
	(void)printf("%s\n", text);
	for (uint32_t i = 0; i < run->info.n_stages; i++)
		(void)printf("kernel     %s\n", run->info.stages[i].kernel);
	(void)printf("time       %.3f ms in the kernel, %.3f ms for the client\n", run->kernel_ms,
		     run->client_ms);
	if (run->info.flops > 0)
		(void)printf("rate       %.1f GFLOP/s\n", gflops(run));
	for (int i = 0; i < run->n_verdicts; i++) {
		const struct judge_verdict *v = &run->verdicts[i];

		(void)printf("%-10s max error %.3g, allowed %.3g: %s\n", proto_roles[v->role].name,
			     v->max_error, v->bar, v->ok ? "ok" : "WRONG");
		if (!v->ok)
			(void)printf("           element %" PRId64 " is %g, expected %g\n", v->at,
				     v->got, v->expected);
	}
}

static void add_samples(const struct run *run, cJSON *root)
{
	cJSON *runs = cJSON_AddArrayToObject(root, "runs");

	for (size_t i = 0; i < run->n_samples; i++) {
		cJSON *item = cJSON_CreateObject();

		cJSON_AddNumberToObject(item, "end_ns", (double)run->samples[i].end_ns);
		cJSON_AddNumberToObject(item, "kernel_ms", run->samples[i].kernel_ms);
		cJSON_AddItemToArray(runs, item);
	}
}

static void print_json(const struct run *run)
{
	cJSON *root = cJSON_CreateObject(), *kernels = cJSON_AddArrayToObject(root, "kernels");
	char text[256], *printed;

	problem_describe(&run->problem, text, sizeof(text));
	cJSON_AddStringToObject(root, "problem", text);
	for (uint32_t i = 0; i < run->info.n_stages; i++)
		cJSON_AddItemToArray(kernels, cJSON_CreateString(run->info.stages[i].kernel));
	cJSON_AddNumberToObject(root, "kernel_ms", run->kernel_ms);
	cJSON_AddNumberToObject(root, "client_ms", run->client_ms);
	cJSON_AddNumberToObject(root, "flops", run->info.flops);
	cJSON_AddNumberToObject(root, "gflops", gflops(run));
	add_samples(run, root);
	if (run->n_verdicts >= 0) {
		cJSON *checks = cJSON_AddArrayToObject(root, "checks");

		for (int i = 0; i < run->n_verdicts; i++) {
			const struct judge_verdict *v = &run->verdicts[i];
			cJSON *check = cJSON_CreateObject();

			cJSON_AddStringToObject(check, "tensor", proto_roles[v->role].name);
			cJSON_AddNumberToObject(check, "max_error", v->max_error);
			cJSON_AddNumberToObject(check, "allowed", v->bar);
			cJSON_AddBoolToObject(check, "ok", v->ok);
			cJSON_AddItemToArray(checks, check);
		}
	}
	printed = cJSON_Print(root);
	(void)puts(printed ? printed : "{}");
	cJSON_free(printed);
	cJSON_Delete(root);
}

static int report(const struct run *run)
{
	if (run->json)
		print_json(run);
	else
		print_text(run);
	for (int i = 0; i < run->n_verdicts; i++) {
		if (!run->verdicts[i].ok)
			return CTL_FAILED;
	}
	return CTL_OK;
}

static int run_on_device(struct run *run)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_error err = {0};
	int r = ctl_open(&run->target, &client, &device);

	if (r != 0)
		return r;
	if (tensors_new(device, &run->problem, &run->tensors, &err) < 0) {
		r = ctl_error(&err);
	} else {
		files_fill(&run->files, &run->tensors);
		if (execute(run, device, &err) < 0)
			r = ctl_error(&err);
		if (r == 0)
			r = files_store(&run->files, &run->problem, &run->tensors);
		if (r == 0)
			r = report(run);
		tensors_deinit(&run->tensors);
	}
	device = fmha_device_free(device);
	client = fmha_client_free(client);
	return r;
}

static int run_files(int argc, char **argv)
{
	static const struct {
		const char *name;
		uint32_t op;
	} operations[] = {
		{"forward", FMHA_FORWARD}, {"backward", FMHA_BACKWARD}, {"append", FMHA_APPEND_KV}};
	struct run run = {.target = CTL_TARGET_INIT, .repeat = 1, .n_verdicts = -1};
	const char *name = ctl_take_verb(&argc, &argv);
	int r;

	run.files.op = UINT32_MAX;
	for (size_t i = 0; i < sizeof(operations) / sizeof(operations[0]); i++) {
		if (!strcmp(name, operations[i].name))
			run.files.op = operations[i].op;
	}
	while (!name[0] && cli_next(&ctl_run.usage, argc, argv) > 0)
		; /* run --help */
	if (run.files.op == UINT32_MAX)
		return ctl_usage_error("run: forward, backward or append, not '%s'", name);
	fmha_problem_init(&run.problem);
	r = parse(&run, argc, argv);
	if (r != 0)
		return r;
	r = files_load(&run.files, &run.problem);
	if (r == 0)
		r = run_on_device(&run);
	files_deinit(&run.files);
	free(run.samples);
	return r;
}

const struct ctl_command ctl_run = {
	.usage =
		{.name = "fmhactl run",
		 .brief = "attention on .npy files: forward, backward, append",
		 .synopsis =
			 "forward  --q FILE --k FILE --v FILE --out FILE [--lse FILE] [OPTION...]\n"
			 "backward --q FILE --k FILE --v FILE --do FILE --dq FILE --dk FILE --dv "
			 "FILE "
			 "[--o FILE --lse FILE] [OPTION...]\n"
			 "append   --k FILE --v FILE --k-new FILE --v-new FILE --seqlen-k FILE "
			 "--k-out "
			 "FILE --v-out FILE [OPTION...]",
		 .text = "Files are .npy in C order: float32, float16, uint16 (bfloat16), uint8 "
			 "(fp8), int32 (indices). Q, K, V and the like are [batch, seqlen, heads, "
			 "hdim]; packed sequences are [rows, heads, hdim] with --seqstart-q and "
			 "--seqstart-k; a paged cache is [pages, page_size, heads, hdim] with "
			 "--block-table, or --kv-indptr, --kv-page-indices and "
			 "--kv-last-page-len.\n\n"
			 "The report's JSON has the time of each run.",
		 .operands = "forward|backward|append",
		 .tables = {own_options, files_options, problem_options, ctl_json_option,
			    ctl_target_options}},
	.run = run_files,
};
