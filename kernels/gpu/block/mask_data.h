/* SPDX-License-Identifier: MIT */
/*
 * mask_data.h: a mask that is data (abi_mask_data): intervals of columns, or bits, in its owner's
 * memory.
 *
 * Nothing in it is trusted: endpoints are cut to the sequence where they are read, rows and columns
 * to those that there are, so that no content leads anywhere. What it says may change while a
 * kernel runs; then one reading says this and another that, and the result is a mixture.
 *
 * A block looks at its rows' endpoints once, before its loop: tiles outside of what any row sees
 * are not visited, and those that all of them see whole are not masked. Bits are read by elements
 * alone.
 */
#ifndef FMHA_GPU_MASK_DATA_H
#define FMHA_GPU_MASK_DATA_H

#include "scores.h"

struct DataInterval {
	i32 low, high; /* [low, high) */

	METHOD bool meets(i32 begin, i32 end) const
	{
		return max_of(low, begin) < min_of(high, end);
	}
};

/* What some rows see: [low, high) holds all of it, and all of them see [full_low, full_high). */
struct DataReach {
	i32 low, high, full_low, full_high;

	/* The reach of no row. */
	METHOD static DataReach nothing()
	{
		const i32 far = 1 << 30;

		return DataReach{far, -far, -far, far};
	}
	/* Another interval of one row; of_row(): after the last. */
	METHOD void add(const DataInterval &x)
	{
		if (x.low >= x.high)
			return;
		bool is_first = low > high;

		low = min_of(low, x.low), high = max_of(high, x.high);
		full_low = is_first ? x.low : 0, full_high = is_first ? x.high : 0;
	}
	METHOD DataReach of_row() const
	{
		return low > high ? DataReach{low, high, 0, 0} : *this;
	}
	METHOD void join(const DataReach &o)
	{
		low = min_of(low, o.low), high = max_of(high, o.high);
		full_low = max_of(full_low, o.full_low), full_high = min_of(full_high, o.full_high);
	}
	METHOD static i32 of_lane(i32 x, i32 lane) { return (i32)shuffle_word((u32)x, lane); }

	/* Joins those of all lanes of a wave, in every one. */
	METHOD void join_wave()
	{
		/* asked for by all lanes: NVIDIA's wait for each other */
		UNROLL
		for (int step = FMHA_WAVE / 2; step > 0; step /= 2) {
			i32 lane = lane_id() ^ step;

			join(DataReach{of_lane(low, lane), of_lane(high, lane),
				       of_lane(full_low, lane), of_lane(full_high, lane)});
		}
	}
	/* Those of all the block's threads: through 16 bytes of LDS a wave, which is free. */
	template <int WAVES> METHOD void join_block(char *lds)
	{
		DataReach *box = (DataReach *)lds + wave_id();

		join_wave();
		block_sync();
		if (lane_id() == 0)
			*box = *this;
		block_sync();
		NO_UNROLL
		for (int wave = 0; wave < WAVES; wave++)
			join(((DataReach *)lds)[wave]);
		block_sync();
		low = (i32)uniform((u64)(u32)low), high = (i32)uniform((u64)(u32)high);
		full_low = (i32)uniform((u64)(u32)full_low),
		full_high = (i32)uniform((u64)(u32)full_high);
	}
};

DEV u32 first_bits(i32 n) { return n <= 0 ? 0 : 0xffffffffu >> (32 - min_of(n, 32)); }

/* What a row sees of some columns: some of them, all of them. */
struct DataSees {
	bool some, all;

	/* Those of [begin, end), by another of its intervals. */
	METHOD void add(const DataInterval &x, i32 begin, i32 end)
	{
		some |= x.meets(begin, end);
		all |= x.low <= begin && x.high >= end;
	}
};

/* The intervals of a row of a head. */
struct DataRow {
	const i32 *endpoints;
	i64 step;
	i32 n, n_k; /* intervals; keys of the sequence */

	METHOD static DataRow make(const abi_mask_data &m, const Sequence &v, i32 row, i32 head)
	{
		const abi_tensor &t = m.intervals;

		/* Rows of a tile beyond the last one are masked otherwise, and read nothing of
		 * their own. */
		return DataRow{(const i32 *)t.data + q_offset(t, v, clamp(row, 0, v.n_q - 1), head),
			       t.stride_dim, (m.n_endpoints + 1) / 2, v.n_k};
	}
	METHOD DataInterval at(i32 k) const
	{
		i32 low = k > 0 ? load_memory(endpoints + (2 * k - 1) * step) : 0;

		return DataInterval{clamp(low, 0, n_k),
				    clamp(load_memory(endpoints + 2 * k * step), 0, n_k)};
	}
	/* The k-th and those behind it, whose endpoints are asked for at once; there may be fewer. */
	template <int N> METHOD void some_at(i32 k, DataInterval (&x)[N]) const
	{
		i32 f[2 * N];

		UNROLL
		for (int i = 0; i < 2 * N; i++)
			f[i] = clamp(load_memory(endpoints +
						 clamp(2 * k - 1 + i, 0, 2 * n - 2) * step),
				     0, n_k);
		UNROLL
		for (int i = 0; i < N; i++)
			x[i] = DataInterval{k + i > 0 ? f[2 * i] : 0,
					    k + i < n ? f[2 * i + 1] : 0};
	}
	METHOD DataReach reach() const
	{
		DataReach r = DataReach::nothing();

		NO_UNROLL
		for (i32 k = 0; k < n; k++)
			r.add(at(k));
		return r.of_row();
	}
	/* Whether the row sees some of [begin, end). */
	METHOD bool meets(i32 begin, i32 end) const
	{
		bool meets = false;

		NO_UNROLL
		for (i32 k = 0; k < n; k++)
			meets = meets || at(k).meets(begin, end);
		return meets;
	}
};

template <class C> struct DataMask {
	typedef typename C::Core Core;
	typedef typename Core::Acc Acc;
	static const bool INTERVALS = C::MASK_DATA == MASK_DATA_INTERVALS,
			  BITS = C::MASK_DATA == MASK_DATA_BITS;
	static const bool THERE = INTERVALS || BITS;

	const abi_mask_data &m;
	const Sequence &v;

	METHOD bool bit(const u8 *row, i32 column) const
	{
		i32 j = clamp(column, 0, v.n_k - 1);

		return load_memory(row + (j >> 3) * m.bits.stride_dim) >> (j & 7) & 1;
	}
	METHOD const u8 *bits_of(i32 row, i32 head) const
	{
		return (const u8 *)m.bits.data +
		       q_offset(m.bits, v, clamp(row, 0, v.n_q - 1), head);
	}

	METHOD bool sees(i32 row, i32 head, i32 column) const
	{
		if constexpr (BITS)
			return bit(bits_of(row, head), column);
		const DataRow of = DataRow::make(m, v, row, head);

		return of.meets(column, column + 1);
	}

	/* What a row sees of [begin, end); of bits @begin is a multiple of 8. */
	METHOD DataSees sees_of(i32 row, i32 head, i32 begin, i32 end) const
	{
		DataSees sees = {false, false};

		if constexpr (INTERVALS) {
			const DataRow of = DataRow::make(m, v, row, head);

			NO_UNROLL
			for (i32 k = 0; k < of.n; k++)
				sees.add(of.at(k), begin, end);
		} else {
			const u8 *bits = bits_of(row, head);
			u32 either = 0, both = 0xff;

			NO_UNROLL
			for (i32 at = begin; at < end; at += 8) {
				u32 x = load_memory(bits + (at >> 3) * m.bits.stride_dim);
				u32 there = end - at < 8 ? (1u << (end - at)) - 1 : 0xff;

				either |= x & there, both &= x | (there ^ 0xff);
			}
			sees = DataSees{either != 0, both == 0xff};
		}
		return sees;
	}

	/* The same of a few rows, of which a few intervals each are asked for at once. by: by which
	 * of them a row sees some, a bit each: there are at most 32. */
	template <int TOGETHER, int ROWS>
	METHOD void sees_of_rows(DataSees (&sees)[ROWS], u32 (&by)[ROWS], const i32 (&row)[ROWS],
				 i32 head, i32 begin, i32 end) const
	{
		UNROLL
		for (int i = 0; i < ROWS; i++) {
			sees[i] = INTERVALS ? DataSees{false, false}
					    : sees_of(row[i], head, begin, end);
			by[i] = 0;
		}
		NO_UNROLL
		for (i32 k = 0; INTERVALS && k < (m.n_endpoints + 1) / 2; k += TOGETHER) {
			DataInterval x[ROWS][TOGETHER];

			UNROLL
			for (int i = 0; i < ROWS; i++)
				DataRow::make(m, v, row[i], head).some_at(k, x[i]);
			UNROLL
			for (int i = 0; i < ROWS; i++)
				UNROLL
				for (int j = 0; j < TOGETHER; j++) {
					sees[i].add(x[i][j], begin, end);
					by[i] |= (u32)x[i][j].meets(begin, end) << (k + j);
				}
		}
	}

	/* Of bits: which of 16 columns a row sees, a bit each; @begin is a multiple of 8. */
	METHOD u32 sees_16(i32 row, i32 head, i32 begin) const
	{
		const u8 *bits = bits_of(row, head);
		i32 last = (v.n_k - 1) >> 3;
		u32 seen = 0;

		UNROLL
		for (int i = 0; i < 2; i++)
			seen |= (u32)load_memory(bits + min_of((begin >> 3) + i, last) *
								m.bits.stride_dim)
				<< 8 * i;
		return seen;
	}

	/* Of an interval: which of 32 columns. */
	METHOD static u32 bits_of_32(const DataInterval &x, i32 begin)
	{
		return first_bits(x.high - begin) & ~first_bits(x.low - begin);
	}

	/*
	 * Elements that their query does not see become -inf. s: tiles of 16 columns from `column`
	 * on, their rows as row_of(m) says; head_of(row), query_of(row): behind a row of a tile.
	 * Rows are queries.
	 */
	template <int TM, int TN, class RowOf, class PlaceOf>
	METHOD void hide(RegTile<Core, TM, TN> &s, i32 column, const RowOf &row_of,
			 const PlaceOf &place_of) const
	{
		const int WORDS = (TN * Core::E + 31) / 32;

		UNROLL
		for (int i = 0; i < TM; i++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				RowPlace p = place_of(row_of(i) + Core::stat_row(r));
				u32 seen[WORDS] = {};

				if constexpr (BITS) {
					const u8 *row = bits_of(p.row, p.head);

					each<TN>(r, [&](int n, int e) {
						if (bit(row, column + n * 16 + Core::column(e)))
							seen[(n * Core::E + e) / 32] |=
								1u << (n * Core::E + e) % 32;
					});
				} else {
					const DataRow row = DataRow::make(m, v, p.row, p.head);

					NO_UNROLL
					for (i32 k = 0; k < row.n; k++) {
						DataInterval x = row.at(k);

						each<TN>(r, [&](int n, int e) {
							i32 j = column + n * 16 + Core::column(e);

							if (j >= x.low && j < x.high)
								seen[(n * Core::E + e) / 32] |=
									1u
									<< (n * Core::E + e) % 32;
						});
					}
				}
				each<TN>(r, [&](int n, int e) {
					if (!(seen[(n * Core::E + e) / 32] >>
						      (n * Core::E + e) % 32 &
					      1))
						s.t[i][n].x[e] = minus_infinity();
				});
			}
	}

	/* The same of tiles whose rows are keys and whose columns are queries of one head. */
	template <int TM, int TN, class RowOf>
	METHOD void hide_turned(RegTile<Core, TM, TN> &s, i32 column, const RowOf &row_of,
				i32 head) const
	{
		static_assert(TM <= 32, "a bit a tile");
		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int e = 0; e < Core::E; e++) {
				i32 query = column + n * 16 + Core::column(e);
				u32 seen = 0;

				if constexpr (BITS) {
					const u8 *row = bits_of(query, head);

					UNROLL
					for (int i = 0; i < TM; i++)
						seen |= (u32)bit(row, row_of(i) + Core::row(e))
							<< i;
				} else {
					const DataRow row = DataRow::make(m, v, query, head);

					NO_UNROLL
					for (i32 k = 0; k < row.n; k++) {
						DataInterval x = row.at(k);

						UNROLL
						for (int i = 0; i < TM; i++) {
							i32 j = row_of(i) + Core::row(e);

							seen |= (u32)(j >= x.low && j < x.high)
								<< i;
						}
					}
					/* Hidden, so that what a row of no intervals hides has
					 * no branch of its own: beside the one for what was
					 * seen, clang 22 hides nothing (structurizing.py). */
					seen = (u32)hidden_lane((i32)seen);
				}
				UNROLL
				for (int i = 0; i < TM; i++)
					if (!(seen >> i & 1))
						s.t[i][n].x[e] = minus_infinity();
			}
	}

	/* What `n` rows from `first` on see, by all threads of a block. */
	template <int WAVES, class PlaceOf>
	METHOD DataReach reach_of(i32 first, i32 n, char *lds, const PlaceOf &place_of) const
	{
		DataReach all = DataReach::nothing();

		if constexpr (!INTERVALS)
			return DataReach{0, v.n_k, 0, 0};
		NO_UNROLL
		for (i32 r = thread_id(); r < n; r += WAVES * FMHA_WAVE) {
			RowPlace p = place_of(first + r);

			all.join(DataRow::make(m, v, p.row, p.head).reach());
		}
		all.template join_block<WAVES>(lds);
		return all;
	}

	/* Queries of a head of which some see keys of [begin, end): from low to high. */
	template <int WAVES>
	METHOD DataReach queries_of(i32 head, i32 begin, i32 end, char *lds) const
	{
		DataReach all = DataReach::nothing();

		if constexpr (!INTERVALS)
			return DataReach{0, v.n_q, 0, 0};
		NO_UNROLL
		for (i32 i = thread_id(); i < v.n_q; i += WAVES * FMHA_WAVE)
			if (DataRow::make(m, v, i, head).meets(begin, end))
				all.join(DataReach{i, i + 1, 0, 0});
		all.template join_block<WAVES>(lds);
		return all;
	}

private:
	template <int TN, class Do> METHOD static void each(int r, const Do &what)
	{
		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int e = 0; e < Core::E; e++)
				if (Core::stat(e) == r)
					what(n, e);
	}
};

/* Columns that the block need not look at leave the band. */
DEV void narrow(Band &band, const DataReach &reach)
{
	band.begin = max_of(band.begin, reach.low);
	band.end = max_of(min_of(band.end, reach.high), band.begin);
}

#endif
