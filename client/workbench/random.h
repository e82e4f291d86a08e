/* SPDX-License-Identifier: MIT */
/* random.h: reproducible random numbers, the same on every machine. */
#ifndef CTL_RANDOM_H
#define CTL_RANDOM_H

#include <stdint.h>

/* splitmix64: any two states that differ give unrelated numbers. */
uint64_t random_next(uint64_t *state);
/* [0, 1) */
double random_uniform(uint64_t *state);
/* Mean 0, deviation 1. */
double random_normal(uint64_t *state);

#endif
