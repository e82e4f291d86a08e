/* SPDX-License-Identifier: MIT */
/*
 * appendkv.c: new keys and values into the cache, with rotary position embedding.
 *
 * The exact formula, which every kernel reproduces bit by bit: with p the position,
 * i < rotary_dim / 2, c = cos[p][i], s = sin[p][i] and the pair (x, y) at dims (2i, 2i + 1) or
 * (i, i + rotary_dim / 2),
 *   x' = round(x * c - y * s),  y' = round(x * s + y * c)
 * evaluated in double, where both products are exact, so that neither fused multiply-add nor the
 * order of operands changes a bit; then one rounding, to nearest even, from double to the tensor's
 * type. Positions past the tables' end use their last row. Everything that does not rotate is
 * copied, bits untouched.
 */
#include <string.h>

#include <kernels/reference.h>
#include <kernels/view.h>

#include "internal.h"

/* Where element @dim of the row being written goes. */
typedef int64_t (*target_offset)(const struct abi_appendkv_args *a, const struct view_sequence *v,
				 int32_t row, int32_t head, int32_t dim);

/* First position that is new. */
static int32_t length_before(const struct abi_appendkv_args *a, int32_t b)
{
	int32_t length = view_k_length(&a->sequences, &a->cache, b);

	if (!a->sequences.seqlen_k)
		length -= a->seqlen_new;
	return length > 0 ? length : 0;
}

static int64_t k_target(const struct abi_appendkv_args *a, const struct view_sequence *v,
			int32_t row, int32_t head, int32_t dim)
{
	return view_cache_offset(&a->cache, &a->k, v, length_before(a, v->batch) + row, head, dim,
				 a->nhead_k, a->hdim_q, 16 / reference_dtype_bytes(a->dtype),
				 false);
}

static int64_t v_target(const struct abi_appendkv_args *a, const struct view_sequence *v,
			int32_t row, int32_t head, int32_t dim)
{
	return view_cache_offset(&a->cache, &a->v, v, length_before(a, v->batch) + row, head, dim,
				 a->nhead_k, a->hdim_v, 16 / reference_dtype_bytes(a->dtype), true);
}

static int64_t q_target(const struct abi_appendkv_args *a, const struct view_sequence *v,
			int32_t row, int32_t head, int32_t dim)
{
	return view_q_offset(&a->q_rotated, v, row, head) + dim * a->q_rotated.stride_dim;
}

static double table(const struct abi_appendkv_args *a, const struct abi_tensor *t, int32_t position,
		    int32_t i)
{
	if (position >= a->rotary_max_pos)
		position = a->rotary_max_pos - 1;
	return reference_load(t->data, a->rotary_dtype,
			      position * t->stride_seq + i * t->stride_dim);
}

/* One row: @position < 0 means that it does not rotate. */
static void write_row(const struct abi_appendkv_args *a, const struct view_sequence *v,
		      const struct abi_tensor *from, int64_t from_offset,
		      const struct abi_tensor *to, target_offset offset, int32_t row, int32_t head,
		      int32_t hdim, int32_t position)
{
	int32_t half = a->rotary_dim / 2, bytes = reference_dtype_bytes(a->dtype), n_rotated = 0;

	if (a->rope != ABI_ROPE_NONE && position >= 0)
		n_rotated = a->rotary_dim;
	for (int32_t i = 0; i < n_rotated / 2; i++) {
		bool interleaved = a->rope == ABI_ROPE_INTERLEAVED;
		int32_t dim_x = interleaved ? 2 * i : i;
		int32_t dim_y = interleaved ? 2 * i + 1 : i + half;
		double x = reference_load(from->data, a->dtype,
					  from_offset + dim_x * from->stride_dim);
		double y = reference_load(from->data, a->dtype,
					  from_offset + dim_y * from->stride_dim);
		double c = table(a, &a->rotary_cos, position, i);
		double s = table(a, &a->rotary_sin, position, i);

		reference_store(to->data, a->dtype, offset(a, v, row, head, dim_x), x * c - y * s);
		reference_store(to->data, a->dtype, offset(a, v, row, head, dim_y), x * s + y * c);
	}
	for (int32_t d = n_rotated; d < hdim; d++)
		memcpy((char *)to->data + offset(a, v, row, head, d) * bytes,
		       (const char *)from->data + (from_offset + d * from->stride_dim) * bytes,
		       bytes);
}

int reference_appendkv(const struct abi_appendkv_args *args)
{
	const struct abi_tensor *k_new = &args->k_new, *v_new = &args->v_new;

	for (int32_t b = 0; b < args->sequences.batch; b++) {
		struct view_sequence v = view_sequence(&args->sequences, &args->cache, b);
		int32_t before = length_before(args, b);

		for (int32_t h = 0; h < args->nhead_k; h++)
			for (int32_t i = 0; i < args->seqlen_new; i++) {
				write_row(args, &v, k_new,
					  b * k_new->stride_batch + i * k_new->stride_seq +
						  h * k_new->stride_head,
					  &args->k, k_target, i, h, args->hdim_q, before + i);
				write_row(args, &v, v_new,
					  b * v_new->stride_batch + i * v_new->stride_seq +
						  h * v_new->stride_head,
					  &args->v, v_target, i, h, args->hdim_v, -1);
			}
		for (int32_t h = 0; args->q_rotated.data && h < args->nhead_q; h++)
			for (int32_t i = 0; i < v.q_len; i++)
				write_row(args, &v, &args->q, view_q_offset(&args->q, &v, i, h),
					  &args->q_rotated, q_target, i, h, args->hdim_q,
					  before + (args->q_rows_same_position ? 0 : i));
	}
	return 0;
}
