/* SPDX-License-Identifier: MIT */
/*
 * types.h: the element types. `Storage` is what lies in memory; load and store go through float,
 * rounding to nearest even. `pack2` makes two neighbours of an operand register.
 */
#ifndef FMHA_GPU_TYPES_H
#define FMHA_GPU_TYPES_H

#include "prelude.h"

/* A head dimension is no multiple of 8: the last of a row's chunks of eight exists in part. */
#ifndef FMHA_TAILS
#define FMHA_TAILS 0
#endif
static const bool TAILS = FMHA_TAILS;

struct F32 {
	typedef float Storage;
	METHOD static float to_float(Storage x) { return x; }
	METHOD static Storage from_float(float x) { return x; }
};

struct BF16 {
	typedef u16 Storage;
	METHOD static float to_float(Storage x) { return bits_to_float((u32)x << 16); }

	/* A NaN stays one as long as it is the hardware's own (not all mantissa bits set). */
	METHOD static u32 pack2(float low, float high)
	{
#if FMHA_NVIDIA
		u32 y;
		asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
		return y;
#else
		u32 x = float_to_bits(low), y = float_to_bits(high);

		x += 0x7fff + (x >> 16 & 1);
		y += 0x7fff + (y >> 16 & 1);
		return x >> 16 | (y & 0xffff0000u);
#endif
	}

	METHOD static Storage from_float(float x)
	{
#if FMHA_NVIDIA
		return (Storage)pack2(x, 0.0f);
#else
		u32 u = float_to_bits(x);

		return (Storage)(x != x ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
#endif
	}
};

struct F16 {
	typedef u16 Storage;

	METHOD static float to_float(Storage x)
	{
#if FMHA_NVIDIA
		float y;
		asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
		return y;
#else
		union {
			u16 u;
			_Float16 h;
		} v;
		v.u = x;
		return (float)v.h;
#endif
	}

	METHOD static Storage from_float(float x)
	{
#if FMHA_NVIDIA
		Storage y;
		asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
		return y;
#else
		union {
			u16 u;
			_Float16 h;
		} v;
		v.h = (_Float16)x;
		return v.u;
#endif
	}

	METHOD static u32 pack2(float low, float high)
	{
#if FMHA_NVIDIA
		u32 y;
		asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
		return y;
#else
		typedef _Float16 Two __attribute__((ext_vector_type(2)));

		return __builtin_bit_cast(u32, Two{(_Float16)low, (_Float16)high});
#endif
	}
};

/* What a number becomes on its way into 8 bits: cut at the type's largest; a NaN is the type's. */
template <class E> DEV u8 code_of(float x)
{
	if (x != x)
		return E::NOT_A_NUMBER;
	return E::from_float(x < -E::most() ? -E::most() : x > E::most() ? E::most() : x);
}

/* OCP e4m3fn: bias 7, no infinity, one NaN a sign. Every value is exact in bf16. */
struct E4M3 {
	typedef u8 Storage;
	static const u8 NOT_A_NUMBER = 0x7f;
	METHOD static constexpr float most() { return 448.0f; }

	METHOD static float to_float(Storage x)
	{
		u32 sign = (u32)(x & 0x80) << 24, magnitude = x & 0x7f;
		float y;

		if (magnitude < 8) /* subnormal: multiples of 2^-9 */
			y = (float)(i32)magnitude * 0.001953125f;
		else if (magnitude == 0x7f)
			y = bits_to_float(0x7fc00000u);
		else
			y = bits_to_float((magnitude << 20) + (120u << 23));
		return bits_to_float(float_to_bits(y) | sign);
	}

	METHOD static Storage from_float(float x)
	{
		u32 u = float_to_bits(x), sign = u >> 24 & 0x80, magnitude = u & 0x7fffffffu;

		if (magnitude > 0x7f800000u)
			return (Storage)(sign | 0x7f);
		if (magnitude < 0x3c800000u) { /* below 2^-6: round to a multiple of 2^-9 */
			float y = bits_to_float(magnitude) + 16384.0f; /* ulp 2^-9 */

			return (Storage)(sign | (float_to_bits(y) & 0x0f));
		}
		magnitude += 0x7ffff + (magnitude >> 20 & 1);
		magnitude = (magnitude >> 20) - (120u << 3);
		return (Storage)(sign | (magnitude > 0x7e ? 0x7f : magnitude));
	}
};

struct E5M2 {
	typedef u8 Storage;
	static const u8 NOT_A_NUMBER = 0x7e;
	METHOD static constexpr float most() { return 57344.0f; }
	METHOD static float to_float(Storage x) { return F16::to_float((u16)(x << 8)); }

	METHOD static Storage from_float(float x)
	{
		u32 u = float_to_bits(x), sign = u >> 24 & 0x80, magnitude = u & 0x7fffffffu;

		if (magnitude > 0x7f800000u)
			return (Storage)(sign | 0x7e);
		if (magnitude < 0x38800000u) { /* below 2^-14: round to a multiple of 2^-16 */
			float y = bits_to_float(magnitude) + 128.0f; /* ulp 2^-16 */

			return (Storage)(sign | (float_to_bits(y) & 0x07));
		}
		magnitude += 0xfffff + (magnitude >> 21 & 1);
		magnitude = (magnitude >> 21) - (112u << 2);
		return (Storage)(sign | (magnitude > 0x7c ? 0x7c : magnitude));
	}
};

/* Integers, of which new rows are never the least one: as much of either sign. There is no NaN. */
struct I8 {
	typedef u8 Storage;
	static const u8 NOT_A_NUMBER = 0;
	METHOD static constexpr float most() { return 127.0f; }
	METHOD static float to_float(Storage x) { return (float)(signed char)x; }

	/* Of at most 127: beside 1.5 * 2^23 the last bits of a float count ones. */
	METHOD static Storage from_float(float x)
	{
		return (Storage)float_to_bits(x + 12582912.0f);
	}
};

/* The type with enum abi_dtype N, for options given as numbers. */
template <int N> struct TypeOf;
template <> struct TypeOf<ABI_F32> {
	typedef F32 Type;
};
template <> struct TypeOf<ABI_F16> {
	typedef F16 Type;
};
template <> struct TypeOf<ABI_BF16> {
	typedef BF16 Type;
};
template <> struct TypeOf<ABI_E4M3> {
	typedef E4M3 Type;
};
template <> struct TypeOf<ABI_E5M2> {
	typedef E5M2 Type;
};
template <> struct TypeOf<ABI_I8> {
	typedef I8 Type;
};

/* Run-time types, for tensors that are touched once a row, where a branch costs nothing: f32, f16
 * or bf16. No other is let through (proto/problem_tensors.c), and fp8 would be most of the code. */
DEV float load_as_float(const void *data, i32 dtype, i64 index)
{
	switch (dtype) {
	case ABI_F32:
		return ((const float *)data)[index];
	case ABI_F16:
		return F16::to_float(((const u16 *)data)[index]);
	default:
		return BF16::to_float(((const u16 *)data)[index]);
	}
}

DEV void store_from_float(void *data, i32 dtype, i64 index, float value)
{
	switch (dtype) {
	case ABI_F32:
		((float *)data)[index] = value;
		break;
	case ABI_F16:
		((u16 *)data)[index] = F16::from_float(value);
		break;
	default:
		((u16 *)data)[index] = BF16::from_float(value);
	}
}

/* What lies at p, as an unsigned word; 0 when !valid. No branch: those would cut the code of a tile
 * into hundreds of pieces. */
template <int BYTES> DEV u32 load_bits(const void *p, bool valid)
{
	u32 x = 0;
#if FMHA_NVIDIA
	if constexpr (BYTES == 4)
		asm("{\n\t"
		    ".reg .pred valid;\n\t"
		    "setp.ne.s32 valid, %2, 0;\n\t"
		    "@valid ld.global.u32 %0, [%1];\n\t"
		    "}"
		    : "+r"(x)
		    : "l"(p), "r"((i32)valid));
	else
		asm("{\n\t"
		    ".reg .pred valid;\n\t"
		    "setp.ne.s32 valid, %2, 0;\n\t"
		    "@valid ld.global.u16 %0, [%1];\n\t"
		    "}"
		    : "+r"(x)
		    : "l"(p), "r"((i32)valid));
#else
	if (valid)
		x = BYTES == 4 ? load_memory((const u32 *)p) : load_memory((const u16 *)p);
#endif
	return x;
}

#endif
