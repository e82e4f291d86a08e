/* SPDX-License-Identifier: MIT */
/*
 * registry.c: spaces, states and lookups. The states live in a hash table keyed by the spec itself,
 * which is a flat value; a kernel without an entry is in its default state.
 */
#include "impl.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>
#include <specs/filter.h>
#include <specs/validate.h>

#define FIRST_TABLE_SIZE 64

void registry_device_archs(struct registry_device *device, const char *arch)
{
	static const char *const levels[] = {"x86_64_amx", "x86_64_v4_bf16", "x86_64_v4",
					     "x86_64_v3", "portable"};
	size_t n = sizeof(levels) / sizeof(levels[0]), i = 0;

	device->n_archs = 0;
	while (i < n && strcmp(levels[i], arch) != 0)
		i++;
	if (i == n)
		device->archs[device->n_archs++] = arch;
	for (; i < n; i++)
		device->archs[device->n_archs++] = levels[i];
}

int registry_new(const struct spec_catalog *catalog, const struct registry_device *device,
		 struct registry **ret_registry, struct fmha_error *err)
{
	struct registry *registry = calloc(1, sizeof(*registry));
	int r = 0;

	if (!registry)
		return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
	registry->catalog = catalog;
	pthread_mutex_init(&registry->mutex, NULL);
	(void)snprintf(registry->device, sizeof(registry->device), "%s", device->name);
	(void)snprintf(registry->environment, sizeof(registry->environment), "%s",
		       device->environment);
	registry->source = device->source;
	assert(device->n_archs <= REGISTRY_MAX_ARCHS);
	for (size_t i = 0; i < device->n_archs; i++) {
		int arch = spec_arch_find(catalog, device->archs[i]);

		if (arch >= 0 && (device->source || spec_arch_model(catalog, arch)))
			registry->archs[registry->n_archs++] = arch;
	}
	if (registry->n_archs == 0)
		r = fmha_error_set_field(err, FMHA_ENOENT, "arch",
					 "arch %s: there is none; `fmhactl archs` lists them",
					 device->n_archs ? device->archs[0] : "(none)");
	if (r == 0)
		r = registry_load_set(registry, "default", "[\"*\"]", 5, NULL, err);
	if (r < 0) {
		registry_free(registry);
		return r;
	}
	*ret_registry = registry;
	return 0;
}

struct registry *registry_free(struct registry *registry)
{
	if (!registry)
		return NULL;
	registry_clear_results(registry);
	for (size_t i = 0; i < registry->table_size; i++)
		free(registry->table[i]);
	free(registry->table);
	for (size_t i = 0; i < registry->n_sets; i++)
		registry_set_deinit(&registry->sets[i]);
	pthread_mutex_destroy(&registry->mutex);
	free(registry);
	return NULL;
}

const struct spec_catalog *registry_catalog(const struct registry *registry)
{
	return registry->catalog;
}

size_t registry_n_archs(const struct registry *registry)
{
	return registry->n_archs;
}

const char *registry_arch_name(const struct registry *registry, size_t arch)
{
	return spec_arch_name(registry->catalog, registry->archs[arch]);
}

static int count_one(void *owner, const struct kernel_spec *spec)
{
	uint64_t *n = owner;

	(void)spec;
	++*n;
	return 0;
}

/* All kernels of an arch. */
static int each_kernel(const struct registry *registry, size_t arch, spec_visit visit, void *owner)
{
	if (registry->source)
		return registry->source->each(registry->source, arch, NULL, visit, owner);
	return spec_own_each(registry->catalog, registry->archs[arch], NULL, visit, owner);
}

uint64_t registry_count(struct registry *registry)
{
	uint64_t n = registry->n_kernels;

	for (size_t i = 0; !registry->n_kernels && i < registry->n_archs; i++)
		(void)each_kernel(registry, i, count_one, &n);
	registry->n_kernels = n;
	return n;
}

/* ---- states ---- */

static size_t slot_of(const struct registry *registry, const struct kernel_spec *spec,
		      uint64_t hash)
{
	size_t mask = registry->table_size - 1, i = hash & mask;

	while (registry->table[i] && (registry->table[i]->hash != hash ||
				      spec_compare(&registry->table[i]->spec, spec) != 0))
		i = (i + 1) & mask;
	return i;
}

static bool table_grow(struct registry *registry)
{
	struct registry_entry **old = registry->table;
	size_t old_size = registry->table_size;
	size_t size = old_size ? old_size * 2 : FIRST_TABLE_SIZE;
	struct registry_entry **table = calloc(size, sizeof(struct registry_entry *));

	if (!table)
		return false;
	registry->table = table;
	registry->table_size = size;
	for (size_t i = 0; i < old_size; i++)
		if (old[i])
			table[slot_of(registry, &old[i]->spec, old[i]->hash)] = old[i];
	free(old);
	return true;
}

struct registry_entry *registry_entry_find(struct registry *registry,
					   const struct kernel_spec *spec, bool create)
{
	struct registry_entry *entry;
	uint64_t hash;
	size_t slot;

	if (!create && registry->n_entries == 0)
		return NULL; /* what most lookups meet */
	hash = spec_hash(spec);
	if (create && registry->n_entries * 2 >= registry->table_size && !table_grow(registry))
		return NULL;
	slot = slot_of(registry, spec, hash);
	if (registry->table[slot] || !create)
		return registry->table[slot];
	if (registry->n_entries >= REGISTRY_MAX_KERNELS)
		return NULL;
	entry = calloc(1, sizeof(*entry));
	if (!entry)
		return NULL;
	entry->spec = *spec;
	entry->hash = hash;
	registry->table[slot] = entry;
	registry->n_entries++;
	hash = spec_signature_hash(&spec->signature) % REGISTRY_SIGNATURE_BITS;
	registry->signatures[hash / 64] |= 1ULL << (hash % 64);
	return entry;
}

void registry_fill_info(struct registry *registry, const struct kernel_spec *spec, const char *name,
			struct registry_info *ret_info)
{
	const struct registry_entry *entry = registry_entry_find(registry, spec, false);

	*ret_info = (struct registry_info){0};
	if (entry) {
		ret_info->flags = entry->flags;
		ret_info->priority = entry->priority;
		ret_info->n_tuned = entry->n_tuned;
		ret_info->n_runs = entry->n_runs;
		ret_info->run_ns = entry->run_ns;
	}
	registry_sets_judge(registry, spec, name, ret_info);
}

void registry_get_info(struct registry *registry, const struct kernel_spec *spec,
		       struct registry_info *ret_info)
{
	pthread_mutex_lock(&registry->mutex);
	registry_fill_info(registry, spec, NULL, ret_info);
	pthread_mutex_unlock(&registry->mutex);
}

/* Names that are older than one kernel's being one piece of code say more than the code's own. */
static bool has_kernel(const struct registry *registry, size_t arch, struct kernel_spec *spec)
{
	if (spec->gfx_arch != registry->archs[arch])
		return false;
	if (registry->source)
		return registry->source->has(registry->source, arch, spec);
	if (spec_pipeline_flags(registry->catalog, spec->pipeline) < 0 ||
	    spec_validate(registry->catalog, spec, NULL) != 0)
		return false;
	spec_reduce(registry->catalog, spec);
	return true;
}

int registry_find(struct registry *registry, const char *name, struct kernel_spec *ret_spec,
		  struct registry_info *ret_info, struct fmha_error *err)
{
	struct fmha_error why = {0};
	struct kernel_spec spec;
	bool known = false;

	if (spec_name_parse(registry->catalog, name, &spec, &why) < 0)
		return fmha_error_set_field(err, FMHA_ENOENT, "kernel", "%.120s: no kernel: %.100s",
					    name, why.msg);
	for (size_t i = 0; i < registry->n_archs && !known; i++)
		known = has_kernel(registry, i, &spec);
	if (!known)
		return fmha_error_set_field(err, FMHA_ENOENT, "kernel",
					    "%.180s: not a kernel of this device", name);
	if (ret_spec)
		*ret_spec = spec;
	if (ret_info)
		registry_get_info(registry, &spec, ret_info);
	return 0;
}

int registry_entry_lock(struct registry *registry, const char *name,
			struct registry_entry **ret_entry, struct fmha_error *err)
{
	struct kernel_spec spec;
	int r = registry_find(registry, name, &spec, NULL, err);

	if (r < 0)
		return r;
	pthread_mutex_lock(&registry->mutex);
	*ret_entry = registry_entry_find(registry, &spec, true);
	if (*ret_entry)
		return 0;
	pthread_mutex_unlock(&registry->mutex);
	return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
}

int registry_set_flags(struct registry *registry, const char *name, uint32_t set, uint32_t clear,
		       struct fmha_error *err)
{
	struct registry_entry *entry;
	int r = registry_entry_lock(registry, name, &entry, err);

	if (r < 0)
		return r;
	entry->flags = (entry->flags | set) & ~clear;
	registry->generation += ((set | clear) & REGISTRY_QUARANTINED) != 0;
	pthread_mutex_unlock(&registry->mutex);
	return 0;
}

void registry_clear_flags(struct registry *registry, uint32_t flags)
{
	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->table_size; i++)
		if (registry->table[i])
			registry->table[i]->flags &= ~flags;
	registry->generation += (flags & REGISTRY_QUARANTINED) != 0;
	pthread_mutex_unlock(&registry->mutex);
}

int registry_set_priority(struct registry *registry, const char *name, int32_t priority,
			  struct fmha_error *err)
{
	struct registry_entry *entry;
	int r = registry_entry_lock(registry, name, &entry, err);

	if (r < 0)
		return r;
	entry->priority = priority;
	registry->generation++;
	pthread_mutex_unlock(&registry->mutex);
	return 0;
}

void registry_add_run(struct registry *registry, const struct kernel_spec *spec, uint64_t ns,
		      struct registry_entry **entry)
{
	struct registry_entry *found = NULL;

	if (!entry)
		entry = &found;
	pthread_mutex_lock(&registry->mutex);
	if (!*entry)
		*entry = registry_entry_find(registry, spec, true);
	if (*entry) { /* else out of memory: a statistic is lost */
		(*entry)->n_runs++;
		(*entry)->run_ns += ns;
	}
	pthread_mutex_unlock(&registry->mutex);
}

/* ---- lookups ---- */

/* Is one state known to hold for all kernels of the signature? */
static bool judge_signature(struct registry *registry, const struct kernel_signature *signature,
			    struct registry_info *ret_info)
{
	uint64_t bit = spec_signature_hash(signature) % REGISTRY_SIGNATURE_BITS;
	bool plain;

	pthread_mutex_lock(&registry->mutex);
	plain = !(registry->signatures[bit / 64] >> (bit % 64) & 1);
	for (size_t i = 0; i < registry->n_sets; i++)
		plain &= registry->sets[i].everything;
	*ret_info = (struct registry_info){0};
	if (plain) /* no set asks for the name, so none is needed */
		registry_sets_judge(registry, NULL, NULL, ret_info);
	pthread_mutex_unlock(&registry->mutex);
	return plain;
}

size_t registry_head_dims(const struct registry *registry, size_t arch, enum spec_family family,
			  enum spec_dtype dtype,
			  struct spec_head_dims ret_pairs[SPEC_MAX_HEAD_DIMS])
{
	if (registry->source)
		return registry->source->head_dims(registry->source, arch, family, dtype,
						   ret_pairs);
	return spec_own_head_dims(registry->catalog, registry->archs[arch], family, ret_pairs);
}

void registry_reduce(const struct registry *registry, size_t arch,
		     struct kernel_signature *signature)
{
	if (registry->source)
		registry->source->reduce(registry->source, arch, signature);
	else
		spec_own_reduce(registry->catalog, registry->archs[arch], signature);
}

/* Candidates, each with its state. */
struct candidates {
	struct registry *registry;
	bool is_plain; /* plain is the state of all */
	struct registry_info plain;
	registry_candidate each;
	void *owner;
};

static int visit_candidate(void *owner, const struct kernel_spec *spec)
{
	const struct candidates *c = owner;
	struct registry_info info = c->plain;

	if (!c->is_plain)
		registry_get_info(c->registry, spec, &info);
	return c->each(c->owner, spec, &info);
}

int registry_candidates(struct registry *registry, size_t arch,
			const struct kernel_signature *wanted, registry_candidate each, void *owner)
{
	struct candidates c = {.registry = registry, .each = each, .owner = owner};
	struct kernel_spec specs[SPEC_MAX_CANDIDATES];
	struct kernel_signature reduced = *wanted;
	size_t n;
	int r = 0;

	registry_reduce(registry, arch, &reduced);
	c.is_plain = judge_signature(registry, &reduced, &c.plain);
	if (registry->source)
		return registry->source->each(registry->source, arch, &reduced, visit_candidate,
					      &c);
	n = spec_candidates(registry->catalog, registry->archs[arch], wanted, specs);
	for (size_t i = 0; i < n && r == 0; i++)
		r = visit_candidate(&c, &specs[i]);
	return r;
}

/* ---- walks ---- */

static int compare_specs(const void *x, const void *y)
{
	return spec_compare(x, y);
}

static int visit_one(struct registry *registry, const struct kernel_spec *spec,
		     registry_visit visit, void *owner)
{
	char name[SPEC_NAME_BYTES];
	struct registry_info info;

	(void)spec_name_format(registry->catalog, spec, name);
	pthread_mutex_lock(&registry->mutex);
	registry_fill_info(registry, spec, name, &info);
	pthread_mutex_unlock(&registry->mutex);
	return visit(owner, spec, name, &info);
}

int registry_each_known(struct registry *registry, registry_visit visit, void *owner,
			struct fmha_error *err)
{
	struct kernel_spec *specs;
	size_t n = 0;
	int r = 0;

	pthread_mutex_lock(&registry->mutex);
	specs = calloc(registry->n_entries + 1, sizeof(*specs));
	for (size_t i = 0; specs && i < registry->table_size; i++)
		if (registry->table[i])
			specs[n++] = registry->table[i]->spec;
	pthread_mutex_unlock(&registry->mutex);
	if (!specs)
		return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
	qsort(specs, n, sizeof(*specs), compare_specs);
	for (size_t i = 0; i < n && r == 0; i++)
		r = visit_one(registry, &specs[i], visit, owner);
	free(specs);
	return r;
}

struct visiting {
	struct registry *registry;
	const struct spec_filter *filter;
	registry_visit visit;
	void *owner;
};

static int visit_kernel(void *owner, const struct kernel_spec *spec)
{
	const struct visiting *v = owner;

	if (v->filter && !spec_filter_match(v->filter, spec))
		return 0;
	return visit_one(v->registry, spec, v->visit, v->owner);
}

int registry_each(struct registry *registry, const char *filter_text, registry_visit visit,
		  void *owner, struct fmha_error *err)
{
	struct spec_filter *filter = NULL;
	struct visiting v = {.registry = registry, .visit = visit, .owner = owner};
	int r = 0;

	if (filter_text && *filter_text)
		r = spec_filter_compile(registry->catalog, filter_text, &filter, NULL, err);
	v.filter = filter;
	for (size_t i = 0; r == 0 && i < registry->n_archs; i++)
		r = each_kernel(registry, i, visit_kernel, &v);
	spec_filter_free(filter);
	return r == FMHA_ENOMEM ? fmha_error_set(err, r, "registry: out of memory") : r;
}
