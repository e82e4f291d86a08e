/* SPDX-License-Identifier: MIT */
/*
 * bench_cpu_backward.c: backward, all three stages together, against the multiply-add peak by its
 * own FLOP count (five products where forward has two: 2.5 times forward); combine and append-KV,
 * which only move memory, against a copy.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_cpu.h"

struct backward {
	int dtype, batch, seqlen, nhead_q, nhead_k, hdim;
	int causal, bias, alibi, sink;
	float cap, drop;
};

static void rows(struct memory *m, struct abi_rows *r, const struct backward *p)
{
	r->stride_seq = 1;
	r->stride_head = p->seqlen;
	r->stride_batch = (int64_t)p->seqlen * p->nhead_q;
	r->data = keep(m, sizeof(float) * (size_t)(r->stride_batch * p->batch));
}

/* LSE is that of equal logits: what the kernels do does not depend on it being right. */
static void backward_init(struct abi_bwd_args *a, struct memory *m, const struct backward *p)
{
	int s = p->seqlen, d = p->hdim, b = p->batch;
	int32_t *nsplits = keep(m, sizeof(*nsplits));

	*a = (struct abi_bwd_args){
		.nhead_q = p->nhead_q,
		.nhead_k = p->nhead_k,
		.hdim_q = d,
		.hdim_v = d,
		.dtype = p->dtype,
		.deterministic = 1,
		.scale = 1 / sqrtf((float)d),
		.logits_soft_cap = p->cap,
		.band = {p->causal ? ABI_MASK_BOTTOM_RIGHT : ABI_MASK_NONE, -1, p->causal ? 0 : -1,
			 0},
		.sequences = {.batch = b,
			      .seqlen_q_max = s,
			      .seqlen_k_max = s,
			      .total_q = b * s,
			      .total_k = b * s},
		.nsplits = nsplits,
	};
	*nsplits = 1;
	tensor(m, &a->q, p->dtype, b, s, p->nhead_q, d);
	tensor(m, &a->k, p->dtype, b, s, p->nhead_k, d);
	tensor(m, &a->v, p->dtype, b, s, p->nhead_k, d);
	tensor(m, &a->o, p->dtype, b, s, p->nhead_q, d);
	tensor(m, &a->d_o, p->dtype, b, s, p->nhead_q, d);
	tensor(m, &a->dq, p->dtype, b, s, p->nhead_q, d);
	tensor(m, &a->dk, p->dtype, b, s, p->nhead_k, d);
	tensor(m, &a->dv, p->dtype, b, s, p->nhead_k, d);
	rows(m, &a->lse, p);
	rows(m, &a->d, p);
	for (int64_t i = 0; i < a->lse.stride_batch * b; i++)
		a->lse.data[i] = logf((float)s);
	a->dq_acc = keep(m, sizeof(float) * (size_t)b * s * p->nhead_q * d);
	if (p->bias) {
		a->bias_dtype = ABI_F32;
		tensor(m, &a->bias, ABI_F32, 1, s, p->nhead_q, s);
		a->bias.stride_head = (int64_t)s * s;
		a->bias.stride_seq = s;
		a->bias.stride_batch = 0;
	}
	if (p->alibi || p->sink) {
		float *f = keep(m, sizeof(float) * 2 * (size_t)p->nhead_q);

		for (int h = 0; h < p->nhead_q; h++)
			f[h] = exp2f(-8.0f * (float)(h + 1) / (float)p->nhead_q);
		a->alibi_slopes = p->alibi ? f : NULL;
		a->sink = p->sink ? f : NULL;
		a->dsink = p->sink ? f + p->nhead_q : NULL;
	}
	if (p->drop > 0)
		a->dropout = (struct abi_dropout){.seed = 42,
						  .p_drop = p->drop,
						  .p_keep_inverse = 1 / (1 - p->drop),
						  .keep_at_most = (int32_t)(255 * (1 - p->drop))};
}

static double backward_flops(const struct backward *p)
{
	double pairs = (double)p->seqlen * (p->causal ? p->seqlen + 1 : 2 * p->seqlen) / 2;

	return 2.5 * 4.0 * p->batch * p->nhead_q * pairs * p->hdim;
}

static const enum abi_family stages[] = {ABI_BWD_DOT_DO_O, ABI_BWD_DQ_DK_DV, ABI_BWD_CONVERT_DQ};

/* Best seconds of all stages; the peak is measured in turn with them. */
static double backward_seconds(const struct backward *p)
{
	struct abi_bwd_args args;
	struct memory memory = {.n = 0};
	struct launch launches[3];
	double best = INFINITY;

	backward_init(&args, &memory, p);
	for (int i = 0; i < 3; i++)
		launch_init(&launches[i],
			    cpu_kernel_find(level, stages[i], (uint32_t)p->dtype, &args), &args);
	for (int rep = 0; rep < n_reps; rep++) {
		double seconds = 0;

		for (int i = 0; i < 3; i++)
			seconds += launch_seconds(&launches[i]);
		best = fmin(best, seconds);
		fma_peak = fmax(fma_peak, yardstick_fma());
	}
	for (int i = 0; i < 3; i++)
		launch_deinit(&launches[i]);
	for (int i = 0; i < memory.n; i++)
		free(memory.at[i]);
	return best;
}

static double row_backward(const char *name, const struct backward *p, double plain, double target)
{
	double seconds, rate;
	char shape[64];

	if (!wanted(name))
		return 0;
	seconds = backward_seconds(p);
	rate = backward_flops(p) / seconds;
	snprintf(shape, sizeof(shape), "%d x %d/%d x %d x %d", p->batch, p->nhead_q, p->nhead_k,
		 p->seqlen, p->hdim);
	printf("%-22s %-5s %-20s %-11s %8.2f %8.1f %6.1f %%", name, dtype_names[p->dtype], shape,
	       "cpu_tile", seconds * 1e3, rate * 1e-9, 100 * rate / fma_peak);
	if (plain > 0)
		printf("  %5.1f %% of plain", 100 * rate / plain);
	if (target > 0)
		printf("  (target %.0f)", 100 * target);
	printf("\n");
	fflush(stdout);
	return rate;
}

static void table_backward(void)
{
	static const int dtypes[] = {ABI_F32, ABI_BF16, ABI_F16};

	for (size_t t = 0; t < 3; t++)
		for (int d = 64; d <= 128; d *= 2)
			for (int s = 1024; s <= (quick || t ? 1024 : 2048); s *= 2) {
				struct backward p = {.dtype = dtypes[t],
						     .batch = 1,
						     .seqlen = s,
						     .nhead_q = 2,
						     .nhead_k = 2,
						     .hdim = d};
				double plain = row_backward("backward", &p, 0, t ? 0 : 0.75);

				p.causal = 1;
				row_backward("backward causal", &p, plain, 0);
			}
}

static void table_backward_features(void)
{
	const struct backward base = {
		.batch = 1, .seqlen = 1024, .nhead_q = 4, .nhead_k = 4, .hdim = 64};
	struct backward p = base;
	double plain = row_backward("backward of features", &base, 0, 0);

	p.bias = 1;
	row_backward("backward bias", &p, plain, 0);
	p = base, p.alibi = 1;
	row_backward("backward ALiBi", &p, plain, 0);
	p = base, p.cap = 30;
	row_backward("backward soft cap", &p, plain, 0);
	p = base, p.sink = 1;
	row_backward("backward sink", &p, plain, 0);
	p = base, p.drop = 0.2f;
	row_backward("backward dropout", &p, plain, 0);
	p = base, p.nhead_k = 1;
	row_backward("backward one key head", &p, plain, 0);
}

/* --- what only moves memory ---------------------------------------------------------------------
 */

static void row_memory(const char *name, const struct cpu_kernel *kernel, const void *args,
		       const char *shape, int dtype, double bytes)
{
	struct launch l;
	double best = INFINITY;

	launch_init(&l, kernel, args);
	for (int rep = 0; rep < 3 * n_reps; rep++) {
		best = fmin(best, launch_seconds(&l));
		copy_rate = fmax(copy_rate, measure_copy());
	}
	launch_deinit(&l);
	printf("%-22s %-5s %-20s %-11s %8.2f %8.1f %6.1f %%\n", name, dtype_names[dtype], shape,
	       kernel->pipeline, best * 1e3, bytes / best * 1e-9, 100 * bytes / best / copy_rate);
	fflush(stdout);
}

static void table_combine(void)
{
	enum { PARTS = 16, BATCH = 16, HEADS = 32, ROWS = 16, DIM = 128 };
	struct memory m = {.n = 0};
	struct abi_combine_args a = {
		.sequences = {.batch = BATCH, .seqlen_q_max = ROWS, .total_q = BATCH * ROWS},
		.n_splits = PARTS,
		.nhead_q = HEADS,
		.hdim_v = DIM,
		.o_parts_dtype = ABI_F32,
		.o_dtype = ABI_BF16,
	};
	double elements = (double)BATCH * HEADS * ROWS * DIM;

	if (!wanted("combine"))
		return;
	tensor(&m, &a.o_parts, ABI_F32, PARTS * BATCH, ROWS, HEADS, DIM);
	a.o_parts_stride_split = (int64_t)elements;
	tensor(&m, &a.o, ABI_BF16, BATCH, ROWS, HEADS, DIM);
	a.lse_parts = (struct abi_rows){
		.stride_seq = 1,
		.stride_head = ROWS,
		.stride_batch = HEADS * ROWS,
		.data = keep(&m, sizeof(float) * PARTS * BATCH * HEADS * ROWS)};
	a.lse_parts_stride_split = BATCH * HEADS * ROWS;
	row_memory("combine 16 parts",
		   cpu_kernel_find(level, ABI_FWD_SPLITKV_COMBINE, ABI_BF16, &a), &a,
		   "16 x 32 x 16 x 128", ABI_BF16, elements * (PARTS * 4 + 2));
	for (int i = 0; i < m.n; i++)
		free(m.at[i]);
}

static void table_append(void)
{
	enum { BATCH = 8, NEW = 512, HEADS = 8, DIM = 128, CAPACITY = 1024 };

	for (int rope = ABI_ROPE_NONE; rope <= ABI_ROPE_HALF_ROTATED && wanted("append"); rope++) {
		static const char *const names[] = {"append", "append interleaved",
						    "append half rotated"};
		struct memory m = {.n = 0};
		struct abi_appendkv_args a = {
			.sequences = {.batch = BATCH, .seqlen_k_max = CAPACITY},
			.seqlen_new = NEW,
			.rope = rope,
			.rotary_dim = DIM,
			.rotary_max_pos = CAPACITY,
			.nhead_q = HEADS,
			.nhead_k = HEADS,
			.hdim_q = DIM,
			.hdim_v = DIM,
			.dtype = ABI_BF16,
			.rotary_dtype = ABI_F32,
		};

		tensor(&m, &a.k, ABI_BF16, BATCH, CAPACITY, HEADS, DIM);
		tensor(&m, &a.v, ABI_BF16, BATCH, CAPACITY, HEADS, DIM);
		tensor(&m, &a.k_new, ABI_BF16, BATCH, NEW, HEADS, DIM);
		tensor(&m, &a.v_new, ABI_BF16, BATCH, NEW, HEADS, DIM);
		tensor(&m, &a.rotary_cos, ABI_F32, 1, CAPACITY, 1, DIM / 2);
		tensor(&m, &a.rotary_sin, ABI_F32, 1, CAPACITY, 1, DIM / 2);
		row_memory(names[rope], cpu_kernel_find(level, ABI_FWD_APPENDKV, ABI_BF16, &a), &a,
			   "8 x 8 x 512 x 128", ABI_BF16, 8.0 * BATCH * NEW * HEADS * DIM);
		for (int i = 0; i < m.n; i++)
			free(m.at[i]);
	}
}

void bench_backward(void)
{
	printf("%-22s %-5s %-20s %-11s %8s %8s %8s\n", "backward", "type", "b x hq/hk x s x d",
	       "kernel", "ms", "GFLOP/s", "of peak");
	table_backward();
	table_backward_features();
	printf("%-22s %-5s %-20s %-11s %8s %8s %8s\n", "memory", "type", "b x h x rows x d",
	       "kernel", "ms", "GB/s", "of copy");
	table_combine();
	table_append();
}
