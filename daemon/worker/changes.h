/* SPDX-License-Identifier: MIT */
/*
 * changes.h: what administrators change about the kernels of a model. A worker judges it, the front
 * keeps it and has all workers of the model, this one too, restore what it has; then the client gets its
 * answer.
 */
#ifndef FMHAD_WORKER_CHANGES_H
#define FMHAD_WORKER_CHANGES_H

#include "worker.h"

/* REGISTRY_SET_PRIORITY, REGISTRY_LIFT, REGISTRY_FORGET: answered later. Return: 0, or an error to
 * answer. */
int changes_request(struct session *session, uint32_t id, enum proto_method method,
		    const union proto_any_params *params, struct fmha_error *err);
/* Answers request @id of @method once the front has answered. @fd: -1 or taken. @n_kernels: to answer
 * with, unless the front knows better. */
void changes_send(struct session *session, uint32_t id, enum proto_method method,
		  const struct proto_registry_change_params *params, int fd, uint64_t n_kernels);

#endif
