/* SPDX-License-Identifier: MIT */
/*
 * kvpool.h: whose page is whose in a cache of keys and values that outlives its users.
 *
 * A page is free; leased to one holder, who alone writes it; or sealed, published under a key that says
 * what it holds, read by any number of holders and written by none. A sealed page that nobody has pinned
 * stays until room is needed: the one that was let go longest ago goes first. What a holder had leased
 * when it went is lost: half written, maybe still being written by a process that lives on, so it is
 * nobody's until the owner of the pool knows that it cannot be and says so.
 *
 *     free --lease--> leased --seal--> sealed (pinned) --give back--> sealed --lease of others--> leased
 *                     leased --give back--> free       leased --abandon--> lost --reclaim--> free
 *
 * This is the book-keeping alone: no memory, no clock, no socket. Every call is bounded by the pages that
 * it names, abandoning by its budget.
 */
#ifndef FMHAD_KVPOOL_KVPOOL_H
#define FMHAD_KVPOOL_KVPOOL_H

#include <stdbool.h>
#include <stdint.h>

#define KVPOOL_KEY_BYTES 32

struct kvpool;

/* Who has leased and pinned pages of a pool; part of the owner's struct. */
struct kvpool_holder {
	uint16_t *held; /* a page each: 0, how often it is pinned, or that it is leased */
	uint32_t n_leased, n_pins;
	uint32_t next; /* where abandoning goes on */
};

struct kvpool_counts {
	uint32_t n_free, n_leased, n_sealed, n_lost;
	uint32_t n_pinned; /* of the sealed ones */
	uint64_t hits, misses, seals, evictions;
};

enum kvpool_result {
	KVPOOL_OK,
	KVPOOL_NO_PAGE,    /* there is none of that number */
	KVPOOL_NOT_LEASED, /* the holder has not leased it */
	KVPOOL_NOT_HELD,   /* the holder has neither leased nor pinned it */
	KVPOOL_MOST_PINS,  /* the holder has pinned the page of that key as often as it can */
};

/* @secret: random, so that no choice of keys makes looking them up slow. Return: given; NULL: out of memory. */
struct kvpool *kvpool_new(uint32_t n_pages, uint64_t secret);
/* Takes NULL; holders end before. Return: NULL. */
struct kvpool *kvpool_free(struct kvpool *pool);
/* Bytes of book-keeping: for the pool, and for each holder. */
uint64_t kvpool_cost(uint32_t n_pages);
uint64_t kvpool_holder_cost(uint32_t n_pages);

struct kvpool_counts kvpool_count(const struct kvpool *pool);

/* Is told of each sealed page that goes, while it is still known by its key. */
typedef void kvpool_evicted(void *userdata, uint32_t page);
void kvpool_watch(struct kvpool *pool, kvpool_evicted *on_evict, void *userdata);

/* The key of a sealed page; NULL: it is not sealed. */
const uint8_t *kvpool_key(const struct kvpool *pool, uint32_t page);

/* Return: whether there was memory for it. */
bool kvpool_holder_init(const struct kvpool *pool, struct kvpool_holder *holder);
/* After kvpool_abandon() and, for pages that were lost, kvpool_reclaim(). */
void kvpool_holder_deinit(struct kvpool_holder *holder);

/* Up to @n pages, free ones first, then sealed ones that nobody has pinned. Return: how many. */
uint32_t kvpool_lease(struct kvpool *pool, struct kvpool_holder *holder, uint32_t n,
		      uint32_t *ret_pages);

/*
 * Publishes a page that @holder has leased. Where another page has the key already, that is *ret_page, and @page stays
 * leased. *ret_page is then pinned by @holder, whichever it is: it would be nobody's who reads it from now on, and
 * somebody else's soon.
 */
enum kvpool_result kvpool_seal(struct kvpool *pool, struct kvpool_holder *holder, uint32_t page,
			       const uint8_t key[KVPOOL_KEY_BYTES], uint32_t *ret_page);

/* The pages of the first keys of @n that are there, up to the first that is not, each pinned once more.
 * Return: how many. */
uint32_t kvpool_find(struct kvpool *pool, struct kvpool_holder *holder,
		     const uint8_t (*keys)[KVPOOL_KEY_BYTES], uint32_t n, uint32_t *ret_pages);

/* One pin more on a sealed page, of a holder that is not near its last. */
void kvpool_pin(struct kvpool *pool, struct kvpool_holder *holder, uint32_t page);

/* Frees a leased page, or takes one pin off a sealed one. */
enum kvpool_result kvpool_give_back(struct kvpool *pool, struct kvpool_holder *holder,
				    uint32_t page);

/* The holder is gone: its pins end, what it has leased is lost. Looks at @budget pages. Return: whether all
 * were looked at. */
bool kvpool_abandon(struct kvpool *pool, struct kvpool_holder *holder, uint32_t budget);

/* The next pages from @from on that @holder lost, @n at most. Return: how many; 0: there are none. */
uint32_t kvpool_lost(const struct kvpool *pool, const struct kvpool_holder *holder, uint32_t from,
		     uint32_t n, uint32_t *ret_pages);
/* Nobody writes @page, which @holder lost, any more, and what was in it is gone: it is free. */
void kvpool_reclaim(struct kvpool *pool, struct kvpool_holder *holder, uint32_t page);

#endif
