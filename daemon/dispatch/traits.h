/* SPDX-License-Identifier: MIT */
/* traits.h: what a stage of a problem asks of code, by the list of kernels/traits.h. */
#ifndef FMHAD_DISPATCH_TRAITS_H
#define FMHAD_DISPATCH_TRAITS_H

#include <fmha/base.h>
#include <kernels/traits.h>
#include <proto/problem.h>

/* @p: normalised; @args: of a stage of @family, but for addresses. */
static inline void traits_of(const struct fmha_problem *p, enum abi_family family, uint32_t dtype,
			     const union abi_args *args, struct traits *ret_traits)
{
	*ret_traits = (struct traits){
		.op = (unsigned char)family,
		.dtype = (unsigned char)dtype,
		.any_scale = TRAITS_SCORES >> family & 1 && !(p->scale > 0),
		.dq_acc = family == ABI_BWD_DQ_DK_DV && args->bwd.dq_split_keys > 0,
	};
#define HAS(role) fmha_tensor_present(&p->tensor[FMHA_T_##role])
#define ASK(name, NAME, word, kind, families, asked)                                               \
	if ((families) >> family & 1)                                                              \
		ret_traits->name = (asked);
	FMHA_TRAITS(ASK)
	FMHA_VARIANTS(ASK)
#undef ASK
}

/* A trait that shape words and models have by its own word: its value. 0: it is none, or not asked for. */
static inline unsigned traits_own(const struct fmha_problem *p, int trait, const char **ret_word)
{
	(void)p;
	*ret_word = NULL;
	switch (trait) {
#define OWN(name, NAME, word, kind, families, asked)                                               \
	case TRAIT_##name:                                                                         \
		*ret_word = (word);                                                                \
		return (asked);
		FMHA_OWN_TRAITS(OWN)
#undef OWN
	default:
		return 0;
	}
}

#endif
