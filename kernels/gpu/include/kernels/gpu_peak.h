/* SPDX-License-Identifier: MIT */
/* gpu_peak.h: what the arithmetic units of an arch could do if nothing held them up. */
#ifndef FMHA_GPU_PEAK_H
#define FMHA_GPU_PEAK_H

#include <stdint.h>

/* Operations a clock of one CU or SM, dense; a multiply-add is two. */
struct gpu_peak {
	const char *arch;
	uint32_t f32;
	uint32_t f16; /* by the matrix units where there are any; bf16 is the same */
	uint32_t fp8;
};

/* NULL: nobody has looked it up. */
const struct gpu_peak *gpu_peak_find(const char *arch);

#endif
