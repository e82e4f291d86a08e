/* SPDX-License-Identifier: MIT */
/*
 * hip_on_amd.c: the calls of hip_calls.h, of the libamdhip64 that this machine has. Those in use are the same from
 * version 5 to 7, but for the properties of a device and a flag.
 */
#include "hip_calls.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CALLS(X)                                                                                   \
	HIP_SAME_CALLS(X)                                                                          \
	HIP_OTHER_CALLS(X)                                                                         \
	HIP_OWN_CALLS(X)

static struct {
	void *library;
	hipError_t (*init)(unsigned flags);
	hipError_t (*properties)(void *properties, int device);
	hipError_t (*ipc_open)(void **pointer, hipIpcMemHandle_t handle, unsigned flags);
	const char *(*error_name)(hipError_t error);
	const char *(*error_string)(hipError_t error);
	bool is_5; /* of that major version or older */
#define MEMBER(name, symbol, parameters, arguments) hipError_t(*name) parameters;
	CALLS(MEMBER)
#undef MEMBER
} amd;

#define FORWARD(name, symbol, parameters, arguments)                                               \
	hipError_t name parameters                                                                 \
	{                                                                                          \
		return amd.name arguments;                                                         \
	}
CALLS(FORWARD)
#undef FORWARD

/* The newest, where there are several: it knows the most devices. */
static void *open_library(void)
{
	static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6",
					    "libamdhip64.so.5", "/opt/rocm/lib/libamdhip64.so"};
	void *library = NULL;

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]) && !library; i++)
		library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
	return library;
}

static bool find_calls(void *library)
{
	const struct {
		void **call;
		const char *name;
	} calls[] = {{(void **)&amd.init, "hipInit"},
		     {(void **)&amd.ipc_open, "hipIpcOpenMemHandle"},
		     {(void **)&amd.error_name, "hipGetErrorName"},
		     {(void **)&amd.error_string, "hipGetErrorString"},
#define ENTRY(name, symbol, parameters, arguments) {(void **)&amd.name, #name},
		     CALLS(ENTRY)
#undef ENTRY
	};

	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		*calls[i].call = dlsym(library, calls[i].name);
		if (!*calls[i].call)
			return false;
	}
	/* Version 6 has two such functions, each with its own layout. */
	*(void **)&amd.properties = dlsym(library, "hipGetDevicePropertiesR0600");
	amd.is_5 = !amd.properties;
	if (amd.is_5)
		*(void **)&amd.properties = dlsym(library, "hipGetDeviceProperties");
	return amd.properties;
}

/* The runtime stays, even if something of it is missing: it may have started threads. */
hipError_t hipInit(unsigned flags)
{
	if (!amd.library) {
		void *library = open_library();

		if (!library)
			return hipErrorNoDevice;
		if (!find_calls(library))
			return hipErrorNotSupported;
		amd.library = library;
	}
	return amd.init(flags);
}

void *hip_lower_symbol(const char *name)
{
	return dlsym(amd.library, name); /* of what the library needs, too */
}

hipError_t hipIpcOpenMemHandle(void **pointer, hipIpcMemHandle_t handle, unsigned flags)
{
	return amd.ipc_open(pointer, handle, amd.is_5 ? 0 : flags);
}

/* Of hipDeviceProp_t, bytes from its start: frozen with the names of the two functions. */
struct layout {
	size_t memory, lds, wave, clock, units, arch;
};

#define PROPERTIES_BYTES 4096 /* more than any */

hipError_t hipGetDeviceProperties(hipDeviceProp_t *properties, int device)
{
	static const struct layout r0000 = {256, 264, 276, 308, 336, 396},
				   r0600 = {288, 296, 308, 348, 388, 1160};
	const struct layout *at = amd.is_5 ? &r0000 : &r0600;
	char *raw = calloc(1, PROPERTIES_BYTES);
	hipError_t status;

	if (!raw)
		return hipErrorOutOfMemory;
	memset(properties, 0, sizeof(*properties));
	status = amd.properties(raw, device);
	(void)snprintf(properties->name, sizeof(properties->name), "%.255s", raw);
	(void)snprintf(properties->gcnArchName, sizeof(properties->gcnArchName), "%.255s",
		       raw + at->arch);
	memcpy(&properties->totalGlobalMem, raw + at->memory, sizeof(size_t));
	memcpy(&properties->sharedMemPerBlock, raw + at->lds, sizeof(size_t));
	memcpy(&properties->warpSize, raw + at->wave, sizeof(int));
	memcpy(&properties->clockRate, raw + at->clock, sizeof(int));
	memcpy(&properties->multiProcessorCount, raw + at->units, sizeof(int));
	free(raw);
	if (status == hipSuccess && strncmp(properties->gcnArchName, "gfx", 3) != 0)
		status = hipErrorNotSupported; /* a layout that nobody has seen */
	return status;
}

const char *hipGetErrorName(hipError_t error)
{
	return amd.library ? amd.error_name(error) : "hipErrorNoDevice";
}

const char *hipGetErrorString(hipError_t error)
{
	return amd.library ? amd.error_string(error)
			   : "no libamdhip64.so.7, .6 or .5 can be opened, or it lacks calls";
}
