/* SPDX-License-Identifier: MIT */
/* bench_peak.c: see bench_peak.h. */
#include <stdint.h>
#include <string.h>

#include "bench_peak.h"

enum peak_kind peak_best_bf16(enum cpu_level level)
{
	return level >= CPU_X86_64_AMX       ? PEAK_AMX
	       : level >= CPU_X86_64_V4_BF16 ? PEAK_BF16
					     : PEAK_FMA;
}

#ifdef __x86_64__
#include <immintrin.h>

/* Keeps the compiler from computing the sums ahead or leaving them out. */
#define OPAQUE(x) __asm__ volatile("" : "+v"(x))

__attribute__((target("avx512f"))) static double fma_512(long n)
{
	__m512 sum[24], a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);

	for (int i = 0; i < 24; i++)
		sum[i] = _mm512_set1_ps((float)i);
	OPAQUE(a);
	OPAQUE(b);
	for (long k = 0; k < n; k++)
#pragma GCC unroll 24
		for (int i = 0; i < 24; i++)
			sum[i] = _mm512_fmadd_ps(sum[i], a, b);
	for (int i = 0; i < 24; i++)
		OPAQUE(sum[i]);
	return 24.0 * 16 * 2 * (double)n;
}

__attribute__((target("avx2,fma"))) static double fma_256(long n)
{
	__m256 sum[12], a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);

	for (int i = 0; i < 12; i++)
		sum[i] = _mm256_set1_ps((float)i);
	OPAQUE(a);
	OPAQUE(b);
	for (long k = 0; k < n; k++)
#pragma GCC unroll 12
		for (int i = 0; i < 12; i++)
			sum[i] = _mm256_fmadd_ps(sum[i], a, b);
	for (int i = 0; i < 12; i++)
		OPAQUE(sum[i]);
	return 12.0 * 8 * 2 * (double)n;
}

static double multiply_add_128(long n)
{
	__m128 sum[12], a = _mm_set1_ps(0.5f), b = _mm_set1_ps(0.25f);

	for (int i = 0; i < 12; i++)
		sum[i] = _mm_set1_ps((float)i);
	OPAQUE(a);
	OPAQUE(b);
	for (long k = 0; k < n; k++)
#pragma GCC unroll 12
		for (int i = 0; i < 12; i++)
			sum[i] = _mm_add_ps(_mm_mul_ps(sum[i], a), b);
	for (int i = 0; i < 12; i++)
		OPAQUE(sum[i]);
	return 12.0 * 4 * 2 * (double)n;
}

__attribute__((target("avx512f,avx512bf16"))) static double bf16_512(long n)
{
	__m512 sum[24];
	__m512i a = _mm512_set1_epi32(0x3f003f00), b = _mm512_set1_epi32(0x3e803e80);

	for (int i = 0; i < 24; i++)
		sum[i] = _mm512_set1_ps((float)i);
	OPAQUE(a);
	OPAQUE(b);
	for (long k = 0; k < n; k++)
#pragma GCC unroll 24
		for (int i = 0; i < 24; i++)
			sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)a, (__m512bh)b);
	for (int i = 0; i < 24; i++)
		OPAQUE(sum[i]);
	return 24.0 * 16 * 4 * (double)n;
}

struct tile_configuration {
	uint8_t palette, start_row, reserved[14];
	uint16_t columns[16];
	uint8_t rows[16];
} __attribute__((aligned(64)));

__attribute__((target("amx-tile,amx-bf16"))) static double bf16_amx(long n)
{
	static const uint8_t zeros[16 * 64];
	/* Constant: gcc 12 leaves out stores to a local one. */
	static const struct tile_configuration c = {
		.palette = 1,
		.columns = {64, 64, 64, 64, 64, 64, 64, 64},
		.rows = {16, 16, 16, 16, 16, 16, 16, 16},
	};

	_tile_loadconfig(&c);
	_tile_zero(0);
	_tile_zero(1);
	_tile_zero(2);
	_tile_zero(3);
	_tile_loadd(4, zeros, 64);
	_tile_loadd(5, zeros, 64);
	_tile_loadd(6, zeros, 64);
	_tile_loadd(7, zeros, 64);
	for (long k = 0; k < n; k++) {
		_tile_dpbf16ps(0, 4, 6);
		_tile_dpbf16ps(1, 4, 7);
		_tile_dpbf16ps(2, 5, 6);
		_tile_dpbf16ps(3, 5, 7);
	}
	_tile_release();
	return 4.0 * 16 * 16 * 32 * 2 * (double)n;
}

double peak_run(enum peak_kind kind, long n)
{
	enum cpu_level level = cpu_level_detect();

	if (kind == PEAK_AMX)
		return bf16_amx(n);
	if (kind == PEAK_BF16)
		return bf16_512(n);
	if (level >= CPU_X86_64_V4)
		return fma_512(n);
	return level >= CPU_X86_64_V3 ? fma_256(n) : multiply_add_128(n);
}

__attribute__((target("avx512f"))) static void copy_512(char *to, const char *from, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += 64)
		_mm512_stream_si512((void *)(to + i), _mm512_load_si512(from + i));
	_mm_sfence();
}

void peak_copy(void *to, const void *from, size_t bytes)
{
	if (cpu_level_detect() >= CPU_X86_64_V4)
		copy_512(to, from, bytes);
	else
		memcpy(to, from, bytes);
}
#else
double peak_run(enum peak_kind kind, long n)
{
	float sum[16] = {0};

	(void)kind;
	for (long k = 0; k < n; k++)
		for (int i = 0; i < 16; i++)
			sum[i] = sum[i] * 0.5f + 0.25f;
	for (int i = 0; i < 16; i++)
		__asm__ volatile("" : "+m"(sum[i]));
	return 32.0 * (double)n;
}

void peak_copy(void *to, const void *from, size_t bytes)
{
	memcpy(to, from, bytes);
}
#endif
