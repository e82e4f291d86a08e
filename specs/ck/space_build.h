/* SPDX-License-Identifier: MIT */
/*
 * space_build.h: a space as it is stored. Two levels:
 *
 *   template  one block of a rules file, compiled for the arch: its axes, and its rules sorted by
 *             the axis after which all they read is known
 *   block     a template with family, data type, head dims and pipeline fixed, and a list of tiles
 *             that it shares with all blocks of the same kind
 *
 * A spec is a block, one value of each axis, and a tile. The specs are walked in that order, so
 * that the innermost step copies one struct kernel_tile and most rules never run there.
 */
#ifndef SPECS_SPACE_BUILD_H
#define SPECS_SPACE_BUILD_H

#include <specs/space.h>

#include "tiles.h"

struct template
{
	int n_axes;
	int n_leaf_rules; /* rules at level n_axes: they read the tile */
	field_set axis_fields;
	struct axis axis[SPACE_MAX_AXES];
	struct rule_list rules;
	/* 0xff where the signature does not depend on an axis: what blocks are compared by. */
	uint8_t fixed_signature[sizeof(struct kernel_signature)];
};

struct block {
	const struct template *template;
	struct kernel_spec base;
	const struct tile_choice *tile; /* NULL: base's */
	size_t n_tiles;
	uint64_t count;
};

/* The traits of one family, for spec_signature_reduce(). */
struct family_traits {
	field_set used;
	struct set_list fixed;
};

struct spec_space {
	const struct spec_catalog *catalog;
	int arch;
	int arch_space; /* which of the arch's in its file */
	/* NULL: made of rules; else the few kernels of a backend, sorted as blocks are. */
	const struct spec_backend *backend;
	struct kernel_spec *own;
	size_t n_own;
	uint64_t count;
	size_t n_templates, n_tile_lists, n_blocks;
	struct template **templates;
	struct tile_list **tile_lists;
	struct block *blocks; /* sorted by family, data type, hdim_q, hdim_v */
	struct family_traits families[SPEC_N_FAMILIES];
};

/* The scope of rules for one arch. */
struct expr_scope space_scope(const struct spec_catalog *catalog, int arch, int arch_space);

/* Compiles every block for the arch without making tiles: finds mistakes in the rules at load time.
 */
int space_check(const struct spec_catalog *catalog, int arch, int arch_space,
		struct fmha_error *err);

/* Adds the blocks of one variant. Return: 0, 1 when the rules have no such variant, FMHA_E*. */
struct space_request {
	int exhaustive;
	int receipt;
	int all_types;  /* a shipped sweep's list of them is not honoured */
	int check_only; /* no tiles */
	const struct spec_head_dims *restrict_hdims;
	size_t n_restrict_hdims;
};
int space_add_variant(struct spec_space *space, const struct space_request *request,
		      const struct sweep *sweep, struct fmha_error *err);
int space_read_families(struct spec_space *space, struct fmha_error *err);
int space_is_restricted(const struct space_request *request, int hdim_q, int hdim_v);

#endif
