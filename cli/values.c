/* SPDX-License-Identifier: MIT */
/* values.c: what options are given, kept as their tables say. */
#include "tables.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

const char *cli_dashes(const struct cli_usage *usage, const struct cli_option *option)
{
	return usage->long_only && strlen(option->name) < 4 ? "-" : "--";
}

int cli_program_width(const struct cli_usage *usage)
{
	return (int)strcspn(usage->name, " ");
}

int cli_word_number(const char *words, const char *word)
{
	size_t n = strlen(word);

	words += *words == '[';
	for (int i = 0; n > 0 && *words; i++) {
		size_t length = strcspn(words, "|]");

		if (length == n && !memcmp(words, word, n))
			return i;
		words += length + (words[length] != '\0');
	}
	return -1;
}

/* "fmhactl: --count 'ten': not a whole number". Return: -1. */
__attribute__((format(printf, 4, 5))) static int complain(const struct cli_usage *usage,
							  const struct cli_option *option,
							  const char *text, const char *why, ...)
{
	va_list args;

	(void)fprintf(stderr, "%.*s: %s%s '%s': ", cli_program_width(usage), usage->name,
		      cli_dashes(usage, option), option->name, text);
	va_start(args, why);
	(void)vfprintf(stderr, why, args);
	va_end(args);
	(void)fputc('\n', stderr);
	return -1;
}

static int keep_number(const struct cli_usage *usage, const struct cli_option *option,
		       const char *text, void *at)
{
	const struct cli_value *v = &option->value;
	bool is_real = v->kind == CLI_REAL;
	long long whole = 0;
	double value;
	char *end;

	errno = 0;
	value = is_real ? strtod(text, &end) : (double)(whole = strtoll(text, &end, 0));
	if (end == text || *end || errno || !isfinite(value))
		return complain(usage, option, text,
				is_real ? "not a finite number" : "not a whole number");
	if (value < v->least || value > v->most)
		return complain(usage, option, text, "not in %.15g..%.15g", v->least, v->most);
	if (is_real)
		*(double *)at = value;
	else
		*(int64_t *)at = whole;
	return 0;
}

static int keep_word(const struct cli_usage *usage, const struct cli_option *option,
		     const char *text, uint32_t *at)
{
	int number = cli_word_number(option->argument, text);
	char words[128];

	if (number >= 0) {
		*at = (uint32_t)number;
		return 0;
	}
	(void)snprintf(words, sizeof(words), "%s", option->argument);
	for (char *bar = words; (bar = strchr(bar, '|'));)
		*bar = ' ';
	return complain(usage, option, text, "not one of %s", words);
}

static int keep_text(const struct cli_usage *usage, const struct cli_option *option,
		     const char *text, struct cli_texts *texts)
{
	if (texts->n >= option->value.most)
		return complain(usage, option, text, "more than %.0f of them", option->value.most);
	texts->at[texts->n++] = text;
	return 0;
}

int cli_keep(const struct cli_usage *usage, const struct cli_option *option, const char *text,
	     void *to)
{
	void *at = (char *)to + option->value.at;

	switch (option->value.kind) {
	case CLI_TEXT:
		*(const char **)at = text;
		return 0;
	case CLI_FLAG:
		*(bool *)at = true;
		return 0;
	case CLI_WORD:
		return keep_word(usage, option, text, at);
	case CLI_TEXTS:
		return keep_text(usage, option, text, at);
	default:
		return keep_number(usage, option, text, at);
	}
}
