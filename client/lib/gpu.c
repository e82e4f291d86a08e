/* SPDX-License-Identifier: MIT */
/*
 * gpu.c: memory of GPUs. The library links no GPU runtime and loads none into anybody's process: it
 * looks for one that the program has loaded already, CUDA's driver or HIP, and asks that.
 */
#include "internal.h"

#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#define VMM_POSIX_FD     1
#define VMM_READ_WRITE   3
#define LOCATION_DEVICE  1
#define VMM_NOT_A_HANDLE 0

/* What is used of either runtime; HIP's driver-style functions have CUDA's signatures. */
struct runtime {
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
};

struct vmm_access {
	int location_type, location_id, flags;
};

static void *loaded_library(const char *const *names, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		void *library = dlopen(names[i], RTLD_NOW | RTLD_NOLOAD);

		if (library)
			return library;
	}
	return NULL;
}

void *gpu_loaded_cuda(void)
{
	static const char *const names[] = {"libcuda.so.1", "libcuda.so"};

	return loaded_library(names, sizeof(names) / sizeof(names[0]));
}

void *gpu_loaded_hip(void)
{
	static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6",
					    "libamdhip64.so.5", "libamdhip64.so"};

	return loaded_library(names, sizeof(names) / sizeof(names[0]));
}

/* The runtime that this process has loaded. The two it needs always are there; the rest may be NULL
 * in an old runtime. Libraries are never unloaded again, so pointers stay good. */
static int runtime_find(struct runtime *ret_runtime, struct fmha_error *err)
{
	void *cuda = gpu_loaded_cuda();
	void *library = cuda ? cuda : gpu_loaded_hip();
	struct runtime r = {.name = cuda ? "CUDA" : "HIP"};
	const struct {
		void **function;
		const char *cuda, *hip;
	} symbols[] = {
		{(void **)&r.address_range, "cuMemGetAddressRange_v2", "hipMemGetAddressRange"},
		{(void **)&r.ipc_get, "cuIpcGetMemHandle", "hipIpcGetMemHandle"},
		{(void **)&r.vmm_retain, "cuMemRetainAllocationHandle",
		 "hipMemRetainAllocationHandle"},
		{(void **)&r.vmm_release, "cuMemRelease", "hipMemRelease"},
		{(void **)&r.vmm_export, "cuMemExportToShareableHandle",
		 "hipMemExportToShareableHandle"},
		{(void **)&r.vmm_import, "cuMemImportFromShareableHandle",
		 "hipMemImportFromShareableHandle"},
		{(void **)&r.vmm_reserve, "cuMemAddressReserve", "hipMemAddressReserve"},
		{(void **)&r.vmm_unreserve, "cuMemAddressFree", "hipMemAddressFree"},
		{(void **)&r.vmm_map, "cuMemMap", "hipMemMap"},
		{(void **)&r.vmm_unmap, "cuMemUnmap", "hipMemUnmap"},
		{(void **)&r.vmm_access, "cuMemSetAccess", "hipMemSetAccess"},
		{(void **)&r.current_device, "cuCtxGetDevice", "hipGetDevice"},
	};

	if (!library)
		return fmha_error_set(err, FMHA_ENOTSUP,
				      "this process has neither CUDA's driver nor HIP loaded");
	for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++)
		*symbols[i].function = dlsym(library, cuda ? symbols[i].cuda : symbols[i].hip);
	if (!r.address_range || !r.ipc_get)
		return fmha_error_set(err, FMHA_ENOTSUP,
				      "the %s runtime of this process is too old", r.name);
	*ret_runtime = r;
	return 0;
}

/* A mapping of physical memory has no IPC handle, but may have been made exportable. */
static int export_vmm(const struct runtime *r, uintptr_t base, struct fmha_memory *memory,
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
	struct runtime runtime;
	size_t bytes = 0;
	int r;

	if (!pointer || !ret_memory || size == 0)
		return fmha_error_set(err, FMHA_EINVAL,
				      "fmha_memory_from_gpu: an argument is NULL or 0");
	r = runtime_find(&runtime, err);
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
	if (runtime.ipc_get(memory.handle, base) == 0) {
		memory.kind = FMHA_MEMORY_IPC_HANDLE;
		memory.handle_bytes = FMHA_HANDLE_BYTES;
	} else {
		r = export_vmm(&runtime, base, &memory, err);
		if (r < 0)
			return r;
	}
	*ret_memory = memory;
	return 0;
}

/* Maps the allocation behind @fd on the runtime's current device. */
static int map_vmm(const struct runtime *r, int fd, size_t bytes, uintptr_t *ret_pointer)
{
	struct vmm_access access = {.location_type = LOCATION_DEVICE, .flags = VMM_READ_WRITE};
	unsigned long long handle = VMM_NOT_A_HANDLE;
	uintptr_t pointer = 0;
	int status;

	status = r->current_device(&access.location_id);
	if (status == 0)
		status = r->vmm_import(&handle, (void *)(intptr_t)fd, // NOLINT
				       VMM_POSIX_FD);
	if (status != 0)
		return status;
	status = r->vmm_reserve(&pointer, bytes, 0, 0, 0);
	if (status == 0) {
		status = r->vmm_map(pointer, bytes, 0, handle, 0);
		if (status == 0) {
			status = r->vmm_access(pointer, bytes, &access, 1);
			if (status != 0)
				(void)r->vmm_unmap(pointer, bytes);
		}
		if (status != 0)
			(void)r->vmm_unreserve(pointer, bytes);
	}
	(void)r->vmm_release(handle);
	*ret_pointer = pointer;
	return status;
}

int fmha_buffer_map_gpu(struct fmha_buffer *buffer, void **ret_pointer, struct fmha_error *err)
{
	struct runtime runtime;
	uintptr_t pointer = 0;
	int r, status;

	if (!buffer || !ret_pointer)
		return fmha_error_set(err, FMHA_EINVAL, "fmha_buffer_map_gpu: an argument is NULL");
	if (buffer->kind != FMHA_MEMORY_VMM_FD || buffer->allocation_bytes == 0)
		return fmha_error_set(
			err, FMHA_EINVAL,
			"only memory that a GPU's worker allocated is mapped this way");
	r = runtime_find(&runtime, err);
	if (r < 0)
		return r;
	if (!runtime.vmm_import || !runtime.vmm_map || !runtime.vmm_access || !runtime.vmm_unmap ||
	    !runtime.vmm_reserve || !runtime.vmm_unreserve || !runtime.vmm_release ||
	    !runtime.current_device)
		return fmha_error_set(err, FMHA_ENOTSUP,
				      "the %s runtime of this process cannot map shared memory",
				      runtime.name);
	r = turnstile_lock(&buffer->at_worker.turnstile, client_deadline(buffer->device->client),
			   err);
	if (r < 0)
		return r;
	status = 0;
	if (!buffer->gpu_pointer)
		status = map_vmm(&runtime, buffer->fd, buffer->allocation_bytes, &pointer);
	if (status == 0 && !buffer->gpu_pointer)
		buffer->gpu_pointer = pointer;
	*ret_pointer = (void *)buffer->gpu_pointer; // NOLINT(performance-no-int-to-ptr)
	turnstile_unlock(&buffer->at_worker.turnstile);
	if (status != 0)
		return fmha_error_set(err, FMHA_EIO, "%s cannot map the buffer: error %d",
				      runtime.name, status);
	return 0;
}

void buffer_unmap_gpu(struct fmha_buffer *buffer)
{
	struct runtime runtime;

	if (!buffer->gpu_pointer || runtime_find(&runtime, NULL) < 0)
		return;
	(void)runtime.vmm_unmap(buffer->gpu_pointer, buffer->allocation_bytes);
	(void)runtime.vmm_unreserve(buffer->gpu_pointer, buffer->allocation_bytes);
	buffer->gpu_pointer = 0;
}
