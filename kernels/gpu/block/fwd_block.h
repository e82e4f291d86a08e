/* SPDX-License-Identifier: MIT */
/*
 * fwd_block.h: where in the problem a block of forward attention is, whatever its main loop: TILE_M
 * query rows of one head (or of all heads that share keys, PACK) and the keys that they see.
 */
#ifndef FMHA_GPU_FWD_BLOCK_H
#define FMHA_GPU_FWD_BLOCK_H

#include "mask_data.h"

template <class C> struct ForwardBlock {
	typedef typename C::Element Element;
	typedef typename C::KeyElement KeyElement;
	typedef KeyView<KeyElement, C::PAGED> AllKeys;
	typedef typename Either<C::CHOSEN, ChosenView<KeyElement, C::PAGED>, AllKeys>::Type
		SeenKeys;
	typedef typename Either<C::LATENT_FP8, LatentView<SeenKeys>, SeenKeys>::Type Keys;
	static_assert(!C::CHOSEN || C::PACK, "the rows of a tile have chosen the same keys");
	typedef QueryView<Element, C::PACK> Queries;
	static const int KEY_BYTES = (C::HDIM_Q + C::HDIM_V) *
				     (int)sizeof(typename KeyElement::Storage);

	const abi_fwd_args &a;
	Sequence seq;
	i32 tile_row; /* of the block, in (packed) rows */
	i32 n_rows;   /* (packed) rows of the sequence */
	i32 head, head_k, q_per_k, split; /* q_per_k: heads that share keys */

	METHOD ForwardBlock(const abi_fwd_args &args) : a(args) {}

	METHOD void locate(i32 x, i32 y, i32 z)
	{
		const struct grid_forward grid =
			grid_forward_of(&a, C::PACK, C::SPLIT, C::CHOSEN, C::TILE_M);

		q_per_k = a.nhead_q / a.nhead_k;
		if (C::MASK)
			longest_first(
				grid.n_tiles * grid.n_splits, C::PACK ? a.nhead_k : a.nhead_q,
				heads_at_once(a.sequences.seqlen_k_max, KEY_BYTES, a.nhead_k) *
					(C::PACK ? 1 : q_per_k),
				&x, &y);
		split = C::SPLIT ? x % grid.n_splits : 0;
		tile_row = grid_forward_tile(grid, x) * C::TILE_M;
		head_k = C::PACK ? y : y / q_per_k;
		head = C::PACK ? head_k * q_per_k : y;
		seq = find_sequence(a.sequences, &a.cache, z);
		n_rows = C::PACK ? seq.n_q * q_per_k : seq.n_q;
		if constexpr (C::CHOSEN)
			locate_row(grid_forward_tile(grid, x));
	}

	/* CHOSEN: the tile has heads of one row. */
	METHOD void locate_row(i32 tile)
	{
		i32 tiles = ceil_div(q_per_k, C::TILE_M), row = tile / tiles;

		tile_row = row * q_per_k + tile % tiles * C::TILE_M;
		n_rows = min_of(n_rows, (row + 1) * q_per_k);
		/* Of no keys none are looked at: there may be no memory behind them. */
		seq.n_k = n_stored() > 0 ? a.chosen.n : 0;
	}
	/* CHOSEN: what a row may choose from; seq has as many keys as it does choose. */
	METHOD i32 n_stored() const
	{
		const i64 slots = (i64)a.cache.n_pages * a.cache.page_size, most = 0x7fffffff;

		if (a.chosen.are_slots)
			return (i32)(slots < most ? slots : most);
		return find_sequence(a.sequences, &a.cache, seq.batch).n_k;
	}

	/* PACK: at a tile of rows, for whoever has found that himself. */
	METHOD void place(const Sequence &where, i32 tile, i32 group, i32 part)
	{
		q_per_k = a.nhead_q / a.nhead_k;
		split = part;
		tile_row = tile * C::TILE_M;
		head_k = group;
		head = group * q_per_k;
		seq = where;
		n_rows = seq.n_q * q_per_k;
	}

	METHOD bool is_idle() const { return tile_row >= n_rows || seq.n_q < a.min_seqlen_q; }

	METHOD Band band() const
	{
		bool last_split = !C::SPLIT || split == max_of(a.n_splits, 1) - 1;

		return Band::make<C::MASK>(a.band, seq, C::SPLIT ? split * a.split_size : 0,
					   last_split ? seq.n_k : (split + 1) * a.split_size);
	}

	/* The sequence row and head behind a (packed) row. */
	METHOD RowPlace place_of(i32 r) const
	{
		if (C::PACK)
			return RowPlace{r / q_per_k, head + r % q_per_k};
		return RowPlace{r, head};
	}

	METHOD Queries queries() const { return Queries::make(a.q, seq, head, q_per_k, a.hdim_q); }
	METHOD Keys keys() const
	{
		Keys k = Keys::make(a.k, seq, a.cache, head_k, a.nhead_k, a.hdim_q, false);

		if constexpr (C::CHOSEN)
			k.choose(a.chosen, seq, tile_row / q_per_k, n_stored());
		return k;
	}
	METHOD Keys values() const
	{
		Keys v = Keys::make(a.v, seq, a.cache, head_k, a.nhead_k, a.hdim_v, true);

		if constexpr (C::CHOSEN)
			v.choose(a.chosen, seq, tile_row / q_per_k, n_stored());
		return v;
	}
	/* The factor of 8-bit values that have one a head. */
	METHOD float factor(const abi_descale &d, i32 of_head) const
	{
		return d.data ? d.data[seq.batch * d.stride_batch + of_head * d.stride_head] : 1.0f;
	}
	/* Whether each weight takes its value's factor. */
	METHOD bool weighs_factors() const
	{
		return C::DESCALE && a.v_descale.data &&
		       (a.v_descale.block || a.v_descale.per_page);
	}
	/* If not, what the head's results are multiplied with. In a weight the factor would be
	 * rounded along, to bf16: by up to 0.4 % where a row sees few keys, whose weights without
	 * it are exact or nearly so. */
	METHOD float result_factor() const
	{
		return C::DESCALE && !weighs_factors() ? factor(a.v_descale, head_k) : 1.0f;
	}
	METHOD DataMask<C> mask_data() const { return DataMask<C>{a.mask_data, seq}; }
	/* What the block's rows see of it, by all threads. */
	METHOD DataReach data_reach(char *lds) const
	{
		return mask_data().template reach_of<C::THREADS / FMHA_WAVE>(
			tile_row, min_of(C::TILE_M, n_rows - tile_row), lds,
			[&](i32 r) { return place_of(r); });
	}
	METHOD BiasView bias() const
	{
		return BiasView::make<Element>(a.bias, a.bias_dtype, seq, head);
	}
};

/* The sequence's rows that are in the block, and the columns that all of them see. */
template <class C> struct Reach {
	i32 first_row, last_row, begin, end;

	METHOD static Reach make(const ForwardBlock<C> &block, const Band &band)
	{
		i32 first_row = C::PACK ? block.tile_row / block.q_per_k : block.tile_row;
		i32 last_tile_row = min_of(block.tile_row + C::TILE_M, block.n_rows) - 1;
		i32 last_row = C::PACK ? last_tile_row / block.q_per_k : last_tile_row;

		return Reach{first_row, last_row, band.first(last_row), band.last(first_row) + 1};
	}

	METHOD ColumnTiles tiles(const Band &band, i32 lead = 0) const
	{
		return ColumnTiles::make<C::MASK>(band, first_row, last_row, C::TILE_N, lead);
	}

	/* Whether the tile at `column` has products that must not count. */
	METHOD bool is_masked(const Band &band, i32 column) const
	{
		return C::MASK ? column < begin || column + C::TILE_N > end
			       : column + C::TILE_N > band.end || column < band.begin;
	}

	/* Keys that no row of the block sees weigh nothing, but nothing times NaN is NaN: their
	 * values are not read. (In a tile that begins with sink tokens, those left of the window
	 * are.) */
	METHOD i32 first_value(const Band &band, i32 column) const
	{
		return !C::MASK              ? FROM_THE_FIRST
		       : column < band.sinks ? column
					     : band.first(first_row);
	}
	METHOD i32 end_of_values(const Band &band) const
	{
		return C::MASK ? band.last(last_row) + 1 : band.end;
	}
};

#endif
