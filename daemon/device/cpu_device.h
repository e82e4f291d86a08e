/* SPDX-License-Identifier: MIT */
/* cpu_device.h: the CPU device, and what the fake device borrows from it. */
#ifndef FMHAD_DEVICE_CPU_H
#define FMHAD_DEVICE_CPU_H

#include <kernels/cpu_kernel.h>

#include "device_impl.h"
#include "pool.h"

struct cpu_device {
	struct device base;
	struct pool *pool;
	enum cpu_level level;
	void *scratch; /* of the loop thread, for device_run_here() */
	size_t scratch_bytes;
	pthread_mutex_t workspaces_lock; /* workspaces go back on any thread */
	struct list free_workspaces;     /* struct cpu_workspace, of powers of two bytes */
	uint64_t free_bytes;

	/* fake.c's: what a coming launch is in for. */
	uint32_t fault, fault_after;
	bool allow_faults;
};

struct cpu_launch {
	struct device_launch base;
	struct cpu_device *device;
	struct pool_job job;
};

int cpu_device_open(const struct config_device *config, struct device **ret_device,
		    struct fmha_error *err);

/* Turns the stages into the job's steps. Return: false: it cannot, and the launch's error says why.
 */
bool cpu_launch_prepare(struct cpu_launch *launch);

#endif
