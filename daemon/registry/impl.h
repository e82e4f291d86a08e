/* SPDX-License-Identifier: MIT */
/* impl.h: what the files of the registry share. */
#ifndef FMHAD_REGISTRY_IMPL_H
#define FMHAD_REGISTRY_IMPL_H

#include <pthread.h>

#include <registry/registry.h>

#define REGISTRY_SIGNATURE_BITS 8192

/* A kernel with a state of its own. */
struct registry_entry {
	struct kernel_spec spec;
	uint64_t hash;
	bool quarantined;
	int32_t priority;
	uint64_t n_runs, run_ns;
	uint32_t n_tuned; /* rows of the registry's times that are this kernel's */
};

/* A verdict on one kernel, by the hash of its spec; others of the same place replace it. */
struct registry_verdict {
	uint64_t hash; /* 0: none */
	bool named;
};
#define REGISTRY_VERDICTS 4096

struct registry_set {
	char name[REGISTRY_NAME_BYTES];
	char **patterns;
	size_t n_patterns;
	bool everything; /* one pattern, "*": no need to build names */
	/* Verdicts on kernels that only old names of theirs are in; NULL: no pattern is about old names. */
	struct registry_verdict *verdicts;
};

struct registry {
	const struct spec_catalog *catalog;
	char device[REGISTRY_NAME_BYTES];
	char environment[REGISTRY_ENVIRONMENT_BYTES];
	size_t n_archs;
	int archs[REGISTRY_MAX_ARCHS];        /* words of the catalog */
	const struct registry_source *source; /* NULL: this build's own kernels */
	_Atomic(uint64_t) n_kernels;          /* 0: not counted yet */

	pthread_mutex_t mutex;         /* guards all below */
	struct registry_entry **table; /* open addressing, a power of two */
	size_t table_size, n_entries;
	/* Signatures that have an entry, hashed to a bit: most lookups need not look at the table.
	 */
	uint64_t signatures[REGISTRY_SIGNATURE_BITS / 64];
	struct registry_set sets[REGISTRY_MAX_SETS];
	size_t n_sets;
	struct times times;
	uint64_t generation;
};

/* The caller holds the mutex. NULL: no state, or out of memory when @create. */
struct registry_entry *registry_entry_find(struct registry *registry,
					   const struct kernel_spec *spec, bool create);
/* The caller holds the mutex. */
void registry_clear_results(struct registry *registry);

/* The caller holds the mutex. Whether it names kernels by words of old names. */
bool registry_is_old_pattern(const struct registry *registry, const char *pattern);
bool registry_set_names(const struct registry *registry, struct registry_set *set,
			const struct kernel_spec *spec, const char *name);
void registry_set_deinit(struct registry_set *set);

#endif
