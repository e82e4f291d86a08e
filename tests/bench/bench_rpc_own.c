/* SPDX-License-Identifier: MIT */
/*
 * The driver is opened at run time, as the client library expects to find it: CUDA's or HIP's,
 * whose driver-style functions have the same signatures.
 */
#include "bench_rpc_own.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Sharing is by whole allocations: each tensor has one of its own. */
#define ALLOCATION_BYTES (2u << 20)

/* Every GPU since 2014 runs it. HIP has no such text for all of its GPUs: there a memset, which is
 * a kernel of the runtime's own, stands for it. */
static const char nothing_ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
				  ".visible .entry nothing() { ret; }\n";

static const char *name_of(const struct own_device *own, const char *cuda, const char *hip)
{
	return dlsym(own->library, "cuInit") ? cuda : hip;
}

static void *function(const struct own_device *own, const char *cuda, const char *hip)
{
	void *found = dlsym(own->library, name_of(own, cuda, hip));

	if (!found) {
		(void)fprintf(stderr, "bench_rpc: %s\n", dlerror());
		exit(1);
	}
	return found;
}

static void check(int status, const char *what)
{
	if (status == 0)
		return;
	(void)fprintf(stderr, "bench_rpc: %s: error %d of the GPU's driver\n", what, status);
	exit(1);
}

static void open_cuda(const struct own_device *own)
{
	int (*init)(unsigned) = function(own, "cuInit", "");
	int (*get)(int *, int) = function(own, "cuDeviceGet", "");
	int (*retain)(void **, int) = function(own, "cuDevicePrimaryCtxRetain", "");
	int (*set)(void *) = function(own, "cuCtxSetCurrent", "");
	void *context;
	int device;

	check(init(0), "cuInit");
	check(get(&device, 0), "cuDeviceGet");
	check(retain(&context, device), "cuDevicePrimaryCtxRetain");
	check(set(context), "cuCtxSetCurrent");
}

static void open_hip(const struct own_device *own)
{
	int (*set)(int) = function(own, "", "hipSetDevice");

	check(set(0), "hipSetDevice");
}

static void load_nothing(struct own_device *own)
{
	int (*load)(void **, const void *) = function(own, "cuModuleLoadData", "hipModuleLoadData");
	int (*get)(void **, void *, const char *) = function(own, "cuModuleGetFunction",
							     "hipModuleGetFunction");
	void *module;

	if (load(&module, nothing_ptx) == 0)
		check(get(&own->function, module, "nothing"), "nothing");
}

static void *allocate(struct own_device *own, uint64_t bytes)
{
	int (*alloc)(void **, size_t) = function(own, "cuMemAlloc_v2", "hipMalloc");
	void *memory = NULL;

	check(alloc(&memory, bytes < ALLOCATION_BYTES ? ALLOCATION_BYTES : bytes), "allocating");
	return memory;
}

void own_device_open(struct own_device *own, const char *backend)
{
	int (*new_stream)(void **, unsigned);

	*own = (struct own_device){0};
	if (strcmp(backend, "cuda") == 0)
		own->library = dlopen("libcuda.so.1", RTLD_NOW);
	else if (strcmp(backend, "hip") == 0)
		own->library = dlopen("libamdhip64.so", RTLD_NOW);
	else
		return;
	if (!own->library) {
		(void)fprintf(stderr, "bench_rpc: %s\n", dlerror());
		exit(1);
	}
	if (strcmp(backend, "cuda") == 0)
		open_cuda(own);
	else
		open_hip(own);
	new_stream = function(own, "cuStreamCreate", "hipStreamCreateWithFlags");
	check(new_stream(&own->stream, 1 /* not synchronised with the default stream */), "stream");
	own->memory = allocate(own, 1);
	load_nothing(own);
}

bool own_device_is_gpu(const struct own_device *own)
{
	return own->library;
}

void own_memory(struct own_device *own, uint64_t bytes, struct fmha_memory *ret_memory)
{
	struct fmha_error err;
	int r;

	if (own->library) {
		r = fmha_memory_from_gpu(allocate(own, bytes), bytes, ret_memory, &err);
	} else {
		*ret_memory = (struct fmha_memory){.struct_size = sizeof(*ret_memory),
						   .size = bytes};
		r = fmha_memfd_new(bytes, &ret_memory->fd, &err);
	}
	if (r < 0) {
		(void)fprintf(stderr, "bench_rpc: memory: %s\n", err.msg);
		exit(1);
	}
}

void own_launch(struct own_device *own)
{
	static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
			     unsigned, void *, void **, void **);
	static int (*fill)(void *, unsigned char, size_t, void *);
	static int (*synchronize)(void *);

	if (!launch) {
		launch = function(own, "cuLaunchKernel", "hipModuleLaunchKernel");
		fill = function(own, "cuMemsetD8Async", "hipMemsetD8Async");
		synchronize = function(own, "cuStreamSynchronize", "hipStreamSynchronize");
	}
	if (own->function)
		check(launch(own->function, 1, 1, 1, 1, 1, 1, 0, own->stream, NULL, NULL),
		      "launch");
	else
		check(fill(own->memory, 0, 64, own->stream), "memset");
	check(synchronize(own->stream), "synchronize");
}
