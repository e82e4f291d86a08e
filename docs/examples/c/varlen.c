/* SPDX-License-Identifier: MIT */
/*
 * Packed sequences of different lengths, one of them empty, with rows behind them that belong to nobody:
 * group mode. Each is compared with a call of its own.
 */
#include <fmha/fmha.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 4, TOTAL = 150, HEADS = 4, HDIM = 32 };

static float q[TOTAL * HEADS * HDIM], k[TOTAL * HEADS * HDIM], v[TOTAL * HEADS * HDIM];
static float o[TOTAL * HEADS * HDIM], alone[TOTAL * HEADS * HDIM];
static int32_t starts[N + 1] = {0, 64, 64, 65, 140};

static void forward(struct fmha_device *device, struct fmha_problem *p)
{
	struct fmha_error err;

	p->nhead_q = p->nhead_k = HEADS, p->hdim_q = p->hdim_v = HDIM;
	p->mask = FMHA_MASK_BOTTOM_RIGHT, p->window_right = 0;
	if (fmha_forward(device, p, NULL, NULL, &err) == 0)
		return;
	fprintf(stderr, "%s, field '%s': %s\n", fmha_error_name(err.code), err.field, err.msg);
	exit(1);
}

int main(void)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_problem p;
	struct fmha_error err;
	double error = 0;

	for (size_t i = 0; i < sizeof(q) / sizeof(*q); i++) {
		q[i] = (float)rand() / (float)RAND_MAX - 0.5f;
		k[i] = (float)rand() / (float)RAND_MAX - 0.5f;
		v[i] = (float)rand() / (float)RAND_MAX - 0.5f;
	}
	if (fmha_connect(NULL, &client, &err) ||
	    fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err)) {
		fprintf(stderr, "%s: %s\n", fmha_error_name(err.code), err.msg);
		return 1;
	}
	fmha_problem_init(&p);
	p.mode = FMHA_GROUP, p.batch = N, p.total_q = p.total_k = TOTAL;
	p.seqlen_q = p.seqlen_k = 75; /* the longest */
	p.q.data = q, p.k.data = k, p.v.data = v, p.o.data = o;
	p.seqstart_q = p.seqstart_k = (struct fmha_tensor){.data = starts, .dtype = FMHA_I32};
	forward(device, &p);

	for (int b = 0; b < N; b++) {
		size_t first = (size_t)starts[b] * HEADS * HDIM;

		if (starts[b + 1] == starts[b])
			continue;
		fmha_problem_init(&p);
		p.batch = 1, p.seqlen_q = p.seqlen_k = starts[b + 1] - starts[b];
		p.q.data = q + first, p.k.data = k + first, p.v.data = v + first;
		p.o.data = alone + first;
		forward(device, &p);
	}
	for (int i = 0; i < TOTAL * HEADS * HDIM; i++)
		error = fmax(error, fabs((double)o[i] - alone[i])); /* 0 where nobody's rows are */
	printf("%d sequences in one call; largest difference from calls of their own %.1e\n", N,
	       error);
	fmha_device_free(device);
	fmha_client_free(client);
	return error < 1e-6 ? 0 : 1;
}
