/* SPDX-License-Identifier: MIT */
/*
 * pool.c: see pool.h.
 *
 * A thread joins a job under the lock, then draws tickets from it without one. A ticket names the
 * step and the task together, so that a thread that is late by a whole step draws a number that is
 * too high for the step it sees, and leaves. Whoever ends the last task of a step opens the next
 * one by storing a new ticket. A finished job is handed over by the last thread to leave it: then
 * nobody can be reading its ticket any more.
 *
 * A queue has a turn while its first job has tickets. That it has none left is noticed by the
 * thread that is sent there next.
 */
#include "pool.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <base/clock.h>
#include <device/guard.h>
#include <kernels/cpu_progress.h>

#define TASK_BITS    40
#define TASK_MASK    ((UINT64_C(1) << TASK_BITS) - 1)
#define SCRATCH_KEEP (1u << 16) /* bytes that survive pool_trim() */

struct pool_thread {
	struct pool *pool;
	pthread_t thread;
	void *scratch;
	size_t scratch_bytes;
	uint64_t seen_cpu_ns;                        /* pool_stalled_ns()'s own */
	_Alignas(64) _Atomic(struct pool_job *) job; /* that it is at */
	struct cpu_progress progress;
};

struct pool {
	pthread_mutex_t mutex;
	pthread_cond_t work;
	struct fair fair;
	atomic_uint n_jobs; /* under way */
	uint64_t shared_ns; /* since when more than one is */
	uint32_t n_sleeping;
	uint64_t n_to_wake; /* by whoever gives up the lock */
	uint32_t trim_generation;
	bool stopping;
	uint32_t n_threads;
	struct pool_thread threads[];
};

static _Thread_local const char *volatile current_name;

const char *pool_current_name(void)
{
	return current_name;
}

static bool has_tasks(struct pool_job *job)
{
	uint64_t ticket = atomic_load(&job->ticket);
	uint32_t step = (uint32_t)(ticket >> TASK_BITS);

	return step < job->n_steps && (ticket & TASK_MASK) < job->steps[step].n_tasks;
}

/* Gives the lock up, then wakes as many sleepers as open_step() has found tasks for: a thread that
 * woke while the lock is held would only sleep again. */
static void unlock_and_wake(struct pool *pool)
{
	uint64_t n = pool->n_to_wake < pool->n_sleeping ? pool->n_to_wake : pool->n_sleeping;
	bool all = n > 1 && n == pool->n_sleeping;

	pool->n_to_wake = 0;
	pthread_mutex_unlock(&pool->mutex);
	if (all)
		pthread_cond_broadcast(&pool->work);
	else
		while (n-- > 0)
			pthread_cond_signal(&pool->work);
}

static void note_opening(const struct pool_step *step)
{
	if (step->opened_ns)
		*step->opened_ns = clock_ns();
}

/* Opens the first step from @step on that has tasks, or ends the job. The lock is held. */
static void open_step(struct pool *pool, struct pool_job *job, uint32_t step)
{
	while (step < job->n_steps && job->steps[step].n_tasks == 0)
		step++;
	if (atomic_load(&job->stop))
		step = job->n_steps;
	atomic_store(&job->n_ended, 0);
	atomic_store(&job->ticket, (uint64_t)step << TASK_BITS);
	if (step < job->n_steps) {
		note_opening(&job->steps[step]);
		pool->n_to_wake += job->steps[step].n_tasks;
		fair_activate(&job->queue->turn);
	} else {
		job->finished = true;
	}
}

static struct pool_job *first_job(struct pool_queue *queue)
{
	return container_of(queue->jobs.next, struct pool_job, in_queue);
}

static void start_job(struct pool *pool, struct pool_job *job)
{
	if (atomic_fetch_add(&pool->n_jobs, 1) == 1)
		pool->shared_ns = clock_ns();
	open_step(pool, job, 0);
}

/* Takes a job off, under way or not, and starts the next of its queue. The lock is held. */
static void end_job(struct pool *pool, struct pool_job *job)
{
	struct pool_queue *queue = job->queue;
	bool under_way = first_job(queue) == job;

	job->ended_ns = clock_ns();
	job->cancelled = atomic_load(&job->stop);
	list_remove(&job->in_queue);
	if (!under_way)
		return;
	atomic_fetch_sub(&pool->n_jobs, 1);
	if (list_is_empty(&queue->jobs))
		fair_deactivate(&queue->turn);
	else
		start_job(pool, first_job(queue));
}

/* The job whose turn it is, with the caller joined to it, or NULL. The lock is held. */
static struct pool_job *join_job(struct pool *pool)
{
	struct fair_session *turn;

	while ((turn = fair_next(&pool->fair))) {
		struct pool_job *job = first_job(container_of(turn, struct pool_queue, turn));

		if (!has_tasks(job)) {
			fair_deactivate(turn);
			continue;
		}
		if (job->started_ns == 0)
			job->started_ns = clock_ns();
		job->n_joined++;
		return job;
	}
	return NULL;
}

/*
 * @since_ns: when the caller joined. Time that nobody else wanted is not charged: who comes later
 * would be ahead by all of it.
 * Return: the job when it is over and the caller must hand it back. The lock is held.
 */
static struct pool_job *leave_job(struct pool *pool, struct pool_job *job, uint64_t since_ns)
{
	if (since_ns < pool->shared_ns)
		since_ns = pool->shared_ns;
	if (atomic_load(&pool->n_jobs) > 1)
		fair_charge(&job->queue->turn, (int64_t)(clock_ns() - since_ns));
	if (--job->n_joined > 0 || !job->finished)
		return NULL;
	end_job(pool, job);
	return job;
}

static bool reserve_scratch(struct pool_thread *thread, size_t bytes)
{
	void *scratch;

	if (thread->scratch_bytes >= bytes)
		return true;
	bytes = (bytes + SCRATCH_KEEP - 1) & ~(size_t)(SCRATCH_KEEP - 1);
	scratch = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (scratch == MAP_FAILED)
		return false;
	if (thread->scratch)
		munmap(thread->scratch, thread->scratch_bytes);
	thread->scratch = scratch;
	thread->scratch_bytes = bytes;
	return true;
}

static void trim_scratch(struct pool_thread *thread)
{
	if (thread->scratch_bytes <= SCRATCH_KEEP)
		return;
	munmap(thread->scratch, thread->scratch_bytes);
	thread->scratch = NULL;
	thread->scratch_bytes = 0;
}

static void run_task(struct pool_job *job, const struct pool_step *step, uint64_t task,
		     void *scratch)
{
	uintptr_t vanished;

	current_name = step->name;
	guard_begin();
	step->run(step, task, scratch);
	vanished = guard_end();
	current_name = NULL;
	if (vanished)
		atomic_store(&job->vanished, vanished); /* any of several is as good */
}

/* A stopped job's thread ends @job's remaining tasks of the step at once: there may be billions.
 * Return: how many. The caller has not ended a task of the step, which therefore stays open. */
static uint64_t skip_tasks(struct pool_job *job, uint32_t number)
{
	uint64_t n = job->steps[number].n_tasks;
	uint64_t next = atomic_exchange(&job->ticket, (uint64_t)number << TASK_BITS | n) &
			TASK_MASK;

	return next < n ? n - next : 0;
}

/* Draws a task of @job and runs it. Return: false: none is left. */
static bool do_task(struct pool *pool, struct pool_job *job, void *scratch)
{
	uint64_t ticket = atomic_fetch_add(&job->ticket, 1), task = ticket & TASK_MASK, n = 1;
	uint32_t number = (uint32_t)(ticket >> TASK_BITS);
	const struct pool_step *step = &job->steps[number];

	if (number >= job->n_steps || task >= step->n_tasks)
		return false;
	if (atomic_load_explicit(&job->stop, memory_order_relaxed))
		n += skip_tasks(job, number);
	else
		run_task(job, step, task, scratch);
	(void)cpu_goes_on();
	if (atomic_fetch_add(&job->n_ended, n) + n == step->n_tasks) {
		pthread_mutex_lock(&pool->mutex);
		open_step(pool, job, number + 1);
		unlock_and_wake(pool);
	}
	return true;
}

/* Tasks of @job until none is left or it may be another job's turn. */
static void work_on(struct pool *pool, struct pool_thread *thread, struct pool_job *job,
		    uint64_t since_ns)
{
	if (!reserve_scratch(thread, job->scratch_bytes)) {
		atomic_store(&job->out_of_memory, true);
		atomic_store(&job->stop, true);
	}
	thread->progress.stop = &job->stop;
	atomic_store_explicit(&thread->job, job, memory_order_relaxed);
	while (do_task(pool, job, thread->scratch))
		if (clock_ns() - since_ns >= POOL_TURN_NS &&
		    atomic_load_explicit(&pool->n_jobs, memory_order_relaxed) > 1)
			break;
	atomic_store_explicit(&thread->job, NULL, memory_order_relaxed);
}

/* One turn: at the job that is due. Return: false: there was none. The lock is held, and given up
 * meanwhile. */
static bool take_turn(struct pool *pool, struct pool_thread *thread)
{
	struct pool_job *job = join_job(pool);
	uint64_t since_ns;

	if (!job)
		return false;
	unlock_and_wake(pool);
	since_ns = clock_ns();
	work_on(pool, thread, job, since_ns);
	pthread_mutex_lock(&pool->mutex);
	job = leave_job(pool, job, since_ns);
	if (job) {
		unlock_and_wake(pool);
		job->on_done(job);
		pthread_mutex_lock(&pool->mutex);
	}
	return true;
}

static void *thread_main(void *argument)
{
	struct pool_thread *thread = argument;
	struct pool *pool = thread->pool;
	uint32_t trim_generation = 0;

	cpu_progress = &thread->progress;
	pthread_mutex_lock(&pool->mutex);
	while (!pool->stopping) {
		if (take_turn(pool, thread))
			continue;
		if (trim_generation != pool->trim_generation) {
			trim_generation = pool->trim_generation;
			trim_scratch(thread);
		}
		pool->n_sleeping++;
		pthread_cond_wait(&pool->work, &pool->mutex);
		pool->n_sleeping--;
	}
	pthread_mutex_unlock(&pool->mutex);
	trim_scratch(thread);
	if (thread->scratch)
		munmap(thread->scratch, thread->scratch_bytes);
	return NULL;
}

static uint32_t n_cores(void)
{
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set) == 0)
		return (uint32_t)CPU_COUNT(&set);
	return 1;
}

struct pool *pool_new(uint32_t n_threads)
{
	struct pool *pool;
	static const int own[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
	sigset_t blocked, before;

	if (n_threads == 0)
		n_threads = n_cores();
	pool = aligned_alloc(_Alignof(struct pool),
			     sizeof(*pool) + n_threads * sizeof(pool->threads[0]));
	if (!pool)
		return NULL;
	memset(pool, 0, sizeof(*pool) + n_threads * sizeof(pool->threads[0]));
	pthread_mutex_init(&pool->mutex, NULL);
	pthread_cond_init(&pool->work, NULL);
	fair_init(&pool->fair, POOL_TURN_NS, (uint64_t)POOL_ROUND_NS * n_threads);
	/* Signals are the loop's business, except for what a thread does to itself: blocked, that
	 * would end the process without guard.c having a say. */
	sigfillset(&blocked);
	for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
		sigdelset(&blocked, own[i]);
	pthread_sigmask(SIG_SETMASK, &blocked, &before);
	for (; pool->n_threads < n_threads; pool->n_threads++) {
		struct pool_thread *thread = &pool->threads[pool->n_threads];
		char name[16];

		thread->pool = pool;
		if (pthread_create(&thread->thread, NULL, thread_main, thread) != 0)
			break;
		snprintf(name, sizeof(name), "fmhad-cpu-%u", pool->n_threads);
		pthread_setname_np(thread->thread, name);
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return pool->n_threads == n_threads ? pool : pool_free(pool);
}

struct pool *pool_free(struct pool *pool)
{
	if (!pool)
		return NULL;
	pthread_mutex_lock(&pool->mutex);
	pool->stopping = true;
	pthread_cond_broadcast(&pool->work);
	pthread_mutex_unlock(&pool->mutex);
	for (uint32_t i = 0; i < pool->n_threads; i++)
		pthread_join(pool->threads[i].thread, NULL);
	fair_deinit(&pool->fair);
	pthread_cond_destroy(&pool->work);
	pthread_mutex_destroy(&pool->mutex);
	free(pool);
	return NULL;
}

uint32_t pool_n_threads(const struct pool *pool)
{
	return pool->n_threads;
}

bool pool_is_idle(const struct pool *pool)
{
	return atomic_load(&pool->n_jobs) == 0;
}

int pool_queue_init(struct pool *pool, struct pool_queue *queue, uint32_t uid, uint32_t weight)
{
	int r;

	list_init(&queue->jobs);
	pthread_mutex_lock(&pool->mutex);
	r = fair_session_init(&pool->fair, uid, weight, &queue->turn);
	pthread_mutex_unlock(&pool->mutex);
	return r;
}

void pool_queue_deinit(struct pool *pool, struct pool_queue *queue)
{
	assert(list_is_empty(&queue->jobs));
	pthread_mutex_lock(&pool->mutex);
	fair_session_deinit(&queue->turn);
	pthread_mutex_unlock(&pool->mutex);
}

static void reset_job(struct pool_job *job)
{
	job->cancelled = job->finished = false;
	job->started_ns = job->ended_ns = 0;
	job->n_joined = 0;
	atomic_store_explicit(&job->vanished, 0, memory_order_relaxed);
	atomic_store_explicit(&job->out_of_memory, false, memory_order_relaxed);
	job->seen_steps = job->seen_ns = 0;
	atomic_store_explicit(&job->stop, false, memory_order_relaxed);
}

static void no_task(const struct pool_step *step, uint64_t task, void *scratch)
{
	(void)step;
	(void)task;
	(void)scratch;
}

/* A job ends when a thread leaves it, so each has at least one task. */
static void require_task(struct pool_job *job)
{
	for (uint32_t i = 0; i < job->n_steps; i++)
		if (job->steps[i].n_tasks > 0)
			return;
	job->n_steps = 1;
	job->steps[0] = (struct pool_step){.n_tasks = 1, .run = no_task};
}

void pool_submit(struct pool *pool, struct pool_queue *queue, struct pool_job *job)
{
	bool first;

	require_task(job);
	reset_job(job);
	job->queue = queue;
	list_init(&job->in_queue);
	pthread_mutex_lock(&pool->mutex);
	first = list_is_empty(&queue->jobs);
	list_append(&queue->jobs, &job->in_queue);
	if (first)
		start_job(pool, job);
	unlock_and_wake(pool);
}

void pool_cancel(struct pool *pool, struct pool_job *job)
{
	bool over;

	pthread_mutex_lock(&pool->mutex);
	atomic_store(&job->stop, true);
	over = !list_is_empty(&job->in_queue) && job->n_joined == 0;
	if (over)
		end_job(pool, job);
	unlock_and_wake(pool);
	if (over)
		job->on_done(job);
}

static uint64_t cpu_ns_of(const struct pool_thread *thread)
{
	struct timespec used;
	clockid_t clock;

	if (pthread_getcpuclockid(thread->thread, &clock) != 0 || clock_gettime(clock, &used) < 0)
		return 0;
	return (uint64_t)used.tv_sec * NS_PER_S + (uint64_t)used.tv_nsec;
}

static bool is_at(const struct pool_thread *thread, const struct pool_job *job)
{
	return atomic_load_explicit(&thread->job, memory_order_relaxed) == job;
}

uint64_t pool_stalled_ns(struct pool *pool, struct pool_job *job)
{
	uint64_t n_steps = 0, now = clock_ns(), stalled;
	bool joined = false;

	for (uint32_t i = 0; i < pool->n_threads; i++) {
		const struct pool_thread *thread = &pool->threads[i];

		if (!is_at(thread, job))
			continue;
		joined = true;
		n_steps += atomic_load_explicit(&thread->progress.n_steps, memory_order_relaxed);
	}
	if (!joined || job->seen_ns == 0 || n_steps != job->seen_steps) {
		job->seen_steps = n_steps;
		job->seen_ns = now;
		for (uint32_t i = 0; i < pool->n_threads; i++)
			if (is_at(&pool->threads[i], job))
				pool->threads[i].seen_cpu_ns = cpu_ns_of(&pool->threads[i]);
		return 0;
	}
	stalled = (now - job->seen_ns) / POOL_PATIENCE;
	for (uint32_t i = 0; i < pool->n_threads; i++) {
		const struct pool_thread *thread = &pool->threads[i];
		uint64_t used = is_at(thread, job) ? cpu_ns_of(thread) - thread->seen_cpu_ns : 0;

		if (used > stalled)
			stalled = used;
	}
	return stalled;
}

void pool_run_here(struct pool_job *job, void *scratch)
{
	reset_job(job);
	job->started_ns = clock_ns();
	for (uint32_t i = 0; i < job->n_steps; i++) {
		note_opening(&job->steps[i]);
		for (uint64_t task = 0; task < job->steps[i].n_tasks; task++)
			run_task(job, &job->steps[i], task, scratch);
	}
	job->ended_ns = clock_ns();
}

void pool_trim(struct pool *pool)
{
	pthread_mutex_lock(&pool->mutex);
	pool->trim_generation++;
	pthread_cond_broadcast(&pool->work);
	pthread_mutex_unlock(&pool->mutex);
}
