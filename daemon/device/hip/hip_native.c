/* SPDX-License-Identifier: MIT */
/*
 * hip_native.c: what AMD's runtime does its own way; HIP.md says from where that is known.
 *
 * AMD's cards copy without tensor maps.
 */
#include "hip_api.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <proto/error.h>

#define FIRST_BYTES 4096

/* Streams share hardware queues, four unless it is said, and who waits in a queue holds up all of its streams.
 * Read when the runtime starts; what the administrator has set stays. */
hipError_t gpu_init(void)
{
	(void)setenv("GPU_MAX_HW_QUEUES", "16", 0);
	return hipInit(0);
}

/* Each priority has queues of its own. */
hipError_t gpu_stream_apart(hipStream_t *ret_stream)
{
	int least, greatest;
	hipError_t status = hipDeviceGetStreamPriorityRange(&least, &greatest);

	return status == hipSuccess
		       ? hipStreamCreateWithPriority(ret_stream, hipStreamNonBlocking, greatest)
		       : status;
}

static hipError_t use_everything(uint32_t *device, void *host, hipStream_t stream)
{
	hipError_t status = hipMemsetD8Async((hipDeviceptr_t)device, 0, FIRST_BYTES, stream);

	if (status == hipSuccess)
		status = hipStreamWriteValue32(stream, device, 1, 0);
	if (status == hipSuccess) /* for what is there, whether or not the write arrives */
		status = hipStreamWaitValue32(stream, device, 0, hipStreamWaitValueGte,
					      0xffffffffu);
	if (status == hipErrorNotSupported || status == hipErrorInvalidValue)
		status = hipSuccess; /* try_fences.c says so */
	if (status == hipSuccess)
		status = hipMemcpyDtoHAsync(host, (hipDeviceptr_t)device, FIRST_BYTES, stream);
	if (status == hipSuccess)
		status = hipMemcpyHtoDAsync((hipDeviceptr_t)device, host, FIRST_BYTES, stream);
	return status == hipSuccess ? hipStreamSynchronize(stream) : status;
}

/* The runtime loads the code of its own kernels, and sets up copies, when each is first used: hundreds of
 * milliseconds, in which a loop that waits answers nobody. */
hipError_t gpu_first_uses(hipStream_t stream)
{
	void *host = mmap(NULL, FIRST_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			  -1, 0);
	void *device = NULL;
	hipError_t status;

	if (host == MAP_FAILED)
		return hipErrorOutOfMemory;
	status = hipMalloc(&device, FIRST_BYTES);
	if (status == hipSuccess) {
		status = hipHostRegister(host, FIRST_BYTES, 0);
		if (status == hipSuccess) {
			status = use_everything(device, host, stream);
			(void)hipHostUnregister(host);
		}
		(void)hipFree(device);
	}
	(void)munmap(host, FIRST_BYTES);
	return status;
}

/* ---- IPC handles ---- */

/* Of the bytes of a handle the runtime's users may know: who made it, where ROCr asks for the memory. */
#define HANDLE_PROCESS 8

/* Return: the real user of the process; -1: nobody can see it. */
static int64_t user_of(uint32_t pid)
{
	char path[32], line[128];
	int64_t uid = -1;
	unsigned real;
	FILE *file;

	(void)snprintf(path, sizeof(path), "/proc/%u/status", pid);
	file = fopen(path, "re");
	while (file && uid < 0 && fgets(line, sizeof(line), file))
		if (sscanf(line, "Uid: %u", &real) == 1)
			uid = real;
	if (file)
		(void)fclose(file);
	return uid;
}

/*
 * Where ROCr shares memory by dma-buf, a handle is an address and a process, which gives the memory to whoever
 * asks: that is for the process's user alone to say. Where the kernel driver shares, these bytes are random,
 * and next to never the number of another user's process.
 */
int gpu_check_handle(const uint8_t handle[64], uint32_t uid, uint32_t client_pid,
		     struct fmha_error *err)
{
	uint32_t pid;

	memcpy(&pid, handle + HANDLE_PROCESS, sizeof(pid));
	if (uid == 0 || pid == client_pid || pid == 0 || pid > INT32_MAX ||
	    (kill((pid_t)pid, 0) < 0 && errno == ESRCH) || user_of(pid) == uid)
		return 0;
	return fmha_error_set_field(
		err, FMHA_EPERM, "handle",
		"handle: of memory of process %u, which is not its client's own or "
		"another one of the same user",
		pid);
}

/* The beginning of hsa_amd_pointer_info_t; the runtime fills in as much as `size` says. */
struct pointer_info {
	uint32_t size, type; /* 0: not known */
	void *agent_base, *host_base;
	size_t bytes;
};

/*
 * The size of what a handle opens is what the handle says, and nobody compares it with the memory. But ROCr
 * knows which addresses are mapped, and to what each belongs.
 */
hipError_t gpu_check_mapping(const void *base, size_t bytes)
{
	int (*look)(const void *, struct pointer_info *, void *, uint32_t *, void *);
	struct pointer_info first = {.size = sizeof(first)}, last = {.size = sizeof(last)};

	*(void **)&look = hip_lower_symbol("hsa_amd_pointer_info");
	if (!look)
		return hipErrorNotSupported; /* and nobody's size is believed */
	if (bytes == 0 || look(base, &first, NULL, NULL, NULL) != 0 ||
	    look((const char *)base + bytes - 1, &last, NULL, NULL, NULL) != 0 || last.type == 0 ||
	    last.type != first.type || last.agent_base != first.agent_base)
		return hipErrorInvalidValue;
	return hipSuccess;
}

/* ---- what there is none of ---- */

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
