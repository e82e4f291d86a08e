/* SPDX-License-Identifier: MIT */
/*
 * shim_calls.c: system calls. Each with one or two errors that Linux gives for it when something has
 * run out or broken, on arguments that are right: what says that an argument is wrong is no fault.
 */
#include "faults.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define SHOWN __attribute__((visibility("default")))

/* A function of one form: class, errors, what it returns on failure, return type, name, parameters,
 * arguments. */
#define CALL(CLASS, ERRORS, FAILED, TYPE, NAME, PARAMETERS, ARGUMENTS)                             \
	DEFINE_NEXT(NAME);                                                                         \
	SHOWN TYPE NAME PARAMETERS                                                                 \
	{                                                                                          \
		if (FAULT(CLASS, #NAME, ERRORS))                                                   \
			return FAILED;                                                             \
		return NEXT(NAME) ARGUMENTS;                                                       \
	}
#define BOTH(a, b) a, b

/* ---- memory maps ---- */

CALL(MAP, ENOMEM, MAP_FAILED, void *, mmap,
     (void *at, size_t size, int prot, int flags, int fd, off_t offset),
     (at, size, prot, flags, fd, offset))

/* ---- files ---- */

static mode_t mode_of(int flags, va_list list)
{
	return flags & (O_CREAT | __O_TMPFILE) ? va_arg(list, mode_t) : 0;
}

#define OPEN(NAME)                                                                                 \
	SHOWN int NAME(const char *path, int flags, ...)                                           \
	{                                                                                          \
		va_list list;                                                                      \
		mode_t mode;                                                                       \
                                                                                                   \
		va_start(list, flags);                                                             \
		mode = mode_of(flags, list);                                                       \
		va_end(list);                                                                      \
		if (FAULT(FILE, #NAME, EMFILE, EIO))                                               \
			return -1;                                                                 \
		return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);                      \
	}
OPEN(open)
OPEN(open64)

SHOWN int openat(int dir, const char *path, int flags, ...)
{
	va_list list;
	mode_t mode;

	va_start(list, flags);
	mode = mode_of(flags, list);
	va_end(list);
	if (FAULT(FILE, "openat", EMFILE, EIO))
		return -1;
	return (int)syscall(SYS_openat, dir, path, flags, mode);
}

DEFINE_NEXT(syscall);

/* Of those made this way only openat2() is a call that can fail. */
SHOWN long syscall(long number, ...)
{
	va_list list;
	long a[6];

	va_start(list, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(list, long);
	va_end(list);
	if (number == SYS_openat2 && FAULT(FILE, "openat2", EMFILE, EIO))
		return -1;
	return NEXT(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* What the descriptor is decides the class; of an eventfd or a pipe of libuv's own nothing fails. */
static int fail_transfer(int fd, const char *name, bool writes)
{
	struct stat st;

	if (syscall(SYS_newfstatat, fd, "", &st, AT_EMPTY_PATH) < 0)
		return 0;
	if (S_ISREG(st.st_mode))
		return FAULT(FILE, name, EIO, writes ? ENOSPC : 0);
	if (S_ISSOCK(st.st_mode))
		return FAULT(SOCKET, name, ECONNRESET);
	return 0;
}

#define READ(NAME, PARAMETERS, ARGUMENTS)                                                          \
	DEFINE_NEXT(NAME);                                                                         \
	SHOWN ssize_t NAME PARAMETERS                                                              \
	{                                                                                          \
		return fail_transfer(fd, #NAME, false) ? -1 : NEXT(NAME) ARGUMENTS;                \
	}

READ(read, (int fd, void *data, size_t n), (fd, data, n))
READ(pread, (int fd, void *data, size_t n, off_t at), (fd, data, n, at))
READ(pread64, (int fd, void *data, size_t n, off64_t at), (fd, data, n, at))

#define WRITE(NAME, PARAMETERS, ARGUMENTS)                                                         \
	DEFINE_NEXT(NAME);                                                                         \
	SHOWN ssize_t NAME PARAMETERS                                                              \
	{                                                                                          \
		return fail_transfer(fd, #NAME, true) ? -1 : NEXT(NAME) ARGUMENTS;                 \
	}

WRITE(write, (int fd, const void *data, size_t n), (fd, data, n))
WRITE(pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at))
WRITE(pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at))

#define TRUNCATE(NAME, TYPE)                                                                       \
	DEFINE_NEXT(NAME);                                                                         \
	SHOWN int NAME(int fd, TYPE size)                                                          \
	{                                                                                          \
		return FAULT(FILE, #NAME, ENOMEM, EIO) ? -1 : NEXT(NAME)(fd, size);                \
	}
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define SYNC(NAME)                                                                                 \
	DEFINE_NEXT(NAME);                                                                         \
	SHOWN int NAME(int fd)                                                                     \
	{                                                                                          \
		return FAULT(FILE, #NAME, EIO, ENOSPC) ? -1 : NEXT(NAME)(fd);                      \
	}
SYNC(fsync)
SYNC(fdatasync)

DEFINE_NEXT(renameat);
SHOWN int renameat(int old_dir, const char *old, int new_dir, const char *new)
{
	if (FAULT(FILE, "renameat", EIO, ENOSPC))
		return -1;
	return NEXT(renameat)(old_dir, old, new_dir, new);
}

DEFINE_NEXT(rename);
SHOWN int rename(const char *old, const char *new)
{
	if (FAULT(FILE, "rename", EIO, ENOSPC))
		return -1;
	return NEXT(rename)(old, new);
}

DEFINE_NEXT(unlinkat);
SHOWN int unlinkat(int dir, const char *name, int flags)
{
	if (FAULT(FILE, "unlinkat", EIO))
		return -1;
	return NEXT(unlinkat)(dir, name, flags);
}

DEFINE_NEXT(unlink);
SHOWN int unlink(const char *path)
{
	if (FAULT(FILE, "unlink", EIO))
		return -1;
	return NEXT(unlink)(path);
}

CALL(FILE, BOTH(EMFILE, EIO), NULL, FILE *, fopen, (const char *path, const char *mode),
     (path, mode))
CALL(FILE, BOTH(EMFILE, EIO), NULL, FILE *, fopen64, (const char *path, const char *mode),
     (path, mode))
CALL(FILE, BOTH(EMFILE, EIO), NULL, DIR *, opendir, (const char *path), (path))
CALL(FILE, ENOMEM, NULL, DIR *, fdopendir, (int fd), (fd))
CALL(FILE, BOTH(EMFILE, EIO), -1, int, scandir,
     (const char *path, struct dirent ***list, int (*filter)(const struct dirent *),
      int (*compare)(const struct dirent **, const struct dirent **)),
     (path, list, filter, compare))
/* The stream remembers, as ferror() tells. */
#define STREAM(ERRORS, FAILED, TYPE, NAME, PARAMETERS, ARGUMENTS)                                  \
	DEFINE_NEXT(NAME);                                                                         \
	SHOWN TYPE NAME PARAMETERS                                                                 \
	{                                                                                          \
		if (!FAULT(FILE, #NAME, ERRORS))                                                   \
			return NEXT(NAME) ARGUMENTS;                                               \
		if (file)                                                                          \
			file->_flags |= 0x20; /* glibc's _IO_ERR_SEEN */                           \
		return FAILED;                                                                     \
	}

STREAM(EIO, 0, size_t, fread, (void *data, size_t size, size_t n, FILE *file),
       (data, size, n, file))
STREAM(BOTH(ENOSPC, EIO), 0, size_t, fwrite, (const void *data, size_t size, size_t n, FILE *file),
       (data, size, n, file))
STREAM(BOTH(ENOSPC, EIO), EOF, int, fflush, (FILE * file), (file))
CALL(FILE, BOTH(EIO, ENOMEM), -1, int, fstat, (int fd, struct stat *st), (fd, st))
CALL(FILE, BOTH(EIO, ENOMEM), -1, int, fstatat,
     (int dir, const char *path, struct stat *st, int flags), (dir, path, st, flags))
CALL(FILE, BOTH(EIO, ENOMEM), -1, int, stat, (const char *path, struct stat *st), (path, st))
CALL(FILE, BOTH(EIO, ENOMEM), -1, int, lstat, (const char *path, struct stat *st), (path, st))
CALL(FILE, BOTH(ENOSPC, EIO), -1, int, mkdir, (const char *path, mode_t mode), (path, mode))
CALL(FILE, BOTH(ENOLCK, EINTR), -1, int, flock, (int fd, int operation), (fd, operation))
CALL(FILE, BOTH(EMFILE, ENOMEM), -1, int, memfd_create, (const char *name, unsigned flags),
     (name, flags))

/* ---- sockets and pipes ---- */

CALL(SOCKET, BOTH(EMFILE, ENOBUFS), -1, int, socket, (int domain, int type, int protocol),
     (domain, type, protocol))
CALL(SOCKET, BOTH(EMFILE, ENOMEM), -1, int, socketpair,
     (int domain, int type, int protocol, int pair[2]), (domain, type, protocol, pair))
CALL(SOCKET, BOTH(ENOMEM, EIO), -1, int, bind, (int fd, const struct sockaddr *at, socklen_t n),
     (fd, at, n))
CALL(SOCKET, ENOBUFS, -1, int, listen, (int fd, int backlog), (fd, backlog))
CALL(SOCKET, BOTH(ECONNREFUSED, EAGAIN), -1, int, connect,
     (int fd, const struct sockaddr *at, socklen_t n), (fd, at, n))
CALL(SOCKET, BOTH(EMFILE, ENOMEM), -1, int, accept4,
     (int fd, struct sockaddr *at, socklen_t *n, int flags), (fd, at, n, flags))
CALL(SOCKET, BOTH(ENOMEM, ENOBUFS), -1, ssize_t, recvmsg,
     (int fd, struct msghdr *message, int flags), (fd, message, flags))
CALL(SOCKET, BOTH(ENOBUFS, ENOMEM), -1, ssize_t, sendmsg,
     (int fd, const struct msghdr *message, int flags), (fd, message, flags))
CALL(SOCKET, BOTH(ENOBUFS, ENOMEM), -1, ssize_t, send,
     (int fd, const void *data, size_t n, int flags), (fd, data, n, flags))
CALL(SOCKET, ENOBUFS, -1, int, getsockopt, (int fd, int level, int name, void *value, socklen_t *n),
     (fd, level, name, value, n))
CALL(SOCKET, BOTH(EMFILE, ENFILE), -1, int, pipe2, (int ends[2], int flags), (ends, flags))

/* ---- events ---- */

CALL(EVENT, BOTH(EMFILE, ENOMEM), -1, int, epoll_create1, (int flags), (flags))

/* What is taken out needs nothing. */
DEFINE_NEXT(epoll_ctl);
SHOWN int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
	if (operation != EPOLL_CTL_DEL && FAULT(EVENT, "epoll_ctl", ENOSPC, ENOMEM))
		return -1;
	return NEXT(epoll_ctl)(epoll, operation, fd, event);
}

CALL(EVENT, BOTH(EMFILE, ENOMEM), -1, int, eventfd, (unsigned value, int flags), (value, flags))
CALL(EVENT, BOTH(EMFILE, ENOMEM), -1, int, timerfd_create, (__clockid_t clock, int flags),
     (clock, flags))
CALL(EVENT, BOTH(ENOMEM, EINTR), -1, int, ppoll,
     (struct pollfd * fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask),
     (fds, n, timeout, mask))
CALL(EVENT, BOTH(ENOMEM, EINTR), -1, int, poll, (struct pollfd * fds, nfds_t n, int ms),
     (fds, n, ms))

/* ---- processes and threads ---- */

CALL(PROCESS, BOTH(EAGAIN, ENOMEM), -1, pid_t, fork, (void), ())

#define CALL_ERROR(NAME, ERROR, PARAMETERS, ARGUMENTS)                                             \
	DEFINE_NEXT(NAME);                                                                         \
	SHOWN int NAME PARAMETERS                                                                  \
	{                                                                                          \
		return FAULT(PROCESS, #NAME, ERROR) ? (ERROR) : NEXT(NAME) ARGUMENTS;              \
	}

CALL_ERROR(posix_spawn, ENOMEM,
	   (pid_t * pid, const char *path, const posix_spawn_file_actions_t *actions,
	    const posix_spawnattr_t *attributes, char *const argv[], char *const environment[]),
	   (pid, path, actions, attributes, argv, environment))
CALL_ERROR(pthread_create, EAGAIN,
	   (pthread_t * thread, const pthread_attr_t *attributes, void *(*run)(void *),
	    void *owner),
	   (thread, attributes, run, owner))
CALL_ERROR(posix_spawn_file_actions_addopen, ENOMEM,
	   (posix_spawn_file_actions_t * actions, int fd, const char *path, int flags, mode_t mode),
	   (actions, fd, path, flags, mode))
CALL_ERROR(posix_spawn_file_actions_adddup2, ENOMEM,
	   (posix_spawn_file_actions_t * actions, int fd, int new_fd), (actions, fd, new_fd))
