/* SPDX-License-Identifier: MIT */
/*
 * scores.h: everything that happens to a tile of scores between the two products: soft cap, bias,
 * ALiBi, mask, online softmax, dropout. Rows and columns are logical, and a tile is what a lane
 * holds of it (tile.h), wherever its operands came from: every core, tile size, split and main loop
 * gives the same result.
 *
 * Scores are kept in units of `unit`: exp(score) = exp2(score * unit). A plain problem leaves the
 * raw products alone and folds the scale into unit (one multiply-add an element); anything that
 * needs real logits multiplies first and has unit 1.
 */
#ifndef FMHA_GPU_SCORES_H
#define FMHA_GPU_SCORES_H

#include "core/config.h"

/* FlashAttention-2's dropout: Philox 4x32-7, a call a lane and 16 x 32 patch, a byte an element. */
struct Philox {
	u32 w[4];

	METHOD static Philox make(u64 seed, u64 counter, u32 row_block, u32 column_block)
	{
		Philox c = {{(u32)counter, (u32)(counter >> 32), row_block, column_block}};
		/* Scalar registers are dear on AMD: the round keys stay out of them. */
		u32 key0 = plain_register((u32)seed), key1 = plain_register((u32)(seed >> 32));

		UNROLL
		for (int round = 0; round < 7; round++) {
			u64 x = multiply_wide(0xD2511F53u, c.w[0]),
			    y = multiply_wide(0xCD9E8D57u, c.w[2]);

			c = Philox{{(u32)(y >> 32) ^ c.w[1] ^ key0, (u32)y,
				    (u32)(x >> 32) ^ c.w[3] ^ key1, (u32)x}};
			key0 += 0x9E3779B9u;
			key1 += 0xBB67AE85u;
		}
		return c;
	}

	METHOD u32 byte(int n) const
	{
		u32 x = n < 8 ? (n < 4 ? w[0] : w[1]) : (n < 12 ? w[2] : w[3]);

		return x >> (8 * (n & 3)) & 255;
	}
};

/* The state that a call counts from: the same in all lanes, which compilers cannot see of words in
 * memory. */
DEV u64 dropout_word(u64 word, const u64 *more)
{
	return more ? word + uniform(*more) : word;
}

DEV u64 dropout_seed(const abi_dropout &d) { return dropout_word(d.seed, d.seed_at); }
DEV u64 dropout_offset(const abi_dropout &d) { return dropout_word(d.offset, d.offset_at); }

DEV u32 dropout_byte(const abi_dropout &d, i32 batch_head, i32 row, i32 column)
{
	i32 lane = row % 8 * 4 + column % 8 / 2;
	i32 n = column % 32 / 16 * 8 + column / 8 % 2 * 4 + (column & 1) + row / 8 % 2 * 2;

	return Philox::make(dropout_seed(d), dropout_offset(d) + (u64)batch_head * 32 + (u64)lane,
			    (u32)(row / 16 + d.row_block), (u32)(column / 32 + d.column_block))
		.byte(n);
}

/*
 * The bytes of a lane's elements of one 16 x 16 tile. (row, column) is the tile's first;
 * TRANSPOSED: rows are keys and columns queries. On NVIDIA a lane's elements are one lane's bytes
 * of a patch, or, transposed, those of two lanes: one Philox a patch, of which the two tiles beside
 * each other along the keys take their halves. AMD's matrix cores spread a tile otherwise: one
 * Philox a tile, and bytes from the lanes that have them; of a tile of 32 rows, lanes from 32 on
 * have those of the patch below.
 */
template <class Core, bool TRANSPOSED> struct DropoutTile {
	static const int IN_WORD = Core::SHARES_PATCH ? 1 : 4;
	u32 w[Core::E / IN_WORD];
	Philox patch; /* OWNS_PATCH */

	METHOD u32 byte(int e) const { return w[e / IN_WORD] >> (e % IN_WORD * 8) & 255; }

	/* SAME_PATCH: the tile made last was the first half of this one's patch. */
	template <bool SAME_PATCH>
	METHOD void make(const abi_dropout &d, i32 batch_head, i32 row, i32 column)
	{
		i32 query = TRANSPOSED ? column : row, key = TRANSPOSED ? row : column;

		if constexpr (Core::OWNS_PATCH) {
			if (!SAME_PATCH)
				patch = make_patch(d, batch_head, query, key);
			take_half(SAME_PATCH || (key & 16));
		} else if constexpr (Core::SHARES_PATCH) {
			if (!SAME_PATCH)
				patch = make_patch(d, batch_head, query + Core::patch_row(), key);
			spread(patch, SAME_PATCH || (key & 16));
		} else {
			fill(row, column,
			     [&](i32 q, i32 k) { return dropout_byte(d, batch_head, q, k); });
		}
	}

	/* From where the forward pass stored them. */
	METHOD void read(const abi_tensor &t, const Sequence &v, i32 head, i32 row, i32 column)
	{
		fill(row, column, [&](i32 query, i32 key) -> u32 {
			if (query >= v.n_q || key >= v.n_k)
				return 255;
			return ((const u8 *)
					t.data)[q_offset(t, v, query, head) + key * t.stride_dim];
		});
	}

	/* byte_of(query, key) of each element, a word at a time by a loop: few registers. */
	template <class Byte> METHOD void fill(i32 row, i32 column, const Byte &byte_of)
	{
		UNROLL
		for (int i = 0; i < Core::E / IN_WORD; i++) {
			w[i] = 0;
			NO_UNROLL
			for (int b = 0; b < IN_WORD; b++) {
				i32 r = row + Core::row(i * IN_WORD + b),
				    c = column + Core::column(i * IN_WORD + b);

				w[i] |= (TRANSPOSED ? byte_of(c, r) : byte_of(r, c)) << (8 * b);
			}
		}
	}

	METHOD static Philox make_patch(const abi_dropout &d, i32 batch_head, i32 query, i32 key)
	{
		return Philox::make(
			dropout_seed(d),
			dropout_offset(d) + (u64)batch_head * 32 + (u64)(lane_id() % 32),
			(u32)(query / 16 + d.row_block), (u32)(key / 32 + d.column_block));
	}

	METHOD void take_half(bool second)
	{
		u32 low = second ? patch.w[2] : patch.w[0], high = second ? patch.w[3] : patch.w[1];

		if (!TRANSPOSED) {
			w[0] = low, w[1] = high;
			return;
		}
		i32 lane = lane_id(), from = lane % 4 * 8 + lane / 8, shift = lane / 4 % 2 * 8;
		u32 low0 = shuffle_word(low, from) >> shift,
		    low1 = shuffle_word(low, from + 4) >> shift;
		u32 high0 = shuffle_word(high, from) >> shift,
		    high1 = shuffle_word(high, from + 4) >> shift;

		/* Elements 0 .. 3 are bytes 0 of these words, 4 .. 7 bytes 2. */
		w[0] = merge_bytes(low0, low1, 0) | merge_bytes(high0, high1, 0) << 16;
		w[1] = merge_bytes(low0, low1, 16) | merge_bytes(high0, high1, 16) << 16;
	}
	METHOD static u32 merge_bytes(u32 x, u32 y, int at)
	{
		return (x >> at & 255) | (y >> at & 255) << 8;
	}

	METHOD void spread(const Philox &p, bool second)
	{
		u32 low = second ? p.w[2] : p.w[0], high = second ? p.w[3] : p.w[1];

		UNROLL
		for (int e = 0; e < Core::E; e++) {
			i32 i = TRANSPOSED ? Core::column(e) : Core::row(e);
			i32 j = TRANSPOSED ? Core::row(e) : Core::column(e);
			i32 from = i / 16 * 32 + i % 8 * 4 + j % 8 / 2;
			u32 first = shuffle_word(low, from), other = shuffle_word(high, from);

			w[e] = (j & 8 ? other : first) >> (8 * ((j & 1) + (i & 8) / 4)) & 255;
		}
	}
};

/*
 * Finite scores from here on would be infinite in powers of two, and a row of nothing else masked,
 * or NaN: they count as this. It is a power of two, so that its product with log2(e) is exact, and
 * less itself 0 however that is contracted.
 */
#define HUGE_SCORE 1.70141183e38f

DEV bool is_huge(float x)
{
	float size = magnitude_of(x);

	return size >= HUGE_SCORE && size < -minus_infinity();
}
DEV float limited(float x) { return is_huge(x) ? (x < 0.0f ? -HUGE_SCORE : HUGE_SCORE) : x; }

/* A bias, or its gradient, of one sequence from head `head` on: strides in bytes. */
struct BiasView {
	char *base;
	i64 stride_query, stride_key, stride_head;
	i32 dtype;

	template <class Element>
	METHOD static BiasView make(const abi_tensor &t, i32 dtype, const Sequence &v, i32 head)
	{
		i64 bytes = sizeof(typename Element::Storage) == 4 || dtype == ABI_F32 ? 4 : 2;

		return BiasView{(char *)t.data + q_offset(t, v, 0, head) * bytes,
				t.stride_seq * bytes, t.stride_dim * bytes, t.stride_head * bytes,
				dtype};
	}
};

/*
 * The part of it along one row of a lane's 16 x 16 tiles. TRANSPOSED: the rows of the tiles are
 * keys. It has the type of the output, or is f32: one branch a row, straight code in it.
 */
template <class C> struct BiasRow {
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	typedef typename Core::Acc Acc;
	static const int ELEMENT_BYTES = sizeof(typename Element::Storage); /* 1: outputs have 2 */

	char *at;    /* of the lane's first column */
	i64 step;    /* bytes from column to column */
	i32 n_valid; /* columns that exist, from the lane's first */
	i32 dtype;

	/* row.head: from the view's on. */
	template <bool TRANSPOSED>
	METHOD static BiasRow make(const BiasView &t, const Sequence &v, RowPlace row, i32 column)
	{
		i32 r = row.row, c = column + Core::column(0);
		BiasRow b;

		b.step = plain_register(TRANSPOSED ? t.stride_query : t.stride_key);
		b.at = t.base + r * (TRANSPOSED ? t.stride_key : t.stride_query) + c * b.step +
		       row.head * t.stride_head;
		b.n_valid = r < (TRANSPOSED ? v.n_k : v.n_q) ? (TRANSPOSED ? v.n_q : v.n_k) - c : 0;
		b.dtype = t.dtype;
		return b;
	}

	METHOD static bool is_wide(i32 dtype) { return ELEMENT_BYTES == 4 || dtype == ABI_F32; }
	METHOD static float narrow(u32 bits, i32 dtype)
	{
		if constexpr (ELEMENT_BYTES == 2)
			return Element::to_float((u16)bits);
		else
			return dtype == ABI_F16 ? F16::to_float((u16)bits)
						: BF16::to_float((u16)bits);
	}

	/* t: the tiles of a row, of which the elements of row statistic r are meant. */
	template <int TN> METHOD void add(Acc (&t)[TN], int r) const
	{
		if (is_wide(dtype))
			add_as<4>(t, r);
		else
			add_as<2>(t, r);
	}
	template <int BYTES, int TN> METHOD void add_as(Acc (&t)[TN], int r) const
	{
		const char *p = at;

		UNROLL
		for (int n = 0; n < TN; n++) {
			UNROLL
			for (int e = 0; e < Core::E; e++) {
				i32 c = Core::column(e) - Core::column(0);

				if (Core::stat(e) != r)
					continue;
				u32 bits = load_bits<BYTES>(p + c * step, n * 16 + c < n_valid);

				t[n].x[e] += BYTES == 4 ? limited(bits_to_float(bits))
							: narrow(bits, dtype);
			}
			p = hidden_lane(p + 16 * step);
		}
	}

	METHOD void store(const Acc &t, int r) const
	{
		if (is_wide(dtype))
			store_as<4>(t, r);
		else
			store_as<2>(t, r);
	}
	template <int BYTES> METHOD void store_as(const Acc &t, int r) const
	{
		UNROLL
		for (int e = 0; e < Core::E; e++) {
			i32 c = Core::column(e) - Core::column(0);

			if (Core::stat(e) != r || c >= n_valid)
				continue;
			if constexpr (BYTES == 4)
				*(float *)(at + c * step) = t.x[e];
			else if constexpr (ELEMENT_BYTES == 2) /* no gradients in fp8 */
				*(u16 *)(at + c * step) = (u16)Element::from_float(t.x[e]);
		}
	}
};

/* What makes a raw product the logit of query i and key j. */
template <class C> struct Modifiers {
	typedef typename C::Core Core;

	const float *slopes; /* of this batch entry */
	float scale, soft_cap, unit; /* exp(score) = exp2(score * unit) */
	i32 diagonal; /* n_k - n_q */

	template <class Args> METHOD static Modifiers make(const Args &a, const Sequence &v)
	{
		Modifiers m;

		/* used only with ALiBi */
		m.slopes = a.alibi_slopes + v.batch * a.alibi_stride_batch;
		m.scale = a.scale;
		m.soft_cap = a.logits_soft_cap;
		m.diagonal = v.n_k - v.n_q;
		/* Folding the scale needs it positive: the maximum is taken over raw products. */
		m.unit = C::LOGITS ? FMHA_LOG2_E : a.scale * FMHA_LOG2_E;
		return m;
	}

	/* The logit of a raw product but for BIAS_MATRIX; *ret_slope: d(capped) / d(raw * scale), 1
	 * without a cap. */
	METHOD float logit(float raw, i32 head, i32 i, i32 j, float *ret_slope) const
	{
		float x = raw * scale;

		*ret_slope = 1;
		if (C::SOFTCAP) {
#if FMHA_NVIDIA
			float t = tanh_of(x / soft_cap);
#else
			/* ten instructions less than a division */
			float t = tanh_of(raw * (scale * reciprocal(soft_cap)));
#endif

			x = soft_cap * t;
			*ret_slope = 1 - t * t;
		}
		if (C::BIAS == BIAS_ALIBI)
			x -= load_memory(slopes + head) * magnitude_of((float)(i + diagonal - j));
		return x;
	}
};

/*
 * The running softmax of a wave's rows: of each m, the maximum, and l, this lane's share of the
 * sum, which lie where the main loop wants them.
 */
template <class Core, int TM> struct SoftmaxRows {
	RowVector<Core, TM> maximum, sum;

	METHOD void init()
	{
		maximum.fill(minus_infinity());
		sum.fill(0.0f);
	}
	METHOD float &m(int i, int r) { return maximum.v[i][r]; }
	METHOD float &l(int i, int r) { return sum.v[i][r]; }
	/* A tile's part of l is added up from here on, and ends there. */
	METHOD float begin_sum(int i, int r) { return l(i, r); }
	METHOD void end_sum(int i, int r, float total) { l(i, r) = total; }
};

/* The same in LDS, while the products want the registers. */
template <class Core, int TM, int THREADS> struct ParkedRows {
	static const int BYTES = 2 * TM * Core::STATS * THREADS * 4;
	char *lds;

	METHOD float &number(int which, int i, int r)
	{
		return ((float *)lds)[((which * TM + i) * Core::STATS + r) * THREADS + thread_id()];
	}
	METHOD float &m(int i, int r) { return number(0, i, r); }
	METHOD float &l(int i, int r) { return number(1, i, r); }
	METHOD float begin_sum(int, int) { return 0.0f; }
	METHOD void end_sum(int i, int r, float total) { l(i, r) += total; }

	template <class To, class From> METHOD static void copy(To &to, From &from)
	{
		UNROLL
		for (int i = 0; i < TM; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				to.m(i, r) = from.m(i, r);
				to.l(i, r) = from.l(i, r);
			}
	}
};

/* P in units of 2^-SHIFT, as matrix units multiply it with V of that type: at most 2^MOST of them.
 * Of e4m3 that is the type's largest power of two (gfx942's has half of it): a weight may grow by
 * 2^4, and as much again while its maximum lags. What is left of small ones reaches down to 2^-13,
 * see slab_softmax.h. */
template <class Element> struct WeightUnit {
	static const int SHIFT = 0, MOST = 8;
};
template <> struct WeightUnit<E4M3> {
#if defined(__gfx942__)
	static const int SHIFT = 3, MOST = 7;
#else
	static const int SHIFT = 4, MOST = 8;
#endif
};

/*
 * LAGS: m may lag behind the maximum by LAG (in powers of two): P is then at most 2^8, which every
 * operand type holds as precisely as 1, and after the first tiles hardly a wave still pays for
 * rescaling its accumulators. Where they are few, asking costs more than it saves.
 * LIMITS: scores may be huge, as only a matrix as bias makes them.
 */
template <class Core, int TM, bool LAGS, bool LIMITS, class Unit = WeightUnit<BF16>>
struct Softmax {
	static constexpr float LAG = Unit::MOST - Unit::SHIFT;

	/* S becomes P; returns whether *ret_factor must multiply what was summed so far, the same
	 * for all lanes. */
	template <class Rows, int TN>
	METHOD static bool update(Rows &rows, RegTile<Core, TM, TN> &s, float unit,
				  RowVector<Core, TM> *ret_factor)
	{
		RowVector<Core, TM> high;
		bool lags = false, huge = false;

		UNROLL
		for (int i = 0; i < TM; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				float before = rows.m(i, r);

				high.v[i][r] = highest(s, i, r, before);
				huge = huge || (LIMITS && is_huge(high.v[i][r]));
				lags = lags || !LAGS || high.v[i][r] * unit > before * unit + LAG;
				if (LAGS || LIMITS)
					continue;
				ret_factor->v[i][r] = raise(rows, i, r, high.v[i][r], unit);
				exponentiate(rows, s, i, r, unit);
			}
		if (!LAGS && !LIMITS)
			return true;
		if (LIMITS && any_of_wave(huge)) {
			limit(s, high);
			lags = true;
		}
		lags = any_of_wave(lags);
		UNROLL
		for (int i = 0; i < TM && lags; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				ret_factor->v[i][r] = raise(rows, i, r, high.v[i][r], unit);
		UNROLL
		for (int i = 0; i < TM; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				exponentiate(rows, s, i, r, unit);
		return lags;
	}

	/* The first half of update(), of scores that are not huge: exponentiate() follows. */
	template <class Rows, int TN>
	METHOD static bool raise_all(Rows &rows, const RegTile<Core, TM, TN> &s, float unit,
				     RowVector<Core, TM> *ret_factor)
	{
		RowVector<Core, TM> high;
		bool lags = !LAGS;

		UNROLL
		for (int i = 0; i < TM; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				float before = rows.m(i, r);

				high.v[i][r] = highest(s, i, r, before);
				lags = lags || high.v[i][r] * unit > before * unit + LAG;
			}
		if (LAGS)
			lags = any_of_wave(lags);
		UNROLL
		for (int i = 0; i < TM && lags; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				ret_factor->v[i][r] = raise(rows, i, r, high.v[i][r], unit);
		return lags;
	}

	/* The maximum of a row's scores and the one so far. */
	template <int TN>
	METHOD static float highest(const RegTile<Core, TM, TN> &s, int i, int r, float before)
	{
		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int e = 0; e < Core::E; e++)
				if (Core::stat(e) == r)
					before = larger(before, s.t[i][n].x[e]);
		return Core::row_max(before);
	}

	/* A tile of which a row's maximum is huge: where it is not, huge scores weigh nothing as
	 * they are. */
	template <int TN>
	METHOD static void limit(RegTile<Core, TM, TN> &s, RowVector<Core, TM> &high)
	{
		UNROLL
		for (int i = 0; i < TM; i++) {
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				high.v[i][r] = limited(high.v[i][r]);
			UNROLL
			for (int n = 0; n < TN * Core::E; n++) {
				float &x = s.t[i][n / Core::E].x[n % Core::E];

				x = limited(x);
			}
		}
	}

	/* A row that has seen nothing yet: any finite origin will do. */
	METHOD static float origin(float high, float unit)
	{
		return high == minus_infinity() ? 0.0f : high * unit;
	}

	/* The maximum is `high` from now on; returns the factor of what was summed before. */
	template <class Rows>
	METHOD static float raise(Rows &rows, int i, int r, float high, float unit)
	{
		float factor = exp2_fast(rows.m(i, r) * unit - origin(high, unit));

		rows.m(i, r) = high;
		rows.l(i, r) *= factor;
		return factor;
	}

	template <class Rows, int TN>
	METHOD static void exponentiate(Rows &rows, RegTile<Core, TM, TN> &s, int i, int r,
					float unit)
	{
		float zero = origin(rows.m(i, r), unit) - Unit::SHIFT, total = rows.begin_sum(i, r);

		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int e = 0; e < Core::E; e++)
				if (Core::stat(e) == r) {
					float p = exp2_fast(s.t[i][n].x[e] * unit - zero);

					s.t[i][n].x[e] = p;
					total += p;
				}
		rows.end_sum(i, r, total);
	}
};

#endif
