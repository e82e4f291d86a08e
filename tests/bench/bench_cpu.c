/* SPDX-License-Identifier: MIT */
/*
 * bench_cpu.c: the CPU kernels against what the same cores can do, in the same run.
 *
 *   bench_cpu [--threads N] [--level NAME] [--reps N] [--only TEXT] [--quick]
 *   bench_cpu --threads 16 --only caches     # caches of 8 bits and long heads, at each level
 *
 * Compute-bound kernels are compared with the multiply-add rate of a loop without memory, decode
 * with a copy between arrays far larger than the caches. Other programs on the machine disturb
 * both, so every figure is the best of many short runs, the two sides in turn, and time is each
 * thread's own processor time (the longest of them): what a thread waits for its turn is not
 * counted. Needs libc and libm only: link it statically and carry it anywhere.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench_cpu.h"
#include "bench_peak.h"

int n_threads = 1, n_reps = 7;
enum cpu_level level;
static const char *only;
int quick;

static double thread_seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One job on all threads; job(self, argument) for each; returns the longest processor time. */
struct team_job {
	void (*job)(int self, void *argument);
	void *argument;
	int self;
	double seconds;
};

static void *team_thread(void *argument)
{
	static const atomic_bool stop;
	struct cpu_progress progress = {.stop = &stop}; /* watched, as in the daemon */
	struct team_job *j = argument;
	double start = thread_seconds();

	cpu_progress = &progress;
	j->job(j->self, j->argument);
	j->seconds = thread_seconds() - start;
	cpu_progress = NULL;
	return NULL;
}

static double team_run(void (*job)(int self, void *argument), void *argument)
{
	static struct team_job jobs[MAX_THREADS];
	static pthread_t threads[MAX_THREADS];
	double longest = 0;

	for (int i = 0; i < n_threads; i++) {
		jobs[i] = (struct team_job){job, argument, i, 0};
		if (i > 0 && pthread_create(&threads[i], NULL, team_thread, &jobs[i]) != 0)
			abort();
	}
	team_thread(&jobs[0]);
	for (int i = 1; i < n_threads; i++)
		pthread_join(threads[i], NULL);
	for (int i = 0; i < n_threads; i++)
		longest = fmax(longest, jobs[i].seconds);
	return longest;
}

void *allocate(size_t bytes)
{
	void *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096);

	if (!p) {
		fprintf(stderr, "bench_cpu: out of memory\n");
		exit(1);
	}
	memset(p, 0, (bytes + 4095) / 4096 * 4096 + 4096);
	return p;
}

/* The two yardsticks. */

static double peak_flops[MAX_THREADS];

static void peak_job(int self, void *argument)
{
	peak_flops[self] = peak_run((enum peak_kind)(intptr_t)argument, 100000);
}

/* FLOP/s of all threads together. */
static double measure_peak(enum peak_kind kind)
{
	double seconds = team_run(peak_job, (void *)(intptr_t)kind), flops = 0;

	for (int i = 0; i < n_threads; i++)
		flops += peak_flops[i];
	return flops / seconds;
}

#define COPY_BYTES ((size_t)64 << 20)
static char *copy_memory[MAX_THREADS];

static void copy_job(int self, void *argument)
{
	(void)argument;
	peak_copy(copy_memory[self] + COPY_BYTES, copy_memory[self], COPY_BYTES);
}

/* Bytes/s that a copy reads and writes. */
double measure_copy(void)
{
	if (!copy_memory[0])
		for (int i = 0; i < n_threads; i++)
			copy_memory[i] = allocate(2 * COPY_BYTES);
	return 2.0 * (double)COPY_BYTES * n_threads / team_run(copy_job, NULL);
}

/* Kernels. */

static void launch_job(int self, void *argument)
{
	struct launch *l = argument;
	int64_t task;

	double start = thread_seconds(), end;

	while ((task = atomic_fetch_add(&l->next, 1)) < l->n_tasks) {
		l->kernel->run(l->args, l->phase, task, n_threads, l->workspace, l->scratch[self]);
		if (n_threads > 1)
			continue;
		end = thread_seconds();
		l->best[l->first + task] = fmin(l->best[l->first + task], end - start);
		start = end;
	}
}

void launch_init(struct launch *l, const struct cpu_kernel *kernel, const void *args)
{
	int64_t n = 0;

	*l = (struct launch){.kernel = kernel, .args = args};
	l->workspace = allocate(kernel->workspace_bytes(args, n_threads));
	for (int i = 0; i < n_threads; i++)
		l->scratch[i] = allocate(kernel->scratch_bytes(args));
	for (int phase = 0; phase < kernel->n_phases; phase++)
		n += kernel->n_tasks(args, phase, n_threads);
	l->best = allocate((size_t)n * sizeof(*l->best));
	for (int64_t i = 0; i < n; i++)
		l->best[i] = INFINITY;
}

void launch_deinit(struct launch *l)
{
	free(l->workspace);
	free(l->best);
	for (int i = 0; i < n_threads; i++)
		free(l->scratch[i]);
}

/* Runs once; seconds of this run. */
static double launch_once(struct launch *l)
{
	double seconds = 0;

	l->first = 0;
	for (l->phase = 0; l->phase < l->kernel->n_phases; l->phase++) {
		l->n_tasks = l->kernel->n_tasks(l->args, l->phase, n_threads);
		l->next = 0;
		seconds += team_run(launch_job, l);
		l->first += l->n_tasks;
	}
	return seconds;
}

/* Runs once. Seconds of this run, or, on one thread, of every task's best run so far. */
double launch_seconds(struct launch *l)
{
	double seconds = launch_once(l), best = 0;

	if (n_threads > 1)
		return seconds;
	for (int64_t i = 0; i < l->first; i++)
		best += l->best[i];
	return best;
}

struct problem {
	enum abi_family family;
	int dtype, batch, sq, sk, hq, hk, d;
	int mask, window_left;
	int bias, alibi, sink, page;
	int latent; /* 1: values are the first 512 of 576 elements; 2: of fp8 under bf16 */
	int kv;     /* of 8 bits under bf16, with a factor each; 0: K and V are as Q */
	float cap, drop;
};

static struct problem problem_of(int dtype, int batch, int sq, int sk, int hq, int hk, int d)
{
	struct problem p = {.family = ABI_FWD, .window_left = -1};

	p.dtype = dtype;
	p.batch = batch;
	p.sq = sq;
	p.sk = sk;
	p.hq = hq;
	p.hk = hk;
	p.d = d;
	return p;
}

void *keep(struct memory *m, size_t bytes)
{
	return m->at[m->n++] = allocate(bytes);
}

int bytes_of(int dtype)
{
	return dtype == ABI_F32 ? 4 : dtype == ABI_F16 || dtype == ABI_BF16 ? 2 : 1;
}

/* Bit patterns of numbers around one, of both signs, in any type. */
void fill(void *data, int dtype, size_t n)
{
	uint64_t state = 1;

	for (size_t i = 0; i < n; i++) {
		uint32_t r = (uint32_t)((state = state * 6364136223846793005u +
						 1442695040888963407u) >>
					40);
		float f = ((float)(r & 0xffff) / 65536.0f - 0.5f) * 2.0f;
		uint32_t bits;

		memcpy(&bits, &f, sizeof(bits));
		if (dtype == ABI_F32)
			((float *)data)[i] = f;
		else if (dtype == ABI_BF16)
			((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
		else if (dtype == ABI_F16)
			((uint16_t *)data)[i] = (uint16_t)((r & 0x83ff) | 0x3800);
		else
			((uint8_t *)data)[i] = (uint8_t)((r & 0x87) | 0x30);
	}
}

void tensor(struct memory *m, struct abi_tensor *t, int dtype, int batch, int seq, int heads,
	    int dim)
{
	size_t n = (size_t)batch * (size_t)seq * (size_t)heads * (size_t)dim;

	t->stride_dim = 1;
	t->stride_head = dim;
	t->stride_seq = (int64_t)heads * dim;
	t->stride_batch = (int64_t)seq * heads * dim;
	t->data = keep(m, n * (size_t)bytes_of(dtype));
	fill(t->data, dtype, n);
}

static int cache_type(const struct problem *p)
{
	return p->latent == 2 ? ABI_E4M3 : p->kv ? p->kv : p->dtype;
}

static void paged(struct memory *m, struct abi_fwd_args *a, const struct problem *p)
{
	int per = (p->sk + p->page - 1) / p->page;
	int32_t *table = keep(m, (size_t)p->batch * (size_t)per * sizeof(*table));
	int32_t n = p->batch * per;

	tensor(m, &a->k, cache_type(p), n, p->page, p->hk,
	       p->latent == 2 ? ABI_LATENT_BYTES : p->d);
	if (p->latent)
		a->v = a->k;
	else
		tensor(m, &a->v, cache_type(p), n, p->page, p->hk, p->d);
	/* Pages far from each other: multiplication by an odd number permutes a power of two. */
	for (int32_t i = 0; i < n; i++)
		table[i] = (n & (n - 1)) == 0 ? (int32_t)((uint32_t)i * 2654435761u % (uint32_t)n)
					      : i;
	a->cache.page_size = p->page;
	a->cache.n_pages = n;
	a->cache.block_table = table;
	a->cache.block_table_stride = per;
}

static void problem_init(struct abi_fwd_args *a, struct memory *m, const struct problem *p)
{
	float *f;

	*a = (struct abi_fwd_args){
		.nhead_q = p->hq,
		.nhead_k = p->hk,
		.hdim_q = p->d,
		.hdim_v = p->d,
		.dtype = p->dtype,
		.scale = 1.0f / sqrtf((float)p->d),
		.logits_soft_cap = p->cap,
		.band = {p->mask, p->window_left, p->mask ? 0 : -1, 0},
		.sequences = {.batch = p->batch,
			      .seqlen_q_max = p->sq,
			      .seqlen_k_max = p->sk,
			      .total_q = p->batch * p->sq,
			      .total_k = p->batch * p->sk},
	};
	a->o_dtype = bytes_of(p->dtype) == 1 ? ABI_BF16 : p->dtype;
	tensor(m, &a->q, p->dtype, p->batch, p->sq, p->hq, p->d);
	tensor(m, &a->o, a->o_dtype, p->batch, p->sq, p->hq, p->d);
	if (p->page) {
		paged(m, a, p);
	} else {
		tensor(m, &a->k, cache_type(p), p->batch, p->sk, p->hk, p->d);
		tensor(m, &a->v, cache_type(p), p->batch, p->sk, p->hk, p->d);
	}
	if (p->kv) {
		f = keep(m, sizeof(*f));
		*f = 0.02f;
		a->kv_dtype = p->kv;
		a->k_descale.data = a->v_descale.data = f;
	}
	if (p->latent) {
		a->v_in_k = 1;
		a->hdim_v = 512;
		a->kv_dtype = p->latent == 2 ? ABI_E4M3 : 0;
		a->cache.layout = p->latent == 2 ? ABI_KV_LATENT_FP8 : ABI_KV_LINEAR;
	}
	if (p->bias) {
		a->bias_dtype = ABI_F32;
		tensor(m, &a->bias, ABI_F32, 1, p->sq, p->hq, p->sk);
		a->bias.stride_head = (int64_t)p->sq * p->sk;
		a->bias.stride_seq = p->sk;
		a->bias.stride_batch = 0;
	}
	if (p->alibi || p->sink) {
		f = keep(m, (size_t)p->hq * sizeof(*f));
		fill(f, ABI_F32, (size_t)p->hq);
		a->alibi_slopes = p->alibi ? f : NULL;
		a->sink = p->sink ? f : NULL;
	}
	if (p->drop > 0)
		a->dropout = (struct abi_dropout){.seed = 42,
						  .p_drop = p->drop,
						  .p_keep_inverse = 1 / (1 - p->drop),
						  .keep_at_most = (int32_t)(255 * (1 - p->drop))};
}

/* Multiply-adds count twice; a mask's hidden part does not count. */
static double problem_flops(const struct problem *p)
{
	double pairs = 0;

	for (int i = 0; i < p->sq; i++) {
		int hi = p->mask ? i + 1 + p->sk - p->sq : p->sk;
		int lo = p->mask && p->window_left >= 0 ? hi - 1 - p->window_left : 0;

		pairs += hi > 0 ? hi - (lo > 0 ? lo : 0) : 0;
	}
	return 2.0 * p->batch * p->hq * pairs * (p->d + (p->latent ? 512 : p->d));
}

static double problem_bytes(const struct problem *p)
{
	double keys = (double)p->batch * p->hk * p->sk;

	if (p->latent)
		return keys * (p->latent == 2 ? ABI_LATENT_BYTES : p->d * bytes_of(p->dtype));
	return 2.0 * keys * p->d * bytes_of(p->dtype);
}

const char *const dtype_names[] = {ABI_DTYPES(ABI_WORD)};

/* Best seconds of the kernel and best of @yardstick, taken in turn. */
static double best_seconds(const struct problem *p, const char **ret_kernel,
			   double (*yardstick)(void), double *ret_yardstick)
{
	struct abi_fwd_args args;
	struct memory memory = {.n = 0};
	struct launch l;
	const struct cpu_kernel *kernel;
	double best = INFINITY, t;
	int reps = n_reps;

	problem_init(&args, &memory, p);
	kernel = cpu_kernel_find(level, p->family, (uint32_t)p->dtype, &args);
	if (!kernel) {
		fprintf(stderr, "bench_cpu: no kernel\n");
		exit(1);
	}
	launch_init(&l, kernel, &args);
	for (int i = 0; i < reps; i++) {
		t = launch_seconds(&l);
		best = fmin(best, t);
		*ret_yardstick = fmax(*ret_yardstick, yardstick());
		if (i == 0 && t < 0.05)
			reps = 3 * n_reps;
	}
	launch_deinit(&l);
	for (int i = 0; i < memory.n; i++)
		free(memory.at[i]);
	*ret_kernel = kernel->pipeline;
	return best;
}

double fma_peak, copy_rate;
static double matrix_peak;

static double best_peak(enum peak_kind kind)
{
	double best = 0;

	for (int i = 0; i < 5; i++)
		best = fmax(best, measure_peak(kind));
	return best;
}

double yardstick_fma(void)
{
	return best_peak(PEAK_FMA);
}

static double yardstick_matrix(void)
{
	return best_peak(peak_best_bf16(level));
}

int wanted(const char *name)
{
	return !only || strstr(name, only);
}

static double row_compute(const char *name, const struct problem *p, double reference,
			  double target)
{
	int matrix = p->dtype == ABI_BF16 && level >= CPU_X86_64_V4_BF16;
	double *peak = matrix ? &matrix_peak : &fma_peak, seconds, rate;
	const char *kernel;
	char shape[64];

	if (!wanted(name))
		return 0;
	seconds = best_seconds(p, &kernel, matrix ? yardstick_matrix : yardstick_fma, peak);
	rate = problem_flops(p) / seconds;
	snprintf(shape, sizeof(shape), "%d x %d/%d x %d x %d", p->batch, p->hq, p->hk, p->sq, p->d);
	printf("%-22s %-5s %-20s %-11s %8.2f %8.1f %6.1f %%", name, dtype_names[p->dtype], shape,
	       kernel, seconds * 1e3, rate * 1e-9, 100 * rate / *peak);
	if (reference > 0)
		printf("  %5.1f %% of plain", 100 * rate / reference);
	if (target > 0)
		printf("  (target %.0f)", 100 * target);
	printf("\n");
	fflush(stdout);
	return rate;
}

static void row_decode(const char *name, const struct problem *p, double target)
{
	const char *kernel;
	double seconds, rate;
	char shape[64];

	if (!wanted(name))
		return;
	seconds = best_seconds(p, &kernel, measure_copy, &copy_rate);
	rate = problem_bytes(p) / seconds;
	snprintf(shape, sizeof(shape), "%d x %d/%d x %d k x %d", p->batch, p->hq, p->hk,
		 p->sk / 1024, p->d);
	printf("%-22s %-5s %-20s %-11s %8.2f %8.1f %6.1f %%  (target %.0f)\n", name,
	       dtype_names[p->dtype], shape, kernel, seconds * 1e3, rate * 1e-9,
	       100 * rate / copy_rate, 100 * target);
	fflush(stdout);
}

static void table_plain(void)
{
	static const int dtypes[] = {ABI_F32, ABI_BF16, ABI_F16};

	for (size_t t = 0; t < 3; t++)
		for (int d = 64; d <= 128; d *= 2)
			for (int s = 1024; s <= (quick ? 1024 : 4096); s *= 2) {
				struct problem p = problem_of(dtypes[t], 1, s, s, 4, 4, d);
				int matrix = dtypes[t] == ABI_BF16 && level >= CPU_X86_64_V4_BF16;
				double target = !matrix                   ? 0.85
						: level == CPU_X86_64_AMX ? 0.35
									  : 0.80;
				double plain = row_compute("plain", &p, 0, target);

				p.mask = ABI_MASK_BOTTOM_RIGHT;
				row_compute("causal", &p, plain, 0.85);
			}
}

static void table_features(int dtype)
{
	const struct problem base = problem_of(dtype, 1, 1024, 1024, 4, 4, 64);
	struct problem p = base;
	double plain = row_compute("plain for features", &base, 0, 0);

	p.bias = 1;
	row_compute("bias", &p, plain, 0.85);
	p = base, p.alibi = 1;
	row_compute("ALiBi", &p, plain, 0.85);
	p = base, p.cap = 30;
	row_compute("soft cap", &p, plain, 0.85);
	p = base, p.sink = 1;
	row_compute("sink", &p, plain, 0.85);
	p = base, p.mask = ABI_MASK_BOTTOM_RIGHT, p.window_left = 256;
	row_compute("window 256", &p, plain, 0.85);
	p = base, p.drop = 0.2f;
	row_compute("dropout", &p, plain, 0.60);
	p = base, p.page = 16, p.family = ABI_FWD_PAGEDKV;
	row_compute("paged 16", &p, plain, 0.85);
	p = base, p.hk = 1;
	row_compute("one key head", &p, plain, 0.85);
}

static void table_decode(void)
{
	static const int dtypes[] = {ABI_BF16, ABI_F16, ABI_F32, ABI_E4M3};

	for (size_t t = 0; t < 4; t++)
		for (int batch = 1; batch <= (quick ? 1 : 16); batch *= 16) {
			struct problem p = problem_of(dtypes[t], batch, 1, 8192, 32, 8, 128);

			row_decode("decode", &p, 0.80);
			p.family = ABI_FWD_PAGEDKV;
			p.page = 16;
			row_decode("decode, page 16", &p, 0.80);
		}
}

/* Latents: of few heads the cache's bytes are what takes time, of many the products. */
static void table_latent(void)
{
	static const int heads[] = {1, 4, 8, 16, 32, 64, 128};

	for (int latent = 1; latent <= 2; latent++)
		for (size_t h = 0; h < sizeof(heads) / sizeof(heads[0]); h++) {
			struct problem p = problem_of(ABI_BF16, 4, 1, quick ? 4096 : 8192, heads[h],
						      1, 576);
			const char *name = latent == 2 ? "latents of fp8" : "latents";

			p.family = ABI_FWD_PAGEDKV;
			p.page = 64;
			p.latent = latent;
			if (heads[h] <= 8)
				row_decode(name, &p, 0.80);
			else
				row_compute(name, &p, 0, 0.80);
		}
}

/* One problem over a cache of each type, taken in turn: how fast beside that of 16 bits. */
struct cache_run {
	struct problem problem;
	struct abi_fwd_args args;
	struct memory memory;
	struct launch launch;
	double best;
};

static void cache_run_init(struct cache_run *run, const struct problem *p, int kv)
{
	const struct cpu_kernel *kernel;

	*run = (struct cache_run){.problem = *p, .best = INFINITY};
	run->problem.kv = kv;
	problem_init(&run->args, &run->memory, &run->problem);
	kernel = cpu_kernel_find(level, p->family, (uint32_t)p->dtype, &run->args);
	if (!kernel) {
		fprintf(stderr, "bench_cpu: no kernel\n");
		exit(1);
	}
	launch_init(&run->launch, kernel, &run->args);
}

static void cache_run_deinit(struct cache_run *run)
{
	launch_deinit(&run->launch);
	for (int i = 0; i < run->memory.n; i++)
		free(run->memory.at[i]);
}

/* Return: FLOP/s over the cache of bf16. */
static double rows_caches(const char *name, const struct problem *p, double reference)
{
	static const int kinds[] = {0, ABI_E4M3, ABI_E5M2, ABI_I8};
	enum { N_KINDS = sizeof(kinds) / sizeof(kinds[0]) };
	static struct cache_run runs[N_KINDS];
	double rate;
	char shape[64];

	for (int k = 0; k < N_KINDS; k++)
		cache_run_init(&runs[k], p, kinds[k]);
	for (int i = 0; i < n_reps; i++)
		for (int k = 0; k < N_KINDS; k++)
			runs[k].best = fmin(runs[k].best, launch_seconds(&runs[k].launch));
	rate = problem_flops(p) / runs[0].best;
	snprintf(shape, sizeof(shape), "%d/%d x %d/%d x %d", p->hq, p->hk, p->sq, p->sk, p->d);
	for (int k = 0; k < N_KINDS; k++) {
		printf("%-14s %-18s %-5s %-22s %-11s %8.2f %6.2f of bf16", cpu_level_name(level),
		       name, dtype_names[kinds[k] ? kinds[k] : p->dtype], shape,
		       runs[k].launch.kernel->pipeline, runs[k].best * 1e3,
		       runs[0].best / runs[k].best);
		if (k == 0 && reference > 0)
			printf(", %.2f of head dim 128", rate / reference);
		printf("\n");
		fflush(stdout);
		cache_run_deinit(&runs[k]);
	}
	return rate;
}

/* Prefill, a chunk of a prompt in pages, decode; with head dims of 128 and, of as many elements, 512. */
static void table_caches(void)
{
	static const struct {
		const char *name;
		int sq, sk, page;
	} kinds[] = {{"caches, prefill", 1024, 1024, 0},
		     {"caches, chunk", 256, 8192, 16},
		     {"caches, decode", 1, 16384, 16}};
	enum cpu_level best = level;

	for (int l = CPU_X86_64_V3; l <= (int)best; l++)
		for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
			struct problem p = problem_of(ABI_BF16, 1, kinds[k].sq, kinds[k].sk, 32, 8,
						      128);
			double rate;

			level = (enum cpu_level)l;
			if (!wanted(kinds[k].name))
				continue;
			if (quick)
				p.sk = p.sk > 1024 ? p.sk / 8 : p.sk;
			p.mask = ABI_MASK_BOTTOM_RIGHT;
			p.page = kinds[k].page;
			p.family = p.page ? ABI_FWD_PAGEDKV : ABI_FWD;
			rate = rows_caches(kinds[k].name, &p, 0);
			p.hq = 8, p.hk = 2, p.d = 512;
			(void)rows_caches(kinds[k].name, &p, rate);
		}
	level = best;
}

/*
 * The same work on more and more threads. Whole runs only: what a thread waits for the others at
 * the end of a phase is part of the answer. Each number of threads has its own peak, since a
 * machine's clock falls as its cores wake up.
 */
static void table_scaling(int dtype)
{
	const struct problem p = problem_of(dtype, 1, 2048, 2048, 16, 16, 128);
	enum peak_kind kind = dtype == ABI_BF16 ? peak_best_bf16(level) : PEAK_FMA;
	int cores = (int)sysconf(_SC_NPROCESSORS_ONLN),
	    most = cores < MAX_THREADS ? cores : MAX_THREADS;
	double rate_one = 0, peak_one = 0;
	struct abi_fwd_args args;
	struct memory memory = {.n = 0};

	problem_init(&args, &memory, &p);
	for (n_threads = 1; n_threads <= most;
	     n_threads = n_threads < most && 2 * n_threads > most ? most : 2 * n_threads) {
		double best = INFINITY, peak = 0, rate;
		struct launch l;

		launch_init(&l, cpu_kernel_find(level, p.family, (uint32_t)dtype, &args), &args);
		for (int i = 0; i < n_reps; i++) {
			best = fmin(best, launch_once(&l));
			peak = fmax(peak, best_peak(kind));
		}
		rate = problem_flops(&p) / best;
		rate_one = n_threads == 1 ? rate : rate_one;
		peak_one = n_threads == 1 ? peak : peak_one;
		printf("%3d thread%-12s %-5s %-20s %-11s %8.2f %8.1f %6.1f %%  %5.1f %% of %d x one"
		       " (target 90; peak: %.1f %%)\n",
		       n_threads, n_threads > 1 ? "s" : "", dtype_names[dtype],
		       "1 x 16/16 x 2048 x 128", l.kernel->pipeline, best * 1e3, rate * 1e-9,
		       100 * rate / peak, 100 * rate / rate_one / n_threads, n_threads,
		       100 * peak / peak_one / n_threads);
		fflush(stdout);
		launch_deinit(&l);
	}
	n_threads = 1;
	for (int i = 0; i < memory.n; i++)
		free(memory.at[i]);
}

static void usage(void)
{
	fprintf(stderr, "usage: bench_cpu [--threads N] [--level NAME] [--reps N] [--only TEXT] "
			"[--quick]\n");
	exit(2);
}

int main(int argc, char **argv)
{
	level = cpu_level_detect();
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--quick") == 0)
			quick = 1;
		else if (i + 1 == argc)
			usage();
		else if (strcmp(argv[i], "--threads") == 0)
			n_threads = atoi(argv[++i]);
		else if (strcmp(argv[i], "--reps") == 0)
			n_reps = atoi(argv[++i]);
		else if (strcmp(argv[i], "--only") == 0)
			only = argv[++i];
		else if (strcmp(argv[i], "--level") != 0 ||
			 cpu_level_from_name(argv[++i], &level) < 0)
			usage();
	}
	if (n_threads < 1 || n_threads > MAX_THREADS || n_reps < 1 || level > cpu_level_detect())
		usage();
	for (int i = 0; i < 5; i++) {
		fma_peak = fmax(fma_peak, measure_peak(PEAK_FMA));
		copy_rate = fmax(copy_rate, measure_copy());
	}
	printf("level %s, %d thread%s\n", cpu_level_name(level), n_threads,
	       n_threads > 1 ? "s" : "");
	printf("f32 multiply-add peak %.1f GFLOP/s, copy %.1f GB/s\n", fma_peak * 1e-9,
	       copy_rate * 1e-9);
	if (level >= CPU_X86_64_V4_BF16) {
		matrix_peak = yardstick_matrix();
		printf("bf16 peak %.1f GFLOP/s\n", matrix_peak * 1e-9);
	}
	printf("%-22s %-5s %-20s %-11s %8s %8s %8s\n", "forward", "type", "b x hq/hk x s x d",
	       "kernel", "ms", "GFLOP/s", "of peak");
	table_plain();
	table_features(ABI_F32);
	if (level >= CPU_X86_64_V4_BF16)
		table_features(ABI_BF16);
	printf("%-22s %-5s %-20s %-11s %8s %8s %8s\n", "decode", "type", "b x hq/hk x keys x d",
	       "kernel", "ms", "GB/s", "of copy");
	table_decode();
	table_latent();
	table_caches();
	bench_backward();
	if (wanted("scaling")) {
		printf("%-22s %-5s %-20s %-11s %8s %8s %8s\n", "scaling", "type",
		       "b x hq/hk x s x d", "kernel", "ms", "GFLOP/s", "of peak");
		table_scaling(ABI_F32);
		table_scaling(ABI_BF16);
	}
	return 0;
}
