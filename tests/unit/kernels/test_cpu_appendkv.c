/* SPDX-License-Identifier: MIT */
/* Append-KV on the CPU: the cache is bit-equal to the reference's, for every cache, layout and
 * rotation, and what was not appended is untouched. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kernels/reference.h>

#include "launch.h"

enum { BATCH = 3, HEADS_Q = 4, HEADS_K = 2, NEW = 5, ROWS = 4, CAPACITY = 64 };

static int32_t dim_q = 48, dim_v = 40;
static uint32_t random_state;

static float random_float(void)
{
	random_state = random_state * 1664525u + 1013904223u;
	return (float)(random_state >> 8) / 8388608.0f - 1;
}

static const uint32_t types[] = {ABI_F32, ABI_F16, ABI_BF16, ABI_E4M3, ABI_E5M2, ABI_I8};
#define N_TYPES (sizeof(types) / sizeof(types[0]))

static int32_t type_bytes(uint32_t dtype)
{
	return dtype == ABI_F32 ? 4 : dtype <= ABI_BF16 ? 2 : 1;
}

static void *filled(int64_t n, uint32_t dtype)
{
	uint8_t *data = malloc((size_t)n * type_bytes(dtype));

	assert_non_null(data);
	for (int64_t i = 0; i < n; i++)
		if (dtype <= ABI_BF16)
			reference_store(data, dtype, i, random_float());
		else
			data[i] = (uint8_t)(int)(random_float() * 100);
	return data;
}

struct problem {
	struct abi_appendkv_args args;
	int64_t n_k, n_v, n_q;
	int32_t before[BATCH], batch_idx[BATCH], pages[BATCH * CAPACITY], indptr[BATCH + 1],
		last[BATCH], seqstart_q[BATCH + 1];
	void *k, *v, *q; /* as the reference leaves them */
};

enum table { CONTIGUOUS, INDEXED, BLOCK_TABLE, INDPTR };

static struct abi_tensor packed(void *data, int64_t rows, int64_t heads, int64_t dim)
{
	return (struct abi_tensor){.data = data,
				   .stride_batch = rows * heads * dim,
				   .stride_seq = heads * dim,
				   .stride_head = dim,
				   .stride_dim = 1};
}

static void problem_cache(struct problem *p, enum table table, int32_t page_size, bool vectorized)
{
	struct abi_appendkv_args *a = &p->args;
	int32_t per_sequence = page_size ? CAPACITY / page_size : 0;
	int32_t rows = page_size ? page_size : CAPACITY;
	int32_t blocks = page_size ? BATCH * per_sequence : BATCH + 1;

	for (int b = 0; b < BATCH; b++) {
		p->batch_idx[b] = (b + 2) % (BATCH + 1);
		p->indptr[b] = b * per_sequence;
	}
	/* Pages in an order of no pattern: 7 is coprime to every count used here. */
	for (int i = 0; i < BATCH * per_sequence; i++)
		p->pages[i] = i * 7 % (BATCH * per_sequence);
	p->indptr[BATCH] = BATCH * per_sequence;
	a->cache = (struct abi_kv_cache){.page_size = page_size,
					 .n_pages = BATCH * per_sequence,
					 .layout = vectorized ? ABI_KV_VECTORIZED : ABI_KV_LINEAR};
	if (table == INDEXED)
		a->cache.cache_batch_idx = p->batch_idx;
	if (table == BLOCK_TABLE) {
		a->cache.block_table = p->pages;
		a->cache.block_table_stride = per_sequence;
	}
	if (table == INDPTR) {
		a->cache.kv_indptr = p->indptr;
		a->cache.kv_page_indices = p->pages;
		a->cache.kv_last_page_len = p->last;
	}
	p->n_k = (int64_t)blocks * rows * HEADS_K * dim_q;
	p->n_v = (int64_t)blocks * rows * HEADS_K * dim_v;
	a->k = packed(filled(p->n_k, (uint32_t)a->dtype), rows, HEADS_K, dim_q);
	a->v = packed(filled(p->n_v, (uint32_t)a->dtype), rows, HEADS_K, dim_v);
}

static struct problem *problem_new(uint32_t dtype, enum table table, int32_t page_size,
				   bool vectorized)
{
	struct problem *p = calloc(1, sizeof(*p));
	struct abi_appendkv_args *a = &p->args;

	random_state = 1;
	*a = (struct abi_appendkv_args){
		.sequences = {.batch = BATCH,
			      .seqlen_q_max = ROWS,
			      .seqlen_k_max = CAPACITY,
			      .seqlen_k = p->before,
			      .total_q = BATCH * ROWS},
		.seqlen_new = NEW,
		.nhead_q = HEADS_Q,
		.nhead_k = HEADS_K,
		.hdim_q = dim_q,
		.hdim_v = dim_v,
		.dtype = (abi_i32)dtype,
		.rotary_max_pos = CAPACITY,
	};
	p->before[1] = 17;
	p->before[2] = CAPACITY - NEW;
	problem_cache(p, table, page_size, vectorized);
	p->n_q = BATCH * ROWS * HEADS_Q * dim_q;
	a->k_new = packed(filled(BATCH * NEW * HEADS_K * dim_q, dtype), NEW, HEADS_K, dim_q);
	a->v_new = packed(filled(BATCH * NEW * HEADS_K * dim_v, dtype), NEW, HEADS_K, dim_v);
	return p;
}

static void problem_rotate(struct problem *p, enum abi_rope rope, int32_t rotary_dim,
			   uint32_t table_dtype, bool same_position)
{
	struct abi_appendkv_args *a = &p->args;
	uint32_t dtype = (uint32_t)a->dtype;
	int32_t half = rotary_dim / 2;
	int64_t size = CAPACITY * half;

	a->rope = (abi_i32)rope;
	a->rotary_dim = rotary_dim;
	a->rotary_dtype = (abi_i32)table_dtype;
	a->q_rows_same_position = same_position;
	a->rotary_cos = (struct abi_tensor){
		.data = filled(size, table_dtype), .stride_seq = half, .stride_dim = 1};
	a->rotary_sin = (struct abi_tensor){
		.data = filled(size, table_dtype), .stride_seq = half, .stride_dim = 1};
	a->q = packed(filled(p->n_q, dtype), ROWS, HEADS_Q, dim_q);
	a->q_rotated = packed(filled(p->n_q, dtype), ROWS, HEADS_Q, dim_q);
}

static void problem_free(struct problem *p)
{
	void *owned[] = {p->args.k.data,          p->args.v.data,         p->args.k_new.data,
			 p->args.v_new.data,      p->args.q.data,         p->args.q_rotated.data,
			 p->args.rotary_cos.data, p->args.rotary_sin.data};

	for (size_t i = 0; i < sizeof(owned) / sizeof(owned[0]); i++)
		free(owned[i]);
	free(p);
}

static void *copy_of(const void *data, size_t bytes)
{
	void *copy = malloc(bytes ? bytes : 1);

	assert_non_null(copy);
	if (bytes)
		memcpy(copy, data, bytes);
	return copy;
}

/* The reference on one copy, every level's kernel on another: all bytes equal, and some changed. */
static void check(struct problem *p)
{
	struct abi_appendkv_args expected = p->args, got = p->args;
	int32_t bytes = type_bytes((uint32_t)p->args.dtype);
	size_t k_bytes = (size_t)p->n_k * bytes, v_bytes = (size_t)p->n_v * bytes;
	size_t q_bytes = p->args.q_rotated.data ? (size_t)p->n_q * bytes : 0;

	expected.k.data = copy_of(p->args.k.data, k_bytes);
	expected.v.data = copy_of(p->args.v.data, v_bytes);
	if (q_bytes)
		expected.q_rotated.data = copy_of(p->args.q_rotated.data, q_bytes);
	assert_int_equal(reference_appendkv(&expected), 0);
	assert_memory_not_equal(expected.k.data, p->args.k.data, k_bytes);
	for (int level = CPU_PORTABLE; level <= CPU_X86_64_V4 && launch_has_level(level); level++) {
		got.k.data = copy_of(p->args.k.data, k_bytes);
		got.v.data = copy_of(p->args.v.data, v_bytes);
		if (q_bytes)
			got.q_rotated.data = copy_of(p->args.q_rotated.data, q_bytes);
		launch_family(level, ABI_FWD_APPENDKV, (uint32_t)p->args.dtype, &got, 2);
		assert_memory_equal(got.k.data, expected.k.data, k_bytes);
		assert_memory_equal(got.v.data, expected.v.data, v_bytes);
		if (q_bytes) {
			assert_memory_equal(got.q_rotated.data, expected.q_rotated.data, q_bytes);
			free(got.q_rotated.data);
		}
		free(got.k.data);
		free(got.v.data);
	}
	free(expected.k.data);
	free(expected.v.data);
	if (q_bytes)
		free(expected.q_rotated.data);
	problem_free(p);
}

static void contiguous_caches(void **state)
{
	(void)state;
	for (size_t t = 0; t < N_TYPES; t++) {
		check(problem_new(types[t], CONTIGUOUS, 0, false));
		check(problem_new(types[t], INDEXED, 0, false));
	}
}

static void pages_of_every_layout(void **state)
{
	const int32_t sizes[] = {1, 2, 16, 64};

	(void)state;
	for (size_t t = 0; t < N_TYPES; t++)
		for (size_t i = 0; i < 4; i++)
			for (int vectorized = 0; vectorized < 2; vectorized++) {
				/* V's slots come in groups of 16 bytes */
				if (vectorized && sizes[i] % (16 / type_bytes(types[t])))
					continue;
				check(problem_new(types[t], BLOCK_TABLE, sizes[i], vectorized));
			}
}

/* Rows that end anywhere; a vectorized K has whole groups, its V any width. */
static void any_head_dim(void **state)
{
	static const int32_t dims[] = {1,  3,  7,   8,   12,  17,  40,  59,
				       63, 72, 100, 111, 127, 129, 320, 511};

	(void)state;
	for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++)
		for (size_t t = 0; t < N_TYPES; t++) {
			uint32_t dtype = types[t];

			dim_q = dims[i];
			dim_v = dims[15 - i];
			check(problem_new(dtype, CONTIGUOUS, 0, false));
			check(problem_new(dtype, BLOCK_TABLE, 16, false));
			for (int rope = ABI_ROPE_INTERLEAVED;
			     dim_q >= 16 && dtype <= ABI_BF16 && rope <= ABI_ROPE_HALF_ROTATED;
			     rope++) {
				struct problem *p = problem_new(dtype, CONTIGUOUS, 0, false);

				problem_rotate(p, rope, dim_q / 16 * 16, dtype, rope & 1);
				check(p);
			}
			dim_q = 48;
			check(problem_new(dtype, BLOCK_TABLE, 16, true));
		}
	dim_v = 40;
}

static void indptr_tables_count_the_new_keys(void **state)
{
	struct problem *p = problem_new(ABI_F16, INDPTR, 16, false);

	(void)state;
	/* Without lengths the table describes the cache after the append: 3 pages and 7 keys, ...
	 */
	for (int b = 0; b < BATCH; b++)
		p->last[b] = 7 + b;
	p->args.sequences.seqlen_k = NULL;
	check(p);
}

static void lengths_default_to_a_full_cache(void **state)
{
	struct problem *p = problem_new(ABI_BF16, CONTIGUOUS, 0, false);

	(void)state;
	p->args.sequences.seqlen_k = NULL;
	check(p);
}

static void rotations(void **state)
{
	const int32_t dims[] = {16, 32, dim_q};

	(void)state;
	for (uint32_t dtype = ABI_F32; dtype <= ABI_BF16; dtype++)
		for (int rope = ABI_ROPE_INTERLEAVED; rope <= ABI_ROPE_HALF_ROTATED; rope++)
			for (size_t i = 0; i < 3; i++)
				for (int variant = 0; variant < 4; variant++) {
					struct problem *p = problem_new(
						dtype, variant & 1 ? BLOCK_TABLE : CONTIGUOUS,
						variant & 1 ? 16 : 0, variant & 2);

					problem_rotate(p, rope, dims[i],
						       variant & 2 ? dtype : ABI_F32, variant & 1);
					check(p);
				}
}

/* Positions past the tables use their last row: nothing is read out of bounds. */
static void positions_past_the_tables(void **state)
{
	struct problem *p = problem_new(ABI_F32, CONTIGUOUS, 0, false);

	(void)state;
	problem_rotate(p, ABI_ROPE_INTERLEAVED, 16, ABI_F32, false);
	p->args.rotary_max_pos = 18;
	check(p);
}

/* Random tables leave few ties; these values make x c - y s fall on ties of bf16 and f16, with a
 * rest far below float's last bit that must decide. */
static void results_are_rounded_once(void **state)
{
	(void)state;
	for (uint32_t dtype = ABI_F16; dtype <= ABI_BF16; dtype++) {
		struct problem *p = problem_new(dtype, CONTIGUOUS, 0, false);
		float *cos, *sin;

		problem_rotate(p, ABI_ROPE_HALF_ROTATED, 16, ABI_F32, false);
		cos = p->args.rotary_cos.data;
		sin = p->args.rotary_sin.data;
		for (int i = 0; i < CAPACITY * 8; i++) {
			/* 1 + half a unit in the last place of the type */
			cos[i] = dtype == ABI_F16 ? 1 + 0x1p-11f : 1 + 0x1p-8f;
			sin[i] = (i % 2 ? 1 : -1) * 0x1p-40f;
		}
		for (int64_t i = 0; i < BATCH * NEW * HEADS_K * dim_q; i++)
			reference_store(p->args.k_new.data, dtype, i, i % 3 ? 1 : -1);
		check(p);
	}
}

static void strides_may_be_anything(void **state)
{
	struct problem *p = problem_new(ABI_BF16, CONTIGUOUS, 0, false);
	struct abi_tensor *k = &p->args.k;

	(void)state;
	problem_rotate(p, ABI_ROPE_HALF_ROTATED, 32, ABI_F32, false);
	/* [batch, head, dim, key] */
	k->stride_dim = CAPACITY;
	k->stride_seq = 1;
	k->stride_head = (int64_t)dim_q * CAPACITY;
	check(p);
}

static void packed_queries(void **state)
{
	struct problem *p = problem_new(ABI_F32, CONTIGUOUS, 0, false);

	(void)state;
	problem_rotate(p, ABI_ROPE_INTERLEAVED, 32, ABI_F32, false);
	p->seqstart_q[1] = 1;
	p->seqstart_q[2] = 1;
	p->seqstart_q[3] = 5;
	p->args.sequences.seqstart_q = p->seqstart_q;
	p->args.sequences.total_q = 5;
	check(p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(contiguous_caches),
		cmocka_unit_test(pages_of_every_layout),
		cmocka_unit_test(any_head_dim),
		cmocka_unit_test(indptr_tables_count_the_new_keys),
		cmocka_unit_test(lengths_default_to_a_full_cache),
		cmocka_unit_test(rotations),
		cmocka_unit_test(positions_past_the_tables),
		cmocka_unit_test(results_are_rounded_once),
		cmocka_unit_test(strides_may_be_anything),
		cmocka_unit_test(packed_queries),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
