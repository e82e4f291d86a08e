/* SPDX-License-Identifier: MIT */
/*
 * cpu.h: the CPU kernels as the CPU device sees them.
 *
 * A kernel is a list of phases, each a number of independent tasks; all tasks of a phase end before
 * the next phase starts. Tasks are small (one tile of query rows of one head, a few hundred
 * microseconds as a rule) so that the device's threads can take turns between requests. Those that
 * very long rows make long count their progress, so that nobody takes them for hanging, and end
 * early when nobody wants them any more. Kernels own no threads, no locks and no memory: the caller
 * passes one workspace a launch and one scratch block a thread.
 */
#ifndef FMHA_KERNELS_CPU_H
#define FMHA_KERNELS_CPU_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kernels/abi.h>

enum cpu_level {
	CPU_PORTABLE,       /* plain C, any machine */
	CPU_X86_64_V3,      /* AVX2, FMA, F16C */
	CPU_X86_64_V4,      /* AVX-512 F, BW, DQ, VL */
	CPU_X86_64_V4_BF16, /* and AVX512_BF16 */
	CPU_X86_64_AMX,     /* and AMX-TILE, AMX-BF16, with the kernel's permission */
	CPU_N_LEVELS
};

/* "portable", "x86_64_v3", ...: the arch names of specs/. */
const char *cpu_level_name(enum cpu_level level);

/* Returns 0 and the level, or -1 for an unknown name. */
int cpu_level_from_name(const char *name, enum cpu_level *ret_level);

/* The best level this machine and its kernel offer. Asks the kernel for AMX state when needed. */
enum cpu_level cpu_level_detect(void);

struct cpu_kernel {
	enum abi_family family;
	uint32_t dtype; /* enum abi_dtype of q, k, v */
	enum cpu_level level;
	const char *pipeline; /* "cpu_flash", "cpu_decode", ...: the pipeline word of the spec */
	int32_t tile_m;       /* rows of a tile; 0: all of the pipeline's kernels have the same */

	/* 1 when this kernel can run @args (dtype and family already match), else 0. */
	int (*accepts)(const void *args);

	/* Shared by all tasks of a launch, 64-byte aligned, contents undefined at the start. */
	size_t (*workspace_bytes)(const void *args, int n_threads);
	/* Private to a thread while it runs a task, 64-byte aligned, contents undefined. */
	size_t (*scratch_bytes)(const void *args);

	int n_phases;
	int64_t (*n_tasks)(const void *args, int phase, int n_threads);
	void (*run)(const void *args, int phase, int64_t task, int n_threads, void *workspace,
		    void *scratch);
};

/* How far the task of a thread is, for whoever watches, and whether it may end early. */
struct cpu_progress {
	atomic_uint_fast64_t n_steps; /* written by this thread alone */
	const atomic_bool *stop;
};

/* The calling thread's; NULL: nobody watches. Set by whoever calls run(). */
extern _Thread_local struct cpu_progress *cpu_progress;

/*
 * For kernels, about once a tile: counts a step. Return: false: the task is to return without
 * writing any more results, since they would be made of what scratch and workspace held before.
 */
static inline bool cpu_goes_on(void)
{
	struct cpu_progress *progress = cpu_progress;

	if (!progress)
		return true;
	atomic_store_explicit(&progress->n_steps,
			      atomic_load_explicit(&progress->n_steps, memory_order_relaxed) + 1,
			      memory_order_relaxed);
	return !atomic_load_explicit(progress->stop, memory_order_relaxed);
}

/*
 * Every kernel of a level, best first within (family, dtype). A level's list holds only kernels
 * compiled for exactly that level; the caller walks down the levels for what a level lacks.
 * args points to the family's struct of abi.h.
 */
const struct cpu_kernel *const *cpu_kernels(enum cpu_level level, size_t *ret_n);

/* The first kernel at or below @level that accepts @args, or NULL. */
const struct cpu_kernel *cpu_kernel_find(enum cpu_level level, enum abi_family family,
					 uint32_t dtype, const void *args);

/* What built these kernels: the compiler, and a digest of their sources. Static strings. */
const char *cpu_build_compiler(void);
const char *cpu_build_sources(void);

#endif
