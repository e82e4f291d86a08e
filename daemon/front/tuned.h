/* SPDX-License-Identifier: MIT */
/*
 * tuned.h: the front's part of the tuned database: it reads and writes the files (daemon/tune), hands
 * a worker what is known when it is ready, and passes on what one worker has measured, or an
 * administrator has changed through it, to all workers of the same model.
 *
 * Files are read and written on other threads. A disk that does not answer holds nobody up: a worker
 * waits for it for a moment, then starts with nothing and is told later.
 */
#ifndef FMHAD_FRONT_TUNED_H
#define FMHAD_FRONT_TUNED_H

#include <cjson/cJSON.h>

#include "front.h"

struct tuned;

struct tuned *tuned_new(struct front *front);
/* Writes what is not on disk yet, for at most two seconds. Takes NULL. */
struct tuned *tuned_free(struct tuned *tuned);

/* Called when what is remembered for the slot's worker has been read. @fd: that, taken; -1: it cannot be told */
typedef void (*tuned_restored)(struct worker_slot *slot, uint32_t id, int fd);
/* The slot's worker is ready: @restored is called, now or later, unless the worker ends first.
 * Return: 0, FMHA_ENOMEM. */
int tuned_attach(struct worker_slot *slot, uint32_t id,
		 const struct proto_worker_ready_params *params, tuned_restored restored,
		 struct fmha_error *err);
/* The slot's worker has ended. */
void tuned_detach(struct worker_slot *slot);

/* A worker has measured. Return: 0, FMHA_EINVAL, FMHA_ENOMEM. */
int tuned_add(struct worker_slot *slot, const struct proto_measured *row, struct fmha_error *err);
/* A worker has checked a change: it is kept and passed on; answered when it is on disk, or cannot be.
 * @fd: borrowed. Return: 0, or an error and no answer. */
int tuned_change(struct worker_slot *slot, uint32_t id,
		 const struct proto_registry_change_params *params, int fd, struct fmha_error *err);
/* The quarantine of the slot's device has changed. */
void tuned_keep_quarantine(struct worker_slot *slot);

/* How the slot's database stands; given. */
cJSON *tuned_status_json(const struct worker_slot *slot);

#endif
