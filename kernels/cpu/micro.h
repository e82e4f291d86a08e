/* SPDX-License-Identifier: MIT */
/*
 * micro.h: the matrix multiply of the CPU kernels.
 *
 *   C [rows, PANEL] = A [rows, k] * B [k, PANEL]
 *
 * B is packed in panels of PANEL columns, k rows of PANEL consecutive floats. The inner kernel
 * keeps a tile of MICRO_ROWS x MICRO_VECTORS vectors of C in registers; each step loads one row of
 * the panel and broadcasts one element of each row of A, which may have any row stride. So the same
 * kernel serves S = Q K^T (K packed transposed), O += P V and, with A read down a column, the
 * products of backward.
 */
#ifndef FMHA_CPU_MICRO_H
#define FMHA_CPU_MICRO_H

#include "vec.h"

/* As many accumulators as the registers hold, with room for one row of B and one broadcast: 24 + 4
 * + 1 of 32 on AVX-512, 12 + 2 + 1 of 16 below. Wide tiles need fewer loads an accumulator than
 * tall ones. */
#if LANES == 16
#define MICRO_VECTORS 4
#else
#define MICRO_VECTORS 2
#endif
#define MICRO_ROWS 6
#define PANEL      (MICRO_VECTORS * LANES)

/* 0: nothing in this source uses micro_args.ahead, and its load a step is left out. */
#ifndef MICRO_AHEAD
#define MICRO_AHEAD 1
#endif

struct micro_args {
	const float *a; /* a[r * a_row + k * a_step] */
	int64_t a_row, a_step;
	const float *b; /* b[k * b_step + lane] */
	int64_t b_step; /* 0: PANEL */
	float *c;       /* c[r * c_row + lane] */
	int64_t c_row;
	int32_t k;
	/* c = first * c + A B; NULL: c = A B */
	const float *first;
	/* One line of memory a step, for the second-level cache: evenly between the
	 * multiplications, where a burst of requests would hold up the loads of B. NULL: none. */
	const void *ahead;
};

static inline __attribute__((always_inline)) void micro_tile(const struct micro_args *m,
							     const int rows, const int vectors)
{
	vf c[MICRO_ROWS][MICRO_VECTORS];
	const float *a = m->a, *b = m->b;
	int64_t a_row = m->a_row, a_step = m->a_step, b_step = m->b_step ? m->b_step : PANEL;
	/* Without @ahead the same line again and again, which costs less than a branch. */
	const char *ahead = m->ahead ? m->ahead : m->b;
	const int64_t line = m->ahead ? 64 : 0;

#pragma GCC unroll 16
	for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
		for (int v = 0; v < vectors; v++)
			c[r][v] = m->first ? vf_load(m->c + r * m->c_row + v * LANES) * m->first[r]
					   : (vf){0};
	}
#pragma GCC unroll 2
	for (int32_t k = 0; k < m->k; k++) {
		vf b_row[MICRO_VECTORS];

#pragma GCC unroll 4
		for (int v = 0; v < vectors; v++)
			b_row[v] = vf_load(b + v * LANES);
#pragma GCC unroll 16
		for (int r = 0; r < rows; r++) {
			vf x = vf_set1(a[r * a_row]);

#pragma GCC unroll 4
			for (int v = 0; v < vectors; v++)
				c[r][v] += x * b_row[v];
		}
		if (MICRO_AHEAD)
			__builtin_prefetch(ahead, 0, 2);
		ahead += line;
		a += a_step;
		b += b_step;
	}
#pragma GCC unroll 16
	for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
		for (int v = 0; v < vectors; v++)
			vf_store(m->c + r * m->c_row + v * LANES, c[r][v]);
	}
}

/* One instance for each size of tile, so that every loop over registers has constant bounds. */
#define MICRO_INSTANCE(rows, vectors)                                                              \
	static void micro_##rows##x##vectors(const struct micro_args *m)                           \
	{                                                                                          \
		micro_tile(m, rows, vectors);                                                      \
	}
#define MICRO_INSTANCES(vectors)                                                                   \
	MICRO_INSTANCE(1, vectors)                                                                 \
	MICRO_INSTANCE(2, vectors)                                                                 \
	MICRO_INSTANCE(3, vectors)                                                                 \
	MICRO_INSTANCE(4, vectors)                                                                 \
	MICRO_INSTANCE(5, vectors)                                                                 \
	MICRO_INSTANCE(6, vectors)
#define MICRO_NAMES(vectors)                                                                       \
	{                                                                                          \
		micro_1x##vectors, micro_2x##vectors, micro_3x##vectors, micro_4x##vectors,        \
			micro_5x##vectors, micro_6x##vectors,                                      \
	}

MICRO_INSTANCES(1)
MICRO_INSTANCES(2)
#if MICRO_VECTORS == 4
MICRO_INSTANCES(3)
MICRO_INSTANCES(4)
#endif

typedef void (*micro_function)(const struct micro_args *m);
static const micro_function micro_functions[MICRO_VECTORS][MICRO_ROWS] = {
	MICRO_NAMES(1),
	MICRO_NAMES(2),
#if MICRO_VECTORS == 4
	MICRO_NAMES(3),
	MICRO_NAMES(4),
#endif
};

/* @rows: 1 to MICRO_ROWS; @columns: of C that are wanted, at most PANEL; whole vectors are written.
 */
static inline void micro_multiply(const struct micro_args *m, int32_t rows, int32_t columns)
{
	micro_functions[(columns + LANES - 1) / LANES - 1][rows - 1](m);
}

#endif
