/* SPDX-License-Identifier: MIT */
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>

/* The request for a kernel's code, as it goes to the front. Every user who waits has one, so that
 * the front knows for whom it is done; what one user may not have is no matter to the others. */
struct gpu_build {
	struct gpu_build *next;
	struct gpu_device *gpu;
	struct device_kernel *kernel;
	struct device_build request;
	const char *options[GPU_KERNEL_OPTIONS];
};

/* What the stage's spec stands for; 1: nothing that this device runs. */
static int make_kernel(struct gpu_device *gpu, const union abi_args *args,
		       const struct plan_stage *stage, struct gpu_kernel *ret_kernel)
{
	return !stage->has_spec || device_is_quarantined(&gpu->device, stage->kernel) ||
	       gpu_kernel_of_spec(gpu->device.info.arch, stage->pipeline, &stage->spec, args,
				  ret_kernel) != 0;
}

static struct device_kernel *kernel_by_name(struct gpu_device *gpu, const char *name)
{
	for (struct device_kernel *kernel = gpu->kernels; kernel; kernel = kernel->next)
		if (strcmp(kernel->choice.name, name) == 0)
			return kernel;
	return NULL;
}

int gpu_find_kernel(struct device *device, enum abi_family family, uint32_t dtype,
		    const union abi_args *args, struct plan_stage *stage, const char **ret_why)
{
	struct gpu_device *gpu = gpu_device_of(device);
	const struct device_kernel *seen;
	struct gpu_kernel kernel;
	const char *why;

	(void)family;
	(void)dtype;
	if (make_kernel(gpu, args, stage, &kernel) != 0)
		return 1;
	seen = kernel_by_name(gpu, kernel.name);
	stage->spills = seen ? seen->spills : 0;
	why = gpu_kernel_maps(&kernel, args, &stage->launch);
	if (!why &&
	    gpu_kernel_grid(&kernel, gpu->device.info.compute_units, args, stage->launch.grid) != 0)
		why = "its blocks are more than a launch takes";
	if (why) {
		*ret_why = why;
		return 1;
	}
	memcpy(stage->launch.block, kernel.block, sizeof(stage->launch.block));
	stage->launch.lds_bytes = kernel.lds_bytes;
	_Static_assert(sizeof(kernel.entry) == sizeof(stage->launch.entry),
		       "one name of a function");
	memcpy(stage->launch.entry, kernel.entry, sizeof(kernel.entry));
	stage->launch.overlaps = (uint32_t)kernel.overlaps;
	stage->tile_n0 = (uint32_t)kernel.tile.tile_n;
	return 0;
}

/* NULL: out of memory. */
static struct device_kernel *kernel_of_choice(struct gpu_device *gpu,
					      const struct gpu_kernel *choice)
{
	struct device_kernel *kernel = kernel_by_name(gpu, choice->name);

	if (kernel)
		return kernel;
	kernel = calloc(1, sizeof(*kernel));
	if (!kernel)
		return NULL;
	kernel->choice = *choice;
	kernel->state = GPU_KERNEL_BROKEN; /* until somebody asks for its code */
	kernel->next = gpu->kernels;
	gpu->kernels = kernel;
	return kernel;
}

static void unload(struct device_kernel *kernel)
{
	if (kernel->module)
		(void)hipModuleUnload(kernel->module);
	free(kernel->image);
	kernel->module = NULL;
	kernel->image = NULL;
}

static int load(struct device_kernel *kernel, const struct device_code *code,
		struct fmha_error *err)
{
	const void *image = code->data;
	hipError_t status;

	if (GPU_KEEPS_IMAGE) {
		image = kernel->image = malloc(code->bytes);
		if (!image)
			return fmha_error_set(err, FMHA_ENOMEM, "%.200s: out of memory",
					      kernel->choice.name);
		memcpy(kernel->image, code->data, code->bytes);
	}
	status = hipModuleLoadData(&kernel->module, image);
	if (status == hipSuccess)
		status = hipModuleGetFunction(&kernel->function, kernel->module,
					      kernel->choice.entry);
	if (status == hipSuccess && kernel->choice.lds_bytes > 48 * 1024)
		status = gpu_allow_lds(kernel->function, kernel->choice.lds_bytes);
	if (status == hipSuccess)
		return 0;
	unload(kernel);
	return gpu_error(status, kernel->choice.name, err);
}

static struct gpu_build *find_build(const struct device_kernel *kernel, uint32_t uid)
{
	struct gpu_build *build = kernel->builds;

	while (build && build->request.uid != uid)
		build = build->next;
	return build;
}

static void free_build(struct gpu_build *build)
{
	struct gpu_build **at = &build->kernel->builds;

	while (*at != build)
		at = &(*at)->next;
	*at = build->next;
	free(build);
}

/* Somebody who waits on the user's behalf, on anybody's; NULL: nobody does. */
static struct device_waiter *find_waiter(const struct device_kernel *kernel, const uint32_t *uid)
{
	struct device_waiter *waiter = kernel->waiters;

	while (waiter && uid && waiter->uid != *uid)
		waiter = waiter->next;
	return waiter;
}

static void take_out(struct device_waiter *waiter)
{
	struct device_waiter **at = &waiter->kernel->waiters;

	while (*at && *at != waiter)
		at = &(*at)->next;
	if (*at)
		*at = waiter->next;
	waiter->kernel = NULL;
}

/* One at a time: what is told may make others be forgotten. */
static void tell(struct device_kernel *kernel, const uint32_t *uid, const struct fmha_error *error)
{
	struct device_waiter *waiter;

	while ((waiter = find_waiter(kernel, uid))) {
		take_out(waiter);
		waiter->done(waiter->owner, error);
	}
}

/* The front has answered. @code: borrowed; NULL: @error says why there is none. */
static void on_built(struct device_build *request, const struct device_code *code,
		     const struct fmha_error *error)
{
	struct gpu_build *build = container_of(request, struct gpu_build, request);
	struct device_kernel *kernel = build->kernel;
	struct fmha_error err = code ? (struct fmha_error){0} : *error;
	uint32_t uid = request->uid;

	free_build(build);
	if (kernel->state == GPU_KERNEL_READY)
		return; /* another user's request was answered first */
	if (code)
		kernel->spills = code->spills;
	if (code && load(kernel, code, &err) == 0) {
		kernel->state = GPU_KERNEL_READY;
		tell(kernel, NULL, &err);
		return;
	}
	if (!kernel->builds)
		kernel->state = GPU_KERNEL_BROKEN;
	tell(kernel, &uid, &err);
}

static int request_build(struct gpu_device *gpu, struct device_kernel *kernel,
			 const struct device_waiter *waiter, struct fmha_error *err)
{
	const struct gpu_kernel *choice = &kernel->choice;
	struct gpu_build *build = malloc(sizeof(*build));
	int r;

	if (!build)
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	*build = (struct gpu_build){.next = kernel->builds,
				    .gpu = gpu,
				    .kernel = kernel,
				    .request = {.uid = waiter->uid,
						.pid = waiter->pid,
						.background = waiter->background,
						.kernel = choice->name,
						.arch = gpu->device.info.arch,
						.source = choice->source,
						.options = build->options,
						.n_options = (uint32_t)choice->n_options,
						.done = on_built}};
	for (int i = 0; i < choice->n_options; i++)
		build->options[i] = choice->options[i];
	kernel->builds = build;
	r = device_request_build(&gpu->device, &build->request, err);
	if (r < 0)
		free_build(build);
	else
		kernel->state = GPU_KERNEL_BUILDING;
	return r;
}

static int make_ready(struct gpu_device *gpu, const struct gpu_kernel *choice,
		      struct device_waiter *waiter, const struct device_kernel **ret_kernel,
		      struct fmha_error *err)
{
	struct device_kernel *kernel = kernel_of_choice(gpu, choice);
	int r = 0;

	if (!kernel)
		return fmha_error_set(err, FMHA_ENOMEM, "kernel %.200s: out of memory",
				      choice->name);
	*ret_kernel = kernel;
	if (kernel->state == GPU_KERNEL_READY)
		return 0;
	/* A failed build is tried again by the next plan: the compiler may be there by then. */
	if (!find_build(kernel, waiter->uid))
		r = request_build(gpu, kernel, waiter, err);
	if (r < 0)
		return r;
	waiter->kernel = kernel;
	waiter->next = kernel->waiters;
	kernel->waiters = waiter;
	return DEVICE_PREPARING;
}

int gpu_prepare(struct device *device, const struct plan_stage *stage, const union abi_args *args,
		struct device_waiter *waiter, const struct device_kernel **ret_kernel,
		struct fmha_error *err)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct gpu_kernel choice;

	if (make_kernel(gpu, args, stage, &choice) != 0)
		return fmha_error_set(err, FMHA_ENOKERNEL, "kernel %.200s: not on this device",
				      stage->kernel);
	return make_ready(gpu, &choice, waiter, ret_kernel, err);
}

int gpu_prepare_tables(struct device *device, struct device_waiter *waiter,
		       const struct device_kernel **ret_kernel, struct fmha_error *err)
{
	struct gpu_kernel choice;

	gpu_kernel_make_prepare(device->info.arch, &choice);
	return make_ready(gpu_device_of(device), &choice, waiter, ret_kernel, err);
}

void gpu_place_tables(const struct device *device, struct launch_record *record)
{
	struct gpu_kernel kernel;

	gpu_kernel_make_prepare(device->info.arch, &kernel);
	gpu_kernel_grid_prepare(device->info.compute_units, &record->args.prepare, record->grid);
	memcpy(record->block, kernel.block, sizeof(record->block));
	memcpy(record->entry, kernel.entry, sizeof(record->entry));
}

const char *gpu_kernel_name(const struct device_kernel *kernel)
{
	return kernel->choice.name;
}

/* The last one of the user takes back what was asked for on the user's behalf. */
void gpu_forget(struct device *device, struct device_waiter *waiter)
{
	struct device_kernel *kernel = waiter->kernel;
	struct gpu_build *build = find_build(kernel, waiter->uid);

	take_out(waiter);
	if (build && !find_waiter(kernel, &waiter->uid)) {
		device_cancel_build(device, &build->request);
		free_build(build);
	}
	if (!kernel->builds && kernel->state == GPU_KERNEL_BUILDING)
		kernel->state = GPU_KERNEL_BROKEN;
}

void gpu_kernels_free(struct gpu_device *gpu)
{
	while (gpu->kernels) {
		struct device_kernel *kernel = gpu->kernels;

		gpu->kernels = kernel->next;
		for (struct device_waiter *w = kernel->waiters; w; w = w->next)
			w->kernel = NULL;
		while (kernel->builds)
			free_build(kernel->builds);
		unload(kernel);
		free(kernel);
	}
}
