/* SPDX-License-Identifier: MIT */
/*
 * cache.c: plans by shape. The key leaves out where the tensors lie and the dropout state, which go
 * along with each run. So a loop over layers or a cache that moves through one pool of memory needs
 * one plan.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define PLAN_CACHE_SIZE 64

/* Kernels may depend on how a tensor is aligned, up to this many bytes. */
#define KEY_ALIGNMENT 16

struct cached_plan {
	struct fmha_plan *plan; /* one reference; NULL: free slot */
	struct cache_key key;
	uint64_t last_use;
};

/* FNV-1a over 8-byte words: keys differ in few places, speed matters more than spread. */
static uint64_t hash_problem(const struct fmha_problem *key)
{
	const uint8_t *bytes = (const uint8_t *)key;
	uint64_t hash = UINT64_C(0xcbf29ce484222325);

	for (size_t i = 0; i + 8 <= sizeof(*key); i += 8) {
		uint64_t word;

		memcpy(&word, bytes + i, 8);
		hash = (hash ^ word) * UINT64_C(0x100000001b3);
		hash ^= hash >> 29;
	}
	return hash;
}

void cache_key_of(const struct fmha_problem *problem, struct cache_key *ret_key)
{
	struct fmha_problem *key = &ret_key->problem;

	*key = *problem;
	key->dropout_seed = key->dropout_offset = 0;
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &key->tensor[role];

		tensor->buffer = tensor->buffer != 0;
		tensor->offset %= KEY_ALIGNMENT;
		tensor->data = NULL;
	}
	ret_key->hash = hash_problem(key);
}

/* Bytes that differ without a meaning (padding, NaN) cost a second plan and nothing else. */
static bool is_plan_of(const struct cached_plan *entry, const struct cache_key *key)
{
	return entry->plan && entry->key.hash == key->hash &&
	       // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
	       memcmp(&entry->key.problem, &key->problem, sizeof(key->problem)) == 0;
}

struct fmha_plan *cache_find(struct fmha_device *device, const struct cache_key *key)
{
	struct fmha_plan *plan = NULL;

	(void)pthread_mutex_lock(&device->lock);
	for (uint32_t i = 0; device->cache && i < PLAN_CACHE_SIZE; i++) {
		struct cached_plan *entry = &device->cache[i];

		if (is_plan_of(entry, key)) {
			entry->last_use = ++device->cache_clock;
			plan = plan_ref(entry->plan);
			break;
		}
	}
	(void)pthread_mutex_unlock(&device->lock);
	return plan;
}

/* In the place of the least recently used. A cache that cannot be allocated keeps nothing. */
void cache_put(struct fmha_device *device, const struct cache_key *key, struct fmha_plan *plan,
	       bool replace)
{
	struct cached_plan *place = NULL;
	struct fmha_plan *old = NULL;

	(void)pthread_mutex_lock(&device->lock);
	if (!device->cache)
		device->cache = calloc(PLAN_CACHE_SIZE, sizeof(*device->cache));
	for (uint32_t i = 0; device->cache && i < PLAN_CACHE_SIZE; i++) {
		struct cached_plan *entry = &device->cache[i];

		if (is_plan_of(entry, key)) {
			place = replace ? entry : NULL;
			break;
		}
		if (!place || (place->plan && (!entry->plan || entry->last_use < place->last_use)))
			place = entry;
	}
	if (place) {
		old = place->plan;
		place->plan = plan_ref(plan);
		place->key = *key;
		place->last_use = ++device->cache_clock;
	}
	(void)pthread_mutex_unlock(&device->lock);
	(void)plan_unref(old);
}

void cache_drop(struct fmha_device *device, uint64_t id)
{
	struct fmha_plan *dropped[PLAN_CACHE_SIZE];
	uint32_t n = 0;

	(void)pthread_mutex_lock(&device->lock);
	for (uint32_t i = 0; device->cache && i < PLAN_CACHE_SIZE; i++) {
		struct cached_plan *entry = &device->cache[i];
		bool named = id == 0;

		if (!entry->plan)
			continue;
		for (uint32_t role = 0; role < FMHA_N_TENSORS && !named; role++)
			named = entry->plan->problem.tensor[role].buffer == id;
		if (named) {
			dropped[n++] = entry->plan;
			entry->plan = NULL;
		}
	}
	(void)pthread_mutex_unlock(&device->lock);
	for (uint32_t i = 0; i < n; i++)
		(void)plan_unref(dropped[i]);
}
