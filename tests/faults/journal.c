/* SPDX-License-Identifier: MIT */
#include "journal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_BYTES (16u << 20)

static const char *root;
static int file = -1;

/* System calls are made by number: a call by name would be judged by the shim, and recorded. */
__attribute__((constructor)) static void open_journal(void)
{
	const char *path = getenv("FMHA_JOURNAL");

	root = getenv("FMHA_JOURNAL_ROOT");
	if (path && root)
		file = (int)syscall(SYS_openat, AT_FDCWD, path,
				    O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static bool is_below_root(const char *path)
{
	size_t n = strlen(root);

	return strncmp(path, root, n) == 0 && (path[n] == '/' || path[n] == '\0');
}

/* The path of a descriptor; false: it is none that is recorded. */
static bool path_of_fd(int fd, char path[PATH_MAX])
{
	char name[32];
	ssize_t n;

	(void)snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
	n = file < 0 || fd < 0 ? -1 : syscall(SYS_readlinkat, AT_FDCWD, name, path, PATH_MAX - 1);
	if (n < 0)
		return false;
	path[n] = '\0';
	return is_below_root(path);
}

static bool path_of_name(int dir, const char *name, char path[PATH_MAX])
{
	char folder[PATH_MAX];

	if (file < 0)
		return false;
	if (name[0] == '/')
		(void)snprintf(path, PATH_MAX, "%s", name);
	else if (!path_of_fd(dir, folder))
		return false;
	else if (snprintf(path, PATH_MAX, "%s/%s", folder, name) >= PATH_MAX)
		return false;
	return is_below_root(path);
}

static void record(const char *verb, const char *path, const char *other, const void *data,
		   size_t size)
{
	char head[2 * PATH_MAX + 64];
	int n = snprintf(head, sizeof(head), "%s%c%s%c%s%c%zu\n", verb, 0, path, 0, other, 0, size);
	struct iovec parts[2] = {{head, (size_t)n}, {(void *)data, size}};

	if (syscall(SYS_writev, file, parts, 2) != (long)((size_t)n + size))
		_exit(99); /* a journal with a hole proves nothing */
}

static void record_data(int fd, const char *path)
{
	struct stat st;
	void *data;

	if (syscall(SYS_newfstatat, fd, "", &st, AT_EMPTY_PATH) < 0 || !S_ISREG(st.st_mode) ||
	    (size_t)st.st_size > MOST_BYTES)
		return;
	data = malloc((size_t)st.st_size + 1);
	if (data && syscall(SYS_pread64, fd, data, st.st_size, 0) == st.st_size)
		record("data", path, "", data, (size_t)st.st_size);
	free(data);
}

/* The file may be open for writing only. */
static void record_data_of(const char *path)
{
	int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

	if (fd < 0)
		return;
	record_data(fd, path);
	(void)syscall(SYS_close, fd);
}

int journal_opened(int fd, int flags)
{
	char path[PATH_MAX];
	int saved = errno;

	if (fd >= 0 && (flags & O_CREAT) && path_of_fd(fd, path))
		record("create", path, "", NULL, 0);
	errno = saved;
	return fd;
}

ssize_t journal_wrote(int fd, ssize_t result)
{
	char path[PATH_MAX];
	int saved = errno;

	if (result >= 0 && path_of_fd(fd, path))
		record_data_of(path);
	errno = saved;
	return result;
}

int journal_synced(int fd, int result)
{
	char path[PATH_MAX];
	int saved = errno;

	if (result == 0 && path_of_fd(fd, path)) {
		record_data_of(path); /* stdio's writes are not seen */
		record("sync", path, "", NULL, 0);
	}
	errno = saved;
	return result;
}

void journal_renaming(int old_dir, const char *old, int new_dir, const char *new)
{
	char from[PATH_MAX], to[PATH_MAX];
	int saved = errno;

	if (path_of_name(old_dir, old, from) && path_of_name(new_dir, new, to)) {
		record_data_of(from);
		record("rename", from, to, NULL, 0);
	}
	errno = saved;
}

void journal_unlinking(int dir, const char *name)
{
	char path[PATH_MAX];
	int saved = errno;

	if (path_of_name(dir, name, path))
		record("unlink", path, "", NULL, 0);
	errno = saved;
}
