/* SPDX-License-Identifier: MIT */
/* worker_registry.h: the registry of the worker's device and what clients may ask of it. */
#ifndef FMHAD_WORKER_REGISTRY_H
#define FMHAD_WORKER_REGISTRY_H

#include <registry/registry.h>

#include "run/request.h"
#include "worker.h"

/* ---- session_plan.c: for whom kernels are chosen ---- */

/* Marks in the registry what nobody gets, until the next of them is over or the front has others. */
void kernels_mark_quarantine(struct worker *worker);
/* From now on kernels are chosen for this session: for its buffers (@local: for addresses that a problem's
 * offsets tell), and by what is in quarantine for its user now. */
void kernels_act_for(struct session *session, bool local);
/* For struct plan_device; @tensors: the session acted for; NULL: offsets are all there is. */
uint64_t kernels_locate(void *tensors, const struct fmha_tensor *tensor);
/* Of struct device_calls: for the user acted for. @worker_pointer: struct worker. */
bool kernels_is_quarantined(void *worker_pointer, const char *kernel, uint64_t code);

/* ---- worker_registry.c ---- */

/* Loads specs/ and opens the registry. A device that specs/ does not know works without one. */
int kernels_open(struct worker *worker, struct fmha_error *err);
/* Statistics of the plan's kernels: a run of @ns in all. */
void kernels_count_run(struct worker *worker, struct session_plan *plan, uint64_t ns);
/* The document of worker_ready or worker_restore: sets, priorities, measured times.
 * @fd: borrowed.
 * Return: 0, also when there is nothing that this worker could use; FMHA_ENOMEM. */
int kernels_restore(struct worker *worker, int fd, struct fmha_error *err);
/* REGISTRY_*: answered later. @fd: taken. Return: 0, or an error to answer. */
int kernels_request(struct session *session, uint32_t id, enum proto_method method,
		    const union proto_any_params *params, int *fd, struct fmha_error *err);

/* Answers request @id. Return: 0, or an error to answer. */
int kernels_census(struct session *session, uint32_t id, struct fmha_error *err);

/* ---- changes ---- */

/*
 * What administrators change about the kernels of a model. A worker checks it, the front
 * keeps it and has all workers of the model, this one too, restore what it has; then the client gets its
 * answer.
 */

/* REGISTRY_SET_PRIORITY, REGISTRY_LIFT, REGISTRY_FORGET: answered later. Return: 0, or an error to
 * answer. */
int changes_request(struct session *session, uint32_t id, enum proto_method method,
		    const union proto_any_params *params, struct fmha_error *err);
/* Answers request @id of @method once the front has answered. @fd: -1 or taken. @n_kernels: to answer
 * with, unless the front knows better. */
void changes_send(struct session *session, uint32_t id, enum proto_method method,
		  const struct proto_registry_change_params *params, int fd, uint64_t n_kernels);

/* ---- pieces ---- */

/*
 * Answers that are long texts, written a piece at a time as a chore of their user's
 * (base/chores.h): into a memory file that grows and is charged with what is in it, not into memory that
 * is copied into one at the end.
 */

#define PIECE_BYTES (16u << 10)

struct pieces;

struct pieces_ops {
	enum proto_method method; /* its result is a json_result */
	/* Adds some lines, as many as fit in a small part of a turn and in PIECE_BYTES. Not called when the client has
	 * gone. Return: whether there are more. */
	bool (*write)(struct pieces *pieces);
	void (*free)(struct pieces *pieces);
};

/* Part of the caller's own struct. */
struct pieces {
	const struct pieces_ops *ops;
	struct session *session;
	uint32_t id;
	struct chore chore;
	int fd; /* -1: no piece is written yet */
	uint64_t bytes, charged_bytes;
	char *text;              /* PIECE_BYTES while write() is called: the piece */
	size_t n;                /* of it */
	struct fmha_error error; /* code FMHA_OK: none so far */
};

/* Answers request @id of the session, later. @pieces: taken. */
void pieces_start(struct pieces *pieces, const struct pieces_ops *ops, struct session *session,
		  uint32_t id);

/* A line of the answer. */
__attribute__((format(printf, 2, 3))) void pieces_put(struct pieces *pieces, const char *format,
						      ...);

/* ---- trace ---- */

/*
 * What a worker has done lately, kept only while somebody asks: the first request for it on a
 * connection starts the recording, which the connection's end stops. Each connection reads on from
 * where it was. Users see their own work, administrators everybody's.
 */

/* Answers method trace. Return: 0, or a negative FMHA_E* and no answer. */
int trace_request(struct session *session, uint32_t id, struct fmha_error *err);
/* The session does not read any more. */
void trace_forget(struct session *session);

/* A run is through, or a build is, where somebody reads: worker->trace is there. */
void trace_run(const struct request *request, uint64_t now);
void trace_build(struct worker *worker, const struct device_build *build, bool succeeded);

#endif
