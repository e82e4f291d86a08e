/* SPDX-License-Identifier: MIT */
#include "warm.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "ctl.h"

int warm_add(struct warm_list *list, const char *format, ...)
{
	va_list arguments;
	int n;

	if (list->n == WARM_MOST)
		return ctl_usage_error("warm: more than %d problems", WARM_MOST);
	if (list->n == list->capacity) {
		size_t capacity = list->capacity ? 2 * list->capacity : 64;
		void *lines = realloc(list->lines, capacity * WARM_LINE);

		if (!lines)
			return ctl_usage_error("warm: out of memory");
		list->lines = lines;
		list->capacity = capacity;
	}
	va_start(arguments, format);
	n = vsnprintf(list->lines[list->n], WARM_LINE, format, arguments);
	va_end(arguments);
	if (n >= WARM_LINE)
		return ctl_usage_error("warm: a line of more than %d characters", WARM_LINE - 1);
	list->n++;
	return 0;
}
