/* SPDX-License-Identifier: MIT */
/*
 * cpu_kernels.c: the list of every level's kernels.
 *
 * Each leveled source exports an array and its length; here they are joined, in order of
 * preference, once. The joined lists are constant after that.
 */
#include <assert.h>
#include <pthread.h>

#include <kernels/cpu_kernels.h>

#define MAX_KERNELS 256

struct source {
	enum cpu_level level;
	const struct cpu_kernel *kernels;
	const size_t *n_kernels;
};

/* X(name, suffix, level): one leveled source at one level, preferred ones first. */
#include "cpu_sources.h"

#define DECLARE_SOURCE(name, suffix, level)                                                        \
	extern const struct cpu_kernel name##_kernels_##suffix[];                                  \
	extern const size_t name##_n_kernels_##suffix;
CPU_SOURCES(DECLARE_SOURCE)
#undef DECLARE_SOURCE

#define LIST_SOURCE(name, suffix, level)                                                           \
	{level, name##_kernels_##suffix, &name##_n_kernels_##suffix},
static const struct source sources[] = {CPU_SOURCES(LIST_SOURCE)};
#undef LIST_SOURCE

static const struct cpu_kernel *lists[CPU_N_LEVELS][MAX_KERNELS];
static size_t list_lengths[CPU_N_LEVELS];
static pthread_once_t lists_once = PTHREAD_ONCE_INIT;

static void lists_fill(void)
{
	for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); i++) {
		size_t *n = &list_lengths[sources[i].level];

		for (size_t k = 0; k < *sources[i].n_kernels; k++) {
			assert(*n < MAX_KERNELS);
			lists[sources[i].level][(*n)++] = &sources[i].kernels[k];
		}
	}
}

const struct cpu_kernel *const *cpu_kernels(enum cpu_level level, size_t *ret_n)
{
	(void)pthread_once(&lists_once, lists_fill);
	*ret_n = list_lengths[level];
	return lists[level];
}

const struct cpu_kernel *cpu_kernel_find(enum cpu_level level, enum abi_family family,
					 uint32_t dtype, const void *args)
{
	const struct cpu_kernel *const *kernels;
	size_t n;

	for (int l = (int)level; l >= 0; l--) {
		kernels = cpu_kernels((enum cpu_level)l, &n);
		for (size_t i = 0; i < n; i++)
			if (kernels[i]->family == family && kernels[i]->dtype == dtype &&
			    kernels[i]->accepts(args))
				return kernels[i];
	}
	return NULL;
}
