/* SPDX-License-Identifier: MIT */
#include "judged.h"

#include "leftovers.h"

#include <stdlib.h>
#include <string.h>

#include <proto/error.h>

#define KEEP_BYTES (4u << 20) /* more is not compared, and not held between runs */

static int charge(struct session *session, uint64_t bytes, struct fmha_error *err)
{
	if (account_charge(session->account, ACCOUNT_MEMORY, bytes, err) == 0)
		return 0;
	judged_forget(session);
	if (account_charge(session->account, ACCOUNT_MEMORY, bytes, err) == 0)
		return 0;
	return fmha_error_set(err, FMHA_EQUOTA, "%llu bytes of tables exceed the memory quota",
			      (unsigned long long)bytes);
}

int judged_new(struct session *session, uint64_t bytes, struct judged **ret_judged,
	       struct fmha_error *err)
{
	struct device *device = session->worker->device;
	uint64_t cost = device_workspace_cost(device, bytes);
	struct judged *judged;
	int r = charge(session, cost, err);

	if (r < 0)
		return r;
	judged = calloc(1, sizeof(*judged));
	r = judged ? device_workspace_new(device, bytes, &judged->memory, err)
		   : fmha_error_set(err, FMHA_ENOMEM, "tables: out of memory");
	if (r < 0) {
		account_release(session->account, ACCOUNT_MEMORY, cost);
		free(judged);
		return r;
	}
	judged->n_references = 1;
	judged->session = session;
	judged->bytes = bytes;
	judged->charged_bytes = cost;
	*ret_judged = judged;
	return 0;
}

struct judged *judged_unref(struct judged *judged)
{
	if (!judged || --judged->n_references > 0)
		return NULL;
	leftovers_free(judged->session->worker, judged->session->account, judged->indices,
		       judged->bytes, &judged->memory, judged->charged_bytes);
	free(judged);
	return NULL;
}

struct judged *judged_find(struct session *session, uint64_t bytes)
{
	for (int i = 0; i < SESSION_JUDGED; i++) {
		struct judged *judged = session->judged[i];

		if (judged && judged->bytes == bytes) {
			judged->n_references++;
			return judged;
		}
	}
	return NULL;
}

bool judged_has(const struct judged *judged, const struct plan_indices *indices)
{
	return judged && memcmp(plan_indices_data(judged->indices), plan_indices_data(indices),
				judged->bytes) == 0;
}

/* The place of what has as many bytes, else the one that was taken longest ago. */
static uint32_t place_for(struct session *session, uint64_t bytes)
{
	for (uint32_t i = 0; i < SESSION_JUDGED; i++)
		if (session->judged[i] && session->judged[i]->bytes == bytes)
			return i;
	return session->next_judged++ % SESSION_JUDGED;
}

void judged_keep(struct judged *judged, struct plan_indices *indices)
{
	struct session *session = judged->session;
	uint32_t place;

	judged->indices = indices;
	if (session->closed || judged->bytes > KEEP_BYTES)
		return;
	place = place_for(session, judged->bytes);
	judged_unref(session->judged[place]);
	judged->n_references++;
	session->judged[place] = judged;
}

void judged_forget(struct session *session)
{
	for (int i = 0; i < SESSION_JUDGED; i++)
		session->judged[i] = judged_unref(session->judged[i]);
}
