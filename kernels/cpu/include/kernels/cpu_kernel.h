/* SPDX-License-Identifier: MIT */
/*
 * cpu_kernel.h: a CPU kernel, as the CPU device sees it.
 *
 * A kernel is a list of phases, each a number of independent tasks; all tasks of a phase end before
 * the next phase starts. Tasks are small (one tile of query rows of one head, a few hundred
 * microseconds as a rule) so that the device's threads can take turns between requests. Those that
 * very long rows make long count their progress, so that nobody takes them for hanging, and end
 * early when nobody wants them any more. Kernels own no threads, no locks and no memory: the caller
 * passes one workspace a launch and one scratch block a thread.
 */
#ifndef FMHA_KERNELS_CPU_KERNEL_H
#define FMHA_KERNELS_CPU_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include <kernels/abi.h>
#include <kernels/cpu_level.h>

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

#endif
