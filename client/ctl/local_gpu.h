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

#endif
