/* SPDX-License-Identifier: MIT */
/* e4m3 tensors with a scale each; O in float. The numbers are ones that e4m3 has, so that all of the error is the kernel's. */
#include <fmha/fmha.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 32, HDIM = 64, N = ROWS * HDIM };

static uint8_t q[N], k[N], v[N];
static float o[N], scales[3] = {0.25f, 0.5f, 3};

/* OCP e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa. */
static float value(uint8_t x)
{
	int exponent = x >> 3 & 15, mantissa = x & 7;
	float size = exponent ? ldexpf(1 + (float)mantissa / 8, exponent - 7)
			      : ldexpf((float)mantissa / 8, -6);

	return x & 0x80 ? -size : size;
}

int main(void)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_problem p;
	struct fmha_error err;
	double error = 0;

	for (int i = 0; i < N; i++) {
		q[i] = (uint8_t)(rand() % 64 | (rand() & 1) << 7); /* up to 1.875 */
		k[i] = (uint8_t)(rand() % 64 | (rand() & 1) << 7);
		v[i] = (uint8_t)(rand() % 64 | (rand() & 1) << 7);
	}
	if (fmha_connect(NULL, &client, &err) ||
	    fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err)) {
		fprintf(stderr, "%s: %s\n", fmha_error_name(err.code), err.msg);
		return 1;
	}
	fmha_problem_init(&p);
	p.batch = p.nhead_q = p.nhead_k = 1, p.seqlen_q = p.seqlen_k = ROWS,
	p.hdim_q = p.hdim_v = HDIM;
	p.q = (struct fmha_tensor){.data = q, .dtype = FMHA_E4M3};
	p.k = (struct fmha_tensor){.data = k, .dtype = FMHA_E4M3};
	p.v = (struct fmha_tensor){.data = v, .dtype = FMHA_E4M3};
	p.o = (struct fmha_tensor){.data = o, .dtype = FMHA_F32};
	p.q_descale.data = &scales[0], p.k_descale.data = &scales[1], p.v_descale.data = &scales[2];
	if (fmha_forward(device, &p, NULL, NULL, &err)) {
		fprintf(stderr, "%s, field '%s': %s\n", fmha_error_name(err.code), err.field,
			err.msg);
		return 1;
	}
	for (int i = 0; i < ROWS; i++) {
		double total = 0, sum[HDIM] = {0};

		for (int j = 0; j < ROWS; j++) {
			double s = 0;

			for (int d = 0; d < HDIM; d++)
				s += (double)value(q[i * HDIM + d]) * value(k[j * HDIM + d]);
			s = exp(s * scales[0] * scales[1] / sqrt(HDIM));
			total += s;
			for (int d = 0; d < HDIM; d++)
				sum[d] += s * value(v[j * HDIM + d]) * scales[2];
		}
		for (int d = 0; d < HDIM; d++)
			error = fmax(error, fabs(o[i * HDIM + d] - sum[d] / total));
	}
	printf("largest error %.1e, of values up to %g\n", error, 1.875 * scales[2]);
	fmha_device_free(device);
	fmha_client_free(client);
	return error < 0.2 ? 0 : 1;
}
