/* SPDX-License-Identifier: MIT */
#include "table.h"

#include <stddef.h>
#include <stdlib.h>

#define FIRST_SLOTS 16

static int grow(struct table *table)
{
	uint32_t n = table->n_slots ? table->n_slots * 2 : FIRST_SLOTS;
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

uint64_t table_add(struct table *table, void *object)
{
	struct table_slot *slot;
	uint32_t number;

	if (!table->first_free && grow(table) < 0)
		return 0;
	number = table->first_free;
	slot = &table->slots[number - 1];
	table->first_free = slot->next_free;
	slot->object = object;
	table->n_used++;
	return (uint64_t)slot->generation << 32 | number;
}

static struct table_slot *find(const struct table *table, uint64_t id)
{
	uint32_t number = (uint32_t)id;
	struct table_slot *slot;

	if (number == 0 || number > table->n_slots)
		return NULL;
	slot = &table->slots[number - 1];
	return slot->object && slot->generation == (uint32_t)(id >> 32) ? slot : NULL;
}

void *table_get(const struct table *table, uint64_t id)
{
	struct table_slot *slot = find(table, id);

	return slot ? slot->object : NULL;
}

void *table_replace(struct table *table, uint64_t id, void *object)
{
	struct table_slot *slot = find(table, id);
	void *old = slot->object;

	slot->object = object;
	return old;
}

static void *remove_slot(struct table *table, struct table_slot *slot)
{
	void *object = slot->object;

	slot->object = NULL;
	slot->generation++; /* after 2^32 reuses of one slot an old id could match: accepted */
	slot->next_free = table->first_free;
	table->first_free = (uint32_t)(slot - table->slots) + 1;
	table->n_used--;
	return object;
}

void *table_remove(struct table *table, uint64_t id)
{
	struct table_slot *slot = find(table, id);

	return slot ? remove_slot(table, slot) : NULL;
}

void *table_pop(struct table *table)
{
	if (table->n_used == 0)
		return NULL;
	while (!table->slots[table->n_popped].object)
		table->n_popped++;
	return remove_slot(table, &table->slots[table->n_popped]);
}

void table_deinit(struct table *table)
{
	free(table->slots);
	*table = (struct table){0};
}
