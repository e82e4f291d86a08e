/* SPDX-License-Identifier: MIT */
/*
 * dropout.c: FlashAttention-2's dropout mask as a function of logical coordinates.
 *
 * One Philox4x32-7 call gives 16 bytes; 32 calls ("lanes") give the bytes of a patch of 16 rows and
 * 32 columns. Which lane and byte an element gets is the layout of a tensor-core accumulator: lane
 * by (row mod 8, pair of columns mod 8), byte by what is left of the row and the column.
 */
#include "internal.h"

static void philox_round(uint32_t counter[4], const uint32_t key[2])
{
	uint64_t product0 = (uint64_t)0xD2511F53u * counter[0];
	uint64_t product1 = (uint64_t)0xCD9E8D57u * counter[2];
	uint32_t next[4] = {
		(uint32_t)(product1 >> 32) ^ counter[1] ^ key[0],
		(uint32_t)product1,
		(uint32_t)(product0 >> 32) ^ counter[3] ^ key[1],
		(uint32_t)product0,
	};

	for (int i = 0; i < 4; i++)
		counter[i] = next[i];
}

uint8_t reference_dropout_byte(uint64_t seed, uint64_t offset, uint32_t batch, uint32_t head,
			       uint32_t nhead_q, uint32_t row, uint32_t column)
{
	uint32_t r = row % 16, c = column % 32;
	uint32_t lane = r % 8 * 4 + (c % 8 >> 1);
	uint32_t byte = c / 16 * 8 + c / 8 % 2 * 4 + (c & 1) + 2 * (r >= 8);
	uint64_t low = offset + ((uint64_t)batch * nhead_q + head) * 32 + lane;
	uint32_t counter[4] = {(uint32_t)low, (uint32_t)(low >> 32), row / 16, column / 32};
	uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};

	for (int round = 0; round < 7; round++) {
		philox_round(counter, key);
		key[0] += 0x9E3779B9u;
		key[1] += 0xBB67AE85u;
	}
	return (uint8_t)(counter[byte / 4] >> (8 * (byte % 4)));
}
