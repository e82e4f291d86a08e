/* SPDX-License-Identifier: MIT */
/*
 * dropout.h: the dropout bytes of one row. Four of a patch's 32 Philox calls hold the bytes of a
 * row (of two rows: this one and its partner 8 away), each of them eight columns of 32.
 */
#ifndef FMHA_CPU_DROPOUT_H
#define FMHA_CPU_DROPOUT_H

#include "vec.h"

#define PHILOX_CALLS 16 /* side by side: four patches */

struct philox {
	uint32_t counter[4][PHILOX_CALLS];
};

static inline void philox_run(struct philox *p, uint64_t seed)
{
	uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);

	for (int round = 0; round < 7; round++) {
		for (int i = 0; i < PHILOX_CALLS; i++) {
			uint64_t product0 = (uint64_t)p->counter[0][i] * 0xD2511F53u;
			uint64_t product1 = (uint64_t)p->counter[2][i] * 0xCD9E8D57u;

			p->counter[0][i] = (uint32_t)(product1 >> 32) ^ p->counter[1][i] ^ key0;
			p->counter[1][i] = (uint32_t)product1;
			p->counter[2][i] = (uint32_t)(product0 >> 32) ^ p->counter[3][i] ^ key1;
			p->counter[3][i] = (uint32_t)product0;
		}
		key0 += 0x9E3779B9u;
		key1 += 0xBB67AE85u;
	}
}

/*
 * bytes[j] = the byte of (row, column + j), j < n rounded up to 128. @column: a multiple of 32.
 */
static inline void dropout_bytes(uint8_t *bytes, const struct abi_dropout *d, uint32_t batch,
				 uint32_t head, uint32_t nhead_q, uint32_t row, uint32_t column,
				 int32_t n)
{
	uint64_t base = d->offset + ((uint64_t)batch * nhead_q + head) * 32 + row % 8 * 4;
	int half = row % 16 >= 8;

	for (int32_t j = 0; j < n; j += 128) {
		struct philox p;

		for (int i = 0; i < PHILOX_CALLS; i++) {
			uint64_t low = base + (uint64_t)(i % 4);

			p.counter[0][i] = (uint32_t)low;
			p.counter[1][i] = (uint32_t)(low >> 32);
			p.counter[2][i] = row / 16;
			p.counter[3][i] = (column + (uint32_t)j) / 32 + (uint32_t)(i / 4);
		}
		philox_run(&p, d->seed);
		/* Word w of a call: columns 8 w + 2 lane + {0, 1} of this row, then of its partner.
		 */
		for (int i = 0; i < PHILOX_CALLS; i++) {
			for (int w = 0; w < 4; w++) {
				uint32_t word = p.counter[w][i] >> (16 * half);
				uint8_t *to = bytes + j + i / 4 * 32 + w * 8 + i % 4 * 2;

				to[0] = (uint8_t)word;
				to[1] = (uint8_t)(word >> 8);
			}
		}
	}
}

#endif
