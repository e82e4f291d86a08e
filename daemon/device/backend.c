/* SPDX-License-Identifier: MIT */
/*
 * backend.c: what a backend calls: the queue of ended launches and the latched error.
 * Modules carry a copy of it, so it has no state of its own.
 */
#include "device_impl.h"

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
		device->calls->wake(device->owner);
}

void device_fail(struct device *device, const struct fmha_error *error)
{
	pthread_mutex_lock(&device->mutex);
	if (!atomic_load(&device->failed))
		device->error = *error;
	atomic_store(&device->failed, true);
	pthread_mutex_unlock(&device->mutex);
	/* Nothing else may come of a launch that the loop ran itself. */
	device->calls->wake(device->owner);
}

bool device_has_failed(struct device *device, struct fmha_error *err)
{
	if (!atomic_load_explicit(&device->failed, memory_order_acquire))
		return false;
	if (err)
		*err = device->error;
	return true;
}
