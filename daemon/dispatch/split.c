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
 * Latents of 16 bits have a loop of their own on Hopper (hopper/fwd_latent.h): one block a unit, which
 * takes keys at LATENT_PACE of a unit's share of memory, and all tiles of a sequence's heads read memory
 * once. Measured on an H200, the fastest of those tried and, in brackets, others: 128 sequences of 16
 * heads and 1,024 keys unsplit 44 us (2 splits 63), 2 of 1,024 in 16 splits 11 (8: 13), 32 of 8,192 in 4
 * 85 (8: 93), 64 of 128 heads and 4,096 keys unsplit 119, 4 of 32,768 in 16 79 (8: 116, 33: 99), 1 of
 * 65,536 in 64 50 (33: 64). Shares are faster by themselves where lengths differ, 32 of 1,131 to 8,192 64 us
 * (69 in 4 splits), 64 of 515 to 2,047 in a table of 32,768 44 (57 unsplit), 8 of 128 heads of 1,320 to
 * 16,384 61 (68 in 8), but behind the launch that looks at tables the first and the last take 82 and 84 and
 * in equal splits 75 and 78, the second 53 and 75: so where the cache has a third of the pages that such
 * lengths would take, or less.
 * Latents of fp8 go by the same loop, a tile LATENT_WIDENS times as long: 64 sequences of 64 heads and 2,048 chosen
 * keys in 2 splits 61 us and a merge of 7 (16 bits: 50 and 7), of 128 heads unsplit 89 (16 bits: 71), where tiles
 * widen for each other.
 *
 * Heads above 256 (hopper/fwd_wide.h) have one block a unit. Measured on an H100, heads of 512, in brackets other numbers: 1
 * sequence of 8 key heads and 8,192 keys in 16 splits 53.8 us (8: 53.5, 32: 57.8), 8 of 4 in 4 190 (8: 200), 1 of 4 and
 * 32,768 in 32 99 (16: 100).
 *
 * Where no card is said figures are an H200's. Of AMD's GPUs nothing was measured: a unit's share of memory is the
 * data sheet's rate by the units (spec_backend_arch), of which AMD_SHARE can be had, and a block has
 * at least AMD_KEYS keys under way (by the cycle: kernels/gpu/NOTES.md), which come AMD_LATENCY_US
 * later. Their units are more, or slower, than an H200's, so that fewer blocks than units ask for all
 * that memory gives, and fewer parts have to be merged. Batch 1, 8 key heads, 8,192 keys, hdim 128: an
 * MI300X has 14,800 bytes a microsecond and unit, a block asks for 32,768, so 137 of 304 units are
 * enough: 19 splits, 152 blocks of 448 keys. An RX 7900 XTX, 8,500 for each of 96: 4 splits.
 *
 * Where sequences may differ in length, which nobody here knows, or rows see a window alone, equal
 * splits of the longest one are of unequal work: few rows on an NVIDIA GPU go by shares then, of as
 * many blocks as there are places (kernels/gpu/hopper/decode_share.h). How many parts a row may have
 * at most says how uneven lengths may be: twice as many as equal ones would make, and two that
 * begin and end within it; no more than if it were alone. 132 units, batch 16, 8 key heads: 264
 * blocks for 128 items, 2 * 3 + 2 = 8 parts; a row of 12,288 keys is cut fairly if all together have
 * 264 / 7 / 8 = 4.7 times as many. Measured on an H200 as above, pages of 16: 16 of 6,144 to 12,288 keys
 * 143 us (160 in 2 splits each); of 1,024 to 20,000, where the table has room for 32,768, 167 (378); 8
 * of up to 16,384 that see 4,096 each 45 (106); 1 of 20,000 in a table of 32,768 31.8 (35.9). Not where that
 * costs more than it gains: many short rows go unsplit, one block after the other (128 of 1,024 to
 * 2,048 keys, 8 key heads, 208 us, 219 by shares), 1 sequence that fills its table (20,000: 28.7, 31.4),
 * more than 16 packed rows.
 *
 * Elsewhere products take the time: a split pays when items are too few to keep the units busy
 * while the keys are many; each costs a pass over its partial result, so the fewest splits that
 * come within 85 % of the best balance are taken. 132 units, batch 1, 8 key heads, 8,192 keys: 8
 * items, at most 8192 / 256 = 32 splits. 16 splits of 512 keys give 128 items in one wave of 132:
 * 97 % busy, the best; 15 of 576 give 120: 91 %; 13 of 640 give 104: 79 %. 85 % of 97 % is 82 %, so
 * 15 splits. Batch 64: 512 items, more than 0.8 * 132: no split.
 *
 * Hopper's loop for many rows (hopper/fwd_wgmma.h) does so, too, in tiles of 128 rows, of one query head or of all that
 * share a key head. The time is estimated of every number of splits, and the fewest are taken of which more gain less
 * than 2 %, or none where that is less than 7 %.
 * Measured on an H100, bf16, 32 query and 8 key heads of 128 over 16,384 keys in pages, in brackets other numbers: 17
 * rows in 16 splits 45 us (8: 48, 4: 70), 33 in 8 50 (4: 70, 16: 74), 65 in 5 63 (4: 72, 8: 84), 128 in 4 77 (3: 91, 5:
 * 112), 256 in 2 133 (3: 171, 4: 140); 8 of 64/8 heads of 24 rows over 4,096 keys are 128 tiles, where heads by
 * themselves have 512 (183 us).
 */
#include <stdio.h>

#include <kernels/square.h>

#include "internal.h"

#define MIN_SPLIT_KEYS  256 /* below, the combine costs more than the split saves */
#define SPLIT_STEP      64  /* a split's keys are a multiple: whole key tiles */
#define MAX_AUTO_SPLITS 128

/* Hopper's loop for many rows: rows of a tile, of which three warpgroups have more where heads are short; keys that
 * a tile has at once; what it takes for a key of 128 dimensions, for a tile to begin and end (of splits in floats),
 * and for a merge. */
#define WARPGROUP_ROWS(p)  ((p)->hdim_v <= 64 ? 192 : 128)
#define WARPGROUP_KEYS     128
#define WARPGROUP_KEY_US   0.0115
#define WARPGROUP_US       3.0
#define WARPGROUP_PART_US  5.0
#define WARPGROUP_MERGE_US 5.0

/* Tiles of a last round: parts of one at most; what all take besides their keys, and each for the sums; of all time,
 * where it is worth it. Shorter values have other tiles without splits, longer ones leave no registers. */
#define REST_SPLITS    16
#define REST_US        5.0
#define REST_PART_US   1.0
#define REST_WORTH     0.01
#define REST_HDIM(dim) ((dim) > 96 && (dim) <= 128)

#define STREAM_KEYS   128     /* at least, of a split that streams */
#define STREAM_SPLITS 512     /* at most */
#define UNIT_RATE     32500.0 /* bytes a microsecond: 4.3 TB/s by 132 */
#define UNIT_BLOCKS   2       /* that run at once, but for Hopper's loop for heads above 256 */
#define COMBINE_US    2.5
#define LATENT_PACE   1.2 /* of a block, in shares of a unit */
#define LATENT_KEYS   64  /* of its tile, and of a split at least */
#define LATENT_WIDENS 1.6 /* times as long as a tile of 16 bits one of fp8 takes */
#define PART_US       0.004

#define BUSY_ROUNDS 3 /* so many rows of SHORT_KEYS balance by themselves */
#define SHORT_KEYS  4096
#define ALONE_KEYS  24576 /* of one sequence: what a share costs at its beginning shows */
#define SHARE_ROWS  16    /* more, and merges of pieces show */
#define SHARE_STEP                                                                                 \
	16 /* keys of a tile at least; of such as have no more than DECODE_ROWS, twice as many */
#define DECODE_ROWS 16
#define SHARE_UNITS (1 << 23) /* tiles of all rows: kernels count them in floats */

#define AMD_SHARE      0.85
#define AMD_KEYS       64
#define AMD_LATENCY_US 1.0
#define AMD_COMBINE_US 5.0

static int64_t work_items(const struct fmha_problem *p)
{
	return (int64_t)p->batch * p->nhead_k * ceil_div(plan_packed_rows(p), TILE_ROWS);
}

/* Whether Hopper's loop for many rows may have it in splits: hopper/fwd_wgmma.h. */
static bool is_for_warpgroups(const struct fmha_problem *p, const struct split_device *device)
{
	return device->warpgroups && p->hdim_q <= 256 && p->hdim_v <= 256 && p->hdim_q % 8 == 0 &&
	       p->hdim_v % 8 == 0 && p->topk == 0 && !p->v_in_k && p->dropout_p == 0 &&
	       p->q.dtype != FMHA_F32 && !plan_present(p, FMHA_T_BIAS) &&
	       !plan_present(p, FMHA_T_ALIBI_SLOPES) && !plan_present(p, FMHA_T_MASK_INTERVALS) &&
	       !plan_present(p, FMHA_T_MASK_BITS);
}

/* Its tiles of @most rows, of a head or, @together, of all heads that share keys; of packed sequences as many as
 * there may be. */
static int64_t warpgroup_tiles(const struct fmha_problem *p, int64_t most, bool together)
{
	int64_t heads = p->nhead_q / p->nhead_k, rows = together ? most / heads : most;
	int64_t n = p->batch * ceil_div(p->seqlen_q, rows), packed = p->total_q / rows + p->batch;

	return (p->mode == FMHA_GROUP && packed < n ? packed : n) *
	       (together ? p->nhead_k : p->nhead_q);
}

bool split_groups_heads(const struct fmha_problem *p, int64_t tile_rows)
{
	return p->nhead_k > 0 && p->nhead_q / p->nhead_k <= tile_rows &&
	       !plan_present(p, FMHA_T_Q_DESCALE) &&
	       10 * warpgroup_tiles(p, tile_rows, true) < 9 * warpgroup_tiles(p, tile_rows, false);
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

/* Of its value, too, if that lies elsewhere. */
static int64_t key_bytes(const struct fmha_problem *p)
{
	return ((int64_t)p->hdim_q + (p->v_in_k ? 0 : p->hdim_v)) * fmha_dtype_bytes(p->k.dtype);
}

/* Whether Hopper's loop for latents may have it. */
static bool is_latent(const struct fmha_problem *p, const struct split_device *device)
{
	return p->v_in_k && p->hdim_q == 576 && p->hdim_v == 512 && device->shares &&
	       (p->kv_layout == FMHA_KV_LATENT_FP8 || fmha_dtype_bytes(p->k.dtype) == 2);
}

/* Bytes a microsecond that memory has for a unit. */
static double unit_rate(const struct split_device *device)
{
	return device->amd_unit_rate > 0 ? AMD_SHARE * device->amd_unit_rate : UNIT_RATE;
}

/* A block of Hopper's loop for heads above 256 fills a unit, and brings that unit's share of memory. */
static bool is_wide(const struct fmha_problem *p, const struct split_device *device)
{
	return device->warpgroups && !p->v_in_k && (p->hdim_q > 256 || p->hdim_v > 256);
}

static int64_t places_of(const struct fmha_problem *p, const struct split_device *device)
{
	return (is_wide(p, device) ? 1 : UNIT_BLOCKS) * device->units;
}

static struct pace pace_of(const struct fmha_problem *p, const struct split_device *device)
{
	int64_t rows = plan_packed_rows(p);

	if (is_wide(p, device))
		return (struct pace){1, 1};
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

/* What merging takes, in microseconds. */
static double merge_us(const struct fmha_problem *p, int64_t parts,
		       const struct split_device *device)
{
	int64_t rows = (int64_t)p->batch * p->nhead_k * plan_packed_rows(p);

	if (parts <= 1)
		return 0;
	return (device->amd_unit_rate > 0 ? AMD_COMBINE_US : COMBINE_US) + PART_US * (double)parts +
	       (double)(rows * parts) * 2 * sizeof(float) * p->hdim_v /
		       (unit_rate(device) * (double)device->units);
}

/* Microseconds of about @n splits. */
static double stream_us(const struct fmha_problem *p, int64_t n, int64_t items,
			const struct split_device *device)
{
	int64_t units = device->units;
	int64_t size = n > 1 ? split_keys(p, n) : p->seqlen_k, places = places_of(p, device);
	int64_t parts = ceil_div(p->seqlen_k, size), blocks = items * parts;
	struct pace pace = pace_of(p, device);

	return (double)(size * key_bytes(p)) / unit_rate(device) *
		       ((double)(blocks / places) * round_time(pace, places, units) +
			round_time(pace, blocks % places, units)) +
	       merge_us(p, parts, device);
}

/* The same of latents. Those of fp8 have fewer bytes, and tiles that take longer. */
static double latent_us(const struct fmha_problem *p, int64_t n, int64_t items,
			const struct split_device *device)
{
	bool coded = p->kv_layout == FMHA_KV_LATENT_FP8;
	int64_t size = n > 1 ? split_keys(p, n) : p->seqlen_k, parts = ceil_div(p->seqlen_k, size);
	int64_t blocks = items * parts, tiles = ceil_div(plan_packed_rows(p), TILE_ROWS);
	double memory = (double)blocks / (double)tiles / (double)device->units *
			(coded ? FMHA_LATENT_BYTES : (double)key_bytes(p));
	double products = (double)ceil_div(blocks, device->units) * 2 * p->hdim_q / LATENT_PACE *
			  (coded ? LATENT_WIDENS : 1);

	return (double)size / UNIT_RATE * (memory > products ? memory : products) +
	       merge_us(p, parts, device);
}

static double split_us(const struct fmha_problem *p, int64_t n, int64_t items,
		       const struct split_device *device)
{
	return is_latent(p, device) ? latent_us(p, n, items, device)
				    : stream_us(p, n, items, device);
}

static void choose_streaming(const struct fmha_problem *p, int64_t items,
			     const struct split_device *device, struct split_choice *ret_choice)
{
	int64_t most = p->seqlen_k / (is_latent(p, device) ? LATENT_KEYS : STREAM_KEYS), n = 1;
	double unsplit = split_us(p, 1, items, device), best = unsplit, us = unsplit;

	if (most > STREAM_SPLITS)
		most = STREAM_SPLITS;
	for (int64_t i = 2; i <= most; i++)
		if (split_us(p, i, items, device) < best)
			best = split_us(p, i, items, device);
	while (us > 1.02 * best)
		us = split_us(p, ++n, items, device);
	set_splits(p, n, ret_choice);
	(void)snprintf(ret_choice->why, sizeof(ret_choice->why),
		       "memory takes %.1f us with %lld blocks of %d keys on %lld units, %.1f us "
		       "unsplit",
		       us, (long long)(items * ret_choice->n), ret_choice->size,
		       (long long)device->units, unsplit);
}

/* Whether rows see a part of the keys alone. */
static bool is_windowed(const struct fmha_problem *p)
{
	return p->mask != FMHA_MASK_NONE && p->window_left >= 0 &&
	       (int64_t)p->window_left + p->seqlen_q < p->seqlen_k;
}

/* Whether splits of equal size are of unequal work. */
static bool is_uneven(const struct fmha_problem *p)
{
	return is_windowed(p) || plan_present(p, FMHA_T_SEQLEN_K) ||
	       plan_present(p, FMHA_T_KV_INDPTR) || plan_present(p, FMHA_T_SEQSTART_K) ||
	       plan_present(p, FMHA_T_LEFTPAD_K);
}

/* Whether parts may be what blocks make of them, and not a split's of equal size. */
static bool may_share(const struct fmha_problem *p)
{
	return !p->deterministic && !plan_present(p, FMHA_T_MASK_INTERVALS) &&
	       !plan_present(p, FMHA_T_MASK_BITS);
}

static void set_shares(const struct fmha_problem *p, int64_t n, struct split_choice *ret_choice)
{
	*ret_choice = (struct split_choice){
		.n = (int32_t)n, .size = (int32_t)ceil_div(p->seqlen_k, n), .shares = true};
	(void)snprintf(ret_choice->why, sizeof(ret_choice->why),
		       "blocks share all keys, a row is in at most %d parts", ret_choice->n);
}

/* Return: whether shares are for the problem. */
static bool choose_shares(const struct fmha_problem *p, int64_t items,
			  const struct split_device *device, struct split_choice *ret_choice)
{
	int64_t places = places_of(p, device), alone = (places - 1) / p->nhead_k;
	int64_t n = 2 * ceil_div(places, items) + 2, most = p->seqlen_k / STREAM_KEYS;

	if (!device->shares || is_latent(p, device) || !may_share(p) || most < 2 || !is_uneven(p) ||
	    plan_packed_rows(p) > SHARE_ROWS ||
	    (p->batch == 1 && p->seqlen_k <= ALONE_KEYS && !is_windowed(p)) ||
	    (items >= BUSY_ROUNDS * places && p->seqlen_k <= SHORT_KEYS) ||
	    items * ceil_div(p->seqlen_k, SHARE_STEP) > SHARE_UNITS)
		return false;
	n = n < alone || alone < 2 ? n : alone;
	n = n < most + 1 ? n : most + 1;
	set_shares(p, n < STREAM_SPLITS ? n : STREAM_SPLITS, ret_choice);
	return true;
}

/* Whether sequences are far shorter than there is room for, most of them: these would take so many times the pages that the
 * cache has. */
#define ROOM_TIMES 3
static bool has_surplus_room(const struct fmha_problem *p)
{
	return plan_present(p, FMHA_T_SEQLEN_K) && plan_paged(p) &&
	       ROOM_TIMES * (int64_t)p->n_pages * p->page_size < (int64_t)p->batch * p->seqlen_k;
}

/* Latents of 16 bits by shares, where equal splits would be merged anyway. */
static void share_latents(const struct fmha_problem *p, int64_t items,
			  const struct split_device *device, struct split_choice *choice)
{
	int64_t tiles = ceil_div(plan_packed_rows(p), TILE_ROWS), alone = device->units / tiles;
	int64_t n = 2 * ceil_div(device->units, items) + 2,
		most = ceil_div(p->seqlen_k, LATENT_KEYS);

	if (choice->n < 2 || p->kv_layout == FMHA_KV_LATENT_FP8 || !may_share(p) ||
	    !has_surplus_room(p) || alone < 2 || items * most > SHARE_UNITS)
		return;
	n = n < alone ? n : alone;
	n = n < most ? n : most;
	set_shares(p, n > choice->n ? n : choice->n, choice);
}

int32_t split_few(const struct fmha_problem *problem, const struct split_device *device,
		  int32_t few_rows)
{
	int64_t group = problem->nhead_q / problem->nhead_k, places = UNIT_BLOCKS * device->units;
	int64_t items = (int64_t)problem->batch * problem->nhead_k;
	int64_t tiles = ceil_div(problem->total_q * group, DECODE_ROWS) + problem->batch;
	int64_t n = 2 * ceil_div(places, items) + 2, most = problem->seqlen_k / STREAM_KEYS;

	if (!device->shares || problem->deterministic || few_rows * group > TILE_ROWS || most < 2 ||
	    tiles * problem->nhead_k * ceil_div(problem->seqlen_k, 2 * SHARE_STEP) > SHARE_UNITS)
		return 0;
	n = n < most + 1 ? n : most + 1;
	return (int32_t)(n < STREAM_SPLITS ? n : STREAM_SPLITS);
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

/* Microseconds of @n splits by Hopper's loop for many rows, each of which has blocks of its own; 0: unsplit. */
static double warpgroup_us(const struct fmha_problem *p, int64_t n, int64_t tiles,
			   const struct split_device *device)
{
	int64_t units = device->units, parts = n > 0 ? n : 1;
	int64_t blocks = units / parts > 0 ? units / parts : 1;
	int64_t size = ceil_div(ceil_div(p->seqlen_k, parts), WARPGROUP_KEYS) * WARPGROUP_KEYS;
	int64_t rows = p->mode == FMHA_GROUP ? p->total_q : (int64_t)p->batch * p->seqlen_q;
	double key_us = WARPGROUP_KEY_US * WARPGROUP_ROWS(p) / 128.0 * (p->hdim_q + p->hdim_v) /
			256;
	double rounds = (double)ceil_div(tiles, blocks) * (double)ceil_div(parts * blocks, units);
	double merge = (double)(rows * p->nhead_q * n) * 2 * sizeof(float) * p->hdim_v /
		       (UNIT_RATE * (double)units);

	if (n == 0)
		return rounds * ((double)size * key_us + WARPGROUP_US);
	return rounds * ((double)size * key_us + WARPGROUP_PART_US) + WARPGROUP_MERGE_US + merge;
}

/*
 * Pieces that are alike go round the units, and those of a last round that is not half full may be cut by keys, so that
 * more units have some of them: whose part of a tile comes last adds it up. Worked, 132 units: 800 tiles of 5,000 keys
 * and 128 dimensions are 6 rounds and 8 tiles, which would take a seventh, 61 us; 8 parts of each are 64 of 640 keys:
 * 11 us, and 13 for their sums.
 */
static void choose_rest(const struct fmha_problem *p, const struct split_device *device,
			int64_t tiles, struct split_choice *ret_choice)
{
	int64_t units = device->units, left = tiles % units;
	double round = warpgroup_us(p, 0, 1, device), least = round,
	       whole = (double)(tiles / units);

	if (p->n_splits == 1 || tiles < units || left == 0 || p->mask != FMHA_MASK_NONE ||
	    p->mode == FMHA_GROUP || is_uneven(p) || p->logits_soft_cap > 0 ||
	    !REST_HDIM(p->hdim_v) || plan_paged(p) || fmha_dtype_bytes(p->q.dtype) != 2 ||
	    p->k.dtype != p->q.dtype)
		return;
	for (int64_t n = 2;
	     n <= REST_SPLITS && n * left <= units && n * MIN_SPLIT_KEYS <= p->seqlen_k; n++) {
		struct fmha_problem part = *p;
		double us;

		part.seqlen_k = (int32_t)ceil_div(p->seqlen_k, n);
		us = warpgroup_us(&part, 0, 1, device) + REST_US + REST_PART_US * (double)n;
		if (us < least) {
			least = us;
			ret_choice->rest = (int32_t)n;
			ret_choice->rest_parts = (int32_t)(n * left);
		}
	}
	if (round - least < REST_WORTH * (whole + 1) * round)
		ret_choice->rest = ret_choice->rest_parts = 0;
}

static void choose_warpgroups(const struct fmha_problem *p, const struct split_device *device,
			      struct split_choice *ret_choice)
{
	bool groups = split_groups_heads(p, WARPGROUP_ROWS(p));
	int64_t tiles = warpgroup_tiles(p, WARPGROUP_ROWS(p), groups),
		most = p->seqlen_k / MIN_SPLIT_KEYS;
	double unsplit = warpgroup_us(p, 0, tiles, device), best = unsplit, us;
	int64_t n = 0;

	if (is_windowed(p) || p->n_splits == 1) /* few of the splits would have work */
		most = 0;
	if (most > MAX_AUTO_SPLITS)
		most = MAX_AUTO_SPLITS;
	for (int64_t i = 2; i <= most; i++) {
		us = warpgroup_us(p, i, tiles, device);
		/* A merge, and lengths that may be uneven, are worth it where a good deal is gained. */
		if (us < (n == 0 ? 0.93 : 0.98) * best) {
			best = us;
			n = i;
		}
	}
	ret_choice->settled = true;
	ret_choice->groups = n == 0 && groups;
	if (n == 0)
		choose_rest(p, device, tiles, ret_choice);
	if (n > 0) {
		ret_choice->size = (int32_t)(ceil_div(ceil_div(p->seqlen_k, n), WARPGROUP_KEYS) *
					     WARPGROUP_KEYS);
		ret_choice->n = (int32_t)ceil_div(p->seqlen_k, ret_choice->size);
	}
	(void)snprintf(ret_choice->why, sizeof(ret_choice->why),
		       "%lld tiles of rows for %lld units, %d keys: about %.0f us, %.0f unsplit",
		       (long long)tiles, (long long)device->units, p->seqlen_k, best, unsplit);
	if (ret_choice->rest > 0)
		(void)snprintf(ret_choice->why, sizeof(ret_choice->why),
			       "%lld tiles of rows for %lld units, %d keys: the last %lld in %d "
			       "parts each",
			       (long long)tiles, (long long)device->units, p->seqlen_k,
			       (long long)(tiles % device->units), ret_choice->rest);
}

/* Rows that have chosen their keys are sequences of one row each, all of a length. */
static void split_chosen(const struct fmha_problem *problem, const struct split_device *device,
			 struct split_choice *ret_choice)
{
	struct fmha_problem rows = *problem;
	struct split_device alone = *device;
	int64_t n = problem->total_q > 0 ? problem->total_q
					 : (int64_t)problem->batch * problem->seqlen_q;

	rows.topk = 0;
	rows.batch = n < INT32_MAX ? (int32_t)n : INT32_MAX;
	rows.seqlen_q = 1;
	rows.seqlen_k = problem->topk;
	rows.deterministic = 1;                    /* splits that are cut */
	alone.shares = is_latent(problem, device); /* which takes none */
	split_choose(&rows, &alone, ret_choice);
}

void split_choose(const struct fmha_problem *problem, const struct split_device *device,
		  struct split_choice *ret_choice)
{
	int64_t items = work_items(problem), units = device->units;

	if (problem->topk > 0) {
		split_chosen(problem, device, ret_choice);
		return;
	}
	*ret_choice = (struct split_choice){.n = 1, .size = problem->seqlen_k};
	if (problem->split_size > 0) {
		ret_choice->n = (int32_t)ceil_div(problem->seqlen_k, problem->split_size);
		ret_choice->size = problem->split_size;
		/* One split of all keys: beyond them there is neither work nor workspace. */
		if (ret_choice->size > problem->seqlen_k)
			ret_choice->size = most_keys(problem);
		(void)snprintf(ret_choice->why, sizeof(ret_choice->why), "as asked: split_size");
	} else if (problem->n_splits == 1 && plan_packed_rows(problem) > TILE_ROWS &&
		   is_for_warpgroups(problem, device)) {
		choose_warpgroups(problem, device, ret_choice);
	} else if (problem->n_splits != 0) {
		ret_choice->n = problem->n_splits;
		if (problem->seqlen_k > 0) /* as many as have keys */
			set_splits(problem, problem->n_splits, ret_choice);
		(void)snprintf(ret_choice->why, sizeof(ret_choice->why), "as asked: n_splits");
	} else if (problem->seqlen_k == 0) {
		(void)snprintf(ret_choice->why, sizeof(ret_choice->why), "no keys");
	} else if (device->gpu && items > 0 &&
		   (plan_packed_rows(problem) <= TILE_ROWS || is_latent(problem, device))) {
		if (!choose_shares(problem, items, device, ret_choice))
			choose_streaming(problem, items, device, ret_choice);
		if (is_latent(problem, device))
			share_latents(problem, items, device, ret_choice);
	} else if (is_for_warpgroups(problem, device)) {
		choose_warpgroups(problem, device, ret_choice);
	} else {
		choose_balance(problem, items, units, ret_choice);
	}
}

/*
 * Backward: dQ is a sum over all keys, in one split or several, a buffer each. Kernels split nothing where they
 * have enough to do without, since every split is a pass over its sums.
 *
 * On a CPU a phase of a square (kernels/square.h) has a task for each chunk of queries or of keys, of whichever
 * are fewer, and there is a phase for each of the others. Groups of key chunks have squares of their own, side by
 * side. Worked: 1 sequence of 8 heads, 384 rows, 32,768 keys in tiles of 192: a head has 1 chunk of rows, 86 of
 * keys. 64 cores get 86 phases of 8 tasks; in 8 groups of 11 chunks, 11 phases of 64 tasks. 2 cores have enough
 * with the 8; of one head they get two groups.
 *
 * On a GPU without tiles of dQ of its own (hopper/), blocks of 64 rows stream all keys, three products a pair,
 * beside blocks of 128 keys that stream all rows, four products. Few rows make few blocks of the first kind, each
 * of them long. Worked: 304 units, 1 sequence of 8 heads, 256 rows, 65,536 keys: 32 blocks of 64 * 65536 * 3 =
 * 12.6 M, 4,096 of 0.13 M: 3.1 M a unit if they were even, so 5 splits.
 */
#define DQ_SPLITS     64  /* at most */
#define DQ_SPLIT_KEYS 256 /* at least, of a GPU's */
#define DQ_BLOCK_ROWS 64
#define DQ_BLOCK_KEYS 128
#define DQ_WORTH      1.25 /* so many times as fast, or not at all */

/* Sequences as long as the longest: packed ones are fewer. */
static int64_t long_sequences(const struct fmha_problem *p)
{
	int64_t n = p->batch;

	if (p->mode == FMHA_GROUP && p->seqlen_q > 0 && ceil_div(p->total_q, p->seqlen_q) < n)
		n = ceil_div(p->total_q, p->seqlen_q);
	return n;
}

/* Rounds of tasks in groups of so many key chunks. */
static int64_t square_rounds(struct square square, int64_t group, int64_t heads, int64_t units)
{
	int64_t n_q = square.n_q, groups = ceil_div(square.n_k, group);
	int64_t turns = n_q > group ? n_q : group, wide = n_q < group ? n_q : group;

	return turns * ceil_div(heads * groups * wide, units);
}

static void choose_dq_groups(const struct fmha_problem *p, struct square square, int64_t units,
			     struct split_choice *ret_choice)
{
	int64_t heads = long_sequences(p) * p->nhead_k, group = square.n_k;
	int64_t most = square.n_k < DQ_SPLITS ? square.n_k : DQ_SPLITS;
	int64_t unsplit = square_rounds(square, group, heads, units), best = unsplit, rounds;

	for (int64_t n = 2; p->n_splits == 0 && n <= most; n++) {
		rounds = square_rounds(square, ceil_div(square.n_k, n), heads, units);
		if ((double)rounds * DQ_WORTH <= (double)unsplit && rounds < best) {
			best = rounds;
			group = ceil_div(square.n_k, n);
		}
	}
	if (p->n_splits > 0)
		group = ceil_div(square.n_k, p->n_splits);
	ret_choice->n = (int32_t)ceil_div(square.n_k, group);
	ret_choice->size = (int32_t)(group * square.chunk_k);
	(void)snprintf(ret_choice->why, sizeof(ret_choice->why),
		       "dQ: %lld rounds of tasks on %lld cores, %lld in one split",
		       (long long)square_rounds(square, group, heads, units), (long long)units,
		       (long long)unsplit);
}

static void choose_dq_blocks(const struct fmha_problem *p, int64_t units,
			     struct split_choice *ret_choice)
{
	int64_t n_long = long_sequences(p), most = p->seqlen_k / DQ_SPLIT_KEYS, n = p->n_splits;
	double of_keys = 4.0 * DQ_BLOCK_KEYS * p->seqlen_q * ((double)p->nhead_q / p->nhead_k);
	double of_rows = 3.0 * DQ_BLOCK_ROWS * p->seqlen_k;
	double n_keys = (double)(n_long * p->nhead_k * ceil_div(p->seqlen_k, DQ_BLOCK_KEYS));
	double n_rows = (double)(n_long * p->nhead_q * ceil_div(p->seqlen_q, DQ_BLOCK_ROWS));
	double even = (n_keys * of_keys + n_rows * of_rows) / (double)units;

	if (even < of_keys)
		even = of_keys;
	if (n == 0)
		n = of_rows < DQ_WORTH * even || is_windowed(p) ? 1 : (int64_t)(of_rows / even) + 1;
	if (p->n_splits == 0 && n > most)
		n = most > 1 ? most : 1;
	if (n > DQ_SPLITS)
		n = DQ_SPLITS;
	set_splits(p, n, ret_choice);
	(void)snprintf(ret_choice->why, sizeof(ret_choice->why),
		       "dQ: blocks of rows have %.3g of the work that a unit would have of all",
		       of_rows / even);
}

void split_choose_dq(const struct fmha_problem *problem, const struct split_device *device,
		     const struct square *square, struct split_choice *ret_choice)
{
	*ret_choice = (struct split_choice){.n = 1, .size = problem->seqlen_k};
	if (problem->seqlen_k == 0)
		return;
	if (square)
		choose_dq_groups(problem, *square, device->units, ret_choice);
	else if (device->amd_unit_rate > 0)
		choose_dq_blocks(problem, device->units, ret_choice);
}
