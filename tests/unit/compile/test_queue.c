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
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <compile/queue.h>

#define MAX_ASKED 64

struct fixture {
	char root[64], sources[96], clang[96], runs[96], asked[96];
	struct compile_waiter waiters[MAX_ASKED];
	int n_asked;
	struct compile_config config;
	struct cache *cache;
	struct compile_queue *queue;
	pthread_mutex_t lock;
	char order[256]; /* first option letter of each finished request */
	int results[MAX_ASKED], n_results;
};

/*
 * The script: "clang --version"; a refusal of the options that it is asked about with no source; or
 * what @body does with the options of the first step, which compiles; the second and the third,
 * which assemble and link, pass a few bytes on.
 */
static void write_compiler(const struct fixture *f, const char *body)
{
	FILE *file = fopen(f->clang, "w");

	assert_non_null(file);
	(void)fprintf(file,
		      "#!/bin/sh\n"
		      "[ \"$1\" = --version ] && echo >> '%s' && echo version 1 && exit 0\n"
		      "case \"$*\" in *' /dev/null') exit 1;; esac\n"
		      "case \"$*\" in *' -S '*) ;; *) echo code; exit 0;; esac\n"
		      "echo \"$*\" >> '%s'\n"
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
	if (mkdir(f->sources, 0700) < 0 ||
	    cache_new(&(struct cache_config){.writable = path}, &f->cache, NULL) != 0)
		return -1;
	(void)snprintf(path, sizeof(path), "%s/kernel.hip", f->sources);
	file = fopen(path, "w");
	if (!file || fclose(file) != 0)
		return -1;
	(void)pthread_mutex_init(&f->lock, NULL);
	f->config = (struct compile_config){
		.helper = COMPILE_HELPER, .source_dir = f->sources, .clang = f->clang};
	write_compiler(f, "sleep 0.2; echo code");
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

static void start(struct fixture *f, int n_jobs)
{
	struct fmha_error err = {0};

	assert_int_equal(compile_queue_new(&f->config, f->cache, n_jobs, true, &f->queue, &err), 0);
}

static struct compile_request request_for(const char *kernel, uint32_t uid)
{
	struct compile_request request = {
		.build = {.arch = "gfx942", .source = "kernel.hip", .n_options = 1}, .uid = uid};

	(void)snprintf(request.build.name, BUILD_NAME_BYTES, "%s", kernel);
	(void)snprintf(request.build.options[0], BUILD_WORD_BYTES, "-DNAME=%s", kernel);
	return request;
}

/* Kernels are told apart by their first letter. Return: its number, for forget(). */
static int submit_for(struct fixture *f, uint32_t uid, const char *kernel,
		      enum compile_priority priority)
{
	const struct compile_request request = request_for(kernel, uid);
	struct fmha_error err = {0};

	assert_true(f->n_asked < MAX_ASKED);
	assert_int_equal(compile_queue_submit(f->queue, &request, priority, on_done, f,
					      &f->waiters[f->n_asked], &err),
			 0);
	return f->n_asked++;
}

static int submit(struct fixture *f, const char *kernel, enum compile_priority priority)
{
	return submit_for(f, 0, kernel, priority);
}

static int n_done(struct fixture *f)
{
	int n;

	(void)pthread_mutex_lock(&f->lock);
	n = f->n_results;
	(void)pthread_mutex_unlock(&f->lock);
	return n;
}

static int64_t milliseconds(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

/* Waits until so many were answered. */
static void wait_for(struct fixture *f, int n)
{
	int64_t since = milliseconds();

	while (n_done(f) < n && milliseconds() - since < 30000)
		(void)usleep(2000);
	assert_true(n_done(f) >= n);
}

static void finish(struct fixture *f)
{
	compile_queue_drain(f->queue);
	f->queue = compile_queue_free(f->queue); /* every callback has come */
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

/* Until so many compilers have begun: what is submitted next finds them busy. The queue's own word for it would not do, as it
 * counts those that look into the cache first. */
static void wait_for_compilers(const struct fixture *f, int n)
{
	while (count_lines(f->runs) < n)
		(void)usleep(1000);
}

static void urgent_requests_overtake(void **state)
{
	struct fixture *f = *state;

	start(f, 1);
	submit(f, "a", COMPILE_BACKGROUND);
	wait_for_compilers(f, 1);
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

/* How many builds of the log, which has a + for a beginning and a - for an end, were under way at a
 * time. */
static int most_at_once(const char *log)
{
	FILE *file = fopen(log, "r");
	int n = 0, most = 0, c;

	assert_non_null(file);
	while ((c = fgetc(file)) != EOF) {
		n += c == '+' ? 1 : c == '-' ? -1 : 0;
		most = n > most ? n : most;
	}
	(void)fclose(file);
	return most;
}

static void the_background_takes_half_of_the_cores_and_is_nice(void **state)
{
	struct fixture *f = *state;
	long cores = sysconf(_SC_NPROCESSORS_ONLN), half = cores > 3 ? cores / 2 : 1;
	int n = (int)(half < 14 ? half + 2 : 16), own = getpriority(PRIO_PROCESS, 0);
	char body[400], log[80], nice[80], text[8] = "";
	FILE *file;

	(void)snprintf(log, sizeof(log), "%s/log", f->root);
	(void)snprintf(nice, sizeof(nice), "%s/nice", f->root);
	(void)snprintf(body, sizeof(body),
		       "case \"$*\" in *NAME=u*) ;; *) printf + >> '%s'; sleep 0.2; nice > '%s'; "
		       "printf %%s - >> '%s';; esac; echo code",
		       log, nice, log);
	write_compiler(f, body);
	start(f, n + 1);
	for (int i = 0; i < n; i++)
		submit(f, (char[]){(char)('a' + i), '\0'}, COMPILE_BACKGROUND);
	wait_for_compilers(f, 1);
	submit(f, "u", COMPILE_URGENT); /* finds a slot, however many wait */
	finish(f);
	assert_true(strchr(f->order, 'u') - f->order <= half);
	assert_int_equal(strlen(f->order), n + 1);
	assert_int_equal(most_at_once(log), half < n ? half : n);
	file = fopen(nice, "r");
	assert_non_null(file);
	assert_non_null(fgets(text, sizeof(text), file));
	(void)fclose(file);
	assert_int_equal(strtol(text, NULL, 10), own < 9 ? own + 10 : 19);
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
	write_compiler(f, "echo code");
	submit(f, "a", COMPILE_URGENT);
	compile_queue_drain(f->queue);
	f->queue = compile_queue_free(f->queue);
	assert_int_equal(f->results[0], FMHA_EINVAL);
	assert_int_equal(f->results[1], 0);
}

/* ---- several users ---- */

static void open_gate(const struct fixture *f)
{
	char path[256];
	FILE *file;

	(void)snprintf(path, sizeof(path), "%s/gate", f->root);
	file = fopen(path, "we");
	assert_non_null(file);
	assert_int_equal(fclose(file), 0);
}

/* Until builds alone are under way, for a while: all others were looked for in the cache. */
static void wait_for_lookups(const struct fixture *f, uint32_t n_building)
{
	int64_t since = milliseconds();
	struct compile_queue_status status;
	int n_alike = 0;

	while (n_alike < 100 && milliseconds() - since < 30000) {
		(void)usleep(2000);
		compile_queue_status(f->queue, &status);
		n_alike = status.running == n_building ? n_alike + 1 : 0;
	}
	assert_int_equal(n_alike, 100);
}

/* Return: how many builds began before this kernel's. */
static int turn_of(const struct fixture *f, char kernel)
{
	FILE *file = fopen(f->runs, "r");
	char line[1024], option[] = "-DNAME=?";
	int turn = 0;

	assert_non_null(file);
	option[sizeof(option) - 2] = kernel;
	while (fgets(line, sizeof(line), file) && !strstr(line, option))
		turn++;
	assert_false(feof(file));
	(void)fclose(file);
	return turn;
}

static void turns_go_by_user(void **state)
{
	struct fixture *f = *state;
	char body[256];

	(void)snprintf(body, sizeof(body),
		       "until [ -e '%s/gate' ]; do sleep 0.02; done; sleep 0.1; echo code",
		       f->root);
	write_compiler(f, body);
	start(f, 1);
	for (const char *kernel = "abcdefghijkl"; *kernel; kernel++)
		submit_for(f, 1, (char[]){*kernel, '\0'}, COMPILE_URGENT);
	wait_for_compilers(f, 1);
	submit_for(f, 2, "x", COMPILE_URGENT);
	submit_for(f, 3, "y", COMPILE_URGENT);
	submit_for(f, 2, "z", COMPILE_URGENT);
	wait_for_compilers(f, 2); /* one for another user */
	wait_for_lookups(f, 2);
	open_gate(f);
	finish(f);
	/* By when they began, since which of two builds ends first is the machine's affair: one of
	 * the first user's was under way; then the others, and then all by turns. */
	assert_true(turn_of(f, 'x') <= 2);
	assert_true(turn_of(f, 'y') <= 3);
	assert_true(turn_of(f, 'z') <= 5);
	assert_true(turn_of(f, 'l') > turn_of(f, 'z'));
	assert_int_equal(strlen(f->order), 15);
}

/*
 * One whose builds take long has as much time as one whose builds are quick, not as many builds. A long one starts
 * many programs besides: on a busy machine it takes as much longer as the quick ones do.
 */
static void turns_are_measured_in_time(void **state)
{
	struct fixture *f = *state;
	char body[512];

	(void)snprintf(
		body, sizeof(body),
		"case \"$*\" in\n"
		"*NAME=s*) sleep 1.2; i=0; while [ $i -lt 100 ]; do i=$((i + 1)); sh -c :; done;;\n"
		"*NAME=l*) until [ -e '%s/gate' ]; do sleep 0.02; done;;\n"
		"esac; echo code",
		f->root);
	write_compiler(f, body);
	start(f, 1);
	submit_for(f, 3, "l", COMPILE_URGENT); /* the two others share what it leaves */
	wait_for_compilers(f, 1);
	for (int i = 0; i < 3; i++) {
		if (i < 2)
			submit_for(f, 1, (char[]){'s', (char)('0' + i), '\0'}, COMPILE_URGENT);
		submit_for(f, 2, (char[]){'q', (char)('0' + i), '\0'}, COMPILE_URGENT);
	}
	wait_for(f, 5);
	open_gate(f);
	finish(f);
	assert_true(strcmp(f->order, "sqqqsl") == 0 || strcmp(f->order, "qsqqsl") == 0);
}

/* One for which kernels of names with an "s" are not done before open_gate(). */
static void write_gated_compiler(struct fixture *f)
{
	char body[256];

	(void)snprintf(body, sizeof(body),
		       "case \"$*\" in *NAME=s*) until [ -e '%s/gate' ]; do sleep 0.02; done;; "
		       "esac; echo code",
		       f->root);
	write_compiler(f, body);
}

static void one_user_has_all_compilers_and_another_does_not_wait(void **state)
{
	struct fixture *f = *state;

	write_gated_compiler(f);
	start(f, 2);
	submit_for(f, 1, "s1", COMPILE_URGENT);
	submit_for(f, 1, "s2", COMPILE_URGENT);
	submit_for(f, 1, "s3", COMPILE_URGENT);
	wait_for_compilers(f, 2);
	submit_for(f, 2, "q", COMPILE_URGENT);
	wait_for(f, 1); /* the others' compilers wait for the gate */
	assert_string_equal(f->order, "q");
	open_gate(f);
	finish(f);
	assert_string_equal(f->order, "qsss");
}

static void the_cache_answers_while_compilers_are_busy(void **state)
{
	struct fixture *f = *state;

	write_gated_compiler(f);
	start(f, 1);
	submit_for(f, 2, "q", COMPILE_URGENT);
	wait_for(f, 1);
	submit_for(f, 1, "s1", COMPILE_URGENT);
	submit_for(f, 1, "s2", COMPILE_URGENT);
	wait_for_compilers(f, 2);
	submit_for(f, 2, "q", COMPILE_URGENT);
	wait_for(f, 2); /* the others' compilers wait for the gate */
	open_gate(f);
	finish(f);
	assert_string_equal(f->order, "qqss");
}

/* ---- nobody waits any more ---- */

static void forget(struct fixture *f, int number)
{
	assert_true(compile_queue_forget(f->queue, &f->waiters[number]));
	assert_false(compile_queue_forget(f->queue, &f->waiters[number]));
}

static void what_nobody_waits_for_is_not_built(void **state)
{
	struct fixture *f = *state;
	struct compile_queue_status status;
	int numbers[20];

	write_compiler(f, "sleep 0.3; echo code");
	start(f, 1);
	submit_for(f, 1, "a", COMPILE_URGENT);
	while (count_lines(f->runs) == 0)
		(void)usleep(1000);
	for (int i = 0; i < 20; i++)
		numbers[i] = submit_for(f, 1, (char[]){(char)('b' + i), '\0'}, COMPILE_URGENT);
	for (int i = 0; i < 20; i++)
		forget(f, numbers[i]);
	compile_queue_drain(f->queue);
	compile_queue_status(f->queue, &status);
	assert_int_equal(status.queued, 0);
	assert_int_equal(status.cancelled, 20);
	finish(f);
	assert_string_equal(f->order, "a");
	assert_int_equal(f->n_results, 1);
	assert_int_equal(count_lines(f->runs), 1);
}

static void a_running_build_that_nobody_waits_for_is_ended(void **state)
{
	struct fixture *f = *state;
	int64_t since = milliseconds();
	char body[200], first[200];
	int number;

	(void)snprintf(body, sizeof(body),
		       "case \"$*\" in *NAME=s*) mkdir '%s/first' && sleep 100;; esac; echo code",
		       f->root);
	write_compiler(f, body);
	start(f, 1);
	number = submit_for(f, 1, "s", COMPILE_URGENT);
	(void)snprintf(first, sizeof(first), "%s/first", f->root);
	while (access(first, F_OK) < 0)
		(void)usleep(1000);
	submit_for(f, 2, "q", COMPILE_URGENT);
	forget(f, number);
	/* Asked for again at once, it is built anew: nobody joins what is being ended. */
	submit_for(f, 1, "s", COMPILE_URGENT);
	finish(f);
	assert_true(milliseconds() - since < 60000);
	assert_int_equal(f->n_results, 2);
	assert_int_equal(f->results[0] | f->results[1], 0);
}

static void a_build_goes_on_for_those_who_stay(void **state)
{
	struct fixture *f = *state;
	int first, second;

	write_compiler(f, "sleep 0.3; echo code");
	start(f, 1);
	first = submit_for(f, 1, "a", COMPILE_URGENT);
	second = submit_for(f, 2, "a", COMPILE_URGENT);
	wait_for_compilers(f, 1);
	forget(f, first);
	submit_for(f, 3, "b", COMPILE_URGENT);
	finish(f);
	/* In any order: a third user has a compiler beside the one that is busy. */
	assert_true(strchr(f->order, 'a') && strchr(f->order, 'b'));
	assert_null(f->waiters[second].job);
	assert_int_equal(count_lines(f->runs), 2); /* neither was begun anew */
}

/* ---- locks ---- */

/* The key of the kernel called @name, as the queue finds it. */
static struct cache_key key_of(struct fixture *f, const char *name)
{
	const struct compile_request request = request_for(name, 0);
	struct compile_target target;

	assert_int_equal(compile_identify(&f->config, &request, &target, NULL), 0);
	return target.key;
}

static void a_held_lock_stops_its_key_only(void **state)
{
	struct fixture *f = *state;
	struct cache_key key = key_of(f, "s");
	int64_t since = milliseconds();
	int lock;

	write_compiler(f, "echo code");
	f->config.deadline_ms = 2000;
	assert_int_equal(cache_try_lock(f->cache, &key, &lock, NULL), 0);
	start(f, 1);
	submit(f, "s", COMPILE_URGENT);
	submit(f, "a", COMPILE_URGENT);
	submit(f, "b", COMPILE_URGENT);
	wait_for(f, 2);
	assert_null(strchr(f->order, 's')); /* it waits */
	finish(f); /* the holder never ends: built in the end all the same */
	assert_true(milliseconds() - since >= 1800);
	assert_int_equal(f->results[2], 0);
	cache_unlock(f->cache, &key, lock);
}

static void a_lock_that_is_released_is_noticed(void **state)
{
	struct fixture *f = *state;
	struct cache_key key = key_of(f, "s");
	struct cache_entry entry = {
		.info = {.kernel = "stored"}, .log = "", .code = "code", .code_bytes = 4};
	int lock;

	assert_int_equal(cache_try_lock(f->cache, &key, &lock, NULL), 0);
	start(f, 1);
	submit(f, "s", COMPILE_URGENT);
	(void)usleep(200000);
	assert_int_equal(cache_store(f->cache, &key, &entry, NULL), 0);
	cache_unlock(f->cache, &key, lock);
	wait_for(f, 1);
	finish(f);
	assert_int_equal(count_lines(f->runs), 0); /* somebody else has built it */
}

int main(void)
{
#define QUEUE_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		QUEUE_TEST(equal_requests_are_built_once),
		QUEUE_TEST(the_version_is_asked_for_once),
		QUEUE_TEST(urgent_requests_overtake),
		QUEUE_TEST(the_background_takes_half_of_the_cores_and_is_nice),
		QUEUE_TEST(closing_cancels_what_runs_and_waits),
		QUEUE_TEST(failures_are_not_remembered),
		QUEUE_TEST(turns_go_by_user),
		QUEUE_TEST(turns_are_measured_in_time),
		QUEUE_TEST(one_user_has_all_compilers_and_another_does_not_wait),
		QUEUE_TEST(the_cache_answers_while_compilers_are_busy),
		QUEUE_TEST(what_nobody_waits_for_is_not_built),
		QUEUE_TEST(a_running_build_that_nobody_waits_for_is_ended),
		QUEUE_TEST(a_build_goes_on_for_those_who_stay),
		QUEUE_TEST(a_held_lock_stops_its_key_only),
		QUEUE_TEST(a_lock_that_is_released_is_noticed),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
