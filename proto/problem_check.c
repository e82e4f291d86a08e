/* SPDX-License-Identifier: MIT */
/*
 * problem_check.c: is this a sound problem, as far as no device is needed to tell? First every
 * number on its own, then numbers against each other; tensors are checked by problem_tensors.c.
 * Everything behind this check may multiply sizes as int64_t without a second thought.
 */
#include <proto/problem.h>

#include <inttypes.h>
#include <math.h>

#include <proto/error.h>

#include "problem_internal.h"

static int refuse(struct fmha_error *err, const char *field, int32_t value, const char *rule)
{
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s %d: %s", field, value, rule);
}

static int refuse_above(struct fmha_error *err, const char *field, int32_t value,
			const char *beside, int32_t most)
{
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s %d: above %s %d", field, value,
				    beside, most);
}

/* ---- each number on its own ---- */

static int check_choices(const struct fmha_problem *p, struct fmha_error *err)
{
	for (size_t i = 0; i < PROBLEM_N_FIELDS; i++) {
		const struct problem_field *field = &problem_fields[i];
		int64_t value = problem_field_value(p, field);

		if ((field->type == PROBLEM_CHOICE || field->type == PROBLEM_FLAG) &&
		    value > field->most)
			return fmha_error_set_field(err, FMHA_EINVAL, field->name,
						    "%s %" PRId64 ": above %" PRId64
						    ", the last one defined",
						    field->name, value, field->most);
	}
	return 0;
}

static int check_ranges(const struct fmha_problem *p, struct fmha_error *err)
{
	for (size_t i = 0; i < PROBLEM_N_FIELDS; i++) {
		const struct problem_field *field = &problem_fields[i];
		int64_t value = problem_field_value(p, field);

		if (field->type == PROBLEM_SIZE ? !(field->ops & OP_BIT(p->op))
						: field->type != PROBLEM_NUMBER)
			continue;
		if (value < field->least)
			return fmha_error_set_field(err, FMHA_EINVAL, field->name,
						    "%s %" PRId64 ": below %" PRId64, field->name,
						    value, field->least);
		if (value > field->most)
			return fmha_error_set_field(err, FMHA_EINVAL, field->name,
						    "%s %" PRId64 ": above %" PRId64, field->name,
						    value, field->most);
	}
	return 0;
}

static int check_floats(const struct fmha_problem *p, struct fmha_error *err)
{
	if (isinf(p->scale))
		return fmha_error_refuse(err, "scale", "infinite");
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

/* Dropout's random numbers come in patches: a part begins where one does. */
static int check_dropout_place(const struct fmha_problem *p, struct fmha_error *err)
{
	if (p->dropout_row % 16 != 0)
		return refuse(err, "dropout_row", p->dropout_row, "not a multiple of 16");
	if (p->dropout_column % 32 != 0)
		return refuse(err, "dropout_column", p->dropout_column, "not a multiple of 32");
	if ((int64_t)p->dropout_row + p->seqlen_q > INT32_MAX)
		return refuse(err, "dropout_row", p->dropout_row,
			      "the last row would be beyond 2^31 - 1");
	if ((int64_t)p->dropout_column + p->seqlen_k > INT32_MAX)
		return refuse(err, "dropout_column", p->dropout_column,
			      "the last key would be beyond 2^31 - 1");
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
		return refuse_above(err, "seqlen_q", p->seqlen_q, "total_q", p->total_q);
	problem_axes(p, &axes);
	if (axes.k.storage == STORED_NOT)
		return 0;
	if (axes.k.storage != STORED_PACKED && p->total_k != 0)
		return refuse(err, "total_k", p->total_k, "a paged or indexed cache is not packed");
	if (axes.k.storage == STORED_PACKED && p->seqlen_k > p->total_k)
		return refuse_above(err, "seqlen_k", p->seqlen_k, "total_k", p->total_k);
	return 0;
}

#define NEEDS_MASK "of mask top_left or bottom_right, and mask is none"

static int check_mask(const struct fmha_problem *p, struct fmha_error *err)
{
	if (p->mask_endpoints > 0 && p->mask_endpoints % 2 == 0)
		return refuse(err, "mask_endpoints", p->mask_endpoints, "even, must be odd");
	if (p->mask_endpoints > 0 && !fmha_tensor_present(&p->mask_intervals))
		return refuse(err, "mask_endpoints", p->mask_endpoints,
			      "needs tensor.mask_intervals");
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

/* Options that an operation does not have must stay neutral: ignoring them would hide a mistake. */
static int check_options(const struct fmha_problem *p, struct fmha_error *err)
{
	for (size_t i = 0; i < PROBLEM_N_FIELDS; i++) {
		const struct problem_field *field = &problem_fields[i];

		if (field->type != PROBLEM_SIZE && !(field->ops & OP_BIT(p->op)) &&
		    problem_field_value(p, field) != field->neutral)
			return fmha_error_set_field(err, FMHA_EINVAL, field->name,
						    "%s: %s has no such option", field->name,
						    problem_op_name(p->op));
	}
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
		if (p->kv_layout == FMHA_KV_VECTORIZED)
			return fmha_error_refuse(err, "kv_layout", "vectorized needs page_size");
		if (p->cache_batch != 0 && !fmha_tensor_present(&p->cache_batch_idx))
			return refuse(err, "cache_batch", p->cache_batch,
				      "needs tensor.cache_batch_idx");
		return 0;
	}
	if (p->n_pages < 1 && (p->seqlen_k > 0 || fmha_tensor_present(&p->slot_mapping)))
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
	if (axes.k.storage == STORED_SLOTS) {
		if (p->seqlen_k != 0)
			return refuse(err, "seqlen_k", p->seqlen_k,
				      p->topk > 0 ? "tensor.indices says which slots are read"
						  : "tensor.slot_mapping says where rows go");
		if (p->topk == 0 && fmha_tensor_present(&p->q) && p->seqlen_q != p->seqlen_new)
			return fmha_error_set_field(err, FMHA_EINVAL, "seqlen_q",
						    "seqlen_q %d: q turns with k_new, which has %d "
						    "rows",
						    p->seqlen_q, p->seqlen_new);
		return 0;
	}
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
		return fmha_error_refuse(err, "rope",
					 "rotates what is appended, but seqlen_new is 0");
	if (p->rotary_dim < 16 || p->rotary_dim % 16 != 0)
		return refuse(err, "rotary_dim", p->rotary_dim, "not a positive multiple of 16");
	if (p->rotary_dim > p->hdim_q)
		return refuse_above(err, "rotary_dim", p->rotary_dim, "hdim_q", p->hdim_q);
	if (p->rotary_max_pos < p->seqlen_k)
		return fmha_error_set_field(err, FMHA_EINVAL, "rotary_max_pos",
					    "rotary_max_pos %d: below seqlen_k %d",
					    p->rotary_max_pos, p->seqlen_k);
	return 0;
}

static int check_descale(const struct fmha_problem *p, struct fmha_error *err)
{
	struct problem_axes axes;

	problem_axes(p, &axes);
	if (p->descale_block_q != 0 && !fmha_tensor_present(&p->q_descale))
		return refuse(err, "descale_block_q", p->descale_block_q, "needs tensor.q_descale");
	if (p->descale_block_k != 0 && !fmha_tensor_present(&p->k_descale) &&
	    !fmha_tensor_present(&p->v_descale))
		return refuse(err, "descale_block_k", p->descale_block_k,
			      "needs tensor.k_descale or tensor.v_descale");
	if (p->descale_computed && !(p->descale_per_page && p->descale_block_k == 1 &&
				     fmha_tensor_present(&p->slot_mapping)))
		return fmha_error_refuse(
			err, "descale_computed",
			"needs tensor.slot_mapping, descale_per_page and descale_block_k 1");
	/* A row by slots has no place in its sequence. */
	if (axes.k.storage == STORED_SLOTS && p->descale_block_k && !p->descale_per_page)
		return refuse(err, "descale_block_k", p->descale_block_k,
			      "by slots it needs descale_per_page");
	if (!p->descale_per_page)
		return 0;
	if (p->page_size == 0)
		return fmha_error_refuse(err, "descale_per_page", "needs page_size");
	if (p->descale_block_k > p->page_size)
		return refuse(err, "descale_block_k", p->descale_block_k,
			      "above page_size, and descale_per_page counts slots of a page");
	return 0;
}

/* Values that are part of the keys. */
static int check_latent(const struct fmha_problem *p, struct fmha_error *err)
{
	bool is_latent = p->kv_layout == FMHA_KV_LATENT_FP8;

	if (is_latent && !p->v_in_k)
		return fmha_error_refuse(err, "kv_layout", "latent_fp8 needs v_in_k");
	if (!p->v_in_k)
		return 0;
	if (p->hdim_v > p->hdim_q)
		return fmha_error_set_field(err, FMHA_EINVAL, "hdim_v",
					    "hdim_v %d: above hdim_q %d, which holds it (v_in_k)",
					    p->hdim_v, p->hdim_q);
	if (p->kv_layout == FMHA_KV_VECTORIZED)
		return fmha_error_refuse(err, "kv_layout",
					 "vectorized keys hold no values (v_in_k)");
	if (p->rope != FMHA_ROPE_NONE)
		return fmha_error_refuse(err, "rope",
					 "turns first elements, which v_in_k makes values");
	if (!is_latent)
		return 0;
	if (p->nhead_k != 1)
		return refuse(err, "nhead_k", p->nhead_k, "latent_fp8 has 1");
	if (p->hdim_q != 576)
		return refuse(err, "hdim_q", p->hdim_q, "latent_fp8 has 576");
	if (p->hdim_v != 512)
		return refuse(err, "hdim_v", p->hdim_v, "latent_fp8 has 512");
	if (p->k.dtype != FMHA_E4M3)
		return fmha_error_refuse(err, "tensor.k.dtype", "latent_fp8 is of e4m3");
	if (p->op == FMHA_FORWARD && p->q.dtype == FMHA_E4M3)
		return fmha_error_refuse(err, "tensor.q.dtype", "latent_fp8 takes f16 or bf16");
	if (p->seqlen_new > 0 && p->k_new.dtype == FMHA_E4M3)
		return fmha_error_refuse(err, "tensor.k_new.dtype", "latent_fp8 takes f16 or bf16");
	if (fmha_tensor_present(&p->k_descale))
		return fmha_error_refuse(err, "tensor.k_descale",
					 "latent_fp8 has factors of its own");
	return 0;
}

static int check_chosen(const struct fmha_problem *p, struct fmha_error *err)
{
	if (p->topk == 0)
		return 0;
	if (p->mask != FMHA_MASK_NONE)
		return fmha_error_refuse(err, "mask", "with topk, indices say what a row sees");
	if (p->dropout_p > 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "dropout_p",
					    "dropout_p %g: not with topk", (double)p->dropout_p);
	if (p->n_splits > 1)
		return refuse(err, "n_splits", p->n_splits, "keys that are chosen are not split");
	if (p->split_size > 0)
		return refuse(err, "split_size", p->split_size,
			      "keys that are chosen are not split");
	if (p->seqlen_new > 0)
		return refuse(err, "seqlen_new", p->seqlen_new, "not with topk: append first");
	if (p->kv_layout == FMHA_KV_VECTORIZED)
		return fmha_error_refuse(err, "kv_layout",
					 "vectorized keys are not chosen by topk");
	return 0;
}

int problem_check(const struct fmha_problem *problem, struct fmha_error *err)
{
	int (*const steps[])(const struct fmha_problem *, struct fmha_error *) = {
		check_choices,
		check_ranges,
		check_floats,
		check_heads,
		check_lengths,
		check_dropout_place,
		check_mask,
		check_options,
		check_pages,
		check_vectorized,
		check_append,
		check_rope,
		check_latent,
		check_chosen,
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
