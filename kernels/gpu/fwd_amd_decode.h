/* SPDX-License-Identifier: MIT */
/*
 * fwd_amd_decode.h: forward attention of at most 16 (packed) rows on AMD's matrix cores, which is as fast as memory
 * brings keys and values, for rows as fwd_amd.h wants them, in pages too.
 *
 * Each wave has a share of every tile of keys to itself, with a softmax of its own, and meets the others at the end, to
 * merge. Keys come straight into the registers that multiply them, 16 bytes a lane, as the operand of S^T = K Q^T. Of V a
 * lane fetches neighbours along the head dimension, of the keys whose scores it will hold, and turns them into the
 * operand of O^T = V^T P^T in registers: line l of accumulator t is dimension l * WIDTH + t. The next share of K is asked
 * for when this one's scores are made, that of V when it was multiplied, so that a wave which waits for one has the
 * other under way.
 *
 * Shares come in runs of 16 keys that lie in one page. A page's number is found a share ahead, and it, the place of
 * the page and the descriptor of a run are in scalar registers: a lane's offset is the same in every run.
 */
#ifndef FMHA_GPU_FWD_AMD_DECODE_H
#define FMHA_GPU_FWD_AMD_DECODE_H

#include "fwd_partials.h"
#include "fwd_scores.h"
#include "stage.h"

template <class C> struct Forward {
	typedef typename C::Core Core;
	typedef typename Core::Operand Operand;
	typedef typename C::Element Element;
	typedef typename ForwardBlock<C>::Keys Keys;
	static const int RUN = 16, RUNS = C::TILE_N / C::WAVES_N / RUN, SHARE = RUNS * RUN;
	static_assert(C::TILE_M == 16 && C::WAVES_M == 1 && SHARE * C::WAVES_N == C::TILE_N, "a wave has all rows");
	static_assert(SameType<Element, typename Core::Type>::value && !C::DROPOUT && !C::DESCALE, "16-bit types");

	/* Lanes that hold one line of an operand, how many words of it each of them fetches, how many of V's rows. */
	static const int GROUPS = FMHA_WAVE / 16, OWN = Core::E / 2, ROWS = Core::E;
	static const int CHUNKS = C::HDIM_Q / 8 / GROUPS, STEPS = 4 / OWN; /* products of a chunk */
	static const int WIDTH = C::HDIM_V / 16, WORDS = WIDTH / 2;
	static_assert(CHUNKS * GROUPS * 8 == C::HDIM_Q && (WORDS == 2 || WORDS == 4), "whole chunks a lane");

	typedef RegTile<Core, 1, RUNS> Scores;
	typedef ForwardScores<C, 1, RUNS> Steps;
	typedef Softmax<Core, 1, true> Rule;

	/* Q, whole rows of it as operands: in registers, or on RDNA in LDS, where every wave writes the same. */
	static const bool PARKED = FMHA_CORE != FMHA_CORE_MFMA;
	template <bool IN_LDS, class> struct HeldQueries {
		Operand x[CHUNKS][STEPS];

		METHOD void put(int c, const chunk16 &own)
		{
			UNROLL
			for (int i = 0; i < STEPS; i++)
				x[c][i] = whole(own.w + i * OWN);
		}
		METHOD Operand operator()(int c, int i) const { return x[c][i]; }
	};
	template <class T> struct HeldQueries<true, T> {
		typedef SlabStore<16, C::HDIM_Q> Store;
		char *lds;

		METHOD void put(int c, const chunk16 &own)
		{
			*(chunk16 *)(lds + Store::at(line(), c * GROUPS + group())) = own;
		}
		METHOD Operand operator()(int c, int) const
		{
			return __builtin_bit_cast(Operand, typename Store::Reader(lds)(0, c));
		}
	};
	typedef HeldQueries<PARKED, C> Queries;

	/* Waves merge, a fourth of the dimensions at a time: lines of `TURN` elements of a lane. */
	static const int TURN = Core::E / LDS_AMD_TURNS, PART = C::HDIM_V / LDS_AMD_TURNS;
	typedef PartialRows<C, C::WAVES_N, lds_amd_stride(C::HDIM_V)> Partials;
	static_assert(Partials::FLOATS * 4 * C::WAVES_N + PARKED * 16 * C::HDIM_Q * 2 ==
			      lds_amd_decode(C::cut(C::TILE_M, C::TILE_N)),
		      "as lds.h says");

	ForwardBlock<C> block;
	Band band;
	Modifiers<C> modifiers;
	i32 wave;
	Queries q;
	RegTile<Core, 1, WIDTH> o;
	SoftmaxRows<Core, 1> rows;

	METHOD Forward(const abi_fwd_args &args) : block(args) {}

	METHOD static i32 line() { return lane_id() % 16; }
	METHOD static i32 group() { return lane_id() / 16; }

	METHOD void run(char *lds)
	{
		block.locate(block_id_x(), block_id_y(), block_id_z());
		if (block.is_idle())
			return;
		wave = wave_id();
		band = block.band();
		modifiers = Modifiers<C>::make(block.a, block.seq);
		o.zero();
		rows.init();
		fetch_queries(lds + Partials::FLOATS * 4 * C::WAVES_N);
		sum_tiles();
		finish((float *)lds);
	}

	/* The lane's words of an operand: RDNA3 wants those of the other half wave beside them. */
	METHOD static Operand whole(const u32 *own)
	{
		Operand x;

		UNROLL
		for (int i = 0; i < OWN; i++) {
#if FMHA_CORE == FMHA_CORE_WMMA11
			u32 other = (u32)__builtin_amdgcn_permlanex16((i32)own[i], (i32)own[i], 0x76543210,
								     (i32)0xfedcba98, true, false);

			x.r[i] = group() ? other : own[i];
			x.r[OWN + i] = group() ? own[i] : other;
#else
			x.r[i] = own[i];
#endif
		}
		return x;
	}

	METHOD void fetch_queries(char *parked)
	{
		const typename ForwardBlock<C>::Queries queries = block.queries();
		i32 row = block.tile_row + line();

		if constexpr (PARKED)
			q.lds = parked;
		UNROLL
		for (int c = 0; c < CHUNKS; c++) {
			chunk16 x = {};

			if (row < block.n_rows)
				x = load16(queries.at(row, (c * GROUPS + group()) * 8));
			q.put(c, x);
		}
		wave_sync();
	}

	/* Where the runs of a share lie: slots of pages, and the page table's words for those. */
	struct Place {
		i32 tile, column; /* of the tile, of the share */
		i32 page, slot;
		i32 entries[RUNS];
	};

	/* A share of keys and one of values, on their way. */
	struct Stream {
		const Forward &loop;
		const Reach<C> &reach;
		const ColumnTiles &tiles;
		Keys keys, values;
		u32 k_from, v_from[ROWS]; /* a lane's offsets from a run's first row */
		i32 step_pages, step_slots;
		chunk16 k[RUNS][CHUNKS];
		u32 v[RUNS][ROWS][WORDS];

		METHOD u32 k_bytes() const { return (u32)keys.stride_seq * 2; }
		METHOD u32 v_bytes() const { return (u32)values.stride_seq * 2; }

		METHOD Place begin()
		{
			Place first;

			if (C::PAGED)
				keys.see_pages(), values.see_pages();
			k_from = line() * k_bytes() + group() * 16;
			UNROLL
			for (int i = 0; i < ROWS; i++)
				v_from[i] = Core::column(i) * v_bytes() + line() * WIDTH * 2;
			step_pages = C::PAGED ? C::TILE_N / keys.page_size : 0;
			step_slots = C::PAGED ? C::TILE_N % keys.page_size : 0;
			first.tile = tiles.column(0);
			seek(first);
			return first;
		}

		METHOD void seek(Place &p) const
		{
			p.column = p.tile + loop.wave * SHARE;
			p.page = C::PAGED ? p.column / keys.page_size : 0;
			p.slot = C::PAGED ? p.column % keys.page_size : 0;
			look_up(p);
		}

		/* Divides only where tiles do not follow each other. */
		METHOD void advance(Place &p, i32 tile) const
		{
			if (tile != p.tile + C::TILE_N) {
				p.tile = tile;
				seek(p);
				return;
			}
			p.tile = tile;
			p.column += C::TILE_N;
			p.page += step_pages;
			p.slot += step_slots;
			if (C::PAGED && p.slot >= keys.page_size)
				p.slot -= keys.page_size, p.page++;
			look_up(p);
		}

		METHOD void look_up(Place &p) const
		{
			UNROLL
			for (int r = 0; r < RUNS; r++)
				p.entries[r] = C::PAGED ? keys.entry_of_page(p.page + crosses(p, r)) : 0;
		}

		/* Whether run r is in the page behind the share's first one; pages are whole runs. */
		METHOD bool crosses(const Place &p, int r) const
		{
			return p.slot + r * RUN >= keys.page_size;
		}

		METHOD const typename Element::Storage *at(const Keys &view, const Place &p, int r) const
		{
			if (!C::PAGED)
				return view.base + (p.column + r * RUN) * view.stride_seq;
			i32 slot = p.slot + r * RUN - (crosses(p, r) ? view.page_size : 0);

			return view.base + view.page_at(p.entries[r]) * view.stride_page + slot * view.stride_seq;
		}

		METHOD void fetch_keys(const Place &p)
		{
			scheduling_barrier();
			UNROLL
			for (int r = 0; r < RUNS; r++) {
				Buffer b = Buffer::rows(at(keys, p, r), loop.band.end - (p.column + r * RUN), RUN, k_bytes(),
							C::HDIM_Q * 2);

				UNROLL
				for (int c = 0; c < CHUNKS; c++)
					k[r][c] = b.load16(k_from + c * GROUPS * 16);
			}
			scheduling_barrier();
		}

		METHOD void fetch_values(const Place &p)
		{
			scheduling_barrier(); /* not before what they are for is free, or it would be copied, which waits for it */
			UNROLL
			for (int r = 0; r < RUNS; r++) {
				i32 column = p.column + r * RUN, skip = 0;

				if (C::MASK)
					skip = clamp(reach.first_value(loop.band, p.tile) - column, 0, RUN);
				Buffer b = Buffer::rows(at(values, p, r) + skip * values.stride_seq,
							reach.end_of_values(loop.band) - (column + skip), RUN - skip, v_bytes(),
							C::HDIM_V * 2);

				UNROLL
				for (int i = 0; i < ROWS; i++)
					load_values(v[r][i], b, v_from[i] - skip * v_bytes());
			}
			scheduling_barrier();
		}

		METHOD static void load_values(u32 (&to)[WORDS], Buffer b, u32 from)
		{
			if constexpr (WORDS == 4) {
				chunk16 x = b.load16(from);

				UNROLL
				for (int w = 0; w < 4; w++)
					to[w] = x.w[w];
			} else {
				chunk8 x = b.load8(from);

				to[0] = x.w[0], to[1] = x.w[1];
			}
		}

		/* Dimension t of the lane's, of run r's keys. */
		METHOD Operand column(int r, int t) const
		{
			const u32 LOW = 0x05040100, HIGH = 0x07060302;
			u32 own[OWN];

			UNROLL
			for (int i = 0; i < OWN; i++)
				own[i] = __builtin_amdgcn_perm(v[r][2 * i + 1][t / 2], v[r][2 * i][t / 2],
							       t % 2 ? HIGH : LOW);
			return whole(own);
		}
	};

	METHOD void sum_tiles()
	{
		const Reach<C> reach = Reach<C>::make(block, band);
		const ColumnTiles tiles = reach.tiles(band);
		const Keys keys = block.keys();
		const Steps steps = {block, keys, modifiers};
		Stream stream = {*this, reach, tiles, keys, block.values(), 0, {}, 0, 0, {}, {}};

		if (tiles.count <= 0)
			return;
		Place next = stream.begin();

		stream.fetch_keys(next);
		stream.fetch_values(next);
		stream.advance(next, tiles.column(1));
		NO_UNROLL
		for (i32 n = 0; n < tiles.count; n++) {
			i32 tile = tiles.column(n);
			Scores s;

			multiply_keys(s, stream);
			stream.fetch_keys(next);
			if (C::LOGITS)
				steps.make_logits(s, block.tile_row, tile + wave * SHARE);
			if (reach.is_masked(band, tile))
				steps.mask(s, band, block.tile_row, tile + wave * SHARE);
			RowVector<Core, 1> factor;

			if (Rule::update(rows, s, modifiers.unit, &factor))
				scale_rows(o, factor);
			multiply_values(s, stream);
			stream.fetch_values(next);
			stream.advance(next, tiles.column(n + 2));
		}
	}

	METHOD void multiply_keys(Scores &s, const Stream &stream) const
	{
		s.zero();
		UNROLL
		for (int c = 0; c < CHUNKS; c++)
			UNROLL
			for (int i = 0; i < STEPS; i++)
				UNROLL
				for (int r = 0; r < RUNS; r++)
					Core::multiply(s.t[0][r], q(c, i), whole(stream.k[r][c].w + i * OWN));
	}

	METHOD void multiply_values(const Scores &s, const Stream &stream)
	{
		UNROLL
		for (int r = 0; r < RUNS; r++) {
			const float *x = s.t[0][r].x;
			u32 own[OWN];

			UNROLL
			for (int i = 0; i < OWN; i++)
				own[i] = SlabCore<typename Core::Type>::pack(typename Core::Type(), x[2 * i], x[2 * i + 1]);
			const Operand p = whole(own);

			UNROLL
			for (int t = 0; t < WIDTH; t++)
				Core::multiply(o.t[0][t], p, stream.column(r, t));
		}
	}

	METHOD void finish(float *lds)
	{
		const Partials partials = {lds};
		RegTile<Core, 1, C::HDIM_V / 16> unused;
		const ForwardOutput<C, 1> output = {block, unused, rows, modifiers.unit, 0};
		i32 n_rows = min_of(C::TILE_M, block.n_rows - block.tile_row);
		float sum = Core::row_sum(rows.l(0, 0));

		if (group() == 0)
			partials.put_stats(wave, line(), rows.m(0, 0), sum);
		UNROLL
		for (int first = 0; first < Core::E; first += TURN) {
			UNROLL
			for (int e = 0; e < TURN; e++)
				UNROLL
				for (int t = 0; t < WIDTH; t++)
					partials.sums(wave, line())[(group() * TURN + e) * WIDTH + t] = o.t[0][t].x[first + e];
			block_sync();
			for (i32 i = thread_id(); i < n_rows * (PART / 4); i += C::THREADS) {
				i32 row = i / (PART / 4), at = i % (PART / 4) * 4, l = at / WIDTH;
				i32 element = first + l % TURN, from = l / TURN; /* of group `from` */
				i32 dim = FMHA_CORE == FMHA_CORE_WMMA11 ? 2 * element + from : from * Core::E + element;

				store_slot(output, partials.merge(row, at, modifiers.unit), row, dim * WIDTH + at % WIDTH);
			}
			block_sync(); /* nobody reads them any more */
		}
	}
};

FMHA_STAGED_ENTRY(abi_fwd_args, Forward<Config>(args).run(lds))

#endif
