/* SPDX-License-Identifier: MIT */
#include "offload.h"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <base/clock.h>
#include <proto/error.h>

#define MOST_THREADS     4
#define MOST_OF_ONE      2  /* threads that work for one user */
#define MOST_LEFT        16 /* threads that the driver has not given back */
#define MOST_LEFT_OF_ONE 2u /* the same of one user, who may not ask for more until then */
#define LOOK_MS          50 /* how late a deadline is noticed at most */

static _Thread_local uint64_t thread_doing;

uint64_t offload_doing(void)
{
	return thread_doing;
}

struct offload_thread {
	struct list in_threads;
	struct offloads *offloads;
	struct offload *offload; /* that it runs; NULL: none */
	bool left;               /* its offload was given up: it undoes it and ends */
	const void *user;        /* of the offload that was given up */
	bool telling;            /* late() is at work with the offload: undo() has to wait */
};

/* ---- on a thread ---- */

static bool owner_is_busy(struct offloads *offloads, const void *owner)
{
	list_for_each_entry(struct offload_thread, thread, &offloads->threads, in_threads)
		if (owner && thread->offload && thread->offload->owner == owner)
			return true;
	return false;
}

static bool must_wait(struct offloads *offloads, const struct offload *offload)
{
	uint32_t n = 0;

	list_for_each_entry(struct offload_thread, thread, &offloads->threads, in_threads)
		n += offload->user && thread->offload && thread->offload->user == offload->user;
	return n >= MOST_OF_ONE || owner_is_busy(offloads, offload->owner);
}

/* With the lock held: the first offload that may run now, taken; NULL: none. */
static struct offload *offload_take(struct offload_thread *thread)
{
	struct offloads *offloads = thread->offloads;

	list_for_each_entry(struct offload, offload, &offloads->queued, in_offloads) {
		if (must_wait(offloads, offload))
			continue;
		list_remove(&offload->in_offloads);
		atomic_fetch_sub(&offloads->n_queued, 1);
		offload->started_ns = clock_ns();
		thread->offload = offload;
		return offload;
	}
	return NULL;
}

/* Without the lock. Return: whether there may be an offload. */
static bool look_for_more(struct offloads *offloads)
{
	uint64_t until = clock_ns() + offloads->spin_ns;

	while (atomic_load_explicit(&offloads->n_queued, memory_order_relaxed) == 0) {
		if (clock_ns() >= until)
			return false;
		(void)sched_yield();
	}
	return true;
}

/* With the lock held, which it gives up meanwhile. Return: false: the offload was given up. */
static bool offload_run(struct offload_thread *thread, struct offload *offload)
{
	struct offloads *offloads = thread->offloads;
	bool first;

	offloads->n_idle--;
	(void)pthread_mutex_unlock(&offloads->lock);
	thread_doing = offload->doing;
	offload->run(offload);
	thread_doing = 0;
	(void)pthread_mutex_lock(&offloads->lock);
	if (thread->left)
		return false;
	offloads->n_idle++;
	thread->offload = NULL;
	first = list_is_empty(&offloads->ended);
	list_append(&offloads->ended, &offload->in_offloads);
	atomic_fetch_add(&offloads->n_ended, 1);
	if (first && !offloads->looking)
		(void)uv_async_send(&offloads->ended_async);
	return true;
}

static void *offload_thread(void *argument)
{
	struct offload_thread *thread = argument;
	struct offloads *offloads = thread->offloads;
	struct offload *offload;

	device_enter_thread(offloads->device);
	(void)pthread_mutex_lock(&offloads->lock);
	for (;;) {
		offload = offload_take(thread);
		if (offload && !offload_run(thread, offload))
			break;
		if (offload) {
			(void)pthread_mutex_unlock(&offloads->lock);
			(void)look_for_more(offloads);
			(void)pthread_mutex_lock(&offloads->lock);
		} else {
			(void)pthread_cond_wait(&offloads->work, &offloads->lock);
		}
	}
	while (thread->telling)
		(void)pthread_cond_wait(&offloads->work, &offloads->lock);
	(void)pthread_mutex_unlock(&offloads->lock);
	offload->undo(offload);
	(void)pthread_mutex_lock(&offloads->lock);
	list_remove(&thread->in_threads);
	offloads->n_left--;
	(void)pthread_mutex_unlock(&offloads->lock);
	free(thread);
	return NULL;
}

/* ---- on the loop ---- */

/* With the lock held. */
static int add_thread(struct offloads *offloads)
{
	struct offload_thread *thread = calloc(1, sizeof(*thread));
	pthread_t id;

	if (!thread)
		return FMHA_ENOMEM;
	thread->offloads = offloads;
	if (pthread_create(&id, NULL, offload_thread, thread) != 0) {
		free(thread);
		return FMHA_ENOMEM;
	}
	(void)pthread_setname_np(id, "fmhad-offload");
	(void)pthread_detach(id);
	list_init(&thread->in_threads);
	list_append(&offloads->threads, &thread->in_threads);
	offloads->n_threads++;
	offloads->n_idle++;
	return 0;
}

static void offload_settle(struct offloads *offloads)
{
	if (--offloads->n_pending == 0)
		uv_timer_stop(&offloads->timer);
}

static void collect(struct offloads *offloads)
{
	struct doing_before before;
	struct list ended, *node;

	list_init(&ended);
	(void)pthread_mutex_lock(&offloads->lock);
	while ((node = list_pop(&offloads->ended)))
		list_append(&ended, node);
	atomic_store(&offloads->n_ended, 0);
	(void)pthread_mutex_unlock(&offloads->lock);
	while ((node = list_pop(&ended))) {
		struct offload *offload = container_of(node, struct offload, in_offloads);

		offload_settle(offloads);
		before = doing_begin_word(offloads->doing, offload->doing);
		offload->done(offload);
		doing_end(offloads->doing, before);
	}
}

static void on_ended(uv_async_t *async)
{
	collect(container_of(async, struct offloads, ended_async));
}

static bool offload_look(struct spin *spin)
{
	struct offloads *offloads = container_of(spin, struct offloads, spin);
	bool found = atomic_load_explicit(&offloads->n_ended, memory_order_relaxed) > 0;

	if (found)
		collect(offloads);
	return found;
}

static bool goes_on(struct spin *spin, uint64_t now)
{
	const struct offloads *offloads = container_of(spin, struct offloads, spin);

	return offloads->n_pending > 0 && now < offloads->look_until_ns;
}

static void on_spin_end(struct spin *spin)
{
	struct offloads *offloads = container_of(spin, struct offloads, spin);

	(void)pthread_mutex_lock(&offloads->lock);
	offloads->looking = false;
	(void)pthread_mutex_unlock(&offloads->lock);
	collect(offloads); /* what ended before that was known */
}

/* With the lock held: the first thread whose time is over, given up; NULL: none. */
static struct offload_thread *give_up_one(struct offloads *offloads, uint64_t now)
{
	list_for_each_entry(struct offload_thread, thread, &offloads->threads, in_threads) {
		const struct offload *offload = thread->offload;

		if (!offload || !offload->timeout_ns ||
		    now - offload->started_ns < offload->timeout_ns)
			continue;
		thread->left = thread->telling = true;
		thread->user = offload->user;
		list_remove(&thread->in_threads);
		list_append(&offloads->left, &thread->in_threads);
		offloads->n_threads--;
		offloads->n_left++;
		return thread;
	}
	return NULL;
}

static void offload_on_timer(uv_timer_t *timer)
{
	struct offloads *offloads = container_of(timer, struct offloads, timer);
	struct offload_thread *thread;

	(void)pthread_mutex_lock(&offloads->lock);
	while ((thread = give_up_one(offloads, clock_ns()))) {
		(void)pthread_mutex_unlock(&offloads->lock);
		offload_settle(offloads);
		if (thread->offload->late)
			thread->offload->late(thread->offload);
		(void)pthread_mutex_lock(&offloads->lock);
		thread->telling = false;
		/* What its owner asked for next may run now. */
		if (atomic_load(&offloads->n_queued) > 0 && offloads->n_idle == 0)
			(void)add_thread(offloads);
		(void)pthread_cond_broadcast(&offloads->work);
	}
	(void)pthread_mutex_unlock(&offloads->lock);
}

/* With the lock held: whether it is the turn of another offload of @owner's first. */
static bool has_to_queue(struct offloads *offloads, const void *owner)
{
	list_for_each_entry(struct offload, offload, &offloads->queued, in_offloads)
		if (owner && offload->owner == owner)
			return true;
	return owner_is_busy(offloads, owner);
}

/* With the lock held: calls of @user's that have been given up and are not back. */
static uint32_t left_of(const struct offloads *offloads, const void *user)
{
	uint32_t n = 0;

	list_for_each_entry(struct offload_thread, thread, &offloads->left, in_threads)
		n += user && thread->user == user;
	return n;
}

int offload_start(struct offloads *offloads, struct offload *offload, struct fmha_error *err)
{
	const bool look_for_it = offload->urgent && offloads->spin_ns > 0;
	int r = 0;

	list_init(&offload->in_offloads);
	offload->doing = offloads->doing ? atomic_load(&offloads->doing->word) : 0;
	(void)pthread_mutex_lock(&offloads->lock);
	if (offload->urgent && left_of(offloads, offload->user) >= MOST_LEFT_OF_ONE)
		r = fmha_error_set(err, FMHA_EBUSY,
				   "%u of your calls of the driver have not come back",
				   MOST_LEFT_OF_ONE);
	else if (offloads->n_left >= MOST_LEFT)
		r = fmha_error_set(err, FMHA_EBUSY,
				   "%u calls of the driver have not come back: no more are made",
				   offloads->n_left);
	else if (atomic_load(&offloads->n_queued) >= offloads->n_idle &&
		 offloads->n_threads < MOST_THREADS && !has_to_queue(offloads, offload->owner) &&
		 add_thread(offloads) < 0 && offloads->n_threads == 0)
		r = fmha_error_set(err, FMHA_ENOMEM, "no more threads");
	if (r == 0) {
		list_append(&offloads->queued, &offload->in_offloads);
		offloads->looking |= look_for_it;
		atomic_fetch_add(&offloads->n_queued, 1);
		(void)pthread_cond_signal(&offloads->work);
	}
	(void)pthread_mutex_unlock(&offloads->lock);
	if (r < 0)
		return r;
	if (offloads->n_pending++ == 0)
		uv_timer_start(&offloads->timer, offload_on_timer, LOOK_MS, LOOK_MS);
	if (look_for_it) {
		offloads->look_until_ns = clock_ns() + offloads->spin_ns;
		spin_start(&offloads->spin);
	}
	return 0;
}

void offload_start_or_run(struct offloads *offloads, struct offload *offload)
{
	if (offload_start(offloads, offload, NULL) == 0)
		return;
	offload->run(offload);
	offload->done(offload);
}

int offloads_open(struct offloads *offloads, uv_loop_t *loop, struct device *device,
		  uint64_t spin_us, struct fmha_error *err)
{
	int r;

	*offloads = (struct offloads){
		.device = device,
		.spin = {.look = offload_look, .goes_on = goes_on, .on_end = on_spin_end}};
	if (sysconf(_SC_NPROCESSORS_ONLN) > 1)
		offloads->spin_ns = spin_us * 1000;
	list_init(&offloads->queued);
	list_init(&offloads->ended);
	list_init(&offloads->threads);
	list_init(&offloads->left);
	(void)pthread_mutex_init(&offloads->lock, NULL);
	(void)pthread_cond_init(&offloads->work, NULL);
	r = uv_async_init(loop, &offloads->ended_async, on_ended);
	if (r < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "a wake-up of the loop: %s",
				      uv_strerror(r));
	uv_timer_init(loop, &offloads->timer);
	uv_idle_init(loop, &offloads->spin.turn);
	if (device_shares_memory(device))
		return 0; /* it has no slow calls worth a thread that waits for them */
	(void)pthread_mutex_lock(&offloads->lock);
	(void)add_thread(offloads);
	(void)pthread_mutex_unlock(&offloads->lock);
	return 0;
}
