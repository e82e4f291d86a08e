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

#define MOST_BYTES (UINT64_C(1) << 60) /* more than any limit allows */

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

int device_open(const struct config_device *config, void (*wake)(void *owner), void *owner,
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
	device->wake = wake;
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

struct device *device_close(struct device *device)
{
	if (device)
		device->ops->close(device);
	return NULL;
}

const struct device_info *device_get_info(const struct device *device)
{
	return &device->info;
}

bool device_has_ended(struct device *device)
{
	bool any;

	pthread_mutex_lock(&device->mutex);
	any = device->done != NULL;
	pthread_mutex_unlock(&device->mutex);
	return any;
}

void device_set_soon(struct device *device,
		     void (*soon)(void *owner, uint64_t from_ns, uint64_t until_ns))
{
	device->soon = soon;
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

void device_set_builder(struct device *device, device_builder builder, device_unbuilder unbuilder,
			void *worker)
{
	device->builder = builder;
	device->unbuilder = unbuilder;
	device->builder_worker = worker;
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

int device_prepare_words(struct device *device, struct device_waiter *waiter,
			 const struct device_kernel **ret_kernel, struct fmha_error *err)
{
	return device->ops->prepare_words
		       ? device->ops->prepare_words(device, waiter, ret_kernel, err)
		       : DEVICE_NO_WORDS;
}

int device_try_words(struct device *device, const struct device_kernel *kernel,
		     struct fmha_error *err)
{
	return device->ops->try_words(device, kernel, err);
}

void device_place_tables(const struct device *device, struct launch_record *record)
{
	device->ops->code->place_tables(device, record);
}

const char *device_kernel_name(const struct device *device, const struct device_kernel *kernel)
{
	return device->ops->code->kernel_name(kernel);
}

int device_prepare(struct device *device, const struct plan_stage *stage,
		   const union abi_args *args, struct device_waiter *waiter,
		   const struct device_kernel **ret_kernel, struct fmha_error *err)
{
	return device->ops->prepare(device, stage, args, waiter, ret_kernel, err);
}

void device_forget(struct device *device, struct device_waiter *waiter)
{
	if (waiter->kernel)
		device->ops->code->forget(device, waiter);
}

bool device_loads_code(const struct device *device)
{
	return device->ops->code;
}

void device_set_idle(struct device *device, uint64_t most, uint64_t most_bytes)
{
	if (device_loads_code(device))
		device->ops->code->set_idle(device, most, most_bytes);
}

void device_unload_idle(struct device *device)
{
	if (device_loads_code(device))
		device->ops->code->unload_idle(device);
}

struct device_code_status device_code_status(const struct device *device)
{
	return device_loads_code(device) ? device->ops->code->status(device)
					 : (struct device_code_status){0};
}

/* Kernels belong to the device: everybody else only has them. */
int device_hold(struct device *device, const struct device_kernel *kernel, uint32_t uid,
		bool *ret_first, struct fmha_error *err)
{
	*ret_first = false;
	if (!device_loads_code(device) || !kernel)
		return 0;
	return device->ops->code->hold(device, (struct device_kernel *)kernel, uid, ret_first, err);
}

bool device_drop(struct device *device, const struct device_kernel *kernel, uint32_t uid)
{
	return device_loads_code(device) && kernel &&
	       device->ops->code->drop(device, (struct device_kernel *)kernel, uid);
}

const struct device_code *device_kernel_code(const struct device *device,
					     const struct device_kernel *kernel)
{
	return device_loads_code(device) && kernel ? device->ops->code->kernel_code(kernel) : NULL;
}

const struct device_code *device_find_code(const struct device *device,
					   const uint8_t hash[LAUNCH_HASH_BYTES])
{
	return device_loads_code(device) ? device->ops->code->find_code(device, hash) : NULL;
}

bool device_has_fences(const struct device *device)
{
	return device->ops->release_fences && !device->info.no_fences[0];
}

bool device_has_events(const struct device *device)
{
	return device->ops->event_import;
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

void device_event_free(struct device *device, struct device_event *event)
{
	device->ops->event_free(device, event);
}

bool device_release_fences(struct device *device, struct device_launch *launch)
{
	return device->ops->release_fences && device->ops->release_fences(device, launch);
}

bool device_shares_memory(const struct device *device)
{
	return !device->ops->staging;
}

uint64_t device_staging_cost(const struct device *device, uint64_t bytes)
{
	return bytes > MOST_BYTES ? MOST_BYTES : device->ops->staging->cost(device, bytes);
}

int device_staging_new(struct device *device, uint64_t bytes, struct device_memory *ret_memory,
		       struct fmha_error *err)
{
	return device->ops->staging->create(device, bytes, ret_memory, err);
}

void device_staging_free(struct device *device, struct device_memory *memory)
{
	device->ops->staging->free(device, memory);
}

void device_set_quarantine(struct device *device, device_quarantine is_quarantined, void *worker)
{
	device->is_quarantined = is_quarantined;
	device->quarantine_worker = worker;
}

void device_enter_thread(struct device *device)
{
	if (device->ops->enter_thread)
		device->ops->enter_thread(device);
}

bool device_memory_take(struct device *device, uint64_t size, struct device_memory *ret_memory,
			int *ret_fd)
{
	return device->ops->memory_take &&
	       device->ops->memory_take(device, size, ret_memory, ret_fd);
}

void device_memory_refill(struct device *device)
{
	if (device->ops->memory_refill)
		device->ops->memory_refill(device);
}

uint64_t device_memory_cost(const struct device *device, const struct device_memory_source *source,
			    bool created)
{
	if (source->size > MOST_BYTES || source->base_offset > MOST_BYTES)
		return MOST_BYTES;
	return device->ops->memory_cost(device, source, created);
}

uint64_t device_workspace_cost(const struct device *device, uint64_t bytes)
{
	return bytes > MOST_BYTES ? MOST_BYTES : device->ops->workspace_cost(device, bytes);
}

int device_memory_create(struct device *device, uint64_t size, struct device_memory *ret_memory,
			 int *ret_fd, struct fmha_error *err)
{
	return device->ops->memory_create(device, size, ret_memory, ret_fd, err);
}

int device_memory_import(struct device *device, const struct device_memory_source *source,
			 struct device_memory *ret_memory, struct fmha_error *err)
{
	return device->ops->memory_import(device, source, ret_memory, err);
}

void device_memory_free(struct device *device, struct device_memory *memory)
{
	device->ops->memory_free(device, memory);
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

int device_workspace_new(struct device *device, uint64_t bytes, struct device_memory *ret_memory,
			 struct fmha_error *err)
{
	return device->ops->workspace_new(device, bytes, ret_memory, err);
}

void device_workspace_free(struct device *device, struct device_memory *memory)
{
	device->ops->workspace_free(device, memory);
}

int device_find_kernel(void *owner, enum abi_family family, uint32_t dtype,
		       const union abi_args *args, struct plan_stage *stage, const char **ret_why)
{
	struct device *device = owner;

	return device->ops->find_kernel(device, family, dtype, args, stage, ret_why);
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

struct device_stream *device_stream_free(struct device *device, struct device_stream *stream)
{
	if (stream)
		device->ops->stream_free(device, stream);
	return NULL;
}

struct device_launch *device_launch_new(struct device *device)
{
	return device->ops->launch_new(device);
}

struct device_launch *device_launch_free(struct device *device, struct device_launch *launch)
{
	if (launch)
		device->ops->launch_free(device, launch);
	return NULL;
}

void device_submit(struct device *device, struct device_launch *launch)
{
	device->ops->submit(device, launch);
}

bool device_run_here(struct device *device, struct device_launch *launch)
{
	return device->ops->run_here(device, launch);
}

void device_cancel(struct device *device, struct device_launch *launch)
{
	device->ops->cancel(device, launch);
}

uint64_t device_stalled_ns(struct device *device, struct device_launch *launch,
			   const char **ret_kernel)
{
	return device->ops->stalled_ns(device, launch, ret_kernel);
}

void device_trim_memory(struct device *device)
{
	if (device->ops->trim_memory)
		device->ops->trim_memory(device);
}

void device_trim(struct device *device)
{
	device->ops->trim(device);
}

bool device_make_room(struct device *device, uint64_t bytes)
{
	return device->ops->staging && device->ops->staging->make_room(device, bytes);
}

int device_inject(struct device *device, const char *fault, uint32_t after, struct fmha_error *err)
{
	if (!device->ops->inject)
		return fmha_error_set(err, FMHA_ENOTSUP, "backend %s has no faults to inject",
				      device->ops->backend);
	return device->ops->inject(device, fault, after, err);
}
