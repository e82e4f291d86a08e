/* SPDX-License-Identifier: MIT */
/* A daemon that dies at any byte, or sends anything at all: a definite error, in time, nothing
 * left. */
#include "support.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One method's call, from an open device. Return: what the call returned. */
typedef int (*call_function)(struct fixture *f, struct fmha_error *err);

static int call_ping(struct fixture *f, struct fmha_error *err)
{
	return fmha_client_ping(f->client, err);
}

static int call_devices(struct fixture *f, struct fmha_error *err)
{
	size_t n;

	return fmha_client_devices(f->client, NULL, 0, &n, err);
}

static int call_status(struct fixture *f, struct fmha_error *err)
{
	char *json;
	int r = fmha_client_status(f->client, &json, err);

	if (r == 0)
		free(json);
	return r;
}

static int call_open(struct fixture *f, struct fmha_error *err)
{
	struct fmha_device *device;
	int r = fmha_device_open(f->client, 0, &device, err);

	if (r == 0)
		device = fmha_device_free(device);
	return r;
}

static int call_create(struct fixture *f, struct fmha_error *err)
{
	struct fmha_buffer *buffer;
	int r = fmha_buffer_new(f->device, 4096, &buffer, err);

	if (r == 0)
		buffer = fmha_buffer_free(buffer);
	return r;
}

static int call_import(struct fixture *f, struct fmha_error *err)
{
	struct fmha_memory memory = {.struct_size = sizeof(memory), .size = 4096};
	struct fmha_buffer *buffer;
	int r = fmha_memfd_new(4096, &memory.fd, err);

	if (r < 0)
		return r;
	r = fmha_buffer_import(f->device, &memory, &buffer, err);
	(void)close(memory.fd);
	if (r == 0)
		buffer = fmha_buffer_free(buffer);
	return r;
}

static int call_forward(struct fixture *f, struct fmha_error *err)
{
	struct fmha_problem problem;
	float q[8], o[8];

	make_problem(&problem, 1, 1, 8);
	problem.q.data = problem.k.data = problem.v.data = q;
	problem.o.data = o;
	fill(q, sizeof(q), 3);
	return fmha_forward(f->device, &problem, NULL, NULL, err);
}

static int call_explain(struct fixture *f, struct fmha_error *err)
{
	struct fmha_problem problem;
	float q[8], o[8];
	char *json;
	int r;

	make_problem(&problem, 1, 1, 8);
	problem.q.data = problem.k.data = problem.v.data = q;
	problem.o.data = o;
	r = fmha_explain(f->device, &problem, NULL, &json, err);
	if (r == 0)
		free(json);
	return r;
}

static const struct {
	enum proto_method method;
	call_function call;
} methods[] = {
	{PROTO_PING, call_ping},
	{PROTO_DEVICES, call_devices},
	{PROTO_STATUS, call_status},
	{PROTO_OPEN_DEVICE, call_open},
	{PROTO_BUFFER_CREATE, call_create},
	{PROTO_BUFFER_IMPORT, call_import},
	{PROTO_BUFFER_RELEASE, call_create},
	{PROTO_PLAN, call_forward},
	{PROTO_RUN, call_forward},
	{PROTO_EXPLAIN, call_explain},
};

#define N_METHODS (sizeof(methods) / sizeof(methods[0]))

/* A definite answer: success by way of the library's own retry, or an error that says what
 * happened. */
static void check_outcome(int r, const struct fmha_error *err)
{
	if (r == 0)
		return;
	if (r != FMHA_ECONN && r != FMHA_EDEVICE && r != FMHA_EPROTO && r != FMHA_ETIMEDOUT)
		fail_msg("%s: %s", fmha_error_name(r), err->msg);
	assert_int_equal(err->code, r);
	assert_true(err->msg[0] != '\0');
}

static void faulty_call(struct fixture *f, size_t i, enum fake_fault fault, uint32_t at, int times)
{
	struct fmha_error err = {0};

	/* Cached plans would spare the call that is to fail. */
	if (methods[i].method == PROTO_PLAN)
		fake_kill_workers(f->server);
	fake_misbehave(f->server, methods[i].method, fault, at, times);
	check_outcome(methods[i].call(f, &err), &err);
	fake_misbehave(f->server, methods[i].method, FAKE_SOUND, 0, 0);
	memset(&err, 0, sizeof(err));
	if (methods[i].call(f, &err) != 0)
		fail_msg("method %zu after fault %d at %u: %s", i, (int)fault, at, err.msg);
}

static void death_at_each_byte_of_an_answer(void **state)
{
	struct fixture *f = *state;

	for (size_t i = 0; i < N_METHODS; i++) {
		struct fmha_error err = {0};
		size_t n;

		assert_int_equal(methods[i].call(f, &err), 0);
		n = fake_answer_bytes(f->server, methods[i].method);
		assert_true(n > 5);
		for (uint32_t at = 0; at < n; at++)
			faulty_call(f, i, FAKE_CUT, at, at % 2 ? 1 : 4);
	}
}

/* What looks like the beginning of a long frame is found out by the second call that it delays. */
static void recover(struct fixture *f, size_t i)
{
	struct fmha_error err = {0};
	int r = FMHA_ETIMEDOUT;

	for (int attempt = 0; attempt < 4 && r != 0; attempt++)
		r = methods[i].call(f, &err);
	if (r != 0)
		fail_msg("method %zu: %s", i, err.msg);
}

static void each_flipped_bit_of_an_answer(void **state)
{
	struct fixture *f = *state;
	struct fmha_client *patient = f->client;
	struct fmha_device *device = f->device;

	/* A flipped length leaves the client waiting for more: its deadline ends that. */
	f->client = connect_with_timeout(f, 60);
	assert_ok(fmha_device_open(f->client, 0, &f->device, &err));
	for (size_t i = 0; i < N_METHODS; i++) {
		struct fmha_error err = {0};
		size_t n;

		/* What a flip may do to a worker's id or a plan's name is not the client's to
		 * notice. */
		if (methods[i].method != PROTO_PING && methods[i].method != PROTO_STATUS &&
		    methods[i].method != PROTO_DEVICES)
			continue;
		assert_int_equal(methods[i].call(f, &err), 0);
		n = fake_answer_bytes(f->server, methods[i].method);
		for (uint32_t at = 0; at < 8 * n; at += at < 128 ? 1 : 37) {
			fake_misbehave(f->server, methods[i].method, FAKE_FLIP, at, 2);
			(void)methods[i].call(f, &err);
			fake_misbehave(f->server, methods[i].method, FAKE_SOUND, 0, 0);
			recover(f, i);
		}
	}
	f->device = fmha_device_free(f->device);
	f->client = fmha_client_free(f->client);
	f->client = patient;
	f->device = device;
}

static void random_bytes_for_answers(void **state)
{
	struct fixture *f = *state;
	struct fmha_client *patient = f->client;
	struct fmha_device *device = f->device;

	f->client = connect_with_timeout(f, 60);
	assert_ok(fmha_device_open(f->client, 0, &f->device, &err));
	for (size_t i = 0; i < N_METHODS; i++) {
		if (methods[i].method == PROTO_BUFFER_RELEASE)
			continue; /* its deadline is its own: see release_does_not_hang */
		for (uint32_t seed = 0; seed < 40; seed++) {
			struct fmha_error err = {0};

			if (methods[i].method == PROTO_PLAN)
				fake_kill_workers(f->server);
			fake_misbehave(f->server, methods[i].method, FAKE_GARBAGE, seed * 7919, 2);
			check_outcome(methods[i].call(f, &err), &err);
			fake_misbehave(f->server, methods[i].method, FAKE_SOUND, 0, 0);
			recover(f, i);
		}
	}
	f->device = fmha_device_free(f->device);
	f->client = fmha_client_free(f->client);
	f->client = patient;
	f->device = device;
}

static void answers_that_break_the_rules(void **state)
{
	static const enum fake_fault faults[] = {FAKE_NO_FD, FAKE_MANY_FDS, FAKE_WRONG_ID,
						 FAKE_FLOOD};
	struct fixture *f = *state;

	for (size_t i = 0; i < N_METHODS; i++) {
		for (size_t j = 0; j < sizeof(faults) / sizeof(faults[0]); j++) {
			for (int times = 1; times <= 2; times++)
				faulty_call(f, i, faults[j], 0, times);
		}
	}
	fake_misbehave(f->server, PROTO_STATUS, FAKE_PIPE, 0, 1);
	assert_error(call_status(f, &err), FMHA_EPROTO);
	fake_misbehave(f->server, PROTO_STATUS, FAKE_SHORT, 0, 1);
	assert_error(call_status(f, &err), FMHA_EPROTO);
	fake_misbehave(f->server, PROTO_OPEN_DEVICE, FAKE_PIPE, 0, 1);
	assert_error(call_open(f, &err), FMHA_EPROTO);
}

static void answers_byte_by_byte_are_answers(void **state)
{
	struct fixture *f = *state;

	for (size_t i = 0; i < N_METHODS; i++) {
		fake_misbehave(f->server, methods[i].method, FAKE_BYTEWISE, 0, 3);
		assert_ok(methods[i].call(f, &err));
		fake_misbehave(f->server, methods[i].method, FAKE_SOUND, 0, 0);
	}
}

static void release_does_not_hang(void **state)
{
	struct fixture *f = *state;
	struct fmha_buffer *buffer;
	double start;

	assert_ok(fmha_buffer_new(f->device, 4096, &buffer, &err));
	fake_misbehave(f->server, PROTO_BUFFER_RELEASE, FAKE_SILENT, 0, 1);
	start = now_seconds();
	buffer = fmha_buffer_free(buffer);
	assert_true(now_seconds() - start < 4);
	assert_ok(fmha_device_ping(f->device, &err));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(death_at_each_byte_of_an_answer),  TEST(each_flipped_bit_of_an_answer),
		TEST(random_bytes_for_answers),         TEST(answers_that_break_the_rules),
		TEST(answers_byte_by_byte_are_answers), TEST(release_does_not_hang),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
