/* SPDX-License-Identifier: MIT */
/* Tiles, options, LDS and grids of the GPU kernels: host data, so no GPU is needed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "gpu_kernel.h"

static const char *const archs[] = {"sm_80",  "sm_86",  "sm_90a",  "gfx90a",
				    "gfx942", "gfx950", "gfx1100", "gfx1201"};

static struct abi_fwd_args forward(int32_t seqlen_q, int32_t hdim)
{
	struct abi_fwd_args a = {
		.nhead_q = 8, .nhead_k = 2, .hdim_q = hdim, .hdim_v = hdim, .scale = 1};

	a.sequences.batch = 3;
	a.sequences.seqlen_q_max = seqlen_q;
	a.sequences.seqlen_k_max = 1000;
	a.band.window_left = a.band.window_right = -1;
	return a;
}

static bool has_option(const struct gpu_kernel *k, const char *option)
{
	for (int i = 0; i < k->n_options; i++)
		if (!strcmp(k->options[i], option))
			return true;
	return false;
}

static void archs_have_cores(void **state)
{
	struct gpu_arch a;

	(void)state;
	assert_int_equal(gpu_arch_find("sm_90a", &a), 0);
	assert_int_equal(a.core, GPU_CORE_MMA);
	assert_int_equal(a.lds_bytes, 227 * 1024);
	assert_int_equal(gpu_arch_find("gfx942", &a), 0);
	assert_int_equal(a.core, GPU_CORE_MFMA);
	assert_int_equal(a.wave, 64);
	assert_int_equal(gpu_arch_find("gfx1201", &a), 0);
	assert_int_equal(a.core, GPU_CORE_WMMA12);
	assert_int_equal(gpu_arch_find("sm_75", &a), 0);
	assert_int_equal(a.core, GPU_CORE_SCALAR);
	assert_int_equal(gpu_arch_find("x86_64_v4", &a), -1);
}

static void every_arch_has_a_forward_kernel(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++)
		for (int32_t hdim = 8; hdim <= 256; hdim += 8)
			for (uint32_t dtype = ABI_F32; dtype <= ABI_E5M2; dtype++) {
				struct abi_fwd_args a = forward(300, hdim);
				struct gpu_arch arch;
				struct gpu_kernel k;

				assert_int_equal(gpu_arch_find(archs[i], &arch), 0);
				assert_int_equal(
					gpu_kernel_choose(archs[i], ABI_FWD, dtype, &a, &k), 0);
				assert_true(k.lds_bytes <= arch.lds_bytes);
				assert_true(k.block[0] % arch.wave == 0 && k.block[0] <= 1024);
				assert_true(k.tile.hdim_q >= hdim && k.tile.hdim_v >= hdim);
			}
}

static void few_rows_are_packed(void **state)
{
	struct abi_fwd_args a = forward(1, 128);
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	a.n_splits = 5;
	a.split_size = 256;
	assert_int_equal(gpu_kernel_choose("sm_90a", ABI_FWD_SPLITKV, ABI_BF16, &a, &k), 0);
	assert_string_equal(k.tile.pipeline, "gpu_mma_pack");
	assert_true(has_option(&k, "-DFMHA_PACK=1"));
	gpu_kernel_grid(&k, &a, grid);
	/* One tile of 4 packed rows, 5 splits; KV heads; batch. */
	assert_int_equal(grid[0], 5);
	assert_int_equal(grid[1], 2);
	assert_int_equal(grid[2], 3);
	a.dropout.p_drop = 0.5f; /* a tile's rows must then belong to one head */
	assert_int_equal(gpu_kernel_choose("sm_90a", ABI_FWD_SPLITKV, ABI_BF16, &a, &k), 0);
	assert_string_equal(k.tile.pipeline, "gpu_mma");
}

static void features_make_other_kernels(void **state)
{
	struct abi_fwd_args a = forward(300, 64);
	struct gpu_kernel plain, masked, f32;

	(void)state;
	assert_int_equal(gpu_kernel_choose("sm_80", ABI_FWD, ABI_F16, &a, &plain), 0);
	a.band.mask = ABI_MASK_BOTTOM_RIGHT;
	a.band.window_right = 0;
	assert_int_equal(gpu_kernel_choose("sm_80", ABI_FWD, ABI_F16, &a, &masked), 0);
	assert_string_not_equal(plain.name, masked.name);
	assert_true(has_option(&plain, "-DFMHA_MASK=0"));
	assert_true(has_option(&masked, "-DFMHA_MASK=1"));
	assert_int_equal(gpu_kernel_choose("sm_80", ABI_FWD, ABI_F32, &a, &f32), 0);
	assert_string_equal(f32.tile.pipeline, "gpu_scalar");
}

static void tiles_that_do_not_fit_are_refused(void **state)
{
	struct abi_fwd_args a = forward(300, 128);
	struct gpu_tile tile = {.pipeline = "gpu_mma",
				.tile_m = 128,
				.tile_n = 64,
				.hdim_q = 128,
				.hdim_v = 128,
				.waves_m = 4,
				.waves_n = 1,
				.blocks_per_cu = 1};
	struct gpu_kernel k;

	(void)state;
	assert_int_equal(gpu_kernel_make("sm_86", ABI_FWD, ABI_BF16, &a, &tile, &k), 0);
	tile.tile_n = 256; /* 160 KiB of K and V */
	assert_int_equal(gpu_kernel_make("sm_86", ABI_FWD, ABI_BF16, &a, &tile, &k), 1);
	tile.tile_n = 40; /* not whole 16-column tiles */
	assert_int_equal(gpu_kernel_make("sm_90a", ABI_FWD, ABI_BF16, &a, &tile, &k), 1);
	tile.tile_n = 64;
	tile.hdim_q = 64; /* narrower than the problem */
	assert_int_equal(gpu_kernel_make("sm_90a", ABI_FWD, ABI_BF16, &a, &tile, &k), 1);
	tile.hdim_q = 128;
	assert_int_equal(gpu_kernel_make("gfx942", ABI_FWD, ABI_BF16, &a, &tile, &k), 1);
}

static void backward_covers_keys_and_rows(void **state)
{
	struct abi_bwd_args a = {
		.nhead_q = 8, .nhead_k = 2, .hdim_q = 128, .hdim_v = 128, .scale = 1};
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	a.sequences.batch = 3;
	a.sequences.seqlen_q_max = 300;
	a.sequences.seqlen_k_max = 500;
	for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++) {
		assert_int_equal(gpu_kernel_choose(archs[i], ABI_BWD_DQ_DK_DV, ABI_BF16, &a, &k),
				 0);
		gpu_kernel_grid(&k, &a, grid);
		assert_int_equal(grid[0], (500 + k.tile.tile_n - 1) / k.tile.tile_n +
						  (300 + k.rows_n - 1) / k.rows_n);
		assert_int_equal(grid[1], 8);
		assert_int_equal(grid[2], 3);
	}
	a.dq_acc = (float *)&a; /* another kernel, the same blocks */
	assert_int_equal(gpu_kernel_choose("gfx942", ABI_BWD_DQ_DK_DV, ABI_BF16, &a, &k), 0);
	assert_non_null(strstr(k.name, "_acc"));
}

static void a_bias_that_repeats_has_blocks_for_its_gradient(void **state)
{
	struct abi_bwd_args a = {
		.nhead_q = 8, .nhead_k = 2, .hdim_q = 64, .hdim_v = 64, .scale = 1};
	uint32_t plain[3], summed[3];
	struct gpu_kernel k;

	(void)state;
	a.sequences.batch = 3;
	a.sequences.seqlen_q_max = 300;
	a.sequences.seqlen_k_max = 500;
	a.bias.data = a.dbias.data = &a;
	a.dbias.stride_dim = 1, a.dbias.stride_seq = 500, a.dbias.stride_head = 150000;
	a.dbias.stride_batch = 1200000;
	assert_int_equal(gpu_kernel_choose("sm_90a", ABI_BWD_DQ_DK_DV, ABI_BF16, &a, &k), 0);
	assert_null(strstr(k.name, "dbsum"));
	gpu_kernel_grid(&k, &a, plain);
	a.dbias.stride_batch = 0;
	assert_int_equal(gpu_kernel_choose("sm_90a", ABI_BWD_DQ_DK_DV, ABI_BF16, &a, &k), 0);
	assert_non_null(strstr(k.name, "dbsum"));
	gpu_kernel_grid(&k, &a, summed);
	assert_int_equal(summed[0] - plain[0], (500 + k.tile.tile_n - 1) / k.tile.tile_n *
						       ((300 + k.tile.tile_m - 1) / k.tile.tile_m));
	a.dbias.stride_seq = 0; /* one row for all */
	gpu_kernel_grid(&k, &a, summed);
	assert_int_equal(summed[0] - plain[0], (500 + k.tile.tile_n - 1) / k.tile.tile_n);
	a.sequences.seqlen_q_max = 0; /* the sum over none is 0, and somebody writes it */
	gpu_kernel_grid(&k, &a, summed);
	assert_int_equal(summed[0], 2 * ((500 + k.tile.tile_n - 1) / k.tile.tile_n));
	a.dbias.stride_dim = 0; /* no bias repeats over keys */
	assert_int_equal(gpu_kernel_choose("sm_90a", ABI_BWD_DQ_DK_DV, ABI_BF16, &a, &k), 1);
}

static void small_families_have_kernels(void **state)
{
	struct abi_combine_args combine = {.nhead_q = 6, .hdim_v = 64, .n_splits = 4};
	struct abi_bwd_args bwd = {.nhead_q = 40, .nhead_k = 40, .hdim_q = 64, .hdim_v = 64};
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	combine.sequences.batch = 2;
	combine.sequences.seqlen_q_max = 3;
	assert_int_equal(
		gpu_kernel_choose("gfx942", ABI_FWD_SPLITKV_COMBINE, ABI_BF16, &combine, &k), 0);
	gpu_kernel_grid(&k, &combine, grid);
	assert_int_equal(grid[0], (3 * 6 + 3) / 4); /* a wave a row, four waves a block */
	bwd.sequences.batch = 1;
	bwd.sequences.seqlen_q_max = 1;
	bwd.dsink = (float *)&bwd;
	assert_int_equal(gpu_kernel_choose("sm_90a", ABI_BWD_DOT_DO_O, ABI_BF16, &bwd, &k), 0);
	gpu_kernel_grid(&k, &bwd, grid);
	assert_int_equal(grid[0], 40); /* one block a head for dSink, more than rows need */
	assert_int_equal(grid[1], 2);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(archs_have_cores),
		cmocka_unit_test(every_arch_has_a_forward_kernel),
		cmocka_unit_test(few_rows_are_packed),
		cmocka_unit_test(features_make_other_kernels),
		cmocka_unit_test(tiles_that_do_not_fit_are_refused),
		cmocka_unit_test(backward_covers_keys_and_rows),
		cmocka_unit_test(a_bias_that_repeats_has_blocks_for_its_gradient),
		cmocka_unit_test(small_families_have_kernels),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
