/* SPDX-License-Identifier: MIT */
/* One client, many threads. Meant for the thread sanitizer as much as for its asserts. */
#include "support.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define N_THREADS 16
#define N_CALLS   60

struct worker {
	struct fixture *f;
	struct fmha_plan *plan;
	int index;
	atomic_int *failures; /* cmocka's asserts belong to the main thread */
	int tolerate;         /* an error that may happen, or 0 */
};

static void note(struct worker *w, int r)
{
	if (r != 0 && r != w->tolerate && r != FMHA_ECONN * (w->tolerate != 0))
		atomic_fetch_add(w->failures, 1);
}

static void forward_staged(struct worker *w, int i)
{
	float q[6 * 2 * 8], o[6 * 2 * 8] = {0};
	struct fmha_problem problem;
	int r;

	make_problem(&problem, 6, 2, 8);
	fill(q, sizeof(q), (uint32_t)(w->index * N_CALLS + i));
	problem.q.data = problem.k.data = problem.v.data = q;
	problem.o.data = o;
	r = fmha_forward(w->f->device, &problem, NULL, NULL, NULL);
	note(w, r);
	if (r == 0 && memcmp(q, o, sizeof(q)) != 0)
		atomic_fetch_add(w->failures, 1);
}

static void submit_and_wait(struct worker *w)
{
	struct fmha_request *requests[3] = {0};

	for (int i = 0; i < 3; i++)
		note(w, fmha_plan_submit(w->plan, NULL, &requests[i], NULL));
	for (int i = 0; i < 3; i++) {
		if (requests[i] && i != 1)
			note(w, fmha_request_wait(requests[i], 10000, NULL, NULL));
		requests[i] = fmha_request_free(requests[i]);
	}
}

static void buffer_there_and_gone(struct worker *w)
{
	struct fmha_buffer *buffer;
	int r = fmha_buffer_new(w->f->device, 4096, &buffer, NULL);

	note(w, r);
	if (r == 0)
		buffer = fmha_buffer_free(buffer);
}

static void *work(void *arg)
{
	struct worker *w = arg;

	for (int i = 0; i < N_CALLS; i++) {
		switch ((w->index + i) % 5) {
		case 0:
			forward_staged(w, i);
			break;
		case 1:
			note(w, fmha_plan_run(w->plan, NULL, NULL, NULL));
			break;
		case 2:
			submit_and_wait(w);
			break;
		case 3:
			note(w, fmha_device_ping(w->f->device, NULL));
			note(w, fmha_client_ping(w->f->client, NULL));
			break;
		default:
			buffer_there_and_gone(w);
		}
	}
	return NULL;
}

static int run_threads(struct fixture *f, int tolerate, int kills)
{
	struct worker workers[N_THREADS];
	pthread_t threads[N_THREADS];
	struct fmha_problem problem;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	atomic_int failures = 0;

	make_problem(&problem, 4, 1, 8);
	buffer = make_tensors(f->device, &problem, 1);
	assert_ok(fmha_plan_new(f->device, &problem, NULL, &plan, &err));
	for (int i = 0; i < N_THREADS; i++) {
		workers[i] = (struct worker){f, plan, i, &failures, tolerate};
		assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
	}
	for (int i = 0; i < kills; i++) {
		usleep(5000);
		fake_kill_workers(f->server);
	}
	for (int i = 0; i < N_THREADS; i++)
		pthread_join(threads[i], NULL);
	assert_ok(fmha_plan_run(plan, NULL, NULL, &err));
	check_tensors(buffer, &problem);
	plan = fmha_plan_free(plan);
	buffer = fmha_buffer_free(buffer);
	return failures;
}

static void sixteen_threads_share_a_client(void **state)
{
	struct fixture *f = *state;

	assert_int_equal(run_threads(f, 0, 0), 0);
	assert_int_equal(fake_counters(f->server).workers, 1);
}

static void sixteen_threads_survive_dying_workers(void **state)
{
	struct fixture *f = *state;

	assert_int_equal(run_threads(f, FMHA_EDEVICE, 10), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(sixteen_threads_share_a_client),
		TEST(sixteen_threads_survive_dying_workers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
