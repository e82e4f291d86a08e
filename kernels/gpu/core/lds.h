/* SPDX-License-Identifier: MIT */
/*
 * lds.h: how much LDS (shared memory) a block needs, for the kernels that lay it out and for the
 * host that asks for it. Plain integer functions that C and device C++ both read.
 */
#ifndef FMHA_GPU_LDS_H
#define FMHA_GPU_LDS_H

#ifdef __cplusplus
#define LDS_FN static __device__ constexpr
#else
#define LDS_FN static inline
#endif

/* Matrix cores: enum gpu_core on the host. */
#define FMHA_CORE_SCALAR 0
#define FMHA_CORE_MMA    1
#define FMHA_CORE_MFMA   2
#define FMHA_CORE_WMMA11 3
#define FMHA_CORE_WMMA12 4

/* How a block's work is cut. Backward: tile_n stationary, tile_m streamed. */
struct lds_cut {
	int core, wave; /* wave: lanes */
	int tile_m, tile_n, hdim_q, hdim_v, waves_m, waves_n;
};

LDS_FN int lds_max(int a, int b)
{
	return a > b ? a : b;
}

/* The rows of a 16 x 16 tile that a lane holds elements of. */
LDS_FN int lds_stats(int core, int wave)
{
	return core == FMHA_CORE_SCALAR ? 16 / (wave / 8) : core == FMHA_CORE_MMA ? 2 : 1;
}

/* A streamed tile that is read by rows, by columns, or both. */
LDS_FN int lds_tile(int core, int rows, int cols, int by_rows, int by_columns)
{
	return core == FMHA_CORE_SCALAR ? rows * cols * 4
	       : core == FMHA_CORE_MMA	? rows * cols * 2
					: (by_rows ? rows * (cols * 2 + 16) : 0) +
						  (by_columns ? cols * (rows * 2 + 16) : 0);
}

/* One that is stationary for a whole loop. */
LDS_FN int lds_stationary(int core, int rows, int cols)
{
	return core == FMHA_CORE_MFMA ? 0 : lds_tile(core, rows, cols, 1, 0);
}

/* Floats between rows of a result on its way out: padded against bank conflicts where 64 KiB allow
 * it. */
LDS_FN int lds_stage_stride(int hdim)
{
	return hdim >= 256 ? hdim : hdim + 4;
}

/* Columns of a head that are results at once, and of a tile that has no room for all: half of more
 * than 256, which are multiples of 64. */
LDS_FN int lds_part(int hdim)
{
	return hdim > 256 ? hdim / 2 : hdim;
}

/* Whether forward's Q and K come in parts, too: as floats they would fill 64 KiB. */
LDS_FN int lds_parts_queries(int core, int hdim_q)
{
	return core == FMHA_CORE_SCALAR && lds_part(hdim_q) < hdim_q;
}

/* A wave's 16 rows of a result. */
LDS_FN int lds_stage(int waves, int hdim)
{
	return waves * 16 * lds_stage_stride(hdim) * 4;
}

/* What waves that share the keys of a tile tell each other: accumulators, maxima, sums. */
LDS_FN int lds_merge(struct lds_cut c)
{
	int tiles = c.tile_m / 16 / c.waves_m;

	return (c.waves_n - 1) * c.waves_m * c.wave * 4 *
	       (tiles * (lds_part(c.hdim_v) / 16) * (256 / c.wave) +
		2 * tiles * lds_stats(c.core, c.wave));
}

/* Room for the band, and for the maxima and sums of rows, while the products want the registers. */
#define LDS_BAND 32
LDS_FN int lds_softmax(struct lds_cut c)
{
	return 2 * (c.tile_m / 16 / c.waves_m) * lds_stats(c.core, c.wave) * c.waves_m * c.waves_n *
	       c.wave * 4;
}

/*
 * A tile whose accumulators fill the registers, asked for with one block a unit (two fit all the
 * same): what can wait does so in LDS, and nothing spills.
 */
LDS_FN int lds_is_parked(struct lds_cut c, int blocks_per_cu)
{
	return c.core == FMHA_CORE_MMA && blocks_per_cu == 1 && c.waves_n == 1 &&
	       c.tile_m / c.waves_m > 16;
}

LDS_FN int lds_forward(struct lds_cut c, int parked)
{
	int columns = lds_parts_queries(c.core, c.hdim_q) ? lds_part(c.hdim_q) : c.hdim_q;

	return lds_max(lds_max(lds_merge(c), lds_stage(c.waves_m, lds_part(c.hdim_v))),
		       lds_stationary(c.core, c.tile_m, columns) +
			       lds_tile(c.core, c.tile_n, columns, 1, 0) +
			       lds_tile(c.core, c.tile_n, lds_part(c.hdim_v), 0, 1) +
			       (parked ? LDS_BAND + lds_softmax(c) : 0));
}

/*
 * Hopper's forward loop, fwd_wgmma.h: tiles are slabs of 128 bytes' columns; those of K, V and a
 * bias in stages, Q's twice where there is room. 8-bit values are there in 16 bits, too, and so are
 * keys that are narrower than their queries: what the copy engine brings has one stage then, where
 * there is no room for more.
 */
#define LDS_WGMMA_STAGES   2
#define LDS_WGMMA_BARRIERS 128
#define LDS_WGMMA_SEEN	   160 /* what loading warps say of a mask that is data */
#define LDS_WGMMA_CUT	   80 /* how tiles of splits are cut, and a warp's part of one */
/* With what rows see of the tiles of keys: up to 128 bits a row. */
LDS_FN int lds_wgmma_seen(int tile_m)
{
	return LDS_WGMMA_SEEN + LDS_WGMMA_STAGES * tile_m * 16;
}

struct lds_wgmma_cut {
	struct lds_cut tile;
	int element, key; /* bytes of Q's elements; of K's and V's */
	int bias, data;   /* 1: a tensor of 16-bit elements; a mask that is data */
	int splits;       /* 1: of the keys */
};

LDS_FN int lds_slabs(int rows, int row_bytes)
{
	return rows * 128 * ((row_bytes + 127) / 128);
}

/* Keys of a box of the copy engine, where tiles and pages begin with one; rows are swizzled by
 * eight. 0: no pages, a box a tile. */
LDS_FN int lds_wgmma_box(int tile_n, int page_size)
{
	while (page_size > 0) {
		int rest = tile_n % page_size;

		tile_n = page_size;
		page_size = rest;
	}
	return tile_n;
}

LDS_FN int lds_wgmma_is_narrow(struct lds_wgmma_cut c)
{
	return c.key < c.element;
}

LDS_FN int lds_wgmma_barriers(struct lds_wgmma_cut c)
{
	return LDS_WGMMA_BARRIERS + (lds_wgmma_is_narrow(c) ? 64 : 0) +
	       (c.splits ? LDS_WGMMA_CUT : 0);
}

/* Warpgroups that load. */
LDS_FN int lds_wgmma_loaders(int narrow, int waves_m, int hdim_v)
{
	return narrow && waves_m == 8 && hdim_v <= 192 ? 2 : 1;
}

/* @copies: stages of what the copy engine brings. */
LDS_FN int lds_wgmma_keys(struct lds_wgmma_cut c, int copies)
{
	return copies * (lds_slabs(c.tile.tile_n, c.tile.hdim_q * c.key) +
			 lds_slabs(c.tile.tile_n, c.tile.hdim_v * c.key)) +
	       LDS_WGMMA_STAGES *
		       ((lds_wgmma_is_narrow(c)
				 ? lds_slabs(c.tile.tile_n, c.tile.hdim_q * c.element)
				 : 0) +
			(c.key == 1 ? lds_slabs(c.tile.tile_n, c.tile.hdim_v * 2) : 0) +
			(c.bias ? lds_slabs(c.tile.tile_m, c.tile.tile_n * 2) : 0)) +
	       lds_wgmma_barriers(c) + (c.data ? lds_wgmma_seen(c.tile.tile_m) : 0);
}

LDS_FN int lds_wgmma_query(struct lds_wgmma_cut c)
{
	return lds_slabs(c.tile.tile_m, c.tile.hdim_q * c.element);
}

LDS_FN int lds_wgmma_copies(struct lds_wgmma_cut c, int most)
{
	return lds_wgmma_is_narrow(c) &&
			       lds_wgmma_keys(c, LDS_WGMMA_STAGES) + lds_wgmma_query(c) > most
		       ? 1
		       : LDS_WGMMA_STAGES;
}

LDS_FN int lds_wgmma_queries(struct lds_wgmma_cut c, int most)
{
	return lds_wgmma_keys(c, lds_wgmma_copies(c, most)) + 2 * lds_wgmma_query(c) <= most ? 2
											     : 1;
}

LDS_FN int lds_wgmma(struct lds_wgmma_cut c, int most)
{
	return lds_wgmma_keys(c, lds_wgmma_copies(c, most)) +
	       lds_wgmma_queries(c, most) * lds_wgmma_query(c);
}

/*
 * Hopper's loop over latents, fwd_latent.h: Q, keys in stages, what one warpgroup hands to another,
 * weights and two factors a lane, and, in SMALL bytes, barriers and what warps know of their
 * shares.
 */
#define LDS_LATENT_STAGES 2
#define LDS_LATENT_SMALL  512
LDS_FN int lds_latent(struct lds_cut c)
{
	return lds_slabs(c.tile_m, 2 * c.hdim_q) +
	       LDS_LATENT_STAGES * lds_slabs(c.tile_n, 2 * c.hdim_q) + c.tile_m * c.tile_n * 2 +
	       2 * 4 * 128 + LDS_LATENT_SMALL;
}

/* Hopper's loop over wide heads, fwd_wide.h: the same of one tile of keys and one of values. */
LDS_FN int lds_wide(struct lds_cut c)
{
	return lds_slabs(c.tile_m, 2 * c.hdim_q) + lds_slabs(c.tile_n, 2 * c.hdim_q) +
	       lds_slabs(c.tile_n, 2 * c.hdim_v) + c.tile_m * c.tile_n * 2 + 2 * 4 * 128 +
	       LDS_LATENT_SMALL;
}

/*
 * Decode's forward loop, fwd_decode.h: Q, and tiles of K and V in a ring of stages; where they are
 * narrower than Q a factor for each of its rows. @most: what a block may take; fewer than two
 * stages are none.
 */
#define LDS_DECODE_STAGES 8 /* more bytes than memory needs under way */
/* @element: bytes of one of K's and V's; one is half a column. */
LDS_FN int lds_decode_stage(struct lds_cut c, int element, int by_key)
{
	return lds_tile(c.core, c.tile_n, c.hdim_q * element / 2, 1, 0) +
	       lds_tile(c.core, c.tile_n, c.hdim_v * element / 2, 0, 1) +
	       (by_key ? c.tile_n * 2 * 4 : 0);
}

LDS_FN int lds_decode_queries(struct lds_cut c, int narrow)
{
	return lds_stationary(c.core, c.tile_m, c.hdim_q) + (narrow ? c.tile_m * 4 : 0);
}

LDS_FN int lds_decode_stages(struct lds_cut c, int most, int element, int narrow, int by_key)
{
	int n = (most - lds_decode_queries(c, narrow)) / lds_decode_stage(c, element, by_key);

	return n < 2 ? 0 : n < LDS_DECODE_STAGES ? n : LDS_DECODE_STAGES;
}

/* O of a tile's rows with their maxima and sums, while teams merge. */
LDS_FN int lds_decode_partial(struct lds_cut c)
{
	return c.tile_m * (lds_stage_stride(c.hdim_v) + 2) * 4;
}

LDS_FN int lds_decode(struct lds_cut c, int stages, int element, int narrow, int by_key)
{
	return lds_max(c.waves_n * lds_decode_partial(c),
		       lds_decode_queries(c, narrow) +
			       stages * lds_decode_stage(c, element, by_key));
}

/*
 * Hopper's backward loops, bwd_wgmma.h: tiles of K and V, of Q in stages, of dO in stages where
 * there is room, two numbers a row in stages, dS of 128 keys in stages, and chunks of dQ on their
 * way out. Wide heads: the warpgroups share their keys, of which there are dS and P.
 */
#define LDS_BWD_WGMMA_STAGES 2
LDS_FN int lds_bwd_is_shared(int tile_n)
{
	return tile_n == 64;
}

/* Three warpgroups, each with products of its own, share 96 keys: bwd_wgmma_roles.h. */
LDS_FN int lds_bwd_has_roles(int tile_n)
{
	return tile_n == 96;
}

/* Tiles of dS and P, of 128 keys each. */
LDS_FN int lds_bwd_scores(int tile_n)
{
	return LDS_BWD_WGMMA_STAGES + (lds_bwd_has_roles(tile_n) ? 1 : 0);
}

LDS_FN int lds_bwd_do_stages(int hdim_q, int hdim_v)
{
	return hdim_q + hdim_v > 2 * 192 ? 1 : 2;
}

/*
 * Heads of a slab and a half: one warpgroup has all of dQ, 64 queries by 96. Not where a soft cap
 * or dropout makes the loop long, of which there would be two.
 */
#define LDS_DQ_ROW 96
LDS_FN int lds_bwd_dq_by_rows(int tile_m, int hdim_q, int is_long)
{
	return tile_m == 64 && hdim_q > 64 && hdim_q <= LDS_DQ_ROW && !is_long;
}

LDS_FN int lds_bwd_wgmma(struct lds_cut c)
{
	int slabs = (c.hdim_q + 63) / 64;
	int dq = 2 * 64 * (slabs == 1 ? c.tile_m / 2 : c.tile_m) * 4;

	return lds_slabs(c.tile_n, 2 * c.hdim_q) + lds_slabs(c.tile_n, 2 * c.hdim_v) +
	       LDS_BWD_WGMMA_STAGES * (lds_slabs(c.tile_m, 2 * c.hdim_q) + c.tile_m * 8) +
	       lds_bwd_do_stages(c.hdim_q, c.hdim_v) * lds_slabs(c.tile_m, 2 * c.hdim_v) +
	       lds_bwd_scores(c.tile_n) * lds_slabs(c.tile_m, 2 * 128) + dq + LDS_WGMMA_BARRIERS;
}

/* Under a mask that is data, behind that: two bits for each of so many tiles of queries, or for as
 * many runs of them; a list of those, of 16 bits each and rounded up to 16 bytes; by which of their
 * intervals they see keys, 32 bits each; which keys a tile's queries see, a bit each. */
#define LDS_BWD_SEEN 1024
#define LDS_BWD_LIST (2 * LDS_BWD_SEEN + 16)
LDS_FN int lds_bwd_seen(int tile_m, int tile_n)
{
	return 2 * LDS_BWD_SEEN / 8 + LDS_BWD_LIST + 4 * LDS_BWD_SEEN +
	       LDS_BWD_WGMMA_STAGES * tile_m * tile_n / 8;
}

/* Floats of its tile of dq_acc; each warpgroup's part has a counter that keeps blocks in order. */
#define LDS_DQ_COUNTER 32
LDS_FN int lds_dq_tile(int tile_m, int hdim_q, int is_long)
{
	return tile_m * (lds_bwd_dq_by_rows(tile_m, hdim_q, is_long) ? LDS_DQ_ROW
								     : (hdim_q + 63) / 64 * 64) +
	       2 * LDS_DQ_COUNTER;
}

/* convert_dq turns its chunks of 64 columns, so many queries at a time. */
#define LDS_CONVERT_QUERIES 32
#define LDS_CONVERT_STRIDE  68
LDS_FN int lds_convert(void)
{
	return LDS_CONVERT_QUERIES * LDS_CONVERT_STRIDE * 4;
}

/*
 * AMD's forward loop, fwd_amd.h: K and V in two stages; then results on their way out, so many
 * dimensions at a time.
 */
#define LDS_AMD_OUT 32
LDS_FN int lds_amd(struct lds_cut c, int element)
{
	return lds_max(2 * c.tile_n * (c.hdim_q + c.hdim_v) * element,
		       c.tile_m * (LDS_AMD_OUT + 4) * 4);
}

/*
 * AMD's decode loop, fwd_amd_decode.h: Q, where registers are dear, its rows padded against bank
 * conflicts; then waves merge, 16 rows and so many dimensions at a time, in so many turns, with
 * maxima and sums.
 */
#define LDS_AMD_TURNS 4
#define LDS_AMD_TAIL  32 /* dimensions in which rows that are narrower than the tile end */
LDS_FN int lds_amd_stride(int hdim)
{
	return hdim / LDS_AMD_TURNS + 4;
}

LDS_FN int lds_amd_parks_queries(struct lds_cut c)
{
	return c.core != FMHA_CORE_MFMA || c.tile_m > 16;
}

/* How many pieces K of a wave's share, and V of it, come in: halves where O and they would leave
 * RDNA no registers. */
LDS_FN int lds_amd_parts(struct lds_cut c, int element)
{
	int words = c.tile_n / c.waves_n * (c.hdim_q + c.hdim_v) * element / 4;

	return c.core != FMHA_CORE_MFMA && (c.tile_m * c.hdim_v + words) / c.wave > 176
		       ? 2
		       : 1;
}

LDS_FN int lds_amd_query_stride(int hdim, int element)
{
	return hdim * element + 16;
}

LDS_FN int lds_amd_decode(struct lds_cut c, int element)
{
	return lds_max(c.waves_n * 16 * (lds_amd_stride(c.hdim_v) + 2) * 4,
		       lds_amd_parks_queries(c) ? c.tile_m * lds_amd_query_stride(c.hdim_q, element)
						: 0);
}

/*
 * Its backward loop: how many of the two tensors of which a wave owns rows, V or dO first, wait in
 * LDS, since wide gradients leave RDNA no registers for them; RDNA3's operands take twice as many.
 */
LDS_FN int lds_amd_parks(struct lds_cut c)
{
	return c.core == FMHA_CORE_MFMA || c.hdim_q + c.hdim_v <= 128 ? 0
	       : c.core == FMHA_CORE_WMMA11			      ? 2
								      : 1;
}

/* A streamed pair by rows and transposed, LSE and D of its queries, and what is parked. */
LDS_FN int lds_amd_backward(struct lds_cut c)
{
	return lds_max(2 * c.tile_m * (c.hdim_q + c.hdim_v) * 2 + c.tile_m * 8 +
			       (lds_amd_parks(c) > 0 ? c.tile_n * c.hdim_v * 2 : 0) +
			       (lds_amd_parks(c) > 1 ? c.tile_n * c.hdim_q * 2 : 0),
		       c.tile_n * (LDS_AMD_OUT + 4) * 4);
}

/* What describes the streamed tensors, where registers are dear. */
LDS_FN int lds_views(int core)
{
	return core == FMHA_CORE_MMA ? 320 : 0;
}

/* Backward: the stationary pair, and a streamed one; of heads that come in parts one of a pair at a
 * time is there. */
LDS_FN int lds_of_pair(int q, int v, int parted)
{
	return parted ? lds_max(q, v) : q + v;
}

LDS_FN int lds_is_parted(struct lds_cut c)
{
	return lds_part(c.hdim_q) < c.hdim_q || lds_part(c.hdim_v) < c.hdim_v;
}

LDS_FN int lds_stationary_pair(struct lds_cut c)
{
	return lds_of_pair(lds_stationary(c.core, c.tile_n, lds_part(c.hdim_q)),
			   lds_stationary(c.core, c.tile_n, lds_part(c.hdim_v)), lds_is_parted(c));
}

LDS_FN int lds_streamed_pair(struct lds_cut c)
{
	return lds_of_pair(lds_tile(c.core, c.tile_m, lds_part(c.hdim_q), 1, 1),
			   lds_tile(c.core, c.tile_m, lds_part(c.hdim_v), 1, 1), lds_is_parted(c));
}

/*
 * LSE and D: of the streamed queries, or, where registers are dear, of the stationary ones. They
 * are left in memory where the scalar core's widest tiles leave no room: @most is what there is.
 */
LDS_FN int lds_row_statistics(struct lds_cut c, int buffers, int most)
{
	int bytes = lds_max(buffers * c.tile_m, c.core == FMHA_CORE_MMA ? c.tile_n : 0) * 2 * 4;

	return c.core == FMHA_CORE_SCALAR &&
			       lds_stationary_pair(c) + buffers * lds_streamed_pair(c) + bytes >
				       most
		       ? 0
		       : bytes;
}

LDS_FN int lds_backward(struct lds_cut c, int buffers, int most)
{
	return lds_max(lds_stationary_pair(c) + buffers * lds_streamed_pair(c) +
			       lds_row_statistics(c, buffers, most) + lds_views(c.core),
		       lds_stage(c.waves_m, lds_max(lds_part(c.hdim_q), lds_part(c.hdim_v))));
}

#endif
