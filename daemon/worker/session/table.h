/* SPDX-License-Identifier: MIT */
/*
 * table.h: what a connection owns, by id. An id is a slot and the slot's generation: an id that was
 * released never names the slot's next owner. 0 is no id.
 */
#ifndef FMHAD_WORKER_TABLE_H
#define FMHAD_WORKER_TABLE_H

#include <stdint.h>

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

/* Return: the id, or 0 when out of memory. */
uint64_t table_add(struct table *table, void *object);
void *table_get(const struct table *table, uint64_t id);
/* Another object in the place of one that is there. Return: the one that was there. */
void *table_replace(struct table *table, uint64_t id, void *object);
/* Return: the object, or NULL when there is none of that id. */
void *table_remove(struct table *table, uint64_t id);
/* Removes any one object, at the end of the table: nothing is added any more. NULL: it is empty. */
void *table_pop(struct table *table);
void table_deinit(struct table *table);

#endif
