/* SPDX-License-Identifier: MIT */
/* shape_filter.c: the expressions of filters, about shapes. */
#include <stdio.h>
#include <stdlib.h>

#include <proto/error.h>
#include <specs/shapes.h>

#include "expr.h"
#include "filter_impl.h"

#define MAX_WORDS 8 /* of a field */

struct spec_shape_filter {
	struct expr expr;
};

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

int spec_shape_filter_compile(const char *text, struct spec_shape_filter **ret_filter,
			      char explain[SPEC_EXPLAIN_BYTES], struct fmha_error *err)
{
	static const struct expr_subject subject = {
		.fields = fields,
		.n_fields = sizeof(fields) / sizeof(fields[0]),
		.words = words_of,
	};
	const struct expr_scope scope = {.subject = &subject, .arch = -1};
	struct spec_shape_filter *filter = calloc(1, sizeof(*filter));
	int r;

	if (!filter)
		return fmha_error_set(err, FMHA_ENOMEM, "filter: out of memory");
	r = filter_compile(&scope, text, &filter->expr, explain, err);
	if (r < 0)
		free(filter);
	else
		*ret_filter = filter;
	return r;
}

struct spec_shape_filter *spec_shape_filter_free(struct spec_shape_filter *filter)
{
	if (filter)
		expr_deinit(&filter->expr);
	free(filter);
	return NULL;
}

int spec_shape_filter_match(const struct spec_shape_filter *filter, const struct spec_shape *shape)
{
	return expr_holds(&filter->expr, shape);
}
