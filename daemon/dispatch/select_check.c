/* SPDX-License-Identifier: MIT */
/*
 * select_check.c: can this kernel run this problem? One function a rule. A signature says what a
 * kernel does; these rules are about sizes: what its tiles divide, what its loads need, what fits
 * its tables.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <specs/backend.h>

#include "select.h"

#define VECTOR_BYTES 16 /* what a kernel without head-dim padding loads at once */

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
	if (c->info.flags & REGISTRY_QUARANTINED)
		return select_reject(c, "quarantined");
	if (!c->info.offered)
		return select_reject(c, "not in a loaded kernel set");
	return true;
}

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

static bool check_head_dims(const struct select_stage *stage, const struct spec_catalog *catalog,
			    struct candidate *c)
{
	const struct fmha_problem *p = &stage->plan->problem;
	const struct kernel_signature *s = &c->spec.signature;
	int flags = spec_pipeline_flags(catalog, c->spec.pipeline);
	/* Loops that are made for an arch bring rows by 16 bytes; general ones look where a row ends. */
	bool by_eights = flags >= 0 && flags & (SPEC_WARPGROUPS | SPEC_STAGED);

	if (by_eights && (p->hdim_q % 8 || p->hdim_v % 8))
		return select_reject(c, "a head dimension is no multiple of 8: hdim %d x %d",
				     p->hdim_q, p->hdim_v);

	if (signature_uses_hdim_q(stage->family) && !head_fits(p->hdim_q, s->hdim_q, c->spec.pad_d))
		return select_reject(c, "pad_d %d: hdim_q %d is not %d%s", c->spec.pad_d, p->hdim_q,
				     s->hdim_q, c->spec.pad_d ? ", nor a multiple of 8" : "");
	if (signature_uses_hdim_v(stage->family) &&
	    !head_fits(p->hdim_v, s->hdim_v, c->spec.pad_dv))
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
		if (c->spec.pad_d != 1 && signature_uses_hdim_q(stage->family) &&
		    !is_aligned(p, of_hdim_q[i]))
			return select_reject(c, "pad_d %d: tensor.%s is not aligned to %d bytes",
					     c->spec.pad_d, proto_roles[of_hdim_q[i]].name,
					     VECTOR_BYTES);
		if (c->spec.pad_dv != 1 && signature_uses_hdim_v(stage->family) &&
		    !is_aligned(p, of_hdim_v[i]))
			return select_reject(c, "pad_dv %d: tensor.%s is not aligned to %d bytes",
					     c->spec.pad_dv, proto_roles[of_hdim_v[i]].name,
					     VECTOR_BYTES);
	}
	return true;
}

/* A plan is first tried without a buffer for partial sums of dQ: some write dQ directly, in a
 * second pass over the keys. */
static bool check_dq(const struct select_stage *stage, const struct spec_catalog *catalog,
		     struct candidate *c)
{
	int flags = spec_pipeline_flags(catalog, c->spec.pipeline);
	bool writes = flags >= 0 && flags & SPEC_WRITES_DQ;

	if (stage->family != ABI_BWD_DQ_DK_DV || writes == !stage->args->bwd.dq_acc)
		return true;
	return select_reject(c, writes ? "writes dQ itself" : "sums dQ in the workspace");
}

bool select_check(const struct select_stage *stage, const struct spec_catalog *catalog,
		  struct candidate *candidate)
{
	if (!check_state(candidate) || !check_dq(stage, catalog, candidate) ||
	    !check_head_dims(stage, catalog, candidate) || !check_lengths(stage, candidate) ||
	    !check_alignment(stage, candidate))
		return false;
	/* This build's own kernels are what their tables list, and say the rest themselves when the
	 * device is asked. */
	return !stage->device->judge || stage->device->judge(stage, candidate);
}
