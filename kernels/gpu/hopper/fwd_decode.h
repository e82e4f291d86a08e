/* SPDX-License-Identifier: MIT */
/*
 * fwd_decode.h: forward attention of few rows, which is as fast as memory brings keys and values.
 * All that counts is how many bytes are under way, from the first instruction to the last.
 *
 * The waves of a block come in teams. A team has a share of every tile of keys to itself: it
 * fetches those, into a ring of stages of its own, and has a softmax of its own; teams meet at the
 * beginning, for Q, and at the end, to merge. Between these no barrier is wider than a team, and
 * one wave is a team where a wave holds all rows. A stage is filled again as soon as it was read,
 * so that all others are always under way.
 *
 * Where rows lie in pages each lane looks a key's page up a tile ahead. Keys of 8 bits:
 * decode_bytes.h. Blocks that share all keys: decode_share.h.
 */
#ifndef FMHA_GPU_FWD_DECODE_H
#define FMHA_GPU_FWD_DECODE_H

#include "decode_bytes.h"
#include "decode_share.h"
#include "block/fwd_partials.h"
#include "block/fwd_scores.h"
#include "tma.h"

template <int N> DEV void copy_async_wait_but()
{
	asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* FACTORS: Q, K and V have some, those of K and V for whole heads or, BY_KEY, for each key. */
template <class C, bool FACTORS> struct Decode {
	typedef typename C::Core Core;
	typedef typename Core::Type Type; /* of the products */
	typedef typename C::Element Element;
	typedef typename C::KeyElement KeyElement;
	typedef typename KeyElement::Storage KeyStorage;
	typedef typename ForwardBlock<C>::Keys Keys;
	static const int TM = C::TILE_M / 16 / C::WAVES_M, TN = C::TILE_N / 16 / C::WAVES_N;
	static const int TD = C::HDIM_V / 16, TK = C::HDIM_Q / 16;
	static_assert(TM * 16 * C::WAVES_M == C::TILE_M, "a team's waves share whole 16-row tiles");
	static_assert(TN * 16 * C::WAVES_N == C::TILE_N, "teams share whole 16-column tiles");
	static_assert(!C::DROPOUT, "rows belong to several heads");
	static_assert(!C::BY_KEY || C::LOGITS, "factors of V are added as logarithms");

	static const int TEAM = C::WAVES_M * FMHA_WAVE; /* threads */
	static const int SHARE = TN * 16;               /* keys of a tile that a team has */
	static_assert(SHARE <= FMHA_WAVE, "a lane knows the page of a key");
	typedef typename Core::template Stationary<TM, C::WAVES_M, C::HDIM_Q, C::THREADS> QTile;
	static const int BYTES = sizeof(KeyStorage);
	static const bool NARROW = BYTES == 1,
			  BELOW = !SameType<Element, KeyElement>::value; /* queries of 16 bits */
	typedef typename Core::template Tile<SHARE, C::HDIM_Q * BYTES / 2, TEAM, true, false> KTile;
	typedef typename Core::template Tile<SHARE, C::HDIM_V * BYTES / 2, TEAM, false, true> VTile;
	typedef RegTile<Core, TM, TN> Scores;
	typedef ForwardScores<C, TM, TN> Steps;
	typedef Softmax<Core, TM, (TM > 1 && C::HDIM_V > 64), C::BIAS == BIAS_MATRIX> Rule;
	static const int FACTORS_AT = KTile::BYTES + VTile::BYTES; /* BY_KEY: of K, then of V */
	static const int STAGES = C::BUFFERS, STAGE = FACTORS_AT + (C::BY_KEY ? SHARE * 2 * 4 : 0);
	static_assert(C::WAVES_N * STAGE ==
			      lds_decode_stage(C::cut(C::TILE_M, C::TILE_N), BYTES, C::BY_KEY),
		      "as lds.h says");
	static_assert(lds_decode(C::cut(C::TILE_M, C::TILE_N), STAGES, BYTES, BELOW, C::BY_KEY) <=
			      C::LDS_BYTES,
		      "the host asks lds.h, too");

	/* Q in registers, where they allow it. */
	struct HeldQueries {
		typename Core::Operand t[TM][TK];

		struct Reader {
			const HeldQueries &q;
			METHOD Reader(const HeldQueries &held) : q(held) {}
			METHOD typename Core::Operand operator()(int m, int k) const
			{
				return q.t[m][k];
			}
		};
	};
	/* Short rows of bytes take longer to look at than to bring. The scale is one more factor of
	 * theirs where scores are nothing but scaled, and their pages are found without a division;
	 * others gain nothing by it. */
	static const bool SHORT = NARROW && C::HDIM_Q <= 64 && C::HDIM_V <= 64;
	static const bool SCALES = SHORT && FACTORS && C::LOGITS && !C::SOFTCAP &&
				   C::BIAS == BIAS_NONE;
	static const bool HOLDS_QUERIES = TM == 1 && C::HDIM_Q <= 128;

	/* A lane's key of a share: where in the cache it is, and the page table's word for it, at
	 * which nobody looks before it is needed: it is still on its way. */
	struct PagePlace {
		i32 entry, slot;
	};

	ForwardBlock<C> block;
	Keys keys, values;
	Divisor of_page; /* SHORT */
	Band band;
	Modifiers<C> modifiers;
	i32 wave_m, wave_n;
	RegTile<Core, TM, TD> o;
	SoftmaxRows<Core, TM> rows;
	RowVector<Core, TM> factors; /* of Q and K */
	RowVector<Core, TM> sums;    /* BY_KEY: of weights, rows have those of products */

	METHOD Decode(const abi_fwd_args &args) : block(args) {}

	METHOD i32 wave_row() const { return block.tile_row + wave_m * TM * 16; }
	METHOD i32 thread_of_team() const { return thread_id() % TEAM; }

	METHOD void team_sync() const
	{
		if (TEAM == FMHA_WAVE)
			wave_sync();
		else
			named_sync(1 + wave_n, TEAM);
	}

	METHOD void run(char *lds)
	{
		i32 wave = wave_id();

		wave_m = wave % C::WAVES_M;
		wave_n = wave / C::WAVES_M;
		wait_for_stage_before();
		if constexpr (C::SHARES)
			return run_share(lds);
		block.locate(block_id_x(), block_id_y(), block_id_z());
		if (block.is_idle())
			return;
		if (C::SPLIT)
			let_next_stage_begin();
		band = block.band();
		run_piece(lds);
	}

	/* Piece after piece. */
	METHOD void run_share(char *lds)
	{
		DecodeShare<C> share(block.a);

		let_next_stage_begin();
		if (!share.begin())
			return;
		NO_UNROLL
		while (true) {
			share.take(block, &band);
			run_piece(lds);
			if (band.end == block.seq.n_k) /* an item's last part, and no other */
				empty_other_parts();
			if (!share.goes_on())
				return;
			block_sync(); /* nobody reads what waves found any more */
		}
	}

	/* The parts behind an item's last one. */
	METHOD void empty_other_parts()
	{
		const ForwardOutput<C, TM> output = {block, o, rows, modifiers.unit, wave_m};
		i32 n_rows = min_of(C::TILE_M, block.n_rows - block.tile_row),
		    rest = block.a.n_splits - 1 - block.split;
		i64 step = (i64)block.a.nhead_q * block.a.sequences.total_q;

		for (i32 i = thread_id(); i < n_rows * rest; i += C::THREADS)
			block.a.lse_acc[output.split_row(
						block.place_of(block.tile_row + i % n_rows)) +
					(1 + i / n_rows) * step] = minus_infinity();
	}

	METHOD void run_piece(char *lds)
	{
		modifiers = Modifiers<C>::make(block.a, block.seq);
		keys = block.keys();
		values = block.values();
		if constexpr (SHORT && C::PAGED)
			of_page = Divisor::make(max_of(keys.page_size, 1));
		o.zero();
		rows.init();
		if (FACTORS)
			find_factors();
		if constexpr (C::BY_KEY)
			sums.fill(0.0f);
		sum_tiles(lds);
		if constexpr (C::BY_KEY)
			rows.sum = sums;
		block_sync(); /* nobody reads Q and keys any more */
		finish((float *)lds);
	}

	METHOD Steps steps() const { return Steps{block, keys, modifiers}; }

	METHOD void find_factors()
	{
		float k = C::BY_KEY ? 1.0f : steps().key_descale(block.a.k_descale, 0);

		if (SCALES)
			k *= modifiers.scale;

		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				factors.v[m][r] = k *
						  steps().q_descale(block.place_of(
							  wave_row() + m * 16 + Core::stat_row(r)));
	}

	METHOD void sum_tiles(char *lds)
	{
		const Reach<C> reach = Reach<C>::make(block, band);
		const ColumnTiles tiles = reach.tiles(band);
		char *ring = lds + QTile::BYTES + wave_n * (STAGES * STAGE);
		float *of_rows = (float *)(lds + QTile::BYTES + C::WAVES_N * (STAGES * STAGE));
		PagePlace place = find(tiles, 0);
		QTile q;

		q.place(lds, wave_m);
		NO_UNROLL
		for (i32 n = 0; n < STAGES; n++) {
			/* on its way before this one is waited for */
			PagePlace next = find(tiles, n + 1);

			if (n < tiles.count)
				fetch(ring + n * STAGE, tiles, reach, n, place);
			if (n == 0)
				fetch_queries(q, of_rows);
			copy_async_commit();
			place = next;
		}
		copy_async_wait_but<STAGES - 1>();
		block_sync(); /* Q is there */
		if constexpr (BELOW && FACTORS)
			UNROLL
			for (int m = 0; m < TM; m++)
				UNROLL
				for (int r = 0; r < Core::STATS; r++)
					factors.v[m][r] *= of_rows[(wave_m * TM + m) * 16 +
								   Core::stat_row(r)];
		if constexpr (HOLDS_QUERIES) {
			typename QTile::Reader read(q);
			HeldQueries held;

			UNROLL
			for (int k = 0; k < TK; k++)
				held.t[0][k] = read(0, k);
			walk(ring, tiles, reach, place, held);
		} else {
			walk(ring, tiles, reach, place, q);
		}
	}

	METHOD void fetch_queries(QTile &q, float *of_rows) const
	{
		if constexpr (BELOW)
			put_wide_queries<Element, C::TILE_M, C::HDIM_Q, C::THREADS>(
				q.tile, block.queries(), block.tile_row, block.n_rows, of_rows);
		else if constexpr (NARROW)
			put_queries<C::TILE_M, C::HDIM_Q, C::THREADS>(q.tile, block.queries(),
								      block.tile_row, block.n_rows);
		else
			q.template fetch<Element>(block.queries(), block.tile_row, block.n_rows);
	}

	template <class Queries>
	METHOD void walk(char *ring, const ColumnTiles &tiles, const Reach<C> &reach,
			 PagePlace place, const Queries &q)
	{
		i32 stage = 0;

		NO_UNROLL
		for (i32 n = 0; n < tiles.count; n++) {
			char *at = ring + stage * STAGE;

			copy_async_wait_but<STAGES - 1>();
			team_sync(); /* what the team's other threads copied is there, too */
			add_tile(at, share_of(tiles, n), reach.is_masked(band, tiles.column(n)), q);
			team_sync(); /* nobody reads it any more */
			if (n + STAGES < tiles.count)
				fetch(at, tiles, reach, n + STAGES, place);
			copy_async_commit();
			place = find(tiles, n + STAGES + 1);
			stage = stage + 1 == STAGES ? 0 : stage + 1;
		}
	}

	/* First column of the team's share of a tile. */
	METHOD i32 share_of(const ColumnTiles &tiles, i32 n) const
	{
		return tiles.column(n) + wave_n * SHARE;
	}

	template <class Queries>
	METHOD void add_tile(char *at, i32 column, bool masked, const Queries &q)
	{
		RowVector<Core, TM> factor;
		KTile k;
		VTile v;
		Scores s;

		k.place(at);
		v.place(at + KTile::BYTES);
		s.zero();
		if constexpr (NARROW)
			multiply_bytes_abt<C::HDIM_Q, KeyElement>(s, q, k, 0);
		else
			multiply_abt<C::HDIM_Q>(s, q, k, 0, Core());
		if (FACTORS)
			scale_rows(s, factors);
		if constexpr (C::BY_KEY)
			scale_columns(s, at + FACTORS_AT);
		if (C::LOGITS && !SCALES)
			steps().make_logits(s, wave_row(), column);
		if (masked)
			steps().mask(s, band, wave_row(), column);
		ValueFactors<Core, TN> of_values;

		if constexpr (C::BY_KEY) {
			of_values.load(at + FACTORS_AT + SHARE * 4);
			of_values.add_to(s);
		}
		if (Rule::update(rows, s, modifiers.unit, &factor)) {
			scale_rows(o, factor);
			if constexpr (C::BY_KEY)
				scale_sums(factor);
		}
		if constexpr (C::BY_KEY)
			of_values.sum(s, sums);
		if (C::DESCALE)
			steps().drop(s, wave_row(), column);
		if constexpr (NARROW)
			multiply_bytes_ab<KeyElement>(o, round_to_operand(s), v, 0);
		else
			multiply_ab(o, round_to_operand(s), v, 0, Core());
	}

	METHOD void scale_sums(const RowVector<Core, TM> &factor)
	{
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++)
				sums.v[m][r] *= factor.v[m][r];
	}

	/* ---- tiles on their way ---- */

	static const int UNIT = 16 / BYTES; /* elements of a copy */

	/* Views know of 8 neighbours; of 8 bits it takes 16. */
	METHOD static bool can_copy(const Keys &view)
	{
		const u64 strides = (u64)view.stride_seq |
				    (view.page_size ? (u64)view.stride_page : 0);

		return view.vector &&
		       (!NARROW ||
			(((u64)view.base | (u64)view.hdim | (view.packed_layout ? 0 : strides)) &
			 15) == 0);
	}

	METHOD PagePlace find(const ColumnTiles &tiles, i32 n) const
	{
		if (!C::PAGED || !keys.page_size || n >= tiles.count)
			return PagePlace{0, 0};
		i32 column = share_of(tiles, n) + lane_id() % SHARE;
		i32 position = min_of(column, block.seq.n_k - 1) + block.seq.leftpad;

		if constexpr (SHORT) {
			const i32 page = of_page.quotient(position);

			return PagePlace{keys.entry_of_number(page),
					 position - page * keys.page_size};
		}
		return PagePlace{keys.entry_of(position), position % keys.page_size};
	}

	METHOD void fetch(char *at, const ColumnTiles &tiles, const Reach<C> &reach, i32 n,
			  PagePlace place) const
	{
		i32 tile = tiles.column(n), column = share_of(tiles, n);

		fetch_rows<KTile, C::HDIM_Q>(at, keys, column, FROM_THE_FIRST, band.end, place);
		fetch_rows<VTile, C::HDIM_V>(at + KTile::BYTES, values, column,
					     reach.first_value(band, tile),
					     reach.end_of_values(band), place);
		if constexpr (C::BY_KEY) {
			const i32 key = thread_of_team(), j = column + key;
			const bool seen = j >= reach.first_value(band, tile) &&
					  j < reach.end_of_values(band);

			if (key < SHARE) {
				char *to = at + FACTORS_AT + key * 4;

				fetch_factor(to, block.a.k_descale, j, place, seen);
				fetch_factor(to + SHARE * 4, block.a.v_descale, j, place, seen);
			}
		}
	}

	/* Of the lane's own key, j; 0 where nobody sees it. */
	METHOD void fetch_factor(char *to, const abi_descale &d, i32 j, PagePlace place,
				 bool seen) const
	{
		i32 b = block.seq.batch, i = min_of(j, block.seq.n_k - 1) + block.seq.leftpad;

		if (!d.data) {
			*(float *)to = 1.0f;
			return;
		}
		if (C::PAGED && d.per_page && keys.page_size)
			b = keys.page_at(place.entry), i = place.slot;
		i = d.block > 1 ? i / d.block : d.block ? i : 0;
		copy_async_4(shared_address(to),
			     d.data + b * d.stride_batch + block.head_k * d.stride_head +
				     i * d.stride_block,
			     seen);
	}

	/* Rows column .. of the view, zero before `begin` and from `end` on. */
	template <class Tile, int HDIM>
	METHOD void fetch_rows(char *to, const Keys &view, i32 column, i32 begin, i32 end,
			       PagePlace place) const
	{
		if constexpr (SameType<Type, Element>::value || NARROW)
			if (can_copy(view) && (!C::PAGED || can_count(view)))
				return copy_rows<Tile, HDIM>(shared_address(to), view, column,
							     begin, end, place);
		const int CHUNKS = HDIM / UNIT;

		NO_UNROLL
		for (i32 index = thread_of_team(); index < SHARE * CHUNKS; index += TEAM) {
			i32 r = index / CHUNKS, c = index % CHUNKS;

			bool valid = column + r < end && column + r >= begin;
			chunk16 x;

			if constexpr (TAILS && SameType<Type, Element>::value)
				if (!view.vector && view.pairs) {
					copy_async_pairs(shared_address(to) + Tile::S::offset(r, c),
							 view, column + r, c * UNIT, valid);
					continue;
				}
			if constexpr (NARROW)
				x = load_bytes(view, column + r, c * UNIT, valid);
			else
				x = load_chunk<Type, Element>(view, column + r, c * UNIT, valid);
			*(chunk16 *)(to + Tile::S::offset(r, c)) = x;
		}
	}

	/* The same by copies that go on alone. A thread keeps its column of 16 bytes. */
	template <class Tile, int HDIM> struct Copier {
		/* rows a pass */
		static const int CHUNKS = HDIM / UNIT, WIDTH = power_of_2_from(CHUNKS),
				 STEP = TEAM / WIDTH;
		u32 to;
		i32 chunk, first; /* of the thread: its column, its first row */
		i32 column, begin, end;
		bool exists;

		/* address(n, r): of row r, which is the thread's n-th. */
		template <class Address> METHOD void copy(const Address &address) const
		{
			UNROLL
			for (int n = 0; n < (SHARE + STEP - 1) / STEP; n++) {
				i32 r = first + n * STEP, j = column + r;
				const KeyStorage *from = address(n * STEP, r);

				if ((WIDTH != CHUNKS && chunk >= CHUNKS) ||
				    (SHARE % STEP != 0 && r >= SHARE))
					/* lanes beyond a row's chunks, and rows beyond the share */
					continue;
				/* Where nothing is copied the address does not matter. */
				copy_async_16(to + Tile::S::offset(r, chunk), from,
					      exists && j < end &&
						      (begin == FROM_THE_FIRST || j >= begin));
			}
		}
	};

	template <class Tile, int HDIM>
	METHOD void copy_rows(u32 to, const Keys &view, i32 column, i32 begin, i32 end,
			      PagePlace place) const
	{
		typedef Copier<Tile, HDIM> Copies;
		i32 thread = hidden_lane(thread_of_team()), chunk = thread % Copies::WIDTH,
		    first = thread / Copies::WIDTH;
		const Copies copies = {
			to, chunk, first, column, begin, end, chunk * UNIT < view.hdim};

		if constexpr (!C::PAGED) {
			const KeyStorage *from = view.at(column + first, chunk * UNIT);

			copies.copy([&](int n, i32) { return from + n * view.stride_seq; });
		} else {
			i64 stride = row_stride(view);
			i32 unit = (i32)((view.page_at(place.entry) * view.stride_page +
					  place.slot * stride) /
					 UNIT);
			const KeyStorage *from =
				view.base + (view.packed_layout ? (i64)chunk * view.page_size * UNIT
								: chunk * UNIT);

			if constexpr (RUN % Copies::STEP == 0) /* a pass has rows of one run */
				if ((view.page_size | view.leftpad) % RUN == 0)
					return copy_runs(copies, view, from + first * stride, unit);
			copies.copy([&](int, i32 r) {
				return from + (i64)(i32)shuffle_word(unit, r) * UNIT;
			});
		}
	}

	/* Rows side by side lie in one page: where a run begins is found once, and a thread's
	 * copies are as far apart as without pages. @from: the thread's row of a run at the cache's
	 * first place. */
	template <class Copies>
	METHOD static void copy_runs(const Copies &copies, const Keys &view, const KeyStorage *from,
				     i32 unit)
	{
		const i64 stride = row_stride(view);
		const KeyStorage *runs[(SHARE + RUN - 1) / RUN];

		UNROLL
		for (int i = 0; i < (SHARE + RUN - 1) / RUN; i++)
			runs[i] = from + (i64)(i32)shuffle_word(unit, i * RUN) * UNIT;
		copies.copy([&](int n, i32) { return runs[n / RUN] + n % RUN * stride; });
	}

	/* In pages places are counted in chunks of 16 bytes: 32 bits are enough for most caches. */
	static const int RUN = 16;
	METHOD static i64 row_stride(const Keys &view)
	{
		return view.packed_layout ? UNIT : view.stride_seq;
	}
	METHOD static bool can_count(const Keys &view)
	{
		const i64 most = (i64)1 << 34;
		i64 pages = view.n_pages * view.stride_page,
		    rows = view.page_size * row_stride(view);

		return view.page_size && pages >= 0 && rows >= 0 && pages + rows < most;
	}
	/* ---- from sums to results ---- */

	typedef PartialRows<C, C::WAVES_N, lds_stage_stride(C::HDIM_V)> Partials;
	static_assert(Partials::FLOATS * 4 == lds_decode_partial(C::cut(C::TILE_M, C::TILE_N)),
		      "as lds.h says");

	METHOD static i32 dim_of(int e) { return NARROW ? dim_of_bytes(e) : Core::column(e); }

	METHOD void finish(float *lds)
	{
		const int FOURS = C::HDIM_V / 4;
		const Partials partials = {lds};
		const ForwardOutput<C, TM> output = {block, o, rows, modifiers.unit, wave_m};
		i32 n_rows = min_of(C::TILE_M, block.n_rows - block.tile_row);
		float v = FACTORS && !C::BY_KEY ? steps().key_descale(block.a.v_descale, 0) : 1.0f;

		put_rows(partials);
		block_sync();
		for (i32 i = thread_id(); i < n_rows * FOURS; i += C::THREADS) {
			i32 row = i / FOURS, dim = i % FOURS * 4;

			store_slot(output, partials.merge(row, dim, modifiers.unit), row, dim, v);
		}
	}

	METHOD void put_rows(const Partials &partials)
	{
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				i32 row = (wave_m * TM + m) * 16 + Core::stat_row(r);
				float sum = Core::row_sum(rows.l(m, r));

				if (lane_id() % 4 == 0)
					partials.put_stats(wave_n, row, rows.m(m, r), sum);
				UNROLL
				for (int d = 0; d < TD; d++)
					UNROLL
					for (int e = 0; e < Core::E; e++)
						if (Core::stat(e) == r)
							partials.sums(wave_n,
								      row)[d * 16 + dim_of(e)] =
								o.t[m][d].x[e];
			}
	}
};

template <class C, bool NARROW = sizeof(typename C::KeyElement::Storage) == 1>
struct Forward : Decode<C, false> {
	METHOD Forward(const abi_fwd_args &args) : Decode<C, false>(args) {}
};
template <class C> struct Forward<C, true> : Decode<BytesInF16<C>, BytesInF16<C>::FACTORS> {
	METHOD Forward(const abi_fwd_args &args)
		: Decode<BytesInF16<C>, BytesInF16<C>::FACTORS>(args)
	{
	}
};

#endif
