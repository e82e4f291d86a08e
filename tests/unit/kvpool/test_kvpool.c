/* SPDX-License-Identifier: MIT */
/*
 * test_kvpool.c: whose page is whose, by trying everything.
 *
 * Two holders, three pages and two keys, and in every state that can be reached every call that can be made:
 * leases, seals under either key, look-ups, pages given back that are and are not held, a holder's death between any
 * two calls, its pages looked at one at a time while the other goes on, and reclaimed in any order. A model of arrays,
 * which shares no code with the pool, says what each call answers; after each the two are compared.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kvpool/kvpool.h>

enum { PAGES = 3, HOLDERS = 2, KEYS = 2, MOST_PINS = 2, NOBODY = 9 };

/* ---- the model ---- */

enum what { FREE, LEASED, SEALED, LOST };

struct model {
	unsigned char what[PAGES];
	unsigned char key[PAGES]; /* of a sealed one */
	unsigned char by[PAGES];  /* who has leased or lost it, or NOBODY */
	unsigned char pins[HOLDERS][PAGES];
	unsigned char idle[PAGES], n_idle;         /* free ones, in the order in which they go */
	unsigned char unpinned[PAGES], n_unpinned; /* sealed ones, likewise */
	unsigned char dying[HOLDERS];              /* how many pages were looked at, plus one */
};

static void append(unsigned char *list, unsigned char *n, int page)
{
	list[(*n)++] = (unsigned char)page;
}

static void drop(unsigned char *list, unsigned char *n, int page)
{
	int kept = 0;

	for (int i = 0; i < *n; i++)
		if (list[i] != page)
			list[kept++] = list[i];
	*n = (unsigned char)kept;
	memset(list + kept, 0, (size_t)(PAGES - kept)); /* so that equal states are equal bytes */
}

static bool is_pinned(const struct model *m, int page)
{
	for (int h = 0; h < HOLDERS; h++)
		if (m->pins[h][page])
			return true;
	return false;
}

static int sealed_as(const struct model *m, int key)
{
	for (int page = 0; page < PAGES; page++)
		if (m->what[page] == SEALED && m->key[page] == key)
			return page;
	return -1;
}

static int model_lease_one(struct model *m, int holder)
{
	int page;

	if (m->n_idle) {
		page = m->idle[0];
		drop(m->idle, &m->n_idle, page);
	} else if (m->n_unpinned) {
		page = m->unpinned[0];
		drop(m->unpinned, &m->n_unpinned, page);
	} else {
		return -1;
	}
	m->what[page] = LEASED;
	m->key[page] = 0;
	m->by[page] = (unsigned char)holder;
	return page;
}

static void model_pin(struct model *m, int holder, int page)
{
	if (!is_pinned(m, page))
		drop(m->unpinned, &m->n_unpinned, page);
	m->pins[holder][page]++;
}

static void model_unpin(struct model *m, int holder, int page, int n)
{
	m->pins[holder][page] = (unsigned char)(m->pins[holder][page] - n);
	if (!is_pinned(m, page))
		append(m->unpinned, &m->n_unpinned, page);
}

static void model_free(struct model *m, int page)
{
	m->what[page] = FREE;
	m->by[page] = NOBODY;
	append(m->idle, &m->n_idle, page);
}

/* ---- calls, made on both ---- */

enum call { LEASE_1, LEASE_ALL, SEAL, FIND, GIVE_BACK, ABANDON_ONE, RECLAIM, N_CALLS };

struct step {
	unsigned char call, holder, page,
		keys; /* keys: SEAL: which; FIND: 0: A; 1: B; 2: A, B; 3: B, A */
};

struct both {
	struct model model;
	struct kvpool *pool;
	struct kvpool_holder holders[HOLDERS];
};

static const uint8_t key_bytes[KEYS][KVPOOL_KEY_BYTES] = {{'A'}, {'B'}};

static void do_lease(struct both *b, int holder, uint32_t n)
{
	uint32_t pages[PAGES + 1], got = kvpool_lease(b->pool, &b->holders[holder], n, pages);

	for (uint32_t i = 0; i < n; i++) {
		int page = model_lease_one(&b->model, holder);

		if (page < 0) {
			assert_int_equal(got, i);
			return;
		}
		assert_true(i < got);
		assert_int_equal(pages[i], page);
	}
	assert_int_equal(got, n);
}

static void do_seal(struct both *b, int holder, int page, int key)
{
	struct model *m = &b->model;
	uint32_t published = 77;
	enum kvpool_result r = kvpool_seal(b->pool, &b->holders[holder], (uint32_t)page,
					   key_bytes[key], &published);
	int there = sealed_as(m, key);

	if (page >= PAGES) {
		assert_int_equal(r, KVPOOL_NO_PAGE);
		return;
	}
	if (m->what[page] != LEASED || m->by[page] != holder) {
		assert_int_equal(r, KVPOOL_NOT_LEASED);
		return;
	}
	assert_int_equal(r, KVPOOL_OK);
	assert_int_equal(published, there >= 0 ? there : page);
	if (there >= 0) {
		model_pin(m, holder, there);
		return;
	}
	m->what[page] = SEALED;
	m->key[page] = (unsigned char)key;
	m->by[page] = NOBODY;
	m->pins[holder][page] = 1;
}

static void do_find(struct both *b, int holder, int which)
{
	static const int orders[][2] = {{0, -1}, {1, -1}, {0, 1}, {1, 0}};
	uint8_t keys[2][KVPOOL_KEY_BYTES];
	uint32_t pages[2], n = which < 2 ? 1 : 2, found;

	for (uint32_t i = 0; i < n; i++)
		memcpy(keys[i], key_bytes[orders[which][i]], KVPOOL_KEY_BYTES);
	found = kvpool_find(b->pool, &b->holders[holder], (const uint8_t(*)[KVPOOL_KEY_BYTES])keys,
			    n, pages);
	for (uint32_t i = 0; i < n; i++) {
		int page = sealed_as(&b->model, orders[which][i]);

		if (page < 0) {
			assert_int_equal(found, i);
			return;
		}
		assert_true(i < found);
		assert_int_equal(pages[i], page);
		model_pin(&b->model, holder, page);
	}
	assert_int_equal(found, n);
}

static void do_give_back(struct both *b, int holder, int page)
{
	struct model *m = &b->model;
	enum kvpool_result r = kvpool_give_back(b->pool, &b->holders[holder], (uint32_t)page);

	if (page >= PAGES) {
		assert_int_equal(r, KVPOOL_NO_PAGE);
	} else if (m->what[page] == LEASED && m->by[page] == holder) {
		assert_int_equal(r, KVPOOL_OK);
		model_free(m, page);
	} else if (m->pins[holder][page]) {
		assert_int_equal(r, KVPOOL_OK);
		model_unpin(m, holder, page, 1);
	} else {
		assert_int_equal(r, KVPOOL_NOT_HELD);
	}
}

static void do_abandon_one(struct both *b, int holder)
{
	struct model *m = &b->model;
	int page = m->dying[holder] ? m->dying[holder] - 1 : 0;
	bool over = kvpool_abandon(b->pool, &b->holders[holder], 1);

	m->dying[holder] = (unsigned char)(page + 2);
	if (m->what[page] == LEASED && m->by[page] == holder)
		m->what[page] = LOST;
	else if (m->pins[holder][page])
		model_unpin(m, holder, page, m->pins[holder][page]);
	assert_int_equal(over, page + 1 == PAGES);
}

static bool has_lost(const struct model *m, int holder)
{
	for (int page = 0; page < PAGES; page++)
		if (m->what[page] == LOST && m->by[page] == holder)
			return true;
	return false;
}

static bool is_abandoned(const struct model *m, int holder)
{
	return m->dying[holder] == PAGES + 1;
}

/* One that has lost nothing, or whose last page is reclaimed, ends, and somebody new has its place. */
static void end_if_over(struct both *b, int holder)
{
	if (!is_abandoned(&b->model, holder) || has_lost(&b->model, holder))
		return;
	assert_int_equal(b->holders[holder].n_leased, 0);
	assert_int_equal(b->holders[holder].n_pins, 0);
	kvpool_holder_deinit(&b->holders[holder]);
	assert_true(kvpool_holder_init(b->pool, &b->holders[holder]));
	b->model.dying[holder] = 0;
}

/* Without an end of pins there would be none of states. */
static bool is_at_its_pins_end(const struct model *m, int holder)
{
	for (int page = 0; page < PAGES; page++)
		if (m->pins[holder][page] >= MOST_PINS)
			return true;
	return false;
}

static bool is_possible(const struct model *m, const struct step *s)
{
	switch ((enum call)s->call) {
	case LEASE_1:
	case LEASE_ALL:
		return !m->dying[s->holder] && s->page == 0 && s->keys == 0;
	case SEAL:
		return !m->dying[s->holder] && s->keys < KEYS && !is_at_its_pins_end(m, s->holder);
	case FIND:
		return !m->dying[s->holder] && s->page == 0 && !is_at_its_pins_end(m, s->holder);
	case GIVE_BACK:
		return !m->dying[s->holder] && s->keys == 0;
	case ABANDON_ONE:
		return !is_abandoned(m, s->holder) && s->page == 0 && s->keys == 0;
	case RECLAIM:
		return is_abandoned(m, s->holder) && s->page < PAGES && s->keys == 0 &&
		       m->what[s->page] == LOST && m->by[s->page] == s->holder;
	case N_CALLS:
		break;
	}
	return false;
}

static void do_step(struct both *b, const struct step *s)
{
	switch ((enum call)s->call) {
	case LEASE_1:
		do_lease(b, s->holder, 1);
		break;
	case LEASE_ALL:
		do_lease(b, s->holder, PAGES + 1);
		break;
	case SEAL:
		do_seal(b, s->holder, s->page, s->keys);
		break;
	case FIND:
		do_find(b, s->holder, s->keys);
		break;
	case GIVE_BACK:
		do_give_back(b, s->holder, s->page);
		break;
	case ABANDON_ONE:
		do_abandon_one(b, s->holder);
		end_if_over(b, s->holder);
		break;
	case RECLAIM:
		kvpool_reclaim(b->pool, &b->holders[s->holder], s->page);
		model_free(&b->model, s->page);
		end_if_over(b, s->holder);
		break;
	case N_CALLS:
		break;
	}
}

static void compare(const struct both *b)
{
	const struct model *m = &b->model;
	struct kvpool_counts c = kvpool_count(b->pool), wanted = {0};

	for (int page = 0; page < PAGES; page++) {
		wanted.n_free += m->what[page] == FREE;
		wanted.n_leased += m->what[page] == LEASED;
		wanted.n_sealed += m->what[page] == SEALED;
		wanted.n_lost += m->what[page] == LOST;
		wanted.n_pinned += is_pinned(m, page);
	}
	assert_int_equal(c.n_free, wanted.n_free);
	assert_int_equal(c.n_leased, wanted.n_leased);
	assert_int_equal(c.n_sealed, wanted.n_sealed);
	assert_int_equal(c.n_lost, wanted.n_lost);
	assert_int_equal(c.n_pinned, wanted.n_pinned);
	for (int h = 0; h < HOLDERS; h++) {
		uint32_t lost[PAGES], n = is_abandoned(m, h) ? kvpool_lost(b->pool, &b->holders[h],
									   0, PAGES, lost)
							     : 0;
		uint32_t at = 0;

		for (uint32_t page = 0; is_abandoned(m, h) && page < PAGES; page++)
			if (m->what[page] == LOST && m->by[page] == h) {
				assert_true(at < n);
				assert_int_equal(lost[at++], page);
			}
		assert_int_equal(at, n);
	}
}

/* ---- every state ---- */

struct state {
	struct model model;
	uint32_t from; /* the state before, and the call that led here */
	struct step step;
};

struct search {
	struct state *states;
	uint32_t n, capacity, *table, table_mask;
};

static uint32_t hash_of(const struct model *m)
{
	uint32_t hash = 2166136261u;

	for (size_t i = 0; i < sizeof(*m); i++)
		hash = (hash ^ ((const unsigned char *)m)[i]) * 16777619u;
	return hash ^ hash >> 15;
}

static void add_state(struct search *s, const struct model *m, uint32_t from,
		      const struct step *step)
{
	uint32_t at = hash_of(m) & s->table_mask;

	for (; s->table[at]; at = (at + 1) & s->table_mask)
		if (memcmp(&s->states[s->table[at] - 1].model, m, sizeof(*m)) == 0)
			return;
	assert_true(s->n < s->capacity);
	s->states[s->n] = (struct state){.model = *m, .from = from, .step = *step};
	s->table[at] = ++s->n;
}

/* The pool in state @i, by the calls that led there. */
static void go_to(const struct search *s, uint32_t i, struct both *b)
{
	struct step steps[256];
	size_t n = 0;

	for (; i != 0; i = s->states[i].from) {
		assert_true(n < sizeof(steps) / sizeof(steps[0]));
		steps[n++] = s->states[i].step;
	}
	b->model = s->states[0].model;
	b->pool = kvpool_new(PAGES, 0x9e3779b97f4a7c15);
	assert_non_null(b->pool);
	for (int h = 0; h < HOLDERS; h++)
		assert_true(kvpool_holder_init(b->pool, &b->holders[h]));
	while (n > 0)
		do_step(b, &steps[--n]);
}

static void leave(struct both *b)
{
	for (int h = 0; h < HOLDERS; h++)
		kvpool_holder_deinit(&b->holders[h]);
	kvpool_free(b->pool);
}

static void try_all_calls(struct search *s, uint32_t i)
{
	for (int call = 0; call < N_CALLS; call++)
		for (int holder = 0; holder < HOLDERS; holder++)
			for (int page = 0; page <= PAGES; page++)
				for (int keys = 0; keys < 4; keys++) {
					struct step step = {
						(unsigned char)call, (unsigned char)holder,
						(unsigned char)page, (unsigned char)keys};
					struct both b;

					if (!is_possible(&s->states[i].model, &step))
						continue;
					go_to(s, i, &b);
					do_step(&b, &step);
					compare(&b);
					add_state(s, &b.model, i, &step);
					leave(&b);
				}
}

static void every_state_is_right(void **unused)
{
	struct search s = {.capacity = 1u << 18, .table_mask = (1u << 20) - 1};
	struct model first = {.by = {NOBODY, NOBODY, NOBODY}};

	(void)unused;
	s.states = calloc(s.capacity, sizeof(*s.states));
	s.table = calloc(s.table_mask + 1, sizeof(*s.table));
	assert_true(s.states && s.table);
	for (int page = 0; page < PAGES; page++)
		append(first.idle, &first.n_idle, page);
	add_state(&s, &first, 0, &(struct step){0});
	for (uint32_t i = 0; i < s.n; i++)
		try_all_calls(&s, i);
	print_message("%u states\n", s.n);
	assert_true(s.n > 1000);
	free(s.states);
	free(s.table);
}

/* ---- many pages ---- */

static void keys_that_look_alike_are_told_apart(void **unused)
{
	enum { N = 5000 };
	struct kvpool *pool = kvpool_new(N, 12345);
	struct kvpool_holder holder;
	uint32_t page, found;
	uint8_t key[1][KVPOOL_KEY_BYTES] = {{0}};

	(void)unused;
	assert_true(pool && kvpool_holder_init(pool, &holder));
	for (uint32_t i = 0; i < N; i++) {
		assert_int_equal(kvpool_lease(pool, &holder, 1, &page), 1);
		memcpy(&key[0][28], &i, sizeof(i)); /* the last bytes only */
		assert_int_equal(kvpool_seal(pool, &holder, page, key[0], &found), KVPOOL_OK);
		assert_int_equal(found, page);
	}
	assert_int_equal(kvpool_lease(pool, &holder, 1, &page), 0); /* all are pinned */
	for (uint32_t i = 0; i < N; i++) {
		memcpy(&key[0][28], &i, sizeof(i));
		assert_int_equal(kvpool_find(pool, &holder, (const uint8_t(*)[KVPOOL_KEY_BYTES])key,
					     1, &found),
				 1);
		assert_int_equal(found, i);
	}
	assert_int_equal(kvpool_count(pool).n_pinned, N);
	for (uint32_t i = 0; i < N; i++)
		for (int pins = 0; pins < 2; pins++)
			assert_int_equal(kvpool_give_back(pool, &holder, i), KVPOOL_OK);
	assert_int_equal(kvpool_give_back(pool, &holder, 0), KVPOOL_NOT_HELD);
	assert_int_equal(kvpool_count(pool).n_pinned, 0);
	assert_int_equal(kvpool_lease(pool, &holder, 1, &page), 1);
	assert_int_equal(page, 0); /* which was let go longest ago */
	assert_int_equal(kvpool_count(pool).evictions, 1);
	while (!kvpool_abandon(pool, &holder, 100))
		;
	kvpool_reclaim(pool, &holder, page);
	kvpool_holder_deinit(&holder);
	kvpool_free(pool);
}

static void pins_of_one_holder_have_an_end(void **unused)
{
	struct kvpool *pool = kvpool_new(2, 1);
	struct kvpool_holder holder;
	uint8_t key[1][KVPOOL_KEY_BYTES] = {{7}};
	uint32_t page, other, found, pins = 1;

	(void)unused;
	assert_true(pool && kvpool_holder_init(pool, &holder));
	assert_int_equal(kvpool_lease(pool, &holder, 1, &page), 1);
	assert_int_equal(kvpool_seal(pool, &holder, page, key[0], &found), KVPOOL_OK);
	while (pins < 100000 &&
	       kvpool_find(pool, &holder, (const uint8_t(*)[KVPOOL_KEY_BYTES])key, 1, &found) == 1)
		pins++;
	assert_int_equal(pins, UINT16_MAX - 1);
	assert_int_equal(kvpool_seal(pool, &holder, page, key[0], &found), KVPOOL_NOT_LEASED);
	assert_int_equal(kvpool_lease(pool, &holder, 1, &other), 1);
	assert_int_equal(kvpool_seal(pool, &holder, other, key[0], &found), KVPOOL_MOST_PINS);
	assert_int_equal(kvpool_give_back(pool, &holder, other), KVPOOL_OK);
	assert_true(kvpool_abandon(pool, &holder, 2));
	assert_int_equal(holder.n_pins, 0);
	assert_int_equal(kvpool_count(pool).n_pinned, 0);
	kvpool_holder_deinit(&holder);
	kvpool_free(pool);
}

static void the_cost_of_any_number_is_told(void **unused)
{
	static const uint32_t numbers[] = {0, 1, 1u << 30, (1u << 30) + 1, 1u << 31, UINT32_MAX};
	uint64_t before = 0;

	(void)unused;
	for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
		assert_true(kvpool_cost(numbers[i]) >= (uint64_t)numbers[i] * KVPOOL_KEY_BYTES);
		assert_true(kvpool_cost(numbers[i]) > before);
		before = kvpool_cost(numbers[i]);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_state_is_right),
		cmocka_unit_test(keys_that_look_alike_are_told_apart),
		cmocka_unit_test(pins_of_one_holder_have_an_end),
		cmocka_unit_test(the_cost_of_any_number_is_told),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
