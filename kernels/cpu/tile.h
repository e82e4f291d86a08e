/* SPDX-License-Identifier: MIT */
/*
 * tile.h: how large the tiles of the CPU kernels are, for the kernels that run them and for the
 * catalogue that names them.
 */
#ifndef FMHA_CPU_TILE_H
#define FMHA_CPU_TILE_H

#include <stdint.h>

#define CPU_MAX_HDIM_Q 576 /* of latents: 512 and what turns */
#define CPU_MAX_HDIM_V 512

/* Head dims that tiles are cut for, X(hdim_q, hdim_v), the smallest first: a problem runs in the
 * first that holds its own. */
#define CPU_HEAD_DIMS(X)                                                                           \
	X(32, 32)                                                                                  \
	X(64, 64)                                                                                  \
	X(96, 96)                                                                                  \
	X(128, 128)                                                                                \
	X(160, 160) X(192, 128) X(192, 192) X(256, 256) X(384, 384) X(512, 512) X(576, 512)

/* cpu_flash: rows of a tile. Very long rows make fewer of them a task, so that nobody waits long
 * for its end. */
#define CPU_FLASH_ROWS      96
#define CPU_FLASH_FEW_ROWS  48
#define CPU_FLASH_KEYS      512
#define CPU_FLASH_TILE_KEYS 128 /* with a tile unit */

/* Keys of a block: K and V of it fill a quarter of a 1 MiB second-level cache, or, of the widest heads,
 * a half. */
static inline int32_t cpu_flash_keys(int32_t hdim_q, int32_t hdim_v, int32_t most)
{
	int32_t held = 0, keys;

#define CPU_HOLDS(q, v)                                                                            \
	if (!held && hdim_q <= (q) && hdim_v <= (v))                                               \
		held = (q) + (v);
	CPU_HEAD_DIMS(CPU_HOLDS)
#undef CPU_HOLDS
	keys = held ? 65536 / held / 128 * 128 : 0;
	keys = keys > 128 ? keys : 128;
	return keys > most ? most : keys;
}

/* cpu_tile: rows and keys of a tile, which stays in the second-level cache. */
#define CPU_BACKWARD_ROWS 96
#define CPU_BACKWARD_KEYS 192
static inline int32_t cpu_backward_keys(int32_t hdim_q, int32_t hdim_v)
{
	return hdim_q > 64 || hdim_v > 64 ? 2 * CPU_BACKWARD_KEYS / 3 : CPU_BACKWARD_KEYS;
}

/* cpu_decode: rows of a key head at once, keys a task. */
#define CPU_DECODE_ROWS 16
#define CPU_DECODE_KEYS 512

/* cpu_latent: rows of a key head at once, keys a block. */
#define CPU_LATENT_ROWS 64
#define CPU_LATENT_KEYS 48

/* cpu_rows: rows a task. */
#define CPU_ROWS          32
#define CPU_BACKWARD_TASK 64

#endif
