/* SPDX-License-Identifier: MIT */
/*
 * Every field of every message, from the tables: extreme and random values come back, and a value
 * that is unknown, missing, given twice, of a wrong type or out of range is refused by its name.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <msgpack.h>

#include <proto/limits.h>
#include <proto/problem.h>

#include <proto/messages.h>

#include "field.h"
#include "encode.h"
#include "tables.h"

static uint64_t random_state = 1;

static uint64_t random_u64(void)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state;
}

/* ---- round trips ---- */

enum filling { FILL_LOW, FILL_HIGH, FILL_RANDOM };

static uint64_t pick(enum filling filling, uint64_t low, uint64_t high)
{
	if (filling == FILL_LOW)
		return low;
	if (filling == FILL_HIGH)
		return high;
	return high - low == UINT64_MAX ? random_u64() : low + random_u64() % (high - low + 1);
}

static void fill(const struct field_table *table, char *object, enum filling filling);

static void fill_tensors(const struct field *field, char *at, enum filling filling)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = (struct fmha_tensor *)at + role;

		if (filling == FILL_LOW || (filling == FILL_RANDOM && random_u64() % 2))
			continue;
		fill(field->table, (char *)tensor, filling);
		tensor->buffer |= 1;
		for (int i = 0; i < proto_roles[role].n_dims; i++)
			tensor->stride[i] = filling == FILL_HIGH ? INT64_MIN
								 : (int64_t)random_u64();
		if (filling == FILL_RANDOM && random_u64() % 2)
			continue;
		tensor->n_dims = (uint32_t)proto_roles[role].n_dims;
		for (int i = 0; i < proto_roles[role].n_dims; i++)
			tensor->extent[i] = filling == FILL_HIGH ? INT64_MAX
								 : (int64_t)random_u64();
	}
}

static void fill_field(const struct field *field, char *object, enum filling filling)
{
	char *at = object + field->offset;
	uint64_t value = pick(filling, (uint64_t)field->min, field->max);
	uint32_t n;

	switch (field->type) {
	case FIELD_U32:
	case FIELD_BOOL:
	case FIELD_ENUM:
		n = field->type == FIELD_BOOL   ? (uint32_t)pick(filling, 0, 1)
		    : field->type == FIELD_ENUM ? (uint32_t)pick(filling, 0, field->names->n - 1)
						: (uint32_t)value;
		memcpy(at, &n, sizeof(n));
		break;
	case FIELD_I32:
		n = (uint32_t)(field->min +
			       (int64_t)pick(filling, 0, field->max - (uint64_t)field->min));
		memcpy(at, &n, sizeof(n));
		break;
	case FIELD_U64:
		memcpy(at, &value, sizeof(value));
		break;
	case FIELD_F32:
		memcpy(at, &(float){filling == FILL_LOW ? -1e38f : 1e-38f * (float)value},
		       sizeof(float));
		break;
	case FIELD_F64:
		memcpy(at, &(double){filling == FILL_LOW ? -1e308 : (double)value}, sizeof(double));
		break;
	case FIELD_STRING:
		n = (uint32_t)pick(filling, 0, field->size - 1);
		for (uint32_t i = 0; i < n; i++)
			at[i] = (char)(' ' + random_u64() % 95);
		break;
	case FIELD_BYTES:
		n = (uint32_t)pick(filling, 0, field->size);
		for (uint32_t i = 0; i < n; i++)
			at[i] = (char)random_u64();
		memcpy(object + field->count_offset, &n, sizeof(n));
		break;
	case FIELD_STRUCT:
		fill(field->table, at, filling);
		break;
	case FIELD_ARRAY:
		n = (uint32_t)pick(filling, 0, field->capacity);
		for (uint32_t i = 0; i < n; i++)
			fill(field->table, at + i * field->table->size, filling);
		memcpy(object + field->count_offset, &n, sizeof(n));
		break;
	case FIELD_TENSORS:
		fill_tensors(field, at, filling);
		break;
	case FIELD_STRIDE: /* fill_tensors() knows the role */
	case FIELD_EXTENT:
		break;
	case FIELD_NUMBERS:
		for (uint32_t i = 0; i < field->capacity; i++) {
			value = pick(filling, (uint64_t)field->min, field->max);
			memcpy(at + i * sizeof(value), &value, sizeof(value));
		}
		break;
	}
}

static void fill(const struct field_table *table, char *object, enum filling filling)
{
	if (table->init)
		table->init((void *)object);
	for (uint32_t i = 0; i < table->n_fields; i++)
		fill_field(&table->fields[i], object, filling);
}

struct packed {
	msgpack_sbuffer buffer;
	msgpack_unpacked unpacked;
};

static const msgpack_object *unpack(struct packed *packed)
{
	size_t off = 0;

	msgpack_unpacked_init(&packed->unpacked);
	assert_int_equal(msgpack_unpack_next(&packed->unpacked, packed->buffer.data,
					     packed->buffer.size, &off),
			 MSGPACK_UNPACK_SUCCESS);
	assert_int_equal(off, packed->buffer.size);
	return &packed->unpacked.data;
}

static void packed_deinit(struct packed *packed)
{
	msgpack_unpacked_destroy(&packed->unpacked);
	msgpack_sbuffer_destroy(&packed->buffer);
}

/* Bytes behind those that have come are unspecified: here 0. */
static void clear_unused(const struct field_table *table, char *object)
{
	for (uint32_t i = 0; i < table->n_fields; i++) {
		const struct field *field = &table->fields[i];
		uint32_t n;

		if (field->type != FIELD_BYTES)
			continue;
		memcpy(&n, object + field->count_offset, sizeof(n));
		assert_in_range(n, 0, field->size);
		memset(object + field->offset + n, 0, field->size - n);
	}
}

static void round_trip(const struct field_table *table, enum filling filling)
{
	char *object = calloc(1, table->size), *back = malloc(table->size);
	struct packed packed = {0};
	struct proto_buffer out = {0};
	struct writer writer = {.out = &out};
	struct fmha_error err = {0};

	assert_non_null(object);
	assert_non_null(back);
	memset(back, 0xa5, table->size);
	fill(table, object, filling);
	if (field_encode(&writer, table, object, NULL, &err) != 0)
		fail_msg("%s: %s", table->name, err.msg);
	assert_false(writer.failed);
	assert_int_equal(msgpack_sbuffer_write(&packed.buffer, (const char *)out.data, out.size),
			 0);
	if (field_decode(unpack(&packed), table, back, NULL, &err) != 0)
		fail_msg("%s: %s", table->name, err.msg);
	clear_unused(table, back);
	assert_memory_equal(back, object, table->size);
	proto_buffer_deinit(&out);
	packed_deinit(&packed);
	free(object);
	free(back);
}

static void every_struct_round_trips(void **state)
{
	const struct tables tables = tables_all();

	(void)state;
	for (size_t i = 0; i < tables.n; i++) {
		/* A tensor's strides need its role: tested inside a problem. */
		if (strcmp(tables.at[i]->name, "tensor") == 0)
			continue;
		round_trip(tables.at[i], FILL_LOW);
		round_trip(tables.at[i], FILL_HIGH);
		for (int round = 0; round < 200; round++)
			round_trip(tables.at[i], FILL_RANDOM);
	}
	assert_true(tables.n > 60);
}

static void every_table_is_sound(void **state)
{
	const struct tables tables = tables_all();

	(void)state;
	for (int i = 0; i < PROTO_N_METHODS; i++) {
		assert_non_null(proto_params_tables[i]);
		assert_non_null(proto_result_tables[i]);
	}
	for (size_t i = 0; i < tables.n; i++) {
		const struct field_table *table = tables.at[i];

		for (uint32_t j = 0; j < table->n_fields; j++) {
			const struct field *field = &table->fields[j];

			for (uint32_t k = 0; k < j; k++)
				assert_string_not_equal(field->name, table->fields[k].name);
			assert_true(field->offset < table->size);
			assert_true(field->type != FIELD_ENUM || field->names->n > 1);
		}
	}
}

static void an_empty_problem_is_the_initial_one(void **state)
{
	const struct field_table *problem = proto_params_tables[PROTO_PLAN]->fields[0].table;
	struct fmha_problem expected, got;
	msgpack_object empty = {.type = MSGPACK_OBJECT_MAP};

	(void)state;
	fmha_problem_init(&expected);
	assert_int_equal(field_decode(&empty, problem, &got, NULL, NULL), 0);
	assert_memory_equal(&got, &expected, sizeof(got));
}

/* ---- refusals ---- */

typedef void (*pack_value)(msgpack_packer *packer);

static void pack_nil(msgpack_packer *packer)
{
	msgpack_pack_nil(packer);
}

static void pack_bool(msgpack_packer *packer)
{
	msgpack_pack_true(packer);
}

static void pack_float(msgpack_packer *packer)
{
	msgpack_pack_double(packer, 1.0);
}

static void pack_nan(msgpack_packer *packer)
{
	msgpack_pack_float(packer, NAN);
}

static void pack_infinity(msgpack_packer *packer)
{
	msgpack_pack_double(packer, -INFINITY);
}

static void pack_too_large(msgpack_packer *packer)
{
	msgpack_pack_double(packer, 1e39);
}

static void pack_int(msgpack_packer *packer)
{
	msgpack_pack_int(packer, 1);
}

static void pack_negative(msgpack_packer *packer)
{
	msgpack_pack_int(packer, -1);
}

static void pack_2_32(msgpack_packer *packer)
{
	msgpack_pack_uint64(packer, UINT64_C(1) << 32);
}

static void pack_u64_max(msgpack_packer *packer)
{
	msgpack_pack_uint64(packer, UINT64_MAX);
}

static void pack_i64_min(msgpack_packer *packer)
{
	msgpack_pack_int64(packer, INT64_MIN);
}

static void pack_text(msgpack_packer *packer)
{
	msgpack_pack_str(packer, 5);
	msgpack_pack_str_body(packer, "x y z", 5);
}

static void pack_long_text(msgpack_packer *packer)
{
	static char text[PROTO_MAX_STRING];

	memset(text, 'x', sizeof(text));
	msgpack_pack_str(packer, sizeof(text));
	msgpack_pack_str_body(packer, text, sizeof(text));
}

static void pack_bad_text(msgpack_packer *packer)
{
	msgpack_pack_str(packer, 2);
	msgpack_pack_str_body(packer, "\xc3(", 2);
}

static void pack_bytes(msgpack_packer *packer)
{
	msgpack_pack_bin(packer, 1);
	msgpack_pack_bin_body(packer, "x", 1);
}

static void pack_long_bytes(msgpack_packer *packer)
{
	static const char bytes[PROTO_POOL_BATCH * 32 + 1]; /* no field is larger */

	msgpack_pack_bin(packer, sizeof(bytes));
	msgpack_pack_bin_body(packer, bytes, sizeof(bytes));
}

static void pack_array(msgpack_packer *packer)
{
	msgpack_pack_array(packer, 1);
	msgpack_pack_int(packer, 1);
}

static void pack_long_array(msgpack_packer *packer)
{
	msgpack_pack_array(packer, 17);
	for (int i = 0; i < 17; i++)
		msgpack_pack_map(packer, 0);
}

static void pack_map(msgpack_packer *packer)
{
	msgpack_pack_map(packer, 1);
	pack_text(packer);
	msgpack_pack_int(packer, 1);
}

static void pack_map_of_ints(msgpack_packer *packer)
{
	msgpack_pack_map(packer, 1);
	msgpack_pack_int(packer, 1);
	msgpack_pack_int(packer, 1);
}

#define WRONG(...)                                                                                 \
	(const pack_value[])                                                                       \
	{                                                                                          \
		pack_nil, __VA_ARGS__, NULL                                                        \
	}

static const pack_value *const wrong_values[] = {
	[FIELD_U32] = WRONG(pack_bool, pack_float, pack_negative, pack_2_32, pack_text, pack_array,
			    pack_map),
	[FIELD_U64] = WRONG(pack_bool, pack_float, pack_negative, pack_i64_min, pack_text,
			    pack_array, pack_map),
	[FIELD_I32] = WRONG(pack_bool, pack_float, pack_2_32, pack_u64_max, pack_i64_min, pack_text,
			    pack_array, pack_map),
	[FIELD_BOOL] = WRONG(pack_int, pack_float, pack_text, pack_array, pack_map),
	[FIELD_F32] = WRONG(pack_bool, pack_nan, pack_infinity, pack_too_large, pack_text,
			    pack_array, pack_map),
	[FIELD_F64] = WRONG(pack_bool, pack_nan, pack_infinity, pack_text, pack_array, pack_map),
	[FIELD_STRING] = WRONG(pack_bool, pack_int, pack_float, pack_bytes, pack_long_text,
			       pack_bad_text, pack_array, pack_map),
	[FIELD_BYTES] = WRONG(pack_int, pack_text, pack_long_bytes, pack_array, pack_map),
	[FIELD_ENUM] = WRONG(pack_int, pack_bool, pack_text, pack_bytes, pack_array, pack_map),
	[FIELD_STRUCT] = WRONG(pack_int, pack_text, pack_array, pack_map, pack_map_of_ints),
	[FIELD_ARRAY] = WRONG(pack_int, pack_text, pack_array, pack_long_array, pack_map),
	[FIELD_TENSORS] = WRONG(pack_int, pack_text, pack_array, pack_map, pack_map_of_ints),
	[FIELD_STRIDE] = WRONG(pack_int, pack_text, pack_array, pack_long_array, pack_map),
	[FIELD_EXTENT] = WRONG(pack_int, pack_text, pack_array, pack_long_array, pack_map),
	[FIELD_NUMBERS] = WRONG(pack_int, pack_text, pack_array, pack_long_array, pack_map),
};

/* A map with one entry; then what field_decode() says. */
static void refuse_entry(const struct field_table *table, const char *key, pack_value value,
			 struct fmha_error *err)
{
	char *object = malloc(table->size);
	struct packed packed = {0};
	msgpack_packer packer;

	assert_non_null(object);
	msgpack_packer_init(&packer, &packed.buffer, msgpack_sbuffer_write);
	msgpack_pack_map(&packer, 1);
	msgpack_pack_str(&packer, strlen(key));
	msgpack_pack_str_body(&packer, key, strlen(key));
	value(&packer);
	*err = (struct fmha_error){0};
	if (field_decode(unpack(&packed), table, object, NULL, err) != FMHA_EINVAL)
		fail_msg("%s.%s accepted a wrong value", table->name, key);
	packed_deinit(&packed);
	free(object);
}

static void wrong_types_and_ranges_are_named(void **state)
{
	const struct tables tables = tables_all();
	struct fmha_error err;
	size_t n = 0;

	(void)state;
	for (size_t i = 0; i < tables.n; i++) {
		const struct field_table *table = tables.at[i];

		for (uint32_t j = 0; j < table->n_fields; j++) {
			const struct field *field = &table->fields[j];

			for (const pack_value *value = wrong_values[field->type]; *value; value++) {
				refuse_entry(table, field->name, *value, &err);
				/* Inside a struct the path goes on. */
				if (field->anonymous || field->type == FIELD_TENSORS)
					continue;
				if (strncmp(err.field, field->name, strlen(field->name)) != 0)
					fail_msg("%s.%s: the error names '%s': %s", table->name,
						 field->name, err.field, err.msg);
				assert_non_null(strstr(err.msg, err.field));
				n++;
			}
		}
	}
	assert_true(n > 500);
}

static void unknown_missing_and_double_fields_are_named(void **state)
{
	const struct tables tables = tables_all();

	(void)state;
	for (size_t i = 0; i < tables.n; i++) {
		const struct field_table *table = tables.at[i];
		msgpack_object empty = {.type = MSGPACK_OBJECT_MAP};
		const struct field *required = NULL;
		char *object = malloc(table->size);
		struct fmha_error err = {0};
		int r;

		assert_non_null(object);
		for (uint32_t j = 0; j < table->n_fields && !required; j++)
			required = table->fields[j].optional ? NULL : &table->fields[j];
		r = field_decode(&empty, table, object, NULL, &err);
		assert_int_equal(r, required ? FMHA_EINVAL : 0);
		if (required) {
			assert_string_equal(err.field, required->name);
			assert_non_null(strstr(err.msg, ": missing"));
		}
		refuse_entry(table, "nonsense\n", pack_int, &err);
		assert_string_equal(err.field, "nonsense?");
		assert_string_equal(err.msg, "nonsense?: no such field");
		free(object);
	}
}

static void twice(const struct field_table *table, const char *prefix, const char *key,
		  const char *field)
{
	char *object = malloc(table->size);
	struct packed packed = {0};
	struct fmha_error err = {0};
	msgpack_packer packer;
	size_t n = strlen(key);

	assert_non_null(object);
	msgpack_packer_init(&packer, &packed.buffer, msgpack_sbuffer_write);
	if (prefix) {
		msgpack_pack_map(&packer, 1);
		msgpack_pack_str(&packer, strlen(prefix));
		msgpack_pack_str_body(&packer, prefix, strlen(prefix));
	}
	msgpack_pack_map(&packer, 2);
	for (int i = 0; i < 2; i++) {
		msgpack_pack_str(&packer, n);
		msgpack_pack_str_body(&packer, key, n);
		if (prefix) {
			msgpack_pack_map(&packer, 2);
			msgpack_pack_str(&packer, 6);
			msgpack_pack_str_body(&packer, "buffer", 6);
			msgpack_pack_int(&packer, 1);
			msgpack_pack_str(&packer, 5);
			msgpack_pack_str_body(&packer, "dtype", 5);
			msgpack_pack_str(&packer, 3);
			msgpack_pack_str_body(&packer, "f32", 3);
		} else {
			msgpack_pack_int(&packer, 1);
		}
	}
	assert_int_equal(field_decode(unpack(&packed), table, object, NULL, &err), FMHA_EINVAL);
	assert_string_equal(err.field, field);
	assert_non_null(strstr(err.msg, ": given twice"));
	packed_deinit(&packed);
	free(object);
}

static void double_keys_are_refused(void **state)
{
	const struct field_table *problem = proto_params_tables[PROTO_PLAN]->fields[0].table;

	(void)state;
	twice(proto_params_tables[PROTO_HELLO], NULL, "version", "version");
	twice(problem, NULL, "batch", "batch");
	twice(problem, "tensors", "k_new", "tensor.k_new");
}

static void strings_are_printable_utf8(void **state)
{
	static const char *const good[] = {"", "fmhactl/0.1", "caf\xc3\xa9", "\xe2\x82\xac",
					   "\xf0\x9f\x98\x80"};
	static const char *const bad[] = {"a\n",
					  "\x7f",
					  "\xc3",
					  "\xc0\x80",
					  "\xe0\x80\x80",
					  "\xed\xa0\x80",
					  "\xf4\x90\x80\x80",
					  "\xf8\x88\x80\x80",
					  "\xc2\x85",
					  "\x80",
					  "\xf0\x9f\x98"};

	(void)state;
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
		assert_true(field_string_valid(good[i], strlen(good[i])));
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_false(field_string_valid(bad[i], strlen(bad[i])));
	assert_false(field_string_valid("a\0b", 3));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_table_is_sound),
		cmocka_unit_test(every_struct_round_trips),
		cmocka_unit_test(an_empty_problem_is_the_initial_one),
		cmocka_unit_test(wrong_types_and_ranges_are_named),
		cmocka_unit_test(unknown_missing_and_double_fields_are_named),
		cmocka_unit_test(double_keys_are_refused),
		cmocka_unit_test(strings_are_printable_utf8),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
