/* SPDX-License-Identifier: MIT */
/* serve.c: a client's direct connection: its beginning, its requests, its end. */
#include "worker_registry.h"
#include "tuner.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <base/clock.h>
#include <proto/cleanup.h>
#include <proto/error.h>

static struct session *session_of(struct connection *connection)
{
	return container_of(connection, struct session, connection);
}

/* ---- requests ---- */

/* A fault of the device's, or "in METHOD": the worker ends when that is served next. */
static int inject(struct session *session, const struct proto_inject_params *params,
		  struct fmha_error *err)
{
	struct worker *worker = session->worker;
	const char *fault = params->fault;

	if (strncmp(fault, "in ", 3) != 0 || !worker->config->allow_faults)
		return device_inject(worker->device, fault, params->after, err);
	for (int i = 0; i < PROTO_N_METHODS; i++) {
		if (strcmp(proto_methods[i].name, fault + 3) != 0)
			continue;
		worker->crash_method = proto_methods[i].name;
		return 0;
	}
	return fmha_error_set_field(err, FMHA_EINVAL, "fault", "fault %s: no such method", fault);
}

static int serve_handle(struct connection *connection, uint32_t id, enum proto_method method,
			const union proto_any_params *params, int *fd, struct fmha_error *err)
{
	struct session *session = session_of(connection);
	int r = 0;

	if (session->worker->crash_method &&
	    strcmp(session->worker->crash_method, proto_methods[method].name) == 0)
		(void)raise(SIGFPE);
	switch (method) {
	case PROTO_RUN:
		run_request(session, id, &params->RUN);
		return 0;
	case PROTO_BUFFER_CREATE:
		return buffer_create(session, id, &params->BUFFER_CREATE, err);
	case PROTO_BUFFER_IMPORT:
		return buffer_import(session, id, &params->BUFFER_IMPORT, fd, err);
	case PROTO_EVENT_IMPORT:
		return session_event_import(session, id, &params->EVENT_IMPORT, err);
	case PROTO_PLAN:
	case PROTO_EXPLAIN:
	case PROTO_LOCAL_PLAN:
	case PROTO_LOCAL_RUNS:
		return planning_request(session, id, method, params, err);
	case PROTO_CODE:
		return local_code(session, id, &params->CODE, err);
	case PROTO_REGISTRY_EXPORT:
	case PROTO_REGISTRY_IMPORT:
	case PROTO_REGISTRY_LOAD:
	case PROTO_REGISTRY_UNLOAD:
	case PROTO_REGISTRY_GET:
	case PROTO_REGISTRY_SET_PRIORITY:
	case PROTO_REGISTRY_LIFT:
	case PROTO_REGISTRY_FORGET:
		return kernels_request(session, id, method, params, fd, err);
	case PROTO_TRACE:
		return trace_request(session, id, err);
	case PROTO_TUNE:
		return tuner_request(session, id, &params->TUNE, err);
	case PROTO_CENSUS:
		return kernels_census(session, id, err);
	case PROTO_PING:
		break;
	case PROTO_BUFFER_RELEASE:
		r = buffer_release(session, params->BUFFER_RELEASE.buffer, err);
		break;
	case PROTO_EVENT_RELEASE:
		r = event_release(session, params->EVENT_RELEASE.event, err);
		break;
	case PROTO_PLAN_RELEASE:
		r = session_plan_release(session, params->PLAN_RELEASE.plan, err);
		break;
	case PROTO_CANCEL:
		r = run_cancel(session, params->CANCEL.request, err);
		break;
	case PROTO_INJECT:
		r = inject(session, &params->INJECT, err);
		break;
	default:
		return fmha_error_set_field(err, FMHA_EINVAL, "method",
					    "%s is not answered on this socket",
					    proto_methods[method].name);
	}
	if (r == 0)
		connection_answer(connection, id, method, &(struct proto_empty){0}, -1);
	return r;
}

/* ---- life ---- */

/* Gives back one thing that the session had. Return: whether there was one. */
static bool give_back_one(struct session *session)
{
	void *thing;

	if ((thing = table_pop(&session->buffers)))
		(void)buffer_unref(thing);
	else if ((thing = table_pop(&session->events)))
		(void)event_unref(thing);
	else if ((thing = table_pop(&session->plans)))
		(void)session_plan_unref(thing);
	return thing;
}

/* Thousands of plans and mappings are not given back in one turn. */
static bool farewell(struct chore *chore)
{
	struct session *session = container_of(chore, struct session, farewell);

	if (give_back_one(session))
		return true;
	session_offload_ended(session);
	return false;
}

static void on_hangup(struct connection *connection)
{
	struct session *session = session_of(connection);

	session->hung_up = true;
	trace_forget(session);
	prepare_forget(session);
	tuner_forget(session);
	run_cancel_all(session);
	session->n_offloads++; /* it stays until its farewell is over */
	chore_start(&session->worker->chores, &session->farewell, session->account, farewell);
	list_remove(&session->in_sessions);
	atomic_fetch_sub(&session->worker->page->n_sessions, 1);
}

static void on_closed(struct connection *connection)
{
	struct session *session = session_of(connection);

	session->closed = true;
	session_release(session);
}

static const struct connection_ops session_ops = {
	.handle = serve_handle, .on_closed = on_closed, .on_hangup = on_hangup};

static struct session *make_session(struct worker *worker,
				    const struct proto_worker_attach_params *params)
{
	struct session *session = calloc(1, sizeof(*session));

	if (!session)
		return NULL;
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
	return session;
}

static int charge_session(struct session *session, struct fmha_error *err)
{
	struct account *account = account_get(&session->worker->accounts, session->uid);
	int r;

	if (!account)
		return fmha_error_set(err, FMHA_ENOMEM, "session: out of memory");
	r = account_charge(account, ACCOUNT_SESSIONS, 1, err);
	if (r < 0) {
		account_put(account);
		return r;
	}
	if (account->told_ns == 0)
		account->told_ns = clock_ns();
	session->account = account;
	return 0;
}

int session_new(struct worker *worker, int *fd, const struct proto_worker_attach_params *params,
		struct fmha_error *err)
{
	_cleanup_(session_freep) struct session *session = make_session(worker, params);
	uint32_t weight = config_weight(&worker->settings, params->uid);
	int r;

	if (!session)
		return fmha_error_set(err, FMHA_ENOMEM, "session: out of memory");
	r = charge_session(session, err);
	if (r < 0)
		return r;
	if (fair_session_init(&worker->runs.turns, session->uid, weight, &session->turn) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "session: out of memory");
	r = device_stream_new(worker->device, params->uid, weight, &session->stream, err);
	if (r < 0)
		return r;
	r = connection_open(&session->connection, &worker->hub, take_fd(fd), session->account,
			    false, &session_ops, err);
	if (r < 0)
		return r;
	session->connection.peer_pid = session->pid;
	list_append(&worker->sessions, &session->in_sessions);
	atomic_fetch_add(&worker->page->n_sessions, 1);
	session = NULL; /* its connection's from now on */
	return 0;
}
