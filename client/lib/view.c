/* SPDX-License-Identifier: MIT */
/* view.c: physical memory of one GPU or several as one range of addresses of this process. */
#include "client.h"
#include "gpu.h"

#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#define VMM_READ_WRITE  3
#define LOCATION_DEVICE 1
#define OPAQUE_FD       1 /* hipExternalMemoryHandleTypeOpaqueFd */

struct vmm_access {
	int location_type, location_id, flags;
};

struct fmha_view {
	uintptr_t pointer;
	void *external;  /* HIP's name of a single part; NULL: the parts are mapped one by one */
	size_t bytes;    /* reserved */
	size_t n_mapped; /* parts of it, in order */
	size_t part_bytes[];
};

static int check_vmm(const struct gpu_runtime *r, struct fmha_error *err)
{
	if (!r->vmm_import || !r->vmm_map || !r->vmm_access || !r->vmm_unmap || !r->vmm_reserve ||
	    !r->vmm_unreserve || !r->vmm_release || !r->current_device)
		return fmha_error_set(err, FMHA_ENOTSUP,
				      "the %s runtime of this process cannot map shared memory",
				      r->name);
	return 0;
}

static int check_parts(const struct fmha_memory *parts, size_t n, size_t *ret_bytes,
		       struct fmha_error *err)
{
	size_t bytes = 0;

	for (size_t i = 0; i < n; i++) {
		int r = check_struct_size(parts[i].struct_size, sizeof(parts[i]), "fmha_memory",
					  err);

		if (r < 0)
			return r;
		if (parts[i].kind != FMHA_MEMORY_VMM_FD || parts[i].fd < 0)
			return fmha_error_set_field(
				err, FMHA_EINVAL, "kind",
				"part %zu is no physical memory behind a descriptor", i);
		if (parts[i].base_offset != 0 || parts[i].size == 0)
			return fmha_error_set_field(
				err, FMHA_EINVAL, parts[i].size ? "base_offset" : "size",
				"part %zu: whole allocations are mapped, from their beginning", i);
		if (__builtin_add_overflow(bytes, parts[i].size, &bytes))
			return fmha_error_set_field(err, FMHA_EINVAL, "size",
						    "the parts together are beyond 2^64 bytes");
	}
	*ret_bytes = bytes;
	return 0;
}

/* With HIP a single part is a dma-buf, of memory that hipMalloc() made: external memory. It keeps no descriptor and closes none. */
static int map_external(const struct gpu_runtime *r, struct fmha_view *view,
			const struct fmha_memory *part, struct fmha_error *err)
{
	const struct external_handle handle = {
		.type = OPAQUE_FD, .handle.fd = part->fd, .size = part->size};
	const struct external_range all = {.size = part->size};
	int status;

	if (!r->external_map || !r->external_destroy || !r->free)
		return fmha_error_set(err, FMHA_ENOTSUP,
				      "the %s runtime of this process cannot map shared memory",
				      r->name);
	/* HIP would believe whatever size it is told. */
	if (lseek(part->fd, 0, SEEK_END) < (off_t)part->size)
		return fmha_error_set_field(err, FMHA_EIO, "fd",
					    "the descriptor does not hold %llu bytes",
					    (unsigned long long)part->size);
	status = r->external_open(&view->external, &handle);
	if (status == 0) {
		status = r->external_map(&view->pointer, view->external, &all);
		if (status != 0)
			(void)r->external_destroy(view->external);
	}
	return status == 0 ? 0
			   : fmha_error_set_field(err, FMHA_EIO, "fd",
						  "%s cannot map the memory: error %d", r->name,
						  status);
}

/* Return: the runtime's status. */
static int map_part(const struct gpu_runtime *r, struct fmha_view *view, uintptr_t at,
		    const struct fmha_memory *part)
{
	unsigned long long handle = VMM_NOT_A_HANDLE;
	int status = r->vmm_import(&handle, (void *)(intptr_t)part->fd, // NOLINT
				   VMM_POSIX_FD);

	if (status != 0)
		return status;
	status = r->vmm_map(at, part->size, 0, handle, 0);
	(void)r->vmm_release(handle); /* the mapping keeps the memory */
	if (status == 0)
		view->part_bytes[view->n_mapped++] = part->size;
	return status;
}

static void unmap_all(const struct gpu_runtime *r, struct fmha_view *view)
{
	uintptr_t at = view->pointer;

	if (view->external) {
		(void)r->free(view->pointer);
		(void)r->external_destroy(view->external);
		return;
	}
	for (size_t i = 0; i < view->n_mapped; i++) {
		(void)r->vmm_unmap(at, view->part_bytes[i]);
		at += view->part_bytes[i];
	}
	(void)r->vmm_unreserve(view->pointer, view->bytes);
}

static int map_all(const struct gpu_runtime *r, struct fmha_view *view,
		   const struct fmha_memory *parts, size_t n, struct fmha_error *err)
{
	struct vmm_access access = {.location_type = LOCATION_DEVICE, .flags = VMM_READ_WRITE};
	uintptr_t at = view->pointer;

	if (r->current_device(&access.location_id) != 0)
		return fmha_error_set(err, FMHA_ENOTSUP, "this thread has no %s device", r->name);
	for (size_t i = 0; i < n; i++) {
		int status = map_part(r, view, at, &parts[i]);

		if (status != 0)
			return fmha_error_set_field(
				err, FMHA_EIO, "fd",
				"%s cannot map part %zu of %zu (%llu bytes): error %d", r->name, i,
				n, (unsigned long long)parts[i].size, status);
		status = r->vmm_access(at, parts[i].size, &access, 1);
		if (status != 0)
			return fmha_error_set_field(
				err, FMHA_ENOTSUP, "fd",
				"device %d cannot reach part %zu, of another device: %s says %d; "
				"peers need NVLink, or PCIe without ACS in between",
				access.location_id, i, r->name, status);
		at += parts[i].size;
	}
	return 0;
}

int fmha_view_new(const struct fmha_memory *parts, size_t n_parts, struct fmha_view **ret_view,
		  struct fmha_error *err)
{
	struct fmha_view *view;
	struct gpu_runtime runtime = {0};
	size_t bytes = 0;
	bool is_external;
	int r;

	if (!parts || n_parts == 0 || n_parts > FMHA_VIEW_MAX_PARTS || !ret_view)
		return fmha_error_set(err, FMHA_EINVAL,
				      "fmha_view_new: an argument is NULL, or not 1 to %d parts",
				      FMHA_VIEW_MAX_PARTS);
	r = check_parts(parts, n_parts, &bytes, err);
	if (r != 0)
		return r;
	r = gpu_runtime_find(&runtime, err);
	if (r != 0)
		return r;
	is_external = runtime.external_open && n_parts == 1;
	r = is_external ? 0 : check_vmm(&runtime, err);
	if (r != 0)
		return r;
	view = calloc(1, sizeof(*view) + n_parts * sizeof(view->part_bytes[0]));
	if (!view)
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	view->bytes = bytes;
	if (is_external) {
		r = map_external(&runtime, view, parts, err);
		if (r < 0)
			free(view);
		else
			*ret_view = view;
		return r;
	}
	if (runtime.vmm_reserve(&view->pointer, bytes, 0, 0, 0) != 0) {
		free(view);
		return fmha_error_set(err, FMHA_ENOMEM, "%s has no %zu bytes of addresses",
				      runtime.name, bytes);
	}
	r = map_all(&runtime, view, parts, n_parts, err);
	if (r < 0) {
		unmap_all(&runtime, view);
		free(view);
		return r;
	}
	*ret_view = view;
	return 0;
}

void *fmha_view_data(const struct fmha_view *view)
{
	return view ? (void *)view->pointer : NULL; // NOLINT(performance-no-int-to-ptr)
}

uint64_t fmha_view_size(const struct fmha_view *view)
{
	return view ? view->bytes : 0;
}

struct fmha_view *fmha_view_free(struct fmha_view *view)
{
	struct gpu_runtime runtime;

	if (!view)
		return NULL;
	if (gpu_runtime_find(&runtime, NULL) == 0)
		unmap_all(&runtime, view);
	free(view);
	return NULL;
}
