/* SPDX-License-Identifier: MIT */
/*
 * gpu_catalogue.c: the GPU kernels as rows. A tile, its waves and how many blocks share a compute unit
 * were measured (NOTES.md); nothing else lists them. The order within a pipeline is the order in
 * which offline checks try them; a plan's choice is dispatch's.
 */
#include <catalogue/gpu_catalogue.h>

#include <string.h>

#include "gpu/host/gpu_arch.h"
#include "gpu/core/lds.h"

#define COUNT(x)       (sizeof(x) / sizeof((x)[0]))
#define CORE(core)     (1u << GPU_CORE_##core)
#define WITHOUT(trait) TRAIT_BIT(trait)
#define FORWARD        TRAITS_FORWARD
#define PAGED          (SPEC_BIT(SPEC_FWD_PAGEDKV) | SPEC_BIT(SPEC_BATCH_PREFILL))
#define FP8            (SPEC_BIT(SPEC_FP8) | SPEC_BIT(SPEC_BF8))
#define HALF           (SPEC_BIT(SPEC_FP16) | SPEC_BIT(SPEC_BF16))
#define ALL            (SPEC_BIT(SPEC_FP32) | HALF | FP8)
#define NOT_FP8        (SPEC_BIT(SPEC_FP32) | HALF)
#define INT8           SPEC_BIT(SPEC_INT8) /* of caches under queries of 16 bits, and so of rows for them */

#define TILE(pipeline, cores, families, types, without, hdim, m, n, waves_m, waves_n, blocks)      \
	{                                                                                          \
		pipeline, families, cores, types, hdim, m, n, waves_m, waves_n, blocks,            \
			(without) | (GPU_WIDENS(pipeline) ? 0 : WITHOUT(narrow))                   \
	}
#define ROWS(pipeline, core, hdim, m, n, waves_m, waves_n, blocks)                                 \
	TILE(pipeline, core, FORWARD, HALF | FP8, 0, hdim, m, n, waves_m, waves_n, blocks)
/* Few rows: the waves of a block share the keys of a tile. A tile's rows belong to several heads,
 * dropout's patches to one. */
#define PACK(pipeline, core, hdim, m, n, waves_m, waves_n, blocks)                                 \
	TILE(pipeline, core, FORWARD, HALF | FP8, WITHOUT(dropout), hdim, m, n, waves_m, waves_n,  \
	     blocks)
/* Keys of more than 512 elements are latents, which all heads share, and nobody adds a bias to. */
#define LATENT(pipeline, core, types, m, n, waves_m, waves_n)                                      \
	TILE(pipeline, core, FORWARD, types, WITHOUT(bias) | WITHOUT(dropout), 576, m, n, waves_m, \
	     waves_n, 1)
/* Backward: tile_m is streamed, tile_n stationary. */
#define GRAD(pipeline, core, hdim, m, n, waves_m, waves_n, blocks)                                 \
	TILE(pipeline, core, SPEC_BIT(SPEC_BWD_DQ_DK_DV), HALF, 0, hdim, m, n, waves_m, waves_n,   \
	     blocks)
/* Row by row: one kernel serves every head dim. */
#define SMALL(pipeline, family, types, waves, blocks)                                              \
	TILE(pipeline, GPU_ANY_CORE, SPEC_BIT(family), types, 0, 576, 16, 16, waves, 1, blocks)
#define WMMA_CORES (CORE(WMMA11) | CORE(WMMA12))
/* Rows by the copy engine. What the widest tiles have no registers for is left out. */
#define WARPGROUPS(types, hdim, m, n, without)                                                     \
	TILE(GPU_WGMMA, CORE(WGMMA), SPEC_BIT(SPEC_FWD), types, without, hdim, m, n, (m) / 16, 1, 1)
#define WARPGROUPS_PAGES(types, hdim, m, n, without)                                               \
	TILE(GPU_WGMMA, CORE(WGMMA), PAGED, types, without, hdim, m, n, (m) / 16, 1, 1)
/* Few rows over many keys: what splits leave is merged. */
#define WARPGROUPS_SPLITS(types, hdim, m, n, without)                                              \
	TILE(GPU_WGMMA, CORE(WGMMA), SPEC_BIT(SPEC_FWD_SPLITKV), types,                            \
	     WITHOUT(bias) | WITHOUT(dropout) | WITHOUT(narrow) | (without), hdim, m, n, (m) / 16, \
	     1, 1)
/* Backward: as GRAD, two warpgroups. */
#define GRAD_WARPGROUPS(hdim, m, n, without)                                                       \
	TILE(GPU_WGMMA, CORE(WGMMA), SPEC_BIT(SPEC_BWD_DQ_DK_DV), HALF, without, hdim, m, n, 8, 1, \
	     1)
/* The same of three that have different products, and no registers for a bias. */
#define GRAD_ROLES(hdim, m, n)                                                                     \
	TILE(GPU_WGMMA, CORE(WGMMA), SPEC_BIT(SPEC_BWD_DQ_DK_DV), HALF,                            \
	     WITHOUT(bias) | WITHOUT(dropout) | WITHOUT(softcap), hdim, m, n, 12, 1, 1)
/* Few rows, as fast as memory: two blocks a unit. */
#define DECODE(hdim, m, n, waves_m, waves_n)                                                       \
	TILE(GPU_DECODE, GPU_MMA_CORES, FORWARD, HALF, WITHOUT(dropout), hdim, m, n, waves_m,      \
	     waves_n, 2)
/* Short rows of bytes take longer to look at than to bring: three. */
#define DECODE_SHORT(hdim, m, n, waves_m, waves_n)                                                 \
	TILE(GPU_DECODE, CORE(WGMMA), FORWARD, HALF, WITHOUT(dropout), hdim, m, n, waves_m,        \
	     waves_n, 3)
#define DECODE_BYTES(hdim, m, n, waves_m, waves_n)                                                 \
	TILE(GPU_DECODE, CORE(WGMMA), FORWARD, E4M3, WITHOUT(dropout), hdim, m, n, waves_m,        \
	     waves_n, 2)
/* Rows by buffer descriptors. The tallest tiles are for what leaves registers; splits of 256 columns would spill, those of
 * pages are decode's. */
#define IN_ROWS(hdim) (SPEC_BIT(SPEC_FWD) | ((hdim) < 256 ? SPEC_BIT(SPEC_FWD_SPLITKV) : 0))
#define STAGED(cores, hdim, m, n, waves, blocks, without)                                          \
	TILE(GPU_AMD, cores, IN_ROWS(hdim), HALF, WITHOUT(paged) | (without), hdim, m, n, waves,   \
	     1, blocks)
#define STAGED_BYTES(cores, hdim, m, n, waves, blocks, without)                                    \
	TILE(GPU_AMD, cores, IN_ROWS(hdim), E4M3, WITHOUT(paged) | WITHOUT(dropout) | (without),   \
	     hdim, m, n, waves, 1, blocks)
#define STAGED_PAGES(cores, hdim, m, n, waves, blocks, without)                                    \
	TILE(GPU_AMD, cores, PAGED, HALF, without, hdim, m, n, waves, 1, blocks)
#define STAGED_BYTE_PAGES(cores, hdim, m, n, waves, blocks, without)                               \
	TILE(GPU_AMD, cores, PAGED, E4M3, WITHOUT(dropout) | (without), hdim, m, n, waves, 1,      \
	     blocks)
/* As DECODE: what lies in pages comes by runs of 16 keys. More rows leave RDNA no registers for a bias. */
#define AMD_DECODE(cores, hdim, m, n, without)                                                     \
	TILE(GPU_AMD_DECODE, cores, FORWARD, HALF, WITHOUT(dropout) | (without), hdim, m, n, 1, 4, \
	     2)
#define AMD_DECODE_BYTES(cores, hdim, m, n, without)                                               \
	TILE(GPU_AMD_DECODE, cores, FORWARD, E4M3, WITHOUT(dropout) | (without), hdim, m, n, 1, 4, \
	     2)
#define STAGED_GRAD(cores, hdim, m, n, waves, blocks, without)                                     \
	TILE(GPU_AMD, cores, SPEC_BIT(SPEC_BWD_DQ_DK_DV), HALF, WITHOUT(dropout) | (without),      \
	     hdim, m, n, waves, 1, blocks)
#define E4M3    SPEC_BIT(SPEC_FP8)
#define RAW     (WITHOUT(bias) | WITHOUT(softcap) | WITHOUT(dropout))
#define NO_MORE (WITHOUT(bias) | WITHOUT(dropout) | WITHOUT(descale)) /* than masks and caps */

static const struct spec_row kernels[] = {
	ROWS(GPU_MMA, GPU_MMA_CORES, 64, 128, 128, 4, 1, 2),
	ROWS(GPU_MMA, GPU_MMA_CORES, 64, 128, 64, 4, 1, 2),
	ROWS(GPU_MMA, GPU_MMA_CORES, 128, 128, 64, 4, 1, 1),
	ROWS(GPU_MMA, GPU_MMA_CORES, 128, 64, 64, 4, 1, 3),
	ROWS(GPU_MMA, GPU_MMA_CORES, 128, 64, 64, 4, 1, 2),
	ROWS(GPU_MMA, GPU_MMA_CORES, 256, 128, 64, 8, 1, 1),
	ROWS(GPU_MMA, GPU_MMA_CORES, 256, 64, 32, 4, 1, 1),
	ROWS(GPU_MMA, GPU_MMA_CORES, 128, 128, 32, 4, 1, 1), /* room for dropout's random words */
	ROWS(GPU_MMA, GPU_MMA_CORES, 512, 64, 32, 4, 1, 1),
	ROWS(GPU_MMA, GPU_MMA_CORES, 512, 64, 16, 4, 1, 1),
	DECODE(128, 16, 64, 1, 4),
	DECODE(128, 32, 64, 1, 4),
	DECODE(128, 64, 32, 4, 1),
	DECODE(256, 16, 32, 1, 2),
	DECODE(256, 32, 32, 2, 2),
	DECODE(256, 64, 16, 4, 1),
	DECODE_SHORT(64, 16, 128, 1, 4),
	DECODE(128, 16, 128, 1, 4), /* of 8 bits under queries of 16 */
	DECODE(256, 16, 64, 1, 4),
	DECODE_BYTES(128, 16, 128, 1, 4),
	DECODE_BYTES(128, 32, 64, 1, 4),
	DECODE_BYTES(128, 64, 32, 4, 1),
	DECODE_BYTES(256, 16, 64, 1, 4),
	DECODE_BYTES(256, 32, 32, 2, 2),
	DECODE_BYTES(256, 64, 32, 4, 1),
	PACK(GPU_MMA_PACK, GPU_MMA_CORES, 128, 16, 128, 1, 4, 1),
	PACK(GPU_MMA_PACK, GPU_MMA_CORES, 256, 16, 64, 1, 4, 1),
	PACK(GPU_MMA_PACK, GPU_MMA_CORES, 256, 64, 64, 4, 1, 1),
	PACK(GPU_MMA_PACK, GPU_MMA_CORES, 512, 16, 64, 1, 4, 1),
	PACK(GPU_MMA_PACK, GPU_MMA_CORES, 512, 16, 32, 1, 2, 1),
	LATENT(GPU_MMA_PACK, GPU_MMA_CORES, HALF, 64, 32, 4, 1),
	LATENT(GPU_MMA_PACK, GPU_MMA_CORES, HALF, 16, 64, 1, 4),
	LATENT(GPU_MMA_PACK, GPU_MMA_CORES, HALF, 16, 32, 1, 2),
	TILE(GPU_LATENT, CORE(WGMMA), FORWARD, HALF, RAW | WITHOUT(descale), 576, 64, 64, 4, 2, 1),
	TILE(GPU_WIDE, CORE(WGMMA), FORWARD, HALF, NO_MORE, 512, 64, 64, 4, 2, 1), /* above 256 */
	WARPGROUPS(HALF, 64, 192, 128, WITHOUT(bias) | WITHOUT(dropout)),
	WARPGROUPS(HALF, 64, 192, 96, WITHOUT(bias) | WITHOUT(dropout)), /* over keys of 8 bits */
	WARPGROUPS(HALF, 64, 192, 64, 0),
	WARPGROUPS(HALF, 96, 192, 96, RAW | WITHOUT(narrow) | WITHOUT(mask)), /* heads of 96 */
	WARPGROUPS(HALF, 192, 128, 128, WITHOUT(dropout)), /* with 128 columns of V */
	WARPGROUPS(HALF, 160, 128, 96, 0),
	WARPGROUPS(HALF, 192, 128, 64, 0),
	WARPGROUPS(HALF, 256, 128, 80, RAW),
	WARPGROUPS(HALF, 256, 128, 64, WITHOUT(dropout)), /* with a bias or a soft cap */
	WARPGROUPS(HALF, 256, 128, 32, 0),                /* with more than that */
	WARPGROUPS(E4M3, 64, 128, 192, RAW),
	WARPGROUPS(E4M3, 128, 128, 128, RAW),
	WARPGROUPS(E4M3, 192, 128, 128, RAW), /* with 128 columns of V */
	WARPGROUPS(E4M3, 192, 128, 96, RAW),
	WARPGROUPS(E4M3, 256, 128, 80, RAW),
	WARPGROUPS_PAGES(HALF, 64, 192, 128, WITHOUT(bias) | WITHOUT(dropout)),
	WARPGROUPS_PAGES(HALF, 64, 192, 96, WITHOUT(bias) | WITHOUT(dropout)),
	WARPGROUPS_PAGES(HALF, 64, 192, 64, 0),
	WARPGROUPS_PAGES(HALF, 192, 128, 128, WITHOUT(dropout)), /* with 128 columns of V */
	WARPGROUPS_PAGES(HALF, 192, 128, 64, 0),
	WARPGROUPS_PAGES(HALF, 256, 128, 80, RAW),
	WARPGROUPS_PAGES(HALF, 256, 128, 64, WITHOUT(dropout)),
	WARPGROUPS_PAGES(HALF, 256, 128, 32, 0),
	WARPGROUPS_PAGES(E4M3, 128, 128, 128, RAW),
	WARPGROUPS_PAGES(E4M3, 192, 128, 96, RAW),
	WARPGROUPS_PAGES(E4M3, 256, 128, 80, RAW),
	WARPGROUPS_SPLITS(HALF, 64, 192, 96, WITHOUT(softcap)),
	WARPGROUPS_SPLITS(HALF, 64, 192, 64, 0),
	WARPGROUPS_SPLITS(HALF, 192, 128, 128, WITHOUT(softcap)), /* with 128 columns of V */
	WARPGROUPS_SPLITS(HALF, 192, 128, 64, 0),
	WARPGROUPS_SPLITS(HALF, 256, 128, 64, WITHOUT(softcap)),
	WARPGROUPS_SPLITS(HALF, 256, 128, 32, 0),
	WARPGROUPS_SPLITS(E4M3, 128, 128, 128, WITHOUT(softcap)),
	WARPGROUPS_SPLITS(E4M3, 192, 128, 96, WITHOUT(softcap)),
	WARPGROUPS_SPLITS(E4M3, 256, 128, 64, WITHOUT(softcap)),
	STAGED(CORE(MFMA), 64, 256, 128, 8, 1, WITHOUT(dropout) | WITHOUT(bias) | WITHOUT(softcap)),
	STAGED(CORE(MFMA), 64, 128, 64, 4, 2, 0),
	STAGED(CORE(MFMA), 128, 256, 64, 8, 1, WITHOUT(dropout)),
	STAGED(CORE(MFMA), 128, 128, 32, 4, 2, 0),
	STAGED(CORE(MFMA), 256, 128, 32, 4, 1, 0),
	STAGED(CORE(WMMA12), 64, 256, 128, 16, 2, RAW),
	STAGED(WMMA_CORES, 64, 128, 64, 8, 1, 0),
	STAGED(CORE(WMMA12), 128, 256, 64, 16, 2, WITHOUT(dropout) | WITHOUT(bias)),
	STAGED(WMMA_CORES, 128, 128, 32, 8, 1, 0),
	STAGED_BYTES(CORE(MFMA), 64, 256, 128, 8, 1, 0),
	STAGED_BYTES(CORE(MFMA), 64, 128, 64, 4, 2, 0),
	STAGED_BYTES(CORE(MFMA), 128, 256, 64, 8, 1, 0),
	STAGED_BYTES(CORE(MFMA), 128, 128, 64, 4, 2, 0),
	STAGED_BYTES(CORE(MFMA), 256, 128, 64, 4, 1, WITHOUT(bias) | WITHOUT(softcap)),
	STAGED_BYTES(CORE(WMMA12), 64, 256, 128, 16, 1, WITHOUT(bias) | WITHOUT(softcap)),
	STAGED_BYTES(CORE(WMMA12), 64, 128, 64, 8, 1, 0),
	STAGED_BYTES(CORE(WMMA12), 128, 256, 64, 16, 1, 0),
	STAGED_BYTES(CORE(WMMA12), 128, 128, 64, 8, 1, 0),
	STAGED_BYTES(CORE(WMMA12), 256, 128, 32, 8, 1, 0),
	STAGED_BYTE_PAGES(CORE(MFMA), 64, 256, 128, 8, 1, 0),
	STAGED_BYTE_PAGES(CORE(MFMA), 64, 128, 64, 4, 2, 0),
	STAGED_BYTE_PAGES(CORE(MFMA), 128, 256, 64, 8, 1, 0),
	STAGED_BYTE_PAGES(CORE(MFMA), 128, 128, 64, 4, 2, 0),
	STAGED_BYTE_PAGES(CORE(WMMA12), 64, 256, 64, 16, 1, 0),
	STAGED_BYTE_PAGES(CORE(WMMA12), 64, 128, 64, 8, 1, 0),
	STAGED_BYTE_PAGES(CORE(WMMA12), 128, 256, 64, 16, 1, 0),
	STAGED_BYTE_PAGES(CORE(WMMA12), 128, 128, 64, 8, 1, 0),
	STAGED_PAGES(CORE(MFMA), 64, 256, 128, 8, 1,
		     WITHOUT(dropout) | WITHOUT(bias) | WITHOUT(softcap)),
	STAGED_PAGES(CORE(MFMA), 64, 128, 64, 4, 2, 0),
	STAGED_PAGES(CORE(MFMA), 128, 256, 64, 8, 1, WITHOUT(dropout)),
	STAGED_PAGES(CORE(MFMA), 128, 128, 32, 4, 2, 0),
	STAGED_PAGES(CORE(WMMA12), 64, 256, 128, 16, 2, RAW),
	STAGED_PAGES(WMMA_CORES, 64, 128, 64, 8, 1, 0),
	STAGED_PAGES(CORE(WMMA12), 128, 256, 64, 16, 2, WITHOUT(dropout) | WITHOUT(bias)),
	STAGED_PAGES(WMMA_CORES, 128, 128, 32, 8, 1, 0),
	AMD_DECODE(CORE(MFMA), 192, 16, 128, 0),
	AMD_DECODE(CORE(MFMA), 256, 16, 64, 0),
	AMD_DECODE(CORE(MFMA), 128, 32, 128, 0),
	AMD_DECODE(CORE(MFMA), 256, 32, 64, 0),
	AMD_DECODE(CORE(MFMA), 64, 64, 128, 0),
	AMD_DECODE(CORE(MFMA), 128, 64, 64, 0),
	AMD_DECODE(WMMA_CORES, 256, 16, 64, 0),
	AMD_DECODE(WMMA_CORES, 128, 32, 64, WITHOUT(bias)),
	AMD_DECODE(WMMA_CORES, 64, 64, 64, WITHOUT(bias)),
	AMD_DECODE_BYTES(CORE(MFMA), 256, 16, 128, 0),
	AMD_DECODE_BYTES(CORE(MFMA), 64, 32, 128, 0),
	AMD_DECODE_BYTES(CORE(WMMA12), 128, 16, 128, 0),
	AMD_DECODE_BYTES(CORE(WMMA12), 256, 16, 64, 0),
	AMD_DECODE_BYTES(CORE(WMMA12), 64, 32, 128, WITHOUT(bias)),
	AMD_DECODE_BYTES(CORE(WMMA12), 128, 32, 64, WITHOUT(bias)),
	ROWS(GPU_MFMA, CORE(MFMA), 128, 128, 64, 8, 1, 1),
	ROWS(GPU_MFMA, CORE(MFMA), 256, 64, 32, 4, 1, 1),
	PACK(GPU_MFMA_PACK, CORE(MFMA), 128, 16, 64, 1, 4, 1),
	PACK(GPU_MFMA_PACK, CORE(MFMA), 256, 16, 32, 1, 2, 1),
	ROWS(GPU_MFMA, CORE(MFMA), 512, 64, 32, 4, 1, 1),
	PACK(GPU_MFMA_PACK, CORE(MFMA), 512, 16, 32, 1, 2, 1),
	LATENT(GPU_MFMA_PACK, CORE(MFMA), HALF, 64, 16, 4, 1),
	LATENT(GPU_MFMA_PACK, CORE(MFMA), HALF, 16, 32, 1, 2),
	ROWS(GPU_WMMA, WMMA_CORES, 128, 128, 32, 8, 1, 1),
	ROWS(GPU_WMMA, WMMA_CORES, 256, 64, 16, 4, 1, 1),
	PACK(GPU_WMMA_PACK, WMMA_CORES, 128, 16, 64, 1, 4, 1),
	PACK(GPU_WMMA_PACK, WMMA_CORES, 256, 16, 32, 1, 2, 1),
	ROWS(GPU_WMMA, WMMA_CORES, 512, 32, 16, 2, 1, 1),
	PACK(GPU_WMMA_PACK, WMMA_CORES, 512, 16, 16, 1, 1, 1),
	LATENT(GPU_WMMA_PACK, WMMA_CORES, HALF, 16, 16, 1, 1),
	TILE(GPU_SCALAR, GPU_ANY_CORE, FORWARD, ALL, 0, 64, 64, 32, 4, 1, 1),
	TILE(GPU_SCALAR, GPU_ANY_CORE, FORWARD, ALL, 0, 128, 32, 32, 2, 1, 1),
	TILE(GPU_SCALAR, GPU_ANY_CORE, FORWARD, ALL, 0, 512, 16, 16, 1, 1, 1),
	TILE(GPU_SCALAR_PACK, GPU_ANY_CORE, FORWARD, ALL, WITHOUT(dropout), 128, 16, 32, 1, 2, 1),
	TILE(GPU_SCALAR_PACK, GPU_ANY_CORE, FORWARD, ALL, WITHOUT(dropout), 512, 16, 16, 1, 1, 1),
	LATENT(GPU_SCALAR_PACK, GPU_ANY_CORE, NOT_FP8, 16, 16, 1, 1),

	GRAD(GPU_MMA, GPU_MMA_CORES, 64, 32, 128, 4, 1, 2),
	GRAD(GPU_MMA, GPU_MMA_CORES, 64, 64, 128, 8, 1, 1),
	GRAD(GPU_MMA, GPU_MMA_CORES, 128, 64, 64, 4, 1, 2),
	GRAD(GPU_MMA, GPU_MMA_CORES, 128, 64, 128, 8, 1, 1),
	GRAD(GPU_MMA, GPU_MMA_CORES, 128, 32, 64, 4, 1, 1),
	GRAD(GPU_MMA, GPU_MMA_CORES, 512, 32, 64, 4, 1, 1), /* above 256 in parts */
	GRAD_WARPGROUPS(64, 128, 128, WITHOUT(bias) | WITHOUT(dropout) | WITHOUT(softcap)),
	GRAD_WARPGROUPS(128, 64, 128, 0),
	GRAD_ROLES(192, 64, 96),
	GRAD_WARPGROUPS(256, 64, 64, WITHOUT(dropout) | WITHOUT(softcap)),
	STAGED_GRAD(CORE(MFMA), 64, 32, 128, 4, 2, 0),
	STAGED_GRAD(CORE(MFMA), 128, 32, 128, 4, 1, 0),
	STAGED_GRAD(WMMA_CORES, 64, 32, 128, 8, 1, 0),
	STAGED_GRAD(CORE(WMMA11), 128, 16, 64, 4, 1, 0),
	STAGED_GRAD(CORE(WMMA12), 128, 16, 128, 8, 1, 0),
	GRAD(GPU_MFMA, CORE(MFMA), 128, 32, 64, 4, 1, 1),
	GRAD(GPU_MFMA, CORE(MFMA), 256, 16, 64, 4, 1, 1),
	GRAD(GPU_MFMA, CORE(MFMA), 512, 32, 64, 4, 1, 1),
	GRAD(GPU_WMMA, WMMA_CORES, 64, 32, 64, 4, 1, 1),
	GRAD(GPU_WMMA, WMMA_CORES, 128, 16, 64, 4, 1, 1),
	GRAD(GPU_WMMA, WMMA_CORES, 256, 16, 16, 1, 1, 1),
	GRAD(GPU_WMMA, WMMA_CORES, 512, 16, 64, 4, 1, 1),
	TILE(GPU_SCALAR, GPU_ANY_CORE, SPEC_BIT(SPEC_BWD_DQ_DK_DV), NOT_FP8, 0, 64, 32, 32, 2, 1,
	     1),
	TILE(GPU_SCALAR, GPU_ANY_CORE, SPEC_BIT(SPEC_BWD_DQ_DK_DV), NOT_FP8, 0, 128, 16, 32, 2, 1,
	     1),
	TILE(GPU_SCALAR, GPU_ANY_CORE, SPEC_BIT(SPEC_BWD_DQ_DK_DV), NOT_FP8, 0, 512, 16, 16, 1, 1,
	     1),

	SMALL(GPU_COMBINE, SPEC_FWD_SPLITKV_COMBINE, NOT_FP8, 16,
	      1),                                               /* the data type is that of O */
	SMALL(GPU_APPEND, SPEC_FWD_APPENDKV, ALL | INT8, 4, 7), /* 72 registers */
	SMALL(GPU_DOT, SPEC_BWD_DOT_DO_O, NOT_FP8, 4, 1),
	SMALL(GPU_CONVERT, SPEC_BWD_CONVERT_DQ, NOT_FP8, 4, 1),
};

static const struct spec_head_dims head_dims[] = {{32, 32},   {64, 64},   {96, 96},   {128, 128},
						  {160, 160}, {192, 128}, {192, 192}, {256, 256},
						  {384, 384}, {512, 512}, {576, 512}};

#define FLAGS(pipeline, pack)                                                                      \
	((pack ? SPEC_PACKS_HEADS : 0) |                                                           \
	 (pack && pipeline < GPU_WGMMA ? SPEC_CHOSEN | SPEC_LATENT_FP8 : 0) |                      \
	 (pipeline == GPU_LATENT ? SPEC_LATENTS_ONLY | SPEC_CHOSEN | SPEC_LATENT_FP8 : 0) |        \
	 (pipeline <= GPU_SCALAR_PACK ? SPEC_NO_MATRIX : 0) |                                      \
	 (pipeline == GPU_WGMMA || pipeline == GPU_LATENT || pipeline == GPU_WIDE                  \
		  ? SPEC_WARPGROUPS                                                                \
		  : 0) |                                                                           \
	 (pipeline == GPU_WGMMA || pipeline == GPU_AMD ? SPEC_WIDENED : 0) |                       \
	 (pipeline == GPU_WGMMA ? SPEC_UNSPLIT : 0) |                                              \
	 (pipeline == GPU_DECODE ? SPEC_STREAMS : 0) |                                             \
	 (pipeline == GPU_AMD || pipeline == GPU_AMD_DECODE ? SPEC_STAGED : 0) |                   \
	 (pipeline <= GPU_WGMMA ? SPEC_MASK_DATA : 0) |                                            \
	 (pipeline < GPU_WGMMA || pipeline == GPU_LATENT || pipeline == GPU_AMD ||                 \
			  pipeline == GPU_AMD_DECODE || pipeline == GPU_APPEND                     \
		  ? SPEC_V_IN_K                                                                    \
		  : 0) |                                                                           \
	 (pipeline < GPU_WGMMA || pipeline == GPU_AMD ? SPEC_SPLITS_DQ : 0) | SPEC_WRITES_DQ)

static struct gpu_tile tile_of(int pipeline, const struct kernel_spec *spec)
{
	const struct kernel_tile *t = &spec->tile;

	return (struct gpu_tile){.pipeline = pipeline,
				 .tile_m = t->tile_m0,
				 .tile_n = t->tile_n0,
				 .hdim_q = t->tile_k0max,
				 .hdim_v = t->tile_n1,
				 .waves_m = t->wave_m0,
				 .waves_n = t->wave_n0,
				 .blocks_per_cu = spec->block_per_cu};
}

/* bwd_wgmma.h's */
static void dq_tile(const struct kernel_spec *spec, int32_t *ret_rows, int32_t *ret_floats)
{
	if (spec->signature.family != SPEC_BWD_DQ_DK_DV)
		return;
	*ret_rows = spec->tile.tile_m0;
	*ret_floats = lds_dq_tile(spec->tile.tile_m0, spec->tile.tile_k0max,
				  spec->signature.logits || spec->signature.dropout);
}

static int32_t kv_parts(const struct kernel_spec *spec, uint32_t units,
			const struct abi_bwd_args *args, double ret_us[2])
{
	const struct gpu_tile tile = tile_of(GPU_WGMMA, spec);

	return gpu_kernel_parts(&tile, units, args, ret_us);
}

static int32_t order_words(const struct kernel_spec *spec, const struct abi_bwd_args *args)
{
	const struct gpu_tile tile = tile_of(GPU_WGMMA, spec);

	return gpu_kernel_order_words(&tile, args);
}

#define PIPELINE(id, name, cores, pack, folder, loop)                                              \
	{#name, FLAGS(id, pack), (id) == GPU_WGMMA ? dq_tile : NULL,                               \
	 (id) == GPU_WGMMA ? kv_parts : NULL, (id) == GPU_WGMMA ? order_words : NULL},
static const struct spec_pipeline pipelines[] = {GPU_PIPELINES(PIPELINE)};

#define ARCH(name, vendor, family, core, wave, lds, units, gbs)                                    \
	{#name,      #vendor, #family, CORE(core) | CORE(SCALAR),                                  \
	 ALL | INT8, wave,    units,   (lds)*1024,                                                 \
	 16,         16,      16,      gbs},
static const struct spec_backend_arch archs[] = {GPU_ARCHS(ARCH)};

static const struct gpu_arch *gpu_arch_of(const struct spec_backend_arch *arch)
{
	return &gpu_archs[arch - archs]; /* both are made of one list */
}

/* ---- from a spec to a kernel ---- */

static int is_small(const struct kernel_spec *spec)
{
	return !(TRAITS_SCORES >> spec->signature.family & 1);
}

/* The number of a pipeline in this file; it may be another backend's, or nobody's. */
static int own_pipeline(const char *word)
{
	int i = 0;

	while (i < GPU_N_PIPELINES && strcmp(gpu_pipelines[i].name, word) != 0)
		i++;
	return i;
}

const char *gpu_kernel_of_spec(const char *arch_name, const char *pipeline,
			       const struct kernel_spec *spec, const struct traits *traits,
			       struct gpu_kernel *ret_kernel)
{
	const struct gpu_arch *arch = gpu_arch_find(arch_name);
	struct gpu_tile tile = tile_of(own_pipeline(pipeline), spec);

	return arch ? gpu_kernel_make(arch, (enum abi_family)traits->op, traits, &tile, ret_kernel)
		    : "is of no arch that there is code for";
}

/* ---- tiles ---- */

static void cut(const struct spec_backend_arch *arch, const struct spec_row *row,
		struct kernel_spec *spec)
{
	int is_backward = spec->signature.family == SPEC_BWD_DQ_DK_DV, small = is_small(spec);
	uint16_t hdim_q = small ? 32 : spec->signature.hdim_q;
	uint16_t hdim_v = small ? 32 : spec->signature.hdim_v;
	struct kernel_tile *t = &spec->tile;

	t->tile_m0 = row->tile_m;
	t->tile_n0 = row->tile_n;
	t->tile_k0 = t->tile_k0max = hdim_q;
	t->tile_n1 = hdim_v;
	t->tile_k1 = small ? 32 : is_backward ? row->tile_m : row->tile_n;
	t->tile_bwd6 = is_backward ? row->tile_n : 0;
	t->tile_bwd7 = is_backward ? hdim_q : 0;
	t->tile_bwd8 = is_backward ? hdim_v : 0;
	t->wave_m0 = t->wave_m1 = row->waves_m;
	t->wave_n0 = t->wave_n1 = row->waves_n;
	t->warp_m0 = t->warp_m1 = arch->warp_m;
	t->warp_n0 = t->warp_n1 = arch->warp_n;
	t->warp_k0 = t->warp_k1 = arch->warp_k;
	spec->block_per_cu = row->blocks_per_cu;
}

static const char *misfit(const struct spec_backend_arch *arch, int pipeline,
			  const struct kernel_spec *spec, const struct traits *traits,
			  enum spec_field *ret_field)
{
	struct gpu_tile tile = tile_of(pipeline, spec);
	/* Those of any head dims have the largest of all as both. */
	int32_t most_v = is_small(spec) ? GPU_MOST_HDIM_Q : GPU_MOST_HDIM_V;

	*ret_field = SPEC_FIELD_hdim_q;
	if (!gpu_pads_to(spec->signature.hdim_q, GPU_MOST_HDIM_Q))
		return "not a multiple of 32 up to 256, or of 64 up to 576";
	*ret_field = SPEC_FIELD_hdim_v;
	if (!gpu_pads_to(spec->signature.hdim_v, most_v))
		return "not a multiple of 32 up to 256, or of 64 up to 512";
	*ret_field = SPEC_FIELD_tile_m0;
	return gpu_tile_misfit(gpu_arch_of(arch), (enum abi_family)traits->op, traits, &tile);
}

const struct spec_backend gpu_backend = {
	.name = "gpu",
	.pipelines = pipelines,
	.n_pipelines = COUNT(pipelines),
	.archs = archs,
	.n_archs = COUNT(archs),
	.rows = kernels,
	.n_rows = COUNT(kernels),
	.head_dims = head_dims,
	.n_head_dims = COUNT(head_dims),
	.compiled = ~0u,
	.cut = cut,
	.misfit = misfit,
};
