/* SPDX-License-Identifier: MIT */
/*
 * run.c: from a run request to its answer.
 *
 * Requests of a session wait in order; a few of them at a time are with the device, which takes
 * turns between sessions. A request is bound (plan -> arguments) only when the device takes it, so
 * that what waits holds no workspace. A tiny plan runs on the loop thread itself while the device
 * is idle: handing it to another thread and back would take longer than the run.
 */
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <base/clock.h>
#include <proto/error.h>
#include <proto/problem.h>

#include "guard.h"
#include "mirror.h"

#define TICK_MS             20
#define TINY_NS             50000
#define SLOW_UNTIL_NOT_TINY 4
#define KEEP_FREE_REQUESTS  64
#define TRIM_AFTER_MS       5000
#define FENCE_TIMEOUT_MS    10000 /* of a run that names none */
#define FENCED_DEPTH        16    /* runs with fences that the device has of one client */

struct request {
	struct list in_worker; /* worker.requests or worker.free_requests */
	struct list in_session;
	struct session *session;
	struct session_plan *plan;
	struct device_launch *launch; /* stays with the request for its next life */
	struct plan_indices *indices;
	uint64_t bound_serial; /* whose arguments the launch still holds; 0: nobody's */
	void *bound_workspace; /* that they were made for */
	struct device_memory workspace;
	uint64_t charged_bytes; /* for it */
	struct mirror mirror;
	struct buffer
		*buffers[FMHA_N_TENSORS + 2 * PROTO_MAX_FENCES]; /* referenced while running */
	uint32_t n_buffers;
	struct event *events[2 * PROTO_MAX_FENCES]; /* likewise */
	uint32_t n_events;
	struct proto_run_params params;
	uint32_t id;
	bool running, timed_out;
	bool answered;                    /* with fences: when it was queued */
	uint64_t arrived_ns, deadline_ns; /* deadline 0: none */
};

/* ---- requests ---- */

static struct request *request_new(struct worker *worker)
{
	struct list *node = list_pop(&worker->free_requests);
	struct request *request;

	if (node) {
		worker->n_free_requests--;
		return container_of(node, struct request, in_worker);
	}
	request = calloc(1, sizeof(*request));
	if (!request)
		return NULL;
	request->launch = device_launch_new(worker->device);
	if (!request->launch) {
		free(request);
		return NULL;
	}
	request->launch->owner = request;
	list_init(&request->in_worker);
	list_init(&request->in_session);
	return request;
}

static void request_free(struct worker *worker, struct request *request)
{
	list_remove(&request->in_worker);
	list_remove(&request->in_session);
	request->plan = session_plan_unref(request->plan);
	if (worker->n_free_requests < KEEP_FREE_REQUESTS) {
		list_prepend(&worker->free_requests, &request->in_worker); /* still warm */
		worker->n_free_requests++;
		return;
	}
	device_launch_free(worker->device, request->launch);
	free(request);
}

/* Takes the request out of the books; its session may start the next one. */
static void retire(struct request *request)
{
	struct session *session = request->session;
	struct worker *worker = session->worker;

	if (request->running)
		session->n_running--;
	else
		session->n_waiting--;
	request->running = false;
	request_free(worker, request);
	if (--worker->n_pending == 0) {
		uv_timer_stop(&worker->tick);
		if (worker->untrimmed)
			uv_timer_start(&worker->trim, worker_on_trim, TRIM_AFTER_MS, 0);
	}
}

static void refuse(struct request *request, const struct fmha_error *error)
{
	request->session->worker->n_failed++;
	connection_answer_error(&request->session->connection, request->id, error);
	retire(request);
}

/* ---- binding ---- */

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

static bool has_fences(const struct proto_run_params *params)
{
	return params->n_waits > 0 || params->n_signals > 0;
}

/* 0: none */
static uint32_t effective_timeout_ms(const struct proto_run_params *params)
{
	return params->timeout_ms == 0 && has_fences(params) ? FENCE_TIMEOUT_MS
							     : params->timeout_ms;
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

/* Looks up one tensor's buffer, references it and says where the view starts. */
static int bind_tensor(struct request *request, uint32_t role, struct plan_binding *ret_binding,
		       struct fmha_error *err)
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
	buffer->n_references++;
	request->buffers[request->n_buffers++] = buffer;
	*ret_binding = (struct plan_binding){
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

	if (!device_has_fences(session->worker->device))
		return fmha_error_set_field(err, FMHA_ENOTSUP, field,
					    "%s: this device has no counters to order runs by",
					    field);
	if (!buffer)
		return fmha_error_set_field(err, FMHA_ENOENT, field, "%s: buffer %llu: no such",
					    field, (unsigned long long)fence->buffer);
	if (fence->offset % 4 != 0 || buffer->memory.bytes < 4 ||
	    fence->offset > buffer->memory.bytes - 4)
		return fmha_error_set_field(err, FMHA_EINVAL, field,
					    "%s: no aligned 32-bit word at offset %llu", field,
					    (unsigned long long)fence->offset);
	buffer->n_references++;
	request->buffers[request->n_buffers++] = buffer;
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

static int bind_all_fences(struct request *request, struct fmha_error *err)
{
	const struct proto_run_params *params = &request->params;
	struct device_launch *launch = request->launch;
	const struct fence_list waits = {"waits", launch->waits, launch->event_waits,
					 &launch->n_waits, &launch->n_event_waits};
	const struct fence_list signals = {"signals", launch->signals, launch->event_signals,
					   &launch->n_signals, &launch->n_event_signals};
	int r = bind_fences(request, params->waits, params->n_waits, &waits, err);

	if (r == 0)
		r = bind_fences(request, params->signals, params->n_signals, &signals, err);
	return r;
}

static int take_workspace(struct request *request, struct fmha_error *err)
{
	struct worker *worker = request->session->worker;
	const struct plan *plan = &request->plan->plan;
	uint64_t bytes = plan->workspace_bytes + mirror_extra_bytes(worker->device, plan);
	uint64_t cost = device_workspace_cost(worker->device, bytes);
	int r;

	if (bytes == 0)
		return 0;
	if (account_charge(request->session->account, ACCOUNT_MEMORY, cost, err) < 0)
		return fmha_error_set(err, FMHA_EQUOTA,
				      "a workspace of %llu bytes exceeds the memory quota",
				      (unsigned long long)cost);
	request->charged_bytes = cost;
	r = device_workspace_new(worker->device, bytes, &request->workspace, err);
	if (r < 0)
		return r;
	if (plan->workspace_zero && request->workspace.host)
		memset(request->workspace.host, 0, bytes);
	return 0;
}

static int find_kernels(struct request *request, struct fmha_error *err)
{
	struct session_plan *plan = request->plan;
	struct device_launch *launch = request->launch;

	launch->n_stages = plan->plan.n_stages;
	for (uint32_t i = 0; i < launch->n_stages; i++) {
		const struct plan_stage *stage = &plan->plan.stages[i];

		if (!plan->kernels[i])
			plan->kernels[i] = device_get_kernel(request->session->worker->device,
							     stage, &launch->args[i]);
		if (!plan->kernels[i])
			return fmha_error_set(err, FMHA_ENOKERNEL, "kernel %.200s: not available",
					      stage->kernel);
		launch->kernels[i] = plan->kernels[i];
		launch->names[i] = stage->kernel;
		launch->workspaces[i] = request->workspace.device
						? (char *)request->workspace.device +
							  stage->workspace_offset
						: NULL;
	}
	return 0;
}

/*
 * Whether the launch holds the right arguments from an earlier run. A buffer's id is never given
 * out again, so a plan that names no other buffers, and reads none of its arguments from one, gets
 * the same ones as long as its buffers are there: bind_tensor() has seen to that.
 */
static bool is_bound(const struct request *request)
{
	return request->bound_serial == request->plan->serial &&
	       request->bound_workspace == request->workspace.device &&
	       request->params.n_rebinds == 0 && !request->params.has_dropout_state;
}

/* Everything that a run needs: references to its buffers, a workspace, argument structs. On failure
 * unbind() releases what was taken. */
static int bind_request(struct request *request, struct fmha_error *err)
{
	struct plan_binding bindings[FMHA_N_TENSORS] = {0};
	struct device *device = request->session->worker->device;
	const struct plan *plan = &request->plan->plan;
	void *head = NULL;
	int r = check_rebinds(plan, &request->params, err);

	for (uint32_t i = 0; i < plan->n_views && r == 0; i++)
		r = bind_tensor(request, plan->views[i].role, &bindings[plan->views[i].role], err);
	if (r == 0)
		r = bind_all_fences(request, err);
	/* A workspace that the caller gives is not used here: a kernel must be able to trust what
	 * it has put there, and a client could write to it meanwhile. */
	if (r == 0)
		r = take_workspace(request, err);
	if (r == 0 && is_bound(request))
		return 0;
	request->bound_serial = 0;
	if (r == 0 && device_shares_memory(device))
		head = request->workspace.host;
	else if (r == 0)
		r = mirror_fetch(device, plan, bindings, &request->mirror, &head, err);
	if (r < 0)
		return r;
	guard_begin();
	r = plan_bind(plan, bindings, request->workspace.device, head, request->launch->args,
		      &request->indices, err);
	if (guard_end() != 0 && r == 0)
		r = fmha_error_set(err, FMHA_EIO, "a buffer's memory vanished while it was read");
	if (r < 0)
		return r;
	if (request->params.has_dropout_state)
		plan_set_dropout(plan, request->launch->args, request->params.dropout_seed,
				 request->params.dropout_offset);
	mirror_upload(device, plan, bindings, request->indices, &request->mirror,
		      &request->workspace, request->launch);
	r = find_kernels(request, err);
	if (r == 0 && request->plan->fixed && request->params.n_rebinds == 0 &&
	    !request->params.has_dropout_state) {
		request->bound_serial = request->plan->serial;
		request->bound_workspace = request->workspace.device;
	}
	return r;
}

static void unbind(struct request *request)
{
	struct worker *worker = request->session->worker;

	request->indices = plan_indices_free(request->indices);
	mirror_deinit(&request->mirror);
	if (request->workspace.map)
		device_workspace_free(worker->device, &request->workspace);
	account_release(request->session->account, ACCOUNT_MEMORY, request->charged_bytes);
	request->charged_bytes = 0;
	while (request->n_buffers > 0)
		buffer_unref(request->buffers[--request->n_buffers]);
	while (request->n_events > 0)
		event_unref(request->events[--request->n_events]);
}

/* ---- running ---- */

static void pump(struct session *session);

static void mark_lost(struct request *request, uint64_t address)
{
	for (uint32_t i = 0; i < request->n_buffers; i++) {
		struct device_memory *memory = &request->buffers[i]->memory;
		uint64_t start = (uint64_t)(uintptr_t)memory->map;

		if (address >= start && address - start < memory->map_bytes)
			request->buffers[i]->lost = true;
	}
}

/* Whether the next run of the plan may take the loop thread. One slow run says little: the first
 * touches new pages, any may have been interrupted. */
static void judge_size(struct session_plan *plan, uint64_t kernel_ns)
{
	plan->n_slow = kernel_ns < TINY_NS ? 0 : plan->n_slow + 1;
	if (plan->n_slow == 0)
		plan->tiny = true;
	else if (plan->n_slow == SLOW_UNTIL_NOT_TINY)
		plan->tiny = false;
}

/* The run has ended one way or the other: answers it, at @now. */
static void complete(struct request *request, uint64_t now)
{
	struct session *session = request->session;
	struct worker *worker = session->worker;
	struct device_launch *launch = request->launch;
	struct fmha_error *error = &launch->error;

	if (launch->bus_address)
		mark_lost(request, launch->bus_address);
	unbind(request);
	if (request->timed_out && error->code == FMHA_ECANCELED)
		fmha_error_set(error, FMHA_ETIMEDOUT, "not done within %u ms",
			       request->params.timeout_ms);
	if (error->code == FMHA_OK) {
		struct proto_run_result result = {
			.queued_ns = launch->started_ns - request->arrived_ns,
			.kernel_ns = launch->ended_ns - launch->started_ns};

		worker->n_runs++;
		session->n_runs++;
		histogram_add(&worker->queued, result.queued_ns);
		histogram_add(&worker->kernel, result.kernel_ns);
		histogram_add(&worker->total, now - request->arrived_ns);
		judge_size(request->plan, result.kernel_ns);
		kernels_count_run(worker, request->plan, result.kernel_ns);
		if (!request->answered)
			connection_answer(&session->connection, request->id, PROTO_RUN, &result,
					  -1);
	} else {
		if (error->code == FMHA_ECANCELED)
			worker->n_cancelled++;
		else
			worker->n_failed++;
		if (request->answered)
			session->late_error = *error;
		else
			connection_answer_error(&session->connection, request->id, error);
	}
	retire(request);
}

/* With fences the client wants to know that its own stream may go on; the device does the rest. */
static void answer_queued(struct request *request)
{
	struct proto_run_result result = {.queued_ns = clock_ns() - request->arrived_ns};

	request->answered = true;
	connection_answer(&request->session->connection, request->id, PROTO_RUN, &result, -1);
}

/* A deadline has passed. A stuck fence is let go, or it would hold up the stream for ever. */
static void give_up(struct request *request)
{
	struct device *device = request->session->worker->device;

	if (device_release_fences(device, request->launch))
		fmha_error_set_field(&request->session->late_error, FMHA_ETIMEDOUT, "waits",
				     "a fence of an earlier run was not reached within %u ms",
				     effective_timeout_ms(&request->params));
	else if (!request->answered)
		device_cancel(device, request->launch);
}

static void on_done(struct device_launch *launch)
{
	struct request *request = launch->owner;
	struct session *session = request->session;

	complete(request, clock_ns());
	if (session->hung_up)
		session_release(session);
	else
		pump(session);
}

/* The page names the kernel while this thread is with the device, in case it does not come back. */
static void enter_device(struct worker *worker, const struct request *request)
{
	struct worker_page *page = worker->page;

	if (worker->loop_serial != request->plan->serial)
		memcpy(page->loop_kernel, request->plan->plan.stages[0].kernel,
		       sizeof(page->loop_kernel));
	worker->loop_serial = request->plan->serial;
	atomic_store_explicit(&page->loop_busy, 1, memory_order_release);
}

static void leave_device(struct worker *worker)
{
	atomic_store_explicit(&worker->page->loop_busy, 0, memory_order_release);
}

static void start(struct request *request)
{
	struct session *session = request->session;
	struct worker *worker = session->worker;
	struct device_launch *launch = request->launch;
	struct fmha_error err;

	if (bind_request(request, &err) < 0) {
		unbind(request);
		refuse(request, &err);
		return;
	}
	session->n_waiting--;
	session->n_running++;
	request->running = true;
	list_append(&session->running, &request->in_session);
	launch->stream = session->stream;
	launch->on_done = on_done;
	launch->bus_address = 0;
	launch->error.code = FMHA_OK;
	enter_device(worker, request);
	if (request->plan->tiny && session->n_running == 1 && !has_fences(&request->params) &&
	    device_run_here(worker->device, launch)) {
		leave_device(worker);
		complete(request, launch->ended_ns);
		return;
	}
	worker->untrimmed = true;
	device_submit(worker->device, launch);
	leave_device(worker);
	if (has_fences(&request->params))
		answer_queued(request);
	if (!uv_is_active((uv_handle_t *)&worker->tick)) {
		worker->last_tick_ns = clock_ns();
		uv_timer_start(&worker->tick, run_on_tick, TICK_MS, TICK_MS);
	}
}

/* A client with fences queues its stream's work ahead, and waits for our answer before it goes on:
 * it gets that as long as there is room, whatever the device is doing. */
static uint32_t depth_for(const struct session *session, const struct request *request)
{
	uint32_t depth = session->worker->config->queue_depth;

	return has_fences(&request->params) && depth < FENCED_DEPTH ? FENCED_DEPTH : depth;
}

/* Gives the device what it may have of this session. */
static void pump(struct session *session)
{
	while (!list_is_empty(&session->waiting)) {
		struct request *request = container_of(session->waiting.next, struct request,
						       in_session);

		if (session->n_running >= depth_for(session, request))
			return;
		list_remove(&request->in_session);
		start(request);
	}
}

/* Without the room for rebinds and fences, of which the usual run has none. */
static void copy_params(struct proto_run_params *to, const struct proto_run_params *from)
{
	memcpy(to, from, offsetof(struct proto_run_params, rebinds));
	memcpy(to->rebinds, from->rebinds, from->n_rebinds * sizeof(to->rebinds[0]));
	memcpy(to->waits, from->waits, from->n_waits * sizeof(to->waits[0]));
	memcpy(to->signals, from->signals, from->n_signals * sizeof(to->signals[0]));
}

void run_request(struct session *session, uint32_t id, const struct proto_run_params *params)
{
	struct worker *worker = session->worker;
	struct session_plan *plan = table_get(&session->plans, params->plan);
	struct request *request;
	struct fmha_error err;
	uint64_t timeout_ms;

	if (!plan) {
		fmha_error_set_field(&err, FMHA_ENOENT, "plan", "plan %llu: no such",
				     (unsigned long long)params->plan);
		connection_answer_error(&session->connection, id, &err);
		return;
	}
	if (worker->draining) {
		fmha_error_set(&err, FMHA_EBUSY, "the daemon is stopping");
		connection_answer_error(&session->connection, id, &err);
		return;
	}
	if (session->late_error.code != FMHA_OK) {
		err = session->late_error;
		session->late_error.code = FMHA_OK;
		connection_answer_error(&session->connection, id, &err);
		return;
	}
	if (plan->plan.n_stages == 0) { /* nothing to write */
		connection_answer(&session->connection, id, PROTO_RUN,
				  &(struct proto_run_result){0}, -1);
		return;
	}
	request = request_new(worker);
	if (!request) {
		fmha_error_set(&err, FMHA_ENOMEM, "run: out of memory");
		connection_answer_error(&session->connection, id, &err);
		return;
	}
	plan->n_references++;
	request->session = session;
	request->plan = plan;
	copy_params(&request->params, params);
	request->id = id;
	request->timed_out = request->answered = false;
	request->arrived_ns = worker->hub.turn_ns;
	timeout_ms = effective_timeout_ms(params);
	request->deadline_ns = timeout_ms ? request->arrived_ns + timeout_ms * NS_PER_MS : 0;
	list_append(&worker->requests, &request->in_worker);
	list_append(&session->waiting, &request->in_session);
	session->n_waiting++;
	worker->n_pending++;
	pump(session);
}

/* ---- ending early ---- */

static void drop_waiting(struct request *request, int code, const char *reason)
{
	struct fmha_error err;

	fmha_error_set(&err, code, "%s", reason);
	request->session->worker->n_cancelled++;
	connection_answer_error(&request->session->connection, request->id, &err);
	retire(request);
}

int run_cancel(struct session *session, uint32_t id, struct fmha_error *err)
{
	list_for_each(node, &session->waiting)
	{
		struct request *request = container_of(node, struct request, in_session);

		if (request->id != id)
			continue;
		drop_waiting(request, FMHA_ECANCELED, "the run was cancelled");
		return 0;
	}
	list_for_each(node, &session->running)
	{
		struct request *request = container_of(node, struct request, in_session);

		if (request->id != id)
			continue;
		device_cancel(session->worker->device, request->launch);
		return 0;
	}
	return fmha_error_set_field(err, FMHA_ENOENT, "request", "request %u is not in flight", id);
}

void run_cancel_all(struct session *session)
{
	const uint64_t fences_until = clock_ns() + FENCE_TIMEOUT_MS * NS_PER_MS;
	struct list *node;

	while ((node = list_pop(&session->waiting)))
		retire(container_of(node, struct request, in_session));
	list_for_each(running, &session->running)
	{
		struct request *request = container_of(running, struct request, in_session);

		device_cancel(session->worker->device, request->launch);
		if (has_fences(&request->params) && request->deadline_ns > fences_until)
			request->deadline_ns = fences_until;
	}
}

void run_fail_all(struct worker *worker, const struct fmha_error *error)
{
	list_for_each(node, &worker->requests)
	{
		struct request *request = container_of(node, struct request, in_worker);

		connection_answer_error(&request->session->connection, request->id, error);
	}
}

/* The device hangs when a launch has not got ahead for too long. */
static void check_stall(struct worker *worker)
{
	const char *culprit = "", *kernel;
	uint64_t worst = 0;
	struct fmha_error err;

	list_for_each(node, &worker->requests)
	{
		struct request *request = container_of(node, struct request, in_worker);
		uint64_t stalled;

		if (!request->running)
			continue;
		stalled = device_stalled_ns(worker->device, request->launch, &kernel);
		if (stalled > worst) {
			worst = stalled;
			culprit = kernel;
		}
	}
	if (worst < worker->config->stall_ms * NS_PER_MS)
		return;
	fmha_error_set(&err, FMHA_EDEVICE, "the device hangs: nothing got ahead for %u ms",
		       worker->config->stall_ms);
	worker_fail(worker, culprit, &err);
}

void run_on_tick(uv_timer_t *timer)
{
	struct worker *worker = timer->data;
	uint64_t now = clock_ns();
	/* After a pause of the whole process (SIGSTOP, a suspended machine) nothing has got ahead
	 * either, and that says nothing. */
	bool paused = now - worker->last_tick_ns > worker->config->stall_ms * NS_PER_MS / 2;

	worker->last_tick_ns = now;
	list_for_each(node, &worker->requests)
	{
		struct request *request = container_of(node, struct request, in_worker);

		if (!request->deadline_ns || now < request->deadline_ns || request->timed_out)
			continue;
		request->timed_out = true;
		if (request->running)
			give_up(request);
		else
			drop_waiting(request, FMHA_ETIMEDOUT, "not started before its deadline");
	}
	if (!paused)
		check_stall(worker);
}
