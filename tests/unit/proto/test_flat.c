/* SPDX-License-Identifier: MIT */
/* The shortcut for flat messages and the long way agree on every message that the former takes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <msgpack/object.h>

#include <proto/message.h>

#include "encode.h"
#include "field.h"

static uint64_t random_state = 1;

static uint32_t pick(uint32_t n)
{
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(random_state >> 33) % n;
}

/* Of any width, mostly small. */
static uint64_t pick_number(void)
{
	uint64_t number = (uint64_t)pick(1u << 31) << 32 | pick(1u << 31);

	return number >> pick(64);
}

static void write_key(struct writer *writer)
{
	static const char *const keys[] = {"plan",   "timeout_ms", "queued_ns",    "kernel_ns",
					   "buffer", "",           "dropout_seed", "signals"};
	const char *key = keys[pick(sizeof(keys) / sizeof(keys[0]))];

	write_string(writer, key, strlen(key));
}

/* Mostly what the shortcut takes, sometimes what it must leave alone. */
static void write_value(struct writer *writer)
{
	switch (pick(40)) {
	case 0:
		write_true(writer);
		break;
	case 1:
		write_false(writer);
		break;
	case 2:
		write_nil(writer);
		break;
	case 3:
		write_int64(writer, -1 - (int64_t)pick(1000));
		break;
	case 4:
		write_double(writer, 0.5);
		break;
	case 5:
		write_array(writer, 1);
		write_uint64(writer, 1);
		break;
	case 6:
		write_map(writer, 0);
		break;
	case 7:
		write_string(writer, "text", 4);
		break;
	case 8: /* wider than needed */
		(void)writer_append(writer, "\xcf\0\0\0\0\0\0\0\x07", 9);
		break;
	default:
		write_uint64(writer, pick_number());
	}
}

static void write_message(struct writer *writer)
{
	const char *method = pick(8) ? proto_methods[pick(PROTO_N_METHODS)].name : "no_method";
	uint32_t n = pick(4) ? pick(4) : pick(12), type = pick(16) ? pick(2) : pick(4);

	write_array(writer, pick(30) ? 4 : 3);
	write_uint64(writer, type);
	write_uint64(writer, pick(16) ? pick_number() >> 32 : pick_number());
	if (pick(8) ? type == PROTO_REQUEST : pick(2))
		write_string(writer, method, strlen(method));
	else
		write_nil(writer);
	write_map(writer, n);
	for (uint32_t i = 0; i < n; i++) {
		write_key(writer);
		write_value(writer);
	}
}

/* One byte changed, the end cut off, or a byte too many. */
static void damage(struct proto_buffer *buffer)
{
	switch (pick(3)) {
	case 0:
		buffer->data[pick((uint32_t)buffer->size)] = (uint8_t)pick(256);
		break;
	case 1:
		buffer->size = pick((uint32_t)buffer->size);
		break;
	default:
		(void)proto_buffer_append(buffer, "\xc0", 1);
	}
}

static void assert_equal_objects(const msgpack_object *a, const msgpack_object *b)
{
	assert_int_equal(a->type, MSGPACK_OBJECT_MAP);
	assert_true(msgpack_object_equal(*a, *b));
}

static void both_ways_agree(void **state)
{
	struct proto_message flat = {0}, tree = {0};
	struct proto_buffer buffer = {0};
	uint32_t n_flat = 0;

	(void)state;
	for (int i = 0; i < 100000; i++) {
		struct writer writer = {.out = &buffer};
		uint8_t *exact;
		bool taken;

		buffer.size = 0;
		write_message(&writer);
		assert_false(writer.failed);
		if (pick(5) == 0)
			damage(&buffer);
		/* In a block of its own size, so that the sanitizers see a byte read too many. */
		exact = malloc(buffer.size ? buffer.size : 1);
		assert_non_null(exact);
		memcpy(exact, buffer.data, buffer.size);
		tree.method = -1;
		tree.error.code = FMHA_OK;
		tree.body = NULL;
		taken = flat_decode(&flat, exact, buffer.size);
		n_flat += taken;
		if (taken) {
			assert_int_equal(tree_decode(&tree, exact, buffer.size, NULL), 0);
			assert_int_equal(flat.type, tree.type);
			assert_int_equal(flat.id, tree.id);
			assert_int_equal(flat.method, tree.method);
			assert_int_equal(tree.error.code, FMHA_OK);
			assert_equal_objects(flat.body, tree.body);
		}
		free(exact);
	}
	/* The generator makes enough of either. */
	assert_in_range(n_flat, 20000, 80000);
	proto_message_deinit(&flat);
	proto_message_deinit(&tree);
	proto_buffer_deinit(&buffer);
}

/* What the shortcut was made for does take it. */
static void usual_messages_are_flat(void **state)
{
	const struct proto_run_params run = {.plan = UINT64_MAX, .timeout_ms = 30000};
	const struct proto_run_result done = {.queued_ns = 1, .kernel_ns = UINT64_MAX};
	const struct proto_buffer_release_params release = {.buffer = 1ull << 32 | 1};
	const struct proto_empty empty = {0};
	struct proto_message message = {0};
	struct proto_buffer buffer[5] = {{0}};

	(void)state;
	assert_int_equal(proto_encode_request(&buffer[0], 1, PROTO_PING, &empty, NULL), 0);
	assert_int_equal(proto_encode_result(&buffer[1], UINT32_MAX, PROTO_PING, &empty, NULL), 0);
	assert_int_equal(proto_encode_request(&buffer[2], 200, PROTO_RUN, &run, NULL), 0);
	assert_int_equal(proto_encode_result(&buffer[3], 70000, PROTO_RUN, &done, NULL), 0);
	assert_int_equal(proto_encode_request(&buffer[4], 0, PROTO_BUFFER_RELEASE, &release, NULL),
			 0);
	for (int i = 0; i < 5; i++) {
		assert_true(flat_decode(&message, buffer[i].data + 2, buffer[i].size - 2));
		proto_buffer_deinit(&buffer[i]);
	}
	proto_message_deinit(&message);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(both_ways_agree),
		cmocka_unit_test(usual_messages_are_flat),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
