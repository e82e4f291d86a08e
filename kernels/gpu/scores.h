/* SPDX-License-Identifier: MIT */
/*
 * scores.h: everything that happens to a tile of scores between the two products: soft cap, bias,
 * ALiBi, mask, online softmax, dropout. Rows and columns are logical, so that every layer of matrix
 * core, tile size and split gives the same result.
 *
 * Scores are kept in units of `unit`: exp(score) = exp2(score * unit). A plain problem leaves the
 * raw products alone and folds the scale into unit (one multiply-add an element); anything that
 * needs real logits multiplies first and has unit 1.
 */
#ifndef FMHA_GPU_SCORES_H
#define FMHA_GPU_SCORES_H

#include "config.h"

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
			u32 high0 = multiply_high(0xD2511F53u, c.w[0]), low0 = 0xD2511F53u * c.w[0];
			u32 high1 = multiply_high(0xCD9E8D57u, c.w[2]), low1 = 0xCD9E8D57u * c.w[2];

			c = Philox{{high1 ^ c.w[1] ^ key0, low1, high0 ^ c.w[3] ^ key1, low0}};
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

DEV u32 dropout_byte(const abi_dropout &d, i32 batch_head, i32 row, i32 column)
{
	i32 lane = row % 8 * 4 + column % 8 / 2;
	i32 n = column % 32 / 16 * 8 + column / 8 % 2 * 4 + (column & 1) + row / 8 % 2 * 2;

	return Philox::make(d.seed, d.offset + (u64)batch_head * 32 + (u64)lane, (u32)row / 16,
			    (u32)column / 32)
		.byte(n);
}

/*
 * The bytes of one 16 x 16 tile, in the order of a lane's elements. (row, column) is the tile's first;
 * TRANSPOSED: rows are keys and columns queries. On NVIDIA a lane's elements are one lane's bytes of a
 * patch, or, transposed, those of two lanes: one Philox a tile. AMD's matrix cores spread a tile
 * otherwise: one Philox a tile too, and bytes from the lanes that have them.
 */
template <class Core, bool TRANSPOSED>
DEV void dropout_bytes(const abi_dropout &d, i32 batch_head, i32 row, i32 column, u32 *bytes)
{
	if constexpr (Core::OWNS_PATCH) {
		i32 lane = lane_id(), query = TRANSPOSED ? column : row, key = TRANSPOSED ? row : column;
		Philox p = Philox::make(d.seed, d.offset + (u64)batch_head * 32 + (u64)lane,
					(u32)query / 16, (u32)key / 32);
		bool second = key & 16;
		u32 low = second ? p.w[2] : p.w[0], high = second ? p.w[3] : p.w[1];

		UNROLL
		for (int e = 0; e < Core::E && !TRANSPOSED; e++)
			bytes[e] = (e < 4 ? low : high) >> (8 * (e & 3)) & 255;
		UNROLL
		for (int b = 0; b < 2 && TRANSPOSED; b++) {
			i32 from = (lane % 4 * 2 + b) * 4 + lane / 8;
			u32 words[2] = {shuffle_word(low, from), shuffle_word(high, from)};

			UNROLL
			for (int e = b; e < Core::E; e += 2)
				bytes[e] = words[e >> 1 & 1] >> (8 * ((lane / 4 & 1) + 2 * (e >> 2))) & 255;
		}
	} else if constexpr (Core::SHARES_PATCH) {
		i32 query = TRANSPOSED ? column : row, key = TRANSPOSED ? row : column;
		Philox p = Philox::make(d.seed, d.offset + (u64)batch_head * 32 + (u64)(lane_id() % 32),
					(u32)query / 16, (u32)key / 32);
		bool second = key & 16;
		u32 low = second ? p.w[2] : p.w[0], high = second ? p.w[3] : p.w[1];

		UNROLL
		for (int e = 0; e < Core::E; e++) {
			i32 i = TRANSPOSED ? Core::column(e) : Core::row(e);
			i32 j = TRANSPOSED ? Core::row(e) : Core::column(e), from = i % 8 * 4 + j % 8 / 2;
			u32 first = shuffle_word(low, from), other = shuffle_word(high, from);

			bytes[e] = (j & 8 ? other : first) >> (8 * ((j & 1) + (i & 8) / 4)) & 255;
		}
	} else {
		UNROLL
		for (int e = 0; e < Core::E; e++) {
			i32 r = row + Core::row(e), c = column + Core::column(e);

			bytes[e] = TRANSPOSED ? dropout_byte(d, batch_head, c, r)
					      : dropout_byte(d, batch_head, r, c);
			if (e % 2 == 1)
				Core::step(); /* two generators at once are enough */
		}
	}
}

/* What a lane knows of the row that one of its statistics belongs to. */
struct RowPlace {
	i32 row, head; /* of the sequence; of the problem */
};

/* C++ has no way to pick a field by a runtime TRANSPOSED flag: (row, column) of a tile element is
 * (query, key) here, the other way round in the key-stationary backward pass. */
template <class C> struct Modifiers {
	typedef typename C::Core Core;

	abi_tensor bias;
	i32 bias_dtype;
	const float *slopes; /* of this batch entry */
	float scale, soft_cap, unit; /* exp(score) = exp2(score * unit) */
	i32 diagonal; /* n_k - n_q */

	template <class Args> METHOD static Modifiers make(const Args &a, const Sequence &v)
	{
		Modifiers m;

		m.bias = a.bias;
		m.bias_dtype = a.bias_dtype;
		m.slopes = a.alibi_slopes + v.batch * a.alibi_stride_batch; /* used only with ALiBi */
		m.scale = a.scale;
		m.soft_cap = a.logits_soft_cap;
		m.diagonal = v.n_k - v.n_q;
		/* Folding the scale needs it positive: the maximum is taken over raw products. */
		m.unit = C::LOGITS ? FMHA_LOG2_E : a.scale * FMHA_LOG2_E;
		return m;
	}

	/* The logit of a raw product; *ret_slope: d(capped) / d(raw * scale), 1 without a cap. */
	METHOD float logit(float raw, const Sequence &v, i32 head, i32 i, i32 j, float *ret_slope) const
	{
		float x = raw * scale;

		*ret_slope = 1;
		if (C::SOFTCAP) {
			float t = tanh_of(x / soft_cap);

			x = soft_cap * t;
			*ret_slope = 1 - t * t;
		}
		if (C::BIAS == BIAS_MATRIX && i < v.n_q && j < v.n_k)
			x += load_as_float(bias.data, bias_dtype,
					   q_offset(bias, v, i, head) + j * bias.stride_dim);
		if (C::BIAS == BIAS_ALIBI)
			x -= load_memory(slopes + head) * magnitude_of((float)(i + diagonal - j));
		return x;
	}
};

/* The running softmax of a wave's rows: m the maximum, l this lane's share of the sum. */
template <class C, int TM> struct Softmax {
	typedef typename C::Core Core;
	RowVector<Core, TM> m, l;

	METHOD void init()
	{
		m.fill(minus_infinity());
		l.fill(0.0f);
	}

	/* LEAN: both wait in LDS while the products want the registers. */
	static const int KEPT_BYTES = 2 * TM * Core::STATS * C::THREADS * 4;

	METHOD void keep(char *lds) const
	{
		UNROLL
		for (int i = 0; i < TM; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				kept(lds, 0, i, r) = m.v[i][r];
				kept(lds, 1, i, r) = l.v[i][r];
			}
	}
	METHOD void fetch(char *lds)
	{
		UNROLL
		for (int i = 0; i < TM; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				m.v[i][r] = kept(lds, 0, i, r);
				l.v[i][r] = kept(lds, 1, i, r);
			}
	}
	METHOD static float &kept(char *lds, int which, int i, int r)
	{
		return ((float *)lds)[((which * TM + i) * Core::STATS + r) * C::THREADS + thread_id()];
	}
	METHOD float &maximum(char *lds, int i, int r) { return C::LEAN ? kept(lds, 0, i, r) : m.v[i][r]; }
	METHOD float &sum(char *lds, int i, int r) { return C::LEAN ? kept(lds, 1, i, r) : l.v[i][r]; }

	/*
	 * m may lag behind the maximum by LAG (in powers of two): P is then at most 2^LAG, which every
	 * operand type holds as precisely as 1, and after the first tiles hardly a wave still pays for
	 * rescaling its accumulators. Where they are few, asking costs more than it saves.
	 */
	static constexpr float LAG = TM > 1 && C::HDIM_V > 64 ? 8.0f : 0.0f;

	/* S becomes P; returns whether *ret_factor must multiply what was summed so far, the same for
	 * all lanes. lds: LEAN only. */
	template <int TN>
	METHOD bool update(RegTile<Core, TM, TN> &s, float unit, RowVector<Core, TM> *ret_factor, char *lds)
	{
		RowVector<Core, TM> high;
		bool lags = false;

		UNROLL
		for (int i = 0; i < TM; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				float before = maximum(lds, i, r);

				high.v[i][r] = highest(s, i, r, before);
				if (LAG > 0) {
					lags = lags || high.v[i][r] * unit > before * unit + LAG;
					continue;
				}
				ret_factor->v[i][r] = raise(i, r, high.v[i][r], unit, lds);
				exponentiate(s, i, r, unit, lds);
			}
		if (LAG == 0)
			return true;
		lags = any_of_wave(lags);
		UNROLL
		for (int i = 0; i < TM && lags; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				ret_factor->v[i][r] = raise(i, r, high.v[i][r], unit, lds);
		UNROLL
		for (int i = 0; i < TM; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				exponentiate(s, i, r, unit, lds);
		return lags;
	}

	/* Of a row's scores and the maximum so far. */
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

	/* A row that has seen nothing yet: any finite origin will do. */
	METHOD static float origin(float high, float unit)
	{
		return high == minus_infinity() ? 0.0f : high * unit;
	}

	METHOD float raise(int i, int r, float high, float unit, char *lds)
	{
		float factor = exp2_fast(maximum(lds, i, r) * unit - origin(high, unit));

		maximum(lds, i, r) = high;
		sum(lds, i, r) *= factor;
		return factor;
	}

	template <int TN>
	METHOD void exponentiate(RegTile<Core, TM, TN> &s, int i, int r, float unit, char *lds)
	{
		float zero = origin(maximum(lds, i, r), unit), total = C::LEAN ? 0.0f : l.v[i][r];

		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int e = 0; e < Core::E; e++)
				if (Core::stat(e) == r) {
					float p = exp2_fast(s.t[i][n].x[e] * unit - zero);

					s.t[i][n].x[e] = p;
					total += p;
				}
		if (C::LEAN)
			sum(lds, i, r) += total;
		else
			l.v[i][r] = total;
	}
};

#endif
