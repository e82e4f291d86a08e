/* SPDX-License-Identifier: MIT */
/* key_table.c: see key_table.h. */
#include "key_table.h"

#include <stdlib.h>
#include <string.h>

/* Any @n: costs are asked for before anybody has said that a table of so many may be. */
static uint64_t n_slots(uint32_t n)
{
	uint64_t slots = 2;

	while (slots < 2ull * n)
		slots *= 2;
	return slots;
}

uint64_t key_table_cost(uint32_t n)
{
	return (uint64_t)n * sizeof(struct record) + n_slots(n) * sizeof(struct slot);
}

/* The next of a row of numbers that look random as long as nobody knows the first. */
static uint64_t next_secret(uint64_t *seed)
{
	uint64_t z = *seed += 0x9e3779b97f4a7c15;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return z ^ z >> 31;
}

bool key_table_init(struct key_table *table, uint32_t n, uint64_t secret)
{
	*table = (struct key_table){.n = n, .hash_mask = (uint32_t)(n_slots(n) - 1)};
	table->records = aligned_alloc(LINE, (size_t)n * sizeof(struct record));
	table->slots = malloc(n_slots(n) * sizeof(struct slot));
	if (!table->records || !table->slots)
		return false;
	memset(table->slots, 0xff, n_slots(n) * sizeof(struct slot));
	memset(table->records, 0, (size_t)n * sizeof(struct record));
	for (size_t i = 0; i <= KEY_WORDS; i++)
		table->secret[i] = next_secret(&secret);
	return true;
}

void key_table_deinit(struct key_table *table)
{
	free(table->records);
	free(table->slots);
}

uint32_t key_table_find(const struct key_table *table, uint32_t hash,
			const uint8_t key[KVPOOL_KEY_BYTES])
{
	for (uint32_t at = hash & table->hash_mask;; at = (at + 1) & table->hash_mask) {
		const struct slot *slot = &table->slots[at];

		if (slot->record == NONE)
			return NONE;
		if (slot->hash == hash && record_has_key(&table->records[slot->record], key))
			return slot->record;
	}
}

void key_table_add(struct key_table *table, uint32_t hash, uint32_t record)
{
	uint32_t at = hash & table->hash_mask;

	while (table->slots[at].record != NONE)
		at = (at + 1) & table->hash_mask;
	table->slots[at] = (struct slot){.hash = hash, .record = record};
}

/* What stands behind moves up as far as it would be found there, so that no gap is left. */
void key_table_remove(struct key_table *table, uint32_t record)
{
	struct slot *slots = table->slots;
	uint32_t mask = table->hash_mask;
	uint32_t at = key_table_hash(table, table->records[record].key) & mask, next;

	while (slots[at].record != record)
		at = (at + 1) & mask;
	for (next = (at + 1) & mask; slots[next].record != NONE; next = (next + 1) & mask) {
		uint32_t from_its_own = (next - slots[next].hash) & mask;

		if (from_its_own < ((next - at) & mask))
			continue;
		slots[at] = slots[next];
		at = next;
	}
	slots[at].record = NONE;
}

void queue_append(struct key_table *table, struct queue *queue, uint32_t record)
{
	struct record *r = &table->records[record];

	r->before = queue->last;
	r->behind = NONE;
	if (queue->last == NONE)
		queue->first = record;
	else
		table->records[queue->last].behind = record;
	queue->last = record;
}

void queue_remove(struct key_table *table, struct queue *queue, uint32_t record)
{
	const struct record *r = &table->records[record];

	if (r->before == NONE)
		queue->first = r->behind;
	else
		table->records[r->before].behind = r->behind;
	if (r->behind == NONE)
		queue->last = r->before;
	else
		table->records[r->behind].before = r->before;
}
