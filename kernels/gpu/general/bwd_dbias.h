/* SPDX-License-Identifier: MIT */
/*
 * bwd_dbias.h: dBias of a bias that is broadcast: a block owns TILE_N keys and TILE_M queries (all
 * of them, where rows are broadcast) of one matrix and goes through everything that is summed,
 * always in the same order.
 */
#ifndef FMHA_GPU_BWD_DBIAS_H
#define FMHA_GPU_BWD_DBIAS_H

#include "bwd_loop.h"

template <class C> struct DbiasPass {
	typedef typename C::Core Core;
	typedef BackwardLoop<C, true> Loop;
	typedef typename Loop::Scores Scores, Tiles;
	static const int COLUMNS = Loop::COLUMNS;

	Loop &loop;
	Scores &sum;
	bool sum_batch, sum_head, sum_row;
	i32 rows; /* that some sequence has: the others are nobody's, and keep what they held */

	METHOD DbiasPass(Loop &l, Scores &to) : loop(l), sum(to)
	{
		const abi_bwd_args &a = l.at.a;

		sum_head = abi_sums_heads(&a);
		sum_row = abi_sums_rows(&a);
		sum_batch = abi_sums_batch(&a);
		rows = 0;
	}

	METHOD void run(const BackwardBlock<C> &block)
	{
		const abi_bwd_args &a = loop.at.a;
		/* first query, unless all are summed */
		i32 column = block.dbias_tile() / block.grid.n_keys * COLUMNS;
		i32 h = block.head, b = block.batch;
		i32 last_b = sum_batch ? a.sequences.batch : b + 1;
		i32 last_h = sum_head ? a.nhead_q : h + 1;

		if ((sum_batch && b > 0) || (sum_head && h > 0) || (sum_row && column > 0))
			return;
		sum.zero();
		NO_UNROLL
		for (i32 batch = b; batch < last_b; batch++) {
			loop.at.enter_sequence(batch);
			rows = max_of(rows, loop.at.seq.n_q);
			NO_UNROLL
			for (i32 i = h; i < last_h && loop.first < loop.at.seq.n_k; i++)
				add_head(i, column);
		}
		if (sum_row)
			store_row(h);
		else
			store_tile(h, column);
	}

	METHOD void add_head(i32 h, i32 column)
	{
		BackwardPlace<C> &at = loop.at;
		const abi_bwd_args &a = at.a;
		i32 end = sum_row ? at.seq.n_q : min_of(at.seq.n_q, column + COLUMNS);
		i32 head_k = h / (a.nhead_q / a.nhead_k);
		typename Loop::Stationary kv;

		at.head = h;
		block_sync(); /* the last head's tiles are done with */
		loop.park();
		kv.fetch(loop, at.keys(a.k, head_k, a.hdim_q, false),
			 at.keys(a.v, head_k, a.hdim_v, true), at.seq.n_k);
		NO_UNROLL
		for (; column < end; column += COLUMNS)
			add_tile(kv, column);
	}

	struct Add {
		Scores &sum;

		METHOD void operator()(int m, int n, i32, const typename Core::Acc &dz) const
		{
			UNROLL
			for (int e = 0; e < Core::E; e++)
				sum.t[m][n].x[e] += dz.x[e];
		}
	};

	METHOD void add_tile(const typename Loop::Stationary &kv, i32 column)
	{
		const BackwardPlace<C> &at = loop.at;
		const typename Loop::Steps steps = {loop};
		const typename Loop::StreamedStats stats = {loop, loop.stats_of(0), column};
		typename Loop::Pair pair;
		Scores s, dp;

		pair.place(loop.lds, 0);
		block_sync();
		if (Loop::STATS_IN_LDS)
			loop.template fetch_stats<COLUMNS>(loop.stats_of(0), column);
		pair.fetch_in_turn(at.queries(at.a.q, at.a.hdim_q),
				   at.queries(at.a.d_o, at.a.hdim_v), column, at.seq.n_q);
		block_sync();
		s.zero();
		Loop::template multiply_rows<C::HDIM_Q>(s, kv.q, pair.q);
		steps.prepare(s, column, true);
		dp.zero();
		Loop::template multiply_rows<C::HDIM_V>(dp, kv.v, pair.v);
		steps.gradients(s, dp, column, true, stats, Add{sum});
	}

	METHOD void put(i32 i, i32 j, i32 h, float x) const
	{
		const abi_bwd_args &a = loop.at.a;

		if (j < a.sequences.seqlen_k_max)
			store_from_float(
				a.dbias.data, a.bias_dtype,
				q_offset(a.dbias, loop.at.seq, i, h) + j * a.dbias.stride_dim, x);
	}

	METHOD void store_tile(i32 h, i32 column) const
	{
		UNROLL
		for (int m = 0; m < Loop::TM; m++)
			UNROLL
			for (int n = 0; n < Loop::TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					i32 i = column + n * 16 + Core::column(e);

					if (i < rows)
						put(i, loop.wave_row(m) + Core::row(e), h,
						    sum.t[m][n].x[e]);
				}
	}

	/* One query for all: its keys are the tile's rows. */
	METHOD void store_row(i32 h) const
	{
		UNROLL
		for (int m = 0; m < Loop::TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				bool mine = false;
				float x = 0;

				UNROLL
				for (int n = 0; n < Loop::TN; n++)
					UNROLL
					for (int e = 0; e < Core::E; e++)
						if (Core::stat(e) == r) {
							x += sum.t[m][n].x[e];
							mine = mine ||
							       (n == 0 && Core::column(e) == 0);
						}
				x = Core::row_sum(x);
				if (mine)
					put(0, loop.wave_row(m) + Core::stat_row(r), h, x);
			}
	}
};

#endif
