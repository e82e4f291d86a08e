/* SPDX-License-Identifier: MIT */
/*
 * tensors.h: all tensors of a problem in one buffer of the device's worker, each at an aligned
 * offset, so that filling one is filling the memory that the kernel reads.
 */
#ifndef CTL_TENSORS_H
#define CTL_TENSORS_H

#include "ctl.h"

struct tensors {
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	uint64_t bytes;
	uint64_t offset[FMHA_N_TENSORS]; /* where the role's tensor lies */
	bool present[FMHA_N_TENSORS];
};

/*
 * Takes the present roles of @problem (those whose data is not NULL: any pointer marks one), lays
 * them out and turns them into tensors of one new buffer, zero-filled. Types and strides stay.
 * Return: 0 or a negative FMHA_E* code.
 */
int tensors_new(struct fmha_device *device, struct fmha_problem *problem, struct tensors *ret,
		struct fmha_error *err);

/* The role's first byte, NULL when absent. */
void *tensors_data(const struct tensors *tensors, uint32_t role);

/* @problem with pointers into the buffer instead of ids: what the judge takes. */
void tensors_point(const struct tensors *tensors, const struct fmha_problem *problem,
		   struct fmha_problem *ret);

/* @n integers into a tensor of i32 or i64. */
void tensors_put_integers(void *data, uint32_t dtype, const int32_t *from, int64_t n);

void tensors_deinit(struct tensors *tensors);

#endif
