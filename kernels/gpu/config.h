/* SPDX-License-Identifier: MIT */
/*
 * config.h: a kernel's compile-time parameters, from the options that gpu_kernel.c writes. The
 * kernels are templates over one such struct; nothing else reads the macros.
 */
#ifndef FMHA_GPU_CONFIG_H
#define FMHA_GPU_CONFIG_H

#include "tile.h"

/* What the matrix core computes in: fp8 inputs are exact in bf16. */
template <class E> struct ComputeType {
	typedef BF16 Type;
};
template <> struct ComputeType<F16> {
	typedef F16 Type;
};

#if FMHA_CORE == FMHA_CORE_SCALAR
typedef CoreScalar SelectedCore;
#elif FMHA_CORE == FMHA_CORE_MMA
#include "core_mma.h"
typedef CoreMma<ComputeType<TypeOf<FMHA_DTYPE>::Type>::Type> SelectedCore;
#else
#include "core_amd.h"
typedef CoreAmd<ComputeType<TypeOf<FMHA_DTYPE>::Type>::Type> SelectedCore;
#endif

enum { BIAS_NONE, BIAS_MATRIX, BIAS_ALIBI };

struct Config {
	typedef TypeOf<FMHA_DTYPE>::Type Element; /* of q, k, v in memory */
	typedef SelectedCore Core;
	static const int HDIM_Q = FMHA_HDIM_Q, HDIM_V = FMHA_HDIM_V; /* padded */
	static const int TILE_M = FMHA_TILE_M, TILE_N = FMHA_TILE_N;
	static const int DQ_TILE_M = FMHA_DQ_TILE_M, DQ_TILE_N = FMHA_DQ_TILE_N; /* bwd_dq.h */
	static const int WAVES_M = FMHA_WAVES_M, WAVES_N = FMHA_WAVES_N;
	static const int THREADS = WAVES_M * WAVES_N * FMHA_WAVE;
	static const int BLOCKS_PER_CU = FMHA_BLOCKS_PER_CU;
	static const int LDS_BYTES = FMHA_LDS_BYTES; /* what the host will give */
	static const bool MASK = FMHA_MASK, SOFTCAP = FMHA_SOFTCAP, DROPOUT = FMHA_DROPOUT;
	static const bool PAGED = FMHA_PAGED, PACK = FMHA_PACK, DESCALE = FMHA_DESCALE;
	static const bool SPLIT = FMHA_SPLIT; /* O, LSE or dQ is that of each split of the keys */
	/* Scores must be real logits before the softmax; otherwise raw products will do. */
	static const bool LOGITS = FMHA_LOGITS;
	static const bool PARKED = FMHA_PARKED;         /* forward: see fwd.h */
	static const bool SPLIT_DKDV = FMHA_SPLIT_DKDV; /* dK and dV in blocks of their own */
	static const int BIAS = FMHA_BIAS;
	static const bool DBIAS_SUM = FMHA_DBIAS_SUM; /* dBias is a sum over broadcast axes */
	static const int BUFFERS = FMHA_BUFFERS; /* of streamed tiles, backward and decode */

	static __device__ constexpr lds_cut cut(int m, int n)
	{
		return lds_cut{FMHA_CORE, FMHA_WAVE, m, n, HDIM_Q, HDIM_V, WAVES_M, WAVES_N};
	}
};

/* The block's dynamic LDS (shared memory). */
#if FMHA_NVIDIA
#define FMHA_LDS extern __shared__ __align__(1024) char lds[]
#else
#define FMHA_LDS extern __attribute__((shared, aligned(16))) char lds[]
#endif

#endif
