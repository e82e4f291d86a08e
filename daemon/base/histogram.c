/* SPDX-License-Identifier: MIT */
#include <base/histogram.h>

#include <stddef.h>

#define SUB (1u << HISTOGRAM_SUB_BITS)

/* Values below SUB have a bucket each; then the top bit picks the row, the next 3 bits the column.
 */
static size_t histogram_bucket(uint64_t value)
{
	unsigned int top;
	size_t bucket;

	if (value < SUB)
		return (size_t)value;
	top = 63 - (unsigned int)__builtin_clzll(value);
	bucket = ((size_t)(top - HISTOGRAM_SUB_BITS + 1) << HISTOGRAM_SUB_BITS) +
		 (size_t)((value >> (top - HISTOGRAM_SUB_BITS)) & (SUB - 1));
	return bucket < HISTOGRAM_BUCKETS ? bucket : HISTOGRAM_BUCKETS - 1;
}

/* The largest value of a bucket. */
static uint64_t bucket_end(size_t bucket)
{
	size_t row = bucket >> HISTOGRAM_SUB_BITS;

	if (row == 0)
		return bucket;
	return (((uint64_t)SUB + (bucket & (SUB - 1)) + 1) << (row - 1)) - 1;
}

void histogram_add(struct histogram *histogram, uint64_t value)
{
	histogram->n++;
	histogram->sum += value;
	if (value > histogram->max)
		histogram->max = value;
	histogram->buckets[histogram_bucket(value)]++;
}

uint64_t histogram_count_below(const struct histogram *histogram, unsigned int power)
{
	size_t end = histogram_bucket(UINT64_C(1) << power);
	uint64_t n = 0;

	for (size_t i = 0; i < end; i++)
		n += histogram->buckets[i];
	return n;
}

uint64_t histogram_quantile(const struct histogram *histogram, uint32_t permille)
{
	uint64_t below = 0, wanted = (histogram->n * permille + 999) / 1000;

	if (histogram->n == 0)
		return 0;
	for (size_t i = 0; i < HISTOGRAM_BUCKETS; i++) {
		below += histogram->buckets[i];
		if (below >= wanted && below > 0) {
			uint64_t end = bucket_end(i);

			return end < histogram->max ? end : histogram->max;
		}
	}
	return histogram->max;
}
