/* SPDX-License-Identifier: MIT */
/*
 * stage.h: tensors in ordinary memory on their way through shared memory.
 *
 * A staged tensor gets a compact copy: the same axes without the gaps that its strides leave, in
 * the order in which they lie in memory, so that a dense tensor in any axis order is one memcpy.
 * Axes with stride 0 (broadcast) stay broadcast. Only named elements are written back: what lies
 * between them belongs to the caller.
 */
#ifndef CLIENT_STAGE_H
#define CLIENT_STAGE_H

#include <stdbool.h>
#include <stdint.h>

#include <fmha/base.h>

#define STAGE_MAX_DIMS  5
#define STAGE_ALIGNMENT 256 /* bytes: what every device's vector loads like */

struct stage_view {
	int n_dims;
	uint32_t element_bytes; /* 1, 2 or 4 */
	int64_t dims[STAGE_MAX_DIMS];
	int64_t stride[STAGE_MAX_DIMS];  /* of the caller's memory, elements */
	int64_t compact[STAGE_MAX_DIMS]; /* of the copy, elements */
	uint64_t bytes;                  /* of the copy */
};

/* One tensor of a problem and what happens to it. */
struct stage_tensor {
	uint32_t role;
	bool copy_in, copy_out;
	uint64_t offset; /* in the arena */
	void *data;      /* the caller's memory, borrowed */
	struct stage_view view;
};

struct stage {
	uint32_t n_tensors;
	uint64_t bytes; /* of all copies, aligned */
	int32_t seqlen_k; /* where @tensors say so: their number of keys, which a tensor has as its data */
	struct stage_tensor tensors[FMHA_N_TENSORS];
};

/* Compact strides for @view's dims and strides; fills compact and bytes. */
void stage_view_compact(struct stage_view *view);

/* Copies the elements of a view; @to_compact says in which direction. */
void stage_view_copy(const struct stage_view *view, void *memory, void *compact, bool to_compact);

/*
 * Lays out every tensor of @problem that has data, and turns it into a tensor of buffer @buffer (an
 * id that the caller knows how to replace) with the copy's offset and strides. @problem must have
 * passed problem_check(). A staged workspace is dropped: the daemon has its own. Few query rows over
 * a cache become a problem of more keys than there are, and of their number: the stage has it, and stays where it is.
 * Return: 0, or FMHA_EINVAL naming the tensor.
 */
int stage_plan(struct fmha_problem *problem, uint64_t buffer, struct stage *ret_stage,
	       struct fmha_error *err);

void stage_in(const struct stage *stage, void *arena);
void stage_out(const struct stage *stage, void *arena);

#endif
