/* SPDX-License-Identifier: MIT */
/*
 * arena.c: shared memory for tensors that lie in ordinary memory.
 *
 * A call takes one arena for its tensors and gives it back when its run has ended; a run that timed
 * out keeps its arena until the worker answers, for until then the worker may write to it. Sizes
 * are powers of two, so that calls of similar size meet the same arena, and with it the same plan.
 */
#include "internal.h"

#include <unistd.h>

static bool is_busy(struct arena *arena)
{
	return __atomic_load_n(&arena->busy, __ATOMIC_ACQUIRE) != 0;
}

static void set_busy(struct arena *arena, int busy)
{
	__atomic_store_n(&arena->busy, busy, __ATOMIC_RELEASE);
}

void arena_on_answer(void *arena)
{
	set_busy(arena, 0);
}

void arena_trim(struct fmha_device *device, bool all)
{
	struct fmha_buffer *victims[ARENA_MAX];
	uint64_t idle_bytes = 0;
	uint32_t n = 0;

	(void)pthread_mutex_lock(&device->lock);
	for (uint32_t i = 0; i < ARENA_MAX; i++) {
		struct arena *arena = &device->arenas[i];

		if (!arena->buffer || is_busy(arena))
			continue;
		idle_bytes += arena->buffer->size;
		if (all || idle_bytes > ARENA_MAX_IDLE_BYTES) {
			victims[n++] = arena->buffer;
			arena->buffer = NULL;
		}
	}
	(void)pthread_mutex_unlock(&device->lock);
	for (uint32_t i = 0; i < n; i++) {
		cache_drop(device, victims[i]->id);
		buffer_release(victims[i]);
	}
}

/* The smallest idle arena that is large enough, but not more than four times too large. */
static struct arena *find_idle(struct fmha_device *device, uint64_t bytes)
{
	struct arena *best = NULL;

	for (uint32_t i = 0; i < ARENA_MAX; i++) {
		struct arena *arena = &device->arenas[i];

		if (!arena->buffer || is_busy(arena) || arena->buffer->size < bytes ||
		    arena->buffer->size / 4 > bytes + ARENA_MIN_BYTES)
			continue;
		if (!best || arena->buffer->size < best->buffer->size)
			best = arena;
	}
	return best;
}

/* A slot without a buffer. */
static struct arena *find_free_slot(struct fmha_device *device)
{
	for (uint32_t i = 0; i < ARENA_MAX; i++) {
		struct arena *arena = &device->arenas[i];

		if (!arena->buffer && !is_busy(arena))
			return arena;
	}
	return NULL;
}

/* An idle arena, or else an empty slot; either is the caller's from now on. NULL: all are busy. */
static struct arena *claim(struct fmha_device *device, uint64_t bytes)
{
	struct arena *arena;

	for (int attempt = 0; attempt < 2; attempt++) {
		(void)pthread_mutex_lock(&device->lock);
		arena = find_idle(device, bytes);
		if (!arena)
			arena = find_free_slot(device);
		if (arena)
			set_busy(arena, 1);
		(void)pthread_mutex_unlock(&device->lock);
		if (arena)
			return arena;
		arena_trim(device, true); /* idle ones of the wrong size */
	}
	return NULL;
}

/* What the worker allocates, where the CPU can map it, or else memory of our own that it imports.
 */
static int new_buffer(struct fmha_device *device, uint64_t size, int64_t deadline,
		      struct fmha_buffer **ret_buffer, struct fmha_error *err)
{
	struct fmha_memory memory = {.struct_size = sizeof(memory), .size = size};
	int r = buffer_new(device, size, true, deadline, ret_buffer, err);

	if (r < 0 || (*ret_buffer)->data)
		return r;
	buffer_release(*ret_buffer);
	r = fmha_memfd_new(size, &memory.fd, err);
	if (r < 0)
		return r;
	r = buffer_import(device, &memory, true, deadline, ret_buffer, err);
	(void)close(memory.fd);
	return r;
}

int arena_take(struct fmha_device *device, uint64_t bytes, int64_t deadline,
	       struct arena **ret_arena, struct fmha_error *err)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	struct fmha_buffer *buffer;
	uint64_t size = ARENA_MIN_BYTES;
	struct arena *arena;
	int r;

	while (!(arena = claim(device, bytes))) {
		if (deadline_left_ns(deadline) == 0)
			return fmha_error_set(err, FMHA_ETIMEDOUT,
					      "%u runs still use all of the staging memory",
					      ARENA_MAX);
		(void)nanosleep(&pause, NULL);
	}
	if (arena->buffer) {
		*ret_arena = arena;
		return 0;
	}
	while (size < bytes && size < UINT64_C(1) << 62)
		size *= 2;
	r = new_buffer(device, size, deadline, &buffer, err);
	if (r == FMHA_EQUOTA || r == FMHA_ENOMEM) {
		arena_trim(device, true);
		r = new_buffer(device, bytes, deadline, &buffer, err);
	}
	if (r < 0) {
		set_busy(arena, 0);
		return r;
	}
	(void)pthread_mutex_lock(&device->lock);
	arena->buffer = buffer;
	(void)pthread_mutex_unlock(&device->lock);
	*ret_arena = arena;
	return 0;
}

void arena_discard(struct arena *arena)
{
	struct fmha_buffer *buffer = arena->buffer;
	struct fmha_device *device = buffer->device;

	(void)pthread_mutex_lock(&device->lock);
	arena->buffer = NULL;
	(void)pthread_mutex_unlock(&device->lock);
	set_busy(arena, 0);
	cache_drop(device, buffer->id);
	buffer_release(buffer);
}

void arena_give_back(struct arena *arena)
{
	struct fmha_device *device = arena->buffer->device;

	set_busy(arena, 0);
	arena_trim(device, false);
}
