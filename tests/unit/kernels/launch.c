/* SPDX-License-Identifier: MIT */
#include "launch.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MAX_THREADS 8
#define GUARD_BYTES 64

struct job {
	const struct cpu_kernel *kernel;
	const void *args;
	int phase, n_threads;
	int64_t n_tasks;
	_Atomic int64_t next;
	void *workspace;
};

struct worker {
	pthread_t thread;
	struct job *job;
	void *scratch;
};

/* All bytes 0xff: a NaN in every type, and a page number that nobody has. */
static void *poisoned(size_t bytes)
{
	void *p = aligned_alloc(64, (bytes + 63) / 64 * 64 + GUARD_BYTES);

	assert_non_null(p);
	memset(p, 0xff, (bytes + 63) / 64 * 64 + GUARD_BYTES);
	return p;
}

static void check_guard(const void *p, size_t bytes)
{
	const unsigned char *guard = (const unsigned char *)p + bytes;

	for (int i = 0; i < GUARD_BYTES; i++)
		assert_int_equal(guard[i], 0xff);
}

static void *worker_main(void *data)
{
	struct worker *w = data;
	struct job *job = w->job;

	for (;;) {
		int64_t task = atomic_fetch_add(&job->next, 1);

		if (task >= job->n_tasks)
			return NULL;
		job->kernel->run(job->args, job->phase, task, job->n_threads, job->workspace,
				 w->scratch);
	}
}

void launch(const struct cpu_kernel *kernel, const void *args, int n_threads)
{
	size_t workspace_bytes = kernel->workspace_bytes(args, n_threads);
	size_t scratch_bytes = kernel->scratch_bytes(args);
	struct job job = {.kernel = kernel, .args = args, .n_threads = n_threads};
	struct worker workers[MAX_THREADS] = {0};

	assert_in_range(n_threads, 1, MAX_THREADS);
	job.workspace = poisoned(workspace_bytes);
	for (int i = 0; i < n_threads; i++)
		workers[i] = (struct worker){.job = &job, .scratch = poisoned(scratch_bytes)};
	for (job.phase = 0; job.phase < kernel->n_phases; job.phase++) {
		job.n_tasks = kernel->n_tasks(args, job.phase, n_threads);
		atomic_store(&job.next, 0);
		if (n_threads == 1 || job.n_tasks < 2) {
			worker_main(&workers[0]);
			continue;
		}
		for (int i = 0; i < n_threads; i++)
			assert_int_equal(
				pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]),
				0);
		for (int i = 0; i < n_threads; i++)
			assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
	}
	check_guard(job.workspace, workspace_bytes);
	free(job.workspace);
	for (int i = 0; i < n_threads; i++) {
		check_guard(workers[i].scratch, scratch_bytes);
		free(workers[i].scratch);
	}
}

void launch_family(enum cpu_level level, enum abi_family family, uint32_t dtype, const void *args,
		   int n_threads)
{
	const struct cpu_kernel *kernel = cpu_kernel_find(level, family, dtype, args);

	assert_non_null(kernel);
	launch(kernel, args, n_threads);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

int launch_next_level(int level)
{
	int last = (int)cpu_level_detect();

	return SANITIZED && !getenv("FMHA_TEST_ALL") && level < last ? last : level + 1;
}

int launch_has_level(enum cpu_level level)
{
	return level <= cpu_level_detect();
}
