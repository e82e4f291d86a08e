/* SPDX-License-Identifier: MIT */
/*
 * load.h: eight neighbours along the head dimension, from any view, as the matrix core wants them.
 * They exist or do not, all together, but for TAILS: there the last of a row's eights may have
 * fewer, and what lies behind those is nobody's to read or write.
 */
#ifndef FMHA_GPU_LOAD_H
#define FMHA_GPU_LOAD_H

#include "geometry.h"

template <class A, class B> struct SameType {
	static const bool value = false;
};
template <class A> struct SameType<A, A> {
	static const bool value = true;
};

/* Two neighbours of type To in one word, whatever the strides. */
template <class To, class From, class View> DEV u32 load_pair(const View &view, i32 row, i32 dim)
{
	typename From::Storage low = *view.at(row, dim), high = *view.at(row, dim + 1);

	if constexpr (SameType<To, From>::value)
		return (u32)low | (u32)high << 16;
	else
		return To::pack2(From::to_float(low), From::to_float(high));
}

/* Two of four 8-bit elements in one word, as type To. */
template <class To, class From> DEV u32 widen_pair(u32 word, int first)
{
	return To::pack2(From::to_float((typename From::Storage)(word >> (8 * first))),
			 From::to_float((typename From::Storage)(word >> (8 * first + 8))));
}

/* Four values of 8 bits in 16, each of them exactly: the first two, and the others. */
template <class To, class From> struct Widening {
	METHOD static void widen(u32 word, u32 *low, u32 *high)
	{
		*low = widen_pair<To, From>(word, 0);
		*high = widen_pair<To, From>(word, 2);
	}
};
#if FMHA_NVIDIA
/* Behind 0x64 an unsigned byte is 1,024 and itself; 1,152 less is what it was before 128 was added. */
template <> struct Widening<F16, I8> {
	METHOD static u32 less(u32 pair)
	{
		u32 y;
		asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(0x64806480u));
		return y;
	}
	METHOD static void widen(u32 word, u32 *low, u32 *high)
	{
		word ^= 0x80808080u;
		*low = less(__byte_perm(word, 0x64646464u, 0x4140));
		*high = less(__byte_perm(word, 0x64646464u, 0x4342));
	}
};
/* bf16 counts ones up to 255: seven bits behind 0x43 are 128 and they, less 128 or, of a negative
 * number, 256. */
template <> struct Widening<BF16, I8> {
	METHOD static u32 difference(u32 pair, u32 less)
	{
		u32 y;
#if __CUDA_ARCH__ >= 900
		asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(less));
#else
		asm("fma.rn.bf16x2 %0, %1, %2, %3;"
		    : "=r"(y)
		    : "r"(less), "r"(0xbf80bf80u), "r"(pair));
#endif
		return y;
	}
	METHOD static void widen(u32 word, u32 *low, u32 *high)
	{
		u32 bits = word & 0x7f7f7f7fu, sign = word & 0x80808080u;

		*low = difference(__byte_perm(bits, 0x43434343u, 0x4140),
				  __byte_perm(sign, 0x43434343u, 0x4140));
		*high = difference(__byte_perm(bits, 0x43434343u, 0x4342),
				   __byte_perm(sign, 0x43434343u, 0x4342));
	}
};
#endif
#if FMHA_NVIDIA && __CUDA_ARCH__ >= 890
template <> struct Widening<F16, E4M3> {
	METHOD static void widen(u32 word, u32 *low, u32 *high)
	{
		asm("{\n\t"
		    ".reg .b16 a, b;\n\t"
		    "mov.b32 {a, b}, %2;\n\t"
		    "cvt.rn.f16x2.e4m3x2 %0, a;\n\t"
		    "cvt.rn.f16x2.e4m3x2 %1, b;\n\t"
		    "}"
		    : "=r"(*low), "=r"(*high)
		    : "r"(word));
	}
};
template <> struct Widening<F16, E5M2> {
	METHOD static void widen(u32 word, u32 *low, u32 *high)
	{
		*low = __byte_perm(word, 0, 0x1404);
		*high = __byte_perm(word, 0, 0x3424);
	}
};
template <class From> struct Widening<BF16, From> {
	METHOD static u32 turn(u32 pair)
	{
		return BF16::pack2(F16::to_float((u16)pair), F16::to_float((u16)(pair >> 16)));
	}
	METHOD static void widen(u32 word, u32 *low, u32 *high)
	{
		u32 x, y;

		Widening<F16, From>::widen(word, &x, &y);
		*low = turn(x);
		*high = turn(y);
	}
};
#endif

/* TAILS: elements dim .. dim + 7 of a row as operands, zero from hdim on. A straight line of loads:
 * what does not exist is read from where the row ends. */
template <class To, class From, class View>
DEV chunk16 load_tail(const View &view, i32 row, i32 dim)
{
	typename From::Storage x[8];
	chunk16 c;

	UNROLL
	for (int i = 0; i < 8; i++)
		x[i] = *view.at(row, min_of(dim + i, view.hdim - 1));
	UNROLL
	for (int i = 0; i < 8; i++)
		x[i] = dim + i < view.hdim ? x[i] : 0;
	UNROLL
	for (int i = 0; i < 4; i++)
		if constexpr (SameType<To, From>::value)
			c.w[i] = (u32)x[2 * i] | (u32)x[2 * i + 1] << 16;
		else
			c.w[i] = To::pack2(From::to_float(x[2 * i]), From::to_float(x[2 * i + 1]));
	return c;
}

/*
 * Eight 16-bit elements of type To from a view of type From, 16-bit too or 8-bit; zero when !valid.
 * What has odd strides goes through a loop, small rather than fast. The words are separate
 * variables because clang would keep an array that several branches write in scratch.
 */
template <class To, class From, class View>
DEV chunk16 load_chunk(const View &view, i32 row, i32 dim, bool valid)
{
	u32 w0 = 0, w1 = 0, w2 = 0, w3 = 0;

	if (valid && dim < view.hdim) {
		if (SameType<To, From>::value && view.vector) {
			chunk16 c = load16(view.at(row, dim));

			w0 = c.w[0], w1 = c.w[1], w2 = c.w[2], w3 = c.w[3];
		} else if (!SameType<To, From>::value && view.vector) {
			chunk8 c = *(const chunk8 *)view.at(row, dim);

			if constexpr (SameType<From, I8>::value) {
				Widening<To, From>::widen(c.w[0], &w0, &w1);
				Widening<To, From>::widen(c.w[1], &w2, &w3);
			} else {
				w0 = widen_pair<To, From>(c.w[0], 0),
				w1 = widen_pair<To, From>(c.w[0], 2);
				w2 = widen_pair<To, From>(c.w[1], 0),
				w3 = widen_pair<To, From>(c.w[1], 2);
			}
		} else if (TAILS) {
			chunk16 c = load_tail<To, From>(view, row, dim);

			w0 = c.w[0], w1 = c.w[1], w2 = c.w[2], w3 = c.w[3];
		} else {
			NO_UNROLL
			for (int i = 0; i < 4; i++) {
				u32 w = load_pair<To, From>(view, row, dim + 2 * i);

				w0 = i == 0 ? w : w0, w1 = i == 1 ? w : w1;
				w2 = i == 2 ? w : w2, w3 = i == 3 ? w : w3;
			}
		}
	}
	return chunk16{{w0, w1, w2, w3}};
}

/* The same as eight floats. */
struct chunk32 {
	float f[8];
};

template <class From, class View>
DEV chunk32 load_floats(const View &view, i32 row, i32 dim, bool valid)
{
	typedef typename From::Storage Storage;
	chunk32 c = {};

	if (!valid || dim >= view.hdim)
		return c;
	if (view.vector) {
		const Storage *from = view.at(row, dim);

		if constexpr (sizeof(Storage) == 4) {
			/* Vectorized pages keep 16 bytes together, not 32. */
			chunk16 low = load16(from), high = load16(view.at(row, dim + 4));

			UNROLL
			for (int i = 0; i < 8; i++)
				c.f[i] = bits_to_float(i < 4 ? low.w[i] : high.w[i - 4]);
		} else if constexpr (sizeof(Storage) == 2) {
			chunk16 x = load16(from);

			UNROLL
			for (int i = 0; i < 8; i++)
				c.f[i] = From::to_float((Storage)(x.w[i / 2] >> (i % 2 * 16)));
		} else {
			chunk8 x = *(const chunk8 *)from;

			UNROLL
			for (int i = 0; i < 8; i++)
				c.f[i] = From::to_float((Storage)(x.w[i / 4] >> (i % 4 * 8)));
		}
		return c;
	}
	NO_UNROLL
	for (int n = 0; n < (TAILS ? min_of(8, view.hdim - dim) : 8); n++) {
		float x = From::to_float(*view.at(row, dim + n));

		UNROLL
		for (int i = 0; i < 8; i++)
			c.f[i] = i == n ? x : c.f[i];
	}
	return c;
}

/* The same of a latent of fp8. */
template <class From, class View>
DEV chunk32 load_floats(const LatentView<View> &view, i32 row, i32 dim, bool valid)
{
	chunk32 c = {};

	if (!valid || dim >= view.hdim)
		return c;
	const char *key = view.key(row);

	if (view.is_coded(dim)) {
		chunk8 x = *(const chunk8 *)(key + dim);
		float factor = view.factor(key, dim);

		UNROLL
		for (int i = 0; i < 8; i++)
			c.f[i] = From::to_float((typename From::Storage)(x.w[i / 4] >>
									 (i % 4 * 8))) *
				 factor;
	} else {
		chunk16 x = load16(view.rest(key, dim));

		UNROLL
		for (int i = 0; i < 8; i++)
			c.f[i] = BF16::to_float((u16)(x.w[i / 2] >> (i % 2 * 16)));
	}
	return c;
}

template <class To, class From, class View>
DEV chunk16 load_chunk(const LatentView<View> &view, i32 row, i32 dim, bool valid)
{
	chunk32 x = load_floats<From>(view, row, dim, valid);

	return chunk16{{To::pack2(x.f[0], x.f[1]), To::pack2(x.f[2], x.f[3]),
			To::pack2(x.f[4], x.f[5]), To::pack2(x.f[6], x.f[7])}};
}

/* The first n of some neighbours. */
DEV void store_some(void *data, i32 dtype, i64 offset, i64 stride, const float *from, i32 n)
{
	NO_UNROLL
	for (int i = 0; i < n; i++)
		store_from_float(data, dtype, offset + i * stride, from[i]);
}

/* Stores eight neighbours: from floats, to any type, any stride. TAILS: the first `left`, if those
 * are fewer. */
DEV void store_chunk(void *data, i32 dtype, i64 offset, i64 stride, const float *from, i32 left)
{
	if (TAILS && left < 8)
		return store_some(data, dtype, offset, stride, from, left);
	if (stride == 1 && dtype == ABI_F32 && ((u64)((float *)data + offset) & 15) == 0) {
		((chunk16 *)((float *)data + offset))[0] = ((const chunk16 *)from)[0];
		((chunk16 *)((float *)data + offset))[1] = ((const chunk16 *)from)[1];
		return;
	}
	if (stride == 1 && (dtype == ABI_BF16 || dtype == ABI_F16) &&
	    ((u64)((u16 *)data + offset) & 15) == 0) {
		chunk16 c;

		UNROLL
		for (int i = 0; i < 4; i++)
			c.w[i] = dtype == ABI_BF16 ? BF16::pack2(from[2 * i], from[2 * i + 1])
						   : F16::pack2(from[2 * i], from[2 * i + 1]);
		*(chunk16 *)((u16 *)data + offset) = c;
		return;
	}
	store_some(data, dtype, offset, stride, from, 8);
}

/* The same with four. */
DEV void store_four(void *data, i32 dtype, i64 offset, i64 stride, const float *from, i32 left)
{
	if (TAILS && left < 4)
		return store_some(data, dtype, offset, stride, from, left);
	if (stride == 1 && dtype == ABI_F32 && ((u64)((float *)data + offset) & 15) == 0) {
		*(chunk16 *)((float *)data + offset) = *(const chunk16 *)from;
		return;
	}
	if (stride == 1 && (dtype == ABI_BF16 || dtype == ABI_F16) &&
	    ((u64)((u16 *)data + offset) & 7) == 0) {
		chunk8 c;

		UNROLL
		for (int i = 0; i < 2; i++)
			c.w[i] = dtype == ABI_BF16 ? BF16::pack2(from[2 * i], from[2 * i + 1])
						   : F16::pack2(from[2 * i], from[2 * i + 1]);
		*(chunk8 *)((u16 *)data + offset) = c;
		return;
	}
	UNROLL
	for (int i = 0; i < 4; i++)
		store_from_float(data, dtype, offset + i * stride, from[i]);
}

/* The operand that is stationary for a whole loop: a tile in LDS, of which each wave has its rows. */
template <class Store, int TILES> struct StationaryInLds {
	static const int BYTES = Store::BYTES;
	Store tile;
	i32 wave_row; /* this wave's first row in the tile */

	METHOD void place(char *at, i32 wave) { tile.place(at), wave_row = wave * TILES * 16; }
	template <class From, class View>
	METHOD void fetch(const View &view, i32 first, i32 end)
	{
		tile.template fetch<From>(view, first, end);
	}
	METHOD void arrive() { tile.arrive(); }
};

#endif
