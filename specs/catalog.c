// SPDX-License-Identifier: MIT
/*
 * catalog.c: the archs and words of this build's own kernels, which are all that the daemon knows. What AMD's
 * rules add comes of files, and is loaded by ck/load.c.
 */
#include <stdlib.h>

#include <proto/error.h>
#include <tree/tree.h>

#include "catalog_impl.h"

int catalog_append_word(struct words *words, const char *word, struct fmha_error *err)
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
		r = catalog_append_word(&catalog->pipelines, backend->pipelines[i].name, err);
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

int catalog_add_backends(struct spec_catalog *catalog, const struct spec_backend *const *backends,
			 struct fmha_error *err)
{
	int r = 0;

	for (; r == 0 && backends && *backends; backends++)
		r = add_backend(catalog, *backends, err);
	sort_archs(catalog);
	return r;
}

int spec_catalog_own(const struct spec_backend *const *backends, struct spec_catalog **ret_catalog,
		     struct fmha_error *err)
{
	struct spec_catalog *catalog = calloc(1, sizeof(*catalog));
	int r;

	if (!catalog)
		return no_memory(err);
	r = catalog_append_word(&catalog->tile_tags, "", err); /* no tag */
	if (r == 0)
		r = catalog_add_backends(catalog, backends, err);
	if (r < 0) {
		spec_catalog_free(catalog);
		return r;
	}
	*ret_catalog = catalog;
	return 0;
}

const char *specs_find_dir(char path[PATH_MAX])
{
	const char *dir = getenv("FMHA_SPECS_DIR");

	return dir && *dir ? dir : tree_path(TREE_DATA, "specs", path, PATH_MAX);
}

static void words_deinit(struct words *words)
{
	for (int i = 0; i < words->n; i++)
		free(words->word[i]);
}

struct spec_catalog *spec_catalog_free(struct spec_catalog *catalog)
{
	if (!catalog)
		return NULL;
	if (catalog->foreign)
		catalog->foreign->release(catalog);
	words_deinit(&catalog->pipelines);
	words_deinit(&catalog->tile_tags);
	words_deinit(&catalog->properties);
	free(catalog);
	return NULL;
}
