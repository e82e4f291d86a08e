/* SPDX-License-Identifier: MIT */
/* select.c: candidates, strategies, the choice. */
#include "select.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <specs/backend.h>

#define MAX_PAIRS 64

/* ---- strategies ---- */

/* Whoever was measured at this shape goes first, the fastest of them before the others. */
static int compare_tuned(const struct candidate *a, const struct candidate *b)
{
	if ((a->tuned_us > 0) != (b->tuned_us > 0))
		return a->tuned_us > 0 ? -1 : 1;
	return (a->tuned_us > b->tuned_us) - (a->tuned_us < b->tuned_us);
}

/* What the administrator prefers: kernel sets, then priorities. */
static int compare_priority(const struct candidate *a, const struct candidate *b)
{
	if (a->info.preferred != b->info.preferred)
		return a->info.preferred ? -1 : 1;
	return (b->info.priority > a->info.priority) - (b->info.priority < a->info.priority);
}

static int compare_heuristic(const struct candidate *a, const struct candidate *b)
{
	return (a->cost > b->cost) - (a->cost < b->cost);
}

/* Never equal for different specs: the choice does not depend on the order of enumeration. */
static int compare_rank(const struct candidate *a, const struct candidate *b)
{
	int pads_a = a->spec.pad_s + a->spec.pad_sk + a->spec.pad_d + a->spec.pad_dv;
	int pads_b = b->spec.pad_s + b->spec.pad_sk + b->spec.pad_d + b->spec.pad_dv;

	if (pads_a != pads_b)
		return pads_a - pads_b;
	return spec_compare(&a->spec, &b->spec);
}

const struct select_strategy select_strategies[] = {
	{"tuned", "the fastest measured at this shape", compare_tuned},
	{"priority", "named by a kernel set, or of a higher priority", compare_priority},
	{"heuristic", "least estimated cost: waves of tiles, padding, reuse", compare_heuristic},
	{"rank", "fewest padding flags, then the order of specs", compare_rank},
};
const size_t select_n_strategies = sizeof(select_strategies) / sizeof(select_strategies[0]);

static int compare_candidates(const struct candidate *a, const struct candidate *b,
			      const char **ret_strategy)
{
	for (size_t i = 0; i < select_n_strategies; i++) {
		int order = select_strategies[i].compare(a, b);

		if (order == 0)
			continue;
		if (ret_strategy)
			*ret_strategy = select_strategies[i].name;
		return order;
	}
	return 0;
}

static int sort_compare(const void *x, const void *y)
{
	const struct candidate *a = x, *b = y;

	if (a->accepted != b->accepted)
		return a->accepted ? -1 : 1;
	return a->accepted ? compare_candidates(a, b, NULL) : spec_compare(&a->spec, &b->spec);
}

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
 *             * 0.65 where one tile has all rows and its keys stream
 *             * 4 for code that spills, as it is known to once it is compiled, and as it would above
 *             256 accumulators
 *
 * Backward, a workgroup owns n0 keys, and its waves share them: what a wave loads is good for m0 by
 * n0 / waves. It waits at many barriers: 5 % more unless another workgroup is there to fill in.
 * (H200, hdim 64: 32 x 128 of 4 waves, two a unit, 1.24 times as fast as 64 x 128 of 8.)
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
#define STAGED_COST      0.6 /* not measured: 0.27 to 0.66 of the issue cycles (NOTES.md) */
#define SPILL_COST       4
#define MAX_ACCUMULATORS 256
#define LONG_ROWS        4096 /* keys */
#define FEW_ROWS         48
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
			   .keys = stage->plan->n_splits ? stage->plan->split_size : p->seqlen_k,
			   .heads = p->nhead_q};

	if (flags & SPEC_PACKS_HEADS && p->nhead_k > 0) {
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

static double cpu_forward_cost(const struct select_stage *stage, const struct kernel_spec *spec,
			       const struct tiling *t, int64_t units, int flags)
{
	const struct fmha_problem *p = &stage->plan->problem;
	int64_t n_splits = stage->plan->n_splits ? stage->plan->n_splits : 1;
	bool holds_others_up = t->m0 > FEW_ROWS && t->rows > FEW_ROWS && p->seqlen_k > LONG_ROWS;

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
	return spec->block_per_cu > 1 ? work : work * 1.05;
}

static double heuristic_cost(const struct select_stage *stage, const struct spec_catalog *catalog,
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
	bool spills = c->spills > 0 || would_spill(catalog, spec, &t, flags);
	double work, reuse;

	if (flags & SPEC_IN_MEMORY && stage->family != ABI_BWD_DQ_DK_DV)
		return cpu_forward_cost(stage, spec, &t, units, flags);
	if (stage->family == ABI_BWD_DQ_DK_DV) {
		blocks *= ceil_div(t.keys, t.n0);
		work = backward_work(spec, &t);
	} else {
		blocks *= ceil_div(t.rows, t.m0);
		work = (double)(t.m0 * ceil_div(t.keys, t.n0) * t.n0);
	}
	if (stage->family == ABI_FWD_SPLITKV)
		blocks *= stage->plan->n_splits;
	/* S is made in steps of k0, the last of which may stick out of hq. */
	work *= (double)(ceil_div(spec->signature.hdim_q, k0) * k0 + spec->signature.hdim_v);
	reuse = (double)(t.m0 * t.n0) / (double)(t.m0 + t.n0);
	return (double)ceil_div(blocks, units) * work * (1 + 32 / reuse) * (1 + 8.0 / (double)k0) *
	       (1 + 0.02 * pads) *
	       (flags & SPEC_NO_MATRIX                   ? SCALAR_COST
		: flags & SPEC_WARPGROUPS                ? WARPGROUP_COST
		: flags & SPEC_STAGED                    ? STAGED_COST
		: flags & SPEC_STREAMS && t.rows <= t.m0 ? STREAMS_COST
							 : 1) *
	       (spills ? SPILL_COST : 1);
}

/* ---- candidates ---- */

void select_report_deinit(struct select_report *report)
{
	free(report->candidates);
	*report = (struct select_report){0};
}

static bool report_add(struct select_report *report, const struct candidate *candidate)
{
	if (report->n == report->capacity) {
		size_t capacity = report->capacity ? report->capacity * 2 : 64;
		struct candidate *grown = realloc(report->candidates,
						  capacity * sizeof(*candidate));

		if (!grown)
			return false;
		report->candidates = grown;
		report->capacity = capacity;
	}
	report->candidates[report->n++] = *candidate;
	return true;
}

static bool is_allowed(const struct select_stage *stage, struct candidate *c)
{
	if (!stage->named || spec_compare(&c->spec, &stage->named->spec) == 0)
		return true;
	(void)snprintf(c->reason, sizeof(c->reason), "another kernel is named");
	return false;
}

static bool add_candidates(struct select_stage *stage, struct registry_lookup *lookup, size_t arch,
			   const struct kernel_signature *signature, struct select_report *report)
{
	struct registry *registry = stage->device->registry;
	const struct kernel_spec *spec;
	struct candidate c = {0};

	registry_lookup_start(lookup, arch, signature);
	while ((spec = registry_lookup_next(lookup, &c.info))) {
		c.spec = *spec;
		c.reason[0] = '\0';
		c.tuned_us = 0;
		c.spills = 0;
		c.accepted = is_allowed(stage, &c) &&
			     select_check(stage, registry_catalog(registry), &c);
		if (c.accepted && c.info.n_tuned > 0)
			(void)registry_get_tuned(registry, spec, stage->shape, &c.tuned_us);
		c.cost = c.accepted ? heuristic_cost(stage, registry_catalog(registry), &c) : 0;
		if (!report_add(report, &c))
			return false;
	}
	return true;
}

/* The device's word on a candidate. Return: true when it changes the order of candidates. */
static bool ask_device(struct select_stage *stage, struct candidate *c,
		       struct plan_stage *ret_stage)
{
	uint64_t most = stage->device->workspace_most;
	const struct spec_catalog *catalog = registry_catalog(stage->device->registry);
	struct plan_stage filled = {
		.family = stage->family, .dtype = stage->dtype, .spec = c->spec, .has_spec = 1};
	const char *pipeline = spec_word(catalog, SPEC_FIELD_pipeline, c->spec.pipeline);
	const char *why = "the device cannot run it with these tensors";

	(void)spec_name_format(catalog, &c->spec, filled.kernel);
	(void)snprintf(filled.pipeline, sizeof(filled.pipeline), "%s", pipeline ? pipeline : "");
	(void)snprintf(filled.arch, sizeof(filled.arch), "%s",
		       spec_arch_name(catalog, c->spec.gfx_arch));
	filled.tile_n0 = c->spec.tile.tile_n0;
	if (stage->device->find &&
	    stage->device->find(stage->device->owner, stage->family, stage->dtype, stage->args,
				&filled, &why) != 0) {
		c->accepted = false;
		(void)snprintf(c->reason, sizeof(c->reason), "%s", why);
		return true;
	}
	if (most && filled.workspace_bytes > most && !stage->any_workspace) {
		c->accepted = false;
		stage->too_large = true;
		(void)snprintf(c->reason, sizeof(c->reason),
			       "a workspace of %llu bytes: the device gives %llu at most",
			       (unsigned long long)filled.workspace_bytes,
			       (unsigned long long)most);
		return true;
	}
	*ret_stage = filled;
	if (filled.spills == c->spills)
		return false;
	/*
	 * It is set aside where another serves as well; it is not rejected: the next one may have
	 * no matrix instructions, and who measured it, or named it in a set, knows better.
	 */
	c->spills = filled.spills;
	c->cost = heuristic_cost(stage, catalog, c);
	(void)snprintf(c->reason, sizeof(c->reason), "spills %u bytes of registers", c->spills);
	return true;
}

/* Takes the first acceptable of report->candidates[first..]; true when there is one. With
 * @ask_all the device judges every candidate, for explanations. */
static bool choose(struct select_stage *stage, struct select_report *report, size_t first,
		   bool ask_all, struct plan_stage *ret_stage)
{
	struct candidate *c = report->candidates + first;
	size_t n = report->n - first;

	report->chosen = -1;
	if (n == 0)
		return false;
	for (size_t i = 0; ask_all && i < n; i++)
		if (c[i].accepted)
			(void)ask_device(stage, &c[i], ret_stage);
	do
		qsort(c, n, sizeof(*c), sort_compare);
	while (c[0].accepted && ask_device(stage, &c[0], ret_stage));
	if (!c[0].accepted)
		return false;
	report->chosen = (long)first;
	report->strategy = stage->named ? SELECT_BY_NAME : "only one";
	if (n > 1 && c[1].accepted)
		(void)compare_candidates(&c[0], &c[1], &report->strategy);
	return true;
}

static int compare_pairs(const void *x, const void *y)
{
	const struct spec_head_dims *a = x, *b = y;
	int area_a = a->hdim_q + a->hdim_v, area_b = b->hdim_q + b->hdim_v;

	return area_a != area_b ? area_a - area_b : a->hdim_q - b->hdim_q;
}

/* The head-dim pairs that hold the problem's, the least padding first. */
static size_t fitting_pairs(const struct select_stage *stage, const struct spec_space *space,
			    const struct kernel_signature *signature,
			    struct spec_head_dims ret_pairs[MAX_PAIRS])
{
	const struct fmha_problem *p = &stage->plan->problem;
	size_t n = spec_space_head_dims(space, (enum spec_family)signature->family,
					(enum spec_dtype)signature->data_type, ret_pairs,
					MAX_PAIRS);
	size_t kept = 0;

	n = n < MAX_PAIRS ? n : MAX_PAIRS;
	for (size_t i = 0; i < n; i++)
		if ((!signature_uses_hdim_q(stage->family) || ret_pairs[i].hdim_q >= p->hdim_q) &&
		    (!signature_uses_hdim_v(stage->family) || ret_pairs[i].hdim_v >= p->hdim_v))
			ret_pairs[kept++] = ret_pairs[i];
	qsort(ret_pairs, kept, sizeof(*ret_pairs), compare_pairs);
	return kept;
}

/* 0 chosen, 1 nothing in this arch, negative: out of memory. Larger head dims are looked at only
 * when the smaller ones have nothing. */
static int select_in_arch(struct select_stage *stage, struct registry_lookup *lookup, size_t arch,
			  const struct kernel_signature *signatures, size_t n_signatures,
			  struct select_report *report, bool ask_all, struct plan_stage *ret_stage)
{
	const struct spec_space *space = registry_space(stage->device->registry, arch);
	struct kernel_signature previous = {0};
	struct spec_head_dims pairs[MAX_PAIRS];

	for (size_t s = 0; s < n_signatures; s++) {
		/* The masks of one data type compete; data types do not. */
		size_t n_pairs = fitting_pairs(stage, space, &signatures[s], pairs), last = s;

		while (last + 1 < n_signatures &&
		       signatures[last + 1].data_type == signatures[s].data_type)
			last++;
		for (size_t i = 0; i < n_pairs; i++) {
			size_t first = report->n;

			for (size_t k = s; k <= last; k++) {
				struct kernel_signature signature = signatures[k];

				signature.hdim_q = pairs[i].hdim_q;
				signature.hdim_v = pairs[i].hdim_v;
				spec_signature_reduce(space, &signature);
				/* A family that has no mask finds the same for each. */
				if (k > s && spec_signature_equal(&signature, &previous))
					continue;
				previous = signature;
				if (!add_candidates(stage, lookup, arch, &signature, report))
					return FMHA_ENOMEM;
			}
			if (choose(stage, report, first, ask_all, ret_stage))
				return 0;
		}
		s = last;
	}
	return 1;
}

int select_kernel(struct select_stage *stage, struct plan_stage *ret_stage,
		  struct select_report *report)
{
	struct registry *registry = stage->device->registry;
	struct kernel_signature signatures[SELECT_MAX_SIGNATURES];
	size_t n = signature_list(stage, signatures);
	struct select_report own = {0}, *r = report ? report : &own;
	struct registry_lookup *lookup = registry_lookup_new(registry);
	int result = 1;

	if (!lookup)
		return FMHA_ENOMEM;
	signature_shape(&stage->plan->problem, stage->shape);
	r->chosen = -1;
	if (n > 0) {
		r->signature = signatures[0];
		spec_signature_reduce(registry_space(registry, 0), &r->signature);
	}
	for (size_t arch = 0; arch < registry_n_archs(registry) && result == 1; arch++)
		result = select_in_arch(stage, lookup, arch, signatures, n, r, report != NULL,
					ret_stage);
	r->found_none = r->n == 0;
	if (result == 1 && r->found_none)
		result = SELECT_NO_SPEC;
	for (size_t i = 0; i < r->n; i++)
		r->n_rejected += !r->candidates[i].accepted;
	registry_lookup_free(lookup);
	if (stage->named && result > 0)
		naming_refuse(stage, r);
	if (!report)
		select_report_deinit(&own);
	if (result != 1 || !stage->too_large)
		return result;
	/* Nothing fits: the run says so. */
	stage->any_workspace = true;
	stage->too_large = false;
	if (report)
		select_report_deinit(report);
	return select_kernel(stage, ret_stage, report);
}
