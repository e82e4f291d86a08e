/* SPDX-License-Identifier: MIT */
/*
 * seen.h: what a mask that is data lets a row see, a block of columns at a time.
 *
 * A tile reads the endpoints or bits of its own rows where it begins a block, so there is no planning
 * pass: that costs as much as the rows have endpoints, and a block has hundreds of products for each.
 * The memory is its owner's, who may write it at any time. So every number is read once for a use, and
 * cut to the block before it is one; two readings may differ, which changes what is computed and
 * never where.
 */
#ifndef FMHA_CPU_SEEN_H
#define FMHA_CPU_SEEN_H

#include <string.h>

#include "score.h"

/* Columns [lo, hi), none: both 0. */
struct seen_range {
	int32_t lo, hi;
};

static inline int seen_is_data(const struct abi_mask_data *m)
{
	return m->intervals.data || m->bits.data;
}

static inline void seen_join(struct seen_range *all, int32_t lo, int32_t hi)
{
	if (lo >= hi)
		return;
	if (all->lo >= all->hi) {
		*all = (struct seen_range){lo, hi};
		return;
	}
	all->lo = lo < all->lo ? lo : all->lo;
	all->hi = hi > all->hi ? hi : all->hi;
}

/* The intervals of a row. */
struct seen_row {
	const int32_t *endpoints;
	int64_t step;
	int32_t n; /* of intervals */
};

static inline struct seen_row seen_row_at(const struct abi_mask_data *m,
					  const struct view_sequence *s, const struct score_row *r)
{
	return (struct seen_row){(const int32_t *)m->intervals.data +
					 view_q_offset(&m->intervals, s, r->i, r->head),
				 m->intervals.stride_dim, (m->n_endpoints + 1) / 2};
}

/* Interval @n, cut to [lo, hi). */
static inline struct seen_range seen_interval(const struct seen_row *row, int32_t n, int32_t lo,
					      int32_t hi)
{
	const int32_t *end = row->endpoints + 2 * n * row->step;
	int32_t first = n > 0 ? __atomic_load_n(end - row->step, __ATOMIC_RELAXED) : 0;
	int32_t last = __atomic_load_n(end, __ATOMIC_RELAXED);

	return (struct seen_range){clamp_i64(first, lo, hi), clamp_i64(last, lo, hi)};
}

static inline int32_t seen_bit(const uint8_t *bits, int64_t step, int32_t j)
{
	return __atomic_load_n(bits + (j >> 3) * step, __ATOMIC_RELAXED) >> (j & 7) & 1;
}

static inline const uint8_t *seen_bits_at(const struct abi_mask_data *m,
					  const struct view_sequence *s, const struct score_row *r)
{
	return (const uint8_t *)m->bits.data + view_q_offset(&m->bits, s, r->i, r->head);
}

/* From the first to the last column that bits let a row see of [lo, hi): bytes of 0 are passed over. */
static inline struct seen_range seen_bits_hull(const uint8_t *bits, int64_t step, int32_t lo,
					       int32_t hi)
{
	struct seen_range hull = {lo, hi};

	while (hull.lo < hull.hi && !seen_bit(bits, step, hull.lo))
		hull.lo += (hull.lo & 7) == 0 && hull.lo + 8 <= hull.hi &&
					   !__atomic_load_n(bits + (hull.lo >> 3) * step,
							    __ATOMIC_RELAXED)
				   ? 8
				   : 1;
	while (hull.lo < hull.hi && !seen_bit(bits, step, hull.hi - 1))
		hull.hi -= (hull.hi & 7) == 0 && hull.hi - 8 >= hull.lo &&
					   !__atomic_load_n(bits + ((hull.hi - 8) >> 3) * step,
							    __ATOMIC_RELAXED)
				   ? 8
				   : 1;
	return hull;
}

/* The eight bits of a byte as bytes of 0 and 1, the lowest first. */
static inline uint64_t seen_spread(uint8_t byte)
{
	uint64_t bits = byte * UINT64_C(0x0101010101010101) & UINT64_C(0x8040201008040201);

	bits = (bits + UINT64_C(0x7f7f7f7f7f7f7f7f)) >> 7 & UINT64_C(0x0101010101010101);
	return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? bits : __builtin_bswap64(bits);
}

/* Bits [from, to) as bytes, the first of them at @seen. */
static inline void seen_bits(const uint8_t *bits, int64_t step, int32_t from, int32_t to,
			     uint8_t *seen)
{
	int32_t j = from;

	for (; j < to && j & 7; j++)
		*seen++ = (uint8_t)seen_bit(bits, step, j);
	for (; j + 8 <= to; j += 8, seen += 8) {
		uint64_t eight = seen_spread(
			__atomic_load_n(bits + (j >> 3) * step, __ATOMIC_RELAXED));

		memcpy(seen, &eight, sizeof(eight));
	}
	for (; j < to; j++)
		*seen++ = (uint8_t)seen_bit(bits, step, j);
}

/* The parts of the band in [lo, hi): sink columns, the band. */
static inline void seen_band(const struct score_row *r, int32_t lo, int32_t hi,
			     struct seen_range ret_parts[2])
{
	ret_parts[0] = (struct seen_range){clamp_i64(r->sink_lo, lo, hi),
					   clamp_i64(r->sink_hi, lo, hi)};
	ret_parts[1] = (struct seen_range){clamp_i64(r->lo, lo, hi), clamp_i64(r->hi, lo, hi)};
}

/* From the first to the last column that the row sees of [lo, hi), which the sequence has. */
static inline struct seen_range seen_hull(const struct abi_mask_data *m,
					  const struct view_sequence *s, const struct score_row *r,
					  int32_t lo, int32_t hi)
{
	struct seen_range all = {0, 0}, parts[2];

	seen_band(r, lo, hi, parts);
	for (int k = 0; k < 2; k++) {
		if (parts[k].lo >= parts[k].hi)
			continue;
		if (m->bits.data) {
			struct seen_range hull = seen_bits_hull(seen_bits_at(m, s, r),
								m->bits.stride_dim, parts[k].lo,
								parts[k].hi);

			seen_join(&all, hull.lo, hull.hi);
			continue;
		}
		struct seen_row row = seen_row_at(m, s, r);

		for (int32_t n = 0; n < row.n; n++) {
			struct seen_range one = seen_interval(&row, n, parts[k].lo, parts[k].hi);

			seen_join(&all, one.lo, one.hi);
		}
	}
	return all;
}

/* Sets seen[j - lo] of each column that the row sees of [lo, hi) to 1, others to 0. */
static inline void seen_fill(const struct abi_mask_data *m, const struct view_sequence *s,
			     const struct score_row *r, int32_t lo, int32_t hi, uint8_t *seen)
{
	struct seen_range parts[2];

	if (lo >= hi)
		return;
	memset(seen, 0, (size_t)(hi - lo));
	seen_band(r, lo, hi, parts);
	for (int k = 0; k < 2; k++) {
		if (parts[k].lo >= parts[k].hi)
			continue;
		if (m->bits.data) {
			seen_bits(seen_bits_at(m, s, r), m->bits.stride_dim, parts[k].lo,
				  parts[k].hi, seen + (parts[k].lo - lo));
			continue;
		}
		struct seen_row row = seen_row_at(m, s, r);

		for (int32_t n = 0; n < row.n; n++) {
			struct seen_range one = seen_interval(&row, n, parts[k].lo, parts[k].hi);

			if (one.lo < one.hi)
				memset(seen + (one.lo - lo), 1, (size_t)(one.hi - one.lo));
		}
	}
}

/* Whether all of @n columns are seen. */
static inline int seen_all(const uint8_t *seen, int32_t n)
{
	uint8_t all = 1;

	for (int32_t j = 0; j < n; j++)
		all &= seen[j];
	return all;
}

/* Scores of columns that the row does not see become -inf. @n: whole vectors. */
static inline void seen_mask(float *t, int32_t n, const uint8_t *seen)
{
	const vf hidden = vf_set1(-INFINITY);

	for (int32_t j = 0; j < n; j += LANES) {
		vi keep = __builtin_convertvector(*(const vb_memory *)(seen + j), vi) != 0;

		vf_store(t + j, (vf)((keep & (vi)vf_load(t + j)) | (~keep & (vi)hidden)));
	}
}

#endif
