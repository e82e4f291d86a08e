/* SPDX-License-Identifier: MIT */
/* The shared library that tests/gpu/abi.py loads: everything in it comes from the archives. */
#include "gpu_kernel.h"

/* So that the Python side can check its reading of the headers. */
extern const size_t fmha_gpu_check_sizes[6];
__attribute__((visibility("default"))) const size_t fmha_gpu_check_sizes[6] = {
	sizeof(struct abi_fwd_args),      sizeof(struct abi_combine_args),
	sizeof(struct abi_appendkv_args), sizeof(struct abi_bwd_args),
	sizeof(struct gpu_tile),          sizeof(struct gpu_kernel),
};
