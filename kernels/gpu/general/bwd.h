/* SPDX-License-Identifier: MIT */
/*
 * bwd.h: gradients of q, k, v and the bias, in two passes that share one launch and one loop.
 *
 *   keys stationary:     a block owns TILE_N keys of one KV head and streams queries:
 *                        P^T = exp(K Q^T - LSE), dP^T = V dO^T, dV += P^T dO, dK += dS^T Q
 *   queries stationary:  a block owns DQ_TILE_N queries of one head and streams keys:
 *                        P = exp(Q K^T - LSE), dP = dO V^T, dQ += dS K
 *
 * with dS = P (dP - D). Seven products instead of five, but no atomics, no workspace, the same bits
 * on every run, and P and dS never leave the registers: what one product leaves there is the
 * operand of the next, on every matrix core. In a tile the stationary side is the row, the streamed
 * side the column, so "row" is a key in the first pass and a query in the second.
 *
 * Heads that share keys: their gradients are summed by the block that owns the keys. PARTED: a
 * block finds half of a gradient's columns, then the other half.
 *
 * SPLIT: blocks that own the same queries have a part of the keys each, and leave their sums in
 * dq_acc.
 */
#ifndef FMHA_GPU_BWD_H
#define FMHA_GPU_BWD_H

#include "bwd_dbias.h"

/* What fits the registers: with wide heads dK and dV have a block each. */
enum { DK_AND_DV, DK_ONLY, DV_ONLY };

template <class C, int WHAT> struct DkDvPass {
	typedef typename C::Core Core;
	typedef BackwardLoop<C, true> Loop;
	typedef typename Loop::Steps Steps;
	static const int ROWS = Loop::ROWS, COLUMNS = Loop::COLUMNS;

	struct Tiles {
		typename Loop::Stationary kv;
		RegTile<Core, Loop::TM, Loop::TD> dk;
		RegTile<Core, Loop::TM, Loop::TV> dv;
	};
	Loop &loop;
	Tiles &x;
	i32 part;   /* PARTED: the first of dK's and dV's columns */
	bool dbias; /* is written here */

	METHOD void run(BackwardBlock<C> block)
	{
		const i32 hdim = WHAT == DV_ONLY   ? loop.at.a.hdim_v
				 : WHAT == DK_ONLY ? loop.at.a.hdim_q
						   : lds_max(loop.at.a.hdim_q, loop.at.a.hdim_v);

		NO_UNROLL
		for (part = 0; part < (C::PARTED ? hdim : 1);
		     part += WHAT == DV_ONLY ? C::PART_V : C::PART_Q)
			run_part(block);
	}

	METHOD void run_part(BackwardBlock<C> block)
	{
		BackwardPlace<C> &at = loop.at;
		const abi_bwd_args &a = at.a;
		i32 head_k = block.head;

		at.enter_sequence(block.batch);
		if (loop.first >= at.seq.n_k)
			return;
		x.kv.fetch(loop, at.keys(a.k, head_k, a.hdim_q, false),
			   at.keys(a.v, head_k, a.hdim_v, true), at.seq.n_k);
		x.dk.zero();
		x.dv.zero();
		dbias = C::BIAS == BIAS_MATRIX && !C::DBIAS_SUM && a.dbias.data &&
			WHAT != DV_ONLY && (!C::PARTED || part == 0);

		/* Where it is in the problem is not kept while it streams. */
		NO_UNROLL
		for (i32 i = 0; i < at.q_per_k(); i++) {
			block = BackwardBlock<C>::here(a);
			at.enter_sequence(block.batch);
			at.head = block.head * at.q_per_k() + i;
			block_sync(); /* the last head's tiles are done with */
			loop.stream(query_tiles(), at.queries(a.q, a.hdim_q),
				    at.queries(a.d_o, a.hdim_v), at.seq.n_q, *this);
		}
		block = BackwardBlock<C>::here(a);
		at.enter_sequence(block.batch);
		loop.first = block.first_key();
		head_k = block.head;
		loop.wave = wave_id();
		if (WHAT != DV_ONLY && (!C::PARTED || part < a.hdim_q))
			store(x.dk, a.dk, head_k, a.hdim_q, a.scale);
		if (WHAT != DK_ONLY && (!C::PARTED || part < a.hdim_v))
			store(x.dv, a.dv, head_k, a.hdim_v, 1.0f);
	}

	template <int T>
	METHOD void store(const RegTile<Core, Loop::TM, T> &sum, const abi_tensor &t, i32 head_k,
			  i32 hdim, float factor) const
	{
		const i32 from = C::PARTED ? part : 0;

		store_gradient<C>(sum, loop.lds, loop.wave, loop.wave_row(0), t, loop.at.a.dtype,
				  k_offset(t, loop.at.seq, 0, head_k) + from * t.stride_dim,
				  hdim - from, factor, loop.at.seq.n_k);
	}

	/* The query tiles that may see the block's keys; dBias is written everywhere, masked or
	 * not. */
	METHOD ColumnTiles query_tiles() const
	{
		ColumnTiles tiles = ColumnTiles::of_rows(loop.at.band, C::MASK && !dbias,
							 loop.first, loop.first + ROWS - 1,
							 loop.at.seq.n_q, COLUMNS);

		if constexpr (C::MASK_DATA != MASK_DATA_NONE)
			if (!dbias) {
				const DataReach reach =
					loop.at.mask_data().template queries_of<C::WAVES_M>(
						loop.at.head, loop.first, loop.first + ROWS,
						loop.lds + Loop::PAIRS_AT);

				tiles.narrow(reach.low, reach.high);
			}
		return tiles;
	}

	/* The gradients of the logits, where somebody wants them. */
	struct StoreDbias {
		const Steps &steps;
		i32 column;
		bool wanted;

		METHOD void operator()(int, int n, i32 row, const typename Core::Acc &dz) const
		{
			if (C::BIAS != BIAS_MATRIX || !wanted)
				return;
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				steps.bias_row(steps.facts.dbias(), row + Core::stat_row(r),
					       column + n * 16)
					.store(dz, r);
		}
	};

	METHOD void step(const typename Loop::StreamedQ &q, const typename Loop::StreamedV &d_o,
			 int buffer, i32 column)
	{
		const Steps steps = {loop};
		const typename Loop::StreamedStats stats = {loop, loop.stats_of(buffer), column};
		typename Loop::Scores s, dp;
		i32 from = loop.first_row();
		/* queries beyond n_q have P = 0 */
		bool masked = C::MASK || from + ROWS > loop.seq().n_k;

		if (C::MASK && from + ROWS <= loop.seq().n_k)
			masked = !loop.band().sees_all(column, column + COLUMNS - 1, from, ROWS);
		s.zero();
		Loop::template multiply_rows<C::HDIM_Q>(s, x.kv.q, q);
		steps.prepare(s, column, masked);
		dp.zero();
		if (WHAT != DV_ONLY)
			Loop::template multiply_rows<C::HDIM_V>(dp, x.kv.v, d_o);
		steps.gradients(s, dp, column, masked, stats, StoreDbias{steps, column, dbias});
		if (WHAT != DK_ONLY && (!C::PARTED || part < loop.at.a.hdim_v))
			Loop::multiply_columns(x.dv, s, d_o, part);
		if (WHAT != DV_ONLY && (!C::PARTED || part < loop.at.a.hdim_q))
			Loop::multiply_columns(x.dk, dp, q, part);
	}
};

template <class C> struct DqPass {
	typedef typename C::Core Core;
	typedef BackwardLoop<C, false> Loop;
	static const int ROWS = Loop::ROWS, COLUMNS = Loop::COLUMNS;

	struct Tiles {
		typename Loop::Stationary q_do;
		RegTile<Core, Loop::TM, Loop::TD> dq;
		typename Loop::StationaryStats stats;
	};
	Loop &loop;
	Tiles &x;
	i32 part; /* PARTED: the first of dQ's columns */

	METHOD void run(BackwardBlock<C> block)
	{
		NO_UNROLL
		for (part = 0; part < (C::PARTED ? loop.at.a.hdim_q : 1); part += C::PART_Q) {
			if (C::PARTED)
				block_sync(); /* the last part's results have left LDS */
			run_part(block);
		}
	}

	METHOD void run_part(BackwardBlock<C> block)
	{
		BackwardPlace<C> &at = loop.at;
		const abi_bwd_args &a = at.a;

		at.head = block.head;
		at.enter_sequence(block.batch);
		if (loop.first >= at.seq.n_q)
			return;
		i32 last = min_of(loop.first + ROWS, at.seq.n_q) - 1;

		if constexpr (C::MASK_DATA != MASK_DATA_NONE)
			narrow(at.band, at.mask_data().template reach_of<C::WAVES_M>(
						loop.first, last + 1 - loop.first, loop.lds,
						[&](i32 row) { return RowPlace{row, at.head}; }));
		ColumnTiles tiles = ColumnTiles::make<C::MASK>(at.band, loop.first, last, COLUMNS);

		if constexpr (C::SPLIT) {
			i32 n_splits = splits_of(a, block.batch), physical;
			abi_tensor to = {dq_acc_of(a, at.seq, &physical), 0, a.hdim_q, 0, 1};
			dq_acc_layout layout = dq_layout_of(a);

			NO_UNROLL
			for (i32 split = block.first_split(); split < n_splits;
			     split += block.grid.n_splits) {
				block_sync(); /* the last split's results have left LDS */
				sum_tiles(SplitOfTiles::make(tiles, split, n_splits));
				store(to, ABI_F32,
				      at.head * dq_acc_head(&layout, physical, n_splits) +
					      (i64)split * physical * a.hdim_q,
				      1.0f);
			}
		} else {
			sum_tiles(tiles);
			/* Not kept during the loop, where registers are dear. */
			block = BackwardBlock<C>::here(a);
			at.head = block.head;
			at.enter_sequence(block.batch);
			loop.first = block.first_row();
			loop.wave = wave_id();
			store(a.dq, a.dtype, q_offset(a.dq, at.seq, 0, at.head), a.scale);
		}
	}

	METHOD void store(const abi_tensor &t, i32 dtype, i64 offset, float factor) const
	{
		const i32 from = C::PARTED ? part : 0;

		store_gradient<C>(x.dq, loop.lds, loop.wave, loop.wave_row(0), t, dtype,
				  offset + from * t.stride_dim, loop.at.a.hdim_q - from, factor,
				  loop.at.seq.n_q);
	}

	/* dQ / scale of the block's rows, from the keys of `tiles`. */
	template <class Columns> METHOD void sum_tiles(const Columns &tiles)
	{
		const BackwardPlace<C> &at = loop.at;
		const abi_bwd_args &a = at.a;
		i32 head_k = at.head / (a.nhead_q / a.nhead_k);

		x.q_do.fetch(loop, at.queries(a.q, a.hdim_q), at.queries(a.d_o, a.hdim_v),
			     at.seq.n_q);
		x.dq.zero();
		x.stats.fetch(loop);
		loop.stream(tiles, at.keys(a.k, head_k, a.hdim_q, false),
			    at.keys(a.v, head_k, a.hdim_v, true), at.seq.n_k, *this);
	}

	struct Nothing {
		METHOD void operator()(int, int, i32, const typename Core::Acc &) const {}
	};

	METHOD void step(const typename Loop::StreamedQ &k, const typename Loop::StreamedV &v, int,
			 i32 column)
	{
		const typename Loop::Steps steps = {loop};
		typename Loop::Scores s, dp;
		i32 from = loop.first_row();
		bool masked = column + COLUMNS > loop.seq().n_k;

		if (C::MASK)
			masked = !loop.band().sees_all(from, from + ROWS - 1, column, COLUMNS);
		s.zero();
		Loop::template multiply_rows<C::HDIM_Q>(s, x.q_do.q, k);
		steps.prepare(s, column, masked);
		dp.zero();
		Loop::template multiply_rows<C::HDIM_V>(dp, x.q_do.v, v);
		steps.gradients(s, dp, column, masked,
				typename Loop::StationaryReader{loop, x.stats}, Nothing());
		Loop::multiply_columns(x.dq, dp, k, part);
	}
};

/* What a pass knows, and the arrays that are to become registers, are apart. */
template <class Pass, class Block>
DEV void run_pass(const abi_bwd_args &a, char *lds, i32 first, const Block &block)
{
	typename Pass::Loop loop(a, lds, first);
	typename Pass::Tiles tiles;

	Pass{loop, tiles}.run(block);
}

template <class C> DEV void backward(const abi_bwd_args &a, char *lds)
{
	const BackwardBlock<C> block = BackwardBlock<C>::here(a);

	if constexpr (C::DBIAS_SUM)
		if (block.dbias_tile() >= 0)
			return run_pass<DbiasPass<C>>(
				a, lds, block.dbias_tile() % block.grid.n_keys * C::TILE_N, block);
	if (block.x >= block.grid.n_key_blocks)
		run_pass<DqPass<C>>(a, lds, block.first_row(), block);
	else if (block.head >= a.nhead_k)
		return;
	else if constexpr (!C::SPLIT_DKDV)
		run_pass<DkDvPass<C, DK_AND_DV>>(a, lds, block.first_key(), block);
	else if (block.x % 2)
		run_pass<DkDvPass<C, DV_ONLY>>(a, lds, block.first_key(), block);
	else
		run_pass<DkDvPass<C, DK_ONLY>>(a, lds, block.first_key(), block);
}

#endif
