/* SPDX-License-Identifier: MIT */
/*
 * Random problems, all the way: problem -> plan_build -> plan_bind -> CPU kernels -> comparison with an
 * oracle that reads the problem itself. Every byte that no tensor element owns is poisoned with NaN,
 * buffers are exactly as large as the views, and what a run should not write must still be poison
 * afterwards. `test_dispatch_random SEED [N]` repeats a case.
 */
#include "oracle.h"

#include <math.h>
#include <stdio.h>

#include <cpu.h>
#include <reference.h>

#define DEFAULT_CASES 400

struct runner {
	struct fixture f;
	unsigned seed;
	int n_threads;
	enum cpu_level level;
	struct fmha_problem asked; /* as a client would send it */
	uint8_t *before[FMHA_N_TENSORS]; /* the written tensors' bytes, before the run */
};

static int pick(struct runner *r, int n)
{
	return n > 0 ? rand_r(&r->seed) % n : 0;
}

static bool chance(struct runner *r, int percent)
{
	return pick(r, 100) < percent;
}

static double normal(struct runner *r)
{
	double sum = 0;

	for (int i = 0; i < 4; i++)
		sum += rand_r(&r->seed) / (double)RAND_MAX - 0.5;
	return sum * 1.7;
}

/* ---- a random problem ---- */

static void add(struct runner *r, enum fmha_tensor_role role, uint32_t dtype)
{
	fixture_add(&r->f, role, dtype);
}

/* Random strides: axes in a random order, with gaps. The last axis stays innermost and dense, but
 * for V, whose columns may be dense instead. */
static void random_strides(struct runner *r, enum fmha_tensor_role role)
{
	struct fmha_tensor *t = &r->f.problem.tensor[role];
	int n = proto_roles[role].n_dims, order[5] = {0, 1, 2, 3, 4};
	int64_t dims[5], stride = 1;

	if (chance(r, 40))
		return; /* packed */
	problem_extents(&r->f.problem, role, dims);
	for (int i = n - 2; i > 0; i--) {
		int j = pick(r, i + 1), swap = order[i];

		order[i] = order[j];
		order[j] = swap;
	}
	if (role == FMHA_T_V && r->f.problem.page_size == 0 && chance(r, 10)) {
		int swap = order[n - 1];

		order[n - 1] = order[n - 2];
		order[n - 2] = swap;
	}
	for (int i = n - 1; i >= 0; i--) {
		t->stride[order[i]] = stride;
		stride *= dims[order[i]] > 0 ? dims[order[i]] : 1;
		if (i < n - 1 || n == 1)
			stride += pick(r, 3) * 8;
		else
			stride = (stride + 7) / 8 * 8 + pick(r, 2) * 8;
	}
}

static void random_mask(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;

	p->mask = (uint32_t)pick(r, 3);
	if (p->mask == FMHA_MASK_NONE)
		return;
	p->window_right = chance(r, 60) ? 0 : pick(r, 8) - 1;
	p->window_left = chance(r, 50) ? -1 : pick(r, 12);
	if (p->op == FMHA_FORWARD || p->op == FMHA_BACKWARD)
		p->sink_tokens = chance(r, 30) ? pick(r, 5) : 0;
}

static void random_sizes(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;

	p->batch = 1 + pick(r, 3);
	p->nhead_k = 1 + pick(r, 3);
	p->nhead_q = p->nhead_k * (1 + pick(r, 3));
	p->hdim_q = 16 * (1 + pick(r, 6));
	p->hdim_v = 16 * (1 + pick(r, 6));
	if (chance(r, 20) && p->page_size == 0) {
		p->hdim_q = 8 * (1 + pick(r, 12));
		p->hdim_v = 8 * (1 + pick(r, 12));
	}
	p->seqlen_q = chance(r, 30) ? 1 : pick(r, 40);
	p->seqlen_k = chance(r, 10) ? 0 : pick(r, 90);
}

static void random_options(struct runner *r, uint32_t dtype)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t wide = dtype >= FMHA_E4M3 ? FMHA_F32 : dtype;

	random_mask(r);
	if (chance(r, 20))
		p->scale = (float)normal(r);
	if (chance(r, 20))
		p->logits_soft_cap = 2.0F + (float)pick(r, 5);
	if (chance(r, 25)) {
		p->dropout_p = 0.1F * (float)(1 + pick(r, 8));
		p->dropout_seed = (uint64_t)rand_r(&r->seed) << 20;
		p->dropout_offset = (uint64_t)pick(r, 1000);
	}
	if (chance(r, 20))
		add(r, FMHA_T_ALIBI_SLOPES, FMHA_F32);
	else if (chance(r, 25))
		add(r, FMHA_T_BIAS, chance(r, 50) ? FMHA_F32 : wide);
	if (chance(r, 20))
		add(r, FMHA_T_SINK, FMHA_F32);
}

static void random_cache(struct runner *r)
{
	static const int page_sizes[] = {1, 2, 5, 16, 32};
	struct fmha_problem *p = &r->f.problem;
	int kind = pick(r, 5);

	if (kind < 2) { /* pages */
		p->page_size = page_sizes[pick(r, 5)];
		if (p->page_size >= 16 && chance(r, 50)) {
			p->kv_layout = FMHA_KV_VECTORIZED;
			p->hdim_q = (p->hdim_q + 15) / 16 * 16;
			p->hdim_v = (p->hdim_v + 15) / 16 * 16;
		}
		p->n_pages = p->batch * (p->seqlen_k / p->page_size + 2);
		if (kind == 0) {
			p->max_blocks = (p->seqlen_k + p->page_size - 1) / p->page_size + pick(r, 2);
			add(r, FMHA_T_BLOCK_TABLE, FMHA_I32);
			add(r, FMHA_T_SEQLEN_K, FMHA_I32);
		} else {
			p->n_page_indices = p->n_pages;
			add(r, FMHA_T_KV_INDPTR, FMHA_I32);
			add(r, FMHA_T_KV_PAGE_INDICES, FMHA_I32);
			add(r, FMHA_T_KV_LAST_PAGE_LEN, FMHA_I32);
		}
	} else if (kind == 2) {
		p->cache_batch = p->batch + pick(r, 3);
		add(r, FMHA_T_CACHE_BATCH_IDX, FMHA_I32);
		add(r, FMHA_T_SEQLEN_K, FMHA_I32);
	}
}

static bool packed_keys(const struct fmha_problem *p)
{
	return p->mode == FMHA_GROUP && p->page_size == 0 && !p->cache_batch_idx.buffer;
}

static void random_append(struct runner *r, uint32_t dtype)
{
	struct fmha_problem *p = &r->f.problem;

	if (p->seqlen_k < 2 || packed_keys(p))
		return;
	p->seqlen_new = 1 + pick(r, p->seqlen_k < 4 ? p->seqlen_k : 4);
	add(r, FMHA_T_K_NEW, dtype);
	add(r, FMHA_T_V_NEW, dtype);
	if (chance(r, 50))
		return;
	p->rope = 1 + (uint32_t)pick(r, 2);
	p->rotary_dim = 16 * (1 + pick(r, p->hdim_q / 16));
	if (p->rotary_dim > p->hdim_q)
		p->rope = FMHA_ROPE_NONE, p->rotary_dim = 0;
	if (p->rope == FMHA_ROPE_NONE)
		return;
	p->rotary_max_pos = p->seqlen_k + p->seqlen_q;
	add(r, FMHA_T_ROTARY_COS, chance(r, 50) ? FMHA_F32 : dtype);
	add(r, FMHA_T_ROTARY_SIN, p->rotary_cos.dtype);
}

static void random_group(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;

	if (p->mode != FMHA_GROUP)
		return;
	p->total_q = p->batch * (p->seqlen_q + pick(r, 4)) + pick(r, 4);
	add(r, FMHA_T_SEQSTART_Q, FMHA_I32);
	if (packed_keys(p)) {
		p->total_k = p->batch * (p->seqlen_k + pick(r, 4)) + pick(r, 4);
		add(r, FMHA_T_SEQSTART_K, FMHA_I32);
	}
}

static void random_descales(struct runner *r, uint32_t dtype)
{
	struct fmha_problem *p = &r->f.problem;

	if (dtype < FMHA_E4M3 || chance(r, 30))
		return;
	add(r, FMHA_T_Q_DESCALE, FMHA_F32);
	add(r, FMHA_T_K_DESCALE, FMHA_F32);
	add(r, FMHA_T_V_DESCALE, FMHA_F32);
	if (chance(r, 40))
		p->descale_block_q = 1 + pick(r, 16);
	if (p->page_size > 0 && chance(r, 40))
		p->descale_per_page = 1;
	else if (chance(r, 40))
		p->descale_block_k = 1 + pick(r, 32);
}

static void random_forward(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t dtype = (uint32_t)pick(r, 5);

	p->mode = (uint32_t)pick(r, 2);
	random_sizes(r);
	random_cache(r);
	random_options(r, dtype);
	add(r, FMHA_T_Q, dtype);
	add(r, FMHA_T_K, dtype);
	add(r, FMHA_T_V, dtype);
	add(r, FMHA_T_O, dtype >= FMHA_E4M3 ? (uint32_t)pick(r, 3) : dtype);
	if (chance(r, 60))
		add(r, FMHA_T_LSE, FMHA_F32);
	if (p->dropout_p > 0 && chance(r, 50))
		add(r, FMHA_T_RANDVAL, FMHA_U8);
	if (chance(r, 25) && dtype < FMHA_E4M3)
		random_append(r, dtype);
	random_group(r);
	if (!p->seqlen_new && chance(r, 15))
		add(r, FMHA_T_LEFTPAD_K, FMHA_I32);
	if (chance(r, 20) && !p->seqlen_k_per_batch.buffer && !p->kv_indptr.buffer)
		add(r, FMHA_T_SEQLEN_K, FMHA_I32);
	if (chance(r, 20))
		add(r, FMHA_T_SEQLEN_Q, FMHA_I32);
	if (p->mode == FMHA_GROUP && chance(r, 15))
		p->min_seqlen_q = pick(r, 20);
	random_descales(r, dtype);
	if (chance(r, 30))
		p->n_splits = pick(r, 6);
	else if (chance(r, 15))
		p->split_size = 1 + pick(r, 50);
}

static void random_backward(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t dtype = (uint32_t)pick(r, 3);

	p->mode = (uint32_t)pick(r, 2);
	random_sizes(r);
	random_options(r, dtype);
	add(r, FMHA_T_Q, dtype);
	add(r, FMHA_T_K, dtype);
	add(r, FMHA_T_V, dtype);
	add(r, FMHA_T_O, dtype);
	add(r, FMHA_T_LSE, FMHA_F32);
	add(r, FMHA_T_DO, dtype);
	add(r, FMHA_T_DQ, dtype);
	add(r, FMHA_T_DK, dtype);
	add(r, FMHA_T_DV, dtype);
	if (p->bias.buffer && chance(r, 60))
		add(r, FMHA_T_DBIAS, p->bias.dtype);
	if (p->sink.buffer && chance(r, 60))
		add(r, FMHA_T_DSINK, FMHA_F32);
	p->deterministic = (uint32_t)pick(r, 2);
	random_group(r);
	if (chance(r, 20))
		add(r, FMHA_T_SEQLEN_K, FMHA_I32);
	if (chance(r, 20))
		add(r, FMHA_T_SEQLEN_Q, FMHA_I32);
}

static void random_append_only(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t dtype = (uint32_t)pick(r, 3);

	random_sizes(r);
	p->seqlen_k += 2;
	random_cache(r);
	add(r, FMHA_T_K, dtype);
	add(r, FMHA_T_V, dtype);
	random_append(r, dtype);
	if (p->rope != FMHA_ROPE_NONE && chance(r, 50)) {
		random_mask(r);
		add(r, FMHA_T_Q, dtype);
		add(r, FMHA_T_Q_ROTATED, dtype);
	}
}

static void random_merge(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t dtype = (uint32_t)pick(r, 3);

	p->mode = (uint32_t)pick(r, 2);
	random_sizes(r);
	p->seqlen_k = 0;
	p->n_parts = 1 + pick(r, 5);
	add(r, FMHA_T_O_PARTS, dtype);
	add(r, FMHA_T_LSE_PARTS, FMHA_F32);
	add(r, FMHA_T_O, dtype == FMHA_F32 ? (uint32_t)pick(r, 3) : dtype);
	if (chance(r, 60))
		add(r, FMHA_T_LSE, FMHA_F32);
	if (p->mode == FMHA_GROUP) {
		p->total_q = p->batch * (p->seqlen_q + 1);
		add(r, FMHA_T_SEQSTART_Q, FMHA_I32);
	}
}

static void random_problem(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;

	switch (p->op) {
	case FMHA_FORWARD:
		random_forward(r);
		break;
	case FMHA_BACKWARD:
		random_backward(r);
		break;
	case FMHA_APPEND_KV:
		random_append_only(r);
		break;
	default:
		random_merge(r);
	}
	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		enum fmha_tensor_role role = (enum fmha_tensor_role)i;

		if (!fmha_tensor_present(&p->tensor[i]) || proto_roles[i].n_dims < 2 ||
		    role == FMHA_T_DBIAS || role == FMHA_T_ALIBI_SLOPES ||
		    (p->kv_layout == FMHA_KV_VECTORIZED && (role == FMHA_T_K || role == FMHA_T_V)))
			continue;
		random_strides(r, role);
		/* Bias broadcasts some of its first axes. */
		for (int d = 0; role == FMHA_T_BIAS && d < 3; d++)
			if (p->bias.stride[3] != 0 && chance(r, 40))
				p->bias.stride[d] = 0;
	}
}

/* ---- its data ---- */

static int32_t *ints(struct runner *r, enum fmha_tensor_role role)
{
	return r->f.bindings[role].host;
}

static void put_int(struct runner *r, enum fmha_tensor_role role, int64_t i, int64_t j, int value)
{
	const int64_t *stride = r->f.plan.problem.tensor[role].stride;

	if (r->f.problem.tensor[role].buffer)
		ints(r, role)[i * stride[0] + j * stride[1]] = value;
}

static void random_prefix(struct runner *r, enum fmha_tensor_role role, int longest, int total)
{
	int at = 0;

	put_int(r, role, 0, 0, 0);
	for (int b = 0; b < r->f.problem.batch; b++) {
		int length = b == 0 ? longest : pick(r, longest + 1);

		at += length;
		put_int(r, role, b + 1, 0, at);
	}
	assert_true(at <= total);
}

/* Distinct pages and cache rows in a random order. */
static void random_tables(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	int n = p->page_size ? p->n_pages : p->cache_batch, at = 0;
	int *order = calloc((size_t)n + 1, sizeof(int));

	for (int i = 0; i < n; i++)
		order[i] = i;
	for (int i = n - 1; i > 0; i--) {
		int j = pick(r, i + 1), swap = order[i];

		order[i] = order[j];
		order[j] = swap;
	}
	put_int(r, FMHA_T_KV_INDPTR, 0, 0, 0);
	for (int b = 0; b < p->batch; b++) {
		int most = p->seqlen_k - p->seqlen_new;
		int keys = b == 0 ? most : pick(r, most + 1);
		int total = keys + p->seqlen_new;
		int pages = p->page_size ? (total + p->page_size - 1) / p->page_size : 0;

		put_int(r, FMHA_T_SEQLEN_K, b, 0, keys);
		if (p->cache_batch_idx.buffer)
			put_int(r, FMHA_T_CACHE_BATCH_IDX, b, 0, order[at++]);
		for (int i = 0; i < pages; i++) {
			put_int(r, FMHA_T_KV_PAGE_INDICES, at, 0, order[at]);
			put_int(r, FMHA_T_BLOCK_TABLE, b, i, order[at]);
			at++;
		}
		put_int(r, FMHA_T_KV_INDPTR, b + 1, 0, at);
		put_int(r, FMHA_T_KV_LAST_PAGE_LEN, b, 0,
			total == 0 ? 1 : (total - 1) % (p->page_size ? p->page_size : 1) + 1);
	}
	free(order);
}

static void fill_ints(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	struct oracle o = {.f = &r->f, .p = &r->f.plan.problem};

	if (p->seqstart_q.buffer)
		random_prefix(r, FMHA_T_SEQSTART_Q, p->seqlen_q, p->total_q);
	if (p->seqstart_k.buffer)
		random_prefix(r, FMHA_T_SEQSTART_K, p->seqlen_k, p->total_k);
	if (!p->seqstart_k.buffer)
		random_tables(r);
	for (int b = 0; b < p->batch; b++) {
		struct oracle_sequence s;

		if (p->seqstart_k.buffer && p->seqlen_k_per_batch.buffer)
			put_int(r, FMHA_T_SEQLEN_K, b, 0,
				pick(r, ints(r, FMHA_T_SEQSTART_K)[b + 1] -
						ints(r, FMHA_T_SEQSTART_K)[b] + 1));
		if (p->seqlen_q_per_batch.buffer) {
			int rows = p->seqlen_q;

			if (p->mode == FMHA_GROUP)
				rows = ints(r, FMHA_T_SEQSTART_Q)[b + 1] -
				       ints(r, FMHA_T_SEQSTART_Q)[b];
			put_int(r, FMHA_T_SEQLEN_Q, b, 0, pick(r, rows + 1));
		}
		put_int(r, FMHA_T_LEFTPAD_K, b, 0, 0);
		s = oracle_sequence(&o, b);
		put_int(r, FMHA_T_LEFTPAD_K, b, 0, pick(r, s.keys + 1));
	}
}

static void fill_all(struct runner *r, enum fmha_tensor_role role, double offset, double size)
{
	struct oracle o = {.f = &r->f, .p = &r->f.plan.problem};
	int64_t n[5];

	if (!r->f.problem.tensor[role].buffer)
		return;
	problem_extents(&r->f.plan.problem, role, n);
	for (int64_t a = 0; a < n[0]; a++)
		for (int64_t b = 0; b < n[1]; b++)
			for (int64_t c = 0; c < n[2]; c++)
				for (int64_t d = 0; d < n[3]; d++)
					for (int64_t e = 0; e < n[4]; e++)
						oracle_store(&o, role, AT(a, b, c, d, e),
							     offset + size * normal(r));
}

/* Only rows and keys that exist get numbers; the rest stays NaN. */
static void fill_sequence(struct runner *r, int64_t b)
{
	struct fmha_problem *p = &r->f.plan.problem;
	struct oracle o = {.f = &r->f, .p = p};
	struct oracle_sequence s = oracle_sequence(&o, b);
	int64_t row_b = p->mode == FMHA_GROUP ? 0 : b;

	for (int i = 0; i < s.rows; i++)
		for (int h = 0; h < p->nhead_q; h++) {
			for (int d = 0; p->q.buffer && d < p->hdim_q; d++)
				oracle_store(&o, FMHA_T_Q, AT(row_b, s.q_start + i, h, d),
					     normal(r));
			for (int d = 0; p->d_o.buffer && d < p->hdim_v; d++)
				oracle_store(&o, FMHA_T_DO, AT(row_b, s.q_start + i, h, d),
					     normal(r));
			for (int j = 0; p->bias.buffer && j < s.keys; j++)
				oracle_store(&o, FMHA_T_BIAS, AT(row_b, h, s.q_start + i, j),
					     normal(r));
		}
	for (int j = s.pad; p->k.buffer && j < s.keys + s.pad - p->seqlen_new; j++)
		for (int h = 0; h < p->nhead_k; h++) {
			for (int d = 0; d < p->hdim_q; d++)
				reference_store(r->f.bindings[FMHA_T_K].host, p->k.dtype,
						oracle_cache_index(&o, false, &s, j, h, d),
						normal(r));
			for (int d = 0; d < p->hdim_v; d++)
				reference_store(r->f.bindings[FMHA_T_V].host, p->v.dtype,
						oracle_cache_index(&o, true, &s, j, h, d),
						normal(r));
		}
}

/* Backward's O and LSE come from the oracle, as a forward would have left them. */
static void fill_forward_results(struct runner *r)
{
	struct fmha_problem *p = &r->f.plan.problem;
	struct oracle o = {.f = &r->f, .p = p};

	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(&o, b);
		int64_t row_b = p->mode == FMHA_GROUP ? 0 : b;

		for (int h = 0; h < p->nhead_q; h++)
			for (int i = 0; i < s.rows; i++) {
				double row[256], lse = oracle_row(&o, &s, h, i, row, NULL, NULL, NULL);

				for (int d = 0; d < p->hdim_v; d++)
					oracle_store(&o, FMHA_T_O, AT(row_b, s.q_start + i, h, d),
						     row[d]);
				oracle_store(&o, FMHA_T_LSE, AT(row_b, h, s.q_start + i), lse);
			}
	}
}

static void fill_data(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;

	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		if (p->tensor[i].buffer)
			memset(r->f.bindings[i].host, 0xff, r->f.bindings[i].bytes);
	}
	fill_ints(r);
	for (int64_t b = 0; b < p->batch; b++)
		fill_sequence(r, b);
	fill_all(r, FMHA_T_ALIBI_SLOPES, 0.2, 0.05);
	fill_all(r, FMHA_T_SINK, 0, 1);
	fill_all(r, FMHA_T_Q_DESCALE, 1, 0.2);
	fill_all(r, FMHA_T_K_DESCALE, 1, 0.2);
	fill_all(r, FMHA_T_V_DESCALE, 1, 0.2);
	fill_all(r, FMHA_T_K_NEW, 0, 1);
	fill_all(r, FMHA_T_V_NEW, 0, 1);
	fill_all(r, FMHA_T_ROTARY_COS, 0.3, 0.4);
	fill_all(r, FMHA_T_ROTARY_SIN, 0.3, 0.4);
	fill_all(r, FMHA_T_O_PARTS, 0, 1);
	fill_all(r, FMHA_T_LSE_PARTS, 0, 2);
	if (p->op == FMHA_BACKWARD)
		fill_forward_results(r);
}

/* ---- running it ---- */

static int find_kernel(void *owner, enum abi_family family, uint32_t dtype,
		       const union plan_args *args, struct plan_stage *stage)
{
	struct runner *r = owner;
	const struct cpu_kernel *kernel = cpu_kernel_find(r->level, family, dtype, args);

	if (!kernel)
		return 1;
	stage->workspace_bytes = kernel->workspace_bytes(args, r->n_threads);
	return 0;
}

static void run_stage(struct runner *r, uint32_t i)
{
	const struct plan_stage *stage = &r->f.plan.stages[i];
	const void *args = &r->f.args[i];
	const struct cpu_kernel *kernel =
		cpu_kernel_find(r->level, stage->family, stage->dtype, args);
	size_t scratch_bytes;
	void *scratch;

	assert_non_null(kernel);
	assert_true(kernel->workspace_bytes(args, r->n_threads) <= stage->workspace_bytes);
	scratch_bytes = (kernel->scratch_bytes(args) + 63) / 64 * 64;
	scratch = aligned_alloc(64, scratch_bytes ? scratch_bytes : 64);
	memset(scratch, 0xff, scratch_bytes);
	for (int phase = 0; phase < kernel->n_phases; phase++) {
		int64_t n = kernel->n_tasks(args, phase, r->n_threads);
		bool backwards = chance(r, 50);

		for (int64_t t = 0; t < n; t++)
			kernel->run(args, phase, backwards ? n - 1 - t : t, r->n_threads,
				    (char *)r->f.workspace + stage->workspace_offset, scratch);
	}
	free(scratch);
}

/* ---- judging it ---- */

static double tolerance(const struct runner *r, enum fmha_tensor_role role)
{
	const struct fmha_problem *p = &r->f.problem;
	uint32_t type = p->op == FMHA_MERGE_STATES ? p->o_parts.dtype : p->k.dtype;
	uint32_t out = p->tensor[role].dtype;
	bool rotates = p->rope != FMHA_ROPE_NONE;
	double of_type[] = {1e-4, 6e-3, 4e-2, 4e-2, 4e-2};

	if (role == FMHA_T_LSE)
		return type == FMHA_F32 || !rotates ? 2e-4 + of_type[type] / 10 : of_type[type];
	return of_type[type] > of_type[out] ? of_type[type] : of_type[out];
}

struct judge {
	struct runner *r;
	uint8_t *owned[FMHA_N_TENSORS]; /* a byte a byte: elements that a run may write */
	double worst, limit;
};

static void judge_value(struct judge *j, enum fmha_tensor_role role, const int64_t i[5],
			double want, double magnitude)
{
	struct fixture *f = &j->r->f;
	struct oracle o = {.f = f, .p = &f->plan.problem};
	uint32_t bytes = fmha_dtype_bytes(f->problem.tensor[role].dtype);
	double got = oracle_load(&o, role, i), limit;
	int64_t index = 0;

	for (int d = 0; d < 5; d++)
		index += i[d] * f->plan.problem.tensor[role].stride[d];
	memset(j->owned[role] + index * bytes, 1, bytes);
	if (want == got || (isinf(want) && isinf(got) && want < 0 && got < 0))
		return;
	limit = tolerance(j->r, role) * (magnitude + fabs(want));
	if (!(fabs(got - want) <= limit))
		fail_msg("tensor.%s[%d, %d, %d, %d]: %g, should be %g", proto_roles[role].name,
			 (int)i[0], (int)i[1], (int)i[2], (int)i[3], got, want);
}

static void judge_forward(struct judge *j, const struct oracle *o)
{
	const struct fmha_problem *p = o->p;

	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);
		int64_t row_b = p->mode == FMHA_GROUP ? 0 : b;

		if (s.rows < p->min_seqlen_q)
			continue;
		for (int h = 0; h < p->nhead_q; h++)
			for (int i = 0; i < s.rows; i++) {
				double row[256], lse = oracle_row(o, &s, h, i, row, NULL, NULL, NULL);

				for (int d = 0; d < p->hdim_v; d++)
					judge_value(j, FMHA_T_O, AT(row_b, s.q_start + i, h, d),
						    row[d], 1);
				if (p->lse.buffer)
					judge_value(j, FMHA_T_LSE, AT(row_b, h, s.q_start + i),
						    lse, 1);
				for (int c = 0; p->randval.buffer && c < s.keys; c++)
					judge_value(j, FMHA_T_RANDVAL,
						    AT(row_b, h, s.q_start + i, c),
						    reference_dropout_byte(
							    p->dropout_seed, p->dropout_offset,
							    (uint32_t)b, (uint32_t)h,
							    (uint32_t)p->nhead_q, (uint32_t)i,
							    (uint32_t)c),
						    0);
			}
	}
}

/* The gradients' sums, dense. */
struct gradients {
	double *dq, *dk, *dv, *dbias;
	uint8_t *has_dbias;
	double dsink[64];
};

static int64_t packed_index(const struct fmha_problem *p, enum fmha_tensor_role role,
			    const int64_t i[5])
{
	int64_t dims[5], index = 0;

	problem_extents(p, role, dims);
	for (int d = 0; d < 4; d++)
		index = index * dims[d] + (dims[d] > 1 ? i[d] : 0);
	return index;
}

static double *packed_new(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	int64_t dims[5];

	problem_extents(p, role, dims);
	return calloc((size_t)(dims[0] * dims[1] * dims[2] * dims[3]) + 1, sizeof(double));
}

static void gradient_row(const struct oracle *o, const struct oracle_sequence *s, int h, int i,
			 struct gradients *g)
{
	const struct fmha_problem *p = o->p;
	int64_t row_b = p->mode == FMHA_GROUP ? 0 : s->b;
	int64_t key_b = p->seqstart_k.buffer ? 0 : s->b;
	int hk = h / (p->nhead_q / p->nhead_k);
	double *buffer = calloc(3 * (size_t)s->keys + 3, sizeof(double)), out[256], rows_sum = 0;
	double *prob = buffer, *keep = buffer + s->keys + 1, *slope = keep + s->keys + 1;
	double lse = oracle_row(o, s, h, i, out, prob, keep, slope);

	for (int d = 0; d < p->hdim_v; d++)
		rows_sum += oracle_load(o, FMHA_T_DO, AT(row_b, s->q_start + i, h, d)) *
			    oracle_load(o, FMHA_T_O, AT(row_b, s->q_start + i, h, d));
	if (p->sink.buffer && lse > -INFINITY)
		g->dsink[h] -= exp(oracle_load(o, FMHA_T_SINK, AT(h)) - lse) * rows_sum;
	for (int j = 0; j < s->keys; j++) {
		double dp = 0, ds;

		for (int d = 0; d < p->hdim_v; d++) {
			double grad = oracle_load(o, FMHA_T_DO, AT(row_b, s->q_start + i, h, d));
			const int64_t *at = AT(key_b, s->k_start + j, hk, d);

			dp += grad * oracle_load(o, FMHA_T_V, at) * keep[j];
			g->dv[packed_index(p, FMHA_T_DV, at)] += prob[j] * keep[j] * grad;
		}
		ds = prob[j] * (dp - rows_sum);
		if (p->dbias.buffer) {
			int64_t at = packed_index(p, FMHA_T_DBIAS,
						  AT(row_b, h, s->q_start + i, j));

			g->dbias[at] += ds;
			g->has_dbias[at] = 1;
		}
		ds *= slope[j] * p->scale;
		for (int d = 0; d < p->hdim_q; d++) {
			const int64_t *q = AT(row_b, s->q_start + i, h, d);
			const int64_t *k = AT(key_b, s->k_start + j, hk, d);

			g->dq[packed_index(p, FMHA_T_DQ, q)] += ds * oracle_load(o, FMHA_T_K, k);
			g->dk[packed_index(p, FMHA_T_DK, k)] += ds * oracle_load(o, FMHA_T_Q, q);
		}
	}
	free(buffer);
}

static double largest(const double *x, int64_t n)
{
	double most = 0;

	for (int64_t i = 0; i < n; i++)
		most = fmax(most, fabs(x[i]));
	return most;
}

static void judge_gradients(struct judge *j, const struct oracle *o, const struct gradients *g)
{
	const struct fmha_problem *p = o->p;
	int64_t n[5];
	double most[3];

	for (int t = 0; t < 3; t++) {
		problem_extents(p, (enum fmha_tensor_role)(FMHA_T_DQ + t), n);
		most[t] = 0.02 + largest(t == 0 ? g->dq : t == 1 ? g->dk : g->dv,
					 n[0] * n[1] * n[2] * n[3]);
	}
	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);
		int64_t row_b = p->mode == FMHA_GROUP ? 0 : b, key_b = p->seqstart_k.buffer ? 0 : b;

		for (int i = 0; i < s.rows; i++)
			for (int h = 0; h < p->nhead_q; h++)
				for (int d = 0; d < p->hdim_q; d++) {
					const int64_t *at = AT(row_b, s.q_start + i, h, d);

					judge_value(j, FMHA_T_DQ, at,
						    g->dq[packed_index(p, FMHA_T_DQ, at)], most[0]);
				}
		for (int c = 0; c < s.keys; c++)
			for (int h = 0; h < p->nhead_k; h++) {
				for (int d = 0; d < p->hdim_q; d++) {
					const int64_t *at = AT(key_b, s.k_start + c, h, d);

					judge_value(j, FMHA_T_DK, at,
						    g->dk[packed_index(p, FMHA_T_DK, at)], most[1]);
				}
				for (int d = 0; d < p->hdim_v; d++) {
					const int64_t *at = AT(key_b, s.k_start + c, h, d);

					judge_value(j, FMHA_T_DV, at,
						    g->dv[packed_index(p, FMHA_T_DV, at)], most[2]);
				}
			}
	}
	if (p->dbias.buffer) {
		double size;

		problem_extents(p, FMHA_T_DBIAS, n);
		size = 0.02 + largest(g->dbias, n[0] * n[1] * n[2] * n[3]);
		memset(j->owned[FMHA_T_DBIAS], 1, j->r->f.bindings[FMHA_T_DBIAS].bytes);
		for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++)
			if (g->has_dbias[i])
				judge_value(j, FMHA_T_DBIAS,
					    AT(i / (n[1] * n[2] * n[3]), i / (n[2] * n[3]) % n[1],
					       i / n[3] % n[2], i % n[3]),
					    g->dbias[i], size);
	}
	for (int h = 0; p->dsink.buffer && h < p->nhead_q; h++)
		judge_value(j, FMHA_T_DSINK, AT(h), g->dsink[h], 0.1 + largest(g->dsink, 64) * 2);
}

static void judge_backward(struct judge *j, const struct oracle *o)
{
	const struct fmha_problem *p = o->p;
	struct gradients g = {.dq = packed_new(p, FMHA_T_DQ),
			      .dk = packed_new(p, FMHA_T_DK),
			      .dv = packed_new(p, FMHA_T_DV)};
	int64_t n[5];

	if (p->dbias.buffer) {
		problem_extents(p, FMHA_T_DBIAS, n);
		g.dbias = packed_new(p, FMHA_T_DBIAS);
		g.has_dbias = calloc((size_t)(n[0] * n[1] * n[2] * n[3]) + 1, 1);
	}
	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);

		for (int h = 0; h < p->nhead_q; h++)
			for (int i = 0; i < s.rows; i++)
				gradient_row(o, &s, h, i, &g);
	}
	judge_gradients(j, o, &g);
	free(g.dq);
	free(g.dk);
	free(g.dv);
	free(g.dbias);
	free(g.has_dbias);
}

static void judge_append(struct judge *j, const struct oracle *o)
{
	const struct fmha_problem *p = o->p;
	struct fixture *f = &j->r->f;

	if (memcmp(f->bindings[FMHA_T_K].host, o->k, f->bindings[FMHA_T_K].bytes) != 0)
		fail_msg("the cache of keys is not bit-equal to the formula");
	if (memcmp(f->bindings[FMHA_T_V].host, o->v, f->bindings[FMHA_T_V].bytes) != 0)
		fail_msg("the cache of values is not bit-equal to the formula");
	for (int64_t b = 0; p->q_rotated.buffer && b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);

		for (int i = 0; i < s.rows; i++)
			for (int h = 0; h < p->nhead_q; h++)
				for (int d = 0; d < p->hdim_q; d++)
					judge_value(j, FMHA_T_Q_ROTATED, AT(b, i, h, d),
						    oracle_q(o, &s, i, h, d), 0.1);
	}
}

static void judge_merge(struct judge *j, const struct oracle *o)
{
	const struct fmha_problem *p = o->p;

	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);
		int64_t row_b = p->mode == FMHA_GROUP ? 0 : b;

		for (int i = 0; i < s.rows; i++)
			for (int h = 0; h < p->nhead_q; h++) {
				double sum = 0;

				for (int n = 0; n < p->n_parts; n++)
					sum += exp(oracle_load(o, FMHA_T_LSE_PARTS,
							       AT(n, row_b, h, s.q_start + i)));
				for (int d = 0; d < p->hdim_v; d++) {
					double want = 0;

					for (int n = 0; n < p->n_parts; n++)
						want += oracle_load(o, FMHA_T_O_PARTS,
								    AT(n, row_b, s.q_start + i, h,
								       d)) *
							exp(oracle_load(o, FMHA_T_LSE_PARTS,
									AT(n, row_b, h,
									   s.q_start + i))) /
							sum;
					judge_value(j, FMHA_T_O, AT(row_b, s.q_start + i, h, d),
						    want, 1);
				}
				if (p->lse.buffer)
					judge_value(j, FMHA_T_LSE, AT(row_b, h, s.q_start + i),
						    log(sum), 1);
			}
	}
}

static bool is_written(const struct runner *r, int role)
{
	for (uint32_t i = 0; i < r->f.plan.n_views; i++)
		if (r->f.plan.views[i].role == (uint32_t)role)
			return r->f.plan.views[i].written;
	return false;
}

static void *copy_of(const struct plan_binding *binding)
{
	void *copy = malloc(binding->bytes + 1);

	memcpy(copy, binding->host, binding->bytes);
	return copy;
}

/* What no element owns must still be what it was. */
static void judge_rest(struct judge *j)
{
	struct runner *r = j->r;

	for (int role = 0; role < FMHA_N_TENSORS; role++) {
		const uint8_t *now = r->f.bindings[role].host;

		if (!r->before[role] || role == FMHA_T_K || role == FMHA_T_V)
			continue;
		for (uint64_t i = 0; i < r->f.bindings[role].bytes; i++)
			if (!j->owned[role][i] && now[i] != r->before[role][i])
				fail_msg("tensor.%s: byte %llu belongs to no result, but changed",
					 proto_roles[role].name, (unsigned long long)i);
	}
}

static void judge(struct runner *r)
{
	struct judge j = {.r = r};
	struct oracle o = {.f = &r->f, .p = &r->f.plan.problem};

	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (r->before[role])
			j.owned[role] = calloc(1, r->f.bindings[role].bytes + 1);
	if (r->f.problem.seqlen_new > 0) {
		o.k = r->before[FMHA_T_K];
		o.v = r->before[FMHA_T_V];
		oracle_append(&o);
		judge_append(&j, &o);
	}
	if (r->f.problem.op == FMHA_FORWARD)
		judge_forward(&j, &o);
	else if (r->f.problem.op == FMHA_BACKWARD)
		judge_backward(&j, &o);
	else if (r->f.problem.op == FMHA_MERGE_STATES)
		judge_merge(&j, &o);
	judge_rest(&j);
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		free(j.owned[role]);
}

/* 0: ran and judged; 1: no kernel yet. */
static int run_case(struct runner *r)
{
	int e;

	random_problem(r);
	e = fixture_build(&r->f);
	if (e == FMHA_ENOKERNEL)
		return 1;
	assert_works(&r->f, e);
	fixture_allocate(&r->f);
	fill_data(r);
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (is_written(r, role))
			r->before[role] = copy_of(&r->f.bindings[role]);
	assert_works(&r->f, fixture_bind(&r->f));
	if (r->f.workspace)
		memset((char *)r->f.workspace + r->f.plan.workspace_head_bytes, 0xff,
		       r->f.plan.workspace_bytes - r->f.plan.workspace_head_bytes);
	if (r->f.plan.workspace_zero)
		memset((char *)r->f.workspace + r->f.plan.layout.dq_acc, 0, r->f.plan.dq_acc_bytes);
	for (uint32_t i = 0; i < r->f.plan.n_stages; i++)
		run_stage(r, i);
	judge(r);
	return 0;
}

static const char *describe(const struct runner *r)
{
	static char text[512];
	const struct fmha_problem *p = &r->f.problem;

	(void)snprintf(text, sizeof(text),
		       "op %u mode %u %s batch %d heads %d/%d %d x %d hdim %d/%d mask %u (%d, %d, "
		       "%d) page %d layout %u new %d rope %u drop %g cap %g splits %d/%d level %s",
		       p->op, p->mode, fmha_dtype_name(p->op == FMHA_MERGE_STATES ? p->o_parts.dtype
								 : p->k.dtype),
		       p->batch, p->nhead_q, p->nhead_k, p->seqlen_q, p->seqlen_k, p->hdim_q,
		       p->hdim_v, p->mask, p->window_left, p->window_right, p->sink_tokens,
		       p->page_size, p->kv_layout, p->seqlen_new, p->rope, (double)p->dropout_p,
		       (double)p->logits_soft_cap, p->n_splits, p->split_size,
		       cpu_level_name(r->level));
	return text;
}

static int run_seed(unsigned seed, uint32_t op)
{
	static struct runner r;
	int e;

	memset(&r, 0, sizeof(r));
	r.seed = seed * 2654435761U + op;
	fixture_init(&r.f, op, FMHA_BATCH);
	r.n_threads = 1 + pick(&r, 4);
	r.level = (enum cpu_level)pick(&r, (int)cpu_level_detect() + 1);
	r.f.decree.device = (struct plan_device){.arch = cpu_level_name(r.level),
						 .compute_units = (uint32_t)r.n_threads * 4,
						 .find = find_kernel,
						 .owner = &r};
	print_message("\r%u", seed); /* cmocka says where it failed, this says what to repeat */
	if (getenv("FMHA_RANDOM_VERBOSE"))
		print_message("%s\n", describe(&r));
	e = run_case(&r);
	if (getenv("FMHA_RANDOM_VERBOSE"))
		print_message("%u: %s%s\n", seed, describe(&r), e ? ": no kernel" : "");
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		free(r.before[role]);
	fixture_deinit(&r.f);
	return e;
}

static unsigned first_seed = 1, n_cases = DEFAULT_CASES;

static void run_many(uint32_t op, unsigned n)
{
	unsigned missing = 0;

	for (unsigned i = 0; i < n; i++)
		missing += (unsigned)run_seed(first_seed + i, op);
	print_message("\rop %u: %u cases, %u without a kernel\n", op, n, missing);
}

static void forward(void **state)
{
	(void)state;
	run_many(FMHA_FORWARD, n_cases);
}

static void backward(void **state)
{
	(void)state;
	run_many(FMHA_BACKWARD, (n_cases + 1) / 2);
}

static void append(void **state)
{
	(void)state;
	run_many(FMHA_APPEND_KV, (n_cases + 1) / 2);
}

static void merge(void **state)
{
	(void)state;
	run_many(FMHA_MERGE_STATES, (n_cases + 1) / 2);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(forward),
		cmocka_unit_test(backward),
		cmocka_unit_test(append),
		cmocka_unit_test(merge),
	};

	if (argc > 1) {
		first_seed = (unsigned)strtoul(argv[1], NULL, 10);
		n_cases = 1;
	}
	if (argc > 2)
		n_cases = (unsigned)strtoul(argv[2], NULL, 10);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
