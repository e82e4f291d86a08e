/* SPDX-License-Identifier: MIT */
/* Tiles, options, LDS and grids of the GPU kernels: host data, so no GPU is needed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <kernels/gpu_kernel.h>
#include <kernels/gpu_peak.h>

#include "core/block_order.h"
#include "core/grid.h"
#include "core/lds.h"

static const struct gpu_tile mma_128 = {GPU_MMA, 128, 64, 128, 128, 4, 1, 1};
static const struct gpu_tile mma_pack = {GPU_MMA_PACK, 16, 64, 128, 128, 1, 4, 1};
static const struct traits bf16 = {.dtype = ABI_BF16};

static int make(const char *arch, enum abi_family family, const struct traits *traits,
		const struct gpu_tile *tile, struct gpu_kernel *kernel)
{
	return gpu_kernel_make(gpu_arch_find(arch), family, traits, tile, kernel) != NULL;
}

static bool has_option(const struct gpu_kernel *k, const char *option)
{
	for (uint32_t i = 0; i < k->build.n_options; i++)
		if (!strcmp(k->build.options[i], option))
			return true;
	return false;
}

static void every_arch_has_a_peak(void **state)
{
	(void)state;
	for (size_t i = 0; i < gpu_n_archs; i++) {
		const struct gpu_peak *peak = gpu_peak_find(gpu_archs[i].name);

		assert_non_null(peak);
		assert_true(peak->f32 > 0 && peak->f16 >= peak->f32 && peak->fp8 >= peak->f16);
	}
	assert_null(gpu_peak_find("x86_64_v4"));
}

static void archs_have_cores(void **state)
{
	(void)state;
	assert_int_equal(gpu_arch_find("sm_90a")->core, GPU_CORE_WGMMA);
	assert_int_equal(gpu_arch_find("sm_80")->core, GPU_CORE_MMA);
	assert_int_equal(gpu_arch_find("sm_90a")->lds_bytes, 227 * 1024);
	assert_int_equal(gpu_arch_find("gfx942")->core, GPU_CORE_MFMA);
	assert_int_equal(gpu_arch_find("gfx942")->wave, 64);
	assert_int_equal(gpu_arch_find("gfx1201")->core, GPU_CORE_WMMA12);
	assert_null(gpu_arch_find("sm_75")); /* no __reduce_add_sync before sm_80 */
	assert_null(gpu_arch_find("x86_64_v4"));
}

static void few_rows_are_packed(void **state)
{
	struct abi_fwd_args a = {.nhead_q = 8,
				 .nhead_k = 2,
				 .hdim_q = 128,
				 .hdim_v = 128,
				 .scale = 1,
				 .n_splits = 5};
	struct traits dropout = {.dtype = ABI_BF16, .dropout = 1};
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	a.sequences.batch = 3;
	a.sequences.seqlen_q_max = 1;
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &bf16, &mma_pack, &k), 0);
	assert_true(has_option(&k, "-DFMHA_PACK=1"));
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	/* One tile of 4 packed rows, 5 splits; KV heads; batch. */
	assert_int_equal(grid[0], 5);
	assert_int_equal(grid[1], 2);
	assert_int_equal(grid[2], 3);
	/* A tile's rows must then belong to one head. */
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &dropout, &mma_pack, &k), 1);
}

static void traits_make_other_kernels(void **state)
{
	struct traits traits = {.dtype = ABI_F16, .mask = 1};
	struct gpu_kernel plain, masked, any_scale;

	(void)state;
	assert_int_equal(make("sm_80", ABI_FWD, &bf16, &mma_128, &plain), 0);
	assert_int_equal(make("sm_80", ABI_FWD, &traits, &mma_128, &masked), 0);
	assert_string_not_equal(plain.build.name, masked.build.name);
	assert_true(has_option(&plain, "-DFMHA_MASK=0"));
	assert_true(has_option(&masked, "-DFMHA_MASK=1"));
	assert_true(has_option(&masked, "-DFMHA_LOGITS=0"));
	traits.any_scale = 1;
	assert_int_equal(make("sm_80", ABI_FWD, &traits, &mma_128, &any_scale), 0);
	assert_true(has_option(&any_scale, "-DFMHA_LOGITS=1"));
	traits.dtype = ABI_F32; /* no matrix instructions for it */
	assert_int_equal(make("sm_80", ABI_FWD, &traits, &mma_128, &plain), 1);
}

/* Only in what they are compiled for: multiples of 8 have the code that they had. */
static void tails_make_other_kernels(void **state)
{
	struct traits traits = {.dtype = ABI_BF16};
	struct gpu_tile combine = {.pipeline = GPU_COMBINE,
				   .tile_m = 16,
				   .tile_n = 16,
				   .hdim_q = 32,
				   .hdim_v = 32,
				   .waves_m = 16,
				   .waves_n = 1};
	struct gpu_kernel k;

	(void)state;
	for (traits.tails = 0; traits.tails < 2; traits.tails++) {
		const char *option = traits.tails ? "-DFMHA_TAILS=1" : "-DFMHA_TAILS=0";

		assert_int_equal(make("sm_80", ABI_FWD, &traits, &mma_128, &k), 0);
		assert_true(has_option(&k, option));
		assert_int_equal(strstr(k.build.name, "_tails") != NULL, traits.tails);
		assert_int_equal(make("sm_80", ABI_FWD_SPLITKV_COMBINE, &traits, &combine, &k), 0);
		assert_true(has_option(&k, option));
	}
}

static void tiles_that_do_not_fit_are_refused(void **state)
{
	struct gpu_tile tile = mma_128;
	struct gpu_kernel k;

	(void)state;
	assert_int_equal(make("sm_86", ABI_FWD, &bf16, &tile, &k), 0);
	tile.tile_n = 256; /* 160 KiB of K and V */
	assert_int_equal(make("sm_86", ABI_FWD, &bf16, &tile, &k), 1);
	assert_non_null(
		strstr(gpu_tile_misfit(gpu_arch_find("sm_86"), ABI_FWD, &bf16, &tile), "LDS"));
	tile.tile_n = 40; /* not whole 16-column tiles */
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 1);
	tile.tile_n = 64;
	tile.hdim_q = 72; /* heads are padded to 32 */
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 1);
	tile = (struct gpu_tile){GPU_MMA_PACK, 16, 64, 576, 512, 1, 4, 1};
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 0);
	tile.hdim_v = 576; /* values are at most 512 of them */
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 1);
	assert_int_equal(make("gfx942", ABI_FWD, &bf16, &mma_128, &k), 1);
}

static void masks_as_data_go_with_every_head(void **state)
{
	static const char *const archs[] = {"sm_90a", "gfx942", "gfx1201"};
	static const struct gpu_tile tiles[][2] = {
		{{GPU_MMA, 64, 32, 512, 512, 4, 1, 1}, {GPU_MMA, 32, 64, 512, 512, 4, 1, 1}},
		{{GPU_MFMA, 64, 32, 512, 512, 4, 1, 1}, {GPU_MFMA, 32, 64, 512, 512, 4, 1, 1}},
		{{GPU_WMMA, 32, 16, 512, 512, 2, 1, 1}, {GPU_WMMA, 16, 64, 512, 512, 4, 1, 1}}};
	static const enum abi_family families[] = {ABI_FWD, ABI_BWD_DQ_DK_DV};

	(void)state;
	for (size_t i = 0; i < 3; i++)
		for (size_t n = 0; n < 2; n++) {
			const struct gpu_arch *arch = gpu_arch_find(archs[i]);
			struct traits traits = bf16;
			struct gpu_kernel k;

			assert_int_equal(make(archs[i], families[n], &traits, &tiles[i][n], &k), 0);
			for (traits.mask_data = 1; traits.mask_data <= 2; traits.mask_data++) {
				assert_null(
					gpu_tile_misfit(arch, families[n], &traits, &tiles[i][n]));
				assert_int_equal(
					make(archs[i], families[n], &traits, &tiles[i][n], &k), 0);
			}
		}
}

/* 3 sequences of 300 queries and 500 keys, of 2 heads of keys. */
static struct abi_bwd_args gradients_of(int32_t nhead_q, int32_t hdim_q, int32_t hdim_v)
{
	struct abi_bwd_args a = {
		.nhead_q = nhead_q, .nhead_k = 2, .hdim_q = hdim_q, .hdim_v = hdim_v};

	a.sequences.batch = 3;
	a.sequences.seqlen_q_max = 300;
	a.sequences.seqlen_k_max = 500;
	return a;
}

static void backward_covers_keys_and_rows(void **state)
{
	static const struct gpu_tile tiles[] = {{GPU_MMA, 64, 64, 128, 128, 4, 1, 2},
						{GPU_MFMA, 32, 64, 128, 128, 4, 1, 1},
						{GPU_WMMA, 16, 64, 128, 128, 4, 1, 1}};
	static const char *const archs[] = {"sm_90a", "gfx942", "gfx1100"};
	struct abi_bwd_args a = gradients_of(8, 128, 128);
	struct traits acc = {.dtype = ABI_BF16, .dq_acc = 1};
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++) {
		assert_int_equal(make(archs[i], ABI_BWD_DQ_DK_DV, &bf16, &tiles[i], &k), 0);
		assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
		assert_int_equal(grid[0], (500 + k.tile.tile_n - 1) / k.tile.tile_n +
						  (300 + k.dq_tile_n - 1) / k.dq_tile_n);
		assert_int_equal(grid[1], 8);
		assert_int_equal(grid[2], 3);
	}
	/* Another kernel, the same blocks. */
	assert_int_equal(make("gfx942", ABI_BWD_DQ_DK_DV, &acc, &tiles[1], &k), 0);
	assert_non_null(strstr(k.build.name, "_split"));
}

static void a_bias_that_repeats_has_blocks_for_its_gradient(void **state)
{
	const struct gpu_tile tile = {GPU_MMA, 32, 128, 64, 64, 4, 1, 2};
	struct traits traits = {.dtype = ABI_BF16, .bias = 1};
	struct abi_bwd_args a = gradients_of(8, 64, 64);
	uint32_t plain[3], summed[3];
	struct gpu_kernel k;

	(void)state;
	a.bias.data = a.dbias.data = &a;
	a.dbias.stride_dim = 1, a.dbias.stride_seq = 500, a.dbias.stride_head = 150000;
	a.dbias.stride_batch = 1200000;
	assert_false(abi_sums_dbias(&a));
	assert_int_equal(make("sm_90a", ABI_BWD_DQ_DK_DV, &traits, &tile, &k), 0);
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, plain), 0);
	a.dbias.stride_batch = 0;
	assert_true(abi_sums_dbias(&a));
	traits.dbias_sum = 1;
	assert_int_equal(make("sm_90a", ABI_BWD_DQ_DK_DV, &traits, &tile, &k), 0);
	assert_non_null(strstr(k.build.name, "dbsum"));
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, summed), 0);
	assert_int_equal(summed[0] - plain[0], (500 + 127) / 128 * ((300 + 31) / 32));
	a.dbias.stride_seq = 0; /* one row for all */
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, summed), 0);
	assert_int_equal(summed[0] - plain[0], (500 + 127) / 128);
	a.sequences.seqlen_q_max = 0; /* the sum over none is 0, and somebody writes it */
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, summed), 0);
	assert_int_equal(summed[0], 2 * ((500 + 127) / 128));
}

/* A block a KV head and 128 keys; then one a chunk of 64 of a tile's head dimension. */
static void warpgroups_sum_heads_in_a_block(void **state)
{
	const struct gpu_tile tile = {GPU_WGMMA, 64, 128, 128, 128, 8, 1, 1};
	const struct gpu_tile wide = {GPU_WGMMA, 64, 128, 256, 256, 8, 1, 1};
	const struct gpu_tile convert = {GPU_CONVERT, 16, 16, 32, 32, 4, 1, 1};
	struct abi_bwd_args a = gradients_of(8, 128, 128);
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	assert_int_equal(make("sm_90a", ABI_BWD_DQ_DK_DV, &bf16, &tile, &k), 0);
	assert_int_equal(k.block[0], 384);
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0], 3 * 2 * 4);
	assert_int_equal(grid[1] * grid[2], 1);
	assert_int_equal(make("sm_90a", ABI_BWD_DQ_DK_DV, &bf16, &wide, &k), 1);
	assert_int_equal(make("sm_80", ABI_BWD_DQ_DK_DV, &bf16, &tile, &k), 1);
	a.dq_tile_rows = 64;
	a.dq_tile_floats = 64 * 128 + 64;
	assert_int_equal(make("sm_90a", ABI_BWD_CONVERT_DQ, &bf16, &convert, &k), 0);
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0], 5 * 8 * 2);
	a.dq_tile_floats = 64 * 64 + 64; /* one slab: the warpgroups share the queries */
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0], 5 * 8 * 2);
	a.dq_tile_floats = lds_dq_tile(64, 96, 0); /* a slab and a half: by rows, half of them */
	assert_int_equal(a.dq_tile_floats, 64 * 96 + 64);
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0], 5 * 8 * 2);
}

/* Heads of 192 and 128 share 96 keys among three warpgroups, or, with a bias, 64 among two. */
static void wide_heads_have_warpgroups_with_roles(void **state)
{
	const struct gpu_tile roles = {GPU_WGMMA, 64, 96, 192, 128, 12, 1, 1};
	const struct gpu_tile both = {GPU_WGMMA, 64, 64, 192, 128, 8, 1, 1};
	const struct traits biased = {.dtype = ABI_BF16, .bias = 1};
	struct gpu_tile other = roles;
	struct gpu_kernel k;

	(void)state;
	assert_int_equal(make("sm_90a", ABI_BWD_DQ_DK_DV, &bf16, &roles, &k), 0);
	assert_int_equal(k.block[0], 512);
	assert_int_equal(make("sm_90a", ABI_BWD_DQ_DK_DV, &bf16, &both, &k), 1);
	assert_int_equal(make("sm_90a", ABI_BWD_DQ_DK_DV, &biased, &both, &k), 0);
	assert_int_equal(k.block[0], 384);
	other.hdim_v = 192;
	assert_int_equal(make("sm_90a", ABI_BWD_DQ_DK_DV, &bf16, &other, &k), 1);
	other = roles;
	other.waves_m = 8;
	assert_int_equal(make("sm_90a", ABI_BWD_DQ_DK_DV, &bf16, &other, &k), 1);
}

/* Parts of heads have blocks of their own, and what adds them a thread for eight elements, head by head. */
static void heads_in_parts_have_blocks(void **state)
{
	const struct gpu_tile tile = {GPU_WGMMA, 64, 96, 192, 128, 12, 1, 1};
	const struct gpu_tile convert = {GPU_CONVERT, 16, 16, 32, 32, 4, 1, 1};
	struct abi_bwd_args a = gradients_of(12, 192, 128);
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	a.sequences.seqlen_k_max = 501;
	a.dq_tile_rows = 64;
	a.dq_tile_floats = 64 * 192 + 64;
	for (a.kv_parts = 0; a.kv_parts <= 3; a.kv_parts += 3) {
		uint32_t parts = a.kv_parts > 1 ? 3 : 1;

		assert_int_equal(make("sm_90a", ABI_BWD_DQ_DK_DV, &bf16, &tile, &k), 0);
		assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
		assert_int_equal(grid[0], 6 * 2 * parts * 3);
		assert_int_equal(make("sm_90a", ABI_BWD_CONVERT_DQ, &bf16, &convert, &k), 0);
		assert_int_equal(k.block[0], GRID_CONVERT_THREADS);
		assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
		/* 5 tiles of 3 chunks a head; 501 rows of 24 + 16 eights, 128 of them a block. */
		assert_int_equal(grid[0], 5 * 3 * 12 + (parts > 1 ? 157 * 2 : 0));
		assert_int_equal(grid[2], 3);
	}
	/* What blocks of convert_dq count fits their integers, or is refused. */
	a.kv_parts = 3;
	a.sequences.seqlen_k_max = INT32_MAX / 40 + 1;
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 1);
}

/* Every block of every head once, those of a run of one head beside each other; the last run may be shorter. */
static void runs_of_blocks_are_all_there(void **state)
{
	(void)state;
	for (int n_x = 1; n_x < 40; n_x++)
		for (int n_y = 1; n_y < 6; n_y++)
			for (int run = 1; run < 50; run += 8) {
				bool seen[40][6] = {{false}};
				int last_x = 0, last_y = 0;

				for (int i = 0; i < n_x * n_y; i++) {
					int x, y;

					order_in_runs(n_x, n_y, run, i, &x, &y);
					assert_in_range(x, 0, n_x - 1);
					assert_in_range(y, 0, n_y - 1);
					assert_false(seen[x][y]);
					seen[x][y] = true;
					if (i > 0 && last_x % run < run - 1 && last_x < n_x - 1) {
						assert_int_equal(x, last_x + 1);
						assert_int_equal(y, last_y);
					}
					last_x = x, last_y = y;
				}
			}
}

/* Hopper's dot_do_o writes the order of keys, in blocks of their own before those that go by rows. */
static void intervals_are_put_in_order(void **state)
{
	const struct gpu_tile dot = {GPU_DOT, 16, 16, 32, 32, 4, 1, 1};
	const struct gpu_tile tile = {GPU_WGMMA, 64, 128, 128, 128, 8, 1, 1};
	struct traits traits = {.dtype = ABI_BF16, .mask_data = 1};
	struct abi_bwd_args a = gradients_of(8, 128, 128);
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	assert_int_equal(gpu_kernel_order_words(&tile, &a), 0);
	a.mask_data.intervals.data = &a;
	/* 4 blocks of keys, of 3 words each, in 3 lists: 36 words; of 2 heads each 72. */
	assert_int_equal(gpu_kernel_order_words(&tile, &a), 36);
	a.mask_data.intervals.stride_head = 1;
	assert_int_equal(gpu_kernel_order_words(&tile, &a), 72);
	a.order_words = 72;
	assert_int_equal(make("sm_90a", ABI_BWD_DOT_DO_O, &traits, &dot, &k), 0);
	assert_true(has_option(&k, "-DFMHA_MASK_DATA=1"));
	assert_int_equal(k.lds_bytes, GRID_ORDER_LDS);
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0],
			 (300 * 8 + 31) / 32 + 2); /* 16 lanes take 4 rows, of 128 threads */
	assert_int_equal(grid[2], 3);
	a.mask_data.n_endpoints = GRID_ORDER_ENDPOINTS + 2;
	assert_int_equal(gpu_kernel_order_words(&tile, &a), 0);
	a.mask_data.n_endpoints = GRID_ORDER_ENDPOINTS;
	assert_int_equal(gpu_kernel_order_words(&tile, &a), 72);
	a.sequences.seqlen_k_max = GRID_ORDER_MOST * GRID_ORDER_KEYS + 1;
	assert_int_equal(gpu_kernel_order_words(&tile, &a), 0);
	/* Bits have none, and nor has who has no such loop. */
	assert_int_equal(make("gfx942", ABI_BWD_DOT_DO_O, &traits, &dot, &k), 0);
	assert_true(has_option(&k, "-DFMHA_MASK_DATA=0"));
	traits.mask_data = 2;
	assert_int_equal(make("sm_90a", ABI_BWD_DOT_DO_O, &traits, &dot, &k), 0);
	assert_true(has_option(&k, "-DFMHA_MASK_DATA=0"));
}

static void small_families_have_kernels(void **state)
{
	const struct gpu_tile by_rows = {GPU_COMBINE, 16, 16, 32, 32, 4, 1, 1};
	const struct gpu_tile dot = {GPU_DOT, 16, 16, 32, 32, 4, 1, 1};
	struct abi_combine_args combine = {.nhead_q = 6, .hdim_v = 64, .n_splits = 4};
	struct abi_bwd_args bwd = {.nhead_q = 40, .nhead_k = 40, .hdim_q = 64, .hdim_v = 64};
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	combine.sequences.batch = 2;
	combine.sequences.seqlen_q_max = 3;
	assert_int_equal(make("gfx942", ABI_FWD_SPLITKV_COMBINE, &bf16, &by_rows, &k), 0);
	assert_int_equal(gpu_kernel_grid(&k, 132, &combine, grid), 0);
	assert_int_equal(grid[0], (3 * 6 + 3) / 4); /* a wave a row, four waves a block */
	assert_int_equal(make("gfx942", ABI_FWD_SPLITKV_COMBINE, &bf16, &dot, &k), 1);
	bwd.sequences.batch = 1;
	bwd.sequences.seqlen_q_max = 1;
	bwd.dsink = (float *)&bwd;
	assert_int_equal(make("sm_90a", ABI_BWD_DOT_DO_O, &bf16, &dot, &k), 0);
	assert_int_equal(gpu_kernel_grid(&k, 132, &bwd, grid), 0);
	assert_int_equal(grid[0], 40); /* one block a head for dSink, more than rows need */
	assert_int_equal(grid[1], 2);
}

/* Two blocks of decode's ring share a unit's LDS; where two stages do not fit there is no such tile. */
/* Blocks of four waves for those rows of which there are most: new keys, values where there are such, queries. */
static void appends_cover_the_rows(void **state)
{
	const struct gpu_tile tile = {GPU_APPEND, 16, 16, 32, 32, 4, 1, 1};
	float somewhere = 0;
	struct abi_appendkv_args a = {.sequences = {.batch = 3},
				      .seqlen_new = 128,
				      .nhead_k = 8,
				      .nhead_q = 32,
				      .hdim_q = 64,
				      .hdim_v = 128,
				      .dtype = ABI_E4M3,
				      .new_dtype = ABI_BF16};
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	assert_int_equal(make("sm_90a", ABI_FWD_APPENDKV, &bf16, &tile, &k), 0);
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_true(grid[0] >= 1024 / (4 * 8) && grid[1] == 1 && grid[2] == 3);
	a.v_new.data = &somewhere;
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_true(grid[0] == 1024 / (4 * 4) && grid[1] == 2); /* 8 lanes have 256 bytes */
	a.q_rotated.data = &somewhere;
	a.sequences.seqlen_q_max = 129;
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_true(grid[0] == 4128 / (4 * 8) && grid[1] == 3);
	a.hdim_q = 128;
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0], 4128 / (4 * 4));
	a.seqlen_new = 2048; /* each wave goes on with four times as many */
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0], 16384 / (4 * 16));
	a.seqlen_new = 16384; /* with eight times as many, where codes are made */
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0], 131072 / (4 * 32));
	assert_int_equal(make("gfx942", ABI_FWD_APPENDKV, &bf16, &tile, &k), 0);
	assert_int_equal(gpu_kernel_grid(&k, 304, &a, grid), 0);
	assert_int_equal(grid[0], 131072 / (4 * 64));
	a.hdim_q = a.hdim_v = 24; /* a row has two lanes, and no more rows than there are lanes */
	assert_int_equal(gpu_kernel_grid(&k, 304, &a, grid), 0);
	assert_int_equal(grid[0], 131072 / (4 * 64));
}

static void decode_fills_the_lds(void **state)
{
	const struct gpu_tile tile = {GPU_DECODE, 16, 64, 128, 128, 1, 4, 2};
	struct gpu_tile wide = tile;
	struct gpu_kernel k;

	(void)state;
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &bf16, &tile, &k), 0);
	assert_int_equal(k.lds_bytes, 16 * 256 + 3 * 64 * 512);
	assert_true(2 * (k.lds_bytes + 1024) <= 228 * 1024);
	assert_int_equal(make("sm_80", ABI_FWD, &bf16, &tile, &k), 0);
	assert_int_equal(k.lds_bytes, 16 * 256 + 2 * 64 * 512);
	assert_int_equal(make("sm_86", ABI_FWD, &bf16, &tile, &k), 1);
	wide.tile_n = 256; /* 64 keys a wave */
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &wide, &k), 1);
}

/* Blocks that cut the keys themselves are as many as find room, and are decode's alone. */
static void decode_shares_all_keys(void **state)
{
	const struct traits shared = {.dtype = ABI_BF16, .shares = 1}, cut = {.dtype = ABI_BF16};
	const struct gpu_tile decode = {GPU_DECODE, 16, 64, 128, 128, 1, 4, 2};
	const struct gpu_tile packed = {GPU_MMA_PACK, 16, 128, 128, 128, 1, 4, 1};
	struct abi_fwd_args a = {.nhead_q = 32, .nhead_k = 8, .n_splits = 6, .split_size = 2048};
	struct gpu_kernel k, other;
	uint32_t grid[3];

	(void)state;
	a.sequences.batch = 16;
	a.sequences.seqlen_q_max = 1;
	a.sequences.seqlen_k_max = 12288;
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &cut, &packed, &k), 0);
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &shared, &packed, &k), 1);
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &cut, &decode, &other), 0);
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &shared, &decode, &k), 0);
	assert_string_not_equal(k.build.name, other.build.name);
	assert_int_equal(gpu_kernel_grid(&other, 132, &a, grid), 0);
	assert_int_equal(grid[0] * grid[1] * grid[2], 6 * 8 * 16);
	a.split_size = 0;
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0], 264);
	assert_int_equal(grid[1] * grid[2], 1);
}

/* Only Hopper's loop has another way than the exact one. */
static void soft_caps_may_be_approximate(void **state)
{
	const struct traits capped = {.dtype = ABI_BF16, .mask = 1, .softcap = 1},
			    approximate = {
				    .dtype = ABI_BF16, .mask = 1, .softcap = 1, .cap_approx = 1};
	const struct gpu_tile hopper = {GPU_WGMMA, 128, 128, 128, 128, 8, 1, 1},
			      wide = {GPU_WGMMA, 128, 64, 256, 256, 8, 1, 1},
			      general = {GPU_MMA, 128, 64, 128, 128, 4, 1, 1};
	struct gpu_kernel k;

	(void)state;
	assert_int_equal(make("sm_90a", ABI_FWD, &capped, &hopper, &k), 0);
	assert_true(has_option(&k, "-DFMHA_CAP_APPROX=0"));
	assert_int_equal(make("sm_90a", ABI_FWD, &approximate, &hopper, &k), 0);
	assert_true(has_option(&k, "-DFMHA_CAP_APPROX=1"));
	assert_non_null(strstr(k.build.name, "_cap_logits_approx"));
	assert_int_equal(make("sm_90a", ABI_FWD, &capped, &wide, &k), 0);
	assert_int_equal(k.tile.tile_n, 64);
	assert_int_equal(make("sm_90a", ABI_FWD, &approximate, &wide, &k), 0);
	assert_int_equal(k.tile.tile_n, 80);
	assert_int_equal(make("sm_90a", ABI_FWD, &approximate, &general, &k), 0);
	assert_true(has_option(&k, "-DFMHA_CAP_APPROX=0"));
}

/* One tile, of heads of one size, with the features that latents come with. */
static void latents_fill_hopper(void **state)
{
	static const struct traits others[] = {{.dtype = ABI_BF16, .bias = 1},
					       {.dtype = ABI_BF16, .softcap = 1},
					       {.dtype = ABI_BF16, .descale = 1},
					       {.dtype = ABI_BF16, .dropout = 1},
					       {.dtype = ABI_BF16, .mask_data = 1},
					       {.dtype = ABI_BF16, .narrow = 1},
					       {.dtype = ABI_E4M3},
					       {.dtype = ABI_BF16, .chosen = 1, .mask = 1},
					       {.dtype = ABI_BF16, .narrow = 2, .latent_fp8 = 1}};
	static const struct traits coded[] = {
		{.dtype = ABI_BF16, .narrow = 1, .latent_fp8 = 1, .mask = 1},
		{.dtype = ABI_F16, .narrow = 1, .latent_fp8 = 1, .paged = 1},
		{.dtype = ABI_F16, .narrow = 1, .latent_fp8 = 1, .paged = 1, .chosen = 1}};
	const struct traits coded_shares = {
		.dtype = ABI_BF16, .narrow = 1, .latent_fp8 = 1, .paged = 1, .shares = 1};
	const struct traits chosen = {.dtype = ABI_BF16, .paged = 1, .chosen = 1},
			    chosen_shares = {
				    .dtype = ABI_BF16, .paged = 1, .chosen = 1, .shares = 1};
	const struct traits shared = {.dtype = ABI_F16, .mask = 1, .paged = 1, .shares = 1};
	const struct gpu_tile latents = {GPU_LATENT, 64, 64, 576, 512, 4, 2, 1};
	struct gpu_tile tile = latents;
	struct gpu_kernel k;

	(void)state;
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &latents, &k), 0);
	assert_int_equal(k.block[0], 3 * 128);
	assert_true(k.lds_bytes > 3 * 64 * 576 * 2 && k.lds_bytes <= 227 * 1024);
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &shared, &latents, &k), 0);
	assert_int_equal(make("sm_90a", ABI_FWD_PAGEDKV, &chosen, &latents, &k), 0);
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &chosen, &latents, &k), 0);
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &chosen_shares, &latents, &k), 1);
	for (size_t i = 0; i < sizeof(coded) / sizeof(coded[0]); i++)
		assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &coded[i], &latents, &k), 0);
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &coded_shares, &latents, &k), 1);
	assert_int_equal(make("sm_80", ABI_FWD, &bf16, &latents, &k), 1);
	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
		assert_int_equal(make("sm_90a", ABI_FWD, &others[i], &latents, &k), 1);
	tile.hdim_q = 512;
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 1);
	tile = latents;
	tile.tile_n = 32;
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 1);
}

/* One tile of 64 rows and keys; without splits blocks go by two, whatever there is for the second. */
static void wide_heads_have_clusters(void **state)
{
	static const struct traits others[] = {
		{.dtype = ABI_BF16, .bias = 1},    {.dtype = ABI_BF16, .bias = 2},
		{.dtype = ABI_BF16, .descale = 1}, {.dtype = ABI_BF16, .dropout = 1},
		{.dtype = ABI_BF16, .narrow = 1},  {.dtype = ABI_BF16, .mask_data = 1},
		{.dtype = ABI_BF16, .chosen = 1},  {.dtype = ABI_E4M3}};
	const struct traits capped = {.dtype = ABI_F16, .mask = 1, .softcap = 1, .paged = 1},
			    shared = {.dtype = ABI_BF16, .mask = 1, .paged = 1, .shares = 1};
	const struct gpu_tile wide = {GPU_WIDE, 64, 64, 512, 512, 4, 2, 1};
	struct abi_fwd_args a = {.sequences = {.batch = 3, .seqlen_q_max = 65, .seqlen_k_max = 900},
				 .nhead_q = 8,
				 .nhead_k = 4,
				 .n_splits = 2,
				 .split_size = 512};
	struct gpu_tile tile = wide;
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	assert_int_equal(make("sm_90a", ABI_FWD_PAGEDKV, &capped, &wide, &k), 0);
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &shared, &wide, &k), 0);
	assert_int_equal(make("sm_80", ABI_FWD, &bf16, &wide, &k), 1);
	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
		assert_int_equal(make("sm_90a", ABI_FWD, &others[i], &wide, &k), 1);
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &wide, &k), 0);
	assert_int_equal(k.block[0], 3 * 128);
	assert_true(k.lds_bytes > 3 * 64 * 512 * 2 && k.lds_bytes <= 227 * 1024);
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0], 4); /* 130 rows of two heads */
	assert_int_equal(grid[1], 4);
	assert_int_equal(grid[2], 3);
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &bf16, &wide, &k), 0);
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	assert_int_equal(grid[0], 3 * 2);
	tile.hdim_q = tile.hdim_v = 384;
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 0);
	tile.hdim_v = 512;
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 1);
	tile.hdim_q = tile.hdim_v = 256;
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 1);
	tile.hdim_q = tile.hdim_v = 448; /* halves are no whole slabs */
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 1);
	tile = wide;
	tile.tile_n = 32;
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 1);
}

/* Keys of 8 bits take half of the room, where the conversion is one instruction and rows are whole
 * swizzles. */
static void decode_takes_keys_of_8_bits(void **state)
{
	const struct traits e4m3 = {.dtype = ABI_E4M3}, e5m2 = {.dtype = ABI_E5M2};
	struct gpu_tile tile = {GPU_DECODE, 16, 64, 128, 128, 1, 4, 2};
	struct gpu_kernel k;

	(void)state;
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV, &e4m3, &tile, &k), 0);
	assert_int_equal(k.lds_bytes, 16 * 256 + 6 * 64 * 256);
	assert_int_equal(make("sm_80", ABI_FWD, &e4m3, &tile, &k), 1);
	assert_int_equal(make("sm_90a", ABI_FWD, &e5m2, &tile, &k), 1);
	tile.hdim_q = tile.hdim_v = 96;
	assert_int_equal(make("sm_90a", ABI_FWD, &e4m3, &tile, &k), 1);
}

/* Integers lie in caches: loops have them under queries of 16 bits, and rows on their way there. */
static void integers_are_narrow(void **state)
{
	static const struct gpu_tile rows = {GPU_WGMMA, 128, 128, 128, 128, 8, 1, 1},
				     few = {GPU_DECODE, 16, 128, 128, 128, 1, 4, 2},
				     general = {GPU_MMA, 64, 64, 128, 128, 4, 1, 2},
				     append = {GPU_APPEND, 16, 16, 32, 32, 4, 1, 1},
				     staged = {GPU_AMD, 256, 64, 128, 128, 8, 1, 1};
	const struct traits integers = {.dtype = ABI_I8}, narrow = {.dtype = ABI_BF16, .narrow = 3},
			    narrow_fp8 = {.dtype = ABI_BF16, .narrow = 1};
	const struct gpu_tile *tiles[] = {&rows, &few, &general};
	struct gpu_kernel k, fp8;

	(void)state;
	for (int i = 0; i < 3; i++) {
		assert_int_equal(make("sm_90a", ABI_FWD, &narrow, tiles[i], &k), 0);
		assert_int_equal(make("sm_90a", ABI_FWD, &narrow_fp8, tiles[i], &fp8), 0);
		assert_true(has_option(&k, "-DFMHA_NARROW=3"));
		assert_true(k.lds_bytes == fp8.lds_bytes && k.block[0] == fp8.block[0]);
		assert_int_equal(make("sm_90a", ABI_FWD, &integers, tiles[i], &k), 1);
	}
	assert_int_equal(make("gfx942", ABI_FWD, &narrow, &staged, &k), 1);
	assert_int_equal(make("gfx942", ABI_FWD_APPENDKV, &integers, &append, &k), 0);
	assert_non_null(strstr(k.build.name, "_i8_"));
	assert_true(has_option(&k, "-DFMHA_DTYPE=8"));
}

/* As many waves share a row as find parts to read; the rows that are left share the block. */
static void merges_of_many_parts_share_a_row(void **state)
{
	const struct gpu_tile tile = {GPU_COMBINE, 16, 16, 32, 32, 16, 1, 1};
	static const struct {
		int n_parts, waves;
	} cases[] = {{1, 1}, {8, 1}, {9, 2}, {33, 8}, {128, 16}, {1024, 16}};
	struct abi_combine_args combine = {.nhead_q = 40, .hdim_v = 64};
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	combine.sequences.batch = combine.sequences.seqlen_q_max = 1;
	assert_int_equal(make("sm_80", ABI_FWD_SPLITKV_COMBINE, &bf16, &tile, &k), 0);
	assert_int_equal(k.overlaps, 0);
	assert_int_equal(make("sm_90a", ABI_FWD_SPLITKV_COMBINE, &bf16, &tile, &k), 0);
	assert_int_equal(k.overlaps, 1);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		int rows = 16 / cases[i].waves;

		combine.n_splits = cases[i].n_parts;
		assert_int_equal(grid_combine_waves(&combine, 32, 16), cases[i].waves);
		assert_int_equal(gpu_kernel_grid(&k, 132, &combine, grid), 0);
		assert_int_equal(grid[0], (40 + rows - 1) / rows);
	}
	/* Rows that fill the card have a wave each, those that half do two. */
	combine.n_splits = 64;
	combine.sequences.batch = 52;
	assert_int_equal(grid_combine_waves(&combine, 32, 16), 1);
	combine.sequences.batch = 26;
	assert_int_equal(grid_combine_waves(&combine, 32, 16), 2);
	/* Where the order has to be the same in any batch, whatever the number of parts: one. */
	combine.in_order = 1;
	for (combine.sequences.batch = 1; combine.sequences.batch <= 64;
	     combine.sequences.batch *= 8)
		for (combine.n_splits = 1; combine.n_splits <= 1024; combine.n_splits *= 4)
			assert_int_equal(grid_combine_waves(&combine, 32, 16), 1);
}

/* Of 800 tiles on 132 blocks the last 8 are cut, where there is room for all of their parts and a whole round before. */
static void pieces_are_cut_where_parts_have_room(void **state)
{
	struct abi_rest rest = {.n_splits = 8, .n_parts = 64};

	(void)state;
	assert_int_equal(grid_whole_pieces(&rest, 800, 132), 792);
	assert_int_equal(grid_whole_pieces(&rest, 792, 132), 792);
	assert_int_equal(grid_whole_pieces(&rest, 100, 132), 100);
	rest.n_parts = 63;
	assert_int_equal(grid_whole_pieces(&rest, 800, 132), 800);
	rest = (struct abi_rest){.n_parts = 64};
	assert_int_equal(grid_whole_pieces(&rest, 800, 132), 800);
}

/* Its blocks may begin while the stage before still runs: whose kernel waits for that itself. */
static void what_waits_overlaps(void **state)
{
	static const struct {
		const char *arch;
		struct gpu_tile tile;
		uint32_t overlaps;
	} cases[] = {{"sm_90a", {GPU_DECODE, 16, 64, 128, 128, 1, 4, 2}, 1},
		     {"sm_90a", {GPU_WGMMA, 128, 128, 128, 128, 8, 1, 1}, 1},
		     {"sm_90a", {GPU_MMA_PACK, 16, 128, 128, 128, 1, 4, 1}, 0},
		     {"sm_80", {GPU_DECODE, 16, 64, 128, 128, 1, 4, 2}, 0}};
	struct gpu_kernel k;

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		assert_int_equal(make(cases[i].arch, ABI_FWD_SPLITKV, &bf16, &cases[i].tile, &k),
				 0);
		assert_int_equal(k.overlaps, cases[i].overlaps);
	}
}

/* 8-bit values lie in LDS twice, once in 16 bits; a bias beside the keys. */
static void warpgroups_fit_or_are_refused(void **state)
{
	const struct gpu_tile wide = {GPU_WGMMA, 128, 192, 128, 128, 8, 1, 1};
	const struct gpu_tile narrow = {GPU_WGMMA, 128, 128, 128, 128, 8, 1, 1};
	const struct traits bias = {.dtype = ABI_BF16, .bias = 1};
	const struct traits fp8 = {.dtype = ABI_E4M3, .descale = 1};
	const struct traits other_fp8 = {.dtype = ABI_E5M2};
	struct gpu_kernel k;

	(void)state;
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &wide, &k), 0);
	assert_int_equal(k.lds_bytes, (128 + 4 * 192) * 256 + 128);
	assert_int_equal(make("sm_90a", ABI_FWD, &bias, &wide, &k), 1);
	assert_int_equal(make("sm_90a", ABI_FWD, &bias, &narrow, &k), 0);
	assert_int_equal(k.lds_bytes, (128 + 4 * 128) * 256 + 2 * 128 * 256 + 128);
	assert_int_equal(make("sm_90a", ABI_FWD, &fp8, &wide, &k), 0);
	assert_int_equal(k.lds_bytes, (2 * 128 + 4 * 192 + 4 * 192) * 128 + 128);
	assert_int_equal(make("sm_90a", ABI_FWD, &other_fp8, &wide, &k), 1);
}

/* Half of the LDS where matrix units multiply e4m3, and a factor a head needs no logits. */
static void amd_loops_multiply_e4m3(void **state)
{
	const struct gpu_tile rdna = {GPU_AMD, 128, 64, 128, 128, 8, 1, 1};
	const struct gpu_tile cdna = {GPU_AMD, 256, 64, 128, 128, 8, 1, 1};
	const struct traits e4m3 = {.dtype = ABI_E4M3, .descale = 1};
	const struct traits refused[] = {{.dtype = ABI_E5M2}, {.dtype = ABI_E4M3, .dropout = 1}};
	struct gpu_tile odd = cdna;
	struct gpu_kernel k;

	(void)state;
	assert_int_equal(make("gfx1201", ABI_FWD, &e4m3, &rdna, &k), 0);
	assert_int_equal(k.lds_bytes, 2 * 64 * 256);
	assert_true(has_option(&k, "-DFMHA_DESCALE=1") && has_option(&k, "-DFMHA_LOGITS=0"));
	assert_int_equal(make("gfx950", ABI_FWD, &e4m3, &cdna, &k), 0);
	assert_int_equal(make("gfx1100", ABI_FWD, &e4m3, &rdna, &k), 1);
	assert_int_equal(make("gfx942", ABI_FWD, &e4m3, &cdna, &k), 0);
	assert_int_equal(make("gfx90a", ABI_FWD, &e4m3, &cdna, &k), 1);
	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++)
		assert_int_equal(make("gfx1201", ABI_FWD, &refused[i], &rdna, &k), 1);
	odd.hdim_q = 96; /* 64 values at once */
	assert_int_equal(make("gfx950", ABI_FWD, &e4m3, &odd, &k), 1);
}

/* Decode's waves share a tile's keys: as many as a product sums are a wave's at the least. */
static void amd_decode_multiplies_e4m3(void **state)
{
	const struct gpu_tile tile = {GPU_AMD_DECODE, 16, 128, 128, 128, 1, 4, 2};
	const struct traits e4m3 = {.dtype = ABI_E4M3, .descale = 1, .paged = 1};
	const struct traits e5m2 = {.dtype = ABI_E5M2};
	struct gpu_tile odd = tile;
	struct gpu_kernel k;

	(void)state;
	assert_int_equal(make("gfx942", ABI_FWD, &e4m3, &tile, &k), 0);
	assert_true(has_option(&k, "-DFMHA_DESCALE=1") && has_option(&k, "-DFMHA_LOGITS=0"));
	assert_int_equal(make("gfx950", ABI_FWD_SPLITKV, &e4m3, &tile, &k), 0);
	assert_int_equal(make("gfx1201", ABI_FWD_PAGEDKV, &e4m3, &tile, &k), 0);
	assert_int_equal(make("gfx942", ABI_FWD, &e5m2, &tile, &k), 1);
	assert_int_equal(make("gfx90a", ABI_FWD, &e4m3, &tile, &k), 1);
	assert_int_equal(make("gfx1100", ABI_FWD, &e4m3, &tile, &k), 1);
	odd.tile_n = 64; /* 16 keys a wave */
	assert_int_equal(make("gfx942", ABI_FWD, &e4m3, &odd, &k), 1);
	assert_int_equal(make("gfx1201", ABI_FWD, &e4m3, &odd, &k), 0);
	odd = tile;
	odd.hdim_v = 160; /* ten bytes a lane */
	assert_int_equal(make("gfx942", ABI_FWD, &e4m3, &odd, &k), 1);
	odd = tile;
	odd.hdim_q = 96; /* one chunk of 16 bytes and a half a lane */
	assert_int_equal(make("gfx942", ABI_FWD, &e4m3, &odd, &k), 1);
	assert_int_equal(make("gfx1201", ABI_FWD, &e4m3, &odd, &k), 0);
	odd = tile;
	odd.tile_n = 256; /* 64 keys a wave, in up to four pages */
	assert_int_equal(make("gfx942", ABI_FWD, &e4m3, &odd, &k), 1);
}

/* Of the blocks that a device has room for, or one a piece where those are fewer. */
static void pieces_of_packed_sequences_are_bounded(void **state)
{
	const struct gpu_tile tile = {GPU_WGMMA, 128, 128, 128, 128, 8, 1, 1};
	struct abi_fwd_args a = {.nhead_q = 3, .nhead_k = 3, .hdim_q = 128, .hdim_v = 128};
	struct gpu_kernel k;
	uint32_t grid[3];

	(void)state;
	a.sequences.batch = 4;
	a.sequences.seqlen_q_max = 1000;
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &tile, &k), 0);
	assert_int_equal(gpu_kernel_grid(&k, 1000, &a, grid), 0);
	assert_int_equal(grid[0], 8 * 4 * 3);
	assert_int_equal(gpu_kernel_grid(&k, 80, &a, grid), 0);
	assert_int_equal(grid[0], 80);
	/* Lengths 1000, 1, 1, 128 have 8 + 1 + 1 + 1 tiles of rows; any have at most 8 + 4. */
	a.sequences.seqstart_q = (const int32_t *)64;
	a.sequences.total_q = 1130;
	assert_int_equal(gpu_kernel_grid(&k, 1000, &a, grid), 0);
	assert_int_equal(grid[0], (8 + 4) * 3);
	assert_int_equal(gpu_kernel_grid(&k, 20, &a, grid), 0);
	assert_int_equal(grid[0], 20);
}

/* Every tile of every split has one block. */
static void forward_blocks_cover_the_rows(void **state)
{
	struct abi_fwd_args a = {.nhead_q = 12, .nhead_k = 4, .n_splits = 3};
	uint8_t seen[16][3] = {{0}};
	struct grid_forward g;

	(void)state;
	a.sequences.seqlen_q_max = 300;
	g = grid_forward_of(&a, 1, 1, 0, 64);
	assert_int_equal(g.n_tiles, (300 * 3 + 63) / 64);
	for (grid_int x = 0; x < g.n_tiles * g.n_splits; x++)
		seen[grid_forward_tile(g, x)][x % g.n_splits]++;
	for (grid_int i = 0; i < g.n_tiles * g.n_splits; i++)
		assert_int_equal(seen[i / 3][i % 3], 1);
	/* Not split, whatever the arguments say; not packed. */
	g = grid_forward_of(&a, 0, 0, 0, 64);
	assert_int_equal(g.n_tiles * g.n_splits, (300 + 63) / 64);
}

static void backward_blocks_cover_keys_and_rows(void **state)
{
	struct abi_bwd_args a = {.nhead_q = 8, .nhead_k = 2};
	uint8_t rows[16] = {0}, biases[16][16] = {{0}};
	struct grid_backward g;
	grid_int x;

	(void)state;
	a.sequences.seqlen_q_max = 300;
	a.sequences.seqlen_k_max = 500;
	a.sequences.batch = 3;
	a.dbias.stride_seq = 1;
	g = grid_backward_of(&a, 32, 64, 128, 1, 1);
	assert_int_equal(g.n_key_blocks, 2 * 8);
	for (x = g.n_key_blocks; x < g.n_key_blocks + g.n_row_blocks; x++)
		rows[grid_backward_row_tile(g, x)]++;
	for (grid_int i = 0; i < (300 + 127) / 128; i++)
		assert_int_equal(rows[i], 1);
	for (; x < g.n_key_blocks + g.n_row_blocks + g.n_bias_blocks; x++) {
		grid_int tile = grid_backward_bias_tile(g, x);

		biases[tile % g.n_keys][tile / g.n_keys]++;
	}
	for (grid_int i = 0; i < g.n_keys * g.n_rows; i++)
		assert_int_equal(biases[i % g.n_keys][i / g.n_keys], 1);
}

/* What a launch does not take, or a kernel's 32 bits do not count to. */
static void grids_beyond_reach_are_refused(void **state)
{
	const struct gpu_tile dot = {GPU_DOT, 16, 16, 32, 32, 4, 1, 1};
	struct abi_fwd_args a = {.nhead_q = 64, .nhead_k = 1, .hdim_q = 128, .hdim_v = 128};
	struct abi_bwd_args bwd = {.nhead_q = 128, .nhead_k = 128};
	struct gpu_kernel k;
	uint32_t grid[3] = {1, 1, 1};

	(void)state;
	a.sequences.batch = 65535;
	a.sequences.seqlen_q_max = (1 << 25) - 1;
	assert_int_equal(make("sm_90a", ABI_FWD, &bf16, &mma_pack, &k), 0);
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 0);
	a.sequences.batch = 65536;
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 1);
	assert_int_equal(grid[0] | grid[1] | grid[2], 0);
	a.sequences.batch = 1;
	a.sequences.seqlen_q_max = 1 << 25; /* times 64 heads side by side: 2^31 rows */
	assert_int_equal(gpu_kernel_grid(&k, 132, &a, grid), 1);
	assert_int_equal(make("gfx942", ABI_BWD_DOT_DO_O, &bf16, &dot, &k), 0);
	bwd.sequences.batch = 1;
	bwd.sequences.seqlen_q_max = (1 << 23) -
				     1; /* times 128 heads, in blocks of 64 rows and 256 threads */
	assert_int_equal(gpu_kernel_grid(&k, 132, &bwd, grid), 0);
	assert_int_equal(grid[0], (((1u << 23) - 1) * 128 + 63) / 64);
	assert_true((uint64_t)grid[0] * k.block[0] <= UINT32_MAX);
	bwd.sequences.seqlen_q_max = 1 << 23;
	assert_int_equal(gpu_kernel_grid(&k, 132, &bwd, grid), 1);
	assert_int_equal(make("sm_90a", ABI_BWD_DOT_DO_O, &bf16, &dot, &k), 0);
	bwd.sequences.seqlen_q_max = (1 << 24) - 1;
	assert_int_equal(gpu_kernel_grid(&k, 132, &bwd, grid), 0);
	assert_int_equal(grid[0], (((1u << 24) - 1) * 128 + 31) / 32);
	bwd.sequences.seqlen_q_max = 1 << 24;
	assert_int_equal(gpu_kernel_grid(&k, 132, &bwd, grid), 1);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(archs_have_cores),
		cmocka_unit_test(every_arch_has_a_peak),
		cmocka_unit_test(few_rows_are_packed),
		cmocka_unit_test(traits_make_other_kernels),
		cmocka_unit_test(tails_make_other_kernels),
		cmocka_unit_test(tiles_that_do_not_fit_are_refused),
		cmocka_unit_test(masks_as_data_go_with_every_head),
		cmocka_unit_test(backward_covers_keys_and_rows),
		cmocka_unit_test(a_bias_that_repeats_has_blocks_for_its_gradient),
		cmocka_unit_test(warpgroups_sum_heads_in_a_block),
		cmocka_unit_test(wide_heads_have_warpgroups_with_roles),
		cmocka_unit_test(heads_in_parts_have_blocks),
		cmocka_unit_test(runs_of_blocks_are_all_there),
		cmocka_unit_test(intervals_are_put_in_order),
		cmocka_unit_test(small_families_have_kernels),
		cmocka_unit_test(appends_cover_the_rows),
		cmocka_unit_test(decode_fills_the_lds),
		cmocka_unit_test(decode_shares_all_keys),
		cmocka_unit_test(soft_caps_may_be_approximate),
		cmocka_unit_test(latents_fill_hopper),
		cmocka_unit_test(wide_heads_have_clusters),
		cmocka_unit_test(decode_takes_keys_of_8_bits),
		cmocka_unit_test(integers_are_narrow),
		cmocka_unit_test(merges_of_many_parts_share_a_row),
		cmocka_unit_test(pieces_are_cut_where_parts_have_room),
		cmocka_unit_test(what_waits_overlaps),
		cmocka_unit_test(warpgroups_fit_or_are_refused),
		cmocka_unit_test(amd_loops_multiply_e4m3),
		cmocka_unit_test(amd_decode_multiplies_e4m3),
		cmocka_unit_test(pieces_of_packed_sequences_are_bounded),
		cmocka_unit_test(forward_blocks_cover_the_rows),
		cmocka_unit_test(backward_blocks_cover_keys_and_rows),
		cmocka_unit_test(grids_beyond_reach_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
