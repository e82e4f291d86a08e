/* SPDX-License-Identifier: MIT */
/*
 * bwd_rows.h: the two backward stages that go row by row, a wave a row.
 * dot:     d = rowsum(dO * O) - dLSE; dSink = -sum over rows of exp(sink - LSE) d; dBias = 0 behind
 * the keys, which the
 *            stage after knows no tiles for
 * convert: dQ = scale * sum of the splits of dq_acc, in order; dK and dV likewise of their parts,
 * where they
 *            have some
 */
#ifndef FMHA_GPU_BWD_ROWS_H
#define FMHA_GPU_BWD_ROWS_H

#include "block/bwd_tiles.h"
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

	/* What reaches LSE itself; rows that see no key have no use for it. */
	METHOD float lse_gradient(const Sequence &v, i32 row, i32 head) const
	{
		if (!a.dlse.data ||
		    a.lse.data[rows_offset(a.lse, v, row, head)] == minus_infinity())
			return 0;
		return a.dlse.data[rows_offset(a.dlse, v, row, head)];
	}

	/* rowsum(dO * O) for several rows at once: 16 lanes a row, eight elements a load, loads of
	 * all rows before the first sum. */
	METHOD void dot_rows(i32 block) const
	{
		const i32 LANES = GRID_DOT_LANES, ROWS = GRID_DOT_ROWS;
		i32 first = grid_row(block, C::THREADS / LANES * ROWS, thread_id() / LANES);
		Sequence v = find_sequence(a.sequences, 0, block_id_z());
		i32 row[ROWS], head[ROWS];
		float sum[ROWS];

		UNROLL
		for (int n = 0; n < ROWS; n++) {
			i32 index = first + n * (C::THREADS / LANES);

			row[n] = index / a.nhead_q;
			head[n] = index - row[n] * a.nhead_q;
			sum[n] = 0;
		}
		if (v.n_q == 0)
			return;
		if (dense(a.o) && dense(a.d_o))
			for (i32 dim = thread_id() % LANES * 8; dim < a.hdim_v; dim += LANES * 8)
				add_chunks(v, row, head, dim, sum);
		else
			UNROLL
			for (int n = 0; n < ROWS; n++)
				for (i32 dim = thread_id() % LANES;
				     dim < a.hdim_v && row[n] < v.n_q; dim += LANES)
					sum[n] += element(a.o, v, row[n], head[n], dim) *
						  element(a.d_o, v, row[n], head[n], dim);
		UNROLL
		for (int n = 0; n < ROWS; n++) {
			UNROLL
			for (int i = 1; i < LANES; i *= 2)
				sum[n] += shuffle_xor(sum[n], i);
			if (row[n] < v.n_q && thread_id() % LANES == 0)
				a.d.data[rows_offset(a.d, v, row[n], head[n])] =
					sum[n] - lse_gradient(v, row[n], head[n]);
			if (row[n] < v.n_q && a.dbias.data && !abi_sums_dbias(&a))
				clear_dbias(v, row[n], head[n]);
		}
	}

	METHOD void clear_dbias(const Sequence &v, i32 row, i32 head) const
	{
		for (i32 j = v.n_k + thread_id() % GRID_DOT_LANES; j < a.sequences.seqlen_k_max;
		     j += GRID_DOT_LANES)
			store_from_float(a.dbias.data, a.bias_dtype,
					 q_offset(a.dbias, v, row, head) + j * a.dbias.stride_dim,
					 0.0f);
	}

	METHOD float element(const abi_tensor &t, const Sequence &v, i32 row, i32 head,
			     i32 dim) const
	{
		return Element::to_float(
			((const Storage *)t.data)[q_offset(t, v, row, head) + dim * t.stride_dim]);
	}

	/* Every row is whole chunks of eight, 16 bytes or a multiple apart. */
	METHOD bool dense(const abi_tensor &t) const
	{
		const i64 CHUNK = 16 / sizeof(Storage);

		return t.stride_dim == 1 && a.hdim_v % 8 == 0 && (u64)t.data % 16 == 0 &&
		       t.stride_seq % CHUNK == 0 && t.stride_head % CHUNK == 0 &&
		       t.stride_batch % CHUNK == 0;
	}

	template <int ROWS>
	METHOD void add_chunks(const Sequence &v, const i32 (&row)[ROWS], const i32 (&head)[ROWS],
			       i32 dim, float (&sum)[ROWS]) const
	{
		const int CHUNKS = 8 * sizeof(Storage) / 16;
		chunk16 x[ROWS][CHUNKS], y[ROWS][CHUNKS];

		UNROLL
		for (int n = 0; n < ROWS; n++) {
			const Storage *o = (const Storage *)a.o.data +
					   q_offset(a.o, v, min_of(row[n], v.n_q - 1), head[n]) +
					   dim;
			const Storage *d_o = (const Storage *)a.d_o.data +
					     q_offset(a.d_o, v, min_of(row[n], v.n_q - 1),
						      head[n]) +
					     dim;

			UNROLL
			for (int c = 0; c < CHUNKS; c++) {
				x[n][c] = load16((const chunk16 *)o + c);
				y[n][c] = load16((const chunk16 *)d_o + c);
			}
		}
		UNROLL
		for (int n = 0; n < ROWS; n++)
			UNROLL
			for (int i = 0; i < 8; i++)
				sum[n] += of_chunks(x[n], i) * of_chunks(y[n], i);
	}
	template <int CHUNKS> METHOD static float of_chunks(const chunk16 (&x)[CHUNKS], int i)
	{
		if constexpr (CHUNKS == 2)
			return bits_to_float(x[i / 4].w[i % 4]);
		else
			return Element::to_float((Storage)(x[0].w[i / 2] >> i % 2 * 16));
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

				sum -= lse == minus_infinity() ? 0.0f
							       : p * (dot_row(v, row, head) -
								      lse_gradient(v, row, head));
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

	/* block: of those that go by rows. */
	METHOD void dot(i32 block, char *lds) const
	{
		if (block_id_y() == 1) { /* launched only where dSink is wanted */
			if (block_id_z() == 0 && block_id_x() < a.nhead_q)
				sink_gradient((float *)lds);
			return;
		}
		dot_rows(block);
	}

	/* A block a chunk of a tile. */
	METHOD void convert_tile(float *stage) const
	{
		const int QUERIES = LDS_CONVERT_QUERIES, STRIDE = LDS_CONVERT_STRIDE;
		DqCut cut = DqCut::make(a);
		i32 n_chunks = grid_dq_chunks(&a), index = block_id_x() / n_chunks;
		i32 chunk = block_id_x() - index * n_chunks, head = index % a.nhead_q,
		    number = index / a.nhead_q;
		i32 part = chunk >= cut.blocks(0), block = chunk - part * cut.blocks(0),
		    dim = cut.slab(part, block) * 64;
		i32 row = number * cut.rows + cut.first_query(part), thread = thread_id();
		Sequence v = find_sequence(a.sequences, 0, block_id_z());

		if (row >= v.n_q)
			return;
		i64 floats;
		const float *from = dq_head_of(a, v, head, &floats) +
				    (i64)number * a.dq_tile_floats + cut.part_at(part) +
				    block * cut.chunk_floats() + thread * 4;
		float *to = stage + thread % 4 * 2 * STRIDE + thread / 32 * 16 + thread / 4 % 8;
		Storage *rows = (Storage *)a.dq.data + q_offset(a.dq, v, row, head);

		if (DqCut::are_rows(a))
			return convert_rows(stage, rows,
					    dq_head_of(a, v, head, &floats) +
						    (i64)number * a.dq_tile_floats + part * 256,
					    min_of(QUERIES, v.n_q - row));
		NO_UNROLL
		for (i32 q = 0; q < cut.queries(); q += QUERIES) {
			UNROLL
			for (int j = 0; j < QUERIES; j += 8) {
				if (q + j >= cut.queries())
					break;
				chunk16 x = load16(from + (q + j) / 8 * 512);

				UNROLL
				for (int e = 0; e < 4; e++)
					to[(j + e % 2) * STRIDE + e / 2 * 8] = bits_to_float(
										       x.w[e]) *
									       a.scale;
			}
			block_sync();
			for (i32 i = thread;
			     i < min_of(QUERIES, min_of(cut.queries(), v.n_q - row) - q) * 8;
			     i += 128)
				if (dim + i % 8 * 8 < a.hdim_q)
					store_chunk(rows, a.dtype,
						    (i64)(q + i / 8) * a.dq.stride_seq +
							    (dim + i % 8 * 8) * a.dq.stride_dim,
						    a.dq.stride_dim,
						    stage + i / 8 * STRIDE + i % 8 * 8,
						    a.hdim_q - dim - i % 8 * 8);
			block_sync();
		}
	}

	/* 32 queries of a tile by rows, 64 columns and then the others. */
	METHOD void convert_rows(float *stage, Storage *rows, const float *from, i32 n_rows) const
	{
		const int STRIDE = LDS_CONVERT_STRIDE;
		i32 thread = thread_id(), lane = thread % 64;
		float *to = stage + (lane / 32 * 16 + lane / 4 % 8) * STRIDE + lane % 4 * 2;

		NO_UNROLL
		for (i32 first = 0; first < a.hdim_q; first += 64) {
			i32 n = min_of(a.hdim_q - first, 64);

			NO_UNROLL
			for (i32 j = thread / 64; j < n / 8; j += 2) {
				chunk16 x = load16(from + (first / 8 + j) * 512 + lane * 4);

				UNROLL
				for (int e = 0; e < 4; e++)
					to[e / 2 * 8 * STRIDE + j * 8 + e % 2] =
						bits_to_float(x.w[e]) * a.scale;
			}
			block_sync();
			for (i32 i = thread; i < n_rows * 8; i += 128)
				if (i % 8 * 8 < n)
					store_chunk(rows, a.dtype,
						    (i64)(i / 8) * a.dq.stride_seq +
							    (first + i % 8 * 8) * a.dq.stride_dim,
						    a.dq.stride_dim,
						    stage + i / 8 * STRIDE + i % 8 * 8,
						    n - i % 8 * 8);
			block_sync();
		}
	}

	/* A thread eight neighbours of a row of dK or dV. */
	METHOD void add_parts(i32 block) const
	{
		const i32 n_blocks = grid_kv_blocks(&a), n_eights = grid_kv_eights(&a);
		i32 head = block / n_blocks,
		    index = (block - head * n_blocks) * GRID_CONVERT_THREADS + thread_id();
		i32 row = index / n_eights, dim = (index - row * n_eights) * 8;
		Sequence v = find_sequence(a.sequences, 0, block_id_z());
		const bool is_v = dim >= a.hdim_q;
		const abi_tensor &to = is_v ? a.dv : a.dk;
		const abi_tensor sums = is_v ? dv_sums_of(a) : dk_sums_of(a);
		const float *from = (const float *)sums.data;
		float sum[8] = {};

		if (row >= v.n_k)
			return;
		dim -= is_v ? a.hdim_q : 0;
		from += k_offset(sums, v, row, head * a.kv_parts) + dim;
		/* More at once take registers that the other blocks miss. */
		_Pragma("unroll 2")
		for (i32 part = 0; part < a.kv_parts; part++, from += sums.stride_head)
			UNROLL
			for (int c = 0; c < 2; c++) {
				chunk16 x = load16(from + c * 4);

				UNROLL
				for (int i = 0; i < 4; i++)
					sum[c * 4 + i] += bits_to_float(x.w[i]);
			}
		UNROLL
		for (int i = 0; i < 8; i++)
			sum[i] *= is_v ? 1.0f : a.scale;
		store_chunk(to.data, a.dtype, k_offset(to, v, row, head) + dim * to.stride_dim,
			    to.stride_dim, sum, 8);
	}

	METHOD void convert_tiles(float *stage) const
	{
		i32 block = block_id_x();

		if (a.kv_parts > 1 && block >= grid_dq_blocks(&a))
			return add_parts(block - grid_dq_blocks(&a));
		convert_tile(stage);
	}

	METHOD void convert(float *lds) const
	{
		if (a.dq_tile_rows)
			return convert_tiles(lds);
		WaveRow at = WaveRow::make(a.nhead_q);
		Sequence v = find_sequence(a.sequences, 0, block_id_z());

		if (at.row >= v.n_q)
			return;
		i32 physical;
		const float *from = dq_acc_of(a, v, &physical);
		i32 n_splits = splits_of(a, v.batch);
		Storage *to = (Storage *)a.dq.data + q_offset(a.dq, v, at.row, at.head);

		dq_acc_layout layout = dq_layout_of(a);

		from += at.head * dq_acc_head(&layout, physical, n_splits) + (i64)at.row * a.hdim_q;
		for (i32 dim = lane_id(); dim < a.hdim_q; dim += FMHA_WAVE) {
			float sum = 0;

			for (i32 s = 0; s < n_splits; s++)
				sum += from[(i64)s * physical * a.hdim_q + dim];
			to[dim * a.dq.stride_dim] = Element::from_float(sum * a.scale);
		}
	}
};

#endif
