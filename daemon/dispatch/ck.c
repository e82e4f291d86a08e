/* SPDX-License-Identifier: MIT */
/*
 * ck.c: plans with the kernels of AMD's Composable Kernel, which fmhad describes and does not have: where they
 * come from, and which of them can run a stage. For who explains plans offline; the daemon has its own only.
 */
#include <dispatch/ck.h>

#include <stdlib.h>

#include <proto/error.h>
#include <specs/space.h>
#include <specs/validate.h>

#include "select.h"

struct ck {
	struct registry_source source;
	size_t n;
	struct spec_space *spaces[REGISTRY_MAX_ARCHS];
};

static const struct spec_space *space_of(const struct registry_source *source, size_t arch)
{
	return ((const struct ck *)source)->spaces[arch];
}

static size_t head_dims(const struct registry_source *source, size_t arch, enum spec_family family,
			enum spec_dtype dtype, struct spec_head_dims ret_pairs[SPEC_MAX_HEAD_DIMS])
{
	size_t n = spec_space_head_dims(space_of(source, arch), family, dtype, ret_pairs,
					SPEC_MAX_HEAD_DIMS);

	return n < SPEC_MAX_HEAD_DIMS ? n : SPEC_MAX_HEAD_DIMS;
}

static void reduce(const struct registry_source *source, size_t arch,
		   struct kernel_signature *signature)
{
	spec_signature_reduce(space_of(source, arch), signature);
}

static int each(const struct registry_source *source, size_t arch,
		const struct kernel_signature *signature, spec_visit visit, void *owner)
{
	const struct spec_space *space = space_of(source, arch);
	struct spec_iter *iter = signature ? spec_iter_new_signature(space, signature)
					   : spec_iter_new(space, NULL);
	const struct kernel_spec *spec;
	int r = iter ? 0 : FMHA_ENOMEM;

	while (r == 0 && (spec = spec_iter_next(iter)))
		r = visit(owner, spec);
	spec_iter_free(iter);
	return r;
}

static bool has(const struct registry_source *source, size_t arch, const struct kernel_spec *spec)
{
	return spec_space_contains(space_of(source, arch), spec);
}

int ck_source_new(const struct spec_catalog *catalog, const struct registry_device *device,
		  const char *rules, struct registry_source **ret_source, struct fmha_error *err)
{
	struct ck *ck = calloc(1, sizeof(*ck));
	int r = 0;

	if (!ck)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	ck->source = (struct registry_source){head_dims, reduce, each, has};
	for (size_t i = 0; r == 0 && i < device->n_archs; i++) {
		struct spec_space_options options = SPEC_SPACE_OPTIONS(device->archs[i]);

		options.rules = rules;
		if (spec_arch_find(catalog, device->archs[i]) < 0)
			continue;
		r = spec_space_new(catalog, &options, &ck->spaces[ck->n], err);
		ck->n += r == 0;
	}
	if (r < 0) {
		ck_source_free(&ck->source);
		return r;
	}
	*ret_source = &ck->source;
	return 0;
}

struct registry_source *ck_source_free(struct registry_source *source)
{
	struct ck *ck = (struct ck *)source;

	for (size_t i = 0; ck && i < ck->n; i++)
		spec_space_free(ck->spaces[i]);
	free(ck);
	return NULL;
}

/* ---- which can run ---- */

/* Tiles of keys and pages must nest, one way or the other: a tile is loaded page by page. */
static bool check_pages(const struct select_stage *stage, struct candidate *c)
{
	const struct fmha_problem *p = &stage->plan->problem;
	int32_t tile = c->spec.tile.tile_n0;

	if (!plan_paged(p) || !c->spec.signature.paged_kv)
		return true;
	if (p->page_size % tile != 0 && tile % p->page_size != 0)
		return select_reject(c, "page_size %d: does not nest with tile_n0 %d", p->page_size,
				     tile);
	return true;
}

static bool check_splits(const struct select_stage *stage, const struct spec_catalog *catalog,
			 struct candidate *c)
{
	const struct fmha_problem *p = &stage->plan->problem;
	bool is_ours = spec_pipeline_flags(catalog, c->spec.pipeline) >= 0;
	int32_t most = 128; /* what the table of LSEs in LDS of AMD's combine holds */

	if (stage->family == ABI_FWD_SPLITKV_COMBINE && p->op == FMHA_MERGE_STATES &&
	    p->o_parts.dtype != FMHA_F32)
		return select_reject(c, "merges partial results in f32 only");
	if (stage->family == ABI_FWD_SPLITKV_COMBINE && !is_ours &&
	    (p->op == FMHA_MERGE_STATES ? p->n_parts : stage->plan->n_splits) > most)
		return select_reject(c, "combines at most %d splits", most);
	if (stage->family == ABI_FWD_SPLITKV && p->split_size % c->spec.tile.tile_n0 != 0 &&
	    p->split_size > 0)
		return select_reject(c, "split_size %d: no multiple of tile_n0 %d", p->split_size,
				     c->spec.tile.tile_n0);
	return true;
}

static bool check_features(const struct select_stage *stage, const struct spec_catalog *catalog,
			   struct candidate *c)
{
	int trload = spec_word_find(catalog, SPEC_FIELD_pipeline, "qr_async_trload");
	const struct fmha_problem *p = &stage->plan->problem;

	if (plan_present(p, FMHA_T_V) && p->v.stride[3] != 1 &&
	    p->kv_layout != FMHA_KV_VECTORIZED && c->spec.signature.vlayout == SPEC_VLAYOUT_R &&
	    p->hdim_v > 1)
		return select_reject(c, "vlayout r: v is column-major");
	if (c->spec.tile.use_trload && !spec_arch_has_pipeline(catalog, c->spec.gfx_arch, trload))
		return select_reject(c, "use_trload: the arch has no transposing loads");
	return true;
}

bool ck_judge(const struct select_stage *stage, struct candidate *candidate)
{
	const struct spec_catalog *catalog = registry_catalog(stage->device->registry);
	struct spec_findings findings;

	if (!check_pages(stage, candidate) || !check_splits(stage, catalog, candidate) ||
	    !check_features(stage, catalog, candidate))
		return false;
	if (spec_validate(catalog, &candidate->spec, NULL) == 0)
		return true;
	(void)spec_validate(catalog, &candidate->spec, &findings);
	for (int i = 0; i < findings.n; i++)
		if (!findings.finding[i].is_warning)
			return select_reject(candidate, "invalid: %.96s", findings.finding[i].msg);
	return select_reject(candidate, "invalid");
}
