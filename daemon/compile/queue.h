/* SPDX-License-Identifier: MIT */
/*
 * queue.h: builds in the background, most urgent first, each key once however many ask.
 *
 * A few threads take requests from a list, look in the cache and run compile helpers; the asker's
 * callback runs on one of those threads. Requests for the same code object join. Within a priority
 * the order is that of asking.
 */
#ifndef FMHAD_COMPILE_QUEUE_H
#define FMHAD_COMPILE_QUEUE_H

#include "compile.h"

enum compile_priority {
	COMPILE_URGENT,     /* a client waits for it */
	COMPILE_SOON,       /* a kernel set was loaded */
	COMPILE_BACKGROUND, /* ahead of time */
};

struct compile_queue_status {
	uint32_t queued, running;
	uint64_t hits, built, failed;
	char current[8][256]; /* names of kernels being compiled; n_current of them */
	uint32_t n_current;
};

struct compile_queue;

/*
 * Called once a request, from a thread of the queue.
 * @result: 0 or a negative FMHA_E*
 * @entry:  borrowed; NULL on failure, but for FMHA_EINVAL it may carry the compiler's log
 * @err:    borrowed; what went wrong
 */
typedef void (*compile_done)(void *owner, int result, const struct cache_entry *entry,
			     const struct fmha_error *err);

/* @config and @cache are kept. Return: 0, FMHA_ENOMEM, FMHA_EIO. */
int compile_queue_new(const struct compile_config *config, struct cache *cache, int n_threads,
		      struct compile_queue **ret_queue, struct fmha_error *err);

/* Ends running helpers, fails what waits with FMHA_ECANCELED, then joins the threads. */
struct compile_queue *compile_queue_free(struct compile_queue *queue);

/* The request is copied. Return: 0 (the callback will come), FMHA_ENOMEM. */
int compile_queue_submit(struct compile_queue *queue, const struct compile_request *request,
			 enum compile_priority priority, compile_done done, void *owner,
			 struct fmha_error *err);

/* Waits until nothing is queued or running; the last callbacks may still be under way. */
void compile_queue_drain(struct compile_queue *queue);

void compile_queue_status(struct compile_queue *queue, struct compile_queue_status *ret_status);

#endif
