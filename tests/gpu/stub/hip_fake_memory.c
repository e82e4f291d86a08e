/* SPDX-License-Identifier: MIT */
/*
 * hip_fake_memory.c: memory, which other processes can open. Each allocation is a file in memory, mapped into a
 * range of addresses that is reserved at once and filled from below; who opens a handle looks in the other
 * process for the file that is mapped where the handle says.
 */
#include "hip_fake_memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE       4096ull
#define RANGE      (1ull << 36)
#define RANGE_HINT 0x200000000000ull /* the runner maps memory at the same addresses */
#define DEVICE     ((size_t)4 << 30)
#define POISONED   (16u << 20)

struct memory *memories; /* under fake_lock */
static size_t n_allocated;
static char *range;

size_t fake_pages(size_t bytes)
{
	return (bytes + PAGE - 1) / PAGE * PAGE;
}

struct memory *fake_find(const void *at)
{
	struct memory *found = NULL;

	for (struct memory *m = memories; m && m->at <= (const char *)at; m = m->next)
		found = m;
	return found && (const char *)at < found->at + found->bytes ? found : NULL;
}

static void insert(struct memory *memory)
{
	struct memory **at = &memories;

	while (*at && (*at)->at < memory->at)
		at = &(*at)->next;
	memory->next = *at;
	*at = memory;
}

static void take_out(struct memory *memory)
{
	struct memory **at = &memories;

	while (*at != memory)
		at = &(*at)->next;
	*at = memory->next;
}

/* The lowest place where so many bytes fit. NULL: there is none. */
static char *find_place(size_t bytes)
{
	char *at;

	if (!range) {
		range = mmap((void *)RANGE_HINT, RANGE, PROT_NONE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (range == MAP_FAILED)
			abort();
	}
	at = range;
	for (const struct memory *m = memories; m; m = m->next)
		if (m->mapped && m->at >= range && m->at < range + RANGE) {
			if ((size_t)(m->at - at) >= bytes)
				return at;
			at = m->at + m->mapped;
		}
	return at + bytes <= range + RANGE ? at : NULL;
}

struct memory *fake_place(int fd, size_t mapped, size_t bytes, int sharing)
{
	struct memory *memory = calloc(1, sizeof(*memory));
	char *at = find_place(mapped);

	if (!memory || !at ||
	    mmap(at, mapped, PROT_READ | PROT_WRITE, sharing | MAP_FIXED, fd, 0) == MAP_FAILED) {
		free(memory);
		(void)close(fd);
		return NULL;
	}
	*memory = (struct memory){.at = at, .bytes = bytes, .mapped = mapped, .fd = fd};
	insert(memory);
	return memory;
}

void fake_unplace(struct memory *memory)
{
	take_out(memory);
	(void)mmap(memory->at, memory->mapped, PROT_NONE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	(void)close(memory->fd);
	free(memory);
}

hipError_t hipMalloc(void **pointer, size_t bytes)
{
	struct memory *memory = NULL;
	int fd;

	ENTER("hipMalloc");
	fake_first("memory");
	if (bytes == 0)
		return hipErrorInvalidValue;
	if (bytes > DEVICE)
		return hipErrorOutOfMemory;
	fd = memfd_create("hip-fake", MFD_CLOEXEC);
	if (fd < 0)
		return hipErrorOutOfMemory;
	if (ftruncate(fd, (off_t)fake_pages(bytes)) < 0) {
		(void)close(fd);
		return hipErrorOutOfMemory;
	}
	(void)pthread_mutex_lock(&fake_lock);
	if (n_allocated + bytes <= DEVICE)
		memory = fake_place(fd, fake_pages(bytes), bytes, MAP_SHARED);
	else
		(void)close(fd);
	if (memory)
		n_allocated += bytes;
	(void)pthread_mutex_unlock(&fake_lock);
	if (!memory)
		return hipErrorOutOfMemory;
	if (bytes <= POISONED)
		memset(memory->at, 0xa5, bytes);
	fake_add(COUNT_ALLOCATIONS, 1);
	fake_add(COUNT_BYTES, (int64_t)bytes);
	*pointer = memory->at;
	return hipSuccess;
}

hipError_t hipFree(void *pointer)
{
	hipError_t told = fake_enter("hipFree");
	struct memory *memory;

	if (!pointer)
		return hipSuccess;
	fake_wait_for_all();
	(void)pthread_mutex_lock(&fake_lock);
	memory = fake_find(pointer);
	if (memory &&
	    (memory->at != pointer || (memory->uses && !memory->external) || !memory->mapped))
		memory = NULL;
	if (memory && memory->external) {
		fake_add(COUNT_IMPORTS, -1);
		fake_unplace(memory);
	} else if (memory) {
		if (fake_is("HIP_FAKE_DMABUF", "lost"))
			memset(memory->at, 0, memory->bytes);
		n_allocated -= memory->bytes;
		fake_add(COUNT_ALLOCATIONS, -1);
		fake_add(COUNT_BYTES, -(int64_t)memory->bytes);
		fake_unplace(memory);
	}
	(void)pthread_mutex_unlock(&fake_lock);
	return told != hipSuccess ? told : memory ? hipSuccess : hipErrorInvalidValue;
}

hipError_t hipHostRegister(void *pointer, size_t bytes, unsigned flags)
{
	struct memory *memory;
	bool known;

	(void)flags;
	ENTER("hipHostRegister");
	memory = calloc(1, sizeof(*memory));
	if (!memory)
		return hipErrorOutOfMemory;
	*memory = (struct memory){.at = pointer, .bytes = bytes, .fd = -1};
	(void)pthread_mutex_lock(&fake_lock);
	known = fake_find(pointer) != NULL;
	if (!known)
		insert(memory);
	(void)pthread_mutex_unlock(&fake_lock);
	if (known) {
		free(memory);
		return hipErrorHostMemoryAlreadyRegistered;
	}
	fake_add(COUNT_PINNED, 1);
	return hipSuccess;
}

hipError_t hipHostUnregister(void *pointer)
{
	hipError_t told = fake_enter("hipHostUnregister");
	struct memory *memory;

	fake_wait_for_all();
	(void)pthread_mutex_lock(&fake_lock);
	memory = fake_find(pointer);
	if (memory && memory->mapped)
		memory = NULL;
	if (memory)
		take_out(memory);
	(void)pthread_mutex_unlock(&fake_lock);
	if (!memory)
		return hipErrorHostMemoryNotRegistered;
	free(memory);
	fake_add(COUNT_PINNED, -1);
	return told;
}

hipError_t hipMemGetAddressRange(hipDeviceptr_t *base, size_t *bytes, hipDeviceptr_t pointer)
{
	const struct memory *memory;

	ENTER("hipMemGetAddressRange");
	(void)pthread_mutex_lock(&fake_lock);
	memory = fake_find(pointer);
	if (memory) {
		*base = memory->at;
		*bytes = memory->bytes;
	}
	(void)pthread_mutex_unlock(&fake_lock);
	return memory ? hipSuccess : hipErrorNotFound;
}

/* ---- for queues ---- */

bool fake_is_known(const void *at)
{
	bool known;

	(void)pthread_mutex_lock(&fake_lock);
	known = fake_find(at) != NULL;
	(void)pthread_mutex_unlock(&fake_lock);
	return known;
}

bool fake_is_pinned(const void *at, size_t bytes)
{
	const struct memory *memory;
	bool pinned;

	(void)pthread_mutex_lock(&fake_lock);
	memory = fake_find(at);
	pinned = memory && !memory->mapped &&
		 (const char *)at + bytes <= memory->at + memory->bytes;
	(void)pthread_mutex_unlock(&fake_lock);
	return pinned;
}

void fake_touch(const void *at, size_t bytes)
{
	struct memory *memory;
	bool first;

	(void)pthread_mutex_lock(&fake_lock);
	memory = fake_find(at);
	if (!memory && ((const char *)at < range || (const char *)at >= range + RANGE)) {
		(void)pthread_mutex_unlock(&fake_lock);
		return;
	}
	if (!memory || (const char *)at + bytes > memory->at + memory->bytes) {
		(void)fprintf(stderr, "Memory access fault by GPU node-1 on address %p\n", at);
		abort();
	}
	first = !memory->touched && memory->mapped;
	memory->touched = true;
	(void)pthread_mutex_unlock(&fake_lock);
	if (first)
		(void)usleep((useconds_t)fake_number("HIP_FAKE_TOUCH_MS") * 1000);
}

char *fake_memory_list(void)
{
	char *text = NULL;
	size_t bytes;
	FILE *out = open_memstream(&text, &bytes);

	if (!out)
		return NULL;
	(void)fputc('[', out);
	(void)pthread_mutex_lock(&fake_lock);
	for (const struct memory *m = memories; m; m = m->next)
		if (m->mapped)
			(void)fprintf(out, "%s[%zu, %zu, \"/proc/%d/fd/%d\"]",
				      m == memories ? "" : ", ", (size_t)m->at, m->mapped, getpid(),
				      m->fd);
	(void)pthread_mutex_unlock(&fake_lock);
	(void)fputc(']', out);
	(void)fclose(out);
	return text;
}
