/* SPDX-License-Identifier: MIT */
/* verify_case.h: random attention problems. A case follows from (seed, number, features) alone. */
#ifndef CTL_VERIFY_CASE_H
#define CTL_VERIFY_CASE_H

#include "ctl.h"
#include "tensors.h"

/* The features that a case may have beyond plain attention. */
#define VERIFY_FEATURES(X)                                                                         \
	X(BACKWARD, "backward")                                                                    \
	X(APPEND, "append")                                                                        \
	X(MERGE, "merge")                                                                          \
	X(MASK, "mask")                                                                            \
	X(WINDOW, "window")                                                                        \
	X(LSE, "lse")                                                                              \
	X(BIAS, "bias")                                                                            \
	X(ALIBI, "alibi")                                                                          \
	X(SINK, "sink")                                                                            \
	X(SOFTCAP, "softcap")                                                                      \
	X(DROPOUT, "dropout")                                                                      \
	X(SCALE, "scale")                                                                          \
	X(GROUP, "group")                                                                          \
	X(LENGTHS, "lengths")                                                                      \
	X(PAGED, "paged")                                                                          \
	X(SPLIT, "split")                                                                          \
	X(STRIDES, "strides")                                                                      \
	X(ROPE, "rope")                                                                            \
	X(INTERVALS, "intervals")                                                                  \
	X(BITS, "bits")                                                                            \
	X(FP8, "fp8")                                                                              \
	X(F16, "f16")                                                                              \
	X(BF16, "bf16")                                                                            \
	X(F32, "f32")                                                                              \
	X(NARROW, "narrow") /* K and V of 8 bits under a Q, or new rows, of 16 */                  \
	X(SLOTS, "slots")                                                                          \
	X(WIDE, "wide")     /* head dims above 256 */                                              \
	X(LATENT, "latent") /* values that are part of keys, latents of fp8 */                     \
	X(CHOSEN, "chosen") /* keys by indices */

enum verify_feature {
#define VERIFY_FEATURE_ENUM(NAME, name) VERIFY_##NAME,
	VERIFY_FEATURES(VERIFY_FEATURE_ENUM)
#undef VERIFY_FEATURE_ENUM
		VERIFY_N_FEATURES
};

extern const char *const verify_feature_names[VERIFY_N_FEATURES];

#define VERIFY_ALL ((1u << VERIFY_N_FEATURES) - 1)
#define VERIFY_LONG                                                                                \
	(1u << VERIFY_N_FEATURES) /* beside features: problems of many tiles and blocks */
#define VERIFY_MAX_BATCH 4

struct verify_case {
	uint64_t random;             /* the generator's state */
	uint32_t features;           /* that this case has */
	struct fmha_problem problem; /* tensors marked, not yet placed */
	/* Contents of index tensors; a role's list is indices[index_at[role]...]. */
	int32_t *indices[FMHA_N_TENSORS];
	int64_t n_indices[FMHA_N_TENSORS];
};

/* Return: 0, or -1 when out of memory. */
int verify_case_init(struct verify_case *c, uint64_t seed, uint64_t number, uint32_t features);

/* Random contents for every input, once the tensors have a place. */
void verify_case_fill(struct verify_case *c, const struct tensors *tensors);

/* "mask lse group" */
void verify_case_words(const struct verify_case *c, char *text, size_t n);

void verify_case_deinit(struct verify_case *c);

#endif
