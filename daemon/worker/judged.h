/* SPDX-License-Identifier: MIT */
/*
 * judged.h: judged integers that lie on the device from run to run. The layers of a model read the same page tables and
 * lengths, so a session keeps what its last runs have uploaded, with the words that lie there: a run whose own words,
 * fetched and judged as ever, are the same needs no upload. The memory is the daemon's and nobody writes it again.
 *
 * A session's runs are on one stream, in order. What was uploaded by a run that has ended well is there for all later ones.
 */
#ifndef FMHAD_WORKER_JUDGED_H
#define FMHAD_WORKER_JUDGED_H

#include <dispatch/plan.h>

#include "worker.h"

struct judged {
	uint32_t n_references;
	struct session *session;
	struct device_memory memory;
	uint64_t bytes, charged_bytes;
	struct plan_indices *indices; /* that lie there; NULL: none yet */
};

/* Room for @bytes, charged to the user. Return: 0, FMHA_EQUOTA or FMHA_ENOMEM. */
int judged_new(struct session *session, uint64_t bytes, struct judged **ret_judged,
	       struct fmha_error *err);
struct judged *judged_unref(struct judged *judged);

/* What the session keeps of that size, referenced; NULL: nothing. */
struct judged *judged_find(struct session *session, uint64_t bytes);
/* Whether the same words lie there. Any thread that holds a reference; @judged may be NULL. */
bool judged_has(const struct judged *judged, const struct plan_indices *indices);
/* The run that has uploaded @indices (taken) is through: others may use them. Takes a reference. */
void judged_keep(struct judged *judged, struct plan_indices *indices);
/* Nothing is kept any more; runs have theirs until they end. */
void judged_forget(struct session *session);

#endif
