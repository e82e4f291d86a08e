/* SPDX-License-Identifier: MIT */
/*
 * filter.h: expressions over the fields of a kernel spec, such as
 *   hdim_q == 128 and pipeline == 'qr_async' and not (lse or dropout)
 *   mask in ('no', 'top_left') and 64 <= tile_m0 < 256
 *   c.tile_m0 * c.tile_n0 > 128 * 128
 * The grammar is Python's: or, and, not, comparisons (chained as in Python), in, not in, + - * //
 * %, a if b else c, parentheses, numbers, 'words' or "words", true and false. "c." before a field
 * is accepted and means nothing. Dividing by zero gives zero. Words compare for equality only, and
 * only with words that the field can have: a typing mistake is an error, not an empty result.
 *
 * A compiled filter is read-only; evaluating it allocates nothing and may happen in many threads.
 */
#ifndef SPECS_FILTER_H
#define SPECS_FILTER_H

#include <specs/spec.h>

struct spec_filter;

#define SPEC_FILTER_MAX_BYTES 4096

/*
 * @explain: NULL, or filled on failure with three lines for people: the message, the text around
 *           the fault, and a caret under it. @err has the message and the column.
 * Return: 0, FMHA_EINVAL, FMHA_ENOMEM
 */
#define SPEC_EXPLAIN_BYTES 512
int spec_filter_compile(const struct spec_catalog *catalog, const char *text,
			struct spec_filter **ret_filter, char explain[SPEC_EXPLAIN_BYTES],
			struct fmha_error *err);
/*
 * The same of a file: one expression over any number of lines, with comments from # to the line's end. In
 * @explain lines and comments are blanks. Return: FMHA_EIO as well, without an explanation.
 */
int spec_filter_read(const struct spec_catalog *catalog, const char *path,
		     struct spec_filter **ret_filter, char explain[SPEC_EXPLAIN_BYTES],
		     struct fmha_error *err);
struct spec_filter *spec_filter_free(struct spec_filter *filter);

int spec_filter_match(const struct spec_filter *filter, const struct kernel_spec *spec);

#endif
