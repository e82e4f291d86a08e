/* SPDX-License-Identifier: MIT */
/* kernels.h: the registry of the worker's device and what clients may ask of it. */
#ifndef FMHAD_WORKER_KERNELS_H
#define FMHAD_WORKER_KERNELS_H

#include <registry/registry.h>

#include "worker.h"

/* Loads specs/ and opens the registry. A device that specs/ does not know works without one. */
int kernels_open(struct worker *worker, struct fmha_error *err);
/* Marks in the registry what nobody gets, until the next of them is over or the front has others. */
void kernels_mark_quarantine(struct worker *worker);
/* From now on kernels are chosen for this session: for its buffers (@local: for addresses that a problem's
 * offsets tell), and by what is in quarantine for its user now. */
void kernels_act_for(struct session *session, bool local);
/* For struct plan_device; @tensors: the session acted for; NULL: offsets are all there is. */
uint64_t kernels_locate(void *tensors, const struct fmha_tensor *tensor);
/* A device_quarantine: for the user acted for. @worker_pointer: struct worker. */
bool kernels_is_quarantined(void *worker_pointer, const char *kernel, uint64_t code);
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

#endif
