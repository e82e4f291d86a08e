/* SPDX-License-Identifier: MIT */
/*
 * bwd_rows.c: the first and the last stage of backward, both bound by memory.
 *
 * dot_do_o: d = rowsum(dO * O) - dLSE. The first is sum_j P_j dP_j of the row, dropout and sink
 * included, since O = sum_j r_j P_j V_j. Then dsink = -sum over rows of exp(sink - LSE) d.
 * convert_dq: dQ = scale * (sum of the splits, in order), rounded once.
 */
#include "level.h"

#include <math.h>

#include <kernels/view.h>

#include "bwd.h"
#include "tile.h"
#include "convert.h"

enum { ROWS_PER_TASK = CPU_BACKWARD_TASK };

static int64_t row_tasks(const struct abi_bwd_args *a)
{
	int64_t blocks = (a->sequences.seqlen_q_max + ROWS_PER_TASK - 1) / ROWS_PER_TASK;

	return (int64_t)a->sequences.batch * a->nhead_q * blocks;
}

struct row_block {
	struct view_sequence sequence;
	int32_t head, begin, end;
};

static struct row_block row_block(const struct abi_bwd_args *a, int64_t task)
{
	int64_t blocks = (a->sequences.seqlen_q_max + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
	int64_t head = task / blocks;
	struct row_block r = {
		.sequence = view_sequence(&a->sequences, NULL, head / a->nhead_q),
		.head = head % a->nhead_q,
		.begin = task % blocks * ROWS_PER_TASK,
	};

	r.end = r.begin + ROWS_PER_TASK;
	if (r.end > r.sequence.q_len)
		r.end = r.sequence.q_len;
	return r;
}

/* One row of @t as @width floats, zeros after the @n that exist. */
static void load_floats(float *to, int32_t width, const struct abi_tensor *t, int64_t offset,
			int32_t n, uint32_t dtype)
{
	load_row(to, t->data, dtype, offset, t->stride_dim, n);
	for (int32_t i = n; i < width; i++)
		to[i] = 0;
}

/* @scratch: two rows of hdim_v rounded up to vectors. */
static float row_dot(const struct abi_bwd_args *a, int64_t d_o_offset, int64_t o_offset,
		     float *scratch)
{
	int32_t width = ROUND_UP(a->hdim_v, LANES);
	const float *d_o = (const float *)a->d_o.data + d_o_offset;
	const float *o = (const float *)a->o.data + o_offset;
	vf sum = {0};

	if (a->dtype != ABI_F32 || a->d_o.stride_dim != 1 || a->o.stride_dim != 1 ||
	    width != a->hdim_v) {
		load_floats(scratch, width, &a->d_o, d_o_offset, a->hdim_v, a->dtype);
		load_floats(scratch + width, width, &a->o, o_offset, a->hdim_v, a->dtype);
		d_o = scratch;
		o = scratch + width;
	}
	for (int32_t i = 0; i < width; i += LANES)
		sum += vf_load(d_o + i) * vf_load(o + i);
	return vf_reduce_add(sum);
}

/* What reaches LSE itself; rows that see no key have no use for it. */
static float lse_gradient(const struct abi_bwd_args *a, const struct row_block *r, int32_t row)
{
	if (!a->dlse.data ||
	    a->lse.data[view_rows_offset(&a->lse, &r->sequence, row, r->head)] == -INFINITY)
		return 0;
	return a->dlse.data[view_rows_offset(&a->dlse, &r->sequence, row, r->head)];
}

static void sink_gradient(const struct abi_bwd_args *a, int32_t head)
{
	double sum = 0;

	for (int32_t b = 0; b < a->sequences.batch; b++) {
		struct view_sequence v = view_sequence(&a->sequences, NULL, b);

		for (int32_t i = 0; i < v.q_len; i++) {
			double lse = a->lse.data[view_rows_offset(&a->lse, &v, i, head)];
			double d = a->d.data[view_rows_offset(&a->d, &v, i, head)];

			if (i % ROWS_PER_TASK == 0 && !cpu_goes_on())
				return;
			if (lse > -INFINITY || lse != lse)
				sum -= exp(a->sink[head] - lse) * d;
		}
	}
	a->dsink[head] = (float)sum;
}

static void dot_do_o_run(const void *args, int phase, int64_t task, int n_threads, void *workspace,
			 void *scratch)
{
	const struct abi_bwd_args *a = args;

	(void)n_threads, (void)workspace;
	if (phase == 0) {
		struct row_block r = row_block(a, task);

		for (int32_t i = r.begin; i < r.end; i++)
			a->d.data[view_rows_offset(&a->d, &r.sequence, i, r.head)] =
				row_dot(a, view_q_offset(&a->d_o, &r.sequence, i, r.head),
					view_q_offset(&a->o, &r.sequence, i, r.head), scratch) -
				lse_gradient(a, &r, i);
	} else {
		sink_gradient(a, (int32_t)task);
	}
}

static int64_t dot_do_o_tasks(const void *args, int phase, int n_threads)
{
	const struct abi_bwd_args *a = args;

	(void)n_threads;
	if (phase == 0)
		return row_tasks(a);
	return a->sink && a->dsink ? a->nhead_q : 0;
}

static void convert_dq_run(const void *args, int phase, int64_t task, int n_threads,
			   void *workspace, void *scratch)
{
	const struct abi_bwd_args *a = args;
	struct row_block r = row_block(a, task);
	int32_t n_splits = bwd_n_splits(a, r.sequence.batch);
	float *sum = scratch;

	(void)phase, (void)n_threads, (void)workspace;
	for (int32_t i = r.begin; i < r.end; i++) {
		memset(sum, 0, sizeof(float) * a->hdim_q);
		if (n_splits > 0) /* without keys there may be none */
			memcpy(sum, bwd_dq_acc(a, &r.sequence, r.head, 0, i),
			       sizeof(float) * a->hdim_q);
		for (int32_t s = 1; s < n_splits; s++) {
			const float *part = bwd_dq_acc(a, &r.sequence, r.head, s, i);

			for (int32_t d = 0; d < a->hdim_q; d++)
				sum[d] += part[d];
		}
		for (int32_t d = 0; d < a->hdim_q; d++)
			sum[d] *= a->scale;
		store_row(a->dq.data, a->dtype, view_q_offset(&a->dq, &r.sequence, i, r.head),
			  a->dq.stride_dim, sum, a->hdim_q);
	}
}

static int64_t convert_dq_tasks(const void *args, int phase, int n_threads)
{
	(void)phase, (void)n_threads;
	return row_tasks(args);
}

static int dot_do_o_accepts(const void *args)
{
	const struct abi_bwd_args *a = args;

	return a->dtype <= ABI_BF16;
}

static int convert_dq_accepts(const void *args)
{
	const struct abi_bwd_args *a = args;

	return a->dtype <= ABI_BF16 && a->dq_acc;
}

static size_t no_bytes(const void *args, int n_threads)
{
	(void)args, (void)n_threads;
	return 0;
}

static size_t dot_do_o_scratch(const void *args)
{
	const struct abi_bwd_args *a = args;

	return sizeof(float) * 2 * ROUND_UP(a->hdim_v, LANES);
}

static size_t convert_dq_scratch(const void *args)
{
	const struct abi_bwd_args *a = args;

	return sizeof(float) * a->hdim_q;
}

#define DOT_DO_O(type)                                                                             \
	{                                                                                          \
		.family = ABI_BWD_DOT_DO_O, .dtype = type, .level = CPU_LEVEL,                     \
		.pipeline = "cpu_rows", .accepts = dot_do_o_accepts, .workspace_bytes = no_bytes,  \
		.scratch_bytes = dot_do_o_scratch, .n_phases = 2, .n_tasks = dot_do_o_tasks,       \
		.run = dot_do_o_run,                                                               \
	}

#define CONVERT_DQ(type)                                                                           \
	{                                                                                          \
		.family = ABI_BWD_CONVERT_DQ, .dtype = type, .level = CPU_LEVEL,                   \
		.pipeline = "cpu_rows", .accepts = convert_dq_accepts,                             \
		.workspace_bytes = no_bytes, .scratch_bytes = convert_dq_scratch, .n_phases = 1,   \
		.n_tasks = convert_dq_tasks, .run = convert_dq_run,                                \
	}

const struct cpu_kernel CPU_NAME(cpu_bwd_rows_kernels)[] = {
	DOT_DO_O(ABI_F32),   DOT_DO_O(ABI_F16),   DOT_DO_O(ABI_BF16),
	CONVERT_DQ(ABI_F32), CONVERT_DQ(ABI_F16), CONVERT_DQ(ABI_BF16),
};
const size_t CPU_NAME(cpu_bwd_rows_n_kernels) = 6;
