/* SPDX-License-Identifier: MIT */
/* Decoding: each token's key, rotated by its position, and value go into the cache, and the row attends. */
#include <fmha/fmha.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROOM = 32, HEADS = 2, HDIM = 32, TOKEN = HEADS * HDIM, STEPS = 4 };

static float cache_k[ROOM * TOKEN], cache_v[ROOM * TOKEN], q[TOKEN], k_new[TOKEN], v_new[TOKEN],
	o[TOKEN];
static float cosines[ROOM * HDIM / 2], sines[ROOM * HDIM / 2];

int main(void)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_problem p;
	struct fmha_error err;
	double error = 0;
	int32_t before;

	for (int i = 0; i < ROOM * HDIM / 2; i++) {
		double angle = (double)(i / (HDIM / 2)) *
			       pow(10000, -2.0 * (i % (HDIM / 2)) / HDIM);

		cosines[i] = (float)cos(angle);
		sines[i] = (float)sin(angle);
	}
	if (fmha_connect(NULL, &client, &err) ||
	    fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err)) {
		fprintf(stderr, "%s: %s\n", fmha_error_name(err.code), err.msg);
		return 1;
	}
	fmha_problem_init(&p);
	p.batch = 1, p.seqlen_q = 1, p.seqlen_k = ROOM, p.seqlen_new = 1;
	p.nhead_q = p.nhead_k = HEADS, p.hdim_q = p.hdim_v = HDIM;
	p.q.data = q, p.k.data = cache_k, p.v.data = cache_v, p.o.data = o;
	p.k_new.data = k_new, p.v_new.data = v_new;
	p.seqlen_k_per_batch = (struct fmha_tensor){.data = &before, .dtype = FMHA_I32};
	p.rope = FMHA_ROPE_HALF_ROTATED, p.rotary_dim = HDIM, p.rotary_max_pos = ROOM;
	p.rotary_cos.data = cosines, p.rotary_sin.data = sines;
	for (before = 0; before < STEPS; before++) {
		for (int i = 0; i < TOKEN; i++) {
			q[i] = (float)rand() / (float)RAND_MAX - 0.5f;
			k_new[i] = (float)rand() / (float)RAND_MAX - 0.5f;
			v_new[i] = (float)rand() / (float)RAND_MAX - 0.5f;
		}
		if (fmha_forward(device, &p, NULL, NULL, &err)) { /* appends, then attends */
			fprintf(stderr, "%s: %s\n", fmha_error_name(err.code), err.msg);
			return 1;
		}
		for (int h = 0; h < HEADS; h++)
			for (int n = 0; n < HDIM / 2; n++) {
				float x = k_new[h * HDIM + n], y = k_new[h * HDIM + HDIM / 2 + n];
				double c = cosines[before * HDIM / 2 + n],
				       s = sines[before * HDIM / 2 + n];
				const float *key = cache_k + before * TOKEN + h * HDIM;

				error = fmax(error, fabs(key[n] - (x * c - y * s)));
				error = fmax(error, fabs(key[HDIM / 2 + n] - (x * s + y * c)));
			}
		for (int i = 0; i < TOKEN; i++) {
			error = fmax(error, fabs((double)cache_v[before * TOKEN + i] - v_new[i]));
			if (before == 0) /* the only key there is */
				error = fmax(error, fabs((double)o[i] - v_new[i]));
		}
	}
	for (int i = STEPS * TOKEN; i < ROOM * TOKEN; i++)
		error = fmax(error, fabs((double)cache_k[i])); /* nothing behind the last */
	printf("%d tokens, largest error %.1e\n", STEPS, error);
	fmha_device_free(device);
	fmha_client_free(client);
	return error < 1e-6 ? 0 : 1;
}
