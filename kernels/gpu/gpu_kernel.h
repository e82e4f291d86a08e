/* SPDX-License-Identifier: MIT */
/*
 * gpu_kernel.h: how to compile and launch the GPU kernels, as plain host data. No GPU API, no
 * allocation, no global state: daemon/device/hip, daemon/compile and the offline checks all ask
 * here, and the unit tests need no GPU.
 *
 * A kernel is one source (fmha.hip) and a list of -D options. A tile says how the work is cut; the
 * argument struct says which features are compiled in. Two problems with the same name share one
 * code object.
 */
#ifndef FMHA_GPU_KERNEL_H
#define FMHA_GPU_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "abi.h"

enum gpu_core { GPU_CORE_SCALAR, GPU_CORE_MMA, GPU_CORE_MFMA, GPU_CORE_WMMA11, GPU_CORE_WMMA12 };

struct gpu_arch {
	char name[32]; /* "sm_90a", "gfx942" */
	int nvidia;
	int wave;           /* lanes */
	enum gpu_core core; /* the best one */
	uint32_t lds_bytes; /* most dynamic LDS (shared memory) of a block */
	int tight;          /* code for it needs more registers than for its successors */
};

/* Returns 0, or -1 for a name that is no GPU. */
int gpu_arch_find(const char *name, struct gpu_arch *ret_arch);

/*
 * How a kernel cuts its work. Pipelines:
 *   gpu_scalar, gpu_mma, gpu_mfma, gpu_wmma   a block owns tile_m rows of one head
 *   gpu_*_pack                                the heads of a group side by side in tile_m rows,
 * waves share the keys of a tile: decode gpu_combine, gpu_append, gpu_dot, gpu_convert   the small
 * families: no tile Backward dq_dk_dv: tile_n keys (then tile_n rows) stay, tile_m rows (keys)
 * stream past.
 */
struct gpu_tile {
	char pipeline[32];
	int32_t tile_m, tile_n;
	int32_t hdim_q, hdim_v; /* padded: multiples of 32 */
	int32_t waves_m, waves_n;
	int32_t blocks_per_cu; /* a hint to the register allocator; NVIDIA only */
};

#define GPU_KERNEL_OPTIONS 32
#define GPU_KERNEL_OPTION  40

struct gpu_kernel {
	char name[256]; /* unique per code object */
	char source[32];
	char entry[64];
	int n_options;
	char options[GPU_KERNEL_OPTIONS][GPU_KERNEL_OPTION];
	uint32_t block[3];
	uint32_t lds_bytes; /* dynamic */
	enum abi_family family;
	struct gpu_tile tile;
	int pack, apart, bias_sum;
	int32_t rows_n; /* dq_dk_dv: rows of a block of the second pass */
};

/*
 * The tiles shipped for a problem, best first. @args: the family's struct; its pointers say only
 * which tensors are present, its lengths are maxima.
 * Return: 0, or 1 when there is no @candidate-th.
 */
int gpu_kernel_default_tile(const char *arch, enum abi_family family, uint32_t dtype,
			    const void *args, int candidate, struct gpu_tile *ret_tile);

/* Return: 0, or 1 when this tile cannot run these args on this arch. */
int gpu_kernel_make(const char *arch, enum abi_family family, uint32_t dtype, const void *args,
		    const struct gpu_tile *tile, struct gpu_kernel *ret_kernel);

/* The first default tile that runs @args. Return: 0, or 1 when nothing fits. */
int gpu_kernel_choose(const char *arch, enum abi_family family, uint32_t dtype, const void *args,
		      struct gpu_kernel *ret_kernel);

/* Blocks; a zero means that there is nothing to launch. */
void gpu_kernel_grid(const struct gpu_kernel *kernel, const void *args, uint32_t ret_grid[3]);

/* Private workspace of a launch, on top of what abi.h says: none so far. */
uint64_t gpu_kernel_workspace_bytes(const struct gpu_kernel *kernel, const void *args);

#endif
