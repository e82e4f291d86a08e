/* SPDX-License-Identifier: MIT */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <base/memfd.h>
#include <proto/error.h>

#define USUALLY_IDLE 16

/* The request for a kernel's code, as it goes to the front. Every user who waits has one, so that
 * the front knows for whom it is done; what one user may not have is no matter to the others. */
struct gpu_build {
	struct gpu_build *next;
	struct gpu_device *gpu;
	struct device_kernel *kernel;
	struct device_build request;
};

/* What the stage's spec stands for; NULL: nothing that this device runs, *ret_why says why where a loop
 * does. It lasts as long as the next GPU_ORDERS. */
static const struct gpu_order *make_order(struct gpu_device *gpu, const struct plan_stage *stage,
					  const char **ret_why)
{
	struct gpu_order *order = &gpu->orders[gpu->n_orders % GPU_ORDERS];
	const char *why;

	if (!stage->has_spec)
		return NULL;
	why = gpu_kernel_of_spec(gpu->device.info.arch, stage->pipeline, &stage->spec,
				 &stage->traits, &order->kernel);
	if (why) {
		*ret_why = why;
		return NULL;
	}
	order->identity = build_identity(&order->kernel.build);
	gpu->n_orders++;
	return order;
}

/* The one that gpu_find_kernel() made for the stage, if it was not long ago. */
static const struct gpu_order *order_of(struct gpu_device *gpu, const struct plan_stage *stage)
{
	const char *why;

	for (uint32_t i = 0; i < GPU_ORDERS && i < gpu->n_orders; i++)
		if (build_identity_word(&gpu->orders[i].identity) == stage->code)
			return &gpu->orders[i];
	return make_order(gpu, stage, &why);
}

static struct list *list_of(struct gpu_device *gpu, const struct build_identity *identity)
{
	return &gpu->kernels[build_identity_word(identity) % GPU_KERNEL_LISTS];
}

/* NULL: nobody has asked for its code. */
static struct device_kernel *find_kernel(struct gpu_device *gpu,
					 const struct build_identity *identity)
{
	list_for_each_entry(struct device_kernel, kernel, list_of(gpu, identity), in_kernels) {
		if (memcmp(&kernel->identity, identity, sizeof(*identity)) == 0)
			return kernel;
	}
	return NULL;
}

int gpu_find_kernel(struct device *device, enum abi_family family, uint32_t dtype,
		    const union abi_args *args, struct plan_stage *stage, const char **ret_why)
{
	struct gpu_device *gpu = gpu_device_of(device);
	const struct gpu_order *order = make_order(gpu, stage, ret_why);
	const struct device_kernel *seen;
	const char *why;

	(void)family;
	(void)dtype;
	if (!order)
		return 1;
	stage->code = build_identity_word(&order->identity);
	if (device_is_quarantined(device, stage->kernel, stage->code)) {
		*ret_why = DEVICE_QUARANTINED;
		return 1;
	}
	seen = find_kernel(gpu, &order->identity);
	stage->spills = seen ? seen->code.spills : 0;
	why = gpu_kernel_launch(&order->kernel, gpu->device.info.compute_units, args,
				&stage->launch);
	if (why) {
		*ret_why = why;
		return 1;
	}
	stage->tile_n0 = (uint32_t)order->kernel.tile.tile_n;
	return 0;
}

/* NULL: out of memory. */
static struct device_kernel *kernel_of_order(struct gpu_device *gpu, const struct gpu_order *order)
{
	struct device_kernel *kernel = find_kernel(gpu, &order->identity);

	if (kernel)
		return kernel;
	kernel = calloc(1, sizeof(*kernel));
	if (!kernel)
		return NULL;
	kernel->choice = order->kernel;
	kernel->identity = order->identity;
	kernel->state = GPU_KERNEL_BROKEN; /* until somebody asks for its code */
	kernel->code.fd = -1;
	list_init(&kernel->in_codes);
	list_init(&kernel->in_idle);
	list_prepend(list_of(gpu, &order->identity), &kernel->in_kernels);
	return kernel;
}

/* ---- what is loaded ---- */

static void unload(struct device_kernel *kernel)
{
	if (kernel->module)
		(void)hipModuleUnload(kernel->module);
	free(kernel->image);
	kernel->module = NULL;
	kernel->image = NULL;
}

/* A driver may wait for everything that runs before it unloads: a thread of its own does. */
static void unload_later(struct gpu_device *gpu, struct device_kernel *kernel)
{
	struct gpu_memory *code = kernel->module ? calloc(1, sizeof(*code)) : NULL;

	if (!code) {
		unload(kernel);
		return;
	}
	code->kind = MEMORY_CODE;
	code->module = kernel->module;
	code->base = kernel->image;
	kernel->module = NULL;
	kernel->image = NULL;
	gpu_reclaim(gpu, code);
}

static struct list *list_of_code(struct gpu_device *gpu, const uint8_t *hash)
{
	return &gpu->codes[(hash[0] | (uint32_t)hash[1] << 8) % GPU_KERNEL_LISTS];
}

static void forget_code(struct gpu_device *gpu, struct device_kernel *kernel)
{
	if (list_is_empty(&kernel->in_codes))
		return;
	list_remove(&kernel->in_codes);
	if (kernel->code.fd >= 0)
		(void)close(kernel->code.fd);
	kernel->code.fd = -1;
	gpu->status.n--;
	gpu->status.bytes -= kernel->code.bytes;
	gpu->status.n_unloaded++;
}

static void wake(struct gpu_device *gpu, struct device_kernel *kernel)
{
	if (list_is_empty(&kernel->in_idle))
		return;
	list_remove(&kernel->in_idle);
	gpu->status.n_idle--;
	gpu->idle_bytes -= kernel->code.bytes;
}

/* Nobody has it, nor is there anybody who waits for it. */
static void forget_kernel(struct gpu_device *gpu, struct device_kernel *kernel)
{
	wake(gpu, kernel);
	list_remove(&kernel->in_kernels);
	forget_code(gpu, kernel);
	unload_later(gpu, kernel);
	free(kernel);
}

/* The user for whom most of the idle kernels were loaded, or of their bytes: a flood of one user's leaves the others theirs. */
static uint32_t richest_user(const struct gpu_device *gpu, bool by_bytes)
{
	struct {
		uint32_t uid;
		uint64_t n;
	} users[32] = {{0, 0}}; /* those that come after so many others lose what they had last */
	uint32_t n_users = 0, richest = 0;

	list_for_each_entry(const struct device_kernel, kernel, &gpu->idle, in_idle) {
		uint32_t i = 0;

		while (i < n_users && users[i].uid != kernel->owner)
			i++;
		if (i == n_users && n_users == sizeof(users) / sizeof(users[0]))
			continue;
		if (i == n_users) {
			users[n_users].uid = kernel->owner;
			users[n_users++].n = 0;
		}
		users[i].n += by_bytes ? kernel->code.bytes : 1;
		if (users[i].n > users[richest].n)
			richest = i;
	}
	return users[richest].uid;
}

static void trim(struct gpu_device *gpu)
{
	while (gpu->status.n_idle > gpu->most_idle || gpu->idle_bytes > gpu->most_idle_bytes) {
		uint32_t uid = richest_user(gpu, gpu->status.n_idle <= gpu->most_idle);

		list_for_each_entry(struct device_kernel, kernel, &gpu->idle, in_idle) {
			if (kernel->owner != uid)
				continue;
			forget_kernel(gpu, kernel);
			break;
		}
	}
}

/* After whatever may have been the last reason to keep it; it may be gone then. */
static void settle(struct gpu_device *gpu, struct device_kernel *kernel)
{
	if (kernel->holds || kernel->n_served > 0 || kernel->waiters || kernel->builds ||
	    !list_is_empty(&kernel->in_idle))
		return;
	if (kernel->state != GPU_KERNEL_READY) {
		forget_kernel(gpu, kernel);
		return;
	}
	list_append(&gpu->idle, &kernel->in_idle);
	gpu->status.n_idle++;
	gpu->idle_bytes += kernel->code.bytes;
	trim(gpu);
}

int gpu_hold(struct device *device, struct device_kernel *kernel, uint32_t uid, bool *ret_first,
	     struct fmha_error *err)
{
	struct gpu_hold *hold = kernel->holds;

	while (hold && hold->uid != uid)
		hold = hold->next;
	*ret_first = !hold;
	if (!hold) {
		hold = calloc(1, sizeof(*hold));
		if (!hold)
			return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
		hold->uid = uid;
		hold->next = kernel->holds;
		kernel->holds = hold;
		wake(gpu_device_of(device), kernel);
	}
	hold->n++;
	return 0;
}

bool gpu_drop(struct device *device, struct device_kernel *kernel, uint32_t uid)
{
	struct gpu_hold **at = &kernel->holds, *hold;

	while ((*at)->uid != uid)
		at = &(*at)->next;
	hold = *at;
	if (--hold->n > 0)
		return false;
	*at = hold->next;
	free(hold);
	settle(gpu_device_of(device), kernel);
	return true;
}

const struct device_code *gpu_kernel_code(const struct device_kernel *kernel)
{
	return &kernel->code;
}

const struct device_code *gpu_find_code(const struct device *device, const uint8_t *hash)
{
	struct gpu_device *gpu = gpu_device_of((struct device *)device);

	list_for_each_entry(struct device_kernel, kernel, list_of_code(gpu, hash), in_codes) {
		if (memcmp(kernel->code.hash, hash, sizeof(kernel->code.hash)) == 0)
			return &kernel->code;
	}
	return NULL;
}

void gpu_set_idle(struct device *device, uint64_t most, uint64_t most_bytes)
{
	struct gpu_device *gpu = gpu_device_of(device);

	gpu->most_idle = most;
	gpu->most_idle_bytes = most_bytes;
	trim(gpu);
}

void gpu_unload_idle(struct device *device)
{
	struct gpu_device *gpu = gpu_device_of(device);

	list_for_each_entry(struct device_kernel, kernel, &gpu->idle, in_idle) {
		forget_kernel(gpu, kernel);
	}
}

struct device_code_status gpu_code_status(const struct device *device)
{
	return ((const struct gpu_device *)device)->status;
}

static hipError_t load_module(struct gpu_device *gpu, struct device_kernel *kernel,
			      const void *image)
{
	hipError_t status = hipModuleLoadData(&kernel->module, image);
	uint64_t since;

	if (status != hipErrorOutOfMemory || gpu->status.n_idle == 0)
		return status;
	since = gpu_reclaimed(gpu);
	gpu_unload_idle(&gpu->device);
	(void)gpu_reclaim_wait(gpu, since, GPU_LOOP_PATIENCE_MS);
	return hipModuleLoadData(&kernel->module, image);
}

static int kernel_load(struct gpu_device *gpu, struct device_kernel *kernel,
		       const struct device_code *code, struct fmha_error *err)
{
	const void *image = code->data;
	hipError_t status;

	if (GPU_KEEPS_IMAGE) {
		image = kernel->image = malloc(code->bytes);
		if (!image)
			return fmha_error_set(err, FMHA_ENOMEM, "%.200s: out of memory",
					      kernel->choice.build.name);
		memcpy(kernel->image, code->data, code->bytes);
	}
	status = load_module(gpu, kernel, image);
	if (status == hipSuccess)
		status = hipModuleGetFunction(&kernel->function, kernel->module,
					      kernel->choice.entry);
	if (status == hipSuccess && kernel->choice.lds_bytes > 48 * 1024)
		status = gpu_allow_lds(kernel->function, kernel->choice.lds_bytes);
	if (status == hipSuccess)
		return 0;
	unload(kernel);
	return gpu_error(status, kernel->choice.build.name, err);
}

/*
 * Code stays in the file that the front has made, sealed, for clients who launch it themselves: each gets a descriptor
 * of the same one. Its pages are there once, for as long as the kernel is loaded. Kernels that nobody has make room for
 * the descriptor.
 */
static int keep_code(struct gpu_device *gpu, struct device_kernel *kernel,
		     const struct device_code *code, struct fmha_error *err)
{
	int fd = code->fd < 0 ? -1 : memfd_again(code->fd);

	if (fd < 0 && code->fd >= 0) {
		gpu_unload_idle(&gpu->device);
		fd = memfd_again(code->fd);
	}
	if (fd < 0 && code->fd >= 0) {
		unload(kernel);
		return fmha_error_set(err, FMHA_ENOMEM, "no descriptor for the code of %.150s",
				      kernel->choice.build.name);
	}
	kernel->code.fd = fd;
	memcpy(kernel->code.hash, code->hash, sizeof(code->hash));
	list_append(list_of_code(gpu, code->hash), &kernel->in_codes);
	gpu->status.n++;
	gpu->status.bytes += code->bytes;
	return 0;
}

/* ---- who waits ---- */

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
	waiter->waits = false;
}

/* From now on it has its kernel, until it is forgotten. */
static void serve(struct device_kernel *kernel, struct device_waiter *waiter)
{
	waiter->kernel = kernel;
	kernel->n_served++;
}

/* One at a time: what is told may make others be forgotten. */
static void tell(struct device_kernel *kernel, const uint32_t *uid, const struct fmha_error *error)
{
	struct device_waiter *waiter;

	while ((waiter = find_waiter(kernel, uid))) {
		take_out(waiter);
		waiter->kernel = NULL;
		if (error->code == FMHA_OK)
			serve(kernel, waiter);
		waiter->done(waiter->owner, error);
	}
}

static void take_code(struct gpu_device *gpu, struct device_kernel *kernel, uint32_t uid,
		      const struct device_code *code, struct fmha_error *err)
{
	if (kernel->state == GPU_KERNEL_READY)
		return; /* another user's request was answered first */
	if (code) {
		kernel->code.spills = code->spills;
		kernel->code.bytes = code->bytes;
	}
	if (code && kernel_load(gpu, kernel, code, err) == 0 &&
	    keep_code(gpu, kernel, code, err) == 0) {
		kernel->state = GPU_KERNEL_READY;
		tell(kernel, NULL, err);
		return;
	}
	if (!kernel->builds)
		kernel->state = GPU_KERNEL_BROKEN;
	tell(kernel, &uid, err);
}

/* The front has answered. @code: borrowed; NULL: @error says why there is none. */
static void on_built(struct device_build *request, const struct device_code *code,
		     const struct fmha_error *error)
{
	struct gpu_build *build = container_of(request, struct gpu_build, request);
	struct gpu_device *gpu = build->gpu;
	struct device_kernel *kernel = build->kernel;
	struct fmha_error err = code ? (struct fmha_error){0} : *error;
	uint32_t uid = request->uid;

	free_build(build);
	kernel->n_served++; /* whoever is told may be the last one who wants it */
	take_code(gpu, kernel, uid, code, &err);
	kernel->n_served--;
	settle(gpu, kernel);
}

static int request_build(struct gpu_device *gpu, struct device_kernel *kernel,
			 const struct device_waiter *waiter, struct fmha_error *err)
{
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
						.build = &kernel->choice.build,
						.done = on_built}};
	kernel->builds = build;
	r = device_request_build(&gpu->device, &build->request, err);
	if (r < 0)
		free_build(build);
	else
		kernel->state = GPU_KERNEL_BUILDING;
	return r;
}

static int make_ready(struct gpu_device *gpu, const struct gpu_order *order,
		      struct device_waiter *waiter, const struct device_kernel **ret_kernel,
		      struct fmha_error *err)
{
	struct device_kernel *kernel = kernel_of_order(gpu, order);
	int r = 0;

	if (!kernel)
		return fmha_error_set(err, FMHA_ENOMEM, "kernel %.200s: out of memory",
				      order->kernel.build.name);
	*ret_kernel = kernel;
	wake(gpu, kernel);
	if (kernel->state == GPU_KERNEL_READY) {
		serve(kernel, waiter);
		return 0;
	}
	kernel->owner = waiter->uid;
	/* A failed build is tried again by the next plan: the compiler may be there by then. */
	if (!find_build(kernel, waiter->uid))
		r = request_build(gpu, kernel, waiter, err);
	if (r < 0) {
		settle(gpu, kernel);
		return r;
	}
	waiter->kernel = kernel;
	waiter->waits = true;
	waiter->next = kernel->waiters;
	kernel->waiters = waiter;
	return DEVICE_PREPARING;
}

int gpu_prepare(struct device *device, const struct plan_stage *stage, const union abi_args *args,
		struct device_waiter *waiter, const struct device_kernel **ret_kernel,
		struct fmha_error *err)
{
	struct gpu_device *gpu = gpu_device_of(device);
	const struct gpu_order *order = order_of(gpu, stage);

	(void)args;
	if (!order || device_is_quarantined(device, stage->kernel, stage->code))
		return fmha_error_set(err, FMHA_ENOKERNEL, "kernel %.200s: not on this device",
				      stage->kernel);
	return make_ready(gpu, order, waiter, ret_kernel, err);
}

int gpu_prepare_tables(struct device *device, struct device_waiter *waiter,
		       const struct device_kernel **ret_kernel, struct fmha_error *err)
{
	struct gpu_order order;

	gpu_kernel_make_prepare(device->info.arch, &order.kernel);
	order.identity = build_identity(&order.kernel.build);
	return make_ready(gpu_device_of(device), &order, waiter, ret_kernel, err);
}

/* Only where the runtime's own waits have failed. */
int gpu_prepare_words(struct device *device, struct device_waiter *waiter,
		      const struct device_kernel **ret_kernel, struct fmha_error *err)
{
	struct gpu_order order;

	if (!device->info.no_fences[0])
		return DEVICE_NO_WORDS;
	gpu_kernel_make_word(device->info.arch, &order.kernel);
	order.identity = build_identity(&order.kernel.build);
	return make_ready(gpu_device_of(device), &order, waiter, ret_kernel, err);
}

int gpu_try_words(struct device *device, const struct device_kernel *kernel, struct fmha_error *err)
{
	struct gpu_device *gpu = gpu_device_of(device);
	char trouble[sizeof(device->info.no_fences)] = "";
	hipError_t status = gpu_try_fences(kernel->function, gpu->rescue, trouble, sizeof(trouble));

	if (status != hipSuccess)
		return gpu_failure(gpu, status, "trying a kernel that waits for words", err);
	if (trouble[0])
		return fmha_error_set(err, FMHA_ENOTSUP, "a kernel does not do better: %s",
				      trouble);
	gpu->word_kernel = kernel->function;
	device->info.no_fences[0] = '\0';
	return 0;
}

void gpu_place_tables(const struct device *device, struct launch_record *record)
{
	struct gpu_kernel kernel;

	gpu_kernel_make_prepare(device->info.arch, &kernel);
	gpu_kernel_grid_prepare(device->info.compute_units, &record->args.prepare, record->grid);
	memcpy(record->block, kernel.block, sizeof(record->block));
	memcpy(record->entry, kernel.entry, sizeof(record->entry));
	record->overlaps = (uint32_t)kernel.overlaps;
}

const char *gpu_kernel_name(const struct device_kernel *kernel)
{
	return kernel->choice.build.name;
}

/* The last one of the user takes back what was asked for on the user's behalf. */
static void stop_waiting(struct device *device, struct device_waiter *waiter)
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

void gpu_forget(struct device *device, struct device_waiter *waiter)
{
	struct device_kernel *kernel = waiter->kernel;

	if (waiter->waits)
		stop_waiting(device, waiter);
	else
		kernel->n_served--;
	waiter->kernel = NULL;
	settle(gpu_device_of(device), kernel);
}

void gpu_kernels_init(struct gpu_device *gpu)
{
	for (size_t i = 0; i < GPU_KERNEL_LISTS; i++) {
		list_init(&gpu->kernels[i]);
		list_init(&gpu->codes[i]);
	}
	list_init(&gpu->idle);
	gpu->most_idle = USUALLY_IDLE;
	gpu->most_idle_bytes = UINT64_MAX;
}

static void free_kernel(struct gpu_device *gpu, struct device_kernel *kernel)
{
	for (struct device_waiter *w = kernel->waiters; w; w = w->next)
		w->kernel = NULL;
	while (kernel->builds)
		free_build(kernel->builds);
	while (kernel->holds) {
		struct gpu_hold *hold = kernel->holds;

		kernel->holds = hold->next;
		free(hold);
	}
	forget_code(gpu, kernel);
	unload(kernel);
	free(kernel);
}

void gpu_kernels_free(struct gpu_device *gpu)
{
	for (size_t i = 0; i < GPU_KERNEL_LISTS; i++)
		list_for_each_entry(struct device_kernel, kernel, &gpu->kernels[i], in_kernels) {
			free_kernel(gpu, kernel);
		}
}
