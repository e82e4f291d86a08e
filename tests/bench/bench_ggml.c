/* SPDX-License-Identifier: MIT */
/*
 * bench_ggml.c: attention over latents on the CPU beside ggml's flash attention, in one process and by turns.
 *
 *   bench_ggml [--threads N] [--reps N]
 *
 * Built where FMHA_GGML_TREE names a tree of ggml, nothing of which is here. One row of queries, decode: keys of 576 half
 * floats that all heads share, values their first 512. ggml has its queries as floats, of the same values, and makes
 * half floats of them itself. Times are of the clock on the wall, the best of many runs, each side's threads awake in its
 * turn alone; errors of the first and the last head's rows, against double.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <ggml-cpu.h>
#include <ggml.h>

#include <kernels/cpu_kernels.h>
#include <kernels/cpu_progress.h>

#define HDIM        576
#define HDIM_V      512
#define MAX_THREADS 512
#define TURNS       5

static int n_threads = 16, n_reps = 20;

static double now(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *allocate(size_t bytes)
{
	void *p = aligned_alloc(4096, (bytes + 8191) / 4096 * 4096);

	if (!p) {
		fprintf(stderr, "bench_ggml: out of memory\n");
		exit(1);
	}
	memset(p, 0, (bytes + 8191) / 4096 * 4096);
	return p;
}

/* ---- our threads: asleep but in their turn, in which they wait for work without sleeping ---- */

static struct {
	pthread_t threads[MAX_THREADS];
	pthread_mutex_t mutex;
	pthread_cond_t wake;
	atomic_bool awake, ends;
	atomic_int phase_number, n_done;
	const struct cpu_kernel *kernel;
	const struct abi_fwd_args *args;
	void *workspace, *scratch[MAX_THREADS];
	int phase;
	int64_t n_tasks;
	atomic_llong next;
} team = {.mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void run_tasks(int self)
{
	int64_t task;

	while ((task = atomic_fetch_add(&team.next, 1)) < team.n_tasks)
		team.kernel->run(team.args, team.phase, task, n_threads, team.workspace,
				 team.scratch[self]);
}

static void *team_thread(void *argument)
{
	static const atomic_bool stop;
	struct cpu_progress progress = {.stop = &stop}; /* watched, as in the daemon */
	int self = (int)(intptr_t)argument, seen = 0;

	cpu_progress = &progress;
	while (!atomic_load(&team.ends)) {
		int number = atomic_load(&team.phase_number);

		if (number != seen) {
			seen = number;
			run_tasks(self);
			atomic_fetch_add(&team.n_done, 1);
		} else if (!atomic_load(&team.awake)) {
			pthread_mutex_lock(&team.mutex);
			while (!atomic_load(&team.awake) && !atomic_load(&team.ends))
				pthread_cond_wait(&team.wake, &team.mutex);
			pthread_mutex_unlock(&team.mutex);
		}
	}
	return NULL;
}

static void team_wake(bool awake)
{
	pthread_mutex_lock(&team.mutex);
	atomic_store(&team.awake, awake);
	pthread_cond_broadcast(&team.wake);
	pthread_mutex_unlock(&team.mutex);
}

static void run_ours(void)
{
	for (team.phase = 0; team.phase < team.kernel->n_phases; team.phase++) {
		team.n_tasks = team.kernel->n_tasks(team.args, team.phase, n_threads);
		atomic_store(&team.next, 0);
		atomic_store(&team.n_done, 0);
		atomic_fetch_add(&team.phase_number, 1);
		run_tasks(0);
		while (atomic_load(&team.n_done) < n_threads - 1)
			;
	}
}

/* ---- one problem on both sides ---- */

struct problem {
	int heads, keys;
	float *q, *o, *theirs; /* [heads, HDIM], [heads, HDIM_V] */
	uint16_t *q_half, *k;  /* [keys, HDIM] */
	struct abi_fwd_args args;
	struct ggml_context *context;
	struct ggml_cgraph *graph;
	struct ggml_cplan plan;
};

/* Values around one, of both signs. */
static void fill(float *to, uint16_t *half, size_t n, uint64_t state)
{
	for (size_t i = 0; i < n; i++) {
		state = state * 6364136223846793005u + 1442695040888963407u;
		half[i] = ggml_fp32_to_fp16((float)(int32_t)(state >> 32) * 0x1p-31f * 1.7f);
		if (to)
			to[i] = ggml_fp16_to_fp32(half[i]);
	}
}

static void init_ours(struct problem *p)
{
	p->args = (struct abi_fwd_args){
		.q = {p->q_half, (int64_t)p->heads * HDIM, (int64_t)p->heads * HDIM, HDIM, 1},
		.k = {p->k, (int64_t)p->keys * HDIM, HDIM, HDIM, 1},
		.o = {p->o, (int64_t)p->heads * HDIM_V, (int64_t)p->heads * HDIM_V, HDIM_V, 1},
		.sequences = {.batch = 1,
			      .seqlen_q_max = 1,
			      .seqlen_k_max = p->keys,
			      .total_q = 1,
			      .total_k = p->keys},
		.band = {.window_left = -1, .window_right = -1},
		.nhead_q = p->heads,
		.nhead_k = 1,
		.hdim_q = HDIM,
		.hdim_v = HDIM_V,
		.v_in_k = 1,
		.scale = 1 / sqrtf(HDIM),
		.dtype = ABI_F16,
		.o_dtype = ABI_F32,
	};
	team.kernel = cpu_kernel_find(cpu_level_detect(), ABI_FWD, ABI_F16, &p->args);
	team.args = &p->args;
	if (!team.kernel) {
		fprintf(stderr, "bench_ggml: no kernel\n");
		exit(1);
	}
	team.workspace = allocate(team.kernel->workspace_bytes(&p->args, n_threads));
	for (int i = 0; i < n_threads; i++)
		team.scratch[i] = allocate(team.kernel->scratch_bytes(&p->args));
}

static void init_theirs(struct problem *p, struct ggml_threadpool *threads)
{
	struct ggml_tensor *q, *k, *v, *o;

	p->context = ggml_init((struct ggml_init_params){
		.mem_size = (size_t)(p->keys + 4 * p->heads) * HDIM * 4 + (16u << 20)});
	q = ggml_new_tensor_4d(p->context, GGML_TYPE_F32, HDIM, 1, p->heads, 1);
	k = ggml_new_tensor_4d(p->context, GGML_TYPE_F16, HDIM, p->keys, 1, 1);
	v = ggml_view_4d(p->context, k, HDIM_V, p->keys, 1, 1, k->nb[1], k->nb[2], k->nb[3], 0);
	o = ggml_flash_attn_ext(p->context, q, k, v, NULL, p->args.scale, 0, 0);
	memcpy(q->data, p->q, (size_t)p->heads * HDIM * 4);
	memcpy(k->data, p->k, (size_t)p->keys * HDIM * 2);
	p->theirs = o->data;
	p->graph = ggml_new_graph(p->context);
	ggml_build_forward_expand(p->graph, o);
	p->plan = ggml_graph_plan(p->graph, n_threads, threads);
	p->plan.work_data = allocate(p->plan.work_size);
}

static void run_theirs(struct problem *p)
{
	if (ggml_graph_compute(p->graph, &p->plan) != GGML_STATUS_SUCCESS)
		abort();
}

/* Of one head's row: the largest difference from double. */
static double error_of(const struct problem *p, const float *o, int head)
{
	double *s = allocate((size_t)p->keys * sizeof(double)),
	       *sum = allocate(HDIM_V * sizeof(double));
	double most = -INFINITY, total = 0, worst = 0;

	for (int j = 0; j < p->keys; j++) {
		for (int d = 0; d < HDIM; d++)
			s[j] += (double)p->q[head * HDIM + d] *
				(double)ggml_fp16_to_fp32(p->k[(int64_t)j * HDIM + d]);
		s[j] *= (double)p->args.scale;
		most = fmax(most, s[j]);
	}
	for (int j = 0; j < p->keys; j++) {
		double weight = exp(s[j] - most);

		total += weight;
		for (int d = 0; d < HDIM_V; d++)
			sum[d] += weight * (double)ggml_fp16_to_fp32(p->k[(int64_t)j * HDIM + d]);
	}
	for (int d = 0; d < HDIM_V; d++)
		worst = fmax(worst, fabs((double)o[head * HDIM_V + d] - sum[d] / total));
	free(s);
	free(sum);
	return worst;
}

static double worst_of(const struct problem *p, const float *o)
{
	return fmax(error_of(p, o, 0), error_of(p, o, p->heads - 1));
}

/* Return: whether both are right. */
static bool row(int heads, int keys, struct ggml_threadpool *threads)
{
	struct problem p = {.heads = heads, .keys = keys};
	double ours = INFINITY, theirs = INFINITY, start, error, their_error;

	p.q = allocate((size_t)heads * HDIM * 4);
	p.q_half = allocate((size_t)heads * HDIM * 2);
	p.o = allocate((size_t)heads * HDIM_V * 4);
	p.k = allocate((size_t)keys * HDIM * 2);
	fill(p.q, p.q_half, (size_t)heads * HDIM, 1);
	fill(NULL, p.k, (size_t)keys * HDIM, 2);
	init_ours(&p);
	init_theirs(&p, threads);
	for (int turn = 0; turn < TURNS; turn++) {
		team_wake(true);
		for (int i = 0; i < n_reps; i++) {
			start = now();
			run_ours();
			ours = fmin(ours, now() - start);
		}
		team_wake(false);
		for (int i = 0; i < n_reps; i++) {
			start = now();
			run_theirs(&p);
			theirs = fmin(theirs, now() - start);
		}
		(void)usleep(20000); /* their threads wait awake for a while */
	}
	error = worst_of(&p, p.o);
	their_error = worst_of(&p, p.theirs);
	printf("1 x %-3d x %-6d %-10s %9.1f us %6.0f GFLOP/s, error %.1e | ggml %9.1f us, error "
	       "%.1e | "
	       "%.2f times\n",
	       heads, keys, team.kernel->pipeline, ours * 1e6,
	       2.0 * heads * keys * (HDIM + HDIM_V) / ours * 1e-9, error, theirs * 1e6, their_error,
	       theirs / ours);
	fflush(stdout);
	ggml_free(p.context);
	free(p.plan.work_data);
	for (int i = 0; i < n_threads; i++)
		free(team.scratch[i]);
	free(team.workspace);
	free(p.q);
	free(p.q_half);
	free(p.o);
	free(p.k);
	return error < 1e-2 && their_error < 1e-2;
}

int main(int argc, char **argv)
{
	static const int heads[] = {16, 128}, keys[] = {4096, 16384};
	struct ggml_threadpool_params params;
	struct ggml_threadpool *threads;
	bool right = true;

	for (int i = 1; i + 1 < argc; i += 2) {
		if (strcmp(argv[i], "--threads") == 0)
			n_threads = atoi(argv[i + 1]);
		else if (strcmp(argv[i], "--reps") == 0)
			n_reps = atoi(argv[i + 1]);
	}
	if (n_threads < 1 || n_threads > MAX_THREADS || n_reps < 1) {
		fprintf(stderr, "usage: bench_ggml [--threads N] [--reps N]\n");
		return 2;
	}
	params = ggml_threadpool_params_default(n_threads);
	threads = ggml_threadpool_new(&params);
	for (int i = 1; i < n_threads; i++)
		if (pthread_create(&team.threads[i], NULL, team_thread, (void *)(intptr_t)i) != 0)
			abort();
	printf("level %s, %d threads; batch x heads x keys\n", cpu_level_name(cpu_level_detect()),
	       n_threads);
	for (size_t h = 0; h < 2; h++)
		for (size_t k = 0; k < 2; k++)
			right &= row(heads[h], keys[k], threads);
	atomic_store(&team.ends, true);
	team_wake(true);
	for (int i = 1; i < n_threads; i++)
		pthread_join(team.threads[i], NULL);
	ggml_threadpool_free(threads);
	return !right;
}
