/* SPDX-License-Identifier: MIT */
/*
 * bwd_wgmma_narrow.h: gradients on Hopper for heads of one slab, up to 64. A tile's products are
 * short there: with both operands in shared memory they wait for it, and the warpgroups for each
 * other. So what products read of K and V in every step stays in registers, and dQ^T of a step is
 * found in the next one, before which the other warpgroup has stored its dS.
 *
 * A warpgroup arrives with dS of the step two further behind the other one's wait for dS of the
 * next, and that one is behind its dQ: a stage of dS is not written while it is still read, and of
 * no barrier's rounds do two overlap.
 */
#ifndef FMHA_GPU_BWD_WGMMA_NARROW_H
#define FMHA_GPU_BWD_WGMMA_NARROW_H

#include "bwd_wgmma_block.h"

template <class C> struct BackwardWgmmaNarrow : BackwardWgmmaBlock<C> {
	typedef BackwardWgmmaBlock<C> Block;
	using Block::at;
	typedef typename Block::Scores Scores;
	typedef typename Block::Step Step;
	typedef typename Block::Dq Dq;
	static_assert(Block::NARROW && Block::DS_STAGES == 2, "as it counts on");
	static const int BOTH = Block::GROUPS * Block::GROUP_THREADS;
	static const int CLEARED_BARRIER = Block::DS_BARRIER + Block::GROUPS * Block::DS_STAGES;

	/* Rows of the warpgroup's keys; of K^T, all keys. */
	struct Operands {
		MmaOperand k[C::HDIM_Q / 16], v[C::HDIM_V / 16], turned[C::TILE_N / 16];
	};

	METHOD BackwardWgmmaNarrow(const abi_bwd_args &args) : Block(args) {}

	METHOD static u32 chunk_at(u32 tile, i32 row, i32 chunk)
	{
		return tile + row * 128 + (chunk ^ row % 8) * 16;
	}

	template <int STEPS> METHOD void hold_rows(MmaOperand (&x)[STEPS], u32 tile) const
	{
		i32 lane = lane_id();

		UNROLL
		for (int i = 0; i < STEPS; i++)
			x[i] = load_matrix(chunk_at(this->own_keys(tile),
						    this->wave % 4 * 16 + lane % 16,
						    i * 2 + lane / 16));
	}
	METHOD void hold(Operands &x) const
	{
		i32 lane = lane_id(), key = lane / 16 * 8 + lane % 8,
		    chunk = this->wave % 4 * 2 + lane / 8 % 2;

		hold_rows(x.k, this->k_tile());
		hold_rows(x.v, this->v_tile());
		UNROLL
		for (int i = 0; i < C::TILE_N / 16; i++)
			x.turned[i] = load_matrix_transposed(
				chunk_at(this->k_tile(), i * 16 + key, chunk));
	}

	/* D = A B^T, B's rows along a slab or, of more than 64 columns, two. */
	template <int TILES, int STEPS>
	METHOD static void start(typename Block::Core::Acc (&d)[TILES],
				 const MmaOperand (&a)[STEPS], u32 rows)
	{
		u64 b = wgmma_descriptor(rows, 0);
		const int IN_SLAB = SLAB_COLUMNS / 16;

		settle(d);
		wgmma_begin();
		UNROLL
		for (int i = 0; i < STEPS; i++)
			Wgmma<typename Block::Element, TILES>::along(
				d, a[i].r,
				b + i / IN_SLAB * (Block::Q_SLAB >> 4) + i % IN_SLAB * STEP_ALONG,
				i > 0);
		wgmma_commit();
	}

	METHOD static i32 ds_barrier(i32 group, const Step &step)
	{
		return Block::DS_BARRIER + Block::DS_STAGES * group + step.ds_stage();
	}

	/* Starts dQ of what both warpgroups have stored in the step before. */
	METHOD void start_dq_before(Dq &dq, const Operands &held, const Step &step) const
	{
		Step before = {0, 0, step.number + 1}; /* the other of two stages */

		if (step.number > 0)
			named_sync(ds_barrier(this->group() ^ 1, before), BOTH);
		start(dq.t, held.turned,
		      this->ds_tile(before.ds_stage()) +
			      Block::DQ.first_query(this->group()) * 128);
	}
	METHOD void store_dq_before(const Dq &dq, const Step &step) const
	{
		if (step.number > 0)
			this->store_dq(dq, step.number & 1);
	}

	METHOD void stream(typename Block::SumK &dk, typename Block::SumV &dv)
	{
		Step step = this->first_step(), next_step;
		Operands held;
		Dq dq;

		barrier_wait(this->kv_full(), 0);
		this->clear_keys();
		/* K^T is of all keys, which the other warpgroup clears, too */
		named_sync(CLEARED_BARRIER, BOTH);
		hold(held);
		NO_UNROLL
		for (i32 n = this->n_steps(); n > 0; n--, this->next(step, next_step)) {
			Scores s, dp;
			typename Block::Weights ds;

			at.head = step.head;
			this->wait_for_q(step);
			/* in the first step of whatever lies there */
			start_dq_before(dq, held, step);
			start(s.t[0], held.k, this->q_tile(step.q_stage()));
			this->wait_for_do(step);
			start(dp.t[0], held.v, this->do_tile(step.do_stage()));
			u32 hidden = this->find_hidden(step);
			this->look_ahead(step, &next_step);
			wgmma_wait<2>();
			settle(dq.t);
			store_dq_before(dq, step);
			wgmma_wait<1>();
			ds = this->start_gradients(s, dp, dv, step, hidden,
						   typename Block::LseThere());
			named_arrive(ds_barrier(this->group(), step), BOTH);
			this->start_sum(dk, ds, this->q_tile(step.q_stage()), step);
			wgmma_wait<1>();
			settle(dv.t[0]);
			this->release(this->do_empty(step.do_stage()));
			wgmma_wait<0>();
			settle(dk.t[0]);
			this->release_q(step);
		}
		start_dq_before(dq, held, step);
		wgmma_wait<0>();
		settle(dq.t);
		store_dq_before(dq, step);
	}
};

#endif
