/* SPDX-License-Identifier: MIT */
/* bench_measure.c: the kernels of one shape, one after the other, on the same tensors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>
#include <proto/problem.h>

#include "bench.h"

#define LEAST_RUNS 3 /* however long they take */

/* One shape while its kernels are measured. */
struct trial {
	struct bench_run *run;
	struct recipe recipe;
	struct bench_memory memory;
	uint8_t *before;     /* of the image; NULL: nothing is checked */
	struct judge *judge; /* NULL: not yet, or the reference does not cover it */
	bool judged;
	double *times;
};

/* ---- checking ---- */

static void fill_results(struct trial *trial)
{
	const struct fmha_problem *p = &trial->recipe.problem;

	memcpy(fmha_buffer_data(trial->memory.image.buffer), trial->before,
	       trial->memory.image.bytes);
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		uint64_t bytes = 0;

		if (!trial->memory.image.present[role] || !recipe_is_result(p, role))
			continue;
		(void)problem_span_bytes(p, role, &bytes, NULL);
		memset(tensors_data(&trial->memory.image, role), 0xff, bytes); /* NaN */
	}
}

static void point(const struct trial *trial, struct fmha_problem *ret)
{
	tensors_point(&trial->memory.image, &trial->memory.problem, ret);
}

/* What must come out: from the inputs as they were, and a forward pass's results as they are. */
static int make_judge(struct trial *trial, struct fmha_error *err)
{
	struct fmha_problem inputs;

	trial->judged = true;
	point(trial, &inputs);
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++)
		if (trial->memory.image.present[role] &&
		    !recipe_is_result(&trial->recipe.problem, role))
			inputs.tensor[role].data = trial->before + trial->memory.image.offset[role];
	return judge_new(&inputs, &trial->judge, err);
}

/* One run on poisoned results. */
static int bench_measure_check(struct trial *trial, struct fmha_plan *plan, struct bench_row *row,
			       struct fmha_error *err)
{
	struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS];
	struct fmha_problem outputs;
	int r, n;

	fill_results(trial);
	r = bench_upload(&trial->memory, err);
	if (r == 0 && trial->memory.problem.op == FMHA_BACKWARD)
		r = problem_run_forward(trial->run->device, &trial->memory.problem, err);
	if (r == 0)
		r = fmha_plan_run(plan, NULL, NULL, err);
	if (r == 0)
		r = bench_download(&trial->memory, err);
	if (r == 0 && !trial->judged)
		r = make_judge(trial, err);
	if (r < 0)
		return r;
	point(trial, &outputs);
	n = trial->judge ? judge_compare(trial->judge, &outputs, verdicts) : 0;
	for (int i = 0; i < n; i++) {
		double share = verdicts[i].max_error / verdicts[i].bar;

		if (row->allowed == 0 || share > row->error / row->allowed) {
			row->error = verdicts[i].max_error;
			row->allowed = verdicts[i].bar > 0 ? verdicts[i].bar : 1e-300;
		}
	}
	return 0;
}

/* ---- timing ---- */

static int run_once(struct trial *trial, struct fmha_plan *plan, double *ret_us,
		    struct fmha_error *err)
{
	struct fmha_run_options options;
	struct fmha_run_result result;
	int r = 0;

	if (trial->run->flush.plan)
		r = fmha_plan_run(trial->run->flush.plan, NULL, NULL, err);
	if (r == 0)
		r = fmha_plan_run(plan, bench_next_copy(&trial->memory, &options), &result, err);
	if (r == 0)
		*ret_us = (double)result.kernel_ns / 1e3;
	return r;
}

static int time_plan(struct trial *trial, struct fmha_plan *plan, struct bench_row *row,
		     struct fmha_error *err)
{
	const struct bench_options *options = trial->run->options;
	int64_t until = ctl_now_ns() + options->limit_ms * 1000000;
	struct stats stats;
	int64_t n = 0;
	int r = 0;

	for (int64_t i = 0; i < options->warmup && r == 0; i++)
		if (i == 0 || ctl_now_ns() < until)
			r = run_once(trial, plan, &trial->times[0], err);
	until = ctl_now_ns() + options->limit_ms * 1000000;
	while (r == 0 && n < options->repeat && (n < LEAST_RUNS || ctl_now_ns() < until))
		r = run_once(trial, plan, &trial->times[n++], err);
	if (r < 0)
		return r;
	stats = stats_of(trial->times, (size_t)n);
	row->runs = (uint32_t)n;
	row->median_us = stats.median;
	row->min_us = stats.min;
	row->spread = stats.spread;
	return 0;
}

static int measure_kernel(struct trial *trial, const char *kernel, struct bench_row *row,
			  struct fmha_error *err)
{
	const struct fmha_plan_options options = {
		.struct_size = sizeof(options), .n_kernels = 1, .kernels = &kernel};
	double flops = recipe_flops(&trial->recipe), bytes = recipe_bytes(&trial->recipe);
	struct fmha_plan *plan;
	int r = fmha_plan_new(trial->run->device, &trial->memory.problem, &options, &plan, err);

	if (r < 0)
		return r;
	if (trial->before)
		r = bench_measure_check(trial, plan, row, err);
	else if (trial->memory.problem.op == FMHA_BACKWARD)
		r = problem_run_forward(trial->run->device, &trial->memory.problem, err);
	if (r == 0)
		r = time_plan(trial, plan, row, err);
	plan = fmha_plan_free(plan);
	if (r == 0 && row->median_us > 0) {
		row->tflops = flops / row->median_us / 1e6;
		row->gbs = bytes / row->median_us / 1e3;
		row->intensity = bytes > 0 ? flops / bytes : 0;
	}
	return r;
}

/* ---- a shape ---- */

static struct bench_row *new_row(struct bench_run *run, const struct bench_shape *shape,
				 const char *kernel, bool chosen)
{
	struct bench_row *row = bench_add_row(run->report);

	if (!row)
		return NULL;
	row->shape = strdup(shape->text);
	row->group = strdup(shape->group);
	row->kernel = strdup(kernel);
	row->sizes = shape->shape;
	row->chosen = chosen;
	return row;
}

static int trial_init(struct trial *trial, struct bench_run *run, const struct bench_shapes *shapes,
		      size_t i, struct fmha_error *err)
{
	const struct bench_options *options = run->options;
	int r = bench_recipe(shapes, i, &trial->recipe, err);

	if (r < 0)
		return r;
	trial->run = run;
	trial->times = calloc((size_t)options->repeat + LEAST_RUNS, sizeof(*trial->times));
	r = bench_memory_init(&trial->memory, run->device, &trial->recipe, options, err);
	if (r == 0 && options->check) {
		trial->before = malloc(trial->memory.image.bytes);
		if (trial->before)
			memcpy(trial->before, fmha_buffer_data(trial->memory.image.buffer),
			       trial->memory.image.bytes);
	}
	if (r == 0 && (!trial->times || (options->check && !trial->before)))
		r = fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	return r;
}

static void trial_deinit(struct trial *trial)
{
	trial->judge = judge_free(trial->judge);
	bench_memory_deinit(&trial->memory);
	recipe_deinit(&trial->recipe);
	free(trial->before);
	free(trial->times);
}

int bench_measure(struct bench_run *run, const struct bench_shapes *shapes,
		  const struct bench_items *items, size_t first, size_t end)
{
	size_t shape = items->list[first].shape;
	struct fmha_error err = {0};
	struct trial trial = {0};
	int ready = trial_init(&trial, run, shapes, shape, &err), r = ready;

	for (size_t i = first; i < end && r != FMHA_ECONN; i++) {
		struct bench_row *row = new_row(run, &shapes->list[shape], items->list[i].kernel,
						items->list[i].chosen);

		if (!row)
			return ctl_usage_error("out of memory");
		r = ready;
		if (r == 0)
			r = measure_kernel(&trial, items->list[i].kernel, row, &err);
		if (r < 0)
			row->failure = strdup(err.msg);
	}
	trial_deinit(&trial);
	return r == FMHA_ECONN ? ctl_error(&err) : 0;
}
