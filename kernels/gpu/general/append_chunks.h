/* SPDX-License-Identifier: MIT */
/*
 * append_chunks.h: 16 bytes of a new row at a time: as floats, turned, as codes of 8 bits. The same
 * bits as element by element (append.h).
 */
#ifndef FMHA_GPU_APPEND_CHUNKS_H
#define FMHA_GPU_APPEND_CHUNKS_H

#include "combine.h"

/* The smaller one; x where that is a NaN. */
DEV float least_or_nan(float x, float y)
{
#if FMHA_NVIDIA
	float z;
	asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
	return z;
#else
	return x > y ? y : x;
#endif
}

#include "quotient.h"

/*
 * A double as a float that rounds on to 16 bits as the double would: what is beyond a float's bits
 * goes into the last of them ("round to odd"), which no narrower rounding mistakes. Numbers below a
 * float's normal ones become multiples of the least that a 16-bit type has.
 */
DEV float odd_float(double x)
{
	const double step = 1.5 * 4503599627370496.0 / 10889035741470030830827987437816582766592.0;
	union {
		double d;
		u32 w[2];
	} v = {x};
	const u32 lost = v.w[0] & 0x1fffffffu;

	if ((v.w[1] & 0x7fffffffu) < 897u << 20) { /* to multiples of 2^-133 */
		const u32 sign = v.w[1] & 0x80000000u;

		v.d = (x + step) - step;
		v.w[1] |= sign;
	} else {
		v.w[0] = (v.w[0] & ~0x1fffffffu) | (lost ? 0x20000000u : 0);
	}
	return (float)v.d;
}

/* 1 / x, rounded to nearest. */
DEV float exact_reciprocal(float x)
{
#if FMHA_NVIDIA
	float y;
	asm("rcp.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
#else
	return (float)(1.0 / (double)x);
#endif
}

/* As a float's division rounds, whatever division a compiler takes for those. */
DEV float exact_quotient(float x, float y)
{
#if FMHA_NVIDIA
	float q;
	asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y));
	return q;
#else
	return (float)((double)x / (double)y);
#endif
}

/* Elements of 16 bytes, as floats and back. */
template <class E> struct Chunk {
	static const int N = 16 / sizeof(typename E::Storage);

	METHOD static void open(chunk16 c, float *x)
	{
		static_assert(N == 8, "two a word");
		UNROLL
		for (int i = 0; i < N; i++)
			x[i] = E::to_float((typename E::Storage)(c.w[i / 2] >> (i % 2 * 16)));
	}
	METHOD static chunk16 close(const float *x)
	{
		return chunk16{{E::pack2(x[0], x[1]), E::pack2(x[2], x[3]), E::pack2(x[4], x[5]),
				E::pack2(x[6], x[7])}};
	}
};

/* Sines or cosines of four pairs. */
struct Angles {
	float f[4];

	METHOD void load(const abi_tensor &t, i32 dtype, i64 row, i32 first)
	{
		const i64 at = row * t.stride_seq + first;

		if (dtype == ABI_F32) {
			chunk16 c = load16((const float *)t.data + at);

			UNROLL
			for (int i = 0; i < 4; i++)
				f[i] = bits_to_float(c.w[i]);
			return;
		}
		chunk8 c = *(const chunk8 *)((const u16 *)t.data + at);

		UNROLL
		for (int i = 0; i < 4; i++) {
			const u16 bits = (u16)(c.w[i / 2] >> (i % 2 * 16));

			f[i] = dtype == ABI_F16 ? F16::to_float(bits) : BF16::to_float(bits);
		}
	}
};

/*
 * Turns four pairs: neighbours from x on, or x[i] with y[i]. codes: to floats, of which codes are
 * made; else to floats that round on to 16 bits.
 */
template <bool NEIGHBOURS>
DEV void turn_four(float *x, float *y, const Angles &cosines, const Angles &sines, bool codes)
{
	UNROLL
	for (int i = 0; i < 4; i++) {
		float *p = NEIGHBOURS ? x + 2 * i : x + i, *q = NEIGHBOURS ? p + 1 : y + i;
		const double a = *p, b = *q, c = cosines.f[i], s = sines.f[i];
		const double first = a * c - b * s, second = a * s + b * c;

		*p = codes ? (float)first : odd_float(first);
		*q = codes ? (float)second : odd_float(second);
	}
}

/* Four numbers of at most a type's largest, or of any size where it says so, as codes; a NaN is the
 * type's. */
template <class E> struct Codes {
	static const bool SATURATE = false;
	METHOD static u32 of(const float *x)
	{
		u32 word = 0;

		UNROLL
		for (int i = 0; i < 4; i++)
			word |= (u32)code_of<E>(x[i]) << (8 * i);
		return word;
	}
};
#if FMHA_NVIDIA
template <> struct Codes<I8> {
	static const bool SATURATE = false;
	METHOD static u32 of(const float *x)
	{
		i32 n[4];

		UNROLL
		for (int i = 0; i < 4; i++)
			asm("cvt.rni.s32.f32 %0, %1;" : "=r"(n[i]) : "f"(x[i])); /* of a NaN: 0 */
		return __byte_perm(__byte_perm((u32)n[0], (u32)n[1], 0x0040),
				   __byte_perm((u32)n[2], (u32)n[3], 0x0040), 0x5410);
	}
};
#endif
#if FMHA_NVIDIA && __CUDA_ARCH__ >= 890
#define FMHA_TWO_CODES(type, x, y)                                                                 \
	asm("cvt.rn.satfinite." type "x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x))
template <> struct Codes<E4M3> {
	static const bool SATURATE = true;
	METHOD static u32 two(float x, float y)
	{
		u16 pair;

		FMHA_TWO_CODES("e4m3", x, y);
		return pair;
	}
	METHOD static u32 of(const float *x) { return two(x[0], x[1]) | two(x[2], x[3]) << 16; }
};
template <> struct Codes<E5M2> {
	static const bool SATURATE = true;
	METHOD static u32 two(float x, float y)
	{
		u16 pair;

		FMHA_TWO_CODES("e5m2", x, y);
		return pair;
	}
	/* The processor's NaN is another one. No other code but the infinities', which nothing
	 * becomes, has all bits of the exponent. */
	METHOD static u32 of(const float *x)
	{
		u32 word = two(x[0], x[1]) | two(x[2], x[3]) << 16;
		u32 nans = ((word & 0x7c7c7c7cu) + 0x04040404u) & 0x80808080u;

		nans = nans / 128 * 255; /* whole bytes */
		return (word & ~nans) | (0x7e7e7e7eu & nans);
	}
};
#undef FMHA_TWO_CODES
#endif

/* Eight floats divided by a factor that quotient.h has, as codes. is_power: the factor is one of
 * two, so that products are quotients. */
template <class E> DEV chunk8 codes_of_chunk(float *x, float factor, float inverse, bool is_power)
{
	const float end = E::most() * factor;

	if (Codes<E>::SATURATE && is_power) {
		UNROLL
		for (int i = 0; i < 8; i++)
			x[i] *= inverse;
	} else {
		UNROLL
		for (int i = 0; i < 8; i++) {
			const float y = quotient_magnitude(x[i], factor, inverse, end);

			x[i] = bits_to_float(float_to_bits(y) |
					     (float_to_bits(x[i]) & 0x80000000u));
		}
	}
	return chunk8{{Codes<E>::of(x), Codes<E>::of(x + 4)}};
}

#endif
