/* SPDX-License-Identifier: MIT */
/* bench_cpu.h: what the tables of bench_cpu share: options, launches, tensors, yardsticks. */
#ifndef FMHA_BENCH_CPU_H
#define FMHA_BENCH_CPU_H

#include <stddef.h>
#include <stdint.h>

#include <kernels/cpu_kernels.h>
#include <kernels/cpu_progress.h>

#define MAX_THREADS 512

extern int n_threads, n_reps, quick;
extern enum cpu_level level;
extern const char *const dtype_names[];
extern double fma_peak, copy_rate; /* the best seen so far */

/* 1 when --only does not exclude it. */
int wanted(const char *name);

struct launch {
	const struct cpu_kernel *kernel;
	const void *args;
	void *workspace, *scratch[MAX_THREADS];
	int phase;
	int64_t n_tasks;
	_Atomic int64_t next;
	double *best;  /* seconds of each task, all phases; one thread only */
	int64_t first; /* of this phase in best */
};

void launch_init(struct launch *l, const struct cpu_kernel *kernel, const void *args);
void launch_deinit(struct launch *l);
/* Runs once. Seconds of this run, or, on one thread, of every task's best run so far. */
double launch_seconds(struct launch *l);

struct memory {
	void *at[16];
	int n;
};

void *allocate(size_t bytes);
void *keep(struct memory *m, size_t bytes);
int bytes_of(int dtype);
void fill(void *data, int dtype, size_t n);
/* [batch, seq, heads, dim], packed and filled. */
void tensor(struct memory *m, struct abi_tensor *t, int dtype, int batch, int seq, int heads,
	    int dim);

/* FLOP/s and bytes/s of all threads together, measured now. */
double yardstick_fma(void);
double measure_copy(void);

/* bench_cpu_backward.c: backward, combine, append. */
void bench_backward(void);

#endif
