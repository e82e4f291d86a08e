/* SPDX-License-Identifier: MIT */
/*
 * messages.c: messages.def as tables, one row a field: what encoder, decoder and PROTOCOL.md follow.
 */
#include <proto/messages.h>

#include <proto/message.h>
#include <proto/problem.h>

#include "field.h"

#define WORDS(list, ...)                                                                           \
	static const struct proto_words proto_##list##_words = {                                   \
		.names = (const char *const[]){__VA_ARGS__},                                       \
		.n = sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *),                  \
	}
#define WORD(NAME, word)                               #word,
#define ROLE_WORD(NAME, name, n_dims, dims, direction) #name,

WORDS(memory_kind, PROTO_MEMORY_KINDS(WORD));
WORDS(urgency, PROTO_URGENCIES(WORD));
WORDS(change, PROTO_CHANGES(WORD));
WORDS(access, PROTO_ACCESSES(WORD));
WORDS(role, FMHA_TENSORS(ROLE_WORD));

/* Rows of struct STRUCT's table. */
/* clang-format off */
#define AT(member)      .offset = offsetof(struct STRUCT, member)
#define COUNT(member)   .count_offset = offsetof(struct STRUCT, member)
#define SIZE_OF(member) .size = sizeof(((struct STRUCT *)0)->member)
#define NAME(text)      .name = (text), .name_bytes = sizeof(text) - 1
#define ROW(member, kind, ...) {NAME(#member), AT(member), .type = FIELD_##kind, __VA_ARGS__},
#define WORDS_AT(text, member, ...) {NAME(text), AT(member), .type = FIELD_STRING, SIZE_OF(member), __VA_ARGS__},

#define U32(member, ...)                    ROW(member, U32, .max = UINT32_MAX, __VA_ARGS__)
#define U64(member, ...)                    ROW(member, U64, .max = UINT64_MAX, __VA_ARGS__)
#define I32(member, ...)                    ROW(member, I32, .min = INT32_MIN, .max = INT32_MAX, __VA_ARGS__)
#define F32(member, ...)                    ROW(member, F32, __VA_ARGS__)
#define F64(member, ...)                    ROW(member, F64, __VA_ARGS__)
#define BOOL(member, ...)                   ROW(member, BOOL, __VA_ARGS__)
#define ENUM(member, words, ...)            ROW(member, ENUM, .names = &proto_##words##_words, __VA_ARGS__)
#define STRING(member, bytes, ...)          ROW(member, STRING, SIZE_OF(member), __VA_ARGS__)
#define BYTES(member, bytes, n_member, ...) ROW(member, BYTES, SIZE_OF(member), COUNT(n_member), __VA_ARGS__)
#define NUMBERS(member, n, ...)             ROW(member, NUMBERS, .max = UINT64_MAX, .capacity = (n), __VA_ARGS__)
#define SUB(member, message, ...)           ROW(member, STRUCT, .table = &message##_table, __VA_ARGS__)
#define PROBLEM(member, ...)                SUB(member, problem, __VA_ARGS__)
#define ARRAY(member, n_member, message, n, ...)                                                   \
	ROW(member, ARRAY, .table = &message##_table, COUNT(n_member), .capacity = (n), __VA_ARGS__)
#define KERNEL_BUILD(member)                                                                       \
	WORDS_AT("kernel", member.name, NOTE("canonical name"))                                    \
	WORDS_AT("arch", member.arch)                                                              \
	WORDS_AT("source", member.source, NOTE("file name in the folder of kernel sources"))       \
	{NAME("options"), AT(member.options), .type = FIELD_ARRAY, .table = &compile_option_table, \
	 COUNT(member.n_options), .capacity = BUILD_OPTIONS},
#define OPTIONAL       .optional = true
#define DEFAULT(value) .optional = true, .fallback = (value)
#define ANONYMOUS      .anonymous = true
#define NOTE(text)     .note = (text)
/* clang-format on */

#define TABLE(symbol, title, rows, ...)                                                            \
	const struct field_table symbol = {.name = (title),                                        \
					   .size = sizeof(struct STRUCT),                          \
					   .fields = (rows),                                       \
					   .n_fields = sizeof(rows) / sizeof((rows)[0]),           \
					   __VA_ARGS__};                                           \
	_Static_assert(sizeof(rows) / sizeof((rows)[0]) <= FIELD_TABLE_MAX, "too many fields")

/* ---- what messages hold that has a struct elsewhere ---- */

/* clang-format off */
#define STRUCT wire_error
static const struct field error_rows[] = {
	ROW(code, I32, .min = INT32_MIN, .max = (uint64_t)-1, NOTE("see section 6"))
	STRING(name, , OPTIONAL, NOTE("of the code, without FMHA_"))
	STRING(field, , OPTIONAL, NOTE("the offending field; empty: none in particular"))
	STRING(message, , OPTIONAL, NOTE("one sentence"))
};
TABLE(proto_error_table, "error", error_rows);
#undef STRUCT

#define STRUCT fmha_tensor
static const struct field tensor_rows[] = {
	U64(buffer, .min = 1, NOTE("id"))
	U64(offset, OPTIONAL, NOTE("bytes from the buffer's start to element 0"))
	ENUM(dtype, dtype)
	ROW(stride, STRIDE, OPTIONAL,
	    NOTE("elements, one a dimension of the role; absent, or all 0 without extent: packed"))
	ROW(extent, EXTENT, OPTIONAL, COUNT(n_dims),
	    NOTE("elements, one a dimension of the role, those that the tensor has: compared with those "
		 "that it must have; 1 and stride 0 where it broadcasts; stride is literal then"))
};
static TABLE(tensor_table, "tensor", tensor_rows);
#undef STRUCT

#define WIRE_CHOICE(field, value, ...)      ENUM(field, field, DEFAULT(value), __VA_ARGS__)
#define WIRE_FLAG(field, value, ...)        BOOL(field, DEFAULT(value), __VA_ARGS__)
#define WIRE_SIZE(field, value, ...)        I32(field, DEFAULT(value), __VA_ARGS__)
#define WIRE_NUMBER(field, value, ...)      I32(field, DEFAULT(value), __VA_ARGS__)
#define WIRE_COUNTER(field, value, ...)     U64(field, DEFAULT(value), __VA_ARGS__)
#define WIRE_REAL(field, value, ...)        F32(field, DEFAULT(value), __VA_ARGS__)
#define WIRE_ABSENT_REAL(field, value, ...) F32(field, DEFAULT(1), __VA_ARGS__)
#define WIRE_FIELD(type, field, neutral, least, most, ops, word, option, meaning)                  \
	WIRE_##type(field, neutral, NOTE(meaning))

#define STRUCT fmha_problem
static const struct field problem_rows[] = {
	FMHA_PROBLEM_FIELDS(WIRE_FIELD)
	{NAME("tensors"), AT(tensor), .type = FIELD_TENSORS, OPTIONAL, .table = &tensor_table,
	 NOTE("a map from role to tensor: those that are there")},
};
static TABLE(problem_table, "problem", problem_rows, .init = fmha_problem_init);
#undef STRUCT
/* clang-format on */

/* ---- messages ---- */

static const struct field_table empty_table = {
	.name = "empty",
	.size = sizeof(struct proto_empty),
};

#define JOIN(left, right)  JOIN_(left, right)
#define JOIN_(left, right) left##right
#define TEXT(name)         TEXT_(name)
#define TEXT_(name)        #name
#define STRUCT             JOIN(proto_, MESSAGE)
#define BEGIN              static const struct field JOIN(MESSAGE, _rows)[] = {
#define END                                                                                        \
	}                                                                                          \
	;                                                                                          \
	static TABLE(JOIN(MESSAGE, _table), TEXT(MESSAGE), JOIN(MESSAGE, _rows));
#include <proto/messages.def>

_Static_assert(sizeof(struct proto_compile_option) ==
		       sizeof(((struct kernel_build *)0)->options[0]),
	       "an option is its text");

/* ---- methods ---- */

const struct proto_method_info proto_methods[PROTO_N_METHODS] = {
#define METHOD_INFO(ID, method, by, in, out, params, result)                                       \
	[PROTO_##ID] = {                                                                           \
		.name = (method),                                                                  \
		.name_bytes = sizeof(method) - 1,                                                  \
		.server = PROTO_##by,                                                              \
		.fds_in = (in),                                                                    \
		.fds_out = (out),                                                                  \
		.params_size = sizeof(struct proto_##params),                                      \
		.result_size = sizeof(struct proto_##result),                                      \
	},
	PROTO_METHODS(METHOD_INFO)};

const struct field_table *const proto_params_tables[PROTO_N_METHODS] = {
#define METHOD_PARAMS(ID, method, by, in, out, params, result) [PROTO_##ID] = &params##_table,
	PROTO_METHODS(METHOD_PARAMS)};

const struct field_table *const proto_result_tables[PROTO_N_METHODS] = {
#define METHOD_RESULT(ID, method, by, in, out, params, result) [PROTO_##ID] = &result##_table,
	PROTO_METHODS(METHOD_RESULT)};

int proto_request_fds(enum proto_method method, const void *params)
{
	const struct proto_buffer_import_params *import = params;
	const struct proto_registry_change_params *change = params;

	if (method == PROTO_BUFFER_IMPORT && import->kind == PROTO_IPC_HANDLE)
		return 0;
	if (method == PROTO_REGISTRY_CHANGE && change->change != PROTO_CHANGE_LOAD &&
	    change->change != PROTO_CHANGE_MERGE)
		return 0;
	return proto_methods[method].fds_in;
}
