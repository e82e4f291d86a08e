// SPDX-License-Identifier: MIT
/*
 * tiles.c: runs a tile generator of a rules file: the product of its axes, thinned out by its
 * rules, completed by its assignments.
 *
 *   "for"     axes. A field that is already fixed (the block's data type, head dims and pipeline,
 *             or one that an earlier axis has set) selects the rows that agree with it instead of
 *             being set: so a table of tiles by head dim is an axis over both.
 *   "rules"   each judged as soon as all that it reads is known
 *   "set"     assignments to the tiles that are left
 *   "lookup"  a table of section "lookups": more fields from its first row that agrees in the
 *             fields of "match"; when none does, in those of "or_match"; when none does, from the
 *             assignments of "else"; and always those of "set"
 *
 * Equal tiles are kept once: a lookup may overwrite what told two of them apart.
 */
#include <stdlib.h>

#include "tiles.h"

/* What a generator may read besides the tile itself: tile lists are shared by these. */
#define SHARED_BY                                                                                  \
	(FIELD_BIT(data_type) | FIELD_BIT(hdim_q) | FIELD_BIT(hdim_v) | FIELD_BIT(pipeline) |      \
	 FIELD_BIT(gfx_arch))

struct generator {
	const struct expr_scope *scope;
	int n_axes;
	struct axis axes[SPACE_MAX_AXES];
	field_set fixed_before[SPACE_MAX_AXES]; /* fields that axis n must agree with */
	struct rule_list rules;
	struct set_list set;
	int has_lookup;
	int has_block_per_cu;
	struct lookup lookup;
	struct tile_list *list;
	size_t n_allocated;
};

static void generator_free(struct generator *generator)
{
	for (int i = 0; i < generator->n_axes; i++)
		axis_deinit(&generator->axes[i]);
	rules_deinit(&generator->rules);
	set_deinit(&generator->set);
	lookup_deinit(&generator->lookup);
	free(generator);
}

void lookup_deinit(struct lookup *lookup)
{
	axis_deinit(&lookup->table);
	set_deinit(&lookup->otherwise);
	set_deinit(&lookup->set);
}

static int read_fields(const struct at *at, field_set *ret, struct fmha_error *err)
{
	struct axis axis = {0};
	const char *text;
	int r = at_string(at, &text, err);

	if (r == 0)
		r = axis_fields(at, text, &axis, err);
	*ret = axis.bits;
	return r;
}

int lookup_read(struct lookup *lookup, const struct at *at, const struct expr_scope *scope,
		struct fmha_error *err)
{
	static const char *const keys[] = {"columns", "rows", "match", "or_match",
					   "gives",   "else", "set",   NULL};
	struct at columns = at_key(at, "columns"), rows = at_key(at, "rows"),
		  match = at_key(at, "match"), or_match = at_key(at, "or_match"),
		  gives = at_key(at, "gives"), otherwise = at_key(at, "else"),
		  set = at_key(at, "set");
	const char *text;
	int r = at_object(at, keys, err);

	if (r < 0)
		return r;
	r = at_string(&columns, &text, err);
	if (r < 0)
		return r;
	r = axis_fields(&columns, text, &lookup->table, err);
	if (r < 0)
		return r;
	r = read_axis_rows(scope->catalog, &rows, &lookup->table, err);
	if (r < 0)
		return r;
	r = read_fields(&match, &lookup->match, err);
	if (r < 0)
		return r;
	r = read_fields(&or_match, &lookup->or_match, err);
	if (r < 0)
		return r;
	r = read_fields(&gives, &lookup->gives, err);
	if (r < 0)
		return r;
	r = read_set(&otherwise, scope, &lookup->otherwise, err);
	if (r < 0)
		return r;
	return read_set(&set, scope, &lookup->set, err);
}

/* The values of "warp_tiles" axes: the arch's rows for the block's data type. */
static int fill_warp_tiles(struct generator *generator, const struct kernel_spec *base,
			   struct fmha_error *err)
{
	const struct spec_catalog *catalog = generator->scope->catalog;
	struct arch_place place;
	struct at table, rows;
	int r = 0;

	arch_place_init(&place, catalog, generator->scope->arch, generator->scope->space);
	table = at_key(&place.space, "warp_tiles");
	rows = at_key(&table, spec_word(catalog, SPEC_FIELD_data_type, base->signature.data_type));
	for (int i = 0; i < generator->n_axes && r == 0; i++)
		if (!generator->axes[i].value && rows.item)
			r = read_axis_rows(catalog, &rows, &generator->axes[i], err);
	return r;
}

static int check_reads(struct generator *generator, const struct at *at, struct fmha_error *err)
{
	field_set reads = 0, writes = 0;

	for (int i = 0; i < generator->rules.n; i++)
		reads |= generator->rules.rule[i].reads;
	for (int i = 0; i < generator->set.n; i++) {
		reads |= generator->set.value[i].reads;
		writes |= (field_set)1 << generator->set.field[i];
	}
	for (int i = 0; i < generator->n_axes; i++)
		writes |= generator->axes[i].bits & ~SHARED_BY;
	generator->has_block_per_cu = !!(writes & FIELD_BIT(block_per_cu));
	if (generator->has_block_per_cu)
		reads &= ~FIELD_BIT(block_per_cu);
	writes &= ~FIELD_BIT(block_per_cu);
	if ((reads & ~SHARED_BY & ~spec_tile_fields) || (writes & ~spec_tile_fields))
		return at_error(at, err,
				"tiles depend on data type, head dims, pipeline and arch "
				"alone, and set nothing but tile fields and block_per_cu");
	return 0;
}

static int read_generator(struct generator *generator, const struct at *at,
			  const struct at *named_axes, const struct kernel_spec *base,
			  struct fmha_error *err)
{
	static const char *const keys[] = {"for", "rules", "set", "lookup", NULL};
	const struct expr_scope *scope = generator->scope;
	struct at axes = at_key(at, "for"), rules = at_key(at, "rules"), set = at_key(at, "set"),
		  name = at_key(at, "lookup"), lookups = at_key(at->up->up, "lookups"), lookup;
	const char *word;
	int8_t level[SPEC_N_FIELDS];
	field_set known = SHARED_BY;
	int r = at_object(at, keys, err);

	if (r < 0)
		return r;
	r = read_axes(scope->catalog, &axes, named_axes, NULL, generator->axes, &generator->n_axes,
		      err);
	if (r < 0)
		return r;
	r = fill_warp_tiles(generator, base, err);
	if (r < 0)
		return r;
	r = read_rules(&rules, scope, &generator->rules, err);
	if (r < 0)
		return r;
	r = read_set(&set, scope, &generator->set, err);
	if (r < 0)
		return r;
	if (name.item) {
		r = at_string(&name, &word, err);
		if (r < 0)
			return r;
		lookup = at_key(&lookups, word);
		generator->has_lookup = 1;
		r = lookup_read(&generator->lookup, &lookup, scope, err);
	}
	if (r < 0)
		return r;
	r = check_reads(generator, at, err);
	if (r < 0)
		return r;
	memset(level, -1, sizeof(level));
	for (int i = 0; i < generator->n_axes; i++) {
		generator->fixed_before[i] = known;
		known |= generator->axes[i].bits;
		for (int f = 0; f < SPEC_N_FIELDS; f++)
			if (generator->axes[i].bits & ~generator->fixed_before[i] &
			    (field_set)1 << f)
				level[f] = (int8_t)i;
	}
	rules_set_levels(&generator->rules, level);
	return 0;
}

/* 1 when row @row of @axis agrees with @spec in the fields of @which. */
static int row_agrees(const struct axis *axis, int row, field_set which,
		      const struct kernel_spec *spec)
{
	const int32_t *value = axis->value + (size_t)row * (size_t)axis->n_fields;

	for (int i = 0; i < axis->n_fields; i++)
		if (which >> axis->field[i] & 1 &&
		    field_load(&spec_fields[axis->field[i]], spec) != value[i])
			return 0;
	return 1;
}

/* The first row that agrees in the fields of @which, or -1. */
static int find_row(const struct axis *table, field_set which, const struct kernel_spec *spec)
{
	for (int row = 0; row < table->n_values; row++)
		if (row_agrees(table, row, which, spec))
			return row;
	return -1;
}

void lookup_apply(const struct lookup *lookup, struct kernel_spec *spec)
{
	const struct axis *table = &lookup->table;
	int row = find_row(table, lookup->match, spec);

	if (row < 0)
		row = find_row(table, lookup->or_match, spec);
	if (row < 0)
		set_apply(&lookup->otherwise, spec);
	for (int i = 0; i < table->n_fields && row >= 0; i++)
		if (lookup->gives >> table->field[i] & 1)
			field_store(&spec_fields[table->field[i]], spec,
				    table->value[row * table->n_fields + i]);
	set_apply(&lookup->set, spec);
}

static int add_tile(struct generator *generator, const struct kernel_spec *spec,
		    struct fmha_error *err)
{
	struct tile_list *list = generator->list;
	struct tile_choice choice = {
		.tile = spec->tile,
		.block_per_cu = generator->has_block_per_cu ? spec->block_per_cu : 0,
	};

	for (size_t i = 0; i < list->n; i++)
		if (memcmp(&list->tile[i], &choice, sizeof(choice)) == 0)
			return 0;
	if (list->n == generator->n_allocated) {
		size_t n = generator->n_allocated ? 2 * generator->n_allocated : 32;
		struct tile_choice *grown = realloc(list->tile, n * sizeof(*grown));

		if (!grown)
			return no_memory(err);
		list->tile = grown;
		generator->n_allocated = n;
	}
	list->tile[list->n++] = choice;
	return 0;
}

static int generator_walk(struct generator *generator, int level, const struct kernel_spec *so_far,
			  struct fmha_error *err)
{
	struct kernel_spec spec = *so_far;
	const struct axis *axis = &generator->axes[level];
	int r = 0;

	if (level == generator->n_axes) {
		set_apply(&generator->set, &spec);
		if (generator->has_lookup)
			lookup_apply(&generator->lookup, &spec);
		return add_tile(generator, &spec, err);
	}
	for (int row = 0; row < axis->n_values && r == 0; row++) {
		if (!row_agrees(axis, row, generator->fixed_before[level], so_far))
			continue;
		axis_assign(axis, row, &spec);
		if (rules_hold(&generator->rules, level, &spec))
			r = generator_walk(generator, level + 1, &spec, err);
	}
	return r;
}

int tiles_generate(const struct expr_scope *scope, const struct at *at, const struct at *named_axes,
		   const struct kernel_spec *base, struct tile_list *ret_list,
		   struct fmha_error *err)
{
	struct generator *generator = calloc(1, sizeof(*generator));
	struct kernel_spec start;
	int r;

	if (!generator)
		return no_memory(err);
	generator->scope = scope;
	generator->list = ret_list;
	r = read_generator(generator, at, named_axes, base, err);
	spec_init(&start);
	start.gfx_arch = base->gfx_arch;
	start.pipeline = base->pipeline;
	start.signature.data_type = base->signature.data_type;
	start.signature.hdim_q = base->signature.hdim_q;
	start.signature.hdim_v = base->signature.hdim_v;
	if (r == 0 && rules_hold(&generator->rules, -1, &start))
		r = generator_walk(generator, 0, &start, err);
	generator_free(generator);
	return r;
}
