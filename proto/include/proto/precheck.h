/* SPDX-License-Identifier: MIT */
/*
 * precheck.h: walks a payload before anything believes it, without allocating.
 *
 * A count that the remaining bytes cannot hold is refused, and depth, nodes and strings are
 * bounded: decoders that trust counts can be made to reserve 16 GiB by 5 bytes (dd 20 00 00 00).
 * What has passed can be read without another check of its form (reader.h).
 */
#ifndef PROTO_PRECHECK_H
#define PROTO_PRECHECK_H

#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>

struct proto_budget {
	uint32_t depth; /* at most PROTO_PRECHECK_STACK */
	uint32_t nodes;
	uint32_t string_bytes;
};

#define PROTO_PRECHECK_STACK 32

/*
 * Accepts exactly one complete object without ext values, with no byte after it, inside the budget.
 * Return: 0 or FMHA_EPROTO.
 */
int proto_precheck_budget(const uint8_t *data, size_t n, const struct proto_budget *budget,
			  struct fmha_error *err);

/* The same with the protocol's limits (limits.h). */
int proto_precheck(const uint8_t *data, size_t n, struct fmha_error *err);

#endif
