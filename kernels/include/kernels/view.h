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

/* The type of K and V. */
static inline int32_t view_kv_dtype(const struct abi_fwd_args *a)
{
	return a->kv_dtype ? a->kv_dtype : a->dtype;
}

/* Number of the page that holds @position (left padding included). */
static inline int64_t view_page(const struct abi_kv_cache *c, const struct view_sequence *v,
				int32_t position)
{
	if (c->kv_indptr)
		return c->kv_page_indices[c->kv_indptr[v->batch] + position / c->page_size];
	return c->block_table[v->batch * c->block_table_stride + position / c->page_size];
}

/* Where element @dim of the key or value in slot @slot of @page lies; as view_cache_offset(). */
static inline int64_t view_page_offset(const struct abi_kv_cache *c, const struct abi_tensor *t,
				       int64_t page, int32_t slot, int32_t head, int32_t dim,
				       int32_t nhead_k, int32_t hdim, int32_t x, bool is_v)
{
	if (c->layout != ABI_KV_VECTORIZED)
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

/*
 * Where element @dim of the key or value at @position (left padding included) lies in a cache of
 * any kind. @x: elements in 16 bytes; @is_v: the vectorized layouts of K and V differ.
 */
static inline int64_t view_cache_offset(const struct abi_kv_cache *c, const struct abi_tensor *t,
					const struct view_sequence *v, int32_t position,
					int32_t head, int32_t dim, int32_t nhead_k, int32_t hdim,
					int32_t x, bool is_v)
{
	if (!c->page_size) {
		int64_t row = c->cache_batch_idx ? c->cache_batch_idx[v->batch] : v->batch;
		int64_t base = v->packed_k ? 0 : row * t->stride_batch;

		return base + (v->k_start + position) * t->stride_seq + head * t->stride_head +
		       dim * t->stride_dim;
	}
	return view_page_offset(c, t, view_page(c, v, position), position % c->page_size, head, dim,
				nhead_k, hdim, x, is_v);
}

/*
 * The scale factor of row or cache position @position; @page: the one that holds it and @page_size its
 * keys, for factors that belong to pages.
 */
static inline float view_descale(const struct abi_descale *d, int32_t b, int32_t head,
				 int32_t position, int64_t page, int32_t page_size)
{
	int64_t index = (d->per_page ? page : b) * d->stride_batch + head * d->stride_head;

	if (!d->data)
		return 1.0f;
	if (d->per_page && page_size > 0)
		position %= page_size;
	if (d->block)
		index += position / d->block * d->stride_block;
	return d->data[index];
}

/* Where an append puts a new row, and by what it turns. */
struct view_place {
	int64_t page;
	int32_t slot;     /* of the page */
	int32_t position; /* in the sequence's storage; by slots: 0 */
	int64_t turn;     /* the rotary tables' row; may be outside of them */
};

/* First position that is new. */
static inline int32_t view_append_before(const struct abi_appendkv_args *a, int32_t b)
{
	int32_t length = view_k_length(&a->sequences, &a->cache, b);

	if (!a->sequences.seqlen_k)
		length -= a->seqlen_new;
	return length > 0 ? length : 0;
}

/* Row @i of q turns by this; the same as a new row by slots. */
static inline int64_t view_append_turn(const struct abi_appendkv_args *a, int32_t b, int32_t i)
{
	const volatile abi_i64 *positions = a->positions;

	if (a->slots)
		return positions ? positions[b * a->positions_stride_batch +
					     i * a->positions_stride_seq]
				 : 0;
	return view_append_before(a, b) + (int64_t)i;
}

/*
 * The key that entry @e of row @row's choice names. False: there is none. Indices are memory of a client, who
 * may be writing it: each is read once.
 */
static inline bool view_chosen_place(const struct abi_fwd_args *a, const struct view_sequence *v,
				     int32_t row, int32_t e, struct view_place *ret)
{
	const volatile abi_i32 *indices = a->chosen.data;
	int64_t base = v->packed_q ? 0 : v->batch * a->chosen.stride_batch;
	int32_t size = a->cache.page_size;
	int64_t index = indices[base + (v->q_start + row) * a->chosen.stride_seq +
				e * a->chosen.stride_entry];
	int64_t end = a->chosen.are_slots ? (int64_t)a->cache.n_pages * size : v->k_len;

	*ret = (struct view_place){0};
	if (index < 0 || index >= end)
		return false;
	ret->position = (int32_t)index;
	if (size) {
		ret->page = a->chosen.are_slots ? index / size
						: view_page(&a->cache, v, ret->position);
		ret->slot = (int32_t)(index % size);
	}
	return true;
}

/* Where element @dim of the key or value at @place lies: caches whose keys are chosen go by strides. */
static inline int64_t view_chosen_offset(const struct abi_fwd_args *a, const struct abi_tensor *t,
					 const struct view_sequence *v,
					 const struct view_place *place, int32_t head, int32_t dim)
{
	if (a->cache.page_size)
		return place->page * t->stride_batch + place->slot * t->stride_seq +
		       head * t->stride_head + dim * t->stride_dim;
	return view_cache_offset(&a->cache, t, v, place->position, head, dim, a->nhead_k, 0, 0,
				 false);
}

/*
 * The place of new row @i of sequence @v. False: it has none and is left out. Slots are memory of a
 * client, who may be writing it: each is read once.
 */
static inline bool view_append_place(const struct abi_appendkv_args *a,
				     const struct view_sequence *v, int32_t i,
				     struct view_place *ret)
{
	const volatile abi_i64 *slots = a->slots;
	int32_t size = a->cache.page_size;
	int64_t slot;

	*ret = (struct view_place){.turn = view_append_turn(a, v->batch, i)};
	if (slots) {
		slot = slots[v->batch * a->slots_stride_batch + i * a->slots_stride_seq];
		if (slot < 0 || slot >= (int64_t)a->cache.n_pages * size)
			return false;
		ret->page = slot / size;
		ret->slot = (int32_t)(slot % size);
		return true;
	}
	ret->position = view_append_before(a, v->batch) + i;
	if (size) {
		ret->page = view_page(&a->cache, v, ret->position);
		ret->slot = ret->position % size;
	}
	return true;
}

static inline int64_t view_place_offset(const struct abi_appendkv_args *a,
					const struct view_sequence *v,
					const struct view_place *place, int32_t head, int32_t dim,
					int32_t x, bool is_v)
{
	const struct abi_tensor *t = is_v ? &a->v : &a->k;
	int32_t hdim = is_v ? a->hdim_v : a->hdim_q;

	if (a->cache.page_size)
		return view_page_offset(&a->cache, t, place->page, place->slot, head, dim,
					a->nhead_k, hdim, x, is_v);
	return view_cache_offset(&a->cache, t, v, place->position, head, dim, a->nhead_k, hdim, x,
				 is_v);
}

/* The element of d->data that is a new row's factor. */
static inline int64_t view_place_factor(const struct abi_descale *d, int32_t b, int32_t head,
					const struct view_place *place)
{
	int64_t index = (d->per_page ? place->page : b) * d->stride_batch + head * d->stride_head;

	if (d->block)
		index += (d->per_page ? place->slot : place->position) / d->block * d->stride_block;
	return index;
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

/* Does a mask that is data let row @row of head @head see column @column? */
static inline bool view_data_visible(const struct abi_mask_data *m, const struct view_sequence *v,
				     int32_t head, int32_t row, int32_t column)
{
	const int32_t *f = (const int32_t *)m->intervals.data;
	int64_t step = m->intervals.stride_dim;

	if (m->bits.data)
		return ((const uint8_t *)m->bits.data)[view_q_offset(&m->bits, v, row, head) +
						       column / 8 * m->bits.stride_dim] >>
			       column % 8 &
		       1;
	if (!f)
		return true;
	f += view_q_offset(&m->intervals, v, row, head);
	if (column < f[0])
		return true;
	for (int32_t e = 1; e + 1 < m->n_endpoints; e += 2)
		if (f[e * step] <= column && column < f[(e + 1) * step])
			return true;
	return false;
}

/* ALiBi's addend at (row, column). */
static inline double view_alibi(double slope, const struct view_sequence *v, int32_t row,
				int32_t column)
{
	return -slope * fabs((double)row + v->k_len - v->q_len - column);
}

#endif
