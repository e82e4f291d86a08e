// SPDX-License-Identifier: MIT
/*
 * catalog.c: loading the folder. The order matters: words.json names what the other files may use,
 * rules/ says how spaces are built, arch/ picks one of the rules and gives it its tables. Backends
 * bring pipelines and archs of their own, and their rows to archs that a file describes, too.
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <proto/error.h>

#include "catalog_impl.h"
#include "space_impl.h"

static int no_memory(struct fmha_error *err)
{
	return fmha_error_set(err, FMHA_ENOMEM, "specs: out of memory");
}

int at_expr(const struct at *at, const struct expr_scope *scope, struct expr *ret,
	    struct fmha_error *err)
{
	struct fmha_error inner;
	const char *text;
	int r = at_string(at, &text, err);

	if (r < 0)
		return r;
	r = expr_compile(scope, text, ret, NULL, &inner);
	return r == FMHA_EINVAL ? at_error(at, err, "%s", inner.msg) : r < 0 ? no_memory(err) : 0;
}

/* A word may hold anything but what the canonical name uses between words. */
static int check_word(const struct at *at, const char *word, struct fmha_error *err)
{
	for (const char *c = word; *c; c++)
		if (!(*c == '_' || (*c >= 'a' && *c <= 'z') || (*c >= '0' && *c <= '9')))
			return at_error(at, err, "'%s': words are made of a-z, 0-9 and _", word);
	return 0;
}

static int append_word(struct words *words, const char *word, struct fmha_error *err)
{
	if (words->n == CATALOG_MAX_WORDS)
		return fmha_error_set(err, FMHA_EINVAL, "%s: more than %d words", word,
				      CATALOG_MAX_WORDS);
	words->word[words->n] = strdup(word);
	if (!words->word[words->n])
		return no_memory(err);
	words->n++;
	return 0;
}

static int add_word(const struct at *at, struct words *words, const char *word,
		    struct fmha_error *err)
{
	int r = check_word(at, word, err);

	if (r < 0)
		return r;
	for (int i = 0; i < words->n; i++)
		if (strcmp(words->word[i], word) == 0)
			return at_error(at, err, "'%s' appears twice", word);
	return append_word(words, word, err);
}

static int load_words(const struct at *at, struct words *words, struct fmha_error *err)
{
	int r = at_want_array(at, err);
	int index = 0;

	if (r < 0)
		return r;
	for (const cJSON *item = at->item->child; item; item = item->next, index++) {
		struct at here = at_item(at, item, index);
		const char *word;

		r = at_string(&here, &word, err);
		if (r == 0)
			r = add_word(&here, words, word, err);
		if (r < 0)
			return r;
	}
	return 0;
}

static const char *const first_warp_properties[] = {"first_warp_m", "first_warp_n", "first_warp_k"};

/* data_types: every data type with the same numeric properties, `bytes` among them. */
static int load_data_types(struct spec_catalog *catalog, const struct at *at,
			   struct fmha_error *err)
{
	int r = at_want_object(at, err);

	if (r < 0)
		return r;
	for (const cJSON *item = at->item->child; item; item = item->next) {
		struct at here = at_member(at, item);
		int dtype = spec_word_find(catalog, SPEC_FIELD_data_type, item->string);
		int64_t bytes;

		if (dtype < 0)
			return at_error(&here, err, "no such data type");
		r = at_want_object(&here, err);
		for (const cJSON *p = item->child; p && r == 0 && at->item->child == item;
		     p = p->next) {
			struct at property = at_member(&here, p);

			r = add_word(&property, &catalog->properties, p->string, err);
		}
		if (r < 0)
			return r;
		for (int i = 0; i < catalog->properties.n; i++) {
			struct at property = at_key(&here, catalog->properties.word[i]);

			r = at_int(&property, 0, 255, &bytes, err);
			if (r < 0)
				return r;
			if (strcmp(catalog->properties.word[i], "bytes") == 0)
				catalog->dtype_bytes[dtype] = (int)bytes;
		}
	}
	for (int i = 0; i < SPEC_N_DTYPES; i++)
		if (!catalog->dtype_bytes[i])
			return at_error(at, err, "%s with its bytes is missing",
					spec_word(catalog, SPEC_FIELD_data_type, i));
	if (catalog->properties.n + 3 > CATALOG_MAX_PROPERTIES)
		return at_error(at, err, "too many properties");
	for (int i = 0; i < 3 && r == 0; i++)
		r = add_word(at, &catalog->properties, first_warp_properties[i], err);
	return r;
}

static char *path_join(const char *dir, const char *name)
{
	char *path = NULL;

	return asprintf(&path, "%s/%s", dir, name) < 0 ? NULL : path;
}

static int load_document(const struct spec_catalog *catalog, const char *name, char **ret_path,
			 cJSON **ret_document, struct fmha_error *err)
{
	char *path = path_join(catalog->dir, name);
	int r;

	if (!path)
		return no_memory(err);
	r = json_read(path, ret_document, err);
	if (r < 0) {
		free(path);
		return r;
	}
	*ret_path = path;
	return 0;
}

static int load_words_file(struct spec_catalog *catalog, struct fmha_error *err)
{
	static const char *const keys[] = {"pipelines", "tile_tags", "data_types", NULL};
	char *path = NULL;
	struct at document, at;
	int r = load_document(catalog, "words.json", &path, &catalog->words_document, err);

	if (r < 0)
		return r;
	document = at_document(catalog->words_document, path);
	r = at_want_object(&document, err);
	if (r == 0)
		r = at_only_keys(&document, keys, err);
	if (r == 0) {
		at = at_key(&document, "pipelines");
		r = load_words(&at, &catalog->pipelines, err);
	}
	if (r == 0) {
		at = at_key(&document, "tile_tags");
		r = load_words(&at, &catalog->tile_tags, err);
	}
	if (r == 0 && (catalog->tile_tags.n == 0 || catalog->tile_tags.word[0][0] != '\0'))
		r = at_error(&at, err, "the first must be the empty word: no tag");
	if (r == 0) {
		at = at_key(&document, "data_types");
		r = load_data_types(catalog, &at, err);
	}
	free(path);
	return r;
}

static int load_profile(struct spec_catalog *catalog, const struct at *at, struct fmha_error *err)
{
	static const char *const keys[] = {"name", "receipt", "keep", NULL};
	struct expr_scope scope = {.catalog = catalog, .arch = -1};
	struct profile profile = {.receipt = -1};
	struct at name = at_key(at, "name"), receipt = at_key(at, "receipt"),
		  keep = at_key(at, "keep");
	int64_t number;
	int r = at_want_object(at, err);

	if (r == 0)
		r = at_only_keys(at, keys, err);
	if (r == 0)
		r = at_string(&name, &profile.name, err);
	if (r == 0 && spec_profile_find(catalog, profile.name) >= 0)
		r = at_error(&name, err, "'%s' appears twice", profile.name);
	if (r == 0 && receipt.item) {
		r = at_int(&receipt, 0, INT32_MAX, &number, err);
		if (r == 0)
			profile.receipt = (int)number;
	}
	if (r == 0)
		r = at_expr(&keep, &scope, &profile.keep, err);
	if (r < 0)
		return r;
	profile.text = keep.item->valuestring;
	catalog->profiles[catalog->n_profiles++] = profile;
	return 0;
}

static int load_profiles(struct spec_catalog *catalog, struct fmha_error *err)
{
	char *path = NULL;
	struct at document, list;
	int index = 0;
	int r = load_document(catalog, "profiles.json", &path, &catalog->profiles_document, err);

	if (r < 0)
		return r;
	document = at_document(catalog->profiles_document, path);
	list = at_key(&document, "profiles");
	r = at_only_keys(&document, (const char *const[]){"profiles", NULL}, err);
	if (r == 0)
		r = at_want_array(&list, err);
	if (r == 0)
		for (const cJSON *item = list.item->child; item && r == 0; item = item->next) {
			struct at here = at_item(&list, item, index++);

			if (catalog->n_profiles == CATALOG_MAX_PROFILES)
				r = at_error(&here, err, "more than %d profiles",
					     CATALOG_MAX_PROFILES);
			else
				r = load_profile(catalog, &here, err);
		}
	free(path);
	return r;
}

static int is_json(const struct dirent *entry)
{
	size_t length = strlen(entry->d_name);

	return entry->d_name[0] != '.' && length > 5 &&
	       strcmp(entry->d_name + length - 5, ".json") == 0;
}

/* Calls @load for each .json file of a folder, in the order of the names. */
static int each_file(struct spec_catalog *catalog, const char *folder,
		     int (*load)(struct spec_catalog *, const char *, struct fmha_error *),
		     struct fmha_error *err)
{
	char *dir = path_join(catalog->dir, folder);
	struct dirent **entries = NULL;
	int n, r = 0;

	if (!dir)
		return no_memory(err);
	n = scandir(dir, &entries, is_json, alphasort);
	if (n < 0)
		r = fmha_error_set(err, FMHA_EIO, "%s: %s", dir, strerror(errno));
	for (int i = 0; i < n; i++) {
		char *path = path_join(dir, entries[i]->d_name);

		if (r == 0)
			r = path ? load(catalog, path, err) : no_memory(err);
		free(path);
		free(entries[i]);
	}
	free(entries);
	free(dir);
	return r;
}

/* The name inside a file must be the file's, so that a copied file is not mistaken. */
static int check_own_name(const struct at *document, const char *key, const char *path,
			  const char **ret_name, struct fmha_error *err)
{
	struct at name = at_key(document, key);
	const char *slash = strrchr(path, '/');
	const char *base = slash ? slash + 1 : path;
	int r = at_want_object(document, err);

	if (r == 0)
		r = at_string(&name, ret_name, err);
	if (r == 0)
		r = check_word(&name, *ret_name, err);
	if (r == 0 && (strncmp(base, *ret_name, strlen(*ret_name)) != 0 ||
		       strcmp(base + strlen(*ret_name), ".json") != 0))
		r = at_error(&name, err, "'%s' is not the name of the file", *ret_name);
	return r;
}

static int load_rules(struct spec_catalog *catalog, const char *path, struct fmha_error *err)
{
	static const char *const keys[] = {
		"rules",    "constants", "define",   "axes",       "families", "tiles", "receipts",
		"variants", "sweeps",    "validate", "exhaustive", "lookups",  NULL};
	struct rules *rules = &catalog->rules[catalog->n_rules];
	struct at document;
	int r;

	if (catalog->n_rules == CATALOG_MAX_RULES)
		return fmha_error_set(err, FMHA_EINVAL, "%s: more than %d rules files", path,
				      CATALOG_MAX_RULES);
	r = json_read(path, &rules->document, err);
	if (r < 0)
		return r;
	catalog->n_rules++;
	rules->path = strdup(path);
	if (!rules->path)
		return no_memory(err);
	document = at_document(rules->document, rules->path);
	r = check_own_name(&document, "rules", path, &rules->name, err);
	return r < 0 ? r : at_only_keys(&document, keys, err);
}

/* Archs are numbered before any is loaded: expressions may name any of them. */
static int name_arch(struct spec_catalog *catalog, const char *path, struct fmha_error *err)
{
	struct arch *arch = &catalog->archs[catalog->n_archs];
	struct at document;
	int r;

	if (catalog->n_archs == CATALOG_MAX_ARCHS)
		return fmha_error_set(err, FMHA_EINVAL, "%s: more than %d archs", path,
				      CATALOG_MAX_ARCHS);
	r = json_read(path, &arch->document, err);
	if (r < 0)
		return r;
	arch->path = strdup(path);
	if (!arch->path) {
		cJSON_Delete(arch->document);
		return no_memory(err);
	}
	document = at_document(arch->document, arch->path);
	catalog->n_archs++;
	return check_own_name(&document, "arch", path, &catalog->arch_names[catalog->n_archs - 1],
			      err);
}

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
	int r = at_want_object(at, err);

	if (r == 0)
		r = at_only_keys(at, keys, err);
	if (r == 0 && families.item)
		r = load_bits(catalog, &families, SPEC_FIELD_family, &bits, err);
	if (r == 0 && when.item)
		r = at_expr(&when, scope, &check->when, err);
	if (r == 0)
		r = at_expr(&require, scope, &check->require, err);
	if (r == 0)
		r = at_string(&field, &check->field, err);
	if (r == 0 && field_find(check->field, strlen(check->field)) < 0)
		r = at_error(&field, err, "there is no field '%s'", check->field);
	if (r == 0)
		r = at_string(&message, &check->message, err);
	if (r == 0 && level.item)
		r = at_string(&level, &word, err);
	if (r == 0 && strcmp(word, "error") != 0 && strcmp(word, "warning") != 0)
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

void arch_place_init(struct arch_place *place, const struct spec_catalog *catalog, int arch,
		     int space)
{
	const struct arch *of = &catalog->archs[arch];

	place->document = at_document(of->document, of->path);
	place->list = at_key(&place->document, "spaces");
	place->space = at_item(&place->list, of->spaces[space].item, space);
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
	r = at_want_object(&place.space, err);
	if (r == 0)
		r = at_only_keys(&place.space, keys, err);
	if (r == 0)
		r = find_rules(catalog, &rules, &space->rules, err);
	if (r == 0)
		r = load_bits(catalog, &dtypes, SPEC_FIELD_data_type, &bits, err);
	space->dtypes = (uint16_t)bits;
	if (r == 0)
		r = load_bits(catalog, &pipelines, SPEC_FIELD_pipeline, &space->pipelines, err);
	if (r == 0)
		r = check_rows(catalog, &pairs, 2, err);
	if (r == 0)
		r = check_rows(catalog, &warps, 3, err);
	if (r == 0)
		r = check_constants(&place.space, space->rules, err);
	if (r < 0)
		return r;
	fill_properties(catalog, space);
	scope = space_scope(catalog, arch_number, number);
	r = load_checks(catalog, space, &scope, err);
	return r < 0 ? r : space_check(catalog, arch_number, number, err);
}

static int load_arch(struct spec_catalog *catalog, int arch_number, struct fmha_error *err)
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

/* ---- backends ---- */

static int arch_number(const struct spec_catalog *catalog, const char *name)
{
	int i = 0;

	while (i < catalog->n_archs && strcmp(catalog->arch_names[i], name) != 0)
		i++;
	return i;
}

static int add_own_space(struct spec_catalog *catalog, const struct spec_backend *backend,
			 const struct spec_backend_arch *model, int first_pipeline,
			 struct fmha_error *err)
{
	int number = arch_number(catalog, model->name);
	struct own_space *own;

	if (number == CATALOG_MAX_ARCHS)
		return fmha_error_set(err, FMHA_EINVAL, "more than %d archs", CATALOG_MAX_ARCHS);
	if (number == catalog->n_archs)
		catalog->arch_names[catalog->n_archs++] = model->name;
	own = &catalog->archs[number].own;
	*own = (struct own_space){backend, model, first_pipeline, 0};
	for (size_t i = 0; i < backend->n_rows; i++)
		if (backend->rows[i].cores & model->cores)
			own->pipelines |= (uint64_t)1
					  << (first_pipeline + backend->rows[i].pipeline);
	return 0;
}

static int add_backend(struct spec_catalog *catalog, const struct spec_backend *backend,
		       struct fmha_error *err)
{
	int first = catalog->pipelines.n, r = 0;

	for (size_t i = 0; i < backend->n_pipelines && r == 0; i++) {
		r = append_word(&catalog->pipelines, backend->pipelines[i].name, err);
		if (r == 0)
			catalog->own_pipelines[first + (int)i] = &backend->pipelines[i];
	}
	for (size_t i = 0; i < backend->n_archs && r == 0; i++)
		r = add_own_space(catalog, backend, &backend->archs[i], first, err);
	return r;
}

/* Archs are numbered in the order of their names, whoever brought them. */
static void sort_archs(struct spec_catalog *catalog)
{
	for (int i = 1; i < catalog->n_archs; i++) {
		const char *name = catalog->arch_names[i];
		struct arch arch = catalog->archs[i];
		int at = i;

		for (; at > 0 && strcmp(catalog->arch_names[at - 1], name) > 0; at--) {
			catalog->arch_names[at] = catalog->arch_names[at - 1];
			catalog->archs[at] = catalog->archs[at - 1];
		}
		catalog->arch_names[at] = name;
		catalog->archs[at] = arch;
	}
}

static int load_all(struct spec_catalog *catalog, const struct spec_backend *const *backends,
		    struct fmha_error *err)
{
	int r = load_words_file(catalog, err);

	if (r == 0)
		r = each_file(catalog, "rules", load_rules, err);
	if (r == 0)
		r = each_file(catalog, "arch", name_arch, err);
	for (; r == 0 && backends && *backends; backends++)
		r = add_backend(catalog, *backends, err);
	sort_archs(catalog);
	if (r == 0)
		r = load_profiles(catalog, err);
	for (int i = 0; i < catalog->n_archs && r == 0; i++)
		if (catalog->archs[i].document)
			r = load_arch(catalog, i, err);
	if (r == 0 && catalog->n_archs == 0)
		r = fmha_error_set(err, FMHA_EINVAL, "%s/arch: there is no arch", catalog->dir);
	return r;
}

/* $FMHA_SPECS_DIR, the installed folder, the source tree. */
const char *specs_find_dir(void)
{
	static const char *const dirs[] = {FMHA_SPECS_INSTALLED_DIR, FMHA_SPECS_SOURCE_DIR};
	const char *dir = getenv("FMHA_SPECS_DIR");

	if (dir && *dir)
		return dir;
	for (size_t i = 0; i < sizeof(dirs) / sizeof(dirs[0]); i++)
		if (access(dirs[i], R_OK | X_OK) == 0)
			return dirs[i];
	return dirs[0];
}

int spec_catalog_load(const char *dir, const struct spec_backend *const *backends,
		      struct spec_catalog **ret_catalog, struct fmha_error *err)
{
	struct spec_catalog *catalog = calloc(1, sizeof(*catalog));
	int r;

	if (!catalog)
		return no_memory(err);
	catalog->dir = strdup(dir ? dir : specs_find_dir());
	r = catalog->dir ? load_all(catalog, backends, err) : no_memory(err);
	if (r < 0) {
		spec_catalog_free(catalog);
		return r;
	}
	*ret_catalog = catalog;
	return 0;
}

static void words_deinit(struct words *words)
{
	for (int i = 0; i < words->n; i++)
		free(words->word[i]);
}

static void arch_space_deinit(struct arch_space *space)
{
	for (int i = 0; i < space->n_checks; i++) {
		expr_deinit(&space->checks[i].when);
		expr_deinit(&space->checks[i].require);
	}
	free(space->checks);
}

struct spec_catalog *spec_catalog_free(struct spec_catalog *catalog)
{
	if (!catalog)
		return NULL;
	for (int i = 0; i < catalog->n_archs; i++) {
		struct arch *arch = &catalog->archs[i];

		for (int j = 0; j < arch->n_spaces; j++)
			arch_space_deinit(&arch->spaces[j]);
		cJSON_Delete(arch->document);
		free(arch->path);
	}
	for (int i = 0; i < catalog->n_rules; i++) {
		cJSON_Delete(catalog->rules[i].document);
		free(catalog->rules[i].path);
	}
	for (int i = 0; i < catalog->n_profiles; i++)
		expr_deinit(&catalog->profiles[i].keep);
	words_deinit(&catalog->pipelines);
	words_deinit(&catalog->tile_tags);
	words_deinit(&catalog->properties);
	cJSON_Delete(catalog->words_document);
	cJSON_Delete(catalog->profiles_document);
	free(catalog->dir);
	free(catalog);
	return NULL;
}
