/* SPDX-License-Identifier: MIT */
/* buffer.h: a growing run of bytes, the encoder's output. All zero is an empty one. */
#ifndef PROTO_BUFFER_H
#define PROTO_BUFFER_H

#include <stddef.h>
#include <stdint.h>

struct proto_buffer {
	uint8_t *data;
	size_t size;
	size_t capacity;
};

/* Makes room for @n more bytes. Return: 0 or FMHA_ENOMEM. */
int proto_buffer_reserve(struct proto_buffer *buffer, size_t n);

/* Appends @n bytes. Return: 0 or FMHA_ENOMEM. */
int proto_buffer_append(struct proto_buffer *buffer, const void *data, size_t n);

void proto_buffer_deinit(struct proto_buffer *buffer);

#endif
