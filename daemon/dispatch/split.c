/* SPDX-License-Identifier: MIT */
/*
 * split.c: should the keys be split over several workers, and how. A pure function of the problem
 * and of what its device is.
 *
 * Without a split the work comes in batch * nhead_k * tiles items, where a tile is TILE_ROWS query
 * rows of all heads that share a key head.
 *
 * On a GPU few rows (one tile) take as long as memory takes to bring the keys, whoever asks for
 * them, if enough is under way: the time is estimated of every number of splits, and the fewest
 * splits that come within 2 % of the least are taken.
 *
 *   time    = size * bytes_of_key / UNIT_RATE, of each round of blocks:
 *             blocks / units     memory's, when all units together want more than it gives
 *             1 / lone           a unit's, with one block, 2 / pair with two: what they bring in
 *                                shares of a unit; more products (rows, wide heads) and addresses
 *                                (pages) to make bring less
 *   + 2.5 us for the second kernel, 4 ns a part, and what writing and reading the parts takes
 *
 * Worked, 132 units, hdim 128 in 16 bits, one row, measured on an H200 in brackets:
 *   batch 1, 1 key head, 131,072 keys: 1 block would take 1,966 us. 121 splits are 121 blocks of 1,088
 *     keys, 1088 / 1.05 about as long as 131072 / 132: 16.3 + 2.5 + 0.5 us (+ 3 to start; 64 splits 25,
 *     128 splits 22.)
 *   batch 64, 8 key heads, 4,096 keys: 512 blocks, 264 and 248 at once: 250 us unsplit (246).
 *   batch 8, 8 key heads, 16,384 keys in pages: 3 splits are 192 blocks, two of them in some units,
 *     2 * 5461 / 1.15 = 9,500 keys' time: 150 us (155); 4 are 256: 125 us (130).
 *
 * Those figures are an H200's. Of AMD's GPUs nothing was measured: a unit's share of memory is the
 * data sheet's rate by the units (spec_backend_arch), of which AMD_SHARE can be had, and a block has
 * at least AMD_KEYS keys under way (by the cycle: kernels/gpu/NOTES.md), which come AMD_LATENCY_US
 * later. Their units are more, or slower, than an H200's, so that fewer blocks than units ask for all
 * that memory gives, and fewer parts have to be merged. Batch 1, 8 key heads, 8,192 keys, hdim 128: an
 * MI300X has 14,800 bytes a microsecond and unit, a block asks for 32,768, so 137 of 304 units are
 * enough: 19 splits, 152 blocks of 448 keys. An RX 7900 XTX, 8,500 for each of 96: 4 splits.
 *
 * Elsewhere products take the time: a split pays when items are too few to keep the units busy
 * while the keys are many; each costs a pass over its partial result, so the fewest splits that
 * come within 85 % of the best balance are taken. 132 units, batch 1, 8 key heads, 8,192 keys: 8
 * items, at most 8192 / 256 = 32 splits. 16 splits of 512 keys give 128 items in one wave of 132:
 * 97 % busy, the best; 15 of 576 give 120: 91 %; 13 of 640 give 104: 79 %. 85 % of 97 % is 82 %, so
 * 15 splits. Batch 64: 512 items, more than 0.8 * 132: no split.
 */
#include <stdio.h>

#include "internal.h"

#define TILE_ROWS       64  /* query rows times heads of a group that one kernel tile packs */
#define MIN_SPLIT_KEYS  256 /* below, the combine costs more than the split saves */
#define SPLIT_STEP      64  /* a split's keys are a multiple: whole key tiles */
#define MAX_AUTO_SPLITS 128

#define STREAM_KEYS   128     /* at least, of a split that streams */
#define STREAM_SPLITS 512     /* at most */
#define UNIT_RATE     32500.0 /* bytes a microsecond: 4.3 TB/s by 132 */
#define UNIT_BLOCKS   2
#define COMBINE_US    2.5
#define PART_US       0.004

#define AMD_SHARE      0.85
#define AMD_KEYS       64
#define AMD_LATENCY_US 1.0
#define AMD_COMBINE_US 5.0

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

/* What one split of all keys has: whole steps as far as a number of keys goes. */
static int32_t most_keys(const struct fmha_problem *p)
{
	int64_t keys = split_keys(p, 1);

	return keys < p->split_size ? (int32_t)keys : p->split_size;
}

/* How busy @units are when @items, each cut into about @n splits, go round:
 * n_items / (waves * units). */
static double split_balance(const struct fmha_problem *p, int64_t n, int64_t items, int64_t units)
{
	int64_t n_items = items * ceil_div(p->seqlen_k, split_keys(p, n));

	return (double)n_items / (double)(ceil_div(n_items, units) * units);
}

static void set_splits(const struct fmha_problem *p, int64_t n, struct split_choice *ret_choice)
{
	int64_t size = n > 1 ? split_keys(p, n) : p->seqlen_k;

	ret_choice->size = (int32_t)size;
	ret_choice->n = (int32_t)ceil_div(p->seqlen_k, size);
}

/* What one block in a unit brings, and two do together, in shares of a unit. */
struct pace {
	double lone, pair;
};

static int64_t key_bytes(const struct fmha_problem *p)
{
	return ((int64_t)p->hdim_q + p->hdim_v) * fmha_dtype_bytes(p->k.dtype);
}

/* Bytes a microsecond that memory has for a unit. */
static double unit_rate(const struct split_device *device)
{
	return device->amd_unit_rate > 0 ? AMD_SHARE * device->amd_unit_rate : UNIT_RATE;
}

static struct pace pace_of(const struct fmha_problem *p, const struct split_device *device)
{
	int64_t rows = packed_rows(p);

	if (device->amd_unit_rate > 0) {
		double lone = AMD_KEYS * (double)key_bytes(p) / AMD_LATENCY_US / unit_rate(device);

		return (struct pace){lone, 2 * lone};
	}
	if (fmha_dtype_bytes(p->k.dtype) == 1) /* as many products and addresses, half the bytes */
		return rows > 32                    ? (struct pace){0.35, 0.42}
		       : rows > 16 || plan_paged(p) ? (struct pace){0.55, 0.82}
						    : (struct pace){0.98, 1.2};
	if (rows > 32)
		return (struct pace){0.7, 0.92};
	if (plan_paged(p))
		return (struct pace){0.75, 1.15};
	if (rows > 16 || p->hdim_q > 128 || p->hdim_v > 128)
		return (struct pace){0.9, 1.15};
	return (struct pace){1.05, 1.8};
}

/* Of @blocks that run at once, in the time in which a unit's share of memory brings one of them. */
static double round_time(struct pace pace, int64_t blocks, int64_t units)
{
	double memory = (double)blocks / (double)units;
	double unit = blocks == 0 ? 0 : blocks <= units ? 1 / pace.lone : 2 / pace.pair;

	return memory > unit ? memory : unit;
}

/* Microseconds of about @n splits. */
static double stream_us(const struct fmha_problem *p, int64_t n, int64_t items,
			const struct split_device *device)
{
	int64_t units = device->units;
	int64_t size = n > 1 ? split_keys(p, n) : p->seqlen_k, places = UNIT_BLOCKS * units;
	int64_t parts = ceil_div(p->seqlen_k, size), blocks = items * parts;
	struct pace pace = pace_of(p, device);
	double rate = unit_rate(device), us;

	us = (double)(size * key_bytes(p)) / rate *
	     ((double)(blocks / places) * round_time(pace, places, units) +
	      round_time(pace, blocks % places, units));
	if (parts > 1)
		us += (device->amd_unit_rate > 0 ? AMD_COMBINE_US : COMBINE_US) +
		      PART_US * (double)parts +
		      (double)(items * packed_rows(p) * parts) * 2 * sizeof(float) * p->hdim_v /
			      (rate * (double)units);
	return us;
}

static void choose_streaming(const struct fmha_problem *p, int64_t items,
			     const struct split_device *device, struct split_choice *ret_choice)
{
	int64_t most = p->seqlen_k / STREAM_KEYS, n = 1;
	double unsplit = stream_us(p, 1, items, device), best = unsplit, us = unsplit;

	if (most > STREAM_SPLITS)
		most = STREAM_SPLITS;
	for (int64_t i = 2; i <= most; i++)
		if (stream_us(p, i, items, device) < best)
			best = stream_us(p, i, items, device);
	while (us > 1.02 * best)
		us = stream_us(p, ++n, items, device);
	set_splits(p, n, ret_choice);
	(void)snprintf(ret_choice->why, sizeof(ret_choice->why),
		       "memory takes %.1f us with %lld blocks of %d keys on %lld units, %.1f us "
		       "unsplit",
		       us, (long long)(items * ret_choice->n), ret_choice->size,
		       (long long)device->units, unsplit);
}

static void choose_balance(const struct fmha_problem *p, int64_t items, int64_t units,
			   struct split_choice *ret_choice)
{
	int64_t most = p->seqlen_k / MIN_SPLIT_KEYS, n = 1;
	double best = 0;

	if (most > MAX_AUTO_SPLITS)
		most = MAX_AUTO_SPLITS;
	if (items > 0 && most >= 2 && (double)items < 0.8 * (double)units) {
		for (int64_t i = 1; i <= most; i++)
			if (split_balance(p, i, items, units) > best)
				best = split_balance(p, i, items, units);
		while (split_balance(p, n, items, units) < 0.85 * best)
			n++;
	}
	set_splits(p, n, ret_choice);
	(void)snprintf(ret_choice->why, sizeof(ret_choice->why),
		       "%lld tiles of rows for %lld units, %d keys", (long long)items,
		       (long long)units, p->seqlen_k);
}

void split_choose(const struct fmha_problem *problem, const struct split_device *device,
		  struct split_choice *ret_choice)
{
	int64_t items = work_items(problem), units = device->units;

	*ret_choice = (struct split_choice){.n = 1, .size = problem->seqlen_k};
	if (problem->split_size > 0) {
		ret_choice->n = (int32_t)ceil_div(problem->seqlen_k, problem->split_size);
		ret_choice->size = problem->split_size;
		/* One split of all keys: beyond them there is neither work nor workspace. */
		if (ret_choice->size > problem->seqlen_k)
			ret_choice->size = most_keys(problem);
		(void)snprintf(ret_choice->why, sizeof(ret_choice->why), "as asked: split_size");
	} else if (problem->n_splits != 0) {
		ret_choice->n = problem->n_splits;
		if (problem->seqlen_k > 0) /* as many as have keys */
			set_splits(problem, problem->n_splits, ret_choice);
		(void)snprintf(ret_choice->why, sizeof(ret_choice->why), "as asked: n_splits");
	} else if (problem->seqlen_k == 0) {
		(void)snprintf(ret_choice->why, sizeof(ret_choice->why), "no keys");
	} else if (device->gpu && items > 0 && packed_rows(problem) <= TILE_ROWS) {
		choose_streaming(problem, items, device, ret_choice);
	} else {
		choose_balance(problem, items, units, ret_choice);
	}
}
