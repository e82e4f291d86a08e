/* SPDX-License-Identifier: MIT */
/*
 * kvspill.h: which sealed pages of a pool have a copy in its file, and what is to be written and read next.
 *
 * A file has places of a page each. A place is free; being written; good, with the key and the checksum of what is in it;
 * or wanted, to be read back. A good place whose page has left memory is cold: when all places are taken, the one that
 * has been cold for longest is written over; a page that finds no place is not copied. Nothing of a place is believed
 * before what was read from it has its checksum.
 *
 *     free --next write--> writing --written--> good (warm) --evicted--> cold --want--> wanted --restored--> warm
 *                          writing --failed--> free           cold --next write--> writing   wanted --bad--> free
 *
 * Book-keeping alone, as kvpool.h.
 */
#ifndef FMHAD_KVPOOL_KVSPILL_H
#define FMHAD_KVPOOL_KVSPILL_H

#include <kvpool/kvpool.h>

struct kvspill;

struct kvspill_counts {
	uint32_t n_good;                    /* places */
	uint64_t written, restored, failed; /* pages */
};

/* One page to be copied between memory and file. */
struct kvspill_copy {
	uint8_t key[KVPOOL_KEY_BYTES];
	uint64_t checksum;
	uint32_t page, place;
};

/* @pool: kept; it tells of evictions. Return: given; NULL: out of memory. */
struct kvspill *kvspill_new(struct kvpool *pool, uint32_t n_pages, uint32_t n_places,
			    uint64_t secret);
/* Takes NULL; before the pool ends. Return: NULL. */
struct kvspill *kvspill_free(struct kvspill *spill);
uint64_t kvspill_cost(uint32_t n_pages, uint32_t n_places);
struct kvspill_counts kvspill_count(const struct kvspill *spill);

/* A place of a file that was there before: cold. */
void kvspill_found(struct kvspill *spill, uint32_t place, const uint8_t key[KVPOOL_KEY_BYTES],
		   uint64_t checksum);

/* @page was sealed, and is to be copied when there is a place. */
void kvspill_sealed(struct kvspill *spill, uint32_t page);

/* The next such page, pinned until kvspill_written(). Return: whether there is one. */
bool kvspill_next_write(struct kvspill *spill, struct kvspill_copy *ret_copy);
/* @good: it is in the file, with @copy->checksum */
void kvspill_written(struct kvspill *spill, const struct kvspill_copy *copy, bool good);

/* Of keys that a look-up did not find: how many of the first are in the file and will be read back; no more than
 * half of the pool is on its way at a time. */
uint32_t kvspill_want(struct kvspill *spill, const uint8_t (*keys)[KVPOOL_KEY_BYTES], uint32_t n);

/* The next such place, with a page leased for it until kvspill_restored(). Return: whether there is one. */
bool kvspill_next_read(struct kvspill *spill, struct kvspill_copy *ret_copy);
/* @good: the page holds what has the checksum; else the place is given up */
void kvspill_restored(struct kvspill *spill, const struct kvspill_copy *copy, bool good);

#endif
