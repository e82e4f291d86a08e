/* SPDX-License-Identifier: MIT */
#include "hip_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long cu_pointer;

/* The few values of cuda.h that the calls below need. */
#define CU_FUNCTION_MAX_DYNAMIC_SHARED      8
#define CU_ATTRIBUTE_SHARED_PER_BLOCK_OPTIN 97
#define CU_ATTRIBUTE_WARP_SIZE              10
#define CU_ATTRIBUTE_MULTIPROCESSORS        16
#define CU_ATTRIBUTE_CLOCK_RATE             13
#define CU_ATTRIBUTE_MEMORY_CLOCK_RATE      36
#define CU_ATTRIBUTE_MEMORY_BUS_WIDTH       37
#define CU_ATTRIBUTE_PCI_BUS                33
#define CU_ATTRIBUTE_PCI_DEVICE             34
#define CU_ATTRIBUTE_PCI_DOMAIN             50
#define CU_ATTRIBUTE_MAJOR                  75
#define CU_ATTRIBUTE_MINOR                  76
#define CU_ATTRIBUTE_VMM                    102
#define CU_ATTRIBUTE_VMM_POSIX_FD           103
#define CU_LOCATION_DEVICE                  1
#define CU_ALLOCATION_PINNED                1
#define CU_HANDLE_POSIX_FD                  1
#define CU_ACCESS_READ_WRITE                3

struct cu_location {
	int type, id;
};

struct cu_allocation {
	int type, handle_types;
	struct cu_location location;
	void *win32;
	struct {
		unsigned char compression, rdma;
		unsigned short usage;
		unsigned char reserved[4];
	} flags;
};

struct cu_access {
	struct cu_location location;
	int flags;
};

/* CUlaunchAttribute and CUlaunchConfig. */
/* X(return type, name, symbol in libcuda, parameters) */
#define CUDA_CALLS(X)                                                                              \
	X(init, "cuInit", (unsigned))                                                              \
	X(device_get, "cuDeviceGet", (int *, int))                                                 \
	X(device_name, "cuDeviceGetName", (char *, int, int))                                      \
	X(device_memory, "cuDeviceTotalMem_v2", (size_t *, int))                                   \
	X(device_attribute, "cuDeviceGetAttribute", (int *, int, int))                             \
	X(context_retain, "cuDevicePrimaryCtxRetain", (void **, int))                              \
	X(context_set, "cuCtxSetCurrent", (void *))                                                \
	X(error_name, "cuGetErrorName", (int, const char **))                                      \
	X(error_string, "cuGetErrorString", (int, const char **))                                  \
	X(alloc, "cuMemAlloc_v2", (cu_pointer *, size_t))                                          \
	X(address_range, "cuMemGetAddressRange_v2", (cu_pointer *, size_t *, cu_pointer))          \
	X(ipc_open, "cuIpcOpenMemHandle_v2", (cu_pointer *, hipIpcMemHandle_t, unsigned))          \
	X(stream_wait, "cuStreamWaitValue32_v2", (hipStream_t, cu_pointer, uint32_t, unsigned))    \
	X(function_set, "cuFuncSetAttribute", (hipFunction_t, int, int))                           \
	X(launch, "cuLaunchKernel",                                                                \
	  (hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,    \
	   hipStream_t, void **, void **))                                                         \
	X(vmm_granularity, "cuMemGetAllocationGranularity",                                        \
	  (size_t *, const struct cu_allocation *, int))                                           \
	X(vmm_create, "cuMemCreate",                                                               \
	  (unsigned long long *, size_t, const struct cu_allocation *, unsigned long long))        \
	X(vmm_release, "cuMemRelease", (unsigned long long))                                       \
	X(vmm_export, "cuMemExportToShareableHandle",                                              \
	  (void *, unsigned long long, int, unsigned long long))                                   \
	X(vmm_import, "cuMemImportFromShareableHandle", (unsigned long long *, void *, int))       \
	X(vmm_reserve, "cuMemAddressReserve",                                                      \
	  (cu_pointer *, size_t, size_t, cu_pointer, unsigned long long))                          \
	X(vmm_unreserve, "cuMemAddressFree", (cu_pointer, size_t))                                 \
	X(vmm_map, "cuMemMap",                                                                     \
	  (cu_pointer, size_t, size_t, unsigned long long, unsigned long long))                    \
	X(vmm_unmap, "cuMemUnmap", (cu_pointer, size_t))                                           \
	X(vmm_access, "cuMemSetAccess", (cu_pointer, size_t, const struct cu_access *, size_t))

static struct {
	void *library;
	/* NULL: a driver that is older than the cards that need them. */
	launch_encoder map_encode;
	launch_launcher launch_with;
#define CUDA_MEMBER(name, symbol, parameters) int(*name) parameters;
	CUDA_CALLS(CUDA_MEMBER)
#undef CUDA_MEMBER
#define SAME_MEMBER(name, symbol, parameters, arguments) hipError_t(*name) parameters;
	HIP_SAME_CALLS(SAME_MEMBER)
#undef SAME_MEMBER
} cuda;

#define FORWARD(name, symbol, parameters, arguments)                                               \
	hipError_t name parameters                                                                 \
	{                                                                                          \
		return cuda.name arguments;                                                        \
	}
HIP_SAME_CALLS(FORWARD)
#undef FORWARD

static cu_pointer to_cu(const void *pointer)
{
	return (cu_pointer)(uintptr_t)pointer;
}

hipError_t hipInit(unsigned flags)
{
	const struct {
		const char *symbol;
		void **call;
	} calls[] = {
#define CUDA_SYMBOL(name, symbol, parameters) {symbol, (void **)&cuda.name},
		CUDA_CALLS(CUDA_SYMBOL)
#undef CUDA_SYMBOL
#define SAME_SYMBOL(name, symbol, parameters, arguments) {symbol, (void **)&cuda.name},
			HIP_SAME_CALLS(SAME_SYMBOL)
#undef SAME_SYMBOL
	};

	if (!cuda.library) {
		/* As many queues as there can be, unless somebody has said how many: streams that
		 * share one wait for each other, and a client's may wait for a fence. Read by
		 * cuInit(). */
		(void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
		void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

		if (!library)
			return hipErrorNoDevice;
		for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
			*calls[i].call = dlsym(library, calls[i].symbol);
			if (!*calls[i].call) {
				(void)dlclose(library);
				return hipErrorNotSupported; /* a driver too old */
			}
		}
		*(void **)&cuda.launch_with = dlsym(library, "cuLaunchKernelEx");
		*(void **)&cuda.map_encode = dlsym(library, "cuTensorMapEncodeTiled");
		cuda.library = library;
	}
	return (hipError_t)cuda.init(flags);
}

hipError_t hipSetDevice(int device)
{
	void *context;
	int handle, r;

	r = cuda.device_get(&handle, device);
	if (r == 0)
		r = cuda.context_retain(&context, handle);
	if (r == 0)
		r = cuda.context_set(context);
	return (hipError_t)r;
}

hipError_t hipGetDeviceProperties(hipDeviceProp_t *properties, int device)
{
	int handle, major = 0, minor = 0, shared = 0, r;
	const struct {
		int attribute;
		int *value;
	} attributes[] = {
		{CU_ATTRIBUTE_MAJOR, &major},
		{CU_ATTRIBUTE_MINOR, &minor},
		{CU_ATTRIBUTE_SHARED_PER_BLOCK_OPTIN, &shared},
		{CU_ATTRIBUTE_WARP_SIZE, &properties->warpSize},
		{CU_ATTRIBUTE_MULTIPROCESSORS, &properties->multiProcessorCount},
		{CU_ATTRIBUTE_PCI_DOMAIN, &properties->pciDomainID},
		{CU_ATTRIBUTE_PCI_BUS, &properties->pciBusID},
		{CU_ATTRIBUTE_PCI_DEVICE, &properties->pciDeviceID},
		{CU_ATTRIBUTE_CLOCK_RATE, &properties->clockRate},
		{CU_ATTRIBUTE_MEMORY_CLOCK_RATE, &properties->memoryClockRate},
		{CU_ATTRIBUTE_MEMORY_BUS_WIDTH, &properties->memoryBusWidth},
	};

	memset(properties, 0, sizeof(*properties));
	r = cuda.device_get(&handle, device);
	if (r == 0)
		r = cuda.device_name(properties->name, sizeof(properties->name), handle);
	if (r == 0)
		r = cuda.device_memory(&properties->totalGlobalMem, handle);
	for (size_t i = 0; r == 0 && i < sizeof(attributes) / sizeof(attributes[0]); i++)
		r = cuda.device_attribute(attributes[i].value, attributes[i].attribute, handle);
	properties->sharedMemPerBlock = (size_t)shared;
	/* From Hopper on, the "a" arch has the instructions that are worth compiling for. */
	(void)snprintf(properties->gcnArchName, sizeof(properties->gcnArchName), "sm_%d%d%s", major,
		       minor, major >= 9 ? "a" : "");
	return (hipError_t)r;
}

const char *hipGetErrorName(hipError_t error)
{
	const char *name = NULL;

	return cuda.library && cuda.error_name((int)error, &name) == 0 && name ? name : "error";
}

const char *hipGetErrorString(hipError_t error)
{
	const char *text = NULL;

	return cuda.library && cuda.error_string((int)error, &text) == 0 && text
		       ? text
		       : "libcuda.so.1 cannot be opened";
}

hipError_t hipMalloc(void **pointer, size_t bytes)
{
	cu_pointer value = 0;
	int r = cuda.alloc(&value, bytes);

	*pointer = (void *)(uintptr_t)value;
	return (hipError_t)r;
}

hipError_t hipMemGetAddressRange(hipDeviceptr_t *base, size_t *bytes, hipDeviceptr_t pointer)
{
	cu_pointer value = 0;
	int r = cuda.address_range(&value, bytes, to_cu(pointer));

	*base = (void *)(uintptr_t)value;
	return (hipError_t)r;
}

hipError_t hipIpcOpenMemHandle(void **pointer, hipIpcMemHandle_t handle, unsigned flags)
{
	cu_pointer value = 0;
	int r = cuda.ipc_open(&value, handle, flags);

	*pointer = (void *)(uintptr_t)value;
	return (hipError_t)r;
}

hipError_t hipStreamWaitValue32(hipStream_t stream, void *pointer, uint32_t value, unsigned flags,
				uint32_t mask)
{
	/* CUDA has no mask; every caller here waits for the whole word. */
	if (mask != 0xffffffffu)
		return hipErrorNotSupported;
	return (hipError_t)cuda.stream_wait(stream, to_cu(pointer), value, flags);
}

hipError_t gpu_allow_lds(hipFunction_t function, uint32_t bytes)
{
	return (hipError_t)cuda.function_set(function, CU_FUNCTION_MAX_DYNAMIC_SHARED, (int)bytes);
}

hipError_t gpu_launch_kernel(hipFunction_t function, const struct launch_record *record,
			     hipStream_t stream, void **parameters)
{
	const uint32_t *grid = record->grid, *block = record->block;

	if (record->overlaps && cuda.launch_with)
		return (hipError_t)launch_overlapping(cuda.launch_with, function, record, stream,
						      parameters);
	return (hipError_t)cuda.launch(function, grid[0], grid[1], grid[2], block[0], block[1],
				       block[2], record->lds_bytes, stream, parameters, NULL);
}

static struct cu_allocation allocation_on(int device)
{
	return (struct cu_allocation){
		.type = CU_ALLOCATION_PINNED,
		.handle_types = CU_HANDLE_POSIX_FD,
		.location = {CU_LOCATION_DEVICE, device},
	};
}

size_t gpu_vmm_granularity(int device)
{
	struct cu_allocation allocation = allocation_on(device);
	int vmm = 0, fds = 0, handle;
	size_t granularity = 0;

	if (cuda.device_get(&handle, device) != 0 ||
	    cuda.device_attribute(&vmm, CU_ATTRIBUTE_VMM, handle) != 0 ||
	    cuda.device_attribute(&fds, CU_ATTRIBUTE_VMM_POSIX_FD, handle) != 0 || !vmm || !fds ||
	    cuda.vmm_granularity(&granularity, &allocation, 0) != 0)
		return 0;
	return granularity;
}

/* Maps @handle, which is released here: the mapping keeps the memory alive. */
static int vmm_map(unsigned long long handle, size_t bytes, int device, void **ret_pointer)
{
	struct cu_access access = {{CU_LOCATION_DEVICE, device}, CU_ACCESS_READ_WRITE};
	cu_pointer pointer = 0;
	int r;

	r = cuda.vmm_reserve(&pointer, bytes, 0, 0, 0);
	if (r == 0) {
		r = cuda.vmm_map(pointer, bytes, 0, handle, 0);
		if (r == 0) {
			r = cuda.vmm_access(pointer, bytes, &access, 1);
			if (r != 0)
				(void)cuda.vmm_unmap(pointer, bytes);
		}
		if (r != 0)
			(void)cuda.vmm_unreserve(pointer, bytes);
	}
	(void)cuda.vmm_release(handle);
	if (r == 0)
		*ret_pointer = (void *)(uintptr_t)pointer;
	return r;
}

hipError_t gpu_vmm_create(size_t bytes, int device, struct gpu_mapping *ret_mapping, int *ret_fd)
{
	struct cu_allocation allocation = allocation_on(device);
	unsigned long long handle;
	int fd = -1, r;

	r = cuda.vmm_create(&handle, bytes, &allocation, 0);
	if (r != 0)
		return (hipError_t)r;
	r = cuda.vmm_export(&fd, handle, CU_HANDLE_POSIX_FD, 0);
	if (r != 0) {
		(void)cuda.vmm_release(handle);
		return (hipError_t)r;
	}
	*ret_mapping = (struct gpu_mapping){.bytes = bytes};
	r = vmm_map(handle, bytes, device, &ret_mapping->pointer);
	if (r == 0)
		*ret_fd = fd;
	else
		(void)close(fd);
	return (hipError_t)r;
}

hipError_t gpu_vmm_import(int fd, size_t bytes, int device, struct gpu_mapping *ret_mapping)
{
	size_t granularity = gpu_vmm_granularity(device);
	unsigned long long handle;
	int r;

	if (granularity == 0)
		return hipErrorNotSupported;
	r = cuda.vmm_import(&handle, (void *)(uintptr_t)fd, CU_HANDLE_POSIX_FD);
	*ret_mapping = (struct gpu_mapping){.bytes = (bytes + granularity - 1) / granularity *
						     granularity};
	if (r == 0)
		r = vmm_map(handle, ret_mapping->bytes, device, &ret_mapping->pointer);
	return (hipError_t)r;
}

hipError_t gpu_vmm_free(const struct gpu_mapping *mapping)
{
	int r = cuda.vmm_unmap(to_cu(mapping->pointer), mapping->bytes);

	if (r == 0)
		r = cuda.vmm_unreserve(to_cu(mapping->pointer), mapping->bytes);
	return (hipError_t)r;
}

hipError_t gpu_tensor_map_encode(const struct launch_map *map, const union abi_args *args,
				 struct launch_tensor_map *ret_map)
{
	if (!cuda.map_encode)
		return hipErrorNotSupported;
	return (hipError_t)launch_encode_map(cuda.map_encode, map, args, ret_map);
}

/* ---- what HIP does its own way: hip_native.c ---- */

hipError_t gpu_init(void)
{
	return hipInit(0);
}

hipError_t gpu_stream_apart(hipStream_t *ret_stream)
{
	return hipStreamCreateWithFlags(ret_stream, hipStreamNonBlocking);
}

hipError_t gpu_first_uses(hipStream_t stream)
{
	(void)stream;
	return hipSuccess;
}

/* CUDA says of each device whether it can, and documents what it does. */
hipError_t gpu_word_wait(hipFunction_t kernel, hipStream_t stream, void *word, uint32_t value)
{
	(void)kernel; /* there is none */
	return hipStreamWaitValue32(stream, word, value, hipStreamWaitValueGte, 0xffffffffu);
}

hipError_t gpu_word_write(hipFunction_t kernel, hipStream_t stream, void *word, uint32_t value)
{
	(void)kernel;
	return hipStreamWriteValue32(stream, word, value, 0);
}

hipError_t gpu_try_fences(hipFunction_t kernel, hipStream_t other, char *trouble, size_t size)
{
	(void)kernel, (void)other, (void)size;
	*trouble = '\0';
	return hipSuccess;
}

struct gpu_trial *gpu_trial_begin(int device)
{
	(void)device;
	return NULL;
}

void gpu_trial_end(struct gpu_trial *trial, struct gpu_sharing *ret_sharing)
{
	(void)trial;
	*ret_sharing = (struct gpu_sharing){0};
}

/* The driver gives memory to those who know its handle, and knows its size. */
int gpu_check_handle(const uint8_t handle[64], uint32_t uid, uint32_t client_pid,
		     struct fmha_error *err)
{
	(void)handle, (void)uid, (void)client_pid, (void)err;
	return 0;
}

hipError_t gpu_check_mapping(const void *base, size_t bytes)
{
	(void)base, (void)bytes;
	return hipSuccess;
}
