/* SPDX-License-Identifier: MIT */
/*
 * fwd_wgmma.h: forward attention on Hopper. What a tile of scores means is in fwd_scores.h
 * and scores.h; here is how the products are fed. A block's last warpgroup loads: one thread asks the copy engine for tiles of Q, K and V. The others
 * own 64 rows each. The scores of the next tile of keys and O += P V of this one run one behind the other while
 * the softmax of those scores is computed, so that the tensor cores seldom wait.
 *
 * Tiles of keys are walked from the last to the first: those that a causal mask cuts come first. Blocks take
 * pieces of work (rows of one head) in turn: a grid of one block a multiprocessor keeps loading across them,
 * one block a piece leaves the order to the hardware.
 */
#ifndef FMHA_GPU_FWD_WGMMA_H
#define FMHA_GPU_FWD_WGMMA_H

#include "fwd_output.h"
#include "fwd_scores.h"
#include "wgmma.h"

template <class C> struct ForwardWgmma : ForwardBlock<C> {
	typedef ForwardBlock<C> Block;
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	using Block::a;
	using Block::head;
	using Block::head_k;
	using Block::n_rows;
	using Block::seq;
	using Block::tile_row;
	static const int TN = C::TILE_N / 16, TD = C::HDIM_V / 16;
	static_assert(C::TILE_M == 16 * C::WAVES_M && C::WAVES_N == 1, "a wave has 16 rows of its warpgroup's 64");
	static_assert(!C::PACK && !C::SPLIT && !C::PAGED && !C::DESCALE, "the copy engine brings rows of one head");
	typedef RegTile<Core, 1, TN> Scores;
	typedef OperandTile<Core, 1, TN> Weights;
	typedef ForwardScores<C, 1, TN> Steps;
	typedef Softmax<Core, 1, false> Rule;
	static const int GROUP_THREADS = 128, GROUPS = C::WAVES_M / 4, STAGES = LDS_WGMMA_STAGES;
	static const int THREADS = C::THREADS + GROUP_THREADS;

	static const int Q_SLAB = slab_bytes(C::TILE_M), K_SLAB = slab_bytes(C::TILE_N);
	static const int Q_SLABS = slabs_of(C::HDIM_Q), V_SLABS = slabs_of(C::HDIM_V);
	static const int Q_BYTES = Q_SLABS * Q_SLAB, K_BYTES = Q_SLABS * K_SLAB, V_BYTES = V_SLABS * K_SLAB;
	static const int Q_STAGES = lds_wgmma_queries(C::cut(C::TILE_M, C::TILE_N), C::LDS_BYTES);
	static const int K_AT = Q_STAGES * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES;
	static const int BARRIERS_AT = V_AT + STAGES * V_BYTES, LDS = BARRIERS_AT + LDS_WGMMA_BARRIERS;
	static_assert(LDS == lds_wgmma(C::cut(C::TILE_M, C::TILE_N), C::LDS_BYTES), "the host asks lds.h, too");
	static_assert((4 * STAGES + 2 * Q_STAGES) * 8 <= LDS_WGMMA_BARRIERS, "room for them");

	/* Registers of a thread: 64 Ki in all. */
	static const int LOADER_REGISTERS = GROUPS == 2 ? 24 : 32, PRODUCT_REGISTERS = GROUPS == 2 ? 240 : 160;
	static_assert(GROUPS == 2 || GROUPS == 3, "their registers are known");

	/* Warpgroups start products in turn, so that one's softmax runs beside another's products. Products of large
	 * tiles are long enough without. */
	static const bool TURNS = C::TILE_N < 192;

	/* Named barriers: a warpgroup's own, and its turn at the tensor cores. */
	static const int OWN_BARRIER = 1, TURN_BARRIER = OWN_BARRIER + GROUPS;

	u32 lds; /* address in shared memory */
	i32 wave_m;
	Band band;
	Modifiers<C> modifiers;
	RegTile<Core, 1, TD> o;
	SoftmaxRows<Core, 1> rows;
	typename Block::Keys keys; /* for Steps, which asks it for pages and nothing else */

	METHOD ForwardWgmma(const abi_fwd_args &args) : Block(args) {}

	METHOD i32 wave_row() const { return tile_row + wave_m * 16; }

	/* A tile's barriers: it is there; nobody reads it any more. */
	METHOD u32 barrier(i32 number) const { return lds + BARRIERS_AT + number * 8; }
	METHOD u32 k_full(i32 stage) const { return barrier(stage); }
	METHOD u32 k_empty(i32 stage) const { return barrier(STAGES + stage); }
	METHOD u32 v_full(i32 stage) const { return barrier(2 * STAGES + stage); }
	METHOD u32 v_empty(i32 stage) const { return barrier(3 * STAGES + stage); }
	METHOD u32 q_full(i32 stage) const { return barrier(4 * STAGES + stage); }
	METHOD u32 q_empty(i32 stage) const { return barrier(4 * STAGES + Q_STAGES + stage); }
	METHOD u32 k_tile(i32 stage) const { return lds + K_AT + stage * K_BYTES; }
	METHOD u32 v_tile(i32 stage) const { return lds + V_AT + stage * V_BYTES; }
	METHOD u32 q_tile(i32 stage) const { return lds + stage * Q_BYTES; }

	/* Where a walk over tiles of keys is in the ring of stages. */
	template <int N> struct Ring {
		i32 stage;
		u32 parity;

		METHOD void next()
		{
			stage++;
			if (stage == N)
				stage = 0, parity ^= 1;
		}
	};
	typedef Ring<STAGES> KeyRing;
	typedef Ring<Q_STAGES> QueryRing;

	METHOD i32 pieces() const { return grid_pieces(&a, C::TILE_M); }

	/*
	 * The piece of work of this number; false: there are no such rows. Under a mask all long ones come first,
	 * unless going back and forth gives every block the same anyway: then a head's pieces stay together, and its
	 * keys in the cache.
	 */
	METHOD bool locate(i32 number, ColumnTiles *ret_tiles)
	{
		i32 n_x = ceil_div(a.sequences.seqlen_q_max, C::TILE_M), n_y = a.nhead_q * a.sequences.batch;
		i32 n_blocks = (i32)gridDim.x;
		bool by_length = C::MASK && (n_blocks >= pieces() || n_blocks % n_x != 0);
		i32 n = by_length ? n_y : n_x, quotient = number / n, remainder = number - quotient * n;
		i32 y = by_length ? remainder : quotient, batch = y / a.nhead_q;

		tile_row = (n_x - 1 - (by_length ? quotient : remainder)) * C::TILE_M;
		head = y - batch * a.nhead_q;
		seq = find_sequence(a.sequences, &a.cache, batch);
		n_rows = seq.n_q;
		if (tile_row >= n_rows || seq.n_q < a.min_seqlen_q)
			return false;
		band = Band::make<C::MASK>(a.band, seq, 0, seq.n_k);
		*ret_tiles = ColumnTiles::make<C::MASK>(band, tile_row, last_row(), C::TILE_N);
		if (ret_tiles->count == 0) /* rows that see nothing: one tile, all masked */
			*ret_tiles = ColumnTiles{C::TILE_N, 0, 0, 0, 1};
		return true;
	}

	/* This block's next piece, back and forth over the blocks, so that each gets long and short ones. round: of
	 * pieces; before the first, 0. */
	METHOD bool next_piece(i32 *round, ColumnTiles *ret_tiles)
	{
		for (;;) {
			i32 n = (i32)gridDim.x, start = *round * n;
			i32 number = start + (*round & 1 ? n - 1 - block_id_x() : block_id_x());

			if (start >= pieces())
				return false;
			++*round;
			if (number < pieces() && locate(number, ret_tiles))
				return true;
		}
	}
	METHOD i32 last_row() const { return min_of(tile_row + C::TILE_M, n_rows) - 1; }

	/* ---- the loading warpgroup ---- */

	template <int SLABS>
	METHOD void load_tile(u32 to, i32 slab, const TensorMap &map, u32 barrier, i32 row, i32 of_head,
			      i32 batch) const
	{
		barrier_expect(barrier, SLABS * slab);
		UNROLL
		for (int n = 0; n < SLABS; n++)
			load_box(to + n * slab, map, barrier, n * SLAB_COLUMNS, row, of_head, batch);
	}

	METHOD void load(const TensorMap &q, const TensorMap &k, const TensorMap &v)
	{
		KeyRing keys = {0, 1}, values = {0, 1};
		QueryRing queries = {0, 1};
		i32 round = 0;
		ColumnTiles tiles;

		while (next_piece(&round, &tiles)) {
			head_k = head / (a.nhead_q / a.nhead_k);
			i32 row = seq.k_start + seq.leftpad, batch = seq.packed_k ? 0 : seq.batch;

			if (a.cache.cache_batch_idx)
				batch = clamp(a.cache.cache_batch_idx[seq.batch], 0, a.cache.cache_batch - 1);
			NO_UNROLL
			for (i32 n = tiles.count; n >= 0; n--) {
				if (n > 0) {
					barrier_wait(k_empty(keys.stage), keys.parity);
					load_tile<Q_SLABS>(k_tile(keys.stage), K_SLAB, k, k_full(keys.stage),
							   row + tiles.column(n - 1), head_k, batch);
					keys.next();
				}
				if (n == tiles.count) {
					barrier_wait(q_empty(queries.stage), queries.parity);
					load_tile<Q_SLABS>(q_tile(queries.stage), Q_SLAB, q, q_full(queries.stage),
							   seq.q_start + tile_row, head,
							   seq.packed_q ? 0 : seq.batch);
					queries.next();
				} else {
					barrier_wait(v_empty(values.stage), values.parity);
					load_tile<V_SLABS>(v_tile(values.stage), K_SLAB, v, v_full(values.stage),
							   row + tiles.column(n), head_k, batch);
					values.next();
				}
			}
		}
	}

	/* ---- the warpgroups of products ---- */

	METHOD i32 warpgroup() const { return wave_m / 4; }

	METHOD void release(u32 barrier) const
	{
		if (lane_id() == 0)
			barrier_arrive(barrier);
	}

	METHOD void start_scores(Scores &s, i32 q_stage, i32 k_stage) const
	{
		u64 q = wgmma_descriptor(q_tile(q_stage) + warpgroup() * slab_bytes(64), 0);
		u64 k = wgmma_descriptor(k_tile(k_stage), 0);
		const int STEPS = SLAB_COLUMNS / 16;

		settle(s.t[0]);
		wgmma_begin();
		UNROLL
		for (int i = 0; i < C::HDIM_Q / 16; i++)
			Wgmma<Element, TN>::along(s.t[0],
						  q + i / STEPS * (Q_SLAB >> 4) + i % STEPS * STEP_ALONG,
						  k + i / STEPS * (K_SLAB >> 4) + i % STEPS * STEP_ALONG, i > 0);
		wgmma_commit();
	}

	METHOD void start_output(const Weights &p, i32 stage)
	{
		u64 v = wgmma_descriptor(v_tile(stage), K_SLAB);

		settle(o.t[0]);
		wgmma_begin();
		UNROLL
		for (int i = 0; i < TN; i++)
			Wgmma<Element, TD>::across(o.t[0], p.t[0][i].r, v + i * STEP_ACROSS);
		wgmma_commit();
	}

	/* V's rows that no row of the block sees, see fwd_block.h: where the copy brought them they become zero.
	 * Every warpgroup does so for itself. */
	METHOD void clear_unseen(i32 stage, i32 column, const Reach<C> &reach) const
	{
		i32 begin = reach.first_value(band, column) - column, end = reach.end_of_values(band) - column;

		if (begin <= 0 && end >= C::TILE_N)
			return;
		i32 thread = thread_id() % GROUP_THREADS;
		const int CHUNKS = V_SLABS * 8; /* a thread keeps to one chunk of 16 bytes */

		for (i32 r = thread / CHUNKS; r < C::TILE_N; r += GROUP_THREADS / CHUNKS)
			if (r < begin || r >= end)
				store_zeros(v_tile(stage) + thread % CHUNKS / 8 * K_SLAB + r * 128 +
					    thread % 8 * 16);
		fence_async();
		named_sync(OWN_BARRIER + warpgroup(), GROUP_THREADS);
	}
	METHOD static void store_zeros(u32 at)
	{
		asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
	}

	/* As fwd_scores.h's, of a block that sees the sequence from its first column on; constants are compared with what
	 * the lane's place leaves of the band's edges. */
	METHOD void mask(Scores &s, i32 column) const
	{
		i32 from = column + Core::column(0);

		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 row = wave_row() + Core::stat_row(r);
			i32 first = band.first(row) - from, last = band.last(row) - from, sinks = band.sinks - from;

			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					const int j = n * 16 + e % 2 + e / 4 * 8;

					if (Core::stat(e) == r &&
					    (j > last || (C::MASK && j < first && j >= sinks)))
						s.t[0][n].x[e] = minus_infinity();
				}
		}
	}

	/* As fwd_scores.h's. There every element finds its distance from the diagonal as an integer and divides by the cap;
	 * here that costs more than the products. */
	METHOD void make_logits(Scores &s, i32 column) const
	{
		float slope = C::BIAS == BIAS_ALIBI ? load_memory(modifiers.slopes + head) : 0.0f;
		float cap_inverse = C::SOFTCAP ? reciprocal(modifiers.soft_cap) : 0.0f;

		if (C::BIAS == BIAS_MATRIX)
			return steps().make_logits(s, wave_row(), column);
		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 row = wave_row() + Core::stat_row(r);
			float distance = (float)(row + modifiers.diagonal - column - Core::column(0));

			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++) {
					const float j = n * 16 + e % 2 + e / 4 * 8;
					float &x = s.t[0][n].x[e];

					if (Core::stat(e) != r)
						continue;
					x *= modifiers.scale;
					if (C::SOFTCAP)
						x = modifiers.soft_cap * tanh_of(x * cap_inverse);
					if (C::BIAS == BIAS_ALIBI)
						x -= slope * magnitude_of(distance - j);
				}
		}
	}

	METHOD Steps steps() const { return Steps{*this, keys, modifiers}; }

	/* Scores become weights, but for their rounding. */
	METHOD void weigh(Scores &s, i32 column, const Reach<C> &mine, RowVector<Core, 1> *factor)
	{
		if (C::LOGITS)
			make_logits(s, column);
		if (column < mine.begin || column + C::TILE_N > mine.end)
			mask(s, column);
		Rule::update(rows, s, modifiers.unit, factor);
		if (C::DROPOUT)
			steps().drop(s, wave_row(), column);
	}

	/* The columns that all of the rows first .. last see. */
	METHOD Reach<C> reach_of(i32 first, i32 last) const
	{
		return Reach<C>{first, last, band.first(last), band.last(first) + 1};
	}

	METHOD void take_turn() const
	{
		if (TURNS)
			named_sync(TURN_BARRIER + warpgroup(), 2 * GROUP_THREADS);
	}
	METHOD void give_turn() const
	{
		if (TURNS)
			named_arrive(TURN_BARRIER + (warpgroup() + 1) % GROUPS, 2 * GROUP_THREADS);
	}

	METHOD void walk(const ColumnTiles &tiles, KeyRing &keys, KeyRing &values, QueryRing &queries)
	{
		const Reach<C> block = reach_of(tile_row, last_row());
		i32 first = tile_row + warpgroup() * 64;
		const Reach<C> mine = reach_of(first, min_of(first + 63, last_row()));
		i32 n = tiles.count - 1, column = tiles.column(n);
		RowVector<Core, 1> factor;
		Scores s;
		Weights p;

		barrier_wait(q_full(queries.stage), queries.parity);
		barrier_wait(k_full(keys.stage), keys.parity);
		start_scores(s, queries.stage, keys.stage);
		wgmma_wait<0>();
		settle(s.t[0]);
		release(k_empty(keys.stage));
		keys.next();
		weigh(s, column, mine, &factor);
		p = round_to_operand(s);
		if (n > 0)
			barrier_wait(k_full(keys.stage), keys.parity);
		NO_UNROLL
		while (--n >= 0) {
			i32 before = column;

			column = tiles.column(n);
			take_turn();
			start_scores(s, queries.stage, keys.stage);
			barrier_wait(v_full(values.stage), values.parity);
			clear_unseen(values.stage, before, block);
			start_output(p, values.stage);
			give_turn();
			wgmma_wait<1>();
			settle(s.t[0]);
			release(k_empty(keys.stage));
			keys.next();
			weigh(s, column, mine, &factor);
			settle(s.t[0]);
			/* Here, not before the product: without a branch the assembler moves the softmax behind
			 * the wait for O, and nothing overlaps. */
			if (n > 0)
				barrier_wait(k_full(keys.stage), keys.parity);
			wgmma_wait<0>();
			settle(o.t[0]);
			release(v_empty(values.stage));
			values.next();
			scale_rows(o, factor);
			p = round_to_operand(s);
		}
		release(q_empty(queries.stage));
		queries.next();
		barrier_wait(v_full(values.stage), values.parity);
		clear_unseen(values.stage, column, block);
		start_output(p, values.stage); /* under way when this returns */
	}

	/* Four words of four neighbouring lanes, turned: lane c has what word c of each was. */
	METHOD static void turn(u32 (&x)[4])
	{
		i32 lane = lane_id();

		UNROLL
		for (int step = 1; step <= 2; step *= 2)
			UNROLL
			for (int i = 0; i < 2; i++) {
				u32 &low = x[step == 1 ? 2 * i : i], &high = x[step == 1 ? 2 * i + 1 : i + 2];
				u32 sent = shuffle_word(lane & step ? low : high, lane ^ step);

				if (lane & step)
					low = sent;
				else
					high = sent;
			}
	}

	/* Where a lane's rows of O go, 0: nowhere, and what they are multiplied by. */
	struct Results {
		u16 *to[2];
		float factor[2];
	};

	/* LSE is stored at once. */
	METHOD Results finish_rows()
	{
		ForwardOutput<C, 1> output = {*this, o, rows, modifiers.unit, wave_m};
		Results results;

		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 row = wave_row() + Core::stat_row(r);
			float sum = Core::row_sum(rows.l(0, r)), lse;

			results.factor[r] = output.finish_row(rows.m(0, r), sum, head, &lse);
			results.to[r] = 0;
			if (row < n_rows) {
				results.to[r] = (u16 *)a.o.data + q_offset(a.o, seq, row, head);
				if (lane_id() % 4 == 0)
					output.store_lse(RowPlace{row, head}, lse);
			}
		}
		return results;
	}

	METHOD void store_output(const Results &results) const
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			float factor = results.factor[r];

			UNROLL
			for (int d = 0; d < TD; d += 2) {
				u32 x[4];
				i32 dim = d * 16 + lane_id() % 4 * 8;

				UNROLL
				for (int i = 0; i < 4; i++) {
					const float *pair = o.t[0][d + i / 2].x + i % 2 * 4 + 2 * r;

					x[i] = factor == 0.0f ? 0
							      : Element::pack2(pair[0] * factor, pair[1] * factor);
				}
				turn(x);
				if (results.to[r] && dim < a.hdim_v)
					*(chunk16 *)(results.to[r] + dim) = chunk16{{x[0], x[1], x[2], x[3]}};
			}
		}
	}

	METHOD void multiply()
	{
		KeyRing keys = {0, 0}, values = {0, 0};
		QueryRing queries = {0, 0};
		i32 round = 0;
		ColumnTiles tiles;

		wave_m = wave_id();
		if (TURNS && warpgroup() == GROUPS - 1)
			give_turn();
		for (bool more = next_piece(&round, &tiles); more;) {
			modifiers = Modifiers<C>::make(a, seq);
			o.zero();
			rows.init();
			if (C::DROPOUT && a.dropout.randval.data)
				store_randval<C>(*this);
			walk(tiles, keys, values, queries);
			Results results = finish_rows();
			more = next_piece(&round, &tiles);
			wgmma_wait<0>();
			settle(o.t[0]);
			release(v_empty(values.stage));
			values.next();
			store_output(results);
		}
	}

	METHOD void make_barriers() const
	{
		if (thread_id() == 0) {
			UNROLL
			for (int i = 0; i < Q_STAGES; i++) {
				barrier_init(q_full(i), 1);
				barrier_init(q_empty(i), C::WAVES_M);
			}
			UNROLL
			for (int i = 0; i < STAGES; i++) {
				barrier_init(k_full(i), 1);
				barrier_init(v_full(i), 1);
				barrier_init(k_empty(i), C::WAVES_M);
				barrier_init(v_empty(i), C::WAVES_M);
			}
			barrier_publish();
		}
		block_sync();
	}

	METHOD void run(char *memory, const TensorMap &q, const TensorMap &k, const TensorMap &v)
	{
		lds = shared_address(memory);
		make_barriers();
		if (wave_id() >= C::WAVES_M) {
			give_registers<LOADER_REGISTERS>();
			if (thread_id() == C::THREADS)
				load(q, k, v);
		} else {
			take_registers<PRODUCT_REGISTERS>();
			multiply();
		}
	}
};

/* Behind the arguments the maps that gpu_maps.c describes. */
#define FMHA_OWN_ENTRY
extern "C" __global__ void FMHA_BOUNDS(ForwardWgmma<Config>::THREADS, 1)
	FMHA_ENTRY(const abi_fwd_args args, const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
		   const __grid_constant__ TensorMap v)
{
	FMHA_LDS;
	ForwardWgmma<Config> kernel(args);

	kernel.run(lds, q, k, v);
}

#endif
