/* SPDX-License-Identifier: MIT */
/*
 * planning.h: requests that plan: plan, local_plan, explain, local_runs, and runs whose plan is chosen again. Where a model judges many
 * kernels in many numbers of splits that takes a millisecond and more: then it is a chore of the user's
 * (base/chores.h), one number of splits a step, and the request is served after the last one.
 */
#ifndef FMHAD_WORKER_PLANNING_H
#define FMHAD_WORKER_PLANNING_H

#include "worker.h"

/* Answers request @id, now or later. Return: 0, or a negative FMHA_E* and no answer. */
int planning_request(struct session *session, uint32_t id, enum proto_method method,
		     const union proto_any_params *params, struct fmha_error *err);
/* Chooses plan @id again by and by, when there is something to look at first. Return: whether there is. */
bool planning_renewal(struct session *session, uint64_t id, struct session_plan *plan);

#endif
