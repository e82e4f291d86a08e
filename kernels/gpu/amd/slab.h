/* SPDX-License-Identifier: MIT */
/*
 * slab.h: AMD's matrix instructions for loops that feed them from swizzled LDS: operands in slabs
 * along what is summed, of 16-bit elements or e4m3, accumulators of SIDE x SIDE. Lane l holds
 * column l % SIDE of a transposed product, the row of its scores. A lane has whole units of 16
 * bytes of a slab, and so as many of 8 bits as of 16 for two instructions.
 */
#ifndef FMHA_GPU_SLAB_H
#define FMHA_GPU_SLAB_H

#include "core/config.h"

/* Bytes of an element, in LDS as in memory. */
static const int SLAB_ELEMENT = sizeof(Config::Element::Storage);

/* Units of a lane, and of all lanes: RDNA3's half waves hold the same. gfx950 multiplies 64 values
 * of 8 bits at once. */
#if FMHA_CORE == FMHA_CORE_WMMA11
static const int SLAB_READS = 2, SLAB_UNITS = 2;
#elif defined(__gfx950__)
static const int SLAB_READS = 2 / SLAB_ELEMENT, SLAB_UNITS = 2 * SLAB_READS;
#else
static const int SLAB_READS = 1, SLAB_UNITS = 2;
#endif
static const int SLAB_WORDS = 4 * SLAB_READS;
static const int SLAB_DEPTH = SLAB_UNITS * 16 / SLAB_ELEMENT; /* elements: 16, 32 or 64 */
static const int SLAB_ACCS = SLAB_DEPTH / 16; /* whose columns are a slab */

struct Slab {
	u32 w[SLAB_WORDS];
};
struct SlabAcc {
	float x[8];
};
typedef float SlabFloats8 __attribute__((ext_vector_type(8)));
typedef float SlabFloats16 __attribute__((ext_vector_type(16)));

/*
 * gfx942's products take another e4m3, fnuz, where bits mean half as much, but for -0, which is its
 * only NaN. What goes there is SLAB_UNIT times smaller.
 */
#if defined(__gfx942__)
static const int SLAB_UNIT = SLAB_ELEMENT == 1 ? 2 : 1;
template <int N> DEV void to_slab_words(u32 (&x)[N])
{
	const u32 SIGNS = 0x80808080, ONES = 0x01010101;
	u32 nans = 0;

	if (SLAB_ELEMENT == 2)
		return;
	UNROLL
	for (int i = 0; i < N; i++) {
		u32 size = x[i] & ~SIGNS;

		x[i] = (x[i] ^ size) & (size + ~SIGNS) | size;
		nans |= size + ONES;
	}
	if (!any_of_wave(nans & SIGNS)) /* as good as always */
		return;
	UNROLL
	for (int i = 0; i < N; i++) {
		u32 nan = ((x[i] & ~SIGNS) + ONES) & SIGNS;

		x[i] = x[i] & ~(nan - (nan >> 7)) | nan;
	}
}
#else
static const int SLAB_UNIT = 1;
template <int N> DEV void to_slab_words(u32 (&)[N]) {}
#endif

/* The key among 16 of 16-bit V that is the i-th of the quad-th four in LDS: a lane's scores are of
 * these. */
DEV i32 slab_key16(i32 quad, i32 i)
{
#if FMHA_CORE == FMHA_CORE_MFMA
	return (quad & 1) * 8 + (quad & 2) * 2 + i;
#elif FMHA_CORE == FMHA_CORE_WMMA11
	return (quad & 1) * 8 + (quad >> 1) + 2 * i;
#else
	return quad * 4 + i;
#endif
}
/* The same of a whole tile. A unit of 8 bits has those of two neighbours of 16 bits. */
DEV i32 slab_key(i32 quad, i32 i)
{
	return SLAB_ELEMENT == 2 ? quad / 4 * 16 + slab_key16(quad % 4, i)
				 : quad / 8 * 32 + quad / 2 % 2 * 16 +
					   slab_key16(quad / 4 % 2 * 2 + quad % 2, i);
}

/* A lane's place in a wave's operands and results. */
struct SlabPlace {
	static const int SIDE = FMHA_CORE == FMHA_CORE_MFMA ? 32 : 16;

	METHOD static i32 line() { return lane_id() % SIDE; }
	METHOD static i32 half() { return lane_id() / SIDE; }
	/* The i-th unit of a slab that a lane holds is unit_of(i), and its own bit of the number. */
	METHOD static constexpr int unit_of(int i) { return SLAB_UNITS / SLAB_READS * i; }
	METHOD static i32 unit() { return SLAB_READS == SLAB_UNITS ? 0 : half(); }
};

/* Neighbours of an operand, a word of them. Ties of bf16 go away from zero, which costs less than
 * to even. */
struct RoundToNearest {
	METHOD static u32 pack(BF16, float low, float high)
	{
#if defined(__gfx950__)
		typedef float Two __attribute__((ext_vector_type(2)));
		typedef __bf16 Halves __attribute__((ext_vector_type(2)));

		return __builtin_bit_cast(u32, __builtin_convertvector(Two{low, high}, Halves));
#else
		return __builtin_amdgcn_perm(float_to_bits(high) + 0x8000,
					     float_to_bits(low) + 0x8000, 0x07060302);
#endif
	}
	METHOD static u32 pack(F16, float low, float high) { return F16::pack2(low, high); }

	/* Beyond 448 it is NaN, where weights never are (SlabSoftmax). A template, since not every
	 * arch has the instruction. */
	template <class Float> METHOD static u32 pack(E4M3, Float x0, Float x1, Float x2, Float x3)
	{
		u32 low = (u32)__builtin_amdgcn_cvt_pk_fp8_f32(x0, x1, 0, false);

		return (u32)__builtin_amdgcn_cvt_pk_fp8_f32(x2, x3, (i32)low, true);
	}
};

/* What `Core` is to tile.h, for accumulators of SIDE rows and 16 columns. */
template <class T> struct SlabCore : SlabPlace {
	typedef T Type;
	typedef SlabAcc Acc;
	static const int E = 8, STATS = 1;
	static const bool OWNS_PATCH = false, SHARES_PATCH = true; /* see DropoutTile */
#if FMHA_CORE == FMHA_CORE_MFMA
	typedef SlabFloats16 Wide;
#else
	typedef SlabFloats8 Wide;
#endif

	METHOD static constexpr int stat(int) { return 0; }
	METHOD static i32 stat_row(int) { return line(); }
	METHOD static i32 row(int) { return line(); }
	METHOD static i32 column(int e)
	{
		return FMHA_CORE == FMHA_CORE_MFMA     ? e / 4 * 8 + half() * 4 + e % 4
		       : FMHA_CORE == FMHA_CORE_WMMA11 ? 2 * e + half()
						       : half() * 8 + e;
	}
	METHOD static i32 patch_row() { return lane_id() / 32 * 16; }

	METHOD static float row_max(float x) { return larger(x, shuffle_xor(x, SIDE)); }
	METHOD static float row_sum(float x) { return x + shuffle_xor(x, SIDE); }
	METHOD static i32 anew(i32 row) { return row; }
	/* Between steps of a product: keeps the scheduler from loading every operand first, which
	 * RDNA has no registers for. */
	METHOD static void step()
	{
		if (FMHA_CORE != FMHA_CORE_MFMA)
			scheduling_barrier();
	}

	/* One slab of SLAB_ACCS neighbours. */
	template <class Rounding> METHOD static Slab to_slab(const Acc *c)
	{
		if constexpr (SLAB_ELEMENT == 1)
			return to_bytes<Rounding>(c);
		else
			return to_halves<Rounding>(*c);
	}
	template <class Rounding> METHOD static Slab to_bytes(const Acc *c)
	{
		Slab p;

		UNROLL
		for (int i = 0; i < SLAB_WORDS; i++) {
			const float *x = c[i / 2].x + i % 2 * 4;

			p.w[i] = Rounding::pack(T(), x[0], x[1], x[2], x[3]);
		}
		return p;
	}
	template <class Rounding> METHOD static Slab to_halves(const Acc &c)
	{
		Slab p;

		UNROLL
		for (int i = 0; i < 4; i++) {
			u32 own = Rounding::pack(T(), c.x[2 * i], c.x[2 * i + 1]);

#if FMHA_CORE == FMHA_CORE_WMMA11
			/* Even columns are in the lower half wave, odd ones in the upper. */
			u32 other = (u32)__builtin_amdgcn_permlanex16(
				(i32)own, (i32)own, 0x76543210, (i32)0xfedcba98, true, false);

			p.w[i] = half() ? other : own;
			p.w[4 + i] = half() ? own : other;
#else
			p.w[i] = own;
#endif
		}
		return p;
	}

	/* A product is done here, before the branches that follow, and its operands are not needed
	 * any more. */
	METHOD static void settle(Wide &c)
	{
		if (FMHA_CORE != FMHA_CORE_MFMA)
			asm volatile("" : "+v"(c));
	}

	METHOD static void multiply(Wide &c, const Slab &a, const Slab &b)
	{
		multiply_as(T(), c, a, b);
	}

	/* Templates, so that only what T takes has to fit an instruction. */
	template <class S> METHOD static void multiply_as(F16, Wide &c, const S &a, const S &b)
	{
		typedef _Float16 Halves __attribute__((ext_vector_type(sizeof(S) / 2)));
		Halves x = __builtin_bit_cast(Halves, a), y = __builtin_bit_cast(Halves, b);
#if FMHA_CORE == FMHA_CORE_WMMA11
		c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(x, y, c);
#elif FMHA_CORE == FMHA_CORE_WMMA12
		c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(x, y, c);
#elif defined(__gfx950__)
		c = __builtin_amdgcn_mfma_f32_32x32x16_f16(x, y, c, 0, 0, 0);
#else
		c = __builtin_amdgcn_mfma_f32_32x32x8f16(x.lo, y.lo, c, 0, 0, 0);
		c = __builtin_amdgcn_mfma_f32_32x32x8f16(x.hi, y.hi, c, 0, 0, 0);
#endif
	}
	template <class S> METHOD static void multiply_as(BF16, Wide &c, const S &a, const S &b)
	{
#if defined(__gfx950__)
		typedef __bf16 Words __attribute__((ext_vector_type(sizeof(S) / 2)));
#else
		typedef short Words __attribute__((ext_vector_type(sizeof(S) / 2)));
#endif
		Words x = __builtin_bit_cast(Words, a), y = __builtin_bit_cast(Words, b);
#if FMHA_CORE == FMHA_CORE_WMMA11
		c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(x, y, c);
#elif FMHA_CORE == FMHA_CORE_WMMA12
		c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(x, y, c);
#elif defined(__gfx950__)
		c = __builtin_amdgcn_mfma_f32_32x32x16_bf16(x, y, c, 0, 0, 0);
#else
		c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x.lo, y.lo, c, 0, 0, 0);
		c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x.hi, y.hi, c, 0, 0, 0);
#endif
	}
	template <class Pair> METHOD static long long_of(Pair x)
	{
		return __builtin_bit_cast(long, x);
	}
	template <class S> METHOD static void multiply_as(E4M3, Wide &c, const S &a, const S &b)
	{
		typedef int Words __attribute__((ext_vector_type(sizeof(S) / 4)));
		Words x = __builtin_bit_cast(Words, a), y = __builtin_bit_cast(Words, b);
#if FMHA_CORE == FMHA_CORE_WMMA12
		c = __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(x.lo, y.lo, c);
		c = __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(x.hi, y.hi, c);
#elif defined(__gfx950__)
		/* Both in format 0, e4m3; without a scale, at twice the rate of the instruction for
		 * fp8 alone. */
		c = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(x, y, c, 0, 0, 0, 0, 0, 0);
#elif defined(__gfx942__)
		c = __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(long_of(x.lo), long_of(y.lo), c, 0,
							       0, 0);
		c = __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(long_of(x.hi), long_of(y.hi), c, 0,
							       0, 0);
#endif
	}
};

/*
 * A tile in LDS, read by slabs along its rows: units of 16 bytes, permuted within a row. Eight rows
 * side by side have one unit in eight different groups of four banks, so that readers do not meet,
 * nor do those four and four of them that CDNA reads at once, twenty rows apart; those who write
 * every fourth row, as a transposed tile is, meet in twos where a row has eight units, in fours
 * where it has four and they do not change places (ColumnStage).
 */
template <int ROWS, int COLS> struct SlabStore {
	static const int STRIDE = COLS * SLAB_ELEMENT, BYTES = ROWS * STRIDE, UNITS = STRIDE / 16;
	/* Units that change places among each other, and rows that lie in the same ones. */
	static const int SPAN = UNITS % 8 == 0 ? 8 : UNITS % 4 == 0 ? 4 : 2, PERIOD = 8 / SPAN;
	static_assert(UNITS % SLAB_UNITS == 0, "whole slabs");

	METHOD static constexpr i32 turn(i32 row)
	{
		return (row / PERIOD ^ (SPAN == 4 ? row / 8 % 2 : row / 8)) & (SPAN - 1);
	}
	METHOD static i32 at(i32 row, i32 unit) { return row * STRIDE + (unit ^ turn(row)) * 16; }

	/* Row tiles are SIDE rows; what their number adds to turn() it adds by bits of its own. */
	struct Reader {
		static const int SIDE = SlabPlace::SIDE;
		const char *place[SPAN];

		METHOD Reader(const char *lds)
		{
			i32 line = SlabPlace::line(), unit = SlabPlace::unit();

			UNROLL
			for (int i = 0; i < SPAN; i++)
				place[i] = lds + line * STRIDE + (i ^ unit ^ turn(line)) * 16;
		}
		METHOD Slab operator()(int tile, int slab) const
		{
			Slab x;

			UNROLL
			for (int i = 0; i < SLAB_READS; i++) {
				int unit = slab * SLAB_UNITS + SlabPlace::unit_of(i),
				    low = unit % SPAN ^ turn(tile * SIDE);
				chunk16 c = load16(place[low] + tile * SIDE * STRIDE +
						   unit / SPAN * SPAN * 16);

				UNROLL
				for (int w = 0; w < 4; w++)
					x.w[i * 4 + w] = c.w[w];
			}
			return x;
		}
	};
};

#endif
