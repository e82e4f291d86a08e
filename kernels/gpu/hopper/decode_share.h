/* SPDX-License-Identifier: MIT */
/*
 * decode_share.h: what a block of decode's splits has to do where no size of a split is given
 * (abi.h): an equal share of all keys that there are, however long each sequence is. Lengths are
 * read here, so that a launch that was captured follows them.
 *
 * Units are tiles of keys. They lie in a row: sequence after sequence, head after head, tile of
 * rows after tile of rows, and of each of these items the tiles of keys that its rows see. Block g
 * has units g * chunk to (g + 1) * chunk, and so pieces of one or more items. A piece is the item's
 * n-th part where n chunks begin within the item in front of it; no item has more parts than there
 * is room for, since a chunk is at least the longest item by one less of them. Parts that an item
 * does not have are left empty by whoever has its last one.
 *
 * A piece costs a block as much as PIECE tiles: so many units stand in front of an item's own.
 * Where blocks are many and chunks small, items are rounded up to whole chunks instead, so that no
 * block has two pieces.
 *
 * A head's rows that are no whole lines of the L2 cache share some with its neighbours'. Blocks
 * that were at other keys of each would have memory bring such a line twice. So two heads go in
 * step where rows are of bytes: units are those of one of them, and a block each has the same keys
 * of its own.
 */
#ifndef FMHA_GPU_DECODE_SHARE_H
#define FMHA_GPU_DECODE_SHARE_H

#include "block/fwd_block.h"

/* a / b of numbers that floats hold: 0 <= a < 2^24, b > 0. A division of integers takes three times
 * as long, one after the other at the beginning of a block, when nothing is on its way yet. */
DEV i32 quotient(i32 a, i32 b)
{
	i32 q = (i32)((float)a * reciprocal((float)b)), rest = a - q * b;

	return rest < 0 ? q - 1 : rest >= b ? q + 1 : q;
}
DEV i32 quotient_up(i32 a, i32 b)
{
	return quotient(a + b - 1, b);
}

/* MOST, where heads are whole sets of so many. */
template <int MOST> struct HeadsInStep {
	i32 in_step;

	METHOD HeadsInStep(const abi_fwd_args &a)
		: in_step(a.nhead_k % MOST == 0 && (i32)gridDim.x >= MOST ? MOST : 1)
	{
	}
};
template <> struct HeadsInStep<1> {
	static const i32 in_step = 1;

	METHOD HeadsInStep(const abi_fwd_args &) {}
};

template <class C>
static const int HEADS_IN_STEP = sizeof(typename C::KeyElement::Storage) == 1 &&
						 (C::HDIM_Q | C::HDIM_V) % 128 != 0
					 ? 2
					 : 1;

template <class C> struct DecodeShare : HeadsInStep<HEADS_IN_STEP<C>> {
	using HeadsInStep<HEADS_IN_STEP<C>>::in_step;
	static const int PIECE = 192 / C::TILE_N > 1 ? 192 / C::TILE_N : 1;

	/* What a sequence's items are. Without rows there are none; without keys each has one unit:
	 * somebody has to say that nothing was found. */
	struct Extent {
		i32 first, count; /* tiles of keys that rows see */
		i32 n_tiles;      /* of rows */
	};

	const abi_fwd_args &a;
	i32 unit, end, chunk; /* of the block; units of a block */
	i32 batch, start_of;  /* the sequence at which `unit` is, and its first unit */
	bool rounds;          /* items to whole chunks */

	METHOD DecodeShare(const abi_fwd_args &args)
		: HeadsInStep<HEADS_IN_STEP<C>>(args), a(args)
	{
	}

	METHOD Sequence sequence(i32 b) const { return find_sequence(a.sequences, &a.cache, b); }

	METHOD Extent extent_of(const Sequence &seq) const
	{
		Band band = Band::make<C::MASK>(a.band, seq, 0, seq.n_k);
		i32 n_q = seq.n_q < a.min_seqlen_q ? 0 : seq.n_q,
		    rows = n_q * (a.nhead_q / a.nhead_k);

		if (C::MASK && band.sinks > 0)
			band.anchor_left = -(1 << 29);
		const ColumnTiles tiles = ColumnTiles::make<false>(band, 0, seq.n_q - 1, C::TILE_N);

		return Extent{tiles.first, max_of(tiles.count, 1), ceil_div(rows, C::TILE_M)};
	}

	METHOD i32 items(const Extent &x) const { return a.nhead_k / in_step * x.n_tiles; }
	METHOD i32 units_of_item(const Extent &x) const
	{
		return rounds ? quotient_up(x.count, chunk) * chunk : PIECE + x.count;
	}
	METHOD i32 units(const Extent &x) const { return items(x) * units_of_item(x); }

	METHOD bool all_alike() const
	{
		const abi_sequences &s = a.sequences;

		return !s.seqstart_q && !s.seqstart_k && !s.seqlen_q && !s.seqlen_k &&
		       !s.leftpad_k && !a.cache.kv_indptr;
	}

	METHOD bool goes_on() const { return unit < end; }

	/* Return: whether there is a piece. */
	METHOD bool begin()
	{
		if (all_alike())
			begin_alike();
		else
			begin_among();
		return goes_on();
	}

	/* @n, @total: items and their tiles; @longest: tiles of one; @blocks: that take chunks. */
	METHOD void choose_chunk(i32 n, i32 total, i32 longest, i32 blocks)
	{
		i32 room = quotient_up(PIECE + longest, max_of(a.n_splits - 1, 1));
		i32 whole = n < blocks ? max_of(quotient_up(total, blocks - n),
						quotient_up(longest, a.n_splits))
				       : total;

		chunk = max_of(max_of(quotient_up(total + n * PIECE, blocks), room), 1);
		rounds = n < blocks && whole <= chunk + 1;
		if (rounds)
			chunk = max_of(whole, 1);
	}

	METHOD void begin_alike()
	{
		const Extent x = extent_of(sequence(0));
		i32 n = items(x), all = n * a.sequences.batch;

		choose_chunk(all, all * x.count, x.count, (i32)gridDim.x / in_step);
		n *= units_of_item(x);
		begin_at(n * a.sequences.batch);
		batch = n > 0 ? quotient(unit, n) : 0;
		start_of = batch * n;
	}

	METHOD void begin_at(i32 total)
	{
		unit = block_id_x() / in_step * chunk;
		end = min_of(total, unit + chunk);
		if (unit >= end)
			unit = end = 0;
	}

	/* A lane looks at a sequence, or a run of them, and all waves do the same. */
	METHOD void begin_among()
	{
		i32 run = ceil_div(a.sequences.batch, FMHA_WAVE),
		    from = min_of(lane_id() * run, a.sequences.batch), b = from;
		i32 to = min_of(from + run, a.sequences.batch), n = 0, tiles = 0, longest = 0,
		    sum = 0, before;
		Extent x = {0, 0, 0};
		bool is_mine;

		NO_UNROLL
		for (i32 i = from; i < to; i++) {
			x = extent_of(sequence(i));
			n += items(x);
			tiles += items(x) * x.count;
			longest = max_of(longest, x.n_tiles ? x.count : 0);
		}
		choose_chunk(sum_of_wave(n), sum_of_wave(tiles), most_of_wave(longest),
			     (i32)gridDim.x / in_step);
		if (run == 1 && from < to)
			sum = units(x);
		NO_UNROLL
		for (i32 i = from; run > 1 && i < to; i++)
			sum += units(extent_of(sequence(i)));
		before = sum_before(sum);
		begin_at(sum_of_wave(sum));
		is_mine = before <= unit && unit < before + sum;
		NO_UNROLL
		for (; run > 1 && is_mine && unit >= before + (n = units(extent_of(sequence(b))));
		     b++)
			before += n;
		start_of = sum_of_wave(is_mine ? before : 0);
		batch = sum_of_wave(is_mine ? b : 0);
	}

	METHOD static i32 sum_before(i32 x)
	{
		i32 sum = x;

		UNROLL
		for (int i = 1; i < FMHA_WAVE; i *= 2) {
			i32 other = (i32)shuffle_word((u32)sum, max_of(lane_id() - i, 0));

			sum += lane_id() < i ? 0 : other;
		}
		return sum - x;
	}
	METHOD static i32 most_of_wave(i32 x)
	{
		UNROLL
		for (int i = 1; i < FMHA_WAVE; i *= 2)
			x = max_of(x, (i32)shuffle_word((u32)x, lane_id() ^ i));
		return x;
	}

	/* The next piece, which there is. The last one of an item, and no other, ends with the
	 * keys. */
	METHOD void take(ForwardBlock<C> &block, Band *ret_band)
	{
		Sequence seq = sequence(batch);
		Extent x = extent_of(seq);
		i32 n = units(x);

		while (unit - start_of >= n) {
			start_of += n;
			seq = sequence(++batch);
			x = extent_of(seq);
			n = units(x);
		}
		const Within at = within(x);
		i32 head = x.n_tiles == 1 ? at.item : quotient(at.item, x.n_tiles);

		block.place(seq, at.item - head * x.n_tiles,
			    head * in_step + block_id_x() % in_step,
			    block_id_x() / in_step - at.first_block);
		*ret_band = band_of(seq, x, at);
		unit += at.units;
	}

	/* What comes next of a sequence's items: which, the block that has its first part, its
	 * tiles of keys. */
	struct Within {
		i32 item, first_block, tile, tile_end, units;
	};
	METHOD Within within(const Extent &x) const
	{
		i32 of_item = units_of_item(x), item = quotient(unit - start_of, of_item),
		    item_start = start_of + item * of_item;
		i32 at = unit - item_start, last = min_of(at + end - unit, of_item),
		    lead = rounds ? 0 : PIECE;

		return Within{item, quotient(item_start, chunk), max_of(at - lead, 0),
			      max_of(last - lead, 0), last - at};
	}
	METHOD Band band_of(const Sequence &seq, const Extent &x, const Within &at) const
	{
		return Band::make<C::MASK>(a.band, seq, (x.first + at.tile) * C::TILE_N,
					   at.tile_end >= x.count
						   ? seq.n_k
						   : (x.first + at.tile_end) * C::TILE_N);
	}
};

/*
 * The same where an item's tiles of rows have blocks side by side, which take the same keys at the
 * same time, so that memory brings them once: an item is all rows that share keys. In little code:
 * every warpgroup has it, and what is fetched again behind another kernel takes its time.
 */
template <class C> struct TilesShare : DecodeShare<C> {
	typedef DecodeShare<C> Share;
	typedef typename Share::Extent Extent;
	using Share::a;
	using Share::batch;
	using Share::chunk;
	using Share::end;
	using Share::start_of;
	using Share::unit;
	i32 together; /* blocks side by side; CLUSTER: as many tiles are an item */
	static const int CLUSTER = C::PAIRED ? GRID_CLUSTER : 1;

	METHOD TilesShare(const abi_fwd_args &args) : Share(args) {}

	METHOD i32 items_of_head(const Extent &x) const { return quotient_up(x.n_tiles, together); }
	METHOD i32 items(const Extent &x) const { return a.nhead_k * items_of_head(x); }
	METHOD i32 units(const Extent &x) const { return items(x) * this->units_of_item(x); }
	METHOD i32 place() const { return quotient((i32)block_id_x(), together); }

	/* Items in whole chunks, so that no block has two pieces, where an exact count says that
	 * blocks suffice: of equal items that is what equal splits would be. */
	static const int SIZES = 4; /* that are tried, from `least` on */
	METHOD void choose_rounds(i32 least, const i32 (&parts)[SIZES], i32 blocks)
	{
		i32 most = chunk + 1;

		UNROLL
		for (int k = SIZES - 1; k >= 0; k--)
			if (least + k <= most && sum_of_wave(parts[k]) <= blocks) {
				this->rounds = true;
				chunk = least + k;
			}
	}

	/* Sequences by as many as there are lanes, three times: what all have, how many chunks of
	 * some sizes, where the block's units begin. Return: whether there is a piece. */
	METHOD bool begin()
	{
		i32 n = 0, tiles = 0, longest = 0, total = 0, least = 1, blocks, parts[SIZES] = {};
		i32 runs = ceil_div(a.sequences.batch, FMHA_WAVE);

		together = ceil_div(a.sequences.seqlen_q_max * (a.nhead_q / a.nhead_k), C::TILE_M);
		if (together < CLUSTER || 2 * together > (i32)gridDim.x)
			together = CLUSTER;
		blocks = quotient((i32)gridDim.x, together);
		unit = batch = start_of = 0;
		Extent x = {0, 0, 0};

		NO_UNROLL
		for (i32 i = 0, run = 0; i < 3 * runs; i++, run = run + 1 < runs ? run + 1 : 0) {
			i32 b = run * FMHA_WAVE + lane_id();

			if (i == runs) {
				tiles = sum_of_wave(tiles);
				longest = Share::most_of_wave(longest);
				this->choose_chunk(sum_of_wave(n), tiles, longest, blocks);
				least = max_of(max_of(quotient_up(tiles, blocks),
						      quotient_up(longest, a.n_splits)),
					       1);
			}
			if (i == 2 * runs) {
				choose_rounds(least, parts, blocks);
				unit = place() * chunk;
			}
			if (i == 0 || runs > 1)
				x = b < a.sequences.batch ? this->extent_of(this->sequence(b))
							  : Extent{0, 0, 0};
			if (i < runs) {
				n += items(x);
				tiles += items(x) * x.count;
				longest = max_of(longest, x.n_tiles ? x.count : 0);
			} else if (i < 2 * runs) {
				UNROLL
				for (int k = 0; k < SIZES; k++)
					parts[k] += items(x) * quotient_up(x.count, least + k);
			} else {
				i32 sum = units(x), before = total + Share::sum_before(sum);
				bool is_mine = before <= unit && unit < before + sum;

				start_of += sum_of_wave(is_mine ? before : 0);
				batch += sum_of_wave(is_mine ? b : 0);
				total += sum_of_wave(sum);
			}
		}
		end = min_of(total, unit + chunk);
		if (unit >= end)
			unit = end = 0;
		return this->goes_on();
	}

	/* As of the other. */
	METHOD void take(ForwardBlock<C> &block, Band *ret_band)
	{
		Sequence seq;
		Extent x;

		NO_UNROLL
		while (true) {
			seq = this->sequence(batch);
			x = this->extent_of(seq);
			if (unit - start_of < units(x))
				break;
			start_of += units(x);
			batch++;
		}
		const typename Share::Within at = this->within(x);
		i32 items = items_of_head(x), head = quotient(at.item, items);
		i32 tile = (at.item - head * items) * together + (i32)block_id_x() -
			   place() * together;

		block.place(seq, tile, head, place() - at.first_block);
		*ret_band = this->band_of(seq, x, at);
		unit += at.units;
	}
};

#endif
