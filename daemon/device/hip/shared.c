/* SPDX-License-Identifier: MIT */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <proto/error.h>

#define OTHERS_DEADLINE_S 2 /* how long another thread's opening or closing is waited for */

_Static_assert(sizeof(hipIpcMemHandle_t) == GPU_HANDLE_BYTES &&
		       sizeof(hipIpcEventHandle_t) == GPU_HANDLE_BYTES,
	       "every handle has 64 bytes");

static struct gpu_shared *shared_find(const struct gpu_device *gpu, enum gpu_shared_kind kind,
				      const uint8_t *handle)
{
	for (struct gpu_shared *shared = gpu->shared; shared; shared = shared->next)
		if (shared->kind == kind &&
		    memcmp(shared->handle, handle, sizeof(shared->handle)) == 0)
			return shared;
	return NULL;
}

static void unlink_shared(struct gpu_device *gpu, struct gpu_shared *shared)
{
	struct gpu_shared **at = &gpu->shared;

	while (*at != shared)
		at = &(*at)->next;
	*at = shared->next;
}

/* The driver's part, without the lock. */
static hipError_t open_it(struct gpu_shared *shared)
{
	hipIpcEventHandle_t event;
	hipIpcMemHandle_t memory;
	hipDeviceptr_t base;
	hipError_t status;

	if (shared->kind == SHARED_EVENT) {
		memcpy(&event, shared->handle, sizeof(event));
		return hipIpcOpenEventHandle(&shared->event, event);
	}
	memcpy(&memory, shared->handle, sizeof(memory));
	status = hipIpcOpenMemHandle(&shared->base, memory, hipIpcMemLazyEnablePeerAccess);
	if (status != hipSuccess)
		return status;
	status = hipMemGetAddressRange(&base, &shared->bytes, (hipDeviceptr_t)shared->base);
	if (status == hipSuccess)
		status = gpu_check_mapping(shared->base, shared->bytes);
	if (status != hipSuccess)
		(void)hipIpcCloseMemHandle(shared->base);
	return status;
}

static void close_it(struct gpu_shared *shared)
{
	if (shared->kind == SHARED_EVENT)
		(void)hipEventDestroy(shared->event);
	else
		(void)hipIpcCloseMemHandle(shared->base);
}

static int refused(hipError_t status, enum gpu_shared_kind kind, struct fmha_error *err)
{
	if (status == hipErrorOutOfMemory)
		return fmha_error_set(err, FMHA_ENOMEM, "no memory to open an IPC handle");
	if (kind == SHARED_EVENT)
		return fmha_error_set_field(err, FMHA_EINVAL, "handle",
					    "the driver refuses the event's handle: %s; it must be "
					    "of an interprocess event of another process",
					    hipGetErrorName(status));
	return fmha_error_set_field(err, FMHA_EINVAL, "handle",
				    "the driver refuses the IPC handle: %s; memory of an allocator "
				    "that maps segments (PyTorch's expandable segments) has none: "
				    "pass its VMM descriptor",
				    hipGetErrorName(status));
}

/* With the lock held: waits until nobody opens or closes the handle. Return: 0 with the one that is
 * open or NULL, or FMHA_ETIMEDOUT. */
static int wait_for_others(struct gpu_device *gpu, enum gpu_shared_kind kind, const uint8_t *handle,
			   struct gpu_shared **ret_shared, struct fmha_error *err)
{
	struct gpu_shared *shared;
	struct timespec until;

	(void)clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += OTHERS_DEADLINE_S;
	while ((shared = shared_find(gpu, kind, handle)) && shared->state != SHARED_OPEN)
		if (pthread_cond_timedwait(&gpu->shared_changed, &gpu->shared_lock, &until) != 0)
			return fmha_error_set_field(
				err, FMHA_ETIMEDOUT, "handle",
				"the driver has been opening or closing this IPC handle for %d s",
				OTHERS_DEADLINE_S);
	*ret_shared = shared;
	return 0;
}

int gpu_shared_get(struct gpu_device *gpu, enum gpu_shared_kind kind, const uint8_t *handle,
		   uint32_t handle_bytes, struct gpu_shared **ret_shared, struct fmha_error *err)
{
	struct gpu_shared *shared = NULL, *fresh;
	hipError_t status;
	int r;

	if (handle_bytes != sizeof(shared->handle))
		return fmha_error_set_field(err, FMHA_EINVAL, "handle",
					    "handle: %u bytes, an IPC handle has %zu", handle_bytes,
					    sizeof(shared->handle));
	fresh = calloc(1, sizeof(*fresh));
	if (!fresh)
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	fresh->kind = kind;
	memcpy(fresh->handle, handle, sizeof(fresh->handle));
	(void)pthread_mutex_lock(&gpu->shared_lock);
	r = wait_for_others(gpu, kind, handle, &shared, err);
	if (r < 0 || shared) {
		if (shared)
			shared->n_users++;
		(void)pthread_mutex_unlock(&gpu->shared_lock);
		free(fresh);
		*ret_shared = shared;
		return r;
	}
	fresh->next = gpu->shared;
	gpu->shared = fresh;
	(void)pthread_mutex_unlock(&gpu->shared_lock);

	status = open_it(fresh);

	(void)pthread_mutex_lock(&gpu->shared_lock);
	if (status == hipSuccess) {
		fresh->state = SHARED_OPEN;
		fresh->n_users = 1;
	} else {
		unlink_shared(gpu, fresh);
	}
	(void)pthread_cond_broadcast(&gpu->shared_changed);
	(void)pthread_mutex_unlock(&gpu->shared_lock);
	if (status != hipSuccess) {
		free(fresh);
		return refused(status, kind, err);
	}
	*ret_shared = fresh;
	return 0;
}

bool gpu_shared_leave(struct gpu_device *gpu, struct gpu_shared *shared)
{
	bool last;

	(void)pthread_mutex_lock(&gpu->shared_lock);
	last = --shared->n_users == 0;
	if (last)
		shared->state = SHARED_CLOSING;
	(void)pthread_mutex_unlock(&gpu->shared_lock);
	return last;
}

void gpu_shared_close(struct gpu_device *gpu, struct gpu_shared *shared)
{
	close_it(shared);
	(void)pthread_mutex_lock(&gpu->shared_lock);
	unlink_shared(gpu, shared);
	(void)pthread_cond_broadcast(&gpu->shared_changed);
	(void)pthread_mutex_unlock(&gpu->shared_lock);
	free(shared);
}

void gpu_shared_put(struct gpu_device *gpu, struct gpu_shared *shared)
{
	if (gpu_shared_leave(gpu, shared))
		gpu_shared_close(gpu, shared);
}

/* ---- events ---- */

int gpu_event_import(struct device *device, const uint8_t *handle, uint32_t handle_bytes,
		     struct device_event **ret_event, struct fmha_error *err)
{
	struct gpu_shared *shared = NULL;
	int r = gpu_shared_get(gpu_device_of(device), SHARED_EVENT, handle, handle_bytes, &shared,
			       err);

	if (r == 0)
		*ret_event = (struct device_event *)(void *)shared;
	return r;
}

void gpu_event_free(struct device *device, struct device_event *event)
{
	gpu_shared_put(gpu_device_of(device), (struct gpu_shared *)(void *)event);
}

hipEvent_t gpu_event_of(const struct device_event *event)
{
	return ((const struct gpu_shared *)(const void *)event)->event;
}
