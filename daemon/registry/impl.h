/* SPDX-License-Identifier: MIT */
/* impl.h: what the files of the registry share. */
#ifndef FMHAD_REGISTRY_IMPL_H
#define FMHAD_REGISTRY_IMPL_H

#include <pthread.h>

#include <registry/registry.h>

#define REGISTRY_SIGNATURE_BITS 8192

struct registry_tuned {
	char shape[REGISTRY_SHAPE_BYTES];
	double us;
};

/* A kernel with a state of its own. */
struct registry_entry {
	struct kernel_spec spec;
	uint64_t hash;
	uint32_t flags;
	int32_t priority;
	uint64_t n_runs, run_ns;
	struct registry_tuned *tuned;
	uint32_t n_tuned;
};

struct registry_set {
	char name[REGISTRY_NAME_BYTES];
	char **patterns;
	size_t n_patterns;
	bool everything; /* one pattern, "*": no need to build names */
};

struct registry {
	const struct spec_catalog *catalog;
	char device[REGISTRY_NAME_BYTES];
	size_t n_archs;
	struct spec_space *spaces[REGISTRY_MAX_ARCHS];

	pthread_mutex_t mutex;         /* guards all below */
	struct registry_entry **table; /* open addressing, a power of two */
	size_t table_size, n_entries;
	/* Signatures that have an entry, hashed to a bit: most lookups need not look at the table.
	 */
	uint64_t signatures[REGISTRY_SIGNATURE_BITS / 64];
	struct registry_set sets[REGISTRY_MAX_SETS];
	size_t n_sets;
};

/* The caller holds the mutex. NULL: no state, or out of memory when @create. */
struct registry_entry *registry_entry_find(struct registry *registry,
					   const struct kernel_spec *spec, bool create);
const struct registry_tuned *registry_entry_tuned(const struct registry_entry *entry,
						  const char *shape);
int registry_entry_set_tuned(struct registry_entry *entry, const char *shape, double us,
			     struct fmha_error *err);
/* The caller holds the mutex. @name: NULL to have it formatted when a set needs it. */
void registry_fill_info(struct registry *registry, const struct kernel_spec *spec, const char *name,
			struct registry_info *ret_info);

/* sets.c; the caller holds the mutex. */
void registry_sets_judge(struct registry *registry, const struct kernel_spec *spec,
			 const char *name, struct registry_info *ret_info);
bool registry_set_names(const struct registry_set *set, const char *name);
void registry_set_deinit(struct registry_set *set);

#endif
