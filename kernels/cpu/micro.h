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

/* As many accumulators as the registers hold, with room for one row of B and one broadcast:
 * 24 + 2 + 1 of 32 on AVX-512, 12 + 2 + 1 of 16 below. */
#define MICRO_VECTORS 2
#if LANES == 16
#define MICRO_ROWS 12
#else
#define MICRO_ROWS 6
#endif
#define PANEL (MICRO_VECTORS * LANES)

struct micro_args {
	const float *a; /* a[r * a_row + k * a_step] */
	int64_t a_row, a_step;
	const float *b; /* b[k * PANEL + lane] */
	float *c;       /* c[r * c_row + lane] */
	int64_t c_row;
	int32_t k;
	/* c = first * c + A B; NULL: c = A B */
	const float *first;
};

static inline __attribute__((always_inline)) void
micro_tile(const struct micro_args *m, const int rows, const int vectors, const int unit_step)
{
	vf c[MICRO_ROWS][MICRO_VECTORS];
	const float *a = m->a, *b = m->b;
	int64_t a_row = m->a_row, a_step = unit_step ? 1 : m->a_step;

#pragma GCC unroll 16
	for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
		for (int v = 0; v < vectors; v++)
			c[r][v] = m->first ? vf_load(m->c + r * m->c_row + v * LANES) * m->first[r]
					   : (vf){0};
	}
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
		a += a_step;
		b += PANEL;
	}
#pragma GCC unroll 16
	for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
		for (int v = 0; v < vectors; v++)
			vf_store(m->c + r * m->c_row + v * LANES, c[r][v]);
	}
}

static void micro_full(const struct micro_args *m)
{
	micro_tile(m, MICRO_ROWS, MICRO_VECTORS, 1);
}

/* Any number of rows up to MICRO_ROWS. */
static void micro_multiply(const struct micro_args *m, int rows)
{
	struct micro_args part = *m;

	if (rows == MICRO_ROWS && m->a_step == 1) {
		micro_full(m);
		return;
	}
	while (rows > 0) {
		int n = rows >= 4 ? 4 : 1;

		if (n == 4 && m->a_step == 1)
			micro_tile(&part, 4, MICRO_VECTORS, 1);
		else if (n == 4)
			micro_tile(&part, 4, MICRO_VECTORS, 0);
		else
			micro_tile(&part, 1, MICRO_VECTORS, 0);
		part.a += n * part.a_row;
		part.c += n * part.c_row;
		if (part.first)
			part.first += n;
		rows -= n;
	}
}

#endif
