/* SPDX-License-Identifier: MIT */
/* Combine on the CPU: against the reference, associativity, empty parts, the sink counted once. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kernels/reference.h>

#include "launch.h"

enum { BATCH = 2, HEADS = 3, ROWS = 5, PARTS = 4, GROUP_ROWS = BATCH * ROWS };

static int32_t dim = 24;

struct problem {
	struct abi_combine_args args;
	int64_t n_o, n_lse; /* of one part */
	int32_t seqstart[BATCH + 1], seqlen[BATCH];
	double *o, *lse; /* of the reference */
};

static float random_float(uint32_t *state)
{
	*state = *state * 1664525u + 1013904223u;
	return (float)(*state >> 8) / 8388608.0f - 1;
}

static int32_t type_bytes(uint32_t dtype)
{
	return dtype == ABI_F32 ? 4 : 2;
}

static void *filled(int64_t n, uint32_t dtype, uint32_t *state)
{
	void *data = malloc((size_t)n * type_bytes(dtype));

	assert_non_null(data);
	for (int64_t i = 0; i < n; i++)
		reference_store(data, dtype, i, random_float(state));
	return data;
}

/* Parts are [part, batch, head, row, dim] here, results [batch, row, head, dim]. */
static struct problem *problem_new(uint32_t parts_dtype, uint32_t dtype, int32_t n_parts,
				   bool group, uint32_t seed)
{
	struct problem *p = calloc(1, sizeof(*p));
	struct abi_combine_args *a = &p->args;

	p->n_o = (int64_t)BATCH * HEADS * ROWS * dim;
	p->n_lse = BATCH * HEADS * ROWS;
	*a = (struct abi_combine_args){
		.o_parts = {.stride_dim = 1, .stride_seq = dim},
		.o_parts_stride_split = p->n_o,
		.lse_parts = {.stride_seq = 1},
		.lse_parts_stride_split = p->n_lse,
		.o = {.stride_dim = 1, .stride_head = dim, .stride_seq = HEADS * dim},
		.lse = {.stride_seq = 1},
		.sequences = {.batch = BATCH, .seqlen_q_max = ROWS, .total_q = GROUP_ROWS},
		.n_splits = n_parts,
		.nhead_q = HEADS,
		.hdim_v = dim,
		.o_parts_dtype = (abi_i32)parts_dtype,
		.o_dtype = (abi_i32)dtype,
	};
	if (group) {
		/* One sequence of three rows of which two count, one of five. */
		p->seqstart[1] = 3;
		p->seqstart[2] = 3 + ROWS;
		p->seqlen[0] = 2;
		p->seqlen[1] = ROWS;
		a->sequences.seqstart_q = p->seqstart;
		a->sequences.seqlen_q = p->seqlen;
	}
	a->o_parts.stride_head = (group ? GROUP_ROWS : ROWS) * dim;
	a->o_parts.stride_batch = group ? 0 : HEADS * ROWS * dim;
	a->lse_parts.stride_head = a->lse.stride_head = group ? GROUP_ROWS : ROWS;
	a->lse_parts.stride_batch = a->lse.stride_batch = group ? 0 : HEADS * ROWS;
	a->o.stride_batch = group ? 0 : ROWS * HEADS * dim;
	a->o_parts.data = filled(p->n_o * n_parts, parts_dtype, &seed);
	a->lse_parts.data = filled(p->n_lse * n_parts, ABI_F32, &seed);
	a->o.data = malloc((size_t)p->n_o * type_bytes(dtype));
	a->lse.data = malloc(sizeof(float) * (size_t)p->n_lse);
	memset(a->o.data, 0xa5, (size_t)p->n_o * type_bytes(dtype));
	memset(a->lse.data, 0xa5, sizeof(float) * (size_t)p->n_lse);
	p->o = malloc(sizeof(double) * (size_t)p->n_o);
	p->lse = malloc(sizeof(double) * (size_t)p->n_lse);
	for (int64_t i = 0; i < p->n_o; i++)
		p->o[i] = NAN; /* untouched */
	for (int64_t i = 0; i < p->n_lse; i++)
		p->lse[i] = NAN;
	return p;
}

static void problem_free(struct problem *p)
{
	free(p->args.o_parts.data);
	free(p->args.lse_parts.data);
	free(p->args.o.data);
	free(p->args.lse.data);
	free(p->o);
	free(p->lse);
	free(p);
}

static bool untouched(const void *data, size_t bytes)
{
	const uint8_t *byte = data;

	for (size_t i = 0; i < bytes; i++)
		if (byte[i] != 0xa5)
			return false;
	return true;
}

/* O and LSE have the reference's packed layout except for LSE of a group, which is compared by row.
 */
static void check(struct problem *p, enum cpu_level level)
{
	uint32_t dtype = (uint32_t)p->args.o_dtype;
	double tolerance = dtype == ABI_F32 ? 2e-6 : dtype == ABI_F16 ? 1e-3 : 8e-3;

	assert_int_equal(reference_combine(&p->args, p->o, p->lse), 0);
	launch_family(level, ABI_FWD_SPLITKV_COMBINE, dtype, &p->args, 2);
	for (int64_t i = 0; i < p->n_o; i++) {
		double got = reference_load(p->args.o.data, dtype, i);

		if (isnan(p->o[i]))
			assert_true(isnan(got) ||
				    untouched((char *)p->args.o.data + i * type_bytes(dtype),
					      type_bytes(dtype)));
		else
			assert_true(fabs(got - p->o[i]) <= tolerance);
	}
	for (int64_t i = 0; i < p->n_lse; i++) {
		double got = p->args.lse.data[i];

		if (isnan(p->lse[i]))
			assert_true(isnan(got) || untouched(&p->args.lse.data[i], sizeof(float)));
		else if (isinf(p->lse[i]))
			assert_true(got == p->lse[i]);
		else
			assert_true(fabs(got - p->lse[i]) <= 1e-5);
	}
}

#define FOR_EACH_LEVEL(level)                                                                      \
	for (int level = CPU_PORTABLE; level <= CPU_X86_64_V4 && launch_has_level(level); level++)

static void equals_the_reference_in_every_type(void **state)
{
	(void)state;
	FOR_EACH_LEVEL(level)
	for (uint32_t parts = ABI_F32; parts <= ABI_BF16; parts++)
		for (uint32_t dtype = ABI_F32; dtype <= ABI_BF16; dtype++)
			for (int group = 0; group < 2; group++) {
				struct problem *p = problem_new(parts, dtype, PARTS, group, 7);

				check(p, level);
				problem_free(p);
			}
}

/* Every number is exact in memory of its own size, which the sanitizer watches. */
static void any_head_dim(void **state)
{
	static const int32_t dims[] = {1,  3,  7,   8,   12,  17,  40,  59,
				       63, 72, 100, 111, 127, 129, 163, 255};

	(void)state;
	for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
		dim = dims[i];
		equals_the_reference_in_every_type(NULL);
	}
	dim = 24;
}

static void one_part_is_copied(void **state)
{
	struct problem *p = problem_new(ABI_F32, ABI_F32, 1, false, 8);

	(void)state;
	check(p, cpu_level_detect());
	for (int64_t i = 0; i < p->n_lse; i++)
		assert_float_equal(p->args.lse.data[i], p->args.lse_parts.data[i], 1e-7);
	problem_free(p);
}

static void empty_parts_are_not_read(void **state)
{
	(void)state;
	FOR_EACH_LEVEL(level)
	{
		struct problem *p = problem_new(ABI_F32, ABI_F32, PARTS, false, 9);
		float *o = p->args.o_parts.data;

		/* Part 1 is empty everywhere and holds NaN; row 0 of head 0 is empty in every part.
		 */
		for (int64_t i = 0; i < p->n_lse; i++)
			p->args.lse_parts.data[p->n_lse + i] = -INFINITY;
		for (int64_t i = 0; i < p->n_o; i++)
			o[p->n_o + i] = NAN;
		for (int s = 0; s < PARTS; s++) {
			p->args.lse_parts.data[s * p->n_lse] = -INFINITY;
			for (int d = 0; d < dim; d++)
				o[s * p->n_o + d] = NAN;
		}
		check(p, level);
		assert_true(p->args.lse.data[0] == -INFINITY);
		assert_true(((float *)p->args.o.data)[0] == 0);
		problem_free(p);
	}
}

static void sink_counts_once(void **state)
{
	const float sink[HEADS] = {0.5f, -2.0f, 30.0f};

	(void)state;
	FOR_EACH_LEVEL(level)
	{
		struct problem *p = problem_new(ABI_F32, ABI_F32, PARTS, false, 10);

		for (int s = 0; s < PARTS; s++)
			p->args.lse_parts.data[s * p->n_lse] = -INFINITY;
		p->args.sink = sink;
		check(p, level);
		/* Nothing attended to: O = 0, LSE = the sink. */
		assert_float_equal(p->args.lse.data[0], 0.5, 1e-6);
		assert_true(((float *)p->args.o.data)[0] == 0);
		problem_free(p);
	}
}

static void short_sequences_are_skipped(void **state)
{
	struct problem *p = problem_new(ABI_F32, ABI_F32, PARTS, true, 11);

	(void)state;
	p->args.min_seqlen_q = 3;
	check(p, cpu_level_detect());
	assert_true(untouched(p->args.o.data, sizeof(float) * 3 * HEADS * dim));
	problem_free(p);
}

/* (a + b) + (c + d) = ((a + b) + c) + d = all at once, within rounding, for logits far apart too.
 */
static void merging_is_associative(void **state)
{
	struct problem *all = problem_new(ABI_F32, ABI_F32, PARTS, false, 12);
	struct problem *pair[2], *both = problem_new(ABI_F32, ABI_F32, 2, false, 12);

	(void)state;
	for (int64_t i = 0; i < all->n_lse * PARTS; i++)
		all->args.lse_parts.data[i] *= 40;
	for (int half = 0; half < 2; half++) {
		pair[half] = problem_new(ABI_F32, ABI_F32, 2, false, 12);
		memcpy(pair[half]->args.o_parts.data,
		       (float *)all->args.o_parts.data + 2 * half * all->n_o,
		       sizeof(float) * 2 * (size_t)all->n_o);
		memcpy(pair[half]->args.lse_parts.data,
		       all->args.lse_parts.data + 2 * half * all->n_lse,
		       sizeof(float) * 2 * (size_t)all->n_lse);
		check(pair[half], cpu_level_detect());
		/* results are [batch, row, head, dim] */
		memcpy((float *)both->args.o_parts.data + half * all->n_o, pair[half]->args.o.data,
		       sizeof(float) * (size_t)all->n_o);
		memcpy(both->args.lse_parts.data + half * all->n_lse, pair[half]->args.lse.data,
		       sizeof(float) * (size_t)all->n_lse);
	}
	both->args.o_parts.stride_head = dim;
	both->args.o_parts.stride_seq = HEADS * dim;
	check(both, cpu_level_detect());
	check(all, cpu_level_detect());
	for (int64_t i = 0; i < all->n_o; i++)
		assert_float_equal(((float *)both->args.o.data)[i], ((float *)all->args.o.data)[i],
				   3e-6);
	for (int64_t i = 0; i < all->n_lse; i++)
		assert_float_equal(both->args.lse.data[i], all->args.lse.data[i], 1e-5);
	problem_free(pair[0]);
	problem_free(pair[1]);
	problem_free(both);
	problem_free(all);
}

static void nan_stays_in_its_row(void **state)
{
	struct problem *p = problem_new(ABI_F32, ABI_F32, PARTS, false, 13);
	const float *o = p->args.o.data;

	(void)state;
	p->args.lse_parts.data[2 * p->n_lse + 3] = NAN; /* batch 0, head 0, row 3 */
	launch_family(cpu_level_detect(), ABI_FWD_SPLITKV_COMBINE, ABI_F32, &p->args, 1);
	for (int64_t i = 0; i < p->n_o; i++)
		assert_int_equal(isnan(o[i]), i / dim == 3 * HEADS);
	for (int64_t i = 0; i < p->n_lse; i++)
		assert_int_equal(isnan(p->args.lse.data[i]), i == 3);
	problem_free(p);
}

/* The widest NaN has no room above it: rounding to bf16 must not go through its sum. */
static void nan_of_any_bits_stays_one(void **state)
{
	const uint32_t widest[2] = {0x7fffffff, 0xffffffff};

	(void)state;
	FOR_EACH_LEVEL(level)
	{
		struct problem *p = problem_new(ABI_F32, ABI_BF16, 1, false, 14);

		for (int64_t i = 0; i < p->n_o; i++)
			memcpy((float *)p->args.o_parts.data + i, &widest[i % 2], sizeof(float));
		launch_family(level, ABI_FWD_SPLITKV_COMBINE, ABI_BF16, &p->args, 1);
		for (int64_t i = 0; i < p->n_o; i++)
			assert_true(isnan(reference_load(p->args.o.data, ABI_BF16, i)));
		problem_free(p);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(equals_the_reference_in_every_type),
		cmocka_unit_test(any_head_dim),
		cmocka_unit_test(one_part_is_copied),
		cmocka_unit_test(empty_parts_are_not_read),
		cmocka_unit_test(sink_counts_once),
		cmocka_unit_test(short_sequences_are_skipped),
		cmocka_unit_test(merging_is_associative),
		cmocka_unit_test(nan_stays_in_its_row),
		cmocka_unit_test(nan_of_any_bits_stays_one),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
