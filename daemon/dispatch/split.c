/* SPDX-License-Identifier: MIT */
/*
 * split.c: should the keys be split over several workers, and how. A pure function of the problem
 * and the number of compute units.
 *
 * Without a split the work comes in batch * nhead_k * tiles items, where a tile is TILE_ROWS query
 * rows of all heads that share a key head. A split pays when these are too few to keep the compute
 * units busy while the keys are many; each split costs a pass over its partial result, so the
 * fewest splits that come within 85 % of the best balance are taken.
 *
 * Worked, 132 compute units, 1 query row:
 *   batch 1, 8 key heads, 8,192 keys: 8 items, at most 8192 / 256 = 32 splits. 16 splits of 512
 *     keys give 128 items in one wave of 132: 97 % busy, the best; 15 of 576 give 120: 91 %; 13 of
 *     640 give 104: 79 %. 85 % of 97 % is 82 %, so 15 splits.
 *   batch 64: 512 items, more than 0.8 * 132: no split.
 *   400 keys: never, a split would be too short.
 *
 * A GPU's compute unit holds several workgroups of a decode tile at once, and memory is busier with
 * all of them there: what fills the units once, but not those places, is split to fill them. batch
 * 16: 128 items, 3 * 132 places, so 3 splits (on an H200 0.94 of the copy bandwidth, unsplit 0.89).
 */
#include "internal.h"

#define TILE_ROWS       64  /* query rows times heads of a group that one kernel tile packs */
#define MIN_SPLIT_KEYS  256 /* below, the combine costs more than the split saves */
#define SPLIT_STEP      64  /* a split's keys are a multiple: whole key tiles */
#define MAX_AUTO_SPLITS 128
#define DECODE_ROWS     16 /* of the tile that GPUs use for few rows */
#define DECODE_PLACES   3  /* of such tiles in a compute unit */

/* Query rows that share a key head, of one sequence. */
static int64_t packed_rows(const struct fmha_problem *p)
{
	return (int64_t)p->seqlen_q * (p->nhead_q / p->nhead_k);
}

static int64_t work_items(const struct fmha_problem *p)
{
	return (int64_t)p->batch * p->nhead_k * ceil_div(packed_rows(p), TILE_ROWS);
}

/* Keys of each of about @n equal splits, in whole steps. */
static int64_t split_keys(const struct fmha_problem *p, int64_t n)
{
	int64_t size = ceil_div(p->seqlen_k, n);

	return ceil_div(size > 0 ? size : 1, SPLIT_STEP) * SPLIT_STEP;
}

/* How busy @units are when @items, each cut into about @n splits, go round:
 * n_items / (waves * units). */
static double split_balance(const struct fmha_problem *p, int64_t n, int64_t items, int64_t units)
{
	int64_t n_items = items * ceil_div(p->seqlen_k, split_keys(p, n));

	return (double)n_items / (double)(ceil_div(n_items, units) * units);
}

static void set_splits(const struct fmha_problem *p, int64_t n, int32_t *ret_n_splits,
		       int32_t *ret_split_size)
{
	int64_t size = n > 1 ? split_keys(p, n) : p->seqlen_k;

	*ret_split_size = (int32_t)size;
	*ret_n_splits = (int32_t)ceil_div(p->seqlen_k, size);
}

void split_choose(const struct fmha_problem *problem, uint32_t compute_units, bool gpu,
		  int32_t *ret_n_splits, int32_t *ret_split_size)
{
	int64_t items = work_items(problem), units = compute_units ? compute_units : 1;
	int64_t most = problem->seqlen_k / MIN_SPLIT_KEYS;
	double best = 0;

	*ret_n_splits = 1;
	*ret_split_size = problem->seqlen_k;
	if (problem->split_size > 0) {
		*ret_split_size = problem->split_size;
		*ret_n_splits = (int32_t)ceil_div(problem->seqlen_k, problem->split_size);
		return;
	}
	if (problem->n_splits != 0) {
		*ret_n_splits = problem->n_splits;
		*ret_split_size = (int32_t)split_keys(problem, problem->n_splits);
		return;
	}
	if (most > MAX_AUTO_SPLITS)
		most = MAX_AUTO_SPLITS;
	if (items == 0 || most < 2)
		return;
	if ((double)items >= 0.8 * (double)units) {
		int64_t n = DECODE_PLACES * units / items;

		if (gpu && packed_rows(problem) <= DECODE_ROWS && n > 1)
			set_splits(problem, n < most ? n : most, ret_n_splits, ret_split_size);
		return;
	}
	for (int64_t n = 1; n <= most; n++)
		if (split_balance(problem, n, items, units) > best)
			best = split_balance(problem, n, items, units);
	for (int64_t n = 1; n <= most; n++)
		if (split_balance(problem, n, items, units) >= 0.85 * best) {
			set_splits(problem, n, ret_n_splits, ret_split_size);
			return;
		}
}
