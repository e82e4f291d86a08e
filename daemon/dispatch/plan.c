/* SPDX-License-Identifier: MIT */
/*
 * plan.c: plan_build(). The problem, checked and in one form (planner.c), is cut into stages; each stage gets
 * its kernel; then the workspace is laid out: first what stages hand to each other, then their private
 * shares.
 */
#include <stdio.h>
#include <string.h>

#include <kernels/square.h>

#include "planner.h"

void plan_placeholder_args(const struct plan *plan, union abi_args args[PLAN_MAX_STAGES])
{
	struct launch_bases bases = args_placeholders(plan);

	for (uint32_t i = 0; i < plan->n_stages; i++)
		launch_bind(&plan->stages[i].launch, &bases, &args[i]);
}

/* From the very arguments that a run will have: what they reach is what was checked. */
static int check_reach(const struct plan *plan, struct fmha_error *err)
{
	union abi_args args[PLAN_MAX_STAGES];
	int r = 0;

	plan_placeholder_args(plan, args);
	for (uint32_t i = 0; i < plan->n_stages && r == 0; i++)
		r = reach_check(plan, i, &args[i], err);
	return r;
}

/* Private shares come last and lie on top of each other: stages run one after the other. */
static int place_private(struct planner *b)
{
	struct plan *plan = b->plan;
	uint64_t base = 0, most = 0, offset;

	for (uint32_t i = 0; i < plan->n_stages; i++)
		if (plan->stages[i].workspace_bytes > most)
			most = plan->stages[i].workspace_bytes;
	if (!workspace_add(&plan->workspace_bytes, PLAN_ALIGNMENT, 0, &base) ||
	    !workspace_add(&plan->workspace_bytes, PLAN_ALIGNMENT, most, &offset))
		return planner_too_large(b);
	for (uint32_t i = 0; i < plan->n_stages; i++)
		plan->stages[i].workspace_offset = base;
	return 0;
}

/* Behind all else, since what a run needs of it may be less: see workspace.c. */
static int place_dq_acc(struct planner *b)
{
	struct plan *plan = b->plan;

	if (plan->dq_acc_bytes == 0)
		return 0;
	if (!workspace_add(&plan->workspace_bytes, PLAN_ALIGNMENT, plan->dq_acc_bytes,
			   &plan->layout.dq_acc))
		return planner_too_large(b);
	return 0;
}

/* Likewise, since of the workspace it is what has to be zero. */
static int place_arrivals(struct planner *b)
{
	struct plan *plan = b->plan;

	if (plan->rest_bytes == 0)
		return 0;
	plan->workspace_zero = 1;
	if (!workspace_add(&plan->workspace_bytes, PLAN_ALIGNMENT, plan->rest_bytes,
			   &plan->layout.rest_arrivals))
		return planner_too_large(b);
	return 0;
}

/* Split-KV: 0 when both kernels exist and the partials are placed; 1 when a kernel is missing. */
static int add_split(struct planner *b)
{
	struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;
	uint32_t n_stages = plan->n_stages;
	uint64_t bytes = plan->workspace_bytes;
	int r = planner_place_partials(b);

	if (r == 0)
		r = planner_add_stage(b, ABI_FWD_SPLITKV, p->q.dtype);
	if (r == 0)
		r = planner_add_stage(b, ABI_FWD_SPLITKV_COMBINE, p->o.dtype);
	if (r != 0) {
		plan->n_stages = n_stages;
		plan->workspace_bytes = bytes;
	}
	return r;
}

static int add_unsplit(struct planner *b)
{
	const struct fmha_problem *p = &b->plan->problem;
	enum abi_family family = ABI_FWD;

	for (int i = 0; planner_unsplit_family(b, i, &family); i++) {
		int r = planner_add_stage(b, family, p->q.dtype);

		if (r == 0 && family == ABI_FWD_SPLITKV)
			return planner_place_rest(b);
		if (r <= 0)
			return r;
	}
	return planner_no_kernel(b, family, p->q.dtype);
}

static bool is_on_cpu(const struct planner *b)
{
	return b->device->lds_bytes == 0;
}

/* All stages but those in front. */
static int add_attention(struct planner *b)
{
	struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;
	bool fixed = p->n_splits > 1 || p->split_size > 0;
	struct split_choice split;
	int r = planner_choose_splits(b, &split);

	if (r < 0)
		return r;
	if (b->report)
		memcpy(b->report->split_why, split.why, sizeof(split.why));
	if (split.n > PLAN_MAX_SPLITS)
		return fmha_error_set_field(b->err, FMHA_EINVAL,
					    p->split_size > 0 ? "split_size" : "n_splits",
					    "%d splits: at most %d", split.n, PLAN_MAX_SPLITS);
	/* A plan of one fixed-size split still goes through the combine: same rounding for all. */
	while ((split.n > 1 && (fixed || !planner_names_unsplit(b))) || (fixed && split.n > 0)) {
		plan->n_splits = split.n;
		plan->split_size = split.size;
		plan->shares = split.shares;
		r = add_split(b);
		if (r <= 0)
			return r;
		plan->n_splits = plan->split_size = 0;
		plan->shares = false;
		if (split.shares && planner_without_shares(b, &split))
			continue;
		if (fixed)
			return planner_no_kernel(b, ABI_FWD_SPLITKV, p->q.dtype);
		break;
	}
	return add_unsplit(b);
}

static int build_forward(struct planner *b)
{
	int r = planner_append(b);

	if (r < 0 || plan_total_q(b->plan) == 0)
		return r;
	r = planner_widen(b, true);
	if (r < 0)
		return r;
	r = r == 0 ? add_attention(b) : FMHA_ENOKERNEL;
	if (r != FMHA_ENOKERNEL)
		return r;
	planner_unwiden(b);
	return add_attention(b);
}

/*
 * How a pipeline that does not write dQ itself splits its partial sums. AMD's have one buffer for
 * atomic adds, or one a tile or worker when they must be deterministic; ours write one buffer in
 * full, or one for so many keys.
 */
static enum dq_mode dq_mode_of(const struct planner *b)
{
	const struct fmha_problem *p = &b->plan->problem;

	if (b->plan->dq_split_keys > 0)
		return DQ_PER_TILE;
	if (is_on_cpu(b))
		return DQ_SINGLE;
	if (!p->deterministic)
		return DQ_ATOMIC;
	return p->mode == FMHA_GROUP ? DQ_PER_TILE : DQ_PERSISTENT;
}

/* Has the kernel that was found tiles of dQ of its own? */
static bool sums_in_tiles(const struct planner *b)
{
	const struct plan_stage *stage = &b->plan->stages[b->plan->n_stages - 1];

	if (stage->has_spec)
		spec_dq_tile(registry_catalog(b->device->registry), &stage->spec,
			     &b->plan->dq_tile_rows, &b->plan->dq_tile_floats);
	return b->plan->dq_tile_rows > 0;
}

/* A CPU's kernels all can split, by chunks that their tile says; others are chosen for it. Return: whether the device
 * has such. */
static bool choose_dq_splits(struct planner *b)
{
	const struct split_device device = planner_split_device(b->device);
	struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;
	const struct plan_stage *stage = &plan->stages[1];
	struct split_choice split;
	struct square square;

	if (is_on_cpu(b))
		square = square_of(&stage->launch.args.bwd, stage->spec.tile.tile_m0,
				   stage->spec.tile.tile_n0, p->seqlen_q, p->seqlen_k);
	split_choose_dq(p, &device, is_on_cpu(b) ? &square : NULL, &split);
	plan->dq_split_keys = split.n > 1 ? split.size : 0;
	if (b->report)
		memcpy(b->report->split_why, split.why, sizeof(split.why));
	return is_on_cpu(b) || device.amd_unit_rate > 0;
}

/*
 * Where blocks are better split, with a buffer for what each has summed of dQ. Else without a buffer, else
 * with one; the other way round where that was measured as the faster. What writes dQ itself is no candidate
 * with a buffer that is not split.
 */
static int add_main_backward(struct planner *b)
{
	struct plan *plan = b->plan;
	uint32_t dtype = plan->problem.q.dtype;
	bool buffered = planner_prefer_buffered_dq(b), can_split = true;
	int32_t asked = plan->problem.n_splits;
	int r = 1;

	if (!is_on_cpu(b))
		can_split = choose_dq_splits(b);
	if (plan->dq_split_keys > 0) {
		plan->dq_buffered = 1;
		r = planner_add_stage(b, ABI_BWD_DQ_DK_DV, dtype);
		can_split = r == 0;
	}
	if (r == 1)
		plan->dq_split_keys = 0;
	for (int i = 0; r == 1 && i < 2; i++, buffered = !buffered) {
		plan->dq_buffered = buffered;
		r = planner_add_stage(b, ABI_BWD_DQ_DK_DV, dtype);
	}
	if (r == 1)
		return planner_no_kernel(b, ABI_BWD_DQ_DK_DV, dtype);
	if (r == 0 && is_on_cpu(b) && plan->stages[1].has_spec)
		(void)choose_dq_splits(b);
	if (r == 0 && asked > 1 && plan->problem.seqlen_k > 0 && !can_split)
		return fmha_error_set_field(
			b->err, FMHA_ENOTSUP, "n_splits",
			"n_splits %d: no backward kernel of %s sums dQ by parts of the keys", asked,
			b->device->arch);
	return r;
}

/* Heads that share keys are in parts where that is expected to be faster, and the kernel that was found cuts them. */
static void choose_kv_parts(struct planner *b)
{
	struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;
	const struct plan_stage *stage = &plan->stages[1];
	struct launch_bases bases = args_placeholders(plan);
	union abi_args args;
	double us[2];

	args_fill(plan, 1, &bases, &args);
	plan->kv_parts = spec_kv_parts(registry_catalog(b->device->registry), &stage->spec,
				       b->device->compute_units, &args.bwd, us);
	if (b->report && us[0] > 0)
		(void)snprintf(b->report->split_why, sizeof(b->report->split_why),
			       "about %.0f us, %.0f in one part", us[1], us[0]);
	if (b->device->workspace_most && (double)plan->kv_parts * p->nhead_k *
							 (double)args.bwd.sequences.total_k *
							 (p->hdim_q + p->hdim_v) * sizeof(float) >
						 (double)b->device->workspace_most / 2)
		plan->kv_parts = 1;
	if (plan->kv_parts > 1 && !planner_launch_again(b, 1)) {
		plan->kv_parts = 1;
		(void)planner_launch_again(b, 1);
	}
}

/* The first stage writes the order in which the second takes keys, where that one reads it. */
static void choose_order(struct planner *b)
{
	struct plan *plan = b->plan;
	struct launch_bases bases = args_placeholders(plan);
	union abi_args args;

	args_fill(plan, 1, &bases, &args);
	plan->order_words = spec_order_words(registry_catalog(b->device->registry),
					     &plan->stages[1].spec, &args.bwd);
	if (plan->order_words > 0 && !planner_launch_again(b, 0)) {
		plan->order_words = 0;
		(void)planner_launch_again(b, 0);
	}
}

static int build_backward(struct planner *b)
{
	struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;
	enum dq_mode mode = DQ_DIRECT;
	struct bwd_workspace w;
	int64_t tile_n0;
	int r;

	if (p->batch == 0 && !plan_present(p, FMHA_T_DSINK))
		return 0;
	r = planner_need_stage(b, ABI_BWD_DOT_DO_O, p->q.dtype);
	if (r < 0)
		return r;
	r = add_main_backward(b);
	if (r < 0)
		return r;
	if (plan->dq_buffered) {
		mode = dq_mode_of(b);
	} else if (sums_in_tiles(b)) {
		plan->dq_buffered = 1;
		mode = DQ_TILES;
		choose_kv_parts(b);
		choose_order(b);
	}
	if (plan->dq_buffered) {
		r = planner_need_stage(b, ABI_BWD_CONVERT_DQ, p->q.dtype);
		if (r < 0)
			return r;
	}
	tile_n0 = plan->stages[1].tile_n0 ? plan->stages[1].tile_n0 : 128;
	if (plan->dq_split_keys > 0)
		tile_n0 = plan->dq_split_keys;
	r = bwd_workspace_size(plan, mode, tile_n0, b->device->compute_units, &w, b->err);
	if (r < 0)
		return r;
	plan->dq_splits = w.dq_splits;
	plan->dq_per_sequence = mode == DQ_PER_TILE;
	plan->dq_tile_n0 = (uint32_t)tile_n0;
	plan->dq_acc_bytes = w.dq_acc_bytes;
	plan->workspace_zero = w.zero;
	plan->workspace_head_bytes = w.head_bytes;
	plan->layout.nsplits = w.nsplits;
	plan->layout.dq_acc_offsets = w.dq_acc_offsets;
	plan->layout.d = w.d;
	plan->layout.kv_acc = w.kv_acc;
	plan->workspace_bytes = w.bytes;
	return 0;
}

/* Where the workspace has what is known when all of it has been placed: of backward the second stage decides, of the
 * last tiles that are cut the kernel. */
static void record_again(struct plan *plan)
{
	struct launch_bases bases = args_placeholders(plan);

	for (uint32_t i = 0; i < plan->n_stages; i++) {
		struct plan_stage *stage = &plan->stages[i];
		union abi_args args;

		args_fill(plan, i, &bases, &args);
		args_record(plan, stage->family, &args, &stage->launch);
	}
}

static int build_stages(struct planner *b)
{
	const struct fmha_problem *p = &b->plan->problem;

	switch (p->op) {
	case FMHA_FORWARD:
		return build_forward(b);
	case FMHA_BACKWARD:
		return build_backward(b);
	case FMHA_APPEND_KV:
		if (p->batch == 0 || (p->seqlen_new == 0 && p->rope == FMHA_ROPE_NONE))
			return 0;
		return planner_need_stage(b, ABI_FWD_APPENDKV, p->k.dtype);
	case FMHA_MERGE_STATES:
		if (plan_total_q(b->plan) == 0)
			return 0;
		return planner_need_stage(b, ABI_FWD_SPLITKV_COMBINE, p->o.dtype);
	default:
		return fmha_error_set_field(b->err, FMHA_EINVAL, "op", "op %u: unknown", p->op);
	}
}

/* Where no device has said how it launches: one workgroup a tile of rows and head, as the spec has
 * it. A CPU has no grid. */
static void place_grid(struct planner *b)
{
	struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;

	if (b->device->find || is_on_cpu(b))
		return;
	for (uint32_t i = 0; i < plan->n_stages; i++) {
		struct plan_stage *stage = &plan->stages[i];
		const struct kernel_tile *tile = &stage->spec.tile;

		stage->launch.grid[0] = (uint32_t)ceil_div(p->seqlen_q ? p->seqlen_q : 1,
							   tile->tile_m0 ? tile->tile_m0 : 1);
		if (stage->family == ABI_BWD_DQ_DK_DV)
			stage->launch.grid[0] = (uint32_t)ceil_div(p->seqlen_k ? p->seqlen_k : 1,
								   tile->tile_n0);
		if (stage->family == ABI_FWD_SPLITKV)
			stage->launch.grid[0] *= (uint32_t)plan->n_splits;
		stage->launch.grid[1] = (uint32_t)p->nhead_q;
		stage->launch.grid[2] = (uint32_t)p->batch;
		stage->launch.block[0] = b->device->wave * tile->wave_m0 * tile->wave_n0 *
					 tile->wave_k0;
		stage->launch.block[1] = stage->launch.block[2] = 1;
	}
}

/* dq_acc is the second stage's, arrivals are the last one's. */
static void place_zeroes(struct plan *plan)
{
	if (plan->workspace_zero && plan->dq_acc_bytes > 0) {
		plan->stages[1].launch.n_zeroes = 1;
		plan->stages[1].launch.zeroes[0] = (struct launch_range){plan->layout.dq_acc,
									 plan->dq_acc_bytes};
	}
	if (plan->rest_bytes > 0) {
		struct launch_record *last = &plan->stages[plan->n_stages - 1].launch;

		last->n_zeroes = 1;
		last->zeroes[0] = (struct launch_range){plan->layout.rest_arrivals,
							plan->rest_bytes};
	}
}

/* What the record promises about pointers, their tensors have to keep. */
static void align_views(struct plan *plan, const struct launch_record *record)
{
	for (uint32_t i = 0; i < record->n_aligned; i++)
		for (uint32_t k = 0; k < record->n_relocations; k++) {
			const struct launch_relocation *r = &record->relocations[k];

			for (uint32_t v = 0; r->offset == record->aligned[i] && v < plan->n_views;
			     v++)
				if (plan->views[v].role == r->base)
					plan->views[v].alignment = LAUNCH_ALIGNMENT;
		}
}

int plan_build_reported(const struct fmha_problem *problem, const struct plan_choice *choice,
			const struct plan_device *device, struct plan *ret_plan,
			struct plan_report *report, struct fmha_error *err)
{
	struct plan plan = {0};
	struct planner b = {.plan = &plan, .device = device, .report = report, .err = err};
	int r = planner_take_looking(&b, problem) ? 0 : planner_start(&b, problem, choice);

	if (r < 0)
		return r;
	r = build_stages(&b);
	if (r == 0 || r == FMHA_ENOKERNEL)
		r = naming_settle(&b.naming, &plan, r, err);
	if (r < 0)
		return r;
	r = place_private(&b);
	if (r == 0)
		r = place_dq_acc(&b);
	if (r == 0)
		r = place_arrivals(&b);
	if (r < 0)
		return r;
	if (plan.problem.op == FMHA_BACKWARD || plan.rest_bytes > 0)
		record_again(&plan);
	place_grid(&b);
	lengths_choose(&plan);
	for (uint32_t i = 0; i < plan.n_stages; i++) {
		args_record_keys(&plan, plan.stages[i].family, &plan.stages[i].launch);
		align_views(&plan, &plan.stages[i].launch);
	}
	place_zeroes(&plan);
	r = check_reach(&plan, err);
	if (r < 0)
		return r;
	*ret_plan = plan;
	return 0;
}

int plan_build(const struct fmha_problem *problem, const struct plan_choice *choice,
	       const struct plan_device *device, struct plan *ret_plan, struct fmha_error *err)
{
	return plan_build_reported(problem, choice, device, ret_plan, NULL, err);
}

uint64_t plan_zero_from(const struct plan *plan)
{
	return plan->rest_bytes > 0 ? plan->layout.rest_arrivals : plan->layout.dq_acc;
}

const struct plan_stage *plan_main_stage(const struct plan *plan)
{
	for (uint32_t i = plan->n_stages; i-- > 0;) /* behind those of few rows */
		if (estimate_is_main(plan, plan->stages[i].family))
			return &plan->stages[i];
	return NULL;
}
