/* SPDX-License-Identifier: MIT */
/*
 * session.c: a client's direct connection: its buffers and plans, and the dispatch of its requests.
 */
#include "kernels.h"
#include "staging.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/status.h>
#include <proto/error.h>
#include <proto/problem.h>

#define RELEASE_ELSEWHERE_BYTES (16u << 20) /* unmapping more takes milliseconds */
#define REFILL_AFTER_MS         20
#define OPEN_HANDLE_NS          (2 * NS_PER_S)
#define DEVICE_CALL_NS          (10 * NS_PER_S)

static struct session *session_of(struct connection *connection)
{
	return container_of(connection, struct session, connection);
}

/* ---- buffers ---- */

static struct buffer *buffer_of_release(struct offload *offload)
{
	return container_of(offload, struct buffer, release);
}

static void release_run(struct offload *offload)
{
	struct buffer *buffer = buffer_of_release(offload);

	device_memory_free(buffer->worker->device, &buffer->memory);
}

static void release_done(struct offload *offload)
{
	free(buffer_of_release(offload));
}

static void release_memory(struct buffer *buffer)
{
	struct worker *worker = buffer->worker;
	bool here = device_shares_memory(worker->device) &&
		    buffer->memory.bytes < RELEASE_ELSEWHERE_BYTES;

	/* In its owner's order: what is created next may need the memory. */
	buffer->release = (struct offload){.owner = buffer->owner,
					   .user = buffer->account,
					   .timeout_ns = DEVICE_CALL_NS,
					   .run = release_run,
					   .done = release_done,
					   .undo = release_done};
	if (!here && offload_start(&worker->offloads, &buffer->release, NULL) == 0)
		return;
	release_run(&buffer->release);
	release_done(&buffer->release);
}

static void give_back(struct account *account, uint64_t bytes)
{
	account_release(account, ACCOUNT_BUFFERS, 1);
	account_release(account, ACCOUNT_MEMORY, bytes);
	(void)account_put(account);
}

struct buffer *buffer_unref(struct buffer *buffer)
{
	if (!buffer || --buffer->n_references > 0)
		return NULL;
	give_back(buffer->account, buffer->charged_bytes);
	release_memory(buffer);
	return NULL;
}

/* A new buffer of @bytes, charged before it is made; give_back() ends it. */
static int charge_buffer(struct session *session, uint64_t bytes, struct fmha_error *err)
{
	struct limits *limits = &session->worker->limits;
	struct account *account = session->account;
	int r;

	if (limit_exceeded(limits, LIMIT_BUFFERS_PER_CONNECTION,
			   (uint64_t)session->buffers.n_used + 1))
		return fmha_error_set(
			err, FMHA_EQUOTA, "more than %llu buffers on one connection",
			(unsigned long long)limits->value[LIMIT_BUFFERS_PER_CONNECTION]);
	r = account_charge(account, ACCOUNT_BUFFERS, 1, err);
	if (r < 0)
		return r;
	r = account_charge(account, ACCOUNT_MEMORY, bytes, err);
	if (r < 0) {
		account_release(account, ACCOUNT_BUFFERS, 1);
		return r;
	}
	account->n_references++;
	return 0;
}

/* Makes the mapped memory, for which @bytes are charged, a buffer of the session, which takes both
 * over. On failure the memory is freed. */
static int add_buffer(struct session *session, struct device_memory *memory, uint64_t bytes,
		      uint64_t *ret_id, struct fmha_error *err)
{
	struct buffer *buffer = calloc(1, sizeof(*buffer));
	uint64_t id = buffer ? table_add(&session->buffers, buffer) : 0;

	if (!id) {
		free(buffer);
		device_memory_free(session->worker->device, memory);
		return fmha_error_set(err, FMHA_ENOMEM, "buffer: out of memory");
	}
	buffer->n_references = 1;
	buffer->worker = session->worker;
	buffer->owner = session;
	buffer->account = session->account;
	buffer->memory = *memory;
	buffer->charged_bytes = bytes;
	session->memory_bytes += bytes;
	*ret_id = id;
	return 0;
}

/* A buffer in the making: created here or imported. On a GPU either is a call of the driver's that
 * can take long. */
struct making {
	struct offload offload;
	struct worker *worker;
	struct session *session; /* not to be touched by run() and undo() */
	uint32_t id;
	enum proto_method method; /* PROTO_BUFFER_CREATE or PROTO_BUFFER_IMPORT */
	struct proto_buffer_import_params params;
	int fd; /* in: the client's; out of a creation: what goes to it; -1: none */
	uint64_t charged_bytes;
	struct device_memory memory;
	struct fmha_error error;
	int result;
};

static struct making *making_of(struct offload *offload)
{
	return container_of(offload, struct making, offload);
}

static struct device_memory_source source_of(const struct making *making)
{
	const struct proto_buffer_import_params *params = &making->params;

	return (struct device_memory_source){.kind = params->kind,
					     .fd = making->fd,
					     .handle = params->handle,
					     .handle_bytes = params->handle_bytes,
					     .base_offset = params->base_offset,
					     .size = params->size};
}

static int charge_making(struct making *making, struct fmha_error *err)
{
	struct device_memory_source source = source_of(making);

	making->charged_bytes = device_memory_cost(making->worker->device, &source,
						   making->method == PROTO_BUFFER_CREATE);
	return charge_buffer(making->session, making->charged_bytes, err);
}

static void making_run(struct offload *offload)
{
	struct making *making = making_of(offload);
	const struct proto_buffer_import_params *params = &making->params;
	struct device_memory_source source = source_of(making);
	struct device *device = making->worker->device;

	if (making->method == PROTO_BUFFER_CREATE)
		making->result = device_memory_create(device, params->size, &making->memory,
						      &making->fd, &making->error);
	else
		making->result = device_memory_import(device, &source, &making->memory,
						      &making->error);
}

/* Puts the memory into the session's table and answers. */
static void making_finish(struct making *making)
{
	struct session *session = making->session;
	const bool created = making->method == PROTO_BUFFER_CREATE;
	struct proto_buffer_result result = {.size = making->params.size};
	int r = making->result;

	result.kind = created ? making->memory.kind : making->params.kind;
	result.allocation_bytes = created ? making->memory.allocation_bytes : 0;
	if (r == 0)
		r = add_buffer(session, &making->memory, making->charged_bytes, &result.buffer,
			       &making->error);
	if (r < 0) {
		give_back(session->account, making->charged_bytes);
		connection_answer_error(&session->connection, making->id, &making->error);
		return;
	}
	connection_answer(&session->connection, making->id, making->method, &result,
			  created ? making->fd : -1);
	if (created)
		making->fd = -1; /* the answer has taken it */
}

static void making_free(struct making *making)
{
	if (making->fd >= 0)
		(void)close(making->fd);
	free(making);
}

static void making_throw_away(struct offload *offload)
{
	struct making *making = making_of(offload);

	if (making->result == 0)
		device_memory_free(making->worker->device, &making->memory);
	making->result = FMHA_ECANCELED;
}

static void making_end(struct offload *offload)
{
	making_free(making_of(offload));
}

static void making_undo(struct offload *offload)
{
	making_throw_away(offload);
	making_end(offload);
}

/* The client has gone meanwhile. */
static void making_discard(struct making *making)
{
	making->offload = (struct offload){.timeout_ns = DEVICE_CALL_NS,
					   .run = making_throw_away,
					   .done = making_end,
					   .undo = making_end};
	if (offload_start(&making->worker->offloads, &making->offload, NULL) < 0)
		making_undo(&making->offload);
}

static void making_done(struct offload *offload)
{
	struct making *making = making_of(offload);
	struct session *session = making->session;

	if (session->hung_up) {
		give_back(session->account, making->charged_bytes);
		making_discard(making);
	} else {
		making_finish(making);
		making_free(making);
	}
	session_offload_ended(session);
}

static void making_late(struct offload *offload)
{
	struct making *making = making_of(offload);
	struct session *session = making->session;
	struct fmha_error err;

	fmha_error_set_field(&err, FMHA_ETIMEDOUT, making->params.handle_bytes ? "handle" : "size",
			     "the driver did not %s within %llu s",
			     making->params.handle_bytes ? "open the IPC handle"
							 : "provide the memory",
			     (unsigned long long)(offload->timeout_ns / NS_PER_S));
	give_back(session->account, making->charged_bytes);
	session_offload_late(session, making->id, &err);
}

/* Of what is charged. On a device that shares the host's memory these are a few quick calls: done
 * at once. */
static int make_buffer(struct making *now, struct fmha_error *err)
{
	struct session *session = now->session;
	struct making *making;
	int r;

	if (device_shares_memory(session->worker->device)) {
		making_run(&now->offload);
		making_finish(now);
		return 0;
	}
	making = malloc(sizeof(*making));
	if (!making) {
		give_back(session->account, now->charged_bytes);
		return fmha_error_set(err, FMHA_ENOMEM, "buffer: out of memory");
	}
	*making = *now;
	making->offload = (struct offload){.owner = session,
					   .user = session->account,
					   .timeout_ns = now->params.handle_bytes ? OPEN_HANDLE_NS
										  : DEVICE_CALL_NS,
					   .urgent = true,
					   .run = making_run,
					   .done = making_done,
					   .late = making_late,
					   .undo = making_undo};
	/* The request's own is closed when it has been dealt with. */
	making->fd = now->fd >= 0 ? fcntl(now->fd, F_DUPFD_CLOEXEC, 3) : -1;
	r = offload_start(&session->worker->offloads, &making->offload, err);
	if (r < 0) {
		give_back(session->account, making->charged_bytes);
		making_free(making);
	} else {
		session->n_offloads++;
	}
	return r;
}

static int on_buffer_create(struct session *session, uint32_t id,
			    const struct proto_buffer_create_params *params, struct fmha_error *err)
{
	struct making making = {.worker = session->worker,
				.session = session,
				.id = id,
				.method = PROTO_BUFFER_CREATE,
				.params = {.size = params->size},
				.fd = -1};
	int r = charge_making(&making, err);

	if (r < 0)
		return r;
	/* In either case: what was spare may have been taken during a refill. */
	worker_refill(session->worker, REFILL_AFTER_MS);
	if (!device_memory_take(session->worker->device, params->size, &making.memory, &making.fd))
		return make_buffer(&making, err);
	making_finish(&making);
	return 0;
}

static int on_buffer_import(struct session *session, uint32_t id,
			    const struct proto_buffer_import_params *params, int fd,
			    struct fmha_error *err)
{
	struct making making = {.worker = session->worker,
				.session = session,
				.id = id,
				.method = PROTO_BUFFER_IMPORT,
				.params = *params,
				.fd = fd};
	int r = charge_making(&making, err);

	return r < 0 ? r : make_buffer(&making, err);
}

static int on_buffer_release(struct session *session, uint32_t id,
			     const struct proto_buffer_release_params *params,
			     struct fmha_error *err)
{
	struct buffer *buffer = table_remove(&session->buffers, params->buffer);

	if (!buffer)
		return fmha_error_set_field(err, FMHA_ENOENT, "buffer", "buffer %llu: no such",
					    (unsigned long long)params->buffer);
	session->memory_bytes -= buffer->charged_bytes;
	buffer_unref(buffer);
	connection_answer(&session->connection, id, PROTO_BUFFER_RELEASE, &(struct proto_empty){0},
			  -1);
	return 0;
}

/* ---- plans ---- */

struct session_plan *session_plan_unref(struct session_plan *plan)
{
	if (!plan || --plan->n_references > 0)
		return NULL;
	if (plan->account) {
		account_release(plan->account, ACCOUNT_PLANS, 1);
		(void)account_put(plan->account);
	}
	free(plan);
	return NULL;
}

/* Every tensor's last byte must lie in its buffer, so that a plan that is accepted can run. */
static int check_plan_buffers(struct session *session, const struct plan *plan,
			      struct fmha_error *err)
{
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		const struct fmha_tensor *tensor = &plan->problem.tensor[view->role];
		struct buffer *buffer = table_get(&session->buffers, tensor->buffer);
		const char *name = proto_roles[view->role].name;
		char field[48];

		if (!buffer) {
			snprintf(field, sizeof(field), "tensor.%s.buffer", name);
			return fmha_error_set_field(err, FMHA_ENOENT, field,
						    "tensor %s: buffer %llu: no such", name,
						    (unsigned long long)tensor->buffer);
		}
		if (tensor->offset > buffer->memory.bytes ||
		    view->span_bytes > buffer->memory.bytes - tensor->offset) {
			snprintf(field, sizeof(field), "tensor.%s.offset", name);
			return fmha_error_set_field(
				err, FMHA_EINVAL, field,
				"tensor %s: %llu bytes at %llu do not lie in a buffer of %llu",
				name, (unsigned long long)view->span_bytes,
				(unsigned long long)tensor->offset,
				(unsigned long long)buffer->memory.bytes);
		}
	}
	return 0;
}

static void describe_plan(const struct plan *plan, struct proto_plan_result *result)
{
	result->workspace_bytes = plan->workspace_bytes;
	result->flops = plan->flops;
	result->n_stages = plan->n_stages;
	for (uint32_t i = 0; i < plan->n_stages; i++) {
		const struct plan_stage *stage = &plan->stages[i];
		struct proto_stage *out = &result->stages[i];

		snprintf(out->family, sizeof(out->family), "%s", plan_family_name(stage->family));
		snprintf(out->kernel, sizeof(out->kernel), "%s", stage->kernel);
		out->workspace_offset = stage->workspace_offset;
		out->workspace_bytes = stage->workspace_bytes;
	}
}

/* FNV-1a of what the problem says, wherever its tensors lie: the same request made again. */
static uint64_t fingerprint(const struct fmha_problem *problem)
{
	struct fmha_problem plain = *problem;
	const uint8_t *bytes = (const uint8_t *)&plain;
	uint64_t hash = 14695981039346656037ull;

	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		plain.tensor[i].buffer = plain.tensor[i].buffer != 0;
		plain.tensor[i].offset = 0;
	}
	for (size_t i = 0; i < sizeof(plain); i++)
		hash = (hash ^ bytes[i]) * 1099511628211ull;
	return hash;
}

static void name_culprits(const struct session *session, struct session_plan *plan,
			  const struct fmha_problem *problem)
{
	uint64_t print = fingerprint(problem);

	for (uint32_t i = 0; i < PLAN_MAX_STAGES; i++) {
		struct culprit *culprit = &plan->culprits[i];

		memcpy(culprit->kernel, plan->plan.stages[i].kernel, sizeof(culprit->kernel));
		culprit->uid = session->uid;
		culprit->problem = print;
	}
}

/* The largest grid of its stages, one block a unit; all units where no grid is known. */
static uint32_t load_of(const struct plan *plan, uint32_t compute_units)
{
	uint64_t most = 1;

	for (uint32_t i = 0; i < plan->n_stages; i++) {
		const uint32_t *grid = plan->stages[i].grid;
		uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];

		if (blocks == 0 || blocks >= compute_units)
			return compute_units;
		if (blocks > most)
			most = blocks;
	}
	return (uint32_t)most;
}

static int on_plan(struct session *session, uint32_t id, const struct proto_plan_params *params,
		   struct fmha_error *err)
{
	struct worker *worker = session->worker;
	struct limits *limits = &worker->limits;
	struct proto_plan_result result = {0};
	struct session_plan *plan;
	int r;

	if (limit_exceeded(limits, LIMIT_PLANS_PER_CONNECTION, (uint64_t)session->plans.n_used + 1))
		return fmha_error_set(
			err, FMHA_EQUOTA, "more than %llu plans on one connection",
			(unsigned long long)limits->value[LIMIT_PLANS_PER_CONNECTION]);
	plan = calloc(1, sizeof(*plan));
	if (!plan)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	plan->n_references = 1;
	r = account_charge(session->account, ACCOUNT_PLANS, 1, err);
	if (r < 0) {
		session_plan_unref(plan);
		return r;
	}
	plan->account = session->account;
	plan->account->n_references++;
	worker->acting_uid = session->uid;
	r = plan_build(&params->problem, &worker->plan_device, &plan->plan, err);
	if (r == 0)
		r = check_plan_buffers(session, &plan->plan, err);
	if (r == 0) {
		result.plan = table_add(&session->plans, plan);
		if (!result.plan)
			r = fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	}
	if (r < 0) {
		session_plan_unref(plan);
		return r;
	}
	plan->serial = ++worker->n_plans;
	plan->load = load_of(&plan->plan, worker->plan_device.compute_units);
	name_culprits(session, plan, &params->problem);
	plan->fixed = staging_is_constant(worker->device, &plan->plan);
	plan->fetches = staging_fetches(worker->device, &plan->plan);
	/* A guess for the first run; later ones know better (run.c). */
	plan->tiny_work = plan->plan.bytes < 1 << 20 ? 2e6 : 0;
	describe_plan(&plan->plan, &result);
	return prepare_plan(session, id, plan, &result, err);
}

static int on_plan_release(struct session *session, uint32_t id,
			   const struct proto_plan_release_params *params, struct fmha_error *err)
{
	struct session_plan *plan = table_remove(&session->plans, params->plan);

	if (!plan)
		return fmha_error_set_field(err, FMHA_ENOENT, "plan", "plan %llu: no such",
					    (unsigned long long)params->plan);
	session_plan_unref(plan);
	connection_answer(&session->connection, id, PROTO_PLAN_RELEASE, &(struct proto_empty){0},
			  -1);
	return 0;
}

static int on_explain(struct session *session, uint32_t id, const struct proto_plan_params *params,
		      struct fmha_error *err)
{
	struct proto_json_result result;
	char *json;
	int fd = -1, r;

	session->worker->acting_uid = session->uid;
	r = plan_explain(&params->problem, &session->worker->plan_device, &json, err);
	if (r < 0)
		return r;
	result.size = strlen(json);
	r = handout_text(&session->worker->handouts, session->account, json, result.size, &fd, err);
	free(json);
	if (r < 0)
		return r;
	connection_answer(&session->connection, id, PROTO_EXPLAIN, &result, fd);
	return 0;
}

/* ---- requests ---- */

static int answer_empty(struct session *session, uint32_t id, enum proto_method method, int r)
{
	if (r == 0)
		connection_answer(&session->connection, id, method, &(struct proto_empty){0}, -1);
	return r;
}

static int handle(struct connection *connection, uint32_t id, enum proto_method method,
		  const union proto_any_params *params, int *fd, struct fmha_error *err)
{
	struct session *session = session_of(connection);

	switch (method) {
	case PROTO_PING:
		return answer_empty(session, id, method, 0);
	case PROTO_RUN:
		run_request(session, id, &params->RUN);
		return 0;
	case PROTO_BUFFER_CREATE:
		return on_buffer_create(session, id, &params->BUFFER_CREATE, err);
	case PROTO_BUFFER_IMPORT:
		return on_buffer_import(session, id, &params->BUFFER_IMPORT, *fd, err);
	case PROTO_BUFFER_RELEASE:
		return on_buffer_release(session, id, &params->BUFFER_RELEASE, err);
	case PROTO_EVENT_IMPORT:
		return event_import(session, id, &params->EVENT_IMPORT, err);
	case PROTO_EVENT_RELEASE:
		return answer_empty(session, id, method,
				    event_release(session, params->EVENT_RELEASE.event, err));
	case PROTO_PLAN:
		return on_plan(session, id, &params->PLAN, err);
	case PROTO_PLAN_RELEASE:
		return on_plan_release(session, id, &params->PLAN_RELEASE, err);
	case PROTO_EXPLAIN:
		return on_explain(session, id, &params->EXPLAIN, err);
	case PROTO_CANCEL:
		return answer_empty(session, id, method,
				    run_cancel(session, params->CANCEL.request, err));
	case PROTO_INJECT:
		return answer_empty(session, id, method,
				    device_inject(session->worker->device, params->INJECT.fault,
						  params->INJECT.after, err));
	case PROTO_REGISTRY_EXPORT:
	case PROTO_REGISTRY_IMPORT:
	case PROTO_REGISTRY_LOAD:
	case PROTO_REGISTRY_UNLOAD:
		return kernels_request(session, id, method, params, *fd, err);
	default:
		return fmha_error_set_field(err, FMHA_EINVAL, "method",
					    "%s is not answered on this socket",
					    proto_methods[method].name);
	}
}

/* ---- life ---- */

static void on_hangup(struct connection *connection)
{
	struct session *session = session_of(connection);
	struct buffer *buffer;
	struct event *event;
	struct session_plan *plan;

	session->hung_up = true;
	prepare_forget(session);
	run_cancel_all(session);
	while ((buffer = table_pop(&session->buffers)))
		buffer_unref(buffer);
	while ((event = table_pop(&session->events)))
		event_unref(event);
	while ((plan = table_pop(&session->plans)))
		session_plan_unref(plan);
	list_remove(&session->in_sessions);
	atomic_fetch_sub(&session->worker->page->n_sessions, 1);
}

static void on_closed(struct connection *connection)
{
	struct session *session = session_of(connection);

	session->closed = true;
	session_release(session);
}

void session_release(struct session *session)
{
	if (!session->closed || session->n_running > 0 || session->n_offloads > 0)
		return;
	device_stream_free(session->worker->device, session->stream);
	fair_session_deinit(&session->turn);
	table_deinit(&session->buffers);
	table_deinit(&session->events);
	table_deinit(&session->plans);
	account_release(session->account, ACCOUNT_SESSIONS, 1);
	account_put(session->account);
	free(session);
}

void session_offload_ended(struct session *session)
{
	session->n_offloads--;
	session_release(session);
}

void session_offload_late(struct session *session, uint32_t request, const struct fmha_error *err)
{
	if (!session->hung_up)
		connection_answer_error(&session->connection, request, err);
	session_offload_ended(session);
}

static const struct connection_ops session_ops = {
	.handle = handle, .on_closed = on_closed, .on_hangup = on_hangup};

int session_new(struct worker *worker, int fd, const struct proto_worker_attach_params *params,
		struct fmha_error *err)
{
	struct session *session = calloc(1, sizeof(*session));
	uint32_t weight = config_weight(&worker->page->config, params->uid);
	bool charged;
	int r = 0;

	if (!session) {
		(void)close(fd);
		return fmha_error_set(err, FMHA_ENOMEM, "session: out of memory");
	}
	session->worker = worker;
	session->id = params->session;
	session->uid = params->uid;
	session->gid = params->gid;
	session->pid = params->pid;
	snprintf(session->client, sizeof(session->client), "%s", params->client);
	list_init(&session->waiting);
	list_init(&session->running);
	list_init(&session->in_sessions);
	list_init(&session->preparing);
	session->account = account_get(&worker->accounts, params->uid);
	if (!session->account)
		r = fmha_error_set(err, FMHA_ENOMEM, "session: out of memory");
	else
		r = account_charge(session->account, ACCOUNT_SESSIONS, 1, err);
	charged = r == 0;
	if (r == 0 && fair_session_init(&worker->turns, session->uid, weight, &session->turn) < 0)
		r = fmha_error_set(err, FMHA_ENOMEM, "session: out of memory");
	if (r == 0)
		r = device_stream_new(worker->device, params->uid, weight, &session->stream, err);
	if (r == 0) {
		r = connection_open(&session->connection, &worker->hub, fd, session->account, false,
				    &session_ops, err);
		if (r == 0) {
			list_append(&worker->sessions, &session->in_sessions);
			atomic_fetch_add(&worker->page->n_sessions, 1);
			return 0;
		}
	} else {
		(void)close(fd);
	}
	device_stream_free(worker->device, session->stream);
	fair_session_deinit(&session->turn);
	if (charged)
		account_release(session->account, ACCOUNT_SESSIONS, 1);
	account_put(session->account);
	free(session);
	return r;
}
