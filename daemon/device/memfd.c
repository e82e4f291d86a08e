/* SPDX-License-Identifier: MIT */
#include "memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <proto/error.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#endif

#define SEALS      (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define PAGE_BYTES 4096ull
#define MAX_BYTES  (1ull << 46)

uint64_t memfd_memory_cost(uint64_t offset, uint64_t size)
{
	return ((offset & (PAGE_BYTES - 1)) + size + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
}

static int map(int fd, uint64_t offset, uint64_t size, struct device_memory *ret_memory,
	       struct fmha_error *err)
{
	uint64_t start = offset & ~(PAGE_BYTES - 1);
	uint64_t bytes = memfd_memory_cost(offset, size);
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

static int check_size(uint64_t size, struct fmha_error *err)
{
	if (size == 0 || size > MAX_BYTES)
		return fmha_error_set_field(err, FMHA_EINVAL, "size",
					    "size %llu: not between 1 byte and 64 TiB",
					    (unsigned long long)size);
	return 0;
}

int memfd_create_memory(uint64_t size, struct device_memory *ret_memory, int *ret_fd,
			struct fmha_error *err)
{
	int fd, r = check_size(size, err);

	if (r < 0)
		return r;
	fd = memfd_create("fmhad buffer", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL)
		fd = memfd_create("fmhad buffer", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "memfd: %s", strerror(errno));
	if (ftruncate(fd, (off_t)size) < 0 || fcntl(fd, F_ADD_SEALS, SEALS) < 0)
		r = fmha_error_set(err, FMHA_ENOMEM, "memfd of %llu bytes: %s",
				   (unsigned long long)size, strerror(errno));
	if (r == 0)
		r = map(fd, 0, size, ret_memory, err);
	if (r < 0) {
		(void)close(fd);
		return r;
	}
	ret_memory->made_here = true;
	*ret_fd = fd;
	return 0;
}

int memfd_import_memory(const struct device_memory_source *source, struct device_memory *ret_memory,
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
	return map(source->fd, source->base_offset, source->size, ret_memory, err);
}

void memfd_free_memory(struct device_memory *memory)
{
	/* The client may keep its descriptor or mapping: what it writes from now on is its own. */
	if (memory->map && memory->made_here)
		(void)madvise(memory->map, memory->map_bytes, MADV_REMOVE);
	if (memory->map)
		munmap(memory->map, memory->map_bytes);
	*memory = (struct device_memory){0};
}
