/* SPDX-License-Identifier: MIT */
/* shapes.h: a problem's sizes from the shapes of its files, and whether these fit each other. */
#ifndef CTL_SHAPES_H
#define CTL_SHAPES_H

#include "tensor_files.h"

/* Sizes, from the files' shapes and tables. Prints what is wrong. Return: 0 or an exit code. */
int shapes_infer(const struct files *files, struct fmha_problem *problem);

/* The role's extents in the order that its file must have them. Return: how many. */
int shapes_expected(const struct files *files, const struct fmha_problem *problem, uint32_t role,
		    int64_t dims[5]);

/* Strides of a packed file, an extent of 1 where more are expected broadcasts. A shape that does
 * not fit is shown, with the file that wants another one. Return: 0 or an exit code. */
int shapes_match(const struct files *files, const struct fmha_problem *problem, uint32_t role,
		 int64_t stride[5]);

/* Whether the role's heads come before its rows, as --layout bhsd says of four dimensions. */
bool shapes_heads_first(const struct files *files, const struct fmha_problem *problem,
			uint32_t role);

/* Whether the role is a vectorized cache, which is packed by definition. */
bool shapes_vectorized(const struct fmha_problem *problem, uint32_t role);

#endif
