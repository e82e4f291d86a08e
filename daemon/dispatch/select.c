/* SPDX-License-Identifier: MIT */
/* select.c: candidates, strategies, the choice. */
#include "select.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>

static const char *const family_names[ABI_N_FAMILIES] = {ABI_FAMILIES(ABI_FAMILY_WORD)};

const char *plan_family_name(enum abi_family family)
{
	return family < ABI_N_FAMILIES ? family_names[family] : "unknown";
}

/* ---- naming ---- */

/*
 * Kernels that the caller names. A name says its family and so its stage; there, it is
 * the only candidate that is allowed, and goes through the same checks as when it is chosen. The
 * reason of its last rejection is kept: a stage may be tried in more than one form.
 */

static const char field[] = "kernels";

int naming_init(struct naming *naming, const struct plan_choice *choice,
		const struct plan_device *device, struct fmha_error *err)
{
	*naming = (struct naming){0};
	if (!choice || choice->n == 0)
		return 0;
	if (!device->registry)
		return fmha_error_set_field(err, FMHA_ENOTSUP, field,
					    "kernels: %s has none with names", device->arch);
	for (uint32_t i = 0; i < choice->n && i < PLAN_MAX_STAGES; i++) {
		struct select_named *named = &naming->named[i];
		struct fmha_error why = {0};

		if (registry_find(device->registry, choice->kernel[i], &named->spec, NULL, &why) <
		    0)
			return fmha_error_set_field(err, FMHA_EINVAL, field, "kernels: %s",
						    why.msg);
		if (naming_of(naming, (enum abi_family)named->spec.signature.family))
			return fmha_error_set_field(
				err, FMHA_EINVAL, field, "kernels: two are of %s",
				plan_family_name((enum abi_family)named->spec.signature.family));
		naming->n++;
	}
	return 0;
}

struct select_named *naming_of(struct naming *naming, enum abi_family family)
{
	for (uint32_t i = 0; i < naming->n; i++)
		if (naming->named[i].spec.signature.family == family)
			return &naming->named[i];
	return NULL;
}

/* Of @signature's fields the first that @spec has another value in, as a sentence. */
static void say_difference(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			   const struct kernel_signature *signature,
			   char reason[SELECT_REASON_BYTES])
{
	struct kernel_spec wanted = *spec;

	wanted.signature = *signature;
	(void)snprintf(reason, SELECT_REASON_BYTES, "the problem is of another signature");
	for (int i = 0; i < SPEC_N_FIELDS; i++) {
		enum spec_field at = (enum spec_field)i;
		int64_t has = spec_get(spec, at), wants = spec_get(&wanted, at);
		const char *has_word = spec_word(catalog, at, has);
		const char *wants_word = spec_word(catalog, at, wants);
		/* Head dims may be larger: that is for the pads to judge. */
		bool is_dim = at == SPEC_FIELD_hdim_q || at == SPEC_FIELD_hdim_v;

		if (!select_explains(at) || has == wants || (is_dim && has > wants))
			continue;
		if (has_word && wants_word)
			(void)snprintf(reason, SELECT_REASON_BYTES, "%s %s: the problem's is %s",
				       spec_field_name(at), has_word, wants_word);
		else
			(void)snprintf(reason, SELECT_REASON_BYTES,
				       "%s %lld: the problem's is %lld", spec_field_name(at),
				       (long long)has, (long long)wants);
		return;
	}
}

/* Why @stage->named was not chosen, after a selection that found nothing. */
static void naming_refuse(const struct select_stage *stage, const struct select_report *report)
{
	struct select_named *named = stage->named;

	for (size_t i = 0; i < report->n; i++)
		if (spec_compare(&report->candidates[i].spec, &named->spec) == 0) {
			memcpy(named->reason, report->candidates[i].reason, sizeof(named->reason));
			return;
		}
	say_difference(registry_catalog(stage->device->registry), &named->spec, &report->signature,
		       named->reason);
}

static bool runs_a_stage(const struct select_named *named, struct plan *plan)
{
	for (uint32_t i = 0; i < plan->n_stages; i++)
		if (plan->stages[i].has_spec &&
		    spec_compare(&plan->stages[i].spec, &named->spec) == 0) {
			plan->named |= 1U << i;
			return true;
		}
	return false;
}

int naming_settle(const struct naming *naming, struct plan *plan, int r, struct fmha_error *err)
{
	/* A problem that writes nothing has no use for any kernel. */
	for (uint32_t i = 0; i < naming->n && (r < 0 || plan->n_stages > 0); i++) {
		const struct select_named *named = &naming->named[i];
		const char *family = plan_family_name(
			(enum abi_family)named->spec.signature.family);

		if (runs_a_stage(named, plan))
			continue;
		if (named->reason[0])
			return fmha_error_set_field(err, FMHA_ENOKERNEL, field,
						    "kernels: the %s that is named: %s", family,
						    named->reason);
		if (r == 0)
			return fmha_error_set_field(err, FMHA_EINVAL, field,
						    "kernels: this plan has no %s", family);
	}
	return r;
}

void plan_chosen(const struct plan *plan, struct plan_choice *ret_choice)
{
	ret_choice->n = 0;
	for (uint32_t i = 0; i < plan->n_stages; i++)
		if (plan->named & 1U << i)
			memcpy(ret_choice->kernel[ret_choice->n++], plan->stages[i].kernel,
			       sizeof(plan->stages[i].kernel));
}

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

/* ---- which can run ---- */

bool select_reject(struct candidate *c, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(c->reason, sizeof(c->reason), fmt, args);
	va_end(args);
	return false;
}

static bool check_state(struct candidate *c)
{
	if (c->info.quarantined)
		return select_reject(c, "quarantined");
	if (!c->info.offered)
		return select_reject(c, "not in a loaded kernel set");
	return true;
}

/* Loops that are made for an arch bring rows by 16 bytes; general ones look where a row ends. */
static bool check_head_dims(const struct select_stage *stage, const struct spec_catalog *catalog,
			    struct candidate *c)
{
	const struct fmha_problem *p = &stage->plan->problem;
	int flags = spec_pipeline_flags(catalog, c->spec.pipeline);
	bool by_eights = flags >= 0 && flags & (SPEC_WARPGROUPS | SPEC_STAGED);

	if (by_eights && (p->hdim_q % 8 || p->hdim_v % 8))
		return select_reject(c, "a head dimension is no multiple of 8: hdim %d x %d",
				     p->hdim_q, p->hdim_v);
	return true;
}

/* A plan is first tried without a buffer for partial sums of dQ: some write dQ directly, in a
 * second pass over the keys, or sums of parts of them where few rows look at many keys. */
static bool check_dq(const struct select_stage *stage, const struct spec_catalog *catalog,
		     struct candidate *c)
{
	int flags = spec_pipeline_flags(catalog, c->spec.pipeline);
	bool writes = flags >= 0 && flags & SPEC_WRITES_DQ;

	if (stage->family != ABI_BWD_DQ_DK_DV)
		return true;
	if (stage->args->bwd.dq_split_keys > 0)
		return (flags >= 0 && flags & SPEC_SPLITS_DQ) ||
		       select_reject(c, "does not sum dQ by parts of the keys");
	if (writes == !stage->args->bwd.dq_acc)
		return true;
	return select_reject(c, writes ? "writes dQ itself" : "sums dQ in the workspace");
}

/* A loop that knows nothing of a mask in memory would show every row everything. */
static bool check_mask_data(const struct select_stage *stage, const struct spec_catalog *catalog,
			    struct candidate *c)
{
	const struct fmha_problem *p = &stage->plan->problem;
	bool intervals = plan_present(p, FMHA_T_MASK_INTERVALS);
	int flags = spec_pipeline_flags(catalog, c->spec.pipeline);

	if (!intervals && !plan_present(p, FMHA_T_MASK_BITS))
		return true;
	if (!(TRAITS_SCORES >> stage->family & 1))
		return true;
	/* Of a mask in memory nobody knows how many blocks add to a tile before this one. */
	if (flags >= 0 && flags & SPEC_WARPGROUPS && stage->family == ABI_BWD_DQ_DK_DV &&
	    stage->args->bwd.deterministic)
		return select_reject(c, "deterministic: its order is that of a band");
	if (flags >= 0 && flags & SPEC_MASK_DATA)
		return true;
	return select_reject(c, "tensor.%s: this loop does not read it",
			     intervals ? "mask_intervals" : "mask_bits");
}

/* Keys whose values are within them, latents of fp8, keys that indices name. */
static bool check_latent(const struct select_stage *stage, const struct spec_catalog *catalog,
			 struct candidate *c)
{
	const struct fmha_problem *p = &stage->plan->problem;
	int pipeline = spec_pipeline_flags(catalog, c->spec.pipeline);
	int flags = pipeline < 0 ? 0 : pipeline;
	bool attends = TRAITS_FORWARD >> stage->family & 1;

	if (p->v_in_k && !(flags & SPEC_V_IN_K) && (attends || stage->family == ABI_FWD_APPENDKV))
		return select_reject(c, "v_in_k: this loop wants values of their own");
	if (!attends)
		return true;
	if (p->kv_layout == FMHA_KV_LATENT_FP8 && !(flags & SPEC_LATENT_FP8))
		return select_reject(c, "kv_layout: this loop does not read latent_fp8");
	if (p->topk > 0 && !(flags & SPEC_CHOSEN))
		return select_reject(c, "topk: this loop reads all keys");
	if (flags & SPEC_LATENTS_ONLY && !p->v_in_k && p->topk == 0)
		return select_reject(c, "keys and values of their own: other loops read them");
	return true;
}

/* For another loop it would be of no use. */
static bool check_widened(const struct select_stage *stage, const struct spec_catalog *catalog,
			  struct candidate *c)
{
	int flags = spec_pipeline_flags(catalog, c->spec.pipeline);

	if (!plan_stage_wide(stage->plan, stage->plan->n_stages) ||
	    !(TRAITS_FORWARD >> stage->family & 1) || (flags >= 0 && flags & SPEC_WIDENED))
		return true;
	return select_reject(c, "keys are not widened for this loop");
}

/* Parts are of splits. And where all rows that share keys are in one tile of decode's, that brings them as fast as
 * memory does. */
static bool check_splits(const struct select_stage *stage, const struct spec_catalog *catalog,
			 struct candidate *c)
{
	const struct fmha_problem *p = &stage->plan->problem;
	int flags = spec_pipeline_flags(catalog, c->spec.pipeline);
	bool unsplit = flags >= 0 && flags & SPEC_UNSPLIT;

	if (stage->family != ABI_FWD_SPLITKV)
		return true;
	if (stage->plan->n_splits == 0 && !unsplit)
		return select_reject(c, "this loop leaves parts, and there are no splits");
	if (unsplit && !stage->named && plan_packed_rows(p) <= TILE_ROWS)
		return select_reject(c, "the rows are few: others stream keys");
	return true;
}

/*
 * Hopper's tiles of 192 rows for heads of up to 96, which models were not fitted to: a tenth faster, row by row, than
 * those of 128, so that rounds of units decide. Measured on an H200: 24 x 4,600 rows are 5 rounds of 192 for 7 of 128,
 * 1.05 times as fast; 8 x 2,000 would be one round of either.
 */
#define TALL_ROWS 192
#define WIDE_ROWS 128
#define TALL_COST 0.9

static int64_t rows_in_rounds(const struct select_stage *stage, int64_t tile_rows)
{
	const struct fmha_problem *p = &stage->plan->problem;
	int64_t units = stage->device->compute_units ? stage->device->compute_units : 1;
	int64_t tiles = ceil_div(p->seqlen_q, tile_rows) * p->batch * p->nhead_q;

	return ceil_div(tiles, units) * tile_rows;
}

static bool check_height(const struct select_stage *stage, const struct spec_catalog *catalog,
			 struct candidate *c)
{
	const struct fmha_problem *p = &stage->plan->problem;
	int flags = spec_pipeline_flags(catalog, c->spec.pipeline);
	bool tall = c->spec.tile.tile_m0 == TALL_ROWS, faster;

	if (stage->named || stage->family != ABI_FWD || flags < 0 || !(flags & SPEC_UNSPLIT) ||
	    p->hdim_q <= 64 || p->hdim_v <= 64 || c->spec.tile.tile_k0max > 96)
		return true;
	faster = stage->traits.op == ABI_FWD && !stage->traits.mask && !stage->traits.bias &&
		 !stage->traits.softcap && !stage->traits.dropout && !stage->traits.narrow &&
		 !stage->traits.mask_data && stage->traits.dtype <= ABI_BF16 &&
		 p->mode != FMHA_GROUP &&
		 TALL_COST * (double)rows_in_rounds(stage, TALL_ROWS) <
			 (double)rows_in_rounds(stage, WIDE_ROWS);
	if (tall == faster)
		return true;
	return select_reject(c, tall ? "tiles of fewer rows take fewer rounds of units"
				     : "taller tiles take fewer rounds of units");
}

/* This build's own kernels are what their tables list, and say the rest themselves when the device is asked. */
static bool check(const struct select_stage *stage, struct candidate *candidate)
{
	const struct spec_catalog *catalog = registry_catalog(stage->device->registry);

	return check_state(candidate) && check_dq(stage, catalog, candidate) &&
	       check_head_dims(stage, catalog, candidate) &&
	       check_mask_data(stage, catalog, candidate) &&
	       check_latent(stage, catalog, candidate) &&
	       check_widened(stage, catalog, candidate) &&
	       check_splits(stage, catalog, candidate) && check_height(stage, catalog, candidate) &&
	       (!stage->device->foreign || stage->device->foreign->judge(stage, candidate));
}

int select_add(const struct select_stage *stage, const struct kernel_spec *spec,
	       const struct registry_info *info, struct select_report *report)
{
	struct candidate c = {.spec = *spec, .info = *info};

	c.accepted = is_allowed(stage, &c) && check(stage, &c);
	return report_add(report, &c) ? 0 : FMHA_ENOMEM;
}

/* Long problems are several times slower by such a loop: people want to hear of it. */
static bool is_general(const struct select_stage *stage, int flags)
{
	const int made = SPEC_WARPGROUPS | SPEC_STAGED | SPEC_STREAMS | SPEC_LATENTS_ONLY;

	return stage->device->lds_bytes > 0 && TRAITS_SCORES >> stage->family & 1 && flags >= 0 &&
	       !(flags & made);
}

/* The device's word on a candidate. Return: true when it changes the order of candidates. */
static bool ask_device(struct select_stage *stage, struct candidate *c,
		       struct plan_stage *ret_stage)
{
	uint64_t most = stage->device->workspace_most;
	const struct spec_catalog *catalog = registry_catalog(stage->device->registry);
	struct plan_stage filled = {.family = stage->family,
				    .dtype = stage->dtype,
				    .spec = c->spec,
				    .has_spec = 1,
				    .traits = stage->traits};
	const char *pipeline = spec_word(catalog, SPEC_FIELD_pipeline, c->spec.pipeline);
	const char *why = "the device cannot run it with these tensors";

	(void)spec_name_format(catalog, &c->spec, filled.kernel);
	(void)snprintf(filled.pipeline, sizeof(filled.pipeline), "%s", pipeline ? pipeline : "");
	(void)snprintf(filled.arch, sizeof(filled.arch), "%s",
		       spec_arch_name(catalog, c->spec.gfx_arch));
	filled.tile_n0 = c->spec.tile.tile_n0;
	filled.is_general = is_general(stage, spec_pipeline_flags(catalog, c->spec.pipeline));
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

bool select_uses_hdim_q(enum abi_family family)
{
	return family != ABI_FWD_SPLITKV_COMBINE && family != ABI_BWD_DOT_DO_O;
}

bool select_uses_hdim_v(enum abi_family family)
{
	return family != ABI_BWD_CONVERT_DQ;
}

static size_t keep_fitting(const struct select_stage *stage, struct spec_head_dims *pairs, size_t n)
{
	const struct fmha_problem *p = &stage->plan->problem;
	size_t kept = 0;

	for (size_t i = 0; i < n; i++)
		if ((!select_uses_hdim_q(stage->family) || pairs[i].hdim_q >= p->hdim_q) &&
		    (!select_uses_hdim_v(stage->family) || pairs[i].hdim_v >= p->hdim_v))
			pairs[kept++] = pairs[i];
	qsort(pairs, kept, sizeof(*pairs), compare_pairs);
	return kept;
}

int select_pairs(struct select_stage *stage, size_t arch, struct spec_head_dims *pairs, size_t n,
		 select_adder add, void *owner, struct select_report *report,
		 struct plan_stage *ret_stage)
{
	n = keep_fitting(stage, pairs, n);
	for (size_t i = 0; i < n; i++) {
		size_t begin = report->n;
		int r = add(owner, stage, arch, pairs[i], report);

		if (r < 0)
			return r;
		if (choose(stage, report, begin, ret_stage))
			return 0;
	}
	return 1;
}

struct adding {
	const struct select_stage *stage;
	struct select_report *report;
};

static int add_candidate(void *owner, const struct kernel_spec *spec,
			 const struct registry_info *info)
{
	const struct adding *to = owner;

	return select_add(to->stage, spec, info, to->report);
}

static int add_own(void *owner, struct select_stage *stage, size_t arch, struct spec_head_dims dims,
		   struct select_report *report)
{
	struct adding to = {stage, report};
	const char *why;
	int r = registry_candidates(stage->device->registry, arch, &stage->traits, dims,
				    add_candidate, &to, &why);

	(void)owner;
	/* of the smallest head dims, which the problem would have had */
	report->lacks = report->lacks ? report->lacks : why;
	return r;
}

static int select_own(struct select_stage *stage, size_t arch, struct select_report *report,
		      struct plan_stage *ret_stage)
{
	const struct registry *registry = stage->device->registry;
	struct spec_head_dims pairs[SPEC_MAX_HEAD_DIMS];
	size_t n = spec_own_head_dims(registry_catalog(registry), registry_arch(registry, arch),
				      (enum spec_family)stage->family, pairs);

	return select_pairs(stage, arch, pairs, n, add_own, NULL, report, ret_stage);
}

static void note_signature(const struct select_stage *stage, struct kernel_signature *ret_signature)
{
	const struct registry *registry = stage->device->registry;
	const struct fmha_problem *p = &stage->plan->problem;
	struct spec_head_dims dims = {(uint16_t)p->hdim_q, (uint16_t)p->hdim_v};

	if (stage->device->foreign)
		stage->device->foreign->signature(stage, ret_signature);
	else
		spec_own_signature(registry_catalog(registry), registry_arch(registry, 0),
				   &stage->traits, dims, ret_signature);
}

/* The reason that most candidates were rejected for, the first of several; where there was none, what keeps
 * kernels from being one. */
static const char *common_reason(const struct select_report *report)
{
	const char *common = report->lacks ? report->lacks : "";
	size_t most = 0;

	for (size_t i = 0; i < report->n; i++) {
		const char *reason = report->candidates[i].reason;
		size_t n = 0;

		if (most > 0 && strcmp(reason, common) == 0)
			continue; /* counted: most say one thing, and plans try several families */
		for (size_t j = i; j < report->n; j++)
			n += strcmp(report->candidates[j].reason, reason) == 0;
		if (n > most) {
			most = n;
			common = reason;
		}
	}
	return common;
}

int select_kernel(struct select_stage *stage, struct plan_stage *ret_stage,
		  struct select_report *report)
{
	struct registry *registry = stage->device->registry;
	const struct select_foreign *foreign = stage->device->foreign;
	struct select_report own = {0}, *r = report ? report : &own;
	int result = 1;

	r->chosen = -1;
	stage->scale = 0;
	traits_of(&stage->plan->problem, stage->family, stage->dtype, stage->args, &stage->traits);
	if (plan_stage_wide(stage->plan, stage->plan->n_stages) &&
	    TRAITS_FORWARD >> stage->family & 1) {
		stage->traits.narrow = stage->traits.paged = 0;
		if (plan_varied_factors(&stage->plan->problem)) { /* which are in the keys */
			stage->traits.descale = plan_present(&stage->plan->problem,
							     FMHA_T_Q_DESCALE);
			stage->traits.by_key = 0;
		}
	}
	note_signature(stage, &r->signature);
	for (size_t arch = 0; arch < registry_n_archs(registry) && result == 1; arch++)
		result = (foreign ? foreign->select : select_own)(stage, arch, r, ret_stage);
	if (result < 0)
		r->chosen = -1; /* of an earlier pair of head dims */
	r->found_none = r->n == 0;
	if (result == 1 && r->found_none)
		result = SELECT_NO_SPEC;
	for (size_t i = 0; i < r->n; i++)
		r->n_rejected += !r->candidates[i].accepted;
	stage->why[0] = '\0';
	if (result > 0)
		(void)snprintf(stage->why, sizeof(stage->why), "%s", common_reason(r));
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
