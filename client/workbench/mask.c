/* SPDX-License-Identifier: MIT */
/*
 * fmhactl mask: what a mask that is data lets rows see, drawn, and the share of work that it leaves. No
 * daemon. A picture has at most CELLS rows and columns, each of which stands for a block of the mask.
 */
#include "ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "npy.h"

#define CELLS 64  /* of a picture, along an edge */
#define TILE  128 /* rows and keys of a tile, as cost is counted */

struct drawing {
	struct npy npy;
	int64_t n, rows, keys; /* n: endpoints; 0: bits */
	int64_t matrix;        /* of batches and heads, the one that is drawn */
	uint8_t *seen;         /* [keys] */
	double cells[CELLS][CELLS];
	int64_t n_y, n_x;
	int64_t pairs, tiles;
	int64_t keys_said; /* 0: as many as rows, or bits */
	bool svg;
};

static int64_t tiles_of(int64_t n)
{
	return (n + TILE - 1) / TILE;
}

/* Row @i's keys into d->seen. */
static void look(struct drawing *d, int64_t i)
{
	const int32_t *f = (const int32_t *)d->npy.data + d->matrix * d->n * d->rows + i;
	const uint8_t *bits = (const uint8_t *)d->npy.data +
			      (d->matrix * d->rows + i) * ((d->keys + 7) / 8);

	memset(d->seen, 0, (size_t)d->keys);
	for (int64_t j = 0; d->n == 0 && j < d->keys; j++)
		d->seen[j] = bits[j / 8] >> j % 8 & 1;
	for (int64_t e = 0; e < d->n; e += 2) {
		int64_t from = e ? f[(e - 1) * d->rows] : 0, end = f[e * d->rows];

		from = from < 0 ? 0 : from;
		end = end > d->keys ? d->keys : end;
		if (from < end)
			memset(d->seen + from, 1, (size_t)(end - from));
	}
}

/* Counts pairs and tiles, and fills the cells of the picture with shares. */
static int survey(struct drawing *d)
{
	uint8_t *met = calloc((size_t)tiles_of(d->keys) + 1, 1);

	d->seen = malloc((size_t)d->keys + 1);
	if (!met || !d->seen) {
		free(met);
		(void)fputs("fmhactl: out of memory\n", stderr);
		return CTL_IO;
	}
	d->n_y = d->rows < CELLS ? d->rows : CELLS;
	d->n_x = d->keys < CELLS ? d->keys : CELLS;
	for (int64_t i = 0; i < d->rows; i++) {
		look(d, i);
		for (int64_t j = 0; j < d->keys; j++) {
			d->pairs += d->seen[j];
			met[j / TILE] |= d->seen[j];
			d->cells[i * d->n_y / d->rows][j * d->n_x / d->keys] += d->seen[j];
		}
		for (int64_t t = 0;
		     (i % TILE == TILE - 1 || i == d->rows - 1) && t < tiles_of(d->keys); t++) {
			d->tiles += met[t];
			met[t] = 0;
		}
	}
	for (int64_t y = 0; y < d->n_y; y++)
		for (int64_t x = 0; x < d->n_x; x++) {
			/* Rows i with i * n_y / rows == y, columns likewise. */
			int64_t rows = ((y + 1) * d->rows + d->n_y - 1) / d->n_y -
				       (y * d->rows + d->n_y - 1) / d->n_y;
			int64_t keys = ((x + 1) * d->keys + d->n_x - 1) / d->n_x -
				       (x * d->keys + d->n_x - 1) / d->n_x;

			d->cells[y][x] /= (double)rows * (double)keys;
		}
	free(met);
	return CTL_OK;
}

static void say_work(const struct drawing *d, FILE *out)
{
	double pairs = (double)d->rows * (double)d->keys;
	double tiles = (double)tiles_of(d->rows) * (double)tiles_of(d->keys);

	(void)fprintf(out,
		      "%" PRId64 " rows, %" PRId64 " keys: %.1f%% seen, %.1f%% of %d x %d tiles",
		      d->rows, d->keys, pairs > 0 ? 100 * (double)d->pairs / pairs : 0,
		      tiles > 0 ? 100 * (double)d->tiles / tiles : 0, TILE, TILE);
}

static void draw_letters(const struct drawing *d)
{
	for (int64_t y = 0; y < d->n_y; y++) {
		for (int64_t x = 0; x < d->n_x; x++)
			(void)putchar(d->cells[y][x] >= 1 ? '#' : d->cells[y][x] > 0 ? '+' : '.');
		(void)putchar('\n');
	}
	say_work(d, stdout);
	(void)putchar('\n');
}

static void draw_svg(const struct drawing *d)
{
	(void)printf("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-1 -1 %" PRId64
		     " %" PRId64 "\" width=\"%" PRId64 "\" role=\"img\"><title>",
		     d->n_x + 2, d->n_y + 6, 6 * d->n_x);
	say_work(d, stdout);
	(void)printf("</title><rect width=\"%" PRId64 "\" height=\"%" PRId64
		     "\" fill=\"none\" stroke=\"#888\" stroke-width=\"0.2\"/>"
		     "<g fill=\"#2a5db0\" shape-rendering=\"crispEdges\">",
		     d->n_x, d->n_y);
	for (int64_t y = 0; y < d->n_y; y++)
		for (int64_t x = 0; x < d->n_x; x++)
			if (d->cells[y][x] > 0)
				(void)printf("<rect x=\"%" PRId64 "\" y=\"%" PRId64
					     "\" width=\"1\" height=\"1\" fill-opacity=\"%.3f\"/>",
					     x, y, d->cells[y][x]);
	(void)printf("</g><text y=\"%" PRId64
		     "\" font-size=\"2.5\" font-family=\"sans-serif\" fill=\"#555\">",
		     d->n_y + 3);
	say_work(d, stdout);
	(void)puts("</text></svg>");
}

/* Sizes by the file's shape. @keys: 0: not said. */
static int measure(struct drawing *d, const char *path, int64_t keys)
{
	const struct npy *npy = &d->npy;
	int64_t last = npy->n_dims > 0 ? npy->dims[npy->n_dims - 1] : 0, n_matrices = 1;
	int64_t before = npy->n_dims > 1 ? npy->dims[npy->n_dims - 2] : 0;

	if (npy->n_dims < 2 || npy->n_dims > 4 || (npy->type != NPY_I4 && npy->type != NPY_U1))
		return ctl_usage_error(
			"%s: int32 [.., endpoints, rows] or uint8 [.., rows, keys / 8] is "
			"wanted",
			path);
	for (int i = 0; i < npy->n_dims - 2; i++)
		n_matrices *= npy->dims[i];
	if (d->matrix >= n_matrices)
		return ctl_usage_error("--head %" PRId64 ": %s has %" PRId64, d->matrix, path,
				       n_matrices);
	d->n = npy->type == NPY_I4 ? before : 0;
	d->rows = npy->type == NPY_I4 ? last : before;
	d->keys = keys > 0 ? keys : npy->type == NPY_I4 ? d->rows : 8 * last;
	if (npy->type == NPY_I4 && d->n % 2 == 0)
		return ctl_usage_error("%s: %" PRId64 " endpoints a row, must be odd", path, d->n);
	if (npy->type == NPY_U1 && (d->keys + 7) / 8 != last)
		return ctl_usage_error("--keys %" PRId64 ": %s has %" PRId64 " bytes a row", keys,
				       path, last);
	return CTL_OK;
}

static int mask(int argc, char **argv)
{
	struct drawing d = {0};
	struct fmha_error err = {0};
	int r;

	if (cli_next(&ctl_mask.usage, argc, argv, &d) != -1)
		return CTL_USAGE;
	if (optind + 1 != argc)
		return ctl_usage_error("mask: one FILE is wanted");
	if (npy_read(argv[optind], &d.npy, &err) < 0) {
		(void)fprintf(stderr, "fmhactl: %s\n", err.msg);
		return CTL_IO;
	}
	r = measure(&d, argv[optind], d.keys_said);
	if (r == 0)
		r = survey(&d);
	if (r == 0 && d.svg)
		draw_svg(&d);
	else if (r == 0)
		draw_letters(&d);
	free(d.seen);
	npy_deinit(&d.npy);
	return r;
}

static const struct cli_option options[] = {
	{"keys", 0, "N", "keys of the longest sequence (default: as many as rows, or bits)",
	 CLI_RANGE(INT, struct drawing, keys_said, 1, INT32_MAX)},
	{"head", 0, "N", "which of batches and heads (default: 0)",
	 CLI_RANGE(INT, struct drawing, matrix, 0, INT32_MAX)},
	{"svg", 0, NULL, "as a picture of that kind, on stdout", CLI_TO(FLAG, struct drawing, svg)},
	CLI_END};

const struct ctl_command ctl_mask = {
	.usage =
		{.name = "fmhactl mask",
		 .brief = "draws a mask of intervals or bits, and says what work it leaves",
		 .synopsis = "FILE [OPTION...]",
		 .text = "FILE is what --mask-intervals and --mask-bits of run take. Rows go down, "
			 "keys to the right; # is seen, + in parts, . not at all. Tiles in which "
			 "nothing "
			 "is seen cost nothing.",
		 .tables = {options}},
	.run = mask};
