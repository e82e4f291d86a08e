/* SPDX-License-Identifier: MIT */
/* trace.c: what workers do, as a trace that Chrome's about:tracing and Perfetto read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cjson/cJSON.h>

#include "ctl.h"
#include "json.h"

#define PAUSE_MS    200 /* between two looks: a worker keeps some thousands of runs */
#define MAX_DEVICES 64

struct tracer {
	struct ctl_target target;
	double seconds;
	const char *path;
	FILE *out;
	uint64_t n_events, n_lost;
	struct fmha_device *devices[MAX_DEVICES];
	uint32_t indices[MAX_DEVICES];
	size_t n_devices;
};

static const struct cli_option own_options[] = {
	{"seconds", 's', "N", "how long to watch (default 5)",
	 CLI_RANGE(REAL, struct tracer, seconds, 0.1, 3600)},
	{"out", 'o', "FILE", "where the trace goes (default trace.json)",
	 CLI_TO(TEXT, struct tracer, path)},
	CLI_END};

/* One span; the format counts in us. A device is a process, a session one of its threads. */
static void write_span(struct tracer *tracer, uint32_t device, const cJSON *event, const char *name,
		       double start, double end)
{
	(void)fprintf(tracer->out,
		      "%s\n{\"name\":\"%s\",\"ph\":\"X\",\"pid\":%u,\"tid\":%.0f,\"ts\":%.3f,"
		      "\"dur\":%.3f,\"args\":{\"kernel\":\"%s\",\"client_pid\":%.0f,\"uid\":%.0f}}",
		      tracer->n_events++ ? "," : "", name, device, ctl_number(event, "session"),
		      start / 1e3, (end > start ? end - start : 0) / 1e3, ctl_text(event, "kernel"),
		      ctl_number(event, "pid"), ctl_number(event, "uid"));
}

static void write_event(struct tracer *tracer, uint32_t device, const cJSON *event)
{
	const cJSON *stages = ctl_member(event, "stages");
	int n_stages = cJSON_GetArraySize(stages);
	double arrived = ctl_number(event, "arrived_ns"),
	       answered = ctl_number(event, "answered_ns");
	double started = ctl_number(event, "started_ns"), ended = ctl_number(event, "ended_ns");

	if (!strcmp(ctl_text(event, "kind"), "build")) {
		write_span(tracer, device, event, "compile", arrived, answered);
		return;
	}
	write_span(tracer, device, event, "queue", arrived, started);
	write_span(tracer, device, event, "kernel", started, ended);
	/* Of several stages, each within the kernel's span. */
	for (int i = 0; i < n_stages && n_stages > 1; i++) {
		const cJSON *stage = cJSON_GetArrayItem(stages, i);
		const cJSON *next = cJSON_GetArrayItem(stages, i + 1);

		write_span(tracer, device, event, ctl_text(stage, "family"),
			   ctl_number(stage, "started_ns"),
			   next ? ctl_number(next, "started_ns") : ended);
	}
	write_span(tracer, device, event, "answer", ended, answered);
}

/* @keep: false: only so that the worker begins to record */
static int trace_look(struct tracer *tracer, bool keep)
{
	for (size_t i = 0; i < tracer->n_devices; i++) {
		struct fmha_error err = {0};
		const cJSON *event;
		cJSON *root;
		char *json;

		if (fmha_device_trace(tracer->devices[i], &json, &err) < 0)
			return ctl_error(&err);
		root = cJSON_Parse(json);
		free(json);
		tracer->n_lost += (uint64_t)ctl_number(root, "lost");
		cJSON_ArrayForEach(event, ctl_member(root, "events"))
		{
			if (keep)
				write_event(tracer, tracer->indices[i], event);
		}
		cJSON_Delete(root);
	}
	return CTL_OK;
}

static int open_devices(struct tracer *tracer, struct fmha_client *client)
{
	struct fmha_device_info devices[MAX_DEVICES];
	struct fmha_error err = {0};
	size_t n;

	if (fmha_client_devices(client, devices, MAX_DEVICES, &n, &err) < 0)
		return ctl_error(&err);
	for (size_t i = 0; i < n && i < MAX_DEVICES; i++) {
		if ((tracer->target.device != FMHA_ANY_DEVICE &&
		     tracer->target.device != devices[i].device) ||
		    strcmp(devices[i].state, "ready") != 0)
			continue;
		tracer->indices[tracer->n_devices] = devices[i].device;
		if (fmha_device_open(client, devices[i].device, &tracer->devices[tracer->n_devices],
				     &err) < 0)
			return ctl_error(&err);
		tracer->n_devices++;
	}
	return tracer->n_devices > 0 ? CTL_OK : ctl_usage_error("trace: no device is ready");
}

static int watch(struct tracer *tracer)
{
	const struct timespec pause = {.tv_nsec = PAUSE_MS * 1000000L};
	int64_t end_ns = ctl_now_ns() + (int64_t)(tracer->seconds * 1e9);
	int r = trace_look(tracer, false);

	tracer->out = r == CTL_OK ? fopen(tracer->path, "we") : NULL;
	if (r == CTL_OK && !tracer->out)
		return ctl_file_error(tracer->path);
	if (r != CTL_OK)
		return r;
	(void)fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[", tracer->out);
	while (r == CTL_OK && ctl_now_ns() < end_ns) {
		(void)nanosleep(&pause, NULL);
		r = trace_look(tracer, true);
	}
	(void)fputs("\n]}\n", tracer->out);
	if (fclose(tracer->out) != 0 && r == CTL_OK)
		return ctl_file_error(tracer->path);
	if (r == CTL_OK)
		(void)printf("%s: %llu spans, %llu events were lost\n", tracer->path,
			     (unsigned long long)tracer->n_events,
			     (unsigned long long)tracer->n_lost);
	return r;
}

static int run_trace(int argc, char **argv)
{
	struct tracer tracer = {.target = CTL_TARGET_INIT, .seconds = 5, .path = "trace.json"};
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	int r = ctl_options(&ctl_trace, argc, argv, &tracer.target, NULL, &tracer);

	if (r == 0)
		r = ctl_connect(&tracer.target, &client);
	if (r == 0)
		r = open_devices(&tracer, client);
	if (r == CTL_OK)
		r = watch(&tracer);
	for (size_t i = 0; i < tracer.n_devices; i++)
		tracer.devices[i] = fmha_device_free(tracer.devices[i]);
	return r;
}

const struct ctl_command ctl_trace = {
	.usage =
		{.name = "fmhactl trace",
		 .brief = "requests through queue, device and compiler, as a trace file",
		 .synopsis = "[--seconds N] [--out FILE] [OPTION...]",
		 .text = "Watches the devices and writes what they did as a trace that Chrome's "
			 "about:tracing and Perfetto read: of each run the spans queue, kernel and "
			 "answer, and, of several stages on a CPU, each of them within kernel; "
			 "of each build compile; with kernel, user and the client's "
			 "process. "
			 "Workers record only while somebody watches. A user sees the own work, an "
			 "administrator all.",
		 .tables = {own_options, ctl_target_options}},
	.run = run_trace,
};
