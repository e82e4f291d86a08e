/* SPDX-License-Identifier: MIT */
/*
 * bwd_wgmma_block.h: what Hopper's backward loops share (bwd_wgmma.h, bwd_wgmma_narrow.h,
 * bwd_wgmma_wide.h, bwd_wgmma_roles.h): where things lie in shared memory, the last warpgroup, and
 * single steps of the others.
 *
 * Of the last warpgroup one warp loads tiles, two send dQ, one brings LSE and D. dQ^T leaves the
 * registers through shared memory: a thread a warpgroup that finds it has the copy engine add it to
 * dq_acc, whose layout (bwd_tiles.h) is that of the registers. In deterministic mode blocks add to
 * a tile in the order of their keys.
 *
 * Under a mask that is data all threads look once which tiles of queries see the block's keys, and
 * leave a list of them in shared memory for all: the mask may change, and they must agree. Which
 * keys a query sees by its intervals comes along with its LSE and D. Of many intervals few meet the
 * block's keys; which these are is told beside the list, so that others are not asked for again.
 */
#ifndef FMHA_GPU_BWD_WGMMA_BLOCK_H
#define FMHA_GPU_BWD_WGMMA_BLOCK_H

#include "block/bwd_scores.h"
#include "block/bwd_tiles.h"
#include "wgmma.h"

template <class C> struct BackwardWgmmaBlock {
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	static const int TN = C::TILE_M / 16, TD = C::HDIM_Q / 16, TV = C::HDIM_V / 16;
	typedef RegTile<Core, 1, TN> Scores;
	typedef OperandTile<Core, 1, TN> Weights;
	typedef BackwardScores<C, true, 1, TN, BackwardWgmmaBlock> Steps;
	static constexpr DqCut DQ = {C::TILE_M, slabs_of(C::HDIM_Q)};
	static const bool DQ_BY_ROWS =
		lds_bwd_dq_by_rows(C::TILE_M, C::HDIM_Q, C::SOFTCAP || C::DROPOUT);
	static const int DQ_QUERIES = DQ.queries(),
			 DQ_BYTES = 64 * (DQ_BY_ROWS ? C::HDIM_Q : DQ_QUERIES) * 4;
	static_assert(!DQ_BY_ROWS || C::HDIM_Q == LDS_DQ_ROW, "padded to");
	static const int DQ_TILE = lds_dq_tile(C::TILE_M, C::HDIM_Q,
					       C::SOFTCAP || C::DROPOUT); /* floats */
	struct Dq { /* a chunk: 64 of the head dimension x queries; DQ_BY_ROWS, 64 queries x it */
		typename Core::Acc t[(DQ_BY_ROWS ? C::HDIM_Q : DQ_QUERIES) / 16];
	};

	/* The warpgroups have 64 keys each, or the same ones: these, or 96, of which three
	 * warpgroups have different products. */
	static const bool SHARED = lds_bwd_is_shared(C::TILE_N),
			  ROLES = lds_bwd_has_roles(C::TILE_N);
	static const int GROUP_THREADS = 128, GROUPS = 2, GROUP_KEYS = 64;
	static_assert(C::WAVES_M == 4 * (ROLES ? 3 : GROUPS) && C::WAVES_N == 1, "warpgroups");
	static_assert(ROLES || C::TILE_N == (SHARED ? 1 : GROUPS) * GROUP_KEYS, "of 64 keys");
	/* Waves that read Q and dO. */
	static const int READERS = 4 * GROUPS;
	static const int THREADS = C::THREADS + GROUP_THREADS;
	static const bool HAS_DATA = C::MASK_DATA != MASK_DATA_NONE,
			  HAS_INTERVALS = C::MASK_DATA == MASK_DATA_INTERVALS;
	static const int LOADER_REGISTERS = 24, PRODUCT_REGISTERS = 240;

	static const int Q_SLABS = slabs_of(C::HDIM_Q), V_SLABS = slabs_of(C::HDIM_V);
	static const bool TALL = C::TILE_M > 64;
	/* What needs the raw product and dP at once: bwd_scores.h's gradients() instead of weigh()
	 * and differentiate(). */
	static const bool AT_ONCE = C::SOFTCAP || C::DROPOUT;
	/* A matrix bias leaves no registers for what is asked for early; ALiBi was not measured. */
	static const bool FETCHES_LSE = !(AT_ONCE || HAS_DATA || C::BIAS != BIAS_NONE);
	/* Half of P is made behind dP, beside dS: its exponentials take as long as a product. Heads
	 * of 96 lose by it. */
	static const bool HALVES = TALL || (FETCHES_LSE && !SHARED && !ROLES &&
					    C::HDIM_Q == 128 && C::HDIM_V == 128);
	static_assert(!HALVES || !(HAS_DATA || AT_ONCE), "P by halves");
	static const bool NARROW = Q_SLABS == 1 && V_SLABS == 1 && !TALL;
	/* dK and dV begin with the first step's products and not with zeros, where accumulators
	 * need all registers: ptxas moves zeros in front of take_registers(), keeps them below
	 * what a thread has there, and finds too few for the others. */
	static const bool BEGINS_SUMS = TALL || DQ_BY_ROWS;
	static_assert(!HAS_DATA || !(SHARED || ROLES), "wide heads find their place twice");
	static const int K_SLAB = slab_bytes(C::TILE_N), Q_SLAB = slab_bytes(C::TILE_M);
	static const int Q_BYTES = Q_SLABS * Q_SLAB, DO_BYTES = V_SLABS * Q_SLAB;
	static const int Q_STAGES = LDS_BWD_WGMMA_STAGES, DS_STAGES = LDS_BWD_WGMMA_STAGES;
	static const int DO_STAGES = lds_bwd_do_stages(C::HDIM_Q, C::HDIM_V);
	static const int V_AT = Q_SLABS * K_SLAB, Q_AT = V_AT + V_SLABS * K_SLAB,
			 DO_AT = Q_AT + Q_STAGES * Q_BYTES;
	/* Stages of dS; SHARED, behind them as many of P; ROLES, one. */
	static const int DS_BYTES = slabs_of(C::TILE_N) * Q_SLAB,
			 DS_AT = DO_AT + DO_STAGES * DO_BYTES;
	static const int DQ_AT = DS_AT + lds_bwd_scores(C::TILE_N) * GROUPS * Q_SLAB,
			 STATS_BYTES = C::TILE_M * 8;
	static const int STATS_AT = DQ_AT + GROUPS * 64 * DQ_QUERIES * 4,
			 BARRIERS_AT = STATS_AT + Q_STAGES * STATS_BYTES;
	static_assert(BARRIERS_AT + LDS_WGMMA_BARRIERS ==
			      lds_bwd_wgmma(C::cut(C::TILE_M, C::TILE_N)),
		      "the host asks lds.h, too");
	static_assert((1 + 2 * Q_STAGES + 2 * DO_STAGES + 2 * GROUPS) * 8 <= LDS_WGMMA_BARRIERS,
		      "room for them");
	/* HAS_DATA: of runs of tiles, a bit each, whether some row sees a key, and whether not all
	 * rows see all of them; then a list of those that some row sees, and of one behind them;
	 * and by which intervals, a word a run. */
	static const int SEEN_AT = BARRIERS_AT + LDS_WGMMA_BARRIERS, SEEN_WORDS = LDS_BWD_SEEN / 32,
			 LIST_AT = SEEN_AT + 2 * SEEN_WORDS * 4,
			 BY_AT = LIST_AT + LDS_BWD_LIST, KEYS_AT = BY_AT + 4 * LDS_BWD_SEEN;
	/* Of a query which of the block's keys it sees; those of a wave lie together. */
	static const int KEY_WORDS = C::TILE_N / 32, KEYS_BYTES = C::TILE_M * KEY_WORDS * 4,
			 KEYS_OF_WAVE = C::TILE_M * 2;
	static_assert(!HAS_DATA ||
			      SEEN_AT + lds_bwd_seen(C::TILE_M, C::TILE_N) <= C::LDS_BYTES,
		      "what the host gives");

	/* Named barriers: a warpgroup's own; a stage of dS is there; one of P is there, for the
	 * other warpgroup. All that wait for a round of one must do so in the same instruction
	 * (bar.sync is an aligned one): where the warpgroups run different code one of them arrives
	 * and the other waits. */
	static const int OWN_BARRIER = 1, DS_BARRIER = OWN_BARRIER + GROUPS,
			 P_BARRIER = DS_BARRIER + DS_STAGES;

	BackwardPlace<C> at;
	u32 lds;         /* address in shared memory */
	i32 first;       /* key of the block */
	i32 part; /* of all heads, one after the other: see abi.h */
	i32 wave;
	ColumnTiles tiles; /* of queries */
	i32 n_seen;        /* tiles that are walked */
	i32 run_shift;     /* HAS_DATA: a run has so many tiles, as a power of two */
	abi_key_block seen_by; /* HAS_DATA: no other rows see the block's keys */

	METHOD BackwardWgmmaBlock(const abi_bwd_args &args) : at(args) {}

	/* ---- what bwd_scores.h asks ---- */

	static const bool FETCHES_BIAS = false, HIDES = true;
	METHOD i32 row_of(int) const { return first + (SHARED ? wave % 4 : wave) * 16; }
	METHOD const Sequence &seq() const { return at.seq; }
	METHOD const Band &band() const { return at.band; }
	METHOD i32 head() const { return at.head; }
	METHOD BiasView bias() const { return at.bias(at.a.bias); }
	METHOD BiasView dbias() const { return at.bias(at.a.dbias); }

	/* ---- places in shared memory ---- */

	METHOD u32 barrier(i32 number) const { return lds + BARRIERS_AT + number * 8; }
	METHOD u32 kv_full() const { return barrier(0); }
	METHOD u32 q_full(i32 stage) const { return barrier(1 + stage); } /* with LSE and D */
	METHOD u32 q_empty(i32 stage) const { return barrier(1 + Q_STAGES + stage); }
	METHOD u32 do_full(i32 stage) const { return barrier(1 + 2 * Q_STAGES + stage); }
	METHOD u32 do_empty(i32 stage) const
	{
		return barrier(1 + 2 * Q_STAGES + DO_STAGES + stage);
	}
	METHOD u32 dq_full(i32 group) const
	{
		return barrier(1 + 2 * (Q_STAGES + DO_STAGES) + group);
	}
	METHOD u32 dq_empty(i32 group) const
	{
		return barrier(1 + 2 * (Q_STAGES + DO_STAGES) + GROUPS + group);
	}
	METHOD u32 k_tile() const { return lds; }
	METHOD u32 v_tile() const { return lds + V_AT; }
	METHOD u32 q_tile(i32 stage) const { return lds + Q_AT + stage * Q_BYTES; }
	METHOD u32 do_tile(i32 stage) const { return lds + DO_AT + stage * DO_BYTES; }
	METHOD u32 ds_tile(i32 stage) const { return lds + DS_AT + stage * DS_BYTES; }
	METHOD u32 dq_part(i32 group) const { return lds + DQ_AT + group * DQ_BYTES; }
	METHOD u32 stats(i32 stage) const { return lds + STATS_AT + stage * STATS_BYTES; }
	/* HAS_INTERVALS: of a tile that they cut, the keys that its queries see. */
	METHOD u32 seen_keys(i32 stage) const { return lds + KEYS_AT + stage * KEYS_BYTES; }

	/* Heads whose keys are the block's. */
	METHOD i32 n_heads() const { return hidden(at.a.nhead_q) / grid_kv_parts(&at.a); }
	METHOD bool is_whole() const { return at.a.kv_parts <= 1; }
	METHOD i32 head_k() const { return is_whole() ? part : part / at.a.kv_parts; }

	/* A step: a tile of queries of one of the heads; where it is in the rings of stages. */
	struct Step {
		i32 tile, head, number;
		/* HAS_DATA: the run's place in the list; what that says of it */
		i32 place;
		u32 run;

		METHOD i32 q_stage() const { return number % Q_STAGES; }
		METHOD u32 q_parity() const { return number / Q_STAGES & 1; }
		METHOD i32 do_stage() const { return number % DO_STAGES; }
		METHOD u32 do_parity() const { return number / DO_STAGES & 1; }
		METHOD i32 ds_stage() const { return number % DS_STAGES; }
	};
	METHOD Step first_step() const { return first_step(part * n_heads()); }
	METHOD Step first_step(i32 head) const
	{
		Step s = {0, head, 0, 0, 0};

		if (HAS_DATA)
			enter_run(s);
		return s;
	}
	METHOD i32 n_steps() const { return n_seen * n_heads(); }
	METHOD void next(Step &s) const
	{
		next_tile(s);
		if (s.tile == tiles.count) {
			s.tile = s.place = 0, s.head++;
			if (HAS_DATA)
				enter_run(s);
		}
		s.number++;
	}
	/* HAS_DATA: which step is the next takes a while, and is found behind products under way. */
	METHOD void look_ahead(const Step &s, Step *next_step) const
	{
		if constexpr (HAS_DATA) {
			*next_step = s;
			next(*next_step);
		}
	}
	METHOD void next(Step &s, const Step &found) const
	{
		if constexpr (HAS_DATA)
			s = found;
		else
			next(s);
	}
	/* The head's next tile; tiles.count: there is none. */
	METHOD void next_tile(Step &s) const
	{
		s.tile++;
		if constexpr (HAS_DATA) {
			if (s.tile & ((1 << run_shift) - 1) && s.tile < tiles.count)
				return;
			s.place++;
			enter_run(s);
		}
	}

	/* An entry of the list: a run's number and whether a mask that is data may hide elements of
	 * its tiles. */
	static const u32 CUT = 1u << 15;
	METHOD void enter_run(Step &s) const
	{
		s.run = load_shared_half(lds + LIST_AT + s.place * 2);
		s.tile = min_of((i32)(s.run & (CUT - 1)) << run_shift, tiles.count);
	}
	METHOD bool hides(const Step &s) const { return HAS_DATA && s.run & CUT; }

	/* Rows of the block's queries, counted from the first tile's: [begin, end). */
	struct Rows {
		i32 begin, end;
	};
	/* Finds what is walked, by all threads. words: SEEN_AT and what follows. */
	METHOD void find_seen(u32 *words)
	{
		const abi_mask_data &m = at.a.mask_data;
		const i32 from = tiles.first * C::TILE_M;
		const Rows rows = {
			max_of(seen_by.first_row / C::TILE_M * C::TILE_M - from, 0),
			min_of(min_of(ceil_div(seen_by.end_row, C::TILE_M) * C::TILE_M,
				      (tiles.first + tiles.count) * C::TILE_M),
			       at.seq.n_q) -
				from};
		const bool alike = (C::MASK_DATA == MASK_DATA_BITS ? m.bits : m.intervals)
					   .stride_head == 0;

		run_shift = 0;
		NO_UNROLL
		while (n_runs() > LDS_BWD_SEEN)
			run_shift++;
		for (i32 i = thread_id(); i < 2 * SEEN_WORDS; i += THREADS)
			words[i] = 0;
		for (i32 i = thread_id(); HAS_INTERVALS && i < n_runs(); i += THREADS)
			words[(BY_AT - SEEN_AT) / 4 + i] = 0;
		block_sync();
		/* Endpoints are as far as the L2 cache: a thread has as many on their way. */
		NO_UNROLL
		for (i32 h = alike ? n_heads() - 1 : 0; h < n_heads(); h++)
			if (HAS_INTERVALS && m.n_endpoints > GRID_ORDER_ENDPOINTS)
				look_at_rows<2, 8>(words, at.head + h, rows);
			else
				look_at_rows<4, 2>(words, at.head + h, rows);
		block_sync();
		list_seen(words);
	}
	template <int ROWS, int TOGETHER>
	METHOD void look_at_rows(u32 *words, i32 head, const Rows &rows) const
	{
		const i32 end = min_of(first + C::TILE_N, at.seq.n_k);

		NO_UNROLL
		for (i32 r = rows.begin + thread_id();
		     r < ceil_div(rows.end, FMHA_WAVE) * FMHA_WAVE; r += ROWS * THREADS) {
			DataSees sees[ROWS];
			u32 by[ROWS];
			i32 row[ROWS];

			/* Those behind the last one are it again, and nobody's below. */
			UNROLL
			for (int i = 0; i < ROWS; i++)
				row[i] = min_of(tiles.first * C::TILE_M + r + i * THREADS,
						at.seq.n_q - 1);
			at.mask_data().template sees_of_rows<TOGETHER>(sees, by, row, head, first,
									end);
			UNROLL
			for (int i = 0; i < ROWS; i++) {
				/* 32 rows are of one tile */
				i32 place = r + i * THREADS, run = place / C::TILE_M >> run_shift;
				bool some = any_of_wave(sees[i].some),
				     cut = any_of_wave(!sees[i].all);

				if (HAS_INTERVALS)
					by[i] = __reduce_or_sync(0xffffffffu, by[i]);
				if (lane_id() != 0 || place >= rows.end)
					continue;
				if (some)
					atomicOr(words + run / 32, 1u << run % 32);
				if (HAS_INTERVALS && some)
					atomicOr(words + (BY_AT - SEEN_AT) / 4 + run, by[i]);
				if (cut)
					atomicOr(words + SEEN_WORDS + run / 32, 1u << run % 32);
			}
		}
	}
	METHOD i32 n_runs() const { return (tiles.count + (1 << run_shift) - 1) >> run_shift; }

	METHOD static bool is_set(const u32 *words, i32 bit)
	{
		return words[bit / 32] >> bit % 32 & 1;
	}
	METHOD static i32 count_before(const u32 *words, i32 bit)
	{
		i32 n = __popc(words[bit / 32] & ((1u << bit % 32) - 1));

		NO_UNROLL
		for (i32 i = 0; i < bit / 32; i++)
			n += __popc(words[i]);
		return n;
	}
	METHOD void list_seen(const u32 *words)
	{
		u16 *list = (u16 *)(words + 2 * SEEN_WORDS);
		const i32 n = n_runs();

		for (i32 run = thread_id(); run < n; run += THREADS)
			if (is_set(words, run))
				list[count_before(words, run)] =
					run | (is_set(words + SEEN_WORDS, run) ? CUT : 0);
		i32 n_listed = count_before(words, n);

		if (thread_id() == 0)
			list[n_listed] = CUT - 1; /* behind all tiles */
		n_seen = n_listed << run_shift;
		/* the last run may have fewer */
		if (n > 0 && is_set(words, n - 1))
			n_seen -= (n << run_shift) - tiles.count;
		block_sync();
	}

	/* Deterministic: last rows first, so that blocks meet a tile one after the other without
	 * waiting for long. */
	METHOD i32 tile_of(const Step &s) const
	{
		return tiles.first + (at.a.deterministic ? tiles.count - 1 - s.tile : s.tile);
	}
	METHOD i32 query_of(const Step &s) const { return tile_of(s) * C::TILE_M; }

	/* ---- where the block is ---- */

	/* How many find room in the cache. Of Q, dO and dq_acc a head of those of a part is wanted
	 * at a time. */
	METHOD i32 parts_at_once(i32 n_parts) const
	{
		return heads_at_once(at.a.sequences.seqlen_q_max, 6 * C::HDIM_Q + 2 * C::HDIM_V,
				     n_parts);
	}

	METHOD static i32 units()
	{
		i32 n;

		asm("mov.u32 %0, %%nsmid;" : "=r"(n));
		return n;
	}

	/* The x-th block, of n, in the mask's order. What is read may change meanwhile: one thread
	 * reads it for all of them, which must agree. */
	METHOD abi_key_block find_key_block(i32 n, i32 batch, i32 x, char *shared) const
	{
		const abi_bwd_args &a = at.a;
		abi_key_block *found = (abi_key_block *)shared;

		if (!HAS_INTERVALS || a.order_words <= 0)
			return abi_key_block{x, 0, at.seq.n_q};
		if (thread_id() == 0)
			*found = ((const abi_key_block *)(a.d.data - a.order_words))
				[(i64)n * grid_order_list(&a, batch, head_k()) + x];
		block_sync();
		return abi_key_block{clamp(found->number, 0, n - 1),
				     clamp(found->first_row, 0, at.seq.n_q),
				     clamp(found->end_row, 0, at.seq.n_q)};
	}

	/* number: the block's; shared: room that find_seen() needs later. */
	METHOD bool locate(i32 number, char *shared)
	{
		const abi_bwd_args &a = at.a;
		const i32 parts = grid_kv_parts(&a);
		block_order order = {ceil_div(a.sequences.seqlen_k_max, C::TILE_N),
				     parts * a.sequences.batch, 0, 0};
		i32 x, y;

		if (C::MASK && !HAS_DATA)
			order.section = order_section(order.n_y, parts_at_once(order.n_y));
		/* deterministic: blocks wait for those before them */
		if (C::MASK && !HAS_DATA && order.section == order.n_y && !a.deterministic)
			order.units = units();
		if (HAS_DATA)
			order_in_runs(order.n_x, order.n_y, grid_order_run(order.n_x), number, &x,
				      &y);
		else
			order_place(order, number, &x, &y);
		i32 batch = y / parts;

		part = y - batch * parts;
		at.head = part * n_heads();
		at.enter_sequence(batch);
		if (HAS_DATA) {
			seen_by = find_key_block(order.n_x, batch, x, shared);
			x = seen_by.number;
		}
		first = x * C::TILE_N;
		tiles = ColumnTiles::of_rows(at.band, C::MASK, first, first + C::TILE_N - 1,
					     at.seq.n_q, C::TILE_M);
		n_seen = tiles.count;
		return first < at.seq.n_k;
	}

	/* A lane's arrival: a stage of Q is shared with LSE and D, which lanes write and read.
	 * racecheck does not see that those of a warp are ordered by wave_sync(), so that each
	 * speaks for itself. */
	METHOD void release_q(const Step &step) const { barrier_arrive(q_empty(step.q_stage())); }

	/* A warp's arrival. Its first lane's alone would order nothing that the others have read or
	 * written. */
	METHOD void release(u32 barrier) const
	{
		wave_sync();
		if (lane_id() == 0)
			barrier_arrive(barrier);
	}

	/* ---- the loading warpgroup ---- */

	template <int SLABS>
	METHOD void load_tile(u32 to, i32 slab, const TensorMap &map, u32 barrier, i32 row,
			      i32 of_head, i32 batch) const
	{
		UNROLL
		for (int n = 0; n < SLABS; n++)
			load_box(to + n * slab, map, barrier, n * SLAB_COLUMNS, row, of_head,
				 batch);
	}

	METHOD void load(const TensorMap &q, const TensorMap &k, const TensorMap &v,
			 const TensorMap &d_o) const
	{
		const Sequence &s = at.seq;
		i32 batch_q = s.packed_q ? 0 : s.batch, batch_k = s.packed_k ? 0 : s.batch;
		i32 key = s.k_start + s.leftpad + first, of_keys = head_k();
		Step step = first_step();

		barrier_expect(kv_full(), (Q_SLABS + V_SLABS) * K_SLAB);
		load_tile<Q_SLABS>(k_tile(), K_SLAB, k, kv_full(), key, of_keys, batch_k);
		load_tile<V_SLABS>(v_tile(), K_SLAB, v, kv_full(), key, of_keys, batch_k);
		NO_UNROLL
		for (i32 n = n_steps(); n > 0; n--, next(step)) {
			i32 row = s.q_start + query_of(step);

			i32 stage = step.q_stage();

			barrier_wait(q_empty(stage), step.q_parity() ^ 1);
			barrier_expect(q_full(stage), Q_BYTES);
			load_tile<Q_SLABS>(q_tile(stage), Q_SLAB, q, q_full(stage), row, step.head,
					   batch_q);
			stage = step.do_stage();
			barrier_wait(do_empty(stage), step.do_parity() ^ 1);
			barrier_expect(do_full(stage), DO_BYTES);
			load_tile<V_SLABS>(do_tile(stage), Q_SLAB, d_o, do_full(stage), row,
					   step.head, batch_q);
		}
	}

	/* A lane's rows whose LSE and D are on their way together: it has 24 registers. */
	static const int STATS_AT_ONCE = 2;
	static_assert(C::TILE_M % (STATS_AT_ONCE * FMHA_WAVE) == 0, "whole rounds");

	/* LSE and D, so that exp2(score * unit + LSE) is P: of two rows (LSE, LSE, D, D). Rows that
	 * see nothing may have any D. */
	METHOD void bring_stats() const
	{
		const int ROUNDS = C::TILE_M / FMHA_WAVE;
		const abi_rows &lse = at.a.lse, &d = at.a.d;
		Step step = first_step();

		NO_UNROLL
		for (i32 n = n_steps(); n > 0; n--, next(step)) {
			i32 row = query_of(step) + hidden_lane(lane_id()),
			    n_valid = at.seq.n_q - row;
			const float *from_lse = lse.data + rows_offset(lse, at.seq, row, step.head);
			const float *from_d = d.data + rows_offset(d, at.seq, row, step.head);

			NO_UNROLL
			for (i32 round = 0; round < ROUNDS; round += STATS_AT_ONCE) {
				float found[STATS_AT_ONCE][2];

				UNROLL
				for (int i = 0; i < STATS_AT_ONCE; i++) {
					const i32 r = (round + i) * FMHA_WAVE;

					found[i][0] = minus_infinity();
					found[i][1] = 0;
					if (r < n_valid) {
						found[i][0] = at.exponent_of(
							from_lse[r * lse.stride_seq]);
						found[i][1] = from_d[r * d.stride_seq];
					}
					if (found[i][0] == minus_infinity())
						found[i][1] = 0;
				}
				if (round == 0)
					barrier_wait(q_empty(step.q_stage()), step.q_parity() ^ 1);
				UNROLL
				for (int i = 0; i < STATS_AT_ONCE; i++) {
					i32 r = (round + i) * FMHA_WAVE + lane_id();
					u32 to = stats(step.q_stage()) + r / 2 * 16 + r % 2 * 4;

					store_shared(to, found[i][0]);
					store_shared(to + 8, found[i][1]);
				}
			}
			if constexpr (HAS_INTERVALS)
				if (hides(step))
					bring_seen_keys(step);
			barrier_arrive(q_full(step.q_stage()));
		}
	}
	/* One round of rows after the other: this warp has few registers, and time. A lane of
	 * products wants 16 keys of two queries in eight: of a wave's these lie together, see
	 * find_hidden(). */
	METHOD void bring_seen_keys(const Step &step) const
	{
		const u32 by = float_to_bits(
			load_shared(lds + BY_AT + ((step.run & (CUT - 1)) << 2)));

		NO_UNROLL
		for (i32 r = lane_id(); r < C::TILE_M; r += FMHA_WAVE) {
			u32 to = seen_keys(step.q_stage()) + r % 8 / 2 * 32 + r / 8 * 4 + r % 2 * 2;
			u32 seen[KEY_WORDS];

			find_keys(seen, query_of(step) + r, step.head, by);
			UNROLL
			for (int i = 0; i < 2 * KEY_WORDS; i++)
				store_shared_half(to + i * KEYS_OF_WAVE, seen[i / 2] >> i % 2 * 16);
		}
	}
	/* Which of the block's keys a row sees, of which its tile's rows see some by these
	 * intervals alone. */
	METHOD void find_keys(u32 (&seen)[KEY_WORDS], i32 row, i32 head, u32 by) const
	{
		const DataRow of = DataRow::make(at.a.mask_data, at.seq, row, head);

		UNROLL
		for (int w = 0; w < KEY_WORDS; w++)
			seen[w] = 0;
		NO_UNROLL
		for (; by; by &= by - 1) {
			const DataInterval x = of.at(__ffs(by) - 1);

			UNROLL
			for (int w = 0; w < KEY_WORDS; w++)
				seen[w] |= DataMask<C>::bits_of_32(x, first + 32 * w);
		}
	}

	/* One thread a warpgroup. */
	METHOD void send_dq(i32 group) const
	{
		i64 floats;
		float *head = dq_head_of(at.a, at.seq, part * n_heads(), &floats) +
			      DQ.part_at(group);
		u32 parity = 0;

		NO_UNROLL
		for (i32 n = n_heads(); n > 0; n--, head += floats) {
			NO_UNROLL
			for (Step step = first_step(0); step.tile < tiles.count; next_tile(step)) {
				float *tile = head + (i64)tile_of(step) * DQ_TILE;

				parity = send_tile(tile, group, parity, step);
			}
		}
	}
	METHOD u32 send_tile(float *part, i32 group, u32 parity, const Step &step) const
	{
		i32 n_blocks = DQ_BY_ROWS ? 1 : DQ.blocks(group);
		u32 *counter = (u32 *)(part + n_blocks * (DQ_BYTES / 4));

		NO_UNROLL
		for (i32 block = 0; block < n_blocks; block++, parity ^= 1) {
			barrier_wait(dq_full(group), parity);
			if (at.a.deterministic && block == 0)
				wait_for_turn(counter, turn_of(query_of(step)));
			add_bulk(part + block * (DQ_BYTES / 4), dq_part(group), DQ_BYTES);
			bulk_wait_read();
			barrier_arrive(dq_empty(group));
		}
		if (at.a.deterministic)
			end_turn(counter);
		return parity;
	}

	/* ROLES: one thread, whose chunks come one after the other by two buffers. */
	METHOD void send_chunks() const
	{
		i64 floats;
		float *head = dq_head_of(at.a, at.seq, part * n_heads(), &floats);
		u32 number = 0;

		NO_UNROLL
		for (i32 n = n_heads(); n > 0; n--, head += floats) {
			NO_UNROLL
			for (Step step = {0, 0, 0}; step.tile < tiles.count; step.tile++)
				number = send_chunks_of(head + (i64)tile_of(step) * DQ_TILE, number,
							step);
		}
	}
	METHOD u32 send_chunks_of(float *tile, u32 number, const Step &step) const
	{
		u32 *counter = (u32 *)(tile + DQ.blocks(0) * DQ.chunk_floats());

		NO_UNROLL
		for (i32 slab = 0; slab < Q_SLABS; slab++, number++) {
			i32 second = slab >= DQ.blocks(0) ? LDS_DQ_COUNTER : 0;

			barrier_wait(dq_full(number % 2), number / 2 & 1);
			if (at.a.deterministic && slab == 0)
				wait_for_turn(counter, turn_of(query_of(step)));
			add_bulk(tile + slab * DQ.chunk_floats() + second, dq_part(number % 2),
				 DQ_BYTES);
			bulk_wait_read();
			barrier_arrive(dq_empty(number % 2));
		}
		if (at.a.deterministic)
			end_turn(counter);
		return number;
	}

	/* How many blocks with smaller keys add to the tile of queries. */
	METHOD i32 turn_of(i32 query) const
	{
		i32 block = first / C::TILE_N;

		if (!C::MASK)
			return block;
		i32 seen = max_of(at.band.first(query), 0) / C::TILE_N;
		i32 sinks = min_of(ceil_div(at.band.sinks, C::TILE_N), seen);

		return block < seen ? block : block - seen + sinks;
	}

	/* ---- the warpgroups of products ---- */

	METHOD i32 group() const { return wave / 4; }
	METHOD void sync_group() const { named_sync(OWN_BARRIER + group(), GROUP_THREADS); }

	/* Rows from .. to - 1 of a tile become zero, as every warpgroup sees to for itself. */
	METHOD static void clear_rows(u32 tile, int slabs, i32 slab, i32 from, i32 to)
	{
		i32 thread = thread_id() % GROUP_THREADS;

		for (i32 r = from + thread / 8; r < to; r += GROUP_THREADS / 8)
			for (i32 s = 0; s < slabs; s++)
				store_zeros(tile + s * slab + r * 128 + thread % 8 * 16);
	}
	METHOD void cleared() const
	{
		fence_async();
		sync_group();
	}

	/* Keys that no query sees: whatever is in memory there must not reach dQ. */
	METHOD void clear_keys() const
	{
		const Band &band = at.band;
		i32 end = at.seq.n_q > 0 ? band.last(at.seq.n_q - 1) + 1 : 0,
		    begin = max_of(band.first(0), 0);

		end -= first;
		begin = C::MASK && first >= band.sinks ? begin - first : 0;
		if (begin <= 0 && end >= C::TILE_N)
			return;
		end = max_of(end, 0);
		begin = min_of(begin, C::TILE_N);
		clear_rows(k_tile(), Q_SLABS, K_SLAB, 0, begin);
		clear_rows(v_tile(), V_SLABS, K_SLAB, 0, begin);
		clear_rows(k_tile(), Q_SLABS, K_SLAB, end, C::TILE_N);
		clear_rows(v_tile(), V_SLABS, K_SLAB, end, C::TILE_N);
		cleared();
	}
	METHOD void clear_queries(u32 tile, int slabs, i32 query) const
	{
		i32 end = at.seq.n_q - query;

		if (end >= C::TILE_M)
			return;
		clear_rows(tile, slabs, Q_SLAB, end, C::TILE_M);
		cleared();
	}

	/* D^T of the warpgroup's keys: keys x the tile's columns. */
	template <int STEPS> METHOD static void start_scores(Scores &s, u32 keys, u32 queries)
	{
		start_along<Element, STEPS, K_SLAB, Q_SLAB>(s.t[0], wgmma_descriptor(keys, 0),
							    wgmma_descriptor(queries, 0));
	}
	METHOD u32 own_keys(u32 tile) const
	{
		return tile + (SHARED ? 0 : group() * slab_bytes(GROUP_KEYS));
	}
	METHOD void wait_for_q(const Step &step) const
	{
		barrier_wait(q_full(step.q_stage()), step.q_parity());
		clear_queries(q_tile(step.q_stage()), Q_SLABS, query_of(step));
	}
	METHOD void wait_for_do(const Step &step) const
	{
		barrier_wait(do_full(step.do_stage()), step.do_parity());
		clear_queries(do_tile(step.do_stage()), V_SLABS, query_of(step));
	}
	METHOD void start_s(Scores &s, const Step &step) const
	{
		start_scores<C::HDIM_Q / 16>(s, own_keys(k_tile()), q_tile(step.q_stage()));
	}
	METHOD void start_dp(Scores &dp, const Step &step) const
	{
		start_scores<C::HDIM_V / 16>(dp, own_keys(v_tile()), do_tile(step.do_stage()));
	}

	/* sum += P^T X, X: the tile's rows; BEGINS_SUMS, in the first step sum = P^T X. */
	template <int T>
	METHOD static void start_sum(RegTile<Core, 1, T> &sum, const Weights &p, u32 rows,
				     const Step &step)
	{
		u64 b = wgmma_descriptor(rows, Q_SLAB);

		settle(sum.t[0]);
		wgmma_begin();
		UNROLL
		for (int i = 0; i < TN; i++)
			if (BEGINS_SUMS && i == 0)
				Wgmma<Element, T>::across(sum.t[0], p.t[0][i].r, b, step.number);
			else
				Wgmma<Element, T>::across(sum.t[0], p.t[0][i].r,
							  b + i * STEP_ACROSS);
		wgmma_commit();
	}

	METHOD void start_dq(Dq &dq, i32 block, i32 stage) const
	{
		const int IN_SLAB = SLAB_COLUMNS / 16;
		u64 a = wgmma_descriptor(k_tile() + DQ.slab(group(), block) * K_SLAB, K_SLAB);
		u64 b = wgmma_descriptor(ds_tile(stage) + DQ.first_query(group()) * 128, 0);

		settle(dq.t);
		wgmma_begin();
		UNROLL
		for (int i = 0; i < C::TILE_N / 16; i++)
			Wgmma<Element, DQ_QUERIES / 16>::turned(
				dq.t, a + i * STEP_ACROSS,
				b + i / IN_SLAB * (Q_SLAB >> 4) + i % IN_SLAB * STEP_ALONG, i > 0);
		wgmma_commit();
	}

	/* DQ_BY_ROWS: all of it. */
	METHOD void start_all_dq(Dq &dq, i32 stage) const
	{
		const int IN_SLAB = SLAB_COLUMNS / 16;
		u64 a = wgmma_descriptor(ds_tile(stage), 0);
		u64 b = wgmma_descriptor(k_tile(), K_SLAB);

		settle(dq.t);
		wgmma_begin();
		UNROLL
		for (int i = 0; i < C::TILE_N / 16; i++)
			Wgmma<Element, TD>::mixed(dq.t,
						  a + i / IN_SLAB * (Q_SLAB >> 4) +
							  i % IN_SLAB * STEP_ALONG,
						  b + i * STEP_ACROSS, i > 0);
		wgmma_commit();
	}

	/* Where lse and d of elements are, for bwd_scores.h. */
	struct Stats {
		u32 from; /* of the lane's first column */

		METHOD float number(int n, int e, int which) const
		{
			return load_shared(from + (n * 8 + e / 4 * 4) * 16 + which * 8 + e % 2 * 4);
		}
		METHOD float lse(int, int n, int e) const { return number(n, e, 0); }
		METHOD float d(int, int n, int e) const { return number(n, e, 1); }
	};
	METHOD Stats stats_of(const Step &step) const
	{
		return Stats{stats(step.q_stage()) + lane_id() % 4 * 16};
	}

	struct Nothing {
		METHOD void operator()(int, int, i32, const typename Core::Acc &) const {}
	};

	METHOD bool is_masked(const Step &step) const
	{
		i32 query = query_of(step);

		if (first + C::TILE_N > at.band.end)
			return true;
		return C::MASK &&
		       !at.band.sees_all(query, min_of(query + C::TILE_M, at.seq.n_q) - 1, first,
					 C::TILE_N);
	}

	/* The lane's elements of a tile of scores that a mask that is data hides, a bit each. Asked
	 * for while products are under way. */
	METHOD u32 find_hidden(const Step &step) const
	{
		static_assert(!HAS_DATA || (TN == 4 && KEY_WORDS == 4), "a bit an element");
		if constexpr (!HAS_DATA)
			return 0;
		if (!hides(step))
			return 0;
		return HAS_INTERVALS ? hidden_by_intervals(step) : hidden_by_bits(step);
	}
	/* The n-th tile's e-th element of each: in the order of bits, of which eight become
	 * predicates at once. */
	template <class Do> METHOD static void each_hidden(u32 hidden, const Do &what)
	{
		UNROLL
		for (int bit = 0; bit < 32; bit++)
			if (hidden >> bit & 1)
				what(bit % 8 / 2, bit % 2 * 4 + bit / 8 % 2 * 2 + bit / 16);
	}
	METHOD u32 hidden_by_intervals(const Step &step) const
	{
		const i32 lane = lane_id();
		const u32 at = seen_keys(step.q_stage()) + wave * KEYS_OF_WAVE + lane % 4 * 32;
		u32 seen = 0;

		UNROLL
		for (int half = 0; half < 2; half++) {
			u32 x[4];

			load_shared_16(at + half * 16, x);
			UNROLL
			for (int i = 0; i < 4; i++)
				seen |= (x[i] >> lane / 4 & 0x01010101) << (half * 4 + i);
		}
		return ~seen;
	}
	/* A lane looks what some queries see of the wave's keys, which is far, and tells the
	 * others. */
	METHOD u32 hidden_by_bits(const Step &step) const
	{
		u32 keys[C::TILE_M / FMHA_WAVE], seen = 0;
		i32 lane = lane_id();

		UNROLL
		for (int i = 0; i < C::TILE_M / FMHA_WAVE; i++)
			keys[i] = at.mask_data().sees_16(query_of(step) + i * FMHA_WAVE + lane,
							 step.head, row_of(0));
		UNROLL
		for (int i = 0; i < TN * 4; i++) {
			const int place = i / 4 * 16 + i % 4 / 2 * 8 + i % 2;
			u32 x = shuffle_word(keys[place / FMHA_WAVE],
					     Core::column(0) + place % FMHA_WAVE) >>
				lane / 4;

			seen |= (x & 0x101) << (i / 2 + i % 2 * 16);
		}
		return ~seen;
	}

	/* S becomes P, but AT_ONCE. */
	METHOD void weigh(Scores &s, const Step &step, u32 hidden) const
	{
		weigh(s, step, hidden, LseThere());
	}
	template <class Lse>
	METHOD void weigh(Scores &s, const Step &step, u32 hidden, const Lse &lse) const
	{
		Steps{*this}.prepare(s, query_of(step), is_masked(step));
		if (HAS_DATA && hidden)
			each_hidden(hidden,
				    [&](int n, int e) { s.t[0][n].x[e] = minus_infinity(); });
		if (!AT_ONCE)
			raise<0, TN>(s, step, lse);
	}
	/* LSE of a lane's columns, in fours of rows: in shared memory, or asked for in front of
	 * S's products. Behind those of dP, which read all that shared memory gives, it is long in
	 * coming. Of HALVES the first: what comes behind the wait for dP waits for nothing. */
	struct LseThere {};
	struct LseHere {
		chunk8 of[HALVES ? TN : 2 * TN];
	};
	METHOD chunk8 lse_at(const Step &step, const LseThere &, int n, int h) const
	{
		return load_shared_8(stats_of(step).from + (n * 8 + h * 4) * 16);
	}
	METHOD chunk8 lse_at(const Step &, const LseHere &x, int n, int h) const
	{
		return x.of[2 * n + h];
	}
	METHOD LseHere fetch_lse(const Step &step) const
	{
		LseHere x;

		UNROLL
		for (int i = 0; i < (HALVES ? TN : 2 * TN); i++) /* lse_at() in order */
			x.of[i] = load_shared_8(stats_of(step).from + i * 64);
		return x;
	}

	/* Logits become P: tiles FROM to TO - 1. */
	template <int FROM, int TO, class Lse>
	METHOD void raise(Scores &s, const Step &step, const Lse &from) const
	{
		UNROLL
		for (int n = FROM; n < TO; n++)
			UNROLL
			for (int h = 0; h < 2; h++) {
				float *x = s.t[0][n].x + h * 4;
				chunk8 lse = lse_at(step, from, n, h);

				UNROLL
				for (int e = 0; e < 4; e++)
					x[e] = exp2_fast(x[e] * at.modifiers.unit +
							 bits_to_float(lse.w[e % 2]));
			}
	}

	/* dP becomes dS but for the scale; AT_ONCE, and S becomes P. */
	METHOD void differentiate(Scores &p, Scores &dp, const Step &step, u32 hidden = 0) const
	{
		if (AT_ONCE) {
			Steps{*this}.gradients(p, dp, query_of(step), is_masked(step),
					       stats_of(step), Nothing());
			if (HAS_DATA && hidden)
				each_hidden(hidden, [&](int n, int e) {
					p.t[0][n].x[e] = dp.t[0][n].x[e] = 0;
				});
			return;
		}
		/* Without a mask that is data nothing is hidden, and saying so would change the
		 * loop's machine code. */
		if (is_masked(step) || (!HAS_DATA && hidden))
			forget_unseen(p, dp);
		if (HAS_DATA && hidden)
			each_hidden(hidden, [&](int n, int e) { dp.t[0][n].x[e] = 0; });
		subtract<0, TN>(p, dp, step);
	}
	/* V may hold anything where a query does not look. */
	METHOD static void forget_unseen(const Scores &p, Scores &dp)
	{
		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int e = 0; e < Core::E; e++)
				if (p.t[0][n].x[e] == 0.0f)
					dp.t[0][n].x[e] = 0;
	}
	template <int FROM, int TO>
	METHOD void subtract(const Scores &p, Scores &dp, const Step &step) const
	{
		UNROLL
		for (int n = FROM; n < TO; n++)
			UNROLL
			for (int h = 0; h < 2; h++) {
				const float *weight = p.t[0][n].x + h * 4;
				float *x = dp.t[0][n].x + h * 4;
				chunk8 d = load_shared_8(stats_of(step).from +
							 (n * 8 + h * 4) * 16 + 8);

				UNROLL
				for (int e = 0; e < 4; e++)
					x[e] = weight[e] * (x[e] - bits_to_float(d.w[e % 2]));
			}
	}

	/* The second half of P, and dS: tile by tile, so that there are other instructions beside
	 * the exponentials. */
	template <int N = 0>
	METHOD void finish_halves(Scores &s, Scores &dp, const Step &step) const
	{
		if constexpr (N < TN / 2) {
			raise<TN / 2 + N, TN / 2 + N + 1>(s, step, LseThere());
			subtract<N, N + 1>(s, dp, step);
			finish_halves<N + 1>(s, dp, step);
		} else {
			subtract<TN / 2, TN>(s, dp, step);
		}
	}
	METHOD void differentiate_halves(Scores &s, Scores &dp, const Step &step) const
	{
		if (is_masked(step)) {
			raise<TN / 2, TN>(s, step, LseThere());
			forget_unseen(s, dp);
			subtract<0, TN>(s, dp, step);
		} else {
			finish_halves(s, dp, step);
		}
	}

	/* dS as rows of queries: a warpgroup's keys are a slab of columns. */
	METHOD void store_ds(const Weights &ds, i32 stage) const
	{
		/* Matrices 0 and 1: the keys' halves, 2 and 3: of the next eight queries. */
		i32 lane = lane_id(), query = lane / 16 * 8 + lane % 8,
		    chunk = wave % 4 * 2 + lane / 8 % 2;
		u32 to = ds_tile(stage) + (SHARED ? 0 : group() * Q_SLAB) + query * 128 +
			 (chunk ^ lane % 8) * 16;

		UNROLL
		for (int n = 0; n < TN; n++)
			store_matrix_transposed(to + n * 16 * 128, ds.t[0][n].r);
		fence_async();
	}

	/* S of the warpgroup's own keys is there: the product for dV begins, and dS is stored and
	 * returned. */
	template <class Lse>
	METHOD Weights start_gradients(Scores &s, Scores &dp, RegTile<Core, 1, TV> &dv,
				       const Step &step, u32 hidden, const Lse &lse) const
	{
		Weights p, ds;

		settle(s.t[0]);
		if (HALVES) {
			Steps{*this}.prepare(s, query_of(step), is_masked(step));
			raise<0, TN / 2>(s, step, lse);
		} else {
			weigh(s, step, hidden, lse);
		}
		/* Over already. Without a branch the assembler moves the softmax behind the wait
		 * for dP. */
		barrier_wait(do_full(step.do_stage()), step.do_parity());
		wgmma_wait<0>();
		settle(dp.t[0]);
		if (HALVES)
			differentiate_halves(s, dp, step);
		else
			differentiate(s, dp, step, hidden);
		if (TALL) { /* dS gives room for P */
			ds = round_to_operand(dp);
			store_ds(ds, step.ds_stage());
		}
		p = round_to_operand(s);
		start_sum(dv, p, do_tile(step.do_stage()), step);
		if (!TALL) {
			ds = round_to_operand(dp);
			store_ds(ds, step.ds_stage());
		}
		return ds;
	}

	/* The sender takes it from there. */
	METHOD void store_dq(const Dq &dq, u32 parity) const { store_chunk(dq, group(), parity); }
	METHOD void store_chunk(const Dq &dq, i32 buffer, u32 parity) const
	{
		u32 to = dq_part(buffer) + thread_id() % GROUP_THREADS * 16;

		barrier_wait(dq_empty(buffer), parity);
		UNROLL
		for (int j = 0; j < DQ_BYTES / (GROUP_THREADS * 16); j++)
			store_shared_16(to + j * (GROUP_THREADS * 16), dq.t[j / 2].x + j % 2 * 4);
		fence_async();
		release(dq_full(buffer));
	}

	typedef RegTile<Core, 1, TD> SumK;
	typedef RegTile<Core, 1, TV> SumV;

	/* Rows of a gradient, in chunks of 16 bytes. All heads that share keys are one part. */
	template <int T>
	METHOD void store(const RegTile<Core, 1, T> &sum, const abi_tensor &t, i32 hdim,
			  float factor) const
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 row = row_of(0) + Core::stat_row(r);
			u16 *to = (u16 *)t.data + k_offset(t, at.seq, row, part);

			UNROLL
			for (int d = 0; d < T; d += 2) {
				u32 x[4];
				i32 dim = d * 16 + lane_id() % 4 * 8;

				UNROLL
				for (int i = 0; i < 4; i++) {
					const float *pair = sum.t[0][d + i / 2].x + i % 2 * 4 +
							    2 * r;

					x[i] = Element::pack2(pair[0] * factor, pair[1] * factor);
				}
				turn_words(x, lane_id());
				if (row < at.seq.n_k && dim < hdim)
					*(chunk16 *)(to + dim) = chunk16{{x[0], x[1], x[2], x[3]}};
			}
		}
	}

	/* The same as they are, for convert_dq. */
	template <int T>
	METHOD void store_part(const RegTile<Core, 1, T> &sum, const abi_tensor &t, i32 hdim) const
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 row = row_of(0) + Core::stat_row(r);
			float *to = (float *)t.data + k_offset(t, at.seq, row, part) +
				    lane_id() % 4 * 2;

			UNROLL
			for (int i = 0; i < 2 * T; i++) {
				const float *pair = sum.t[0][i / 2].x + i % 2 * 4 + 2 * r;

				if (row < at.seq.n_k && i * 8 < hdim)
					*(chunk8 *)(to + i * 8) = chunk8{
						{float_to_bits(pair[0]), float_to_bits(pair[1])}};
			}
		}
	}

	METHOD void make_barriers() const
	{
		if (thread_id() == 0) {
			barrier_init(kv_full(), 1);
			UNROLL
			for (int i = 0; i < Q_STAGES; i++) {
				/* the copies; the warp that brings LSE and D */
				barrier_init(q_full(i), 1 + FMHA_WAVE);
				barrier_init(q_empty(i), READERS * FMHA_WAVE);
			}
			UNROLL
			for (int i = 0; i < DO_STAGES; i++) {
				barrier_init(do_full(i), 1);
				barrier_init(do_empty(i), READERS);
			}
			UNROLL
			for (int i = 0; i < GROUPS; i++) {
				barrier_init(dq_full(i), 4);
				barrier_init(dq_empty(i), 1);
			}
			barrier_publish();
		}
		block_sync();
	}

	/* The last warpgroup's roles. */
	METHOD void serve(const TensorMap &q, const TensorMap &k, const TensorMap &v,
			  const TensorMap &d_o) const
	{
		i32 role = wave_id() - C::WAVES_M;

		if (n_steps() == 0)
			return;
		if (role == 3)
			bring_stats();
		else if (lane_id() == 0 && role == 0)
			load(q, k, v, d_o);
		else if (ROLES && lane_id() == 0 && role == 1)
			send_chunks();
		else if (!ROLES && lane_id() == 0 && !(DQ_BY_ROWS && role == 2))
			send_dq(role - 1);
	}
};

#endif
