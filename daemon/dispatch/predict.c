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

#include "internal.h"

/* ---- cost ---- */

/*
 * What a problem costs at least. Multiplies and adds are counted apart; (row, column) pairs
 * that the mask hides are left out.
 *
 *   forward   2 (hdim_q + hdim_v) a visible pair and query head      S = Q K^T, O = P V
 *   backward  2 (3 hdim_q + 2 hdim_v)                                S, dP, dV, dQ, dK
 *   merge     3 hdim_v a part, row and head                          weight, multiply, add
 *   append    3 a rotated element                                    two products and a sum
 *
 * Worked: batch 2, 16 heads, 1024 x 1024, hdim 128: 2^20 pairs a head, 32 heads:
 *   forward 2^25 * 512 = 17,179,869,184; causal 524,800 of the 1,048,576 pairs: 8,598,323,200;
 *   backward 2^25 * 1280 = 42,949,672,960, 2.5 times forward.
 * Group mode knows only totals when a plan is made: it counts sequences of the mean length.
 */

/* Visible columns of row @i, a piecewise linear function of i. */
static double visible_columns(const struct fmha_problem *p, int64_t seqlen_k, int64_t anchor,
			      int64_t i)
{
	int64_t low = p->window_left < 0 ? 0 : anchor + i - p->window_left;
	int64_t high = p->window_right < 0 ? seqlen_k - 1 : anchor + i + p->window_right;
	int64_t sinks;

	if (low < 0)
		low = 0;
	if (high > seqlen_k - 1)
		high = seqlen_k - 1;
	/* Sink columns that lie left of the window, but not right of the band. */
	sinks = p->sink_tokens < low ? p->sink_tokens : low;
	if (sinks > high + 1)
		sinks = high + 1;
	return (high >= low ? (double)(high - low + 1) : 0.0) + (sinks > 0 ? (double)sinks : 0.0);
}

static int compare_i64(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

/*
 * The sum over all rows without visiting them: the function bends only where the band's edges cross
 * the borders 0, seqlen_k and sink_tokens, so between two bends the rows form an arithmetic series.
 */
double cost_visible_pairs(int64_t seqlen_q, int64_t seqlen_k, const struct fmha_problem *problem)
{
	int64_t anchor = problem->mask == FMHA_MASK_BOTTOM_RIGHT ? seqlen_k - seqlen_q : 0;
	int64_t borders[3] = {0, seqlen_k, problem->sink_tokens};
	int64_t edges[2] = {-(int64_t)problem->window_left, problem->window_right};
	int64_t bends[2 + 3 * 2 * 5];
	size_t n = 0;
	double sum = 0;

	if (seqlen_q <= 0 || seqlen_k <= 0)
		return 0;
	if (problem->mask == FMHA_MASK_NONE)
		return (double)seqlen_q * (double)seqlen_k;
	bends[n++] = 0;
	bends[n++] = seqlen_q;
	for (int e = 0; e < 2; e++)
		for (int b = 0; b < 3; b++)
			/* Two rows around each crossing, so that off-by-one bends are included. */
			for (int64_t d = -2; d <= 2; d++) {
				int64_t row = borders[b] - anchor - edges[e] + d;

				if (row > 0 && row < seqlen_q)
					bends[n++] = row;
			}
	qsort(bends, n, sizeof(bends[0]), compare_i64);
	for (size_t i = 0; i + 1 < n; i++) {
		int64_t first = bends[i], last = bends[i + 1] - 1;

		if (last < first)
			continue;
		sum += (visible_columns(problem, seqlen_k, anchor, first) +
			visible_columns(problem, seqlen_k, anchor, last)) *
		       (double)(last - first + 1) / 2;
	}
	return sum;
}

static double rows_of(const struct fmha_problem *p)
{
	struct problem_axes axes;

	problem_axes(p, &axes);
	return (double)axes.q.outer * (double)axes.q.length;
}

static double pairs_of(const struct fmha_problem *p)
{
	int64_t q = p->seqlen_q, k = p->seqlen_k, batch = p->batch;

	if (batch == 0)
		return 0;
	if (p->topk > 0)
		return rows_of(p) * p->topk;
	if (p->mode == FMHA_GROUP) {
		q = ceil_div(p->total_q, batch);
		if (plan_present(p, FMHA_T_SEQSTART_K))
			k = ceil_div(p->total_k, batch);
	}
	return (double)batch * cost_visible_pairs(q, k, p);
}

static double append_flops(const struct fmha_problem *p, bool rotates_q)
{
	double rows = (double)p->batch * p->seqlen_new * p->nhead_k;

	if (p->rope == FMHA_ROPE_NONE)
		return 0;
	if (rotates_q)
		rows += rows_of(p) * p->nhead_q;
	return 3.0 * rows * p->rotary_dim;
}

double cost_flops(const struct fmha_problem *problem)
{
	const struct fmha_problem *p = problem;
	double heads = p->nhead_q;

	switch (p->op) {
	case FMHA_FORWARD:
		return pairs_of(p) * heads * 2.0 * (p->hdim_q + p->hdim_v) + append_flops(p, true);
	case FMHA_BACKWARD:
		return pairs_of(p) * heads * 2.0 * (3.0 * p->hdim_q + 2.0 * p->hdim_v);
	case FMHA_APPEND_KV:
		return append_flops(p, plan_present(p, FMHA_T_Q_ROTATED));
	case FMHA_MERGE_STATES:
		return 3.0 * p->n_parts * rows_of(p) * heads * p->hdim_v;
	default:
		return 0;
	}
}

/* Elements of a view that are read or written at least once, broadcast axes counted once. */
static double elements_of(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	double elements = 1;
	int64_t dims[5];

	problem_extents(p, role, dims);
	for (int i = 0; i < proto_roles[role].n_dims; i++)
		if (dims[i] == 0 || p->tensor[role].stride[i] != 0 || dims[i] == 1)
			elements *= (double)dims[i];
	return elements;
}

static int key_elements(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	if (role == FMHA_T_V)
		return p->hdim_v;
	return p->kv_layout == FMHA_KV_LATENT_FP8 ? FMHA_LATENT_BYTES : p->hdim_q;
}

uint64_t cost_bytes(const struct fmha_problem *problem)
{
	const struct fmha_problem *p = problem;
	double total = 0;

	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		enum fmha_tensor_role role = (enum fmha_tensor_role)i;
		double elements;

		if (role == FMHA_T_WORKSPACE || !plan_present(p, role))
			continue;
		elements = elements_of(p, role);
		if ((role == FMHA_T_K || role == FMHA_T_V) &&
		    (plan_paged(p) || plan_present(p, FMHA_T_CACHE_BATCH_IDX))) {
			/* A cache may be larger than what the sequences use of it. */
			double used = (double)p->batch * cost_keys(p) * p->nhead_k *
				      key_elements(p, role);

			if (used < elements)
				elements = used;
		}
		if ((role == FMHA_T_K || role == FMHA_T_V) && p->op == FMHA_APPEND_KV)
			elements = (double)p->batch * p->seqlen_new * p->nhead_k *
				   key_elements(p, role);
		total += elements * fmha_dtype_bytes(p->tensor[role].dtype);
	}
	return total < 0x1p63 ? (uint64_t)total : UINT64_MAX;
}

/*
 * Forward on a CPU: rows, each over all keys of a split, that the busiest of @units threads works
 * for. A task has up to @m0 rows, and computes no others; one of few rows takes as long as one of
 * LEAST_ROWS. Tasks of equal length come in waves; of unequal ones a thread does its share, and
 * the last of them ends about half a task later. Twice as many tasks are 1 % slower. Kernels that
 * pack touch K and V once more, which takes as long as PACKING_ROWS; those that do not multiply
 * row by row, which takes UNPACKED times as long, in tasks of few keys.
 *
 * Worked, two threads, 8 heads, times 1.01 and 1.02: 128 rows are 512 + 24 in tasks of 96 and 512 +
 * 12 of 48; 64 rows are 256 and 268; 192 are 768 either way. Zen 5, float32, hdim 64, 1024 keys: 48
 * took 0.94, 1.08 and 0.99 of the time of 96; packing 17 rows within the caches, 45 beyond; one
 * row 11; and without packing one row 13, 16 rows (bf16, hdim 128) 46.
 */
#define LEAST_ROWS    12
#define READING_ROWS  4
#define FEWEST_SHARED 5
#define PACKING_ROWS  32
#define UNPACKED      2

/*
 * Likewise where all heads of a key head share a task's keys, which become floats once for each and are cut
 * into as many chunks as there are threads for: READING_ROWS. Zen 1, bf16, 576 and 512, 2,048 keys: 8, 16, 32
 * and 128 heads took as long as 13, 17, 34 and 128 of the 128's rows; packing, 26, 32, 47 and 137; row by row,
 * 14 and 27, but 3, 4 and 8 of 1, 2 and 4 heads, where sharing took 10: FEWEST_SHARED.
 */
double cost_cpu_shared_rows(const struct fmha_problem *problem, int64_t m0, int64_t n_splits,
			    int64_t units)
{
	const struct fmha_problem *p = problem;
	int64_t group = p->nhead_q / p->nhead_k, alike = p->topk > 0 ? 1 : p->seqlen_q;
	int64_t rows = group * alike, task = rows < m0 ? rows : m0;
	int64_t tasks = ceil_div(rows, m0) * (p->seqlen_q / (alike > 0 ? alike : 1)) * p->batch *
			p->nhead_k * n_splits;

	task = rows < FEWEST_SHARED ? 3 * LEAST_ROWS : task < LEAST_ROWS ? LEAST_ROWS : task;
	return (double)(tasks * (task + READING_ROWS)) / (double)units;
}

double cost_cpu_rows(const struct fmha_problem *problem, int64_t m0, int64_t n_splits,
		     int64_t units, bool packs)
{
	const struct fmha_problem *p = problem;
	int64_t rows = p->seqlen_q, heads_k = (int64_t)p->batch * p->nhead_k * n_splits;
	int64_t heads = (int64_t)p->batch * p->nhead_q * n_splits, task, tasks;
	double share, span;

	if (2 * rows <= m0 && heads_k > 0) { /* query heads share a task */
		rows *= heads / heads_k;
		heads = heads_k;
	}
	task = rows < m0 ? rows : m0;
	task = task < LEAST_ROWS ? LEAST_ROWS : task;
	tasks = ceil_div(rows, m0) * heads;
	if (!packs)
		return UNPACKED * (double)(tasks * task) / (double)units;
	share = (double)(rows * heads) / (double)units;
	span = share + (double)(task * (units - 1)) / (double)(2 * units);
	if (rows <= m0 || rows % m0 == 0)
		span = (double)(ceil_div(tasks, units) * task);
	else if (span < (double)task)
		span = (double)task;
	return (span + PACKING_ROWS * (double)heads_k / (double)units) * (1 + 1 / (double)m0);
}

#define MAX_BYTES (4 << 20)
#define MAX_TREES 512
#define MAX_NODES 1024 /* of a tree */
#define MAX_KINDS 64
#define LEAST     (PREDICT_FEATURES - N_OWN_TRAITS) /* features of any model */

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
	int n_features;                   /* traits that came after it are not among them */
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
// NOLINTNEXTLINE(bugprone-suspicious-missing-comma): one word of two
#define PREDICT_TRAIT(name, NAME, word, kind, families, asked) "trait_" #name,
		PREDICT_FEATURE_LIST(PREDICT_NAME) FMHA_OWN_TRAITS(PREDICT_TRAIT)
#undef PREDICT_NAME
#undef PREDICT_TRAIT
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
#define TRAIT(name, NAME, word, kind, families, asked) f[PREDICT_trait_##name] = stage->traits.name;
	FMHA_OWN_TRAITS(TRAIT)
#undef TRAIT
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
	for (int i = model->n_features; i < PREDICT_FEATURES; i++)
		if (features[i] != 0)
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

static int model_refuse(struct fmha_error *err, const char *field, const char *why)
{
	return fmha_error_set_field(err, FMHA_EINVAL, field, "model: %s: %s", field, why);
}

static int check_head(const cJSON *root, const char *arch, int *ret_features,
		      struct fmha_error *err)
{
	const cJSON *features = cJSON_GetObjectItemCaseSensitive(root, "features");
	const cJSON *version = cJSON_GetObjectItemCaseSensitive(root, "version");
	const char *format = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(root, "format"));
	const char *of = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(root, "arch"));

	if (!format || strcmp(format, "fmhad-model") != 0)
		return model_refuse(err, "format", "not a model");
	if (!cJSON_IsNumber(version) || version->valuedouble != 2)
		return model_refuse(err, "version", "not 2");
	if (!of || strcmp(of, arch) != 0)
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
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(
		cJSON_GetObjectItemCaseSensitive(root, of), name);
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
static bool read_node(const cJSON *item, int i, int n, int n_features, struct node *node)
{
	double feature = number_of(item, 0), threshold = number_of(item, 1);
	double left = number_of(item, 2), right = number_of(item, 3), value = number_of(item, 4);

	if (!(feature >= -1 && feature < n_features))
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
			return model_refuse(err, "trees", "too many of them, or of their nodes");
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
	const cJSON *base = cJSON_GetObjectItemCaseSensitive(root, "base");
	int r = model ? check_head(root, arch, &model->n_features, err)
		      : fmha_error_set(err, FMHA_ENOMEM, "model: out of memory");

	if (r == 0 && !cJSON_IsNumber(base))
		r = model_refuse(err, "base", "not a number");
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
