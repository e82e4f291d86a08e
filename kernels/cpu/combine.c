/* SPDX-License-Identifier: MIT */
/*
 * combine.c: partial results of disjoint key ranges into one: the second stage of split-KV, and
 * merge_states. A row's parts are weighed by exp(LSE_s - LSE); rows are independent, and within a
 * row parts are added in their order, so that the result depends on nothing but the parts.
 */
#include <kernels/view.h>

#include "level.h"
#include "tile.h"

#include <math.h>

#include "convert.h"

enum { ROWS_PER_TASK = CPU_ROWS };

/* Rows of all sequences and heads on one axis: with one query row each, a task still has enough to
 * do. */
static int64_t n_rows(const struct abi_combine_args *a)
{
	return (int64_t)a->sequences.batch * a->nhead_q * a->sequences.seqlen_q_max;
}

/*
 * Fills weight[s], 0 for a part to be left out, and returns LSE. The largest LSE may be NaN or
 * infinite when an input was: then the row becomes NaN, as its formula says.
 */
static float row_weights(const struct abi_combine_args *a, int32_t head, const float *lse,
			 float *weight)
{
	float max = a->sink ? a->sink[head] : -INFINITY, sum;

	for (int32_t s = 0; s < a->n_splits; s++) {
		float part = lse[s * a->lse_parts_stride_split];

		if (part > max || part != part)
			max = part;
	}
	sum = a->sink && max != -INFINITY ? expf(a->sink[head] - max) : 0;
	for (int32_t s = 0; s < a->n_splits; s++) {
		float part = lse[s * a->lse_parts_stride_split];

		weight[s] = part == -INFINITY ? 0 : expf(part - max);
		sum += weight[s];
	}
	if (max == -INFINITY)
		return max;
	for (int32_t s = 0; s < a->n_splits; s++)
		weight[s] /= sum;
	return max + logf(sum);
}

/* Vectors of O summed up in registers. */
#define DIMS 8

/*
 * Dims [d, d + vectors * LANES) of the parts' weighted sum. Parts lie far from each other, and one
 * row of a part is too short for the hardware to see a pattern: asks for the next row's.
 */
static inline __attribute__((always_inline)) void
sum_parts(float *sum, const struct abi_combine_args *a, const float *weight, const char *part,
	  int64_t next, const int vectors, const int32_t dtype)
{
	const int bytes = dtype_bytes(dtype);
	vf total[DIMS];

#pragma GCC unroll 8
	for (int i = 0; i < vectors; i++)
		total[i] = (vf){0};
	for (int32_t s = 0; s < a->n_splits; s++, part += a->o_parts_stride_split * bytes) {
#pragma GCC unroll 8
		for (int i = 0; i < vectors; i++)
			if (i * LANES * bytes % 64 == 0)
				__builtin_prefetch(part + next + i * LANES * bytes);
		/* An empty part's O may hold anything. NaN is not 0: it is added. */
		if (weight[s] == 0)
			continue;
#pragma GCC unroll 8
		for (int i = 0; i < vectors; i++)
			total[i] += vf_load_as(part + i * LANES * bytes, dtype) * weight[s];
	}
#pragma GCC unroll 8
	for (int i = 0; i < vectors; i++)
		vf_store(sum + i * LANES, total[i]);
}

/* Returns how many dims it did. */
static inline __attribute__((always_inline)) int32_t sum_vectors(float *sum,
								 const struct abi_combine_args *a,
								 const float *weight, int64_t from,
								 const int32_t dtype)
{
	const char *part = (const char *)a->o_parts.data + from * dtype_bytes(dtype);
	int64_t next = a->o_parts.stride_seq * dtype_bytes(dtype);
	int32_t d = 0;

	for (; d + DIMS * LANES <= a->hdim_v; d += DIMS * LANES)
		sum_parts(sum + d, a, weight, part + d * dtype_bytes(dtype), next, DIMS, dtype);
	for (; d + LANES <= a->hdim_v; d += LANES)
		sum_parts(sum + d, a, weight, part + d * dtype_bytes(dtype), next, 1, dtype);
	return d;
}

/* @scratch: n_splits weights, then a row of hdim_v. */
static void row_combine(const struct abi_combine_args *a, const struct view_sequence *v,
			int32_t head, int32_t row, float *scratch)
{
	float *weight = scratch, *sum = weight + a->n_splits;
	int64_t from = view_q_offset(&a->o_parts, v, row, head);
	float lse = row_weights(
		a, head, a->lse_parts.data + view_rows_offset(&a->lse_parts, v, row, head), weight);
	int32_t d = 0;

	if (a->o_parts.stride_dim == 1)
		d = a->o_parts_dtype == ABI_F32   ? sum_vectors(sum, a, weight, from, ABI_F32)
		    : a->o_parts_dtype == ABI_F16 ? sum_vectors(sum, a, weight, from, ABI_F16)
						  : sum_vectors(sum, a, weight, from, ABI_BF16);
	for (; d < a->hdim_v; d++) {
		sum[d] = 0;
		for (int32_t s = 0; s < a->n_splits; s++)
			if (weight[s] != 0)
				sum[d] += weight[s] * load_one(a->o_parts.data, a->o_parts_dtype,
							       from + s * a->o_parts_stride_split +
								       d * a->o_parts.stride_dim);
	}
	store_row(a->o.data, a->o_dtype, view_q_offset(&a->o, v, row, head), a->o.stride_dim, sum,
		  a->hdim_v);
	if (a->lse.data)
		a->lse.data[view_rows_offset(&a->lse, v, row, head)] = lse;
}

static void combine_run(const void *args, int phase, int64_t task, int n_threads, void *workspace,
			void *scratch)
{
	const struct abi_combine_args *a = args;
	int64_t end = (task + 1) * ROWS_PER_TASK;

	(void)phase, (void)n_threads, (void)workspace;
	if (end > n_rows(a))
		end = n_rows(a);
	for (int64_t i = task * ROWS_PER_TASK; i < end; i++) {
		int32_t row = (int32_t)(i % a->sequences.seqlen_q_max);
		int64_t head = i / a->sequences.seqlen_q_max;
		struct view_sequence v = view_sequence(&a->sequences, NULL,
						       (int32_t)(head / a->nhead_q));

		if (i % 8 == 0 && !cpu_goes_on()) /* parts may be many */
			return;
		if (row < v.q_len && v.q_len >= a->min_seqlen_q)
			row_combine(a, &v, (int32_t)(head % a->nhead_q), row, scratch);
	}
}

static int64_t combine_tasks(const void *args, int phase, int n_threads)
{
	(void)phase, (void)n_threads;
	return (n_rows(args) + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
}

static int combine_accepts(const void *args)
{
	const struct abi_combine_args *a = args;

	return a->o_parts_dtype <= ABI_BF16;
}

static size_t combine_workspace(const void *args, int n_threads)
{
	(void)args, (void)n_threads;
	return 0;
}

static size_t combine_scratch(const void *args)
{
	const struct abi_combine_args *a = args;

	return sizeof(float) * ((size_t)a->n_splits + (size_t)a->hdim_v);
}

#define COMBINE(type)                                                                              \
	{                                                                                          \
		.family = ABI_FWD_SPLITKV_COMBINE, .dtype = type, .level = CPU_LEVEL,              \
		.pipeline = "cpu_rows", .accepts = combine_accepts,                                \
		.workspace_bytes = combine_workspace, .scratch_bytes = combine_scratch,            \
		.n_phases = 1, .n_tasks = combine_tasks, .run = combine_run,                       \
	}

/* dtype is that of O; parts may have another. */
const struct cpu_kernel CPU_NAME(cpu_combine_kernels)[] = {
	COMBINE(ABI_F32),
	COMBINE(ABI_F16),
	COMBINE(ABI_BF16),
};
const size_t CPU_NAME(cpu_combine_n_kernels) = 3;
