/* SPDX-License-Identifier: MIT */
/*
 * Random problems, all the way: problem -> plan_build -> plan_bind -> CPU kernels -> comparison
 * with an oracle that reads the problem itself. Every byte that no tensor element owns is poisoned
 * with NaN, buffers are exactly as large as the views, and what a run should not write must still
 * be poison afterwards. `test_dispatch_random SEED [N]` repeats a case.
 */
#include "random_case.h"

#include <stdio.h>

#include <registry/registry.h>

#define DEFAULT_CASES 150

static void run_stage(struct runner *r, uint32_t i)
{
	size_t scratch_bytes = cpu_runner_scratch(&r->f.plan, i, &r->f.args[i]);
	void *scratch = aligned_alloc(64, scratch_bytes ? scratch_bytes : 64);

	memset(scratch, 0xff, scratch_bytes);
	cpu_runner_stage(&r->cpu, &r->f.plan, i, &r->f.args[i], r->f.workspace, scratch, &r->seed);
	free(scratch);
}

static bool is_written(const struct runner *r, int role)
{
	for (uint32_t i = 0; i < r->f.plan.n_views; i++)
		if (r->f.plan.views[i].role == (uint32_t)role)
			return r->f.plan.views[i].written;
	return false;
}

static void *copy_of(const struct plan_binding *binding)
{
	void *copy = malloc(binding->bytes + 1);

	memcpy(copy, binding->host, binding->bytes);
	return copy;
}

/* 0: ran and judged; 1: no kernel yet. */
static int run_case(struct runner *r)
{
	int e;

	random_problem(r);
	e = fixture_build(&r->f);
	if (e == FMHA_ENOKERNEL)
		return 1;
	assert_works(&r->f, e);
	fixture_allocate(&r->f);
	random_data(r);
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (is_written(r, role))
			r->before[role] = copy_of(&r->f.bindings[role]);
	assert_works(&r->f, fixture_bind(&r->f));
	if (r->f.workspace)
		memset((char *)r->f.workspace + r->f.plan.workspace_head_bytes, 0xff,
		       r->f.plan.workspace_bytes - r->f.plan.workspace_head_bytes);
	if (r->f.plan.workspace_zero)
		memset((char *)r->f.workspace + r->f.plan.layout.dq_acc, 0, r->f.plan.dq_acc_bytes);
	for (uint32_t i = 0; i < r->f.plan.n_stages; i++)
		run_stage(r, i);
	judge_run(r);
	return 0;
}

static const char *describe(const struct runner *r)
{
	static char text[512];
	const struct fmha_problem *p = &r->f.problem;

	(void)snprintf(text, sizeof(text),
		       "op %u mode %u %s batch %d heads %d/%d %d x %d hdim %d/%d mask %u (%d, %d, "
		       "%d) page %d layout %u new %d rope %u drop %g cap %g splits %d/%d level %s",
		       p->op, p->mode,
		       fmha_dtype_name(p->op == FMHA_MERGE_STATES ? p->o_parts.dtype : p->k.dtype),
		       p->batch, p->nhead_q, p->nhead_k, p->seqlen_q, p->seqlen_k, p->hdim_q,
		       p->hdim_v, p->mask, p->window_left, p->window_right, p->sink_tokens,
		       p->page_size, p->kv_layout, p->seqlen_new, p->rope, (double)p->dropout_p,
		       (double)p->logits_soft_cap, p->n_splits, p->split_size,
		       cpu_level_name(r->cpu.level));
	return text;
}

static struct runner current; /* the case under way */

/* After a test: cmocka has jumped out of the case that failed, which is still there. */
static int name_the_case(void **state)
{
	(void)state;
	if (current.first_seed)
		print_message("failed: seed %u: %s\n", current.first_seed, describe(&current));
	return 0;
}

static int run_seed(unsigned seed, uint32_t op)
{
	int e;

	memset(&current, 0, sizeof(current));
	current.first_seed = seed;
	current.seed = seed * 2654435761U + op;
	fixture_init(&current.f, op, FMHA_BATCH);
	current.cpu.n_threads = 1 + random_pick(&current, 4);
	current.cpu.level = (enum cpu_level)random_pick(&current, (int)cpu_level_detect() + 1);
	current.f.decree.device = cpu_runner_device(&current.cpu);
	e = run_case(&current);
	if (getenv("FMHA_RANDOM_VERBOSE"))
		print_message("%u: %s%s\n", seed, describe(&current), e ? ": no kernel" : "");
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		free(current.before[role]);
	fixture_deinit(&current.f);
	current.first_seed = 0;
	return e;
}

/* ---- names ---- */

static int found_one(void *owner, const struct kernel_spec *spec, const char *name,
		     const struct registry_info *info)
{
	(void)owner;
	(void)spec;
	(void)name;
	(void)info;
	return 1;
}

/* A kernel that no spec names would never be chosen. */
static void every_kernel_has_a_spec(void **state)
{
	static const char *const types[] = {
		[ABI_F32] = "fp32", [ABI_F16] = "fp16", [ABI_BF16] = "bf16",
		[ABI_E4M3] = "fp8", [ABI_E5M2] = "bf8", [ABI_I8] = "int8"};
	enum cpu_level level = cpu_level_detect();

	(void)state;
	for (int l = 0; l <= (int)level; l++) {
		size_t n;
		const struct cpu_kernel *const *kernels = cpu_kernels((enum cpu_level)l, &n);

		for (size_t i = 0; i < n; i++) {
			char filter[256];

			(void)snprintf(filter, sizeof(filter),
				       "gfx_arch == '%s' and family == '%s' and data_type == '%s' "
				       "and pipeline == '%s'",
				       cpu_level_name((enum cpu_level)l),
				       plan_family_name(kernels[i]->family),
				       types[kernels[i]->dtype], kernels[i]->pipeline);
			if (registry_each(cpu_runner_registry((enum cpu_level)l), filter, found_one,
					  NULL, NULL) != 1)
				fail_msg("no spec: %s", filter);
		}
	}
}

static unsigned first_seed = 1, n_cases = DEFAULT_CASES;

static void run_many(uint32_t op, unsigned n)
{
	unsigned missing = 0;

	for (unsigned i = 0; i < n; i++)
		missing += (unsigned)run_seed(first_seed + i, op);
	print_message("op %u: %u cases, %u without a kernel\n", op, n, missing);
}

static void forward(void **state)
{
	(void)state;
	run_many(FMHA_FORWARD, n_cases);
}

static void backward(void **state)
{
	(void)state;
	run_many(FMHA_BACKWARD, (n_cases + 1) / 2);
}

static void append(void **state)
{
	(void)state;
	run_many(FMHA_APPEND_KV, (n_cases + 1) / 2);
}

static void merge(void **state)
{
	(void)state;
	run_many(FMHA_MERGE_STATES, (n_cases + 1) / 2);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_kernel_has_a_spec),
		cmocka_unit_test_teardown(forward, name_the_case),
		cmocka_unit_test_teardown(backward, name_the_case),
		cmocka_unit_test_teardown(append, name_the_case),
		cmocka_unit_test_teardown(merge, name_the_case),
	};

	if (argc > 1) {
		first_seed = (unsigned)strtoul(argv[1], NULL, 10);
		n_cases = 1;
	}
	if (argc > 2)
		n_cases = (unsigned)strtoul(argv[2], NULL, 10);
	return cmocka_run_group_tests(tests, NULL, cpu_runner_free_registries);
}
