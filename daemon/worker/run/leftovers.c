/* SPDX-License-Identifier: MIT */
#include "request.h"

#include <stdlib.h>

#define MOST_UNCHARGED 4 /* of a user's runs, whose memory is not gone yet */

struct leftovers {
	struct offload offload;
	struct worker *worker;
	struct account *account;
	struct plan_indices *indices;
	struct device_memory workspace;
	uint64_t charged_bytes;
};

static struct leftovers *leftovers_of(struct offload *offload)
{
	return container_of(offload, struct leftovers, offload);
}

static void free_memory(struct leftovers *leftovers)
{
	leftovers->indices = plan_indices_free(leftovers->indices);
	if (leftovers->workspace.map)
		device_workspace_free(leftovers->worker->device, &leftovers->workspace);
}

static void leftovers_run(struct offload *offload)
{
	free_memory(leftovers_of(offload));
}

static void done(struct offload *offload)
{
	struct leftovers *leftovers = leftovers_of(offload);

	account_release(leftovers->account, ACCOUNT_MEMORY, leftovers->charged_bytes);
	leftovers->account->n_leaving--;
	(void)account_put(leftovers->account);
	free(leftovers);
}

/* Return: whether another thread does it. */
static bool free_elsewhere(const struct leftovers *now)
{
	struct leftovers *later = malloc(sizeof(*later));

	if (!later)
		return false;
	*later = *now;
	later->offload = (struct offload){
		.user = now->account, .run = leftovers_run, .done = done, .undo = done};
	if (offload_start(&now->worker->offloads, &later->offload, NULL) < 0) {
		free(later);
		return false;
	}
	now->account->n_references++;
	if (now->account->n_leaving++ < MOST_UNCHARGED) {
		account_release(now->account, ACCOUNT_MEMORY, later->charged_bytes);
		later->charged_bytes = 0;
	}
	return true;
}

void leftovers_free(struct worker *worker, struct account *account, struct plan_indices *indices,
		    uint64_t indices_bytes, struct device_memory *workspace, uint64_t charged_bytes)
{
	/* Of GPUs they go back to a pool, on the loop's thread. */
	const bool threads = device_shares_memory(worker->device);
	struct leftovers leftovers = {.worker = worker,
				      .account = account,
				      .indices = indices,
				      .charged_bytes = charged_bytes};

	if (!threads && workspace->map)
		device_workspace_free(worker->device, workspace);
	leftovers.workspace = *workspace;
	*workspace = (struct device_memory){0};
	if ((leftovers.workspace.bytes >= LEFTOVERS_LEAST ||
	     (indices && indices_bytes >= LEFTOVERS_LEAST)) &&
	    free_elsewhere(&leftovers))
		return;
	free_memory(&leftovers);
	account_release(account, ACCOUNT_MEMORY, charged_bytes);
}
