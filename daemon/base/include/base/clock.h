/* SPDX-License-Identifier: MIT */
/* clock.h: the one clock that deadlines, latencies and restarts are measured with. */
#ifndef FMHAD_BASE_CLOCK_H
#define FMHAD_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

#define NS_PER_US 1000ull
#define NS_PER_MS 1000000ull
#define NS_PER_S  1000000000ull

static inline uint64_t clock_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

#endif
