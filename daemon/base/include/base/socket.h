/* SPDX-License-Identifier: MIT */
/* socket.h: the system calls of connections. */
#ifndef FMHAD_BASE_SOCKET_H
#define FMHAD_BASE_SOCKET_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/*
 * Sends without blocking. @fd: goes with the first byte, borrowed; -1: none
 * Return: bytes taken, 0 when the socket is full, SOCKET_TOO_MANY_FDS when this process's user has
 * as many descriptors unread in sockets as the kernel lets it, SOCKET_NO_MEMORY when the kernel has
 * none for it now, -1 when the connection is over.
 */
#define SOCKET_TOO_MANY_FDS (-2)
#define SOCKET_NO_MEMORY    (-3)

ssize_t socket_send(int socket, const uint8_t *data, size_t n, int fd);

#endif
