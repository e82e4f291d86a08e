/* SPDX-License-Identifier: MIT */
/*
 * bwd_block.h: what a block of the backward pass is for, where in the problem it is, and how a
 * gradient leaves it, whatever its main loop.
 */
#ifndef FMHA_GPU_BWD_BLOCK_H
#define FMHA_GPU_BWD_BLOCK_H

#include "mask_data.h"

/* Blocks of a head: those that own keys, those that own queries, those that sum a broadcast dBias.
 * Computed anew where it is needed, since registers are dear in between. */
template <class C> struct BackwardBlock {
	static const int PER_TILE = C::SPLIT_DKDV ? 2 : 1; /* blocks of a tile of keys */
	struct grid_backward grid;
	i32 x, head, batch; /* x: of the blocks of a head */

	METHOD static BackwardBlock here(const abi_bwd_args &a)
	{
		/* q, k, v and dO */
		const int ROW_BYTES = 2 * (C::HDIM_Q + C::HDIM_V) *
				      (int)sizeof(typename C::Element::Storage);
		BackwardBlock b;

		b.grid = grid_backward_of(&a, C::TILE_M, C::TILE_N, C::DQ_TILE_N, C::SPLIT_DKDV,
					  C::DBIAS_SUM);
		b.x = hidden(block_id_x()), b.head = hidden(block_id_y()),
		b.batch = hidden(block_id_z());
		if (C::MASK && !C::DBIAS_SUM)
			longest_first(b.grid.n_key_blocks + b.grid.n_row_blocks, a.nhead_q,
				      heads_at_once(a.sequences.seqlen_k_max, ROW_BYTES, a.nhead_q),
				      &b.x, &b.head);
		return b;
	}

	METHOD i32 first_key() const { return x / PER_TILE * C::TILE_N; }
	METHOD i32 first_row() const { return grid_backward_row_tile(grid, x) * C::DQ_TILE_N; }
	METHOD i32 first_split() const { return grid_backward_split(grid, x); }
	METHOD i32 dbias_tile() const { return grid_backward_bias_tile(grid, x); }
};

/* Of the tiles that a block needs, in their order, those of one of n splits. */
struct SplitOfTiles {
	ColumnTiles all;
	i32 from, count;

	METHOD static SplitOfTiles make(const ColumnTiles &tiles, i32 split, i32 n)
	{
		i32 from = (i32)((i64)tiles.count * split / n);

		return SplitOfTiles{tiles, from, (i32)((i64)tiles.count * (split + 1) / n) - from};
	}
	METHOD i32 column(i32 n) const { return all.column(from + n); }
};

/* The sequence and head that a pass is at. */
template <class C> struct BackwardPlace {
	typedef typename C::Element Element;
	typedef KeyView<Element, false> Keys;
	typedef QueryView<Element, false> Queries;

	const abi_bwd_args &a;
	Sequence seq;
	Band band;
	Modifiers<C> modifiers;
	i32 head;

	METHOD BackwardPlace(const abi_bwd_args &args) : a(args) {}

	METHOD void enter_sequence(i32 b)
	{
		seq = find_sequence(a.sequences, 0, b);
		band = Band::make<C::MASK>(a.band, seq, 0, seq.n_k);
		modifiers = Modifiers<C>::make(a, seq);
	}

	METHOD i32 q_per_k() const { return hidden(a.nhead_q) / a.nhead_k; }

	METHOD Queries queries(const abi_tensor &t, i32 hdim) const
	{
		return Queries::make(t, seq, head, 1, hdim);
	}
	METHOD Keys keys(const abi_tensor &t, i32 head_k, i32 hdim, bool is_v) const
	{
		const abi_kv_cache none = {};

		return Keys::make(t, seq, none, head_k, a.nhead_k, hdim, is_v);
	}
	METHOD DataMask<C> mask_data() const { return DataMask<C>{a.mask_data, seq}; }
	METHOD BiasView bias(const abi_tensor &t) const
	{
		return BiasView::make<Element>(t, a.bias_dtype, seq, head);
	}

	/* -LSE in powers of two, such that exp2(score * unit + this) = P; -inf where P must be 0,
	 * or cannot be told from what float32 keeps of a LSE beside a huge maximum (base.h). */
	METHOD float lse_of(i32 i) const
	{
		if (i >= seq.n_q)
			return minus_infinity();
		return exponent_of(a.lse.data[rows_offset(a.lse, seq, i, head)]);
	}
	METHOD static float exponent_of(float lse)
	{
		return magnitude_of(lse) >= 1e30f ? minus_infinity() : -lse * FMHA_LOG2_E;
	}

	METHOD float d_of(i32 i) const
	{
		return i < seq.n_q ? a.d.data[rows_offset(a.d, seq, i, head)] : 0.0f;
	}
};

/* A gradient's rows below `end`, the wave's from `row` on, of hdim columns, times `factor`: through
 * LDS so that stores are whole chunks. */
template <class C, class Core, int TM, int T>
DEV void store_gradient(const RegTile<Core, TM, T> &x, char *lds, i32 wave, i32 row,
			const abi_tensor &t, i32 dtype, i64 offset, i32 hdim, float factor, i32 end)
{
	const int STRIDE = lds_stage_stride(lds_max(C::PART_Q, C::PART_V));
	float *stage = (float *)lds + wave * 16 * STRIDE;

	block_sync(); /* the tiles are not needed any more */
	UNROLL
	for (int m = 0; m < TM; m++) {
		wave_sync();
		UNROLL
		for (int d = 0; d < T; d++) {
			UNROLL
			for (int e = 0; e < Core::E; e++)
				stage[Core::row(e) * STRIDE + d * 16 + Core::column(e)] =
					x.t[m][d].x[e] * factor;
			scheduling_barrier();
		}
		wave_sync();
		NO_UNROLL
		for (i32 index = lane_id(); index < 16 * (T * 2); index += FMHA_WAVE) {
			i32 r = row + m * 16 + index / (T * 2), dim = index % (T * 2) * 8;

			if (r < end && dim < hdim)
				store_chunk(t.data, dtype,
					    offset + r * t.stride_seq + dim * t.stride_dim,
					    t.stride_dim, stage + index / (T * 2) * STRIDE + dim,
					    hdim - dim);
		}
	}
}

#endif
