/* SPDX-License-Identifier: MIT */
/*
 * fwd_wgmma.h: forward attention on Hopper. What a tile of scores means is in fwd_scores.h and
 * scores.h; here is how the products are fed. A block's last warpgroup loads, or its last two: one
 * warp asks the copy engine for tiles of Q, K, V and a bias, and the other warps widen 8-bit
 * values, and keys that are narrower than their queries (wgmma_values.h). The other warpgroups own
 * 64 rows each. The scores of the next tile of keys and O += P V of this one run one
 * behind the other while the maxima of those scores are found, and the other warpgroups' while
 * they become weights, so that the tensor cores seldom wait.
 *
 * In pages a tile of keys comes in boxes of as many rows as divide both a tile's and a page's, each
 * asked for by a lane that has looked up its page a tile ahead, of any of the loading warps: a warp
 * asks for one after the other. What lies behind the sequence is asked for beyond the last page:
 * the engine brings zeros, and nobody looks at the table there.
 *
 * Tiles of keys are walked from the last to the first: those that a causal mask cuts come first.
 * Blocks take pieces of work (rows of one head) in turn: a grid of one block a multiprocessor keeps
 * loading across them, one block a piece leaves the order to the hardware. A kernel of splits may
 * have the rows of all heads that share keys in a piece, row by row, where that leaves fewer of
 * them: the copy engine brings them side by side. It does so without splits, too, and writes O
 * itself then. Where the last pieces are too few for all blocks it may cut them by keys: whose part
 * of a warp's rows comes last adds them up.
 *
 * Under a mask that is data the loading warps look at each tile before one asks for it: those that
 * no row sees are not brought, and which ones these are only they say, beside the tile. The mask
 * may change while a kernel runs, and two that look for themselves might wait for each other for
 * ever. Which elements of a tile its rows see the loading warps find, too, a tile or two ahead,
 * where what they read is waited for by nobody.
 */
#ifndef FMHA_GPU_FWD_WGMMA_H
#define FMHA_GPU_FWD_WGMMA_H

#include "block/fwd_output.h"
#include "block/fwd_scores.h"
#include "fwd_wgmma_cap.h"
#include "block/packed_pieces.h"
#include "wgmma_values.h"

template <class C> struct ForwardWgmma : ForwardBlock<C> {
	typedef ForwardBlock<C> Block;
	typedef typename C::Core Core;
	typedef typename C::Element Element;
	using Block::a;
	using Block::head;
	using Block::head_k;
	using Block::n_rows;
	using Block::seq;
	using Block::split;
	using Block::tile_row;
	static const int TN = C::TILE_N / 16, TD = C::HDIM_V / 16;
	static_assert(C::TILE_M == 16 * C::WAVES_M && C::WAVES_N == 1,
		      "a wave has 16 rows of its warpgroup's 64");
	static_assert(!C::PACK, "rows of several heads are a matter of splits");
	typedef RegTile<Core, 1, TN> Scores;
	typedef typename C::KeyElement KeyElement;
	static const bool NARROW = !SameType<Element, KeyElement>::value; /* K and V, beside Q */
	typedef typename Either<NARROW, NarrowValues<Core, Element, KeyElement, TN, TD>,
				WgmmaValues<Core, Element, TN, TD>>::Type Values;
	typedef WidenedTile<Element, KeyElement, TN, C::HDIM_Q / 16> WideKeys;
	typedef typename Values::Weights Weights;
	typedef ForwardScores<C, 1, TN> Steps;
	typedef CappedSoftmax<Core, TN, typename Values::Unit> Capped;
	static const int SHIFT = Values::Unit::SHIFT;
	static const bool HAS_BIAS = C::BIAS == BIAS_MATRIX,
			  HAS_DATA = C::MASK_DATA != MASK_DATA_NONE;
	/* Scores that are nothing but capped become weights at once; with more in them, step by
	 * step. So do those that have factors, which are a head's own: a launch has one scale. And
	 * so do those that a single instruction caps. */
	static const bool APPROXIMATE = C::SOFTCAP && C::CAP_APPROX;
	static const bool CAPPED =
		C::SOFTCAP && !APPROXIMATE && C::BIAS == BIAS_NONE && !C::DESCALE;
	/* Where products take longer than special functions, a polynomial beside them gains
	 * nothing. */
	static const bool HAS_NEAR = C::HDIM_V <= 128;
	/* Maxima are found while O += P V runs, and weights behind the wait for it, in straight
	 * code with their rounding, which costs nothing beside special functions. Of 8 bits, and of
	 * capped scores, weights are better made first; where one instruction caps them, those of
	 * the widest heads, beside whose products there is time for both. */
	static const bool LATE = !CAPPED && !HAS_BIAS && sizeof(typename Element::Storage) == 2 &&
				 !(APPROXIMATE && C::HDIM_V > 192);
	/* Without a mask to multiply a short O costs less than to ask whether it need be. */
	static const bool LAGS = !(LATE && C::HDIM_V <= 64 && !C::MASK);
	typedef Softmax<Core, 1, LAGS, HAS_BIAS, typename Values::Unit> Rule;
	/* Kernels of splits may cut the last pieces of a problem that is not split, see grid.h. */
	static const bool CUTS_REST = C::SPLIT && !C::PAGED && !C::MASK && !C::LOGITS &&
				      C::HDIM_V <= 128 && !Values::WIDENED;
	static const int ELEMENT = sizeof(typename Element::Storage), BOX = SLAB_WIDTH / ELEMENT;
	static const int KEY = sizeof(typename KeyElement::Storage), KEY_BOX = SLAB_WIDTH / KEY;
	static const int GROUP_THREADS = 128, GROUPS = C::WAVES_M / 4, STAGES = LDS_WGMMA_STAGES;
	/* Warpgroups that load: keys and values to be widened are more than one does beside two
	 * that multiply; three, or the widest heads, leave no registers for another. */
	static const int LOADERS = lds_wgmma_loaders(NARROW, C::WAVES_M, C::HDIM_V);
	static const int THREADS = C::THREADS + LOADERS * GROUP_THREADS;

	static const int Q_SLAB = slab_bytes(C::TILE_M), K_SLAB = slab_bytes(C::TILE_N);
	static const int Q_SLABS = slabs_of(C::HDIM_Q, ELEMENT),
			 K_SLABS = slabs_of(C::HDIM_Q, KEY), V_SLABS = slabs_of(C::HDIM_V, KEY);
	static const int Q_BYTES = Q_SLABS * Q_SLAB, K_BYTES = K_SLABS * K_SLAB,
			 V_BYTES = V_SLABS * K_SLAB;
	static const int WIDENED_BYTES = Values::WIDENED ? Values::BYTES : 0,
			 WIDE_K_BYTES = NARROW ? Q_SLABS * K_SLAB : 0;
	static const int BIAS_SLABS = slabs_of(C::TILE_N),
			 BIAS_BYTES = HAS_BIAS ? BIAS_SLABS * Q_SLAB : 0;

	static __device__ constexpr lds_wgmma_cut wgmma_cut()
	{
		return lds_wgmma_cut{C::cut(C::TILE_M, C::TILE_N), ELEMENT, KEY, HAS_BIAS,
				     HAS_DATA, C::SPLIT};
	}
	static const int Q_STAGES = lds_wgmma_queries(wgmma_cut(), C::LDS_BYTES);
	static const int COPIES = lds_wgmma_copies(wgmma_cut(), C::LDS_BYTES); /* stages of them */
	static const int K_AT = Q_STAGES * Q_BYTES, V_AT = K_AT + COPIES * K_BYTES;
	static const int WIDENED_AT = V_AT + COPIES * V_BYTES,
			 WIDE_K_AT = WIDENED_AT + STAGES * WIDENED_BYTES,
			 BIAS_AT = WIDE_K_AT + STAGES * WIDE_K_BYTES;
	static const int BARRIERS_AT = BIAS_AT + STAGES * BIAS_BYTES,
			 SEEN_AT = BARRIERS_AT + lds_wgmma_barriers(wgmma_cut()),
			 LDS = SEEN_AT + (HAS_DATA ? lds_wgmma_seen(C::TILE_M) : 0);
	static_assert(LDS == lds_wgmma(wgmma_cut(), C::LDS_BYTES), "the host asks lds.h, too");
	static const int N_BARRIERS = 4 * STAGES + 2 * Q_STAGES +
				      (Values::WIDENED || HAS_BIAS ? 2 * COPIES : 0) +
				      (NARROW ? 2 * COPIES : 0);
	static const int NUMBERS_AT = BARRIERS_AT + N_BARRIERS * 8; /* of capped scores */
	/* of tiles of several heads; at the end */
	static const int CUT_BYTES = C::SPLIT ? LDS_WGMMA_CUT : 0,
		CUT_AT = BARRIERS_AT + lds_wgmma_barriers(wgmma_cut()) - CUT_BYTES;
	static_assert(N_BARRIERS * 8 + (CAPPED ? Capped::BYTES : 0) + CUT_BYTES <=
			      lds_wgmma_barriers(wgmma_cut()),
		      "room for them");
	/* HAS_DATA: beside each stage of K its tile; what the loading warps tell each other; which
	 * places of the stage's tile each row sees, where it does not see all: four words, of the
	 * lanes that share the row. */
	static const int REACHES_AT = SEEN_AT + STAGES * 8, MARKS_AT = REACHES_AT + 4 * 16,
			 VOTES_AT = MARKS_AT + 4 * 16,
			 PLACES_AT = SEEN_AT + LDS_WGMMA_SEEN, PLACES = C::TILE_M * 16;
	static_assert(!HAS_DATA || C::TILE_N <= 128, "a bit a place");
	static_assert(STAGES * 8 + 2 * 4 * 16 + 8 <= LDS_WGMMA_SEEN, "room for that");
	static_assert(!HAS_DATA || (!C::PAGED && !Values::WIDENED && !C::SPLIT),
		      "the loading warps say which tiles are walked");
	static_assert(!Values::WIDENED || !HAS_BIAS, "one of the two has barriers");
	static_assert(!C::SPLIT || !HAS_BIAS, "pass_by() leaves a bias where it lies");

	/* Registers of a thread. All warpgroups together have those that the block was launched
	 * with, as many for each, a multiple of 8: who asks for more waits for ever. */
	static const int LAUNCHED_REGISTERS = 65536 / THREADS / 8 * 8;
	static const int LOADER_REGISTERS = LOADERS == 2      ? (C::HDIM_Q > 128 ? 48 : 40)
						: Values::WIDENED ? 56
						: GROUPS == 3 ? (HAS_DATA ? 80 : 32)
						: HAS_DATA    ? 72
						: CUTS_REST || (C::SPLIT && C::PAGED &&
								(C::MASK || (C::HDIM_Q > 128 &&
									     C::HDIM_Q <= 192)))
							? 32
							: 24;
	static const int PRODUCT_REGISTERS = (LAUNCHED_REGISTERS * (GROUPS + LOADERS) -
					      LOADER_REGISTERS * LOADERS) /
					     GROUPS / 8 * 8;
	static_assert(GROUPS == 2 || GROUPS == 3, "their registers are known");
	static const int WIDENING_WARPS = 4 * LOADERS - 1; /* all that do not ask the copy engine */
	static const int COPYING_WARPS = C::PAGED && !Values::WIDENED ? 4 : 1;
	/* Who arrives at a tile of keys. What is said of it comes from all loading warps. */
	static const int KEY_ARRIVALS = HAS_DATA ? 1 + 4 : COPYING_WARPS;
	static const int LOADING_WARPS = HAS_DATA || (C::PAGED && !Values::WIDENED) ? 4 : 1;

	/* Warpgroups start products in turn, so that one's softmax runs beside another's products.
	 * Those of 8 bits are too short to wait for. */
	static const bool TURNS = ELEMENT == 2;

	/* Named barriers: a warpgroup's own, and its turn at the tensor cores. */
	static const int OWN_BARRIER = 1, TURN_BARRIER = OWN_BARRIER + GROUPS,
			 LOADER_BARRIER = TURN_BARRIER + GROUPS;

	u32 lds; /* address in shared memory */
	i32 wave_m;
	Band band;
	Modifiers<C> modifiers;
	/* one, as a score: a score is a raw product where the exponent may take the scale, a
	 * hyperbolic tangent where it may take the cap */
	float logit;
	float slope;   /* ALiBi's, as a score */
	float o_scale; /* of the values, and of the weights' unit */
	RegTile<Core, 1, TD> o;
	SoftmaxRows<Core, 1> rows;
	Capped capped;
	/* HAS_DATA: whether the tile has elements that their rows do not see; which places they do. */
	bool hides;
	u32 seen_places[Core::STATS];
	typename Block::Keys keys; /* for Steps, which asks it for pages and nothing else */

	METHOD ForwardWgmma(const abi_fwd_args &args) : Block(args) {}

	METHOD i32 wave_row() const { return tile_row + wave_m * 16; }

	/* SPLIT: heads of a tile, rows of the sequence, pieces that are whole; in shared memory,
	 * since registers are few. */
	METHOD void cut_tile() const
	{
		const Divisor heads = Divisor::make(grid_heads_of_tile(&a, C::TILE_M));
		const i32 rows = C::TILE_M / heads.by;
		const i32 pieces = grid_pieces(&a, rows, a.nhead_q / heads.by);
		const u32 x[4] = {(u32)heads.by, heads.inverse, (u32)rows,
				  (u32)grid_whole_pieces(&a.rest, pieces, (i32)gridDim.x)};

		store_shared_16(lds + CUT_AT, x);
	}
	/* Rows of a tile that are no head's. What lies there the engine never overwrites, and it
	 * has a say in how far the maxima of the warp's other rows lag. */
	METHOD void clear_nobodys_rows() const
	{
		const i32 first = tile_rows() * tile_heads(),
			  n = (C::TILE_M - first) * (SLAB_WIDTH / 16);

		NO_UNROLL
		for (i32 slab = 0; slab < Q_STAGES * Q_SLABS; slab++)
			NO_UNROLL
			for (i32 i = thread_id(); i < n; i += THREADS)
				store_zeros(lds + slab * Q_SLAB + first * SLAB_WIDTH + i * 16);
		fence_async();
	}
	METHOD Divisor heads_divisor() const
	{
		const chunk8 x = load_shared_8(lds + CUT_AT);

		return Divisor{(i32)x.w[0], x.w[1]};
	}
	METHOD i32 tile_heads() const { return C::SPLIT ? heads_divisor().by : 1; }
	METHOD i32 tile_rows() const
	{
		return C::SPLIT ? (i32)load_shared_8(lds + CUT_AT + 8).w[0] : C::TILE_M;
	}
	/* The sequence's row in the tile's n-th, and how far from the tile's first its head is. */
	METHOD i32 row_of(i32 n) const
	{
		return tile_row + (C::SPLIT ? heads_divisor().quotient(n) : n);
	}
	METHOD i32 head_of(i32 n) const
	{
		const Divisor heads = C::SPLIT ? heads_divisor() : Divisor{1, 0};

		return C::SPLIT ? n - heads.quotient(n) * heads.by : 0;
	}

	/* A tile's barriers: it is there; nobody reads it any more. */
	METHOD u32 barrier(i32 number) const { return lds + BARRIERS_AT + number * 8; }
	METHOD u32 k_full(i32 stage) const { return barrier(stage); }
	METHOD u32 k_empty(i32 stage) const { return barrier(STAGES + stage); }
	METHOD u32 v_full(i32 stage) const { return barrier(2 * STAGES + stage); }
	METHOD u32 v_empty(i32 stage) const { return barrier(3 * STAGES + stage); }
	METHOD u32 q_full(i32 stage) const { return barrier(4 * STAGES + stage); }
	METHOD u32 q_empty(i32 stage) const { return barrier(4 * STAGES + Q_STAGES + stage); }
	/* Barriers of tiles of values that are still to be widened, or of a bias. */
	METHOD u32 more_full(i32 stage) const { return barrier(4 * STAGES + 2 * Q_STAGES + stage); }
	METHOD u32 more_empty(i32 stage) const
	{
		return barrier(4 * STAGES + COPIES + 2 * Q_STAGES + stage);
	}
	/* NARROW: of keys that are still to be widened. */
	METHOD u32 k_copy_full(i32 stage) const
	{
		return barrier(4 * STAGES + 2 * COPIES + 2 * Q_STAGES + stage);
	}
	METHOD u32 k_copy_empty(i32 stage) const
	{
		return barrier(4 * STAGES + 3 * COPIES + 2 * Q_STAGES + stage);
	}
	METHOD u32 k_copy(i32 stage) const { return lds + K_AT + stage * K_BYTES; }
	METHOD u32 k_tile(i32 stage) const
	{
		return NARROW ? lds + WIDE_K_AT + stage * WIDE_K_BYTES : k_copy(stage);
	}
	METHOD u32 v_copy(i32 stage) const { return lds + V_AT + stage * V_BYTES; }
	METHOD u32 v_tile(i32 stage) const
	{
		return Values::WIDENED ? lds + WIDENED_AT + stage * WIDENED_BYTES : v_copy(stage);
	}
	METHOD u32 bias_tile(i32 stage) const { return lds + BIAS_AT + stage * BIAS_BYTES; }
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
	typedef Ring<COPIES> CopyRing;
	typedef Ring<Q_STAGES> QueryRing;

	/* Rows of a head, in tiles; heads of all batch entries. Each split has blocks of its own. */
	METHOD i32 tiles_of_head() const { return ceil_div(a.sequences.seqlen_q_max, tile_rows()); }
	METHOD i32 n_heads() const { return a.nhead_q / tile_heads(); } /* of a batch entry */
	METHOD i32 heads() const { return n_heads() * a.sequences.batch; }

	/*
	 * How many heads are taken before the next ones. Under a mask their pieces go by length,
	 * back and forth over the blocks, so that an even number of rounds gives each block the
	 * same, and the fewer heads there are, the more blocks find the same keys in the cache:
	 * SHARING at a time.
	 */
	static const int SHARING = 4;
	/* What a mask that is data leaves of a row is like what it leaves of the rows beside it:
	 * see locate(). Splits are of rows that are few beside their keys, of which all tiles of a
	 * head see most: they find them in the cache. */
	static const bool SECTIONS = C::MASK && !HAS_DATA && !C::SPLIT;
	METHOD i32 heads_of_section() const
	{
		i32 n_blocks = (i32)gridDim.x;

		if (!SECTIONS || a.sequences.seqstart_q)
			return heads();
		i32 rounds = 2 *
			     ceil_div(ceil_div(n_blocks, SHARING) * tiles_of_head(), 2 * n_blocks);

		return min_of(rounds * n_blocks / tiles_of_head(), heads());
	}

	/* How far a block is: the section's first head and, under a mask, how many it has; rounds
	 * that it has taken of it. */
	struct Progress {
		i32 first;
		Divisor heads;
		i32 round;
	};
	METHOD Progress start() const
	{
		if constexpr (HAS_DATA)
			return Progress{0, Divisor::make(a.nhead_q), 0};
		return Progress{0, Divisor::make(heads_of_section()), 0};
	}

	/* The piece of this number in a section; false: there are no such rows. Without a mask a
	 * head's pieces stay together, and its keys in the cache; divisors would spill registers
	 * there. Under one that is data those of the same rows of all heads do, which have as much
	 * work: blocks that begin together end together. */
	METHOD bool locate(const Progress &at, i32 number, ColumnTiles *ret_tiles)
	{
		split = C::SPLIT ? block_id_y() : 0;
		if constexpr (CUTS_REST)
			number = find_part(number);
		if (a.sequences.seqstart_q)
			return locate_packed(number) && find_tiles(ret_tiles);
		if constexpr (HAS_DATA) {
			i32 place = at.heads.quotient(number), n = tiles_of_head(), batch = 0;

			head = number - place * a.nhead_q;
			if (a.sequences.batch > 1)
				batch = place / n;
			tile_row = (n - 1 - (place - batch * n)) * C::TILE_M;
			seq = find_sequence(a.sequences, &a.cache, batch);
			return find_tiles(ret_tiles);
		}
		i32 n_tiles = tiles_of_head(), n = SECTIONS ? at.heads.by : n_tiles;
		i32 quotient = SECTIONS ? at.heads.quotient(number) : number / n,
		    remainder = number - quotient * n;
		i32 y = SECTIONS ? at.first + remainder : quotient;
		i32 batch = y / n_heads();

		tile_row = (n_tiles - 1 - (SECTIONS ? quotient : remainder)) * tile_rows();
		head = (y - batch * n_heads()) * tile_heads();
		seq = find_sequence(a.sequences, &a.cache, batch);
		return find_tiles(ret_tiles);
	}

	METHOD i32 whole_pieces() const { return (i32)load_shared_8(lds + CUT_AT + 8).w[1]; }

	/* Of the warp's piece: its number among the parts, which lie behind the whole pieces; below
	 * 0: it is whole. */
	METHOD u32 part_word() const { return lds + CUT_AT + 16 + wave_id() * 4; }
	METHOD i32 own_part() const { return (i32)float_to_bits(load_shared(part_word())); }

	/* Of the piece, or the part of one, with this number. Return: the piece's. */
	METHOD i32 find_part(i32 number)
	{
		i32 part = number - whole_pieces(), piece;

		store_shared(part_word(), bits_to_float((u32)part));
		if (part < 0)
			return number;
		piece = part / a.rest.n_splits;
		split = part - piece * a.rest.n_splits;
		return number - part + piece;
	}
	/* The columns of a part, in whole tiles: of short sequences the last ones have none. */
	METHOD void narrow_to_part()
	{
		i32 keys = ceil_div(ceil_div(seq.n_k, a.rest.n_splits), C::TILE_N) * C::TILE_N;

		band.begin = min_of(split * keys, seq.n_k);
		band.end = min_of(band.begin + keys, seq.n_k);
	}

	/* Kernels of splits have chunks; of 8 bits their code is long enough without. */
	static const bool CHUNKS = C::SPLIT && C::MASK && !Values::WIDENED;
	METHOD bool locate_packed(i32 number)
	{
		const PackedPieces<C::MASK, CHUNKS, C::TILE_N> all = {a, tile_rows(), n_heads()};
		i32 sequence, tile;

		if (!all.find(number, &sequence, &tile, &head))
			return false;
		tile_row = tile * tile_rows();
		head *= tile_heads();
		seq = find_sequence(a.sequences, &a.cache, sequence);
		return true;
	}

	METHOD bool find_tiles(ColumnTiles *ret_tiles)
	{
		n_rows = seq.n_q;
		if (tile_row >= n_rows || seq.n_q < a.min_seqlen_q)
			return false;
		band = Block::band();
		if constexpr (CUTS_REST)
			if (own_part() >= 0)
				narrow_to_part();
		*ret_tiles = ColumnTiles::make<C::MASK>(band, tile_row, last_row(), C::TILE_N);
		/* As it is, and no register's; who loads pages has none for another path. */
		if (!C::MASK && !C::SPLIT && !C::PAGED)
			ret_tiles->first = 0;
		if (ret_tiles->count == 0) /* rows that see nothing: one tile, all masked */
			*ret_tiles = ColumnTiles{C::TILE_N, 0, 0, 0, 1};
		return true;
	}

	/*
	 * This block's next piece, back and forth over the blocks, so that each gets long and short
	 * ones. Of packed splits that are not CHUNKS every other block takes its own in the
	 * opposite order: what long ones wait for are products, and decodes beside them wait for
	 * memory, so that at any time half of the blocks leave to the others what those want. In
	 * the order of CHUNKS decodes and others are mixed anyhow.
	 */
	METHOD static i32 number_of(i32 round)
	{
		i32 n_blocks = (i32)gridDim.x;

		return round * n_blocks + (round & 1 ? n_blocks - 1 - block_id_x() : block_id_x());
	}
	METHOD bool next_piece(Progress *at, ColumnTiles *ret_tiles)
	{
		i32 n_blocks = (i32)gridDim.x;

		for (;;) {
			i32 start = at->round * n_blocks,
			    n_heads = SECTIONS ? at->heads.by : heads();
			i32 number = number_of(at->round);
			i32 pieces = a.sequences.seqstart_q
					     ? grid_pieces(&a, tile_rows(), this->n_heads())
					     : n_heads * tiles_of_head();
			if (CUTS_REST) /* and parts of those that are not whole */
				pieces += (pieces - whole_pieces()) * (a.rest.n_splits - 1);

			if constexpr (C::SPLIT && !CHUNKS)
				if (a.sequences.seqstart_q && block_id_x() & 1)
					number = number_of(ceil_div(pieces, n_blocks) - 1 -
							   at->round);
			if (start >= pieces) {
				i32 left = heads() - at->first - n_heads;

				if (!SECTIONS || left <= 0)
					return false;
				*at = Progress{at->first + n_heads,
					       left < n_heads ? Divisor::make(left) : at->heads, 0};
				continue;
			}
			at->round++;
			if (number < pieces && locate(*at, number, ret_tiles))
				return true;
		}
	}
	METHOD i32 last_row() const { return min_of(tile_row + tile_rows(), n_rows) - 1; }

	/* ---- the loading warpgroup ---- */

	/* row_bytes: what comes of a slab, where that is not all of it. */
	template <int SLABS>
	METHOD static void load_tile(u32 to, i32 slab, const TensorMap &map, u32 barrier,
				     i32 column, i32 row, i32 of_head, i32 batch, i32 slab_width,
				     i32 bytes)
	{
		if (lane_id() != 0)
			return;
		barrier_expect(barrier, SLABS * bytes);
		UNROLL
		for (int n = 0; n < SLABS; n++)
			load_box(to + n * slab, map, barrier, column + n * slab_width, row, of_head,
				 batch);
	}
	template <int SLABS>
	METHOD static void load_rows(u32 to, i32 slab, const TensorMap &map, u32 barrier, i32 row,
				     i32 of_head, i32 batch, i32 box)
	{
		load_tile<SLABS>(to, slab, map, barrier, 0, row, of_head, batch, box, slab);
	}

	/* Of splits the map's dimensions are (dim, head, row, batch). */
	METHOD void load_queries(const TensorMap &map, i32 stage) const
	{
		i32 row = seq.q_start + tile_row, batch = seq.packed_q ? 0 : seq.batch;

		if constexpr (C::SPLIT)
			load_tile<Q_SLABS>(q_tile(stage), Q_SLAB, map, q_full(stage), 0, head, row,
					   batch, BOX, tile_rows() * tile_heads() * SLAB_WIDTH);
		else
			load_rows<Q_SLABS>(q_tile(stage), Q_SLAB, map, q_full(stage), row, head,
					   batch, BOX);
	}

	METHOD static i32 loading_warp() { return LOADING_WARPS > 1 ? wave_id() - C::WAVES_M : 0; }

	/* The box of a tile in pages that a lane asks for, of one slab, and the page table's word
	 * for it. */
	struct PageBox {
		i32 slot, entry;
	};
	/* Its number in the tile: boxes, and the slabs of each, go by lane and warp. */
	template <int SLABS> METHOD static i32 number_of_box()
	{
		return (lane_id() * LOADING_WARPS + loading_warp()) / SLABS;
	}
	template <int SLABS> METHOD static i32 slab_of_box()
	{
		return (lane_id() * LOADING_WARPS + loading_warp()) % SLABS;
	}
	template <int SLABS>
	METHOD PageBox find_box(const typename Block::Keys &view, const Divisor &size, i32 column,
				i32 rows) const
	{
		i32 row = number_of_box<SLABS>() * rows, position = column + row;

		if (row >= C::TILE_N || position >= seq.n_k)
			return PageBox{0, view.n_pages};
		i32 page = size.quotient(position);

		return PageBox{position - page * size.by, view.entry_of_page(page)};
	}

	/* A tile of K or V: rows from @row on, or what the lanes have found. */
	template <int SLABS>
	METHOD void load_keys(u32 to, const TensorMap &map, u32 barrier, i32 row, i32 batch,
			      const PageBox &box, i32 rows) const
	{
		if constexpr (C::PAGED) {
			i32 row = number_of_box<SLABS>() * rows, slab = slab_of_box<SLABS>();
			i32 boxes = C::TILE_N / rows * SLABS + LOADING_WARPS - 1 - loading_warp();

			if (lane_id() == 0)
				barrier_expect(barrier, boxes / LOADING_WARPS * slab_bytes(rows));
			wave_sync();
			if (row < C::TILE_N)
				load_box(to + slab * K_SLAB + slab_bytes(row), map, barrier,
					 slab * KEY_BOX, box.slot, head_k,
					 clamp(box.entry, 0, a.cache.n_pages));
		} else {
			load_rows<SLABS>(to, K_SLAB, map, barrier, row, head_k, batch, KEY_BOX);
		}
	}

	/* Along axes that a bias repeats over it has one element: for rows see bias_row(). */
	METHOD void load_bias(const TensorMap &map, i32 stage, i32 column) const
	{
		const abi_tensor &t = a.bias;

		load_tile<BIAS_SLABS>(bias_tile(stage), Q_SLAB, map, more_full(stage), column,
				      t.stride_seq ? seq.q_start + tile_row : 0,
				      t.stride_head ? head : 0,
				      t.stride_batch && !seq.packed_q ? seq.batch : 0, SLAB_COLUMNS,
				      t.stride_seq ? Q_SLAB : SLAB_WIDTH);
	}

	METHOD void load(const TensorMap &q, const TensorMap &k, const TensorMap &v,
			 const TensorMap &bias)
	{
		CopyRing keys = {0, 1}, values = {0, 1};
		QueryRing queries = {0, 1};
		Progress at = start();
		ColumnTiles tiles;
		typename Block::Keys view;
		PageBox k_box = {}, v_box = {}, next_v_box = {};
		const i32 rows = C::PAGED ? lds_wgmma_box(C::TILE_N, a.cache.page_size) : 0;
		const Divisor size = Divisor::make(C::PAGED ? a.cache.page_size : 1);

		while (next_piece(&at, &tiles)) {
			head_k = head / (a.nhead_q / a.nhead_k);
			i32 row = seq.k_start + seq.leftpad, batch = seq.packed_k ? 0 : seq.batch;

			if (C::PAGED) {
				view.set_pages(a.k, seq, a.cache, head_k, a.nhead_k);
				k_box = find_box<K_SLABS>(view, size, tiles.column(tiles.count - 1),
							  rows);
			}

			if (a.cache.cache_batch_idx)
				batch = clamp(a.cache.cache_batch_idx[seq.batch], 0,
					      a.cache.cache_batch - 1);
			NO_UNROLL
			for (i32 n = tiles.count; n >= 0; n--) {
				if (n > 0) {
					i32 stage = keys.stage;

					barrier_wait(NARROW ? k_copy_empty(stage) : k_empty(stage),
						     keys.parity);
					load_keys<K_SLABS>(
						k_copy(stage), k,
						NARROW ? k_copy_full(stage) : k_full(stage),
						row + tiles.column(n - 1), batch, k_box, rows);
					if (C::PAGED) {
						next_v_box = K_SLABS == V_SLABS
								     ? k_box
								     : find_box<V_SLABS>(
									       view, size,
									       tiles.column(n - 1),
									       rows);
						if (n > 1)
							k_box = find_box<K_SLABS>(
								view, size, tiles.column(n - 2),
								rows);
					}
					if (HAS_BIAS && loading_warp() == 0) {
						barrier_wait(more_empty(keys.stage), keys.parity);
						load_bias(bias, keys.stage, tiles.column(n - 1));
					}
					keys.next();
				}
				if (n == tiles.count && loading_warp() > 0) {
					queries.next();
				} else if (n == tiles.count) {
					barrier_wait(q_empty(queries.stage), queries.parity);
					load_queries(q, queries.stage);
					queries.next();
				} else {
					i32 stage = values.stage;

					barrier_wait(Values::WIDENED ? more_empty(stage)
								     : v_empty(stage),
						     values.parity);
					load_keys<V_SLABS>(
						v_copy(stage), v,
						Values::WIDENED ? more_full(stage) : v_full(stage),
						row + tiles.column(n), batch, v_box, rows);
					values.next();
				}
				v_box = next_v_box;
			}
		}
	}

	/* ---- a mask that is data ---- */

	/* A tile that the loading warp brings: its number, and of which warpgroups some row does
	 * not see all of it. number < 0: none. by: where rows have more than HELD intervals, by
	 * which of them this warp's rows see some of it, a bit each. */
	struct SeenTile {
		i32 number;
		u32 hides, by;
	};
	/* What goes along with it in shared memory. */
	static const u32 LAST_OF_PIECE = 1u << 31;
	METHOD u32 seen_at(i32 stage) const { return lds + SEEN_AT + stage * 8; }

	/* HELD intervals of each of the block's rows, a few rows a lane: where there are no more,
	 * as in most masks, they are read once a piece. */
	static const int HELD = C::MASK_DATA == MASK_DATA_INTERVALS ? 2 : 0;
	static const int LANE_ROWS = (C::TILE_M / FMHA_WAVE + 3) / 4;
	struct SeenRows {
		DataInterval x[LANE_ROWS][HELD + 1];
		/* of votes; the warp's own number, which all of its lanes have to ask for */
		u32 turn;
		i32 warp;
		i32 word; /* the 32 tiles that were looked at last; -1: none */
		u32 by;   /* of one of them: see look() */
	};
	/* The n-th of a lane's rows, in the tile; those behind it are its last one. */
	METHOD static i32 lane_row(const SeenRows &rows, int n)
	{
		return min_of((n * 4 + rows.warp) * FMHA_WAVE, C::TILE_M - FMHA_WAVE) + lane_id();
	}
	/* Intervals of a row that are asked for together, where it has more. */
	static const int TOGETHER = GROUPS == 2 ? 3 : 1;
	METHOD bool holds_all() const
	{
		return HELD > 0 && (a.mask_data.n_endpoints + 1) / 2 <= HELD;
	}
	METHOD DataRow data_row(const SeenRows &rows, int n) const
	{
		return DataRow::make(a.mask_data, seq, tile_row + lane_row(rows, n), head);
	}
	METHOD void hold_rows(SeenRows &rows) const
	{
		UNROLL
		for (int n = 0; n < LANE_ROWS; n++)
			UNROLL
			for (int k = 0; k < HELD; k++)
				rows.x[n][k] = k < data_row(rows, n).n ? data_row(rows, n).at(k)
								 : DataInterval{0, 0};
	}

	/* bar.sync is for all lanes of a warp at once, of which one asks the copy engine alone. */
	METHOD static void sync_loaders()
	{
		wave_sync();
		named_sync(LOADER_BARRIER, GROUP_THREADS);
	}

	/* What the rows of the block see, by all loading warps; of bits that is not known. */
	METHOD DataReach reach_of_data(SeenRows &rows) const
	{
		DataReach all = DataReach::nothing();

		if (C::MASK_DATA != MASK_DATA_INTERVALS)
			return DataReach{0, seq.n_k, 0, 0};
		if (!holds_all()) /* most see what is near */
			return look<true>(rows, clamp(last_row() + seq.n_k - seq.n_q, 0,
						      seq.n_k - 1) /
							(32 * C::TILE_N));
		UNROLL
		for (int n = 0; n < LANE_ROWS; n++) {
			DataReach r = DataReach::nothing();

			UNROLL
			for (int k = 0; k < HELD; k++)
				r.add(rows.x[n][k]);
			all.join(r.of_row());
		}
		all.join_wave();
		sync_loaders(); /* the last piece's have been read */
		tell_reach(rows, all);
		sync_loaders();
		return joined_reach();
	}
	METHOD void tell_reach(const SeenRows &rows, const DataReach &reach) const
	{
		u32 x[4] = {(u32)reach.low, (u32)reach.high, (u32)reach.full_low,
			    (u32)reach.full_high};

		if (lane_id() == 0)
			store_shared_16(lds + REACHES_AT + rows.warp * 16, x);
	}
	METHOD DataReach joined_reach() const
	{
		DataReach all = DataReach::nothing();

		UNROLL
		for (int warp = 0; warp < 4; warp++) {
			u32 x[4];

			load_shared_16(lds + REACHES_AT + warp * 16, x);
			all.join(DataReach{(i32)x[0], (i32)x[1], (i32)x[2], (i32)x[3]});
		}
		return all;
	}

	/* What a row of the block sees of a tile, in a vote: bit 0: some of it; bit 1 and on: of
	 * the warpgroup's rows not all do. */
	METHOD static u32 vote_of(const DataSees &sees, const SeenRows &rows, int n)
	{
		return (u32)sees.some | (sees.all ? 0 : 2u << lane_row(rows, n) / 64);
	}
	/* The votes of all lanes of the loading warps, in every one. Two turns' places are not the
	 * same: who votes anew has been behind the barrier that all have read before. */
	METHOD u32 vote(u32 mine, SeenRows &rows) const
	{
		u32 all = __reduce_or_sync(0xffffffffu, mine), at = lds + VOTES_AT + rows.turn * 4;

		rows.turn ^= 1;
		if (lane_id() == 0)
			store_shared_byte(at + rows.warp, all);
		sync_loaders();
		all = float_to_bits(load_shared(at));
		all |= all >> 16;
		return (all | all >> 8) & 0xff;
	}

	/* Where rows have more than HELD intervals, a look is at 32 tiles at once: which some row
	 * sees, and of which not all rows of a warpgroup see all. By all loading warps. A lane
	 * keeps of one of the tiles by which of their intervals its warp's rows see some. REACHES:
	 * and what the rows see altogether. */
	template <bool REACHES> METHOD DataReach look(SeenRows &rows, i32 number) const
	{
		u32 all[4] = {}; /* some; of each warpgroup */
		DataReach reach = DataReach::nothing();

		rows.word = number, rows.by = 0;
		NO_UNROLL
		for (int n = 0; n < LANE_ROWS; n++) {
			const DataRow of = data_row(rows, n);
			u32 whole = 0;
			DataReach r = DataReach::nothing();

			NO_UNROLL
			for (i32 k = 0; k < of.n; k += TOGETHER) {
				DataInterval x[TOGETHER];

				of.some_at(k, x);
				UNROLL
				for (int i = 0; i < TOGETHER; i++) {
					const u32 some = __reduce_or_sync(
						0xffffffffu, mark(x[i], number, &whole));

					all[0] |= some;
					rows.by |= (some >> lane_id() & 1) << (k + i) % 32;
					if (REACHES)
						r.add(x[i]);
				}
			}
			reach.join(r.of_row());
			UNROLL
			for (int group = 0; group < GROUPS; group++)
				all[1 + group] |= lane_row(rows, n) / 64 == group ? ~whole : 0;
		}
		UNROLL
		for (int i = 1; i < 1 + GROUPS; i++)
			all[i] = __reduce_or_sync(0xffffffffu, all[i]);
		if (REACHES)
			reach.join_wave();
		sync_loaders(); /* what was there has been read */
		if (lane_id() == 0)
			store_shared_16(lds + MARKS_AT + rows.warp * 16, all);
		if (REACHES)
			tell_reach(rows, reach);
		sync_loaders();
		return REACHES ? joined_reach() : reach;
	}
	/* As a vote: bit 0: some row sees some of it; bit 1 and on: of a warpgroup's not all do. */
	METHOD u32 find_tile(SeenRows &rows, i32 tile) const
	{
		u32 found = 0;

		if (tile / 32 != rows.word)
			look<false>(rows, tile / 32);
		UNROLL
		for (int warp = 0; warp < 4; warp++) {
			u32 x[4];

			load_shared_16(lds + MARKS_AT + warp * 16, x);
			UNROLL
			for (int i = 0; i < 1 + GROUPS; i++)
				found |= (x[i] >> tile % 32 & 1) << i;
		}
		return found;
	}
	/* The tiles, of the 32 of this number, of which an interval has some; whole: or all. What
	 * lies behind the last key is nobody's. */
	METHOD u32 mark(const DataInterval &x, i32 number, u32 *whole) const
	{
		const i32 begin = number * 32 * C::TILE_N;
		i32 low = max_of(x.low - begin, 0), high = min_of(x.high - begin, 32 * C::TILE_N);

		if (low >= high)
			return 0;
		const u32 some = first_bits(ceil_div(high, C::TILE_N)) &
				 ~first_bits(low / C::TILE_N);

		high = x.high < seq.n_k ? high / C::TILE_N : ceil_div(high, C::TILE_N);
		*whole |= first_bits(high) & ~first_bits(ceil_div(low, C::TILE_N));
		return some;
	}

	/* The last tile before the n-th that some row of the block sees; of a piece that sees
	 * nothing the first one. By all loading warps. */
	METHOD SeenTile tile_before(const ColumnTiles &tiles, SeenRows &rows,
				    const DataReach &reach, i32 n, bool must) const
	{
		while (--n >= 0) {
			i32 column = tiles.column(n), end = min_of(column + C::TILE_N, seq.n_k);
			u32 mine = 0;

			if (column >= reach.full_low && end <= reach.full_high)
				return SeenTile{n, 0, 0};
			if (HELD > 0 && !holds_all()) {
				const u32 x = find_tile(rows, column / C::TILE_N);

				if (x & 1 || (must && n == 0))
					return SeenTile{n, x >> 1,
							shuffle_word(rows.by,
								     column / C::TILE_N % 32)};
				continue;
			}
			if (holds_all())
				UNROLL
				for (int i = 0; i < LANE_ROWS; i++) {
					DataSees sees = {false, false};

					UNROLL
					for (int k = 0; k < HELD; k++)
						sees.add(rows.x[i][k], column, end);
					mine |= vote_of(sees, rows, i);
				}
			else
				NO_UNROLL
				for (int i = 0; i < LANE_ROWS; i++)
					mine |= vote_of(this->mask_data().sees_of(
								tile_row + lane_row(rows, i), head,
								column, end),
							rows, i);
			u32 all = vote(mine, rows);

			if (all & 1 || (must && n == 0))
				return SeenTile{n, all >> 1, 0};
		}
		return SeenTile{-1, 0, 0};
	}

	/* Which columns of a tile one of the lane's rows sees, a bit each. */
	static const int COLUMN_WORDS = (C::TILE_N + 31) / 32;
	METHOD void find_columns(u32 (&seen)[COLUMN_WORDS], const SeenRows &rows, int n, u32 by,
				 i32 column) const
	{
		UNROLL
		for (int w = 0; w < COLUMN_WORDS; w++)
			seen[w] = 0;
		if constexpr (HELD == 0) {
			const u8 *bits = this->mask_data().bits_of(tile_row + lane_row(rows, n),
								   head);
			const i32 last = (seq.n_k - 1) >> 3;

			UNROLL
			for (int i = 0; i < C::TILE_N / 8; i++)
				seen[i / 4] |= (u32)load_memory(bits +
								min_of((column >> 3) + i, last) *
									a.mask_data.bits.stride_dim)
					       << i % 4 * 8;
		} else if (holds_all()) {
			UNROLL
			for (int k = 0; k < HELD; k++)
				add_columns(seen, rows.x[n][k], column);
		} else {
			const DataRow of = data_row(rows, n);

			NO_UNROLL
			for (; by; by &= by - 1)
				add_columns(seen, of.at(__ffs(by) - 1), column);
		}
	}
	METHOD static void add_columns(u32 (&seen)[COLUMN_WORDS], const DataInterval &x, i32 column)
	{
		UNROLL
		for (int w = 0; w < COLUMN_WORDS; w++)
			seen[w] |= DataMask<C>::bits_of_32(x, column + 32 * w);
	}
	/* Of eight columns a lane has two; what it has of 32 stays as far apart as it is, and that
	 * of the next 32 goes between: see hide_data(). */
	METHOD void store_places(const SeenRows &rows, u32 by, i32 column, i32 stage) const
	{
		UNROLL
		for (int n = 0; n < LANE_ROWS; n++) {
			u32 seen[COLUMN_WORDS];

			if ((n * 4 + rows.warp) * FMHA_WAVE >= C::TILE_M)
				continue;
			find_columns(seen, rows, n, by, column);
			UNROLL
			for (int lane = 0; lane < 4; lane++) {
				u32 places = 0;

				UNROLL
				for (int w = 0; w < COLUMN_WORDS; w++)
					places |= (seen[w] >> 2 * lane & 0x03030303) << 2 * w;
				store_shared(places_at(stage) + lane_row(rows, n) * 16 + lane * 4,
					     bits_to_float(places));
			}
		}
	}
	METHOD u32 places_at(i32 stage) const { return lds + PLACES_AT + stage * PLACES; }

	METHOD void load_seen(const TensorMap &q, const TensorMap &k, const TensorMap &v)
	{
		i32 number = 0; /* of the tile, among all */
		QueryRing queries = {0, 1};
		Progress at = start();
		ColumnTiles tiles;
		SeenRows rows;

		rows.turn = 0, rows.warp = loading_warp();
		while (next_piece(&at, &tiles)) {
			head_k = head / (a.nhead_q / a.nhead_k);
			i32 row = seq.k_start + seq.leftpad, batch = seq.packed_k ? 0 : seq.batch;
			i32 before = -1;

			if (a.cache.cache_batch_idx)
				batch = clamp(a.cache.cache_batch_idx[seq.batch], 0,
					      a.cache.cache_batch - 1);
			if (holds_all())
				hold_rows(rows);
			rows.word = -1;
			const DataReach reach = reach_of_data(rows);

			if (tiles.n_sink == 0)
				tiles.narrow_to_some(reach.low, reach.high);
			for (SeenTile tile = {-1, 0, 0}, next;; tile = next) {
				bool begins = tile.number < 0;

				next = tile_before(tiles, rows, reach,
						   begins ? tiles.count : tile.number, begins);
				if (begins) {
					if (next.number < 0)
						break;
					continue;
				}
				const i32 column = tiles.column(tile.number);
				const KeyRing keys = ring_of(number++);

				barrier_wait(k_empty(keys.stage), keys.parity);
				if (rows.warp == 0) {
					if (lane_id() == 0)
						store_shared_8(
							seen_at(keys.stage),
							chunk8{{(u32)column,
								tile.hides |
									(next.number < 0
										 ? LAST_OF_PIECE
										 : 0)}});
					load_rows<K_SLABS>(k_tile(keys.stage), K_SLAB, k,
							   k_full(keys.stage), row + column, head_k,
							   batch, KEY_BOX);
					if (before < 0) {
						barrier_wait(q_empty(queries.stage),
							     queries.parity);
						load_queries(q, queries.stage);
						queries.next();
					} else {
						load_value(v, ring_of(number - 2), row + before,
							   batch);
					}
					before = column;
				}
				/* While the tile is on its way. */
				if (tile.hides)
					store_places(rows, tile.by, column, keys.stage);
				wave_sync();
				release(k_full(keys.stage));
				if (next.number < 0)
					break;
			}
			if (rows.warp == 0)
				load_value(v, ring_of(number - 1), row + before, batch);
		}
	}
	/* Where the n-th tile is, for who fills it. */
	METHOD static KeyRing ring_of(i32 n)
	{
		return KeyRing{n % STAGES, (u32)(n / STAGES & 1 ^ 1)};
	}
	METHOD void load_value(const TensorMap &v, const KeyRing &values, i32 row, i32 batch) const
	{
		barrier_wait(v_empty(values.stage), values.parity);
		load_rows<V_SLABS>(v_copy(values.stage), K_SLAB, v, v_full(values.stage), row,
				   head_k, batch, KEY_BOX);
	}

	/* The column of the tile that has come, and how many follow it: of a mask that is data
	 * whether one does. */
	METHOD i32 take_tile(const ColumnTiles &tiles, i32 stage, i32 *n)
	{
		if constexpr (!HAS_DATA)
			return tiles.column(*n);
		chunk8 tile = load_shared_8(seen_at(stage));

		*n = tile.w[1] & LAST_OF_PIECE ? 0 : 1;
		hides = tile.w[1] >> warpgroup() & 1;
		return (i32)tile.w[0];
	}

	/* Reads which of the lane's elements of a tile their rows see, a bit a place. */
	METHOD void find_seen_places(i32 stage)
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++)
			seen_places[r] = float_to_bits(
				load_shared(places_at(stage) + lane_id() % 4 * 4 +
					    (wave_m * 16 + Core::stat_row(r)) * 16));
		wave_sync(); /* before a lane says that the stage has been read */
	}
	/* In the order of bits, of which eight become predicates at once. */
	METHOD void hide_data(Scores &s, float hidden) const
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++)
			UNROLL
			for (int bit = 0; bit < 32; bit++) {
				const int eight = bit % 8 / 2 * 4 + bit / 8; /* columns */

				if (eight < 2 * TN && !(seen_places[r] >> bit & 1))
					s.t[0][eight / 2].x[eight % 2 * 4 + r * 2 + bit % 2] =
						hidden;
			}
	}

	/* The stage of the copy of a tile that goes to @tile, and the parity of its arrival: of one
	 * stage every other tile's. */
	static_assert(COPIES == STAGES || (COPIES == 1 && STAGES == 2), "as copy_of() counts");
	METHOD static CopyRing copy_of(const KeyRing &tile)
	{
		return COPIES == STAGES ? CopyRing{tile.stage, tile.parity ^ 1}
					: CopyRing{0, (u32)tile.stage};
	}

	/* Values that no row of the block sees, see fwd_block.h, become zeros here. */
	METHOD void widen_tiles()
	{
		KeyRing keys = {0, 1}, values = {0, 1};
		Progress at = start();
		ColumnTiles tiles;

		while (next_piece(&at, &tiles)) {
			const Reach<C> block = reach_of(tile_row, last_row());

			if constexpr (NARROW)
				widen_key_tile(keys);
			NO_UNROLL
			for (i32 n = tiles.count - 1; n >= 0; n--) {
				if constexpr (NARROW)
					if (n > 0)
						widen_key_tile(keys);
				widen_value_tile(values, block, tiles.column(n));
			}
		}
	}
	METHOD static i32 widening_warp() { return wave_id() - C::WAVES_M - 1; }
	METHOD void widen_key_tile(KeyRing &keys) const
	{
		i32 stage = keys.stage;
		const CopyRing copy = copy_of(keys);

		barrier_wait(k_copy_full(copy.stage), copy.parity);
		barrier_wait(k_empty(stage), keys.parity);
		/* They do not share a tile evenly: who has most of the values has least of the
		 * keys. */
		WideKeys::widen_tile(k_tile(stage), k_copy(copy.stage), 0, C::TILE_N,
				     WIDENING_WARPS - 1 - widening_warp(), WIDENING_WARPS);
		fence_async();
		wave_sync();
		release(k_copy_empty(copy.stage));
		release(k_full(stage));
		keys.next();
	}
	METHOD void widen_value_tile(KeyRing &values, const Reach<C> &block, i32 column) const
	{
		i32 stage = values.stage;
		const CopyRing copy = copy_of(values);

		barrier_wait(more_full(copy.stage), copy.parity);
		barrier_wait(v_empty(stage), values.parity);
		Values::widen_tile(v_tile(stage), v_copy(copy.stage),
				   block.first_value(band, column) - column,
				   block.end_of_values(band) - column, widening_warp(),
				   WIDENING_WARPS);
		fence_async();
		wave_sync();
		release(more_empty(copy.stage));
		release(v_full(stage));
		values.next();
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
		/* Hidden, since what is found ahead of the loop is not in uniform registers. */
		u64 q = wgmma_descriptor(q_tile(hidden(q_stage)) + warpgroup() * slab_bytes(64), 0);
		u64 k = wgmma_descriptor(k_tile(k_stage), 0);

		start_along<Element, C::HDIM_Q * ELEMENT / 32, Q_SLAB, K_SLAB>(s.t[0], q, k);
	}

	METHOD void start_output(const Weights &p, i32 stage)
	{
		settle(o.t[0]);
		wgmma_begin();
		Values::multiply(o, p, v_tile(stage));
		wgmma_commit();
	}

	/* Where registers are few: what follows from it is not found ahead of the loop, and kept. */
	METHOD static i32 lane_anew()
	{
		i32 lane = lane_id();

		return CAPPED ? (i32)shuffle_word((u32)lane, lane) : lane;
	}

	/* V's rows that no row of the block sees, see fwd_block.h: where the copy brought them they
	 * become zero. Every warpgroup does so for itself. */
	METHOD void clear_unseen(i32 stage, i32 column, const Reach<C> &reach) const
	{
		i32 begin = reach.first_value(band, column) - column,
		    end = reach.end_of_values(band) - column;

		if (Values::WIDENED || (begin <= 0 && end >= C::TILE_N))
			return;
		i32 thread = CAPPED ? wave_m % 4 * FMHA_WAVE + lane_anew()
				    : thread_id() % GROUP_THREADS;
		const int CHUNKS = V_SLABS * 8; /* a thread keeps to one chunk of 16 bytes */

		for (i32 r = thread / CHUNKS; r < C::TILE_N; r += GROUP_THREADS / CHUNKS)
			if (r < begin || r >= end)
				store_zeros(v_tile(stage) + thread % CHUNKS / 8 * K_SLAB + r * 128 +
					    thread % 8 * 16);
		fence_async();
		named_sync(OWN_BARRIER + warpgroup(), GROUP_THREADS);
	}

	/* That the tile's n-th row sees. */
	METHOD i32 last_column(i32 n) const
	{
		return C::MASK ? band.last(row_of(n)) : band.end - 1;
	}

	/* Scores that must not count become @hidden. Columns, as constants, are compared with what
	 * the lane's place leaves of an edge. */
	METHOD void mask_end(Scores &s, i32 column, float hidden) const
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 last = last_column(wave_m * 16 + Core::stat_row(r)) - column -
				   Core::column(0);

			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++)
					if (Core::stat(e) == r && place(n, e) > last)
						s.t[0][n].x[e] = hidden;
		}
	}
	METHOD void mask_begin(Scores &s, i32 column, float hidden) const
	{
		i32 from = column + Core::column(0), sinks = band.sinks - from;
		i32 begin = band.begin - from; /* sinks of another split are not this one's */

		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 first = band.first(row_of(wave_m * 16 + Core::stat_row(r))) - from;

			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++)
					if (Core::stat(e) == r && place(n, e) < first &&
					    (place(n, e) >= sinks ||
					     (C::SPLIT && place(n, e) < begin)))
						s.t[0][n].x[e] = hidden;
		}
	}
	METHOD bool mask(Scores &s, i32 column, const Reach<C> &mine, float hidden) const
	{
		bool cuts_end = column + C::TILE_N > mine.end,
		     cuts_begin = (C::MASK || C::SPLIT) && column < mine.begin;

		if (cuts_end)
			mask_end(s, column, hidden);
		if (cuts_begin)
			mask_begin(s, column, hidden);
		if constexpr (HAS_DATA) {
			if (hides)
				hide_data(s, hidden);
			return cuts_end || cuts_begin || hides;
		}
		return cuts_end || cuts_begin;
	}
	/* The place of an element, from the lane's first column on. */
	METHOD static constexpr int place(int n, int e) { return n * 16 + e % 2 + e / 4 * 8; }

	/* What every row of the piece needs. */
	METHOD void make_modifiers()
	{
		modifiers = Modifiers<C>::make(a, seq);
		o_scale = 1.0f / (1 << SHIFT);
		if (C::DESCALE) {
			head_k = head / (a.nhead_q / a.nhead_k);
			modifiers.scale *= this->factor(a.q_descale, head) *
					   this->factor(a.k_descale, head_k);
			o_scale *= this->factor(a.v_descale, head_k);
		}
		bool folds = !C::SOFTCAP && !HAS_BIAS && modifiers.scale > 0;

		modifiers.unit = folds ? modifiers.scale * FMHA_LOG2_E : FMHA_LOG2_E;
		logit = folds ? 1.0f / modifiers.scale : 1.0f;
		if constexpr (APPROXIMATE) {
			modifiers.scale *= reciprocal(modifiers.soft_cap);
			if (!HAS_BIAS) {
				modifiers.unit = modifiers.soft_cap * FMHA_LOG2_E;
				logit = 1.0f / modifiers.soft_cap;
			}
		}
		if (C::BIAS == BIAS_ALIBI)
			slope = load_memory(modifiers.slopes + head) * logit;
		if (CAPPED)
			capped.init();
	}

	/* Raw products become scores, but for what all of a row have in common, see left_out(). */
	METHOD void modify(Scores &s, i32 column, i32 bias_stage) const
	{
		if constexpr (APPROXIMATE)
			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++)
					s.t[0][n].x[e] =
						tanh_fast(s.t[0][n].x[e] * modifiers.scale);
		else if (C::SOFTCAP)
			Capped::cap(s, modifiers.scale, modifiers.soft_cap);
		else if (!HAS_BIAS && !(modifiers.scale > 0))
			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++)
					s.t[0][n].x[e] *= modifiers.scale;
		if (C::BIAS == BIAS_ALIBI)
			add_distances(s, column);
		if (HAS_BIAS)
			add_bias(s, bias_stage);
	}

	/* ALiBi. The part that grows with the row's number in the warpgroup is left out: left of
	 * the diagonal, or where a mask hides what is right of it, the rest is one number a column. */
	METHOD i32 first_row() const { return tile_row + warpgroup() * 64; }
	METHOD void add_distances(Scores &s, i32 column) const
	{
		i32 from = column + Core::column(0) - modifiers.diagonal;
		/* Out of ptxas' sight: it would keep the slope times each place in registers. */
		float slope = shuffle_from(this->slope, 0);

		if (band.anchor_right <= modifiers.diagonal ||
		    column + C::TILE_N - 1 <= first_row() + modifiers.diagonal) {
			float at = slope * (float)(from - first_row());

			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++)
					s.t[0][n].x[e] += slope * place(n, e) + at;
			return;
		}
		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 row = wave_row() + Core::stat_row(r);
			float distance = (float)(row - from),
			      more = slope * (float)(row - first_row());

			UNROLL
			for (int n = 0; n < TN; n++)
				UNROLL
				for (int e = 0; e < Core::E; e++)
					if (Core::stat(e) == r)
						s.t[0][n].x[e] += more -
								  slope * magnitude_of(distance -
										       place(n, e));
		}
	}

	/* What modify() has left out of a row's scores. */
	METHOD float left_out(i32 row) const
	{
		return (C::SOFTCAP && !APPROXIMATE ? modifiers.soft_cap : 0.0f) -
		       (C::BIAS == BIAS_ALIBI ? slope * (float)(row - first_row()) : 0.0f);
	}

	METHOD void add_bias(Scores &s, i32 stage) const
	{
		i32 lane = lane_id(), row = a.bias.stride_seq ? wave_m * 16 + lane % 16 : 0;
		u32 at = bias_tile(stage) + row * SLAB_WIDTH;
		/* of what was capped, or a raw product */
		const float scale = APPROXIMATE  ? modifiers.soft_cap
				    : C::SOFTCAP ? 1.0f
						 : modifiers.scale;

		UNROLL
		for (int n = 0; n < TN; n++) {
			i32 chunk = n % 4 * 2 + lane / 16;
			MmaOperand x = load_matrix(at + n / 4 * Q_SLAB + ((chunk ^ row % 8) * 16));

			UNROLL
			for (int i = 0; i < 4; i++) {
				s.t[0][n].x[2 * i] = s.t[0][n].x[2 * i] * scale +
						     Element::to_float((u16)x.r[i]);
				s.t[0][n].x[2 * i + 1] = s.t[0][n].x[2 * i + 1] * scale +
							 Element::to_float((u16)(x.r[i] >> 16));
			}
		}
	}

	METHOD Steps steps() const { return Steps{*this, keys, modifiers}; }

	/* What a row does not see has no part in its maximum, and then no weight. FIRST: of a
	 * piece, of which there are few. */
	template <bool FIRST>
	METHOD bool weigh_capped(Scores &s, i32 column, const Reach<C> &mine,
				 RowVector<Core, 1> *factor)
	{
		float sum[Core::STATS] = {0, 0};
		bool masked = mask(s, column, mine, minus_infinity()), moved = true;

		factor->fill(1.0f); /* so that it is not kept from tile to tile */
		if (FIRST) {
			capped.find_origin(rows, s, factor);
			capped.exponentiate(s, sum);
		} else {
			float size = capped.largest_size(s);

			moved = any_of_wave(capped.may_move(rows, size)) &&
				capped.find_origin(rows, s, factor);
			if (!HAS_NEAR || any_of_wave(size > capped.number(Capped::NEAR)))
				capped.exponentiate_quads(s, sum);
			else
				capped.exponentiate_near(s, sum);
		}
		if (masked) {
			mask(s, column, mine, 0.0f);
			capped.add_up(s, sum);
		}
		UNROLL
		for (int r = 0; r < Core::STATS; r++)
			rows.l(0, r) += sum[r];
		if (C::DROPOUT)
			steps().drop(s, wave_row(), column);
		return moved;
	}

	/* Scores become weights, but for their rounding. */
	template <bool FIRST>
	METHOD bool weigh(Scores &s, i32 column, const Reach<C> &mine, const KeyRing &bias,
			  RowVector<Core, 1> *factor)
	{
		if constexpr (CAPPED)
			return weigh_capped<FIRST>(s, column, mine, factor);
		if (HAS_BIAS)
			barrier_wait(more_full(bias.stage), bias.parity);
		modify(s, column, bias.stage);
		if (HAS_BIAS) {
			/* lanes have read it, each for itself; the ends of products are the
			 * warpgroup's */
			wave_sync();
			release(more_empty(bias.stage));
		}
		mask(s, column, mine, minus_infinity());
		bool moved = Rule::update(rows, s, modifiers.unit, factor);
		if (C::DROPOUT)
			steps().drop(s, wave_row(), column);
		return moved;
	}

	/* The same in two steps: LATE. */
	METHOD bool raise_maxima(Scores &s, i32 column, const Reach<C> &mine,
				 RowVector<Core, 1> *factor)
	{
		modify(s, column, 0);
		mask(s, column, mine, minus_infinity());
		return Rule::raise_all(rows, s, modifiers.unit, factor);
	}
	METHOD void exponentiate(Scores &s, i32 column)
	{
		UNROLL
		for (int r = 0; r < Core::STATS; r++)
			Rule::exponentiate(rows, s, 0, r, modifiers.unit);
		if (C::DROPOUT)
			steps().drop(s, wave_row(), column);
	}

	/* The columns that all of the rows first .. last see. */
	METHOD Reach<C> reach_of(i32 first, i32 last) const
	{
		return Reach<C>{first, last, band.first(last),
				C::MASK ? band.last(first) + 1 : band.end};
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

	/* Of a warpgroup without rows in the piece: tiles come and go as the others read them. */
	METHOD void pass_by(const ColumnTiles &tiles, KeyRing &keys, KeyRing &values,
			    QueryRing &queries) const
	{
		barrier_wait(q_full(queries.stage), queries.parity);
		release(q_empty(queries.stage));
		queries.next();
		for (i32 n = tiles.count; n > 0; n--) {
			if (n < tiles.count) {
				take_turn();
				give_turn();
			}
			barrier_wait(k_full(keys.stage), keys.parity);
			release(k_empty(keys.stage));
			keys.next();
			barrier_wait(v_full(values.stage), values.parity);
			release(v_empty(values.stage));
			values.next();
		}
	}

	METHOD void walk(const ColumnTiles &tiles, KeyRing &keys, KeyRing &values,
			 QueryRing &queries)
	{
		const Reach<C> block = reach_of(tile_row, last_row());
		const Reach<C> mine = reach_of(row_of(warpgroup() * 64),
					       min_of(row_of(warpgroup() * 64 + 63), last_row()));
		i32 n = tiles.count - 1, column;
		RowVector<Core, 1> factor;
		Scores s;
		Weights p;

		barrier_wait(q_full(queries.stage), queries.parity);
		barrier_wait(k_full(keys.stage), keys.parity);
		column = take_tile(tiles, keys.stage, &n);
		start_scores(s, queries.stage, keys.stage);
		if (HAS_DATA && hides)
			find_seen_places(keys.stage);
		wgmma_wait<0>();
		settle(s.t[0]);
		release(k_empty(keys.stage));
		weigh<true>(s, column, mine, keys, &factor);
		keys.next();
		p = Values::round(s);
		if (n > 0)
			barrier_wait(k_full(keys.stage), keys.parity);
		NO_UNROLL
		while (--n >= 0) {
			i32 before = column;

			column = take_tile(tiles, keys.stage, &n);
			take_turn();
			start_scores(s, queries.stage, keys.stage);
			barrier_wait(v_full(values.stage), values.parity);
			clear_unseen(values.stage, before, block);
			start_output(p, values.stage);
			give_turn();
			if (HAS_DATA && hides)
				find_seen_places(keys.stage);
			wgmma_wait<1>();
			settle(s.t[0]);
			release(k_empty(keys.stage));
			bool moved = LATE ? raise_maxima(s, column, mine, &factor)
					  : weigh<false>(s, column, mine, keys, &factor);
			keys.next();
			if (!LATE)
				settle(s.t[0]);
			/* Here, not before the product: without a branch the assembler moves what
			 * comes before it behind the wait for O, and nothing overlaps. */
			if (n > 0)
				barrier_wait(k_full(keys.stage), keys.parity);
			wgmma_wait<0>();
			settle(o.t[0]);
			release(v_empty(values.stage));
			values.next();
			if (moved)
				scale_rows(o, factor);
			if (LATE)
				exponentiate(s, column);
			p = Values::round(s);
		}
		release(q_empty(queries.stage));
		queries.next();
		barrier_wait(v_full(values.stage), values.parity);
		clear_unseen(values.stage, column, block);
		start_output(p, values.stage); /* under way when this returns */
	}

	/* ---- parts of the last pieces ---- */

	/* Where a lane has four numbers of its O, of a part; behind O those of its rows. */
	METHOD float *part_at(i32 number, int chunk) const
	{
		const i64 floats = ABI_PART_FLOATS(C::TILE_M, C::HDIM_V);

		return a.rest.parts + number * floats + wave_m * (floats / C::WAVES_M) +
		       (chunk * FMHA_WAVE + lane_id()) * 4;
	}
	static const int PART_CHUNKS = 2 * TD;

	METHOD static void store_part(float *to, const float *x)
	{
		*(chunk16 *)to =
			chunk16{{float_to_bits(x[0]), float_to_bits(x[1]), float_to_bits(x[2]),
				 float_to_bits(x[3])}};
	}

	/* A warp's 16 rows are nobody else's. Whose part of them comes last adds all up in their
	 * order, its own, too, so that the sum does not depend on who that is. Return: whether this
	 * warp has. */
	METHOD bool join_parts()
	{
		const i32 n = a.rest.n_splits, part = own_part(), tile = part / n;

		UNROLL
		for (int i = 0; i < PART_CHUNKS; i++)
			store_part(part_at(part, i), o.t[0][i / 2].x + i % 2 * 4);
		const float mine[4] = {rows.m(0, 0), rows.l(0, 0), rows.m(0, 1), rows.l(0, 1)};

		store_part(part_at(part, PART_CHUNKS), mine);
		if (!arrive_last(a.rest.arrivals + tile * C::WAVES_M + wave_m, n))
			return false;
		o.zero();
		rows.init();
		NO_UNROLL
		for (i32 s = 0; s < n; s++) {
			const chunk16 x = load16(part_at(tile * n + s, PART_CHUNKS));
			float keep[Core::STATS], weight[Core::STATS];

			UNROLL
			for (int r = 0; r < Core::STATS; r++) {
				float m = bits_to_float(x.w[2 * r]), high = larger(rows.m(0, r), m);
				bool sees = high != minus_infinity();

				keep[r] = sees ? exp2_fast((rows.m(0, r) - high) * modifiers.unit)
					       : 0.0f;
				weight[r] = sees ? exp2_fast((m - high) * modifiers.unit) : 0.0f;
				rows.m(0, r) = high;
				rows.l(0, r) = rows.l(0, r) * keep[r] +
					       bits_to_float(x.w[2 * r + 1]) * weight[r];
			}
			UNROLL
			for (int i = 0; i < PART_CHUNKS; i++) {
				const chunk16 y = load16(part_at(tile * n + s, i));

				UNROLL
				for (int e = 0; e < 4; e++) {
					const int r = Core::stat(i % 2 * 4 + e);
					float &sum = o.t[0][i / 2].x[i % 2 * 4 + e];

					sum = sum * keep[r] + bits_to_float(y.w[e]) * weight[r];
				}
			}
		}
		return true;
	}

	/* LSE is stored at once. @has: there is something to store. */
	METHOD WgmmaRows finish_rows(bool has)
	{
		ForwardOutput<C, 1> output = {*this, o, rows, modifiers.unit, wave_m};
		output.are_parts = C::SPLIT && a.o_acc;
		i32 bytes = ELEMENT == 2 || a.o_dtype != ABI_F32 ? 2 : 4;
		WgmmaRows results;

		UNROLL
		for (int r = 0; r < Core::STATS; r++) {
			i32 n = wave_m * 16 + Core::stat_row(r), row = row_of(n);
			const RowPlace place = {row, head + head_of(n)};
			float sum = Core::row_sum(rows.l(0, r)) * (1.0f / (1 << SHIFT)), lse;
			float m = CAPPED ? capped.maximum(rows.m(0, r), r) : rows.m(0, r);

			results.factor[r] = output.finish_row(m + left_out(row), sum, place.head,
							      &lse) *
					    o_scale;
			results.to[r] = 0;
			if (has && (C::SPLIT ? row <= last_row() : row < n_rows)) {
				results.to[r] = output.are_parts
							? (char *)(a.o_acc +
								   output.split_row(place) *
									   a.hdim_v)
							: (char *)a.o.data +
								  q_offset(a.o, seq, row,
									   place.head) *
									  bytes;
				if (lane_id() % 4 == 0)
					output.store_lse(place, lse);
			}
		}
		return results;
	}

	/* The last product is under way when this returns, but of a part of a piece. */
	METHOD WgmmaRows begin_piece(const ColumnTiles &tiles, KeyRing &keys, KeyRing &values,
				     QueryRing &queries)
	{
		make_modifiers();
		o.zero();
		rows.init();
		if (C::DROPOUT && a.dropout.randval.data)
			store_randval<C>(*this);
		walk(tiles, keys, values, queries);
		bool has = true;

		if constexpr (CUTS_REST)
			if (own_part() >= 0) {
				wgmma_wait<0>();
				settle(o.t[0]);
				has = join_parts();
			}
		return finish_rows(has);
	}
	METHOD void end_piece(const WgmmaRows &results, KeyRing &values)
	{
		wgmma_wait<0>();
		settle(o.t[0]);
		release(v_empty(values.stage));
		values.next();
		if (C::SPLIT && a.o_acc)
			Values::store_floats(o, results, a.hdim_v);
		else
			Values::store(o, results, a.hdim_v, a.o_dtype, lane_anew());
	}

	METHOD void multiply()
	{
		KeyRing keys = {0, 0}, values = {0, 0};
		QueryRing queries = {0, 0};
		Progress at = start();
		ColumnTiles tiles;

		wave_m = wave_id();
		if (TURNS && warpgroup() == GROUPS - 1)
			give_turn();
		if constexpr (C::SPLIT) {
			/* Nothing is under way where the two ways meet: ptxas would end it there. */
			while (next_piece(&at, &tiles))
				if (row_of(warpgroup() * 64) > last_row())
					pass_by(tiles, keys, values, queries);
				else
					end_piece(begin_piece(tiles, keys, values, queries),
						  values);
		} else {
			for (bool more = next_piece(&at, &tiles); more;) {
				const WgmmaRows results = begin_piece(tiles, keys, values, queries);

				more = next_piece(&at, &tiles);
				end_piece(results, values);
			}
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
				barrier_init(k_full(i), NARROW ? WIDENING_WARPS : KEY_ARRIVALS);
				barrier_init(v_full(i),
					     Values::WIDENED ? WIDENING_WARPS : COPYING_WARPS);
				barrier_init(k_empty(i), C::WAVES_M);
				barrier_init(v_empty(i), C::WAVES_M);
			}
			UNROLL
			for (int i = 0; i < COPIES && (Values::WIDENED || HAS_BIAS); i++) {
				barrier_init(more_full(i), 1);
				barrier_init(more_empty(i),
					     Values::WIDENED ? WIDENING_WARPS : C::WAVES_M);
			}
			UNROLL
			for (int i = 0; i < COPIES && NARROW; i++) {
				barrier_init(k_copy_full(i), 1);
				barrier_init(k_copy_empty(i), WIDENING_WARPS);
			}
			barrier_publish();
			if (C::SPLIT)
				cut_tile();
			if (CAPPED)
				Capped::prepare(lds + NUMBERS_AT, a.scale, a.logits_soft_cap);
		}
		block_sync();
		if (C::SPLIT) {
			clear_nobodys_rows();
			block_sync();
		}
	}

	/* bias: without one, any. */
	METHOD void run(char *memory, const TensorMap &q, const TensorMap &k, const TensorMap &v,
			const TensorMap &bias)
	{
		lds = shared_address(memory);
		capped.numbers = lds + NUMBERS_AT;
		make_barriers();
		wait_for_stage_before();
		if (C::SPLIT && a.o_acc) /* else what follows is somebody else's */
			let_next_stage_begin();
		if (wave_id() >= C::WAVES_M) {
			give_registers<LOADER_REGISTERS>();
			if constexpr (HAS_DATA) {
				load_seen(q, k, v);
			} else if (LOADING_WARPS == 4 || wave_id() == C::WAVES_M) {
				load(q, k, v, bias);
			}
			if constexpr (Values::WIDENED)
				if (wave_id() > C::WAVES_M)
					widen_tiles();
		} else {
			take_registers<PRODUCT_REGISTERS>();
			multiply();
		}
	}
};

/* P is f16 beside values of 8 bits. */
template <class C> struct WeightsInF16 : C {
	typedef CoreMma<F16> Core;
};
template <class C, bool BYTES> struct SelectForward {
	typedef ForwardWgmma<C> Type;
};
template <class C> struct SelectForward<C, true> {
	typedef ForwardWgmma<WeightsInF16<C>> Type;
};
typedef SelectForward<Config, sizeof(Config::Element::Storage) == 1>::Type SelectedForward;

/* Behind the arguments the maps that gpu_maps.c describes. */
#define FMHA_OWN_ENTRY
extern "C" __global__ void FMHA_BOUNDS(SelectedForward::THREADS, 1)
	FMHA_ENTRY(const abi_fwd_args args, const __grid_constant__ TensorMap q,
		   const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v
#if FMHA_BIAS == 1
		   ,
		   const __grid_constant__ TensorMap bias
#endif
	)
{
	FMHA_LDS;
	SelectedForward kernel(args);

#if FMHA_BIAS == 1
	kernel.run(lds, q, k, v, bias);
#else
	kernel.run(lds, q, k, v, v);
#endif
}

#endif
