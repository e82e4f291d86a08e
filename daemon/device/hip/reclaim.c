/* SPDX-License-Identifier: MIT */
#include "gpu.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include <base/clock.h>
#include <proto/error.h>

#include <host_memory.h>

void gpu_memory_destroy(struct gpu_device *gpu, struct gpu_memory *memory)
{
	const struct gpu_mapping mapping = gpu_mapping_of(memory);

	switch (memory->kind) {
	case MEMORY_PLAIN:
		(void)hipFree(memory->base);
		break;
	case MEMORY_VMM:
		(void)gpu_vmm_free(&mapping);
		break;
	case MEMORY_IPC:
		gpu_shared_close(gpu, memory->shared);
		break;
	case MEMORY_COPY:
		(void)hipHostUnregister(memory->host.map);
		host_memory_free(&memory->host);
		(void)hipFree(memory->base);
		break;
	case MEMORY_STAGING:
		(void)hipHostUnregister(memory->base);
		(void)munmap(memory->base, memory->bytes);
		break;
	case MEMORY_CODE:
		(void)hipModuleUnload(memory->module);
		free(memory->base);
		break;
	}
	free(memory);
}

static void *reclaimer(void *argument)
{
	struct gpu_device *gpu = argument;
	struct gpu_reclaim *reclaim = &gpu->reclaim;

	(void)hipSetDevice(gpu->index);
	(void)pthread_mutex_lock(&reclaim->lock);
	for (;;) {
		struct gpu_memory *memory = reclaim->first;

		if (!memory && reclaim->stopping)
			break;
		if (!memory) {
			(void)pthread_cond_wait(&reclaim->changed, &reclaim->lock);
			continue;
		}
		reclaim->first = memory->next;
		(void)pthread_mutex_unlock(&reclaim->lock);
		gpu_memory_destroy(gpu, memory);
		(void)pthread_mutex_lock(&reclaim->lock);
		reclaim->n_pending--;
		reclaim->n_done++;
		(void)pthread_cond_broadcast(&reclaim->changed);
	}
	(void)pthread_mutex_unlock(&reclaim->lock);
	return NULL;
}

int gpu_reclaim_start(struct gpu_device *gpu, struct fmha_error *err)
{
	struct gpu_reclaim *reclaim = &gpu->reclaim;
	pthread_condattr_t clock;

	(void)pthread_mutex_init(&reclaim->lock, NULL);
	(void)pthread_condattr_init(&clock);
	(void)pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
	(void)pthread_cond_init(&reclaim->changed, &clock);
	(void)pthread_condattr_destroy(&clock);
	if (pthread_create(&reclaim->thread, NULL, reclaimer, gpu) != 0)
		return fmha_error_set(err, FMHA_EIO, "no more threads");
	(void)pthread_setname_np(reclaim->thread, "fmhad-reclaim");
	reclaim->started = true;
	return 0;
}

void gpu_reclaim_stop(struct gpu_device *gpu)
{
	struct gpu_reclaim *reclaim = &gpu->reclaim;

	if (!reclaim->started)
		return;
	(void)pthread_mutex_lock(&reclaim->lock);
	reclaim->stopping = true;
	(void)pthread_cond_broadcast(&reclaim->changed);
	(void)pthread_mutex_unlock(&reclaim->lock);
	(void)pthread_join(reclaim->thread, NULL);
	(void)pthread_mutex_destroy(&reclaim->lock);
	(void)pthread_cond_destroy(&reclaim->changed);
}

void gpu_reclaim(struct gpu_device *gpu, struct gpu_memory *memory)
{
	struct gpu_reclaim *reclaim = &gpu->reclaim;
	struct gpu_memory **at = &reclaim->first;

	memory->next = NULL;
	(void)pthread_mutex_lock(&reclaim->lock);
	while (*at)
		at = &(*at)->next;
	*at = memory;
	reclaim->n_pending++;
	(void)pthread_cond_broadcast(&reclaim->changed);
	(void)pthread_mutex_unlock(&reclaim->lock);
}

uint64_t gpu_reclaimed(struct gpu_device *gpu)
{
	struct gpu_reclaim *reclaim = &gpu->reclaim;
	uint64_t n;

	(void)pthread_mutex_lock(&reclaim->lock);
	n = reclaim->n_done;
	(void)pthread_mutex_unlock(&reclaim->lock);
	return n;
}

bool gpu_reclaim_wait(struct gpu_device *gpu, uint64_t since, uint32_t ms)
{
	struct gpu_reclaim *reclaim = &gpu->reclaim;
	uint64_t end = clock_ns() + ms * NS_PER_MS;
	struct timespec until = {.tv_sec = (time_t)(end / NS_PER_S),
				 .tv_nsec = (long)(end % NS_PER_S)};
	bool any, all;
	int r = 0;

	(void)pthread_mutex_lock(&reclaim->lock);
	while (reclaim->n_pending > 0 && r == 0)
		r = pthread_cond_timedwait(&reclaim->changed, &reclaim->lock, &until);
	all = reclaim->n_pending == 0;
	any = reclaim->n_done != since;
	(void)pthread_mutex_unlock(&reclaim->lock);
	return any && all;
}
