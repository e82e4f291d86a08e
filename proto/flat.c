/* SPDX-License-Identifier: MIT */
#include "flat.h"

#include <stdlib.h>
#include <string.h>

#include <msgpack/object.h>

#define MAX_PAIRS 8

/* The body's objects; kept with the message for the next one. */
struct proto_flat {
	msgpack_object body;
	msgpack_object_kv pairs[MAX_PAIRS];
};

struct cursor {
	const uint8_t *at, *end;
};

/* An unsigned integer of any width. */
static bool take_unsigned(struct cursor *cursor, uint64_t *ret_value)
{
	uint64_t value = 0;
	size_t width;
	uint8_t first;

	if (cursor->at == cursor->end)
		return false;
	first = *cursor->at;
	if (first < 0x80) {
		*ret_value = first;
		cursor->at++;
		return true;
	}
	if (first < 0xcc || first > 0xcf)
		return false;
	width = (size_t)1 << (first - 0xcc);
	if ((size_t)(cursor->end - cursor->at) <= width)
		return false;
	for (size_t i = 1; i <= width; i++)
		value = value << 8 | cursor->at[i];
	cursor->at += 1 + width;
	*ret_value = value;
	return true;
}

/* A string of at most 31 bytes. */
static bool take_short_string(struct cursor *cursor, msgpack_object *ret_string)
{
	size_t size;

	if (cursor->at == cursor->end || *cursor->at < 0xa0 || *cursor->at > 0xbf)
		return false;
	size = *cursor->at & 0x1f;
	if ((size_t)(cursor->end - cursor->at) <= size)
		return false;
	ret_string->type = MSGPACK_OBJECT_STR;
	ret_string->via.str.size = (uint32_t)size;
	ret_string->via.str.ptr = (const char *)cursor->at + 1;
	cursor->at += 1 + size;
	return true;
}

/* Exactly @byte. */
static bool take_byte(struct cursor *cursor, uint8_t byte)
{
	if (cursor->at == cursor->end || *cursor->at != byte)
		return false;
	cursor->at++;
	return true;
}

static bool take_value(struct cursor *cursor, msgpack_object *ret_value)
{
	ret_value->type = MSGPACK_OBJECT_POSITIVE_INTEGER;
	if (take_unsigned(cursor, &ret_value->via.u64))
		return true;
	ret_value->type = MSGPACK_OBJECT_BOOLEAN;
	ret_value->via.boolean = take_byte(cursor, 0xc3);
	return ret_value->via.boolean || take_byte(cursor, 0xc2);
}

static bool take_body(struct cursor *cursor, struct proto_flat *flat)
{
	uint32_t n;

	if (cursor->at == cursor->end || *cursor->at < 0x80 || *cursor->at > 0x80 + MAX_PAIRS)
		return false;
	n = *cursor->at++ & 0x0f;
	flat->body.type = MSGPACK_OBJECT_MAP;
	flat->body.via.map.size = n;
	flat->body.via.map.ptr = flat->pairs;
	for (uint32_t i = 0; i < n; i++)
		if (!take_short_string(cursor, &flat->pairs[i].key) ||
		    !take_value(cursor, &flat->pairs[i].val))
			return false;
	return true;
}

static bool take_method(struct cursor *cursor, int *ret_method)
{
	msgpack_object name;

	if (!take_short_string(cursor, &name))
		return false;
	*ret_method = proto_method_find(name.via.str.ptr, name.via.str.size);
	return *ret_method >= 0;
}

bool flat_decode(struct proto_message *message, const uint8_t *payload, size_t n)
{
	struct cursor cursor = {.at = payload, .end = payload + n};
	int method = -1;
	uint64_t id;
	bool request;

	if (!message->flat)
		message->flat = malloc(sizeof(*message->flat));
	if (!message->flat || !take_byte(&cursor, 0x94))
		return false;
	request = take_byte(&cursor, PROTO_REQUEST);
	if (!request && !take_byte(&cursor, PROTO_ANSWER))
		return false;
	if (!take_unsigned(&cursor, &id) || id > UINT32_MAX)
		return false;
	if (request ? !take_method(&cursor, &method) : !take_byte(&cursor, 0xc0))
		return false;
	if (!take_body(&cursor, message->flat) || cursor.at != cursor.end)
		return false;
	message->type = request ? PROTO_REQUEST : PROTO_ANSWER;
	message->id = (uint32_t)id;
	message->method = method;
	message->body = &message->flat->body;
	return true;
}
