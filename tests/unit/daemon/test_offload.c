/* SPDX-License-Identifier: MIT */
/* Calls that may block, made off the loop: their order, their deadlines, and what is left of those
 * that come back too late. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include <pthread.h>

#include <base/clock.h>
#include <offload.h>

#include "device_impl.h"

#define MOST 64

struct fixture {
	uv_loop_t loop;
	uv_timer_t guard;
	struct device device;
	struct offloads offloads;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	bool open; /* tasks that wait for the gate may end */
	int n_running, most_running, n_done, n_late, n_undone;
	int order[MOST], n_order;
};

struct task {
	struct offload offload;
	struct fixture *fixture;
	int number;
	bool waits; /* for the gate */
};

static struct task *task_of(struct offload *offload)
{
	return container_of(offload, struct task, offload);
}

static void task_run(struct offload *offload)
{
	struct task *task = task_of(offload);
	struct fixture *f = task->fixture;

	pthread_mutex_lock(&f->lock);
	if (++f->n_running > f->most_running)
		f->most_running = f->n_running;
	f->order[f->n_order++] = task->number;
	pthread_cond_broadcast(&f->changed);
	while (task->waits && !f->open)
		pthread_cond_wait(&f->changed, &f->lock);
	f->n_running--;
	pthread_mutex_unlock(&f->lock);
}

static void task_done(struct offload *offload)
{
	task_of(offload)->fixture->n_done++;
	free(task_of(offload));
}

static void task_late(struct offload *offload)
{
	task_of(offload)->fixture->n_late++;
}

static void task_undo(struct offload *offload)
{
	struct fixture *f = task_of(offload)->fixture;

	free(task_of(offload));
	pthread_mutex_lock(&f->lock);
	f->n_undone++;
	pthread_cond_broadcast(&f->changed);
	pthread_mutex_unlock(&f->lock);
}

static int start(struct fixture *f, int number, const void *owner, bool waits, uint64_t timeout_ms)
{
	struct task *task = calloc(1, sizeof(*task));
	struct fmha_error err;
	int r;

	task->fixture = f;
	task->number = number;
	task->waits = waits;
	task->offload = (struct offload){.owner = owner,
					 .user = owner,
					 .timeout_ns = timeout_ms * NS_PER_MS,
					 .urgent = number % 2 == 0,
					 .run = task_run,
					 .done = task_done,
					 .late = task_late,
					 .undo = task_undo};
	r = offload_start(&f->offloads, &task->offload, &err);
	if (r < 0) {
		assert_int_equal(r, err.code);
		free(task);
	}
	return r;
}

static void open_gate(struct fixture *f)
{
	pthread_mutex_lock(&f->lock);
	f->open = true;
	pthread_cond_broadcast(&f->changed);
	pthread_mutex_unlock(&f->lock);
}

static void on_guard(uv_timer_t *timer)
{
	(void)timer; /* turns the loop, so that a test that waits for nothing ends */
}

/* Turns the loop until so many offloads are done and late. */
static void turn_until(struct fixture *f, int n_done, int n_late)
{
	uint64_t deadline = clock_ns() + 10 * NS_PER_S;

	while ((f->n_done < n_done || f->n_late < n_late) && clock_ns() < deadline)
		uv_run(&f->loop, UV_RUN_ONCE);
	assert_int_equal(f->n_done, n_done);
	assert_int_equal(f->n_late, n_late);
}

static void wait_for_undone(struct fixture *f, int n)
{
	pthread_mutex_lock(&f->lock);
	while (f->n_undone < n)
		pthread_cond_wait(&f->changed, &f->lock);
	pthread_mutex_unlock(&f->lock);
}

/* The threads stay for good, as in a worker, and so do the fixtures. */
static int setup(void **state)
{
	/* A device whose memory is not the host's. */
	static const struct device_staging_ops staging;
	static const struct device_ops ops = {.backend = "test", .staging = &staging};
	static struct fixture fixtures[8];
	static int n;
	struct fixture *f = &fixtures[n++];

	f->device.ops = &ops;
	uv_loop_init(&f->loop);
	uv_timer_init(&f->loop, &f->guard);
	uv_timer_start(&f->guard, on_guard, 20, 20);
	pthread_mutex_init(&f->lock, NULL);
	pthread_cond_init(&f->changed, NULL);
	assert_int_equal(offloads_open(&f->offloads, &f->loop, &f->device, 50, NULL), 0);
	*state = f;
	return 0;
}

static void one_owners_offloads_run_in_order(void **state)
{
	struct fixture *f = *state;
	int owner = 0;

	for (int i = 0; i < 20; i++)
		assert_int_equal(start(f, i, &owner, false, 1000), 0);
	turn_until(f, 20, 0);
	for (int i = 0; i < 20; i++)
		assert_int_equal(f->order[i], i);
	assert_int_equal(f->most_running, 1);
}

static void others_do_not_wait_for_an_owner_that_blocks(void **state)
{
	struct fixture *f = *state;
	int slow = 0, quick = 0;

	assert_int_equal(start(f, 0, &slow, true, 0), 0);
	assert_int_equal(start(f, 1, &slow, false, 0), 0);
	for (int i = 2; i < 12; i++)
		assert_int_equal(start(f, i, &quick, false, 0), 0);
	turn_until(f, 10, 0);
	open_gate(f);
	turn_until(f, 12, 0);
	assert_int_equal(f->order[f->n_order - 1], 1);
}

static void a_late_one_is_told_of_and_undone(void **state)
{
	struct fixture *f = *state;
	int owner = 0;

	assert_int_equal(start(f, 0, &owner, true, 100), 0);
	assert_int_equal(start(f, 1, &owner, false, 100), 0);
	turn_until(f, 1, 1); /* the owner's next one runs meanwhile */
	assert_int_equal(f->n_undone, 0);
	open_gate(f);
	wait_for_undone(f, 1);
	assert_int_equal(f->n_done, 1);
	assert_int_equal(start(f, 2, &owner, false, 100), 0);
	turn_until(f, 2, 1);
}

static void as_many_as_never_come_back_and_no_more(void **state)
{
	struct fixture *f = *state;
	int owners[32] = {0}, n = 0, r = 0;

	for (int round = 0; round < 8; round++) {
		int n_before = n;

		for (int i = 0; i < 4; i++) {
			r = start(f, n, &owners[n], true, 20);
			if (r < 0)
				break;
			n++;
		}
		if (n == n_before)
			break;
		turn_until(f, 0, n);
	}
	assert_int_equal(r, FMHA_EBUSY);
	assert_int_equal(n, 16);
	open_gate(f);
	wait_for_undone(f, n);
	/* The last of them leaves its books a moment later. */
	for (int i = 0; i < 1000 && start(f, 50, &owners[0], false, 1000) < 0; i++)
		uv_run(&f->loop, UV_RUN_ONCE);
	turn_until(f, 1, n);
}

/* Whose calls never come back cannot use up what others have, too. */
static void an_owner_leaves_two_behind_and_no_more(void **state)
{
	struct fixture *f = *state;
	int owner = 0, other = 0;

	for (int i = 0; i < 2; i++) {
		assert_int_equal(start(f, 0, &owner, true, 20), 0);
		turn_until(f, 0, i + 1);
	}
	assert_int_equal(start(f, 2, &owner, true, 20), FMHA_EBUSY);
	assert_int_equal(start(f, 4, &other, false, 1000), 0);
	assert_int_equal(start(f, 1, &owner, false, 1000), 0); /* a release, say */
	turn_until(f, 2, 2);
	open_gate(f);
	wait_for_undone(f, 2);
	for (int i = 0; i < 1000 && start(f, 6, &owner, false, 1000) < 0; i++)
		uv_run(&f->loop, UV_RUN_ONCE);
	turn_until(f, 3, 2);
}

#define TEST(name) cmocka_unit_test_setup(name, setup)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(one_owners_offloads_run_in_order),
		TEST(others_do_not_wait_for_an_owner_that_blocks),
		TEST(a_late_one_is_told_of_and_undone),
		TEST(as_many_as_never_come_back_and_no_more),
		TEST(an_owner_leaves_two_behind_and_no_more),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
