/* SPDX-License-Identifier: MIT */
/*
 * combine.h: merge of partial results, O = sum_s w_s O_s with w_s = exp(LSE_s - LSE). A wave a row;
 * splits in order, so that the result does not depend on the launch.
 */
#ifndef FMHA_GPU_COMBINE_H
#define FMHA_GPU_COMBINE_H

#include "config.h"

/* The row that this wave works on, of the (row, head) pairs of batch entry block_id_z. */
struct WaveRow {
	i32 row, head;

	METHOD static WaveRow make(i32 n_heads)
	{
		i32 index = grid_row(block_id_x(), Config::THREADS / FMHA_WAVE, wave_id());

		return WaveRow{index / n_heads, index % n_heads};
	}
};

DEV float wave_max(float x)
{
	UNROLL
	for (int i = 1; i < FMHA_WAVE; i *= 2)
		x = larger(x, shuffle_xor(x, i));
	return x;
}

DEV float wave_sum(float x)
{
	UNROLL
	for (int i = 1; i < FMHA_WAVE; i *= 2)
		x += shuffle_xor(x, i);
	return x;
}

DEV void combine(const abi_combine_args &a)
{
	WaveRow at = WaveRow::make(a.nhead_q);
	Sequence v = find_sequence(a.sequences, 0, block_id_z());

	if (at.row >= v.n_q || v.n_q < a.min_seqlen_q)
		return;
	const float *lse = a.lse_parts.data + rows_offset(a.lse_parts, v, at.row, at.head);
	float sink = a.sink ? a.sink[at.head] : minus_infinity(), high = sink;

	for (i32 s = lane_id(); s < a.n_splits; s += FMHA_WAVE)
		high = larger(high, lse[s * a.lse_parts_stride_split]);
	high = wave_max(high);

	float origin = high == minus_infinity() ? 0.0f : high;
	float total = exp2_fast((sink - origin) * FMHA_LOG2_E);

	for (i32 s = 0; s < a.n_splits; s++)
		total += exp2_fast((lse[s * a.lse_parts_stride_split] - origin) * FMHA_LOG2_E);
	float norm = total == 0.0f ? 0.0f : reciprocal(total);
	i64 from = q_offset(a.o_parts, v, at.row, at.head), to = q_offset(a.o, v, at.row, at.head);

	for (i32 d = lane_id(); d < a.hdim_v; d += FMHA_WAVE) {
		float sum = 0;

		for (i32 s = 0; s < a.n_splits; s++) {
			float part = lse[s * a.lse_parts_stride_split];

			/* An empty part's O may hold anything: it is not read. */
			if (part != minus_infinity())
				sum += exp2_fast((part - origin) * FMHA_LOG2_E) *
				       load_as_float(a.o_parts.data, a.o_parts_dtype,
						     from + s * a.o_parts_stride_split +
							     d * a.o_parts.stride_dim);
		}
		store_from_float(a.o.data, a.o_dtype, to + d * a.o.stride_dim, sum * norm);
	}
	if (a.lse.data && lane_id() == 0)
		a.lse.data[rows_offset(a.lse, v, at.row, at.head)] =
			total == 0.0f ? high : origin + log2_fast(total) * FMHA_LN_2;
}

#endif
