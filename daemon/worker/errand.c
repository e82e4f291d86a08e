/* SPDX-License-Identifier: MIT */
#include "errand.h"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <base/clock.h>
#include <proto/error.h>

#define MOST_THREADS 4
#define MOST_LEFT    16 /* threads that the driver has not given back */
#define LOOK_MS      50 /* how late a deadline is noticed at most */
#define LOOKS_A_TURN 8

struct errand_thread {
	struct list in_threads;
	struct errands *errands;
	struct errand *errand; /* that it runs; NULL: none */
	bool left;             /* its errand was given up: it undoes it and ends */
	bool telling;          /* late() is at work with the errand: undo() has to wait */
};

/* ---- on a thread ---- */

static bool owner_is_busy(struct errands *errands, const void *owner)
{
	list_for_each(node, &errands->threads)
	{
		const struct errand_thread *thread = container_of(node, struct errand_thread,
								  in_threads);

		if (owner && thread->errand && thread->errand->owner == owner)
			return true;
	}
	return false;
}

/* With the lock held: the first errand that may run now, taken; NULL: none. */
static struct errand *take(struct errand_thread *thread)
{
	struct errands *errands = thread->errands;

	list_for_each(node, &errands->queued)
	{
		struct errand *errand = container_of(node, struct errand, in_errands);

		if (owner_is_busy(errands, errand->owner))
			continue;
		list_remove(node);
		atomic_fetch_sub(&errands->n_queued, 1);
		errand->started_ns = clock_ns();
		thread->errand = errand;
		return errand;
	}
	return NULL;
}

/* Without the lock. Return: whether there may be an errand. */
static bool look_for_more(struct errands *errands)
{
	uint64_t until = clock_ns() + errands->spin_ns;

	while (atomic_load_explicit(&errands->n_queued, memory_order_relaxed) == 0) {
		if (clock_ns() >= until)
			return false;
		(void)sched_yield();
	}
	return true;
}

/* With the lock held, which it gives up meanwhile. Return: false: the errand was given up. */
static bool run(struct errand_thread *thread, struct errand *errand)
{
	struct errands *errands = thread->errands;
	bool first;

	errands->n_idle--;
	(void)pthread_mutex_unlock(&errands->lock);
	errand->run(errand);
	(void)pthread_mutex_lock(&errands->lock);
	if (thread->left)
		return false;
	errands->n_idle++;
	thread->errand = NULL;
	first = list_is_empty(&errands->ended);
	list_append(&errands->ended, &errand->in_errands);
	atomic_fetch_add(&errands->n_ended, 1);
	if (first && !errands->looking)
		(void)uv_async_send(&errands->ended_async);
	return true;
}

static void *errand_thread(void *argument)
{
	struct errand_thread *thread = argument;
	struct errands *errands = thread->errands;
	struct errand *errand;

	device_enter_thread(errands->device);
	(void)pthread_mutex_lock(&errands->lock);
	for (;;) {
		errand = take(thread);
		if (errand && !run(thread, errand))
			break;
		if (errand) {
			(void)pthread_mutex_unlock(&errands->lock);
			(void)look_for_more(errands);
			(void)pthread_mutex_lock(&errands->lock);
		} else {
			(void)pthread_cond_wait(&errands->work, &errands->lock);
		}
	}
	while (thread->telling)
		(void)pthread_cond_wait(&errands->work, &errands->lock);
	(void)pthread_mutex_unlock(&errands->lock);
	errand->undo(errand);
	(void)pthread_mutex_lock(&errands->lock);
	errands->n_left--;
	(void)pthread_mutex_unlock(&errands->lock);
	free(thread);
	return NULL;
}

/* ---- on the loop ---- */

/* With the lock held. */
static int add_thread(struct errands *errands)
{
	struct errand_thread *thread = calloc(1, sizeof(*thread));
	pthread_t id;

	if (!thread)
		return FMHA_ENOMEM;
	thread->errands = errands;
	if (pthread_create(&id, NULL, errand_thread, thread) != 0) {
		free(thread);
		return FMHA_ENOMEM;
	}
	(void)pthread_setname_np(id, "fmhad-errand");
	(void)pthread_detach(id);
	list_init(&thread->in_threads);
	list_append(&errands->threads, &thread->in_threads);
	errands->n_threads++;
	errands->n_idle++;
	return 0;
}

static void settle(struct errands *errands)
{
	if (--errands->n_pending == 0)
		uv_timer_stop(&errands->timer);
}

static void collect(struct errands *errands)
{
	struct list ended, *node;

	list_init(&ended);
	(void)pthread_mutex_lock(&errands->lock);
	while ((node = list_pop(&errands->ended)))
		list_append(&ended, node);
	atomic_store(&errands->n_ended, 0);
	(void)pthread_mutex_unlock(&errands->lock);
	while ((node = list_pop(&ended))) {
		struct errand *errand = container_of(node, struct errand, in_errands);

		settle(errands);
		errand->done(errand);
	}
}

static void on_ended(uv_async_t *async)
{
	collect(container_of(async, struct errands, ended_async));
}

static void look(struct errands *errands, bool begin)
{
	(void)pthread_mutex_lock(&errands->lock);
	errands->looking = begin;
	(void)pthread_mutex_unlock(&errands->lock);
}

/* Once a turn; while it is active the loop does not block. */
static void on_turn(uv_idle_t *turn)
{
	struct errands *errands = container_of(turn, struct errands, turn);

	for (int i = 0; i < LOOKS_A_TURN; i++) {
		if (atomic_load_explicit(&errands->n_ended, memory_order_relaxed) > 0) {
			collect(errands);
			break;
		}
		(void)sched_yield();
	}
	if (errands->n_pending > 0 && clock_ns() < errands->look_until_ns)
		return;
	uv_idle_stop(turn);
	look(errands, false);
	collect(errands); /* what ended before that was known */
}

/* With the lock held: the first thread whose time is over, given up; NULL: none. */
static struct errand_thread *give_up_one(struct errands *errands, uint64_t now)
{
	list_for_each(node, &errands->threads)
	{
		struct errand_thread *thread = container_of(node, struct errand_thread, in_threads);
		const struct errand *errand = thread->errand;

		if (!errand || !errand->timeout_ns || now - errand->started_ns < errand->timeout_ns)
			continue;
		thread->left = thread->telling = true;
		list_remove(&thread->in_threads);
		errands->n_threads--;
		errands->n_left++;
		return thread;
	}
	return NULL;
}

static void on_timer(uv_timer_t *timer)
{
	struct errands *errands = container_of(timer, struct errands, timer);
	struct errand_thread *thread;

	(void)pthread_mutex_lock(&errands->lock);
	while ((thread = give_up_one(errands, clock_ns()))) {
		(void)pthread_mutex_unlock(&errands->lock);
		settle(errands);
		if (thread->errand->late)
			thread->errand->late(thread->errand);
		(void)pthread_mutex_lock(&errands->lock);
		thread->telling = false;
		/* What its owner asked for next may run now. */
		if (atomic_load(&errands->n_queued) > 0 && errands->n_idle == 0)
			(void)add_thread(errands);
		(void)pthread_cond_broadcast(&errands->work);
	}
	(void)pthread_mutex_unlock(&errands->lock);
}

/* With the lock held: whether it is the turn of another errand of @owner's first. */
static bool has_to_queue(struct errands *errands, const void *owner)
{
	list_for_each(node, &errands->queued)
	{
		if (owner && container_of(node, struct errand, in_errands)->owner == owner)
			return true;
	}
	return owner_is_busy(errands, owner);
}

int errand_start(struct errands *errands, struct errand *errand, struct fmha_error *err)
{
	const bool look_for_it = errand->urgent && errands->spin_ns > 0;
	int r = 0;

	list_init(&errand->in_errands);
	(void)pthread_mutex_lock(&errands->lock);
	if (errands->n_left >= MOST_LEFT)
		r = fmha_error_set(err, FMHA_EBUSY,
				   "%u calls of the driver have not come back: no more are made",
				   errands->n_left);
	else if (atomic_load(&errands->n_queued) >= errands->n_idle &&
		 errands->n_threads < MOST_THREADS && !has_to_queue(errands, errand->owner) &&
		 add_thread(errands) < 0 && errands->n_threads == 0)
		r = fmha_error_set(err, FMHA_ENOMEM, "no more threads");
	if (r == 0) {
		list_append(&errands->queued, &errand->in_errands);
		errands->looking |= look_for_it;
		atomic_fetch_add(&errands->n_queued, 1);
		(void)pthread_cond_signal(&errands->work);
	}
	(void)pthread_mutex_unlock(&errands->lock);
	if (r < 0)
		return r;
	if (errands->n_pending++ == 0)
		uv_timer_start(&errands->timer, on_timer, LOOK_MS, LOOK_MS);
	if (look_for_it) {
		errands->look_until_ns = clock_ns() + errands->spin_ns;
		uv_idle_start(&errands->turn, on_turn);
	}
	return 0;
}

void errands_open(struct errands *errands, uv_loop_t *loop, struct device *device, uint64_t spin_us)
{
	*errands = (struct errands){.device = device};
	if (sysconf(_SC_NPROCESSORS_ONLN) > 1)
		errands->spin_ns = spin_us * 1000;
	list_init(&errands->queued);
	list_init(&errands->ended);
	list_init(&errands->threads);
	(void)pthread_mutex_init(&errands->lock, NULL);
	(void)pthread_cond_init(&errands->work, NULL);
	uv_async_init(loop, &errands->ended_async, on_ended);
	uv_timer_init(loop, &errands->timer);
	uv_idle_init(loop, &errands->turn);
	if (device_shares_memory(device))
		return; /* it has no slow calls worth a thread that waits for them */
	(void)pthread_mutex_lock(&errands->lock);
	(void)add_thread(errands);
	(void)pthread_mutex_unlock(&errands->lock);
}
