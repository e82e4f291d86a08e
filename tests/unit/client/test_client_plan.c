/* SPDX-License-Identifier: MIT */
/* Plans and their runs: blocking, submitted, polled, cancelled, interrupted by a worker's death. */
#include "support.h"

#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

struct prepared {
	struct fmha_problem problem;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
};

static void prepare(struct fixture *f, struct prepared *p)
{
	make_problem(&p->problem, 16, 2, 8);
	p->buffer = make_tensors(f->device, &p->problem, 1);
	assert_ok(fmha_plan_new(f->device, &p->problem, NULL, &p->plan, &err));
}

static void dispose(struct prepared *p)
{
	p->plan = fmha_plan_free(p->plan);
	p->buffer = fmha_buffer_free(p->buffer);
}

static bool readable(int fd, int timeout_ms)
{
	struct pollfd poll_fd = {.fd = fd, .events = POLLIN};

	return poll(&poll_fd, 1, timeout_ms) == 1;
}

static void plan_runs_and_says_what_it_is(void **state)
{
	struct fixture *f = *state;
	struct fmha_run_result result = {0};
	struct fmha_plan_info info;
	struct prepared p;

	prepare(f, &p);
	assert_ok(fmha_plan_info(p.plan, &info, &err));
	assert_int_equal(info.n_stages, 1);
	assert_string_equal(info.stages[0].kernel, "fwd_fake_copy");
	assert_true(info.flops == 42);
	for (int i = 0; i < 10; i++) {
		assert_ok(fmha_plan_run(p.plan, NULL, &result, &err));
		check_tensors(p.buffer, &p.problem);
	}
	assert_int_equal(result.kernel_ns, 2);
	assert_int_equal(fake_counters(f->server).plans, 1);
	assert_int_equal(fake_counters(f->server).runs, 10);
	dispose(&p);
	assert_int_equal(fake_counters(f->server).plans, 0);
	assert_int_equal(fake_counters(f->server).buffers, 0);
}

static void named_kernels_are_asked_for_again_after_a_restart(void **state)
{
	struct fixture *f = *state;
	char names[2][32] = {"fwd_one", "fwd_two"};
	const char *const kernels[] = {names[0], names[1], NULL, "", ""};
	struct fmha_plan_options options = {
		.struct_size = sizeof(options), .n_kernels = 2, .kernels = kernels};
	struct fmha_plan_info info;
	struct prepared p;

	make_problem(&p.problem, 16, 2, 8);
	p.buffer = make_tensors(f->device, &p.problem, 1);
	options.n_kernels = 3;
	assert_error(fmha_plan_new(f->device, &p.problem, &options, &p.plan, &err), FMHA_EINVAL);
	options.n_kernels = 5;
	assert_error(fmha_plan_new(f->device, &p.problem, &options, &p.plan, &err), FMHA_EINVAL);
	options.n_kernels = 2;
	assert_ok(fmha_plan_new(f->device, &p.problem, &options, &p.plan, &err));
	memset(names, 'x', sizeof(names)); /* only borrowed */
	assert_ok(fmha_plan_info(p.plan, &info, &err));
	assert_string_equal(info.stages[0].kernel, "fwd_two");
	fake_kill_workers(f->server);
	assert_ok(fmha_plan_run(p.plan, NULL, NULL, &err));
	assert_ok(fmha_plan_info(p.plan, &info, &err));
	assert_string_equal(info.stages[0].kernel, "fwd_two");
	dispose(&p);
}

static void bad_problems_are_named_before_anything_is_sent(void **state)
{
	struct fixture *f = *state;
	struct fmha_error error = {0};
	struct fmha_problem problem;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	float data[64];

	make_problem(&problem, 16, 2, 8);
	buffer = make_tensors(f->device, &problem, 1);
	problem.hdim_q = 584;
	assert_int_equal(fmha_plan_new(f->device, &problem, NULL, &plan, &error), FMHA_EINVAL);
	assert_string_equal(error.field, "hdim_q");
	problem.hdim_q = 8;
	problem.q.buffer = 0;
	problem.q.data = data;
	assert_int_equal(fmha_plan_new(f->device, &problem, NULL, &plan, &error), FMHA_EINVAL);
	assert_string_equal(error.field, "tensor.q.data");
	problem.q.data = NULL;
	problem.q.buffer = 999;
	assert_int_equal(fmha_plan_new(f->device, &problem, NULL, &plan, &error), FMHA_ENOENT);
	assert_string_equal(error.field, "tensor.q.buffer");
	assert_int_equal(fake_counters(f->server).plans, 0);
	buffer = fmha_buffer_free(buffer);
}

static void rebinds_move_a_run_to_other_memory(void **state)
{
	struct fixture *f = *state;
	struct fmha_rebind rebinds[2] = {{.role = FMHA_T_Q}, {.role = FMHA_T_O}};
	struct fmha_run_options options = {
		.struct_size = sizeof(options), .n_rebinds = 2, .rebinds = rebinds};
	struct fmha_buffer *other;
	struct prepared p;
	size_t bytes;

	prepare(f, &p);
	bytes = tensor_bytes(&p.problem);
	assert_ok(fmha_buffer_new(f->device, 4 * bytes, &other, &err));
	fill(fmha_buffer_data(other), bytes, 99);
	rebinds[0].buffer = rebinds[1].buffer = fmha_buffer_id(other);
	rebinds[1].offset = p.problem.o.offset;
	assert_ok(fmha_plan_run(p.plan, &options, NULL, &err));
	check_tensors(other, &p.problem);
	assert_ok(fmha_plan_run(p.plan, NULL, NULL, &err)); /* and only that one */
	check_tensors(p.buffer, &p.problem);
	rebinds[0].buffer = 12345;
	assert_error(fmha_plan_run(p.plan, &options, NULL, &err), FMHA_ENOENT);
	rebinds[0].role = FMHA_N_TENSORS;
	assert_error(fmha_plan_run(p.plan, &options, NULL, &err), FMHA_EINVAL);
	options.n_rebinds = FMHA_MAX_REBINDS + 1;
	assert_error(fmha_plan_run(p.plan, &options, NULL, &err), FMHA_EINVAL);
	options.n_rebinds = 1;
	options.rebinds = NULL;
	assert_error(fmha_plan_run(p.plan, &options, NULL, &err), FMHA_EINVAL);
	other = fmha_buffer_free(other);
	dispose(&p);
}

static void idle_workers_death_is_nobodys_failure(void **state)
{
	struct fixture *f = *state;
	struct prepared p;

	prepare(f, &p);
	for (int i = 0; i < 3; i++) {
		fake_kill_workers(f->server);
		assert_ok(fmha_plan_run(p.plan, NULL, NULL, &err));
		check_tensors(p.buffer, &p.problem);
	}
	assert_int_equal(fake_counters(f->server).imports, 3);
	dispose(&p);
}

static void *kill_soon(void *server)
{
	usleep(50000);
	fake_kill_workers(server);
	return NULL;
}

static void death_in_flight_is_told(void **state)
{
	struct fixture *f = *state;
	struct prepared p;
	pthread_t killer;
	double start = now_seconds();

	prepare(f, &p);
	fake_hold_runs(f->server, true);
	assert_int_equal(pthread_create(&killer, NULL, kill_soon, f->server), 0);
	assert_error(fmha_plan_run(p.plan, NULL, NULL, &err), FMHA_EDEVICE);
	assert_true(now_seconds() - start < 2);
	pthread_join(killer, NULL);
	fake_hold_runs(f->server, false);
	assert_ok(fmha_plan_run(p.plan, NULL, NULL, &err));
	check_tensors(p.buffer, &p.problem);
	dispose(&p);
}

static void submitted_runs_are_polled(void **state)
{
	struct fixture *f = *state;
	struct fmha_request *requests[3];
	struct prepared p;
	int fds[3];

	prepare(f, &p);
	fake_hold_runs(f->server, true);
	for (int i = 0; i < 3; i++) {
		assert_ok(fmha_plan_submit(p.plan, NULL, &requests[i], &err));
		assert_ok(fmha_request_fd(requests[i], &fds[i], &err));
		assert_error(fmha_request_wait(requests[i], 0, NULL, &err), FMHA_ETIMEDOUT);
		assert_false(readable(fds[i], 0));
	}
	fake_hold_runs(f->server, false);
	for (int i = 0; i < 3; i++) {
		struct fmha_run_result result = {0};
		struct fmha_error error;
		int r;

		do { /* news for another request are possible */
			assert_true(readable(fds[i], 5000));
			r = fmha_request_wait(requests[i], 0, &result, &error);
		} while (r == FMHA_ETIMEDOUT);
		assert_int_equal(r, 0);
		assert_int_equal(result.kernel_ns, 2);
		/* Answered requests stay readable and keep their outcome. */
		assert_true(readable(fds[i], 0));
		assert_ok(fmha_request_wait(requests[i], 0, &result, &err));
		assert_null(fmha_request_free(requests[i]));
	}
	check_tensors(p.buffer, &p.problem);
	dispose(&p);
	assert_null(fmha_request_free(NULL));
}

static void cancelled_runs_say_so(void **state)
{
	struct fixture *f = *state;
	struct fmha_request *request, *other;
	struct prepared p;

	prepare(f, &p);
	fake_hold_runs(f->server, true);
	assert_ok(fmha_plan_submit(p.plan, NULL, &request, &err));
	assert_ok(fmha_plan_submit(p.plan, NULL, &other, &err));
	assert_ok(fmha_request_cancel(request, &err));
	assert_error(fmha_request_wait(request, 1000, NULL, &err), FMHA_ECANCELED);
	assert_error(fmha_request_wait(request, 0, NULL, &err), FMHA_ECANCELED);
	assert_ok(fmha_request_cancel(request, &err));
	request = fmha_request_free(request);
	/* Freeing what has not ended cancels it. */
	other = fmha_request_free(other);
	assert_ok(fmha_device_ping(f->device, &err));
	assert_int_equal(fake_counters(f->server).cancels, 2);
	fake_hold_runs(f->server, false);
	dispose(&p);
}

static void a_run_that_takes_too_long_is_given_up(void **state)
{
	struct fixture *f = *state;
	struct fmha_run_options options = {.struct_size = sizeof(options), .timeout_ms = 100};
	struct prepared p;
	double start = now_seconds();

	prepare(f, &p);
	fake_hold_runs(f->server, true);
	assert_error(fmha_plan_run(p.plan, &options, NULL, &err), FMHA_ETIMEDOUT);
	assert_true(now_seconds() - start < 1);
	assert_ok(fmha_device_ping(f->device, &err));
	assert_int_equal(fake_counters(f->server).cancels, 1);
	fake_hold_runs(f->server, false);
	assert_ok(fmha_plan_run(p.plan, NULL, NULL, &err));
	dispose(&p);
}

/* The fake takes 16 requests at once; the 17th has to wait for an answer. */
static void more_requests_than_fit_wait_for_their_turn(void **state)
{
	struct fixture *f = *state;
	struct fmha_run_options options = {.struct_size = sizeof(options), .timeout_ms = 100};
	struct fmha_request *requests[40], *late;
	struct prepared p;
	int n;

	prepare(f, &p);
	fake_hold_runs(f->server, true);
	for (n = 0; n < 16; n++)
		assert_ok(fmha_plan_submit(p.plan, NULL, &requests[n], &err));
	assert_error(fmha_plan_submit(p.plan, &options, &late, &err), FMHA_ETIMEDOUT);
	fake_hold_runs(f->server, false);
	for (; n < 40; n++)
		assert_ok(fmha_plan_submit(p.plan, NULL, &requests[n], &err));
	while (n-- > 0) {
		assert_ok(fmha_request_wait(requests[n], 5000, NULL, &err));
		requests[n] = fmha_request_free(requests[n]);
	}
	dispose(&p);
}

static void requests_outlive_their_plan_and_buffer(void **state)
{
	struct fixture *f = *state;
	struct fmha_request *request;
	struct prepared p;

	prepare(f, &p);
	assert_ok(fmha_plan_submit(p.plan, NULL, &request, &err));
	assert_ok(fmha_request_wait(request, 5000, NULL, &err));
	dispose(&p);
	assert_ok(fmha_request_wait(request, 0, NULL, &err));
	request = fmha_request_free(request);
}

static void plans_of_freed_buffers_fail(void **state)
{
	struct fixture *f = *state;
	struct prepared p;

	prepare(f, &p);
	p.buffer = fmha_buffer_free(p.buffer);
	assert_error(fmha_plan_run(p.plan, NULL, NULL, &err), FMHA_ENOENT);
	fake_kill_workers(f->server);
	assert_error(fmha_plan_run(p.plan, NULL, NULL, &err), FMHA_ENOENT);
	dispose(&p);
}

static void runs_name_events(void **state)
{
	struct fixture *f = *state;
	uint8_t handle[FMHA_HANDLE_BYTES] = "event";
	struct fmha_event *events[2] = {0};
	struct fmha_fence wait = {0}, signal = {0};
	struct fmha_run_options options = {.struct_size = sizeof(options),
					   .n_waits = 1,
					   .n_signals = 1,
					   .waits = &wait,
					   .signals = &signal};
	struct fmha_error error;
	struct prepared p;
	uint64_t freed;

	prepare(f, &p);
	for (int i = 0; i < 2; i++)
		assert_ok(fmha_event_import(f->device, handle, sizeof(handle), &events[i], &err));
	assert_true(fmha_event_id(events[0]) && fmha_event_id(events[1]));
	assert_int_not_equal(fmha_event_id(events[0]), fmha_event_id(events[1]));
	assert_int_equal(fake_counters(f->server).events, 2);
	wait.event = fmha_event_id(events[0]);
	signal.event = fmha_event_id(events[1]);
	assert_ok(fmha_plan_run(p.plan, &options, NULL, &err));
	assert_int_equal(fake_counters(f->server).ordered, 2);

	/* Another worker knows nothing of them: they are imported again, under the same ids. */
	fake_kill_workers(f->server);
	assert_ok(fmha_plan_run(p.plan, &options, NULL, &err));
	assert_int_equal(fake_counters(f->server).ordered, 4);
	assert_int_equal(fake_counters(f->server).events, 2);

	wait.value = 1;
	assert_int_equal(fmha_plan_run(p.plan, &options, NULL, &error), FMHA_EINVAL);
	assert_string_equal(error.field, "waits");
	wait.value = 0;
	freed = wait.event;
	events[0] = fmha_event_free(events[0]);
	assert_int_equal(fake_counters(f->server).events, 1);
	assert_error(fmha_plan_run(p.plan, &options, NULL, &err), FMHA_ENOENT);

	assert_error(fmha_event_import(f->device, handle, 63, &events[0], &err), FMHA_EINVAL);
	handle[0] = 'x';
	assert_error(fmha_event_import(f->device, handle, sizeof(handle), &events[0], &err),
		     FMHA_EINVAL);
	handle[0] = 'e';
	assert_ok(fmha_event_import(f->device, handle, sizeof(handle), &events[0], &err));
	assert_int_not_equal(fmha_event_id(events[0]), freed);
	assert_null(fmha_event_free(NULL));
	assert_int_equal(fmha_event_id(NULL), 0);

	/* One that outlives its device handle's last plan and buffer. */
	dispose(&p);
	for (int i = 0; i < 2; i++)
		events[i] = fmha_event_free(events[i]);
	assert_int_equal(fake_counters(f->server).events, 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(plan_runs_and_says_what_it_is),
		TEST(named_kernels_are_asked_for_again_after_a_restart),
		TEST(bad_problems_are_named_before_anything_is_sent),
		TEST(rebinds_move_a_run_to_other_memory),
		TEST(idle_workers_death_is_nobodys_failure),
		TEST(death_in_flight_is_told),
		TEST(submitted_runs_are_polled),
		TEST(cancelled_runs_say_so),
		TEST(a_run_that_takes_too_long_is_given_up),
		TEST(more_requests_than_fit_wait_for_their_turn),
		TEST(requests_outlive_their_plan_and_buffer),
		TEST(plans_of_freed_buffers_fail),
		TEST(runs_name_events),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
