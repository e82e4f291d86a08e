/* SPDX-License-Identifier: MIT */
/* open.c: a device's handle, and what lives and ends with it: cached plans and arenas. */
#include "client.h"

#include <stdlib.h>
#include <string.h>

/* Runs that nobody waits for have let go of their arenas. */
static void drop_all(struct fmha_device *device)
{
	cache_drop(device, 0);
	free(device->cache);
	for (uint32_t i = 0; i < ARENA_MAX; i++)
		if (device->arenas[i].buffer)
			buffer_release(device->arenas[i].buffer);
}

static const struct device_hooks hooks = {.on_buffer_free = cache_drop, .on_last = drop_all};

struct fmha_device *fmha_device_free(struct fmha_device *device)
{
	if (!device)
		return NULL;
	if (client_in_child(device->client)) {
		if (device->worker.connection)
			connection_drop_in_child(device->worker.connection);
	} else {
		cache_drop(device, 0);
		arena_trim(device, true);
	}
	return device_unref(device);
}

/* The first device that is ready, or else the first that may become so, or else the first: opening
 * it tells why it failed. */
static int choose_device(struct fmha_client *client, int64_t deadline, uint32_t *ret_index,
			 struct fmha_error *err)
{
	const struct proto_empty params = {0};
	struct proto_devices_result devices;
	int r;

	r = link_call(&client->front, PROTO_DEVICES, &params, -1, deadline, &devices, NULL, err);
	if (r < 0)
		return r;
	for (int pass = 0; pass < 3; pass++) {
		for (uint32_t i = 0; i < devices.n_devices; i++) {
			const char *state = devices.devices[i].state;

			if (strcmp(state, "ready") == 0 ||
			    (pass == 1 && strcmp(state, "failed") != 0) || pass == 2) {
				*ret_index = devices.devices[i].device;
				return 0;
			}
		}
	}
	return fmha_error_set_field(err, FMHA_ENOENT, "device", "the daemon has no device");
}

int fmha_device_open(struct fmha_client *client, uint32_t index, struct fmha_device **ret_device,
		     struct fmha_error *err)
{
	struct fmha_device *device;
	struct connection *c;
	uint64_t generation;
	int64_t deadline;
	int r;

	r = client_check(client && ret_device ? client : NULL, __func__, err);
	if (r < 0)
		return r;
	deadline = client_deadline(client);
	if (index == FMHA_ANY_DEVICE) {
		r = choose_device(client, deadline, &index, err);
		if (r < 0)
			return r;
	}
	device = calloc(1, sizeof(*device));
	if (!device)
		return fmha_error_set(err, FMHA_ENOMEM, "device: out of memory");
	r = link_init(&device->worker, device_open_worker, device, FMHA_EDEVICE, err);
	if (r < 0) {
		free(device);
		return r;
	}
	if (pthread_mutex_init(&device->lock, NULL) != 0) {
		link_deinit(&device->worker);
		free(device);
		return fmha_error_set(err, FMHA_ENOMEM, "device: out of memory");
	}
	device->refs = 1;
	device->hooks = &hooks;
	device->index = index;
	device->next_buffer_id = 1;
	device->client = client_ref(client);
	r = link_get(&device->worker, deadline, &c, &generation, err);
	if (r < 0) {
		device = device_unref(device);
		return r;
	}
	c = connection_unref(c);
	*ret_device = device;
	return 0;
}
