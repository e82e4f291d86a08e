/* SPDX-License-Identifier: MIT */
/*
 * field.h: the description of a message struct that encoder, decoder and PROTOCOL.md share.
 *
 * A struct is a map on the wire; each row of its table is one key. Optional fields that hold their
 * fallback are left out by the encoder and restored by the decoder.
 */
#ifndef PROTO_FIELD_H
#define PROTO_FIELD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>
#include <proto/methods.h>
#include <proto/problem.h>

struct field_table;

enum field_type {
	FIELD_U32,
	FIELD_U64,
	FIELD_I32,
	FIELD_BOOL,    /* a uint32_t that is 0 or 1 */
	FIELD_F32,     /* finite; as an optional field NaN stands for "absent" */
	FIELD_F64,     /* finite */
	FIELD_STRING,  /* a char array; UTF-8 without control characters */
	FIELD_BYTES,   /* a uint8_t array and a uint32_t count */
	FIELD_ENUM,    /* a uint32_t, on the wire one of `names` */
	FIELD_STRUCT,  /* `table` */
	FIELD_ARRAY,   /* structs of `table` and a uint32_t count */
	FIELD_TENSORS, /* a struct fmha_tensor[FMHA_N_TENSORS]: a map from role to `table` */
	FIELD_STRIDE,  /* an int64_t[5], on the wire as many as the role has dimensions */
	FIELD_EXTENT,  /* the same, and a uint32_t count that is the role's or, absent, 0 */
	FIELD_NUMBERS, /* a uint64_t[capacity], on the wire all of them */
};

struct field {
	const char *name;
	uint32_t name_bytes;
	enum field_type type;
	bool optional;
	size_t offset;
	size_t size;         /* STRING, BYTES: of the array */
	size_t count_offset; /* BYTES, ARRAY */
	uint32_t capacity;   /* ARRAY, NUMBERS */
	int64_t min;         /* U32, U64, I32, each of NUMBERS */
	uint64_t max;        /* I32: an int64_t in disguise */
	int64_t fallback;    /* optional numbers; FIELD_F32: 0, or NaN when not 0 */
	const struct proto_words *names;
	const struct field_table *table;
	/* The field's children are named without it: "hdim_q", not "problem.hdim_q". */
	bool anonymous;
	const char *note; /* for PROTOCOL.md */
};

#define FIELD_TABLE_MAX 64 /* fields in one table: the decoder keeps a bit mask */

struct field_table {
	const char *name; /* the struct's, without proto_ */
	size_t size;
	const struct field *fields;
	uint32_t n_fields;
	void (*init)(void *object); /* what fields that are not on the wire hold; may be NULL */
};

extern const struct field_table *const proto_params_tables[PROTO_N_METHODS];
extern const struct field_table *const proto_result_tables[PROTO_N_METHODS];
/* An error as it travels: with its code's name, for people who read dumps. */
struct wire_error {
	int32_t code;
	char name[32];
	char field[sizeof(((struct fmha_error *)0)->field)];
	char message[sizeof(((struct fmha_error *)0)->msg)];
};

extern const struct field_table proto_error_table; /* of struct wire_error */

/* Every table once, in the order of PROTOCOL.md; NULL ends it. */
extern const struct field_table *const proto_tables[];

/* Where in a message the codec is, for the error; lives on the stack. */
struct field_path {
	const struct field_path *parent;
	const char *name; /* NULL: an array index */
	uint32_t index;
};

/* "tensor.k.stride[2]", cut off when longer than @size. */
void field_path_print(const struct field_path *path, char *out, size_t size);

/* Fills @err with the path as the field and "<path>: <sentence>". Return: @code. */
int field_error(struct fmha_error *err, int code, const struct field_path *path, const char *fmt,
		...) __attribute__((format(printf, 4, 5)));

/* UTF-8 without control characters: fit for logs and for every peer's decoder. */
bool field_string_valid(const char *text, size_t n);

struct writer;
struct msgpack_object;
int field_encode(struct writer *writer, const struct field_table *table, const void *object,
		 const struct field_path *path, struct fmha_error *err);
int field_decode(const struct msgpack_object *map, const struct field_table *table,
		 void *ret_object, const struct field_path *path, struct fmha_error *err);

#endif
