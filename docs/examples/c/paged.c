/* SPDX-License-Identifier: MIT */
/*
 * Keys and values in pages, as serving engines keep them: found by vLLM's block table, by SGLang's lists,
 * and for packed prompts of several rows (batch prefill). All give what contiguous memory gives.
 */
#include <fmha/fmha.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
	N = 2,
	PAGE = 16,
	PAGES = 8,
	HEADS = 2,
	HDIM = 32,
	TOKEN = HEADS * HDIM,
	BLOCKS = 3,
	ROWS = 5
};

static float pages_k[PAGES * PAGE * TOKEN], pages_v[PAGES * PAGE * TOKEN];
static float q[ROWS * TOKEN], o[ROWS * TOKEN], alone[ROWS * TOKEN];
static float flat_k[BLOCKS * PAGE * TOKEN], flat_v[BLOCKS * PAGE * TOKEN];
static int32_t table[N][BLOCKS] = {{6, 1, 4}, {3, 0, 0}}, lengths[N] = {40, 9};
static int32_t indptr[N + 1] = {0, 3, 4}, indices[4] = {6, 1, 4, 3}, last[N] = {8, 9};
static int32_t starts[N + 1] = {0, 3, 5}; /* of packed rows */
static struct fmha_device *device;

#define INTS(array) ((struct fmha_tensor){.data = (array), .dtype = FMHA_I32})

static void forward(struct fmha_problem *p)
{
	struct fmha_error err;

	p->nhead_q = p->nhead_k = HEADS, p->hdim_q = p->hdim_v = HDIM;
	if (fmha_forward(device, p, NULL, NULL, &err) == 0)
		return;
	fprintf(stderr, "%s, field '%s': %s\n", fmha_error_name(err.code), err.field, err.msg);
	exit(1);
}

static struct fmha_problem paged(void)
{
	struct fmha_problem p;

	fmha_problem_init(&p);
	p.batch = N, p.seqlen_q = 1, p.seqlen_k = BLOCKS * PAGE;
	p.page_size = PAGE, p.n_pages = PAGES;
	p.q.data = q, p.k.data = pages_k, p.v.data = pages_v, p.o.data = o;
	return p;
}

/* @rows rows of sequence @b, the first at row @first of q, on memory without pages. */
static double compare(int b, int first, int rows)
{
	struct fmha_problem p;
	double most = 0;

	for (int i = 0; i < lengths[b]; i++) {
		size_t from = (size_t)(table[b][i / PAGE] * PAGE + i % PAGE) * TOKEN;

		memcpy(flat_k + i * TOKEN, pages_k + from, TOKEN * sizeof(float));
		memcpy(flat_v + i * TOKEN, pages_v + from, TOKEN * sizeof(float));
	}
	fmha_problem_init(&p);
	p.batch = 1, p.seqlen_q = rows, p.seqlen_k = lengths[b];
	p.mask = FMHA_MASK_BOTTOM_RIGHT, p.window_right = 0;
	p.q.data = q + first * TOKEN, p.k.data = flat_k, p.v.data = flat_v, p.o.data = alone;
	forward(&p);
	for (int i = 0; i < rows * TOKEN; i++)
		most = fmax(most, fabs((double)o[first * TOKEN + i] - alone[i]));
	return most;
}

int main(void)
{
	struct fmha_client *client;
	struct fmha_problem p;
	struct fmha_error err;
	double most = 0;

	for (int i = 0; i < PAGES * PAGE * TOKEN; i++) {
		pages_k[i] = (float)rand() / (float)RAND_MAX - 0.5f;
		pages_v[i] = (float)rand() / (float)RAND_MAX - 0.5f;
	}
	for (int i = 0; i < ROWS * TOKEN; i++)
		q[i] = 4 * ((float)rand() / (float)RAND_MAX - 0.5f);
	if (fmha_connect(NULL, &client, &err) ||
	    fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err)) {
		fprintf(stderr, "%s: %s\n", fmha_error_name(err.code), err.msg);
		return 1;
	}
	p = paged();
	p.max_blocks = BLOCKS, p.block_table = INTS(table), p.seqlen_k_per_batch = INTS(lengths);
	forward(&p);
	for (int b = 0; b < N; b++)
		most = fmax(most, compare(b, b, 1));
	printf("block table: %.1e from contiguous memory\n", most);

	p = paged();
	p.kv_indptr = INTS(indptr), p.kv_page_indices = INTS(indices), p.n_page_indices = 4;
	p.kv_last_page_len = INTS(last);
	forward(&p);
	for (int b = 0; b < N; b++)
		most = fmax(most, compare(b, b, 1));
	printf("lists: %.1e\n", most);

	p.mode = FMHA_GROUP, p.total_q = ROWS, p.seqlen_q = 3, p.seqstart_q = INTS(starts);
	p.mask = FMHA_MASK_BOTTOM_RIGHT, p.window_right = 0;
	forward(&p);
	for (int b = 0; b < N; b++)
		most = fmax(most, compare(b, starts[b], starts[b + 1] - starts[b]));
	printf("packed prompts: %.1e\n", most);
	fmha_device_free(device);
	fmha_client_free(client);
	return most < 1e-6 ? 0 : 1;
}
