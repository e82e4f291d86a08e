/* SPDX-License-Identifier: MIT */
/* bind.c: from a request to a launch: references, memory, checked integers, arguments. */
#include "request.h"

#include <stdio.h>
#include <string.h>

#include <device/guard.h>
#include <proto/error.h>
#include <proto/problem.h>

/* ---- references ---- */

static int no_buffer(uint32_t role, uint64_t id, struct fmha_error *err)
{
	char field[48];

	snprintf(field, sizeof(field), "tensor.%s.buffer", proto_roles[role].name);
	return fmha_error_set_field(err, FMHA_ENOENT, field, "tensor %s: buffer %llu: no such",
				    proto_roles[role].name, (unsigned long long)id);
}

static const struct proto_rebind *find_rebind(const struct proto_run_params *params, uint32_t role)
{
	for (uint32_t i = 0; i < params->n_rebinds; i++)
		if (params->rebinds[i].role == role)
			return &params->rebinds[i];
	return NULL;
}

static int check_rebinds(const struct plan *plan, const struct proto_run_params *params,
			 struct fmha_error *err)
{
	for (uint32_t i = 0; i < params->n_rebinds; i++) {
		uint32_t role = params->rebinds[i].role;

		if (role >= FMHA_N_TENSORS || !fmha_tensor_present(&plan->problem.tensor[role]))
			return fmha_error_set_field(
				err, FMHA_EINVAL, "rebinds", "rebinds: the plan has no tensor %s",
				role < FMHA_N_TENSORS ? proto_roles[role].name : "?");
	}
	return 0;
}

static void reference_buffer(struct request *request, struct buffer *buffer)
{
	buffer->n_references++;
	request->buffers[request->n_buffers++] = buffer;
}

/* Looks up one tensor's buffer, references it and says where the view starts. */
static int bind_tensor(struct request *request, uint32_t role, struct fmha_error *err)
{
	const struct fmha_tensor *tensor = &request->plan->plan.problem.tensor[role];
	const struct proto_rebind *rebind = find_rebind(&request->params, role);
	uint64_t id = rebind ? rebind->buffer : tensor->buffer;
	uint64_t offset = rebind ? rebind->offset : tensor->offset;
	struct buffer *buffer = table_get(&request->session->buffers, id);
	char field[48];

	if (!buffer)
		return no_buffer(role, id, err);
	if (buffer->lost || offset > buffer->memory.bytes) {
		snprintf(field, sizeof(field), "tensor.%s.%s", proto_roles[role].name,
			 buffer->lost ? "buffer" : "offset");
		return fmha_error_set_field(err, FMHA_EINVAL, field, "tensor %s: %s",
					    proto_roles[role].name,
					    buffer->lost ? "the buffer's memory has vanished"
							 : "offset beyond the buffer's end");
	}
	reference_buffer(request, buffer);
	request->bindings[role] = (struct plan_binding){
		.host = buffer->memory.host ? (char *)buffer->memory.host + offset : NULL,
		.device = (char *)buffer->memory.device + offset,
		.bytes = buffer->memory.bytes - offset};
	return 0;
}

/* Where the launch's counters and events of one side go. */
struct fence_list {
	const char *field; /* of the run's params */
	struct device_fence *counters;
	struct device_event **events;
	uint32_t *n_counters, *n_events;
};

/* Looks up a counter, references its buffer and says where it lies. */
static int bind_counter(struct request *request, const struct proto_fence *fence,
			const struct fence_list *list, struct fmha_error *err)
{
	struct session *session = request->session;
	struct buffer *buffer = table_get(&session->buffers, fence->buffer);
	const char *field = list->field;
	const char *why = device_get_info(session->worker->device)->no_fences;

	if (!device_has_fences(session->worker->device))
		return fmha_error_set_field(err, FMHA_ENOTSUP, field,
					    "%s: this device has no counters to order runs by%s%s",
					    field, *why ? ": " : "", why);
	if (!buffer)
		return fmha_error_set_field(err, FMHA_ENOENT, field, "%s: buffer %llu: no such",
					    field, (unsigned long long)fence->buffer);
	if (fence->offset % 4 != 0 || buffer->memory.bytes < 4 ||
	    fence->offset > buffer->memory.bytes - 4)
		return fmha_error_set_field(err, FMHA_EINVAL, field,
					    "%s: no aligned 32-bit word at offset %llu", field,
					    (unsigned long long)fence->offset);
	reference_buffer(request, buffer);
	list->counters[(*list->n_counters)++] = (struct device_fence){
		.device = (char *)buffer->memory.device + fence->offset, .value = fence->value};
	return 0;
}

static int bind_event(struct request *request, const struct proto_fence *fence,
		      const struct fence_list *list, struct fmha_error *err)
{
	struct session *session = request->session;
	struct event *event = table_get(&session->events, fence->event);
	const char *field = list->field;

	if (!device_has_events(session->worker->device))
		return fmha_error_set_field(err, FMHA_ENOTSUP, field,
					    "%s: this device cannot use other processes' events",
					    field);
	if (fence->buffer || fence->offset || fence->value)
		return fmha_error_set_field(err, FMHA_EINVAL, field,
					    "%s: an event has no buffer, offset or value", field);
	if (!event)
		return fmha_error_set_field(err, FMHA_ENOENT, field, "%s: event %llu: no such",
					    field, (unsigned long long)fence->event);
	event->n_references++;
	request->events[request->n_events++] = event;
	list->events[(*list->n_events)++] = event->event;
	return 0;
}

static int bind_fences(struct request *request, const struct proto_fence *fences, uint32_t n,
		       const struct fence_list *list, struct fmha_error *err)
{
	int r = 0;

	*list->n_counters = *list->n_events = 0;
	for (uint32_t i = 0; i < n && r == 0; i++)
		r = fences[i].event ? bind_event(request, &fences[i], list, err)
				    : bind_counter(request, &fences[i], list, err);
	return r;
}

int bind_references(struct request *request, struct fmha_error *err)
{
	const struct proto_run_params *params = &request->params;
	const struct plan *plan = &request->plan->plan;
	struct device_launch *launch = request->launch;
	const struct fence_list waits = {"waits", launch->waits, launch->event_waits,
					 &launch->n_waits, &launch->n_event_waits};
	const struct fence_list signals = {"signals", launch->signals, launch->event_signals,
					   &launch->n_signals, &launch->n_event_signals};
	int r = check_rebinds(plan, params, err);

	for (uint32_t i = 0; i < plan->n_views && r == 0; i++)
		r = bind_tensor(request, plan->views[i].role, err);
	if (r == 0)
		r = bind_fences(request, params->waits, params->n_waits, &waits, err);
	if (r == 0)
		r = bind_fences(request, params->signals, params->n_signals, &signals, err);
	return r;
}

/* ---- memory ---- */

static int charge_memory(struct request *request, uint64_t bytes, struct fmha_error *err)
{
	if (account_charge(request->session->account, ACCOUNT_MEMORY, bytes, err) < 0)
		return fmha_error_set(err, FMHA_EQUOTA,
				      "a workspace of %llu bytes exceeds the memory quota",
				      (unsigned long long)bytes);
	request->charged_bytes += bytes;
	return 0;
}

/* @bytes: of the run's workspace. */
static int take_workspace(struct request *request, uint64_t bytes, struct fmha_error *err)
{
	struct device *device = request->session->worker->device;
	int r;

	if (bytes == 0)
		return 0;
	r = charge_memory(request, device_workspace_cost(device, bytes), err);
	return r < 0 ? r : device_workspace_new(device, bytes, &request->workspace, err);
}

/* Where checking the lengths is not the loop's work, placing the arguments by them is not, either:
 * such a run gets what any run of the plan may need. */
static bool is_sized_by_lengths(const struct request *request)
{
	return plan_workspace_varies(&request->plan->plan) && !bind_is_large(request);
}

/* Room for checked integers, since whether those of the last runs will do is seen on any thread. */
static int take_tables(struct request *request, struct fmha_error *err)
{
	struct session *session = request->session;
	uint64_t bytes = plan_indices_bytes(&request->plan->plan);

	if (bytes == 0 || device_shares_memory(session->worker->device))
		return 0;
	request->known = checked_find(session, bytes);
	return checked_new(session, bytes, &request->fresh, err);
}

int bind_memory(struct request *request, struct fmha_error *err)
{
	struct device *device = request->session->worker->device;
	const struct plan *plan = &request->plan->plan;
	int r = charge_memory(request, staging_host_bytes(device, plan), err);

	if (r == 0)
		r = take_tables(request, err);
	if (r == 0 && !is_sized_by_lengths(request))
		r = take_workspace(request, plan->workspace_bytes, err);
	return r < 0 ? r : staging_init(device, plan, request->bindings, &request->staging, err);
}

void bind_release(struct request *request)
{
	struct session *session = request->session;

	request->known = checked_unref(request->known);
	request->fresh = checked_unref(request->fresh);
	staging_deinit(session->worker->device, &request->staging);
	leftovers_free(session->worker, session->account, request->indices,
		       plan_indices_bytes(&request->plan->plan), &request->workspace,
		       request->charged_bytes);
	request->indices = NULL;
	request->charged_bytes = 0;
	while (request->n_buffers > 0)
		buffer_unref(request->buffers[--request->n_buffers]);
	while (request->n_events > 0)
		event_unref(request->events[--request->n_events]);
}

/* ---- arguments ---- */

/* The lists themselves stay as bind_references() has laid them out. */
static uint32_t count_events(const struct proto_fence *fences, uint32_t n)
{
	uint32_t n_events = 0;

	for (uint32_t i = 0; i < n; i++)
		n_events += fences[i].event != 0;
	return n_events;
}

static void only_waits(struct request *request)
{
	request->launch->n_signals = request->launch->n_event_signals = 0;
}

static void only_signals(struct request *request)
{
	const struct proto_run_params *params = &request->params;
	struct device_launch *launch = request->launch;

	launch->n_waits = launch->n_event_waits = 0;
	launch->n_event_signals = count_events(params->signals, params->n_signals);
	launch->n_signals = params->n_signals - launch->n_event_signals;
}

void bind_fetch(struct request *request)
{
	request->bound_serial = 0;
	only_waits(request);
	staging_fetch(&request->plan->plan, request->bindings, &request->staging, request->launch);
}

static bool overlap(const struct request *a, const struct plan_view *view_a,
		    const struct request *b, const struct plan_view *view_b)
{
	uintptr_t at_a = (uintptr_t)a->bindings[view_a->role].device;
	uintptr_t at_b = (uintptr_t)b->bindings[view_b->role].device;

	return at_a < at_b + view_b->span_bytes && at_b < at_a + view_a->span_bytes;
}

bool bind_writes_what_is_fetched(const struct request *before, const struct request *request)
{
	const struct plan *first = &before->plan->plan, *next = &request->plan->plan;

	for (uint32_t i = 0; i < first->n_views; i++)
		for (uint32_t j = 0; j < next->n_views && first->views[i].written; j++)
			if (staging_is_fetched(&request->staging, next->views[j].role) &&
			    overlap(before, &first->views[i], request, &next->views[j]))
				return true;
	return false;
}

bool bind_is_large(const struct request *request)
{
	return plan_index_entries(&request->plan->plan) >
	       request->session->worker->limits.value[LIMIT_LOOP_ENTRIES];
}

static const struct checked *tables_of(const struct request *request)
{
	return request->is_known ? request->known : request->fresh;
}

/* The arguments, now that the workspace is there. */
static int place_arguments(struct request *request, struct fmha_error *err)
{
	struct device *device = request->session->worker->device;
	const struct plan *plan = &request->plan->plan;
	struct plan_memory memory = {.workspace = request->workspace.device,
				     .head = request->staging.head};
	int r;

	request->bound_serial = 0; /* whoever's arguments there were are overwritten */
	if (device_shares_memory(device))
		memory.head = request->workspace.host;
	else if (request->indices)
		memory.indices = tables_of(request)->memory.device;
	r = plan_place(plan, request->bindings, request->indices, &memory, request->launch->args,
		       err);
	if (r == 0)
		request->work = plan_work(plan, request->launch->args, request->indices);
	return r;
}

void bind_arguments(struct request *request)
{
	const struct plan *plan = &request->plan->plan;
	struct fmha_error *err = &request->bind_error;

	guard_begin();
	err->code = FMHA_OK;
	(void)plan_read(plan, request->bindings, &request->indices, err);
	if (guard_end() != 0 && err->code == FMHA_OK)
		(void)fmha_error_set(err, FMHA_EIO, "a buffer's memory vanished while it was read");
	request->is_known = request->indices && checked_has(request->known, request->indices);
	if (err->code == FMHA_OK && !is_sized_by_lengths(request))
		(void)place_arguments(request, err);
}

static int place_in_own_workspace(struct request *request, struct fmha_error *err)
{
	uint64_t bytes = plan_workspace_bytes(&request->plan->plan, request->indices);
	int r = take_workspace(request, bytes, err);

	return r < 0 ? r : place_arguments(request, err);
}

static void place_kernels(struct request *request)
{
	struct session_plan *plan = request->plan;
	struct device_launch *launch = request->launch;

	launch->n_stages = plan->plan.n_stages;
	launch->times_stages = request->session->worker->trace != NULL;
	if (launch->times_stages)
		memset(launch->stage_started_ns, 0, sizeof(launch->stage_started_ns));
	for (uint32_t i = 0; i < launch->n_stages; i++) {
		const struct plan_stage *stage = &plan->plan.stages[i];

		launch->kernels[i] = plan->kernels[i];
		launch->records[i] = &stage->launch;
		launch->names[i] = plan->culprits[i].kernel;
		launch->workspaces[i] = request->workspace.device
						? (char *)request->workspace.device +
							  stage->workspace_offset
						: NULL;
	}
}

/* A buffer's id is never given out again, so a plan that names no other buffers, and reads none of
 * its arguments from one, gets the same ones as long as its buffers are there: bind_tensor() has
 * seen to that. */
static bool arguments_stay(const struct request *request)
{
	return request->plan->fixed && request->params.n_rebinds == 0 &&
	       !request->params.has_dropout_state;
}

int bind_launch(struct request *request, struct fmha_error *err)
{
	const struct plan *plan = &request->plan->plan;
	struct device_launch *launch = request->launch;
	const struct launch_dropout dropout = {.seed = request->params.dropout_seed,
					       .offset = request->params.dropout_offset};
	int r;

	if (request->state != REQUEST_WAITING) /* the fetch has waited */
		only_signals(request);
	if (request->bind_error.code != FMHA_OK) {
		*err = request->bind_error;
		return err->code;
	}
	if (is_sized_by_lengths(request)) {
		r = place_in_own_workspace(request, err);
		if (r < 0)
			return r;
	}
	for (uint32_t i = 0; request->params.has_dropout_state && i < plan->n_stages; i++)
		launch_set_dropout(&plan->stages[i].launch, &dropout, &launch->args[i]);
	staging_upload(request->session->worker->device, plan, request->bindings, request->indices,
		       &request->staging, &request->workspace,
		       request->is_known || !request->fresh ? NULL : request->fresh->memory.device,
		       launch);
	place_kernels(request);
	if (arguments_stay(request)) {
		request->bound_serial = request->plan->serial;
		request->bound_workspace = request->workspace.device;
	}
	return 0;
}

int bind_now(struct request *request, struct fmha_error *err)
{
	if (request->bound_serial == request->plan->serial &&
	    request->bound_workspace == request->workspace.device && arguments_stay(request))
		return 0;
	bind_arguments(request);
	return bind_launch(request, err);
}

void bind_signals_only(struct request *request)
{
	struct device_launch *launch = request->launch;

	request->bound_serial = 0;
	launch->n_stages = launch->n_uploads = launch->n_downloads = 0;
	launch->zero_bytes = 0;
	only_signals(request);
}
