/* SPDX-License-Identifier: MIT */
/*
 * view.h: where things lie and what a row may see, one small function a rule, for the reference and
 * for every kernel whose speed does not depend on it. All offsets are in elements, 64 bits wide.
 */
#ifndef FMHA_KERNELS_VIEW_H
#define FMHA_KERNELS_VIEW_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include <kernels/abi.h>

/* One sequence of the batch. Rows and columns count from its own first query and first real key. */
struct view_sequence {
	int32_t batch; /* its number */
	bool packed_q; /* group mode: q_start counts along the packed axis */
	bool packed_k;
	int64_t q_start, k_start;
	int32_t q_len, k_len; /* rows and columns; k_len without left padding */
	int32_t q_physical;   /* rows that it occupies, padding included */
	int32_t leftpad;      /* cache position of column 0 */
};

static inline int32_t view_k_length(const struct abi_sequences *s, const struct abi_kv_cache *cache,
				    int32_t b)
{
	if (s->seqlen_k)
		return s->seqlen_k[b];
	if (s->seqstart_k)
		return s->seqstart_k[b + 1] - s->seqstart_k[b];
	if (cache && cache->kv_indptr) {
		int32_t pages = cache->kv_indptr[b + 1] - cache->kv_indptr[b];

		return pages > 0 ? (pages - 1) * cache->page_size + cache->kv_last_page_len[b] : 0;
	}
	return s->seqlen_k_max;
}

/* @cache: NULL for a problem without one. */
static inline struct view_sequence view_sequence(const struct abi_sequences *s,
						 const struct abi_kv_cache *cache, int32_t b)
{
	struct view_sequence v = {.batch = b, .packed_q = s->seqstart_q, .packed_k = s->seqstart_k};

	v.q_start = s->seqstart_q ? s->seqstart_q[b] : 0;
	v.q_physical = s->seqstart_q ? s->seqstart_q[b + 1] - s->seqstart_q[b] : s->seqlen_q_max;
	v.q_len = s->seqlen_q ? s->seqlen_q[b] : v.q_physical;
	v.k_start = s->seqstart_k ? s->seqstart_k[b] : 0;
	v.leftpad = s->leftpad_k ? s->leftpad_k[b] : 0;
	v.k_len = view_k_length(s, cache, b) - v.leftpad;
	if (v.k_len < 0)
		v.k_len = 0;
	return v;
}

/* Element 0 of a row and head, of a tensor along the query axis: q, o, d_o, bias, randval. */
static inline int64_t view_q_offset(const struct abi_tensor *t, const struct view_sequence *v,
				    int32_t row, int32_t head)
{
	int64_t base = v->packed_q ? 0 : v->batch * t->stride_batch;

	return base + (v->q_start + row) * t->stride_seq + head * t->stride_head;
}

/* Row statistics (lse, d) of row @row. */
static inline int64_t view_rows_offset(const struct abi_rows *r, const struct view_sequence *v,
				       int32_t row, int32_t head)
{
	int64_t base = v->packed_q ? 0 : v->batch * r->stride_batch;

	return base + (v->q_start + row) * r->stride_seq + head * r->stride_head;
}

/* Element 0 of column @column of a contiguous tensor along the key axis. */
static inline int64_t view_k_offset(const struct abi_tensor *t, const struct view_sequence *v,
				    int32_t column, int32_t head)
{
	int64_t base = v->packed_k ? 0 : v->batch * t->stride_batch;

	return base + (v->k_start + v->leftpad + column) * t->stride_seq + head * t->stride_head;
}

/* Number of the page that holds @position (left padding included). */
static inline int64_t view_page(const struct abi_kv_cache *c, const struct view_sequence *v,
				int32_t position)
{
	if (c->kv_indptr)
		return c->kv_page_indices[c->kv_indptr[v->batch] + position / c->page_size];
	return c->block_table[v->batch * c->block_table_stride + position / c->page_size];
}

/*
 * Where element @dim of the key or value at @position (left padding included) lies in a cache of
 * any kind. @x: elements in 16 bytes; @is_v: the vectorized layouts of K and V differ.
 */
static inline int64_t view_cache_offset(const struct abi_kv_cache *c, const struct abi_tensor *t,
					const struct view_sequence *v, int32_t position,
					int32_t head, int32_t dim, int32_t nhead_k, int32_t hdim,
					int32_t x, bool is_v)
{
	int64_t page, slot;

	if (!c->page_size) {
		int64_t row = c->cache_batch_idx ? c->cache_batch_idx[v->batch] : v->batch;
		int64_t base = v->packed_k ? 0 : row * t->stride_batch;

		return base + (v->k_start + position) * t->stride_seq + head * t->stride_head +
		       dim * t->stride_dim;
	}
	slot = position % c->page_size;
	page = view_page(c, v, position);
	if (c->layout == ABI_KV_LINEAR)
		return page * t->stride_batch + slot * t->stride_seq + head * t->stride_head +
		       dim * t->stride_dim;
	if (is_v) /* [page][head][slot / x][hdim][x] */
		return (((page * nhead_k + head) * (c->page_size / x) + slot / x) * hdim + dim) *
			       x +
		       slot % x;
	/* [page][head][hdim / x][page_size][x] */
	return (((page * nhead_k + head) * (hdim / x) + dim / x) * c->page_size + slot) * x +
	       dim % x;
}

/* May row @row see column @column? The band of fmha/base.h. */
static inline bool view_visible(const struct abi_band *band, const struct view_sequence *v,
				int32_t row, int32_t column)
{
	int64_t diagonal, distance;

	if (band->mask == ABI_MASK_NONE)
		return true;
	diagonal = row + (band->mask == ABI_MASK_BOTTOM_RIGHT ? (int64_t)v->k_len - v->q_len : 0);
	distance = column - diagonal;
	if (band->window_right >= 0 && distance > band->window_right)
		return false;
	return band->window_left < 0 || distance >= -(int64_t)band->window_left ||
	       column < band->sink_tokens;
}

/* What ALiBi adds at (row, column). */
static inline double view_alibi(double slope, const struct view_sequence *v, int32_t row,
				int32_t column)
{
	return -slope * fabs((double)row + v->k_len - v->q_len - column);
}

#endif
