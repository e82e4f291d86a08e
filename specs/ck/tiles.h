/* SPDX-License-Identifier: MIT */
/* tiles.h: lists of tiles, and the generators that make them. */
#ifndef SPECS_TILES_H
#define SPECS_TILES_H

#include "space_read.h"

/* One way to cut the work. How many blocks share a compute unit goes with the tile where the tile's
 * table says so, and is an axis elsewhere. */
struct tile_choice {
	struct kernel_tile tile;
	int16_t block_per_cu; /* 0: not the tile's business */
};

struct tile_list {
	const cJSON *generator;
	uint16_t hdim_q, hdim_v;
	uint8_t data_type, pipeline;
	struct tile_choice *tile;
	size_t n;
};

/* A table of section "lookups", as a tile generator and autofill use it. */
struct lookup {
	struct axis table;
	field_set match, or_match, gives;
	struct set_list otherwise, set;
};
int lookup_read(struct lookup *lookup, const struct at *at, const struct expr_scope *scope,
		struct fmha_error *err);
void lookup_apply(const struct lookup *lookup, struct kernel_spec *spec);
void lookup_deinit(struct lookup *lookup);

/* The tiles that @generator makes for a block's data type, head dims and pipeline. */
int tiles_generate(const struct expr_scope *scope, const struct at *generator,
		   const struct at *named_axes, const struct kernel_spec *base,
		   struct tile_list *ret_list, struct fmha_error *err);

#endif
