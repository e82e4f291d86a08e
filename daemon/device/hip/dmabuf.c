/* SPDX-License-Identifier: MIT */
/*
 * dmabuf.c: memory that travels as a file descriptor, with AMD's runtime: an allocation of hipMalloc()'s, exported as a
 * dma-buf, and opened as external memory. So HIP knows what it has opened, as it has to for copies and words
 * (hsa_amd_interop_map_buffer() alone would not tell it). Whether a runtime does all of this is for try_sharing.c to say.
 */
#include "hip_api.h"

#include <fcntl.h>
#include <stdint.h>
#include <unistd.h>

#include <kernels/external_memory.h>

#define GRANULARITY   ((size_t)2 << 20) /* ROCr cuts smaller ones out of a block of this size */
#define OPAQUE_FD     1                 /* hipExternalMemoryHandleTypeOpaqueFd */
#define RANGE_DMA_BUF 1                 /* hipMemRangeHandleTypeDmaBufFd */

static hipError_t make_dma_buf(void *pointer, size_t bytes, int *ret_fd)
{
	int (*export)(const void *, size_t, int *, uint64_t *);
	hipError_t (*range_handle)(void *, hipDeviceptr_t, size_t, int, unsigned long long);
	uint64_t offset = 0;
	int fd = -1;

	*(void **)&export = hip_lower_symbol("hsa_amd_portable_export_dmabuf");
	*(void **)&range_handle = hip_lower_symbol("hipMemGetHandleForAddressRange");
	if (export && export(pointer, bytes, &fd, &offset) != 0)
		fd = -1;
	if (fd < 0 && range_handle &&
	    range_handle(&fd, (hipDeviceptr_t)pointer, bytes, RANGE_DMA_BUF, 0) != hipSuccess)
		fd = -1;
	if (fd < 0)
		return hipErrorNotSupported;
	/* Never more than was asked for: what lies beside it is somebody else's. */
	if (offset != 0 || lseek(fd, 0, SEEK_END) != (off_t)bytes) {
		(void)close(fd);
		return hipErrorNotSupported;
	}
	*ret_fd = fd;
	return hipSuccess;
}

size_t gpu_vmm_granularity(int device)
{
	(void)device;
	return GRANULARITY;
}

hipError_t gpu_vmm_create(size_t bytes, int device, struct gpu_mapping *ret_mapping, int *ret_fd)
{
	void *pointer = NULL;
	hipError_t status = hipMalloc(&pointer, bytes);

	(void)device; /* the current one */
	if (status != hipSuccess)
		return status;
	status = make_dma_buf(pointer, bytes, ret_fd);
	if (status != hipSuccess) {
		(void)hipFree(pointer);
		return status;
	}
	*ret_mapping = (struct gpu_mapping){.pointer = pointer, .bytes = bytes};
	return hipSuccess;
}

/* The runtime duplicates no descriptor and closes none. */
static hipError_t open_external(int fd, size_t bytes, struct gpu_mapping *ret_mapping)
{
	const struct external_handle handle = {.type = OPAQUE_FD, .handle.fd = fd, .size = bytes};
	const struct external_range all = {.size = bytes};
	hipError_t (*open)(void **, const struct external_handle *);
	hipError_t (*map)(void **, void *, const struct external_range *);
	hipError_t (*destroy)(void *);
	hipError_t status;

	*(void **)&open = hip_lower_symbol("hipImportExternalMemory");
	*(void **)&map = hip_lower_symbol("hipExternalMemoryGetMappedBuffer");
	*(void **)&destroy = hip_lower_symbol("hipDestroyExternalMemory");
	if (!open || !map || !destroy)
		return hipErrorNotSupported;
	*ret_mapping = (struct gpu_mapping){.bytes = bytes};
	status = open(&ret_mapping->external, &handle);
	if (status != hipSuccess)
		return status;
	status = map(&ret_mapping->pointer, ret_mapping->external, &all);
	if (status != hipSuccess)
		(void)destroy(ret_mapping->external);
	return status;
}

/* HIP believes whatever size it is told. What the descriptor says is the kernel's word. */
hipError_t gpu_vmm_import(int fd, size_t bytes, int device, struct gpu_mapping *ret_mapping)
{
	off_t behind = lseek(fd, 0, SEEK_END);
	hipError_t status;
	int own;

	(void)device;
	if (behind <= 0 || (size_t)behind < bytes)
		return hipErrorInvalidValue;
	own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (own < 0)
		return hipErrorOutOfMemory;
	status = open_external(own, (size_t)behind, ret_mapping);
	(void)close(own);
	if (status != hipSuccess)
		return status;
	status = gpu_check_mapping(ret_mapping->pointer, ret_mapping->bytes);
	if (status != hipSuccess)
		(void)gpu_vmm_free(ret_mapping);
	return status;
}

hipError_t gpu_vmm_free(const struct gpu_mapping *mapping)
{
	hipError_t (*destroy)(void *), status = hipFree(mapping->pointer), destroyed;

	if (!mapping->external)
		return status;
	*(void **)&destroy = hip_lower_symbol("hipDestroyExternalMemory");
	destroyed = destroy(mapping->external);
	return status == hipSuccess ? destroyed : status;
}
