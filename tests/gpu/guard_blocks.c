/* SPDX-License-Identifier: MIT */
#include "guard_blocks.h"

#include <dlfcn.h>

#include <fixture.h>

#define CANARY        0xc5
#define OUT_OF_MEMORY 2

typedef unsigned long long pointer;

/* What is not behind the device layer's own face. */
static struct {
	int (*alloc)(pointer *ret, size_t bytes);
	int (*free)(pointer at);
	int (*fill)(pointer at, unsigned char value, size_t bytes, void *stream);
	int (*upload)(pointer to, const void *from, size_t bytes, void *stream);
	int (*download)(void *to, pointer from, size_t bytes, void *stream);
	int (*wait)(void *stream);
} cuda;

static void *symbol(void *library, const char *name)
{
	void *found = dlsym(library, name);

	if (!found)
		fail_msg("libcuda has no %s", name);
	return found;
}

void guard_blocks_open(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);

	if (!library)
		fail_msg("%s", dlerror());
	*(void **)&cuda.alloc = symbol(library, "cuMemAlloc_v2");
	*(void **)&cuda.free = symbol(library, "cuMemFree_v2");
	*(void **)&cuda.fill = symbol(library, "cuMemsetD8Async");
	*(void **)&cuda.upload = symbol(library, "cuMemcpyHtoDAsync_v2");
	*(void **)&cuda.download = symbol(library, "cuMemcpyDtoHAsync_v2");
	*(void **)&cuda.wait = symbol(library, "cuStreamSynchronize");
}

static void check(const char *what, int status)
{
	if (status != 0)
		fail_msg("%s: CUDA error %d", what, status);
}

static void fill(pointer at, int value, uint64_t bytes)
{
	if (bytes > 0)
		check("filling memory", cuda.fill(at, (unsigned char)value, bytes, NULL));
}

static void download(void *to, pointer from, uint64_t bytes)
{
	if (bytes == 0)
		return;
	check("copying to the host", cuda.download(to, from, bytes, NULL));
	check("copying to the host", cuda.wait(NULL));
}

bool guard_block_new(struct guard_block *block, uint64_t front, uint64_t bytes, uint64_t back,
		     int value)
{
	uint64_t total = front + bytes + back;
	int status = cuda.alloc(&block->allocation, total ? total : 1);

	if (status == OUT_OF_MEMORY)
		return false;
	check("allocating", status);
	block->front = front;
	block->bytes = bytes;
	block->back = back;
	fill(block->allocation, CANARY, front);
	fill(block->allocation + front, value, bytes);
	fill(block->allocation + front + bytes, CANARY, back);
	check("filling memory", cuda.wait(NULL));
	return true;
}

void guard_block_free(struct guard_block *block)
{
	if (block->allocation)
		check("freeing", cuda.free(block->allocation));
	*block = (struct guard_block){0};
}

void *guard_block_data(const struct guard_block *block)
{
	return (void *)(uintptr_t)(block->allocation + block->front);
}

void guard_block_write(const struct guard_block *block, const void *from)
{
	if (block->bytes == 0)
		return;
	check("copying to the device",
	      cuda.upload(block->allocation + block->front, from, block->bytes, NULL));
	check("copying to the device", cuda.wait(NULL));
}

void guard_block_read(const struct guard_block *block, void *to)
{
	download(to, block->allocation + block->front, block->bytes);
}

/* Whether @bytes at @from are @expected, or all @value when that is NULL. */
static bool holds(pointer from, uint64_t bytes, const unsigned char *expected, int value)
{
	unsigned char *now = malloc(bytes + 1);
	bool same = true;

	assert_non_null(now);
	download(now, from, bytes);
	if (expected)
		same = memcmp(now, expected, bytes) == 0;
	for (uint64_t i = 0; i < bytes && !expected && same; i++)
		same = now[i] == value;
	free(now);
	return same;
}

bool guard_block_holds(const struct guard_block *block, const void *expected, int value)
{
	return holds(block->allocation + block->front, block->bytes, expected, value);
}

bool guard_block_is_intact(const struct guard_block *block)
{
	return !block->allocation ||
	       (holds(block->allocation, block->front, NULL, CANARY) &&
		holds(block->allocation + block->front + block->bytes, block->back, NULL, CANARY));
}
