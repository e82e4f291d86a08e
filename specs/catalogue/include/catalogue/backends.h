/* SPDX-License-Identifier: MIT */
/* backends.h: what this build can run, for spec_catalog_load(): tables without their kernels. */
#ifndef FMHA_BACKENDS_H
#define FMHA_BACKENDS_H

#include <specs/backend.h>

/* NULL at the end. */
extern const struct spec_backend *const fmha_backends[];

#endif
