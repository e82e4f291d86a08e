/* SPDX-License-Identifier: MIT */
/*
 * expr.h: the expression language of filters, rules, receipts, profiles and checks (the grammar is
 * in specs/filter.h), compiled to code for a small stack machine over 64-bit integers: words are
 * compared as their numbers, so evaluating never touches a string.
 *
 * Rules know more names than filters: `arch.<constant>`, `dtype.<property>` (of the spec's data
 * type), the lists `arch.data_types` and `arch.pipelines` after `in`, and the definitions of their
 * document.
 */
#ifndef SPECS_EXPR_H
#define SPECS_EXPR_H

#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

#include "fields.h"

#define EXPR_MAX_BYTES 4096

struct spec_catalog;

/* The subject of an expression, when that is no kernel spec. */
struct expr_subject {
	const struct field *fields;
	int n_fields;
	/* A field's words, if it has any: in the order of their numbers. */
	const char *const *(*words)(int field, int *ret_n);
};

struct expr_scope {
	const struct spec_catalog *catalog;
	const struct expr_subject *subject; /* NULL: kernel specs */
	int arch;  /* -1: the names of rules do not exist: this is a filter */
	int space; /* which of the arch's */
	/* Definitions, name -> expression text, the first that has a name wins; NULL: none. */
	const cJSON *define[2];
};

struct expr_instruction {
	uint8_t op;
	uint8_t count;   /* lists: length; fields compared: enum field_type */
	uint16_t offset; /* loads: into the spec; jumps: target; lists: first element */
	int32_t value;
};

struct expr {
	struct expr_instruction *code; /* NULL: the expression `true` */
	int64_t *list;
	const int32_t (*dtype_properties)[16]; /* the arch_space's, kept */
	uint16_t n_code, n_list;
	field_set reads; /* every field that the value depends on */
};

/* On failure @ret_column (may be NULL) is where the fault is, from 0. */
int expr_compile(const struct expr_scope *scope, const char *text, struct expr *ret_expr,
		 size_t *ret_column, struct fmha_error *err);
void expr_deinit(struct expr *expr);

/* @subject: a struct kernel_spec, or what the scope's subject describes. */
int64_t expr_eval(const struct expr *expr, const void *subject);

static inline int expr_holds(const struct expr *expr, const void *subject)
{
	return !expr->code || expr_eval(expr, subject) != 0;
}

/* ---- expr lex ---- */

/* The tokens of the expression language. */

/* T_BAD: a byte that starts nothing, an open quote, a number that no field can have. */
enum token { T_END, T_NUMBER, T_NAME, T_TEXT, T_OP, T_BAD };

struct lexer {
	const char *text;
	size_t at; /* of the token's first byte */
	size_t next;
	enum token token;
	size_t length; /* of the token */
	int64_t number;
};

/* Set up with .text; the first call finds the first token. */
void lex_next(struct lexer *lex);

/* 1 when the token is this operator or keyword. */
int is_token(const struct lexer *lex, const char *word);

/* ---- expr code ---- */

/* The instructions that expr.c writes and expr_eval.c runs. */

#define EXPR_MAX_STACK 48

enum op {
	OP_PUSH,
	OP_LOAD_U8, /* in the order of enum field_type */
	OP_LOAD_U16,
	OP_LOAD_I16,
	OP_LOAD_I32,
	OP_DTYPE, /* property `value` of the spec's data type */
	OP_NOT,
	OP_NEGATE,
	OP_EQ,
	OP_NE,
	OP_LT,
	OP_LE,
	OP_GT,
	OP_GE,
	OP_ADD,
	OP_SUB,
	OP_MUL,
	OP_DIV,
	OP_MOD,
	OP_IN, /* in list[offset .. offset + count) */
	/* A field of type `count` compared with `value`: what most expressions are made of, in one
	 * step instead of three. In the order of OP_EQ to OP_GE. */
	OP_FIELD_EQ,
	OP_FIELD_NE,
	OP_FIELD_LT,
	OP_FIELD_LE,
	OP_FIELD_GT,
	OP_FIELD_GE,
	OP_AND,  /* false: keeps it and jumps; true: takes it */
	OP_OR,   /* true: keeps it and jumps; false: takes it */
	OP_ELSE, /* takes a condition; true: jumps; false: takes the value below it too */
};

#endif
