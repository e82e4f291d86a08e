/* SPDX-License-Identifier: MIT */
/*
 * scarce.h: allocations that fail on command, for one test program: link it with
 * -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc. @failed tells that one did.
 */
#ifndef FMHA_TESTS_SCARCE_H
#define FMHA_TESTS_SCARCE_H

#include <stdbool.h>
#include <stdlib.h>

static long n_before = -1; /* allocations before one fails; -1: none does */
static bool for_good;      /* and so do all after it */
static bool failed;

static bool fails(void)
{
	if (n_before < 0 || n_before-- > 0)
		return false;
	n_before = for_good ? 0 : -1;
	failed = true;
	return true;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *block, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *block, size_t size);

void *__wrap_malloc(size_t size)
{
	return fails() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
	return fails() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *block, size_t size)
{
	return fails() ? NULL : __real_realloc(block, size);
}

#endif
