/* SPDX-License-Identifier: MIT */
#include "ledger.h"

#include <stdlib.h>
#include <string.h>

#define LEAST_CAPACITY 64
#define SPARE          16 /* a 16th of a limit is freed at a time */

/* Whose rows may go, and until what is left. */
struct need {
	const uint32_t *uid; /* NULL: anybody's */
	uint64_t used, goal;
};

void ledger_init(struct ledger *ledger, uint64_t max_bytes, uint64_t max_bytes_per_uid)
{
	*ledger = (struct ledger){.max_bytes = max_bytes, .max_bytes_per_uid = max_bytes_per_uid};
}

void ledger_deinit(struct ledger *ledger)
{
	free(ledger->rows);
}

/* Keys are hashes: their first bytes are as good as any other. */
static size_t home(const struct ledger *ledger, const struct cache_key *key)
{
	uint64_t word;

	memcpy(&word, key->bytes, sizeof(word));
	return (size_t)word & (ledger->capacity - 1);
}

/* The key's row, or the free place where it belongs. Some place is always free. */
static struct ledger_row *find(const struct ledger *ledger, const struct cache_key *key)
{
	size_t i = home(ledger, key);

	while (ledger->rows[i].bytes && memcmp(&ledger->rows[i].key, key, sizeof(*key)) != 0)
		i = (i + 1) & (ledger->capacity - 1);
	return &ledger->rows[i];
}

static bool grow(struct ledger *ledger)
{
	struct ledger old = *ledger;

	if (ledger->n < ledger->capacity / 4 * 3)
		return true;
	ledger->capacity = old.capacity ? 2 * old.capacity : LEAST_CAPACITY;
	ledger->rows = calloc(ledger->capacity, sizeof(*ledger->rows));
	if (!ledger->rows) {
		*ledger = old;
		return false;
	}
	for (size_t i = 0; i < old.capacity; i++)
		if (old.rows[i].bytes)
			*find(ledger, &old.rows[i].key) = old.rows[i];
	free(old.rows);
	return true;
}

bool ledger_put(struct ledger *ledger, const struct ledger_row *row)
{
	struct ledger_row *place;

	if (row->bytes == 0 || !grow(ledger))
		return row->bytes == 0;
	place = find(ledger, &row->key);
	if (place->bytes) {
		ledger->bytes += row->bytes - place->bytes;
		place->bytes = row->bytes;
		place->used_s = row->used_s;
		return true;
	}
	*place = *row;
	ledger->n++;
	ledger->bytes += row->bytes;
	return true;
}

void ledger_remove(struct ledger *ledger, const struct cache_key *key)
{
	struct ledger_row *row = ledger->capacity ? find(ledger, key) : NULL;
	size_t hole, i;

	if (!row || !row->bytes)
		return;
	ledger->n--;
	ledger->bytes -= row->bytes;
	hole = (size_t)(row - ledger->rows);
	ledger->rows[hole].bytes = 0;
	/* Rows that were pushed past the hole move back, so that they are found. */
	for (i = (hole + 1) & (ledger->capacity - 1); ledger->rows[i].bytes;
	     i = (i + 1) & (ledger->capacity - 1)) {
		struct ledger_row moved = ledger->rows[i];

		ledger->rows[i].bytes = 0;
		*find(ledger, &moved.key) = moved;
	}
}

bool ledger_admits(const struct ledger *ledger, uint64_t bytes)
{
	return (!ledger->max_bytes || bytes <= ledger->max_bytes) &&
	       (!ledger->max_bytes_per_uid || bytes <= ledger->max_bytes_per_uid);
}

static uint64_t bytes_of(const struct ledger *ledger, uint32_t uid)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < ledger->capacity; i++)
		if (ledger->rows[i].uid == uid)
			sum += ledger->rows[i].bytes;
	return sum;
}

static int compare_age(const void *a, const void *b)
{
	int64_t one = ((const struct ledger_row *)a)->used_s;
	int64_t other = ((const struct ledger_row *)b)->used_s;

	return (one > other) - (one < other);
}

/* Copies of the rows that may go, unused for longest first; NULL: none, or no memory. */
static struct ledger_row *candidates(const struct ledger *ledger, const uint32_t *uid,
				     size_t *ret_n)
{
	struct ledger_row *rows = calloc(ledger->n ? ledger->n : 1, sizeof(*rows));
	size_t n = 0;

	for (size_t i = 0; rows && i < ledger->capacity; i++) {
		const struct ledger_row *row = &ledger->rows[i];

		if (row->bytes && row->used_s != LEDGER_NEVER && (!uid || row->uid == *uid))
			rows[n++] = *row;
	}
	if (n > 1)
		qsort(rows, n, sizeof(*rows), compare_age);
	*ret_n = n;
	return rows;
}

static void take_out(struct ledger *ledger, const struct need *need, struct cache_key *victims,
		     size_t *n_victims)
{
	uint64_t used = need->used;
	size_t n;
	struct ledger_row *rows = candidates(ledger, need->uid, &n);

	for (size_t i = 0; rows && i < n && used > need->goal; i++) {
		used -= rows[i].bytes;
		victims[(*n_victims)++] = rows[i].key;
		ledger_remove(ledger, &rows[i].key);
	}
	free(rows);
}

/* What may be left of @used so that @bytes more stay within @limit; 0: no limit. */
static uint64_t goal(uint64_t used, uint64_t bytes, uint64_t limit)
{
	uint64_t left = limit - limit / SPARE;

	if (!limit || used + bytes <= limit)
		return used;
	return left > bytes ? left - bytes : 0;
}

size_t ledger_make_room(struct ledger *ledger, uint32_t uid, uint64_t bytes,
			struct cache_key **ret_victims)
{
	struct need own = {.uid = &uid, .used = bytes_of(ledger, uid)}, all = {0};
	struct cache_key *victims;
	size_t n = 0;

	*ret_victims = NULL;
	own.goal = goal(own.used, bytes, ledger->max_bytes_per_uid);
	if (own.goal == own.used && goal(ledger->bytes, bytes, ledger->max_bytes) == ledger->bytes)
		return 0;
	victims = calloc(ledger->n ? ledger->n : 1, sizeof(*victims));
	if (!victims)
		return 0;
	take_out(ledger, &own, victims, &n);
	all.used = ledger->bytes;
	all.goal = goal(ledger->bytes, bytes, ledger->max_bytes);
	take_out(ledger, &all, victims, &n);
	*ret_victims = victims;
	return n;
}
