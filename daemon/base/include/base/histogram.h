/* SPDX-License-Identifier: MIT */
/*
 * histogram.h: latencies in fixed memory. Log-linear: each power of two is cut into 8 equal parts,
 * so a percentile is at most 12.5 % too high, from 1 ns to 73 minutes. All zero is an empty one.
 */
#ifndef FMHAD_BASE_HISTOGRAM_H
#define FMHAD_BASE_HISTOGRAM_H

#include <stdint.h>

#define HISTOGRAM_SUB_BITS 3
#define HISTOGRAM_BUCKETS  ((42 - HISTOGRAM_SUB_BITS + 1) << HISTOGRAM_SUB_BITS)

struct histogram {
	uint64_t n;
	uint64_t max;
	uint64_t sum;
	uint32_t buckets[HISTOGRAM_BUCKETS];
};

void histogram_add(struct histogram *histogram, uint64_t value);

/* How many values are below 2^@power, which is at least HISTOGRAM_SUB_BITS. */
uint64_t histogram_count_below(const struct histogram *histogram, unsigned int power);

/* The smallest bucket end that at least @permille of the values do not exceed; 0 when empty. */
uint64_t histogram_quantile(const struct histogram *histogram, uint32_t permille);

#endif
