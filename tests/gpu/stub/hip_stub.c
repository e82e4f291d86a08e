/* SPDX-License-Identifier: MIT */
/*
 * hip_stub.c: what a libamdhip64 has beside the calls that are named like CUDA's, by the headers that the
 * daemon's module is built with: the properties of a device differ from version to version.
 */
#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT hipError_t hipSetDevice(int device)
{
	return device == 0 ? hipSuccess : hipErrorInvalidDevice;
}

EXPORT hipError_t hipGetDeviceProperties(hipDeviceProp_t *properties, int device)
{
	if (device != 0)
		return hipErrorInvalidDevice;
	memset(properties, 0, sizeof(*properties));
	(void)snprintf(properties->name, sizeof(properties->name), "Stub Instinct");
	(void)snprintf(properties->gcnArchName, sizeof(properties->gcnArchName),
		       "gfx942:sramecc+:xnack-");
	properties->totalGlobalMem = (size_t)4 << 30;
	properties->sharedMemPerBlock = 64 << 10;
	properties->multiProcessorCount = 304;
	properties->warpSize = 64;
	return hipSuccess;
}

EXPORT const char *hipGetErrorString(hipError_t error)
{
	(void)error;
	return "an error that the stub was told to make";
}

/* As in AMD's runtime, a module's function is none: only those that a program has registered are found. */
EXPORT hipError_t hipFuncSetAttribute(const void *function, hipFuncAttribute attribute, int value)
{
	(void)function, (void)attribute, (void)value;
	return hipErrorInvalidDeviceFunction;
}
