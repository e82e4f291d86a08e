/* SPDX-License-Identifier: MIT */
/*
 * Which kernel would run, which others could, and one of those made to run: the choice as JSON, then the
 * same problem by each kernel that fits, timed. (`fmhactl tune` does that and keeps what it finds.)
 */
#include <fmha/fmha.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 128, HEADS = 4, HDIM = 64, N = ROWS * HEADS * HDIM };

static void run(int r, const struct fmha_error *err)
{
	if (r == 0)
		return;
	fprintf(stderr, "%s, field '%s': %s\n", fmha_error_name(err->code), err->field, err->msg);
	exit(1);
}

/* The next canonical name of a forward kernel in the document, each once; 0: no more. A JSON library
 * does this better; what has to be shown fits without. */
static int next_name(const char *json, const char **at, char name[256])
{
	while ((*at = strstr(*at, "\"fwd-"))) {
		const char *begin = *at, *end = strchr(begin + 1, '"');

		*at = end;
		if (!end || end - begin >= 254)
			continue;
		memcpy(name, begin, (size_t)(end - begin + 1));
		name[end - begin + 1] = '\0';
		if (strstr(json, name) != begin)
			continue; /* not the first time */
		memmove(name, name + 1, (size_t)(end - begin - 1));
		name[end - begin - 1] = '\0';
		return 1;
	}
	return 0;
}

int main(void)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_problem p;
	struct fmha_error err;
	const char *at;
	char *json, name[256];
	int n_ran = 0;
	float *data;

	run(fmha_connect(NULL, &client, &err), &err);
	run(fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err), &err);
	run(fmha_buffer_new(device, 4 * N * sizeof(float), &buffer, &err), &err);
	data = fmha_buffer_data(buffer);
	for (int i = 0; i < 3 * N; i++)
		data[i] = 1;
	fmha_problem_init(&p);
	p.batch = 1, p.seqlen_q = p.seqlen_k = ROWS, p.nhead_q = p.nhead_k = HEADS,
	p.hdim_q = p.hdim_v = HDIM;
	p.q.buffer = p.k.buffer = p.v.buffer = p.o.buffer = fmha_buffer_id(buffer);
	p.k.offset = N * sizeof(float), p.v.offset = 2 * p.k.offset, p.o.offset = 3 * p.k.offset;
	run(fmha_explain(device, &p, NULL, &json, &err), &err);
	printf("%.300s...\n", json);

	for (at = json; n_ran < 4 && next_name(json, &at, name);) {
		const char *kernels[] = {name};
		const struct fmha_plan_options options = {
			.struct_size = sizeof(options), .n_kernels = 1, .kernels = kernels};
		struct fmha_run_result result;
		struct fmha_plan *plan;
		uint64_t best = UINT64_MAX;

		/* Those that do not fit are in the document, too, with the reason. */
		if (fmha_plan_new(device, &p, &options, &plan, &err) == FMHA_ENOKERNEL)
			continue;
		for (int i = 0; i < 5; i++) {
			memset(data + 3 * N, 0, N * sizeof(float));
			run(fmha_plan_run(plan, NULL, &result, &err), &err);
			best = result.kernel_ns < best ? result.kernel_ns : best;
			for (int j = 0; j < N; j++)
				if (fabsf(data[3 * N + j] - 1) > 1e-6f)
					return 1;
		}
		printf("%8.3f ms  %s\n", (double)best / 1e6, name);
		fmha_plan_free(plan);
		n_ran++;
	}
	free(json);
	fmha_buffer_free(buffer);
	fmha_device_free(device);
	fmha_client_free(client);
	return n_ran > 0 ? 0 : 1;
}
