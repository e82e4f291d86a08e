/* SPDX-License-Identifier: MIT */
/*
 * level.h: included first by every source that is compiled once a level.
 *
 * CMake compiles such a source with the level's instruction flags, -DCPU_LEVEL=<enum cpu_level> and
 * -DCPU_SUFFIX=<short name>; CPU_NAME() keeps the levels' symbols apart. Everything else in such a
 * source is static: a function that two levels shared would be compiled with one level's
 * instructions and crash on machines without them.
 */
#ifndef FMHA_CPU_LEVEL_H
#define FMHA_CPU_LEVEL_H

#include <kernels/cpu_kernel.h>
#include <kernels/cpu_progress.h>

#define CPU_JOIN_(a, b) a##_##b
#define CPU_JOIN(a, b)  CPU_JOIN_(a, b)
#define CPU_NAME(name)  CPU_JOIN(name, CPU_SUFFIX)

#endif
