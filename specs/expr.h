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

#include <cjson/cJSON.h>

#include "fields.h"

#define EXPR_MAX_BYTES 4096

struct spec_catalog;

/* What an expression is about, when that is no kernel spec. */
struct expr_subject {
	const struct field *fields;
	int n_fields;
	/* Of a field of words: in the order of their numbers. */
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

#endif
