/* SPDX-License-Identifier: MIT */
/*
 * driver.c: the C reference and the CPU kernels as a shared object, for tests/oracle/oracle_abi.py to
 * load. One call runs one kernel, all its phases and tasks, on this thread.
 */
#include <stdlib.h>

#include <kernels/cpu_kernels.h>
#include <kernels/reference.h>

#define EXPORT __attribute__((visibility("default")))

/* So that the Python view of abi.h is known to have the same layout. */
EXPORT size_t oracle_sizeof(int which);
EXPORT int oracle_best_level(void);
EXPORT int oracle_run(int level, int family, uint32_t dtype, const void *args);
EXPORT int oracle_forward(const struct abi_fwd_args *args, double *o, double *lse,
			  uint8_t *randval);
EXPORT int oracle_backward(const struct abi_bwd_args *args, double *dq, double *dk, double *dv,
			   double *dbias, double *dsink);
EXPORT int oracle_combine(const struct abi_combine_args *args, double *o, double *lse);
EXPORT int oracle_appendkv(const struct abi_appendkv_args *args);

size_t oracle_sizeof(int which)
{
	static const size_t sizes[] = {
		sizeof(struct abi_fwd_args),
		sizeof(struct abi_bwd_args),
		sizeof(struct abi_combine_args),
		sizeof(struct abi_appendkv_args),
	};

	return sizes[which];
}

int oracle_best_level(void)
{
	return cpu_level_detect();
}

static void *allocate(size_t bytes)
{
	return aligned_alloc(64, (bytes + 64) / 64 * 64);
}

int oracle_run(int level, int family, uint32_t dtype, const void *args)
{
	const struct cpu_kernel *kernel = cpu_kernel_find((enum cpu_level)level,
							  (enum abi_family)family, dtype, args);
	void *workspace, *scratch;

	if (!kernel)
		return -1;
	workspace = allocate(kernel->workspace_bytes(args, 1));
	scratch = allocate(kernel->scratch_bytes(args));
	for (int phase = 0; phase < kernel->n_phases; phase++)
		for (int64_t task = 0; task < kernel->n_tasks(args, phase, 1); task++)
			kernel->run(args, phase, task, 1, workspace, scratch);
	free(workspace);
	free(scratch);
	return 0;
}

int oracle_forward(const struct abi_fwd_args *args, double *o, double *lse, uint8_t *randval)
{
	return reference_forward(args, o, lse, randval);
}

int oracle_backward(const struct abi_bwd_args *args, double *dq, double *dk, double *dv,
		    double *dbias, double *dsink)
{
	return reference_backward(args, dq, dk, dv, dbias, dsink);
}

int oracle_combine(const struct abi_combine_args *args, double *o, double *lse)
{
	return reference_combine(args, o, lse);
}

int oracle_appendkv(const struct abi_appendkv_args *args)
{
	return reference_appendkv(args);
}
