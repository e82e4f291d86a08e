/* SPDX-License-Identifier: MIT */
/*
 * test_kvspill.c: which page has a copy in the file, by a long random walk over pages that are sealed, evicted, written,
 * failed to be written, wanted and read back, whole or not. The file is an array here: what a restored page holds must be
 * what was sealed under its key.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kvpool/kvspill.h>

enum { PAGES = 8, PLACES = 11, KEYS = 40, STEPS = 400000 };

struct world {
	struct kvpool *pool;
	struct kvspill *spill;
	struct kvpool_holder user;
	unsigned char memory[PAGES],
		file[PLACES]; /* the number of the key whose contents these are, plus one */
	uint64_t written, restored, failed;
	uint64_t random;
};

static uint32_t draw(struct world *w, uint32_t n)
{
	w->random = w->random * 6364136223846793005 + 1442695040888963407;
	return (uint32_t)(w->random >> 33) % n;
}

static void key_of(uint32_t number, uint8_t ret_key[KVPOOL_KEY_BYTES])
{
	memset(ret_key, 0, KVPOOL_KEY_BYTES);
	ret_key[0] = (uint8_t)number;
}

static void seal_one(struct world *w)
{
	uint8_t key[KVPOOL_KEY_BYTES];
	uint32_t page, found, number = draw(w, KEYS);

	if (kvpool_lease(w->pool, &w->user, 1, &page) == 0)
		return;
	w->memory[page] = (unsigned char)(number + 1);
	key_of(number, key);
	assert_int_equal(kvpool_seal(w->pool, &w->user, page, key, &found), KVPOOL_OK);
	if (found == page)
		kvspill_sealed(w->spill, page);
	else
		assert_int_equal(kvpool_give_back(w->pool, &w->user, page), KVPOOL_OK);
	assert_int_equal(kvpool_give_back(w->pool, &w->user, found), KVPOOL_OK);
}

/* What is found is what was sealed; what is said to be coming does come, when it is read. */
static void look_up(struct world *w)
{
	uint8_t keys[3][KVPOOL_KEY_BYTES];
	uint32_t pages[3], numbers[3], n;

	for (int i = 0; i < 3; i++)
		key_of(numbers[i] = draw(w, KEYS), keys[i]);
	n = kvpool_find(w->pool, &w->user, (const uint8_t(*)[KVPOOL_KEY_BYTES])keys, 3, pages);
	for (uint32_t i = 0; i < n; i++) {
		assert_int_equal(w->memory[pages[i]], numbers[i] + 1);
		assert_int_equal(kvpool_give_back(w->pool, &w->user, pages[i]), KVPOOL_OK);
	}
	assert_true(kvspill_want(w->spill, (const uint8_t(*)[KVPOOL_KEY_BYTES])keys + n, 3 - n) <=
		    3 - n);
}

static void write_one(struct world *w, bool good)
{
	struct kvspill_copy copy;

	if (!kvspill_next_write(w->spill, &copy))
		return;
	assert_int_equal(w->memory[copy.page], copy.key[0] + 1);
	if (draw(w, 2))
		look_up(w); /* others go on meanwhile */
	w->file[copy.place] = good ? w->memory[copy.page] : 0;
	copy.checksum = copy.place * 1000 + w->file[copy.place];
	kvspill_written(w->spill, &copy, good);
	w->written += good;
	w->failed += !good;
}

static void read_one(struct world *w, bool good)
{
	struct kvspill_copy copy;
	uint64_t restored = kvspill_count(w->spill).restored;

	if (!kvspill_next_read(w->spill, &copy))
		return;
	assert_int_equal(w->file[copy.place], copy.key[0] + 1);
	assert_int_equal(copy.checksum, copy.place * 1000 + w->file[copy.place]);
	for (uint32_t i = draw(w, 3); i > 0; i--)
		seal_one(w);
	w->memory[copy.page] = good ? w->file[copy.place] : 0;
	kvspill_restored(w->spill, &copy, good);
	w->restored += kvspill_count(w->spill).restored - restored;
	w->failed += !good;
}

static void world_new(struct world *w)
{
	*w = (struct world){.random = 7, .pool = kvpool_new(PAGES, 5)};
	assert_non_null(w->pool);
	w->spill = kvspill_new(w->pool, PAGES, PLACES, 6);
	assert_non_null(w->spill);
	assert_true(kvpool_holder_init(w->pool, &w->user));
}

static void world_end(struct world *w)
{
	kvspill_free(w->spill);
	kvpool_holder_deinit(&w->user);
	kvpool_free(w->pool);
}

static void a_long_walk_finds_what_was_sealed(void **unused)
{
	struct world w;
	struct kvspill_counts c;
	struct kvpool_counts pages;

	(void)unused;
	world_new(&w);
	for (int i = 0; i < STEPS; i++) {
		uint32_t what = draw(&w, 16);

		if (what < 4)
			seal_one(&w);
		else if (what < 8)
			look_up(&w);
		else if (what < 12)
			write_one(&w, what != 8);
		else
			read_one(&w, what != 12);
		c = kvspill_count(w.spill);
		assert_true(c.n_good <= PLACES);
	}
	assert_int_equal(c.written, w.written);
	assert_int_equal(c.restored, w.restored);
	assert_int_equal(c.failed, w.failed);
	assert_true(w.written > 1000 && w.restored > 1000 && w.failed > 1000);
	pages = kvpool_count(w.pool);
	assert_int_equal(pages.n_leased + pages.n_pinned, 0);
	assert_int_equal(pages.n_free + pages.n_sealed, PAGES);
	world_end(&w);
}

/* As a daemon finds a file that one before it has left. */
static void what_an_older_file_has_is_read_when_it_is_asked_for(void **unused)
{
	struct world w;
	struct kvspill_copy copy;
	uint8_t keys[2][KVPOOL_KEY_BYTES];
	uint32_t pages[2];

	(void)unused;
	world_new(&w);
	for (uint32_t i = 0; i < 2; i++) {
		key_of(i, keys[i]);
		kvspill_found(w.spill, i + 3, keys[i], i);
	}
	kvspill_found(w.spill, 3, keys[1], 9);      /* the place is taken */
	kvspill_found(w.spill, 5, keys[0], 9);      /* the key is there */
	kvspill_found(w.spill, PLACES, keys[0], 9); /* there is no such place */
	assert_int_equal(kvspill_count(w.spill).n_good, 2);
	assert_int_equal(kvspill_want(w.spill, (const uint8_t(*)[KVPOOL_KEY_BYTES])keys, 2), 2);
	assert_true(kvspill_next_read(w.spill, &copy));
	assert_int_equal(copy.place, 3);
	kvspill_restored(w.spill, &copy, true);
	assert_true(kvspill_next_read(w.spill, &copy));
	kvspill_restored(w.spill, &copy, false); /* it is not what it was */
	assert_false(kvspill_next_read(w.spill, &copy));
	assert_int_equal(
		kvpool_find(w.pool, &w.user, (const uint8_t(*)[KVPOOL_KEY_BYTES])keys, 2, pages),
		1);
	assert_int_equal(kvspill_want(w.spill, (const uint8_t(*)[KVPOOL_KEY_BYTES])keys + 1, 1), 0);
	assert_int_equal(kvspill_count(w.spill).n_good, 1);
	world_end(&w);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_long_walk_finds_what_was_sealed),
		cmocka_unit_test(what_an_older_file_has_is_read_when_it_is_asked_for),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
