/* SPDX-License-Identifier: MIT */
/* kvspill.c: see kvspill.h. */
#include <kvpool/kvspill.h>

#include <stdlib.h>
#include <string.h>

#include "key_table.h"

enum place_state { PLACE_FREE, PLACE_WRITING, PLACE_WARM, PLACE_COLD, PLACE_WANTED, PLACE_READING };

struct kvspill {
	struct kvpool *pool;
	struct kvpool_holder holder; /* of pages that are being copied */
	struct key_table places;     /* those with a key are in its index */
	struct queue unused, cold, wanted;
	uint32_t n_pages, n_wanted;
	uint32_t *place_of;                    /* a page each; NONE: it has none */
	uint32_t *sealed, n_sealed, at_sealed; /* pages to be written: a ring of n_pages */
	bool *is_sealed;                       /* a page each: it is in that */
	struct kvspill_counts counts;
};

static struct record *place_at(const struct kvspill *spill, uint32_t place)
{
	return &spill->places.records[place];
}

static uint32_t find_place(const struct kvspill *spill, const uint8_t key[KVPOOL_KEY_BYTES])
{
	return key_table_find(&spill->places, key_table_hash(&spill->places, key), key);
}

/* Takes its key: nobody finds it any more. */
static void forget_key(struct kvspill *spill, uint32_t place)
{
	key_table_remove(&spill->places, place);
	spill->counts.n_good--;
}

static void make_unused(struct kvspill *spill, uint32_t place)
{
	place_at(spill, place)->state = PLACE_FREE;
	queue_append(&spill->places, &spill->unused, place);
}

static void make_cold(struct kvspill *spill, uint32_t place)
{
	place_at(spill, place)->state = PLACE_COLD;
	place_at(spill, place)->page = NONE;
	queue_append(&spill->places, &spill->cold, place);
}

static void make_warm(struct kvspill *spill, uint32_t place, uint32_t page)
{
	place_at(spill, place)->state = PLACE_WARM;
	place_at(spill, place)->page = page;
	spill->place_of[page] = place;
}

/* Its place in the file stays, and can be had for another page now. */
static void on_evicted(void *userdata, uint32_t page)
{
	struct kvspill *spill = userdata;
	uint32_t place = spill->place_of[page];

	if (place == NONE)
		return;
	spill->place_of[page] = NONE;
	make_cold(spill, place);
}

uint64_t kvspill_cost(uint32_t n_pages, uint32_t n_places)
{
	return sizeof(struct kvspill) + key_table_cost(n_places) + kvpool_holder_cost(n_pages) +
	       (uint64_t)n_pages * (2 * sizeof(uint32_t) + sizeof(bool));
}

struct kvspill *kvspill_new(struct kvpool *pool, uint32_t n_pages, uint32_t n_places,
			    uint64_t secret)
{
	struct kvspill *spill = calloc(1, sizeof(*spill));
	bool whole;

	if (!spill)
		return NULL;
	spill->pool = pool;
	spill->n_pages = n_pages;
	spill->unused = spill->cold = spill->wanted = QUEUE_EMPTY;
	spill->place_of = malloc(n_pages * sizeof(*spill->place_of));
	spill->sealed = malloc(n_pages * sizeof(*spill->sealed));
	spill->is_sealed = calloc(n_pages, sizeof(*spill->is_sealed));
	whole = spill->place_of && spill->sealed && spill->is_sealed &&
		kvpool_holder_init(pool, &spill->holder);
	if (!whole || !key_table_init(&spill->places, n_places, secret))
		return kvspill_free(spill);
	memset(spill->place_of, 0xff, n_pages * sizeof(*spill->place_of));
	for (uint32_t i = 0; i < n_places; i++)
		make_unused(spill, i);
	kvpool_watch(pool, on_evicted, spill);
	return spill;
}

struct kvspill *kvspill_free(struct kvspill *spill)
{
	if (!spill)
		return NULL;
	kvpool_watch(spill->pool, NULL, NULL);
	kvpool_holder_deinit(&spill->holder);
	key_table_deinit(&spill->places);
	free(spill->place_of);
	free(spill->sealed);
	free(spill->is_sealed);
	free(spill);
	return NULL;
}

struct kvspill_counts kvspill_count(const struct kvspill *spill)
{
	return spill->counts;
}

static void add_key(struct kvspill *spill, uint32_t place, const uint8_t key[KVPOOL_KEY_BYTES],
		    uint64_t checksum)
{
	memcpy(place_at(spill, place)->key, key, KVPOOL_KEY_BYTES);
	place_at(spill, place)->checksum = checksum;
	key_table_add(&spill->places, key_table_hash(&spill->places, key), place);
	spill->counts.n_good++;
}

void kvspill_found(struct kvspill *spill, uint32_t place, const uint8_t key[KVPOOL_KEY_BYTES],
		   uint64_t checksum)
{
	if (place >= spill->places.n || place_at(spill, place)->state != PLACE_FREE ||
	    find_place(spill, key) != NONE)
		return;
	queue_remove(&spill->places, &spill->unused, place);
	add_key(spill, place, key, checksum);
	make_cold(spill, place);
}

/* ---- to the file ---- */

void kvspill_sealed(struct kvspill *spill, uint32_t page)
{
	if (spill->is_sealed[page])
		return;
	spill->is_sealed[page] = true;
	spill->sealed[(spill->at_sealed + spill->n_sealed++) % spill->n_pages] = page;
}

/* NONE: all are warm, or on their way. */
static uint32_t take_place(struct kvspill *spill)
{
	uint32_t place = spill->unused.first;

	if (place != NONE) {
		queue_remove(&spill->places, &spill->unused, place);
	} else if (spill->cold.first != NONE) {
		place = spill->cold.first;
		queue_remove(&spill->places, &spill->cold, place);
		forget_key(spill, place);
	}
	return place;
}

bool kvspill_next_write(struct kvspill *spill, struct kvspill_copy *ret_copy)
{
	while (spill->n_sealed > 0) {
		uint32_t page = spill->sealed[spill->at_sealed], place;
		const uint8_t *key = kvpool_key(spill->pool, page);

		spill->at_sealed = (spill->at_sealed + 1) % spill->n_pages;
		spill->n_sealed--;
		spill->is_sealed[page] = false;
		if (!key || spill->place_of[page] != NONE)
			continue;
		place = find_place(spill, key);
		if (place != NONE) {
			/* It was computed once more meanwhile: what the file has is as good. */
			if (place_at(spill, place)->state == PLACE_COLD) {
				queue_remove(&spill->places, &spill->cold, place);
				make_warm(spill, place, page);
			}
			continue;
		}
		place = take_place(spill);
		if (place == NONE)
			continue;
		kvpool_pin(spill->pool, &spill->holder, page);
		place_at(spill, place)->state = PLACE_WRITING;
		*ret_copy = (struct kvspill_copy){.page = page, .place = place};
		memcpy(ret_copy->key, key, KVPOOL_KEY_BYTES);
		return true;
	}
	return false;
}

void kvspill_written(struct kvspill *spill, const struct kvspill_copy *copy, bool good)
{
	if (good) {
		add_key(spill, copy->place, copy->key, copy->checksum);
		make_warm(spill, copy->place, copy->page);
		spill->counts.written++;
	} else {
		make_unused(spill, copy->place);
		spill->counts.failed++;
	}
	(void)kvpool_give_back(spill->pool, &spill->holder, copy->page);
}

/* ---- from it ---- */

uint32_t kvspill_want(struct kvspill *spill, const uint8_t (*keys)[KVPOOL_KEY_BYTES], uint32_t n)
{
	uint32_t coming = 0;

	for (; coming < n; coming++) {
		uint32_t place = find_place(spill, keys[coming]);

		if (place == NONE)
			break;
		if (place_at(spill, place)->state != PLACE_COLD)
			continue; /* it is on its way, or here */
		if (spill->n_wanted >= spill->n_pages / 2 + 1)
			break;
		queue_remove(&spill->places, &spill->cold, place);
		queue_append(&spill->places, &spill->wanted, place);
		place_at(spill, place)->state = PLACE_WANTED;
		spill->n_wanted++;
	}
	return coming;
}

bool kvspill_next_read(struct kvspill *spill, struct kvspill_copy *ret_copy)
{
	uint32_t place, page;

	while ((place = spill->wanted.first) != NONE) {
		queue_remove(&spill->places, &spill->wanted, place);
		if (kvpool_lease(spill->pool, &spill->holder, 1, &page) == 1)
			break;
		/* All pages are in use: whoever wants it asks again. */
		spill->n_wanted--;
		make_cold(spill, place);
	}
	if (place == NONE)
		return false;
	place_at(spill, place)->state = PLACE_READING;
	*ret_copy = (struct kvspill_copy){
		.checksum = place_at(spill, place)->checksum, .page = page, .place = place};
	memcpy(ret_copy->key, place_at(spill, place)->key, KVPOOL_KEY_BYTES);
	return true;
}

void kvspill_restored(struct kvspill *spill, const struct kvspill_copy *copy, bool good)
{
	uint32_t page = NONE;

	spill->n_wanted--;
	if (!good) {
		forget_key(spill, copy->place);
		make_unused(spill, copy->place);
		spill->counts.failed++;
	} else if (kvpool_seal(spill->pool, &spill->holder, copy->page, copy->key, &page) ==
			   KVPOOL_OK &&
		   page == copy->page) {
		make_warm(spill, copy->place, page);
		spill->counts.restored++;
	} else if (page != NONE && spill->place_of[page] == NONE) {
		make_warm(spill, copy->place, page); /* somebody has computed it meanwhile */
	} else {
		make_cold(spill, copy->place);
	}
	if (page != NONE && page != copy->page)
		(void)kvpool_give_back(spill->pool, &spill->holder, page);
	(void)kvpool_give_back(spill->pool, &spill->holder, copy->page);
}
