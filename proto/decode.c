/* SPDX-License-Identifier: MIT */
/*
 * decode.c: bytes to structs. The pre-check has bounded the tree that msgpack-c built; then every
 * key must be in the field table, at most once, and every value of its field's type and range.
 */
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <msgpack/object.h>
#include <msgpack/unpack.h>
#include <proto/error.h>
#include <proto/message.h>
#include <proto/frame.h>
#include <proto/limits.h>
#include <proto/problem.h>

#include "field.h"

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

/* ---- flat ---- */

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

int proto_method_find(const char *name, size_t n)
{
	for (int i = 0; i < PROTO_N_METHODS; i++)
		if (proto_methods[i].name_bytes == n &&
		    field_same_name(proto_methods[i].name, name, n))
			return i;
	return -1;
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

/* Peers' bytes in our sentences: cut off and printable. */
static const char *quote(char out[32], const char *text, size_t n)
{
	size_t kept = n < 31 ? n : 31;

	for (size_t i = 0; i < kept; i++)
		out[i] = text[i] < 0x20 || text[i] > 0x7e ? '?' : text[i];
	out[kept] = '\0';
	return out;
}

static const char *type_name(const msgpack_object *value)
{
	switch (value->type) {
	case MSGPACK_OBJECT_NIL:
		return "nil";
	case MSGPACK_OBJECT_BOOLEAN:
		return "a boolean";
	case MSGPACK_OBJECT_POSITIVE_INTEGER:
	case MSGPACK_OBJECT_NEGATIVE_INTEGER:
		return "an integer";
	case MSGPACK_OBJECT_FLOAT32:
	case MSGPACK_OBJECT_FLOAT64:
		return "a float";
	case MSGPACK_OBJECT_STR:
		return "a string";
	case MSGPACK_OBJECT_BIN:
		return "bytes";
	case MSGPACK_OBJECT_ARRAY:
		return "an array";
	case MSGPACK_OBJECT_MAP:
		return "a map";
	default:
		return "an unknown type";
	}
}

static int wrong_type(const msgpack_object *value, const char *wanted,
		      const struct field_path *path, struct fmha_error *err)
{
	return field_error(err, FMHA_EINVAL, path, "%s, not %s", wanted, type_name(value));
}

static int decode_unsigned(const msgpack_object *value, const struct field *field, char *at,
			   const struct field_path *path, struct fmha_error *err)
{
	if (value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER)
		return field_error(err, FMHA_EINVAL, path, "%lld is negative",
				   (long long)value->via.i64);
	if (value->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
		return wrong_type(value, "must be an integer", path, err);
	if (value->via.u64 < (uint64_t)field->min)
		return field_error(err, FMHA_EINVAL, path, "%llu is below %lld",
				   (unsigned long long)value->via.u64, (long long)field->min);
	if (value->via.u64 > field->max)
		return field_error(err, FMHA_EINVAL, path, "%llu is above %llu",
				   (unsigned long long)value->via.u64,
				   (unsigned long long)field->max);
	if (field->type != FIELD_U32) {
		memcpy(at, &value->via.u64, sizeof(uint64_t));
	} else {
		uint32_t number = (uint32_t)value->via.u64;

		memcpy(at, &number, sizeof(number));
	}
	return 0;
}

static int decode_signed(const msgpack_object *value, int64_t min, int64_t max, int64_t *ret_value,
			 const struct field_path *path, struct fmha_error *err)
{
	if (value->type != MSGPACK_OBJECT_POSITIVE_INTEGER &&
	    value->type != MSGPACK_OBJECT_NEGATIVE_INTEGER)
		return wrong_type(value, "must be an integer", path, err);
	if (value->type == MSGPACK_OBJECT_POSITIVE_INTEGER &&
	    (value->via.u64 > INT64_MAX || (int64_t)value->via.u64 > max))
		return field_error(err, FMHA_EINVAL, path, "%llu is above %lld",
				   (unsigned long long)value->via.u64, (long long)max);
	if (value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER && value->via.i64 < min)
		return field_error(err, FMHA_EINVAL, path, "%lld is below %lld",
				   (long long)value->via.i64, (long long)min);
	*ret_value = value->via.i64;
	return 0;
}

static int decode_i32(const msgpack_object *value, const struct field *field, char *at,
		      const struct field_path *path, struct fmha_error *err)
{
	int64_t wide = 0;
	int32_t number;
	int r = decode_signed(value, field->min, (int64_t)field->max, &wide, path, err);

	if (r < 0)
		return r;
	number = (int32_t)wide;
	memcpy(at, &number, sizeof(number));
	return 0;
}

static int decode_float(const msgpack_object *value, const struct field *field, char *at,
			const struct field_path *path, struct fmha_error *err)
{
	double number;
	float narrow;

	/* An integer is a number too: dynamic languages send 1 for 1.0. */
	if (value->type == MSGPACK_OBJECT_FLOAT32 || value->type == MSGPACK_OBJECT_FLOAT64)
		number = value->via.f64;
	else if (value->type == MSGPACK_OBJECT_POSITIVE_INTEGER)
		number = (double)value->via.u64;
	else if (value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER)
		number = (double)value->via.i64;
	else
		return wrong_type(value, "must be a number", path, err);
	if (!isfinite(number))
		return field_error(err, FMHA_EINVAL, path, "not a finite number");
	if (field->type == FIELD_F64) {
		memcpy(at, &number, sizeof(number));
		return 0;
	}
	if (fabs(number) > 3.4028234663852886e38)
		return field_error(err, FMHA_EINVAL, path, "%g does not fit a float", number);
	narrow = (float)number;
	memcpy(at, &narrow, sizeof(narrow));
	return 0;
}

static int decode_string(const msgpack_object *value, const struct field *field, char *at,
			 const struct field_path *path, struct fmha_error *err)
{
	if (value->type != MSGPACK_OBJECT_STR)
		return wrong_type(value, "must be a string", path, err);
	if (value->via.str.size >= field->size)
		return field_error(err, FMHA_EINVAL, path, "%u bytes, more than %zu",
				   value->via.str.size, field->size - 1);
	if (!field_string_valid(value->via.str.ptr, value->via.str.size))
		return field_error(err, FMHA_EINVAL, path, "not printable UTF-8");
	memcpy(at, value->via.str.ptr, value->via.str.size);
	at[value->via.str.size] = '\0';
	return 0;
}

static int decode_bytes(const msgpack_object *value, const struct field *field, char *at,
			char *count, const struct field_path *path, struct fmha_error *err)
{
	if (value->type != MSGPACK_OBJECT_BIN)
		return wrong_type(value, "must be bytes", path, err);
	if (value->via.bin.size > field->size)
		return field_error(err, FMHA_EINVAL, path, "%u bytes, more than %zu",
				   value->via.bin.size, field->size);
	memcpy(at, value->via.bin.ptr, value->via.bin.size);
	memcpy(count, &value->via.bin.size, sizeof(uint32_t));
	return 0;
}

static int names_find(const struct proto_words *names, const msgpack_object_str *text)
{
	for (uint32_t i = 0; i < names->n; i++)
		if (strlen(names->names[i]) == text->size &&
		    memcmp(names->names[i], text->ptr, text->size) == 0)
			return (int)i;
	return -1;
}

static int decode_enum(const msgpack_object *value, const struct field *field, char *at,
		       const struct field_path *path, struct fmha_error *err)
{
	char text[32];
	uint32_t number;
	int index;

	if (value->type != MSGPACK_OBJECT_STR)
		return wrong_type(value, "must be a string", path, err);
	index = names_find(field->names, &value->via.str);
	if (index < 0)
		return field_error(err, FMHA_EINVAL, path, "'%s' is none of its values",
				   quote(text, value->via.str.ptr, value->via.str.size));
	number = (uint32_t)index;
	memcpy(at, &number, sizeof(number));
	return 0;
}

static int decode_array(const msgpack_object *value, const struct field *field, char *at,
			char *count, const struct field_path *path, struct fmha_error *err)
{
	int r;

	if (value->type != MSGPACK_OBJECT_ARRAY)
		return wrong_type(value, "must be an array", path, err);
	if (value->via.array.size > field->capacity)
		return field_error(err, FMHA_EINVAL, path, "%u elements, more than %u",
				   value->via.array.size, field->capacity);
	for (uint32_t i = 0; i < value->via.array.size; i++) {
		struct field_path element = {.parent = path, .index = i};

		r = field_decode(&value->via.array.ptr[i], field->table,
				 at + i * field->table->size, &element, err);
		if (r < 0)
			return r;
	}
	memcpy(count, &value->via.array.size, sizeof(uint32_t));
	return 0;
}

static int decode_numbers(const msgpack_object *value, const struct field *field, char *at,
			  const struct field_path *path, struct fmha_error *err)
{
	int r = 0;

	if (value->type != MSGPACK_OBJECT_ARRAY)
		return wrong_type(value, "must be an array", path, err);
	if (value->via.array.size != field->capacity)
		return field_error(err, FMHA_EINVAL, path, "%u elements, not %u",
				   value->via.array.size, field->capacity);
	for (uint32_t i = 0; i < field->capacity && r == 0; i++) {
		struct field_path element = {.parent = path, .index = i};

		r = decode_unsigned(&value->via.array.ptr[i], field, at + i * sizeof(uint64_t),
				    &element, err);
	}
	return r;
}

static int decode_stride(const msgpack_object *value, char *at, uint32_t role,
			 const struct field_path *path, struct fmha_error *err)
{
	uint32_t n_dims = (uint32_t)proto_roles[role].n_dims;
	int r;

	if (value->type != MSGPACK_OBJECT_ARRAY)
		return wrong_type(value, "must be an array", path, err);
	if (value->via.array.size != n_dims)
		return field_error(err, FMHA_EINVAL, path, "%u elements, not %u",
				   value->via.array.size, n_dims);
	for (uint32_t i = 0; i < n_dims; i++) {
		struct field_path element = {.parent = path, .index = i};
		int64_t stride = 0;

		r = decode_signed(&value->via.array.ptr[i], INT64_MIN, INT64_MAX, &stride, &element,
				  err);
		if (r < 0)
			return r;
		memcpy(at + i * sizeof(stride), &stride, sizeof(stride));
	}
	return 0;
}

static int decode_object(const msgpack_object *map, const struct field_table *table, char *object,
			 uint32_t role, const struct field_path *path, struct fmha_error *err);

static int decode_tensors(const msgpack_object *value, const struct field *field, char *at,
			  const struct field_path *path, struct fmha_error *err)
{
	struct field_path tensor = {.name = "tensor"};
	uint64_t seen = 0;
	int r;

	_Static_assert(FMHA_N_TENSORS <= 64, "seen has a bit a role");
	if (value->type != MSGPACK_OBJECT_MAP)
		return wrong_type(value, "must be a map", path, err);
	for (uint32_t i = 0; i < value->via.map.size; i++) {
		const msgpack_object_kv *entry = &value->via.map.ptr[i];
		struct field_path child = {.parent = &tensor};
		char text[32];
		int role = -1;

		if (entry->key.type != MSGPACK_OBJECT_STR)
			return wrong_type(&entry->key, "keys must be strings", path, err);
		for (uint32_t j = 0; j < FMHA_N_TENSORS && role < 0; j++)
			if (strlen(proto_roles[j].name) == entry->key.via.str.size &&
			    memcmp(proto_roles[j].name, entry->key.via.str.ptr,
				   entry->key.via.str.size) == 0)
				role = (int)j;
		child.name = role < 0 ? quote(text, entry->key.via.str.ptr, entry->key.via.str.size)
				      : proto_roles[role].name;
		if (role < 0)
			return field_error(err, FMHA_EINVAL, &child, "no such tensor");
		if (seen >> role & 1)
			return field_error(err, FMHA_EINVAL, &child, "given twice");
		seen |= UINT64_C(1) << role;
		r = decode_object(&entry->val, field->table,
				  at + (size_t)role * sizeof(struct fmha_tensor), (uint32_t)role,
				  &child, err);
		if (r < 0)
			return r;
	}
	return 0;
}

static int decode_value(const msgpack_object *value, const struct field *field, char *object,
			uint32_t role, const struct field_path *path, struct fmha_error *err)
{
	char *at = object + field->offset;
	uint32_t number;

	switch (field->type) {
	case FIELD_U32:
	case FIELD_U64:
		return decode_unsigned(value, field, at, path, err);
	case FIELD_I32:
		return decode_i32(value, field, at, path, err);
	case FIELD_BOOL:
		if (value->type != MSGPACK_OBJECT_BOOLEAN)
			return wrong_type(value, "must be a boolean", path, err);
		number = value->via.boolean;
		memcpy(at, &number, sizeof(number));
		return 0;
	case FIELD_F32:
	case FIELD_F64:
		return decode_float(value, field, at, path, err);
	case FIELD_STRING:
		return decode_string(value, field, at, path, err);
	case FIELD_BYTES:
		return decode_bytes(value, field, at, object + field->count_offset, path, err);
	case FIELD_ENUM:
		return decode_enum(value, field, at, path, err);
	case FIELD_STRUCT:
		return field_decode(value, field->table, at, field->anonymous ? NULL : path, err);
	case FIELD_ARRAY:
		return decode_array(value, field, at, object + field->count_offset, path, err);
	case FIELD_TENSORS:
		return decode_tensors(value, field, at, path, err);
	case FIELD_STRIDE:
		return decode_stride(value, at, role, path, err);
	case FIELD_EXTENT:
		number = (uint32_t)proto_roles[role].n_dims;
		memcpy(object + field->count_offset, &number, sizeof(number));
		return decode_stride(value, at, role, path, err);
	case FIELD_NUMBERS:
		return decode_numbers(value, field, at, path, err);
	}
	return 0;
}

/* The key's row, looked for from @start on because both sides go through the table in order. */
static int table_find(const struct field_table *table, const msgpack_object_str *key,
		      uint32_t start)
{
	for (uint32_t i = 0; i < table->n_fields; i++) {
		uint32_t at = start + i < table->n_fields ? start + i : start + i - table->n_fields;
		const struct field *field = &table->fields[at];

		if (field->name_bytes == key->size &&
		    field_same_name(field->name, key->ptr, key->size))
			return (int)at;
	}
	return -1;
}

static int decode_object(const msgpack_object *map, const struct field_table *table, char *object,
			 uint32_t role, const struct field_path *path, struct fmha_error *err)
{
	uint64_t seen = 0;
	uint32_t next = 0;
	int r;

	if (map->type != MSGPACK_OBJECT_MAP)
		return wrong_type(map, "must be a map", path, err);
	for (uint32_t i = 0; i < map->via.map.size; i++) {
		const msgpack_object_kv *entry = &map->via.map.ptr[i];
		struct field_path child = {.parent = path};
		char text[32];
		int index;

		if (entry->key.type != MSGPACK_OBJECT_STR)
			return wrong_type(&entry->key, "keys must be strings", path, err);
		index = table_find(table, &entry->key.via.str, next);
		child.name = index < 0
				     ? quote(text, entry->key.via.str.ptr, entry->key.via.str.size)
				     : table->fields[index].name;
		if (index < 0)
			return field_error(err, FMHA_EINVAL, &child, "no such field");
		if (seen >> index & 1)
			return field_error(err, FMHA_EINVAL, &child, "given twice");
		seen |= UINT64_C(1) << index;
		next = (uint32_t)index + 1;
		r = decode_value(&entry->val, &table->fields[index], object, role, &child, err);
		if (r < 0)
			return r;
	}
	for (uint32_t i = 0; i < table->n_fields; i++) {
		struct field_path child = {.parent = path, .name = table->fields[i].name};

		if (!table->fields[i].optional && !(seen >> i & 1))
			return field_error(err, FMHA_EINVAL, &child, "missing");
	}
	return 0;
}

enum { LARGE_BYTES = 4096 };

/* All but the contents of large arrays of bytes, whose counts are 0 then: clearing those takes as long as receiving them. */
static void clear(char *object, const struct field_table *table)
{
	size_t at = 0;

	for (uint32_t i = 0; i < table->n_fields && table->size >= LARGE_BYTES; i++) {
		const struct field *field = &table->fields[i];

		if (field->type != FIELD_BYTES || field->size < LARGE_BYTES || field->offset < at)
			continue;
		memset(object + at, 0, field->offset - at);
		at = field->offset + field->size;
	}
	memset(object + at, 0, table->size - at);
}

int field_decode(const msgpack_object *map, const struct field_table *table, void *ret_object,
		 const struct field_path *path, struct fmha_error *err)
{
	if (table->n_fields == 0 && map->type == MSGPACK_OBJECT_MAP && map->via.map.size == 0) {
		*(char *)ret_object = 0; /* a struct proto_empty */
		return 0;
	}
	clear(ret_object, table);
	if (table->init)
		table->init(ret_object);
	return decode_object(map, table, ret_object, 0, path, err);
}

/* ---- messages ---- */

static int broken(struct fmha_error *err, const char *sentence)
{
	return fmha_error_set(err, FMHA_EPROTO, "message: %s", sentence);
}

static int envelope_id(struct proto_message *message, const msgpack_object *id,
		       struct fmha_error *err)
{
	if (id->type != MSGPACK_OBJECT_POSITIVE_INTEGER || id->via.u64 > UINT32_MAX)
		return broken(err, "the id is no integer below 2^32");
	message->id = (uint32_t)id->via.u64;
	return 0;
}

static int envelope_method(struct proto_message *message, const msgpack_object *method,
			   const msgpack_object *params, struct fmha_error *err)
{
	if (method->type != MSGPACK_OBJECT_STR)
		return broken(err, "the method is no string");
	if (params->type != MSGPACK_OBJECT_MAP)
		return broken(err, "the params are no map");
	message->method = proto_method_find(method->via.str.ptr, method->via.str.size);
	if (message->method < 0)
		(void)quote(message->method_name, method->via.str.ptr, method->via.str.size);
	message->body = params;
	return 0;
}

static int envelope_answer(struct proto_message *message, const msgpack_object *error,
			   const msgpack_object *result, struct fmha_error *err)
{
	struct field_path path = {.name = "error"};
	struct wire_error wire;
	struct fmha_error why;

	if (error->type == MSGPACK_OBJECT_NIL) {
		if (result->type != MSGPACK_OBJECT_MAP)
			return broken(err, "an answer has neither error nor result");
		message->body = result;
		return 0;
	}
	if (result->type != MSGPACK_OBJECT_NIL)
		return broken(err, "an answer has both error and result");
	if (field_decode(error, &proto_error_table, &wire, &path, &why) < 0)
		return broken(err, why.msg);
	message->error.code = wire.code;
	memcpy(message->error.field, wire.field, sizeof(wire.field));
	memcpy(message->error.msg, wire.message, sizeof(wire.message));
	return 0;
}

static int envelope_decode(struct proto_message *message, const msgpack_object *root,
			   struct fmha_error *err)
{
	const msgpack_object *part = root->via.array.ptr;
	uint32_t n;
	int r;

	if (root->type != MSGPACK_OBJECT_ARRAY)
		return broken(err, "not an array");
	n = root->via.array.size;
	if (n < 1 || part[0].type != MSGPACK_OBJECT_POSITIVE_INTEGER || part[0].via.u64 > 2)
		return broken(err, "its type is none of 0, 1, 2");
	message->type = (enum proto_message_type)part[0].via.u64;
	if (n != (message->type == PROTO_NOTIFICATION ? 3 : 4))
		return broken(err, "wrong number of elements");
	if (message->type == PROTO_NOTIFICATION)
		return envelope_method(message, &part[1], &part[2], err);
	r = envelope_id(message, &part[1], err);
	if (r < 0)
		return r;
	if (message->type == PROTO_REQUEST)
		return envelope_method(message, &part[2], &part[3], err);
	return envelope_answer(message, &part[2], &part[3], err);
}

/* Enough for the tree of an ordinary request, so that the zone keeps one chunk for ever. */
enum { ZONE_CHUNK_BYTES = 8192 };

int tree_decode(struct proto_message *message, const uint8_t *payload, size_t n,
		struct fmha_error *err)
{
	struct msgpack_zone *zone = message->zone;
	msgpack_object root = {0}, *kept;
	size_t off = 0;
	int r;

	r = proto_precheck(payload, n, err);
	if (r < 0)
		return r;
	if (zone)
		msgpack_zone_clear(zone);
	else
		zone = msgpack_zone_new(ZONE_CHUNK_BYTES);
	message->zone = zone;
	kept = zone ? msgpack_zone_malloc(zone, sizeof(*kept)) : NULL;
	if (!kept)
		return fmha_error_set(err, FMHA_ENOMEM, "message: out of memory");
	r = msgpack_unpack((const char *)payload, n, &off, zone, &root);
	if (r == MSGPACK_UNPACK_NOMEM_ERROR)
		return fmha_error_set(err, FMHA_ENOMEM, "message: out of memory");
	if (r != MSGPACK_UNPACK_SUCCESS)
		return broken(err, "not MessagePack");
	*kept = root;
	return envelope_decode(message, kept, err);
}

int proto_message_decode(struct proto_message *message, const uint8_t *payload, size_t n,
			 struct fmha_error *err)
{
	message->method = -1;
	message->method_name[0] = '\0';
	message->error.code = FMHA_OK;
	message->body = NULL;
	if (flat_decode(message, payload, n))
		return 0;
	return tree_decode(message, payload, n, err);
}

void proto_message_deinit(struct proto_message *message)
{
	if (message->zone)
		msgpack_zone_free(message->zone);
	free(message->flat);
	*message = (struct proto_message){0};
}

int proto_decode_params(const struct proto_message *message, void *ret_params,
			struct fmha_error *err)
{
	if (message->method < 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "method", "method '%s': unknown",
					    message->method_name);
	return field_decode(message->body, proto_params_tables[message->method], ret_params, NULL,
			    err);
}

int proto_decode_result(const struct proto_message *message, enum proto_method method,
			void *ret_result, struct fmha_error *err)
{
	if (message->type != PROTO_ANSWER || message->error.code != FMHA_OK || !message->body)
		return fmha_error_set(err, FMHA_EINVAL, "message: not an answer with a result");
	return field_decode(message->body, proto_result_tables[method], ret_result, NULL, err);
}
