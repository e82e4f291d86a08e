/* SPDX-License-Identifier: MIT */
/*
 * fwd_latent.h: forward attention over latents on Hopper, as fwd_halves.h has it: every head looks
 * at the same keys, and the first elements of a key are its values. A tile of keys is brought once,
 * read along its rows for S = Q K^T and across them for O += P V, and no tile of V exists.
 *
 * Two tiles of keys and Q are all that shared memory has room for, so a place is filled again as
 * soon as it was read, part by part: the elements behind the values after S, each half of the
 * values after its product. The left half, which the next but one tile's scores begin with, has
 * come by the time that they are made.
 *
 * In pages a tile comes in boxes of as many rows as divide both a tile's and a page's, as in
 * fwd_wgmma.h. Each loading warp brings slabs of its own and looks up all pages of a tile.
 *
 * Keys that a row of queries has chosen (CHOSEN) lie anywhere, and loading warps copy them by 16
 * bytes to where boxes would have put them, a quarter of a tile's rows each. What an entry does not
 * name is zeros, and a bit of a word that the first warpgroup hides scores by.
 *
 * Latents of fp8 (LATENT_FP8), chosen or not, loading warps read themselves, a quarter of a tile's
 * rows each: what codes and factors multiply to is rounded once, to the queries' type, on its way
 * into the tile.
 *
 * Where all tiles are whole and by two of the same keys (PAIRED), blocks are clusters of two, and
 * each brings, or widens, half of every tile for both.
 */
#ifndef FMHA_GPU_FWD_LATENT_H
#define FMHA_GPU_FWD_LATENT_H

#include "fwd_halves.h"

template <class C> struct ForwardLatent : ForwardHalves<C, ForwardLatent<C>> {
	typedef ForwardHalves<C, ForwardLatent<C>> Halves;
	typedef typename Halves::Block Block;
	typedef typename Halves::Core Core;
	typedef typename Halves::Scores Scores;
	typedef typename Halves::Ring Ring;
	typedef typename Halves::Box Box;
	using Halves::band;
	using Halves::block;
	using Halves::GROUP_THREADS;
	using Halves::GROUP_WARPS;
	using Halves::HALF_SLABS;
	using Halves::lds;
	using Halves::SLAB;
	using Halves::SLABS;
	using Halves::THREADS;
	using Halves::TN;
	using Halves::warp;

	/* Slabs of a key: the left half of its values, the right one, the rest. */
	static const int REST = 2 * HALF_SLABS;
	static_assert(SLABS == REST + 1 && HALF_SLABS == GROUP_WARPS,
		      "a loading warp has one slab of each half");
	enum { LEFT, RIGHT, BEHIND, PARTS };
	static const int STAGES = LDS_LATENT_STAGES, TILE_BYTES = SLABS * SLAB;
	static const int K_AT = TILE_BYTES, WEIGHTS_AT = K_AT + STAGES * TILE_BYTES,
			 FACTORS_AT = WEIGHTS_AT + C::TILE_M * C::TILE_N * 2,
			 BARRIERS_AT = FACTORS_AT + 2 * 4 * GROUP_THREADS;
	static const int N_BARRIERS = 2 * PARTS * STAGES, SHARES_AT = BARRIERS_AT + N_BARRIERS * 8,
			 LDS = SHARES_AT + THREADS / FMHA_WAVE * 32;
	static_assert(SHARES_AT % 16 == 0, "four words at once");
	/* CHOSEN: which keys of a tile there are, a word a loading warp; shares have it else. */
	static const int THERE_AT = SHARES_AT, GATHERED = C::TILE_N / GROUP_WARPS;
	static_assert(GATHERED == 16, "a word for each chunk of scores");
	static_assert(LDS <= lds_latent(C::cut(C::TILE_M, C::TILE_N)) &&
			      lds_latent(C::cut(C::TILE_M, C::TILE_N)) <= C::LDS_BYTES,
		      "the host asks lds.h, too");
	static const int LOADER_REGISTERS = C::LATENT_FP8 ? 88 : C::CHOSEN ? 72 : 40;
	/* PAIRED: two tiles of rows have the same keys, and each block brings half of them for
	 * both. */
	static const int CLUSTER = C::PAIRED ? GRID_CLUSTER : 1, STARTED = 1;
	static_assert(!C::PAIRED || (!C::MASK && (C::LATENT_FP8 || !C::CHOSEN)),
		      "both tiles have as many keys, and they do not come by copies of a lane");

	METHOD ForwardLatent(const abi_fwd_args &args) : Halves(args) {}

	/* ---- the ring ---- */

	METHOD u32 k_tile(i32 stage) const { return lds + K_AT + stage * TILE_BYTES; }
	METHOD u32 v_tile(i32 stage) const { return k_tile(stage); }

	METHOD void release(i32 part, i32 stage) const
	{
		if (CLUSTER > 1) {
			if (lane_id() < CLUSTER)
				barrier_arrive_at(this->empty(part, stage), lane_id());
		} else if (lane_id() == 0) {
			barrier_arrive(this->empty(part, stage));
		}
	}

	METHOD static i32 rank() { return CLUSTER > 1 ? (i32)cluster_rank() : 0; }
	/* PAIRED: tiles side by side, of a split. */
	METHOD bool find_pieces()
	{
		if constexpr (CLUSTER == 1 || C::SHARES)
			return Halves::find_pieces();
		const i32 n = C::SPLIT ? max_of(block.a.n_splits, 1) : 1,
			  pair = (i32)block_id_x() / CLUSTER;

		block.locate((pair / n * CLUSTER + rank()) * n + pair % n, block_id_y(),
			     block_id_z());
		return !block.is_idle();
	}

	/* Whether a part comes by copies of every lane. */
	METHOD static constexpr bool is_copied(int part)
	{
		return C::LATENT_FP8 ? part == BEHIND : C::CHOSEN;
	}
	/* Of boxes a lane's of each warp that asks for some. Chosen keys: every lane's own copies,
	 * and with the left half the words. What was widened: a lane's of each warp. */
	METHOD static constexpr i32 arrivals(int part)
	{
		if (C::LATENT_FP8)
			return is_copied(part) ? GROUP_THREADS : GROUP_WARPS;
		if (C::CHOSEN)
			return GROUP_THREADS + (part == LEFT ? GROUP_WARPS : 0);
		return part == BEHIND ? 1 : GROUP_WARPS;
	}
	/* What warps copied by themselves products see behind a fence. */
	METHOD void wait_full(i32 part, const Ring &ring) const
	{
		barrier_wait(this->full(part, ring.stage), ring.parity);
		if (is_copied(part) || C::LATENT_FP8)
			fence_async();
	}
	/* The left half is there when scores are. */
	METHOD void wait_values(i32 part, const Ring &ring) const
	{
		if (part == RIGHT)
			wait_full(RIGHT, ring);
	}

	/* ---- the loading warpgroup ---- */

	/* Rows of a tile that this block brings, and the first. */
	static const int LOADED = C::TILE_N / CLUSTER;
	METHOD static i32 first_loaded() { return rank() * LOADED; }

	/* A block must not end while the other may still write to it: tma.h. Until both have
	 * released the last tiles. */
	METHOD void wait_for_peer(Ring &ring) const
	{
		if constexpr (CLUSTER > 1)
			for (int i = 0; i < STAGES; i++, ring.next())
				for (i32 part = 0; part < PARTS; part++)
					barrier_wait(this->empty(part, ring.stage), ring.parity);
	}

	/* A slab of a part, in boxes of @rows. */
	METHOD void load_slab(const TensorMap &k, i32 part, i32 slab, const Ring &ring,
			      const Box &box, i32 rows) const
	{
		u32 barrier = this->full(part, ring.stage);
		i32 row = lane_id() * rows;

		barrier_wait(this->empty(part, ring.stage), ring.parity);
		if (lane_id() == 0)
			barrier_expect(barrier, SLAB);
		wave_sync();
		if (row >= LOADED)
			return;
		u32 to = k_tile(ring.stage) + slab * SLAB + slab_bytes(first_loaded() + row);
		i32 entry = C::PAGED ? clamp(box.entry, 0, block.a.cache.n_pages) : box.entry;

		if (CLUSTER > 1)
			load_box_for((1 << CLUSTER) - 1, to, k, barrier, slab * SLAB_COLUMNS,
				     box.row, block.head_k, entry);
		else
			load_box(to, k, barrier, slab * SLAB_COLUMNS, box.row, block.head_k, entry);
	}

	METHOD void load(const TensorMap &k)
	{
		const i32 rows = C::PAGED ? lds_wgmma_box(LOADED, block.a.cache.page_size) : LOADED;
		Ring ring = {0, 1};

		this->each_piece([&](const ColumnTiles &tiles) {
			typename Block::Keys view;
			Box box = {};

			if (C::PAGED)
				view.set_pages(block.a.k, block.seq, block.a.cache, block.head_k,
					       block.a.nhead_k);
			if (tiles.count > 0)
				box = this->find_box(
					view, tiles.column(tiles.count - 1) + first_loaded(), rows);
			NO_UNROLL
			for (i32 n = tiles.count - 1; n >= 0; n--) {
				Box next = box;

				if (n > 0) /* on its way before the tile is waited for */
					next = this->find_box(
						view, tiles.column(n - 1) + first_loaded(), rows);
				if (warp == 0)
					load_slab(k, BEHIND, REST, ring, box, rows);
				load_slab(k, LEFT, warp, ring, box, rows);
				load_slab(k, RIGHT, HALF_SLABS + warp, ring, box, rows);
				ring.next();
				box = next;
			}
		});
		wait_for_peer(ring);
	}

	/* ---- the same of chosen keys ---- */

	METHOD u32 there_at(i32 stage) const { return lds + THERE_AT + stage * GROUP_WARPS * 4; }

	/* What the lane's row of tile n's quarter is, of chosen keys what the entry says: whoever
	 * asks is not to wait for that. Two lanes look at each. -1: nothing. */
	template <class View>
	METHOD i32 find_row(const View &view, const ColumnTiles &tiles, i32 n) const
	{
		i32 e = tiles.column(n) + warp * GATHERED + lane_id() % GATHERED;

		if constexpr (C::CHOSEN)
			return n >= 0 && e >= band.begin && e < band.end ? view.chosen_of(e) : -1;
		else
			return n >= 0 && e < block.seq.n_k ? e : -1;
	}
	/* The position or slot that it names. */
	template <class View> METHOD static i32 name_of(const View &view, i32 found)
	{
		if constexpr (C::CHOSEN)
			return view.name_of(found);
		else
			return found;
	}

	/* Eight lanes copy 128 bytes of a row: of every fourth row those that the lane copies, and
	 * bits of the sixteen that there are. */
	static const int AT_ONCE = FMHA_WAVE / 8, TURNS = GATHERED / AT_ONCE;
	struct Rows {
		u64 begin[TURNS];
		u32 there;
	};
	METHOD static Rows spread(u64 begin, bool is_there)
	{
		Rows rows;

		rows.there = __ballot_sync(0xffffffffu, is_there) & 0xffff;
		UNROLL
		for (int i = 0; i < TURNS; i++) {
			i32 from = i * AT_ONCE + lane_id() / 8;

			rows.begin[i] = (u64)shuffle_word((u32)(begin >> 32), from) << 32 |
					shuffle_word((u32)begin, from);
		}
		return rows;
	}

	METHOD void gather_slabs(i32 part, int from, int to, const Ring &ring,
				 const Rows &rows) const
	{
		i32 chunk = lane_id() % 8, row = lane_id() / 8;
		u32 at = k_tile(ring.stage) + from * SLAB +
			 (warp * GATHERED + row) * SLAB_WIDTH + (chunk ^ row) * 16;
		i32 dim = from * SLAB_COLUMNS + chunk * 8;

		barrier_wait(this->empty(part, ring.stage), ring.parity);
		UNROLL
		for (int slab = 0; slab < to - from; slab++, dim += SLAB_COLUMNS)
			UNROLL
			for (int i = 0; i < TURNS; i++) {
				bool valid = rows.there >> (i * AT_ONCE + row) & 1 &&
					     dim < block.a.hdim_q;

				/* four rows on, which the swizzle knows by one bit */
				copy_async_16((at ^ i % 2 * 64) + slab * SLAB +
						      i * AT_ONCE * SLAB_WIDTH,
					      (const char *)rows.begin[i] + dim * 2, valid);
			}
		if (part == LEFT && lane_id() == 0) {
			store_shared(there_at(ring.stage) + warp * 4, bits_to_float(rows.there));
			barrier_arrive(this->full(part, ring.stage));
		}
		barrier_arrive_copied(this->full(part, ring.stage));
	}

	/* Entries are read two tiles ahead, words of page tables one. */
	METHOD void gather()
	{
		const typename Block::Keys view = block.keys();
		Ring ring = {0, 1};

		this->each_piece([&](const ColumnTiles &tiles) {
			i32 n = tiles.count - 1, x = name_of(view, find_row(view, tiles, n)), word,
			    next = find_row(view, tiles, n - 1);

			word = view.word_of(x);
			NO_UNROLL
			for (; n >= 0; n--) {
				const Rows rows = spread((u64)view.begin_of(x, word), x >= 0);

				x = name_of(view, next);
				word = view.word_of(x);
				next = find_row(view, tiles, n - 2);
				gather_slabs(BEHIND, REST, SLABS, ring, rows);
				gather_slabs(LEFT, 0, HALF_SLABS, ring, rows);
				gather_slabs(RIGHT, HALF_SLABS, REST, ring, rows);
				ring.next();
			}
		});
		copy_async_commit();
		copy_async_wait();
	}

	/* ---- the same of latents of fp8 ---- */

	static const int HALF_CODES = ABI_LATENT_CODES / 2, RUN = 8; /* RUN: of a lane */
	static_assert(HALF_CODES == FMHA_WAVE * RUN && ABI_LATENT_BLOCK == HALF_CODES / 2,
		      "a warp has half of a key at once, and half of a warp a factor");

	/* A tile's quarter: where row lane % 16 begins, in chunks of 16 bytes behind the first key
	 * (gpu_maps.c: a word counts them), and bits of the rows that there are. */
	struct Latents {
		u32 place, there;
	};
	template <class View> METHOD static Latents place_of(const View &view, i32 x, i32 word)
	{
		return Latents{(u32)((u64)((const char *)view.begin_of(x, word) -
					   (const char *)view.base) /
				     16),
			       __ballot_sync(0xffffffffu, x >= 0) & 0xffff};
	}

	/* Of a quarter's rows those that this block widens. */
	static const int WIDENED = GATHERED / CLUSTER;
	METHOD static i32 first_widened() { return rank() * WIDENED; }

	/* Half of a tile's quarter on its way: a lane's codes of each row, and its row's factor. */
	struct Half {
		chunk8 codes[WIDENED];
		float factor;
	};
	/* All at once and behind what was widened before: whoever waits for a row in between would
	 * wait for these, too, and so would a fence. */
	METHOD static void ask(Half &x, i32 half, const char *base, const Latents &l)
	{
		const char *from = base + half * HALF_CODES + hidden(lane_id()) * RUN;
		const float *factors =
			(const float *)(base + (u64)l.place * 16 + ABI_LATENT_FACTORS);

		x.factor = 0.0f;
		if (l.there >> lane_id() % GATHERED & 1)
			x.factor = factors[half * 2 + lane_id() / GATHERED];
		UNROLL
		for (int i = 0; i < WIDENED; i++) {
			i32 row = first_widened() + i;
			const char *at = from + (u64)shuffle_word(l.place, row) * 16;

			x.codes[i] = chunk8{{0, 0}};
			if (l.there >> row & 1)
				x.codes[i] = *(const chunk8 *)at;
		}
	}
	/* Half of a tile that has no registers yet comes as far as L1: a lane asks for a sector.
	 * Where a key begins within one, its half before has brought that. */
	METHOD static void prefetch(i32 half, const char *base, const Latents &l)
	{
		i32 lane = hidden(lane_id());
		const char *from = base + half * HALF_CODES + 16 + lane % 8 * 32;

		UNROLL
		for (int i = 0; i < TURNS / CLUSTER; i++) {
			i32 row = first_widened() + i * AT_ONCE + lane / 8;
			const char *at = from + (u64)shuffle_word(l.place, row) * 16;

			if (l.there >> row & 1)
				prefetch_memory(at);
		}
	}
	METHOD static u32 widen_two(u32 codes, float factor)
	{
		return Halves::Element::pack2(F16::to_float((u16)codes) * factor,
					      F16::to_float((u16)(codes >> 16)) * factor);
	}
	METHOD void put(const Half &x, i32 half, i32 stage) const
	{
		i32 lane = hidden(lane_id());
		i32 first = first_widened();
		u32 at = k_tile(stage) + (half * HALF_SLABS + lane / 8) * SLAB +
			 (warp * GATHERED + first) * SLAB_WIDTH + lane % 8 * 16;
		static_assert(WIDENED % 8 == 0, "the swizzle of a row is known");
		u32 to_other = CLUSTER > 1 ? cluster_distance(at, rank() ^ 1) : 0;

		UNROLL
		for (int row = 0; row < WIDENED; row++) {
			/* of the lane's sixteen */
			float factor = __shfl_sync(0xffffffffu, x.factor, first + row, GATHERED);
			u32 y[4];

			Widening<F16, E4M3>::widen(x.codes[row].w[0], &y[0], &y[1]);
			Widening<F16, E4M3>::widen(x.codes[row].w[1], &y[2], &y[3]);
			UNROLL
			for (int w = 0; w < 4; w++)
				y[w] = widen_two(y[w], factor);
			store_shared_16((at ^ row % 8 * 16) + row * SLAB_WIDTH, y);
			if (CLUSTER > 1)
				store_to_block((at ^ row % 8 * 16) + row * SLAB_WIDTH + to_other, y,
					       this->full(half, stage) + to_other);
			if (row % 2 == 1) /* ptxas mixes no more rows than it has registers for */
				wave_sync();
		}
	}
	METHOD void arrive_written(i32 part, i32 stage) const
	{
		wave_sync();
		if (lane_id() != 0)
			return;
		if (CLUSTER > 1) /* and as many rows come from the other block */
			barrier_expect(this->full(part, stage), WIDENED * HALF_CODES * 2);
		else
			barrier_arrive(this->full(part, stage));
	}

	/* What lies behind the codes is bf16. */
	METHOD void put_rest(const char *base, const Latents &l, const Ring &ring) const
	{
		i32 lane = hidden(lane_id()), chunk = lane % 8, row = lane / 8;
		u32 at = k_tile(ring.stage) + REST * SLAB +
			 (warp * GATHERED + row) * SLAB_WIDTH + (chunk ^ row) * 16;

		barrier_wait(this->empty(BEHIND, ring.stage), ring.parity);
		UNROLL
		for (int i = 0; i < TURNS; i++) {
			const char *from = base +
					   (u64)shuffle_word(l.place, i * AT_ONCE + row) * 16 +
					   ABI_LATENT_REST + chunk * 16;
			u32 to = (at ^ i % 2 * 64) + i * AT_ONCE * SLAB_WIDTH;
			bool valid = l.there >> (i * AT_ONCE + row) & 1;

			if constexpr (SameType<typename Halves::Element, BF16>::value) {
				copy_async_16(to, from, valid);
			} else {
				chunk16 x = {{0, 0, 0, 0}};

				if (valid)
					x = load16(from);
				UNROLL
				for (int w = 0; w < 4; w++)
					x.w[w] = Halves::Element::pack2(
						BF16::to_float((u16)x.w[w]),
						BF16::to_float((u16)(x.w[w] >> 16)));
				store_shared_16(to, x.w);
			}
		}
		if constexpr (SameType<typename Halves::Element, BF16>::value)
			barrier_arrive_copied(this->full(BEHIND, ring.stage));
		else
			barrier_arrive(this->full(BEHIND, ring.stage));
	}

	/* Entries are read two tiles ahead, words of page tables one. */
	METHOD void widen()
	{
		Ring ring = {0, 1};

		this->each_piece([&](const ColumnTiles &tiles) {
			const typename Block::Keys view = block.keys();
			const char *base = (const char *)view.base;
			i32 n = tiles.count - 1, x = name_of(view, find_row(view, tiles, n)),
			    next = find_row(view, tiles, n - 1), word = view.word_of(x);
			Latents l = place_of(view, x, word);
			Half half;

			ask(half, LEFT, base, l);
			prefetch(RIGHT, base, l);
			NO_UNROLL
			for (; n >= 0; n--) {
				put_rest(base, l, ring);
				NO_UNROLL
				for (i32 part = LEFT; part <= RIGHT; part++) {
					barrier_wait(this->empty(part, ring.stage), ring.parity);
					put(half, part, ring.stage);
					if (C::CHOSEN && part == LEFT && lane_id() == 0)
						store_shared(there_at(ring.stage) + warp * 4,
							     bits_to_float(l.there));
					arrive_written(part, ring.stage);
					/* where nothing is on its way that would be waited for, too */
					if (part == LEFT) {
						x = name_of(view, next);
						word = view.word_of(x);
					} else {
						l = place_of(view, x, word);
						next = find_row(view, tiles, n - 2);
					}
					ask(half, RIGHT - part, base, l);
					if (part == RIGHT)
						prefetch(RIGHT, base, l);
				}
				ring.next();
			}
		});
		copy_async_commit();
		copy_async_wait();
		wait_for_peer(ring);
	}

	/* ---- scores ---- */

	/* In the order in which a tile comes: what lies behind the values and their left half, then
	 * the right one. */
	METHOD void start_scores(Scores &s, const Ring &ring) const
	{
		settle(s.t[0]);
		wait_full(BEHIND, ring);
		this->start_slabs(s, ring.stage, REST, SLABS, false);
		wait_full(LEFT, ring);
		this->start_slabs(s, ring.stage, 0, HALF_SLABS, true);
		wgmma_commit();
	}
	METHOD void finish_scores(Scores &s, const Ring &ring) const
	{
		wait_full(RIGHT, ring);
		this->start_slabs(s, ring.stage, HALF_SLABS, REST, true);
		wgmma_commit();
		wgmma_wait<0>();
		settle(s.t[0]);
		release(BEHIND, ring.stage);
	}

	/* CHOSEN: of entries that name no key. */
	METHOD void hide_absent(Scores &s, i32 stage) const
	{
		u32 there[TN];

		load_shared_16(there_at(stage), there);
		if ((there[0] & there[1] & there[2] & there[3]) == 0xffff)
			return;
		UNROLL
		for (int n = 0; n < TN; n++)
			UNROLL
			for (int e = 0; e < Core::E; e++)
				if (!(there[n] >> Core::column(0) >> (e % 2 + e / 4 * 8) & 1))
					s.t[0][n].x[e] = minus_infinity();
	}

	METHOD void run(char *memory, const TensorMap &k)
	{
		Halves::run(memory, [&] {
			if constexpr (C::LATENT_FP8)
				widen();
			else if constexpr (C::CHOSEN)
				gather();
			else
				load(k);
		});
	}
};

#if FMHA_PAIRED
#define FMHA_LATENT_CLUSTER __cluster_dims__(GRID_CLUSTER, 1, 1)
#else
#define FMHA_LATENT_CLUSTER
#endif

#define FMHA_OWN_ENTRY
#if FMHA_CHOSEN || FMHA_LATENT_FP8
extern "C" __global__ void FMHA_LATENT_CLUSTER FMHA_BOUNDS(ForwardLatent<Config>::THREADS, 1)
	FMHA_ENTRY(const abi_fwd_args args)
{
	FMHA_LDS;
	ForwardLatent<Config> kernel(args);

	kernel.run(lds, TensorMap()); /* which nobody looks at */
}
#else
/* Behind the arguments the map that gpu_maps.c describes. */
extern "C" __global__ void FMHA_LATENT_CLUSTER FMHA_BOUNDS(ForwardLatent<Config>::THREADS, 1)
	FMHA_ENTRY(const abi_fwd_args args, const __grid_constant__ TensorMap k)
{
	FMHA_LDS;
	ForwardLatent<Config> kernel(args);

	kernel.run(lds, k);
}
#endif

#endif
