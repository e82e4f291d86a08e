/* SPDX-License-Identifier: MIT */
/* filter.c: the expression language as people use it: compiled once, faults shown with a caret. */
#include <specs/filter.h>

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include <proto/error.h>
#include <specs/shapes.h>

#include "expr.h"
#include "filter_impl.h"

static void explain_fault(const char *text, size_t column, const char *message,
			  char explain[SPEC_EXPLAIN_BYTES])
{
	const size_t around = 60;
	size_t length = strlen(text);
	size_t first = column > around ? column - around : 0;
	size_t n = length - first < 2 * around ? length - first : 2 * around;
	char line[2 * 60 + 1];

	for (size_t i = 0; i < n; i++) {
		char byte = text[first + i];

		/* The text may come from anywhere: control bytes would move the caret. */
		line[i] = byte >= ' ' && byte <= '~' ? byte : '?';
	}
	line[n] = '\0';
	(void)snprintf(explain, SPEC_EXPLAIN_BYTES, "%s\n  %s\n  %*s^", message, line,
		       (int)(column - first), "");
}

/* As spec_filter_compile(). */
static int filter_new(const struct expr_scope *scope, const char *text,
		      struct spec_filter **ret_filter, char *explain, struct fmha_error *err)
{
	struct spec_filter *filter = calloc(1, sizeof(*filter));
	struct fmha_error inner;
	size_t column = 0;
	int r;

	if (!filter)
		return fmha_error_set(err, FMHA_ENOMEM, "filter: out of memory");
	r = expr_compile(scope, text, &filter->expr, &column, &inner);
	if (r == 0) {
		*ret_filter = filter;
		return 0;
	}
	free(filter);
	if (explain)
		explain_fault(text, column, inner.msg, explain);
	return fmha_error_set_field(err, r, "filter", "filter: %s", inner.msg);
}

int spec_filter_compile(const struct spec_catalog *catalog, const char *text,
			struct spec_filter **ret_filter, char explain[SPEC_EXPLAIN_BYTES],
			struct fmha_error *err)
{
	const struct expr_scope scope = {.catalog = catalog, .arch = -1};

	return filter_new(&scope, text, ret_filter, explain, err);
}

/* Lines and comments become blanks: what is left is one expression, faults where they are. */
static void flatten(char *text)
{
	bool comment = false;
	char quote = '\0';

	for (char *c = text; *c; c++) {
		if (*c == '\n')
			comment = false, quote = '\0';
		else if (!comment && quote)
			quote = *c == quote ? '\0' : quote;
		else if (!comment && (*c == '\'' || *c == '"'))
			quote = *c;
		else if (*c == '#')
			comment = true;
		if (comment || (unsigned char)*c < ' ')
			*c = ' ';
	}
}

int spec_filter_read(const struct spec_catalog *catalog, const char *path,
		     struct spec_filter **ret_filter, char explain[SPEC_EXPLAIN_BYTES],
		     struct fmha_error *err)
{
	char text[SPEC_FILTER_MAX_BYTES + 2];
	FILE *file = fopen(path, "re");
	size_t n;
	int failed;

	if (explain)
		explain[0] = '\0';
	if (!file)
		return fmha_error_set(err, FMHA_EIO, "%s: %s", path, strerror(errno));
	n = fread(text, 1, sizeof(text) - 1, file);
	failed = ferror(file);
	(void)fclose(file);
	if (failed)
		return fmha_error_set(err, FMHA_EIO, "%s: cannot be read", path);
	text[n] = '\0';
	if (n > SPEC_FILTER_MAX_BYTES || strlen(text) != n)
		return fmha_error_set_field(err, FMHA_EINVAL, "filter",
					    "%s: a filter is a text of %d bytes at most", path,
					    SPEC_FILTER_MAX_BYTES);
	flatten(text);
	return spec_filter_compile(catalog, text, ret_filter, explain, err);
}

struct spec_filter *spec_filter_free(struct spec_filter *filter)
{
	if (filter)
		expr_deinit(&filter->expr);
	free(filter);
	return NULL;
}

int spec_filter_match(const struct spec_filter *filter, const struct kernel_spec *spec)
{
	return expr_holds(&filter->expr, spec);
}

/* ---- shape filter ---- */

/* The expressions of filters, about shapes. */

#define MAX_WORDS 8 /* of a field */

#define SHAPE_FIELD(name, value, words)                                                            \
	{#name,                                                                                    \
	 offsetof(struct spec_shape, name),                                                        \
	 (words)[0] ? FIELD_WORD : FIELD_INT,                                                      \
	 FIELD_I32,                                                                                \
	 INT32_MIN,                                                                                \
	 INT32_MAX},
static const struct field fields[] = {SPEC_SHAPE_FIELDS(SHAPE_FIELD)};
#undef SHAPE_FIELD

/* Valid until the thread asks again. */
static const char *const *words_of(int field, int *ret_n)
{
	static _Thread_local char texts[MAX_WORDS][32];
	static _Thread_local const char *words[MAX_WORDS];
	const char *word;
	int n = 0;

	while (n < MAX_WORDS && (word = spec_shape_word(fields[field].name, n))) {
		(void)snprintf(texts[n], sizeof(texts[n]), "%s", word);
		words[n] = texts[n];
		n++;
	}
	*ret_n = n;
	return words;
}

int spec_shape_filter_compile(const char *text, struct spec_filter **ret_filter,
			      char explain[SPEC_EXPLAIN_BYTES], struct fmha_error *err)
{
	static const struct expr_subject subject = {
		.fields = fields,
		.n_fields = sizeof(fields) / sizeof(fields[0]),
		.words = words_of,
	};
	const struct expr_scope scope = {.subject = &subject, .arch = -1};

	return filter_new(&scope, text, ret_filter, explain, err);
}

int spec_shape_filter_match(const struct spec_filter *filter, const struct spec_shape *shape)
{
	return expr_holds(&filter->expr, shape);
}

/* Three lines: what is wrong, the text around it, a caret under the fault. */
