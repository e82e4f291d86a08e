/* SPDX-License-Identifier: MIT */
/*
 * input.c: what comes in. One recvmsg a wake-up, then as many frames as the turn allows; what is
 * left waits in the connection's own buffer, and the connection in its user's backlog.
 */
#include "connection_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <proto/error.h>
#include <proto/frame.h>

#include <base/clock.h>

#define MAX_FDS_A_MESSAGE 64 /* the most that LIMIT_FDS_PER_MESSAGE can be */

/*
 * The request's fd, as far as it declares one. @params: NULL when they could not be decoded; then
 * an fd is taken out of the way if there is one. Return: 0 with the fd (given) or -1; FMHA_EPROTO:
 * it is missing.
 */
static int take_request_fd(struct connection *connection, const struct proto_message *message,
			   const void *params, int *ret_fd, struct fmha_error *err)
{
	enum proto_method method = (enum proto_method)message->method;
	int n_fds = 0;

	if (message->method >= 0 && proto_methods[method].fds_in > 0)
		n_fds = params ? proto_request_fds(method, params) : proto_methods[method].fds_in;
	*ret_fd = n_fds > 0 ? connection_take_fd(connection) : -1;
	if (n_fds > 0 && *ret_fd < 0 && params && connection->account)
		return fmha_error_set(err, FMHA_EPROTO, "%s: its file descriptor is missing",
				      proto_methods[method].name);
	return 0;
}

/* Takes the request apart, has the owner deal with it, and answers with its error. Return: 0 or
 * FMHA_EPROTO. */
static int serve(struct connection *connection, const struct proto_message *message,
		 struct fmha_error *err)
{
	enum proto_method method = (enum proto_method)message->method;
	union proto_any_params params;
	struct fmha_error refusal;
	int fd, r = proto_decode_params(message, &params, &refusal);
	struct account *account = connection->account;
	struct doing *doing = connection->hub->doing;
	struct doing_before before;

	if (take_request_fd(connection, message, r == 0 ? &params : NULL, &fd, err) < 0)
		return FMHA_EPROTO;
	if (r == 0 && connection->account && proto_methods[method].server == PROTO_CONTROL)
		r = fmha_error_set_field(&refusal, FMHA_EPERM, "method",
					 "%s is for fmhad's own processes",
					 proto_methods[method].name);
	if (r == 0) {
		before = doing_begin(doing, method, account ? account->uid : DOING_NOBODY);
		r = connection->ops->handle(connection, message->id, method, &params, &fd,
					    &refusal);
		doing_end(doing, before);
	}
	if (r < 0)
		connection_answer_error(connection, message->id, &refusal);
	if (fd >= 0)
		(void)close(fd);
	return 0;
}

static void count_request(struct connection *connection, const struct proto_message *message)
{
	/* connection_is_stalled() has seen that there is room. */
	if (connection->account)
		(void)account_charge(connection->account, ACCOUNT_IN_FLIGHT, 1, NULL);
	connection->n_in_flight++;
	descriptors_reserve(connection, message->id, message->method);
}

/* Return: 0, FRAME_WAITS: for what @ret_stall says, or a negative FMHA_E*: a violation. */
#define FRAME_WAITS 1
static int handle_frame(struct connection *connection, const uint8_t *payload, size_t n,
			enum stall *ret_stall, struct fmha_error *err)
{
	struct connection_hub *hub = connection->hub;
	struct proto_message *message = &hub->message;
	int r = proto_message_decode(message, payload, n, err);

	if (r == FMHA_ENOMEM) {
		*ret_stall = STALL_MEMORY;
		return FRAME_WAITS;
	}
	if (r < 0)
		return r;
	if (message->type == PROTO_REQUEST) {
		if (!descriptors_have_room(connection, message->method)) {
			*ret_stall = STALL_DESCRIPTOR;
			return FRAME_WAITS;
		}
		count_request(connection, message);
	}
	hub->n_frames++;
	connection->n_frames++;
	if (message->type == PROTO_REQUEST)
		return serve(connection, message, err);
	if (message->type == PROTO_ANSWER)
		return request_answered(connection, message, err);
	return 0; /* version 1 has no notification that means anything */
}

/* Reading the clock costs 27 ns, a small frame several hundred, explaining a plan many thousand. */
static bool turn_is_over(struct connection *connection, uint32_t n_frames)
{
	const struct connection_hub *hub = connection->hub;
	const uint64_t *limit = hub->limits->value;

	return n_frames >= limit[LIMIT_FRAMES_PER_WAKE] ||
	       (n_frames > 0 && clock_ns() > hub->turn_until_ns);
}

/* The frame at @data if it is complete. Return: as proto_frame_parse(). */
static int next_frame(const struct connection *connection, const uint8_t *data, size_t n,
		      struct proto_frame *frame, struct fmha_error *err)
{
	const uint64_t *limit = connection->hub->limits->value;
	int r = proto_frame_parse(data, n,
				  limit[connection->before_hello ? LIMIT_FRAME_BYTES_BEFORE_HELLO
								 : LIMIT_FRAME_BYTES],
				  frame, err);

	if (r == 0 && n < frame->header_bytes + frame->payload_bytes)
		return PROTO_FRAME_MORE;
	return r;
}

/* Hands out the frames in @data. Return: bytes used up. */
static size_t handle_frames(struct connection *connection, const uint8_t *data, size_t n)
{
	uint32_t n_frames = 0;
	size_t used = 0;

	while (used < n && !connection->closing && !connection->broken) {
		enum stall stall = STALL_IN_FLIGHT;
		struct proto_frame frame;
		struct fmha_error err;
		int r = next_frame(connection, data + used, n - used, &frame, &err);

		if (r == PROTO_FRAME_MORE)
			break;
		if (r == 0 && connection_is_stalled(connection)) {
			connection_stall(connection, STALL_IN_FLIGHT);
			break;
		}
		if (r == 0 && turn_is_over(connection, n_frames)) {
			connection_enter_backlog(connection);
			break;
		}
		if (r == 0)
			r = handle_frame(connection, data + used + frame.header_bytes,
					 frame.payload_bytes, &stall, &err);
		if (r == FRAME_WAITS) {
			connection_stall(connection, stall);
			break;
		}
		if (r < 0) {
			connection_fail(connection, &err);
			break;
		}
		used += frame.header_bytes + frame.payload_bytes;
		n_frames++;
	}
	return used;
}

/* Parses @n bytes at @data, which is the connection's own buffer or the hub's, and keeps the rest.
 */
static void process_input(struct connection *connection, uint8_t *data, size_t n)
{
	size_t used = handle_frames(connection, data, n), left = n - used;

	if (connection->closing)
		return;
	if (left == 0) {
		if (connection->account) {
			free(connection->input);
			connection->input = NULL;
		}
		connection->input_bytes = 0;
		if (connection->n_fds > 0) {
			struct fmha_error err;

			fmha_error_set(&err, FMHA_EPROTO,
				       "file descriptors that no message has declared");
			connection_fail(connection, &err);
		}
		return;
	}
	if (!connection->input)
		connection->input = malloc(connection->hub->receive_bytes);
	if (!connection->input) {
		connection_mark_broken(connection);
		return;
	}
	memmove(connection->input, data + used, left);
	connection->input_bytes = left;
}

bool input_read(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;
	uint8_t *data = connection->input ? connection->input : hub->receive;
	struct iovec vec = {.iov_base = data + connection->input_bytes,
			    .iov_len = hub->receive_bytes - connection->input_bytes};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int) * MAX_FDS_A_MESSAGE)];
	} control;
	struct msghdr message = {.msg_iov = &vec, .msg_iovlen = 1};
	struct fmha_error err;
	ssize_t n;

	message.msg_control = &control;
	message.msg_controllen = CMSG_SPACE(sizeof(int) *
					    hub->limits->value[LIMIT_FDS_PER_MESSAGE]);
	do
		n = recvmsg(connection->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	/* libuv may report readiness once too often; what the kernel has no memory for stays there. */
	if (n < 0 && (errno == EAGAIN || errno == ENOMEM || errno == ENOBUFS))
		return false;
	if (n <= 0) {
		connection_close(connection);
		return true;
	}
	connection->bytes_in += (uint64_t)n;
	spinner_arrival(&hub->spinner, hub->turn_ns);
	hub->last = connection;
	connection->heard_ns = hub->turn_ns;
	if (descriptors_collect(connection, &message, &err) < 0)
		connection_fail(connection, &err);
	else
		process_input(connection, data, connection->input_bytes + (size_t)n);
	return true;
}

void input_go_on(struct connection *connection)
{
	if (connection->input && connection->input_bytes > 0)
		process_input(connection, connection->input, connection->input_bytes);
}
