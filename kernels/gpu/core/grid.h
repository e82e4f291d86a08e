/* SPDX-License-Identifier: MIT */
/*
 * grid.h: which blocks a kernel is launched with, and what each of them does: for the host that
 * launches, and for the kernels. Plain functions that C and device C++ both read.
 *
 * x counts what a head is cut into (without tiles: what a batch entry is), y heads, z batch
 * entries.
 */
#ifndef FMHA_GPU_GRID_H
#define FMHA_GPU_GRID_H

#include <kernels/traits.h>

#ifdef __cplusplus
#define GRID_FN DEV
typedef abi_i32 grid_int;
#else
#define GRID_FN static inline
/* The host counts further than kernels do, and launches nothing whose counts are too much for them. */
typedef abi_i64 grid_int;
#endif

GRID_FN grid_int grid_ceil(grid_int a, grid_int b)
{
	return (a + b - 1) / b;
}

/* ---- forward: tiles of rows of a head, or of a group's heads side by side; where each row has
 * chosen its keys, of a row's heads ---- */

struct grid_forward {
	grid_int n_tiles, n_splits;
};

GRID_FN struct grid_forward grid_forward_of(const struct abi_fwd_args *a, int pack, int split,
					    int chosen, int tile_m)
{
	grid_int heads = pack ? a->nhead_q / a->nhead_k : 1;
	struct grid_forward g;

	g.n_tiles = chosen ? a->sequences.seqlen_q_max * grid_ceil(heads, tile_m)
			   : grid_ceil(a->sequences.seqlen_q_max * heads, tile_m);
	g.n_splits = split && a->n_splits > 1 ? a->n_splits : 1;
	return g;
}

/* The last rows, which see most keys, come first. */
GRID_FN grid_int grid_forward_tile(struct grid_forward g, grid_int x)
{
	return g.n_tiles - 1 - x / g.n_splits;
}

/* Blocks of hopper/fwd_wide.h that bring keys for each other, without splits: tiles side by side. */
#define GRID_CLUSTER 2
GRID_FN grid_int grid_clusters(grid_int n_tiles)
{
	return grid_ceil(n_tiles, GRID_CLUSTER);
}

/*
 * For blocks that stay: the tiles of all heads and batch entries, taken one after the other. Of
 * packed sequences, whose lengths are not known here, at least as many as there are.
 * @rows: of a sequence that a tile has, @heads: what tiles are counted for
 */
GRID_FN grid_int grid_pieces(const struct abi_fwd_args *a, grid_int rows, grid_int heads)
{
	const struct abi_sequences *s = &a->sequences;
	grid_int n = grid_ceil(s->seqlen_q_max, rows) * s->batch;
	grid_int packed = s->total_q / rows + s->batch;

	return (s->seqstart_q && packed < n ? packed : n) * heads;
}

/* The same, beyond what a launch may have: both sides have to find the same number. */
GRID_FN abi_i64 grid_tiles(const struct abi_fwd_args *a, abi_i32 rows, abi_i32 heads)
{
	const struct abi_sequences *s = &a->sequences;
	abi_i64 n = (abi_i64)grid_ceil(s->seqlen_q_max, rows) * s->batch;
	abi_i64 packed = (abi_i64)(s->total_q / rows) + s->batch;

	return (s->seqstart_q && packed < n ? packed : n) * heads;
}

/*
 * Without splits and masks, the pieces that are left for a last round of @blocks are cut by keys:
 * the parts of all of them follow the whole ones. Return: how many pieces stay whole.
 */
GRID_FN abi_i32 grid_whole_pieces(const struct abi_rest *rest, abi_i32 pieces, abi_i32 blocks)
{
	abi_i32 left = pieces % blocks;

	return rest->n_splits > 1 && pieces > left && left * rest->n_splits <= rest->n_parts
		       ? pieces - left
		       : pieces;
}

/* Heads that share keys and lie side by side in a tile of splits, row by row: all of them where
 * that leaves a tenth fewer tiles, else one. Factors of Q are a head's own. */
GRID_FN int grid_heads_of_tile(const struct abi_fwd_args *a, int tile_m)
{
	int heads = a->nhead_q / a->nhead_k;

	if (heads > tile_m || a->q_descale.data)
		return 1;
	return 10 * grid_tiles(a, tile_m / heads, 1) < 9 * grid_tiles(a, tile_m, heads) ? heads : 1;
}

/* ---- backward: blocks that own keys, blocks that own rows, blocks that sum a dBias ---- */

struct grid_backward {
	grid_int n_keys, n_rows;                            /* tiles of the first pass */
	grid_int n_splits; /* blocks that share rows: each has a part of the keys */
	grid_int n_key_blocks, n_row_blocks, n_bias_blocks; /* in this order */
};

/* @split_dkdv: dK and dV have blocks of their own; dq_tile_n: rows of a block that owns rows */
GRID_FN struct grid_backward grid_backward_of(const struct abi_bwd_args *a, int tile_m, int tile_n,
					      int dq_tile_n, int split_dkdv, int sums_dbias)
{
	struct grid_backward g;

	g.n_keys = grid_ceil(a->sequences.seqlen_k_max, tile_n);
	g.n_rows = grid_ceil(a->sequences.seqlen_q_max, tile_m);
	g.n_key_blocks = (split_dkdv ? 2 : 1) * g.n_keys;
	g.n_splits = a->dq_split_keys > 0 ? grid_ceil(a->sequences.seqlen_k_max, a->dq_split_keys)
					  : 1;
	if (g.n_splits < 1)
		g.n_splits = 1;
	g.n_row_blocks = grid_ceil(a->sequences.seqlen_q_max, dq_tile_n) * g.n_splits;
	g.n_bias_blocks = !sums_dbias ? 0 : g.n_keys * (abi_sums_rows(a) ? 1 : g.n_rows);
	return g;
}

/* The tile of a block that owns rows: the last rows see most keys, as the early keys are seen by
 * most rows. */
GRID_FN grid_int grid_backward_row_tile(struct grid_backward g, grid_int x)
{
	return (g.n_row_blocks - 1 - (x - g.n_key_blocks)) / g.n_splits;
}

/* And which split of its rows' sums is the first of those that it makes. */
GRID_FN grid_int grid_backward_split(struct grid_backward g, grid_int x)
{
	return (g.n_row_blocks - 1 - (x - g.n_key_blocks)) % g.n_splits;
}

/* The tile of a block that sums a dBias: tile % n_keys is that of keys, tile / n_keys that of rows. */
GRID_FN grid_int grid_backward_bias_tile(struct grid_backward g, grid_int x)
{
	return x - g.n_key_blocks - g.n_row_blocks;
}

/* Blocks that own keys of all heads that share them, or of one of the parts that those are in
 * (abi.h): parts of all heads. */
GRID_FN grid_int grid_kv_parts(const struct abi_bwd_args *a)
{
	return (grid_int)a->nhead_k * (a->kv_parts > 1 ? a->kv_parts : 1);
}

/*
 * The order in which blocks that own keys begin under intervals: lists of all blocks of a sequence,
 * one for all heads or, where these have intervals of their own, one for those that share keys.
 */
#define GRID_ORDER_KEYS  128  /* of a block */
#define GRID_ORDER_MOST  2048 /* blocks of a list */
#define GRID_ORDER_ENDPOINTS 7 /* of a row: more take longer to look at than an order saves */
#define GRID_ORDER_LDS   (3 * 4 * GRID_ORDER_MOST)
GRID_FN grid_int grid_order_heads(const struct abi_bwd_args *a)
{
	return a->mask_data.intervals.stride_head ? a->nhead_k : 1;
}
/* How many blocks of a head are beside each other, of n: the fewer heads take turns, the more of
 * what they read is in the cache, and the less do the short blocks of all heads come last. */
GRID_FN abi_i32 grid_order_run(abi_i32 n)
{
	return n < 8 ? 1 : n < 256 ? n / 4 : 64;
}

/* Lists of a batch entry that are written. */
GRID_FN grid_int grid_orders(const struct abi_bwd_args *a)
{
	return a->order_words > 0 ? grid_order_heads(a) : 0;
}
GRID_FN grid_int grid_order_list(const struct abi_bwd_args *a, grid_int batch, grid_int head_k)
{
	grid_int heads = grid_order_heads(a);

	return batch * heads + (heads > 1 ? head_k : 0);
}

/* ---- without tiles: lanes side by side take a row of a head, or of the cache ---- */

#define GRID_DOT_LANES 16 /* that a row of dot_do_o takes; elsewhere a wave does */
#define GRID_DOT_ROWS  4  /* one after the other, which they take */

GRID_FN grid_int grid_row(grid_int x, int rows_of_block, int row_in_block)
{
	return x * rows_of_block + row_in_block;
}

/* Rows of a sequence that a merge has blocks for. Where sequences seldom have more, those take the
 * others, too. */
GRID_FN grid_int grid_combine_rows(const struct abi_combine_args *a)
{
	grid_int most = a->sequences.seqlen_q_max;

	return a->few_rows > 0 && a->few_rows < most ? a->few_rows : most;
}

/* How many of a block's waves share a row of a merge: as many as find something to read at once,
 * while all rows do not fill a large card's units as it is. */
#define GRID_PARTS_AT_ONCE 8
#define GRID_COMBINE_BYTES 32	/* of LDS a lane */
#define GRID_COMBINE_ROUND 2048 /* waves, 16 a unit */
GRID_FN int grid_combine_waves(const struct abi_combine_args *a, int wave, int waves)
{
	grid_int rows = grid_combine_rows(a) * a->nhead_q;
	int n = 1;

	if (a->in_order || a->n_splits <= GRID_PARTS_AT_ONCE || rows >= GRID_COMBINE_ROUND)
		return 1;
	rows *= a->sequences.batch;
	rows = a->hdim_v > 8 * wave ? 4 * rows : a->hdim_v > 4 * wave ? 2 * rows : rows;
	while (n < waves && n * GRID_PARTS_AT_ONCE < a->n_splits && n * rows < GRID_COMBINE_ROUND)
		n *= 2;
	return n;
}

/* Lanes side by side, four elements each, that a piece of a row's head dimension takes: block y has
 * number y. */
GRID_FN int grid_combine_lanes(int hdim_v, int wave)
{
	int n = 1;

	while (n < wave && 4 * n < hdim_v)
		n *= 2;
	return n;
}

/* Pieces of a row that a wave has: one, or those of 512 elements (traits.h). */
GRID_FN int grid_combine_pieces(int wide, int wave)
{
	return wide == ABI_MERGE_WHOLE ? 128 / wave : 1;
}

GRID_FN grid_int grid_query_rows(const struct abi_sequences *s, int nhead_q)
{
	return (grid_int)s->seqlen_q_max * nhead_q;
}

/* How bwd_tiles.h cuts a tile of dq_acc: 64 of the head dimension by all queries, or half of them. */
GRID_FN grid_int grid_dq_slabs(const struct abi_bwd_args *a)
{
	return a->dq_tile_floats / (64 * a->dq_tile_rows); /* what is left are the counters */
}

GRID_FN grid_int grid_dq_chunks(const struct abi_bwd_args *a)
{
	grid_int slabs = grid_dq_slabs(a);

	return slabs == 1 ? 2 : slabs;
}

/* Of convert_dq: a block a chunk of a tile; behind them those that add parts of dK and dV. */
GRID_FN grid_int grid_dq_blocks(const struct abi_bwd_args *a)
{
	return grid_ceil(a->sequences.seqlen_q_max, a->dq_tile_rows) * grid_dq_chunks(a) *
	       a->nhead_q;
}

/* Eights of a row of dK and of dV, one a thread. */
#define GRID_CONVERT_THREADS 128
GRID_FN grid_int grid_kv_eights(const struct abi_bwd_args *a)
{
	return (a->hdim_q + a->hdim_v) / 8;
}

/* Of a head of keys. */
GRID_FN grid_int grid_kv_blocks(const struct abi_bwd_args *a)
{
	return a->kv_parts > 1 ? grid_ceil(a->sequences.seqlen_k_max * grid_kv_eights(a),
					   GRID_CONVERT_THREADS)
			       : 0;
}

/*
 * New rows of K, as many of V where there are such, rows of Q that are turned: block y is of that
 * kind. Lanes side by side take a row, 32 bytes each, or a wave does; a wave takes as many rows as
 * it has lanes for, and where there are many the next so many, too, but no more than it has lanes.
 * All of it are powers of two: what is told here are their logarithms, since a division takes as
 * long as a row.
 */
#define GRID_APPEND_WAVES 4
enum { GRID_APPEND_K, GRID_APPEND_V, GRID_APPEND_Q };

GRID_FN int grid_append_lanes(const struct abi_appendkv_args *a, int hdim, int wave)
{
	int dtype = a->new_dtype ? a->new_dtype : a->dtype;
	int bytes = hdim << (dtype == ABI_F32 ? 2 : dtype == ABI_F16 || dtype == ABI_BF16 ? 1 : 0);

	return (bytes > 32) + (bytes > 64) + (bytes > 128) + (bytes > 256) + (bytes > 512) +
	       (wave > 32 && bytes > 1024);
}

GRID_FN grid_int grid_append_keys(const struct abi_appendkv_args *a)
{
	return (grid_int)a->seqlen_new * a->nhead_k;
}

GRID_FN int grid_append_rows(const struct abi_appendkv_args *a, int lanes, int wave)
{
	grid_int keys = grid_append_keys(a);
	int steps = keys < 8192 ? 0 : keys < 32768 || !a->new_dtype ? 2 : 3;

	return (wave > 32 ? 6 : 5) - lanes + (steps < lanes ? steps : lanes);
}

/* Those that the kind with most rows needs. */
GRID_FN grid_int grid_append_blocks(const struct abi_appendkv_args *a, int wave)
{
	grid_int keys = grid_append_keys(a), q = 0;
	int of_k = grid_append_rows(a, grid_append_lanes(a, a->hdim_q, wave), wave),
	    of_v = grid_append_rows(a, grid_append_lanes(a, a->hdim_v, wave), wave);

	if (a->q_rotated.data)
		q = grid_query_rows(&a->sequences, a->nhead_q);
	if (of_k <= of_v)
		return grid_ceil(keys > q ? keys : q, GRID_APPEND_WAVES << of_k);
	keys = grid_ceil(keys, GRID_APPEND_WAVES << of_v);
	q = grid_ceil(q, GRID_APPEND_WAVES << of_k);
	return keys > q ? keys : q;
}

/* Keys of a head, one after the other, that a wave widens: as many of K, then of V. */
#define GRID_WIDEN_KEYS 16
GRID_FN grid_int grid_widen_runs(const struct abi_appendkv_args *a)
{
	return grid_ceil(a->seqlen_new, GRID_WIDEN_KEYS) * a->nhead_k;
}

#endif
