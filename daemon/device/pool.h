/* SPDX-License-Identifier: MIT */
/*
 * pool.h: threads that work on several jobs at once, in turns.
 *
 * A job is a list of steps, each a number of independent tasks; all tasks of a step end before the
 * next step starts. Jobs belong to queues, queues to users: of one queue only the first job is
 * under way, the others follow in order.
 *
 * Turns go by user, then by queue, by the time that tasks have taken (base/fair.h). With several
 * jobs under way a thread leaves its job after POOL_TURN_NS, at the next end of a task, and takes
 * the one whose turn it is; a small job waits for at most one turn of a large one, however many
 * large ones there are. Between the queues of one user turns are longer, so that no more of its
 * jobs than there are threads have their data in the caches. Alone, a job keeps its threads without
 * a lock being touched, and what it takes is charged to nobody.
 *
 * Threads without work sleep; nothing wakes them but work.
 */
#ifndef FMHAD_DEVICE_POOL_H
#define FMHAD_DEVICE_POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <base/fair.h>
#include <base/list.h>

/* Backward has up to 131 phases; what a job does not use of its steps is never touched. */
#define POOL_MAX_STEPS  192
#define POOL_MOST_TASKS (UINT64_C(1) << 39)
#define POOL_TURN_NS    100000
#define POOL_ROUND_NS   10000000 /* a queue's turn among those of its user, for each thread */

struct pool;

struct pool_step {
	uint64_t n_tasks; /* below POOL_MOST_TASKS */
	/* @scratch: the thread's own, scratch_bytes of the job, 64-byte aligned */
	void (*run)(const struct pool_step *step, uint64_t task, void *scratch);
	const void *kernel, *args;
	const char *name; /* for whoever asks what a thread is doing */
	void *workspace;
	int phase;
	int n_threads;
	uint64_t *opened_ns; /* NULL, or gets the time when its tasks may begin */
};

/* The caller fills in the first part; the memory must stay until on_done, which a pool thread
 * calls. */
struct pool_job {
	uint32_t n_steps;
	struct pool_step steps[POOL_MAX_STEPS];
	size_t scratch_bytes; /* the largest of its steps */
	void (*on_done)(struct pool_job *job);

	/* Set when it is done. */
	bool cancelled; /* some tasks may not have been run */
	atomic_bool out_of_memory;
	uint64_t started_ns, ended_ns;
	atomic_uintptr_t vanished; /* guard_end() of a task that was hit; 0: none */

	struct list in_queue;
	struct pool_queue *queue;
	atomic_uint_fast64_t ticket;  /* step << 40 | next task: both change at once */
	atomic_uint_fast64_t n_ended; /* tasks of the step under way */
	atomic_bool stop;             /* the remaining tasks are not run */
	uint32_t n_joined;
	bool finished;
	/* pool_stalled_ns()'s own */
	uint64_t seen_steps, seen_ns;
};

struct pool_queue {
	struct fair_session turn;
	struct list jobs;
};

/* @n_threads: 0: one for each core that the process may use. NULL when out of memory or threads. */
struct pool *pool_new(uint32_t n_threads);
/* No job may be left. Takes NULL. */
struct pool *pool_free(struct pool *pool);

uint32_t pool_n_threads(const struct pool *pool);
bool pool_is_idle(const struct pool *pool);

/* A queue of user @uid, whose share among users is @weight. Return: 0, or FMHA_ENOMEM. */
int pool_queue_init(struct pool *pool, struct pool_queue *queue, uint32_t uid, uint32_t weight);
/* No job may be left in it. */
void pool_queue_deinit(struct pool *pool, struct pool_queue *queue);

/* The job starts when those before it in its queue have ended. */
void pool_submit(struct pool *pool, struct pool_queue *queue, struct pool_job *job);

/*
 * The job ends as soon as the tasks under way have, which are asked to return early
 * (cpu_goes_on()); with none under way it ends at once, on the calling thread. on_done comes either
 * way; of a job that is in no queue (in_queue is an empty list then) nothing comes of it.
 */
void pool_cancel(struct pool *pool, struct pool_job *job);

/*
 * Nanoseconds for which a thread has computed since a task of the job last got ahead, as far as earlier calls
 * have seen; 0 while no thread is at it. Time in which the machine gave the thread no processor counts by one
 * POOL_PATIENCE-th: who is kept waiting does not hang. One thread asks.
 */
#define POOL_PATIENCE 10
uint64_t pool_stalled_ns(struct pool *pool, struct pool_job *job);

/* Runs all of it on the calling thread; on_done is not called. @scratch: scratch_bytes */
void pool_run_here(struct pool_job *job, void *scratch);

/* Lets the threads free their scratch memory, once; they sleep again afterwards. */
void pool_trim(struct pool *pool);

/* The name of the step that the calling thread is in, or NULL. */
const char *pool_current_name(void);

#endif
