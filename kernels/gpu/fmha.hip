/* SPDX-License-Identifier: MIT */
/*
 * fmha.hip: one kernel, chosen by the options that gpu_kernel.c writes. HIP C++ and CUDA C++ at the
 * same time: see prelude.h.
 */
#include "config.h"

#if FMHA_WGMMA
#include "fwd_wgmma.h"

extern "C" __global__ void FMHA_BOUNDS(ForwardWgmma<Config>::THREADS, 1)
	FMHA_ENTRY(const abi_fwd_args args, const __grid_constant__ TensorMap q,
		   const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v)
{
	FMHA_LDS;
	ForwardWgmma<Config> kernel(args);

	kernel.run(lds, q, k, v);
}
#elif FMHA_FAMILY == 0 || FMHA_FAMILY == 1 || FMHA_FAMILY == 3 || FMHA_FAMILY == 5
#include "fwd.h"

extern "C" __global__ void FMHA_BOUNDS(Config::THREADS, Config::BLOCKS_PER_CU)
	FMHA_ENTRY(const abi_fwd_args args)
{
	FMHA_LDS;
	Forward<Config> kernel(args);

	kernel.run(lds);
}
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
#include "bwd.h"

extern "C" __global__ void FMHA_BOUNDS(Config::THREADS, Config::BLOCKS_PER_CU)
	FMHA_ENTRY(const abi_bwd_args args)
{
	FMHA_LDS;
	Backward<Config>::run(args, lds);
}
#endif
