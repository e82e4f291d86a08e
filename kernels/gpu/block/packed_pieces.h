/* SPDX-License-Identifier: MIT */
/*
 * packed_pieces.h: the pieces of work, tiles of rows of a head, of packed sequences, whose lengths
 * only the device knows: those with most work first, and none without rows. A piece's work is what
 * decides how many keys it sees: under a mask its place in the sequence, else the sequence's keys.
 * Of chunks, rows that are few beside their keys, it is the keys up to its last row. Warps look for
 * a piece together.
 */
#ifndef FMHA_GPU_PACKED_PIECES_H
#define FMHA_GPU_PACKED_PIECES_H

#include "core/geometry.h"

/* A sequence's tiles of rows. */
template <bool MASKED, int TILE_N> struct PackedTiles {
	typedef i32 Rows;
	i32 tiles, work;

	/* Tiles with at least so much work. */
	METHOD i32 count(i32 least) const
	{
		return MASKED ? max_of(tiles - least, 0) : work >= least ? tiles : 0;
	}
	METHOD static PackedTiles of(const abi_fwd_args &a, i32 sequence, i32 rows)
	{
		if (sequence >= a.sequences.batch)
			return PackedTiles{0, -1};
		Sequence v = find_sequence(a.sequences, &a.cache, sequence);

		return PackedTiles{ceil_div(v.n_q, rows), MASKED ? 0 : ceil_div(v.n_k, TILE_N)};
	}
};

/* Those of chunks. Work is counted in steps, of which there are few, so that a search is short: a
 * step is as many keys as some tiles have rows. */
struct ChunkTiles {
	static const i32 STEPS = 16; /* no tile has as many */
	/* Of a tile; a search divides by them often. */
	struct Rows {
		Divisor by;

		METHOD Rows(i32 rows) : by(Divisor::make(rows)) {}
		METHOD operator i32() const { return by.by; }
	};
	i32 tiles;
	u32 step, before; /* what the first tile has besides its own rows */

	METHOD i32 count(i32 least) const
	{
		u32 place = (u32)(least * step);

		return place > before ? tiles - (i32)min_of(place - before, (u32)tiles) : tiles;
	}
	METHOD static ChunkTiles of(const abi_fwd_args &a, i32 sequence, const Rows &rows)
	{
		if (sequence >= a.sequences.batch)
			return ChunkTiles{0, 0, 0};
		Sequence v = find_sequence(a.sequences, &a.cache, sequence);
		i32 longest = max_of(a.sequences.seqlen_k_max, a.sequences.seqlen_q_max),
		    keys = max_of(v.n_k - v.n_q, 0);

		/* A decode's tile of keys takes three fourths of the time of another one's. */
		keys -= v.n_q > rows ? 0 : keys / 4;
		return ChunkTiles{rows.by.quotient(v.n_q + rows - 1),
				  (u32)(rows.by.quotient(longest) / STEPS) + 1,
				  (u32)rows.by.quotient(keys)};
	}
};

/* CHUNKS: under a mask. */
template <bool MASKED, bool CHUNKS, int TILE_N> struct PackedPieces {
	/* A lane's sequence. */
	typedef typename Either<CHUNKS, ChunkTiles, PackedTiles<MASKED, TILE_N>>::Type Lengths;
	const abi_fwd_args &a;
	typename Lengths::Rows rows; /* of a sequence that a tile has */
	i32 heads;                   /* what tiles are counted for */

	METHOD Lengths lengths(i32 sequence) const { return Lengths::of(a, sequence, rows); }

	/* early: the first wave's. Others are read each time. */
	METHOD i32 count(const Lengths &early, i32 least) const
	{
		i32 n = sum_of_wave(early.count(least));

		NO_UNROLL
		for (i32 first = FMHA_WAVE; first < a.sequences.batch; first += FMHA_WAVE)
			n += sum_of_wave(lengths(first + lane_id()).count(least));
		return n;
	}

	/* Return: false when there are not so many. */
	METHOD bool find(i32 number, i32 *ret_sequence, i32 *ret_tile, i32 *ret_head) const
	{
		i32 place = number / heads; /* among tiles */
		i32 least = 0, too_much = CHUNKS   ? ChunkTiles::STEPS
					  : MASKED ? ceil_div(a.sequences.seqlen_q_max, (i32)rows)
						   : ceil_div(a.sequences.seqlen_k_max, TILE_N) + 1;
		i32 n_more = 0; /* tiles with more work */
		Lengths mine = lengths(lane_id());

		NO_UNROLL
		while (too_much - least > 1) {
			i32 middle = (least + too_much) / 2, n = count(mine, middle);

			if (n > place)
				least = middle;
			else
				too_much = middle, n_more = n;
		}
		NO_UNROLL
		for (i32 first = 0; first < a.sequences.batch; first += FMHA_WAVE) {
			if (first > 0)
				mine = lengths(first + lane_id());
			i32 n = mine.count(least) - mine.count(least + 1), up_to = n,
			    rank = place - n_more;

			n_more += sum_of_wave(n);
			if (place >= n_more)
				continue;
			UNROLL
			for (int step = 1; step < FMHA_WAVE; step *= 2) {
				i32 other = (i32)shuffle_word((u32)up_to,
							      max_of(lane_id() - step, 0));

				up_to += lane_id() >= step ? other : 0;
			}
			bool is_here = rank >= up_to - n && rank < up_to;
			i32 before = sum_of_wave(is_here ? place - rank + up_to - n : 0);

			*ret_sequence = sum_of_wave(is_here ? first + lane_id() : 0);
			if constexpr (CHUNKS) {
				/* Its tiles with more work are its last. */
				n = sum_of_wave(is_here ? mine.tiles - mine.count(least) : 0);
				*ret_tile = n + place - before;
				*ret_head = number - place * heads;
				return true;
			}
			n = sum_of_wave(is_here ? n : 0);
			/* All heads of a tile; or all tiles of a head, whose keys then stay in the
			 * cache. */
			number -= before * heads;
			*ret_tile = MASKED ? least : number % n;
			*ret_head = MASKED ? number : number / n;
			return true;
		}
		return false;
	}
};

#endif
