/* SPDX-License-Identifier: MIT */
/*
 * chores.h: work on the loop that is too long for one turn, done in slices that give way.
 *
 * Whatever walks a user's things is a chore: a step that does a bounded amount of it, called again
 * while it says that there is more. An iteration of the loop spends LIMIT_WAKE_US on chores, as on
 * the requests of a user (connection.h), whoever has them: then sockets are looked at again. Of the
 * users with chores the one is served that the loop has spent the least time on lately, as with
 * connections' turns, and the time is that user's. A user's chores are done one after the other: only
 * the first has memory of its own.
 */
#ifndef FMHAD_BASE_CHORES_H
#define FMHAD_BASE_CHORES_H

#include <stdbool.h>

#include <uv.h>

#include <base/account.h>
#include <base/doing.h>
#include <base/limits.h>
#include <base/list.h>

struct chores {
	uv_idle_t turn; /* runs while there is one */
	struct list list;
	const struct limits *limits;
	struct doing *doing; /* NULL: nobody looks */
};

/* Part of the caller's own struct. */
struct chore {
	/* Return: whether there is more to do; otherwise the chore may be freed by now. */
	bool (*step)(struct chore *chore);

	struct account *account; /* referenced until the last step */
	uint64_t doing;          /* what the loop did when it began: that goes on */
	struct list in_chores;
};

void chores_init(struct chores *chores, uv_loop_t *loop, const struct limits *limits,
		 struct doing *doing);
/* @account: whose time it is */
void chore_start(struct chores *chores, struct chore *chore, struct account *account,
		 bool (*step)(struct chore *chore));

#endif
