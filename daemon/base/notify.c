/* SPDX-License-Identifier: MIT */
#include <base/notify.h>

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <proto/error.h>

void notify_send(const char *format, ...)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	size_t length = path ? strlen(path) : 0;
	char state[512];
	va_list list;
	int fd, n;

	if (length < 2 || length >= sizeof(address.sun_path) || (path[0] != '/' && path[0] != '@'))
		return;
	va_start(list, format);
	n = vsnprintf(state, sizeof(state), format, list);
	va_end(list);
	if (n <= 0)
		return;
	if (n >= (int)sizeof(state))
		n = (int)sizeof(state) - 1;
	memcpy(address.sun_path, path, length);
	if (path[0] == '@')
		address.sun_path[0] = '\0'; /* an abstract name */
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return;
	(void)sendto(fd, state, (size_t)n, MSG_NOSIGNAL, (struct sockaddr *)&address,
		     (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length));
	(void)close(fd);
}

/* A variable that is a positive decimal number, else 0. */
static uint64_t environment_number(const char *name)
{
	const char *text = getenv(name);
	char *end;
	unsigned long long value;

	if (!text || *text < '0' || *text > '9')
		return 0;
	errno = 0;
	value = strtoull(text, &end, 10);
	return errno || *end ? 0 : value;
}

uint64_t notify_watchdog_us(void)
{
	uint64_t pid = environment_number("WATCHDOG_PID");

	if (getenv("WATCHDOG_PID") && pid != (uint64_t)getpid())
		return 0;
	return environment_number("WATCHDOG_USEC");
}

static int socket_option(int fd, int option)
{
	int value = -1;
	socklen_t size = sizeof(value);

	return getsockopt(fd, SOL_SOCKET, option, &value, &size) < 0 ? -1 : value;
}

int notify_listen_fd(int *ret_fd, struct fmha_error *err)
{
	uint64_t n = environment_number("LISTEN_FDS");

	*ret_fd = -1;
	if (n == 0 || environment_number("LISTEN_PID") != (uint64_t)getpid())
		return 0;
	if (n != 1)
		return fmha_error_set(err, FMHA_EINVAL,
				      "socket activation: %llu sockets inherited, 1 expected",
				      (unsigned long long)n);
	if (socket_option(NOTIFY_LISTEN_FD, SO_DOMAIN) != AF_UNIX ||
	    socket_option(NOTIFY_LISTEN_FD, SO_TYPE) != SOCK_STREAM ||
	    socket_option(NOTIFY_LISTEN_FD, SO_ACCEPTCONN) != 1)
		return fmha_error_set(
			err, FMHA_EINVAL,
			"socket activation: fd 3 is not a listening Unix stream socket");
	if (fcntl(NOTIFY_LISTEN_FD, F_SETFD, FD_CLOEXEC) < 0 ||
	    fcntl(NOTIFY_LISTEN_FD, F_SETFL, O_RDWR | O_NONBLOCK) < 0)
		return fmha_error_set(err, FMHA_EINVAL, "socket activation: fd 3: %s",
				      strerror(errno));
	unsetenv("LISTEN_FDS"); /* children inherit neither the socket nor the claim */
	unsetenv("LISTEN_PID");
	unsetenv("LISTEN_FDNAMES");
	*ret_fd = NOTIFY_LISTEN_FD;
	return 0;
}
