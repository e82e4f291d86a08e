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
 * type. Positions past the tables' ends use the nearest row. Everything that does not rotate is
 * copied, bits untouched.
 *
 * Over a cache of fp8, x of a new row of 16 bits, rotated and rounded to float where it rotates, becomes
 *   round(min(max(x / factor, -most), most))
 * with a float's division and the type's largest finite number; a NaN becomes the positive one. Likewise over
 * one of i8, whose most is 127 and where a NaN becomes 0. A factor
 * that is found is max |x| / most, at least 2^-100, or 1 where that maximum is 0 or not finite.
 */
#include <math.h>
#include <string.h>

#include <kernels/reference.h>
#include <kernels/view.h>

#include "internal.h"

/* Where the elements of a row come from and go to. */
struct row {
	const struct abi_appendkv_args *a;
	const struct view_sequence *v;
	const struct abi_tensor *from;
	int64_t from_offset;
	int32_t head, hdim;
	bool turns;
	int64_t turn;
};

static uint32_t new_dtype(const struct abi_appendkv_args *a)
{
	return (uint32_t)(a->new_dtype ? a->new_dtype : a->dtype);
}

static double table(const struct abi_appendkv_args *a, const struct abi_tensor *t, int64_t position,
		    int32_t i)
{
	if (position >= a->rotary_max_pos)
		position = a->rotary_max_pos - 1;
	if (position < 0)
		position = 0;
	return reference_load(t->data, (uint32_t)a->rotary_dtype,
			      position * t->stride_seq + i * t->stride_dim);
}

static double load(const struct row *row, int32_t d)
{
	return reference_load(row->from->data, new_dtype(row->a),
			      row->from_offset + d * row->from->stride_dim);
}

static bool rotates(const struct row *row, int32_t d)
{
	return row->a->rope != ABI_ROPE_NONE && row->turns && d < row->a->rotary_dim;
}

/* Element @d as it is appended, in double. */
static double element(const struct row *row, int32_t d)
{
	const struct abi_appendkv_args *a = row->a;
	int32_t half = a->rotary_dim / 2, i, x, y;
	double c, s;

	if (!rotates(row, d))
		return load(row, d);
	if (a->rope == ABI_ROPE_INTERLEAVED)
		i = d / 2, x = d & ~1, y = d | 1;
	else
		i = d % half, x = i, y = i + half;
	c = table(a, &a->rotary_cos, row->turn, i);
	s = table(a, &a->rotary_sin, row->turn, i);
	return d == x ? load(row, x) * c - load(row, y) * s : load(row, x) * s + load(row, y) * c;
}

static void copy_element(const struct row *row, int32_t d, void *to, int64_t offset)
{
	size_t bytes = (size_t)reference_dtype_bytes(new_dtype(row->a));

	if (rotates(row, d))
		reference_store(to, new_dtype(row->a), offset, element(row, d));
	else
		memcpy((char *)to + offset * (int64_t)bytes,
		       (const char *)row->from->data +
			       (row->from_offset + d * row->from->stride_dim) * (int64_t)bytes,
		       bytes);
}

static float most_of(uint32_t dtype)
{
	return dtype == ABI_E4M3 ? 448.0F : dtype == ABI_E5M2 ? 57344.0F : 127.0F;
}

static float found_factor(const struct row *row, int32_t begin, int32_t end)
{
	float most = 0;

	for (int32_t d = begin; d < end; d++)
		most = fmaxf(most, fabsf((float)element(row, d)));
	if (most == 0 || !isfinite(most))
		return 1;
	return fmaxf(most / most_of((uint32_t)row->a->dtype), 0x1p-100F);
}

static void quantize_element(const struct row *row, int32_t d, float factor, void *to,
			     int64_t offset)
{
	uint32_t dtype = (uint32_t)row->a->dtype;
	float most = most_of(dtype), y = (float)element(row, d) / factor;

	reference_store(to, dtype, offset,
			isnan(y) ? (double)NAN : (double)fminf(fmaxf(y, -most), most));
}

/* A key as a latent of fp8, with the factors that its blocks have. */
static void append_latent(const struct row *row, const struct view_place *place)
{
	const struct abi_appendkv_args *a = row->a;
	char *key = (char *)a->k.data + view_place_offset(a, row->v, place, row->head, 0, 0, false);
	float factor = 1;

	for (int32_t d = 0; d < ABI_LATENT_CODES; d++) {
		if (d % ABI_LATENT_BLOCK == 0) {
			factor = found_factor(row, d, d + ABI_LATENT_BLOCK);
			memcpy(key + ABI_LATENT_FACTORS + d / ABI_LATENT_BLOCK * 4, &factor,
			       sizeof(factor));
		}
		quantize_element(row, d, factor, key, d);
	}
	for (int32_t d = ABI_LATENT_CODES; d < a->hdim_q; d++)
		reference_store(key + ABI_LATENT_REST, ABI_BF16, d - ABI_LATENT_CODES,
				element(row, d));
}

static void append_row(const struct row *row, const struct view_place *place, bool is_v)
{
	const struct abi_appendkv_args *a = row->a;
	const struct abi_tensor *t = is_v ? &a->v : &a->k;
	const struct abi_descale *descale = is_v ? &a->v_descale : &a->k_descale;
	int32_t x = 16 / reference_dtype_bytes((uint32_t)a->dtype);
	int64_t at = view_place_factor(descale, row->v->batch, row->head, place);
	float factor = 1;

	if (a->new_dtype && a->computes_descale)
		factor = ((float *)(uintptr_t)descale->data)[at] = found_factor(row, 0, row->hdim);
	else if (a->new_dtype && descale->data)
		factor = descale->data[at];
	for (int32_t d = 0; d < row->hdim; d++) {
		int64_t offset = view_place_offset(a, row->v, place, row->head, d, x, is_v);

		if (a->new_dtype)
			quantize_element(row, d, factor, t->data, offset);
		else
			copy_element(row, d, t->data, offset);
	}
}

static void append_head(const struct abi_appendkv_args *a, const struct view_sequence *v, int32_t i,
			int32_t h)
{
	const struct abi_tensor *k = &a->k_new, *new_v = &a->v_new;
	int32_t b = v->batch;
	struct view_place place;
	struct row row = {.a = a, .v = v, .head = h};

	if (!view_append_place(a, v, i, &place))
		return;
	row.from = k;
	row.from_offset = b * k->stride_batch + i * k->stride_seq + h * k->stride_head;
	row.hdim = a->hdim_q;
	row.turns = true;
	row.turn = place.turn;
	if (a->cache.layout == ABI_KV_LATENT_FP8)
		append_latent(&row, &place);
	else
		append_row(&row, &place, false);
	if (!new_v->data)
		return;
	row.from = new_v;
	row.from_offset = b * new_v->stride_batch + i * new_v->stride_seq + h * new_v->stride_head;
	row.hdim = a->hdim_v;
	row.turns = false;
	append_row(&row, &place, true);
}

static void rotate_query(const struct abi_appendkv_args *a, const struct view_sequence *v,
			 int32_t i, int32_t h)
{
	struct row row = {.a = a,
			  .v = v,
			  .from = &a->q,
			  .from_offset = view_q_offset(&a->q, v, i, h),
			  .head = h,
			  .hdim = a->hdim_q,
			  .turns = true};

	row.turn = view_append_turn(a, v->batch, !a->slots && a->q_rows_same_position ? 0 : i);
	for (int32_t d = 0; d < a->hdim_q; d++)
		copy_element(&row, d, a->q_rotated.data,
			     view_q_offset(&a->q_rotated, v, i, h) + d * a->q_rotated.stride_dim);
}

/* The other way round: key or value @i of the cache to where new rows come from. */
static void widen_row(const struct abi_appendkv_args *a, const struct view_sequence *v,
		      int32_t place, int32_t i, int32_t h, bool is_v)
{
	const struct abi_tensor *from = is_v ? &a->v : &a->k, *to = is_v ? &a->v_new : &a->k_new;
	const struct abi_descale *descale = is_v ? &a->v_descale : &a->k_descale;
	int64_t page = descale->per_page ? view_page(&a->cache, v, i) : 0;
	float factor = view_descale(descale, v->batch, h, i, page, a->cache.page_size);
	int32_t hdim = is_v ? a->hdim_v : a->hdim_q;
	int64_t base = v->packed_k ? 0 : place * to->stride_batch;

	base += (v->k_start + i) * to->stride_seq + h * to->stride_head;
	for (int32_t d = 0; d < hdim; d++) {
		int64_t at = view_cache_offset(&a->cache, from, v, i, h, d, a->nhead_k, hdim, 16,
					       is_v);

		reference_store(to->data, (uint32_t)a->new_dtype, base + d * to->stride_dim,
				(double)((float)reference_load(from->data, (uint32_t)a->dtype, at) *
					 factor));
	}
}

static int32_t count_above(const struct abi_appendkv_args *a, int32_t few, int32_t end)
{
	int32_t n = 0;

	for (int32_t b = 0; b < end; b++)
		n += view_sequence(&a->sequences, &a->cache, b).q_len > few;
	return n;
}

/* Whether a sequence is widened, where some are not, and where to. */
static bool find_place(const struct abi_appendkv_args *a, const struct view_sequence *v, int32_t b,
		       int32_t *ret_place)
{
	int32_t few = a->few_rows;
	bool goes;

	while (count_above(a, few, a->sequences.batch) > a->n_places)
		few *= 2;
	goes = v->q_len > few;
	*ret_place = count_above(a, few, b);
	a->rows_kept[b] = goes ? 0 : v->q_len;
	a->rows_widened[b] = goes ? v->q_len : 0;
	a->places[b] = goes ? *ret_place : 0;
	return goes;
}

static void widen(const struct abi_appendkv_args *a, const struct view_sequence *v, int32_t place)
{
	for (int32_t i = 0; i < v->k_len + v->leftpad; i++)
		for (int32_t h = 0; h < a->nhead_k; h++) {
			widen_row(a, v, place, i, h, false);
			widen_row(a, v, place, i, h, true);
		}
}

int reference_appendkv(const struct abi_appendkv_args *args)
{
	for (int32_t b = 0; b < args->sequences.batch; b++) {
		struct view_sequence v = view_sequence(&args->sequences, &args->cache, b);

		if (args->widens) {
			int32_t place = b;

			if (args->few_rows == 0 || find_place(args, &v, b, &place))
				widen(args, &v, place);
			continue;
		}
		for (int32_t h = 0; h < args->nhead_k; h++)
			for (int32_t i = 0; i < args->seqlen_new; i++)
				append_head(args, &v, i, h);
		for (int32_t h = 0; args->q_rotated.data && h < args->nhead_q; h++)
			for (int32_t i = 0; i < v.q_len; i++)
				rotate_query(args, &v, i, h);
	}
	return 0;
}
