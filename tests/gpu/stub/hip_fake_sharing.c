/* SPDX-License-Identifier: MIT */
/*
 * hip_fake_sharing.c: memory that other processes open, by handle or by descriptor. Who opens a handle looks in the other
 * process for the file that is mapped where the handle says; a dma-buf is that file.
 */
#include "hip_fake_memory.h"

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

/* hipIpcMemHandle_t as the runtime fills it in. */
struct ipc_handle {
	uint32_t address[2], pid, is_host, node, unused[3];
	uint64_t bytes, offset;
	int32_t owner;
	char reserved[12];
};
_Static_assert(sizeof(struct ipc_handle) == sizeof(hipIpcMemHandle_t), "64 bytes");

bool fake_is(const char *variable, const char *what)
{
	const char *text = getenv(variable);

	return text && strcmp(text, what) == 0;
}

/* What is opened where the variable has something to say of it. Takes the descriptor. */
static int fake_lie(const char *variable, int fd)
{
	struct stat st;

	if (fake_is(variable, "aborts"))
		abort();
	while (fake_is(variable, "hangs"))
		(void)pause();
	if (!fake_is(variable, "zeros") || fstat(fd, &st) < 0)
		return fd;
	(void)close(fd);
	fd = memfd_create("hip-fake", MFD_CLOEXEC);
	if (fd >= 0 && ftruncate(fd, st.st_size) < 0)
		abort();
	return fd;
}

/* ---- by handle ---- */

hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t *handle, void *pointer)
{
	struct ipc_handle out = {.node = 1, .pid = (uint32_t)getpid(), .owner = getpid()};
	const struct memory *memory;

	ENTER("hipIpcGetMemHandle");
	(void)pthread_mutex_lock(&fake_lock);
	memory = fake_find(pointer);
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
	fd = fake_lie("HIP_FAKE_IPC", fd);
	(void)pthread_mutex_lock(&fake_lock);
	memory = fake_place(fd, fake_pages((size_t)st.st_size), in.bytes,
			    fake_is("HIP_FAKE_IPC", "deaf") ? MAP_PRIVATE : MAP_SHARED);
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
	memory = fake_find(pointer);
	if (memory && !memory->uses)
		memory = NULL;
	if (memory)
		fake_unplace(memory);
	(void)pthread_mutex_unlock(&fake_lock);
	if (!memory)
		return hipErrorInvalidValue;
	fake_add(COUNT_IMPORTS, -1);
	return told;
}

/* ---- by descriptor ---- */

/* hsa_amd_portable_export_dmabuf(): a small allocation's is that of the block that it was cut from. */
EXPORT int hsa_amd_portable_export_dmabuf(const void *pointer, size_t bytes, int *fd,
					  uint64_t *offset);
EXPORT int hsa_amd_portable_export_dmabuf(const void *pointer, size_t bytes, int *fd,
					  uint64_t *offset)
{
	const struct memory *memory;
	int found = -1;

	if (fake_enter("hsa_amd_portable_export_dmabuf") != hipSuccess ||
	    fake_is("HIP_FAKE_DMABUF", "no") || fake_is("HIP_FAKE_DMABUF", "range"))
		return 0x1000;
	(void)pthread_mutex_lock(&fake_lock);
	memory = fake_find(pointer);
	if (memory && memory->mapped && !memory->uses &&
	    (const char *)pointer + bytes <= memory->at + memory->bytes) {
		found = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
		*offset = (uint64_t)((const char *)pointer - memory->at);
	}
	(void)pthread_mutex_unlock(&fake_lock);
	if (found < 0)
		return 0x1000;
	if (fake_is("HIP_FAKE_DMABUF", "block"))
		*offset += 4096;
	*fd = found;
	return 0;
}

/* Of HIP 7. */
EXPORT hipError_t hipMemGetHandleForAddressRange(void *handle, hipDeviceptr_t pointer, size_t bytes,
						 int kind, unsigned long long flags);
EXPORT hipError_t hipMemGetHandleForAddressRange(void *handle, hipDeviceptr_t pointer, size_t bytes,
						 int kind, unsigned long long flags)
{
	const struct memory *memory;
	int *fd = handle;

	ENTER("hipMemGetHandleForAddressRange");
	if (!fake_is("HIP_FAKE_DMABUF", "range") || kind != 1 || flags != 0)
		return hipErrorInvalidValue;
	(void)pthread_mutex_lock(&fake_lock);
	memory = fake_find(pointer);
	*fd = memory && memory->mapped && memory->bytes == bytes
		      ? fcntl(memory->fd, F_DUPFD_CLOEXEC, 0)
		      : -1;
	(void)pthread_mutex_unlock(&fake_lock);
	return *fd >= 0 ? hipSuccess : hipErrorInvalidValue;
}

struct external {
	int fd, told; /* our own, and the caller's number */
	size_t bytes;
};

/* The size is what it was told, as HIP does. */
hipError_t hipImportExternalMemory(hipExternalMemory_t *ret_external,
				   const hipExternalMemoryHandleDesc *what)
{
	struct external *external;
	struct stat st;
	char link[64], name[64] = "";

	ENTER("hipImportExternalMemory");
	if (what->type != hipExternalMemoryHandleTypeOpaqueFd || what->size == 0 ||
	    what->flags != 0)
		return hipErrorInvalidValue;
	(void)snprintf(link, sizeof(link), "/proc/self/fd/%d", what->handle.fd);
	if (readlink(link, name, sizeof(name) - 1) < 0 || !strstr(name, "hip-fake") ||
	    fstat(what->handle.fd, &st) < 0)
		return hipErrorOutOfMemory; /* as HIP says it */
	external = calloc(1, sizeof(*external));
	if (!external)
		return hipErrorOutOfMemory;
	external->told = what->handle.fd;
	external->fd = fcntl(what->handle.fd, F_DUPFD_CLOEXEC, 100);
	external->bytes = what->size;
	fake_add(COUNT_IMPORTS, 1);
	*ret_external = external;
	return hipSuccess;
}

hipError_t hipExternalMemoryGetMappedBuffer(void **pointer, hipExternalMemory_t from,
					    const hipExternalMemoryBufferDesc *what)
{
	const struct external *external = from;
	struct memory *memory;
	struct stat st;
	int fd;

	ENTER("hipExternalMemoryGetMappedBuffer");
	if (what->offset + what->size > external->bytes || what->flags != 0 ||
	    fstat(external->fd, &st) < 0)
		return hipErrorInvalidValue;
	fd = fake_lie("HIP_FAKE_DMABUF", fcntl(external->fd, F_DUPFD_CLOEXEC, 100));
	(void)pthread_mutex_lock(&fake_lock);
	memory = fake_place(fd, (size_t)st.st_size, what->size,
			    fake_is("HIP_FAKE_DMABUF", "deaf") ? MAP_PRIVATE : MAP_SHARED);
	if (memory) {
		memory->uses = 1;
		memory->external = true;
	}
	(void)pthread_mutex_unlock(&fake_lock);
	if (!memory)
		return hipErrorOutOfMemory;
	fake_add(COUNT_IMPORTS, 1);
	*pointer = memory->at + what->offset;
	return hipSuccess;
}

hipError_t hipDestroyExternalMemory(hipExternalMemory_t what)
{
	hipError_t told = fake_enter("hipDestroyExternalMemory");
	struct external *external = what;

	if (fake_is("HIP_FAKE_DMABUF", "closes"))
		(void)close(external->told);
	(void)close(external->fd);
	free(external);
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
