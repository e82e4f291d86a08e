/* SPDX-License-Identifier: MIT */
/* launch.h: runs a CPU kernel the way a device does, with any number of threads. */
#ifndef TEST_KERNELS_LAUNCH_H
#define TEST_KERNELS_LAUNCH_H

#include <kernels/cpu_kernels.h>

/*
 * Runs every phase of @kernel; @n_threads threads take tasks from one counter. Workspace and
 * scratch are filled with NaN first, and what lies behind them is checked afterwards.
 */
void launch(const struct cpu_kernel *kernel, const void *args, int n_threads);

/* Finds and runs; fails the test when no kernel at or below @level accepts @args. */
void launch_family(enum cpu_level level, enum abi_family family, uint32_t dtype, const void *args,
		   int n_threads);

/* Levels that this machine can run, from portable up to cpu_level_detect(). */
int launch_has_level(enum cpu_level level);

/* The next level to try: all of them, but in builds with sanitizers, where a case takes many times as
 * long, the first and the last, unless FMHA_TEST_ALL is set. */
int launch_next_level(int level);

#endif
