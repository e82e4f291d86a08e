/* SPDX-License-Identifier: MIT */
/* kvpool.c: pages, the index of their keys, the order in which they go. */
#include "key_table.h"

#include <stdlib.h>
#include <string.h>

#define AHEAD  8
#define LEASED UINT16_MAX /* in kvpool_holder.held */

enum page_state { PAGE_FREE, PAGE_LEASED, PAGE_SEALED, PAGE_LOST };

struct kvpool {
	struct key_table pages;
	struct queue idle, unpinned; /* free pages; sealed ones, the longest let go first */
	struct kvpool_counts counts;
	kvpool_evicted *on_evict; /* or NULL */
	void *userdata;
};

static struct record *page_at(const struct kvpool *pool, uint32_t page)
{
	return &pool->pages.records[page];
}

/* ---- the pool ---- */

uint64_t kvpool_cost(uint32_t n_pages)
{
	return sizeof(struct kvpool) + key_table_cost(n_pages);
}

uint64_t kvpool_holder_cost(uint32_t n_pages)
{
	return (uint64_t)n_pages * sizeof(uint16_t);
}

struct kvpool *kvpool_new(uint32_t n_pages, uint64_t secret)
{
	struct kvpool *pool = calloc(1, sizeof(*pool));

	if (!pool || !key_table_init(&pool->pages, n_pages, secret))
		return kvpool_free(pool);
	pool->idle = pool->unpinned = QUEUE_EMPTY;
	pool->counts.n_free = n_pages;
	for (uint32_t i = 0; i < n_pages; i++)
		queue_append(&pool->pages, &pool->idle, i);
	return pool;
}

struct kvpool *kvpool_free(struct kvpool *pool)
{
	if (pool)
		key_table_deinit(&pool->pages);
	free(pool);
	return NULL;
}

void kvpool_watch(struct kvpool *pool, kvpool_evicted *on_evict, void *userdata)
{
	pool->on_evict = on_evict;
	pool->userdata = userdata;
}

const uint8_t *kvpool_key(const struct kvpool *pool, uint32_t page)
{
	const struct record *p = &pool->pages.records[page];

	return p->state == PAGE_SEALED ? p->key : NULL;
}

struct kvpool_counts kvpool_count(const struct kvpool *pool)
{
	return pool->counts;
}

bool kvpool_holder_init(const struct kvpool *pool, struct kvpool_holder *holder)
{
	*holder = (struct kvpool_holder){.held = calloc(pool->pages.n, sizeof(*holder->held))};
	return holder->held;
}

void kvpool_holder_deinit(struct kvpool_holder *holder)
{
	free(holder->held);
	holder->held = NULL;
}

/* ---- pages ---- */

static void pin(struct kvpool *pool, struct kvpool_holder *holder, uint32_t page)
{
	struct record *p = page_at(pool, page);

	if (p->n_pins++ == 0)
		pool->counts.n_pinned++;
	holder->held[page]++;
	holder->n_pins++;
}

/* One pin more would read as a lease: whoever has so many goes on without. */
static bool can_pin(const struct kvpool_holder *holder, uint32_t page)
{
	return holder->held[page] != LEASED - 1;
}

void kvpool_pin(struct kvpool *pool, struct kvpool_holder *holder, uint32_t page)
{
	if (page_at(pool, page)->n_pins == 0)
		queue_remove(&pool->pages, &pool->unpinned, page);
	pin(pool, holder, page);
}

static void unpin(struct kvpool *pool, struct kvpool_holder *holder, uint32_t page)
{
	struct record *p = page_at(pool, page);

	holder->held[page]--;
	holder->n_pins--;
	if (--p->n_pins > 0)
		return;
	pool->counts.n_pinned--;
	queue_append(&pool->pages, &pool->unpinned, page);
}

static void make_free(struct kvpool *pool, uint32_t page)
{
	page_at(pool, page)->state = PAGE_FREE;
	pool->counts.n_free++;
	queue_append(&pool->pages, &pool->idle, page);
}

/* A page that nobody has, out of its queue; NONE: all are had. */
static uint32_t take_page(struct kvpool *pool)
{
	uint32_t page = pool->idle.first;

	if (page != NONE) {
		queue_remove(&pool->pages, &pool->idle, page);
		pool->counts.n_free--;
		return page;
	}
	page = pool->unpinned.first;
	if (page != NONE) {
		queue_remove(&pool->pages, &pool->unpinned, page);
		key_table_remove(&pool->pages, page);
		pool->counts.n_sealed--;
		pool->counts.evictions++;
		if (pool->on_evict)
			pool->on_evict(pool->userdata, page);
	}
	return page;
}

uint32_t kvpool_lease(struct kvpool *pool, struct kvpool_holder *holder, uint32_t n,
		      uint32_t *ret_pages)
{
	uint32_t got = 0, page;

	while (got < n && (page = take_page(pool)) != NONE) {
		page_at(pool, page)->state = PAGE_LEASED;
		pool->counts.n_leased++;
		holder->held[page] = LEASED;
		holder->n_leased++;
		ret_pages[got++] = page;
	}
	return got;
}

static void end_lease(struct kvpool *pool, struct kvpool_holder *holder, uint32_t page)
{
	pool->counts.n_leased--;
	holder->held[page] = 0;
	holder->n_leased--;
}

enum kvpool_result kvpool_seal(struct kvpool *pool, struct kvpool_holder *holder, uint32_t page,
			       const uint8_t key[KVPOOL_KEY_BYTES], uint32_t *ret_page)
{
	uint32_t hash = key_table_hash(&pool->pages, key);

	if (page >= pool->pages.n)
		return KVPOOL_NO_PAGE;
	if (holder->held[page] != LEASED)
		return KVPOOL_NOT_LEASED;
	*ret_page = key_table_find(&pool->pages, hash, key);
	if (*ret_page != NONE) {
		if (!can_pin(holder, *ret_page))
			return KVPOOL_MOST_PINS;
		kvpool_pin(pool, holder, *ret_page);
		return KVPOOL_OK;
	}
	*ret_page = page;
	end_lease(pool, holder, page);
	memcpy(page_at(pool, page)->key, key, KVPOOL_KEY_BYTES);
	page_at(pool, page)->state = PAGE_SEALED;
	pool->counts.n_sealed++;
	pool->counts.seals++;
	key_table_add(&pool->pages, hash, page);
	pin(pool, holder, page);
	return KVPOOL_OK;
}

/* A large pool's slots and pages are in no cache: they are asked for while those of keys before are looked at. */
struct look_ahead {
	uint32_t hashes[2 * AHEAD]; /* of the keys from where we are on */
	const uint8_t (*keys)[KVPOOL_KEY_BYTES];
	uint32_t n;
};

static void ask_for_slot(const struct kvpool *pool, struct look_ahead *ahead, uint32_t i)
{
	if (i >= ahead->n)
		return;
	ahead->hashes[i % (2 * AHEAD)] = key_table_hash(&pool->pages, ahead->keys[i]);
	__builtin_prefetch(
		&pool->pages.slots[ahead->hashes[i % (2 * AHEAD)] & pool->pages.hash_mask]);
}

static void ask_for_page(const struct kvpool *pool, const struct look_ahead *ahead, uint32_t i)
{
	uint32_t page;

	if (i >= ahead->n)
		return;
	page = pool->pages.slots[ahead->hashes[i % (2 * AHEAD)] & pool->pages.hash_mask].record;
	if (page != NONE)
		__builtin_prefetch(page_at(pool, page), 1);
}

uint32_t kvpool_find(struct kvpool *pool, struct kvpool_holder *holder,
		     const uint8_t (*keys)[KVPOOL_KEY_BYTES], uint32_t n, uint32_t *ret_pages)
{
	struct look_ahead ahead = {.keys = keys, .n = n};
	uint32_t found, page;

	for (uint32_t i = 0; i < 2 * AHEAD; i++)
		ask_for_slot(pool, &ahead, i);
	for (uint32_t i = 0; i < AHEAD; i++)
		ask_for_page(pool, &ahead, i);
	for (found = 0; found < n; found++) {
		page = key_table_find(&pool->pages, ahead.hashes[found % (2 * AHEAD)], keys[found]);
		if (page == NONE || !can_pin(holder, page))
			break;
		kvpool_pin(pool, holder, page);
		ret_pages[found] = page;
		ask_for_slot(pool, &ahead, found + 2 * AHEAD);
		ask_for_page(pool, &ahead, found + AHEAD);
	}
	pool->counts.hits += found;
	pool->counts.misses += n - found;
	return found;
}

enum kvpool_result kvpool_give_back(struct kvpool *pool, struct kvpool_holder *holder,
				    uint32_t page)
{
	if (page >= pool->pages.n)
		return KVPOOL_NO_PAGE;
	if (holder->held[page] == 0)
		return KVPOOL_NOT_HELD;
	if (holder->held[page] != LEASED) {
		unpin(pool, holder, page);
		return KVPOOL_OK;
	}
	end_lease(pool, holder, page);
	make_free(pool, page);
	return KVPOOL_OK;
}

/* ---- holders that are gone ---- */

bool kvpool_abandon(struct kvpool *pool, struct kvpool_holder *holder, uint32_t budget)
{
	for (; holder->next < pool->pages.n && budget > 0; holder->next++, budget--) {
		uint32_t page = holder->next;

		if (holder->held[page] == LEASED && page_at(pool, page)->state == PAGE_LEASED) {
			page_at(pool, page)->state = PAGE_LOST;
			pool->counts.n_leased--;
			pool->counts.n_lost++;
		} else if (holder->held[page] > 0) {
			/* All of its pins at once. */
			holder->n_pins -= holder->held[page] - 1u;
			page_at(pool, page)->n_pins -= holder->held[page] - 1u;
			holder->held[page] = 1;
			unpin(pool, holder, page);
		}
	}
	return holder->next == pool->pages.n;
}

uint32_t kvpool_lost(const struct kvpool *pool, const struct kvpool_holder *holder, uint32_t from,
		     uint32_t n, uint32_t *ret_pages)
{
	uint32_t found = 0;

	for (uint32_t page = from; page < pool->pages.n && found < n; page++)
		if (holder->held[page] == LEASED)
			ret_pages[found++] = page;
	return found;
}

void kvpool_reclaim(struct kvpool *pool, struct kvpool_holder *holder, uint32_t page)
{
	holder->held[page] = 0;
	holder->n_leased--;
	pool->counts.n_lost--;
	make_free(pool, page);
}
