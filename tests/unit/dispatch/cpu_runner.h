/* SPDX-License-Identifier: MIT */
/* cpu_runner.h: plans for the CPU levels of this machine, run task by task in one thread. */
#ifndef TESTS_DISPATCH_CPU_RUNNER_H
#define TESTS_DISPATCH_CPU_RUNNER_H

#include <dispatch/plan.h>
#include <kernels/cpu_kernels.h>

/* What the kernels are told; all of it runs in the caller's thread. */
struct cpu_runner {
	enum cpu_level level;
	int n_threads;
};

/* The registry of a machine whose best level is @level; made once, not from several threads. */
struct registry *cpu_runner_registry(enum cpu_level level);
/* A group teardown. */
int cpu_runner_free_registries(void **state);

/* A device with that registry; @runner is kept as long as it is used. */
struct plan_device cpu_runner_device(struct cpu_runner *runner);

/* The kernel that dispatch has chosen for a stage, or NULL. */
const struct cpu_kernel *cpu_runner_kernel(const struct plan_stage *stage,
					   const union abi_args *args);

/* Bytes of scratch, a multiple of 64. */
size_t cpu_runner_scratch(const struct plan *plan, uint32_t stage, const union abi_args *args);
/* Tasks of all phases. */
int64_t cpu_runner_tasks(const struct cpu_runner *runner, const struct plan *plan, uint32_t stage,
			 const union abi_args *args);

/* Runs a stage, the tasks of a phase forwards or backwards as @seed decides. */
void cpu_runner_stage(const struct cpu_runner *runner, const struct plan *plan, uint32_t stage,
		      const union abi_args *args, void *workspace, void *scratch, unsigned *seed);

#endif
