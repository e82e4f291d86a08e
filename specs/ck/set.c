// SPDX-License-Identifier: MIT
/* set.c: the list of kernels that a set comes to, none of them twice. See specs/set.h. */
#include <stdlib.h>

#include <proto/error.h>
#include <proto/fnv.h>

#include "set_impl.h"

/* A set has up to a million kernels, and no two of them the same. */
static size_t slot_of(const struct spec_set *set, const struct kernel_spec *spec)
{
	uint64_t hash = fnv_bytes(FNV_START, spec, sizeof(*spec));

	return (hash ^ hash >> 32) & (set->n_slots - 1);
}

static uint32_t *find_slot(const struct spec_set *set, const struct kernel_spec *spec)
{
	size_t i = slot_of(set, spec);

	while (set->slots[i] && memcmp(&set->kernels[set->slots[i] - 1], spec, sizeof(*spec)) != 0)
		i = (i + 1) & (set->n_slots - 1);
	return &set->slots[i];
}

/* Room for one more, with half of the slots empty. */
static int set_grow(struct spec_set *set, struct fmha_error *err)
{
	size_t n = set->n_allocated ? 2 * set->n_allocated : 64;
	struct kernel_spec *kernels;
	uint32_t *slots;

	if (set->n < set->n_allocated)
		return 0;
	kernels = realloc(set->kernels, n * sizeof(*kernels));
	if (!kernels)
		return no_memory(err);
	set->kernels = kernels;
	slots = calloc(2 * n, sizeof(*slots));
	if (!slots)
		return no_memory(err);
	free(set->slots);
	set->slots = slots;
	set->n_slots = 2 * n;
	set->n_allocated = n;
	for (size_t i = 0; i < set->n; i++)
		*find_slot(set, &set->kernels[i]) = (uint32_t)i + 1;
	return 0;
}

int set_add(struct spec_set *set, const struct kernel_spec *spec, struct fmha_error *err)
{
	uint32_t *slot;
	int r = set_grow(set, err);

	if (r < 0)
		return r;
	slot = find_slot(set, spec);
	if (*slot)
		return 0;
	if (set->n == SPEC_SET_MAX_KERNELS)
		return fmha_error_set(err, FMHA_EINVAL, "a set has %d kernels at most",
				      SPEC_SET_MAX_KERNELS);
	set->kernels[set->n++] = *spec;
	*slot = (uint32_t)set->n;
	return 0;
}

struct spec_set *spec_set_new(const struct spec_catalog *catalog)
{
	struct spec_set *set = calloc(1, sizeof(*set));

	if (set)
		set->catalog = catalog;
	return set;
}

struct spec_set *spec_set_free(struct spec_set *set)
{
	if (!set)
		return NULL;
	free(set->kernels);
	free(set->slots);
	free(set);
	return NULL;
}

size_t spec_set_size(const struct spec_set *set)
{
	return set->n;
}

const struct kernel_spec *spec_set_at(const struct spec_set *set, size_t index)
{
	return &set->kernels[index];
}
