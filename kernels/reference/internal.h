/* SPDX-License-Identifier: MIT */
/* internal.h: what the reference's files share besides reference.h and view.h. */
#ifndef FMHA_REFERENCE_INTERNAL_H
#define FMHA_REFERENCE_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include <kernels/reference.h>
#include <kernels/view.h>

int32_t reference_dtype_bytes(uint32_t dtype);

/* @value rounded to @dtype and back. */
double reference_round(uint32_t dtype, double value);

#endif
