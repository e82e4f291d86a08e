/* SPDX-License-Identifier: MIT */
/*
 * kernels.h: which kernels a GPU runs, and their code.
 *
 * A kernel is chosen when a plan is made (no compiler involved), built by the front on the first
 * plan that needs it, loaded once, and then shared by every plan of the worker.
 */
#ifndef FMHAD_DEVICE_GPU_KERNELS_H
#define FMHAD_DEVICE_GPU_KERNELS_H

#include <kernels/gpu_catalogue.h>

#include "gpu.h"

enum gpu_kernel_state { GPU_KERNEL_BUILDING, GPU_KERNEL_READY, GPU_KERNEL_BROKEN };

struct gpu_build; /* a request for this kernel's code, on one user's behalf */

struct device_kernel {
	struct device_kernel *next;
	struct gpu_kernel choice;
	enum gpu_kernel_state state;
	uint32_t spills; /* as its code says, once it has been seen */
	hipModule_t module;
	void *image; /* of the module, where it needs that to stay */
	hipFunction_t function;
	struct gpu_build *builds;
	struct device_waiter *waiters;
};

int gpu_find_kernel(struct device *device, enum abi_family family, uint32_t dtype,
		    const union abi_args *args, struct plan_stage *stage, const char **ret_why);
int gpu_prepare(struct device *device, const struct plan_stage *stage, const union abi_args *args,
		struct device_waiter *waiter, const struct device_kernel **ret_kernel,
		struct fmha_error *err);
int gpu_prepare_tables(struct device *device, struct device_waiter *waiter,
		       const struct device_kernel **ret_kernel, struct fmha_error *err);
void gpu_place_tables(const struct device *device, struct launch_record *record);
const char *gpu_kernel_name(const struct device_kernel *kernel);
void gpu_forget(struct device *device, struct device_waiter *waiter);
void gpu_kernels_free(struct gpu_device *gpu);

#endif
