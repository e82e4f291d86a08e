/* SPDX-License-Identifier: MIT */
#include "cpu_runner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <catalogue/backends.h>
#include <registry/registry.h>

#include "fixture.h"

/* As daemon/device/cpu.c: a kernel of exactly the level and pipeline that dispatch has chosen. */
const struct cpu_kernel *cpu_runner_kernel(const struct plan_stage *stage,
					   const union abi_args *args)
{
	enum cpu_level level;
	size_t n;
	const struct cpu_kernel *const *kernels;

	assert_int_equal(cpu_level_from_name(stage->arch, &level), 0);
	kernels = cpu_kernels(level, &n);
	for (size_t i = 0; i < n; i++)
		if (kernels[i]->family == stage->family && kernels[i]->dtype == stage->dtype &&
		    strcmp(kernels[i]->pipeline, stage->pipeline) == 0 &&
		    (!stage->has_spec || !kernels[i]->tile_m ||
		     kernels[i]->tile_m == stage->spec.tile.tile_m0) &&
		    kernels[i]->accepts(args))
			return kernels[i];
	return NULL;
}

static int find_kernel(void *owner, enum abi_family family, uint32_t dtype,
		       const union abi_args *args, struct plan_stage *stage, const char **ret_why)
{
	struct cpu_runner *runner = owner;
	const struct cpu_kernel *kernel;

	(void)ret_why;
	if (*stage->pipeline) {
		kernel = cpu_runner_kernel(stage, args);
	} else { /* what no spec describes */
		kernel = cpu_kernel_find(runner->level, family, dtype, args);
		if (kernel) {
			(void)snprintf(stage->pipeline, sizeof(stage->pipeline), "%s",
				       kernel->pipeline);
			(void)snprintf(stage->arch, sizeof(stage->arch), "%s",
				       cpu_level_name(kernel->level));
		}
	}
	if (!kernel)
		return 1;
	stage->workspace_bytes = kernel->workspace_bytes(args, runner->n_threads);
	return 0;
}

static struct spec_catalog *catalog;
static struct registry *registries[CPU_N_LEVELS];

struct registry *cpu_runner_registry(enum cpu_level level)
{
	struct registry_device device = {.name = "test"};
	struct fmha_error err;

	if (registries[level])
		return registries[level];
	if (!catalog)
		assert_int_equal(spec_catalog_own(fmha_backends, &catalog, &err), 0);
	for (int l = (int)level; l >= 0; l--)
		device.archs[device.n_archs++] = cpu_level_name((enum cpu_level)l);
	assert_int_equal(registry_new(catalog, &device, &registries[level], &err), 0);
	return registries[level];
}

int cpu_runner_free_registries(void **state)
{
	(void)state;
	for (int l = 0; l < CPU_N_LEVELS; l++)
		registries[l] = registry_free(registries[l]);
	catalog = spec_catalog_free(catalog);
	return 0;
}

struct plan_device cpu_runner_device(struct cpu_runner *runner)
{
	return (struct plan_device){
		.arch = cpu_level_name(runner->level),
		.registry = cpu_runner_registry(runner->level),
		.compute_units = (uint32_t)runner->n_threads * 4,
		.find = find_kernel,
		.owner = runner,
	};
}

size_t cpu_runner_scratch(const struct plan *plan, uint32_t stage, const union abi_args *args)
{
	return (cpu_runner_kernel(&plan->stages[stage], args)->scratch_bytes(args) + 63) / 64 * 64;
}

int64_t cpu_runner_tasks(const struct cpu_runner *runner, const struct plan *plan, uint32_t stage,
			 const union abi_args *args)
{
	const struct cpu_kernel *kernel = cpu_runner_kernel(&plan->stages[stage], args);
	int64_t n = 0;

	for (int phase = 0; phase < kernel->n_phases; phase++)
		n += kernel->n_tasks(args, phase, runner->n_threads);
	return n;
}

void cpu_runner_stage(const struct cpu_runner *runner, const struct plan *plan, uint32_t stage,
		      const union abi_args *args, void *workspace, void *scratch, unsigned *seed)
{
	const struct plan_stage *s = &plan->stages[stage];
	const struct cpu_kernel *kernel = cpu_runner_kernel(s, args);

	assert_non_null(kernel);
	if (kernel->workspace_bytes(args, runner->n_threads) > s->workspace_bytes)
		fail_msg("%s: workspace %zu, planned %llu", s->kernel,
			 kernel->workspace_bytes(args, runner->n_threads),
			 (unsigned long long)s->workspace_bytes);
	for (int phase = 0; phase < kernel->n_phases; phase++) {
		int64_t n = kernel->n_tasks(args, phase, runner->n_threads);
		bool backwards = rand_r(seed) % 2;

		for (int64_t t = 0; t < n; t++)
			kernel->run(args, phase, backwards ? n - 1 - t : t, runner->n_threads,
				    (char *)workspace + s->workspace_offset, scratch);
	}
}
