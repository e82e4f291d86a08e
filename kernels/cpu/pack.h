/* SPDX-License-Identifier: MIT */
/*
 * pack.h: Q, K and V out of whatever type and layout they have into what the matrix multiply reads.
 *
 *   K   panels of PANEL keys: [k_padded / PANEL][q_padded][PANEL]    (transposed)
 *   V   panels of PANEL dims: [hdim_v / PANEL][k_padded][PANEL]
 *
 * q_padded is hdim_q in multiples of K_UNIT. Keys beyond the sequence's end are zeros. Scale factors
 * are applied here. A flag a panel of keys says whether V has a value that is not finite there:
 * then 0 * V is not 0, and P V must skip what a mask hides.
 */
#ifndef FMHA_CPU_PACK_H
#define FMHA_CPU_PACK_H

#include <kernels/view.h>

#include "gemm.h"

static inline int64_t round_up(int64_t x, int64_t unit)
{
	return (x + unit - 1) / unit * unit;
}

/* Where the packed keys of a sequence lie in the workspace; all in keys, multiples of PANEL. */
struct packed_keys {
	int64_t start; /* of this sequence and head */
	int32_t n;     /* k_len rounded up */
};

/* Keys that the workspace has room for, per head. Depends on nothing behind a pointer. */
static inline int64_t packed_keys_total(const struct abi_sequences *s)
{
	if (s->seqstart_k)
		return s->total_k / PANEL * PANEL + (int64_t)s->batch * PANEL;
	return s->batch * round_up(s->seqlen_k_max, PANEL);
}

static inline struct packed_keys packed_keys_at(const struct abi_sequences *s,
						const struct view_sequence *v, int32_t nhead_k,
						int32_t head)
{
	struct packed_keys p = {.n = (int32_t)round_up(v->k_len, PANEL)};
	int64_t before = s->seqstart_k ? v->k_start / PANEL * PANEL + (int64_t)v->batch * PANEL
				       : v->batch * round_up(s->seqlen_k_max, PANEL);

	p.start = before * nhead_k + (int64_t)head * p.n;
	return p;
}

/* Rows of one head lie far apart, which the hardware does not see coming: asks for the one this
 * many keys ahead. */
#define PREFETCH_KEYS 8

static inline void prefetch_row(const void *data, int64_t index, int32_t n, int32_t bytes)
{
	const char *at = (const char *)data + index * bytes;

	for (int32_t i = 0; i < n * bytes; i += 64)
		__builtin_prefetch(at + i);
}

/* One key or value of a layout whose elements do not lie side by side. */
static inline void fetch_scattered_key(operand *dst, const struct abi_fwd_args *a,
				       const struct abi_tensor *t, int64_t index, int32_t hdim,
				       int is_v)
{
	int32_t dtype = view_kv_dtype(a), x = 16 / dtype_bytes(dtype);

	if (!a->cache.page_size || a->cache.layout == ABI_KV_LINEAR) {
		operand_load_row(dst, t->data, dtype, index, t->stride_dim, hdim);
	} else if (is_v) {
		operand_load_row(dst, t->data, dtype, index, x, hdim);
	} else {
		for (int32_t d = 0; d < hdim; d += x)
			operand_load_row(dst + d, t->data, dtype,
					 index + (int64_t)d * a->cache.page_size, 1,
					 hdim - d < x ? hdim - d : x);
	}
}

/* The scale factor of key @column. */
static inline float key_factor(const struct abi_fwd_args *a, const struct abi_descale *descale,
			       const struct view_sequence *s, int32_t head, int32_t column)
{
	int32_t position = s->leftpad + column;
	int64_t page = descale->per_page ? view_page(&a->cache, s, position) : 0;

	return view_descale(descale, s->batch, head, position, page, a->cache.page_size);
}

/* Keys or values [column, column + n), rows of @dst @ld apart, factors applied, but for those of keys
 * where operands are bf16. @column: logical. */
static inline void fetch_keys(operand *dst, int32_t ld, const struct abi_fwd_args *a,
			      const struct view_sequence *s, int32_t head, int32_t column,
			      int32_t n, int is_v)
{
	const struct abi_tensor *t = is_v ? &a->v : &a->k;
	const struct abi_descale *descale = is_v ? &a->v_descale : &a->k_descale;
	int32_t hdim = is_v ? a->hdim_v : a->hdim_q, dtype = view_kv_dtype(a);
	int32_t bytes = dtype_bytes(dtype);
	int in_rows = t->stride_dim == 1 &&
		      (!a->cache.page_size || a->cache.layout == ABI_KV_LINEAR);

	for (int32_t j = 0, run; j < n; j += run) {
		int32_t position = s->leftpad + column + j;
		int64_t index = view_cache_offset(&a->cache, t, s, position, head, 0, a->nhead_k,
						  hdim, 16 / bytes, is_v);

		/* As far as keys follow each other at the tensor's stride. */
		run = in_rows ? n - j : 1;
		if (in_rows && a->cache.page_size &&
		    run > a->cache.page_size - position % a->cache.page_size)
			run = a->cache.page_size - position % a->cache.page_size;
		if (!in_rows)
			fetch_scattered_key(dst + j * ld, a, t, index, hdim, is_v);
		for (int32_t i = 0; in_rows && i < run; i++, index += t->stride_seq) {
			prefetch_row(t->data, index + PREFETCH_KEYS * t->stride_seq, hdim, bytes);
			operand_load_row(dst + (j + i) * ld, t->data, dtype, index, 1, hdim);
		}
	}
	for (int32_t j = 0; (SCALES_Q || is_v) && descale->data && j < n; j++)
		operand_scale_row(dst + j * ld, hdim, key_factor(a, descale, s, head, column + j));
}

/* Row @i of head @head of Q, times @factor and its fp8 factor where operands are floats. */
static inline void fetch_query(operand *dst, const struct abi_fwd_args *a,
			       const struct view_sequence *s, int32_t head, int32_t i, float factor)
{
	int64_t index = view_q_offset(&a->q, s, i, head);

	operand_load_row(dst, a->q.data, a->dtype, index, a->q.stride_dim, a->hdim_q);
#if SCALES_Q
	scale_row(dst, a->hdim_q, factor * view_descale(&a->q_descale, s->batch, head, i, 0, 0));
#else
	(void)factor;
#endif
}

/* X [n x k], row stride @ld, as panels of its rows: a B whose k counts columns, up to a whole
 * K_UNIT. @next: see pack_transposed(). */
static inline void pack_columns(operand *to, const operand *x, int64_t ld, int32_t n, int32_t k,
				const struct gemm_a *next)
{
	/* A pair of bf16 travels as one float: nothing is computed with it. */
	pack_transposed((float *)to, (const float *)x, ld / OPERAND_PAIR, n,
			ROUND_UP(k, K_UNIT) / OPERAND_PAIR, next);
}

/* Columns [c0, c0 + PANEL) of K into one panel. @temp: PANEL * padded operands. */
static inline void pack_k_panel(operand *panel, const struct abi_fwd_args *a,
				const struct view_sequence *s, int32_t head, int32_t c0,
				operand *temp)
{
	int32_t padded = (int32_t)round_up(a->hdim_q, K_UNIT);
	int32_t n = s->k_len - c0 < PANEL ? s->k_len - c0 : PANEL;

	fetch_keys(temp, padded, a, s, head, c0, n, 0);
	for (int32_t j = 0; padded > a->hdim_q && j < n; j++)
		memset(temp + j * padded + a->hdim_q, 0,
		       (size_t)(padded - a->hdim_q) * sizeof(*temp));
	pack_columns(panel, temp, padded, n, padded, NULL);
}

/*
 * X [n x width], row stride @ld, as panels of its columns, @stride operands apart: a B whose k
 * counts rows. @n: a multiple of OPERAND_PAIR; @width: of LANES. @zeros becomes NaN when something
 * is not finite.
 */
static inline void pack_rows(operand *to, int64_t stride, const operand *x, int64_t ld, int32_t n,
			     int32_t width, vf *zeros)
{
	for (int32_t d = 0; d < width; d += LANES) {
		operand *panel = to + d / PANEL * stride + d % PANEL * OPERAND_PAIR;

		for (int32_t j = 0; j < n; j += OPERAND_PAIR)
			operand_store_rows(panel + j * PANEL, x + j * ld + d, ld, zeros);
	}
}

/*
 * Columns [c0, c0 + PANEL) of V. @v: the first panel of dims, at column c0; the next one is @stride
 * operands further. @temp: PANEL rows of hdim_v rounded up to PANEL. Returns 1 when all is finite.
 */
static inline uint8_t pack_v_panel(operand *v, int64_t stride, const struct abi_fwd_args *a,
				   const struct view_sequence *s, int32_t head, int32_t c0,
				   operand *temp)
{
	int32_t padded = (int32_t)round_up(a->hdim_v, PANEL);
	int32_t n = s->k_len - c0 < PANEL ? s->k_len - c0 : PANEL;
	vf zeros = {0};

	if (n < PANEL || a->hdim_v < padded)
		memset(temp, 0, PANEL * (size_t)padded * sizeof(*temp));
	fetch_keys(temp, padded, a, s, head, c0, n, 1);
	pack_rows(v, stride, temp, padded, PANEL, padded, &zeros);
	return vf_reduce_add(zeros) == 0;
}

#endif
