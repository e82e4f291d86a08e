/* SPDX-License-Identifier: MIT */
/*
 * notify.h: the parts of sd-daemon(3) that a service needs: state to the service manager, the
 * watchdog's interval, inherited sockets. Without a manager every call does nothing.
 */
#ifndef FMHAD_BASE_NOTIFY_H
#define FMHAD_BASE_NOTIFY_H

#include <stdint.h>

#include <fmha/base.h>

#define NOTIFY_LISTEN_FD 3 /* the first inherited socket */

/* Sends "READY=1", "STATUS=...", ... as printf would write it. Failures are ignored: nobody
 * listens. */
void notify_send(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Microseconds within which "WATCHDOG=1" must be sent again; 0: no watchdog for this process. */
uint64_t notify_watchdog_us(void);

/*
 * The inherited listening socket. Exactly one is expected; it must be a listening Unix stream
 * socket. Return: 0 with the fd (given, CLOEXEC and non-blocking) or -1 when none was inherited;
 * FMHA_EINVAL.
 */
int notify_listen_fd(int *ret_fd, struct fmha_error *err);

#endif
