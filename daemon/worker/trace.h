/* SPDX-License-Identifier: MIT */
/*
 * trace.h: what a worker has done lately, kept only while somebody asks: the first request for it on a
 * connection starts the recording, which the connection's end stops. Each connection reads on from
 * where it was. Users see their own work, administrators everybody's.
 */
#ifndef FMHAD_WORKER_TRACE_H
#define FMHAD_WORKER_TRACE_H

#include "request.h"
#include "worker.h"

/* Answers method trace. Return: 0, or a negative FMHA_E* and no answer. */
int trace_request(struct session *session, uint32_t id, struct fmha_error *err);
/* The session does not read any more. */
void trace_forget(struct session *session);

/* A run is through, or a build is. Nothing happens unless somebody reads. */
void trace_run(const struct request *request, uint64_t now);
void trace_build(struct worker *worker, const struct device_build *build, bool succeeded);

#endif
