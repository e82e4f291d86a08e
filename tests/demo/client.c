/* SPDX-License-Identifier: MIT */
/*
 * The demo's C client: attention on three .npy files through libfmha_client, without a copy: the
 * files are read straight into memory that the worker maps.
 *
 *   fmha_demo_client Q.npy K.npy V.npy OUT.npy SECONDS
 *
 * Runs for so long, and prints one JSON line for demo.py, with the end and the time of each run.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <fmha/fmha.h>

#include "npy.h"

#define ALIGNMENT 256

static void die(const struct fmha_error *err)
{
	(void)fprintf(stderr, "%s: %s\n", fmha_error_name(err->code), err->msg);
	exit(1);
}

/* Places a tensor of @bytes at the end of what is taken. */
static void place(struct fmha_tensor *tensor, uint32_t dtype, size_t bytes, size_t *taken)
{
	tensor->dtype = dtype;
	tensor->offset = *taken;
	*taken += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void describe(struct fmha_problem *p, const struct npy files[3])
{
	fmha_problem_init(p);
	p->batch = (int32_t)files[0].dims[0];
	p->seqlen_q = (int32_t)files[0].dims[1];
	p->nhead_q = (int32_t)files[0].dims[2];
	p->hdim_q = (int32_t)files[0].dims[3];
	p->seqlen_k = (int32_t)files[1].dims[1];
	p->nhead_k = (int32_t)files[1].dims[2];
	p->hdim_v = (int32_t)files[2].dims[3];
}

static int64_t now_ns(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Prints the runs as JSON objects. */
static void run(struct fmha_plan *plan, double seconds)
{
	int64_t until = now_ns() + (int64_t)(seconds * 1e9), end = 0;
	struct fmha_error err = {0};

	for (int i = 0; i == 0 || end < until; i++) {
		struct fmha_run_result result;

		if (fmha_plan_run(plan, NULL, &result, &err))
			die(&err);
		end = now_ns();
		(void)printf("%s{\"end_ns\": %" PRId64 ", \"kernel_ms\": %.6f}", i ? ", " : "", end,
			     (double)result.kernel_ns / 1e6);
	}
}

int main(int argc, char **argv)
{
	struct npy files[3], out;
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	struct fmha_plan_info info;
	struct fmha_error err = {0};
	struct fmha_problem p;
	struct fmha_tensor *const tensors[] = {&p.q, &p.k, &p.v, &p.o};
	size_t taken = 0;
	uint8_t *memory;

	if (argc != 6)
		return 2;
	for (int i = 0; i < 3; i++) {
		if (npy_read(argv[1 + i], &files[i], &err))
			die(&err);
	}
	describe(&p, files);
	out = files[0];
	out.dims[3] = files[2].dims[3];
	out.bytes = files[0].bytes / (size_t)files[0].dims[3] * (size_t)out.dims[3];
	for (int i = 0; i < 4; i++)
		place(tensors[i], files[0].type == NPY_F4 ? FMHA_F32 : FMHA_BF16,
		      i < 3 ? files[i].bytes : out.bytes, &taken);

	if (fmha_connect(NULL, &client, &err) ||
	    fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err) ||
	    fmha_buffer_new(device, taken, &buffer, &err))
		die(&err);
	memory = fmha_buffer_data(buffer);
	for (int i = 0; i < 4; i++) {
		tensors[i]->buffer = fmha_buffer_id(buffer);
		if (i < 3)
			memcpy(memory + tensors[i]->offset, files[i].data, files[i].bytes);
	}
	if (fmha_plan_new(device, &p, NULL, &plan, &err) || fmha_plan_info(plan, &info, &err))
		die(&err);
	(void)printf("{\"kernel\": \"%s\", \"flops\": %.0f, \"runs\": [", info.stages[0].kernel,
		     info.flops);
	run(plan, strtod(argv[5], NULL));
	(void)printf("]}\n");
	out.data = memory + p.o.offset;
	if (npy_write(argv[4], &out, &err))
		die(&err);
	plan = fmha_plan_free(plan);
	buffer = fmha_buffer_free(buffer);
	device = fmha_device_free(device);
	client = fmha_client_free(client);
	for (int i = 0; i < 3; i++)
		npy_deinit(&files[i]);
	return 0;
}
