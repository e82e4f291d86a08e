/* SPDX-License-Identifier: MIT */
/*
 * space_impl.h: a space as it is stored. Two levels:
 *
 *   template  one block of a rules file, compiled for the arch: its axes, and its rules sorted by
 *             the axis after which all they read is known
 *   block     a template with family, data type, head dims and pipeline fixed, and a list of tiles
 *             that it shares with all blocks of the same kind
 *
 * A spec is a block, one value of each axis, and a tile. The specs are walked in that order, so
 * that the innermost step copies one struct kernel_tile and most rules never run there.
 */
#ifndef SPECS_SPACE_IMPL_H
#define SPECS_SPACE_IMPL_H

#include <specs/space.h>

#include "catalog_impl.h"

#define SPACE_MAX_AXES        24
#define SPACE_MAX_AXIS_FIELDS 24
#define SPACE_MAX_RULES       24

struct axis {
	field_set bits;
	int n_fields;
	int n_values;
	uint8_t field[SPACE_MAX_AXIS_FIELDS];
	int32_t *value; /* n_values rows of n_fields */
};

/* Rules and the level at which each is judged: -1 before the first axis, n after axis n. */
struct rule_list {
	int n;
	int8_t level[SPACE_MAX_RULES];
	struct expr rule[SPACE_MAX_RULES];
};

/* Assignments, in order: a constant or an expression. */
struct set_list {
	int n;
	uint8_t field[SPACE_MAX_AXIS_FIELDS];
	int32_t constant[SPACE_MAX_AXIS_FIELDS];
	struct expr value[SPACE_MAX_AXIS_FIELDS]; /* without code: the constant */
};

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

/* What spec_signature_reduce() does to one family. */
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

/* An allow-list of a sweep; `present` with n 0 lets nothing through. */
#define SWEEP_MAX_VALUES 32
struct allow_list {
	int present;
	int n;
	int32_t value[SWEEP_MAX_VALUES];
};

struct sweep {
	char variant[32];
	struct allow_list allow[SPEC_N_FIELDS]; /* by field; only some fields have lists */
};

int sweep_read(const struct spec_catalog *catalog, const struct at *document, struct sweep *ret,
	       struct fmha_error *err);

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
	int check_only; /* no tiles */
	const struct spec_head_dims *restrict_hdims;
	size_t n_restrict_hdims;
};
int space_add_variant(struct spec_space *space, const struct space_request *request,
		      const struct sweep *sweep, struct fmha_error *err);
int space_read_families(struct spec_space *space, struct fmha_error *err);
int space_is_restricted(const struct space_request *request, int hdim_q, int hdim_v);
/* space_read.c: the pieces that blocks and tile generators are made of. */
int read_axes(const struct spec_catalog *catalog, const struct at *list, const struct at *named,
	      const struct sweep *sweep, struct axis *axes, int *n_axes, struct fmha_error *err);
int read_axis_rows(const struct spec_catalog *catalog, const struct at *values, struct axis *axis,
		   struct fmha_error *err);
int axis_fields(const struct at *at, const char *key, struct axis *axis, struct fmha_error *err);
int read_rules(const struct at *list, const struct expr_scope *scope, struct rule_list *rules,
	       struct fmha_error *err);
int read_set(const struct at *object, const struct expr_scope *scope, struct set_list *set,
	     struct fmha_error *err);
int read_value(const struct spec_catalog *catalog, const struct at *at, int field, int32_t *ret,
	       struct fmha_error *err);
void set_apply(const struct set_list *set, struct kernel_spec *spec);
void axis_deinit(struct axis *axis);
void rules_deinit(struct rule_list *rules);
void set_deinit(struct set_list *set);
/* Gives each rule its level, from the level at which each field is known. */
void rules_set_levels(struct rule_list *rules, const int8_t level_of_field[SPEC_N_FIELDS]);

static inline int rules_hold(const struct rule_list *rules, int level,
			     const struct kernel_spec *spec)
{
	for (int i = 0; i < rules->n; i++)
		if (rules->level[i] == level && !expr_holds(&rules->rule[i], spec))
			return 0;
	return 1;
}

static inline void axis_assign(const struct axis *axis, int row, struct kernel_spec *spec)
{
	const int32_t *value = axis->value + (size_t)row * (size_t)axis->n_fields;

	for (int i = 0; i < axis->n_fields; i++)
		field_store(&spec_fields[axis->field[i]], spec, value[i]);
}

/* tiles.c: the tiles that @generator makes for a block's data type, head dims and pipeline. */
int tiles_generate(const struct expr_scope *scope, const struct at *generator,
		   const struct at *named_axes, const struct kernel_spec *base,
		   struct tile_list *ret_list, struct fmha_error *err);

#endif
