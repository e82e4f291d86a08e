/* SPDX-License-Identifier: MIT */
#include "judge.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <kernels/reference.h>
#include <kernels/view.h>
#include <proto/error.h>
#include <proto/problem.h>

#include "judge_args.h"

/* Stands in elements that the operation leaves alone; no computation yields these bits. */
#define UNTOUCHED_BITS UINT64_C(0x7ff8dead00c0ffee)

struct output {
	uint32_t role;
	int64_t n;
	double *values; /* packed */
	double bar;
};

struct judge {
	int n;
	struct output outputs[JUDGE_MAX_OUTPUTS];
};

static bool is_untouched(double value)
{
	uint64_t bits;

	memcpy(&bits, &value, sizeof(bits));
	return bits == UNTOUCHED_BITS;
}

static double *new_values(int64_t n)
{
	const uint64_t bits = UNTOUCHED_BITS;
	double *values = malloc((size_t)(n > 0 ? n : 1) * sizeof(*values));

	for (int64_t i = 0; values && i < n; i++)
		memcpy(&values[i], &bits, sizeof(bits));
	return values;
}

/* A new output of the role's size, or NULL. */
static struct output *add_output(struct judge *judge, const struct fmha_problem *p, uint32_t role)
{
	struct output *output = &judge->outputs[judge->n];

	output->role = role;
	output->n = judge_elements(p, role);
	output->values = new_values(output->n);
	if (!output->values)
		return NULL;
	judge->n++;
	return output;
}

/* Of finite elements. */
static double largest(const double *values, int64_t n)
{
	double most = 0;

	for (int64_t i = 0; i < n; i++) {
		if (isfinite(values[i]) && fabs(values[i]) > most)
			most = fabs(values[i]);
	}
	return most;
}

static double largest_difference(const double *a, const double *b, int64_t n)
{
	double most = 0;

	for (int64_t i = 0; i < n; i++) {
		double difference = fabs(a[i] - b[i]);

		if (isfinite(difference) && difference > most)
			most = difference;
	}
	return most;
}

/* Half the distance of neighbours, relative to the value. */
static double unit_roundoff(uint32_t dtype)
{
	switch (dtype) {
	case FMHA_F16:
		return 0x1p-11;
	case FMHA_BF16:
		return 0x1p-8;
	case FMHA_E4M3:
		return 0x1p-4;
	case FMHA_E5M2:
		return 0x1p-3;
	default:
		return 0x1p-24;
	}
}

/* ---- forward, on all cores ---- */

/* What a kernel may hold in a narrow type. */
struct rounding {
	uint32_t scores, weights; /* S and O; P */
};

/* One group of heads that share K and V. Its results are packed for those heads alone. */
struct head_task {
	struct abi_fwd_args args;
	bool rounded;
	struct rounding to;
	double *o, *lse;
	int status;
};

struct head_pool {
	struct head_task *tasks;
	int n, next;
	pthread_mutex_t lock;
};

static void *head_worker(void *arg)
{
	struct head_pool *pool = arg;

	for (;;) {
		struct head_task *task = NULL;

		(void)pthread_mutex_lock(&pool->lock);
		if (pool->next < pool->n)
			task = &pool->tasks[pool->next++];
		(void)pthread_mutex_unlock(&pool->lock);
		if (!task)
			return NULL;
		if (task->rounded)
			task->status = reference_forward_rounded(
				&task->args, task->to.scores, task->to.weights, task->o, task->lse);
		else
			task->status = reference_forward(&task->args, task->o, task->lse, NULL);
	}
}

static void run_pool(struct head_pool *pool)
{
	long cores = sysconf(_SC_NPROCESSORS_ONLN);
	pthread_t threads[64];
	int n = 0;

	(void)pthread_mutex_init(&pool->lock, NULL);
	while (n < 63 && n + 1 < cores && n + 1 < pool->n &&
	       pthread_create(&threads[n], NULL, head_worker, pool) == 0)
		n++;
	(void)head_worker(pool);
	while (n-- > 0)
		(void)pthread_join(threads[n], NULL);
	(void)pthread_mutex_destroy(&pool->lock);
}

static void *shifted(void *data, int64_t n, uint32_t dtype)
{
	return data ? (uint8_t *)data + n * fmha_dtype_bytes(dtype) : NULL;
}

/* The problem of KV head @g alone. */
static void head_args(const struct abi_fwd_args *all, int g, struct abi_fwd_args *ret)
{
	int ratio = all->nhead_q / all->nhead_k;
	uint32_t dtype = (uint32_t)all->dtype, kv_dtype = (uint32_t)view_kv_dtype(all);

	*ret = *all;
	ret->nhead_q = ratio;
	ret->nhead_k = 1;
	ret->q.data = shifted(all->q.data, g * ratio * all->q.stride_head, dtype);
	ret->k.data = shifted(all->k.data, g * all->k.stride_head, kv_dtype);
	ret->v.data = shifted(all->v.data, g * all->v.stride_head, kv_dtype);
	ret->bias.data = shifted(all->bias.data, g * ratio * all->bias.stride_head,
				 (uint32_t)all->bias_dtype);
	ret->mask_data.intervals.data = shifted(all->mask_data.intervals.data,
						g * ratio * all->mask_data.intervals.stride_head,
						FMHA_I32);
	ret->mask_data.bits.data = shifted(all->mask_data.bits.data,
					   g * ratio * all->mask_data.bits.stride_head, FMHA_U8);
	if (all->alibi_slopes)
		ret->alibi_slopes = all->alibi_slopes + g * ratio;
	if (all->sink)
		ret->sink = all->sink + g * ratio;
	if (all->q_descale.data)
		ret->q_descale.data = all->q_descale.data + g * ratio * all->q_descale.stride_head;
	if (all->k_descale.data)
		ret->k_descale.data = all->k_descale.data + g * all->k_descale.stride_head;
	if (all->v_descale.data)
		ret->v_descale.data = all->v_descale.data + g * all->v_descale.stride_head;
}

/* From [rows, ratio, hdim_v] into [rows, nhead_q, hdim_v], and LSE likewise. */
static void scatter(const struct abi_fwd_args *all, int g, const struct head_task *task, double *o,
		    double *lse)
{
	int ratio = all->nhead_q / all->nhead_k, hdim = all->hdim_v;
	const struct abi_sequences *s = &all->sequences;
	int64_t n_rows = s->total_q;
	int64_t batch = s->seqstart_q ? 1 : s->batch,
		seq = s->seqstart_q ? n_rows : s->seqlen_q_max;

	for (int64_t row = 0; row < n_rows; row++)
		memcpy(o + (row * all->nhead_q + (int64_t)g * ratio) * hdim,
		       task->o + row * ratio * hdim, (size_t)(ratio * hdim) * sizeof(*o));
	for (int64_t b = 0; b < batch; b++)
		memcpy(lse + (b * all->nhead_q + (int64_t)g * ratio) * seq,
		       task->lse + b * ratio * seq, (size_t)(ratio * seq) * sizeof(*lse));
}

/* Rounding each step is slow: the yardstick of a large problem is taken on its first heads, which
 * makes it stricter if anything. */
static int heads_to_round(const struct abi_fwd_args *all)
{
	double steps = (double)all->sequences.total_q * all->sequences.seqlen_k_max *
		       (all->hdim_q + all->hdim_v) * all->nhead_q / all->nhead_k;
	int n = (int)(5e8 / (steps + 1));

	return n < 1 ? 1 : n < all->nhead_k ? n : all->nhead_k;
}

/*
 * reference_forward(), or, @to != NULL, its rounded form; what that leaves out stays untouched.
 */
static int forward_all(const struct abi_fwd_args *all, const struct rounding *to, double *o,
		       double *lse)
{
	bool rounded = to != NULL;
	int n = rounded ? heads_to_round(all) : all->nhead_k, r = 0;
	struct head_pool pool = {.n = n};
	int64_t o_n, lse_n;

	/* The dropout mask knows a head by its number in the whole, a vectorized page by theirs. */
	if (all->nhead_k == 1 || all->dropout.p_drop > 0 || all->cache.layout == ABI_KV_VECTORIZED)
		return rounded ? reference_forward_rounded(all, to->scores, to->weights, o, lse)
			       : reference_forward(all, o, lse, NULL);
	pool.tasks = calloc((size_t)n, sizeof(*pool.tasks));
	if (!pool.tasks)
		return -1;
	lse_n = (int64_t)all->sequences.total_q * (all->nhead_q / all->nhead_k);
	o_n = lse_n * all->hdim_v;
	for (int g = 0; g < n; g++) {
		struct head_task *task = &pool.tasks[g];

		head_args(all, g, &task->args);
		task->rounded = rounded;
		if (to)
			task->to = *to;
		task->o = new_values(o_n);
		task->lse = new_values(lse_n);
		if (!task->o || !task->lse)
			r = -1;
	}
	if (r == 0)
		run_pool(&pool);
	for (int g = 0; g < n; g++) {
		struct head_task *task = &pool.tasks[g];

		if (r == 0)
			r = task->status;
		if (r == 0)
			scatter(all, g, task, o, lse);
		free(task->o);
		free(task->lse);
	}
	free(pool.tasks);
	return r;
}

static int out_of_memory(struct fmha_error *err)
{
	return fmha_error_set(err, FMHA_ENOMEM, "the reference ran out of memory");
}

/*
 * @p with Q, K and V widened to f32, which is exact: the reference reads each key many times, and
 * would convert it as often. The copies keep the strides. Return: 0, or -1 when out of memory.
 */
static int widen(const struct fmha_problem *p, struct fmha_problem *ret_wide)
{
	static const uint32_t roles[] = {FMHA_T_Q, FMHA_T_K, FMHA_T_V};

	*ret_wide = *p;
	if (p->q.dtype == FMHA_F32 || p->kv_layout != FMHA_KV_LINEAR)
		return 0; /* other layouts depend on the type */
	for (int i = 0; i < 3; i++) {
		struct fmha_tensor *tensor = &ret_wide->tensor[roles[i]];
		uint64_t bytes = 0;
		int64_t n;
		float *copy;

		if (!tensor->data)
			continue;
		(void)problem_span_bytes(p, roles[i], &bytes, NULL);
		n = (int64_t)(bytes / fmha_dtype_bytes(tensor->dtype));
		copy = malloc((size_t)(n > 0 ? n : 1) * sizeof(*copy));
		for (int64_t e = 0; copy && e < n; e++)
			copy[e] = (float)reference_load(tensor->data, tensor->dtype, e);
		tensor->data = copy;
		if (!copy)
			return -1;
	}
	for (int i = 0; i < 3; i++) {
		problem_strides(p, roles[i], ret_wide->tensor[roles[i]].stride);
		ret_wide->tensor[roles[i]].dtype = FMHA_F32;
	}
	return 0;
}

static void widen_free(const struct fmha_problem *p, struct fmha_problem *wide)
{
	if (wide->q.data != p->q.data)
		free(wide->q.data);
	if (wide->k.data != p->k.data)
		free(wide->k.data);
	if (wide->v.data != p->v.data)
		free(wide->v.data);
}

/*
 * exp() turns the absolute error of S into a relative one of P. In float32 a dot product of hdim
 * terms is wrong by about sqrt(hdim) u |S| (the rule of thumb in Higham, Accuracy and Stability of
 * Numerical Algorithms, 2nd ed., section 2.8), whatever the kernel; |S| is seldom above the
 * largest |LSE|.
 */
static double exponent_error(const struct fmha_problem *p, double largest_lse)
{
	return 0x1p-24 * sqrt(p->hdim_q) * largest_lse;
}

static int judge_forward(struct judge *judge, const struct fmha_problem *p, struct fmha_error *err)
{
	struct output *o = add_output(judge, p, FMHA_T_O);
	struct output *lse = add_output(judge, p, FMHA_T_LSE);
	bool fp8 = p->q.dtype == FMHA_E4M3 || p->q.dtype == FMHA_E5M2;
	/* Products of e4m3 take P in that type, too; under a q of 16 bits P is of q's. */
	struct rounding to = {fp8 ? FMHA_BF16 : p->q.dtype, !fp8                      ? p->q.dtype
							    : p->k.dtype == FMHA_E5M2 ? FMHA_BF16
										      : p->k.dtype};
	double *rounded_o = NULL, *rounded_lse = NULL;
	struct fmha_problem wide;
	struct abi_fwd_args args;
	int r;

	if (!o || !lse)
		return out_of_memory(err);
	if (widen(p, &wide) < 0) {
		widen_free(p, &wide);
		return out_of_memory(err);
	}
	judge_fwd_args(&wide, &args);
	r = forward_all(&args, NULL, o->values, lse->values);
	o->bar = (1e-5 + exponent_error(p, largest(lse->values, lse->n))) *
		 fmax(largest(o->values, o->n), 0.1);
	lse->bar = 1e-5 * fmax(largest(lse->values, lse->n), 1);
	if (r == 0 && to.scores != FMHA_F32) {
		rounded_o = new_values(o->n);
		rounded_lse = new_values(lse->n);
		r = rounded_o && rounded_lse ? forward_all(&args, &to, rounded_o, rounded_lse) : -1;
		if (r == 0) {
			o->bar = 2 * largest_difference(o->values, rounded_o, o->n) +
				 unit_roundoff(p->o.dtype) * largest(o->values, o->n);
			lse->bar += 2 * largest_difference(lse->values, rounded_lse, lse->n);
		}
		free(rounded_o);
		free(rounded_lse);
	}
	if (p->softcap_approx) { /* a score is off by 2^-11 of itself, at most of the cap */
		double off = 0x1p-11 * (double)p->logits_soft_cap;

		o->bar += 2 * off * largest(o->values, o->n);
		lse->bar += off;
	}
	widen_free(p, &wide);
	if (!p->lse.data) {
		judge->n--; /* it was the last */
		free(lse->values);
		lse->values = NULL;
	}
	return r == 0 ? 0 : out_of_memory(err);
}

/* ---- the other operations ---- */

/* Element @index of the packed tensor, wherever its strides put it in @data. */
static double element_load(const struct fmha_problem *p, uint32_t role, const void *data,
			   int64_t index)
{
	int64_t dims[5], stride[5], at = 0;
	int n = proto_roles[role].n_dims;
	uint32_t dtype = p->tensor[role].dtype;

	if ((role == FMHA_T_K || role == FMHA_T_V) && p->kv_layout == FMHA_KV_VECTORIZED)
		return reference_load(data, p->tensor[role].dtype, index);
	if (role == FMHA_T_K && p->kv_layout == FMHA_KV_LATENT_FP8)
		dtype = FMHA_U8; /* factors are among its bytes */
	problem_extents(p, role, dims);
	problem_strides(p, role, stride);
	for (int i = n - 1; i >= 0; i--) {
		at += index % dims[i] * stride[i];
		index /= dims[i];
	}
	return reference_load(data, dtype, at);
}

/* One row of one head. */
static void load_row(const struct fmha_problem *p, uint32_t role, int64_t row, int64_t head,
		     int64_t heads, int64_t hdim, double *values)
{
	for (int64_t d = 0; d < hdim; d++)
		values[d] = element_load(p, role, p->tensor[role].data,
					 (row * heads + head) * hdim + d);
}

/*
 * The largest dP = dO . V that rows and keys can meet at, from a sample of them when there are
 * many. dS = P * (dP - D) cancels when a row sees few keys: what rounding leaves of it is measured
 * by dP and not by the gradient, which may be 0.
 */
static double largest_dp(const struct fmha_problem *p)
{
	int64_t rows = judge_elements(p, FMHA_T_DO) / ((int64_t)p->nhead_q * p->hdim_v);
	int64_t keys = judge_elements(p, FMHA_T_V) / ((int64_t)p->nhead_k * p->hdim_v);
	double pairs = (double)rows * (double)keys * p->nhead_q * p->hdim_v, most = 0;
	int64_t step = 1 + (int64_t)sqrt(pairs / 1e6);
	double d_o[512], v[512];

	for (int64_t i = 0; i < rows; i += step) {
		for (int64_t head = 0; head < p->nhead_q; head++) {
			load_row(p, FMHA_T_DO, i, head, p->nhead_q, p->hdim_v, d_o);
			for (int64_t j = 0; j < keys; j += step) {
				double dp = 0;

				load_row(p, FMHA_T_V, j, head / (p->nhead_q / p->nhead_k),
					 p->nhead_k, p->hdim_v, v);
				for (int d = 0; d < p->hdim_v; d++)
					dp += d_o[d] * v[d];
				if (isfinite(dp) && fabs(dp) > most)
					most = fabs(dp);
			}
		}
	}
	return most;
}

static double largest_input(const struct fmha_problem *p, uint32_t role)
{
	uint64_t bytes = 0;
	double most = 0;

	(void)problem_span_bytes(p, role, &bytes, NULL);
	for (int64_t i = 0; i < (int64_t)(bytes / fmha_dtype_bytes(p->tensor[role].dtype)); i++) {
		double value = fabs(reference_load(p->tensor[role].data, p->tensor[role].dtype, i));

		if (isfinite(value) && value > most)
			most = value;
	}
	return most;
}

static void gradient_bars(struct judge *judge, const struct fmha_problem *p, float scale)
{
	double relative = p->q.dtype == FMHA_F32 ? 1e-5 : p->q.dtype == FMHA_F16 ? 3e-3 : 2e-2;
	double exponent = exponent_error(p, largest_input(p, FMHA_T_LSE));
	/* P of n keys is about 1 / n, and its terms add up like a random walk. */
	double ds = largest_dp(p) * fmin(1, 2 / sqrt(fmax(p->seqlen_k, 1)));

	/* D is of order 1 and a sink's P seldom above a quarter: what rounding leaves of their
	 * products adds up like a random walk too, whatever cancels in the sum itself. */
	double d_sink = 0.25 * sqrt((double)judge_elements(p, FMHA_T_LSE) / fmax(p->nhead_q, 1));

	for (int i = 0; i < judge->n; i++) {
		struct output *output = &judge->outputs[i];
		double magnitude = fmax(largest(output->values, output->n), 0.1);

		if (output->role == FMHA_T_DQ)
			magnitude = fmax(magnitude,
					 ds * (double)scale * largest_input(p, FMHA_T_K));
		else if (output->role == FMHA_T_DK)
			magnitude = fmax(magnitude,
					 ds * (double)scale * largest_input(p, FMHA_T_Q));
		else if (output->role == FMHA_T_DBIAS)
			magnitude = fmax(magnitude, ds);
		else if (output->role == FMHA_T_DSINK) /* P D, summed over rows */
			magnitude = fmax(magnitude * 10, d_sink);
		output->bar = (relative + exponent) * magnitude;
	}
}

/* From the full [.., .., .., ..] gradient to one that is summed over the axes that bias broadcasts.
 */
static void sum_dbias(const struct fmha_problem *p, const double *full, struct output *dbias)
{
	int64_t dims[5], small[5], strides[4] = {0};

	problem_extents(p, FMHA_T_BIAS, dims);
	problem_extents(p, FMHA_T_DBIAS, small);
	for (int64_t i = 3, stride = 1; i >= 0; i--) {
		strides[i] = small[i] == 1 ? 0 : stride;
		stride *= small[i];
	}
	memset(dbias->values, 0, (size_t)dbias->n * sizeof(double));
	for (int64_t i = 0; i < dims[0] * dims[1] * dims[2] * dims[3]; i++) {
		int64_t at = i / (dims[1] * dims[2] * dims[3]) * strides[0] +
			     i / (dims[2] * dims[3]) % dims[1] * strides[1] +
			     i / dims[3] % dims[2] * strides[2] + i % dims[3] * strides[3];

		if (!is_untouched(full[i]))
			dbias->values[at] += full[i];
	}
}

static int judge_backward(struct judge *judge, const struct fmha_problem *p, struct fmha_error *err)
{
	struct output *dq = add_output(judge, p, FMHA_T_DQ);
	struct output *dk = add_output(judge, p, FMHA_T_DK);
	struct output *dv = add_output(judge, p, FMHA_T_DV);
	struct output *dsink = p->dsink.data ? add_output(judge, p, FMHA_T_DSINK) : NULL;
	struct output *dbias = p->dbias.data ? add_output(judge, p, FMHA_T_DBIAS) : NULL;
	double *full = p->dbias.data ? new_values(judge_elements(p, FMHA_T_BIAS)) : NULL;
	struct abi_bwd_args args;
	int r = -1;

	judge_bwd_args(p, &args);
	if (dq && dk && dv && (dsink || !p->dsink.data) && (!p->dbias.data || (dbias && full)))
		r = reference_backward(&args, dq->values, dk->values, dv->values, full,
				       dsink ? dsink->values : NULL);
	if (r == 0 && dbias)
		sum_dbias(p, full, dbias);
	free(full);
	if (r != 0)
		return out_of_memory(err);
	gradient_bars(judge, p, args.scale);
	return 0;
}

/* A copy of the role's memory from its first to its last element. */
static void *copy_span(const struct fmha_problem *p, uint32_t role)
{
	uint64_t bytes;
	void *copy;

	if (problem_span_bytes(p, role, &bytes, NULL) < 0)
		return NULL;
	copy = malloc(bytes ? bytes : 1);
	if (copy)
		memcpy(copy, p->tensor[role].data, bytes);
	return copy;
}

static int judge_append(struct judge *judge, const struct fmha_problem *p, struct fmha_error *err)
{
	static const uint32_t roles[] = {FMHA_T_K, FMHA_T_V, FMHA_T_Q_ROTATED, FMHA_T_K_DESCALE,
					 FMHA_T_V_DESCALE};
	const int n_roles = p->descale_computed ? 5 : 3;
	struct fmha_problem copied = *p;
	struct abi_appendkv_args args;
	int r = 0;

	for (int i = 0; i < n_roles; i++) {
		if (!p->tensor[roles[i]].data)
			continue;
		copied.tensor[roles[i]].data = copy_span(p, roles[i]);
		if (!copied.tensor[roles[i]].data)
			r = -1;
	}
	judge_append_args(&copied, &args);
	if (r == 0)
		r = reference_appendkv(&args);
	for (int i = 0; i < n_roles; i++) {
		struct output *output;

		if (!p->tensor[roles[i]].data)
			continue;
		output = r == 0 ? add_output(judge, p, roles[i]) : NULL;
		if (output) {
			for (int64_t e = 0; e < output->n; e++)
				output->values[e] = element_load(p, roles[i],
								 copied.tensor[roles[i]].data, e);
			/* Copying is exact; a rotated element may round either way. */
			output->bar = p->rope == FMHA_ROPE_NONE
					      ? 0
					      : 2 * unit_roundoff(p->tensor[roles[i]].dtype) *
							largest(output->values, output->n);
		} else {
			r = -1;
		}
		free(copied.tensor[roles[i]].data);
	}
	return r == 0 ? 0 : out_of_memory(err);
}

static int judge_merge(struct judge *judge, const struct fmha_problem *p, struct fmha_error *err)
{
	struct output *o = add_output(judge, p, FMHA_T_O);
	struct output *lse = p->lse.data ? add_output(judge, p, FMHA_T_LSE) : NULL;
	struct abi_combine_args args;

	judge_merge_args(p, &args);
	if (!o || (p->lse.data && !lse) ||
	    reference_combine(&args, o->values, lse ? lse->values : NULL) != 0)
		return out_of_memory(err);
	o->bar = fmax(unit_roundoff(p->o.dtype), 1e-6) * 1.5 * fmax(largest(o->values, o->n), 0.1);
	if (lse)
		lse->bar = 1e-5 * fmax(largest(lse->values, lse->n), 1);
	return 0;
}

static int32_t *lengths_after(const struct fmha_problem *p)
{
	const int32_t *before = p->seqlen_k_per_batch.data;
	int32_t *after = malloc((size_t)(p->batch > 0 ? p->batch : 1) * sizeof(*after));

	for (int32_t b = 0; after && b < p->batch; b++)
		after[b] = before[b] + p->seqlen_new;
	return after;
}

/* On copies: what is appended to the cache, and q as it turns, are attention's inputs. */
static int judge_append_attention(struct judge *judge, const struct fmha_problem *p,
				  struct fmha_error *err)
{
	static const uint32_t gone[] = {FMHA_T_K_NEW, FMHA_T_V_NEW, FMHA_T_ROTARY_COS,
					FMHA_T_ROTARY_SIN, FMHA_T_Q_ROTATED};
	struct fmha_problem copied = *p;
	struct abi_appendkv_args args;
	void *rotated;
	int r;

	copied.k.data = copy_span(p, FMHA_T_K);
	copied.v.data = p->v_in_k ? NULL : copy_span(p, FMHA_T_V);
	copied.q_rotated = copied.q;
	copied.q_rotated.data = copy_span(p, FMHA_T_Q);
	judge_append_args(&copied, &args);
	r = copied.k.data && (copied.v.data || p->v_in_k) && copied.q_rotated.data
		    ? reference_appendkv(&args)
		    : -1;
	if (p->rope != FMHA_ROPE_NONE)
		copied.q.data = copied.q_rotated.data;
	if (p->seqlen_k_per_batch.data)
		copied.seqlen_k_per_batch.data = lengths_after(p);
	if (p->seqlen_k_per_batch.data && !copied.seqlen_k_per_batch.data)
		r = -1;
	r = r == 0 ? 0 : out_of_memory(err);
	rotated = copied.q_rotated.data;
	for (size_t i = 0; i < sizeof(gone) / sizeof(gone[0]); i++)
		copied.tensor[gone[i]] = (struct fmha_tensor){0};
	copied.seqlen_new = 0;
	copied.rope = FMHA_ROPE_NONE;
	if (r == 0)
		r = judge_forward(judge, &copied, err);
	free(rotated);
	free(copied.k.data);
	free(copied.v.data);
	if (p->seqlen_k_per_batch.data)
		free(copied.seqlen_k_per_batch.data);
	return r;
}

int judge_new(const struct fmha_problem *problem, struct judge **ret_judge, struct fmha_error *err)
{
	struct judge *judge = calloc(1, sizeof(*judge));
	int r;

	if (!judge)
		return out_of_memory(err);
	if (problem->op == FMHA_FORWARD && problem->seqlen_new > 0)
		r = judge_append_attention(judge, problem, err);
	else if (problem->op == FMHA_FORWARD)
		r = judge_forward(judge, problem, err);
	else if (problem->op == FMHA_BACKWARD)
		r = judge_backward(judge, problem, err);
	else if (problem->op == FMHA_APPEND_KV)
		r = judge_append(judge, problem, err);
	else
		r = judge_merge(judge, problem, err);
	if (r < 0) {
		(void)judge_free(judge);
		return r;
	}
	*ret_judge = judge;
	return 0;
}

/* ---- comparing ---- */

/* NaN for NaN, an infinity for the same one, and else the distance. */
static double element_error(double expected, double got)
{
	if (isnan(expected) || isnan(got))
		return isnan(expected) && isnan(got) ? 0 : INFINITY;
	if (isinf(expected) || isinf(got))
		return expected == got ? 0 : INFINITY;
	return fabs(expected - got);
}

int judge_compare(const struct judge *judge, const struct fmha_problem *problem,
		  struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS])
{
	for (int i = 0; i < judge->n; i++) {
		const struct output *output = &judge->outputs[i];
		const void *data = problem->tensor[output->role].data;
		struct judge_verdict *verdict = &verdicts[i];

		double squares = 0, expected_squares = 0, error_squares = 0;

		*verdict = (struct judge_verdict){.role = output->role, .bar = output->bar};
		for (int64_t e = 0; e < output->n; e++) {
			double got, error;

			if (is_untouched(output->values[e]))
				continue;
			got = element_load(problem, output->role, data, e);
			error = element_error(output->values[e], got);
			if (isfinite(got) && isfinite(output->values[e])) {
				squares += got * got;
				expected_squares += output->values[e] * output->values[e];
				error_squares += error * error;
			}
			if (error > verdict->max_error) {
				verdict->max_error = error;
				verdict->at = e;
				verdict->expected = output->values[e];
				verdict->got = got;
			}
		}
		verdict->norm = sqrt(squares);
		verdict->expected_norm = sqrt(expected_squares);
		verdict->distance = error_squares > 0 ? sqrt(error_squares / expected_squares) : 0;
		verdict->ok = verdict->max_error <= verdict->bar;
	}
	return judge->n;
}

struct judge *judge_free(struct judge *judge)
{
	if (!judge)
		return NULL;
	for (int i = 0; i < judge->n; i++)
		free(judge->outputs[i].values);
	free(judge);
	return NULL;
}
