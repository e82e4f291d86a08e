/* SPDX-License-Identifier: MIT */
/*
 * The build queue, with a shell script as the compiler: it counts its runs in a file, so that the
 * tests see how often something was really built.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "queue.h"

struct fixture {
	char root[64], sources[96], clang[96], runs[96], asked[96];
	struct compile_config config;
	struct cache *cache;
	struct compile_queue *queue;
	pthread_mutex_t lock;
	char order[256]; /* first option letter of each finished request */
	int results[64], n_results;
};

/* The script: "clang --version", or writes an empty "code object" after a while. */
static void write_compiler(const struct fixture *f, const char *body)
{
	FILE *file = fopen(f->clang, "w");

	assert_non_null(file);
	(void)fprintf(file,
		      "#!/bin/sh\n"
		      "[ \"$1\" = --version ] && echo >> '%s' && echo version 1 && exit 0\n"
		      "echo run >> '%s'\n"
		      "while [ $# -gt 0 ]; do [ \"$1\" = -o ] && out=$2; shift; done\n"
		      "%s\n",
		      f->asked, f->runs, body);
	(void)fclose(file);
	assert_int_equal(chmod(f->clang, 0700), 0);
}

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));
	char path[128];
	FILE *file;

	strcpy(f->root, "/tmp/fmhad-queue-test-XXXXXX");
	if (!mkdtemp(f->root))
		return -1;
	(void)snprintf(f->sources, sizeof(f->sources), "%s/gpu", f->root);
	(void)snprintf(f->clang, sizeof(f->clang), "%s/clang", f->root);
	(void)snprintf(f->runs, sizeof(f->runs), "%s/runs", f->root);
	(void)snprintf(f->asked, sizeof(f->asked), "%s/asked", f->root);
	(void)snprintf(path, sizeof(path), "%s/cache", f->root);
	if (mkdir(f->sources, 0700) < 0 || cache_new(path, NULL, 0, &f->cache, NULL) != 0)
		return -1;
	(void)snprintf(path, sizeof(path), "%s/kernel.hip", f->sources);
	file = fopen(path, "w");
	if (!file || fclose(file) != 0)
		return -1;
	(void)pthread_mutex_init(&f->lock, NULL);
	f->config = (struct compile_config){
		.helper = COMPILE_HELPER, .source_dir = f->sources, .clang = f->clang};
	write_compiler(f, "sleep 0.2; echo code > \"$out\"");
	*state = f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;
	char command[128];

	(void)compile_queue_free(f->queue);
	(void)cache_free(f->cache);
	(void)pthread_mutex_destroy(&f->lock);
	(void)snprintf(command, sizeof(command), "rm -rf '%s'", f->root);
	if (system(command) != 0)
		return -1;
	free(f);
	return 0;
}

static void on_done(void *owner, int result, const struct cache_entry *entry,
		    const struct fmha_error *err)
{
	struct fixture *f = owner;

	(void)pthread_mutex_lock(&f->lock);
	if (entry)
		f->order[strlen(f->order)] = entry->info.kernel[0];
	assert_true((result == 0) == (err->code == 0));
	f->results[f->n_results++] = result;
	(void)pthread_mutex_unlock(&f->lock);
}

static void start(struct fixture *f, int n_threads)
{
	struct fmha_error err = {0};

	assert_int_equal(compile_queue_new(&f->config, f->cache, n_threads, &f->queue, &err), 0);
}

static void submit(struct fixture *f, const char *kernel, enum compile_priority priority)
{
	char option[64];
	const char *options[] = {option};
	struct compile_request request = {.kernel = kernel,
					  .arch = "gfx942",
					  .source = "kernel.hip",
					  .options = options,
					  .n_options = 1};
	struct fmha_error err = {0};

	(void)snprintf(option, sizeof(option), "-DNAME=%s", kernel);
	assert_int_equal(compile_queue_submit(f->queue, &request, priority, on_done, f, &err), 0);
}

static int count_lines(const char *path)
{
	FILE *file = fopen(path, "r");
	int n = 0, c;

	if (!file)
		return 0;
	while ((c = fgetc(file)) != EOF)
		n += c == '\n';
	(void)fclose(file);
	return n;
}

static void equal_requests_are_built_once(void **state)
{
	struct fixture *f = *state;
	struct compile_queue_status status;

	start(f, 4);
	for (int i = 0; i < 16; i++)
		submit(f, "same", COMPILE_URGENT);
	compile_queue_drain(f->queue);
	submit(f, "same", COMPILE_URGENT);
	compile_queue_drain(f->queue);
	assert_int_equal(count_lines(f->runs), 1);
	compile_queue_status(f->queue, &status);
	f->queue = compile_queue_free(f->queue); /* every callback has come */
	assert_int_equal(f->n_results, 17);
	for (int i = 0; i < 17; i++)
		assert_int_equal(f->results[i], 0);
	assert_int_equal(status.built, 1);
	assert_int_equal(status.hits, 1);
	assert_int_equal(status.queued + status.running, 0);
}

/* What the cache answers must not cost a process each time. */
static void the_version_is_asked_for_once(void **state)
{
	struct fixture *f = *state;

	start(f, 1);
	submit(f, "a", COMPILE_URGENT);
	submit(f, "b", COMPILE_URGENT);
	compile_queue_drain(f->queue);
	submit(f, "a", COMPILE_URGENT);
	compile_queue_drain(f->queue);
	f->queue = compile_queue_free(f->queue);
	assert_int_equal(f->n_results, 3);
	assert_int_equal(count_lines(f->runs), 2);
	assert_int_equal(count_lines(f->asked), 1);
}

static void urgent_requests_overtake(void **state)
{
	struct fixture *f = *state;

	start(f, 1);
	submit(f, "a", COMPILE_BACKGROUND); /* taken at once */
	(void)usleep(100000);
	submit(f, "b", COMPILE_BACKGROUND);
	submit(f, "c", COMPILE_SOON);
	submit(f, "d", COMPILE_URGENT);
	submit(f, "e", COMPILE_URGENT);
	submit(f, "b", COMPILE_URGENT); /* joins and pulls it forward */
	compile_queue_drain(f->queue);
	f->queue = compile_queue_free(f->queue);
	assert_string_equal(f->order, "adebbc");
	assert_int_equal(count_lines(f->runs), 5);
}

static void closing_cancels_what_runs_and_waits(void **state)
{
	struct fixture *f = *state;

	write_compiler(f, "sleep 100");
	start(f, 1);
	submit(f, "a", COMPILE_URGENT);
	submit(f, "b", COMPILE_URGENT);
	(void)usleep(200000);
	f->queue = compile_queue_free(f->queue);
	assert_int_equal(f->n_results, 2);
	assert_int_equal(f->results[0], FMHA_ECANCELED);
	assert_int_equal(f->results[1], FMHA_ECANCELED);
}

static void failures_are_not_remembered(void **state)
{
	struct fixture *f = *state;

	write_compiler(f, "echo 'kernel.hip:1: error: no' >&2; exit 1");
	start(f, 2);
	submit(f, "a", COMPILE_URGENT);
	compile_queue_drain(f->queue);
	write_compiler(f, "echo code > \"$out\"");
	submit(f, "a", COMPILE_URGENT);
	compile_queue_drain(f->queue);
	f->queue = compile_queue_free(f->queue);
	assert_int_equal(f->results[0], FMHA_EINVAL);
	assert_int_equal(f->results[1], 0);
}

int main(void)
{
#define QUEUE_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		QUEUE_TEST(equal_requests_are_built_once),
		QUEUE_TEST(the_version_is_asked_for_once),
		QUEUE_TEST(urgent_requests_overtake),
		QUEUE_TEST(closing_cancels_what_runs_and_waits),
		QUEUE_TEST(failures_are_not_remembered),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
