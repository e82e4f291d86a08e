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

/* What this block is for. Blocks of a head: those that own keys, those that own rows, those that sum a
 * broadcast dBias. Computed anew where it is needed, since registers are dear in between. */
template <class C> struct BackwardBlock {
	static const int PARTS = C::SPLIT_DKDV ? 2 : 1;
	i32 n_keys, n_key_blocks, n_row_blocks;
	i32 x, head, batch; /* x: of the blocks of a head */

	METHOD static BackwardBlock here(const abi_bwd_args &a)
	{
		/* q, k, v and dO */
		const int ROW_BYTES = 2 * (C::HDIM_Q + C::HDIM_V) * (int)sizeof(typename C::Element::Storage);
		BackwardBlock b;

		b.n_keys = ceil_div(a.sequences.seqlen_k_max, C::TILE_N);
		b.n_key_blocks = PARTS * b.n_keys;
		b.n_row_blocks = ceil_div(a.sequences.seqlen_q_max, C::DQ_TILE_N);
		b.x = hidden(block_id_x()), b.head = hidden(block_id_y()), b.batch = hidden(block_id_z());
		if (C::MASK && !C::DBIAS_SUM)
			longest_first(b.n_key_blocks + b.n_row_blocks, a.nhead_q,
				      heads_at_once(a.sequences.seqlen_k_max, ROW_BYTES, a.nhead_q), &b.x,
				      &b.head);
		return b;
	}

	/* Early keys are seen by most rows, last rows see most keys: first. */
	METHOD i32 first_key() const { return x / PARTS * C::TILE_N; }
	METHOD i32 first_row() const { return (n_row_blocks - 1 - (x - n_key_blocks)) * C::DQ_TILE_N; }
};

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
	static const int STATS_BYTES = lds_row_statistics(C::cut(COLUMNS, ROWS), BUFFERS, C::LDS_BYTES);
	static const bool STATS_IN_LDS = STATS_BYTES > 0;
	static const int HDIM_MAX = lds_max(C::HDIM_Q, C::HDIM_V);
	static const int STAGE_STRIDE = lds_stage_stride(HDIM_MAX);
	static const int VIEWS_AT = STATS_AT + STATS_BYTES;
	static const int VIEWS_BYTES = lds_views(FMHA_CORE); /* see fwd.h */
	static const int BYTES = lds_backward(C::cut(COLUMNS, ROWS), BUFFERS, C::LDS_BYTES);
	static_assert(VIEWS_AT + VIEWS_BYTES <= BYTES, "what lies there has room");

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

	/* In the loop, where registers are dear, uniform facts are read from LDS, next to the views: the band,
	 * and, where bias, dropout or wide heads leave less room than masks do, the rest too. */
	struct Known {
		Sequence seq;
		i32 head;
		Band band;
		i32 first;
		BiasView bias, dbias;
		const float *lse, *d; /* of the sequence's first query */
	};
	static const int KNOWN_AT = VIEWS_AT + VIEWS_BYTES - 160;
	static const bool KNOWN_IN_LDS = Core::VIEWS_IN_LDS && (C::LOGITS || C::DROPOUT || HDIM_MAX > 128);
	METHOD const Known &kept() const { return *(const Known *)(lds + KNOWN_AT); }
	METHOD void keep_known()
	{
		Known *to = (Known *)(lds + KNOWN_AT);

		static_assert(sizeof(Known) <= 160, "room for them");
		if (!Core::VIEWS_IN_LDS || thread_id() != 0)
			return;
		to->band = band;
		to->lse = a.lse.data + rows_offset(a.lse, seq, 0, head);
		to->d = a.d.data + rows_offset(a.d, seq, 0, head);
		if (KNOWN_IN_LDS) {
			to->seq = seq;
			to->head = head;
			to->first = first;
		}
		if (C::BIAS == BIAS_MATRIX) {
			to->bias = bias_view(a.bias);
			to->dbias = bias_view(a.dbias);
		}
	}

	METHOD const Band &known_band() const { return Core::VIEWS_IN_LDS && C::MASK ? kept().band : band; }
	METHOD const Sequence &known_seq() const { return KNOWN_IN_LDS ? kept().seq : seq; }
	METHOD i32 known_head() const { return KNOWN_IN_LDS ? kept().head : head; }
	METHOD i32 known_first() const { return KNOWN_IN_LDS ? kept().first : first; }
	METHOD i32 known_row_of(int m) const
	{
		if (!KNOWN_IN_LDS)
			return row_of(m);
		return known_first() + (hidden_lane(thread_id()) / FMHA_WAVE * TM + m) * 16;
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
		return exponent_of(a.lse.data[rows_offset(a.lse, seq, i, head)]);
	}
	METHOD static float exponent_of(float lse)
	{
		return lse == minus_infinity() ? lse : -lse * FMHA_LOG2_E;
	}

	METHOD float d_of(i32 i) const
	{
		return i < seq.n_q ? a.d.data[rows_offset(a.d, seq, i, head)] : 0.0f;
	}

	/* Random bytes of a tile: made, or read where the forward pass stored them. */
	template <bool SAME_PATCH, bool KEYS_STAY>
	METHOD void make_random(DropoutTile<Core, KEYS_STAY> &random, i32 row, i32 column) const
	{
		i32 batch_head = known_seq().batch * a.nhead_q + known_head();

		if (a.dropout.randval.data)
			random.read(a.dropout.randval, known_seq(), known_head(), row, column);
		else
			random.template make<SAME_PATCH>(a.dropout, batch_head, row, column);
	}

	/*
	 * Raw products become logits while the registers of the second product are free, unless the
	 * gradient needs the raw products too.
	 */
	static const bool LOGITS_FIRST = C::LOGITS && !C::SOFTCAP;
	template <bool KEYS_STAY> METHOD void make_logits(Scores &s, i32 column) const
	{
		float slope;

		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				i32 row = known_row_of(m) + Core::stat_row(r);

				UNROLL
				for (int n = 0; n < TN; n++)
					UNROLL
					for (int e = 0; e < Core::E; e++) {
						i32 at = column + n * 16 + Core::column(e);
						float &x = s.t[m][n].x[e];

						if (Core::stat(e) == r)
							x = modifiers.logit(x, known_head(), KEYS_STAY ? at : row,
									    KEYS_STAY ? row : at, &slope);
					}
				if (C::BIAS == BIAS_MATRIX)
					bias_row<KEYS_STAY>(row, column).add(s.t[m], r);
			}
	}

	METHOD BiasView bias_view(const abi_tensor &t) const
	{
		return BiasView::make<Element>(t, a.bias_dtype, seq, head);
	}

	template <bool KEYS_STAY> METHOD BiasRow<C> bias_row(const BiasView &t, i32 row, i32 column) const
	{
		return BiasRow<C>::template make<KEYS_STAY>(t, known_seq(), RowPlace{row, 0}, column);
	}
	template <bool KEYS_STAY> METHOD BiasRow<C> bias_row(i32 row, i32 column) const
	{
		if (KNOWN_IN_LDS)
			return bias_row<KEYS_STAY>(kept().bias, row, column);
		return bias_row<KEYS_STAY>(bias_view(a.bias), row, column);
	}
	METHOD BiasRow<C> dbias_row(i32 key, i32 column) const
	{
		if (KNOWN_IN_LDS)
			return bias_row<true>(kept().dbias, key, column);
		return bias_row<true>(bias_view(a.dbias), key, column);
	}

	/* For LOGITS && !LOGITS_FIRST: the bias of the tile at (row, column). */
	template <bool KEYS_STAY> METHOD void read_bias(i32 row, i32 column, typename Core::Acc (&bias)[1]) const
	{
		UNROLL
		for (int r = 0; r < Core::STATS && C::BIAS == BIAS_MATRIX; r++)
			bias_row<KEYS_STAY>(row + Core::stat_row(r), column).add(bias, r);
	}

	/*
	 * One element, at (row, column). s: raw product or logit in, dropped P out (for dV); dp: raw product
	 * in, dS out, without the scale; returns dZ, the gradient of the logit before the mask (for dBias).
	 */
	template <bool KEYS_STAY>
	METHOD float element(float &s, float &dp, i32 row, i32 column, float bias, float lse, float d,
			     bool masked, u32 byte) const
	{
		float x = s, slope = 1, keep = 1;

		if (C::SOFTCAP) {
			i32 i = KEYS_STAY ? column : row, j = KEYS_STAY ? row : column;

			x = modifiers.logit(x, known_head(), i, j, &slope) + bias;
			/* Without a cap mask_products() has done it for less. */
			if (masked && !known_band().sees(i, j))
				x = minus_infinity();
		}
		float p = exp2_fast(x * modifiers.unit + lse);

		if (C::DROPOUT)
			keep = byte <= (u32)a.dropout.keep_at_most ? a.dropout.p_keep_inverse : 0.0f;
		float dz = p * (dp * keep - d);

		if (p == 0.0f)
			dz = 0; /* a row with nothing to attend to may have any D */
		s = p * keep;
		dp = dz * slope;
		return dz;
	}

	/* The gradients of the logits of the tile at (key, column). */
	METHOD void store_dbias(i32 key, i32 column, const typename Core::Acc &dz) const
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++)
			dbias_row(key + Core::stat_row(r), column).store(dz, r);
	}

	/* Products that must not count become -inf. LOW: the first column that a row sees. */
	METHOD void mask_products(Scores &s, i32 column, bool keys_stay) const
	{
		const Band &band = known_band();
		i32 from = column + Core::column(0); /* so that a lane's columns are constants */

		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				i32 row = known_row_of(m) + Core::stat_row(r), low, high, sinks = 0;

				if (keys_stay) { /* row is a key, columns are queries */
					low = row - band.anchor_right;
					high = row < band.sinks ? 1 << 30 : row - band.anchor_left;
					if (row >= band.end)
						high = low - 1;
				} else {
					low = band.first(row);
					high = band.last(row);
					sinks = band.sinks - from;
				}
				low -= from;
				high -= from;
				UNROLL
				for (int n = 0; n < TN; n++)
					UNROLL
					for (int e = 0; e < Core::E; e++) {
						i32 at = n * 16 + Core::column(e) - Core::column(0);

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
		NO_UNROLL
		for (i32 n = thread_id(); n < COLUMNS; n += C::THREADS) {
			to[n] = lse_of(column + n);
			to[COLUMNS + n] = d_of(column + n);
			if (COLUMNS <= C::THREADS)
				break;
		}
	}

	/*
	 * BUFFERS 2: the same without waiting for memory. What is on its way is sent raw, and each thread
	 * finishes what it sent itself, before the barrier that shows it to the others.
	 */
	METHOD void send_stats(int buffer, i32 column)
	{
		i32 n = thread_id(), i = column + n;
		float *to = stats_of(buffer) + n;
		bool valid = i < seq.n_q;

		static_assert(BUFFERS == 1 || COLUMNS <= C::THREADS, "a query a thread");
		if (n < COLUMNS) {
			Core::send_word(to, kept().lse + (valid ? i * a.lse.stride_seq : 0), valid);
			Core::send_word(to + COLUMNS, kept().d + (valid ? i * a.d.stride_seq : 0), valid);
		}
		Core::send_done();
	}
	METHOD void finish_stats(int buffer, i32 column)
	{
		i32 n = thread_id();

		if (n < COLUMNS)
			stats_of(buffer)[n] = column + n < seq.n_q ? exponent_of(stats_of(buffer)[n])
								   : minus_infinity();
	}

	template <int PART>
	METHOD void step(KeysStay &x, const WalkQ &q, const WalkV &d_o, int buffer, i32 column,
			 bool dbias)
	{
		const float *stats = stats_of(buffer);
		Scores s, dp;
		i32 from = known_first();
		bool masked = C::MASK || from + ROWS > known_seq().n_k; /* rows beyond n_q have P = 0 */

		if (C::MASK && from + ROWS <= known_seq().n_k)
			masked = !known_band().sees_all(column, column + COLUMNS - 1, from, ROWS);
		s.zero();
		multiply_abt<C::HDIM_Q>(s, x.k, q, 0, Core());
		if (LOGITS_FIRST)
			make_logits<true>(s, column);
		if (!C::SOFTCAP && masked)
			mask_products(s, column, true);
		dp.zero();
		if (PART != DV_ONLY)
			multiply_abt<C::HDIM_V>(dp, x.v, d_o, 0, Core());
		DropoutTile<Core, true> random;

		/* Tiles of a patch one after the other. */
		const bool PATCHES = C::DROPOUT && TM % 2 == 0;
		UNROLL
		for (int t = 0; t < TM * TN; t++) {
			const int m = PATCHES ? t % TM : t / TN, n = PATCHES ? t / TM : t % TN;
			i32 row = Core::anew(known_row_of(m));
			typename Core::Acc bias[1] = {}, dz;

			if (C::DROPOUT && PATCHES && m % 2)
				make_random<true>(random, row, column + n * 16);
			else if (C::DROPOUT)
				make_random<false>(random, row, column + n * 16);
			if (!LOGITS_FIRST)
				read_bias<true>(row, column + n * 16, bias);
			UNROLL
			for (int e = 0; e < Core::E; e++) {
				i32 at = n * 16 + Core::column(e);

				dz.x[e] = element<true>(s.t[m][n].x[e], dp.t[m][n].x[e],
							row + Core::row(e), column + at,
							bias[0].x[e], lse_at(stats, column, at),
							d_at(stats, column, at), masked,
							C::DROPOUT ? random.byte(e) : 0);
			}
			if (C::BIAS == BIAS_MATRIX && dbias)
				store_dbias(row, column + n * 16, dz);
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
			NO_UNROLL
			for (i32 n = thread_id(); n < ROWS; n += C::THREADS) {
				stats_of(0)[n] = lse_of(first + n);
				stats_of(0)[ROWS + n] = d_of(first + n);
				if (ROWS <= C::THREADS)
					break;
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
		i32 from = known_first();
		bool masked = column + COLUMNS > known_seq().n_k;

		if (C::MASK)
			masked = !known_band().sees_all(from, from + ROWS - 1, column, COLUMNS);
		s.zero();
		multiply_abt<C::HDIM_Q>(s, x.q, k, 0, Core());
		if (LOGITS_FIRST)
			make_logits<false>(s, column);
		if (!C::SOFTCAP && masked)
			mask_products(s, column, false);
		dp.zero();
		multiply_abt<C::HDIM_V>(dp, x.d_o, v, 0, Core());
		DropoutTile<Core, false> random;

		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int n = 0; n < TN; n++) {
				i32 row = Core::anew(known_row_of(m));
				typename Core::Acc bias[1] = {};

				if (C::DROPOUT && n % 2 && COLUMNS % 32 == 0)
					make_random<true>(random, row, column + n * 16);
				else if (C::DROPOUT)
					make_random<false>(random, row, column + n * 16);
				if (!LOGITS_FIRST)
					read_bias<false>(row, column + n * 16, bias);
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					int r = Core::stat(e);

					(void)element<false>(s.t[m][n].x[e], dp.t[m][n].x[e],
							     row + Core::row(e),
							     column + n * 16 + Core::column(e),
							     bias[0].x[e], row_lse(x, m, r), row_d(x, m, r),
							     masked,
							     C::DROPOUT ? random.byte(e) : 0);
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
		const bool AHEAD = BUFFERS == 2 || (!Core::FETCH_NEEDS_LDS && HELD <= 48);
		Pair pair;

		if (tiles.count == 0)
			return;
		struct Views {
			View q, v;
		} *views = (Views *)(lds + VIEWS_AT);
		static_assert(sizeof(Views) <= VIEWS_BYTES - 160, "room for the views");
		if (Core::VIEWS_IN_LDS && thread_id() == 0)
			*views = Views{view_q, view_v};
		keep_known();
		pair.place(lds, 0);
		if (AHEAD)
			pair.fetch(view_q, view_v, tiles.column(0), end);
		if constexpr (BUFFERS == 2) {
			block_sync();
			body.send_stats(0, tiles.column(0));
		}
		NO_UNROLL
		for (i32 n = 0; n < tiles.count; n++) {
			i32 column = tiles.column(n), buffer = BUFFERS == 2 ? n & 1 : 0;

			if (AHEAD)
				pair.arrive();
			else
				pair.fetch_in_turn(view_q, view_v, column, end);
			if constexpr (BUFFERS == 2)
				body.finish_stats(buffer, column);
			else
				body.stats(0, column);
			block_sync();
			if (AHEAD && n + 1 < tiles.count) {
				if constexpr (BUFFERS == 2) {
					pair.place(lds, 1 - buffer);
					body.send_stats(1 - buffer, tiles.column(n + 1));
				}
				pair.fetch(Core::VIEWS_IN_LDS ? views->q : view_q,
					   Core::VIEWS_IN_LDS ? views->v : view_v,
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
		METHOD void send_stats(int buffer, i32 column) { k.send_stats(buffer, column); }
		METHOD void finish_stats(int buffer, i32 column) { k.finish_stats(buffer, column); }
		METHOD void step(const WalkQ &q, const WalkV &d_o, int buffer, i32 column)
		{
			k.template step<PART>(x, q, d_o, buffer, column, dbias);
		}
	};

	struct RowsBody {
		BackwardPass &k;
		RowsStay &x;
		METHOD void stats(int, i32) {}
		METHOD void send_stats(int, i32) {}
		METHOD void finish_stats(int, i32) {}
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
		bool dbias = C::BIAS == BIAS_MATRIX && !C::DBIAS_SUM && a.dbias.data && PART != DV_ONLY;

		/* Where it is in the problem is not kept while it walks. */
		NO_UNROLL
		for (i32 g = 0; g < group_size(); g++) {
			BackwardBlock<C> block = BackwardBlock<C>::here(a);

			enter_sequence(block.batch);
			head = block.head * group_size() + g;
			block_sync(); /* the last head's tiles are done with */
			/* dBias is written everywhere, masked or not. */
			walk(query_tiles(dbias), queries(a.q, head, a.hdim_q),
			     queries(a.d_o, head, a.hdim_v), seq.n_q,
			     KeysBody<PART>{*this, x, dbias});
		}
		BackwardBlock<C> block = BackwardBlock<C>::here(a);

		enter_sequence(block.batch);
		first = block.first_key();
		head_k = block.head;
		wave = wave_id();
		if (PART != DV_ONLY)
			store(x.dk, a.dk, a.dtype, k_offset(a.dk, seq, 0, head_k), a.hdim_q, a.scale, seq.n_k);
		if (PART != DK_ONLY)
			store(x.dv, a.dv, a.dtype, k_offset(a.dv, seq, 0, head_k), a.hdim_v, 1.0f, seq.n_k);
	}

	METHOD i32 group_size() const { return hidden(a.nhead_q) / a.nhead_k; }

	METHOD void rows_pass(i32 h, i32 batch)
	{
		head = h;
		enter_sequence(batch);
		if (first >= seq.n_q)
			return;
		i32 last = min_of(first + ROWS, seq.n_q) - 1;
		ColumnTiles tiles = ColumnTiles::make<C::MASK>(band, first, last, COLUMNS);
		RowsStay x;

		if constexpr (C::SPLIT) {
			i32 n_splits = splits_of(a, batch), physical;
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
			BackwardBlock<C> block = BackwardBlock<C>::here(a);

			head = block.head;
			enter_sequence(block.batch);
			first = block.first_row();
			wave = wave_id();
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
		/* Of no rows, too: the sum is 0 then. */
		sum_row = !args.dbias.stride_seq && (s.seqstart_q ? s.total_q : s.seqlen_q_max) != 1;
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
		this->keep_known();
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
		if (Base::LOGITS_FIRST)
			this->template make_logits<true>(s, column);
		if (!C::SOFTCAP)
			this->mask_products(s, column, true);
		dp.zero();
		multiply_abt<C::HDIM_V>(dp, v, pair.v, 0, Core());
		const float *stats = this->stats_of(0);

		UNROLL
		for (int m = 0; m < Base::TM; m++)
			UNROLL
			for (int n = 0; n < Base::TN; n++) {
				DropoutTile<Core, true> random;
				typename Core::Acc bias[1] = {};

				if (C::DROPOUT)
					this->template make_random<false>(random, this->row_of(m),
									  column + n * 16);
				if (!Base::LOGITS_FIRST)
					this->template read_bias<true>(this->row_of(m), column + n * 16, bias);
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					i32 at = n * 16 + Core::column(e);

					sum.t[m][n].x[e] += this->template element<true>(
						s.t[m][n].x[e], dp.t[m][n].x[e],
						this->row_of(m) + Core::row(e), column + at, bias[0].x[e],
						this->lse_at(stats, column, at),
						this->d_at(stats, column, at), true,
						C::DROPOUT ? random.byte(e) : 0);
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
	typedef BackwardPass<C, C::DQ_TILE_N, C::DQ_TILE_M> Rows;
	static_assert(lds_max(Keys::BYTES, Rows::BYTES) <= C::LDS_BYTES, "the host asks lds.h, too");

	METHOD static void run(const abi_bwd_args &a, char *lds)
	{
		const BackwardBlock<C> block = BackwardBlock<C>::here(a);
		i32 x = block.x, y = block.head, z = block.batch;

		if constexpr (C::DBIAS_SUM) {
			i32 tile = x - block.n_key_blocks - block.n_row_blocks;

			if (tile >= 0) {
				BiasPass<C>(a, lds, tile % block.n_keys * C::TILE_N)
					.run(tile / block.n_keys * C::TILE_M, y, z);
				return;
			}
		}
		if (x >= block.n_key_blocks) {
			Rows(a, lds, block.first_row()).rows_pass(y, z);
			return;
		}
		if (y >= a.nhead_k)
			return;
		Keys keys(a, lds, block.first_key());

		if (!C::SPLIT_DKDV)
			keys.template keys_pass<BOTH>(y, z);
		else if (x % 2)
			keys.template keys_pass<DV_ONLY>(y, z);
		else
			keys.template keys_pass<DK_ONLY>(y, z);
	}
};

#endif
