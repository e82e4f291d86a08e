/* SPDX-License-Identifier: MIT */
/*
 * What changes scores, one problem after the other: masks from both corners, a window with sink tokens,
 * ALiBi, a soft cap, a bias. With V an identity O is P, so that a row shows what it sees.
 */
#include <fmha/fmha.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 6, KEYS = 9, HDIM = 16 };

static float q[ROWS * HDIM], k[KEYS * HDIM], v[KEYS * HDIM], o[ROWS * HDIM], bias[ROWS * KEYS];
static const float slope = 0.5f;

struct option {
	const char *name;
	uint32_t mask;
	int left, right, sink_tokens;
	float cap;
	int alibi, bias;
};

static const struct option options[] = {
	{"no mask", FMHA_MASK_NONE, -1, -1, 0, 0, 0, 0},
	{"causal, top left", FMHA_MASK_TOP_LEFT, -1, 0, 0, 0, 0, 0},
	{"causal, bottom right", FMHA_MASK_BOTTOM_RIGHT, -1, 0, 0, 0, 0, 0},
	{"window 2, 1", FMHA_MASK_TOP_LEFT, 2, 1, 0, 0, 0, 0},
	{"window 2, 0, 2 sink tokens", FMHA_MASK_BOTTOM_RIGHT, 2, 0, 2, 0, 0, 0},
	{"soft cap 2", FMHA_MASK_NONE, -1, -1, 0, 2, 0, 0},
	{"ALiBi", FMHA_MASK_TOP_LEFT, -1, 0, 0, 0, 1, 0},
	{"bias", FMHA_MASK_NONE, -1, -1, 0, 0, 0, 1},
};

static int sees(const struct option *option, int i, int j)
{
	int anchor = option->mask == FMHA_MASK_BOTTOM_RIGHT ? KEYS - ROWS : 0;

	if (option->mask == FMHA_MASK_NONE)
		return 1;
	if (option->right >= 0 && j > anchor + i + option->right)
		return 0;
	return option->left < 0 || j >= anchor + i - option->left || j < option->sink_tokens;
}

static double score(const struct option *option, int i, int j)
{
	double s = 0;

	for (int d = 0; d < HDIM; d++)
		s += (double)q[i * HDIM + d] * k[j * HDIM + d];
	s /= sqrt(HDIM);
	if (option->cap > 0)
		s = option->cap * tanh(s / option->cap);
	if (option->alibi)
		s -= slope * abs(i + KEYS - ROWS - j);
	return s + (option->bias ? bias[i * KEYS + j] : 0);
}

static double largest_error(const struct option *option)
{
	double error = 0;

	for (int i = 0; i < ROWS; i++) {
		double total = 0;

		for (int j = 0; j < KEYS; j++)
			total += sees(option, i, j) ? exp(score(option, i, j)) : 0;
		for (int j = 0; j < KEYS; j++) {
			double p = sees(option, i, j) ? exp(score(option, i, j)) / total : 0;

			error = fmax(error, fabs(p - o[i * HDIM + j]));
		}
	}
	return error;
}

int main(void)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_error err;
	int failed = 0;

	for (int i = 0; i < ROWS * HDIM; i++)
		q[i] = 4 * ((float)rand() / (float)RAND_MAX - 0.5f);
	for (int i = 0; i < KEYS * HDIM; i++) {
		k[i] = 4 * ((float)rand() / (float)RAND_MAX - 0.5f);
		v[i] = i / HDIM == i % HDIM;
	}
	for (int i = 0; i < ROWS * KEYS; i++)
		bias[i] = (float)rand() / (float)RAND_MAX;
	if (fmha_connect(NULL, &client, &err) ||
	    fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err)) {
		fprintf(stderr, "%s: %s\n", fmha_error_name(err.code), err.msg);
		return 1;
	}
	for (size_t n = 0; n < sizeof(options) / sizeof(options[0]); n++) {
		const struct option *option = &options[n];
		struct fmha_problem p;

		fmha_problem_init(&p);
		p.batch = p.nhead_q = p.nhead_k = 1;
		p.seqlen_q = ROWS, p.seqlen_k = KEYS, p.hdim_q = p.hdim_v = HDIM;
		p.mask = option->mask, p.window_left = option->left, p.window_right = option->right;
		p.sink_tokens = option->sink_tokens, p.logits_soft_cap = option->cap;
		p.q.data = q, p.k.data = k, p.v.data = v, p.o.data = o; /* FMHA_F32, packed */
		if (option->alibi)
			p.alibi_slopes.data = (void *)&slope;
		if (option->bias)
			p.bias.data = bias;
		if (fmha_forward(device, &p, NULL, NULL, &err)) {
			fprintf(stderr, "%s: %s\n", option->name, err.msg);
			return 1;
		}
		printf("%s, largest error %.1e\n", option->name, largest_error(option));
		failed |= largest_error(option) > 1e-5;
		for (int i = 0; i < ROWS; i++, putchar('\n'))
			for (int j = 0; j < KEYS; j++)
				putchar(o[i * HDIM + j] > 0 ? '#' : '.');
	}
	fmha_device_free(device);
	fmha_client_free(client);
	return failed;
}
