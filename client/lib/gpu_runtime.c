/* SPDX-License-Identifier: MIT */
/*
 * gpu_runtime.c: the GPU runtime of this process. The library links none and loads none into anybody's process: it
 * looks for one that the program has loaded already, CUDA's driver or HIP.
 */
#include "gpu.h"

#include <dlfcn.h>

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

static void find_hips_own(void *library, struct gpu_runtime *r)
{
	static const char *const lower[] = {"libhsa-runtime64.so.1", "libhsa-runtime64.so"};
	void *hsa;

	*(void **)&r->export_dma_buf = dlsym(library, "hsa_amd_portable_export_dmabuf");
	hsa = r->export_dma_buf ? NULL : loaded_library(lower, sizeof(lower) / sizeof(lower[0]));
	if (hsa)
		*(void **)&r->export_dma_buf = dlsym(hsa, "hsa_amd_portable_export_dmabuf");
	*(void **)&r->range_handle = dlsym(library, "hipMemGetHandleForAddressRange");
	*(void **)&r->external_open = dlsym(library, "hipImportExternalMemory");
	*(void **)&r->external_map = dlsym(library, "hipExternalMemoryGetMappedBuffer");
	*(void **)&r->external_destroy = dlsym(library, "hipDestroyExternalMemory");
	*(void **)&r->free = dlsym(library, "hipFree");
}

int gpu_runtime_find(struct gpu_runtime *ret_runtime, struct fmha_error *err)
{
	void *cuda = gpu_loaded_cuda();
	void *library = cuda ? cuda : gpu_loaded_hip();
	struct gpu_runtime r = {.name = cuda ? "CUDA" : "HIP"};
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
	if (!cuda)
		find_hips_own(library, &r);
	*ret_runtime = r;
	return 0;
}
