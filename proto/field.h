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
#include <proto/message.h>
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
	void (*init)(struct fmha_problem
			     *object); /* what fields that are not on the wire hold; may be NULL */
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

/* Where in a message the codec is, for the error; lives on the stack. */
struct field_path {
	const struct field_path *parent;
	const char *name; /* NULL: an array index */
	uint32_t index;
};

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

/* Names are short and mostly told apart by their length: cheaper than to call memcmp(). */
static inline bool field_same_name(const char *a, const char *b, size_t n)
{
	while (n > 0 && a[n - 1] == b[n - 1])
		n--;
	return n == 0;
}

/* ---- flat ---- */

/*
 * A shortcut past msgpack-c's unpacker for the messages that make up nearly all traffic.
 *
 * ping, run, the releases and their answers are an envelope around a map of a few short keys with
 * numbers below: the tree that the unpacker would build is known beforehand. flat_decode() fills in
 * the same objects in one pass over the bytes, without a zone and without the pre-check, since it
 * bounds what it reads itself. What it does not take, be it larger, nested, of another type or
 * broken, goes the long way and is checked there; what it takes, both ways take alike.
 */

/* Fills in type, id, method and body of a fresh @message. Return: whether it was one of these. */
bool flat_decode(struct proto_message *message, const uint8_t *payload, size_t n);

/* The long way, for every message. Return: as proto_message_decode(). */
int tree_decode(struct proto_message *message, const uint8_t *payload, size_t n,
		struct fmha_error *err);

#endif
