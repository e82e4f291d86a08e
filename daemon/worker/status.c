/* SPDX-License-Identifier: MIT */
/* status.c: what a worker tells about itself. The front adds it to its own answer. */
#include "run/request.h"
#include "tuner.h"
#include "worker.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/status.h>
#include <device/guard.h>
#include <json/json.h>
#include <proto/error.h>

/* Of the runs that the device has, each since it was given to it. */
static uint64_t session_running_ns(const struct session *session, uint64_t now)
{
	uint64_t sum = 0;

	list_for_each_entry(const struct request, request, &session->running, in_session)
		sum += request->submitted_ns < now ? now - request->submitted_ns : 0;
	return sum;
}

/* Of what it runs, or else of what it ran last; left alone if there is neither. */
static void latest_shape(const struct session *session, char shape[PLAN_SHAPE_BYTES])
{
	const struct census_entry *entry = census_get(&session->worker->plans.census,
						      &session->census);

	if (!list_is_empty(&session->running))
		plan_shape(&container_of(session->running.next, struct request, in_session)
				    ->plan->plan.problem,
			   shape);
	else if (entry)
		memcpy(shape, entry->shape, sizeof(entry->shape));
}

static void add_families(cJSON *root, const struct worker *worker)
{
	cJSON *list = cJSON_AddArrayToObject(root, "families");

	for (int i = 0; i < WORKER_FAMILIES && worker->runs.families[i].name[0]; i++) {
		const struct family_work *family = &worker->runs.families[i];
		cJSON *item = json_add_item(list);

		cJSON_AddStringToObject(item, "family", family->name);
		cJSON_AddNumberToObject(item, "runs", (double)family->n_runs);
		cJSON_AddNumberToObject(item, "flops", family->flops);
		cJSON_AddNumberToObject(item, "bytes", (double)family->bytes);
		cJSON_AddNumberToObject(item, "kernel_ns", (double)family->kernel_ns);
		if (family->roof_ns > 0)
			cJSON_AddNumberToObject(item, "roof_ns", family->roof_ns);
	}
}

static void add_plans(cJSON *root, const struct worker *worker)
{
	cJSON *object = cJSON_AddObjectToObject(root, "plans_by");

	for (int i = 0; i < PLAN_N_BASES; i++)
		cJSON_AddNumberToObject(object, plan_basis_name((enum plan_basis)i),
					(double)worker->plans.n_by[i]);
}

/* How a GPU's memory gets to other processes, the preferred way first. */
static cJSON *sharing_json(const struct device_info *info)
{
	cJSON *root = cJSON_CreateObject(), *by = cJSON_AddArrayToObject(root, "by");

	if (info->descriptors)
		cJSON_AddItemToArray(by, cJSON_CreateString("descriptors"));
	if (info->handles)
		cJSON_AddItemToArray(by, cJSON_CreateString("IPC handles"));
	if (info->no_descriptors[0])
		cJSON_AddStringToObject(root, "no_descriptors", info->no_descriptors);
	if (info->no_handles[0])
		cJSON_AddStringToObject(root, "no_handles", info->no_handles);
	return root;
}

/* All but the sessions. @running_ns: of all of them. Given; NULL: out of memory. */
static char *rest_json(struct worker *worker, uint64_t running_ns)
{
	const struct device_info *info = device_get_info(worker->device);
	const uint64_t *used = worker->accounts.used;
	uint64_t now = clock_ns();
	struct device_code_status codes;
	cJSON *root, *item;

	json_begin();
	root = cJSON_CreateObject();
	cJSON_AddNumberToObject(root, "pid", getpid());
	cJSON_AddNumberToObject(root, "resident_bytes", (double)status_resident_bytes());
	cJSON_AddNumberToObject(root, "uptime_s", (double)((now - worker->started_ns) / NS_PER_S));
	if (info->mps != DEVICE_MPS_NOT_APPLICABLE) {
		cJSON_AddStringToObject(root, "mps",
					info->mps == DEVICE_MPS_IN_USE ? "in use" : "absent");
		cJSON_AddStringToObject(root, "mps_directory", info->mps_directory);
	}
	if (info->no_fences[0])
		cJSON_AddStringToObject(root, "no_fences", info->no_fences);
	if (info->descriptors || info->handles || info->no_handles[0])
		cJSON_AddItemToObject(root, "sharing", sharing_json(info));
	item = cJSON_AddObjectToObject(root, "memory");
	cJSON_AddNumberToObject(item, "buffers", (double)used[ACCOUNT_BUFFERS]);
	cJSON_AddNumberToObject(item, "bytes", (double)used[ACCOUNT_MEMORY]);
	cJSON_AddNumberToObject(item, "sigbus_hits", (double)guard_hits());
	codes = device_code_status(worker->device);
	item = cJSON_AddObjectToObject(root, "code");
	cJSON_AddNumberToObject(item, "kernels", (double)codes.n);
	cJSON_AddNumberToObject(item, "bytes", (double)codes.bytes);
	cJSON_AddNumberToObject(item, "idle", (double)codes.n_idle);
	cJSON_AddNumberToObject(item, "unloaded", (double)codes.n_unloaded);
	item = cJSON_AddObjectToObject(root, "runs");
	cJSON_AddNumberToObject(item, "pending", worker->runs.n_pending);
	cJSON_AddNumberToObject(item, "running_ns", (double)running_ns);
	cJSON_AddNumberToObject(item, "done", (double)worker->runs.n);
	cJSON_AddNumberToObject(item, "failed", (double)worker->runs.n_failed);
	cJSON_AddNumberToObject(item, "cancelled", (double)worker->runs.n_cancelled);
	add_families(root, worker);
	cJSON_AddItemToObject(root, "roof", roof_json(&worker->plans.roof));
	add_plans(root, worker);
	cJSON_AddItemToObject(root, "errors", status_errors(worker->hub.n_errors));
	item = cJSON_AddObjectToObject(root, "latency_ns");
	status_add_histogram(item, "queued", &worker->runs.queued);
	status_add_histogram(item, "kernel", &worker->runs.kernel);
	status_add_histogram(item, "total", &worker->runs.total);
	cJSON_AddItemToObject(root, "tuning", tuner_status_json(worker->tuner));
	cJSON_AddItemToObject(root, "limits", status_limits(&worker->limits));
	if (worker->page->doing.measures)
		cJSON_AddItemToObject(root, "loop", status_loop(&worker->page->doing));
	return json_end(root, false);
}

/* ---- answering ---- */

#define SESSIONS_A_STEP 8
#define SESSION_BYTES   2048 /* of text, at most, and what is between two */

/*
 * {"sessions": [...], and the rest}, each session a line that begins with its uid (front/status.c): thousands of sessions are not put into words in one piece. It is
 * the daemon's own user's time.
 */
struct status_reading {
	struct chore chore;
	struct worker *worker;
	uint32_t id;
	int fd;
	bool begun, failed;
	uint64_t last_session; /* that was written; 0: none */
	uint64_t running_ns, bytes;
};

static double finite_of(double value)
{
	return isfinite(value) ? value : 0;
}

/* In quotes and with escapes; given. NULL: out of memory. */
static char *quoted(const char *text)
{
	json_begin();
	return json_end(cJSON_CreateString(text), false);
}

static int put_session(char text[SESSION_BYTES], const struct session *session, uint64_t now)
{
	char shape[PLAN_SHAPE_BYTES] = "", *client = quoted(session->client);
	int n;

	if (!client)
		return -1;
	latest_shape(session, shape);
	n = snprintf(text, SESSION_BYTES,
		     "{\"uid\":%u,\"session\":%" PRIu64 ",\"pid\":%u,\"client\":%s,\"buffers\":%u,"
		     "\"memory_bytes\":%" PRIu64 ",\"events\":%u,\"plans\":%u,\"waiting\":%u,"
		     "\"running\":%u,\"runs\":%" PRIu64 ",\"flops\":%.15g,\"bytes\":%" PRIu64
		     ",\"kernel_ns\":%" PRIu64 ",\"running_ns\":%" PRIu64
		     ",\"roof_ns\":%.15g%s%s%s,\"bytes_in\":%" PRIu64 ",\"bytes_out\":%" PRIu64 "}",
		     session->uid, session->id, session->pid, client, session->buffers.n_used,
		     session->memory_bytes, session->events.n_used, session->plans.n_used,
		     session->n_waiting, session->n_running, session->n_runs,
		     finite_of(session->flops), session->bytes, session->kernel_ns,
		     session_running_ns(session, now), finite_of(session->roof_ns),
		     shape[0] ? ",\"shape\":\"" : "", shape, shape[0] ? "\"" : "",
		     session->connection.bytes_in, session->connection.bytes_out);
	free(client);
	return n < SESSION_BYTES - 2 ? n : -1;
}

static void reading_put(struct status_reading *reading, const char *text, size_t n)
{
	if (write(reading->fd, text, n) != (ssize_t)n)
		reading->failed = true;
	reading->bytes += n;
}

/* Sessions are in the order of their numbers. Return: whether there are more. */
static bool put_sessions(struct status_reading *reading)
{
	const struct worker *worker = reading->worker;
	char text[SESSIONS_A_STEP * SESSION_BYTES];
	uint64_t now = clock_ns();
	size_t used = 0;
	int n_left = SESSIONS_A_STEP;

	list_for_each_entry(const struct session, session, &worker->sessions, in_sessions) {
		int n;

		if (session->id <= reading->last_session)
			continue;
		if (n_left-- == 0)
			break;
		if (reading->last_session > 0)
			text[used++] = ',';
		text[used++] = '\n';
		n = put_session(text + used, session, now);
		if (n < 0) {
			reading->failed = true;
			return false;
		}
		used += (size_t)n;
		reading->last_session = session->id;
		reading->running_ns += session_running_ns(session, now);
	}
	reading_put(reading, text, used);
	return n_left < 0 && !reading->failed;
}

static void put_rest(struct status_reading *reading)
{
	char *rest = rest_json(reading->worker, reading->running_ns);

	if (!rest)
		reading->failed = true;
	reading_put(reading, "\n],", 3);
	if (rest)
		reading_put(reading, rest + 1, strlen(rest) - 1);
	free(rest);
}

static bool step(struct chore *chore)
{
	struct status_reading *reading = container_of(chore, struct status_reading, chore);
	struct connection *control = &reading->worker->control;
	struct proto_json_result result;
	struct fmha_error err;

	if (!reading->begun) {
		reading->begun = true;
		reading_put(reading, "{\"sessions\":[", strlen("{\"sessions\":["));
		return true;
	}
	if (put_sessions(reading))
		return true;
	put_rest(reading);
	result.size = reading->bytes;
	if (!reading->failed && memfd_seal(reading->fd)) {
		connection_answer(control, reading->id, PROTO_WORKER_STATUS, &result, reading->fd);
	} else {
		(void)fmha_error_set(&err, FMHA_ENOMEM, "status: out of memory");
		connection_answer_error(control, reading->id, &err);
		(void)close(reading->fd);
	}
	free(reading);
	return false;
}

int worker_status(struct worker *worker, uint32_t id, struct fmha_error *err)
{
	struct status_reading *reading = calloc(1, sizeof(*reading));
	struct account *account = account_get(&worker->accounts, geteuid());
	int fd = memfd_create("fmhad", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (!reading || !account || fd < 0) {
		free(reading);
		(void)account_put(account);
		if (fd >= 0)
			(void)close(fd);
		return fmha_error_set(err, FMHA_ENOMEM, "status: out of memory");
	}
	reading->worker = worker;
	reading->id = id;
	reading->fd = fd;
	chore_start(&worker->chores, &reading->chore, account, step);
	(void)account_put(account); /* the chore's own from now on */
	return 0;
}
