/* SPDX-License-Identifier: MIT */
/*
 * problem_check.c: is this a sound problem, as far as no device is needed to tell? First every
 * number on its own, then numbers against each other; tensors are judged by problem_tensors.c.
 * Everything behind this check may multiply sizes as int64_t without a second thought.
 */
#include <proto/problem.h>

#include <math.h>

#include <proto/error.h>

#include "problem_internal.h"

static const char *const op_names[] = {"forward", "backward", "append_kv", "merge_states"};

const char *problem_op_name(uint32_t op)
{
	return op <= FMHA_MERGE_STATES ? op_names[op] : "unknown";
}

static int refuse(struct fmha_error *err, const char *field, int32_t value, const char *rule)
{
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s %d: %s", field, value, rule);
}

/* ---- each number on its own ---- */

struct range {
	const char *field;
	size_t offset;
	int32_t min, max;
	uint32_t ops; /* that look at it */
};

#define RANGE(member, least, most, used_by)                                                        \
	{                                                                                          \
		.field = #member, .offset = offsetof(struct fmha_problem, member), .min = (least), \
		.max = (most), .ops = (used_by)                                                    \
	}

enum {
	MAX_BATCH = 1 << 20,
	MAX_HEADS = 1 << 16,
	MAX_SPLITS = 1024,
	MAX_PARTS = 1024,
};

static const struct range ranges[] = {
	RANGE(batch, 0, MAX_BATCH, OPS_ALL),
	RANGE(nhead_q, 1, MAX_HEADS, OPS_ATTENTION | OP_MERGE),
	RANGE(nhead_k, 1, MAX_HEADS, OPS_ATTENTION | OP_APPEND),
	RANGE(seqlen_q, 0, INT32_MAX, OPS_ALL),
	RANGE(seqlen_k, 0, INT32_MAX, OPS_ATTENTION | OP_APPEND),
	RANGE(hdim_q, 1, 256, OPS_ATTENTION | OP_APPEND),
	RANGE(hdim_v, 1, 256, OPS_ALL),
	RANGE(total_q, 0, INT32_MAX, OPS_ALL),
	RANGE(total_k, 0, INT32_MAX, OPS_ALL),
	RANGE(window_left, -1, INT32_MAX, OPS_ALL),
	RANGE(window_right, -1, INT32_MAX, OPS_ALL),
	RANGE(sink_tokens, 0, INT32_MAX, OPS_ALL),
	RANGE(min_seqlen_q, 0, INT32_MAX, OPS_ALL),
	RANGE(n_splits, 0, MAX_SPLITS, OPS_ALL),
	RANGE(split_size, 0, INT32_MAX, OPS_ALL),
	RANGE(page_size, 0, 1024, OPS_ALL),
	RANGE(n_pages, 0, INT32_MAX, OPS_ALL),
	RANGE(max_blocks, 0, INT32_MAX, OPS_ALL),
	RANGE(n_page_indices, 0, INT32_MAX, OPS_ALL),
	RANGE(cache_batch, 0, INT32_MAX, OPS_ALL),
	RANGE(descale_block_q, 0, INT32_MAX, OPS_ALL),
	RANGE(descale_block_k, 0, INT32_MAX, OPS_ALL),
	RANGE(rotary_dim, 0, 256, OPS_ALL),
	RANGE(rotary_max_pos, 0, INT32_MAX, OPS_ALL),
	RANGE(seqlen_new, 0, INT32_MAX, OPS_ALL),
	RANGE(n_parts, 0, MAX_PARTS, OPS_ALL),
};

struct choice {
	const char *field;
	size_t offset;
	uint32_t last;
};

#define CHOICE(member, largest)                                                                    \
	{                                                                                          \
		.field = #member, .offset = offsetof(struct fmha_problem, member),                 \
		.last = (largest)                                                                  \
	}

static const struct choice choices[] = {
	CHOICE(op, FMHA_MERGE_STATES),        CHOICE(mode, FMHA_GROUP),
	CHOICE(mask, FMHA_MASK_BOTTOM_RIGHT), CHOICE(kv_layout, FMHA_KV_VECTORIZED),
	CHOICE(rope, FMHA_ROPE_HALF_ROTATED), CHOICE(deterministic, 1),
	CHOICE(descale_per_page, 1),
};

static int check_ranges(const struct fmha_problem *p, struct fmha_error *err)
{
	for (size_t i = 0; i < sizeof(choices) / sizeof(choices[0]); i++) {
		const struct choice *choice = &choices[i];
		uint32_t value = *(const uint32_t *)((const char *)p + choice->offset);

		if (value > choice->last)
			return fmha_error_set_field(err, FMHA_EINVAL, choice->field,
						    "%s %u: above %u, the last one defined",
						    choice->field, value, choice->last);
	}
	for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
		const struct range *range = &ranges[i];
		int32_t value = *(const int32_t *)((const char *)p + range->offset);

		if (!(range->ops & OP_BIT(p->op)))
			continue;
		if (value < range->min)
			return fmha_error_set_field(err, FMHA_EINVAL, range->field,
						    "%s %d: below %d", range->field, value,
						    range->min);
		if (value > range->max)
			return fmha_error_set_field(err, FMHA_EINVAL, range->field,
						    "%s %d: above %d", range->field, value,
						    range->max);
	}
	return 0;
}

static int check_floats(const struct fmha_problem *p, struct fmha_error *err)
{
	if (isinf(p->scale))
		return fmha_error_set_field(err, FMHA_EINVAL, "scale", "scale: infinite");
	if (!isfinite(p->logits_soft_cap) || p->logits_soft_cap < 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "logits_soft_cap",
					    "logits_soft_cap %g: neither 0 nor a positive number",
					    (double)p->logits_soft_cap);
	/* Written so that NaN fails too. */
	if (!(p->dropout_p >= 0 && p->dropout_p < 1))
		return fmha_error_set_field(err, FMHA_EINVAL, "dropout_p",
					    "dropout_p %g: not in [0, 1)", (double)p->dropout_p);
	return 0;
}

/* ---- numbers against each other ---- */

static int check_heads(const struct fmha_problem *p, struct fmha_error *err)
{
	uint32_t op = OP_BIT(p->op);

	if (op & OP_APPEND && fmha_tensor_present(&p->q) && p->nhead_q < 1)
		return refuse(err, "nhead_q", p->nhead_q, "below 1");
	if (op & OPS_ATTENTION && p->nhead_q % p->nhead_k != 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "nhead_q",
					    "nhead_q %d: not a multiple of nhead_k %d", p->nhead_q,
					    p->nhead_k);
	return 0;
}

static int check_lengths(const struct fmha_problem *p, struct fmha_error *err)
{
	struct problem_axes axes;

	if (p->mode == FMHA_BATCH) {
		if (p->total_q != 0)
			return refuse(err, "total_q", p->total_q, "only group mode has one");
		if (p->total_k != 0)
			return refuse(err, "total_k", p->total_k, "only group mode has one");
		if (p->min_seqlen_q != 0)
			return refuse(err, "min_seqlen_q", p->min_seqlen_q, "needs group mode");
		if ((int64_t)p->batch * p->seqlen_q > INT32_MAX)
			return refuse(err, "seqlen_q", p->seqlen_q,
				      "batch times seqlen_q exceeds 2^31 - 1 rows");
		return 0;
	}
	if (p->seqlen_q > p->total_q)
		return fmha_error_set_field(err, FMHA_EINVAL, "seqlen_q",
					    "seqlen_q %d: above total_q %d", p->seqlen_q,
					    p->total_q);
	problem_axes(p, &axes);
	if (axes.k.storage == STORED_NOT)
		return 0;
	if (axes.k.storage != STORED_PACKED && p->total_k != 0)
		return refuse(err, "total_k", p->total_k, "a paged or indexed cache is not packed");
	if (axes.k.storage == STORED_PACKED && p->seqlen_k > p->total_k)
		return fmha_error_set_field(err, FMHA_EINVAL, "seqlen_k",
					    "seqlen_k %d: above total_k %d", p->seqlen_k,
					    p->total_k);
	return 0;
}

#define NEEDS_MASK "of mask top_left or bottom_right, and mask is none"

static int check_mask(const struct fmha_problem *p, struct fmha_error *err)
{
	if (p->mask != FMHA_MASK_NONE)
		return 0;
	if (p->window_left != -1)
		return refuse(err, "window_left", p->window_left, NEEDS_MASK);
	if (p->window_right != -1)
		return refuse(err, "window_right", p->window_right, NEEDS_MASK);
	if (p->sink_tokens != 0)
		return refuse(err, "sink_tokens", p->sink_tokens, NEEDS_MASK);
	return 0;
}

struct option {
	const char *field;
	bool set;
	uint32_t ops; /* that take it */
};

/* Options that an operation does not have must stay neutral: ignoring them would hide a mistake. */
static int check_options(const struct fmha_problem *p, struct fmha_error *err)
{
	const struct option options[] = {
		{"mask", p->mask != FMHA_MASK_NONE, OPS_ATTENTION | OP_APPEND},
		{"sink_tokens", p->sink_tokens != 0, OPS_ATTENTION},
		{"min_seqlen_q", p->min_seqlen_q != 0, OP_FORWARD | OP_MERGE},
		{"logits_soft_cap", p->logits_soft_cap != 0, OPS_ATTENTION},
		{"dropout_p", p->dropout_p != 0, OPS_ATTENTION},
		{"n_splits", p->n_splits != 0, OP_FORWARD},
		{"split_size", p->split_size != 0, OP_FORWARD},
		{"page_size", p->page_size != 0, OP_FORWARD | OP_APPEND},
		{"cache_batch", p->cache_batch != 0, OP_FORWARD | OP_APPEND},
		{"descale_block_q", p->descale_block_q != 0, OP_FORWARD},
		{"descale_block_k", p->descale_block_k != 0, OP_FORWARD},
		{"descale_per_page", p->descale_per_page != 0, OP_FORWARD},
		{"rope", p->rope != FMHA_ROPE_NONE, OP_FORWARD | OP_APPEND},
		{"seqlen_new", p->seqlen_new != 0, OP_FORWARD | OP_APPEND},
		{"n_parts", p->n_parts != 0, OP_MERGE},
	};

	for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++)
		if (options[i].set && !(options[i].ops & OP_BIT(p->op)))
			return fmha_error_set_field(err, FMHA_EINVAL, options[i].field,
						    "%s: %s has no such option", options[i].field,
						    problem_op_name(p->op));
	if (p->n_splits > 0 && p->split_size > 0)
		return refuse(err, "split_size", p->split_size, "n_splits is given as well");
	if (p->op == FMHA_MERGE_STATES && p->n_parts < 1)
		return refuse(err, "n_parts", p->n_parts, "below 1");
	return 0;
}

static int check_pages(const struct fmha_problem *p, struct fmha_error *err)
{
	if (p->page_size == 0) {
		if (p->n_pages != 0)
			return refuse(err, "n_pages", p->n_pages, "needs page_size");
		if (p->max_blocks != 0)
			return refuse(err, "max_blocks", p->max_blocks, "needs page_size");
		if (p->n_page_indices != 0)
			return refuse(err, "n_page_indices", p->n_page_indices, "needs page_size");
		if (p->kv_layout != FMHA_KV_LINEAR)
			return fmha_error_set_field(err, FMHA_EINVAL, "kv_layout",
						    "kv_layout: vectorized needs page_size");
		if (p->cache_batch != 0 && !fmha_tensor_present(&p->cache_batch_idx))
			return refuse(err, "cache_batch", p->cache_batch,
				      "needs tensor.cache_batch_idx");
		return 0;
	}
	if (p->n_pages < 1 && p->seqlen_k > 0)
		return refuse(err, "n_pages", p->n_pages, "below 1");
	if (p->cache_batch != 0)
		return refuse(err, "cache_batch", p->cache_batch, "a paged cache has no rows");
	if (fmha_tensor_present(&p->block_table)) {
		if (p->n_page_indices != 0)
			return refuse(err, "n_page_indices", p->n_page_indices,
				      "needs tensor.kv_page_indices");
		if ((int64_t)p->max_blocks * p->page_size < p->seqlen_k)
			return refuse(err, "max_blocks", p->max_blocks,
				      "max_blocks times page_size is below seqlen_k");
	} else if (p->max_blocks != 0) {
		return refuse(err, "max_blocks", p->max_blocks, "needs tensor.block_table");
	}
	return 0;
}

static int check_vectorized(const struct fmha_problem *p, struct fmha_error *err)
{
	uint32_t bytes = fmha_dtype_bytes(p->k.dtype);
	int32_t x;

	if (p->kv_layout != FMHA_KV_VECTORIZED || bytes == 0)
		return 0;
	x = 16 / (int32_t)bytes;
	if (p->page_size % x != 0)
		return fmha_error_set_field(
			err, FMHA_EINVAL, "page_size",
			"page_size %d: a vectorized cache needs a multiple of %d", p->page_size, x);
	if (p->hdim_q % x != 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "hdim_q",
					    "hdim_q %d: a vectorized cache needs a multiple of %d",
					    p->hdim_q, x);
	return 0;
}

static int check_append(const struct fmha_problem *p, struct fmha_error *err)
{
	struct problem_axes axes;

	problem_axes(p, &axes);
	if (p->op == FMHA_APPEND_KV && p->seqlen_new < 1)
		return refuse(err, "seqlen_new", p->seqlen_new, "append_kv needs at least 1");
	if (p->seqlen_new > p->seqlen_k)
		return fmha_error_set_field(err, FMHA_EINVAL, "seqlen_new",
					    "seqlen_new %d: above seqlen_k %d, which counts it",
					    p->seqlen_new, p->seqlen_k);
	if (p->seqlen_new > 0 && axes.k.storage == STORED_PACKED)
		return refuse(
			err, "seqlen_new", p->seqlen_new,
			"packed keys have no room: needs pages, cache_batch_idx or batch mode");
	return 0;
}

static int check_rope(const struct fmha_problem *p, struct fmha_error *err)
{
	if (p->rope == FMHA_ROPE_NONE) {
		if (p->rotary_dim != 0)
			return refuse(err, "rotary_dim", p->rotary_dim, "needs rope");
		if (p->rotary_max_pos != 0)
			return refuse(err, "rotary_max_pos", p->rotary_max_pos, "needs rope");
		return 0;
	}
	if (p->seqlen_new == 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "rope",
					    "rope: rotates what is appended, but seqlen_new is 0");
	if (p->rotary_dim < 16 || p->rotary_dim % 16 != 0)
		return refuse(err, "rotary_dim", p->rotary_dim, "not a positive multiple of 16");
	if (p->rotary_dim > p->hdim_q)
		return fmha_error_set_field(err, FMHA_EINVAL, "rotary_dim",
					    "rotary_dim %d: above hdim_q %d", p->rotary_dim,
					    p->hdim_q);
	if (p->rotary_max_pos < p->seqlen_k)
		return fmha_error_set_field(err, FMHA_EINVAL, "rotary_max_pos",
					    "rotary_max_pos %d: below seqlen_k %d",
					    p->rotary_max_pos, p->seqlen_k);
	return 0;
}

static int check_descale(const struct fmha_problem *p, struct fmha_error *err)
{
	if (p->descale_block_q != 0 && !fmha_tensor_present(&p->q_descale))
		return refuse(err, "descale_block_q", p->descale_block_q, "needs tensor.q_descale");
	if (p->descale_block_k != 0 && !fmha_tensor_present(&p->k_descale) &&
	    !fmha_tensor_present(&p->v_descale))
		return refuse(err, "descale_block_k", p->descale_block_k,
			      "needs tensor.k_descale or tensor.v_descale");
	if (!p->descale_per_page)
		return 0;
	if (p->page_size == 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "descale_per_page",
					    "descale_per_page: needs page_size");
	if (p->descale_block_k != 0)
		return refuse(err, "descale_block_k", p->descale_block_k,
			      "descale_per_page is given as well");
	return 0;
}

int problem_check(const struct fmha_problem *problem, struct fmha_error *err)
{
	int (*const steps[])(const struct fmha_problem *, struct fmha_error *) = {
		check_ranges,
		check_floats,
		check_heads,
		check_lengths,
		check_mask,
		check_options,
		check_pages,
		check_vectorized,
		check_append,
		check_rope,
		check_descale,
		problem_check_tensors,
		problem_check_aliasing,
	};
	int r;

	if (problem->struct_size != sizeof(*problem))
		return fmha_error_set_field(err, FMHA_EINVAL, "struct_size",
					    "struct_size %u: this build's is %zu",
					    problem->struct_size, sizeof(*problem));
	for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
		r = steps[i](problem, err);
		if (r < 0)
			return r;
	}
	return 0;
}
