/* SPDX-License-Identifier: MIT */
/* fnv.h: FNV-1a, for tables and fingerprints; no protection against who makes collisions. */
#ifndef PROTO_FNV_H
#define PROTO_FNV_H

#include <stddef.h>
#include <stdint.h>

#define FNV_START 14695981039346656037ull

/* @word: a byte, or a number taken as one step. */
static inline uint64_t fnv_add(uint64_t hash, uint32_t word)
{
	return (hash ^ word) * 1099511628211ull;
}

static inline uint64_t fnv_text(uint64_t hash, const char *text)
{
	for (; *text; text++)
		hash = fnv_add(hash, (uint8_t)*text);
	return hash;
}

static inline uint64_t fnv_bytes(uint64_t hash, const void *data, size_t n)
{
	const uint8_t *bytes = data;

	for (size_t i = 0; i < n; i++)
		hash = fnv_add(hash, bytes[i]);
	return hash;
}

#endif
