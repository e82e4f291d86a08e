/* SPDX-License-Identifier: MIT */
/*
 * gpu.h: the inside of the GPU backend. hip.c opens the device and is the face; memory.c holds what
 * clients share; executor.c launches; kernels.c chooses kernels and loads their code.
 *
 * Threads: the worker's loop calls everything; one executor thread watches launches end; another gives
 * memory back (memory.h); what else may block for long, as opening a foreign handle does for seconds, is
 * called on threads of the worker's. All have the device's context current.
 */
#ifndef FMHAD_DEVICE_GPU_H
#define FMHAD_DEVICE_GPU_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <base/list.h>
#include <device_impl.h>

#include "hip_api.h"

#define GPU_KERNEL_LISTS 1024 /* thousands may be loaded, and each plan asks for many */

struct gpu_gate; /* gate.c */
struct gpu_launch;
struct gpu_memory; /* memory.h */
struct gpu_shared; /* shared.h */
struct gpu_words;  /* gate.c */

/* memory.h */
struct gpu_reclaim {
	pthread_t thread;
	bool started, stopping;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct gpu_memory *first;
	uint32_t n_pending; /* with the one that is just being given back */
	uint64_t n_done;
};

struct gpu_device {
	struct device device;
	int index;
	size_t vmm_granularity; /* 0: no exportable memory */

	/* executor.c */
	hipStream_t rescue; /* for words that release a stuck fence */
	hipStream_t scrub;  /* clears new memory: nobody else has to wait for that */
	struct device_stream *free_streams;
	uint32_t n_free_streams;
	pthread_t thread;
	bool thread_started;
	pthread_mutex_t lock;
	pthread_cond_t work;
	bool stopping;
	struct gpu_launch *submitted, **submitted_tail; /* not yet seen by the executor */
	_Atomic uint32_t n_busy;                        /* launches submitted or in flight */

	/* shared.c, memory.c: handles are opened and closed on any thread */
	pthread_mutex_t shared_lock;
	pthread_cond_t shared_changed;
	struct gpu_shared *shared;
	struct gpu_memory *spare; /* a small allocation that nobody has; under shared_lock */

	struct gpu_reclaim reclaim;

	/* memory.c; loop thread only */
	struct gpu_memory *free_workspaces, *free_staging;
	uint64_t free_bytes, free_staging_bytes;

	/* gate.c */
	struct gpu_gate *abandoned;
	struct gpu_words *words;

	/* kernels.c; loop thread only */
	struct list kernels[GPU_KERNEL_LISTS]; /* by identity */
	struct list idle; /* those that nobody has, the ones that were had last at the end */
	uint32_t n_idle;
	uint64_t idle_bytes, most_idle, most_idle_bytes;
};

static inline struct gpu_device *gpu_device_of(struct device *device)
{
	return (struct gpu_device *)device;
}

/* Fills @err from a HIP status and returns the FMHA_E* that it means. */
int gpu_error(hipError_t status, const char *what, struct fmha_error *err);

/* Whether the context is beyond use after @status: the worker has to go. */
bool gpu_error_is_fatal(hipError_t status);

/* gpu_error(), which also ends the worker when it is fatal: of calls that tell what befell earlier
 * ones, as everything on a context does once a kernel has faulted. */
int gpu_failure(struct gpu_device *gpu, hipError_t status, const char *what,
		struct fmha_error *err);

void gpu_enter_thread(struct device *device);
uint64_t gpu_memory_cost(const struct device *device, const struct device_memory_source *source,
			 bool created);
uint64_t gpu_workspace_cost(const struct device *device, uint64_t bytes);
int gpu_memory_create(struct device *device, uint64_t size, struct device_memory *ret_memory,
		      int *ret_fd, struct fmha_error *err);
bool gpu_memory_take(struct device *device, uint64_t size, struct device_memory *ret_memory,
		     int *ret_fd);
void gpu_memory_refill(struct device *device);
int gpu_memory_import(struct device *device, const struct device_memory_source *source,
		      struct device_memory *ret_memory, struct fmha_error *err);
void gpu_memory_free(struct device *device, struct device_memory *memory);
int gpu_workspace_new(struct device *device, uint64_t bytes, struct device_memory *ret_memory,
		      struct fmha_error *err);
void gpu_workspace_free(struct device *device, struct device_memory *memory);
/* kernels.c */
void gpu_unload_idle(struct device *device);

/* Gives kept workspaces back to the driver. */
void gpu_workspaces_trim(struct gpu_device *gpu);
void gpu_spare_free(struct gpu_device *gpu);
uint64_t gpu_staging_cost(const struct device *device, uint64_t bytes);
int gpu_staging_new(struct device *device, uint64_t bytes, struct device_memory *ret_memory,
		    struct fmha_error *err);
void gpu_staging_free(struct device *device, struct device_memory *memory);
/* Gives kept staging memory back. */
void gpu_staging_trim(struct gpu_device *gpu);

int gpu_event_import(struct device *device, const uint8_t *handle, uint32_t handle_bytes,
		     struct device_event **ret_event, struct fmha_error *err);
void gpu_event_free(struct device *device, struct device_event *event);

int gpu_executor_start(struct gpu_device *gpu, struct fmha_error *err);
void gpu_executor_stop(struct gpu_device *gpu);
struct device_stream *gpu_stream_new(struct device *device, uint32_t uid, uint32_t weight);
void gpu_stream_free(struct device *device, struct device_stream *stream);
struct device_launch *gpu_launch_new(struct device *device);
void gpu_launch_free(struct device *device, struct device_launch *launch);
void gpu_submit(struct device *device, struct device_launch *launch);
bool gpu_run_here(struct device *device, struct device_launch *launch);
void gpu_cancel(struct device *device, struct device_launch *launch);
bool gpu_release_fences(struct device *device, struct device_launch *launch);
uint64_t gpu_stalled_ns(struct device *device, struct device_launch *launch,
			const char **ret_kernel);

#endif
