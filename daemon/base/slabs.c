/* SPDX-License-Identifier: MIT */
#include <base/slabs.h>

#include <stdalign.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#define EACH_BY_ITSELF 1 /* so that a use after its end is found */
#else
#define EACH_BY_ITSELF 0
#endif

struct slab {
	struct list in_slabs;
	struct place *free;
	uint32_t n_used;
	alignas(max_align_t) char places[];
};

/* Before each object. */
struct place {
	struct slab *slab;
	struct place *next; /* that is free, too */
	alignas(max_align_t) char object[];
};

void slabs_init(struct slabs *slabs, size_t bytes)
{
	size_t unit = alignof(max_align_t);

	*slabs = (struct slabs){.bytes = (sizeof(struct place) + bytes + unit - 1) / unit * unit};
	list_init(&slabs->with_room);
}

static struct slab *make_slab(const struct slabs *slabs)
{
	struct slab *slab = mmap(NULL, SLAB_BYTES, PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	size_t n = (SLAB_BYTES - sizeof(*slab)) / slabs->bytes;

	if (slab == MAP_FAILED)
		return NULL;
	list_init(&slab->in_slabs);
	while (n-- > 0) {
		struct place *place = (struct place *)(slab->places + n * slabs->bytes);

		place->slab = slab;
		place->next = slab->free;
		slab->free = place;
	}
	return slab;
}

static struct slab *slab_with_room(struct slabs *slabs)
{
	struct slab *slab = slabs->spare;

	if (!list_is_empty(&slabs->with_room))
		return container_of(slabs->with_room.next, struct slab, in_slabs);
	slabs->spare = NULL;
	if (!slab)
		slab = make_slab(slabs);
	if (slab)
		list_append(&slabs->with_room, &slab->in_slabs);
	return slab;
}

void *slabs_take(struct slabs *slabs)
{
	struct place *place;
	struct slab *slab;

	if (EACH_BY_ITSELF)
		return calloc(1, slabs->bytes);
	slab = slab_with_room(slabs);
	if (!slab)
		return NULL;
	place = slab->free;
	slab->free = place->next;
	slab->n_used++;
	if (!slab->free)
		list_remove(&slab->in_slabs);
	return memset(place->object, 0, slabs->bytes - sizeof(*place));
}

void slabs_give_back(struct slabs *slabs, void *object)
{
	struct place *place;
	struct slab *slab;

	if (EACH_BY_ITSELF) {
		free(object);
		return;
	}
	place = container_of(object, struct place, object);
	slab = place->slab;
	if (!slab->free)
		list_append(&slabs->with_room, &slab->in_slabs);
	place->next = slab->free;
	slab->free = place;
	if (--slab->n_used > 0)
		return;
	list_remove(&slab->in_slabs);
	if (slabs->spare)
		(void)munmap(slab, SLAB_BYTES);
	else
		slabs->spare = slab;
}
