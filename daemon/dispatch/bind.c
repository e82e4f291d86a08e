/* SPDX-License-Identifier: MIT */
/*
 * bind.c: plan + buffers -> argument structs for one run. Everything that depends on where the
 * tensors lie is judged here, on every run, because a run may name other buffers than the plan did.
 * Two steps: what the run's integers are, from which follows how large its workspace is; then, in
 * that workspace, the arguments.
 */
#include <stdio.h>

#include "internal.h"

static int view_error(struct fmha_error *err, const struct plan_view *view, const char *part,
		      const char *why)
{
	const char *name = proto_roles[view->role].name;
	char field[48];

	(void)snprintf(field, sizeof(field), "tensor.%s%s", name, part);
	return fmha_error_set_field(err, FMHA_EINVAL, field, "tensor.%s: %s", name, why);
}

static int check_ranges(const struct plan *plan, const struct plan_binding *bindings,
			struct fmha_error *err)
{
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		const struct plan_binding *b = &bindings[view->role];

		if (view->span_bytes == 0)
			continue;
		if (!b->device)
			return view_error(err, view, "", "no buffer is bound");
		if (view->span_bytes > b->bytes) {
			char why[96];

			(void)snprintf(why, sizeof(why),
				       "needs %llu bytes, the buffer has %llu from its offset on",
				       (unsigned long long)view->span_bytes,
				       (unsigned long long)b->bytes);
			return view_error(err, view, "", why);
		}
		if ((uintptr_t)b->device % view->alignment != 0) {
			char why[64];

			(void)snprintf(why, sizeof(why), "not at a multiple of %u bytes",
				       view->alignment);
			return view_error(err, view, ".offset", why);
		}
	}
	return 0;
}

/* Written tensors against everything else: see plan.h. */
static int check_aliasing(const struct plan *plan, const struct plan_binding *bindings,
			  const void *workspace, uint64_t workspace_bytes, struct fmha_error *err)
{
	struct plan_view block = {.span_bytes = workspace_bytes,
				  .element_bytes = 1,
				  .n_axes = 1,
				  .axes = {{(int64_t)workspace_bytes, 1}}};

	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *a = &plan->views[i];
		uintptr_t a_at = (uintptr_t)bindings[a->role].device;

		if (workspace && views_overlap(a, a_at, &block, (uintptr_t)workspace))
			return view_error(err, a, "", "overlaps the workspace");
		if (!a->written)
			continue;
		for (uint32_t j = 0; j < plan->n_views; j++) {
			const struct plan_view *b = &plan->views[j];
			char why[96];

			if (j == i || (b->written && j < i)) /* pairs of outputs once */
				continue;
			if (!views_overlap(a, a_at, b, (uintptr_t)bindings[b->role].device))
				continue;
			(void)snprintf(why, sizeof(why), "is written and overlaps tensor.%s",
				       proto_roles[b->role].name);
			return view_error(err, a, "", why);
		}
	}
	return 0;
}

int plan_read(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
	      struct plan_indices **ret_indices, struct fmha_error *err)
{
	int r = check_ranges(plan, bindings, err);

	return r < 0 ? r : indices_read(plan, bindings, ret_indices, err);
}

int plan_place(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
	       const struct plan_indices *indices, const struct plan_memory *memory,
	       union abi_args args[PLAN_MAX_STAGES], struct fmha_error *err)
{
	struct launch_bases bases = {.at = {[LAUNCH_WORKSPACE] = (uintptr_t)memory->workspace}};
	struct index_tables tables = indices_tables(indices);
	uint64_t bytes = plan_workspace_bytes(plan, indices);
	int r;

	if (bytes > 0 && (!memory->workspace || bases.at[LAUNCH_WORKSPACE] % PLAN_ALIGNMENT != 0))
		return fmha_error_set_field(err, FMHA_EINVAL, "tensor.workspace",
					    "workspace: %llu bytes aligned to %d are needed",
					    (unsigned long long)bytes, PLAN_ALIGNMENT);
	r = check_aliasing(plan, bindings, memory->workspace, bytes, err);
	if (r < 0)
		return r;
	if (plan->workspace_head_bytes > 0 && memory->head)
		bwd_workspace_head(plan, &tables, memory->head);
	for (uint32_t i = 0; i < plan->n_views; i++)
		bases.at[plan->views[i].role] = (uintptr_t)bindings[plan->views[i].role].device;
	if (indices)
		bases.at[LAUNCH_INDICES] = (uintptr_t)(memory->indices
							       ? memory->indices
							       : plan_indices_data(indices));
	for (uint32_t i = 0; i < plan->n_stages; i++)
		launch_bind(&plan->stages[i].launch, &bases, &args[i]);
	return 0;
}

void plan_placeholder_args(const struct plan *plan, union abi_args args[PLAN_MAX_STAGES])
{
	struct launch_bases bases = args_placeholders(plan);

	for (uint32_t i = 0; i < plan->n_stages; i++)
		launch_bind(&plan->stages[i].launch, &bases, &args[i]);
}
