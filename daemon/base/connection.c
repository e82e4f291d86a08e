/* SPDX-License-Identifier: MIT */
/* connection.c: see connection.h. How long a connection lives, what comes in, what goes out. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/socket.h>
#include <proto/error.h>
#include <proto/frame.h>

#include "connection_impl.h"

/* ---- output ---- */

/*
 * Answers, and the queue of what the socket did not take at once.
 *
 * A descriptor travels with the first byte of its own frame. When the kernel does not take it, as
 * too many are unread elsewhere, a client gets an error in place of that one answer; on a control
 * socket the frame waits.
 */

struct output_chunk {
	struct list in_output;
	size_t size, sent;
	int fd;      /* goes with the first byte; -1: none */
	uint32_t id; /* of the answer, if there is a descriptor */
	uint8_t data[];
};

static void free_chunk(struct connection *connection, struct output_chunk *chunk)
{
	list_remove(&chunk->in_output);
	if (chunk->fd >= 0) {
		(void)close(chunk->fd);
		descriptors_dropped(connection);
	}
	free(chunk);
}

static struct output_chunk *first_chunk(struct connection *connection)
{
	return container_of(connection->output.next, struct output_chunk, in_output);
}

static void output_deinit(struct connection *connection)
{
	while (!list_is_empty(&connection->output))
		free_chunk(connection, first_chunk(connection));
}

/* Return: as socket_send(). */
static ssize_t send_bytes(struct connection *connection, const uint8_t *data, size_t n, int fd)
{
	ssize_t sent = socket_send(connection->fd, data, n, fd);

	if (sent > 0)
		connection->bytes_out += (uint64_t)sent;
	return sent;
}

static void check_limits(struct connection *connection)
{
	struct limits *limits = connection->hub->limits;
	uint64_t hard = limits->value[LIMIT_OUTPUT_HARD_BYTES];

	if (connection->before_hello &&
	    limit_exceeded(limits, LIMIT_OUTPUT_BYTES_BEFORE_HELLO, connection->output_bytes)) {
		connection_mark_broken(connection);
	} else if (connection->output_bytes > hard) {
		limits->hits[LIMIT_OUTPUT_HARD_BYTES]++;
		const struct log_about about = connection_about(connection);

		log_limited_about(&connection->log, &about, LOG_LEVEL_WARNING,
				  "dropping a client that does not read: %zu bytes of answers wait",
				  connection->output_bytes);
		connection_mark_broken(connection);
	} else if (connection->output_bytes > limits->value[LIMIT_OUTPUT_SOFT_BYTES]) {
		if (!connection->output_since_ns) {
			connection->output_since_ns = clock_ns();
			connection_watch(connection);
		}
	} else {
		connection->output_since_ns = 0;
	}
}

/* @fd: -1 or taken. */
static struct output_chunk *new_chunk(const uint8_t *data, size_t n, int fd, uint32_t id)
{
	struct output_chunk *chunk = malloc(sizeof(*chunk) + n);

	if (!chunk) {
		if (fd >= 0)
			(void)close(fd);
		return NULL;
	}
	chunk->size = n;
	chunk->sent = 0;
	chunk->fd = fd;
	chunk->id = id;
	memcpy(chunk->data, data, n);
	return chunk;
}

static void queue(struct connection *connection, const uint8_t *data, size_t n, int fd, uint32_t id)
{
	struct output_chunk *chunk = new_chunk(data, n, fd, id);

	if (!chunk) {
		if (fd >= 0)
			descriptors_dropped(connection);
		connection_mark_broken(connection);
		return;
	}
	list_append(&connection->output, &chunk->in_output);
	connection->output_bytes += n;
	check_limits(connection);
	connection_update_poll(connection);
}

/* What the client gets in place of an answer whose descriptor the kernel does not take. */
static int encode_refusal(struct proto_buffer *buffer, uint32_t id)
{
	struct fmha_error error, err;

	fmha_error_set(&error, FMHA_EBUSY, "too many file descriptors are on their way: try again");
	return proto_encode_error(buffer, id, &error, &err);
}

/* Return: as socket_send() but for SOCKET_NO_MEMORY and, on a control socket, SOCKET_TOO_MANY_FDS: it
 * waits. */
static ssize_t send_frame(struct connection *connection, const uint8_t *data, size_t n, int fd)
{
	ssize_t sent = send_bytes(connection, data, n, fd);

	if (sent == SOCKET_NO_MEMORY || (sent == SOCKET_TOO_MANY_FDS && !connection->account)) {
		connection->send_later = true; /* the hub's timer tries again */
		connection_watch(connection);
		return 0;
	}
	if (sent > 0 && fd >= 0)
		descriptors_sent(connection);
	return sent;
}

/* Sends or queues, when nothing waits; @fd: -1 or taken. */
static void transmit(struct connection *connection, const uint8_t *data, size_t n, int fd,
		     uint32_t id)
{
	ssize_t sent = 0;

	if (connection->closing || connection->broken || n == 0)
		sent = -1;
	else if (list_is_empty(&connection->output))
		sent = send_frame(connection, data, n, fd);
	if (sent == 0) {
		queue(connection, data, n, fd, id);
		return;
	}
	if (fd >= 0)
		(void)close(fd);
	if (sent > 0) {
		if ((size_t)sent < n)
			queue(connection, data + sent, n - (size_t)sent, -1, 0);
		return;
	}
	if (fd >= 0)
		descriptors_dropped(connection);
	if (sent == SOCKET_TOO_MANY_FDS) {
		struct proto_buffer refusal = {0};

		if (encode_refusal(&refusal, id) < 0)
			connection_mark_broken(connection);
		else
			transmit(connection, refusal.data, refusal.size, -1, 0);
		proto_buffer_deinit(&refusal);
	} else if (n > 0) {
		connection_mark_broken(connection);
	}
}

/* Puts the refusal in the place of the queue's first answer. */
static void refuse_first(struct connection *connection)
{
	struct output_chunk *first = first_chunk(connection), *chunk = NULL;
	struct proto_buffer refusal = {0};

	if (encode_refusal(&refusal, first->id) == 0)
		chunk = new_chunk(refusal.data, refusal.size, -1, 0);
	proto_buffer_deinit(&refusal);
	connection->output_bytes -= first->size;
	free_chunk(connection, first);
	if (!chunk) {
		connection_mark_broken(connection);
		return;
	}
	connection->output_bytes += chunk->size;
	list_prepend(&connection->output, &chunk->in_output);
}

void output_flush(struct connection *connection)
{
	while (!list_is_empty(&connection->output) && !connection->broken) {
		struct output_chunk *chunk = first_chunk(connection);
		ssize_t sent = send_frame(connection, chunk->data + chunk->sent,
					  chunk->size - chunk->sent, chunk->fd);

		if (sent == SOCKET_TOO_MANY_FDS) {
			refuse_first(connection);
			continue;
		}
		if (sent < 0) {
			connection_mark_broken(connection);
			return;
		}
		if (sent == 0)
			break;
		if (chunk->fd >= 0)
			(void)close(chunk->fd);
		chunk->fd = -1;
		chunk->sent += (size_t)sent;
		connection->output_bytes -= (size_t)sent;
		if (chunk->sent == chunk->size)
			free_chunk(connection, chunk);
	}
	check_limits(connection);
	connection_update_poll(connection);
}

void output_uncork(struct connection_hub *hub)
{
	struct connection *connection = hub->corked;

	if (connection && hub->send.size > 0)
		transmit(connection, hub->send.data, hub->send.size, -1, 0);
	hub->send.size = 0;
}

/* Where to encode the next message, and sending it from there. @start: where it begins; @fd: -1 or taken; @id: of the
 * answer that carries it. */
static struct proto_buffer *output_begin(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;

	return hub->corked == connection ? &hub->send : &hub->direct;
}

static void output_end(struct connection *connection, size_t start, int fd, uint32_t id)
{
	struct connection_hub *hub = connection->hub;

	if (hub->corked != connection) {
		transmit(connection, hub->direct.data, hub->direct.size, fd, id);
		hub->direct.size = 0;
		if (!hub->corked)
			spinner_rest(&hub->spinner);
	} else if (fd >= 0) {
		if (start > 0)
			transmit(connection, hub->send.data, start, -1, 0);
		transmit(connection, hub->send.data + start, hub->send.size - start, fd, id);
		hub->send.size = 0;
	}
}

/* The client is told, and may tell nobody. */
static void log_refusal(struct connection *connection, uint32_t id, const struct fmha_error *error)
{
	struct log_about about = connection_about(connection);

	about.fields |= LOG_REQUEST;
	about.request = id;
	log_limited_about(&connection->log, &about, LOG_LEVEL_DEBUG, "%s%s%s: %s",
			  fmha_error_name(error->code), *error->field ? " " : "", error->field,
			  error->msg);
}

void connection_answer_error(struct connection *connection, uint32_t id,
			     const struct fmha_error *error)
{
	struct proto_buffer *buffer = output_begin(connection);
	struct fmha_error err;
	size_t start = buffer->size;

	if (connection->closing)
		return;
	if (error->code < 0 && error->code > -CONNECTION_ERRORS)
		connection->hub->n_errors[-error->code]++;
	log_refusal(connection, id, error);
	(void)descriptors_unreserve(connection, id);
	if (proto_encode_error(buffer, id, error, &err) < 0)
		connection_mark_broken(connection);
	else
		output_end(connection, start, -1, 0);
	connection_answered(connection);
}

/* The answer to request @id cannot be given; @fd: -1 or taken. */
static void answer_failed(struct connection *connection, uint32_t id, int fd,
			  const struct fmha_error *error)
{
	if (fd >= 0)
		(void)close(fd);
	connection_answer_error(connection, id, error);
}

void connection_answer(struct connection *connection, uint32_t id, enum proto_method method,
		       const void *result, int fd)
{
	struct proto_buffer *buffer = output_begin(connection);
	struct fmha_error err;
	size_t start = buffer->size;

	if (connection->closing) {
		if (fd >= 0)
			(void)close(fd);
		return;
	}
	if (proto_encode_result(buffer, id, method, result, &err) < 0) {
		if (err.code != FMHA_ENOMEM)
			err.code = FMHA_EINTERNAL;
		log_error("%s: answer cannot be encoded: %s", proto_methods[method].name, err.msg);
		answer_failed(connection, id, fd, &err);
		return;
	}
	if (fd < 0) {
		(void)descriptors_unreserve(connection, id);
	} else if (descriptors_take(connection, id, &err) < 0) {
		buffer->size = start;
		answer_failed(connection, id, fd, &err);
		return;
	}
	output_end(connection, start, fd, id);
	connection_answered(connection);
}

/* ---- request ---- */

/*
 * What this process has asked its peer and waits for. What an answer brings along
 * follows from the request that it answers, so that it stays in the table when its owner has gone:
 * otherwise nobody could tell whether a descriptor belongs to this answer or to the next message.
 */

struct awaited {
	struct list in_awaited;
	uint32_t id;
	enum proto_method method;
	connection_reply reply; /* NULL: nobody waits for it */
	void *owner;
};

/* The request leaves the table. @fd: taken. */
static void request_finish(struct awaited *awaited, const union proto_any_result *result, int fd,
			   const struct fmha_error *error)
{
	list_remove(&awaited->in_awaited);
	if (awaited->reply)
		awaited->reply(awaited->owner, result, fd, error);
	if (fd >= 0)
		(void)close(fd);
	free(awaited);
}

static struct awaited *request_find(struct connection *connection, uint32_t id)
{
	list_for_each_entry(struct awaited, awaited, &connection->awaited, in_awaited) {
		if (awaited->id == id)
			return awaited;
	}
	return NULL;
}

/* An answer has come. Return: 0, or FMHA_EPROTO: nobody has asked. */
static int request_answered(struct connection *connection, const struct proto_message *message,
			    struct fmha_error *err)
{
	struct awaited *awaited = request_find(connection, message->id);
	struct fmha_error error = message->error;
	union proto_any_result result;
	int fd = -1;

	if (!awaited)
		return fmha_error_set(err, FMHA_EPROTO, "an answer that nobody has asked for");
	if (error.code == FMHA_OK) {
		if (proto_methods[awaited->method].fds_out > 0)
			fd = connection_take_fd(connection);
		(void)proto_decode_result(message, awaited->method, &result, &error);
	}
	request_finish(awaited, error.code == FMHA_OK ? &result : NULL, fd, &error);
	return 0;
}

/* The connection is over, and so are all that are open. */
static void request_end_all(struct connection *connection)
{
	struct fmha_error error;

	(void)fmha_error_set(&error, FMHA_ECONN, "the connection is closed");
	while (!list_is_empty(&connection->awaited))
		request_finish(container_of(connection->awaited.next, struct awaited, in_awaited),
			       NULL, -1, &error);
}

int connection_request(struct connection *connection, enum proto_method method, const void *params,
		       int fd, connection_reply reply, void *owner, struct fmha_error *err)
{
	struct proto_buffer *buffer = output_begin(connection);
	struct awaited *awaited = malloc(sizeof(*awaited));
	uint32_t id = connection->last_request == UINT32_MAX ? 1 : connection->last_request + 1;
	size_t start = buffer->size;
	int r;

	if (!awaited)
		r = fmha_error_set(err, FMHA_ENOMEM, "%s: out of memory",
				   proto_methods[method].name);
	else if (connection->closing)
		r = fmha_error_set(err, FMHA_ECONN, "connection is closed");
	else
		r = proto_encode_request(buffer, id, method, params, err);
	if (r < 0) {
		if (fd >= 0)
			(void)close(fd);
		free(awaited);
		return r;
	}
	connection->last_request = id;
	*awaited = (struct awaited){.id = id, .method = method, .reply = reply, .owner = owner};
	list_append(&connection->awaited, &awaited->in_awaited);
	output_end(connection, start, fd, 0);
	return 0;
}

uint32_t connection_forget(struct connection *connection, const void *owner)
{
	list_for_each_entry(struct awaited, awaited, &connection->awaited, in_awaited) {
		if (!awaited->reply || awaited->owner != owner)
			continue;
		awaited->reply = NULL;
		return awaited->id;
	}
	return 0;
}

/* ---- input ---- */

/*
 * What comes in. One recvmsg a wake-up, then as many frames as the turn allows; what is
 * left waits in the connection's own buffer, and the connection in its user's backlog.
 */

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
static int input_serve(struct connection *connection, const struct proto_message *message,
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
		return input_serve(connection, message, err);
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

/* What a control socket needs to take a message in. */
static int reserve_input(struct connection *connection, struct fmha_error *err)
{
	const struct connection_hub *hub = connection->hub;

	connection->input = malloc(hub->receive_bytes);
	connection->fds = malloc(hub->limits->value[LIMIT_FDS_PER_CONNECTION] * sizeof(int));
	if (connection->input && connection->fds)
		return 0;
	free(connection->input);
	free(connection->fds);
	connection->input = NULL;
	connection->fds = NULL;
	return fmha_error_set(err, FMHA_ENOMEM, "a control socket: out of memory");
}

int connection_open(struct connection *connection, struct connection_hub *hub, int fd,
		    struct account *account, bool before_hello, const struct connection_ops *ops,
		    struct fmha_error *err)
{
	int r;

	*connection = (struct connection){
		.hub = hub, .ops = ops, .account = account, .fd = fd, .before_hello = before_hello};
	list_init(&connection->in_backlog);
	list_init(&connection->in_watched);
	list_init(&connection->awaited);
	list_init(&connection->output);
	r = account ? descriptors_init(connection, err) : reserve_input(connection, err);
	if (r < 0) {
		(void)close(fd);
		return r;
	}
	r = uv_poll_init(hub->loop, &connection->poll, fd);
	if (r < 0) {
		free(connection->input);
		free(connection->fds);
		descriptors_deinit(connection);
		return fmha_error_set(err, FMHA_EIO, "polling a socket: %s", uv_strerror(r));
	}
	if (before_hello) {
		connection->deadline_ns = clock_ns() +
					  hub->limits->value[LIMIT_HELLO_MS] * NS_PER_MS;
		connection_watch(connection);
	}
	connection_update_poll(connection);
	return 0;
}

void connection_greeted(struct connection *connection)
{
	connection->before_hello = false;
	connection->deadline_ns = 0; /* the timer sees that there is nothing to watch for */
}

static void on_poll_closed(uv_handle_t *handle)
{
	struct connection *connection = container_of(handle, struct connection, poll);

	descriptors_deinit(connection);
	connection->ops->on_closed(connection);
}

void connection_close(struct connection *connection)
{
	struct account *account = connection->account;
	struct doing *doing = connection->hub->doing;
	struct doing_before before;

	if (connection->closing)
		return;
	/* What was answered before the end still goes out, as far as the socket takes it. */
	if (connection->hub->corked == connection)
		output_uncork(connection->hub);
	connection->closing = true;
	if (connection->hub->last == connection)
		connection->hub->last = NULL;
	list_remove(&connection->in_backlog);
	list_remove(&connection->in_watched);
	output_deinit(connection);
	descriptors_close(connection);
	free(connection->input);
	connection->input = NULL;
	if (account)
		connection_release(connection->hub, account, ACCOUNT_IN_FLIGHT,
				   connection->n_in_flight);
	connection->n_in_flight = 0;
	uv_close((uv_handle_t *)&connection->poll, on_poll_closed);
	before = doing_begin(doing, DOING_HANGUP, account ? account->uid : DOING_NOBODY);
	connection->ops->on_hangup(connection);
	doing_end(doing, before);
	request_end_all(connection);
}

void connection_fail(struct connection *connection, const struct fmha_error *error)
{
	const struct log_about about = connection_about(connection);

	connection->hub->n_violations++;
	log_limited_about(&connection->hub->log, &about, LOG_LEVEL_NOTICE,
			  "closing a connection: %s", error->msg);
	connection_close(connection);
}
