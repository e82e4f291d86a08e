/* SPDX-License-Identifier: MIT */
/*
 * decode_bytes.h: keys and values of 8 bits for decode's loop. They come and lie as bytes; two at a
 * time become f16, which holds each of them exactly, once they are operands. What order they have
 * within 16 is what makes that cheap:
 * Q K^T  a lane's word of K is dims 4t .. 4t + 3, where an operand has 2t, 2t + 1, 2t + 8 and 2t +
 * 9: Q is laid
 *          out for the former
 * P V    a lane's word of V is dims 2g and 2g + 1 of keys 2t and 2t + 1: one half of an accumulator
 * has the even
 *          dims, the other the odd ones
 * A tile of them is one of 16-bit elements that has half as many columns.
 *
 * Queries of bf16 become f16, too, each row times a power of two that brings its largest element
 * below 2^15: what that makes subnormal is below 2^-29 of it, and what it loses below 2^-39.
 *
 * BY_KEY: keys have factors of their own. Those of K multiply scores, those of V weights.
 */
#ifndef FMHA_GPU_DECODE_BYTES_H
#define FMHA_GPU_DECODE_BYTES_H

#include "block/fwd_output.h"

/* C for such keys: factors of whole heads wait for the end, and do not concern the scores one by
 * one. FACTORS: there are such, or those of rows of bf16. */
template <class C> struct BytesInF16 : C {
	typedef CoreMma<F16> Core;
	static const bool DESCALE = false;
	static const bool FACTORS = C::DESCALE || SameType<typename C::Element, BF16>::value;
};

/* Multiplies columns by factors, which lie in shared memory, those of the tile's first one first. */
template <class Core, int TM, int TN>
DEV void scale_columns(RegTile<Core, TM, TN> &s, const char *factors)
{
	UNROLL
	for (int n = 0; n < TN; n++)
		UNROLL
		for (int e = 0; e < Core::E; e += 4) { /* two columns of two rows */
			const chunk8 two =
				*(const chunk8 *)(factors + (n * 16 + Core::column(e)) * 4);

			UNROLL
			for (int m = 0; m < TM; m++)
				UNROLL
				for (int i = 0; i < 4; i++)
					s.t[m][n].x[e + i] *= bits_to_float(two.w[i & 1]);
		}
}

/*
 * Factors of values in weights, which f16 has to hold whatever factors are: their logarithms are
 * added to logits, so that the largest of a row's products becomes 1, and the sum of weights is
 * that of products divided by them again. Columns as scale_columns() has them. A factor of 0 counts
 * as the least one: its key has a weight, if no value.
 */
template <class Core, int TN> struct ValueFactors {
	float log[TN][Core::E / 2], inverse[TN][Core::E / 2];

	METHOD static int column(int e) { return e % 2 + e / 4 * 2; }
	/* Of x, which has none. */
	METHOD static float with_sign_of(float x, float y)
	{
		return bits_to_float(float_to_bits(x) | (float_to_bits(y) & 0x80000000u));
	}

	METHOD void load(const char *factors)
	{
		const float least = bits_to_float((127u - 100u) << 23);

		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int e = 0; e < Core::E; e += 4) {
				const chunk8 two =
					*(const chunk8 *)(factors + (n * 16 + Core::column(e)) * 4);

				UNROLL
				for (int i = 0; i < 2; i++) {
					float x = magnitude_of(bits_to_float(two.w[i]));

					x = x < least ? least : x; /* a NaN stays one */
					log[n][e / 2 + i] = log2_fast(x) * (1.0f / FMHA_LOG2_E);
					inverse[n][e / 2 + i] = reciprocal(with_sign_of(
						x, bits_to_float(two.w[i])));
				}
			}
	}

	template <int TM> METHOD void add_to(RegTile<Core, TM, TN> &s) const
	{
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++)
					s.t[m][n].x[e] += log[n][column(e)];
	}

	/* Products are added to sums of weights, and take their signs. */
	template <int TM>
	METHOD void sum(RegTile<Core, TM, TN> &s, RowVector<Core, TM> &sums) const
	{
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					float &x = s.t[m][n].x[e], &l = sums.v[m][Core::stat(e)];

					x = with_sign_of(x, inverse[n][column(e)]);
					l = multiply_add(x, inverse[n][column(e)], l);
				}
	}
};

/* Widens two dims each of two keys: the first dim's two keys, and the second's. */
template <class From> DEV void widen_columns(u32 word, u32 *even, u32 *odd)
{
	Widening<F16, From>::widen(__byte_perm(word, 0, 0x3120), even, odd);
}

/* As multiply_abt(), of keys of type From. */
template <int K, class From, class Core, int TM, int TN, class A, class B>
DEV void multiply_bytes_abt(RegTile<Core, TM, TN> &s, const A &a, const B &b, i32 column)
{
	typename A::Reader read_a(a);
	typename B::RowReader read_b(b, column);

	UNROLL
	for (int k = 0; k < K / 32; k++)
		UNROLL
		for (int n = 0; n < TN; n++) {
			typename Core::Operand y = read_b(n, k), z;

			UNROLL
			for (int half = 0; half < 2; half++) {
				Widening<F16, From>::widen(y.r[half], &z.r[0], &z.r[1]);
				Widening<F16, From>::widen(y.r[half + 2], &z.r[2], &z.r[3]);
				UNROLL
				for (int m = 0; m < TM; m++)
					Core::multiply(s.t[m][n], read_a(m, 2 * k + half), z);
			}
		}
}

/* As multiply_ab(); dim_of() says where columns are. */
template <class From, class Core, int TM, int TN, int TD, class B>
DEV void multiply_bytes_ab(RegTile<Core, TM, TD> &o, const OperandTile<Core, TM, TN> &p, const B &b,
			   i32 row)
{
	typename B::ColumnReader read_b(b, row);

	UNROLL
	for (int n = 0; n < TN; n++)
		UNROLL
		for (int d = 0; d < TD / 2; d++) {
			typename Core::Operand y = read_b(n, d), z;

			UNROLL
			for (int half = 0; half < 2; half++) {
				widen_columns<From>(y.r[2 * half], &z.r[0], &z.r[2]);
				widen_columns<From>(y.r[2 * half + 1], &z.r[1], &z.r[3]);
				UNROLL
				for (int m = 0; m < TM; m++)
					Core::multiply(o.t[m][2 * d + half], p.t[m][n], z);
			}
		}
}

DEV i32 dim_of_bytes(int e) { return lane_id() % 4 * 4 + 2 * (e & 1) + (e >> 2); }

/* 16 neighbours from any view; zero when !valid, and beyond the head. */
template <class View> DEV chunk16 load_bytes(const View &view, i32 row, i32 dim, bool valid)
{
	u32 w0 = 0, w1 = 0, w2 = 0, w3 = 0;

	if (!valid || dim >= view.hdim)
		return chunk16{{0, 0, 0, 0}};
	if (view.vector) {
		chunk8 c = *(const chunk8 *)view.at(row, dim);

		w0 = c.w[0], w1 = c.w[1];
		if (dim + 8 < view.hdim) {
			c = *(const chunk8 *)view.at(row, dim + 8);
			w2 = c.w[0], w3 = c.w[1];
		}
		return chunk16{{w0, w1, w2, w3}};
	}
	NO_UNROLL
	for (int i = 0; i < 16 && dim + i < view.hdim; i++) {
		u32 x = (u32)*view.at(row, dim + i) << i % 4 * 8;

		w0 |= i / 4 == 0 ? x : 0, w1 |= i / 4 == 1 ? x : 0;
		w2 |= i / 4 == 2 ? x : 0, w3 |= i / 4 == 3 ? x : 0;
	}
	return chunk16{{w0, w1, w2, w3}};
}

/* Rows of Q as multiply_bytes_abt() reads them. */
template <int ROWS, int HDIM, int THREADS, class Tile, class View>
DEV void put_queries(const Tile &to, const View &view, i32 first, i32 end)
{
	const int CHUNKS = HDIM / 16;

	NO_UNROLL
	for (i32 index = thread_id(); index < ROWS * CHUNKS; index += THREADS) {
		i32 r = index / CHUNKS, c = index % CHUNKS;
		chunk16 x = load_bytes(view, first + r, c * 16, first + r < end), low, high;

		UNROLL
		for (int i = 0; i < 4; i++)
			Widening<F16, E4M3>::widen(x.w[i], &low.w[i], &high.w[i]);
		*(chunk16 *)(to.lds + Tile::S::offset(r, 2 * c)) = low;
		*(chunk16 *)(to.lds + Tile::S::offset(r, 2 * c + 1)) = high;
	}
}

/* The largest of exponents, of two of bf16. */
DEV u32 largest_exponent(u32 most, u32 pair)
{
	return (u32)max_of((i32)most, max_of((i32)(pair >> 23 & 0xff), (i32)(pair >> 7 & 0xff)));
}
DEV u32 scale_into_f16(u32 pair, float scale)
{
	return F16::pack2(BF16::to_float((u16)pair) * scale,
			  BF16::to_float((u16)(pair >> 16)) * scale);
}

/* Queries of 16 bits, laid out likewise; @factors: of each row, what its scores are to be
 * multiplied by. The lanes of a row are neighbours. */
template <class Element, int ROWS, int HDIM, int THREADS, class Tile, class View>
DEV void put_wide_queries(const Tile &to, const View &view, i32 first, i32 end, float *factors)
{
	const int CHUNKS = HDIM / 16, WIDTH = power_of_2_from(CHUNKS);
	static_assert(WIDTH <= FMHA_WAVE && ROWS * WIDTH % FMHA_WAVE == 0, "lanes of whole rows");

	NO_UNROLL
	for (i32 index = thread_id(); index < ROWS * WIDTH; index += THREADS) {
		i32 r = index / WIDTH, c = index % WIDTH;
		bool valid = first + r < end && c < CHUNKS;
		chunk16 x = load_chunk<Element, Element>(view, first + r, c * 16, valid),
			y = load_chunk<Element, Element>(view, first + r, c * 16 + 8, valid);
		float factor = 1.0f;

		if constexpr (SameType<Element, BF16>::value) {
			u32 most = 0;

			UNROLL
			for (int i = 0; i < 4; i++)
				most = largest_exponent(largest_exponent(most, x.w[i]), y.w[i]);
			UNROLL
			for (int lanes = 1; lanes < WIDTH; lanes *= 2)
				most = max_of((i32)most,
					      (i32)shuffle_word(most, lane_id() ^ lanes));
			/* of infinity and of nearly nothing, as of the next one */
			most = clamp((i32)most, 15, 254);
			factor = bits_to_float((most - 14) << 23);
			float scale = bits_to_float((268 - most) << 23);

			UNROLL
			for (int i = 0; i < 4; i++) {
				x.w[i] = scale_into_f16(x.w[i], scale);
				y.w[i] = scale_into_f16(y.w[i], scale);
			}
		}
		if (c == 0)
			factors[r] = factor;
		if (c < CHUNKS) {
			*(chunk16 *)(to.lds + Tile::S::offset(r, 2 * c)) =
				chunk16{{x.w[0], x.w[2], y.w[0], y.w[2]}};
			*(chunk16 *)(to.lds + Tile::S::offset(r, 2 * c + 1)) =
				chunk16{{x.w[1], x.w[3], y.w[1], y.w[3]}};
		}
	}
}

#endif
