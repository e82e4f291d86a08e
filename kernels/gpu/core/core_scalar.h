/* SPDX-License-Identifier: MIT */
/*
 * core_scalar.h: no matrix core at all, float arithmetic on any GPU: the fallback for fp32, and the
 * plain twin that the other layers are compared with.
 *
 * A 16 x 16 tile of scores lies on a wave as 8 lanes across by WAVE / 8 down: lane l holds rows
 * (l / 8) * STATS + s and columns l % 8 + 8c. Tiles are float in LDS; chunks of four are permuted
 * within a row by an XOR with the row number against bank conflicts.
 */
#ifndef FMHA_GPU_CORE_SCALAR_H
#define FMHA_GPU_CORE_SCALAR_H

#include "load.h"

struct alignas(16) Four {
	float f[4];
};

struct CoreScalar {
	static const int STATS = 16 / (FMHA_WAVE / 8), E = STATS * 2;
	static const bool OWNS_PATCH = false, SHARES_PATCH = false; /* see DropoutTile */
	static const bool VIEWS_IN_LDS = false;
	static const bool FETCH_NEEDS_LDS = true; /* fetch() writes LDS itself */
	template <class Tile> METHOD static constexpr int held_registers() { return 0; }

	struct Acc {
		float x[E];
	};
	typedef Acc Operand;

	METHOD static constexpr int stat(int e) { return e >> 1; }
	METHOD static i32 stat_row(int s) { return lane_id() / 8 * STATS + s; }
	METHOD static i32 row(int e) { return stat_row(stat(e)); }
	METHOD static i32 column(int e) { return lane_id() % 8 + 8 * (e & 1); }

	METHOD static float row_max(float x)
	{
		x = larger(x, shuffle_xor(x, 1));
		x = larger(x, shuffle_xor(x, 2));
		return larger(x, shuffle_xor(x, 4));
	}
	METHOD static float row_sum(float x)
	{
		x += shuffle_xor(x, 1);
		x += shuffle_xor(x, 2);
		return x + shuffle_xor(x, 4);
	}

	METHOD static Operand to_operand(const Acc &c) { return c; }
	METHOD static void step() { scheduling_barrier(); }
	METHOD static i32 anew(i32 row) { return hidden_lane(row); }

	template <int ROWS, int COLS, int THREADS, bool BY_ROWS, bool BY_COLUMNS> struct Tile {
		static const int BYTES = lds_tile(FMHA_CORE_SCALAR, ROWS, COLS, BY_ROWS,
						  BY_COLUMNS);
		static_assert(COLS % 32 == 0, "rows are whole spans of the permutation");
		float *lds;

		METHOD void place(char *at) { lds = (float *)at; }

		template <class From, class View>
		METHOD void fetch(const View &view, i32 first, i32 end, i32 begin = FROM_THE_FIRST)
		{
			const int CHUNKS = COLS / 8, TOTAL = ROWS * CHUNKS;

			NO_UNROLL
			for (i32 index = thread_id(); index < TOTAL; index += THREADS) {
				i32 r = index / CHUNKS, c = index % CHUNKS;
				i32 until = end;

				if constexpr (Chooses<View>::value)
					until = view.end_of(first + r, end);
				bool valid = first + r < until && first + r >= max_of(begin, 0);
				chunk32 x = load_floats<From>(view, first + r, c * 8, valid);

				UNROLL
				for (int i = 0; i < 8; i++)
					lds[index_of(r, c * 8 + i)] = x.f[i];
			}
		}

		/* fetch() leaves nothing to do late, see core_mma.h. */
		template <class From, class View>
		METHOD void fetch_ahead(const View &view, i32 first, i32 end)
		{
			fetch<From>(view, first, end);
		}
		template <class From, class View> METHOD void fetch_late(const View &, i32, i32) {}

		METHOD void arrive() {}
		METHOD const Four &four(i32 row, i32 col) const
		{
			return *(const Four *)(lds + index_of(row, col));
		}
		METHOD float one(i32 row, i32 col) const { return lds[index_of(row, col)]; }
		/* The permutation stays within 32 columns: what lies above is a constant in an
		 * address. */
		METHOD static i32 index_of(i32 row, i32 col)
		{
			return row * COLS + (col & ~31) + ((col & 31) ^ (row & 7) * 4);
		}
	};

	template <int TILES, int WAVE_ROWS, int COLS, int THREADS>
	using Stationary =
		StationaryInLds<Tile<WAVE_ROWS * TILES * 16, COLS, THREADS, true, false>, TILES>;
};

#endif
