/* SPDX-License-Identifier: MIT */
/*
 * fwd_amd.h: forward attention on AMD's matrix cores: keys of f16, bf16 and, where they multiply
 * it, e4m3, whose rows are dense and begin at multiples of 16 bytes, in pages of 16 of them or a
 * larger power of two, too. What is computed is in fwd_scores.h, scores.h and fwd_output.h; here is
 * how a tile gets to the matrix units with little else to do for the vector units.
 *
 * A wave owns SIDE rows, 32 on CDNA and 16 on RDNA, and keeps them as operands. Products are
 * transposed, S^T = K Q^T and O^T = V^T P^T: a lane holds scores of one row, and P is the operand
 * of the second product where it stands (RDNA3 exchanges half waves). Operands come in slabs
 * (slab.h) along what is summed: 16 bytes a lane, for as many instructions as it takes. Which
 * elements of a slab are which is up to us, as long as both sides agree: where a lane's scores are
 * not neighbours, V lies in LDS in their order.
 *
 * K lies in LDS by rows, V transposed, both in units of 16 bytes that are permuted within a row
 * (slab.h). There are two stages: tile n is multiplied, n + 1 is written, n + 2 is on its way from
 * memory, and one barrier a tile is enough. A tile is fetched through a descriptor of its own,
 * which ends where the keys do: what lies behind reads as zero, and a lane's offset is the same in
 * every tile.
 */
#ifndef FMHA_GPU_FWD_AMD_H
#define FMHA_GPU_FWD_AMD_H

#include "block/fwd_output.h"
#include "block/fwd_scores.h"
#include "staged_bias.h"
#include "slab_softmax.h"
#include "stage.h"

template <class Base> struct Forward {
	typedef AmdConfig<Base> C;
	typedef typename C::Core Core;
	typedef typename Core::Wide Wide;
	typedef typename C::Element Element;
	static const int SIDE = Core::SIDE, TN = C::TILE_N / 16, STEPS = C::HDIM_Q / SLAB_DEPTH;
	static_assert(SIDE * C::WAVES_M == C::TILE_M && C::WAVES_N == 1, "a wave owns SIDE rows");
	static const int DT = C::HDIM_V / SIDE;

	static const int RUN = C::PAGED ? 16 : C::TILE_N; /* keys that lie in one page */
	typedef RowStage<C::TILE_N, C::HDIM_Q, C::THREADS, RUN> KeyTile;
	typedef typename ValueStage<C::TILE_N, C::HDIM_V, C::THREADS, RUN, SLAB_ELEMENT>::Type
		ValueTile;
	typedef ForwardScores<C, 1, TN> Steps;
	typedef RegTile<Core, 1, TN> Scores;
	typedef StagedBias<C, false, C::TILE_N> Bias;
	typedef SlabWeights<typename Core::Type> Weights;
	typedef SlabSoftmax<Core, Weights, C::BIAS == BIAS_MATRIX> Rule;
	static const int V_AT = KeyTile::BYTES, STAGE_BYTES = V_AT + ValueTile::BYTES;
	static_assert(lds_amd(C::cut(C::TILE_M, C::TILE_N), SLAB_ELEMENT) <= C::LDS_BYTES,
		      "the host asks lds.h, too");
	static_assert(2 * STAGE_BYTES <= C::LDS_BYTES, "two stages");

	ForwardBlock<C> block;
	Band band;
	Modifiers<C> modifiers;
	float o_scale; /* of the values, and of packed weights */
	i32 wave;
	Slab q[STEPS];
	Wide o[DT];
	Rule softmax;

	METHOD Forward(const abi_fwd_args &args) : block(args) {}

	METHOD i32 wave_row() const { return block.tile_row + wave * SIDE; }

	METHOD void run(char *lds)
	{
		block.locate(block_id_x(), block_id_y(), block_id_z());
		if (block.is_idle())
			return;
		wave = wave_id();
		band = block.band();
		make_modifiers();
		UNROLL
		for (int d = 0; d < DT; d++)
			o[d] = Wide(0.0f);
		softmax.init();
		fetch_operand(q, block.queries(), wave_row(), block.n_rows);
		prepare_queries();
		sum_tiles(lds);
		store((float *)lds);
		if (C::DROPOUT && block.a.dropout.randval.data && block.split == 0)
			store_randval(block);
	}

	METHOD void make_modifiers()
	{
		const abi_fwd_args &a = block.a;

		modifiers = Modifiers<C>::make(a, block.seq);
		modifiers.scale *= SLAB_UNIT * SLAB_UNIT;
		o_scale = SLAB_UNIT * Weights::LOST;
		if (!C::FACTORS)
			return;
		modifiers.scale *= block.factor(a.q_descale, block.head) *
				   block.factor(a.k_descale, block.head_k);
		o_scale *= block.factor(a.v_descale, block.head_k);
	}

	/* Only the device knows the sign of a scale with factors. Raw products have the order of
	 * scores where it is above zero: otherwise Q takes its sign, or is zero. */
	METHOD void prepare_queries()
	{
		float scale = modifiers.scale;
		bool takes_sign = C::FACTORS && !C::LOGITS;
		const u32 signs = SLAB_ELEMENT == 2 ? 0x80008000u : 0x80808080u;
		u32 turned = takes_sign && scale < 0 ? signs : 0,
		    kept = takes_sign && scale == 0 ? 0 : ~0u;

		if (SLAB_ELEMENT == 2 && !C::FACTORS)
			return;
		if (!C::LOGITS)
			modifiers.unit = scale == 0 ? FMHA_LOG2_E
						    : magnitude_of(scale) * FMHA_LOG2_E;
		UNROLL
		for (int s = 0; s < STEPS; s++)
			UNROLL
			for (int i = 0; i < SLAB_WORDS; i++)
				q[s].w[i] = (q[s].w[i] ^ turned) & kept;
		if (SLAB_ELEMENT == 1)
			UNROLL
			for (int s = 0; s < STEPS; s++)
				to_slab_words(q[s].w);
	}

	/* The keys and values of a tile, on their way. */
	struct Stream {
		const Reach<C> &reach;
		const Band &band;
		typename ForwardBlock<C>::Keys keys, values;
		KeyTile k;
		ValueTile v;
		i32 shift; /* pages are powers of two */
		/* the page table's, of the next tile to fetch */
		i32 k_entries[KeyTile::COUNT], v_entries[ValueTile::COUNT];

		METHOD void begin(i32 column)
		{
			if (C::PAGED)
				keys.see_pages(), values.see_pages();
			shift = C::PAGED ? __builtin_ctz((u32)keys.page_size) : 0;
			k.begin((u32)keys.stride_seq * SLAB_ELEMENT, keys.hdim);
			v.begin((u32)values.stride_seq * SLAB_ELEMENT, values.hdim);
			look_up(column);
		}

		METHOD void look_up(i32 column)
		{
			UNROLL
			for (int n = 0; n < KeyTile::COUNT && C::PAGED; n++)
				k_entries[n] = keys.entry_of_page((column + KeyTile::run_of(n)) >>
								  shift);
			UNROLL
			for (int n = 0; n < ValueTile::COUNT && C::PAGED; n++)
				v_entries[n] = keys.entry_of_page((column + ValueTile::run_of(n)) >>
								  shift);
		}

		/* The address of a run from `column` on. */
		METHOD const typename Element::Storage *
		at(const typename ForwardBlock<C>::Keys &view, i32 column, i32 entry) const
		{
			if (!C::PAGED)
				return view.base + column * view.stride_seq;
			return view.base + view.page_at(entry) * view.stride_page +
			       (column & (view.page_size - 1)) * view.stride_seq;
		}

		METHOD Piece key_piece(i32 column, i32 entry) const
		{
			return Piece{Buffer::rows(at(keys, column, entry), band.end - column, RUN,
						  (u32)keys.stride_seq * SLAB_ELEMENT,
						  keys.hdim * SLAB_ELEMENT),
				     0};
		}
		METHOD Piece value_piece(i32 skip, i32 column, i32 entry) const
		{
			u32 v_bytes = (u32)values.stride_seq * SLAB_ELEMENT;

			return Piece{
				Buffer::rows(at(values, column, entry) + skip * values.stride_seq,
					     reach.end_of_values(band) - (column + skip),
					     RUN - skip, v_bytes, values.hdim * SLAB_ELEMENT),
				skip * v_bytes};
		}

		/* Most tiles have no key before the first one that counts, and nothing to take from
		 * offsets. */
		METHOD void fetch_values(i32 column, i32 first)
		{
			if (first > column) {
				v.fetch([&](int n) {
					i32 at = column + ValueTile::run_of(n);

					return value_piece(clamp(first - at, 0, RUN), at,
							   v_entries[n]);
				});
				scheduling_barrier(); /* which keeps both ways apart */
			} else {
				v.fetch([&](int n) {
					return value_piece(0, column + ValueTile::run_of(n),
							   v_entries[n]);
				});
			}
		}

		/* @next: the column that is fetched then. */
		METHOD void fetch(i32 column, i32 next)
		{
			k.fetch([&](int n) {
				return key_piece(column + KeyTile::run_of(n), k_entries[n]);
			});
			fetch_values(column, C::MASK ? reach.first_value(band, column) : column);
			look_up(next);
		}
		METHOD void arrive(char *stage)
		{
			k.arrive(stage);
			v.arrive(stage + V_AT);
		}
	};

	METHOD void sum_tiles(char *lds)
	{
		const Reach<C> reach = Reach<C>::make(block, band);
		const ColumnTiles tiles = reach.tiles(band);
		const Steps steps = {block, block.keys(), modifiers};
		Stream stream = {reach, band, block.keys(), block.values(), {}, {}, 0, {}, {}};

		typename Bias::View bias_view;
		Bias bias;

		if (tiles.count <= 0)
			return;
		if (C::BIAS == BIAS_MATRIX)
			bias_view = Bias::View::make(block.bias(), block.seq, block.tile_row,
						     wave * SIDE + Core::line());
		stream.begin(tiles.column(0));
		stream.fetch(tiles.column(0), tiles.column(1));
		stream.arrive(lds);
		stream.fetch(tiles.column(1), tiles.column(2));
		block_sync();
		NO_UNROLL
		for (i32 n = 0; n < tiles.count; n++) {
			char *stage = lds + (n & 1) * STAGE_BYTES;
			i32 column = tiles.column(n);
			Scores s;

			if (C::BIAS == BIAS_MATRIX)
				bias.fetch(bias_view, column, block.seq.n_k);
			multiply_rows<typename KeyTile::Store, STEPS>(s, stage, q);
			stream.arrive(lds + (~n & 1) * STAGE_BYTES);
			stream.fetch(tiles.column(n + 2), tiles.column(n + 3));
			if (C::LOGITS)
				steps.template make_logits<false>(s, wave_row(), column);
			if (C::BIAS == BIAS_MATRIX) {
				bias.widen(bias_view);
				bias.add(s.t[0], 0);
			}
			if (reach.is_masked(band, column))
				steps.mask(s, band, wave_row(), column);
			weigh(s);
			if (C::DROPOUT)
				steps.drop(s, wave_row(), column);
			multiply_columns<typename ValueTile::Columns, Weights>(o, stage + V_AT, s);
			block_sync(); /* the next tile is there; nobody reads this one any more */
		}
	}

	/* S becomes P, in units of the highest score so far, and so does O. */
	METHOD void weigh(Scores &s)
	{
		float factor;

		if (softmax.update(s, modifiers.unit, &factor)) {
			UNROLL
			for (int d = 0; d < DT; d++)
				o[d] *= factor;
		}
	}

	/* Into memory, by way of LDS. Only here does a result have the shape that fwd_output.h
	 * knows. */
	METHOD void store(float *lds)
	{
		float lse = 0, factor = 0;
		SoftmaxRows<Core, 1> rows = softmax.rows();
		RegTile<Core, 1, C::HDIM_V / 16> result;
		ForwardOutput<C, 1> output = {block, result, rows, 1.0f, wave};
		/* anew: it is not kept since Q was fetched */
		i32 row = wave_row() + hidden_lane(Core::line());

		split_wide(result, o);
		if (row < block.n_rows) {
			RowPlace p = block.place_of(row);

			factor = output.finish_row(rows.m(0, 0), rows.l(0, 0), p.head, &lse) *
				 o_scale;
			if (Core::column(0) == 0)
				output.store_lse(p, lse);
		}
		rows_out(result, factor, lds, wave, [&](i32 r, i32 dim, const float *from) {
			if (wave_row() + r < block.n_rows && dim < block.a.hdim_v)
				output.store_result(block.place_of(wave_row() + r), dim, from);
		});
	}
};

FMHA_STAGED_ENTRY(abi_fwd_args, Forward<Config>(args).run(lds))

#endif
