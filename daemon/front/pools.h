/* SPDX-License-Identifier: MIT */
/*
 * pools.h: caches of keys and values that outlive the processes that fill them.
 *
 * A pool is a memory file of equal pages, of one user and found by its name; the book-keeping of kvpool.h
 * says whose page is whose. The front has the file, so neither the end of a client nor of a worker takes
 * a page: clients map the file. Every process of the pool's user can do that, and what one of them writes where it
 * should not spoils that user's pages alone. Another user has it open only where the pool's user says so, by a word that
 * the daemon draws, for that user, and gets a descriptor that reads unless it is to write.
 *
 * A pool of a GPU's memory is an allocation that the GPU's worker makes and keeps no part of (worker_memory): the front's
 * descriptor alone keeps it, whoever dies. Who gets a descriptor of it chooses whether it is written, so nobody is let in to read only.
 *
 * When a connection ends, its pins end. What it had leased may still be written by its process: these pages
 * wait for the end of that process (a descriptor of it tells), are emptied on another thread, and are free then.
 */
#ifndef FMHAD_FRONT_POOLS_H
#define FMHAD_FRONT_POOLS_H

#include "front.h"

#include <base/chores.h>

struct pool;
struct pools {
	struct front *front;
	struct list list;  /* struct pool */
	struct list ended; /* those that were dropped and still have users */
	struct log_limit log;
	/* pool_file.c */
	uv_timer_t sweep;
	uint32_t n_file_works; /* under way */
	void (*end_use)(
		struct pool
			*pool); /* told when one of them no longer uses it: it may be gone then */
	/* told by pool_device.c when a worker has made a pool's memory, or why it has not */
	void (*made)(struct pool *pool, const struct fmha_error *failed);
	struct chores chores;
	uv_timer_t timer; /* runs while a pool is open to nobody */
};

void pools_init(struct pools *pools, struct front *front);

/* One request of a client. Return: as connection_ops.handle. */
int pools_handle(struct client *client, uint32_t id, enum proto_method method,
		 const union proto_any_params *params, struct fmha_error *err);

/* The client is gone. */
void pools_forget(struct client *client);

/* Those of user @uid, or @all; given. */
cJSON *pools_json(const struct pools *pools, uint32_t uid, bool all);

#endif
