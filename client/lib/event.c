/* SPDX-License-Identifier: MIT */
/* event.c: interprocess events of this process, which runs wait for and record. */
#include "client.h"

#include <stdlib.h>
#include <string.h>

struct fmha_event {
	unsigned int refs; /* atomic: the handle, and calls that found it by id */
	struct fmha_device *device;
	struct fmha_event *next; /* in the device's list; under its lock */
	uint64_t id;
	uint8_t handle[FMHA_HANDLE_BYTES];

	struct registration at_worker;
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

static struct fmha_event *event_find(struct fmha_device *device, uint64_t id)
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
	timed_lock_deinit(&event->at_worker.lock);
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
	if (timed_lock_init(&event->at_worker.lock, err) < 0) {
		free(event);
		return NULL;
	}
	event->refs = 1;
	event->device = device_ref(device);
	memcpy(event->handle, handle, sizeof(event->handle));
	return event;
}

static int import_at_worker(void *object, struct connection *c, uint64_t generation,
			    int64_t deadline, uint64_t *ret_worker_id, struct fmha_error *err)
{
	const struct fmha_event *event = object;
	struct proto_event_import_params params = {.handle_bytes = sizeof(event->handle)};
	struct proto_event_result result;
	int r;

	(void)generation;
	_Static_assert(sizeof(params.handle) == FMHA_HANDLE_BYTES, "handles have one length");
	memcpy(params.handle, event->handle, sizeof(params.handle));
	r = connection_call(c, PROTO_EVENT_IMPORT, &params, -1, deadline, &result, NULL, err);
	if (r == 0)
		*ret_worker_id = result.event;
	return r;
}

int event_bind(struct fmha_device *device, uint64_t id, struct connection *connection,
	       uint64_t generation, int64_t deadline, uint64_t *ret_worker_id,
	       struct fmha_error *err)
{
	struct fmha_event *event = event_find(device, id);
	int r;

	if (!event)
		return fmha_error_set(err, FMHA_ENOENT, "event %llu: no such event of this device",
				      (unsigned long long)id);
	r = registration_bind(&event->at_worker, import_at_worker, event, connection, generation,
			      deadline, ret_worker_id, err);
	event = event_unref(event);
	return r;
}

/* ---- what a program calls ---- */

int fmha_event_import(struct fmha_device *device, const void *handle, size_t handle_bytes,
		      struct fmha_event **ret_event, struct fmha_error *err)
{
	struct fmha_event *event;
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
	r = registration_begin(&event->at_worker, import_at_worker, event, device,
			       client_deadline(device->client), err);
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
	struct proto_event_release_params params;

	if (!event)
		return NULL;
	params.event = event->at_worker.worker_id;
	list_remove(event);
	registration_end(&event->at_worker, event->device, PROTO_EVENT_RELEASE, &params);
	return event_unref(event);
}
