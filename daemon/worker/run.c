/* SPDX-License-Identifier: MIT */
/*
 * run.c: from a run request to its answer. Which run is next is schedule.c's business, what it
 * needs to be a launch bind.c's.
 */
#include "judged.h"
#include "kernels.h"
#include "request.h"
#include "trace.h"
#include "tuner.h"

#include <stdlib.h>
#include <string.h>

#include <base/clock.h>
#include <proto/error.h>

#define TINY_NS             50000
#define SLOW_UNTIL_NOT_TINY 4
#define KEEP_FREE_REQUESTS  64
#define FENCE_TIMEOUT_MS    10000 /* of a run that names none */

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

/* Takes the request out of the books. */
static void retire(struct request *request)
{
	struct session *session = request->session;
	struct worker *worker = session->worker;

	bind_release(request);
	if (request->fenced && --session->n_fenced == 0)
		account_release(session->account, ACCOUNT_FENCED, 1);
	request->fenced = false;
	if (request->state == REQUEST_RUNNING)
		session->n_running--;
	else
		session->n_waiting--;
	request_free(worker, request);
	if (--worker->n_pending == 0) {
		uv_timer_stop(&worker->tick);
		worker_trim_soon(worker);
		tuner_resume(worker->tuner);
	}
}

/* 0: none */
static uint32_t effective_timeout_ms(const struct worker *worker,
				     const struct proto_run_params *params)
{
	uint64_t most = worker->limits.value[LIMIT_FENCE_MS];
	uint32_t wanted = params->timeout_ms ? params->timeout_ms : FENCE_TIMEOUT_MS;

	if (params->n_waits == 0 && params->n_signals == 0)
		return params->timeout_ms;
	return wanted < most ? wanted : (uint32_t)most;
}

/* ---- the end of a run ---- */

static void mark_lost(struct request *request, uint64_t address)
{
	for (uint32_t i = 0; i < request->n_buffers; i++) {
		struct device_memory *memory = &request->buffers[i]->memory;
		uint64_t start = (uint64_t)(uintptr_t)memory->map;

		if (address >= start && address - start < memory->map_bytes)
			request->buffers[i]->lost = true;
	}
}

/*
 * How much work of this plan's kernels may take the loop thread, and how long work takes. One slow
 * run says little: the first touches new pages, any may have been interrupted. Runs of a plan can
 * differ by their sequences' lengths: what was tiny once allows no more work than that.
 */
static void judge_size(const struct request *request, uint64_t kernel_ns)
{
	struct session_plan *plan = request->plan;
	double per_work = (double)kernel_ns / (request->work + 1);

	plan->ns_per_work = plan->ns_per_work > 0 ? (3 * plan->ns_per_work + per_work) / 4
						  : per_work;
	plan->n_slow = kernel_ns < TINY_NS ? 0 : plan->n_slow + 1;
	if (plan->n_slow == 0 && request->work > plan->tiny_work)
		plan->tiny_work = request->work;
	else if (plan->n_slow >= SLOW_UNTIL_NOT_TINY && request->work <= plan->tiny_work)
		plan->tiny_work = request->work / 2;
}

static void answer_error(struct request *request, const struct fmha_error *error)
{
	struct session *session = request->session;

	if (error->code == FMHA_ECANCELED)
		session->worker->n_cancelled++;
	else
		session->worker->n_failed++;
	if (request->answered)
		session->late_error = *error;
	else
		connection_answer_error(&session->connection, request->id, error);
}

/* The family of a plan's main stage: "fwd" of "fwd-bf16-...". NULL: there is no room for another. */
static struct family_work *find_family(struct worker *worker, const struct plan *plan)
{
	bool backward = plan->problem.op == FMHA_BACKWARD && plan->n_stages > 1;
	const char *name = plan->stages[backward].kernel;
	size_t n = strcspn(name, "-");

	for (int i = 0; i < WORKER_FAMILIES; i++) {
		struct family_work *family = &worker->families[i];

		if (!family->name[0] && n < sizeof(family->name))
			memcpy(family->name, name, n);
		if (strncmp(family->name, name, n) == 0 && !family->name[n])
			return family;
	}
	return NULL;
}

static void count_work(struct request *request, uint64_t kernel_ns)
{
	struct session_plan *plan = request->plan;
	struct session *session = request->session;

	session->flops += plan->plan.flops;
	session->bytes += plan->plan.bytes;
	session->kernel_ns += kernel_ns;
	session->roof_ns += plan->roof_ns;
	session->census = plan->census;
	if (!plan->family)
		plan->family = find_family(request->session->worker, &plan->plan);
	if (!plan->family)
		return;
	plan->family->n_runs++;
	plan->family->flops += plan->plan.flops;
	plan->family->bytes += plan->plan.bytes;
	plan->family->kernel_ns += kernel_ns;
	plan->family->roof_ns += plan->roof_ns;
}

static void answer_success(struct request *request, uint64_t now)
{
	struct session *session = request->session;
	struct worker *worker = session->worker;
	const struct device_launch *launch = request->launch;
	struct proto_run_result result = {.queued_ns = launch->started_ns - request->arrived_ns,
					  .kernel_ns = launch->ended_ns - launch->started_ns};

	/* The client goes on while its run is counted. */
	if (!request->answered)
		connection_answer(&session->connection, request->id, PROTO_RUN, &result, -1);
	worker->n_runs++;
	session->n_runs++;
	histogram_add(&worker->queued, result.queued_ns);
	histogram_add(&worker->kernel, result.kernel_ns);
	histogram_add(&worker->total, now - request->arrived_ns);
	trace_run(request, now);
	judge_size(request, result.kernel_ns);
	kernels_count_run(worker, request->plan, result.kernel_ns);
	census_count(&worker->census, request->plan->uid, &request->plan->plan,
		     &(struct census_runs){1, result.kernel_ns, request->plan->roof_ns},
		     &request->plan->census);
	count_work(request, result.kernel_ns);
}

/* Its integers lie on the device now. */
static void keep_tables(struct request *request)
{
	if (!request->fresh || request->is_known || !request->indices)
		return;
	judged_keep(request->fresh, request->indices);
	request->indices = NULL;
}

void request_complete(struct request *request, uint64_t now)
{
	struct device_launch *launch = request->launch;
	struct fmha_error *error = &launch->error;

	if (launch->bus_address)
		mark_lost(request, launch->bus_address);
	if (error->code == FMHA_OK && request->bind_error.code != FMHA_OK)
		*error = request->bind_error; /* only its signals were given */
	if (request->timed_out && error->code == FMHA_ECANCELED)
		(void)fmha_error_set(error, FMHA_ETIMEDOUT, "not done within %u ms",
				     request->params.timeout_ms);
	if (error->code == FMHA_OK) {
		keep_tables(request);
		answer_success(request, now);
	} else {
		answer_error(request, error);
	}
	retire(request);
}

void request_fail(struct request *request, const struct fmha_error *error)
{
	answer_error(request, error);
	retire(request);
}

void request_answer_queued(struct request *request)
{
	struct proto_run_result result = {.queued_ns = clock_ns() - request->arrived_ns};

	if (request->answered)
		return;
	request->answered = true;
	connection_answer(&request->session->connection, request->id, PROTO_RUN, &result, -1);
}

/* ---- the beginning ---- */

/*
 * A client with counters queues its stream's work ahead, and waits for our answer before it goes
 * on: it gets that at once, as long as no more of its runs wait than it may have in flight. An
 * event means the device's latest record of it, so that its run is answered when the device has it.
 */
static bool answered_at_once(const struct request *request)
{
	const struct proto_run_params *params = &request->params;
	const struct session *session = request->session;
	bool events = false;

	for (uint32_t i = 0; i < params->n_waits; i++)
		events |= params->waits[i].event != 0;
	for (uint32_t i = 0; i < params->n_signals; i++)
		events |= params->signals[i].event != 0;
	return request_has_fences(request) && !events &&
	       session->n_waiting + session->n_running <
		       session->worker->limits.value[LIMIT_IN_FLIGHT_PER_CONNECTION];
}

static struct request *accept_run(struct session *session, struct session_plan *plan, uint32_t id,
				  const struct proto_run_params *params)
{
	struct worker *worker = session->worker;
	struct request *request = request_new(worker);
	uint64_t timeout_ms = effective_timeout_ms(worker, params);

	if (!request)
		return NULL;
	plan->n_references++;
	request->session = session;
	request->plan = plan;
	request->params = *params;
	request->id = id;
	request->state = REQUEST_WAITING;
	request->timed_out = request->cancelled = request->answered = false;
	request->bind_error.code = FMHA_OK;
	memset(request->bindings, 0, sizeof(request->bindings));
	request->arrived_ns = worker->hub.turn_ns;
	request->deadline_ns = timeout_ms ? request->arrived_ns + timeout_ms * NS_PER_MS : 0;
	list_append(&worker->requests, &request->in_worker);
	list_append(&session->waiting, &request->in_session);
	session->n_waiting++;
	if (worker->n_pending++ == 0)
		tuner_yield(worker->tuner);
	return request;
}

static int check_run(struct session *session, const struct session_plan *plan,
		     const struct proto_run_params *params, struct fmha_error *err)
{
	if (!plan)
		return fmha_error_set_field(err, FMHA_ENOENT, "plan", "plan %llu: no such",
					    (unsigned long long)params->plan);
	if (!plan->ready)
		return fmha_error_set_field(err, FMHA_ENOKERNEL, "plan",
					    "plan %llu: its kernels are still being built",
					    (unsigned long long)params->plan);
	if (session->worker->draining)
		return fmha_error_set(err, FMHA_EBUSY, "the daemon is stopping");
	if (session->late_error.code == FMHA_OK)
		return 0;
	*err = session->late_error;
	session->late_error.code = FMHA_OK;
	return err->code;
}

void run_request(struct session *session, uint32_t id, const struct proto_run_params *params)
{
	struct session_plan *plan = table_get(&session->plans, params->plan);
	struct request *request;
	struct fmha_error err;

	if (check_run(session, plan, params, &err) < 0) {
		connection_answer_error(&session->connection, id, &err);
		return;
	}
	if (plan->plan.n_stages == 0 && params->n_waits + params->n_signals == 0) {
		/* nothing to write */
		connection_answer(&session->connection, id, PROTO_RUN,
				  &(struct proto_run_result){0}, -1);
		return;
	}
	session_plan_refresh(session, params->plan, plan);
	plan = table_get(&session->plans, params->plan);
	request = accept_run(session, plan, id, params);
	if (!request) {
		(void)fmha_error_set(&err, FMHA_ENOMEM, "run: out of memory");
		connection_answer_error(&session->connection, id, &err);
		return;
	}
	if (bind_references(request, &err) < 0) {
		request_fail(request, &err);
		return;
	}
	if (answered_at_once(request))
		request_answer_queued(request);
	schedule_session(session);
}

/* ---- ending early ---- */

/* Of a run that waits: it ends now, or when what it is being prepared with comes back. */
static void cancel_waiting(struct request *request, int code, const char *reason)
{
	struct session *session = request->session;
	struct fmha_error err;

	request->cancelled = code == FMHA_ECANCELED;
	if (request->state == REQUEST_FETCHING || request->state == REQUEST_BINDING)
		return;
	(void)fmha_error_set(&err, code, "%s", reason);
	schedule_give_up(request, &err);
	schedule_session(session);
}

static struct request *find_request(struct list *list, uint32_t id)
{
	list_for_each_entry(struct request, request, list, in_session) {
		if (request->id == id)
			return request;
	}
	return NULL;
}

int run_cancel(struct session *session, uint32_t id, struct fmha_error *err)
{
	struct request *request = find_request(&session->waiting, id);

	if (request) {
		cancel_waiting(request, FMHA_ECANCELED, "the run was cancelled");
		return 0;
	}
	request = find_request(&session->running, id);
	if (request) {
		device_cancel(session->worker->device, request->launch);
		return 0;
	}
	return fmha_error_set_field(err, FMHA_ENOENT, "request", "request %u is not in flight", id);
}

/* No longer than a fence may take that names no time: its client cannot reach it any more. */
static void hasten(struct request *request)
{
	const uint64_t until = clock_ns() + FENCE_TIMEOUT_MS * NS_PER_MS;

	if (request_has_fences(request) && request->deadline_ns > until)
		request->deadline_ns = until;
}

void run_cancel_all(struct session *session)
{
	list_for_each_entry(struct request, request, &session->waiting, in_session) {
		request->cancelled = true;
		hasten(request);
		if (request->state == REQUEST_WAITING || request->state == REQUEST_BOUND)
			retire(request);
	}
	list_for_each_entry(struct request, request, &session->running, in_session) {
		device_cancel(session->worker->device, request->launch);
		hasten(request);
	}
	schedule_session(session);
}

void run_fail_all(struct worker *worker, const struct fmha_error *error)
{
	list_for_each_entry(struct request, request, &worker->requests, in_worker) {
		connection_answer_error(&request->session->connection, request->id, error);
	}
}

/* ---- time ---- */

static bool is_with_device(const struct request *request)
{
	return request->state == REQUEST_RUNNING || request->state == REQUEST_FETCHING;
}

/* The device hangs when a launch has not got ahead for too long. */
static void check_stall(struct worker *worker)
{
	struct request *culprit = NULL;
	const char *kernel, *name = "";
	uint64_t worst = 0;
	struct fmha_error err;

	list_for_each_entry(struct request, request, &worker->requests, in_worker) {
		uint64_t stalled;

		if (!is_with_device(request))
			continue;
		stalled = device_stalled_ns(worker->device, request->launch, &kernel);
		if (stalled > worst) {
			worst = stalled;
			culprit = request;
			name = kernel;
		}
	}
	if (!culprit || worst < worker->config->stall_ms * NS_PER_MS)
		return;
	(void)fmha_error_set(&err, FMHA_EDEVICE, "the device hangs: nothing got ahead for %u ms",
			     worker->config->stall_ms);
	worker_fail(worker, name, &err);
}

/* A stuck fence is let go, or it would hold up the stream for ever: the run goes on, and the next
 * one says so. Any other run is stopped. */
static void end_with_device(struct request *request)
{
	struct session *session = request->session;
	struct device *device = session->worker->device;

	if (device_release_fences(device, request->launch))
		(void)fmha_error_set_field(&session->late_error, FMHA_ETIMEDOUT, "waits",
					   "a fence of an earlier run was not reached within %u ms",
					   effective_timeout_ms(session->worker, &request->params));
	else if (!request->answered)
		device_cancel(device, request->launch);
}

static void end_late(struct request *request, uint64_t now)
{
	if (!request->deadline_ns || now < request->deadline_ns || request->timed_out)
		return;
	request->timed_out = true;
	if (is_with_device(request))
		end_with_device(request);
	else
		cancel_waiting(request, FMHA_ETIMEDOUT, "not started before its deadline");
}

void run_on_tick(uv_timer_t *timer)
{
	struct worker *worker = timer->data;
	uint64_t now = clock_ns();
	/* After a pause of the whole process (SIGSTOP, a suspended machine) nothing has got ahead
	 * either, and that says nothing. */
	bool paused = now - worker->last_tick_ns > worker->config->stall_ms * NS_PER_MS / 2;
	struct list late, *node;

	worker->last_tick_ns = now;
	/* Ending one may start others, wherever they are in the list. */
	list_init(&late);
	while ((node = list_pop(&worker->requests)))
		list_append(&late, node);
	while ((node = list_pop(&late))) {
		list_append(&worker->requests, node);
		end_late(container_of(node, struct request, in_worker), now);
	}
	if (!paused)
		check_stall(worker);
}
