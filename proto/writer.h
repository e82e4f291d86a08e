/* SPDX-License-Identifier: MIT */
/* writer.h: MessagePack values to the end of a buffer, each in its shortest form. */
#ifndef PROTO_WRITER_H
#define PROTO_WRITER_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <proto/buffer.h>

/* Failure to get memory is remembered and stops everything after it. */
struct writer {
	struct proto_buffer *out;
	bool failed;
};

/* Room for @n bytes, counted as written, or NULL. */
static inline uint8_t *writer_room(struct writer *writer, size_t n)
{
	struct proto_buffer *out = writer->out;
	uint8_t *room;

	if (writer->failed || (n > out->capacity - out->size && proto_buffer_reserve(out, n) < 0)) {
		writer->failed = true;
		return NULL;
	}
	room = out->data + out->size;
	out->size += n;
	return room;
}

/* A first byte and a number of @bytes bytes behind it, most significant first. */
static inline void write_head(struct writer *writer, uint8_t type, uint64_t number, uint32_t bytes)
{
	uint8_t *room = writer_room(writer, 1 + bytes);

	if (!room)
		return;
	room[0] = type;
	for (uint32_t i = bytes; i > 0; i--) {
		room[i] = (uint8_t)number;
		number >>= 8;
	}
}

static inline void write_nil(struct writer *writer)
{
	write_head(writer, 0xc0, 0, 0);
}

static inline void write_bool(struct writer *writer, bool value)
{
	write_head(writer, value ? 0xc3 : 0xc2, 0, 0);
}

static inline void write_unsigned(struct writer *writer, uint64_t value)
{
	if (value < 0x80)
		write_head(writer, (uint8_t)value, 0, 0);
	else if (value <= UINT8_MAX)
		write_head(writer, 0xcc, value, 1);
	else if (value <= UINT16_MAX)
		write_head(writer, 0xcd, value, 2);
	else if (value <= UINT32_MAX)
		write_head(writer, 0xce, value, 4);
	else
		write_head(writer, 0xcf, value, 8);
}

static inline void write_signed(struct writer *writer, int64_t value)
{
	if (value >= 0)
		write_unsigned(writer, (uint64_t)value);
	else if (value >= -32)
		write_head(writer, (uint8_t)value, 0, 0);
	else if (value >= INT8_MIN)
		write_head(writer, 0xd0, (uint64_t)value, 1);
	else if (value >= INT16_MIN)
		write_head(writer, 0xd1, (uint64_t)value, 2);
	else if (value >= INT32_MIN)
		write_head(writer, 0xd2, (uint64_t)value, 4);
	else
		write_head(writer, 0xd3, (uint64_t)value, 8);
}

static inline void write_float(struct writer *writer, float value)
{
	uint32_t bits;

	memcpy(&bits, &value, sizeof(bits));
	write_head(writer, 0xca, bits, 4);
}

static inline void write_double(struct writer *writer, double value)
{
	uint64_t bits;

	memcpy(&bits, &value, sizeof(bits));
	write_head(writer, 0xcb, bits, 8);
}

static inline void write_raw(struct writer *writer, const void *data, size_t n)
{
	uint8_t *room = n > 0 ? writer_room(writer, n) : NULL;

	if (room)
		memcpy(room, data, n);
}

static inline void write_string(struct writer *writer, const char *text, size_t n)
{
	if (n < 32)
		write_head(writer, (uint8_t)(0xa0 | n), 0, 0);
	else if (n <= UINT8_MAX)
		write_head(writer, 0xd9, n, 1);
	else if (n <= UINT16_MAX)
		write_head(writer, 0xda, n, 2);
	else
		write_head(writer, 0xdb, n, 4);
	write_raw(writer, text, n);
}

static inline void write_bytes(struct writer *writer, const void *data, size_t n)
{
	if (n <= UINT8_MAX)
		write_head(writer, 0xc4, n, 1);
	else if (n <= UINT16_MAX)
		write_head(writer, 0xc5, n, 2);
	else
		write_head(writer, 0xc6, n, 4);
	write_raw(writer, data, n);
}

static inline void write_array(struct writer *writer, uint32_t n)
{
	if (n < 16)
		write_head(writer, (uint8_t)(0x90 | n), 0, 0);
	else if (n <= UINT16_MAX)
		write_head(writer, 0xdc, n, 2);
	else
		write_head(writer, 0xdd, n, 4);
}

static inline void write_map(struct writer *writer, uint32_t n)
{
	if (n < 16)
		write_head(writer, (uint8_t)(0x80 | n), 0, 0);
	else if (n <= UINT16_MAX)
		write_head(writer, 0xde, n, 2);
	else
		write_head(writer, 0xdf, n, 4);
}

#endif
