/* SPDX-License-Identifier: MIT */
/*
 * vmm_hip.c: HIP runtimes as old as Debian 12's have no memory that travels as a file descriptor,
 * so there clients share by IPC handle. The granularity of 0 says so.
 */
#include "hip_api.h"

size_t gpu_vmm_granularity(int device)
{
	(void)device;
	return 0;
}

hipError_t gpu_vmm_create(size_t bytes, int device, void **ret_pointer, int *ret_fd)
{
	(void)bytes, (void)device, (void)ret_pointer, (void)ret_fd;
	return hipErrorNotSupported;
}

hipError_t gpu_vmm_import(int fd, size_t bytes, int device, void **ret_pointer)
{
	(void)fd, (void)bytes, (void)device, (void)ret_pointer;
	return hipErrorNotSupported;
}

hipError_t gpu_vmm_free(void *pointer, size_t bytes)
{
	(void)pointer, (void)bytes;
	return hipErrorNotSupported;
}
