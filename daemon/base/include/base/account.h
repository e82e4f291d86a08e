/* SPDX-License-Identifier: MIT */
/*
 * account.h: what each user has taken, in one process, of everything that can run out. Whatever is
 * allocated, opened, mapped or queued on behalf of a client is charged here before it is spent, and
 * given back when it is gone; nothing else counts. A resource has a limit for one user and one for
 * all of them, so that a few users together cannot take what the process itself needs.
 *
 * An account exists while something holds a reference to it, and is found by uid; nothing in it
 * outlives what it counts.
 */
#ifndef FMHAD_BASE_ACCOUNT_H
#define FMHAD_BASE_ACCOUNT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <fmha/base.h>

#include <base/limits.h>
#include <base/list.h>

/*
 * X(ID, field of an error or "", what an error calls it, limit of one user, limit of all)
 *
 * DESCRIPTORS counts those that a client has sent and no message has taken, those of answers that
 * it has not read (queued here or in its socket), and those opened for it meanwhile.
 */
#define ACCOUNT_RESOURCES(X)                                                                       \
	X(CONNECTIONS, "", "connections", CONNECTIONS_PER_UID, CONNECTIONS)                        \
	X(SESSIONS, "", "connections to one device", SESSIONS_PER_UID, SESSIONS)                   \
	X(IN_FLIGHT, "", "requests in flight", IN_FLIGHT_PER_UID, IN_FLIGHT)                       \
	X(DESCRIPTORS, "", "file descriptors", FDS_PER_UID, FDS)                                   \
	X(BUFFERS, "", "buffers", BUFFERS_PER_UID, BUFFERS)                                        \
	X(EVENTS, "", "events", EVENTS_PER_UID, EVENTS)                                            \
	X(PLANS, "", "plans", PLANS_PER_UID, PLANS)                                                \
	X(KERNELS, "", "kernels that plans have", KERNELS_PER_UID, KERNELS)                        \
	X(MEMORY, "size", "bytes of memory", MEMORY_BYTES_PER_UID, MEMORY_BYTES)                   \
	X(FENCED, "", "sessions with runs that wait for fences", FENCED_SESSIONS_PER_UID,          \
	  FENCED_SESSIONS)                                                                         \
	X(COMPILES, "", "kernels to be compiled", COMPILES_PER_UID, COMPILES)                      \
	X(POOLS, "name", "pools", POOLS_PER_UID, POOLS)                                            \
	X(POOL_BYTES, "n_pages", "bytes of pools", POOL_BYTES_PER_UID, POOL_BYTES)                 \
	X(POOL_SPILL, "n_spill", "bytes of pools' files", POOL_SPILL_BYTES_PER_UID,                \
	  POOL_SPILL_BYTES)

enum account_resource {
#define ACCOUNT_ENUM(ID, field, name, one, all) ACCOUNT_##ID,
	ACCOUNT_RESOURCES(ACCOUNT_ENUM)
#undef ACCOUNT_ENUM
		N_ACCOUNT_RESOURCES
};

struct account {
	struct list in_accounts;
	struct accounts *accounts;
	uint32_t n_references;
	uid_t uid;
	uint64_t used[N_ACCOUNT_RESOURCES];
	uint32_t n_leaving; /* a worker's: runs whose memory is being given back */

	/* The loop that serves this user's connections (hub.c). */
	struct list backlog;  /* connections that wait for a turn */
	struct list in_users; /* users with a backlog */
	uint64_t loop_ns;     /* recent time on the loop, halved every LOOP_PERIOD */
	uint64_t loop_period; /* as of which */
	uint64_t
		told_ns; /* a worker's: until when it believes what clients say that they have run */
	uint64_t iteration,
		iteration_ns; /* the loop's last iteration with a turn, and time in it */
};

struct accounts {
	struct list list; /* few users: a list is enough */
	struct limits *limits;
	uint64_t used[N_ACCOUNT_RESOURCES]; /* of all users */
};

/* @limits: kept */
void accounts_init(struct accounts *accounts, struct limits *limits);

/* The user's account with one more reference, or NULL when out of memory. */
struct account *account_get(struct accounts *accounts, uid_t uid);

/* Drops a reference; the last one must find every count at zero. Takes NULL. */
struct account *account_put(struct account *account);

/*
 * Takes @n of @resource, or says which limit forbids it and counts the hit.
 * Return: 0, FMHA_EQUOTA (nothing is charged).
 */
int account_charge(struct account *account, enum account_resource resource, uint64_t n,
		   struct fmha_error *err);

/* Gives back @n that were charged. */
void account_release(struct account *account, enum account_resource resource, uint64_t n);

/* Whether account_charge() would take @n now; counts no hit. */
bool account_has_room(const struct account *account, enum account_resource resource, uint64_t n);

/* Whether all users together have taken all that there is. */
bool account_all_full(const struct accounts *accounts, enum account_resource resource);

/*
 * Time that the process's loop has spent on the user, who goes later for it while others wait.
 * Connections add their turns; whoever works on the loop outside of one adds that.
 */
void account_add_loop_ns(struct account *account, uint64_t now_ns, uint64_t spent_ns);

/* The same, of late: what lies back further than a few hundred ms does not count. */
uint64_t account_loop_ns(struct account *account, uint64_t now_ns);

#endif
