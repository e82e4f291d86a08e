/* SPDX-License-Identifier: MIT */
/*
 * fwd_output.h: from sums to results: partial results of waves are merged, O = sum / l and LSE are
 * stored, or, SPLIT, become the partial results of a split.
 */
#ifndef FMHA_GPU_FWD_OUTPUT_H
#define FMHA_GPU_FWD_OUTPUT_H

#include "fwd_block.h"

/* A wave's share of the result: rows wave * 16 TM .. of the block. */
template <class C, int TM> struct ForwardOutput {
	typedef typename C::Core Core;
	static const int TD = C::PART_V / 16;
	static const int STAGE_STRIDE = lds_stage_stride(C::PART_V);
	typedef Softmax<Core, TM, false, false> Rule;

	const ForwardBlock<C> &block;
	RegTile<Core, TM, TD> &o;
	SoftmaxRows<Core, TM> &rows;
	float unit;
	i32 wave;
	i32 part = 0; /* PARTED: the first of its columns */
	/* Whether they are to be merged. Hopper's loop takes problems without splits as if they had
	 * some. */
	bool are_parts = C::SPLIT;

	/* First (packed) row of 16-row tile m. */
	METHOD i32 row_of(int m) const { return block.tile_row + (wave * TM + m) * 16; }

	/* Waves that shared a tile's keys, each with a softmax of its own: wave_n 0 collects. */
	METHOD void merge(float *lds, i32 wave_n)
	{
		const int COUNT = TM * TD * Core::E + 2 * TM * Core::STATS;
		float *mine = lds + ((wave_n - 1) * C::WAVES_M + wave) * COUNT * FMHA_WAVE +
			      lane_id();

		block_sync();
		if (wave_n > 0)
			put(mine);
		block_sync();
		if (wave_n > 0)
			return;
		for (int w = 1; w < C::WAVES_N; w++)
			take(lds + ((w - 1) * C::WAVES_M + wave) * COUNT * FMHA_WAVE + lane_id());
	}

	METHOD void put(float *to)
	{
		int i = 0;

		UNROLL
		for (int m = 0; m < TM; m++) {
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				to[i++ * FMHA_WAVE] = rows.m(m, r);
				to[i++ * FMHA_WAVE] = rows.l(m, r);
			}
			UNROLL
			for (int d = 0; d < TD; d++) {
				UNROLL
				for (int e = 0; e < Core::E; e++)
					to[i++ * FMHA_WAVE] = plain_register(o.t[m][d].x[e]);
				scheduling_barrier();
			}
		}
	}

	METHOD void take(const float *from)
	{
		int i = 0;

		UNROLL
		for (int m = 0; m < TM; m++) {
			float keep[Core::STATS], add[Core::STATS];

			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				float other = from[i++ * FMHA_WAVE], sum = from[i++ * FMHA_WAVE];
				float high = larger(rows.m(m, r), other);
				float origin = Rule::origin(high, unit);

				keep[r] = exp2_fast(rows.m(m, r) * unit - origin);
				add[r] = exp2_fast(other * unit - origin);
				rows.m(m, r) = high;
				rows.l(m, r) = rows.l(m, r) * keep[r] + sum * add[r];
			}
			UNROLL
			for (int d = 0; d < TD; d++) {
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					float &x = o.t[m][d].x[e];

					x = x * keep[Core::stat(e)] +
					    from[i++ * FMHA_WAVE] * add[Core::stat(e)];
				}
				if (d % 4 == 3)
					Core::step(); /* not all of them at once */
			}
		}
	}

	/* Into memory, by way of LDS. */
	METHOD void store(float *lds)
	{
		float *stage = lds + wave * 16 * STAGE_STRIDE;

		block_sync(); /* K, V and Q are not needed any more */
		UNROLL
		for (int m = 0; m < TM; m++) {
			wave_sync();
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				finish_rows(m, r, stage);
			wave_sync();
			store_rows(m, stage);
		}
	}

	/* The first element of a lane that belongs to row statistic r. */
	METHOD static constexpr int first_of(int r)
	{
		int e = 0;

		while (Core::stat(e) != r)
			e++;
		return e;
	}

	METHOD void finish_rows(int m, int r, float *stage)
	{
		i32 at = Core::stat_row(r);
		float sum = Core::row_sum(rows.l(m, r)), lse = 0, factor = 0;

		if (row_of(m) + at < block.n_rows) {
			RowPlace p = block.place_of(row_of(m) + at);

			factor = finish_row(rows.m(m, r), sum, p.head, &lse) *
				 block.result_factor();
			if (Core::column(first_of(r)) == 0)
				store_lse(p, lse);
		}
		UNROLL
		for (int d = 0; d < TD; d++) {
			UNROLL
			for (int e = 0; e < Core::E; e++)
				if (Core::stat(e) == r)
					stage[at * STAGE_STRIDE + d * 16 + Core::column(e)] =
						factor == 0.0f ? 0.0f : o.t[m][d].x[e] * factor;
			scheduling_barrier();
		}
	}

	/* 1 / l, for what dropout kept, and LSE of a row; the sink joins the denominator. */
	METHOD float finish_row(float m, float sum, i32 row_head, float *ret_lse) const
	{
		const abi_fwd_args &a = block.a;
		const float kept = C::DROPOUT ? a.dropout.p_keep_inverse : 1.0f;
		float origin = m == minus_infinity() ? minus_infinity() : m * unit;

		if (a.sink && !are_parts) {
			float sink = a.sink[row_head] * FMHA_LOG2_E;
			float high = larger(origin, sink);

			if (high == minus_infinity()) {
				*ret_lse = high;
				return 0.0f;
			}
			float factor = exp2_fast(origin - high),
			      total = sum * factor + exp2_fast(sink - high);

			*ret_lse = high * FMHA_LN_2 + log2_fast(total) * FMHA_LN_2;
			return kept * factor * reciprocal(total);
		}
		if (origin == minus_infinity()) {
			/* Nothing to attend to; a NaN among the scores must stay visible. */
			*ret_lse = origin;
			return sum == 0.0f ? 0.0f : sum;
		}
		*ret_lse = (origin + log2_fast(sum)) * FMHA_LN_2;
		return kept * reciprocal(sum);
	}

	METHOD void store_rows(int m, const float *stage) const
	{
		const int CHUNKS = C::PART_V / 8;
		const abi_fwd_args &a = block.a;
		const i32 from = C::PARTED ? part : 0;

		NO_UNROLL
		for (i32 index = lane_id(); index < 16 * CHUNKS; index += FMHA_WAVE) {
			i32 r = index / CHUNKS, dim = index % CHUNKS * 8;

			if (row_of(m) + r >= block.n_rows || from + dim >= a.hdim_v)
				continue;
			store_result(block.place_of(row_of(m) + r), from + dim,
				     stage + r * STAGE_STRIDE + dim);
		}
	}

	/* Eight dimensions. */
	METHOD void store_result(RowPlace p, i32 dim, const float *from) const
	{
		const abi_fwd_args &a = block.a;

		if (C::SPLIT)
			store_chunk(a.o_acc, ABI_F32, split_row(p) * a.hdim_v + dim, 1, from,
				    a.hdim_v - dim);
		else
			store_chunk(a.o.data, a.o_dtype,
				    q_offset(a.o, block.seq, p.row, p.head) + dim * a.o.stride_dim,
				    a.o.stride_dim, from, a.hdim_v - dim);
	}

	/* The place of a row among the results of all splits. */
	METHOD i64 split_row(RowPlace p) const
	{
		const abi_fwd_args &a = block.a;
		i32 at = block.seq.packed_q ? block.seq.q_start + p.row
					    : block.seq.batch * a.sequences.seqlen_q_max + p.row;

		return ((i64)block.split * a.nhead_q + p.head) * a.sequences.total_q + at;
	}

	METHOD void store_lse(RowPlace p, float lse) const
	{
		const abi_fwd_args &a = block.a;

		if (are_parts)
			a.lse_acc[split_row(p)] = lse;
		else if (a.lse.data)
			a.lse.data[rows_offset(a.lse, block.seq, p.row, p.head)] = lse;
	}
};

/* The random bytes of a block's rows, masked or not: every column of the sequence. */
template <class C> DEV void store_randval(const ForwardBlock<C> &block)
{
	const abi_dropout &d = block.a.dropout;
	i32 rows = min_of(C::TILE_M, block.n_rows - block.tile_row), n_k = block.seq.n_k;

	for (i32 index = thread_id(); index < rows * n_k; index += C::THREADS) {
		RowPlace p = block.place_of(block.tile_row + index / n_k);
		i32 j = index % n_k;

		((u8 *)d.randval.data)[q_offset(d.randval, block.seq, p.row, p.head) +
				       j * d.randval.stride_dim] =
			(u8)dropout_byte(d, block.seq.batch * block.a.nhead_q + p.head, p.row, j);
	}
}

#endif
