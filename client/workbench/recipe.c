/* SPDX-License-Identifier: MIT */
/* recipe.c: from sizes and features to a problem with its tensors. */
#include "recipe.h"

#include <stdlib.h>
#include <string.h>

#include <proto/problem.h>

#define SCALE_BLOCK 128 /* rows and keys that share a scale factor, unless options say else */

/* What a problem and a shape of a sweep both say, under one name. Sizes may be unsaid. */
#define SIZES(X)        X(batch) X(nhead_q) X(nhead_k) X(seqlen_q) X(seqlen_k) X(hdim_q) X(hdim_v)
#define MASK_OPTIONS(X) X(mask) X(window_left) X(window_right) X(sink_tokens)
#define KEY_OPTIONS(X)  X(page_size) X(kv_layout) X(seqlen_new) X(rope) X(rotary_dim)
#define RUN_OPTIONS(X)  X(n_splits) X(deterministic) X(n_parts)
#define OPTIONS(X)      MASK_OPTIONS(X) KEY_OPTIONS(X) RUN_OPTIONS(X)

#define N_SIZES (sizeof(size_offsets) / sizeof(size_offsets[0]))

#define SIZE_OFFSET(field) offsetof(struct fmha_problem, field),
static const size_t size_offsets[] = {SIZES(SIZE_OFFSET)};

static int32_t *size_of(struct fmha_problem *problem, size_t i)
{
	return (int32_t *)(void *)((char *)problem + size_offsets[i]);
}

static int32_t said_or(int32_t size, int32_t otherwise)
{
	return size == RECIPE_UNSAID ? otherwise : size;
}

void recipe_init(struct recipe *recipe, uint32_t op)
{
	memset(recipe, 0, sizeof(*recipe));
	fmha_problem_init(&recipe->problem);
	recipe->problem.op = op;
	for (size_t i = 0; i < N_SIZES; i++)
		*size_of(&recipe->problem, i) = RECIPE_UNSAID;
	recipe->dtype = FMHA_BF16;
	recipe->dtype_o = recipe->dtype_kv = FMHA_N_DTYPES;
	recipe->seed = 1;
}

void recipe_options_alone(const struct recipe *recipe, struct fmha_problem *ret_problem)
{
	*ret_problem = recipe->problem;
	for (size_t i = 0; i < N_SIZES; i++)
		*size_of(ret_problem, i) = 0;
}

void recipe_deinit(struct recipe *recipe)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		free(recipe->indices[role]);
		recipe->indices[role] = NULL;
	}
}

/* ---- shapes ---- */

static const uint32_t shape_types[] = {FMHA_F32, FMHA_F16, FMHA_BF16, FMHA_E4M3, FMHA_E5M2};

static void options_from_shape(struct recipe *recipe, const struct spec_shape *s)
{
	struct fmha_problem *p = &recipe->problem;

#define FROM_SHAPE(field) p->field = (__typeof__(p->field))s->field;
	OPTIONS(FROM_SHAPE)
	p->dropout_p = (float)s->dropout_percent / 100;
	p->logits_soft_cap = (float)s->soft_cap;
	if (s->op != FMHA_FORWARD)
		p->n_splits = 0;
	if (!s->rope)
		p->rotary_dim = 0;
}

void recipe_from_shape(struct recipe *recipe, const struct spec_shape *s)
{
	struct fmha_problem *p = &recipe->problem;

	recipe_init(recipe, (uint32_t)s->op);
	p->mode = (uint32_t)s->mode;
#define SHAPE_SIZE(field) s->field,
	const int32_t sizes[] = {SIZES(SHAPE_SIZE)};
	for (size_t i = 0; i < N_SIZES; i++)
		if (sizes[i] > 0) /* 0: a shape does not say it */
			*size_of(p, i) = sizes[i];
	options_from_shape(recipe, s);
	recipe->batch_given = recipe->mode_given = true;
	recipe->dtype = shape_types[s->data_type];
	recipe->lengths = (uint32_t)s->lengths;
	recipe->indptr = s->kv_lookup != 0;
	recipe->descale = (uint32_t)s->descale;
	recipe->bias_rank = 1;
	recipe->want[FMHA_T_LSE] = s->lse != 0;
	recipe->want[FMHA_T_SINK] = s->sink != 0;
	recipe->want[FMHA_T_BIAS] = s->bias == 1;
	recipe->want[FMHA_T_ALIBI_SLOPES] = s->bias == 2;
}

static int32_t longest(const struct recipe_list *list, int32_t otherwise)
{
	int32_t most = list->n > 0 ? 0 : otherwise;

	for (int32_t i = 0; i < list->n; i++)
		most = list->values[i] > most ? list->values[i] : most;
	return most;
}

static void complete_sizes(struct recipe *recipe);

void recipe_shape(const struct recipe *as_said, struct spec_shape *ret_shape)
{
	struct recipe complete = *as_said;
	const struct recipe *recipe = &complete;
	const struct fmha_problem *p = &recipe->problem;

	complete_sizes(&complete);
#define TO_SHAPE(field) .field = (int32_t)p->field,
	*ret_shape = (struct spec_shape){SIZES(TO_SHAPE) OPTIONS(TO_SHAPE).group = "options",
					 .op = (int32_t)p->op,
					 .mode = (int32_t)p->mode,
					 .lengths = (int32_t)recipe->lengths,
					 .sink = recipe->want[FMHA_T_SINK],
					 .bias = recipe->want[FMHA_T_BIAS]           ? 1
						 : recipe->want[FMHA_T_ALIBI_SLOPES] ? 2
										     : 0,
					 .lse = recipe->want[FMHA_T_LSE],
					 .dropout_percent = (int32_t)(p->dropout_p * 100 + 0.5F),
					 .soft_cap = (int32_t)p->logits_soft_cap,
					 .descale = (int32_t)recipe->descale,
					 .kv_lookup = recipe->indptr};
	ret_shape->seqlen_q = longest(&recipe->q, p->seqlen_q);
	ret_shape->seqlen_k = longest(&recipe->k, p->seqlen_k);
	for (int32_t i = 0; i < 5; i++)
		if (shape_types[i] == recipe->dtype)
			ret_shape->data_type = i;
}

/* ---- tensors ---- */

static bool is_fp8(uint32_t dtype)
{
	return dtype == FMHA_E4M3 || dtype == FMHA_E5M2;
}

/* What the operation gives: fp8 is never written. */
static uint32_t output_type(const struct recipe *recipe)
{
	if (!is_fp8(recipe->dtype))
		return recipe->dtype;
	return recipe->dtype_o < FMHA_N_DTYPES ? recipe->dtype_o : FMHA_BF16;
}

static uint32_t cache_type(const struct recipe *recipe)
{
	if (recipe->problem.kv_layout == FMHA_KV_LATENT_FP8)
		return FMHA_E4M3;
	return recipe->dtype_kv < FMHA_N_DTYPES ? recipe->dtype_kv : recipe->dtype;
}

static uint32_t type_of_role(const struct recipe *recipe, uint32_t role)
{
	switch (role) {
	case FMHA_T_LSE:
	case FMHA_T_ALIBI_SLOPES:
	case FMHA_T_SINK:
	case FMHA_T_DSINK:
	case FMHA_T_DLSE:
	case FMHA_T_O_PARTS: /* what split-KV kernels hand over */
	case FMHA_T_LSE_PARTS:
	case FMHA_T_ROTARY_COS:
	case FMHA_T_ROTARY_SIN:
	case FMHA_T_Q_DESCALE:
	case FMHA_T_K_DESCALE:
	case FMHA_T_V_DESCALE:
		return FMHA_F32;
	case FMHA_T_RANDVAL:
		return FMHA_U8;
	case FMHA_T_SLOT_MAPPING:
	case FMHA_T_POSITIONS:
		return FMHA_I64;
	case FMHA_T_O:
	case FMHA_T_BIAS:
	case FMHA_T_DBIAS:
		return output_type(recipe);
	case FMHA_T_K:
	case FMHA_T_V:
		return cache_type(recipe);
	default:
		return recipe->dtype;
	}
}

static void want(struct recipe *recipe, const uint32_t *roles, size_t n)
{
	for (size_t i = 0; i < n; i++)
		recipe->want[roles[i]] = true;
}
#define WANT(recipe, ...)                                                                          \
	want(recipe, (const uint32_t[]){__VA_ARGS__},                                              \
	     sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

/* Which tensors the operation and its features take. */
static void choose_tensors(struct recipe *recipe)
{
	struct fmha_problem *p = &recipe->problem;

	if (p->op == FMHA_MERGE_STATES)
		WANT(recipe, FMHA_T_O_PARTS, FMHA_T_LSE_PARTS, FMHA_T_O);
	else
		WANT(recipe, FMHA_T_K, FMHA_T_V);
	if (p->op == FMHA_FORWARD)
		WANT(recipe, FMHA_T_Q, FMHA_T_O);
	if (p->op == FMHA_BACKWARD)
		WANT(recipe, FMHA_T_Q, FMHA_T_O, FMHA_T_LSE, FMHA_T_DO, FMHA_T_DQ, FMHA_T_DK,
		     FMHA_T_DV);
	if (recipe->want[FMHA_T_DBIAS])
		WANT(recipe, FMHA_T_BIAS);
	if (recipe->want[FMHA_T_DSINK])
		WANT(recipe, FMHA_T_SINK);
	if (p->seqlen_new > 0)
		WANT(recipe, FMHA_T_K_NEW, FMHA_T_V_NEW);
	if (p->rope != FMHA_ROPE_NONE)
		WANT(recipe, FMHA_T_ROTARY_COS, FMHA_T_ROTARY_SIN);
	if (p->op == FMHA_APPEND_KV && p->rope != FMHA_ROPE_NONE)
		WANT(recipe, FMHA_T_Q, FMHA_T_Q_ROTATED);
	if (recipe->descale != RECIPE_NO_DESCALE)
		WANT(recipe, FMHA_T_K_DESCALE, FMHA_T_V_DESCALE);
	if (recipe->descale != RECIPE_NO_DESCALE && is_fp8(recipe->dtype))
		WANT(recipe, FMHA_T_Q_DESCALE);
	if (p->v_in_k)
		recipe->want[FMHA_T_V] = recipe->want[FMHA_T_V_NEW] =
			recipe->want[FMHA_T_V_DESCALE] = false;
}

static void complete_sizes(struct recipe *recipe)
{
	struct fmha_problem *p = &recipe->problem;

	p->batch = said_or(p->batch, 1);
	p->nhead_q = said_or(p->nhead_q, 8);
	p->nhead_k = said_or(p->nhead_k, p->nhead_q);
	p->hdim_q = said_or(p->hdim_q, p->kv_layout == FMHA_KV_LATENT_FP8 ? 576 : 128);
	p->seqlen_q = said_or(p->seqlen_q, 1024);
	if (p->op == FMHA_APPEND_KV && p->seqlen_new == 0)
		p->seqlen_new = 1;
	if (p->op == FMHA_MERGE_STATES && p->n_parts == 0)
		p->n_parts = 4;
	if (p->seqlen_k == RECIPE_UNSAID && recipe->k.n == 0) {
		recipe->k = recipe->q;
		recipe->k_room = recipe->k_room.n > 0 ? recipe->k_room : recipe->q_room;
	}
	p->seqlen_k = said_or(p->seqlen_k, p->seqlen_q);
	p->hdim_v = said_or(p->hdim_v, p->kv_layout == FMHA_KV_LATENT_FP8 ? 512 : p->hdim_q);
	recipe->longest_q = p->seqlen_q;
	recipe->longest_k = p->seqlen_k;
	if (p->op == FMHA_MERGE_STATES)
		p->nhead_k = p->seqlen_k = p->hdim_q = 0;
	if (p->rope != FMHA_ROPE_NONE) {
		p->rotary_dim = p->rotary_dim ? p->rotary_dim : p->hdim_q / 16 * 16;
		p->rotary_max_pos = p->seqlen_k + p->seqlen_q;
	}
	if (recipe->descale == RECIPE_PER_BLOCK) {
		if (is_fp8(recipe->dtype) && !p->descale_block_q)
			p->descale_block_q = SCALE_BLOCK;
		p->descale_block_k = p->descale_block_k ? p->descale_block_k : SCALE_BLOCK;
	}
	p->descale_per_page = recipe->descale == RECIPE_PER_PAGE ||
			      recipe->descale == RECIPE_PER_SLOT;
	if (recipe->descale == RECIPE_PER_SLOT)
		p->descale_computed = p->descale_block_k = 1;
	if (recipe->slots) { /* q turns with the new rows; nothing else has a length */
		if (p->op == FMHA_APPEND_KV)
			p->seqlen_q = p->seqlen_new;
		p->seqlen_k = 0;
	}
}

/* The memory order of the role's four dimensions, the slowest first. */
static void set_order(struct fmha_problem *p, uint32_t role, const int order[4])
{
	int64_t dims[5], step = 1;

	problem_extents(p, role, dims);
	for (int i = 3; i >= 0; i--) {
		p->tensor[role].stride[order[i]] = step;
		step *= dims[order[i]] > 0 ? dims[order[i]] : 1;
	}
}

static void set_layouts(struct recipe *recipe)
{
	static const uint32_t inputs[] = {FMHA_T_Q,     FMHA_T_K,     FMHA_T_V,
					  FMHA_T_K_NEW, FMHA_T_V_NEW, FMHA_T_DQ,
					  FMHA_T_DK,    FMHA_T_DV,    FMHA_T_Q_ROTATED};
	static const uint32_t outputs[] = {FMHA_T_O, FMHA_T_DO};
	static const int heads_first[] = {0, 2, 1, 3}, columns[] = {0, 2, 3, 1};
	struct fmha_problem *p = &recipe->problem;

	for (size_t i = 0; recipe->heads_first_in && i < sizeof(inputs) / sizeof(*inputs); i++)
		if (p->tensor[inputs[i]].data && p->kv_layout == FMHA_KV_LINEAR)
			set_order(p, inputs[i], heads_first);
	for (size_t i = 0; recipe->heads_first_out && i < sizeof(outputs) / sizeof(*outputs); i++)
		if (p->tensor[outputs[i]].data)
			set_order(p, outputs[i], heads_first);
	if (recipe->v_column_major && p->v.data)
		set_order(p, FMHA_T_V, columns);
}

static void set_broadcasts(struct recipe *recipe)
{
	struct fmha_problem *p = &recipe->problem;

	if (p->bias.data) {
		set_order(p, FMHA_T_BIAS, (const int[]){0, 1, 2, 3});
		if (recipe->bias_rank < 2)
			p->bias.stride[0] = 0;
		if (recipe->bias_rank < 1)
			p->bias.stride[1] = 0;
	}
	if (p->mask_intervals.data) { /* of one head */
		int64_t rows = p->mode == FMHA_GROUP ? p->total_q : p->seqlen_q;

		p->mask_intervals.stride[0] = rows * p->mask_endpoints;
		p->mask_intervals.stride[2] = rows;
		p->mask_intervals.stride[3] = 1;
	}
	if (p->alibi_slopes.data && !recipe->alibi_per_batch)
		p->alibi_slopes.stride[1] = 1;
}

int recipe_make(struct recipe *recipe, struct fmha_error *err)
{
	int r;

	complete_sizes(recipe);
	choose_tensors(recipe);
	r = recipe_make_tables(recipe, err);
	if (r < 0)
		return r;
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++)
		if (recipe->want[role])
			recipe_mark(recipe, role, type_of_role(recipe, role));
	set_broadcasts(recipe);
	set_layouts(recipe);
	return 0;
}

void recipe_pretend_buffers(struct fmha_problem *problem)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &problem->tensor[role];

		if (!tensor->data)
			continue;
		tensor->data = NULL;
		tensor->buffer = role + 1;
	}
}

/* ---- cost ---- */

double recipe_flops(const struct recipe *recipe)
{
	const struct fmha_problem *p = &recipe->problem;
	double pairs = recipe->pairs * p->nhead_q, turned = 0;

	if (p->rope != FMHA_ROPE_NONE)
		turned = 3.0 * p->rotary_dim *
			 ((double)p->batch * p->seqlen_new * p->nhead_k +
			  recipe->rows * p->nhead_q);
	switch (p->op) {
	case FMHA_FORWARD:
		return pairs * 2 * (p->hdim_q + p->hdim_v) + turned;
	case FMHA_BACKWARD: /* S, dP, dV, dQ, dK */
		return pairs * 2 * (3.0 * p->hdim_q + 2.0 * p->hdim_v);
	case FMHA_APPEND_KV:
		return turned;
	default:
		return 3.0 * p->n_parts * recipe->rows * p->nhead_q * p->hdim_v;
	}
}

/* Elements of a role that somebody touches. */
static double touched(const struct recipe *recipe, uint32_t role)
{
	const struct fmha_problem *p = &recipe->problem;
	double keys = p->op == FMHA_APPEND_KV ? (double)p->batch * p->seqlen_new : recipe->keys;
	uint64_t bytes = 0;

	switch (role) {
	case FMHA_T_Q:
	case FMHA_T_DQ:
	case FMHA_T_Q_ROTATED:
		return recipe->rows * p->nhead_q * p->hdim_q;
	case FMHA_T_O:
	case FMHA_T_DO:
		return recipe->rows * p->nhead_q * p->hdim_v;
	case FMHA_T_O_PARTS:
		return recipe->rows * p->nhead_q * p->hdim_v * p->n_parts;
	case FMHA_T_K:
		if (p->kv_layout == FMHA_KV_LATENT_FP8)
			return keys * FMHA_LATENT_BYTES;
		return keys * p->nhead_k * p->hdim_q;
	case FMHA_T_DK:
		return keys * p->nhead_k * p->hdim_q;
	case FMHA_T_V:
	case FMHA_T_DV:
		return keys * p->nhead_k * p->hdim_v;
	case FMHA_T_LSE:
		return recipe->rows * p->nhead_q;
	default:
		(void)problem_span_bytes(p, role, &bytes, NULL);
		return (double)bytes / fmha_dtype_bytes(p->tensor[role].dtype);
	}
}

double recipe_bytes(const struct recipe *recipe)
{
	double bytes = 0;

	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++)
		if (fmha_tensor_present(&recipe->problem.tensor[role]))
			bytes += touched(recipe, role) *
				 fmha_dtype_bytes(recipe->problem.tensor[role].dtype);
	return bytes;
}
