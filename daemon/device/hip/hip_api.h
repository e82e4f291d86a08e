/* SPDX-License-Identifier: MIT */
/* hip_api.h: the one GPU interface of this folder: HIP itself, or HIP on NVIDIA's driver. */
#ifndef FMHAD_DEVICE_HIP_API_H
#define FMHAD_DEVICE_HIP_API_H

#include "hip_calls.h"

#ifdef FMHA_HIP_ON_CUDA
#define GPU_BACKEND     "cuda"
#define GPU_KEEPS_IMAGE 0
#else
#define GPU_BACKEND "hip"
#define GPU_KEEPS_IMAGE                                                                            \
	1 /* a module reads the image that it was loaded from until it is unloaded */
#endif

#include <fmha/base.h>
#include <kernels/launch.h>

/* hipInit(), as a process that serves many streams wants it. */
hipError_t gpu_init(void);
/* A stream that is held up by no other that waits for a word. */
hipError_t gpu_stream_apart(hipStream_t *ret_stream);
/* Does once, on @stream, what takes its time when it is done first. */
hipError_t gpu_first_uses(hipStream_t stream);
/*
 * Whether a stream waits for a word, and sees it written by another, which is @other. @trouble: a sentence, empty when it does.
 * Return: hipErrorNotReady: the stream is held up for good; what else a call says.
 */
hipError_t gpu_try_fences(hipStream_t other, char *trouble, size_t size);

/* Whether a client (@uid, @client_pid) may have this IPC handle opened. Return: 0, FMHA_EPERM. */
int gpu_check_handle(const uint8_t handle[64], uint32_t uid, uint32_t client_pid,
		     struct fmha_error *err);
/* Whether what a handle has opened at @base is @bytes long. hipErrorInvalidValue: it is not. */
hipError_t gpu_check_mapping(const void *base, size_t bytes);

/*
 * Memory that travels as a file descriptor: a physical allocation, mapped here and wherever the
 * descriptor goes. Sizes are multiples of the granularity; 0 says that the runtime has none of
 * this.
 */
size_t gpu_vmm_granularity(int device);
hipError_t gpu_vmm_create(size_t bytes, int device, void **ret_pointer, int *ret_fd);
hipError_t gpu_vmm_import(int fd, size_t bytes, int device, void **ret_pointer);
hipError_t gpu_vmm_free(void *pointer, size_t bytes);

/* launch_encode_map(); hipErrorNotSupported: this runtime has no such thing. */
hipError_t gpu_tensor_map_encode(const struct launch_map *map, const union abi_args *args,
				 struct launch_tensor_map *ret_map);

/*
 * Lets a module's function have so many bytes of dynamic LDS, before a launch beyond 48 KiB. On AMD there
 * is nothing to allow, and hipFuncSetAttribute() refuses what no program has registered.
 */
hipError_t gpu_allow_lds(hipFunction_t function, uint32_t bytes);

/* Launches as the record says; it overlaps where the runtime can. */
hipError_t gpu_launch_kernel(hipFunction_t function, const struct launch_record *record,
			     hipStream_t stream, void **parameters);

#endif
