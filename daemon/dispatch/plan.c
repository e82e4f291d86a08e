/* SPDX-License-Identifier: MIT */
/*
 * plan.c: plan_build(). The problem is checked and brought into one form (strides written out, the
 * default scale, masks that hide nothing dropped), then cut into stages; each stage gets its
 * kernel; then the workspace is laid out: first what stages hand to each other, then their private
 * shares.
 */
#include <limits.h>
#include <math.h>
#include <string.h>

#include "planner.h"

/*
 * A step that is never taken may be any number, but kernels look ahead by one: the limit keeps
 * their sums in range, and what they see of the stride (not 0, well aligned).
 */
static void limit_idle_strides(const struct fmha_problem *p, enum fmha_tensor_role role,
			       int64_t stride[5])
{
	static const int64_t most = (int64_t)1 << 40;
	uint64_t span = 0;
	int64_t dims[5];

	problem_extents(p, role, dims);
	(void)problem_span_bytes(p, role, &span, NULL);
	for (int i = 0; i < 5; i++)
		if ((dims[i] <= 1 || span == 0) && stride[i] > most)
			stride[i] = most;
}

static void normalise(struct fmha_problem *p)
{
	int64_t stride[5];

	if (isnan(p->scale))
		p->scale = 1.0F / sqrtf((float)p->hdim_q);
	if (p->mask == FMHA_MASK_NONE || (p->window_left < 0 && p->window_right < 0)) {
		p->mask = FMHA_MASK_NONE;
		p->window_left = p->window_right = -1;
		p->sink_tokens = 0;
	}
	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		if (!plan_present(p, (enum fmha_tensor_role)i))
			continue;
		problem_strides(p, (enum fmha_tensor_role)i, stride);
		limit_idle_strides(p, (enum fmha_tensor_role)i, stride);
		memcpy(p->tensor[i].stride, stride, sizeof(stride));
	}
}

/* What kernels cannot express, though the wire can. */
static int check_limits(const struct fmha_problem *p, struct fmha_error *err)
{
	static const enum fmha_tensor_role dense[] = {FMHA_T_SINK, FMHA_T_DSINK};

	for (size_t i = 0; i < sizeof(dense) / sizeof(dense[0]); i++)
		if (plan_present(p, dense[i]) && p->nhead_q > 1 &&
		    p->tensor[dense[i]].stride[0] != 1)
			return fmha_error_set_field(err, FMHA_ENOTSUP, "tensor.sink.stride",
						    "tensor.%s: must be dense",
						    proto_roles[dense[i]].name);
	if (plan_present(p, FMHA_T_ALIBI_SLOPES) && p->nhead_q > 1 &&
	    p->alibi_slopes.stride[1] != 1)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "tensor.alibi_slopes.stride",
					    "tensor.alibi_slopes: its heads must be dense");
	/* Turning what is quantized already would round it a second time, against no scale. */
	if (p->rope != FMHA_ROPE_NONE && fmha_dtype_bytes(p->k.dtype) == 1)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "rope",
					    "rope: turns f32, f16 and bf16, not %s: turn before "
					    "quantizing, and append without rope",
					    fmha_dtype_name(p->k.dtype));
	if (plan_present(p, FMHA_T_BLOCK_TABLE) && !plan_present(p, FMHA_T_SEQLEN_K) &&
	    (int64_t)p->max_blocks * p->page_size < p->seqlen_k)
		return fmha_error_set_field(
			err, FMHA_EINVAL, "max_blocks",
			"max_blocks %d: %d keys need %lld pages of %d", p->max_blocks, p->seqlen_k,
			(long long)ceil_div(p->seqlen_k, p->page_size), p->page_size);
	return 0;
}

/*
 * How much the kernels are ever asked to count to. Broadcast axes make sizes free that no memory
 * backs: within these limits tile counts, paddings and workspaces of any kernel stay in range.
 */
static int check_work(const struct plan *plan, struct fmha_error *err)
{
	static const double most_length = 0x1p30, most_work = 0x1p40;
	const struct fmha_problem *p = &plan->problem;
	const struct problem_axes *axes = &plan->axes;
	const struct {
		const char *field;
		double value, limit;
		const char *of;
	} counts[] = {
		{"seqlen_q", (double)axes->q.longest, most_length, "rows of a sequence"},
		{"seqlen_k", (double)axes->k.longest, most_length, "keys of a sequence"},
		{"nhead_q", (double)plan_total_q(plan) * p->nhead_q, most_work, "rows times heads"},
		{"nhead_k", (double)axes->sequences * (double)axes->k.longest * p->nhead_k,
		 most_work, "sequences times keys times heads"},
		/* Backward sums gradients over an axis of all keys. */
		{"seqlen_k",
		 p->op == FMHA_BACKWARD ? (double)axes->k.outer * (double)axes->k.length : 0,
		 INT32_MAX, "keys of all sequences"},
	};

	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
		if (counts[i].value > counts[i].limit)
			return fmha_error_set_field(err, FMHA_ENOTSUP, counts[i].field,
						    "%s: %.0f %s, at most %.0f", counts[i].field,
						    counts[i].value, counts[i].of, counts[i].limit);
	return 0;
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

int planner_peek(struct planner *b, enum abi_family family, uint32_t dtype, bool ask_all,
		 struct plan_stage *ret_stage, struct select_report *ret_report, double *ret_scale)
{
	struct launch_bases bases = args_placeholders(b->plan);
	struct plan_stage *stage = &b->plan->stages[b->plan->n_stages];
	union abi_args args;
	struct select_stage select = {.plan = b->plan,
				      .device = b->device,
				      .family = family,
				      .dtype = dtype,
				      .args = &args,
				      .shapes = &b->shapes,
				      .ask_all = ask_all,
				      .named = naming_of(&b->naming, family)};
	int r;

	*stage = (struct plan_stage){.family = family, .dtype = dtype};
	args_fill(b->plan, b->plan->n_stages, &bases, &args);
	r = select_kernel(&select, stage, ret_report);
	*ret_scale = select.scale;
	*ret_stage = *stage;
	*stage = (struct plan_stage){0};
	return r;
}

/* Adds a stage and looks for its kernel. 0, or 1 when nothing fits; then no stage was added. */
static int add_stage(struct planner *b, enum abi_family family, uint32_t dtype)
{
	struct plan *plan = b->plan;
	struct plan_stage *stage = &plan->stages[plan->n_stages];
	struct launch_bases bases = args_placeholders(plan);
	struct select_report report = {0};
	struct select_named *named = naming_of(&b->naming, family);
	union abi_args args;
	const char *why;
	int r;

	if (b->has_found && !b->report && b->found.family == family &&
	    b->found_splits == plan->n_splits) {
		*stage = b->found;
		plan->n_stages++;
		return 0;
	}
	*stage = (struct plan_stage){.family = family, .dtype = dtype};
	args_fill(plan, plan->n_stages, &bases, &args);
	if (b->device->registry) {
		struct select_stage select = {.plan = plan,
					      .device = b->device,
					      .family = family,
					      .dtype = dtype,
					      .args = &args,
					      .shapes = &b->shapes,
					      .ask_all = b->report,
					      .named = named};

		r = select_kernel(&select, stage, b->report ? &report : NULL);
		if (b->report)
			explain_selection(b->report->selections, &select, r == 0 ? stage : NULL,
					  &report);
		select_report_deinit(&report);
	} else {
		r = SELECT_NO_SPEC;
	}
	/* What specs/ does not describe yet, the device may still have. */
	if (r == SELECT_NO_SPEC)
		r = named || !b->device->find ||
		    b->device->find(b->device->owner, family, dtype, &args, stage, &why) != 0;
	if (r < 0)
		return fmha_error_set(b->err, r, "plan: out of memory");
	plan->n_stages += r == 0;
	return r;
}

static const char *const family_names[ABI_N_FAMILIES] = {ABI_FAMILIES(ABI_WORD)};

const char *plan_family_name(enum abi_family family)
{
	return family < ABI_N_FAMILIES ? family_names[family] : "unknown";
}

static int no_kernel(struct planner *b, enum abi_family family, uint32_t dtype)
{
	const struct fmha_problem *p = &b->plan->problem;
	const char *type = fmha_dtype_name(dtype);

	return fmha_error_set(b->err, FMHA_ENOKERNEL, "%s: no %s kernel for %s, hdim %d x %d",
			      b->device->arch, plan_family_name(family), type ? type : "?",
			      p->hdim_q, p->hdim_v);
}

static int need_stage(struct planner *b, enum abi_family family, uint32_t dtype)
{
	int r = add_stage(b, family, dtype);

	return r == 1 ? no_kernel(b, family, dtype) : r;
}

static int too_large(struct planner *b)
{
	return fmha_error_set_field(b->err, FMHA_EINVAL, "workspace",
				    "workspace: its size does not fit in 62 bits");
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
		return too_large(b);
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
		return too_large(b);
	return 0;
}

/* Allocates @n factors' product of bytes in the common part. */
static int place_common(struct planner *b, int n, const int64_t *factors, uint64_t *ret_offset)
{
	uint64_t bytes;
	int r = workspace_product(&bytes, b->err, n, factors);

	if (r < 0)
		return r;
	if (!workspace_add(&b->plan->workspace_bytes, PLAN_ALIGNMENT, bytes, ret_offset))
		return too_large(b);
	return 0;
}

int planner_append(struct planner *b)
{
	struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;
	int r;

	if (plan->append) /* done while it was looked at */
		return 0;
	if (!plan_present(p, FMHA_T_K_NEW) || p->batch == 0 ||
	    (p->seqlen_new == 0 && p->rope == FMHA_ROPE_NONE))
		return 0;
	plan->append = 1;
	r = need_stage(b, ABI_FWD_APPENDKV, p->k.dtype);
	if (r < 0 || p->rope == FMHA_ROPE_NONE)
		return r;
	return place_common(b, 4,
			    (const int64_t[]){plan_total_q(plan), p->nhead_q, p->hdim_q,
					      fmha_dtype_bytes(p->q.dtype)},
			    &plan->layout.q_rotated);
}

/* Split-KV: 0 when both kernels exist and the partials are placed; 1 when a kernel is missing. */
static int add_split(struct planner *b)
{
	struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;
	uint32_t n_stages = plan->n_stages;
	int r = add_stage(b, ABI_FWD_SPLITKV, p->q.dtype);

	if (r == 0)
		r = add_stage(b, ABI_FWD_SPLITKV_COMBINE, p->o.dtype);
	if (r != 0) {
		plan->n_stages = n_stages;
		return r;
	}
	r = place_common(b, 5,
			 (const int64_t[]){plan->n_splits, p->nhead_q, plan_total_q(plan),
					   p->hdim_v, (int64_t)sizeof(float)},
			 &plan->layout.o_acc);
	if (r < 0)
		return r;
	return place_common(b, 4,
			    (const int64_t[]){plan->n_splits, p->nhead_q, plan_total_q(plan),
					      (int64_t)sizeof(float)},
			    &plan->layout.lse_acc);
}

bool planner_unsplit_family(struct planner *b, int i, enum abi_family *ret_family)
{
	const struct fmha_problem *p = &b->plan->problem;
	/* A device without batch_prefill may have the same thing as fwd_pagedkv in group mode. */
	bool prefills = plan_paged(p) && p->mode == FMHA_GROUP &&
			!naming_of(&b->naming, ABI_FWD_PAGEDKV);

	if (i > (prefills ? 1 : 0))
		return false;
	*ret_family = prefills && i == 0 ? ABI_BATCH_PREFILL
		      : plan_paged(p)    ? ABI_FWD_PAGEDKV
					 : ABI_FWD;
	return true;
}

static int add_unsplit(struct planner *b)
{
	const struct fmha_problem *p = &b->plan->problem;
	enum abi_family family = ABI_FWD;

	for (int i = 0; planner_unsplit_family(b, i, &family); i++) {
		int r = add_stage(b, family, p->q.dtype);

		if (r <= 0)
			return r;
	}
	return no_kernel(b, family, p->q.dtype);
}

/* Is a kernel named that takes all keys at once? */
static bool names_unsplit(struct planner *b)
{
	return naming_of(&b->naming, ABI_FWD) || naming_of(&b->naming, ABI_FWD_PAGEDKV) ||
	       naming_of(&b->naming, ABI_BATCH_PREFILL);
}

static bool is_on_cpu(const struct planner *b)
{
	return b->device->lds_bytes == 0;
}

static int build_forward(struct planner *b)
{
	struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;
	bool fixed = p->n_splits > 1 || p->split_size > 0;
	struct split_choice split;
	int r = planner_append(b);

	if (r < 0)
		return r;
	if (plan_total_q(plan) == 0)
		return 0;
	r = options_choose_splits(b, &split);
	if (r < 0)
		return r;
	if (b->report)
		memcpy(b->report->split_why, split.why, sizeof(split.why));
	if (split.n > PLAN_MAX_SPLITS)
		return fmha_error_set_field(b->err, FMHA_EINVAL,
					    p->split_size > 0 ? "split_size" : "n_splits",
					    "%d splits: at most %d", split.n, PLAN_MAX_SPLITS);
	/* A plan of one fixed-size split still goes through the combine: same rounding for all. */
	if ((split.n > 1 && (fixed || !names_unsplit(b))) || (fixed && split.n > 0)) {
		plan->n_splits = split.n;
		plan->split_size = split.size;
		r = add_split(b);
		if (r <= 0)
			return r;
		plan->n_splits = plan->split_size = 0;
		if (fixed)
			return no_kernel(b, ABI_FWD_SPLITKV, p->q.dtype);
	}
	return add_unsplit(b);
}

/*
 * How a pipeline that does not write dQ itself splits its partial sums. AMD's have one buffer for
 * atomic adds, or one a tile or worker when they must be deterministic; a CPU's writes one buffer
 * in full.
 */
static enum dq_mode dq_mode_of(const struct planner *b)
{
	const struct fmha_problem *p = &b->plan->problem;

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

/* Without a buffer for sums of dQ, else with one; the other way round where that was measured as the
 * faster. What writes dQ itself is no candidate with a buffer. */
static int add_main_backward(struct planner *b)
{
	struct plan *plan = b->plan;
	bool buffered = options_prefer_buffered_dq(b);

	for (int i = 0; i < 2; i++, buffered = !buffered) {
		int r;

		plan->dq_buffered = buffered;
		r = add_stage(b, ABI_BWD_DQ_DK_DV, plan->problem.q.dtype);
		if (r <= 0)
			return r;
	}
	return no_kernel(b, ABI_BWD_DQ_DK_DV, plan->problem.q.dtype);
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
	r = need_stage(b, ABI_BWD_DOT_DO_O, p->q.dtype);
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
	}
	if (plan->dq_buffered) {
		r = need_stage(b, ABI_BWD_CONVERT_DQ, p->q.dtype);
		if (r < 0)
			return r;
	}
	tile_n0 = plan->stages[1].tile_n0 ? plan->stages[1].tile_n0 : 128;
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
	plan->workspace_bytes = w.bytes;
	return 0;
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
		return need_stage(b, ABI_FWD_APPENDKV, p->k.dtype);
	case FMHA_MERGE_STATES:
		if (plan_total_q(b->plan) == 0)
			return 0;
		return need_stage(b, ABI_FWD_SPLITKV_COMBINE, p->o.dtype);
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

static void note_alignment(struct plan *plan, const struct plan_device *device)
{
	for (uint32_t i = 0; i < plan->n_views; i++) {
		uint32_t role = plan->views[i].role;
		const struct fmha_tensor *tensor = &plan->problem.tensor[role];
		uint64_t at = device->locate ? device->locate(device->tensors, tensor)
					     : tensor->offset;

		plan->misaligned[role] = (uint8_t)(at % LAUNCH_ALIGNMENT);
	}
}

/* dq_acc is the second stage's. */
static void place_zeroes(struct plan *plan)
{
	if (!plan->workspace_zero || plan->dq_acc_bytes == 0)
		return;
	plan->stages[1].launch.n_zeroes = 1;
	plan->stages[1].launch.zeroes[0] = (struct launch_range){plan->layout.dq_acc,
								 plan->dq_acc_bytes};
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

int planner_start(struct planner *b, const struct fmha_problem *problem,
		  const struct plan_choice *choice)
{
	struct plan *plan = b->plan;
	int r = problem_check(problem, b->err);

	if (r < 0)
		return r;
	plan->problem = *problem;
	normalise(&plan->problem);
	problem_axes(&plan->problem, &plan->axes);
	r = check_limits(&plan->problem, b->err);
	if (r == 0)
		r = check_work(plan, b->err);
	if (r == 0)
		r = views_build(plan, b->err);
	if (r < 0)
		return r;
	if (b->device->registry)
		shape_words_make(&plan->problem, &b->shapes);
	note_alignment(plan, b->device);
	plan->flops = cost_flops(&plan->problem);
	plan->bytes = cost_bytes(&plan->problem);
	return naming_init(&b->naming, choice, b->device, b->err);
}

int plan_build_reported(const struct fmha_problem *problem, const struct plan_choice *choice,
			const struct plan_device *device, struct plan *ret_plan,
			struct plan_report *report, struct fmha_error *err)
{
	struct plan plan = {0};
	struct planner b = {.plan = &plan, .device = device, .report = report, .err = err};
	int r = options_take_looking(&b, problem) ? 0 : planner_start(&b, problem, choice);

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
	if (r < 0)
		return r;
	place_grid(&b);
	lengths_choose(&plan);
	for (uint32_t i = 0; i < plan.n_stages; i++) {
		args_record(&plan, i, &plan.stages[i].launch);
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
