/* SPDX-License-Identifier: MIT */
/*
 * slabs.h: memory for many objects of one size, in pieces of SLAB_BYTES that are given back one by one.
 * What malloc() has lies in one heap, which free() shrinks in one go once its top is free: thousands of
 * plans that end are milliseconds of whoever frees the last one.
 */
#ifndef FMHAD_BASE_SLABS_H
#define FMHAD_BASE_SLABS_H

#include <stddef.h>
#include <stdint.h>

#include <base/list.h>

#define SLAB_BYTES (256u << 10)

struct slabs {
	size_t bytes;          /* of an object, with what is kept before it */
	struct list with_room; /* struct slab */
	struct slab *spare;    /* an empty one, for the next object; NULL: none */
};

/* @bytes: of an object, less than SLAB_BYTES by some */
void slabs_init(struct slabs *slabs, size_t bytes);

/* All zero; NULL: out of memory. */
void *slabs_take(struct slabs *slabs);
void slabs_give_back(struct slabs *slabs, void *object);

#endif
