/* SPDX-License-Identifier: MIT */
#include "turns.h"

#include <stdbool.h>
#include <stdlib.h>

void turns_deinit(struct turns *turns)
{
	while (turns->users) {
		struct turns_user *next = turns->users->next;

		free(turns->users);
		turns->users = next;
	}
}

int64_t turns_spent(const struct turns_user *user, int64_t now_ms)
{
	return user->spent_ms + user->n_running * now_ms - user->started_sum_ms;
}

/* The least that was spent for anybody who is there. Return: false: nobody is. */
static bool least_spent(const struct turns *turns, int64_t now_ms, int64_t *ret_least)
{
	bool found = false;

	for (const struct turns_user *user = turns->users; user; user = user->next) {
		int64_t spent = turns_spent(user, now_ms);

		if (user->n_references == 0)
			continue;
		*ret_least = found && *ret_least < spent ? *ret_least : spent;
		found = true;
	}
	return found;
}

/* Forgets who is gone and would be put level anyway. */
static void prune(struct turns *turns, int64_t least)
{
	struct turns_user **at = &turns->users;

	while (*at) {
		struct turns_user *user = *at;

		if (user->n_references > 0 || user->spent_ms > least) {
			at = &user->next;
			continue;
		}
		*at = user->next;
		free(user);
	}
}

struct turns_user *turns_get(struct turns *turns, uint32_t uid, int64_t now_ms)
{
	struct turns_user *user;
	int64_t least = 0;

	/* Alone: turns_put() has forgotten everybody. */
	if (least_spent(turns, now_ms, &least))
		prune(turns, least);
	for (user = turns->users; user; user = user->next)
		if (user->uid == uid) {
			user->n_references++;
			return user;
		}
	user = calloc(1, sizeof(*user));
	if (!user)
		return NULL;
	user->uid = uid;
	user->n_references = 1;
	user->spent_ms = least;
	user->next = turns->users;
	turns->users = user;
	return user;
}

void turns_put(struct turns *turns, struct turns_user *user)
{
	int64_t least = 0;

	user->n_references--;
	if (!least_spent(turns, 0, &least))
		turns_deinit(turns);
}

void turns_begin(struct turns_user *user, int64_t now_ms)
{
	user->n_running++;
	user->started_sum_ms += now_ms;
}

void turns_end(struct turns_user *user, int64_t began_ms, int64_t now_ms)
{
	user->n_running--;
	user->started_sum_ms -= began_ms;
	user->spent_ms += now_ms - began_ms;
}
