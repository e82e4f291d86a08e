/* SPDX-License-Identifier: MIT */
/* expr_lex.h: the tokens of the expression language. */
#ifndef SPECS_EXPR_LEX_H
#define SPECS_EXPR_LEX_H

#include <stddef.h>
#include <stdint.h>

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

#endif
