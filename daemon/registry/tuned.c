/* SPDX-License-Identifier: MIT */
/*
 * tuned.c: measured times. Each lies in its kernel's entry; a shape knows which entries have some
 * there, so that both questions are answered without a walk: how fast is this kernel here, and what
 * was measured here at all.
 */
#include "impl.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <proto/clamp.h>
#include <proto/error.h>

static struct registry_shape **slot_of(struct registry *registry, const char *key)
{
	uint64_t hash = 0xcbf29ce484222325;

	for (; *key; key++)
		hash = (hash ^ (uint8_t)*key) * 0x100000001b3;
	return &registry->shapes[hash % REGISTRY_SHAPE_SLOTS];
}

static struct registry_shape *find_shape(struct registry *registry, const char *key)
{
	struct registry_shape *shape = *slot_of(registry, key);

	while (shape && strcmp(shape->key, key) != 0)
		shape = shape->next;
	return shape;
}

static struct registry_shape *make_shape(struct registry *registry, const char *key)
{
	struct registry_shape **slot = slot_of(registry, key), *shape = calloc(1, sizeof(*shape));

	if (!shape)
		return NULL;
	(void)snprintf(shape->key, sizeof(shape->key), "%s", key);
	shape->next = *slot;
	*slot = shape;
	return shape;
}

static struct registry_tuned *find_result(const struct registry_entry *entry,
					  const struct registry_shape *shape, int32_t n_splits)
{
	for (uint32_t i = 0; i < entry->n_tuned; i++)
		if (entry->tuned[i].shape == shape && entry->tuned[i].n_splits == n_splits)
			return &entry->tuned[i];
	return NULL;
}

static bool has_results_at(const struct registry_entry *entry, const struct registry_shape *shape)
{
	for (uint32_t i = 0; i < entry->n_tuned; i++)
		if (entry->tuned[i].shape == shape)
			return true;
	return false;
}

static void drop_shape(struct registry *registry, struct registry_shape *shape)
{
	struct registry_shape **at = slot_of(registry, shape->key);

	while (*at != shape)
		at = &(*at)->next;
	*at = shape->next;
	free(shape->entries);
	free(shape);
}

static void drop_result(struct registry *registry, struct registry_entry *entry, uint32_t i)
{
	struct registry_shape *shape = entry->tuned[i].shape;

	entry->tuned[i] = entry->tuned[--entry->n_tuned];
	registry->n_results--;
	registry->generation++;
	if (has_results_at(entry, shape))
		return;
	for (uint32_t k = 0; k < shape->n_entries; k++)
		if (shape->entries[k] == entry)
			shape->entries[k--] = shape->entries[--shape->n_entries];
	if (shape->n_entries == 0)
		drop_shape(registry, shape);
}

static void drop_oldest(struct registry *registry)
{
	struct registry_entry *oldest = NULL;
	uint32_t index = 0;

	for (size_t i = 0; i < registry->table_size; i++) {
		struct registry_entry *entry = registry->table[i];

		for (uint32_t k = 0; entry && k < entry->n_tuned; k++)
			if (!oldest || entry->tuned[k].when_s < oldest->tuned[index].when_s) {
				oldest = entry;
				index = k;
			}
	}
	if (oldest)
		drop_result(registry, oldest, index);
}

void registry_clear_results(struct registry *registry)
{
	for (size_t i = 0; i < registry->table_size; i++) {
		struct registry_entry *entry = registry->table[i];

		if (!entry)
			continue;
		free(entry->tuned);
		entry->tuned = NULL;
		entry->n_tuned = 0;
	}
	for (size_t i = 0; i < REGISTRY_SHAPE_SLOTS; i++)
		while (registry->shapes[i])
			drop_shape(registry, registry->shapes[i]);
	registry->n_results = 0;
	registry->generation++;
}

/* Room for one more on both sides, before either is touched. */
static bool reserve(struct registry_entry *entry, struct registry_shape *shape)
{
	struct registry_tuned *tuned = realloc(entry->tuned, (entry->n_tuned + 1) * sizeof(*tuned));
	struct registry_entry **entries;

	if (!tuned)
		return false;
	entry->tuned = tuned;
	entries = realloc(shape->entries, (shape->n_entries + 1) * sizeof(struct registry_entry *));
	if (!entries)
		return false;
	shape->entries = entries;
	return true;
}

static int add_result(struct registry *registry, struct registry_entry *entry,
		      const struct registry_result *result, struct fmha_error *err)
{
	struct registry_shape *shape;

	if (registry->n_results >= REGISTRY_MAX_RESULTS)
		drop_oldest(registry);
	shape = find_shape(registry, result->shape);
	if (!shape)
		shape = make_shape(registry, result->shape);
	if (!shape || !reserve(entry, shape)) {
		if (shape && shape->n_entries == 0)
			drop_shape(registry, shape);
		return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
	}
	if (!has_results_at(entry, shape))
		shape->entries[shape->n_entries++] = entry;
	entry->tuned[entry->n_tuned++] = (struct registry_tuned){.shape = shape,
								 .n_splits = result->n_splits,
								 .us = result->us,
								 .when_s = result->when_s};
	registry->n_results++;
	registry->generation++;
	return 0;
}

int registry_entry_set_tuned(struct registry *registry, struct registry_entry *entry,
			     const struct registry_result *result, struct fmha_error *err)
{
	const struct registry_shape *shape = find_shape(registry, result->shape);
	struct registry_tuned *known = shape ? find_result(entry, shape, result->n_splits) : NULL;

	if (!*result->shape)
		return fmha_error_set_field(err, FMHA_EINVAL, "shape", "shape: is empty");
	if (!(result->us > 0 && result->us < REGISTRY_MAX_US))
		return fmha_error_set_field(err, FMHA_EINVAL, "us", "us %g: not a duration",
					    result->us);
	if (!known)
		return add_result(registry, entry, result, err);
	if (clamp_past(known->when_s, (int64_t)time(NULL)) > result->when_s)
		return 1;
	known->us = result->us;
	known->when_s = result->when_s;
	registry->generation++;
	return 0;
}

int registry_set_tuned(struct registry *registry, const char *name,
		       const struct registry_result *result, struct fmha_error *err)
{
	struct registry_entry *entry;
	int r = registry_entry_lock(registry, name, &entry, err);

	if (r < 0)
		return r;
	r = registry_entry_set_tuned(registry, entry, result, err);
	pthread_mutex_unlock(&registry->mutex);
	return r;
}

bool registry_get_tuned(struct registry *registry, const struct kernel_spec *spec,
			const char *shape_key, int32_t n_splits, double *ret_us)
{
	const struct registry_tuned *tuned = NULL;
	const struct registry_shape *shape;
	const struct registry_entry *entry;

	pthread_mutex_lock(&registry->mutex);
	shape = find_shape(registry, shape_key);
	entry = shape ? registry_entry_find(registry, spec, false) : NULL;
	if (entry)
		tuned = find_result(entry, shape, n_splits);
	if (tuned)
		*ret_us = tuned->us;
	pthread_mutex_unlock(&registry->mutex);
	return tuned != NULL;
}

/* In order, and no more than @most: then the slowest goes. Return: how many there are. */
static size_t insert(struct registry_measured *list, size_t n, size_t most,
		     const struct registry_measured *measured)
{
	size_t i = n < most ? n : most;

	if (n >= most && (most == 0 || list[most - 1].us <= measured->us))
		return n;
	if (n >= most)
		i--;
	for (; i > 0 && list[i - 1].us > measured->us; i--)
		list[i] = list[i - 1];
	list[i] = *measured;
	return n < most ? n + 1 : most;
}

size_t registry_measured_at(struct registry *registry, const char *shape_key,
			    struct registry_measured *ret_measured, size_t most)
{
	const struct registry_shape *shape;
	size_t n = 0;

	pthread_mutex_lock(&registry->mutex);
	shape = find_shape(registry, shape_key);
	for (uint32_t i = 0; shape && i < shape->n_entries; i++) {
		const struct registry_entry *entry = shape->entries[i];

		for (uint32_t k = 0; k < entry->n_tuned; k++) {
			const struct registry_measured measured = {
				.spec = entry->spec,
				.n_splits = entry->tuned[k].n_splits,
				.us = entry->tuned[k].us};

			if (entry->tuned[k].shape == shape)
				n = insert(ret_measured, n, most, &measured);
		}
	}
	pthread_mutex_unlock(&registry->mutex);
	return n;
}

uint64_t registry_generation(struct registry *registry)
{
	uint64_t generation;

	pthread_mutex_lock(&registry->mutex);
	generation = registry->generation;
	pthread_mutex_unlock(&registry->mutex);
	return generation;
}

uint64_t registry_forget(struct registry *registry, const char *pattern, const char *shape)
{
	uint64_t n = 0;

	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->table_size; i++) {
		struct registry_entry *entry = registry->table[i];
		char name[SPEC_NAME_BYTES];

		if (!entry || entry->n_tuned == 0)
			continue;
		(void)spec_name_format(registry->catalog, &entry->spec, name);
		if (fnmatch(pattern, name, FNM_NOESCAPE) != 0)
			continue;
		for (uint32_t k = entry->n_tuned; k-- > 0;) {
			if (*shape && strcmp(entry->tuned[k].shape->key, shape) != 0)
				continue;
			drop_result(registry, entry, k);
			n++;
		}
	}
	pthread_mutex_unlock(&registry->mutex);
	return n;
}

int registry_each_result(struct registry *registry, registry_visit_result visit, void *owner)
{
	int r = 0;

	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->table_size && r == 0; i++) {
		const struct registry_entry *entry = registry->table[i];
		char name[SPEC_NAME_BYTES];

		if (!entry || entry->n_tuned == 0)
			continue;
		(void)spec_name_format(registry->catalog, &entry->spec, name);
		for (uint32_t k = 0; k < entry->n_tuned && r == 0; k++) {
			const struct registry_tuned *tuned = &entry->tuned[k];
			struct registry_result result = {.n_splits = tuned->n_splits,
							 .us = tuned->us,
							 .when_s = tuned->when_s};

			(void)snprintf(result.shape, sizeof(result.shape), "%s", tuned->shape->key);
			r = visit(owner, name, &result);
		}
	}
	pthread_mutex_unlock(&registry->mutex);
	return r;
}
