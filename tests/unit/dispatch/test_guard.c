/* SPDX-License-Identifier: MIT */
/*
 * Random problems that the validator accepts, run with every tensor, workspace and scratch flush at
 * an inaccessible page, once at its end and once at its beginning. A fault is a finding: the whole
 * problem is printed, with the tensor and the offset nearest to the address.
 *
 *   test_dispatch_guard [FIRST_SEED [N]]
 *   FMHA_GUARD_PROBLEMS  accepted problems to run, instead of 50,000
 *   FMHA_GUARD_LEVEL     only this CPU level
 */
#include <signal.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "../share.h"
#include "bend.h"
#include "guard_memory.h"

#define DEFAULT_PROBLEMS 50000
#define MOST_BENDS       4

/* What a case may cost; the rest of what is accepted is planned, not run. */
#define MOST_FLOPS 3e7
#define MOST_TASKS 20000
#define MOST_BYTES ((uint64_t)32 << 20) /* of workspace */
#define MOST_WORDS (1 << 14)            /* of integer tensors */

static struct guard_memory memory;
static struct runner current;
static unsigned first_seed = 1;
static unsigned long n_problems;

struct counts {
	unsigned long accepted, planned, refused, ran, level[CPU_N_LEVELS];
};

/* ---- faults ---- */

static void say_where(const char *address)
{
	int i = guard_slot_of(&memory, address);
	const struct guard_slot *slot = &memory.slots[i < 0 ? 0 : i];

	if (i < 0)
		(void)fprintf(stderr, "fault at %p, near no tensor\n", (const void *)address);
	else
		(void)fprintf(stderr, "fault in %s, at byte %lld of %llu\n", guard_slot_name(i),
			      (long long)(address - slot->block), (unsigned long long)slot->bytes);
}

static void on_fault(int signal, siginfo_t *info, void *context)
{
	(void)signal;
	(void)context;
	say_where(info->si_addr);
	bend_print(&current, stderr);
	_exit(1);
}

static void catch_faults(void)
{
	struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};

	assert_int_equal(sigaction(SIGSEGV, &action, NULL), 0);
	assert_int_equal(sigaction(SIGBUS, &action, NULL), 0);
}

/* After a failed assertion: cmocka has jumped out of the case, which is still there. */
static int name_the_case(void **state)
{
	(void)state;
	if (current.first_seed)
		bend_print(&current, stderr);
	return 0;
}

/* ---- a case ---- */

static bool fits(const struct plan *plan)
{
	const struct fmha_problem *p = &plan->problem;

	for (uint32_t i = 0; i < plan->n_views; i++)
		if (plan->views[i].span_bytes > GUARD_SLOT_BYTES)
			return false;
	return plan->flops <= MOST_FLOPS && plan->workspace_bytes <= MOST_BYTES &&
	       p->batch <= MOST_WORDS && p->n_page_indices <= MOST_WORDS &&
	       (int64_t)p->max_blocks * p->batch <= MOST_WORDS;
}

static int pick_fill(struct runner *r)
{
	static const int fills[] = {0x3c, 0x3c, 0x3c, 0x00, 0xff, 0x7c};

	return fills[random_pick(r, sizeof(fills) / sizeof(fills[0]))];
}

static void place_tensors(struct runner *r, bool at_end)
{
	const struct plan *plan = &r->f.plan;

	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		void *at = guard_place(&memory, (int)view->role, view->span_bytes,
				       view->element_bytes, at_end, pick_fill(r));

		r->f.bindings[view->role] = (struct plan_binding){at, at, view->span_bytes};
	}
}

static void run_stages(struct runner *r, char *workspace, bool at_end)
{
	const struct plan *plan = &r->f.plan;

	if (plan->workspace_zero)
		memset(workspace + plan->layout.dq_acc, 0, plan->dq_acc_bytes);
	for (uint32_t i = 0; i < plan->n_stages; i++) {
		size_t bytes = cpu_runner_scratch(plan, i, &r->f.args[i]);
		void *scratch = guard_place(&memory, GUARD_SCRATCH, bytes, 64, at_end, 0xff);

		cpu_runner_stage(&r->cpu, plan, i, &r->f.args[i], workspace, scratch, &r->seed);
	}
}

static bool is_short(struct runner *r)
{
	int64_t n = 0;

	for (uint32_t i = 0; i < r->f.plan.n_stages; i++)
		n += cpu_runner_tasks(&r->cpu, &r->f.plan, i, &r->f.args[i]);
	return n <= MOST_TASKS;
}

/* Binds and runs the plan in one placement; false when the indices were refused. */
static bool run_placed(struct runner *r, bool at_end)
{
	const struct plan *plan = &r->f.plan;
	char *workspace;
	int e;

	place_tensors(r, at_end);
	workspace = guard_place(&memory, GUARD_PRIVATE, plan->workspace_bytes, PLAN_ALIGNMENT,
				at_end, 0xff);
	bend_indices(r);
	e = bind_plan(plan, r->f.bindings, workspace, workspace, r->f.args, &r->f.indices,
		      &r->f.err);
	if (e == 0 && is_short(r))
		run_stages(r, workspace, at_end);
	r->f.indices = plan_indices_free(r->f.indices);
	return e == 0;
}

static void run_case(struct runner *r, struct counts *counts)
{
	int e;

	bend_problem(r, MOST_BENDS);
	if (!bend_mend(r))
		return;
	counts->accepted++;
	e = fixture_build(&r->f);
	if (e == FMHA_EINTERNAL)
		fail_msg("%s: %s", r->f.err.field, r->f.err.msg);
	if (e < 0)
		return;
	counts->planned++;
	if (!fits(&r->f.plan))
		return;
	for (int at_end = 1; at_end >= 0; at_end--)
		if (run_placed(r, at_end))
			counts->ran++;
		else
			counts->refused++;
	counts->level[r->cpu.level]++;
}

static double now(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void report(const struct counts *counts, double seconds)
{
	print_message("%lu problems accepted in %.1f s, %lu planned, %lu runs, %lu refused for "
		      "their indices\n",
		      counts->accepted, seconds, counts->planned, counts->ran, counts->refused);
	for (int l = 0; l < CPU_N_LEVELS; l++)
		if (counts->level[l])
			print_message("  %s: %lu problems run\n", cpu_level_name((enum cpu_level)l),
				      counts->level[l]);
}

static void nothing_is_touched_outside(void **state)
{
	const char *only = getenv("FMHA_GUARD_LEVEL");
	enum cpu_level most = cpu_level_detect(), level = most;
	struct counts counts = {0};
	double start = now();

	(void)state;
	if (only && (cpu_level_from_name(only, &level) < 0 || level > most))
		skip();
	guard_init(&memory);
	catch_faults();
	for (unsigned seed = first_seed; counts.accepted < n_problems; seed++) {
		bend_begin(&current, seed, most);
		if (only) {
			current.cpu.level = level;
			current.f.decree.device = cpu_runner_device(&current.cpu);
		}
		run_case(&current, &counts);
	}
	current.first_seed = 0;
	report(&counts, now() - start);
	guard_deinit(&memory);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(nothing_is_touched_outside, name_the_case),
	};
	const char *problems = getenv("FMHA_GUARD_PROBLEMS");

	n_problems = problems ? strtoul(problems, NULL, 10) : share_of(DEFAULT_PROBLEMS);
	if (argc > 1) {
		first_seed = (unsigned)strtoul(argv[1], NULL, 10);
		n_problems = argc > 2 ? strtoul(argv[2], NULL, 10) : 1;
	}
	return cmocka_run_group_tests(tests, NULL, cpu_runner_free_registries);
}
