/* SPDX-License-Identifier: MIT */
/*
 * precheck.h: walks a payload before msgpack-c sees it, without allocating.
 *
 * msgpack-c trusts declared counts: 5 hostile bytes (dd 20 00 00 00) make it reserve 16 GiB. The
 * walk refuses a count that the remaining bytes cannot hold, and bounds depth and nodes, so that
 * what the library allocates afterwards is at most PROTO_MAX_NODES objects.
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
