/* SPDX-License-Identifier: MIT */
/*
 * Forward with LSE, then gradients: compared with the change of the loss when Q, K or V is moved a little,
 * and computed again with the option of equal bits.
 */
#include <fmha/fmha.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
	ROWS = 20,
	HEADS = 4,
	KV_HEADS = 2,
	HDIM = 16,
	N_Q = ROWS * HEADS * HDIM,
	N_K = ROWS * KV_HEADS * HDIM
};

static float q[N_Q], k[N_K], v[N_K], o[N_Q], lse[HEADS * ROWS], grad[N_Q];
static float dq[N_Q], dk[N_K], dv[N_K], again[3][N_Q];
static struct fmha_device *device;

static struct fmha_problem problem(void)
{
	struct fmha_problem p;

	fmha_problem_init(&p);
	p.batch = 1, p.seqlen_q = p.seqlen_k = ROWS, p.hdim_q = p.hdim_v = HDIM;
	p.nhead_q = HEADS, p.nhead_k = KV_HEADS;
	p.mask = FMHA_MASK_TOP_LEFT, p.window_right = 0;
	p.q.data = q, p.k.data = k, p.v.data = v, p.o.data = o, p.lse.data = lse;
	return p;
}

static void run(int r, const struct fmha_error *err)
{
	if (r == 0)
		return;
	fprintf(stderr, "%s, field '%s': %s\n", fmha_error_name(err->code), err->field, err->msg);
	exit(1);
}

static double loss(void)
{
	struct fmha_problem p = problem();
	struct fmha_error err;
	double sum = 0;

	run(fmha_forward(device, &p, NULL, NULL, &err), &err);
	for (int i = 0; i < N_Q; i++)
		sum += (double)o[i] * grad[i];
	return sum;
}

static void backward(float *to_q, float *to_k, float *to_v, int deterministic)
{
	struct fmha_problem p = problem();
	struct fmha_error err;

	p.d_o.data = grad, p.dq.data = to_q, p.dk.data = to_k, p.dv.data = to_v;
	p.deterministic = deterministic;
	run(fmha_backward(device, &p, NULL, NULL, &err), &err);
}

/* The slope of the loss along a direction, by its gradient and by moving. */
static int compare(const char *name, float *x, const float *dx, int n)
{
	const float step = 1e-2f;
	double expected = 0, moved[2];
	float direction[N_Q], kept[N_Q];

	memcpy(kept, x, (size_t)n * sizeof(*x));
	for (int i = 0; i < n; i++) {
		direction[i] = (float)rand() / (float)RAND_MAX - 0.5f;
		expected += (double)dx[i] * direction[i];
	}
	for (int sign = 0; sign < 2; sign++) {
		for (int i = 0; i < n; i++)
			x[i] = kept[i] + (sign ? -step : step) * direction[i];
		moved[sign] = loss();
	}
	memcpy(x, kept, (size_t)n * sizeof(*x));
	printf("%s: %.4f by the gradient, %.4f by moving it\n", name, expected,
	       (moved[0] - moved[1]) / (2 * step));
	return fabs((moved[0] - moved[1]) / (2 * step) - expected) > 2e-3 * fmax(1, fabs(expected));
}

int main(void)
{
	struct fmha_client *client;
	struct fmha_error err;
	int failed = 0;

	for (int i = 0; i < N_Q; i++) {
		q[i] = 2 * ((float)rand() / (float)RAND_MAX - 0.5f);
		grad[i] = 2 * ((float)rand() / (float)RAND_MAX - 0.5f);
	}
	for (int i = 0; i < N_K; i++) {
		k[i] = 2 * ((float)rand() / (float)RAND_MAX - 0.5f);
		v[i] = 2 * ((float)rand() / (float)RAND_MAX - 0.5f);
	}
	run(fmha_connect(NULL, &client, &err), &err);
	run(fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err), &err);
	(void)loss();
	backward(dq, dk, dv, 0);
	backward(again[0], again[1], again[2], 1);
	for (int i = 0; i < N_Q; i++)
		failed |= fabs((double)again[0][i] - dq[i]) > 1e-4;
	memcpy(dq, again[0], sizeof(dq));
	backward(again[0], again[1], again[2], 1);
	failed |= memcmp(dq, again[0], sizeof(dq)) != 0; /* the same bits */
	failed |= compare("dQ", q, dq, N_Q);
	failed |= compare("dK", k, dk, N_K);
	failed |= compare("dV", v, dv, N_K);
	fmha_device_free(device);
	fmha_client_free(client);
	return failed;
}
