// SPDX-License-Identifier: MIT
/* expr_lex.c: see expr.h. */
#include <ctype.h>
#include <string.h>

#include "expr.h"

static int is_name_byte(char byte)
{
	return isalnum((unsigned char)byte) || byte == '_' || byte == '.';
}

static void lex_number(struct lexer *lex)
{
	const char *at = lex->text + lex->at;
	size_t n = 0;

	lex->token = T_NUMBER;
	lex->number = 0;
	for (; isdigit((unsigned char)at[n]); n++) {
		lex->number = lex->number * 10 + (at[n] - '0');
		if (lex->number > INT32_MAX)
			lex->token = T_BAD;
		if (lex->token == T_BAD)
			lex->number = 0; /* keeps the sum from overflowing */
	}
	if (is_name_byte(at[n]))
		lex->token = T_BAD;
	lex->length = n;
}

static void lex_text(struct lexer *lex)
{
	const char *at = lex->text + lex->at;
	size_t n = 1;

	while (at[n] && at[n] != at[0])
		n++;
	lex->token = at[n] ? T_TEXT : T_BAD;
	lex->length = at[n] ? n + 1 : n;
}

void lex_next(struct lexer *lex)
{
	static const char *const ops[] = {"==", "!=", "<=", ">=", "//", "<", ">", "(",
					  ")",  "[",  "]",  ",",  "+",  "-", "*", "%"};
	const char *at;

	while (isspace((unsigned char)lex->text[lex->next]))
		lex->next++;
	lex->at = lex->next;
	at = lex->text + lex->at;
	lex->length = 1;
	if (!*at) {
		lex->token = T_END;
		lex->length = 0;
	} else if (isdigit((unsigned char)*at)) {
		lex_number(lex);
	} else if (isalpha((unsigned char)*at) || *at == '_') {
		lex->token = T_NAME;
		while (is_name_byte(at[lex->length]))
			lex->length++;
	} else if (*at == '\'' || *at == '"') {
		lex_text(lex);
	} else {
		lex->token = T_BAD;
		for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
			if (strncmp(at, ops[i], strlen(ops[i])) == 0) {
				lex->token = T_OP;
				lex->length = strlen(ops[i]);
				break;
			}
	}
	lex->next = lex->at + lex->length;
}

int is_token(const struct lexer *lex, const char *word)
{
	return (lex->token == T_OP || lex->token == T_NAME) && strlen(word) == lex->length &&
	       memcmp(lex->text + lex->at, word, lex->length) == 0;
}
