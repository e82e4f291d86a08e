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

bool mirror_is_constant(const struct device *device, const struct plan *plan)
{
	if (plan_indices_bytes(plan) > 0 || plan->workspace_head_bytes > 0)
		return false;
	for (uint32_t i = 0; i < plan->n_views && !device_shares_memory(device); i++)
		if (is_integer_view(plan, &plan->views[i]))
			return false;
	return true;
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
	_Static_assert(FMHA_N_TENSORS <= 64, "a bit a role");
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];

		if (bindings[view->role].host)
			mirror->in_host |= UINT64_C(1) << view->role;
		else if (is_integer_view(plan, view))
			total += align(view->span_bytes);
	}
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
		if (!is_integer_view(plan, view) || binding->host ||
		    view->span_bytes > binding->bytes)
			continue;
		binding->host = (char *)mirror->integers + at;
		r = device_fetch(device, binding->device, binding->host, view->span_bytes, err);
		if (r < 0)
			return r;
		at += align(view->span_bytes);
	}
	return 0;
}

static void add_upload(struct device_launch *launch, const void *host, void *device, uint64_t bytes)
{
	if (bytes > 0)
		launch->uploads[launch->n_uploads++] = (struct device_copy){
			.host = (void *)(uintptr_t)host, .device = device, .bytes = bytes};
}

/* Outputs go both ways: what lies between the elements of a strided view must come back as it was.
 */
static void copy_host_tensors(const struct plan *plan,
			      const struct plan_binding bindings[FMHA_N_TENSORS],
			      const struct mirror *mirror, struct device_launch *launch)
{
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		const struct plan_binding *binding = &bindings[view->role];

		if (!(mirror->in_host >> view->role & 1) || view->span_bytes == 0)
			continue;
		add_upload(launch, binding->host, binding->device, view->span_bytes);
		if (view->written)
			launch->downloads[launch->n_downloads++] = (struct device_copy){
				.host = binding->host,
				.device = binding->device,
				.bytes = view->span_bytes};
	}
}

void mirror_upload(struct device *device, const struct plan *plan,
		   const struct plan_binding bindings[FMHA_N_TENSORS],
		   const struct plan_indices *indices, const struct mirror *mirror,
		   const struct device_memory *workspace, struct device_launch *launch)
{
	char *base = workspace->device, *tables = base + align(plan->workspace_bytes);

	launch->n_uploads = launch->n_downloads = 0;
	launch->zero_bytes = 0;
	if (device_shares_memory(device))
		return;
	copy_host_tensors(plan, bindings, mirror, launch);
	if (mirror->head)
		add_upload(launch, mirror->head, base, plan->workspace_head_bytes);
	if (indices) {
		add_upload(launch, plan_indices_data(indices), tables, plan_indices_bytes(plan));
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
