/* SPDX-License-Identifier: MIT */
/* Parts of heads: in which order their blocks come, and how many a plan is told to take. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kernels/gpu_kernel.h>

#include "core/block_order.h"
#include "core/grid.h"

#define UNITS 132

/* Each tile of keys of each part is some block's, and of one part the smaller keys are a block's that starts before:
 * in deterministic mode it is waited for. */
static void expect_order(struct block_order o)
{
	int *seen = calloc((size_t)(o.n_x * o.n_y), sizeof(*seen)),
	    *next = calloc((size_t)o.n_y, sizeof(*next));

	assert_non_null(seen);
	assert_non_null(next);
	for (abi_i32 i = 0; i < o.n_x * o.n_y; i++) {
		abi_i32 x = -1, y = -1;

		order_place(o, i, &x, &y);
		assert_true(x >= 0 && x < o.n_x && y >= 0 && y < o.n_y);
		assert_int_equal(seen[y * o.n_x + x]++, 0);
		if (o.units == 0)
			assert_int_equal(x, next[y]++);
	}
	free(seen);
	free(next);
}

static void every_block_has_a_place(void **state)
{
	unsigned seed = 1;

	(void)state;
	for (int i = 0; i < 300; i++) {
		struct block_order o = {.n_x = 1 + rand_r(&seed) % 50,
					.n_y = 1 + rand_r(&seed) % 40};

		expect_order(o);
		o.section = order_section(o.n_y, 1 + rand_r(&seed) % o.n_y);
		assert_true(o.section >= 1 && o.section <= o.n_y);
		expect_order(o);
		o.section = o.n_y;
		o.units = 1 + rand_r(&seed) % UNITS;
		expect_order(o);
	}
}

/* 1 sequence, bf16, 64 queries by 128 keys, or 64 of wide heads. */
static struct abi_bwd_args args_of(int heads, int heads_k, int length, int hdim, bool causal)
{
	struct abi_bwd_args a = {.nhead_q = heads,
				 .nhead_k = heads_k,
				 .hdim_q = hdim,
				 .hdim_v = hdim,
				 .dtype = ABI_BF16,
				 .band = {.window_left = -1, .window_right = -1}};

	a.sequences.batch = 1;
	a.sequences.seqlen_q_max = a.sequences.seqlen_k_max = length;
	a.sequences.total_q = a.sequences.total_k = length;
	if (causal)
		a.band = (struct abi_band){ABI_MASK_BOTTOM_RIGHT, -1, 0, 0};
	return a;
}

static int parts_of(const struct abi_bwd_args *a, double us[2])
{
	const int hdim = a->hdim_q > a->hdim_v ? a->hdim_q : a->hdim_v;
	const struct gpu_tile tile = {GPU_WGMMA, 64, hdim > 128 ? 64 : 128, a->hdim_q, a->hdim_v, 8,
				      1,         1};

	return gpu_kernel_parts(&tile, UNITS, a, us);
}

static int round_of(double us)
{
	return (int)(us + 0.5);
}

/* The worked examples of gpu_parts.c. */
static void few_blocks_are_cut(void **state)
{
	struct abi_bwd_args a = args_of(16, 2, 4096, 128, false);
	double us[2];

	(void)state;
	assert_int_equal(parts_of(&a, us), 2);
	assert_int_equal(round_of(us[0]), 1172);
	assert_int_equal(round_of(us[1]), 602);
	a = args_of(32, 8, 5120, 128, false);
	assert_int_equal(parts_of(&a, us), 2);
	assert_int_equal(round_of(us[0]), 2202);
	assert_int_equal(round_of(us[1]), 1914);
	a = args_of(32, 8, 8192, 128, false);
	assert_int_equal(parts_of(&a, us), 1);
	assert_int_equal(round_of(us[0]), 4687);
	assert_int_equal(round_of(us[1]), 4687);
}

/* The longest block is as long as all others together. */
static void the_longest_block_is_cut(void **state)
{
	struct abi_bwd_args a = args_of(16, 2, 4096, 128, true);
	double us[2], whole;

	(void)state;
	assert_int_equal(parts_of(&a, us), 4);
	assert_true(us[0] > 3.4 * us[1]);
	whole = us[0];
	/* Of a window all blocks are alike, and short. */
	a.band.window_left = 512;
	assert_true(parts_of(&a, us) > 1);
	assert_true(us[0] < whole / 4);
	/* Sinks are seen by all rows: their tile is the longest. */
	a.band.sink_tokens = 4;
	(void)parts_of(&a, us);
	assert_true(us[0] > 0.99 * whole && us[0] < 1.01 * whole);
	/* 4 were the fastest on an H100, where the model without drift had 2: 371 and 264 TFLOP/s. */
	a = args_of(16, 2, 4096, 256, true);
	assert_int_equal(parts_of(&a, us), 4);
}

/* Of a mask that is data nobody knows here what it says; one of many intervals may have keys that all rows see. */
static void masks_of_many_intervals_are_cut(void **state)
{
	struct abi_bwd_args a = args_of(64, 8, 8192, 128, false);
	int32_t endpoints = 0;
	double us[2];

	(void)state;
	a.mask_data.intervals.data = &endpoints;
	a.mask_data.n_endpoints = GRID_ORDER_ENDPOINTS;
	assert_int_equal(parts_of(&a, us), 1);
	a.mask_data.n_endpoints = GRID_ORDER_ENDPOINTS + 2;
	assert_int_equal(parts_of(&a, us), 2);
	a.nhead_k = 64;
	assert_int_equal(parts_of(&a, us), 1);
}

/* Blocks of many heads lose what they share in the cache: an H100 had 415 TFLOP/s whole and 510 in 7 parts of 28 heads
 * on 4, 429 and 493 in 2 of 64 on 8; of 32 on 8 it was 509 and 522. */
static void many_heads_of_a_block_drift_apart(void **state)
{
	struct abi_bwd_args a = args_of(28, 4, 8192, 128, true);
	double us[2];

	(void)state;
	assert_int_equal(parts_of(&a, us), 7);
	a = args_of(64, 8, 6144, 128, true);
	assert_int_equal(parts_of(&a, us), 2);
	a = args_of(32, 8, 8192, 128, true);
	assert_int_equal(parts_of(&a, us), 1);
	/* In order: 391 whole, 490 in 4. */
	a.deterministic = 1;
	assert_int_equal(parts_of(&a, us), 4);
}

/* A head whose keys are its own, masks in memory, many rounds, no rows, no keys. */
static void what_is_left_whole(void **state)
{
	struct abi_bwd_args a = args_of(16, 16, 512, 128, false);
	double us[2] = {7, 7};
	int bits;

	(void)state;
	assert_int_equal(parts_of(&a, us), 1);
	assert_true(us[0] == 0 && us[1] == 0);
	a = args_of(16, 2, 4096, 128, true);
	a.mask_data.bits.data = &bits;
	assert_int_equal(parts_of(&a, us), 1);
	a.mask_data.bits.data = NULL;
	a.mask_data.intervals.data = &bits;
	assert_int_equal(parts_of(&a, us), 1);
	a = args_of(32, 8, 4096, 128, false);
	a.sequences.batch = 17; /* 33 rounds */
	assert_int_equal(parts_of(&a, us), 1);
	assert_true(us[0] == 0);
	a = args_of(16, 2, 0, 128, false);
	assert_int_equal(parts_of(&a, us), 1);
	a = args_of(16, 2, 4096, 128, false);
	a.sequences.seqlen_q_max = 0;
	assert_int_equal(parts_of(&a, us), 1);
}

/* Packed ones count by how many of the longest there may be: the others have less, whatever it is. */
static void packed_sequences_are_long_or_short(void **state)
{
	struct abi_bwd_args a = args_of(16, 2, 4096, 128, false);
	double alone[2], packed[2];
	abi_i32 starts;

	(void)state;
	assert_int_equal(parts_of(&a, alone), 2);
	a.sequences.batch = 100;
	a.sequences.seqstart_q = a.sequences.seqstart_k = &starts;
	assert_int_equal(parts_of(&a, packed), 2);
	assert_true(alone[0] == packed[0] && alone[1] == packed[1]);
	a.sequences.total_q = a.sequences.total_k = 8 * 4096; /* 512 blocks, four rounds */
	assert_int_equal(parts_of(&a, packed), 1);
	assert_true(packed[0] > 0);
	a.sequences.total_q = 4096; /* there may be as many of many keys */
	assert_int_equal(parts_of(&a, packed), 1);
}

/* More is never foretold than one part takes, and a number of parts divides a group. */
static void parts_divide_groups(void **state)
{
	static const int heads[][2] = {{14, 2}, {28, 4}, {71, 1}, {12, 2}, {40, 8}, {64, 8}};
	unsigned seed = 7;
	int n_cut = 0;

	(void)state;
	for (int i = 0; i < 200; i++) {
		const int *h = heads[rand_r(&seed) % 6];
		struct abi_bwd_args a = args_of(h[0], h[1], 1 + rand_r(&seed) % 9000,
						64 << rand_r(&seed) % 3, rand_r(&seed) % 2);
		double us[2];
		int n;

		a.deterministic = rand_r(&seed) % 2;
		n = parts_of(&a, us);
		assert_int_equal(h[0] / h[1] % n, 0);
		assert_true(n == 1 ? us[0] == us[1] : us[1] < 0.96 * us[0]);
		n_cut += n > 1;
	}
	assert_true(n_cut > 50 && n_cut < 200);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_block_has_a_place),
		cmocka_unit_test(few_blocks_are_cut),
		cmocka_unit_test(the_longest_block_is_cut),
		cmocka_unit_test(masks_of_many_intervals_are_cut),
		cmocka_unit_test(many_heads_of_a_block_drift_apart),
		cmocka_unit_test(what_is_left_whole),
		cmocka_unit_test(packed_sequences_are_long_or_short),
		cmocka_unit_test(parts_divide_groups),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
