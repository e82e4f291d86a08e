/* SPDX-License-Identifier: MIT */
#include "request.h"

#include <string.h>

#include <proto/error.h>

/* A few integers with much between them are not worth the copy. */
#define MOST_BYTES (UINT64_C(64) << 20)

_Static_assert(FMHA_N_TENSORS <= 64, "a bit a role");

static uint64_t staging_align(uint64_t bytes)
{
	return (bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}

uint64_t staging_device_bytes(const struct device *device, const struct plan *plan,
			      uint64_t workspace_bytes)
{
	if (device_shares_memory(device))
		return 0;
	return staging_align(workspace_bytes) - workspace_bytes + plan_indices_bytes(plan);
}

/* Of the block: head, checked copies, then every integer tensor as the client has it. */
static uint64_t block_bytes(const struct plan *plan)
{
	uint64_t total = staging_align(plan->workspace_head_bytes) +
			 staging_align(plan_indices_bytes(plan));

	for (uint32_t i = 0; i < plan->n_views; i++)
		if (plan_view_is_integer(plan, &plan->views[i]))
			total += staging_align(plan->views[i].span_bytes);
	return total;
}

uint64_t staging_host_bytes(const struct device *device, const struct plan *plan)
{
	uint64_t block = device_shares_memory(device) ? 0 : block_bytes(plan);

	return plan_indices_bytes(plan) + (block ? device_staging_cost(device, block) : 0);
}

int staging_init(struct device *device, const struct plan *plan,
		 struct plan_binding bindings[FMHA_N_TENSORS], struct staging *staging,
		 struct fmha_error *err)
{
	uint64_t bytes = device_shares_memory(device) ? 0 : block_bytes(plan);
	char *at;
	int r;

	if (bytes == 0)
		return 0;
	if (bytes > MOST_BYTES)
		return fmha_error_set(err, FMHA_ENOTSUP,
				      "the integer tensors span %llu bytes: on this device at most "
				      "64 MiB are copied to judge them",
				      (unsigned long long)bytes);
	r = device_staging_new(device, bytes, &staging->block, err);
	if (r < 0)
		return r;
	at = staging->block.host;
	memset(at, 0, plan->workspace_head_bytes);
	staging->head = plan->workspace_head_bytes ? at : NULL;
	at += staging_align(plan->workspace_head_bytes);
	staging->tables = at;
	at += staging_align(plan_indices_bytes(plan));
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		struct plan_binding *binding = &bindings[view->role];

		/* What lies in the host's memory plan_read() reads there; what does not lie in its
		 * buffer it will refuse, and not read. */
		if (!plan_view_is_integer(plan, view) || binding->host ||
		    view->span_bytes > binding->bytes)
			continue;
		binding->host = at;
		staging->fetched |= UINT64_C(1) << view->role;
		at += staging_align(view->span_bytes);
	}
	return staging->fetched != 0;
}

void staging_deinit(struct device *device, struct staging *staging)
{
	if (staging->block.map)
		device_staging_free(device, &staging->block);
	*staging = (struct staging){0};
}

static void add_copy(struct device_copy *copies, uint32_t *n, const void *host, void *device,
		     uint64_t bytes)
{
	if (bytes > 0)
		copies[(*n)++] = (struct device_copy){
			.host = (void *)(uintptr_t)host, .device = device, .bytes = bytes};
}

bool staging_is_fetched(const struct staging *staging, uint32_t role)
{
	return staging->fetched >> role & 1;
}

void staging_fetch(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
		   const struct staging *staging, struct device_launch *launch)
{
	launch->n_stages = launch->n_uploads = launch->n_downloads = 0;
	launch->zero_bytes = 0;
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		const struct plan_binding *binding = &bindings[view->role];

		if (staging_is_fetched(staging, view->role))
			add_copy(launch->downloads, &launch->n_downloads, binding->host,
				 binding->device, view->span_bytes);
	}
}

/* Outputs go both ways: what lies between the elements of a strided view must come back as it was.
 */
static void copy_host_tensors(const struct plan *plan,
			      const struct plan_binding bindings[FMHA_N_TENSORS],
			      const struct staging *staging, struct device_launch *launch)
{
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		const struct plan_binding *binding = &bindings[view->role];

		if (!binding->host || staging_is_fetched(staging, view->role))
			continue;
		add_copy(launch->uploads, &launch->n_uploads, binding->host, binding->device,
			 view->span_bytes);
		if (view->written)
			add_copy(launch->downloads, &launch->n_downloads, binding->host,
				 binding->device, view->span_bytes);
	}
}

void *staging_indices(const struct plan *plan, const struct plan_indices *indices,
		      const struct device_memory *workspace)
{
	return (char *)workspace->device + staging_align(plan_workspace_bytes(plan, indices));
}

void staging_upload(struct device *device, const struct plan *plan,
		    const struct plan_binding bindings[FMHA_N_TENSORS],
		    const struct plan_indices *indices, const struct staging *staging,
		    const struct device_memory *workspace, void *tables,
		    struct device_launch *launch)
{
	uint64_t bytes = plan_workspace_bytes(plan, indices);
	char *base = workspace->device;

	launch->n_uploads = launch->n_downloads = 0;
	launch->zero = base + plan_zero_from(plan);
	launch->zero_bytes = plan->workspace_zero ? bytes - plan_zero_from(plan) : 0;
	if (device_shares_memory(device))
		return;
	copy_host_tensors(plan, bindings, staging, launch);
	if (staging->head)
		add_copy(launch->uploads, &launch->n_uploads, staging->head, base,
			 plan->workspace_head_bytes);
	if (tables) {
		memcpy(staging->tables, plan_indices_data(indices), plan_indices_bytes(plan));
		add_copy(launch->uploads, &launch->n_uploads, staging->tables, tables,
			 plan_indices_bytes(plan));
	}
}
