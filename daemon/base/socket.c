/* SPDX-License-Identifier: MIT */
#include <base/socket.h>

#include <errno.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

static ssize_t send_with_fd(int socket, const uint8_t *data, size_t n, int fd)
{
	struct iovec vec = {.iov_base = (void *)data, .iov_len = n};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr message = {.msg_iov = &vec,
				 .msg_iovlen = 1,
				 .msg_control = &control,
				 .msg_controllen = sizeof(control.space)};

	memset(&control, 0, sizeof(control));
	control.header.cmsg_level = SOL_SOCKET;
	control.header.cmsg_type = SCM_RIGHTS;
	control.header.cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(&control.header), &fd, sizeof(int));
	return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t socket_send(int socket, const uint8_t *data, size_t n, int fd)
{
	ssize_t sent;

	do
		sent = fd < 0 ? send(socket, data, n, MSG_DONTWAIT | MSG_NOSIGNAL)
			      : send_with_fd(socket, data, n, fd);
	while (sent < 0 && errno == EINTR);
	if (sent < 0 && errno == ETOOMANYREFS)
		return SOCKET_TOO_MANY_FDS;
	if (sent < 0 && (errno == ENOBUFS || errno == ENOMEM))
		return SOCKET_NO_MEMORY;
	if (sent < 0 && errno == EAGAIN)
		return 0;
	return sent;
}

uint32_t socket_unread(int socket)
{
	int left = 0;

	return ioctl(socket, SIOCOUTQ, &left) < 0 || left < 0 ? 0 : (uint32_t)left;
}
