/* SPDX-License-Identifier: MIT */
/*
 * vmm_hip.c: what only NVIDIA's driver has. HIP runtimes as old as Debian 12's have no memory that
 * travels as a file descriptor, so there clients share by IPC handle: the granularity of 0 says so.
 * And AMD's cards copy without tensor maps.
 */
#include "hip_api.h"

size_t gpu_vmm_granularity(int device)
{
	(void)device;
	return 0;
}

hipError_t gpu_vmm_create(size_t bytes, int device, void **ret_pointer, int *ret_fd)
{
	(void)bytes, (void)device, (void)ret_pointer, (void)ret_fd;
	return hipErrorNotSupported;
}

hipError_t gpu_vmm_import(int fd, size_t bytes, int device, void **ret_pointer)
{
	(void)fd, (void)bytes, (void)device, (void)ret_pointer;
	return hipErrorNotSupported;
}

hipError_t gpu_vmm_free(void *pointer, size_t bytes)
{
	(void)pointer, (void)bytes;
	return hipErrorNotSupported;
}

hipError_t gpu_tensor_map_encode(const struct launch_map *map, const union abi_args *args,
				 struct launch_tensor_map *ret_map)
{
	(void)map, (void)args, (void)ret_map;
	return hipErrorNotSupported;
}

hipError_t gpu_allow_lds(hipFunction_t function, uint32_t bytes)
{
	(void)function, (void)bytes;
	return hipSuccess;
}

hipError_t gpu_launch_kernel(hipFunction_t function, const struct launch_record *record,
			     hipStream_t stream, void **parameters)
{
	const uint32_t *grid = record->grid, *block = record->block;

	return hipModuleLaunchKernel(function, grid[0], grid[1], grid[2], block[0], block[1],
				     block[2], record->lds_bytes, stream, parameters, NULL);
}
