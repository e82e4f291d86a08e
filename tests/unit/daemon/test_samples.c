/* SPDX-License-Identifier: MIT */
/* How many samples a measurement takes, and what time comes of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tuner.h"

#define US 1000
#define MS (1000 * US)

/* Runs that take @took_ns, one after another, until they are enough; the last one is taken again. */
static struct samples take(const uint64_t *took_ns, uint32_t n, double best_us)
{
	struct samples samples = {0};

	for (uint32_t i = 0; i == 0 || !samples_are_enough(&samples, best_us); i++)
		samples_add(&samples, took_ns[i < n ? i : n - 1]);
	return samples;
}

static void a_disturbed_first_sample_ends_nothing(void **state)
{
	static const uint64_t disturbed[] = {37 * US, 15 * US};
	struct samples samples = take(disturbed, 2, 16);

	(void)state;
	assert_int_equal(samples.n, SAMPLES_MOST);
	assert_float_equal(samples_time(&samples), 15, 0);
}

static void two_slow_short_samples_end_it_and_the_faster_counts(void **state)
{
	static const uint64_t slow[] = {37 * US, 25 * US};
	struct samples samples = take(slow, 2, 16);

	(void)state;
	assert_int_equal(samples.n, 2);
	assert_float_equal(samples_time(&samples), 25, 0);
}

static void one_slow_long_sample_tells(void **state)
{
	static const uint64_t slow[] = {4 * MS};

	(void)state;
	assert_int_equal(take(slow, 1, 2000).n, 1);
	assert_int_equal(take(slow, 1, 3000).n, 3); /* not 1.5 times as slow */
	assert_int_equal(take(slow, 1, 0).n, 3);    /* nothing to be slower than */
}

static void a_disturbed_sample_among_three_long_ones_does_not_count(void **state)
{
	static const uint64_t disturbed[] = {2 * MS, 9 * MS, 2 * MS};
	struct samples samples = take(disturbed, 3, 1900);

	(void)state;
	assert_int_equal(samples.n, 3);
	assert_float_equal(samples_time(&samples), 2000, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_disturbed_first_sample_ends_nothing),
		cmocka_unit_test(two_slow_short_samples_end_it_and_the_faster_counts),
		cmocka_unit_test(one_slow_long_sample_tells),
		cmocka_unit_test(a_disturbed_sample_among_three_long_ones_does_not_count),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
