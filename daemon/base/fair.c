/* SPDX-License-Identifier: MIT */
/*
 * fair.c: see fair.h.
 *
 * Users and a user's sessions are the same structure, a level, used twice. The list of a level is
 * in the order in which its entries were served last, so that the usual search ends at its first
 * entry: it is not yet a round ahead of the clock, below which nobody is.
 */
#include <base/fair.h>

#include <stdbool.h>
#include <stdlib.h>

#include <proto/error.h>

struct fair_user {
	struct list in_fair;
	uint32_t uid, weight, n_sessions;
	struct fair_entry entry;
	struct fair_level level; /* of its sessions */
};

/* ---- one level ---- */

static void level_init(struct fair_level *level)
{
	list_init(&level->active);
	level->clock_ns = 0;
}

static bool is_active(const struct fair_entry *entry)
{
	return !list_is_empty(&entry->in_active);
}

static void level_add(struct fair_level *level, struct fair_entry *entry)
{
	if (is_active(entry))
		return;
	if (entry->virtual_ns < level->clock_ns)
		entry->virtual_ns = level->clock_ns;
	list_prepend(&level->active, &entry->in_active);
}

/* Nobody waited for what the last one did. */
static void level_remove(struct fair_level *level, struct fair_entry *entry)
{
	list_remove(&entry->in_active);
	if (list_is_empty(&level->active) && entry->virtual_ns > level->clock_ns)
		level->clock_ns = entry->virtual_ns;
}

/* The first entry of the earliest round; NULL when there is none. */
static struct fair_entry *level_next(struct fair_level *level, uint64_t round_ns)
{
	struct fair_entry *next = NULL;

	list_for_each_entry(struct fair_entry, entry, &level->active, in_active) {
		if (!next || entry->virtual_ns / round_ns < next->virtual_ns / round_ns)
			next = entry;
		if (next->virtual_ns / round_ns <= level->clock_ns / round_ns)
			break;
	}
	if (!next)
		return NULL;
	if (next->virtual_ns > level->clock_ns)
		level->clock_ns = next->virtual_ns;
	list_remove(&next->in_active);
	list_prepend(&level->active, &next->in_active);
	return next;
}

static void entry_charge(struct fair_entry *entry, int64_t ns)
{
	if (ns < 0 && entry->virtual_ns < (uint64_t)-ns)
		entry->virtual_ns = 0;
	else
		entry->virtual_ns += (uint64_t)ns;
}

/* ---- both ---- */

void fair_init(struct fair *fair, uint64_t user_round_ns, uint64_t session_round_ns)
{
	list_init(&fair->users);
	level_init(&fair->level);
	fair->user_round_ns = user_round_ns;
	fair->session_round_ns = session_round_ns;
}

/*
 * A user without sessions is forgotten when it is not ahead of the others: before that, coming back
 * would be a way to get rid of what it has had.
 */
static void forget_users(struct fair *fair, uint64_t until_ns)
{
	list_for_each_entry(struct fair_user, user, &fair->users, in_fair) {
		if (user->n_sessions > 0 || user->entry.virtual_ns > until_ns)
			continue;
		list_remove(&user->in_fair);
		free(user);
	}
}

void fair_deinit(struct fair *fair)
{
	forget_users(fair, UINT64_MAX);
}

static struct fair_user *find_user(struct fair *fair, uint32_t uid)
{
	list_for_each_entry(struct fair_user, user, &fair->users, in_fair) {
		if (user->uid == uid)
			return user;
	}
	return NULL;
}

static struct fair_user *user_new(struct fair *fair, uint32_t uid)
{
	struct fair_user *user = calloc(1, sizeof(*user));

	if (!user)
		return NULL;
	user->uid = uid;
	list_init(&user->entry.in_active);
	level_init(&user->level);
	list_append(&fair->users, &user->in_fair);
	return user;
}

int fair_session_init(struct fair *fair, uint32_t uid, uint32_t weight,
		      struct fair_session *session)
{
	struct fair_user *user;

	forget_users(fair, fair->level.clock_ns);
	user = find_user(fair, uid);
	if (!user)
		user = user_new(fair, uid);
	if (!user)
		return FMHA_ENOMEM;
	user->weight = weight;
	user->n_sessions++;
	*session = (struct fair_session){.fair = fair, .user = user};
	list_init(&session->entry.in_active);
	return 0;
}

void fair_session_deinit(struct fair_session *session)
{
	if (!session->user)
		return;
	fair_deactivate(session);
	session->user->n_sessions--;
	session->user = NULL;
	forget_users(session->fair, session->fair->level.clock_ns);
}

void fair_activate(struct fair_session *session)
{
	level_add(&session->user->level, &session->entry);
	level_add(&session->fair->level, &session->user->entry);
}

void fair_deactivate(struct fair_session *session)
{
	struct fair_user *user = session->user;

	if (!is_active(&session->entry))
		return;
	level_remove(&user->level, &session->entry);
	if (list_is_empty(&user->level.active))
		level_remove(&session->fair->level, &user->entry);
}

struct fair_session *fair_next(struct fair *fair)
{
	struct fair_entry *entry = level_next(&fair->level, fair->user_round_ns);
	struct fair_user *user;

	if (!entry)
		return NULL;
	user = container_of(entry, struct fair_user, entry);
	entry = level_next(&user->level, fair->session_round_ns);
	return container_of(entry, struct fair_session, entry);
}

void fair_charge(struct fair_session *session, int64_t ns)
{
	entry_charge(&session->entry, ns);
	entry_charge(&session->user->entry, ns / (int64_t)session->user->weight);
}
