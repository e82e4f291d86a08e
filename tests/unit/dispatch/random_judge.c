/* SPDX-License-Identifier: MIT */
/* random_judge.c: results against the oracle; what no result owns must not have changed. */
#include "random_case.h"

#include <math.h>

#include <kernels/reference.h>

static double tolerance(const struct runner *r, enum fmha_tensor_role role)
{
	const struct fmha_problem *p = &r->f.problem;
	uint32_t type = p->op == FMHA_MERGE_STATES ? p->o_parts.dtype : p->k.dtype;
	uint32_t out = p->tensor[role].dtype;
	bool rotates = p->rope != FMHA_ROPE_NONE;
	static const double of_type[] = {[FMHA_F32] = 1e-4,  [FMHA_F16] = 6e-3,  [FMHA_BF16] = 4e-2,
					 [FMHA_E4M3] = 4e-2, [FMHA_E5M2] = 4e-2, [FMHA_I8] = 4e-2};

	if (role == FMHA_T_LSE)
		return type == FMHA_F32 || !rotates ? 2e-4 + of_type[type] / 10 : of_type[type];
	return of_type[type] > of_type[out] ? of_type[type] : of_type[out];
}

struct judge {
	struct runner *r;
	uint8_t *owned[FMHA_N_TENSORS]; /* a byte a byte: elements that a run may write */
	double worst, limit;
};

static void judge_value(struct judge *j, enum fmha_tensor_role role, const int64_t i[5],
			double want, double magnitude)
{
	struct fixture *f = &j->r->f;
	struct oracle o = {.f = f, .p = &f->plan.problem};
	uint32_t bytes = fmha_dtype_bytes(f->problem.tensor[role].dtype);
	double got = oracle_load(&o, role, i), limit;
	int64_t index = 0;

	for (int d = 0; d < 5; d++)
		index += i[d] * f->plan.problem.tensor[role].stride[d];
	memset(j->owned[role] + index * bytes, 1, bytes);
	if (want == got || (isinf(want) && isinf(got) && want < 0 && got < 0))
		return;
	limit = tolerance(j->r, role) * (magnitude + fabs(want));
	if (!(fabs(got - want) <= limit))
		fail_msg("seed %u: tensor.%s[%d, %d, %d, %d]: %g, should be %g", j->r->first_seed,
			 proto_roles[role].name, (int)i[0], (int)i[1], (int)i[2], (int)i[3], got,
			 want);
}

static void judge_forward(struct judge *j, const struct oracle *o)
{
	const struct fmha_problem *p = o->p;

	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);
		int64_t row_b = p->mode == FMHA_GROUP ? 0 : b;

		if (s.rows < p->min_seqlen_q)
			continue;
		for (int h = 0; h < p->nhead_q; h++)
			for (int i = 0; i < s.rows; i++) {
				double row[256],
					lse = oracle_row(o, &s, h, i, row, NULL, NULL, NULL);

				for (int d = 0; d < p->hdim_v; d++)
					judge_value(j, FMHA_T_O, AT(row_b, s.q_start + i, h, d),
						    row[d], 1);
				if (p->lse.buffer)
					judge_value(j, FMHA_T_LSE, AT(row_b, h, s.q_start + i), lse,
						    1);
				for (int c = 0; p->randval.buffer && c < s.keys; c++)
					judge_value(j, FMHA_T_RANDVAL,
						    AT(row_b, h, s.q_start + i, c),
						    reference_dropout_byte(
							    p->dropout_seed, p->dropout_offset,
							    (uint32_t)b, (uint32_t)h,
							    (uint32_t)p->nhead_q,
							    (uint32_t)(i + p->dropout_row),
							    (uint32_t)(c + p->dropout_column)),
						    0);
			}
	}
}

/* The gradients' sums, dense. */
struct gradients {
	double *dq, *dk, *dv, *dbias;
	uint8_t *has_dbias;
	double dsink[64];
};

static int64_t packed_index(const struct fmha_problem *p, enum fmha_tensor_role role,
			    const int64_t i[5])
{
	int64_t dims[5], index = 0;

	problem_extents(p, role, dims);
	for (int d = 0; d < 4; d++)
		index = index * dims[d] + (dims[d] > 1 ? i[d] : 0);
	return index;
}

static double *packed_new(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	int64_t dims[5];

	problem_extents(p, role, dims);
	return calloc((size_t)(dims[0] * dims[1] * dims[2] * dims[3]) + 1, sizeof(double));
}

static void gradient_row(const struct oracle *o, const struct oracle_sequence *s, int h, int i,
			 struct gradients *g)
{
	const struct fmha_problem *p = o->p;
	int64_t row_b = p->mode == FMHA_GROUP ? 0 : s->b;
	int64_t key_b = p->seqstart_k.buffer ? 0 : s->b;
	int hk = h / (p->nhead_q / p->nhead_k);
	double *buffer = calloc(3 * (size_t)s->keys + 3, sizeof(double)), out[256], rows_sum = 0;
	double *prob = buffer, *keep = buffer + s->keys + 1, *slope = keep + s->keys + 1;
	double lse = oracle_row(o, s, h, i, out, prob, keep, slope);

	for (int d = 0; d < p->hdim_v; d++)
		rows_sum += oracle_load(o, FMHA_T_DO, AT(row_b, s->q_start + i, h, d)) *
			    oracle_load(o, FMHA_T_O, AT(row_b, s->q_start + i, h, d));
	if (p->dlse.buffer && lse > -INFINITY)
		rows_sum -= oracle_load(o, FMHA_T_DLSE, AT(row_b, h, s->q_start + i));
	if (p->sink.buffer && lse > -INFINITY)
		g->dsink[h] -= exp(oracle_load(o, FMHA_T_SINK, AT(h)) - lse) * rows_sum;
	for (int j = 0; j < s->keys; j++) {
		double dp = 0, ds;

		for (int d = 0; d < p->hdim_v; d++) {
			double grad = oracle_load(o, FMHA_T_DO, AT(row_b, s->q_start + i, h, d));
			const int64_t *at = AT(key_b, s->k_start + j, hk, d);

			dp += grad * oracle_load(o, FMHA_T_V, at) * keep[j];
			g->dv[packed_index(p, FMHA_T_DV, at)] += prob[j] * keep[j] * grad;
		}
		ds = prob[j] * (dp - rows_sum);
		if (p->dbias.buffer) {
			int64_t at = packed_index(p, FMHA_T_DBIAS, AT(row_b, h, s->q_start + i, j));

			g->dbias[at] += ds;
			g->has_dbias[at] = 1;
		}
		ds *= slope[j] * p->scale;
		for (int d = 0; d < p->hdim_q; d++) {
			const int64_t *q = AT(row_b, s->q_start + i, h, d);
			const int64_t *k = AT(key_b, s->k_start + j, hk, d);

			g->dq[packed_index(p, FMHA_T_DQ, q)] += ds * oracle_load(o, FMHA_T_K, k);
			g->dk[packed_index(p, FMHA_T_DK, k)] += ds * oracle_load(o, FMHA_T_Q, q);
		}
	}
	free(buffer);
}

static double largest(const double *x, int64_t n)
{
	double most = 0;

	for (int64_t i = 0; i < n; i++)
		most = fmax(most, fabs(x[i]));
	return most;
}

/* The rows of dBias that some sequence has; the only one of all rows' sum. */
static void own_dbias(struct judge *j, const int64_t n[5])
{
	struct oracle o = {.f = &j->r->f, .p = &j->r->f.plan.problem};
	const struct fmha_problem *p = o.p;
	uint32_t bytes = fmha_dtype_bytes(p->dbias.dtype);

	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(&o, b);
		int64_t row_b = n[0] == 1 ? 0 : b;

		for (int64_t i = 0; i < (n[2] == 1 ? 1 : s.rows); i++)
			for (int64_t h = 0; h < n[1]; h++)
				for (int64_t c = 0; c < n[3]; c++) {
					int64_t row = n[2] == 1 ? 0 : s.q_start + i;
					const int64_t *stride = p->dbias.stride;
					int64_t at = row_b * stride[0] + h * stride[1] +
						     row * stride[2] + c * stride[3];

					memset(j->owned[FMHA_T_DBIAS] + at * bytes, 1, bytes);
				}
	}
}

static void judge_gradients(struct judge *j, const struct oracle *o, const struct gradients *g)
{
	const struct fmha_problem *p = o->p;
	int64_t n[5];
	double most[3];

	for (int t = 0; t < 3; t++) {
		problem_extents(p, (enum fmha_tensor_role)(FMHA_T_DQ + t), n);
		most[t] = 0.5 + largest(t == 0   ? g->dq
					: t == 1 ? g->dk
						 : g->dv,
					n[0] * n[1] * n[2] * n[3]);
	}
	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);
		int64_t row_b = p->mode == FMHA_GROUP ? 0 : b, key_b = p->seqstart_k.buffer ? 0 : b;

		for (int i = 0; i < s.rows; i++)
			for (int h = 0; h < p->nhead_q; h++)
				for (int d = 0; d < p->hdim_q; d++) {
					const int64_t *at = AT(row_b, s.q_start + i, h, d);

					judge_value(j, FMHA_T_DQ, at,
						    g->dq[packed_index(p, FMHA_T_DQ, at)], most[0]);
				}
		for (int c = 0; c < s.keys; c++)
			for (int h = 0; h < p->nhead_k; h++) {
				for (int d = 0; d < p->hdim_q; d++) {
					const int64_t *at = AT(key_b, s.k_start + c, h, d);

					judge_value(j, FMHA_T_DK, at,
						    g->dk[packed_index(p, FMHA_T_DK, at)], most[1]);
				}
				for (int d = 0; d < p->hdim_v; d++) {
					const int64_t *at = AT(key_b, s.k_start + c, h, d);

					judge_value(j, FMHA_T_DV, at,
						    g->dv[packed_index(p, FMHA_T_DV, at)], most[2]);
				}
			}
	}
	if (p->dbias.buffer) {
		double size;

		problem_extents(p, FMHA_T_DBIAS, n);
		size = 0.5 + largest(g->dbias, n[0] * n[1] * n[2] * n[3]);
		own_dbias(j, n);
		for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++)
			if (g->has_dbias[i])
				judge_value(j, FMHA_T_DBIAS,
					    AT(i / (n[1] * n[2] * n[3]), i / (n[2] * n[3]) % n[1],
					       i / n[3] % n[2], i % n[3]),
					    g->dbias[i], size);
	}
	for (int h = 0; p->dsink.buffer && h < p->nhead_q; h++)
		judge_value(j, FMHA_T_DSINK, AT(h), g->dsink[h], 0.1 + largest(g->dsink, 64) * 2);
}

static void judge_backward(struct judge *j, const struct oracle *o)
{
	const struct fmha_problem *p = o->p;
	struct gradients g = {.dq = packed_new(p, FMHA_T_DQ),
			      .dk = packed_new(p, FMHA_T_DK),
			      .dv = packed_new(p, FMHA_T_DV)};
	int64_t n[5];

	if (p->dbias.buffer) {
		problem_extents(p, FMHA_T_DBIAS, n);
		g.dbias = packed_new(p, FMHA_T_DBIAS);
		g.has_dbias = calloc((size_t)(n[0] * n[1] * n[2] * n[3]) + 1, 1);
	}
	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);

		for (int h = 0; h < p->nhead_q; h++)
			for (int i = 0; i < s.rows; i++)
				gradient_row(o, &s, h, i, &g);
	}
	judge_gradients(j, o, &g);
	free(g.dq);
	free(g.dk);
	free(g.dv);
	free(g.dbias);
	free(g.has_dbias);
}

static void judge_append(struct judge *j, const struct oracle *o)
{
	const struct fmha_problem *p = o->p;
	struct fixture *f = &j->r->f;

	if (memcmp(f->bindings[FMHA_T_K].host, o->k, f->bindings[FMHA_T_K].bytes) != 0)
		fail_msg("seed %u: the cache of keys is not bit-equal to the formula",
			 j->r->first_seed);
	if (memcmp(f->bindings[FMHA_T_V].host, o->v, f->bindings[FMHA_T_V].bytes) != 0)
		fail_msg("seed %u: the cache of values is not bit-equal to the formula",
			 j->r->first_seed);
	for (int64_t b = 0; p->q_rotated.buffer && b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);

		for (int i = 0; i < s.rows; i++)
			for (int h = 0; h < p->nhead_q; h++)
				for (int d = 0; d < p->hdim_q; d++)
					judge_value(j, FMHA_T_Q_ROTATED, AT(b, i, h, d),
						    oracle_q(o, &s, i, h, d), 0.1);
	}
}

static void judge_merge(struct judge *j, const struct oracle *o)
{
	const struct fmha_problem *p = o->p;

	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);
		int64_t row_b = p->mode == FMHA_GROUP ? 0 : b;

		for (int i = 0; i < s.rows; i++)
			for (int h = 0; h < p->nhead_q; h++) {
				double sum = 0;

				for (int n = 0; n < p->n_parts; n++)
					sum += exp(oracle_load(o, FMHA_T_LSE_PARTS,
							       AT(n, row_b, h, s.q_start + i)));
				for (int d = 0; d < p->hdim_v; d++) {
					double want = 0;

					for (int n = 0; n < p->n_parts; n++)
						want += oracle_load(
								o, FMHA_T_O_PARTS,
								AT(n, row_b, s.q_start + i, h, d)) *
							exp(oracle_load(
								o, FMHA_T_LSE_PARTS,
								AT(n, row_b, h, s.q_start + i))) /
							sum;
					judge_value(j, FMHA_T_O, AT(row_b, s.q_start + i, h, d),
						    want, 1);
				}
				if (p->lse.buffer)
					judge_value(j, FMHA_T_LSE, AT(row_b, h, s.q_start + i),
						    log(sum), 1);
			}
	}
}

/* What no element owns must still be what it was. */
static void judge_rest(struct judge *j)
{
	struct runner *r = j->r;

	for (int role = 0; role < FMHA_N_TENSORS; role++) {
		const uint8_t *now = r->f.bindings[role].host;

		if (!r->before[role] || role == FMHA_T_K || role == FMHA_T_V)
			continue;
		for (uint64_t i = 0; i < r->f.bindings[role].bytes; i++)
			if (!j->owned[role][i] && now[i] != r->before[role][i])
				fail_msg("seed %u: tensor.%s: byte %llu belongs to no result, but "
					 "changed",
					 r->first_seed, proto_roles[role].name,
					 (unsigned long long)i);
	}
}

void judge_run(struct runner *r)
{
	struct judge j = {.r = r};
	struct oracle o = {.f = &r->f, .p = &r->f.plan.problem};

	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (r->before[role])
			j.owned[role] = calloc(1, r->f.bindings[role].bytes + 1);
	if (r->f.problem.seqlen_new > 0) {
		o.k = r->before[FMHA_T_K];
		o.v = r->before[FMHA_T_V];
		oracle_append(&o);
		judge_append(&j, &o);
	}
	if (r->f.problem.op == FMHA_FORWARD)
		judge_forward(&j, &o);
	else if (r->f.problem.op == FMHA_BACKWARD)
		judge_backward(&j, &o);
	else if (r->f.problem.op == FMHA_MERGE_STATES)
		judge_merge(&j, &o);
	judge_rest(&j);
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		free(j.owned[role]);
}
