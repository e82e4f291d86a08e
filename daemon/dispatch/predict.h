/* SPDX-License-Identifier: MIT */
/*
 * predict.h: a model of a device's times (model.c reads it, estimate.c asks it), fitted to measured ones by tests/bench/fit_model.py and read
 * from a JSON file: gradient-boosted regression trees on the logarithm of time over the cost formula,
 * so that it only has to know where the formula is wrong.
 */
#ifndef FMHAD_DISPATCH_PREDICT_H
#define FMHAD_DISPATCH_PREDICT_H

#include "select.h"

/* The names are the model file's; the order is that of struct predict_model's splits. */
#define PREDICT_FEATURE_LIST(X)                                                                    \
	X(flops)   /* log2: of the problem, visible pairs only */                                  \
	X(bytes)   /* log2: least traffic */                                                       \
	X(cost)    /* log2: of the formula */                                                      \
	X(queries) /* log2: of a sequence */                                                       \
	X(rows)    /* log2: of a tile's axis: with the heads of a group, where they are packed */  \
	X(keys)    /* log2: of a split */                                                          \
	X(heads)   /* log2: batch times heads, or heads of K where they are packed */              \
	X(group)   /* query heads a key head */                                                    \
	X(hdim)    /* both together */                                                             \
	X(m0)                                                                                      \
	X(n0)                                                                                      \
	X(k0)                                                                                      \
	X(waves)      /* of a block */                                                             \
	X(per_unit)   /* blocks that share a compute unit */                                       \
	X(pipeline)   /* flags of the backend's catalogue */                                       \
	X(splits)     /* log2; 0: one or none */                                                   \
	X(rounds)     /* log2: blocks over compute units */                                        \
	X(last_round) /* what of the last round is empty */                                        \
	X(visible)    /* share of the pairs */                                                     \
	X(page)       /* log2: keys a page; -1: contiguous */                                      \
	X(mode)       /* group: 1 */                                                               \
	X(family)                                                                                  \
	X(element)   /* bytes */                                                                   \
	X(pads)      /* padding flags */                                                           \
	X(row_waste) /* padded over real */                                                        \
	X(key_waste)                                                                               \
	X(spills) /* 0, 1 */                                                                       \
	X(cap)    /* of scores: 0, 1 */

#define PREDICT_FEW_SPILLS                                                                         \
	32 /* bytes: a loop keeps them out of its way; models have seen those that do not */

enum predict_feature {
#define PREDICT_ENUM(name)                                     PREDICT_##name,
#define PREDICT_TRAIT(name, NAME, word, kind, families, asked) PREDICT_trait_##name,
	PREDICT_FEATURE_LIST(PREDICT_ENUM) FMHA_OWN_TRAITS(PREDICT_TRAIT)
#undef PREDICT_ENUM
#undef PREDICT_TRAIT
		PREDICT_FEATURES
};

#define MODEL_TREES 512
#define MODEL_NODES 1024 /* of a tree */
#define MODEL_KINDS 64

/* A leaf's children are itself, so that walks of several trees can go on until the last one has ended. */
struct model_node {
	float value; /* a leaf's; else the threshold */
	uint16_t feature;
	uint16_t child[2]; /* up to the threshold, above it; from the tree's root on */
};

/* Trees that are walked at a time. Each step waits for the one before, and nobody can guess where it goes: several
 * walks beside each other, without branches, take hardly longer than one. */
#define MODEL_ABREAST 8

/* Features of a problem that are names, of which a model knows those that it was fitted to, and
 * numbers, of which it knows those between. The others may be anything: a tree's answer beyond what it
 * has seen is that of the nearest. */
static const enum predict_feature model_kinds[] = {PREDICT_family, PREDICT_element, PREDICT_mode};
static const enum predict_feature model_ranges[] = {PREDICT_hdim, PREDICT_group, PREDICT_page};
#define MODEL_N_KINDS  (sizeof(model_kinds) / sizeof(model_kinds[0]))
#define MODEL_N_RANGES (sizeof(model_ranges) / sizeof(model_ranges[0]))

struct predict_model {
	double base;
	int n_features;                           /* traits that came after it are not among them */
	double kinds[MODEL_N_KINDS][MODEL_KINDS]; /* NaN: no more */
	double ranges[MODEL_N_RANGES][2];
	uint32_t n_trees;
	uint32_t roots[MODEL_TREES + MODEL_ABREAST];
	struct model_node *
		nodes; /* the last one: a tree without a say, for what is missing to MODEL_ABREAST */
};

const char *predict_feature_name(int feature);

void predict_features(const struct select_stage *stage, const struct spec_catalog *catalog,
		      const struct candidate *candidate, double ret_features[PREDICT_FEATURES]);

/* Microseconds of the plan whose main kernel the candidate is; 0: no problem like it was measured. */
double predict_us(const struct predict_model *model, const double features[PREDICT_FEATURES],
		  double cost);

#endif
