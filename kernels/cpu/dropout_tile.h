/* SPDX-License-Identifier: MIT */
/*
 * dropout_tile.h: the dropout bytes of a tile, one patch of 16 rows and 32 columns at a time. The
 * 32 Philox calls
 * ("lanes") of a patch run side by side in vectors; word w of lane l holds the bytes of columns
 * 8 w + 2 (l % 4) and the next one, in row l / 4 (low half) and in row l / 4 + 8 (high half), so
 * that four lanes' halves are eight neighbouring bytes of a row.
 */
#ifndef FMHA_CPU_DROPOUT_TILE_H
#define FMHA_CPU_DROPOUT_TILE_H

#include <stdint.h>
#include <string.h>

#include "abi.h"

#define DROPOUT_PATCH_ROWS    16
#define DROPOUT_PATCH_COLUMNS 32

enum { DROPOUT_LANES = 32 };

/* The four words of every lane of patch (@row_block, @column_block). @call: batch * nhead_q + head.
 */
static inline void dropout_philox(uint32_t word[4][DROPOUT_LANES], uint64_t seed, uint64_t offset,
				  uint64_t call, uint32_t row_block, uint32_t column_block)
{
	uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);

	for (uint32_t lane = 0; lane < DROPOUT_LANES; lane++) {
		uint64_t low = offset + call * DROPOUT_LANES + lane;

		word[0][lane] = (uint32_t)low;
		word[1][lane] = (uint32_t)(low >> 32);
		word[2][lane] = row_block;
		word[3][lane] = column_block;
	}
	for (int round = 0; round < 7; round++) {
		for (int lane = 0; lane < DROPOUT_LANES; lane++) {
			uint64_t product0 = (uint64_t)0xD2511F53u * word[0][lane];
			uint64_t product1 = (uint64_t)0xCD9E8D57u * word[2][lane];

			word[0][lane] = (uint32_t)(product1 >> 32) ^ word[1][lane] ^ key0;
			word[1][lane] = (uint32_t)product1;
			word[2][lane] = (uint32_t)(product0 >> 32) ^ word[3][lane] ^ key1;
			word[3][lane] = (uint32_t)product0;
		}
		key0 += 0x9E3779B9u;
		key1 += 0xBB67AE85u;
	}
}

/*
 * Bytes of rows [row, row + n_rows) and columns [column, column + n_columns), @row a multiple of 16
 * and
 * @column of 32. Whole patches are written: @bytes has room for both counts rounded up.
 */
static inline void dropout_tile(uint8_t *bytes, int64_t ld, const struct abi_dropout *dropout,
				uint64_t call, int32_t row, int32_t n_rows, int32_t column,
				int32_t n_columns)
{
	uint32_t word[4][DROPOUT_LANES];
	uint16_t half[2][DROPOUT_LANES];

	for (int32_t i = 0; i < n_rows; i += DROPOUT_PATCH_ROWS)
		for (int32_t j = 0; j < n_columns; j += DROPOUT_PATCH_COLUMNS) {
			dropout_philox(word, dropout->seed, dropout->offset, call,
				       (uint32_t)(row + i) / DROPOUT_PATCH_ROWS,
				       (uint32_t)(column + j) / DROPOUT_PATCH_COLUMNS);
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
