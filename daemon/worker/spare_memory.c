/* SPDX-License-Identifier: MIT */
/* spare_memory.c: what a worker and its device keep for the next client or run: given back when nothing runs, refilled when it
 * was taken. */
#include "run/request.h"

#include <malloc.h>

#define TRIM_AFTER_MS 5000

static void trim_memory_run(struct offload *offload)
{
	device_trim_memory(container_of(offload, struct worker, idle.trimming)->device);
	malloc_trim(0);
}

static void trim_memory_done(struct offload *offload)
{
	container_of(offload, struct worker, idle.trimming)->idle.is_trimming = false;
}

/* Hundreds of MiB are milliseconds: another thread's. */
static void trim_memory(struct worker *worker)
{
	if (worker->idle.is_trimming)
		return;
	worker->idle.trimming = (struct offload){.run = trim_memory_run, .done = trim_memory_done};
	worker->idle.is_trimming = offload_start(&worker->offloads, &worker->idle.trimming, NULL) ==
				   0;
}

static void on_trim(uv_timer_t *timer)
{
	struct worker *worker = timer->data;

	if (worker->runs.n_pending > 0)
		return;
	worker->idle.untrimmed = false;
	list_for_each_entry(struct session, session, &worker->sessions, in_sessions) {
		checked_forget(session);
	}
	device_trim(worker->device);
	trim_memory(worker);
}

void worker_trim_soon(struct worker *worker)
{
	if (worker->idle.untrimmed)
		uv_timer_start(&worker->idle.trim_timer, on_trim, TRIM_AFTER_MS, 0);
}

static void refill_run(struct offload *offload)
{
	device_memory_refill(container_of(offload, struct worker, idle.refill)->device);
}

static void refill_done(struct offload *offload)
{
	container_of(offload, struct worker, idle.refill)->idle.refilling = false;
}

static void on_refill(uv_timer_t *timer)
{
	struct worker *worker = timer->data;

	worker->idle.refill = (struct offload){.run = refill_run, .done = refill_done};
	worker->idle.refilling = offload_start(&worker->offloads, &worker->idle.refill, NULL) == 0;
}

void worker_refill(struct worker *worker, uint32_t after_ms)
{
	if (worker->idle.refilling || device_shares_memory(worker->device))
		return;
	worker->idle.refilling = true;
	uv_timer_start(&worker->idle.refill_timer, on_refill, after_ms, 0);
}
