/* SPDX-License-Identifier: MIT */
/*
 * fwd_partials.h: decode's way out. Parts of a block, waves or teams of them, had a share of the
 * keys each; what they found of the block's rows meets in LDS: O in units of each row's maximum, so
 * many dimensions at a time, then maxima and sums. They are always merged in the same order.
 */
#ifndef FMHA_GPU_FWD_PARTIALS_H
#define FMHA_GPU_FWD_PARTIALS_H

#include "fwd_output.h"

/* STRIDE: floats between rows of O; ROWS: that meet at once. */
template <class C, int PARTS, int STRIDE, int ROWS = C::TILE_M> struct PartialRows {
	static const int STATS_AT = ROWS * STRIDE, FLOATS = STATS_AT + 2 * ROWS; /* of a part */
	typedef Softmax<typename C::Core, 1, false, false> Rule;

	/* Four neighbours of a row. */
	struct Slot {
		float m, l;
		Four sum;
	};

	float *lds;

	METHOD float *sums(i32 part, i32 row) const { return lds + part * FLOATS + row * STRIDE; }
	METHOD float *stats(i32 part, i32 row) const
	{
		return lds + part * FLOATS + STATS_AT + 2 * row;
	}
	METHOD void put_stats(i32 part, i32 row, float m, float l) const
	{
		stats(part, row)[0] = m;
		stats(part, row)[1] = l;
	}

	METHOD Slot merge(i32 row, i32 at, float unit) const
	{
		Slot x = {minus_infinity(), 0, {}};
		float m[PARTS];

		UNROLL
		for (int n = 0; n < PARTS; n++) {
			m[n] = stats(n, row)[0];
			x.m = larger(x.m, m[n]);
		}
		UNROLL
		for (int n = 0; n < PARTS; n++) {
			float w = exp2_fast(m[n] * unit - Rule::origin(x.m, unit));
			Four y = *(const Four *)(sums(n, row) + at);

			x.l += w * stats(n, row)[1];
			UNROLL
			for (int d = 0; d < 4; d++)
				x.sum.f[d] += w * y.f[d];
		}
		return x;
	}
};

/* @row: of the block; @output: what knows how its rows end; @unit: of the values. */
template <class C, int TM, class Slot>
DEV void store_slot(const ForwardOutput<C, TM> &output, const Slot &x, i32 row, i32 dim,
		    float unit = 1.0f)
{
	const ForwardBlock<C> &block = output.block;
	const abi_fwd_args &a = block.a;
	RowPlace p = block.place_of(block.tile_row + row);
	float lse, factor = output.finish_row(x.m, x.l, p.head, &lse);
	Four y;

	if (dim == 0)
		output.store_lse(p, lse);
	if (dim >= a.hdim_v)
		return;
	UNROLL
	for (int d = 0; d < 4; d++)
		y.f[d] = factor == 0.0f ? 0.0f : x.sum.f[d] * factor * unit;
	if (C::SPLIT)
		store_four(a.o_acc, ABI_F32, output.split_row(p) * a.hdim_v + dim, 1, y.f,
			   a.hdim_v - dim);
	else
		store_four(a.o.data, a.o_dtype,
			   q_offset(a.o, block.seq, p.row, p.head) + dim * a.o.stride_dim,
			   a.o.stride_dim, y.f, a.hdim_v - dim);
}

#endif
