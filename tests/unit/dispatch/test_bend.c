/* SPDX-License-Identifier: MIT */
/*
 * Sound problems bent field by field, through problem_check, plan_build, plan_bind and the run,
 * with neighbours on both sides of every tensor. Whatever is refused names a field. Whatever runs
 *
 *   - changes no byte that no element of an output owns: not between tensors, not in the gaps that
 *     strides leave, not in an input;
 *   - gives the same results whatever bytes lie there: nothing of a neighbour is ever seen.
 *
 * With AddressSanitizer each tensor is an allocation of its own, and reads are caught at once.
 *
 *   test_dispatch_bend [FIRST_SEED [N]]
 *   FMHA_BEND_SECONDS  how long, instead of 30 seconds
 *   FMHA_BEND_SEED     the first seed
 */
#include <stdio.h>
#include <time.h>

#include "bend.h"

#define DEFAULT_SECONDS 30
#define MOST_BENDS      6
#define MOST_FLOPS      2e6
#define MOST_TASKS      2000
#define MOST_BYTES      ((uint64_t)1 << 20) /* of a tensor or a workspace */

#ifdef __SANITIZE_ADDRESS__
static const uint64_t neighbour = 0; /* the sanitizer has its own */
#else
static const uint64_t neighbour = PLAN_ALIGNMENT;
#endif

static unsigned first_seed = 1, n_seeds;
static double seconds = DEFAULT_SECONDS;

static struct counts {
	unsigned long bent, refused, unplanned, unbound, ran;
} counts;

/* ---- memory ---- */

/* A tensor or a workspace between its neighbours. */
struct block {
	uint8_t *memory; /* neighbour, tensor, neighbour */
	uint64_t bytes;  /* of the tensor */
	uint8_t *before; /* as memory was before the run */
	uint8_t *owned;  /* a byte a byte of the tensor: is it part of an element? */
};

enum { BLOCK_WORKSPACE = FMHA_N_TENSORS, BLOCK_SCRATCH, N_BLOCKS };

struct memory {
	struct block blocks[N_BLOCKS];
};

static struct runner current;
static struct memory first, second; /* the same case among different neighbours */

static uint8_t *tensor_of(const struct block *block)
{
	return block->memory + neighbour;
}

static uint64_t all_of(const struct block *block)
{
	return block->bytes + 2 * neighbour;
}

static void block_new(struct block *block, uint64_t bytes, int background)
{
	void *memory = NULL;

	block->bytes = bytes;
	assert_int_equal(posix_memalign(&memory, PLAN_ALIGNMENT, all_of(block)), 0);
	block->memory = memory;
	if (all_of(block) > 0)
		memset(memory, background, all_of(block));
}

static void memory_free(struct memory *memory)
{
	for (int i = 0; i < N_BLOCKS; i++) {
		free(memory->blocks[i].memory);
		free(memory->blocks[i].before);
		free(memory->blocks[i].owned);
	}
	memset(memory, 0, sizeof(*memory));
}

static void mark_elements(const struct plan_view *view, int axis, uint8_t *owned)
{
	if (axis >= view->n_axes || axis >= 5) {
		memset(owned, 1, view->element_bytes);
		return;
	}
	for (int64_t i = 0; i < view->axes[axis].extent; i++)
		mark_elements(view, axis + 1, owned + i * view->axes[axis].stride);
}

/* The elements of @view get @like's values, or made-up ones. */
static void fill_elements(struct runner *r, struct block *block, const struct block *like)
{
	int kind = random_pick(r, 8);

	for (uint64_t i = 0; i < block->bytes; i++) {
		if (!block->owned[i])
			continue;
		if (like)
			tensor_of(block)[i] = like->before[neighbour + i];
		else
			tensor_of(block)[i] = kind == 0   ? (uint8_t)random_pick(r, 256)
					      : kind == 1 ? 0xff
							  : 0x3c - (uint8_t)random_pick(r, 2);
	}
}

static void place_tensor(struct runner *r, struct memory *memory, const struct plan_view *view,
			 int background, const struct memory *like)
{
	struct block *block = &memory->blocks[view->role];

	block_new(block, view->span_bytes, background);
	block->owned = calloc(1, view->span_bytes + 1);
	if (view->span_bytes > 0)
		mark_elements(view, 0, block->owned);
	fill_elements(r, block, like ? &like->blocks[view->role] : NULL);
	r->f.bindings[view->role] = (struct plan_binding){tensor_of(block), tensor_of(block),
							  view->span_bytes};
}

/* Everything but the scratch, which each stage has its own of. */
static void place_all(struct runner *r, struct memory *memory, int background,
		      const struct memory *like)
{
	const struct plan *plan = &r->f.plan;

	for (uint32_t i = 0; i < plan->n_views; i++)
		place_tensor(r, memory, &plan->views[i], background, like);
	block_new(&memory->blocks[BLOCK_WORKSPACE], plan->workspace_bytes, background);
	if (!like)
		bend_indices(r);
	for (uint32_t i = 0; i < plan->n_views; i++) {
		struct block *block = &memory->blocks[plan->views[i].role];

		block->before = malloc(all_of(block) + 1);
		memcpy(block->before, block->memory, all_of(block));
	}
}

/* ---- verdicts ---- */

static void judge_block(const char *name, const struct block *block, bool written)
{
	for (uint64_t i = 0; i < all_of(block); i++) {
		bool inside = i >= neighbour && i < neighbour + block->bytes;

		if (block->memory[i] != block->before[i] &&
		    !(written && inside && block->owned[i - neighbour]))
			fail_msg("%s: byte %lld of %llu belongs to no result, but changed", name,
				 (long long)(i - neighbour), (unsigned long long)block->bytes);
	}
}

/* Workspaces may change, their neighbours may not. */
static void judge_private(const char *name, const struct block *block, int background)
{
	for (uint64_t i = 0; i < neighbour; i++)
		if (block->memory[i] != background ||
		    block->memory[neighbour + block->bytes + i] != background)
			fail_msg("%s of %llu bytes: what lies beside it changed", name,
				 (unsigned long long)block->bytes);
}

static void judge_memory(const struct plan *plan, const struct memory *memory, int background)
{
	for (uint32_t i = 0; i < plan->n_views; i++)
		judge_block(proto_roles[plan->views[i].role].name,
			    &memory->blocks[plan->views[i].role], plan->views[i].written);
	judge_private("workspace", &memory->blocks[BLOCK_WORKSPACE], background);
}

static void judge_same_results(const struct plan *plan)
{
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct block *a = &first.blocks[plan->views[i].role];
		const struct block *b = &second.blocks[plan->views[i].role];

		for (uint64_t k = 0; plan->views[i].written && k < a->bytes; k++)
			if (a->owned[k] && tensor_of(a)[k] != tensor_of(b)[k])
				fail_msg("%s: byte %llu depends on what lies beside the tensors",
					 proto_roles[plan->views[i].role].name,
					 (unsigned long long)k);
	}
}

/* ---- a case ---- */

/* Overlapping elements of an input can be many in few bytes. */
static bool has_few_elements(const struct plan_view *view)
{
	double n = view->element_bytes;

	for (int i = 0; i < view->n_axes; i++)
		n *= (double)view->axes[i].extent;
	return n <= (double)MOST_BYTES;
}

static bool is_small(struct runner *r)
{
	const struct plan *plan = &r->f.plan;

	for (uint32_t i = 0; i < plan->n_views; i++)
		if (plan->views[i].span_bytes > MOST_BYTES || !has_few_elements(&plan->views[i]))
			return false;
	return plan->flops <= MOST_FLOPS && plan->workspace_bytes <= MOST_BYTES &&
	       plan_index_entries(plan) <= MOST_TASKS && plan->problem.batch <= MOST_TASKS &&
	       plan->problem.max_blocks <= MOST_TASKS;
}

static bool is_short(struct runner *r)
{
	int64_t n = 0;

	for (uint32_t i = 0; i < r->f.plan.n_stages; i++)
		n += cpu_runner_tasks(&r->cpu, &r->f.plan, i, &r->f.args[i]);
	return n <= MOST_TASKS;
}

static void run_stages(struct runner *r, struct memory *memory, int background)
{
	const struct plan *plan = &r->f.plan;
	uint8_t *workspace = tensor_of(&memory->blocks[BLOCK_WORKSPACE]);

	if (plan->workspace_zero)
		memset(workspace + plan->layout.dq_acc, 0, plan->dq_acc_bytes);
	for (uint32_t i = 0; i < plan->n_stages; i++) {
		struct block *scratch = &memory->blocks[BLOCK_SCRATCH];

		block_new(scratch, cpu_runner_scratch(plan, i, &r->f.args[i]), background);
		cpu_runner_stage(&r->cpu, plan, i, &r->f.args[i], workspace, tensor_of(scratch),
				 &r->seed);
		judge_private("scratch", scratch, background);
		free(scratch->memory);
		*scratch = (struct block){0};
	}
}

/* Binds and runs; false when it was refused or would take too long. */
static bool run_among(struct runner *r, struct memory *memory, int background,
		      const struct memory *like)
{
	const struct plan *plan = &r->f.plan;
	void *workspace;
	bool runs;
	int e;

	place_all(r, memory, background, like);
	workspace = tensor_of(&memory->blocks[BLOCK_WORKSPACE]);
	e = bind_plan(plan, r->f.bindings, workspace, workspace, r->f.args, &r->f.indices,
		      &r->f.err);
	if (e < 0)
		assert_true(e != FMHA_EINTERNAL && r->f.err.field[0] && r->f.err.msg[0]);
	runs = e == 0 && is_short(r);
	if (runs)
		run_stages(r, memory, background);
	r->f.indices = plan_indices_free(r->f.indices);
	judge_memory(plan, memory, background);
	return runs;
}

static void run_case(struct runner *r)
{
	int e;

	bend_problem(r, MOST_BENDS);
	if (random_chance(r, 50))
		(void)bend_mend(r);
	counts.bent++;
	r->f.err = (struct fmha_error){0};
	e = problem_check(&r->f.problem, &r->f.err);
	counts.refused += e < 0;
	if (e == 0) {
		e = fixture_build(&r->f);
		counts.unplanned += e < 0;
	}
	if (e < 0) {
		assert_true(e == FMHA_EINVAL || e == FMHA_ENOTSUP || e == FMHA_ENOKERNEL);
		assert_true(r->f.err.msg[0] && (e == FMHA_ENOKERNEL || r->f.err.field[0]));
		return;
	}
	if (!is_small(r))
		return;
	if (!run_among(r, &first, 0xa5, NULL)) {
		counts.unbound++;
		return;
	}
	assert_true(run_among(r, &second, 0xff, &first));
	judge_same_results(&r->f.plan);
	counts.ran++;
}

/* After a failed assertion: cmocka has jumped out of the case, which is still there. */
static int name_the_case(void **state)
{
	(void)state;
	if (current.first_seed)
		bend_print(&current, stderr);
	memory_free(&first);
	memory_free(&second);
	return 0;
}

static double now(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void neighbours_are_neither_seen_nor_changed(void **state)
{
	double start = now();

	(void)state;
	for (unsigned i = 0; n_seeds ? i < n_seeds : now() - start < seconds; i++) {
		bend_begin(&current, first_seed + i, cpu_level_detect());
		run_case(&current);
		memory_free(&first);
		memory_free(&second);
	}
	current.first_seed = 0;
	print_message("%lu problems bent: %lu refused, %lu not planned, %lu not bound, %lu run\n",
		      counts.bent, counts.refused, counts.unplanned, counts.unbound, counts.ran);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(neighbours_are_neither_seen_nor_changed, name_the_case),
	};
	const char *time = getenv("FMHA_BEND_SECONDS"), *seed = getenv("FMHA_BEND_SEED");

	if (time)
		seconds = strtod(time, NULL);
	if (seed)
		first_seed = (unsigned)strtoul(seed, NULL, 10);
	if (argc > 1) {
		first_seed = (unsigned)strtoul(argv[1], NULL, 10);
		n_seeds = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 1;
	}
	return cmocka_run_group_tests(tests, NULL, cpu_runner_free_registries);
}
