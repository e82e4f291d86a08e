/* SPDX-License-Identifier: MIT */
/*
 * One thread scribbles over all integer tensors, as a client can at any time, while others bind and
 * run the plans that read them. Every tensor, workspace and scratch ends at an inaccessible page,
 * or is an allocation of its own under AddressSanitizer: a bind that looks at a word twice is
 * found.
 *
 *   FMHA_SCRIBBLE_SECONDS  how long, instead of 4 seconds
 *   FMHA_SCRIBBLE_THREADS  how many bind and run, instead of 2
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

#include "bend.h"

#define N_CASES     64
#define MAX_THREADS 64
#define MOST_FLOPS  2e5
#define MOST_TASKS  500
#define MOST_BYTES  ((uint64_t)1 << 18)
#define PAGE        4096

/* ---- memory that ends where it ends ---- */

struct exact {
	void *at;
	void *mapping;
	size_t mapped;
};

#ifdef __SANITIZE_ADDRESS__
static struct exact exact_new(uint64_t bytes, uint64_t alignment)
{
	struct exact e = {0};

	assert_int_equal(posix_memalign(&e.at, alignment < 8 ? 8 : alignment, bytes), 0);
	return e;
}

static void exact_free(struct exact *e)
{
	free(e->at);
}
#else
static struct exact exact_new(uint64_t bytes, uint64_t alignment)
{
	uint64_t room = (bytes + alignment - 1) / alignment * alignment;
	struct exact e = {.mapped = (room + PAGE - 1) / PAGE * PAGE + PAGE};

	e.mapping = mmap(NULL, e.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			 0);
	assert_ptr_not_equal(e.mapping, MAP_FAILED);
	assert_int_equal(mprotect((char *)e.mapping + e.mapped - PAGE, PAGE, PROT_NONE), 0);
	e.at = (char *)e.mapping + e.mapped - PAGE - room;
	return e;
}

static void exact_free(struct exact *e)
{
	if (e->mapping)
		(void)munmap(e->mapping, e->mapped);
}
#endif

/* ---- cases: plans whose integer tensors all threads share ---- */

struct shared_case {
	struct runner r;
	struct exact index[FMHA_N_TENSORS];
	void *sound[FMHA_N_TENSORS]; /* the integers as they were */
};

/* What a thread has of its own of a case. */
struct private_case {
	struct exact tensor[FMHA_N_TENSORS], workspace, scratch[PLAN_MAX_STAGES];
	struct plan_binding bindings[FMHA_N_TENSORS];
};

struct worker {
	pthread_t thread;
	unsigned seed;
	unsigned long ran, refused;
	struct private_case cases[N_CASES];
};

static struct shared_case cases[N_CASES];
static struct worker workers[MAX_THREADS];
static atomic_bool ends;

static bool serves(const struct plan *plan)
{
	bool any = false;

	for (uint32_t i = 0; i < plan->n_views; i++) {
		any |= fmha_role_is_index(plan->views[i].role) && plan->views[i].span_bytes > 0;
		if (plan->views[i].span_bytes > MOST_BYTES)
			return false;
	}
	return any && plan->n_stages > 0 && plan->flops <= MOST_FLOPS &&
	       plan->workspace_bytes <= MOST_BYTES && plan_index_entries(plan) <= MOST_TASKS;
}

static bool case_new(struct shared_case *c, unsigned seed)
{
	struct runner *r = &c->r;

	bend_begin(r, seed, cpu_level_detect());
	bend_problem(r, 1);
	if (!bend_mend(r) || fixture_build(&r->f) < 0 || !serves(&r->f.plan))
		return false;
	for (uint32_t i = 0; i < r->f.plan.n_views; i++) {
		const struct plan_view *view = &r->f.plan.views[i];

		if (!fmha_role_is_index(view->role))
			continue;
		c->index[view->role] = exact_new(view->span_bytes, view->element_bytes);
		memset(c->index[view->role].at, 0, view->span_bytes);
		r->f.bindings[view->role] = (struct plan_binding){
			c->index[view->role].at, c->index[view->role].at, view->span_bytes};
	}
	bend_indices(r);
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (c->index[role].at) {
			c->sound[role] = malloc(r->f.bindings[role].bytes + 1);
			memcpy(c->sound[role], c->index[role].at, r->f.bindings[role].bytes);
		}
	return true;
}

static void cases_new(void)
{
	unsigned seed = 1;

	for (int i = 0; i < N_CASES; i++)
		while (!case_new(&cases[i], seed++))
			memset(&cases[i], 0, sizeof(cases[i]));
}

static void private_new(struct worker *w, int i)
{
	const struct plan *plan = &cases[i].r.f.plan;
	struct private_case *c = &w->cases[i];

	memcpy(c->bindings, cases[i].r.f.bindings, sizeof(c->bindings));
	for (uint32_t k = 0; k < plan->n_views; k++) {
		const struct plan_view *view = &plan->views[k];
		struct exact *tensor = &c->tensor[view->role];

		if (fmha_role_is_index(view->role))
			continue;
		*tensor = exact_new(view->span_bytes, view->element_bytes);
		memset(tensor->at, 0x3c, view->span_bytes);
		c->bindings[view->role] = (struct plan_binding){tensor->at, tensor->at,
								view->span_bytes};
	}
	c->workspace = exact_new(plan->workspace_bytes, PLAN_ALIGNMENT);
}

/* ---- threads ---- */

/* Scratch depends on maxima, not on what the indices say: it is made once. */
static void *scratch_of(struct private_case *c, const struct plan *plan, uint32_t stage,
			const union abi_args *args)
{
	if (!c->scratch[stage].at)
		c->scratch[stage] = exact_new(cpu_runner_scratch(plan, stage, args), 64);
	return c->scratch[stage].at;
}

static void bind_and_run(struct worker *w, int i)
{
	const struct plan *plan = &cases[i].r.f.plan;
	struct private_case *c = &w->cases[i];
	union abi_args args[PLAN_MAX_STAGES];
	struct plan_indices *indices = NULL;
	struct fmha_error err;

	if (bind_plan(plan, c->bindings, c->workspace.at, c->workspace.at, args, &indices, &err) <
	    0) {
		w->refused++;
		return;
	}
	if (plan->workspace_zero)
		memset((char *)c->workspace.at + plan->layout.dq_acc, 0, plan->dq_acc_bytes);
	for (uint32_t k = 0; k < plan->n_stages; k++)
		cpu_runner_stage(&cases[i].r.cpu, plan, k, &args[k], c->workspace.at,
				 scratch_of(c, plan, k, &args[k]), &w->seed);
	(void)plan_indices_free(indices);
	w->ran++;
}

static void *worker_main(void *data)
{
	struct worker *w = data;

	while (!atomic_load(&ends))
		bind_and_run(w, rand_r(&w->seed) % N_CASES);
	return NULL;
}

/* Now one bad word, now all as it was: most binds must get past the checks to be worth anything. */
static void scribble(struct runner *r, const struct shared_case *c)
{
	bend_scribble(r);
	if (random_chance(r, 50))
		return;
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (c->sound[role])
			memcpy(r->f.bindings[role].host, c->sound[role], r->f.bindings[role].bytes);
}

static void scribble_for(double seconds)
{
	struct timespec start, now;

	(void)clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		for (int i = 0; i < N_CASES; i++)
			scribble(&cases[i].r, &cases[i]);
		(void)clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((double)(now.tv_sec - start.tv_sec) +
			 (double)(now.tv_nsec - start.tv_nsec) * 1e-9 <
		 seconds);
}

static void all_free(int n_threads)
{
	for (int i = 0; i < N_CASES; i++)
		for (int role = 0; role < FMHA_N_TENSORS; role++) {
			exact_free(&cases[i].index[role]);
			free(cases[i].sound[role]);
			for (int t = 0; t < n_threads; t++)
				exact_free(&workers[t].cases[i].tensor[role]);
		}
	for (int t = 0; t < n_threads; t++)
		for (int i = 0; i < N_CASES; i++) {
			exact_free(&workers[t].cases[i].workspace);
			for (int k = 0; k < PLAN_MAX_STAGES; k++)
				exact_free(&workers[t].cases[i].scratch[k]);
		}
}

static double number_of(const char *variable, double otherwise)
{
	const char *value = getenv(variable);

	return value ? strtod(value, NULL) : otherwise;
}

static void scribbled_indices_move_nothing_out_of_bounds(void **state)
{
	int n_threads = (int)number_of("FMHA_SCRIBBLE_THREADS", 2);
	unsigned long ran = 0, refused = 0;

	(void)state;
	assert_in_range(n_threads, 1, MAX_THREADS);
	cases_new();
	for (int t = 0; t < n_threads; t++) {
		workers[t].seed = (unsigned)t + 1;
		for (int i = 0; i < N_CASES; i++)
			private_new(&workers[t], i);
		assert_int_equal(pthread_create(&workers[t].thread, NULL, worker_main, &workers[t]),
				 0);
	}
	scribble_for(number_of("FMHA_SCRIBBLE_SECONDS", 4));
	atomic_store(&ends, true);
	for (int t = 0; t < n_threads; t++) {
		assert_int_equal(pthread_join(workers[t].thread, NULL), 0);
		ran += workers[t].ran;
		refused += workers[t].refused;
	}
	all_free(n_threads);
	print_message("%d threads: %lu runs, %lu refused\n", n_threads, ran, refused);
	assert_true(ran > 0 && refused > 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(scribbled_indices_move_nothing_out_of_bounds),
	};

	return cmocka_run_group_tests(tests, NULL, cpu_runner_free_registries);
}
