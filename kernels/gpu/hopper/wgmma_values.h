/* SPDX-License-Identifier: MIT */
/*
 * wgmma_values.h: the operands of O += P V, by the type of V. 16-bit values are read as the copy
 * engine brings them. 8-bit ones are widened by warps of the loading warpgroup: under queries of 16
 * bits to their type, and of e4m3 everywhere to f16, and multiplied with P in f16: tensor cores
 * keep 13 bits of a sum of 8-bit products, and cut off of each product what is below; of equal ones
 * they would add no more than some thousands.
 */
#ifndef FMHA_GPU_WGMMA_VALUES_H
#define FMHA_GPU_WGMMA_VALUES_H

#include "wgmma.h"

/* Where a lane's two rows of O go, 0: nowhere, and what they are multiplied by, 0: they are zeros. */
struct WgmmaRows {
	char *to[2];
	float factor[2];
};

/* The values of a tile of 16 TN keys and 16 TD dimensions. Unit: of P. */
template <class Core, class Element, int TN, int TD> struct WgmmaValues {
	static const bool WIDENED = false;
	static const int SLAB = slab_bytes(16 * TN), BYTES = slabs_of(16 * TD) * SLAB;
	typedef OperandTile<Core, 1, TN> Weights;
	typedef WeightUnit<Element> Unit;

	METHOD static Weights round(const RegTile<Core, 1, TN> &s) { return round_to_operand(s); }

	METHOD static void multiply(RegTile<Core, 1, TD> &o, const Weights &p, u32 tile)
	{
		u64 v = wgmma_descriptor(tile, SLAB);

		UNROLL
		for (int i = 0; i < TN; i++)
			Wgmma<Element, TD>::across(o.t[0], p.t[0][i].r, v + i * STEP_ACROSS);
	}

	/* dtype: of O, which is that of V. */
	METHOD static void store(const RegTile<Core, 1, TD> &o, const WgmmaRows &rows, i32 hdim,
				 i32, i32 lane)
	{
		store_halves(o, rows, hdim, lane, Element());
	}

	/* Of splits, or of values of 8 bits. */
	METHOD static void store_floats(const RegTile<Core, 1, TD> &o, const WgmmaRows &rows,
					i32 hdim)
	{
		UNROLL
		for (int r = 0; r < 2; r++)
			UNROLL
			for (int d = 0; d < 2 * TD; d++) {
				const float *x = o.t[0][d / 2].x + d % 2 * 4 + 2 * r;
				float factor = rows.factor[r];
				i32 dim = d * 8 + lane_id() % 4 * 2;

				if (rows.to[r] && dim < hdim)
					*(chunk8 *)(rows.to[r] + dim * 4) =
						factor == 0.0f
							? chunk8{{0, 0}}
							: chunk8{{float_to_bits(x[0] * factor),
								  float_to_bits(x[1] * factor)}};
			}
	}

	/* Chunks of 16 bytes. */
	template <class To>
	METHOD static void store_halves(const RegTile<Core, 1, TD> &o, const WgmmaRows &rows,
					i32 hdim, i32 lane, To)
	{
		UNROLL
		for (int r = 0; r < 2; r++) {
			float factor = rows.factor[r];

			UNROLL
			for (int d = 0; d < TD; d += 2) {
				u32 x[4];
				i32 dim = d * 16 + lane % 4 * 8;

				UNROLL
				for (int i = 0; i < 4; i++) {
					const float *pair = o.t[0][d + i / 2].x + i % 2 * 4 + 2 * r;

					x[i] = factor == 0.0f ? 0
							      : To::pack2(pair[0] * factor,
									  pair[1] * factor);
				}
				turn_words(x, lane);
				if (rows.to[r] && dim < hdim)
					*(chunk16 *)(rows.to[r] +
						     dim * 2) = chunk16{{x[0], x[1], x[2], x[3]}};
			}
		}
	}
};

/* A tile of 16 TN keys and 16 TD dimensions on its way from 8 bits to 16. */
template <class To, class From, int TN, int TD> struct WidenedTile {
	static const int SLAB = slab_bytes(16 * TN);

	/*
	 * Warp `warp` of `warps` widens its share of a tile; keys before `begin` and from `end` on
	 * become zeros. A lane has one of 16 keys and every other chunk of 16 dimensions: where a
	 * chunk lies is a lane's place and a constant. A store waits for its load, so several are
	 * under way.
	 */
	static const int AT_ONCE = TD <= 10 ? TD / 2 : TD / 4;
	static_assert(TD / 2 % AT_ONCE == 0, "as many each time");
	METHOD static void widen_tile(u32 to, u32 from, i32 begin, i32 end, i32 warp, i32 warps)
	{
		i32 lane = lane_id(), side = lane / 16;

		NO_UNROLL
		for (i32 n = warp; n < TN; n += warps) {
			i32 key = n * 16 + lane % 16;
			u32 keep = key >= begin && key < end ? ~0u : 0, at = from + key * 128,
			    wide = to + key * 128;
			u32 x[AT_ONCE][4], y[2][4], place = (side ^ key) % 8 * 16,
						    wide_place = (2 * side ^ key) % 8 * 16;

			UNROLL
			for (int d = 0; d < TD / 2; d++) {
				UNROLL
				for (int b = 0; b < AT_ONCE && d % AT_ONCE == 0; b++)
					load_shared_16(at + (d + b) / 4 * SLAB +
							       (place ^ (d + b) % 4 * 32),
						       x[b]);
				UNROLL
				for (int i = 0; i < 4; i++)
					Widening<To, From>::widen(x[d % AT_ONCE][i] & keep,
								  &y[i / 2][i % 2 * 2],
								  &y[i / 2][i % 2 * 2 + 1]);
				UNROLL
				for (int i = 0; i < 2; i++)
					store_shared_16(
						wide + d / 2 * SLAB +
							(wide_place ^ (d % 2 * 64 + i * 16)),
						y[i]);
			}
		}
	}
};

/* Of 8 bits beside weights and results of 16. */
template <class Core, class Element, class From, int TN, int TD>
struct NarrowValues : WgmmaValues<Core, Element, TN, TD>, WidenedTile<Element, From, TN, TD> {
	static const bool WIDENED = true;
};

/* f16 has as many binades below 1 as above: weights lie in units of 2^-7 and may grow by 2^8. */
struct WidenedUnit {
	static const int SHIFT = 7, MOST = 15;
};

template <class Core, int TN, int TD>
struct WgmmaValues<Core, E4M3, TN, TD>
	: WgmmaValues<Core, F16, TN, TD>, WidenedTile<F16, E4M3, TN, TD> {
	typedef WgmmaValues<Core, F16, TN, TD> Halves;
	static const bool WIDENED = true;
	typedef WidenedUnit Unit;

	/* dtype: of O. */
	METHOD static void store(const RegTile<Core, 1, TD> &o, const WgmmaRows &rows, i32 hdim,
				 i32 dtype, i32 lane)
	{
		if (dtype == ABI_F32)
			Halves::store_floats(o, rows, hdim);
		else if (dtype == ABI_F16)
			Halves::store_halves(o, rows, hdim, lane, F16());
		else
			Halves::store_halves(o, rows, hdim, lane, BF16());
	}
};

#endif
