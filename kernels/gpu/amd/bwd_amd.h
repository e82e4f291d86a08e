/* SPDX-License-Identifier: MIT */
/*
 * bwd_amd.h: the backward passes of bwd.h on AMD's matrix cores, for rows as fwd_amd.h wants them:
 * what a wave owns, SIDE keys or queries, it keeps as operands; what is streamed lies in LDS by
 * rows for one product and transposed for the other, and P and dS are operands where the first
 * products left them. No dropout, no dBias that is a sum.
 *
 * One stage of LDS: the next pair of tiles is on its way from memory while this one is multiplied.
 */
#ifndef FMHA_GPU_BWD_AMD_H
#define FMHA_GPU_BWD_AMD_H

#include "block/bwd_scores.h"
#include "stage.h"
#include "staged_bias.h"

/* What a pass keeps: the rows that it owns, and where in the problem it is. */
template <class C, bool KEYS_STATIONARY> struct StagedPass {
	typedef typename C::Core Core;
	typedef typename Core::Wide Wide;
	static const int SIDE = Core::SIDE;
	static const int ROWS = KEYS_STATIONARY ? C::TILE_N : C::DQ_TILE_N;
	static const int COLUMNS = KEYS_STATIONARY ? C::TILE_M : C::DQ_TILE_M, TN = COLUMNS / 16;
	static_assert(SIDE * C::WAVES_M == ROWS && C::WAVES_N == 1, "a wave owns SIDE rows");
	static const int TD = C::HDIM_Q / SIDE, TV = C::HDIM_V / SIDE;

	typedef RegTile<Core, 1, TN> Scores;
	typedef BackwardScores<C, KEYS_STATIONARY, 1, TN, StagedPass> Steps;
	typedef StagedBias<C, KEYS_STATIONARY, COLUMNS> Bias;
	static const bool FETCHES_BIAS = true, HIDES = false;
	static const int PARKS = lds_amd_parks(C::cut(COLUMNS, ROWS));
	/* The two gradients leave RDNA few registers: a bias needs some, and d64 of RDNA3 runs
	 * three blocks a unit below 241. */
	static const bool FEW_OFFSETS = KEYS_STATIONARY && FMHA_CORE != FMHA_CORE_MFMA &&
					(C::BIAS == BIAS_MATRIX ||
					 (FMHA_CORE == FMHA_CORE_WMMA11 && PARKS == 0));
	/* In a pair q is HDIM_Q wide (Q or K), v HDIM_V (dO or V). */
	typedef ColumnStage<COLUMNS, C::HDIM_Q, C::THREADS, true, COLUMNS, FEW_OFFSETS> StreamedQ;
	typedef ColumnStage<COLUMNS, C::HDIM_V, C::THREADS, true, COLUMNS, FEW_OFFSETS> StreamedV;
	static const int V_AT = StreamedQ::BYTES, STATS_AT = V_AT + StreamedV::BYTES;
	typedef Owned<C::HDIM_Q, (PARKS > 1)> OwnQ;
	typedef Owned<C::HDIM_V, (PARKS > 0)> OwnV;
	/* of a wave */
	static const int OWN_AT = STATS_AT + 2 * COLUMNS * 4, OWN_BYTES = OwnQ::BYTES + OwnV::BYTES;
	static_assert(OWN_AT + C::WAVES_M * OWN_BYTES <= C::LDS_BYTES,
		      "a pair of tiles, LSE and D, what is parked");
	static_assert(lds_amd_backward(C::cut(COLUMNS, ROWS)) <= C::LDS_BYTES,
		      "the host asks lds.h, too");

	BackwardPlace<C> at;
	char *lds;
	i32 first, wave; /* first of the block's rows */
	OwnQ own_q;
	OwnV own_v;
	typename Bias::View bias;
	Bias fetched_bias;

	METHOD StagedPass(const abi_bwd_args &args, char *memory, i32 first_row)
		: at(args), lds(memory), first(first_row), wave(wave_id())
	{
	}

	METHOD i32 row_of(int) const { return first + wave * SIDE; }
	template <class View> METHOD void own(const View &q, const View &v, i32 end)
	{
		char *parked = lds + OWN_AT + wave * OWN_BYTES;

		own_q.fetch(parked, q, row_of(0), end);
		own_v.fetch(parked + OwnQ::BYTES, v, row_of(0), end);
	}
	METHOD const Sequence &seq() const { return at.seq; }
	METHOD i32 head() const { return at.head; }
	METHOD const Band &band() const { return at.band; }

	/* The view of a bias, or of its gradient; @line: the lane's. */
	METHOD typename Bias::View bias_view(const abi_tensor &t, i32 line) const
	{
		return Bias::View::make(at.bias(t), at.seq, first, wave * SIDE + line);
	}

	template <int N> METHOD static void zero(Wide (&x)[N])
	{
		UNROLL
		for (int n = 0; n < N; n++)
			x[n] = Wide(0.0f);
	}

	/* A number of each of a sequence's queries, one a thread. */
	struct Numbers {
		const float *from;
		/* bytes, below 2^24: a product of 24 bits is one cycle, and so not kept for the
		 * loop */
		u32 step;
		u32 held;

		METHOD void begin(const abi_rows &t, const Sequence &seq, i32 head)
		{
			from = t.data + rows_offset(t, seq, 0, head);
			step = (u32)t.stride_seq * 4;
		}
		METHOD void fetch(i32 query, i32 end)
		{
			u32 at = (u32)(hidden_lane(thread_id()) & 1023) * (step & 0xffffff);

			held = Buffer::rows((const char *)from + (i64)query * step, end - query,
					    COLUMNS, step, 4)
				       .load4(at)
				       .w[0];
		}
		METHOD float value() const { return bits_to_float(held); }
	};

	/* The streamed pair on its way, and with queries their LSE and D. */
	template <class View> struct Stream {
		const StagedPass &pass;
		View view_q, view_v;
		i32 end;
		StreamedQ q;
		StreamedV v;
		Numbers lse, d;

		METHOD void begin()
		{
			static_assert(COLUMNS <= C::THREADS, "a query a thread");
			q.begin((u32)view_q.stride_seq * 2, view_q.hdim);
			v.begin((u32)view_v.stride_seq * 2, view_v.hdim);
			if (KEYS_STATIONARY) {
				lse.begin(pass.at.a.lse, pass.at.seq, pass.at.head);
				d.begin(pass.at.a.d, pass.at.seq, pass.at.head);
			}
		}
		METHOD static Piece tile(const View &view, i32 column, i32 end)
		{
			return Piece{Buffer::rows(view.base + column * view.stride_seq,
						  end - column, COLUMNS, (u32)view.stride_seq * 2,
						  view.hdim * 2),
				     0};
		}
		METHOD void fetch(i32 column)
		{
			q.fetch([&](int) { return tile(view_q, column, end); });
			v.fetch([&](int) { return tile(view_v, column, end); });
			if (KEYS_STATIONARY && thread_id() < COLUMNS) {
				lse.fetch(column, end);
				d.fetch(column, end);
			}
		}
		METHOD void arrive(i32 column) const
		{
			float *stats = (float *)(pass.lds + STATS_AT);

			q.arrive(pass.lds);
			v.arrive(pass.lds + V_AT);
			if (KEYS_STATIONARY && thread_id() < COLUMNS) {
				stats[thread_id()] = column + thread_id() < end
							     ? pass.at.exponent_of(lse.value())
							     : minus_infinity();
				stats[COLUMNS + thread_id()] = d.value();
			}
		}
	};

	/* Streams tiles past step(column). */
	template <class Tiles, class View, class Step>
	METHOD void run(const Tiles &tiles, const View &view_q, const View &view_v, i32 end,
			const Step &step)
	{
		Stream<View> stream = {*this, view_q, view_v, end, {}, {}, {}, {}};

		if (tiles.count <= 0)
			return;
		if (C::BIAS == BIAS_MATRIX)
			bias = bias_view(at.a.bias, Core::line());
		stream.begin();
		stream.fetch(tiles.column(0));
		NO_UNROLL
		for (i32 n = 0; n < tiles.count; n++) {
			block_sync(); /* nobody reads the last pair any more */
			stream.arrive(tiles.column(n));
			block_sync();
			if (C::BIAS == BIAS_MATRIX)
				fetched_bias.fetch(bias, tiles.column(n), end);
			stream.fetch(tiles.column(n + 1));
			step(tiles.column(n));
		}
	}

	METHOD void first_products(Scores &s, Scores &dp, const Steps &steps, i32 column,
				   bool masked)
	{
		multiply_rows<typename StreamedQ::Rows, C::HDIM_Q / 16>(s, lds + StreamedQ::ROWS_AT,
									own_q);
		if (C::BIAS == BIAS_MATRIX)
			fetched_bias.widen(bias);
		steps.prepare(s, column, masked);
		multiply_rows<typename StreamedV::Rows, C::HDIM_V / 16>(
			dp, lds + V_AT + StreamedV::ROWS_AT, own_v);
	}

	/* The wave's rows of a gradient. FLOATS: in f32; no argument says so, since clang 19 keeps
	 * the whole pass in memory for a lambda that captures one. */
	template <bool FLOATS = false, int N>
	METHOD void store(const Wide (&sum)[N], const abi_tensor &t, i64 offset, i32 hdim,
			  float factor, i32 end) const
	{
		RegTile<Core, 1, N * SIDE / 16> x;

		split_wide(x, sum);
		block_sync();
		rows_out(x, factor, (float *)lds, wave, [&](i32 r, i32 dim, const float *from) {
			i32 row = row_of(0) + r;

			if (row < end && dim < hdim)
				store_chunk(t.data, FLOATS ? ABI_F32 : at.a.dtype,
					    offset + row * t.stride_seq + dim * t.stride_dim,
					    t.stride_dim, from, hdim - dim);
		});
	}
};

/* A block that owns keys: dK and dV, of all heads that share them. */
template <class C> struct StagedKeys : StagedPass<C, true> {
	typedef StagedPass<C, true> Pass;
	typedef typename Pass::Core Core;
	using Pass::COLUMNS, Pass::ROWS, Pass::at, Pass::first, Pass::lds;
	typename Pass::Wide dk[Pass::TD], dv[Pass::TV];

	METHOD StagedKeys(const abi_bwd_args &args, char *memory, i32 first_row)
		: Pass(args, memory, first_row)
	{
	}

	METHOD void run(const BackwardBlock<C> &block)
	{
		const abi_bwd_args &a = at.a;
		i32 head_k = block.head;

		at.enter_sequence(block.batch);
		if (first >= at.seq.n_k)
			return;
		this->own(at.keys(a.k, head_k, a.hdim_q, false),
			  at.keys(a.v, head_k, a.hdim_v, true), at.seq.n_k);
		Pass::zero(dk);
		Pass::zero(dv);
		NO_UNROLL
		for (i32 i = 0; i < at.q_per_k(); i++) {
			at.head = head_k * at.q_per_k() + i;
			Pass::run(query_tiles(), at.queries(a.q, a.hdim_q),
				  at.queries(a.d_o, a.hdim_v), at.seq.n_q,
				  [&](i32 column) { step(column); });
		}
		this->store(dk, a.dk, k_offset(a.dk, at.seq, 0, head_k), a.hdim_q, a.scale,
			    at.seq.n_k);
		this->store(dv, a.dv, k_offset(a.dv, at.seq, 0, head_k), a.hdim_v, 1.0f,
			    at.seq.n_k);
	}

	METHOD bool writes_dbias() const { return C::BIAS == BIAS_MATRIX && at.a.dbias.data; }

	/* The query tiles that may see the block's keys; dBias is written everywhere, masked or
	 * not. */
	METHOD ColumnTiles query_tiles() const
	{
		return ColumnTiles::of_rows(at.band, C::MASK && !writes_dbias(), first,
					    first + ROWS - 1, at.seq.n_q, COLUMNS);
	}

	struct Stats {
		const float *from;

		METHOD float lse(int, int n, int e) const { return from[n * 16 + Core::column(e)]; }
		METHOD float d(int, int n, int e) const
		{
			return from[COLUMNS + n * 16 + Core::column(e)];
		}
	};

	METHOD void step(i32 column)
	{
		const typename Pass::Steps steps = {*this};
		typename Pass::Scores s, dp;
		/* queries beyond n_q have P = 0 */
		bool masked = C::MASK || first + ROWS > at.seq.n_k;

		if (C::MASK && first + ROWS <= at.seq.n_k)
			masked = !at.band.sees_all(column, column + COLUMNS - 1, first, ROWS);
		this->first_products(s, dp, steps, column, masked);
		steps.gradients(s, dp, column, masked, Stats{(const float *)(lds + Pass::STATS_AT)},
				[&](int, int n, i32, const typename Core::Acc &dz) {
					/* offsets are not kept for the loop */
					if (C::BIAS == BIAS_MATRIX && writes_dbias())
						Pass::Bias::store(
							this->bias_view(
								arguments_anew<abi_bwd_args>()
									.dbias,
								hidden_lane(Core::line())),
							column, at.seq.n_q, n, dz);
				});
		multiply_columns<typename Pass::StreamedV::Columns>(dv, lds + Pass::V_AT, s);
		multiply_columns<typename Pass::StreamedQ::Columns>(dk, lds, dp);
	}
};

/* A block that owns queries: dQ. */
template <class C> struct StagedQueries : StagedPass<C, false> {
	typedef StagedPass<C, false> Pass;
	typedef typename Pass::Core Core;
	using Pass::COLUMNS, Pass::ROWS, Pass::at, Pass::first, Pass::lds;
	typename Pass::Wide dq[Pass::TD];
	float own_lse, own_d;

	METHOD StagedQueries(const abi_bwd_args &args, char *memory, i32 first_row)
		: Pass(args, memory, first_row)
	{
	}

	METHOD void run(const BackwardBlock<C> &block)
	{
		const abi_bwd_args &a = at.a;
		i32 head_k = block.head / (a.nhead_q / a.nhead_k),
		    row = this->row_of(0) + Core::line();

		at.head = block.head;
		at.enter_sequence(block.batch);
		if (first >= at.seq.n_q)
			return;
		if (!C::SPLIT)
			own_rows();
		own_lse = at.lse_of(row);
		own_d = at.d_of(row);

		const ColumnTiles tiles = ColumnTiles::make<C::MASK>(
			at.band, first, min_of(first + ROWS, at.seq.n_q) - 1, COLUMNS);

		if constexpr (C::SPLIT) {
			i32 n_splits = splits_of(a, block.batch), physical;
			abi_tensor to = {dq_acc_of(a, at.seq, &physical), 0, a.hdim_q, 0, 1};
			dq_acc_layout layout = dq_layout_of(a);

			NO_UNROLL
			for (i32 split = block.first_split(); split < n_splits;
			     split += block.grid.n_splits) {
				block_sync(); /* the last split's results have left LDS */
				own_rows();
				sum_tiles(SplitOfTiles::make(tiles, split, n_splits), head_k);
				this->template store<true>(
					dq, to,
					at.head * dq_acc_head(&layout, physical, n_splits) +
						(i64)split * physical * a.hdim_q,
					a.hdim_q, 1.0f, at.seq.n_q);
			}
		} else {
			sum_tiles(tiles, head_k);
			this->store(dq, a.dq, q_offset(a.dq, at.seq, 0, at.head), a.hdim_q, a.scale,
				    at.seq.n_q);
		}
	}

	METHOD void own_rows()
	{
		this->own(at.queries(at.a.q, at.a.hdim_q), at.queries(at.a.d_o, at.a.hdim_v),
			  at.seq.n_q);
	}

	/* dQ / scale, from the keys of `tiles`. */
	template <class Tiles> METHOD void sum_tiles(const Tiles &tiles, i32 head_k)
	{
		const abi_bwd_args &a = at.a;

		Pass::zero(dq);
		Pass::run(tiles, at.keys(a.k, head_k, a.hdim_q, false),
			  at.keys(a.v, head_k, a.hdim_v, true), at.seq.n_k,
			  [&](i32 column) { step(column); });
	}

	struct Stats {
		float own_lse, own_d;

		METHOD float lse(int, int, int) const { return own_lse; }
		METHOD float d(int, int, int) const { return own_d; }
	};

	METHOD void step(i32 column)
	{
		const typename Pass::Steps steps = {*this};
		typename Pass::Scores s, dp;
		bool masked = column + COLUMNS > at.seq.n_k;

		if (C::MASK)
			masked = !at.band.sees_all(first, first + ROWS - 1, column, COLUMNS);
		this->first_products(s, dp, steps, column, masked);
		steps.gradients(s, dp, column, masked, Stats{own_lse, own_d},
				[](int, int, i32, const typename Core::Acc &) {});
		multiply_columns<typename Pass::StreamedQ::Columns>(dq, lds, dp);
	}
};

template <class Base> DEV void backward(const abi_bwd_args &a, char *lds)
{
	typedef AmdConfig<Base> C;
	const BackwardBlock<C> block = BackwardBlock<C>::here(a);

	if (block.x >= block.grid.n_key_blocks)
		StagedQueries<C>(a, lds, block.first_row()).run(block);
	else if (block.head < a.nhead_k)
		StagedKeys<C>(a, lds, block.first_key()).run(block);
}

FMHA_STAGED_ENTRY(abi_bwd_args, backward<Config>(args, lds))

#endif
