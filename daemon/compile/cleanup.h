/* SPDX-License-Identifier: MIT */
/* cleanup.h: release at the end of a scope, for this folder's types. */
#ifndef FMHAD_COMPILE_CLEANUP_H
#define FMHAD_COMPILE_CLEANUP_H

#include <dirent.h>

#include <proto/cleanup.h>

#include <compile/cache.h>

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
