/* SPDX-License-Identifier: MIT */
/*
 * hip_fake_memory.c: memory, which other processes can open. Each allocation is a file in memory, mapped into a
 * range of addresses that is reserved at once and filled from below; who opens a handle looks in the other
 * process for the file that is mapped where the handle says.
 */
#include "hip_fake.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE       4096ull
#define RANGE      (1ull << 36)
#define RANGE_HINT 0x200000000000ull /* the runner maps memory at the same addresses */
#define DEVICE     ((size_t)4 << 30)
#define POISONED   (16u << 20)

/* A piece of the range; an import of another process's memory; memory of the host that is registered. */
struct memory {
	struct memory *next; /* by address */
	char *at;
	size_t bytes;  /* as it is described: an import's are what its handle said */
	size_t mapped; /* bytes in fact, whole pages; 0: registered host memory */
	int fd;
	unsigned uses; /* of an import; 0: it is none */
	bool touched;
};

/* hipIpcMemHandle_t as the runtime fills it in. */
struct ipc_handle {
	uint32_t address[2], pid, is_host, node, unused[3];
	uint64_t bytes, offset;
	int32_t owner;
	char reserved[12];
};
_Static_assert(sizeof(struct ipc_handle) == sizeof(hipIpcMemHandle_t), "64 bytes");

static struct memory *memories; /* under fake_lock */
static size_t n_allocated;
static char *range;

static size_t pages(size_t bytes)
{
	return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* The last that begins at or in front of @at, if it reaches so far. */
static struct memory *find(const void *at)
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

/* Maps @mapped bytes of the file, described as @bytes. Takes the descriptor. With the lock held. */
static struct memory *place(int fd, size_t mapped, size_t bytes)
{
	struct memory *memory = calloc(1, sizeof(*memory));
	char *at = find_place(mapped);

	if (!memory || !at ||
	    mmap(at, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
		free(memory);
		(void)close(fd);
		return NULL;
	}
	*memory = (struct memory){.at = at, .bytes = bytes, .mapped = mapped, .fd = fd};
	insert(memory);
	return memory;
}

static void unplace(struct memory *memory)
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
	if (ftruncate(fd, (off_t)pages(bytes)) < 0) {
		(void)close(fd);
		return hipErrorOutOfMemory;
	}
	(void)pthread_mutex_lock(&fake_lock);
	if (n_allocated + bytes <= DEVICE)
		memory = place(fd, pages(bytes), bytes);
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
	memory = find(pointer);
	if (memory && (memory->at != pointer || memory->uses || !memory->mapped))
		memory = NULL;
	if (memory) {
		n_allocated -= memory->bytes;
		fake_add(COUNT_ALLOCATIONS, -1);
		fake_add(COUNT_BYTES, -(int64_t)memory->bytes);
		unplace(memory);
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
	known = find(pointer) != NULL;
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
	memory = find(pointer);
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
	memory = find(pointer);
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
	known = find(at) != NULL;
	(void)pthread_mutex_unlock(&fake_lock);
	return known;
}

bool fake_is_pinned(const void *at, size_t bytes)
{
	const struct memory *memory;
	bool pinned;

	(void)pthread_mutex_lock(&fake_lock);
	memory = find(at);
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
	memory = find(at);
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

/* ---- between processes ---- */

hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t *handle, void *pointer)
{
	struct ipc_handle out = {.node = 1, .pid = (uint32_t)getpid(), .owner = getpid()};
	const struct memory *memory;

	ENTER("hipIpcGetMemHandle");
	(void)pthread_mutex_lock(&fake_lock);
	memory = find(pointer);
	if (memory && (!memory->mapped || memory->uses))
		memory = NULL;
	if (memory) {
		memcpy(out.address, &memory->at, sizeof(out.address));
		out.bytes = memory->bytes;
		out.offset = (uint64_t)((char *)pointer - memory->at);
	}
	(void)pthread_mutex_unlock(&fake_lock);
	memcpy(handle, &out, sizeof(out));
	return memory ? hipSuccess : hipErrorInvalidValue;
}

/* The file that process @pid has mapped at @at. -1: none. */
static int open_foreign(uint32_t pid, uint64_t at)
{
	unsigned long long from, inode, want = 0;
	char path[64], line[512];
	struct dirent *entry;
	int fd = -1, found = -1;
	FILE *maps;
	DIR *folder;

	(void)snprintf(path, sizeof(path), "/proc/%u/maps", pid);
	maps = fopen(path, "re");
	while (maps && fgets(line, sizeof(line), maps))
		if (strstr(line, "hip-fake") &&
		    sscanf(line, "%llx-%*x %*s %*x %*s %llu", &from, &inode) == 2 && from == at)
			want = inode;
	if (maps)
		(void)fclose(maps);
	(void)snprintf(path, sizeof(path), "/proc/%u/fd", pid);
	folder = want ? opendir(path) : NULL;
	while (folder && found < 0 && (entry = readdir(folder))) {
		struct stat st;

		fd = openat(dirfd(folder), entry->d_name, O_RDWR | O_CLOEXEC | O_NONBLOCK);
		if (fd >= 0 && fstat(fd, &st) == 0 && st.st_ino == want)
			found = fd;
		else if (fd >= 0)
			(void)close(fd);
	}
	if (folder)
		(void)closedir(folder);
	return found;
}

hipError_t hipIpcOpenMemHandle(void **pointer, hipIpcMemHandle_t handle, unsigned flags)
{
	struct memory *memory = NULL;
	struct ipc_handle in;
	struct stat st;
	uint64_t at;
	int fd;

	ENTER("hipIpcOpenMemHandle");
	memcpy(&in, &handle, sizeof(in));
	memcpy(&at, in.address, sizeof(at));
	if (flags != hipIpcMemLazyEnablePeerAccess || in.bytes == 0)
		return hipErrorInvalidValue;
	if (in.owner == getpid())
		return hipErrorInvalidContext;
	/* Nobody answers for a process that is not there. */
	if (in.pid > INT32_MAX || (kill((pid_t)in.pid, 0) < 0 && errno == ESRCH)) {
		(void)sleep(10);
		return hipErrorInvalidDevicePointer;
	}
	fd = open_foreign(in.pid, at);
	if (fd < 0 || fstat(fd, &st) < 0) {
		if (fd >= 0)
			(void)close(fd);
		return hipErrorInvalidDevicePointer;
	}
	(void)pthread_mutex_lock(&fake_lock);
	memory = place(fd, pages((size_t)st.st_size), in.bytes);
	if (memory)
		memory->uses = 1;
	(void)pthread_mutex_unlock(&fake_lock);
	if (!memory)
		return hipErrorOutOfMemory;
	fake_add(COUNT_IMPORTS, 1);
	*pointer = memory->at + in.offset;
	return hipSuccess;
}

hipError_t hipIpcCloseMemHandle(void *pointer)
{
	hipError_t told = fake_enter("hipIpcCloseMemHandle");
	struct memory *memory;

	fake_wait_for_all();
	(void)pthread_mutex_lock(&fake_lock);
	memory = find(pointer);
	if (memory && !memory->uses)
		memory = NULL;
	if (memory)
		unplace(memory);
	(void)pthread_mutex_unlock(&fake_lock);
	if (!memory)
		return hipErrorInvalidValue;
	fake_add(COUNT_IMPORTS, -1);
	return told;
}

/*
 * Of ROCr, which lies below: what is mapped at @pointer, by whatever handle it was said to be longer. Unlike an
 * allocation's description this knows where the mapping ends.
 */
struct hsa_pointer_info {
	uint32_t size;
	int type;
	void *agent_base, *host_base;
	size_t bytes;
};

EXPORT int hsa_amd_pointer_info(const void *pointer, struct hsa_pointer_info *info, void *alloc,
				uint32_t *n, void *agents);
EXPORT int hsa_amd_pointer_info(const void *pointer, struct hsa_pointer_info *info, void *alloc,
				uint32_t *n, void *agents)
{
	(void)alloc, (void)n, (void)agents;
	info->type = 0; /* unknown */
	info->agent_base = NULL;
	(void)pthread_mutex_lock(&fake_lock);
	for (const struct memory *m = memories; m; m = m->next)
		if ((const char *)pointer >= m->at && (const char *)pointer < m->at + m->mapped) {
			info->type = m->uses ? 4 : 1; /* opened by a handle; an allocation */
			info->agent_base = info->host_base = m->at;
			info->bytes = m->bytes;
		}
	(void)pthread_mutex_unlock(&fake_lock);
	return 0;
}
