/* SPDX-License-Identifier: MIT */
/*
 * share.h: how many random problems a test runs: all, or where FMHA_TEST_SHARE is N the first of each N, which is
 * what a sanitizer has time for.
 */
#ifndef FMHA_TEST_SHARE_H
#define FMHA_TEST_SHARE_H

#include <stdint.h>
#include <stdlib.h>

static inline uint64_t share_of(uint64_t n)
{
	const char *text = getenv("FMHA_TEST_SHARE");
	uint64_t share = text ? strtoull(text, NULL, 10) : 1;

	return share > 1 ? (n + share - 1) / share : n;
}

#endif
