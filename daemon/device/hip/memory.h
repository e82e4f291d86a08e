/* SPDX-License-Identifier: MIT */
/*
 * memory.h: a piece of memory of this backend, and its end. A module is one, too.
 *
 * To give memory back a driver waits until every stream is through, also those that wait for a client's word. So
 * nobody who has something else to do gives it back: it goes to a thread of its own.
 */
#ifndef FMHAD_DEVICE_HIP_MEMORY_H
#define FMHAD_DEVICE_HIP_MEMORY_H

#include "gpu.h"

enum gpu_memory_kind {
	MEMORY_PLAIN,
	MEMORY_VMM,
	MEMORY_IPC,
	MEMORY_COPY,
	MEMORY_STAGING,
	MEMORY_CODE
};

/* A device_memory's map. */
struct gpu_memory {
	struct gpu_memory *next; /* among kept workspaces, staging, what is to be given back */
	enum gpu_memory_kind kind;
	void *base;
	size_t bytes;
	struct gpu_shared *shared;
	struct device_memory host; /* MEMORY_COPY: the client's memfd */
	int fd;                    /* of the spare one, which has not been given away */
	hipModule_t module;        /* MEMORY_CODE; base: its image, or NULL */
};

/* How long the loop's thread waits for memory that is being given back. */
#define GPU_LOOP_PATIENCE_MS 200

/* Gives it back here and now. */
void gpu_memory_destroy(struct gpu_device *gpu, struct gpu_memory *memory);

int gpu_reclaim_start(struct gpu_device *gpu, struct fmha_error *err);
/* Gives back what is left. */
void gpu_reclaim_stop(struct gpu_device *gpu);
/* Any thread: takes the memory over. */
void gpu_reclaim(struct gpu_device *gpu, struct gpu_memory *memory);
/* Any thread. How many pieces have been given back so far. */
uint64_t gpu_reclaimed(struct gpu_device *gpu);
/* Any thread. Return: whether within @ms all that is to be given back has been, and it was more than @since. */
bool gpu_reclaim_wait(struct gpu_device *gpu, uint64_t since, uint32_t ms);

#endif
