/* SPDX-License-Identifier: MIT */
/*
 * estimate.c: how long each candidate of a stage will take. In the order of trust:
 *
 *   measured  at this shape, in microseconds
 *   nearby    measured at the nearest shape that was: of the same word but for a step in a length
 *   model     predicted by a model that was fitted to measured times of this device (predict.c)
 *   formula   an estimated cost in a unit of its own
 *
 * All are brought to one scale: where some candidates were measured and others were not, the others'
 * prediction or cost is multiplied by the median of what measurements and predictions differ by. So
 * one slow candidate that happens to have been measured does not beat all that were not.
 */
#include <stdlib.h>

#include <specs/backend.h>

#include "predict.h"
#include "select.h"

#define MOST_MEASURED 256

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
