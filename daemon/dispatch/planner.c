/* SPDX-License-Identifier: MIT */
/*
 * planner.c: a plan in the making. The problem is checked and brought into one form (strides written out, the
 * default scale, masks that hide nothing dropped); stages find their kernels; and how many parts the keys are cut
 * into is weighed up where something was measured or can be predicted.
 */
#include "planner.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <specs/backend.h>

#define MIN_KEYS     128 /* of a split */
#define BUSY_ROUNDS  4   /* so many blocks a compute unit are enough without a split */
#define MOST_RESULTS 256

/*
 * A step that is never taken may be any number, but kernels look ahead by one: the limit keeps
 * their sums in range, and what they see of the stride (not 0, well aligned).
 */
static void limit_idle_strides(struct problem_view *view)
{
	static const int64_t most = (int64_t)1 << 40;

	for (int i = 0; i < 5; i++)
		if ((view->extent[i] <= 1 || view->bytes == 0) && view->stride[i] > most)
			view->stride[i] = most;
}

static void normalise(struct fmha_problem *p)
{
	struct problem_view view;

	if (isnan(p->scale))
		p->scale = 1.0F / sqrtf((float)p->hdim_q);
	if (p->mask == FMHA_MASK_NONE || (p->window_left < 0 && p->window_right < 0)) {
		p->mask = FMHA_MASK_NONE;
		p->window_left = p->window_right = -1;
		p->sink_tokens = 0;
	}
	if (p->logits_soft_cap == 0)
		p->softcap_approx = 0;
	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		if (!plan_present(p, (enum fmha_tensor_role)i))
			continue;
		(void)problem_view(p, (enum fmha_tensor_role)i, &view, NULL);
		limit_idle_strides(&view);
		memcpy(p->tensor[i].stride, view.stride, sizeof(view.stride));
	}
}

/* GPUs multiply weights with what V has several factors of a head for. In f16 that leaves few bits, or none, of
 * a product below 2^-14: a factor maps values to all of fp8, and is as small as they are. */
static int check_weights(const struct fmha_problem *p, struct fmha_error *err)
{
	if (p->op != FMHA_FORWARD || p->q.dtype != FMHA_F16 || fmha_dtype_bytes(p->v.dtype) != 1 ||
	    !plan_present(p, FMHA_T_V_DESCALE) || !plan_varied_factors(p))
		return 0;
	return fmha_error_set_field(
		err, FMHA_ENOTSUP, "v_descale",
		"v_descale: under queries of f16 GPUs take one factor of a head, "
		"not of blocks or pages: give queries of bf16");
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
	if (p->rope != FMHA_ROPE_NONE && fmha_dtype_bytes(p->k_new.dtype) == 1)
		return fmha_error_set_field(
			err, FMHA_ENOTSUP, "rope",
			"rope: turns k_new of f32, f16 and bf16, not %s: give it "
			"as it was before quantizing, or append without rope",
			fmha_dtype_name(p->k_new.dtype));
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
		{"topk", p->topk, most_length, "chosen keys of a row"},
		{"topk", (double)plan_total_q(plan) * p->topk, most_work, "rows times chosen keys"},
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
	if (r == 0 && b->device->lds_bytes > 0)
		r = check_weights(&plan->problem, b->err);
	if (r == 0)
		r = check_work(plan, b->err);
	if (r == 0)
		r = views_build(plan, b->err);
	if (r < 0)
		return r;
	if (b->device->registry && registry_has_measured(b->device->registry))
		shape_words_make(&plan->problem, &b->shapes);
	if (b->report)
		plan_shape(&plan->problem, b->report->shape);
	note_alignment(plan, b->device);
	plan->flops = cost_flops(&plan->problem);
	plan->bytes = cost_bytes(&plan->problem);
	return naming_init(&b->naming, choice, b->device, b->err);
}

/* ---- stages ---- */

int planner_too_large(struct planner *b)
{
	return fmha_error_set_field(b->err, FMHA_EINVAL, "workspace",
				    "workspace: its size does not fit in 62 bits");
}

int planner_place(struct planner *b, int n, const int64_t *factors, uint64_t *ret_offset)
{
	uint64_t bytes = 0;
	int r = workspace_product(&bytes, b->err, n, factors);

	if (r < 0)
		return r;
	if (!workspace_add(&b->plan->workspace_bytes, PLAN_ALIGNMENT, bytes, ret_offset))
		return planner_too_large(b);
	return 0;
}

static int place_partials(struct planner *b, int64_t n, uint64_t *ret_o_acc, uint64_t *ret_lse_acc)
{
	const struct fmha_problem *p = &b->plan->problem;
	int64_t rows = plan_total_q(b->plan), bytes = sizeof(float);
	int r = planner_place(b, 5, (const int64_t[]){n, p->nhead_q, rows, p->hdim_v, bytes},
			      ret_o_acc);

	return r < 0 ? r
		     : planner_place(b, 4, (const int64_t[]){n, p->nhead_q, rows, bytes},
				     ret_lse_acc);
}

int planner_place_partials(struct planner *b)
{
	struct plan *plan = b->plan;

	return place_partials(b, plan->n_splits, &plan->layout.o_acc, &plan->layout.lse_acc);
}

/* A stage that a kernel is looked for. */
struct attempt {
	union abi_args args;
	struct select_stage select;
};

/*
 * Writes the stage after those that there are, with the kernel that is chosen for it: this is where stages get
 * kernels and arguments, whether they are looked at or stay. What arguments say of the workspace is known by
 * then, but for backward's. Return: as select_kernel().
 */
static int attempt_stage(struct planner *b, enum abi_family family, uint32_t dtype, bool ask_all,
			 struct attempt *ret_attempt, struct select_report *ret_report)
{
	struct plan *plan = b->plan;
	struct plan_stage *stage = &plan->stages[plan->n_stages];
	struct launch_bases bases = args_placeholders(plan);
	int r = SELECT_NO_SPEC;

	*stage = (struct plan_stage){.family = family, .dtype = dtype};
	args_fill(plan, plan->n_stages, &bases, &ret_attempt->args);
	ret_attempt->select = (struct select_stage){.plan = plan,
						    .device = b->device,
						    .family = family,
						    .dtype = dtype,
						    .args = &ret_attempt->args,
						    .shapes = &b->shapes,
						    .ask_all = ask_all,
						    .named = naming_of(&b->naming, family)};
	if (b->device->registry)
		r = select_kernel(&ret_attempt->select, stage, ret_report);
	if (r == 0)
		args_record(plan, family, &ret_attempt->args, &stage->launch);
	return r;
}

int planner_peek(struct planner *b, enum abi_family family, uint32_t dtype, bool ask_all,
		 struct plan_stage *ret_stage, struct select_report *ret_report, double *ret_scale)
{
	struct plan_stage *stage = &b->plan->stages[b->plan->n_stages];
	uint64_t bytes = b->plan->workspace_bytes;
	struct attempt attempt = {0};
	int r = family == ABI_FWD_SPLITKV ? planner_place_partials(b) : 0;

	if (r == 0)
		r = attempt_stage(b, family, dtype, ask_all, &attempt, ret_report);
	*ret_scale = attempt.select.scale;
	*ret_stage = *stage;
	*stage = (struct plan_stage){0};
	b->plan->workspace_bytes = bytes;
	return r;
}

/* The stage as it was found while numbers of splits were weighed up; NULL: it was not looked at. */
static const struct plan_stage *stage_seen(const struct planner *b, enum abi_family family)
{
	const struct plan *plan = b->plan;

	for (size_t i = 0; i < b->outlooks.n && !b->report; i++) {
		const struct outlook *o = &b->outlooks.list[i];

		if (o->time >= 0 && o->stage.family == family && o->n_splits == plan->n_splits &&
		    (plan->n_splits == 0 || o->split_size == plan->split_size))
			return &o->stage;
	}
	return NULL;
}

/* What specs/ does not describe yet, the device may still have. Return: whether it has. */
static bool find_without_spec(const struct planner *b, const struct attempt *attempt,
			      struct plan_stage *stage)
{
	const struct plan_device *device = b->device;
	const char *why;

	if (attempt->select.named || !device->find ||
	    device->find(device->owner, stage->family, stage->dtype, &attempt->args, stage, &why) !=
		    0)
		return false;
	args_record(b->plan, stage->family, &attempt->args, &stage->launch);
	return true;
}

bool planner_launch_again(struct planner *b, uint32_t index)
{
	const struct plan_device *device = b->device;
	struct plan_stage *stage = &b->plan->stages[index];
	struct launch_bases bases = args_placeholders(b->plan);
	union abi_args args;
	const char *why;

	args_fill(b->plan, index, &bases, &args);
	return device->find &&
	       device->find(device->owner, stage->family, stage->dtype, &args, stage, &why) == 0;
}

int planner_add_stage(struct planner *b, enum abi_family family, uint32_t dtype)
{
	struct plan *plan = b->plan;
	struct plan_stage *stage = &plan->stages[plan->n_stages];
	const struct plan_stage *seen = stage_seen(b, family);
	struct select_report report = {0};
	struct attempt attempt;
	int r;

	if (seen) {
		*stage = *seen;
		plan->n_stages++;
		return 0;
	}
	r = attempt_stage(b, family, dtype, b->report, &attempt, b->report ? &report : NULL);
	if (b->device->registry)
		memcpy(b->why, attempt.select.why, sizeof(b->why));
	if (b->device->registry && b->report)
		b->report->selected(b->report, &attempt.select, r == 0 ? stage : NULL, &report);
	select_report_deinit(&report);
	if (r == SELECT_NO_SPEC)
		r = find_without_spec(b, &attempt, stage) ? 0 : 1;
	if (r < 0)
		return fmha_error_set(b->err, r, "plan: out of memory");
	plan->n_stages += r == 0;
	return r;
}

int planner_no_kernel(struct planner *b, enum abi_family family, uint32_t dtype)
{
	const struct fmha_problem *p = &b->plan->problem;
	const char *type = fmha_dtype_name(dtype);

	return fmha_error_set(b->err, FMHA_ENOKERNEL, "%s: no %s kernel for %s, hdim %d x %d%s%s",
			      b->device->arch, plan_family_name(family), type ? type : "?",
			      p->hdim_q, p->hdim_v, b->why[0] ? ": " : "", b->why);
}

int planner_need_stage(struct planner *b, enum abi_family family, uint32_t dtype)
{
	int r = planner_add_stage(b, family, dtype);

	return r == 1 ? planner_no_kernel(b, family, dtype) : r;
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
	r = p->rope == FMHA_ROPE_NONE
		    ? 0
		    : planner_place(b, 4,
				    (const int64_t[]){plan_total_q(plan), p->nhead_q, p->hdim_q,
						      fmha_dtype_bytes(p->q.dtype)},
				    &plan->layout.q_rotated);
	return r < 0 ? r : planner_need_stage(b, ABI_FWD_APPENDKV, p->k.dtype);
}

/*
 * A loop that widens keys of 8 bits itself does so again for every tile of rows, and takes 0.55 to 0.8 of the
 * speed that it has over 16 bits. A pass over the cache is 3 bytes an element: as much as some 400 rows lose. (H100,
 * 128 dims; NOTES.md has the figures.)
 */
#define WIDEN_ROWS  512 /* that share a head's keys */
#define WIDEN_FLOPS 5e9
#define WIDEN_BYTES ((double)(UINT64_C(2) << 30)) /* of the workspace, at most */
#define FEW_BYTES                                                                                  \
	1e6 /* of a cache, beneath which the stages that are more cost more than they gain */

static bool can_widen(const struct planner *b)
{
	const struct fmha_problem *p = &b->plan->problem;
	enum problem_storage keys = b->plan->axes.k.storage;

	return b->device->lds_bytes > 0 && b->device->registry && p->op == FMHA_FORWARD &&
	       fmha_dtype_bytes(p->k.dtype) == 1 && fmha_dtype_bytes(p->q.dtype) == 2 &&
	       !p->v_in_k && p->topk == 0 && p->kv_layout != FMHA_KV_LATENT_FP8 &&
	       p->seqlen_k > 0 && (!plan_varied_factors(p) || p->q.dtype == FMHA_BF16) &&
	       (keys == STORED_PACKED || keys == STORED_BATCHED || keys == STORED_INDEXED ||
		keys == STORED_TABLE);
}

/* The kernel that is named for attention; NULL: none. */
static const struct select_named *named_attention(struct planner *b)
{
	for (uint32_t i = 0; i < b->naming.n; i++)
		if (TRAITS_FORWARD >> b->naming.named[i].spec.signature.family & 1)
			return &b->naming.named[i];
	return NULL;
}

static double wide_bytes_of_sequence(const struct plan *plan)
{
	const struct fmha_problem *p = &plan->problem;

	return (double)plan_wide_keys(plan) * p->nhead_k * (p->hdim_q + p->hdim_v) * 2;
}

static double most_wide_bytes(const struct planner *b)
{
	double most = (double)b->device->workspace_most / 2;

	return b->device->workspace_most && most < WIDEN_BYTES ? most : WIDEN_BYTES;
}

/*
 * Sequences of one row and of many in one batch, as servers have them: who decodes reads its keys once, and is served
 * best over the cache as it is, so that these go by themselves. Which they are the device sees. If all others have one
 * row, as many as sequences_of_many_rows() have the rest; there is room for the keys of twice as many and two more, and
 * where these are not enough, those with least rows go with the few: right, and slower.
 */
static int64_t sequences_of_many_rows(const struct fmha_problem *p)
{
	int64_t others = p->batch < p->total_q ? p->batch : p->total_q;
	int64_t n = (p->total_q - others + p->seqlen_q / 2) / p->seqlen_q;

	return n > 1 ? n : 1;
}

/* Whether those go by themselves, and then the numbers of it in the plan. */
static bool choose_by_rows(struct planner *b)
{
	struct split_device device = planner_split_device(b->device);
	struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;
	double most = most_wide_bytes(b), of_sequence = wide_bytes_of_sequence(plan), saved,
	       of_part;
	int32_t group = p->nhead_q / p->nhead_k, rows = TILE_ROWS / group;
	int64_t places, parts;

	if (plan->append || !can_widen(b) || plan_packed_rows(p) <= TILE_ROWS ||
	    !planner_is_free(b) || b->naming.n > 0 || !plan_packed_q(plan) || rows < 1 ||
	    plan->axes.k.storage == STORED_PACKED ||
	    3 * (int64_t)p->total_q > 2 * (int64_t)p->batch * p->seqlen_q ||
	    of_sequence * p->batch < 2 * FEW_BYTES)
		return false;
	places = 2 * sequences_of_many_rows(p) + 2;
	if (places > p->batch)
		places = p->batch;
	if ((double)places > most / of_sequence / 2) /* the other half is for partials */
		places = (int64_t)(most / of_sequence / 2);
	/* Partials lie by rows of the whole batch. They are worth what they save, and hold the limit, too. */
	saved = (double)(p->batch - places) * of_sequence;
	most -= (double)places * of_sequence;
	of_part = (double)p->nhead_q * p->total_q * (p->hdim_v + 1) * sizeof(float);
	parts = split_few(p, &device, rows);
	if (parts * of_part > (saved < most ? saved : most))
		parts = (int64_t)((saved < most ? saved : most) / of_part);
	if (places < 1 || parts < 2)
		return false;
	plan->few = PLAN_FEW_STAGES;
	plan->few_rows = rows;
	plan->few_parts = (int32_t)parts;
	plan->wide_places = (int32_t)places;
	return true;
}

/* Of few rows, for which one tile of decode's loops is enough, those widen keys themselves. Where a head's keys have
 * several factors, other loops for many rows are the general ones. */
static bool should_widen(struct planner *b)
{
	struct split_device device = planner_split_device(b->device);
	const struct select_named *named = named_attention(b);
	const struct plan *plan = b->plan;
	const struct fmha_problem *p = &plan->problem;
	struct split_choice split;
	int64_t rows;

	if (!can_widen(b))
		return false;
	if (named)
		return !named->spec.signature.narrow;
	rows = plan_packed_rows(p);
	if (rows <= TILE_ROWS ||
	    (double)plan_wide_sequences(plan) * wide_bytes_of_sequence(plan) > most_wide_bytes(b))
		return false;
	if (plan_varied_factors(p))
		return true;
	split_choose(p, &device, &split);
	return split.n > 1 || split.groups || (rows > WIDEN_ROWS && plan->flops >= WIDEN_FLOPS);
}

static int place_wide(struct planner *b, int32_t hdim, uint64_t *ret_offset)
{
	const struct plan *plan = b->plan;

	return planner_place(b, 5,
			     (const int64_t[]){plan_wide_sequences(plan), plan->problem.nhead_k,
					       plan_wide_keys(plan), hdim,
					       fmha_dtype_bytes(plan->problem.q.dtype)},
			     ret_offset);
}

/* Kernels are looked for as for a problem of such rows, of which nothing was measured. */
static int add_few(struct planner *b)
{
	struct plan *plan = b->plan;
	struct fmha_problem *p = &plan->problem;
	const int32_t seqlen_q = p->seqlen_q;
	const size_t n_shapes = b->shapes.n;
	int r = place_partials(b, plan->few_parts, &plan->layout.few_o_acc,
			       &plan->layout.few_lse_acc);

	p->seqlen_q = 1; /* most of them */
	b->shapes.n = 0;
	plan->n_splits = plan->few_parts;
	plan->split_size = (int32_t)ceil_div(p->seqlen_k, plan->few_parts);
	plan->shares = true;
	if (r == 0)
		r = planner_add_stage(b, ABI_FWD_SPLITKV, p->q.dtype);
	if (r == 0)
		r = planner_add_stage(b, ABI_FWD_SPLITKV_COMBINE, p->o.dtype);
	plan->n_splits = plan->split_size = 0;
	plan->shares = false;
	b->shapes.n = n_shapes;
	p->seqlen_q = seqlen_q;
	return r;
}

static int add_widening(struct planner *b)
{
	struct plan *plan = b->plan;
	int r;

	b->before_widening = plan->workspace_bytes;
	plan->widens = 1;
	r = place_wide(b, plan->problem.hdim_q, &plan->layout.wide_k);
	if (r == 0)
		r = place_wide(b, plan->problem.hdim_v, &plan->layout.wide_v);
	if (r == 0 && plan->few)
		r = planner_place(b, 3, (const int64_t[]){3, plan->problem.batch, sizeof(abi_i32)},
				  &plan->layout.by_rows);
	if (r == 0)
		r = planner_add_stage(b, ABI_FWD_APPENDKV, plan->problem.k.dtype);
	if (r == 0 && plan->few)
		r = add_few(b);
	if (r != 0)
		planner_unwiden(b);
	return r;
}

int planner_widen(struct planner *b, bool by_rows)
{
	int r = by_rows && choose_by_rows(b) ? add_widening(b) : 1;

	return r == 1 && should_widen(b) ? add_widening(b) : r;
}

void planner_unwiden(struct planner *b)
{
	if (!b->plan->widens)
		return;
	b->plan->n_stages = b->plan->append;
	b->plan->workspace_bytes = b->before_widening;
	b->plan->widens = b->plan->few = 0;
	b->outlooks.n = 0;
}

bool planner_names_unsplit(struct planner *b)
{
	return naming_of(&b->naming, ABI_FWD) || naming_of(&b->naming, ABI_FWD_PAGEDKV) ||
	       naming_of(&b->naming, ABI_BATCH_PREFILL);
}

bool planner_unsplit_family(struct planner *b, int i, enum abi_family *ret_family)
{
	const struct fmha_problem *p = &b->plan->problem;
	/* A device without batch_prefill may have the same thing as fwd_pagedkv in group mode. */
	bool paged = plan_paged(p) && !b->plan->widens;
	bool prefills = paged && p->mode == FMHA_GROUP && !naming_of(&b->naming, ABI_FWD_PAGEDKV);

	if ((b->groups || b->rest > 0) && !planner_names_unsplit(b) && i-- == 0) {
		*ret_family = ABI_FWD_SPLITKV;
		return true;
	}
	if (i > (prefills ? 1 : 0))
		return false;
	*ret_family = prefills && i == 0 ? ABI_BATCH_PREFILL : paged ? ABI_FWD_PAGEDKV : ABI_FWD;
	return true;
}

void planner_take_choice(struct planner *b, const struct split_choice *split)
{
	b->groups = split->groups;
	b->rest = split->rest;
	b->rest_parts = split->rest_parts;
}

/* For the stage that was added last, which says how large its tiles are. */
int planner_place_rest(struct planner *b)
{
	struct plan *plan = b->plan;
	const struct kernel_tile *tile = &plan->stages[plan->n_stages - 1].spec.tile;
	int64_t floats = ABI_PART_FLOATS(tile->tile_m0, tile->tile_n1);

	if (b->rest == 0)
		return 0;
	plan->rest_splits = b->rest;
	plan->rest_parts = b->rest_parts;
	plan->rest_bytes = (uint64_t)(b->rest_parts / b->rest) * tile->wave_m0 * sizeof(abi_u32);
	return planner_place(b, 3, (const int64_t[]){b->rest_parts, floats, sizeof(float)},
			     &plan->layout.rest_parts);
}

bool planner_is_free(const struct planner *b)
{
	const struct fmha_problem *p = &b->plan->problem;

	return p->n_splits == 0 && p->split_size == 0;
}

/* ---- splits ---- */

struct split_device planner_split_device(const struct plan_device *device)
{
	struct split_device split = {.units = device->compute_units ? device->compute_units : 1,
				     .gpu = device->lds_bytes > 0};
	const struct spec_catalog *catalog = device->registry ? registry_catalog(device->registry)
							      : NULL;
	int arch = catalog && device->arch ? spec_arch_find(catalog, device->arch) : -1;
	const struct spec_backend_arch *model = arch < 0 ? NULL : spec_arch_model(catalog, arch);

	if (model && strcmp(model->vendor, "amd") == 0)
		split.amd_unit_rate = 1000.0 * model->memory_gbs / model->units;
	split.shares = model && strcmp(model->vendor, "nvidia") == 0;
	split.warpgroups = model && strcmp(model->family, "hopper") == 0;
	return split;
}

/* As split.c would do it if @n were asked for; the number that comes of it may be smaller. */
static void split_into(const struct planner *b, int32_t n, struct split_choice *ret_split)
{
	struct split_device device = planner_split_device(b->device);
	struct fmha_problem asked = b->plan->problem;

	for (int i = 0; i < 4; i++) { /* until asking for what came of it changes nothing */
		asked.n_splits = n;
		split_choose(&asked, &device, ret_split);
		if (ret_split->n == n)
			return;
		n = ret_split->n > 1 ? ret_split->n : 1;
	}
}

static void add_splits(const struct planner *b, struct planner_splits *list, int32_t n)
{
	struct split_choice split = {0};

	if (n > 1)
		split_into(b, n, &split);
	if (split.n <= 1)
		split = (struct split_choice){.size = b->plan->problem.seqlen_k};
	for (size_t i = 0; i < list->count; i++)
		if (list->n[i] == split.n)
			return;
	if (list->count == PLANNER_MOST_SPLITS)
		return;
	list->n[list->count] = split.n;
	list->size[list->count++] = split.size;
}

void planner_list_splits(const struct planner *b, int32_t n_default, struct planner_splits *list)
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
		if (cost_keys(p) / steps[i] >= MIN_KEYS &&
		    blocks * steps[i] <= 2 * BUSY_ROUNDS * units)
			add_splits(b, list, steps[i]);
}

/* ---- looking ---- */

static void set_splits(struct planner *b, int32_t n, int32_t size)
{
	b->plan->n_splits = n;
	b->plan->split_size = n ? size : 0;
}

int planner_peek_splits(struct planner *b, int32_t n, int32_t size, bool ask_all,
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
	int r = planner_peek_splits(b, outlook->n_splits, outlook->split_size, false,
				    &outlook->stage, &report, &outlook->scale);

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
static bool is_informed(const struct planner *b, struct planner_splits *list,
			const struct split_choice *rule)
{
	struct registry_measured measured[MOST_RESULTS];
	size_t n = 0;

	for (size_t i = 0; n == 0 && i < b->shapes.n; i++)
		n = registry_measured_at(b->device->registry, b->shapes.word[i], measured,
					 MOST_RESULTS);
	if (n == 0 && b->device->model && !rule->settled) {
		planner_list_splits(b, rule->n, list);
		return true;
	}
	list->count = 0;
	for (size_t i = 0; i < n; i++) /* the fastest first */
		add_splits(b, list, measured[i].n_splits);
	if (n > 0)
		add_splits(b, list, rule->n);
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

/* Whether there is anything to weigh up. */
static bool list_outlooks(struct planner *b, struct split_choice *ret_split)
{
	struct split_device device = planner_split_device(b->device);
	struct fmha_problem rest = b->plan->problem;
	struct planner_splits list;

	device.shares = device.shares && b->naming.n == 0;
	if (b->plan->few) /* of many rows */
		rest.batch = (int32_t)sequences_of_many_rows(&rest);
	split_choose(&rest, &device, ret_split);
	planner_take_choice(b, ret_split);
	/* What was measured of others was of rows of one length. */
	if (ret_split->shares || !planner_is_free(b) || b->naming.n > 0 || !b->device->registry ||
	    !is_informed(b, &list, ret_split))
		return false;
	b->outlooks.n = list.count;
	for (size_t i = 0; i < list.count; i++)
		b->outlooks.list[i] = (struct outlook){.n_splits = list.n[i],
						       .split_size = list.size[i]};
	return true;
}

struct plan_looking {
	struct fmha_problem asked;
	struct plan plan;
	struct planner planner;
	struct fmha_error error;
	size_t n_done; /* of its outlooks */
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
	    plan_total_q(b->plan) > 0 && !choose_by_rows(b) && !should_widen(b) &&
	    list_outlooks(b, &split))
		return looking;
	return plan_looking_free(looking);
}

bool plan_look(struct plan_looking *looking)
{
	struct outlooks *outlooks = &looking->planner.outlooks;

	if (looking->n_done < outlooks->n)
		looking->failed |= look(&looking->planner, &outlooks->list[looking->n_done++]) < 0;
	return looking->n_done < outlooks->n && !looking->failed;
}

struct plan_looking *plan_looking_free(struct plan_looking *looking)
{
	free(looking);
	return NULL;
}

bool planner_take_looking(struct planner *b, const struct fmha_problem *problem)
{
	const struct plan_looking *looking = b->device->looking;

	/* A copy of the same bytes; another one is chosen for anew. */
	if (!looking || b->report ||
	    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
	    memcmp(problem, &looking->asked, sizeof(*problem)) != 0)
		return false;
	*b->plan = looking->plan;
	b->naming = looking->planner.naming;
	b->shapes = looking->planner.shapes;
	/* A first time may have come while it was looked at. */
	if (b->shapes.n == 0 && registry_has_measured(b->device->registry))
		shape_words_make(&b->plan->problem, &b->shapes);
	return true;
}

/* Were these looked at before? Then they are as they were found. */
static bool has_looked(const struct plan_looking *looking, struct outlooks *outlooks)
{
	const struct outlooks *seen = looking ? &looking->planner.outlooks : NULL;

	if (!looking || looking->failed || looking->n_done < outlooks->n || seen->n != outlooks->n)
		return false;
	for (size_t i = 0; i < outlooks->n; i++)
		if (seen->list[i].n_splits != outlooks->list[i].n_splits ||
		    seen->list[i].split_size != outlooks->list[i].split_size)
			return false;
	*outlooks = *seen;
	return true;
}

bool planner_without_shares(struct planner *b, struct split_choice *ret_split)
{
	struct split_device device = planner_split_device(b->device);

	device.shares = false;
	split_choose(&b->plan->problem, &device, ret_split);
	return ret_split->n > 1;
}

int planner_choose_splits(struct planner *b, struct split_choice *ret_split)
{
	struct outlooks *outlooks = &b->outlooks;
	const struct outlook *best;
	int r = 0;

	if (!list_outlooks(b, ret_split))
		return 0;
	if (!has_looked(b->device->looking, outlooks))
		for (size_t i = 0; i < outlooks->n && r == 0; i++)
			r = look(b, &outlooks->list[i]);
	if (r < 0)
		return fmha_error_set(b->err, r, "plan: out of memory");
	if (!on_one_scale(outlooks->list, outlooks->n))
		return 0;
	best = best_of(outlooks->list, outlooks->n);
	if (!best)
		return 0;
	ret_split->n = best->n_splits > 1 ? best->n_splits : 1;
	ret_split->size = best->n_splits > 1 ? best->split_size : b->plan->problem.seqlen_k;
	(void)snprintf(ret_split->why, sizeof(ret_split->why),
		       "the fastest of %zu numbers of splits, as %s", outlooks->n, source_of(best));
	return 0;
}

bool planner_prefer_buffered_dq(struct planner *b)
{
	struct registry_measured measured[MOST_RESULTS];
	int flags;

	if (b->shapes.n == 0 || b->naming.n > 0)
		return false;
	if (registry_measured_at(b->device->registry, b->shapes.word[0], measured, MOST_RESULTS) ==
	    0)
		return false;
	flags = spec_pipeline_flags(registry_catalog(b->device->registry),
				    measured[0].spec.pipeline);
	return flags >= 0 && !(flags & SPEC_WRITES_DQ);
}
