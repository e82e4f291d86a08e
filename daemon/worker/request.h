/* SPDX-License-Identifier: MIT */
/*
 * request.h: one run on its way from the message to the answer; what run.c, bind.c and schedule.c
 * share.
 *
 *   WAITING   in its session's queue, with references to its buffers and fences
 *   FETCHING  its integer tensors are being copied to the host, behind its waits
 *   BINDING   another thread judges them: too many for the loop
 *   BOUND     it has its arguments and waits for its turn on the device
 *   RUNNING   the device has it
 *
 * Most runs go from WAITING to RUNNING at once. Of a session only the first request in its queue
 * can be in between, so that a session's runs keep their order.
 */
#ifndef FMHAD_WORKER_REQUEST_H
#define FMHAD_WORKER_REQUEST_H

#include "staging.h"
#include "worker.h"

enum request_state {
	REQUEST_WAITING,
	REQUEST_FETCHING,
	REQUEST_BINDING,
	REQUEST_BOUND,
	REQUEST_RUNNING,
};

struct request {
	struct list in_worker; /* worker.requests or worker.free_requests */
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
	 * they are judged. */
	struct device_memory workspace;
	struct staging staging;
	struct plan_indices *indices;
	uint64_t charged_bytes; /* for all three */
	struct judged *known,
		*fresh; /* where they may lie on the device already; where they go else */
	bool is_known;  /* they do; judged by bind_arguments() */

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
 * Workspace, unless its size is to be seen, staging and the room for judged integers, charged to
 * the user.
 * Return: 1: integer tensors have to be fetched first, 0: bind_now() may follow, FMHA_EQUOTA,
 * FMHA_ENOMEM.
 */
int bind_memory(struct request *request, struct fmha_error *err);

/* Makes the launch one that fetches the integer tensors. */
void bind_fetch(struct request *request);

/* Whether @before, which has its launch, writes integers that @request fetches. */
bool bind_writes_what_is_fetched(const struct request *before, const struct request *request);

/* Whether judging the integers takes too long for the loop. */
bool bind_is_large(const struct request *request);

/* Judges the integers and fills in the arguments, in the workspace if it is there; touches nothing
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

/* ---- run.c ---- */

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

#endif
