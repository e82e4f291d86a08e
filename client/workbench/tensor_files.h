/* SPDX-License-Identifier: MIT */
/* tensor_files.h: a problem's tensors as .npy files: which option names which role, and what sizes follow.
 */
#ifndef CTL_TENSOR_FILES_H
#define CTL_TENSOR_FILES_H

#include "ctl.h"
#include "npy.h"
#include "tensors.h"

#define FILES_OPTION_BASE 3000

struct files {
	uint32_t op;
	uint32_t heads_first;                                 /* 1: --layout bhsd */
	uint32_t fp8_is_e5m2;                                 /* 1: --fp8 e5m2 */
	const char *in[FMHA_N_TENSORS], *out[FMHA_N_TENSORS]; /* paths, borrowed */
	struct npy npy[FMHA_N_TENSORS];                       /* of inputs */
};

extern const struct cli_option files_options[];

/* Applies one of them. Return: 0 or CTL_USAGE. */
/* NULL: it is none of them. */
const char *files_option_name(int option);
int files_option(struct files *files, int option, const char *value);

/*
 * Reads the inputs and fills in what follows from them: sizes, types, strides; marks each tensor
 * that there is, outputs included, with a non-NULL data. Prints what is wrong. Return: 0 or an exit
 * code.
 */
int files_load(struct files *files, struct fmha_problem *problem);

/* Copies the inputs to where @tensors lays them. */
void files_fill(const struct files *files, const struct tensors *tensors);

/* Lets the inputs of @problem be the files' own memory, which no run has seen. */
void files_point(const struct files *files, struct fmha_problem *problem);

/* Whether any input is read from a file. */
bool files_given(const struct files *files);

/* Whether any output is to be written. */
bool files_keep(const struct files *files);

/* Writes the outputs that were asked for. Return: 0 or an exit code. */
int files_store(const struct files *files, const struct fmha_problem *problem,
		const struct tensors *tensors);

void files_deinit(struct files *files);

#endif
