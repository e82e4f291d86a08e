/* SPDX-License-Identifier: MIT */
#include "trace.h"

#include <inttypes.h>
#include <stdarg.h>
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
	struct trace_event *event;

	if (!session->worker->trace)
		return;
	event = next_event(session->worker->trace);
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
	struct trace_event *event;

	if (!worker->trace)
		return;
	event = next_event(worker->trace);
	event->is_build = true;
	event->failed = !succeeded;
	event->uid = build->uid;
	event->pid = build->pid;
	event->arrived_ns = build->asked_ns;
	event->answered_ns = clock_ns();
	(void)snprintf(event->kernel, sizeof(event->kernel), "%s", build->kernel);
}

/* ---- reading ---- */

#define EVENTS_A_STEP 32
#define EVENT_BYTES   (PLAN_KERNEL_BYTES + 320 + PLAN_MAX_STAGES * 96)

/* An answer in the making. */
struct trace_reading {
	struct chore chore;
	struct session *session;
	uint32_t id;
	bool begun;
	uint64_t until, lost; /* events */
	char *text;           /* NULL: none yet */
	size_t n, capacity;
	bool failed;
};

/* Room for @bytes more. */
static bool reserve(struct trace_reading *reading, size_t bytes)
{
	size_t capacity = 2 * reading->capacity + bytes;
	char *text;

	if (reading->capacity - reading->n >= bytes)
		return true;
	text = realloc(reading->text, capacity);
	if (!text)
		return false;
	reading->text = text;
	reading->capacity = capacity;
	return true;
}

__attribute__((format(printf, 2, 3))) static void put(struct trace_reading *reading,
						      const char *format, ...)
{
	va_list list;
	int n;

	if (!reserve(reading, EVENT_BYTES)) {
		reading->failed = true;
		return;
	}
	va_start(list, format);
	n = vsnprintf(reading->text + reading->n, reading->capacity - reading->n, format, list);
	va_end(list);
	reading->n += (size_t)n;
}

static void put_stages(struct trace_reading *reading, const struct trace_event *event)
{
	put(reading, ",\"stages\":[");
	for (uint32_t i = 0; i < event->n_stages; i++)
		put(reading, "%s{\"family\":\"%s\",\"started_ns\":%" PRIu64 "}", i ? "," : "",
		    plan_family_name(event->families[i]), event->stage_started_ns[i]);
	put(reading, "]");
}

/* Names of kernels need no escapes. */
static void put_event(struct trace_reading *reading, const struct trace_event *event)
{
	put(reading,
	    "%s{\"kind\":\"%s\",\"kernel\":\"%s\",\"uid\":%u,\"arrived_ns\":%" PRIu64
	    ",\"answered_ns\":%" PRIu64 ",\"pid\":%u",
	    reading->text[reading->n - 1] == '[' ? "" : ",", event->is_build ? "build" : "run",
	    event->kernel, event->uid, event->arrived_ns, event->answered_ns, event->pid);
	if (event->is_build) {
		put(reading, ",\"failed\":%s", event->failed ? "true" : "false");
	} else {
		put(reading,
		    ",\"session\":%" PRIu64 ",\"started_ns\":%" PRIu64 ",\"ended_ns\":%" PRIu64,
		    event->session, event->started_ns, event->ended_ns);
		put_stages(reading, event);
	}
	put(reading, "}");
}

static void begin_reading(struct trace_reading *reading)
{
	reading->begun = true;
	reading->until = reading->session->worker->trace->n_events;
	put(reading, "{\"events\":[");
}

/* What the session has not read yet, as far as this step goes. Return: whether there is more. */
static bool read_some(struct trace_reading *reading)
{
	struct session *session = reading->session;
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
	end = reading->until - *at > EVENTS_A_STEP ? *at + EVENTS_A_STEP : reading->until;
	for (; *at < end && !reading->failed; (*at)++) {
		const struct trace_event *event = &trace->events[*at % EVENTS];

		if (all || event->uid == session->uid)
			put_event(reading, event);
	}
	return *at < reading->until && !reading->failed;
}

static int answer(struct trace_reading *reading, struct fmha_error *err)
{
	struct session *session = reading->session;
	struct proto_json_result result;
	int fd = -1, r;

	put(reading, "],\"lost\":%" PRIu64 "}", reading->lost);
	if (reading->failed)
		return fmha_error_set(err, FMHA_ENOMEM, "trace: out of memory");
	result.size = reading->n;
	r = handout_text(&session->worker->handouts, session->account, reading->text, result.size,
			 &fd, err);
	if (r == 0)
		connection_answer(&session->connection, reading->id, PROTO_TRACE, &result, fd);
	return r;
}

/* Many events are put into words a few at a time. */
static bool step(struct chore *chore)
{
	struct trace_reading *reading = container_of(chore, struct trace_reading, chore);
	struct session *session = reading->session;
	struct fmha_error err;

	if (!session->hung_up) {
		if (!reading->begun)
			begin_reading(reading);
		if (!reading->failed && read_some(reading))
			return true;
		if (answer(reading, &err) < 0)
			connection_answer_error(&session->connection, reading->id, &err);
	}
	free(reading->text);
	free(reading);
	session_offload_ended(session);
	return false;
}

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
	reading->session = session;
	reading->id = id;
	session->n_offloads++;
	chore_start(&session->worker->chores, &reading->chore, session->account, step);
	return 0;
}
