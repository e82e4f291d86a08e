/* SPDX-License-Identifier: MIT */
/*
 * operand.h: what the matrix products of forward and backward multiply, and how.
 *
 * Up to x86_64_v4 operands are floats and the product is micro.h's. From x86_64_v4_bf16 on they are
 * bfloat16 as they come, and the processor multiplies pairs that are neighbours along k:
 *
 *   A   [rows, k], k even                        B   panels [k / 2][PANEL][2]
 *
 * AVX512_BF16 takes a pair of A and sixteen pairs of B at a time; AMX takes 16 x 32 of A and 32 x
 * 16 of B. The floats of C are the same in all cases.
 */
#ifndef FMHA_CPU_OPERAND_H
#define FMHA_CPU_OPERAND_H

#include "convert.h"
#include "micro.h"

#define ROUND_UP(n, unit) (((n) + (unit)-1) / (unit) * (unit))

#if !defined(__AVX512BF16__) || defined(OPERAND_FLOAT)
typedef float operand;
#define OPERAND_PAIR 1 /* neighbours along k that lie side by side in B */
#else
typedef uint16_t operand;
#define OPERAND_PAIR 2
#endif

/* Element (row, k) at data[row * row_stride + k * k_stride]; k_stride 1 of bfloat16. */
struct gemm_a {
	const operand *data;
	int64_t row_stride, k_stride;
};

/* Element (k, column), k even, at data[column / PANEL * panel_stride + k * k_stride + column %
 * PANEL * OPERAND_PAIR]: panels, with k_stride PANEL; or, of floats, also plain rows, with
 * panel_stride PANEL. */
struct gemm_b {
	const operand *data;
	int64_t panel_stride, k_stride;
};

#if OPERAND_PAIR == 1

#define OPERAND_DTYPE ABI_F32
#define OPERAND_TILES 0     /* products are made by a tile unit */
#define K_UNIT        LANES /* k is padded to this with zeros */
#define COLUMN_UNIT   LANES /* columns of S come in these */
#define ROW_UNIT      1     /* as k is where rows are summed over */
#define GROUP_ROWS    MICRO_ROWS
#define SCALES_Q      1 /* the scale is multiplied into Q, not into S */

static inline void operand_begin(void)
{
}

static inline void operand_end(void)
{
}

static inline void operand_load_row(operand *dst, const void *data, int32_t dtype, int64_t index,
				    int64_t stride, int32_t n)
{
	load_row(dst, data, dtype, index, stride, n);
}

static inline void operand_scale_row(operand *x, int32_t n, float factor)
{
	scale_row(x, n, factor);
}

static inline void operand_store(operand *p, vf x)
{
	vf_store(p, x);
}

static inline float operand_value(operand x)
{
	return x;
}

/* LANES elements of OPERAND_PAIR rows, @row apart, to their place in a panel of B. @zeros becomes
 * NaN when one of them is not finite. */
static inline void operand_store_rows(operand *to, const operand *from, int64_t row, vf *zeros)
{
	vf x = vf_load(from);

	(void)row;
	*zeros += x * 0.0f;
	vf_store(to, x);
}

/*
 * C [rows, columns] = first * C + A B, or A B when @first is NULL. @columns: of one panel. @ahead:
 * operand_lines() lines to fetch meanwhile, or NULL.
 */
static inline void operand_multiply(struct gemm_a a, struct gemm_b b, float *c, int64_t c_row,
				    int32_t k, const float *first, int32_t rows, int32_t columns,
				    const char *ahead)
{
	struct micro_args m = {
		.a = a.data,
		.a_row = a.row_stride,
		.a_step = a.k_stride,
		.b = b.data,
		.b_step = b.k_stride,
		.c = c,
		.c_row = c_row,
		.k = k,
		.first = first,
		.ahead = ahead,
	};

	micro_multiply(&m, rows, columns);
}

#else

#define OPERAND_DTYPE ABI_BF16
#define K_UNIT        32
#define COLUMN_UNIT   32
#define SCALES_Q      0 /* a scaled Q would be rounded */

/* Rows of 8 bits as bf16, a stretch at a time. */
static inline void load_narrow_row(operand *dst, const void *data, int32_t dtype, int64_t index,
				   int64_t stride, int32_t n)
{
	float some[64];

	for (int32_t i = 0, part; i < n; i += part) {
		part = n - i < 64 ? n - i : 64;
		load_row(some, data, dtype, index + i * stride, stride, part);
		store_row(dst + i, ABI_BF16, 0, 1, some, part);
	}
}

static inline void operand_load_row(operand *dst, const void *data, int32_t dtype, int64_t index,
				    int64_t stride, int32_t n)
{
	const uint16_t *from = (const uint16_t *)data + index;

	if (dtype != ABI_BF16) { /* 8 bits, whose every number is one of bf16, too */
		load_narrow_row(dst, data, dtype, index, stride, n);
		return;
	}
	if (stride == 1)
		memcpy(dst, from, (size_t)n * sizeof(*dst));
	else
		for (int32_t i = 0; i < n; i++)
			dst[i] = from[i * stride];
}

/* Exact where the factor is a power of two; a bf16 of the product otherwise. */
static inline void operand_scale_row(operand *x, int32_t n, float factor)
{
	float some[64];

	for (int32_t i = 0, part; i < n; i += part) {
		part = n - i < 64 ? n - i : 64;
		load_row(some, x, ABI_BF16, i, 1, part);
		scale_row(some, part, factor);
		store_row(x + i, ABI_BF16, 0, 1, some, part);
	}
}

static inline void operand_store(operand *p, vf x)
{
	_mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}

static inline float operand_value(operand x)
{
	return float_from_bf16(x);
}

static inline void operand_store_rows(operand *to, const operand *from, int64_t row, vf *zeros)
{
	__m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
	__m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + row)));

	high = _mm512_slli_epi32(high, 16);
	*zeros += (vf)_mm512_slli_epi32(low, 16) * 0.0f + (vf)high * 0.0f;
	_mm512_storeu_si512(to, _mm512_or_si512(low, high));
}

/* Two neighbours along k, as one element of a vector. */
static inline int32_t operand_pair(const operand *p)
{
	int32_t pair;

	memcpy(&pair, p, sizeof(pair));
	return pair;
}

/* clang 14 spells it without the second line. */
#if !defined(__AMX_BF16__) && !defined(__AMXBF16__)

#define OPERAND_TILES 0
#define ROW_UNIT      OPERAND_PAIR
#define GROUP_ROWS    MICRO_ROWS

static inline void operand_begin(void)
{
}

static inline void operand_end(void)
{
}

static inline __attribute__((always_inline)) void
operand_tile(const operand *a, int64_t a_row, const operand *b, float *c, int64_t c_row, int32_t k,
	     const float *first, const int rows, const int vectors, const char *ahead)
{
	vf sum[MICRO_ROWS][MICRO_VECTORS];

#pragma GCC unroll 16
	for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
		for (int v = 0; v < vectors; v++)
			sum[r][v] = first ? vf_load(c + r * c_row + v * LANES) * first[r] : (vf){0};
	}
#pragma GCC unroll 2
	for (int32_t i = 0; i < k; i += 2) {
		__m512bh b_row[MICRO_VECTORS];

#pragma GCC unroll 4
		for (int v = 0; v < vectors; v++)
			b_row[v] = (__m512bh)_mm512_loadu_si512(b + 2 * v * LANES);
#pragma GCC unroll 16
		for (int r = 0; r < rows; r++) {
			__m512bh x = (__m512bh)_mm512_set1_epi32(operand_pair(a + r * a_row));

#pragma GCC unroll 4
			for (int v = 0; v < vectors; v++)
				sum[r][v] = (vf)_mm512_dpbf16_ps((__m512)sum[r][v], x, b_row[v]);
		}
		if (ahead)
			__builtin_prefetch(ahead + 32 * i, 0, 2);
		a += 2;
		b += 2 * PANEL;
	}
#pragma GCC unroll 16
	for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
		for (int v = 0; v < vectors; v++)
			vf_store(c + r * c_row + v * LANES, sum[r][v]);
	}
}

static inline void operand_multiply(struct gemm_a from, struct gemm_b panel, float *c,
				    int64_t c_row, int32_t k, const float *first, int32_t rows,
				    int32_t columns, const char *ahead)
{
	int32_t vectors = (columns + LANES - 1) / LANES;
	int64_t a_row = from.row_stride;
	const operand *a = from.data, *b = panel.data;

	/* Full tiles as one piece; what is left at the edges in smaller ones. */
	if (rows == MICRO_ROWS && vectors == 4) {
		if (ahead)
			operand_tile(a, a_row, b, c, c_row, k, first, MICRO_ROWS, 4, ahead);
		else
			operand_tile(a, a_row, b, c, c_row, k, first, MICRO_ROWS, 4, NULL);
		return;
	}
	for (; rows >= 2 && vectors == 4; rows -= 2, a += 2 * a_row, c += 2 * c_row) {
		operand_tile(a, a_row, b, c, c_row, k, first, 2, 4, NULL);
		first = first ? first + 2 : NULL;
	}
	for (; rows >= 3; rows -= 3, a += 3 * a_row, c += 3 * c_row) {
		for (int32_t v = 0; v < vectors; v++)
			operand_tile(a, a_row, b + 2 * v * LANES, c + v * LANES, c_row, k, first, 3,
				     1, NULL);
		first = first ? first + 3 : NULL;
	}
	for (; rows > 0; rows--, a += a_row, c += c_row) {
		for (int32_t v = 0; v < vectors; v++)
			operand_tile(a, a_row, b + 2 * v * LANES, c + v * LANES, c_row, k, first, 1,
				     1, NULL);
		first = first ? first + 1 : NULL;
	}
}

#else

/* Two by two tiles of C, the most that eight tiles allow with operands loaded once. */
#define OPERAND_TILES 1
#define AMX_ROWS      16
#define AMX_K         32
#define ROW_UNIT      AMX_K
#define GROUP_ROWS    (2 * AMX_ROWS)

struct tile_configuration {
	uint8_t palette, start_row, reserved[14];
	uint16_t column_bytes[16];
	uint8_t rows[16];
} __attribute__((aligned(64)));

/* Every tile full: 16 rows of 64 bytes. Constant data: gcc 12 takes the intrinsic for a load of
 * eight bytes and leaves out stores to the rest of a local variable. */
static const struct tile_configuration tile_configuration = {
	.palette = 1,
	.column_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
	.rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

/* The configuration belongs to the thread. */
static inline void operand_begin(void)
{
	_tile_loadconfig(&tile_configuration);
}

static inline void operand_end(void)
{
	_tile_release();
}

/* C [32, 32] = A B, or += when @adds. */
static inline void operand_tiles(const operand *a, int64_t a_row, const operand *b, float *c,
				 int64_t c_row, int32_t k, int adds, const char *ahead)
{
	if (adds) {
		_tile_loadd(0, c, c_row * 4);
		_tile_loadd(1, c + 16, c_row * 4);
		_tile_loadd(2, c + AMX_ROWS * c_row, c_row * 4);
		_tile_loadd(3, c + AMX_ROWS * c_row + 16, c_row * 4);
	} else {
		_tile_zero(0);
		_tile_zero(1);
		_tile_zero(2);
		_tile_zero(3);
	}
	for (int32_t i = 0; i < k; i += AMX_K) {
		for (int32_t line = 0; ahead && line < AMX_K / 4; line++)
			__builtin_prefetch(ahead + 16 * i + 64 * line, 0, 2);
		_tile_loadd(4, a + i, a_row * 2);
		_tile_loadd(6, b + (int64_t)i * PANEL, PANEL * 4);
		_tile_loadd(7, b + (int64_t)i * PANEL + 32, PANEL * 4);
		_tile_loadd(5, a + AMX_ROWS * a_row + i, a_row * 2);
		_tile_dpbf16ps(0, 4, 6);
		_tile_dpbf16ps(1, 4, 7);
		_tile_dpbf16ps(2, 5, 6);
		_tile_dpbf16ps(3, 5, 7);
	}
	_tile_stored(0, c, c_row * 4);
	_tile_stored(1, c + 16, c_row * 4);
	_tile_stored(2, c + AMX_ROWS * c_row, c_row * 4);
	_tile_stored(3, c + AMX_ROWS * c_row + 16, c_row * 4);
}

/* All GROUP_ROWS rows are read and written, whatever @rows says: every array has room for whole
 * groups, and a row's garbage stays in the row. */
static inline void operand_multiply(struct gemm_a a, struct gemm_b b, float *c, int64_t c_row,
				    int32_t k, const float *first, int32_t rows, int32_t columns,
				    const char *ahead)
{
	for (int32_t r = 0; first && r < rows; r++)
		for (int32_t j = 0; first[r] != 1 && j < columns; j += LANES)
			vf_store(c + r * c_row + j, vf_load(c + r * c_row + j) * first[r]);
	for (int32_t j = 0; j < columns; j += 32)
		operand_tiles(a.data, a.row_stride, b.data + 2 * j, c + j, c_row, k, first != NULL,
			      ahead ? ahead + 16 * k * (j / 32) : NULL);
}

#endif
#endif

/* LANES operands. */
static inline vf operand_load(const operand *p)
{
	return vf_load_as(p, OPERAND_DTYPE);
}

/* Lines that operand_multiply() fetches ahead: one a step of vectors, eight a step of tiles. */
static inline int32_t operand_lines(int32_t k, int32_t columns)
{
	return OPERAND_TILES ? k / OPERAND_PAIR * columns / PANEL : k / OPERAND_PAIR;
}

#endif
