/* SPDX-License-Identifier: MIT */
#include "worker_registry.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include <proto/error.h>

#define PAGE_BYTES 4096ull

void pieces_put(struct pieces *pieces, const char *format, ...)
{
	size_t room = PIECE_BYTES - pieces->n;
	va_list list;
	int n;

	va_start(list, format);
	n = vsnprintf(pieces->text + pieces->n, room, format, list);
	va_end(list);
	if (n >= 0 && (size_t)n < room)
		pieces->n += (size_t)n;
	else
		(void)fmha_error_set(&pieces->error, FMHA_EINTERNAL, "%s: a piece is too long",
				     proto_methods[pieces->ops->method].name);
}

static void run_out(struct pieces *pieces)
{
	(void)fmha_error_set(&pieces->error, FMHA_ENOMEM, "%s: out of memory",
			     proto_methods[pieces->ops->method].name);
}

/* Only the first of a user's answers in the making has a file. */
static bool open_file(struct pieces *pieces)
{
	struct session *session = pieces->session;

	if (memfd_charge(&session->worker->memfds, session->account, 0, &pieces->error) < 0)
		return false;
	pieces->fd = memfd_create("fmhad", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (pieces->fd >= 0)
		return true;
	memfd_release(session->account, 0);
	run_out(pieces);
	return false;
}

/* What the file takes up is charged before it does. */
static void flush(struct pieces *pieces)
{
	struct session *session = pieces->session;
	uint64_t pages = (pieces->bytes + pieces->n + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;

	if (pieces->error.code != FMHA_OK || (pieces->fd < 0 && !open_file(pieces)))
		return;
	if (memfd_charge_more(&session->worker->memfds, session->account,
			      pages - pieces->charged_bytes, &pieces->error) < 0)
		return;
	pieces->charged_bytes = pages;
	if (write(pieces->fd, pieces->text, pieces->n) != (ssize_t)pieces->n)
		run_out(pieces);
	pieces->bytes += pieces->n;
}

static void pieces_end(struct pieces *pieces)
{
	if (pieces->fd >= 0) {
		(void)close(pieces->fd);
		memfd_release(pieces->session->account, pieces->charged_bytes);
	}
	pieces->ops->free(pieces);
}

static void pieces_answer(struct pieces *pieces)
{
	struct session *session = pieces->session;
	struct proto_json_result result = {.size = pieces->bytes};
	int fd = -1;

	if (pieces->error.code == FMHA_OK && !memfd_seal(pieces->fd))
		run_out(pieces);
	if (pieces->error.code == FMHA_OK &&
	    memfd_keep(&session->worker->memfds, session->account, pieces->fd,
		       pieces->charged_bytes, &fd, &pieces->error) == 0) {
		(void)close(pieces->fd);
		pieces->fd = -1; /* with its charge */
		connection_answer(&session->connection, pieces->id, pieces->ops->method, &result,
				  fd);
		return;
	}
	connection_answer_error(&session->connection, pieces->id, &pieces->error);
}

static bool pieces_step(struct chore *chore)
{
	struct pieces *pieces = container_of(chore, struct pieces, chore);
	struct session *session = pieces->session;
	char text[PIECE_BYTES];
	bool more;

	if (!session->hung_up) {
		pieces->text = text;
		pieces->n = 0;
		more = pieces->ops->write(pieces);
		flush(pieces);
		if (more && pieces->error.code == FMHA_OK)
			return true;
		pieces_answer(pieces);
	}
	pieces_end(pieces);
	session_offload_ended(session);
	return false;
}

void pieces_start(struct pieces *pieces, const struct pieces_ops *ops, struct session *session,
		  uint32_t id)
{
	pieces->ops = ops;
	pieces->session = session;
	pieces->id = id;
	pieces->fd = -1;
	pieces->bytes = pieces->charged_bytes = 0;
	pieces->error.code = FMHA_OK;
	session->n_offloads++;
	chore_start(&session->worker->chores, &pieces->chore, session->account, pieces_step);
}
