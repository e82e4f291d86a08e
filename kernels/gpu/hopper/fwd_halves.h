/* SPDX-License-Identifier: MIT */
/*
 * fwd_halves.h: forward attention on Hopper over rows so wide that O of 64 of them fills the
 * registers of two warpgroups, each with half of the columns. A block has 64 rows, heads that share
 * keys side by side. The first warpgroup also finds all of S and P, and hands P over in the order
 * in which products take it, so that the other reads what it multiplies with one load of 16 bytes a
 * key tile. A third warpgroup brings keys and values.
 *
 * What runs when, of tile n and the next:
 *   first   O_left += P(n) V    S(n + 1)    softmax(n + 1)    ...
 *   second                                  O_right += P(n) V
 * The second waits for the scores, so that its product runs beside the softmax.
 *
 * How tiles come and where they lie is the Loop's, fwd_latent.h or fwd_wide.h, which has:
 *   STAGES, STARTED  of the ring; batches of products that start_scores() leaves under way
 *   LEFT, RIGHT      the parts of a stage with the halves of the values, for release()
 *   WEIGHTS_AT, FACTORS_AT, SHARES_AT  in shared memory, where Q is first
 *   k_tile(), v_tile(), wait_values(), start_scores(), finish_scores(), release(),
 *   arrivals(), CLUSTER  of a part; blocks that release it
 *   find_pieces(), tiles()
 */
#ifndef FMHA_GPU_FWD_HALVES_H
#define FMHA_GPU_FWD_HALVES_H

#include "decode_share.h"
#include "block/fwd_output.h"
#include "block/fwd_scores.h"
#include "wgmma_values.h"

template <class C, class Loop> struct ForwardHalves {
	typedef ForwardBlock<C> Block;
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	static const int TN = C::TILE_N / 16, HALF = C::HDIM_V / 2, TD = HALF / 16;
	static const int GROUP_THREADS = 128, GROUPS = 2, GROUP_WARPS = 4;
	static const int THREADS = C::THREADS + GROUP_THREADS;
	static_assert(C::TILE_M == 64 && C::WAVES_M == GROUP_WARPS && C::WAVES_N == GROUPS,
		      "a warp has 16 rows, and a warpgroup half of the columns");
	static_assert(C::TILE_N == 64, "its weights are handed over in four chunks a lane");
	static_assert(C::PACK && !C::DROPOUT && C::BIAS == BIAS_NONE, "rows of several heads");
	static_assert(C::PART_V == HALF, "as ForwardOutput takes results");
	static_assert(!C::CHOSEN || (!C::MASK && !C::SHARES), "splits that were cut, and no mask");
	typedef RegTile<Core, 1, TN> Scores;
	typedef RegTile<Core, 1, TD> Sums;
	typedef WgmmaValues<Core, Element, TN, TD> Values;
	typedef typename Values::Weights Weights;
	typedef ForwardScores<C, 1, TN> Steps;
	typedef ForwardOutput<C, 1> Output;
	typedef Softmax<Core, 1, true, false> Rule;

	/* Slabs of Q and of a key; of half of its values. */
	static const int SLAB = slab_bytes(C::TILE_N), SLABS = slabs_of(C::HDIM_Q),
			 HALF_SLABS = slabs_of(HALF);
	static_assert(HALF_SLABS <= GROUP_WARPS, "a warp clears one");

	/* Named barriers: those of a warp and its partner in the other warpgroup, by number; all of
	 * Q is there; a warpgroup's own. */
	static const int PAIR_THREADS = 2 * FMHA_WAVE;
	static const int FULL_BARRIER = 1, EMPTY_BARRIER = FULL_BARRIER + GROUP_WARPS,
			 TURN_BARRIER = EMPTY_BARRIER + GROUP_WARPS,
			 QUERY_BARRIER = TURN_BARRIER + GROUP_WARPS,
			 OWN_BARRIER = QUERY_BARRIER + 1;
	static_assert(OWN_BARRIER + GROUPS <= 16, "there are as many");

	Block block;
	TilesShare<C> share; /* SHARES */
	u32 lds; /* address in shared memory */
	i32 warp; /* of its warpgroup */
	Band band;
	Modifiers<C> modifiers;
	Sums o;
	SoftmaxRows<Core, 1> rows;

	METHOD ForwardHalves(const abi_fwd_args &args) : block(args), share(args) {}
	METHOD Loop &loop() { return static_cast<Loop &>(*this); }
	METHOD const Loop &loop() const { return static_cast<const Loop &>(*this); }

	/* ---- the ring ---- */

	METHOD u32 full(i32 part, i32 stage) const
	{
		return lds + Loop::BARRIERS_AT + (part * Loop::STAGES + stage) * 8;
	}
	METHOD u32 empty(i32 part, i32 stage) const { return full(Loop::PARTS + part, stage); }

	struct Ring {
		i32 stage;
		u32 parity;

		METHOD void next()
		{
			stage++;
			if (stage == Loop::STAGES)
				stage = 0, parity ^= 1;
		}
	};

	METHOD void make_barriers() const
	{
		if (thread_id() == 0) {
			UNROLL
			for (int i = 0; i < Loop::STAGES; i++)
				UNROLL
				for (int part = 0; part < Loop::PARTS; part++) {
					barrier_init(full(part, i), Loop::arrivals(part));
					barrier_init(empty(part, i), Loop::CLUSTER * GROUP_WARPS);
				}
			barrier_publish();
		}
		if (Loop::CLUSTER > 1)
			cluster_sync();
		else
			block_sync();
	}

	/* The block's pieces: one, or those of its share. Return: whether there are some. */
	METHOD bool find_pieces()
	{
		if constexpr (C::SHARES)
			return share.begin();
		block.locate(block_id_x(), block_id_y(), block_id_z());
		return !block.is_idle();
	}
	/* Every warpgroup goes through them by itself. */
	template <class Do> METHOD void each_piece(const Do &piece)
	{
		if constexpr (C::SHARES) {
			NO_UNROLL
			do {
				share.take(block, &band);
				park_share();
				piece(loop().tiles());
				find_share();
			} while (share.goes_on());
		} else {
			band = block.band();
			piece(loop().tiles());
		}
	}
	/* What a warp knows of its share waits in LDS, while the products want the registers. */
	METHOD u32 share_at() const { return lds + Loop::SHARES_AT + thread_id() / FMHA_WAVE * 32; }
	METHOD void park_share() const
	{
		const u32 x[4] = {(u32)share.unit, (u32)share.end, (u32)share.chunk,
				  (u32)share.together << 1 | (u32)share.rounds};

		wave_sync();
		if (lane_id() == 0) {
			store_shared_16(share_at(), x);
			store_shared_8(share_at() + 16,
				       chunk8{{(u32)share.batch, (u32)share.start_of}});
		}
		wave_sync();
	}
	METHOD void find_share()
	{
		chunk8 y = load_shared_8(share_at() + 16);
		u32 x[4];

		load_shared_16(share_at(), x);
		share.unit = (i32)x[0], share.end = (i32)x[1], share.chunk = (i32)x[2];
		share.together = (i32)(x[3] >> 1), share.rounds = x[3] & 1;
		share.batch = (i32)y.w[0], share.start_of = (i32)y.w[1];
	}
	METHOD ColumnTiles tiles() const { return Reach<C>::make(block, band).tiles(band); }

	/* ---- the loading warpgroup ---- */

	/* The box of a tile that a lane asks for, of each of the warp's slabs: row and batch entry,
	 * or slot and the page table's word. */
	struct Box {
		i32 row, entry;
	};
	METHOD Box find_box(const typename Block::Keys &view, i32 column, i32 rows) const
	{
		const Sequence &seq = block.seq;
		const abi_fwd_args &a = block.a;
		i32 position = column + lane_id() * rows;

		if constexpr (C::PAGED) {
			/* the engine brings zeros */
			if (lane_id() * rows >= C::TILE_N || position >= seq.n_k)
				return Box{0, view.n_pages};
			i32 page = position / view.page_size;

			return Box{position - page * view.page_size, view.entry_of_page(page)};
		}
		i32 batch = seq.packed_k ? 0 : seq.batch;

		if (a.cache.cache_batch_idx)
			batch = clamp(a.cache.cache_batch_idx[seq.batch], 0,
				      a.cache.cache_batch - 1);
		return Box{seq.k_start + seq.leftpad + position, batch};
	}

	/* ---- both warpgroups of products ---- */

	METHOD i32 wave_row() const { return block.tile_row + warp * 16; }

	METHOD void begin_piece()
	{
		modifiers = Modifiers<C>::make(block.a, block.seq);
		o.zero();
		rows.init();
	}

	/* A warpgroup's half of the rows of Q, by all of its threads: eight have 128 bytes of one.
	 * What a row has not is zero. */
	METHOD void fetch_queries(i32 group) const
	{
		const typename Block::Queries q = block.queries();
		i32 thread = thread_id() % GROUP_THREADS, chunk = thread % 8;

		NO_UNROLL
		for (i32 r = group * 32 + thread / 8; r < group * 32 + 32; r += GROUP_THREADS / 8) {
			bool exists = block.tile_row + r < block.n_rows;
			const typename Element::Storage *from =
				q.at(exists ? block.tile_row + r : block.tile_row, 0);
			u32 to = lds + r * SLAB_WIDTH + (chunk ^ r % 8) * 16;

			UNROLL
			for (int slab = 0; slab < SLABS; slab++) {
				i32 dim = slab * SLAB_COLUMNS + chunk * 8;
				bool valid = exists && dim < q.hdim;

				copy_async_16(to + slab * SLAB, valid ? from + dim : from, valid);
			}
		}
		copy_async_commit();
		copy_async_wait();
		fence_async();
	}

	/* V's rows that no row of the block sees, see fwd_block.h: where the copy brought them they
	 * become zero. Of a warpgroup's half; those of keys that are hidden by then. */
	METHOD void clear_unseen(i32 group, i32 stage, i32 column) const
	{
		const Reach<C> reach = Reach<C>::make(block, band);
		i32 begin = reach.first_value(band, column) - column,
		    end = reach.end_of_values(band) - column;

		if (C::CHOSEN || (begin <= 0 && end >= C::TILE_N))
			return;
		i32 thread = thread_id() % GROUP_THREADS;
		u32 to = loop().v_tile(stage) + (group * HALF_SLABS + thread / 32) * SLAB +
			 thread % 8 * 16;
		bool has_slab = HALF_SLABS == GROUP_WARPS || thread / 32 < HALF_SLABS;

		for (i32 r = thread % 32 / 8; r < C::TILE_N; r += 4)
			if (has_slab && (r < begin || r >= end))
				store_zeros(to + r * SLAB_WIDTH);
		fence_async();
		named_sync(OWN_BARRIER + group, GROUP_THREADS);
	}

	METHOD void start_output(const Weights &p, i32 group, i32 stage)
	{
		settle(o.t[0]);
		wgmma_begin();
		Values::multiply(o, p, loop().v_tile(stage) + group * HALF_SLABS * SLAB);
		wgmma_commit();
	}

	/* Where what a lane hands over lies. */
	METHOD u32 weights_at(int n) const
	{
		return lds + Loop::WEIGHTS_AT +
		       (n * GROUP_THREADS + thread_id() % GROUP_THREADS) * 16;
	}
	METHOD u32 factors_at() const
	{
		return lds + Loop::FACTORS_AT + thread_id() % GROUP_THREADS * 8;
	}
	METHOD void pair_sync(i32 barrier) const { named_sync(barrier + warp, PAIR_THREADS); }
	METHOD void pair_arrive(i32 barrier) const { named_arrive(barrier + warp, PAIR_THREADS); }

	/* The lane's rows of a half of O; @factor: what the sums are multiplied with. */
	METHOD void store(const RowVector<Core, 1> &factor, i32 group) const
	{
		const abi_fwd_args &a = block.a;
		const Output output = {block, const_cast<Sums &>(o),
				       const_cast<SoftmaxRows<Core, 1> &>(rows), modifiers.unit,
				       warp};
		WgmmaRows results;

		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 row = wave_row() + Core::stat_row(r);
			RowPlace p = block.place_of(row);

			results.factor[r] = factor.v[0][r];
			results.to[r] = 0;
			if (row >= block.n_rows)
				continue;
			if (C::SPLIT)
				results.to[r] = (char *)(a.o_acc +
							 output.split_row(p) * a.hdim_v +
							 group * HALF);
			else
				results.to[r] = (char *)a.o.data +
						(q_offset(a.o, block.seq, p.row, p.head) +
						 group * HALF) * 2;
		}
		if (C::SPLIT)
			store_sums(results, a.hdim_v - group * HALF);
		else
			Values::store(o, results, a.hdim_v - group * HALF, a.o_dtype, lane_id());
	}

	/* The same of a split, in floats. Nothing but a store is behind a condition: a branch each,
	 * for 64 of them, was a third of all code, and blocks fetch it where another kernel has
	 * been. */
	METHOD void store_sums(const WgmmaRows &rows, i32 hdim) const
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			float factor = rows.factor[r];
			bool is_empty = factor == 0.0f;
			char *to = rows.to[r] + lane_id() % 4 * 8;
			i32 end = rows.to[r] ? hdim - lane_id() % 4 * 2 : 0;

			UNROLL
			for (int d = 0; d < 2 * TD; d++) {
				const float *x = o.t[0][d / 2].x + d % 2 * 4 + 2 * r;
				chunk8 y = {{is_empty ? 0 : float_to_bits(x[0] * factor),
					     is_empty ? 0 : float_to_bits(x[1] * factor)}};

				if (d * 8 < end)
					*(chunk8 *)(to + d * 32) = y;
			}
		}
	}

	/* ---- the first: scores, and the left half ---- */

	METHOD void start_slabs(Scores &s, i32 stage, int from, int to, bool adds) const
	{
		const int STEPS = SLAB_WIDTH / 32;

		wgmma_begin();
		UNROLL
		for (int slab = from; slab < to; slab++) {
			/* hidden, so that no descriptor is kept from tile to tile */
			i32 at = hidden(slab * SLAB);
			const u64 q = wgmma_descriptor(lds + at, 0),
				  k = wgmma_descriptor(loop().k_tile(stage) + at, 0);

			UNROLL
			for (int i = 0; i < STEPS; i++)
				Wgmma<Element, TN>::along(s.t[0], q + i * STEP_ALONG,
							  k + i * STEP_ALONG,
							  adds || slab > from || i > 0);
		}
	}

	/* Scores that must not count become -inf. Rows are found anew: few tiles have such. */
	METHOD void mask(Scores &s, i32 column) const
	{
		i32 from = column + Core::column(0), sinks = band.sinks - from,
		    begin = band.begin - from;

		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 row = block.place_of(wave_row() + Core::stat_row(r)).row;
			i32 low = band.first(row) - from, high = band.last(row) - from;

			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					i32 j = n * 16 + e % 2 + e / 4 * 8;

					if (Core::stat(e) == r &&
					    (j > high || j < begin ||
					     (C::MASK && j < low && j >= sinks)))
						s.t[0][n].x[e] = minus_infinity();
				}
		}
	}

	/* Scores become weights, but for their rounding; what was summed so far takes the factor. */
	METHOD void weigh(Scores &s, i32 stage, i32 column, const Reach<C> &reach,
			  RowVector<Core, 1> &factor)
	{
		const typename Block::Keys keys = {}; /* of no factors, nobody asks it */

		factor.fill(1.0f);
		if (C::LOGITS)
			Steps{block, keys, modifiers}.make_logits(s, wave_row(), column);
		if constexpr (C::CHOSEN)
			loop().hide_absent(s, stage);
		else if (reach.is_masked(band, column))
			mask(s, column);
		if (Rule::update(rows, s, modifiers.unit, &factor))
			scale_rows(o, factor);
	}

	METHOD void hand_over(const Weights &p, const RowVector<Core, 1> &factor) const
	{
		pair_sync(EMPTY_BARRIER);
		UNROLL
		for (int n = 0; n < TN; n++)
			store_shared_16(weights_at(n), p.t[0][n].r);
		hand_factors(factor);
	}
	METHOD void hand_factors(const RowVector<Core, 1> &factor) const
	{
		store_shared_8(factors_at(), chunk8{{float_to_bits(factor.v[0][0]),
						     float_to_bits(factor.v[0][1])}});
		pair_arrive(FULL_BARRIER);
	}

	METHOD void walk_first(const ColumnTiles &tiles, Ring &ring)
	{
		const Reach<C> reach = Reach<C>::make(block, band);
		RowVector<Core, 1> factor;
		Scores s;
		Weights p;

		fetch_queries(0);
		named_sync(QUERY_BARRIER, 2 * GROUP_THREADS);
		loop().start_scores(s, ring);
		loop().finish_scores(s, ring);
		weigh(s, ring.stage, tiles.column(tiles.count - 1), reach, factor);
		p = Values::round(s);
		NO_UNROLL
		for (i32 n = tiles.count - 1; n > 0; n--) {
			i32 stage = ring.stage;

			hand_over(p, factor);
			loop().wait_values(Loop::LEFT, ring);
			clear_unseen(0, stage, tiles.column(n));
			start_output(p, 0, stage);
			ring.next();
			loop().start_scores(s, ring);
			wgmma_wait<Loop::STARTED>();
			settle(o.t[0]);
			/* What comes there next is on its way while the rest is waited for. */
			loop().release(Loop::LEFT, stage);
			loop().finish_scores(s, ring);
			pair_arrive(TURN_BARRIER);
			weigh(s, ring.stage, tiles.column(n - 1), reach, factor);
			p = Values::round(s);
		}
		hand_over(p, factor);
		loop().wait_values(Loop::LEFT, ring);
		clear_unseen(0, ring.stage, tiles.column(0));
		start_output(p, 0, ring.stage);
		pair_arrive(TURN_BARRIER);
		wgmma_wait<0>();
		settle(o.t[0]);
		loop().release(Loop::LEFT, ring.stage);
		ring.next();
	}

	METHOD void finish_first()
	{
		const Output output = {block, o, rows, modifiers.unit, warp};
		RowVector<Core, 1> factor;

		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 row = wave_row() + Core::stat_row(r);
			RowPlace p = block.place_of(min_of(row, block.n_rows - 1));
			float sum = Core::row_sum(rows.l(0, r)), lse;

			factor.v[0][r] = output.finish_row(rows.m(0, r), sum, p.head, &lse) *
					 block.result_factor();
			if (row < block.n_rows && lane_id() % 4 == 0)
				output.store_lse(p, lse);
		}
		pair_sync(EMPTY_BARRIER);
		hand_factors(factor);
		store(factor, 0);
	}

	METHOD void multiply_first()
	{
		Ring ring = {0, 0};

		each_piece([&](const ColumnTiles &tiles) {
			begin_piece();
			if (tiles.count > 0)
				walk_first(tiles, ring);
			finish_first();
			if constexpr (C::SHARES)
				if (band.end == block.seq.n_k)
					empty_other_parts();
		});
	}

	/* The parts behind an item's last one. */
	METHOD void empty_other_parts()
	{
		const Output output = {block, o, rows, modifiers.unit, warp};
		i32 n_rows = min_of(C::TILE_M, block.n_rows - block.tile_row),
		    rest = block.a.n_splits - 1 - block.split;
		i64 step = (i64)block.a.nhead_q * block.a.sequences.total_q;

		for (i32 i = thread_id() % GROUP_THREADS; i < n_rows * rest; i += GROUP_THREADS)
			block.a.lse_acc[output.split_row(
						block.place_of(block.tile_row + i % n_rows)) +
					(1 + i / n_rows) * step] = minus_infinity();
	}

	/* ---- the second: the right half ---- */

	METHOD void take_factors(RowVector<Core, 1> &factor) const
	{
		chunk8 x = load_shared_8(factors_at());

		UNROLL
		for (int r = 0; r < Core::STATS; r++)
			factor.v[0][r] = bits_to_float(x.w[r]);
	}

	METHOD void walk_second(const ColumnTiles &tiles, Ring &ring)
	{
		fetch_queries(1);
		named_arrive(QUERY_BARRIER, 2 * GROUP_THREADS);
		NO_UNROLL
		for (i32 n = tiles.count - 1; n >= 0; n--) {
			RowVector<Core, 1> factor;
			Weights p;

			pair_sync(FULL_BARRIER);
			take_factors(factor);
			UNROLL
			for (int i = 0; i < TN; i++)
				load_shared_16(weights_at(i), p.t[0][i].r);
			if (any_of_wave(factor.v[0][0] != 1.0f || factor.v[0][1] != 1.0f))
				scale_rows(o, factor);
			pair_sync(TURN_BARRIER);
			/* Behind that, so that the next turn comes after this one. */
			pair_arrive(EMPTY_BARRIER);
			loop().wait_values(Loop::RIGHT, ring);
			clear_unseen(1, ring.stage, tiles.column(n));
			start_output(p, 1, ring.stage);
			wgmma_wait<0>();
			settle(o.t[0]);
			loop().release(Loop::RIGHT, ring.stage);
			ring.next();
		}
	}

	METHOD void multiply_second()
	{
		Ring ring = {0, 0};

		pair_arrive(EMPTY_BARRIER);
		each_piece([&](const ColumnTiles &tiles) {
			RowVector<Core, 1> factor;

			begin_piece();
			if (tiles.count > 0)
				walk_second(tiles, ring);
			pair_sync(FULL_BARRIER);
			take_factors(factor);
			pair_arrive(EMPTY_BARRIER);
			store(factor, 1);
		});
	}

	/* @load: what the warpgroup that brings tiles does. */
	template <class Load> METHOD void run(char *memory, const Load &load)
	{
		const int LAUNCHED = 65536 / THREADS / 8 * 8;
		const int PRODUCT_REGISTERS =
			(LAUNCHED * (GROUPS + 1) - Loop::LOADER_REGISTERS) / GROUPS / 8 * 8;
		i32 wave = wave_id();

		lds = shared_address(memory);
		warp = wave % GROUP_WARPS;
		make_barriers();
		wait_for_stage_before();
		if (C::SPLIT)
			let_next_stage_begin();
		if (!loop().find_pieces())
			return;
		if (wave >= GROUPS * GROUP_WARPS) {
			give_registers<Loop::LOADER_REGISTERS>();
			load();
		} else if (wave >= GROUP_WARPS) {
			take_registers<PRODUCT_REGISTERS>();
			multiply_second();
		} else {
			take_registers<PRODUCT_REGISTERS>();
			multiply_first();
		}
	}
};

#endif
