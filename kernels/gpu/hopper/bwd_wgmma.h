/* SPDX-License-Identifier: MIT */
/*
 * bwd_wgmma.h: gradients on Hopper, in one pass of five products. A block owns TILE_N keys of one
 * KV head and streams tiles of TILE_M queries, of all heads that share the keys or of a part of
 * them (abi.h: kv_parts), past them:
 *
 *   S^T = K Q^T, dP^T = V dO^T        operands where the copy engine put them
 *   dV += P^T dO, dK += dS^T Q        P^T and dS^T, with dS = P (dP - D), from registers
 *   dQ^T = K^T dS^T                   dS through shared memory: of all warpgroups
 *
 * Heads of up to 128: each warpgroup has 64 keys, and a part of dQ^T. Of a slab and a half, up to
 * 96, that would be half zeros: there the first one has all of dQ, by rows, and the other may be
 * two steps ahead. Wider ones: bwd_wgmma_wide.h and, of 192 and 128, bwd_wgmma_roles.h; up to 64,
 * by 64 queries: bwd_wgmma_narrow.h.
 */
#ifndef FMHA_GPU_BWD_WGMMA_H
#define FMHA_GPU_BWD_WGMMA_H

#include "bwd_wgmma_narrow.h"
#include "bwd_wgmma_roles.h"
#include "bwd_wgmma_wide.h"

template <class C> struct BackwardWgmma : BackwardWgmmaBlock<C> {
	typedef BackwardWgmmaBlock<C> Block;
	using Block::at;
	typedef typename Block::Scores Scores;
	typedef typename Block::Step Step;

	METHOD BackwardWgmma(const abi_bwd_args &args) : Block(args) {}

	/* What a warpgroup finds of dQ. */
	enum Share { HALF, ALL, NOTHING };
	/* DQ_BY_ROWS: of each stage of dS, that the second warpgroup has stored its part, and that
	 * the first one has read it. */
	static const int BOTH = Block::GROUPS * Block::GROUP_THREADS;
	static const int DS_FULL = Block::DS_BARRIER, DS_EMPTY = DS_FULL + Block::DS_STAGES;

	METHOD void stream(typename Block::SumK &dk, typename Block::SumV &dv)
	{
		if constexpr (!Block::DQ_BY_ROWS)
			walk<HALF>(dk, dv);
		else if (this->group() == 0)
			walk<ALL>(dk, dv);
		else
			walk<NOTHING>(dk, dv);
	}

	/* dS is stored for the warpgroup that finds dQ, or for both. */
	template <Share OF_DQ> METHOD void hand_on(const Step &step) const
	{
		if (OF_DQ == HALF)
			named_sync(Block::DS_BARRIER, BOTH);
		else if (OF_DQ == ALL)
			named_sync(DS_FULL + step.ds_stage(), BOTH);
		else
			named_arrive(DS_FULL + step.ds_stage(), BOTH);
	}
	METHOD void finish_dv(typename Block::SumV &dv, const Step &step) const
	{
		wgmma_wait<1>();
		settle(dv.t[0]);
		this->release(this->do_empty(step.do_stage()));
	}

	METHOD auto lse_of(const Step &step) const
	{
		if constexpr (Block::FETCHES_LSE)
			return this->fetch_lse(step);
		else
			return typename Block::LseThere();
	}

	template <Share OF_DQ>
	METHOD void walk(typename Block::SumK &dk, typename Block::SumV &dv)
	{
		Step step = this->first_step(), next_step;

		barrier_wait(this->kv_full(), 0);
		this->clear_keys();
		NO_UNROLL
		for (i32 n = this->n_steps(); n > 0; n--, this->next(step, next_step)) {
			Scores s, dp;
			typename Block::Weights ds;
			typename Block::Dq dq;

			at.head = step.head;
			this->wait_for_q(step);
			const auto lse = lse_of(step);
			this->start_s(s, step);
			this->wait_for_do(step);
			this->start_dp(dp, step);
			u32 hidden = this->find_hidden(step);
			this->look_ahead(step, &next_step);
			wgmma_wait<1>();
			if (OF_DQ == NOTHING && step.number >= Block::DS_STAGES)
				named_sync(DS_EMPTY + step.ds_stage(), BOTH);
			ds = this->start_gradients(s, dp, dv, step, hidden, lse);
			hand_on<OF_DQ>(step);
			if constexpr (OF_DQ == HALF)
				this->start_dq(dq, 0, step.ds_stage());
			if constexpr (OF_DQ == ALL)
				this->start_all_dq(dq, step.ds_stage());
			if (OF_DQ != NOTHING)
				finish_dv(dv, step);
			this->start_sum(dk, ds, this->q_tile(step.q_stage()), step);
			if (OF_DQ == NOTHING) {
				finish_dv(dv, step);
			} else {
				wgmma_wait<1>();
				settle(dq.t);
				if (OF_DQ == ALL && n > Block::DS_STAGES)
					named_arrive(DS_EMPTY + step.ds_stage(), BOTH);
				this->store_dq(dq, step.number & 1 ^ 1);
			}
			wgmma_wait<0>();
			settle(dk.t[0]);
			this->release_q(step);
		}
	}
};

/* Warpgroups with keys of their own, which Loop streams the queries past. */
template <class Loop> struct BackwardOfOwnKeys : Loop {
	using Loop::at;

	METHOD BackwardOfOwnKeys(const abi_bwd_args &args) : Loop(args) {}

	METHOD void multiply()
	{
		static_assert(Loop::DQ.blocks(0) == 1, "chunk of dQ, of which a warpgroup has one");
		typename Loop::SumK dk;
		typename Loop::SumV dv;

		this->wave = wave_id();
		if (!Loop::BEGINS_SUMS) {
			dk.zero();
			dv.zero();
		}
		if (this->n_steps() > 0) {
			this->stream(dk, dv);
		} else if (Loop::BEGINS_SUMS) {
			dk.zero();
			dv.zero();
		}
		/* In one branch: of two ptxas makes another loop before them. */
		if (this->is_whole()) {
			this->store(dk, at.a.dk, at.a.hdim_q, at.a.scale);
			this->store(dv, at.a.dv, at.a.hdim_v, 1.0f);
		} else {
			this->store_part(dk, dk_sums_of(at.a), at.a.hdim_q);
			this->store_part(dv, dv_sums_of(at.a), at.a.hdim_v);
		}
	}
};

enum { LOOP_OF_OWN_KEYS, LOOP_NARROW, LOOP_WIDE, LOOP_OF_ROLES };
template <class Block> METHOD constexpr int loop_of()
{
	return Block::ROLES    ? LOOP_OF_ROLES
	       : Block::SHARED ? LOOP_WIDE
	       : Block::NARROW ? LOOP_NARROW
			       : LOOP_OF_OWN_KEYS;
}
template <class C, int LOOP> struct SelectLoop {
	typedef BackwardOfOwnKeys<BackwardWgmma<C>> Type;
};
template <class C> struct SelectLoop<C, LOOP_NARROW> {
	typedef BackwardOfOwnKeys<BackwardWgmmaNarrow<C>> Type;
};
template <class C> struct SelectLoop<C, LOOP_WIDE> {
	typedef BackwardWgmmaWide<C> Type;
};
template <class C> struct SelectLoop<C, LOOP_OF_ROLES> {
	typedef BackwardWgmmaRoles<C> Type;
};

/* Behind the arguments the maps that gpu_maps.c describes. */
#define FMHA_OWN_ENTRY
extern "C" __global__ void FMHA_BOUNDS(BackwardWgmmaBlock<Config>::THREADS, 1)
	FMHA_ENTRY(const abi_bwd_args args, const __grid_constant__ TensorMap q,
		   const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
		   const __grid_constant__ TensorMap d_o)
{
	typedef BackwardWgmmaBlock<Config> Block;
	FMHA_LDS;
	typename SelectLoop<Config, loop_of<Block>()>::Type kernel(args);

	kernel.lds = shared_address(lds);
	if (!kernel.locate(block_id_x(), lds + Block::LIST_AT))
		return;
	if constexpr (Block::HAS_DATA)
		kernel.find_seen((u32 *)(lds + Block::SEEN_AT));
	kernel.make_barriers();
	if (wave_id() >= Config::WAVES_M) {
		give_registers<Block::LOADER_REGISTERS>();
		kernel.serve(q, k, v, d_o);
	} else {
		if constexpr (!Block::ROLES) /* of which each takes its own */
			take_registers<Block::PRODUCT_REGISTERS>();
		kernel.multiply();
	}
}

#endif
