/* SPDX-License-Identifier: MIT */
/*
 * gpu_kernel.h: how to compile and launch the GPU kernels, as plain host data. No GPU API, no
 * allocation, no global state: daemon/device/hip, daemon/compile and the offline checks all ask
 * here, and the unit tests need no GPU.
 *
 * A kernel is one source (fmha.hip) and a list of -D options. A tile says how the work is cut, the
 * traits of the problem (traits.h) say what is compiled in. Run-time arguments decide about a
 * launch only.
 */
#ifndef FMHA_GPU_KERNEL_H
#define FMHA_GPU_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include <kernels/launch.h>
#include <kernels/traits.h>
#include <proto/build.h>

/* WGMMA: Hopper's, which has MMA as well; its loops hold scores as MMA's do. */
enum gpu_core {
	GPU_CORE_SCALAR,
	GPU_CORE_MMA,
	GPU_CORE_MFMA,
	GPU_CORE_WMMA11,
	GPU_CORE_WMMA12,
	GPU_CORE_WGMMA,
};

struct gpu_arch {
	const char *name; /* "sm_90a", "gfx942" */
	enum gpu_core core; /* the best one */
	int wave;           /* lanes */
	uint32_t lds_bytes; /* most dynamic LDS (shared memory) of a block */
};

/* Those of gpu_arch.h, in that order. */
extern const struct gpu_arch gpu_archs[];
extern const size_t gpu_n_archs;
/* NULL: none of that name. */
const struct gpu_arch *gpu_arch_find(const char *name);

/*
 * Pipelines: gpu_scalar, _mma, _mfma, _wmma: a block owns tile_m rows of one head; gpu_*_pack: the
 * heads of a group side by side in tile_m rows, waves share the keys of a tile: decode; gpu_wgmma:
 * tiles fetched by the copy engine, so that its kernels take tensor maps (gpu_kernel_maps());
 * gpu_decode: as gpu_*_pack, each wave with many bytes of its own keys under way; gpu_latent: as
 * gpu_wgmma, over keys that hold their values, heads side by side; gpu_wide: the same over heads
 * above 256 with values of their own; gpu_amd and gpu_amd_decode: by buffer descriptors, for dense
 * aligned rows; gpu_combine, gpu_append, gpu_dot, gpu_convert: the small families, no tile.
 * Backward dq_dk_dv: tile_n keys (then dq_tile_n queries) are stationary, tile_m queries (keys)
 * streamed.
 */
#define GPU_PIPELINES(X) /* X(ID, name, the cores that have it, 1: packs heads, folder and name of its loop) */\
	X(GPU_SCALAR, gpu_scalar, GPU_ANY_CORE, 0, "general", "")                                         \
	X(GPU_SCALAR_PACK, gpu_scalar_pack, GPU_ANY_CORE, 1, "general", "")                               \
	X(GPU_MMA, gpu_mma, GPU_MMA_CORES, 0, "general", "")                                              \
	X(GPU_MMA_PACK, gpu_mma_pack, GPU_MMA_CORES, 1, "general", "")                                    \
	X(GPU_MFMA, gpu_mfma, 1u << GPU_CORE_MFMA, 0, "general", "")                                      \
	X(GPU_MFMA_PACK, gpu_mfma_pack, 1u << GPU_CORE_MFMA, 1, "general", "")                            \
	X(GPU_WMMA, gpu_wmma, 1u << GPU_CORE_WMMA11 | 1u << GPU_CORE_WMMA12, 0, "general", "")            \
	X(GPU_WMMA_PACK, gpu_wmma_pack, 1u << GPU_CORE_WMMA11 | 1u << GPU_CORE_WMMA12, 1, "general", "")  \
	X(GPU_WGMMA, gpu_wgmma, 1u << GPU_CORE_WGMMA, 0, "hopper", "_wgmma")                              \
	X(GPU_DECODE, gpu_decode, GPU_MMA_CORES, 1, "hopper", "_decode")                                  \
	X(GPU_LATENT, gpu_latent, 1u << GPU_CORE_WGMMA, 1, "hopper", "_latent")                           \
	X(GPU_WIDE, gpu_wide, 1u << GPU_CORE_WGMMA, 1, "hopper", "_wide")                                 \
	X(GPU_AMD, gpu_amd, GPU_AMD_CORES, 0, "amd", "_amd")                                              \
	X(GPU_AMD_DECODE, gpu_amd_decode, GPU_AMD_CORES, 1, "amd", "_amd_decode")                         \
	X(GPU_COMBINE, gpu_combine, GPU_ANY_CORE, 0, "general", "")                                       \
	X(GPU_APPEND, gpu_append, GPU_ANY_CORE, 0, "general", "")                                         \
	X(GPU_DOT, gpu_dot, GPU_ANY_CORE, 0, "general", "")                                               \
	X(GPU_CONVERT, gpu_convert, GPU_ANY_CORE, 0, "general", "")
#define GPU_ANY_CORE  0x3fu
#define GPU_AMD_CORES (1u << GPU_CORE_MFMA | 1u << GPU_CORE_WMMA11 | 1u << GPU_CORE_WMMA12)
#define GPU_MMA_CORES (1u << GPU_CORE_MMA | 1u << GPU_CORE_WGMMA)
#define GPU_ENUM_PIPELINE(id, name, cores, pack, folder, loop) id,
enum gpu_pipeline { GPU_PIPELINES(GPU_ENUM_PIPELINE) GPU_N_PIPELINES };
/* Whether a forward loop reads keys of 8 bits under queries of 16: general ones as they bring them
 * in, Hopper's over rows, of decode and of latents as they widen them for the products. */
#define GPU_WIDENS(pipeline) ((pipeline) <= GPU_LATENT || (pipeline) > GPU_AMD_DECODE)
struct gpu_pipeline_info {
	const char *name;
	uint32_t cores; /* bits of enum gpu_core: the archs that have it */
	int pack;
	const char *folder; /* of kernels/gpu/ */
	const char *loop;   /* "_x": the forward loop is fwd_x.h there, the backward one bwd_x.h */
};
extern const struct gpu_pipeline_info gpu_pipelines[GPU_N_PIPELINES];

#define GPU_MOST_HDIM_Q 576 /* of latents: 512 that are values, and what turns */
#define GPU_MOST_HDIM_V 512
/* Whether head dims up to @most are padded to so many; above 256 a kernel takes halves, of 32
 * columns each. */
int gpu_pads_to(int32_t hdim, int32_t most);

struct gpu_tile {
	int32_t pipeline; /* enum gpu_pipeline */
	int32_t tile_m, tile_n;
	int32_t hdim_q, hdim_v; /* padded: gpu_pads_to() */
	int32_t waves_m, waves_n;
	int32_t blocks_per_cu; /* a hint to the register allocator; NVIDIA only */
};

struct gpu_kernel {
	struct kernel_build build;
	char entry[64];
	uint32_t block[3];
	uint32_t lds_bytes; /* dynamic */
	enum abi_family family;
	uint32_t dtype;
	struct gpu_tile tile;
	int split_dkdv, dbias_sum, shares, wide, paired, by_key;
	int overlaps; /* as launch.h says: it waits for the stage before by itself */
	int32_t dq_tile_n; /* dq_dk_dv: queries of a block of the second pass */
	uint32_t most_x;   /* blocks that a launch takes along x */
};

/* Return: NULL, or why this tile cannot run with these traits on this arch: the loop is the
 * subject, text that lasts. */
const char *gpu_kernel_make(const struct gpu_arch *arch, enum abi_family family,
			    const struct traits *traits, const struct gpu_tile *tile,
			    struct gpu_kernel *ret_kernel);

/* The kernel that makes tables of lengths and pages (abi_prepare_args), for any problem. */
void gpu_kernel_make_prepare(const char *arch, struct gpu_kernel *ret_kernel);
/* The kernel that waits for words and writes them (abi_word_args), on AMD, where the runtime
 * cannot; one block of so many. */
#define GPU_WORD_THREADS 32
void gpu_kernel_make_word(const char *arch, struct gpu_kernel *ret_kernel);
/* Blocks of the one for tables, of a device with so many compute units; @args: also told. */
void gpu_kernel_grid_prepare(uint32_t units, struct abi_prepare_args *args, uint32_t ret_grid[3]);

/* Return: NULL, or why not: the end of a sentence about the tile. */
const char *gpu_tile_misfit(const struct gpu_arch *arch, enum abi_family family,
			    const struct traits *traits, const struct gpu_tile *tile);

/*
 * Blocks; a zero means that there is nothing to launch. @units: compute units of the device.
 * Return: 0, or 1 when they are more than a launch takes, or what they count more than the kernel's
 * integers do; then @ret_grid is zero.
 */
int gpu_kernel_grid(const struct gpu_kernel *kernel, uint32_t units, const void *args,
		    uint32_t ret_grid[3]);

/*
 * What the kernel takes besides @args, and where its pointers must be aligned: n_maps, maps,
 * n_aligned and aligned of @ret_record. Of pointers in @args only the alignment is looked at, and
 * whether they are NULL.
 * Return: NULL, or why the kernel cannot take these tensors: a sentence.
 */
const char *gpu_kernel_maps(const struct gpu_kernel *kernel, const void *args,
			    struct launch_record *ret_record);

/*
 * All that a launch of it needs but its code: gpu_kernel_maps(), grid, block, LDS, entry, overlaps.
 * The device says so, and whoever explains a plan for one that is not here.
 * Return: NULL, or why the kernel cannot take these arguments: a sentence.
 */
const char *gpu_kernel_launch(const struct gpu_kernel *kernel, uint32_t units, const void *args,
			      struct launch_record *ret_record);

/*
 * Into how many parts a dq_dk_dv kernel of GPU_WGMMA is to cut the heads that share keys (abi.h:
 * kv_parts). @ret_us: about how long its blocks take with one part, and with so many; 0: nothing to
 * weigh up
 */
int32_t gpu_kernel_parts(const struct gpu_tile *tile, uint32_t units,
			 const struct abi_bwd_args *args, double ret_us[2]);

/* How many words the order takes in which such a kernel's blocks begin (abi.h: order_words);
 * 0: they have one of their own. */
int32_t gpu_kernel_order_words(const struct gpu_tile *tile, const struct abi_bwd_args *args);

#endif
