/* SPDX-License-Identifier: MIT */
/*
 * args.c: problem -> argument structs. The only place where a role's dimensions (base.h) meet the
 * named strides of abi.h. No judgement here: everything has been checked by then.
 */
#include <assert.h>
#include <stddef.h>
#include <string.h>

#include "internal.h"

#define SAME_DTYPE(NAME, name, bytes)                                                              \
	_Static_assert(ABI_##NAME == (int)FMHA_##NAME, "the wire's data types are the kernels'");
FMHA_DTYPES(SAME_DTYPE)
_Static_assert(ABI_MASK_TOP_LEFT == (int)FMHA_MASK_TOP_LEFT &&
		       ABI_MASK_BOTTOM_RIGHT == (int)FMHA_MASK_BOTTOM_RIGHT,
	       "the wire's masks are the kernels'");
_Static_assert(ABI_ROPE_INTERLEAVED == (int)FMHA_ROPE_INTERLEAVED &&
		       ABI_ROPE_HALF_ROTATED == (int)FMHA_ROPE_HALF_ROTATED &&
		       ABI_KV_VECTORIZED == (int)FMHA_KV_VECTORIZED,
	       "the wire's rotary and cache words are the kernels'");

static void *at(const struct launch_bases *bases, uint32_t base)
{
	return (void *)(uintptr_t)bases->at[base];
}

static void *workspace(const struct launch_bases *bases, uint64_t offset)
{
	return (void *)(uintptr_t)(bases->at[LAUNCH_WORKSPACE] + offset);
}

/* @axes: the role's, in their order: a batch, a sequence's rows (s), heads, a head's dims or a row's columns. */
static struct abi_tensor tensor_of(const struct plan *plan, const struct launch_bases *bases,
				   enum fmha_tensor_role role, const char *axes)
{
	const int64_t *stride = plan->problem.tensor[role].stride;
	struct abi_tensor t = {.data = at(bases, role)};

	for (size_t i = 0; t.data && axes[i]; i++)
		*(axes[i] == 'b'   ? &t.stride_batch
		  : axes[i] == 's' ? &t.stride_seq
		  : axes[i] == 'h' ? &t.stride_head
				   : &t.stride_dim) = stride[i];
	return t;
}

/* Intervals are (batch, head, endpoint, row). */
static struct abi_mask_data mask_data_of(const struct plan *plan, const struct launch_bases *bases)
{
	struct abi_mask_data m = {
		.intervals = tensor_of(plan, bases, FMHA_T_MASK_INTERVALS, "bhds"),
		.bits = tensor_of(plan, bases, FMHA_T_MASK_BITS, "bhsd")};

	m.n_endpoints = m.intervals.data ? plan->problem.mask_endpoints : 0;
	return m;
}

/* Kernels take stride 0 for an axis of one element that receives a sum; an empty axis has none. */
static struct abi_tensor tensor_dbias(const struct plan *plan, const struct launch_bases *bases)
{
	struct abi_tensor t = tensor_of(plan, bases, FMHA_T_DBIAS, "bhsd");
	int64_t extent[5];

	if (!t.data)
		return t;
	problem_extents(&plan->problem, FMHA_T_DBIAS, extent);
	if (extent[2] == 0)
		t.stride_seq = 1;
	if (extent[3] == 0)
		t.stride_dim = 1;
	return t;
}

/* K and V, whose first axis is the page in a linear paged cache. */
static struct abi_tensor tensor_kv(const struct plan *plan, const struct launch_bases *bases,
				   enum fmha_tensor_role role)
{
	const struct fmha_problem *p = &plan->problem;
	struct abi_tensor t = tensor_of(plan, bases, role, "bshd");

	if (t.data && plan_paged(p) && p->kv_layout == FMHA_KV_VECTORIZED) {
		/* Packed by definition; inside a head the order is the kernel's business. */
		t.stride_head = (int64_t)(role == FMHA_T_K ? p->hdim_q : p->hdim_v) * p->page_size;
		t.stride_batch = t.stride_head * p->nhead_k;
		t.stride_seq = t.stride_dim = 0;
	}
	return t;
}

/* (batch, head, row): LSE. */
static struct abi_rows rows_of(const struct plan *plan, const struct launch_bases *bases,
			       enum fmha_tensor_role role)
{
	const int64_t *stride = plan->problem.tensor[role].stride;
	struct abi_rows r = {.data = at(bases, role)};

	if (!r.data)
		return r;
	r.stride_batch = stride[0];
	r.stride_head = stride[1];
	r.stride_seq = stride[2];
	return r;
}

static struct abi_descale descale_of(const struct plan *plan, const struct launch_bases *bases,
				     enum fmha_tensor_role role)
{
	const struct fmha_problem *p = &plan->problem;
	const int64_t *stride = p->tensor[role].stride;
	struct abi_descale d = {.data = at(bases, role)};

	if (!d.data)
		return d;
	d.stride_batch = stride[0];
	d.stride_head = stride[1];
	d.per_page = role != FMHA_T_Q_DESCALE && p->descale_per_page;
	d.block = role == FMHA_T_Q_DESCALE ? p->descale_block_q : p->descale_block_k;
	d.stride_block = d.block ? stride[2] : 0;
	return d;
}

/* A bound for GPU kernels, not a size: more keys than int32 counts are 2^31 - 1. */
static abi_i32 saturate(int64_t value)
{
	return value < INT32_MAX ? (abi_i32)value : INT32_MAX;
}

static abi_i32 total_k(const struct problem_axes *axes)
{
	switch (axes->k.storage) {
	case STORED_PACKED:
		return (abi_i32)axes->k.length;
	case STORED_BATCHED:
		return saturate(axes->sequences * axes->k.longest);
	default: /* a cache has no such axis */
		return 0;
	}
}

static struct index_tables tables_of(const struct plan *plan, const struct launch_bases *bases)
{
	return indices_layout(&plan->problem, bases->at[LAUNCH_INDICES]);
}

static struct abi_sequences sequences_of(const struct plan *plan, const struct launch_bases *bases)
{
	const struct problem_axes *axes = &plan->axes;
	struct index_tables tables = tables_of(plan, bases);

	return (struct abi_sequences){
		/* Their absence tells a kernel that the sequences are not packed. */
		.seqstart_q = axes->q.storage == STORED_PACKED ? tables.seqstart_q : NULL,
		.seqstart_k = axes->k.storage == STORED_PACKED ? tables.seqstart_k : NULL,
		.seqlen_q = tables.seqlen_q,
		.seqlen_k = tables.seqlen_k,
		.leftpad_k = tables.leftpad_k,
		.batch = (abi_i32)axes->sequences,
		.seqlen_q_max = (abi_i32)axes->q.longest,
		.seqlen_k_max = (abi_i32)axes->k.longest,
		/* Fits: problem_check() limits the rows of a problem to int32. */
		.total_q = (abi_i32)plan_total_q(plan),
		.total_k = total_k(axes),
	};
}

static struct abi_chosen chosen_of(const struct plan *plan, const struct launch_bases *bases)
{
	const int64_t *stride = plan->problem.indices.stride;
	struct abi_chosen c = {.data = at(bases, FMHA_T_INDICES)};

	if (!c.data)
		return c;
	c.stride_batch = stride[0];
	c.stride_seq = stride[1];
	c.stride_entry = stride[2];
	c.n = plan->problem.topk;
	c.are_slots = plan->axes.k.storage == STORED_SLOTS;
	return c;
}

static struct abi_kv_cache cache_of(const struct plan *plan, const struct launch_bases *bases)
{
	const struct fmha_problem *p = &plan->problem;
	struct index_tables tables = tables_of(plan, bases);

	return (struct abi_kv_cache){
		.block_table = tables.block_table,
		.block_table_stride = tables.block_table_stride,
		.kv_indptr = tables.kv_indptr,
		.kv_page_indices = tables.kv_page_indices,
		.kv_last_page_len = tables.kv_last_page_len,
		.cache_batch_idx = tables.cache_batch_idx,
		.page_size = p->page_size,
		.n_pages = p->n_pages,
		.layout = (abi_i32)p->kv_layout,
		.max_blocks = (abi_i32)tables.table_columns,
		.n_page_indices = p->n_page_indices,
		.cache_batch = plan->axes.k.storage == STORED_INDEXED ? (abi_i32)plan->axes.k.outer
								      : p->batch,
	};
}

static struct abi_band band_of(const struct fmha_problem *p)
{
	if (p->mask == FMHA_MASK_NONE)
		return (struct abi_band){ABI_MASK_NONE, -1, -1, 0};
	return (struct abi_band){(abi_i32)p->mask, p->window_left, p->window_right, p->sink_tokens};
}

static struct abi_dropout dropout_of(const struct plan *plan, const struct launch_bases *bases)
{
	const struct fmha_problem *p = &plan->problem;

	if (p->dropout_p <= 0.0F)
		return (struct abi_dropout){.p_keep_inverse = 1.0F, .keep_at_most = 255};
	return (struct abi_dropout){
		.seed = p->dropout_seed,
		.offset = p->dropout_offset,
		.p_drop = p->dropout_p,
		.p_keep_inverse = 1.0F / (1.0F - p->dropout_p),
		.keep_at_most = (abi_i32)fmha_dropout_threshold(p->dropout_p),
		.row_block = p->dropout_row / 16,
		.column_block = p->dropout_column / 32,
		.randval = tensor_of(plan, bases, FMHA_T_RANDVAL, "bhsd"),
	};
}

/* What an append leaves in the workspace for the attention after it. */
static struct abi_tensor rotated_queries(const struct plan *plan, const struct launch_bases *bases)
{
	const struct fmha_problem *p = &plan->problem;

	return (struct abi_tensor){
		.data = workspace(bases, plan->layout.q_rotated),
		.stride_batch = plan->axes.q.length * p->nhead_q * p->hdim_q,
		.stride_seq = (int64_t)p->nhead_q * p->hdim_q,
		.stride_head = p->hdim_q,
		.stride_dim = 1,
	};
}

/* Keys or values in the workspace, head by head. */
static struct abi_tensor wide_keys(const struct plan *plan, const struct launch_bases *bases,
				   uint64_t offset, int64_t hdim)
{
	int64_t of_head = plan_wide_keys(plan) * hdim;

	return (struct abi_tensor){
		.data = workspace(bases, offset),
		.stride_batch = plan->problem.nhead_k * of_head,
		.stride_seq = hdim,
		.stride_head = of_head,
		.stride_dim = 1,
	};
}

/* plan->layout.by_rows. */
enum by_rows { ROWS_KEPT, ROWS_WIDENED, PLACES };
static abi_i32 *by_rows_of(const struct plan *plan, const struct launch_bases *bases,
			   enum by_rows which)
{
	uint64_t bytes = (uint64_t)plan->problem.batch * sizeof(abi_i32);

	return workspace(bases, plan->layout.by_rows + which * bytes);
}

/* Whose rows a stage of attention, or of its merge, has. */
static void take_rows(const struct plan *plan, uint32_t stage, const struct launch_bases *bases,
		      struct abi_sequences *s)
{
	if (plan->few)
		s->seqlen_q = by_rows_of(plan, bases,
					 plan_stage_few(plan, stage) ? ROWS_KEPT : ROWS_WIDENED);
}

/* What stands in for the cache of attention over keys that a stage before has widened. */
static void take_wide_keys(const struct plan *plan, const struct launch_bases *bases,
			   struct abi_fwd_args *a)
{
	const struct fmha_problem *p = &plan->problem;

	a->k = wide_keys(plan, bases, plan->layout.wide_k, p->hdim_q);
	a->v = wide_keys(plan, bases, plan->layout.wide_v, p->hdim_v);
	a->kv_dtype = 0;
	if (plan_varied_factors(p))
		a->k_descale.data = a->v_descale.data = NULL;
	a->cache = (struct abi_kv_cache){.cache_batch = p->batch};
	if (plan->few) {
		a->cache.cache_batch = plan->wide_places;
		a->cache.cache_batch_idx = by_rows_of(plan, bases, PLACES);
	}
	a->sequences.total_k = saturate(plan_wide_sequences(plan) * plan_wide_keys(plan));
}

static abi_i64 alibi_stride(const struct fmha_problem *p)
{
	return plan_present(p, FMHA_T_ALIBI_SLOPES) ? p->alibi_slopes.stride[0] : 0;
}

static void fill_fwd(const struct plan *plan, const struct launch_bases *bases,
		     struct abi_fwd_args *a)
{
	const struct fmha_problem *p = &plan->problem;

	*a = (struct abi_fwd_args){
		.q = tensor_of(plan, bases, FMHA_T_Q, "bshd"),
		.k = tensor_kv(plan, bases, FMHA_T_K),
		.v = tensor_kv(plan, bases, FMHA_T_V),
		.o = tensor_of(plan, bases, FMHA_T_O, "bshd"),
		.lse = rows_of(plan, bases, FMHA_T_LSE),
		.bias = tensor_of(plan, bases, FMHA_T_BIAS, "bhsd"),
		.alibi_slopes = at(bases, FMHA_T_ALIBI_SLOPES),
		.alibi_stride_batch = alibi_stride(p),
		.sink = at(bases, FMHA_T_SINK),
		.q_descale = descale_of(plan, bases, FMHA_T_Q_DESCALE),
		.k_descale = descale_of(plan, bases, FMHA_T_K_DESCALE),
		.v_descale = descale_of(plan, bases, FMHA_T_V_DESCALE),
		.sequences = sequences_of(plan, bases),
		.cache = cache_of(plan, bases),
		.band = band_of(p),
		.mask_data = mask_data_of(plan, bases),
		.dropout = dropout_of(plan, bases),
		.nhead_q = p->nhead_q,
		.nhead_k = p->nhead_k,
		.hdim_q = p->hdim_q,
		.hdim_v = p->hdim_v,
		.min_seqlen_q = p->min_seqlen_q,
		.scale = p->scale,
		.logits_soft_cap = p->logits_soft_cap,
		.dtype = (abi_i32)p->q.dtype,
		.o_dtype = (abi_i32)p->o.dtype,
		.bias_dtype = (abi_i32)p->bias.dtype,
		.kv_dtype = p->k.dtype == p->q.dtype ? 0 : (abi_i32)p->k.dtype,
		.v_in_k = p->v_in_k != 0,
		.chosen = chosen_of(plan, bases),
	};
	if (p->v_in_k) {
		a->v = a->k;
		a->v_descale = a->k_descale;
	}
	if (plan->append && p->rope != FMHA_ROPE_NONE)
		a->q = rotated_queries(plan, bases);
}

/* The partial results of a stage of splits: its parts, and where they lie. */
struct partials {
	int32_t n;
	uint64_t o_acc, lse_acc;
};
static struct partials partials_of(const struct plan *plan, uint32_t stage)
{
	if (plan_stage_few(plan, stage))
		return (struct partials){plan->few_parts, plan->layout.few_o_acc,
					 plan->layout.few_lse_acc};
	return (struct partials){plan->n_splits, plan->layout.o_acc, plan->layout.lse_acc};
}

/* The first stage of split-KV; without splits it is the only one. */
static void fill_splits(const struct plan *plan, uint32_t stage, const struct launch_bases *bases,
			struct abi_fwd_args *a)
{
	struct partials parts = partials_of(plan, stage);
	bool shares = plan->shares || plan_stage_few(plan, stage);

	if (parts.n == 0 && plan->rest_splits > 0)
		a->rest = (struct abi_rest){workspace(bases, plan->layout.rest_parts),
					    workspace(bases, plan->layout.rest_arrivals),
					    plan->rest_parts, plan->rest_splits};
	if (parts.n == 0)
		return;
	a->o_acc = workspace(bases, parts.o_acc);
	a->lse_acc = workspace(bases, parts.lse_acc);
	a->n_splits = parts.n;
	a->split_size = shares ? 0 : plan->split_size;
}

/* Where a plan has several stages of attention, what this one has of it. */
static void fill_own_attention(const struct plan *plan, uint32_t stage,
			       const struct launch_bases *bases, struct abi_fwd_args *a)
{
	if (plan_stage_wide(plan, stage))
		take_wide_keys(plan, bases, a);
	take_rows(plan, stage, bases, &a->sequences);
	if (plan->stages[stage].family == ABI_FWD_SPLITKV)
		fill_splits(plan, stage, bases, a);
}

/* The second stage of split-KV: the parts are the first stage's partials. */
static void fill_partials(const struct plan *plan, const struct launch_bases *bases,
			  struct abi_combine_args *a)
{
	const struct fmha_problem *p = &plan->problem;
	bool group = plan_packed_q(plan);
	int64_t total_q = plan_total_q(plan);

	*a = (struct abi_combine_args){
		.o_parts = {.data = workspace(bases, plan->layout.o_acc),
			    .stride_batch = group ? 0 : (int64_t)p->seqlen_q * p->hdim_v,
			    .stride_seq = p->hdim_v,
			    .stride_head = total_q * p->hdim_v,
			    .stride_dim = 1},
		.o_parts_stride_split = total_q * p->nhead_q * p->hdim_v,
		.lse_parts = {.data = workspace(bases, plan->layout.lse_acc),
			      .stride_batch = group ? 0 : p->seqlen_q,
			      .stride_head = total_q,
			      .stride_seq = 1},
		.lse_parts_stride_split = total_q * p->nhead_q,
		.o = tensor_of(plan, bases, FMHA_T_O, "bshd"),
		.lse = rows_of(plan, bases, FMHA_T_LSE),
		.sink = at(bases, FMHA_T_SINK),
		.sequences = sequences_of(plan, bases),
		.n_splits = plan->n_splits,
		.nhead_q = p->nhead_q,
		.hdim_v = p->hdim_v,
		.min_seqlen_q = p->min_seqlen_q,
		.o_parts_dtype = ABI_F32,
		.o_dtype = (abi_i32)p->o.dtype,
		.in_order = p->split_size > 0, /* as fmha/base.h promises */
	};
}

/* And of the merges. */
static void fill_own_partials(const struct plan *plan, uint32_t stage,
			      const struct launch_bases *bases, struct abi_combine_args *a)
{
	struct partials parts = partials_of(plan, stage);

	a->o_parts.data = workspace(bases, parts.o_acc);
	a->lse_parts.data = workspace(bases, parts.lse_acc);
	a->n_splits = parts.n;
	/* Of those that are widened there are few, whose rows an eighth of all blocks takes. */
	a->few_rows = plan_stage_few(plan, stage) ? plan->few_rows
						  : (abi_i32)ceil_div(a->sequences.seqlen_q_max, 8);
	take_rows(plan, stage, bases, &a->sequences);
}

static void fill_merge(const struct plan *plan, const struct launch_bases *bases,
		       struct abi_combine_args *a)
{
	const struct fmha_problem *p = &plan->problem;
	const int64_t *o = p->o_parts.stride, *lse = p->lse_parts.stride;

	*a = (struct abi_combine_args){
		.o_parts = {at(bases, FMHA_T_O_PARTS), o[1], o[2], o[3], o[4]},
		.o_parts_stride_split = o[0],
		.lse_parts = {at(bases, FMHA_T_LSE_PARTS), lse[1], lse[2], lse[3]},
		.lse_parts_stride_split = lse[0],
		.o = tensor_of(plan, bases, FMHA_T_O, "bshd"),
		.lse = rows_of(plan, bases, FMHA_T_LSE),
		.sink = at(bases, FMHA_T_SINK),
		.sequences = sequences_of(plan, bases),
		.n_splits = p->n_parts,
		.nhead_q = p->nhead_q,
		.hdim_v = p->hdim_v,
		.min_seqlen_q = p->min_seqlen_q,
		.o_parts_dtype = (abi_i32)p->o_parts.dtype,
		.o_dtype = (abi_i32)p->o.dtype,
	};
}

static void fill_combine(const struct plan *plan, const struct launch_bases *bases,
			 struct abi_combine_args *a)
{
	if (plan->problem.op == FMHA_MERGE_STATES)
		fill_merge(plan, bases, a);
	else
		fill_partials(plan, bases, a);
}

static void fill_appendkv(const struct plan *plan, const struct launch_bases *bases,
			  struct abi_appendkv_args *a)
{
	const struct fmha_problem *p = &plan->problem;
	bool rotates_q = p->rope != FMHA_ROPE_NONE;
	const int64_t *slots = p->slot_mapping.stride, *positions = p->positions.stride;

	*a = (struct abi_appendkv_args){
		.k_new = tensor_of(plan, bases, FMHA_T_K_NEW, "bshd"),
		.v_new = tensor_of(plan, bases, FMHA_T_V_NEW, "bshd"),
		.k = tensor_kv(plan, bases, FMHA_T_K),
		.v = tensor_kv(plan, bases, FMHA_T_V),
		.rotary_cos = tensor_of(plan, bases, FMHA_T_ROTARY_COS, "sd"),
		.rotary_sin = tensor_of(plan, bases, FMHA_T_ROTARY_SIN, "sd"),
		.sequences = sequences_of(plan, bases),
		.cache = cache_of(plan, bases),
		.seqlen_new = p->seqlen_new,
		.rope = (abi_i32)p->rope,
		.rotary_dim = p->rotary_dim,
		.rotary_max_pos = p->rotary_max_pos,
		.q_rows_same_position = p->mask == FMHA_MASK_NONE,
		.nhead_q = p->nhead_q,
		.nhead_k = p->nhead_k,
		.hdim_q = p->hdim_q,
		.hdim_v = p->hdim_v,
		.dtype = (abi_i32)p->k.dtype,
		.rotary_dtype = (abi_i32)p->rotary_cos.dtype,
		.new_dtype = p->k_new.dtype == p->k.dtype ? 0 : (abi_i32)p->k_new.dtype,
		.computes_descale = p->descale_computed != 0,
		.slots = at(bases, FMHA_T_SLOT_MAPPING),
		.positions = at(bases, FMHA_T_POSITIONS),
	};
	if (a->new_dtype) {
		a->k_descale = descale_of(plan, bases, FMHA_T_K_DESCALE);
		a->v_descale = descale_of(plan, bases, FMHA_T_V_DESCALE);
	}
	if (a->slots)
		a->slots_stride_batch = slots[0], a->slots_stride_seq = slots[1];
	if (a->positions)
		a->positions_stride_batch = positions[0], a->positions_stride_seq = positions[1];
	a->sequences.seqlen_k = tables_of(plan, bases).seqlen_k_before;
	if (!rotates_q)
		return;
	if (plan->append) {
		a->q = tensor_of(plan, bases, FMHA_T_Q, "bshd");
		a->q_rotated = rotated_queries(plan, bases);
	} else if (at(bases, FMHA_T_Q_ROTATED)) {
		a->q = tensor_of(plan, bases, FMHA_T_Q, "bshd");
		a->q_rotated = tensor_of(plan, bases, FMHA_T_Q_ROTATED, "bshd");
	}
}

/* The family's other direction: see abi.h. */
static void fill_widening(const struct plan *plan, const struct launch_bases *bases,
			  struct abi_appendkv_args *a)
{
	const struct fmha_problem *p = &plan->problem;

	*a = (struct abi_appendkv_args){
		.k_new = wide_keys(plan, bases, plan->layout.wide_k, p->hdim_q),
		.v_new = wide_keys(plan, bases, plan->layout.wide_v, p->hdim_v),
		.k = tensor_kv(plan, bases, FMHA_T_K),
		.v = tensor_kv(plan, bases, FMHA_T_V),
		.sequences = sequences_of(plan, bases),
		.cache = cache_of(plan, bases),
		.seqlen_new = (abi_i32)plan->axes.k.longest,
		.nhead_q = p->nhead_q,
		.nhead_k = p->nhead_k,
		.hdim_q = p->hdim_q,
		.hdim_v = p->hdim_v,
		.dtype = (abi_i32)p->k.dtype,
		.new_dtype = (abi_i32)p->q.dtype,
		.widens = 1,
	};
	if (plan_varied_factors(p)) {
		a->k_descale = descale_of(plan, bases, FMHA_T_K_DESCALE);
		a->v_descale = descale_of(plan, bases, FMHA_T_V_DESCALE);
	}
	if (!plan->few)
		return;
	a->few_rows = plan->few_rows;
	a->n_places = plan->wide_places;
	a->rows_kept = by_rows_of(plan, bases, ROWS_KEPT);
	a->rows_widened = by_rows_of(plan, bases, ROWS_WIDENED);
	a->places = by_rows_of(plan, bases, PLACES);
}

static void fill_bwd(const struct plan *plan, const struct launch_bases *bases,
		     struct abi_bwd_args *a)
{
	const struct fmha_problem *p = &plan->problem;
	bool group = plan_packed_q(plan);

	*a = (struct abi_bwd_args){
		.q = tensor_of(plan, bases, FMHA_T_Q, "bshd"),
		.k = tensor_of(plan, bases, FMHA_T_K, "bshd"),
		.v = tensor_of(plan, bases, FMHA_T_V, "bshd"),
		.o = tensor_of(plan, bases, FMHA_T_O, "bshd"),
		.d_o = tensor_of(plan, bases, FMHA_T_DO, "bshd"),
		.dq = tensor_of(plan, bases, FMHA_T_DQ, "bshd"),
		.dk = tensor_of(plan, bases, FMHA_T_DK, "bshd"),
		.dv = tensor_of(plan, bases, FMHA_T_DV, "bshd"),
		.bias = tensor_of(plan, bases, FMHA_T_BIAS, "bhsd"),
		.dbias = tensor_dbias(plan, bases),
		.lse = rows_of(plan, bases, FMHA_T_LSE),
		.d = {.data = workspace(bases, plan->layout.d),
		      .stride_batch = group ? 0 : (int64_t)p->nhead_q * p->seqlen_q,
		      .stride_head = group ? p->total_q : p->seqlen_q,
		      .stride_seq = 1},
		.dlse = rows_of(plan, bases, FMHA_T_DLSE),
		.alibi_slopes = at(bases, FMHA_T_ALIBI_SLOPES),
		.alibi_stride_batch = alibi_stride(p),
		.sink = at(bases, FMHA_T_SINK),
		.dsink = at(bases, FMHA_T_DSINK),
		.sequences = sequences_of(plan, bases),
		.band = band_of(p),
		.mask_data = mask_data_of(plan, bases),
		.dropout = dropout_of(plan, bases),
		.nhead_q = p->nhead_q,
		.nhead_k = p->nhead_k,
		.hdim_q = p->hdim_q,
		.hdim_v = p->hdim_v,
		.deterministic = p->deterministic != 0 || plan->dq_per_sequence,
		.scale = p->scale,
		.logits_soft_cap = p->logits_soft_cap,
		.dtype = (abi_i32)p->q.dtype,
		.bias_dtype = (abi_i32)p->bias.dtype,
		.order_words = plan->order_words,
	};
	if (!plan->dq_buffered)
		return;
	a->nsplits = workspace(bases, plan->layout.nsplits);
	if (group)
		a->dq_acc_offsets = workspace(bases, plan->layout.dq_acc_offsets);
	a->dq_acc = workspace(bases, plan->layout.dq_acc);
	a->dq_tile_rows = plan->dq_tile_rows;
	a->dq_tile_floats = plan->dq_tile_floats;
	a->dq_split_keys = plan->dq_split_keys;
	if (plan->kv_parts <= 1)
		return;
	a->kv_parts = plan->kv_parts;
	a->kv_acc = workspace(bases, plan->layout.kv_acc);
}

void args_fill(const struct plan *plan, uint32_t stage, const struct launch_bases *bases,
	       union abi_args *ret_args)
{
	enum abi_family family = plan->stages[stage].family;

	memset(ret_args, 0, sizeof(*ret_args));
	if (plan_stage_widens(plan, stage)) {
		fill_widening(plan, bases, &ret_args->appendkv);
		return;
	}
	switch (family) {
#define FILL(NAME, name, args)                                                                     \
	case ABI_##NAME:                                                                           \
		fill_##args(plan, bases, &ret_args->args);                                         \
		break;
		ABI_FAMILIES(FILL)
#undef FILL
	case ABI_N_FAMILIES:
		break;
	}
	if (TRAITS_FORWARD >> family & 1)
		fill_own_attention(plan, stage, bases, &ret_args->fwd);
	else if (family == ABI_FWD_SPLITKV_COMBINE && plan->few)
		fill_own_partials(plan, stage, bases, &ret_args->combine);
}

/*
 * Where nothing is ever mapped: a kernel that follows one of these fails at once. A page each for tensors, which
 * begin there; what lies behind the tables of indices is less than a page table holds, and behind the workspace's
 * begin less than 2^62 bytes (workspace.c).
 */
#define PAGE         4096
#define INDICES_AT   (UINT64_C(1) << 40)
#define WORKSPACE_AT (UINT64_C(1) << 62)

struct launch_bases args_placeholders(const struct plan *plan)
{
	struct launch_bases bases = {
		.at = {[LAUNCH_INDICES] = INDICES_AT, [LAUNCH_WORKSPACE] = WORKSPACE_AT}};

	for (uint32_t i = 0; i < FMHA_N_TENSORS; i++)
		if (plan_present(&plan->problem, i))
			bases.at[i] = (i + 1) * PAGE + plan->misaligned[i];
	return bases;
}

static uint16_t placeholder_base(uint64_t address)
{
	return address >= WORKSPACE_AT ? LAUNCH_WORKSPACE
	       : address >= INDICES_AT ? LAUNCH_INDICES
				       : (uint16_t)(address / PAGE - 1);
}

static uint32_t dropout_offset(const struct plan *plan, enum abi_family family)
{
	if (plan->problem.dropout_p <= 0.0F)
		return 0;
	return TRAITS_FORWARD >> family & 1 ? offsetof(struct abi_fwd_args, dropout)
	       : family == ABI_BWD_DQ_DK_DV ? offsetof(struct abi_bwd_args, dropout)
					    : 0;
}

static struct abi_words words_of(const struct plan *plan, const struct launch_bases *bases,
				 enum fmha_tensor_role role)
{
	int64_t stride = plan->problem.tensor[role].stride[role == FMHA_T_BLOCK_TABLE];
	struct abi_words w = {.data = at(bases, role)};

	w.stride = w.data ? stride : 0;
	return w;
}

/* Whether lengths of keys are all that is made of sequences, and each is found without the others. */
static bool makes_keys_alone(const struct abi_prepare_args *a)
{
	const struct abi_sequences *s = &a->sequences;
	const struct abi_kv_cache *c = &a->cache;

	return !s->seqstart_q && !s->seqstart_k && !s->seqlen_q && !s->leftpad_k && !c->kv_indptr &&
	       !c->kv_last_page_len && !c->cache_batch_idx && !a->seqstart_q.data &&
	       !a->seqstart_k.data && !a->leftpad_k.data && !a->kv_indptr.data && !a->nsplits &&
	       !a->dq_acc_offsets;
}

static void fill_prepare(const struct plan *plan, const struct launch_bases *bases,
			 union abi_args *ret_args)
{
	const struct fmha_problem *p = &plan->problem;
	struct index_tables tables = tables_of(plan, bases);
	bool head = plan->workspace_head_bytes > 0, packed = plan_packed_q(plan);

	memset(ret_args, 0, sizeof(*ret_args));
	ret_args->prepare = (struct abi_prepare_args){
		.seqstart_q = words_of(plan, bases, FMHA_T_SEQSTART_Q),
		.seqstart_k = words_of(plan, bases, FMHA_T_SEQSTART_K),
		.seqlen_q = words_of(plan, bases, FMHA_T_SEQLEN_Q),
		.seqlen_k = words_of(plan, bases, FMHA_T_SEQLEN_K),
		.leftpad_k = words_of(plan, bases, FMHA_T_LEFTPAD_K),
		.kv_indptr = words_of(plan, bases, FMHA_T_KV_INDPTR),
		.kv_page_indices = words_of(plan, bases, FMHA_T_KV_PAGE_INDICES),
		.kv_last_page_len = words_of(plan, bases, FMHA_T_KV_LAST_PAGE_LEN),
		.cache_batch_idx = words_of(plan, bases, FMHA_T_CACHE_BATCH_IDX),
		.block_table = words_of(plan, bases, FMHA_T_BLOCK_TABLE),
		.block_table_stride_row = plan_present(p, FMHA_T_BLOCK_TABLE)
						  ? p->block_table.stride[0]
						  : 0,
		.sequences = sequences_of(plan, bases),
		.cache = cache_of(plan, bases),
		.seqlen_k_before = tables.seqlen_k_before,
		.nsplits = head ? workspace(bases, plan->layout.nsplits) : NULL,
		.dq_acc_offsets = head && packed ? workspace(bases, plan->layout.dq_acc_offsets)
						 : NULL,
		.table_rows = tables.block_table_stride ? p->batch : 1,
		.seqlen_new = plan->append || p->op == FMHA_APPEND_KV ? p->seqlen_new : 0,
		.dq_splits = plan->dq_splits,
		.dq_tile_n0 = plan->dq_per_sequence ? (abi_i32)plan->dq_tile_n0 : 0,
		.nsplits_entries = packed && (p->deterministic || plan->dq_per_sequence) ? p->batch
											 : 1,
		.nhead_q = p->nhead_q,
		.hdim_q = p->hdim_q,
		.dq_tile_rows = plan->dq_tile_rows,
		.dq_tile_floats = plan->dq_tile_floats,
	};
	ret_args->prepare.keys_alone = makes_keys_alone(&ret_args->prepare);
}

/* ---- addresses in argument structs, in their order ---- */

#define AT(name, member) offsetof(struct abi_##name##_args, member)
#define SEQUENCES(name)                                                                            \
	AT(name, sequences.seqstart_q), AT(name, sequences.seqstart_k),                            \
		AT(name, sequences.seqlen_q), AT(name, sequences.seqlen_k),                        \
		AT(name, sequences.leftpad_k)
#define CACHE(name)                                                                                \
	AT(name, cache.block_table), AT(name, cache.kv_indptr), AT(name, cache.kv_page_indices),   \
		AT(name, cache.kv_last_page_len), AT(name, cache.cache_batch_idx)
#define MASK(name)                                                                                 \
	AT(name, mask_data.intervals.data), AT(name, mask_data.bits.data),                         \
		AT(name, dropout.randval.data)

static const uint16_t fwd_addresses[] = {
	AT(fwd, q.data),
	AT(fwd, k.data),
	AT(fwd, v.data),
	AT(fwd, o.data),
	AT(fwd, lse.data),
	AT(fwd, bias.data),
	AT(fwd, alibi_slopes),
	AT(fwd, sink),
	AT(fwd, q_descale.data),
	AT(fwd, k_descale.data),
	AT(fwd, v_descale.data),
	SEQUENCES(fwd),
	CACHE(fwd),
	MASK(fwd),
	AT(fwd, o_acc),
	AT(fwd, lse_acc),
	AT(fwd, chosen.data),
	AT(fwd, rest.parts),
	AT(fwd, rest.arrivals),
};
static const uint16_t combine_addresses[] = {
	AT(combine, o_parts.data), AT(combine, lse_parts.data), AT(combine, o.data),
	AT(combine, lse.data),     AT(combine, sink),           SEQUENCES(combine),
};
static const uint16_t appendkv_addresses[] = {
	AT(appendkv, q.data),          AT(appendkv, q_rotated.data),
	AT(appendkv, k_new.data),      AT(appendkv, v_new.data),
	AT(appendkv, k.data),          AT(appendkv, v.data),
	AT(appendkv, rotary_cos.data), AT(appendkv, rotary_sin.data),
	SEQUENCES(appendkv),           CACHE(appendkv),
	AT(appendkv, k_descale.data),  AT(appendkv, v_descale.data),
	AT(appendkv, slots),           AT(appendkv, positions),
	AT(appendkv, rows_kept),       AT(appendkv, rows_widened),
	AT(appendkv, places),
};
static const uint16_t bwd_addresses[] = {
	AT(bwd, q.data),     AT(bwd, k.data),         AT(bwd, v.data),
	AT(bwd, o.data),     AT(bwd, d_o.data),       AT(bwd, dq.data),
	AT(bwd, dk.data),    AT(bwd, dv.data),        AT(bwd, bias.data),
	AT(bwd, dbias.data), AT(bwd, lse.data),       AT(bwd, d.data),
	AT(bwd, dlse.data),  AT(bwd, alibi_slopes),   AT(bwd, sink),
	AT(bwd, dsink),      SEQUENCES(bwd),          MASK(bwd),
	AT(bwd, nsplits),    AT(bwd, dq_acc_offsets), AT(bwd, dq_acc),
	AT(bwd, kv_acc),
};
static const uint16_t prepare_addresses[] = {
	AT(prepare, seqstart_q.data),
	AT(prepare, seqstart_k.data),
	AT(prepare, seqlen_q.data),
	AT(prepare, seqlen_k.data),
	AT(prepare, leftpad_k.data),
	AT(prepare, kv_indptr.data),
	AT(prepare, kv_page_indices.data),
	AT(prepare, kv_last_page_len.data),
	AT(prepare, cache_batch_idx.data),
	AT(prepare, block_table.data),
	SEQUENCES(prepare),
	CACHE(prepare),
	AT(prepare, seqlen_k_before),
	AT(prepare, nsplits),
	AT(prepare, dq_acc_offsets),
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Which base each address is of tells its value: see args_placeholders(). */
static void record(const struct plan *plan, const uint16_t *addresses, size_t n,
		   const union abi_args *args, struct launch_record *ret_record)
{
	struct launch_bases bases = args_placeholders(plan);
	char *bytes = (char *)&ret_record->args;

	assert(n <= LAUNCH_RELOCATIONS);
	ret_record->args = *args;
	ret_record->n_relocations = 0;
	for (size_t i = 0; i < n; i++) {
		uint64_t address;
		uint16_t base;

		memcpy(&address, bytes + addresses[i], sizeof(address));
		if (!address)
			continue;
		base = placeholder_base(address);
		ret_record->relocations[ret_record->n_relocations++] = (struct launch_relocation){
			.offset = addresses[i], .base = base, .plus = address - bases.at[base]};
		memset(bytes + addresses[i], 0, sizeof(address));
	}
}

void args_record_keys(const struct plan *plan, enum abi_family family,
		      struct launch_record *ret_record)
{
	bool merges = family == ABI_FWD_SPLITKV_COMBINE, varies = plan->keys.most > 0;

	ret_record->sequences_offset = !varies  ? 0
				       : merges ? offsetof(struct abi_combine_args, sequences)
						: offsetof(struct abi_fwd_args, sequences);
	ret_record->k_offset = varies && !merges ? offsetof(struct abi_fwd_args, k) : 0;
	ret_record->v_offset = varies && !merges ? offsetof(struct abi_fwd_args, v) : 0;
}

void args_record(const struct plan *plan, enum abi_family family, const union abi_args *args,
		 struct launch_record *ret_record)
{
	static const struct {
		const uint16_t *addresses;
		uint32_t n, bytes;
	} taken[] = {
#define TAKEN(NAME, name, args)                                                                    \
	[ABI_##NAME] = {args##_addresses, COUNT(args##_addresses),                                 \
			sizeof(struct abi_##args##_args)},
		ABI_FAMILIES(TAKEN)
#undef TAKEN
	};

	record(plan, taken[family].addresses, taken[family].n, args, ret_record);
	ret_record->args_bytes = taken[family].bytes;
	ret_record->dropout_offset = dropout_offset(plan, family);
}

void args_record_prepare(const struct plan *plan, struct launch_record *ret_record)
{
	struct launch_bases bases = args_placeholders(plan);
	union abi_args filled, *args = &filled;

	fill_prepare(plan, &bases, args);
	*ret_record = (struct launch_record){.args_bytes = sizeof(struct abi_prepare_args)};
	record(plan, prepare_addresses, COUNT(prepare_addresses), args, ret_record);
}
