/* SPDX-License-Identifier: MIT */
/*
 * estimate.c: how long each candidate of a stage will take. In the order of trust:
 *
 *   measured  at this shape, in microseconds
 *   nearby    measured at the nearest shape that was: of the same word but for a step in a length
 *   model     predicted by a model that was fitted to measured times of this device (predict.h)
 *   formula   an estimated cost in a unit of its own
 *
 * All are brought to one scale: where some candidates were measured and others were not, the others'
 * prediction or cost is multiplied by the median of what measurements and predictions differ by. So
 * one slow candidate that happens to have been measured does not beat all that were not.
 */
#include <math.h>
#include <stdlib.h>

#include <specs/backend.h>

#include "internal.h"
#include "predict.h"

#define MOST_MEASURED 256

/* ---- what a problem costs ---- */

/*
 * What a problem costs at least. Multiplies and adds are counted apart; (row, column) pairs
 * that the mask hides are left out.
 *
 *   forward   2 (hdim_q + hdim_v) a visible pair and query head      S = Q K^T, O = P V
 *   backward  2 (3 hdim_q + 2 hdim_v)                                S, dP, dV, dQ, dK
 *   merge     3 hdim_v a part, row and head                          weight, multiply, add
 *   append    3 a rotated element                                    two products and a sum
 *
 * Worked: batch 2, 16 heads, 1024 x 1024, hdim 128: 2^20 pairs a head, 32 heads:
 *   forward 2^25 * 512 = 17,179,869,184; causal 524,800 of the 1,048,576 pairs: 8,598,323,200;
 *   backward 2^25 * 1280 = 42,949,672,960, 2.5 times forward.
 * Group mode knows only totals when a plan is made: it counts sequences of the mean length.
 */

/* Visible columns of row @i, a piecewise linear function of i. */
static double visible_columns(const struct fmha_problem *p, int64_t seqlen_k, int64_t anchor,
			      int64_t i)
{
	int64_t low = p->window_left < 0 ? 0 : anchor + i - p->window_left;
	int64_t high = p->window_right < 0 ? seqlen_k - 1 : anchor + i + p->window_right;
	int64_t sinks;

	if (low < 0)
		low = 0;
	if (high > seqlen_k - 1)
		high = seqlen_k - 1;
	/* Sink columns that lie left of the window, but not right of the band. */
	sinks = p->sink_tokens < low ? p->sink_tokens : low;
	if (sinks > high + 1)
		sinks = high + 1;
	return (high >= low ? (double)(high - low + 1) : 0.0) + (sinks > 0 ? (double)sinks : 0.0);
}

static int compare_i64(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

/*
 * The sum over all rows without visiting them: the function bends only where the band's edges cross
 * the borders 0, seqlen_k and sink_tokens, so between two bends the rows form an arithmetic series.
 */
double cost_visible_pairs(int64_t seqlen_q, int64_t seqlen_k, const struct fmha_problem *problem)
{
	int64_t anchor = problem->mask == FMHA_MASK_BOTTOM_RIGHT ? seqlen_k - seqlen_q : 0;
	int64_t borders[3] = {0, seqlen_k, problem->sink_tokens};
	int64_t edges[2] = {-(int64_t)problem->window_left, problem->window_right};
	int64_t bends[2 + 3 * 2 * 5];
	size_t n = 0;
	double sum = 0;

	if (seqlen_q <= 0 || seqlen_k <= 0)
		return 0;
	if (problem->mask == FMHA_MASK_NONE)
		return (double)seqlen_q * (double)seqlen_k;
	bends[n++] = 0;
	bends[n++] = seqlen_q;
	for (int e = 0; e < 2; e++)
		for (int b = 0; b < 3; b++)
			/* Two rows around each crossing, so that off-by-one bends are included. */
			for (int64_t d = -2; d <= 2; d++) {
				int64_t row = borders[b] - anchor - edges[e] + d;

				if (row > 0 && row < seqlen_q)
					bends[n++] = row;
			}
	qsort(bends, n, sizeof(bends[0]), compare_i64);
	for (size_t i = 0; i + 1 < n; i++) {
		int64_t first = bends[i], last = bends[i + 1] - 1;

		if (last < first)
			continue;
		sum += (visible_columns(problem, seqlen_k, anchor, first) +
			visible_columns(problem, seqlen_k, anchor, last)) *
		       (double)(last - first + 1) / 2;
	}
	return sum;
}

static double rows_of(const struct fmha_problem *p)
{
	struct problem_axes axes;

	problem_axes(p, &axes);
	return (double)axes.q.outer * (double)axes.q.length;
}

static double pairs_of(const struct fmha_problem *p)
{
	int64_t q = p->seqlen_q, k = p->seqlen_k, batch = p->batch;

	if (batch == 0)
		return 0;
	if (p->topk > 0)
		return rows_of(p) * p->topk;
	if (p->mode == FMHA_GROUP) {
		q = ceil_div(p->total_q, batch);
		if (plan_present(p, FMHA_T_SEQSTART_K))
			k = ceil_div(p->total_k, batch);
	}
	return (double)batch * cost_visible_pairs(q, k, p);
}

static double append_flops(const struct fmha_problem *p, bool rotates_q)
{
	double rows = (double)p->batch * p->seqlen_new * p->nhead_k;

	if (p->rope == FMHA_ROPE_NONE)
		return 0;
	if (rotates_q)
		rows += rows_of(p) * p->nhead_q;
	return 3.0 * rows * p->rotary_dim;
}

double cost_flops(const struct fmha_problem *problem)
{
	const struct fmha_problem *p = problem;
	double heads = p->nhead_q;

	switch (p->op) {
	case FMHA_FORWARD:
		return pairs_of(p) * heads * 2.0 * (p->hdim_q + p->hdim_v) + append_flops(p, true);
	case FMHA_BACKWARD:
		return pairs_of(p) * heads * 2.0 * (3.0 * p->hdim_q + 2.0 * p->hdim_v);
	case FMHA_APPEND_KV:
		return append_flops(p, plan_present(p, FMHA_T_Q_ROTATED));
	case FMHA_MERGE_STATES:
		return 3.0 * p->n_parts * rows_of(p) * heads * p->hdim_v;
	default:
		return 0;
	}
}

/* Elements of a view that are read or written at least once, broadcast axes counted once. */
static double elements_of(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	double elements = 1;
	int64_t dims[5];

	problem_extents(p, role, dims);
	for (int i = 0; i < proto_roles[role].n_dims; i++)
		if (dims[i] == 0 || p->tensor[role].stride[i] != 0 || dims[i] == 1)
			elements *= (double)dims[i];
	return elements;
}

static int key_elements(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	if (role == FMHA_T_V)
		return p->hdim_v;
	return p->kv_layout == FMHA_KV_LATENT_FP8 ? FMHA_LATENT_BYTES : p->hdim_q;
}

uint64_t cost_bytes(const struct fmha_problem *problem)
{
	const struct fmha_problem *p = problem;
	double total = 0;

	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		enum fmha_tensor_role role = (enum fmha_tensor_role)i;
		double elements;

		if (role == FMHA_T_WORKSPACE || !plan_present(p, role))
			continue;
		elements = elements_of(p, role);
		if ((role == FMHA_T_K || role == FMHA_T_V) &&
		    (plan_paged(p) || plan_present(p, FMHA_T_CACHE_BATCH_IDX))) {
			/* A cache may be larger than what the sequences use of it. */
			double used = (double)p->batch * cost_keys(p) * p->nhead_k *
				      key_elements(p, role);

			if (used < elements)
				elements = used;
		}
		if ((role == FMHA_T_K || role == FMHA_T_V) && p->op == FMHA_APPEND_KV)
			elements = (double)p->batch * p->seqlen_new * p->nhead_k *
				   key_elements(p, role);
		total += elements * fmha_dtype_bytes(p->tensor[role].dtype);
	}
	return total < 0x1p63 ? (uint64_t)total : UINT64_MAX;
}

/*
 * Forward on a CPU: rows, each over all keys of a split, that the busiest of @units threads works
 * for. A task has up to @m0 rows, and computes no others; one of few rows takes as long as one of
 * LEAST_ROWS. Tasks of equal length come in waves; of unequal ones a thread does its share, and
 * the last of them ends about half a task later. Twice as many tasks are 1 % slower. Kernels that
 * pack touch K and V once more, which takes as long as PACKING_ROWS; those that do not multiply
 * row by row, which takes UNPACKED times as long, in tasks of few keys.
 *
 * Worked, two threads, 8 heads, times 1.01 and 1.02: 128 rows are 512 + 24 in tasks of 96 and 512 +
 * 12 of 48; 64 rows are 256 and 268; 192 are 768 either way. Zen 5, float32, hdim 64, 1024 keys: 48
 * took 0.94, 1.08 and 0.99 of the time of 96; packing 17 rows within the caches, 45 beyond; one
 * row 11; and without packing one row 13, 16 rows (bf16, hdim 128) 46.
 */
#define LEAST_ROWS    12
#define READING_ROWS  4
#define FEWEST_SHARED 5
#define PACKING_ROWS  32
#define UNPACKED      2

/*
 * Likewise where all heads of a key head share a task's keys, which become floats once for each and are cut
 * into as many chunks as there are threads for: READING_ROWS. Zen 1, bf16, 576 and 512, 2,048 keys: 8, 16, 32
 * and 128 heads took as long as 13, 17, 34 and 128 of the 128's rows; packing, 26, 32, 47 and 137; row by row,
 * 14 and 27, but 3, 4 and 8 of 1, 2 and 4 heads, where sharing took 10: FEWEST_SHARED.
 */
double cost_cpu_shared_rows(const struct fmha_problem *problem, int64_t m0, int64_t n_splits,
			    int64_t units)
{
	const struct fmha_problem *p = problem;
	int64_t group = p->nhead_q / p->nhead_k, alike = p->topk > 0 ? 1 : p->seqlen_q;
	int64_t rows = group * alike, task = rows < m0 ? rows : m0;
	int64_t tasks = ceil_div(rows, m0) * (p->seqlen_q / (alike > 0 ? alike : 1)) * p->batch *
			p->nhead_k * n_splits;

	task = rows < FEWEST_SHARED ? 3 * LEAST_ROWS : task < LEAST_ROWS ? LEAST_ROWS : task;
	return (double)(tasks * (task + READING_ROWS)) / (double)units;
}

double cost_cpu_rows(const struct fmha_problem *problem, int64_t m0, int64_t n_splits,
		     int64_t units, bool packs)
{
	const struct fmha_problem *p = problem;
	int64_t rows = p->seqlen_q, heads_k = (int64_t)p->batch * p->nhead_k * n_splits;
	int64_t heads = (int64_t)p->batch * p->nhead_q * n_splits, task, tasks;
	double share, span;

	if (2 * rows <= m0 && heads_k > 0) { /* query heads share a task */
		rows *= heads / heads_k;
		heads = heads_k;
	}
	task = rows < m0 ? rows : m0;
	task = task < LEAST_ROWS ? LEAST_ROWS : task;
	tasks = ceil_div(rows, m0) * heads;
	if (!packs)
		return UNPACKED * (double)(tasks * task) / (double)units;
	share = (double)(rows * heads) / (double)units;
	span = share + (double)(task * (units - 1)) / (double)(2 * units);
	if (rows <= m0 || rows % m0 == 0)
		span = (double)(ceil_div(tasks, units) * task);
	else if (span < (double)task)
		span = (double)task;
	return (span + PACKING_ROWS * (double)heads_k / (double)units) * (1 + 1 / (double)m0);
}

/* ---- the formula ---- */

/*
 * The estimated cost of a tile shape: what all compute units spend until the last one is done.
 *
 *   rows    = seqlen_q; a pipeline that packs puts the query heads of a group side by side
 *   blocks  = ceil(rows / m0) * heads * batch             tiles of rows, one a workgroup
 *   waves   = ceil(blocks / compute_units)                the last one may be nearly empty
 *   work    = m0 * ceil(seqlen_k / n0) * n0 * (hq + hv)   of a workgroup, padding included
 *   reuse   = m0 * n0 / (m0 + n0)                         flops a loaded element is good for
 *   lanes   = a wave's * waves of the tile; each holds m0 * (n0 + hv) / lanes accumulators
 *   cost    = waves * work * (1 + 32 / reuse) * (1 + 8 / k0) * (1 + 2 % a padding flag)
 *             * 16 without matrix instructions * 0.55 with those of warpgroups * 0.6 when staged
 *             * 0.35 in a loop for latents alone, which brings each key once for S and for O
 *             * 0.12 in one of warpgroups that packs rows (heads above 256): in decode, where most of its
 *             rows are padding, an H100 takes 0.2 to 0.67 of the time of tiles of 16 rows, else 0.29
 *             * 0.65 where one tile has all rows and its keys stream
 *             * 1 + bytes / 32, up to 4, for code that spills so many, as is known once it is compiled; * 4
 *             as it would above 256 accumulators. (H200, hdim 256 with a soft cap: a tile of warpgroups that
 *             spills 40 bytes, of what lives through its loop, runs 488 TFLOP/s, one of mma.sync 195.)
 *
 * Backward, a workgroup owns n0 keys, and its waves share them: what a wave loads is good for m0 by
 * n0 / waves. It waits at many barriers: 5 % more unless another workgroup is there to fill in.
 * (H200, hdim 64: 32 x 128 of 4 waves, two a unit, 1.24 times as fast as 64 x 128 of 8.) A workgroup of one
 * wave brings into LDS what nobody else reads: twice. (RDNA, hdim 128 with dropout, counted: 16 x 16 of one wave
 * leaves 0.27 and 0.16 of the matrix units' speed, 16 x 64 of four 0.57 and 0.40.)
 *
 * A CPU's forward is cost_cpu_rows() * seqlen_k * (hq + hv). Others wait for the end of a task:
 * over long rows one of many rows costs half as much again.
 *
 * Worked: 1 x 8 heads x 1024 x 1024, hdim 128, 104 units, k0 32 (1.25 everywhere). m0 = n0 = 128:
 * 64 blocks, 1 wave, work 2^25, reuse 64: 2^25 * 1.5. m0 64: 128 blocks, 2 waves of 2^24: 2^25 *
 * 1.75. With 16 query rows, m0 16 beats 128: the same one wave, an eighth of the work, reuse 14.2:
 * 3.25 / 8.
 */
#define SCALAR_COST      16
#define WARPGROUP_COST   0.55 /* H200: kernels of mma.sync reach 0.49 to 0.64 of what these do */
#define STREAMS_COST     0.65
#define WIDE_COST        0.12
#define LATENT_COST      0.35 /* a guess; H200: the loop takes 0.06 to 0.17 */
#define STAGED_COST      0.6  /* not measured: 0.27 to 0.66 of the issue cycles (NOTES.md) */
#define ALONE_COST       2
#define SPILL_COST       4
#define SPILL_BYTES      32.0
#define MAX_ACCUMULATORS 256
#define LONG_ROWS        4096 /* keys */
#define FEW_ROWS         48
#define MOST_ROW_BY_ROW  16 /* that share a key: others multiply floats then, too */
#define LONG_COST        1.5
#define WAVE             64 /* of an arch that only AMD's rules know */

struct tiling {
	int64_t m0, n0, rows, keys, heads;
};

static struct tiling tiling_of(const struct select_stage *stage, const struct kernel_spec *spec,
			       int flags)
{
	const struct fmha_problem *p = &stage->plan->problem;
	struct tiling t = {.m0 = spec->tile.tile_m0 ? spec->tile.tile_m0 : 1,
			   .n0 = spec->tile.tile_n0 ? spec->tile.tile_n0 : 1,
			   .rows = p->seqlen_q,
			   .keys = stage->plan->n_splits ? stage->plan->split_size : cost_keys(p),
			   .heads = p->nhead_q};
	bool groups = stage->family == ABI_FWD_SPLITKV && flags & SPEC_WARPGROUPS &&
		      split_groups_heads(p, t.m0);

	if ((flags & SPEC_PACKS_HEADS || groups) && p->nhead_k > 0) {
		t.rows *= p->nhead_q / p->nhead_k;
		t.heads = p->nhead_k;
	}
	return t;
}

/* Would the accumulators of S and O not fit a lane's registers? */
static bool would_spill(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			const struct tiling *t, int flags)
{
	const struct spec_backend_arch *model = spec_arch_model(catalog, spec->gfx_arch);
	int64_t lanes = (model ? model->wave : WAVE) * (int64_t)spec->tile.wave_m0 *
			spec->tile.wave_n0 * spec->tile.wave_k0;

	return !(flags & SPEC_IN_MEMORY) &&
	       t->m0 * (t->n0 + spec->signature.hdim_v) > lanes * MAX_ACCUMULATORS;
}

/* What floats take where others multiply bf16: half of their pairs' rate, and of tiles' a quarter, as NOTES.md
 * of the CPU kernels has it for both kinds of backward. */
static double float_cost(const struct spec_catalog *catalog, const struct kernel_spec *spec)
{
	const struct spec_backend_arch *model = spec_arch_model(catalog, spec->gfx_arch);
	int depth = model ? model->warp_k : 1;

	return depth > 2 ? 4 : depth;
}

/* That have the same keys. */
static int64_t shared_rows(const struct fmha_problem *p)
{
	return p->nhead_q / p->nhead_k * (p->topk > 0 ? 1 : (int64_t)p->seqlen_q);
}

static double cpu_forward_cost(const struct select_stage *stage, const struct spec_catalog *catalog,
			       const struct kernel_spec *spec, const struct tiling *t,
			       int64_t units, int flags)
{
	const struct fmha_problem *p = &stage->plan->problem;
	int64_t n_splits = stage->plan->n_splits ? stage->plan->n_splits : 1;
	bool holds_others_up = t->m0 > FEW_ROWS && t->rows > FEW_ROWS && p->seqlen_k > LONG_ROWS;

	if (flags & SPEC_LATENTS_ONLY)
		return cost_cpu_shared_rows(p, t->m0, n_splits, units) *
		       (double)(t->keys * (spec->signature.hdim_q + spec->signature.hdim_v)) *
		       (shared_rows(p) > MOST_ROW_BY_ROW ? float_cost(catalog, spec) : 1);
	return cost_cpu_rows(p, t->m0, n_splits, units, flags & SPEC_PACKS_KEYS) *
	       (double)(t->keys * (spec->signature.hdim_q + spec->signature.hdim_v)) *
	       (holds_others_up ? LONG_COST : 1);
}

/* Of a workgroup, backward: it owns n0 keys, of which each wave has its share. */
static double backward_work(const struct kernel_spec *spec, struct tiling *t)
{
	int64_t waves = (int64_t)spec->tile.wave_m0 * spec->tile.wave_n0 * spec->tile.wave_k0;
	double work = (double)(t->n0 * ceil_div(t->rows, t->m0) * t->m0);

	t->n0 = waves > 0 && t->n0 > waves ? t->n0 / waves : 1;
	if (waves == 1)
		work *= ALONE_COST;
	return spec->block_per_cu > 1 ? work : work * 1.05;
}

static double spill_cost(const struct candidate *c, bool would)
{
	double seen = 1 + c->spills / SPILL_BYTES;

	if (c->spills == 0)
		return would ? SPILL_COST : 1;
	return seen < SPILL_COST ? seen : SPILL_COST;
}

static double formula(const struct select_stage *stage, const struct spec_catalog *catalog,
		      const struct candidate *c)
{
	const struct kernel_spec *spec = &c->spec;
	const struct fmha_problem *p = &stage->plan->problem;
	int pipeline = spec_pipeline_flags(catalog, spec->pipeline);
	int flags = pipeline < 0 ? 0 : pipeline; /* AMD's: matrix instructions, and no more */
	struct tiling t = tiling_of(stage, spec, flags);
	int64_t units = stage->device->compute_units ? stage->device->compute_units : 1;
	int pads = (spec->pad_s != 0) + (spec->pad_sk != 0) + (spec->pad_d != 0) +
		   (spec->pad_dv != 0);
	int64_t k0 = spec->tile.tile_k0 ? spec->tile.tile_k0 : 1, blocks = t.heads * p->batch;
	bool would = would_spill(catalog, spec, &t, flags);
	double work, reuse;

	if (flags & SPEC_IN_MEMORY && stage->family != ABI_BWD_DQ_DK_DV)
		return cpu_forward_cost(stage, catalog, spec, &t, units, flags);
	if (stage->family == ABI_BWD_DQ_DK_DV) {
		blocks *= ceil_div(t.keys, t.n0);
		work = backward_work(spec, &t);
	} else {
		blocks *= ceil_div(t.rows, t.m0);
		work = (double)(t.m0 * ceil_div(t.keys, t.n0) * t.n0);
	}
	if (stage->family == ABI_FWD_SPLITKV && stage->plan->n_splits > 0)
		blocks *= stage->plan->n_splits;
	/* S is made in steps of k0, the last of which may stick out of hq. */
	work *= (double)(ceil_div(spec->signature.hdim_q, k0) * k0 + spec->signature.hdim_v);
	reuse = (double)(t.m0 * t.n0) / (double)(t.m0 + t.n0);
	return (double)ceil_div(blocks, units) * work * (1 + 32 / reuse) * (1 + 8.0 / (double)k0) *
	       (1 + 0.02 * pads) *
	       (flags & SPEC_NO_MATRIX                                ? SCALAR_COST
		: flags & SPEC_LATENTS_ONLY                           ? LATENT_COST
		: flags & SPEC_WARPGROUPS && flags & SPEC_PACKS_HEADS ? WIDE_COST
		: flags & SPEC_WARPGROUPS                             ? WARPGROUP_COST
		: flags & SPEC_STAGED                                 ? STAGED_COST
		: flags & SPEC_STREAMS && t.rows <= t.m0              ? STREAMS_COST
								      : 1) *
	       spill_cost(c, would);
}

/* ---- a model ---- */

static double log2_of(double value)
{
	return log2(value > 1 ? value : 1);
}

void predict_features(const struct select_stage *stage, const struct spec_catalog *catalog,
		      const struct candidate *candidate, double ret_features[PREDICT_FEATURES])
{
	const struct plan *plan = stage->plan;
	const struct fmha_problem *p = &plan->problem;
	const struct kernel_spec *spec = &candidate->spec;
	int pipeline = spec_pipeline_flags(catalog, spec->pipeline);
	struct tiling t = tiling_of(stage, spec, pipeline < 0 ? 0 : pipeline);
	bool splits = stage->family == ABI_FWD_SPLITKV && plan->n_splits > 0;
	double group = p->nhead_k > 0 ? (double)p->nhead_q / p->nhead_k : 1;
	double m0 = (double)t.m0, n0 = (double)t.n0, rows = (double)t.rows;
	double keys = splits ? plan->split_size : p->seqlen_k;
	double heads = (double)p->batch * (double)t.heads;
	double units = stage->device->compute_units ? stage->device->compute_units : 1;
	double blocks = heads * (splits ? plan->n_splits : 1), pairs, rounds;
	double *f = ret_features;

	blocks *= stage->family == ABI_BWD_DQ_DK_DV ? ceil(keys / n0) : ceil(rows / m0);
	rounds = blocks / units;
	pairs = (double)p->seqlen_q * p->seqlen_k;
	f[PREDICT_flops] = log2_of(plan->flops);
	f[PREDICT_bytes] = log2_of((double)plan->bytes);
	f[PREDICT_cost] = log2_of(candidate->cost);
	f[PREDICT_queries] = log2_of(p->seqlen_q);
	f[PREDICT_rows] = log2_of(rows);
	f[PREDICT_keys] = log2_of(keys);
	f[PREDICT_heads] = log2_of(heads);
	f[PREDICT_group] = group;
	f[PREDICT_hdim] = p->hdim_q + p->hdim_v;
	f[PREDICT_m0] = m0;
	f[PREDICT_n0] = n0;
	f[PREDICT_k0] = spec->tile.tile_k0;
	f[PREDICT_waves] = spec->tile.wave_m0 * spec->tile.wave_n0 * spec->tile.wave_k0;
	f[PREDICT_per_unit] = spec->block_per_cu;
	f[PREDICT_pipeline] = pipeline;
	f[PREDICT_splits] = splits ? log2_of(plan->n_splits) : 0;
	f[PREDICT_rounds] = log2(rounds > 1e-3 ? rounds : 1e-3);
	f[PREDICT_last_round] = rounds > 0 ? ceil(rounds) / rounds : 1;
	f[PREDICT_visible] = pairs > 0 ? cost_visible_pairs(p->seqlen_q, p->seqlen_k, p) / pairs
				       : 1;
	f[PREDICT_page] = plan_paged(p) ? log2_of(p->page_size) : -1;
	f[PREDICT_mode] = p->mode == FMHA_GROUP;
	f[PREDICT_family] = stage->family;
	f[PREDICT_element] = fmha_dtype_bytes(stage->dtype);
	f[PREDICT_pads] = (spec->pad_s != 0) + (spec->pad_sk != 0) + (spec->pad_d != 0) +
			  (spec->pad_dv != 0);
	f[PREDICT_row_waste] = rows > 0 ? ceil(rows / m0) * m0 / rows : 1;
	f[PREDICT_key_waste] = keys > 0 ? ceil(keys / n0) * n0 / keys : 1;
	f[PREDICT_spills] = candidate->spills > PREDICT_FEW_SPILLS;
	f[PREDICT_cap] = p->logits_soft_cap > 0;
#define TRAIT(name, NAME, word, kind, families, asked) f[PREDICT_trait_##name] = stage->traits.name;
	FMHA_OWN_TRAITS(TRAIT)
#undef TRAIT
}

/* The leaves of MODEL_ABREAST trees, added in order. */
static double add_trees(double sum, const struct predict_model *model, const uint32_t *roots,
			const double *features)
{
	const struct model_node *root[MODEL_ABREAST];
	uint32_t at[MODEL_ABREAST] = {0}, moved = 1;

	for (int i = 0; i < MODEL_ABREAST; i++)
		root[i] = &model->nodes[roots[i]];
	while (moved) {
		moved = 0;
		for (int i = 0; i < MODEL_ABREAST; i++) {
			const struct model_node *node = &root[i][at[i]];
			uint32_t next =
				node->child[!(features[node->feature] <= (double)node->value)];

			moved |= next ^ at[i];
			at[i] = next;
		}
	}
	for (int i = 0; i < MODEL_ABREAST; i++)
		sum += (double)root[i][at[i]].value;
	return sum;
}

static bool knows_kind(const struct predict_model *model, size_t i, const double *features)
{
	for (size_t k = 0; k < MODEL_KINDS; k++)
		if (model->kinds[i][k] == features[model_kinds[i]])
			return true;
	return false;
}

static bool knows_problem(const struct predict_model *model, const double *features)
{
	for (size_t i = 0; i < MODEL_N_KINDS; i++)
		if (!knows_kind(model, i, features))
			return false;
	for (size_t i = 0; i < MODEL_N_RANGES; i++)
		if (!(features[model_ranges[i]] >= model->ranges[i][0] &&
		      features[model_ranges[i]] <= model->ranges[i][1]))
			return false;
	for (int i = model->n_features; i < PREDICT_FEATURES; i++)
		if (features[i] != 0)
			return false;
	return true;
}

double predict_us(const struct predict_model *model, const double features[PREDICT_FEATURES],
		  double cost)
{
	double sum = model->base;

	if (!knows_problem(model, features))
		return 0;
	for (uint32_t i = 0; i < model->n_trees; i += MODEL_ABREAST)
		sum = add_trees(sum, model, &model->roots[i], features);
	return cost * exp2(sum);
}

/* ---- one scale ---- */

/* Is the kernel of @family that by which the plan's times are kept? */
bool estimate_is_main(const struct plan *plan, enum abi_family family)
{
	switch (plan->problem.op) {
	case FMHA_FORWARD:
		return TRAITS_FORWARD >> family & 1;
	case FMHA_BACKWARD:
		return family == ABI_BWD_DQ_DK_DV;
	case FMHA_APPEND_KV:
		return family == ABI_FWD_APPENDKV;
	case FMHA_MERGE_STATES:
		return family == ABI_FWD_SPLITKV_COMBINE;
	default:
		return false;
	}
}

static double measured_of(const struct candidate *c)
{
	return c->tuned_us > 0 ? c->tuned_us : c->nearby_us;
}

double estimate_guess(const struct candidate *c)
{
	return c->predicted_us > 0 ? c->predicted_us : c->cost;
}

static bool note(const struct select_stage *stage, const char *shape, struct candidate *c, size_t n,
		 bool nearby)
{
	int32_t n_splits = stage->family == ABI_FWD_SPLITKV ? stage->plan->n_splits : 0;
	struct registry_measured measured[MOST_MEASURED];
	size_t n_measured = registry_measured_at(stage->device->registry, shape, measured,
						 MOST_MEASURED);
	bool found = false;

	for (size_t k = 0; k < n_measured; k++)
		for (size_t i = 0; i < n; i++) {
			if (measured[k].n_splits != n_splits || !c[i].accepted ||
			    spec_compare(&measured[k].spec, &c[i].spec) != 0)
				continue;
			*(nearby ? &c[i].nearby_us : &c[i].tuned_us) = measured[k].us;
			found = true;
		}
	return found;
}

static int compare_doubles(const void *x, const void *y)
{
	const double *a = x, *b = y;

	return (*a > *b) - (*a < *b);
}

/* The median of measured time over guess; 0: nothing was measured. */
static double scale_of(const struct candidate *c, size_t n)
{
	double ratios[MOST_MEASURED];
	size_t n_ratios = 0;

	for (size_t i = 0; i < n && n_ratios < MOST_MEASURED; i++)
		if (c[i].accepted && measured_of(&c[i]) > 0 && estimate_guess(&c[i]) > 0)
			ratios[n_ratios++] = measured_of(&c[i]) / estimate_guess(&c[i]);
	if (n_ratios == 0)
		return 0;
	qsort(ratios, n_ratios, sizeof(*ratios), compare_doubles);
	return ratios[n_ratios / 2];
}

static void guess(const struct select_stage *stage, struct candidate *c)
{
	const struct spec_catalog *catalog = registry_catalog(stage->device->registry);
	double features[PREDICT_FEATURES];

	c->cost = formula(stage, catalog, c);
	if (!stage->device->model || !estimate_is_main(stage->plan, stage->family))
		return;
	predict_features(stage, catalog, c, features);
	c->predicted_us = predict_us(stage->device->model, features, c->cost);
}

static void weigh(const struct select_stage *stage, struct candidate *c)
{
	if (measured_of(c) > 0)
		c->time = measured_of(c);
	else
		c->time = estimate_guess(c) *
			  (stage->scale > 0 ? stage->scale * ESTIMATE_UNMEASURED : 1);
}

enum plan_basis estimate_basis(const struct candidate *c)
{
	return c->tuned_us > 0       ? PLAN_BY_MEASURED
	       : c->nearby_us > 0    ? PLAN_BY_NEARBY
	       : c->predicted_us > 0 ? PLAN_BY_MODEL
				     : PLAN_BY_FORMULA;
}

const char *plan_basis_name(enum plan_basis basis)
{
	static const char *const names[] = {
#define PLAN_BASIS_NAME(ID, name) name,
		PLAN_BASES(PLAN_BASIS_NAME)
#undef PLAN_BASIS_NAME
	};

	return names[basis];
}

void estimate_again(const struct select_stage *stage, struct candidate *c)
{
	guess(stage, c);
	weigh(stage, c);
}

void estimate_times(struct select_stage *stage, struct candidate *c, size_t n)
{
	size_t n_words = estimate_is_main(stage->plan, stage->family) ? stage->shapes->n : 0;

	for (size_t i = 0; i < n; i++)
		if (c[i].accepted)
			guess(stage, &c[i]);
	for (size_t i = 0; i < n_words; i++)
		if (note(stage, stage->shapes->word[i], c, n, i > 0))
			break;
	stage->scale = scale_of(c, n);
	for (size_t i = 0; i < n; i++)
		if (c[i].accepted)
			weigh(stage, &c[i]);
}
