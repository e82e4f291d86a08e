/* SPDX-License-Identifier: MIT */
/*
 * turns.h: whose turn it is: that of the user for whom least time was spent.
 *
 * A user who comes back is put level with the others at most: having asked for nothing is no
 * credit. What was spent stays a debt while anybody else is there, so that leaving and coming back
 * does not help.
 *
 * Not base/fair.h, which hands out one turn after the other and is told afterwards what each took:
 * a compile takes seconds, and costs its user while it runs, as others are chosen meanwhile; and
 * the choice is among what may run now, by class first, for any of those who wait for it.
 */
#ifndef FMHAD_COMPILE_TURNS_H
#define FMHAD_COMPILE_TURNS_H

#include <stdint.h>

struct turns_user {
	struct turns_user *next;
	uint32_t uid;
	uint32_t n_references; /* what waits or runs for the user */
	uint32_t n_running;
	int64_t spent_ms;       /* of what has ended, and what a newcomer is put level with */
	int64_t started_sum_ms; /* of what runs: the sum of the times when it began */
};

struct turns {
	struct turns_user *users;
};

void turns_deinit(struct turns *turns);

/* The user with one more reference; NULL: out of memory. */
struct turns_user *turns_get(struct turns *turns, uint32_t uid, int64_t now_ms);
void turns_put(struct turns *turns, struct turns_user *user);

/* Something begins, or ends, that runs for the user. */
void turns_begin(struct turns_user *user, int64_t now_ms);
void turns_end(struct turns_user *user, int64_t began_ms, int64_t now_ms);

/* What was spent for the user up to now. */
int64_t turns_spent(const struct turns_user *user, int64_t now_ms);

#endif
