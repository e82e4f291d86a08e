/* SPDX-License-Identifier: MIT */
/* device.c: the direct connection to a worker, opened again whenever it was lost. */
#include "client.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <proto/cleanup.h>

static const char worker_name[] = "the device's worker";

/* Whether the daemon calls it failed, after several starts: then there is nothing to wait for. */
static bool has_failed(struct fmha_device *device, int64_t deadline)
{
	const struct proto_empty params = {0};
	struct proto_devices_result devices;

	if (link_call(&device->client->front, PROTO_DEVICES, &params, -1, deadline, &devices, NULL,
		      NULL) < 0)
		return false;
	for (uint32_t i = 0; i < devices.n_devices; i++) {
		if (devices.devices[i].device == device->index)
			return strcmp(devices.devices[i].state, "failed") == 0;
	}
	return false;
}

/* A worker that restarts is back within a second, so ask again until the deadline. */
static int ask_for_worker(struct fmha_device *device, int64_t deadline,
			  struct proto_open_device_result *ret_opened, int *ret_fd,
			  struct fmha_error *err)
{
	const struct proto_open_device_params params = {.device = device->index};
	int64_t pause_ns = 2000000;

	for (;;) {
		struct timespec pause;
		int r = link_call(&device->client->front, PROTO_OPEN_DEVICE, &params, -1, deadline,
				  ret_opened, ret_fd, err);

		if ((r != FMHA_EBUSY && r != FMHA_EDEVICE) ||
		    (r == FMHA_EDEVICE && has_failed(device, deadline)))
			return r;
		if (deadline_left_ns(deadline) < pause_ns)
			return r;
		pause = deadline_timespec(pause_ns);
		(void)nanosleep(&pause, NULL);
		if (pause_ns < 100000000)
			pause_ns *= 2;
	}
}

int device_open_worker(void *owner, int64_t deadline, struct connection **ret_connection,
		       struct fmha_error *err)
{
	struct fmha_device *device = owner;
	struct proto_open_device_result opened;
	struct fmha_client_info client_info;
	_cleanup_(connection_unrefp) struct connection *c = NULL;
	_cleanup_(closep) int fd = -1;
	int flags, r;

	r = ask_for_worker(device, deadline, &opened, &fd, err);
	if (r < 0)
		return r;
	flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) < 0)
		return fmha_error_set(err, FMHA_EIO, "fcntl on the worker's socket failed");
	r = connection_new(take_fd(&fd), FMHA_EDEVICE, worker_name, device->client->spin_us, &c,
			   err);
	if (r < 0)
		return r;
	r = fmha_client_info(device->client, &client_info, err);
	if (r < 0)
		return r;
	c->max_in_flight = client_info.max_in_flight;
	c->takes_descriptors = opened.device.descriptors;
	device_info_from(&opened.device, &device->info);
	*ret_connection = c;
	c = NULL;
	return 0;
}

/* ---- life ---- */

struct fmha_device *device_unref(struct fmha_device *device)
{
	if (!device || __atomic_sub_fetch(&device->refs, 1, __ATOMIC_ACQ_REL) != 0)
		return NULL;
	/* First the connection: runs that nobody waits for let go of their arenas. */
	device->worker.connection = connection_unref(device->worker.connection);
	device->hooks->on_last(device);
	(void)pthread_mutex_destroy(&device->lock);
	link_deinit(&device->worker);
	(void)client_unref(device->client);
	free(device);
	return NULL;
}

int fmha_device_info(struct fmha_device *device, struct fmha_device_info *ret_info,
		     struct fmha_error *err)
{
	int r;

	r = client_check(device && ret_info ? device->client : NULL, __func__, err);
	if (r < 0)
		return r;
	r = timed_lock_take(&device->worker.lock, client_deadline(device->client), err);
	if (r < 0)
		return r;
	*ret_info = device->info;
	timed_lock_give(&device->worker.lock);
	return 0;
}

int fmha_device_ping(struct fmha_device *device, struct fmha_error *err)
{
	const struct proto_empty params = {0};
	int r;

	r = client_check(device ? device->client : NULL, __func__, err);
	if (r < 0)
		return r;
	return link_call(&device->worker, PROTO_PING, &params, -1, client_deadline(device->client),
			 NULL, NULL, err);
}

int device_call_json(struct fmha_device *device, enum proto_method method, const void *params,
		     char **ret_json, struct fmha_error *err)
{
	return client_call_json(device->client, &device->worker, method, params, ret_json, err);
}

int fmha_device_trace(struct fmha_device *device, char **ret_json, struct fmha_error *err)
{
	const struct proto_empty params = {0};
	int r = client_check(device && ret_json ? device->client : NULL, __func__, err);

	return r < 0 ? r : device_call_json(device, PROTO_TRACE, &params, ret_json, err);
}

int fmha_device_inject(struct fmha_device *device, const char *fault, uint32_t after,
		       struct fmha_error *err)
{
	struct proto_inject_params params = {.after = after};
	struct connection *c;
	uint64_t generation;
	int64_t deadline;
	int r;

	if (!device || !fault || strlen(fault) >= sizeof(params.fault))
		return fmha_error_set(err, FMHA_EINVAL, "fmha_device_inject: device or fault");
	r = client_check_process(device->client, err);
	if (r < 0)
		return r;
	(void)snprintf(params.fault, sizeof(params.fault), "%s", fault);
	deadline = client_deadline(device->client);
	r = link_get(&device->worker, deadline, &c, &generation, err);
	if (r < 0)
		return r;
	/* Never repeated: a worker that died of it must not die again. */
	r = connection_call(c, PROTO_INJECT, &params, -1, deadline, NULL, NULL, err);
	c = connection_unref(c);
	return r;
}
