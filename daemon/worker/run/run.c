/* SPDX-License-Identifier: MIT */
/*
 * run.c: the beginning of a run, and its end by its client or by time. Which run is next is schedule.c's
 * business, what it needs to be a launch bind.c's, its answer request.c's.
 */
#include "request.h"
#include "tuner.h"

#include <string.h>

#include <base/clock.h>
#include <proto/error.h>

#define TICK_MS          20
#define FENCE_TIMEOUT_MS 10000 /* of a run that names none */

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

/* ---- time ---- */

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

	list_for_each_entry(struct request, request, &worker->runs.requests, in_worker) {
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

static void on_tick(uv_timer_t *timer)
{
	struct worker *worker = timer->data;
	uint64_t now = clock_ns();
	/* After a pause of the whole process (SIGSTOP, a suspended machine) nothing has got ahead
	 * either, and that says nothing. */
	bool paused = now - worker->runs.last_tick_ns > worker->config->stall_ms * NS_PER_MS / 2;
	struct list late, *node;

	worker->runs.last_tick_ns = now;
	/* Ending one may start others, wherever they are in the list. */
	list_init(&late);
	while ((node = list_pop(&worker->runs.requests)))
		list_append(&late, node);
	while ((node = list_pop(&late))) {
		list_append(&worker->runs.requests, node);
		end_late(container_of(node, struct request, in_worker), now);
	}
	if (!paused)
		check_stall(worker);
}

static void start_tick(struct worker *worker)
{
	if (uv_is_active((uv_handle_t *)&worker->runs.tick))
		return;
	worker->runs.last_tick_ns = clock_ns();
	uv_timer_start(&worker->runs.tick, on_tick, TICK_MS, TICK_MS);
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
	list_append(&worker->runs.requests, &request->in_worker);
	list_append(&session->waiting, &request->in_session);
	session->n_waiting++;
	if (worker->runs.n_pending++ == 0)
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
	if (session->worker->runs.n_pending > 0)
		start_tick(session->worker);
}

/* ---- ending early ---- */

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
			request_retire(request);
	}
	list_for_each_entry(struct request, request, &session->running, in_session) {
		device_cancel(session->worker->device, request->launch);
		hasten(request);
	}
	schedule_session(session);
}
