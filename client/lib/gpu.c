/* SPDX-License-Identifier: MIT */
/*
 * gpu.c: memory of GPUs: named for the daemon, and mapped where it lies in the daemon's buffers.
 */
#include "client.h"
#include "gpu.h"

#include <unistd.h>

#define RANGE_DMA_BUF 1 /* hipMemRangeHandleTypeDmaBufFd */

/* Of a HIP allocation that begins where the dma-buf does, so that an offset is the same by descriptor and by handle; -1: there
 * is none, or the allocation was cut out of a block. */
static int export_dma_buf(const struct gpu_runtime *r, uintptr_t base, size_t bytes)
{
	uint64_t offset = 0;
	int fd = -1;

	if (!r->external_open)
		return -1;
	// NOLINTNEXTLINE(performance-no-int-to-ptr)
	if (!r->export_dma_buf || r->export_dma_buf((const void *)base, bytes, &fd, &offset) != 0)
		fd = -1;
	if (fd < 0 && r->range_handle && r->range_handle(&fd, base, bytes, RANGE_DMA_BUF, 0) != 0)
		fd = -1;
	if (fd >= 0 && (offset != 0 || lseek(fd, 0, SEEK_END) < (off_t)bytes)) {
		(void)close(fd);
		fd = -1;
	}
	return fd;
}

/* A mapping of physical memory has no IPC handle, but may have been made exportable. */
static int export_vmm(const struct gpu_runtime *r, uintptr_t base, struct fmha_memory *memory,
		      struct fmha_error *err)
{
	unsigned long long handle = VMM_NOT_A_HANDLE;
	int fd = -1;

	if (!r->vmm_retain || !r->vmm_export || !r->vmm_release ||
	    r->vmm_retain(&handle, (void *)base) != 0) // NOLINT(performance-no-int-to-ptr)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "pointer",
					    "%s can share this memory neither by IPC handle nor by "
					    "descriptor; is it managed or host memory?",
					    r->name);
	if (r->vmm_export(&fd, handle, VMM_POSIX_FD, 0) != 0)
		fd = -1;
	(void)r->vmm_release(handle);
	if (fd < 0)
		return fmha_error_set_field(
			err, FMHA_ENOTSUP, "pointer",
			"this memory is mapped in segments that were not made exportable; with "
			"PyTorch, turn expandable_segments off for tensors that are shared");
	memory->kind = FMHA_MEMORY_VMM_FD;
	memory->fd = fd;
	return 0;
}

int fmha_memory_from_gpu(const void *pointer, uint64_t size, struct fmha_memory *ret_memory,
			 struct fmha_error *err)
{
	struct fmha_memory memory = {.struct_size = sizeof(memory), .fd = -1, .size = size};
	uintptr_t base = 0, at = (uintptr_t)pointer;
	struct gpu_runtime runtime;
	size_t bytes = 0;
	int r;

	if (!pointer || !ret_memory || size == 0)
		return fmha_error_set(err, FMHA_EINVAL,
				      "fmha_memory_from_gpu: an argument is NULL or 0");
	r = gpu_runtime_find(&runtime, err);
	if (r < 0)
		return r;
	if (runtime.address_range(&base, &bytes, at) != 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "pointer",
					    "%s does not know this pointer as device memory",
					    runtime.name);
	if (at - base > bytes || size > bytes - (at - base))
		return fmha_error_set_field(
			err, FMHA_EINVAL, "size",
			"%llu bytes reach beyond the allocation's %zu; memory that is mapped in "
			"segments can be shared one segment at a time",
			(unsigned long long)size, bytes);
	memory.base_offset = at - base;
	memory.fd = export_dma_buf(&runtime, base, bytes);
	if (runtime.ipc_get(memory.handle, base) == 0) {
		memory.kind = memory.fd < 0 ? FMHA_MEMORY_IPC_HANDLE : FMHA_MEMORY_FD_OR_HANDLE;
		memory.handle_bytes = FMHA_HANDLE_BYTES;
	} else if (memory.fd >= 0) {
		memory.kind = FMHA_MEMORY_VMM_FD;
	} else {
		r = export_vmm(&runtime, base, &memory, err);
		if (r < 0)
			return r;
	}
	*ret_memory = memory;
	return 0;
}

int fmha_buffer_memory(const struct fmha_buffer *buffer, struct fmha_memory *ret_memory,
		       struct fmha_error *err)
{
	if (!buffer || !ret_memory)
		return fmha_error_set(err, FMHA_EINVAL, "fmha_buffer_memory: an argument is NULL");
	if (buffer->kind != FMHA_MEMORY_VMM_FD || buffer->allocation_bytes == 0)
		return fmha_error_set(
			err, FMHA_EINVAL,
			"only memory that a GPU's worker allocated is shared this way");
	*ret_memory = (struct fmha_memory){.struct_size = sizeof(*ret_memory),
					   .kind = FMHA_MEMORY_VMM_FD,
					   .fd = buffer->fd,
					   .size = buffer->allocation_bytes};
	return 0;
}

int fmha_buffer_map_gpu(struct fmha_buffer *buffer, void **ret_pointer, struct fmha_error *err)
{
	struct fmha_memory memory;
	int r;

	if (!ret_pointer)
		return fmha_error_set(err, FMHA_EINVAL, "fmha_buffer_map_gpu: an argument is NULL");
	r = fmha_buffer_memory(buffer, &memory, err);
	if (r == 0)
		r = timed_lock_take(&buffer->at_worker.lock,
				    client_deadline(buffer->device->client), err);
	if (r < 0)
		return r;
	if (!buffer->view)
		r = fmha_view_new(&memory, 1, &buffer->view, err);
	*ret_pointer = fmha_view_data(buffer->view);
	timed_lock_give(&buffer->at_worker.lock);
	return r;
}
