/* SPDX-License-Identifier: MIT */
/*
 * decode.c: bytes to structs, in one pass and without allocating. The pre-check has made sure that
 * the bytes are one object; here every key must be in the field table, at most once, and every
 * value of its field's type and range.
 */
#include <proto/message.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <proto/error.h>
#include <proto/precheck.h>
#include <proto/problem.h>

#include "field.h"
#include "reader.h"

/* Peers' bytes in our sentences: cut off and printable. */
static const char *quote(char out[32], const char *text, size_t n)
{
	size_t kept = n < 31 ? n : 31;

	for (size_t i = 0; i < kept; i++)
		out[i] = text[i] < 0x20 || text[i] > 0x7e ? '?' : text[i];
	out[kept] = '\0';
	return out;
}

static const char *type_name(enum value_type type)
{
	static const char *const names[] = {
		[VALUE_NIL] = "nil",
		[VALUE_BOOL] = "a boolean",
		[VALUE_UNSIGNED] = "an integer",
		[VALUE_NEGATIVE] = "an integer",
		[VALUE_FLOAT] = "a float",
		[VALUE_STRING] = "a string",
		[VALUE_BYTES] = "bytes",
		[VALUE_ARRAY] = "an array",
		[VALUE_MAP] = "a map",
	};

	return names[type];
}

static int wrong_type(const struct value *value, const char *wanted, const struct field_path *path,
		      struct fmha_error *err)
{
	return field_error(err, FMHA_EINVAL, path, "%s, not %s", wanted, type_name(value->type));
}

static int decode_unsigned(const struct value *value, const struct field *field, char *at,
			   const struct field_path *path, struct fmha_error *err)
{
	if (value->type == VALUE_NEGATIVE)
		return field_error(err, FMHA_EINVAL, path, "%lld is negative",
				   (long long)value->i64);
	if (value->type != VALUE_UNSIGNED)
		return wrong_type(value, "must be an integer", path, err);
	if (value->u64 < (uint64_t)field->min)
		return field_error(err, FMHA_EINVAL, path, "%llu is below %lld",
				   (unsigned long long)value->u64, (long long)field->min);
	if (value->u64 > field->max)
		return field_error(err, FMHA_EINVAL, path, "%llu is above %llu",
				   (unsigned long long)value->u64, (unsigned long long)field->max);
	if (field->type == FIELD_U64) {
		memcpy(at, &value->u64, sizeof(uint64_t));
	} else {
		uint32_t number = (uint32_t)value->u64;

		memcpy(at, &number, sizeof(number));
	}
	return 0;
}

static int decode_signed(const struct value *value, int64_t min, int64_t max, int64_t *ret_value,
			 const struct field_path *path, struct fmha_error *err)
{
	if (value->type != VALUE_UNSIGNED && value->type != VALUE_NEGATIVE)
		return wrong_type(value, "must be an integer", path, err);
	if (value->type == VALUE_UNSIGNED && (value->u64 > INT64_MAX || (int64_t)value->u64 > max))
		return field_error(err, FMHA_EINVAL, path, "%llu is above %lld",
				   (unsigned long long)value->u64, (long long)max);
	if (value->type == VALUE_NEGATIVE && value->i64 < min)
		return field_error(err, FMHA_EINVAL, path, "%lld is below %lld",
				   (long long)value->i64, (long long)min);
	*ret_value = value->i64;
	return 0;
}

static int decode_i32(const struct value *value, const struct field *field, char *at,
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

static int decode_float(const struct value *value, const struct field *field, char *at,
			const struct field_path *path, struct fmha_error *err)
{
	double number;
	float narrow;

	/* An integer is a number too: dynamic languages send 1 for 1.0. */
	if (value->type == VALUE_FLOAT)
		number = value->f64;
	else if (value->type == VALUE_UNSIGNED)
		number = (double)value->u64;
	else if (value->type == VALUE_NEGATIVE)
		number = (double)value->i64;
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

static int decode_string(const struct value *value, const struct field *field, char *at,
			 const struct field_path *path, struct fmha_error *err)
{
	if (value->type != VALUE_STRING)
		return wrong_type(value, "must be a string", path, err);
	if (value->n >= field->size)
		return field_error(err, FMHA_EINVAL, path, "%u bytes, more than %zu", value->n,
				   field->size - 1);
	if (!field_string_valid(value->text, value->n))
		return field_error(err, FMHA_EINVAL, path, "not printable UTF-8");
	memcpy(at, value->text, value->n);
	at[value->n] = '\0';
	return 0;
}

static int decode_bytes(const struct value *value, const struct field *field, char *at, char *count,
			const struct field_path *path, struct fmha_error *err)
{
	if (value->type != VALUE_BYTES)
		return wrong_type(value, "must be bytes", path, err);
	if (value->n > field->size)
		return field_error(err, FMHA_EINVAL, path, "%u bytes, more than %zu", value->n,
				   field->size);
	memcpy(at, value->text, value->n);
	memcpy(count, &value->n, sizeof(uint32_t));
	return 0;
}

static bool text_is(const struct value *value, const char *text, size_t n)
{
	return value->n == n && memcmp(value->text, text, n) == 0;
}

static int decode_enum(const struct value *value, const struct field *field, char *at,
		       const struct field_path *path, struct fmha_error *err)
{
	char text[32];

	if (value->type != VALUE_STRING)
		return wrong_type(value, "must be a string", path, err);
	for (uint32_t i = 0; i < field->names->n; i++) {
		const char *name = field->names->names[i];

		if (text_is(value, name, strlen(name))) {
			memcpy(at, &i, sizeof(i));
			return 0;
		}
	}
	return field_error(err, FMHA_EINVAL, path, "'%s' is none of its values",
			   quote(text, value->text, value->n));
}

static int decode_bool(const struct value *value, char *at, const struct field_path *path,
		       struct fmha_error *err)
{
	uint32_t number;

	if (value->type != VALUE_BOOL)
		return wrong_type(value, "must be a boolean", path, err);
	number = value->boolean;
	memcpy(at, &number, sizeof(number));
	return 0;
}

static int decode_scalar(const struct value *value, const struct field *field, char *object,
			 const struct field_path *path, struct fmha_error *err)
{
	char *at = object + field->offset;

	switch (field->type) {
	case FIELD_U32:
	case FIELD_U64:
		return decode_unsigned(value, field, at, path, err);
	case FIELD_I32:
		return decode_i32(value, field, at, path, err);
	case FIELD_BOOL:
		return decode_bool(value, at, path, err);
	case FIELD_F32:
	case FIELD_F64:
		return decode_float(value, field, at, path, err);
	case FIELD_STRING:
		return decode_string(value, field, at, path, err);
	case FIELD_BYTES:
		return decode_bytes(value, field, at, object + field->count_offset, path, err);
	default:
		return decode_enum(value, field, at, path, err);
	}
}

/* ---- containers ---- */

static int decode_array(struct reader *reader, const struct field *field, char *at, char *count,
			const struct field_path *path, struct fmha_error *err)
{
	struct value array = reader_next(reader);
	int r;

	if (array.type != VALUE_ARRAY)
		return wrong_type(&array, "must be an array", path, err);
	if (array.n > field->capacity)
		return field_error(err, FMHA_EINVAL, path, "%u elements, more than %u", array.n,
				   field->capacity);
	for (uint32_t i = 0; i < array.n; i++) {
		struct field_path element = {.parent = path, .index = i};

		r = field_decode(reader, field->table, at + i * field->table->size, &element, err);
		if (r < 0)
			return r;
	}
	memcpy(count, &array.n, sizeof(array.n));
	return 0;
}

static int decode_stride(struct reader *reader, char *at, uint32_t role,
			 const struct field_path *path, struct fmha_error *err)
{
	uint32_t n_dims = (uint32_t)proto_roles[role].n_dims;
	struct value array = reader_next(reader);
	int r;

	if (array.type != VALUE_ARRAY)
		return wrong_type(&array, "must be an array", path, err);
	if (array.n != n_dims)
		return field_error(err, FMHA_EINVAL, path, "%u elements, not %u", array.n, n_dims);
	for (uint32_t i = 0; i < n_dims; i++) {
		struct field_path element = {.parent = path, .index = i};
		struct value value = reader_next(reader);
		int64_t stride = 0;

		r = decode_signed(&value, INT64_MIN, INT64_MAX, &stride, &element, err);
		if (r < 0)
			return r;
		memcpy(at + i * sizeof(stride), &stride, sizeof(stride));
	}
	return 0;
}

static int decode_object(struct reader *reader, const struct field_table *table, char *object,
			 uint32_t role, const struct field_path *path, struct fmha_error *err);

static int role_find(const struct value *key)
{
	for (int i = 0; i < FMHA_N_TENSORS; i++)
		if (text_is(key, proto_roles[i].name, strlen(proto_roles[i].name)))
			return i;
	return -1;
}

static int decode_tensors(struct reader *reader, const struct field *field, char *at,
			  const struct field_path *path, struct fmha_error *err)
{
	const struct field_path tensor = {.name = "tensor"};
	struct value map = reader_next(reader);
	uint64_t seen = 0;
	int r;

	_Static_assert(FMHA_N_TENSORS <= 64, "seen has a bit a role");
	if (map.type != VALUE_MAP)
		return wrong_type(&map, "must be a map", path, err);
	for (uint32_t i = 0; i < map.n; i++) {
		struct value key = reader_next(reader);
		struct field_path child = {.parent = &tensor};
		char text[32];
		int role;

		if (key.type != VALUE_STRING)
			return wrong_type(&key, "keys must be strings", path, err);
		role = role_find(&key);
		child.name = role < 0 ? quote(text, key.text, key.n) : proto_roles[role].name;
		if (role < 0)
			return field_error(err, FMHA_EINVAL, &child, "no such tensor");
		if (seen >> role & 1)
			return field_error(err, FMHA_EINVAL, &child, "given twice");
		seen |= UINT64_C(1) << role;
		r = decode_object(reader, field->table,
				  at + (size_t)role * sizeof(struct fmha_tensor), (uint32_t)role,
				  &child, err);
		if (r < 0)
			return r;
	}
	return 0;
}

static int decode_value(struct reader *reader, const struct field *field, char *object,
			uint32_t role, const struct field_path *path, struct fmha_error *err)
{
	char *at = object + field->offset;
	struct value value;

	switch (field->type) {
	case FIELD_STRUCT:
		return field_decode(reader, field->table, at, field->anonymous ? NULL : path, err);
	case FIELD_ARRAY:
		return decode_array(reader, field, at, object + field->count_offset, path, err);
	case FIELD_TENSORS:
		return decode_tensors(reader, field, at, path, err);
	case FIELD_STRIDE:
		return decode_stride(reader, at, role, path, err);
	default:
		value = reader_next(reader);
		return decode_scalar(&value, field, object, path, err);
	}
}

/* The key's row, looked for from @start on because both sides go through the table in order. */
static int table_find(const struct field_table *table, const struct value *key, uint32_t start)
{
	for (uint32_t i = 0; i < table->n_fields; i++) {
		uint32_t at = start + i < table->n_fields ? start + i : start + i - table->n_fields;

		if (text_is(key, table->fields[at].name, table->fields[at].name_bytes))
			return (int)at;
	}
	return -1;
}

static int check_missing(const struct field_table *table, uint64_t seen,
			 const struct field_path *path, struct fmha_error *err)
{
	for (uint32_t i = 0; i < table->n_fields; i++) {
		struct field_path child = {.parent = path, .name = table->fields[i].name};

		if (!table->fields[i].optional && !(seen >> i & 1))
			return field_error(err, FMHA_EINVAL, &child, "missing");
	}
	return 0;
}

/* @role: which tensor this is; only a FIELD_STRIDE looks at it. */
static int decode_object(struct reader *reader, const struct field_table *table, char *object,
			 uint32_t role, const struct field_path *path, struct fmha_error *err)
{
	struct value map = reader_next(reader);
	uint64_t seen = 0;
	uint32_t next = 0;
	int r;

	if (map.type != VALUE_MAP)
		return wrong_type(&map, "must be a map", path, err);
	for (uint32_t i = 0; i < map.n; i++) {
		struct value key = reader_next(reader);
		struct field_path child = {.parent = path};
		char text[32];
		int index;

		if (key.type != VALUE_STRING)
			return wrong_type(&key, "keys must be strings", path, err);
		index = table_find(table, &key, next);
		child.name = index < 0 ? quote(text, key.text, key.n) : table->fields[index].name;
		if (index < 0)
			return field_error(err, FMHA_EINVAL, &child, "no such field");
		if (seen >> index & 1)
			return field_error(err, FMHA_EINVAL, &child, "given twice");
		seen |= UINT64_C(1) << index;
		next = (uint32_t)index + 1;
		r = decode_value(reader, &table->fields[index], object, role, &child, err);
		if (r < 0)
			return r;
	}
	return check_missing(table, seen, path, err);
}

int field_decode(struct reader *reader, const struct field_table *table, void *ret_object,
		 const struct field_path *path, struct fmha_error *err)
{
	memset(ret_object, 0, table->size);
	if (table->init)
		table->init(ret_object);
	return decode_object(reader, table, ret_object, 0, path, err);
}

/* ---- messages ---- */

int proto_method_find(const char *name, size_t n)
{
	for (int i = 0; i < PROTO_N_METHODS; i++)
		if (proto_methods[i].name_bytes == n && memcmp(proto_methods[i].name, name, n) == 0)
			return i;
	return -1;
}

static int broken(struct fmha_error *err, const char *sentence)
{
	return fmha_error_set(err, FMHA_EPROTO, "message: %s", sentence);
}

static int envelope_id(struct proto_message *message, struct reader *reader, struct fmha_error *err)
{
	struct value id = reader_next(reader);

	if (id.type != VALUE_UNSIGNED || id.u64 > UINT32_MAX)
		return broken(err, "the id is no integer below 2^32");
	message->id = (uint32_t)id.u64;
	return 0;
}

static int envelope_method(struct proto_message *message, struct reader *reader,
			   struct fmha_error *err)
{
	struct value method = reader_next(reader);

	if (method.type != VALUE_STRING)
		return broken(err, "the method is no string");
	if (reader_peek(reader) != VALUE_MAP)
		return broken(err, "the params are no map");
	message->method = proto_method_find(method.text, method.n);
	if (message->method < 0)
		(void)quote(message->method_name, method.text, method.n);
	message->body = reader->at;
	return 0;
}

static int envelope_answer(struct proto_message *message, struct reader *reader,
			   struct fmha_error *err)
{
	const struct field_path path = {.name = "error"};
	struct wire_error wire;
	struct fmha_error why;

	if (reader_peek(reader) == VALUE_NIL) {
		(void)reader_next(reader);
		if (reader_peek(reader) != VALUE_MAP)
			return broken(err, "an answer has neither error nor result");
		message->body = reader->at;
		return 0;
	}
	if (field_decode(reader, &proto_error_table, &wire, &path, &why) < 0)
		return broken(err, why.msg);
	if (reader_peek(reader) != VALUE_NIL)
		return broken(err, "an answer has both error and result");
	message->error.code = wire.code;
	memcpy(message->error.field, wire.field, sizeof(wire.field));
	memcpy(message->error.msg, wire.message, sizeof(wire.message));
	return 0;
}

int proto_message_decode(struct proto_message *message, const uint8_t *payload, size_t n,
			 struct fmha_error *err)
{
	struct reader reader = {.at = payload};
	struct value array, type;
	int r;

	r = proto_precheck(payload, n, err);
	if (r < 0)
		return r;
	message->method = -1;
	message->method_name[0] = '\0';
	message->error.code = FMHA_OK;
	message->body = NULL;
	array = reader_next(&reader);
	if (array.type != VALUE_ARRAY)
		return broken(err, "not an array");
	type = array.n > 0 ? reader_next(&reader) : array;
	if (type.type != VALUE_UNSIGNED || type.u64 > PROTO_NOTIFICATION)
		return broken(err, "its type is none of 0, 1, 2");
	message->type = (enum proto_message_type)type.u64;
	if (array.n != (message->type == PROTO_NOTIFICATION ? 3 : 4))
		return broken(err, "wrong number of elements");
	r = message->type == PROTO_NOTIFICATION ? 0 : envelope_id(message, &reader, err);
	if (r < 0)
		return r;
	if (message->type == PROTO_ANSWER)
		return envelope_answer(message, &reader, err);
	return envelope_method(message, &reader, err);
}

int proto_decode_params(const struct proto_message *message, void *ret_params,
			struct fmha_error *err)
{
	struct reader reader = {.at = message->body};

	if (message->method < 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "method", "method '%s': unknown",
					    message->method_name);
	return field_decode(&reader, proto_params_tables[message->method], ret_params, NULL, err);
}

int proto_decode_result(const struct proto_message *message, enum proto_method method,
			void *ret_result, struct fmha_error *err)
{
	struct reader reader = {.at = message->body};

	if (message->type != PROTO_ANSWER || message->error.code != FMHA_OK || !message->body)
		return fmha_error_set(err, FMHA_EINVAL, "message: not an answer with a result");
	return field_decode(&reader, proto_result_tables[method], ret_result, NULL, err);
}
