/* SPDX-License-Identifier: MIT */
/*
 * Payloads, as daemon and client get them: requests, answers, notifications. What is accepted must
 * encode, and decode to the same bytes again. The id of an answer says whose result it is.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <msgpack/object.h>

#include <proto/frame.h>
#include <proto/message.h>

#include "field.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

union body {
	union proto_any_params params;
	union proto_any_result result;
};

/* Return: 0, with the message encoded again; an error otherwise. */
static int receive(struct proto_message *message, const uint8_t *payload, size_t n,
		   struct proto_buffer *again)
{
	struct fmha_error err;
	enum proto_method method;
	union body body;
	int r = proto_message_decode(message, payload, n, &err);

	again->size = 0;
	if (r < 0)
		return r;
	if (message->type == PROTO_ANSWER) {
		method = message->id % PROTO_N_METHODS;
		if (message->error.code != FMHA_OK)
			return proto_encode_error(again, message->id, &message->error, &err);
		r = proto_decode_result(message, method, &body, &err);
		return r < 0 ? r : proto_encode_result(again, message->id, method, &body, &err);
	}
	r = proto_decode_params(message, &body, &err);
	if (r < 0)
		return r;
	if (message->type == PROTO_NOTIFICATION)
		return proto_encode_notification(again, message->method, &body, &err);
	return proto_encode_request(again, message->id, message->method, &body, &err);
}

/* What the shortcut takes, the long way takes too, and alike. */
static void compare_ways(const uint8_t *payload, size_t n)
{
	static struct proto_message flat, tree;

	if (!flat_decode(&flat, payload, n))
		return;
	tree.method = -1;
	if (tree_decode(&tree, payload, n, NULL) < 0 || tree.type != flat.type ||
	    tree.id != flat.id || tree.method != flat.method ||
	    !msgpack_object_equal(*tree.body, *flat.body))
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct proto_message message;
	static struct proto_buffer first, second;
	struct proto_frame frame;

	/* What the frame parser makes of the same bytes must not matter to memory safety. */
	(void)proto_frame_parse(data, size, PROTO_MAX_FRAME, &frame, NULL);
	compare_ways(data, size);
	if (receive(&message, data, size, &first) < 0)
		return 0;
	if (proto_frame_parse(first.data, first.size, PROTO_MAX_FRAME, &frame, NULL) != 0 ||
	    frame.header_bytes + frame.payload_bytes != first.size)
		abort();
	if (receive(&message, first.data + frame.header_bytes, frame.payload_bytes, &second) < 0)
		abort();
	if (first.size != second.size || memcmp(first.data, second.data, first.size) != 0)
		abort();
	return 0;
}
