/* SPDX-License-Identifier: MIT */
#include "mirror.h"

#include <stdlib.h>

#include <proto/error.h>

static uint64_t align(uint64_t bytes)
{
	return (bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}

static bool is_integer_view(const struct plan *plan, const struct plan_view *view)
{
	return view->span_bytes > 0 && plan->problem.tensor[view->role].dtype == FMHA_I32;
}

uint64_t mirror_extra_bytes(const struct device *device, const struct plan *plan)
{
	if (device_shares_memory(device))
		return 0;
	return align(plan->workspace_bytes) - plan->workspace_bytes + plan_indices_bytes(plan);
}

int mirror_fetch(struct device *device, const struct plan *plan,
		 struct plan_binding bindings[FMHA_N_TENSORS], struct mirror *mirror,
		 void **ret_head, struct fmha_error *err)
{
	uint64_t total = 0, at = 0;

	if (plan->workspace_head_bytes > 0) {
		mirror->head = calloc(1, plan->workspace_head_bytes);
		if (!mirror->head)
			return fmha_error_set(err, FMHA_ENOMEM, "workspace: out of memory");
	}
	*ret_head = mirror->head;
	for (uint32_t i = 0; i < plan->n_views; i++)
		if (is_integer_view(plan, &plan->views[i]))
			total += align(plan->views[i].span_bytes);
	if (total == 0)
		return 0;
	mirror->integers = malloc(total);
	if (!mirror->integers)
		return fmha_error_set(err, FMHA_ENOMEM, "integer tensors: out of memory");
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		struct plan_binding *binding = &bindings[view->role];
		int r;

		/* What does not lie in its buffer plan_bind() will refuse, and not read. */
		if (!is_integer_view(plan, view) || view->span_bytes > binding->bytes)
			continue;
		binding->host = (char *)mirror->integers + at;
		r = device_fetch(device, binding->device, binding->host, view->span_bytes, err);
		if (r < 0)
			return r;
		at += align(view->span_bytes);
	}
	return 0;
}

void mirror_upload(struct device *device, const struct plan *plan,
		   const struct plan_indices *indices, const struct mirror *mirror,
		   const struct device_memory *workspace, struct device_launch *launch)
{
	char *base = workspace->device, *tables = base + align(plan->workspace_bytes);

	launch->n_uploads = 0;
	launch->zero_bytes = 0;
	if (device_shares_memory(device))
		return;
	if (mirror->head)
		launch->uploads[launch->n_uploads++] = (struct device_upload){
			.host = mirror->head, .device = base, .bytes = plan->workspace_head_bytes};
	if (indices) {
		launch->uploads[launch->n_uploads++] = (struct device_upload){
			.host = plan_indices_data(indices),
			.device = tables,
			.bytes = plan_indices_bytes(plan)};
		plan_indices_move(plan, indices, tables, launch->args);
	}
	if (plan->workspace_zero && plan->dq_acc_bytes > 0) {
		launch->zero = base + plan->layout.dq_acc;
		launch->zero_bytes = plan->dq_acc_bytes;
	}
}

void mirror_deinit(struct mirror *mirror)
{
	free(mirror->integers);
	free(mirror->head);
	*mirror = (struct mirror){0};
}
