/* SPDX-License-Identifier: MIT */
/*
 * shared.h: allocations and events of other processes, opened by their IPC handles.
 *
 * A process can open a handle only once, so what is open is shared by whoever imports it and
 * counted. Any thread. The driver is never called with the lock held: who wants a handle that
 * another thread is just opening or closing waits for that thread, everybody else does not.
 */
#ifndef FMHAD_DEVICE_HIP_SHARED_H
#define FMHAD_DEVICE_HIP_SHARED_H

#include "gpu.h"

#define GPU_HANDLE_BYTES 64

enum gpu_shared_kind { SHARED_MEMORY, SHARED_EVENT };

struct gpu_shared {
	struct gpu_shared *next;
	enum gpu_shared_kind kind;
	enum { SHARED_OPENING, SHARED_OPEN, SHARED_CLOSING } state;
	uint32_t n_users;
	uint8_t handle[GPU_HANDLE_BYTES];
	void *base; /* SHARED_MEMORY */
	size_t bytes;
	hipEvent_t event; /* SHARED_EVENT */
};

/* Takes one reference to what @handle (@handle_bytes) names. Return: 0, FMHA_EINVAL naming the
 * handle, FMHA_ETIMEDOUT: another thread has been opening it for too long, FMHA_ENOMEM. */
int gpu_shared_get(struct gpu_device *gpu, enum gpu_shared_kind kind, const uint8_t *handle,
		   uint32_t handle_bytes, struct gpu_shared **ret_shared, struct fmha_error *err);
void gpu_shared_put(struct gpu_device *gpu, struct gpu_shared *shared);
/* The same in two steps. Return: whether it was the last; then nobody gets it any more, and it has to be closed. */
bool gpu_shared_leave(struct gpu_device *gpu, struct gpu_shared *shared);
void gpu_shared_close(struct gpu_device *gpu, struct gpu_shared *shared);

/* A device_event of this backend is a struct gpu_shared. */
hipEvent_t gpu_event_of(const struct device_event *event);

#endif
