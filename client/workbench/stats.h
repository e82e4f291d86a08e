/* SPDX-License-Identifier: MIT */
/* stats.h: what is said of the times of repeated runs. */
#ifndef CTL_STATS_H
#define CTL_STATS_H

#include <stddef.h>

struct stats {
	double median, min, max;
	double spread; /* the middle half's width, of the median */
};

/* Sorts @values. All 0 when there are none. */
struct stats stats_of(double *values, size_t n);

/* The one of sorted values below which @share of them lie. */
double stats_quantile(const double *values, size_t n, double share);

#endif
