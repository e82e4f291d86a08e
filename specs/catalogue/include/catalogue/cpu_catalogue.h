/* SPDX-License-Identifier: MIT */
/* cpu_catalogue.h: which CPU kernels there are, as a table; nothing of the kernels themselves. */
#ifndef FMHA_CPU_CATALOGUE_H
#define FMHA_CPU_CATALOGUE_H

#include <specs/backend.h>

extern const struct spec_backend cpu_backend;

#endif
