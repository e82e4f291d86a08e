/* SPDX-License-Identifier: MIT */
/*
 * internal.h: the objects behind fmha.h.
 *
 * Ids: a program names buffers by ids that this library makes. They stay the same when the worker
 * is another one; each object remembers what the worker calls it (worker_id) and since which
 * connection (generation). Using an object whose generation is old registers it again, so that a
 * restart costs nothing until an object is used and needs no list of what to restore.
 *
 * Locks: device->lock may be taken with a connection's lock not held; never the other way round
 * except in arena_on_answer(), which takes none. A timed lock is never taken with another lock held.
 */
#ifndef CLIENT_INTERNAL_H
#define CLIENT_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <fmha/fmha.h>

#include "connection.h"
#include "deadline.h"
#include "stage.h"
#include "timed_lock.h"

#define BUFFER_BUCKETS       64
#define ARENA_MAX            64
#define ARENA_MIN_BYTES      (UINT64_C(1) << 20)
#define ARENA_MAX_IDLE_BYTES (UINT64_C(512) << 20)
#define RELEASE_TIMEOUT_MS   2000 /* ends of life do not wait longer for a stuck peer */

/* ---- link.c ---- */

/* Opens a connection. @ret_connection: given. */
typedef int (*link_open)(void *owner, int64_t deadline, struct connection **ret_connection,
			 struct fmha_error *err);

/* A connection that is opened again when it was lost. */
struct link {
	/* Guards the rest; who opens may write what the peer says of itself. */
	struct timed_lock lock;
	struct connection *connection; /* NULL: none */
	uint64_t generation;           /* of the connection; counts up from 1 */
	link_open open;
	void *owner;
	int lost_code; /* what says that the peer went away */
};

int link_init(struct link *link, link_open open, void *owner, int lost_code,
	      struct fmha_error *err);
void link_deinit(struct link *link);

/* A live connection, opened when needed. @ret_connection: given. */
int link_get(struct link *link, int64_t deadline, struct connection **ret_connection,
	     uint64_t *ret_generation, struct fmha_error *err);

/* The connection if there is a live one of @generation, without opening anything; NULL otherwise.
 */
struct connection *link_get_if(struct link *link, uint64_t generation);

/* The same of whatever generation, and without waiting for who opens one. */
struct connection *link_get_open(struct link *link);

/* One request that may safely be repeated, and is once when the peer went away. */
int link_call(struct link *link, enum proto_method method, const void *params, int fd,
	      int64_t deadline, void *ret_result, int *ret_fd, struct fmha_error *err);

/* The name that a worker has for an object of ours. */
struct registration {
	/* Guards the rest; who is inside may write what the worker says of it. */
	struct timed_lock lock;
	uint64_t generation; /* of the connection that it is known on; 0: of none */
	uint64_t worker_id;
};

struct fmha_device;

/* Tells the worker behind @connection of @object. */
typedef int (*registration_tell)(void *object, struct connection *connection, uint64_t generation,
				 int64_t deadline, uint64_t *ret_worker_id, struct fmha_error *err);

/* Finds what the worker behind @connection calls the object; tells it when needed. */
int registration_bind(struct registration *registration, registration_tell tell, void *object,
		      struct connection *connection, uint64_t generation, int64_t deadline,
		      uint64_t *ret_worker_id, struct fmha_error *err);
/* Tells the device's worker now, and once more when that one went away. */
int registration_begin(struct registration *registration, registration_tell tell, void *object,
		       struct fmha_device *device, int64_t deadline, struct fmha_error *err);
/* The end of the object: the worker forgets it, unless it has already. @params: of @method. */
void registration_end(const struct registration *registration, struct fmha_device *device,
		      enum proto_method method, const void *params);

/* Refuses a struct of a newer header. */
int check_struct_size(uint32_t size, size_t known, const char *name, struct fmha_error *err);

/*
 * Differs between a process and its children, however they were made; never 0. Asked by every call, so it must cost no
 * system call: a page that the kernel hands to children as zeros keeps a number.
 */
uint64_t process_token(void);

struct fmha_client {
	unsigned int refs; /* atomic: the handle, and each device */
	pid_t pid;         /* of the process that connected, for people */
	uint64_t process;  /* process_token() then */
	uint32_t timeout_ms, spin_us;
	char *path; /* given by the caller, or NULL */
	char name[FMHA_NAME_BYTES];

	struct link front;
	struct fmha_client_info info; /* under its lock */
};

struct arena {
	struct fmha_buffer *buffer; /* NULL: free slot */
	int busy;                   /* atomic: 1 from arena_take() until its run has ended */
};

/* The calls of those that live on a device and name its buffers and plans, from above (open.c). */
struct device_hooks {
	void (*on_buffer_free)(struct fmha_device *device, uint64_t id); /* by the program */
	void (*on_last)(struct fmha_device *device); /* nobody else names the device any more */
};

struct fmha_device {
	const struct device_hooks *hooks;
	unsigned int refs; /* atomic: the handle, and each buffer, plan, request of the program's */
	struct fmha_client *client;
	uint32_t index;

	struct link worker;
	struct fmha_device_info info; /* under its lock */

	pthread_mutex_t lock; /* of the rest */
	uint64_t next_buffer_id;
	struct fmha_buffer *buffers[BUFFER_BUCKETS];
	uint64_t last_event_id;
	struct fmha_event *events;
	uint64_t cache_clock;
	struct cached_plan *cache; /* cache.c; NULL until the first use */
	struct arena arenas[ARENA_MAX];
};

struct fmha_buffer {
	unsigned int refs; /* atomic: the handle, and calls that found it by id */
	struct fmha_device *device;
	bool internal;            /* the device's own: holds no reference on it */
	struct fmha_buffer *next; /* in its bucket */
	uint64_t id, size;
	uint32_t kind; /* enum fmha_memory_kind */
	int fd;        /* -1: none */
	void *data;
	uint64_t base_offset;
	uint8_t handle[FMHA_HANDLE_BYTES];
	uint32_t handle_bytes;
	uint64_t allocation_bytes; /* FMHA_MEMORY_VMM_FD that a worker made: bytes behind fd */

	struct registration at_worker;
	struct fmha_view *view; /* fmha_buffer_map_gpu()'s, or NULL; under the lock */
};

/* gpu.c: the runtime's library, if this process has loaded it: a handle for dlsym(). */
void *gpu_loaded_cuda(void);
void *gpu_loaded_hip(void);

struct fmha_plan {
	unsigned int refs; /* atomic */
	struct fmha_device *device;
	bool internal;
	struct fmha_problem problem; /* our buffer ids */
	uint32_t n_kernels;          /* that the caller named */
	struct proto_kernel kernels[PROTO_MAX_STAGES];

	struct registration at_worker;
	struct fmha_plan_info info; /* under the lock */
	int64_t lasts_ns; /* atomic: how long the wait for a run takes; 0: not known, or no time */
};

struct fmha_request {
	struct fmha_device *device;
	struct connection *connection;
	struct pending *pending;
	int event_fd, poll_fd; /* -1 until fmha_request_fd() */
};

/* ---- device.c ---- */

static inline struct fmha_device *device_ref(struct fmha_device *device)
{
	(void)__atomic_add_fetch(&device->refs, 1, __ATOMIC_RELAXED);
	return device;
}

struct fmha_device *device_unref(struct fmha_device *device);

/* The worker's link's. */
int device_open_worker(void *device, int64_t deadline, struct connection **ret_connection,
		       struct fmha_error *err);

/* ---- buffer.c ---- */

int buffer_new(struct fmha_device *device, uint64_t size, bool internal, int64_t deadline,
	       struct fmha_buffer **ret_buffer, struct fmha_error *err);
int buffer_import(struct fmha_device *device, const struct fmha_memory *memory, bool internal,
		  int64_t deadline, struct fmha_buffer **ret_buffer, struct fmha_error *err);
struct fmha_buffer *buffer_unref(struct fmha_buffer *buffer);

/* The end of the handle: leaves the table and is released at the worker. */
void buffer_release(struct fmha_buffer *buffer);

/* The buffer called @id, with a reference; NULL: none. */
struct fmha_buffer *buffer_find(struct fmha_device *device, uint64_t id);

/* Has the worker of now know the buffer. @ret_generation: of the connection on which it does. */
int buffer_attach(struct fmha_buffer *buffer, int64_t deadline, uint64_t *ret_generation,
		  struct fmha_error *err);

/* Finds what the worker behind @connection calls buffer @id; registers it there when needed. */
int buffer_bind(struct fmha_device *device, uint64_t id, struct connection *connection,
		uint64_t generation, int64_t deadline, uint64_t *ret_worker_id,
		struct fmha_error *err);

/* ---- event.c ---- */

/* Finds what the worker behind @connection calls event @id; imports it there when needed. */
int event_bind(struct fmha_device *device, uint64_t id, struct connection *connection,
	       uint64_t generation, int64_t deadline, uint64_t *ret_worker_id,
	       struct fmha_error *err);

/* ---- plan.c ---- */

/* Checks @options (may be NULL) and copies the names. */
int plan_names(const struct fmha_plan_options *options,
	       struct proto_kernel ret_kernels[PROTO_MAX_STAGES], uint32_t *ret_n,
	       struct fmha_error *err);

int plan_new(struct fmha_device *device, const struct fmha_problem *problem,
	     const struct fmha_plan_options *options, bool internal, int64_t deadline,
	     struct fmha_plan **ret_plan, struct fmha_error *err);
struct fmha_plan *plan_ref(struct fmha_plan *plan);

/* The last reference releases the plan at the worker; never with a lock held. */
struct fmha_plan *plan_unref(struct fmha_plan *plan);

/* @ret_connection, @ret_pending: given. */
int plan_start(struct fmha_plan *plan, const struct fmha_run_options *options, int64_t deadline,
	       struct connection **ret_connection, struct pending **ret_pending,
	       struct fmha_error *err);

/* Waits for a run's answer, as long as earlier runs of the plan took. */
int plan_wait(struct fmha_plan *plan, const struct fmha_run_options *options, struct connection *c,
	      struct pending *pending, int64_t deadline, struct fmha_error *err);

/* The outcome of an answered run. */
int plan_outcome(const struct pending *pending, struct fmha_run_result *ret_result,
		 struct fmha_error *err);

/* Asks for the end of a run and does not wait. */
void plan_cancel(struct connection *connection, uint32_t request, int64_t deadline);

int check_run_options(const struct fmha_run_options *options, struct fmha_error *err);
int64_t run_deadline(const struct fmha_device *device, const struct fmha_run_options *options);

/* ---- cache.c: plans by shape ---- */

/* Without where its tensors lie, and the dropout state. */
struct cache_key {
	struct fmha_problem problem;
	uint64_t hash;
};

void cache_key_of(const struct fmha_problem *problem, struct cache_key *ret_key);
/* @return: with a reference; NULL: there is none. */
struct fmha_plan *cache_find(struct fmha_device *device, const struct cache_key *key);
/* Keeps a reference of its own. Another thread may have made the same plan meanwhile: the first one
 * stays, except with @replace. */
void cache_put(struct fmha_device *device, const struct cache_key *key, struct fmha_plan *plan,
	       bool replace);
/* Drops the cached plans that may hold buffer @id; all with 0. */
void cache_drop(struct fmha_device *device, uint64_t id);

/* ---- arena.c ---- */

/* Its memory has ended at the worker: the next one is another. */
void arena_discard(struct arena *arena);
int arena_take(struct fmha_device *device, uint64_t bytes, int64_t deadline,
	       struct arena **ret_arena, struct fmha_error *err);
void arena_give_back(struct arena *arena);

/* The same as an answer's callback: a run that nobody waits for has let go of its arena. */
void arena_on_answer(void *arena);

/* Frees idle arenas: all, or those above the limit. */
void arena_trim(struct fmha_device *device, bool all);

#endif
