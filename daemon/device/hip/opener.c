/* SPDX-License-Identifier: MIT */
#include "opener.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

struct gpu_opener {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	int device;
	enum { OPENER_IDLE, OPENER_ASKED, OPENER_DONE } state;
	bool left; /* nobody waits any more: the thread frees all of this */
	hipIpcMemHandle_t handle;
	hipError_t status;
	void *base;
};

static void destroy(struct gpu_opener *opener)
{
	(void)pthread_mutex_destroy(&opener->lock);
	(void)pthread_cond_destroy(&opener->changed);
	free(opener);
}

static void *opener_thread(void *argument)
{
	struct gpu_opener *opener = argument;
	hipError_t selected = hipSetDevice(opener->device);

	(void)pthread_mutex_lock(&opener->lock);
	for (;;) {
		hipIpcMemHandle_t handle;
		hipError_t status = selected;
		void *base = NULL;

		while (opener->state != OPENER_ASKED && !opener->left)
			(void)pthread_cond_wait(&opener->changed, &opener->lock);
		if (opener->left)
			break;
		handle = opener->handle;
		(void)pthread_mutex_unlock(&opener->lock);
		if (status == hipSuccess)
			status = hipIpcOpenMemHandle(&base, handle, hipIpcMemLazyEnablePeerAccess);
		(void)pthread_mutex_lock(&opener->lock);
		if (opener->left && status == hipSuccess)
			(void)hipIpcCloseMemHandle(base);
		opener->status = status;
		opener->base = base;
		opener->state = OPENER_DONE;
		(void)pthread_cond_signal(&opener->changed);
	}
	(void)pthread_mutex_unlock(&opener->lock);
	destroy(opener);
	return NULL;
}

static struct gpu_opener *opener_new(int device)
{
	struct gpu_opener *opener = calloc(1, sizeof(*opener));
	pthread_t thread;

	if (!opener)
		return NULL;
	opener->device = device;
	(void)pthread_mutex_init(&opener->lock, NULL);
	(void)pthread_cond_init(&opener->changed, NULL);
	if (pthread_create(&thread, NULL, opener_thread, opener) != 0) {
		destroy(opener);
		return NULL;
	}
	(void)pthread_detach(thread);
	return opener;
}

hipError_t gpu_opener_open(struct gpu_opener **at, int device, const hipIpcMemHandle_t *handle,
			   int deadline, void **ret_base)
{
	struct gpu_opener *opener = *at ? *at : opener_new(device);
	struct timespec until;
	hipError_t status;

	*at = opener;
	if (!opener)
		return hipErrorOutOfMemory;
	(void)clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += deadline;
	(void)pthread_mutex_lock(&opener->lock);
	opener->handle = *handle;
	opener->state = OPENER_ASKED;
	(void)pthread_cond_signal(&opener->changed);
	while (opener->state != OPENER_DONE &&
	       pthread_cond_timedwait(&opener->changed, &opener->lock, &until) == 0)
		;
	if (opener->state == OPENER_DONE) {
		status = opener->status;
		*ret_base = opener->base;
		opener->state = OPENER_IDLE;
	} else {
		status = hipErrorNotReady;
		opener->left = true;
		*at = NULL;
	}
	(void)pthread_mutex_unlock(&opener->lock);
	return status;
}

struct gpu_opener *gpu_opener_free(struct gpu_opener *opener)
{
	if (!opener)
		return NULL;
	(void)pthread_mutex_lock(&opener->lock);
	opener->left = true;
	(void)pthread_cond_signal(&opener->changed);
	(void)pthread_mutex_unlock(&opener->lock);
	return NULL;
}
