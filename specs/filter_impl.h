/* SPDX-License-Identifier: MIT */
/* filter_impl.h: compiling an expression that people wrote, whatever it is about. */
#ifndef SPECS_FILTER_IMPL_H
#define SPECS_FILTER_IMPL_H

#include "expr.h"

/* As spec_filter_compile(). */
int filter_compile(const struct expr_scope *scope, const char *text, struct expr *ret_expr,
		   char *explain, struct fmha_error *err);

#endif
