/* SPDX-License-Identifier: MIT */
/* problem.c: roles, data types, extents, strides and sizes. What is legal: problem_check.c. */
#include <proto/problem.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <proto/error.h>

#include "problem_internal.h"

/* ---- problem settle ---- */

/*
 * The extents that a caller says of its tensors. Memory behind a tensor is read as
 * far as the problem's sizes and the role say; here what they say is held against what there is. One
 * rule for every role, and a table of the exceptions.
 */

#define EXTENTS_BYTES 112 /* of five numbers and what parts them */

/* Bit i: where the problem has more, axis i may have extent 1. Inputs only: dbias has those of bias. */
static uint32_t broadcast_axes(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	switch (role) {
	case FMHA_T_BIAS:
		return 0xf;
	case FMHA_T_ALIBI_SLOPES:
		return 0x1;
	case FMHA_T_MASK_BITS:
		return 0x7;
	case FMHA_T_MASK_INTERVALS:
	case FMHA_T_Q_DESCALE:
	case FMHA_T_K_DESCALE:
	case FMHA_T_V_DESCALE:
		return p->descale_computed ? 0 : 0x3;
	default:
		return 0;
	}
}

/* One number, [batch, heads] or [batch, heads, blocks]: what is missing is at the end. */
static bool lacks_trailing(enum fmha_tensor_role role)
{
	return role == FMHA_T_Q_DESCALE || role == FMHA_T_K_DESCALE || role == FMHA_T_V_DESCALE;
}

static bool is_vectorized(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	return (role == FMHA_T_K || role == FMHA_T_V) && p->kv_layout == FMHA_KV_VECTORIZED;
}

/* "[2, 64, 4, 128]" */
static const char *extents_text(const int64_t *extent, int n, char text[EXTENTS_BYTES])
{
	int used = snprintf(text, EXTENTS_BYTES, "[");

	for (int i = 0; i < n; i++)
		used += snprintf(text + used, EXTENTS_BYTES - (size_t)used, "%s%" PRId64,
				 i ? ", " : "", extent[i]);
	(void)snprintf(text + used, EXTENTS_BYTES - (size_t)used, "]");
	return text;
}

/* @said, @n_said: as the caller did. */
static int refuse(enum fmha_tensor_role role, const int64_t *said, int n_said,
		  const int64_t *wanted, int n_wanted, struct fmha_error *err)
{
	const struct proto_role *r = &proto_roles[role];
	char field[sizeof(err->field)], has[EXTENTS_BYTES], wants[EXTENTS_BYTES];

	(void)snprintf(field, sizeof(field), "tensor.%s", r->name);
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s is %s: %s is wanted (%.*s)", field,
				    extents_text(said, n_said < 5 ? n_said : 5, has),
				    extents_text(wanted, n_wanted, wants),
				    (int)strcspn(r->dims, ";"), r->dims);
}

/* K [n_pages, nhead_k, hdim_q / x, page_size, x], V [n_pages, nhead_k, page_size / x, hdim_v, x], packed. */
static int settle_vectorized(const struct fmha_problem *p, enum fmha_tensor_role role,
			     struct fmha_tensor *t, struct fmha_error *err)
{
	int64_t bytes = fmha_dtype_bytes(t->dtype), x = bytes > 0 ? 16 / bytes : 1, step = 1;
	const int64_t wanted[5] = {p->n_pages, p->nhead_k,
				   (role == FMHA_T_K ? p->hdim_q : p->page_size) / x,
				   role == FMHA_T_K ? p->page_size : p->hdim_v, x};
	char field[sizeof(err->field)];

	if (t->n_dims != 5 || memcmp(t->extent, wanted, sizeof(wanted)) != 0)
		return refuse(role, t->extent, (int)t->n_dims, wanted, 5, err);
	for (int i = 4; i >= 0; step *= wanted[i--]) {
		if (t->stride[i] == step || wanted[i] <= 1)
			continue;
		(void)snprintf(field, sizeof(field), "tensor.%s.stride", proto_roles[role].name);
		return fmha_error_set_field(err, FMHA_EINVAL, field,
					    "%s: a vectorized cache is packed", field);
	}
	t->n_dims = 0;
	memset(t->stride, 0, sizeof(t->stride));
	memset(t->extent, 0, sizeof(t->extent));
	return 0;
}

int problem_check_extents(const struct fmha_problem *p, enum fmha_tensor_role role,
			  struct fmha_error *err)
{
	const struct fmha_tensor *t = &p->tensor[role];
	int n = proto_roles[role].n_dims;
	int64_t dims[5];

	if (t->n_dims == 0)
		return 0;
	problem_extents(p, role, dims);
	if (role == FMHA_T_WORKSPACE) /* its size is the plan's */
		dims[0] = t->extent[0];
	if (t->n_dims != (uint32_t)n || is_vectorized(p, role))
		return refuse(role, t->extent, (int)t->n_dims, dims, n, err);
	for (int i = 0; i < n; i++)
		if (t->extent[i] != dims[i] &&
		    !(t->extent[i] == 1 && t->stride[i] == 0 && (broadcast_axes(p, role) >> i & 1)))
			return refuse(role, t->extent, n, dims, n, err);
	return 0;
}

/* As many dimensions as the role has. */
static void align(struct fmha_tensor *t, const struct fmha_tensor *said, int n, int shift)
{
	memset(t->extent, 0, sizeof(t->extent));
	memset(t->stride, 0, sizeof(t->stride));
	for (int i = 0; i < n; i++) {
		int from = i - shift;
		bool there = from >= 0 && from < (int)said->n_dims;

		t->extent[i] = there ? said->extent[from] : 1;
		t->stride[i] = there ? said->stride[from] : 0;
	}
	t->n_dims = (uint32_t)n;
}

static int settle(struct fmha_problem *p, enum fmha_tensor_role role, struct fmha_error *err)
{
	struct fmha_tensor *t = &p->tensor[role], said = *t;
	int n = proto_roles[role].n_dims;
	int64_t dims[5];
	int r;

	if (is_vectorized(p, role))
		return settle_vectorized(p, role, t, err);
	problem_extents(p, role, dims);
	if (said.n_dims > (uint32_t)n)
		return refuse(role, said.extent, (int)said.n_dims, dims, n, err);
	align(t, &said, n, lacks_trailing(role) ? 0 : n - (int)said.n_dims);
	for (int i = 0; i < n; i++)
		if (t->extent[i] == 1 && (dims[i] != 1 || t->stride[i] < 0))
			t->stride[i] = 0;
	r = problem_check_extents(p, role, err);
	return r < 0 ? refuse(role, said.extent, (int)said.n_dims, dims, n, err) : 0;
}

int problem_settle(struct fmha_problem *problem, struct fmha_error *err)
{
	int r = 0;

	/* dbias's extents are bias's, which comes before it. */
	for (uint32_t role = 0; r == 0 && role < FMHA_N_TENSORS; role++)
		if (problem->tensor[role].n_dims > 0 && fmha_tensor_present(&problem->tensor[role]))
			r = settle(problem, role, err);
	return r;
}

#define DIRECTION_IN    .input = true
#define DIRECTION_OUT   .output = true
#define DIRECTION_INOUT .input = true, .output = true

const struct proto_role proto_roles[FMHA_N_TENSORS] = {
#define ROLE(NAME, role, dims_count, dims_text, direction)                                         \
	[FMHA_T_##NAME] = {.name = #role,                                                          \
			   .n_dims = (dims_count),                                                 \
			   .dims = (dims_text),                                                    \
			   DIRECTION_##direction},
	FMHA_TENSORS(ROLE)};

#define WORDS(symbol, ...)                                                                         \
	static const char *const symbol##_text[] = {__VA_ARGS__};                                  \
	const struct proto_words symbol = {symbol##_text,                                          \
					   sizeof(symbol##_text) / sizeof(symbol##_text[0])}
#define DTYPE_NAME(NAME, name, bytes) #name,

WORDS(proto_dtype_words, FMHA_DTYPES(DTYPE_NAME));
_Static_assert(sizeof(proto_dtype_words_text) / sizeof(char *) == FMHA_N_DTYPES, "as many types");
WORDS(proto_op_words, "forward", "backward", "append_kv", "merge_states");
WORDS(proto_mode_words, "batch", "group");
WORDS(proto_mask_words, "none", "top_left", "bottom_right");
WORDS(proto_rope_words, "none", "interleaved", "half_rotated");
WORDS(proto_kv_layout_words, "linear", "vectorized", "latent_fp8");

const char *problem_op_name(uint32_t op)
{
	return op < proto_op_words.n ? proto_op_words.names[op] : "unknown";
}

uint32_t fmha_dtype_bytes(uint32_t dtype)
{
#define DTYPE_BYTES(NAME, name, bytes) bytes,
	static const uint8_t sizes[FMHA_N_DTYPES] = {FMHA_DTYPES(DTYPE_BYTES)};

	return dtype < FMHA_N_DTYPES ? sizes[dtype] : 0;
}

const char *fmha_dtype_name(uint32_t dtype)
{
	return dtype < FMHA_N_DTYPES ? proto_dtype_words.names[dtype] : NULL;
}

/* ---- fields ---- */

#define NEUTRAL_CHOICE(value)      (value)
#define NEUTRAL_FLAG(value)        (value)
#define NEUTRAL_SIZE(value)        (value)
#define NEUTRAL_NUMBER(value)      (value)
#define NEUTRAL_COUNTER(value)     (value)
#define NEUTRAL_REAL(value)        (value)
#define NEUTRAL_ABSENT_REAL(value) 0
#define PLACED                     NULL

const struct problem_field problem_fields[PROBLEM_N_FIELDS] = {
#define PROBLEM_FIELD(kind, field, value, min, max, takers, key, option, meaning)                  \
	{.name = #field,                                                                           \
	 .type = PROBLEM_##kind,                                                                   \
	 .offset = offsetof(struct fmha_problem, field),                                           \
	 .neutral = NEUTRAL_##kind(value),                                                         \
	 .least = (min),                                                                           \
	 .most = (max),                                                                            \
	 .ops = (takers),                                                                          \
	 .word = (key)},
	FMHA_PROBLEM_FIELDS(PROBLEM_FIELD)};

int64_t problem_field_value(const struct fmha_problem *problem, const struct problem_field *field)
{
	const void *at = (const char *)problem + field->offset;

	switch (field->type) {
	case PROBLEM_CHOICE:
	case PROBLEM_FLAG:
		return *(const uint32_t *)at;
	case PROBLEM_COUNTER:
		return *(const uint64_t *)at != 0;
	case PROBLEM_REAL:
	case PROBLEM_ABSENT_REAL:
		return *(const float *)at != 0;
	default:
		return *(const int32_t *)at;
	}
}

/* 1 - p in float and the product in double, in this order, so that it is FlashAttention-2's bit by bit. */
uint32_t fmha_dropout_threshold(float dropout_p)
{
	float keep = 1.0F - dropout_p;

	if (!(dropout_p > 0.0F))
		return 255;
	return keep > 0.0F ? (uint32_t)((double)keep * 255.0) : 0;
}

void fmha_problem_init(struct fmha_problem *problem)
{
	memset(problem, 0, sizeof(*problem));
	problem->struct_size = sizeof(*problem);
#define INIT_FIELD(type, name, neutral, ...) problem->name = (neutral);
	FMHA_PROBLEM_FIELDS(INIT_FIELD)
#undef INIT_FIELD
}

/* append_kv has rows of queries only when it rotates some. */
static bool has_rows(const struct fmha_problem *p)
{
	return p->op != FMHA_APPEND_KV || fmha_tensor_present(&p->q);
}

static void axis_q(const struct fmha_problem *p, struct problem_axis *axis)
{
	*axis = (struct problem_axis){.outer = 1};
	if (!has_rows(p))
		return;
	axis->longest = p->seqlen_q;
	if (p->mode == FMHA_GROUP) {
		axis->storage = STORED_PACKED;
		axis->length = p->total_q;
	} else {
		axis->storage = STORED_BATCHED;
		axis->outer = p->batch;
		axis->length = p->seqlen_q;
	}
}

static void axis_k(const struct fmha_problem *p, struct problem_axis *axis)
{
	*axis = (struct problem_axis){.outer = 1};
	if (p->op == FMHA_MERGE_STATES)
		return;
	axis->longest = axis->length = p->seqlen_k;
	if (p->page_size > 0) {
		axis->storage = fmha_tensor_present(&p->slot_mapping) ? STORED_SLOTS
				: fmha_tensor_present(&p->kv_indptr)  ? STORED_LIST
				: p->topk > 0 && !fmha_tensor_present(&p->block_table)
					? STORED_SLOTS
					: STORED_TABLE;
		axis->outer = p->n_pages;
		axis->length = p->page_size;
	} else if (fmha_tensor_present(&p->cache_batch_idx)) {
		axis->storage = STORED_INDEXED;
		axis->outer = p->cache_batch > 0 ? p->cache_batch : p->batch;
	} else if (p->mode == FMHA_GROUP) {
		axis->storage = STORED_PACKED;
		axis->length = p->total_k;
	} else {
		axis->storage = STORED_BATCHED;
		axis->outer = p->batch;
	}
}

void problem_axes(const struct fmha_problem *problem, struct problem_axes *ret_axes)
{
	ret_axes->sequences = problem->batch;
	axis_q(problem, &ret_axes->q);
	axis_k(problem, &ret_axes->k);
}

static void dims_set(int64_t dims[5], int64_t d0, int64_t d1, int64_t d2, int64_t d3)
{
	dims[0] = d0;
	dims[1] = d1;
	dims[2] = d2;
	dims[3] = d3;
	dims[4] = 1;
}

static int64_t descale_blocks(int64_t length, int64_t block)
{
	return block > 0 ? (length + block - 1) / block : 1;
}

/*
 * Axes that bias broadcasts have extent 1 in dbias: it is the sum over them. A bias whose extents are
 * said broadcasts where they are 1; an expanded one, whose elements merely lie in the same place, has a
 * gradient for each.
 */
static void dbias_extents(const struct fmha_problem *p, int64_t dims[5])
{
	int64_t stride[5];

	problem_strides(p, FMHA_T_BIAS, stride);
	for (int i = 0; i < 4; i++)
		if (p->bias.n_dims > 0 ? p->bias.extent[i] == 1 : stride[i] == 0)
			dims[i] = 1;
}

void problem_extents(const struct fmha_problem *p, enum fmha_tensor_role role, int64_t ret_dims[5])
{
	struct problem_axes axes;
	const struct problem_axis *q = &axes.q, *k = &axes.k;

	problem_axes(p, &axes);
	switch (role) {
	case FMHA_T_Q:
	case FMHA_T_Q_ROTATED:
	case FMHA_T_DQ:
		return dims_set(ret_dims, q->outer, q->length, p->nhead_q, p->hdim_q);
	case FMHA_T_O:
	case FMHA_T_DO:
		return dims_set(ret_dims, q->outer, q->length, p->nhead_q, p->hdim_v);
	case FMHA_T_K:
	case FMHA_T_DK:
		return dims_set(ret_dims, k->outer, k->length, p->nhead_k,
				p->kv_layout == FMHA_KV_LATENT_FP8 ? FMHA_LATENT_BYTES : p->hdim_q);
	case FMHA_T_V:
	case FMHA_T_DV:
		return dims_set(ret_dims, k->outer, k->length, p->nhead_k, p->hdim_v);
	case FMHA_T_LSE:
	case FMHA_T_DLSE:
		return dims_set(ret_dims, q->outer, p->nhead_q, q->length, 1);
	case FMHA_T_BIAS:
	case FMHA_T_RANDVAL:
	case FMHA_T_DBIAS:
		dims_set(ret_dims, q->outer, p->nhead_q, q->length, k->longest);
		if (role == FMHA_T_DBIAS)
			dbias_extents(p, ret_dims);
		return;
	case FMHA_T_MASK_INTERVALS:
		return dims_set(ret_dims, q->outer, p->nhead_q, p->mask_endpoints, q->length);
	case FMHA_T_MASK_BITS:
		return dims_set(ret_dims, q->outer, p->nhead_q, q->length, (k->longest + 7) / 8);
	case FMHA_T_ALIBI_SLOPES:
		return dims_set(ret_dims, axes.sequences, p->nhead_q, 1, 1);
	case FMHA_T_SINK:
	case FMHA_T_DSINK:
		return dims_set(ret_dims, p->nhead_q, 1, 1, 1);
	case FMHA_T_SEQSTART_Q:
	case FMHA_T_SEQSTART_K:
	case FMHA_T_KV_INDPTR:
		return dims_set(ret_dims, axes.sequences + 1, 1, 1, 1);
	case FMHA_T_SEQLEN_Q:
	case FMHA_T_SEQLEN_K:
	case FMHA_T_KV_LAST_PAGE_LEN:
	case FMHA_T_CACHE_BATCH_IDX:
	case FMHA_T_LEFTPAD_K:
		return dims_set(ret_dims, axes.sequences, 1, 1, 1);
	case FMHA_T_BLOCK_TABLE:
		return dims_set(ret_dims, axes.sequences, p->max_blocks, 1, 1);
	case FMHA_T_KV_PAGE_INDICES:
		return dims_set(ret_dims, p->n_page_indices, 1, 1, 1);
	case FMHA_T_Q_DESCALE:
		return dims_set(ret_dims, axes.sequences, p->nhead_q,
				descale_blocks(q->longest, p->descale_block_q), 1);
	case FMHA_T_K_DESCALE:
	case FMHA_T_V_DESCALE:
		if (p->descale_per_page)
			return dims_set(ret_dims, p->n_pages, p->nhead_k,
					descale_blocks(p->page_size, p->descale_block_k), 1);
		return dims_set(ret_dims, axes.sequences, p->nhead_k,
				descale_blocks(k->longest, p->descale_block_k), 1);
	case FMHA_T_K_NEW:
		return dims_set(ret_dims, axes.sequences, p->seqlen_new, p->nhead_k, p->hdim_q);
	case FMHA_T_V_NEW:
		return dims_set(ret_dims, axes.sequences, p->seqlen_new, p->nhead_k, p->hdim_v);
	case FMHA_T_SLOT_MAPPING:
	case FMHA_T_POSITIONS:
		return dims_set(ret_dims, axes.sequences, p->seqlen_new, 1, 1);
	case FMHA_T_INDICES:
		return dims_set(ret_dims, q->outer, q->length, p->topk, 1);
	case FMHA_T_ROTARY_COS:
	case FMHA_T_ROTARY_SIN:
		return dims_set(ret_dims, p->rotary_max_pos, p->rotary_dim / 2, 1, 1);
	case FMHA_T_O_PARTS:
		dims_set(ret_dims, p->n_parts, q->outer, q->length, p->nhead_q);
		ret_dims[4] = p->hdim_v;
		return;
	case FMHA_T_LSE_PARTS:
		return dims_set(ret_dims, p->n_parts, q->outer, p->nhead_q, q->length);
	case FMHA_T_WORKSPACE: /* its size is the plan's */
	case FMHA_N_TENSORS:
		break;
	}
	dims_set(ret_dims, 0, 1, 1, 1);
}

static bool stride_is_packed(const struct fmha_tensor *tensor)
{
	if (tensor->n_dims > 0)
		return false;
	for (int i = 0; i < 5; i++)
		if (tensor->stride[i] != 0)
			return false;
	return true;
}

static void strides_of(const struct fmha_problem *problem, enum fmha_tensor_role role,
		       const int64_t dims[5], int64_t ret_stride[5])
{
	const struct fmha_tensor *tensor = &problem->tensor[role];
	bool packed = stride_is_packed(tensor);
	int64_t stride = 1;

	memset(ret_stride, 0, 5 * sizeof(*ret_stride));
	for (int i = proto_roles[role].n_dims - 1; i >= 0; i--) {
		ret_stride[i] = packed ? stride : tensor->stride[i];
		/* Saturate: a product that overflows is refused by problem_view(). */
		if (__builtin_mul_overflow(stride, dims[i] > 0 ? dims[i] : 1, &stride))
			stride = INT64_MAX;
	}
	if (role == FMHA_T_DBIAS) /* what has one element and is summed into has no step */
		for (int i = 0; i < 4; i++)
			if (dims[i] == 1)
				ret_stride[i] = 0;
}

void problem_strides(const struct fmha_problem *problem, enum fmha_tensor_role role,
		     int64_t ret_stride[5])
{
	int64_t dims[5];

	problem_extents(problem, role, dims);
	strides_of(problem, role, dims, ret_stride);
}

int problem_view(const struct fmha_problem *problem, enum fmha_tensor_role role,
		 struct problem_view *ret_view, struct fmha_error *err)
{
	uint32_t bytes = fmha_dtype_bytes(problem->tensor[role].dtype);
	const int64_t *dims = ret_view->extent, *stride = ret_view->stride;
	char field[sizeof(err->field)] = "tensor.";
	int64_t last = 0, span;

	problem_extents(problem, role, ret_view->extent);
	strides_of(problem, role, dims, ret_view->stride);
	ret_view->bytes = 0;
	for (int i = 0; i < 5; i++)
		if (dims[i] <= 0)
			return 0;
	for (int i = 0; i < proto_roles[role].n_dims; i++) {
		int64_t reach;

		if (stride[i] < 0 || __builtin_mul_overflow(dims[i] - 1, stride[i], &reach) ||
		    __builtin_add_overflow(last, reach, &last))
			goto overflow;
	}
	if (__builtin_add_overflow(last, 1, &span) ||
	    __builtin_mul_overflow(span, (int64_t)bytes, &span))
		goto overflow;
	ret_view->bytes = (uint64_t)span;
	return 0;
overflow:
	(void)strncat(field, proto_roles[role].name, sizeof(field) - sizeof("tensor."));
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s: its extent overflows 64 bits",
				    field);
}

int problem_span_bytes(const struct fmha_problem *problem, enum fmha_tensor_role role,
		       uint64_t *ret_bytes, struct fmha_error *err)
{
	struct problem_view view;
	int r = problem_view(problem, role, &view, err);

	if (r == 0)
		*ret_bytes = view.bytes;
	return r;
}
