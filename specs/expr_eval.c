// SPDX-License-Identifier: MIT
/*
 * expr_eval.c: the stack machine. It runs for every spec that a rule, check or filter looks at, so
 * it neither allocates nor fails: numbers wrap, and dividing by zero gives zero.
 */
#include "expr.h"

static int is_in(const int64_t *list, int count, int64_t value)
{
	for (int i = 0; i < count; i++)
		if (list[i] == value)
			return 1;
	return 0;
}

/* Rounds towards minus infinity, as Python does; by zero gives zero: a rule or filter has no way to
 * fail on one of a million rows. */
static int64_t divide(int64_t a, int64_t b)
{
	int64_t quotient;

	if (b == 0)
		return 0;
	if (b == -1)
		return (int64_t)(0 - (uint64_t)a);
	quotient = a / b;
	return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

static int64_t wrap_multiply(int64_t a, int64_t b)
{
	return (int64_t)((uint64_t)a * (uint64_t)b);
}

#define BINARY(OP, expression)                                                                     \
	case OP: {                                                                                 \
		int64_t b = *top--, a = *top;                                                      \
		*top = (expression);                                                               \
		break;                                                                             \
	}

#define FIELD_COMPARISON(OP, operator)                                                             \
	case OP:                                                                                   \
		*++top = load_field(at, in->count) operator in->value;                             \
		break;

static inline int32_t load_field(const uint8_t *at, int type)
{
	uint16_t wide;
	int32_t word;

	if (type == FIELD_U8)
		return *at;
	if (type == FIELD_I32) {
		memcpy(&word, at, sizeof(word));
		return word;
	}
	memcpy(&wide, at, sizeof(wide));
	return type == FIELD_U16 ? (int32_t)wide : (int16_t)wide;
}

/* The compiler counts the values on the stack, so code never takes one that is not there; the
 * analyzer cannot know that. NOLINTBEGIN(clang-analyzer-core.*) */
int64_t expr_eval(const struct expr *expr, const void *subject)
{
	int64_t stack[EXPR_MAX_STACK + 1];
	int64_t *top = stack;
	uint16_t wide;

	for (int i = 0; i < expr->n_code; i++) {
		const struct expr_instruction *in = &expr->code[i];
		const uint8_t *at = (const uint8_t *)subject + in->offset;

		switch ((enum op)in->op) {
		case OP_PUSH:
			*++top = in->value;
			break;
		case OP_LOAD_U8:
			*++top = *at;
			break;
		case OP_LOAD_U16:
			memcpy(&wide, at, sizeof(wide));
			*++top = wide;
			break;
		case OP_LOAD_I16:
			memcpy(&wide, at, sizeof(wide));
			*++top = (int16_t)wide;
			break;
		case OP_LOAD_I32:
			*++top = load_field(at, FIELD_I32);
			break;
		case OP_DTYPE: /* in rules, which are about kernel specs */
			*++top = expr->dtype_properties[((const struct kernel_spec *)subject)
								->signature.data_type][in->value];
			break;
		case OP_NOT:
			*top = !*top;
			break;
		case OP_NEGATE:
			*top = (int64_t)(0 - (uint64_t)*top);
			break;
			BINARY(OP_EQ, a == b)
			BINARY(OP_NE, a != b)
			BINARY(OP_LT, a < b)
			BINARY(OP_LE, a <= b)
			BINARY(OP_GT, a > b)
			BINARY(OP_GE, a >= b)
			BINARY(OP_ADD, (int64_t)((uint64_t)a + (uint64_t)b))
			BINARY(OP_SUB, (int64_t)((uint64_t)a - (uint64_t)b))
			BINARY(OP_MUL, wrap_multiply(a, b))
			BINARY(OP_DIV, divide(a, b))
			BINARY(OP_MOD,
			       (int64_t)((uint64_t)a - (uint64_t)wrap_multiply(divide(a, b), b)))
		case OP_IN:
			*top = is_in(expr->list + in->offset, in->count, *top);
			break;
			FIELD_COMPARISON(OP_FIELD_EQ, ==)
			FIELD_COMPARISON(OP_FIELD_NE, !=)
			FIELD_COMPARISON(OP_FIELD_LT, <)
			FIELD_COMPARISON(OP_FIELD_LE, <=)
			FIELD_COMPARISON(OP_FIELD_GT, >)
			FIELD_COMPARISON(OP_FIELD_GE, >=)
		case OP_AND:
			if (*top)
				top--;
			else
				i = in->offset - 1;
			break;
		case OP_OR:
			if (*top)
				i = in->offset - 1;
			else
				top--;
			break;
		case OP_ELSE:
			if (*top--)
				i = in->offset - 1;
			else
				top--;
			break;
		}
	}
	return *top;
}
/* NOLINTEND(clang-analyzer-core.*) */
