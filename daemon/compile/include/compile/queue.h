/* SPDX-License-Identifier: MIT */
/*
 * queue.h: builds in the background, each key once however many ask.
 *
 * A few threads look requests up in the cache and run compile helpers; the asker's callback runs on
 * one of those threads. Requests for the same code object join.
 *
 * Whose turn it is: first by class, then by user, the one for whom least time was spent,
 * then in the order of asking. A job that several wait for runs when the first of them has a turn,
 * and at the cost of that user. Among several users one job slot is left for those who have none
 * running, so that nobody waits for as long as somebody else's compiler likes. Looking something up
 * takes no slot: what is in the cache is delivered while every compiler is busy.
 *
 * Of a shared queue builds of COMPILE_BACKGROUND take at most half of the cores, at a lower priority than
 * the system's other processes; who asks for the same while it is under way gets it at that pace.
 *
 * What nobody waits for any more is not done: a queued job leaves the queue, a running one is
 * ended, unless its compiler has just finished; then the result is kept for the next who asks. The
 * time that it took stays charged to whoever it ran for.
 *
 * A key that another process has locked is looked at again every few milliseconds, without a slot,
 * and after ten seconds, or the build's deadline if that is sooner, built regardless.
 */
#ifndef FMHAD_COMPILE_QUEUE_H
#define FMHAD_COMPILE_QUEUE_H

#include <compile/compile.h>

enum compile_priority {
	COMPILE_URGENT,     /* a client waits for it */
	COMPILE_SOON,       /* a kernel set was loaded */
	COMPILE_BACKGROUND, /* ahead of time */
};

struct compile_queue_status {
	uint32_t queued, running;
	uint64_t hits, built, failed, cancelled;
	char current[8][256]; /* names of kernels being compiled; n_current of them */
	uint32_t n_current;
};

struct compile_queue;
struct compile_job;
struct turns_user;

/*
 * Called once a request, from a thread of the queue; the waiter is the caller's own again.
 * @result: 0 or a negative FMHA_E*
 * @entry:  borrowed; NULL on failure, but for FMHA_EINVAL it may carry the compiler's log
 * @err:    borrowed; what went wrong
 */
typedef void (*compile_done)(void *owner, int result, const struct cache_entry *entry,
			     const struct fmha_error *err);

/* Somebody who waits for a job. The memory is the asker's, the content the queue's. */
struct compile_waiter {
	struct compile_waiter *next;
	struct compile_job *job; /* NULL: it has ended, or was forgotten */
	struct turns_user *user;
	enum compile_priority priority;
	uint64_t number; /* in the order of asking */
	compile_done done;
	void *owner;
};

/*
 * @config, @cache: kept
 * @n_jobs: compilers at a time
 * @shared: several users ask: one compiler more runs for who has none running
 * Return: 0, FMHA_ENOMEM, FMHA_EIO.
 */
int compile_queue_new(const struct compile_config *config, struct cache *cache, int n_jobs,
		      bool shared, struct compile_queue **ret_queue, struct fmha_error *err);

/* Ends running helpers, fails what waits with FMHA_ECANCELED, then joins the threads. */
struct compile_queue *compile_queue_free(struct compile_queue *queue);

/*
 * The request is copied. @waiter: kept until @done is called or compile_queue_forget() has returned
 * true. Return: 0 (the callback will come), FMHA_ENOMEM.
 */
int compile_queue_submit(struct compile_queue *queue, const struct compile_request *request,
			 enum compile_priority priority, compile_done done, void *owner,
			 struct compile_waiter *waiter, struct fmha_error *err);

/* Return: true: no callback comes any more; false: it has come, or is under way. */
bool compile_queue_forget(struct compile_queue *queue, struct compile_waiter *waiter);

/* Waits until nothing is queued or running; the last callbacks may still be under way. */
void compile_queue_drain(struct compile_queue *queue);

void compile_queue_status(struct compile_queue *queue, struct compile_queue_status *ret_status);

#endif
