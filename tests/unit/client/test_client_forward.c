/* SPDX-License-Identifier: MIT */
/* fmha_forward(): staging of ordinary memory, the plan cache, and the retry. */
#include "support.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void ordinary_memory_is_staged(void **state)
{
	struct fixture *f = *state;
	struct fmha_problem problem;
	uint8_t *data;
	size_t bytes;

	make_problem(&problem, 33, 3, 24);
	bytes = tensor_bytes(&problem);
	data = malloc(4 * bytes);
	for (int i = 0; i < 5; i++) {
		fill(data, 4 * bytes, (uint32_t)i);
		problem.q.data = data;
		problem.k.data = data + bytes;
		problem.v.data = data + 2 * bytes;
		problem.o.data = data + 3 * bytes;
		assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
		assert_memory_equal(data, data + 3 * bytes, bytes);
	}
	/* One plan and one arena for all of them. */
	assert_int_equal(fake_counters(f->server).plans, 1);
	assert_int_equal(fake_counters(f->server).buffers, 1);
	free(data);
}

/* O is every other head of a wider tensor, BHSD, with sentinels between. */
static void only_named_elements_are_written(void **state)
{
	enum { SEQ = 5, HEADS = 2, DIM = 8, WIDE = 3 * DIM };
	struct fixture *f = *state;
	float q[SEQ * HEADS * DIM], kv[SEQ * HEADS * DIM], o[HEADS * SEQ * WIDE];
	struct fmha_problem problem;

	make_problem(&problem, SEQ, HEADS, DIM);
	for (int i = 0; i < SEQ * HEADS * DIM; i++)
		q[i] = (float)(i + 1);
	memset(kv, 0, sizeof(kv));
	for (size_t i = 0; i < sizeof(o) / sizeof(o[0]); i++)
		o[i] = -1;
	problem.q.data = q;
	problem.k.data = problem.v.data = kv;
	problem.o.data = o + DIM;
	problem.o.stride[0] = HEADS * SEQ * WIDE;
	problem.o.stride[1] = WIDE;
	problem.o.stride[2] = SEQ * WIDE;
	problem.o.stride[3] = 1;
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	for (int h = 0; h < HEADS; h++) {
		for (int s = 0; s < SEQ; s++) {
			for (int d = 0; d < WIDE; d++) {
				float expected = d >= DIM && d < 2 * DIM
							 ? q[(s * HEADS + h) * DIM + d - DIM]
							 : -1;

				assert_true(o[(h * SEQ + s) * WIDE + d] == expected);
			}
		}
	}
}

static void moving_tensors_need_one_plan(void **state)
{
	struct fixture *f = *state;
	struct fmha_problem problem;
	struct fmha_buffer *buffers[6];

	for (int i = 0; i < 6; i++) {
		make_problem(&problem, 16, 2, 8);
		buffers[i] = make_tensors(f->device, &problem, (uint32_t)i);
		assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
		check_tensors(buffers[i], &problem);
	}
	assert_int_equal(fake_counters(f->server).plans, 1);
	assert_int_equal(fake_counters(f->server).rebinds, 5 * 4);
	/* A plan goes with the buffer that it was made with. */
	buffers[0] = fmha_buffer_free(buffers[0]);
	assert_int_equal(fake_counters(f->server).plans, 0);
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	for (int i = 1; i < 6; i++)
		buffers[i] = fmha_buffer_free(buffers[i]);
	assert_int_equal(fake_counters(f->server).plans, 0);
	assert_int_equal(fake_counters(f->server).buffers, 0);
}

/* The kept plan's kernels may ask more of where tensors begin than these do: a new one is made, once. */
static void a_rebind_that_is_refused_gets_a_plan_of_its_own(void **state)
{
	struct fixture *f = *state;
	struct fmha_problem problem;
	struct fmha_buffer *buffers[2];

	make_problem(&problem, 16, 2, 8);
	buffers[0] = make_tensors(f->device, &problem, 1);
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	make_problem(&problem, 16, 2, 8);
	buffers[1] = make_tensors(f->device, &problem, 2);
	fake_misbehave(f->server, PROTO_RUN, FAKE_REFUSE, 0, 1);
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	check_tensors(buffers[1], &problem);
	assert_int_equal(fake_counters(f->server).plans, 1);
	/* A plan of its own that is refused is refused. */
	fake_misbehave(f->server, PROTO_RUN, FAKE_REFUSE, 0, 1);
	assert_error(fmha_forward(f->device, &problem, NULL, NULL, &err), FMHA_EINVAL);
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	for (int i = 0; i < 2; i++)
		buffers[i] = fmha_buffer_free(buffers[i]);
	assert_int_equal(fake_counters(f->server).plans, 0);
}

static void the_plan_cache_has_a_limit(void **state)
{
	struct fixture *f = *state;
	struct fmha_problem problem;
	struct fmha_buffer *buffer;

	make_problem(&problem, 200, 1, 8);
	buffer = make_tensors(f->device, &problem, 1);
	for (int i = 1; i <= 200; i++) {
		problem.seqlen_q = i;
		assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	}
	assert_int_equal(fake_counters(f->server).plans, 64);
	buffer = fmha_buffer_free(buffer);
	assert_int_equal(fake_counters(f->server).plans, 0);
}

static void a_lost_worker_is_replaced_once(void **state)
{
	struct fixture *f = *state;
	struct fmha_problem problem;
	float q[16 * 2 * 8], o[16 * 2 * 8];

	make_problem(&problem, 16, 2, 8);
	fill(q, sizeof(q), 5);
	problem.q.data = problem.k.data = problem.v.data = q;
	problem.o.data = o;
	fake_misbehave(f->server, PROTO_RUN, FAKE_CUT, 0, 1);
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	assert_memory_equal(q, o, sizeof(q));
	fake_misbehave(f->server, PROTO_RUN, FAKE_CUT, 0, 2);
	assert_error(fmha_forward(f->device, &problem, NULL, NULL, &err), FMHA_EDEVICE);
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	fake_misbehave(f->server, PROTO_RUN, FAKE_BUSY, 0, 1);
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	fake_pause(f->server);
	assert_error(fmha_forward(f->device, &problem, NULL, NULL, &err), FMHA_ECONN);
	fake_resume(f->server);
	memset(o, 0, sizeof(o));
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	assert_memory_equal(q, o, sizeof(q));
}

/* The worker may still write to the staging memory of a run that timed out. */
static void staging_memory_of_a_late_run_is_not_reused(void **state)
{
	struct fixture *f = *state;
	struct fmha_run_options options = {.struct_size = sizeof(options), .timeout_ms = 60};
	struct fmha_problem problem;
	float q[16 * 2 * 8], o[16 * 2 * 8];

	make_problem(&problem, 16, 2, 8);
	fill(q, sizeof(q), 5);
	problem.q.data = problem.k.data = problem.v.data = q;
	problem.o.data = o;
	fake_misbehave(f->server, PROTO_RUN, FAKE_SILENT, 0, 1);
	assert_error(fmha_forward(f->device, &problem, &options, NULL, &err), FMHA_ETIMEDOUT);
	assert_int_equal(fake_counters(f->server).buffers, 1);
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	assert_int_equal(fake_counters(f->server).buffers, 2);
	/* The other way: the answer is late and lets go. */
	fake_hold_runs(f->server, true);
	assert_error(fmha_forward(f->device, &problem, &options, NULL, &err), FMHA_ETIMEDOUT);
	fake_hold_runs(f->server, false);
	assert_ok(fmha_device_ping(f->device, &err));
	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	assert_int_equal(fake_counters(f->server).buffers, 2);
}

static void bad_calls_are_named(void **state)
{
	struct fixture *f = *state;
	struct fmha_run_options options = {.struct_size = sizeof(options), .n_rebinds = 1};
	struct fmha_rebind rebind = {0};
	struct fmha_error error = {0};
	struct fmha_problem problem;
	float data[64], o[64];

	make_problem(&problem, 4, 1, 8);
	problem.q.data = problem.k.data = problem.v.data = data;
	problem.o.data = o;
	options.rebinds = &rebind;
	assert_error(fmha_forward(f->device, &problem, &options, NULL, &err), FMHA_EINVAL);
	problem.q.offset = 4;
	assert_int_equal(fmha_forward(f->device, &problem, NULL, NULL, &error), FMHA_EINVAL);
	assert_string_equal(error.field, "tensor.q.offset");
	problem.q.offset = 0;
	problem.hdim_v = 520;
	assert_int_equal(fmha_forward(f->device, &problem, NULL, NULL, &error), FMHA_EINVAL);
	assert_string_equal(error.field, "hdim_v");
	problem.hdim_v = 8;
	problem.struct_size = 1;
	assert_error(fmha_forward(f->device, &problem, NULL, NULL, &err), FMHA_EINVAL);
	assert_error(fmha_forward(NULL, &problem, NULL, NULL, &err), FMHA_EINVAL);
	assert_error(fmha_forward(f->device, NULL, NULL, NULL, &err), FMHA_EINVAL);
	assert_int_equal(fake_counters(f->server).buffers, 0);
}

static void explain_needs_no_buffers(void **state)
{
	struct fixture *f = *state;
	struct fmha_problem problem;
	float data[64], o[64];
	char *json;

	make_problem(&problem, 4, 1, 8);
	problem.q.data = problem.k.data = problem.v.data = data;
	problem.o.data = o;
	assert_ok(fmha_explain(f->device, &problem, NULL, &json, &err));
	assert_non_null(strstr(json, "fake"));
	free(json);
	problem.hdim_q = 584;
	assert_error(fmha_explain(f->device, &problem, NULL, &json, &err), FMHA_EINVAL);
	assert_ok(fmha_registry_export(f->device, NULL, &json, &err));
	free(json);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(ordinary_memory_is_staged),
		TEST(only_named_elements_are_written),
		TEST(moving_tensors_need_one_plan),
		TEST(a_rebind_that_is_refused_gets_a_plan_of_its_own),
		TEST(the_plan_cache_has_a_limit),
		TEST(a_lost_worker_is_replaced_once),
		TEST(staging_memory_of_a_late_run_is_not_reused),
		TEST(bad_calls_are_named),
		TEST(explain_needs_no_buffers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
