/* SPDX-License-Identifier: MIT */
/*
 * golden.h: one request and one answer of every method, with plausible contents, as bytes. They are
 * what PROTOCOL.md prints, what the truncation and bit-flip tests damage, and what the fuzzers
 * start from.
 */
#ifndef TESTS_PROTO_GOLDEN_H
#define TESTS_PROTO_GOLDEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <proto/buffer.h>
#include <proto/message.h>

struct golden {
	char title[64]; /* "request hello", "answer plan", "error hdim_q", "notification cancel" */
	enum proto_message_type type;
	int method; /* -1: an error */
	bool on_page;
	struct proto_buffer frame;
};

#define GOLDEN_MAX (2 * PROTO_N_METHODS + 8)

/* Fills @ret and returns how many. Stops the program when one cannot be encoded. */
size_t golden_all(struct golden ret[GOLDEN_MAX]);
void golden_free(struct golden *goldens, size_t n);

/* What a peer does with a frame: everything that decoding can reach. @method: whose result an
 * answer is. Re-encodes what it accepts into @ret_again (empty otherwise). Return: 0 or the first
 * error. */
int golden_receive(const uint8_t *data, size_t n, int method, struct proto_buffer *ret_again,
		   struct fmha_error *err);

#endif
