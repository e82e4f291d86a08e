/* SPDX-License-Identifier: MIT */
#include <base/account.h>

#include <assert.h>
#include <stdlib.h>

#include <base/chores.h>
#include <base/clock.h>
#include <proto/error.h>

/* ---- chores ---- */

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
		account->n_references--; /* the chore's; one is left */
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

#define LOOP_PERIOD_BITS 26 /* 67 ms */

static const struct resource {
	const char *field, *name;
	enum limit one, all;
} resources[N_ACCOUNT_RESOURCES] = {
#define ACCOUNT_ROW(ID, field, name, one, all)                                                     \
	[ACCOUNT_##ID] = {field, name, LIMIT_##one, LIMIT_##all},
	ACCOUNT_RESOURCES(ACCOUNT_ROW)
#undef ACCOUNT_ROW
};

void accounts_init(struct accounts *accounts, struct limits *limits)
{
	*accounts = (struct accounts){.limits = limits};
	list_init(&accounts->list);
}

struct account *account_get(struct accounts *accounts, uid_t uid)
{
	struct account *account;

	list_for_each(node, &accounts->list) {
		account = container_of(node, struct account, in_accounts);
		if (account->uid == uid) {
			account->n_references++;
			return account;
		}
	}
	account = calloc(1, sizeof(*account));
	if (!account)
		return NULL;
	account->accounts = accounts;
	account->uid = uid;
	account->n_references = 1;
	list_init(&account->backlog);
	list_init(&account->in_users);
	list_append(&accounts->list, &account->in_accounts);
	return account;
}

struct account *account_put(struct account *account)
{
	if (!account || --account->n_references > 0)
		return NULL;
	for (int i = 0; i < N_ACCOUNT_RESOURCES; i++)
		assert(account->used[i] == 0);
	list_remove(&account->in_accounts);
	list_remove(&account->in_users);
	free(account);
	return NULL;
}

static bool account_fits(uint64_t limit, uint64_t used, uint64_t n)
{
	return used <= limit && n <= limit - used;
}

bool account_has_room(const struct account *account, enum account_resource resource, uint64_t n)
{
	const uint64_t *limits = account->accounts->limits->value;
	const struct resource *row = &resources[resource];

	return account_fits(limits[row->one], account->used[resource], n) &&
	       account_fits(limits[row->all], account->accounts->used[resource], n);
}

bool account_all_full(const struct accounts *accounts, enum account_resource resource)
{
	return accounts->used[resource] >= accounts->limits->value[resources[resource].all];
}

int account_charge(struct account *account, enum account_resource resource, uint64_t n,
		   struct fmha_error *err)
{
	struct accounts *accounts = account->accounts;
	struct limits *limits = accounts->limits;
	const struct resource *row = &resources[resource];
	bool one_fits = account_fits(limits->value[row->one], account->used[resource], n);
	enum limit limit = one_fits ? row->all : row->one;

	if (one_fits && account_fits(limits->value[row->all], accounts->used[resource], n)) {
		account->used[resource] += n;
		accounts->used[resource] += n;
		return 0;
	}
	limits->hits[limit]++;
	return fmha_error_set_field(
		err, FMHA_EQUOTA, row->field,
		"more than %llu %s of %s: %llu besides %llu (limits.%s)",
		(unsigned long long)limits->value[limit], row->name,
		one_fits ? "all users" : "one user", (unsigned long long)n,
		(unsigned long long)(one_fits ? accounts->used : account->used)[resource],
		limit_name(limit));
}

void account_release(struct account *account, enum account_resource resource, uint64_t n)
{
	assert(account->used[resource] >= n && account->accounts->used[resource] >= n);
	account->used[resource] -= n;
	account->accounts->used[resource] -= n;
}

uint64_t account_loop_ns(struct account *account, uint64_t now_ns)
{
	uint64_t period = now_ns >> LOOP_PERIOD_BITS, n = period - account->loop_period;

	account->loop_period = period;
	account->loop_ns = n < 64 ? account->loop_ns >> n : 0;
	return account->loop_ns;
}

void account_add_loop_ns(struct account *account, uint64_t now_ns, uint64_t spent_ns)
{
	account->loop_ns = account_loop_ns(account, now_ns) + spent_ns;
}
