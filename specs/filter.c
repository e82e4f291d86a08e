// SPDX-License-Identifier: MIT
/* filter.c: the expression language as people use it: compiled once, faults shown with a caret. */
#include <stdio.h>
#include <stdlib.h>

#include <proto/error.h>
#include <specs/filter.h>

#include "expr.h"
#include "filter_impl.h"

struct spec_filter {
	struct expr expr;
};

/* Three lines: what is wrong, the text around it, a caret under the fault. */
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

int filter_compile(const struct expr_scope *scope, const char *text, struct expr *ret_expr,
		   char *explain, struct fmha_error *err)
{
	struct fmha_error inner;
	size_t column = 0;
	int r = expr_compile(scope, text, ret_expr, &column, &inner);

	if (r == 0)
		return 0;
	if (explain)
		explain_fault(text, column, inner.msg, explain);
	return fmha_error_set_field(err, r, "filter", "filter: %s", inner.msg);
}

int spec_filter_compile(const struct spec_catalog *catalog, const char *text,
			struct spec_filter **ret_filter, char explain[SPEC_EXPLAIN_BYTES],
			struct fmha_error *err)
{
	const struct expr_scope scope = {.catalog = catalog, .arch = -1};
	struct spec_filter *filter = calloc(1, sizeof(*filter));
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
