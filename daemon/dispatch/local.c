/* SPDX-License-Identifier: MIT */
/*
 * local.c: a plan for whoever launches it in a context of its own. What the worker would copy, judge
 * and upload is made on the device by a launch in front of the others, in the workspace behind all
 * else.
 */
#include "internal.h"

static uint64_t local_align(uint64_t bytes)
{
	return (bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}

static bool needs_preparation(const struct plan *plan)
{
	return plan->n_stages > 0 &&
	       (plan_indices_bytes(plan) > 0 || plan->workspace_head_bytes > 0);
}

int plan_local(const struct plan *plan, struct plan_local *ret_local, struct fmha_error *err)
{
	const struct fmha_problem *p = &plan->problem;
	struct plan_local *local = ret_local;
	uint64_t indices = local_align(plan->workspace_bytes);

	/* Such a cache has no page for what the plan writes, whatever its tables hold. */
	if (p->seqlen_new > 0 && plan_paged(p) && p->n_pages == 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "n_pages",
					    "n_pages 0: there is no page for the new keys");
	if (p->seqlen_new > 0 && plan_present(p, FMHA_T_SEQSTART_K) && p->total_k < p->seqlen_new)
		return fmha_error_set_field(err, FMHA_EINVAL, "total_k",
					    "total_k %d: there is no room for %d new keys",
					    p->total_k, p->seqlen_new);
	local->prepares = needs_preparation(plan);
	local->n_launches = 0;
	local->workspace_bytes = plan->workspace_bytes;
	if (local->prepares) {
		args_record_prepare(plan, &local->launches[local->n_launches++]);
		local->workspace_bytes = indices + plan_indices_bytes(plan);
	}
	for (uint32_t i = 0; i < plan->n_stages; i++)
		local->launches[local->n_launches++] = plan->stages[i].launch;
	for (uint32_t i = 0; i < local->n_launches; i++)
		launch_rebase(&local->launches[i], LAUNCH_INDICES, LAUNCH_WORKSPACE, indices);
	return 0;
}
