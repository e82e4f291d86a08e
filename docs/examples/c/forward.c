/* SPDX-License-Identifier: MIT */
/*
 * Buffers that the daemon shares, a plan made once and run often: how a program calls that cares for
 * time. Prints what a run takes in the device and as the caller sees it.
 */
#include <fmha/fmha.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { BATCH = 1, ROWS = 256, HEADS = 8, KV_HEADS = 2, HDIM = 64, RUNS = 10 };

static void check(int r, const struct fmha_error *err)
{
	if (r == 0)
		return;
	fprintf(stderr, "%s, field '%s': %s\n", fmha_error_name(err->code), err->field, err->msg);
	exit(1);
}

static double now(void)
{
	struct timespec t;

	(void)timespec_get(&t, TIME_UTC);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Tensors side by side in one buffer, each at a multiple of 64 bytes. */
static float *place(struct fmha_tensor *tensor, struct fmha_buffer *buffer, uint64_t *used,
		    size_t n)
{
	float *data = (float *)((char *)fmha_buffer_data(buffer) + *used);

	tensor->buffer = fmha_buffer_id(buffer);
	tensor->offset = *used;
	*used += (n * sizeof(float) + 63) / 64 * 64;
	return data;
}

/* One row of the formula: causal row @row of head @h. */
static double expected(const float *q, const float *k, const float *v, int row, int h, int d)
{
	const float *x = q + (row * HEADS + h) * HDIM;
	int g = h / (HEADS / KV_HEADS);
	double sum = 0, total = 0;

	for (int j = 0; j <= row; j++) {
		double s = 0;

		for (int i = 0; i < HDIM; i++)
			s += (double)x[i] * k[(j * KV_HEADS + g) * HDIM + i];
		s = exp(s / sqrt(HDIM));
		total += s;
		sum += s * v[(j * KV_HEADS + g) * HDIM + d];
	}
	return sum / total;
}

int main(void)
{
	const size_t n_q = BATCH * ROWS * HEADS * HDIM, n_k = BATCH * ROWS * KV_HEADS * HDIM;
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	struct fmha_plan_info info;
	struct fmha_run_result result;
	struct fmha_problem p;
	struct fmha_error err;
	uint64_t used = 0;
	double best = 1, error = 0;

	check(fmha_connect(NULL, &client, &err), &err);
	check(fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err), &err);
	check(fmha_buffer_new(device, (2 * n_q + 2 * n_k) * sizeof(float) + 256, &buffer, &err),
	      &err);

	fmha_problem_init(&p);
	p.batch = BATCH, p.seqlen_q = p.seqlen_k = ROWS, p.hdim_q = p.hdim_v = HDIM;
	p.nhead_q = HEADS, p.nhead_k = KV_HEADS;
	p.mask = FMHA_MASK_TOP_LEFT, p.window_right = 0;
	float *q = place(&p.q, buffer, &used, n_q), *k = place(&p.k, buffer, &used, n_k);
	float *v = place(&p.v, buffer, &used, n_k), *o = place(&p.o, buffer, &used, n_q);
	for (size_t i = 0; i < n_q; i++)
		q[i] = (float)rand() / (float)RAND_MAX - 0.5f;
	for (size_t i = 0; i < n_k; i++) {
		k[i] = (float)rand() / (float)RAND_MAX - 0.5f;
		v[i] = (float)rand() / (float)RAND_MAX - 0.5f;
	}

	check(fmha_plan_new(device, &p, NULL, &plan, &err), &err);
	check(fmha_plan_info(plan, &info, &err), &err);
	for (uint32_t i = 0; i < info.n_stages; i++)
		printf("stage %s: %s\n", info.stages[i].family, info.stages[i].kernel);
	for (int i = 0; i < RUNS; i++) {
		double start = now();

		check(fmha_plan_run(plan, NULL, &result, &err), &err);
		best = fmin(best, now() - start);
	}
	printf("%.3f ms in the device, %.3f ms a call, %.1f GFLOP/s, %llu bytes of workspace\n",
	       (double)result.kernel_ns / 1e6, best * 1e3, info.flops / best / 1e9,
	       (unsigned long long)info.workspace_bytes);

	for (int row = 0; row < ROWS; row += 17)
		for (int h = 0; h < HEADS; h++)
			error = fmax(error, fabs(o[(row * HEADS + h) * HDIM + 5] -
						 expected(q, k, v, row, h, 5)));
	printf("largest error %.1e\n", error);
	fmha_plan_free(plan);
	fmha_buffer_free(buffer);
	fmha_device_free(device);
	fmha_client_free(client);
	return error < 1e-5 ? 0 : 1;
}
