/* SPDX-License-Identifier: MIT */
#include "samples.h"

#include <stdlib.h>

#include <base/clock.h>

#define ENOUGH_NS (3 * NS_PER_MS) /* of one option, from its third sample on */
#define HOPELESS  1.5             /* times the best: two samples tell, or a long one */

static int compare_doubles(const void *x, const void *y)
{
	const double *a = x, *b = y;

	return (*a > *b) - (*a < *b);
}

static double least(const struct samples *samples)
{
	double value = samples->us[0];

	for (uint32_t i = 1; i < samples->n; i++)
		value = samples->us[i] < value ? samples->us[i] : value;
	return value;
}

void samples_add(struct samples *samples, uint64_t took_ns)
{
	samples->us[samples->n++] = (double)took_ns / 1000;
	samples->spent_ns += took_ns;
}

bool samples_are_enough(const struct samples *samples, double best_us)
{
	bool long_enough = samples->spent_ns >= ENOUGH_NS;

	if (samples->n == SAMPLES_MOST || (samples->n >= 3 && long_enough))
		return true;
	return best_us > 0 && samples->n > 0 && (samples->n >= 2 || long_enough) &&
	       least(samples) > HOPELESS * best_us;
}

double samples_time(struct samples *samples)
{
	qsort(samples->us, samples->n, sizeof(samples->us[0]), compare_doubles);
	return samples->us[(samples->n - 1) / 2];
}
