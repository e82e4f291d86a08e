/* SPDX-License-Identifier: MIT */
/*
 * test_cpu_forward.c: every forward kernel of every level that this machine has, against the
 * reference.
 *
 * FMHA_TEST_SEED and FMHA_TEST_CASES change the random cases; a failing case prints the seed that
 * repeats it alone with FMHA_TEST_CASES=1.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "forward_case.h"

static const uint32_t families[] = {ABI_FWD, ABI_FWD_SPLITKV, ABI_FWD_PAGEDKV, ABI_BATCH_PREFILL};

static uint64_t env_number(const char *name, uint64_t fallback)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 0) : fallback;
}

/* Checks a case on every kernel of every level that accepts it. */
static int check_everywhere(const struct forward_options *o, uint64_t seed, float tolerance)
{
	enum cpu_level best = cpu_level_detect();
	int failures = 0, n_run = 0;

	for (int level = 0; level <= (int)best; level++) {
		size_t n;
		const struct cpu_kernel *const *kernels = cpu_kernels((enum cpu_level)level, &n);

		for (size_t i = 0; i < n; i++) {
			struct random r = {seed};
			struct forward_case c;

			if (kernels[i]->family != o->family ||
			    kernels[i]->dtype != (uint32_t)o->dtype)
				continue;
			forward_case_init(&c, o, &r);
			if (kernels[i]->accepts(&c.args)) {
				n_run++;
				failures += forward_case_check(&c, kernels[i], tolerance) < 0;
			}
			forward_case_deinit(&c);
		}
	}
	assert_true(n_run > 0);
	return failures;
}

static void random_problems(void **state)
{
	uint64_t seed = env_number("FMHA_TEST_SEED", 1), n = env_number("FMHA_TEST_CASES", 300);
	int failures = 0;

	(void)state;
	for (uint64_t i = 0; i < n; i++) {
		struct random r = {seed + i};
		struct forward_options o;

		forward_options_random(&o, &r, families[random_int(&r, 0, 3)],
				       random_int(&r, ABI_F32, ABI_E5M2));
		if (check_everywhere(&o, seed + i, 1) > 0) {
			fprintf(stderr, "FMHA_TEST_SEED=%llu: ", (unsigned long long)(seed + i));
			forward_options_print(&o);
			failures++;
		}
	}
	assert_int_equal(failures, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(random_problems),
	};

	fprintf(stderr, "levels up to %s; levels above are not on this machine: skipped\n",
		cpu_level_name(cpu_level_detect()));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
