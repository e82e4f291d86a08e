/* SPDX-License-Identifier: MIT */
/* filter_impl.h: an expression that people wrote, whatever it is about. */
#ifndef SPECS_FILTER_IMPL_H
#define SPECS_FILTER_IMPL_H

#include <specs/filter.h>

#include "expr.h"

struct spec_filter {
	struct expr expr;
};

#endif
