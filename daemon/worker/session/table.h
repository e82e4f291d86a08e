/* SPDX-License-Identifier: MIT */
/*
 * table.h: what a connection owns, by id. An id is a slot and the slot's generation: an id that was
 * released never names the slot's next owner. 0 is no id.
 */
#ifndef FMHAD_WORKER_TABLE_H
#define FMHAD_WORKER_TABLE_H

#include <stdint.h>
#include <stdlib.h>

struct table_slot {
	void *object; /* NULL: free */
	uint32_t generation;
	uint32_t next_free; /* slot + 1; 0: the last one */
};

/* All zero is an empty table. */
struct table {
	struct table_slot *slots;
	uint32_t n_slots, n_used;
	uint32_t first_free; /* slot + 1 */
	uint32_t
		n_popped; /* slots from the first that table_pop() has found empty, or has emptied */
};

#define TABLE_FIRST_SLOTS 16

static inline int table_grow(struct table *table)
{
	uint32_t n = table->n_slots ? table->n_slots * 2 : TABLE_FIRST_SLOTS;
	struct table_slot *slots = realloc(table->slots, n * sizeof(*slots));

	if (!slots)
		return -1;
	for (uint32_t i = table->n_slots; i < n; i++)
		slots[i] = (struct table_slot){.generation = 1, .next_free = i + 1 < n ? i + 2 : 0};
	table->first_free = table->n_slots + 1;
	table->slots = slots;
	table->n_slots = n;
	return 0;
}

/* Return: the id, or 0 when out of memory. */
static inline uint64_t table_add(struct table *table, void *object)
{
	struct table_slot *slot;
	uint32_t number;

	if (!table->first_free && table_grow(table) < 0)
		return 0;
	number = table->first_free;
	slot = &table->slots[number - 1];
	table->first_free = slot->next_free;
	slot->object = object;
	table->n_used++;
	return (uint64_t)slot->generation << 32 | number;
}

static inline struct table_slot *table_find_slot(const struct table *table, uint64_t id)
{
	uint32_t number = (uint32_t)id;
	struct table_slot *slot;

	if (number == 0 || number > table->n_slots)
		return NULL;
	slot = &table->slots[number - 1];
	return slot->object && slot->generation == (uint32_t)(id >> 32) ? slot : NULL;
}

static inline void *table_get(const struct table *table, uint64_t id)
{
	struct table_slot *slot = table_find_slot(table, id);

	return slot ? slot->object : NULL;
}

/* Another object in the place of one that is there. Return: the one that was there. */
static inline void *table_replace(struct table *table, uint64_t id, void *object)
{
	struct table_slot *slot = table_find_slot(table, id);
	void *old = slot->object;

	slot->object = object;
	return old;
}

static inline void *table_remove_slot(struct table *table, struct table_slot *slot)
{
	void *object = slot->object;

	slot->object = NULL;
	slot->generation++; /* after 2^32 reuses of one slot an old id could match: accepted */
	slot->next_free = table->first_free;
	table->first_free = (uint32_t)(slot - table->slots) + 1;
	table->n_used--;
	return object;
}

/* Return: the object, or NULL when there is none of that id. */
static inline void *table_remove(struct table *table, uint64_t id)
{
	struct table_slot *slot = table_find_slot(table, id);

	return slot ? table_remove_slot(table, slot) : NULL;
}

/* Removes any one object, at the end of the table: nothing is added any more. NULL: it is empty. */
static inline void *table_pop(struct table *table)
{
	if (table->n_used == 0)
		return NULL;
	while (!table->slots[table->n_popped].object)
		table->n_popped++;
	return table_remove_slot(table, &table->slots[table->n_popped]);
}

static inline void table_deinit(struct table *table)
{
	free(table->slots);
	*table = (struct table){0};
}

#endif
