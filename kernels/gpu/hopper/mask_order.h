/* SPDX-License-Identifier: MIT */
/*
 * mask_order.h: in which order blocks that own keys begin under a mask that is intervals. How long
 * one takes only the mask says: those that most rows see come first, so that what is left at the
 * end is short.
 *
 * A block a list looks at all rows, a wave 32 at a time, while other blocks of the stage, dot_do_o,
 * sum their rows. What 32 rows see together counts for all of them: what comes of it is an order,
 * and of each block's rows a range that may be too long. Blocks of about as much work stay beside
 * each other, since they share what they read.
 */
#ifndef FMHA_GPU_MASK_ORDER_H
#define FMHA_GPU_MASK_ORDER_H

#include "block/mask_data.h"

template <class C> struct MaskOrder {
	static const int WAVES = C::THREADS / FMHA_WAVE;
	static const int AT_ONCE = 4; /* rows of a lane whose endpoints are on their way together */
	static_assert(GRID_ORDER_LDS <= C::LDS_BYTES, "what the host gives");

	const abi_bwd_args &a;
	i32 n;                   /* blocks of the list */
	i32 *work, *first, *end; /* of each: waves that see it, then its class; its rows */

	METHOD MaskOrder(const abi_bwd_args &args, char *lds) : a(args)
	{
		n = ceil_div(a.sequences.seqlen_k_max, GRID_ORDER_KEYS);
		work = (i32 *)lds;
		first = work + GRID_ORDER_MOST;
		end = first + GRID_ORDER_MOST;
	}

	/* Of @head, an own list or that of all heads. */
	METHOD void write(i32 head, i32 batch) const
	{
		const Sequence v = find_sequence(a.sequences, 0, batch);
		const i32 of_list = a.mask_data.intervals.stride_head ? a.nhead_q / a.nhead_k : 1;

		for (i32 i = thread_id(); i < n; i += C::THREADS)
			work[i] = 0, first[i] = v.n_q, end[i] = 0;
		block_sync();
		for (i32 h = 0; h < of_list; h++)
			look(v, head * of_list + h);
		block_sync();
		for (i32 i = thread_id(); i < n; i += C::THREADS)
			work[i] = class_of(work[i]);
		block_sync();

		abi_key_block *list =
			(abi_key_block *)((i32 *)a.d.data - a.order_words) +
			(i64)grid_order_list(&a, batch, head) * n;

		for (i32 i = thread_id(); i < n; i += C::THREADS)
			list[place_of(i)] = abi_key_block{i, first[i], end[i]};
	}

private:
	/* Two classes to a power of two. */
	METHOD static i32 class_of(i32 waves)
	{
		const i32 log = 31 - __clz(waves);

		return waves < 2 ? waves : 2 * log + (waves >> (log - 1) & 1);
	}
	METHOD i32 place_of(i32 i) const
	{
		i32 before = 0;

		for (i32 j = 0; j < n; j++)
			before += work[j] > work[i] || (work[j] == work[i] && j < i);
		return before;
	}

	METHOD void look(const Sequence &v, i32 head) const
	{
		const Band band = Band::make<true>(a.band, v, 0, v.n_k);

		NO_UNROLL
		for (i32 row = wave_id() * FMHA_WAVE; row < v.n_q;
		     row += AT_ONCE * WAVES * FMHA_WAVE) {
			DataInterval x[AT_ONCE][2];

			UNROLL
			for (int i = 0; i < AT_ONCE; i++)
				row_of(v, row, i, head).some_at(0, x[i]);
			UNROLL
			for (int i = 0; i < AT_ONCE; i++) {
				add(v, band, row + i * WAVES * FMHA_WAVE, x[i][0]);
				add(v, band, row + i * WAVES * FMHA_WAVE, x[i][1]);
			}
			NO_UNROLL
			for (i32 k = 2; k < (a.mask_data.n_endpoints + 1) / 2; k++)
				UNROLL
				for (int i = 0; i < AT_ONCE; i++)
					add(v, band, row + i * WAVES * FMHA_WAVE,
					    row_of(v, row, i, head).at(k));
		}
	}
	METHOD DataRow row_of(const Sequence &v, i32 row, int i, i32 head) const
	{
		return DataRow::make(a.mask_data, v, row + i * WAVES * FMHA_WAVE + lane_id(), head);
	}

	/* An interval of each of 32 rows. Lanes behind the last row have its own. */
	METHOD void add(const Sequence &v, const Band &band, i32 row, DataInterval x) const
	{
		const i32 mine = min_of(row + lane_id(), v.n_q - 1);

		if (row >= v.n_q)
			return;
		if (band.sinks <= 0)
			x.low = max_of(x.low, band.first(mine));
		x.high = min_of(x.high, band.last(mine) + 1);

		const bool is_empty = x.low >= x.high;
		const i32 low = __reduce_min_sync(0xffffffffu, is_empty ? v.n_k : x.low),
			  high = __reduce_max_sync(0xffffffffu, is_empty ? 0 : x.high);

		for (i32 i = low / GRID_ORDER_KEYS + lane_id(); i * GRID_ORDER_KEYS < high;
		     i += FMHA_WAVE) {
			atomicAdd(work + i, 1);
			atomicMin(first + i, row);
			atomicMax(end + i, row + FMHA_WAVE);
		}
	}
};

#endif
