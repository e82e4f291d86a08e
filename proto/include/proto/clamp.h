/* SPDX-License-Identifier: MIT */
/*
 * clamp.h: a double as an integer. The cast alone is undefined where the value does not fit, and on
 * x86 it then gives 0 or the least number: a huge duration becomes none at all. These give the
 * nearest integer that there is; NaN gives the least.
 */
#ifndef PROTO_CLAMP_H
#define PROTO_CLAMP_H

#include <stdint.h>

static inline uint64_t clamp_u64(double value)
{
	if (!(value > 0))
		return 0;
	return value < 0x1p64 ? (uint64_t)value : UINT64_MAX;
}

static inline uint32_t clamp_u32(double value)
{
	if (!(value > 0))
		return 0;
	return value < 0x1p32 ? (uint32_t)value : UINT32_MAX;
}

/* A time of day that was written down: later than @now_s was another clock, and says no more than that it is
 * past. */
static inline uint64_t clamp_past(uint64_t when_s, uint64_t now_s)
{
	return when_s < now_s ? when_s : now_s - 1;
}

#endif
