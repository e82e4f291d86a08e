/* SPDX-License-Identifier: MIT */
/* quotient.h against division: the codes that an append makes of either are the same. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "general/quotient.h"

/* Codes: bits behind the first, the exponent of the least normal number, the largest number. */
struct type {
	int bits, least;
	float most;
};
static const struct type e4m3 = {3, -6, 448.0F}, e5m2 = {2, -14, 57344.0F}, i8 = {30, 30, 127.0F};
static const struct type *const types[] = {&e4m3, &e5m2, &i8};
#define N_TYPES 3

static float float_of(uint32_t bits)
{
	float x;

	memcpy(&x, &bits, sizeof(x));
	return x;
}

static uint32_t bits_of(float x)
{
	uint32_t bits;

	memcpy(&bits, &x, sizeof(bits));
	return bits;
}

/* What a positive number is as a code; of i8, whose codes are one apart, too. */
static float coded(float x, const struct type *type)
{
	int exponent, last;

	if (x > type->most)
		return type->most;
	exponent = x > 0 && ilogbf(x) > type->least ? ilogbf(x) : type->least;
	last = exponent - type->bits;
	return ldexpf(nearbyintf(ldexpf(x, -last)), last);
}

/* A wrong one is one of many millions: told apart before cmocka is asked. */
static void expect_code(float x, float factor, const struct type *type)
{
	float got = quotient_magnitude(x, factor, 1 / factor, type->most * factor),
	      exact = fabsf(x) / factor;

	if (coded(got, type) != coded(exact, type))
		fail_msg("%a / %a of %a: %a, not %a", (double)x, (double)factor, (double)type->most,
			 (double)got, (double)exact);
}

static uint64_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static int on_one_side(float x, float y, float between)
{
	return (x < between) == (y < between) && (x > between) == (y > between);
}

/* Around odd numbers up to @end, some of which lie between codes: an error of one bit would be another code. */
static void divide_around(uint32_t begin, uint32_t end, uint32_t step)
{
	for (uint32_t mantissa = 0; mantissa < 1U << 23; mantissa += step) {
		float factor = float_of(127U << 23 | mantissa), inverse = 1 / factor;

		for (uint32_t between = begin; between < end; between += 2) {
			uint32_t bits = bits_of(factor * (float)between);

			for (uint32_t i = 0; i < 5; i++) {
				float x = float_of(bits + i - 2);
				float got = quotient_magnitude(x, factor, inverse,
							       e5m2.most * factor);

				if (!on_one_side(got, x / factor, (float)between))
					fail_msg("%a / %a: %a", (double)x, (double)factor,
						 (double)got);
			}
		}
	}
}

static void every_mantissa_of_a_factor_divides(void **state)
{
	(void)state;
	divide_around(17, 32, 1);  /* between codes of fp8 */
	divide_around(1, 256, 61); /* and of i8 */
}

static void any_number_divides_by_any_factor(void **state)
{
	uint64_t random = 88172645463325252U;

	(void)state;
	for (int n = 0; n < 10000000; n++) {
		uint64_t one = next_random(&random), other = next_random(&random);
		float factor = float_of((uint32_t)(one & 0x7fffff) |
					(uint32_t)(67 + (one >> 23) % 120) << 23);
		float x = float_of((uint32_t)other);

		if (n % 4 == 1) /* of bf16 */
			x = float_of((uint32_t)other << 16);
		if (n % 4 >= 2) /* near codes and what lies between them */
			x = float_of(bits_of(ldexpf((float)(1 + other % 64),
						    (int)(other >> 8 & 0xff) % 24 - 17) *
					     factor) +
				     (uint32_t)(other >> 40) % 9 - 4);
		if (isfinite(x) && quotient_has(factor))
			expect_code(x, factor, types[n % N_TYPES]);
	}
}

static void a_nan_stays_one(void **state)
{
	(void)state;
	assert_true(isnan(quotient_magnitude(NAN, 3.0F, 1 / 3.0F, 3 * 448.0F)));
	assert_true(isnan(quotient_magnitude(-NAN, 1.0F, 1.0F, 127.0F)));
}

static void infinities_are_the_largest(void **state)
{
	(void)state;
	for (int i = 0; i < N_TYPES; i++) {
		expect_code(INFINITY, 0.3F, types[i]);
		expect_code(-INFINITY, 0x1p-60F, types[i]);
		expect_code(-INFINITY, 0x1p60F, types[i]);
	}
}

static void factors_out_of_bounds_are_refused(void **state)
{
	static const float bad[] = {0.0F,      -1.0F,    0x1p-61F, 0x1.000002p60F,
				    0x1p-140F, INFINITY, NAN};

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_false(quotient_has(bad[i]));
	assert_true(quotient_has(0x1p-60F) && quotient_has(0x1p60F) && quotient_has(1.0F));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_mantissa_of_a_factor_divides),
		cmocka_unit_test(any_number_divides_by_any_factor),
		cmocka_unit_test(a_nan_stays_one),
		cmocka_unit_test(infinities_are_the_largest),
		cmocka_unit_test(factors_out_of_bounds_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
