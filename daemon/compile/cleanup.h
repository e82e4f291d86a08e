/* SPDX-License-Identifier: MIT */
/* cleanup.h: release at the end of a scope, for this folder's types. */
#ifndef FMHAD_COMPILE_CLEANUP_H
#define FMHAD_COMPILE_CLEANUP_H

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <compile/cache.h>

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

static inline void closedirp(DIR **dir)
{
	if (*dir)
		(void)closedir(*dir);
}

static inline void cache_freep(struct cache **cache)
{
	(void)cache_free(*cache);
}

static inline void cache_entry_freep(struct cache_entry **entry)
{
	(void)cache_entry_free(*entry);
}

#endif
