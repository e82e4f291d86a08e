/* SPDX-License-Identifier: MIT */
#include <base/account.h>

#include <assert.h>
#include <stdlib.h>

void accounts_init(struct accounts *accounts)
{
	*accounts = (struct accounts){0};
	list_init(&accounts->list);
}

struct account *account_get(struct accounts *accounts, uid_t uid)
{
	struct account *account;

	list_for_each(node, &accounts->list)
	{
		account = container_of(node, struct account, in_accounts);
		if (account->uid == uid) {
			account->n_references++;
			return account;
		}
	}
	account = calloc(1, sizeof(*account));
	if (!account)
		return NULL;
	account->uid = uid;
	account->n_references = 1;
	list_append(&accounts->list, &account->in_accounts);
	return account;
}

struct account *account_put(struct account *account)
{
	if (!account || --account->n_references > 0)
		return NULL;
	assert(account->n_connections == 0 && account->n_sessions == 0 && account->n_fds == 0);
	assert(account->n_buffers == 0 && account->n_events == 0 && account->n_plans == 0 &&
	       account->memory_bytes == 0);
	assert(account->n_in_flight == 0);
	list_remove(&account->in_accounts);
	free(account);
	return NULL;
}
