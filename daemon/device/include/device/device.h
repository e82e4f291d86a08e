/* SPDX-License-Identifier: MIT */
/*
 * device.h: one device as its worker sees it: memory, kernels, launches.
 *
 * Backends implement struct device_ops. Calls are made from the worker's loop
 * thread, except where a line says "any thread": those may keep a driver busy for long. A launch
 * ends on a thread of the device's own, which queues it and wakes the owner; device_collect(), on the loop thread, then hands it back. So nothing here knows
 * about the event loop.
 *
 * Launches of one stream run in order. Streams belong to users: a device that is shared by launches
 * takes turns by user, then by stream (base/fair.h).
 */
#ifndef FMHAD_DEVICE_H
#define FMHAD_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <dispatch/plan.h>
#include <fmha/base.h>
#include <proto/messages.h>

#include <base/config.h>

#define DEVICE_PREPARING  1                   /* device_prepare(): the callback will come */
#define DEVICE_NO_WORDS   2                   /* device_prepare_words() */
#define DEVICE_MOST_BYTES (UINT64_C(1) << 60) /* more than any limit allows */
#define DEVICE_UPLOADS    (FMHA_N_TENSORS + 2)
#define DEVICE_DOWNLOADS  FMHA_N_TENSORS

struct device;
struct device_event; /* another process's */
struct device_kernel;
struct device_stream;

/* CUDA's Multi-Process Service: without it processes take turns on the GPU. Settled when the device
 * is opened. */
enum device_mps { DEVICE_MPS_NOT_APPLICABLE, DEVICE_MPS_ABSENT, DEVICE_MPS_IN_USE };

/* The most that the device could do if nothing held it up; 0: not known. */
struct device_peak {
	double f32, f16, fp8; /* operations a second by the data's type; f16: bf16, too */
	double bytes;         /* of its memory, a second */
};

struct device_info {
	char name[PROTO_NAME_BYTES];
	char arch[PROTO_NAME_BYTES];
	char backend[PROTO_NAME_BYTES];
	/* Measured times hold for these: the model with its compute units, its driver, and of built-in
	 * kernels the compiler and a digest of their sources. */
	char model[PROTO_NAME_BYTES], driver[PROTO_NAME_BYTES];
	char compiler[96], sources[80];
	char pci[16]; /* "0000:1b:00.0"; empty: it is not on that bus, or does not say */
	uint32_t compute_units;
	uint64_t memory_bytes;
	uint64_t lds_bytes; /* per workgroup; 0 on a CPU */
	struct device_peak peak;
	enum device_mps mps;
	char mps_directory[256]; /* where its control daemon was looked for */
	char no_fences
		[96]; /* why runs cannot be ordered by counters; empty: they can, or never could */
	/* GPUs say how memory gets to other processes and from them, and why not. */
	bool descriptors, handles;
	char no_descriptors[96], no_handles[96];
};

/* An extent of memory that clients may share. */
struct device_memory {
	void *host;     /* NULL: the CPU cannot reach it */
	void *device;   /* what kernels get; a copy when neither NULL nor equal to host */
	uint64_t bytes; /* of the extent */
	void *map;      /* backend: what to unmap */
	uint64_t map_bytes;
	struct memfd_pages
		*pages; /* made by device_memory_create(): they end with their last user */
	uint32_t kind;  /* enum proto_memory_kind of the descriptor that goes out */
	uint64_t allocation_bytes; /* PROTO_VMM_FD: behind the descriptor */
};

/* What was made of a build. */
struct device_code {
	const void *data; /* NULL of a kernel's: it is loaded */
	uint64_t bytes;   /* 0 of a kernel's: not seen yet */
	uint32_t spills;  /* bytes of its registers that a lane keeps in memory */
	int fd;           /* a sealed file of it, for those who launch themselves; -1: none */
	uint8_t hash[LAUNCH_HASH_BYTES];
};

/* The kernels that are loaded. */
struct device_code_status {
	uint64_t n, bytes, n_idle; /* n_idle: that nobody has */
	uint64_t n_unloaded;       /* so far */
};

/*
 * A kernel's code that is asked for on a user's behalf. The memory is the backend's, which keeps it
 * until done() or the request is taken back.
 */
struct device_build {
	uint32_t uid, pid; /* pid: of who was the first to ask; 0: nobody */
	bool background;   /* nobody waits for it who could wait elsewhere */
	const struct kernel_build *build;
	void *worker;      /* the builder's */
	uint64_t asked_ns; /* likewise */
	/* Loop thread. @code: borrowed; NULL: @error says why there is none. */
	void (*done)(struct device_build *build, const struct device_code *code,
		     const struct fmha_error *error);
};

/* What the owner of a device is called for; NULL: it does not want to be. */
struct device_calls {
	/* Any thread: device_collect() has something to do. Never NULL. */
	void (*wake)(void *owner);
	/* Any thread: between which times the next launch will end; to look for it then is faster than to be woken. */
	void (*soon)(void *owner, uint64_t from_ns, uint64_t until_ns);
	/* Gets code for a kernel. done() is called later, never from inside. Return: 0, or a negative FMHA_E* and no
	 * call. */
	int (*build)(void *owner, struct device_build *build, struct fmha_error *err);
	/* Nobody waits for it any more: its call does not come. */
	void (*cancel_build)(void *owner, struct device_build *build);
	/* Whether the code is in quarantine: before a kernel is offered to a plan. */
	bool (*is_quarantined)(void *owner, const char *kernel, uint64_t code);
};

/* Somebody who asked for a kernel, which stays until device_forget(). The memory is the asker's, 0 at first. */
struct device_waiter {
	uint32_t uid; /* on whose behalf: compiling takes turns by user */
	uint32_t pid; /* 0: nobody's */
	bool background;
	/* Loop thread. @error: borrowed; code FMHA_OK: ready. */
	void (*done)(void *owner, const struct fmha_error *error);
	void *owner;
	/* The device's. */
	struct device_waiter *next;
	struct device_kernel *kernel; /* NULL: it has none */
	bool waits;                   /* its call is still to come */
};

/* A copy between the host and a device that cannot read its memory. */
struct device_copy {
	void *host; /* kept until the launch is done */
	void *device;
	uint64_t bytes;
};

/* The names that a client gave its memory. */
struct device_memory_source {
	uint32_t kind; /* enum proto_memory_kind */
	int fd;        /* borrowed; -1: none */
	const uint8_t *handle;
	uint32_t handle_bytes;
	uint64_t base_offset;
	uint64_t size;
	uint32_t uid, pid; /* the client's */
};

#define DEVICE_FENCES PROTO_MAX_FENCES

/* A counter in device memory. */
struct device_fence {
	void *device; /* 4-byte aligned */
	uint32_t value;
};

/*
 * One run. Made by device_launch_new() and reusable; the caller fills in the first part and may not
 * touch it from device_submit() until on_done.
 */
struct device_launch {
	struct device_stream *stream;
	uint32_t n_stages;
	const struct device_kernel *kernels[PLAN_MAX_STAGES];
	const struct launch_record *records[PLAN_MAX_STAGES]; /* kept until it is done */
	const char *names[PLAN_MAX_STAGES]; /* of the kernels; kept until it is done */
	union abi_args args[PLAN_MAX_STAGES];
	void *workspaces[PLAN_MAX_STAGES]; /* each stage's own share */
	bool times_stages;    /* somebody wants stage_started_ns, where the device can tell */
	uint64_t expected_ns; /* how long it runs, as far as earlier runs tell; 0: not known */
	void (*on_done)(struct device_launch *launch);
	void *owner; /* for on_done */
	/* Copies before the first stage and after the last one: only on devices that do not share
	 * the host's memory. */
	uint32_t n_uploads, n_downloads;
	struct device_copy uploads[DEVICE_UPLOADS], downloads[DEVICE_DOWNLOADS];
	void *zero; /* device memory to clear before the first stage */
	uint64_t zero_bytes;
	/* Waited for before everything else, written after it; only where device_has_fences(). */
	uint32_t n_waits, n_signals;
	struct device_fence waits[DEVICE_FENCES], signals[DEVICE_FENCES];
	/* The same with events, as last recorded when the launch is submitted; only where
	 * device_has_events(). */
	uint32_t n_event_waits, n_event_signals;
	struct device_event *event_waits[DEVICE_FENCES], *event_signals[DEVICE_FENCES];

	/* Filled in when it is done. */
	struct fmha_error error; /* code FMHA_OK: success */
	uint64_t started_ns, ended_ns;
	uint64_t stage_started_ns[PLAN_MAX_STAGES]; /* 0: not known; set to 0 by who wants them */
	uint64_t bus_address; /* not 0: memory that vanished under the kernel, replaced by zeros */
	struct device_launch *next_done; /* the device's */
};

/* ---- what a backend implements ---- */

/* Of a device that loads the code of its kernels, and may unload it. */
struct device_code_ops {
	int (*prepare_tables)(struct device *device, struct device_waiter *waiter,
			      const struct device_kernel **ret_kernel, struct fmha_error *err);
	void (*place_tables)(const struct device *device, struct launch_record *record);
	const char *(*kernel_name)(const struct device_kernel *kernel);
	void (*forget)(struct device *device, struct device_waiter *waiter);
	int (*hold)(struct device *device, struct device_kernel *kernel, uint32_t uid,
		    bool *ret_first, struct fmha_error *err);
	bool (*drop)(struct device *device, struct device_kernel *kernel, uint32_t uid);
	const struct device_code *(*kernel_code)(const struct device_kernel *kernel);
	const struct device_code *(*find_code)(const struct device *device, const uint8_t *hash);
	void (*set_idle)(struct device *device, uint64_t most, uint64_t most_bytes);
	struct device_code_status (*status)(const struct device *device);
};

/* Of a device with memory of its own: what the host has goes there by copies. */
struct device_staging_ops {
	uint64_t (*cost)(const struct device *device, uint64_t bytes);
	int (*create)(struct device *device, uint64_t bytes, struct device_memory *ret_memory,
		      struct fmha_error *err);
	void (*free)(struct device *device, struct device_memory *memory);
	bool (*make_room)(struct device *device, uint64_t bytes);
};

struct device_ops {
	const char *backend;
	const struct device_code_ops *code;       /* NULL: its kernels are built in */
	const struct device_staging_ops *staging; /* NULL: it computes in the host's memory */
	/* Sets ops and info; device_open() fills in the rest of struct device. */
	int (*open)(const struct config_device *config, struct device **ret_device,
		    struct fmha_error *err);
	int (*trial)(uint32_t device,
		     const char *role); /* see device_trial(); NULL: it starts no processes */
	/* NULL: only opening shows what is wrong. */
	int (*check)(const struct config_device *config, struct fmha_error *err);
	void (*close)(struct device *device);
	void (*enter_thread)(struct device *device); /* NULL: nothing to do */
	/* Both may count on sizes far below 2^63. */
	uint64_t (*memory_cost)(const struct device *device,
				const struct device_memory_source *source, bool created);
	uint64_t (*workspace_cost)(const struct device *device, uint64_t bytes);
	int (*memory_create)(struct device *device, uint64_t size, struct device_memory *ret_memory,
			     int *ret_fd, struct fmha_error *err);
	/* NULL: it keeps no spare memory. */
	bool (*memory_take)(struct device *device, uint64_t size, struct device_memory *ret_memory,
			    int *ret_fd);
	void (*memory_refill)(struct device *device);
	int (*memory_import)(struct device *device, const struct device_memory_source *source,
			     struct device_memory *ret_memory, struct fmha_error *err);
	void (*memory_free)(struct device *device, struct device_memory *memory);
	/* NULL: none of it outlives the process. */
	int (*memory_clear)(struct device *device, struct device_memory *memory, uint64_t offset,
			    uint64_t bytes, struct fmha_error *err);
	int (*workspace_new)(struct device *device, uint64_t bytes,
			     struct device_memory *ret_memory, struct fmha_error *err);
	void (*workspace_free)(struct device *device, struct device_memory *memory);
	int (*find_kernel)(struct device *device, enum abi_family family, uint32_t dtype,
			   const union abi_args *args, struct plan_stage *stage,
			   const char **ret_why);
	int (*prepare)(struct device *device, const struct plan_stage *stage,
		       const union abi_args *args, struct device_waiter *waiter,
		       const struct device_kernel **ret_kernel, struct fmha_error *err);
	/* Both NULL: its fences need no code. */
	int (*prepare_words)(struct device *device, struct device_waiter *waiter,
			     const struct device_kernel **ret_kernel, struct fmha_error *err);
	int (*try_words)(struct device *device, const struct device_kernel *kernel,
			 struct fmha_error *err);
	/* NULL: it cannot use other processes' events. */
	int (*event_import)(struct device *device, const uint8_t *handle, uint32_t handle_bytes,
			    struct device_event **ret_event, struct fmha_error *err);
	void (*event_free)(struct device *device, struct device_event *event);
	/* NULL: no fences. */
	bool (*release_fences)(struct device *device, struct device_launch *launch);
	struct device_stream *(*stream_new)(struct device *device, uint32_t uid, uint32_t weight);
	void (*stream_free)(struct device *device, struct device_stream *stream);
	struct device_launch *(*launch_new)(struct device *device);
	void (*launch_free)(struct device *device, struct device_launch *launch);
	void (*submit)(struct device *device, struct device_launch *launch);
	bool (*run_here)(struct device *device, struct device_launch *launch);
	void (*cancel)(struct device *device, struct device_launch *launch);
	uint64_t (*stalled_ns)(struct device *device, struct device_launch *launch,
			       const char **ret_kernel);
	void (*trim)(struct device *device);
	/* On any thread, what takes long; NULL: nothing does. */
	void (*trim_memory)(struct device *device);
	/* NULL: the backend has no faults. */
	int (*inject)(struct device *device, const char *fault, uint32_t after,
		      struct fmha_error *err);
};

/* The head of every backend's own device struct: for the functions below and those of device_impl.h. */
struct device {
	const struct device_ops *ops;
	struct device_info info;
	const struct device_calls *calls;
	void *owner;
	pthread_mutex_t mutex; /* done, error */
	struct device_launch *done, **done_tail;
	struct fmha_error error;
	atomic_bool failed;
};

/* ---- what its worker calls ---- */

/* Checks a device's configuration without opening it. Return: 0, FMHA_EINVAL,
 * FMHA_ENOTSUP. */
int device_check(const struct config_device *config, struct fmha_error *err);

/*
 * Opens the device that @config describes.
 * @calls: kept; each gets @owner
 */
int device_open(const struct config_device *config, const struct device_calls *calls, void *owner,
		struct device **ret_device, struct fmha_error *err);
/* Runs the process that a backend has started as "fmhad --trial BACKEND DEVICE ROLE", to try what may end a process.
 * Return: its exit status. */
int device_trial(const char *backend, const char *device, const char *role);
/* Waits for what runs. Takes NULL. */
static inline struct device *device_close(struct device *device)
{
	if (device)
		device->ops->close(device);
	return NULL;
}

static inline const struct device_info *device_get_info(const struct device *device)
{
	return &device->info;
}

/* Whether its kernels are compiled. */
static inline bool device_loads_code(const struct device *device)
{
	return device->ops->code;
}

/* How many of those that nobody has stay loaded, and with how much code; 16 of any size before the first call. */
static inline void device_set_idle(struct device *device, uint64_t most, uint64_t most_bytes)
{
	if (device_loads_code(device))
		device->ops->code->set_idle(device, most, most_bytes);
}

/*
 * Makes the kernel of a plan's stage ready to run: compiled and loaded.
 * @args:   as plan_placeholder_args() fills them
 * @waiter: kept until device_forget(), unless this or its done() tells an error
 * @ret_kernel: what launches run, once it is ready; valid until device_forget(), and while a user has it
 * Return: 0 (ready), DEVICE_PREPARING (done() comes later), or a negative FMHA_E*.
 */
static inline int device_prepare(struct device *device, const struct plan_stage *stage,
				 const union abi_args *args, struct device_waiter *waiter,
				 const struct device_kernel **ret_kernel, struct fmha_error *err)
{
	return device->ops->prepare(device, stage, args, waiter, ret_kernel, err);
}

/*
 * The same for the kernel that makes a run's tables on the device (plan_local()), where there is one.
 * Return: as device_prepare(), or FMHA_ENOTSUP: clients cannot launch on this device.
 */
int device_prepare_tables(struct device *device, struct device_waiter *waiter,
			  const struct device_kernel **ret_kernel, struct fmha_error *err);
/*
 * The same for a kernel that waits for counters and writes them, on a device whose runtime has failed to (no_fences). Once it is
 * ready, device_try_words() says whether it does, and has it used from then on.
 * Return: as device_prepare(), or DEVICE_NO_WORDS: none is needed, or known.
 */
static inline int device_prepare_words(struct device *device, struct device_waiter *waiter,
				       const struct device_kernel **ret_kernel,
				       struct fmha_error *err)
{
	return device->ops->prepare_words
		       ? device->ops->prepare_words(device, waiter, ret_kernel, err)
		       : DEVICE_NO_WORDS;
}

/* Takes a moment, up to seconds where it does not. Return: 0, or why it does not. */
static inline int device_try_words(struct device *device, const struct device_kernel *kernel,
				   struct fmha_error *err)
{
	return device->ops->try_words(device, kernel, err);
}

/* Its grid, block and entry. */
static inline void device_place_tables(const struct device *device, struct launch_record *record)
{
	device->ops->code->place_tables(device, record);
}

/* The name under which its code was built; where device_prepare_tables() works. */
static inline const char *device_kernel_name(const struct device *device,
					     const struct device_kernel *kernel)
{
	return device->ops->code->kernel_name(kernel);
}

/* The waiter has no kernel any more, if it had one, and gets no call. */
static inline void device_forget(struct device *device, struct device_waiter *waiter)
{
	if (waiter->kernel)
		device->ops->code->forget(device, waiter);
}

/*
 * The user has the kernel once more, or once less: while anybody has it, it stays loaded. Of those that
 * nobody has some stay. Those go first that were had longest ago, of what was loaded for the user whose are most.
 * @ret_first: the user did not have it; false where kernels are built in, which nobody has to have.
 * Return: 0 or FMHA_ENOMEM.
 */
static inline int device_hold(struct device *device, const struct device_kernel *kernel,
			      uint32_t uid, bool *ret_first, struct fmha_error *err)
{
	*ret_first = false;
	if (!device_loads_code(device) || !kernel)
		return 0;
	return device->ops->code->hold(device, (struct device_kernel *)kernel, uid, ret_first, err);
}

/* Return: whether the user has it no more. */
static inline bool device_drop(struct device *device, const struct device_kernel *kernel,
			       uint32_t uid)
{
	return device_loads_code(device) && kernel &&
	       device->ops->code->drop(device, (struct device_kernel *)kernel, uid);
}

/* The code of a kernel that is ready: its spills are those of plan_stage from now on. NULL: it is built in. */
static inline const struct device_code *device_kernel_code(const struct device *device,
							   const struct device_kernel *kernel)
{
	return device_loads_code(device) && kernel ? device->ops->code->kernel_code(kernel) : NULL;
}

/* That of a kernel that is loaded; NULL: none is of that hash. */
static inline const struct device_code *device_find_code(const struct device *device,
							 const uint8_t hash[LAUNCH_HASH_BYTES])
{
	return device_loads_code(device) ? device->ops->code->find_code(device, hash) : NULL;
}

static inline struct device_code_status device_code_status(const struct device *device)
{
	return device_loads_code(device) ? device->ops->code->status(device)
					 : (struct device_code_status){0};
}

/* Whether kernels and the host read the same memory: nothing has to be fetched or uploaded. Such a
 * device also shares itself among its streams' users; any other runs what it gets. */
static inline bool device_shares_memory(const struct device *device)
{
	return !device->ops->staging;
}

/* Calls on_done of every launch that has ended. */
void device_collect(struct device *device);
/* Whether there is any. */
bool device_has_ended(struct device *device);
/* Once on each thread but the loop's, before any other call: binds it to the device. */
static inline void device_enter_thread(struct device *device)
{
	if (device->ops->enter_thread)
		device->ops->enter_thread(device);
}

/* Bytes of this machine's memory that a buffer takes, to be charged before it is made.
 * @created: device_memory_create(), @source has its size only; else device_memory_import() */
uint64_t device_memory_cost(const struct device *device, const struct device_memory_source *source,
			    bool created);
static inline uint64_t device_workspace_cost(const struct device *device, uint64_t bytes)
{
	return bytes > DEVICE_MOST_BYTES ? DEVICE_MOST_BYTES
					 : device->ops->workspace_cost(device, bytes);
}

static inline uint64_t device_staging_cost(const struct device *device, uint64_t bytes)
{
	return bytes > DEVICE_MOST_BYTES ? DEVICE_MOST_BYTES
					 : device->ops->staging->cost(device, bytes);
}

/* Memory that the daemon makes: zero, shared through @ret_fd (given). Any thread. */
static inline int device_memory_create(struct device *device, uint64_t size,
				       struct device_memory *ret_memory, int *ret_fd,
				       struct fmha_error *err)
{
	return device->ops->memory_create(device, size, ret_memory, ret_fd, err);
}

/*
 * The same without waiting, where the device has some to spare. Return: false: it has none.
 * device_memory_refill(), on any thread, replaces what was taken.
 */
static inline bool device_memory_take(struct device *device, uint64_t size,
				      struct device_memory *ret_memory, int *ret_fd)
{
	return device->ops->memory_take &&
	       device->ops->memory_take(device, size, ret_memory, ret_fd);
}

static inline void device_memory_refill(struct device *device)
{
	if (device->ops->memory_refill)
		device->ops->memory_refill(device);
}

/* Memory that the client made. Any thread. Return: 0, FMHA_EINVAL or FMHA_ENOTSUP naming the
 * field, FMHA_ENOMEM. */
static inline int device_memory_import(struct device *device,
				       const struct device_memory_source *source,
				       struct device_memory *ret_memory, struct fmha_error *err)
{
	return device->ops->memory_import(device, source, ret_memory, err);
}

/* Any thread. */
static inline void device_memory_free(struct device *device, struct device_memory *memory)
{
	device->ops->memory_free(device, memory);
}

/* Makes @bytes of it zeros, and waits for that. Return: 0, FMHA_ENOTSUP, or as any call of the driver's. */
int device_memory_clear(struct device *device, struct device_memory *memory, uint64_t offset,
			uint64_t bytes, struct fmha_error *err);

/* Private memory, 4096-byte aligned, for workspaces. Its content is undefined. */
static inline int device_workspace_new(struct device *device, uint64_t bytes,
				       struct device_memory *ret_memory, struct fmha_error *err)
{
	return device->ops->workspace_new(device, bytes, ret_memory, err);
}

static inline void device_workspace_free(struct device *device, struct device_memory *memory)
{
	device->ops->workspace_free(device, memory);
}

/* Host memory that copies of a launch go to and come from while no thread waits for them; for
 * devices that do not share the host's memory. Its content is undefined. */
static inline int device_staging_new(struct device *device, uint64_t bytes,
				     struct device_memory *ret_memory, struct fmha_error *err)
{
	return device->ops->staging->create(device, bytes, ret_memory, err);
}

static inline void device_staging_free(struct device *device, struct device_memory *memory)
{
	device->ops->staging->free(device, memory);
}

/* For struct plan_device; @owner is the device. */
static inline int device_find_kernel(void *owner, enum abi_family family, uint32_t dtype,
				     const union abi_args *args, struct plan_stage *stage,
				     const char **ret_why)
{
	struct device *device = owner;

	return device->ops->find_kernel(device, family, dtype, args, stage, ret_why);
}

/* @weight: the share of user @uid among users, at least 1. */
int device_stream_new(struct device *device, uint32_t uid, uint32_t weight,
		      struct device_stream **ret_stream, struct fmha_error *err);
/* No launch may be left in it. Takes NULL. */
static inline struct device_stream *device_stream_free(struct device *device,
						       struct device_stream *stream)
{
	if (stream)
		device->ops->stream_free(device, stream);
	return NULL;
}

static inline struct device_launch *device_launch_new(struct device *device)
{
	return device->ops->launch_new(device);
}

static inline struct device_launch *device_launch_free(struct device *device,
						       struct device_launch *launch)
{
	if (launch)
		device->ops->launch_free(device, launch);
	return NULL;
}

static inline void device_submit(struct device *device, struct device_launch *launch)
{
	device->ops->submit(device, launch);
}

/* Whether launches can wait for counters in device memory. */
static inline bool device_has_fences(const struct device *device)
{
	return device->ops->release_fences && !device->info.no_fences[0];
}

/* Whether launches can wait for and record events of other processes. */
static inline bool device_has_events(const struct device *device)
{
	return device->ops->event_import;
}

/* The event that another process's handle names; events with one handle are one event. Any thread.
 * Return: 0, FMHA_EINVAL or FMHA_ENOTSUP naming the field, FMHA_ENOMEM, FMHA_ETIMEDOUT. */
int device_event_import(struct device *device, const uint8_t *handle, uint32_t handle_bytes,
			struct device_event **ret_event, struct fmha_error *err);
/* No launch may use it any more. Any thread. */
static inline void device_event_free(struct device *device, struct device_event *event)
{
	device->ops->event_free(device, event);
}

/* Ends the launch's waiting, if it still waits. Returns whether it did. */
static inline bool device_release_fences(struct device *device, struct device_launch *launch)
{
	return device->ops->release_fences && device->ops->release_fences(device, launch);
}

/*
 * Runs the launch on the calling thread, when nothing else is under way, and returns true; on_done
 * is not called. For launches so small that waking another thread would take longer.
 */
static inline bool device_run_here(struct device *device, struct device_launch *launch)
{
	return device->ops->run_here(device, launch);
}

/* Asks for an early end; on_done comes as always, with FMHA_ECANCELED unless it was done already.
 */
static inline void device_cancel(struct device *device, struct device_launch *launch)
{
	device->ops->cancel(device, launch);
}

/*
 * Nanoseconds since the launch last got ahead, as far as earlier calls could see; 0 while it waits
 * for its turn. On a CPU those that its threads computed for. ret_kernel: the name of the kernel under way.
 */
static inline uint64_t device_stalled_ns(struct device *device, struct device_launch *launch,
					 const char **ret_kernel)
{
	return device->ops->stalled_ns(device, launch, ret_kernel);
}

/* True once the device is beyond use; @err says why. Every launch ends with that error from then
 * on. */
bool device_has_failed(struct device *device, struct fmha_error *err);

/* Gives back memory that only speeds up the next launch. */
static inline void device_trim(struct device *device)
{
	device->ops->trim(device);
}

/*
 * The device lacks memory for @bytes: what is only kept for later goes, kernels that nobody has and memory of launches.
 * Return: whether device_memory_create() or _import() is worth another call, which waits for what goes.
 */
static inline bool device_make_room(struct device *device, uint64_t bytes)
{
	return device->ops->staging && device->ops->staging->make_room(device, bytes);
}

/* The same of what takes long to give back. Any thread. */
static inline void device_trim_memory(struct device *device)
{
	if (device->ops->trim_memory)
		device->ops->trim_memory(device);
}

/* Arranges a fault (fake only). */
int device_inject(struct device *device, const char *fault, uint32_t after, struct fmha_error *err);

/* The name of the kernel that the calling thread runs now, or NULL; safe in a signal handler. */
const char *device_current_kernel(void);

#endif
