/* SPDX-License-Identifier: MIT */
/* cleanup.h: release at the end of a scope. Every resource declares its own; what
 * the one line that commits hands on leaves its variable, and every earlier return releases. */
#ifndef PROTO_CLEANUP_H
#define PROTO_CLEANUP_H

#include <stdlib.h>
#include <unistd.h>

#define _cleanup_(f) __attribute__((cleanup(f)))

static inline void freep(void *p)
{
	free(*(void **)p);
}

static inline void closep(int *fd)
{
	if (*fd >= 0)
		(void)close(*fd);
}

/* The descriptor, which is the caller's from now on. */
static inline int take_fd(int *fd)
{
	int taken = *fd;

	*fd = -1;
	return taken;
}

#endif
