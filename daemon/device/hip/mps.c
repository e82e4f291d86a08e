/* SPDX-License-Identifier: MIT */
/*
 * mps.c: whether this process's CUDA context is one of several that share the GPU, by CUDA's
 * Multi-Process Service, or takes turns with them.
 *
 * The driver decides that when it is initialised, by the socket "control" in the pipe directory. A
 * socket that nobody listens at is what a dead control daemon leaves behind, so it is asked and not
 * only looked for. Nothing is sent.
 */
#include "mps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static bool socket_answers(const char *path)
{
	static const int types[] = {SOCK_STREAM, SOCK_SEQPACKET, SOCK_DGRAM};
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd, r;

	if (strlen(path) >= sizeof(address.sun_path))
		return false;
	memcpy(address.sun_path, path, strlen(path) + 1);
	for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
		fd = socket(AF_UNIX, types[i] | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		if (fd < 0)
			return false;
		r = connect(fd, (const struct sockaddr *)&address, sizeof(address));
		r = r == 0 ? 0 : errno;
		(void)close(fd);
		if (r != EPROTOTYPE)
			return r == 0 ||
			       r == EAGAIN; /* EAGAIN: it has more callers than it takes */
	}
	return false;
}

/* Older control daemons read a named pipe: without a reader it does not open. */
static bool pipe_answers(const char *path)
{
	int fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);

	if (fd < 0)
		return false;
	(void)close(fd);
	return true;
}

bool mps_is_running(char *ret_directory, size_t n)
{
	const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
	char path[512];
	struct stat st;

	if (!directory || !directory[0])
		directory = "/tmp/nvidia-mps";
	(void)snprintf(ret_directory, n, "%s", directory);
	if (snprintf(path, sizeof(path), "%s/control", directory) >= (int)sizeof(path) ||
	    stat(path, &st) < 0)
		return false;
	if (S_ISSOCK(st.st_mode))
		return socket_answers(path);
	return S_ISFIFO(st.st_mode) && pipe_answers(path);
}
