/* SPDX-License-Identifier: MIT */
/*
 * quotient.h: x / factor for codes of 8 bits, for a factor that many x have: by its reciprocal, and
 * once what is missing. On which side of a number between two codes the float next to x / factor
 * is, or whether it is that number, this says as division does: tried for every mantissa of a
 * factor. A plain function that C, whose tests compare it with division, and device C++ both read.
 *
 * What is missing, q * factor - x, is exact in one fused multiply-add, unless exponents run out:
 * factors are within bounds, x is cut where its quotient is the type's largest, and what is smaller
 * than any code may be off, but is as small.
 */
#ifndef FMHA_GPU_QUOTIENT_H
#define FMHA_GPU_QUOTIENT_H

#ifdef __cplusplus
#define QUOTIENT_FN DEV
#define QUOTIENT_FMA(x, y, z) multiply_add(x, y, z)
#define QUOTIENT_ABS(x)       magnitude_of(x)
#define QUOTIENT_LEAST(x, y)  least_or_nan(x, y)
#else
#include <math.h>
#define QUOTIENT_FN static inline
#define QUOTIENT_FMA(x, y, z) fmaf(x, y, z)
#define QUOTIENT_ABS(x)       fabsf(x)
#define QUOTIENT_LEAST(x, y)  ((x) > (y) ? (y) : (x))
#endif

/* A NaN is none. */
QUOTIENT_FN int quotient_has(float factor)
{
	const float most = 1152921504606846976.0f; /* 2^60 */

	return factor >= 1.0f / most && factor <= most;
}

/*
 * The magnitude of x / factor; a NaN stays one.
 * @inverse: 1 / factor, rounded to nearest
 * @end:     the type's largest number times the factor: what x is cut at
 */
QUOTIENT_FN float quotient_magnitude(float x, float factor, float inverse, float end)
{
	float a = QUOTIENT_LEAST(QUOTIENT_ABS(x), end), q = a * inverse;

	return QUOTIENT_FMA(-QUOTIENT_FMA(factor, q, -a), inverse, q);
}

#endif
