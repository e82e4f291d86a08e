/* SPDX-License-Identifier: MIT */
/*
 * gemm.h: C = A B and C += A B for blocks that fit the caches, out of operand.h's tiles; and
 * transposing, for whoever needs a B.
 *
 * Floats of A are read one at a time and broadcast, so any pair of strides is as good as another
 * and a transposed A costs nothing. B is read in whole vectors: panels of it, or rows of floats as
 * they are.
 */
#ifndef FMHA_CPU_GEMM_H
#define FMHA_CPU_GEMM_H

#include <stdbool.h>

#include "operand.h"

/*
 * Rows of memory that something after this product reads. Each of its tiles asks for a few lines,
 * so that they come into the second-level cache while the multipliers are busy; more at a time
 * would take the buffers from the product's own misses.
 */
struct fetch {
	const char *row;
	int64_t stride; /* bytes */
	int32_t bytes, n_rows;
};

struct fetches {
	struct fetch list[8];
	int32_t first, n; /* of the list: the one in work, the end */
	int32_t at;       /* bytes of its row asked for already */
	int32_t lines;    /* of every step */
};

static inline void fetches_add(struct fetches *f, const void *rows, int64_t stride, int64_t bytes,
			       int32_t n_rows)
{
	if (n_rows > 0)
		f->list[f->n++] = (struct fetch){rows, stride, (int32_t)bytes, n_rows};
}

/* Starts on the list: all of it in @n_steps steps. */
static inline void fetches_begin(struct fetches *f, int32_t n_steps)
{
	int32_t lines = 0;

	for (int32_t i = 0; i < f->n; i++)
		lines += (f->list[i].bytes + 63) / 64 * f->list[i].n_rows;
	f->lines = (lines + n_steps - 1) / n_steps;
	f->first = f->at = 0;
}

static inline void fetches_step(struct fetches *f)
{
	for (int32_t i = 0; i < f->lines && f->first < f->n; i++) {
		struct fetch *fetch = &f->list[f->first];

		__builtin_prefetch(fetch->row + f->at, 0, 2);
		f->at += 64;
		if (f->at < fetch->bytes)
			continue;
		f->at = 0;
		fetch->row += fetch->stride;
		f->first += --fetch->n_rows == 0;
	}
}

/*
 * C [m x n] = A [m x k] B [k x n], or C += A B when @accumulate. Whole vectors are written: rows of
 * C have room for n rounded up to COLUMN_UNIT; with a tile unit whole groups of rows, too.
 */
static inline void gemm(int32_t m, int32_t n, int32_t k, struct gemm_a a, struct gemm_b b, float *c,
			int64_t ldc, bool accumulate, struct fetches *fetches)
{
	static const float ones[GROUP_ROWS] = {[0 ... GROUP_ROWS - 1] = 1};

	for (int32_t column = 0; column < n; column += PANEL) {
		struct gemm_b panel = {b.data + column / PANEL * b.panel_stride, 0, b.k_stride};

		for (int32_t row = 0; row < m; row += GROUP_ROWS) {
			struct gemm_a group = {a.data + row * a.row_stride, a.row_stride,
					       a.k_stride};

			fetches_step(fetches);
			operand_multiply(group, panel, c + row * ldc + column, ldc, k,
					 accumulate ? ones : NULL,
					 m - row < GROUP_ROWS ? m - row : GROUP_ROWS,
					 n - column < PANEL ? n - column : PANEL, NULL);
		}
	}
}

/* Element i of vector j goes to element j of vector i: each of the log2(LANES) rounds interleaves
 * vector i with vector i + LANES / 2. */
static inline __attribute__((always_inline)) void transpose(vf x[LANES])
{
#pragma GCC unroll 4
	for (int round = 1; round < LANES; round *= 2) {
		vf y[LANES];

#pragma GCC unroll 8
		for (int i = 0; i < LANES / 2; i++) {
			vf a = x[i], b = x[i + LANES / 2];
#if LANES == 16
			y[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20,
							   5, 21, 6, 22, 7, 23);
			y[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27,
							       12, 28, 13, 29, 14, 30, 15, 31);
#elif LANES == 8
			y[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
			y[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
			y[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
			y[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
		}
#pragma GCC unroll 16
		for (int i = 0; i < LANES; i++)
			x[i] = y[i];
	}
}

/* Asks for @n rows of @columns, to be in the second-level cache when they are needed. */
static inline void prefetch_rows(const operand *x, int64_t ld, int32_t n, int32_t columns)
{
	for (int32_t row = 0; row < n; row++)
		for (int32_t c = 0; c < columns; c += 64 / (int)sizeof(*x))
			__builtin_prefetch(x + row * ld + c, 0, 2);
}

/*
 * X [rows x k], row stride @ld, becomes the panels of its transpose: B [k x rows]. Columns past
 * @rows, up to a whole panel, are zero. k is a multiple of LANES. @next: as many rows, fetched
 * meanwhile; NULL: none.
 */
static inline void pack_transposed(float *to, const float *x, int64_t ld, int32_t rows, int32_t k,
				   const struct gemm_a *next)
{
	static const float no_row[LANES];

	for (int32_t row = 0; row < ROUND_UP(rows, PANEL); row += LANES) {
		float *strip = to + row / PANEL * (int64_t)k * PANEL + row % PANEL;

		if (next && row + LANES <= rows)
			prefetch_rows(next->data + row * next->row_stride, next->row_stride, LANES,
				      k * OPERAND_PAIR);
		for (int32_t step = 0; step < k; step += LANES) {
			vf block[LANES];

#pragma GCC unroll 16
			for (int i = 0; i < LANES; i++)
				block[i] = vf_load(row + i < rows ? x + (row + i) * ld + step
								  : no_row);
			transpose(block);
#pragma GCC unroll 16
			for (int i = 0; i < LANES; i++)
				vf_store(strip + (int64_t)(step + i) * PANEL, block[i]);
		}
	}
}

#endif
