/* SPDX-License-Identifier: MIT */
#include <files/files.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <proto/cleanup.h>

int files_open_beneath(int dir, const char *name, int flags, mode_t mode)
{
	struct open_how how = {
		.flags = (uint64_t)(flags | O_CLOEXEC | O_NOFOLLOW),
		.mode = flags & O_CREAT ? mode : 0,
		.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
	};

	return (int)syscall(SYS_openat2, dir, name, &how, sizeof(how));
}

int files_read_at(int fd, void *data, size_t size, off_t offset)
{
	size_t done = 0;

	while (done < size) {
		ssize_t n = pread(fd, (char *)data + done, size - done, offset + (off_t)done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0)
			errno = EIO; /* shrunk under us */
		if (n <= 0)
			return -1;
		done += (size_t)n;
	}
	return 0;
}

int files_read_all(int fd, void *data, size_t size)
{
	return files_read_at(fd, data, size, 0);
}

int files_write_at(int fd, const void *data, size_t size, off_t offset)
{
	size_t done = 0;

	while (done < size) {
		ssize_t n = pwrite(fd, (const char *)data + done, size - done,
				   offset + (off_t)done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0)
			errno = EIO;
		if (n <= 0)
			return -1;
		done += (size_t)n;
	}
	return 0;
}

int files_rename(const char *temporary, const char *path)
{
	_cleanup_(closep) int dir = -1;
	const char *slash = strrchr(path, '/');
	char folder[PATH_MAX] = ".";

	if (slash && (size_t)(slash - path) >= sizeof(folder)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	if (slash)
		(void)snprintf(folder, sizeof(folder), "%.*s/", (int)(slash - path), path);
	if (rename(temporary, path) < 0)
		return -1;
	dir = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return dir < 0 ? -1 : fsync(dir);
}

int files_publish(int dir, const char *temporary, const char *name, const void *data, size_t size)
{
	_cleanup_(closep) int fd = -1;
	int saved;

	(void)unlinkat(dir, temporary, 0);
	fd = files_open_beneath(dir, temporary, O_WRONLY | O_CREAT | O_EXCL, 0600);
	if (fd < 0)
		return -1;
	if (files_write_at(fd, data, size, 0) == 0 && fsync(fd) == 0 &&
	    renameat(dir, temporary, dir, name) == 0 && fsync(dir) == 0)
		return 0;
	saved = errno;
	(void)unlinkat(dir, temporary, 0);
	errno = saved;
	return -1;
}
