/* SPDX-License-Identifier: MIT */
/*
 * recent.h: entries that the disk did not take, so that a machine without a usable cache does not
 * build one kernel twice in a row. Bounded; what was used last stays.
 */
#ifndef FMHAD_COMPILE_RECENT_H
#define FMHAD_COMPILE_RECENT_H

#include <compile/cache.h>

struct recent_entry;

struct recent {
	struct recent_entry *first; /* used last */
	uint64_t bytes, max_bytes;
	size_t n;
};

void recent_deinit(struct recent *recent);

/* Keeps a copy, if there is memory for it. */
void recent_put(struct recent *recent, const struct cache_key *key,
		const struct cache_entry *entry);
void recent_remove(struct recent *recent, const struct cache_key *key);

/* Return: 0 and an entry (given), or CACHE_MISS. */
int recent_load(struct recent *recent, const struct cache_key *key, struct cache_entry **ret_entry);

#endif
