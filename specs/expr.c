// SPDX-License-Identifier: MIT
/*
 * expr.c: the one-pass compiler of the expression language.
 *
 * The compiler is a recursive descent over the grammar that emits code as it goes; each function
 * leaves exactly one value on the machine's stack. Its input may be hostile (a filter comes from a
 * command line or a request), so text, code, stack and recursion are bounded.
 */
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <proto/error.h>

#include "catalog_impl.h"
#include "expr.h"

#define MAX_CODE    2048
#define MAX_LIST    512
#define MAX_NESTING 48

/* What an operand is. A text has no number until the field it is compared with is known: it stands
 * in the code as a PUSH that resolve_text() completes. */
enum type_kind { TYPE_NUMBER, TYPE_WORD, TYPE_TEXT };
struct type {
	enum type_kind kind;
	int field;        /* TYPE_WORD */
	const char *text; /* TYPE_TEXT: inside the quotes */
	size_t length;
	size_t column;
	int code; /* TYPE_TEXT: its PUSH */
};

struct compiler {
	const struct expr_scope *scope;
	struct lexer lex;
	struct fmha_error *err;
	size_t fault;
	int nesting;
	int depth;  /* values on the machine's stack */
	int target; /* the last place that code jumps to: what lies across it stays as it is */
	const char *definition; /* being expanded, or NULL */
	int n_code, n_list;
	field_set reads;
	struct expr_instruction code[MAX_CODE];
	int64_t list[MAX_LIST];
};

static int fail_at(struct compiler *c, size_t column, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

static int fail_at(struct compiler *c, size_t column, const char *fmt, ...)
{
	char reason[160];
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(reason, sizeof(reason), fmt, args);
	va_end(args);
	c->fault = column;
	if (c->definition)
		return fmha_error_set(c->err, FMHA_EINVAL,
				      "in the definition of %s, column %zu: %s", c->definition,
				      column + 1, reason);
	return fmha_error_set(c->err, FMHA_EINVAL, "column %zu: %s", column + 1, reason);
}

static int emit(struct compiler *c, enum op op, int effect, int32_t value)
{
	if (c->n_code == MAX_CODE)
		return fail_at(c, c->lex.at, "the expression is too long");
	c->depth += effect;
	if (c->depth > EXPR_MAX_STACK)
		return fail_at(c, c->lex.at, "the expression is nested too deeply");
	c->code[c->n_code++] = (struct expr_instruction){.op = (uint8_t)op, .value = value};
	return 0;
}

/* Ends a jump here. */
static void land(struct compiler *c, int jump)
{
	c->code[jump].offset = (uint16_t)c->n_code;
	c->target = c->n_code;
}

/* Emits a comparison, together with a field and a number that were just pushed if possible. */
static int emit_comparison(struct compiler *c, enum op op)
{
	struct expr_instruction *load = c->n_code >= 2 ? &c->code[c->n_code - 2] : NULL;

	if (!load || c->n_code - 2 < c->target || load[1].op != OP_PUSH || load->op < OP_LOAD_U8 ||
	    load->op > OP_LOAD_I32)
		return emit(c, op, -1, 0);
	load->count = (uint8_t)(load->op - OP_LOAD_U8);
	load->op = (uint8_t)(op - OP_EQ + OP_FIELD_EQ);
	load->value = load[1].value;
	c->n_code--;
	c->depth--;
	return 0;
}

static int compile_ternary(struct compiler *c, struct type *ret);

static const struct field *field_at(const struct compiler *c, int field)
{
	return c->scope->subject ? &c->scope->subject->fields[field] : &spec_fields[field];
}

static int find_field(const struct compiler *c, const char *name, size_t length)
{
	const struct expr_subject *subject = c->scope->subject;

	if (!subject)
		return field_find(name, length);
	for (int i = 0; i < subject->n_fields; i++)
		if (strlen(subject->fields[i].name) == length &&
		    memcmp(subject->fields[i].name, name, length) == 0)
			return i;
	return -1;
}

static const char *const *words_of(const struct compiler *c, int field, int *ret_n)
{
	return c->scope->subject ? c->scope->subject->words(field, ret_n)
				 : spec_words(c->scope->catalog, field, ret_n);
}

static int want_number(struct compiler *c, const struct type *type)
{
	if (type->kind == TYPE_WORD)
		return fail_at(c, type->column, "%s is a word: compare it, as in %s == '...'",
			       field_at(c, type->field)->name, field_at(c, type->field)->name);
	if (type->kind == TYPE_TEXT)
		return fail_at(c, type->column, "a word stands only beside ==, != and in");
	return 0;
}

/* Turns the text of @type into the number that it has as a word of @field. */
static int resolve_text(struct compiler *c, const struct type *type, int field, int32_t *ret)
{
	char known[120] = "";
	int n;
	const char *const *words = words_of(c, field, &n);

	for (int i = 0; i < n; i++)
		if (strlen(words[i]) == type->length &&
		    memcmp(words[i], type->text, type->length) == 0) {
			*ret = i;
			return 0;
		}
	/* Shapes have words of their own, which have no others beside them. */
	*ret = c->scope->subject
		       ? -1
		       : spec_word_find_n(c->scope->catalog, field, type->text, type->length);
	if (*ret >= 0)
		return 0;
	for (int i = 0; i < n; i++) {
		size_t used = strlen(known);

		if (used + strlen(words[i]) + 8 > sizeof(known)) {
			(void)snprintf(known + used, sizeof(known) - used, ", ...");
			break;
		}
		(void)snprintf(known + used, sizeof(known) - used, "%s'%s'", i ? ", " : "",
			       words[i]);
	}
	return fail_at(c, type->column, "%s is never '%.*s': %s", field_at(c, field)->name,
		       (int)(type->length > 40 ? 40 : type->length), type->text, known);
}

static int compile_field(struct compiler *c, int field, struct type *ret)
{
	static const enum op loads[] = {[FIELD_U8] = OP_LOAD_U8,
					[FIELD_U16] = OP_LOAD_U16,
					[FIELD_I16] = OP_LOAD_I16,
					[FIELD_I32] = OP_LOAD_I32};
	int r = emit(c, loads[field_at(c, field)->type], 1, 0);

	if (r < 0)
		return r;
	c->code[c->n_code - 1].offset = field_at(c, field)->offset;
	c->reads |= (field_set)1 << field;
	if (field_at(c, field)->kind == FIELD_WORD) {
		ret->kind = TYPE_WORD;
		ret->field = field;
	}
	return 0;
}

static const struct arch_space *scope_space(const struct compiler *c)
{
	return &c->scope->catalog->archs[c->scope->arch].spaces[c->scope->space];
}

/* arch.<constant>: the compiler knows the arch, so it is just a number. */
static int compile_arch_constant(struct compiler *c, const char *name, size_t length)
{
	const struct spec_catalog *catalog = c->scope->catalog;
	const cJSON *constants = cJSON_GetObjectItemCaseSensitive(scope_space(c)->item,
								  "constants");
	const cJSON *constant;

	cJSON_ArrayForEach(constant, constants)
	{
		if (strlen(constant->string) == length &&
		    memcmp(constant->string, name, length) == 0 && cJSON_IsNumber(constant))
			return emit(c, OP_PUSH, 1, constant->valueint);
	}
	return fail_at(c, c->lex.at, "arch %s has no constant '%.*s'",
		       catalog->arch_names[c->scope->arch], (int)length, name);
}

static int compile_property(struct compiler *c, const char *name, size_t length)
{
	const struct words *properties = &c->scope->catalog->properties;

	for (int i = 0; i < properties->n; i++)
		if (strlen(properties->word[i]) == length &&
		    memcmp(properties->word[i], name, length) == 0) {
			c->reads |= FIELD_BIT(data_type);
			return emit(c, OP_DTYPE, 1, i);
		}
	return fail_at(c, c->lex.at, "data types have no property '%.*s'", (int)length, name);
}

/* Compiles the definition's text in place of its name, as if it stood in parentheses. */
static int compile_definition(struct compiler *c, const cJSON *definition, struct type *ret)
{
	struct lexer outer = c->lex;
	const char *outer_definition = c->definition;
	int r;

	if (++c->nesting > MAX_NESTING)
		return fail_at(c, c->lex.at, "%s: definitions go in a circle", definition->string);
	c->lex = (struct lexer){.text = definition->valuestring};
	c->definition = definition->string;
	lex_next(&c->lex);
	r = compile_ternary(c, ret);
	if (r == 0)
		r = want_number(c, ret);
	if (r == 0 && c->lex.token != T_END)
		r = fail_at(c, c->lex.at, "expected the end");
	c->nesting--;
	if (r < 0)
		return r;
	c->lex = outer;
	c->definition = outer_definition;
	return 0;
}

static const cJSON *find_definition(const struct compiler *c, const char *name, size_t length)
{
	for (int i = 0; i < 2; i++) {
		const cJSON *definition;

		cJSON_ArrayForEach(definition, c->scope->define[i])
		{
			if (strlen(definition->string) == length &&
			    memcmp(definition->string, name, length) == 0)
				return definition;
		}
	}
	return NULL;
}

static int compile_name(struct compiler *c, struct type *ret)
{
	const char *name = c->lex.text + c->lex.at;
	size_t length = c->lex.length;
	const cJSON *definition = find_definition(c, name, length);
	int is_rule = c->scope->arch >= 0;
	int field, r;

	if (length > 2 && memcmp(name, "c.", 2) == 0) {
		name += 2;
		length -= 2;
	}
	field = find_field(c, name, length);
	if (definition && cJSON_IsString(definition))
		r = compile_definition(c, definition, ret);
	else if (field >= 0)
		r = compile_field(c, field, ret);
	else if (is_token(&c->lex, "true") || is_token(&c->lex, "True"))
		r = emit(c, OP_PUSH, 1, 1);
	else if (is_token(&c->lex, "false") || is_token(&c->lex, "False"))
		r = emit(c, OP_PUSH, 1, 0);
	else if (is_rule && length > 5 && memcmp(name, "arch.", 5) == 0)
		r = compile_arch_constant(c, name + 5, length - 5);
	else if (is_rule && length > 6 && memcmp(name, "dtype.", 6) == 0)
		r = compile_property(c, name + 6, length - 6);
	else
		return fail_at(c, c->lex.at, "there is no field '%.*s'",
			       (int)(length > 60 ? 60 : length), name);
	if (r < 0)
		return r;
	lex_next(&c->lex);
	return 0;
}

static int compile_atom(struct compiler *c, struct type *ret)
{
	struct lexer *lex = &c->lex;
	int r;

	*ret = (struct type){.kind = TYPE_NUMBER, .column = lex->at};
	if (lex->token == T_NUMBER) {
		r = emit(c, OP_PUSH, 1, (int32_t)lex->number);
		lex_next(lex);
		return r;
	}
	if (lex->token == T_TEXT) {
		ret->kind = TYPE_TEXT;
		ret->text = lex->text + lex->at + 1;
		ret->length = lex->length - 2;
		ret->code = c->n_code;
		r = emit(c, OP_PUSH, 1, -1);
		lex_next(lex);
		return r;
	}
	if (is_token(lex, "(")) {
		if (++c->nesting > MAX_NESTING)
			return fail_at(c, lex->at, "the expression is nested too deeply");
		lex_next(lex);
		r = compile_ternary(c, ret);
		c->nesting--;
		if (r < 0)
			return r;
		if (!is_token(lex, ")"))
			return fail_at(c, lex->at, "expected ')'");
		lex_next(lex);
		return 0;
	}
	for (const char *const *word =
		     (const char *const[]){"and", "or", "not", "in", "if", "else", NULL};
	     *word; word++)
		if (is_token(lex, *word))
			return fail_at(c, lex->at, "expected a field, a number or a word");
	if (lex->token == T_NAME)
		return compile_name(c, ret);
	if (lex->token == T_BAD && (lex->text[lex->at] == '\'' || lex->text[lex->at] == '"'))
		return fail_at(c, lex->at, "the quote is not closed");
	if (lex->token == T_BAD && isdigit((unsigned char)lex->text[lex->at]))
		return fail_at(c, lex->at, "not a number that a field can have");
	return fail_at(c, lex->at, "expected a field, a number or a word");
}

/* @word before an operand, however often: the innermost first. */
static int compile_prefix(struct compiler *c, const char *word, enum op op,
			  int (*compile_operand)(struct compiler *c, struct type *ret),
			  struct type *ret)
{
	size_t column = c->lex.at;
	int r;

	if (!is_token(&c->lex, word))
		return compile_operand(c, ret);
	if (++c->nesting > MAX_NESTING)
		return fail_at(c, column, "the expression is nested too deeply");
	lex_next(&c->lex);
	r = compile_prefix(c, word, op, compile_operand, ret);
	c->nesting--;
	if (r == 0)
		r = want_number(c, ret);
	if (r == 0)
		r = emit(c, op, 0, 0);
	ret->column = column;
	return r;
}

static int compile_unary(struct compiler *c, struct type *ret)
{
	return compile_prefix(c, "-", OP_NEGATE, compile_atom, ret);
}

struct binary {
	const char *token;
	enum op op;
};

/* A left-associative level of the grammar: @operand { operator @operand }. */
static int compile_binary(struct compiler *c, const struct binary *operators,
			  int (*operand)(struct compiler *, struct type *), struct type *ret)
{
	int r = operand(c, ret);

	while (r == 0) {
		const struct binary *op = operators;
		struct type right = {0};

		while (op->token && !is_token(&c->lex, op->token))
			op++;
		if (!op->token)
			return 0;
		r = want_number(c, ret);
		if (r < 0)
			return r;
		lex_next(&c->lex);
		r = operand(c, &right);
		if (r == 0)
			r = want_number(c, &right);
		if (r == 0)
			r = emit(c, op->op, -1, 0);
	}
	return r;
}

static int compile_product(struct compiler *c, struct type *ret)
{
	static const struct binary operators[] = {
		{"*", OP_MUL}, {"//", OP_DIV}, {"%", OP_MOD}, {NULL, OP_PUSH}};

	return compile_binary(c, operators, compile_unary, ret);
}

static int compile_sum(struct compiler *c, struct type *ret)
{
	static const struct binary operators[] = {{"+", OP_ADD}, {"-", OP_SUB}, {NULL, OP_PUSH}};

	return compile_binary(c, operators, compile_product, ret);
}

/* Judges `left op right` and gives texts their numbers. */
static int match_types(struct compiler *c, const struct type *left, enum op op,
		       const struct type *right)
{
	const struct type *text = left->kind == TYPE_TEXT ? left : right;
	const struct type *other = text == left ? right : left;
	int32_t value = 0;
	int r;

	if (left->kind == TYPE_NUMBER && right->kind == TYPE_NUMBER)
		return 0;
	if (op != OP_EQ && op != OP_NE)
		return fail_at(c, left->kind == TYPE_NUMBER ? right->column : left->column,
			       "words have no order: use ==, != or in");
	if (text->kind == TYPE_TEXT && other->kind == TYPE_WORD) {
		r = resolve_text(c, text, other->field, &value);
		if (r == 0)
			c->code[text->code].value = value;
		return r;
	}
	if (left->kind == TYPE_WORD && right->kind == TYPE_WORD && left->field == right->field)
		return 0;
	if (text->kind == TYPE_TEXT)
		return fail_at(c, text->column, "a word is compared with a field that has words");
	if (left->kind == right->kind)
		return fail_at(c, right->column, "%s and %s have different words",
			       field_at(c, left->field)->name, field_at(c, right->field)->name);
	return fail_at(c, right->column, "%s is a word: compare it with one, as in '...'",
		       field_at(c, left->kind == TYPE_WORD ? left->field : right->field)->name);
}

static int list_add(struct compiler *c, int64_t value)
{
	if (c->n_list == MAX_LIST)
		return fail_at(c, c->lex.at, "the lists are too long");
	c->list[c->n_list++] = value;
	return 0;
}

/* One element of a list: a literal of the kind that @left is. */
static int compile_element(struct compiler *c, const struct type *left)
{
	struct lexer *lex = &c->lex;
	struct type text = {.kind = TYPE_TEXT, .column = lex->at};
	int negative = is_token(lex, "-");
	int32_t value = 0;
	int r;

	if (lex->token == T_TEXT) {
		if (left->kind != TYPE_WORD)
			return fail_at(c, lex->at,
				       "a word is compared with a field that has words");
		text.text = lex->text + lex->at + 1;
		text.length = lex->length - 2;
		r = resolve_text(c, &text, left->field, &value);
		if (r < 0)
			return r;
	} else {
		if (negative)
			lex_next(lex);
		if (lex->token != T_NUMBER)
			return fail_at(c, lex->at, "expected a number or a 'word'");
		if (left->kind == TYPE_WORD)
			return fail_at(c, lex->at, "%s is a word: compare it with one, as in '...'",
				       field_at(c, left->field)->name);
		value = (int32_t)(negative ? -lex->number : lex->number);
	}
	lex_next(lex);
	return list_add(c, value);
}

/* The named lists of rules: arch.data_types, arch.pipelines. 1: not one of them. */
static int compile_named_list(struct compiler *c)
{
	const struct arch_space *space;
	uint64_t bits;
	int r = 0;

	if (c->scope->arch < 0)
		return 1;
	space = scope_space(c);
	if (is_token(&c->lex, "arch.data_types"))
		bits = space->dtypes;
	else if (is_token(&c->lex, "arch.pipelines"))
		bits = space->pipelines;
	else
		return 1;
	for (int i = 0; i < 64 && r == 0; i++)
		if (bits >> i & 1)
			r = list_add(c, i);
	lex_next(&c->lex);
	return r;
}

/* After `in`: a list in ( ) or [ ]. */
static int compile_list(struct compiler *c, const struct type *left)
{
	int first = c->n_list;
	const char *close;
	int r = compile_named_list(c);

	if (r < 0)
		return r;
	if (r == 1) {
		if (!is_token(&c->lex, "(") && !is_token(&c->lex, "["))
			return fail_at(c, c->lex.at, "expected a list, as in (64, 128)");
		close = is_token(&c->lex, "(") ? ")" : "]";
		lex_next(&c->lex);
		while (!is_token(&c->lex, close)) {
			r = compile_element(c, left);
			if (r < 0)
				return r;
			if (is_token(&c->lex, ","))
				lex_next(&c->lex);
			else if (!is_token(&c->lex, close))
				return fail_at(c, c->lex.at, "expected ',' or '%s'", close);
		}
		lex_next(&c->lex);
	}
	if (c->n_list - first > UINT8_MAX)
		return fail_at(c, c->lex.at, "the list is too long");
	r = emit(c, OP_IN, 0, 0);
	if (r == 0) {
		c->code[c->n_code - 1].offset = (uint16_t)first;
		c->code[c->n_code - 1].count = (uint8_t)(c->n_list - first);
	}
	return r;
}

static int compile_in(struct compiler *c, struct type *left, int negate)
{
	int r;

	if (left->kind == TYPE_TEXT)
		return fail_at(c, left->column, "expected a field before 'in'");
	r = compile_list(c, left);
	if (r == 0 && negate)
		r = emit(c, OP_NOT, 0, 0);
	left->kind = TYPE_NUMBER;
	return r;
}

static const struct binary comparisons[] = {{"==", OP_EQ},  {"!=", OP_NE}, {"<=", OP_LE},
					    {">=", OP_GE},  {"<", OP_LT},  {">", OP_GT},
					    {NULL, OP_PUSH}};

/* sum { op sum }, where `a < b < c` means `a < b and b < c` as in Python: b is compiled twice. */
static int compile_comparison(struct compiler *c, struct type *ret)
{
	int jumps[16], n_jumps = 0;
	struct type left, right = {0};
	int r = compile_sum(c, ret);

	left = *ret;
	while (r == 0) {
		const struct binary *op = comparisons;
		struct lexer operand;

		if (is_token(&c->lex, "in")) {
			lex_next(&c->lex);
			r = compile_in(c, &left, 0);
			break;
		}
		if (is_token(&c->lex, "not")) {
			lex_next(&c->lex);
			if (!is_token(&c->lex, "in"))
				return fail_at(c, c->lex.at, "expected 'in' after 'not'");
			lex_next(&c->lex);
			r = compile_in(c, &left, 1);
			break;
		}
		while (op->token && !is_token(&c->lex, op->token))
			op++;
		if (!op->token)
			break;
		lex_next(&c->lex);
		operand = c->lex;
		r = compile_sum(c, &right);
		if (r == 0)
			r = match_types(c, &left, op->op, &right);
		if (r == 0)
			r = emit_comparison(c, op->op);
		if (r < 0)
			return r;
		ret->kind = TYPE_NUMBER;
		op = comparisons;
		while (op->token && !is_token(&c->lex, op->token))
			op++;
		if (!op->token)
			break;
		if (n_jumps == 16)
			return fail_at(c, c->lex.at, "too many comparisons in a row");
		jumps[n_jumps++] = c->n_code;
		r = emit(c, OP_AND, -1, 0);
		c->lex = operand;
		if (r == 0)
			r = compile_sum(c, &left);
	}
	for (int i = 0; r == 0 && i < n_jumps; i++)
		land(c, jumps[i]);
	if (left.kind == TYPE_NUMBER)
		ret->kind = TYPE_NUMBER; /* `in` has made it one */
	return r;
}

static int compile_not(struct compiler *c, struct type *ret)
{
	return compile_prefix(c, "not", OP_NOT, compile_comparison, ret);
}

/* @operand { word @operand }, leaving as soon as the value is known. */
static int compile_logic(struct compiler *c, const char *word, enum op jump,
			 int (*operand)(struct compiler *, struct type *), struct type *ret)
{
	int r = operand(c, ret);

	while (r == 0 && is_token(&c->lex, word)) {
		struct type right = {0};
		int at;

		r = want_number(c, ret);
		if (r < 0)
			return r;
		lex_next(&c->lex);
		at = c->n_code;
		r = emit(c, jump, -1, 0);
		if (r == 0)
			r = operand(c, &right);
		if (r == 0)
			r = want_number(c, &right);
		if (r == 0)
			land(c, at);
	}
	return r;
}

static int compile_and(struct compiler *c, struct type *ret)
{
	return compile_logic(c, "and", OP_AND, compile_not, ret);
}

static int compile_or(struct compiler *c, struct type *ret)
{
	return compile_logic(c, "or", OP_OR, compile_and, ret);
}

/* `a if b else c`: a is on the stack before b is known, which costs nothing worth avoiding. */
static int compile_ternary(struct compiler *c, struct type *ret)
{
	struct type condition = {0}, otherwise = {0};
	int r = compile_or(c, ret);
	int at;

	if (r < 0 || !is_token(&c->lex, "if"))
		return r;
	r = want_number(c, ret);
	if (r < 0)
		return r;
	lex_next(&c->lex);
	r = compile_or(c, &condition);
	if (r == 0)
		r = want_number(c, &condition);
	if (r < 0)
		return r;
	if (!is_token(&c->lex, "else"))
		return fail_at(c, c->lex.at, "expected 'else'");
	lex_next(&c->lex);
	at = c->n_code;
	r = emit(c, OP_ELSE, -2, 0);
	if (r < 0)
		return r;
	if (++c->nesting > MAX_NESTING)
		return fail_at(c, c->lex.at, "the expression is nested too deeply");
	r = compile_ternary(c, &otherwise);
	c->nesting--;
	if (r == 0)
		r = want_number(c, &otherwise);
	if (r == 0)
		land(c, at);
	return r;
}

static int finish(struct compiler *c, struct expr *ret_expr)
{
	size_t code_bytes = (size_t)c->n_code * sizeof(c->code[0]);
	size_t list_bytes = (size_t)c->n_list * sizeof(c->list[0]);
	struct expr expr = {
		.n_code = (uint16_t)c->n_code, .n_list = (uint16_t)c->n_list, .reads = c->reads};

	expr.code = malloc(code_bytes);
	expr.list = malloc(list_bytes ? list_bytes : 1);
	if (!expr.code || !expr.list) {
		expr_deinit(&expr);
		return fmha_error_set(c->err, FMHA_ENOMEM, "expression: out of memory");
	}
	memcpy(expr.code, c->code, code_bytes);
	memcpy(expr.list, c->list, list_bytes);
	if (c->scope->arch >= 0)
		expr.dtype_properties = scope_space(c)->dtype_properties;
	*ret_expr = expr;
	return 0;
}

int expr_compile(const struct expr_scope *scope, const char *text, struct expr *ret_expr,
		 size_t *ret_column, struct fmha_error *err)
{
	struct compiler *c;
	struct type type = {0};
	int r;

	if (strlen(text) > EXPR_MAX_BYTES)
		return fmha_error_set(err, FMHA_EINVAL, "expression: more than %d bytes",
				      EXPR_MAX_BYTES);
	c = malloc(sizeof(*c)); /* 40 KiB: not for the stack */
	if (!c)
		return fmha_error_set(err, FMHA_ENOMEM, "expression: out of memory");
	memset(c, 0, offsetof(struct compiler, code));
	c->scope = scope;
	c->err = err;
	c->lex.text = text;
	lex_next(&c->lex);
	r = compile_ternary(c, &type);
	if (r == 0)
		r = want_number(c, &type);
	if (r == 0 && c->lex.token != T_END)
		r = fail_at(c, c->lex.at, "expected an operator or the end");
	if (r == 0)
		r = finish(c, ret_expr);
	if (r < 0 && ret_column)
		*ret_column = c->definition ? 0 : c->fault;
	free(c);
	return r;
}

void expr_deinit(struct expr *expr)
{
	free(expr->code);
	free(expr->list);
	*expr = (struct expr){0};
}
