/* SPDX-License-Identifier: MIT */
/* Tensor maps from recipes: what the copy engine is told, and what it cannot follow. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "gpu_tensor_map.h"

enum { BATCH = 2, ROWS_Q = 70, ROWS_K = 300, HEADS_Q = 6, HEADS_K = 3, HDIM_Q = 192, HDIM_V = 128 };

static const struct gpu_tile tile = {.tile_m = 128,
				     .tile_n = 112,
				     .hdim_q = HDIM_Q,
				     .hdim_v = HDIM_V,
				     .waves_m = 8,
				     .waves_n = 1};
static _Alignas(16) uint16_t memory[64];

/* (batch, seq, head, dim) without gaps. */
static struct abi_tensor tensor(int64_t rows, int64_t heads, int64_t hdim)
{
	return (struct abi_tensor){memory, rows * heads * hdim, heads * hdim, hdim, 1};
}

static struct abi_fwd_args problem(void)
{
	return (struct abi_fwd_args){
		.q = tensor(ROWS_Q, HEADS_Q, HDIM_Q),
		.k = tensor(ROWS_K, HEADS_K, HDIM_Q),
		.v = tensor(ROWS_K, HEADS_K, HDIM_V),
		.sequences = {.batch = BATCH, .seqlen_q_max = ROWS_Q, .seqlen_k_max = ROWS_K},
		.nhead_q = HEADS_Q,
		.nhead_k = HEADS_K,
		.hdim_q = HDIM_Q,
		.hdim_v = HDIM_V,
		.dtype = ABI_BF16};
}

static const char *make(enum gpu_tensor_role role, const struct abi_fwd_args *args,
			struct gpu_tensor_map *ret_map)
{
	struct gpu_tensor_map_recipe recipes[GPU_TENSOR_MAPS];

	gpu_tensor_map_recipes(&tile, recipes);
	return gpu_tensor_map_make(&recipes[role], args, ret_map);
}

static void axes_are_dim_sequence_head_batch(void **state)
{
	const uint64_t extents[] = {HDIM_V, ROWS_K, HEADS_K, BATCH};
	const uint64_t strides[] = {2 * HEADS_K * HDIM_V, 2 * HDIM_V,
				    2 * ROWS_K * HEADS_K * HDIM_V};
	const uint32_t box[] = {64, 112, 1, 1};
	struct abi_fwd_args a = problem();
	struct gpu_tensor_map map;

	(void)state;
	assert_null(make(GPU_TENSOR_V, &a, &map));
	assert_ptr_equal(map.base, memory);
	assert_memory_equal(map.extents, extents, sizeof(extents));
	assert_memory_equal(map.strides, strides, sizeof(strides));
	assert_memory_equal(map.box, box, sizeof(box));
	assert_int_equal(map.swizzle_bytes, 128);
	assert_null(make(GPU_TENSOR_Q, &a, &map));
	assert_int_equal(map.extents[1], ROWS_Q);
	assert_int_equal(map.extents[2], HEADS_Q);
	assert_int_equal(map.box[1], 128);
}

static void packed_sequences_are_one_axis(void **state)
{
	static const abi_i32 starts[] = {0, 30, ROWS_K};
	struct abi_fwd_args a = problem();
	struct gpu_tensor_map map;

	(void)state;
	a.sequences.seqstart_k = starts;
	assert_non_null(make(GPU_TENSOR_K, &a, &map)); /* how long is it? */
	a.sequences.total_k = ROWS_K;
	a.k.stride_batch = 1; /* means nothing */
	assert_null(make(GPU_TENSOR_K, &a, &map));
	assert_int_equal(map.extents[1], ROWS_K);
	assert_int_equal(map.extents[3], 1);
	assert_int_equal(map.strides[2] % 16, 0);
}

static void an_indexed_cache_has_its_own_rows(void **state)
{
	static const abi_i32 rows[] = {4, 0};
	struct abi_fwd_args a = problem();
	struct gpu_tensor_map map;

	(void)state;
	a.cache.cache_batch_idx = rows;
	a.cache.cache_batch = 5;
	assert_null(make(GPU_TENSOR_K, &a, &map));
	assert_int_equal(map.extents[3], 5);
	assert_null(make(GPU_TENSOR_Q, &a, &map));
	assert_int_equal(map.extents[3], BATCH);
}

static void what_the_engine_cannot_follow_is_refused(void **state)
{
	struct gpu_tensor_map map;

	(void)state;
	for (int fault = 0; fault < 7; fault++) {
		struct abi_fwd_args a = problem();

		switch (fault) {
		case 0:
			a.k.data = memory + 1;
			break;
		case 1:
			a.k.stride_seq += 4;
			break;
		case 2:
			a.k.stride_head = 0;
			break;
		case 3:
			a.k.stride_dim = 2;
			break;
		case 4:
			a.sequences.seqlen_k_max = 0;
			break;
		case 5:
			a.cache.page_size = 16;
			break;
		default:
			a.dtype = ABI_F32;
		}
		assert_non_null(make(GPU_TENSOR_K, &a, &map));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(axes_are_dim_sequence_head_batch),
		cmocka_unit_test(packed_sequences_are_one_axis),
		cmocka_unit_test(an_indexed_cache_has_its_own_rows),
		cmocka_unit_test(what_the_engine_cannot_follow_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
