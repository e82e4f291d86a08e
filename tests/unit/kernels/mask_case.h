/* SPDX-License-Identifier: MIT */
/* mask_case.h: masks that are data, drawn at random for the kernel tests: sound ones and hostile ones. */
#ifndef FMHA_TEST_MASK_CASE_H
#define FMHA_TEST_MASK_CASE_H

#include <stdint.h>

#include <kernels/abi.h>

enum mask_kind { MASK_NO_DATA, MASK_INTERVALS, MASK_BITS };

struct mask_shape {
	enum mask_kind kind;
	int32_t n_endpoints; /* odd */
	int64_t batch;       /* group mode: 1 */
	int64_t heads, rows; /* rows: of one batch entry, or of the packed axis */
	int32_t keys;        /* of the longest sequence */
};

/* Points @ret_mask into memory that mask_case_free() frees. Axes are broadcast and ordered at random. */
void mask_case_make(struct abi_mask_data *ret_mask, const struct mask_shape *shape, uint64_t seed);
void mask_case_free(struct abi_mask_data *mask);

/* Writes random numbers over all of the mask, as a racing owner does. */
void mask_case_scribble(struct abi_mask_data *mask, const struct mask_shape *shape, uint64_t seed);

#endif
