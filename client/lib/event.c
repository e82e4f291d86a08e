/* SPDX-License-Identifier: MIT */
/* event.c: interprocess events of this process, which runs wait for and record. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

struct fmha_event {
	unsigned int refs; /* atomic: the handle, and calls that found it by id */
	struct fmha_device *device;
	struct fmha_event *next; /* in the device's list; under its lock */
	uint64_t id;
	uint8_t handle[FMHA_HANDLE_BYTES];

	struct gate gate; /* of the rest */
	uint64_t worker_id, generation;
};

/* ---- the list ---- */

static void list_add(struct fmha_event *event)
{
	struct fmha_device *device = event->device;

	(void)pthread_mutex_lock(&device->lock);
	event->id = ++device->last_event_id;
	event->next = device->events;
	device->events = event;
	(void)pthread_mutex_unlock(&device->lock);
}

/* In a forked child the lock may be held for ever by a thread that does not exist here. */
static void list_remove(struct fmha_event *event)
{
	struct fmha_device *device = event->device;

	if (!client_in_child(device->client))
		(void)pthread_mutex_lock(&device->lock);
	else if (pthread_mutex_trylock(&device->lock) != 0)
		return;
	for (struct fmha_event **p = &device->events; *p; p = &(*p)->next) {
		if (*p == event) {
			*p = event->next;
			break;
		}
	}
	(void)pthread_mutex_unlock(&device->lock);
}

static struct fmha_event *find(struct fmha_device *device, uint64_t id)
{
	struct fmha_event *event;

	(void)pthread_mutex_lock(&device->lock);
	for (event = device->events; event && event->id != id; event = event->next)
		;
	if (event)
		(void)__atomic_add_fetch(&event->refs, 1, __ATOMIC_RELAXED);
	(void)pthread_mutex_unlock(&device->lock);
	return event;
}

/* ---- life ---- */

static struct fmha_event *event_unref(struct fmha_event *event)
{
	if (__atomic_sub_fetch(&event->refs, 1, __ATOMIC_ACQ_REL) != 0)
		return NULL;
	gate_deinit(&event->gate);
	(void)device_unref(event->device);
	free(event);
	return NULL;
}

static struct fmha_event *event_alloc(struct fmha_device *device, const void *handle,
				      struct fmha_error *err)
{
	struct fmha_event *event = calloc(1, sizeof(*event));

	if (!event) {
		(void)fmha_error_set(err, FMHA_ENOMEM, "event: out of memory");
		return NULL;
	}
	if (gate_init(&event->gate, err) < 0) {
		free(event);
		return NULL;
	}
	event->refs = 1;
	event->device = device_ref(device);
	memcpy(event->handle, handle, sizeof(event->handle));
	return event;
}

static int import_at_worker(const struct fmha_event *event, struct connection *c, int64_t deadline,
			    uint64_t *ret_worker_id, struct fmha_error *err)
{
	struct proto_event_import_params params = {.handle_bytes = sizeof(event->handle)};
	struct proto_event_result result;
	bool unsent;
	int r;

	_Static_assert(sizeof(params.handle) == FMHA_HANDLE_BYTES, "handles have one length");
	memcpy(params.handle, event->handle, sizeof(params.handle));
	r = connection_call(c, PROTO_EVENT_IMPORT, &params, -1, deadline, &result, NULL, &unsent,
			    err);
	if (r == 0)
		*ret_worker_id = result.event;
	return r;
}

int event_bind(struct fmha_device *device, uint64_t id, struct connection *connection,
	       uint64_t generation, int64_t deadline, uint64_t *ret_worker_id,
	       struct fmha_error *err)
{
	struct fmha_event *event = find(device, id);
	uint64_t worker_id = 0;
	int r;

	if (!event)
		return fmha_error_set(err, FMHA_ENOENT, "event %llu: no such event of this device",
				      (unsigned long long)id);
	r = gate_lock(&event->gate, deadline, err);
	if (r == 0) {
		if (event->generation != generation) {
			gate_enter(&event->gate);
			r = import_at_worker(event, connection, deadline, &worker_id, err);
			gate_leave(&event->gate);
			if (r == 0) {
				event->worker_id = worker_id;
				event->generation = generation;
			}
		}
		if (r == 0)
			*ret_worker_id = event->worker_id;
		gate_unlock(&event->gate);
	}
	event = event_unref(event);
	return r;
}

/* ---- what a program calls ---- */

int fmha_event_import(struct fmha_device *device, const void *handle, size_t handle_bytes,
		      struct fmha_event **ret_event, struct fmha_error *err)
{
	struct fmha_event *event;
	int64_t deadline;
	int r;

	if (!device || !handle || !ret_event)
		return fmha_error_set(err, FMHA_EINVAL, "fmha_event_import: an argument is NULL");
	if (handle_bytes != FMHA_HANDLE_BYTES)
		return fmha_error_set_field(err, FMHA_EINVAL, "handle_bytes",
					    "handle_bytes %zu: an event's handle has %d",
					    handle_bytes, FMHA_HANDLE_BYTES);
	r = client_check_process(device->client, err);
	if (r < 0)
		return r;
	event = event_alloc(device, handle, err);
	if (!event)
		return FMHA_ENOMEM;
	list_add(event);
	deadline = client_deadline(device->client);
	r = FMHA_EDEVICE;
	for (int attempt = 0; attempt < 2 && r == FMHA_EDEVICE; attempt++) {
		uint64_t generation, worker_id;
		struct connection *c;

		r = device_worker(device, deadline, &c, &generation, err);
		if (r < 0)
			break;
		r = event_bind(device, event->id, c, generation, deadline, &worker_id, err);
		c = connection_unref(c);
	}
	if (r < 0) {
		list_remove(event);
		event = event_unref(event);
		return r;
	}
	*ret_event = event;
	return 0;
}

uint64_t fmha_event_id(const struct fmha_event *event)
{
	return event ? event->id : 0;
}

struct fmha_event *fmha_event_free(struct fmha_event *event)
{
	struct connection *c = NULL;

	if (!event)
		return NULL;
	list_remove(event);
	if (!client_in_child(event->device->client))
		c = device_worker_if(event->device, event->generation);
	if (c) {
		const struct proto_event_release_params params = {event->worker_id};
		bool unsent;

		/* A failure is the end of the connection, which releases everything. */
		(void)connection_call(c, PROTO_EVENT_RELEASE, &params, -1,
				      deadline_after_ms(RELEASE_TIMEOUT_MS), NULL, NULL, &unsent,
				      NULL);
		c = connection_unref(c);
	}
	return event_unref(event);
}
