#include <fmha/fmha.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 1, ROWS = 128, HEADS = 8, KV_HEADS = 2, HDIM = 64 };
static float q[BATCH * ROWS * HEADS * HDIM], k[BATCH * ROWS * KV_HEADS * HDIM];
static float v[BATCH * ROWS * KV_HEADS * HDIM], o[BATCH * ROWS * HEADS * HDIM];

int main(void)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_problem p;
	struct fmha_error err;

	for (size_t i = 0; i < sizeof(q) / sizeof(*q); i++)
		q[i] = (float)rand() / (float)RAND_MAX - 0.5f;
	for (size_t i = 0; i < sizeof(k) / sizeof(*k); i++)
		k[i] = v[i] = (float)rand() / (float)RAND_MAX - 0.5f;

	fmha_problem_init(&p);
	p.batch = BATCH, p.seqlen_q = p.seqlen_k = ROWS, p.hdim_q = p.hdim_v = HDIM;
	p.nhead_q = HEADS, p.nhead_k = KV_HEADS;
	p.mask = FMHA_MASK_TOP_LEFT, p.window_right = 0;        /* causal */
	p.q.data = q, p.k.data = k, p.v.data = v, p.o.data = o; /* FMHA_F32, packed */

	if (fmha_connect(NULL, &client, &err) ||
	    fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err) ||
	    fmha_forward(device, &p, NULL, NULL, &err)) {
		fprintf(stderr, "%s: %s\n", fmha_error_name(err.code), err.msg);
		return 1;
	}
	printf("o[0] = %g\n", o[0]);
	fmha_device_free(device);
	fmha_client_free(client);
	return 0;
}
