/* SPDX-License-Identifier: MIT */
/* mask_case.c: see mask_case.h. */
#include "mask_case.h"

#include <stdlib.h>
#include <string.h>

static uint64_t draw(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static int32_t below(uint64_t *state, int32_t n)
{
	return n > 0 ? (int32_t)(draw(state) % (uint64_t)n) : 0;
}

static int by_number(const void *a, const void *b)
{
	int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;

	return (x > y) - (x < y);
}

static int32_t hostile(uint64_t *state, int32_t keys)
{
	switch (below(state, 7)) {
	case 0:
		return INT32_MIN;
	case 1:
		return INT32_MAX;
	case 2:
		return -1;
	case 3:
		return keys + below(state, 3);
	case 4:
		return (int32_t)draw(state);
	default:
		return below(state, keys + 1);
	}
}

/* Rows in a stretch of some dozens are of one kind, so that whole tiles see nothing, or everything. */
static void draw_row(int32_t *f, int32_t n, int32_t keys, uint64_t *state, uint64_t stretch)
{
	static const int32_t borders[] = {8, 16, 32, 64, 96, 128, 192, 512};
	int32_t kind = (int32_t)(draw(&stretch) % 8), border = borders[draw(&stretch) % 8];

	for (int32_t e = 0; e < n; e++)
		f[e] = kind == 5 ? hostile(state, keys) : below(state, keys + 1);
	switch (kind) {
	case 0: /* nothing */
		memset(f, 0, sizeof(*f) * (size_t)n);
		break;
	case 1: /* everything */
		f[0] = keys;
		break;
	case 2: /* borders of tiles */
		for (int32_t e = 0; e < n; e++)
			f[e] = f[e] / border * border;
		qsort(f, (size_t)n, sizeof(*f), by_number);
		break;
	case 3: /* one document for all of the stretch */
		for (int32_t e = 0; e < n; e++)
			f[e] = (int32_t)(draw(&stretch) % (uint64_t)(keys + 1));
		qsort(f, (size_t)n, sizeof(*f), by_number);
		f[0] = n > 1 ? 0 : f[0];
		break;
	case 4: /* in any order, overlapping */
	case 5:
		break;
	default:
		qsort(f, (size_t)n, sizeof(*f), by_number);
		break;
	}
}

static void make_intervals(struct abi_mask_data *mask, const struct mask_shape *shape,
			   uint64_t *state)
{
	int64_t heads = below(state, 2) ? 1 : shape->heads,
		batch = below(state, 3) ? shape->batch : 1;
	int64_t rows = shape->rows, n = shape->n_endpoints;
	struct abi_tensor *t = &mask->intervals;
	int32_t f[64];

	mask->n_endpoints = shape->n_endpoints;
	t->data = malloc(sizeof(int32_t) * (size_t)(batch * heads * n * rows + 1));
	if (!t->data)
		abort();
	if (below(state, 2)) { /* [heads, n, batch, rows] */
		t->stride_seq = 1;
		t->stride_batch = rows;
		t->stride_dim = batch * rows;
		t->stride_head = n * batch * rows;
	} else { /* [batch, rows, heads, n] */
		t->stride_dim = 1;
		t->stride_head = n;
		t->stride_seq = heads * n;
		t->stride_batch = rows * heads * n;
	}
	for (int64_t b = 0; b < batch; b++)
		for (int64_t h = 0; h < heads; h++)
			for (int64_t i = 0; i < rows; i++) {
				draw_row(f, (int32_t)n, shape->keys, state,
					 (uint64_t)(h * 7919 + i / 40));
				for (int64_t e = 0; e < n; e++)
					((int32_t *)
						 t->data)[b * t->stride_batch + h * t->stride_head +
							  i * t->stride_seq + e * t->stride_dim] =
						f[e];
			}
	t->stride_head = heads == 1 ? 0 : t->stride_head;
	t->stride_batch = batch == 1 ? 0 : t->stride_batch;
}

static void make_bits(struct abi_mask_data *mask, const struct mask_shape *shape, uint64_t *state)
{
	int64_t heads = below(state, 2) ? 1 : shape->heads,
		batch = below(state, 3) ? shape->batch : 1;
	int64_t rows = below(state, 5) ? shape->rows : 1, bytes = (shape->keys + 7) / 8;
	struct abi_tensor *t = &mask->bits;
	uint8_t *to = malloc(
		(size_t)((batch * heads * rows + 1) * bytes + 1)); /* of no rows, too */

	if (!to)
		abort();
	*t = (struct abi_tensor){to, heads * rows * bytes, bytes, rows * bytes, 1};
	for (int64_t row = 0; row < batch * heads * rows; row++) {
		uint64_t stretch = (uint64_t)(row / 40);

		for (int64_t at = 0; at < bytes; at++) {
			uint64_t spot = stretch * 131 + (uint64_t)(at / 8);
			uint64_t kind = draw(&spot) % 4;

			to[row * bytes + at] = (uint8_t)(kind == 0   ? 0
							 : kind == 1 ? 255
								     : draw(state));
		}
	}
	t->stride_seq = rows == 1 ? 0 : t->stride_seq;
	t->stride_head = heads == 1 ? 0 : t->stride_head;
	t->stride_batch = batch == 1 ? 0 : t->stride_batch;
}

void mask_case_make(struct abi_mask_data *ret_mask, const struct mask_shape *shape, uint64_t seed)
{
	*ret_mask = (struct abi_mask_data){0};
	if (shape->kind == MASK_INTERVALS)
		make_intervals(ret_mask, shape, &seed);
	else if (shape->kind == MASK_BITS)
		make_bits(ret_mask, shape, &seed);
}

void mask_case_free(struct abi_mask_data *mask)
{
	free(mask->intervals.data);
	free(mask->bits.data);
	*mask = (struct abi_mask_data){0};
}

void mask_case_scribble(struct abi_mask_data *mask, const struct mask_shape *shape, uint64_t seed)
{
	int64_t n = shape->rows; /* of the smallest that mask_case_make() makes */

	if (mask->intervals.data)
		for (int64_t i = 0; i < n * shape->n_endpoints; i++)
			__atomic_store_n((int32_t *)mask->intervals.data + i,
					 hostile(&seed, shape->keys), __ATOMIC_RELAXED);
	for (int64_t i = 0; mask->bits.data && i < (shape->keys + 7) / 8; i++)
		__atomic_store_n((uint8_t *)mask->bits.data + i, (uint8_t)draw(&seed),
				 __ATOMIC_RELAXED);
}
