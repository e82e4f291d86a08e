/* SPDX-License-Identifier: MIT */
/*
 * fwd_scores.h: what forward attention does to S besides the softmax, in TM x TN
 * register tiles whose first element is at (row, column): row of the block's (packed) rows.
 */
#ifndef FMHA_GPU_FWD_SCORES_H
#define FMHA_GPU_FWD_SCORES_H

#include "fwd_block.h"
#include "mask_data.h"

template <class C, int TM, int TN> struct ForwardScores {
	typedef typename C::Core Core;
	typedef RegTile<Core, TM, TN> Scores;

	const ForwardBlock<C> &block;
	const typename ForwardBlock<C>::Keys &keys; /* whose pages may have factors of their own */
	const Modifiers<C> &modifiers;

	/* Raw products become logits, but for a bias whoever does not ADD_BIAS adds. */
	template <bool ADD_BIAS = true>
	METHOD void make_logits(Scores &s, i32 row, i32 column) const
	{
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				RowPlace p = block.place_of(row + m * 16 + Core::stat_row(r));
				float q_scale = C::DESCALE ? q_descale(p) : 1.0f;

				UNROLL
				for (int n = 0; n < TN; n++)
					UNROLL
					for (int e = 0; e < Core::E; e++) {
						i32 j = column + n * 16 + Core::column(e);
						float &x = s.t[m][n].x[e], slope;

						if (Core::stat(e) != r)
							continue;
						if (C::DESCALE)
							x *= q_scale *
							     key_descale(block.a.k_descale, j);
						x = modifiers.logit(x, p.head, p.row, j, &slope);
					}
				if (ADD_BIAS && C::BIAS == BIAS_MATRIX)
					BiasRow<C>::template make<false>(
						block.bias(), block.seq,
						RowPlace{p.row, p.head - block.head}, column)
						.add(s.t[m], r);
			}
	}

	/* Scores that must not count become -inf. */
	METHOD void mask(Scores &s, const Band &b, i32 row, i32 column) const
	{
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				i32 i = block.place_of(row + m * 16 + Core::stat_row(r)).row;
				/* Relative to the tile, on AMD to the lane's part of it (which
				 * makes NVIDIA's spill): compile-time columns then compare with
				 * these. */
				const i32 own = FMHA_NVIDIA ? 0 : Core::column(0),
					  from = column + own;
				i32 first = b.first(i) - from, last = b.last(i) - from;
				i32 begin = b.begin - from, sinks = b.sinks - from;

				UNROLL
				for (int n = 0; n < TN; n++) {
					UNROLL
					for (int e = 0; e < Core::E; e++) {
						i32 j = n * 16 + Core::column(e) - own;

						if (Core::stat(e) != r)
							continue;
						if (j > last || j < begin ||
						    (C::MASK && j < first && j >= sinks))
							s.t[m][n].x[e] = minus_infinity();
					}
					/* conditions of all tiles at once are too many scalar
					 * registers */
					if (C::BIAS == BIAS_MATRIX)
						scheduling_barrier();
				}
			}
	}

	/* CHOSEN: of entries that name no key, too. What is asked in a block of its own meets again
	 * before scores change: clang 22 gives what changes in an else to other paths, see
	 * structurizing.py. */
	METHOD void hide_absent(Scores &s, i32 column) const
	{
		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int e = 0; e < Core::E; e++) {
				i32 j = column + n * 16 + Core::column(e);

				bool there = j < hidden_lane(keys.end_of(j, block.seq.n_k));

				UNROLL
				for (int m = 0; m < TM; m++)
					s.t[m][n].x[e] =
						there ? s.t[m][n].x[e] : minus_infinity();
			}
	}

	/* The same by a mask that is data. */
	METHOD void mask_data(Scores &s, i32 row, i32 column) const
	{
		block.mask_data().hide(
			s, column, [&](int m) { return row + m * 16; },
			[&](i32 r) { return block.place_of(min_of(r, block.n_rows - 1)); });
	}

	/* P, whose sums were taken, becomes what V is multiplied with: dropped, times v's factors
	 * where a head has several. What is kept grows at the end: ForwardOutput::finish_row(). */
	METHOD void drop(Scores &s, i32 row, i32 column) const
	{
		const abi_fwd_args &a = block.a;
		DropoutTile<Core, false> random;
		bool has_factors = block.weighs_factors();

		static_assert(!(C::DROPOUT && C::PACK), "a tile's rows belong to one head");
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int n = 0; n < TN; n++) {
				if (C::DROPOUT) {
					i32 batch_head = block.seq.batch * a.nhead_q + block.head;
					i32 first_row = row + m * 16, first = column + n * 16;

					if (n % 2 && TN % 2 == 0) /* columns begin with a patch */
						random.template make<true>(a.dropout, batch_head,
									   first_row, first);
					else
						random.template make<false>(a.dropout, batch_head,
									    first_row, first);
					drop_tile(s.t[m][n], random);
				}
				if (has_factors)
					UNROLL
					for (int e = 0; e < Core::E; e++)
						s.t[m][n].x[e] *= key_descale(
							a.v_descale,
							column + n * 16 + Core::column(e));
			}
	}

	METHOD void drop_tile(typename Core::Acc &s, const DropoutTile<Core, false> &random) const
	{
		const abi_dropout &d = block.a.dropout;

		UNROLL
		for (int e = 0; e < Core::E; e++)
			s.x[e] = random.byte(e) <= (u32)d.keep_at_most ? s.x[e] : 0.0f;
	}

	METHOD float q_descale(RowPlace p) const
	{
		const abi_descale &d = block.a.q_descale;

		if (!d.data || p.row >= block.seq.n_q)
			return 1.0f;
		return d.data[block.seq.batch * d.stride_batch + p.head * d.stride_head +
			      (d.block ? p.row / d.block * d.stride_block : 0)];
	}

	METHOD float key_descale(const abi_descale &d, i32 j) const
	{
		i32 position = min_of(j, block.seq.n_k - 1) + block.seq.leftpad;
		i32 b = block.seq.batch;

		if (!d.data || block.seq.n_k == 0)
			return 1.0f;
		if constexpr (C::CHOSEN)
			position = max_of(keys.named(min_of(j, block.seq.n_k - 1)), 0);
		if constexpr (C::PAGED)
			if (d.per_page && block.a.cache.page_size)
				b = keys.page_of(position), position %= block.a.cache.page_size;
		return d.data[b * d.stride_batch + block.head_k * d.stride_head +
			      (d.block ? position / d.block * d.stride_block : 0)];
	}
};

#endif
