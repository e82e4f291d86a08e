/* SPDX-License-Identifier: MIT */
/* session.c: how long a session lives: until its connection is closed, and what it has under way
 * has ended. */
#include <stddef.h>
#include <stdlib.h>

#include <base/clock.h>
#include <base/log.h>
#include <proto/error.h>

#include "run/request.h"
#include "table.h"
#include "worker_registry.h"

/* ---- table ---- */

#define FIRST_SLOTS 16

static int table_grow(struct table *table)
{
	uint32_t n = table->n_slots ? table->n_slots * 2 : FIRST_SLOTS;
	struct table_slot *slots = realloc(table->slots, n * sizeof(*slots));

	if (!slots)
		return -1;
	for (uint32_t i = table->n_slots; i < n; i++)
		slots[i] = (struct table_slot){.generation = 1, .next_free = i + 1 < n ? i + 2 : 0};
	table->first_free = table->n_slots + 1;
	table->slots = slots;
	table->n_slots = n;
	return 0;
}

uint64_t table_add(struct table *table, void *object)
{
	struct table_slot *slot;
	uint32_t number;

	if (!table->first_free && table_grow(table) < 0)
		return 0;
	number = table->first_free;
	slot = &table->slots[number - 1];
	table->first_free = slot->next_free;
	slot->object = object;
	table->n_used++;
	return (uint64_t)slot->generation << 32 | number;
}

static struct table_slot *table_find_slot(const struct table *table, uint64_t id)
{
	uint32_t number = (uint32_t)id;
	struct table_slot *slot;

	if (number == 0 || number > table->n_slots)
		return NULL;
	slot = &table->slots[number - 1];
	return slot->object && slot->generation == (uint32_t)(id >> 32) ? slot : NULL;
}

void *table_get(const struct table *table, uint64_t id)
{
	struct table_slot *slot = table_find_slot(table, id);

	return slot ? slot->object : NULL;
}

void *table_replace(struct table *table, uint64_t id, void *object)
{
	struct table_slot *slot = table_find_slot(table, id);
	void *old = slot->object;

	slot->object = object;
	return old;
}

static void *remove_slot(struct table *table, struct table_slot *slot)
{
	void *object = slot->object;

	slot->object = NULL;
	slot->generation++; /* after 2^32 reuses of one slot an old id could match: accepted */
	slot->next_free = table->first_free;
	table->first_free = (uint32_t)(slot - table->slots) + 1;
	table->n_used--;
	return object;
}

void *table_remove(struct table *table, uint64_t id)
{
	struct table_slot *slot = table_find_slot(table, id);

	return slot ? remove_slot(table, slot) : NULL;
}

void *table_pop(struct table *table)
{
	if (table->n_used == 0)
		return NULL;
	while (!table->slots[table->n_popped].object)
		table->n_popped++;
	return remove_slot(table, &table->slots[table->n_popped]);
}

void table_deinit(struct table *table)
{
	free(table->slots);
	*table = (struct table){0};
}

/* ---- quarantine ---- */

/* For whom kernels are chosen, and which of them nobody, or not that user, gets. */

/* As the front has it now. */
static const struct worker_quarantine *quarantine_of(struct worker *worker)
{
	struct worker_plans *plans = &worker->plans;

	if (atomic_load(&worker->page->quarantine_version) != plans->quarantine_version)
		plans->quarantine_version = worker_page_get_quarantine(worker->page,
								       &plans->quarantine);
	return &plans->quarantine;
}

void kernels_mark_quarantine(struct worker *worker)
{
	const struct worker_quarantine *what = quarantine_of(worker);
	uint64_t now = clock_ns();

	worker->plans.marked_version = worker->plans.quarantine_version;
	worker->plans.marked_until_ns = UINT64_MAX;
	registry_clear_quarantine(worker->plans.registry);
	for (uint32_t i = 0; i < what->n; i++) {
		const struct worker_quarantined *entry = &what->list[i];

		if (!entry->everybody || now >= entry->until_ns)
			continue;
		if (registry_quarantine(worker->plans.registry, entry->kernel, NULL) < 0)
			log_warning("quarantined kernel %s is not in the registry", entry->kernel);
		if (entry->until_ns < worker->plans.marked_until_ns)
			worker->plans.marked_until_ns = entry->until_ns;
	}
}

uint64_t kernels_locate(void *tensors, const struct fmha_tensor *tensor)
{
	const struct session *session = tensors;
	const struct buffer *buffer = session ? table_get(&session->buffers, tensor->buffer) : NULL;

	return (buffer ? (uintptr_t)buffer->memory.device : 0) + tensor->offset;
}

void kernels_act_for(struct session *session, bool local)
{
	struct worker *worker = session->worker;

	worker->plans.acting_uid = session->uid;
	worker->plans.device.tensors = local ? NULL : session;
	if (worker->plans.registry &&
	    (clock_ns() >= worker->plans.marked_until_ns ||
	     atomic_load(&worker->page->quarantine_version) != worker->plans.marked_version))
		kernels_mark_quarantine(worker);
}

bool kernels_is_quarantined(void *worker_pointer, const char *kernel, uint64_t code)
{
	struct worker *worker = worker_pointer;

	return worker_quarantine_has(quarantine_of(worker), worker->plans.acting_uid, kernel, code,
				     clock_ns());
}

void session_freep(struct session **at)
{
	struct session *session = *at;

	if (!session)
		return;
	checked_forget(session);
	device_stream_free(session->worker->device, session->fetches);
	device_stream_free(session->worker->device, session->stream);
	fair_session_deinit(&session->turn);
	table_deinit(&session->buffers);
	table_deinit(&session->events);
	table_deinit(&session->plans);
	if (session->account) {
		account_release(session->account, ACCOUNT_SESSIONS, 1);
		account_put(session->account);
	}
	free(session);
}

void session_release(struct session *session)
{
	if (session->closed && session->n_running == 0 && session->n_offloads == 0)
		session_freep(&session);
}

void session_offload_ended(struct session *session)
{
	session->n_offloads--;
	session_release(session);
}

void session_offload_late(struct session *session, uint32_t request, const struct fmha_error *err)
{
	if (!session->hung_up)
		connection_answer_error(&session->connection, request, err);
	session_offload_ended(session);
}

int session_has_room(struct session *session, enum limit limit, const struct table *table,
		     const char *what, struct fmha_error *err)
{
	struct limits *limits = &session->worker->limits;

	if (!limit_exceeded(limits, limit, (uint64_t)table->n_used + 1))
		return 0;
	return fmha_error_set(err, FMHA_EQUOTA, "more than %llu %s on one connection",
			      (unsigned long long)limits->value[limit], what);
}
