/* SPDX-License-Identifier: MIT */
/* gpu.h: what is used of the GPU runtime that the program has loaded. */
#ifndef FMHA_CLIENT_GPU_H
#define FMHA_CLIENT_GPU_H

#include <kernels/external_memory.h>

#include "internal.h"

#define VMM_POSIX_FD     1
#define VMM_NOT_A_HANDLE 0

/* The functions that are used of either runtime; HIP's driver-style functions have CUDA's signatures. */
struct gpu_runtime {
	const char *name;
	int (*address_range)(uintptr_t *base, size_t *bytes, uintptr_t pointer);
	int (*ipc_get)(void *handle, uintptr_t pointer);
	int (*vmm_retain)(unsigned long long *handle, void *pointer);
	int (*vmm_release)(unsigned long long handle);
	int (*vmm_export)(void *fd, unsigned long long handle, int kind, unsigned long long flags);
	int (*vmm_import)(unsigned long long *handle, void *fd, int kind);
	int (*vmm_reserve)(uintptr_t *pointer, size_t bytes, size_t alignment, uintptr_t at,
			   unsigned long long flags);
	int (*vmm_unreserve)(uintptr_t pointer, size_t bytes);
	int (*vmm_map)(uintptr_t pointer, size_t bytes, size_t offset, unsigned long long handle,
		       unsigned long long flags);
	int (*vmm_unmap)(uintptr_t pointer, size_t bytes);
	int (*vmm_access)(uintptr_t pointer, size_t bytes, const void *access, size_t n);
	int (*current_device)(int *device);
	/* HIP's alone: memory of hipMalloc()'s goes out and comes in as a dma-buf. */
	int (*export_dma_buf)(const void *pointer, size_t bytes, int *fd, uint64_t *offset);
	int (*range_handle)(void *fd, uintptr_t pointer, size_t bytes, int kind,
			    unsigned long long flags);
	int (*external_open)(void **external, const struct external_handle *handle);
	int (*external_map)(uintptr_t *pointer, void *external, const struct external_range *range);
	int (*external_destroy)(void *external);
	int (*free)(uintptr_t pointer);
};

/* The runtime that this process has loaded. The two calls that naming memory needs always are there; the rest may
 * be NULL in an old runtime. Libraries are never unloaded again, so pointers stay good. */
int gpu_runtime_find(struct gpu_runtime *ret_runtime, struct fmha_error *err);

#endif
