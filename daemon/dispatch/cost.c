/* SPDX-License-Identifier: MIT */
/*
 * cost.c: what a problem costs at least. Multiplies and adds are counted apart; (row, column) pairs
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
#include <stdlib.h>

#include "internal.h"

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

static double pairs_of(const struct fmha_problem *p)
{
	int64_t q = p->seqlen_q, k = p->seqlen_k, batch = p->batch;

	if (batch == 0)
		return 0;
	if (p->mode == FMHA_GROUP) {
		q = ceil_div(p->total_q, batch);
		if (plan_present(p, FMHA_T_SEQSTART_K))
			k = ceil_div(p->total_k, batch);
	}
	return (double)batch * cost_visible_pairs(q, k, p);
}

static double rows_of(const struct fmha_problem *p)
{
	struct problem_axes axes;

	problem_axes(p, &axes);
	return (double)axes.q.outer * (double)axes.q.length;
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
			double used = (double)p->batch * p->seqlen_k * p->nhead_k *
				      (role == FMHA_T_K ? p->hdim_q : p->hdim_v);

			if (used < elements)
				elements = used;
		}
		if ((role == FMHA_T_K || role == FMHA_T_V) && p->op == FMHA_APPEND_KV)
			elements = (double)p->batch * p->seqlen_new * p->nhead_k *
				   (role == FMHA_T_K ? p->hdim_q : p->hdim_v);
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
#define LEAST_ROWS   12
#define PACKING_ROWS 32
#define UNPACKED     2

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
