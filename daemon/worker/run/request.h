/* SPDX-License-Identifier: MIT */
/*
 * request.h: one run on its way from the message to the answer; what run.c, bind.c and schedule.c
 * share.
 *
 *   WAITING   in its session's queue, with references to its buffers and fences
 *   FETCHING  its integer tensors are being copied to the host, behind its waits
 *   BINDING   another thread checks them: too many for the loop
 *   BOUND     it has its arguments and waits for its turn on the device
 *   RUNNING   the device has it
 *
 * Most runs go from WAITING to RUNNING at once. Of a session only the first request in its queue
 * can be in between, so that a session's runs keep their order.
 */
#ifndef FMHAD_WORKER_REQUEST_H
#define FMHAD_WORKER_REQUEST_H

#include <device/device.h>
#include <dispatch/plan.h>

#include "worker.h"

/* ---- staging ---- */

/*
 * What a run needs on a device whose memory the host does not see. Its integer tensors
 * are copied to the host behind whatever the run waits for, checked there, and the checked copies are
 * uploaded, unless they lie on the device already (below); so is the head of a backward
 * workspace. All of that lies in one block that the device copies from and to by itself, so that no
 * thread waits for a copy. Tensors in host memory (a client's memfd) have a copy on the device,
 * which is brought up to date before the run and copied back after it. On a device that shares the
 * host's memory there is only the checked copy.
 */

/* All zero: none. */
struct staging {
	struct device_memory block;
	void *head;       /* of the workspace, as prepared; in the block */
	void *tables;     /* checked copies, for the upload; in the block */
	uint64_t fetched; /* bit role: bindings[].host lies in the block */
};

/* Bytes that checked integers need behind a workspace, where they have no place of their own; 0 on a
 * device that shares memory. */
uint64_t staging_device_bytes(const struct device *device, const struct plan *plan,
			      uint64_t workspace_bytes);

/* Bytes of the host's memory that a run takes: the block, and the checked copies. */
uint64_t staging_host_bytes(const struct device *device, const struct plan *plan);

/*
 * Makes the block and points bindings[].host of integer tensors into it. Return: 1: staging_fetch()
 * has something to copy before plan_read(), 0: it has not, FMHA_ENOMEM,
 * FMHA_ENOTSUP.
 */
int staging_init(struct device *device, const struct plan *plan,
		 struct plan_binding bindings[FMHA_N_TENSORS], struct staging *staging,
		 struct fmha_error *err);
void staging_deinit(struct device *device, struct staging *staging);

bool staging_is_fetched(const struct staging *staging, uint32_t role);

/* Makes @launch one that only copies the integer tensors to the host. */
void staging_fetch(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
		   const struct staging *staging, struct device_launch *launch);

/* Where that place is. */
void *staging_indices(const struct plan *plan, const struct plan_indices *indices,
		      const struct device_memory *workspace);

/* After plan_place(): says what to copy and clear. @tables: where checked integers go; NULL: they are there. */
void staging_upload(struct device *device, const struct plan *plan,
		    const struct plan_binding bindings[FMHA_N_TENSORS],
		    const struct plan_indices *indices, const struct staging *staging,
		    const struct device_memory *workspace, void *tables,
		    struct device_launch *launch);

/* ---- request ---- */

enum request_state {
	REQUEST_WAITING,
	REQUEST_FETCHING,
	REQUEST_BINDING,
	REQUEST_BOUND,
	REQUEST_RUNNING,
};

struct request {
	struct list in_worker; /* worker.runs.requests or .free_requests */
	struct list in_session;
	struct session *session;
	struct session_plan *plan;
	struct proto_run_params params;
	uint32_t id;
	enum request_state state;
	bool fenced;                      /* counted in session.n_fenced */
	bool timed_out;                   /* its deadline is over */
	bool cancelled;                   /* by the client, or because it is gone */
	bool answered;                    /* with fences: when it was taken */
	uint64_t arrived_ns, deadline_ns; /* deadline 0: none */
	uint64_t estimate_ns;             /* of device time, charged when it was started */
	double work;                      /* plan_args_work() of its arguments */
	uint64_t submitted_ns;            /* once RUNNING */

	/* References, from its arrival on. */
	struct buffer *buffers[FMHA_N_TENSORS + 2 * PROTO_MAX_FENCES];
	struct event *events[2 * PROTO_MAX_FENCES];
	uint32_t n_buffers, n_events;
	struct plan_binding bindings[FMHA_N_TENSORS];

	/* Memory, from the moment when it leaves WAITING; a workspace that its lengths size, once
	 * they are checked. */
	struct device_memory workspace;
	struct staging staging;
	struct plan_indices *indices;
	uint64_t charged_bytes; /* for all three */
	struct checked *known,
		*fresh; /* where they may lie on the device already; where they go else */
	bool is_known;  /* they do; checked by bind_arguments() */

	struct device_launch *launch; /* stays with the request for its next life */
	uint64_t bound_serial;        /* whose arguments the launch still holds; 0: nobody's */
	void *bound_workspace;        /* that they were made for */

	struct offload bind;
	struct fmha_error bind_error; /* code FMHA_OK: bound */
};

static inline bool request_has_fences(const struct request *request)
{
	return request->params.n_waits > 0 || request->params.n_signals > 0;
}

/* ---- bind.c: from a request to a launch ---- */

/* Looks up and references every buffer and event. On failure the request holds what it got. */
int bind_references(struct request *request, struct fmha_error *err);

/*
 * Workspace, unless its size is to be seen, staging and the room for checked integers, charged to
 * the user.
 * Return: 1: integer tensors have to be fetched first, 0: bind_now() may follow, FMHA_EQUOTA,
 * FMHA_ENOMEM.
 */
int bind_memory(struct request *request, struct fmha_error *err);

/* Makes the launch one that fetches the integer tensors. */
void bind_fetch(struct request *request);

/* Whether @before, which has its launch, writes integers that @request fetches. */
bool bind_writes_what_is_fetched(const struct request *before, const struct request *request);

/* Whether checking the integers takes too long for the loop. */
bool bind_is_large(const struct request *request);

/* Checks the integers and fills in the arguments, in the workspace if it is there; touches nothing
 * but the request. Any thread. */
void bind_arguments(struct request *request);

/* Makes the launch ready to run, after bind_arguments(), with the workspace that was not taken yet.
 * Return: 0 or why not. */
int bind_launch(struct request *request, struct fmha_error *err);

/* bind_arguments() and bind_launch(), or nothing of it when the launch still fits. */
int bind_now(struct request *request, struct fmha_error *err);

/* Makes the launch of a run that has failed: its signals are given all the same, because the
 * client's stream waits for them. */
void bind_signals_only(struct request *request);

/* Gives back everything that the first two have taken. */
void bind_release(struct request *request);

/* ---- request.c ---- */

/* Another life of a request, or a new one; NULL: out of memory. */
struct request *request_new(struct worker *worker);
/* Takes the request out of the books. */
void request_retire(struct request *request);
/* The request ends without having run, or without having run to its end. */
void request_fail(struct request *request, const struct fmha_error *error);
/* The launch is through: the answer, and the request's end. */
void request_complete(struct request *request, uint64_t now);
/* With fences: the client may go on. */
void request_answer_queued(struct request *request);

/* ---- schedule.c: whose turn it is ---- */

/* The session's queue has changed: starts what may start. */
void schedule_session(struct session *session);
/* A run that is not with the device cannot go on: its client's stream may wait for its signals all
 * the same. */
void schedule_give_up(struct request *request, const struct fmha_error *error);

/* ---- leftovers ---- */

/*
 * The memory of a run that is over. What is large takes long to give back, 0.2 us a page:
 * that is another thread's work. The user's next run may need the memory before that is done, so that of a
 * few runs it counts no more from now on; of more than that it does until it is gone.
 */

#define LEFTOVERS_LEAST (256u << 10) /* bytes; less is freed at once */

/* @indices, of @indices_bytes, and @workspace: taken, each may be NULL or empty. @charged_bytes: of
 * memory, for both. */
void leftovers_free(struct worker *worker, struct account *account, struct plan_indices *indices,
		    uint64_t indices_bytes, struct device_memory *workspace,
		    uint64_t charged_bytes);

/* ---- checked ---- */

/*
 * Checked integers that lie on the device from run to run. The layers of a model read the same page tables and
 * lengths, so a session keeps what its last runs have uploaded, with the words that lie there: a run whose own words,
 * fetched and checked as ever, are the same needs no upload. The memory is the daemon's and nobody writes it again.
 *
 * A session's runs are on one stream, in order. What was uploaded by a run that has ended well is there for all later ones.
 */

struct checked {
	uint32_t n_references;
	struct session *session;
	struct device_memory memory;
	uint64_t bytes, charged_bytes;
	struct plan_indices *indices; /* that lie there; NULL: none yet */
};

/* Room for @bytes, charged to the user. Return: 0, FMHA_EQUOTA or FMHA_ENOMEM. */
int checked_new(struct session *session, uint64_t bytes, struct checked **ret_checked,
		struct fmha_error *err);
struct checked *checked_unref(struct checked *checked);

/* What the session keeps of that size, referenced; NULL: nothing. */
struct checked *checked_find(struct session *session, uint64_t bytes);
/* Whether the same words lie there. Any thread that holds a reference; @checked may be NULL. */
bool checked_has(const struct checked *checked, const struct plan_indices *indices);
/* The run that has uploaded @indices (taken) is through: others may use them. Takes a reference. */
void checked_keep(struct checked *checked, struct plan_indices *indices);
/* Nothing is kept any more; runs have theirs until they end. */
void checked_forget(struct session *session);

#endif
