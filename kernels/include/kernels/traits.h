/* SPDX-License-Identifier: MIT */
/*
 * traits.h: what a problem asks of code, one list for all who want to know: problem -> struct traits
 * (dispatch), the rows that have them (specs), the options that code is compiled with and the names of code
 * objects (kernels/gpu), the constants of device code, the words by which measured times are kept and the
 * features of a model. A trait is a line here, and what code does about it.
 *
 * Host and device read it, so it includes nothing but abi.h.
 */
#ifndef FMHA_KERNELS_TRAITS_H
#define FMHA_KERNELS_TRAITS_H

#include <kernels/abi.h>

/*
 * Sets of families: those whose kernels have a trait. Of others, and so of their names and code, it is no
 * matter. FORWARD are the forms of the forward pass; SCORES make scores, tile by tile: the others go row by
 * row, whatever the head dims are.
 */
#define TRAITS_IN(FAMILY)        (1u << ABI_##FAMILY)
#define TRAITS_TAKES_fwd(FAMILY) | TRAITS_IN(FAMILY)
#define TRAITS_TAKES_combine(FAMILY)
#define TRAITS_TAKES_appendkv(FAMILY)
#define TRAITS_TAKES_bwd(FAMILY)
#define TRAITS_IF_FORWARD(NAME, name, args) TRAITS_TAKES_##args(NAME)
enum { TRAITS_FORWARD = 0 ABI_FAMILIES(TRAITS_IF_FORWARD) };
#define TRAITS_SCORES (TRAITS_FORWARD | TRAITS_IN(BWD_DQ_DK_DV))
#define TRAITS_PAGES                                                                               \
	(TRAITS_IN(FWD_SPLITKV) | TRAITS_IN(FWD_PAGEDKV) | TRAITS_IN(BATCH_PREFILL) |              \
	 TRAITS_IN(FWD_APPENDKV))

/*
 * X(name, NAME, word, kind, families, asked)
 *   name      member of struct traits, enum trait's TRAIT_name
 *   NAME      -DFMHA_NAME=value, and the constant Config::NAME
 *   word      in names of code objects that have it, no word of another trait and a number
 *   kind      FLAG: 0, 1; KIND: 0, 1, 2; KIND4: 0 to 3
 *   asked     its value for the fmha_problem p; HAS(ROLE): has p that tensor? (daemon/dispatch/traits.h)
 * The order is that of options and of names of code objects, which caches and people keep.
 */
#define FMHA_TRAITS(X)                                                                             \
	X(mask, MASK, "mask", FLAG, TRAITS_SCORES, p->mask != FMHA_MASK_NONE)                      \
	X(bias, BIAS, "bias", KIND, TRAITS_SCORES, HAS(BIAS) ? 1 : HAS(ALIBI_SLOPES) ? 2 : 0)      \
	X(softcap, SOFTCAP, "cap", FLAG, TRAITS_SCORES, p->logits_soft_cap > 0)                    \
	X(dropout, DROPOUT, "drop", FLAG, TRAITS_SCORES, p->dropout_p > 0)                         \
	X(paged, PAGED, "paged", FLAG, TRAITS_PAGES, p->page_size > 0)                             \
	X(descale, DESCALE, "descale", FLAG, TRAITS_FORWARD,                                       \
	  HAS(Q_DESCALE) || HAS(K_DESCALE) || HAS(V_DESCALE))                                      \
	FMHA_OWN_TRAITS(X)

/*
 * Likewise: those that AMD's kernels have no column for. Specs, filters and names of kernels have them by their
 * own names and words, and so do shape words and models: one that was fitted before a trait was there says
 * nothing of problems that have it. asked: of p alone.
 */
#define FMHA_OWN_TRAITS(X)                                                                         \
	X(narrow, NARROW, "narrow", KIND4, TRAITS_FORWARD,                                         \
	  p->k.dtype == p->q.dtype  ? 0                                                            \
	  : p->k.dtype == FMHA_E4M3 ? 1                                                            \
	  : p->k.dtype == FMHA_E5M2 ? 2                                                            \
				    : 3)

/*
 * X(name, NAME, word, kind, families, asked): what else tells two pieces of code apart. Names of kernels do
 * not say it: each stands for all of these, and the problem decides.
 */
#define FMHA_VARIANTS(X)                                                                           \
	X(dbias_sum, DBIAS_SUM, "dbsum", FLAG, TRAITS_IN(BWD_DQ_DK_DV),                            \
	  HAS(DBIAS) && abi_sums_dbias(&args->bwd))                                                \
	X(tails, TAILS, "tails", FLAG, TRAITS_SCORES | TRAITS_IN(FWD_SPLITKV_COMBINE),             \
	  p->hdim_v % 8 != 0 || (family != ABI_FWD_SPLITKV_COMBINE && p->hdim_q % 8 != 0))         \
	X(mask_data, MASK_DATA, "data", KIND, TRAITS_SCORES | TRAITS_IN(BWD_DOT_DO_O),             \
	  HAS(MASK_INTERVALS) ? 1                                                                  \
	  : HAS(MASK_BITS)    ? 2                                                                  \
			      : 0)                                                                    \
	X(shares, SHARES, "shares", FLAG, TRAITS_IN(FWD_SPLITKV), abi_shares(&args->fwd))          \
	X(wide, WIDE, "wide", KIND, TRAITS_IN(FWD_SPLITKV_COMBINE),                                \
	  p->op != FMHA_MERGE_STATES && p->hdim_v % 8 == 0 ? abi_merges_wide(&args->combine) : 0)  \
	X(chosen, CHOSEN, "chosen", FLAG, TRAITS_FORWARD, p->topk > 0)                             \
	X(latent_fp8, LATENT_FP8, "latent", FLAG, TRAITS_FORWARD,                                  \
	  p->kv_layout == FMHA_KV_LATENT_FP8)                                                      \
	X(paired, PAIRED, "pair", FLAG, TRAITS_FORWARD,                                            \
	  p->v_in_k && p->mask == FMHA_MASK_NONE && abi_pairs(&args->fwd) &&                       \
		  (p->kv_layout == FMHA_KV_LATENT_FP8 ||                                           \
		   (family == ABI_FWD_SPLITKV && p->topk == 0)))                                   \
	X(turns, TURNS, "turns", KIND, TRAITS_IN(FWD_APPENDKV), args->appendkv.rope)               \
	X(widens, WIDENS, "widens", FLAG, TRAITS_IN(FWD_APPENDKV), args->appendkv.widens)          \
	X(cap_approx, CAP_APPROX, "approx", FLAG, TRAITS_FORWARD,                                  \
	  p->logits_soft_cap > 0 && p->softcap_approx)                                             \
	X(by_key, BY_KEY, "bykey", FLAG, TRAITS_FORWARD,                                           \
	  (HAS(K_DESCALE) || HAS(V_DESCALE)) && (p->descale_block_k > 0 || p->descale_per_page))

/*
 * X(name, NAME, word, kind, ...): all that an object has compiled in beside its tile: the traits, and what
 * follows from them, the tile and the arch.
 */
#define FMHA_FEATURES(X)                                                                           \
	X(pack, PACK, "pack", FLAG, 0, 0)                                                          \
	X(split, SPLIT, "split", FLAG, 0, 0)                                                       \
	FMHA_TRAITS(X)                                                                             \
	X(logits, LOGITS, "logits", FLAG, 0, 0)                                                    \
	X(buffers, BUFFERS, "buffers", KIND, 0, 0)                                                 \
	X(split_dkdv, SPLIT_DKDV, "dkdv", FLAG, 0, 0)                                              \
	X(parked, PARKED, "parked", FLAG, 0, 0)                                                    \
	FMHA_VARIANTS(X)

#define TRAITS_ENUM(name, NAME, word, kind, families, asked) TRAIT_##name,
#define TRAITS_ONE(name, NAME, word, kind, families, asked)  +1
enum trait { FMHA_TRAITS(TRAITS_ENUM) N_TRAITS };
enum { N_OWN_TRAITS = 0 FMHA_OWN_TRAITS(TRAITS_ONE) };
#undef TRAITS_ENUM
#undef TRAITS_ONE

/* Bits of enum trait are sets of them. */
#define TRAIT_BIT(name) (1u << TRAIT_##name)

struct traits {
	unsigned char op;    /* enum abi_family */
	unsigned char dtype; /* enum abi_dtype of q, k, v; combine: of o */
#define TRAITS_MEMBER(name, NAME, word, kind, families, asked) unsigned char name;
	FMHA_TRAITS(TRAITS_MEMBER)
	FMHA_VARIANTS(TRAITS_MEMBER)
#undef TRAITS_MEMBER
	unsigned char any_scale; /* the scale may be 0 or negative: no maximum over raw products */
	unsigned char dq_acc;    /* backward: dQ goes to dq_acc, split by split */
};

/* ---- what strides say ---- */

#ifdef __cplusplus
#define TRAITS_FN DEV
#else
#define TRAITS_FN static inline
#endif

/* dBias is a sum over the axes that it is broadcast along. Of no rows, too: the sum is 0 then. */
TRAITS_FN int abi_sums_heads(const struct abi_bwd_args *a)
{
	return !a->dbias.stride_head && a->nhead_q > 1;
}

TRAITS_FN int abi_sums_rows(const struct abi_bwd_args *a)
{
	const struct abi_sequences *s = &a->sequences;

	return !a->dbias.stride_seq && (s->seqstart_q ? s->total_q : s->seqlen_q_max) != 1;
}

/* Packed sequences are rows of one batch entry. */
TRAITS_FN int abi_sums_batch(const struct abi_bwd_args *a)
{
	return a->sequences.seqstart_q ? abi_sums_rows(a)
				       : !a->dbias.stride_batch && a->sequences.batch > 1;
}

TRAITS_FN int abi_sums_dbias(const struct abi_bwd_args *a)
{
	return abi_sums_heads(a) || abi_sums_rows(a) || abi_sums_batch(a);
}

/* Whether blocks find their part of all keys by themselves. */
TRAITS_FN int abi_shares(const struct abi_fwd_args *a)
{
	return a->n_splits > 1 && a->split_size == 0;
}

/* Whether tiles of 64 heads lie side by side by two, rows of the same keys. */
#define ABI_PAIR_HEADS 128
TRAITS_FN int abi_pairs(const struct abi_fwd_args *a)
{
	return a->nhead_q / a->nhead_k % ABI_PAIR_HEADS == 0;
}

/*
 * Merges of a plan's own parts of wide rows, where these are enough for all units: 1, a wave a row, of parts so few that a
 * piece of 128 elements has little to wait for; 2, with room for two blocks a unit. Not where a row's sums may not depend
 * on how many others there are.
 */
enum { ABI_MERGE_WHOLE = 1, ABI_MERGE_PIECES = 2 };
#define ABI_WIDE_HDIM   256 /* above */
#define ABI_WIDE_ROWS   1024
#define ABI_WHOLE_PARTS 4
#define ABI_WHOLE_ROWS  2048
TRAITS_FN int abi_merges_wide(const struct abi_combine_args *a)
{
	const struct abi_sequences *s = &a->sequences;
	abi_i64 rows = (abi_i64)s->batch * s->seqlen_q_max * a->nhead_q;

	if (a->in_order || a->few_rows > 0 || a->hdim_v <= ABI_WIDE_HDIM || rows < ABI_WIDE_ROWS)
		return 0;
	if (a->n_splits > ABI_WHOLE_PARTS)
		return ABI_MERGE_PIECES;
	return rows >= ABI_WHOLE_ROWS ? ABI_MERGE_WHOLE : 0;
}

#endif
