/* SPDX-License-Identifier: MIT */
/*
 * account.h: what each user has taken, in one process. An account exists while something holds a
 * reference to it, and is found by uid; nothing in it outlives what it counts.
 */
#ifndef FMHAD_BASE_ACCOUNT_H
#define FMHAD_BASE_ACCOUNT_H

#include <stdint.h>
#include <sys/types.h>

#include <base/list.h>

struct account {
	struct list in_accounts;
	uint32_t n_references;
	uid_t uid;
	uint32_t n_connections, n_sessions, n_fds, n_in_flight, n_buffers, n_events, n_plans;
	uint64_t memory_bytes;
};

struct accounts {
	struct list list; /* few users: a list is enough */
	struct account total;
};

void accounts_init(struct accounts *accounts);

/* The user's account with one more reference, or NULL when out of memory. */
struct account *account_get(struct accounts *accounts, uid_t uid);

/* Drops a reference; the last one must find every count at zero. Takes NULL. */
struct account *account_put(struct account *account);

#endif
