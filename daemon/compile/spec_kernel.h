/* SPDX-License-Identifier: MIT */
/* spec_kernel.h: from a kernel spec to what has to be compiled for it, without a problem. */
#ifndef FMHAD_COMPILE_SPEC_KERNEL_H
#define FMHAD_COMPILE_SPEC_KERNEL_H

#include <gpu_kernel.h> /* kernels/gpu */
#include <specs/catalog.h>

/*
 * The kernel that a plan would ask for, had it chosen @spec. Many specs share one code object: a
 * kernel is not specialised on LSE, say; ret_kernel->name tells.
 * Return: 0, or 1 for a spec that kernels/gpu does not implement.
 */
int spec_kernel(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		struct gpu_kernel *ret_kernel);

#endif
