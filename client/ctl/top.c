/* SPDX-License-Identifier: MIT */
/* top.c: who keeps the devices busy: two answers to status, and what has happened between them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "ctl.h"
#include "json.h"

struct top {
	struct ctl_target target;
	double interval_s;
	int64_t count; /* 0: endless */
};

static const struct cli_option own_options[] = {
	{"interval", 'i', "SECS", "between two screens (default 1)",
	 CLI_RANGE(REAL, struct top, interval_s, 0.05, 3600)},
	{"count", 'n', "N", "screens (default: endless on a terminal, else 1)",
	 CLI_RANGE(INT, struct top, count, 1, 1000000000)},
	CLI_END};

/* The status at one moment. */
struct sample {
	cJSON *status;
	int64_t taken_ns;
};

/* The element of @array whose @key is @value; NULL: there is none. */
static const cJSON *element(const cJSON *array, const char *key, double value)
{
	const cJSON *item;

	cJSON_ArrayForEach(item, array)
	{
		if (ctl_number(item, key) == value)
			return item;
	}
	return NULL;
}

/* What a counter has grown by; one that began anew counts from 0. */
static double growth(const cJSON *now, const cJSON *before, const char *key)
{
	double value = ctl_number(now, key), last = ctl_number(before, key);

	return value >= last ? value - last : value;
}

struct rates {
	double runs, flops, bytes, busy_ns, roof_ns;
};

/* Runs that go on count as far as they have come; when they end, kernel_ns takes over. */
static void add_running(struct rates *rates, const cJSON *now, const cJSON *before)
{
	rates->busy_ns += ctl_number(now, "running_ns") - ctl_number(before, "running_ns");
	if (rates->busy_ns < 0)
		rates->busy_ns = 0;
}

/* @now, @before: a family of kernels, or a session. */
static void add_growth(struct rates *rates, const cJSON *now, const cJSON *before)
{
	rates->runs += growth(now, before, "runs");
	rates->flops += growth(now, before, "flops");
	rates->bytes += growth(now, before, "bytes");
	rates->busy_ns += growth(now, before, "kernel_ns");
	rates->roof_ns += growth(now, before, "roof_ns");
}

static struct rates device_rates(const cJSON *now, const cJSON *before)
{
	const cJSON *families = ctl_member(now, "families"), *family;
	const cJSON *old = ctl_member(before, "families");
	struct rates rates = {0};
	int i = 0;

	/* Families are only added, at the end. */
	cJSON_ArrayForEach(family, families)
		add_growth(&rates, family, cJSON_GetArrayItem(old, i++));
	add_running(&rates, ctl_member(now, "runs"), ctl_member(before, "runs"));
	return rates;
}

/* ---- one screen ---- */

static void add_rates(cJSON *item, const struct rates *rates, double seconds)
{
	cJSON_AddNumberToObject(item, "runs_per_s", rates->runs / seconds);
	cJSON_AddNumberToObject(item, "tflops_per_s", rates->flops / seconds / 1e12);
	cJSON_AddNumberToObject(item, "gb_per_s", rates->bytes / seconds / 1e9);
	cJSON_AddNumberToObject(item, "device_time", rates->busy_ns / seconds / 1e9);
	if (rates->roof_ns > 0 && rates->busy_ns > 0)
		cJSON_AddNumberToObject(item, "of_roof", rates->roof_ns / rates->busy_ns);
}

static cJSON *add_device(cJSON *list, const cJSON *device, const cJSON *before, double seconds)
{
	const cJSON *worker = ctl_member(device, "worker");
	const cJSON *old = ctl_member(before, "worker");
	struct rates rates = device_rates(worker, old);
	cJSON *item = ctl_add_item(list);

	cJSON_AddNumberToObject(item, "device", ctl_number(device, "device"));
	cJSON_AddStringToObject(item, "name", ctl_text(device, "name"));
	cJSON_AddStringToObject(item, "state", ctl_text(device, "state"));
	add_rates(item, &rates, seconds);
	cJSON_AddNumberToObject(item, "queue", ctl_number(ctl_member(worker, "runs"), "pending"));
	return item;
}

static void add_sessions(cJSON *list, const cJSON *device, const cJSON *before, double seconds)
{
	const cJSON *worker = ctl_member(device, "worker"), *session;
	const cJSON *old = ctl_member(ctl_member(before, "worker"), "sessions");

	cJSON_ArrayForEach(session, ctl_member(worker, "sessions"))
	{
		const cJSON *same = element(old, "session", ctl_number(session, "session"));
		cJSON *item = ctl_add_item(list);
		struct rates rates = {0};

		add_growth(&rates, session, same);
		add_running(&rates, session, same);

		cJSON_AddNumberToObject(item, "pid", ctl_number(session, "pid"));
		cJSON_AddNumberToObject(item, "uid", ctl_number(session, "uid"));
		cJSON_AddNumberToObject(item, "device", ctl_number(device, "device"));
		cJSON_AddStringToObject(item, "client", ctl_text(session, "client"));
		cJSON_AddStringToObject(item, "shape", ctl_text(session, "shape"));
		add_rates(item, &rates, seconds);
		cJSON_AddNumberToObject(item, "waiting", ctl_number(session, "waiting"));
		cJSON_AddNumberToObject(item, "running", ctl_number(session, "running"));
		cJSON_AddNumberToObject(item, "plans", ctl_number(session, "plans"));
		cJSON_AddNumberToObject(item, "memory_bytes", ctl_number(session, "memory_bytes"));
	}
}

/* {"devices": [...], "sessions": [...]}; given. */
static cJSON *difference(const struct sample *now, const struct sample *before)
{
	double seconds = (double)(now->taken_ns - before->taken_ns) * 1e-9;
	const cJSON *devices = ctl_member(now->status, "devices"), *device;
	const cJSON *old = ctl_member(before->status, "devices");
	cJSON *screen = cJSON_CreateObject();
	cJSON *device_list = cJSON_AddArrayToObject(screen, "devices");
	cJSON *session_list = cJSON_AddArrayToObject(screen, "sessions");

	cJSON_AddStringToObject(screen, "state", ctl_text(now->status, "state"));
	cJSON_ArrayForEach(device, devices)
	{
		const cJSON *same = element(old, "device", ctl_number(device, "device"));

		(void)add_device(device_list, device, same, seconds);
		add_sessions(session_list, device, same, seconds);
	}
	return screen;
}

static int compare_sessions(const void *a, const void *b)
{
	const cJSON *x = *(const cJSON *const *)a, *y = *(const cJSON *const *)b;
	double left = ctl_number(x, "device_time"), right = ctl_number(y, "device_time");

	return (left < right) - (left > right);
}

/* The busiest first. */
static void print_sessions(const cJSON *list)
{
	size_t n = (size_t)cJSON_GetArraySize(list), i = 0;
	const cJSON **sorted = calloc(n + 1, sizeof(const cJSON *)), *item;

	if (!sorted)
		return;
	cJSON_ArrayForEach(item, list) sorted[i++] = item;
	qsort(sorted, n, sizeof(const cJSON *), compare_sessions);
	(void)printf("\n%8s %8s %6s %10s %9s %9s %5s %5s %5s %9s  %-16s %s\n", "pid", "uid",
		     "device", "runs/s", "TFLOP/s", "GB/s", "busy", "wait", "run", "MiB", "client",
		     "latest shape");
	for (i = 0; i < n; i++)
		(void)printf(
			"%8.0f %8.0f %6.0f %10.1f %9.3f %9.2f %4.0f%% %5.0f %5.0f %9.1f  %-16s "
			"%s\n",
			ctl_number(sorted[i], "pid"), ctl_number(sorted[i], "uid"),
			ctl_number(sorted[i], "device"), ctl_number(sorted[i], "runs_per_s"),
			ctl_number(sorted[i], "tflops_per_s"), ctl_number(sorted[i], "gb_per_s"),
			100 * ctl_number(sorted[i], "device_time"),
			ctl_number(sorted[i], "waiting"), ctl_number(sorted[i], "running"),
			ctl_number(sorted[i], "memory_bytes") / 1048576,
			ctl_text(sorted[i], "client"), ctl_text(sorted[i], "shape"));
	free(sorted);
}

static void print_screen(const cJSON *screen, bool redraw)
{
	const cJSON *device;
	char now[32], share[SHARE_BYTES];
	struct tm local;
	time_t clock = time(NULL);

	(void)strftime(now, sizeof(now), "%H:%M:%S", localtime_r(&clock, &local));
	(void)printf("%sfmhad %s, %s\n\n", redraw ? "\033[H\033[J" : "", ctl_text(screen, "state"),
		     now);
	(void)printf("%6s %-10s %10s %9s %9s %7s %7s %6s  %s\n", "device", "state", "runs/s",
		     "TFLOP/s", "GB/s", "busy", "of roof", "queue", "name");
	cJSON_ArrayForEach(device, ctl_member(screen, "devices"))
	{
		(void)printf("%6.0f %-10s %10.1f %9.3f %9.2f %6.0f%% %7s %6.0f  %s\n",
			     ctl_number(device, "device"), ctl_text(device, "state"),
			     ctl_number(device, "runs_per_s"), ctl_number(device, "tflops_per_s"),
			     ctl_number(device, "gb_per_s"),
			     100 * ctl_number(device, "device_time"),
			     ctl_share(device, "of_roof", share), ctl_number(device, "queue"),
			     ctl_text(device, "name"));
	}
	print_sessions(ctl_member(screen, "sessions"));
	(void)fflush(stdout);
}

/* ---- the command ---- */

static int take_sample(struct fmha_client *client, struct sample *sample)
{
	struct fmha_error err = {0};
	char *json;

	if (fmha_client_status(client, &json, &err) < 0)
		return ctl_error(&err);
	sample->taken_ns = ctl_now_ns();
	sample->status = cJSON_Parse(json);
	free(json);
	if (sample->status)
		return CTL_OK;
	(void)fputs("fmhactl: the daemon's status is no JSON\n", stderr);
	return CTL_REFUSED;
}

static int show(const struct top *top, const struct sample *now, const struct sample *before)
{
	cJSON *screen = difference(now, before);

	if (top->target.json)
		return ctl_print_json(screen);
	print_screen(screen, isatty(STDOUT_FILENO));
	cJSON_Delete(screen);
	return CTL_OK;
}

static int watch(const struct top *top, struct fmha_client *client)
{
	struct timespec pause = {.tv_sec = (time_t)top->interval_s};
	struct sample before = {0}, now = {0};
	int r = take_sample(client, &before);

	pause.tv_nsec = (long)((top->interval_s - (double)pause.tv_sec) * 1e9);
	for (int64_t i = 0; r == CTL_OK && (top->count == 0 || i < top->count); i++) {
		(void)nanosleep(&pause, NULL);
		r = take_sample(client, &now);
		if (r != CTL_OK)
			break;
		r = show(top, &now, &before);
		cJSON_Delete(before.status);
		before = now;
	}
	cJSON_Delete(before.status);
	return r;
}

static int run_top(int argc, char **argv)
{
	struct top top = {.target = CTL_TARGET_INIT, .interval_s = 1};
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	int r = ctl_options(&ctl_top, argc, argv, &top.target, NULL, &top);

	if (r != 0)
		return r;
	if (top.count == 0 && (top.target.json || !isatty(STDOUT_FILENO)))
		top.count = 1;
	r = ctl_connect(&top.target, &client);
	return r == 0 ? watch(&top, client) : r;
}

const struct ctl_command ctl_top = {
	.usage =
		{.name = "fmhactl top",
		 .brief = "who keeps the devices busy, live",
		 .synopsis = "[--interval SECS] [--count N] [--json] [OPTION...]",
		 .text = "Shows what happened on each device since the last screen: runs, floating "
			 "point "
			 "operations and least memory traffic a second, the share of time that "
			 "runs had the device (of several at a time each counts), how near they "
			 "came to what the device's roof allows, runs that wait "
			 "or are computed; and the same of sessions, the busiest first, with "
			 "the shape of the latest run. Of sessions a user "
			 "sees the own ones, an administrator all. Nothing is redrawn unless "
			 "stdout "
			 "is a terminal.",
		 .tables = {own_options, ctl_json_option, ctl_target_options}},
	.run = run_top,
};
