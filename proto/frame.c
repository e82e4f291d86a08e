/* SPDX-License-Identifier: MIT */
#include <proto/frame.h>

#include <assert.h>
#include <stdbool.h>

#include <proto/error.h>
#include <proto/limits.h>

/* ---- precheck ---- */

/*
 * The pre-check. One loop reads one node a turn; a stack of counters says how many nodes each open
 * container still lacks. `left` below is always the number of bytes not read yet, and every node
 * takes at least one of them, which is why a count above `left` can never be fulfilled.
 */

enum node_kind { NODE_PLAIN, NODE_STRING, NODE_ARRAY, NODE_MAP, NODE_REFUSED };

struct node {
	enum node_kind kind;
	uint32_t head_bytes;  /* after the first byte: length or number */
	uint32_t fixed_count; /* of a container or string whose first byte holds it */
};

static struct node node_classify(uint8_t byte)
{
	static const struct node by_byte[0xe0 - 0xc0] = {
		[0x00] = {NODE_PLAIN, 0, 0},   /* nil */
		[0x01] = {NODE_REFUSED, 0, 0}, /* never used */
		[0x02] = {NODE_PLAIN, 0, 0},   /* false */
		[0x03] = {NODE_PLAIN, 0, 0},   /* true */
		[0x04] = {NODE_STRING, 1, 0},  /* bin 8, 16, 32 */
		[0x05] = {NODE_STRING, 2, 0},
		[0x06] = {NODE_STRING, 4, 0},
		[0x07] = {NODE_REFUSED, 0, 0}, /* ext 8, 16, 32 */
		[0x08] = {NODE_REFUSED, 0, 0},
		[0x09] = {NODE_REFUSED, 0, 0},
		[0x0a] = {NODE_PLAIN, 4, 0}, /* float 32, 64 */
		[0x0b] = {NODE_PLAIN, 8, 0},
		[0x0c] = {NODE_PLAIN, 1, 0}, /* uint 8, 16, 32, 64 */
		[0x0d] = {NODE_PLAIN, 2, 0},
		[0x0e] = {NODE_PLAIN, 4, 0},
		[0x0f] = {NODE_PLAIN, 8, 0},
		[0x10] = {NODE_PLAIN, 1, 0}, /* int 8, 16, 32, 64 */
		[0x11] = {NODE_PLAIN, 2, 0},
		[0x12] = {NODE_PLAIN, 4, 0},
		[0x13] = {NODE_PLAIN, 8, 0},
		[0x14] = {NODE_REFUSED, 0, 0}, /* fixext 1, 2, 4, 8, 16 */
		[0x15] = {NODE_REFUSED, 0, 0},
		[0x16] = {NODE_REFUSED, 0, 0},
		[0x17] = {NODE_REFUSED, 0, 0},
		[0x18] = {NODE_REFUSED, 0, 0},
		[0x19] = {NODE_STRING, 1, 0}, /* str 8, 16, 32 */
		[0x1a] = {NODE_STRING, 2, 0},
		[0x1b] = {NODE_STRING, 4, 0},
		[0x1c] = {NODE_ARRAY, 2, 0}, /* array 16, 32 */
		[0x1d] = {NODE_ARRAY, 4, 0},
		[0x1e] = {NODE_MAP, 2, 0}, /* map 16, 32 */
		[0x1f] = {NODE_MAP, 4, 0},
	};

	if (byte < 0x80 || byte >= 0xe0) /* positive and negative fixint */
		return (struct node){NODE_PLAIN, 0, 0};
	if (byte < 0x90)
		return (struct node){NODE_MAP, 0, byte & 0x0f};
	if (byte < 0xa0)
		return (struct node){NODE_ARRAY, 0, byte & 0x0f};
	if (byte < 0xc0)
		return (struct node){NODE_STRING, 0, byte & 0x1f};
	return by_byte[byte - 0xc0];
}

static bool is_bin(uint8_t byte)
{
	return byte >= 0xc4 && byte <= 0xc6;
}

static int short_by(struct fmha_error *err, size_t at)
{
	return fmha_error_set(err, FMHA_EPROTO, "payload byte %zu: announces more than follows",
			      at);
}

int proto_precheck_budget(const uint8_t *data, size_t n, const struct proto_budget *budget,
			  struct fmha_error *err)
{
	uint64_t missing[PROTO_PRECHECK_STACK];
	uint32_t depth = 0, nodes = 0;
	size_t at = 0;

	assert(budget->depth <= PROTO_PRECHECK_STACK);
	do {
		size_t start = at, left;
		struct node node;
		uint64_t count;

		if (at == n)
			return fmha_error_set(err, FMHA_EPROTO, "payload of %zu bytes: cut off", n);
		if (++nodes > budget->nodes)
			return fmha_error_set(err, FMHA_EPROTO, "payload: more than %u values",
					      budget->nodes);
		if (depth > 0)
			missing[depth - 1]--;
		node = node_classify(data[at++]);
		left = n - at;
		if (node.kind == NODE_REFUSED)
			return fmha_error_set(err, FMHA_EPROTO,
					      "payload byte %zu: type 0x%02x is refused", start,
					      data[start]);
		if (node.head_bytes > left)
			return short_by(err, start);
		count = node.fixed_count;
		if (node.kind != NODE_PLAIN)
			for (uint32_t i = 0; i < node.head_bytes; i++)
				count = count << 8 | data[at + i];
		at += node.head_bytes;
		left -= node.head_bytes;
		if (node.kind == NODE_MAP)
			count *= 2;
		if (count > left)
			return short_by(err, start);
		if (node.kind == NODE_STRING) {
			uint32_t most = is_bin(data[start]) ? budget->bin_bytes
							    : budget->string_bytes;

			if (count > most)
				return fmha_error_set(
					err, FMHA_EPROTO,
					"payload byte %zu: string of %llu bytes, more than %u",
					start, (unsigned long long)count, most);
			at += count;
		} else if (node.kind != NODE_PLAIN) {
			if (depth == budget->depth)
				return fmha_error_set(err, FMHA_EPROTO,
						      "payload byte %zu: nested deeper than %u",
						      start, budget->depth);
			missing[depth++] = count;
		}
		while (depth > 0 && missing[depth - 1] == 0)
			depth--;
	} while (depth > 0);
	if (at != n)
		return fmha_error_set(err, FMHA_EPROTO, "payload: %zu bytes after the message",
				      n - at);
	return 0;
}

int proto_precheck(const uint8_t *data, size_t n, struct fmha_error *err)
{
	static const struct proto_budget budget = {
		.depth = PROTO_MAX_DEPTH,
		.nodes = PROTO_MAX_NODES,
		.string_bytes = PROTO_MAX_STRING,
		.bin_bytes = PROTO_MAX_BIN,
	};

	return proto_precheck_budget(data, n, &budget, err);
}

enum { BIN8 = 0xc4, BIN16 = 0xc5, BIN32 = 0xc6 };

int proto_frame_parse(const uint8_t *data, size_t n, size_t limit, struct proto_frame *ret_frame,
		      struct fmha_error *err)
{
	size_t header, shortest, payload = 0;

	if (n == 0)
		return PROTO_FRAME_MORE;
	switch (data[0]) {
	case BIN8:
		header = 2;
		shortest = 0;
		break;
	case BIN16:
		header = 3;
		shortest = 0x100;
		break;
	case BIN32:
		header = 5;
		shortest = 0x10000;
		break;
	default:
		return fmha_error_set(err, FMHA_EPROTO, "frame: byte 0x%02x does not start one",
				      data[0]);
	}
	if (n < header)
		return PROTO_FRAME_MORE;
	for (size_t i = 1; i < header; i++)
		payload = payload << 8 | data[i];
	if (payload == 0)
		return fmha_error_set(err, FMHA_EPROTO, "frame: empty");
	if (header > limit || payload > limit - header)
		return fmha_error_set(err, FMHA_EPROTO, "frame of %zu bytes: more than %zu",
				      payload + header, limit);
	if (payload < shortest)
		return fmha_error_set(err, FMHA_EPROTO,
				      "frame: length is not in its shortest form");
	ret_frame->header_bytes = header;
	ret_frame->payload_bytes = payload;
	return 0;
}

size_t proto_frame_header(size_t payload_bytes, uint8_t ret_header[PROTO_FRAME_HEADER_MAX])
{
	size_t header = payload_bytes < 0x100 ? 2 : payload_bytes < 0x10000 ? 3 : 5;

	ret_header[0] = header == 2 ? BIN8 : header == 3 ? BIN16 : BIN32;
	for (size_t i = header - 1; i > 0; i--) {
		ret_header[i] = (uint8_t)payload_bytes;
		payload_bytes >>= 8;
	}
	return header;
}
