/* SPDX-License-Identifier: MIT */
/*
 * worker.h: the process that owns one device.
 *
 * Its control socket leads to the front, which starts it, hands it clients (each a direct socket
 * and the identity that the front has checked), asks whether it is alive and for its status. A
 * client is a session: a connection, the buffers and plans registered on it, and the runs it has
 * asked for, which are executed in order. Runs of different sessions share the device.
 *
 * When the device fails there is nothing to save: the worker answers everything that is pending
 * with FMHA_EDEVICE, says in the shared page which kernel it was, and exits; the front starts
 * another one.
 */
#ifndef FMHAD_WORKER_H
#define FMHAD_WORKER_H

#include <uv.h>

#include <base/account.h>
#include <base/chores.h>
#include <base/connection.h>
#include <base/fair.h>
#include <base/memfd.h>
#include <base/histogram.h>
#include <base/worker_page.h>
#include <device/device.h>
#include <dispatch/plan.h>
#include <proto/error.h>

#include "census.h"
#include "offload.h"
#include "roof.h"
#include "session/table.h"

struct trace;
struct tuner;

#define WORKER_FAMILIES 12 /* more than there are */

/* The work that a family of kernels has done: of a plan's main stage. */
struct family_work {
	char name[24]; /* empty: not used yet */
	uint64_t n_runs, bytes, kernel_ns;
	double flops, roof_ns; /* roof_ns: that the roof allows for it */
};

/* How the loop learns that launches have ended, and when the next is about to. */
struct worker_ends {
	uv_async_t async; /* the device has ended launches */
	struct spin soon; /* looks for the next end, between alarm and soon_until_ns */
	uv_poll_t alarm_poll;
	int alarm_fd;                   /* a timerfd */
	_Atomic uint64_t alarm_ns;      /* when it was to go off */
	_Atomic uint64_t alarm_late_ns; /* by how much the loop comes later, about */
	_Atomic uint64_t soon_until_ns;
};

/* spare_memory.c: memory that nobody uses, and the device's spare memory. */
struct worker_idle {
	struct offload trimming;
	bool is_trimming;
	struct offload refill;
	uv_timer_t refill_timer;
	bool refilling;
	uv_timer_t trim_timer; /* once, some seconds after the last launch */
	bool untrimmed;        /* the pool has run something since the last trim */
};

/* Kernels, how they are chosen, and the plans made of them. */
struct worker_plans {
	struct plan_device device;
	uint32_t acting_uid; /* the user for whom kernels are being chosen */
	/* The page's quarantine of that version. */
	struct worker_quarantine quarantine;
	uint32_t quarantine_version;
	/* The registry has that of this version, and until then. */
	uint32_t marked_version;
	uint64_t marked_until_ns;
	struct spec_catalog *catalog;
	struct registry *registry; /* NULL: specs/ does not know this device */
	struct predict_model *model;
	struct census census;
	struct roof roof;
	struct slabs slabs;          /* of struct session_plan */
	uint64_t n;                  /* made so far */
	uint64_t n_by[PLAN_N_BASES]; /* of those whose kernels were chosen by time */
};

/* Requests to run, whose turn it is, and what was run. */
struct worker_runs {
	struct list requests;      /* every request that waits or runs */
	struct list free_requests; /* kept for the next run */
	uint32_t n_free_requests, n_pending;
	uv_timer_t tick; /* deadlines; runs while requests are pending */
	uint64_t last_tick_ns;
	struct fair turns;    /* of sessions, on a device that takes none itself */
	uint64_t device_load; /* of launches without fences: compute units that they can fill */
	bool giving_turns;
	uint64_t loop_serial; /* the plan whose kernel page->loop_kernel names; 0: none */
	uint64_t n, n_failed, n_cancelled;
	struct histogram queued, kernel, total; /* ns */
	struct family_work families[WORKER_FAMILIES];
};

struct worker {
	uv_loop_t loop;
	struct worker_page *page;
	struct config_device *config;
	struct config settings; /* the page's, as read last */
	struct limits limits;
	struct accounts accounts;
	struct connection_hub hub;
	struct memfds memfds;
	struct chores chores;
	struct connection control;
	const char *crash_method; /* ends this process when it is served next; NULL: none does */
	uint64_t started_ns;
	uv_signal_t on_hangup;
	bool draining;
	uint32_t drain_id;
	uv_check_t drained;

	struct device *device;
	struct device_waiter
		words; /* for word_kernel, where the runtime cannot wait for counters */
	const struct device_kernel *word_kernel;
	struct offloads offloads;
	struct worker_ends ends;
	struct worker_idle idle;
	struct worker_plans plans;
	struct worker_runs runs;
	struct list sessions;
	struct tuner *tuner;
	struct trace *trace; /* NULL: nobody reads one */
};

#define SESSION_CHECKED 4
struct session {
	struct connection connection;
	struct worker *worker;
	struct account *account;
	struct list in_sessions;
	uint64_t id;
	uint32_t uid, gid, pid;
	char client[PROTO_NAME_BYTES];
	struct table buffers, events, plans;
	uint64_t memory_bytes;
	struct device_stream *stream;
	struct device_stream *fetches; /* of integers that need not wait for runs; NULL: none yet */
	struct checked *checked[SESSION_CHECKED]; /* of its last runs */
	uint32_t next_checked;
	struct fair_session turn;
	struct list waiting, running; /* struct request, in order */
	uint32_t n_waiting, n_running;
	uint32_t n_fenced; /* runs with fences on the device: with one the session holds a queue */
	struct list preparing; /* struct preparing: plans whose kernels are being compiled */
	uint32_t n_offloads;   /* under way on other threads */
	uint64_t n_runs, bytes, kernel_ns;
	double flops, roof_ns;
	struct census_handle census;  /* of what it ran last */
	bool traces;                  /* it reads the trace, ... */
	uint64_t trace_read;          /* ... up to this event */
	bool kernels_busy;            /* a registry request is under way */
	struct fmha_error late_error; /* of a run that was answered when it was queued; the next
				       * run tells it */
	struct chore farewell;        /* gives back what it had */
	bool hung_up, closed;
};

/* Registered memory; runs hold references, so that it outlives its id while they use it. */
struct buffer {
	uint32_t n_references;
	struct worker *worker;
	struct account *account;
	struct device_memory memory;
	uint64_t charged_bytes;
	const void *owner; /* of the offload, never followed: the session may be gone */
	bool lost;         /* the client took pages away: not used any more */
	struct offload release;
};

/* An event of the client's; runs hold references. */
struct event {
	uint32_t n_references;
	struct worker *worker;
	struct account *account;
	struct device_event *event;

	struct offload offload; /* its import, its release */
	/* While it is imported. */
	struct session *session;
	uint32_t request, handle_bytes;
	uint8_t handle[sizeof(((struct proto_event_import_params *)0)->handle)];
	struct fmha_error error;
	int result;
};

/* Who is to blame when a kernel ends the worker. The name comes first: launches carry a pointer to
 * it, by which the rest is found. */
struct culprit {
	char kernel[PLAN_KERNEL_BYTES];
	uint64_t code; /* of its stage */
	uint32_t uid;
	uint64_t problem; /* a fingerprint */
};

struct session_plan {
	uint32_t n_references;
	struct worker *worker;
	struct account *account; /* NULL: nothing is charged yet */
	bool counted;            /* in ACCOUNT_PLANS */
	struct plan plan;
	bool local;   /* its client launches it: in no table, gone once it was answered */
	bool ready;   /* from here on nothing of plan and kernels changes */
	uint32_t uid; /* whose it is */
	struct census_handle census;
	uint64_t generation; /* of the registry, when it was last looked at for a better one */
	uint64_t told_bytes; /* the workspace that its client was told of */
	uint8_t told_alignment[FMHA_N_TENSORS]; /* log2: what its client was told to keep */
	bool renewing;                          /* another one is being made in its place */
	const struct device_kernel *kernels[PLAN_MAX_STAGES]; /* had in its user's name */
	struct registry_entry *entries[PLAN_MAX_STAGES];      /* NULL: not looked up yet */
	struct culprit culprits[PLAN_MAX_STAGES];
	uint64_t serial; /* no other plan of this worker ever has the same; from 1 */
	bool fixed; /* nothing of a run depends on what lies in a buffer: arguments and copies are those of the last */
	bool fetches;               /* integer tensors lie where the host has to copy them from */
	struct family_work *family; /* of the worker; NULL: not settled yet */
	double roof_ns;             /* what the roof allows for a run; 0: it is not known */
	uint32_t load;              /* compute units that its launches can fill */
	double tiny_work; /* runs of no more work may take the loop thread while the device is idle
			   */
	double ns_per_work; /* as measured; 0: not yet */
	uint32_t n_slow;    /* runs in a row that took longer than a tiny one may */
};

/* ---- serve.c: a client's connection ---- */

/* @fd: taken, unless it fails before it needs it. */
int session_new(struct worker *worker, int *fd, const struct proto_worker_attach_params *params,
		struct fmha_error *err);

/* ---- session.c: how long a session lives ---- */

/* Also of one that is half made, or NULL. */
void session_freep(struct session **session);
/* Frees the session once its connection is closed and its last run has ended. */
void session_release(struct session *session);
/* Something that was under way on another thread, n_offloads, has been dealt with; or comes too
 * late. */
void session_offload_ended(struct session *session);
void session_offload_late(struct session *session, uint32_t request, const struct fmha_error *err);

/* Whether the connection may own one more. Return: 0 or FMHA_EQUOTA. */
static inline int session_has_room(struct session *session, enum limit limit,
				   const struct table *table, const char *what,
				   struct fmha_error *err)
{
	struct limits *limits = &session->worker->limits;

	if (!limit_exceeded(limits, limit, (uint64_t)table->n_used + 1))
		return 0;
	return fmha_error_set(err, FMHA_EQUOTA, "more than %llu %s on one connection",
			      (unsigned long long)limits->value[limit], what);
}

/* ---- buffer.c ---- */

/* These answer request @id, now or later. Return: 0, or a negative FMHA_E* and no answer. */
int buffer_create(struct session *session, uint32_t id,
		  const struct proto_buffer_create_params *params, struct fmha_error *err);
/* @fd: taken. */
int buffer_import(struct session *session, uint32_t id,
		  const struct proto_buffer_import_params *params, int *fd, struct fmha_error *err);
/* Return: 0 or FMHA_ENOENT. */
int buffer_release(struct session *session, uint64_t id, struct fmha_error *err);
struct buffer *buffer_unref(struct buffer *buffer);

/* ---- session_plan.c: a plan that a session has, and its kernels ---- */

/*
 * The account's user has the kernel once more; the first time it is charged, with the bytes of its code.
 * NULL is no kernel.
 * Return: 0, FMHA_EQUOTA, FMHA_ENOMEM.
 */
int held_take(struct device *device, struct account *account, const struct device_kernel *kernel,
	      struct fmha_error *err);
/* Once less. */
void held_drop(struct device *device, struct account *account, const struct device_kernel *kernel);

/* One reference, nothing charged; NULL: out of memory. */
struct session_plan *session_plan_allocate(struct session *session);
struct session_plan *session_plan_unref(struct session_plan *plan);
/*
 * The kernels become the plan's: its user has them from now on, and pays for each once.
 * Return: 0, FMHA_EQUOTA or FMHA_ENOMEM; then it has none.
 */
int session_plan_take_kernels(struct session_plan *plan,
			      const struct device_kernel *const kernels[PLAN_MAX_STAGES],
			      struct fmha_error *err);
/* Settles what follows from the kernels that the plan has got. */
void session_plan_settle(struct session *session, struct session_plan *plan,
			 struct proto_plan_result *result);
/* By what its kernels were chosen: named ones were not, and a plan without work has none. */
void session_plan_count(struct worker *worker, const struct plan *plan);
/* Whether another version may take its place: results that must stay the same, and kernels that were
 * named, do. */
bool plan_may_change(const struct plan *plan);
/* Puts a new version in the place of plan @id. */
void session_plan_replace(struct session *session, uint64_t id, const struct plan *next,
			  const struct device_kernel *const kernels[PLAN_MAX_STAGES]);
/* Return: 0 or FMHA_ENOENT. */
int session_plan_release(struct session *session, uint64_t id, struct fmha_error *err);

/* ---- plans.c: what a session asks for, and plans that wait for their kernels ---- */

/* Of struct device_calls: asks the front. @worker_pointer: struct worker. */
int prepare_build(void *worker_pointer, struct device_build *build, struct fmha_error *err);
/* The same: tells the front. */
void prepare_cancel_build(void *worker_pointer, struct device_build *build);
/* The client is gone. */
void prepare_forget(struct session *session);

/*
 * Requests that plan: plan, local_plan, explain, local_runs, and runs whose plan is chosen again. Where a model estimates many
 * kernels in many numbers of splits that takes a millisecond and more: then it is a chore of the user's
 * (base/chores.h), one number of splits a step, and the request is served after the last one.
 */
/* Answers request @id, now or later. Return: 0, or a negative FMHA_E* and no answer. */
int planning_request(struct session *session, uint32_t id, enum proto_method method,
		     const union proto_any_params *params, struct fmha_error *err);
/*
 * Before a run: has something faster become known? Then another version of the plan is made in the
 * background, which takes its place when it fits what the client was told. Plans whose results must
 * not change, or whose kernels were named, stay as they are.
 */
void session_plan_refresh(struct session *session, uint64_t id, struct session_plan *plan);

/* ---- local_plan.c: what clients need to launch in contexts of their own ---- */

/* Answers request @id with the plan, all kernels of which are ready. @tables: NULL: it has none. */
void local_answer(struct session *session, uint32_t id, const struct plan *plan,
		  const struct device_kernel *const kernels[PLAN_MAX_STAGES],
		  const struct device_kernel *tables);
/* These answer request @id. Return: 0, or FMHA_E* and no answer. */
/* Counts what a client has run itself, for the census; tells it of a better plan. */
int local_runs(struct session *session, uint32_t id, const struct proto_local_runs_params *params,
	       struct fmha_error *err);
int local_code(struct session *session, uint32_t id, const struct proto_code_params *params,
	       struct fmha_error *err);

/* ---- event.c ---- */

/* Answers request @id, now or later. Return: 0, or a negative FMHA_E* and no answer. */
int session_event_import(struct session *session, uint32_t id,
			 const struct proto_event_import_params *params, struct fmha_error *err);
/* Return: 0 or FMHA_ENOENT. */
int event_release(struct session *session, uint64_t id, struct fmha_error *err);
struct event *event_unref(struct event *event);

/* ---- run.c: what a session has asked to run ---- */

void run_request(struct session *session, uint32_t id, const struct proto_run_params *params);
/* Return: 0 or FMHA_ENOENT. */
int run_cancel(struct session *session, uint32_t id, struct fmha_error *err);
/* The client is gone: what waits is dropped, what runs is stopped. */
void run_cancel_all(struct session *session);

/* ---- status.c ---- */

/* Answers the front's request @id with the worker's part of status, later. Return: 0, FMHA_ENOMEM. */
int worker_status(struct worker *worker, uint32_t id, struct fmha_error *err);

/* ---- lasting_memory.c ---- */

/* Both answer the front's request @id, later. Return: 0, FMHA_ENOMEM, FMHA_EBUSY. */
int lasting_memory_make(struct worker *worker, uint32_t id,
			const struct proto_worker_memory_params *params, struct fmha_error *err);
/* @fd: -1 when it was taken. */
int lasting_memory_clear(struct worker *worker, uint32_t id,
			 const struct proto_worker_clear_params *params, int *fd,
			 struct fmha_error *err);

/* ---- fail.c ---- */

/* From now on a crash leaves in @page who is to blame. */
void worker_report_crashes(struct worker_page *page);
/* Answers everything that is pending with @error. */
void worker_answer_all(struct worker *worker, const struct fmha_error *error);
/* The device is beyond use: answers, records, exits. @kernel: of a struct culprit, or NULL. */
void worker_fail(struct worker *worker, const char *kernel, const struct fmha_error *error)
	__attribute__((noreturn));

/* ---- spare_memory.c ---- */

/* Has the device refill its spare memory, unless that is under way, @after_ms from now: not while
 * the client that took it goes on to its first run, which the driver would make wait. */
void worker_refill(struct worker *worker, uint32_t after_ms);

/* Nothing runs any more: some time from now gives back what only speeds up the next launch. */
void worker_trim_soon(struct worker *worker);

#endif
