/* SPDX-License-Identifier: MIT */
/* expr_code.h: the instructions that expr.c writes and expr_eval.c runs. */
#ifndef SPECS_EXPR_CODE_H
#define SPECS_EXPR_CODE_H

#include "expr.h"

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
