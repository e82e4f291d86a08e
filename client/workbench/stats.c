/* SPDX-License-Identifier: MIT */
#include "stats.h"

#include <stdlib.h>

static int stats_compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double stats_quantile(const double *values, size_t n, double share)
{
	double at = share * (double)(n - 1);
	size_t below = (size_t)at;

	if (n == 0)
		return 0;
	if (below + 1 >= n)
		return values[n - 1];
	return values[below] + (at - (double)below) * (values[below + 1] - values[below]);
}

struct stats stats_of(double *values, size_t n)
{
	struct stats s = {0};

	if (n == 0)
		return s;
	qsort(values, n, sizeof(*values), stats_compare);
	s.median = stats_quantile(values, n, 0.5);
	s.min = values[0];
	s.max = values[n - 1];
	if (s.median > 0)
		s.spread = (stats_quantile(values, n, 0.75) - stats_quantile(values, n, 0.25)) /
			   s.median;
	return s;
}
