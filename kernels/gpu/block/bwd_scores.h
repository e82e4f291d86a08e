/* SPDX-License-Identifier: MIT */
/*
 * bwd_scores.h: from S and dP to P and dS = P (dP - D), in the register tiles of a wave:
 *
 *   keys stationary:     S is K Q^T, rows are keys, columns queries
 *   queries stationary:  S is Q K^T, rows are queries, columns keys
 *
 * Facts is where a main loop keeps what is known of the block: at (BackwardPlace), row_of(m), the
 * first row of 16-row tile m, and seq(), head(), band(), bias(), dbias(), be it in registers or in
 * LDS. FETCHES_BIAS: it has the tile's bias, and adds it. HIDES: what a mask that is data hides is
 * its own matter.
 */
#ifndef FMHA_GPU_BWD_SCORES_H
#define FMHA_GPU_BWD_SCORES_H

#include "bwd_block.h"

template <class C, bool KEYS_STATIONARY, int TM, int TN, class Facts> struct BackwardScores {
	typedef typename C::Core Core;
	typedef typename Core::Acc Acc;
	typedef RegTile<Core, TM, TN> Scores;
	const Facts &facts;

	METHOD static i32 query(i32 row, i32 column) { return KEYS_STATIONARY ? column : row; }
	METHOD static i32 key(i32 row, i32 column) { return KEYS_STATIONARY ? row : column; }

	/* Under a soft cap, which ones count: on AMD by products of -inf, for which a branch an
	 * element, which costs it half of its registers, would be in gradients(). */
	static const bool MASKS_PRODUCTS = !C::SOFTCAP || !FMHA_NVIDIA;

	/*
	 * What makes S's products logits that count, while the registers of the second product are
	 * free. Under a soft cap the gradient needs the raw products too: there the rest waits for
	 * gradients().
	 */
	METHOD void prepare(Scores &s, i32 column, bool masked) const
	{
		if (C::LOGITS && !C::SOFTCAP)
			make_logits(s, column);
		if (MASKS_PRODUCTS && masked)
			mask(s, column);
		if constexpr (MASKS_PRODUCTS && C::MASK_DATA != MASK_DATA_NONE && !Facts::HIDES)
			mask_data(s, column);
	}

	METHOD DataMask<C> data() const { return DataMask<C>{facts.at.a.mask_data, facts.seq()}; }
	METHOD void mask_data(Scores &s, i32 column) const
	{
		const auto row_of = [&](int m) { return facts.row_of(m); };

		if constexpr (KEYS_STATIONARY)
			data().hide_turned(s, column, row_of, facts.head());
		else
			data().hide(s, column, row_of, [&](i32 row) {
				return RowPlace{row, facts.head()};
			});
	}

	METHOD void make_logits(Scores &s, i32 column) const
	{
		float slope;

		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				i32 row = facts.row_of(m) + Core::stat_row(r);

				UNROLL
				for (int n = 0; n < TN; n++)
					UNROLL
					for (int e = 0; e < Core::E; e++) {
						i32 at = column + n * 16 + Core::column(e);
						float &x = s.t[m][n].x[e];

						if (Core::stat(e) == r)
							x = facts.at.modifiers.logit(
								x, facts.head(), query(row, at),
								key(row, at), &slope);
					}
				if (C::BIAS == BIAS_MATRIX)
					add_bias(s.t[m], row, column, 0, r);
			}
	}

	/* To tiles of a row from the n-th on, which begin at (row, column): elements of row
	 * statistic r. */
	template <int N> METHOD void add_bias(Acc (&t)[N], i32 row, i32 column, int n, int r) const
	{
		if constexpr (Facts::FETCHES_BIAS)
			facts.fetched_bias.add(t, n);
		else
			bias_row(facts.bias(), row, column).add(t, r);
	}

	METHOD BiasRow<C> bias_row(const BiasView &t, i32 row, i32 column) const
	{
		return BiasRow<C>::template make<KEYS_STATIONARY>(t, facts.seq(), RowPlace{row, 0},
								  column);
	}

	/* Products that must not count become -inf. */
	METHOD void mask(Scores &s, i32 column) const
	{
		const Band &band = facts.band();
		i32 from = column + Core::column(0); /* so that a lane's columns are constants */

		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				i32 row = facts.row_of(m) + Core::stat_row(r), low, high, sinks = 0;

				if (KEYS_STATIONARY) {
					low = row - band.anchor_right;
					high = row < band.sinks ? 1 << 30 : row - band.anchor_left;
					if (row >= band.end)
						high = low - 1;
				} else {
					low = band.first(row);
					high = band.last(row);
					sinks = band.sinks - from;
				}
				low -= from;
				high -= from;
				UNROLL
				for (int n = 0; n < TN; n++)
					UNROLL
					for (int e = 0; e < Core::E; e++) {
						i32 at = n * 16 + Core::column(e) - Core::column(0);

						if (Core::stat(e) == r &&
						    (at > high || (at < low && (KEYS_STATIONARY ||
										at >= sinks))))
							s.t[m][n].x[e] = minus_infinity();
					}
			}
	}

	/*
	 * S becomes P, dropped, for dV; dP becomes dS but for the scale. Stats: lse(m, n, e) and
	 * d(m, n, e) of an element's query; take(m, n, row, dZ) gets what is the gradient of the
	 * logits, for dBias.
	 */
	template <class Stats, class Take>
	METHOD void gradients(Scores &s, Scores &dp, i32 column, bool masked, const Stats &stats,
			      const Take &take) const
	{
		/* Two tiles beside each other along the keys share a patch of random bytes: one
		 * after the other. */
		const bool PATCHES = C::DROPOUT && (KEYS_STATIONARY ? TM : TN) % 2 == 0;
		const bool DOWN = KEYS_STATIONARY && PATCHES;
		DropoutTile<Core, KEYS_STATIONARY> random;

		UNROLL
		for (int t = 0; t < TM * TN; t++) {
			const int m = DOWN ? t % TM : t / TN, n = DOWN ? t / TM : t % TN;
			i32 row = Core::anew(facts.row_of(m));
			Acc bias[1] = {}, dz;

			if (C::DROPOUT && PATCHES && (KEYS_STATIONARY ? m : n) % 2)
				make_random<true>(random, row, column + n * 16);
			else if (C::DROPOUT)
				make_random<false>(random, row, column + n * 16);
			UNROLL
			for (int r = 0; r < Core::STATS && C::SOFTCAP && C::BIAS == BIAS_MATRIX;
			     r++)
				add_bias(bias, row + Core::stat_row(r), column + n * 16, n, r);
			UNROLL
			for (int e = 0; e < Core::E; e++) {
				dz.x[e] = element(s.t[m][n].x[e], dp.t[m][n].x[e],
						  row + Core::row(e),
						  column + n * 16 + Core::column(e), bias[0].x[e],
						  stats.lse(m, n, e), stats.d(m, n, e), masked,
						  C::DROPOUT ? random.byte(e) : 0);
				if (C::SOFTCAP && e % 2 == 1)
					/* two hyperbolic tangents at once are enough */
					Core::step();
			}
			take(m, n, row, dz);
		}
	}

	/* Random bytes of a tile: made, or read where the forward pass stored them. */
	template <bool SAME_PATCH>
	METHOD void make_random(DropoutTile<Core, KEYS_STATIONARY> &random, i32 row,
				i32 column) const
	{
		const abi_bwd_args &a = facts.at.a;
		i32 batch_head = facts.seq().batch * a.nhead_q + facts.head();

		if (a.dropout.randval.data)
			random.read(a.dropout.randval, facts.seq(), facts.head(), row, column);
		else
			random.template make<SAME_PATCH>(a.dropout, batch_head, row, column);
	}

	/* One element, at (row, column). s: raw product or logit in, P out; dp: raw product in, dS
	 * out. */
	METHOD float element(float &s, float &dp, i32 row, i32 column, float bias, float lse,
			     float d, bool masked, u32 byte) const
	{
		const abi_dropout &dropout = facts.at.a.dropout;
		const Modifiers<C> &modifiers = facts.at.modifiers;
		float x = s, slope = 1, keep = 1;

		if (C::SOFTCAP) {
			i32 i = query(row, column), j = key(row, column);

			x = modifiers.logit(x, facts.head(), i, j, &slope) + bias;
			if (MASKS_PRODUCTS ? s == minus_infinity()
					   : masked && !facts.band().sees(i, j))
				x = minus_infinity();
			if constexpr (!MASKS_PRODUCTS && C::MASK_DATA != MASK_DATA_NONE &&
				      !Facts::HIDES)
				if (!data().sees(i, facts.head(), j))
					x = minus_infinity();
		}
		float p = exp2_fast(x * modifiers.unit + lse);

		if (C::DROPOUT)
			keep = byte <= (u32)dropout.keep_at_most ? dropout.p_keep_inverse : 0.0f;
		float dz = p * (dp * keep - d);

		if (p == 0.0f)
			dz = 0; /* a row with nothing to attend to may have any D */
		s = p * keep;
		dp = dz * slope;
		return dz;
	}
};

#endif
