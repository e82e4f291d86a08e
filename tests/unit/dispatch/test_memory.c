/* SPDX-License-Identifier: MIT */
/* Plans and their explanations when an allocation fails, each in its turn, once and from then on: out
 * of memory, or what it is without a fault. */
#include <stdio.h>

#include <registry/registry.h>

#include "../scarce.h"
#include "cpu_runner.h"
#include "fixture.h"

#define MOST_ALLOCATIONS 100000

static struct cpu_runner runner = {.level = CPU_PORTABLE, .n_threads = 1};

/* A problem that has kernels of several head dims, splits and masks to choose from. */
static void set_up(struct fixture *f)
{
	fixture_forward(f, FMHA_BATCH);
}

/* @text: what a call made, given; judged by @expected, which it becomes when that is NULL. */
static bool check(int r, char *text, char **expected)
{
	bool more = failed;

	n_before = -1;
	if (!failed)
		assert_int_equal(r, 0);
	else
		assert_true(r == 0 || r == FMHA_ENOMEM);
	if (r == 0 && !*expected)
		*expected = strdup(text);
	if (r == 0)
		assert_string_equal(text, *expected);
	if (r == 0)
		free(text);
	return more;
}

static void explaining_without_memory_is_refused(void **state)
{
	struct plan_device device = cpu_runner_device(&runner);
	char *text, *expected = NULL;
	struct fixture f;

	(void)state;
	set_up(&f);
	assert_int_equal(plan_explain(&f.problem, &f.choice, &device, &expected, &f.err), 0);
	for (int mode = 0; mode < 2; mode++) {
		long n = 0;
		bool more = true;

		for (for_good = mode; more && n < MOST_ALLOCATIONS; n++) {
			int r;

			n_before = n;
			failed = false;
			r = plan_explain(&f.problem, &f.choice, &device, &text, &f.err);
			more = check(r, text, &expected);
		}
		assert_in_range(n, 4, MOST_ALLOCATIONS - 1);
		(void)printf("%ld allocations failed\n", n - 1);
	}
	free(expected);
	fixture_deinit(&f);
}

/* Calls until no allocation was left to fail, which is right or says what it lacked. */
static void starve(struct fixture *f, int expected, int (*call)(struct fixture *f, void *data),
		   void *data)
{
	for (int mode = 0; mode < 2; mode++) {
		long n = 0;

		failed = true;
		for (for_good = mode; failed && n < MOST_ALLOCATIONS; n++) {
			int r;

			n_before = n;
			failed = false;
			f->err = (struct fmha_error){0};
			r = call(f, data);
			n_before = -1;
			assert_true(r == expected || (failed && r == FMHA_ENOMEM));
			assert_int_equal(f->err.code, r < 0 ? r : 0);
		}
		assert_in_range(n, 2, MOST_ALLOCATIONS - 1);
	}
}

static int build_plan(struct fixture *f, void *kernel)
{
	struct plan_device device = cpu_runner_device(&runner);
	int r = plan_build(&f->problem, &f->choice, &device, &f->plan, &f->err);

	if (r == 0 && strcmp(f->plan.stages[0].kernel, kernel) != 0)
		return FMHA_ENOKERNEL; /* not the one that it is with memory */
	return r;
}

static void planning_without_memory_is_refused(void **state)
{
	struct plan_device device = cpu_runner_device(&runner);
	char kernel[sizeof(((struct plan_stage *)NULL)->kernel)];
	struct fixture f;

	(void)state;
	set_up(&f);
	assert_int_equal(plan_build(&f.problem, &f.choice, &device, &f.plan, &f.err), 0);
	memcpy(kernel, f.plan.stages[0].kernel, sizeof(kernel));
	starve(&f, 0, build_plan, kernel);
	fixture_deinit(&f);
}

static int32_t measured_splits;

static int build_split_plan(struct fixture *f, void *data)
{
	struct plan_device device = cpu_runner_device(&runner);
	int r = plan_build(&f->problem, &f->choice, &device, &f->plan, &f->err);

	(void)data;
	if (r == 0 && f->plan.n_splits != measured_splits)
		return FMHA_ENOKERNEL; /* the default, though another was measured as faster */
	return r;
}

/* What was measured says how many splits: without the memory to look at it that is not known. */
static void choosing_splits_without_memory_is_refused(void **state)
{
	struct plan_option *options = calloc(PLAN_MAX_OPTIONS, sizeof(*options));
	struct plan_device device = cpu_runner_device(&runner);
	struct proto_measured result = {.us = 0.001, .when_s = 1};
	struct fixture f;
	int n, i;

	(void)state;
	set_up(&f);
	f.problem.seqlen_q = 1;
	f.problem.seqlen_k = 4096;
	n = plan_options(&f.problem, &device, options, &f.err);
	for (i = 0; i < n && options[i].n_splits <= 1; i++)
		;
	assert_in_range(i, 0, n - 1);
	assert_int_equal(plan_build(&f.problem, &f.choice, &device, &f.plan, &f.err), 0);
	plan_shape(&f.plan.problem, result.shape);
	result.n_splits = measured_splits = options[i].n_splits;
	(void)snprintf(result.kernel, sizeof(result.kernel), "%s", options[i].kernel);
	assert_int_equal(registry_set_tuned(device.registry, &result, TIMES_OWN, &f.err), 0);
	starve(&f, 0, build_split_plan, NULL);
	assert_int_equal(registry_restore(device.registry, "{}", 2, &f.err), 0);
	free(options);
	fixture_deinit(&f);
}

static int list_options(struct fixture *f, void *options)
{
	struct plan_device device = cpu_runner_device(&runner);

	return plan_options(&f->problem, &device, options, &f->err);
}

/* An error without its words would be taken for none. */
static void listing_options_without_memory_is_refused(void **state)
{
	struct plan_option *options = calloc(PLAN_MAX_OPTIONS, sizeof(*options));
	struct fixture f;
	int expected;

	(void)state;
	set_up(&f);
	expected = list_options(&f, options);
	assert_true(expected > 0);
	starve(&f, expected, list_options, options);
	free(options);
	fixture_deinit(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(explaining_without_memory_is_refused),
		cmocka_unit_test(planning_without_memory_is_refused),
		cmocka_unit_test(choosing_splits_without_memory_is_refused),
		cmocka_unit_test(listing_options_without_memory_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, cpu_runner_free_registries);
}
