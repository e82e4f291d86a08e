/* SPDX-License-Identifier: MIT */
/*
 * A row on many keys: cut into splits by the planner's choice, by ours, and by hand: halves that may have
 * been computed on different machines, put together by their LSE.
 */
#include <fmha/fmha.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { KEYS = 4096, HEADS = 4, HDIM = 64, O = HEADS * HDIM };

static float q[O], k[KEYS * O], v[KEYS * O], whole[O], o[O], parts[2][O], lse_parts[2][HEADS];

static void run(int r, const struct fmha_error *err)
{
	if (r == 0)
		return;
	fprintf(stderr, "%s, field '%s': %s\n", fmha_error_name(err->code), err->field, err->msg);
	exit(1);
}

static struct fmha_problem problem(int keys, const float *keys_at, const float *values, float *out)
{
	struct fmha_problem p;

	fmha_problem_init(&p);
	p.batch = 1, p.seqlen_q = 1, p.seqlen_k = keys;
	p.nhead_q = p.nhead_k = HEADS, p.hdim_q = p.hdim_v = HDIM;
	p.q.data = q, p.k.data = (void *)keys_at, p.v.data = (void *)values, p.o.data = out;
	return p;
}

static double difference(void)
{
	double most = 0;

	for (int i = 0; i < O; i++)
		most = fmax(most, fabs((double)o[i] - whole[i]));
	return most;
}

int main(void)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_problem p;
	struct fmha_error err;
	double most = 0;

	for (int i = 0; i < KEYS * O; i++) {
		k[i] = (float)rand() / (float)RAND_MAX - 0.5f;
		v[i] = (float)rand() / (float)RAND_MAX - 0.5f;
	}
	for (int i = 0; i < O; i++)
		q[i] = 8 * ((float)rand() / (float)RAND_MAX - 0.5f);
	run(fmha_connect(NULL, &client, &err), &err);
	run(fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err), &err);
	p = problem(KEYS, k, v, whole);
	p.n_splits = 1;
	run(fmha_forward(device, &p, NULL, NULL, &err), &err);
	for (int n = 0; n < 8; n += 1 + (n > 0)) { /* 0: the planner chooses */
		p = problem(KEYS, k, v, o);
		p.n_splits = n;
		run(fmha_forward(device, &p, NULL, NULL, &err), &err);
		most = fmax(most, difference());
		printf("%d splits: %.1e from one\n", n, difference());
	}

	for (int half = 0; half < 2; half++) {
		size_t first = (size_t)half * KEYS / 2 * O;

		p = problem(KEYS / 2, k + first, v + first, parts[half]);
		p.lse = (struct fmha_tensor){.data = lse_parts[half], .dtype = FMHA_F32};
		run(fmha_forward(device, &p, NULL, NULL, &err), &err);
	}
	fmha_problem_init(&p);
	p.batch = 1, p.seqlen_q = 1, p.nhead_q = HEADS, p.hdim_v = HDIM, p.n_parts = 2;
	p.o_parts.data = parts, p.lse_parts.data = lse_parts, p.o.data = o;
	run(fmha_merge_states(device, &p, NULL, NULL, &err), &err);
	most = fmax(most, difference());
	printf("halves merged: %.1e\n", difference());
	fmha_device_free(device);
	fmha_client_free(client);
	return most < 1e-6 ? 0 : 1;
}
