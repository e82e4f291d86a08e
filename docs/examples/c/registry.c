/* SPDX-License-Identifier: MIT */
/*
 * The kernels of a device and named sets of them: what is known as JSON, a set for one framework beside
 * the default, and what happens to a problem when a set is all that there is. The daemon has to run as
 * this user: sets are everybody's.
 */
#include <fmha/fmha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char set[] =
	"[\"fwd-f*-h64-*\", \"fwd_splitkv*\"]"; /* patterns over canonical names */
static float x[4 * 64];

static void run(int r, const struct fmha_error *err)
{
	if (r == 0)
		return;
	fprintf(stderr, "%s, field '%s': %s\n", fmha_error_name(err->code), err->field, err->msg);
	exit(1);
}

static int forward(struct fmha_device *device, int backward, struct fmha_error *err)
{
	static float out[3][4 * 64], lse[4];
	struct fmha_problem p;

	fmha_problem_init(&p);
	p.batch = p.nhead_q = p.nhead_k = 1, p.seqlen_q = p.seqlen_k = 4, p.hdim_q = p.hdim_v = 64;
	p.q.data = p.k.data = p.v.data = x, p.o.data = out[0];
	if (!backward)
		return fmha_forward(device, &p, NULL, NULL, err);
	p.o.data = x, p.lse.data = lse, p.d_o.data = x;
	p.dq.data = out[0], p.dk.data = out[1], p.dv.data = out[2];
	return fmha_backward(device, &p, NULL, NULL, err);
}

int main(void)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_error err;
	uint64_t n, n_default;
	char *json;
	int r;

	run(fmha_connect(NULL, &client, &err), &err);
	run(fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err), &err);
	run(fmha_registry_export(device, "hdim_q == 64 and data_type == 'fp32'", &json, &err),
	    &err);
	printf("%zu bytes of JSON about fp32 kernels of head dim 64\n", strlen(json));
	r = strstr(json, "\"kernels\"") == NULL;
	free(json);

	run(fmha_registry_load(device, "mine", set, strlen(set), &n, &err), &err);
	printf("set 'mine': %llu kernels\n", (unsigned long long)n);
	r |= n == 0;
	run(fmha_registry_unload(device, "default", &n_default, &err), &err);
	printf("without 'default': %llu kernels left the registry\n",
	       (unsigned long long)n_default);
	run(forward(device, 0, &err), &err);
	if (forward(device, 1, &err) != FMHA_ENOKERNEL)
		r |= 1;
	else
		printf("backward: %s\n", err.msg);
	run(fmha_registry_load(device, "default", "[\"*\"]", 5, &n, &err), &err);
	run(forward(device, 1, &err), &err);
	run(fmha_registry_unload(device, "mine", NULL, &err), &err);
	fmha_device_free(device);
	fmha_client_free(client);
	return r;
}
