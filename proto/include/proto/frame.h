/* SPDX-License-Identifier: MIT */
/*
 * frame.h: where a frame ends, from its first bytes alone.
 *
 * A frame is one MessagePack bin object in its shortest form: c4 + 1 length byte up to 255 bytes of
 * payload, c5 + 2 bytes up to 65,535, c6 + 4 bytes above. The payload is one message (message.h).
 */
#ifndef PROTO_FRAME_H
#define PROTO_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>

#define PROTO_FRAME_HEADER_MAX 5
#define PROTO_FRAME_MORE       1 /* proto_frame_parse(): the header is not complete yet */

struct proto_frame {
	size_t header_bytes;
	size_t payload_bytes; /* at least 1 */
};

/*
 * Reads a frame's header. A header that announces more than @limit bytes (header included) is an
 * error at once, before any payload has arrived.
 * Return: 0, PROTO_FRAME_MORE, or FMHA_EPROTO. With 0 the frame is complete when @n is at least
 * header_bytes + payload_bytes.
 */
int proto_frame_parse(const uint8_t *data, size_t n, size_t limit, struct proto_frame *ret_frame,
		      struct fmha_error *err);

/* Writes the shortest header for @payload_bytes (below 2^32). Return: its length. */
size_t proto_frame_header(size_t payload_bytes, uint8_t ret_header[PROTO_FRAME_HEADER_MAX]);

/* ---- precheck ---- */

/*
 * Walks a payload before msgpack-c sees it, without allocating.
 *
 * msgpack-c trusts declared counts: 5 hostile bytes (dd 20 00 00 00) make it reserve 16 GiB. The
 * walk refuses a count that the remaining bytes cannot hold, and bounds depth and nodes, so that
 * what the library allocates afterwards is at most PROTO_MAX_NODES objects.
 */

struct proto_budget {
	uint32_t depth; /* at most PROTO_PRECHECK_STACK */
	uint32_t nodes;
	uint32_t string_bytes, bin_bytes;
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
