/* SPDX-License-Identifier: MIT */
/* entry.h: one cache entry as bytes: header, info as JSON, log, code. */
#ifndef FMHAD_COMPILE_ENTRY_H
#define FMHAD_COMPILE_ENTRY_H

#include <stdbool.h>

#include <compile/cache.h>

#define ENTRY_HEAD_BYTES 104 /* what entry_owner() looks at: all of the header */

/* Who asked for the entry whose file begins with these bytes. Return: false: not an entry. */
bool entry_owner(const uint8_t head[ENTRY_HEAD_BYTES], uint32_t *ret_uid);

/* Judges the bytes and copies the entry out; CACHE_MISS for whatever is not sound. */
int entry_parse(const void *data, size_t size, const struct cache_key *key,
		struct cache_entry **ret_entry);

/* The bytes of an entry's file, given; NULL when out of memory. */
void *entry_print(const struct cache_key *key, const struct cache_entry *entry, size_t *ret_size);

#endif
