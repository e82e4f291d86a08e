/* SPDX-License-Identifier: MIT */
#include <kernels/backends.h>

#include <kernels/cpu_catalogue.h>
#include <kernels/gpu_catalogue.h>

const struct spec_backend *const fmha_backends[] = {&cpu_backend, &gpu_backend, NULL};
