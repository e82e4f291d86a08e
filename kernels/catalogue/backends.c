/* SPDX-License-Identifier: MIT */
#include "backends.h"

#include "../cpu/cpu_catalogue.h"
#include <gpu_catalogue.h>

const struct spec_backend *const fmha_backends[] = {&cpu_backend, &gpu_backend, NULL};
