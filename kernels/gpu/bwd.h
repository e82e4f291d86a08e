/* SPDX-License-Identifier: MIT */
/*
 * bwd.h: gradients of q, k, v and the bias, in two passes that share one launch and one loop.
 *
 *   keys stay:  a block owns ROWS keys of one KV head and walks over queries:
 *               P^T = exp(K Q^T - LSE), dP^T = V dO^T, dV += P^T dO, dK += dS^T Q
 *   rows stay:  a block owns ROWS queries of one head and walks over keys:
 *               P = exp(Q K^T - LSE), dP = dO V^T, dQ += dS K
 *               (with dq_acc: parts of the keys one after the other, each with its own sum)
 * with dS = P (dP - D). Seven products instead of five, but no atomics, no workspace, the same bits
 * on every run, and P and dS never leave the registers: what one product leaves there is the operand
 * of the next, on every matrix core. In a tile the staying side is the row, the walking side the
 * column, so "row" here is a key in the first pass and a query in the second.
 *
 * Heads of a group share keys: their gradients are summed by the block that owns the keys.
 */
#ifndef FMHA_GPU_BWD_H
#define FMHA_GPU_BWD_H

#include "scores.h"

enum { BOTH, DK_ONLY, DV_ONLY };

/* Every n-th part of the tiles that a row needs, in their order. */
struct PartOfTiles {
	ColumnTiles all;
	i32 from, count;

	METHOD static PartOfTiles make(const ColumnTiles &tiles, i32 part, i32 n)
	{
		i32 from = (i32)((i64)tiles.count * part / n);

		return PartOfTiles{tiles, from, (i32)((i64)tiles.count * (part + 1) / n) - from};
	}
	METHOD i32 column(i32 n) const { return all.column(from + n); }
};

/* ROWS stay, COLUMNS walk. */
template <class C, int ROWS, int COLUMNS> struct BackwardPass {
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	static const int TM = ROWS / 16 / C::WAVES_M, TN = COLUMNS / 16;
	static_assert(TM * 16 * C::WAVES_M == ROWS, "waves share whole 16-row tiles");
	static_assert(C::WAVES_N == 1, "waves do not share columns here");
	/* Both passes stream a pair of tiles; one is read both ways in each, so both are made so. */
	static const int TD = C::HDIM_Q / 16, TV = C::HDIM_V / 16;

	typedef typename Core::template Stationary<TM, C::WAVES_M, C::HDIM_Q, C::THREADS> StayQ;
	typedef typename Core::template Stationary<TM, C::WAVES_M, C::HDIM_V, C::THREADS> StayV;
	typedef typename Core::template Tile<COLUMNS, C::HDIM_Q, C::THREADS, true, true> WalkQ;
	typedef typename Core::template Tile<COLUMNS, C::HDIM_V, C::THREADS, true, true> WalkV;
	static const int BUFFERS = C::BUFFERS;
	static const int HELD = Core::template held_registers<WalkQ>() + Core::template held_registers<WalkV>();
	static const int WALK_BYTES = WalkQ::BYTES + WalkV::BYTES;
	static const int WALK_AT = StayQ::BYTES + StayV::BYTES;
	static const int STATS_AT = WALK_AT + BUFFERS * WALK_BYTES;
	/* LSE and D: of the walking queries, or, where registers are dear, of the staying ones. The scalar
	 * core's widest tiles leave no room for them. */
	static const int STATS_WANTED =
		static_max(BUFFERS * 2 * COLUMNS, Core::VIEWS_IN_LDS ? 2 * ROWS : 0) * 4;
	static const bool STATS_IN_LDS = STATS_AT + STATS_WANTED <= C::LDS_BYTES;
	static const int STATS_BYTES = STATS_IN_LDS ? STATS_WANTED : 0;
	static const int HDIM_MAX = static_max(C::HDIM_Q, C::HDIM_V);
	static const int STAGE_STRIDE = stage_stride(HDIM_MAX), STAGE_BYTES = C::WAVES_M * 16 * STAGE_STRIDE * 4;
	static const int VIEWS_AT = STATS_AT + STATS_BYTES;
	static const int VIEWS_BYTES = Core::VIEWS_IN_LDS ? 256 : 0; /* see fwd.h */
	static const int BYTES = static_max(VIEWS_AT + VIEWS_BYTES, STAGE_BYTES);

	typedef RegTile<Core, TM, TN> Scores;
	typedef KeyView<Element, false> Keys;
	typedef QueryView<Element, false> Queries;

	const abi_bwd_args &a;
	char *lds;
	Sequence seq;
	Band band;
	Modifiers<C> modifiers;
	i32 first;  /* of the block's rows */
	i32 wave;
	i32 head;

	METHOD BackwardPass(const abi_bwd_args &args, char *memory, i32 first_row)
	    : a(args), lds(memory), first(first_row), wave(wave_id())
	{
	}

	METHOD i32 row_of(int m) const { return first + (wave * TM + m) * 16; }

	METHOD void enter_sequence(i32 b)
	{
		seq = find_sequence(a.sequences, 0, b);
		band = Band::make<C::MASK>(a.band, seq, 0, seq.n_k);
		modifiers = Modifiers<C>::make(a, seq);
	}

	/* In the loop, where registers are dear, the band is read from LDS, next to the views. */
	static const int BAND_AT = VIEWS_AT + 224;
	METHOD const Band &known_band() const
	{
		return Core::VIEWS_IN_LDS && C::MASK ? *(const Band *)(lds + BAND_AT) : band;
	}

	METHOD Queries queries(const abi_tensor &t, i32 h, i32 hdim) const
	{
		return Queries::make(t, seq, h, 1, hdim);
	}

	METHOD Keys keys(const abi_tensor &t, i32 head_k, i32 hdim, bool is_v) const
	{
		const abi_kv_cache none = {};

		return Keys::make(t, seq, none, head_k, a.nhead_k, hdim, is_v);
	}

	/* -LSE in powers of two, such that exp2(score * unit + this) = P; -inf where P must be 0. */
	METHOD float lse_of(i32 i) const
	{
		if (i >= seq.n_q)
			return minus_infinity();
		float lse = a.lse.data[rows_offset(a.lse, seq, i, head)];

		return lse == minus_infinity() ? lse : -lse * FMHA_LOG2_E;
	}

	METHOD float d_of(i32 i) const
	{
		return i < seq.n_q ? a.d.data[rows_offset(a.d, seq, i, head)] : 0.0f;
	}

	/* Random bytes of a tile: made, or read where the forward pass stored them. */
	template <bool KEYS_STAY> METHOD void random_bytes(i32 row, i32 column, u32 *bytes) const
	{
		const abi_tensor &t = a.dropout.randval;

		if (!t.data) {
			dropout_bytes<Core, KEYS_STAY>(a.dropout, seq.batch * a.nhead_q + head, row,
						       column, bytes);
			return;
		}
		UNROLL
		for (int e = 0; e < Core::E; e++) {
			i32 r = row + Core::row(e), c = column + Core::column(e);
			i32 i = KEYS_STAY ? c : r, j = KEYS_STAY ? r : c;

			bytes[e] = i < seq.n_q && j < seq.n_k
					   ? ((const u8 *)t.data)[q_offset(t, seq, i, head) +
								  j * t.stride_dim]
					   : 255;
		}
	}

	/*
	 * One element. s: raw product in, dropped P out (for dV); dp: raw product in, dS out, without
	 * the scale; returns dZ, the gradient of the logit before the mask (for dBias).
	 */
	METHOD float element(float &s, float &dp, i32 i, i32 j, float lse, float d,
			     bool masked, u32 byte) const
	{
		float x = s, slope = 1, keep = 1;

		if (C::LOGITS)
			x = modifiers.logit(x, seq, head, i, j, &slope);
		float p = exp2_fast(x * modifiers.unit + lse);

		/* Without logits, mask_products() has done it for less. */
		if (C::LOGITS && masked && !known_band().sees(i, j))
			p = 0;
		if (C::DROPOUT)
			keep = byte <= (u32)a.dropout.keep_at_most ? a.dropout.p_keep_inverse : 0.0f;
		float dz = p * (dp * keep - d);

		if (p == 0.0f)
			dz = 0; /* a row with nothing to attend to may have any D */
		s = p * keep;
		dp = dz * slope;
		return dz;
	}

	/* Products that must not count become -inf. LOW: the first column that a row sees. */
	METHOD void mask_products(Scores &s, i32 column, bool keys_stay) const
	{
		const Band &band = known_band();

		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				i32 row = row_of(m) + Core::stat_row(r), low, high, sinks = 0;

				if (keys_stay) { /* row is a key, columns are queries */
					low = row - band.anchor_right;
					high = row < band.sinks ? 1 << 30 : row - band.anchor_left;
					if (row >= band.end)
						high = low - 1;
				} else {
					low = band.first(row);
					high = band.last(row);
					sinks = band.sinks - column;
				}
				low -= column;
				high -= column;
				UNROLL
				for (int n = 0; n < TN; n++)
					UNROLL
					for (int e = 0; e < Core::E; e++) {
						i32 at = n * 16 + Core::column(e);

						if (Core::stat(e) == r &&
						    (at > high || (at < low && (keys_stay || at >= sinks))))
							s.t[m][n].x[e] = minus_infinity();
					}
			}
	}

	struct KeysStay {
		StayQ k;
		StayV v;
		RegTile<Core, TM, TD> dk;
		RegTile<Core, TM, TV> dv;
	};

	struct RowsStay {
		StayQ q;
		StayV d_o;
		RegTile<Core, TM, TD> dq;
		RowVector<Core, TM> lse, d; /* !VIEWS_IN_LDS */
	};

	METHOD float *stats_of(int buffer) const
	{
		return (float *)(lds + STATS_AT) + buffer * 2 * COLUMNS;
	}

	/* LSE and D of query column + at. */
	METHOD float lse_at(const float *stats, i32 column, i32 at) const
	{
		return STATS_IN_LDS ? stats[at] : lse_of(column + at);
	}
	METHOD float d_at(const float *stats, i32 column, i32 at) const
	{
		return STATS_IN_LDS ? stats[COLUMNS + at] : d_of(column + at);
	}

	/* LSE and D of the walking queries. */
	METHOD void fetch_stats(int buffer, i32 column)
	{
		float *to = stats_of(buffer);

		if (!STATS_IN_LDS)
			return;
		for (i32 n = thread_id(); n < COLUMNS; n += C::THREADS) {
			to[n] = lse_of(column + n);
			to[COLUMNS + n] = d_of(column + n);
		}
	}

	template <int PART>
	METHOD void step(KeysStay &x, const WalkQ &q, const WalkV &d_o, int buffer, i32 column,
			 bool dbias)
	{
		const float *stats = stats_of(buffer);
		Scores s, dp;
		bool masked = C::MASK || first + ROWS > seq.n_k; /* rows beyond n_q have P = 0 */

		if (C::MASK && first + ROWS <= seq.n_k)
			masked = !known_band().sees_all(column, column + COLUMNS - 1, first, ROWS);
		s.zero();
		multiply_abt<C::HDIM_Q>(s, x.k, q, 0, Core());
		if (!C::LOGITS && masked)
			mask_products(s, column, true);
		dp.zero();
		if (PART != DV_ONLY)
			multiply_abt<C::HDIM_V>(dp, x.v, d_o, 0, Core());
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int n = 0; n < TN; n++) {
				i32 row = Core::anew(row_of(m));
				u32 bytes[Core::E] = {};

				if (C::DROPOUT)
					random_bytes<true>(row, column + n * 16, bytes);
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					i32 at = n * 16 + Core::column(e), j = row + Core::row(e);
					float dz = element(s.t[m][n].x[e], dp.t[m][n].x[e], column + at, j,
							   lse_at(stats, column, at),
							   d_at(stats, column, at), masked,
							   bytes[e]);

					if (C::BIAS == BIAS_MATRIX && dbias && column + at < seq.n_q &&
					    j < seq.n_k)
						store_from_float(
							a.dbias.data, a.bias_dtype,
							q_offset(a.dbias, seq, column + at, head) +
								j * a.dbias.stride_dim,
							dz);
				}
			}
		if (PART != DK_ONLY)
			multiply_ab(x.dv, round_to_operand(s), d_o, 0, Core());
		if (PART != DV_ONLY)
			multiply_ab(x.dk, round_to_operand(dp), q, 0, Core());
	}

	/* LSE and D of the staying queries. */
	METHOD void fetch_row_stats(RowsStay &x)
	{
		if (Core::VIEWS_IN_LDS) {
			for (i32 n = thread_id(); n < ROWS; n += C::THREADS) {
				stats_of(0)[n] = lse_of(first + n);
				stats_of(0)[ROWS + n] = d_of(first + n);
			}
			return;
		}
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				x.lse.v[m][r] = lse_of(row_of(m) + Core::stat_row(r));
				x.d.v[m][r] = d_of(row_of(m) + Core::stat_row(r));
			}
	}

	METHOD float row_lse(const RowsStay &x, int m, int r) const
	{
		if (Core::VIEWS_IN_LDS)
			return stats_of(0)[row_of(m) - first + Core::stat_row(r)];
		return x.lse.v[m][r];
	}
	METHOD float row_d(const RowsStay &x, int m, int r) const
	{
		if (Core::VIEWS_IN_LDS)
			return stats_of(0)[ROWS + row_of(m) - first + Core::stat_row(r)];
		return x.d.v[m][r];
	}

	METHOD void step(RowsStay &x, const WalkQ &k, const WalkV &v, i32 column)
	{
		Scores s, dp;
		bool masked = column + COLUMNS > seq.n_k;

		if (C::MASK)
			masked = !known_band().sees_all(first, first + ROWS - 1, column, COLUMNS);
		s.zero();
		multiply_abt<C::HDIM_Q>(s, x.q, k, 0, Core());
		if (!C::LOGITS && masked)
			mask_products(s, column, false);
		dp.zero();
		multiply_abt<C::HDIM_V>(dp, x.d_o, v, 0, Core());
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int n = 0; n < TN; n++) {
				i32 row = Core::anew(row_of(m));
				u32 bytes[Core::E] = {};

				if (C::DROPOUT)
					random_bytes<false>(row, column + n * 16, bytes);
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					int r = Core::stat(e);

					(void)element(s.t[m][n].x[e], dp.t[m][n].x[e],
						      row + Core::row(e),
						      column + n * 16 + Core::column(e), row_lse(x, m, r),
						      row_d(x, m, r), masked, bytes[e]);
				}
			}
		multiply_ab(x.dq, round_to_operand(dp), k, 0, Core());
	}

	struct Pair {
		WalkQ q;
		WalkV v;

		METHOD void place(char *lds, int buffer)
		{
			q.place(lds + WALK_AT + buffer * WALK_BYTES);
			v.place(lds + WALK_AT + buffer * WALK_BYTES + WalkQ::BYTES);
		}
		template <class View>
		METHOD void fetch(const View &view_q, const View &view_v, i32 column, i32 end)
		{
			q.template fetch<Element>(view_q, column, end);
			v.template fetch<Element>(view_v, column, end);
		}
		/* Into LDS that is free now, with few registers. */
		template <class View>
		METHOD void fetch_in_turn(const View &view_q, const View &view_v, i32 column, i32 end)
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

	/*
	 * Walks over the columns of `tiles` with two views. BUFFERS 2: the next pair travels into the
	 * other half of LDS while this one is used. BUFFERS 1: it waits in registers (AMD, if there are
	 * some), or is fetched when the room is free.
	 */
	template <class Tiles, class View, class Body>
	METHOD void walk(const Tiles &tiles, const View &view_q, const View &view_v, i32 end, Body body)
	{
		const bool AHEAD = BUFFERS == 2 || (!Core::FETCH_NEEDS_LDS && HELD <= 64);
		Pair pair;

		if (tiles.count == 0)
			return;
		struct Views {
			View q, v;
		} *kept = (Views *)(lds + VIEWS_AT);
		static_assert(sizeof(Views) <= 224 && sizeof(Band) <= 32, "room for the views");
		if (Core::VIEWS_IN_LDS && thread_id() == 0) {
			*kept = Views{view_q, view_v};
			*(Band *)(lds + BAND_AT) = band;
		}
		pair.place(lds, 0);
		if (AHEAD)
			pair.fetch(view_q, view_v, tiles.column(0), end);
		if (BUFFERS == 2)
			body.stats(0, tiles.column(0));
		NO_UNROLL
		for (i32 n = 0; n < tiles.count; n++) {
			i32 column = tiles.column(n), buffer = BUFFERS == 2 ? n & 1 : 0;

			if (AHEAD)
				pair.arrive();
			else
				pair.fetch_in_turn(view_q, view_v, column, end);
			if (BUFFERS == 1)
				body.stats(0, column);
			block_sync();
			if (AHEAD && n + 1 < tiles.count) {
				if (BUFFERS == 2) {
					pair.place(lds, 1 - buffer);
					body.stats(1 - buffer, tiles.column(n + 1));
				}
				pair.fetch(Core::VIEWS_IN_LDS ? kept->q : view_q,
					   Core::VIEWS_IN_LDS ? kept->v : view_v,
					   tiles.column(n + 1), end);
			}
			if (BUFFERS == 2)
				pair.place(lds, buffer);
			body.step(pair.q, pair.v, buffer, column);
			if (BUFFERS == 1)
				block_sync();
		}
	}

	template <int PART> struct KeysBody {
		BackwardPass &k;
		KeysStay &x;
		bool dbias;
		METHOD void stats(int buffer, i32 column) { k.fetch_stats(buffer, column); }
		METHOD void step(const WalkQ &q, const WalkV &d_o, int buffer, i32 column)
		{
			k.template step<PART>(x, q, d_o, buffer, column, dbias);
		}
	};

	struct RowsBody {
		BackwardPass &k;
		RowsStay &x;
		METHOD void stats(int, i32) {}
		METHOD void step(const WalkQ &q, const WalkV &v, int, i32 column) { k.step(x, q, v, column); }
	};

	/* The query tiles that may see keys first .. first + ROWS - 1. */
	METHOD ColumnTiles query_tiles(bool all) const
	{
		ColumnTiles t;
		i32 low = 0, high = seq.n_q - 1;

		if (C::MASK && !all) {
			low = max_of(first - band.anchor_right, 0);
			if (first >= band.sinks)
				high = min_of(high, first + ROWS - 1 - band.anchor_left);
		}
		t.width = COLUMNS;
		t.sink_first = t.n_sink = 0;
		t.first = low / COLUMNS;
		t.count = high >= low ? high / COLUMNS + 1 - t.first : 0;
		return t;
	}

	/* PART: what fits the registers. With wide heads dK and dV have a block each. */
	template <int PART> METHOD void keys_pass(i32 head_k, i32 batch)
	{
		i32 group = a.nhead_q / a.nhead_k;
		KeysStay x;

		enter_sequence(batch);
		if (first >= seq.n_k)
			return;
		x.k.place(lds, wave);
		x.v.place(lds + StayQ::BYTES, wave);
		x.k.template fetch<Element>(keys(a.k, head_k, a.hdim_q, false), first, seq.n_k);
		x.v.template fetch<Element>(keys(a.v, head_k, a.hdim_v, true), first, seq.n_k);
		x.k.arrive();
		x.v.arrive();
		x.dk.zero();
		x.dv.zero();
		bool dbias = C::BIAS == BIAS_MATRIX && !C::BIAS_SUM && a.dbias.data && PART != DV_ONLY;

		NO_UNROLL
		for (i32 g = 0; g < group; g++) {
			head = head_k * group + g;
			block_sync(); /* the last head's tiles are done with */
			/* dBias is written everywhere, masked or not. */
			walk(query_tiles(dbias), queries(a.q, head, a.hdim_q),
			     queries(a.d_o, head, a.hdim_v), seq.n_q,
			     KeysBody<PART>{*this, x, dbias});
		}
		if (PART != DV_ONLY)
			store(x.dk, a.dk, a.dtype, k_offset(a.dk, seq, 0, head_k), a.hdim_q, a.scale, seq.n_k);
		if (PART != DK_ONLY)
			store(x.dv, a.dv, a.dtype, k_offset(a.dv, seq, 0, head_k), a.hdim_v, 1.0f, seq.n_k);
	}

	METHOD void rows_pass(i32 h, i32 batch)
	{
		head = h;
		enter_sequence(batch);
		if (first >= seq.n_q)
			return;
		i32 last = min_of(first + ROWS, seq.n_q) - 1;
		ColumnTiles tiles = ColumnTiles::make<C::MASK>(band, first, last, COLUMNS);
		RowsStay x;

		if constexpr (C::ACC) {
			i32 n_splits = a.nsplits[a.dq_acc_offsets ? batch : 0], physical;
			abi_tensor to = {dq_acc_of(a, seq, &physical), 0, a.hdim_q, 0, 1};

			NO_UNROLL
			for (i32 split = 0; split < n_splits; split++) {
				block_sync(); /* the last split's results have left LDS */
				sum_rows(x, PartOfTiles::make(tiles, split, n_splits));
				store(x.dq, to, ABI_F32,
				      ((i64)head * n_splits + split) * physical * a.hdim_q, a.hdim_q,
				      1.0f, seq.n_q);
			}
		} else {
			sum_rows(x, tiles);
			/* Not kept during the loop, where registers are dear. */
			head = hidden(block_id_y());
			enter_sequence(hidden(block_id_z()));
			store(x.dq, a.dq, a.dtype, q_offset(a.dq, seq, 0, head), a.hdim_q, a.scale,
			      seq.n_q);
		}
	}

	/* dQ / scale of the block's rows, from the keys of `tiles`. */
	template <class Tiles> METHOD void sum_rows(RowsStay &x, const Tiles &tiles)
	{
		i32 head_k = head / (a.nhead_q / a.nhead_k);

		x.q.place(lds, wave);
		x.d_o.place(lds + StayQ::BYTES, wave);
		x.q.template fetch<Element>(queries(a.q, head, a.hdim_q), first, seq.n_q);
		x.d_o.template fetch<Element>(queries(a.d_o, head, a.hdim_v), first, seq.n_q);
		x.q.arrive();
		x.d_o.arrive();
		x.dq.zero();
		fetch_row_stats(x);
		walk(tiles, keys(a.k, head_k, a.hdim_q, false), keys(a.v, head_k, a.hdim_v, true), seq.n_k,
		     RowsBody{*this, x});
	}

	/* Rows below `end` of a gradient, through LDS so that stores are whole chunks. */
	template <int T>
	METHOD void store(const RegTile<Core, TM, T> &x, const abi_tensor &t, i32 dtype, i64 offset,
			  i32 hdim, float factor, i32 end)
	{
		float *stage = (float *)lds + wave * 16 * STAGE_STRIDE;

		block_sync(); /* the tiles are not needed any more */
		UNROLL
		for (int m = 0; m < TM; m++) {
			wave_sync();
			UNROLL
			for (int d = 0; d < T; d++) {
				UNROLL
				for (int e = 0; e < Core::E; e++)
					stage[Core::row(e) * STAGE_STRIDE + d * 16 + Core::column(e)] =
						x.t[m][d].x[e] * factor;
				scheduling_barrier();
			}
			wave_sync();
			NO_UNROLL
			for (i32 index = lane_id(); index < 16 * (T * 2); index += FMHA_WAVE) {
				i32 row = row_of(m) + index / (T * 2), dim = index % (T * 2) * 8;

				if (row < end && dim < hdim)
					store_chunk(t.data, dtype,
						    offset + row * t.stride_seq + dim * t.stride_dim,
						    t.stride_dim,
						    stage + index / (T * 2) * STAGE_STRIDE + dim);
			}
		}
	}
};

/*
 * dBias of a bias that is broadcast: a block owns ROWS keys and COLUMNS queries (all of them, where
 * rows are broadcast) of one matrix and goes through everything that is summed, always in the same
 * order.
 */
template <class C> struct BiasPass : BackwardPass<C, C::TILE_N, C::TILE_M> {
	typedef BackwardPass<C, C::TILE_N, C::TILE_M> Base;
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	typedef typename Base::Scores Scores;
	static const int ROWS = C::TILE_N, COLUMNS = C::TILE_M;
	bool sum_batch, sum_head, sum_row;

	METHOD BiasPass(const abi_bwd_args &args, char *memory, i32 first_row)
	    : Base(args, memory, first_row)
	{
		const abi_sequences &s = args.sequences;

		sum_head = !args.dbias.stride_head && args.nhead_q > 1;
		sum_row = !args.dbias.stride_seq && (s.seqstart_q ? s.total_q : s.seqlen_q_max) > 1;
		sum_batch = s.seqstart_q ? sum_row : !args.dbias.stride_batch && s.batch > 1;
	}

	/* column: the first query, unless all of them are summed. */
	METHOD void run(i32 column, i32 h, i32 b)
	{
		i32 last_b = sum_batch ? this->a.sequences.batch : b + 1;
		i32 last_h = sum_head ? this->a.nhead_q : h + 1;
		Scores sum;

		if ((sum_batch && b > 0) || (sum_head && h > 0) || (sum_row && column > 0))
			return;
		sum.zero();
		NO_UNROLL
		for (i32 batch = b; batch < last_b; batch++) {
			this->enter_sequence(batch);
			NO_UNROLL
			for (i32 i = h; i < last_h && this->first < this->seq.n_k; i++)
				add_head(sum, i, column);
		}
		if (sum_row)
			store_row(sum, h);
		else
			store_tile(sum, h, column);
	}

	METHOD void add_head(Scores &sum, i32 h, i32 column)
	{
		i32 end = sum_row ? this->seq.n_q : min_of(this->seq.n_q, column + COLUMNS);
		i32 head_k = h / (this->a.nhead_q / this->a.nhead_k);
		typename Base::StayQ k;
		typename Base::StayV v;

		this->head = h;
		k.place(this->lds, this->wave);
		v.place(this->lds + Base::StayQ::BYTES, this->wave);
		block_sync(); /* the last head's tiles are done with */
		if (Core::VIEWS_IN_LDS && thread_id() == 0)
			*(Band *)(this->lds + Base::BAND_AT) = this->band;
		k.template fetch<Element>(this->keys(this->a.k, head_k, this->a.hdim_q, false), this->first,
					  this->seq.n_k);
		v.template fetch<Element>(this->keys(this->a.v, head_k, this->a.hdim_v, true), this->first,
					  this->seq.n_k);
		k.arrive();
		v.arrive();
		NO_UNROLL
		for (; column < end; column += COLUMNS)
			add_tile(sum, k, v, column);
	}

	METHOD void add_tile(Scores &sum, typename Base::StayQ &k, typename Base::StayV &v, i32 column)
	{
		typename Base::Pair pair;
		Scores s, dp;

		pair.place(this->lds, 0);
		block_sync();
		this->fetch_stats(0, column);
		pair.fetch_in_turn(this->queries(this->a.q, this->head, this->a.hdim_q),
				   this->queries(this->a.d_o, this->head, this->a.hdim_v), column,
				   this->seq.n_q);
		block_sync();
		s.zero();
		multiply_abt<C::HDIM_Q>(s, k, pair.q, 0, Core());
		dp.zero();
		multiply_abt<C::HDIM_V>(dp, v, pair.v, 0, Core());
		const float *stats = this->stats_of(0);

		UNROLL
		for (int m = 0; m < Base::TM; m++)
			UNROLL
			for (int n = 0; n < Base::TN; n++) {
				u32 bytes[Core::E] = {};

				if (C::DROPOUT)
					this->template random_bytes<true>(this->row_of(m), column + n * 16,
									  bytes);
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					i32 at = n * 16 + Core::column(e), j = this->row_of(m) + Core::row(e);

					sum.t[m][n].x[e] += this->element(
						s.t[m][n].x[e], dp.t[m][n].x[e], column + at, j,
						this->lse_at(stats, column, at),
						this->d_at(stats, column, at), true, bytes[e]);
				}
			}
	}

	METHOD void put(i32 i, i32 j, i32 h, float x) const
	{
		const abi_tensor &t = this->a.dbias;

		if (j < this->a.sequences.seqlen_k_max)
			store_from_float(t.data, this->a.bias_dtype,
					 q_offset(t, this->seq, i, h) + j * t.stride_dim, x);
	}

	METHOD void store_tile(const Scores &sum, i32 h, i32 column) const
	{
		i32 end = this->seq.packed_q ? this->seq.n_q : this->a.sequences.seqlen_q_max;

		UNROLL
		for (int m = 0; m < Base::TM; m++)
			UNROLL
			for (int n = 0; n < Base::TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					i32 i = column + n * 16 + Core::column(e);

					if (i < end)
						put(i, this->row_of(m) + Core::row(e), h, sum.t[m][n].x[e]);
				}
	}

	/* One query for all: its keys are the tile's rows. */
	METHOD void store_row(const Scores &sum, i32 h) const
	{
		UNROLL
		for (int m = 0; m < Base::TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				bool mine = false;
				float x = 0;

				UNROLL
				for (int n = 0; n < Base::TN; n++)
					UNROLL
					for (int e = 0; e < Core::E; e++)
						if (Core::stat(e) == r) {
							x += sum.t[m][n].x[e];
							mine = mine || (n == 0 && Core::column(e) == 0);
						}
				x = Core::row_sum(x);
				if (mine)
					put(0, this->row_of(m) + Core::stat_row(r), h, x);
			}
	}
};

template <class C> struct Backward {
	/* Keys stay with tile_n of them; rows, which need fewer accumulators, may stay with more. */
	typedef BackwardPass<C, C::TILE_N, C::TILE_M> Keys;
	typedef BackwardPass<C, C::ROWS_N, C::ROWS_M> Rows;
	static_assert(static_max(Keys::BYTES, Rows::BYTES) <= C::LDS_BYTES,
		      "gpu_kernel.c computes the LDS of a kernel");

	METHOD static void run(const abi_bwd_args &a, char *lds)
	{
		const int PARTS = C::APART ? 2 : 1;
		i32 x = block_id_x(), y = block_id_y(), z = block_id_z();
		i32 n_keys = ceil_div(a.sequences.seqlen_k_max, C::TILE_N), n_key_blocks = PARTS * n_keys;

		if constexpr (C::BIAS_SUM) {
			i32 tile = x - n_key_blocks - ceil_div(a.sequences.seqlen_q_max, C::ROWS_N);

			if (tile >= 0) {
				BiasPass<C>(a, lds, tile % n_keys * C::TILE_N).run(tile / n_keys * C::TILE_M, y, z);
				return;
			}
		}
		if (x >= n_key_blocks) {
			x = ceil_div(a.sequences.seqlen_q_max, C::ROWS_N) - 1 - (x - n_key_blocks);
			Rows(a, lds, x * C::ROWS_N).rows_pass(y, z);
			return;
		}
		if (y >= a.nhead_k)
			return;
		Keys keys(a, lds, x / PARTS * C::TILE_N); /* early keys are seen by most rows: first */

		if (!C::APART)
			keys.template keys_pass<BOTH>(y, z);
		else if (x % 2)
			keys.template keys_pass<DV_ONLY>(y, z);
		else
			keys.template keys_pass<DK_ONLY>(y, z);
	}
};

#endif
