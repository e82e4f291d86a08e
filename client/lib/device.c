/* SPDX-License-Identifier: MIT */
/* device.c: the direct connection to a worker, opened again whenever it was lost. */
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char worker_name[] = "the device's worker";

/* Whether the daemon calls it failed, after several starts: then there is nothing to wait for. */
static bool has_failed(struct fmha_device *device, int64_t deadline)
{
	const struct proto_empty params = {0};
	struct proto_devices_result devices;

	if (client_call(device->client, PROTO_DEVICES, &params, deadline, &devices, NULL, NULL) < 0)
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
		int r = client_call(device->client, PROTO_OPEN_DEVICE, &params, deadline,
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

/* Without the gate's lock. */
static int open_worker(struct fmha_device *device, int64_t deadline,
		       struct connection **ret_connection, struct fmha_device_info *ret_info,
		       struct fmha_error *err)
{
	struct proto_open_device_result opened;
	struct fmha_client_info client_info;
	struct connection *c;
	int fd, flags, r;

	r = ask_for_worker(device, deadline, &opened, &fd, err);
	if (r < 0)
		return r;
	flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) < 0) {
		(void)close(fd);
		return fmha_error_set(err, FMHA_EIO, "fcntl on the worker's socket failed");
	}
	r = connection_new(fd, FMHA_EDEVICE, worker_name, device->client->spin_us, &c, err);
	if (r < 0)
		return r;
	r = fmha_client_info(device->client, &client_info, err);
	if (r < 0) {
		c = connection_unref(c);
		return r;
	}
	c->max_in_flight = client_info.max_in_flight;
	device_info_from(&opened.device, ret_info);
	*ret_connection = c;
	return 0;
}

int device_worker(struct fmha_device *device, int64_t deadline, struct connection **ret_connection,
		  uint64_t *ret_generation, struct fmha_error *err)
{
	struct connection *fresh = NULL;
	struct fmha_device_info info;
	int r;

	r = gate_lock(&device->gate, deadline, err);
	if (r < 0)
		return r;
	if (!device->worker || connection_is_dead(device->worker)) {
		device->worker = connection_unref(device->worker);
		gate_enter(&device->gate);
		r = open_worker(device, deadline, &fresh, &info, err);
		gate_leave(&device->gate);
		if (r == 0) {
			device->worker = fresh;
			device->generation++;
			device->info = info;
		}
	}
	if (r >= 0) {
		*ret_connection = connection_ref(device->worker);
		*ret_generation = device->generation;
	}
	gate_unlock(&device->gate);
	return r;
}

struct connection *device_worker_if(struct fmha_device *device, uint64_t generation)
{
	struct connection *c = NULL;

	if (gate_lock(&device->gate, deadline_after_ms(RELEASE_TIMEOUT_MS), NULL) < 0)
		return NULL;
	if (device->worker && device->generation == generation &&
	    !connection_is_dead(device->worker))
		c = connection_ref(device->worker);
	gate_unlock(&device->gate);
	return c;
}

int device_call(struct fmha_device *device, enum proto_method method, const void *params, int fd,
		int64_t deadline, void *ret_result, int *ret_fd, struct fmha_error *err)
{
	int r = FMHA_EDEVICE;

	for (int attempt = 0; attempt < 2 && r == FMHA_EDEVICE; attempt++) {
		struct connection *c;
		uint64_t generation;
		bool unsent;

		r = device_worker(device, deadline, &c, &generation, err);
		if (r < 0)
			return r;
		r = connection_call(c, method, params, fd, deadline, ret_result, ret_fd, &unsent,
				    err);
		c = connection_unref(c);
	}
	return r;
}

/* ---- life ---- */

struct fmha_device *device_ref(struct fmha_device *device)
{
	(void)__atomic_add_fetch(&device->refs, 1, __ATOMIC_RELAXED);
	return device;
}

struct fmha_device *device_unref(struct fmha_device *device)
{
	if (!device || __atomic_sub_fetch(&device->refs, 1, __ATOMIC_ACQ_REL) != 0)
		return NULL;
	/* First the connection: runs that nobody waits for let go of their arenas. */
	device->worker = connection_unref(device->worker);
	device->hooks->on_last(device);
	(void)pthread_mutex_destroy(&device->lock);
	gate_deinit(&device->gate);
	(void)client_unref(device->client);
	free(device);
	return NULL;
}

int fmha_device_info(struct fmha_device *device, struct fmha_device_info *ret_info,
		     struct fmha_error *err)
{
	int r;

	if (!device || !ret_info)
		return fmha_error_set(err, FMHA_EINVAL, "fmha_device_info: an argument is NULL");
	r = client_check_process(device->client, err);
	if (r < 0)
		return r;
	r = gate_lock(&device->gate, client_deadline(device->client), err);
	if (r < 0)
		return r;
	*ret_info = device->info;
	gate_unlock(&device->gate);
	return 0;
}

int fmha_device_ping(struct fmha_device *device, struct fmha_error *err)
{
	const struct proto_empty params = {0};
	int r;

	if (!device)
		return fmha_error_set(err, FMHA_EINVAL, "fmha_device_ping: device is NULL");
	r = client_check_process(device->client, err);
	if (r < 0)
		return r;
	return device_call(device, PROTO_PING, &params, -1, client_deadline(device->client), NULL,
			   NULL, err);
}

int fmha_device_inject(struct fmha_device *device, const char *fault, uint32_t after,
		       struct fmha_error *err)
{
	struct proto_inject_params params = {.after = after};
	struct connection *c;
	uint64_t generation;
	int64_t deadline;
	bool unsent;
	int r;

	if (!device || !fault || strlen(fault) >= sizeof(params.fault))
		return fmha_error_set(err, FMHA_EINVAL, "fmha_device_inject: device or fault");
	r = client_check_process(device->client, err);
	if (r < 0)
		return r;
	(void)snprintf(params.fault, sizeof(params.fault), "%s", fault);
	deadline = client_deadline(device->client);
	r = device_worker(device, deadline, &c, &generation, err);
	if (r < 0)
		return r;
	/* Never repeated: a worker that died of it must not die again. */
	r = connection_call(c, PROTO_INJECT, &params, -1, deadline, NULL, NULL, &unsent, err);
	c = connection_unref(c);
	return r;
}
