/* SPDX-License-Identifier: MIT */
/*
 * slab_softmax.h: the online softmax of fwd_amd.h, of the one row whose scores a lane holds, by as
 * few instructions as can be; and how its weights become operands. What it comes to is scores.h's m
 * and l.
 */
#ifndef FMHA_GPU_SLAB_SOFTMAX_H
#define FMHA_GPU_SLAB_SOFTMAX_H

#include "block/scores.h"
#include "slab.h"

/*
 * Weights are in units of 2^-SHIFT, maxima may lag by LAG (in powers of two), and sums of packed
 * weights are to be multiplied by LOST.
 *
 * RDNA's products share the issue of vector instructions: there weights are cut off where they
 * would be rounded, an instruction a weight less, two in f16. LOST is by how much they become
 * smaller, on average over sums to which every binade's part contributes alike. By an exponent's
 * shift, which costs nothing, they come that much larger, so that those which are numbers of the
 * type (1, of a row's only key) stay themselves; others are off by up to 0.72 units of the last
 * place instead of 0.5. f16 has few bits below 2^-14, which is 2^-18 of 1 once it is shifted;
 * dropout may multiply what is at most 2^8 by as much again.
 */
template <class T> struct SlabWeights : RoundToNearest {
	static constexpr float SHIFT = WeightUnit<T>::SHIFT, LAG = WeightUnit<T>::MOST - SHIFT,
			       LOST = 1;
	static const bool FALLS = WeightUnit<T>::SHIFT > 0;
};
#if FMHA_CORE != FMHA_CORE_MFMA
template <> struct SlabWeights<BF16> {
	/* log2(LOST), 1 + 2^-9 / ln 2 */
	static constexpr float SHIFT = 0.00405946f, LAG = 8, LOST = 1.00281777f;
	static const bool FALLS = false;

	METHOD static u32 pack(BF16, float low, float high)
	{
		return __builtin_amdgcn_perm(float_to_bits(high), float_to_bits(low), 0x07060302);
	}
};
template <> struct SlabWeights<F16> {
	/* 4 + log2(LOST), 1 + 2^-12 / ln 2 */
	static constexpr float SHIFT = 4.00050806f, LAG = 4, LOST = 1.00035222f;
	static const bool FALLS = false;

	METHOD static u32 pack(F16, float low, float high)
	{
		return __builtin_bit_cast(u32, __builtin_amdgcn_cvt_pkrtz(low, high));
	}
};
#endif

/*
 * FALLS: of types with few binades. A key that weighs as much as 20,000 others together, as a sink
 * does, would leave nothing of those that come after it, so zero follows the maxima of tiles down,
 * too. FALL is how far, in powers of two, a tile's maximum may be below it; FALLS_TO by how much it
 * is above that once it has come down, so that maxima that go up and down seldom move it; and it
 * stays DEEPEST_FALL below what was summed, beside which float32 would lose less.
 */
#define FALL 8
#define FALLS_TO 4
#define DEEPEST_FALL 24

/* A logarithm below all others: -inf less this is -inf, where less itself it would be NaN. */
#define NO_SCORE_YET -3.40282347e38f

/* Logarithms are to base 2. */
template <class Core, class Weights, bool LIMITS> struct SlabSoftmax {
	float zero;   /* the logarithm of what weighs 1, and so that of what sums are in units of */
	typedef float Pair __attribute__((ext_vector_type(2)));
	Pair sum; /* this lane's share; RDNA adds to both at once */

	METHOD void init()
	{
		zero = NO_SCORE_YET;
		sum = Pair(0.0f);
	}

	/* S becomes P; returns whether *ret_factor must multiply what was summed so far, the same
	 * for all lanes. */
	template <int TN> METHOD bool update(RegTile<Core, 1, TN> &s, float unit, float *ret_factor)
	{
		float top = minus_infinity();

		UNROLL
		for (int i = 0; i < TN * Core::E; i++)
			top = larger(top, s.t[0][i / Core::E].x[i % Core::E]);
		top = Core::row_max(top);

		bool lags = any_of_wave(is_far(top * unit - zero) || (LIMITS && is_huge(top)));

		if (lags) {
			if (LIMITS)
				limit(s, &top);
			*ret_factor = move(top * unit - Weights::SHIFT);
		}
		UNROLL
		for (int i = 0; i < TN * Core::E; i++) {
			float *x = s.t[0][i / Core::E].x + i % Core::E;

			if (FMHA_CORE != FMHA_CORE_MFMA)
				x[0] = x[0] * unit - zero;
			else if (i % 2 == 0) { /* CDNA has one instruction for two of these */
				Pair logarithms = Pair{x[0], x[1]} * unit - zero;

				x[0] = logarithms[0], x[1] = logarithms[1];
			}
			x[0] = exp2_fast(x[0]);
			sum[i % 2] += x[0];
			if (i % 2 == 1 && FMHA_CORE != FMHA_CORE_MFMA)
				/* an even one and an odd one: two additions, one instruction */
				sum = plain_register(sum);
		}
		return lags;
	}

	/* As Softmax::limit(), of tiles that move zero: others may have huge scores where those
	 * weigh nothing. */
	template <int TN> METHOD static void limit(RegTile<Core, 1, TN> &s, float *top)
	{
		*top = limited(*top);
		UNROLL
		for (int i = 0; i < TN * Core::E; i++) {
			float &x = s.t[0][i / Core::E].x[i % Core::E];

			x = limited(x);
		}
	}

	/* Judges the logarithm of a tile's highest weight, in units. */
	METHOD static bool is_far(float high)
	{
		return high > Weights::LAG + Weights::SHIFT ||
		       (Weights::FALLS && high < Weights::SHIFT - FALL);
	}

	/* Returns the factor of what was summed before. */
	METHOD float move(float next)
	{
		float before = zero, all = Core::row_sum(sum[0] + sum[1]);

		if (Weights::FALLS && next != minus_infinity() && next < before - FALL)
			zero = larger(next + FALLS_TO,
				      before - larger(DEEPEST_FALL - log2_fast(all), 0.0f));
		else
			zero = larger(before, next);

		float factor = exp2_fast(before - zero);

		sum *= factor;
		return factor;
	}

	/* In units of 1, and of all lanes that have scores of the row. */
	METHOD SoftmaxRows<Core, 1> rows() const
	{
		SoftmaxRows<Core, 1> x;

		x.m(0, 0) = zero == NO_SCORE_YET ? minus_infinity() : zero;
		x.l(0, 0) = Core::row_sum(sum[0] + sum[1]);
		return x;
	}
};

#endif
