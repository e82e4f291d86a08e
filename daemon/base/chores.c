/* SPDX-License-Identifier: MIT */
#include <base/chores.h>

#include <base/clock.h>

/* The oldest one of the user that has had the least time. */
static struct chore *next_chore(struct chores *chores, uint64_t now)
{
	struct chore *next = NULL;
	uint64_t least = 0;

	list_for_each_entry(struct chore, chore, &chores->list, in_chores) {
		uint64_t loop_ns;

		if (next && chore->account == next->account)
			continue;
		loop_ns = account_loop_ns(chore->account, now);
		if (!next || loop_ns < least) {
			next = chore;
			least = loop_ns;
		}
	}
	return next;
}

static void do_step(struct chores *chores, struct chore *chore, uint64_t now)
{
	struct account *account = chore->account;
	struct doing_before before = doing_begin_word(chores->doing, chore->doing);
	struct list *node = &chore->in_chores;
	uint64_t end;
	bool more;

	list_remove(node);
	account->n_references++; /* what is given back may be the last of it */
	more = chore->step(chore);
	doing_end(chores->doing, before);
	end = clock_ns();
	account_add_loop_ns(account, end, end - now);
	if (more)
		list_prepend(&chores->list, node);
	else
		(void)account_put(account); /* the chore's */
	(void)account_put(account);
}

static void on_turn(uv_idle_t *turn)
{
	struct chores *chores = container_of(turn, struct chores, turn);
	const uint64_t most_ns = chores->limits->value[LIMIT_WAKE_US] * NS_PER_US;
	uint64_t start = clock_ns(), now = start;

	while (!list_is_empty(&chores->list) && now - start < most_ns) {
		do_step(chores, next_chore(chores, now), now);
		now = clock_ns();
	}
	if (list_is_empty(&chores->list))
		uv_idle_stop(turn);
}

void chores_init(struct chores *chores, uv_loop_t *loop, const struct limits *limits,
		 struct doing *doing)
{
	chores->limits = limits;
	chores->doing = doing;
	list_init(&chores->list);
	uv_idle_init(loop, &chores->turn);
}

void chore_start(struct chores *chores, struct chore *chore, struct account *account,
		 bool (*step)(struct chore *chore))
{
	account->n_references++;
	chore->account = account;
	chore->doing = chores->doing ? atomic_load(&chores->doing->word) : 0;
	chore->step = step;
	list_init(&chore->in_chores);
	list_append(&chores->list, &chore->in_chores);
	uv_idle_start(&chores->turn, on_turn);
}
