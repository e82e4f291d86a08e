/* SPDX-License-Identifier: MIT */
#include "worker_registry.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <base/clock.h>
#include <proto/error.h>

#define EVENTS 8192 /* the last so many; a power of two */

struct trace_event {
	bool is_build, failed;
	uint32_t uid, pid;
	uint64_t session;
	uint64_t arrived_ns, started_ns, ended_ns,
		answered_ns; /* a build: from arrived to answered */
	uint32_t n_stages;   /* of a run, where the device tells when each began */
	uint64_t stage_started_ns[PLAN_MAX_STAGES];
	enum abi_family families[PLAN_MAX_STAGES];
	char kernel[PLAN_KERNEL_BYTES];
};

struct trace {
	uint32_t n_readers;
	uint64_t n_events; /* ever */
	struct trace_event events[EVENTS];
};

static struct trace_event *next_event(struct trace *trace)
{
	struct trace_event *event = &trace->events[trace->n_events++ % EVENTS];

	*event = (struct trace_event){0};
	return event;
}

void trace_run(const struct request *request, uint64_t now)
{
	const struct session *session = request->session;
	const struct plan *plan = &request->plan->plan;
	bool backward = plan->problem.op == FMHA_BACKWARD && plan->n_stages > 1;
	struct trace_event *event = next_event(session->worker->trace);

	event->uid = session->uid;
	event->pid = session->pid;
	event->session = session->id;
	event->arrived_ns = request->arrived_ns;
	event->started_ns = request->launch->started_ns;
	event->ended_ns = request->launch->ended_ns;
	event->answered_ns = now;
	if (request->launch->times_stages && request->launch->stage_started_ns[0])
		event->n_stages = plan->n_stages;
	for (uint32_t i = 0; i < event->n_stages; i++) {
		uint64_t started_ns = request->launch->stage_started_ns[i];

		/* The first may wait for a thread. */
		event->stage_started_ns[i] = started_ns > event->started_ns ? started_ns
									    : event->started_ns;
		event->families[i] = plan->stages[i].family;
	}
	memcpy(event->kernel, plan->stages[backward].kernel, sizeof(event->kernel));
}

void trace_build(struct worker *worker, const struct device_build *build, bool succeeded)
{
	struct trace_event *event = next_event(worker->trace);

	event->is_build = true;
	event->failed = !succeeded;
	event->uid = build->uid;
	event->pid = build->pid;
	event->arrived_ns = build->asked_ns;
	event->answered_ns = clock_ns();
	(void)snprintf(event->kernel, sizeof(event->kernel), "%s", build->build->name);
}

/* ---- reading ---- */

#define EVENTS_A_PIECE 12
#define EVENT_BYTES    (PLAN_KERNEL_BYTES + 320 + PLAN_MAX_STAGES * 96)
_Static_assert(EVENTS_A_PIECE *EVENT_BYTES < PIECE_BYTES, "they fit");

/* An answer in the making. */
struct trace_reading {
	struct pieces pieces;
	bool begun, comma;
	uint64_t until, lost; /* events */
};

static void put_stages(struct pieces *to, const struct trace_event *event)
{
	pieces_put(to, ",\"stages\":[");
	for (uint32_t i = 0; i < event->n_stages; i++)
		pieces_put(to, "%s{\"family\":\"%s\",\"started_ns\":%" PRIu64 "}", i ? "," : "",
			   plan_family_name(event->families[i]), event->stage_started_ns[i]);
	pieces_put(to, "]");
}

/* Names of kernels need no escapes. */
static void put_event(struct trace_reading *reading, const struct trace_event *event)
{
	struct pieces *to = &reading->pieces;

	pieces_put(to,
		   "%s{\"kind\":\"%s\",\"kernel\":\"%s\",\"uid\":%u,\"arrived_ns\":%" PRIu64
		   ",\"answered_ns\":%" PRIu64 ",\"pid\":%u",
		   reading->comma ? "," : "", event->is_build ? "build" : "run", event->kernel,
		   event->uid, event->arrived_ns, event->answered_ns, event->pid);
	reading->comma = true;
	if (event->is_build) {
		pieces_put(to, ",\"failed\":%s", event->failed ? "true" : "false");
	} else {
		pieces_put(to,
			   ",\"session\":%" PRIu64 ",\"started_ns\":%" PRIu64
			   ",\"ended_ns\":%" PRIu64,
			   event->session, event->started_ns, event->ended_ns);
		put_stages(to, event);
	}
	pieces_put(to, "}");
}

/* What the session has not read yet, as far as this piece goes. Return: whether there is more. */
static bool read_some(struct trace_reading *reading)
{
	struct session *session = reading->pieces.session;
	const struct trace *trace = session->worker->trace;
	bool all = config_is_privileged(&session->worker->settings, session->uid);
	uint64_t oldest = trace->n_events > EVENTS ? trace->n_events - EVENTS : 0;
	uint64_t *at = &session->trace_read, end;

	if (oldest > reading->until)
		oldest = reading->until;
	if (*at < oldest) {
		reading->lost += oldest - *at;
		*at = oldest;
	}
	end = reading->until - *at > EVENTS_A_PIECE ? *at + EVENTS_A_PIECE : reading->until;
	for (; *at < end; (*at)++) {
		const struct trace_event *event = &trace->events[*at % EVENTS];

		if (all || event->uid == session->uid)
			put_event(reading, event);
	}
	return *at < reading->until;
}

static bool write_some(struct pieces *pieces)
{
	struct trace_reading *reading = container_of(pieces, struct trace_reading, pieces);

	if (!reading->begun) {
		reading->begun = true;
		reading->until = pieces->session->worker->trace->n_events;
		pieces_put(pieces, "{\"events\":[");
		return true;
	}
	if (read_some(reading))
		return true;
	pieces_put(pieces, "],\"lost\":%" PRIu64 "}", reading->lost);
	return false;
}

static void free_reading(struct pieces *pieces)
{
	free(container_of(pieces, struct trace_reading, pieces));
}

static const struct pieces_ops reading_ops = {PROTO_TRACE, write_some, free_reading};

static int start_reading(struct session *session, struct fmha_error *err)
{
	struct worker *worker = session->worker;

	if (session->traces)
		return 0;
	if (!worker->trace)
		worker->trace = calloc(1, sizeof(*worker->trace));
	if (!worker->trace)
		return fmha_error_set(err, FMHA_ENOMEM, "trace: out of memory");
	worker->trace->n_readers++;
	session->traces = true;
	session->trace_read = worker->trace->n_events;
	return 0;
}

void trace_forget(struct session *session)
{
	struct worker *worker = session->worker;

	if (!session->traces)
		return;
	session->traces = false;
	if (--worker->trace->n_readers > 0)
		return;
	free(worker->trace);
	worker->trace = NULL;
}

int trace_request(struct session *session, uint32_t id, struct fmha_error *err)
{
	struct trace_reading *reading = calloc(1, sizeof(*reading));
	int r;

	if (!reading)
		return fmha_error_set(err, FMHA_ENOMEM, "trace: out of memory");
	r = start_reading(session, err);
	if (r < 0) {
		free(reading);
		return r;
	}
	pieces_start(&reading->pieces, &reading_ops, session, id);
	return 0;
}
