/* SPDX-License-Identifier: MIT */
/*
 * hip.c: GPUs as devices. Built twice, into two modules that fmhad opens only in a worker of such a
 * device: fmhad-hip.so on libamdhip64, and fmhad-cuda.so on libcuda; see hip_calls.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include <kernels/gpu_peak.h>
#include <proto/error.h>

#include "gpu.h"
#ifdef FMHA_HIP_ON_CUDA
#include "mps.h"
#endif

extern const struct device_ops fmhad_device_ops;

/* The kernel's module, where the machine says which one it is, and what the library speaks. */
static void describe_driver(struct device_info *info)
{
	static const char *const modules[] = {"/sys/module/nvidia/version",
					      "/sys/module/amdgpu/version"};
	char module[32] = "";
	int version = 0;

	for (size_t i = 0; i < sizeof(modules) / sizeof(modules[0]) && !*module; i++) {
		FILE *file = fopen(modules[i], "re");

		if (file && fgets(module, sizeof(module), file))
			module[strcspn(module, "\n")] = '\0';
		if (file)
			(void)fclose(file);
	}
	(void)hipDriverGetVersion(&version);
	(void)snprintf(info->driver, sizeof(info->driver), "%s %d", module, version);
}

/* By the highest clock. AMD's runtime says a clock of the memory, but not how often a clock moves data. */
static void describe_peak(struct device_info *info, const hipDeviceProp_t *properties)
{
	const struct gpu_peak *peak = gpu_peak_find(info->arch);
	double clocks = properties->clockRate * 1e3 * info->compute_units;

	if (peak) {
		info->peak.f32 = peak->f32 * clocks;
		info->peak.f16 = peak->f16 * clocks;
		info->peak.fp8 = peak->fp8 * clocks;
	}
#ifdef FMHA_HIP_ON_CUDA
	info->peak.bytes = 2.0 * properties->memoryClockRate * 1e3 * properties->memoryBusWidth / 8;
#endif
}

/* One without an address (a driver that does not tell) gets none. */
static void describe_address(char address[PCI_BYTES], const hipDeviceProp_t *properties)
{
	if (properties->pciDomainID || properties->pciBusID || properties->pciDeviceID)
		(void)snprintf(address, PCI_BYTES, "%04x:%02x:%02x.0",
			       (unsigned int)properties->pciDomainID & 0xffff,
			       (unsigned int)properties->pciBusID & 0xff,
			       (unsigned int)properties->pciDeviceID & 0xff);
	else
		address[0] = '\0';
}

static bool is_at(uint32_t index, const char *address)
{
	hipDeviceProp_t properties;
	char at[PCI_BYTES];

	if (hipGetDeviceProperties(&properties, (int)index) != hipSuccess)
		return false;
	describe_address(at, &properties);
	return strcasecmp(at, address) == 0;
}

/*
 * The driver's number of the device that @config means. Numbers move up when a card before it is lost, so an
 * address goes before them; parts of one card share theirs, of which the number says which.
 */
static int find_index(const struct config_device *config, uint32_t count, uint32_t *ret_index,
		      struct fmha_error *err)
{
	*ret_index = config->index;
	if (!config->pci[0])
		return config->index < count ? 0
					     : fmha_error_set_field(err, FMHA_ENOENT, "index",
								    "index %u: the " GPU_BACKEND
								    " driver shows %u devices",
								    config->index, count);
	if (config->index < count && is_at(config->index, config->pci))
		return 0;
	for (*ret_index = 0; *ret_index < count; ++*ret_index)
		if (is_at(*ret_index, config->pci))
			return 0;
	return fmha_error_set_field(err, FMHA_ENOENT, "pci",
				    "pci %s: none of the %u devices that the " GPU_BACKEND
				    " driver shows is there",
				    config->pci, count);
}

static int gpu_describe(struct gpu_device *gpu, struct fmha_error *err)
{
	struct device_info *info = &gpu->device.info;
	hipDeviceProp_t properties;
	hipError_t status = hipGetDeviceProperties(&properties, gpu->index);

	if (status != hipSuccess)
		return gpu_error(status, "reading the device's properties", err);
	(void)snprintf(info->name, sizeof(info->name), "%.63s", properties.name);
	/* "gfx942:sramecc+:xnack-": the features are the runtime's business. */
	(void)snprintf(info->arch, sizeof(info->arch), "%.*s",
		       (int)strcspn(properties.gcnArchName, ":"), properties.gcnArchName);
	(void)snprintf(info->backend, sizeof(info->backend), "%s", GPU_BACKEND);
	describe_address(info->pci, &properties);
	info->compute_units = (uint32_t)properties.multiProcessorCount;
	(void)snprintf(info->model, sizeof(info->model), "%.48s %u", properties.name,
		       info->compute_units);
	describe_driver(info);
	info->memory_bytes = properties.totalGlobalMem;
	info->lds_bytes = properties.sharedMemPerBlock;
	describe_peak(info, &properties);
	return 0;
}

/* Asked before the driver is initialised: it chooses then. */
static void gpu_find_mps(struct device_info *info)
{
#ifdef FMHA_HIP_ON_CUDA
	info->mps = mps_is_running(info->mps_directory, sizeof(info->mps_directory))
			    ? DEVICE_MPS_IN_USE
			    : DEVICE_MPS_ABSENT;
#else
	info->mps = DEVICE_MPS_NOT_APPLICABLE;
#endif
}

void gpu_enter_thread(struct device *device)
{
	(void)hipSetDevice(gpu_device_of(device)->index);
}

static void gpu_close(struct device *device)
{
	struct gpu_device *gpu = gpu_device_of(device);

	gpu_executor_stop(gpu);
	gpu_kernels_free(gpu);
	gpu_workspaces_trim(gpu);
	gpu_staging_trim(gpu);
	gpu_spare_free(gpu);
	gpu_reclaim_stop(gpu);
	(void)pthread_cond_destroy(&gpu->shared_changed);
	(void)pthread_mutex_destroy(&gpu->shared_lock);
	free(gpu);
}

/* What was found of how memory gets from one process to another. */
static void take_sharing(struct gpu_device *gpu, struct gpu_trial *trial)
{
	struct device_info *info = &gpu->device.info;
	struct gpu_sharing found = {0};

	gpu_trial_end(trial, &found);
	memcpy(info->no_descriptors, found.no_descriptors, sizeof(info->no_descriptors));
	memcpy(info->no_handles, found.no_handles, sizeof(info->no_handles));
	if (!info->no_descriptors[0])
		gpu->vmm_granularity = gpu_vmm_granularity(gpu->index);
	info->descriptors = gpu->vmm_granularity > 0;
	if (!info->descriptors && !info->no_descriptors[0])
		(void)snprintf(info->no_descriptors, sizeof(info->no_descriptors),
			       "the driver has no such memory");
	info->handles = !info->no_handles[0];
}

static int gpu_open(const struct config_device *config, struct device **ret_device,
		    struct fmha_error *err)
{
	struct device_info asked = {0};
	struct gpu_trial *trial;
	struct gpu_device *gpu;
	hipError_t status;
	uint32_t index;
	int count = 0, r;

	gpu_find_mps(&asked);
	status = gpu_init();
	if (status == hipSuccess)
		status = hipGetDeviceCount(&count);
	if (status != hipSuccess)
		return gpu_error(status, "opening the " GPU_BACKEND " driver", err);
	r = find_index(config, (uint32_t)count, &index, err);
	if (r < 0)
		return r;
	status = hipSetDevice((int)index);
	if (status != hipSuccess)
		return gpu_error(status, "opening the device", err);
	gpu = calloc(1, sizeof(*gpu));
	if (!gpu)
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	gpu_kernels_init(gpu);
	gpu->device.ops = &fmhad_device_ops;
	gpu->device.info = asked;
	gpu->index = (int)index;
	(void)pthread_mutex_init(&gpu->shared_lock, NULL);
	(void)pthread_cond_init(&gpu->shared_changed, NULL);
	trial = gpu_trial_begin(gpu->index);
	r = gpu_reclaim_start(gpu, err);
	if (r == 0)
		r = gpu_describe(gpu, err);
	if (r == 0)
		r = gpu_executor_start(gpu, err);
	take_sharing(gpu, trial);
	if (r < 0) {
		gpu_close(&gpu->device);
		return r;
	}
	*ret_device = &gpu->device;
	return 0;
}

static void gpu_trim(struct device *device)
{
	gpu_workspaces_trim(gpu_device_of(device));
	gpu_staging_trim(gpu_device_of(device));
}

static bool gpu_make_room(struct device *device, uint64_t bytes)
{
	struct gpu_device *gpu = gpu_device_of(device);
	bool any = gpu->status.n_idle > 0 || gpu->free_workspaces || gpu->free_staging;

	if (bytes > device->info.memory_bytes || !any)
		return false;
	gpu_trim(device);
	gpu_unload_idle(device);
	return true;
}

static const struct device_code_ops code_ops = {
	.prepare_tables = gpu_prepare_tables,
	.place_tables = gpu_place_tables,
	.kernel_name = gpu_kernel_name,
	.forget = gpu_forget,
	.hold = gpu_hold,
	.drop = gpu_drop,
	.kernel_code = gpu_kernel_code,
	.find_code = gpu_find_code,
	.set_idle = gpu_set_idle,
	.status = gpu_code_status,
};

static const struct device_staging_ops staging_ops = {
	.cost = gpu_staging_cost,
	.create = gpu_staging_new,
	.free = gpu_staging_free,
	.make_room = gpu_make_room,
};

__attribute__((visibility("default"))) const struct device_ops fmhad_device_ops = {
	.backend = GPU_BACKEND,
	.code = &code_ops,
	.staging = &staging_ops,
	.open = gpu_open,
#ifndef FMHA_HIP_ON_CUDA
	.trial = gpu_trial_peer,
#endif
	.close = gpu_close,
	.enter_thread = gpu_enter_thread,
	.memory_cost = gpu_memory_cost,
	.workspace_cost = gpu_workspace_cost,
	.memory_create = gpu_memory_create,
	.memory_take = gpu_memory_take,
	.memory_refill = gpu_memory_refill,
	.memory_import = gpu_memory_import,
	.memory_free = gpu_memory_free,
	.memory_clear = gpu_memory_clear,
	.workspace_new = gpu_workspace_new,
	.workspace_free = gpu_workspace_free,
	.find_kernel = gpu_find_kernel,
	.prepare = gpu_prepare,
#ifndef FMHA_HIP_ON_CUDA
	.prepare_words = gpu_prepare_words,
	.try_words = gpu_try_words,
#endif
#ifdef FMHA_HIP_ON_CUDA
	/* HIP's query reports an imported event done as soon as it is recorded. */
	.event_import = gpu_event_import,
	.event_free = gpu_event_free,
#endif
	.release_fences = gpu_release_fences,
	.stream_new = gpu_stream_new,
	.stream_free = gpu_stream_free,
	.launch_new = gpu_launch_new,
	.launch_free = gpu_launch_free,
	.submit = gpu_submit,
	.run_here = gpu_run_here,
	.cancel = gpu_cancel,
	.stalled_ns = gpu_stalled_ns,
	.trim = gpu_trim,
};
