/* SPDX-License-Identifier: MIT */
/*
 * A plan that is run with other numbers of keys than it was made for: which numbers it says, that its
 * arguments are then those of a plan of that number, and that a kernel that is run with them finds what a
 * plain evaluation in double finds, with K and V flush at inaccessible pages.
 */
#include <math.h>

#include "fixture.h"

#include "cpu_runner.h"
#include "guard_memory.h"
#include "internal.h"

#define UNITS 132

/* One row over @keys, with axes in the order (batch, head, key, element): as caches are. */
static void decode(struct fixture *f, int32_t batch, int32_t keys)
{
	struct fmha_problem *p = &f->problem;

	fixture_init(f, FMHA_FORWARD, FMHA_BATCH);
	p->batch = batch;
	p->nhead_q = 4;
	p->nhead_k = 2;
	p->seqlen_q = 1;
	p->seqlen_k = keys;
	p->hdim_q = p->hdim_v = 64;
	for (uint32_t role = FMHA_T_Q; role <= FMHA_T_O; role++)
		fixture_add(f, role, FMHA_F32);
	for (uint32_t role = FMHA_T_K; role <= FMHA_T_V; role++) {
		int64_t *stride = p->tensor[role].stride;

		stride[0] = (int64_t)2 * keys * 64;
		stride[1] = 64;
		stride[2] = (int64_t)keys * 64;
		stride[3] = 1;
	}
	decree_init(&f->decree, UNITS);
}

static struct launch_keys keys_of(const struct fmha_problem *p)
{
	return (struct launch_keys){.seqlen_k = p->seqlen_k,
				    .k_stride = {p->k.stride[0], p->k.stride[2]},
				    .v_stride = {p->v.stride[0], p->v.stride[2]}};
}

static void expect_range(struct fixture *f, int32_t least, int32_t most)
{
	assert_works(f, fixture_build(f));
	assert_int_equal(f->plan.keys.least, least);
	assert_int_equal(f->plan.keys.most, most);
	fixture_deinit(f);
}

static void neighbours_share_a_plan(void **state)
{
	static const struct {
		int32_t batch, keys, least, most;
	} cases[] = {
		/* A unit for each of 64 batch entries and 2 heads: nothing is split. */
		{64, 2, 2, 64},        {64, 64, 2, 64},        {64, 65, 65, 128},
		{64, 1024, 897, 1024}, {64, 1025, 1025, 1280}, {64, 1280, 1025, 1280},
	};
	struct fixture f;

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		decode(&f, cases[i].batch, cases[i].keys);
		f.problem.nhead_q = 2;
		expect_range(&f, cases[i].least, cases[i].most);
	}
	/* As many whole steps of 64 keys as the splits have. */
	for (int32_t keys = 1000; keys < 1200; keys++) {
		int32_t covered;

		decode(&f, 1, keys);
		f.decree.device.lds_bytes = 200000;
		assert_works(&f, fixture_build(&f));
		covered = f.plan.n_splits * f.plan.split_size;
		assert_true(f.plan.n_splits > 1 && f.plan.split_size % 64 == 0);
		assert_int_equal(f.plan.keys.most, covered);
		assert_int_equal(f.plan.keys.least, covered - f.plan.split_size + 1);
		assert_true(f.plan.keys.least <= keys && keys <= f.plan.keys.most);
		fixture_deinit(&f);
	}
}

static void a_cache_that_grows_by_64_takes_few_plans(void **state)
{
	struct fixture f;

	(void)state;
	for (int32_t first = 2; first < 3000; first += 37) {
		int32_t most = 0, n_plans = 0;

		for (int32_t keys = first; keys < first + 64; keys++) {
			if (keys <= most)
				continue;
			decode(&f, 1 + first % 3 * 20, keys);
			assert_works(&f, fixture_build(&f));
			most = f.plan.keys.most;
			n_plans++;
			fixture_deinit(&f);
		}
		if (n_plans > 2)
			fail_msg("%d plans from %d keys on", n_plans, first);
	}
}

/* What a plan has of each length that it is for must not be lost when another one is run. */
static void what_depends_on_the_length_has_one(void **state)
{
	struct fixture f;

	(void)state;
#define ONE_LENGTH(...)                                                                            \
	do {                                                                                       \
		decode(&f, 2, 1000);                                                               \
		__VA_ARGS__;                                                                       \
		expect_range(&f, 0, 0);                                                            \
	} while (0)
	ONE_LENGTH(fixture_add(&f, FMHA_T_BIAS, FMHA_F32));
	ONE_LENGTH(fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32));
	ONE_LENGTH(fixture_add(&f, FMHA_T_LEFTPAD_K, FMHA_I32));
	ONE_LENGTH(f.problem.deterministic = 1);
	ONE_LENGTH(f.problem.n_splits = 4);
	ONE_LENGTH(f.problem.split_size = 128);
	ONE_LENGTH(f.problem.seqlen_q = 17);
	ONE_LENGTH(f.problem.k.stride[2] -= 2);                     /* heads overlap, and */
	ONE_LENGTH(f.problem.v.stride[0] = 0);                      /* all share one cache */
	ONE_LENGTH(f.problem.seqlen_q = 1, f.problem.seqlen_k = 1); /* a step that none takes */
	ONE_LENGTH(f.problem.mask = FMHA_MASK_BOTTOM_RIGHT, f.problem.window_right = 0,
		   f.problem.seqlen_k = f.problem.seqlen_q = 8);
}

/* Made for one length and run with another: the arguments of a plan of that one. */
static void arguments_are_those_of_the_other_plan(void **state)
{
	struct fixture f;
	int n_compared = 0;

	(void)state;
	for (int32_t keys = 900; keys < 1500; keys += 7) {
		struct plan plan;

		decode(&f, 2, keys);
		assert_works(&f, fixture_build(&f));
		plan = f.plan;
		fixture_deinit(&f);
		for (int32_t other = plan.keys.least; other <= plan.keys.most; other += 13) {
			struct launch_keys of_other;

			decode(&f, 2, other);
			of_other = keys_of(&f.problem);
			assert_works(&f, fixture_build(&f));
			for (uint32_t i = 0;
			     f.plan.n_splits == plan.n_splits &&
			     f.plan.split_size == plan.split_size && i < plan.n_stages;
			     i++) {
				union abi_args args = plan.stages[i].launch.args;

				launch_set_keys(&plan.stages[i].launch, &of_other, &args);
				assert_memory_equal(&args, &f.plan.stages[i].launch.args,
						    sizeof(args));
				n_compared++;
			}
			fixture_deinit(&f);
		}
	}
	assert_true(n_compared > 200);
}

/* ---- runs ---- */

static float number(uint32_t i)
{
	return (float)((i * 2654435761u) >> 16) / 32768.0f - 1.0f;
}

static double expected(const struct fixture *f, const struct launch_keys *keys, int b, int h, int d)
{
	const float *q = (const float *)f->bindings[FMHA_T_Q].host + ((size_t)b * 4 + h) * 64;
	const float *k = f->bindings[FMHA_T_K].host, *v = f->bindings[FMHA_T_V].host;
	double sum = 0, weighted = 0;

	k += b * keys->k_stride[0] + h / 2 * keys->k_stride[1];
	v += b * keys->v_stride[0] + h / 2 * keys->v_stride[1];
	for (int j = 0; j < keys->seqlen_k; j++) {
		double score = 0, weight;

		for (int i = 0; i < 64; i++)
			score += (double)q[i] * k[j * 64 + i];
		weight = exp(score / 8);
		sum += weight;
		weighted += weight * v[j * 64 + d];
	}
	return weighted / sum;
}

static void place_caches(struct fixture *f, struct guard_memory *memory, int32_t keys, bool at_end)
{
	for (uint32_t role = FMHA_T_K; role <= FMHA_T_V; role++) {
		uint64_t n = (uint64_t)f->problem.batch * 2 * (uint64_t)keys * 64;
		float *at = guard_place(memory, (int)role, n * sizeof(float), sizeof(float), at_end,
					0);

		for (uint32_t i = 0; i < n; i++)
			at[i] = number(i * 2 + role);
		f->bindings[role] = (struct plan_binding){at, at, n * sizeof(float)};
	}
}

static void run_with(struct fixture *f, const struct cpu_runner *runner, void *workspace,
		     const struct launch_keys *keys)
{
	struct launch_bases bases = {.at = {[LAUNCH_WORKSPACE] = (uintptr_t)workspace}};
	unsigned seed = (unsigned)keys->seqlen_k;

	for (uint32_t role = FMHA_T_Q; role <= FMHA_T_O; role++)
		bases.at[role] = (uintptr_t)f->bindings[role].host;
	for (uint32_t i = 0; i < f->plan.n_stages; i++) {
		union abi_args args;
		void *scratch;

		launch_bind(&f->plan.stages[i].launch, &bases, &args);
		launch_set_keys(&f->plan.stages[i].launch, keys, &args);
		scratch = aligned_alloc(64, cpu_runner_scratch(&f->plan, i, &args) + 64);
		cpu_runner_stage(runner, &f->plan, i, &args, workspace, scratch, &seed);
		free(scratch);
	}
}

static void results_are_those_of_the_length(void **state)
{
	static const int32_t made_for[] = {2, 63, 90, 300, 1000};
	struct cpu_runner runner = {.level = CPU_X86_64_V3, .n_threads = 2};
	struct guard_memory memory;
	int n_split = 0;

	(void)state;
	guard_init(&memory);
	for (size_t n = 0; n < sizeof(made_for) / sizeof(made_for[0]); n++) {
		struct plan_device device = cpu_runner_device(&runner);
		struct fixture f;
		void *workspace;
		float *q;

		decode(&f, 2, made_for[n]);
		assert_works(&f, plan_build(&f.problem, NULL, &device, &f.plan, &f.err));
		assert_true(f.plan.keys.most >= made_for[n]);
		n_split += f.plan.n_splits > 1;
		fixture_allocate(&f);
		for (uint32_t role = FMHA_T_K; role <= FMHA_T_V; role++)
			free(f.bindings[role].host);
		q = f.bindings[FMHA_T_Q].host;
		for (uint32_t i = 0; i < 2 * 4 * 64; i++)
			q[i] = number(i * 7 + 1);
		workspace = aligned_alloc(PLAN_ALIGNMENT, f.plan.workspace_bytes + 4096);
		for (int step = 0; step < 5; step++) {
			int32_t span = f.plan.keys.most - f.plan.keys.least;
			int32_t keys = f.plan.keys.least + span * step / 4;
			struct launch_keys other = {.seqlen_k = keys,
						    .k_stride = {128ll * keys, 64ll * keys},
						    .v_stride = {128ll * keys, 64ll * keys}};
			const float *o = f.bindings[FMHA_T_O].host;

			place_caches(&f, &memory, keys, step % 2 == 0);
			memset(f.bindings[FMHA_T_O].host, 0xff, 2 * 4 * 64 * sizeof(float));
			run_with(&f, &runner, workspace, &other);
			for (int i = 0; i < 2 * 4 * 64; i += 5) {
				double want = expected(&f, &other, i / 256, i / 64 % 4, i % 64);

				if (!(fabs(o[i] - want) < 2e-6))
					fail_msg(
						"%d keys by a plan of %d: element %d is %g, not %g",
						keys, made_for[n], i, o[i], want);
			}
		}
		free(workspace);
		for (uint32_t role = FMHA_T_K; role <= FMHA_T_V; role++)
			f.bindings[role] = (struct plan_binding){0};
		fixture_deinit(&f);
	}
	assert_true(n_split > 0);
	guard_deinit(&memory);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(neighbours_share_a_plan),
		cmocka_unit_test(a_cache_that_grows_by_64_takes_few_plans),
		cmocka_unit_test(what_depends_on_the_length_has_one),
		cmocka_unit_test(arguments_are_those_of_the_other_plan),
		cmocka_unit_test(results_are_those_of_the_length),
	};

	return cmocka_run_group_tests(tests, NULL, cpu_runner_free_registries);
}
