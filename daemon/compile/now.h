/* SPDX-License-Identifier: MIT */
/* now.h: the clock of deadlines and turns here. */
#ifndef FMHAD_COMPILE_NOW_H
#define FMHAD_COMPILE_NOW_H

#include <stdint.h>
#include <time.h>

static inline int64_t now_ms(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

#endif
