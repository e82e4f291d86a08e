/* SPDX-License-Identifier: MIT */
/*
 * opener.h: opens other processes' IPC handles on a thread of its own.
 *
 * The driver may keep such a call for seconds, so it is made by a thread that can be left behind.
 * The thread stays between calls: libcuda spends half a millisecond on the first call of a new one,
 * and the opening itself takes 30 us.
 */
#ifndef FMHAD_DEVICE_HIP_OPENER_H
#define FMHAD_DEVICE_HIP_OPENER_H

#include "hip_api.h"

struct gpu_opener;

/*
 * One call at a time.
 * @at:       NULL or an opener: made when there is none, and set to NULL when the driver has not
 * come back in time: that thread ends, and closes what it has opened, whenever it does
 * @deadline: seconds
 * Return: hipSuccess and the base of the allocation; hipErrorNotReady past the deadline;
 * hipErrorOutOfMemory without a thread; or what the driver says.
 */
hipError_t gpu_opener_open(struct gpu_opener **at, int device, const hipIpcMemHandle_t *handle,
			   int deadline, void **ret_base);

/* NULL is fine. Always returns NULL. */
struct gpu_opener *gpu_opener_free(struct gpu_opener *opener);

#endif
