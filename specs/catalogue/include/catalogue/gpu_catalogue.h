/* SPDX-License-Identifier: MIT */
/*
 * gpu_catalogue.h: which GPU kernels there are: the one table of their tiles, and the one way from a
 * kernel spec to the code that it stands for.
 */
#ifndef FMHA_GPU_CATALOGUE_H
#define FMHA_GPU_CATALOGUE_H

#include <kernels/gpu_kernel.h>
#include <specs/backend.h>

extern const struct spec_backend gpu_backend;

/*
 * The kernel of a spec of gpu_backend, two words of which the caller looks up, that has @traits: of a name
 * alone they are what spec_traits() says; a problem's tell its variants apart, too.
 * Return: NULL, or for a spec that kernels/gpu does not have why, as gpu_kernel_make() says it.
 */
const char *gpu_kernel_of_spec(const char *arch, const char *pipeline,
			       const struct kernel_spec *spec, const struct traits *traits,
			       struct gpu_kernel *ret_kernel);

#endif
