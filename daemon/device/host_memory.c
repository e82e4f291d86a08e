/* SPDX-License-Identifier: MIT */
#include "host_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <proto/error.h>

#include <base/clock.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#endif

#define SEALS      (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define PAGE_BYTES 4096ull
#define MAX_BYTES  (1ull << 46)

uint64_t host_memory_cost(uint64_t offset, uint64_t size)
{
	return ((offset & (PAGE_BYTES - 1)) + size + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
}

static int map(int fd, uint64_t offset, uint64_t size, struct device_memory *ret_memory,
	       struct fmha_error *err)
{
	uint64_t start = offset & ~(PAGE_BYTES - 1);
	uint64_t bytes = host_memory_cost(offset, size);
	void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)start);

	if (address == MAP_FAILED && errno == ENOMEM)
		return fmha_error_set(err, FMHA_ENOMEM, "mapping %llu bytes: %s",
				      (unsigned long long)bytes, strerror(errno));
	if (address == MAP_FAILED)
		return fmha_error_set_field(err, FMHA_EINVAL, "fd",
					    "memory cannot be mapped for reading and writing: %s",
					    strerror(errno));
	*ret_memory = (struct device_memory){.host = (char *)address + (offset - start),
					     .device = (char *)address + (offset - start),
					     .bytes = size,
					     .map = address,
					     .map_bytes = bytes};
	return 0;
}

/*
 * The pages of a memfd that was made here. They end with the last buffer that has all of them: a client
 * whose connection was lost brings its memory to the next one, and the first one's end must not empty
 * it. One table for the process, as a memfd may come back on any thread that makes buffers.
 */
struct memfd_pages {
	struct memfd_pages *next;
	dev_t device;
	ino_t inode;
	uint64_t n_users; /* 0: they are about to end */
};

static struct memfd_pages *table[256];
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;

static struct memfd_pages **memfd_bucket(ino_t inode)
{
	return &table[inode % (sizeof(table) / sizeof(table[0]))];
}

/* The name of what this process makes: no other has it, not even a later one of the same number. */
static const char *own_name(void)
{
	static char name[48];

	(void)pthread_mutex_lock(&table_lock);
	if (!*name)
		(void)snprintf(name, sizeof(name), "fmhad buffer %x %llx", (unsigned)getpid(),
			       (unsigned long long)clock_ns());
	(void)pthread_mutex_unlock(&table_lock);
	return name;
}

/* Whether it was made by this process: the kernel tells a memfd's name. */
static bool is_own(int fd)
{
	char path[32], link[128], wanted[80];
	ssize_t n;

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	n = readlink(path, link, sizeof(link) - 1);
	link[n < 0 ? 0 : n] = '\0';
	(void)snprintf(wanted, sizeof(wanted), "/memfd:%s (deleted)", own_name());
	return strcmp(link, wanted) == 0;
}

/* Return: with one user; NULL: out of memory. */
static struct memfd_pages *pages_new(const struct stat *st)
{
	struct memfd_pages *pages = malloc(sizeof(*pages)), **bucket = memfd_bucket(st->st_ino);

	if (!pages)
		return NULL;
	*pages = (struct memfd_pages){.device = st->st_dev, .inode = st->st_ino, .n_users = 1};
	(void)pthread_mutex_lock(&table_lock);
	pages->next = *bucket;
	*bucket = pages;
	(void)pthread_mutex_unlock(&table_lock);
	return pages;
}

/* One more user of a client's memfd if it was made here. Return: 0, FMHA_EBUSY, FMHA_ENOENT: it was, and
 * its pages have ended: what the client takes to be in them is not. */
static int pages_find(int fd, const struct stat *st, struct memfd_pages **ret_pages,
		      struct fmha_error *err)
{
	struct memfd_pages *pages;
	bool ending;

	(void)pthread_mutex_lock(&table_lock);
	pages = *memfd_bucket(st->st_ino);
	while (pages && (pages->inode != st->st_ino || pages->device != st->st_dev))
		pages = pages->next;
	ending = pages && pages->n_users == 0;
	if (pages && !ending)
		pages->n_users++;
	(void)pthread_mutex_unlock(&table_lock);
	if (ending)
		return fmha_error_set(err, FMHA_EBUSY, "the memory is being given back");
	if (!pages && is_own(fd))
		return fmha_error_set_field(
			err, FMHA_ENOENT, "fd",
			"what was in this memory ended with the connection that had asked for it");
	*ret_pages = pages;
	return 0;
}

/* Return: whether that was the last user; then pages_end() follows. */
static bool pages_leave(struct memfd_pages *pages)
{
	bool last;

	(void)pthread_mutex_lock(&table_lock);
	last = --pages->n_users == 0;
	(void)pthread_mutex_unlock(&table_lock);
	return last;
}

static void pages_end(struct memfd_pages *pages)
{
	struct memfd_pages **p = memfd_bucket(pages->inode);

	(void)pthread_mutex_lock(&table_lock);
	while (*p != pages)
		p = &(*p)->next;
	*p = pages->next;
	(void)pthread_mutex_unlock(&table_lock);
	free(pages);
}

static int check_size(uint64_t size, struct fmha_error *err)
{
	if (size == 0 || size > MAX_BYTES)
		return fmha_error_set_field(err, FMHA_EINVAL, "size",
					    "size %llu: not between 1 byte and 64 TiB",
					    (unsigned long long)size);
	return 0;
}

int host_memory_create(uint64_t size, struct device_memory *ret_memory, int *ret_fd,
		       struct fmha_error *err)
{
	int fd, r = check_size(size, err);
	struct stat st;

	if (r < 0)
		return r;
	fd = memfd_create(own_name(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(own_name(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "memfd: %s", strerror(errno));
	if (ftruncate(fd, (off_t)size) < 0 || fcntl(fd, F_ADD_SEALS, SEALS) < 0 ||
	    fstat(fd, &st) < 0)
		r = fmha_error_set(err, FMHA_ENOMEM, "memfd of %llu bytes: %s",
				   (unsigned long long)size, strerror(errno));
	if (r == 0)
		r = map(fd, 0, size, ret_memory, err);
	if (r == 0) {
		ret_memory->pages = pages_new(&st);
		if (!ret_memory->pages) {
			host_memory_free(ret_memory);
			r = fmha_error_set(err, FMHA_ENOMEM, "memfd: out of memory");
		}
	}
	if (r < 0) {
		(void)close(fd);
		return r;
	}
	*ret_fd = fd;
	return 0;
}

int host_memory_import(const struct device_memory_source *source, struct device_memory *ret_memory,
		       struct fmha_error *err)
{
	struct statfs fs;
	struct stat st;
	int seals, r = check_size(source->size, err);

	if (r < 0)
		return r;
	/* First, because it fails on everything that is no memfd or hugetlbfs file: FUSE, pipes,
	 * ... */
	seals = fcntl(source->fd, F_GET_SEALS);
	if (seals < 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "fd", "not a memfd: %s",
					    strerror(errno));
	if ((seals & SEALS) != SEALS)
		return fmha_error_set_field(
			err, FMHA_EINVAL, "fd",
			"the memfd must be sealed with F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL");
	if (fstatfs(source->fd, &fs) < 0 || fs.f_type != TMPFS_MAGIC)
		return fmha_error_set_field(err, FMHA_EINVAL, "fd",
					    "memory must lie in tmpfs, not in huge pages");
	if (fstat(source->fd, &st) < 0)
		return fmha_error_set(err, FMHA_EIO, "a memfd cannot be looked at: %s",
				      strerror(errno));
	if (!S_ISREG(st.st_mode))
		return fmha_error_set_field(err, FMHA_EINVAL, "fd", "not a memfd");
	if (source->base_offset > (uint64_t)st.st_size)
		return fmha_error_set_field(err, FMHA_EINVAL, "base_offset",
					    "base_offset %llu: the memfd has %llu bytes",
					    (unsigned long long)source->base_offset,
					    (unsigned long long)st.st_size);
	if (source->size > (uint64_t)st.st_size - source->base_offset)
		return fmha_error_set_field(
			err, FMHA_EINVAL, "size", "size %llu at %llu: the memfd has %llu bytes",
			(unsigned long long)source->size, (unsigned long long)source->base_offset,
			(unsigned long long)st.st_size);
	r = map(source->fd, source->base_offset, source->size, ret_memory, err);
	/* Who has a part pays for a part, and keeps none of the rest. */
	if (r < 0 || source->base_offset != 0 || source->size != (uint64_t)st.st_size)
		return r;
	r = pages_find(source->fd, &st, &ret_memory->pages, err);
	if (r < 0)
		host_memory_free(ret_memory);
	return r;
}

void host_memory_free(struct device_memory *memory)
{
	bool last = memory->pages && pages_leave(memory->pages);

	/* The client may keep its descriptor or mapping: what it writes from now on is its own. */
	if (memory->map && last)
		(void)madvise(memory->map, memory->map_bytes, MADV_REMOVE);
	if (memory->map)
		munmap(memory->map, memory->map_bytes);
	if (last)
		pages_end(memory->pages);
	*memory = (struct device_memory){0};
}
