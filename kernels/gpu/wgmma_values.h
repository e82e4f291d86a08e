/* SPDX-License-Identifier: MIT */
/*
 * wgmma_values.h: the operands of O += P V, by the type of V. 16-bit values are read as the copy engine brings
 * them. 8-bit ones have to lie along the keys: warps of the loading warpgroup turn each tile, in blocks of 16
 * keys x 16 dimensions, and permute both on the way:
 *
 *   keys        place 4c + 2h + i of 16 has key 8h + 2c + i, so that four neighbouring places are what one lane
 *               of a tile of P holds of a row
 *   dimensions  row 8i + n of 16 has dimension 2n + i, so that a lane of O holds four neighbouring dimensions
 *               and the rows that are stored at once lie in different banks
 */
#ifndef FMHA_GPU_WGMMA_VALUES_H
#define FMHA_GPU_WGMMA_VALUES_H

#include "wgmma.h"

/* Where a lane's two rows of O go, 0: nowhere, and what they are multiplied by, 0: they are zeros. */
struct WgmmaRows {
	char *to[2];
	float factor[2];
};

/* Of a tile of 16 TN keys and 16 TD dimensions. */
template <class Core, class Element, int TN, int TD> struct WgmmaValues {
	static const bool TURNED = false;
	static const int SLAB = slab_bytes(16 * TN), BYTES = slabs_of(16 * TD) * SLAB;
	typedef OperandTile<Core, 1, TN> Weights;

	METHOD static Weights round(const RegTile<Core, 1, TN> &s) { return round_to_operand(s); }

	METHOD static void multiply(RegTile<Core, 1, TD> &o, const Weights &p, u32 tile)
	{
		u64 v = wgmma_descriptor(tile, SLAB);

		UNROLL
		for (int i = 0; i < TN; i++)
			Wgmma<Element, TD>::across(o.t[0], p.t[0][i].r, v + i * STEP_ACROSS);
	}

	/* dtype: of O, which is that of V. Chunks of 16 bytes. */
	METHOD static void store(const RegTile<Core, 1, TD> &o, const WgmmaRows &rows, i32 hdim, i32)
	{
		UNROLL
		for (int r = 0; r < 2; r++) {
			float factor = rows.factor[r];

			UNROLL
			for (int d = 0; d < TD; d += 2) {
				u32 x[4];
				i32 dim = d * 16 + lane_id() % 4 * 8;

				UNROLL
				for (int i = 0; i < 4; i++) {
					const float *pair = o.t[0][d + i / 2].x + i % 2 * 4 + 2 * r;

					x[i] = factor == 0.0f ? 0
							      : Element::pack2(pair[0] * factor, pair[1] * factor);
				}
				turn_words(x);
				if (rows.to[r] && dim < hdim)
					*(chunk16 *)(rows.to[r] + dim * 2) = chunk16{{x[0], x[1], x[2], x[3]}};
			}
		}
	}
};

template <class Core, int TN, int TD> struct WgmmaValues<Core, E4M3, TN, TD> {
	static const bool TURNED = true;
	static const int KEYS = 16 * TN, SLAB = slab_bytes(16 * TD), BYTES = slabs_of(KEYS, 1) * SLAB;
	static_assert(TN % 2 == 0 && TD % 2 == 0, "a product takes 32 keys, a warp turns 32 dimensions");

	struct Weights {
		u32 w[TN / 2][4];
	};

	METHOD static Weights round(const RegTile<Core, 1, TN> &s)
	{
		Weights p;

		UNROLL
		for (int n = 0; n < TN; n++) {
			const float(&x)[8] = s.t[0][n].x;

			UNROLL
			for (int r = 0; r < 2; r++)
				p.w[n / 2][n % 2 * 2 + r] =
					pack(x[2 * r], x[2 * r + 1], x[2 * r + 4], x[2 * r + 5]);
		}
		return p;
	}
	METHOD static u32 pack(float x0, float x1, float x2, float x3)
	{
		u32 y;

		asm("{\n\t"
		    ".reg .b16 low, high;\n\t"
		    "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
		    "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
		    "mov.b32 %0, {low, high};\n\t"
		    "}"
		    : "=r"(y)
		    : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
		return y;
	}

	METHOD static void multiply(RegTile<Core, 1, TD> &o, const Weights &p, u32 tile)
	{
		const int STEPS = 4; /* of a slab */
		u64 v = wgmma_descriptor(tile, 0);

		UNROLL
		for (int i = 0; i < TN / 2; i++)
			Wgmma<E4M3, TD>::across(o.t[0], p.w[i],
						v + i / STEPS * (SLAB >> 4) + i % STEPS * STEP_ALONG);
	}

	/* dtype: of O. A lane has four neighbours. */
	METHOD static void store(const RegTile<Core, 1, TD> &o, const WgmmaRows &rows, i32 hdim, i32 dtype)
	{
		UNROLL
		for (int r = 0; r < 2; r++)
			UNROLL
			for (int d = 0; d < TD; d++) {
				const float *x = o.t[0][d].x + 2 * r;
				float factor = rows.factor[r], y[4];
				i32 dim = d * 16 + lane_id() % 4 * 4;

				UNROLL
				for (int i = 0; i < 4; i++)
					y[i] = factor == 0.0f ? 0.0f : x[i % 2 * 4 + i / 2] * factor;
				if (rows.to[r] && dim < hdim)
					store_four(rows.to[r], dim, y, dtype);
			}
	}
	METHOD static void store_four(char *to, i32 dim, const float (&y)[4], i32 dtype)
	{
		if (dtype == ABI_F32)
			*(chunk16 *)(to + dim * 4) = chunk16{{float_to_bits(y[0]), float_to_bits(y[1]),
							      float_to_bits(y[2]), float_to_bits(y[3])}};
		else if (dtype == ABI_F16)
			*(chunk8 *)(to + dim * 2) = chunk8{{F16::pack2(y[0], y[1]), F16::pack2(y[2], y[3])}};
		else
			*(chunk8 *)(to + dim * 2) = chunk8{{BF16::pack2(y[0], y[1]), BF16::pack2(y[2], y[3])}};
	}

	/* Warp `warp` of `warps` turns its share of a tile; keys before `begin` and from `end` on become zeros. */
	METHOD static void turn(u32 to, u32 from, i32 begin, i32 end, i32 warp, i32 warps)
	{
		bool whole = begin <= 0 && end >= KEYS;

		NO_UNROLL
		for (i32 n = warp; n < TN; n += warps) {
			u32 keep = whole ? ~0u : kept(begin - 16 * n, end - 16 * n);

			NO_UNROLL
			for (i32 d = 0; d < TD / 2; d += AT_ONCE)
				turn_blocks(to, from, n, d, keep);
		}
	}

	/* Which bytes of a lane's word, four places of 16 keys, count. */
	METHOD static u32 kept(i32 begin, i32 end)
	{
		u32 keep = 0;

		UNROLL
		for (int i = 0; i < 4; i++) {
			i32 key = i / 2 * 8 + lane_id() % 4 * 2 + i % 2;

			if (key >= begin && key < end)
				keep |= 255u << (8 * i);
		}
		return keep;
	}

	/* Keys 16 n .., dimensions 32 d .. and more of those: a store waits for its load, so several are under way. */
	static const int AT_ONCE = TD <= 10 ? TD / 2 : TD / 4;
	static_assert(TD / 2 % AT_ONCE == 0, "as many each time");
	METHOD static void turn_blocks(u32 to, u32 from, i32 n, i32 d, u32 keep)
	{
		i32 lane = lane_id(), row = lane % 8;
		MmaOperand x[AT_ONCE];

		UNROLL
		for (int b = 0; b < AT_ONCE; b++) {
			i32 chunk = 2 * (d + b) + lane / 16; /* of 16 bytes */

			x[b] = load_matrix_transposed(from + chunk / 8 * slab_bytes(KEYS) + (n * 16 + lane % 16) * 128 +
						      ((chunk % 8) ^ row) * 16);
		}
		UNROLL
		for (int b = 0; b < AT_ONCE; b++) {
			MmaOperand y;

			UNROLL
			for (int i = 0; i < 4; i += 2) {
				y.r[i] = __byte_perm(x[b].r[i], x[b].r[i + 1], 0x6420) & keep;
				y.r[i + 1] = __byte_perm(x[b].r[i], x[b].r[i + 1], 0x7531) & keep;
			}
			store_matrix(to + n / 8 * SLAB + (32 * (d + b) + lane) * 128 + ((n % 8) ^ row) * 16, y);
		}
	}
};

#endif
