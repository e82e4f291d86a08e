/* SPDX-License-Identifier: MIT */
/*
 * client_faults.c: libfmha_client while its calls fail, one step after another, driven by programs.py.
 * A line on stdin each:
 *
 *   cycle    everything that a client does, from connecting to leaving
 *   local    the same with a plan that is launched here
 *   again    goes on with the step that was refused, which has to work now
 *
 * and one on stdout: "ok", "refused STEP NAME SENTENCE" or "wrong STEP". Nothing here allocates: what is
 * counted is the library's.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <fmha/fmha.h>
#include <fmha/fmha_local.h>

enum { SEQ = 64, HEADS = 2, DIM = 64, N = SEQ * HEADS * DIM };

static _Alignas(256) float q[N], k[N], v[N], o[N], d_o[N], dq[N], dk[N], dv[N], lse[HEADS * SEQ];
static float expected_o[N], expected_dq[N];
static bool knows_o, knows_dq;
static float difference; /* of the last result */

static struct {
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	struct fmha_request *request;
	struct fmha_local_plan *local;
	char *json;
} now;

static struct fmha_error error;

static void fill(float *values, uint32_t seed)
{
	for (int i = 0; i < N; i++) {
		seed = seed * 1664525 + 1013904223;
		values[i] = (float)(seed >> 8) * 0x1p-23f - 1;
	}
}

static void describe(struct fmha_problem *p)
{
	fmha_problem_init(p);
	p->batch = 1;
	p->nhead_q = p->nhead_k = HEADS;
	p->seqlen_q = p->seqlen_k = SEQ;
	p->hdim_q = p->hdim_v = DIM;
	p->q.data = q;
	p->k.data = k;
	p->v.data = v;
	p->o.data = o;
}

/* Whether it is what it was the first time, when nothing had failed. */
static bool is_same(const float *values, float *expected, bool *known)
{
	difference = 0;
	if (!*known)
		memcpy(expected, values, N * sizeof(float));
	*known = true;
	for (int i = 0; i < N; i++) {
		float d = fabsf(values[i] - expected[i]);

		difference = d > difference || !(d == d) ? d : difference;
	}
	return difference < 1e-5F; /* another kernel may be chosen */
}

#define WRONG 1 /* of a step: the answer is not true */

/* ---- the steps ---- */

static int connect_client(void)
{
	/* While everything fails, waiting is right: not for long, there are many. */
	const struct fmha_client_options options = {.struct_size = sizeof(options),
						    .timeout_ms = 300};

	return fmha_connect(&options, &now.client, &error);
}

static int list_devices(void)
{
	struct fmha_device_info devices[4];
	size_t n = 0;
	int r = fmha_client_devices(now.client, devices, 4, &n, &error);

	return r == 0 && n != 1 ? WRONG : r;
}

static int read_status(void)
{
	int r = fmha_client_status(now.client, &now.json, &error);

	free(now.json);
	now.json = NULL;
	return r;
}

static int open_device(void)
{
	return fmha_device_open(now.client, 0, &now.device, &error);
}

static int make_buffer(void)
{
	return fmha_buffer_new(now.device, 4 * sizeof(q), &now.buffer, &error);
}

static int make_plan(void)
{
	struct fmha_tensor *tensors[4];
	struct fmha_problem p;

	describe(&p);
	tensors[0] = &p.q;
	tensors[1] = &p.k;
	tensors[2] = &p.v;
	tensors[3] = &p.o;
	for (size_t i = 0; i < 4; i++) {
		tensors[i]->data = NULL;
		tensors[i]->buffer = fmha_buffer_id(now.buffer);
		tensors[i]->offset = i * sizeof(q);
	}
	return fmha_plan_new(now.device, &p, NULL, &now.plan, &error);
}

static float *begin_run(void)
{
	char *data = fmha_buffer_data(now.buffer);

	memcpy(data, q, sizeof(q));
	memcpy(data + sizeof(q), k, sizeof(k));
	memcpy(data + 2 * sizeof(q), v, sizeof(v));
	memset(data + 3 * sizeof(q), 0, sizeof(o));
	return (float *)(void *)(data + 3 * sizeof(q));
}

static int run_plan(void)
{
	float *result = begin_run();
	int r = fmha_plan_run(now.plan, NULL, NULL, &error);

	return r == 0 && !is_same(result, expected_o, &knows_o) ? WRONG : r;
}

static int submit_plan(void)
{
	float *result = begin_run();
	int fd, r = fmha_plan_submit(now.plan, NULL, &now.request, &error);

	if (r == 0)
		r = fmha_request_fd(now.request, &fd, &error);
	if (r == 0)
		r = fmha_request_wait(now.request, 5000, NULL, &error);
	now.request = fmha_request_free(now.request);
	return r == 0 && !is_same(result, expected_o, &knows_o) ? WRONG : r;
}

static int go_forward(void)
{
	struct fmha_problem p;
	int r;

	describe(&p);
	p.lse.data = lse;
	memset(o, 0, sizeof(o));
	r = fmha_forward(now.device, &p, NULL, NULL, &error);
	return r == 0 && !is_same(o, expected_o, &knows_o) ? WRONG : r;
}

static int go_backward(void)
{
	struct fmha_problem p;
	int r;

	describe(&p);
	p.lse.data = lse;
	p.d_o.data = d_o;
	p.dq.data = dq;
	p.dk.data = dk;
	p.dv.data = dv;
	memset(dq, 0, sizeof(dq));
	r = fmha_backward(now.device, &p, NULL, NULL, &error);
	return r == 0 && !is_same(dq, expected_dq, &knows_dq) ? WRONG : r;
}

static int explain(void)
{
	struct fmha_problem p;
	int r;

	describe(&p);
	r = fmha_explain(now.device, &p, NULL, &now.json, &error);
	if (r == 0 && now.json[0] != '{')
		r = WRONG;
	free(now.json);
	now.json = NULL;
	return r;
}

static int make_local(void)
{
	struct fmha_problem p;

	describe(&p);
	return fmha_local_plan_new(now.device, &p, NULL, &now.local, &error);
}

/* The stub's kernel copies q to o. */
static int run_local(void)
{
	const void *tensors[FMHA_N_TENSORS] = {
		[FMHA_T_Q] = q, [FMHA_T_K] = k, [FMHA_T_V] = v, [FMHA_T_O] = o};
	struct fmha_local_run run = {
		.struct_size = sizeof(run), .n_tensors = FMHA_N_TENSORS, .tensors = tensors};
	int r;

	memset(o, 0, sizeof(o));
	r = fmha_local_plan_run(now.local, &run, &error);
	return r == 0 && memcmp(o, q, sizeof(o)) != 0 ? WRONG : r;
}

struct step {
	const char *name;
	int (*run)(void);
};

static const struct step cycle[] = {
	{"connect", connect_client}, {"devices", list_devices}, {"status", read_status},
	{"open", open_device},       {"buffer", make_buffer},   {"plan", make_plan},
	{"run", run_plan},           {"submit", submit_plan},   {"forward", go_forward},
	{"backward", go_backward},   {"explain", explain},      {NULL, NULL}};
static const struct step local[] = {{"connect", connect_client}, {"open", open_device},
				    {"local plan", make_local},  {"local run", run_local},
				    {"local run", run_local},    {NULL, NULL}};

static void leave(void)
{
	now.local = fmha_local_plan_free(now.local);
	now.plan = fmha_plan_free(now.plan);
	now.buffer = fmha_buffer_free(now.buffer);
	now.device = fmha_device_free(now.device);
	now.client = fmha_client_free(now.client);
}

/* Return: the step that was refused; NULL: the visit is over. */
static const struct step *go_on(const struct step *step)
{
	for (; step->name; step++) {
		int r;

		error = (struct fmha_error){0};
		r = step->run();
		if (r == WRONG)
			break;
		if (r < 0) {
			(void)printf("refused %s: %s %s\n", step->name, fmha_error_name(error.code),
				     error.msg);
			return step;
		}
	}
	leave(); /* before it is told: what is held is looked at then */
	if (step->name)
		(void)printf("wrong %s by %g\n", step->name, (double)difference);
	else
		(void)printf("ok\n");
	return NULL;
}

int main(void)
{
	static char output[4096];
	const struct step *refused = NULL;
	char line[64];
	int n = 0;

	(void)setvbuf(stdout, output, _IOLBF, sizeof(output));
	(void)dlopen("libcuda.so.1", RTLD_NOW); /* a client that launches has loaded it */
	fill(q, 1);
	fill(k, 2);
	fill(v, 3);
	fill(d_o, 4);
	for (;;) { /* byte by byte: stdio would allocate */
		if (read(STDIN_FILENO, line + n, 1) != 1)
			return 0;
		if (line[n] != '\n') {
			n += n < (int)sizeof(line) - 2;
			continue;
		}
		line[n] = '\0';
		n = 0;
		if (strcmp(line, "again") != 0)
			leave();
		refused = go_on(strcmp(line, "again") == 0 && refused ? refused
				: strcmp(line, "local") == 0          ? local
								      : cycle);
	}
}
