/* SPDX-License-Identifier: MIT */
/*
 * fmha.h: attention as a service. The only public C header; the shared words (struct fmha_problem,
 * error codes, data types) are in <fmha/base.h>, which is installed beside it.
 *
 *   fmha_client   a connection to the daemon
 *   fmha_device   one of its devices: a direct connection to that device's worker
 *   fmha_buffer   memory that both sides map; a problem's tensors name it by id and offset
 *   fmha_event    an event of this process's GPU streams that runs can wait for and record
 *   fmha_plan     a validated problem, ready to be run any number of times
 *   fmha_request  one run that was submitted and not waited for
 *
 * The short way is fmha_forward() and its siblings: they take tensors in ordinary memory or in
 * buffers, keep plans and staging memory in the device handle, and retry once when a worker died.
 *
 * Rules that hold everywhere:
 * - Functions return 0 or a negative FMHA_E* code, and fill @err (which may be NULL) on failure
 *   only. Outputs (ret_*) are set on success only.
 * - Every function may be called from any thread at any time, except that an object must not be
 *   used while or after it is freed. A client may be shared by any number of threads.
 * - Every call has a deadline: the one of fmha_client_options unless the call takes its own.
 * - Objects keep alive what they came from: they may be freed in any order. Ends of life take NULL
 *   and return NULL.
 * - A struct whose first member is struct_size must have it set to its sizeof; unknown (larger)
 *   sizes are refused with FMHA_EINVAL. A NULL options pointer means defaults.
 * - When the daemon or a worker restarts, the next call connects again and registers buffers and
 *   plans anew; ids, pointers and the contents of memfd buffers stay. What was in flight fails with
 *   FMHA_EDEVICE (the worker went away) or FMHA_ECONN (the daemon did).
 * - A forked child must open its own client: every call on an inherited object returns FMHA_ECONN
 *   and leaves the parent's sockets alone; the fmha_*_free() functions work.
 * - The library starts no threads, installs no signal or exit handlers, prints nothing, never
 *   aborts; its file descriptors are close-on-exec.
 *
 * "Any call" below stands for the errors that every function with a daemon round trip can return:
 *   FMHA_ECONN      the daemon cannot be reached or hung up; the object belongs to a parent process
 *   FMHA_EDEVICE    the device's worker died during the call
 *   FMHA_ETIMEDOUT  no answer before the deadline
 *   FMHA_EPROTO     the daemon sent something malformed; that connection is closed
 *   FMHA_EBUSY      the daemon is draining, or the worker was still restarting at the deadline
 *   FMHA_ENOMEM     this process or the daemon is out of memory
 *   FMHA_EQUOTA     a limit of this user or connection is reached
 *   FMHA_EINTERNAL  a bug in fmhad
 */
#ifndef FMHA_FMHA_H
#define FMHA_FMHA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FMHA_NAME_BYTES         64  /* device and other names, NUL included */
#define FMHA_KERNEL_BYTES       256 /* canonical kernel names, NUL included */
#define FMHA_PATH_BYTES         108 /* socket paths, NUL included */
#define FMHA_MAX_STAGES         5
#define FMHA_MAX_REBINDS        16
#define FMHA_MAX_FENCES         4
#define FMHA_HANDLE_BYTES       64
#define FMHA_ANY_DEVICE         UINT32_MAX
#define FMHA_DEFAULT_TIMEOUT_MS 30000
#define FMHA_NO_SPIN            UINT32_MAX

struct fmha_client;
struct fmha_device;
struct fmha_buffer;
struct fmha_event;
struct fmha_plan;
struct fmha_request;

/* "0.1.0": of the library, not of this header. */
FMHA_API const char *fmha_version(void);

/* ---- the connection ---- */

struct fmha_client_options {
	uint32_t struct_size;
	uint32_t timeout_ms; /* of every call that names none; 0: FMHA_DEFAULT_TIMEOUT_MS */
	const char *path;    /* the socket; NULL: $FMHAD_SOCKET when set, and nothing else then;
			      * else $XDG_RUNTIME_DIR/fmhad.sock, and when nobody listens there
			      * /run/fmhad/fmhad.sock; borrowed */
	const char *name; /* for the daemon's log and status; NULL: the program's name; borrowed */
	uint32_t spin_us; /* how long a wait looks for its answer before it sleeps, once answers
			   * have come that fast, giving the core to other threads between two
			   * looks; 0: 50, at most 1000; FMHA_NO_SPIN: it sleeps at once */
};

struct fmha_client_info {
	uint32_t protocol; /* version in use */
	uint32_t daemon_pid;
	uint32_t n_devices;
	uint32_t max_in_flight;       /* unanswered requests a connection may have */
	char server[FMHA_NAME_BYTES]; /* "fmhad/0.1.0" */
	char path[FMHA_PATH_BYTES];   /* of the socket that answered */
};

struct fmha_device_info {
	uint32_t device;        /* index, stable while the daemon runs */
	uint32_t compute_units; /* cores, CUs or SMs */
	uint64_t memory_bytes;
	char name[FMHA_NAME_BYTES];
	char arch[FMHA_NAME_BYTES];    /* x86_64_v4, gfx942, sm_90a, ... */
	char backend[FMHA_NAME_BYTES]; /* cpu, fake, hip, cuda */
	char state[FMHA_NAME_BYTES];   /* ready, starting, restarting, failed */
	uint32_t fences;               /* 1: runs can wait for and write counters in its buffers */
	uint32_t events; /* 1: runs can wait for and record events, see fmha_event_import() */
	char pci[FMHA_NAME_BYTES]; /* address on the PCI bus, "0000:1b:00.0"; empty: it has none */
};

/**
 * fmha_connect() - connect to the daemon and say hello
 * @options:     NULL: defaults; borrowed
 * @ret_client:  given
 *
 * Return: 0, or
 *   FMHA_EINVAL    a path that is too long for a socket, struct_size
 *   FMHA_ECONN     nobody listens; err names each socket that was tried with its reason, and how
 *                  to start fmhad
 *   FMHA_EPERM     the socket exists and this user may not use it
 *   FMHA_EVERSION  no common protocol version
 *   any call
 */
FMHA_API int fmha_connect(const struct fmha_client_options *options,
			  struct fmha_client **ret_client, struct fmha_error *err);

/* Disconnects once no device of the client is left. Return: NULL. */
FMHA_API struct fmha_client *fmha_client_free(struct fmha_client *client);

/* Copies what hello said to @ret_info; no round trip. Return: 0, or FMHA_ECONN in a forked child.
 */
FMHA_API int fmha_client_info(struct fmha_client *client, struct fmha_client_info *ret_info,
			      struct fmha_error *err);

/**
 * fmha_set_interrupt() - let this thread's waits end early
 * @asked:     while a call of this thread waits for an answer, called some 20 times a second, without
 *             locks held; not 0: the call returns FMHA_ECANCELED, and a run that it waited for is
 *             cancelled (its outputs belong to the worker for a while yet); NULL: nobody is asked
 * @userdata:  for @asked; both are used until the next call of this function in this thread
 *
 * For interpreters, which handle signals between instructions of theirs only.
 */
FMHA_API void fmha_set_interrupt(int (*asked)(void *userdata), void *userdata);

/* One round trip to the daemon's front. Return: 0, or any call. */
FMHA_API int fmha_client_ping(struct fmha_client *client, struct fmha_error *err);

/**
 * fmha_client_devices() - list the daemon's devices
 * @ret_devices:  the first @capacity of them; may be NULL when @capacity is 0
 * @ret_n:        how many the daemon has, which may exceed @capacity
 *
 * Return: 0, or any call.
 */
FMHA_API int fmha_client_devices(struct fmha_client *client, struct fmha_device_info *ret_devices,
				 size_t capacity, size_t *ret_n, struct fmha_error *err);

/**
 * fmha_client_status() - the daemon's state as JSON: processes, devices, sessions, buffers, queues
 * @ret_json:  NUL-terminated UTF-8; given: free()
 *
 * Return: 0, or any call.
 */
FMHA_API int fmha_client_status(struct fmha_client *client, char **ret_json,
				struct fmha_error *err);

/**
 * fmha_device_open() - open a direct connection to a device's worker
 * @index:       of fmha_device_info, or FMHA_ANY_DEVICE for the first one that is ready
 * @ret_device:  given
 *
 * A worker that is starting is waited for until the deadline.
 *
 * Return: 0, or FMHA_ENOENT for an index that no device has, FMHA_EDEVICE with the reason for a
 * device that failed (with FMHA_ANY_DEVICE, when all did), or any call.
 */
FMHA_API int fmha_device_open(struct fmha_client *client, uint32_t index,
			      struct fmha_device **ret_device, struct fmha_error *err);

/* Releases cached plans and staging memory, and disconnects once no buffer, plan or request of the
 * device is left. Return: NULL. */
FMHA_API struct fmha_device *fmha_device_free(struct fmha_device *device);

/* Copies what the daemon said when the device was opened last; no round trip. Return: 0, or FMHA_ECONN. */
FMHA_API int fmha_device_info(struct fmha_device *device, struct fmha_device_info *ret_info,
			      struct fmha_error *err);

/* One round trip to the worker. Return: 0, or any call. */
FMHA_API int fmha_device_ping(struct fmha_device *device, struct fmha_error *err);

/* ---- buffers ---- */

/**
 * fmha_buffer_new() - memory allocated by the worker, mapped here
 * @size:        bytes, not 0
 * @ret_buffer:  given
 *
 * The preferred kind: both sides see it without a copy, and the death of either takes nothing from
 * the other. Contents start as zeros and survive a restart of the daemon. Where a connection is lost
 * that the worker outlives, it takes the pages back: the buffer cannot be used any more (FMHA_ENOENT),
 * make it anew. On a device whose memory the CPU cannot map, fmha_buffer_data() is NULL.
 *
 * Return: 0, FMHA_EINVAL (size 0), FMHA_EIO (mapping failed), or any call.
 */
FMHA_API int fmha_buffer_new(struct fmha_device *device, uint64_t size,
			     struct fmha_buffer **ret_buffer, struct fmha_error *err);

enum fmha_memory_kind {
	FMHA_MEMORY_FD = 0,         /* a memfd sealed against shrinking, growing and unsealing */
	FMHA_MEMORY_IPC_HANDLE = 1, /* hipIpcMemHandle_t or CUipcMemHandle bytes */
	FMHA_MEMORY_VMM_FD = 2,     /* exported VMM allocation or dma-buf */
	FMHA_MEMORY_FD_OR_HANDLE =
		3, /* HIP's: a dma-buf and an IPC handle of one allocation; the device takes the
		    * first where that has been seen to work on its machine */
};

/* Memory of this process, to be shared with the worker. */
struct fmha_memory {
	uint32_t struct_size;
	uint32_t kind; /* enum fmha_memory_kind */
	int fd;        /* all but FMHA_MEMORY_IPC_HANDLE: borrowed, duplicated */
	uint32_t handle_bytes;
	uint64_t size;        /* bytes of the extent to share */
	uint64_t base_offset; /* of the extent in what fd or handle names: an IPC handle names a
			       * whole allocation */
	uint8_t handle[FMHA_HANDLE_BYTES];
};

/**
 * fmha_buffer_import() - register memory that this process has
 * @memory:      borrowed
 * @ret_buffer:  given
 *
 * A memfd is mapped here too, so fmha_buffer_data() works. Handles are not: their
 * fmha_buffer_data() is NULL, and the memory must stay allocated until the buffer is freed.
 *
 * Return: 0, or
 *   FMHA_EINVAL   kind, size, offset; a memfd that is not sealed or shorter than said
 *   FMHA_ENOTSUP  the device cannot import this kind
 *   any call
 */
FMHA_API int fmha_buffer_import(struct fmha_device *device, const struct fmha_memory *memory,
				struct fmha_buffer **ret_buffer, struct fmha_error *err);

/**
 * fmha_memfd_new() - make a memfd that fmha_buffer_import() takes
 * @size:    bytes, not 0; zero-filled and sealed at this size
 * @ret_fd:  given: close()
 *
 * Return: 0, FMHA_EINVAL, FMHA_ENOMEM or FMHA_EIO. Needs no daemon.
 */
FMHA_API int fmha_memfd_new(uint64_t size, int *ret_fd, struct fmha_error *err);

/**
 * fmha_memory_from_gpu() - name GPU memory that this process has, for fmha_buffer_import()
 * @pointer:     device memory of the CUDA driver or HIP runtime that this process has loaded; the
 *               current context is the one that owns it
 * @size:        bytes from @pointer that are to be shared
 * @ret_memory:  an IPC handle, for mapped physical memory its descriptor, or of HIP a dma-buf and the
 *               handle, with the offset of @pointer in the allocation; when ->fd is not -1 it is
 *               given: close() it after the import
 *
 * Works for cudaMalloc, hipMalloc and caching allocators on top of them (the whole block is shared,
 * the worker uses this extent only). The memory must stay allocated until the buffer is freed.
 *
 * Return: 0, FMHA_EINVAL (no device pointer, or @size reaches beyond its allocation), FMHA_ENOTSUP
 * (no runtime loaded, or memory that cannot be shared: the sentence says what to do).
 */
FMHA_API int fmha_memory_from_gpu(const void *pointer, uint64_t size,
				  struct fmha_memory *ret_memory, struct fmha_error *err);

/**
 * fmha_buffer_map_gpu() - a device pointer to a buffer that a GPU's worker allocated
 * @buffer:       from fmha_buffer_new() on a GPU
 * @ret_pointer:  valid in this process, on the runtime's current device, until the buffer is freed
 *
 * Return: 0, FMHA_EINVAL (another kind of buffer), FMHA_ENOTSUP (no GPU runtime loaded), FMHA_EIO
 * (the driver refused), FMHA_ETIMEDOUT.
 */
FMHA_API int fmha_buffer_map_gpu(struct fmha_buffer *buffer, void **ret_pointer,
				 struct fmha_error *err);

/**
 * fmha_buffer_memory() - what other processes map a buffer by that a GPU's worker allocated
 * @ret_memory:  FMHA_MEMORY_VMM_FD: ->fd is borrowed, ->size is of the whole allocation, which may be
 *               larger than the buffer
 *
 * The descriptor can be passed to other processes (SCM_RIGHTS), which give it to fmha_view_new() or,
 * on the same device, to fmha_buffer_import(). Whoever has it can read and write the memory for good.
 *
 * Return: 0 or FMHA_EINVAL (another kind of buffer).
 */
FMHA_API int fmha_buffer_memory(const struct fmha_buffer *buffer, struct fmha_memory *ret_memory,
				struct fmha_error *err);

struct fmha_view;
#define FMHA_VIEW_MAX_PARTS 4096

/**
 * fmha_view_new() - one range of addresses over memory of several GPUs of this host
 * @parts:     FMHA_MEMORY_VMM_FD each: whole allocations (base_offset 0), which lie one after the other
 *             in the range; borrowed
 * @ret_view:  given
 *
 * The runtime's current device reads and writes all of it in kernels of this process; memory of
 * another GPU over NVLink or PCIe. So a paged cache whose pages lie on several cards is one tensor.
 * The view keeps the memory, also when whoever made it has gone; who pays for it does not change.
 *
 * Return: 0, FMHA_EINVAL (struct_size, a part is of another kind), FMHA_ENOTSUP (no GPU runtime loaded, or the device
 * cannot reach a part), FMHA_ENOMEM (no addresses), FMHA_EIO (the driver refused).
 */
FMHA_API int fmha_view_new(const struct fmha_memory *parts, size_t n_parts,
			   struct fmha_view **ret_view, struct fmha_error *err);

/* Device pointer to its first byte, valid until the view is freed. */
FMHA_API void *fmha_view_data(const struct fmha_view *view);

/* Bytes of all parts. */
FMHA_API uint64_t fmha_view_size(const struct fmha_view *view);

/* Unmaps it; no work that uses it may be in flight. Return: NULL. */
FMHA_API struct fmha_view *fmha_view_free(struct fmha_view *view);

/* For fmha_tensor.buffer: never 0, never reused by this device handle, the same for all its life.
 */
FMHA_API uint64_t fmha_buffer_id(const struct fmha_buffer *buffer);

/* The mapping in this process, page-aligned, readable and writable until the buffer is freed; NULL
 * when the CPU cannot see the memory. */
FMHA_API void *fmha_buffer_data(const struct fmha_buffer *buffer);

/* Bytes, as asked for. */
FMHA_API uint64_t fmha_buffer_size(const struct fmha_buffer *buffer);

/* The memfd, to hand to other processes; borrowed; -1 when there is none. */
FMHA_API int fmha_buffer_fd(const struct fmha_buffer *buffer);

/* Unmaps and releases on both sides. Plans that name the buffer fail from now on with FMHA_ENOENT;
 * no run that uses it may be in flight. What other processes have mapped of a buffer that the
 * daemon made reads as zeros from then on. Return: NULL. */
FMHA_API struct fmha_buffer *fmha_buffer_free(struct fmha_buffer *buffer);

/* ---- events ---- */

/**
 * fmha_event_import() - name an event of this process, for the waits and signals of runs
 * @handle, @handle_bytes: FMHA_HANDLE_BYTES bytes, as cuIpcGetEventHandle() or PyTorch's
 *                         torch.cuda.Event(interprocess=True).ipc_handle() gives them; borrowed
 * @ret_event:             given
 *
 * The event was made with CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, on the GPU that the
 * device is, and must exist until it was freed here and the runs that use it are over. CUDA only:
 * see fmha_device_info.events; counters in a buffer (struct fmha_fence) do the same on every GPU.
 *
 * Return: 0, or
 *   FMHA_EINVAL   @handle_bytes; a handle that the driver refuses
 *   FMHA_ENOTSUP  the device cannot use other processes' events
 *   any call
 */
FMHA_API int fmha_event_import(struct fmha_device *device, const void *handle, size_t handle_bytes,
			       struct fmha_event **ret_event, struct fmha_error *err);

/* For fmha_fence.event: never 0, never reused by this device handle, the same for all its life. */
FMHA_API uint64_t fmha_event_id(const struct fmha_event *event);

/* Runs that use it go on doing so. Return: NULL. */
FMHA_API struct fmha_event *fmha_event_free(struct fmha_event *event);

/* ---- plans ---- */

struct fmha_stage_info {
	char family[FMHA_NAME_BYTES];   /* fwd, fwd_splitkv, bwd_dq_dk_dv, ... */
	char kernel[FMHA_KERNEL_BYTES]; /* canonical name */
	uint64_t workspace_offset;
	uint64_t workspace_bytes;
};

struct fmha_plan_info {
	uint64_t workspace_bytes;
	double flops; /* multiply and add counted apart, masked blocks left out */
	uint32_t n_stages;
	uint32_t reserved;
	struct fmha_stage_info stages[FMHA_MAX_STAGES];
};

/* For who measures or reports kernels. Split count and size are the problem's own. */
struct fmha_plan_options {
	uint32_t struct_size; /* sizeof(struct fmha_plan_options) */
	uint32_t n_kernels;   /* at most FMHA_MAX_STAGES */
	/* Canonical names, each of another family, whose stage is to run it; borrowed. The planner
	 * chooses the kernels of the other stages. */
	const char *const *kernels;
};

/**
 * fmha_plan_new() - validate a problem once, to run it often
 * @problem:   from fmha_problem_init(); every tensor names a buffer of @device (fmha_buffer_id());
 *             shapes and roles: FMHA_TENSORS in <fmha/base.h>; borrowed
 * @options:   NULL: the planner chooses all kernels; borrowed
 * @ret_plan:  given
 *
 * Return: 0, or
 *   FMHA_EINVAL     a documented rule is broken; err->field names the field
 *   FMHA_ENOTSUP    sound, and this device or build does not do it; err->field names the field
 *   FMHA_ENOKERNEL  no kernel of this device fits; err->field "kernels": one that was named does
 *                   not, err->msg says why
 *   FMHA_ENOENT     a buffer that was freed or is of another device
 *   any call
 */
FMHA_API int fmha_plan_new(struct fmha_device *device, const struct fmha_problem *problem,
			   const struct fmha_plan_options *options, struct fmha_plan **ret_plan,
			   struct fmha_error *err);

/* Copies the plan's stages to @ret_info; no round trip. Return: 0, or FMHA_ECONN. */
FMHA_API int fmha_plan_info(struct fmha_plan *plan, struct fmha_plan_info *ret_info,
			    struct fmha_error *err);

/* A plan that is in flight ends first. Return: NULL. */
FMHA_API struct fmha_plan *fmha_plan_free(struct fmha_plan *plan);

/* For this run only, the view of @role starts at @offset of @buffer. A GPU's kernels may have been
 * chosen for tensors that begin at multiples of 16 bytes: then FMHA_EINVAL for one that does not. */
struct fmha_rebind {
	uint32_t role;     /* enum fmha_tensor_role, one that the plan's problem has */
	uint32_t reserved; /* 0 */
	uint64_t buffer;   /* fmha_buffer_id() */
	uint64_t offset;   /* bytes */
};

/*
 * What orders work of several processes on the device itself, without the host: a 32-bit counter in
 * a buffer of a GPU (cuStreamWaitValue32, hipStreamWaitValue32 and their writing counterparts), or
 * an event.
 */
struct fmha_fence {
	uint64_t buffer;   /* fmha_buffer_id(); 0: an event */
	uint64_t offset;   /* bytes, a multiple of 4; 0 for an event */
	uint32_t value;    /* 0 for an event */
	uint32_t reserved; /* 0 */
	uint64_t event;    /* fmha_event_id(); 0: a counter */
};

struct fmha_run_options {
	uint32_t struct_size;
	uint32_t timeout_ms;        /* of this run; 0: the client's */
	uint32_t has_dropout_state; /* 1: the next two replace the problem's */
	uint32_t n_rebinds;         /* at most FMHA_MAX_REBINDS */
	uint64_t dropout_seed, dropout_offset;
	const struct fmha_rebind *rebinds; /* borrowed */
	/*
	 * With fences the call returns, and a request ends, as soon as the run is queued on the
	 * device. The device starts it when each counter of @waits has reached its value (the
	 * signed 32-bit difference is not negative) and the work is done behind which each event
	 * was recorded last (at once when it never was); then it writes and records @signals.
	 * An event of @waits may be recorded again, and a stream be made to wait for one of
	 * @signals, once the call has returned. A wait that lasts longer than the run's timeout is
	 * given up: results are undefined and the next run returns FMHA_ETIMEDOUT.
	 */
	uint32_t n_waits, n_signals;      /* at most FMHA_MAX_FENCES each */
	const struct fmha_fence *waits;   /* borrowed */
	const struct fmha_fence *signals; /* borrowed */
};

struct fmha_run_result {
	uint64_t queued_ns; /* in the worker, from arrival to the first stage */
	uint64_t kernel_ns; /* in the worker, all stages; of tiny runs on a GPU with the launch */
};

/**
 * fmha_plan_run() - run and wait
 * @options:     NULL: defaults; borrowed
 * @ret_result:  may be NULL
 *
 * After FMHA_ETIMEDOUT the run was asked to stop, and may still write the output tensors; a later
 * successful call on the same device handle means that it no longer does. Never retried: after
 * FMHA_EDEVICE or FMHA_ECONN the outputs are undefined and the call may be repeated.
 *
 * Return: 0, FMHA_EINVAL (options), FMHA_ENOENT (a rebound buffer), or any call.
 */
FMHA_API int fmha_plan_run(struct fmha_plan *plan, const struct fmha_run_options *options,
			   struct fmha_run_result *ret_result, struct fmha_error *err);

/**
 * fmha_plan_submit() - start a run, do not wait
 * @options:      NULL: defaults; borrowed
 * @ret_request:  given: fmha_request_free()
 *
 * Waits only while the connection has max_in_flight requests unanswered. Runs of one device handle
 * may end in any order. The outputs belong to the worker until the request has ended.
 *
 * Return: 0, FMHA_EINVAL, FMHA_ENOENT, or any call.
 */
FMHA_API int fmha_plan_submit(struct fmha_plan *plan, const struct fmha_run_options *options,
			      struct fmha_request **ret_request, struct fmha_error *err);

/**
 * fmha_request_fd() - something to poll
 * @ret_fd:  readable (POLLIN) when fmha_request_wait() with timeout 0 is worth a call: the request
 *           ended, or news arrived that may end it; borrowed, closed by fmha_request_free()
 *
 * Return: 0, FMHA_EIO (no more file descriptors), FMHA_ECONN (forked child).
 */
FMHA_API int fmha_request_fd(struct fmha_request *request, int *ret_fd, struct fmha_error *err);

/**
 * fmha_request_wait() - wait for the end of a run
 * @timeout_ms:  of this call, not of the run; 0: only look; the request stays valid afterwards
 * @ret_result:  may be NULL
 *
 * Return: 0 once the run succeeded, FMHA_ETIMEDOUT while it goes on, FMHA_ECANCELED, or the run's
 * error as in fmha_plan_run(). Further calls return the same.
 */
FMHA_API int fmha_request_wait(struct fmha_request *request, uint32_t timeout_ms,
			       struct fmha_run_result *ret_result, struct fmha_error *err);

/* Asks the worker to stop the run; fmha_request_wait() then returns FMHA_ECANCELED, or 0 when the
 * run was faster. Return: 0, or any call. */
FMHA_API int fmha_request_cancel(struct fmha_request *request, struct fmha_error *err);

/* A request that has not ended is cancelled and its answer dropped. Return: NULL. */
FMHA_API struct fmha_request *fmha_request_free(struct fmha_request *request);

/* ---- one call ---- */

/**
 * fmha_forward() - O = softmax(scale * Q K^T + ...) V
 * @problem:     from fmha_problem_init(); op is set by the call; borrowed. Each tensor names a
 * buffer (zero copies), or has buffer 0 and `data`: ordinary memory, which is copied into shared
 * memory before the run and out of it after, at each call: 0.1 to 0.2 ms a MiB, whatever part of it
 * the run uses, and on a GPU the kernel then reads it over the bus. Elements between those that a
 * strided view names are left alone. Q [batch, seqlen_q, nhead_q, hdim_q], K [batch, seqlen_k,
 * nhead_k, hdim_q], V [batch, seqlen_k, nhead_k, hdim_v], O [batch, seqlen_q, nhead_q, hdim_v], all
 * of one type; LSE float [batch, nhead_q, seqlen_q], natural log, -inf for an empty row, absent:
 * not wanted; the others: FMHA_TENSORS in <fmha/base.h>
 * @options:     timeout_ms and the dropout state; n_rebinds must be 0; NULL: defaults; borrowed
 * @ret_result:  may be NULL
 *
 * Plans are kept in @device, so repeating a shape costs one message. Retried once when the worker
 * or the daemon died: outputs must not overlap inputs.
 *
 * Return: 0, the errors of fmha_plan_new() and fmha_plan_run(), or FMHA_EINVAL naming a tensor
 * whose data cannot be staged. Outputs are undefined on failure.
 */
FMHA_API int fmha_forward(struct fmha_device *device, const struct fmha_problem *problem,
			  const struct fmha_run_options *options,
			  struct fmha_run_result *ret_result, struct fmha_error *err);

/* dQ, dK, dV (dBias, dSink where present) from Q, K, V, O, LSE and dO, shaped like the tensors they
 * belong to; padding rows and keys keep what they held; otherwise as fmha_forward(). */
FMHA_API int fmha_backward(struct fmha_device *device, const struct fmha_problem *problem,
			   const struct fmha_run_options *options,
			   struct fmha_run_result *ret_result, struct fmha_error *err);

/* Writes k_new and v_new into the cache tensors k and v behind seqlen_k_per_batch rows, with rotary
 * embedding; staged cache tensors are copied in and out. Otherwise as fmha_forward(). */
FMHA_API int fmha_append_kv(struct fmha_device *device, const struct fmha_problem *problem,
			    const struct fmha_run_options *options,
			    struct fmha_run_result *ret_result, struct fmha_error *err);

/* O and LSE from o_parts and lse_parts, partial results over disjoint key ranges; otherwise as
 * fmha_forward(). */
FMHA_API int fmha_merge_states(struct fmha_device *device, const struct fmha_problem *problem,
			       const struct fmha_run_options *options,
			       struct fmha_run_result *ret_result, struct fmha_error *err);

/**
 * fmha_explain() - which kernels fit a problem, why others do not, what is chosen and why
 * @problem:   as for fmha_plan_new(); tensors only have to be present (buffer or data not zero),
 *             nothing is read; borrowed
 * @options:   as for fmha_plan_new(); borrowed
 * @ret_json:  NUL-terminated UTF-8; given: free()
 *
 * Return: 0, FMHA_EINVAL or FMHA_ENOTSUP naming the field, or any call.
 */
FMHA_API int fmha_explain(struct fmha_device *device, const struct fmha_problem *problem,
			  const struct fmha_plan_options *options, char **ret_json,
			  struct fmha_error *err);

/* ---- the device's kernel registry ---- */

/**
 * fmha_registry_export() - the registry as JSON
 * @filter:    an expression over kernel records, as in "hdim_q == 128"; borrowed; NULL: kernels
 *             that something is known about (compiled, loaded, quarantined, run, tuned, preferred)
 * @ret_json:  given: free()
 *
 * Return: 0, FMHA_EINVAL (the filter, with the place of the fault), FMHA_EQUOTA (more than 64 MiB:
 * narrow the filter), FMHA_EBUSY (another one of this user's is under way), or any call.
 */
FMHA_API int fmha_registry_export(struct fmha_device *device, const char *filter, char **ret_json,
				  struct fmha_error *err);

/**
 * fmha_registry_import() - merge an export of another machine with the same device
 * @json, @size:    borrowed, @size bytes without a NUL
 * @ret_n_kernels:  records taken; may be NULL
 *
 * Return: 0, FMHA_EINVAL (the document), FMHA_EPERM, or any call.
 */
FMHA_API int fmha_registry_import(struct fmha_device *device, const char *json, size_t size,
				  uint64_t *ret_n_kernels, struct fmha_error *err);

/* Loads the kernel set @json (a JSON list of name patterns) under the name @set; otherwise as
 * fmha_registry_import(). */
FMHA_API int fmha_registry_load(struct fmha_device *device, const char *set, const char *json,
				size_t size, uint64_t *ret_n_kernels, struct fmha_error *err);

/* Unloads a set. @ret_n_kernels: kernels that left the registry; may be NULL. Return: 0,
 * FMHA_ENOENT, FMHA_EPERM, or any call. */
FMHA_API int fmha_registry_unload(struct fmha_device *device, const char *set,
				  uint64_t *ret_n_kernels, struct fmha_error *err);

/* One kernel by its canonical name, as fmha_registry_export() has it, with the sets that name it.
 * @ret_json: given: free(). Return: 0, FMHA_ENOENT, or any call. */
FMHA_API int fmha_registry_get(struct fmha_device *device, const char *kernel, char **ret_json,
			       struct fmha_error *err);

/**
 * fmha_registry_set_priority() - prefer a kernel, on all devices of this model, from now on
 * @priority:    the higher the sooner, before what was measured; 0: none, as at first
 * @ret_stored:  whether a restart of the daemon keeps it, too; may be NULL
 *
 * Return: 0, FMHA_ENOENT, FMHA_EPERM (for administrators), or any call.
 */
FMHA_API int fmha_registry_set_priority(struct fmha_device *device, const char *kernel,
					int32_t priority, bool *ret_stored, struct fmha_error *err);
/* Ends a kernel's quarantine, whomever it is for, and what was counted against it. Otherwise as
 * fmha_registry_set_priority(); FMHA_ENOENT: it is in none. */
FMHA_API int fmha_registry_lift(struct fmha_device *device, const char *kernel, bool *ret_stored,
				struct fmha_error *err);
/* Forgets measured times. @kernel: a pattern with * and ?, NULL: all; @shape: of the times, NULL: all;
 * @ret_n: how many there were, may be NULL. Otherwise as fmha_registry_set_priority(). */
FMHA_API int fmha_registry_forget(struct fmha_device *device, const char *kernel, const char *shape,
				  uint64_t *ret_n, bool *ret_stored, struct fmha_error *err);

/**
 * fmha_census() - which shapes the device has been asked for, what took most time first
 * @ret_json:  {"shapes": [{"uid", "shape", "runs", "device_ns", "settled"}]}: the caller's own, of
 *             everybody for administrators; settled: nothing is left to be measured; given: free()
 */
FMHA_API int fmha_census(struct fmha_device *device, char **ret_json, struct fmha_error *err);

struct fmha_tune_options {
	uint32_t struct_size; /* sizeof(struct fmha_tune_options) */
	uint32_t budget_ms;   /* of device time; 0: until every candidate is measured */
	uint32_t again;       /* 1: also what was measured before */
	uint32_t thorough;    /* 1: also what is estimated to be far too slow */
	const char *shape;    /* of fmha_census(), in place of a problem; borrowed */
	uint32_t timeout_ms;  /* of the whole call; 0: a minute more than the budget, or an hour */
};

struct fmha_tune_result {
	char shape[160];  /* the word under which its times are kept */
	char kernel[256]; /* the fastest; empty: nothing was measured */
	int32_t n_splits;
	double us; /* of its whole plan */
	uint32_t n_candidates, n_measured, n_failed;
};

/**
 * fmha_tune() - have the device measure what can run a problem, and remember it
 * @problem:  as for fmha_plan_new(), or NULL with options->shape; nothing of its buffers is touched,
 *            any number will do; borrowed
 * @options:  NULL: all zero; borrowed
 *
 * Measured on memory of the daemon's own, while no client's run is pending. All processes get what
 * turned out to be fastest: plans that are made from now on, and those made before where it fits what
 * they were told.
 *
 * Return: 0, FMHA_EPERM (for administrators), FMHA_ENOENT (no such shape), FMHA_EBUSY (too many
 * wait), FMHA_EQUOTA (more memory than is set aside for it), FMHA_ENOKERNEL, or any call.
 */
FMHA_API int fmha_tune(struct fmha_device *device, const struct fmha_problem *problem,
		       const struct fmha_tune_options *options, struct fmha_tune_result *ret_result,
		       struct fmha_error *err);

/* ---- caches that outlive their users ---- */

struct fmha_pool;
#define FMHA_POOL_KEY_BYTES   32
#define FMHA_POOL_SHARE_BYTES 32

struct fmha_pool_options {
	uint32_t struct_size; /* sizeof(struct fmha_pool_options) */
	uint32_t n_pages;     /* at most 65,536; 0: the pool is there already, whatever it has */
	uint64_t page_bytes;  /* a multiple of 4096 */
	const char *name; /* of this user's pools; letters, digits, '.', '_' and '-'; borrowed */
	const char *
		layout; /* what pages hold, in the users' own words: model, layers, heads, type; all
			       * who open the pool say the same; NULL: not asked; borrowed */
	const uint8_t
		*share; /* FMHA_POOL_SHARE_BYTES, what fmha_pool_share() gave another user for this
			    * one: that one's pool, and name is ""; NULL: one of this user's own; borrowed */
	uint32_t
		n_spill; /* pages of a file that a new pool has besides, which outlives the daemon: sealed
			   * pages are copied to it in the background; 0: none */
	uint32_t reserved;
	/* A GPU, in whose memory it lies, opened by this very client: it has no file then, and is shared with
	 * who may write it or with nobody. NULL: the machine's memory. Borrowed. */
	struct fmha_device *device;
};

struct fmha_pool_info {
	uint64_t page_bytes;
	uint32_t n_pages;
	uint32_t created; /* 1: it was not there before */
	uint32_t
		read_only; /* 1: another user's, who lets this one read: it is mapped so, and neither
			     * leased nor sealed */
	uint32_t
		coming; /* of the last fmha_pool_find(): how many keys behind those found are being read
			     * from the pool's file */
};

/**
 * fmha_pool_open() - pages of keys and values in the daemon's keeping, which no process's end takes away
 * @options:   borrowed
 * @ret_pool:  given
 *
 * The pages lie in memory of the machine, mapped here; their bytes are the users' own affair. A page is
 * free, leased to one handle that writes it, or sealed under a key and then only read. All processes of
 * one user that open a name have the same pages; other users have others. The daemon keeps a pool while
 * somebody has it open, and limits.pool_idle_s longer; a restart of the daemon ends all of them, but
 * for files: a pool of the same name and extents has what its file holds whole.
 *
 * What a handle had leased when its process ends is emptied and free again, not before; what it had
 * sealed stays. A handle is for one thread at a time.
 *
 * Return: 0, FMHA_EINVAL (name, n_pages, page_bytes; layout, n_pages or page_bytes are not those of the
 * pool that is there), FMHA_ENOENT (n_pages is 0 and there is none, or nothing is shared by @share),
 * FMHA_ENOTSUP (n_spill, where the daemon has no folder for files), FMHA_EQUOTA, FMHA_ENOMEM, FMHA_EIO, or
 * any call.
 */
FMHA_API int fmha_pool_open(struct fmha_client *client, const struct fmha_pool_options *options,
			    struct fmha_pool **ret_pool, struct fmha_error *err);

FMHA_API void fmha_pool_get_info(const struct fmha_pool *pool, struct fmha_pool_info *ret_info);

/* Page 0; page i lies i * page_bytes behind it. Readable and writable until the handle is closed; not
 * there in a forked child. NULL: it lies in a GPU's memory (fmha_pool_memory()). */
FMHA_API void *fmha_pool_data(const struct fmha_pool *pool);

/**
 * fmha_pool_memory() - what a program maps by its own GPU runtime, or as a part of fmha_view_new()
 * @ret_memory:  its descriptor is borrowed until the pool is closed, its size that of the allocation: what all
 *               pages take, rounded up to 2 MiB
 *
 * Return: 0, FMHA_ENOTSUP (the pool lies in the machine's memory).
 */
FMHA_API int fmha_pool_memory(const struct fmha_pool *pool, struct fmha_memory *ret_memory,
			      struct fmha_error *err);

/**
 * fmha_pool_buffer() - the pool's pages as a buffer that a device computes on
 * @ret_buffer:  given; page i lies i * page_bytes behind its beginning. It is freed before the pool is closed
 *
 * Return: 0, FMHA_ENOTSUP (the device does not compute in the memory that the pool has), FMHA_EPERM (the pool is
 * read-only), or as fmha_buffer_import().
 */
FMHA_API int fmha_pool_buffer(struct fmha_pool *pool, struct fmha_device *device,
			      struct fmha_buffer **ret_buffer, struct fmha_error *err);

/**
 * fmha_pool_lease() - pages to write
 * @ret_pages:  numbers, room for @n
 * @ret_n:      how many there were: free pages, then sealed ones that nobody has pinned, those first that
 *              were let go longest ago; their contents are whatever they are
 *
 * Lease many at once: then a step of generation asks the daemon nothing.
 *
 * Return: 0, FMHA_ECONN (the daemon has gone, and with it what was leased and pinned), or any call.
 */
FMHA_API int fmha_pool_lease(struct fmha_pool *pool, uint32_t n, uint32_t *ret_pages,
			     uint32_t *ret_n, struct fmha_error *err);

/**
 * fmha_pool_seal() - publish pages that are leased here and written for good
 * @keys:       of what each page holds and depends on, such as a hash of all tokens up to its end;
 *              whoever knows a key and is of the same user reads the page
 * @ret_pages:  room for @n: the page itself; or another one that has the key already: then the page stays
 *              leased. Whichever it is, it is now pinned here
 *
 * Return: 0, FMHA_EINVAL (the first page that is not leased here: those before it are sealed), or as
 * fmha_pool_lease().
 */
FMHA_API int fmha_pool_seal(struct fmha_pool *pool, uint32_t n, const uint32_t *pages,
			    const uint8_t (*keys)[FMHA_POOL_KEY_BYTES], uint32_t *ret_pages,
			    struct fmha_error *err);

/**
 * fmha_pool_find() - the pages of a longest prefix
 * @keys:   in the order of the sequence
 * @ret_n:  how many of the first keys there are pages for; each is pinned here, once more if it was
 *
 * Return: as fmha_pool_lease().
 */
FMHA_API int fmha_pool_find(struct fmha_pool *pool, uint32_t n,
			    const uint8_t (*keys)[FMHA_POOL_KEY_BYTES], uint32_t *ret_pages,
			    uint32_t *ret_n, struct fmha_error *err);

/* Frees leased pages, takes one pin off pinned ones. Return: 0, FMHA_EINVAL (the first page that is
 * neither, those before it are given back), or as fmha_pool_lease(). */
FMHA_API int fmha_pool_give_back(struct fmha_pool *pool, uint32_t n, const uint32_t *pages,
				 struct fmha_error *err);

/* Gives back all that it has leased and pinned; nothing of this process may use its pages any more.
 * Takes NULL. Return: NULL. */
FMHA_API struct fmha_pool *fmha_pool_close(struct fmha_pool *pool);

/* What another user may do with a pool. */
enum fmha_pool_access { FMHA_POOL_NO_ACCESS, FMHA_POOL_READS, FMHA_POOL_WRITES };

/**
 * fmha_pool_share() - let another user have a pool open
 * @name:       of this user's pools
 * @access:     from now on; what that user has open already is no longer served
 * @ret_share:  by which that user, and nobody else, opens it; zeros for FMHA_POOL_NO_ACCESS
 *
 * Who reads sees all of the pool's memory, for as long as he has it mapped, also when access ends: to end that,
 * drop the pool. Who writes is trusted as one's own processes are. Pins of both keep pages from being evicted.
 *
 * Return: 0, FMHA_ENOENT, FMHA_EINVAL, FMHA_EQUOTA (32 users), or any call.
 */
FMHA_API int fmha_pool_share(struct fmha_client *client, const char *name, uint32_t uid,
			     enum fmha_pool_access access, uint8_t ret_share[FMHA_POOL_SHARE_BYTES],
			     struct fmha_error *err);

/* Ends a pool that nobody of its user has open; others whom it lets in lose it. Return: 0, FMHA_ENOENT,
 * FMHA_EBUSY (somebody has it open), or any call. */
FMHA_API int fmha_pool_drop(struct fmha_client *client, const char *name, struct fmha_error *err);

/* ---- watching ---- */

/**
 * fmha_device_trace() - what the device's worker has done since the last call
 * @ret_json:  {"lost": events that were overwritten unread, "events": [{"kind": "run" or "build",
 *             "kernel", "uid", "pid", "session", and times by CLOCK_MONOTONIC: "arrived_ns",
 *             "started_ns", "ended_ns", "answered_ns"}, ...]}; of other users for administrators
 *             only; given: free()
 *
 * The first call starts the recording and has no events; it ends with the device's connection.
 *
 * Return: 0, FMHA_ENOMEM, FMHA_EQUOTA, or any call.
 */
FMHA_API int fmha_device_trace(struct fmha_device *device, char **ret_json, struct fmha_error *err);

/* ---- for tests ---- */

/* Makes a `fake` device fail (@fault: hang, abort, oom, sticky) after @after more launches. Return:
 * 0, FMHA_EPERM unless the daemon's configuration allows it, FMHA_ENOTSUP on a real device, or any
 * call. */
FMHA_API int fmha_device_inject(struct fmha_device *device, const char *fault, uint32_t after,
				struct fmha_error *err);

#ifdef __cplusplus
}
#endif

#endif
