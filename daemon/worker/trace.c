/* SPDX-License-Identifier: MIT */
#include "trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

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

static void add_stages(cJSON *run, const struct trace_event *event)
{
	cJSON *list = cJSON_AddArrayToObject(run, "stages");

	for (uint32_t i = 0; i < event->n_stages; i++) {
		cJSON *stage = cJSON_CreateObject();

		cJSON_AddStringToObject(stage, "family", plan_family_name(event->families[i]));
		cJSON_AddNumberToObject(stage, "started_ns", (double)event->stage_started_ns[i]);
		cJSON_AddItemToArray(list, stage);
	}
}

static void add_event(cJSON *list, const struct trace_event *event)
{
	cJSON *item = cJSON_CreateObject();

	cJSON_AddStringToObject(item, "kind", event->is_build ? "build" : "run");
	cJSON_AddStringToObject(item, "kernel", event->kernel);
	cJSON_AddNumberToObject(item, "uid", event->uid);
	cJSON_AddNumberToObject(item, "arrived_ns", (double)event->arrived_ns);
	cJSON_AddNumberToObject(item, "answered_ns", (double)event->answered_ns);
	cJSON_AddNumberToObject(item, "pid", event->pid);
	if (event->is_build) {
		cJSON_AddBoolToObject(item, "failed", event->failed);
	} else {
		cJSON_AddNumberToObject(item, "session", (double)event->session);
		cJSON_AddNumberToObject(item, "started_ns", (double)event->started_ns);
		cJSON_AddNumberToObject(item, "ended_ns", (double)event->ended_ns);
		add_stages(item, event);
	}
	cJSON_AddItemToArray(list, item);
}

/* What the session has not read yet; given. NULL: out of memory. */
static char *read_events(struct session *session)
{
	struct trace *trace = session->worker->trace;
	bool all = config_is_privileged(&session->worker->settings, session->uid);
	uint64_t oldest = trace->n_events > EVENTS ? trace->n_events - EVENTS : 0;
	uint64_t lost = session->trace_read < oldest ? oldest - session->trace_read : 0;
	cJSON *root = cJSON_CreateObject(), *list;
	char *text;

	cJSON_AddNumberToObject(root, "lost", (double)lost);
	list = cJSON_AddArrayToObject(root, "events");
	for (uint64_t i = session->trace_read + lost; i < trace->n_events; i++) {
		const struct trace_event *event = &trace->events[i % EVENTS];

		if (all || event->uid == session->uid)
			add_event(list, event);
	}
	session->trace_read = trace->n_events;
	text = cJSON_PrintUnformatted(root);
	cJSON_Delete(root);
	return text;
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
	struct proto_json_result result;
	int fd = -1, r = start_reading(session, err);
	char *text;

	if (r < 0)
		return r;
	text = read_events(session);
	if (!text)
		return fmha_error_set(err, FMHA_ENOMEM, "trace: out of memory");
	result.size = strlen(text);
	r = handout_text(&session->worker->handouts, session->account, text, result.size, &fd, err);
	cJSON_free(text);
	if (r < 0)
		return r;
	connection_answer(&session->connection, id, PROTO_TRACE, &result, fd);
	return 0;
}
