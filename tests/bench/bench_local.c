/* SPDX-License-Identifier: MIT */
/*
 * bench_local.c: what a launch through fmha_local.h costs beside the driver's own, in one run: the same
 * function with the same arguments, by turns. Then what a run in the daemon's worker takes on top of its
 * kernels, and the time that this process' processor works for it.
 *
 *   bench_local SOCKET DEVICE [served]
 *
 * Links the library's inside, to have the function and to launch nothing where only the library's own
 * code is to be timed.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <fmha/fmha_local.h>

#include "local.h"

enum { SEQLEN = 64, HEADS = 2, HDIM = 64, ROUNDS = 300, ROW = 1000, BLOCKS = 9 };

static struct {
	int (*init)(unsigned flags);
	int (*device)(int *device, int index);
	int (*retain)(void **context, int device);
	int (*current)(void *context);
	int (*alloc)(uintptr_t *address, size_t bytes);
	int (*synchronize)(void *stream);
	int (*stream)(void **stream, unsigned flags);
} cuda;

static double now_us(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static void require(bool good, const char *what, const struct fmha_error *err)
{
	if (good)
		return;
	(void)fprintf(stderr, "%s: %s\n", what, err ? err->msg : "failed");
	exit(1);
}

static void open_cuda(int index)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
	int device;

	require(library != NULL, "libcuda.so.1", NULL);
	*(void **)&cuda.init = dlsym(library, "cuInit");
	*(void **)&cuda.device = dlsym(library, "cuDeviceGet");
	*(void **)&cuda.retain = dlsym(library, "cuDevicePrimaryCtxRetain");
	*(void **)&cuda.current = dlsym(library, "cuCtxSetCurrent");
	*(void **)&cuda.alloc = dlsym(library, "cuMemAlloc_v2");
	*(void **)&cuda.synchronize = dlsym(library, "cuStreamSynchronize");
	*(void **)&cuda.stream = dlsym(library, "cuStreamCreate");
	require(cuda.init(0) == 0 && cuda.device(&device, index) == 0 &&
			cuda.retain(&context, device) == 0 && cuda.current(context) == 0,
		"a CUDA context", NULL);
}

struct bench {
	struct fmha_local_plan *plan;
	struct fmha_local_run run;
	struct launch_bases bases;
	const void *tensors[FMHA_N_TENSORS];
};

static void make_plan(struct bench *bench, const char *socket, uint32_t device)
{
	const struct fmha_client_options options = {.struct_size = sizeof(options), .path = socket};
	const size_t bytes = (size_t)SEQLEN * HEADS * HDIM * 2;
	struct fmha_problem problem;
	struct fmha_client *client;
	struct fmha_device *opened;
	struct fmha_error err;
	uintptr_t memory;
	double start;

	require(fmha_connect(&options, &client, &err) == 0, "connect", &err);
	require(fmha_device_open(client, device, &opened, &err) == 0, "open", &err);
	require(cuda.alloc(&memory, 4 * bytes) == 0, "memory", NULL);
	fmha_problem_init(&problem);
	problem.batch = 1;
	problem.nhead_q = problem.nhead_k = HEADS;
	problem.seqlen_q = problem.seqlen_k = SEQLEN;
	problem.hdim_q = problem.hdim_v = HDIM;
	for (int role = FMHA_T_Q; role <= FMHA_T_O; role++) {
		problem.tensor[role].data = (void *)(memory + (size_t)role * bytes); // NOLINT
		problem.tensor[role].dtype = FMHA_F16;
		bench->tensors[role] = problem.tensor[role].data;
		bench->bases.at[role] = memory + (size_t)role * bytes;
	}
	start = now_us();
	require(fmha_local_plan_new(opened, &problem, NULL, &bench->plan, &err) == 0, "plan", &err);
	printf("this process' first plan: %.2f ms", (now_us() - start) * 1e-3);
	start = now_us();
	require(fmha_local_plan_new(opened, &problem, NULL, &bench->plan, &err) == 0, "plan", &err);
	printf(", its second: %.2f ms\n", (now_us() - start) * 1e-3);
	require(bench->plan->current->n_launches == 1, "one launch", NULL);
	bench->run = (struct fmha_local_run){.struct_size = sizeof(bench->run),
					     .n_tensors = FMHA_N_TENSORS,
					     .tensors = bench->tensors};
	require(cuda.stream(&bench->run.stream, 1) == 0, "a stream", NULL);
}

static void run_local(struct bench *bench)
{
	struct fmha_error err;

	require(fmha_local_plan_run(bench->plan, &bench->run, &err) == 0, "run", &err);
}

/* The driver's call alone, its arguments bound beforehand. */
static void run_bare(struct bench *bench)
{
	const struct launch_record *record = &bench->plan->current->launches[0].record;
	static union abi_args args;
	static bool bound;
	void *parameters[] = {&args};

	if (!bound)
		launch_bind(record, &bench->bases, &args);
	bound = true;
	require(bench->plan->runtime->launch(bench->plan->current->launches[0].function,
					     record->grid[0], record->grid[1], record->grid[2],
					     record->block[0], record->block[1], record->block[2],
					     record->lds_bytes, bench->run.stream, parameters,
					     NULL) == 0,
		"launch", NULL);
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(double *values, int n)
{
	qsort(values, (size_t)n, sizeof(*values), by_size);
	return values[n / 2];
}

/* One launch, waited for. */
static double time_one(struct bench *bench, void (*run)(struct bench *))
{
	double start = now_us();

	run(bench);
	require(cuda.synchronize(bench->run.stream) == 0, "synchronize", NULL);
	return now_us() - start;
}

/* ROW launches, and the wait for the last: us a launch. */
static double time_row(struct bench *bench, void (*run)(struct bench *))
{
	double start = now_us();

	for (int i = 0; i < ROW; i++)
		run(bench);
	require(cuda.synchronize(bench->run.stream) == 0, "synchronize", NULL);
	return (now_us() - start) / ROW;
}

static void compare(struct bench *bench, const char *what, int rounds,
		    double (*time)(struct bench *, void (*)(struct bench *)))
{
	static double local[ROUNDS], bare[ROUNDS], ratio[ROUNDS];

	for (int i = -3; i < rounds; i++) {
		double b = time(bench, run_bare), l = time(bench, run_local);

		if (i < 0)
			continue;
		local[i] = l;
		bare[i] = b;
		ratio[i] = l / b;
	}
	printf("%s: local %.2f us, the driver's own call %.2f us, %.3f times\n", what,
	       median(local, rounds), median(bare, rounds), median(ratio, rounds));
}

static int launch_nothing(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
			  unsigned by, unsigned bz, unsigned lds, void *stream, void **parameters,
			  void **extra)
{
	(void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)lds;
	(void)stream, (void)parameters, (void)extra;
	return 0;
}

static void time_own_code(struct bench *bench)
{
	const struct local_runtime *real = bench->plan->runtime;
	struct local_runtime nothing = *real;
	double times[BLOCKS];

	nothing.launch = launch_nothing;
	bench->plan->runtime = &nothing;
	for (int i = 0; i < BLOCKS; i++) {
		double start = now_us();

		for (int k = 0; k < 10 * ROW; k++)
			run_local(bench);
		times[i] = (now_us() - start) / (10 * ROW);
	}
	bench->plan->runtime = real;
	printf("the library's own code: %.3f us a launch\n", median(times, BLOCKS));
}

/* ---- through the service ---- */

enum { SERVED_HEADS = 16, SERVED_HDIM = 128, SERVED_RUNS = 60 };

static double busy_us(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static struct fmha_plan *served_plan(struct fmha_device *device, int32_t seqlen)
{
	const uint64_t bytes = (uint64_t)seqlen * SERVED_HEADS * SERVED_HDIM * 2;
	struct fmha_problem problem;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	struct fmha_error err;

	require(fmha_buffer_new(device, 4 * bytes, &buffer, &err) == 0, "a buffer", &err);
	fmha_problem_init(&problem);
	problem.batch = 1;
	problem.nhead_q = problem.nhead_k = SERVED_HEADS;
	problem.seqlen_q = problem.seqlen_k = seqlen;
	problem.hdim_q = problem.hdim_v = SERVED_HDIM;
	for (int role = FMHA_T_Q; role <= FMHA_T_O; role++) {
		problem.tensor[role].buffer = fmha_buffer_id(buffer);
		problem.tensor[role].offset = (uint64_t)role * bytes;
		problem.tensor[role].dtype = FMHA_BF16;
	}
	require(fmha_plan_new(device, &problem, NULL, &plan, &err) == 0, "plan", &err);
	return plan;
}

/* A run's way, us; clocks of all processes are one. */
struct way {
	double begun, ended;                          /* here */
	double to_worker, to_kernel, answer, to_here; /* from one point to the next */
};

static double stamp(const char **at, const char *name)
{
	const char *found = strstr(*at, name);

	require(found, "a complete trace", NULL);
	*at = found + strlen(name);
	return strtod(*at, NULL) * 1e-3;
}

static char *trace_of(struct fmha_device *device)
{
	struct fmha_error err;
	char *json;

	require(fmha_device_trace(device, &json, &err) == 0, "the trace", &err);
	return json;
}

/* The worker's points of the last runs, in its order. */
static void read_trace(struct fmha_device *device, struct way ways[SERVED_RUNS])
{
	char *json = trace_of(device);
	const char *at = json;
	int n = -SERVED_RUNS;

	while ((at = strstr(at, "\"kind\":\"run\""))) {
		at++;
		n++;
	}
	at = json;
	for (int i = -n; i < SERVED_RUNS; i++) {
		double arrived = stamp(&at, "\"arrived_ns\":");
		double answered = stamp(&at, "\"answered_ns\":");
		double started = stamp(&at, "\"started_ns\":");
		double ended = stamp(&at, "\"ended_ns\":");

		if (i < 0)
			continue;
		ways[i].to_worker = arrived - ways[i].begun;
		ways[i].to_kernel = started - arrived;
		ways[i].answer = answered - ended;
		ways[i].to_here = ways[i].ended - answered;
	}
	free(json);
}

static void print_part(const char *what, const struct way *ways, size_t member)
{
	double values[SERVED_RUNS], most;

	for (int i = 0; i < SERVED_RUNS; i++)
		memcpy(&values[i], (const char *)&ways[i] + member, sizeof(double));
	most = median(values, SERVED_RUNS);
	printf("  %s %.1f (%.1f)", what, most, values[SERVED_RUNS * 9 / 10]);
}

static void print_ways(const struct way *ways)
{
	print_part("to the worker", ways, offsetof(struct way, to_worker));
	print_part("begun, or an end seen late", ways, offsetof(struct way, to_kernel));
	print_part("answered", ways, offsetof(struct way, answer));
	print_part("back", ways, offsetof(struct way, to_here));
	printf(" us\n");
}

static void time_served(struct fmha_device *device, int32_t seqlen)
{
	double on_top[SERVED_RUNS], kernel[SERVED_RUNS], busy = 0, most;
	struct fmha_plan *plan = served_plan(device, seqlen);
	static struct way ways[SERVED_RUNS];
	struct fmha_run_result result;
	struct fmha_error err;

	for (int i = -10; i < SERVED_RUNS; i++) {
		double was_busy = busy_us(), start = now_us(), took;

		require(fmha_plan_run(plan, NULL, &result, &err) == 0, "run", &err);
		took = now_us() - start;
		if (i < 0)
			continue;
		busy += busy_us() - was_busy;
		ways[i] = (struct way){.begun = start, .ended = start + took};
		kernel[i] = (double)result.kernel_ns * 1e-3;
		on_top[i] = took - kernel[i];
	}
	most = median(on_top, SERVED_RUNS);
	printf("served, %5d keys: kernel %8.1f us, on top %6.1f us (9 of 10 below %6.1f), busy "
	       "%5.1f us\n",
	       seqlen, median(kernel, SERVED_RUNS), most, on_top[SERVED_RUNS * 9 / 10],
	       busy / SERVED_RUNS);
	read_trace(device, ways);
	print_ways(ways);
}

static void time_service(const char *socket, uint32_t index)
{
	static const int32_t seqlens[] = {512, 1024, 2048, 4096, 8192, 16384};
	const struct fmha_client_options options = {.struct_size = sizeof(options), .path = socket};
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_error err;

	require(fmha_connect(&options, &client, &err) == 0, "connect", &err);
	require(fmha_device_open(client, index, &device, &err) == 0, "open", &err);
	free(trace_of(device)); /* from here on */
	for (size_t i = 0; i < sizeof(seqlens) / sizeof(seqlens[0]); i++)
		time_served(device, seqlens[i]);
}

int main(int argc, char **argv)
{
	static struct bench bench;

	if (argc == 4 && strcmp(argv[3], "served") == 0) {
		time_service(argv[1], (uint32_t)atoi(argv[2]));
		return 0;
	}
	if (argc != 3) {
		(void)fprintf(stderr, "usage: bench_local SOCKET DEVICE [served]\n");
		return 2;
	}
	open_cuda(0);
	make_plan(&bench, argv[1], (uint32_t)atoi(argv[2]));
	compare(&bench, "a launch and its end", ROUNDS, time_one);
	compare(&bench, "one of 1000 in a row", BLOCKS, time_row);
	time_own_code(&bench);
	return 0;
}
