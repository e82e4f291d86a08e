/* SPDX-License-Identifier: MIT */
#include "verify_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kernels/reference.h>
#include <proto/problem.h>

#include "random.h"
#include "recipe.h"

/* The reference computes this many multiply-adds in a few milliseconds. */
#define MAX_WORK 3e6
/* What VERIFY_LONG has: up to so many rows and keys, and so much more work. */
#define LONGEST   1100
#define MORE_WORK 100

const char *const verify_feature_names[VERIFY_N_FEATURES] = {
#define VERIFY_FEATURE_NAME(NAME, name) [VERIFY_##NAME] = (name),
	VERIFY_FEATURES(VERIFY_FEATURE_NAME)
#undef VERIFY_FEATURE_NAME
};

static uint8_t marker[1];

static uint64_t next_random(struct verify_case *c)
{
	return random_next(&c->random);
}

/* [least, most] */
static int32_t between(struct verify_case *c, int32_t least, int32_t most)
{
	return least + (int32_t)(next_random(c) % (uint64_t)(most - least + 1));
}

static bool chance(struct verify_case *c, int percent)
{
	return between(c, 1, 100) <= percent;
}

static double uniform(struct verify_case *c)
{
	return random_uniform(&c->random);
}

static double normal(struct verify_case *c)
{
	return random_normal(&c->random);
}

/* Short lengths as often as long ones: their logarithm is uniform. */
static int32_t length(struct verify_case *c, int32_t most)
{
	return (int32_t)exp(uniform(c) * log((double)most + 0.999));
}

/* Draws a feature in @percent of the cases that may have it, and always the same amount of random
 * numbers, so that leaving a feature out changes nothing else. */
static bool draw(struct verify_case *c, uint32_t allowed, enum verify_feature feature, int percent)
{
	bool drawn = chance(c, percent) && (allowed & (1u << feature));

	if (drawn)
		c->features |= 1u << feature;
	return drawn;
}

static bool has(const struct verify_case *c, enum verify_feature feature)
{
	return (c->features & (1u << feature)) != 0;
}

static void case_drop(struct verify_case *c, enum verify_feature feature)
{
	c->features &= ~(1u << feature);
}

/* ---- which problem ---- */

static void draw_operation(struct verify_case *c, uint32_t allowed)
{
	int which = between(c, 1, 100);
	bool is_long = allowed & VERIFY_LONG;

	c->problem.op = FMHA_FORWARD;
	if (which <= (is_long ? 60 : 25) && allowed & (1u << VERIFY_BACKWARD)) {
		c->problem.op = FMHA_BACKWARD;
		c->features |= 1u << VERIFY_BACKWARD;
	} else if (is_long) {
		return;
	} else if (which > 25 && which <= 35 && allowed & (1u << VERIFY_APPEND)) {
		c->problem.op = FMHA_APPEND_KV;
		c->features |= 1u << VERIFY_APPEND;
	} else if (which > 35 && which <= 42 && allowed & (1u << VERIFY_MERGE)) {
		c->problem.op = FMHA_MERGE_STATES;
		c->features |= 1u << VERIFY_MERGE;
	}
}

static uint32_t draw_type(struct verify_case *c, uint32_t allowed)
{
	static const struct {
		enum verify_feature feature;
		uint32_t dtype;
	} types[] = {{VERIFY_F32, FMHA_F32},
		     {VERIFY_F16, FMHA_F16},
		     {VERIFY_BF16, FMHA_BF16},
		     {VERIFY_FP8, FMHA_E4M3}};
	int start = between(c, 0, 10); /* fp8 is rarer */
	int n = start == 10 ? 3 : start % 3;

	/* fp8 is a forward affair. */
	if (n == 3 && c->problem.op != FMHA_FORWARD)
		n = 2;
	for (int i = 0; i < 4; i++, n = (n + 1) % 4) {
		if ((allowed & (1u << types[n].feature)) &&
		    (types[n].dtype != FMHA_E4M3 || c->problem.op == FMHA_FORWARD)) {
			c->features |= 1u << types[n].feature;
			return types[n].dtype == FMHA_E4M3 && chance(c, 30) ? FMHA_E5M2
									    : types[n].dtype;
		}
	}
	return FMHA_F32;
}

/* A cache of 8 bits under a q of @type, or @type itself. */
static uint32_t draw_kv_type(struct verify_case *c, uint32_t allowed, uint32_t type)
{
	bool fits = (c->problem.op == FMHA_FORWARD || c->problem.op == FMHA_APPEND_KV) &&
		    (type == FMHA_F16 || type == FMHA_BF16);
	int which = between(c, 1, 100);

	if (!draw(c, fits ? allowed : 0, VERIFY_NARROW, 25))
		return type;
	return which <= 25 ? FMHA_E5M2 : which <= 60 ? FMHA_I8 : FMHA_E4M3;
}

static void draw_features(struct verify_case *c, uint32_t allowed)
{
	bool forward = c->problem.op == FMHA_FORWARD, backward = c->problem.op == FMHA_BACKWARD;
	bool append = c->problem.op == FMHA_APPEND_KV;
	static const struct {
		enum verify_feature feature;
		int percent;
	} odds[] = {{VERIFY_MASK, 60},      {VERIFY_WINDOW, 40},  {VERIFY_LSE, 50},
		    {VERIFY_BIAS, 20},      {VERIFY_ALIBI, 20},   {VERIFY_SINK, 15},
		    {VERIFY_SOFTCAP, 15},   {VERIFY_DROPOUT, 20}, {VERIFY_SCALE, 20},
		    {VERIFY_GROUP, 25},     {VERIFY_LENGTHS, 20}, {VERIFY_PAGED, 20},
		    {VERIFY_SPLIT, 15},     {VERIFY_STRIDES, 40}, {VERIFY_ROPE, 50},
		    {VERIFY_INTERVALS, 12}, {VERIFY_BITS, 8},     {VERIFY_SLOTS, 40},
		    {VERIFY_LATENT, 12},    {VERIFY_CHOSEN, 10}};

	/* Of these indices say nothing, or all. */
	static const enum verify_feature all[] = {VERIFY_MASK,      VERIFY_WINDOW, VERIFY_BIAS,
						  VERIFY_ALIBI,     VERIFY_SPLIT,  VERIFY_DROPOUT,
						  VERIFY_INTERVALS, VERIFY_BITS};

	for (size_t i = 0; i < sizeof(odds) / sizeof(odds[0]); i++)
		(void)draw(c, allowed, odds[i].feature, odds[i].percent);
	if (allowed & VERIFY_LONG)
		(void)draw(c, allowed, VERIFY_GROUP, 50);
	if (!has(c, VERIFY_MASK))
		case_drop(c, VERIFY_WINDOW);
	if (has(c, VERIFY_BIAS))
		case_drop(c, VERIFY_ALIBI);
	if (!forward && !backward) {
		static const enum verify_feature attention[] = {
			VERIFY_BIAS,    VERIFY_ALIBI,  VERIFY_SINK,      VERIFY_SOFTCAP,
			VERIFY_DROPOUT, VERIFY_SCALE,  VERIFY_GROUP,     VERIFY_LENGTHS,
			VERIFY_MASK,    VERIFY_WINDOW, VERIFY_INTERVALS, VERIFY_BITS};

		for (size_t i = 0; i < sizeof(attention) / sizeof(attention[0]); i++)
			case_drop(c, attention[i]);
	}
	if (!forward && !backward)
		case_drop(c, VERIFY_SPLIT);
	if (!forward && !append)
		case_drop(c, VERIFY_PAGED);
	if (!append) {
		case_drop(c, VERIFY_ROPE);
		case_drop(c, VERIFY_SLOTS);
	}
	if (has(c, VERIFY_SLOTS))
		case_drop(c, VERIFY_PAGED);
	if (has(c, VERIFY_PAGED))
		case_drop(c, VERIFY_LENGTHS); /* a paged cache has them anyway */
	if (has(c, VERIFY_SPLIT))
		case_drop(c, VERIFY_DROPOUT);
	if (has(c, VERIFY_INTERVALS))
		case_drop(c, VERIFY_BITS);
	if (!forward && !append)
		case_drop(c, VERIFY_LATENT);
	if (has(c, VERIFY_LATENT))
		case_drop(c, VERIFY_ROPE);
	if (!forward)
		case_drop(c, VERIFY_CHOSEN);
	for (size_t i = 0; has(c, VERIFY_CHOSEN) && i < sizeof(all) / sizeof(all[0]); i++)
		case_drop(c, all[i]);
}

/* Elements of latents: DeepSeek's, or any of which some are values. */
static void draw_latent(struct verify_case *c, uint32_t type)
{
	struct fmha_problem *p = &c->problem;

	p->v_in_k = 1;
	if (p->hdim_v > p->hdim_q)
		p->hdim_v = p->hdim_q;
	if (!chance(c, 50))
		return;
	p->nhead_q /= p->nhead_k;
	p->nhead_k = 1;
	p->hdim_q = 576;
	p->hdim_v = 512;
	p->seqlen_q = p->seqlen_q < 8 ? p->seqlen_q : 8;
	if (p->op == FMHA_FORWARD && p->seqlen_k > 100)
		p->seqlen_k = 100;
	if ((type == FMHA_F16 || type == FMHA_BF16) && chance(c, 60)) {
		p->kv_layout = FMHA_KV_LATENT_FP8;
		case_drop(c, VERIFY_DROPOUT);
		case_drop(c, VERIFY_INTERVALS);
		case_drop(c, VERIFY_BITS);
		case_drop(c, VERIFY_NARROW);
	}
}

/* Lengths of several tiles; what is too much work has fewer heads. */
static void draw_long_sizes(struct verify_case *c)
{
	struct fmha_problem *p = &c->problem;

	p->batch = between(c, 2, VERIFY_MAX_BATCH);
	p->seqlen_q = between(c, 65, LONGEST);
	p->seqlen_k = chance(c, 50) ? p->seqlen_q : between(c, 65, LONGEST);
}

static void draw_sizes(struct verify_case *c, uint32_t allowed)
{
	bool is_long = allowed & VERIFY_LONG;
	static const int32_t ratios[] = {1, 1, 2, 4, 8};
	struct fmha_problem *p = &c->problem;
	int32_t most_hdim = chance(c, 20) ? 256 : 128;
	int32_t longest = chance(c, 15) ? 700 : 150;

	p->batch = between(c, 1, VERIFY_MAX_BATCH);
	p->nhead_k = between(c, 1, 3);
	p->nhead_q = p->nhead_k * ratios[between(c, 0, 4)];
	p->hdim_q = 8 * between(c, 1, most_hdim / 8);
	p->hdim_v = chance(c, 60) ? p->hdim_q : 8 * between(c, 1, most_hdim / 8);
	p->seqlen_q = length(c, longest);
	p->seqlen_k = chance(c, 40) ? p->seqlen_q : length(c, longest);
	if (chance(c, 25)) { /* rows that end anywhere */
		p->hdim_q = between(c, 1, most_hdim);
		p->hdim_v = chance(c, 60) ? p->hdim_q : between(c, 1, most_hdim);
	} else if (has(c, VERIFY_FP8)) /* a vectorized or fp8 kernel wants whole 16-byte groups */
		p->hdim_q = p->hdim_v = 16 * between(c, 1, 8);
	if (draw(c, p->op == FMHA_MERGE_STATES ? 0 : allowed, VERIFY_WIDE, 7))
		p->hdim_q = 8 * between(c, 33, 64), p->hdim_v = p->hdim_q - between(c, 0, 40);
	if (is_long)
		draw_long_sizes(c);
	while ((double)p->batch * p->nhead_q * p->seqlen_q * p->seqlen_k * (p->hdim_q + p->hdim_v) >
	       MAX_WORK * 4 * (is_long ? MORE_WORK : 1)) {
		if (is_long && p->nhead_k > 1)
			p->nhead_q /= p->nhead_k, p->nhead_k = 1;
		else if (p->seqlen_q > p->seqlen_k)
			p->seqlen_q = p->seqlen_q / 2 + 1;
		else if (p->seqlen_k > 16)
			p->seqlen_k = p->seqlen_k / 2 + 1;
		else if (p->batch > 1)
			p->batch--;
		else
			break;
	}
}

/* ---- options and tensors ---- */

static void want(struct verify_case *c, uint32_t role, uint32_t dtype)
{
	c->problem.tensor[role].data = marker;
	c->problem.tensor[role].dtype = dtype;
}

/* Room for the role's index list, zeros. NULL when out of memory. */
static int32_t *want_indices(struct verify_case *c, uint32_t role, int64_t n)
{
	want(c, role, FMHA_I32);
	c->indices[role] = calloc((size_t)(n > 0 ? n : 1), sizeof(int32_t));
	c->n_indices[role] = n;
	return c->indices[role];
}

static void choose_options(struct verify_case *c)
{
	struct fmha_problem *p = &c->problem;

	if (has(c, VERIFY_MASK)) {
		p->mask = chance(c, 50) ? FMHA_MASK_TOP_LEFT : FMHA_MASK_BOTTOM_RIGHT;
		p->window_right = 0;
		if (has(c, VERIFY_WINDOW)) {
			p->window_left = between(c, -1, p->seqlen_k);
			p->window_right = between(c, -1, p->seqlen_k / 2);
			if (chance(c, 25) && p->op == FMHA_FORWARD)
				p->sink_tokens = between(c, 1, 8);
		}
	}
	if (has(c, VERIFY_SOFTCAP)) {
		p->logits_soft_cap = (float)(0.5 + 20 * uniform(c));
		p->softcap_approx = p->op == FMHA_FORWARD && chance(c, 30);
	}
	if (has(c, VERIFY_SCALE))
		p->scale = (float)(uniform(c) * 0.5);
	if (has(c, VERIFY_DROPOUT)) {
		p->dropout_p = (float)(0.05 + 0.6 * uniform(c));
		p->dropout_seed = next_random(c);
		p->dropout_offset = next_random(c) >> 8;
		if (chance(c, 30)) {
			p->dropout_row = 16 * between(c, 0, 5000);
			p->dropout_column = 32 * between(c, 0, 5000);
		}
	}
	if (has(c, VERIFY_SPLIT)) {
		if (chance(c, 50) || p->op == FMHA_BACKWARD)
			p->n_splits = between(c, 2, 6);
		else
			p->split_size = 16 * between(c, 1, 8);
	}
	if (p->op == FMHA_BACKWARD)
		p->deterministic = chance(c, 50);
}

/* Lengths of packed sequences, 0 among them; the physical room may be larger. */
static int choose_group(struct verify_case *c)
{
	struct fmha_problem *p = &c->problem;
	bool pack_k = p->page_size == 0, padded = has(c, VERIFY_LENGTHS);
	int32_t *starts_q, *starts_k = NULL, *lengths_q = NULL, *lengths_k = NULL;

	p->mode = FMHA_GROUP;
	starts_q = want_indices(c, FMHA_T_SEQSTART_Q, p->batch + 1);
	if (pack_k)
		starts_k = want_indices(c, FMHA_T_SEQSTART_K, p->batch + 1);
	if (padded) {
		lengths_q = want_indices(c, FMHA_T_SEQLEN_Q, p->batch);
		if (pack_k)
			lengths_k = want_indices(c, FMHA_T_SEQLEN_K, p->batch);
	}
	if (!starts_q || (pack_k && !starts_k) ||
	    (padded && (!lengths_q || (pack_k && !lengths_k))))
		return -1;
	for (int32_t b = 0; b < p->batch; b++) {
		int32_t q = b == 0 ? p->seqlen_q : between(c, 0, p->seqlen_q);
		int32_t k = b == 0 ? p->seqlen_k : between(c, 0, p->seqlen_k);

		starts_q[b + 1] = starts_q[b] + q;
		if (starts_k)
			starts_k[b + 1] = starts_k[b] + k;
		if (lengths_q)
			lengths_q[b] = between(c, 0, q);
		if (lengths_k)
			lengths_k[b] = between(c, 0, k);
	}
	p->total_q = starts_q[p->batch];
	p->total_k = starts_k ? starts_k[p->batch] : 0;
	return 0;
}

/* A cache of shuffled pages, each sequence with its own length. */
static int choose_pages(struct verify_case *c)
{
	struct fmha_problem *p = &c->problem;
	bool append = p->op == FMHA_APPEND_KV;
	int32_t *table, *lengths;

	p->page_size = 16 << between(c, 0, 2);
	p->max_blocks = (p->seqlen_k + p->page_size - 1) / p->page_size;
	p->n_pages = p->batch * p->max_blocks + between(c, 0, 3);
	table = want_indices(c, FMHA_T_BLOCK_TABLE, (int64_t)p->batch * p->max_blocks);
	lengths = want_indices(c, FMHA_T_SEQLEN_K, p->batch);
	if (!table || !lengths)
		return -1;
	for (int32_t i = 0; i < p->batch * p->max_blocks; i++)
		table[i] = i;
	for (int32_t i = p->batch * p->max_blocks - 1; i > 0; i--) {
		int32_t j = between(c, 0, i), page = table[i];

		table[i] = table[j];
		table[j] = page;
	}
	for (int32_t b = 0; b < p->batch; b++)
		lengths[b] = between(c, 0, p->seqlen_k - (append ? p->seqlen_new : 0));
	return 0;
}

/* Keys of each row: some twice, some that are none. */
static int choose_chosen(struct verify_case *c)
{
	static const int32_t hostile[] = {INT32_MIN, -1, INT32_MAX};
	struct fmha_problem *p = &c->problem;
	int64_t rows = p->mode == FMHA_GROUP ? p->total_q : (int64_t)p->batch * p->seqlen_q;
	bool slots = p->page_size > 0 && chance(c, 50);
	int32_t most = slots ? p->n_pages * p->page_size : p->seqlen_k, *list;

	p->topk = between(c, 1, 90);
	if (slots) { /* nothing else finds pages or says how many keys there are */
		p->block_table.data = p->seqlen_k_per_batch.data = NULL;
		p->seqlen_k = p->max_blocks = 0;
	}
	list = want_indices(c, FMHA_T_INDICES, rows * p->topk);
	for (int64_t i = 0; list && i < rows * p->topk; i++)
		list[i] = chance(c, 8) ? hostile[between(c, 0, 2)] : between(c, 0, most);
	return list ? 0 : -1;
}

static int choose_lengths(struct verify_case *c)
{
	struct fmha_problem *p = &c->problem;
	int32_t *lengths_q = want_indices(c, FMHA_T_SEQLEN_Q, p->batch);
	int32_t *lengths_k = want_indices(c, FMHA_T_SEQLEN_K, p->batch);

	if (!lengths_q || !lengths_k)
		return -1;
	for (int32_t b = 0; b < p->batch; b++) {
		lengths_q[b] = between(c, 0, p->seqlen_q);
		lengths_k[b] = between(c, 0, p->seqlen_k);
	}
	return 0;
}

/* [batch, heads, seqlen, hdim] in memory. */
static void heads_first(struct fmha_problem *p, uint32_t role)
{
	struct fmha_tensor *tensor = &p->tensor[role];
	int64_t dims[5];

	problem_extents(p, role, dims);
	tensor->stride[3] = 1;
	tensor->stride[1] = dims[3];
	tensor->stride[2] = dims[3] * (dims[1] > 0 ? dims[1] : 1);
	tensor->stride[0] = tensor->stride[2] * dims[2];
}

static void choose_strides(struct verify_case *c)
{
	static const uint32_t roles[] = {FMHA_T_Q,  FMHA_T_K,  FMHA_T_V,  FMHA_T_O,    FMHA_T_DO,
					 FMHA_T_DQ, FMHA_T_DK, FMHA_T_DV, FMHA_T_K_NEW};
	struct fmha_problem *p = &c->problem;

	for (size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); i++) {
		bool paged = (p->page_size > 0 || p->kv_layout == FMHA_KV_LATENT_FP8) &&
			     (roles[i] == FMHA_T_K || roles[i] == FMHA_T_V);

		if (chance(c, 60) && p->tensor[roles[i]].data && !paged)
			heads_first(p, roles[i]);
	}
}

/* Which axes the bias broadcasts; never its columns. */
static void choose_bias(struct verify_case *c, uint32_t type)
{
	struct fmha_problem *p = &c->problem;
	int64_t dims[5], step;

	want(c, FMHA_T_BIAS, type);
	problem_extents(p, FMHA_T_BIAS, dims);
	p->bias.stride[3] = 1;
	step = dims[3];
	for (int axis = 2; axis >= 0; axis--) {
		if (chance(c, 40) && axis != 2)
			continue;
		p->bias.stride[axis] = step > 0 ? step : 1;
		step *= dims[axis];
	}
	if (p->op == FMHA_BACKWARD && chance(c, 50))
		want(c, FMHA_T_DBIAS, type);
}

/* Each of batch and heads may be one for all. */
static void choose_mask_data(struct verify_case *c)
{
	struct fmha_problem *p = &c->problem;
	uint32_t role = has(c, VERIFY_BITS) ? FMHA_T_MASK_BITS : FMHA_T_MASK_INTERVALS;
	int64_t dims[5], step = 1;

	if (!has(c, VERIFY_INTERVALS) && !has(c, VERIFY_BITS))
		return;
	want(c, role, role == FMHA_T_MASK_BITS ? FMHA_U8 : FMHA_I32);
	if (role == FMHA_T_MASK_INTERVALS)
		p->mask_endpoints = chance(c, 20) ? 63 : 1 + 2 * between(c, 0, 3);
	problem_extents(p, role, dims);
	for (int axis = 3; axis >= 0; axis--) {
		if (axis < 2 && chance(c, 50))
			continue;
		p->tensor[role].stride[axis] = step > 0 ? step : 1;
		step *= dims[axis];
	}
}

/* A factor a tensor or head, a block of keys, a key; of pages one, or one for some of its slots. */
static void choose_key_factors(struct verify_case *c)
{
	struct fmha_problem *p = &c->problem;
	static const int32_t blocks[] = {0, 1, 16, 64};
	int32_t block = blocks[between(c, 0, 3)];

	want(c, FMHA_T_K_DESCALE, FMHA_F32);
	want(c, FMHA_T_V_DESCALE, FMHA_F32);
	p->descale_per_page = p->page_size > 0 && chance(c, 50);
	if (p->topk > 0 && p->seqlen_k == 0 && !p->descale_per_page)
		block = 0; /* slots are of no sequence, whose keys blocks would count */
	p->descale_block_k = p->descale_per_page && block > p->page_size ? p->page_size : block;
}

static void choose_attention(struct verify_case *c, uint32_t type, uint32_t kv_type)
{
	struct fmha_problem *p = &c->problem;
	bool fp8 = type == FMHA_E4M3 || type == FMHA_E5M2;
	bool backward = p->op == FMHA_BACKWARD;

	want(c, FMHA_T_Q, type);
	want(c, FMHA_T_K, kv_type);
	want(c, FMHA_T_V, kv_type);
	want(c, FMHA_T_O, fp8 ? (chance(c, 50) ? FMHA_F16 : FMHA_BF16) : type);
	if (backward || has(c, VERIFY_LSE))
		want(c, FMHA_T_LSE, FMHA_F32);
	if (has(c, VERIFY_BIAS))
		choose_bias(c, fp8 ? p->o.dtype : type);
	if (has(c, VERIFY_ALIBI)) {
		want(c, FMHA_T_ALIBI_SLOPES, FMHA_F32);
		if (chance(c, 50))
			p->alibi_slopes.stride[1] = 1; /* one list for all of the batch */
	}
	if (has(c, VERIFY_SINK))
		want(c, FMHA_T_SINK, FMHA_F32);
	choose_mask_data(c);
	if (fp8) {
		want(c, FMHA_T_Q_DESCALE, FMHA_F32);
		want(c, FMHA_T_K_DESCALE, FMHA_F32);
		want(c, FMHA_T_V_DESCALE, FMHA_F32);
	} else if (kv_type != type && p->kv_layout != FMHA_KV_LATENT_FP8 && chance(c, 80)) {
		choose_key_factors(c);
	}
	if (backward) {
		static const uint32_t gradients[] = {FMHA_T_DO, FMHA_T_DQ, FMHA_T_DK, FMHA_T_DV};

		for (int i = 0; i < 4; i++)
			want(c, gradients[i], type);
		if (has(c, VERIFY_SINK))
			want(c, FMHA_T_DSINK, FMHA_F32);
		if (chance(c, 25))
			want(c, FMHA_T_DLSE, FMHA_F32);
	}
}

/* Slots of pages in no order; some rows go nowhere. */
static int choose_slots(struct verify_case *c)
{
	struct fmha_problem *p = &c->problem;
	int32_t rows = p->batch * p->seqlen_new, room, *slots;

	p->page_size = 16 << between(c, 0, 2);
	p->n_pages = (rows + p->page_size - 1) / p->page_size + between(c, 0, 3);
	p->seqlen_k = 0;
	p->seqlen_q = p->seqlen_new;
	room = p->n_pages * p->page_size;
	slots = want_indices(c, FMHA_T_SLOT_MAPPING, rows);
	if (!slots)
		return -1;
	p->slot_mapping.dtype = FMHA_I64;
	for (int32_t i = 0, first = between(c, 0, room - 1); i < rows; i++)
		slots[i] = chance(c, 15) ? -1 : (int32_t)((first + (int64_t)i) % room);
	for (int32_t i = rows - 1; i > 0; i--) {
		int32_t j = between(c, 0, i), slot = slots[i];

		slots[i] = slots[j];
		slots[j] = slot;
	}
	return 0;
}

static int choose_positions(struct verify_case *c)
{
	struct fmha_problem *p = &c->problem;
	int32_t *positions = want_indices(c, FMHA_T_POSITIONS, (int64_t)p->batch * p->seqlen_new);

	p->positions.dtype = FMHA_I64;
	p->rotary_max_pos = between(c, 1, 500);
	for (int32_t i = 0; positions && i < p->batch * p->seqlen_new; i++)
		positions[i] = between(c, 0, p->rotary_max_pos - 1);
	return positions ? 0 : -1;
}

/* What rows are divided by on their way into 8 bits. */
static void choose_divisors(struct verify_case *c)
{
	struct fmha_problem *p = &c->problem;

	if (has(c, VERIFY_SLOTS) && chance(c, 40)) {
		p->descale_computed = p->descale_per_page = 1;
		p->descale_block_k = 1;
	} else if (has(c, VERIFY_SLOTS)) {
		p->descale_per_page = chance(c, 40);
	} else if (chance(c, 80)) {
		choose_key_factors(c);
		return;
	} else {
		return;
	}
	want(c, FMHA_T_K_DESCALE, FMHA_F32);
	want(c, FMHA_T_V_DESCALE, FMHA_F32);
}

static int choose_append(struct verify_case *c, uint32_t type, uint32_t kv_type)
{
	struct fmha_problem *p = &c->problem;
	int r = 0;

	want(c, FMHA_T_K, kv_type);
	want(c, FMHA_T_V, kv_type);
	want(c, FMHA_T_K_NEW, type);
	want(c, FMHA_T_V_NEW, type);
	if (kv_type != type && p->kv_layout != FMHA_KV_LATENT_FP8)
		choose_divisors(c);
	if (has(c, VERIFY_ROPE) && p->hdim_q >= 16) {
		p->rope = chance(c, 50) ? FMHA_ROPE_INTERLEAVED : FMHA_ROPE_HALF_ROTATED;
		p->rotary_dim = 16 * between(c, 1, p->hdim_q / 16);
		p->rotary_max_pos = p->seqlen_k + p->seqlen_q;
		if (has(c, VERIFY_SLOTS))
			r = choose_positions(c);
		want(c, FMHA_T_ROTARY_COS, FMHA_F32);
		want(c, FMHA_T_ROTARY_SIN, FMHA_F32);
		if (chance(c, 50)) {
			want(c, FMHA_T_Q, type);
			want(c, FMHA_T_Q_ROTATED, type);
		}
	} else {
		case_drop(c, VERIFY_ROPE);
	}
	return r;
}

static void choose_merge(struct verify_case *c, uint32_t type)
{
	struct fmha_problem *p = &c->problem;

	p->n_parts = between(c, 1, 5);
	p->nhead_k = p->seqlen_k = p->hdim_q = 0;
	want(c, FMHA_T_O_PARTS, chance(c, 50) ? FMHA_F32 : type);
	want(c, FMHA_T_LSE_PARTS, FMHA_F32);
	want(c, FMHA_T_O, type);
	if (has(c, VERIFY_LSE))
		want(c, FMHA_T_LSE, FMHA_F32);
}

int verify_case_init(struct verify_case *c, uint64_t seed, uint64_t number, uint32_t features)
{
	struct fmha_problem *p = &c->problem;
	uint32_t type, kv_type;
	int r = 0;

	memset(c, 0, sizeof(*c));
	c->random = seed * UINT64_C(0xd1342543de82ef95) + number;
	(void)next_random(c);
	fmha_problem_init(p);
	draw_operation(c, features);
	type = draw_type(c, features);
	kv_type = draw_kv_type(c, features, type);
	draw_features(c, features);
	draw_sizes(c, features);
	if (has(c, VERIFY_LATENT))
		draw_latent(c, type);
	if (p->kv_layout == FMHA_KV_LATENT_FP8)
		kv_type = FMHA_E4M3;
	if (p->op == FMHA_APPEND_KV) {
		p->seqlen_new = between(c, 1, p->seqlen_k < 9 ? p->seqlen_k : 9);
		if (has(c, VERIFY_SLOTS)) {
			r = choose_slots(c);
		} else if (!has(c, VERIFY_PAGED)) {
			int32_t *lengths = want_indices(c, FMHA_T_SEQLEN_K, p->batch);

			for (int32_t b = 0; lengths && b < p->batch; b++)
				lengths[b] = between(c, 0, p->seqlen_k - p->seqlen_new);
			r = lengths ? 0 : -1;
		}
	}
	if (p->op != FMHA_MERGE_STATES && has(c, VERIFY_PAGED))
		r = choose_pages(c);
	if (r == 0 && has(c, VERIFY_GROUP))
		r = choose_group(c);
	else if (r == 0 && has(c, VERIFY_LENGTHS))
		r = choose_lengths(c);
	if (r == 0 && has(c, VERIFY_CHOSEN))
		r = choose_chosen(c);
	choose_options(c);
	if (p->op == FMHA_APPEND_KV)
		r = r == 0 ? choose_append(c, type, kv_type) : r;
	else if (p->op == FMHA_MERGE_STATES)
		choose_merge(c, type);
	else
		choose_attention(c, type, kv_type);
	if (p->v_in_k)
		p->v.data = p->v_new.data = p->v_descale.data = NULL;
	if (has(c, VERIFY_STRIDES) && p->op != FMHA_MERGE_STATES && p->mode == FMHA_BATCH)
		choose_strides(c);
	else
		case_drop(c, VERIFY_STRIDES);
	return r;
}

/* ---- contents ---- */

static double value_of(struct verify_case *c, uint32_t role, double spread)
{
	switch (role) {
	case FMHA_T_ALIBI_SLOPES:
		return uniform(c) * 0.3;
	case FMHA_T_SINK:
		return 2 * normal(c);
	case FMHA_T_LSE_PARTS:
		return chance(c, 10) ? -INFINITY : 3 * normal(c);
	case FMHA_T_Q_DESCALE:
	case FMHA_T_K_DESCALE:
	case FMHA_T_V_DESCALE:
		return 0.25 + uniform(c);
	case FMHA_T_ROTARY_COS:
	case FMHA_T_ROTARY_SIN:
		return cos(6.3 * uniform(c));
	default:
		return spread * normal(c);
	}
}

/* An endpoint: mostly in order along a row, now and then anything. */
static int32_t endpoint(struct verify_case *c)
{
	static const int32_t hostile[] = {INT32_MIN, -1, INT32_MAX};

	return chance(c, 4) ? hostile[between(c, 0, 2)] : between(c, 0, c->problem.seqlen_k);
}

static double mask_value(struct verify_case *c, uint32_t role)
{
	if (role == FMHA_T_MASK_INTERVALS)
		return endpoint(c);
	return chance(c, 25) ? 0 : chance(c, 25) ? 255 : between(c, 0, 255);
}

/* Caches of others have it, too, though no append of ours makes it. */
static void put_least(struct verify_case *c, int8_t *codes, int64_t n)
{
	for (int64_t i = 0; i < n; i++)
		codes[i] = chance(c, 2) ? INT8_MIN : codes[i];
}

void verify_case_fill(struct verify_case *c, const struct tensors *tensors)
{
	const struct fmha_problem *p = &c->problem;
	double spread = chance(c, 20) ? 3 : 1;

	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		void *data = tensors_data(tensors, role);
		uint64_t bytes = 0;

		/* An output keeps the buffer's zeros, so that what is not written shows. */
		if (!data || recipe_is_result(p, role))
			continue;
		if (c->indices[role]) {
			tensors_put_integers(data, p->tensor[role].dtype, c->indices[role],
					     c->n_indices[role]);
			continue;
		}
		(void)problem_span_bytes(p, role, &bytes, NULL);
		if (role == FMHA_T_K && p->kv_layout == FMHA_KV_LATENT_FP8) {
			recipe_fill_latents(data, bytes, &c->random);
			continue;
		}
		for (int64_t i = 0; i < (int64_t)(bytes / fmha_dtype_bytes(p->tensor[role].dtype));
		     i++)
			reference_store(data, p->tensor[role].dtype, i,
					role == FMHA_T_MASK_INTERVALS || role == FMHA_T_MASK_BITS
						? mask_value(c, role)
						: value_of(c, role, spread) *
							  recipe_spread(p, role));
		if (p->tensor[role].dtype == FMHA_I8 && recipe_spread(p, role) > 1)
			put_least(c, data, (int64_t)bytes);
	}
}

void verify_case_words(const struct verify_case *c, char *text, size_t n)
{
	size_t used = 0;

	text[0] = '\0';
	for (int i = 0; i < VERIFY_N_FEATURES && used + 1 < n; i++) {
		int r = has(c, (enum verify_feature)i)
				? snprintf(text + used, n - used, "%s%s", used ? " " : "",
					   verify_feature_names[i])
				: 0;

		used += r > 0 ? (size_t)r : 0;
	}
}

void verify_case_deinit(struct verify_case *c)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++)
		free(c->indices[role]);
}
