/* SPDX-License-Identifier: MIT */
#include <catalogue/backends.h>

#include <catalogue/cpu_catalogue.h>
#include <catalogue/gpu_catalogue.h>

const struct spec_backend *const fmha_backends[] = {&cpu_backend, &gpu_backend, NULL};
