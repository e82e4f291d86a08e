/* SPDX-License-Identifier: MIT */
/* health.c: how the workers are, and what the log and the service manager are told of it. */
#include "process.h"

#include <base/log.h>
#include <base/notify.h>

#define STARTS_UNTIL_FAILED 3

const char *worker_state_name(enum worker_state state)
{
	static const char *const names[] = {[WORKER_STARTING] = "starting",
					    [WORKER_READY] = "ready",
					    [WORKER_RESTARTING] = "restarting",
					    [WORKER_FAILED] = "failed",
					    [WORKER_STOPPED] = "stopped"};

	return names[state];
}

uint32_t worker_slot_pid(const struct worker_slot *slot)
{
	return slot->process ? (uint32_t)slot->process->process.pid : 0;
}

bool worker_slot_has_failed(const struct worker_slot *slot)
{
	return slot->n_failed_starts >= STARTS_UNTIL_FAILED;
}

/* The first device that is out of order, or NULL. */
static const struct worker_slot *failed_slot(const struct front *front)
{
	for (uint32_t i = 0; i < front->n_slots; i++)
		if (worker_slot_has_failed(&front->slots[i]))
			return &front->slots[i];
	return NULL;
}

static uint32_t count_ready(const struct front *front)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < front->n_slots; i++)
		n += front->slots[i].state == WORKER_READY;
	return n;
}

/* Every device is known, be it as broken: a machine with a bad driver gets a daemon that says so.
 */
static bool is_settled(const struct front *front)
{
	for (uint32_t i = 0; i < front->n_slots; i++)
		if (front->slots[i].state != WORKER_READY &&
		    !worker_slot_has_failed(&front->slots[i]))
			return false;
	return true;
}

const char *front_state_name(const struct front *front)
{
	if (front->draining)
		return "stopping";
	if (!front->announced)
		return "starting";
	return failed_slot(front) ? "degraded" : "ready";
}

/* @first: the daemon has just come up. */
static void log_health(struct front *front, bool first)
{
	bool degraded = failed_slot(front) != NULL;

	if (degraded && (first || !front->degraded))
		log_warning("degraded on %s: %u of %u devices ready", front->config.socket,
			    count_ready(front), front->n_slots);
	else if (!degraded && (first || front->degraded))
		log_info("ready on %s", front->config.socket);
	front->degraded = degraded;
}

void front_announce(struct front *front)
{
	const struct worker_slot *failed = failed_slot(front);
	bool first = !front->announced && is_settled(front);
	uint32_t n_ready = count_ready(front);

	if (front->draining)
		return;
	if (first) {
		front->announced = true;
		notify_send("READY=1");
	}
	if (front->announced)
		log_health(front, first);
	if (failed)
		notify_send("STATUS=degraded: %u of %u devices ready; device %u: %s", n_ready,
			    front->n_slots, failed->index, failed->reason);
	else
		notify_send("STATUS=%u of %u devices ready", n_ready, front->n_slots);
}
