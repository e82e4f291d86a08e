/* SPDX-License-Identifier: MIT */
/*
 * cpu_catalogue.c: the CPU kernels as rows. They are compiled once a level and take every feature
 * at run time; smaller head dims run in the next larger pair without loss.
 */
#include <catalogue/cpu_catalogue.h>

#include "cpu/tile.h"

#define COUNT(x)       (sizeof(x) / sizeof((x)[0]))
#define WITHOUT(trait) TRAIT_BIT(trait)
#define FORWARD        TRAITS_FORWARD
#define NOT_FP8        (SPEC_BIT(SPEC_FP32) | SPEC_BIT(SPEC_FP16) | SPEC_BIT(SPEC_BF16))
#define ALL            (NOT_FP8 | SPEC_BIT(SPEC_FP8) | SPEC_BIT(SPEC_BF8))
#define INT8           SPEC_BIT(SPEC_INT8) /* of caches under queries of 16 bits, and so of rows for them */
#define MOST           UINT16_MAX

/* What a level multiplies with; and whether all sources are compiled for it, or only those that
 * multiply bfloat16 natively: see CMakeLists.txt. */
enum { VECTORS = 1, TILES = 2, ANY_LEVEL = VECTORS | TILES, WHOLE = 4 };
enum { FLASH, ROWS, TILE, DECODE, LATENT, N_PIPELINES };

static const struct spec_pipeline pipelines[N_PIPELINES] = {
	[FLASH] = {"cpu_flash", SPEC_IN_MEMORY | SPEC_PACKS_KEYS | SPEC_MASK_DATA | SPEC_V_IN_K,
		   NULL, NULL, NULL},
	[ROWS] = {"cpu_rows", SPEC_IN_MEMORY | SPEC_V_IN_K, NULL, NULL, NULL},
	[TILE] = {"cpu_tile", SPEC_IN_MEMORY | SPEC_MASK_DATA, NULL, NULL, NULL},
	[DECODE] = {"cpu_decode", SPEC_IN_MEMORY | SPEC_V_IN_K, NULL, NULL, NULL},
	[LATENT] = {"cpu_latent",
		    SPEC_IN_MEMORY | SPEC_V_IN_K | SPEC_CHOSEN | SPEC_LATENT_FP8 |
			    SPEC_LATENTS_ONLY,
		    NULL, NULL, NULL},
};

/* warp_m x warp_n x warp_k: the matrix multiply's register tile and the steps of an instruction. */
static const struct spec_backend_arch archs[] = {
	{"portable", "cpu", "c", VECTORS | WHOLE, ALL | INT8, 1, 8, 0, 6, 8, 1, 0},
	{"x86_64_v3", "cpu", "avx2", VECTORS | WHOLE, ALL | INT8, 1, 8, 0, 6, 16, 1, 0},
	{"x86_64_v4", "cpu", "avx512", VECTORS | WHOLE, ALL | INT8, 1, 8, 0, 12, 32, 1, 0},
	{"x86_64_v4_bf16", "cpu", "avx512_bf16", VECTORS, SPEC_BIT(SPEC_BF16), 1, 8, 0, 12, 32, 2,
	 0},
	{"x86_64_amx", "cpu", "amx", TILES, SPEC_BIT(SPEC_BF16), 1, 8, 0, 16, 16, 32, 0},
};

static const struct spec_row kernels[] = {
	/* flash.c: rows by blocks of keys */
	{FLASH, FORWARD, VECTORS, ALL, MOST, CPU_FLASH_ROWS, CPU_FLASH_KEYS, 1, 1, -1, 0},
	{FLASH, FORWARD, VECTORS, ALL, MOST, CPU_FLASH_FEW_ROWS, CPU_FLASH_KEYS, 1, 1, -1, 0},
	{FLASH, FORWARD, TILES, ALL, MOST, CPU_FLASH_ROWS, CPU_FLASH_TILE_KEYS, 1, 1, -1, 0},
	/* decode.c: the rows of a key head at once, chunks of keys, nothing packed */
	{DECODE, FORWARD, ANY_LEVEL, ALL, MOST, CPU_DECODE_ROWS, CPU_DECODE_KEYS, 1, 1, -1,
	 WITHOUT(dropout)},
	/* latent.c: the rows of a key head by blocks of keys, read once for all of them */
	{LATENT, FORWARD, ANY_LEVEL, ALL, MOST, CPU_LATENT_ROWS, CPU_LATENT_KEYS, 1, 1, -1,
	 WITHOUT(dropout)},
	/* bwd_tile.c: rows by keys, fewer of long heads; stage 2 accumulates dQ */
	{TILE, SPEC_BIT(SPEC_BWD_DQ_DK_DV), ANY_LEVEL, NOT_FP8, MOST, CPU_BACKWARD_ROWS,
	 CPU_BACKWARD_KEYS, 1, 1, -1, 0},
	/* row kernels: a task is some rows of one head, whole */
	{ROWS, SPEC_BIT(SPEC_FWD_SPLITKV_COMBINE), WHOLE, NOT_FP8, MOST, CPU_ROWS, 0, 1, 1, -1, 0},
	{ROWS, SPEC_BIT(SPEC_FWD_APPENDKV), WHOLE, ALL | INT8, MOST, CPU_ROWS, 0, 1, 1, -1, 0},
	{ROWS, SPEC_BIT(SPEC_BWD_DOT_DO_O), WHOLE, NOT_FP8, MOST, CPU_BACKWARD_TASK, 0, 1, 1, -1,
	 0},
	{ROWS, SPEC_BIT(SPEC_BWD_CONVERT_DQ), WHOLE, NOT_FP8, MOST, CPU_BACKWARD_TASK, 0, 1, 1, -1,
	 0},
};

#define HEAD_DIMS(q, v) {q, v},
static const struct spec_head_dims head_dims[] = {CPU_HEAD_DIMS(HEAD_DIMS)};

static uint16_t keys_of(const struct spec_row *row, const struct kernel_signature *s)
{
	if (row->pipeline == FLASH)
		return (uint16_t)cpu_flash_keys(s->hdim_q, s->hdim_v, row->tile_n);
	if (row->pipeline == TILE)
		return (uint16_t)cpu_backward_keys(s->hdim_q, s->hdim_v);
	return row->pipeline == ROWS ? s->hdim_v : row->tile_n;
}

static void cut_backward(const struct spec_row *row, const struct spec_backend_arch *arch,
			 struct kernel_spec *spec)
{
	struct kernel_tile *t = &spec->tile;

	t->tile_k1 = row->tile_m;
	t->tile_bwd6 = t->tile_n0;
	t->tile_bwd7 = spec->signature.hdim_q;
	t->tile_bwd8 = spec->signature.hdim_v;
	t->warp_m2 = arch->warp_m;
	t->warp_n2 = arch->warp_n;
	t->warp_k2 = arch->warp_k;
}

/* Rows that are multiplied one by one have no register tile. */
static void cut(const struct spec_backend_arch *arch, const struct spec_row *row,
		struct kernel_spec *spec)
{
	int by_rows = row->pipeline == ROWS || row->pipeline == DECODE || row->pipeline == LATENT;
	struct kernel_tile *t = &spec->tile;

	t->tile_m0 = row->tile_m;
	t->tile_n0 = keys_of(row, &spec->signature);
	t->tile_k0 = t->tile_k0max = spec->signature.hdim_q;
	t->tile_n1 = spec->signature.hdim_v;
	t->tile_k1 = t->tile_n0;
	t->wave_m0 = t->wave_m1 = row->waves_m;
	t->warp_m0 = t->warp_m1 = by_rows ? 1 : arch->warp_m;
	t->warp_n0 = t->warp_n1 = arch->warp_n;
	t->warp_k0 = t->warp_k1 = by_rows ? 1 : arch->warp_k;
	spec->block_per_cu = row->blocks_per_cu;
	if (row->pipeline == TILE)
		cut_backward(row, arch, spec);
}

static const char *misfit(const struct spec_backend_arch *arch, int pipeline,
			  const struct kernel_spec *spec, const struct traits *traits,
			  enum spec_field *ret_field)
{
	(void)arch;
	(void)pipeline;
	(void)traits;
	*ret_field = SPEC_FIELD_hdim_q;
	if (spec->signature.hdim_q % 8 || spec->signature.hdim_q > CPU_MAX_HDIM_Q ||
	    !spec->signature.hdim_q)
		return "not a multiple of 8 up to 576";
	*ret_field = SPEC_FIELD_hdim_v;
	if (spec->signature.hdim_v % 8 || spec->signature.hdim_v > CPU_MAX_HDIM_Q ||
	    !spec->signature.hdim_v)
		return "not a multiple of 8 up to 576";
	return NULL;
}

const struct spec_backend cpu_backend = {
	.name = "cpu",
	.pipelines = pipelines,
	.n_pipelines = COUNT(pipelines),
	.archs = archs,
	.n_archs = COUNT(archs),
	.rows = kernels,
	.n_rows = COUNT(kernels),
	.head_dims = head_dims,
	.n_head_dims = COUNT(head_dims),
	.cut = cut,
	.misfit = misfit,
};
