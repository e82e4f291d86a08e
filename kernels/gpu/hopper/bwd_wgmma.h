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
 * Heads of up to 128: each warpgroup has 64 keys, and a part of dQ^T. Wider ones: bwd_wgmma_wide.h;
 * up to 64: bwd_wgmma_narrow.h.
 */
#ifndef FMHA_GPU_BWD_WGMMA_H
#define FMHA_GPU_BWD_WGMMA_H

#include "bwd_wgmma_narrow.h"
#include "bwd_wgmma_wide.h"

template <class C> struct BackwardWgmma : BackwardWgmmaBlock<C> {
	typedef BackwardWgmmaBlock<C> Block;
	using Block::at;
	typedef typename Block::Scores Scores;
	typedef typename Block::Step Step;

	METHOD BackwardWgmma(const abi_bwd_args &args) : Block(args) {}

	METHOD void stream(typename Block::SumK &dk, typename Block::SumV &dv)
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
			this->start_s(s, step);
			this->wait_for_do(step);
			this->start_dp(dp, step);
			u32 hidden = this->find_hidden(step);
			this->look_ahead(step, &next_step);
			wgmma_wait<1>();
			ds = this->start_gradients(s, dp, dv, step, hidden);
			named_sync(Block::DS_BARRIER, Block::GROUPS * Block::GROUP_THREADS);
			this->start_dq(dq, 0, step.ds_stage());
			wgmma_wait<1>();
			settle(dv.t[0]);
			this->release(this->do_empty(step.do_stage()));
			this->start_sum(dk, ds, this->q_tile(step.q_stage()));
			wgmma_wait<1>();
			settle(dq.t);
			this->store_dq(dq, step.number & 1 ^ 1);
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
		dk.zero();
		dv.zero();
		if (this->n_steps() > 0)
			this->stream(dk, dv);
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

template <class C, bool SHARED, bool NARROW> struct SelectLoop {
	typedef BackwardOfOwnKeys<BackwardWgmma<C>> Type;
};
template <class C> struct SelectLoop<C, false, true> {
	typedef BackwardOfOwnKeys<BackwardWgmmaNarrow<C>> Type;
};
template <class C, bool NARROW> struct SelectLoop<C, true, NARROW> {
	typedef BackwardWgmmaWide<C> Type;
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
	typename SelectLoop<Config, Block::SHARED, Block::NARROW>::Type kernel(args);

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
		take_registers<Block::PRODUCT_REGISTERS>();
		kernel.multiply();
	}
}

#endif
