/* SPDX-License-Identifier: MIT */
/* forward_case.c: see forward_case.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kernels/reference.h>
#include <kernels/view.h>

#include "forward_case.h"

uint64_t random_next(struct random *r)
{
	uint64_t z = r->state += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

int32_t random_int(struct random *r, int32_t lo, int32_t hi)
{
	return lo + (int32_t)(random_next(r) % (uint64_t)(hi - lo + 1));
}

int random_chance(struct random *r, int n)
{
	return random_next(r) % (uint64_t)n == 0;
}

int32_t random_kv_dtype(struct random *r)
{
	static const int32_t types[] = {ABI_E4M3, ABI_E5M2, ABI_E4M3, ABI_E5M2, ABI_I8, ABI_I8};

	return types[random_int(r, 0, 5)];
}

float random_uniform(struct random *r, float lo, float hi)
{
	return lo + (hi - lo) * (float)(random_next(r) >> 40) / 16777216.0f;
}

float random_normal(struct random *r)
{
	float sum = 0;

	for (int i = 0; i < 12; i++)
		sum += random_uniform(r, -0.5f, 0.5f);
	return sum;
}

void forward_options_random(struct forward_options *o, struct random *r, uint32_t family,
			    int32_t dtype)
{
	static const int page_sizes[] = {1, 2, 3, 8, 16, 32, 64, 100, 256};
	int fp8 = dtype == ABI_E4M3 || dtype == ABI_E5M2, narrow, x;

	*o = (struct forward_options){.family = family, .dtype = dtype};
	if ((dtype == ABI_F16 || dtype == ABI_BF16) && random_chance(r, 3))
		o->kv_dtype = random_kv_dtype(r);
	narrow = fp8 || o->kv_dtype;
	x = narrow ? 16 : dtype == ABI_F32 ? 4 : 8;
	o->o_dtype = fp8 ? random_int(r, ABI_F32, ABI_BF16) : dtype;
	o->batch = random_int(r, 1, 3);
	o->seqlen_q = random_chance(r, 3) ? random_int(r, 1, 8) : random_int(r, 1, 120);
	o->seqlen_k = random_chance(r, 8) ? random_int(r, 500, 1100) : random_int(r, 1, 200);
	o->nhead_k = random_int(r, 1, 2);
	o->group = random_chance(r, 2) ? 1 : random_int(r, 2, 5);
	o->hdim_q = 8 * random_int(r, 1, random_chance(r, 4) ? 32 : 16);
	if (random_chance(r, 3))
		o->hdim_q = random_int(r, 1, random_chance(r, 4) ? 512 : 130);
	o->hdim_v = random_chance(r, 2)   ? o->hdim_q
		    : random_chance(r, 3) ? random_int(r, 1, 130)
					  : 8 * random_int(r, 1, 16);
	o->varlen = family == ABI_BATCH_PREFILL || random_chance(r, 3);
	o->padded = random_chance(r, 3);
	o->layout = random_int(r, 0, 2);
	o->v_columns = random_chance(r, 5);
	o->mask = random_int(r, ABI_MASK_NONE, ABI_MASK_BOTTOM_RIGHT);
	o->window_left = random_chance(r, 2) ? -1 : random_int(r, 0, 60);
	o->window_right = random_chance(r, 2) ? 0 : random_int(r, -1, 40);
	o->sink_tokens = random_chance(r, 3) ? random_int(r, 0, 20) : 0;
	o->bias = random_chance(r, 4) ? random_int(r, 1, 2) : 0;
	o->alibi = random_chance(r, 5);
	o->sink = random_chance(r, 4);
	o->soft_cap = random_chance(r, 4) ? random_uniform(r, 1, 50) : 0;
	o->p_drop = random_chance(r, 4) ? random_uniform(r, 0.05f, 0.9f) : 0;
	o->store_bytes = random_chance(r, 2);
	o->min_seqlen_q = random_chance(r, 8) ? random_int(r, 1, 60) : 0;
	o->scale = random_chance(r, 8)   ? 0
		   : random_chance(r, 8) ? -0.2f
					 : 1.0f / sqrtf((float)o->hdim_q);
	if (family == ABI_FWD_SPLITKV) {
		o->n_splits = random_int(r, 1, 5);
		o->split_size = (o->seqlen_k + o->n_splits - 1) / o->n_splits;
	}
	if (family == ABI_FWD_PAGEDKV || family == ABI_BATCH_PREFILL ||
	    (family == ABI_FWD_SPLITKV && random_chance(r, 2))) {
		o->page_size = page_sizes[random_int(r, 0, 8)];
		o->indptr = random_chance(r, 2);
		o->vectorized = o->page_size % x == 0 && o->hdim_q % x == 0 && random_chance(r, 2);
	} else if (!o->varlen) {
		o->batch_index = random_chance(r, 4);
	}
	o->leftpad = random_chance(r, 5);
	if (narrow)
		o->descale = random_int(r, 0, o->page_size ? 6 : 4);
	if (random_chance(r, 3)) {
		o->mask_data = random_chance(r, 3) ? MASK_BITS : MASK_INTERVALS;
		o->n_endpoints = 1 + 2 * random_int(r, 0, random_chance(r, 4) ? 31 : 3);
	}
}

void forward_options_print(const struct forward_options *o)
{
	fprintf(stderr,
		"family %u dtype %d kv %d o_dtype %d batch %d sq %d sk %d hk %d group %d dq %d dv "
		"%d "
		"varlen %d padded %d layout %d v_columns %d mask %d window %d %d sinks %d bias %d "
		"alibi %d sink %d cap %g drop %g store %d splits %d of %d page %d indptr %d "
		"vectorized %d leftpad %d batch_index %d descale %d min_sq %d scale %g data %d of "
		"%d\n",
		o->family, o->dtype, o->kv_dtype, o->o_dtype, o->batch, o->seqlen_q, o->seqlen_k,
		o->nhead_k, o->group, o->hdim_q, o->hdim_v, o->varlen, o->padded, o->layout,
		o->v_columns, o->mask, o->window_left, o->window_right, o->sink_tokens, o->bias,
		o->alibi, o->sink, (double)o->soft_cap, (double)o->p_drop, o->store_bytes,
		o->n_splits, o->split_size, o->page_size, o->indptr, o->vectorized, o->leftpad,
		o->batch_index, o->descale, o->min_seqlen_q, (double)o->scale, (int)o->mask_data,
		o->n_endpoints);
}

static int element_bytes(int32_t dtype)
{
	return dtype == ABI_F32 || dtype == ABI_I32    ? 4
	       : dtype == ABI_F16 || dtype == ABI_BF16 ? 2
						       : 1;
}

/* All bits set: a NaN in every float type, and a number that no length or page has. */
static void *case_alloc(struct forward_case *c, size_t bytes)
{
	void *p = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);

	if (!p || c->n_allocations == CASE_MAX_ALLOCATIONS)
		abort();
	memset(p, 0xff, (bytes + 63) / 64 * 64 + 64);
	c->sizes[c->n_allocations] = bytes;
	c->allocations[c->n_allocations++] = p;
	return p;
}

/* A tensor (batch, seq, head, dim) in one of three orders. */
static size_t case_tensor(struct forward_case *c, struct abi_tensor *t, int32_t dtype,
			  int64_t batch, int64_t seq, int64_t heads, int64_t dims, int columns)
{
	int layout = c->options.layout;
	int64_t n;

	t->stride_dim = 1;
	if (columns) { /* (batch, head, dim, seq) */
		t->stride_seq = 1;
		t->stride_dim = seq;
		t->stride_head = dims * seq;
		t->stride_batch = heads * dims * seq;
	} else if (layout == 0) {
		t->stride_head = dims;
		t->stride_seq = heads * dims;
		t->stride_batch = seq * heads * dims;
	} else if (layout == 1) {
		t->stride_seq = dims;
		t->stride_head = seq * dims;
		t->stride_batch = seq * heads * dims;
	} else { /* (seq, batch, head, dim), every second element, gaps between heads */
		t->stride_dim = 2;
		t->stride_head = 2 * dims + 6;
		t->stride_batch = heads * t->stride_head;
		t->stride_seq = batch * t->stride_batch;
	}
	n = batch * seq * heads * dims * (layout == 2 ? 2 : 1) +
	    (layout == 2 ? batch * seq * heads * 6 : 0);
	t->data = case_alloc(c, (size_t)n * (size_t)element_bytes(dtype));
	for (int64_t i = 0; dtype == ABI_I8 && i < n; i++)
		((int8_t *)t->data)[i] = i & 1 ? 127 : -128;
	return (size_t)n * (size_t)element_bytes(dtype);
}

static int32_t *case_ints(struct forward_case *c, int64_t n)
{
	return case_alloc(c, (size_t)n * sizeof(int32_t));
}

static void make_lengths(struct forward_case *c, struct random *r)
{
	const struct forward_options *o = &c->options;
	struct abi_sequences *s = &c->args.sequences;
	int paged = o->page_size > 0;
	int32_t *q_len = case_ints(c, o->batch), *k_len = case_ints(c, o->batch);
	int32_t *q_start = case_ints(c, o->batch + 1), *k_start = case_ints(c, o->batch + 1);
	int32_t *leftpad = case_ints(c, o->batch);

	s->batch = o->batch;
	s->seqlen_q_max = o->seqlen_q;
	s->seqlen_k_max = o->seqlen_k;
	s->total_q = o->batch * o->seqlen_q;
	s->total_k = o->batch * o->seqlen_k;
	q_start[0] = k_start[0] = 0;
	for (int32_t b = 0; b < o->batch; b++) {
		q_len[b] = random_chance(r, 6) ? 0 : random_int(r, o->seqlen_q > 0, o->seqlen_q);
		k_len[b] = random_chance(r, 8) ? 0 : random_int(r, o->seqlen_k > 0, o->seqlen_k);
		leftpad[b] = random_int(r, 0, k_len[b]);
		q_start[b + 1] = q_start[b] + q_len[b];
		k_start[b + 1] = k_start[b] + k_len[b];
		if (o->padded) {
			int32_t q_room = o->seqlen_q - q_len[b], k_room = o->seqlen_k - k_len[b];

			q_start[b + 1] += random_int(r, 0, q_room < 9 ? q_room : 9);
			k_start[b + 1] += random_int(r, 0, k_room < 9 ? k_room : 9);
		}
	}
	if (o->varlen) {
		s->seqstart_q = q_start;
		s->total_q = q_start[o->batch];
		if (o->padded)
			s->seqlen_q = q_len;
		if (!paged) {
			s->seqstart_k = k_start;
			s->total_k = k_start[o->batch];
		}
	}
	if (o->padded || (paged && !o->indptr))
		s->seqlen_k = k_len;
	if (o->leftpad && (s->seqlen_k || o->varlen))
		s->leftpad_k = leftpad;
}

/* Pages in random order, with unused ones between them. */
static void make_pages(struct forward_case *c, struct random *r)
{
	const struct forward_options *o = &c->options;
	struct abi_kv_cache *cache = &c->args.cache;
	int32_t most = (o->seqlen_k + o->page_size - 1) / o->page_size, used = 0;
	int32_t *table = case_ints(c, (int64_t)o->batch * most), *order;
	int32_t *indptr = case_ints(c, o->batch + 1),
		*indices = case_ints(c, (int64_t)o->batch * most);
	int32_t *last = case_ints(c, o->batch);

	cache->page_size = o->page_size;
	cache->n_pages = o->batch * most + 3;
	cache->layout = o->vectorized ? ABI_KV_VECTORIZED : ABI_KV_LINEAR;
	order = case_ints(c, cache->n_pages);
	for (int32_t i = 0; i < cache->n_pages; i++)
		order[i] = i;
	for (int32_t i = cache->n_pages - 1; i > 0; i--) {
		int32_t k = random_int(r, 0, i), swap = order[i];

		order[i] = order[k];
		order[k] = swap;
	}
	indptr[0] = 0;
	for (int32_t b = 0; b < o->batch; b++) {
		int32_t n = c->args.sequences.seqlen_k ? c->args.sequences.seqlen_k[b]
						       : random_int(r, 0, o->seqlen_k);
		int32_t pages = (n + o->page_size - 1) / o->page_size;

		last[b] = pages ? n - (pages - 1) * o->page_size : 0;
		indptr[b + 1] = indptr[b] + pages;
		for (int32_t p = 0; p < pages; p++) {
			table[b * most + p] = order[used];
			indices[indptr[b] + p] = order[used++];
		}
	}
	if (o->indptr) {
		cache->kv_indptr = indptr;
		cache->kv_page_indices = indices;
		cache->kv_last_page_len = last;
	} else {
		cache->block_table = table;
		cache->block_table_stride = most;
	}
}

static void fill_queries(struct forward_case *c, struct random *r)
{
	const struct forward_options *o = &c->options;
	struct abi_fwd_args *a = &c->args;
	float magnitude = o->magnitude > 0 ? o->magnitude : 1;

	for (int32_t b = 0; b < o->batch; b++) {
		struct view_sequence s = view_sequence(&a->sequences, &a->cache, b);

		for (int32_t i = 0; i < s.q_len; i++)
			for (int32_t h = 0; h < a->nhead_q; h++)
				for (int32_t d = 0; d < a->hdim_q; d++)
					reference_store(a->q.data, (uint32_t)a->dtype,
							view_q_offset(&a->q, &s, i, h) +
								d * a->q.stride_dim,
							(double)(random_normal(r) * magnitude));
	}
}

/* Of i8 with factors, which bring it back: all of its range. */
#define I8_SPREAD 32

static int spreads(const struct forward_options *o)
{
	return o->kv_dtype == ABI_I8 && o->descale;
}

static void put_key_number(const struct forward_options *o, struct random *r,
			   const struct abi_tensor *t, int64_t at, double magnitude)
{
	uint32_t dtype = (uint32_t)(o->kv_dtype ? o->kv_dtype : o->dtype);
	double x = (double)(o->one_sign ? random_uniform(r, 0.5f, 1) : random_normal(r));

	reference_store(t->data, dtype, at, x * magnitude * (spreads(o) ? I8_SPREAD : 1));
	/* What others make, though no append does. */
	if (spreads(o) && !o->one_sign && random_chance(r, 50))
		((int8_t *)t->data)[at] = INT8_MIN;
}

static void fill_keys(struct forward_case *c, struct random *r)
{
	const struct forward_options *o = &c->options;
	struct abi_fwd_args *a = &c->args;
	int32_t x = 16 / element_bytes(view_kv_dtype(a));
	double magnitude = o->magnitude > 0 ? (double)o->magnitude : 1;

	for (int32_t b = 0; b < o->batch; b++) {
		struct view_sequence s = view_sequence(&a->sequences, &a->cache, b);

		for (int32_t p = s.leftpad; p < s.leftpad + s.k_len; p++)
			for (int32_t h = 0; h < a->nhead_k; h++) {
				for (int32_t d = 0; d < a->hdim_q; d++)
					put_key_number(o, r, &a->k,
						       view_cache_offset(&a->cache, &a->k, &s, p, h,
									 d, a->nhead_k, a->hdim_q,
									 x, false),
						       magnitude);
				for (int32_t d = 0; d < a->hdim_v; d++)
					put_key_number(o, r, &a->v,
						       view_cache_offset(&a->cache, &a->v, &s, p, h,
									 d, a->nhead_k, a->hdim_v,
									 x, true),
						       1);
			}
	}
}

static void make_keys(struct forward_case *c, struct random *r)
{
	const struct forward_options *o = &c->options;
	struct abi_fwd_args *a = &c->args;
	int64_t batch = o->varlen ? 1 : o->batch,
		seq = o->varlen ? a->sequences.total_k : o->seqlen_k;
	int32_t *rows;

	if (o->page_size) {
		batch = a->cache.n_pages;
		seq = o->page_size;
	} else if (o->batch_index) {
		batch = o->batch + 2;
		rows = case_ints(c, o->batch);
		for (int32_t b = 0; b < o->batch; b++)
			rows[b] = (b * 2 + 1) % (int32_t)batch;
		a->cache.cache_batch_idx = rows;
	}
	if (o->vectorized) { /* packed: any order of the same size will do */
		c->options.layout = 0;
		c->options.v_columns = 0;
	}
	case_tensor(c, &a->k, view_kv_dtype(a), batch, seq, o->nhead_k, o->hdim_q, 0);
	case_tensor(c, &a->v, view_kv_dtype(a), batch, seq, o->nhead_k, o->hdim_v,
		    c->options.v_columns);
	c->options.layout = o->layout;
	fill_keys(c, r);
}

/* Broadcasts some of the axes by a stride of 0. */
static void make_bias(struct forward_case *c, struct random *r)
{
	const struct forward_options *o = &c->options;
	struct abi_fwd_args *a = &c->args;
	int64_t batch = o->varlen ? 1 : o->batch;
	int64_t rows = o->varlen ? a->sequences.total_q : o->seqlen_q, heads = a->nhead_q;
	int broadcast = random_int(r, 0, 7);
	int64_t n;

	batch = broadcast & 1 ? 1 : batch;
	heads = broadcast & 2 ? 1 : heads;
	rows = broadcast & 4 ? 1 : rows;
	a->bias_dtype = o->bias == 1 || element_bytes(o->dtype) == 1 ? ABI_F32 : o->dtype;
	n = batch * heads * rows * o->seqlen_k;
	a->bias.data = case_alloc(c, (size_t)n * 4);
	a->bias.stride_dim = 1;
	a->bias.stride_seq = broadcast & 4 ? 0 : o->seqlen_k;
	a->bias.stride_head = broadcast & 2 ? 0 : rows * o->seqlen_k;
	a->bias.stride_batch = broadcast & 1 ? 0 : heads * rows * o->seqlen_k;
	for (int64_t i = 0; i < n; i++)
		reference_store(a->bias.data, (uint32_t)a->bias_dtype, i,
				random_chance(r, 20) ? -INFINITY : (double)random_normal(r));
}

static void make_descale(struct forward_case *c, struct abi_descale *d, int64_t batch,
			 int64_t heads, int64_t n, struct random *r)
{
	/* Of 3 blocks of 32, of 4 and 6 single keys, of 5 and 6 pages. */
	int kind = c->options.descale, block = kind == 3 ? 32 : kind == 4 || kind == 6 ? 1 : 0;
	int64_t blocks = block ? (n + block - 1) / block : 1;
	float *data = case_alloc(c, (size_t)(batch * heads * blocks) * sizeof(*data));

	for (int64_t i = 0; i < batch * heads * blocks; i++)
		data[i] = (c->options.powers ? ldexpf(1, random_int(r, -4, 3))
					     : random_uniform(r, 0.3f, 1.5f)) /
			  (spreads(&c->options) ? I8_SPREAD : 1);
	d->data = data;
	if (kind >= 2) {
		d->stride_head = blocks;
		d->stride_batch = heads * blocks;
		d->stride_block = 1;
		d->block = block;
		d->per_page = kind >= 5;
	}
}

static void make_options(struct forward_case *c, struct random *r)
{
	const struct forward_options *o = &c->options;
	struct abi_fwd_args *a = &c->args;
	int64_t batch = o->varlen ? 1 : o->batch, kv_batch = o->batch;
	int64_t rows = o->varlen ? a->sequences.total_q : o->seqlen_q;
	float *p;

	if (o->bias)
		make_bias(c, r);
	if (o->alibi) {
		p = case_alloc(c, (size_t)(o->batch * a->nhead_q) * sizeof(*p));
		for (int32_t i = 0; i < o->batch * a->nhead_q; i++)
			p[i] = random_uniform(r, 0, 0.2f);
		a->alibi_slopes = p;
		a->alibi_stride_batch = random_chance(r, 2) ? a->nhead_q : 0;
	}
	if (o->sink) {
		p = case_alloc(c, (size_t)a->nhead_q * sizeof(*p));
		for (int32_t i = 0; i < a->nhead_q; i++)
			p[i] = random_uniform(r, -3, 3);
		a->sink = p;
	}
	if (o->descale) {
		bool pages = o->descale >= 5;
		int64_t keys = pages ? o->page_size : o->seqlen_k;

		if (!o->kv_dtype)
			make_descale(c, &a->q_descale, o->batch, a->nhead_q, o->seqlen_q, r);
		a->q_descale.per_page = 0;
		if (pages)
			kv_batch = a->cache.n_pages;
		make_descale(c, &a->k_descale, kv_batch, a->nhead_k, keys, r);
		make_descale(c, &a->v_descale, kv_batch, a->nhead_k, keys, r);
	}
	if (o->p_drop > 0) {
		a->dropout.seed = random_next(r);
		a->dropout.offset = random_next(r);
		a->dropout.p_drop = o->p_drop;
		a->dropout.p_keep_inverse = 1 / (1 - o->p_drop);
		a->dropout.keep_at_most = (int32_t)floorf(255 * (1 - o->p_drop));
		if (o->store_bytes)
			c->randval_bytes = case_tensor(c, &a->dropout.randval, ABI_U8, batch, rows,
						       a->nhead_q, o->seqlen_k, 0);
	}
}

void forward_case_init(struct forward_case *c, const struct forward_options *o, struct random *r)
{
	struct abi_fwd_args *a = &c->args;
	int64_t batch = o->varlen ? 1 : o->batch, rows;
	float *p;

	*c = (struct forward_case){.options = *o};
	a->nhead_k = o->nhead_k;
	a->nhead_q = o->nhead_k * o->group;
	a->hdim_q = o->hdim_q;
	a->hdim_v = o->hdim_v;
	a->dtype = o->dtype;
	a->o_dtype = o->o_dtype;
	a->kv_dtype = o->kv_dtype;
	a->scale = o->scale;
	a->logits_soft_cap = o->soft_cap;
	a->min_seqlen_q = o->min_seqlen_q;
	a->band = (struct abi_band){o->mask, o->window_left, o->window_right, o->sink_tokens};
	make_lengths(c, r);
	if (o->page_size)
		make_pages(c, r);
	rows = o->varlen ? a->sequences.total_q : o->seqlen_q;
	case_tensor(c, &a->q, o->dtype, batch, rows, a->nhead_q, o->hdim_q, 0);
	fill_queries(c, r);
	make_keys(c, r);
	c->o_bytes = case_tensor(c, &a->o, o->o_dtype, batch, rows, a->nhead_q, o->hdim_v, 0);
	make_options(c, r);
	c->mask_shape = (struct mask_shape){o->mask_data, o->n_endpoints, batch,
					    a->nhead_q,   rows,           o->seqlen_k};
	mask_case_make(&a->mask_data, &c->mask_shape, random_next(r));
	c->lse_bytes = (size_t)(batch * rows * a->nhead_q) * sizeof(float);
	a->lse.data = case_alloc(c, c->lse_bytes);
	a->lse.stride_seq = 1;
	a->lse.stride_head = rows;
	a->lse.stride_batch = rows * a->nhead_q;
	if (o->n_splits) {
		a->n_splits = o->n_splits;
		a->split_size = o->split_size;
		c->o_acc_bytes = (size_t)o->n_splits * (size_t)a->nhead_q *
				 (size_t)a->sequences.total_q * (size_t)o->hdim_v * sizeof(*p);
		a->o_acc = case_alloc(c, c->o_acc_bytes);
		a->lse_acc = case_alloc(c, (size_t)o->n_splits * (size_t)a->nhead_q *
						   (size_t)a->sequences.total_q * 4);
	}
}

void kernel_run(const struct cpu_kernel *kernel, const void *args, int n_threads)
{
	size_t workspace_bytes = kernel->workspace_bytes(args, n_threads);
	size_t scratch_bytes = kernel->scratch_bytes(args);
	void *workspace = aligned_alloc(64, (workspace_bytes + 63) / 64 * 64 + 64);
	void *scratch = aligned_alloc(64, (scratch_bytes + 63) / 64 * 64 + 64);

	if (!workspace || !scratch)
		abort();
	memset(workspace, 0xff, workspace_bytes);
	for (int phase = 0; phase < kernel->n_phases; phase++) {
		int64_t n = kernel->n_tasks(args, phase, n_threads);

		for (int64_t task = 0; task < n; task++) {
			if (task < 4)
				memset(scratch, 0xff, scratch_bytes);
			kernel->run(args, phase, task, n_threads, workspace, scratch);
		}
	}
	free(workspace);
	free(scratch);
}

/* O and LSE of the splits, put together in double. */
static void combine(const struct abi_fwd_args *a, int32_t h, int64_t row, double *o, double *lse)
{
	double max = -INFINITY, sum = 0;
	int64_t at;

	for (int32_t d = 0; d < a->hdim_v; d++)
		o[d] = 0;
	for (int32_t k = 0; k < a->n_splits; k++) {
		at = ((int64_t)k * a->nhead_q + h) * a->sequences.total_q + row;
		max = fmax(max, (double)a->lse_acc[at]);
	}
	if (a->sink)
		max = fmax(max, (double)a->sink[h]);
	if (max == -INFINITY)
		max = 0;
	for (int32_t k = 0; k < a->n_splits; k++) {
		double weight;

		at = ((int64_t)k * a->nhead_q + h) * a->sequences.total_q + row;
		weight = exp((double)a->lse_acc[at] - max);
		sum += weight;
		for (int32_t d = 0; d < a->hdim_v; d++)
			o[d] += weight * (double)a->o_acc[at * a->hdim_v + d];
	}
	if (a->sink)
		sum += exp((double)a->sink[h] - max);
	for (int32_t d = 0; d < a->hdim_v; d++)
		o[d] = sum == 0 ? 0 : o[d] / sum;
	*lse = sum == 0 ? -INFINITY : max + log(sum);
}

/* What the reference says about a case, and what has been found about a kernel. */
struct judgement {
	double *o, *lse, *rounded_o, *rounded_lse;
	uint8_t *bytes;
	double worst, bar, worst_lse;
};

static void judgement_free(struct judgement *j)
{
	if (!j)
		return;
	free(j->o);
	free(j->lse);
	free(j->rounded_o);
	free(j->rounded_lse);
	free(j->bytes);
	free(j);
}

/* Asks the reference: once a case, as it takes far longer than any kernel. */
static struct judgement *judgement_new(const struct abi_fwd_args *a)
{
	size_t rows = (size_t)a->sequences.total_q * (size_t)a->nhead_q + 1;
	struct judgement *j = calloc(1, sizeof(*j));

	if (!j)
		abort();
	j->o = calloc(rows * (size_t)a->hdim_v, sizeof(double));
	j->lse = calloc(rows, sizeof(double));
	j->rounded_o = calloc(rows * (size_t)a->hdim_v, sizeof(double));
	j->rounded_lse = calloc(rows, sizeof(double));
	j->bytes = calloc(rows, (size_t)a->sequences.seqlen_k_max + 1);
	if (!j->o || !j->lse || !j->rounded_o || !j->rounded_lse || !j->bytes ||
	    reference_forward(a, j->o, j->lse, j->bytes) < 0 ||
	    reference_forward_rounded(a, (uint32_t)a->o_dtype, (uint32_t)a->o_dtype, j->rounded_o,
				      j->rounded_lse) < 0)
		abort();
	return j;
}

void forward_case_deinit(struct forward_case *c)
{
	judgement_free(c->judgement);
	mask_case_free(&c->args.mask_data);
	for (int i = 0; i < c->n_allocations; i++)
		free(c->allocations[i]);
}

static double difference(double x, double y)
{
	if (isnan(x) && isnan(y))
		return 0;
	if (x == y)
		return 0;
	return isfinite(x) && isfinite(y) ? fabs(x - y) : INFINITY;
}

static int check_row(const struct forward_case *c, struct judgement *j,
		     const struct view_sequence *s, int32_t h, int32_t i, double *o)
{
	const struct abi_fwd_args *a = &c->args;
	int64_t row = s->packed_q ? s->q_start + i
				  : (int64_t)s->batch * a->sequences.seqlen_q_max + i;
	int64_t stat = s->packed_q
			       ? (int64_t)h * a->sequences.total_q + row
			       : ((int64_t)s->batch * a->nhead_q + h) * a->sequences.seqlen_q_max +
					 i;
	const double *want = j->o + (row * a->nhead_q + h) * a->hdim_v;
	const double *rounded = j->rounded_o + (row * a->nhead_q + h) * a->hdim_v;
	double lse;

	if (a->n_splits) {
		combine(a, h, row, o, &lse);
	} else {
		lse = (double)a->lse.data[view_rows_offset(&a->lse, s, i, h)];
		for (int32_t d = 0; d < a->hdim_v; d++)
			o[d] = reference_load(a->o.data, (uint32_t)a->o_dtype,
					      view_q_offset(&a->o, s, i, h) + d * a->o.stride_dim);
	}
	for (int32_t d = 0; d < a->hdim_v; d++) {
		j->worst = fmax(j->worst, difference(o[d], want[d]));
		if (isfinite(want[d]) && isfinite(rounded[d]))
			j->bar = fmax(j->bar, 2 * fabs(want[d] - rounded[d]));
	}
	j->worst_lse = fmax(j->worst_lse,
			    difference(lse, j->lse[stat]) /
				    (1 + (isfinite(j->lse[stat]) ? fabs(j->lse[stat]) : 0)));
	if (a->dropout.randval.data && a->n_splits == 0)
		for (int32_t k = 0; k < s->k_len; k++) {
			uint8_t got = ((uint8_t *)a->dropout.randval
					       .data)[view_q_offset(&a->dropout.randval, s, i, h) +
						      k * a->dropout.randval.stride_dim];

			if (got != j->bytes[stat * a->sequences.seqlen_k_max + k]) {
				fprintf(stderr,
					"dropout byte of batch %d head %d row %d column %d\n",
					s->batch, h, i, k);
				return -1;
			}
		}
	return 0;
}

/* Overwrites O's and LSE's rows that belong to a sequence with ones: what is left must be as it
 * was. */
static int check_untouched(struct forward_case *c)
{
	struct abi_fwd_args *a = &c->args;

	for (int32_t b = 0; b < a->sequences.batch; b++) {
		struct view_sequence s = view_sequence(&a->sequences, &a->cache, b);

		for (int32_t i = 0; i < s.q_len && s.q_len >= a->min_seqlen_q; i++)
			for (int32_t h = 0; h < a->nhead_q; h++) {
				memset(&a->lse.data[view_rows_offset(&a->lse, &s, i, h)], 0xff, 4);
				for (int32_t d = 0; d < a->hdim_v; d++)
					memset((char *)a->o.data +
						       (view_q_offset(&a->o, &s, i, h) +
							d * a->o.stride_dim) *
							       element_bytes(a->o_dtype),
					       0xff, (size_t)element_bytes(a->o_dtype));
			}
	}
	for (size_t i = 0; i < c->o_bytes; i++)
		if (((uint8_t *)a->o.data)[i] != 0xff) {
			fprintf(stderr, "O changed outside its rows, byte %zu\n", i);
			return -1;
		}
	for (size_t i = 0; i < c->lse_bytes; i++)
		if (((uint8_t *)a->lse.data)[i] != 0xff) {
			fprintf(stderr, "LSE changed outside its rows, byte %zu\n", i);
			return -1;
		}
	return 0;
}

static int judge(struct forward_case *c, struct judgement *j, const struct cpu_kernel *kernel,
		 float tolerance)
{
	const struct abi_fwd_args *a = &c->args;
	double o[512], largest = 0, bar, lse_bar;

	j->worst = j->worst_lse = j->bar = 0;
	for (int32_t b = 0; b < a->sequences.batch; b++) {
		struct view_sequence s = view_sequence(&a->sequences, &a->cache, b);

		for (int32_t i = 0; i < s.q_len && s.q_len >= a->min_seqlen_q; i++)
			for (int32_t h = 0; h < a->nhead_q; h++) {
				if (check_row(c, j, &s, h, i, o) < 0)
					return -1;
				for (int32_t d = 0; d < a->hdim_v; d++)
					if (isfinite(o[d]))
						largest = fmax(largest, fabs(o[d]));
			}
	}
	/* DESIGN section 7: f32 within 1e-5 relative; else twice the error of the formula in the
	 * type. */
	bar = a->o_dtype == ABI_F32 ? 1e-5 * fmax(largest, 0.1) : j->bar + 1e-5;
	lse_bar = 1e-5;
	if (j->worst <= bar * (double)tolerance && j->worst_lse <= lse_bar * (double)tolerance)
		return check_untouched(c);
	fprintf(stderr, "%s %s: O differs by %g (bar %g), LSE by %g (bar %g)\n",
		cpu_level_name(kernel->level), kernel->pipeline, j->worst, bar, j->worst_lse,
		lse_bar);
	return -1;
}

static void poison_and_run(struct forward_case *c, const struct cpu_kernel *kernel)
{
	const struct abi_fwd_args *a = &c->args;

	memset(a->o.data, 0xff, c->o_bytes);
	memset(a->lse.data, 0xff, c->lse_bytes);
	if (a->dropout.randval.data)
		memset(a->dropout.randval.data, 0xff, c->randval_bytes);
	if (a->n_splits)
		memset(a->o_acc, 0xff, c->o_acc_bytes);
	kernel_run(kernel, a, 2);
}

int forward_case_check_untouched(struct forward_case *c, const struct cpu_kernel *kernel)
{
	poison_and_run(c, kernel);
	return check_untouched(c);
}

int forward_case_check(struct forward_case *c, const struct cpu_kernel *kernel, float tolerance)
{
	if (!c->judgement)
		c->judgement = judgement_new(&c->args);
	poison_and_run(c, kernel);
	return judge(c, c->judgement, kernel, tolerance);
}
