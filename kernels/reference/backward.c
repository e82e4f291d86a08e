/* SPDX-License-Identifier: MIT */
/*
 * backward.c: gradients of one query row at a time, each step a line of the chain rule:
 *   s = scale q.k;  t = cap tanh(s / cap);  z = t + bias + alibi;  p = softmax(z, sink)
 *   o = sum r p v, with r = 0 for a dropped element and 1 / p_keep for a kept one
 *   dp = r (do.v);  dz = p (dp - sum p dp);  dt = dz;  ds = dt (1 - (t / cap)^2) scale
 *   dq += ds k;  dk += ds q;  dv += r p do;  dbias = dz;  dsink = -p_sink (sum p dp - dlse)
 * Columns that the row does not see are never read: NaN there stays there.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kernels/reference.h>
#include <kernels/view.h>

struct column {
	double t; /* after the soft cap */
	double p;
	double dp;
	double r;
	bool visible;
};

struct gradients {
	double *dq, *dk, *dv, *dbias, *dsink;
};

/* The tensors of one head of one sequence as packed doubles, and the row that is worked on. */
struct head {
	double *k, *v; /* [k_len, hdim] */
	double *q, *d_o;
	struct column *columns;
};

static double dot(const double *x, const double *y, int32_t n)
{
	double sum = 0;

	for (int32_t d = 0; d < n; d++)
		sum += x[d] * y[d];
	return sum;
}

static void load(double *to, const struct abi_tensor *t, uint32_t dtype, int64_t offset, int32_t n)
{
	for (int32_t d = 0; d < n; d++)
		to[d] = reference_load(t->data, dtype, offset + d * t->stride_dim);
}

static bool row_dropout_keeps(const struct abi_bwd_args *a, const struct view_sequence *v,
			      int32_t head, int32_t row, int32_t column)
{
	const struct abi_tensor *randval = &a->dropout.randval;
	uint8_t byte;

	if (randval->data)
		byte = ((const uint8_t *)randval->data)[view_q_offset(randval, v, row, head) +
							column * randval->stride_dim];
	else
		byte = reference_dropout_byte(
			a->dropout.seed, a->dropout.offset, v->batch, head, a->nhead_q,
			(uint32_t)row + 16U * (uint32_t)a->dropout.row_block,
			(uint32_t)column + 32U * (uint32_t)a->dropout.column_block);
	return byte <= a->dropout.keep_at_most;
}

/* Fills t and z (in p) of every visible column; returns the largest z, the sink's logit included.
 */
static double row_logits(const struct abi_bwd_args *a, const struct view_sequence *v, int32_t head,
			 int32_t row, const struct head *h)
{
	double max = a->sink ? a->sink[head] : -INFINITY;

	for (int32_t j = 0; j < v->k_len; j++) {
		struct column *c = &h->columns[j];

		*c = (struct column){.visible = view_visible(&a->band, v, row, j) &&
						view_data_visible(&a->mask_data, v, head, row, j)};
		if (!c->visible)
			continue;
		c->t = a->scale * dot(h->q, h->k + (int64_t)j * a->hdim_q, a->hdim_q);
		if (a->logits_soft_cap > 0)
			c->t = a->logits_soft_cap * tanh(c->t / a->logits_soft_cap);
		c->p = c->t;
		if (a->bias.data)
			c->p += reference_load(a->bias.data, a->bias_dtype,
					       view_q_offset(&a->bias, v, row, head) +
						       j * a->bias.stride_dim);
		if (a->alibi_slopes)
			c->p += view_alibi(a->alibi_slopes[v->batch * a->alibi_stride_batch + head],
					   v, row, j);
		if (c->p > max || isnan(c->p))
			max = c->p;
	}
	return max;
}

/* Turns logits into probabilities; returns the sink's. */
static double row_softmax(const struct abi_bwd_args *a, const struct view_sequence *v, int32_t head,
			  struct column *columns, double max)
{
	double sink = a->sink ? exp(a->sink[head] - max) : 0;
	double sum = sink;

	for (int32_t j = 0; j < v->k_len; j++)
		if (columns[j].visible)
			sum += columns[j].p = exp(columns[j].p - max);
	for (int32_t j = 0; j < v->k_len; j++)
		columns[j].p /= sum;
	return sink / sum;
}

/* Fills dp and r; returns sum p dp, which is dO . O. */
static double row_dp(const struct abi_bwd_args *a, const struct view_sequence *v, int32_t head,
		     int32_t row, const struct head *h)
{
	double sum = 0;

	for (int32_t j = 0; j < v->k_len; j++) {
		struct column *c = &h->columns[j];

		if (!c->visible)
			continue;
		c->r = 1;
		if (a->dropout.p_drop > 0)
			c->r = row_dropout_keeps(a, v, head, row, j) ? a->dropout.p_keep_inverse
								     : 0;
		c->dp = c->r * dot(h->d_o, h->v + (int64_t)j * a->hdim_v, a->hdim_v);
		sum += c->p * c->dp;
	}
	return sum;
}

/* Rows of the packed results: q-like [b, i] and k-like [b, j]. */
static int64_t q_row(const struct abi_bwd_args *a, const struct view_sequence *v, int32_t row)
{
	return v->packed_q ? v->q_start + row : (int64_t)v->batch * a->sequences.seqlen_q_max + row;
}

static int64_t k_row(const struct abi_bwd_args *a, const struct view_sequence *v, int32_t column)
{
	int64_t position = v->leftpad + column;

	return v->packed_k ? v->k_start + position
			   : (int64_t)v->batch * a->sequences.seqlen_k_max + position;
}

static double *dbias_row(const struct abi_bwd_args *a, const struct view_sequence *v, int32_t head,
			 int32_t row, double *dbias)
{
	int64_t n_columns = a->sequences.seqlen_k_max;

	if (v->packed_q)
		return dbias +
		       ((int64_t)head * a->sequences.total_q + v->q_start + row) * n_columns;
	return dbias + (((int64_t)v->batch * a->nhead_q + head) * a->sequences.seqlen_q_max + row) *
			       n_columns;
}

static void row_accumulate(const struct abi_bwd_args *a, const struct view_sequence *v,
			   int32_t head, int32_t row, const struct head *h, double delta,
			   const struct gradients *g)
{
	int32_t head_k = head / (a->nhead_q / a->nhead_k);
	double *dq = g->dq + (q_row(a, v, row) * a->nhead_q + head) * a->hdim_q;

	for (int32_t j = 0; j < v->k_len; j++) {
		const struct column *c = &h->columns[j];
		double *dk = g->dk + (k_row(a, v, j) * a->nhead_k + head_k) * a->hdim_q;
		double *dv = g->dv + (k_row(a, v, j) * a->nhead_k + head_k) * a->hdim_v;
		double dz = c->p * (c->dp - delta), ds = dz * a->scale;

		if (!c->visible)
			continue;
		if (g->dbias)
			dbias_row(a, v, head, row, g->dbias)[j] = dz;
		if (a->logits_soft_cap > 0)
			ds *= 1 - (c->t / a->logits_soft_cap) * (c->t / a->logits_soft_cap);
		for (int32_t d = 0; d < a->hdim_q; d++) {
			dq[d] += ds * h->k[(int64_t)j * a->hdim_q + d];
			dk[d] += ds * h->q[d];
		}
		for (int32_t d = 0; d < a->hdim_v; d++)
			dv[d] += c->r * c->p * h->d_o[d];
	}
}

static void row_backward(const struct abi_bwd_args *a, const struct view_sequence *v, int32_t head,
			 int32_t row, const struct head *h, const struct gradients *g)
{
	double max, p_sink, delta;

	load(h->q, &a->q, a->dtype, view_q_offset(&a->q, v, row, head), a->hdim_q);
	load(h->d_o, &a->d_o, a->dtype, view_q_offset(&a->d_o, v, row, head), a->hdim_v);
	max = row_logits(a, v, head, row, h);
	if (max == -INFINITY)
		return; /* nothing to attend to: no gradient */
	p_sink = row_softmax(a, v, head, h->columns, max);
	delta = row_dp(a, v, head, row, h);
	if (a->dlse.data)
		delta -= a->dlse.data[view_rows_offset(&a->dlse, v, row, head)];
	row_accumulate(a, v, head, row, h, delta, g);
	if (g->dsink)
		g->dsink[head] -= p_sink * delta;
}

static void head_backward(const struct abi_bwd_args *a, const struct view_sequence *v, int32_t head,
			  const struct head *h, const struct gradients *g)
{
	int32_t head_k = head / (a->nhead_q / a->nhead_k);

	for (int32_t j = 0; j < v->k_len; j++) {
		load(h->k + (int64_t)j * a->hdim_q, &a->k, a->dtype,
		     view_k_offset(&a->k, v, j, head_k), a->hdim_q);
		load(h->v + (int64_t)j * a->hdim_v, &a->v, a->dtype,
		     view_k_offset(&a->v, v, j, head_k), a->hdim_v);
	}
	for (int32_t i = 0; i < v->q_len; i++)
		row_backward(a, v, head, i, h, g);
}

/* Zero, so that rows can add; what belongs to no sequence is left as it is. */
static void clear_sequence(const struct abi_bwd_args *a, const struct view_sequence *v,
			   const struct gradients *g)
{
	size_t dq = sizeof(double) * a->nhead_q * a->hdim_q;
	size_t dk = sizeof(double) * a->nhead_k * a->hdim_q;
	size_t dv = sizeof(double) * a->nhead_k * a->hdim_v;

	for (int32_t i = 0; i < v->q_len; i++) {
		memset((char *)g->dq + q_row(a, v, i) * dq, 0, dq);
		for (int32_t h = 0; g->dbias && h < a->nhead_q; h++)
			memset(dbias_row(a, v, h, i, g->dbias), 0,
			       sizeof(double) * a->sequences.seqlen_k_max);
	}
	for (int32_t j = 0; j < v->k_len; j++) {
		memset((char *)g->dk + k_row(a, v, j) * dk, 0, dk);
		memset((char *)g->dv + k_row(a, v, j) * dv, 0, dv);
	}
}

int reference_backward(const struct abi_bwd_args *args, double *dq, double *dk, double *dv,
		       double *dbias, double *dsink)
{
	struct gradients g = {.dq = dq, .dk = dk, .dv = dv, .dbias = dbias, .dsink = dsink};

	if (dsink)
		memset(dsink, 0, sizeof(double) * args->nhead_q);
	for (int32_t b = 0; b < args->sequences.batch; b++) {
		struct view_sequence v = view_sequence(&args->sequences, NULL, b);
		size_t hdims = (size_t)args->hdim_q + args->hdim_v;
		double *memory = malloc(sizeof(double) * (v.k_len + 1) * hdims);
		struct head h = {.columns = malloc(sizeof(*h.columns) * (v.k_len + 1))};

		if (!memory || !h.columns) {
			free(memory);
			free(h.columns);
			return -1;
		}
		h.k = memory;
		h.v = memory + (int64_t)v.k_len * args->hdim_q;
		h.q = memory + v.k_len * hdims;
		h.d_o = h.q + args->hdim_q;
		clear_sequence(args, &v, &g);
		for (int32_t head = 0; head < args->nhead_q; head++)
			head_backward(args, &v, head, &h, &g);
		free(memory);
		free(h.columns);
	}
	return 0;
}
