/* SPDX-License-Identifier: MIT */
/* row.h: kernel specs as CSV and JSON. */
#ifndef SPECS_ROW_H
#define SPECS_ROW_H

#include <specs/catalog.h>

#define SPEC_ROW_BYTES  1024 /* holds a CSV row or header, newline and NUL included */
#define SPEC_JSON_BYTES 2560

/* Each writes one line with its newline and NUL and returns its length without the NUL. */
/* @is_own: of this build's kernels, which may have more columns than AMD's 59. */
size_t spec_csv_header(int is_own, char line[SPEC_ROW_BYTES]);
size_t spec_csv_row(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		    char line[SPEC_ROW_BYTES]);

/* The inverse, of one line with or without its newline. Return: 0, FMHA_EINVAL naming the field. */
int spec_csv_parse(const struct spec_catalog *catalog, const char *line,
		   struct kernel_spec *ret_spec, struct fmha_error *err);

/* One JSON object of a member a column and "name", without a newline; returns its length. */
size_t spec_json(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		 char text[SPEC_JSON_BYTES]);

/*
 * Reads a file with a spec or a list of specs as people write them: objects whose members are
 * fields, all optional but family and gfx_arch, with lists for short: "tile" (6 numbers, 9 for
 * bwd_dq_dk_dv), "wave" (9), "warp" (9), "pads" (4). Calls @each for every one; @spec is NULL when
 * it is broken, and
 * @fault says where and why. Stops when @each returns other than 0.
 * Return: 0, what @each returned, FMHA_EIO, FMHA_ENOMEM, FMHA_EINVAL when the file is not JSON.
 */
typedef int (*spec_json_each)(void *owner, int index, const struct kernel_spec *spec,
			      const struct fmha_error *fault);
int spec_json_read(const struct spec_catalog *catalog, const char *path, spec_json_each each,
		   void *owner, struct fmha_error *err);

#endif
