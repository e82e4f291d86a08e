/* SPDX-License-Identifier: MIT */
/*
 * gpu.h: the inside of the GPU backend. hip.c opens the device and is the face; memory.c holds what
 * clients share; executor.c launches; kernels.c chooses kernels and loads their code.
 *
 * Threads: the worker's loop calls everything; one executor thread watches launches end; another gives
 * memory back; what else may block for long, as opening a foreign handle does for seconds, is
 * called on threads of the worker's. All have the device's context current.
 */
#ifndef FMHAD_DEVICE_GPU_H
#define FMHAD_DEVICE_GPU_H

#include <device_impl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <base/list.h>
#include <compile/build_identity.h>
#include <catalogue/gpu_catalogue.h>
#include <kernels/gpu_kernel.h>

#include "hip_api.h"

#define GPU_KERNEL_LISTS 1024 /* thousands may be loaded, and each plan asks for many */
#define GPU_ORDERS       16   /* a plan's stages, and what was weighed up against them */

struct gpu_gate; /* gate.c */
struct gpu_launch;
struct gpu_memory;
struct gpu_shared;
struct gpu_words; /* gate.c */

/* Below: memory. */
struct gpu_reclaim {
	pthread_t thread;
	bool started, stopping;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct gpu_memory *first;
	uint32_t n_pending; /* with the one that is just being given back */
	uint64_t n_done;
};

/* Of one compile, and what it comes to. */
struct gpu_order {
	struct build_identity identity;
	struct gpu_kernel kernel;
};

struct gpu_device {
	struct device device;
	int index;
	size_t vmm_granularity; /* 0: no exportable memory */

	/* executor.c */
	hipStream_t rescue;        /* for words that release a stuck fence */
	hipStream_t scrub;         /* clears new memory: nobody else has to wait for that */
	hipFunction_t word_kernel; /* waits for words and writes them; NULL: the runtime does */
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
	struct list
		codes[GPU_KERNEL_LISTS]; /* of those that are loaded, by the hash of their code */
	struct device_code_status status;
	struct gpu_order orders[GPU_ORDERS]; /* the last that plans were told of */
	uint32_t n_orders;                   /* so far */
	struct list idle; /* those that nobody has, the ones that were had last at the end */
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
int gpu_memory_clear(struct device *device, struct device_memory *memory, uint64_t offset,
		     uint64_t bytes, struct fmha_error *err);
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

/* ---- kernels ---- */

/*
 * Which kernels a GPU runs, and their code.
 *
 * A kernel is chosen when a plan is made (no compiler involved), built by the front on the first
 * plan that needs it, loaded once, and then shared by every plan of the worker. It stays as long as
 * somebody waits for it or has it; then it is idle, and goes when there are too many of those.
 */

enum gpu_kernel_state { GPU_KERNEL_BUILDING, GPU_KERNEL_READY, GPU_KERNEL_BROKEN };

struct gpu_build; /* a request for this kernel's code, on one user's behalf */

/* A user who has a kernel. */
struct gpu_hold {
	struct gpu_hold *next;
	uint32_t uid, n;
};

struct device_kernel {
	struct list in_kernels, in_codes, in_idle;
	struct gpu_kernel choice;
	struct build_identity identity;
	enum gpu_kernel_state state;
	hipModule_t module;
	void *image; /* of the module, where it needs that to stay */
	hipFunction_t function;
	struct device_code code; /* spills: as it says, once it has been seen */
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
int gpu_prepare_words(struct device *device, struct device_waiter *waiter,
		      const struct device_kernel **ret_kernel, struct fmha_error *err);
int gpu_try_words(struct device *device, const struct device_kernel *kernel,
		  struct fmha_error *err);
int gpu_prepare_tables(struct device *device, struct device_waiter *waiter,
		       const struct device_kernel **ret_kernel, struct fmha_error *err);
void gpu_place_tables(const struct device *device, struct launch_record *record);
const char *gpu_kernel_name(const struct device_kernel *kernel);
void gpu_forget(struct device *device, struct device_waiter *waiter);
int gpu_hold(struct device *device, struct device_kernel *kernel, uint32_t uid, bool *ret_first,
	     struct fmha_error *err);
bool gpu_drop(struct device *device, struct device_kernel *kernel, uint32_t uid);
const struct device_code *gpu_kernel_code(const struct device_kernel *kernel);
const struct device_code *gpu_find_code(const struct device *device, const uint8_t *hash);
void gpu_set_idle(struct device *device, uint64_t most, uint64_t most_bytes);
struct device_code_status gpu_code_status(const struct device *device);
void gpu_kernels_init(struct gpu_device *gpu);
void gpu_kernels_free(struct gpu_device *gpu);

/* ---- memory ---- */

/*
 * A piece of memory of this backend, and its end. A module is one, too.
 *
 * To give memory back a driver waits until every stream is through, also those that wait for a client's word. So
 * nobody who has something else to do gives it back: it goes to a thread of its own.
 */

enum gpu_memory_kind {
	MEMORY_PLAIN,
	MEMORY_VMM,
	MEMORY_IPC,
	MEMORY_COPY,
	MEMORY_STAGING,
	MEMORY_CODE
};

/* A device_memory's map. */
struct gpu_memory {
	struct gpu_memory *next; /* among kept workspaces, staging, what is to be given back */
	enum gpu_memory_kind kind;
	void *base;
	size_t bytes;
	void *external; /* MEMORY_VMM: of its struct gpu_mapping */
	struct gpu_shared *shared;
	struct device_memory host; /* MEMORY_COPY: the client's memfd */
	int fd;                    /* of the spare one, which has not been given away */
	hipModule_t module;        /* MEMORY_CODE; base: its image, or NULL */
};

/* How long the loop's thread waits for memory that is being given back. */
#define GPU_LOOP_PATIENCE_MS 200

static inline struct gpu_mapping gpu_mapping_of(const struct gpu_memory *memory)
{
	return (struct gpu_mapping){memory->base, memory->bytes, memory->external};
}
/* Gives it back here and now. */
void gpu_memory_destroy(struct gpu_device *gpu, struct gpu_memory *memory);

int gpu_reclaim_start(struct gpu_device *gpu, struct fmha_error *err);
/* Gives back what is left. */
void gpu_reclaim_stop(struct gpu_device *gpu);
/* Any thread: takes the memory over. */
void gpu_reclaim(struct gpu_device *gpu, struct gpu_memory *memory);
/* Any thread. How many pieces have been given back so far. */
uint64_t gpu_reclaimed(struct gpu_device *gpu);
/* Any thread. Return: whether within @ms all that is to be given back has been, and it was more than @since. */
bool gpu_reclaim_wait(struct gpu_device *gpu, uint64_t since, uint32_t ms);

/* ---- gate ---- */

/*
 * Waiting for other processes' events, in a way that can be given up.
 *
 * Nobody can let a stream go that waits for an event: recording the event again changes nothing for
 * it. So a launch's own stream never does. Another stream, its gate, waits and then writes a word
 * that the launch's stream waits for; whoever gives up waiting writes that word from elsewhere. The
 * gate is abandoned then, until the driver is through with it, and the next launch gets a new one.
 *
 * Loop thread only.
 */

/* A launch's word and the value that says "go on". All zero is one that has none yet. */
struct gpu_pass {
	uint32_t *word; /* in device memory */
	uint32_t value;
};

/* Makes @stream wait for @events. @gate: the stream's, NULL: it has none yet. */
hipError_t gpu_gate_wait(struct gpu_device *gpu, hipStream_t *gate, hipStream_t stream,
			 struct device_event *const *events, uint32_t n, struct gpu_pass *pass);

/* Lets the launch go that waits behind the gate, which is abandoned with the word. */
void gpu_gate_give_up(struct gpu_device *gpu, hipStream_t *gate, struct gpu_pass *pass);

/* The stream is not used any more. */
void gpu_gate_free(struct gpu_device *gpu, hipStream_t gate);

/* All of it, at the end. */
void gpu_gates_deinit(struct gpu_device *gpu);

/* ---- shared ---- */

/*
 * Allocations and events of other processes, opened by their IPC handles.
 *
 * A process can open a handle only once, so what is open is shared by whoever imports it and
 * counted. Any thread. The driver is never called with the lock held: who wants a handle that
 * another thread is just opening or closing waits for that thread, everybody else does not.
 */

#define GPU_HANDLE_BYTES 64

enum gpu_shared_kind { SHARED_MEMORY, SHARED_EVENT };

struct gpu_shared {
	struct gpu_shared *next;
	enum gpu_shared_kind kind;
	enum { SHARED_OPENING, SHARED_OPEN, SHARED_CLOSING } state;
	uint32_t n_users;
	uint8_t handle[GPU_HANDLE_BYTES];
	void *base; /* SHARED_MEMORY */
	size_t bytes;
	hipEvent_t event; /* SHARED_EVENT */
};

/* Takes one reference to what @handle (@handle_bytes) names. Return: 0, FMHA_EINVAL naming the
 * handle, FMHA_ETIMEDOUT: another thread has been opening it for too long, FMHA_ENOMEM. */
int gpu_shared_get(struct gpu_device *gpu, enum gpu_shared_kind kind, const uint8_t *handle,
		   uint32_t handle_bytes, struct gpu_shared **ret_shared, struct fmha_error *err);
void gpu_shared_put(struct gpu_device *gpu, struct gpu_shared *shared);
/* The same in two steps. Return: whether it was the last; then nobody gets it any more, and it has to be closed. */
bool gpu_shared_leave(struct gpu_device *gpu, struct gpu_shared *shared);
void gpu_shared_close(struct gpu_device *gpu, struct gpu_shared *shared);

/* A device_event of this backend is a struct gpu_shared. */
hipEvent_t gpu_event_of(const struct device_event *event);

#endif
