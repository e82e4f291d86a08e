/* SPDX-License-Identifier: MIT */
/*
 * output.c: answers, and the queue of what the socket did not take at once.
 *
 * A descriptor travels with the first byte of its own frame. When the kernel does not take it, as
 * too many are unread elsewhere, a client gets an error in place of that one answer; on a control
 * socket the frame waits.
 */
#include "connection_impl.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <proto/error.h>

#include <base/clock.h>
#include <base/socket.h>

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

void output_init(struct connection *connection)
{
	list_init(&connection->output);
}

static struct output_chunk *first_chunk(struct connection *connection)
{
	return container_of(connection->output.next, struct output_chunk, in_output);
}

void output_deinit(struct connection *connection)
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

struct proto_buffer *output_begin(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;

	return hub->corked == connection ? &hub->send : &hub->direct;
}

void output_end(struct connection *connection, size_t start, int fd, uint32_t id)
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
