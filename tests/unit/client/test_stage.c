/* SPDX-License-Identifier: MIT */
/* Compact copies of strided views, and which way each tensor of a problem is copied. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include <proto/problem.h>

#include "stage.h"

static struct stage_view view4(uint32_t element_bytes, const int64_t dims[4],
			       const int64_t stride[4])
{
	struct stage_view view = {.n_dims = 4, .element_bytes = element_bytes};

	memcpy(view.dims, dims, 4 * sizeof(*dims));
	memcpy(view.stride, stride, 4 * sizeof(*stride));
	stage_view_compact(&view);
	return view;
}

static void dense_views_keep_their_order(void **state)
{
	/* BHSD: heads lie outside of rows. */
	const int64_t dims[4] = {2, 5, 3, 8}, stride[4] = {120, 8, 40, 1};
	struct stage_view view = view4(2, dims, stride);

	(void)state;
	assert_memory_equal(view.compact, stride, sizeof(stride));
	assert_int_equal(view.bytes, 2 * 5 * 3 * 8 * 2);
}

static void gaps_and_broadcasts_are_left_out(void **state)
{
	const int64_t dims[4] = {2, 4, 3, 8}, stride[4] = {0, 100, 10, 1};
	const int64_t expected[4] = {0, 24, 8, 1};
	struct stage_view view = view4(4, dims, stride);

	(void)state;
	assert_memory_equal(view.compact, expected, sizeof(expected));
	assert_int_equal(view.bytes, 4 * 3 * 8 * 4);
}

/* Element by element, against the definition of strides. */
static void copies_agree_with_the_definition(void **state)
{
	static const int64_t strides[][4] = {
		{120, 24, 8, 1}, {120, 8, 40, 1}, {500, 100, 30, 3}, {1, 2, 10, 30},
		{0, 24, 8, 1},   {700, 0, 0, 2},  {120, 24, 8, 0},   {1000, 200, 50, 1},
	};
	const int64_t dims[4] = {2, 5, 3, 8};

	(void)state;
	for (size_t s = 0; s < sizeof(strides) / sizeof(strides[0]); s++) {
		for (uint32_t bytes = 1; bytes <= 4; bytes *= 2) {
			struct stage_view view = view4(bytes, dims, strides[s]);
			uint8_t *memory = malloc(8192), *back = malloc(8192);
			uint8_t *compact = malloc(view.bytes);

			for (int i = 0; i < 8192; i++)
				memory[i] = (uint8_t)(i * 37 + i / 256);
			memset(back, 0xee, 8192);
			stage_view_copy(&view, memory, compact, true);
			stage_view_copy(&view, back, compact, false);
			for (int64_t i = 0; i < 2 * 5 * 3 * 8; i++) {
				int64_t index[4] = {i / 120, i / 24 % 5, i / 8 % 3, i % 8};
				int64_t m = 0, c = 0;

				for (int n = 0; n < 4; n++) {
					m += index[n] * strides[s][n];
					c += index[n] * view.compact[n];
				}
				assert_memory_equal(memory + m * bytes, compact + c * bytes, bytes);
				assert_memory_equal(memory + m * bytes, back + m * bytes, bytes);
				memory[m * bytes] = back[m * bytes] = 0xee; /* seen */
				for (uint32_t k = 0; k < bytes; k++)
					memory[m * bytes + k] = back[m * bytes + k] = 0xee;
				/* An element may be met again under a broadcast. */
				memset(compact + c * bytes, 0xee, bytes);
			}
			for (int i = 0; i < 8192; i++)
				assert_int_equal(back[i], 0xee);
			free(memory);
			free(back);
			free(compact);
		}
	}
}

static void empty_views_copy_nothing(void **state)
{
	const int64_t dims[4] = {2, 0, 3, 8}, stride[4] = {0, 24, 8, 1};
	struct stage_view view = view4(4, dims, stride);

	(void)state;
	assert_int_equal(view.bytes, 0);
	stage_view_copy(&view, NULL, NULL, true);
}

static const struct stage_tensor *find(const struct stage *stage, uint32_t role)
{
	for (uint32_t i = 0; i < stage->n_tensors; i++) {
		if (stage->tensors[i].role == role)
			return &stage->tensors[i];
	}
	return NULL;
}

static void put(struct fmha_tensor *tensor, void *data)
{
	memset(tensor, 0, sizeof(*tensor));
	tensor->data = data;
}

static void directions_follow_the_operation(void **state)
{
	struct fmha_problem problem;
	struct stage stage;
	float data[1024];

	(void)state;
	fmha_problem_init(&problem);
	problem.batch = problem.nhead_q = problem.nhead_k = 1;
	problem.seqlen_q = problem.seqlen_k = 4;
	problem.hdim_q = problem.hdim_v = 8;
	problem.q.data = problem.k.data = problem.v.data = problem.o.data = data;
	problem.workspace.data = data;
	problem.lse.buffer = 7;
	assert_int_equal(stage_plan(&problem, 99, &stage, NULL), 0);
	assert_int_equal(stage.n_tensors, 4);
	assert_true(find(&stage, FMHA_T_Q)->copy_in && !find(&stage, FMHA_T_Q)->copy_out);
	assert_true(!find(&stage, FMHA_T_O)->copy_in && find(&stage, FMHA_T_O)->copy_out);
	assert_int_equal(problem.q.buffer, 99);
	assert_null(problem.q.data);
	assert_int_equal(problem.lse.buffer, 7);
	assert_false(fmha_tensor_present(&problem.workspace));

	/* Rows beyond a sequence's length keep what they held. */
	put(&problem.o, data);
	problem.seqlen_k_per_batch.buffer = 7;
	assert_int_equal(stage_plan(&problem, 99, &stage, NULL), 0);
	assert_true(find(&stage, FMHA_T_O)->copy_in && find(&stage, FMHA_T_O)->copy_out);

	/* Backward reads O; a cache that is appended to goes both ways. */
	problem.op = FMHA_BACKWARD;
	put(&problem.o, data);
	assert_int_equal(stage_plan(&problem, 99, &stage, NULL), 0);
	assert_true(find(&stage, FMHA_T_O)->copy_in && !find(&stage, FMHA_T_O)->copy_out);
	problem.op = FMHA_APPEND_KV;
	put(&problem.k, data);
	problem.k_new.buffer = 5;
	problem.seqlen_new = 1;
	assert_int_equal(stage_plan(&problem, 99, &stage, NULL), 0);
	assert_true(find(&stage, FMHA_T_K)->copy_in && find(&stage, FMHA_T_K)->copy_out);
}

static void decode_over(struct fmha_problem *problem, int32_t keys, float *data)
{
	fmha_problem_init(problem);
	problem->batch = problem->nhead_q = problem->nhead_k = 2;
	problem->seqlen_q = 1;
	problem->seqlen_k = keys;
	problem->hdim_q = problem->hdim_v = 4;
	problem->q.data = problem->k.data = problem->v.data = problem->o.data = data;
	problem->k.n_dims = 4;
	problem->k.extent[0] = problem->k.extent[2] = 2;
	problem->k.extent[1] = keys;
	problem->k.extent[3] = 4;
	problem->k.stride[0] = 8 * keys; /* batch, head, key */
	problem->k.stride[1] = 4;
	problem->k.stride[2] = 4 * keys;
	problem->k.stride[3] = 1;
}

/* Every number of keys up to the next step is one problem, whose number is a tensor of it. */
static void a_cache_that_grows_is_one_problem(void **state)
{
	static float data[2 * 128 * 2 * 4], arena[2 * 2 * 2 * 128 * 4 + 1024];
	struct fmha_problem first, problem;
	struct stage stage;

	(void)state;
	for (int i = 0; i < 2 * 128 * 2 * 4; i++)
		data[i] = (float)i;
	for (int32_t keys = 65; keys <= 129; keys++) {
		const struct stage_tensor *k, *lengths;

		decode_over(&problem, keys, data);
		assert_int_equal(stage_plan(&problem, 99, &stage, NULL), 0);
		assert_int_equal(problem_check(&problem, NULL), 0);
		if (keys == 129) {
			assert_int_equal(problem.seqlen_k, 192);
			break;
		}
		if (keys == 65)
			first = problem;
		assert_memory_equal(&problem, &first, sizeof(problem));
		assert_int_equal(problem.seqlen_k, 128);
		k = find(&stage, FMHA_T_K);
		lengths = find(&stage, FMHA_T_SEQLEN_K);
		assert_false(find(&stage, FMHA_T_O)->copy_in);
		memset(arena, 0xff, sizeof(arena));
		stage_in(&stage, arena);
		assert_int_equal(*(int32_t *)((char *)arena + lengths->offset), keys);
		for (int i = 0; i < 4; i++) { /* the heads, whose rows are those that there are */
			const float *head = arena + k->offset / 4 + (size_t)i * 128 * 4;

			assert_true(head[0] == (float)(i * keys * 4));
			assert_true(head[keys * 4 - 1] == (float)((i + 1) * keys * 4 - 1));
			assert_true(keys == 128 || head[keys * 4] != head[keys * 4]);
		}
	}
}

static void what_depends_on_the_number_of_keys_keeps_it(void **state)
{
	float data[4096];
	struct fmha_problem problem;
	struct stage stage;

	(void)state;
#define KEEPS(...)                                                                                 \
	do {                                                                                       \
		decode_over(&problem, 70, data);                                                   \
		__VA_ARGS__;                                                                       \
		assert_int_equal(stage_plan(&problem, 99, &stage, NULL), 0);                       \
		assert_int_equal(problem.seqlen_k, 70);                                            \
	} while (0)
	KEEPS(put(&problem.bias, data));
	KEEPS(put(&problem.alibi_slopes, data));
	KEEPS(put(&problem.seqlen_k_per_batch, data));
	KEEPS(problem.k.buffer = 3, problem.k.data = NULL);
	KEEPS(problem.seqlen_q = 17);
	KEEPS(problem.n_splits = 2);
	KEEPS(problem.split_size = 64);
	KEEPS(problem.op = FMHA_BACKWARD);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(dense_views_keep_their_order),
		cmocka_unit_test(gaps_and_broadcasts_are_left_out),
		cmocka_unit_test(copies_agree_with_the_definition),
		cmocka_unit_test(empty_views_copy_nothing),
		cmocka_unit_test(directions_follow_the_operation),
		cmocka_unit_test(a_cache_that_grows_is_one_problem),
		cmocka_unit_test(what_depends_on_the_number_of_keys_keeps_it),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
