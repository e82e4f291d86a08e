/* SPDX-License-Identifier: MIT */
/* The thread pool: every task once, steps in order, turns between users and jobs, progress,
 * cancelling, vanished memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <base/clock.h>
#include <device/guard.h>
#include <kernels/cpu_progress.h>

#include <pool.h>

#define MAX_TASKS 4096

/* A job that counts how often each of its tasks ran, and checks the order of its steps. */
struct counted {
	struct pool_job job;
	atomic_uint ran[4][MAX_TASKS];
	atomic_uint n_ran[4], n_begun, n_wrong;
	atomic_uint_fast64_t ran_ns;
	uint64_t task_ns;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	int n_done;
	struct counted *earlier; /* of the same queue: must have ended before this one starts */
};

static void queue_init(struct pool *pool, struct pool_queue *queue, uint32_t uid, uint32_t weight)
{
	assert_int_equal(pool_queue_init(pool, queue, uid, weight), 0);
}

static void busy(uint64_t ns)
{
	uint64_t start = clock_ns();

	while (clock_ns() - start < ns)
		;
}

static void count(const struct pool_step *step, uint64_t task, void *scratch)
{
	struct counted *counted = (struct counted *)step->args;
	uint64_t start = clock_ns();

	atomic_store(&counted->n_begun, 1);
	if (counted->job.scratch_bytes) /* the whole of it belongs to this thread */
		memset(scratch, (int)task, counted->job.scratch_bytes);
	for (int i = 0; i < step->phase; i++)
		if (atomic_load(&counted->n_ran[i]) != counted->job.steps[i].n_tasks)
			atomic_fetch_add(&counted->n_wrong, 1);
	if (counted->earlier && !counted->earlier->job.ended_ns)
		atomic_fetch_add(&counted->n_wrong, 1);
	if (strcmp(pool_current_name(), step->name) != 0)
		atomic_fetch_add(&counted->n_wrong, 1);
	if (counted->task_ns)
		busy(counted->task_ns);
	atomic_fetch_add(&counted->ran[step->phase][task], 1);
	atomic_fetch_add(&counted->n_ran[step->phase], 1);
	atomic_fetch_add(&counted->ran_ns, clock_ns() - start);
}

static void done(struct pool_job *job)
{
	struct counted *counted = container_of(job, struct counted, job);

	pthread_mutex_lock(&counted->mutex);
	counted->n_done++;
	pthread_cond_signal(&counted->cond);
	pthread_mutex_unlock(&counted->mutex);
}

static struct counted *counted_new(int n_steps, const uint64_t *n_tasks, uint64_t task_ns)
{
	struct counted *counted = calloc(1, sizeof(*counted));

	counted->task_ns = task_ns;
	counted->job.n_steps = (uint32_t)n_steps;
	counted->job.on_done = done;
	for (int i = 0; i < n_steps; i++)
		counted->job.steps[i] = (struct pool_step){.n_tasks = n_tasks[i],
							   .run = count,
							   .args = counted,
							   .name = "count",
							   .phase = i};
	pthread_mutex_init(&counted->mutex, NULL);
	pthread_cond_init(&counted->cond, NULL);
	return counted;
}

static void wait_done(struct counted *counted)
{
	struct timespec deadline;

	clock_gettime(CLOCK_REALTIME, &deadline);
	deadline.tv_sec += 20;
	pthread_mutex_lock(&counted->mutex);
	while (!counted->n_done)
		assert_int_equal(pthread_cond_timedwait(&counted->cond, &counted->mutex, &deadline),
				 0);
	counted->n_done--;
	pthread_mutex_unlock(&counted->mutex);
}

static void assert_complete(struct counted *counted)
{
	assert_int_equal(atomic_load(&counted->n_wrong), 0);
	for (uint32_t i = 0; i < counted->job.n_steps; i++)
		for (uint64_t task = 0; task < counted->job.steps[i].n_tasks; task++)
			assert_int_equal(atomic_load(&counted->ran[i][task]), 1);
	assert_false(counted->job.cancelled);
}

static void every_task_runs_once_and_steps_in_order(void **state)
{
	static const uint64_t shapes[][4] = {{1},          {3, 1, 5},    {0, 7, 0, 2},
					     {1000, 1000}, {4, 0, 0, 1}, {2, 2, 2, 2}};
	struct pool *pool = pool_new(4);
	struct pool_queue queue;

	(void)state;
	queue_init(pool, &queue, 1, 1);
	for (int round = 0; round < 200; round++) {
		struct counted *counted = counted_new(4, shapes[round % 6], 0);

		counted->job.scratch_bytes = (size_t)(round % 5) * 10000;
		pool_submit(pool, &queue, &counted->job);
		wait_done(counted);
		assert_complete(counted);
		assert_true(pool_is_idle(pool));
		free(counted);
	}
	pool_queue_deinit(pool, &queue);
	pool_free(pool);
}

static void jobs_without_tasks_end_too(void **state)
{
	static const uint64_t none[4];
	struct pool *pool = pool_new(2);
	struct pool_queue queue;
	struct counted *first = counted_new(4, none, 0), *second = counted_new(0, none, 0);

	(void)state;
	queue_init(pool, &queue, 1, 1);
	pool_submit(pool, &queue, &first->job);
	pool_submit(pool, &queue, &second->job);
	wait_done(first);
	wait_done(second);
	pool_queue_deinit(pool, &queue);
	pool_free(pool);
	free(first);
	free(second);
}

static void jobs_of_a_queue_run_one_after_the_other(void **state)
{
	enum { N = 50 };
	static const uint64_t shape[4] = {9, 3};
	struct pool *pool = pool_new(4);
	struct pool_queue queues[2];
	struct counted *jobs[2][N];

	(void)state;
	for (int q = 0; q < 2; q++) {
		queue_init(pool, &queues[q], 1, 1);
		for (int i = 0; i < N; i++) {
			jobs[q][i] = counted_new(2, shape, 0);
			jobs[q][i]->earlier = i ? jobs[q][i - 1] : NULL;
		}
	}
	for (int i = 0; i < N; i++)
		for (int q = 0; q < 2; q++)
			pool_submit(pool, &queues[q], &jobs[q][i]->job);
	for (int i = 0; i < 2 * N; i++) {
		wait_done(jobs[i % 2][i / 2]);
		assert_complete(jobs[i % 2][i / 2]);
	}
	for (int i = 0; i < 2 * N; i++)
		free(jobs[i % 2][i / 2]);
	for (int q = 0; q < 2; q++)
		pool_queue_deinit(pool, &queues[q]);
	pool_free(pool);
}

/* A job of one short task must not wait for the end of one with thousands: at most for one turn of
 * each thread. Judged by how far the large one got meanwhile, not by the clock of a busy machine.
 */
static void a_small_job_waits_for_one_turn_of_a_large_one(void **state)
{
	static const uint64_t many[4] = {4000}, one[4] = {1};
	struct pool *pool = pool_new(2);
	struct pool_queue large_queue, small_queue;
	struct counted *large = counted_new(1, many, 50000);
	int n_late = 0;

	(void)state;
	queue_init(pool, &large_queue, 1, 1);
	queue_init(pool, &small_queue, 1, 1);
	pool_submit(pool, &large_queue, &large->job);
	usleep(2000);
	for (int i = 0; i < 20; i++) {
		struct counted *small = counted_new(1, one, 0);
		unsigned int before, after;

		before = atomic_load(&large->n_ran[0]);
		pool_submit(pool, &small_queue, &small->job);
		wait_done(small);
		after = atomic_load(&large->n_ran[0]);
		/* Two threads, turns of 100 us, tasks of 50 us: 3 tasks each, and slack for this
		 * thread to be woken. A busy machine keeps it waiting now and then, not mostly. */
		n_late += after - before >= 400;
		free(small);
	}
	assert_true(n_late <= 5);
	wait_done(large);
	assert_complete(large);
	free(large);
	pool_queue_deinit(pool, &large_queue);
	pool_queue_deinit(pool, &small_queue);
	pool_free(pool);
}

/* Queues of two users with a job each that outlasts the test; then everything is cancelled. */
struct two_users {
	struct pool *pool;
	uint32_t n, n_first; /* the first user's come first */
	struct pool_queue queues[32];
	struct counted *jobs[32];
};

static void two_users_start(struct two_users *users, uint32_t n_threads, uint32_t n_first,
			    uint32_t first_weight, uint32_t n_second, uint64_t task_ns)
{
	static const uint64_t endless[4] = {MAX_TASKS};

	*users = (struct two_users){
		.pool = pool_new(n_threads), .n = n_first + n_second, .n_first = n_first};
	for (uint32_t i = 0; i < users->n; i++) {
		queue_init(users->pool, &users->queues[i], i < n_first ? 1 : 2,
			   i < n_first ? first_weight : 1);
		users->jobs[i] = counted_new(1, endless, task_ns);
		pool_submit(users->pool, &users->queues[i], &users->jobs[i]->job);
	}
}

/* What a user's tasks have taken: on a busy machine tasks are interrupted, and not all alike. */
static uint64_t time_of(const struct two_users *users, bool first)
{
	uint32_t i = first ? 0 : users->n_first, end = first ? users->n_first : users->n;
	uint64_t sum = 0;

	while (i < end)
		sum += atomic_load(&users->jobs[i++]->ran_ns);
	return sum;
}

static void two_users_stop(struct two_users *users)
{
	for (uint32_t i = 0; i < users->n; i++)
		pool_cancel(users->pool, &users->jobs[i]->job);
	for (uint32_t i = 0; i < users->n; i++) {
		wait_done(users->jobs[i]);
		free(users->jobs[i]);
		pool_queue_deinit(users->pool, &users->queues[i]);
	}
	assert_true(pool_is_idle(users->pool));
	pool_free(users->pool);
}

/* One user's single job gets as much as another's twenty. */
static void users_share_equally_whatever_they_have(void **state)
{
	struct two_users users;
	uint64_t second;

	(void)state;
	two_users_start(&users, 2, 20, 1, 1, 200000);
	while ((second = time_of(&users, false)) < 250 * NS_PER_MS)
		usleep(100);
	assert_in_range(time_of(&users, true), second / 2, second * 2);
	two_users_stop(&users);
}

static void users_share_by_weight(void **state)
{
	struct two_users users;
	uint64_t first;

	(void)state;
	two_users_start(&users, 2, 1, 4, 8, 200000);
	while ((first = time_of(&users, true)) < 400 * NS_PER_MS)
		usleep(100);
	assert_in_range(time_of(&users, false), first / 8, first / 2); /* a fourth */
	two_users_stop(&users);
}

static atomic_uint n_switches;

/* Counts how often a thread comes from another job. */
static void note_switch(const struct pool_step *step, uint64_t task, void *scratch)
{
	static _Thread_local const void *last;

	if (last != step->args)
		atomic_fetch_add(&n_switches, 1);
	last = step->args;
	count(step, task, scratch);
}

/* 10 large jobs of one user: their turns last much longer than a task, or each would find its data
 * thrown out of the caches by the others. All of them get ahead nevertheless. */
static void jobs_of_one_user_take_long_turns(void **state)
{
	enum { N = 10 };
	static const uint64_t many[4] = {1200};
	struct pool *pool = pool_new(2);
	struct pool_queue queues[N];
	struct counted *jobs[N];
	unsigned int n_begun = 0;

	(void)state;
	atomic_store(&n_switches, 0);
	for (int i = 0; i < N; i++) {
		queue_init(pool, &queues[i], 1, 1);
		jobs[i] = counted_new(1, many, 50000);
		jobs[i]->job.steps[0].run = note_switch;
		pool_submit(pool, &queues[i], &jobs[i]->job);
	}
	/* More than a round of both threads, of 60 ms that a job takes. */
	while (atomic_load(&jobs[0]->n_ran[0]) < 1150)
		usleep(100);
	for (int i = 0; i < N; i++)
		n_begun += atomic_load(&jobs[i]->n_ran[0]) > 0;
	assert_int_equal(n_begun, N);
	for (int i = 0; i < N; i++) {
		wait_done(jobs[i]);
		assert_complete(jobs[i]);
		free(jobs[i]);
		pool_queue_deinit(pool, &queues[i]);
	}
	assert_in_range(atomic_load(&n_switches), 1, N * 1200 / 20);
	pool_free(pool);
}

/* A job that is under way, but whose turn has not come, ends at once and runs nothing. */
static void a_job_that_no_thread_is_at_is_cancelled_at_once(void **state)
{
	static const uint64_t one[4] = {1}, many[4] = {MAX_TASKS};
	struct pool *pool = pool_new(1);
	struct pool_queue queues[2];
	struct counted *running = counted_new(1, one, 300000000);
	struct counted *due = counted_new(1, many, 0), *next = counted_new(1, one, 0);

	(void)state;
	for (int q = 0; q < 2; q++)
		queue_init(pool, &queues[q], 1, 1);
	pool_submit(pool, &queues[0], &running->job);
	while (!atomic_load(&running->n_begun))
		usleep(100);
	pool_submit(pool, &queues[1], &due->job);
	pool_submit(pool, &queues[1], &next->job);
	assert_int_equal(pool_stalled_ns(pool, &due->job), 0);
	pool_cancel(pool, &due->job);
	assert_int_equal(due->n_done, 1);
	assert_true(due->job.cancelled);
	assert_int_equal(running->n_done, 0);
	wait_done(running);
	wait_done(next);
	assert_complete(next);
	assert_int_equal(atomic_load(&due->n_ran[0]), 0);
	free(running);
	free(due);
	free(next);
	for (int q = 0; q < 2; q++)
		pool_queue_deinit(pool, &queues[q]);
	pool_free(pool);
}

/* Until it is told to end: in one task, with signs of life, without, and with no processor either. */
enum { COMPUTES, LIVES, STARVES };

static void endure(const struct pool_step *step, uint64_t task, void *scratch)
{
	struct counted *counted = (struct counted *)step->args;

	(void)scratch;
	atomic_store(&counted->n_begun, 1);
	while (task == 0 &&
	       (counted->task_ns == LIVES ? cpu_goes_on() : !atomic_load(&counted->job.stop)))
		if (counted->task_ns != COMPUTES)
			usleep(1000);
}

static struct counted *start_enduring(struct pool *pool, struct pool_queue *queue, uint64_t how)
{
	/* Nobody draws them all one by one. */
	static const uint64_t shape[4] = {UINT64_C(1) << 39};
	struct counted *counted = counted_new(1, shape, how);

	counted->job.steps[0].run = endure;
	pool_submit(pool, queue, &counted->job);
	while (!atomic_load(&counted->n_begun))
		usleep(100);
	return counted;
}

/* Watches a job that endures for so long, or until it has stalled for @most. */
static uint64_t stalled_for_ns(struct pool *pool, struct pool_job *job, uint64_t ns, uint64_t most)
{
	uint64_t start = clock_ns(), stalled = 0;

	while (clock_ns() - start < ns && stalled < most) {
		stalled = pool_stalled_ns(pool, job);
		usleep(1000);
	}
	return stalled;
}

static void progress_is_counted_inside_tasks(void **state)
{
	struct pool *pool = pool_new(1);
	struct pool_queue queue;
	struct counted *living, *hanging, *starving;

	(void)state;
	queue_init(pool, &queue, 1, 1);
	living = start_enduring(pool, &queue, LIVES);
	assert_in_range(stalled_for_ns(pool, &living->job, 300 * NS_PER_MS, 150 * NS_PER_MS), 0,
			150 * NS_PER_MS - 1);
	pool_cancel(pool, &living->job);
	wait_done(living);
	assert_true(living->job.cancelled);

	hanging = start_enduring(pool, &queue, COMPUTES);
	assert_true(stalled_for_ns(pool, &hanging->job, 60 * NS_PER_S, 150 * NS_PER_MS) >=
		    150 * NS_PER_MS);
	pool_cancel(pool, &hanging->job);
	wait_done(hanging);
	starving = start_enduring(pool, &queue, STARVES);
	assert_in_range(stalled_for_ns(pool, &starving->job, 300 * NS_PER_MS, 150 * NS_PER_MS), 1,
			150 * NS_PER_MS - 1);
	pool_cancel(pool, &starving->job);
	wait_done(starving);
	free(starving);
	free(living);
	free(hanging);
	pool_queue_deinit(pool, &queue);
	pool_free(pool);
}

static void cancelled_jobs_end_early_and_the_next_one_starts(void **state)
{
	static const uint64_t many[4] = {4000}, few[4] = {5};
	struct pool *pool = pool_new(2);
	struct pool_queue queue;
	struct counted *running = counted_new(1, many, 100000);
	struct counted *waiting = counted_new(1, many, 0);
	struct counted *last = counted_new(1, few, 0);

	(void)state;
	queue_init(pool, &queue, 1, 1);
	pool_submit(pool, &queue, &running->job);
	pool_submit(pool, &queue, &waiting->job);
	pool_submit(pool, &queue, &last->job);
	usleep(1000);
	pool_cancel(pool, &waiting->job);
	wait_done(waiting);
	assert_true(waiting->job.cancelled);
	assert_int_equal(atomic_load(&waiting->n_ran[0]), 0);
	pool_cancel(pool, &running->job);
	wait_done(running);
	assert_true(running->job.cancelled);
	assert_true(atomic_load(&running->n_ran[0]) < 4000);
	wait_done(last);
	assert_complete(last);
	pool_cancel(pool, &last->job); /* too late: nothing happens */
	assert_int_equal(last->n_done, 0);
	assert_false(last->job.cancelled);
	free(running);
	free(waiting);
	free(last);
	pool_queue_deinit(pool, &queue);
	pool_free(pool);
}

static void jobs_run_on_the_calling_thread(void **state)
{
	static const uint64_t shape[4] = {3, 0, 4};
	struct counted *counted = counted_new(3, shape, 0);
	char scratch[64];

	(void)state;
	counted->job.scratch_bytes = sizeof(scratch);
	pool_run_here(&counted->job, scratch);
	assert_complete(counted);
	assert_int_equal(counted->n_done, 0);
	assert_true(counted->job.ended_ns >= counted->job.started_ns);
	free(counted);
}

static void scratch_comes_back_after_a_trim(void **state)
{
	static const uint64_t shape[4] = {64};
	struct pool *pool = pool_new(2);
	struct pool_queue queue;

	(void)state;
	queue_init(pool, &queue, 1, 1);
	for (int i = 0; i < 20; i++) {
		struct counted *counted = counted_new(1, shape, 0);

		counted->job.scratch_bytes = 1 << 20;
		pool_submit(pool, &queue, &counted->job);
		wait_done(counted);
		assert_complete(counted);
		free(counted);
		pool_trim(pool);
	}
	pool_queue_deinit(pool, &queue);
	pool_free(pool);
}

static void touch(const struct pool_step *step, uint64_t task, void *scratch)
{
	volatile char *page = (volatile char *)step->args + task * 4096;

	(void)scratch;
	*page = (char)(*page + 1);
}

/* A mapping whose file shrinks under it: SIGBUS at every page, and nobody dies. */
static void memory_that_vanishes_is_noticed(void **state)
{
	enum { PAGES = 8 };
	struct pool *pool = pool_new(2);
	struct pool_queue queue;
	struct counted *counted = counted_new(0, NULL, 0);
	int fd = memfd_create("vanishing", MFD_CLOEXEC);
	uint64_t hits = guard_hits();
	char *map;

	(void)state;
	assert_int_equal(ftruncate(fd, PAGES * 4096), 0);
	map = mmap(NULL, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(map, MAP_FAILED);
	assert_int_equal(ftruncate(fd, 4096), 0);
	guard_install(NULL);
	queue_init(pool, &queue, 1, 1);
	counted->job.n_steps = 1;
	counted->job.steps[0] = (struct pool_step){
		.n_tasks = PAGES, .run = touch, .args = map, .name = "touch"};
	pool_submit(pool, &queue, &counted->job);
	wait_done(counted);
	assert_int_equal(guard_hits() - hits, PAGES - 1);
	assert_true(atomic_load(&counted->job.vanished) > (uintptr_t)map);
	assert_true(atomic_load(&counted->job.vanished) < (uintptr_t)map + PAGES * 4096);
	munmap(map, PAGES * 4096);
	close(fd);
	free(counted);
	pool_queue_deinit(pool, &queue);
	pool_free(pool);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_task_runs_once_and_steps_in_order),
		cmocka_unit_test(jobs_without_tasks_end_too),
		cmocka_unit_test(jobs_of_a_queue_run_one_after_the_other),
		cmocka_unit_test(a_small_job_waits_for_one_turn_of_a_large_one),
		cmocka_unit_test(users_share_equally_whatever_they_have),
		cmocka_unit_test(users_share_by_weight),
		cmocka_unit_test(jobs_of_one_user_take_long_turns),
		cmocka_unit_test(a_job_that_no_thread_is_at_is_cancelled_at_once),
		cmocka_unit_test(progress_is_counted_inside_tasks),
		cmocka_unit_test(cancelled_jobs_end_early_and_the_next_one_starts),
		cmocka_unit_test(jobs_run_on_the_calling_thread),
		cmocka_unit_test(scratch_comes_back_after_a_trim),
		cmocka_unit_test(memory_that_vanishes_is_noticed),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
