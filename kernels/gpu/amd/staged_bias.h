/* SPDX-License-Identifier: MIT */
/*
 * staged_bias.h: a matrix as bias beside the tiles of scores of fwd_amd.h and bwd_amd.h, and its
 * gradient: each element has one lane, which fetches it before the tile's products. An offset of 32
 * bits a lane, to which whole tiles add the column's by a scalar register; what does not exist is
 * NOWHERE, and so zero.
 */
#ifndef FMHA_GPU_STAGED_BIAS_H
#define FMHA_GPU_STAGED_BIAS_H

#include "buffer.h"
#include "block/scores.h"

/* Rows are what a block owns, columns what it streams; gpu_maps.c has made sure that a tile's lie
 * within 2 GiB. */
template <class C, bool KEYS_STATIONARY, int COLUMNS> struct StagedBiasView {
	typedef typename C::Core Core;

	char *from; /* the block's first row */
	u32 lane;   /* a lane's row, and its first column of a tile */
	u32 step;   /* bytes from column to column */
	i32 dtype;

	/* @row: the lane's, of the block's, whose first is @first. */
	METHOD static StagedBiasView make(const BiasView &t, const Sequence &v, i32 first, i32 row)
	{
		i64 row_step = KEYS_STATIONARY ? t.stride_key : t.stride_query;
		StagedBiasView r;

		r.from = t.base + first * row_step;
		r.step = (u32)(KEYS_STATIONARY ? t.stride_query : t.stride_key);
		r.lane = first + row < (KEYS_STATIONARY ? v.n_k : v.n_q)
				 ? (u32)row * (u32)row_step + (u32)Core::column(0) * r.step
				 : BUFFER_NOWHERE;
		r.dtype = t.dtype;
		return r;
	}

	/* Visits each of a lane's elements in N tiles of 16, from the n-th on, of the tile that
	 * begins at @column: each(buffer, index, its offset, what all lanes' is besides). Columns
	 * from @end on do not exist. */
	template <int N, class Each>
	METHOD void visit(i32 column, i32 end, int n, const Each &each) const
	{
		const Buffer b = Buffer::make(from + (i64)column * step, BUFFER_NOWHERE);
		u32 s = step, at = (u32)hidden_lane((i32)lane);

		asm volatile("" : "+s"(s)); /* offsets are made here, not kept for the loop */
		if (column + COLUMNS <= end) {
			UNROLL
			for (int i = 0; i < N * Core::E; i++)
				each(b, i, lane, column_of(n, i) * s);
			return;
		}
		UNROLL
		for (int i = 0; i < N * Core::E; i++) {
			i32 c = column_of(n, i);

			each(b, i, column + Core::column(0) + c < end ? at + c * s : BUFFER_NOWHERE,
			     0);
		}
	}
	/* From the lane's first on: the same for all lanes. */
	METHOD static i32 column_of(int n, int i)
	{
		return (n + i / Core::E) * 16 + Core::column(i % Core::E) - Core::column(0);
	}
};

/* What a lane has of a tile. */
template <class C, bool KEYS_STATIONARY, int COLUMNS> struct StagedBias {
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	typedef StagedBiasView<C, KEYS_STATIONARY, COLUMNS> View;
	static const int TN = COLUMNS / 16;

	u32 x[TN * Core::E]; /* as it lies in memory, then floats */

	METHOD void fetch(const View &from, i32 column, i32 end)
	{
		if (BiasRow<C>::is_wide(from.dtype))
			from.template visit<TN>(column, end, 0,
						[&](const Buffer &b, int i, u32 at, u32 more) {
							x[i] = b.load4(at, more).w[0];
						});
		else
			from.template visit<TN>(column, end, 0,
						[&](const Buffer &b, int i, u32 at, u32 more) {
							x[i] = b.load2(at, more);
						});
	}
	METHOD void widen(const View &from)
	{
		UNROLL
		for (int i = 0; i < TN * Core::E && !BiasRow<C>::is_wide(from.dtype); i++)
			x[i] = float_to_bits(BiasRow<C>::narrow(x[i], from.dtype));
	}
	/* To the tiles from the n-th on. */
	template <int N> METHOD void add(typename Core::Acc (&t)[N], int n) const
	{
		UNROLL
		for (int i = 0; i < N * Core::E; i++)
			t[i / Core::E].x[i % Core::E] += bits_to_float(x[n * Core::E + i]);
	}

	/* The n-th tile of the gradient. */
	METHOD static void store(const View &to, i32 column, i32 end, int n,
				 const typename Core::Acc &t)
	{
		if (BiasRow<C>::is_wide(to.dtype)) {
			to.template visit<1>(column, end, n,
					     [&](const Buffer &b, int i, u32 at, u32 more) {
						     b.store4(float_to_bits(t.x[i]), at, more);
					     });
			return;
		}
		u16 x[Core::E];

		UNROLL
		for (int i = 0; i < Core::E; i++)
			x[i] = (u16)Element::from_float(t.x[i]);
		to.template visit<1>(column, end, n, [&](const Buffer &b, int i, u32 at, u32 more) {
			b.store2(x[i], at, more);
		});
	}
};

#endif
