/* SPDX-License-Identifier: MIT */
/*
 * forward.c: attention forward, one row of S at a time.
 *
 *   s_j = scale * q . k_j;  soft cap;  + bias;  + ALiBi;  columns that the row does not see are out
 *   l = sum_j exp(s_j - m);  o = sum_j dropout(exp(s_j - m) / l) v_j;  LSE = m + ln(l)
 *
 * One text serves both the double-precision judge and the rounded yardstick: held() is applied
 * wherever a value would be held in the narrow type, and it changes nothing for the judge.
 *
 * The keys and values of one head are first copied out of whatever layout they have, in double and
 * with their descale factors, K transposed: the inner loops then run along columns and the compiler
 * can vectorise them without reordering any sum.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define EXACT UINT32_MAX /* a dtype that rounds nothing */

struct head {
	const struct abi_fwd_args *args;
	uint32_t round_dtype, weight_dtype; /* of S and O, of P */
	struct view_sequence s;
	int32_t h, h_k;
	int32_t n_keys; /* columns: k_len, or those that are chosen */
	double *k;      /* [hdim_q, n_keys] */
	double *v;      /* [n_keys, hdim_v] */
	double *p;      /* [n_keys]: s_j, then exp(s_j - m); not meaningful where !seen */
	bool *seen;     /* [n_keys] */
	bool *there;    /* [n_keys] */
};

static double rounded(uint32_t dtype, double value)
{
	return dtype == EXACT ? value : reference_round(dtype, value);
}

static double held(const struct head *head, double value)
{
	return rounded(head->round_dtype, value);
}

/* sum += factor * x, elementwise; the yardstick keeps its sums in float. */
static void add_scaled(const struct head *head, double *restrict sum, double factor,
		       const double *restrict x, int32_t n)
{
	if (head->round_dtype == EXACT) {
		for (int32_t i = 0; i < n; i++)
			sum[i] += factor * x[i];
	} else {
		for (int32_t i = 0; i < n; i++)
			sum[i] = (float)(sum[i] + factor * x[i]);
	}
}

/* Element d of a latent of fp8 that begins at @key. */
static double load_latent(const char *key, int32_t d)
{
	float factor;

	if (d >= ABI_LATENT_CODES)
		return reference_load(key + ABI_LATENT_REST, ABI_BF16, d - ABI_LATENT_CODES);
	memcpy(&factor, key + ABI_LATENT_FACTORS + d / ABI_LATENT_BLOCK * 4, sizeof(factor));
	return reference_load(key, ABI_E4M3, d) * (double)factor;
}

/* Element d of K or V at @at: the number that stands there times its descale factor. */
static double load_key(const struct head *head, bool is_v, const struct view_place *at, int32_t d)
{
	const struct abi_fwd_args *a = head->args;
	const struct abi_tensor *t = is_v ? &a->v : &a->k;
	const struct abi_descale *descale = is_v ? &a->v_descale : &a->k_descale;
	uint32_t dtype = (uint32_t)view_kv_dtype(a);
	int32_t hdim = is_v ? a->hdim_v : a->hdim_q, x = 16 / reference_dtype_bytes(dtype);
	bool is_latent = a->cache.layout == ABI_KV_LATENT_FP8;
	int64_t index;

	if (a->cache.page_size)
		index = view_page_offset(&a->cache, t, at->page, at->slot, head->h_k,
					 is_latent ? 0 : d, a->nhead_k, hdim, x, is_v);
	else
		index = view_cache_offset(&a->cache, t, &head->s, at->position, head->h_k,
					  is_latent ? 0 : d, a->nhead_k, hdim, x, is_v);
	if (is_latent)
		return load_latent((const char *)t->data + index, d);
	return reference_load(t->data, dtype, index) *
	       (double)view_descale(descale, head->s.batch, head->h_k,
				    descale->per_page ? at->slot : at->position, at->page,
				    a->cache.page_size);
}

static bool place_of(const struct head *head, int32_t i, int32_t j, struct view_place *ret_at)
{
	const struct abi_fwd_args *a = head->args;

	if (a->chosen.data)
		return view_chosen_place(a, &head->s, i, j, ret_at);
	*ret_at = (struct view_place){.position = head->s.leftpad + j};
	if (a->cache.page_size) {
		ret_at->page = view_page(&a->cache, &head->s, ret_at->position);
		ret_at->slot = ret_at->position % a->cache.page_size;
	}
	return true;
}

/* @i: the row that they are chosen for. */
static void load_keys(struct head *head, int32_t i)
{
	const struct abi_fwd_args *a = head->args;
	int32_t n = head->n_keys;
	struct view_place at;

	for (int32_t j = 0; j < n; j++) {
		head->there[j] = place_of(head, i, j, &at);
		if (!head->there[j])
			continue;
		for (int32_t d = 0; d < a->hdim_q; d++)
			head->k[(int64_t)d * n + j] = load_key(head, false, &at, d);
		for (int32_t d = 0; d < a->hdim_v; d++)
			head->v[(int64_t)j * a->hdim_v + d] = load_key(head, true, &at, d);
	}
}

/* Leaves s_j of row i in p. */
static void scores(struct head *head, int32_t i)
{
	const struct abi_fwd_args *a = head->args;
	int64_t q = view_q_offset(&a->q, &head->s, i, head->h);
	int64_t bias = view_q_offset(&a->bias, &head->s, i, head->h);
	double q_factor = (double)view_descale(&a->q_descale, head->s.batch, head->h, i, 0, 0);
	double slope = a->alibi_slopes
			       ? a->alibi_slopes[head->s.batch * a->alibi_stride_batch + head->h]
			       : 0;
	double *s = head->p;
	int32_t n = head->n_keys;

	for (int32_t j = 0; j < n; j++)
		s[j] = 0;
	for (int32_t d = 0; d < a->hdim_q; d++)
		add_scaled(head, s,
			   reference_load(a->q.data, (uint32_t)a->dtype, q + d * a->q.stride_dim),
			   head->k + (int64_t)d * n, n);
	for (int32_t j = 0; j < n; j++) {
		s[j] = held(head, s[j] * q_factor * a->scale);
		if (a->logits_soft_cap > 0)
			s[j] = held(head, a->logits_soft_cap * tanh(s[j] / a->logits_soft_cap));
		if (a->bias.data)
			s[j] = held(head,
				    s[j] + reference_load(a->bias.data, (uint32_t)a->bias_dtype,
							  bias + j * a->bias.stride_dim));
		if (a->alibi_slopes)
			s[j] = held(head, s[j] + view_alibi(slope, &head->s, i, j));
		head->seen[j] = head->there[j] && view_visible(&a->band, &head->s, i, j) &&
				view_data_visible(&a->mask_data, &head->s, head->h, i, j);
	}
}

/* Turns p into exp(s_j - m); returns their sum l, and m. A row that sees nothing: l 0. */
static double exponentials(struct head *head, double *ret_max)
{
	double max = -INFINITY, sum = 0;
	int32_t n = head->n_keys;

	for (int32_t j = 0; j < n; j++)
		if (head->seen[j])
			max = fmax(max, head->p[j]);
	if (head->args->sink)
		max = fmax(max, head->args->sink[head->h]);
	if (max == -INFINITY)
		max = 0;
	for (int32_t j = 0; j < n; j++) {
		if (!head->seen[j])
			continue;
		head->p[j] = exp(head->p[j] - max);
		add_scaled(head, &sum, 1, &head->p[j], 1);
	}
	if (head->args->sink)
		sum += exp(head->args->sink[head->h] - max);
	*ret_max = max;
	return sum;
}

/* Fills o [hdim_v] and randval [k_len] of row i; returns its LSE. */
static double forward_row(struct head *head, int32_t i, double *o, uint8_t *randval)
{
	const struct abi_fwd_args *a = head->args;
	const struct abi_dropout *dropout = &a->dropout;
	double max, sum, keep = 1;
	uint8_t byte;

	scores(head, i);
	sum = exponentials(head, &max);
	for (int32_t d = 0; d < a->hdim_v; d++)
		o[d] = 0;
	for (int32_t j = 0; j < head->n_keys; j++) {
		if (dropout->p_drop > 0) {
			byte = reference_dropout_byte(
				dropout->seed, dropout->offset, (uint32_t)head->s.batch,
				(uint32_t)head->h, (uint32_t)a->nhead_q,
				(uint32_t)i + 16U * (uint32_t)dropout->row_block,
				(uint32_t)j + 32U * (uint32_t)dropout->column_block);
			keep = byte <= dropout->keep_at_most ? (double)dropout->p_keep_inverse : 0;
			if (randval)
				randval[j] = byte;
		}
		if (head->seen[j])
			add_scaled(head, o, rounded(head->weight_dtype, head->p[j]) * keep,
				   head->v + (int64_t)j * a->hdim_v, a->hdim_v);
	}
	for (int32_t d = 0; d < a->hdim_v; d++)
		o[d] = sum == 0 ? 0 : held(head, o[d] / sum);
	return sum == 0 ? -INFINITY : max + log(sum);
}

static void forward_head(struct head *head, double *o, double *lse, uint8_t *randval)
{
	const struct abi_fwd_args *a = head->args;
	const struct abi_sequences *sequences = &a->sequences;
	int64_t b = head->s.batch, rows = sequences->seqlen_q_max, row, stat;
	double row_lse;

	for (int32_t i = 0; i < head->s.q_len; i++) {
		if (a->chosen.data)
			load_keys(head, i);
		if (head->s.packed_q) {
			row = head->s.q_start + i;
			stat = (int64_t)head->h * sequences->total_q + row;
		} else {
			row = b * rows + i;
			stat = (b * a->nhead_q + head->h) * rows + i;
		}
		row_lse = forward_row(head, i, o + (row * a->nhead_q + head->h) * a->hdim_v,
				      randval ? randval + stat * sequences->seqlen_k_max : NULL);
		if (lse)
			lse[stat] = row_lse;
	}
}

static void head_deinit(struct head *head)
{
	free(head->k);
	free(head->v);
	free(head->p);
	free(head->seen);
	free(head->there);
}

static int head_init(struct head *head, const struct abi_fwd_args *args, uint32_t round_dtype,
		     uint32_t weight_dtype)
{
	size_t longest = 1;

	*head = (struct head){
		.args = args, .round_dtype = round_dtype, .weight_dtype = weight_dtype};
	for (int32_t b = 0; b < args->sequences.batch; b++) {
		head->s = view_sequence(&args->sequences, &args->cache, b);
		if ((size_t)head->s.k_len > longest)
			longest = (size_t)head->s.k_len;
	}
	if (args->chosen.n)
		longest = (size_t)args->chosen.n;
	head->k = calloc(longest * (size_t)args->hdim_q, sizeof(*head->k));
	head->v = calloc(longest * (size_t)args->hdim_v, sizeof(*head->v));
	head->p = calloc(longest, sizeof(*head->p));
	head->seen = calloc(longest, sizeof(*head->seen));
	head->there = calloc(longest, sizeof(*head->there));
	if (head->k && head->v && head->p && head->seen && head->there)
		return 0;
	head_deinit(head);
	return -1;
}

static int forward(const struct abi_fwd_args *args, uint32_t round_dtype, uint32_t weight_dtype,
		   double *o, double *lse, uint8_t *randval)
{
	struct head head;
	int32_t group = args->nhead_q / args->nhead_k;

	if (head_init(&head, args, round_dtype, weight_dtype) < 0)
		return -1;
	for (int32_t b = 0; b < args->sequences.batch; b++) {
		head.s = view_sequence(&args->sequences, &args->cache, b);
		head.n_keys = args->chosen.data ? args->chosen.n : head.s.k_len;
		if (head.s.q_len < args->min_seqlen_q)
			continue;
		for (head.h = 0; head.h < args->nhead_q; head.h++) {
			head.h_k = head.h / group;
			if (head.h % group == 0 && !args->chosen.data)
				load_keys(&head, 0);
			forward_head(&head, o, lse, randval);
		}
	}
	head_deinit(&head);
	return 0;
}

int reference_forward(const struct abi_fwd_args *args, double *o, double *lse, uint8_t *randval)
{
	return forward(args, EXACT, EXACT, o, lse, randval);
}

int reference_forward_rounded(const struct abi_fwd_args *args, uint32_t round_dtype,
			      uint32_t weight_dtype, double *o, double *lse)
{
	return forward(args, round_dtype, weight_dtype, o, lse, NULL);
}
