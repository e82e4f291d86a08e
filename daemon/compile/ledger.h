/* SPDX-License-Identifier: MIT */
/*
 * ledger.h: what a cache directory holds, in memory: how much, whose, and how long unused. It
 * decides what has to go to make room. Filled by one scan when the cache is opened and kept up to
 * date by what this process loads and stores; what another process adds meanwhile is learnt when
 * it is loaded.
 */
#ifndef FMHAD_COMPILE_LEDGER_H
#define FMHAD_COMPILE_LEDGER_H

#include <stdbool.h>

#include <compile/cache.h>

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
