/* SPDX-License-Identifier: MIT */
/*
 * convert.h: rows of numbers between the tensors' types and float. Every conversion is exact on the
 * way in and rounds to nearest even on the way out.
 */
#ifndef FMHA_CPU_CONVERT_H
#define FMHA_CPU_CONVERT_H

#include "vec.h"

static inline float bits_to_float(uint32_t bits)
{
	float f;

	memcpy(&f, &bits, sizeof(f));
	return f;
}

static inline uint32_t float_to_bits(float f)
{
	uint32_t bits;

	memcpy(&bits, &f, sizeof(bits));
	return bits;
}

static inline int32_t dtype_bytes(int32_t dtype)
{
	switch (dtype) {
	case ABI_F32:
	case ABI_I32:
		return 4;
	case ABI_F16:
	case ABI_BF16:
		return 2;
	default:
		return 1;
	}
}

static inline float float_from_f16(uint16_t h)
{
#ifdef __F16C__
	return _cvtsh_ss(h);
#else
	uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
	float f;

	if (magnitude >= 0x7c00) /* infinity and NaN keep an exponent of all ones */
		return bits_to_float(sign | 0x7f800000 | magnitude << 13);
	if (magnitude >= 0x0400)
		return bits_to_float(sign | (magnitude + 0x1c000) << 13);
	/* Subnormal; not by way of a subnormal float, which the kernels' mode would flush. */
	f = (float)magnitude * 0x1p-24f;
	return sign ? -f : f;
#endif
}

static inline uint16_t float_to_f16(float f)
{
#ifdef __F16C__
	return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
	uint32_t bits = float_to_bits(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;

	if (magnitude > 0x7f800000)
		return (uint16_t)(sign | 0x7e00);
	if (magnitude >= 0x477ff000) /* 65520 and above round to infinity */
		return (uint16_t)(sign | 0x7c00);
	if (magnitude < 0x38800000) /* subnormal: 0.5f's last bit is 2^-24, the addition rounds */
		return (uint16_t)(sign |
				  (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000));
	magnitude += 0xfff + (magnitude >> 13 & 1);
	return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
#endif
}

static inline float float_from_bf16(uint16_t h)
{
	return bits_to_float((uint32_t)h << 16);
}

static inline uint16_t float_to_bf16(float f)
{
	uint32_t bits = float_to_bits(f);

	if ((bits & 0x7fffffff) > 0x7f800000)
		return (uint16_t)(bits >> 16 | 0x40);
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* fp8 through f16: e5m2 is its upper half; e4m3 has the exponent in the same place after a shift,
 * too small by 8, and one NaN, which no arithmetic finds. */
static inline float float_from_e5m2(uint8_t b)
{
	return float_from_f16((uint16_t)(b << 8));
}

static inline float float_from_e4m3(uint8_t b)
{
	uint16_t half = (uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7);

	if ((b & 0x7f) == 0x7f)
		return bits_to_float(0x7fc00000);
	return float_from_f16(half) * 256.0f;
}

/* The largest finite numbers, at which anything beyond is cut; of i8 as much of either sign. */
#define E4M3_MOST 448.0f
#define E5M2_MOST 57344.0f
#define I8_MOST   127.0f

/* Codes of numbers cut so; a NaN becomes the positive one. No branch, so that loops become vectors: below
 * the smallest normal number an addition rounds to its place, above the bits are rounded as they are. */
static inline uint8_t float_to_e4m3(float f)
{
	uint32_t bits = float_to_bits(f), magnitude = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
	uint32_t cut = magnitude < 0x43e00000 ? magnitude : 0x43e00000;
	uint32_t low = float_to_bits(bits_to_float(cut) + 0x1p14f) & 0x0f;
	uint32_t high = ((cut + 0x7ffff + (cut >> 20 & 1)) >> 20) - (120 << 3);
	uint32_t code = sign | (cut < 0x3c800000 ? low : high);

	return (uint8_t)(magnitude > 0x7f800000 ? 0x7f : code);
}

static inline uint8_t float_to_e5m2(float f)
{
	uint32_t bits = float_to_bits(f), magnitude = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
	uint32_t cut = magnitude < 0x47600000 ? magnitude : 0x47600000;
	uint32_t low = float_to_bits(bits_to_float(cut) + 0x1p7f) & 0x07;
	uint32_t high = ((cut + 0xfffff + (cut >> 21 & 1)) >> 21) - (112 << 2);
	uint32_t code = sign | (cut < 0x38800000 ? low : high);

	return (uint8_t)(magnitude > 0x7f800000 ? 0x7e : code);
}

/* Beside 1.5 * 2^23 the last bits of a float count ones. A NaN becomes 0. */
static inline uint8_t float_to_i8(float f)
{
	uint32_t magnitude = float_to_bits(f) & 0x7fffffff;
	float cut = f < I8_MOST ? f : I8_MOST;

	cut = cut > -I8_MOST ? cut : -I8_MOST;
	return (uint8_t)(magnitude > 0x7f800000 ? 0 : float_to_bits(cut + 0x1.8p23f));
}

static inline float load_one(const void *data, int32_t dtype, int64_t index)
{
	switch (dtype) {
	case ABI_F32:
		return ((const float *)data)[index];
	case ABI_F16:
		return float_from_f16(((const uint16_t *)data)[index]);
	case ABI_BF16:
		return float_from_bf16(((const uint16_t *)data)[index]);
	case ABI_E4M3:
		return float_from_e4m3(((const uint8_t *)data)[index]);
	case ABI_I8:
		return ((const int8_t *)data)[index];
	default:
		return float_from_e5m2(((const uint8_t *)data)[index]);
	}
}

static inline void store_one(void *data, int32_t dtype, int64_t index, float value)
{
	switch (dtype) {
	case ABI_F32:
		((float *)data)[index] = value;
		break;
	case ABI_F16:
		((uint16_t *)data)[index] = float_to_f16(value);
		break;
	default:
		((uint16_t *)data)[index] = float_to_bf16(value);
		break;
	}
}

/* LANES neighbours as floats. For a constant @dtype a few instructions. */
static inline __attribute__((always_inline)) vf vf_load_as(const void *p, int32_t dtype)
{
#if defined(__AVX512F__)
	__m256i half;
	__m128i bytes;
	__m512 value;

	switch (dtype) {
	case ABI_F32:
		return vf_load(p);
	case ABI_F16:
		return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
	case ABI_BF16:
		return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16);
	case ABI_E5M2:
		half = _mm256_cvtepu8_epi16(_mm_loadu_si128(p));
		return (vf)_mm512_cvtph_ps(_mm256_slli_epi16(half, 8));
	case ABI_I8:
		return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
	default: /* see float_from_e4m3(): the sign is shifted in from above the magnitude */
		bytes = _mm_loadu_si128(p);
		half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
		half = _mm256_and_si256(half, _mm256_set1_epi16((short)0xbfff));
		value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
		return (vf)_mm512_mask_mov_ps(
			value,
			_mm_cmpeq_epi8_mask(_mm_and_si128(bytes, _mm_set1_epi8(0x7f)),
					    _mm_set1_epi8(0x7f)),
			_mm512_set1_ps(bits_to_float(0x7fc00000)));
	}
#elif defined(__AVX2__)
	__m128i half, bytes;
	__m256 value, nan;

	switch (dtype) {
	case ABI_F32:
		return vf_load(p);
	case ABI_F16:
		return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
	case ABI_BF16:
		return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16);
	case ABI_E5M2:
		half = _mm_cvtepu8_epi16(_mm_loadl_epi64(p));
		return (vf)_mm256_cvtph_ps(_mm_slli_epi16(half, 8));
	case ABI_I8:
		return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
	default:
		bytes = _mm_loadl_epi64(p);
		half = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
		half = _mm_and_si128(half, _mm_set1_epi16((short)0xbfff));
		value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
		bytes = _mm_cmpeq_epi8(_mm_and_si128(bytes, _mm_set1_epi8(0x7f)),
				       _mm_set1_epi8(0x7f));
		nan = (__m256)_mm256_cvtepi8_epi32(bytes); /* all bits set: a NaN */
		return (vf)_mm256_or_ps(value, nan);
	}
#else
	vf r = {0}; /* at -O1 gcc 12 does not see the loop fill it */

	for (int i = 0; i < LANES; i++)
		r[i] = load_one(p, dtype, i);
	return r;
#endif
}

/* LANES floats to neighbours of type @dtype: f32, f16 or bf16. */
static inline __attribute__((always_inline)) void vf_store_as(void *p, vf x, const int32_t dtype)
{
	typedef uint16_t words __attribute__((vector_size(2 * LANES)));
	/* Unsigned: lanes that hold a NaN wrap in the sum below, which they do not use. */
	vu bits = (vu)x, nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
	words rounded;

	switch (dtype) {
	case ABI_F32:
		vf_store(p, x);
		return;
	case ABI_F16:
#if defined(__AVX512F__)
		_mm256_storeu_si256(p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
		_mm_storeu_si128(p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
		for (int i = 0; i < LANES; i++)
			((uint16_t *)p)[i] = float_to_f16(x[i]);
#endif
		return;
	default: /* as float_to_bf16() */
		bits = (nan & (bits | 0x400000)) | (~nan & (bits + 0x7fff + (bits >> 16 & 1)));
		rounded = __builtin_convertvector(bits >> 16, words);
		memcpy(p, &rounded, sizeof(rounded));
	}
}

static inline __attribute__((always_inline)) void
load_row_as(float *restrict dst, const char *restrict from, int32_t n, const int32_t dtype)
{
	int32_t i = 0;

	for (; i + LANES <= n; i += LANES)
		vf_store(dst + i, vf_load_as(from + i * dtype_bytes(dtype), dtype));
	for (; i < n; i++)
		dst[i] = load_one(from, dtype, i);
}

/* dst[i] = element @index + i * @stride. */
static inline void load_row(float *restrict dst, const void *restrict data, int32_t dtype,
			    int64_t index, int64_t stride, int32_t n)
{
	const char *from = (const char *)data + index * dtype_bytes(dtype);

	if (stride != 1) {
		for (int32_t i = 0; i < n; i++)
			dst[i] = load_one(data, dtype, index + i * stride);
		return;
	}
	switch (dtype) {
	case ABI_F32:
		load_row_as(dst, from, n, ABI_F32);
		break;
	case ABI_F16:
		load_row_as(dst, from, n, ABI_F16);
		break;
	case ABI_BF16:
		load_row_as(dst, from, n, ABI_BF16);
		break;
	case ABI_E4M3:
		load_row_as(dst, from, n, ABI_E4M3);
		break;
	case ABI_I8:
		load_row_as(dst, from, n, ABI_I8);
		break;
	default:
		load_row_as(dst, from, n, ABI_E5M2);
		break;
	}
}

static inline void scale_row(float *x, int32_t n, float factor)
{
	int32_t i = 0;

	for (; i + LANES <= n; i += LANES)
		vf_store(x + i, vf_load(x + i) * factor);
	for (; i < n; i++)
		x[i] *= factor;
}

static inline __attribute__((always_inline)) void
store_row_as(char *restrict to, const float *restrict src, int32_t n, const int32_t dtype)
{
	int32_t i = 0;

	for (; i + LANES <= n; i += LANES)
		vf_store_as(to + i * dtype_bytes(dtype), vf_load(src + i), dtype);
	for (; i < n; i++)
		store_one(to, dtype, i, src[i]);
}

/* Element @index + i * @stride = src[i]. */
static inline void store_row(void *restrict data, int32_t dtype, int64_t index, int64_t stride,
			     const float *restrict src, int32_t n)
{
	char *to = (char *)data + index * dtype_bytes(dtype);

	if (stride != 1) {
		for (int32_t i = 0; i < n; i++)
			store_one(data, dtype, index + i * stride, src[i]);
		return;
	}
	switch (dtype) {
	case ABI_F32:
		store_row_as(to, src, n, ABI_F32);
		break;
	case ABI_F16:
		store_row_as(to, src, n, ABI_F16);
		break;
	default:
		store_row_as(to, src, n, ABI_BF16);
		break;
	}
}

#endif
