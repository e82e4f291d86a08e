/* SPDX-License-Identifier: MIT */
/*
 * bwd_loop.h: the main loop of the backward passes: a pair of tiles is stationary (TILE_N rows of K
 * and V, or DQ_TILE_N of Q and dO), pairs of the other two are streamed past it. What travels when,
 * and what waits where, is here; what is computed is bwd_scores.h and a pass's step().
 *
 * BUFFERS 2: the next pair travels into the other half of LDS while this one is used. BUFFERS 1: it
 * waits in registers (AMD, if there are some), or is fetched when the room is free. PARTED: nothing
 * of it is there before a product asks for it (parts.h), and what is stationary comes along each
 * time.
 */
#ifndef FMHA_GPU_BWD_LOOP_H
#define FMHA_GPU_BWD_LOOP_H

#include "block/bwd_scores.h"
#include "block/parts.h"

template <class C, bool KEYS_STATIONARY> struct BackwardLoop {
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	static const int ROWS = KEYS_STATIONARY ? C::TILE_N : C::DQ_TILE_N;
	static const int COLUMNS = KEYS_STATIONARY ? C::TILE_M : C::DQ_TILE_M;
	static const int TM = ROWS / 16 / C::WAVES_M, TN = COLUMNS / 16;
	static_assert(TM * 16 * C::WAVES_M == ROWS, "waves share whole 16-row tiles");
	static_assert(C::WAVES_N == 1, "waves do not share columns here");
	static const int TD = C::PART_Q / 16, TV = C::PART_V / 16;

	typedef RegTile<Core, TM, TN> Scores;
	typedef BackwardScores<C, KEYS_STATIONARY, TM, TN, BackwardLoop> Steps;
	static const bool FETCHES_BIAS = false, HIDES = false;
	/* In a pair q is HDIM_Q wide (Q or K), v HDIM_V (dO or V). */
	typedef typename BackwardPlace<C>::Keys Keys;
	typedef typename BackwardPlace<C>::Queries Queries;
	template <int WIDTH> struct TilesOf {
		typedef typename Core::template Stationary<TM, C::WAVES_M, WIDTH, C::THREADS> Owned;
		/* One of a streamed pair is read both ways in each pass, so both are made so. */
		typedef typename Core::template Tile<COLUMNS, WIDTH, C::THREADS, true, true>
			Passing;
		typedef typename Either<KEYS_STATIONARY, Keys, Queries>::Type OwnedView;
		typedef typename Either<KEYS_STATIONARY, Queries, Keys>::Type PassingView;
		typedef typename Either<C::PARTED,
					PartedTile<Core, Owned, Element, OwnedView, WIDTH, true>,
					Owned>::Type Stationary;
		typedef typename Either<
			C::PARTED, PartedTile<Core, Passing, Element, PassingView, WIDTH, false>,
			Passing>::Type Streamed;
		static const int HELD = Core::template held_registers<Passing>();
	};
	typedef typename TilesOf<C::PART_Q>::Stationary StationaryQ;
	typedef typename TilesOf<C::PART_V>::Stationary StationaryV;
	typedef typename TilesOf<C::PART_Q>::Streamed StreamedQ;
	typedef typename TilesOf<C::PART_V>::Streamed StreamedV;
	static const int BUFFERS = C::BUFFERS;
	static_assert(!C::PARTED || BUFFERS == 1, "parts come when they are asked for");
	static const int HELD = TilesOf<C::PART_Q>::HELD + TilesOf<C::PART_V>::HELD;
	static const bool AHEAD = BUFFERS == 2 ||
				  (!Core::FETCH_NEEDS_LDS && !C::PARTED && HELD <= 48);
	static const int PAIR_BYTES = lds_of_pair(StreamedQ::BYTES, StreamedV::BYTES, C::PARTED);
	static const int PAIRS_AT = lds_of_pair(StationaryQ::BYTES, StationaryV::BYTES, C::PARTED);
	static const int STATS_AT = PAIRS_AT + BUFFERS * PAIR_BYTES;
	static const int STATS_BYTES = lds_row_statistics(C::cut(COLUMNS, ROWS), BUFFERS,
							  C::LDS_BYTES);
	static const bool STATS_IN_LDS = STATS_BYTES > 0;
	static const int VIEWS_AT = STATS_AT + STATS_BYTES, VIEWS_BYTES = lds_views(FMHA_CORE) / 2;
	static const int PARKED_AT = VIEWS_AT + VIEWS_BYTES;
	static const int BYTES = lds_backward(C::cut(COLUMNS, ROWS), BUFFERS, C::LDS_BYTES);
	static_assert(PARKED_AT + VIEWS_BYTES <= BYTES, "what lies there has room");
	static_assert(BYTES <= C::LDS_BYTES, "the host asks lds.h, too");

	BackwardPlace<C> at;
	char *lds;
	i32 first; /* of the block's rows */
	i32 wave;

	METHOD BackwardLoop(const abi_bwd_args &args, char *memory, i32 first_row)
	    : at(args), lds(memory), first(first_row), wave(wave_id())
	{
	}

	METHOD i32 wave_row(int m) const { return first + (wave * TM + m) * 16; }

	/* In the loop, where registers are dear, uniform facts are read from LDS, next to the
	 * views: the band, and, where bias, dropout or wide heads leave less room than masks do,
	 * the rest too. */
	struct Parked {
		Sequence seq;
		i32 head;
		Band band;
		i32 first;
		BiasView bias, dbias;
		const float *lse, *d; /* of the sequence's first query */
	};
	static const bool ALL_PARKED = Core::VIEWS_IN_LDS && (C::LOGITS || C::DROPOUT ||
							      lds_max(C::HDIM_Q, C::HDIM_V) > 128);
	METHOD const Parked &parked() const { return *(const Parked *)(lds + PARKED_AT); }
	METHOD void park()
	{
		const abi_bwd_args &a = at.a;
		Parked *to = (Parked *)(lds + PARKED_AT);

		static_assert(!Core::VIEWS_IN_LDS || sizeof(Parked) <= VIEWS_BYTES,
			      "room for them");
		if (!Core::VIEWS_IN_LDS || thread_id() != 0)
			return;
		to->band = at.band;
		to->lse = a.lse.data + rows_offset(a.lse, at.seq, 0, at.head);
		to->d = a.d.data + rows_offset(a.d, at.seq, 0, at.head);
		if (ALL_PARKED) {
			to->seq = at.seq;
			to->head = at.head;
			to->first = first;
		}
		if (C::BIAS == BIAS_MATRIX) {
			to->bias = at.bias(a.bias);
			to->dbias = at.bias(a.dbias);
		}
	}

	METHOD const Band &band() const
	{
		return Core::VIEWS_IN_LDS && C::MASK ? parked().band : at.band;
	}
	METHOD const Sequence &seq() const { return ALL_PARKED ? parked().seq : at.seq; }
	METHOD i32 head() const { return ALL_PARKED ? parked().head : at.head; }
	METHOD i32 first_row() const { return ALL_PARKED ? parked().first : first; }
	METHOD i32 row_of(int m) const
	{
		if (!ALL_PARKED)
			return wave_row(m);
		return first_row() + (hidden_lane(thread_id()) / FMHA_WAVE * TM + m) * 16;
	}
	METHOD BiasView bias() const { return ALL_PARKED ? parked().bias : at.bias(at.a.bias); }
	METHOD BiasView dbias() const { return ALL_PARKED ? parked().dbias : at.bias(at.a.dbias); }

	/* ---- LSE and D ---- */

	METHOD float *stats_of(int buffer) const
	{
		return (float *)(lds + STATS_AT) + buffer * 2 * COLUMNS;
	}

	/* The statistics of the streamed queries. */
	struct StreamedStats {
		const BackwardLoop &loop;
		const float *from;
		i32 column;

		METHOD static i32 index(int n, int e) { return n * 16 + Core::column(e); }
		METHOD float lse(int, int n, int e) const
		{
			return STATS_IN_LDS ? from[index(n, e)]
					    : loop.at.lse_of(column + index(n, e));
		}
		METHOD float d(int, int n, int e) const
		{
			return STATS_IN_LDS ? from[COLUMNS + index(n, e)]
					    : loop.at.d_of(column + index(n, e));
		}
	};
	/* Fetches those of N queries from `query` on. */
	template <int N> METHOD void fetch_stats(float *to, i32 query) const
	{
		NO_UNROLL
		for (i32 n = thread_id(); n < N; n += C::THREADS) {
			to[n] = at.lse_of(query + n);
			to[N + n] = at.d_of(query + n);
			if (N <= C::THREADS)
				break;
		}
	}

	/*
	 * BUFFERS 2: the same without waiting for memory. What is on its way is sent raw, and each
	 * thread finishes what it sent itself, before the barrier that shows it to the others.
	 */
	METHOD void send_stats(int buffer, i32 column)
	{
		i32 n = thread_id(), i = column + n;
		float *to = stats_of(buffer) + n;
		bool valid = i < at.seq.n_q;

		static_assert(BUFFERS == 1 || !KEYS_STATIONARY || COLUMNS <= C::THREADS,
			      "a query a thread");
		if (n < COLUMNS) {
			Core::send_word(to, parked().lse + (valid ? i * at.a.lse.stride_seq : 0),
					valid);
			Core::send_word(to + COLUMNS,
					parked().d + (valid ? i * at.a.d.stride_seq : 0), valid);
		}
		Core::send_done();
	}
	METHOD void finish_stats(int buffer, i32 column)
	{
		i32 n = thread_id();

		if (n < COLUMNS)
			stats_of(buffer)[n] = column + n < at.seq.n_q
						      ? at.exponent_of(stats_of(buffer)[n])
						      : minus_infinity();
	}

	/* The statistics of the stationary queries: in registers, or else (VIEWS_IN_LDS) in LDS. */
	struct StationaryStats {
		RowVector<Core, TM> held[2];

		METHOD void fetch(const BackwardLoop &loop)
		{
			if (Core::VIEWS_IN_LDS)
				return loop.template fetch_stats<ROWS>(loop.stats_of(0),
								       loop.first);
			UNROLL
			for (int m = 0; m < TM; m++)
				UNROLL
				for (int r = 0; r < Core::STATS; r++) {
					i32 row = loop.wave_row(m) + Core::stat_row(r);

					held[0].v[m][r] = loop.at.lse_of(row);
					held[1].v[m][r] = loop.at.d_of(row);
				}
		}
	};
	struct StationaryReader {
		const BackwardLoop &loop;
		const StationaryStats &stats;

		METHOD float number(int which, int m, int r) const
		{
			if (Core::VIEWS_IN_LDS)
				return loop.stats_of(0)[which * ROWS + loop.wave_row(m) -
							loop.first + Core::stat_row(r)];
			return stats.held[which].v[m][r];
		}
		METHOD float lse(int m, int, int e) const { return number(0, m, Core::stat(e)); }
		METHOD float d(int m, int, int e) const { return number(1, m, Core::stat(e)); }
	};

	/* ---- tiles ---- */

	struct Stationary {
		StationaryQ q;
		StationaryV v;

		template <class View>
		METHOD void fetch(const BackwardLoop &loop, const View &view_q, const View &view_v,
				  i32 end)
		{
			q.place(loop.lds, loop.wave);
			v.place(loop.lds + (C::PARTED ? 0 : StationaryQ::BYTES), loop.wave);
			q.template fetch<Element>(view_q, loop.first, end);
			v.template fetch<Element>(view_v, loop.first, end);
			q.arrive();
			v.arrive();
		}
	};

	struct Pair {
		StreamedQ q;
		StreamedV v;

		METHOD void place(char *lds, int buffer)
		{
			q.place(lds + PAIRS_AT + buffer * PAIR_BYTES);
			v.place(lds + PAIRS_AT + buffer * PAIR_BYTES +
				(C::PARTED ? 0 : StreamedQ::BYTES));
		}
		template <class View>
		METHOD void fetch(const View &view_q, const View &view_v, i32 column, i32 end)
		{
			q.template fetch<Element>(view_q, column, end);
			v.template fetch<Element>(view_v, column, end);
		}
		/* Into LDS that is free now, with few registers. */
		template <class View>
		METHOD void fetch_in_turn(const View &view_q, const View &view_v, i32 column,
					  i32 end)
		{
			if constexpr (Core::FETCH_NEEDS_LDS) {
				fetch(view_q, view_v, column, end);
				arrive();
			} else {
				q.template copy<Element>(view_q, column, end);
				v.template copy<Element>(view_v, column, end);
			}
		}
		METHOD void arrive()
		{
			q.arrive();
			v.arrive();
		}
	};

	/* S += A B^T, and what it becomes times B: of PARTED columns those from `part` on. */
	template <int WIDTH, class A, class B>
	METHOD static void multiply_rows(Scores &s, const A &a, const B &b)
	{
		if constexpr (C::PARTED)
			multiply_parts(s, a, b, 0);
		else
			multiply_abt<WIDTH>(s, a, b, 0, Core());
	}
	template <int T, class B>
	METHOD static void multiply_columns(RegTile<Core, TM, T> &sum, const Scores &s, const B &b,
					    i32 part)
	{
		if constexpr (C::PARTED)
			multiply_part(sum, round_to_operand(s), b, part);
		else
			multiply_ab(sum, round_to_operand(s), b, 0, Core());
	}

	/* Streams the columns of `tiles` past pass.step(). */
	template <class Tiles, class View, class Pass>
	METHOD void stream(const Tiles &tiles, const View &view_q, const View &view_v, i32 end,
			   Pass &pass)
	{
		Pair pair;

		if (tiles.count == 0)
			return;
		struct Views {
			View q, v;
		} *views = (Views *)(lds + VIEWS_AT);
		static_assert(!Core::VIEWS_IN_LDS || sizeof(Views) <= VIEWS_BYTES,
			      "room for the views");
		if (Core::VIEWS_IN_LDS && thread_id() == 0)
			*views = Views{view_q, view_v};
		park();
		pair.place(lds, 0);
		if (AHEAD)
			pair.fetch(view_q, view_v, tiles.column(0), end);
		if constexpr (BUFFERS == 2) {
			block_sync();
			if constexpr (KEYS_STATIONARY)
				send_stats(0, tiles.column(0));
		}
		NO_UNROLL
		for (i32 n = 0; n < tiles.count; n++) {
			i32 column = tiles.column(n), buffer = BUFFERS == 2 ? n & 1 : 0;

			if (AHEAD)
				pair.arrive();
			else
				pair.fetch_in_turn(view_q, view_v, column, end);
			if constexpr (KEYS_STATIONARY && BUFFERS == 2)
				finish_stats(buffer, column);
			else if (KEYS_STATIONARY && STATS_IN_LDS)
				fetch_stats<COLUMNS>(stats_of(0), column);
			block_sync();
			if (AHEAD && n + 1 < tiles.count) {
				if constexpr (BUFFERS == 2) {
					pair.place(lds, 1 - buffer);
					if constexpr (KEYS_STATIONARY)
						send_stats(1 - buffer, tiles.column(n + 1));
				}
				pair.fetch(Core::VIEWS_IN_LDS ? views->q : view_q,
					   Core::VIEWS_IN_LDS ? views->v : view_v,
					   tiles.column(n + 1), end);
			}
			if (BUFFERS == 2)
				pair.place(lds, buffer);
			pass.step(pair.q, pair.v, buffer, column);
			if (BUFFERS == 1)
				block_sync();
		}
	}
};

#endif
