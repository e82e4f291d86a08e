// SPDX-License-Identifier: MIT
/* space.c: making, counting, walking and searching a space. Its shape is told in space_impl.h. */
#include <stdio.h>
#include <stdlib.h>

#include <proto/error.h>

#include "space_build.h"
#include "sweep.h"

struct spec_iter {
	const struct spec_space *space;
	const struct spec_filter *filter;
	int is_pinned; /* walk only the specs of `pin`'s signature */
	struct kernel_spec pin;
	size_t block, end;      /* the next block, and the end of those to walk */
	const struct block *of; /* being walked, or NULL */
	size_t tile;            /* the next tile; n_tiles: take the next row of axes first */
	int is_row_first;
	int row[SPACE_MAX_AXES]; /* the value of each axis */
	struct kernel_spec spec;
};

/* Advances axis @level to its next value that is wanted; 0 when there is none. */
static inline int step_axis(struct spec_iter *it, int level)
{
	const struct template *t = it->of->template;
	const struct axis *axis = &t->axis[level];

	while (++it->row[level] < axis->n_values) {
		axis_assign(axis, it->row[level], &it->spec);
		if (it->is_pinned) {
			int agrees = 1;

			for (int i = 0; i < axis->n_fields && agrees; i++) {
				const struct field *f = &spec_fields[axis->field[i]];

				agrees = !(spec_signature_fields >> axis->field[i] & 1) ||
					 field_load(f, &it->spec) == field_load(f, &it->pin);
			}
			if (!agrees)
				continue;
		}
		if (rules_hold(&t->rules, level, &it->spec))
			return 1;
	}
	return 0;
}

/* The next combination of axis values of the block; 0 at its end. */
static int next_row(struct spec_iter *it)
{
	int n = it->of->template->n_axes;
	int level = it->is_row_first ? 0 : n - 1;

	if (it->is_row_first && n > 0)
		it->row[0] = -1;
	if (n == 0 || level < 0) {
		int first = it->is_row_first;

		it->is_row_first = 0;
		return first;
	}
	it->is_row_first = 0;
	while (level >= 0) {
		if (!step_axis(it, level)) {
			level--;
		} else if (++level == n) {
			return 1;
		} else {
			it->row[level] = -1;
		}
	}
	return 0;
}

static int signature_agrees(const struct block *block, const struct kernel_signature *pin)
{
	const uint8_t *mask = block->template->fixed_signature;
	const uint8_t *a = (const uint8_t *)&block->base.signature;
	const uint8_t *b = (const uint8_t *)pin;
	uint8_t differs = 0;

	for (size_t i = 0; i < sizeof(*pin); i++)
		differs |= (a[i] ^ b[i]) & mask[i];
	return !differs;
}

static int next_block(struct spec_iter *it)
{
	while (it->block < it->end) {
		const struct block *block = &it->space->blocks[it->block++];

		if (it->is_pinned && !signature_agrees(block, &it->pin.signature))
			continue;
		it->of = block;
		it->spec = block->base;
		it->is_row_first = 1;
		it->tile = block->n_tiles;
		return 1;
	}
	it->of = NULL;
	return 0;
}

static inline void take_tile(struct kernel_spec *spec, const struct tile_choice *choice)
{
	spec->tile = choice->tile;
	if (choice->block_per_cu)
		spec->block_per_cu = choice->block_per_cu;
}

/* The rules about tile and traits together. */
static inline int suits(const struct template *t, const struct kernel_spec *spec)
{
	return !t->n_leaf_rules || rules_hold(&t->rules, t->n_axes, spec);
}

static const struct kernel_spec *next_own(struct spec_iter *it)
{
	while (it->block < it->end) {
		const struct kernel_spec *spec = &it->space->own[it->block++];

		if (it->is_pinned && !spec_signature_equal(&spec->signature, &it->pin.signature))
			continue;
		if (!it->filter || spec_filter_match(it->filter, spec))
			return spec;
	}
	return NULL;
}

const struct kernel_spec *spec_iter_next(struct spec_iter *it)
{
	if (it->space->backend)
		return next_own(it);
	while (it->of || next_block(it)) {
		const struct block *block = it->of;

		while (it->tile < block->n_tiles) {
			if (block->tile)
				take_tile(&it->spec, &block->tile[it->tile]);
			it->tile++;
			if (!suits(block->template, &it->spec))
				continue;
			if (!it->filter || spec_filter_match(it->filter, &it->spec))
				return &it->spec;
		}
		if (next_row(it))
			it->tile = 0;
		else
			it->of = NULL;
	}
	return NULL;
}

static struct spec_iter *iter_alloc(const struct spec_space *space)
{
	struct spec_iter *it = calloc(1, sizeof(*it));

	if (it)
		it->space = space;
	return it;
}

/* Blocks, or own kernels: sorted alike. */
static size_t n_sorted(const struct spec_space *space)
{
	return space->backend ? space->n_own : space->n_blocks;
}

static const struct kernel_signature *sorted(const struct spec_space *space, size_t i)
{
	return space->backend ? &space->own[i].signature : &space->blocks[i].base.signature;
}

struct spec_iter *spec_iter_new(const struct spec_space *space, const struct spec_filter *filter)
{
	struct spec_iter *it = iter_alloc(space);

	if (it) {
		it->filter = filter;
		it->end = n_sorted(space);
	}
	return it;
}

/* Family, data type and head dims as one number that sorts like them. */
static uint64_t block_key(const struct kernel_signature *s)
{
	return (uint64_t)s->family << 40 | (uint64_t)s->data_type << 32 |
	       (uint64_t)s->hdim_q << 16 | s->hdim_v;
}

/* The first of them whose key is at least @key. */
static size_t lower_bound(const struct spec_space *space, uint64_t key)
{
	size_t low = 0, high = n_sorted(space);

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (block_key(sorted(space, middle)) < key)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

void spec_iter_restart_signature(struct spec_iter *it, const struct kernel_signature *signature)
{
	uint64_t key = block_key(signature);

	it->filter = NULL;
	it->is_pinned = 1;
	it->of = NULL;
	it->pin.signature = *signature;
	it->block = lower_bound(it->space, key);
	it->end = lower_bound(it->space, key + 1);
}

struct spec_iter *spec_iter_new_signature(const struct spec_space *space,
					  const struct kernel_signature *signature)
{
	struct spec_iter *it = iter_alloc(space);

	if (it)
		spec_iter_restart_signature(it, signature);
	return it;
}

struct spec_iter *spec_iter_free(struct spec_iter *it)
{
	free(it);
	return NULL;
}

int spec_space_contains(const struct spec_space *space, const struct kernel_spec *spec)
{
	struct spec_iter it = {.space = space};
	const struct kernel_spec *candidate;

	spec_iter_restart_signature(&it, &spec->signature);
	while ((candidate = spec_iter_next(&it)))
		if (memcmp(candidate, spec, sizeof(*spec)) == 0)
			return 1;
	return 0;
}

size_t spec_space_head_dims(const struct spec_space *space, enum spec_family family,
			    enum spec_dtype dtype, struct spec_head_dims *ret_pairs, size_t n_max)
{
	struct kernel_signature low = {.family = (uint8_t)family, .data_type = (uint8_t)dtype};
	uint64_t end = block_key(&low) + ((uint64_t)1 << 32);
	size_t n = 0;
	uint64_t last = 0;

	for (size_t i = lower_bound(space, block_key(&low)); i < n_sorted(space); i++) {
		const struct kernel_signature *s = sorted(space, i);
		uint64_t key = block_key(s);

		if (key >= end)
			break;
		if (key == last)
			continue;
		last = key;
		if (n < n_max)
			ret_pairs[n] = (struct spec_head_dims){s->hdim_q, s->hdim_v};
		n++;
	}
	return n;
}

void spec_signature_reduce(const struct spec_space *space, struct kernel_signature *signature)
{
	const struct family_traits *traits;
	struct kernel_spec full, reduced;

	if (signature->family >= SPEC_N_FAMILIES)
		return;
	if (space->backend) {
		backend_reduce(space->backend, signature);
		return;
	}
	traits = &space->families[signature->family];
	spec_init(&full);
	spec_init(&reduced);
	full.signature = *signature;
	reduced.signature.family = signature->family;
	reduced.signature.data_type = signature->data_type;
	for (int f = 0; f < SPEC_N_FIELDS; f++)
		if (traits->used >> f & 1)
			field_store(&spec_fields[f], &reduced, field_load(&spec_fields[f], &full));
	set_apply(&traits->fixed, &reduced);
	*signature = reduced.signature;
}

/* Rows of axes times tiles, unless a rule looks at the tile. */
static uint64_t count_block(const struct spec_space *space, size_t index)
{
	struct spec_iter it = {.space = space, .block = index, .end = index + 1};
	const struct block *block = &space->blocks[index];
	uint64_t n = 0;

	if (block->template->n_leaf_rules) {
		while (spec_iter_next(&it))
			n++;
		return n;
	}
	(void)next_block(&it);
	while (next_row(&it))
		n += block->n_tiles;
	return n;
}

static int compare_blocks(const void *a, const void *b)
{
	uint64_t x = block_key(&((const struct block *)a)->base.signature);
	uint64_t y = block_key(&((const struct block *)b)->base.signature);
	int by_pipeline = (int)((const struct block *)a)->base.pipeline -
			  (int)((const struct block *)b)->base.pipeline;

	return x != y ? (x > y) - (x < y) : by_pipeline;
}

static int compare_own(const void *x, const void *y)
{
	const struct kernel_spec *a = x, *b = y;
	uint64_t key_a = block_key(&a->signature), key_b = block_key(&b->signature);

	return key_a != key_b ? (key_a > key_b) - (key_a < key_b) : spec_compare(a, b);
}

static void settle(struct spec_space *space)
{
	size_t kept = 0;

	if (space->n_own)
		qsort(space->own, space->n_own, sizeof(*space->own), compare_own);
	space->count = space->n_own;
	if (space->n_blocks)
		qsort(space->blocks, space->n_blocks, sizeof(*space->blocks), compare_blocks);
	for (size_t i = 0; i < space->n_blocks; i++) {
		space->blocks[i].count = count_block(space, i);
		space->count += space->blocks[i].count;
	}
	for (size_t i = 0; i < space->n_blocks; i++)
		if (space->blocks[i].count)
			space->blocks[kept++] = space->blocks[i];
	space->n_blocks = kept;
}

static int add_sweep(struct spec_space *space, const struct space_request *request,
		     const struct at *document, struct fmha_error *err)
{
	struct sweep *sweep = malloc(sizeof(*sweep));
	int r;

	if (!sweep)
		return no_memory(err);
	r = sweep_read(space->catalog, document, sweep, err);
	if (r == 0 && request->all_types)
		sweep->allow[SPEC_FIELD_data_type] = (struct allow_list){0};
	if (r == 0)
		r = space_add_variant(space, request, sweep, err);
	/* In rules mode an unknown variant is an empty list, as it is upstream. */
	if (r == 1)
		r = request->exhaustive
			    ? fmha_error_set_field(err, FMHA_EINVAL, "variant",
						   "variant '%s': there is none", sweep->variant)
			    : 0;
	free(sweep);
	return r;
}

static int add_sweep_file(struct spec_space *space, const struct space_request *request,
			  const char *path, struct fmha_error *err)
{
	cJSON *document;
	struct at at;
	int r = json_read(path, &document, err);

	if (r < 0)
		return r;
	at = at_document(document, path);
	r = add_sweep(space, request, &at, err);
	cJSON_Delete(document);
	return r;
}

static int add_sweep_named(struct spec_space *space, const struct space_request *request,
			   const char *name, struct fmha_error *err)
{
	char *path;
	int r = sweep_find_file(space->catalog, name, &path, err);

	if (r == 0)
		r = add_sweep_file(space, request, path, err);
	free(path);
	return r;
}

/* @variant NULL: all. A sweep that is null, or exhaustive mode, means no allow-lists. */
static int add_variants(struct spec_space *space, const struct space_request *request,
			const char *variant, struct fmha_error *err)
{
	const struct rules *rules =
		space->catalog->archs[space->arch].spaces[space->arch_space].rules;
	struct at document = at_document(rules->document, rules->path);
	struct at sweeps = at_key(&document, "sweeps");
	int found = 0;
	int r = at_want_object(&sweeps, err);

	for (const cJSON *item = r == 0 ? sweeps.item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_member(&sweeps, item);
		struct sweep *sweep;
		const char *name = NULL;

		if (variant && strcmp(variant, item->string) != 0)
			continue;
		found = 1;
		if (!cJSON_IsNull(item))
			r = at_string(&here, &name, err);
		if (r == 0 && name && !request->exhaustive) {
			r = add_sweep_named(space, request, name, err);
		} else if (r == 0) {
			sweep = calloc(1, sizeof(*sweep));
			if (!sweep)
				return no_memory(err);
			(void)snprintf(sweep->variant, sizeof(sweep->variant), "%s", item->string);
			r = space_add_variant(space, request, sweep, err);
			r = r == 1 ? at_error(&here, err, "there is no such variant") : r;
			free(sweep);
		}
	}
	if (r == 0 && !found)
		r = fmha_error_set_field(err, FMHA_EINVAL, "variant",
					 "variant '%s': the rules '%s' have none of that name",
					 variant ? variant : "", rules->name);
	return r;
}

struct own_filling {
	struct spec_space *space;
	const struct space_request *request;
	size_t n_allocated;
};

static int add_own(void *owner, const struct kernel_spec *spec)
{
	struct own_filling *filling = owner;
	struct spec_space *space = filling->space;

	if (!family_takes_any_dims(spec->signature.family) &&
	    space_is_restricted(filling->request, spec->signature.hdim_q, spec->signature.hdim_v))
		return 0;
	if (space->n_own == filling->n_allocated) {
		size_t n = space->n_own ? 2 * space->n_own : 1024;
		struct kernel_spec *grown = realloc(space->own, n * sizeof(*grown));

		if (!grown)
			return FMHA_ENOMEM;
		space->own = grown;
		filling->n_allocated = n;
	}
	space->own[space->n_own++] = *spec;
	return 0;
}

static int fill_own(struct spec_space *space, const struct space_request *request,
		    const char *variant, struct fmha_error *err)
{
	struct own_filling filling = {space, request, 0};

	if (variant && !backend_has_variant(variant))
		return fmha_error_set_field(err, FMHA_EINVAL, "variant",
					    "variant '%s': the rules '%s' have none of that name",
					    variant, space->backend->name);
	return spec_own_each(space->catalog, space->arch, variant, add_own, &filling) < 0
		       ? no_memory(err)
		       : 0;
}

static int space_fill(struct spec_space *space, const struct spec_space_options *options,
		      struct fmha_error *err)
{
	const struct space_request request = {
		.exhaustive = options->exhaustive,
		.receipt = options->exhaustive ? 0 : options->receipt,
		.all_types = options->all_types && !options->config && !options->config_json,
		.restrict_hdims = options->restrict_hdims,
		.n_restrict_hdims = options->n_restrict_hdims,
	};
	cJSON *document;
	struct at at;
	int r;

	if (space->backend)
		return fill_own(space, &request, options->variant, err);
	if (options->config)
		return add_sweep_named(space, &request, options->config, err);
	if (!options->config_json)
		return add_variants(space, &request, options->variant, err);
	r = json_parse(options->config_json, "config", &document, err);
	if (r < 0)
		return r;
	at = at_document(document, "config");
	r = add_sweep(space, &request, &at, err);
	cJSON_Delete(document);
	return r;
}

/* Sweeps, receipts and exhaustive mode are AMD's and mean its space, where there is one. */
static const char *default_rules(const struct spec_catalog *catalog, int arch,
				 const struct spec_space_options *options)
{
	const char *second = spec_arch_rules(catalog, arch, 1);

	if (second && catalog->archs[arch].own.backend &&
	    (options->config || options->config_json || options->exhaustive || options->receipt))
		return second;
	return spec_arch_rules(catalog, arch, 0);
}

static int find_space(struct spec_space *space, const char *rules, struct fmha_error *err)
{
	const struct arch *arch = &space->catalog->archs[space->arch];

	if (arch->own.backend && strcmp(arch->own.backend->name, rules) == 0) {
		space->backend = arch->own.backend;
		return 0;
	}
	for (int i = 0; i < arch->n_spaces; i++)
		if (strcmp(arch->spaces[i].rules->name, rules) == 0) {
			space->arch_space = i;
			return space_read_families(space, err);
		}
	return fmha_error_set_field(err, FMHA_EINVAL, "rules",
				    "rules '%s': arch %s has none of that name", rules,
				    spec_arch_name(space->catalog, space->arch));
}

static int check_options(const struct spec_space *space, const struct spec_space_options *options,
			 struct fmha_error *err)
{
	if (!!options->variant + !!options->config + !!options->config_json > 1)
		return fmha_error_set_field(err, FMHA_EINVAL, "variant",
					    "variant and config exclude each other");
	if (space->backend && (options->config || options->config_json))
		return fmha_error_set_field(err, FMHA_EINVAL, "config",
					    "config: sweeps are for rules 'ck', not '%s'",
					    space->backend->name);
	return 0;
}

int spec_space_new(const struct spec_catalog *catalog, const struct spec_space_options *options,
		   struct spec_space **ret_space, struct fmha_error *err)
{
	int arch = options->arch ? spec_arch_find(catalog, options->arch) : -1;
	struct spec_space *space;
	int r;

	if (arch < 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "arch", "arch '%s': there is none",
					    options->arch ? options->arch : "");
	space = calloc(1, sizeof(*space));
	if (!space)
		return no_memory(err);
	space->catalog = catalog;
	space->arch = arch;
	r = find_space(space,
		       options->rules ? options->rules : default_rules(catalog, arch, options),
		       err);
	if (r == 0)
		r = check_options(space, options, err);
	if (r == 0)
		r = space_fill(space, options, err);
	if (r < 0) {
		spec_space_free(space);
		return r;
	}
	settle(space);
	*ret_space = space;
	return 0;
}

int spec_space_is_own(const struct spec_space *space)
{
	return space->backend != NULL;
}

uint64_t spec_space_count(const struct spec_space *space)
{
	return space->count;
}
