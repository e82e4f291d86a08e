/* SPDX-License-Identifier: MIT */
/* Envelopes, params and results: what travels comes back, what is wrong is named. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <proto/frame.h>
#include <proto/message.h>
#include <proto/problem.h>

static void receive(const struct proto_buffer *buffer, struct proto_message *message)
{
	struct fmha_error err = {0};
	struct proto_frame frame;

	assert_int_equal(
		proto_frame_parse(buffer->data, buffer->size, PROTO_MAX_FRAME, &frame, &err), 0);
	assert_int_equal(frame.header_bytes + frame.payload_bytes, buffer->size);
	if (proto_message_decode(message, buffer->data + frame.header_bytes, frame.payload_bytes,
				 &err) < 0)
		fail_msg("%s", err.msg);
}

static void plan_request_round_trip(void **state)
{
	struct proto_plan_params params = {0}, back;
	struct fmha_problem *problem = &params.problem;
	struct proto_message message = {0};
	struct proto_buffer buffer = {0};
	struct fmha_error err = {0};

	(void)state;
	fmha_problem_init(problem);
	problem->batch = 2;
	problem->nhead_q = 16;
	problem->nhead_k = 4;
	problem->seqlen_q = problem->seqlen_k = 1024;
	problem->hdim_q = problem->hdim_v = 128;
	problem->mask = FMHA_MASK_TOP_LEFT;
	problem->window_right = 0;
	problem->q = (struct fmha_tensor){.buffer = 7, .dtype = FMHA_BF16};
	problem->k = (struct fmha_tensor){
		.buffer = UINT64_MAX, .offset = 4096, .dtype = FMHA_BF16, .stride = {1, -2, 3, 1}};
	assert_int_equal(proto_encode_request(&buffer, 5, PROTO_PLAN, &params, &err), 0);
	receive(&buffer, &message);
	assert_int_equal(message.type, PROTO_REQUEST);
	assert_int_equal(message.id, 5);
	assert_int_equal(message.method, PROTO_PLAN);
	if (proto_decode_params(&message, &back, &err) < 0)
		fail_msg("%s", err.msg);
	assert_true(isnan(back.problem.scale));
	back.problem.scale = problem->scale = 1;
	assert_memory_equal(&back, &params, sizeof(params));
	proto_message_deinit(&message);
	proto_buffer_deinit(&buffer);
}

static void error_answer_round_trip(void **state)
{
	struct fmha_error error = {.code = FMHA_EINVAL, .field = "hdim_q", .msg = "hdim_q 63: no"};
	struct proto_message message = {0};
	struct proto_buffer buffer = {0};
	struct fmha_error err = {0};

	(void)state;
	assert_int_equal(proto_encode_error(&buffer, 9, &error, &err), 0);
	receive(&buffer, &message);
	assert_int_equal(message.type, PROTO_ANSWER);
	assert_int_equal(message.id, 9);
	assert_int_equal(message.error.code, FMHA_EINVAL);
	assert_string_equal(message.error.field, error.field);
	assert_string_equal(message.error.msg, error.msg);
	proto_message_deinit(&message);
	proto_buffer_deinit(&buffer);
}

static void names_a_field_of_the_wrong_type(void **state)
{
	struct proto_plan_params params = {0};
	struct proto_message message = {0};
	struct proto_buffer buffer = {0};
	struct fmha_error err = {0};
	uint8_t *at;

	(void)state;
	fmha_problem_init(&params.problem);
	params.problem.k = (struct fmha_tensor){.buffer = 1, .stride = {77, 88, 99, 1}};
	assert_int_equal(proto_encode_request(&buffer, 5, PROTO_PLAN, &params, &err), 0);
	at = memchr(buffer.data, 99, buffer.size);
	assert_non_null(at);
	*at = 0xc0; /* nil */
	receive(&buffer, &message);
	assert_int_equal(proto_decode_params(&message, &params, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "tensor.k.stride[2]");
	assert_string_equal(err.msg, "tensor.k.stride[2]: must be an integer, not nil");
	proto_message_deinit(&message);
	proto_buffer_deinit(&buffer);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(plan_request_round_trip),
		cmocka_unit_test(error_answer_round_trip),
		cmocka_unit_test(names_a_field_of_the_wrong_type),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
