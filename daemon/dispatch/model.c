/* SPDX-License-Identifier: MIT */
/* model.c: see dispatch/model.h. */
#include <dispatch/model.h>

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <json/json.h>
#include <specs/catalog.h>

#include "predict.h"

#define MAX_BYTES (4 << 20)
#define LEAST     (PREDICT_FEATURES - N_OWN_TRAITS) /* features of any model */

const char *predict_feature_name(int feature)
{
	static const char *const names[] = {
#define PREDICT_NAME(name) #name,
// NOLINTNEXTLINE(bugprone-suspicious-missing-comma): one word of two
#define PREDICT_TRAIT(name, NAME, word, kind, families, asked) "trait_" #name,
		PREDICT_FEATURE_LIST(PREDICT_NAME) FMHA_OWN_TRAITS(PREDICT_TRAIT)
#undef PREDICT_NAME
#undef PREDICT_TRAIT
	};

	return names[feature];
}

struct predict_model *predict_model_free(struct predict_model *model)
{
	if (model)
		free(model->nodes);
	free(model);
	return NULL;
}

static int model_refuse(struct fmha_error *err, const char *field, const char *why)
{
	return fmha_error_set_field(err, FMHA_EINVAL, field, "model: %s: %s", field, why);
}

static int check_head(const cJSON *root, const char *arch, int *ret_features,
		      struct fmha_error *err)
{
	const cJSON *features = json_member(root, "features");
	const cJSON *version = json_member(root, "version");

	if (strcmp(json_text(root, "format"), "fmhad-model") != 0)
		return model_refuse(err, "format", "not a model");
	if (!cJSON_IsNumber(version) || version->valuedouble != 2)
		return model_refuse(err, "version", "not 2");
	if (strcmp(json_text(root, "arch"), arch) != 0)
		return model_refuse(err, "arch", "of another one");
	*ret_features = cJSON_GetArraySize(features);
	if (*ret_features < LEAST || *ret_features > PREDICT_FEATURES)
		return model_refuse(err, "features", "not those of this build");
	for (int i = 0; i < *ret_features; i++) {
		const char *name = cJSON_GetStringValue(cJSON_GetArrayItem(features, i));

		if (!name || strcmp(name, predict_feature_name(i)) != 0)
			return model_refuse(err, "features", "not those of this build");
	}
	return 0;
}

static int read_numbers(const cJSON *root, const char *of, enum predict_feature feature,
			size_t least, size_t most, double *ret, struct fmha_error *err)
{
	const char *name = predict_feature_name(feature);
	const cJSON *list = json_member(json_member(root, of), name);
	size_t n = (size_t)cJSON_GetArraySize(list);

	if (n < least || n > most)
		return model_refuse(err, of, "a feature has none, or too many");
	for (size_t i = 0; i < n; i++) {
		const cJSON *item = cJSON_GetArrayItem(list, (int)i);

		if (!cJSON_IsNumber(item))
			return model_refuse(err, of, "not a number");
		ret[i] = item->valuedouble;
	}
	for (size_t i = n; i < most; i++)
		ret[i] = (double)NAN;
	return 0;
}

static int read_known(struct predict_model *model, const cJSON *root, struct fmha_error *err)
{
	int r = 0;

	for (size_t i = 0; i < MODEL_N_KINDS && r == 0; i++)
		r = read_numbers(root, "kinds", model_kinds[i], 1, MODEL_KINDS, model->kinds[i],
				 err);
	for (size_t i = 0; i < MODEL_N_RANGES && r == 0; i++)
		r = read_numbers(root, "ranges", model_ranges[i], 2, 2, model->ranges[i], err);
	return r;
}

/* One number of a node. Return: NaN: there is none. */
static double number_of(const cJSON *node, int i)
{
	const cJSON *item = cJSON_GetArrayItem(node, i);

	return cJSON_IsNumber(item) ? item->valuedouble : (double)NAN;
}

/* Children come later, so that every walk ends. */
static bool read_node(const cJSON *item, int i, int n, int n_features, struct model_node *node)
{
	double feature = number_of(item, 0), threshold = number_of(item, 1);
	double left = number_of(item, 2), right = number_of(item, 3), value = number_of(item, 4);

	if (!(feature >= -1 && feature < n_features))
		return false;
	*node = (struct model_node){.value = (float)(feature < 0 ? value : threshold),
				    .child = {(uint16_t)i, (uint16_t)i}};
	if (!isfinite(node->value))
		return false;
	if (feature < 0)
		return true;
	if (!(left > i && left < n && right > i && right < n))
		return false;
	node->feature = (uint16_t)feature;
	node->child[0] = (uint16_t)left;
	node->child[1] = (uint16_t)right;
	return true;
}

static int read_trees(struct predict_model *model, const cJSON *trees, struct fmha_error *err)
{
	const cJSON *tree, *item;
	uint32_t n_nodes = 0, at = 0;

	cJSON_ArrayForEach(tree, trees)
	{
		int n = cJSON_GetArraySize(tree);

		if (n < 1 || n > MODEL_NODES || model->n_trees == MODEL_TREES)
			return model_refuse(err, "trees", "too many of them, or of their nodes");
		model->roots[model->n_trees++] = n_nodes;
		n_nodes += (uint32_t)n;
	}
	for (uint32_t i = 0; i < MODEL_ABREAST; i++)
		model->roots[model->n_trees + i] = n_nodes;
	model->nodes = calloc(n_nodes + 1, sizeof(*model->nodes));
	if (!model->nodes)
		return fmha_error_set(err, FMHA_ENOMEM, "model: out of memory");
	cJSON_ArrayForEach(tree, trees)
	{
		int n = cJSON_GetArraySize(tree), i = 0;

		cJSON_ArrayForEach(item, tree)
		{
			if (!read_node(item, i++, n, model->n_features, &model->nodes[at++]))
				return model_refuse(err, "trees", "a node is not one");
		}
	}
	return 0;
}

int predict_model_parse(const char *json, size_t size, const char *arch,
			struct predict_model **ret_model, struct fmha_error *err)
{
	cJSON *root = cJSON_ParseWithLength(json, size);
	struct predict_model *model = calloc(1, sizeof(*model));
	const cJSON *base = json_member(root, "base");
	int r = model ? check_head(root, arch, &model->n_features, err)
		      : fmha_error_set(err, FMHA_ENOMEM, "model: out of memory");

	if (r == 0 && !cJSON_IsNumber(base))
		r = model_refuse(err, "base", "not a number");
	if (r == 0)
		r = read_known(model, root, err);
	if (r == 0) {
		model->base = base->valuedouble;
		r = read_trees(model, json_member(root, "trees"), err);
	}
	cJSON_Delete(root);
	if (r < 0) {
		predict_model_free(model);
		return r;
	}
	*ret_model = model;
	return 0;
}

/* Given; NULL: there is none that can be read. */
static char *read_text(const char *path, size_t *ret_size)
{
	FILE *file = fopen(path, "re");
	char *text = NULL;
	struct stat st;

	if (file && fstat(fileno(file), &st) == 0 && S_ISREG(st.st_mode) && st.st_size <= MAX_BYTES)
		text = malloc((size_t)st.st_size + 1);
	if (text)
		*ret_size = fread(text, 1, (size_t)st.st_size, file);
	if (file)
		(void)fclose(file);
	return text;
}

int predict_model_load(const char *arch, struct predict_model **ret_model, struct fmha_error *err)
{
	char folder[PATH_MAX], path[PATH_MAX + 64], *text;
	size_t size = 0;
	int r;

	(void)snprintf(path, sizeof(path), "%s/models/%.32s.json", specs_find_dir(folder), arch);
	text = read_text(path, &size);
	if (!text)
		return 1;
	r = predict_model_parse(text, size, arch, ret_model, err);
	free(text);
	return r;
}
