/* SPDX-License-Identifier: MIT */
/*
 * model.h: the model of a device's times that dispatch asks for shapes that nobody measured. A JSON
 * file, one a device arch:
 *
 *   {"format": "fmhad-model", "version": 2, "arch": "sm_90a", "features": ["flops", ...],
 *    "kinds": {"family": [0, 1, 7], ...}, "ranges": {"hdim": [128, 256], ...},
 *    "base": 1.5, "trees": [[[feature, threshold, left, right, value], ...], ...]}
 *
 * A node with feature -1 is a leaf; left and right are numbers of later nodes of the same tree; left
 * is taken where the feature is at most the threshold. "kinds" and "ranges" say what problems the
 * model was fitted to: of others it says nothing. A kernel that came after it is the cost formula's,
 * corrected as the most similar ones are.
 */
#ifndef FMHAD_DISPATCH_MODEL_H
#define FMHAD_DISPATCH_MODEL_H

#include <stddef.h>

#include <fmha/base.h>

struct predict_model;

/* Return: 0; FMHA_EINVAL: not a model, of another arch, or of other features than this build's. */
int predict_model_parse(const char *json, size_t size, const char *arch,
			struct predict_model **ret_model, struct fmha_error *err);
/* The file for @arch in models/ of the folder of specs. Return: 0, 1: there is none; FMHA_EINVAL,
 * FMHA_ENOMEM. */
int predict_model_load(const char *arch, struct predict_model **ret_model, struct fmha_error *err);
struct predict_model *predict_model_free(struct predict_model *model);

#endif
