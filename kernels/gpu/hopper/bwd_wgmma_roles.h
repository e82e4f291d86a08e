/* SPDX-License-Identifier: MIT */
/*
 * bwd_wgmma_roles.h: gradients on Hopper where Q and K have 129 to 192 dimensions and V up to 128.
 * What bounds bwd_wgmma_wide.h there is what it adds to dQ in memory: a tile of queries for every
 * 64 keys. Here a block has 96, and three warpgroups share them, each with products of its own and
 * the registers that these take:
 *
 *   weights    S = Q K^T, P, dV^T += dO^T P      a step ahead of the others
 *   gradients  dP = dO V^T, dS, dK^T += Q^T dS   dP a step ahead
 *   queries    dQ^T = K^T dS^T, chunk by chunk
 *
 * Rows of S and dP are queries, so that LSE and D are two numbers a lane; of dV^T and dK^T head
 * dimensions, so that keys need not be a multiple of 64 a warpgroup. P has one stage in shared
 * memory, dS two. Of both it is said when they are there and when they have been read, by barriers
 * at which one warpgroup arrives and another waits.
 */
#ifndef FMHA_GPU_BWD_WGMMA_ROLES_H
#define FMHA_GPU_BWD_WGMMA_ROLES_H

#include "bwd_wgmma_block.h"

template <class C> struct BackwardWgmmaRoles : BackwardWgmmaBlock<C> {
	typedef BackwardWgmmaBlock<C> Block;
	using Block::at;
	typedef typename Block::Core Core;
	typedef typename Block::Element Element;
	typedef typename Block::Step Step;
	typedef typename Block::Dq Dq;
	static const int KEYS = C::TILE_N / 16;
	typedef RegTile<Core, 1, KEYS> Rows; /* queries x keys */
	typedef RegTile<Core, Block::Q_SLABS, KEYS> SumKeys;
	typedef RegTile<Core, Block::V_SLABS, KEYS> SumValues;
	typedef BackwardScores<C, false, 1, KEYS, BackwardWgmmaRoles> RowSteps;
	static_assert(!Block::AT_ONCE, "no warpgroup has both products");
	static_assert(C::TILE_M == 64 && Block::Q_SLABS == 3 && Block::V_SLABS == 2,
		      "whose registers are known");

	/* Of four warpgroups with 512 a lane: what accumulators take, and 40. */
	static const int WEIGHTS_REGISTERS = 184, GRADIENTS_REGISTERS = 232, QUERIES_REGISTERS = 72;
	static_assert(WEIGHTS_REGISTERS + GRADIENTS_REGISTERS + QUERIES_REGISTERS +
				      Block::LOADER_REGISTERS <=
			      512,
		      "what a unit has");

	static const int BOTH = 2 * Block::GROUP_THREADS;
	static const int P_FULL = Block::OWN_BARRIER + 3, P_EMPTY = P_FULL + 1,
			 DS_FULL = P_EMPTY + 1, DS_EMPTY = DS_FULL + Block::DS_STAGES;

	i32 query; /* the wave's first */

	METHOD BackwardWgmmaRoles(const abi_bwd_args &args) : Block(args) {}

	METHOD i32 row_of(int) const { return query; }
	METHOD i32 own_rows() const { return this->wave % 4 * 16; }

	/* P lies behind dS. */
	METHOD u32 p_tile() const { return this->ds_tile(Block::DS_STAGES); }
	/* Where a lane has the n-th 16 keys of its wave's queries. */
	METHOD u32 matrix_at(u32 tile, int n) const
	{
		i32 lane = lane_id(), row = own_rows() + lane % 16;

		return tile + n / 4 * Block::Q_SLAB + row * 128 +
		       ((n % 4 * 2 + lane / 16) ^ row % 8) * 16;
	}

	/* LSE (0) and D (8) of a lane's two queries. */
	METHOD float stat(const Step &step, int r, int which) const
	{
		i32 row = own_rows() + Core::stat_row(r);

		return load_shared(this->stats(step.q_stage()) + row / 2 * 16 + row % 2 * 4 +
				   which);
	}

	/* ---- products ---- */

	template <int STEPS> METHOD static void start_rows(Rows &s, u32 queries, u32 keys)
	{
		start_along<Element, STEPS, Block::Q_SLAB, Block::K_SLAB>(
			s.t[0], wgmma_descriptor(queries, 0), wgmma_descriptor(keys, 0));
	}
	METHOD void start_s(Rows &s, const Step &step) const
	{
		start_rows<C::HDIM_Q / 16>(s, this->q_tile(step.q_stage()), this->k_tile());
	}
	METHOD void start_dp(Rows &dp, const Step &step) const
	{
		start_rows<C::HDIM_V / 16>(dp, this->do_tile(step.do_stage()), this->v_tile());
	}

	/* sum^T += X^T P, of queries in rows of both. */
	template <int SLABS>
	METHOD static void start_sum(RegTile<Core, SLABS, KEYS> &sum, u32 rows, u32 weights)
	{
		u64 b = wgmma_descriptor(weights, Block::Q_SLAB);

		UNROLL
		for (int m = 0; m < SLABS; m++)
			settle(sum.t[m]);
		wgmma_begin();
		UNROLL
		for (int m = 0; m < SLABS; m++)
			UNROLL
			for (int i = 0; i < C::TILE_M / 16; i++)
				Wgmma<Element, KEYS>::crossed(
					sum.t[m],
					wgmma_descriptor(rows + m * Block::Q_SLAB, Block::Q_SLAB) +
						i * STEP_ACROSS,
					b + i * STEP_ACROSS);
		wgmma_commit();
	}
	template <int SLABS> METHOD static void settle_sum(RegTile<Core, SLABS, KEYS> &sum)
	{
		UNROLL
		for (int m = 0; m < SLABS; m++)
			settle(sum.t[m]);
	}

	METHOD void start_chunk(Dq &dq, int slab, i32 stage) const
	{
		const int IN_SLAB = SLAB_COLUMNS / 16;
		u64 a = wgmma_descriptor(this->k_tile() + slab * Block::K_SLAB, Block::K_SLAB);
		u64 b = wgmma_descriptor(this->ds_tile(stage), 0);

		settle(dq.t);
		wgmma_begin();
		UNROLL
		for (int i = 0; i < KEYS; i++)
			Wgmma<Element, Block::DQ_QUERIES / 16>::turned(
				dq.t, a + i * STEP_ACROSS,
				b + i / IN_SLAB * (Block::Q_SLAB >> 4) + i % IN_SLAB * STEP_ALONG,
				i > 0);
		wgmma_commit();
	}

	/* ---- weights, dV ---- */

	METHOD void weigh(Rows &s, const Step &step)
	{
		float lse[Core::STATS];

		at.head = step.head;
		query = this->query_of(step) + own_rows();
		RowSteps{*this}.prepare(s, this->first, this->is_masked(step));
		UNROLL
		for (int r = 0; r < Core::STATS; r++)
			lse[r] = stat(step, r, 0);
		UNROLL
		for (int n = 0; n < KEYS; n++)
			UNROLL
			for (int e = 0; e < Core::E; e++)
				s.t[0][n].x[e] = exp2_fast(s.t[0][n].x[e] * at.modifiers.unit +
							   lse[Core::stat(e)]);
	}

	METHOD void hand_on(const Rows &p, const Step &step) const
	{
		UNROLL
		for (int n = 0; n < KEYS; n++)
			store_matrix(matrix_at(p_tile(), n), Core::to_operand(p.t[0][n]).r);
		fence_async();
		named_arrive(P_FULL, BOTH);
		this->sync_group();
		this->release_q(step);
	}

	METHOD void stream_dv(SumValues &dv)
	{
		Step step = this->first_step();
		Rows s;

		this->wait_for_q(step);
		start_s(s, step);
		wgmma_wait<0>();
		settle(s.t[0]);
		weigh(s, step);
		hand_on(s, step);
		NO_UNROLL
		for (i32 n = this->n_steps(); n > 0; n--) {
			Step ahead = step;

			this->next(ahead);
			if (n > 1)
				this->wait_for_q(ahead);
			start_s(s, ahead); /* behind the last step of whatever lies there */
			this->wait_for_do(step);
			start_sum(dv, this->do_tile(step.do_stage()), p_tile());
			wgmma_wait<1>();
			settle(s.t[0]);
			if (n > 1)
				weigh(s, ahead);
			wgmma_wait<0>();
			settle_sum(dv);
			this->release(this->do_empty(step.do_stage()));
			named_sync(P_EMPTY, BOTH);
			if (n > 1)
				hand_on(s, ahead);
			step = ahead;
		}
	}

	/* ---- gradients of scores, dK ---- */

	template <bool MASKED> METHOD void find_ds(Rows &dp, const Step &step) const
	{
		const u32 to = this->ds_tile(step.ds_stage());
		float d[Core::STATS];
		MmaOperand next = load_matrix(matrix_at(p_tile(), 0));

		UNROLL
		for (int r = 0; r < Core::STATS; r++)
			d[r] = stat(step, r, 8);
		UNROLL
		for (int n = 0; n < KEYS; n++) {
			MmaOperand p = next;
			float *x = dp.t[0][n].x;

			if (n + 1 < KEYS)
				next = load_matrix(matrix_at(p_tile(), n + 1));
			UNROLL
			for (int e = 0; e < Core::E; e++) {
				float weight = Element::to_float((u16)(p.r[e / 2] >> e % 2 * 16));

				/* V may hold anything where a query does not look. */
				if (MASKED && weight == 0.0f)
					x[e] = 0;
				x[e] = weight * (x[e] - d[Core::stat(e)]);
			}
			store_matrix(matrix_at(to, n), Core::to_operand(dp.t[0][n]).r);
		}
	}
	METHOD void differentiate(Rows &dp, const Step &step) const
	{
		if (this->is_masked(step))
			find_ds<true>(dp, step);
		else
			find_ds<false>(dp, step);
		fence_async();
	}

	METHOD void stream_dk(SumKeys &dk)
	{
		Step step = this->first_step();
		Rows dp;

		this->wait_for_do(step);
		start_dp(dp, step);
		wgmma_wait<0>();
		settle(dp.t[0]);
		this->release(this->do_empty(step.do_stage()));
		NO_UNROLL
		for (i32 n = this->n_steps(); n > 0; n--) {
			Step ahead = step;

			this->next(ahead);
			this->wait_for_q(step);
			named_sync(P_FULL, BOTH);
			named_sync(DS_EMPTY + step.ds_stage(), BOTH);
			differentiate(dp, step);
			named_arrive(P_EMPTY, BOTH);
			named_arrive(DS_FULL + step.ds_stage(), BOTH);
			this->sync_group();
			start_sum(dk, this->q_tile(step.q_stage()),
				  this->ds_tile(step.ds_stage()));
			if (n > 1)
				this->wait_for_do(ahead);
			start_dp(dp, ahead);
			wgmma_wait<1>();
			settle_sum(dk);
			this->release_q(step);
			wgmma_wait<0>();
			settle(dp.t[0]);
			if (n > 1)
				this->release(this->do_empty(ahead.do_stage()));
			step = ahead;
		}
	}

	/* ---- dQ ---- */

	METHOD void find_dq() const
	{
		i32 n = this->n_steps();

		UNROLL
		for (int i = 0; i < Block::DS_STAGES; i++)
			if (i < n)
				named_arrive(DS_EMPTY + i, BOTH);
		NO_UNROLL
		for (Step step = {0, 0, 0}; n > 0; n--, step.number++) {
			named_sync(DS_FULL + step.ds_stage(), BOTH);
			UNROLL
			for (int slab = 0; slab < Block::Q_SLABS; slab++) {
				i32 chunk = step.number * Block::Q_SLABS + slab;
				Dq dq;

				start_chunk(dq, slab, step.ds_stage());
				wgmma_wait<0>();
				settle(dq.t);
				if (slab == Block::Q_SLABS - 1 && n > Block::DS_STAGES)
					named_arrive(DS_EMPTY + step.ds_stage(), BOTH);
				this->store_chunk(dq, chunk % 2, chunk / 2 & 1 ^ 1);
			}
		}
	}

	/* ---- results ---- */

	/* Rows of a gradient by way of a tile in shared memory that nobody reads any more. */
	template <int SLABS>
	METHOD void store_turned(const RegTile<Core, SLABS, KEYS> &sum, u32 tile,
				 const abi_tensor &t, i32 hdim, float factor) const
	{
		i32 lane = lane_id(), key = lane / 16 * 8 + lane % 8;
		u32 to = tile + key * 128 +
			 ((this->wave % 4 * 2 + lane / 8 % 2) ^ lane % 8) * 16;

		UNROLL
		for (int m = 0; m < SLABS; m++)
			UNROLL
			for (int n = 0; n < KEYS; n++) {
				typename Core::Acc x = sum.t[m][n];

				UNROLL
				for (int e = 0; e < Core::E; e++)
					x.x[e] *= factor;
				store_matrix_transposed(to + m * Block::K_SLAB + n * 16 * 128,
							Core::to_operand(x).r);
			}
		this->sync_group();
		i32 thread = thread_id() % Block::GROUP_THREADS, chunk = thread % 8;

		NO_UNROLL
		for (i32 row = thread / 8; row < C::TILE_N; row += Block::GROUP_THREADS / 8) {
			u16 *out = (u16 *)t.data +
				   k_offset(t, at.seq, this->first + row, this->part) + chunk * 8;

			UNROLL
			for (int m = 0; m < SLABS; m++) {
				u32 x[4];

				load_shared_16(tile + m * Block::K_SLAB + row * 128 +
						       (chunk ^ row % 8) * 16,
					       x);
				if (this->first + row < at.seq.n_k &&
				    m * SLAB_COLUMNS + chunk * 8 < hdim)
					*(chunk16 *)(out + m * SLAB_COLUMNS) =
						chunk16{{x[0], x[1], x[2], x[3]}};
			}
		}
	}
	/* The same as they are, for convert_dq. */
	template <int SLABS>
	METHOD void store_turned_part(const RegTile<Core, SLABS, KEYS> &sum, const abi_tensor &t,
				      i32 hdim) const
	{
		i32 key = this->first + Core::column(0), dim = own_rows() + Core::row(0);
		float *to = (float *)t.data + k_offset(t, at.seq, key, this->part) + dim;

		UNROLL
		for (int i = 0; i < C::TILE_N / 4; i++) {
			/* its columns are pairs, eight apart */
			i32 step = i % 2 ? 7 : 1;

			UNROLL
			for (int m = 0; m < SLABS; m++)
				UNROLL
				for (int r = 0; r < Core::STATS; r++) {
					const int row = m * SLAB_COLUMNS + r * 8;
					const float *x = sum.t[m][i / 4].x;

					if (key < at.seq.n_k && dim + row < hdim)
						to[row] = x[i % 4 / 2 * 4 + r * 2 + i % 2];
				}
			key = hidden(key + step);
			to += step * t.stride_seq;
		}
	}

	METHOD void find_dv()
	{
		SumValues dv;

		dv.zero();
		if (this->n_steps() > 0)
			stream_dv(dv);
		find_place_anew();
		/* dP of the last step was there before its P had been read. */
		if (this->is_whole())
			store_turned(dv, this->v_tile(), at.a.dv, at.a.hdim_v, 1.0f);
		else
			store_turned_part(dv, dv_sums_of(at.a), at.a.hdim_v);
	}
	METHOD void find_dk()
	{
		SumKeys dk;

		dk.zero();
		if (this->n_steps() > 0)
			stream_dk(dk);
		find_place_anew();
		if (this->is_whole())
			store_turned(dk, this->q_tile(0), at.a.dk, at.a.hdim_q, at.a.scale);
		else
			store_turned_part(dk, dk_sums_of(at.a), at.a.hdim_q);
	}
	/* Where the block is is not kept while it streams. */
	METHOD void find_place_anew() { this->locate(hidden(block_id_x()), nullptr); }

	METHOD void multiply()
	{
		this->wave = wave_id();
		i32 role = this->group();

		if (this->n_steps() > 0)
			barrier_wait(this->kv_full(), 0);
		if (role == 0) {
			take_registers<WEIGHTS_REGISTERS>();
			if (this->n_steps() > 0)
				this->clear_keys();
			find_dv();
		} else if (role == 1) {
			take_registers<GRADIENTS_REGISTERS>();
			if (this->n_steps() > 0)
				this->clear_keys();
			find_dk();
		} else {
			give_registers<QUERIES_REGISTERS>();
			if (this->n_steps() > 0)
				this->clear_keys();
			find_dq();
		}
	}
};

#endif
