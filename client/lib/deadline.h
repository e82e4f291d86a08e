/* SPDX-License-Identifier: MIT */
/* deadline.h: points in time on CLOCK_MONOTONIC, in nanoseconds, as every call carries one. */
#ifndef CLIENT_DEADLINE_H
#define CLIENT_DEADLINE_H

#include <stdint.h>
#include <time.h>

static inline int64_t deadline_now(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int64_t deadline_after_ms(uint32_t ms)
{
	return deadline_now() + (int64_t)ms * 1000000;
}

/* The time that is left until @deadline, at least 0. */
static inline int64_t deadline_left_ns(int64_t deadline)
{
	int64_t left = deadline - deadline_now();

	return left > 0 ? left : 0;
}

/* The same in milliseconds, rounded up, so that a deadline ahead never gives 0. */
static inline uint32_t deadline_left_ms(int64_t deadline)
{
	int64_t ms = (deadline_left_ns(deadline) + 999999) / 1000000;

	return ms < UINT32_MAX ? (uint32_t)ms : UINT32_MAX;
}

static inline struct timespec deadline_timespec(int64_t ns)
{
	return (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
}

#endif
