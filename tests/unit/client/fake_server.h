/* SPDX-License-Identifier: MIT */
/*
 * fake_server.h: a daemon of the client tests' own, in threads of the test program. Speaks the real
 * protocol over a real listening socket, and misbehaves on command. Its "attention" copies Q to O,
 * which is enough to see whether the right bytes took the right way.
 */
#ifndef TEST_FAKE_SERVER_H
#define TEST_FAKE_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <proto/methods.h>

struct fake_server;

enum fake_fault {
	FAKE_SOUND,
	FAKE_CUT,      /* send only `at` bytes of the answer, then hang up */
	FAKE_GARBAGE,  /* send bytes drawn from `at` instead of the answer */
	FAKE_FLIP,     /* flip bit `at` of the answer */
	FAKE_SILENT,   /* never answer */
	FAKE_NO_FD,    /* leave out the answer's file descriptor */
	FAKE_MANY_FDS, /* send 200 of them */
	FAKE_WRONG_ID, /* answer a request that nobody made */
	FAKE_FLOOD,    /* send notifications until the socket is full */
	FAKE_UNSEALED, /* hand out a memfd that can shrink */
	FAKE_SHORT,    /* hand out a memfd that is too small */
	FAKE_PIPE,     /* hand out a pipe instead of a memfd or socket */
	FAKE_BUSY,     /* answer FMHA_EBUSY */
	FAKE_REFUSE,   /* a run: answer FMHA_EINVAL */
	FAKE_BYTEWISE, /* send the answer byte by byte */
};

struct fake_counters {
	int connections, workers, buffers, plans, runs, rebinds, cancels, imports, hellos, batches;
	int events;  /* there are */
	int ordered; /* events that runs named */
};

/* Listens on a new socket in a new directory. */
struct fake_server *fake_start(void);
const char *fake_path(const struct fake_server *server);

/* Hangs up on everybody and stops listening; fake_resume() listens on the same path again. */
void fake_pause(struct fake_server *server);
void fake_resume(struct fake_server *server);
struct fake_server *fake_stop(struct fake_server *server);

/* Hangs up all workers' connections, as a worker's death does. */
void fake_kill_workers(struct fake_server *server);

/* The next @times answers to @method go wrong. */
void fake_misbehave(struct fake_server *server, enum proto_method method, enum fake_fault fault,
		    uint32_t at, int times);

/* Bytes of the last whole answer to @method. */
size_t fake_answer_bytes(struct fake_server *server, enum proto_method method);

/* While held, runs are not answered, unless cancelled. */
void fake_hold_runs(struct fake_server *server, bool hold);

struct fake_counters fake_counters(struct fake_server *server);

#endif
