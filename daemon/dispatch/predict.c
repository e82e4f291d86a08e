/* SPDX-License-Identifier: MIT */
#include "predict.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cjson/cJSON.h>
#include <dispatch/model.h>
#include <specs/backend.h>
#include <specs/catalog.h>

#define MAX_BYTES (4 << 20)
#define MAX_TREES 512
#define MAX_NODES 1024 /* of a tree */
#define MAX_KINDS 64

/* A leaf's children are itself, so that walks of several trees can go on until the last one has ended. */
struct node {
	float value; /* a leaf's; else the threshold */
	uint16_t feature;
	uint16_t child[2]; /* up to the threshold, above it; from the tree's root on */
};

/* Trees that are walked at a time. Each step waits for the one before, and nobody can guess where it goes: several
 * walks beside each other, without branches, take hardly longer than one. */
#define ABREAST 8

/* Features of a problem that are names, of which a model knows those that it was fitted to, and
 * numbers, of which it knows those between. The others may be anything: a tree's answer beyond what it
 * has seen is that of the nearest. */
static const enum predict_feature kinds[] = {PREDICT_family, PREDICT_element, PREDICT_mode};
static const enum predict_feature ranges[] = {PREDICT_hdim, PREDICT_group, PREDICT_page};
#define N_KINDS  (sizeof(kinds) / sizeof(kinds[0]))
#define N_RANGES (sizeof(ranges) / sizeof(ranges[0]))

struct predict_model {
	double base;
	double kinds[N_KINDS][MAX_KINDS]; /* NaN: no more */
	double ranges[N_RANGES][2];
	uint32_t n_trees;
	uint32_t roots[MAX_TREES + ABREAST];
	struct node *nodes; /* the last one: a tree without a say, for what is missing to ABREAST */
};

/* ---- features ---- */

const char *predict_feature_name(int feature)
{
	static const char *const names[] = {
#define PREDICT_NAME(name) #name,
		PREDICT_FEATURE_LIST(PREDICT_NAME)
#undef PREDICT_NAME
	};

	return names[feature];
}

static double log2_of(double value)
{
	return log2(value > 1 ? value : 1);
}

void predict_features(const struct select_stage *stage, const struct spec_catalog *catalog,
		      const struct candidate *candidate, double ret_features[PREDICT_FEATURES])
{
	const struct plan *plan = stage->plan;
	const struct fmha_problem *p = &plan->problem;
	const struct kernel_spec *spec = &candidate->spec;
	int pipeline = spec_pipeline_flags(catalog, spec->pipeline);
	bool packs = pipeline >= 0 && pipeline & SPEC_PACKS_HEADS && p->nhead_k > 0;
	bool splits = stage->family == ABI_FWD_SPLITKV && plan->n_splits > 0;
	double group = p->nhead_k > 0 ? (double)p->nhead_q / p->nhead_k : 1;
	double m0 = spec->tile.tile_m0 ? spec->tile.tile_m0 : 1;
	double n0 = spec->tile.tile_n0 ? spec->tile.tile_n0 : 1;
	double rows = (double)p->seqlen_q * (packs ? group : 1),
	       keys = splits ? plan->split_size : p->seqlen_k;
	double heads = (double)p->batch * (packs ? p->nhead_k : p->nhead_q);
	double units = stage->device->compute_units ? stage->device->compute_units : 1;
	double blocks = heads * (splits ? plan->n_splits : 1), pairs, rounds;
	double *f = ret_features;

	blocks *= stage->family == ABI_BWD_DQ_DK_DV ? ceil(keys / n0) : ceil(rows / m0);
	rounds = blocks / units;
	pairs = (double)p->seqlen_q * p->seqlen_k;
	f[PREDICT_flops] = log2_of(plan->flops);
	f[PREDICT_bytes] = log2_of((double)plan->bytes);
	f[PREDICT_cost] = log2_of(candidate->cost);
	f[PREDICT_queries] = log2_of(p->seqlen_q);
	f[PREDICT_rows] = log2_of(rows);
	f[PREDICT_keys] = log2_of(keys);
	f[PREDICT_heads] = log2_of(heads);
	f[PREDICT_group] = group;
	f[PREDICT_hdim] = p->hdim_q + p->hdim_v;
	f[PREDICT_m0] = m0;
	f[PREDICT_n0] = n0;
	f[PREDICT_k0] = spec->tile.tile_k0;
	f[PREDICT_waves] = spec->tile.wave_m0 * spec->tile.wave_n0 * spec->tile.wave_k0;
	f[PREDICT_per_unit] = spec->block_per_cu;
	f[PREDICT_pipeline] = pipeline;
	f[PREDICT_splits] = splits ? log2_of(plan->n_splits) : 0;
	f[PREDICT_rounds] = log2(rounds > 1e-3 ? rounds : 1e-3);
	f[PREDICT_last_round] = rounds > 0 ? ceil(rounds) / rounds : 1;
	f[PREDICT_visible] = pairs > 0 ? cost_visible_pairs(p->seqlen_q, p->seqlen_k, p) / pairs
				       : 1;
	f[PREDICT_page] = plan_paged(p) ? log2_of(p->page_size) : -1;
	f[PREDICT_mode] = p->mode == FMHA_GROUP;
	f[PREDICT_family] = stage->family;
	f[PREDICT_element] = fmha_dtype_bytes(stage->dtype);
	f[PREDICT_pads] = (spec->pad_s != 0) + (spec->pad_sk != 0) + (spec->pad_d != 0) +
			  (spec->pad_dv != 0);
	f[PREDICT_row_waste] = rows > 0 ? ceil(rows / m0) * m0 / rows : 1;
	f[PREDICT_key_waste] = keys > 0 ? ceil(keys / n0) * n0 / keys : 1;
	f[PREDICT_spills] = candidate->spills > PREDICT_FEW_SPILLS;
}

/* ---- evaluation ---- */

/* The leaves of ABREAST trees, added in order. */
static double add_trees(double sum, const struct predict_model *model, const uint32_t *roots,
			const double *features)
{
	const struct node *root[ABREAST];
	uint32_t at[ABREAST] = {0}, moved = 1;

	for (int i = 0; i < ABREAST; i++)
		root[i] = &model->nodes[roots[i]];
	while (moved) {
		moved = 0;
		for (int i = 0; i < ABREAST; i++) {
			const struct node *node = &root[i][at[i]];
			uint32_t next =
				node->child[!(features[node->feature] <= (double)node->value)];

			moved |= next ^ at[i];
			at[i] = next;
		}
	}
	for (int i = 0; i < ABREAST; i++)
		sum += (double)root[i][at[i]].value;
	return sum;
}

static bool knows_kind(const struct predict_model *model, size_t i, const double *features)
{
	for (size_t k = 0; k < MAX_KINDS; k++)
		if (model->kinds[i][k] == features[kinds[i]])
			return true;
	return false;
}

static bool knows_problem(const struct predict_model *model, const double *features)
{
	for (size_t i = 0; i < N_KINDS; i++)
		if (!knows_kind(model, i, features))
			return false;
	for (size_t i = 0; i < N_RANGES; i++)
		if (!(features[ranges[i]] >= model->ranges[i][0] &&
		      features[ranges[i]] <= model->ranges[i][1]))
			return false;
	return true;
}

double predict_us(const struct predict_model *model, const double features[PREDICT_FEATURES],
		  double cost)
{
	double sum = model->base;

	if (!knows_problem(model, features))
		return 0;
	for (uint32_t i = 0; i < model->n_trees; i += ABREAST)
		sum = add_trees(sum, model, &model->roots[i], features);
	return cost * exp2(sum);
}

/* ---- reading ---- */

struct predict_model *predict_model_free(struct predict_model *model)
{
	if (model)
		free(model->nodes);
	free(model);
	return NULL;
}

static int refuse(struct fmha_error *err, const char *field, const char *why)
{
	return fmha_error_set_field(err, FMHA_EINVAL, field, "model: %s: %s", field, why);
}

static int check_head(const cJSON *root, const char *arch, struct fmha_error *err)
{
	const cJSON *features = cJSON_GetObjectItemCaseSensitive(root, "features");
	const cJSON *version = cJSON_GetObjectItemCaseSensitive(root, "version");
	const char *format = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(root, "format"));
	const char *of = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(root, "arch"));

	if (!format || strcmp(format, "fmhad-model") != 0)
		return refuse(err, "format", "not a model");
	if (!cJSON_IsNumber(version) || version->valuedouble != 2)
		return refuse(err, "version", "not 2");
	if (!of || strcmp(of, arch) != 0)
		return refuse(err, "arch", "of another one");
	if (cJSON_GetArraySize(features) != PREDICT_FEATURES)
		return refuse(err, "features", "not those of this build");
	for (int i = 0; i < PREDICT_FEATURES; i++) {
		const char *name = cJSON_GetStringValue(cJSON_GetArrayItem(features, i));

		if (!name || strcmp(name, predict_feature_name(i)) != 0)
			return refuse(err, "features", "not those of this build");
	}
	return 0;
}

static int read_numbers(const cJSON *root, const char *of, enum predict_feature feature,
			size_t least, size_t most, double *ret, struct fmha_error *err)
{
	const char *name = predict_feature_name(feature);
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(
		cJSON_GetObjectItemCaseSensitive(root, of), name);
	size_t n = (size_t)cJSON_GetArraySize(list);

	if (n < least || n > most)
		return refuse(err, of, "a feature has none, or too many");
	for (size_t i = 0; i < n; i++) {
		const cJSON *item = cJSON_GetArrayItem(list, (int)i);

		if (!cJSON_IsNumber(item))
			return refuse(err, of, "not a number");
		ret[i] = item->valuedouble;
	}
	for (size_t i = n; i < most; i++)
		ret[i] = (double)NAN;
	return 0;
}

static int read_known(struct predict_model *model, const cJSON *root, struct fmha_error *err)
{
	int r = 0;

	for (size_t i = 0; i < N_KINDS && r == 0; i++)
		r = read_numbers(root, "kinds", kinds[i], 1, MAX_KINDS, model->kinds[i], err);
	for (size_t i = 0; i < N_RANGES && r == 0; i++)
		r = read_numbers(root, "ranges", ranges[i], 2, 2, model->ranges[i], err);
	return r;
}

/* One number of a node. Return: NaN: there is none. */
static double number_of(const cJSON *node, int i)
{
	const cJSON *item = cJSON_GetArrayItem(node, i);

	return cJSON_IsNumber(item) ? item->valuedouble : (double)NAN;
}

/* Children come later, so that every walk ends. */
static bool read_node(const cJSON *item, int i, int n, struct node *node)
{
	double feature = number_of(item, 0), threshold = number_of(item, 1);
	double left = number_of(item, 2), right = number_of(item, 3), value = number_of(item, 4);

	if (!(feature >= -1 && feature < PREDICT_FEATURES))
		return false;
	*node = (struct node){.value = (float)(feature < 0 ? value : threshold),
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

		if (n < 1 || n > MAX_NODES || model->n_trees == MAX_TREES)
			return refuse(err, "trees", "too many of them, or of their nodes");
		model->roots[model->n_trees++] = n_nodes;
		n_nodes += (uint32_t)n;
	}
	for (uint32_t i = 0; i < ABREAST; i++)
		model->roots[model->n_trees + i] = n_nodes;
	model->nodes = calloc(n_nodes + 1, sizeof(*model->nodes));
	if (!model->nodes)
		return fmha_error_set(err, FMHA_ENOMEM, "model: out of memory");
	cJSON_ArrayForEach(tree, trees)
	{
		int n = cJSON_GetArraySize(tree), i = 0;

		cJSON_ArrayForEach(item, tree)
		{
			if (!read_node(item, i++, n, &model->nodes[at++]))
				return refuse(err, "trees", "a node is not one");
		}
	}
	return 0;
}

int predict_model_parse(const char *json, size_t size, const char *arch,
			struct predict_model **ret_model, struct fmha_error *err)
{
	cJSON *root = cJSON_ParseWithLength(json, size);
	struct predict_model *model = calloc(1, sizeof(*model));
	const cJSON *base = cJSON_GetObjectItemCaseSensitive(root, "base");
	int r = model ? check_head(root, arch, err)
		      : fmha_error_set(err, FMHA_ENOMEM, "model: out of memory");

	if (r == 0 && !cJSON_IsNumber(base))
		r = refuse(err, "base", "not a number");
	if (r == 0)
		r = read_known(model, root, err);
	if (r == 0) {
		model->base = base->valuedouble;
		r = read_trees(model, cJSON_GetObjectItemCaseSensitive(root, "trees"), err);
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
