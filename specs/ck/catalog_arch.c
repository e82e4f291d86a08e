// SPDX-License-Identifier: MIT
/*
 * catalog_arch.c: what a file of arch/ says: for each of its spaces the rules, and the tables that
 * they ask for. Rules' checks are compiled here, once an arch: their constants differ.
 */
#include <stdlib.h>

#include "catalog_impl.h"
#include "set_impl.h"
#include "space_build.h"

/* A list of words of @field, as bits. */
static int load_bits(const struct spec_catalog *catalog, const struct at *at, enum spec_field field,
		     uint64_t *ret_bits, struct fmha_error *err)
{
	int index = 0;
	int r = at_want_array(at, err);

	for (const cJSON *item = at->item ? at->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(at, item, index++);
		const char *word = "";
		int value;

		r = at_string(&here, &word, err);
		value = spec_word_find(catalog, field, word);
		if (r == 0 && value < 0)
			r = at_error(&here, err, "'%s' is not a %s", word, spec_field_name(field));
		if (r == 0)
			*ret_bits |= (uint64_t)1 << value;
	}
	return r;
}

static int check_rows(const struct spec_catalog *catalog, const struct at *at, int columns,
		      struct fmha_error *err)
{
	int r = at_want_object(at, err);

	for (const cJSON *item = at->item ? at->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at list = at_member(at, item);
		int row_index = 0;

		if (spec_word_find(catalog, SPEC_FIELD_data_type, item->string) < 0)
			return at_error(&list, err, "no such data type");
		r = at_want_array(&list, err);
		for (const cJSON *row = item->child; row && r == 0; row = row->next) {
			struct at here = at_item(&list, row, row_index++);
			int column = 0;

			r = at_want_array(&here, err);
			for (const cJSON *cell = row->child; cell && r == 0; cell = cell->next) {
				struct at number = at_item(&here, cell, column++);
				int64_t ignored;

				r = at_int(&number, 1, UINT16_MAX, &ignored, err);
			}
			if (r == 0 && column != columns)
				r = at_error(&here, err, "must have %d numbers", columns);
		}
	}
	return r;
}

static void fill_properties(struct spec_catalog *catalog, struct arch_space *space)
{
	const cJSON *types = cJSON_GetObjectItemCaseSensitive(catalog->words_document,
							      "data_types");
	const cJSON *warps = cJSON_GetObjectItemCaseSensitive(space->item, "warp_tiles");
	int n_own = catalog->properties.n - 3;

	for (int dtype = 0; dtype < SPEC_N_DTYPES; dtype++) {
		const char *name = spec_word(catalog, SPEC_FIELD_data_type, dtype);
		const cJSON *type = cJSON_GetObjectItemCaseSensitive(types, name);
		const cJSON *first = cJSON_GetArrayItem(
			cJSON_GetObjectItemCaseSensitive(warps, name), 0);

		for (int i = 0; i < n_own; i++)
			space->dtype_properties[dtype][i] = cJSON_GetObjectItemCaseSensitive(
								    type,
								    catalog->properties.word[i])
								    ->valueint;
		for (int i = 0; i < 3 && first; i++)
			space->dtype_properties[dtype][n_own + i] =
				cJSON_GetArrayItem(first, i)->valueint;
	}
}

/* Every constant that the rules ask for, as a number, and no other. */
static int check_constants(const struct at *at, const struct rules *rules, struct fmha_error *err)
{
	struct at constants = at_key(at, "constants");
	struct at rules_document = at_document(rules->document, rules->path);
	struct at wanted = at_key(&rules_document, "constants");
	int r = at_want_object(&constants, err);

	if (r == 0)
		r = at_want_object(&wanted, err);
	for (const cJSON *item = r == 0 ? wanted.item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_key(&constants, item->string);
		int64_t ignored;

		r = at_int(&here, 0, INT32_MAX, &ignored, err);
	}
	for (const cJSON *item = r == 0 ? constants.item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_member(&constants, item);

		if (!cJSON_GetObjectItemCaseSensitive(wanted.item, item->string))
			r = at_error(&here, err, "the rules '%s' have no such constant",
				     rules->name);
	}
	return r;
}

static int load_check(struct spec_catalog *catalog, const struct expr_scope *scope,
		      const struct at *at, struct check *check, struct fmha_error *err)
{
	static const char *const keys[] = {"families", "when",    "require", "field",
					   "level",    "message", NULL};
	struct at families = at_key(at, "families"), when = at_key(at, "when"),
		  require = at_key(at, "require"), field = at_key(at, "field"),
		  message = at_key(at, "message"), level = at_key(at, "level");
	const char *word = "error";
	uint64_t bits = 0;
	int r = at_object(at, keys, err);

	if (r < 0)
		return r;
	if (families.item)
		r = load_bits(catalog, &families, SPEC_FIELD_family, &bits, err);
	if (r < 0)
		return r;
	if (when.item)
		r = at_expr(&when, scope, &check->when, err);
	if (r < 0)
		return r;
	r = at_expr(&require, scope, &check->require, err);
	if (r < 0)
		return r;
	r = at_string(&field, &check->field, err);
	if (r < 0)
		return r;
	if (field_find(check->field, strlen(check->field)) < 0)
		return at_error(&field, err, "there is no field '%s'", check->field);
	r = at_string(&message, &check->message, err);
	if (r < 0)
		return r;
	if (level.item)
		r = at_string(&level, &word, err);
	if (r < 0)
		return r;
	if (strcmp(word, "error") != 0 && strcmp(word, "warning") != 0)
		r = at_error(&level, err, "must be error or warning");
	check->is_warning = word[0] == 'w';
	check->families = families.item ? (uint16_t)bits : UINT16_MAX;
	return r;
}

static int load_checks(struct spec_catalog *catalog, struct arch_space *space,
		       const struct expr_scope *scope, struct fmha_error *err)
{
	struct at document = at_document(space->rules->document, space->rules->path);
	struct at list = at_key(&document, "validate");
	int r = at_want_array(&list, err);
	int index = 0;

	if (r < 0)
		return r;
	space->checks = calloc((size_t)cJSON_GetArraySize(list.item) + 1, sizeof(*space->checks));
	if (!space->checks)
		return no_memory(err);
	for (const cJSON *item = list.item->child; item && r == 0; item = item->next) {
		struct at here = at_item(&list, item, index++);

		r = load_check(catalog, scope, &here, &space->checks[space->n_checks++], err);
	}
	return r;
}

static int find_rules(const struct spec_catalog *catalog, const struct at *at,
		      const struct rules **ret, struct fmha_error *err)
{
	const char *name;
	int r = at_string(at, &name, err);

	if (r < 0)
		return r;
	for (int i = 0; i < catalog->n_rules; i++)
		if (strcmp(catalog->rules[i].name, name) == 0) {
			*ret = &catalog->rules[i];
			return 0;
		}
	return at_error(at, err, "there is no rules/%s.json", name);
}

static int load_arch_space(struct spec_catalog *catalog, int arch_number, int number,
			   struct fmha_error *err)
{
	static const char *const keys[] = {"rules",     "data_types", "head_dims", "warp_tiles",
					   "pipelines", "constants",  "define",    NULL};
	struct arch_space *space = &catalog->archs[arch_number].spaces[number];
	struct arch_place place;
	struct expr_scope scope;
	struct at rules, dtypes, pipelines, pairs, warps;
	uint64_t bits = 0;
	int r;

	arch_place_init(&place, catalog, arch_number, number);
	rules = at_key(&place.space, "rules");
	dtypes = at_key(&place.space, "data_types");
	pipelines = at_key(&place.space, "pipelines");
	pairs = at_key(&place.space, "head_dims");
	warps = at_key(&place.space, "warp_tiles");
	r = at_object(&place.space, keys, err);

	if (r < 0)
		return r;
	r = find_rules(catalog, &rules, &space->rules, err);
	if (r < 0)
		return r;
	r = load_bits(catalog, &dtypes, SPEC_FIELD_data_type, &bits, err);
	space->dtypes = (uint16_t)bits;
	if (r < 0)
		return r;
	r = load_bits(catalog, &pipelines, SPEC_FIELD_pipeline, &space->pipelines, err);
	if (r < 0)
		return r;
	r = check_rows(catalog, &pairs, 2, err);
	if (r < 0)
		return r;
	r = check_rows(catalog, &warps, 3, err);
	if (r < 0)
		return r;
	r = check_constants(&place.space, space->rules, err);
	if (r < 0)
		return r;
	fill_properties(catalog, space);
	scope = space_scope(catalog, arch_number, number);
	r = load_checks(catalog, space, &scope, err);
	if (r < 0)
		return r;
	r = autofill_check(catalog, arch_number, number, err);
	return r < 0 ? r : space_check(catalog, arch_number, number, err);
}

int catalog_load_arch(struct spec_catalog *catalog, int arch_number, struct fmha_error *err)
{
	static const char *const keys[] = {"arch", "spaces", NULL};
	struct arch *arch = &catalog->archs[arch_number];
	struct at document = at_document(arch->document, arch->path);
	struct at spaces = at_key(&document, "spaces");
	int r = at_only_keys(&document, keys, err);

	if (r == 0)
		r = at_want_array(&spaces, err);
	if (r < 0)
		return r;
	arch->n_spaces = cJSON_GetArraySize(spaces.item);
	if (arch->n_spaces < 1 || arch->n_spaces > CATALOG_MAX_SPACES)
		return at_error(&spaces, err, "must have 1 to %d members", CATALOG_MAX_SPACES);
	for (int i = 0; i < arch->n_spaces; i++)
		arch->spaces[i].item = cJSON_GetArrayItem(spaces.item, i);
	for (int i = 0; i < arch->n_spaces && r == 0; i++)
		r = load_arch_space(catalog, arch_number, i, err);
	return r;
}
