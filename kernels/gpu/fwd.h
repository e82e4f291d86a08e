/* SPDX-License-Identifier: MIT */
/*
 * fwd.h: forward attention; the same loop serves the families fwd, fwd_splitkv, fwd_pagedkv and
 * batch_prefill, and every matrix core.
 *
 * A block owns TILE_M query rows of one head (or of all heads of a group, PACK) and walks over
 * TILE_N keys at a time. Waves share the rows; with WAVES_N > 1 (decode: few rows) they share the
 * keys of a tile too, each with its own softmax, merged at the end.
 *
 * One K and one V tile in LDS. V travels while S = Q K^T runs, the next K travels during softmax
 * and O += P V; several blocks on a compute unit fill what is left.
 */
#ifndef FMHA_GPU_FWD_H
#define FMHA_GPU_FWD_H

#include "scores.h"

template <class C> struct Forward {
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	static const int TM = C::TILE_M / 16 / C::WAVES_M, TN = C::TILE_N / 16 / C::WAVES_N;
	static const int TD = C::HDIM_V / 16;
	static_assert(TM * 16 * C::WAVES_M == C::TILE_M, "waves share whole 16-row tiles");
	static_assert(TN * 16 * C::WAVES_N == C::TILE_N, "waves share whole 16-column tiles");

	typedef typename Core::template Stationary<TM, C::WAVES_M, C::HDIM_Q, C::THREADS> QTile;
	typedef typename Core::template Tile<C::TILE_N, C::HDIM_Q, C::THREADS, true, false> KTile;
	typedef typename Core::template Tile<C::TILE_N, C::HDIM_V, C::THREADS, false, true> VTile;
	static const int Q_AT = 0, K_AT = QTile::BYTES, V_AT = K_AT + KTile::BYTES;
	static const int STAGE_STRIDE = lds_stage_stride(C::HDIM_V);
	/* Whether a tile waits in registers while products run. A wide one of few lanes would fill them: it
	 * is copied when its place is free. */
	static const int MOST_HELD = 32;
	static const bool K_TRAVELS = Core::template held_registers<KTile>() <= MOST_HELD;
	static const bool V_TRAVELS = Core::template held_registers<VTile>() <= MOST_HELD;
	typedef KeyView<Element, C::PAGED> Keys;
	static const int KEY_BYTES = (C::HDIM_Q + C::HDIM_V) * (int)sizeof(typename Element::Storage);
	/* LEAN: the band, which few tiles need whole, and the softmax's numbers wait in LDS. */
	static const bool BAND_KEPT = C::LEAN && C::MASK;
	static const int BAND_AT = V_AT + VTile::BYTES, SOFTMAX_AT = BAND_AT + (C::LEAN ? LDS_BAND : 0);
	static_assert(sizeof(Band) <= LDS_BAND, "room for the band");
	static const int KEPT_BYTES = C::LEAN ? Softmax<C, TM>::KEPT_BYTES : 0;
	static const int BYTES = lds_forward(C::cut(C::TILE_M, C::TILE_N), C::LEAN);
	static_assert(SOFTMAX_AT + KEPT_BYTES <= BYTES, "what lies there has room");
	static_assert(BYTES <= C::LDS_BYTES, "the host asks lds.h, too");

	const abi_fwd_args &a;
	Sequence seq;
	Band band;
	Modifiers<C> modifiers;
	i32 tile_row;   /* of the block, in (packed) rows */
	i32 n_rows;     /* (packed) rows of the sequence */
	i32 head, head_k, group, split;
	i32 wave_m, wave_n;
	RegTile<Core, TM, TD> o;
	Softmax<C, TM> softmax;

	METHOD Forward(const abi_fwd_args &args) : a(args) {}

	/* The sequence row and head behind a (packed) row. */
	METHOD RowPlace place_of(i32 r) const
	{
		if (C::PACK)
			return RowPlace{r / group, head + r % group};
		return RowPlace{r, head};
	}

	/* First row of 16-row tile m of this wave. */
	METHOD i32 row_of(int m) const { return tile_row + (wave_m * TM + m) * 16; }

	/* Raw products become logits. */
	METHOD void make_logits(RegTile<Core, TM, TN> &s, i32 column) const
	{
		i32 wave_row = row_of(0);

		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				RowPlace p = place_of(wave_row + m * 16 + Core::stat_row(r));
				float q_scale = C::DESCALE ? q_descale(p) : 1.0f;

				UNROLL
				for (int n = 0; n < TN; n++)
					UNROLL
					for (int e = 0; e < Core::E; e++) {
						i32 j = column + n * 16 + Core::column(e);
						float &x = s.t[m][n].x[e], slope;

						if (Core::stat(e) != r)
							continue;
						if (C::DESCALE)
							x *= q_scale * key_descale(a.k_descale, j);
						x = modifiers.logit(x, p.head, p.row, j, &slope);
					}
				if (C::BIAS == BIAS_MATRIX)
					BiasRow<C>::template make<false>(
						BiasView::make<Element>(a.bias, a.bias_dtype, seq, head), seq,
						RowPlace{p.row, p.head - head}, column)
						.add(s.t[m], r);
			}
	}

	METHOD void mask(RegTile<Core, TM, TN> &s, i32 column, const char *lds) const
	{
		const Band &b = BAND_KEPT ? *(const Band *)(lds + BAND_AT) : band;
		i32 wave_row = row_of(0);

		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				i32 row = place_of(wave_row + m * 16 + Core::stat_row(r)).row;
				/* Relative to the tile: compile-time columns then compare with these. */
				i32 first = b.first(row) - column, last = b.last(row) - column;
				i32 begin = b.begin - column, sinks = b.sinks - column;

				UNROLL
				for (int n = 0; n < TN; n++)
					UNROLL
					for (int e = 0; e < Core::E; e++) {
						i32 j = n * 16 + Core::column(e);

						if (Core::stat(e) != r)
							continue;
						if (j > last || j < begin || (C::MASK && j < first && j >= sinks))
							s.t[m][n].x[e] = minus_infinity();
					}
			}
	}

	METHOD float q_descale(RowPlace p) const
	{
		const abi_descale &d = a.q_descale;

		if (!d.data || p.row >= seq.n_q)
			return 1.0f;
		return d.data[seq.batch * d.stride_batch + p.head * d.stride_head +
			      (d.block ? p.row / d.block * d.stride_block : 0)];
	}

	METHOD float key_descale(const abi_descale &d, i32 j) const
	{
		i32 position = min_of(j, seq.n_k - 1) + seq.leftpad;
		i32 b = seq.batch;

		if (!d.data || seq.n_k == 0)
			return 1.0f;
		if constexpr (C::PAGED)
			if (d.per_page && a.cache.page_size)
				b = keys.page_of(position);
		return d.data[b * d.stride_batch + head_k * d.stride_head +
			      (d.block ? position / d.block * d.stride_block : 0)];
	}

	Keys keys;

	/* Dropout and v's scale factors, after the sums were taken. */
	METHOD void drop(RegTile<Core, TM, TN> &s, i32 column) const
	{
		i32 wave_row = row_of(0);
		DropoutTile<Core, false> random;

		static_assert(!(C::DROPOUT && C::PACK), "a tile's rows belong to one head");
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int n = 0; n < TN; n++) {
				if (C::DROPOUT) {
					i32 batch_head = seq.batch * a.nhead_q + head;
					i32 row = wave_row + m * 16, first = column + n * 16;

					if (n % 2 && TN % 2 == 0) /* columns begin with a patch */
						random.template make<true>(a.dropout, batch_head, row, first);
					else
						random.template make<false>(a.dropout, batch_head, row, first);
					drop_tile(s.t[m][n], random);
				}
				if (C::DESCALE)
					UNROLL
					for (int e = 0; e < Core::E; e++)
						s.t[m][n].x[e] *= key_descale(
							a.v_descale, column + n * 16 + Core::column(e));
			}
	}

	METHOD void drop_tile(typename Core::Acc &s, const DropoutTile<Core, false> &random) const
	{
		const abi_dropout &d = a.dropout;

		UNROLL
		for (int e = 0; e < Core::E; e++)
			s.x[e] = random.byte(e) <= (u32)d.keep_at_most ? s.x[e] * d.p_keep_inverse : 0.0f;
	}

	/* The random bytes of this block's rows, masked or not: every column of the sequence. */
	METHOD void store_randval() const
	{
		const abi_tensor &t = a.dropout.randval;
		i32 rows = min_of(C::TILE_M, n_rows - tile_row);

		for (i32 index = thread_id(); index < rows * seq.n_k; index += C::THREADS) {
			RowPlace p = place_of(tile_row + index / seq.n_k);
			i32 j = index % seq.n_k;

			((u8 *)t.data)[q_offset(t, seq, p.row, p.head) + j * t.stride_dim] =
				(u8)dropout_byte(a.dropout, seq.batch * a.nhead_q + p.head, p.row, j);
		}
	}

	/* The sequence's rows that are in the block, and the columns that all of them see. */
	struct Reach {
		i32 first_row, last_row, begin, end;
	};

	METHOD void walk(char *lds)
	{
		i32 first_row = C::PACK ? tile_row / group : tile_row;
		i32 last_tile_row = min_of(tile_row + C::TILE_M, n_rows) - 1;
		i32 last_row = C::PACK ? last_tile_row / group : last_tile_row;
		ColumnTiles tiles = ColumnTiles::make<C::MASK>(band, first_row, last_row, C::TILE_N);
		const Reach reach = {first_row, last_row, band.first(last_row), band.last(first_row) + 1};
		Keys values;
		QueryView<Element, C::PACK> queries;
		QTile q;
		KTile k;
		VTile v;

		queries = QueryView<Element, C::PACK>::make(a.q, seq, head, group, a.hdim_q);
		keys = Keys::make(a.k, seq, a.cache, head_k, a.nhead_k, a.hdim_q,
							false);
		values = Keys::make(a.v, seq, a.cache, head_k, a.nhead_k,
							  a.hdim_v, true);
		q.place(lds + Q_AT, wave_m);
		k.place(lds + K_AT);
		v.place(lds + V_AT);

		if (BAND_KEPT && thread_id() == 0)
			*(Band *)(lds + BAND_AT) = band;
		if (C::LEAN)
			softmax.keep(lds + SOFTMAX_AT);
		q.template fetch<Element>(queries, tile_row, n_rows);
		if (tiles.count > 0)
			start_keys(k, keys, tiles.column(0), band.end);
		q.arrive();
		NO_UNROLL
		for (i32 n = 0; n < tiles.count; n++) {
			i32 wave_column = wave_n * TN * 16;
			i32 column = tiles.column(n);
			RegTile<Core, TM, TN> s;

			finish_keys(k, keys, column, band.end);
			block_sync(); /* K is there; nobody reads V any more */
			if constexpr (V_TRAVELS)
				fetch_values(v, values, column, reach);
			s.zero();
			multiply_abt<C::HDIM_Q>(s, q, k, wave_column, Core());
			if constexpr (V_TRAVELS)
				v.arrive();
			else
				copy_values(v, values, column, reach);
			block_sync(); /* V is there; nobody reads K any more */
			if (n + 1 < tiles.count)
				start_keys(k, keys, tiles.column(n + 1), band.end);
			attend(s, v, column, wave_column, reach, lds);
		}
		if (C::LEAN)
			softmax.fetch(lds + SOFTMAX_AT);
	}

	METHOD static void start_keys(KTile &k, const Keys &keys, i32 column, i32 end)
	{
		if constexpr (K_TRAVELS)
			fetch_ahead<Element>(Core(), k, keys, column, end);
	}

	METHOD static void finish_keys(KTile &k, const Keys &keys, i32 column, i32 end)
	{
		if constexpr (K_TRAVELS) {
			fetch_late<Element>(Core(), k, keys, column, end);
			k.arrive();
		} else {
			k.template copy<Element>(keys, column, end);
		}
	}

	/* Keys that no row of the block sees weigh nothing, but nothing times NaN is NaN: their values
	 * are not read. (In a tile that begins with sink tokens, those left of the window are.) */
	struct Range {
		i32 begin, end;
	};
	METHOD Range seen(i32 column, const Reach &reach) const
	{
		if (!C::MASK)
			return Range{FROM_THE_FIRST, band.end};
		return Range{column < band.sinks ? column : band.first(reach.first_row),
			     band.last(reach.last_row) + 1};
	}

	METHOD void fetch_values(VTile &v, const Keys &values, i32 column, const Reach &reach) const
	{
		Range range = seen(column, reach);

		v.template fetch<Element>(values, column, range.end, range.begin);
	}
	METHOD void copy_values(VTile &v, const Keys &values, i32 column, const Reach &reach) const
	{
		Range range = seen(column, reach);

		v.template copy<Element>(values, column, range.end, range.begin);
	}

	/* S of one tile of columns is finished: softmax, O += P V. */
	METHOD void attend(RegTile<Core, TM, TN> &s, const VTile &v, i32 column, i32 wave_column,
			   const Reach &reach, char *lds)
	{
		RowVector<Core, TM> factor;
		bool masked = C::MASK ? column < reach.begin || column + C::TILE_N > reach.end
				      : column + C::TILE_N > band.end || column < band.begin;

		if (C::LOGITS)
			make_logits(s, column + wave_column);
		if (masked)
			mask(s, column + wave_column, lds);
		if (softmax.update(s, modifiers.unit, &factor, lds + SOFTMAX_AT))
			scale_rows(o, factor);
		if (C::DROPOUT || C::DESCALE)
			drop(s, column + wave_column);
		multiply_ab(o, round_to_operand(s), v, wave_column, Core());
	}

	/* Partial results of the waves that shared a tile's keys: wave_n 0 collects. */
	METHOD void merge(char *lds)
	{
		const int COUNT = TM * TD * Core::E + 2 * TM * Core::STATS;
		float *mine = (float *)lds +
			      ((wave_n - 1) * C::WAVES_M + wave_m) * COUNT * FMHA_WAVE + lane_id();

		block_sync();
		if (wave_n > 0)
			put(mine);
		block_sync();
		if (wave_n > 0)
			return;
		for (int w = 1; w < C::WAVES_N; w++)
			take((const float *)lds +
			     ((w - 1) * C::WAVES_M + wave_m) * COUNT * FMHA_WAVE + lane_id());
	}

	METHOD void put(float *to) const
	{
		int i = 0;

		UNROLL
		for (int m = 0; m < TM; m++) {
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				to[i++ * FMHA_WAVE] = softmax.m.v[m][r];
				to[i++ * FMHA_WAVE] = softmax.l.v[m][r];
			}
			UNROLL
			for (int d = 0; d < TD; d++) {
				UNROLL
				for (int e = 0; e < Core::E; e++)
					to[i++ * FMHA_WAVE] = plain_register(o.t[m][d].x[e]);
				scheduling_barrier();
			}
		}
	}

	METHOD void take(const float *from)
	{
		int i = 0;

		UNROLL
		for (int m = 0; m < TM; m++) {
			float keep[Core::STATS], add[Core::STATS];

			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				float other = from[i++ * FMHA_WAVE], sum = from[i++ * FMHA_WAVE];
				float high = larger(softmax.m.v[m][r], other);
				float origin = high == minus_infinity() ? 0.0f : high * modifiers.unit;

				keep[r] = exp2_fast(softmax.m.v[m][r] * modifiers.unit - origin);
				add[r] = exp2_fast(other * modifiers.unit - origin);
				softmax.m.v[m][r] = high;
				softmax.l.v[m][r] = softmax.l.v[m][r] * keep[r] + sum * add[r];
			}
			UNROLL
			for (int d = 0; d < TD; d++) {
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					float &x = o.t[m][d].x[e];

					x = x * keep[Core::stat(e)] +
					    from[i++ * FMHA_WAVE] * add[Core::stat(e)];
				}
				if (d % 4 == 3)
					Core::step(); /* not all of them at once */
			}
		}
	}

	/* 1 / l and LSE of a row; the sink joins the denominator. */
	METHOD float finish_row(float m, float sum, i32 row_head, float *ret_lse) const
	{
		float origin = m == minus_infinity() ? minus_infinity() : m * modifiers.unit;

		if (a.sink && !C::SPLIT) {
			float sink = a.sink[row_head] * FMHA_LOG2_E;
			float high = larger(origin, sink);

			if (high == minus_infinity()) {
				*ret_lse = high;
				return 0.0f;
			}
			float factor = exp2_fast(origin - high), total = sum * factor + exp2_fast(sink - high);

			*ret_lse = high * FMHA_LN_2 + log2_fast(total) * FMHA_LN_2;
			return factor * reciprocal(total);
		}
		if (origin == minus_infinity()) {
			/* Nothing to attend to; a NaN among the scores must stay visible. */
			*ret_lse = origin;
			return sum == 0.0f ? 0.0f : sum;
		}
		*ret_lse = (origin + log2_fast(sum)) * FMHA_LN_2;
		return reciprocal(sum);
	}

	METHOD void finish(char *lds)
	{
		float *stage = (float *)lds + wave_m * 16 * STAGE_STRIDE;

		block_sync(); /* K, V and Q are not needed any more */
		UNROLL
		for (int m = 0; m < TM; m++) {
			wave_sync();
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				finish_rows(m, r, stage);
			wave_sync();
			store_rows(m, stage);
		}
	}

	/* The first element of a lane that belongs to row statistic r. */
	METHOD static constexpr int first_of(int r)
	{
		int e = 0;

		while (Core::stat(e) != r)
			e++;
		return e;
	}

	METHOD void finish_rows(int m, int r, float *stage) const
	{
		i32 at = Core::stat_row(r);
		float sum = Core::row_sum(softmax.l.v[m][r]), lse = 0, factor = 0;

		if (row_of(m) + at < n_rows) {
			RowPlace p = place_of(row_of(m) + at);

			factor = finish_row(softmax.m.v[m][r], sum, p.head, &lse);
			if (Core::column(first_of(r)) == 0)
				store_lse(p, lse);
		}
		UNROLL
		for (int d = 0; d < TD; d++) {
			UNROLL
			for (int e = 0; e < Core::E; e++)
				if (Core::stat(e) == r)
					stage[at * STAGE_STRIDE + d * 16 + Core::column(e)] =
						factor == 0.0f ? 0.0f : o.t[m][d].x[e] * factor;
			scheduling_barrier();
		}
	}

	METHOD void store_rows(int m, const float *stage) const
	{
		const int CHUNKS = C::HDIM_V / 8;

		NO_UNROLL
		for (i32 index = lane_id(); index < 16 * CHUNKS; index += FMHA_WAVE) {
			i32 r = index / CHUNKS, dim = index % CHUNKS * 8;

			if (row_of(m) + r >= n_rows || dim >= a.hdim_v)
				continue;
			RowPlace p = place_of(row_of(m) + r);
			const float *from = stage + r * STAGE_STRIDE + dim;

			if (C::SPLIT)
				store_chunk(a.o_acc, ABI_F32, partial_row(p) * a.hdim_v + dim, 1, from);
			else
				store_chunk(a.o.data, a.o_dtype,
					    q_offset(a.o, seq, p.row, p.head) + dim * a.o.stride_dim,
					    a.o.stride_dim, from);
		}
	}

	METHOD i64 partial_row(RowPlace p) const
	{
		i32 row = seq.packed_q ? seq.q_start + p.row
				       : seq.batch * a.sequences.seqlen_q_max + p.row;

		return ((i64)split * a.nhead_q + p.head) * a.sequences.total_q + row;
	}

	METHOD void store_lse(RowPlace p, float lse) const
	{
		if (C::SPLIT)
			a.lse_acc[partial_row(p)] = lse;
		else if (a.lse.data)
			a.lse.data[rows_offset(a.lse, seq, p.row, p.head)] = lse;
	}

	/* What this block and wave work on. */
	METHOD void locate()
	{
		i32 x = hidden(block_id_x()), y = hidden(block_id_y()), wave = wave_id();

		group = a.nhead_q / a.nhead_k;
		const struct grid_forward grid = grid_forward_of(&a, C::PACK, C::SPLIT, C::TILE_M);
		if (C::MASK)
			longest_first(grid.n_tiles * grid.n_splits, C::PACK ? a.nhead_k : a.nhead_q,
				      heads_at_once(a.sequences.seqlen_k_max, KEY_BYTES, a.nhead_k) *
					      (C::PACK ? 1 : group),
				      &x, &y);
		split = C::SPLIT ? x % grid.n_splits : 0;
		tile_row = grid_forward_tile(grid, x) * C::TILE_M;
		head_k = C::PACK ? y : y / group;
		head = C::PACK ? head_k * group : y;
		wave_m = wave % C::WAVES_M;
		wave_n = wave / C::WAVES_M;
		seq = find_sequence(a.sequences, &a.cache, hidden(block_id_z()));
		n_rows = C::PACK ? seq.n_q * group : seq.n_q;
	}

	METHOD void run(char *lds)
	{
		locate();
		if (tile_row >= n_rows || seq.n_q < a.min_seqlen_q)
			return;
		bool last_split = !C::SPLIT || split == max_of(a.n_splits, 1) - 1;
		band = Band::make<C::MASK>(a.band, seq, C::SPLIT ? split * a.split_size : 0,
					   last_split ? seq.n_k : (split + 1) * a.split_size);
		modifiers = Modifiers<C>::make(a, seq);
		o.zero();
		softmax.init();
		walk(lds);
		if (C::WAVES_N > 1) {
			merge(lds);
			if (wave_n > 0)
				return;
		}
		locate(); /* not kept during the loop, where registers are dear */
		finish(lds);
		if (C::DROPOUT && a.dropout.randval.data && split == 0)
			store_randval();
	}
};

#endif
