/* SPDX-License-Identifier: MIT */
#include "judge_args.h"

#include <math.h>

#include <proto/problem.h>

int64_t judge_elements(const struct fmha_problem *problem, uint32_t role)
{
	int64_t dims[5], n = 1;

	problem_extents(problem, role, dims);
	for (int i = 0; i < proto_roles[role].n_dims; i++)
		n *= dims[i];
	return n;
}

/* Which of a role's dimensions is the batch, the sequence, the head and the element; -1: none. */
static struct abi_tensor tensor(const struct fmha_problem *p, enum fmha_tensor_role role, int batch,
				int seq, int head, int dim)
{
	struct abi_tensor t = {.data = p->tensor[role].data};
	int64_t stride[5];

	if (!t.data)
		return t;
	problem_strides(p, role, stride);
	t.stride_batch = batch < 0 ? 0 : stride[batch];
	t.stride_seq = seq < 0 ? 0 : stride[seq];
	t.stride_head = head < 0 ? 0 : stride[head];
	t.stride_dim = dim < 0 ? 0 : stride[dim];
	return t;
}

static struct abi_tensor bshd(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	return tensor(p, role, 0, 1, 2, 3);
}

static struct abi_tensor bhrc(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	return tensor(p, role, 0, 2, 1, 3);
}

static struct abi_tensor cache(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	int64_t hdim = role == FMHA_T_K ? p->hdim_q : p->hdim_v;

	if (p->page_size > 0 && p->kv_layout == FMHA_KV_VECTORIZED)
		return (struct abi_tensor){.data = p->tensor[role].data,
					   .stride_head = hdim * p->page_size,
					   .stride_batch = hdim * p->page_size * p->nhead_k};
	return bshd(p, role);
}

static struct abi_rows rows(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	struct abi_tensor t = tensor(p, role, 0, 2, 1, -1);

	return (struct abi_rows){t.data, t.stride_batch, t.stride_head, t.stride_seq};
}

static struct abi_descale descale(const struct fmha_problem *p, enum fmha_tensor_role role,
				  int32_t block)
{
	struct abi_descale d = {.data = p->tensor[role].data};
	int64_t stride[5];

	if (!d.data)
		return d;
	problem_strides(p, role, stride);
	d.stride_batch = stride[0];
	d.stride_head = stride[1];
	d.per_page = role != FMHA_T_Q_DESCALE && p->descale_per_page;
	if (block > 0) {
		d.block = block;
		d.stride_block = stride[2];
	}
	return d;
}

static struct abi_sequences sequences(const struct fmha_problem *p)
{
	bool group = p->mode == FMHA_GROUP;

	return (struct abi_sequences){
		.seqstart_q = p->seqstart_q.data,
		.seqstart_k = p->seqstart_k.data,
		.seqlen_q = p->seqlen_q_per_batch.data,
		.seqlen_k = p->seqlen_k_per_batch.data,
		.leftpad_k = p->leftpad_k.data,
		.batch = p->batch,
		.seqlen_q_max = p->seqlen_q,
		.seqlen_k_max = p->seqlen_k,
		.total_q = group ? p->total_q : p->batch * p->seqlen_q,
		.total_k = group ? p->total_k : p->batch * p->seqlen_k,
	};
}

static struct abi_kv_cache kv_cache(const struct fmha_problem *p)
{
	return (struct abi_kv_cache){
		.block_table = p->block_table.data,
		.block_table_stride = p->max_blocks,
		.kv_indptr = p->kv_indptr.data,
		.kv_page_indices = p->kv_page_indices.data,
		.kv_last_page_len = p->kv_last_page_len.data,
		.cache_batch_idx = p->cache_batch_idx.data,
		.page_size = p->page_size,
		.n_pages = p->n_pages,
		.layout = (abi_i32)p->kv_layout,
		.max_blocks = p->max_blocks,
		.n_page_indices = p->n_page_indices,
		.cache_batch = p->cache_batch > 0 ? p->cache_batch : p->batch,
	};
}

static struct abi_band band(const struct fmha_problem *p)
{
	if (p->mask == FMHA_MASK_NONE)
		return (struct abi_band){ABI_MASK_NONE, -1, -1, 0};
	return (struct abi_band){(abi_i32)p->mask, p->window_left, p->window_right, p->sink_tokens};
}

static struct abi_mask_data mask_data(const struct fmha_problem *p)
{
	struct abi_mask_data m = {.intervals.data = p->mask_intervals.data,
				  .bits = bhrc(p, FMHA_T_MASK_BITS),
				  .n_endpoints = p->mask_endpoints};
	int64_t stride[5];

	problem_strides(p, FMHA_T_MASK_INTERVALS, stride);
	m.intervals.stride_batch = stride[0];
	m.intervals.stride_head = stride[1];
	m.intervals.stride_dim = stride[2];
	m.intervals.stride_seq = stride[3];
	return m;
}

/* DESIGN section 7: a byte is kept when it is at most floor(255 * p_keep). */
static struct abi_dropout dropout(const struct fmha_problem *p)
{
	float keep = 1.0F - p->dropout_p;

	return (struct abi_dropout){.seed = p->dropout_seed,
				    .offset = p->dropout_offset,
				    .p_drop = p->dropout_p,
				    .p_keep_inverse = 1.0F / keep,
				    .keep_at_most = (abi_i32)floor(255.0 * (double)keep),
				    .row_block = p->dropout_row / 16,
				    .column_block = p->dropout_column / 32};
}

static float scale(const struct fmha_problem *p)
{
	return isnan(p->scale) ? (float)(1.0 / sqrt((double)p->hdim_q)) : p->scale;
}

static abi_i64 alibi_stride(const struct fmha_problem *p)
{
	int64_t stride[5];

	problem_strides(p, FMHA_T_ALIBI_SLOPES, stride);
	return stride[0];
}

static struct abi_chosen chosen(const struct fmha_problem *p)
{
	struct abi_chosen c = {.data = p->indices.data, .n = p->topk};
	struct problem_axes axes;
	int64_t stride[5];

	problem_axes(p, &axes);
	problem_strides(p, FMHA_T_INDICES, stride);
	c.stride_batch = stride[0];
	c.stride_seq = stride[1];
	c.stride_entry = stride[2];
	c.are_slots = axes.k.storage == STORED_SLOTS;
	return c;
}

void judge_fwd_args(const struct fmha_problem *p, struct abi_fwd_args *ret)
{
	*ret = (struct abi_fwd_args){
		.q = bshd(p, FMHA_T_Q),
		.k = cache(p, FMHA_T_K),
		.v = cache(p, FMHA_T_V),
		.bias = bhrc(p, FMHA_T_BIAS),
		.alibi_slopes = p->alibi_slopes.data,
		.alibi_stride_batch = alibi_stride(p),
		.sink = p->sink.data,
		.q_descale = descale(p, FMHA_T_Q_DESCALE, p->descale_block_q),
		.k_descale = descale(p, FMHA_T_K_DESCALE, p->descale_block_k),
		.v_descale = descale(p, FMHA_T_V_DESCALE, p->descale_block_k),
		.sequences = sequences(p),
		.cache = kv_cache(p),
		.band = band(p),
		.mask_data = mask_data(p),
		.dropout = dropout(p),
		.nhead_q = p->nhead_q,
		.nhead_k = p->nhead_k,
		.hdim_q = p->hdim_q,
		.hdim_v = p->hdim_v,
		.min_seqlen_q = p->min_seqlen_q,
		.scale = scale(p),
		.logits_soft_cap = p->logits_soft_cap,
		.dtype = (abi_i32)p->q.dtype,
		.o_dtype = (abi_i32)p->o.dtype,
		.kv_dtype = p->k.dtype == p->q.dtype ? 0 : (abi_i32)p->k.dtype,
		.bias_dtype = (abi_i32)p->bias.dtype,
		.v_in_k = p->v_in_k != 0,
		.chosen = chosen(p),
	};
	if (p->v_in_k) {
		ret->v = ret->k;
		ret->v_descale = ret->k_descale;
	}
}

void judge_bwd_args(const struct fmha_problem *p, struct abi_bwd_args *ret)
{
	*ret = (struct abi_bwd_args){
		.q = bshd(p, FMHA_T_Q),
		.k = bshd(p, FMHA_T_K),
		.v = bshd(p, FMHA_T_V),
		.o = bshd(p, FMHA_T_O),
		.d_o = bshd(p, FMHA_T_DO),
		.bias = bhrc(p, FMHA_T_BIAS),
		.lse = rows(p, FMHA_T_LSE),
		.dlse = rows(p, FMHA_T_DLSE),
		.alibi_slopes = p->alibi_slopes.data,
		.alibi_stride_batch = alibi_stride(p),
		.sink = p->sink.data,
		.sequences = sequences(p),
		.band = band(p),
		.mask_data = mask_data(p),
		.dropout = dropout(p),
		.nhead_q = p->nhead_q,
		.nhead_k = p->nhead_k,
		.hdim_q = p->hdim_q,
		.hdim_v = p->hdim_v,
		.deterministic = (abi_i32)p->deterministic,
		.scale = scale(p),
		.logits_soft_cap = p->logits_soft_cap,
		.dtype = (abi_i32)p->q.dtype,
		.bias_dtype = (abi_i32)p->bias.dtype,
	};
}

void judge_append_args(const struct fmha_problem *p, struct abi_appendkv_args *ret)
{
	bool divided = p->k_new.dtype != p->k.dtype;
	int64_t slots[5], positions[5];

	problem_strides(p, FMHA_T_SLOT_MAPPING, slots);
	problem_strides(p, FMHA_T_POSITIONS, positions);
	*ret = (struct abi_appendkv_args){
		.q = bshd(p, FMHA_T_Q),
		.q_rotated = bshd(p, FMHA_T_Q_ROTATED),
		.k_new = bshd(p, FMHA_T_K_NEW),
		.v_new = bshd(p, FMHA_T_V_NEW),
		.k = cache(p, FMHA_T_K),
		.v = cache(p, FMHA_T_V),
		.rotary_cos = tensor(p, FMHA_T_ROTARY_COS, -1, 0, -1, 1),
		.rotary_sin = tensor(p, FMHA_T_ROTARY_SIN, -1, 0, -1, 1),
		.sequences = sequences(p),
		.cache = kv_cache(p),
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
		.new_dtype = divided ? (abi_i32)p->k_new.dtype : 0,
		.computes_descale = p->descale_computed != 0,
		.slots = p->slot_mapping.data,
		.slots_stride_batch = slots[0],
		.slots_stride_seq = slots[1],
		.positions = p->positions.data,
		.positions_stride_batch = positions[0],
		.positions_stride_seq = positions[1],
	};
	if (!divided)
		return;
	ret->k_descale = descale(p, FMHA_T_K_DESCALE, p->descale_block_k);
	ret->v_descale = descale(p, FMHA_T_V_DESCALE, p->descale_block_k);
}

void judge_merge_args(const struct fmha_problem *p, struct abi_combine_args *ret)
{
	int64_t o[5], lse[5];

	problem_strides(p, FMHA_T_O_PARTS, o);
	problem_strides(p, FMHA_T_LSE_PARTS, lse);
	*ret = (struct abi_combine_args){
		.o_parts = {p->o_parts.data, o[1], o[2], o[3], o[4]},
		.o_parts_stride_split = o[0],
		.lse_parts = {p->lse_parts.data, lse[1], lse[2], lse[3]},
		.lse_parts_stride_split = lse[0],
		.sink = p->sink.data,
		.sequences = sequences(p),
		.n_splits = p->n_parts,
		.nhead_q = p->nhead_q,
		.hdim_v = p->hdim_v,
		.min_seqlen_q = p->min_seqlen_q,
		.o_parts_dtype = (abi_i32)p->o_parts.dtype,
		.o_dtype = (abi_i32)p->o.dtype,
	};
}
