/* SPDX-License-Identifier: MIT */
/*
 * status_view.c: the daemon's status for people: what is served, who uses it, and what is not well,
 * a table each. It leaves out what only programs count with: --all and --json have everything.
 */
#include "status_view.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"

#define CELL 200

enum form { TEXT, COUNT, BYTES, TIME };

struct column {
	const char *path; /* "worker.memory.bytes" */
	enum form form;
	const char *title; /* NULL: the path's last word */
};

static const struct column device_columns[] = {
	{"device", COUNT, NULL},
	{"state", TEXT, NULL},
	{"name", TEXT, NULL},
	{"arch", TEXT, NULL},
	{"worker_pid", COUNT, "worker"},
	{"deaths", COUNT, NULL},
	{"worker.memory.buffers", COUNT, NULL},
	{"worker.memory.bytes", BYTES, "memory"},
	{"worker.code.kernels", COUNT, "loaded"},
	{"worker.code.idle", COUNT, NULL},
	{"worker.runs.done", COUNT, "runs"},
	{"worker.runs.pending", COUNT, NULL},
	{"worker.runs.failed", COUNT, NULL},
	{"worker.latency_ns.kernel.p50", TIME, "kernel p50"},
	{"worker.latency_ns.kernel.p99", TIME, NULL},
	{"tuned.results", COUNT, "tuned"},
	{NULL, TEXT, NULL},
};

static const struct column session_columns[] = {
	{"device", COUNT, NULL}, {"uid", COUNT, NULL},           {"pid", COUNT, NULL},
	{"client", TEXT, NULL},  {"buffers", COUNT, NULL},       {"memory_bytes", BYTES, "memory"},
	{"plans", COUNT, NULL},  {"waiting", COUNT, NULL},       {"running", COUNT, NULL},
	{"runs", COUNT, NULL},   {"kernel_ns", TIME, "kernels"}, {"shape", TEXT, "latest shape"},
	{NULL, TEXT, NULL},
};

static const struct column limit_columns[] = {
	{"limit", TEXT, NULL},  {"of", TEXT, NULL}, {"value", COUNT, NULL},
	{"hits", COUNT, "hit"}, {NULL, TEXT, NULL},
};

/* ---- a table ---- */

static const cJSON *value_at(const cJSON *item, const char *path)
{
	char key[64];

	for (; item && *path; path += *path == '.') {
		size_t n = strcspn(path, ".");

		(void)snprintf(key, sizeof(key), "%.*s", (int)n, path);
		item = ctl_member(item, key);
		path += n;
	}
	return item;
}

static void scaled(double value, double step, const char *const *units, char text[CELL])
{
	while (value >= step && units[1]) {
		value /= step;
		units++;
	}
	(void)snprintf(text, CELL,
		       value < 10 && value != (double)(int)value ? "%.1f %s" : "%.0f %s", value,
		       *units);
}

static const char *cell(const cJSON *row, const struct column *column, char text[CELL])
{
	static const char *const bytes[] = {"B", "KiB", "MiB", "GiB", "TiB", NULL};
	static const char *const times[] = {"ns", "us", "ms", "s", NULL};
	const cJSON *value = value_at(row, column->path);

	if (cJSON_IsString(value))
		(void)snprintf(text, CELL, "%s", value->valuestring);
	else if (!cJSON_IsNumber(value))
		(void)snprintf(text, CELL, "-"); /* a worker that does not answer */
	else if (column->form == BYTES)
		scaled(value->valuedouble, 1024, bytes, text);
	else if (column->form == TIME)
		scaled(value->valuedouble, 1000, times, text);
	else
		(void)snprintf(text, CELL, "%.0f", value->valuedouble);
	return text;
}

static void print_cell(const char *text, size_t width, enum form form, bool last)
{
	if (form == TEXT && last)
		(void)printf("  %s\n", text);
	else
		(void)printf(form == TEXT ? "  %-*s%s" : "  %*s%s", (int)width, text,
			     last ? "\n" : "");
}

static const char *title_of(const struct column *column)
{
	const char *dot = strrchr(column->path, '.');

	return column->title ? column->title : dot ? dot + 1 : column->path;
}

/* @rows: a list of objects. */
static void status_view_print_table(const cJSON *rows, const struct column *columns)
{
	size_t widths[24];
	char text[CELL];
	size_t n_columns = 0;
	const cJSON *row;

	while (columns[n_columns].path)
		n_columns++;
	for (size_t i = 0; i < n_columns; i++) {
		widths[i] = strlen(title_of(&columns[i]));
		cJSON_ArrayForEach(row, rows)
		{
			size_t n = strlen(cell(row, &columns[i], text));

			widths[i] = n > widths[i] ? n : widths[i];
		}
	}
	for (size_t i = 0; i < n_columns; i++)
		print_cell(title_of(&columns[i]), widths[i], columns[i].form, i + 1 == n_columns);
	cJSON_ArrayForEach(row, rows)
	{
		for (size_t i = 0; i < n_columns; i++)
			print_cell(cell(row, &columns[i], text), widths[i], columns[i].form,
				   i + 1 == n_columns);
	}
}

/* ---- what is in them ---- */

/* The sessions of all devices, each with its device. */
static cJSON *sessions_of(const cJSON *status)
{
	const cJSON *device, *session;
	cJSON *list = cJSON_CreateArray();

	cJSON_ArrayForEach(device, ctl_member(status, "devices"))
	{
		cJSON_ArrayForEach(session, value_at(device, "worker.sessions"))
		{
			cJSON *copy = cJSON_Duplicate(session, true);

			cJSON_AddNumberToObject(copy, "device", ctl_number(device, "device"));
			cJSON_AddItemToArray(list, copy);
		}
	}
	return list;
}

static void add_limits(cJSON *list, const cJSON *limits, const char *of, bool all)
{
	const cJSON *limit;

	cJSON_ArrayForEach(limit, limits)
	{
		cJSON *copy;

		if (!all && ctl_number(limit, "hits") == 0)
			continue;
		copy = cJSON_Duplicate(limit, true);
		cJSON_AddStringToObject(copy, "limit", limit->string);
		cJSON_AddStringToObject(copy, "of", of);
		cJSON_AddItemToArray(list, copy);
	}
}

static cJSON *limits_of(const cJSON *status, bool all)
{
	cJSON *list = cJSON_CreateArray();
	const cJSON *device;
	char of[32];

	add_limits(list, value_at(status, "front.limits"), "front", all);
	cJSON_ArrayForEach(device, ctl_member(status, "devices"))
	{
		(void)snprintf(of, sizeof(of), "device %.0f", ctl_number(device, "device"));
		add_limits(list, value_at(device, "worker.limits"), of, all);
	}
	return list;
}

static void print_front(const cJSON *status)
{
	const cJSON *front = ctl_member(status, "front");
	const cJSON *compile = ctl_member(front, "compile");
	const struct column size = {"cache.bytes", BYTES, NULL};
	char text[CELL];

	(void)printf("fmhad %s: %s, pid %.0f, up %.0f s\n", ctl_text(status, "version"),
		     ctl_text(status, "state"), ctl_number(front, "pid"),
		     ctl_number(front, "uptime_s"));
	(void)printf("connections: %.0f open, %.0f accepted, %.0f refused\n",
		     ctl_number(front, "connections"), ctl_number(front, "accepted"),
		     ctl_number(front, "refused"));
	(void)printf("compiles: %.0f built, %.0f from the cache (%.0f entries, %s), %.0f failed, "
		     "%.0f running, %.0f queued\n",
		     ctl_number(compile, "built"), ctl_number(compile, "hits"),
		     ctl_number(value_at(compile, "cache"), "entries"), cell(compile, &size, text),
		     ctl_number(compile, "failed"), ctl_number(compile, "running"),
		     ctl_number(compile, "queued"));
}

static void print_quarantined(const cJSON *device)
{
	const cJSON *item;

	cJSON_ArrayForEach(item, ctl_member(device, "quarantined"))
	{
		const cJSON *uid = ctl_member(item, "uid");
		const char *kernel = ctl_text(item, "kernel");

		(void)printf("device %.0f: quarantined for %.0f s: %s",
			     ctl_number(device, "device"), ctl_number(item, "remaining_s"),
			     *kernel ? kernel : "opening it");
		if (uid)
			(void)printf(", for uid %.0f", uid->valuedouble);
		(void)putchar('\n');
	}
}

/* A line for each thing that somebody should see to; nothing when all is well. */
static void print_faults(const cJSON *status)
{
	const cJSON *cache = value_at(status, "front.compile.cache"), *device;

	if (*ctl_text(cache, "reason"))
		(void)printf("cache: %s: %s\n", ctl_text(cache, "state"),
			     ctl_text(cache, "reason"));
	cJSON_ArrayForEach(device, ctl_member(status, "devices"))
	{
		const cJSON *tuned = ctl_member(device, "tuned");
		double index = ctl_number(device, "device");

		if (*ctl_text(device, "last_death"))
			(void)printf("device %.0f: last death: %s\n", index,
				     ctl_text(device, "last_death"));
		if (*ctl_text(tuned, "reason"))
			(void)printf("device %.0f: measured times: %s: %s\n", index,
				     ctl_text(tuned, "state"), ctl_text(tuned, "reason"));
		print_quarantined(device);
	}
}

void status_view(const cJSON *status, bool all_limits)
{
	cJSON *sessions = sessions_of(status), *limits = limits_of(status, all_limits);

	print_front(status);
	print_faults(status);
	(void)printf("\ndevices\n");
	status_view_print_table(ctl_member(status, "devices"), device_columns);
	if (cJSON_GetArraySize(sessions) > 0) {
		(void)printf("\nsessions\n");
		status_view_print_table(sessions, session_columns);
	}
	if (cJSON_GetArraySize(limits) > 0) {
		(void)printf("\nlimits\n");
		status_view_print_table(limits, limit_columns);
	}
	cJSON_Delete(sessions);
	cJSON_Delete(limits);
}
