/* SPDX-License-Identifier: MIT */
/*
 * kernels.h: which kernels a GPU runs, and their code.
 *
 * A kernel is chosen when a plan is made (no compiler involved), built by the front on the first
 * plan that needs it, loaded once, and then shared by every plan of the worker. It stays as long as
 * somebody waits for it or has it; then it is idle, and goes when there are too many of those.
 */
#ifndef FMHAD_DEVICE_GPU_KERNELS_H
#define FMHAD_DEVICE_GPU_KERNELS_H

#include <compile/build_identity.h>
#include <kernels/gpu_catalogue.h>

#include "gpu.h"

enum gpu_kernel_state { GPU_KERNEL_BUILDING, GPU_KERNEL_READY, GPU_KERNEL_BROKEN };

struct gpu_build; /* a request for this kernel's code, on one user's behalf */

/* A user who has a kernel. */
struct gpu_hold {
	struct gpu_hold *next;
	uint32_t uid, n;
};

struct device_kernel {
	struct list in_kernels, in_idle;
	struct gpu_kernel choice;
	struct build_identity identity;
	enum gpu_kernel_state state;
	uint32_t spills; /* as its code says, once it has been seen */
	hipModule_t module;
	void *image; /* of the module, where it needs that to stay */
	hipFunction_t function;
	uint64_t bytes; /* of its code; 0: not seen yet */
	struct gpu_build *builds;
	struct device_waiter *waiters;
	uint32_t n_served; /* waiters that were told, and others for whom it must not go */
	struct gpu_hold *holds;
	uint32_t owner; /* the user for whom it was loaded, whoever else has it */
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
int gpu_hold(struct device *device, struct device_kernel *kernel, uint32_t uid, bool *ret_first,
	     struct fmha_error *err);
bool gpu_drop(struct device *device, struct device_kernel *kernel, uint32_t uid);
uint64_t gpu_kernel_bytes(const struct device_kernel *kernel);
uint32_t gpu_kernel_spills(const struct device_kernel *kernel);
void gpu_set_idle(struct device *device, uint64_t most, uint64_t most_bytes);
uint32_t gpu_count_idle(const struct device *device);
void gpu_kernels_init(struct gpu_device *gpu);
void gpu_kernels_free(struct gpu_device *gpu);

#endif
