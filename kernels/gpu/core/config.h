/* SPDX-License-Identifier: MIT */
/*
 * config.h: a kernel's compile-time parameters, from the options that gpu_kernel.c writes. The
 * kernels are templates over one such struct; nothing else reads the macros.
 */
#ifndef FMHA_GPU_CONFIG_H
#define FMHA_GPU_CONFIG_H

#include "tile.h"

/* What the matrix core computes in: inputs of 8 bits are exact in bf16. */
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
enum { MASK_DATA_NONE, MASK_DATA_INTERVALS, MASK_DATA_BITS };

/* The type of keys and values: the queries', or 8 bits under queries of 16. */
template <class E, int NARROW> struct KeyTypeOf {
	typedef E Type;
};
template <class E> struct KeyTypeOf<E, 1> {
	typedef E4M3 Type;
};
template <class E> struct KeyTypeOf<E, 2> {
	typedef E5M2 Type;
};
template <class E> struct KeyTypeOf<E, 3> {
	typedef I8 Type;
};

struct Config {
	typedef TypeOf<FMHA_DTYPE>::Type Element; /* of q, k, v in memory */
	typedef KeyTypeOf<Element, FMHA_NARROW>::Type KeyElement;
	typedef SelectedCore Core;
	static const int HDIM_Q = FMHA_HDIM_Q, HDIM_V = FMHA_HDIM_V; /* padded */
	static const int PART_Q = lds_part(HDIM_Q), PART_V = lds_part(HDIM_V); /* block/parts.h */
	static const bool PARTED = PART_Q < HDIM_Q || PART_V < HDIM_V;
	static const int TILE_M = FMHA_TILE_M, TILE_N = FMHA_TILE_N;
	static const int DQ_TILE_M = FMHA_DQ_TILE_M, DQ_TILE_N = FMHA_DQ_TILE_N;
	static const int WAVES_M = FMHA_WAVES_M, WAVES_N = FMHA_WAVES_N;
	static const int THREADS = WAVES_M * WAVES_N * FMHA_WAVE;
	static const int BLOCKS_PER_CU = FMHA_BLOCKS_PER_CU;
	static const int LDS_BYTES = FMHA_LDS_BYTES; /* what the host will give */
	/*
	 * What is compiled in (traits.h). BIAS: an enum of above. SPLIT: O, LSE or dQ is that of
	 * each split of the keys. LOGITS: scores must be real ones before the softmax, otherwise
	 * raw products will do. PARKED: see fwd.h. SPLIT_DKDV: dK and dV in blocks of their own.
	 * DBIAS_SUM: dBias is a sum over broadcast axes.
	 * BUFFERS: of streamed tiles, backward and decode. MASK_DATA: an enum of above, see
	 * block/mask_data.h.
	 */
#define FMHA_TYPE_FLAG  bool
#define FMHA_TYPE_KIND  int
#define FMHA_TYPE_KIND4 int
#define FMHA_CONSTANT(name, NAME, word, kind, families, asked)                                     \
	static const FMHA_TYPE_##kind NAME = FMHA_##NAME;
	FMHA_FEATURES(FMHA_CONSTANT)

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
