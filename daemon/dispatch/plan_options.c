/* SPDX-License-Identifier: MIT */
/*
 * plan_options.c: what a plan may differ in, beyond the kernel of one stage: into how many splits the keys
 * are cut, and whether backward sums dQ in the workspace. Listed for whoever measures.
 */
#include <stdlib.h>
#include <string.h>

#include "planner.h"

struct gathering {
	struct plan_option *options;
	size_t n;
};

static void gather(struct gathering *to, const struct planner *b,
		   const struct select_report *report, int32_t n_splits)
{
	const struct spec_catalog *catalog = registry_catalog(b->device->registry);

	for (size_t i = report->first; i < report->n && to->n < PLAN_MAX_OPTIONS; i++) {
		const struct candidate *c = &report->candidates[i];
		struct plan_option *option = &to->options[to->n];

		if (!c->accepted)
			continue;
		(void)spec_name_format(catalog, &c->spec, option->kernel);
		option->n_splits = n_splits;
		option->cuts_rest = n_splits == 0 && b->rest > 0;
		option->time = estimate_guess(c);
		to->n++;
	}
}

static int gather_forward(struct planner *b, struct gathering *to)
{
	struct split_device device = planner_split_device(b->device);
	struct split_choice split;
	struct planner_splits list;
	int r = planner_append(b);

	if (r < 0)
		return r;
	/* A kernel that is named serves all rows. */
	r = planner_widen(b, false);
	if (r < 0)
		return r;
	device.shares = false;
	split_choose(&b->plan->problem, &device, &split);
	planner_take_choice(b, &split);
	if (planner_is_free(b)) {
		planner_list_splits(b, split.n, &list);
	} else {
		bool splits = b->plan->problem.split_size > 0 || split.n > 1;

		list = (struct planner_splits){
			.n = {splits ? split.n : 0}, .size = {split.size}, .count = 1};
	}
	for (size_t i = 0; i < list.count; i++) {
		struct select_report report = {0};
		struct plan_stage ignored;
		double scale;

		r = planner_peek_splits(b, list.n[i], list.size[i], true, &ignored, &report,
					&scale);
		if (r == 0)
			gather(to, b, &report, list.n[i]);
		select_report_deinit(&report);
		if (r < 0)
			return r;
	}
	return 0;
}

static int gather_stage(struct planner *b, enum abi_family family, uint32_t dtype,
			struct gathering *to)
{
	struct select_report report = {0};
	struct plan_stage ignored;
	double scale;
	int r = planner_peek(b, family, dtype, true, &ignored, &report, &scale);

	if (r == 0)
		gather(to, b, &report, 0);
	select_report_deinit(&report);
	return r < 0 ? r : 0;
}

static int gather_all(struct planner *b, struct gathering *to)
{
	const struct fmha_problem *p = &b->plan->problem;
	int r;

	switch (p->op) {
	case FMHA_FORWARD:
		return gather_forward(b, to);
	case FMHA_BACKWARD:
		r = gather_stage(b, ABI_BWD_DQ_DK_DV, p->q.dtype, to);
		b->plan->dq_buffered = 1;
		return r < 0 ? r : gather_stage(b, ABI_BWD_DQ_DK_DV, p->q.dtype, to);
	case FMHA_APPEND_KV:
		return gather_stage(b, ABI_FWD_APPENDKV, p->k.dtype, to);
	default:
		return gather_stage(b, ABI_FWD_SPLITKV_COMBINE, p->o.dtype, to);
	}
}

static int compare_options(const void *x, const void *y)
{
	const struct plan_option *a = x, *b = y;

	return (a->time > b->time) - (a->time < b->time);
}

int plan_options(const struct fmha_problem *problem, const struct plan_device *device,
		 struct plan_option *options, struct fmha_error *err)
{
	struct plan *plan = calloc(1, sizeof(*plan));
	struct planner b = {.plan = plan, .device = device, .err = err};
	struct gathering to = {.options = options};
	int r;

	if (!plan)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	r = device->registry ? planner_start(&b, problem, NULL)
			     : fmha_error_set(err, FMHA_ENOTSUP, "this device has no kernel specs");
	if (r == 0 && plan_total_q(plan) > 0)
		r = gather_all(&b, &to);
	free(plan);
	if (r == FMHA_ENOMEM)
		return fmha_error_set(err, r, "plan: out of memory");
	if (r < 0)
		return r;
	qsort(options, to.n, sizeof(*options), compare_options);
	return (int)to.n;
}

int plan_build_option(const struct fmha_problem *problem, const struct plan_option *option,
		      const struct plan_device *device, struct plan *ret_plan,
		      struct fmha_error *err)
{
	struct fmha_problem asked = *problem;
	struct plan_choice choice = {.n = 1};

	memcpy(choice.kernel[0], option->kernel, sizeof(choice.kernel[0]));
	/* Who asks for one split has all tiles whole. */
	if (asked.op == FMHA_FORWARD && asked.n_splits == 0 && asked.split_size == 0 &&
	    !option->cuts_rest)
		asked.n_splits = option->n_splits > 1 ? option->n_splits : 1;
	return plan_build(&asked, &choice, device, ret_plan, err);
}

bool plan_has_same_kernels(const struct plan *a, const struct plan *b)
{
	bool same = a->n_stages == b->n_stages && a->n_splits == b->n_splits &&
		    a->shares == b->shares;

	for (uint32_t i = 0; same && i < a->n_stages; i++)
		same = strcmp(a->stages[i].kernel, b->stages[i].kernel) == 0;
	return same;
}
