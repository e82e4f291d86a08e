/* SPDX-License-Identifier: MIT */
#include "backward_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kernels/reference.h>
#include <kernels/view.h>

#include "launch.h"

uint64_t backward_case_seed;

/* --- numbers ------------------------------------------------------------------------------------
 */

static uint64_t random_next(uint64_t *state)
{
	uint64_t x = *state += 0x9E3779B97F4A7C15u;

	x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
	x = (x ^ x >> 27) * 0x94D049BB133111EBu;
	return x ^ x >> 31;
}

static double random_unit(uint64_t *state)
{
	return (double)(random_next(state) >> 11) / 9007199254740992.0 * 2 - 1;
}

static int32_t dtype_size(uint32_t dtype)
{
	return dtype == ABI_F32 ? 4 : dtype == ABI_U8 ? 1 : 2;
}

static void *random_tensor(int64_t n, uint32_t dtype, double magnitude, uint64_t *state)
{
	void *data = malloc((size_t)(n ? n : 1) * dtype_size(dtype));

	assert_non_null(data);
	for (int64_t i = 0; i < n; i++)
		reference_store(data, dtype, i, magnitude * random_unit(state));
	return data;
}

static double *new_doubles(int64_t n)
{
	double *data = malloc(sizeof(double) * (size_t)(n ? n : 1));

	assert_non_null(data);
	for (int64_t i = 0; i < n; i++)
		data[i] = NAN;
	return data;
}

/* --- layout -------------------------------------------------------------------------------------
 */

static struct abi_tensor tensor_view(const struct backward_case *c, void *data, int64_t rows,
				     int64_t heads, int64_t hdim)
{
	struct abi_tensor t = {.data = data, .stride_dim = 1};

	/* rows: of one batch entry, or of the packed axis */
	t.stride_head = c->head_major ? rows * hdim : hdim;
	t.stride_seq = c->head_major ? hdim : heads * hdim;
	t.stride_batch = c->group ? 0 : rows * heads * hdim;
	return t;
}

static void build_lengths(struct backward_problem *p, uint64_t *state)
{
	struct backward_case *c = &p->c;
	struct abi_sequences *s = &p->args.sequences;
	int32_t q_max = 0, k_max = 0;

	for (int32_t b = 0; b < c->batch; b++) {
		int32_t q = c->seqlen_q, k = c->seqlen_k;

		if (c->group) {
			q = c->lengths_q[b] ? c->lengths_q[b]
					    : (int32_t)(random_next(state) % (c->seqlen_q + 1));
			k = c->lengths_k[b] ? c->lengths_k[b]
					    : (int32_t)(random_next(state) % (c->seqlen_k + 1));
		}
		p->seqstart_q[b + 1] = p->seqstart_q[b] + q;
		p->seqstart_k[b + 1] = p->seqstart_k[b] + k;
		p->seqlen_q[b] = q - (c->padded && q ? (int32_t)(random_next(state) % q) : 0);
		p->seqlen_k[b] = k - (c->padded && k ? (int32_t)(random_next(state) % k) : 0);
		q_max = q > q_max ? q : q_max;
		k_max = k > k_max ? k : k_max;
	}
	*s = (struct abi_sequences){
		.batch = c->batch,
		.seqlen_q_max = c->group ? q_max : c->seqlen_q,
		.seqlen_k_max = c->group ? k_max : c->seqlen_k,
		.total_q = p->seqstart_q[c->batch],
		.total_k = p->seqstart_k[c->batch],
	};
	if (c->group) {
		s->seqstart_q = p->seqstart_q;
		s->seqstart_k = p->seqstart_k;
	}
	if (c->padded) {
		s->seqlen_q = p->seqlen_q;
		s->seqlen_k = p->seqlen_k;
	}
	p->rows_q = c->group ? s->total_q : c->seqlen_q;
	p->rows_k = c->group ? s->total_k : c->seqlen_k;
}

static void build_bias(struct backward_problem *p, uint64_t *state)
{
	struct backward_case *c = &p->c;
	struct abi_bwd_args *a = &p->args;
	int64_t columns = a->sequences.seqlen_k_max, heads = c->bias_head ? 1 : c->nhead_q;
	int64_t rows = c->bias_row ? 1 : p->rows_q,
		batch = c->group || c->bias_batch ? 1 : c->batch;

	a->bias_dtype = c->bias_narrow ? c->dtype : ABI_F32;
	p->n_bias = batch * heads * rows * columns;
	a->bias.data = random_tensor(p->n_bias, a->bias_dtype, 1, state);
	a->bias.stride_dim = 1;
	a->bias.stride_seq = c->bias_row ? 0 : columns;
	a->bias.stride_head = c->bias_head ? 0 : rows * columns;
	a->bias.stride_batch = c->group || c->bias_batch ? 0 : heads * rows * columns;
	a->dbias = a->bias;
	a->dbias.data = malloc((size_t)(p->n_bias ? p->n_bias : 1) * dtype_size(a->bias_dtype));
	assert_non_null(a->dbias.data);
}

static void build_workspace(struct backward_problem *p)
{
	struct backward_case *c = &p->c;
	struct abi_bwd_args *a = &p->args;
	int64_t floats = 0;

	for (int32_t b = 0; b < c->batch; b++) {
		int32_t keys = c->group ? p->seqlen_k[b] : c->seqlen_k;

		/* Two splits for one sequence: the kernel may use one, and convert adds both. */
		p->nsplits[b] = c->split_keys ? (keys + c->split_keys - 1) / c->split_keys
					      : 1 + b % 2;
		p->dq_acc_offsets[b] = floats;
		floats += (int64_t)c->nhead_q * (c->group ? p->nsplits[b] : p->nsplits[0]) *
			  (c->group ? p->seqstart_q[b + 1] - p->seqstart_q[b] : c->seqlen_q) *
			  c->hdim_q;
	}
	p->dq_acc_offsets[c->batch] = p->dq_acc_floats = floats;
	a->dq_acc = malloc(sizeof(float) * (size_t)(floats ? floats : 1));
	assert_non_null(a->dq_acc);
	a->nsplits = p->nsplits;
	a->dq_split_keys = c->split_keys;
	a->dq_acc_offsets = c->group ? p->dq_acc_offsets : NULL;
}

static struct abi_rows build_rows(const struct backward_problem *p)
{
	int64_t n = p->rows_q * p->c.nhead_q * (p->c.group ? 1 : p->c.batch);
	struct abi_rows rows = {
		.data = malloc(sizeof(float) * (size_t)(n ? n : 1)),
		.stride_seq = 1,
		.stride_head = p->rows_q,
		.stride_batch = p->c.group ? 0 : p->rows_q * p->c.nhead_q,
	};

	assert_non_null(rows.data);
	for (int64_t i = 0; i < n; i++)
		rows.data[i] = NAN;
	return rows;
}

/* --- reference ----------------------------------------------------------------------------------
 */

static void forward_args(const struct backward_problem *p, struct abi_fwd_args *f)
{
	const struct abi_bwd_args *a = &p->args;

	*f = (struct abi_fwd_args){
		.q = a->q,
		.k = a->k,
		.v = a->v,
		.bias = a->bias,
		.alibi_slopes = a->alibi_slopes,
		.alibi_stride_batch = a->alibi_stride_batch,
		.sink = a->sink,
		.sequences = a->sequences,
		.band = a->band,
		.mask_data = a->mask_data,
		.dropout = a->dropout,
		.nhead_q = a->nhead_q,
		.nhead_k = a->nhead_k,
		.hdim_q = a->hdim_q,
		.hdim_v = a->hdim_v,
		.scale = a->scale,
		.logits_soft_cap = a->logits_soft_cap,
		.dtype = a->dtype,
		.o_dtype = a->dtype,
		.bias_dtype = a->bias_dtype,
	};
	f->dropout.randval = (struct abi_tensor){0};
}

/* O and LSE of the CPU kernel. Its rounding of large logits is that of its LSE. */
static void run_cpu_forward(struct backward_problem *p)
{
	struct abi_fwd_args f;

	forward_args(p, &f);
	f.o = p->args.o;
	f.lse = p->args.lse;
	launch_family(p->c.forward_level, ABI_FWD, p->c.dtype, &f, 1);
}

/* O and LSE of the reference, in the types that a forward kernel writes. */
static void run_forward(struct backward_problem *p)
{
	struct abi_bwd_args *a = &p->args;
	struct abi_fwd_args f;
	const struct backward_case *c = &p->c;
	int64_t batch = c->group ? 1 : c->batch;
	double *o = new_doubles(p->n_o), *lse = new_doubles(batch * p->rows_q * c->nhead_q);

	forward_args(p, &f);
	assert_int_equal(reference_forward(&f, o, lse, NULL), 0);
	for (int32_t b = 0; b < c->batch; b++) {
		struct view_sequence v = view_sequence(&a->sequences, NULL, b);
		int64_t first = c->group ? v.q_start : (int64_t)b * c->seqlen_q;

		for (int32_t h = 0; h < c->nhead_q; h++)
			for (int32_t i = 0; i < v.q_len; i++) {
				int64_t packed_lse = c->group ? h * p->rows_q + first + i
							      : ((int64_t)b * c->nhead_q + h) *
										c->seqlen_q +
									i;

				for (int32_t d = 0; d < c->hdim_v; d++)
					reference_store(
						a->o.data, c->dtype,
						view_q_offset(&a->o, &v, i, h) + d,
						o[((first + i) * c->nhead_q + h) * c->hdim_v + d]);
				a->lse.data[view_rows_offset(&a->lse, &v, i, h)] = (float)
					lse[packed_lse];
			}
	}
	free(o);
	free(lse);
}

/* dbias of the reference is full; this adds up what broadcasts. */
static double *sum_dbias(const struct backward_problem *p, const double *full)
{
	const struct backward_case *c = &p->c;
	const struct abi_bwd_args *a = &p->args;
	double *sum = malloc(sizeof(double) * (size_t)(p->n_bias ? p->n_bias : 1));
	int64_t columns = a->sequences.seqlen_k_max;
	/* Where rows are summed, every element is; else rows that no sequence has are left alone. */
	bool all = c->bias_row && p->rows_q != 1;

	assert_non_null(sum);
	for (int64_t i = 0; i < p->n_bias; i++)
		sum[i] = all ? 0 : NAN;
	for (int32_t b = 0; b < c->batch; b++) {
		struct view_sequence v = view_sequence(&a->sequences, NULL, b);

		for (int32_t h = 0; h < c->nhead_q; h++)
			for (int32_t i = 0; i < v.q_len; i++)
				for (int64_t j = 0; j < columns; j++) {
					int64_t to = view_q_offset(&a->dbias, &v, i, h) + j;
					int64_t row = c->group ? h * p->rows_q + v.q_start + i
							       : ((int64_t)b * c->nhead_q + h) *
										 c->seqlen_q +
									 i;

					if (isnan(sum[to]))
						sum[to] = 0;
					sum[to] += full[row * columns + j];
				}
	}
	return sum;
}

static void run_reference(struct backward_problem *p)
{
	const struct backward_case *c = &p->c;
	int64_t batch = c->group ? 1 : c->batch;
	int64_t n_full = batch * c->nhead_q * p->rows_q * p->args.sequences.seqlen_k_max;
	double *full = c->bias ? new_doubles(n_full) : NULL;

	p->dq = new_doubles(p->n_q);
	p->dk = new_doubles(p->n_k);
	p->dv = new_doubles(p->n_v);
	p->dsink = new_doubles(c->nhead_q);
	assert_int_equal(reference_backward(&p->args, p->dq, p->dk, p->dv, full, p->dsink), 0);
	if (full)
		p->dbias = sum_dbias(p, full);
	free(full);
}

/* --- the problem --------------------------------------------------------------------------------
 */

static void build_options(struct backward_problem *p, uint64_t *state)
{
	const struct backward_case *c = &p->c;
	struct abi_bwd_args *a = &p->args;

	a->band = (struct abi_band){c->mask, c->window_left, c->window_right, c->sink_tokens};
	if (c->mask == ABI_MASK_NONE)
		a->band.window_left = a->band.window_right = -1;
	a->scale = c->zero_scale ? 0 : c->scale != 0 ? c->scale : 1 / sqrtf((float)c->hdim_q);
	a->logits_soft_cap = c->soft_cap;
	a->dropout.p_drop = c->p_drop;
	a->dropout.p_keep_inverse = 1 / (1 - c->p_drop);
	a->dropout.keep_at_most = (int32_t)floor(255.0 * (1 - c->p_drop));
	a->dropout.seed = random_next(state);
	a->dropout.offset = random_next(state);
	if (c->alibi) {
		a->alibi_slopes = random_tensor((int64_t)c->batch * c->nhead_q, ABI_F32, 0.3,
						state);
		a->alibi_stride_batch = c->nhead_q;
	}
	if (c->sink) {
		a->sink = random_tensor(c->nhead_q, ABI_F32, 2, state);
		a->dsink = malloc(sizeof(float) * c->nhead_q);
		assert_non_null(a->dsink);
	}
	if (c->bias)
		build_bias(p, state);
}

/* The bytes that forward would have stored. */
static void build_randval(struct backward_problem *p)
{
	struct abi_bwd_args *a = &p->args;
	const struct backward_case *c = &p->c;
	int64_t columns = a->sequences.seqlen_k_max;
	int64_t n = (c->group ? 1 : c->batch) * c->nhead_q * p->rows_q * columns;
	uint8_t *bytes = malloc((size_t)(n ? n : 1));
	struct abi_tensor t = {.data = bytes,
			       .stride_dim = 1,
			       .stride_seq = columns,
			       .stride_head = p->rows_q * columns,
			       .stride_batch = c->group ? 0 : c->nhead_q * p->rows_q * columns};

	assert_non_null(bytes);
	memset(bytes, 0, (size_t)n);
	for (int32_t b = 0; b < c->batch; b++) {
		struct view_sequence v = view_sequence(&a->sequences, NULL, b);

		for (int32_t h = 0; h < c->nhead_q; h++)
			for (int32_t i = 0; i < v.q_len; i++)
				for (int32_t j = 0; j < v.k_len; j++)
					bytes[view_q_offset(&t, &v, i, h) + j] =
						reference_dropout_byte(a->dropout.seed,
								       a->dropout.offset, b, h,
								       c->nhead_q, i, j);
	}
	a->dropout.randval = t;
	/* Whoever regenerates the bytes now gets wrong ones. */
	a->dropout.seed ^= 1;
}

struct backward_problem *backward_problem_new(const struct backward_case *c, uint64_t seed)
{
	struct backward_problem *p = calloc(1, sizeof(*p));
	struct abi_bwd_args *a;
	double qk = c->magnitude > 0 ? c->magnitude : 1;
	int64_t batch;

	assert_non_null(p);
	p->c = *c;
	a = &p->args;
	a->dtype = (abi_i32)c->dtype;
	a->nhead_q = c->nhead_q;
	a->nhead_k = c->nhead_k;
	a->hdim_q = c->hdim_q;
	a->hdim_v = c->hdim_v;
	a->deterministic = 1;
	build_lengths(p, &seed);
	batch = c->group ? 1 : c->batch;
	p->n_q = batch * p->rows_q * c->nhead_q * c->hdim_q;
	p->n_k = batch * p->rows_k * c->nhead_k * c->hdim_q;
	p->n_v = batch * p->rows_k * c->nhead_k * c->hdim_v;
	p->n_o = batch * p->rows_q * c->nhead_q * c->hdim_v;
#define TENSOR(name, n, rows, heads, hdim, magnitude)                                              \
	a->name = tensor_view(c, random_tensor(n, c->dtype, magnitude, &seed), rows, heads, hdim)
	TENSOR(q, p->n_q, p->rows_q, c->nhead_q, c->hdim_q, qk);
	TENSOR(k, p->n_k, p->rows_k, c->nhead_k, c->hdim_q, qk);
	TENSOR(v, p->n_v, p->rows_k, c->nhead_k, c->hdim_v, 1);
	TENSOR(o, p->n_o, p->rows_q, c->nhead_q, c->hdim_v, 0);
	TENSOR(d_o, p->n_o, p->rows_q, c->nhead_q, c->hdim_v, 1);
	TENSOR(dq, p->n_q, p->rows_q, c->nhead_q, c->hdim_q, 0);
	TENSOR(dk, p->n_k, p->rows_k, c->nhead_k, c->hdim_q, 0);
	TENSOR(dv, p->n_v, p->rows_k, c->nhead_k, c->hdim_v, 0);
#undef TENSOR
	build_options(p, &seed);
	p->mask_shape = (struct mask_shape){
		c->mask_data, c->n_endpoints, c->group ? 1 : c->batch,
		c->nhead_q,   p->rows_q,      a->sequences.seqlen_k_max};
	mask_case_make(&a->mask_data, &p->mask_shape, seed);
	build_workspace(p);
	a->lse = build_rows(p);
	a->d = build_rows(p);
	if (c->forward_level)
		run_cpu_forward(p);
	else
		run_forward(p);
	if (c->randval)
		build_randval(p);
	run_reference(p);
	return p;
}

struct backward_problem *backward_problem_free(struct backward_problem *p)
{
	void *owned[] = {p->args.q.data,
			 p->args.k.data,
			 p->args.v.data,
			 p->args.o.data,
			 p->args.d_o.data,
			 p->args.dq.data,
			 p->args.dk.data,
			 p->args.dv.data,
			 p->args.bias.data,
			 p->args.dbias.data,
			 p->args.dsink,
			 p->args.lse.data,
			 p->args.d.data,
			 (void *)p->args.sink,
			 p->args.dq_acc,
			 (void *)p->args.alibi_slopes,
			 p->args.dropout.randval.data,
			 p->dq,
			 p->dk,
			 p->dv,
			 p->dbias,
			 p->dsink};

	for (size_t i = 0; i < sizeof(owned) / sizeof(owned[0]); i++)
		free(owned[i]);
	mask_case_free(&p->args.mask_data);
	free(p);
	return NULL;
}

/* --- outputs ------------------------------------------------------------------------------------
 */

struct output {
	const char *name;
	void *data;
	int64_t n;
	uint32_t dtype;
};

static int outputs(const struct backward_problem *p, struct output list[5])
{
	const struct abi_bwd_args *a = &p->args;
	int n = 0;

	list[n++] = (struct output){"dq", a->dq.data, p->n_q, a->dtype};
	list[n++] = (struct output){"dk", a->dk.data, p->n_k, a->dtype};
	list[n++] = (struct output){"dv", a->dv.data, p->n_v, a->dtype};
	if (a->dbias.data)
		list[n++] = (struct output){"dbias", a->dbias.data, p->n_bias, a->bias_dtype};
	if (a->dsink)
		list[n++] = (struct output){"dsink", a->dsink, a->nhead_q, ABI_F32};
	return n;
}

void backward_problem_poison(struct backward_problem *p)
{
	struct output list[5];
	int n = outputs(p, list);

	for (int i = 0; i < n; i++)
		memset(list[i].data, 0xa5, (size_t)list[i].n * dtype_size(list[i].dtype));
	memset(p->args.dq_acc, 0xff, sizeof(float) * (size_t)p->dq_acc_floats);
}

void backward_problem_run(struct backward_problem *p, enum cpu_level level, int n_threads)
{
	uint32_t dtype = p->c.dtype;

	launch_family(level, ABI_BWD_DOT_DO_O, dtype, &p->args, n_threads);
	launch_family(level, ABI_BWD_DQ_DK_DV, dtype, &p->args, n_threads);
	launch_family(level, ABI_BWD_CONVERT_DQ, dtype, &p->args, n_threads);
}

uint64_t backward_problem_hash(const struct backward_problem *p)
{
	struct output list[5];
	int n = outputs(p, list);
	uint64_t hash = 0xcbf29ce484222325u;

	for (int i = 0; i < n; i++) {
		const uint8_t *bytes = list[i].data;

		for (int64_t j = 0; j < list[i].n * dtype_size(list[i].dtype); j++)
			hash = (hash ^ bytes[j]) * 0x100000001b3u;
	}
	return hash;
}

/* Packed index of the reference -> element of a tensor with the same rows, heads and dims. */
static int64_t strided(const struct abi_tensor *t, int64_t index, int64_t rows, int64_t heads,
		       int64_t hdim)
{
	int64_t dim = index % hdim, head = index / hdim % heads;
	int64_t row = index / hdim / heads % rows, batch = index / hdim / heads / rows;

	return batch * t->stride_batch + row * t->stride_seq + head * t->stride_head +
	       dim * t->stride_dim;
}

/* The poison of backward_problem_poison(), which says that nothing was written. */
static bool untouched(const void *data, uint32_t dtype, int64_t index)
{
	const uint8_t *byte = (const uint8_t *)data + index * dtype_size(dtype);

	for (int i = 0; i < dtype_size(dtype); i++)
		if (byte[i] != 0xa5)
			return false;
	return true;
}

static bool element_ok(double expected, double got, double tolerance)
{
	if (isnan(expected))
		return isnan(got);
	return fabs(expected - got) <= tolerance;
}

/* @expected is NaN where nothing may be written. @factor: of the gradient, 1 at least. */
static void check_tensor(const char *name, const double *expected, const struct abi_tensor *t,
			 uint32_t dtype, int64_t n, int64_t rows, int64_t heads, int64_t hdim,
			 double tolerance, double factor)
{
	double largest = 0, worst = 0;
	int64_t worst_at = -1;

	for (int64_t i = 0; i < n; i++)
		if (fabs(expected[i]) > largest)
			largest = fabs(expected[i]);
	/* Gradients that cancel to 0 leave rounding errors of what cancelled, and those of O. */
	double least = (dtype == ABI_F32 ? 0.2 : 1) * factor;

	tolerance *= largest > least ? largest : least;
	for (int64_t i = 0; i < n; i++) {
		int64_t at = strided(t, i, rows, heads, hdim);
		double got = reference_load(t->data, dtype, at);
		double error = fabs(got - expected[i]);

		if (isnan(expected[i]) && untouched(t->data, dtype, at))
			continue;
		/* The poison is a tiny number in most types: it would pass for this. */
		if (expected[i] == 0 && untouched(t->data, dtype, at))
			fail_msg("%s[%lld]: never written", name, (long long)i);
		if (element_ok(expected[i], got, tolerance) && !(error > worst))
			continue;
		worst = error;
		worst_at = i;
		if (!element_ok(expected[i], got, tolerance))
			fail_msg("%s[%lld]: %g, expected %g (allowed difference %g, largest %g, "
				 "seed %llu)",
				 name, (long long)i, got, expected[i], tolerance, largest,
				 (unsigned long long)backward_case_seed);
	}
	if (getenv("FMHA_TEST_VERBOSE"))
		printf("%s: worst %g of largest %g at %lld\n", name, worst, largest,
		       (long long)worst_at);
}

void backward_problem_check_padding(const struct backward_problem *p)
{
	const struct abi_bwd_args *a = &p->args;
	const struct backward_case *c = &p->c;
	const struct {
		const double *expected;
		const struct abi_tensor *t;
		int64_t n, rows, heads, hdim;
	} list[] = {{p->dq, &a->dq, p->n_q, p->rows_q, c->nhead_q, c->hdim_q},
		    {p->dk, &a->dk, p->n_k, p->rows_k, c->nhead_k, c->hdim_q},
		    {p->dv, &a->dv, p->n_v, p->rows_k, c->nhead_k, c->hdim_v}};

	for (int k = 0; k < 3; k++)
		for (int64_t i = 0; i < list[k].n; i++)
			assert_true(!isnan(list[k].expected[i]) ||
				    untouched(list[k].t->data, c->dtype,
					      strided(list[k].t, i, list[k].rows, list[k].heads,
						      list[k].hdim)));
}

void backward_problem_check(const struct backward_problem *p, double tolerance)
{
	const struct abi_bwd_args *a = &p->args;
	const struct backward_case *c = &p->c;
	struct abi_tensor flat = {.stride_dim = 1};
	/* What cancels in dS is a sum over the head, and dQ and dK have it times the scale. */
	double factor = fmax(1, fabs(a->scale) * sqrt(8)) * fmax(1, c->hdim_v / 32.0);

	check_tensor("dq", p->dq, &a->dq, c->dtype, p->n_q, p->rows_q, c->nhead_q, c->hdim_q,
		     tolerance, factor);
	check_tensor("dk", p->dk, &a->dk, c->dtype, p->n_k, p->rows_k, c->nhead_k, c->hdim_q,
		     tolerance, factor);
	check_tensor("dv", p->dv, &a->dv, c->dtype, p->n_v, p->rows_k, c->nhead_k, c->hdim_v,
		     tolerance, 1);
	if (c->bias) {
		double bias_tolerance = a->bias_dtype == ABI_F32 && c->dtype == ABI_F32
						? tolerance
						: backward_tolerance(c->dtype);

		flat.data = a->dbias.data;
		check_tensor("dbias", p->dbias, &flat, a->bias_dtype, p->n_bias, 1, 1, p->n_bias,
			     bias_tolerance, 1);
	}
	if (c->sink) {
		flat.data = a->dsink;
		check_tensor("dsink", p->dsink, &flat, ABI_F32, c->nhead_q, 1, 1, c->nhead_q,
			     10 * tolerance, 1);
	}
}

double backward_tolerance(uint32_t dtype)
{
	/* O is rounded to its type before backward sees it, so d = rowsum(dO * O) carries that. */
	return dtype == ABI_F32 ? 1e-5 : dtype == ABI_F16 ? 3e-3 : 2e-2;
}

static int32_t random_below(uint64_t *state, int32_t n)
{
	return (int32_t)(random_next(state) % (uint64_t)n);
}

static bool random_chance(uint64_t *state, int32_t one_in)
{
	return random_below(state, one_in) == 0;
}

void backward_case_random(struct backward_case *c, uint64_t seed)
{
	static const int32_t lengths[] = {1, 2, 7, 16, 33, 64, 65, 100, 129, 257, 300};
	static const int32_t dims[] = {8, 16, 24, 32, 40, 64, 80, 128, 1, 5, 59, 100, 111};
	uint64_t *r = &seed;

	*c = (struct backward_case){
		.dtype = (uint32_t)random_below(r, 3),
		.batch = 1 + random_below(r, 3),
		.nhead_k = 1 + random_below(r, 2),
		.seqlen_q = lengths[random_below(r, 11)],
		.seqlen_k = lengths[random_below(r, 11)],
		.hdim_q = dims[random_below(r, 13)],
		.hdim_v = dims[random_below(r, 13)],
		.mask = (uint32_t)random_below(r, 3),
		.window_left = random_chance(r, 2) ? -1 : random_below(r, 60),
		.window_right = random_chance(r, 2) ? 0 : random_below(r, 60) - 1,
		.sink_tokens = random_chance(r, 4) ? random_below(r, 9) : 0,
		.soft_cap = random_chance(r, 4) ? 4 : 0,
		.p_drop = random_chance(r, 4) ? 0.25f : 0,
		.alibi = random_chance(r, 4),
		.sink = random_chance(r, 4),
		.bias = random_chance(r, 3),
		.bias_batch = random_chance(r, 2),
		.bias_head = random_chance(r, 2),
		.bias_row = random_chance(r, 3),
		.bias_narrow = random_chance(r, 3),
		.randval = random_chance(r, 2),
		.group = random_chance(r, 3),
		.padded = random_chance(r, 4),
		.head_major = random_chance(r, 2),
		.scale = random_chance(r, 4) ? -0.4f : 0,
	};
	c->nhead_q = c->nhead_k * (1 + random_below(r, 3));
	if (random_chance(r, 3)) {
		c->mask_data = random_chance(r, 3) ? MASK_BITS : MASK_INTERVALS;
		c->n_endpoints = 1 + 2 * random_below(r, random_chance(r, 4) ? 32 : 4);
	}
	if (c->p_drop == 0)
		c->randval = false;
	if (random_chance(r, 3))
		c->split_keys = 1 + random_below(r, 300);
}
