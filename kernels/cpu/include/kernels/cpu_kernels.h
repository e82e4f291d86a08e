/* SPDX-License-Identifier: MIT */
/* cpu_kernels.h: the lists of all CPU kernels. */
#ifndef FMHA_KERNELS_CPU_KERNELS_H
#define FMHA_KERNELS_CPU_KERNELS_H

#include <kernels/cpu_kernel.h>

/*
 * Every kernel of a level, best first within (family, dtype). A level's list holds only kernels
 * compiled for exactly that level; the caller walks down the levels for what a level lacks.
 * args points to the family's struct of abi.h.
 */
const struct cpu_kernel *const *cpu_kernels(enum cpu_level level, size_t *ret_n);

/* The first kernel at or below @level that accepts @args, or NULL. */
const struct cpu_kernel *cpu_kernel_find(enum cpu_level level, enum abi_family family,
					 uint32_t dtype, const void *args);

#endif
