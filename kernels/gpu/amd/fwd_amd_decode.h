/* SPDX-License-Identifier: MIT */
/*
 * fwd_amd_decode.h: forward attention of few (packed) rows on AMD's matrix cores, which is as fast
 * as memory brings keys and values, for rows as fwd_amd.h wants them, in pages too.
 *
 * Each wave has a share of every tile of keys to itself, with a softmax of its own for all rows of
 * the block, 16 by 16, and meets the others at the end, to merge. Keys come straight into the
 * registers that multiply them, 16 bytes a lane, as the operand of S^T = K Q^T. Of V a lane fetches
 * neighbours along the head dimension, of the keys whose scores it will hold, and turns them into
 * the operand of O^T = V^T P^T in registers (Dims).
 *
 * K and V of a share come in pieces: each is one, or, where accumulators leave RDNA no registers
 * for that, its halves along the head dimension are two. Two pieces are in registers, or on their
 * way there: when one was multiplied, the next but one is asked for, so that a wave which waits for
 * one has the other under way.
 *
 * e4m3 is multiplied as it is. Rows of V, a word of four dimensions each, change bytes in blocks of
 * 4 x 4, where they arrived; a product of CDNA takes P and V of two runs. A weight becomes two of
 * e4m3, of which the second is what the first leaves, and its unit is the highest of its row in the
 * share: together they are as precise as bf16, and products cost nothing here.
 *
 * Shares come in runs of 16 keys that lie in one page. A page's number is found a share ahead, and
 * it, the place of the page and the descriptor of a run are in scalar registers: a lane's offset is
 * the same in every run. Where left padding is no whole runs, tiles begin as many columns earlier,
 * so that runs do not cross pages.
 */
#ifndef FMHA_GPU_FWD_AMD_DECODE_H
#define FMHA_GPU_FWD_AMD_DECODE_H

#include "block/fwd_partials.h"
#include "block/fwd_scores.h"
#include "stage.h"

template <class Base> struct Forward {
	typedef typename Base::Element Element;
	typedef CoreAmd<Element> Core;
	typedef AmdConfig<Base, Core> C;
	typedef typename Core::Operand Operand;
	typedef typename ForwardBlock<C>::Keys Keys;
	static const int TM = C::TILE_M / 16;
	static const int RUN = 16, RUNS = C::TILE_N / C::WAVES_N / RUN, SHARE = RUNS * RUN;
	static_assert(TM * 16 == C::TILE_M && C::WAVES_M == 1 && SHARE * C::WAVES_N == C::TILE_N,
		      "a wave has all rows");
	static_assert(!C::DROPOUT, "a tile's rows belong to several heads");
	static_assert(RUNS <= 2, "a share lies in one page, or in two");

	/* Lanes that hold one line of an operand, how many words of it each of them fetches, values
	 * of a word; how many of V's rows in a run a lane has. */
	static const int GROUPS = FMHA_WAVE / 16,
			 OWN = sizeof(Operand) / 4 / (FMHA_CORE == FMHA_CORE_WMMA11 ? 2 : 1);
	static const int VALUES = 4 / SLAB_ELEMENT, ROWS = Core::E;
	/* Runs of which a product of P and V is, products of a share, and operands that a weight is
	 * in. */
	static const int KEY_RUNS = OWN * VALUES / ROWS, PRODUCTS = RUNS / KEY_RUNS,
			 TERMS = SLAB_ELEMENT == 1 ? 2 : 1;
	static_assert(PRODUCTS * KEY_RUNS == RUNS, "whole products");
	/* pieces of K, and of V */
	static const int PARTS = lds_amd_parts(C::cut(C::TILE_M, C::TILE_N), SLAB_ELEMENT);
	static const int CHUNK = 4 * VALUES, CHUNKS = C::HDIM_Q / CHUNK / GROUPS,
			 PART_CHUNKS = CHUNKS / PARTS;
	static const int STEPS = 4 / OWN; /* products of a chunk */
	static_assert(CHUNKS * GROUPS * CHUNK == C::HDIM_Q && PART_CHUNKS * PARTS == CHUNKS,
		      "whole chunks a lane");
	/* Chunks in which rows that are narrower than the tile may end. */
	static const int TAILS = (LDS_AMD_TAIL - 1) / (CHUNK * GROUPS) + 1;

	typedef RegTile<Core, TM, RUNS> Scores;
	typedef ForwardScores<C, TM, RUNS> Steps;
	typedef Softmax<Core, TM, true, C::BIAS == BIAS_MATRIX> Rule;

	/*
	 * Which dimensions of V line l of the operands holds: as many neighbours as a load brings
	 * of each slice of 16 times as many. A part has one slice or two, and rows that are
	 * narrower than the tile end between loads.
	 */
	struct Dims {
		static const int WIDTH = C::HDIM_V / 16, PART = WIDTH / PARTS;
		static const int FIRST = PART < 8                         ? 4
					 : PART < 16 || SLAB_ELEMENT == 2 ? 8
									  : 16,
				 SECOND = PART - FIRST;
		static const int FIRST_WORDS = FIRST / VALUES, SECOND_WORDS = SECOND / VALUES,
				 WORDS = FIRST_WORDS + SECOND_WORDS;
		static_assert(PART * PARTS == WIDTH && WORDS * VALUES == PART &&
				      (SECOND_WORDS == 0 || SECOND_WORDS == 1 ||
				       SECOND_WORDS == 2 || SECOND_WORDS == 4),
			      "4, 8 or 16 bytes a load");

		METHOD static constexpr int slices() { return SECOND ? 2 : 1; } /* of a part */
		METHOD static constexpr int width(int slice) { return slice ? SECOND : FIRST; }
		/* dimensions of a line before it */
		METHOD static constexpr int start(int slice) { return slice ? FIRST : 0; }
	};
	static const int WIDTH = Dims::WIDTH;

	/* Q, whole rows of it as operands: in registers, or in LDS, where every wave writes the
	 * same. */
	static const bool PARKED = lds_amd_parks_queries(C::cut(C::TILE_M, C::TILE_N));
	template <bool IN_LDS, class> struct HeldQueries {
		Operand x[CHUNKS][STEPS];

		METHOD void put(int, int c, const chunk16 &own)
		{
			UNROLL
			for (int i = 0; i < STEPS; i++)
				x[c][i] = whole(own.w + i * OWN);
		}
		METHOD void get(int, int c, Operand (&to)[STEPS]) const
		{
			UNROLL
			for (int i = 0; i < STEPS; i++)
				to[i] = x[c][i];
		}
	};
	template <class T> struct HeldQueries<true, T> {
		static const int STRIDE = lds_amd_query_stride(C::HDIM_Q, SLAB_ELEMENT);
		char *lds;

		METHOD static int at(int m, int c)
		{
			return (m * 16 + line()) * STRIDE + c * GROUPS * 16;
		}
		METHOD void put(int m, int c, const chunk16 &own)
		{
			*(chunk16 *)(lds + at(m, c) + group() * 16) = own;
		}
		METHOD void get(int m, int c, Operand (&to)[STEPS]) const
		{
#if FMHA_CORE == FMHA_CORE_WMMA11
			to[0] = Core::read(lds + at(m, c));
#else
			chunk16 own = load16(lds + at(m, c) + group() * 16);

			UNROLL
			for (int i = 0; i < STEPS; i++)
				to[i] = whole(own.w + i * OWN);
#endif
		}
	};
	typedef HeldQueries<PARKED, C> Queries;

	/* Waves merge 16 rows and a fourth of the dimensions at a time, four lines of an operand:
	 * QUARTER floats of a row. */
	static const int QUARTER = C::HDIM_V / LDS_AMD_TURNS;
	typedef PartialRows<C, C::WAVES_N, lds_amd_stride(C::HDIM_V), 16> Partials;
	static_assert(Partials::FLOATS * 4 * C::WAVES_N <=
			      lds_amd_decode(C::cut(C::TILE_M, C::TILE_N), SLAB_ELEMENT),
		      "as lds.h says");

	ForwardBlock<C> block;
	Band band;
	Modifiers<C> modifiers;
	RowVector<Core, TM> factors; /* Q's, whose heads are a tile's rows, and K's */
	float o_scale;		     /* what results are multiplied with: V's */
	i32 wave;
	Queries q;
	RegTile<Core, TM, WIDTH> o;
	SoftmaxRows<Core, TM> rows;

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
		if (C::PAGED && C::MASK && band.sinks == 0)
			/* the first tile's column may be negative, and is no sink token */
			band.sinks = -RUN;
		make_modifiers();
		o.zero();
		rows.init();
		fetch_queries(lds);
		sum_tiles();
		if (PARKED)
			block_sync(); /* nobody reads Q any more */
		finish((float *)lds);
	}

	METHOD void make_modifiers()
	{
		const abi_fwd_args &a = block.a;

		modifiers = Modifiers<C>::make(a, block.seq);
		(C::LOGITS ? modifiers.scale : modifiers.unit) *= SLAB_UNIT * SLAB_UNIT;
		o_scale = SLAB_UNIT;
		if (!C::FACTORS)
			return;
		o_scale *= block.factor(a.v_descale, block.head_k);
		UNROLL
		for (int m = 0; m < TM; m++)
			factors.v[m][0] =
				block.factor(a.k_descale, block.head_k) *
				block.factor(a.q_descale,
					     block.place_of(block.tile_row + m * 16 + line()).head);
	}

	/* The lane's words of an operand: RDNA3 wants those of the other half wave beside them. */
	METHOD static Operand whole(const u32 *own)
	{
		Operand x;

		UNROLL
		for (int i = 0; i < OWN; i++) {
#if FMHA_CORE == FMHA_CORE_WMMA11
			u32 other = (u32)__builtin_amdgcn_permlanex16(
				(i32)own[i], (i32)own[i], 0x76543210, (i32)0xfedcba98, true, false);

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

		if constexpr (PARKED)
			q.lds = parked;
		UNROLL
		for (int m = 0; m < TM; m++)
			UNROLL
			for (int c = 0; c < CHUNKS; c++) {
				chunk16 x = load_or_zero(queries, block.tile_row + m * 16 + line(),
							 (c * GROUPS + group()) * CHUNK,
							 block.n_rows);

				to_slab_words(x.w);
				q.put(m, c, x);
			}
		wave_sync();
	}

	/* Where the runs of a share lie: slots of pages, and the page table's words for those. */
	struct Place {
		i32 tile, column; /* of the tile, of the share */
		i32 page, slot;
		i32 entries[RUNS];
	};

	/* Two pieces of K and V: those of K are even and odd, and so are those of V behind them. */
	struct Stream {
		static const int KEY_WORDS = RUNS * PART_CHUNKS * 4,
				 VALUE_WORDS = RUNS * ROWS * Dims::WORDS;
		static const int WORDS = KEY_WORDS > VALUE_WORDS ? KEY_WORDS : VALUE_WORDS;
		const Forward &loop;
		const Reach<C> &reach;
		const ColumnTiles &tiles;
		Keys keys, values;
		/* a lane's offsets from a run's first row */
		u32 k_from, k_tail[TAILS], v_from[Dims::SECOND ? 2 : 1][ROWS];
		i32 step_pages, step_slots;
		u32 held[2][WORDS];

		METHOD u32 k_bytes() const { return (u32)keys.stride_seq * SLAB_ELEMENT; }
		METHOD u32 v_bytes() const { return (u32)values.stride_seq * SLAB_ELEMENT; }

		METHOD Place begin()
		{
			Place first;

			k_from = line() * k_bytes() + group() * 16;
			UNROLL
			for (int n = 0; n < TAILS; n++) {
				i32 chunk = (CHUNKS - TAILS + n) * GROUPS;

				k_tail[n] = (chunk + group()) * CHUNK < keys.hdim
						    ? k_from + chunk * 16
						    : BUFFER_NOWHERE;
			}
			UNROLL
			for (int s = 0; s < Dims::slices(); s++)
				UNROLL
				for (int i = 0; i < ROWS; i++)
					v_from[s][i] = Core::column(i) * v_bytes() +
						       (Dims::start(s) * 16 +
							line() * Dims::width(s)) *
							       SLAB_ELEMENT;
			step_pages = C::PAGED ? C::TILE_N / keys.page_size : 0;
			step_slots = C::PAGED ? C::TILE_N % keys.page_size : 0;
			first.tile = tiles.column(0);
			seek(first);
			return first;
		}

		METHOD void seek(Place &p) const
		{
			p.column = p.tile + loop.wave * SHARE;
			p.page = C::PAGED ? (p.column + keys.leftpad) / keys.page_size : 0;
			p.slot = C::PAGED ? (p.column + keys.leftpad) % keys.page_size : 0;
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
				p.entries[r] = C::PAGED ? keys.entry_of_page(p.page + crosses(p, r))
							: 0;
		}

		/* Whether run r is in the page behind the share's first one; pages are whole runs. */
		METHOD bool crosses(const Place &p, int r) const
		{
			return p.slot + r * RUN >= keys.page_size;
		}

		METHOD const typename Element::Storage *at(const Keys &view, const Place &p,
							   int r) const
		{
			if (!C::PAGED)
				return view.base + (p.column + r * RUN) * view.stride_seq;
			i32 slot = p.slot + r * RUN - (crosses(p, r) ? view.page_size : 0);

			return view.base + view.page_at(p.entries[r]) * view.stride_page +
			       slot * view.stride_seq;
		}

		/* Piece n of a share: of K, then of V. Not before what its registers are for is
		 * free, or it would be copied, which waits for it. PADDED: there may be left
		 * padding in it. */
		template <bool PADDED = false> METHOD void fetch(int n, const Place &p)
		{
			scheduling_barrier();
			UNROLL
			for (int r = 0; r < RUNS; r++)
				if (n < PARTS)
					fetch_keys(n, p, r);
				else
					fetch_values<PADDED>(n - PARTS, p, r);
			scheduling_barrier();
		}
		/* Piece n was used: the one after the next. */
		METHOD void follow(int n, const Place &here, const Place &next)
		{
			fetch((n + 2) % (2 * PARTS), n + 2 < 2 * PARTS ? here : next);
		}

		METHOD u32 *key_words(int part, int r, int c)
		{
			return held[part % 2] + (r * PART_CHUNKS + c) * 4;
		}
		METHOD u32 *value_words(int part, int r, int i)
		{
			return held[(PARTS + part) % 2] + (r * ROWS + i) * Dims::WORDS;
		}

		METHOD void fetch_keys(int part, const Place &p, int r)
		{
			const Buffer b = Buffer::rows(at(keys, p, r),
						      loop.band.end - (p.column + r * RUN), RUN,
						      k_bytes(), keys.hdim * SLAB_ELEMENT);

			/* offsets made here are the instructions', not registers */
			k_from = (u32)hidden_lane((i32)k_from);
			UNROLL
			for (int c = 0; c < PART_CHUNKS; c++) {
				int chunk = part * PART_CHUNKS + c, tail = chunk - (CHUNKS - TAILS);

				load_words<4>(key_words(part, r, c), b,
					      tail < 0 ? k_from + chunk * GROUPS * 16
						       : k_tail[tail]);
			}
		}

		template <bool PADDED> METHOD void fetch_values(int part, const Place &p, int r)
		{
			i32 column = p.column + r * RUN, skip = 0;

			/* clamp() is a vector instruction */
			if (C::MASK || PADDED || (C::PAGED && PARTS > 1))
				skip = __builtin_amdgcn_readfirstlane(
					clamp(first_value(p.tile) - column, 0, RUN));
			const Buffer b = Buffer::rows(
				at(values, p, r) + skip * values.stride_seq,
				reach.end_of_values(loop.band) - (column + skip), RUN - skip,
				v_bytes(), values.hdim * SLAB_ELEMENT);

			UNROLL
			for (int i = 0; i < ROWS; i++) {
				UNROLL
				for (int n = 0; n < Dims::slices(); n++)
					v_from[n][i] = (u32)hidden_lane((i32)v_from[n][i]);
				u32 *to = value_words(part, r, i),
				    from = part * 16 * Dims::WORDS * 4 - skip * v_bytes();

				load_words<Dims::FIRST_WORDS>(to, b, v_from[0][i] + from);
				if constexpr (Dims::SECOND > 0)
					load_words<Dims::SECOND_WORDS>(to + Dims::FIRST_WORDS, b,
								       v_from[1][i] + from);
			}
		}

		METHOD i32 first_value(i32 tile) const
		{
			i32 first = reach.first_value(loop.band, tile);

			return C::PAGED ? max_of(first, 0) : first;
		}

		template <int N> METHOD static void load_words(u32 *to, Buffer b, u32 from)
		{
			const auto x = b.template load<N>(from);

			UNROLL
			for (int w = 0; w < N; w++)
				to[w] = x.w[w];
		}

		METHOD Operand key(int part, int r, int c, int step)
		{
			return whole(key_words(part, r, c) + step * OWN);
		}

		/* 8 bits: what arrived becomes what is multiplied, V four keys of a dimension at a
		 * time. */
		METHOD void keys_arrive(int part) { to_words<KEY_WORDS>(held[part % 2]); }
		METHOD void values_arrive(int part)
		{
			to_words<VALUE_WORDS>(held[(PARTS + part) % 2]);
			UNROLL
			for (int n = 0; n < RUNS * ROWS && SLAB_ELEMENT == 1; n += 4)
				UNROLL
				for (int w = 0; w < Dims::WORDS; w++) {
					u32 x[4];

					UNROLL
					for (int i = 0; i < 4; i++)
						x[i] = value_words(part, 0, n + i)[w];
					turn_bytes(x);
					UNROLL
					for (int i = 0; i < 4; i++)
						value_words(part, 0, n + i)[w] = x[i];
				}
		}
		template <int N> METHOD static void to_words(u32 *from)
		{
			u32 x[N];

			UNROLL
			for (int i = 0; i < N; i++)
				x[i] = from[i];
			to_slab_words(x);
			UNROLL
			for (int i = 0; i < N; i++)
				from[i] = x[i];
		}

		/* Dimension t of the part's, of the keys of KEY_RUNS runs from r on. */
		METHOD Operand column(int part, int r, int t)
		{
			const u32 LOW = 0x05040100, HIGH = 0x07060302;
			u32 own[OWN];

			UNROLL
			for (int i = 0; i < OWN; i++)
				own[i] = SLAB_ELEMENT == 1
						 ? value_words(part, r, 4 * i + t % 4)[t / 4]
						 : __builtin_amdgcn_perm(
							   value_words(part, r, 2 * i + 1)[t / 2],
							   value_words(part, r, 2 * i)[t / 2],
							   t % 2 ? HIGH : LOW);
			return whole(own);
		}
	};

	METHOD void sum_tiles()
	{
		const Reach<C> reach = Reach<C>::make(block, band);
		Keys keys = block.keys(), values = block.values();

		if (C::PAGED)
			keys.see_pages(), values.see_pages();
		const ColumnTiles tiles = reach.tiles(band, C::PAGED ? keys.leftpad % RUN : 0);
		const Steps steps = {block, keys, modifiers};
		Stream stream = {*this, reach, tiles, keys, values, 0, {}, {}, 0, 0, {}};

		if (tiles.count <= 0)
			return;
		Place here = stream.begin(), next = here;

		stream.template fetch<C::PAGED>(0, here);
		stream.template fetch<C::PAGED>(1, here);
		stream.advance(next, tiles.column(1));
		NO_UNROLL
		for (i32 n = 0; n < tiles.count; n++) {
			i32 tile = tiles.column(n);
			Place after = next;
			Scores s;

			stream.advance(after, tiles.column(n + 2));
			s.zero();
			UNROLL
			for (int part = 0; part < PARTS; part++) {
				stream.keys_arrive(part);
				multiply_keys(s, stream, part);
				stream.follow(part, here, next);
			}
			if (C::FACTORS)
				scale_rows(s, factors);
			if (C::LOGITS)
				steps.make_logits(s, block.tile_row, tile + wave * SHARE);
			if (reach.is_masked(band, tile))
				steps.mask(s, band, block.tile_row, tile + wave * SHARE);
			RowVector<Core, TM> factor, unit;

			if (weigh(s, &factor, &unit))
				scale_rows(o, factor);
			multiply_values(s, unit, stream, here, next);
			here = next;
			next = after;
		}
	}

	METHOD void multiply_keys(Scores &s, Stream &stream, int part) const
	{
		UNROLL
		for (int c = 0; c < PART_CHUNKS; c++)
			UNROLL
			for (int m = 0; m < TM; m++) {
				Operand own[STEPS];

				q.get(m, part * PART_CHUNKS + c, own);
				UNROLL
				for (int i = 0; i < STEPS; i++)
					UNROLL
					for (int r = 0; r < RUNS; r++)
						Core::multiply(s.t[m][r], own[i],
							       stream.key(part, r, c, i));
				Core::step();
			}
	}

	/* S becomes P; returns whether *ret_factor must multiply O. 8 bits: P in units of
	 * *ret_unit. */
	METHOD bool weigh(Scores &s, RowVector<Core, TM> *ret_factor, RowVector<Core, TM> *ret_unit)
	{
		if constexpr (SLAB_ELEMENT == 1)
			return weigh_share(s, ret_factor, ret_unit);
		else
			return Rule::update(rows, s, modifiers.unit, ret_factor);
	}

	/* The highest weight that a row has in a share is the type's largest power of two. In units
	 * of the highest so far, as 16 bits are, thousands of small weights could be nothing beside
	 * a large one that comes elsewhere. */
	struct ShareUnit {
		static const int MOST = WeightUnit<Element>::MOST, SHIFT = MOST;
	};
	METHOD bool weigh_share(Scores &s, RowVector<Core, TM> *ret_factor,
				RowVector<Core, TM> *ret_unit)
	{
		typedef Softmax<Core, TM, false, C::BIAS == BIAS_MATRIX, ShareUnit> Own;
		const float unit = modifiers.unit;
		SoftmaxRows<Core, TM> own;
		bool higher = false, huge = false;

		own.init();
		UNROLL
		for (int m = 0; m < TM; m++) {
			own.m(m, 0) = Own::highest(s, m, 0, minus_infinity());
			higher = higher || own.m(m, 0) * unit > rows.m(m, 0) * unit + Rule::LAG;
			huge = huge || (C::BIAS == BIAS_MATRIX && is_huge(own.m(m, 0)));
		}
		if (C::BIAS == BIAS_MATRIX && any_of_wave(huge)) {
			Own::limit(s, own.maximum);
			higher = true;
		}
		higher = any_of_wave(higher);
		UNROLL
		for (int m = 0; m < TM && higher; m++)
			ret_factor->v[m][0] = Rule::raise(rows, m, 0,
							  larger(rows.m(m, 0), own.m(m, 0)), unit);
		UNROLL
		for (int m = 0; m < TM; m++) {
			float from = Own::origin(own.m(m, 0), unit) -
				     Rule::origin(rows.m(m, 0), unit) - ShareUnit::SHIFT;

			Own::exponentiate(own, s, m, 0, unit);
			ret_unit->v[m][0] = own.m(m, 0) == minus_infinity() ? 0.0f
									    : exp2_fast(from);
			rows.l(m, 0) += own.l(m, 0) * ret_unit->v[m][0];
		}
		return higher;
	}

	METHOD void multiply_values(const Scores &s, const RowVector<Core, TM> &unit,
				    Stream &stream, const Place &here, const Place &next)
	{
		Operand p[PRODUCTS][TM][TERMS];

		UNROLL
		for (int n = 0; n < PRODUCTS; n++)
			UNROLL
			for (int m = 0; m < TM; m++) {
				u32 own[TERMS][OWN];

				UNROLL
				for (int i = 0; i < OWN; i++)
					pack(s.t[m][n * KEY_RUNS + i * VALUES / ROWS].x +
						     i * VALUES % ROWS,
					     i, own);
				UNROLL
				for (int k = 0; k < TERMS; k++)
					p[n][m][k] = whole(own[k]);
			}
		UNROLL
		for (int part = 0; part < PARTS; part++) {
			stream.values_arrive(part);
			if constexpr (SLAB_ELEMENT == 1)
				add_in_units(p, unit, stream, part);
			else
				add(p, stream, part);
			stream.follow(PARTS + part, here, next);
		}
	}

	METHOD void add(const Operand (&p)[PRODUCTS][TM][TERMS], Stream &stream, int part)
	{
		UNROLL
		for (int n = 0; n < PRODUCTS; n++)
			UNROLL
			for (int t = 0; t < Dims::PART; t++) {
				const Operand v = stream.column(part, n * KEY_RUNS, t);

				UNROLL
				for (int m = 0; m < TM; m++)
					Core::multiply(o.t[m][part * Dims::PART + t], p[n][m][0],
						       v);
				if (t % 2 == 1)
					Core::step();
			}
	}
	METHOD void add_in_units(const Operand (&p)[PRODUCTS][TM][TERMS],
				 const RowVector<Core, TM> &unit, Stream &stream, int part)
	{
		UNROLL
		for (int t = 0; t < Dims::PART; t++) {
			RegTile<Core, TM, 1> sum;

			sum.zero();
			UNROLL
			for (int n = 0; n < PRODUCTS; n++) {
				const Operand v = stream.column(part, n * KEY_RUNS, t);

				UNROLL
				for (int m = 0; m < TM; m++)
					UNROLL
					for (int k = 0; k < TERMS; k++)
						Core::multiply(sum.t[m][0], p[n][m][k], v);
			}
			UNROLL
			for (int m = 0; m < TM; m++)
				Core::add_scaled(o.t[m][part * Dims::PART + t], sum.t[m][0],
						 unit.v[m][0]);
			if (t % 2 == 1)
				Core::step();
		}
	}

	/* Word i of each operand that a weight becomes part of. */
	METHOD static void pack(const float *x, int i, u32 (&to)[TERMS][OWN])
	{
		if constexpr (SLAB_ELEMENT == 1) {
			typedef float Pair __attribute__((ext_vector_type(2)));
			u32 most = RoundToNearest::pack(Element(), x[0], x[1], x[2], x[3]);
			Pair low = __builtin_amdgcn_cvt_pk_f32_fp8((i32)most, false);
			Pair high = __builtin_amdgcn_cvt_pk_f32_fp8((i32)most, true);

			to[0][i] = most;
			to[1][i] = RoundToNearest::pack(Element(), x[0] - low[0], x[1] - low[1],
							x[2] - high[0], x[3] - high[1]);
		} else {
			to[0][i] = RoundToNearest::pack(Element(), x[0], x[1]);
		}
	}

	/* Elements of a lane that lie in quarter `turn` of the lines of an operand; whether the
	 * lane has some; where in it. */
	static const int IN_TURN = FMHA_CORE == FMHA_CORE_WMMA11 ? 2 : 4;
	METHOD static int first_element(int turn) { return turn * IN_TURN % Core::E; }
	METHOD static bool has_turn(int turn)
	{
		return FMHA_CORE == FMHA_CORE_WMMA11 || group() == turn * 4 / Core::E;
	}
	METHOD static i32 line_of_turn(int e)
	{
		return FMHA_CORE == FMHA_CORE_WMMA11 ? 2 * e + group() : e;
	}

	/* Where dimension t of the lines' is among those of a turn: slice by slice. */
	METHOD static i32 place_in_turn(int t, i32 l)
	{
		int part = t / Dims::PART, slice = t % Dims::PART >= Dims::FIRST,
		    start = part * Dims::PART + Dims::start(slice);

		return start * 4 + l * Dims::width(slice) + t - start;
	}
	/* The dimension of what is there. */
	METHOD static i32 dim_of_place(int turn, i32 at)
	{
		i32 part = at / (4 * Dims::PART), slice = at % (4 * Dims::PART) >= 4 * Dims::FIRST;
		i32 start = part * Dims::PART + Dims::start(slice);

		return start * 16 + turn * 4 * Dims::width(slice) + at - start * 4;
	}

	METHOD void finish(float *lds)
	{
		UNROLL
		for (int m = 0; m < TM; m++) {
			i32 n_rows = min_of(16, block.n_rows - block.tile_row - m * 16);

			if (n_rows > 0)
				finish_rows(lds, m, n_rows);
		}
	}

	METHOD void finish_rows(float *lds, int m, i32 n_rows)
	{
		const Partials partials = {lds};
		RegTile<Core, 1, WIDTH> unused;
		SoftmaxRows<Core, 1> none;
		const ForwardOutput<C, 1> output = {block, unused, none, modifiers.unit, 0};
		float sum = Core::row_sum(rows.l(m, 0));

		if (group() == 0)
			partials.put_stats(wave, line(), rows.m(m, 0), sum);
		UNROLL
		for (int turn = 0; turn < LDS_AMD_TURNS; turn++) {
			if (has_turn(turn))
				UNROLL
				for (int e = 0; e < IN_TURN; e++)
					UNROLL
					for (int t = 0; t < WIDTH; t++)
						partials.sums(
							wave,
							line())[place_in_turn(t, line_of_turn(e))] =
							o.t[m][t].x[first_element(turn) + e];
			block_sync();
			for (i32 i = thread_id(); i < n_rows * (QUARTER / 4); i += C::THREADS) {
				i32 row = i / (QUARTER / 4), at = i % (QUARTER / 4) * 4;

				store_slot(output, partials.merge(row, at, modifiers.unit),
					   m * 16 + row, dim_of_place(turn, at), o_scale);
			}
			block_sync(); /* nobody reads them any more */
		}
	}
};

FMHA_STAGED_ENTRY(abi_fwd_args, Forward<Config>(args).run(lds))

#endif
