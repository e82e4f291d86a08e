/* SPDX-License-Identifier: MIT */
/*
 * bwd_wgmma_wide.h: gradients on Hopper for heads wider than 128, whose dK and dV leave no
 * registers for each
 * other: the two warpgroups share 64 keys. The first finds P and sums dV; the second gets P through
 * shared memory, finds dS and sums dK. Each finds a part of dQ^T, in chunks. The first may be a
 * step ahead.
 *
 * Its P of a step is behind its dQ of the step two before, and the second's dS behind that P: a
 * stage of either is not written while it is still read, and of no barrier's rounds do two overlap.
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
	/* The first warpgroup finds the next P before it waits for dS. At 256 that gains nothing,
	 * and with a bias the last warpgroup has no registers for what it takes. */
	static const bool AHEAD = C::HDIM_Q + C::HDIM_V <= 2 * 192 && !C::LOGITS;
	static const int BOTH = Block::GROUPS * Block::GROUP_THREADS;

	METHOD BackwardWgmmaWide(const abi_bwd_args &args) : Block(args) {}

	/* P lies behind dS, as the registers hold it. */
	METHOD u32 p_chunk(const Step &step, int n) const
	{
		return this->ds_tile(Block::DS_STAGES + step.ds_stage()) +
		       (n * Block::GROUP_THREADS + thread_id() % Block::GROUP_THREADS) * 16;
	}

	/* A warpgroup's chunks of dQ but for the first; with nothing else under way at the end. */
	template <int PART> METHOD void find_rest_of_dq(const Step &step) const
	{
		UNROLL
		for (int block = 1; block < Block::DQ.blocks(PART); block++) {
			Dq dq;

			this->start_dq(dq, block, step.ds_stage());
			wgmma_wait<0>();
			settle(dq.t);
			this->store_dq(dq, dq_parity<PART>(step, block));
		}
	}
	template <int PART> METHOD static u32 dq_parity(const Step &step, int block)
	{
		return (step.number * Block::DQ.blocks(PART) + block) & 1 ^ 1;
	}

	/* S becomes P, which the second warpgroup gets, too. */
	METHOD void hand_on(Weights &p, Scores &s, const Step &step)
	{
		at.head = step.head;
		this->weigh(s, step, 0);
		p = round_to_operand(s);
		UNROLL
		for (int i = 0; i < Block::TN; i++)
			store_shared_16(p_chunk(step, i), p.t[0][i].r);
		named_arrive(Block::P_BARRIER + step.ds_stage(), BOTH);
	}

	METHOD void find_p(Weights &p, const Step &step)
	{
		Scores s;

		this->wait_for_q(step);
		this->start_s(s, step);
		wgmma_wait<0>();
		settle(s.t[0]);
		hand_on(p, s, step);
	}

	METHOD void stream_dv(typename Block::SumV &dv)
	{
		Step step = this->first_step();
		Weights p;

		if (AHEAD)
			find_p(p, step);
		NO_UNROLL
		for (i32 n = this->n_steps(); n > 0; n--) {
			Step ahead = step;
			Scores s;
			Dq dq;

			this->next(ahead);
			if (!AHEAD)
				find_p(p, step);
			this->wait_for_do(step);
			this->start_sum(dv, p, this->do_tile(step.do_stage()), step);
			if (AHEAD && n > 1)
				this->wait_for_q(ahead);
			if (AHEAD) { /* behind the last step of whatever lies there */
				this->start_s(s, ahead);
				wgmma_wait<0>();
				settle(s.t[0]);
				settle(dv.t[0]);
				this->release(this->do_empty(step.do_stage()));
			}
			if (AHEAD && n > 1)
				hand_on(p, s, ahead);
			named_sync(Block::DS_BARRIER + step.ds_stage(), BOTH);
			this->start_dq(dq, 0, step.ds_stage());
			if (!AHEAD) {
				wgmma_wait<1>();
				settle(dv.t[0]);
				this->release(this->do_empty(step.do_stage()));
			}
			wgmma_wait<0>();
			settle(dq.t);
			this->store_dq(dq, dq_parity<0>(step, 0));
			find_rest_of_dq<0>(step);
			this->release_q(step);
			step = ahead;
		}
	}

	METHOD void find_dv()
	{
		typename Block::SumV dv;

		dv.zero();
		if (this->n_steps() > 0)
			stream_dv(dv);
		find_place_anew();
		if (this->is_whole())
			this->store(dv, at.a.dv, at.a.hdim_v, 1.0f);
		else
			this->store_part(dv, dv_sums_of(at.a), at.a.hdim_v);
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
			named_sync(Block::P_BARRIER + step.ds_stage(), BOTH);
			UNROLL
			for (int i = 0; i < Block::TN; i++) {
				load_shared_16(p_chunk(step, i), p.t[0][i].r);
				UNROLL
				for (int e = 0; e < Block::Core::E; e++)
					s.t[0][i].x[e] = Block::Element::to_float(
						(u16)(p.t[0][i].r[e / 2] >> e % 2 * 16));
			}
			this->differentiate(s, dp, step);
			ds = round_to_operand(dp);
			this->store_ds(ds, step.ds_stage());
			named_arrive(Block::DS_BARRIER + step.ds_stage(), BOTH);
			this->sync_group();
			this->start_dq(dq, 0, step.ds_stage());
			this->start_sum(dk, ds, this->q_tile(step.q_stage()), step);
			wgmma_wait<1>();
			settle(dq.t);
			this->store_dq(dq, dq_parity<1>(step, 0));
			wgmma_wait<0>();
			settle(dk.t[0]);
			this->release_q(step);
			find_rest_of_dq<1>(step);
		}
		find_place_anew();
		if (this->is_whole())
			this->store(dk, at.a.dk, at.a.hdim_q, at.a.scale);
		else
			this->store_part(dk, dk_sums_of(at.a), at.a.hdim_q);
	}

	/* Where the block is is not kept while it streams: the last warpgroup has no registers for
	 * that. */
	METHOD void find_place_anew() { this->locate(hidden(block_id_x()), nullptr); }

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
