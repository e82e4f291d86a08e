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
#include <fmha/base.h>

/* The directory's word on an entry's file. */
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

/* ---- entry ---- */

/* One cache entry as bytes: header, info as JSON, log, code. */

#define ENTRY_HEAD_BYTES 104 /* what entry_owner() looks at: all of the header */

/* Judges the bytes and copies the entry out; CACHE_MISS for whatever is not sound. */
int entry_parse(const void *data, size_t size, const struct cache_key *key,
		struct cache_entry **ret_entry);

/* The bytes of an entry's file, given; NULL when out of memory. */
void *entry_print(const struct cache_key *key, const struct cache_entry *entry, size_t *ret_size);

/* ---- ledger ---- */

/*
 * What a cache directory holds, in memory: how much, whose, and how long unused. It
 * decides what has to go to make room. Filled by one scan when the cache is opened and kept up to
 * date by what this process loads and stores; what another process adds meanwhile is learnt when
 * it is loaded.
 */

#define LEDGER_NEVER INT64_MAX /* used_s of an entry being written: it is not removed */

struct ledger_row {
	struct cache_key key;
	uint64_t bytes; /* 0: the place is free */
	int64_t used_s; /* when it was used last */
	uint32_t uid;   /* who asked for it first and pays for its room */
};

struct ledger {
	struct ledger_row *rows; /* open addressing by the key's first bytes */
	size_t n, capacity;      /* a power of two, or 0 */
	uint64_t bytes;
	uint64_t max_bytes, max_bytes_per_uid; /* 0: no limit */
};

void ledger_init(struct ledger *ledger, uint64_t max_bytes, uint64_t max_bytes_per_uid);
void ledger_deinit(struct ledger *ledger);

/* Adds or replaces a row; the entry's first owner stays its owner. Return: false: no memory. */
bool ledger_put(struct ledger *ledger, const struct ledger_row *row);
void ledger_remove(struct ledger *ledger, const struct cache_key *key);

/* Whether @bytes may be stored at all. */
bool ledger_admits(const struct ledger *ledger, uint64_t bytes);

/*
 * Takes out what has to go before @uid stores @bytes more: entries of its own when it has its
 * share, then anybody's, unused for longest first, some more than needed so that the next store
 * finds room.
 * Return: how many; @ret_victims: their keys, given, NULL when there are none.
 */
size_t ledger_make_room(struct ledger *ledger, uint32_t uid, uint64_t bytes,
			struct cache_key **ret_victims);

#endif
