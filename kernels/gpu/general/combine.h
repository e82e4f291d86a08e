/* SPDX-License-Identifier: MIT */
/*
 * combine.h: merge of partial results, O = sum_s w_s O_s with w_s = exp(LSE_s - LSE). A wave a row,
 * or a piece of a wide one, or, of many parts and few rows, all waves of a block, each with every
 * so-manieth part. The order of all sums follows from the numbers of parts and rows alone, of all
 * sequences together, so that the result does not depend on the launch; in_order from nothing, so
 * that it does not depend on the batch either.
 *
 * What it waits for is memory: a lane takes four neighbours of a part, and several parts at once,
 * or of few parts of a wide row (WIDE: traits.h) those of all pieces.
 * Of more parts than a few some may be empty, where they are shares of uneven rows: what these hold
 * is not read.
 */
#ifndef FMHA_GPU_COMBINE_H
#define FMHA_GPU_COMBINE_H

#include "core/load.h"
#include "core/config.h"

/* The row that this wave works on, of the (row, head) pairs of batch entry block_id_z. */
struct WaveRow {
	i32 row, head;

	METHOD static WaveRow of(i32 index, i32 n_heads)
	{
		return WaveRow{index / n_heads, index % n_heads};
	}
	METHOD static WaveRow make(i32 n_heads)
	{
		return of(grid_row(block_id_x(), Config::THREADS / FMHA_WAVE, wave_id()), n_heads);
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

DEV i32 wave_max(i32 x)
{
	UNROLL
	for (int i = 1; i < FMHA_WAVE; i *= 2)
		x = max_of(x, (i32)shuffle_word((u32)x, lane_id() ^ i));
	return x;
}

DEV i32 wave_sum(i32 x)
{
	UNROLL
	for (int i = 1; i < FMHA_WAVE; i *= 2)
		x += (i32)shuffle_word((u32)x, lane_id() ^ i);
	return x;
}

/* Sums of weighted parts in units of the highest LSE among them. */
struct Merged {
	static const bool WHOLE = Config::WIDE == ABI_MERGE_WHOLE;
	static const int PIECES = WHOLE ? 128 / FMHA_WAVE : 1; /* grid_combine_pieces() */
	float m, l;
	Four sum[PIECES];

	METHOD static float origin(float high) { return high == minus_infinity() ? 0.0f : high; }

	/* Return: what numbers in units of the parts that `other` stands for are multiplied by. */
	METHOD float raise(float other)
	{
		float high = larger(m, other), zero = origin(high);
		float keep = exp2_fast((m - zero) * FMHA_LOG2_E);

		m = high;
		l *= keep;
		UNROLL
		for (int p = 0; p < PIECES; p++)
			UNROLL
			for (int d = 0; d < 4; d++)
				sum[p].f[d] *= keep;
		return zero;
	}
	METHOD void add(const Merged &other)
	{
		float w = exp2_fast((other.m - raise(other.m)) * FMHA_LOG2_E);

		l += w * other.l;
		UNROLL
		for (int p = 0; p < PIECES; p++)
			UNROLL
			for (int d = 0; d < 4; d++)
				sum[p].f[d] += w * other.sum[p].f[d];
	}
};

struct Combine {
	static const int WAVES = Config::THREADS / FMHA_WAVE;
	static const int PIECES = Merged::PIECES, AT_ONCE = GRID_PARTS_AT_ONCE / PIECES;
	static_assert(Merged::WHOLE || sizeof(Merged) <= GRID_COMBINE_BYTES, "as the host knows");

	const abi_combine_args &a;
	const float *lse;
	i64 from; /* of the row in o_parts: element 0 of part 0 */

	METHOD Combine(const abi_combine_args &args) : a(args) {}

	/* Four elements of a part, from `dim` on. PLAIN: f32, side by side and aligned. */
	template <bool PLAIN> METHOD Four part_of(i32 part, i32 dim) const
	{
		i64 at = from + part * a.o_parts_stride_split + dim * a.o_parts.stride_dim;
		Four x;

		if (PLAIN) {
			chunk16 c = load16((const float *)a.o_parts.data + at);

			UNROLL
			for (int i = 0; i < 4; i++)
				x.f[i] = bits_to_float(c.w[i]);
		} else {
			UNROLL
			for (int i = 0; i < 4; i++)
				x.f[i] = load_as_float(
					a.o_parts.data, a.o_parts_dtype,
					at + (TAILS ? min_of(i, a.hdim_v - 1 - dim) : i) *
							a.o_parts.stride_dim);
		}
		return x;
	}
	METHOD bool is_plain() const
	{
		return a.o_parts_dtype == ABI_F32 && a.o_parts.stride_dim == 1 &&
		       !(TAILS && a.hdim_v % 4) &&
		       (((u64)a.o_parts.data / 4 | (u64)from | (u64)a.o_parts_stride_split) & 3) ==
			       0;
	}

	/* Where piece @piece begins of a lane whose first one does at @dim; whether there is one. */
	METHOD i32 dim_of(i32 dim, int piece) const { return dim + piece * 4 * FMHA_WAVE; }
	METHOD bool has(i32 dim, int piece) const
	{
		return piece == 0 || dim_of(dim, piece) < a.hdim_v;
	}

	/* Parts first, first + step, .. */
	template <bool PLAIN> METHOD Merged sum_parts(i32 first, i32 step, i32 dim) const
	{
		Merged sum = {minus_infinity(), 0, {}};

		NO_UNROLL
		for (i32 s = first; s < a.n_splits; s += AT_ONCE * step) {
			float weight[AT_ONCE], high = minus_infinity();
			Four x[AT_ONCE][PIECES];

			UNROLL
			for (int i = 0; i < AT_ONCE; i++) {
				i32 part = min_of(s + i * step, a.n_splits - 1);

				weight[i] = s + i * step < a.n_splits
						    ? lse[part * a.lse_parts_stride_split]
						    : minus_infinity();
				bool reads = a.n_splits <= AT_ONCE / 2 ||
					     weight[i] != minus_infinity();

				UNROLL
				for (int p = 0; p < PIECES; p++) {
					x[i][p] = Four{};
					if (reads && has(dim, p))
						x[i][p] = part_of<PLAIN>(part, dim_of(dim, p));
				}
			}
			UNROLL
			for (int i = 0; i < AT_ONCE; i++)
				high = larger(high, weight[i]);
			float zero = sum.raise(high);

			UNROLL
			for (int i = 0; i < AT_ONCE; i++) {
				float w = exp2_fast((weight[i] - zero) * FMHA_LOG2_E);

				sum.l += w;
				/* An empty part's O may hold anything: it does not count. */
				UNROLL
				for (int p = 0; p < PIECES; p++)
					UNROLL
					for (int d = 0; d < 4; d++)
						sum.sum[p].f[d] += weight[i] == minus_infinity()
									   ? 0.0f
									   : w * x[i][p].f[d];
			}
		}
		return sum;
	}

	/* Sums over lanes `width` apart, which hold other parts of the same elements. */
	METHOD static void sum_lanes(Merged &x, i32 width)
	{
		for (i32 i = width; i < FMHA_WAVE; i *= 2) {
			Merged other = {shuffle_xor(x.m, i), shuffle_xor(x.l, i), {}};

			UNROLL
			for (int p = 0; p < PIECES; p++)
				UNROLL
				for (int d = 0; d < 4; d++)
					other.sum[p].f[d] = shuffle_xor(x.sum[p].f[d], i);
			/* The same way round in both: sums of two numbers, each rounded alike. */
			x.add(other);
		}
	}

	/* Sums over the waves that share a row: the first one collects. */
	METHOD static void sum_waves(Merged &x, Merged *lds, i32 waves, i32 wave)
	{
		Merged *mine = lds + thread_id();

		block_sync();
		*mine = x;
		block_sync();
		for (i32 w = 1; w < waves && wave == 0; w++)
			x.add(mine[w * FMHA_WAVE]);
	}

	METHOD void store(Merged x, i64 to, i32 dim, const WaveRow &at, const Sequence &v) const
	{
		float sink = a.sink ? a.sink[at.head] : minus_infinity();
		float total = exp2_fast((sink - x.raise(sink)) * FMHA_LOG2_E) + x.l;
		float norm = total == 0.0f ? 0.0f : reciprocal(total);

		UNROLL
		for (int p = 0; p < PIECES; p++) {
			i32 at_dim = dim_of(dim, p);
			Four y;

			UNROLL
			for (int d = 0; d < 4; d++)
				y.f[d] = x.sum[p].f[d] * norm;
			if (has(dim, p))
				store_four(a.o.data, a.o_dtype, to + at_dim * a.o.stride_dim,
					   a.o.stride_dim, y.f, a.hdim_v - at_dim);
		}
		if (a.lse.data && dim == 0)
			a.lse.data[rows_offset(a.lse, v, at.row, at.head)] =
				total == 0.0f ? x.m
					      : Merged::origin(x.m) + log2_fast(total) * FMHA_LN_2;
	}

	METHOD void run(char *lds)
	{
		/* what arguments alone say, while the stage before ends */
		const i32 waves = grid_combine_waves(&a, FMHA_WAVE, WAVES), rows = WAVES / waves;
		i32 index = grid_row(block_id_x(), rows, 0);

		if (Config::WIDE)
			let_next_stage_begin();
		wait_for_stage_before();
		const Sequence v = find_sequence(a.sequences, 0, block_id_z());
		const i32 n_q = v.n_q < a.min_seqlen_q ? 0 : v.n_q;

		/* All of a block's waves have to be there: others' rows have barriers. */
		do {
			merge_row(lds, v, n_q, waves,
				  WaveRow::of(index + wave_id() / waves, a.nhead_q));
			index += ceil_div((i32)grid_combine_rows(&a) * a.nhead_q, rows) * rows;
		} while (a.few_rows > 0 && index < n_q * a.nhead_q);
	}

	METHOD void merge_row(char *lds, const Sequence &v, i32 n_q, i32 waves, const WaveRow &at)
	{
		i32 wave = wave_id() % waves;
		i32 width = grid_combine_lanes(a.hdim_v, FMHA_WAVE), groups = FMHA_WAVE / width;

		lse = a.lse_parts.data + rows_offset(a.lse_parts, v, at.row, at.head);
		from = q_offset(a.o_parts, v, at.row, at.head);

		i64 to = q_offset(a.o, v, at.row, at.head);
		i32 first = wave * groups + lane_id() / width, step = waves * groups;
		bool plain = Config::WIDE || is_plain(); /* a plan's own parts are */

		i32 d = (block_id_y() * PIECES * width + lane_id() % width) * 4;
		bool exists = d < a.hdim_v && at.row < n_q;
		Merged sum = {minus_infinity(), 0, {}};

		if (exists)
			sum = plain ? sum_parts<true>(first, step, d)
				    : sum_parts<false>(first, step, d);
		sum_lanes(sum, width);
		if (!Merged::WHOLE && waves > 1)
			sum_waves(sum, (Merged *)lds, waves, wave);
		if (exists && wave == 0 && lane_id() < width)
			store(sum, to, d, at, v);
	}
};

#endif
