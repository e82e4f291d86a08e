/* SPDX-License-Identifier: MIT */
/*
 * directory.h: the files of a cache directory. Entries have their key in hexadecimal as name,
 * temporary files begin with a dot, locks end with ".lock"; nothing else is touched.
 */
#ifndef FMHAD_COMPILE_DIRECTORY_H
#define FMHAD_COMPILE_DIRECTORY_H

#include <stdbool.h>
#include <stdint.h>

#include <compile/cache.h>

/* What the directory says of an entry's file. */
struct directory_file {
	uint64_t bytes;
	int64_t used_s; /* when it was used last: its time of modification */
};

/*
 * @writable: made with mode 0700 when missing. Only a directory that nobody else can write to is
 * opened, and for @writable only our own.
 * Return: a descriptor, FMHA_EIO, FMHA_EPERM, FMHA_EINVAL (not a directory).
 */
int directory_open(const char *path, bool writable, struct fmha_error *err);

/* @ret_file: may be NULL. Return: 0 and an entry (given), or CACHE_MISS. */
int directory_load(int dir, const struct cache_key *key, struct cache_entry **ret_entry,
		   struct directory_file *ret_file);

/* Says in the entry's file that it is in use now, if it does not say so of the last hour. */
void directory_touch(int dir, const struct cache_key *key, const struct directory_file *file);

/* Writes a temporary file, syncs, renames. Return: 0 or FMHA_EIO. */
int directory_publish(int dir, const struct cache_key *key, const void *data, size_t size,
		      struct fmha_error *err);
void directory_remove(int dir, const struct cache_key *key);

/* Never waits. Return: 0 and a lock, CACHE_BUSY, FMHA_EIO. */
int directory_try_lock(int dir, const struct cache_key *key, int *ret_lock, struct fmha_error *err);
void directory_unlock(int dir, const struct cache_key *key, int lock);

/* Called for every entry's file, sound or not; @uid: who asked for it first, 0 where the file does
 * not tell, and then used_s is 0. Return: false to end. */
typedef bool (*directory_visit)(void *owner, const struct cache_key *key,
				const struct directory_file *file, uint32_t uid);

/* Visits every entry; removes what crashed builds have left, temporary files and locks that nobody
 * holds, an hour later. Return: 0, or FMHA_EIO. */
int directory_scan(int dir, directory_visit visit, void *owner, struct fmha_error *err);

#endif
