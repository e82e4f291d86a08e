/* SPDX-License-Identifier: MIT */
/*
 * What being watched costs a tiny request: the same run, over and over, in blocks that take turns with
 * and without somebody who reads the device's trace and the daemon's status.
 *
 *   bench_watch SOCKET
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <fmha/fmha.h>

#define N_PAIRS 60
#define N_RUNS  1000 /* of a block: some tens of ms; watchers look once a block */

static void check(int r, const char *what, const struct fmha_error *err)
{
	if (r >= 0)
		return;
	(void)fprintf(stderr, "bench_watch: %s: %s\n", what, err->msg);
	exit(1);
}

static double now_us(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* us a run: the median of the block's. */
static double block(struct fmha_plan *plan)
{
	static double times[N_RUNS];
	struct fmha_error err;

	for (int i = 0; i < N_RUNS; i++) {
		double start = now_us();

		check(fmha_plan_run(plan, NULL, NULL, &err), "run", &err);
		times[i] = now_us() - start;
	}
	qsort(times, N_RUNS, sizeof(times[0]), compare);
	return times[N_RUNS / 2];
}

static double watched_block(struct fmha_client *client, struct fmha_plan *plan)
{
	struct fmha_device *watcher;
	struct fmha_error err;
	char *text;
	double us;

	check(fmha_device_open(client, FMHA_ANY_DEVICE, &watcher, &err), "open", &err);
	check(fmha_device_trace(watcher, &text, &err), "trace", &err);
	free(text);
	us = block(plan);
	check(fmha_device_trace(watcher, &text, &err), "trace", &err);
	free(text);
	check(fmha_client_status(client, &text, &err), "status", &err);
	free(text);
	watcher = fmha_device_free(watcher);
	return us;
}

int main(int argc, char **argv)
{
	const struct fmha_client_options options = {.struct_size = sizeof(options),
						    .path = argc > 1 ? argv[1] : NULL};
	double ratios[N_PAIRS], alone[N_PAIRS];
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_problem problem;
	struct fmha_plan *plan;
	struct fmha_error err;

	check(fmha_connect(&options, &client, &err), "connect", &err);
	check(fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err), "open", &err);
	check(fmha_buffer_new(device, 1 << 16, &buffer, &err), "buffer", &err);
	fmha_problem_init(&problem);
	problem.batch = problem.nhead_q = problem.nhead_k = 1;
	problem.seqlen_q = problem.seqlen_k = 8;
	problem.hdim_q = problem.hdim_v = 16;
	problem.q.buffer = problem.k.buffer = problem.v.buffer = problem.o.buffer = fmha_buffer_id(
		buffer);
	problem.k.offset = 4096, problem.v.offset = 8192, problem.o.offset = 12288;
	check(fmha_plan_new(device, &problem, NULL, &plan, &err), "plan", &err);
	for (int i = 0; i < N_PAIRS; i++) {
		/* Which comes first changes, so that what drifts does not count. */
		double before = i % 2 ? 0 : block(plan), watched = watched_block(client, plan);

		alone[i] = i % 2 ? block(plan) : before;
		ratios[i] = watched / alone[i];
	}
	qsort(ratios, N_PAIRS, sizeof(ratios[0]), compare);
	qsort(alone, N_PAIRS, sizeof(alone[0]), compare);
	(void)printf(
		"a tiny run, unwatched: %.1f us; watched: %.3f of that (quartiles %.3f to %.3f)\n",
		alone[N_PAIRS / 2], ratios[N_PAIRS / 2], ratios[N_PAIRS / 4],
		ratios[3 * N_PAIRS / 4]);
	plan = fmha_plan_free(plan);
	buffer = fmha_buffer_free(buffer);
	device = fmha_device_free(device);
	client = fmha_client_free(client);
	return 0;
}
