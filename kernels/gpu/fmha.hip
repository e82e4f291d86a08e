/* SPDX-License-Identifier: MIT */
/*
 * fmha.hip: one kernel, chosen by the options that gpu_kernel.c writes. HIP C++ and CUDA C++ at the
 * same time: see prelude.h.
 */
#include "config.h"

#if FMHA_FAMILY == 0 || FMHA_FAMILY == 1 || FMHA_FAMILY == 3 || FMHA_FAMILY == 5
#include "fwd.h"

extern "C" __global__ void FMHA_BOUNDS(Config::THREADS, Config::BLOCKS_PER_CU)
	FMHA_ENTRY(const abi_fwd_args args)
{
	FMHA_LDS;
	Forward<Config> kernel(args);

	kernel.run(lds);
}
#endif
