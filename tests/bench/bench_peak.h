/* SPDX-License-Identifier: MIT */
/* bench_peak.h: the yardsticks of bench_cpu: loops that do nothing but multiply and add, and a
 * copy. */
#ifndef FMHA_BENCH_PEAK_H
#define FMHA_BENCH_PEAK_H

#include <stddef.h>

#include <kernels/cpu_level.h>

enum peak_kind {
	PEAK_FMA,  /* f32, the widest vectors of the machine */
	PEAK_BF16, /* AVX512_BF16 dot products */
	PEAK_AMX,  /* bf16 tiles */
};

/* Runs about @n steps; returns the floating-point operations done. */
double peak_run(enum peak_kind kind, long n);

/* What bf16 kernels of this level are compared with. */
enum peak_kind peak_best_bf16(enum cpu_level level);

/* Copies with the machine's widest loads and non-temporal stores: no line is read to be written. */
void peak_copy(void *to, const void *from, size_t bytes);

#endif
