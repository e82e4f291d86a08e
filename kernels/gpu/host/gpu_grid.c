/* SPDX-License-Identifier: MIT */
/* gpu_grid.c: the blocks of a launch, as grid.h cuts the work. */
#include <kernels/gpu_kernel.h>

#include "core/grid.h"
#include "general/prepare.h"

#define MOST_YZ 65535

/* @x: blocks of a head, @n: what they count. */
static int set_grid(const struct gpu_kernel *k, grid_int x, grid_int y, grid_int z, grid_int n,
		    uint32_t ret_grid[3])
{
	ret_grid[0] = ret_grid[1] = ret_grid[2] = 0;
	if (n > INT32_MAX || x > k->most_x || y > MOST_YZ || z > MOST_YZ)
		return 1;
	ret_grid[0] = (uint32_t)x;
	ret_grid[1] = (uint32_t)y;
	ret_grid[2] = (uint32_t)z;
	return 0;
}

/* Blocks that share all keys: as many as find room at once, in whole clusters. */
static int set_shares(const struct gpu_kernel *k, uint32_t units, uint32_t ret_grid[3])
{
	grid_int blocks = (grid_int)units * k->tile.blocks_per_cu;

	if (k->paired)
		blocks -= blocks % GRID_CLUSTER;
	return set_grid(k, blocks, 1, 1, 0, ret_grid);
}

static int set_forward(const struct gpu_kernel *k, const struct abi_fwd_args *a,
		       uint32_t ret_grid[3])
{
	int pack = gpu_pipelines[k->tile.pipeline].pack;
	struct grid_forward g = grid_forward_of(a, pack, k->family == ABI_FWD_SPLITKV,
						a->chosen.n > 0, k->tile.tile_m);

	if (k->tile.pipeline == GPU_WIDE && k->family != ABI_FWD_SPLITKV)
		g.n_tiles = grid_clusters(g.n_tiles) * GRID_CLUSTER;
	return set_grid(k, g.n_tiles * g.n_splits, pack ? a->nhead_k : a->nhead_q,
			a->sequences.batch, g.n_tiles * k->tile.tile_m, ret_grid);
}

/* Blocks that stay and take piece after piece, of a split each. */
static int set_pieces(const struct gpu_kernel *k, uint32_t units, const struct abi_fwd_args *a,
		      uint32_t ret_grid[3])
{
	int is_split = k->family == ABI_FWD_SPLITKV;
	int heads = is_split ? grid_heads_of_tile(a, k->tile.tile_m) : 1;
	grid_int n_splits = is_split && a->n_splits > 1 ? a->n_splits : 1;
	grid_int pieces = grid_pieces(a, k->tile.tile_m / heads, a->nhead_q / heads);
	grid_int places = units / n_splits > 0 ? units / n_splits : 1;
	grid_int blocks = pieces < places ? pieces : places;

	/* a round further is looked at */
	return set_grid(k, blocks, n_splits, 1, pieces + blocks, ret_grid);
}

static int set_backward(const struct gpu_kernel *k, const struct abi_bwd_args *a,
			uint32_t ret_grid[3])
{
	if (k->tile.pipeline == GPU_WGMMA) { /* heads of a part are summed in a block */
		grid_int tiles = grid_ceil(a->sequences.seqlen_k_max, k->tile.tile_n);

		return set_grid(k, tiles * grid_kv_parts(a) * a->sequences.batch, 1, 1,
				tiles * k->tile.tile_n, ret_grid);
	}
	struct grid_backward g = grid_backward_of(a, k->tile.tile_m, k->tile.tile_n, k->dq_tile_n,
						  k->split_dkdv, k->dbias_sum);

	return set_grid(k, g.n_key_blocks + g.n_row_blocks + g.n_bias_blocks, a->nhead_q,
			a->sequences.batch, 0, ret_grid);
}

static int set_rows(const struct gpu_kernel *k, int rows_of_block, grid_int rows, grid_int pieces,
		    grid_int batch, uint32_t ret_grid[3])
{
	grid_int blocks = grid_ceil(rows, rows_of_block);

	return set_grid(k, blocks, pieces, batch, blocks * rows_of_block, ret_grid);
}

static int set_combine(const struct gpu_kernel *k, const struct abi_combine_args *a,
		       uint32_t ret_grid[3])
{
	int waves = k->tile.waves_m, wave = (int)k->block[0] / waves;
	int piece = 4 * grid_combine_lanes(a->hdim_v, wave);

	return set_rows(k, waves / grid_combine_waves(a, wave, waves),
			grid_combine_rows(a) * a->nhead_q,
			grid_ceil(a->hdim_v, piece * grid_combine_pieces(k->wide, wave)),
			a->sequences.batch, ret_grid);
}

static int set_append(const struct gpu_kernel *k, const struct abi_appendkv_args *a,
		      uint32_t ret_grid[3])
{
	int wave = (int)k->block[0] / GRID_APPEND_WAVES;
	grid_int blocks = grid_append_blocks(a, wave);
	int kinds = a->q_rotated.data ? GRID_APPEND_Q + 1
		    : a->v_new.data   ? GRID_APPEND_V + 1
				      : GRID_APPEND_K + 1;

	/* the last block's rows are counted beyond those that there are */
	return set_grid(k, blocks, kinds, a->sequences.batch, blocks * GRID_APPEND_WAVES * wave,
			ret_grid);
}

/* A second row of blocks, one a head, sums dSink. */
static int set_dot(const struct gpu_kernel *k, const struct abi_bwd_args *a, uint32_t ret_grid[3])
{
	grid_int of_block = k->block[0] / GRID_DOT_LANES * GRID_DOT_ROWS;
	grid_int x = grid_ceil(grid_query_rows(&a->sequences, a->nhead_q), of_block);

	if (a->dsink && x < a->nhead_q)
		x = a->nhead_q;
	return set_grid(k, x + grid_orders(a), a->dsink ? 2 : 1, a->sequences.batch, x * of_block,
			ret_grid);
}

int gpu_kernel_grid(const struct gpu_kernel *kernel, uint32_t units, const void *args,
		    uint32_t ret_grid[3])
{
	const struct abi_appendkv_args *append = args;
	const struct abi_bwd_args *bwd = args;
	int waves = kernel->tile.waves_m;

	switch (kernel->family) {
	case ABI_FWD_SPLITKV_COMBINE:
		return set_combine(kernel, args, ret_grid);
	case ABI_FWD_APPENDKV:
		if (append->widens)
			return set_rows(kernel, waves, 2 * grid_widen_runs(append), 1,
					append->few_rows ? append->n_places
							 : append->sequences.batch,
					ret_grid);
		return set_append(kernel, append, ret_grid);
	case ABI_BWD_DQ_DK_DV:
		return set_backward(kernel, bwd, ret_grid);
	case ABI_BWD_DOT_DO_O:
		return set_dot(kernel, bwd, ret_grid);
	case ABI_BWD_CONVERT_DQ:
		if (bwd->dq_tile_rows)
			return set_grid(kernel,
					grid_dq_blocks(bwd) + grid_kv_blocks(bwd) * bwd->nhead_k, 1,
					bwd->sequences.batch,
					grid_kv_blocks(bwd) * GRID_CONVERT_THREADS, ret_grid);
		return set_rows(kernel, waves, grid_query_rows(&bwd->sequences, bwd->nhead_q), 1,
				bwd->sequences.batch, ret_grid);
	default:
		if (kernel->tile.pipeline == GPU_WGMMA)
			return set_pieces(kernel, units, args, ret_grid);
		return kernel->shares ? set_shares(kernel, units, ret_grid)
				      : set_forward(kernel, args, ret_grid);
	}
}

int32_t gpu_kernel_order_words(const struct gpu_tile *tile, const struct abi_bwd_args *a)
{
	grid_int n = grid_ceil(a->sequences.seqlen_k_max, GRID_ORDER_KEYS);
	grid_int words = (grid_int)(sizeof(struct abi_key_block) / sizeof(abi_i32)) * n *
			 grid_order_heads(a) * a->sequences.batch;

	if (!a->mask_data.intervals.data || a->mask_data.n_endpoints > GRID_ORDER_ENDPOINTS ||
	    tile->tile_n != GRID_ORDER_KEYS || n > GRID_ORDER_MOST || words > INT32_MAX / 2)
		return 0;
	return (int32_t)grid_ceil(words, 4) * 4; /* d stays where 16 bytes begin */
}

/* One block for the sequences, and for page numbers as many as have one a thread. */
void gpu_kernel_grid_prepare(uint32_t units, struct abi_prepare_args *a, uint32_t ret_grid[3])
{
	abi_i64 words = a->cache.n_page_indices + (abi_i64)a->table_rows * a->cache.max_blocks;
	abi_i64 blocks = 1 + (words + PREPARE_THREADS - 1) / PREPARE_THREADS;

	a->grid = (abi_i32)(blocks < units ? blocks : units);
	if (a->grid < 2 && blocks > 1)
		a->grid = 2;
	ret_grid[0] = (uint32_t)a->grid;
	ret_grid[1] = ret_grid[2] = 1;
}
