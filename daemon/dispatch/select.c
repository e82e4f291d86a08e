/* SPDX-License-Identifier: MIT */
/* select.c: candidates, strategies, the choice. */
#include "select.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- strategies ---- */

/* What the administrator prefers: kernel sets, then priorities. */
static int compare_priority(const struct candidate *a, const struct candidate *b)
{
	if (a->info.preferred != b->info.preferred)
		return a->info.preferred ? -1 : 1;
	return (b->info.priority > a->info.priority) - (b->info.priority < a->info.priority);
}

/* Measured or estimated, on one scale: see estimate.c. */
static int compare_time(const struct candidate *a, const struct candidate *b)
{
	return (a->time > b->time) - (a->time < b->time);
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
	{"priority", "named by a kernel set, or of a higher priority", compare_priority},
	{"time", "the shortest time: measured at this shape or near it, else estimated",
	 compare_time},
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

struct adding {
	const struct select_stage *stage;
	struct select_report *report;
};

static int add_candidate(void *owner, const struct kernel_spec *spec,
			 const struct registry_info *info)
{
	struct adding *to = owner;
	struct candidate c = {.spec = *spec, .info = *info};

	c.accepted = is_allowed(to->stage, &c) &&
		     select_check(to->stage, registry_catalog(to->stage->device->registry), &c);
	return report_add(to->report, &c) ? 0 : FMHA_ENOMEM;
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
	estimate_again(stage, c);
	(void)snprintf(c->reason, sizeof(c->reason), "spills %u bytes of registers", c->spills);
	return true;
}

/* Takes the first acceptable of report->candidates[first..]; true when there is one. */
static bool choose(struct select_stage *stage, struct select_report *report, size_t first,
		   struct plan_stage *ret_stage)
{
	struct candidate *c = report->candidates + first;
	size_t n = report->n - first;

	report->chosen = -1;
	if (n == 0)
		return false;
	estimate_times(stage, c, n);
	for (size_t i = 0; stage->ask_all && i < n; i++)
		if (c[i].accepted)
			(void)ask_device(stage, &c[i], ret_stage);
	do
		qsort(c, n, sizeof(*c), sort_compare);
	while (c[0].accepted && ask_device(stage, &c[0], ret_stage));
	if (!c[0].accepted)
		return false;
	report->chosen = (long)first;
	report->time = c[0].time;
	ret_stage->basis = estimate_basis(&c[0]);
	report->first = first;
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
static size_t fitting_pairs(const struct select_stage *stage, size_t arch,
			    const struct kernel_signature *signature,
			    struct spec_head_dims ret_pairs[SPEC_MAX_HEAD_DIMS])
{
	const struct fmha_problem *p = &stage->plan->problem;
	size_t n = registry_head_dims(stage->device->registry, arch,
				      (enum spec_family)signature->family,
				      (enum spec_dtype)signature->data_type, ret_pairs);
	size_t kept = 0;

	for (size_t i = 0; i < n; i++)
		if ((!signature_uses_hdim_q(stage->family) || ret_pairs[i].hdim_q >= p->hdim_q) &&
		    (!signature_uses_hdim_v(stage->family) || ret_pairs[i].hdim_v >= p->hdim_v))
			ret_pairs[kept++] = ret_pairs[i];
	qsort(ret_pairs, kept, sizeof(*ret_pairs), compare_pairs);
	return kept;
}

/* Candidates of the signatures of one data type compete; those that come to the same kernels are one. */
static int add_candidates(struct select_stage *stage, size_t arch,
			  const struct kernel_signature *signatures, size_t n,
			  struct spec_head_dims pair, struct select_report *report)
{
	struct registry *registry = stage->device->registry;
	struct adding to = {stage, report};
	struct kernel_signature previous = {0};
	int r = 0;

	for (size_t i = 0; i < n && r == 0; i++) {
		struct kernel_signature wanted = signatures[i], reduced;

		wanted.hdim_q = pair.hdim_q;
		wanted.hdim_v = pair.hdim_v;
		reduced = wanted;
		registry_reduce(registry, arch, &reduced);
		if (i == 0 || !spec_signature_equal(&reduced, &previous))
			r = registry_candidates(registry, arch, &wanted, add_candidate, &to);
		previous = reduced;
	}
	return r;
}

/* 0 chosen, 1 nothing in this arch, negative: out of memory. Larger head dims are looked at only
 * when the smaller ones have nothing. */
static int select_in_arch(struct select_stage *stage, size_t arch,
			  const struct kernel_signature *signatures, size_t n_signatures,
			  struct select_report *report, struct plan_stage *ret_stage)
{
	struct kernel_signature previous = {0}, first;
	struct spec_head_dims pairs[SPEC_MAX_HEAD_DIMS];

	for (size_t s = 0, n; s < n_signatures; s += n) {
		size_t n_pairs = fitting_pairs(stage, arch, &signatures[s], pairs);

		for (n = 1; s + n < n_signatures &&
			    signatures[s + n].data_type == signatures[s].data_type;)
			n++;
		/* Another spelling of a data type that the arch's kernels do not tell apart. */
		first = signatures[s];
		registry_reduce(stage->device->registry, arch, &first);
		if (s > 0 && spec_signature_equal(&first, &previous))
			continue;
		previous = first;
		for (size_t i = 0; i < n_pairs; i++) {
			size_t begin = report->n;
			int r = add_candidates(stage, arch, &signatures[s], n, pairs[i], report);

			if (r < 0)
				return r;
			if (choose(stage, report, begin, ret_stage))
				return 0;
		}
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
	int result = 1;

	r->chosen = -1;
	stage->scale = 0;
	if (n > 0) {
		r->signature = signatures[0];
		registry_reduce(registry, 0, &r->signature);
	}
	for (size_t arch = 0; arch < registry_n_archs(registry) && result == 1; arch++)
		result = select_in_arch(stage, arch, signatures, n, r, ret_stage);
	if (result < 0)
		r->chosen = -1; /* of an earlier pair of head dims */
	r->found_none = r->n == 0;
	if (result == 1 && r->found_none)
		result = SELECT_NO_SPEC;
	for (size_t i = 0; i < r->n; i++)
		r->n_rejected += !r->candidates[i].accepted;
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
