/* SPDX-License-Identifier: MIT */
/*
 * tuner.h: measures kernels on this worker's device: for administrators who ask for it, and by itself,
 * while the device is idle, for what clients have used.
 *
 * One launch at a time, only while no client's run is pending, on memory of its own. A run that comes
 * meanwhile waits for at most that launch; on a device that shares the host's memory it does not even
 * wait, since the launch is ended. What was measured goes to the registry and, through the front, to
 * disk and to the other workers of the model.
 */
#ifndef FMHAD_WORKER_TUNER_H
#define FMHAD_WORKER_TUNER_H

#include "worker.h"

struct tuner;

/* Return: 0, FMHA_ENOMEM. */
int tuner_new(struct worker *worker, struct tuner **ret_tuner, struct fmha_error *err);

/* Answers request @id when it is done, or the budget is used up. Return: 0, or an error to answer. */
int tuner_request(struct session *session, uint32_t id, const struct proto_tune_params *params,
		  struct fmha_error *err);
/* The client is gone. */
void tuner_forget(struct session *session);

/* A client's run has come: the device is its. */
void tuner_yield(struct tuner *tuner);
/* The last pending run has ended. */
void tuner_resume(struct tuner *tuner);

/* Clients have launched on the device themselves, and tell so once a minute. */
void tuner_used_by_clients(struct tuner *tuner);

/* {"measured", "busy", "device_ns", ...} for status; given. */
struct cJSON *tuner_status_json(const struct tuner *tuner);

#endif
