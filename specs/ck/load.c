/* SPDX-License-Identifier: MIT */
/*
 * load.c: the catalog with AMD's rules. The order matters: words.json names what the other files may use,
 * rules/ says how spaces are built, arch/ picks one of the rules and gives it its tables. Backends
 * bring pipelines and archs of their own, and their rows to archs that a file describes, too.
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>

#include "catalog_impl.h"

/* ---- rules ---- */

/* The checks of a rules file, and profiles. */

/* ck/load.c */
static int rules_judge(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		       struct spec_findings *ret_findings)
{
	const struct arch_space *space = &catalog->archs[spec->gfx_arch].spaces[0];
	int n_errors = 0;

	for (int i = 0; i < space->n_checks; i++) {
		const struct check *check = &space->checks[i];
		struct spec_finding *finding;

		if (!(check->families >> spec->signature.family & 1) ||
		    !expr_holds(&check->when, spec) || expr_holds(&check->require, spec))
			continue;
		n_errors += !check->is_warning;
		if (!ret_findings)
			continue;
		findings_add(ret_findings, check->is_warning, check->field, &finding);
		if (finding)
			findings_write(catalog, spec, check->message, finding->msg,
				       sizeof(finding->msg));
	}
	return n_errors;
}

int spec_profile_count(const struct spec_catalog *catalog)
{
	return catalog->n_profiles;
}

const char *spec_profile_name(const struct spec_catalog *catalog, int profile)
{
	return catalog->profiles[profile].name;
}

int spec_profile_find(const struct spec_catalog *catalog, const char *name)
{
	for (int i = 0; i < catalog->n_profiles; i++)
		if (strcmp(catalog->profiles[i].name, name) == 0)
			return i;
	return -1;
}

int spec_profile_parse(const struct spec_catalog *catalog, const char *text)
{
	int profile = spec_profile_find(catalog, text);
	char number[16];

	for (int i = 0; i < catalog->n_profiles && profile < 0; i++) {
		(void)snprintf(number, sizeof(number), "%d", catalog->profiles[i].receipt);
		if (catalog->profiles[i].receipt >= 0 && strcmp(number, text) == 0)
			profile = i;
	}
	return profile;
}

int spec_profile_kernels_of(const struct spec_catalog *catalog, int profile)
{
	return catalog->profiles[profile].kernels_of;
}

int spec_profile_all_types(const struct spec_catalog *catalog, int profile)
{
	return catalog->profiles[profile].all_types;
}

int spec_profile_receipt(const struct spec_catalog *catalog, int profile)
{
	return catalog->profiles[profile].receipt;
}

const char *spec_profile_text(const struct spec_catalog *catalog, int profile)
{
	return catalog->profiles[profile].text;
}

int spec_profile_keeps(const struct spec_catalog *catalog, int profile,
		       const struct kernel_spec *spec)
{
	/* They are AMD's lists: traits that have no column there are in none of them. */
#define IS_PLAIN(name, NAME, word, kind, families, asked) &&spec->signature.name == 0
	return 1 FMHA_OWN_TRAITS(IS_PLAIN) && expr_holds(&catalog->profiles[profile].keep, spec);
#undef IS_PLAIN
}

/* A word may hold anything but what the canonical name uses between words. */
static int check_word(const struct at *at, const char *word, struct fmha_error *err)
{
	for (const char *c = word; *c; c++)
		if (!(*c == '_' || (*c >= 'a' && *c <= 'z') || (*c >= '0' && *c <= '9')))
			return at_error(at, err, "'%s': words are made of a-z, 0-9 and _", word);
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
	return catalog_append_word(words, word, err);
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

static int load_words_of(struct spec_catalog *catalog, const struct at *document,
			 struct fmha_error *err)
{
	static const char *const keys[] = {"pipelines", "tile_tags", "data_types", NULL};
	struct at pipelines = at_key(document, "pipelines"), tags = at_key(document, "tile_tags"),
		  data_types = at_key(document, "data_types");
	int r = at_object(document, keys, err);

	if (r < 0)
		return r;
	r = load_words(&pipelines, &catalog->pipelines, err);
	if (r < 0)
		return r;
	r = load_words(&tags, &catalog->tile_tags, err);
	if (r < 0)
		return r;
	if (catalog->tile_tags.n == 0 || catalog->tile_tags.word[0][0] != '\0')
		return at_error(&tags, err, "the first must be the empty word: no tag");
	return load_data_types(catalog, &data_types, err);
}

static int load_words_file(struct spec_catalog *catalog, struct fmha_error *err)
{
	char *path = NULL;
	struct at document;
	int r = load_document(catalog, "words.json", &path, &catalog->words_document, err);

	if (r < 0)
		return r;
	document = at_document(catalog->words_document, path);
	r = load_words_of(catalog, &document, err);
	free(path);
	return r;
}

static int load_profile(struct spec_catalog *catalog, const struct at *at, struct fmha_error *err)
{
	static const char *const keys[] = {"name",      "receipt", "kernels_of",
					   "all_types", "keep",    NULL};
	struct expr_scope scope = {.catalog = catalog, .arch = -1};
	struct profile profile = {.receipt = -1};
	struct at name = at_key(at, "name"), receipt = at_key(at, "receipt"),
		  kernels_of = at_key(at, "kernels_of"), all_types = at_key(at, "all_types"),
		  keep = at_key(at, "keep");
	int64_t number;
	int r = at_object(at, keys, err);

	if (r < 0)
		return r;
	r = at_string(&name, &profile.name, err);
	if (r < 0)
		return r;
	if (spec_profile_find(catalog, profile.name) >= 0)
		return at_error(&name, err, "'%s' appears twice", profile.name);
	if (receipt.item) {
		r = at_int(&receipt, 0, INT32_MAX, &number, err);
		if (r == 0)
			profile.receipt = (int)number;
	}
	profile.kernels_of = profile.receipt;
	if (r < 0)
		return r;
	if (kernels_of.item) {
		r = at_int(&kernels_of, 0, INT32_MAX, &number, err);
		if (r == 0)
			profile.kernels_of = (int)number;
	}
	if (r < 0)
		return r;
	if (all_types.item && !cJSON_IsBool(all_types.item))
		r = at_error(&all_types, err, "must be true or false");
	profile.all_types = cJSON_IsTrue(all_types.item);
	if (r < 0)
		return r;
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
	static const char *const keys[] = {"rules",    "constants", "define",     "axes",
					   "families", "tiles",     "receipts",   "variants",
					   "sweeps",   "validate",  "exhaustive", "lookups",
					   "autofill", NULL};
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

static int load_all(struct spec_catalog *catalog, const struct spec_backend *const *backends,
		    struct fmha_error *err)
{
	int r = load_words_file(catalog, err);

	if (r < 0)
		return r;
	r = each_file(catalog, "rules", load_rules, err);
	if (r < 0)
		return r;
	r = each_file(catalog, "arch", name_arch, err);
	if (r < 0)
		return r;
	r = catalog_add_backends(catalog, backends, err);
	if (r < 0)
		return r;
	r = load_profiles(catalog, err);
	for (int i = 0; i < catalog->n_archs && r == 0; i++)
		if (catalog->archs[i].document)
			r = catalog_load_arch(catalog, i, err);
	if (r < 0)
		return r;
	if (catalog->n_archs == 0)
		return fmha_error_set(err, FMHA_EINVAL, "%s/arch: there is no arch", catalog->dir);
	return 0;
}

static void arch_space_deinit(struct arch_space *space)
{
	for (int i = 0; i < space->n_checks; i++) {
		expr_deinit(&space->checks[i].when);
		expr_deinit(&space->checks[i].require);
	}
	free(space->checks);
}

static void release(struct spec_catalog *catalog)
{
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
	cJSON_Delete(catalog->words_document);
	cJSON_Delete(catalog->profiles_document);
	free(catalog->dir);
}

static const struct catalog_foreign ck = {.judge = rules_judge, .release = release};

int spec_catalog_load(const char *dir, const struct spec_backend *const *backends,
		      struct spec_catalog **ret_catalog, struct fmha_error *err)
{
	struct spec_catalog *catalog = calloc(1, sizeof(*catalog));
	char found[PATH_MAX];
	int r;

	if (!catalog)
		return no_memory(err);
	catalog->foreign = &ck;
	catalog->dir = strdup(dir ? dir : specs_find_dir(found));
	r = catalog->dir ? load_all(catalog, backends, err) : no_memory(err);
	if (r < 0) {
		spec_catalog_free(catalog);
		return r;
	}
	*ret_catalog = catalog;
	return 0;
}
