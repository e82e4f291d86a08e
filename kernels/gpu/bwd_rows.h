/* SPDX-License-Identifier: MIT */
/*
 * bwd_rows.h: the two backward stages that go row by row, a wave a row.
 *   dot:     d = rowsum(dO * O); dSink = -sum over rows of exp(sink - LSE) d
 *   convert: dQ = scale * sum of the splits of dq_acc, in order
 */
#ifndef FMHA_GPU_BWD_ROWS_H
#define FMHA_GPU_BWD_ROWS_H

#include "combine.h"

template <class C> struct BackwardRows {
	typedef typename C::Element Element;
	typedef typename Element::Storage Storage;
	const abi_bwd_args &a;

	METHOD BackwardRows(const abi_bwd_args &args) : a(args) {}

	METHOD float dot_row(const Sequence &v, i32 row, i32 head) const
	{
		const Storage *o = (const Storage *)a.o.data + q_offset(a.o, v, row, head);
		const Storage *d_o = (const Storage *)a.d_o.data + q_offset(a.d_o, v, row, head);
		float sum = 0;

		for (i32 dim = lane_id(); dim < a.hdim_v; dim += FMHA_WAVE)
			sum += Element::to_float(o[dim * a.o.stride_dim]) *
			       Element::to_float(d_o[dim * a.d_o.stride_dim]);
		return wave_sum(sum);
	}

	/* The same for several rows at once: 16 lanes a row, eight elements a load. */
	METHOD void dot_rows() const
	{
		const i32 LANES = GRID_DOT_LANES;
		i32 index = grid_row(block_id_x(), C::THREADS / LANES, thread_id() / LANES);
		i32 row = index / a.nhead_q, head = index % a.nhead_q;
		Sequence v = find_sequence(a.sequences, 0, block_id_z());
		bool valid = row < v.n_q;
		QueryView<Element, false> o = QueryView<Element, false>::make(a.o, v, head, 1, a.hdim_v);
		QueryView<Element, false> d_o =
			QueryView<Element, false>::make(a.d_o, v, head, 1, a.hdim_v);
		float sum = 0;

		for (i32 dim = thread_id() % LANES * 8; dim < a.hdim_v; dim += LANES * 8) {
			chunk32 x = load_floats<Element>(o, row, dim, valid);
			chunk32 y = load_floats<Element>(d_o, row, dim, valid);

			UNROLL
			for (int i = 0; i < 8; i++)
				sum += x.f[i] * y.f[i];
		}
		UNROLL
		for (int i = 1; i < LANES; i *= 2)
			sum += shuffle_xor(sum, i);
		if (valid && thread_id() % LANES == 0)
			a.d.data[rows_offset(a.d, v, row, head)] = sum;
	}

	/* One block a head, all rows in the same order every time: no atomics. */
	METHOD void sink_gradient(float *lds) const
	{
		i32 head = block_id_x(), n_waves = C::THREADS / FMHA_WAVE, wave = wave_id();
		float sum = 0;

		for (i32 b = 0; b < a.sequences.batch; b++) {
			Sequence v = find_sequence(a.sequences, 0, b);

			for (i32 row = wave; row < v.n_q; row += n_waves) {
				float lse = a.lse.data[rows_offset(a.lse, v, row, head)];
				float p = exp2_fast((a.sink[head] - lse) * FMHA_LOG2_E);

				sum -= lse == minus_infinity() ? 0.0f : p * dot_row(v, row, head);
			}
		}
		if (lane_id() == 0)
			lds[wave] = sum;
		block_sync();
		if (thread_id() == 0) {
			for (i32 w = 1; w < n_waves; w++)
				sum += lds[w];
			a.dsink[head] = sum;
		}
	}

	METHOD void dot(char *lds) const
	{
		if (block_id_y() == 1) { /* launched only where dSink is wanted */
			if (block_id_z() == 0 && block_id_x() < a.nhead_q)
				sink_gradient((float *)lds);
			return;
		}
		dot_rows();
	}

	METHOD void convert() const
	{
		WaveRow at = WaveRow::make(a.nhead_q);
		Sequence v = find_sequence(a.sequences, 0, block_id_z());

		if (at.row >= v.n_q)
			return;
		i32 physical;
		const float *from = dq_acc_of(a, v, &physical);
		i32 n_splits = splits_of(a, v.batch);
		Storage *to = (Storage *)a.dq.data + q_offset(a.dq, v, at.row, at.head);

		from += ((i64)at.head * n_splits * physical + at.row) * a.hdim_q;
		for (i32 dim = lane_id(); dim < a.hdim_q; dim += FMHA_WAVE) {
			float sum = 0;

			for (i32 s = 0; s < n_splits; s++)
				sum += from[(i64)s * physical * a.hdim_q + dim];
			to[dim * a.dq.stride_dim] = Element::from_float(sum * a.scale);
		}
	}
};

#endif
