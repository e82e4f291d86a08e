/* SPDX-License-Identifier: MIT */
/* job.h: one code object that somebody waits for, as the queue holds it. */
#ifndef FMHAD_COMPILE_JOB_H
#define FMHAD_COMPILE_JOB_H

#include <compile/queue.h>

#include "turns.h"

enum job_step {
	JOB_LOOKUP, /* is it in the cache? */
	JOB_BUILD,  /* it was not */
};

struct compile_job {
	struct compile_job *next;
	struct cache_key identity;      /* of the request: requests that are equal join */
	struct compile_waiter *waiters; /* in the order of asking */
	enum job_step step;
	struct compile_request request; /* its strings belong to the job */
	char **options;
	struct compile_target target; /* JOB_BUILD */
	int64_t not_before_ms;        /* JOB_BUILD: another process builds it; look again then */
	int64_t lock_deadline_ms;     /* ... and build it regardless then; 0: it was not locked */

	/* While it runs. */
	bool running;
	bool background;         /* of a shared queue: for nobody who waits */
	bool cancelled;          /* nobody waits any more: nobody may join either */
	int stop_fd;             /* an eventfd that ends it */
	struct turns_user *user; /* whom it runs for: one more reference */
	int64_t began_ms;        /* ... since when */
};

struct cache_key job_identity(const struct compile_request *request);

/* A copy of the request, nobody waiting yet; NULL: out of memory. */
struct compile_job *job_new(const struct compile_request *request);
/* Takes NULL. Nobody waits for it. */
struct compile_job *job_free(struct compile_job *job);

static inline void job_freep(struct compile_job **job)
{
	(void)job_free(*job);
}

#endif
