/* SPDX-License-Identifier: MIT */
/*
 * fwd_wgmma_cap.h: the softmax of capped scores on Hopper, from raw products. A score is
 * cap * tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)), of which the first cap is left out; it
 * grows with x, so that a row's maximum is that of its raw products, and a weight is one way from
 * its product: exponential, reciprocal, exponential.
 *
 * Special functions are what there is least of, and a warp waits long for each. Where all of a
 * warp's products are small, as most are, tanh is a polynomial. Else four scores of a row share a
 * reciprocal, and while some wait for theirs the exponentials of those before and behind them run.
 * What is masked becomes a number before, so that only a NaN that a row sees reaches it.
 */
#ifndef FMHA_GPU_FWD_WGMMA_CAP_H
#define FMHA_GPU_FWD_WGMMA_CAP_H

#include "block/scores.h"
#include "tma.h"

/* The softmax of a warp's 16 rows and TN tiles of 16 columns. A row's m is the largest product for
 * which its origin, the exponent that weighs 1, need not move. */
template <class Core, int TN, class Unit> struct CappedSoftmax {
	typedef RegTile<Core, 1, TN> Scores;
	typedef Softmax<Core, 1, true, false, Unit> Plain;
	static_assert(Core::E == 8 && Core::STATS == 2, "elements 0, 1, 4 and 5 are of one row");
	static const int QUADS = 2 * TN;
	/* beyond tanh is 1 in float32, and a product of four still finite */
	static constexpr float MOST = 24;

	/* tanh(y) = y (T0 + T1 y^2 + T2 y^4 + T3 y^6) within 1.3e-7 where |y| is at most SMALL. */
	static constexpr float SMALL = 0.5f;
	static constexpr float T0 = 0.99999768f, T1 = -0.33320656f, T2 = 0.13145146f,
			       T3 = -0.04337248f;

	/* Numbers of a launch, which lie in shared memory: ptxas would keep them in registers.
	 * SLOPE, SPAN: the exponent of a product x is span / (1 + 2^(slope x)); the slope has the
	 * scale's sign, and where it is negative find_origin() turns the products round. NEAR:
	 * products that the polynomial serves, with these FACTORS. LIMIT: beyond it all products
	 * are the same. */
	enum { SLOPE, SPAN, NEAR, LIMIT, FACTORS, NUMBERS = FACTORS + 4 };
	static const int BYTES = NUMBERS * 4;

	u32 numbers; /* their address */
	float origin[Core::STATS];

	METHOD static void prepare(u32 to, float scale, float cap)
	{
		const float MANY = 1 << 20;
		/* No scale is 0: what is masked stays below all others. */
		float size = magnitude_of(scale), ratio = larger(size * reciprocal(cap), 1e-30f),
		      slope = 2 * FMHA_LOG2_E * ratio;
		float square = ratio * ratio, unit = FMHA_LOG2_E * size;
		bool fits = ratio * MANY > 1.0f && ratio < MANY; /* its powers are numbers */

		store_shared(to + 4 * SLOPE, scale < 0 ? -slope : slope);
		store_shared(to + 4 * SPAN, -2 * FMHA_LOG2_E * cap);
		store_shared(to + 4 * NEAR, fits ? SMALL * reciprocal(ratio) : -1.0f);
		store_shared(to + 4 * LIMIT, MOST * reciprocal(slope));
		store_shared(to + 4 * FACTORS, unit * T0);
		store_shared(to + 4 * FACTORS + 4, unit * square * T1);
		store_shared(to + 4 * FACTORS + 8, unit * square * square * T2);
		store_shared(to + 4 * FACTORS + 12, unit * square * square * square * T3);
	}
	METHOD float number(int which) const { return load_shared(numbers + 4 * which); }

	METHOD void init()
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++)
			origin[r] = number(SPAN);
	}

	/* The maximum as a score, but for the cap that is left out. */
	METHOD float maximum(float m, int r) const
	{
		return m == minus_infinity() ? m : origin[r] * FMHA_LN_2;
	}

	/* The largest size in a lane's two rows. A NaN is none. */
	METHOD static float largest_size(const Scores &s)
	{
		float most[2] = {0, 0};

		UNROLL
		for (int n = 0; n < TN * Core::E; n++)
			most[n % 2] = larger(most[n % 2],
					     magnitude_of(s.t[0][n / Core::E].x[n % Core::E]));
		return larger(most[0], most[1]);
	}

	/* Whether find_origin() has anything to do. Of a negative scale it turns the products
	 * round. */
	template <class Rows> METHOD bool may_move(Rows &rows, float size) const
	{
		return size > rows.m(0, 0) || size > rows.m(0, 1) || number(SLOPE) < 0;
	}

	/* But what is masked. */
	METHOD static void turn(float &x) { x = x == minus_infinity() ? x : -x; }

	/* Maxima may lag; returns whether *ret_factor must multiply what was summed so far. */
	template <class Rows>
	METHOD bool find_origin(Rows &rows, Scores &s, RowVector<Core, 1> *ret_factor)
	{
		const float limit = number(LIMIT), signed_slope = number(SLOPE),
			    slope = magnitude_of(signed_slope), span = number(SPAN);
		float high[Core::STATS];
		bool moves = false, beyond = false;

		if (any_of_wave(signed_slope < 0))
			UNROLL
			for (int n = 0; n < TN * Core::E; n++)
				turn(s.t[0][n / Core::E].x[n % Core::E]);
		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			high[r] = Plain::highest(s, 0, r, minus_infinity());
			moves = moves || high[r] > rows.m(0, r);
			beyond = beyond || high[r] > limit;
		}
		if (!any_of_wave(moves))
			return false;
		if (any_of_wave(beyond))
			bound(s, limit);
		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			float top = fminf(high[r], limit);
			float to = span * reciprocal(1.0f + exp2_fast(top * slope));

			bool higher = high[r] > rows.m(0, r);
			/* A score grows as its product does, at most. */
			float next = fminf(
				top - 4 * Plain::LAG * reciprocal(slope * span * FMHA_LN_2), limit);

			to = higher ? to : origin[r];
			ret_factor->v[0][r] = exp2_fast(origin[r] - to);
			rows.l(0, r) *= ret_factor->v[0][r];
			origin[r] = to;
			rows.m(0, r) = higher ? next : rows.m(0, r);
		}
		return true;
	}

	/* A NaN stays one. */
	METHOD static void bound(Scores &s, float most)
	{
		UNROLL
		for (int n = 0; n < TN * Core::E; n++) {
			float &x = s.t[0][n / Core::E].x[n % Core::E];

			x = x > most ? most : x;
		}
	}

	/* S becomes P; *ret_sum: of this lane's. */
	METHOD void exponentiate(Scores &s, float (&ret_sum)[Core::STATS]) const
	{
		const float slope = magnitude_of(number(SLOPE)), span = number(SPAN);

		UNROLL
		for (int n = 0; n < TN * Core::E; n++) {
			float &x = s.t[0][n / Core::E].x[n % Core::E];
			const int r = Core::stat(n % Core::E);

			x = exp2_fast(span * reciprocal(1.0f + exp2_fast(x * slope)) - origin[r]);
			ret_sum[r] += x;
		}
	}

	/* The same where all products are near. */
	METHOD void exponentiate_near(Scores &s, float (&ret_sum)[Core::STATS]) const
	{
		const float half = -0.5f * number(SPAN),
			    zero[Core::STATS] = {origin[0] + half, origin[1] + half};
		const float t0 = number(FACTORS), t1 = number(FACTORS + 1),
			    t2 = number(FACTORS + 2), t3 = number(FACTORS + 3);

		UNROLL
		for (int n = 0; n < TN * Core::E; n++) {
			float &x = s.t[0][n / Core::E].x[n % Core::E], y = x * x;
			const int r = Core::stat(n % Core::E);

			x = exp2_fast(x * (t0 + y * (t1 + y * (t2 + y * t3))) - zero[r]);
			ret_sum[r] += x;
		}
	}

	/* The same where none is beyond the limit: four scores of a row at a time. */
	struct Quad {
		float y[4], low, high, all;
	};
	METHOD static constexpr int element(int quad, int i)
	{
		return i / 2 * 4 + quad % 2 * 2 + i % 2;
	}
	METHOD void exponentiate_quads(Scores &s, float (&ret_sum)[Core::STATS]) const
	{
		const float slope = magnitude_of(number(SLOPE)), span = number(SPAN);
		Quad quads[QUADS];

		UNROLL
		for (int q = 0; q < QUADS + 2; q++) {
			if (q < QUADS)
				begin(quads[q], s, q, slope);
			if (q >= 1 && q <= QUADS)
				divide(quads[q - 1]);
			if (q >= 2)
				end(quads[q - 2], s, q - 2, span, &ret_sum[q % 2]);
		}
	}
	METHOD static void begin(Quad &quad, const Scores &s, int q, float slope)
	{
		UNROLL
		for (int i = 0; i < 4; i++)
			quad.y[i] = exp2_fast(s.t[0][q / 2].x[element(q, i)] * slope);
	}
	METHOD static void divide(Quad &quad)
	{
		UNROLL
		for (int i = 0; i < 4; i++)
			quad.y[i] += 1.0f;
		quad.low = quad.y[0] * quad.y[1];
		quad.high = quad.y[2] * quad.y[3];
		quad.all = reciprocal(quad.low * quad.high);
	}
	METHOD void end(const Quad &quad, Scores &s, int q, float span, float *sum) const
	{
		float all = quad.all * span, low = quad.high * all, high = quad.low * all;

		UNROLL
		for (int i = 0; i < 4; i++) {
			float p = exp2_fast(quad.y[i ^ 1] * (i < 2 ? low : high) - origin[q % 2]);

			s.t[0][q / 2].x[element(q, i)] = p;
			*sum += p;
		}
	}

	/* Products become scores, of problems that add something to them. Nothing is masked yet: a
	 * NaN is kept out of the other three that share its reciprocal. */
	METHOD static void cap(Scores &s, float scale, float soft_cap)
	{
		const float x_scale = 2 * FMHA_LOG2_E * scale * reciprocal(soft_cap);

		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int e = 0; e < Core::E; e += 4) {
				float *x = s.t[0][n].x + e, y[4];

				UNROLL
				for (int i = 0; i < 4; i++)
					y[i] = 1.0f + exp2_fast(fminf(x[i] * x_scale, MOST));
				float low = y[0] * y[1], high = y[2] * y[3];
				float all = reciprocal(low * high) * (-2 * soft_cap);

				high *= all; /* now for the low ones, and the other way round */
				low *= all;
				x[0] = x[0] * 0.0f + y[1] * high;
				x[1] = x[1] * 0.0f + y[0] * high;
				x[2] = x[2] * 0.0f + y[3] * low;
				x[3] = x[3] * 0.0f + y[2] * low;
			}
	}

	/* Sums again, of what is left of P. */
	METHOD static void add_up(const Scores &s, float (&ret_sum)[Core::STATS])
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++)
			ret_sum[r] = 0;
		UNROLL
		for (int n = 0; n < TN * Core::E; n++)
			ret_sum[Core::stat(n % Core::E)] += s.t[0][n / Core::E].x[n % Core::E];
	}
};

#endif
