/* SPDX-License-Identifier: MIT */
/* registry.c: a device's kernel registry, seen and changed from here. */
#include "client.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* Documents travel in memfds. @ret_fd: given. */
static int json_to_memfd(const char *json, size_t size, int *ret_fd, struct fmha_error *err)
{
	size_t done = 0;
	int fd, r;

	if (size > JSON_MAX_BYTES)
		return fmha_error_set_field(err, FMHA_EINVAL, "size", "a document of %zu bytes",
					    size);
	r = fmha_memfd_new(size, &fd, err);
	if (r < 0)
		return r;
	while (done < size) {
		ssize_t n = pwrite(fd, json + done, size - done, (off_t)done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			r = fmha_error_set(err, FMHA_EIO, "writing a memfd: %s", strerror(errno));
			(void)close(fd);
			return r;
		}
		done += (size_t)n;
	}
	*ret_fd = fd;
	return 0;
}

#define COPY_NAME(params, member, from, err)                                                       \
	client_copy_name((params).member, sizeof((params).member), from, #member, err)

/* ---- looking ---- */

int fmha_registry_export(struct fmha_device *device, const char *filter, char **ret_json,
			 struct fmha_error *err)
{
	struct proto_registry_export_params params = {0};
	int r = client_check(device && ret_json ? device->client : NULL, __func__, err);

	if (r == 0)
		r = COPY_NAME(params, filter, filter ? filter : "", err);
	return r < 0 ? r : device_call_json(device, PROTO_REGISTRY_EXPORT, &params, ret_json, err);
}

int fmha_registry_get(struct fmha_device *device, const char *kernel, char **ret_json,
		      struct fmha_error *err)
{
	struct proto_registry_kernel_params params = {0};
	int r = client_check(device && kernel && ret_json ? device->client : NULL, __func__, err);

	if (r == 0)
		r = COPY_NAME(params, kernel, kernel, err);
	return r < 0 ? r : device_call_json(device, PROTO_REGISTRY_GET, &params, ret_json, err);
}

int fmha_census(struct fmha_device *device, char **ret_json, struct fmha_error *err)
{
	const struct proto_empty params = {0};
	int r = client_check(device && ret_json ? device->client : NULL, __func__, err);

	return r < 0 ? r : device_call_json(device, PROTO_CENSUS, &params, ret_json, err);
}

/* ---- changing ---- */

/* @fd: a document that comes with it, or -1. */
static int change(struct fmha_device *device, enum proto_method method, const void *params, int fd,
		  uint64_t *ret_n, bool *ret_stored, struct fmha_error *err)
{
	struct proto_registry_result result;
	int r = link_call(&device->worker, method, params, fd, client_deadline(device->client),
			  &result, NULL, err);

	if (r == 0 && ret_n)
		*ret_n = result.n_kernels;
	if (r == 0 && ret_stored)
		*ret_stored = result.stored != 0;
	return r;
}

static int send_document(struct fmha_device *device, enum proto_method method, const void *params,
			 const char *json, size_t size, uint64_t *ret_n, struct fmha_error *err)
{
	int fd = -1, r = json_to_memfd(json, size, &fd, err);

	if (r == 0) {
		r = change(device, method, params, fd, ret_n, NULL, err);
		(void)close(fd);
	}
	return r;
}

int fmha_registry_import(struct fmha_device *device, const char *json, size_t size,
			 uint64_t *ret_n_kernels, struct fmha_error *err)
{
	const struct proto_empty params = {0};
	int r = client_check(device && json ? device->client : NULL, __func__, err);

	return r < 0 ? r
		     : send_document(device, PROTO_REGISTRY_IMPORT, &params, json, size,
				     ret_n_kernels, err);
}

int fmha_registry_load(struct fmha_device *device, const char *set, const char *json, size_t size,
		       uint64_t *ret_n_kernels, struct fmha_error *err)
{
	struct proto_registry_set_params params = {0};
	int r = client_check(device && set && json ? device->client : NULL, __func__, err);

	if (r == 0)
		r = COPY_NAME(params, set, set, err);
	return r < 0 ? r
		     : send_document(device, PROTO_REGISTRY_LOAD, &params, json, size,
				     ret_n_kernels, err);
}

int fmha_registry_unload(struct fmha_device *device, const char *set, uint64_t *ret_n_kernels,
			 struct fmha_error *err)
{
	struct proto_registry_set_params params = {0};
	int r = client_check(device && set ? device->client : NULL, __func__, err);

	if (r == 0)
		r = COPY_NAME(params, set, set, err);
	return r < 0 ? r
		     : change(device, PROTO_REGISTRY_UNLOAD, &params, -1, ret_n_kernels, NULL, err);
}

int fmha_registry_set_priority(struct fmha_device *device, const char *kernel, int32_t priority,
			       bool *ret_stored, struct fmha_error *err)
{
	struct proto_registry_priority_params params = {.priority = priority};
	int r = client_check(device && kernel ? device->client : NULL, __func__, err);

	if (r == 0)
		r = COPY_NAME(params, kernel, kernel, err);
	return r < 0 ? r
		     : change(device, PROTO_REGISTRY_SET_PRIORITY, &params, -1, NULL, ret_stored,
			      err);
}

int fmha_registry_lift(struct fmha_device *device, const char *kernel, bool *ret_stored,
		       struct fmha_error *err)
{
	struct proto_registry_kernel_params params = {0};
	int r = client_check(device && kernel ? device->client : NULL, __func__, err);

	if (r == 0)
		r = COPY_NAME(params, kernel, kernel, err);
	return r < 0 ? r : change(device, PROTO_REGISTRY_LIFT, &params, -1, NULL, ret_stored, err);
}

int fmha_registry_forget(struct fmha_device *device, const char *kernel, const char *shape,
			 uint64_t *ret_n, bool *ret_stored, struct fmha_error *err)
{
	struct proto_registry_forget_params params = {0};
	int r = client_check(device ? device->client : NULL, __func__, err);

	if (r == 0)
		r = COPY_NAME(params, kernel, kernel ? kernel : "", err);
	if (r == 0)
		r = COPY_NAME(params, shape, shape ? shape : "", err);
	return r < 0 ? r
		     : change(device, PROTO_REGISTRY_FORGET, &params, -1, ret_n, ret_stored, err);
}
