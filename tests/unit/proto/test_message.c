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
	struct fmha_error error = {.code = FMHA_EINVAL, .field = "hdim_q", .msg = "hdim_q 264: no"};
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

/* ---- envelopes ---- */

static int decode_bytes(const char *bytes, size_t n, struct fmha_error *err)
{
	struct proto_message message = {0};
	int r = proto_message_decode(&message, (const uint8_t *)bytes, n, err);

	proto_message_deinit(&message);
	return r;
}

static void broken_envelopes_are_protocol_errors(void **state)
{
#define BYTES(text) text, sizeof(text) - 1
	static const struct {
		const char *bytes;
		size_t n;
		const char *msg;
	} cases[] = {
		{BYTES("\x80"), "message: not an array"},
		{BYTES("\xc0"), "message: not an array"},
		{BYTES("\x90"), "message: its type is none of 0, 1, 2"},
		{BYTES("\x91\x03"), "message: its type is none of 0, 1, 2"},
		{BYTES("\x91\xff"), "message: its type is none of 0, 1, 2"},
		{BYTES("\x91\x00"), "message: wrong number of elements"},
		{BYTES("\x93\x00\x01\xa4ping"), "message: wrong number of elements"},
		{BYTES("\x95\x00\x01\xa4ping\x80\xc0"), "message: wrong number of elements"},
		{BYTES("\x94\x02\xa4ping\x80\xc0"), "message: wrong number of elements"},
		{BYTES("\x94\x00\xff\xa4ping\x80"), "message: the id is no integer below 2^32"},
		{BYTES("\x94\x00\xca\0\0\0\0\xa4ping\x80"),
		 "message: the id is no integer below 2^32"},
		{BYTES("\x94\x00\xcf\0\0\0\1\0\0\0\0\xa4ping\x80"),
		 "message: the id is no integer below 2^32"},
		{BYTES("\x94\x00\x01\xc4\x01p\x80"), "message: the method is no string"},
		{BYTES("\x94\x00\x01\xa4ping\x90"), "message: the params are no map"},
		{BYTES("\x94\x00\x01\xa4ping\xc0"), "message: the params are no map"},
		{BYTES("\x94\x01\x01\xc0\xc0"), "message: an answer has neither error nor result"},
		{BYTES("\x94\x01\x01\x81\xa4"
		       "code\xff\x80"),
		 "message: an answer has both error and result"},
		{BYTES("\x94\x01\x01\x81\xa4"
		       "code\x00\xc0"),
		 "message: error.code: 0 is above -1"},
		{BYTES("\x94\x01\x01\x80\xc0"), "message: error.code: missing"},
		{BYTES("\x94\x01\x01\x05\xc0"), "message: error: must be a map, not an integer"},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct fmha_error err = {0};

		assert_int_equal(decode_bytes(cases[i].bytes, cases[i].n, &err), FMHA_EPROTO);
		assert_string_equal(err.msg, cases[i].msg);
	}
	assert_int_equal(decode_bytes(BYTES("\x94\x00\x01\xa4ping\x80"), NULL), 0);
	assert_int_equal(decode_bytes(BYTES("\x93\x02\xa4ping\x80"), NULL), 0);
	assert_int_equal(decode_bytes(BYTES("\x94\x00\xce\xff\xff\xff\xff\xa4ping\x80"), NULL), 0);
}

static void unknown_methods_are_answered(void **state)
{
	static const uint8_t payload[] = "\x94\x00\x09\xa6pi\n\xc3\xa9g\x80";
	struct proto_message message = {0};
	struct proto_empty params;
	struct fmha_error err = {0};

	(void)state;
	assert_int_equal(proto_message_decode(&message, payload, sizeof(payload) - 1, &err), 0);
	assert_int_equal(message.id, 9);
	assert_int_equal(message.method, -1);
	assert_int_equal(proto_decode_params(&message, &params, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "method");
	assert_string_equal(err.msg, "method 'pi???g': unknown");
	proto_message_deinit(&message);
}

static void methods_are_found_by_name(void **state)
{
	(void)state;
	for (int i = 0; i < PROTO_N_METHODS; i++)
		assert_int_equal(
			proto_method_find(proto_methods[i].name, strlen(proto_methods[i].name)), i);
	assert_int_equal(proto_method_find("pin", 3), -1);
	assert_int_equal(proto_method_find("pingx", 5), -1);
	assert_int_equal(proto_method_find("", 0), -1);
}

static void fds_depend_on_the_kind_of_import(void **state)
{
	struct proto_buffer_import_params params = {.kind = PROTO_MEMFD};

	(void)state;
	assert_int_equal(proto_request_fds(PROTO_BUFFER_IMPORT, &params), 1);
	params.kind = PROTO_IPC_HANDLE;
	assert_int_equal(proto_request_fds(PROTO_BUFFER_IMPORT, &params), 0);
	assert_int_equal(proto_request_fds(PROTO_PING, &params), 0);
}

static void what_cannot_be_sent_leaves_the_buffer_alone(void **state)
{
	struct proto_plan_params params = {0};
	struct proto_hello_params hello = {.client = "a\nb"};
	struct proto_buffer buffer = {0};
	struct fmha_error err = {0};

	(void)state;
	assert_int_equal(proto_buffer_append(&buffer, "before", 6), 0);
	fmha_problem_init(&params.problem);
	params.problem.q.data = &params; /* memory of this process */
	assert_int_equal(proto_encode_request(&buffer, 1, PROTO_PLAN, &params, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "tensor.q.buffer");
	params.problem.q = (struct fmha_tensor){.buffer = 1, .stride = {0, 0, 0, 0, 5}};
	assert_int_equal(proto_encode_request(&buffer, 1, PROTO_PLAN, &params, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "tensor.q.stride[4]");
	params.problem.q = (struct fmha_tensor){.buffer = 1, .dtype = 99};
	assert_int_equal(proto_encode_request(&buffer, 1, PROTO_PLAN, &params, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "tensor.q.dtype");
	params.problem.q = (struct fmha_tensor){0};
	params.problem.scale = INFINITY;
	assert_int_equal(proto_encode_request(&buffer, 1, PROTO_PLAN, &params, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "scale");
	assert_int_equal(proto_encode_request(&buffer, 1, PROTO_HELLO, &hello, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "client");
	memset(hello.client, 'x', sizeof(hello.client));
	assert_int_equal(proto_encode_request(&buffer, 1, PROTO_HELLO, &hello, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "client");
	assert_int_equal(buffer.size, 6);
	assert_memory_equal(buffer.data, "before", 6);
	proto_buffer_deinit(&buffer);
}

static void quoted_rubbish_is_sent_as_question_marks(void **state)
{
	const struct fmha_error error = {.code = FMHA_EPERM, .field = "a\tb", .msg = "caf\xc3\xa9"};
	struct proto_message message = {0};
	struct proto_buffer buffer = {0};

	(void)state;
	assert_int_equal(proto_encode_error(&buffer, 1, &error, NULL), 0);
	receive(&buffer, &message);
	assert_string_equal(message.error.field, "a?b");
	assert_string_equal(message.error.msg, "caf??");
	proto_message_deinit(&message);
	proto_buffer_deinit(&buffer);
}

static void an_error_has_no_result(void **state)
{
	struct fmha_error error = {.code = FMHA_EBUSY, .msg = "later"}, err = {0};
	struct proto_message message = {0};
	struct proto_buffer buffer = {0};
	struct proto_run_result result;

	(void)state;
	assert_int_equal(proto_encode_error(&buffer, 1, &error, NULL), 0);
	receive(&buffer, &message);
	assert_int_equal(proto_decode_result(&message, PROTO_RUN, &result, &err), FMHA_EINVAL);
	proto_message_deinit(&message);
	proto_buffer_deinit(&buffer);
}

static void buffers_grow(void **state)
{
	struct proto_buffer buffer = {0};

	(void)state;
	assert_int_equal(proto_buffer_append(&buffer, NULL, 0), 0);
	for (int i = 0; i < 1000; i++)
		assert_int_equal(proto_buffer_append(&buffer, &i, sizeof(i)), 0);
	assert_int_equal(buffer.size, 4000);
	assert_memory_equal(buffer.data + 3996, &(int){999}, 4);
	assert_int_equal(proto_buffer_reserve(&buffer, SIZE_MAX), FMHA_ENOMEM);
	proto_buffer_deinit(&buffer);
	assert_null(buffer.data);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(plan_request_round_trip),
		cmocka_unit_test(error_answer_round_trip),
		cmocka_unit_test(names_a_field_of_the_wrong_type),
		cmocka_unit_test(broken_envelopes_are_protocol_errors),
		cmocka_unit_test(unknown_methods_are_answered),
		cmocka_unit_test(methods_are_found_by_name),
		cmocka_unit_test(fds_depend_on_the_kind_of_import),
		cmocka_unit_test(what_cannot_be_sent_leaves_the_buffer_alone),
		cmocka_unit_test(quoted_rubbish_is_sent_as_question_marks),
		cmocka_unit_test(an_error_has_no_result),
		cmocka_unit_test(buffers_grow),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
