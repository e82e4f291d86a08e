/* SPDX-License-Identifier: MIT */
/*
 * vec.h: the vector vocabulary of the CPU kernels. One float vector type, as wide as the level's
 * registers, and the few operations that gcc's vector extensions do not spell: the algorithms above
 * are the same text on every level.
 *
 *   vf   LANES floats     vi   LANES int32     vu   LANES uint32, for sums that may wrap
 *
 * + - * / work on both; with -ffp-contract=fast a * b + c is one fused multiply-add where the level
 * has it.
 */
#ifndef FMHA_CPU_VEC_H
#define FMHA_CPU_VEC_H

#include <stdint.h>
#include <string.h>

#include "level.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
/* may_alias and element alignment: what loads and stores go through. */
typedef float vf_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Element j is x[index[j]]. */
static inline vf vf_permute(vf x, vi index)
{
#ifdef __clang__ /* shuffles by constants only */
	vf y;

	for (int j = 0; j < LANES; j++)
		y[j] = x[index[j]];
	return y;
#else
	return __builtin_shuffle(x, index);
#endif
}

/*
 * Subnormal numbers count as zero while a kernel runs: one of them costs some hundred cycles, and
 * probabilities far from the maximum are made of them.
 */
static inline uint32_t subnormals_off(void)
{
#ifdef __SSE2__
	uint32_t mode = _mm_getcsr();

	_mm_setcsr(mode | 0x8040); /* flush to zero, denormals are zero */
	return mode;
#else
	return 0;
#endif
}

/* @mode: what subnormals_off() returned. */
static inline void subnormals_restore(uint32_t mode)
{
#ifdef __SSE2__
	_mm_setcsr(mode);
#else
	(void)mode;
#endif
}

static inline vf vf_load(const float *p)
{
	return *(const vf_memory *)p;
}

static inline void vf_store(float *p, vf x)
{
	*(vf_memory *)p = x;
}

static inline vf vf_set1(float x)
{
	return x - (vf){0};
}

static inline vi vi_load(const void *p)
{
	return *(const vi_memory *)p;
}

static inline void vi_store(void *p, vi x)
{
	*(vi_memory *)p = x;
}

/* 0, 1, 2, ... */
static inline vf vf_iota(void)
{
	vf r;

	for (int i = 0; i < LANES; i++)
		r[i] = (float)i;
	return r;
}

static inline vf vf_abs(vf x)
{
	return (vf)((vi)x & 0x7fffffff);
}

/* The larger; when either is NaN, @b. */
static inline vf vf_max(vf a, vf b)
{
#if defined(__AVX512F__)
	return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
	return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
	return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
	vi greater = a > b;

	return (vf)((greater & (vi)a) | (~greater & (vi)b));
#endif
}

static inline vf vf_min(vf a, vf b)
{
#if defined(__AVX512F__)
	return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
	return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
	return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
	vi less = a < b;

	return (vf)((less & (vi)a) | (~less & (vi)b));
#endif
}

/* 1 / x within two units in the last place, for x neither 0 nor subnormal nor infinite. */
static inline vf vf_reciprocal(vf x)
{
#if defined(__AVX512F__)
	/* Division takes as long as a dozen multiplications: an estimate of 14 bits and one step.
	 */
	vf estimate = (vf)_mm512_rcp14_ps((__m512)x);

	return estimate + estimate * (1.0f - x * estimate);
#else
	return 1.0f / x;
#endif
}

static inline float vf_reduce_add(vf x)
{
#if defined(__AVX512F__)
	return _mm512_reduce_add_ps((__m512)x);
#else
	float sum = 0;

	for (int i = 0; i < LANES; i++)
		sum += x[i];
	return sum;
#endif
}

/* The largest element that is not NaN; -inf when there is none. */
static inline float vf_reduce_max(vf x)
{
#if defined(__AVX512F__)
	return _mm512_reduce_max_ps((__m512)x);
#else
	float max = x[0];

	for (int i = 1; i < LANES; i++)
		max = x[i] > max ? x[i] : max;
	return max;
#endif
}

/*
 * 2^x for x <= 127, error below 2e-7 of the value. -inf and everything below -127 give 0 exactly,
 * NaN gives NaN. 2^x = 2^n 2^f with a polynomial for 2^f (minimax for the relative error).
 */
static inline vf vf_exp2(vf x)
{
#if defined(__AVX512F__)
	/* vreduce gives f = x - floor(x), vscalef multiplies by 2^floor(x): f is in [0, 1). */
	vf f = (vf)_mm512_reduce_ps((__m512)x, 0x09);
	vf p = f * 1.8775767e-3f + 8.9893401e-3f;

	p = p * f + 5.5826318e-2f;
	p = p * f + 2.4015362e-1f;
	p = p * f + 6.9315307e-1f;
	p = p * f + 9.9999993e-1f;
	return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
	/* Adding 1.5 * 2^23 leaves the nearest integer n in the low mantissa bits: f is in [-.5,
	 * .5]. n = -127 makes the factor 0. */
	const vf magic = vf_set1(12582912.0f);
	vf clamped = vf_max(vf_set1(-127.0f), x);
	vf shifted = clamped + magic;
	vf f = clamped - (shifted - magic);
	vf p = f * 1.3264727e-3f + 9.6715126e-3f;

	p = p * f + 5.5507337e-2f;
	p = p * f + 2.4022242e-1f;
	p = p * f + 6.9314698e-1f;
	p = p * f + 1.0f;
	/* Multiplied, not added to the exponent: whatever bits a NaN has, it stays one. */
	return p * (vf)(((vu)shifted << 23) + 0x3f800000);
#endif
}

/*
 * vf_exp2() of @n vectors, at most four. Their chains are written step by step, side by side, and
 * VF_STEP keeps them so: the processor looks ahead over a limited number of waiting instructions,
 * which one chain after the other would fill.
 */
#if defined(__AVX512F__)
#define VF_STEP(x) __asm__("" : "+v"(x))

static inline __attribute__((always_inline)) void vf_exp2_some(vf *x, const int n)
{
	const float c[] = {8.9893401e-3f, 5.5826318e-2f, 2.4015362e-1f, 6.9315307e-1f,
			   9.9999993e-1f};
	vf f[4], p[4];

#pragma GCC unroll 4
	for (int i = 0; i < n; i++) {
		f[i] = (vf)_mm512_reduce_ps((__m512)x[i], 0x09);
		VF_STEP(f[i]);
	}
#pragma GCC unroll 4
	for (int i = 0; i < n; i++) {
		p[i] = f[i] * 1.8775767e-3f + c[0];
		VF_STEP(p[i]);
	}
#pragma GCC unroll 4
	for (int step = 1; step < 5; step++)
#pragma GCC unroll 4
		for (int i = 0; i < n; i++) {
			p[i] = p[i] * f[i] + c[step];
			VF_STEP(p[i]);
		}
#pragma GCC unroll 4
	for (int i = 0; i < n; i++)
		x[i] = (vf)_mm512_scalef_ps((__m512)p[i], (__m512)x[i]);
}
#else
static inline __attribute__((always_inline)) void vf_exp2_some(vf *x, const int n)
{
	for (int i = 0; i < n; i++)
		x[i] = vf_exp2(x[i]);
}
#endif

#endif
