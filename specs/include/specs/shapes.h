/* SPDX-License-Identifier: MIT */
/*
 * shapes.h: the shape matrices of specs/shapes/: problems to run kernels on, in tiers that include
 * each other (smoke, full, nightly). A file is a list of groups; a group is a product of axes
 * thinned out by limits, so that a thousand shapes are a page of JSON.
 */
#ifndef SPECS_SHAPES_H
#define SPECS_SHAPES_H

#include <stdint.h>

#include <fmha/base.h>
#include <specs/filter.h>

/*
 * X(name, default, words): the numbers of a shape. Most are those of struct fmha_problem; words,
 * where not empty, is the list that the values come from, in the order of the public enums where
 * there is one.
 */
#define SPEC_SHAPE_FIELDS(X)                                                                       \
	X(op, 0, "forward backward append_kv merge_states")                                        \
	X(data_type, 1, "fp32 fp16 bf16 fp8 bf8") /* enum fmha_dtype */                            \
	X(mode, 0, "batch group")                                                                  \
	X(batch, 1, "")                                                                            \
	X(nhead_q, 1, "")                                                                          \
	X(nhead_k, 0, "")  /* 0: nhead_q */                                                        \
	X(seqlen_q, 1, "") /* group mode: the longest */                                           \
	X(seqlen_k, 0, "") /* 0: seqlen_q */                                                       \
	X(hdim_q, 128, "")                                                                         \
	X(hdim_v, 0, "")                                             /* 0: hdim_q */               \
	X(lengths, 0, "equal mixed ramp one_long with_empty padded") /* of the sequences */        \
	X(mask, 0, "no top_left bottom_right")                                                     \
	X(window_left, -1, "")                                                                     \
	X(window_right, -1, "")                                                                    \
	X(sink_tokens, 0, "")                                                                      \
	X(sink, 0, "")                                                                             \
	X(bias, 0, "no bias alibi")                                                                \
	X(lse, 0, "")                                                                              \
	X(dropout_percent, 0, "")                                                                  \
	X(soft_cap, 0, "")                                                                         \
	X(descale, 0, "no pertensor blockscale page")                                              \
	X(page_size, 0, "")                                                                        \
	X(kv_layout, 0, "linear vectorized")                                                       \
	X(kv_lookup, 0, "block_table indptr")                                                      \
	X(n_splits, 1, "") /* 0: the planner's choice */                                           \
	X(seqlen_new, 0, "")                                                                       \
	X(rope, 0, "none interleaved half_rotated")                                                \
	X(rotary_dim, 0, "")                                                                       \
	X(deterministic, 0, "")                                                                    \
	X(n_parts, 0, "")

struct spec_shape {
	const char *group; /* the name of its group in the file, valid during the callback */
#define SPEC_SHAPE_MEMBER(name, value, words) int32_t name;
	SPEC_SHAPE_FIELDS(SPEC_SHAPE_MEMBER)
#undef SPEC_SHAPE_MEMBER
};

/* The number's word ("bf16"), or NULL when the field named @field has no words. */
const char *spec_shape_word(const char *field, int32_t value);

/*
 * Calls @each for every shape of a tier, those of the tiers it includes first. Stops when @each
 * returns other than 0.
 * @dir: the specs folder, NULL: as for spec_catalog_load()
 * @tier: "smoke", "full" or "nightly"; or a file's path (with a '/')
 * Return: 0, what @each returned, FMHA_EIO, FMHA_EINVAL with file, path in the document and reason.
 */
/*
 * Expressions over the fields of a shape, as those of specs/filter.h are over kernels:
 *   op == 'forward' and seqlen_k >= 4 * seqlen_q and data_type in ('fp16', 'bf16')
 * @explain, Return: as spec_filter_compile()
 */
int spec_shape_filter_compile(const char *text, struct spec_filter **ret_filter,
			      char explain[SPEC_EXPLAIN_BYTES], struct fmha_error *err);
int spec_shape_filter_match(const struct spec_filter *filter, const struct spec_shape *shape);

typedef int (*spec_shape_each)(void *owner, const struct spec_shape *shape);
int spec_shapes_read(const char *dir, const char *tier, spec_shape_each each, void *owner,
		     struct fmha_error *err);

#endif
