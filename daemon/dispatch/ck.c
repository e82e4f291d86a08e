/* SPDX-License-Identifier: MIT */
/*
 * ck.c: plans with the kernels of AMD's Composable Kernel, which fmhad describes and does not have: where they
 * come from, and which of them can run a stage. For who explains plans offline; the daemon has its own only.
 */
#include <dispatch/ck.h>

#include <stddef.h>
#include <stdlib.h>

#include <proto/error.h>
#include <specs/space.h>
#include <specs/validate.h>

#include "select.h"

#define MAX_SIGNATURES 8

struct ck {
	struct registry_source source;
	struct select_foreign foreign;
	size_t n;
	struct spec_space *spaces[REGISTRY_MAX_ARCHS];
};

static const struct spec_space *space_of(const struct registry_source *source, size_t arch)
{
	return ((const struct ck *)source)->spaces[arch];
}

/* @signature: reduced; NULL: all. */
static int walk(const struct spec_space *space, const struct kernel_signature *signature,
		spec_visit visit, void *owner)
{
	struct spec_iter *iter = signature ? spec_iter_new_signature(space, signature)
					   : spec_iter_new(space, NULL);
	const struct kernel_spec *spec;
	int r = iter ? 0 : FMHA_ENOMEM;

	while (r == 0 && (spec = spec_iter_next(iter)))
		r = visit(owner, spec);
	spec_iter_free(iter);
	return r;
}

static int each(const struct registry_source *source, size_t arch, spec_visit visit, void *owner)
{
	return walk(space_of(source, arch), NULL, visit, owner);
}

static bool has(const struct registry_source *source, size_t arch, const struct kernel_spec *spec)
{
	return spec_space_contains(space_of(source, arch), spec);
}

/* ---- which a stage may have ---- */

/* The spellings of a stage's data type; returns how many. */
static size_t data_types(const struct select_stage *stage, uint8_t ret_types[2])
{
	const struct fmha_problem *p = &stage->plan->problem;

	switch (stage->dtype) {
	case ABI_F32:
		ret_types[0] = SPEC_FP32;
		return 1;
	case ABI_F16:
		ret_types[0] = SPEC_FP16;
		return 1;
	case ABI_BF16:
		ret_types[0] = SPEC_BF16;
		return 1;
	case ABI_E4M3:
		ret_types[0] = p->o.dtype == FMHA_F16   ? SPEC_FP8FP16
			       : p->o.dtype == FMHA_F32 ? SPEC_FP8FP32
							: SPEC_FP8BF16;
		ret_types[1] = SPEC_FP8;
		return 2;
	case ABI_E5M2:
		ret_types[0] = SPEC_BF8;
		return 1;
	default:
		return 0;
	}
}

static uint8_t bias_of(const struct fmha_problem *p)
{
	if (plan_present(p, FMHA_T_BIAS))
		return SPEC_BIAS_BIAS;
	return plan_present(p, FMHA_T_ALIBI_SLOPES) ? SPEC_BIAS_ALIBI : SPEC_BIAS_NO;
}

static uint8_t qscale_of(const struct fmha_problem *p)
{
	if (!plan_present(p, FMHA_T_Q_DESCALE) && !plan_present(p, FMHA_T_K_DESCALE) &&
	    !plan_present(p, FMHA_T_V_DESCALE))
		return SPEC_QSCALE_NO;
	if (p->descale_per_page)
		return SPEC_QSCALE_KV_BLOCKSCALE;
	return p->descale_block_q || p->descale_block_k ? SPEC_QSCALE_BLOCKSCALE
							: SPEC_QSCALE_PERTENSOR;
}

/* The masks to look for: a kernel for any band runs a causal one too. */
static size_t masks(const struct fmha_problem *p, uint8_t ret_masks[2])
{
	bool causal = p->window_left < 0 && p->window_right == 0;
	/* Equal lengths without padding: both corners are the same. */
	bool same = p->mask == FMHA_MASK_TOP_LEFT ||
		    (p->mode == FMHA_BATCH && p->seqlen_q == p->seqlen_k &&
		     !plan_present(p, FMHA_T_SEQLEN_Q) && !plan_has_lengths_k(p) &&
		     !plan_present(p, FMHA_T_LEFTPAD_K));
	size_t n = 0;

	/* A band without edges hides nothing, whatever it is anchored to. */
	if (p->mask == FMHA_MASK_NONE || (p->window_left < 0 && p->window_right < 0)) {
		ret_masks[0] = SPEC_MASK_NO;
		return 1;
	}
	if (causal && same)
		ret_masks[n++] = SPEC_MASK_TOP_LEFT;
	ret_masks[n++] = SPEC_MASK_GENERIC;
	return n;
}

static uint8_t dropout_variant_of(const struct select_stage *stage)
{
	const struct fmha_problem *p = &stage->plan->problem;

	if (stage->family != ABI_BWD_DQ_DK_DV)
		return SPEC_DROPOUT_NONE;
	if (p->dropout_p <= 0)
		return SPEC_DROPOUT_NO;
	return plan_present(p, FMHA_T_RANDVAL) ? SPEC_DROPOUT_WG16_STORERANDVAL : SPEC_DROPOUT_WG16;
}

static void signature_of(const struct select_stage *stage, struct kernel_signature *s)
{
	const struct fmha_problem *p = &stage->plan->problem;
	bool paged = plan_paged(p);

	spec_signature_init(s);
	s->family = (uint8_t)stage->family;
	s->hdim_q = (uint16_t)p->hdim_q;
	s->hdim_v = (uint16_t)p->hdim_v;
	s->mode = p->mode == FMHA_GROUP ? SPEC_MODE_GROUP : SPEC_MODE_BATCH;
	s->bias = bias_of(p);
	s->lse = plan_present(p, FMHA_T_LSE);
	s->dropout = p->dropout_p > 0;
	s->qscale = qscale_of(p);
	s->rope = (uint8_t)p->rope;
	s->logits = p->logits_soft_cap > 0;
	s->paged_kv = paged;
	s->sink = plan_present(p, FMHA_T_SINK) || p->sink_tokens > 0;
	s->skip_min_seqlen_q = p->min_seqlen_q > 0;
	s->page_size = stage->family == ABI_BATCH_PREFILL && paged ? (uint16_t)p->page_size : 1;
	s->kv_memory_layout = p->kv_layout == FMHA_KV_LINEAR && paged ? SPEC_KV_LINEAR
								      : SPEC_KV_VECTORIZED;
	s->kv_lookup_table = plan_present(p, FMHA_T_BLOCK_TABLE) ? SPEC_KV_VLLM : SPEC_KV_SGLANG;
	s->deterministic = p->deterministic != 0;
	s->dbias = plan_present(p, FMHA_T_DBIAS);
	s->dropout_variant = dropout_variant_of(stage);
}

_Static_assert(SPEC_ROPE_INTERLEAVED == (int)FMHA_ROPE_INTERLEAVED &&
		       SPEC_ROPE_HALF_ROTATED == (int)FMHA_ROPE_HALF_ROTATED,
	       "rope words have the problem's values");

/* The signatures to look up for a stage, best first: masks have a general form, data types several
 * spellings. */
static size_t list_signatures(const struct select_stage *stage,
			      struct kernel_signature ret_signatures[MAX_SIGNATURES])
{
	uint8_t types[2], mask[2];
	size_t n_types = data_types(stage, types), n_masks = masks(&stage->plan->problem, mask);
	size_t n = 0;

	for (size_t t = 0; t < n_types; t++)
		for (size_t m = 0; m < n_masks; m++) {
			signature_of(stage, &ret_signatures[n]);
			ret_signatures[n].data_type = types[t];
			ret_signatures[n++].mask = mask[m];
		}
	return n;
}

static const struct ck *ck_of(const struct select_stage *stage)
{
	const struct select_foreign *foreign = stage->device->foreign;

	return (const struct ck *)((const char *)foreign - offsetof(struct ck, foreign));
}

/* Signatures of one data type. */
struct looking {
	const struct kernel_signature *signatures;
	size_t n;
};

struct adding {
	const struct select_stage *stage;
	struct select_report *report;
};

static int add_candidate(void *owner, const struct kernel_spec *spec)
{
	const struct adding *to = owner;
	struct registry_info info;

	registry_get_info(to->stage->device->registry, spec, &info);
	return select_add(to->stage, spec, &info, to->report);
}

/* They compete; those that come to the same kernels are one. */
static int add_candidates(void *owner, struct select_stage *stage, size_t arch,
			  struct spec_head_dims dims, struct select_report *report)
{
	const struct spec_space *space = ck_of(stage)->spaces[arch];
	const struct looking *looking = owner;
	struct adding to = {stage, report};
	struct kernel_signature previous = {0};
	int r = 0;

	for (size_t i = 0; i < looking->n && r == 0; i++) {
		struct kernel_signature wanted = looking->signatures[i];

		wanted.hdim_q = dims.hdim_q;
		wanted.hdim_v = dims.hdim_v;
		spec_signature_reduce(space, &wanted);
		if (i == 0 || !spec_signature_equal(&wanted, &previous))
			r = walk(space, &wanted, add_candidate, &to);
		previous = wanted;
	}
	return r;
}

static int select_ck(struct select_stage *stage, size_t arch, struct select_report *report,
		     struct plan_stage *ret_stage)
{
	const struct spec_space *space = ck_of(stage)->spaces[arch];
	struct kernel_signature signatures[MAX_SIGNATURES], previous = {0}, first;
	size_t n_signatures = list_signatures(stage, signatures);
	struct spec_head_dims pairs[SPEC_MAX_HEAD_DIMS];

	for (size_t s = 0, n; s < n_signatures; s += n) {
		struct looking looking = {.signatures = &signatures[s]};
		enum spec_dtype dtype = (enum spec_dtype)signatures[s].data_type;
		size_t n_pairs = spec_space_head_dims(space, (enum spec_family)stage->family, dtype,
						      pairs, SPEC_MAX_HEAD_DIMS);
		int r;

		for (n = 1; s + n < n_signatures && signatures[s + n].data_type == dtype;)
			n++;
		looking.n = n;
		/* Another spelling of a data type that the arch's kernels do not tell apart. */
		first = signatures[s];
		spec_signature_reduce(space, &first);
		if (s > 0 && spec_signature_equal(&first, &previous))
			continue;
		previous = first;
		if (n_pairs > SPEC_MAX_HEAD_DIMS)
			n_pairs = SPEC_MAX_HEAD_DIMS;
		r = select_pairs(stage, arch, pairs, n_pairs, add_candidates, &looking, report,
				 ret_stage);
		if (r <= 0)
			return r;
	}
	return 1;
}

static void first_signature(const struct select_stage *stage,
			    struct kernel_signature *ret_signature)
{
	struct kernel_signature signatures[MAX_SIGNATURES] = {0};

	(void)list_signatures(stage, signatures);
	spec_signature_reduce(ck_of(stage)->spaces[0], &signatures[0]);
	*ret_signature = signatures[0];
}

/* ---- which can run ---- */

#define VECTOR_BYTES 16 /* what a kernel without head-dim padding loads at once */

/* A length against a tile and its padding flag. 8: any multiple of 8. */
static bool fits(int32_t length, uint16_t tile, uint8_t pad)
{
	if (pad == 1 || tile == 0)
		return true;
	if (pad == SPEC_PAD_8)
		return length % 8 == 0;
	return length % tile == 0;
}

static bool rows_vary(const struct fmha_problem *p)
{
	return p->mode == FMHA_GROUP || plan_present(p, FMHA_T_SEQLEN_Q);
}

static bool check_lengths(const struct select_stage *stage, struct candidate *c)
{
	const struct fmha_problem *p = &stage->plan->problem;
	const struct kernel_spec *s = &c->spec;
	bool keys = stage->family != ABI_FWD_SPLITKV_COMBINE && stage->family != ABI_BWD_DOT_DO_O &&
		    stage->family != ABI_BWD_CONVERT_DQ;

	if (rows_vary(p) && !s->pad_s)
		return select_reject(c, "pad_s 0: row counts vary");
	if (!fits(p->seqlen_q, s->tile.tile_m0, s->pad_s))
		return select_reject(c, "pad_s %d: seqlen_q %d is no multiple of tile_m0 %d",
				     s->pad_s, p->seqlen_q, s->tile.tile_m0);
	if (!keys)
		return true;
	if ((p->mode == FMHA_GROUP || plan_has_lengths_k(p) || plan_present(p, FMHA_T_LEFTPAD_K)) &&
	    !s->pad_sk)
		return select_reject(c, "pad_sk 0: key counts vary");
	if (!fits(p->seqlen_k, s->tile.tile_n0, s->pad_sk))
		return select_reject(c, "pad_sk %d: seqlen_k %d is no multiple of tile_n0 %d",
				     s->pad_sk, p->seqlen_k, s->tile.tile_n0);
	return true;
}

static bool head_fits(int32_t hdim, uint16_t tile, uint8_t pad)
{
	return hdim == tile || pad == 1 || (pad == SPEC_PAD_8 && hdim % 8 == 0);
}

static bool check_head_dims(const struct select_stage *stage, struct candidate *c)
{
	const struct fmha_problem *p = &stage->plan->problem;
	const struct kernel_signature *s = &c->spec.signature;

	if (select_uses_hdim_q(stage->family) && !head_fits(p->hdim_q, s->hdim_q, c->spec.pad_d))
		return select_reject(c, "pad_d %d: hdim_q %d is not %d%s", c->spec.pad_d, p->hdim_q,
				     s->hdim_q, c->spec.pad_d ? ", nor a multiple of 8" : "");
	if (select_uses_hdim_v(stage->family) && !head_fits(p->hdim_v, s->hdim_v, c->spec.pad_dv))
		return select_reject(c, "pad_dv %d: hdim_v %d is not %d%s", c->spec.pad_dv,
				     p->hdim_v, s->hdim_v,
				     c->spec.pad_dv ? ", nor a multiple of 8" : "");
	return true;
}

/* Rows of @role start at multiples of VECTOR_BYTES, and their elements are dense. */
static bool is_aligned(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	const struct fmha_tensor *t = &p->tensor[role];
	int64_t vector = VECTOR_BYTES / fmha_dtype_bytes(t->dtype);

	if (!plan_present(p, role))
		return true;
	if ((t->offset + (uintptr_t)t->data) % VECTOR_BYTES != 0 || t->stride[3] != 1)
		return false;
	for (int i = 0; i < 3; i++)
		if (t->stride[i] % vector != 0)
			return false;
	return true;
}

static bool check_alignment(const struct select_stage *stage, struct candidate *c)
{
	static const enum fmha_tensor_role of_hdim_q[] = {FMHA_T_Q, FMHA_T_K, FMHA_T_DQ, FMHA_T_DK};
	static const enum fmha_tensor_role of_hdim_v[] = {FMHA_T_V, FMHA_T_O, FMHA_T_DO, FMHA_T_DV};
	const struct fmha_problem *p = &stage->plan->problem;

	if (p->kv_layout == FMHA_KV_VECTORIZED)
		return true; /* packed by definition */
	for (int i = 0; i < 4; i++) {
		if (c->spec.pad_d != 1 && select_uses_hdim_q(stage->family) &&
		    !is_aligned(p, of_hdim_q[i]))
			return select_reject(c, "pad_d %d: tensor.%s is not aligned to %d bytes",
					     c->spec.pad_d, proto_roles[of_hdim_q[i]].name,
					     VECTOR_BYTES);
		if (c->spec.pad_dv != 1 && select_uses_hdim_v(stage->family) &&
		    !is_aligned(p, of_hdim_v[i]))
			return select_reject(c, "pad_dv %d: tensor.%s is not aligned to %d bytes",
					     c->spec.pad_dv, proto_roles[of_hdim_v[i]].name,
					     VECTOR_BYTES);
	}
	return true;
}

/* Tiles of keys and pages must nest, one way or the other: a tile is loaded page by page. */
static bool ck_check_pages(const struct select_stage *stage, struct candidate *c)
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

static bool judge(const struct select_stage *stage, struct candidate *candidate)
{
	const struct spec_catalog *catalog = registry_catalog(stage->device->registry);
	struct spec_findings findings;

	if (!check_head_dims(stage, candidate) || !check_lengths(stage, candidate) ||
	    !check_alignment(stage, candidate) || !ck_check_pages(stage, candidate) ||
	    !check_splits(stage, catalog, candidate) || !check_features(stage, catalog, candidate))
		return false;
	if (spec_validate(catalog, &candidate->spec, NULL) == 0)
		return true;
	(void)spec_validate(catalog, &candidate->spec, &findings);
	for (int i = 0; i < findings.n; i++)
		if (!findings.finding[i].is_warning)
			return select_reject(candidate, "invalid: %.96s", findings.finding[i].msg);
	return select_reject(candidate, "invalid");
}

/* ---- the source ---- */

int ck_source_new(const struct spec_catalog *catalog, const struct registry_device *device,
		  const char *rules, struct registry_source **ret_source, struct fmha_error *err)
{
	struct ck *ck = calloc(1, sizeof(*ck));
	int r = 0;

	if (!ck)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	ck->source = (struct registry_source){each, has};
	ck->foreign = (struct select_foreign){select_ck, first_signature, judge};
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

const struct select_foreign *ck_foreign(const struct registry_source *source)
{
	return source ? &((const struct ck *)source)->foreign : NULL;
}
