/* SPDX-License-Identifier: MIT */
/*
 * test_reference.c: the judge, judged: by the definition of the formats, by published vectors, and
 * by cases small enough to be computed by hand.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <kernels/reference.h>

static void assert_near(double got, double want)
{
	if (isinf(want) ? got != want : !(fabs(got - want) <= 1e-12 * (1 + fabs(want))))
		fail_msg("got %.17g, want %.17g", got, want);
}

/* Every bit pattern of a format comes back from its value. */
static void check_round_trip(uint32_t dtype, uint32_t n)
{
	for (uint32_t bits = 0; bits < n; bits++) {
		uint16_t in = (uint16_t)bits, out = 0;
		double value = reference_load(&in, dtype, 0);

		reference_store(&out, dtype, 0, value);
		if (isnan(value))
			assert_true(isnan(reference_load(&out, dtype, 0)));
		else
			assert_int_equal(in, out);
	}
}

static uint32_t rounded_bits(uint32_t dtype, double value)
{
	uint32_t bits = 0;

	reference_store(&bits, dtype, 0, value);
	return bits;
}

static void every_small_float_round_trips(void **state)
{
	(void)state;
	check_round_trip(ABI_F16, 65536);
	check_round_trip(ABI_BF16, 65536);
	check_round_trip(ABI_E4M3, 256);
	check_round_trip(ABI_E5M2, 256);
	for (int i = -127; i <= 127; i++) /* the least is read, and not made */
		assert_int_equal((int8_t)rounded_bits(ABI_I8, i), i);
}

static void known_small_floats(void **state)
{
	static const struct {
		uint32_t dtype, bits;
		double value;
	} cases[] = {
		{ABI_F16, 0x3c00, 1},         {ABI_F16, 0x0001, 0x1p-24}, {ABI_F16, 0x7bff, 65504},
		{ABI_F16, 0xfc00, -INFINITY}, {ABI_BF16, 0x3f80, 1},      {ABI_BF16, 0xc040, -3},
		{ABI_E4M3, 0x7e, 448},        {ABI_E4M3, 0x01, 0x1p-9},   {ABI_E4M3, 0x38, 1},
		{ABI_E5M2, 0x7b, 57344},      {ABI_E5M2, 0x7c, INFINITY}, {ABI_E5M2, 0x01, 0x1p-16},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		uint16_t bits = (uint16_t)cases[i].bits;

		assert_near(reference_load(&bits, cases[i].dtype, 0), cases[i].value);
	}
	assert_true(isnan(reference_load(&(uint8_t){0x7f}, ABI_E4M3, 0)));
}

static double rounded(uint32_t dtype, double value)
{
	uint32_t bits = rounded_bits(dtype, value);

	return reference_load(&bits, dtype, 0);
}

static void rounds_to_nearest_even(void **state)
{
	(void)state;
	assert_near(rounded(ABI_F16, 1 + 0x1p-11), 1);            /* half way, to even */
	assert_near(rounded(ABI_F16, 1 + 0x1.8p-10), 1 + 0x1p-9); /* half way, up to even */
	assert_near(rounded(ABI_F16, 1 + 0x1p-11 + 0x1p-30), 1 + 0x1p-10);
	assert_near(rounded(ABI_F16, 65519), 65504);
	assert_near(rounded(ABI_F16, 65520), INFINITY);
	assert_near(rounded(ABI_F16, 0x1p-25), 0);
	assert_near(rounded(ABI_BF16, 1 + 0x1p-8), 1);
	assert_near(rounded(ABI_BF16, 1.01), 1.0078125);
	assert_near(rounded(ABI_E4M3, 1000), 448); /* saturates */
	assert_near(rounded(ABI_E4M3, 17), 16);
	assert_near(rounded(ABI_E5M2, -1e9), -57344);
	assert_near(rounded(ABI_I8, 2.5), 2);
	assert_near(rounded(ABI_I8, -3.5), -4);
	assert_near(rounded(ABI_I8, 127.4), 127);
	assert_near(rounded(ABI_I8, -1e9), -127);
	assert_near(rounded(ABI_I8, INFINITY), 127);
	assert_near(rounded(ABI_I8, NAN), 0);
	assert_near(reference_load(&(int8_t){-128}, ABI_I8, 0), -128);
}

/* Philox4x32-7 of Random123's known-answer file, key and counter 0: the bytes of lane 0. */
static void dropout_bytes_are_philox(void **state)
{
	static const uint32_t words[4] = {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48};

	(void)state;
	for (uint32_t byte = 0; byte < 16; byte++) {
		/* lane 0: rows 0 and 8, columns 0 and 1 of every group of eight */
		uint32_t row = byte / 2 % 2 * 8, column = byte / 4 * 8 + byte % 2;

		assert_int_equal(reference_dropout_byte(0, 0, 0, 0, 1, row, column),
				 words[byte / 4] >> (8 * (byte % 4)) & 0xff);
	}
}

/* The lane is part of the counter: row 1, column 2 of head 0 is what offset 5 gives at the origin.
 */
static void dropout_lanes_follow_the_layout(void **state)
{
	(void)state;
	assert_int_equal(reference_dropout_byte(9, 0, 0, 0, 1, 1, 2),
			 reference_dropout_byte(9, 5, 0, 0, 1, 0, 0));
	assert_int_equal(reference_dropout_byte(9, 0, 1, 2, 3, 0, 0),
			 reference_dropout_byte(9, 32 * 5, 0, 0, 3, 0, 0));
	assert_int_equal(reference_dropout_byte(9, 7, 0, 0, 1, 15, 31),
			 reference_dropout_byte(9, 7 + 31, 0, 0, 1, 8, 25));
}

/* One head, float, packed. */
static struct abi_fwd_args problem(float *q, float *k, float *v, int rows, int keys, int dims)
{
	struct abi_fwd_args a = {.nhead_q = 1, .nhead_k = 1, .hdim_q = dims, .hdim_v = dims};

	a.q = (struct abi_tensor){q, 0, dims, 0, 1};
	a.k = (struct abi_tensor){k, 0, dims, 0, 1};
	a.v = (struct abi_tensor){v, 0, dims, 0, 1};
	a.scale = 1;
	a.band.window_left = a.band.window_right = -1;
	a.sequences.batch = 1;
	a.sequences.seqlen_q_max = a.sequences.total_q = rows;
	a.sequences.seqlen_k_max = a.sequences.total_k = keys;
	return a;
}

/* exp(0) and exp(ln 3): weights 1/4 and 3/4. */
static void two_keys_by_hand(void **state)
{
	float q[1] = {1}, k[2] = {0, logf(3)}, v[2] = {8, 4};
	struct abi_fwd_args a = problem(q, k, v, 1, 2, 1);
	double o, lse, three = exp((double)logf(3));

	(void)state;
	assert_int_equal(reference_forward(&a, &o, &lse, NULL), 0);
	assert_near(o, (8 + 4 * three) / (1 + three));
	assert_near(lse, log(1 + three));
}

/* Equal scores: O is the mean of the values a row sees, LSE the logarithm of their number. */
static void equal_scores_average(void **state)
{
	float q[6] = {0}, k[6] = {0}, v[6] = {1, 2, 4, 8, 16, 32};
	struct abi_fwd_args a = problem(q, k, v, 6, 6, 1);
	double o[6], lse[6];

	(void)state;
	a.band.mask = ABI_MASK_TOP_LEFT;
	a.band.window_right = 0;
	assert_int_equal(reference_forward(&a, o, lse, NULL), 0);
	for (int i = 0; i < 6; i++) {
		assert_near(o[i], (exp2(i + 1) - 1) / (i + 1));
		assert_near(lse[i], log(i + 1));
	}
	a.band.window_left = 1;
	a.band.sink_tokens = 1;
	assert_int_equal(reference_forward(&a, o, lse, NULL), 0);
	assert_near(o[5], (1 + 16 + 32) / 3.0);
	assert_near(lse[5], log(3));
	assert_near(o[1], 1.5);
}

/* Bottom-right: the last row sees all keys, the first rows of a tall problem none. */
static void bottom_right_leaves_rows_empty(void **state)
{
	float q[4] = {0}, k[2] = {0}, v[2] = {3, 5};
	struct abi_fwd_args a = problem(q, k, v, 4, 2, 1);
	double o[4], lse[4];

	(void)state;
	a.band.mask = ABI_MASK_BOTTOM_RIGHT;
	a.band.window_right = 0;
	assert_int_equal(reference_forward(&a, o, lse, NULL), 0);
	assert_near(o[0], 0);
	assert_near(lse[0], -INFINITY);
	assert_near(o[1], 0);
	assert_near(o[2], 3);
	assert_near(o[3], 4);
}

static void modifiers_by_hand(void **state)
{
	float q[1] = {2}, k[2] = {1, 3}, v[2] = {0, 1}, bias[2] = {0.5f, -0.25f}, slope = 0.5f;
	float sink = 0.75f;
	struct abi_fwd_args a = problem(q, k, v, 1, 2, 1);
	double o, lse, s0, s1;

	(void)state;
	a.scale = 0.5f;
	a.logits_soft_cap = 2;
	a.bias = (struct abi_tensor){bias, 0, 0, 0, 1};
	a.bias_dtype = ABI_F32;
	a.alibi_slopes = &slope;
	a.sink = &sink;
	/* row 0 is the last row: it stands at column 1 */
	s0 = 2 * tanh(0.5) + 0.5 - 0.5 * 1;
	s1 = 2 * tanh(1.5) - 0.25;
	assert_int_equal(reference_forward(&a, &o, &lse, NULL), 0);
	assert_near(o, exp(s1) / (exp(s0) + exp(s1) + exp(0.75)));
	assert_near(lse, log(exp(s0) + exp(s1) + exp(0.75)));
}

/* Dropping scales what is kept and leaves the sum alone: with values of 1, O counts the kept keys.
 */
static void dropout_keeps_the_sum(void **state)
{
	enum { KEYS = 500 };
	float q[1] = {0}, k[KEYS] = {0}, v[KEYS];
	struct abi_fwd_args a = problem(q, k, v, 1, KEYS, 1);
	uint8_t bytes[KEYS];
	double o, lse;
	int kept = 0;

	(void)state;
	for (int j = 0; j < KEYS; j++)
		v[j] = 1;
	a.dropout = (struct abi_dropout){.seed = 3, .p_drop = 0.5f, .p_keep_inverse = 2};
	a.dropout.keep_at_most = 127;
	assert_int_equal(reference_forward(&a, &o, &lse, bytes), 0);
	for (int j = 0; j < KEYS; j++)
		kept += bytes[j] <= 127;
	assert_in_range(kept, 200, 300);
	assert_near(o, 2.0 * kept / KEYS);
	assert_near(lse, log(KEYS));
}

/* The yardstick is wrong by about as much as its type rounds, and never exact. */
static void yardstick_rounds(void **state)
{
	float q[4] = {0.3f, -0.7f, 0.9f, 0.2f}, k[12], v[12];
	struct abi_fwd_args a = problem(q, k, v, 1, 3, 4);
	double o[4], exact[4], lse, exact_lse, worst = 0;

	(void)state;
	for (int i = 0; i < 12; i++) {
		k[i] = (float)(i % 5) * 0.31f - 0.5f;
		v[i] = (float)(i % 7) * 0.17f + 0.1f;
	}
	assert_int_equal(reference_forward(&a, exact, &exact_lse, NULL), 0);
	assert_int_equal(reference_forward_rounded(&a, ABI_BF16, ABI_BF16, o, &lse), 0);
	for (int d = 0; d < 4; d++)
		worst = fmax(worst, fabs(o[d] - exact[d]));
	assert_true(worst > 1e-5 && worst < 2e-2);
	/* Weights alone: no sum and no score changes. */
	assert_int_equal(reference_forward_rounded(&a, ABI_F32, ABI_E4M3, o, &lse), 0);
	assert_true(fabs(lse - exact_lse) < 1e-6);
	worst = 0;
	for (int d = 0; d < 4; d++)
		worst = fmax(worst, fabs(o[d] - exact[d]));
	assert_true(worst > 1e-3 && worst < 6e-2);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_small_float_round_trips),
		cmocka_unit_test(known_small_floats),
		cmocka_unit_test(rounds_to_nearest_even),
		cmocka_unit_test(dropout_bytes_are_philox),
		cmocka_unit_test(dropout_lanes_follow_the_layout),
		cmocka_unit_test(two_keys_by_hand),
		cmocka_unit_test(equal_scores_average),
		cmocka_unit_test(bottom_right_leaves_rows_empty),
		cmocka_unit_test(modifiers_by_hand),
		cmocka_unit_test(dropout_keeps_the_sum),
		cmocka_unit_test(yardstick_rounds),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
