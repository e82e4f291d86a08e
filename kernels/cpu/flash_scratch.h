/* SPDX-License-Identifier: MIT */
/* flash_scratch.h: how large the tiles of flash.c are, and what a thread and a launch have to work in. */
#ifndef FMHA_CPU_FLASH_SCRATCH_H
#define FMHA_CPU_FLASH_SCRATCH_H

#include "dropout_tile.h"
#include "output.h"
#include "pack.h"
#include "seen.h"
#include "tile.h"

#define ROWS CPU_FLASH_ROWS
/* Columns a block. Tiles multiply faster than anything can be fetched from beyond the first-level
 * cache: there scores and probabilities must stay in it. */
#define MAX_KEYS  (OPERAND_TILES ? CPU_FLASH_TILE_KEYS : CPU_FLASH_KEYS)
#define PACK_KEYS 256 /* columns a packing task */
/* Rows of S lie one cache line off a power of two: else all rows of a group would share one set of
 * the cache. */
#define S_STRIDE   (MAX_KEYS + 16)
#define P_STRIDE   (S_STRIDE * sizeof(float) / sizeof(operand)) /* P lies where S lay */
#define ROW_GROUPS (ROWS / GROUP_ROWS)
#define BYTES      (MAX_KEYS + 128) /* a block may start inside a dropout patch */
/* Rows that go through the softmax at a time. With tiles, part of the next group's scores is asked
 * for between them: the tile unit works beside the vector units. */
#define SOFTMAX_ROWS  (OPERAND_TILES ? 8 : GROUP_ROWS)
#define SCORE_BUFFERS (OPERAND_TILES ? 2 : 1)
/* By how many powers of two a row's probabilities may exceed one before they get a new base: so few
 * rows ever change O after their first block. */
#define BASE_SLACK 8

_Static_assert(ROWS % GROUP_ROWS == 0, "a tile is made of whole groups");
_Static_assert(MAX_KEYS % 128 == 0 && MAX_KEYS % PANEL == 0,
	       "blocks start at dropout patches and panels");
_Static_assert(PACK_KEYS % PANEL == 0, "packing tasks end at panels");

/* A thread's scratch; the arrays follow each other, sized by the launch. */
struct scratch {
	operand *q;     /* [ROWS, q_padded] */
	float *s;       /* [SCORE_BUFFERS, GROUP_ROWS, S_STRIDE] */
	float *o;       /* [ROWS, v_padded] */
	float *sum;     /* [ROWS, LANES] partial sums */
	float *temp;    /* [max(MAX_KEYS, PANEL * q_padded, PANEL * v_padded)] */
	uint8_t *bytes; /* [DROPOUT_PATCH_ROWS, BYTES] dropout */
	uint8_t *seen;  /* [2, GROUP_ROWS, MAX_KEYS]; of a mask that is data */
};

struct workspace {
	operand *k, *v;
	uint8_t *finite; /* [keys / PANEL] */
	float *factors;  /* [keys]: K's, where operands are too narrow to take them */
};

static inline int32_t v_padded(const struct abi_fwd_args *a)
{
	return (int32_t)round_up(a->hdim_v, PANEL);
}

static inline int32_t q_padded(const struct abi_fwd_args *a)
{
	return (int32_t)round_up(a->hdim_q, K_UNIT);
}

static inline size_t temp_floats(const struct abi_fwd_args *a)
{
	size_t row = (size_t)(q_padded(a) > v_padded(a) ? q_padded(a) : v_padded(a));

	return PANEL * row > MAX_KEYS ? PANEL * row : MAX_KEYS;
}

/* Lays the arrays out from @base (NULL: only to measure); returns the bytes. */
static inline size_t scratch_init(struct scratch *s, const struct abi_fwd_args *a, void *base)
{
	const size_t floats[] = {
		ROWS * (size_t)q_padded(a),
		SCORE_BUFFERS * GROUP_ROWS * S_STRIDE,
		ROWS * (size_t)v_padded(a),
		ROWS * LANES,
		temp_floats(a),
	};
	float *q, **const arrays[] = {&q, &s->s, &s->o, &s->sum, &s->temp};
	uintptr_t at = (uintptr_t)base;

	for (int i = 0; i < 5; i++) {
		*arrays[i] = (float *)at;
		at += ROUND_UP(floats[i] * sizeof(float), 64);
	}
	s->q = (operand *)q;
	s->bytes = (uint8_t *)at;
	at += ROUND_UP(DROPOUT_PATCH_ROWS * BYTES, 64);
	s->seen = (uint8_t *)at;
	if (seen_is_data(&a->mask_data))
		at += 2 * GROUP_ROWS * MAX_KEYS;
	return at - (uintptr_t)base;
}

/* A K that is multiplied by its factors would be rounded, which LSE shows: S is multiplied instead. */
static inline int factors_apart(const struct abi_fwd_args *a)
{
	return !SCALES_Q && a->k_descale.data;
}

static inline size_t workspace_init(struct workspace *w, const struct abi_fwd_args *a, void *base)
{
	size_t keys = (size_t)(packed_keys_total(&a->sequences) * a->nhead_k);
	uintptr_t at = (uintptr_t)base;

	w->k = (operand *)at;
	at += ROUND_UP(keys * (size_t)q_padded(a) * sizeof(operand), 64);
	w->v = (operand *)at;
	at += ROUND_UP(keys * (size_t)v_padded(a) * sizeof(operand), 64);
	w->finite = (uint8_t *)at;
	at += ROUND_UP(keys / PANEL, 64);
	w->factors = (float *)at;
	return at + (factors_apart(a) ? keys * sizeof(float) : 0) - (uintptr_t)base;
}

#endif
