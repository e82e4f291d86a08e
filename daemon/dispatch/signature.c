/* SPDX-License-Identifier: MIT */
/*
 * signature.c: problem -> the compile-time traits that a stage's kernel must have. Every trait is
 * set from the problem here; registry_reduce() then drops those that the family has no use
 * for, so that the combine of a masked split-KV problem is the combine of any other.
 */
#include <stdio.h>

#include "select.h"

#define SAME_FAMILY(NAME, name)                                                                    \
	_Static_assert(SPEC_##NAME == (int)ABI_##NAME,                                             \
		       "the families of specs are those of kernels");
ABI_FAMILIES(SAME_FAMILY)
_Static_assert(SPEC_N_FAMILIES == (int)ABI_N_FAMILIES, "and no others");

const enum spec_field signature_fields[] = {
	SPEC_FIELD_data_type,
	SPEC_FIELD_mode,
	SPEC_FIELD_hdim_q,
	SPEC_FIELD_hdim_v,
	SPEC_FIELD_mask,
	SPEC_FIELD_bias,
	SPEC_FIELD_lse,
	SPEC_FIELD_dropout,
	SPEC_FIELD_qscale,
	SPEC_FIELD_rope,
	SPEC_FIELD_logits,
	SPEC_FIELD_paged_kv,
	SPEC_FIELD_sink,
	SPEC_FIELD_skip_min_seqlen_q,
	SPEC_FIELD_page_size,
	SPEC_FIELD_kv_memory_layout,
	SPEC_FIELD_kv_lookup_table,
	SPEC_FIELD_deterministic,
	SPEC_FIELD_dbias,
	SPEC_FIELD_dropout_variant,
};
const size_t signature_n_fields = sizeof(signature_fields) / sizeof(signature_fields[0]);

bool signature_uses_hdim_q(enum abi_family family)
{
	return family != ABI_FWD_SPLITKV_COMBINE && family != ABI_BWD_DOT_DO_O;
}

bool signature_uses_hdim_v(enum abi_family family)
{
	return family != ABI_BWD_CONVERT_DQ;
}

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

size_t signature_list(const struct select_stage *stage,
		      struct kernel_signature ret_signatures[SELECT_MAX_SIGNATURES])
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
