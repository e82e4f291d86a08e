/* SPDX-License-Identifier: MIT */
/*
 * fair.h: whose turn it is.
 *
 * Turns go by user first, then by session of that user, by work done. Each of both kinds has a
 * virtual time: the nanoseconds of work done for it, a user's divided by the user's weight. Whoever
 * has the least is next. Who becomes active starts at its own virtual time or the least of those
 * that are, whichever is later: time without work earns no credit, and work that nobody else wanted
 * costs nothing later.
 *
 * So a user with 100 sessions gets as much as one with a single session, and n users of equal
 * weight who always have work get 1/n each.
 *
 * Virtual times are compared by whole rounds, so that those compared are held equal to within a
 * round and the longest charge. Within its round one is served until the round is full: jobs that
 * took turns at every task would throw each other's data out of the caches. One that has just
 * become active comes first in its round: who asks for little now and then is always next.
 *
 * Plain data: no threads, no clock, no I/O. Whoever uses it from several threads locks.
 */
#ifndef FMHAD_BASE_FAIR_H
#define FMHAD_BASE_FAIR_H

#include <stdint.h>

#include <base/list.h>

/* A user among users, or a session among its user's. */
struct fair_entry {
	struct list in_active; /* linked: it has something to run */
	uint64_t virtual_ns;
};

struct fair_level {
	struct list active; /* struct fair_entry, the one that was served last first */
	uint64_t clock_ns;  /* where newcomers start; never goes back */
};

struct fair {
	struct list users; /* struct fair_user */
	struct fair_level level;
	uint64_t user_round_ns, session_round_ns;
};

struct fair_user;

struct fair_session {
	struct fair *fair;
	struct fair_user *user;
	struct fair_entry entry;
};

/* Rounds are at least 1, which is exact. */
void fair_init(struct fair *fair, uint64_t user_round_ns, uint64_t session_round_ns);
/* No session may be left. */
void fair_deinit(struct fair *fair);

/*
 * @weight: of the user @uid, at least 1: from now on, for all of its sessions together
 * Return: 0, or FMHA_ENOMEM. fair_session_deinit() takes zeroed memory, too.
 */
int fair_session_init(struct fair *fair, uint32_t uid, uint32_t weight,
		      struct fair_session *session);
void fair_session_deinit(struct fair_session *session);

/* It has something to run, it has nothing to run. Repeating it changes nothing. */
void fair_activate(struct fair_session *session);
void fair_deactivate(struct fair_session *session);

/* Whose turn it is; NULL: nobody is active. Without a charge the next answer is the same. */
struct fair_session *fair_next(struct fair *fair);

/* Work done; or an estimate, which the difference to what it really was corrects later. */
void fair_charge(struct fair_session *session, int64_t ns);

#endif
