/* SPDX-License-Identifier: MIT */
/*
 * backend.c: what a backend calls: the queue of ended launches, the latched error, the quarantine.
 * Modules carry a copy of it, so it has no state of its own.
 */
#include "device_impl.h"

#include <proto/error.h>

void device_launch_done(struct device *device, struct device_launch *launch)
{
	bool first;

	launch->next_done = NULL;
	pthread_mutex_lock(&device->mutex);
	first = !device->done;
	*device->done_tail = launch;
	device->done_tail = &launch->next_done;
	pthread_mutex_unlock(&device->mutex);
	if (first)
		device->wake(device->owner);
}

void device_fail(struct device *device, const struct fmha_error *error)
{
	pthread_mutex_lock(&device->mutex);
	if (!atomic_load(&device->failed))
		device->error = *error;
	atomic_store(&device->failed, true);
	pthread_mutex_unlock(&device->mutex);
	/* Nothing else may come of a launch that the loop ran itself. */
	device->wake(device->owner);
}

bool device_is_quarantined(const struct device *device, const char *kernel, uint64_t code)
{
	return device->is_quarantined &&
	       device->is_quarantined(device->quarantine_worker, kernel, code);
}

int device_request_build(struct device *device, struct device_build *build, struct fmha_error *err)
{
	if (!device->builder)
		return fmha_error_set(err, FMHA_ENOTSUP, "%s: there is no compiler here",
				      build->build->name);
	return device->builder(device->builder_worker, build, err);
}

void device_cancel_build(struct device *device, struct device_build *build)
{
	if (device->unbuilder)
		device->unbuilder(device->builder_worker, build);
}

bool device_has_failed(struct device *device, struct fmha_error *err)
{
	if (!atomic_load_explicit(&device->failed, memory_order_acquire))
		return false;
	if (err)
		*err = device->error;
	return true;
}
