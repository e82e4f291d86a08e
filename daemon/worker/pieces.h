/* SPDX-License-Identifier: MIT */
/*
 * pieces.h: answers that are long texts, written a piece at a time as a chore of their user's
 * (base/chores.h): into a memory file that grows and is charged with what is in it, not into memory that
 * is copied into one at the end.
 */
#ifndef FMHAD_WORKER_PIECES_H
#define FMHAD_WORKER_PIECES_H

#include "worker.h"

#define PIECE_BYTES (16u << 10)

struct pieces;

struct pieces_ops {
	enum proto_method method; /* its result is a json_result */
	/* Adds some lines, as many as fit in a small part of a turn and in PIECE_BYTES. Not called when the client has
	 * gone. Return: whether there are more. */
	bool (*write)(struct pieces *pieces);
	void (*free)(struct pieces *pieces);
};

/* Part of the caller's own struct. */
struct pieces {
	const struct pieces_ops *ops;
	struct session *session;
	uint32_t id;
	struct chore chore;
	int fd; /* -1: no piece is written yet */
	uint64_t bytes, charged_bytes;
	char *text;              /* PIECE_BYTES while write() is called: the piece */
	size_t n;                /* of it */
	struct fmha_error error; /* code FMHA_OK: none so far */
};

/* Answers request @id of the session, later. @pieces: taken. */
void pieces_start(struct pieces *pieces, const struct pieces_ops *ops, struct session *session,
		  uint32_t id);

/* A line of the answer. */
__attribute__((format(printf, 2, 3))) void pieces_put(struct pieces *pieces, const char *format,
						      ...);

#endif
