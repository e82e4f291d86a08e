/* SPDX-License-Identifier: MIT */
/*
 * tile.h: the words that kernels are written in. A register tile is TM x TN accumulators of 16 x 16
 * spread over a wave; how a lane's elements map to rows and columns is the core's business:
 *   row(e), column(e)  where element e of a lane lies in its 16 x 16 tile
 *   stat(e)            which of the lane's row statistics it belongs to
 */
#ifndef FMHA_GPU_TILE_H
#define FMHA_GPU_TILE_H

#include "core_scalar.h"

template <class Core, int TM, int TN> struct RegTile {
	typename Core::Acc t[TM][TN];

	METHOD void zero()
	{
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++)
					t[m][n].x[e] = 0.0f;
	}
};

/* One number a row, held by every lane that holds elements of the row. */
template <class Core, int TM> struct RowVector {
	float v[TM][Core::STATS];

	METHOD void fill(float x)
	{
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int s = 0; s < Core::STATS; s++)
				v[m][s] = x;
	}
};

template <class Core, int TM, int TN> struct OperandTile {
	typename Core::Operand t[TM][TN];
};

template <class Core, int TM, int TN>
DEV OperandTile<Core, TM, TN> round_to_operand(const RegTile<Core, TM, TN> &s)
{
	OperandTile<Core, TM, TN> p;

	UNROLL
	for (int m = 0; m < TM; m++)
		UNROLL
		for (int n = 0; n < TN; n++)
			p.t[m][n] = Core::to_operand(s.t[m][n]);
	return p;
}

/* S[TM x TN] += A B^T, over K elements; B: rows column .. column + 16 TN - 1 of the tile. */
template <int K, class Core, int TM, int TN, class A, class B>
DEV void multiply_abt(RegTile<Core, TM, TN> &s, const A &a, const B &b, i32 column, Core)
{
	typename A::Reader read_a(a);
	typename B::RowReader read_b(b, column);

	UNROLL
	for (int k = 0; k < K / 16; k++) {
		typename Core::Operand x[TM];

		UNROLL
		for (int m = 0; m < TM; m++)
			x[m] = read_a(m, k);
		UNROLL
		for (int n = 0; n < TN; n++) {
			typename Core::Operand y = read_b(n, k);

			UNROLL
			for (int m = 0; m < TM; m++)
				Core::multiply(s.t[m][n], x[m], y);
		}
		Core::step();
	}
	UNROLL
	for (int m = 0; m < TM; m++)
		UNROLL
		for (int n = 0; n < TN; n++)
			Core::settle(s.t[m][n]);
}

/* O[TM x TD] += P V, V: rows row .. row + 16 TN - 1 of the tile. */
template <class Core, int TM, int TN, int TD, class B>
DEV void multiply_ab(RegTile<Core, TM, TD> &o, const OperandTile<Core, TM, TN> &p, const B &b,
		     i32 row, Core)
{
	typename B::ColumnReader read_b(b, row);

	UNROLL
	for (int n = 0; n < TN; n++)
		UNROLL
		for (int d = 0; d < TD; d++) {
			typename Core::Operand y = read_b(n, d);

			UNROLL
			for (int m = 0; m < TM; m++)
				Core::multiply(o.t[m][d], p.t[m][n], y);
			if (d % 2 == 1)
				Core::step();
		}
}

template <int K, int TM, int TN, class A, class B>
DEV void multiply_abt(RegTile<CoreScalar, TM, TN> &s, const A &a, const B &b, i32 column,
		      CoreScalar)
{
	const int STATS = CoreScalar::STATS;

	NO_UNROLL
	for (int k = 0; k < K; k += 4) {
		Four y[TN][2];

		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int c = 0; c < 2; c++)
				y[n][c] = b.four(column + n * 16 + lane_id() % 8 + 8 * c, k);
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < STATS; r++) {
				Four x = a.tile.four(a.wave_row + m * 16 + CoreScalar::stat_row(r),
						     k);

				UNROLL
				for (int n = 0; n < TN; n++)
					UNROLL
					for (int c = 0; c < 2; c++)
						UNROLL
						for (int i = 0; i < 4; i++)
							s.t[m][n].x[2 * r + c] += x.f[i] *
										  y[n][c].f[i];
			}
	}
}

template <int TM, int TN, int TD, class B>
DEV void multiply_ab(RegTile<CoreScalar, TM, TD> &o, const OperandTile<CoreScalar, TM, TN> &p,
		     const B &b, i32 row, CoreScalar)
{
	const int STATS = CoreScalar::STATS;
	/* The lane that holds column k of P is k % 8 of the same eight. */
	i32 first_lane = lane_id() & ~7;

	UNROLL
	for (int half = 0; half < 2 * TN; half++)
		NO_UNROLL
		for (int lane = 0; lane < 8; lane++) {
			const int n = half / 2;
			int k = half % 2 * 8 + lane;
			float x[TM][STATS];

			UNROLL
			for (int m = 0; m < TM; m++)
				UNROLL
				for (int r = 0; r < STATS; r++)
					x[m][r] = shuffle_from(p.t[m][n].x[2 * r + half % 2],
							       first_lane + lane);
			UNROLL
			for (int d = 0; d < TD; d++) {
				UNROLL
				for (int c = 0; c < 2; c++) {
					float y = b.one(row + n * 16 + k,
							d * 16 + lane_id() % 8 + 8 * c);

					UNROLL
					for (int m = 0; m < TM; m++)
						UNROLL
						for (int r = 0; r < STATS; r++)
							o.t[m][d].x[2 * r + c] += x[m][r] * y;
				}
				if (d % 4 == 3)
					CoreScalar::step();
			}
		}
}

/* O = O * r, row by row. */
template <class Core, int TM, int TD>
DEV void scale_rows(RegTile<Core, TM, TD> &o, const RowVector<Core, TM> &r)
{
	UNROLL
	for (int m = 0; m < TM; m++)
		UNROLL
		for (int d = 0; d < TD; d++)
			UNROLL
			for (int e = 0; e < Core::E; e++)
				o.t[m][d].x[e] *= r.v[m][Core::stat(e)];
}

#endif
