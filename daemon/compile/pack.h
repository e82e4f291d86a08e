/* SPDX-License-Identifier: MIT */
/*
 * pack.h: many cache entries in one file, to ship: a sorted index, then the entries as they are. The file
 * is read, never mapped: whoever it belongs to may cut it in place.
 */
#ifndef FMHAD_COMPILE_PACK_H
#define FMHAD_COMPILE_PACK_H

#include <stdio.h>
#include <sys/types.h>

#include <compile/cache.h>
#include <fmha/base.h>

struct pack_index;

struct pack {
	int fd;
	struct pack_index *index; /* NULL: not open */
	size_t n_entries, bytes;
};

/* @fd: taken when it is a pack. Return: 0, FMHA_ENOMEM, or FMHA_EIO: not a pack, or a damaged one. */
int pack_open(int *fd, const char *path, off_t size, struct pack *ret_pack, struct fmha_error *err);
void pack_close(struct pack *pack);

/* Return: 0 and an entry (given), or CACHE_MISS. */
int pack_load(const struct pack *pack, const struct cache_key *key, struct cache_entry **ret_entry);

/* Writes the entries of @keys, which are sorted, out of directory @dir. Return: 0 or -1. */
int pack_write(int dir, const struct cache_key *keys, size_t n, FILE *out);

#endif
