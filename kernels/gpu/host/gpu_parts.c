/* SPDX-License-Identifier: MIT */
/*
 * gpu_parts.c: into how many parts Hopper's backward loops (hopper/bwd_wgmma.h) cut the heads that
 * share keys.
 *
 * A block has a tile of keys, and all queries of a part. Few blocks leave units idle, and in the
 * last round of many nearly all of them; smaller ones do so less, but each writes sums of its keys
 * in float32 that have to be added. The time is estimated of every number of parts that divides the
 * heads:
 *
 *   blocks   in the order in which they start, each on the unit that is free first; one takes as
 *            long as its tiles of queries, and BLOCK_TILES more
 *   tile     its products, at what a unit does
 *   heads    under a mask blocks are of unlike length, and drift apart over the heads that each
 *            has: what one has read and added to is no longer in the L2 cache for others. With h
 *            heads of d in a block it takes 1 + 0.006 ((h - 1) d / 128)^2 times as long; 0.12 where
 *            additions to dQ have an order, and blocks wait for those that are behind
 *   parts    8 bytes for each element of dK and dV, written and read, at PART_BYTES; none of one
 *            part
 *
 * A mask in memory is searched by each block, for all of its heads at once, and nobody knows here
 * what it says: one part. Where rows have so many intervals that blocks come in no order of their
 * work, and a unit has fewer than DATA_BLOCKS of them, two: keys that all rows see, such as first
 * ones, would keep a block busy for long after all others.
 *
 * The fewest parts are taken whose time is below WORTH of one part's, and more of them where they
 * gain 2 % again. Their sums are bounded by the blocks: 1.1 GB.
 *
 * Worked, 132 units, 64 queries x 128 keys of 128 dims: a tile of 10.5 M operations takes 2.28 us.
 *   1 sequence of 16 heads that share 2, 4,096 rows and keys: 64 blocks of 64 * 8 + 2 tiles, one
 *     round: 1,172 us. 2 parts are 128 blocks of 258, one round, too: 588 us, and 13 for 4 M
 *     elements. 4 and 8 fill no more of it.
 *   32 share 8, 5,120: 320 blocks of 80 * 4 + 2, three rounds: 2,202 us. 2 parts: 640 of 162, five
 *     rounds: 1,847, and 67. 4 parts: ten rounds of 82: 1,869, and 134.
 *   32 share 8, 8,192: 512 of 514, four rounds: 4,687 us; 2 parts eight rounds of 258, and 107:
 *     4,812. One part.
 */
#include <kernels/gpu_kernel.h>

#include "core/block_order.h"
#include "core/grid.h"
#include "core/lds.h"

#define BLOCK_TILES 2
#define DRIFT       0.006
#define DRIFT_ORDERED 0.12
#define PART_BYTES  2.5e6 /* a microsecond */
#define WORTH	    0.96
#define WORTH_MORE  0.98
#define DATA_BLOCKS 6 /* of a unit */

/* The last of so many rounds is a small part of the time. */
#define MOST_ROUNDS 32
#define MOST_UNITS  512

/* Operations a microsecond. H100 and H200: NOTES.md has what loops reach. */
static double unit_flops(const struct gpu_tile *t)
{
	int32_t hdim = t->hdim_q > t->hdim_v ? t->hdim_q : t->hdim_v;

	return lds_bwd_has_roles(t->tile_n) ? 4.2e6
	       : hdim > 128		    ? 3.2e6
	       : hdim > 96		    ? 4.6e6
					    : 3.85e6;
}

/* Of five products three have the head dimension of Q. */
static double tile_us(const struct gpu_tile *t)
{
	return 2.0 * t->tile_m * t->tile_n * (3 * t->hdim_q + 2 * t->hdim_v) / unit_flops(t);
}

/* Sequences of the greatest length that come to as much, since nobody knows how long packed ones
 * are. */
static int64_t long_ones(int64_t batch, const abi_i32 *starts, int64_t total, int64_t longest)
{
	int64_t n = starts && longest > 0 ? (total + longest / 2) / longest : batch;

	return n < 1 ? 1 : n < batch ? n : batch;
}

static int64_t sequences_of(const struct abi_sequences *s)
{
	int64_t by_rows = long_ones(s->batch, s->seqstart_q, s->total_q, s->seqlen_q_max);
	int64_t by_keys = long_ones(s->batch, s->seqstart_k, s->total_k, s->seqlen_k_max);

	return by_rows > by_keys ? by_rows : by_keys;
}

static int is_masked(const struct abi_band *b)
{
	return b->mask != ABI_MASK_NONE && (b->window_left >= 0 || b->window_right >= 0);
}

/* Tiles of queries that see some of the x-th tile of keys: ColumnTiles::of_rows(). */
static int64_t tiles_seen(const struct abi_bwd_args *a, const struct gpu_tile *t, int64_t x)
{
	const struct abi_sequences *s = &a->sequences;
	const struct abi_band *b = &a->band;
	int64_t anchor = b->mask == ABI_MASK_BOTTOM_RIGHT ? s->seqlen_k_max - s->seqlen_q_max : 0;
	int64_t first = x * t->tile_n, low = 0, high = s->seqlen_q_max - 1;

	if (is_masked(b)) {
		int64_t end = first + t->tile_n - 1 - anchor + b->window_left;

		if (b->window_right >= 0 && first - anchor > b->window_right)
			low = first - anchor - b->window_right;
		if (b->window_left >= 0 && first >= b->sink_tokens && end < high)
			high = end;
	}
	return high >= low ? high / t->tile_m + 1 - low / t->tile_m : 0;
}

/* ---- units, by the time at which they are free: the first is at 0, those at 2 i + 1 and 2 i + 2
 * are not before i ---- */

static void give_block(double *free_at, int64_t n_units, double work)
{
	double at = free_at[0] + work;
	int64_t i = 0;

	for (;;) {
		int64_t next = 2 * i + 1;

		if (next + 1 < n_units && free_at[next + 1] < free_at[next])
			next++;
		if (next >= n_units || free_at[next] >= at)
			break;
		free_at[i] = free_at[next];
		i = next;
	}
	free_at[i] = at;
}

/* Tiles that the unit which is last has had. */
static double last_unit(const struct abi_bwd_args *a, const struct gpu_tile *t,
			struct block_order order, int64_t heads, int64_t n_units)
{
	double free_at[MOST_UNITS] = {0}, last = 0;

	for (abi_i32 i = 0; i < order.n_x * order.n_y; i++) {
		abi_i32 x, y;

		order_place(order, i, &x, &y);
		give_block(free_at, n_units, (double)(tiles_seen(a, t, x) * heads + BLOCK_TILES));
	}
	for (int64_t i = 0; i < n_units; i++)
		if (free_at[i] > last)
			last = free_at[i];
	return last;
}

/* All blocks, in tiles; @parts: of each KV head. */
static double all_blocks(const struct abi_bwd_args *a, const struct gpu_tile *t, int64_t parts,
			 int64_t n_units)
{
	int64_t heads = a->nhead_q / (a->nhead_k * parts);
	struct block_order order = {
		.n_x = (abi_i32)grid_ceil(a->sequences.seqlen_k_max, t->tile_n),
		.n_y = (abi_i32)(sequences_of(&a->sequences) * a->nhead_k * parts)};
	double drift;

	if (!is_masked(&a->band))
		return (double)grid_ceil((int64_t)order.n_x * order.n_y, n_units) *
		       (double)(tiles_seen(a, t, 0) * heads + BLOCK_TILES);
	order.section =
		order_section(order.n_y, heads_at_once(a->sequences.seqlen_q_max,
						       6 * t->hdim_q + 2 * t->hdim_v, order.n_y));
	if (order.section == order.n_y && !a->deterministic)
		order.units = (abi_i32)n_units;
	drift = (double)(heads - 1) * t->hdim_q / 128;
	return last_unit(a, t, order, heads, n_units) *
	       (1 + (a->deterministic ? DRIFT_ORDERED : DRIFT) * drift * drift);
}

static double parts_bytes(const struct abi_bwd_args *a, int64_t parts)
{
	return (double)(parts * a->nhead_k) * a->sequences.total_k * (a->hdim_q + a->hdim_v) *
	       (double)sizeof(float);
}

int32_t gpu_kernel_parts(const struct gpu_tile *tile, uint32_t units, const struct abi_bwd_args *a,
			 double ret_us[2])
{
	const struct abi_sequences *s = &a->sequences;
	int64_t n_units = units < 1 ? 1 : units < MOST_UNITS ? units : MOST_UNITS;
	int64_t most = MOST_ROUNDS * n_units, group = a->nhead_k ? a->nhead_q / a->nhead_k : 1;
	double blocks = (double)grid_ceil(s->seqlen_k_max, tile->tile_n) *
			(double)(sequences_of(s) * a->nhead_k);
	int32_t best = 1;

	ret_us[0] = ret_us[1] = 0;
	if (group < 2 || blocks < 1 || blocks > (double)most || s->seqlen_q_max == 0)
		return best;
	if (a->mask_data.intervals.data || a->mask_data.bits.data)
		return group % 2 == 0 && a->mask_data.n_endpoints > GRID_ORDER_ENDPOINTS &&
				       blocks < DATA_BLOCKS * (double)n_units
			       ? 2
			       : 1;
	ret_us[0] = ret_us[1] = all_blocks(a, tile, 1, n_units) * tile_us(tile);
	for (int64_t n = 2; n <= group && blocks * (double)n <= 2 * (double)most; n++) {
		double worth = best == 1 ? WORTH : WORTH_MORE, us;

		if (group % n != 0)
			continue;
		us = all_blocks(a, tile, n, n_units) * tile_us(tile) +
		     2 * parts_bytes(a, n) / PART_BYTES;
		if (us < worth * ret_us[1]) {
			best = (int32_t)n;
			ret_us[1] = us;
		}
	}
	return best;
}
