/* SPDX-License-Identifier: MIT */
/*
 * bwd_wgmma_wide.h: gradients on Hopper for heads wider than 128, whose dK and dV leave no registers for each
 * other: the two warpgroups share 64 keys. The first finds P and sums dV; the second gets P through shared memory,
 * finds dS and sums dK. Each finds half of dQ^T, in chunks.
 */
#ifndef FMHA_GPU_BWD_WGMMA_WIDE_H
#define FMHA_GPU_BWD_WGMMA_WIDE_H

#include "bwd_wgmma_block.h"

template <class C> struct BackwardWgmmaWide : BackwardWgmmaBlock<C> {
	typedef BackwardWgmmaBlock<C> Block;
	using Block::at;
	typedef typename Block::Scores Scores;
	typedef typename Block::Step Step;
	typedef typename Block::Weights Weights;
	typedef typename Block::Dq Dq;
	static_assert(!Block::AT_ONCE, "no warpgroup has both products");
	static const int BOTH = Block::GROUPS * Block::GROUP_THREADS;

	METHOD BackwardWgmmaWide(const abi_bwd_args &args) : Block(args) {}

	/* P lies behind dS, as the registers hold it. */
	METHOD u32 p_chunk(int n) const
	{
		return this->ds_tile(1) + (n * Block::GROUP_THREADS + thread_id() % Block::GROUP_THREADS) * 16;
	}

	/* A warpgroup's chunks of dQ but for the first; with nothing else under way at the end. */
	template <int PART> METHOD void find_rest_of_dq(const Step &step) const
	{
		UNROLL
		for (int block = 1; block < Block::DQ.blocks(PART); block++) {
			Dq dq;

			this->start_dq(dq, block, 0);
			wgmma_wait<0>();
			settle(dq.t);
			this->store_dq(dq, dq_parity<PART>(step, block));
		}
	}
	template <int PART> METHOD static u32 dq_parity(const Step &step, int block)
	{
		return (step.number * Block::DQ.blocks(PART) + block) & 1 ^ 1;
	}

	METHOD void find_dv()
	{
		typename Block::SumV dv;
		Step step = this->first_step();

		dv.zero();
		NO_UNROLL
		for (i32 n = this->n_steps(); n > 0; n--, this->next(step)) {
			Scores s;
			Weights p;
			Dq dq;

			at.head = step.head;
			this->wait_for_q(step);
			this->start_s(s, step);
			wgmma_wait<0>();
			settle(s.t[0]);
			this->weigh(s, step);
			p = round_to_operand(s);
			UNROLL
			for (int i = 0; i < Block::TN; i++)
				store_shared_16(p_chunk(i), p.t[0][i].r);
			named_arrive(Block::P_BARRIER, BOTH);
			this->wait_for_do(step);
			this->start_sum(dv, p, this->do_tile(step.do_stage()));
			named_sync(Block::DS_BARRIER, BOTH);
			this->start_dq(dq, 0, 0);
			wgmma_wait<1>();
			settle(dv.t[0]);
			this->release(this->do_empty(step.do_stage()));
			wgmma_wait<0>();
			settle(dq.t);
			this->store_dq(dq, dq_parity<0>(step, 0));
			find_rest_of_dq<0>(step);
			this->release_q(step);
		}
		find_place_anew();
		this->store(dv, at.a.dv, at.a.hdim_v, 1.0f);
	}

	METHOD void find_dk()
	{
		typename Block::SumK dk;
		Step step = this->first_step();

		dk.zero();
		NO_UNROLL
		for (i32 n = this->n_steps(); n > 0; n--, this->next(step)) {
			Scores s, dp;
			Weights p, ds;
			Dq dq;

			this->wait_for_do(step);
			this->start_dp(dp, step);
			this->wait_for_q(step);
			wgmma_wait<0>();
			settle(dp.t[0]);
			this->release(this->do_empty(step.do_stage()));
			named_sync(Block::P_BARRIER, BOTH);
			UNROLL
			for (int i = 0; i < Block::TN; i++) {
				load_shared_16(p_chunk(i), p.t[0][i].r);
				UNROLL
				for (int e = 0; e < Block::Core::E; e++)
					s.t[0][i].x[e] = Block::Element::to_float((u16)(p.t[0][i].r[e / 2] >> e % 2 * 16));
			}
			this->differentiate(s, dp, step);
			ds = round_to_operand(dp);
			this->store_ds(ds, 0);
			named_arrive(Block::DS_BARRIER, BOTH);
			this->sync_group();
			this->start_dq(dq, 0, 0);
			this->start_sum(dk, ds, this->q_tile(step.q_stage()));
			wgmma_wait<1>();
			settle(dq.t);
			this->store_dq(dq, dq_parity<1>(step, 0));
			wgmma_wait<0>();
			settle(dk.t[0]);
			this->release_q(step);
			find_rest_of_dq<1>(step);
		}
		find_place_anew();
		this->store(dk, at.a.dk, at.a.hdim_q, at.a.scale);
	}

	/* Where the block is is not kept while it streams: the last warpgroup has no registers for that. */
	METHOD void find_place_anew() { this->locate(hidden(block_id_x())); }

	METHOD void multiply()
	{
		this->wave = wave_id();
		if (this->n_steps() > 0) {
			barrier_wait(this->kv_full(), 0);
			this->clear_keys();
		}
		if (this->group() == 0)
			find_dv();
		else
			find_dk();
	}
};

#endif
