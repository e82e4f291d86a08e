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
 * The kernel of a spec of gpu_backend, two words of which the caller looks up.
 * @args: the family's struct: what a problem fixes besides its signature (a scale that is not
 *        positive, a bias gradient that is a sum) and what no kernel takes; NULL: nothing of that
 * Return: 0, or 1 for a spec that kernels/gpu does not have, or args that it does not take.
 */
int gpu_kernel_of_spec(const char *arch, const char *pipeline, const struct kernel_spec *spec,
		       const void *args, struct gpu_kernel *ret_kernel);

#endif
