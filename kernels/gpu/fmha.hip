/* SPDX-License-Identifier: MIT */
/*
 * fmha.hip: one kernel, chosen by the options that gpu_kernel.c writes. HIP C++ and CUDA C++ at the
 * same time: see prelude.h.
 */
#include "config.h"

/* The file of the pipeline's main loop. One whose kernel takes more than arguments brings it along,
 * and says FMHA_OWN_ENTRY. */
#define FMHA_TEXT(x)   #x
#define FMHA_HEADER(x) FMHA_TEXT(x.h)

#if FMHA_FAMILY == 0 || FMHA_FAMILY == 1 || FMHA_FAMILY == 3 || FMHA_FAMILY == 5
#include FMHA_HEADER(FMHA_LOOP)

#ifndef FMHA_OWN_ENTRY
extern "C" __global__ void FMHA_BOUNDS(Config::THREADS, Config::BLOCKS_PER_CU)
	FMHA_ENTRY(const abi_fwd_args args)
{
	FMHA_LDS;
	Forward<Config> kernel(args);

	kernel.run(lds);
}
#endif
#endif

#if FMHA_FAMILY == 2
#include "combine.h"

extern "C" __global__ void FMHA_BOUNDS(Config::THREADS, Config::BLOCKS_PER_CU)
	FMHA_ENTRY(const abi_combine_args args)
{
	combine(args);
}
#endif

#if FMHA_FAMILY == 4
#include "append.h"

extern "C" __global__ void FMHA_BOUNDS(Config::THREADS, Config::BLOCKS_PER_CU)
	FMHA_ENTRY(const abi_appendkv_args args)
{
	Append<Config> kernel(args);

	kernel.run();
}
#endif

#if FMHA_FAMILY == 6 || FMHA_FAMILY == 8
#include "bwd_rows.h"

extern "C" __global__ void FMHA_BOUNDS(Config::THREADS, Config::BLOCKS_PER_CU)
	FMHA_ENTRY(const abi_bwd_args args)
{
	BackwardRows<Config> kernel(args);

	if (FMHA_FAMILY == ABI_BWD_DOT_DO_O) {
		FMHA_LDS;
		kernel.dot(lds);
	} else {
		kernel.convert();
	}
}
#endif

#if FMHA_FAMILY == 7
#include FMHA_HEADER(FMHA_LOOP)

#ifndef FMHA_OWN_ENTRY
extern "C" __global__ void FMHA_BOUNDS(Config::THREADS, Config::BLOCKS_PER_CU)
	FMHA_ENTRY(const abi_bwd_args args)
{
	FMHA_LDS;
	Backward<Config>::run(args, lds);
}
#endif
#endif
