/* SPDX-License-Identifier: MIT */
/* run.c: attention on .npy files, or on generated tensors of any shape. */
#include <float.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <proto/error.h>
#include <proto/problem.h>

#include "check_grad.h"
#include "judge.h"
#include "recipe.h"
#include "stats.h"
#include "tensor_files.h"
#include "tensors.h"
#include "json.h"

/* One run: its end by CLOCK_MONOTONIC, by which processes can compare. */
struct sample {
	int64_t end_ns;
	double kernel_ms, client_ms;
};

struct run {
	struct ctl_target target;
	struct files files;
	struct recipe recipe;
	bool from_files, shaped;     /* from files; by options of a recipe */
	const char *of_shapes;       /* an option that files leave no meaning; NULL: none */
	struct fmha_problem problem; /* tensors in the buffer */
	struct tensors tensors;
	uint8_t *before; /* of a recipe that is checked: the buffer as it was before the run */
	struct cli_texts kernels;
	bool check, discard;
	bool check_grad; /* moves elements as well */
	double eps;
	int64_t repeat, warmup;
	double seconds;

	struct fmha_plan_info info;
	struct sample *samples; /* of every run */
	size_t n_samples, capacity;
	struct stats kernel_ms, client_ms;
	int n_verdicts; /* -1: not checked */
	struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS];
	struct check_grad gradients[3];
};

static const struct cli_option own_options[] = {
	{"layout", 'l', "bshd|bhsd", "the order of dimensions in all files (default bshd)",
	 CLI_TO(WORD, struct run, files.heads_first)},
	{"fp8", '8', "e4m3|e5m2", "what uint8 files hold (default e4m3)",
	 CLI_TO(WORD, struct run, files.fp8_is_e5m2)},
	{"check", 'c', NULL,
	 "compare with the double-precision reference (-v=1); exit code 1 when beyond the bar",
	 CLI_TO(FLAG, struct run, check)},
	{"check-grad", 'g', NULL,
	 "backward: also by moving elements of Q, K and V and looking at the loss",
	 CLI_TO(FLAG, struct run, check_grad)},
	{"eps", 'e', "E", "by so much (default 0.01; 0.0625 for 16-bit types)",
	 CLI_RANGE(REAL, struct run, eps, -DBL_MAX, DBL_MAX)},
	{"discard", 'd', NULL,
	 "keep no result: for timing alone (a shape without files implies it)",
	 CLI_TO(FLAG, struct run, discard)},
	{"warmup", 'w', "N", "runs before those that are timed (default 0)",
	 CLI_RANGE(INT, struct run, warmup, 0, 1000000)},
	{"repeat", 'n', "N", "run N times, report the fastest and the median",
	 CLI_RANGE(INT, struct run, repeat, 1, 1000000)},
	{"seconds", 's', "S", "go on for this long, whatever N is",
	 CLI_RANGE(REAL, struct run, seconds, 0, 1e6)},
	{"kernel", 'k', "NAME", problem_kernel_help,
	 CLI_RANGE(TEXTS, struct run, kernels, 0, FMHA_MAX_STAGES)},
	CLI_END};

/* Some options take a file, or what a recipe's option of that name takes: numbers with commas, or a
 * kind of bias. A file that is called so is written with its folder. */
static bool means_recipe(const char *name, const char *value)
{
	if (recipe_option_named(name) < 0)
		return false;
	if (!strcmp(name, "bias") && strchr("nea", value[0]) && (!value[1] || value[1] == ':'))
		return true;
	return value[strspn(value, "0123456789,-")] == '\0';
}

static int take_option(void *owner, int option, const char *value)
{
	struct run *run = owner;
	const char *name = files_option_name(option);

	if (problem_is_option(option))
		return problem_option(&run->recipe.problem, option, value);
	if (name && means_recipe(name, value))
		option = recipe_option_named(name);
	run->shaped |= recipe_is_option(option);
	if (recipe_is_option(option) && !recipe_option_fits_files(option))
		run->of_shapes = recipe_option_name(option);
	if (recipe_is_option(option))
		return recipe_option(&run->recipe, option, value);
	if (name && !strcmp(name, "v") && (!strcmp(value, "0") || !strcmp(value, "1"))) {
		run->check = *value == '1'; /* CK's -v=1 */
		return 0;
	}
	return files_option(&run->files, option, value);
}

/* A file for a result, or another reason to run. */
static int check_purpose(const struct run *run)
{
	static const char *const outputs[] = {"--out", "--dq, --dk, --dv", "--k-out, --v-out",
					      "--check"};

	if (!run->from_files && !run->shaped)
		return ctl_usage_error(
			"run: no shape, as in -b 2 -h 16 -s 1024 -d 128, and no file");
	if (run->check_grad && run->files.op != FMHA_BACKWARD)
		return ctl_usage_error("run: --check-grad is of backward");
	if (run->from_files && run->of_shapes)
		return ctl_usage_error("run: --%s is of shapes without files; these say it",
				       run->of_shapes);
	if (!run->from_files || files_keep(&run->files) || run->check || run->discard)
		return 0;
	return ctl_usage_error("run: no file is named for a result: %s, or --check, or "
			       "--discard for timing alone",
			       outputs[run->files.op]);
}

/* Return: 0, or an exit code. */
static int run_parse(struct run *run, int argc, char **argv)
{
	int r = ctl_options(&ctl_run, argc, argv, &run->target, take_option, run);

	run->from_files = files_given(&run->files);
	run->check |= run->check_grad;
	return r == 0 ? check_purpose(run) : r;
}

/* ---- running ---- */

static int add_sample(struct run *run, const struct sample *sample, struct fmha_error *err)
{
	if (run->n_samples == run->capacity) {
		size_t capacity = run->capacity ? 2 * run->capacity : 64;
		struct sample *samples = realloc(run->samples, capacity * sizeof(*samples));

		if (!samples)
			return fmha_error_set(err, FMHA_ENOMEM, "the runs' times: out of memory");
		run->samples = samples;
		run->capacity = capacity;
	}
	run->samples[run->n_samples++] = *sample;
	return 0;
}

static int run_once(struct run *run, struct fmha_plan *plan, struct fmha_error *err)
{
	struct fmha_run_result result = {0};
	int64_t start = ctl_now_ns();
	struct sample sample;
	int r = fmha_plan_run(plan, NULL, &result, err);

	if (r < 0)
		return r;
	sample.end_ns = ctl_now_ns();
	sample.client_ms = (double)(sample.end_ns - start) / 1e6;
	sample.kernel_ms = (double)result.kernel_ns / 1e6;
	return add_sample(run, &sample, err);
}

/* Of all runs, by what each says of a sample. */
static struct stats stats_over(const struct run *run, size_t offset)
{
	double *values = malloc((run->n_samples + 1) * sizeof(*values));
	struct stats stats = {0};

	for (size_t i = 0; values && i < run->n_samples; i++)
		memcpy(&values[i], (const char *)&run->samples[i] + offset, sizeof(*values));
	if (values)
		stats = stats_of(values, run->n_samples);
	free(values);
	return stats;
}

static int run_plan(struct run *run, struct fmha_plan *plan, struct fmha_error *err)
{
	struct ctl_progress progress = {.title = "runs"};
	int64_t until;
	int r = 0;

	for (int64_t i = 0; r == 0 && i < run->warmup; i++)
		r = fmha_plan_run(plan, NULL, NULL, err);
	until = ctl_now_ns() + (int64_t)(run->seconds * 1e9);
	for (int64_t i = 0; r == 0 && (i < run->repeat || ctl_now_ns() < until); i++) {
		ctl_progress(&progress, (uint64_t)i, run->seconds > 0 ? 0 : (uint64_t)run->repeat);
		r = run_once(run, plan, err);
	}
	ctl_progress_end(&progress);
	run->kernel_ms = stats_over(run, offsetof(struct sample, kernel_ms));
	run->client_ms = stats_over(run, offsetof(struct sample, client_ms));
	return r;
}

static int plan_and_run(struct run *run, struct fmha_device *device, struct fmha_error *err)
{
	const struct fmha_plan_options options = problem_plan_options(&run->kernels);
	struct fmha_plan *plan;
	int r = fmha_plan_new(device, &run->problem, &options, &plan, err);

	if (r < 0)
		return r;
	r = fmha_plan_info(plan, &run->info, err);
	if (r == 0)
		r = run_plan(run, plan, err);
	plan = fmha_plan_free(plan);
	return r;
}

/*
 * After the run: by then the daemon has judged the problem and what its integer tensors hold, which
 * the reference believes. It reads the files' own memory, or a copy from before the run.
 */
static int check(struct run *run, struct fmha_error *err)
{
	struct fmha_problem inputs, outputs;
	struct judge *judge;
	int r;

	tensors_point(&run->tensors, &run->problem, &outputs);
	inputs = outputs;
	if (run->from_files)
		files_point(&run->files, &inputs);
	for (uint32_t role = 0; run->before && role < FMHA_N_TENSORS; role++)
		if (run->tensors.present[role] && !recipe_is_result(&run->problem, role))
			inputs.tensor[role].data = run->before + run->tensors.offset[role];
	r = judge_new(&inputs, &judge, err);
	if (r < 0)
		return r;
	run->n_verdicts = judge_compare(judge, &outputs, run->verdicts);
	judge = judge_free(judge);
	if (!run->check_grad)
		return 0;
	/* Steps that the type has, and that change O by more than the sum's own rounding. */
	if (run->eps == 0)
		run->eps = inputs.q.dtype == FMHA_F32 ? 0.01 : 0.0625;
	return check_grad(&inputs, &outputs, run->verdicts, run->n_verdicts, run->eps, 1,
			  run->gradients, err);
}

/* Repeating an append writes the same rows again. */
static int execute(struct run *run, struct fmha_device *device, struct fmha_error *err)
{
	int r = 0;

	/* O and LSE that were not given. */
	if (run->problem.op == FMHA_BACKWARD &&
	    !(run->files.in[FMHA_T_O] && run->files.in[FMHA_T_LSE]))
		r = problem_run_forward(device, &run->problem, err);
	if (r == 0)
		r = plan_and_run(run, device, err);
	if (r == 0 && run->check)
		r = check(run, err);
	return r;
}

/* ---- the report ---- */

static double gflops(const struct run *run)
{
	return run->kernel_ms.min > 0 ? run->info.flops / (run->kernel_ms.min * 1e6) : 0;
}

static void run_describe(const struct run *run, char *text, size_t n)
{
	if (run->from_files)
		problem_describe(&run->problem, text, n);
	else
		recipe_text(&run->recipe, text, n);
}

static void print_text(const struct run *run)
{
	char text[RECIPE_TEXT_BYTES];

	run_describe(run, text, sizeof(text));
	(void)printf("%s\n", text);
	for (uint32_t i = 0; i < run->info.n_stages; i++)
		(void)printf("kernel     %s\n", run->info.stages[i].kernel);
	(void)printf("time       %.3f ms in the kernel, %.3f ms for the client\n",
		     run->kernel_ms.min, run->client_ms.min);
	if (run->n_samples > 1)
		(void)printf("median     %.3f ms of %zu runs, the middle half within %.1f %%\n",
			     run->kernel_ms.median, run->n_samples, 100 * run->kernel_ms.spread);
	if (run->info.flops > 0)
		(void)printf("rate       %.1f GFLOP/s\n", gflops(run));
	for (int i = 0; i < run->n_verdicts; i++) {
		const struct judge_verdict *v = &run->verdicts[i];

		(void)printf("%-10s max error %.3g, allowed %.3g: %s\n", proto_roles[v->role].name,
			     v->max_error, v->bar, v->ok ? "ok" : "WRONG");
		(void)printf("           norm %.6g, expected %.6g; distance %.3g of it\n", v->norm,
			     v->expected_norm, v->distance);
		if (!v->ok)
			(void)printf("           element %" PRId64 " is %g, expected %g\n", v->at,
				     v->got, v->expected);
	}
	for (int i = 0; run->check_grad && i < 3; i++) {
		const struct check_grad *g = &run->gradients[i];

		(void)printf("%-10s %" PRId64 " elements moved by %g: L2 %.3g of the gradient, max "
			     "%.3g, mean %.3g, allowed %.3g: %s\n",
			     proto_roles[g->role].name, g->n, run->eps, g->l2, g->max, g->mean,
			     g->allowed, g->ok ? "ok" : "WRONG");
	}
}

static void add_gradients(const struct run *run, cJSON *root)
{
	cJSON *list = cJSON_AddArrayToObject(root, "gradients");

	cJSON_AddNumberToObject(root, "eps", run->eps);
	for (int i = 0; i < 3; i++) {
		const struct check_grad *g = &run->gradients[i];
		cJSON *item = ctl_add_item(list);

		cJSON_AddStringToObject(item, "tensor", proto_roles[g->role].name);
		cJSON_AddNumberToObject(item, "elements", (double)g->n);
		cJSON_AddNumberToObject(item, "l2", g->l2);
		cJSON_AddNumberToObject(item, "max", g->max);
		cJSON_AddNumberToObject(item, "mean", g->mean);
		cJSON_AddNumberToObject(item, "allowed", g->allowed);
		cJSON_AddNumberToObject(item, "open", g->open);
		cJSON_AddBoolToObject(item, "ok", g->ok);
	}
}

static void add_samples(const struct run *run, cJSON *root)
{
	cJSON *runs = cJSON_AddArrayToObject(root, "runs");

	for (size_t i = 0; i < run->n_samples; i++) {
		cJSON *item = ctl_add_item(runs);

		cJSON_AddNumberToObject(item, "end_ns", (double)run->samples[i].end_ns);
		cJSON_AddNumberToObject(item, "kernel_ms", run->samples[i].kernel_ms);
	}
}

static void print_json(const struct run *run)
{
	cJSON *root = cJSON_CreateObject(), *kernels = cJSON_AddArrayToObject(root, "kernels");
	char text[RECIPE_TEXT_BYTES], *printed;

	run_describe(run, text, sizeof(text));
	cJSON_AddStringToObject(root, "problem", text);
	for (uint32_t i = 0; i < run->info.n_stages; i++)
		cJSON_AddItemToArray(kernels, cJSON_CreateString(run->info.stages[i].kernel));
	cJSON_AddNumberToObject(root, "kernel_ms", run->kernel_ms.min);
	cJSON_AddNumberToObject(root, "median_ms", run->kernel_ms.median);
	cJSON_AddNumberToObject(root, "spread", run->kernel_ms.spread);
	cJSON_AddNumberToObject(root, "client_ms", run->client_ms.min);
	cJSON_AddNumberToObject(root, "flops", run->info.flops);
	cJSON_AddNumberToObject(root, "gflops", gflops(run));
	add_samples(run, root);
	if (run->n_verdicts >= 0) {
		cJSON *checks = cJSON_AddArrayToObject(root, "checks");

		for (int i = 0; i < run->n_verdicts; i++) {
			const struct judge_verdict *v = &run->verdicts[i];
			cJSON *check = ctl_add_item(checks);

			cJSON_AddStringToObject(check, "tensor", proto_roles[v->role].name);
			cJSON_AddNumberToObject(check, "max_error", v->max_error);
			cJSON_AddNumberToObject(check, "allowed", v->bar);
			cJSON_AddNumberToObject(check, "norm", v->norm);
			cJSON_AddNumberToObject(check, "expected_norm", v->expected_norm);
			cJSON_AddNumberToObject(check, "distance", v->distance);
			cJSON_AddBoolToObject(check, "ok", v->ok);
		}
	}
	if (run->check_grad)
		add_gradients(run, root);
	printed = cJSON_Print(root);
	(void)puts(printed ? printed : "{}");
	cJSON_free(printed);
	cJSON_Delete(root);
}

static int report(const struct run *run)
{
	if (run->target.json)
		print_json(run);
	else
		print_text(run);
	for (int i = 0; i < run->n_verdicts; i++) {
		if (!run->verdicts[i].ok)
			return CTL_FAILED;
	}
	for (int i = 0; run->check_grad && i < 3; i++) {
		if (!run->gradients[i].ok)
			return CTL_FAILED;
	}
	return CTL_OK;
}

/* Return: 0, or -1 when out of memory. */
static int run_fill(struct run *run)
{
	if (run->from_files) {
		files_fill(&run->files, &run->tensors);
		return 0;
	}
	recipe_fill(&run->recipe, &run->tensors);
	if (!run->check)
		return 0;
	run->before = malloc(run->tensors.bytes);
	if (run->before)
		memcpy(run->before, fmha_buffer_data(run->tensors.buffer), run->tensors.bytes);
	return run->before ? 0 : -1;
}

static int run_on_device(struct run *run)
{
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	_cleanup_(ctl_device_freep) struct fmha_device *device = NULL;
	struct fmha_error err = {0};
	int r = ctl_open(&run->target, &client, &device);

	if (r != 0)
		return r;
	if (tensors_new(device, &run->problem, &run->tensors, &err) < 0)
		return ctl_error(&err);
	if (run_fill(run) < 0)
		r = ctl_usage_error("out of memory");
	else if (execute(run, device, &err) < 0)
		r = ctl_error(&err);
	if (r == 0)
		r = files_store(&run->files, &run->problem, &run->tensors);
	if (r == 0)
		r = report(run);
	tensors_deinit(&run->tensors);
	return r;
}

/* Sizes, types and tensors, from files or from options alone. */
static int make_problem(struct run *run)
{
	struct fmha_error err = {0};
	int r;

	if (run->from_files) {
		recipe_options_alone(&run->recipe, &run->problem);
		r = files_load(&run->files, &run->problem);
		return r == 0 ? recipe_compare_sizes(&run->recipe, &run->problem) : r;
	}
	if (recipe_make(&run->recipe, &err) < 0)
		return ctl_error(&err);
	run->problem = run->recipe.problem;
	return 0;
}

static int run_command(int argc, char **argv)
{
	struct run run = {.target = CTL_TARGET_INIT, .repeat = 1, .n_verdicts = -1};
	const char *name = ctl_take_verb(&argc, &argv);
	int r;

	while (!name[0] && cli_next(&ctl_run.usage, argc, argv, &run) > 0)
		; /* run --help */
	if (problem_parse_op(name, &run.files.op) < 0)
		return ctl_usage_error("run: forward, backward, append or merge, not '%s'", name);
	recipe_init(&run.recipe, run.files.op);
	r = run_parse(&run, argc, argv);
	if (r == 0)
		r = make_problem(&run);
	if (r == 0)
		r = run_on_device(&run);
	files_deinit(&run.files);
	recipe_deinit(&run.recipe);
	free(run.before);
	free(run.samples);
	return r;
}

const struct ctl_command ctl_run = {
	.usage =
		{.name = "fmhactl run",
		 .brief = "attention on .npy files or on made tensors of any shape",
		 .synopsis =
			 "forward|backward|append|merge SHAPE [OPTION...]\n"
			 "forward  --q FILE --k FILE --v FILE --out FILE [--lse FILE] [OPTION...]\n"
			 "backward --q FILE --k FILE --v FILE --do FILE --dq FILE --dk FILE --dv "
			 "FILE "
			 "[--o FILE --lse FILE] [OPTION...]\n"
			 "append   --k FILE --v FILE --k-new FILE --v-new FILE --seqlen-k FILE "
			 "--k-out "
			 "FILE --v-out FILE [OPTION...]",
		 .text = "Without files the tensors are made from a SHAPE, whose options are named "
			 "as in CK's examples: -b 2 -h 16 -h_k 4 -s 1024 -d 128 -prec bf16 -mask "
			 "b. "
			 "An option that may name a file takes a number, or a kind of bias, "
			 "too.\n\n"
			 "Files are .npy in C order: float32, float16, uint16 (bfloat16), uint8 "
			 "(fp8), int8, int32 (indices). Q, K, V and the like are [batch, seqlen, "
			 "heads, "
			 "hdim]; packed sequences are [rows, heads, hdim] with --seqstart-q and "
			 "--seqstart-k; a paged cache is [pages, page_size, heads, hdim] with "
			 "--block-table, or --kv-indptr, --kv-page-indices and "
			 "--kv-last-page-len.\n\n"
			 "The report's JSON has the time of each run.",
		 .operands = "forward|backward|append|merge",
		 .tables = {own_options, files_options, recipe_options, problem_options,
			    ctl_json_option, ctl_target_options},
		 .long_only = true},
	.run = run_command,
};
