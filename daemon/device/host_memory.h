/* SPDX-License-Identifier: MIT */
/* host_memory.h: shared host memory as sealed memfds, made here or by a client. */
#ifndef FMHAD_DEVICE_HOST_MEMORY_H
#define FMHAD_DEVICE_HOST_MEMORY_H

#include <device/device.h>

/* The bytes that a buffer of @size at @offset of a memfd takes: whole pages. */
uint64_t host_memory_cost(uint64_t offset, uint64_t size);

/* Zero memory that can neither shrink nor grow. @ret_fd: given. Return: 0, FMHA_EINVAL,
 * FMHA_ENOMEM. */
int host_memory_create(uint64_t size, struct device_memory *ret_memory, int *ret_fd,
		       struct fmha_error *err);

/*
 * Maps a client's memfd after checking that no access to the mapping can fail: it must be sealed
 * against shrinking, growing and further seals, lie in ordinary tmpfs pages and hold the extent.
 * Return: 0, FMHA_EINVAL naming the field, FMHA_ENOMEM.
 */
int host_memory_import(const struct device_memory_source *source, struct device_memory *ret_memory,
		       struct fmha_error *err);

void host_memory_free(struct device_memory *memory);

#endif
