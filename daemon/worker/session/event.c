/* SPDX-License-Identifier: MIT */
/*
 * event.c: interprocess events of a client's, which its runs may wait for and record. Imported once
 * by handle, like memory: opening one is a driver call that may take long.
 */
#include "worker.h"

#include <stdlib.h>
#include <string.h>

#include <base/clock.h>
#include <proto/error.h>

#define IMPORT_NS  (2 * NS_PER_S)
#define RELEASE_NS (10 * NS_PER_S)

/* ---- the end of one ---- */

static struct event *event_of(struct offload *offload)
{
	return container_of(offload, struct event, offload);
}

static void release_run(struct offload *offload)
{
	struct event *event = event_of(offload);

	if (event->event)
		device_event_free(event->worker->device, event->event);
	event->event = NULL;
}

static void release_done(struct offload *offload)
{
	free(event_of(offload));
}

static void release_now(struct offload *offload)
{
	release_run(offload);
	release_done(offload);
}

static void release(struct event *event)
{
	event->offload = (struct offload){.timeout_ns = RELEASE_NS,
					  .run = release_run,
					  .done = release_done,
					  .undo = release_done};
	offload_start_or_run(&event->worker->offloads, &event->offload);
}

static void give_back(struct event *event)
{
	account_release(event->account, ACCOUNT_EVENTS, 1);
	event->account = account_put(event->account);
}

struct event *event_unref(struct event *event)
{
	if (!event || --event->n_references > 0)
		return NULL;
	give_back(event);
	release(event);
	return NULL;
}

/* ---- the beginning ---- */

/* Events that are being imported count, too. */
static int event_charge(struct session *session, struct fmha_error *err)
{
	int r = session_has_room(session, LIMIT_EVENTS_PER_CONNECTION, &session->events, "events",
				 err);

	return r < 0 ? r : account_charge(session->account, ACCOUNT_EVENTS, 1, err);
}

static void import_run(struct offload *offload)
{
	struct event *event = event_of(offload);

	event->result = device_event_import(event->worker->device, event->handle,
					    event->handle_bytes, &event->event, &event->error);
}

/* Puts it into the session's table, which it may not have outlived. */
static int register_event(struct event *event, uint64_t *ret_id)
{
	struct session *session = event->session;
	int r = event->result;

	if (r == 0) {
		*ret_id = table_add(&session->events, event);
		if (!*ret_id)
			r = fmha_error_set(&event->error, FMHA_ENOMEM, "event: out of memory");
	}
	if (r < 0)
		return r;
	event->n_references = 1;
	return 0;
}

static void import_done(struct offload *offload)
{
	struct event *event = event_of(offload);
	struct session *session = event->session;
	struct proto_event_result result;

	if (session->hung_up) {
		give_back(event);
		release(event);
	} else if (register_event(event, &result.event) < 0) {
		connection_answer_error(&session->connection, event->request, &event->error);
		give_back(event);
		release(event);
	} else {
		connection_answer(&session->connection, event->request, PROTO_EVENT_IMPORT, &result,
				  -1);
	}
	session_offload_ended(session);
}

static void import_late(struct offload *offload)
{
	struct event *event = event_of(offload);
	struct session *session = event->session;
	struct fmha_error err;

	fmha_error_set_field(&err, FMHA_ETIMEDOUT, "handle",
			     "the driver did not open the event's handle within %llu s",
			     (unsigned long long)(IMPORT_NS / NS_PER_S));
	give_back(event);
	session_offload_late(session, event->request, &err);
}

int session_event_import(struct session *session, uint32_t id,
			 const struct proto_event_import_params *params, struct fmha_error *err)
{
	struct event *event;
	int r = 0;

	if (!device_has_events(session->worker->device))
		return device_event_import(session->worker->device, NULL, 0, NULL, err);
	r = event_charge(session, err);
	if (r < 0)
		return r;
	event = calloc(1, sizeof(*event));
	if (!event) {
		account_release(session->account, ACCOUNT_EVENTS, 1);
		return fmha_error_set(err, FMHA_ENOMEM, "event: out of memory");
	}
	event->account = account_get(&session->worker->accounts, session->uid);
	event->worker = session->worker;
	event->session = session;
	event->request = id;
	memcpy(event->handle, params->handle, params->handle_bytes);
	event->handle_bytes = params->handle_bytes;
	event->offload = (struct offload){.owner = session,
					  .user = session->account,
					  .timeout_ns = IMPORT_NS,
					  .urgent = true,
					  .run = import_run,
					  .done = import_done,
					  .late = import_late,
					  .undo = release_now};
	r = offload_start(&session->worker->offloads, &event->offload, err);
	if (r < 0) {
		give_back(event);
		free(event);
	} else {
		session->n_offloads++;
	}
	return r;
}

int event_release(struct session *session, uint64_t id, struct fmha_error *err)
{
	struct event *event = table_remove(&session->events, id);

	if (!event)
		return fmha_error_set_field(err, FMHA_ENOENT, "event", "event %llu: no such",
					    (unsigned long long)id);
	event_unref(event);
	return 0;
}
