/* SPDX-License-Identifier: MIT */
#include "request.h"

#include <stdlib.h>
#include <string.h>

#include <proto/error.h>

#define KEEP_BYTES (4u << 20) /* more is not compared, and not held between runs */

static int checked_charge(struct session *session, uint64_t bytes, struct fmha_error *err)
{
	if (account_charge(session->account, ACCOUNT_MEMORY, bytes, err) == 0)
		return 0;
	checked_forget(session);
	if (account_charge(session->account, ACCOUNT_MEMORY, bytes, err) == 0)
		return 0;
	return fmha_error_set(err, FMHA_EQUOTA, "%llu bytes of tables exceed the memory quota",
			      (unsigned long long)bytes);
}

int checked_new(struct session *session, uint64_t bytes, struct checked **ret_checked,
		struct fmha_error *err)
{
	struct device *device = session->worker->device;
	uint64_t cost = device_workspace_cost(device, bytes);
	struct checked *checked;
	int r = checked_charge(session, cost, err);

	if (r < 0)
		return r;
	checked = calloc(1, sizeof(*checked));
	r = checked ? device_workspace_new(device, bytes, &checked->memory, err)
		    : fmha_error_set(err, FMHA_ENOMEM, "tables: out of memory");
	if (r < 0) {
		account_release(session->account, ACCOUNT_MEMORY, cost);
		free(checked);
		return r;
	}
	checked->n_references = 1;
	checked->session = session;
	checked->bytes = bytes;
	checked->charged_bytes = cost;
	*ret_checked = checked;
	return 0;
}

struct checked *checked_unref(struct checked *checked)
{
	if (!checked || --checked->n_references > 0)
		return NULL;
	leftovers_free(checked->session->worker, checked->session->account, checked->indices,
		       checked->bytes, &checked->memory, checked->charged_bytes);
	free(checked);
	return NULL;
}

struct checked *checked_find(struct session *session, uint64_t bytes)
{
	for (int i = 0; i < SESSION_CHECKED; i++) {
		struct checked *checked = session->checked[i];

		if (checked && checked->bytes == bytes) {
			checked->n_references++;
			return checked;
		}
	}
	return NULL;
}

bool checked_has(const struct checked *checked, const struct plan_indices *indices)
{
	return checked && memcmp(plan_indices_data(checked->indices), plan_indices_data(indices),
				 checked->bytes) == 0;
}

/* The place of what has as many bytes, else the one that was taken longest ago. */
static uint32_t place_for(struct session *session, uint64_t bytes)
{
	for (uint32_t i = 0; i < SESSION_CHECKED; i++)
		if (session->checked[i] && session->checked[i]->bytes == bytes)
			return i;
	return session->next_checked++ % SESSION_CHECKED;
}

void checked_keep(struct checked *checked, struct plan_indices *indices)
{
	struct session *session = checked->session;
	uint32_t place;

	checked->indices = indices;
	if (session->closed || checked->bytes > KEEP_BYTES)
		return;
	place = place_for(session, checked->bytes);
	checked_unref(session->checked[place]);
	checked->n_references++;
	session->checked[place] = checked;
}

void checked_forget(struct session *session)
{
	for (int i = 0; i < SESSION_CHECKED; i++)
		session->checked[i] = checked_unref(session->checked[i]);
}
