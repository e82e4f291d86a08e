/* SPDX-License-Identifier: MIT */
/* status.c: what a worker tells about itself. The front adds it to its own answer. */
#include "request.h"
#include "tuner.h"
#include "worker.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/status.h>
#include <device/guard.h>
#include <json/json.h>

/* Of the runs that the device has, each since it was given to it. */
static uint64_t running_ns(const struct session *session, uint64_t now)
{
	uint64_t sum = 0;

	list_for_each_entry(const struct request, request, &session->running, in_session)
		sum += request->submitted_ns < now ? now - request->submitted_ns : 0;
	return sum;
}

/* Of what it runs, or else of what it ran last; left alone if there is neither. */
static void latest_shape(const struct session *session, char shape[PLAN_SHAPE_BYTES])
{
	const struct census_entry *entry = census_get(&session->worker->census, &session->census);

	if (!list_is_empty(&session->running))
		plan_shape(&container_of(session->running.next, struct request, in_session)
				    ->plan->plan.problem,
			   shape);
	else if (entry)
		memcpy(shape, entry->shape, sizeof(entry->shape));
}

static void add_session(cJSON *list, const struct session *session, uint64_t now)
{
	cJSON *item = cJSON_CreateObject();
	char shape[PLAN_SHAPE_BYTES] = "";

	latest_shape(session, shape);

	cJSON_AddNumberToObject(item, "session", (double)session->id);
	cJSON_AddNumberToObject(item, "uid", session->uid);
	cJSON_AddNumberToObject(item, "pid", session->pid);
	cJSON_AddStringToObject(item, "client", session->client);
	cJSON_AddNumberToObject(item, "buffers", session->buffers.n_used);
	cJSON_AddNumberToObject(item, "memory_bytes", (double)session->memory_bytes);
	cJSON_AddNumberToObject(item, "events", session->events.n_used);
	cJSON_AddNumberToObject(item, "plans", session->plans.n_used);
	cJSON_AddNumberToObject(item, "waiting", session->n_waiting);
	cJSON_AddNumberToObject(item, "running", session->n_running);
	cJSON_AddNumberToObject(item, "runs", (double)session->n_runs);
	cJSON_AddNumberToObject(item, "flops", session->flops);
	cJSON_AddNumberToObject(item, "bytes", (double)session->bytes);
	cJSON_AddNumberToObject(item, "kernel_ns", (double)session->kernel_ns);
	cJSON_AddNumberToObject(item, "running_ns", (double)running_ns(session, now));
	cJSON_AddNumberToObject(item, "roof_ns", session->roof_ns);
	if (shape[0])
		cJSON_AddStringToObject(item, "shape", shape);
	cJSON_AddNumberToObject(item, "bytes_in", (double)session->connection.bytes_in);
	cJSON_AddNumberToObject(item, "bytes_out", (double)session->connection.bytes_out);
	cJSON_AddItemToArray(list, item);
}

static void add_families(cJSON *root, const struct worker *worker)
{
	cJSON *list = cJSON_AddArrayToObject(root, "families");

	for (int i = 0; i < WORKER_FAMILIES && worker->families[i].name[0]; i++) {
		const struct family_work *family = &worker->families[i];
		cJSON *item = cJSON_CreateObject();

		cJSON_AddStringToObject(item, "family", family->name);
		cJSON_AddNumberToObject(item, "runs", (double)family->n_runs);
		cJSON_AddNumberToObject(item, "flops", family->flops);
		cJSON_AddNumberToObject(item, "bytes", (double)family->bytes);
		cJSON_AddNumberToObject(item, "kernel_ns", (double)family->kernel_ns);
		if (family->roof_ns > 0)
			cJSON_AddNumberToObject(item, "roof_ns", family->roof_ns);
		cJSON_AddItemToArray(list, item);
	}
}

static void add_plans(cJSON *root, const struct worker *worker)
{
	cJSON *object = cJSON_AddObjectToObject(root, "plans_by");

	for (int i = 0; i < PLAN_N_BASES; i++)
		cJSON_AddNumberToObject(object, plan_basis_name((enum plan_basis)i),
					(double)worker->n_plans_by[i]);
}

char *worker_status_json(struct worker *worker)
{
	const struct device_info *info = device_get_info(worker->device);
	const uint64_t *used = worker->accounts.used;
	uint64_t now = clock_ns(), running = 0;
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
	item = cJSON_AddArrayToObject(root, "sessions");
	list_for_each_entry(const struct session, session, &worker->sessions, in_sessions) {
		add_session(item, session, now);
		running += running_ns(session, now);
	}
	item = cJSON_AddObjectToObject(root, "memory");
	cJSON_AddNumberToObject(item, "buffers", (double)used[ACCOUNT_BUFFERS]);
	cJSON_AddNumberToObject(item, "bytes", (double)used[ACCOUNT_MEMORY]);
	cJSON_AddNumberToObject(item, "sigbus_hits", (double)guard_hits());
	item = cJSON_AddObjectToObject(root, "code");
	cJSON_AddNumberToObject(item, "kernels", (double)worker->codes.n);
	cJSON_AddNumberToObject(item, "bytes", (double)worker->codes.bytes);
	cJSON_AddNumberToObject(item, "idle", device_count_idle(worker->device));
	cJSON_AddNumberToObject(item, "unloaded", (double)worker->codes.n_dropped);
	item = cJSON_AddObjectToObject(root, "runs");
	cJSON_AddNumberToObject(item, "pending", worker->n_pending);
	cJSON_AddNumberToObject(item, "running_ns", (double)running);
	cJSON_AddNumberToObject(item, "done", (double)worker->n_runs);
	cJSON_AddNumberToObject(item, "failed", (double)worker->n_failed);
	cJSON_AddNumberToObject(item, "cancelled", (double)worker->n_cancelled);
	add_families(root, worker);
	cJSON_AddItemToObject(root, "roof", roof_json(&worker->roof));
	add_plans(root, worker);
	cJSON_AddItemToObject(root, "errors", status_errors(worker->hub.n_errors));
	item = cJSON_AddObjectToObject(root, "latency_ns");
	status_add_histogram(item, "queued", &worker->queued);
	status_add_histogram(item, "kernel", &worker->kernel);
	status_add_histogram(item, "total", &worker->total);
	cJSON_AddItemToObject(root, "tuning", tuner_status_json(worker->tuner));
	cJSON_AddItemToObject(root, "limits", status_limits(&worker->limits));
	if (worker->page->doing.measures)
		cJSON_AddItemToObject(root, "loop", status_loop(&worker->page->doing));
	return json_end(root, false);
}
