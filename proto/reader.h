/* SPDX-License-Identifier: MIT */
/*
 * reader.h: MessagePack values one after the other, in place. It allocates nothing and checks
 * nothing: proto_precheck() has walked the same bytes before and found every length inside them.
 */
#ifndef PROTO_READER_H
#define PROTO_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum value_type {
	VALUE_NIL,
	VALUE_BOOL,
	VALUE_UNSIGNED, /* an integer from 0 on */
	VALUE_NEGATIVE, /* an integer below 0 */
	VALUE_FLOAT,
	VALUE_STRING,
	VALUE_BYTES,
	VALUE_ARRAY,
	VALUE_MAP,
};

struct value {
	enum value_type type;
	uint32_t n; /* bytes of a string, elements of an array, pairs of a map */
	union {
		bool boolean;
		uint64_t u64; /* VALUE_UNSIGNED */
		int64_t i64;  /* VALUE_NEGATIVE */
		double f64;
		const char *text; /* VALUE_STRING, VALUE_BYTES: inside the payload */
	};
};

struct reader {
	const uint8_t *at;
};

static inline uint64_t reader_number(struct reader *reader, uint32_t bytes)
{
	uint64_t number = 0;

	for (uint32_t i = 0; i < bytes; i++)
		number = number << 8 | reader->at[i];
	reader->at += bytes;
	return number;
}

static inline struct value reader_text(struct reader *reader, enum value_type type, uint64_t n)
{
	struct value value = {.type = type, .n = (uint32_t)n, .text = (const char *)reader->at};

	reader->at += n;
	return value;
}

static inline struct value value_unsigned(uint64_t number)
{
	return (struct value){.type = VALUE_UNSIGNED, .u64 = number};
}

static inline struct value value_signed(int64_t number)
{
	if (number >= 0)
		return value_unsigned((uint64_t)number);
	return (struct value){.type = VALUE_NEGATIVE, .i64 = number};
}

static inline struct value value_float32(uint32_t bits)
{
	float number;

	memcpy(&number, &bits, sizeof(number));
	return (struct value){.type = VALUE_FLOAT, .f64 = (double)number};
}

static inline struct value value_float64(uint64_t bits)
{
	struct value value = {.type = VALUE_FLOAT};

	memcpy(&value.f64, &bits, sizeof(bits));
	return value;
}

static inline struct value value_container(enum value_type type, uint64_t n)
{
	return (struct value){.type = type, .n = (uint32_t)n};
}

/* The types that have their own first byte, from 0xc0 to 0xdf. */
static inline struct value reader_typed(struct reader *reader, uint8_t type)
{
	switch (type) {
	case 0xc2:
	case 0xc3:
		return (struct value){.type = VALUE_BOOL, .boolean = type == 0xc3};
	case 0xc4: /* bin 8, 16, 32 */
	case 0xc5:
	case 0xc6:
		return reader_text(reader, VALUE_BYTES, reader_number(reader, 1u << (type - 0xc4)));
	case 0xca:
		return value_float32((uint32_t)reader_number(reader, 4));
	case 0xcb:
		return value_float64(reader_number(reader, 8));
	case 0xcc: /* uint 8, 16, 32, 64 */
	case 0xcd:
	case 0xce:
	case 0xcf:
		return value_unsigned(reader_number(reader, 1u << (type - 0xcc)));
	case 0xd0: /* int 8, 16, 32, 64 */
		return value_signed((int8_t)reader_number(reader, 1));
	case 0xd1:
		return value_signed((int16_t)reader_number(reader, 2));
	case 0xd2:
		return value_signed((int32_t)reader_number(reader, 4));
	case 0xd3:
		return value_signed((int64_t)reader_number(reader, 8));
	case 0xd9: /* str 8, 16, 32 */
	case 0xda:
	case 0xdb:
		return reader_text(reader, VALUE_STRING,
				   reader_number(reader, 1u << (type - 0xd9)));
	case 0xdc: /* array 16, 32 */
	case 0xdd:
		return value_container(VALUE_ARRAY, reader_number(reader, 2u << (type - 0xdc)));
	case 0xde: /* map 16, 32 */
	case 0xdf:
		return value_container(VALUE_MAP, reader_number(reader, 2u << (type - 0xde)));
	default: /* nil; the pre-check has refused the others */
		return (struct value){.type = VALUE_NIL};
	}
}

/* The next value. What is in a container comes next: an array's elements, a map's keys and values
 * in turn. */
static inline struct value reader_next(struct reader *reader)
{
	uint8_t type = *reader->at++;

	if (type < 0x80)
		return value_unsigned(type);
	if (type < 0x90)
		return value_container(VALUE_MAP, type & 0x0f);
	if (type < 0xa0)
		return value_container(VALUE_ARRAY, type & 0x0f);
	if (type < 0xc0)
		return reader_text(reader, VALUE_STRING, type & 0x1f);
	if (type >= 0xe0)
		return value_signed((int8_t)type);
	return reader_typed(reader, type);
}

/* Its type, without moving on. */
static inline enum value_type reader_peek(const struct reader *reader)
{
	struct reader copy = *reader;

	return reader_next(&copy).type;
}

#endif
