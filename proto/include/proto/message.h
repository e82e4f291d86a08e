/* SPDX-License-Identifier: MIT */
/*
 * message.h: MessagePack-RPC messages in their frames, both directions.
 *
 *   request       [0, id, method, params]
 *   answer        [1, id, error, result]    exactly one of error and result is a map, the other nil
 *   notification  [2, method, params]
 *
 * Receiving: proto_frame_parse() finds the payload, proto_message_decode() reads the envelope, then
 * proto_decode_params() or proto_decode_result() fills a struct of messages.h. A broken envelope is
 * FMHA_EPROTO and ends the connection; broken params are FMHA_EINVAL, with the field's name, and
 * are answered.
 */
#ifndef PROTO_MESSAGE_H
#define PROTO_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>
#include <proto/buffer.h>
#include <proto/limits.h>
#include <proto/messages.h>
#include <proto/methods.h>

struct proto_method_info {
	const char *name;
	uint32_t name_bytes;
	enum proto_server server;
	int fds_in;         /* at most; see proto_request_fds() */
	int fds_out;        /* with a result; an error carries none */
	size_t params_size; /* of the params and result structs */
	size_t result_size;
};

extern const struct proto_method_info proto_methods[PROTO_N_METHODS];

/* The method called @name (@n bytes, no NUL needed), or -1. */
int proto_method_find(const char *name, size_t n);

enum proto_message_type { PROTO_REQUEST = 0, PROTO_ANSWER = 1, PROTO_NOTIFICATION = 2 };

/*
 * One received message. Reusable: each decode reuses the memory of the one before. The body points
 * into the payload, which must stay in place until params or result are decoded. All zero is a
 * fresh one.
 */
struct proto_message {
	enum proto_message_type type;
	uint32_t id;             /* requests and answers */
	int method;              /* requests, notifications: enum proto_method, or -1: unknown */
	char method_name[32];    /* for the sentence about an unknown one: printable, cut off */
	struct fmha_error error; /* answers: code FMHA_OK when there is a result */
	struct msgpack_zone *zone;
	struct proto_flat *flat;
	const struct msgpack_object *body;
};

/*
 * Pre-checks and reads one payload.
 * Return: 0; FMHA_EPROTO: not a message; FMHA_ENOMEM.
 */
int proto_message_decode(struct proto_message *message, const uint8_t *payload, size_t n,
			 struct fmha_error *err);
void proto_message_deinit(struct proto_message *message);

/* Room for the params, the result, of any method. */
union proto_any_params {
#define PROTO_ANY_PARAMS(ID, name, server, fds_in, fds_out, params, result)                        \
	struct proto_##params ID;
	PROTO_METHODS(PROTO_ANY_PARAMS)
#undef PROTO_ANY_PARAMS
};

union proto_any_result {
#define PROTO_ANY_RESULT(ID, name, server, fds_in, fds_out, params, result)                        \
	struct proto_##result ID;
	PROTO_METHODS(PROTO_ANY_RESULT)
#undef PROTO_ANY_RESULT
};

/*
 * Fills the params struct of message->method (proto_methods[].params_size bytes).
 * Return: 0, or FMHA_EINVAL naming the field; an unknown method is FMHA_EINVAL with field "method".
 */
int proto_decode_params(const struct proto_message *message, void *ret_params,
			struct fmha_error *err);

/* Fills the result struct of @method from an answer without error. Return: 0 or FMHA_EINVAL. */
int proto_decode_result(const struct proto_message *message, enum proto_method method,
			void *ret_result, struct fmha_error *err);

/* File descriptors that this request takes from the connection's queue, 0 or more. */
int proto_request_fds(enum proto_method method, const void *params);

/*
 * These append one whole frame to @out, which is unchanged on failure. Return: 0; FMHA_EINVAL
 * naming the field that cannot be sent (a tensor without buffer id, a float that is not finite, a
 * string that is not UTF-8 or has control characters, more than one frame holds); FMHA_ENOMEM.
 */
int proto_encode_request(struct proto_buffer *out, uint32_t id, enum proto_method method,
			 const void *params, struct fmha_error *err);
int proto_encode_notification(struct proto_buffer *out, enum proto_method method,
			      const void *params, struct fmha_error *err);
int proto_encode_result(struct proto_buffer *out, uint32_t id, enum proto_method method,
			const void *result, struct fmha_error *err);

/* @error: code is not FMHA_OK. Characters that are not printable ASCII are sent as '?'. */
int proto_encode_error(struct proto_buffer *out, uint32_t id, const struct fmha_error *error,
		       struct fmha_error *err);

#endif
