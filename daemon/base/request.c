/* SPDX-License-Identifier: MIT */
/*
 * request.c: what this process has asked its peer and waits for. What an answer brings along
 * follows from the request that it answers, so that it stays in the table when its owner has gone:
 * otherwise nobody could tell whether a descriptor belongs to this answer or to the next message.
 */
#include "connection_impl.h"

#include <stdlib.h>
#include <unistd.h>

#include <proto/error.h>

struct awaited {
	struct list in_awaited;
	uint32_t id;
	enum proto_method method;
	connection_reply reply; /* NULL: nobody waits for it */
	void *owner;
};

/* The request leaves the table. @fd: taken. */
static void finish(struct awaited *awaited, const union proto_any_result *result, int fd,
		   const struct fmha_error *error)
{
	list_remove(&awaited->in_awaited);
	if (awaited->reply)
		awaited->reply(awaited->owner, result, fd, error);
	if (fd >= 0)
		(void)close(fd);
	free(awaited);
}

static struct awaited *find(struct connection *connection, uint32_t id)
{
	list_for_each_entry(struct awaited, awaited, &connection->awaited, in_awaited) {
		if (awaited->id == id)
			return awaited;
	}
	return NULL;
}

int request_answered(struct connection *connection, const struct proto_message *message,
		     struct fmha_error *err)
{
	struct awaited *awaited = find(connection, message->id);
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
	finish(awaited, error.code == FMHA_OK ? &result : NULL, fd, &error);
	return 0;
}

void request_end_all(struct connection *connection)
{
	struct fmha_error error;

	(void)fmha_error_set(&error, FMHA_ECONN, "the connection is closed");
	while (!list_is_empty(&connection->awaited))
		finish(container_of(connection->awaited.next, struct awaited, in_awaited), NULL, -1,
		       &error);
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
