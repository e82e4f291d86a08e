/* SPDX-License-Identifier: MIT */
/*
 * offload.h: calls to the device that may block for long, made off the loop.
 *
 * A driver can keep whoever opens a foreign handle for seconds, or for ever. Such calls are made by
 * a few threads of the worker's, which stay: a driver spends up to a millisecond on the first call
 * of a new thread. Past its deadline an offload is given up: its client is told, another thread
 * takes the place of the one that made it, and what comes of it in the end is undone there.
 *
 * One offload of an owner, a session, runs at a time, and two of a user, so that nobody can take
 * all threads. From the loop to the thread and back are two wake-ups, which can take longer than
 * the call. So a thread that has just been busy looks for the next offload for a moment, because a
 * client that imports one tensor imports several, and the loop looks for the end of an offload that
 * it has just begun.
 */
#ifndef FMHAD_WORKER_OFFLOAD_H
#define FMHAD_WORKER_OFFLOAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include <base/clock.h>
#include <base/doing.h>
#include <base/list.h>
#include <base/spinner.h>
#include <device/device.h>

#define DEVICE_CALL_NS                                                                             \
	(10 * NS_PER_S) /* what a driver gets for making memory, and for taking it back */

/* Part of the caller's own struct. The caller fills in the first part; all of it is the offloads'
 * from offload_start() until one of done() and undo(). */
struct offload {
	const void *owner;   /* of whom one offload runs at a time; NULL: nobody in particular */
	const void *user;    /* of whom two do, whatever their owners; NULL: the same */
	uint64_t timeout_ns; /* from the moment when a thread takes it; 0: none */
	bool urgent;         /* a client waits for it: the loop looks for its end */
	void (*run)(struct offload *offload);  /* on a thread: the call */
	void (*done)(struct offload *offload); /* on the loop: run() has come back */
	/* On the loop: it has not come back in time, and may not touch anything of the owner's any
	 * more. Not called without a timeout; NULL: nobody waits for it. */
	void (*late)(struct offload *offload);
	void (*undo)(struct offload *offload); /* after late(), on the thread: it came back */

	struct list in_offloads;
	uint64_t started_ns;
	uint64_t doing; /* of the loop when it began */
};

/* All zero is one that has not been opened. */
struct offloads {
	struct device *device;
	struct doing *doing; /* the opener's to set, NULL: nobody looks */
	uv_async_t ended_async;
	struct spin spin; /* of the loop, for their ends */
	uint64_t look_until_ns;
	uv_timer_t timer; /* runs while offloads do */
	uint64_t spin_ns;
	pthread_mutex_t lock;
	pthread_cond_t work;
	struct list queued, ended;  /* struct offload */
	bool looking;               /* the loop needs no wake-up */
	atomic_uint n_ended;        /* also read without the lock, by the loop that looks */
	struct list threads;        /* struct offload_thread (offload.c) that take offloads */
	struct list left;           /* the same: their offload was given up and is not back yet */
	atomic_uint n_queued;       /* also read without the lock, by a thread that looks */
	uint32_t n_threads, n_idle; /* those that take offloads, those of them without one */
	uint32_t n_left;
	uint32_t n_pending; /* loop only: neither done nor late */
};

/* @spin_us: how long a thread looks for more; 0: it sleeps at once. Return: 0 or FMHA_ENOMEM. */
int offloads_open(struct offloads *offloads, uv_loop_t *loop, struct device *device,
		  uint64_t spin_us, struct fmha_error *err);

/* Loop thread. Return: 0 (done() or late() comes), FMHA_EBUSY: too many calls have not come back,
 * of all or, for an urgent one, of its user's; FMHA_ENOMEM. */
int offload_start(struct offloads *offloads, struct offload *offload, struct fmha_error *err);
/* The same of what has to be done in any case: run() and done() here and now when it cannot start. */
void offload_start_or_run(struct offloads *offloads, struct offload *offload);

/* The word (doing.h) for what the calling thread does and for whom; 0: nothing, or it is not one of these. Safe in a signal
 * handler. */
uint64_t offload_doing(void);

#endif
