/* SPDX-License-Identifier: MIT */
/*
 * fmha.hip: one kernel, chosen by the options that gpu_kernel.c writes. HIP C++ and CUDA C++ at the
 * same time: see prelude.h.
 */
#include "core/config.h"

/* The file of the pipeline's main loop, with its folder. One whose kernel takes more than arguments
 * brings its own entry, and says FMHA_OWN_ENTRY. */
#define FMHA_TEXT(x)   #x
#define FMHA_HEADER(x) FMHA_TEXT(x.h)

#if FMHA_FAMILY == 2
#include "general/combine.h"
typedef abi_combine_args Args;
DEV void run(const Args &args, char *lds) { Combine(args).run(lds); }
#elif FMHA_FAMILY == 4
#include "general/append.h"
typedef abi_appendkv_args Args;
DEV void run(const Args &args, char *)
{
	if constexpr (Config::WIDENS)
		Append<Config>(args).run_widening();
	else
		Append<Config>(args).run();
}
#elif FMHA_FAMILY == 6
#include "general/bwd_rows.h"
typedef abi_bwd_args Args;
#if FMHA_MASK_DATA
#include "hopper/mask_order.h"
/* Blocks that write the order come first. */
DEV void run(const Args &args, char *lds)
{
	i32 block = block_id_x() - grid_orders(&args);

	if (block >= 0 || block_id_y() == 1)
		BackwardRows<Config>(args).dot(block, lds);
	else
		MaskOrder<Config>(args, lds).write(block_id_x(), block_id_z());
}
#else
DEV void run(const Args &args, char *lds) { BackwardRows<Config>(args).dot(block_id_x(), lds); }
#endif
#elif FMHA_FAMILY == 7
#include FMHA_HEADER(FMHA_LOOP)
#ifndef FMHA_OWN_ENTRY
typedef abi_bwd_args Args;
DEV void run(const Args &args, char *lds) { backward<Config>(args, lds); }
#endif
#elif FMHA_FAMILY == 8
#include "general/bwd_rows.h"
typedef abi_bwd_args Args;
DEV void run(const Args &args, char *lds) { BackwardRows<Config>(args).convert((float *)lds); }
#else /* fwd, fwd_splitkv, fwd_pagedkv, batch_prefill */
#include FMHA_HEADER(FMHA_LOOP)
#ifndef FMHA_OWN_ENTRY
typedef abi_fwd_args Args;
DEV void run(const Args &args, char *lds) { Forward<Config>(args).run(lds); }
#endif
#endif

#ifndef FMHA_OWN_ENTRY
/* Merges of wide rows wait for memory, and find room for two blocks. */
extern "C" __global__ void FMHA_BOUNDS(Config::THREADS, Config::WIDE ? 2 : Config::BLOCKS_PER_CU)
	FMHA_ENTRY(const Args args)
{
	FMHA_LDS;

	run(args, lds);
}
#endif
