/* SPDX-License-Identifier: MIT */
/*
 * dropout_tile.h: the dropout bytes of a tile, one patch of 16 rows and 32 columns at a time. The
 * 32 Philox calls ("lanes") of a patch run side by side in vectors; word w of lane l holds the
 * bytes of columns 8 w + 2 (l % 4) and the next one, in row l / 4 (low half) and in row l / 4 + 8
 * (high half), so that four lanes' halves are eight neighbouring bytes of a row.
 */
#ifndef FMHA_CPU_DROPOUT_TILE_H
#define FMHA_CPU_DROPOUT_TILE_H

#include "vec.h"

#define DROPOUT_PATCH_ROWS    16
#define DROPOUT_PATCH_COLUMNS 32

enum { DROPOUT_LANES = 32 };

/*
 * One Philox call a 64-bit lane. A word sits in the low half of its lane; the upper half holds
 * whatever the last product left there, which the next product does not read.
 */
typedef uint64_t philox_word __attribute__((vector_size(4 * LANES)));
#define PHILOX_SIDE (LANES / 2) /* calls side by side */

/* The products of the low halves. */
static inline philox_word philox_multiply(philox_word a, uint32_t b)
{
	philox_word factor = (philox_word){0} + b;
#if defined(__AVX512F__)
	return (philox_word)_mm512_mul_epu32((__m512i)a, (__m512i)factor);
#elif defined(__AVX2__)
	return (philox_word)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#elif defined(__SSE2__)
	return (philox_word)_mm_mul_epu32((__m128i)a, (__m128i)factor);
#else
	return (a & 0xffffffffu) * factor;
#endif
}

/* The four words of every lane of patch (@row_block, @column_block). @call: batch * nhead_q + head.
 */
static inline void dropout_philox(uint32_t word[4][DROPOUT_LANES], uint64_t seed, uint64_t offset,
				  uint64_t call, uint32_t row_block, uint32_t column_block)
{
	for (int lane = 0; lane < DROPOUT_LANES; lane += PHILOX_SIDE) {
		uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
		philox_word c0 = {0}, c1, c2 = (philox_word){0} + row_block;
		philox_word c3 = (philox_word){0} + column_block;

		for (int i = 0; i < PHILOX_SIDE; i++)
			c0[i] = offset + call * DROPOUT_LANES + (uint64_t)(lane + i);
		c1 = c0 >> 32;
		for (int round = 0; round < 7; round++) {
			philox_word product0 = philox_multiply(c0, 0xD2511F53u);
			philox_word product1 = philox_multiply(c2, 0xCD9E8D57u);

			c0 = (product1 >> 32) ^ c1 ^ key0;
			c1 = product1;
			c2 = (product0 >> 32) ^ c3 ^ key1;
			c3 = product0;
			key0 += 0x9E3779B9u;
			key1 += 0xBB67AE85u;
		}
		for (int i = 0; i < PHILOX_SIDE; i++) {
			word[0][lane + i] = (uint32_t)c0[i];
			word[1][lane + i] = (uint32_t)c1[i];
			word[2][lane + i] = (uint32_t)c2[i];
			word[3][lane + i] = (uint32_t)c3[i];
		}
	}
}

/*
 * Bytes of rows [row, row + n_rows) and columns [column, column + n_columns), @row a multiple of 16
 * and @column of 32. Whole patches are written: @bytes has room for both counts rounded up.
 */
static inline void dropout_tile(uint8_t *bytes, int64_t ld, const struct abi_dropout *dropout,
				uint64_t call, int32_t row, int32_t n_rows, int32_t column,
				int32_t n_columns)
{
	uint32_t word[4][DROPOUT_LANES];
	uint16_t half[2][DROPOUT_LANES];

	for (int32_t i = 0; i < n_rows; i += DROPOUT_PATCH_ROWS)
		for (int32_t j = 0; j < n_columns; j += DROPOUT_PATCH_COLUMNS) {
			dropout_philox(
				word, dropout->seed, dropout->offset, call,
				(uint32_t)(dropout->row_block + (row + i) / DROPOUT_PATCH_ROWS),
				(uint32_t)(dropout->column_block +
					   (column + j) / DROPOUT_PATCH_COLUMNS));
			for (int w = 0; w < 4; w++) {
				uint8_t *to = bytes + i * ld + j + 8 * w;

				for (int lane = 0; lane < DROPOUT_LANES; lane++) {
					half[0][lane] = (uint16_t)word[w][lane];
					half[1][lane] = (uint16_t)(word[w][lane] >> 16);
				}
				for (int r = 0; r < DROPOUT_PATCH_ROWS; r++)
					memcpy(to + r * ld, &half[r / 8][r % 8 * 4], 8);
			}
		}
}

#endif
