/* SPDX-License-Identifier: MIT */
/*
 * memory.c: GPU memory that clients share.
 *
 * Made here (preferred): a physical allocation that goes to the client as a file descriptor, so
 * that no death of a client pulls memory away from under a kernel. Made by the client: a descriptor
 * of the same kind, or an IPC handle, which names a whole allocation of the client's runtime.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <proto/error.h>

#include <host_memory.h>

#include "gpu.h"

#define WORKSPACE_LEAST 65536ull
#define WORKSPACE_KEEP  (2ull << 30)  /* bytes kept for the next launch: allocating takes long */
#define STAGING_KEEP    (64ull << 20) /* the same: pinning takes long */
#define PATIENCE_MS     2000          /* how long memory that is being given back is waited for */

static void memory_describe(struct gpu_memory *memory, uint64_t offset, uint64_t size,
			    struct device_memory *ret_memory)
{
	*ret_memory = (struct device_memory){
		.device = (char *)memory->base + offset,
		.bytes = size,
		.map = memory,
		.kind = memory->kind == MEMORY_VMM ? PROTO_VMM_FD : PROTO_IPC_HANDLE,
		.allocation_bytes = memory->bytes,
	};
}

static int memory_new(int kind, void *base, size_t bytes, uint64_t offset, uint64_t size,
		      struct gpu_shared *shared, struct device_memory *ret_memory)
{
	struct gpu_memory *memory = malloc(sizeof(*memory));

	if (!memory)
		return FMHA_ENOMEM;
	*memory = (struct gpu_memory){.kind = kind, .base = base, .bytes = bytes, .shared = shared};
	memory_describe(memory, offset, size, ret_memory);
	return 0;
}

/* Takes the mapping over; gives it back where memory lacks. */
static int memory_new_mapped(const struct gpu_mapping *mapping, uint64_t offset, uint64_t size,
			     struct device_memory *ret_memory, struct fmha_error *err)
{
	struct gpu_memory *memory;

	if (memory_new(MEMORY_VMM, mapping->pointer, mapping->bytes, offset, size, NULL,
		       ret_memory) < 0) {
		(void)gpu_vmm_free(mapping);
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	}
	memory = ret_memory->map;
	memory->external = mapping->external;
	return 0;
}

static void spare_free(struct gpu_memory *spare)
{
	const struct gpu_mapping mapping = gpu_mapping_of(spare);

	(void)gpu_vmm_free(&mapping);
	(void)close(spare->fd);
	free(spare);
}

static size_t round_up(uint64_t size, size_t granularity)
{
	return (size_t)((size + granularity - 1) / granularity * granularity);
}

/* Memory that is just being given back counts as there. */
static hipError_t allocate(struct gpu_device *gpu, size_t bytes, uint32_t patience_ms,
			   void **ret_pointer)
{
	uint64_t since = gpu_reclaimed(gpu);
	hipError_t status = hipMalloc(ret_pointer, bytes);

	if (status == hipErrorOutOfMemory && gpu_reclaim_wait(gpu, since, patience_ms))
		status = hipMalloc(ret_pointer, bytes);
	return status;
}

/* New memory is zero: it may have been another user's. */
static int scrub(struct gpu_device *gpu, void *pointer, size_t bytes, struct fmha_error *err)
{
	hipError_t status = hipMemsetD8Async((hipDeviceptr_t)pointer, 0, bytes, gpu->scrub);

	if (status == hipSuccess)
		status = hipStreamSynchronize(gpu->scrub);
	return status == hipSuccess ? 0 : gpu_failure(gpu, status, "clearing memory", err);
}

int gpu_memory_clear(struct device *device, struct device_memory *memory, uint64_t offset,
		     uint64_t bytes, struct fmha_error *err)
{
	return scrub(gpu_device_of(device), (char *)memory->device + offset, bytes, err);
}

/* A clear allocation of @bytes, whole granules, that a descriptor names. */
static int make_shareable(struct gpu_device *gpu, size_t bytes, struct gpu_mapping *ret_mapping,
			  int *ret_fd, struct fmha_error *err)
{
	uint64_t since = gpu_reclaimed(gpu);
	hipError_t status = gpu_vmm_create(bytes, gpu->index, ret_mapping, ret_fd);
	int r;

	if (status == hipErrorOutOfMemory && gpu_reclaim_wait(gpu, since, PATIENCE_MS))
		status = gpu_vmm_create(bytes, gpu->index, ret_mapping, ret_fd);
	if (status != hipSuccess)
		return gpu_failure(gpu, status, "allocating memory", err);
	r = scrub(gpu, ret_mapping->pointer, bytes, err);
	if (r < 0) {
		(void)gpu_vmm_free(ret_mapping);
		(void)close(*ret_fd);
	}
	return r;
}

uint64_t gpu_memory_cost(const struct device *device, const struct device_memory_source *source,
			 bool created)
{
	const size_t granularity = ((const struct gpu_device *)device)->vmm_granularity;

	if (created && granularity > 0)
		return round_up(source->size, granularity);
	/* A copy here beside the client's; other imports are memory that the client has anyway. */
	if (!created && source->kind == PROTO_MEMFD)
		return source->size + host_memory_cost(source->base_offset, source->size);
	return source->size;
}

int gpu_memory_create(struct device *device, uint64_t size, struct device_memory *ret_memory,
		      int *ret_fd, struct fmha_error *err)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct gpu_mapping mapping;
	size_t bytes;
	int fd, r;

	if (gpu->vmm_granularity == 0)
		return fmha_error_set(
			err, FMHA_ENOTSUP,
			"this HIP runtime cannot share memory as a descriptor (%s); allocate "
			"it in the client and import its IPC handle",
			gpu->device.info.no_descriptors);
	if (size == 0 || size > device->info.memory_bytes)
		return fmha_error_set_field(err, size ? FMHA_ENOMEM : FMHA_EINVAL, "size",
					    "size %llu: the device has %llu bytes",
					    (unsigned long long)size,
					    (unsigned long long)device->info.memory_bytes);
	bytes = round_up(size, gpu->vmm_granularity);
	r = make_shareable(gpu, bytes, &mapping, &fd, err);
	if (r < 0)
		return r;
	r = memory_new_mapped(&mapping, 0, size, ret_memory, err);
	if (r < 0)
		(void)close(fd);
	else
		*ret_fd = fd;
	return r;
}

bool gpu_memory_take(struct device *device, uint64_t size, struct device_memory *ret_memory,
		     int *ret_fd)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct gpu_memory *spare = NULL;

	if (size == 0 || size > gpu->vmm_granularity)
		return false;
	(void)pthread_mutex_lock(&gpu->shared_lock);
	spare = gpu->spare;
	gpu->spare = NULL;
	(void)pthread_mutex_unlock(&gpu->shared_lock);
	if (!spare)
		return false;
	memory_describe(spare, 0, size, ret_memory);
	*ret_fd = spare->fd;
	return true;
}

/* Most buffers are far smaller than what the driver hands out, and it takes half a millisecond to
 * do so. Memory that a client has had is not used again: it may still be mapped there. */
void gpu_memory_refill(struct device *device)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct gpu_mapping mapping;
	struct gpu_memory *spare;
	bool wanted;

	(void)pthread_mutex_lock(&gpu->shared_lock);
	wanted = gpu->vmm_granularity > 0 && !gpu->spare;
	(void)pthread_mutex_unlock(&gpu->shared_lock);
	spare = wanted ? calloc(1, sizeof(*spare)) : NULL;
	if (!spare)
		return;
	spare->kind = MEMORY_VMM;
	if (make_shareable(gpu, gpu->vmm_granularity, &mapping, &spare->fd, NULL) < 0) {
		free(spare);
		return;
	}
	spare->base = mapping.pointer;
	spare->bytes = mapping.bytes;
	(void)pthread_mutex_lock(&gpu->shared_lock);
	wanted = !gpu->spare;
	if (wanted)
		gpu->spare = spare;
	(void)pthread_mutex_unlock(&gpu->shared_lock);
	if (!wanted)
		spare_free(spare);
}

void gpu_spare_free(struct gpu_device *gpu)
{
	if (gpu->spare)
		spare_free(gpu->spare);
	gpu->spare = NULL;
}

/* The extent [offset, offset + size) inside @bytes, without overflow. */
static int check_extent(const struct device_memory_source *source, uint64_t bytes,
			struct fmha_error *err)
{
	if (source->size == 0 || source->base_offset > bytes ||
	    source->size > bytes - source->base_offset)
		return fmha_error_set_field(err, FMHA_EINVAL, "size",
					    "offset %llu, size %llu: the allocation has %llu bytes",
					    (unsigned long long)source->base_offset,
					    (unsigned long long)source->size,
					    (unsigned long long)bytes);
	return 0;
}

static int import_handle(struct gpu_device *gpu, const struct device_memory_source *source,
			 struct device_memory *ret_memory, struct fmha_error *err)
{
	struct gpu_shared *shared = NULL;
	int r = 0;

	if (gpu->device.info.no_handles[0])
		return fmha_error_set_field(err, FMHA_ENOTSUP, "kind", "kind ipc_handle: %s",
					    gpu->device.info.no_handles);
	if (source->handle_bytes == GPU_HANDLE_BYTES)
		r = gpu_check_handle(source->handle, source->uid, source->pid, err);
	if (r == 0)
		r = gpu_shared_get(gpu, SHARED_MEMORY, source->handle, source->handle_bytes,
				   &shared, err);
	if (r != 0)
		return r;
	r = check_extent(source, shared->bytes, err);
	if (r == 0 && memory_new(MEMORY_IPC, shared->base, shared->bytes, source->base_offset,
				 source->size, shared, ret_memory) < 0)
		r = fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	if (r < 0)
		gpu_shared_put(gpu, shared);
	return r;
}

static int import_descriptor(struct gpu_device *gpu, const struct device_memory_source *source,
			     struct device_memory *ret_memory, struct fmha_error *err)
{
	struct gpu_mapping mapping;
	hipError_t status;
	uint64_t bytes;
	int r;

	if (gpu->vmm_granularity == 0)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "kind", "kind vmm_fd: %s",
					    gpu->device.info.no_descriptors);
	r = check_extent(source, gpu->device.info.memory_bytes, err);
	if (r < 0)
		return r;
	/* Mapping more than the allocation has is refused by the driver. */
	bytes = source->base_offset + source->size;
	status = gpu_vmm_import(source->fd, bytes, gpu->index, &mapping);
	if (status != hipSuccess)
		return fmha_error_set_field(
			err, FMHA_EINVAL, "fd",
			"the driver refuses the descriptor as %llu bytes of device "
			"memory: %s",
			(unsigned long long)bytes, hipGetErrorName(status));
	return memory_new_mapped(&mapping, source->base_offset, source->size, ret_memory, err);
}

static int pin(struct gpu_device *gpu, void *memory, size_t bytes, struct fmha_error *err)
{
	hipError_t status = hipHostRegister(memory, bytes, 0);

	if (status == hipSuccess)
		return 0;
	if (gpu_error_is_fatal(status))
		return gpu_failure(gpu, status, "pinning memory", err);
	return fmha_error_set(err, FMHA_ENOMEM, "the driver cannot pin %zu bytes of memory: %s",
			      bytes, hipGetErrorName(status));
}

static int import_memfd(struct gpu_device *gpu, const struct device_memory_source *source,
			struct device_memory *ret_memory, struct fmha_error *err)
{
	struct device_memory host;
	struct gpu_memory *owned;
	hipError_t status;
	void *copy;
	int r;

	r = host_memory_import(source, &host, err);
	if (r < 0)
		return r;
	/* A copy of memory that is not pinned would make the loop wait for the kernels. */
	r = pin(gpu, host.map, host.map_bytes, err);
	if (r < 0) {
		host_memory_free(&host);
		return r;
	}
	status = allocate(gpu, source->size, PATIENCE_MS, &copy);
	if (status != hipSuccess) {
		(void)hipHostUnregister(host.map);
		host_memory_free(&host);
		return gpu_failure(gpu, status, "allocating a copy on the device", err);
	}
	r = scrub(gpu, copy, source->size, err);
	if (r == 0 &&
	    memory_new(MEMORY_COPY, copy, source->size, 0, source->size, NULL, ret_memory) < 0)
		r = fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	if (r < 0) {
		(void)hipFree(copy);
		(void)hipHostUnregister(host.map);
		host_memory_free(&host);
		return r;
	}
	owned = ret_memory->map;
	owned->host = host;
	ret_memory->host = host.host;
	ret_memory->kind = PROTO_MEMFD;
	return 0;
}

int gpu_memory_import(struct device *device, const struct device_memory_source *source,
		      struct device_memory *ret_memory, struct fmha_error *err)
{
	struct gpu_device *gpu = gpu_device_of(device);

	switch (source->kind) {
	case PROTO_IPC_HANDLE:
		return import_handle(gpu, source, ret_memory, err);
	case PROTO_VMM_FD:
		return import_descriptor(gpu, source, ret_memory, err);
	case PROTO_MEMFD:
		return import_memfd(gpu, source, ret_memory, err);
	default:
		return fmha_error_set_field(err, FMHA_ENOTSUP, "kind", "kind %u: not known",
					    source->kind);
	}
}

void gpu_memory_free(struct device *device, struct device_memory *memory)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct gpu_memory *owned = memory->map;

	*memory = (struct device_memory){0};
	/* From now on the handle may be of other memory. */
	if (owned && owned->kind == MEMORY_IPC && !gpu_shared_leave(gpu, owned->shared))
		free(owned);
	else if (owned)
		gpu_reclaim(gpu, owned);
}

/* Powers of two, so that a kept workspace fits the next launch. */
uint64_t gpu_workspace_cost(const struct device *device, uint64_t bytes)
{
	uint64_t size = WORKSPACE_LEAST;

	(void)device;
	while (size < bytes)
		size *= 2;
	return size;
}

int gpu_workspace_new(struct device *device, uint64_t bytes, struct device_memory *ret_memory,
		      struct fmha_error *err)
{
	struct gpu_device *gpu = gpu_device_of(device);
	uint64_t size;
	hipError_t status;
	void *pointer;

	if (bytes > device->info.memory_bytes)
		return fmha_error_set(err, FMHA_ENOMEM, "a workspace of %llu bytes",
				      (unsigned long long)bytes);
	size = gpu_workspace_cost(device, bytes);
	for (struct gpu_memory **at = &gpu->free_workspaces; *at; at = &(*at)->next) {
		struct gpu_memory *kept = *at;

		if (kept->bytes != size)
			continue;
		*at = kept->next;
		gpu->free_bytes -= size;
		*ret_memory = (struct device_memory){
			.device = kept->base, .bytes = size, .map = kept};
		return 0;
	}
	status = hipMalloc(&pointer, size);
	if (status == hipErrorOutOfMemory) {
		gpu_workspaces_trim(gpu);
		gpu_unload_idle(device);
		status = allocate(gpu, size, GPU_LOOP_PATIENCE_MS, &pointer);
	}
	if (status != hipSuccess)
		return gpu_failure(gpu, status, "allocating a workspace", err);
	if (memory_new(MEMORY_PLAIN, pointer, size, 0, size, NULL, ret_memory) < 0) {
		(void)hipFree(pointer);
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	}
	return 0;
}

void gpu_workspace_free(struct device *device, struct device_memory *memory)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct gpu_memory *owned = memory->map;

	if (!owned)
		return;
	if (gpu->free_bytes + owned->bytes > WORKSPACE_KEEP) {
		gpu_memory_free(device, memory);
		return;
	}
	owned->next = gpu->free_workspaces;
	gpu->free_workspaces = owned;
	gpu->free_bytes += owned->bytes;
	*memory = (struct device_memory){0};
}

void gpu_workspaces_trim(struct gpu_device *gpu)
{
	while (gpu->free_workspaces) {
		struct gpu_memory *kept = gpu->free_workspaces;

		gpu->free_workspaces = kept->next;
		gpu_reclaim(gpu, kept);
	}
	gpu->free_bytes = 0;
}

/* ---- staging ---- */

uint64_t gpu_staging_cost(const struct device *device, uint64_t bytes)
{
	return gpu_workspace_cost(device, bytes);
}

/* Pinned: a copy to or from other memory would make the thread that asks for it wait for all that
 * the stream waits for. */
static int staging_make(struct gpu_device *gpu, size_t bytes, struct gpu_memory **ret_staging,
			struct fmha_error *err)
{
	struct gpu_memory *staging = calloc(1, sizeof(*staging));
	int r;

	if (!staging)
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	staging->kind = MEMORY_STAGING;
	staging->bytes = bytes;
	staging->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			     0);
	if (staging->base == MAP_FAILED) {
		free(staging);
		return fmha_error_set(err, FMHA_ENOMEM,
				      "no %zu bytes of memory for integer tensors", bytes);
	}
	r = pin(gpu, staging->base, bytes, err);
	if (r == 0) {
		*ret_staging = staging;
		return 0;
	}
	(void)munmap(staging->base, bytes);
	free(staging);
	return r;
}

int gpu_staging_new(struct device *device, uint64_t bytes, struct device_memory *ret_memory,
		    struct fmha_error *err)
{
	struct gpu_device *gpu = gpu_device_of(device);
	size_t size = gpu_staging_cost(device, bytes);
	struct gpu_memory **at = &gpu->free_staging, *staging;
	int r;

	while (*at && (*at)->bytes != size)
		at = &(*at)->next;
	staging = *at;
	if (staging) {
		*at = staging->next;
		gpu->free_staging_bytes -= size;
	} else {
		r = staging_make(gpu, size, &staging, err);
		if (r != 0)
			return r;
	}
	*ret_memory = (struct device_memory){.host = staging->base, .bytes = size, .map = staging};
	return 0;
}

void gpu_staging_free(struct device *device, struct device_memory *memory)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct gpu_memory *staging = memory->map;

	*memory = (struct device_memory){0};
	if (gpu->free_staging_bytes + staging->bytes > STAGING_KEEP) {
		gpu_reclaim(gpu, staging);
		return;
	}
	staging->next = gpu->free_staging;
	gpu->free_staging = staging;
	gpu->free_staging_bytes += staging->bytes;
}

void gpu_staging_trim(struct gpu_device *gpu)
{
	while (gpu->free_staging) {
		struct gpu_memory *staging = gpu->free_staging;

		gpu->free_staging = staging->next;
		gpu_reclaim(gpu, staging);
	}
	gpu->free_staging_bytes = 0;
}
