/* SPDX-License-Identifier: MIT */
/*
 * fwd_wide.h: forward attention on Hopper over heads of more than 256 elements, as fwd_halves.h has
 * it, with values of their own.
 *
 * One tile of keys, one of values and Q fill shared memory, so a place is filled again as soon as
 * it was read, part by part: slabs of keys while the later ones are still multiplied, each half of
 * the values behind its product. Two warps load keys and two values, so that none waits for what
 * comes later than its own.
 *
 * 64 rows multiply a tile in 2,048 clocks and read 128 KiB for it: more than L2 has for every
 * multiprocessor. So two blocks, the 128 rows behind each other, are a cluster: each brings half of
 * a tile's rows for both. They walk the tiles that either sees. A block whose neighbour has no rows
 * is alone, and brings all. Splits are of few rows, and blocks of theirs have no neighbours.
 *
 * Who waits for whom: products for what was loaded, loads for both blocks' products with the tile
 * before in that place, and nothing for a later tile. Both blocks go through the same tiles.
 */
#ifndef FMHA_GPU_FWD_WIDE_H
#define FMHA_GPU_FWD_WIDE_H

#include "fwd_halves.h"

template <class C> struct ForwardWide : ForwardHalves<C, ForwardWide<C>> {
	typedef ForwardHalves<C, ForwardWide<C>> Halves;
	typedef typename Halves::Block Block;
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
	using Halves::warp;
	static_assert(!C::CHOSEN && !C::DESCALE, "keys as they are, one tile behind the other");

	/* Blocks of a cluster. */
	static const int CLUSTER = C::SPLIT ? 1 : GRID_CLUSTER;

	/* Parts of a stage: keys by PART_SLABS slabs, in the order in which scores are summed, and
	 * both halves of the values. */
	static const int PART_SLABS = 2, LEFT = SLABS / PART_SLABS, RIGHT = LEFT + 1,
			 PARTS = RIGHT + 1;
	static_assert(SLABS % PART_SLABS == 0 && SLABS == 2 * HALF_SLABS, "as parts are cut");
	static const int STAGES = 1, STARTED = LEFT;
	static const int TILE_BYTES = SLABS * SLAB, K_AT = TILE_BYTES, V_AT = K_AT + TILE_BYTES,
			 WEIGHTS_AT = V_AT + TILE_BYTES,
			 FACTORS_AT = WEIGHTS_AT + C::TILE_M * C::TILE_N * 2,
			 BARRIERS_AT = FACTORS_AT + 2 * 4 * GROUP_THREADS,
			 SHARES_AT = BARRIERS_AT + (2 * PARTS * STAGES * 8 + 15) / 16 * 16,
			 LDS = SHARES_AT + THREADS / FMHA_WAVE * 32;
	static_assert(LDS <= lds_wide(C::cut(C::TILE_M, C::TILE_N)) &&
			      lds_wide(C::cut(C::TILE_M, C::TILE_N)) <= C::LDS_BYTES,
		      "the host asks lds.h, too");
	static const int LOADER_REGISTERS = 40;

	METHOD ForwardWide(const abi_fwd_args &args) : Halves(args) {}

	METHOD u32 k_tile(i32) const { return lds + K_AT; }
	METHOD u32 v_tile(i32) const { return lds + V_AT; }
	METHOD static constexpr i32 arrivals(int) { return 1; } /* the lane that asks for it */

	/* ---- the cluster ---- */

	METHOD static i32 rank() { return CLUSTER > 1 ? (i32)cluster_rank() : 0; }
	/* Whether the other block has rows, too: of two the first one has, or none. */
	METHOD bool has_peer() const
	{
		return CLUSTER > 1 && (rank() > 0 || block.tile_row + C::TILE_M < block.n_rows);
	}

	METHOD bool find_pieces()
	{
		if constexpr (CLUSTER == 1)
			return Halves::find_pieces();
		const abi_fwd_args &a = block.a;
		const i32 n = grid_clusters(grid_forward_of(&a, 1, 0, 0, C::TILE_M).n_tiles);
		i32 x = block_id_x() / CLUSTER, y = block_id_y();

		if (C::MASK)
			longest_first(n, a.nhead_k,
				      heads_at_once(a.sequences.seqlen_k_max, Block::KEY_BYTES,
						    a.nhead_k),
				      &x, &y);
		/* The last rows, which see most keys, come first. */
		block.place(find_sequence(a.sequences, &a.cache, block_id_z()),
			    (n - 1 - x) * CLUSTER + rank(), y, 0);
		return !block.is_idle();
	}

	/* Those that the rows of any of the cluster's blocks see. */
	METHOD ColumnTiles tiles() const
	{
		if constexpr (CLUSTER == 1)
			return Halves::tiles();
		i32 begin = block.tile_row - rank() * C::TILE_M;
		i32 last = min_of(begin + CLUSTER * C::TILE_M, block.n_rows) - 1;

		return ColumnTiles::make<C::MASK>(band, begin / block.q_per_k,
						  last / block.q_per_k, C::TILE_N);
	}

	/* Of both blocks; one that is alone counts twice. */
	METHOD void release(i32 part, i32 stage) const
	{
		if (CLUSTER == 1) {
			if (lane_id() == 0)
				barrier_arrive(this->empty(part, stage));
		} else if (lane_id() < CLUSTER) {
			barrier_arrive_at(this->empty(part, stage),
					  rank() ^ (has_peer() ? lane_id() : 0));
		}
	}

	METHOD void wait_values(i32 part, const Ring &ring) const
	{
		barrier_wait(this->full(part, ring.stage), ring.parity);
	}

	/* ---- the loading warpgroup ---- */

	/* The first row of a tile that this block brings, and how many. */
	METHOD i32 first_loaded() const { return has_peer() ? rank() * (C::TILE_N / CLUSTER) : 0; }
	METHOD i32 n_loaded() const { return has_peer() ? C::TILE_N / CLUSTER : C::TILE_N; }

	/* A part of a tile at @tile, @slabs from slab `first` on, in boxes of @rows. */
	METHOD void load_part(const TensorMap &map, u32 tile, i32 part, i32 first, i32 slabs,
			      const Ring &ring, const Box &box, i32 rows) const
	{
		const u32 barrier = this->full(part, ring.stage);
		const i32 row = lane_id() * rows;
		const i32 entry = C::PAGED ? clamp(box.entry, 0, block.a.cache.n_pages) : box.entry;

		barrier_wait(this->empty(part, ring.stage), ring.parity);
		if (lane_id() == 0)
			barrier_expect(barrier, slabs * SLAB);
		wave_sync();
		if (row >= n_loaded())
			return;
		u32 to = tile + first * SLAB + slab_bytes(first_loaded() + row);

		NO_UNROLL
		for (i32 slab = first; slab < first + slabs; slab++, to += SLAB)
			if (CLUSTER > 1)
				load_box_for(has_peer() ? (1 << CLUSTER) - 1 : 1 << rank(), to, map,
					     barrier, slab * SLAB_COLUMNS, box.row, block.head_k,
					     entry);
			else
				load_box(to, map, barrier, slab * SLAB_COLUMNS, box.row,
					 block.head_k, entry);
	}

	/* Of keys every other part, of values a half. */
	METHOD void load(const TensorMap &k, const TensorMap &v)
	{
		const i32 rows = C::PAGED ? lds_wgmma_box(C::TILE_N / CLUSTER,
							  block.a.cache.page_size)
					  : C::TILE_N / CLUSTER;
		const bool of_values = warp >= GROUP_WARPS / 2;
		const TensorMap &map = of_values ? v : k;
		const u32 tile = of_values ? v_tile(0) : k_tile(0);
		const i32 slabs = of_values ? HALF_SLABS : PART_SLABS, step = GROUP_WARPS / 2,
			  first = warp % step + (of_values ? LEFT : 0),
			  end = of_values ? first + 1 : LEFT;
		Ring ring = {0, 1};

		this->each_piece([&](const ColumnTiles &tiles) {
			typename Block::Keys view;
			Box box = {};

			if (C::PAGED)
				view.set_pages(block.a.k, block.seq, block.a.cache, block.head_k,
					       block.a.nhead_k);
			if (tiles.count > 0)
				box = this->find_box(view,
						     tiles.column(tiles.count - 1) + first_loaded(),
						     rows);
			NO_UNROLL
			for (i32 n = tiles.count - 1; n >= 0; n--) {
				Box next = box;

				if (n > 0) /* on its way before the tile is waited for */
					next = this->find_box(
						view, tiles.column(n - 1) + first_loaded(), rows);
				NO_UNROLL
				for (i32 part = first; part < end; part += step)
					load_part(map, tile, part,
						  of_values ? (part - LEFT) * HALF_SLABS
							    : part * PART_SLABS,
						  slabs, ring, box, rows);
				ring.next();
				box = next;
			}
		});
		/* Until both blocks have released the last tile: tma.h. */
		if (CLUSTER > 1)
			for (i32 part = first; part < end; part += step)
				barrier_wait(this->empty(part, ring.stage), ring.parity);
	}

	/* ---- scores ---- */

	/* Part by part, as they come. */
	METHOD void start_scores(Scores &s, const Ring &ring) const
	{
		settle(s.t[0]);
		UNROLL
		for (int part = 0; part < LEFT; part++) {
			barrier_wait(this->full(part, ring.stage), ring.parity);
			this->start_slabs(s, ring.stage, part * PART_SLABS,
					  (part + 1) * PART_SLABS, part > 0);
			wgmma_commit();
		}
	}
	/* And as they were read. */
	METHOD void finish_scores(Scores &s, const Ring &ring) const
	{
		finish_part<0>(ring);
		settle(s.t[0]);
	}
	template <int PART> METHOD void finish_part(const Ring &ring) const
	{
		if constexpr (PART < LEFT) {
			wgmma_wait<LEFT - 1 - PART>();
			release(PART, ring.stage);
			finish_part<PART + 1>(ring);
		}
	}

	METHOD void run(char *memory, const TensorMap &k, const TensorMap &v)
	{
		Halves::run(memory, [&] { load(k, v); });
	}
};

#if FMHA_SPLIT
#define FMHA_WIDE_CLUSTER
#else
#define FMHA_WIDE_CLUSTER __cluster_dims__(GRID_CLUSTER, 1, 1)
#endif

/* Behind the arguments the maps that gpu_maps.c describes. */
#define FMHA_OWN_ENTRY
extern "C" __global__ void FMHA_WIDE_CLUSTER FMHA_BOUNDS(ForwardWide<Config>::THREADS, 1)
	FMHA_ENTRY(const abi_fwd_args args, const __grid_constant__ TensorMap k,
		   const __grid_constant__ TensorMap v)
{
	FMHA_LDS;
	ForwardWide<Config> kernel(args);

	kernel.run(lds, k, v);
}

#endif
