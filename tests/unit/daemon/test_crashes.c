/* SPDX-License-Identifier: MIT */
/* What device/guard.h promises of signals that end the process: what was to be noted is noted, once,
 * however many threads fail at the same moment, and the process ends by that signal. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <device/guard.h>

#define N_THREADS 4

struct notes { /* shared with the child that ends */
	atomic_int n_begun, n_ended, signal;
};

static struct notes *notes;
static volatile int *nowhere;
static pthread_barrier_t together;

static void note_slowly(int signal)
{
	atomic_fetch_add(&notes->n_begun, 1);
	nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
	atomic_store(&notes->signal, signal);
	atomic_fetch_add(&notes->n_ended, 1);
}

static void fault_while_noting(int signal)
{
	atomic_store(&notes->signal, signal);
	*nowhere = 1;
	atomic_fetch_add(&notes->n_ended, 1);
}

static void *meet(void *data)
{
	pthread_barrier_wait(&together);
	if (*(const int *)data == SIGABRT)
		abort();
	pthread_kill(pthread_self(), *(const int *)data);
	return NULL;
}

/* All threads of a child meet the signal. Return: which signal ended it. */
static int end_of_child(int signal, void (*callback)(int signal))
{
	pthread_t threads[N_THREADS];
	int status = 0;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		setrlimit(RLIMIT_CORE, &(struct rlimit){0});
		alarm(60); /* threads that wait for one another for ever */
		guard_install(callback);
		if (pthread_barrier_init(&together, NULL, N_THREADS) != 0)
			_exit(1);
		for (int i = 0; i < N_THREADS; i++)
			if (pthread_create(&threads[i], NULL, meet, &signal) != 0)
				_exit(1);
		for (int i = 0; i < N_THREADS; i++)
			pthread_join(threads[i], NULL);
		_exit(2);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

static void test_the_first_crash_is_noted(void **state)
{
	static const int signals[] = {SIGABRT, SIGSEGV, SIGFPE, SIGILL, SIGBUS};

	(void)state;
	for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
		*notes = (struct notes){0};
		assert_int_equal(end_of_child(signals[i], note_slowly), signals[i]);
		assert_int_equal(atomic_load(&notes->n_begun), 1);
		assert_int_equal(atomic_load(&notes->n_ended), 1);
		assert_int_equal(atomic_load(&notes->signal), signals[i]);
	}
}

static void test_a_crash_while_noting_ends_it(void **state)
{
	(void)state;
	*notes = (struct notes){0};
	assert_int_equal(end_of_child(SIGFPE, fault_while_noting), SIGSEGV);
	assert_int_equal(atomic_load(&notes->signal), SIGFPE);
	assert_int_equal(atomic_load(&notes->n_ended), 0);
}

static int setup(void **state)
{
	(void)state;
	notes = mmap(NULL, sizeof(*notes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		     0);
	nowhere = mmap(NULL, sizeof(*nowhere), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return notes == MAP_FAILED || nowhere == MAP_FAILED ? -1 : 0;
}

static int teardown(void **state)
{
	(void)state;
	return munmap(notes, sizeof(*notes));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_the_first_crash_is_noted),
		cmocka_unit_test(test_a_crash_while_noting_ends_it),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
