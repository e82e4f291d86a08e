/* SPDX-License-Identifier: MIT */
/*
 * fwd.h: forward attention; the same loop serves the families fwd, fwd_splitkv, fwd_pagedkv and
 * batch_prefill, and every matrix core. What it computes is in fwd_scores.h and scores.h; here is
 * when a tile travels, where it waits, and what else waits in LDS.
 *
 * A block walks over TILE_N keys at a time. Waves share the rows; with WAVES_N > 1 (decode: few
 * rows) they share the keys of a tile too, each with its own softmax, merged at the end.
 *
 * One K and one V tile in LDS. V travels while S = Q K^T runs, the next K travels during softmax
 * and O += P V; several blocks on a compute unit fill what is left.
 *
 * PARTED: O is half of the columns (parts.h), and a block goes over its keys twice.
 */
#ifndef FMHA_GPU_FWD_H
#define FMHA_GPU_FWD_H

#include "block/fwd_output.h"
#include "block/fwd_scores.h"
#include "block/parts.h"

template <class C> struct Forward {
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	typedef typename C::KeyElement KeyElement;
	static const int TM = C::TILE_M / 16 / C::WAVES_M, TN = C::TILE_N / 16 / C::WAVES_N;
	static const int TD = C::PART_V / 16;
	static_assert(TM * 16 * C::WAVES_M == C::TILE_M, "waves share whole 16-row tiles");
	static_assert(TN * 16 * C::WAVES_N == C::TILE_N, "waves share whole 16-column tiles");

	typedef typename ForwardBlock<C>::Keys Keys;
	typedef typename ForwardBlock<C>::Queries Queries;
	static const bool Q_PARTED = lds_parts_queries(FMHA_CORE, C::HDIM_Q);
	static const int COLUMNS = Q_PARTED ? C::PART_Q : C::HDIM_Q;
	typedef typename Core::template Stationary<TM, C::WAVES_M, COLUMNS, C::THREADS> QStore;
	typedef typename Core::template Tile<C::TILE_N, COLUMNS, C::THREADS, true, false> KStore;
	typedef typename Either<Q_PARTED, PartedTile<Core, QStore, Element, Queries, COLUMNS, true>,
				QStore>::Type QTile;
	typedef typename Either<Q_PARTED,
				PartedTile<Core, KStore, KeyElement, Keys, COLUMNS, false>,
				KStore>::Type KTile;
	typedef typename Core::template Tile<C::TILE_N, C::PART_V, C::THREADS, false, true> VTile;
	typedef ForwardScores<C, TM, TN> Steps;
	typedef RegTile<Core, TM, TN> Scores;
	/* Whether a tile waits in registers while products run. A wide one of few lanes would fill
	 * them: it is copied when its place is free. */
	static const int MOST_HELD = 32;
	static const bool K_TRAVELS = Core::template held_registers<KStore>() <= MOST_HELD;
	static const bool V_TRAVELS = Core::template held_registers<VTile>() <= MOST_HELD;
	/* PARKED: the band, which few tiles need whole, and the softmax's numbers wait in LDS. */
	typedef ParkedRows<Core, TM, C::THREADS> Parked;
	typedef Softmax<Core, TM, (TM > 1 && C::HDIM_V > 64), C::BIAS == BIAS_MATRIX> Rule;
	static const bool BAND_PARKED = C::PARKED && C::MASK;
	static const int Q_AT = 0, K_AT = QTile::BYTES, V_AT = K_AT + KTile::BYTES;
	static const int BAND_AT = V_AT + VTile::BYTES,
			 ROWS_AT = BAND_AT + (C::PARKED ? LDS_BAND : 0);
	static_assert(sizeof(Band) <= LDS_BAND, "room for the band");
	static const int BYTES = lds_forward(C::cut(C::TILE_M, C::TILE_N), C::PARKED);
	static_assert(ROWS_AT + (C::PARKED ? Parked::BYTES : 0) <= BYTES,
		      "what lies there has room");
	static_assert(BYTES <= C::LDS_BYTES, "the host asks lds.h, too");

	ForwardBlock<C> block;
	Keys keys; /* here: as a local of sum_tiles() it costs d64 a spill */
	Band band;
	DataReach seen; /* MASK_DATA: by the block's rows */
	Modifiers<C> modifiers;
	i32 wave_m, wave_n;
	RegTile<Core, TM, TD> o;
	SoftmaxRows<Core, TM> rows;

	METHOD Forward(const abi_fwd_args &args) : block(args) {}

	/* Hidden, so that nothing that follows is kept: it is found anew when the loop is over. */
	METHOD void locate()
	{
		i32 x = hidden(block_id_x()), y = hidden(block_id_y()), wave = wave_id();

		block.locate(x, y, hidden(block_id_z()));
		wave_m = wave % C::WAVES_M;
		wave_n = wave / C::WAVES_M;
	}

	/* First of the wave's rows. */
	METHOD i32 wave_row() const { return block.tile_row + (wave_m * TM) * 16; }

	METHOD void run(char *lds)
	{
		locate();
		if (block.is_idle())
			return;
		band = block.band();
		if constexpr (C::MASK_DATA != MASK_DATA_NONE) {
			seen = block.data_reach(lds);
			narrow(band, seen);
		}
		modifiers = Modifiers<C>::make(block.a, block.seq);
		NO_UNROLL
		for (i32 part = 0; part < (C::PARTED ? block.a.hdim_v : 1); part += C::PART_V) {
			if (C::PARTED)
				block_sync(); /* the last part's results have left LDS */
			run_part(lds, part);
		}
		if (C::DROPOUT && block.a.dropout.randval.data && block.split == 0 &&
		    (C::WAVES_N == 1 || wave_n == 0))
			store_randval(block);
	}

	/* Of O the columns from `part` on. */
	METHOD void run_part(char *lds, i32 part)
	{
		o.zero();
		rows.init();
		sum_tiles(lds, part);
		if (C::WAVES_N > 1) {
			output(part).merge((float *)lds, wave_n);
			if (wave_n > 0) {
				if (C::PARTED)
					block_sync(); /* with those that store */
				return;
			}
		}
		locate();
		output(part).store((float *)lds);
	}

	METHOD ForwardOutput<C, TM> output(i32 part)
	{
		return ForwardOutput<C, TM>{block, o, rows, modifiers.unit, wave_m, part};
	}

	METHOD void sum_tiles(char *lds, i32 part)
	{
		const Reach<C> reach = Reach<C>::make(block, band);
		const ColumnTiles tiles = reach.tiles(band);
		const Keys whole = block.values();
		const auto values = part_of<C::PARTED>(whole, part);
		const Steps steps = {block, keys, modifiers};
		Parked parked = {lds + ROWS_AT};
		QTile q;
		KTile k;
		VTile v;

		keys = block.keys();
		q.place(lds + Q_AT, wave_m);
		k.place(lds + K_AT);
		v.place(lds + V_AT);
		if (BAND_PARKED && thread_id() == 0)
			*(Band *)(lds + BAND_AT) = band;
		if (C::PARKED)
			Parked::copy(parked, rows);
		q.template fetch<Element>(block.queries(), block.tile_row, block.n_rows);
		if (tiles.count > 0)
			start_keys(k, keys, tiles.column(0));
		q.arrive();
		NO_UNROLL
		for (i32 n = 0; n < tiles.count; n++) {
			i32 wave_column = wave_n * TN * 16;
			i32 column = tiles.column(n);
			Scores s;

			finish_keys(k, keys, column);
			block_sync(); /* K is there; nobody reads V any more */
			if constexpr (V_TRAVELS)
				v.template fetch<KeyElement>(values, column,
							     reach.end_of_values(band),
							     reach.first_value(band, column));
			s.zero();
			if constexpr (Q_PARTED)
				multiply_parts(s, q, k, wave_column);
			else
				multiply_abt<C::HDIM_Q>(s, q, k, wave_column, Core());
			if constexpr (V_TRAVELS)
				v.arrive();
			else
				v.template copy<KeyElement>(values, column,
							    reach.end_of_values(band),
							    reach.first_value(band, column));
			block_sync(); /* V is there; nobody reads K any more */
			if (n + 1 < tiles.count)
				start_keys(k, keys, tiles.column(n + 1));
			if (C::LOGITS)
				steps.make_logits(s, wave_row(), column + wave_column);
			if (reach.is_masked(band, column))
				steps.mask(s, BAND_PARKED ? *(const Band *)(lds + BAND_AT) : band,
					   wave_row(), column + wave_column);
			if constexpr (C::CHOSEN)
				steps.hide_absent(s, column + wave_column);
			if (C::MASK_DATA != MASK_DATA_NONE &&
			    (column < seen.full_low || column + C::TILE_N > seen.full_high))
				steps.mask_data(s, wave_row(), column + wave_column);
			if constexpr (C::PARKED)
				weigh(s, parked);
			else
				weigh(s, rows);
			if (C::DROPOUT || C::DESCALE)
				steps.drop(s, wave_row(), column + wave_column);
			multiply_ab(o, round_to_operand(s), v, wave_column, Core());
		}
		if (C::PARKED)
			Parked::copy(rows, parked);
	}

	/* S becomes P, in units of the highest score so far, and so does O. */
	template <class Rows> METHOD void weigh(Scores &s, Rows &where)
	{
		RowVector<Core, TM> factor;

		if (Rule::update(where, s, modifiers.unit, &factor))
			scale_rows(o, factor);
	}

	METHOD void start_keys(KTile &k, const Keys &keys, i32 column) const
	{
		if constexpr (K_TRAVELS)
			k.template fetch_ahead<KeyElement>(keys, column, band.end);
	}

	METHOD void finish_keys(KTile &k, const Keys &keys, i32 column) const
	{
		if constexpr (K_TRAVELS) {
			k.template fetch_late<KeyElement>(keys, column, band.end);
			k.arrive();
		} else {
			k.template copy<KeyElement>(keys, column, band.end);
		}
	}
};

#endif
