/* SPDX-License-Identifier: MIT */
/* The judge: a right result passes, and one wrong element does not, whatever the tensor. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kernels/reference.h>
#include <proto/problem.h>

#include <judge.h>
#include <judge_args.h>

enum { SEQ = 9, HEADS = 4, KV_HEADS = 2, DIM = 16, ROWS = 2 * SEQ };

struct data {
	struct fmha_problem p;
	uint8_t q[ROWS * HEADS * DIM * 4], k[ROWS * KV_HEADS * DIM * 4],
		v[ROWS * KV_HEADS * DIM * 4];
	uint8_t o[ROWS * HEADS * DIM * 4], d_o[ROWS * HEADS * DIM * 4];
	float lse[ROWS * HEADS];
	uint8_t dq[ROWS * HEADS * DIM * 4], dk[ROWS * KV_HEADS * DIM * 4],
		dv[ROWS * KV_HEADS * DIM * 4];
};

static void fill(void *data, uint32_t dtype, int n, uint32_t seed)
{
	for (int i = 0; i < n; i++) {
		seed = seed * 1664525 + 1013904223;
		reference_store(data, dtype, i, (double)(seed >> 8) * 0x1p-23 - 1);
	}
}

static struct data *make(uint32_t dtype, uint32_t op)
{
	struct data *d = calloc(1, sizeof(*d));
	struct fmha_problem *p = &d->p;

	fmha_problem_init(p);
	p->op = op;
	p->batch = 2;
	p->nhead_q = HEADS;
	p->nhead_k = KV_HEADS;
	p->seqlen_q = p->seqlen_k = SEQ;
	p->hdim_q = p->hdim_v = DIM;
	p->mask = FMHA_MASK_TOP_LEFT;
	p->window_right = 0;
	p->q.data = d->q;
	p->k.data = d->k;
	p->v.data = d->v;
	p->o.data = d->o;
	p->lse.data = d->lse;
	p->q.dtype = p->k.dtype = p->v.dtype = p->o.dtype = dtype;
	fill(d->q, dtype, ROWS * HEADS * DIM, 1);
	fill(d->k, dtype, ROWS * KV_HEADS * DIM, 2);
	fill(d->v, dtype, ROWS * KV_HEADS * DIM, 3);
	if (op == FMHA_BACKWARD) {
		p->d_o.data = d->d_o;
		p->dq.data = d->dq;
		p->dk.data = d->dk;
		p->dv.data = d->dv;
		p->d_o.dtype = p->dq.dtype = p->dk.dtype = p->dv.dtype = dtype;
		fill(d->d_o, dtype, ROWS * HEADS * DIM, 4);
	}
	return d;
}

/* The reference's own result, rounded once, in the places of the outputs. */
static void compute(struct data *d)
{
	static double o[ROWS * HEADS * DIM], lse[ROWS * HEADS], dq[ROWS * HEADS * DIM],
		dk[ROWS * KV_HEADS * DIM], dv[ROWS * KV_HEADS * DIM];
	struct abi_fwd_args forward;
	struct abi_bwd_args backward;
	uint32_t dtype = d->p.q.dtype;

	judge_fwd_args(&d->p, &forward);
	assert_int_equal(reference_forward(&forward, o, lse, NULL), 0);
	for (int i = 0; i < ROWS * HEADS * DIM; i++)
		reference_store(d->o, dtype, i, o[i]);
	for (int i = 0; i < ROWS * HEADS; i++)
		d->lse[i] = (float)lse[i];
	if (d->p.op != FMHA_BACKWARD)
		return;
	judge_bwd_args(&d->p, &backward);
	assert_int_equal(reference_backward(&backward, dq, dk, dv, NULL, NULL), 0);
	for (int i = 0; i < ROWS * HEADS * DIM; i++)
		reference_store(d->dq, dtype, i, dq[i]);
	for (int i = 0; i < ROWS * KV_HEADS * DIM; i++) {
		reference_store(d->dk, dtype, i, dk[i]);
		reference_store(d->dv, dtype, i, dv[i]);
	}
}

static int n_wrong(const struct judge *judge, const struct data *d, uint32_t *ret_role)
{
	struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS];
	int n = judge_compare(judge, &d->p, verdicts), wrong = 0;

	assert_true(n > 0);
	for (int i = 0; i < n; i++) {
		if (!verdicts[i].ok) {
			wrong++;
			*ret_role = verdicts[i].role;
		}
	}
	return wrong;
}

static void check_each_output(uint32_t dtype, uint32_t op, const uint32_t *roles, int n_roles)
{
	struct data *d = make(dtype, op);
	struct judge *judge = NULL;
	uint32_t role = 0;

	compute(d); /* backward reads O and LSE */
	assert_int_equal(judge_new(&d->p, &judge, NULL), 0);
	assert_int_equal(n_wrong(judge, d, &role), 0);
	for (int i = 0; i < n_roles; i++) {
		const struct fmha_tensor *tensor = &d->p.tensor[roles[i]];
		static const int places[] = {0, 17, 100};

		for (int j = 0; j < 3; j++) {
			int at = roles[i] == FMHA_T_LSE ? places[j] % (ROWS * HEADS) : places[j];
			double was = reference_load(tensor->data, tensor->dtype, at);

			reference_store(tensor->data, tensor->dtype, at, was + 0.5);
			assert_int_equal(n_wrong(judge, d, &role), 1);
			assert_int_equal(role, roles[i]);
			reference_store(tensor->data, tensor->dtype, at, NAN);
			assert_int_equal(n_wrong(judge, d, &role), 1);
			reference_store(tensor->data, tensor->dtype, at, was);
		}
	}
	assert_int_equal(n_wrong(judge, d, &role), 0);
	judge = judge_free(judge);
	free(d);
}

static void forward_results_are_judged(void **state)
{
	static const uint32_t roles[] = {FMHA_T_O, FMHA_T_LSE};

	(void)state;
	check_each_output(FMHA_F32, FMHA_FORWARD, roles, 2);
	check_each_output(FMHA_F16, FMHA_FORWARD, roles, 2);
	check_each_output(FMHA_BF16, FMHA_FORWARD, roles, 2);
}

static void backward_results_are_judged(void **state)
{
	static const uint32_t roles[] = {FMHA_T_DQ, FMHA_T_DK, FMHA_T_DV};

	(void)state;
	check_each_output(FMHA_F32, FMHA_BACKWARD, roles, 3);
	check_each_output(FMHA_BF16, FMHA_BACKWARD, roles, 3);
}

/* One f32 element that is off by 3e-5 of the largest fails. */
static void the_bar_of_f32_is_tight(void **state)
{
	struct data *d = make(FMHA_F32, FMHA_FORWARD);
	struct judge *judge = NULL;
	uint32_t role;

	(void)state;
	compute(d);
	assert_int_equal(judge_new(&d->p, &judge, NULL), 0);
	((float *)d->o)[5] += 3e-5f;
	assert_int_equal(n_wrong(judge, d, &role), 1);
	judge = judge_free(judge);
	free(d);
}

/* A head that is computed with its neighbour's keys: what a wrong GQA mapping does. */
static void swapped_heads_are_found(void **state)
{
	struct data *d = make(FMHA_BF16, FMHA_FORWARD);
	struct judge *judge = NULL;
	uint16_t *o = (uint16_t *)d->o;
	uint32_t role;

	(void)state;
	compute(d);
	assert_int_equal(judge_new(&d->p, &judge, NULL), 0);
	for (int row = 0; row < ROWS; row++) {
		for (int i = 0; i < DIM; i++) {
			uint16_t *a = &o[(row * HEADS + 0) * DIM + i];
			uint16_t *b = &o[(row * HEADS + 2) * DIM + i], c = *a;

			*a = *b;
			*b = c;
		}
	}
	assert_int_equal(n_wrong(judge, d, &role), 1);
	judge = judge_free(judge);
	free(d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(forward_results_are_judged),
		cmocka_unit_test(backward_results_are_judged),
		cmocka_unit_test(the_bar_of_f32_is_tight),
		cmocka_unit_test(swapped_heads_are_found),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
