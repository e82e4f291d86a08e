/* SPDX-License-Identifier: MIT */
/* device.c: the face of a device: choosing a backend, and its functions for the worker. */
#include "device_impl.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <proto/error.h>
#include <tree/tree.h>

static const struct device_ops *const backends[] = {&cpu_device_ops, &fake_device_ops};
static const char *const modules[] = {"hip", "cuda"}; /* fmhad-<name>.so */

/* Never unloaded. */
static int open_module(const char *backend, const struct device_ops **ret_ops,
		       struct fmha_error *err)
{
	char name[64], path[PATH_MAX];
	void *module;

	(void)snprintf(name, sizeof(name), "fmhad-%s.so", backend);
	if (access(tree_path(TREE_MODULES, name, path, sizeof(path)), F_OK) != 0)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "backend",
					    "backend %s is not installed: there is no %.160s",
					    backend, path);
	module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!module)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "backend", "backend %s: %.200s",
					    backend, dlerror());
	*ret_ops = dlsym(module, DEVICE_MODULE_SYMBOL);
	if (!*ret_ops || strcmp((*ret_ops)->backend, backend) != 0)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "backend",
					    "backend %s: %.180s is no module of this fmhad",
					    backend, path);
	return 0;
}

static int find_backend(const char *name, const struct device_ops **ret_ops, struct fmha_error *err)
{
	for (size_t i = 0; i < sizeof(backends) / sizeof(backends[0]); i++)
		if (strcmp(backends[i]->backend, name) == 0) {
			*ret_ops = backends[i];
			return 0;
		}
	for (size_t i = 0; i < sizeof(modules) / sizeof(modules[0]); i++)
		if (strcmp(modules[i], name) == 0)
			return open_module(name, ret_ops, err);
	return fmha_error_set_field(err, FMHA_ENOTSUP, "backend", "backend %s is not in this build",
				    name);
}

int device_check(const struct config_device *config, struct fmha_error *err)
{
	const struct device_ops *ops = NULL;
	int r = find_backend(config->backend, &ops, err);

	return r == 0 && ops->check ? ops->check(config, err) : r;
}

int device_open(const struct config_device *config, const struct device_calls *calls, void *owner,
		struct device **ret_device, struct fmha_error *err)
{
	const struct device_ops *ops = NULL;
	struct device *device = NULL;
	int r;

	r = find_backend(config->backend, &ops, err);
	if (r == 0)
		r = ops->open(config, &device, err);
	if (r < 0)
		return r;
	device->calls = calls;
	device->owner = owner;
	device->done_tail = &device->done;
	pthread_mutex_init(&device->mutex, NULL);
	*ret_device = device;
	return 0;
}

int device_trial(const char *backend, const char *device, const char *role)
{
	const struct device_ops *ops = NULL;

	if (find_backend(backend, &ops, NULL) < 0 || !ops->trial)
		return EXIT_FAILURE;
	return ops->trial((uint32_t)strtoul(device, NULL, 10), role);
}

bool device_has_ended(struct device *device)
{
	bool any;

	pthread_mutex_lock(&device->mutex);
	any = device->done != NULL;
	pthread_mutex_unlock(&device->mutex);
	return any;
}

void device_collect(struct device *device)
{
	struct device_launch *launch, *next;

	pthread_mutex_lock(&device->mutex);
	launch = device->done;
	device->done = NULL;
	device->done_tail = &device->done;
	pthread_mutex_unlock(&device->mutex);
	for (; launch; launch = next) {
		next = launch->next_done;
		launch->on_done(launch);
	}
}

int device_prepare_tables(struct device *device, struct device_waiter *waiter,
			  const struct device_kernel **ret_kernel, struct fmha_error *err)
{
	if (!device_loads_code(device))
		return fmha_error_set(
			err, FMHA_ENOTSUP,
			"a %s device has no code that clients launch: share memory and "
			"let its worker run",
			device->info.backend);
	return device->ops->code->prepare_tables(device, waiter, ret_kernel, err);
}

int device_event_import(struct device *device, const uint8_t *handle, uint32_t handle_bytes,
			struct device_event **ret_event, struct fmha_error *err)
{
	if (!device->ops->event_import)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "method",
					    "event_import: this device cannot use other processes' "
					    "events");
	return device->ops->event_import(device, handle, handle_bytes, ret_event, err);
}

uint64_t device_memory_cost(const struct device *device, const struct device_memory_source *source,
			    bool created)
{
	if (source->size > DEVICE_MOST_BYTES || source->base_offset > DEVICE_MOST_BYTES)
		return DEVICE_MOST_BYTES;
	return device->ops->memory_cost(device, source, created);
}

int device_memory_clear(struct device *device, struct device_memory *memory, uint64_t offset,
			uint64_t bytes, struct fmha_error *err)
{
	if (!device->ops->memory_clear)
		return fmha_error_set(err, FMHA_ENOTSUP, "device %s has no memory of its own",
				      device->info.name);
	if (bytes > memory->bytes || offset > memory->bytes - bytes)
		return fmha_error_set(err, FMHA_EINVAL, "the memory has %llu bytes",
				      (unsigned long long)memory->bytes);
	return device->ops->memory_clear(device, memory, offset, bytes, err);
}

int device_stream_new(struct device *device, uint32_t uid, uint32_t weight,
		      struct device_stream **ret_stream, struct fmha_error *err)
{
	struct device_stream *stream = device->ops->stream_new(device, uid, weight);

	if (!stream)
		return fmha_error_set(err, FMHA_ENOMEM, "stream: out of memory");
	*ret_stream = stream;
	return 0;
}

int device_inject(struct device *device, const char *fault, uint32_t after, struct fmha_error *err)
{
	if (!device->ops->inject)
		return fmha_error_set(err, FMHA_ENOTSUP, "backend %s has no faults to inject",
				      device->ops->backend);
	return device->ops->inject(device, fault, after, err);
}
