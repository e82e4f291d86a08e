/* SPDX-License-Identifier: MIT */
/*
 * random_problem.c: valid problems over the cross product of features, and data for them. Sizes are
 * small and odd; every byte that no tensor element owns is NaN in every type.
 */
#include "random_case.h"

#include <math.h>
#include <kernels/reference.h>

int random_pick(struct runner *r, int n)
{
	return n > 0 ? rand_r(&r->seed) % n : 0;
}

bool random_chance(struct runner *r, int percent)
{
	return random_pick(r, 100) < percent;
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

	if (random_chance(r, 40))
		return; /* packed */
	problem_extents(&r->f.problem, role, dims);
	for (int i = n - 2; i > 0; i--) {
		int j = random_pick(r, i + 1), swap = order[i];

		order[i] = order[j];
		order[j] = swap;
	}
	if (role == FMHA_T_V && r->f.problem.page_size == 0 && random_chance(r, 10)) {
		int swap = order[n - 1];

		order[n - 1] = order[n - 2];
		order[n - 2] = swap;
	}
	for (int i = n - 1; i >= 0; i--) {
		t->stride[order[i]] = stride;
		stride *= dims[order[i]] > 0 ? dims[order[i]] : 1;
		if (i < n - 1 || n == 1)
			stride += random_pick(r, 3) * 8;
		else
			stride = (stride + 7) / 8 * 8 + random_pick(r, 2) * 8;
	}
}

static void random_mask(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;

	p->mask = (uint32_t)random_pick(r, 3);
	if (p->mask == FMHA_MASK_NONE)
		return;
	p->window_right = random_chance(r, 60) ? 0 : random_pick(r, 8) - 1;
	p->window_left = random_chance(r, 50) ? -1 : random_pick(r, 12);
	if (p->op == FMHA_FORWARD || p->op == FMHA_BACKWARD)
		p->sink_tokens = random_chance(r, 30) ? random_pick(r, 5) : 0;
}

/* A few tiles of the usual head dims, so that kernels repeat. */
static void tiled_sizes(struct runner *r)
{
	static const int dims[] = {32, 64, 64, 96, 128, 128, 256}, most[] = {1, 20, 80, 200};
	struct fmha_problem *p = &r->f.problem;

	p->hdim_q = p->hdim_v = dims[random_pick(r, sizeof(dims) / sizeof(dims[0]))];
	if (random_chance(r, 10))
		p->hdim_v = dims[random_pick(r, sizeof(dims) / sizeof(dims[0]))];
	p->seqlen_q = 1 + random_pick(r, most[random_pick(r, 4)]);
	p->seqlen_k = random_pick(r, 2 * most[random_pick(r, 4)]);
}

static void random_sizes(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;

	p->batch = 1 + random_pick(r, 3);
	p->nhead_k = 1 + random_pick(r, 3);
	p->nhead_q = p->nhead_k * (1 + random_pick(r, 3));
	p->hdim_q = 16 * (1 + random_pick(r, 6));
	p->hdim_v = 16 * (1 + random_pick(r, 6));
	if (random_chance(r, 20)) {
		p->hdim_q = 8 * (1 + random_pick(r, 12));
		p->hdim_v = 8 * (1 + random_pick(r, 12));
	}
	if (random_chance(r, 30))
		p->hdim_q = 1 + random_pick(r, 100);
	if (random_chance(r, 30))
		p->hdim_v = 1 + random_pick(r, 100);
	p->seqlen_q = random_chance(r, 30) ? 1 : random_pick(r, 30);
	p->seqlen_k = random_chance(r, 10) ? 0 : random_pick(r, 70);
	if (r->tiled)
		tiled_sizes(r);
	if (!r->tiny)
		return;
	p->nhead_k = 1 + random_pick(r, 2);
	p->nhead_q = p->nhead_k * (1 + random_pick(r, 2));
	p->hdim_q = random_chance(r, 50) ? 8 * (1 + random_pick(r, 3)) : 1 + random_pick(r, 24);
	p->hdim_v = random_chance(r, 50) ? 8 * (1 + random_pick(r, 3)) : 1 + random_pick(r, 24);
	p->seqlen_q = random_pick(r, 6);
	p->seqlen_k = random_pick(r, 10);
}

static void random_options(struct runner *r, uint32_t dtype)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t wide = dtype >= FMHA_E4M3 ? FMHA_F32 : dtype;

	random_mask(r);
	if (random_chance(r, 20))
		p->scale = (float)normal(r);
	if (random_chance(r, 20))
		p->logits_soft_cap = 2.0F + (float)random_pick(r, 5);
	if (random_chance(r, 25)) {
		p->dropout_p = 0.1F * (float)(1 + random_pick(r, 8));
		p->dropout_seed = (uint64_t)rand_r(&r->seed) << 20;
		p->dropout_offset = (uint64_t)random_pick(r, 1000);
		if (random_chance(r, 30)) {
			p->dropout_row = 16 * random_pick(r, 1000);
			p->dropout_column = 32 * random_pick(r, 1000);
		}
	}
	if (random_chance(r, 20))
		add(r, FMHA_T_ALIBI_SLOPES, FMHA_F32);
	else if (random_chance(r, 25))
		add(r, FMHA_T_BIAS, random_chance(r, 50) ? FMHA_F32 : wide);
	if (random_chance(r, 20))
		add(r, FMHA_T_SINK, FMHA_F32);
	if (random_chance(r, 15)) {
		p->mask_endpoints = 1 + 2 * random_pick(r, random_chance(r, 20) ? 32 : 4);
		add(r, FMHA_T_MASK_INTERVALS, FMHA_I32);
	} else if (random_chance(r, 12)) {
		add(r, FMHA_T_MASK_BITS, FMHA_U8);
	}
}

static void random_cache(struct runner *r)
{
	static const int page_sizes[] = {1, 2, 5, 16, 32};
	struct fmha_problem *p = &r->f.problem;
	int kind = random_pick(r, 5);

	if (kind < 2) { /* pages */
		p->page_size = page_sizes[random_pick(r, 5)];
		if (p->page_size >= 16 && random_chance(r, 50)) {
			p->kv_layout = FMHA_KV_VECTORIZED;
			p->hdim_q = (p->hdim_q + 15) / 16 * 16;
			p->hdim_v = (p->hdim_v + 15) / 16 * 16;
		}
		p->n_pages = p->batch * (p->seqlen_k / p->page_size + 2);
		if (kind == 0) {
			p->max_blocks = (p->seqlen_k + p->page_size - 1) / p->page_size +
					random_pick(r, 2);
			add(r, FMHA_T_BLOCK_TABLE, FMHA_I32);
			add(r, FMHA_T_SEQLEN_K, FMHA_I32);
		} else {
			p->n_page_indices = p->n_pages;
			add(r, FMHA_T_KV_INDPTR, FMHA_I32);
			add(r, FMHA_T_KV_PAGE_INDICES, FMHA_I32);
			add(r, FMHA_T_KV_LAST_PAGE_LEN, FMHA_I32);
		}
	} else if (kind == 2) {
		p->cache_batch = p->batch + random_pick(r, 3);
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
	p->seqlen_new = 1 + random_pick(r, p->seqlen_k < 4 ? p->seqlen_k : 4);
	add(r, FMHA_T_K_NEW, dtype);
	add(r, FMHA_T_V_NEW, dtype);
	if (random_chance(r, 50))
		return;
	p->rope = 1 + (uint32_t)random_pick(r, 2);
	p->rotary_dim = 16 * (1 + random_pick(r, p->hdim_q / 16));
	if (p->rotary_dim > p->hdim_q)
		p->rope = FMHA_ROPE_NONE, p->rotary_dim = 0;
	if (p->rope == FMHA_ROPE_NONE)
		return;
	p->rotary_max_pos = p->seqlen_k + p->seqlen_q;
	add(r, FMHA_T_ROTARY_COS, random_chance(r, 50) ? FMHA_F32 : dtype);
	add(r, FMHA_T_ROTARY_SIN, p->rotary_cos.dtype);
}

static void random_group(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;

	if (p->mode != FMHA_GROUP)
		return;
	p->total_q = p->batch * (p->seqlen_q + random_pick(r, 4)) + random_pick(r, 4);
	add(r, FMHA_T_SEQSTART_Q, FMHA_I32);
	if (packed_keys(p)) {
		p->total_k = p->batch * (p->seqlen_k + random_pick(r, 4)) + random_pick(r, 4);
		add(r, FMHA_T_SEQSTART_K, FMHA_I32);
	}
}

static void random_descales(struct runner *r, uint32_t dtype)
{
	struct fmha_problem *p = &r->f.problem;

	if (dtype < FMHA_E4M3 || random_chance(r, 30))
		return;
	if (p->q.dtype >= FMHA_E4M3)
		add(r, FMHA_T_Q_DESCALE, FMHA_F32);
	add(r, FMHA_T_K_DESCALE, FMHA_F32);
	add(r, FMHA_T_V_DESCALE, FMHA_F32);
	if (p->q_descale.buffer && random_chance(r, 40))
		p->descale_block_q = 1 + random_pick(r, 16);
	if (p->page_size > 0 && random_chance(r, 40)) {
		p->descale_per_page = 1;
		p->descale_block_k = random_pick(r, p->page_size + 1);
	} else if (random_chance(r, 40)) {
		p->descale_block_k = 1 + random_pick(r, 32);
	}
}

static void random_forward(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t dtype = (uint32_t)random_pick(r, 5);
	uint32_t of_q = dtype >= FMHA_E4M3 && random_chance(r, 50)
				? FMHA_F16 + (uint32_t)random_pick(r, 2)
				: dtype;

	if (of_q != dtype && random_chance(r, 33))
		dtype = FMHA_I8;
	p->mode = (uint32_t)random_pick(r, 2);
	random_sizes(r);
	random_cache(r);
	random_options(r, of_q);
	add(r, FMHA_T_Q, of_q);
	add(r, FMHA_T_K, dtype);
	add(r, FMHA_T_V, dtype);
	add(r, FMHA_T_O, of_q >= FMHA_E4M3 ? (uint32_t)random_pick(r, 3) : of_q);
	if (random_chance(r, 60))
		add(r, FMHA_T_LSE, FMHA_F32);
	if (p->dropout_p > 0 && random_chance(r, 50))
		add(r, FMHA_T_RANDVAL, FMHA_U8);
	if (random_chance(r, 25) && dtype < FMHA_E4M3)
		random_append(r, dtype);
	random_group(r);
	if (!p->seqlen_new && random_chance(r, 15))
		add(r, FMHA_T_LEFTPAD_K, FMHA_I32);
	if (random_chance(r, 20) && !p->seqlen_k_per_batch.buffer && !p->kv_indptr.buffer)
		add(r, FMHA_T_SEQLEN_K, FMHA_I32);
	if (random_chance(r, 20))
		add(r, FMHA_T_SEQLEN_Q, FMHA_I32);
	if (p->mode == FMHA_GROUP && random_chance(r, 15))
		p->min_seqlen_q = random_pick(r, 20);
	random_descales(r, dtype);
	if (random_chance(r, 30))
		p->n_splits = random_pick(r, 6);
	else if (random_chance(r, 15))
		p->split_size = 1 + random_pick(r, 50);
}

static void random_backward(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t dtype = (uint32_t)random_pick(r, 3);

	p->mode = (uint32_t)random_pick(r, 2);
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
	if (p->bias.buffer && random_chance(r, 60))
		add(r, FMHA_T_DBIAS, p->bias.dtype);
	if (p->sink.buffer && random_chance(r, 60))
		add(r, FMHA_T_DSINK, FMHA_F32);
	if (random_chance(r, 30))
		add(r, FMHA_T_DLSE, FMHA_F32);
	p->deterministic = (uint32_t)random_pick(r, 2);
	p->n_splits = random_chance(r, 30) ? random_pick(r, 6) : 0;
	random_group(r);
	if (random_chance(r, 20))
		add(r, FMHA_T_SEQLEN_K, FMHA_I32);
	if (random_chance(r, 20))
		add(r, FMHA_T_SEQLEN_Q, FMHA_I32);
}

static void random_append_only(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t dtype = (uint32_t)random_pick(r, 3);

	random_sizes(r);
	p->seqlen_k += 2;
	random_cache(r);
	add(r, FMHA_T_K, dtype);
	add(r, FMHA_T_V, dtype);
	random_append(r, dtype);
	if (p->rope != FMHA_ROPE_NONE && random_chance(r, 50)) {
		random_mask(r);
		add(r, FMHA_T_Q, dtype);
		add(r, FMHA_T_Q_ROTATED, dtype);
	}
}

static void random_merge(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t dtype = (uint32_t)random_pick(r, 3);

	p->mode = (uint32_t)random_pick(r, 2);
	random_sizes(r);
	p->seqlen_k = 0;
	p->n_parts = 1 + random_pick(r, 5);
	add(r, FMHA_T_O_PARTS, dtype);
	add(r, FMHA_T_LSE_PARTS, FMHA_F32);
	add(r, FMHA_T_O, dtype == FMHA_F32 ? (uint32_t)random_pick(r, 3) : dtype);
	if (random_chance(r, 60))
		add(r, FMHA_T_LSE, FMHA_F32);
	if (p->mode == FMHA_GROUP) {
		p->total_q = p->batch * (p->seqlen_q + 1);
		add(r, FMHA_T_SEQSTART_Q, FMHA_I32);
	}
}

static bool is_mask(enum fmha_tensor_role role)
{
	return role == FMHA_T_MASK_INTERVALS || role == FMHA_T_MASK_BITS;
}

void random_problem(struct runner *r)
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
		/* Bias and masks broadcast some of their first axes. */
		for (int d = 0; role == FMHA_T_BIAS && d < 3; d++)
			if (p->bias.stride[3] != 0 && random_chance(r, 40))
				p->bias.stride[d] = 0;
		for (int d = 0; is_mask(role) && d < 2; d++)
			if (p->tensor[i].stride[3] != 0 && random_chance(r, 40))
				p->tensor[i].stride[d] = 0;
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
		int length = b == 0 ? longest : random_pick(r, longest + 1);

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
		int j = random_pick(r, i + 1), swap = order[i];

		order[i] = order[j];
		order[j] = swap;
	}
	put_int(r, FMHA_T_KV_INDPTR, 0, 0, 0);
	for (int b = 0; b < p->batch; b++) {
		int most = p->seqlen_k - p->seqlen_new;
		int keys = b == 0 ? most : random_pick(r, most + 1);
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
				random_pick(r, ints(r, FMHA_T_SEQSTART_K)[b + 1] -
						       ints(r, FMHA_T_SEQSTART_K)[b] + 1));
		if (p->seqlen_q_per_batch.buffer) {
			int rows = p->seqlen_q;

			if (p->mode == FMHA_GROUP)
				rows = ints(r, FMHA_T_SEQSTART_Q)[b + 1] -
				       ints(r, FMHA_T_SEQSTART_Q)[b];
			put_int(r, FMHA_T_SEQLEN_Q, b, 0, random_pick(r, rows + 1));
		}
		put_int(r, FMHA_T_LEFTPAD_K, b, 0, 0);
		s = oracle_sequence(&o, b);
		put_int(r, FMHA_T_LEFTPAD_K, b, 0, random_pick(r, s.keys + 1));
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

/* Any endpoint is one; rows of bits are now and then empty or full. */
static void fill_masks(struct runner *r)
{
	static const int32_t hostile[] = {INT32_MIN, -1, INT32_MAX};
	struct fmha_problem *p = &r->f.plan.problem;
	struct oracle o = {.f = &r->f, .p = p};
	int64_t n[5];

	for (uint32_t role = FMHA_T_MASK_INTERVALS; role <= FMHA_T_MASK_BITS; role++) {
		if (!r->f.problem.tensor[role].buffer)
			continue;
		problem_extents(p, role, n);
		for (int64_t a = 0; a < n[0]; a++)
			for (int64_t b = 0; b < n[1]; b++)
				for (int64_t c = 0; c < n[2]; c++)
					for (int64_t d = 0; d < n[3]; d++)
						oracle_store(
							&o, role, AT(a, b, c, d),
							role == FMHA_T_MASK_BITS
								? (random_chance(r, 30) ? 255
								   : random_chance(r, 30)
									   ? 0
									   : random_pick(r, 256))
							: random_chance(r, 5)
								? hostile[random_pick(r, 3)]
								: random_pick(r, p->seqlen_k + 1));
	}
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

/* Backward's O and LSE come from the oracle, as a forward would have left them; what reaches LSE
 * stays NaN in rows that see no key. */
static void fill_forward_results(struct runner *r)
{
	struct fmha_problem *p = &r->f.plan.problem;
	struct oracle o = {.f = &r->f, .p = p};

	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(&o, b);
		int64_t row_b = p->mode == FMHA_GROUP ? 0 : b;

		for (int h = 0; h < p->nhead_q; h++)
			for (int i = 0; i < s.rows; i++) {
				double row[256],
					lse = oracle_row(&o, &s, h, i, row, NULL, NULL, NULL);

				for (int d = 0; d < p->hdim_v; d++)
					oracle_store(&o, FMHA_T_O, AT(row_b, s.q_start + i, h, d),
						     row[d]);
				oracle_store(&o, FMHA_T_LSE, AT(row_b, h, s.q_start + i), lse);
				if (p->dlse.buffer && lse > -INFINITY)
					oracle_store(&o, FMHA_T_DLSE, AT(row_b, h, s.q_start + i),
						     normal(r));
			}
	}
}

void random_data(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;

	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		if (p->tensor[i].buffer)
			memset(r->f.bindings[i].host, 0xff, r->f.bindings[i].bytes);
	}
	fill_ints(r);
	fill_masks(r);
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
