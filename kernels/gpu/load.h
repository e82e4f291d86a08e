/* SPDX-License-Identifier: MIT */
/*
 * load.h: eight neighbours along the head dimension, from any view, as the matrix core wants them.
 * Head dimensions are multiples of 8, so eight neighbours exist or do not, all together.
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

/* Eight 16-bit elements of type To from a view of type From; zero when !valid. The words are
 * separate variables because clang would keep an array that several branches write in scratch. */
template <class To, class From, class View>
DEV chunk16 load_chunk(const View &view, i32 row, i32 dim, bool valid)
{
	u32 w0 = 0, w1 = 0, w2 = 0, w3 = 0;

	if (valid && dim < view.hdim) {
		if (SameType<To, From>::value && view.vector) {
			chunk16 c = load16(view.at(row, dim));

			w0 = c.w[0], w1 = c.w[1], w2 = c.w[2], w3 = c.w[3];
		} else {
			w0 = load_pair<To, From>(view, row, dim);
			w1 = load_pair<To, From>(view, row, dim + 2);
			w2 = load_pair<To, From>(view, row, dim + 4);
			w3 = load_pair<To, From>(view, row, dim + 6);
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
	chunk32 c;

	valid = valid && dim < view.hdim;
	if (valid && view.vector && sizeof(typename From::Storage) == 2) {
		chunk16 x = load16(view.at(row, dim));

		UNROLL
		for (int i = 0; i < 8; i++)
			c.f[i] = From::to_float((typename From::Storage)(x.w[i / 2] >> (i % 2 * 16)));
		return c;
	}
	UNROLL
	for (int i = 0; i < 8; i++)
		c.f[i] = valid ? From::to_float(*view.at(row, dim + i)) : 0.0f;
	return c;
}

/* Stores eight neighbours: from floats, to any type, any stride. */
DEV void store_chunk(void *data, i32 dtype, i64 offset, i64 stride, const float *from)
{
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
	NO_UNROLL
	for (int i = 0; i < 8; i++)
		store_from_float(data, dtype, offset + i * stride, from[i]);
}

#endif
