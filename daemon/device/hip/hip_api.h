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
/* A stream waits until a word is @value or was further on, or writes it. @kernel: of words.hip; NULL: the runtime does it. */
hipError_t gpu_word_wait(hipFunction_t kernel, hipStream_t stream, void *word, uint32_t value);
hipError_t gpu_word_write(hipFunction_t kernel, hipStream_t stream, void *word, uint32_t value);
/*
 * Whether a stream waits for a word, and sees it written by another, which is @other. @trouble: a sentence, empty when it does.
 * Return: hipErrorNotReady: the stream is held up for good; what else a call says.
 */
hipError_t gpu_try_fences(hipFunction_t kernel, hipStream_t other, char *trouble, size_t size);

/* Whether a client (@uid, @client_pid) may have this IPC handle opened. Return: 0, FMHA_EPERM. */
int gpu_check_handle(const uint8_t handle[64], uint32_t uid, uint32_t client_pid,
		     struct fmha_error *err);
/* Whether what a handle has opened at @base is @bytes long. hipErrorInvalidValue: it is not. */
hipError_t gpu_check_mapping(const void *base, size_t bytes);

/*
 * Memory that travels as a file descriptor, mapped here and wherever the descriptor goes. What is made has
 * multiples of the granularity; 0 says that the runtime has none of this.
 */
struct gpu_mapping {
	void *pointer;
	size_t bytes;
	void *external; /* AMD: what the runtime calls an import; NULL: made here */
};

size_t gpu_vmm_granularity(int device);
hipError_t gpu_vmm_create(size_t bytes, int device, struct gpu_mapping *ret_mapping, int *ret_fd);
/* @bytes: as many have to be behind the descriptor, which stays the caller's. */
hipError_t gpu_vmm_import(int fd, size_t bytes, int device, struct gpu_mapping *ret_mapping);
hipError_t gpu_vmm_free(const struct gpu_mapping *mapping);

/*
 * Which ways there are for memory to get from one process to another, tried by two processes of fmhad's own while
 * the device is opened (try_sharing.c). CUDA's are not tried.
 */
struct gpu_sharing {
	char no_descriptors[96], no_handles[96]; /* why a way is not gone; empty: it is */
};

struct gpu_trial;
/* Starts the two processes, which need their time as the caller does. */
struct gpu_trial *gpu_trial_begin(int device);
/* Waits for them. @trial: taken; NULL: it could not begin. */
void gpu_trial_end(struct gpu_trial *trial, struct gpu_sharing *ret_sharing);
/* Does what such a process is for. Return: its exit status. */
int gpu_trial_peer(uint32_t device, const char *role);

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
