/* SPDX-License-Identifier: MIT */
/*
 * options.c: what a plan may differ in, beyond the kernel of one stage: into how many splits the keys
 * are cut, and whether backward sums dQ in the workspace. Listed for whoever measures, and weighed
 * where something was measured or can be predicted.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <specs/backend.h>

#include "planner.h"

#define MOST_SPLITS  24  /* numbers that are looked at for one problem */
#define MIN_KEYS     128 /* of a split */
#define BUSY_ROUNDS  4   /* so many blocks a compute unit are enough without a split */
#define MOST_RESULTS 256

static bool is_free(struct planner *b)
{
	const struct fmha_problem *p = &b->plan->problem;

	return p->n_splits == 0 && p->split_size == 0;
}

/* ---- splits ---- */

static struct split_device split_device_of(const struct plan_device *device)
{
	struct split_device split = {.units = device->compute_units ? device->compute_units : 1,
				     .gpu = device->lds_bytes > 0};
	const struct spec_catalog *catalog = device->registry ? registry_catalog(device->registry)
							      : NULL;
	int arch = catalog && device->arch ? spec_arch_find(catalog, device->arch) : -1;
	const struct spec_backend_arch *model = arch < 0 ? NULL : spec_arch_model(catalog, arch);

	if (model && strcmp(model->vendor, "amd") == 0)
		split.amd_unit_rate = 1000.0 * model->memory_gbs / model->units;
	return split;
}

/* As split.c would do it if @n were asked for; the number that comes of it may be smaller. */
static void split_into(const struct planner *b, int32_t n, struct split_choice *ret_split)
{
	struct split_device device = split_device_of(b->device);
	struct fmha_problem asked = b->plan->problem;

	for (int i = 0; i < 4; i++) { /* until asking for what came of it changes nothing */
		asked.n_splits = n;
		split_choose(&asked, &device, ret_split);
		if (ret_split->n == n)
			return;
		n = ret_split->n > 1 ? ret_split->n : 1;
	}
}

struct splits {
	int32_t n[MOST_SPLITS], size[MOST_SPLITS];
	size_t count;
};

static void add_splits(const struct planner *b, struct splits *list, int32_t n)
{
	struct split_choice split = {0};

	if (n > 1)
		split_into(b, n, &split);
	if (split.n <= 1)
		split = (struct split_choice){.size = b->plan->problem.seqlen_k};
	for (size_t i = 0; i < list->count; i++)
		if (list->n[i] == split.n)
			return;
	if (list->count == MOST_SPLITS)
		return;
	list->n[list->count] = split.n;
	list->size[list->count++] = split.size;
}

/* The default first, then no split, then what lies around. */
static void list_splits(const struct planner *b, int32_t n_default, struct splits *list)
{
	static const int32_t steps[] = {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128};
	const struct fmha_problem *p = &b->plan->problem;
	double units = b->device->compute_units ? b->device->compute_units : 1;
	double blocks = (double)p->batch * p->nhead_k *
			ceil((double)p->seqlen_q * p->nhead_q / (p->nhead_k ? p->nhead_k : 1) / 64);

	list->count = 0;
	add_splits(b, list, n_default);
	add_splits(b, list, 0);
	if (blocks >= BUSY_ROUNDS * units)
		return;
	for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++)
		if (p->seqlen_k / steps[i] >= MIN_KEYS &&
		    blocks * steps[i] <= 2 * BUSY_ROUNDS * units)
			add_splits(b, list, steps[i]);
}

/* ---- looking ---- */

struct outlook {
	int32_t n_splits, split_size;
	double time;  /* of the best candidate; < 0: there is none */
	double scale; /* microseconds for an estimate of 1; 0: unknown here */
	bool measured, predicted;
	struct plan_stage stage; /* of that candidate */
};

static void set_splits(struct planner *b, int32_t n, int32_t size)
{
	b->plan->n_splits = n;
	b->plan->split_size = n ? size : 0;
}

/* The candidates for so many splits. Return: 0 and a report, or as select_kernel(). */
static int peek_splits(struct planner *b, int32_t n, int32_t size, bool ask_all,
		       struct plan_stage *ret_stage, struct select_report *report,
		       double *ret_scale)
{
	enum abi_family family = ABI_FWD_SPLITKV;
	uint32_t dtype = b->plan->problem.q.dtype;
	int r = 1;

	set_splits(b, n, size);
	if (n > 0)
		return planner_peek(b, family, dtype, ask_all, ret_stage, report, ret_scale);
	for (int i = 0; r > 0 && planner_unsplit_family(b, i, &family); i++) {
		select_report_deinit(report);
		r = planner_peek(b, family, dtype, ask_all, ret_stage, report, ret_scale);
	}
	return r;
}

/* Return: 0, FMHA_ENOMEM. */
static int look(struct planner *b, struct outlook *outlook)
{
	struct select_report report = {0};
	int r = peek_splits(b, outlook->n_splits, outlook->split_size, false, &outlook->stage,
			    &report, &outlook->scale);

	outlook->time = -1;
	if (r == 0) {
		const struct candidate *best = &report.candidates[report.chosen];

		outlook->predicted = best->predicted_us > 0;
		outlook->measured = best->tuned_us > 0 || best->nearby_us > 0;
		outlook->time = outlook->measured || outlook->scale > 0 ? best->time
									: estimate_guess(best);
	}
	select_report_deinit(&report);
	set_splits(b, 0, 0);
	return r < 0 ? r : 0;
}

/* Other numbers of splits than the default are looked at only where something is known of them. */
static bool is_informed(const struct planner *b, struct splits *list, int32_t n_default)
{
	struct registry_measured measured[MOST_RESULTS];
	char shape[PROTO_SHAPE_BYTES];
	size_t n;

	shape_of(&b->plan->problem, shape);
	n = registry_measured_at(b->device->registry, shape, measured, MOST_RESULTS);
	for (int i = 0; n == 0 && shape_neighbour(&b->plan->problem, i, shape); i++)
		n = registry_measured_at(b->device->registry, shape, measured, MOST_RESULTS);
	if (n == 0 && b->device->model) {
		list_splits(b, n_default, list);
		return true;
	}
	list->count = 0;
	for (size_t i = 0; i < n; i++) /* the fastest first */
		add_splits(b, list, measured[i].n_splits);
	if (n > 0)
		add_splits(b, list, n_default);
	return n > 0;
}

/* Without a measurement only predictions tell: the formula's costs are of another unit, and split.c
 * knows better than they do. */
static bool on_one_scale(const struct outlook *outlooks, size_t n)
{
	bool predicted = true;

	for (size_t i = 0; i < n; i++) {
		if (outlooks[i].measured || outlooks[i].scale > 0)
			return true;
		predicted &= outlooks[i].time < 0 || outlooks[i].predicted;
	}
	return predicted;
}

/* All outlooks to one scale; then the least. */
static const struct outlook *best_of(struct outlook *outlooks, size_t n)
{
	const struct outlook *best = NULL;
	double scale = 0;

	for (size_t i = 0; i < n && scale == 0; i++)
		scale = outlooks[i].scale;
	for (size_t i = 0; i < n; i++) {
		struct outlook *o = &outlooks[i];

		if (o->time < 0)
			continue;
		if (scale > 0 && o->scale == 0)
			o->time *= scale * ESTIMATE_UNMEASURED;
		if (!best || o->time < best->time)
			best = o;
	}
	return best;
}

static const char *source_of(const struct outlook *outlook)
{
	return outlook->measured ? "measured" : "predicted";
}

/* What is weighed up: a number of splits each. */
struct outlooks {
	struct outlook list[MOST_SPLITS];
	size_t n;
};

/* Whether there is anything to weigh up. */
static bool list_outlooks(struct planner *b, struct split_choice *ret_split,
			  struct outlooks *ret_outlooks)
{
	struct split_device device = split_device_of(b->device);
	struct splits list;

	split_choose(&b->plan->problem, &device, ret_split);
	if (!is_free(b) || b->naming.n > 0 || !b->device->registry ||
	    !is_informed(b, &list, ret_split->n))
		return false;
	ret_outlooks->n = list.count;
	for (size_t i = 0; i < list.count; i++)
		ret_outlooks->list[i] = (struct outlook){.n_splits = list.n[i],
							 .split_size = list.size[i]};
	return true;
}

struct plan_looking {
	struct fmha_problem asked;
	struct plan plan;
	struct planner planner;
	struct fmha_error error;
	struct outlooks outlooks;
	size_t n_done;
	bool failed;
};

struct plan_looking *plan_looking_new(const struct fmha_problem *problem,
				      const struct plan_choice *choice,
				      const struct plan_device *device)
{
	struct plan_looking *looking;
	struct split_choice split;
	struct planner *b;

	/* A CPU has few kernels. */
	if (problem->op != FMHA_FORWARD || !device->registry || device->lds_bytes == 0)
		return NULL;
	looking = calloc(1, sizeof(*looking));
	if (!looking)
		return NULL;
	b = &looking->planner;
	looking->asked = *problem;
	*b = (struct planner){.plan = &looking->plan, .device = device, .err = &looking->error};
	if (planner_start(b, problem, choice) == 0 && planner_append(b) == 0 &&
	    plan_total_q(b->plan) > 0 && list_outlooks(b, &split, &looking->outlooks))
		return looking;
	return plan_looking_free(looking);
}

bool plan_look(struct plan_looking *looking)
{
	struct outlooks *outlooks = &looking->outlooks;

	if (looking->n_done < outlooks->n)
		looking->failed |= look(&looking->planner, &outlooks->list[looking->n_done++]) < 0;
	return looking->n_done < outlooks->n && !looking->failed;
}

struct plan_looking *plan_looking_free(struct plan_looking *looking)
{
	free(looking);
	return NULL;
}

bool options_take_looking(struct planner *b, const struct fmha_problem *problem)
{
	const struct plan_looking *looking = b->device->looking;

	if (!looking || b->report || memcmp(problem, &looking->asked, sizeof(*problem)) != 0)
		return false;
	*b->plan = looking->plan;
	b->naming = looking->planner.naming;
	return true;
}

/* Were these looked at before? Then they are as they were found. */
static bool has_looked(const struct plan_looking *looking, struct outlooks *outlooks)
{
	if (!looking || looking->failed || looking->n_done < outlooks->n ||
	    looking->outlooks.n != outlooks->n)
		return false;
	for (size_t i = 0; i < outlooks->n; i++)
		if (looking->outlooks.list[i].n_splits != outlooks->list[i].n_splits ||
		    looking->outlooks.list[i].split_size != outlooks->list[i].split_size)
			return false;
	*outlooks = looking->outlooks;
	return true;
}

int options_choose_splits(struct planner *b, struct split_choice *ret_split)
{
	struct outlooks outlooks;
	const struct outlook *best;
	int r = 0;

	if (!list_outlooks(b, ret_split, &outlooks))
		return 0;
	if (!has_looked(b->device->looking, &outlooks))
		for (size_t i = 0; i < outlooks.n && r == 0; i++)
			r = look(b, &outlooks.list[i]);
	if (r < 0)
		return fmha_error_set(b->err, r, "plan: out of memory");
	if (!on_one_scale(outlooks.list, outlooks.n))
		return 0;
	best = best_of(outlooks.list, outlooks.n);
	if (!best)
		return 0;
	b->has_found = true;
	b->found_splits = best->n_splits;
	b->found = best->stage;
	ret_split->n = best->n_splits > 1 ? best->n_splits : 1;
	ret_split->size = best->n_splits > 1 ? best->split_size : b->plan->problem.seqlen_k;
	(void)snprintf(ret_split->why, sizeof(ret_split->why),
		       "the fastest of %zu numbers of splits, as %s", outlooks.n, source_of(best));
	return 0;
}

bool options_prefer_buffered_dq(struct planner *b)
{
	struct registry_measured measured[MOST_RESULTS];
	char shape[PROTO_SHAPE_BYTES];
	int flags;

	if (!b->device->registry || b->naming.n > 0)
		return false;
	shape_of(&b->plan->problem, shape);
	if (registry_measured_at(b->device->registry, shape, measured, MOST_RESULTS) == 0)
		return false;
	flags = spec_pipeline_flags(registry_catalog(b->device->registry),
				    measured[0].spec.pipeline);
	return flags >= 0 && !(flags & SPEC_WRITES_DQ);
}

/* ---- listing ---- */

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
		option->time = estimate_guess(c);
		to->n++;
	}
}

static int gather_forward(struct planner *b, struct gathering *to)
{
	struct split_device device = split_device_of(b->device);
	struct split_choice split;
	struct splits list;
	int r = planner_append(b);

	if (r < 0)
		return r;
	split_choose(&b->plan->problem, &device, &split);
	if (is_free(b)) {
		list_splits(b, split.n, &list);
	} else {
		bool splits = b->plan->problem.split_size > 0 || split.n > 1;

		list = (struct splits){
			.n = {splits ? split.n : 0}, .size = {split.size}, .count = 1};
	}
	for (size_t i = 0; i < list.count; i++) {
		struct select_report report = {0};
		struct plan_stage ignored;
		double scale;

		r = peek_splits(b, list.n[i], list.size[i], true, &ignored, &report, &scale);
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
	if (asked.op == FMHA_FORWARD && asked.n_splits == 0 && asked.split_size == 0)
		asked.n_splits = option->n_splits > 1 ? option->n_splits : 1;
	return plan_build(&asked, &choice, device, ret_plan, err);
}

bool plan_has_same_kernels(const struct plan *a, const struct plan *b)
{
	bool same = a->n_stages == b->n_stages && a->n_splits == b->n_splits;

	for (uint32_t i = 0; same && i < a->n_stages; i++)
		same = strcmp(a->stages[i].kernel, b->stages[i].kernel) == 0;
	return same;
}

const struct plan_stage *plan_main_stage(const struct plan *plan)
{
	for (uint32_t i = 0; i < plan->n_stages; i++)
		if (estimate_is_main(plan, plan->stages[i].family))
			return &plan->stages[i];
	return NULL;
}
