/* SPDX-License-Identifier: MIT */
/*
 * reach.c: what a kernel may touch, worked out from its arguments alone.
 *
 * Extents of views come from the problem's axes, and so do launch arguments; here the second is
 * held against the first. For each tensor of an argument struct: how far do its strides lead under
 * the loop bounds of the same struct, as a kernel reads them (packed where seqstart is there, pages
 * where page_size is)? Further than its view's span, or than the workspace, means that the two
 * derivations differ: a bug of ours, and the plan is refused instead of run.
 */
#include <stdio.h>

#include "internal.h"

/* One loop: how often, and by how many elements. */
struct step {
	int64_t count, stride;
};

struct reach {
	const struct plan *plan;
	uint32_t stage;
	const struct abi_sequences *sequences;
	struct fmha_error *err;
};

/* Elements from the first to one past the last; 0 when a loop is empty, -1 on overflow. */
static int64_t elements_of(const struct step *steps, int n)
{
	int64_t last = 0;

	for (int i = 0; i < n; i++)
		if (steps[i].count <= 0)
			return 0;
	for (int i = 0; i < n; i++) {
		int64_t reach;

		if (steps[i].stride < 0 ||
		    __builtin_mul_overflow(steps[i].count - 1, steps[i].stride, &reach) ||
		    __builtin_add_overflow(last, reach, &last))
			return -1;
	}
	return __builtin_add_overflow(last, 1, &last) ? -1 : last;
}

static int escapes(const struct reach *r, const char *name, int64_t elements, uint64_t bytes)
{
	char field[sizeof(r->err->field)];

	(void)snprintf(field, sizeof(field), "tensor.%s", name);
	return fmha_error_set_field(r->err, FMHA_EINTERNAL, field,
				    "%s: a kernel would reach %lld elements, %llu bytes were "
				    "checked: please report it",
				    field, (long long)elements, (unsigned long long)bytes);
}

/* Bytes that were checked for a role; 0 when it is absent. */
static uint64_t span_of(const struct plan *plan, enum fmha_tensor_role role)
{
	for (uint32_t i = 0; i < plan->n_views; i++)
		if (plan->views[i].role == (uint32_t)role)
			return plan->views[i].span_bytes;
	return 0;
}

static int within_view(const struct reach *r, enum fmha_tensor_role role, const void *data,
		       const struct step *steps, int n)
{
	uint64_t span = span_of(r->plan, role);
	int64_t elements;

	if (!data)
		return 0;
	elements = elements_of(steps, n);
	if (elements < 0 ||
	    (uint64_t)elements > span / fmha_dtype_bytes(r->plan->problem.tensor[role].dtype))
		return escapes(r, proto_roles[role].name, elements, span);
	return 0;
}

/* From @offset on: in what the stages hand to each other, behind which their private shares lie, or
 * in dq_acc or arrivals, which lie behind those. */
static int within_workspace(const struct reach *r, uint64_t offset, uint64_t element_bytes,
			    const struct step *steps, int n)
{
	const struct plan *plan = r->plan;
	bool last = (plan->dq_acc_bytes > 0 && offset >= plan->layout.dq_acc) ||
		    (plan->rest_bytes > 0 && offset >= plan->layout.rest_arrivals);
	uint64_t end = last ? plan->workspace_bytes : plan->stages[0].workspace_offset;
	int64_t elements = elements_of(steps, n);

	if (elements < 0 || offset > end || (uint64_t)elements > (end - offset) / element_bytes)
		return escapes(r, "workspace", elements, end);
	return 0;
}

/* ---- the loops of kernels ---- */

/* Rows of queries: view_q_offset() and view_rows_offset() of <kernels/view.h>. */
static struct step sequence_step(const struct abi_sequences *s, int64_t stride)
{
	return (struct step){s->seqstart_q ? 1 : s->batch, stride};
}

static struct step row_step(const struct abi_sequences *s, int64_t stride)
{
	return (struct step){s->seqstart_q ? s->total_q : s->seqlen_q_max, stride};
}

#define N_STEPS 4

static void query_steps(const struct abi_sequences *s, const struct abi_tensor *t, int64_t heads,
			int64_t columns, struct step ret_steps[N_STEPS])
{
	ret_steps[0] = sequence_step(s, t->stride_batch);
	ret_steps[1] = row_step(s, t->stride_seq);
	ret_steps[2] = (struct step){heads, t->stride_head};
	ret_steps[3] = (struct step){columns, t->stride_dim};
}

static int reach_query(const struct reach *r, enum fmha_tensor_role role,
		       const struct abi_tensor *t, int64_t heads, int64_t columns)
{
	struct step steps[N_STEPS];

	query_steps(r->sequences, t, heads, columns, steps);
	return within_view(r, role, t->data, steps, N_STEPS);
}

static int reach_mask_data(const struct reach *r, const struct abi_mask_data *m, int64_t heads)
{
	int64_t bytes = ceil_div(r->sequences->seqlen_k_max, 8);
	int e = reach_query(r, FMHA_T_MASK_INTERVALS, &m->intervals, heads, m->n_endpoints);

	return e < 0 ? e : reach_query(r, FMHA_T_MASK_BITS, &m->bits, heads, bytes);
}

static int reach_rows(const struct reach *r, enum fmha_tensor_role role, const struct abi_rows *t,
		      int64_t heads)
{
	const struct step steps[] = {sequence_step(r->sequences, t->stride_batch),
				     row_step(r->sequences, t->stride_seq),
				     {heads, t->stride_head}};

	return within_view(r, role, t->data, steps, 3);
}

/* Keys that are widened in the workspace: as they are written and as they are read. */
static int reach_wide(const struct reach *r, uint64_t offset, const struct abi_tensor *t,
		      int64_t heads, int64_t hdim)
{
	const struct abi_sequences *s = r->sequences;
	const struct step steps[N_STEPS] = {
		{s->seqstart_k  ? 1
		 : r->plan->few ? r->plan->wide_places
				: s->batch,
		 t->stride_batch},
		{s->seqstart_k ? s->total_k : s->seqlen_k_max, t->stride_seq},
		{heads, t->stride_head},
		{hdim, t->stride_dim}};

	return within_workspace(r, offset, fmha_dtype_bytes(r->plan->problem.q.dtype), steps,
				N_STEPS);
}

/* view_cache_offset(); @cache NULL: backward's keys. */
static int reach_keys(const struct reach *r, enum fmha_tensor_role role,
		      const struct abi_kv_cache *cache, const struct abi_tensor *t, int64_t heads,
		      int64_t hdim)
{
	const struct abi_sequences *s = r->sequences;
	struct step steps[N_STEPS] = {{s->batch, t->stride_batch},
				      {s->seqlen_k_max, t->stride_seq},
				      {heads, t->stride_head},
				      {hdim, t->stride_dim}};

	if (cache && cache->page_size > 0) {
		steps[0].count = cache->n_pages;
		steps[1].count = cache->page_size;
		if (cache->layout == ABI_KV_VECTORIZED) { /* packed: the head's elements as one */
			steps[1] = (struct step){1, 0};
			steps[3] = (struct step){hdim * cache->page_size, 1};
		}
	} else if (s->seqstart_k) {
		steps[0].count = 1;
		steps[1].count = s->total_k;
	} else if (cache && cache->cache_batch_idx) {
		steps[0].count = cache->cache_batch;
	}
	return within_view(r, role, t->data, steps, N_STEPS);
}

static int reach_descale(const struct reach *r, enum fmha_tensor_role role,
			 const struct abi_descale *d, int64_t sequences, int64_t pages,
			 int64_t heads, int64_t length)
{
	const int64_t counted = d->per_page ? r->plan->problem.page_size : length;
	const struct step steps[] = {{d->per_page ? pages : sequences, d->stride_batch},
				     {heads, d->stride_head},
				     {d->block ? ceil_div(counted, d->block) : 1, d->stride_block}};

	return within_view(r, role, d->data, steps, 3);
}

/* [sequences, heads] or [heads]. */
static int reach_heads(const struct reach *r, enum fmha_tensor_role role, const float *data,
		       int64_t sequences, int64_t stride, int64_t heads)
{
	const struct step steps[] = {{sequences, stride}, {heads, 1}};

	return within_view(r, role, data, steps, 2);
}

#define TRY(call)                                                                                  \
	do {                                                                                       \
		int r_ = (call);                                                                   \
		if (r_ < 0)                                                                        \
			return r_;                                                                 \
	} while (0)

static int reach_packed(const struct reach *r)
{
	const struct problem_axes *axes = &r->plan->axes;
	const struct abi_sequences *s = r->sequences;

	if ((axes->q.storage == STORED_PACKED) != (s->seqstart_q != NULL))
		return escapes(r, "seqstart_q", 0, 0);
	return (axes->k.storage == STORED_PACKED) == (s->seqstart_k != NULL)
		       ? 0
		       : escapes(r, "seqstart_k", 0, 0);
}

/* Integers come as private copies; what counts is that they are there when a loop asks. */
static int reach_tables(const struct reach *r, const struct abi_kv_cache *cache)
{
	const struct problem_axes *axes = &r->plan->axes;
	bool pages = problem_axis_is_paged(&axes->k), slots = axes->k.storage == STORED_SLOTS;

	TRY(reach_packed(r));
	if (!cache)
		return pages ? escapes(r, "block_table", 0, 0) : 0;
	if ((axes->k.storage == STORED_INDEXED) != (cache->cache_batch_idx != NULL))
		return escapes(r, "cache_batch_idx", 0, 0);
	if ((axes->k.storage == STORED_TABLE) != (cache->block_table != NULL))
		return escapes(r, "block_table", 0, 0);
	if ((axes->k.storage == STORED_LIST) !=
	    (cache->kv_indptr && cache->kv_page_indices && cache->kv_last_page_len))
		return escapes(r, "kv_indptr", 0, 0);
	return (pages || slots) == (cache->page_size > 0) ? 0 : escapes(r, "k", 0, 0);
}

/* ---- the argument structs ---- */

/* Q as it comes, or as the append left it in the workspace. */
static int reach_fwd_q(const struct reach *r, const struct abi_fwd_args *a)
{
	struct step steps[N_STEPS];

	if (!r->plan->append || r->plan->problem.rope == FMHA_ROPE_NONE)
		return reach_query(r, FMHA_T_Q, &a->q, a->nhead_q, a->hdim_q);
	query_steps(&a->sequences, &a->q, a->nhead_q, a->hdim_q, steps);
	return within_workspace(r, r->plan->layout.q_rotated, fmha_dtype_bytes((uint32_t)a->dtype),
				steps, N_STEPS);
}

static uint64_t offset_of_o(const struct reach *r)
{
	return plan_stage_few(r->plan, r->stage) ? r->plan->layout.few_o_acc
						 : r->plan->layout.o_acc;
}

static uint64_t offset_of_lse(const struct reach *r)
{
	return plan_stage_few(r->plan, r->stage) ? r->plan->layout.few_lse_acc
						 : r->plan->layout.lse_acc;
}

static int reach_partials(const struct reach *r, const struct abi_fwd_args *a)
{
	const struct step rows = {(int64_t)a->n_splits * a->nhead_q, a->sequences.total_q};
	const struct step o[] = {{rows.count, rows.stride * a->hdim_v},
				 {a->sequences.total_q, a->hdim_v},
				 {a->hdim_v, 1}};
	const struct step lse[] = {rows, {a->sequences.total_q, 1}};

	TRY(within_workspace(r, offset_of_o(r), sizeof(float), o, 3));
	return within_workspace(r, offset_of_lse(r), sizeof(float), lse, 2);
}

/* Of the last tiles of an unsplit problem. */
static int reach_rest(const struct reach *r, const struct abi_fwd_args *a)
{
	const struct kernel_tile *tile = &r->plan->stages[r->stage].spec.tile;
	const struct step parts[] = {
		{a->rest.n_parts, ABI_PART_FLOATS(tile->tile_m0, tile->tile_n1)},
		{ABI_PART_FLOATS(tile->tile_m0, tile->tile_n1), 1}};
	const struct step arrivals[] = {{a->rest.n_parts / a->rest.n_splits * tile->wave_m0, 1}};

	TRY(within_workspace(r, r->plan->layout.rest_parts, sizeof(float), parts, 2));
	return within_workspace(r, r->plan->layout.rest_arrivals, sizeof(abi_u32), arrivals, 1);
}

static int64_t key_elements(int32_t layout, int32_t hdim_q)
{
	return layout == ABI_KV_LATENT_FP8 ? ABI_LATENT_BYTES : hdim_q;
}

static int reach_chosen(const struct reach *r, const struct abi_fwd_args *a)
{
	const struct step steps[] = {sequence_step(r->sequences, a->chosen.stride_batch),
				     row_step(r->sequences, a->chosen.stride_seq),
				     {a->chosen.n, a->chosen.stride_entry}};

	return within_view(r, FMHA_T_INDICES, a->chosen.data, steps, 3);
}

static int reach_fwd_keys(const struct reach *r, const struct abi_fwd_args *a)
{
	const struct plan_layout *layout = &r->plan->layout;
	enum fmha_tensor_role v = a->v_in_k ? FMHA_T_K : FMHA_T_V;

	if (plan_stage_wide(r->plan, r->stage)) {
		TRY(reach_wide(r, layout->wide_k, &a->k, a->nhead_k, a->hdim_q));
		return reach_wide(r, layout->wide_v, &a->v, a->nhead_k, a->hdim_v);
	}
	TRY(reach_keys(r, FMHA_T_K, &a->cache, &a->k, a->nhead_k,
		       key_elements(a->cache.layout, a->hdim_q)));
	return reach_keys(r, v, &a->cache, &a->v, a->nhead_k, a->hdim_v);
}

static int reach_fwd(const struct reach *r, const struct abi_fwd_args *a)
{
	const struct abi_sequences *s = &a->sequences;
	abi_i32 n_pages = a->cache.n_pages;
	enum fmha_tensor_role v_descale = a->v_in_k ? FMHA_T_K_DESCALE : FMHA_T_V_DESCALE;

	if (plan_stage_wide(r->plan,
			    r->stage)) /* the cache's tables are those of the stage before */
		TRY(reach_packed(r));
	else
		TRY(reach_tables(r, &a->cache));
	TRY(reach_fwd_q(r, a));
	TRY(reach_fwd_keys(r, a));
	TRY(reach_chosen(r, a));
	TRY(reach_query(r, FMHA_T_O, &a->o, a->nhead_q, a->hdim_v));
	TRY(reach_rows(r, FMHA_T_LSE, &a->lse, a->nhead_q));
	TRY(reach_query(r, FMHA_T_BIAS, &a->bias, a->nhead_q, s->seqlen_k_max));
	TRY(reach_query(r, FMHA_T_RANDVAL, &a->dropout.randval, a->nhead_q, s->seqlen_k_max));
	TRY(reach_mask_data(r, &a->mask_data, a->nhead_q));
	TRY(reach_heads(r, FMHA_T_ALIBI_SLOPES, a->alibi_slopes, s->batch, a->alibi_stride_batch,
			a->nhead_q));
	TRY(reach_heads(r, FMHA_T_SINK, a->sink, 1, 0, a->nhead_q));
	TRY(reach_descale(r, FMHA_T_Q_DESCALE, &a->q_descale, s->batch, n_pages, a->nhead_q,
			  s->seqlen_q_max));
	TRY(reach_descale(r, FMHA_T_K_DESCALE, &a->k_descale, s->batch, n_pages, a->nhead_k,
			  s->seqlen_k_max));
	TRY(reach_descale(r, v_descale, &a->v_descale, s->batch, n_pages, a->nhead_k,
			  s->seqlen_k_max));
	if (a->rest.n_splits > 0)
		TRY(reach_rest(r, a));
	return a->n_splits > 0 ? reach_partials(r, a) : 0;
}

static int reach_combine_parts(const struct reach *r, const struct abi_combine_args *a)
{
	const struct abi_sequences *s = &a->sequences;
	struct step o[N_STEPS + 1] = {[N_STEPS] = {a->n_splits, a->o_parts_stride_split}};
	const struct step lse[] = {sequence_step(s, a->lse_parts.stride_batch),
				   row_step(s, a->lse_parts.stride_seq),
				   {a->nhead_q, a->lse_parts.stride_head},
				   {a->n_splits, a->lse_parts_stride_split}};

	query_steps(s, &a->o_parts, a->nhead_q, a->hdim_v, o);
	if (r->plan->problem.op == FMHA_MERGE_STATES) {
		TRY(within_view(r, FMHA_T_O_PARTS, a->o_parts.data, o, N_STEPS + 1));
		return within_view(r, FMHA_T_LSE_PARTS, a->lse_parts.data, lse, 4);
	}
	TRY(within_workspace(r, offset_of_o(r), sizeof(float), o, N_STEPS + 1));
	return within_workspace(r, offset_of_lse(r), sizeof(float), lse, 4);
}

static int reach_combine(const struct reach *r, const struct abi_combine_args *a)
{
	if ((plan_packed_q(r->plan)) != (a->sequences.seqstart_q != NULL))
		return escapes(r, "seqstart_q", 0, 0);
	TRY(reach_combine_parts(r, a));
	TRY(reach_query(r, FMHA_T_O, &a->o, a->nhead_q, a->hdim_v));
	TRY(reach_rows(r, FMHA_T_LSE, &a->lse, a->nhead_q));
	return reach_heads(r, FMHA_T_SINK, a->sink, 1, 0, a->nhead_q);
}

/* K_new and V_new: batched in every mode. */
static int reach_new(const struct reach *r, enum fmha_tensor_role role, const struct abi_tensor *t,
		     const struct abi_appendkv_args *a, int64_t hdim)
{
	const struct step steps[] = {{a->sequences.batch, t->stride_batch},
				     {a->seqlen_new, t->stride_seq},
				     {a->nhead_k, t->stride_head},
				     {hdim, t->stride_dim}};

	return within_view(r, role, t->data, steps, 4);
}

static int reach_rotary(const struct reach *r, enum fmha_tensor_role role,
			const struct abi_tensor *t, const struct abi_appendkv_args *a)
{
	const struct step steps[] = {{a->rotary_max_pos, t->stride_seq},
				     {a->rotary_dim / 2, t->stride_dim}};

	return within_view(r, role, t->data, steps, 2);
}

static int reach_rotated(const struct reach *r, const struct abi_appendkv_args *a)
{
	struct step steps[N_STEPS];

	if (!a->q_rotated.data)
		return 0;
	TRY(reach_query(r, FMHA_T_Q, &a->q, a->nhead_q, a->hdim_q));
	if (!r->plan->append)
		return reach_query(r, FMHA_T_Q_ROTATED, &a->q_rotated, a->nhead_q, a->hdim_q);
	query_steps(&a->sequences, &a->q_rotated, a->nhead_q, a->hdim_q, steps);
	return within_workspace(r, r->plan->layout.q_rotated,
				fmha_dtype_bytes(r->plan->problem.q.dtype), steps, N_STEPS);
}

/* Slots and positions: a number a new row. */
static int reach_row_numbers(const struct reach *r, enum fmha_tensor_role role, const abi_i64 *data,
			     abi_i64 stride_batch, abi_i64 stride_seq,
			     const struct abi_appendkv_args *a)
{
	const struct step steps[] = {{a->sequences.batch, stride_batch},
				     {a->seqlen_new, stride_seq}};

	return within_view(r, role, data, steps, 2);
}

static int reach_factors(const struct reach *r, const struct abi_appendkv_args *a)
{
	const struct abi_sequences *s = &a->sequences;

	TRY(reach_descale(r, FMHA_T_K_DESCALE, &a->k_descale, s->batch, a->cache.n_pages,
			  a->nhead_k, s->seqlen_k_max));
	return reach_descale(r, FMHA_T_V_DESCALE, &a->v_descale, s->batch, a->cache.n_pages,
			     a->nhead_k, s->seqlen_k_max);
}

static int reach_appendkv(const struct reach *r, const struct abi_appendkv_args *a)
{
	const struct step by_rows[] = {{a->few_rows ? 3 : 0, a->sequences.batch},
				       {a->sequences.batch, 1}};

	TRY(reach_tables(r, &a->cache));
	if (a->widens) {
		TRY(reach_wide(r, r->plan->layout.wide_k, &a->k_new, a->nhead_k, a->hdim_q));
		TRY(reach_wide(r, r->plan->layout.wide_v, &a->v_new, a->nhead_k, a->hdim_v));
		TRY(within_workspace(r, r->plan->layout.by_rows, sizeof(abi_i32), by_rows, 2));
	} else {
		TRY(reach_new(r, FMHA_T_K_NEW, &a->k_new, a, a->hdim_q));
		TRY(reach_new(r, FMHA_T_V_NEW, &a->v_new, a, a->hdim_v));
	}
	TRY(reach_keys(r, FMHA_T_K, &a->cache, &a->k, a->nhead_k,
		       key_elements(a->cache.layout, a->hdim_q)));
	TRY(reach_keys(r, FMHA_T_V, &a->cache, &a->v, a->nhead_k, a->hdim_v));
	TRY(reach_rotary(r, FMHA_T_ROTARY_COS, &a->rotary_cos, a));
	TRY(reach_rotary(r, FMHA_T_ROTARY_SIN, &a->rotary_sin, a));
	TRY(reach_row_numbers(r, FMHA_T_SLOT_MAPPING, a->slots, a->slots_stride_batch,
			      a->slots_stride_seq, a));
	TRY(reach_row_numbers(r, FMHA_T_POSITIONS, a->positions, a->positions_stride_batch,
			      a->positions_stride_seq, a));
	TRY(reach_factors(r, a));
	return reach_rotated(r, a);
}

/* Axes that bias broadcasts have stride 0 in dbias, whatever their extent. */
static int reach_bwd_workspace(const struct reach *r, const struct abi_bwd_args *a)
{
	const struct abi_sequences *s = &a->sequences;
	const struct step d[] = {sequence_step(s, a->d.stride_batch),
				 row_step(s, a->d.stride_seq),
				 {a->nhead_q, a->d.stride_head}};
	const struct step dq[] = {
		{s->total_q, (int64_t)a->nhead_q * r->plan->dq_splits * a->hdim_q},
		{(int64_t)a->nhead_q * r->plan->dq_splits * a->hdim_q, 1}};

	TRY(within_workspace(r, r->plan->layout.d, sizeof(float), d, 3));
	if (a->order_words > 0)
		TRY(within_workspace(
			r, r->plan->layout.d - (uint64_t)a->order_words * sizeof(abi_i32),
			sizeof(abi_i32), (const struct step[]){{a->order_words, 1}, {1, 1}}, 2));
	if (a->kv_parts > 1)
		TRY(within_workspace(
			r, r->plan->layout.kv_acc, sizeof(float),
			(const struct step[]){{(int64_t)a->nhead_k * a->kv_parts * s->total_k,
					       (int64_t)a->hdim_q + a->hdim_v},
					      {(int64_t)a->hdim_q + a->hdim_v, 1}},
			2));
	if (a->dq_tile_rows)
		return within_workspace(
			r, r->plan->layout.dq_acc, sizeof(float),
			(const struct step[]){{bwd_workspace_tiles(r->plan), a->dq_tile_floats},
					      {a->dq_tile_floats, 1}},
			2);
	return a->dq_acc ? within_workspace(r, r->plan->layout.dq_acc, sizeof(float), dq, 2) : 0;
}

static int reach_bwd(const struct reach *r, const struct abi_bwd_args *a)
{
	const struct abi_sequences *s = &a->sequences;
	const struct {
		enum fmha_tensor_role role;
		const struct abi_tensor *t;
		int64_t columns;
	} queries[] = {
		{FMHA_T_Q, &a->q, a->hdim_q},
		{FMHA_T_DQ, &a->dq, a->hdim_q},
		{FMHA_T_O, &a->o, a->hdim_v},
		{FMHA_T_DO, &a->d_o, a->hdim_v},
		{FMHA_T_BIAS, &a->bias, s->seqlen_k_max},
		{FMHA_T_DBIAS, &a->dbias, s->seqlen_k_max},
		{FMHA_T_RANDVAL, &a->dropout.randval, s->seqlen_k_max},
	};

	TRY(reach_tables(r, NULL));
	TRY(reach_mask_data(r, &a->mask_data, a->nhead_q));
	for (size_t i = 0; i < sizeof(queries) / sizeof(queries[0]); i++)
		TRY(reach_query(r, queries[i].role, queries[i].t, a->nhead_q, queries[i].columns));
	TRY(reach_keys(r, FMHA_T_K, NULL, &a->k, a->nhead_k, a->hdim_q));
	TRY(reach_keys(r, FMHA_T_DK, NULL, &a->dk, a->nhead_k, a->hdim_q));
	TRY(reach_keys(r, FMHA_T_V, NULL, &a->v, a->nhead_k, a->hdim_v));
	TRY(reach_keys(r, FMHA_T_DV, NULL, &a->dv, a->nhead_k, a->hdim_v));
	TRY(reach_rows(r, FMHA_T_LSE, &a->lse, a->nhead_q));
	TRY(reach_rows(r, FMHA_T_DLSE, &a->dlse, a->nhead_q));
	TRY(reach_heads(r, FMHA_T_ALIBI_SLOPES, a->alibi_slopes, s->batch, a->alibi_stride_batch,
			a->nhead_q));
	TRY(reach_heads(r, FMHA_T_SINK, a->sink, 1, 0, a->nhead_q));
	TRY(reach_heads(r, FMHA_T_DSINK, a->dsink, 1, 0, a->nhead_q));
	return reach_bwd_workspace(r, a);
}

int reach_check(const struct plan *plan, uint32_t stage, const union abi_args *args,
		struct fmha_error *err)
{
	struct reach r = {.plan = plan, .stage = stage, .err = err};

	switch (plan->stages[stage].family) {
#define REACH(NAME, name, taken)                                                                   \
	case ABI_##NAME:                                                                           \
		r.sequences = &args->taken.sequences;                                              \
		return reach_##taken(&r, &args->taken);
		ABI_FAMILIES(REACH)
#undef REACH
	case ABI_N_FAMILIES:
		break;
	}
	return fmha_error_set(err, FMHA_EINTERNAL, "stage %u: no family's arguments", stage);
}
