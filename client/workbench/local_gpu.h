/* SPDX-License-Identifier: MIT */
/* local_gpu.h: a device's GPU in this process, for problems that fmhactl launches itself (fmha_local.h). */
#ifndef CTL_LOCAL_GPU_H
#define CTL_LOCAL_GPU_H

#include "ctl.h"
#include "tensors.h"

struct local_gpu;

/*
 * @ret_gpu: given; any number of threads may use it
 * Return: 0, FMHA_ENOTSUP (a device that is no GPU, no runtime or no such GPU here), FMHA_ENOMEM, any call of fmha.h.
 */
int local_gpu_open(struct fmha_client *client, struct fmha_device *device,
		   struct local_gpu **ret_gpu, struct fmha_error *err);
struct local_gpu *local_gpu_free(struct local_gpu *gpu);

/*
 * One run of a problem whose tensors lie in @tensors: on copies in memory of the GPU, which come back. The workspace is full
 * of NaN before.
 * @kernel: FMHA_KERNEL_BYTES: of the main stage
 * Return: 0, FMHA_EIO (the runtime's sentence), or as fmha_local_plan_new().
 */
int local_gpu_run(struct local_gpu *gpu, const struct fmha_problem *problem,
		  const struct tensors *tensors, char *kernel, struct fmha_error *err);

/*
 * The problem once in the worker, in memory that this process allocates and hands over (fmha_memory_from_gpu()): what lies
 * in @tensors goes there, what comes of it comes back. @how: FMHA_KERNEL_BYTES: by which kind of handle, appended.
 * Return: 0, FMHA_EIO (the runtime's sentence), or as fmha_buffer_import(), fmha_plan_new() and fmha_plan_run().
 */
int local_gpu_share(struct local_gpu *gpu, const struct fmha_problem *problem,
		    const struct tensors *tensors, char *how, struct fmha_error *err);

/* Runs of two connections, of which one waits for a word that the other writes, in memory of this process. */
struct local_gpu_fence {
	const struct fmha_problem *problem; /* of the one that waits, on the GPU's own connection */
	const struct tensors *tensors;      /* its contents, and O of @behind */
	struct fmha_plan *behind;           /* of the same connection and problem, in @tensors */
	struct fmha_device *writer;         /* the other connection, */
	struct fmha_plan *writes;           /* and any plan of its */
	int held_ms;                        /* how long it is seen to wait */
	uint32_t timeout_ms;
};

/*
 * What the run is to read is written while it is held up.
 * Return: as local_gpu_share(); FMHA_EIO with a sentence when it did not wait, or read too early.
 */
int local_gpu_fence(struct local_gpu *gpu, const struct local_gpu_fence *fence,
		    struct fmha_error *err);

#endif
