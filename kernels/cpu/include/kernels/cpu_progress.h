/* SPDX-License-Identifier: MIT */
/* cpu_progress.h: how far a kernel is, told by the thread that runs it. */
#ifndef FMHA_KERNELS_CPU_PROGRESS_H
#define FMHA_KERNELS_CPU_PROGRESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

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

#endif
