/* SPDX-License-Identifier: MIT */
/*
 * gpu_kernel.c: the options that a kernel is compiled with. How much LDS one needs, lds.h says to
 * both sides.
 */
#include <kernels/gpu_kernel.h>

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "gpu_arch.h"
#include "core/grid.h"
#include "core/lds.h"
#include "general/prepare.h"

#define BIT(n) (1u << (n))

#define ARCH(name, vendor, family, core, wave, lds, units, gbs)                                    \
	{#name, GPU_CORE_##core, wave, lds * 1024},
const struct gpu_arch gpu_archs[] = {GPU_ARCHS(ARCH)};
#undef ARCH
const size_t gpu_n_archs = sizeof(gpu_archs) / sizeof(gpu_archs[0]);

#define PIPELINE(id, name, cores, pack, folder, loop) [id] = {#name, cores, pack, folder, loop},
const struct gpu_pipeline_info gpu_pipelines[GPU_N_PIPELINES] = {GPU_PIPELINES(PIPELINE)};
#undef PIPELINE

const struct gpu_arch *gpu_arch_find(const char *name)
{
	for (size_t i = 0; i < gpu_n_archs; i++)
		if (strcmp(gpu_archs[i].name, name) == 0)
			return &gpu_archs[i];
	return NULL;
}

int gpu_pads_to(int32_t hdim, int32_t most)
{
	return hdim > 0 && hdim <= most && hdim % (lds_part(hdim) < hdim ? 64 : 32) == 0;
}

static int32_t max32(int32_t a, int32_t b)
{
	return a > b ? a : b;
}

/* The core that a pipeline of tiles uses there. */
static enum gpu_core core_of(const struct gpu_arch *arch, const struct gpu_tile *t)
{
	if (t->pipeline == GPU_SCALAR || t->pipeline == GPU_SCALAR_PACK)
		return GPU_CORE_SCALAR;
	return arch->core == GPU_CORE_WGMMA ? GPU_CORE_MMA : arch->core;
}

/* The pipeline of a family that goes row by row. */
static enum gpu_pipeline rows_pipeline(enum abi_family family)
{
	switch (family) {
	case ABI_FWD_SPLITKV_COMBINE:
		return GPU_COMBINE;
	case ABI_FWD_APPENDKV:
		return GPU_APPEND;
	case ABI_BWD_DOT_DO_O:
		return GPU_DOT;
	default:
		return GPU_CONVERT;
	}
}

static int is_forward(enum abi_family family)
{
	return TRAITS_FORWARD >> family & 1;
}

_Static_assert(GPU_CORE_SCALAR == FMHA_CORE_SCALAR && GPU_CORE_MMA == FMHA_CORE_MMA &&
		       GPU_CORE_MFMA == FMHA_CORE_MFMA && GPU_CORE_WMMA11 == FMHA_CORE_WMMA11 &&
		       GPU_CORE_WMMA12 == FMHA_CORE_WMMA12,
	       "cores have one number");

static struct lds_cut cut_of(const struct gpu_arch *arch, const struct gpu_tile *t)
{
	return (struct lds_cut){.core = core_of(arch, t),
				.wave = arch->wave,
				.tile_m = t->tile_m,
				.tile_n = t->tile_n,
				.hdim_q = t->hdim_q,
				.hdim_v = t->hdim_v,
				.waves_m = t->waves_m,
				.waves_n = t->waves_n};
}

static int is_parked(const struct gpu_arch *arch, const struct gpu_tile *t)
{
	return lds_is_parked(cut_of(arch, t), t->blocks_per_cu);
}

/* Of what the loops that are made for an arch have in LDS: of Q, and of K and V. */
static int element_bytes(const struct traits *traits)
{
	return traits->dtype == ABI_E4M3 ? 1 : 2;
}
static int key_bytes(const struct traits *traits)
{
	return traits->narrow ? 1 : element_bytes(traits);
}

/* Keys of 8 bits, each with its factors beside it: other loops have those that a head has one of,
 * or find each by itself. */
static int decodes_by_key(const struct traits *traits)
{
	return traits->by_key && key_bytes(traits) == 1;
}

/* Of decode's ring; 0: there is no room. A unit's LDS is shared by its blocks, each of which costs
 * some more. */
static int decode_stages(const struct gpu_arch *arch, const struct traits *traits,
			 const struct gpu_tile *t)
{
	int blocks = max32(t->blocks_per_cu, 1);

	return lds_decode_stages(cut_of(arch, t),
				 (int)arch->lds_bytes / blocks - (blocks - 1) * 1024,
				 key_bytes(traits), traits->narrow != 0, decodes_by_key(traits));
}

static int32_t forward_lds(const struct gpu_arch *arch, const struct traits *traits,
			   const struct gpu_tile *t)
{
	const struct lds_wgmma_cut cut = {cut_of(arch, t),        element_bytes(traits),
					  key_bytes(traits),      traits->bias == 1,
					  traits->mask_data != 0, traits->op == ABI_FWD_SPLITKV};

	if (t->pipeline == GPU_DECODE)
		return lds_decode(cut_of(arch, t), decode_stages(arch, traits, t),
				  key_bytes(traits), traits->narrow != 0, decodes_by_key(traits));
	if (t->pipeline == GPU_WGMMA)
		return lds_wgmma(cut, (int)arch->lds_bytes);
	if (t->pipeline == GPU_LATENT)
		return lds_latent(cut_of(arch, t));
	if (t->pipeline == GPU_WIDE)
		return lds_wide(cut_of(arch, t));
	if (t->pipeline == GPU_AMD)
		return lds_amd(cut_of(arch, t), element_bytes(traits));
	if (t->pipeline == GPU_AMD_DECODE)
		return lds_amd_decode(cut_of(arch, t), element_bytes(traits));
	return lds_forward(cut_of(arch, t), is_parked(arch, t));
}

static int32_t backward_lds(const struct gpu_arch *arch, const struct gpu_tile *t, int buffers)
{
	if (t->pipeline == GPU_AMD)
		return lds_amd_backward(cut_of(arch, t));
	return lds_backward(cut_of(arch, t), buffers, (int)arch->lds_bytes);
}

__attribute__((format(printf, 2, 3))) static void add_option(struct gpu_kernel *k,
							     const char *format, ...)
{
	va_list list;

	va_start(list, format);
	if (k->build.n_options < BUILD_OPTIONS)
		(void)vsnprintf(k->build.options[k->build.n_options++], BUILD_WORD_BYTES, format,
				list);
	va_end(list);
}

/* prelude.h: wait_for_stage_before(). */
static int can_wait(const char *arch)
{
	int number;

	return sscanf(arch, "sm_%d", &number) == 1 && number >= 90;
}

/* Two warpgroups with half of O's columns each, and one that loads: hopper/fwd_halves.h. */
static int has_halves(int pipeline)
{
	return pipeline == GPU_LATENT || pipeline == GPU_WIDE;
}

/* Whose kernels do so before they read anything but their arguments. */
static int waits(enum abi_family family, int pipeline)
{
	return family == ABI_FWD_SPLITKV_COMBINE ||
	       (is_forward(family) &&
		(pipeline == GPU_WGMMA || pipeline == GPU_DECODE || has_halves(pipeline)));
}

/* What all kernels with tiles share. */
static const char *begin_kernel(const struct gpu_arch *arch, enum abi_family family,
				const struct traits *traits, const struct gpu_tile *tile,
				struct gpu_kernel *k)
{
	static const char *const entries[] = {ABI_FAMILIES(ABI_FAMILY_WORD)};
	static const char *const dtypes[] = {ABI_DTYPES(ABI_WORD)};
	const uint32_t dtype = traits->dtype;
	int32_t threads = tile->waves_m * tile->waves_n * arch->wave;

	if (tile->pipeline == GPU_WGMMA)
		threads += 128 *
			   lds_wgmma_loaders(traits->narrow != 0, tile->waves_m, tile->hdim_v);
	if (has_halves(tile->pipeline))
		threads += 128; /* the warpgroup that loads */
	/* Integers are what a cache holds, and append alone has nothing else. */
	if (dtype > ABI_E5M2 && !(dtype == ABI_I8 && family == ABI_FWD_APPENDKV))
		return "no kernel computes in this type";
	if (threads <= 0 || threads > 1024)
		return "too many waves, or none";
	*k = (struct gpu_kernel){
		.family = family, .dtype = dtype, .tile = *tile, .block = {threads, 1, 1}};
	/* AMD's queues count threads, in 32 bits. */
	k->most_x = strncmp(arch->name, "gfx", 3) == 0 ? UINT32_MAX / threads : INT32_MAX;
	k->overlaps = can_wait(arch->name) && waits(family, tile->pipeline);
	snprintf(k->build.arch, sizeof(k->build.arch), "%s", arch->name);
	snprintf(k->build.source, sizeof(k->build.source), "fmha.hip");
	snprintf(k->entry, sizeof(k->entry), "fmha_%s", entries[family]);
	snprintf(k->build.name, sizeof(k->build.name), "%s_%s_%s_%s_h%dx%d_t%dx%d_w%dx%d_b%d",
		 k->entry, dtypes[dtype], arch->name, gpu_pipelines[tile->pipeline].name,
		 tile->hdim_q, tile->hdim_v, tile->tile_m, tile->tile_n, tile->waves_m,
		 tile->waves_n, tile->blocks_per_cu);
	add_option(k, "-DFMHA_FAMILY=%d", family);
	add_option(k, "-DFMHA_ENTRY=%s", k->entry);
	add_option(k, "-DFMHA_LOOP=%s/%s%s", gpu_pipelines[tile->pipeline].folder,
		   family == ABI_BWD_DQ_DK_DV ? "bwd" : "fwd", gpu_pipelines[tile->pipeline].loop);
	add_option(k, "-DFMHA_CORE=%d",
		   TRAITS_SCORES >> family & 1 ? core_of(arch, tile) : GPU_CORE_SCALAR);
	add_option(k, "-DFMHA_DTYPE=%u", dtype);
	add_option(k, "-DFMHA_HDIM_Q=%d", tile->hdim_q);
	add_option(k, "-DFMHA_HDIM_V=%d", tile->hdim_v);
	add_option(k, "-DFMHA_TILE_M=%d", tile->tile_m);
	add_option(k, "-DFMHA_TILE_N=%d", tile->tile_n);
	add_option(k, "-DFMHA_WAVES_M=%d", tile->waves_m);
	add_option(k, "-DFMHA_WAVES_N=%d", tile->waves_n);
	add_option(k, "-DFMHA_BLOCKS_PER_CU=%d", tile->blocks_per_cu > 0 ? tile->blocks_per_cu : 1);
	return NULL;
}

struct features {
#define FEATURE(name, NAME, word, kind, families, asked) int name;
	FMHA_FEATURES(FEATURE)
#undef FEATURE
};

/* Those that are traits and variants: the family's. */
static struct features features_of(enum abi_family family, const struct traits *traits)
{
	struct features f = {0};

#define TRAIT(name, NAME, word, kind, families, asked)                                             \
	f.name = (families) >> family & 1 ? traits->name : 0;
	FMHA_TRAITS(TRAIT)
	FMHA_VARIANTS(TRAIT)
#undef TRAIT
	return f;
}

/* Of a tile, with begin_kernel() and finish_kernel(). */
#define TILE_OPTIONS 15
/* One that has no room would leave every kernel without code. */
_Static_assert(TILE_OPTIONS + sizeof(struct features) / sizeof(int) < BUILD_OPTIONS,
	       "a build has room for all options");

/* A feature: an option, and a word in the name when it is on. */
static void add_feature(struct gpu_kernel *k, const char *option, const char *word, int value)
{
	char *name = k->build.name;
	size_t n = strlen(name);

	add_option(k, "-DFMHA_%s=%d", option, value);
	if (value && n < BUILD_NAME_BYTES)
		(void)snprintf(name + n, BUILD_NAME_BYTES - n, value > 1 ? "_%s%d" : "_%s", word,
			       value);
}

static void add_features(struct gpu_kernel *k, struct features f)
{
	k->split_dkdv = f.split_dkdv;
	k->dbias_sum = f.dbias_sum;
	k->shares = f.shares;
	k->wide = f.wide;
	k->paired = f.paired;
	k->by_key = f.by_key;
#define FEATURE(name, NAME, word, kind, families, asked) add_feature(k, #NAME, word, f.name);
	FMHA_FEATURES(FEATURE)
#undef FEATURE
}

static const char *finish_kernel(const struct gpu_arch *arch, struct gpu_kernel *k,
				 int32_t lds_bytes)
{
	if (!k->dq_tile_n) {
		add_option(k, "-DFMHA_DQ_TILE_M=16");
		add_option(k, "-DFMHA_DQ_TILE_N=16");
	}
	if (lds_bytes < 0 || (uint32_t)lds_bytes > arch->lds_bytes)
		return "does not fit in the LDS of the arch";
	k->lds_bytes = lds_bytes;
	add_option(k, "-DFMHA_LDS_BYTES=%d", lds_bytes);
	return k->build.n_options >= BUILD_OPTIONS ? "more options than a build has room for"
						   : NULL;
}

/* Keys of a tile for which two warpgroups have registers, with 16-bit heads of more than 160; 0:
 * whatever a tile has. */
static int wide_keys(const struct traits *traits, const struct gpu_tile *t)
{
	int both = traits->bias && traits->softcap, alibi = traits->bias == 2;
	int capped_by_head = traits->softcap && traits->descale && !traits->narrow;

	if (t->hdim_v <= 128)
		return capped_by_head ? 64 : 0;
	if (t->hdim_v <= 192)
		return both || (alibi && traits->dropout) || capped_by_head ? 32 : 0;
	if (traits->narrow)
		return 64;
	if (traits->op == ABI_FWD_SPLITKV)
		return traits->softcap ? 32 : 64;
	if (both || alibi || traits->dropout || capped_by_head)
		return 32;
	return traits->bias || traits->softcap || traits->mask_data ? 64 : 80;
}

/* With heads of up to 96 three warpgroups have registers for 96 keys, of bare scores. */
static int is_bare_96(const struct traits *traits, const struct gpu_tile *t)
{
	return traits->op == ABI_FWD && traits->dtype <= ABI_BF16 && t->waves_m == 12 &&
	       t->tile_n == 96 && t->hdim_q > 64 && t->hdim_q <= 96 && t->hdim_v > 64 &&
	       t->hdim_v <= 96 && !traits->narrow && !traits->mask && !traits->bias &&
	       !traits->softcap && !traits->dropout && !traits->mask_data;
}

/* Two or three warpgroups, whose registers are known, and one that loads. */
static const char *warpgroups_misfit(const struct traits *traits, const struct gpu_tile *t)
{
	int three = t->hdim_v <= 64 && traits->dtype <= ABI_BF16;
	int keys = traits->dtype <= ABI_BF16 && t->hdim_q > 160 ? wide_keys(traits, t) : 0;

	if (t->waves_n != 1 || t->tile_m != 16 * t->waves_m ||
	    (t->waves_m != 8 && t->waves_m != 12))
		return "a warpgroup owns 64 rows, and there are two or three";
	if (t->tile_n > 256)
		return "a product has at most 256 columns";
	if ((t->waves_m == 12) != three && !is_bare_96(traits, t))
		return "16-bit heads up to 64, and bare ones up to 96, leave registers for three "
		       "warpgroups";
	if (three && t->tile_n > 64 && traits->mask_data)
		return "three warpgroups have registers for 64 keys under a mask that is data";
	if (three && t->tile_n > 64 &&
	    t->tile_n != (traits->narrow || traits->op == ABI_FWD_SPLITKV ? 96 : 128))
		return "three warpgroups have registers for 128 keys, or 96 that others widen or "
		       "of "
		       "splits";
	if (keys && t->tile_n != keys)
		return "its scores and O do not fit into the registers";
	if (t->tile_n < 64 && t->tile_n != keys)
		return "as few keys are for what leaves no registers for more";
	return NULL;
}

/* Two warpgroups have half of the values' columns each, which fill their registers. */
static const char *halves_misfit(const struct gpu_tile *t)
{
	return t->tile_m != 64 || t->tile_n != 64 || t->waves_m != 4 || t->waves_n != 2
		       ? "two warpgroups share 64 rows and 64 keys"
		       : NULL;
}

static const char *latent_misfit(const struct traits *traits, const struct gpu_tile *t)
{
	if (traits->narrow > 1)
		return "latents of 8 bits are of e4m3";
	if (t->hdim_q != GPU_MOST_HDIM_Q || t->hdim_v != GPU_MOST_HDIM_V)
		return "latents have 576 elements, of which 512 are values";
	return halves_misfit(t);
}

/* Heads of whole slabs, of which each warpgroup has as many. */
static const char *wide_misfit(const struct gpu_tile *t)
{
	if (t->hdim_q != t->hdim_v || t->hdim_v <= 256 || t->hdim_v % 128)
		return "heads above 256 that are alike, in pairs of 64 columns";
	return halves_misfit(t);
}

/* A wave owns as many rows as an accumulator has columns, and operands come by whole accumulators. */
static const char *amd_misfit(const struct gpu_arch *arch, const struct gpu_tile *t, int32_t owned,
			      int32_t streamed)
{
	int32_t side = arch->core == GPU_CORE_MFMA ? 32 : 16;

	if (t->waves_n != 1 || owned != side * t->waves_m)
		return "a wave owns 32 rows on CDNA, 16 on RDNA";
	return streamed % side ? "what is streamed comes in accumulators" : NULL;
}

/* Values of e4m3 that AMD's loop multiplies at once (slab.h); 0: the arch has no instructions for
 * it. */
static int32_t bytes_at_once(const struct gpu_arch *arch)
{
	if (strcmp(arch->name, "gfx950") == 0)
		return 64;
	return arch->core == GPU_CORE_WMMA12 || strcmp(arch->name, "gfx942") == 0 ? 32 : 0;
}

static const char *amd_bytes_misfit(const struct gpu_arch *arch, const struct traits *traits,
				    const struct gpu_tile *t)
{
	int32_t depth = bytes_at_once(arch);

	if (traits->dtype != ABI_E4M3 || !depth)
		return "takes keys of 8 bits as e4m3, where matrix units multiply it";
	if (traits->dropout)
		return "takes keys of 8 bits without dropout";
	return t->hdim_q % depth || t->tile_n % depth
		       ? "products sum as many values of 8 bits at once"
		       : NULL;
}

/* In pages: what a wave fetches at once, 16 bytes of a key and four columns of four values a lane,
 * lies in 16 rows. The widest heads leave no registers for addresses. */
static const char *amd_pages_misfit(const struct gpu_arch *arch, const struct gpu_tile *t,
				    int element)
{
	int32_t power = !(t->hdim_q & (t->hdim_q - 1)) && !(t->hdim_v & (t->hdim_v - 1));

	return power && t->hdim_q <= 128 && t->hdim_v <= 128 && arch->wave <= element * t->hdim_q &&
			       arch->wave <= t->hdim_v
		       ? NULL
		       : "rows of a page that lanes do not divide";
}

/* A wave has all rows and runs of 16 keys; 16 lanes share a value, and a lane has as many chunks of
 * a key as others. */
static const char *amd_decode_misfit(const struct gpu_arch *arch, const struct traits *traits,
				     const struct gpu_tile *t)
{
	if (t->tile_m % 16 || t->waves_m != 1)
		return "a wave holds rows in sixteens";
	if (t->hdim_v < 64 || t->hdim_v == 224)
		return "two loads of 16 lanes do not bring a value";
	if (t->tile_n / t->waves_n > 32)
		return "two pages do not hold what a wave has of a tile";
	if (t->hdim_q % (arch->wave / element_bytes(traits)))
		return "lanes have chunks of a key alike";
	if (traits->dtype <= ABI_BF16)
		return NULL;
	if (traits->dtype != ABI_E4M3 || !bytes_at_once(arch))
		return "takes keys of 8 bits as e4m3, where matrix units multiply it";
	if (t->hdim_v % 64)
		return "lanes have whole words of a value";
	return t->tile_n / t->waves_n % (arch->wave / 2)
		       ? "products sum as many keys of 8 bits at once"
		       : NULL;
}

/* Tiles of the staged loop that spill with some features and not with others; another one serves
 * those problems. */
static int amd_forward_spills(const struct gpu_arch *arch, const struct traits *traits,
			      const struct gpu_tile *t)
{
	if (arch->core == GPU_CORE_WMMA11)
		return traits->dropout && ((t->hdim_q == 96 && t->tile_n == 32) ||
					   (t->hdim_q == 128 && t->tile_n == 16));
	/* a clang that knows it keeps so many scalar registers in vector ones */
	return !strcmp(arch->name, "gfx950") && traits->bias == 1 && t->hdim_q > 96 &&
	       t->tile_m == 256;
}

/* Whether rows of bytes are so short that three blocks have registers, which factors of keys under
 * a mask take. */
static int is_short_decode(const struct traits *traits, const struct gpu_tile *t)
{
	return t->hdim_q <= 64 && t->hdim_v <= 64 && !(traits->mask && decodes_by_key(traits));
}

/* A ring of stages of keys for each team; those of 8 bits are as many again. */
static const char *decode_misfit(const struct gpu_arch *arch, const struct traits *traits,
				 const struct gpu_tile *t)
{
	int are_bytes = key_bytes(traits) == 1;

	if (traits->dtype > ABI_BF16 && traits->dtype != ABI_E4M3)
		return "takes queries of 8 bits as e4m3";
	if (are_bytes && arch->core != GPU_CORE_WGMMA)
		return "takes keys of 8 bits on Hopper";
	if (are_bytes && (t->hdim_q % 64 || t->hdim_v % 64))
		return "takes keys of 8 bits by 64 dims";
	if (!are_bytes && t->tile_n > (t->hdim_q > 128 ? 32 : 64))
		return "as many keys are for those of 8 bits";
	if (traits->narrow && t->tile_n == 128 &&
	    is_short_decode(traits, t) != (t->blocks_per_cu == 3))
		return "short rows of 8 bits have three blocks a unit, others two";
	if (decodes_by_key(traits) && t->tile_m > 16 * t->waves_m && t->hdim_v > 64)
		return "leaves no registers for factors of keys";
	if (!decode_stages(arch, traits, t))
		return "leaves no room for two stages of keys";
	return t->tile_n > 32 * t->waves_n ? "a team's share has at most 32 keys" : NULL;
}

/* Keys of 16 bits have factors when a stage before has widened them. */
static const char *widened_misfit(const struct traits *traits, const struct gpu_tile *t)
{
	int hopper = t->pipeline == GPU_WGMMA;

	if (!traits->descale || traits->narrow || traits->dtype > ABI_BF16)
		return NULL;
	if (traits->dropout || traits->paged)
		return "factors of keys that were widened go with neither dropout nor pages";
	if (traits->bias && (traits->softcap || !hopper))
		return "factors of keys that were widened go with no bias here";
	return traits->softcap && !hopper
		       ? "factors of keys that were widened go with no soft cap here"
		       : NULL;
}

static const char *forward_misfit(const struct gpu_arch *arch, const struct traits *traits,
				  const struct gpu_tile *t)
{
	const char *why = t->pipeline == GPU_WGMMA ? warpgroups_misfit(traits, t)
			  : t->pipeline == GPU_AMD ? amd_misfit(arch, t, t->tile_m, t->tile_n)
			  : t->pipeline == GPU_AMD_DECODE ? amd_decode_misfit(arch, traits, t)
			  : t->pipeline == GPU_LATENT     ? latent_misfit(traits, t)
			  : t->pipeline == GPU_WIDE       ? wide_misfit(t)
			  : t->pipeline == GPU_DECODE     ? decode_misfit(arch, traits, t)
							  : NULL;

	if (!why && t->pipeline == GPU_AMD && traits->dtype > ABI_BF16)
		why = amd_bytes_misfit(arch, traits, t);
	if (!why && t->pipeline == GPU_AMD && traits->paged)
		why = amd_pages_misfit(arch, t, element_bytes(traits));
	if (!why)
		why = widened_misfit(traits, t);
	if (why)
		return why;
	if (traits->shares && t->pipeline != GPU_DECODE && !has_halves(t->pipeline))
		return "takes splits that were cut";
	if (t->tile_m % (16 * t->waves_m) || t->tile_n % (16 * t->waves_n))
		return "its waves do not divide it by 16";
	return forward_lds(arch, traits, t) > (int32_t)arch->lds_bytes
		       ? "does not fit in the LDS of the arch"
		       : NULL;
}

/* dK and dV of 16 rows, in 32-lane waves, must leave registers for the scores. */
static int splits_dkdv(enum gpu_core core, const struct gpu_tile *t)
{
	int32_t most = core == GPU_CORE_MMA ? 320 : 256;

	return core != GPU_CORE_MFMA && t->hdim_q + t->hdim_v > most;
}

/* The tile of the pass that finds dQ: its one gradient leaves registers for more rows. */
static struct gpu_tile dq_tile(const struct gpu_arch *arch, enum gpu_core core,
			       const struct gpu_tile *t, int buffers)
{
	struct gpu_tile r = *t;

	if (core != GPU_CORE_MMA || t->hdim_q > 128 || t->hdim_v > 128)
		return r;
	if (t->tile_n == 16 * t->waves_m) {
		r.tile_n = 2 * t->tile_n;
		r.tile_m = max32(t->tile_m / 2, 16);
	} else if (t->hdim_q <= 64 && t->hdim_v <= 64) {
		r.tile_m = 64;
	}
	return backward_lds(arch, &r, buffers) <= (int32_t)arch->lds_bytes ? r : *t;
}

/* Three warpgroups that share 96 keys, made for latents that have been expanded (192 and 128). */
static int suits_roles(const struct gpu_tile *t)
{
	return t->hdim_q > 128 && t->hdim_q <= 192 && t->hdim_v > 64 && t->hdim_v <= 128;
}

static const char *backward_roles_misfit(const struct gpu_tile *t)
{
	if (t->waves_m != 12 || t->waves_n != 1 || t->tile_m != 64)
		return "three warpgroups share 64 queries";
	return suits_roles(t)
		       ? NULL
		       : "registers are known where Q has 129 to 192 dimensions and V 65 to 128";
}

/* Two warpgroups of 64 keys, whose registers are known. */
static const char *backward_warpgroups_misfit(const struct gpu_arch *arch, const struct gpu_tile *t)
{
	int wide = t->hdim_q > 128 || t->hdim_v > 128;

	if (lds_bwd_has_roles(t->tile_n))
		return backward_roles_misfit(t);
	if (t->waves_m != 8 || t->waves_n != 1)
		return "two warpgroups own keys";
	if (t->tile_n != (wide ? 64 : 128))
		return "heads up to 128, and no others, leave registers for 64 keys a warpgroup";
	if (t->tile_m % 32 || t->tile_m > 256)
		return "a warpgroup may have half of the rows, in sixteens";
	return lds_bwd_wgmma(cut_of(arch, t)) > (int32_t)arch->lds_bytes
		       ? "does not fit in the LDS of the arch"
		       : NULL;
}

static const char *backward_misfit(const struct gpu_arch *arch, const struct gpu_tile *t)
{
	const char *why = t->pipeline == GPU_AMD ? amd_misfit(arch, t, t->tile_n, t->tile_m) : NULL;

	if (why)
		return why;
	if (t->pipeline == GPU_WGMMA)
		return backward_warpgroups_misfit(arch, t);
	if (t->tile_n != 16 * t->waves_m && t->tile_n != 32 * t->waves_m)
		return "a wave keeps 16 or 32 keys";
	if (t->tile_m % 16 || t->waves_n != 1)
		return "rows come in sixteens, waves side by side";
	if (lds_part(t->hdim_q) < t->hdim_q && lds_part(t->hdim_v) < t->hdim_v &&
	    t->hdim_q != t->hdim_v)
		return "parts of wide heads are alike";
	return backward_lds(arch, t, 1) > (int32_t)arch->lds_bytes
		       ? "does not fit in the LDS of the arch"
		       : NULL;
}

const char *gpu_tile_misfit(const struct gpu_arch *arch, enum abi_family family,
			    const struct traits *traits, const struct gpu_tile *t)
{
	if (!gpu_pads_to(t->hdim_q, GPU_MOST_HDIM_Q) || !gpu_pads_to(t->hdim_v, GPU_MOST_HDIM_V))
		return "head dims are multiples of 32, of 64 above 256, up to 576 and 512";
	if (lds_is_parted(cut_of(arch, t)) && t->pipeline >= GPU_WGMMA && !has_halves(t->pipeline))
		return "other loops have heads above 256";
	if (t->waves_m <= 0 || t->waves_n <= 0 || t->waves_m > 16 || t->waves_n > 16 ||
	    t->waves_m * t->waves_n * arch->wave > 1024)
		return "too many waves, or none";
	if (t->tile_m <= 0 || t->tile_n <= 0 || t->tile_m > 512 || t->tile_n > 512)
		return "at most 512 rows and keys, and at least one";
	if (is_forward(family))
		return forward_misfit(arch, traits, t);
	return family == ABI_BWD_DQ_DK_DV ? backward_misfit(arch, t) : NULL;
}

/* Is there such a pipeline on this arch, and does it know the data type? */
static int knows(const struct gpu_arch *arch, const struct traits *traits, const struct gpu_tile *t)
{
	return t->pipeline >= 0 && t->pipeline < GPU_N_PIPELINES &&
	       gpu_pipelines[t->pipeline].cores & BIT(arch->core) &&
	       (traits->dtype != ABI_F32 || core_of(arch, t) == GPU_CORE_SCALAR ||
		t->pipeline >= GPU_COMBINE);
}

/* The others take rows by 16 bytes, and are asked for no others: gpu_maps.c. */
static int has_tails(const struct gpu_tile *t)
{
	return t->pipeline != GPU_WGMMA && !has_halves(t->pipeline) && t->pipeline != GPU_AMD &&
	       t->pipeline != GPU_AMD_DECODE;
}

/* Loops that are for every arch read masks that are data, and Hopper's where it has room for what
 * one loading warp says of each tile. */
static const char *mask_data_misfit(const struct traits *traits, const struct gpu_tile *t)
{
	if (!traits->mask_data)
		return NULL;
	if (t->pipeline != GPU_WGMMA)
		return t->pipeline != GPU_DECODE && has_tails(t) ? NULL
								 : "has no masks that are data";
	if (traits->dtype > ABI_BF16 || traits->narrow)
		return "has masks that are data with 16 bits only";
	if (traits->paged)
		return "has masks that are data with no pages";
	return traits->bias == 1 ? "has masks that are data with no bias's matrix" : NULL;
}

/* What a loop has no code for, whatever the tile. */
static const char *forward_lacks(enum abi_family family, const struct traits *traits,
				 const struct gpu_tile *t)
{
	if (t->pipeline >= GPU_COMBINE)
		return "is no loop over keys";
	if (gpu_pipelines[t->pipeline].pack && traits->dropout)
		return "packs heads, and has no dropout";
	if (traits->chosen && (!gpu_pipelines[t->pipeline].pack ||
			       (t->pipeline >= GPU_WGMMA && t->pipeline != GPU_LATENT)))
		return "has all keys of a sequence";
	if (traits->chosen && t->pipeline == GPU_LATENT && (traits->mask || traits->shares))
		return "finds chosen keys without a mask, in splits that were cut";
	if (t->pipeline == GPU_LATENT && traits->narrow && !traits->latent_fp8)
		return "reads caches narrower than their queries as latents of fp8 alone";
	if (t->pipeline == GPU_LATENT && traits->latent_fp8 && traits->shares)
		return "finds latents of fp8 in splits that were cut";
	if (traits->narrow &&
	    (!GPU_WIDENS(t->pipeline) || traits->dtype == ABI_F32 || traits->dtype > ABI_BF16))
		return "does not read caches narrower than their queries";
	if (traits->narrow && t->pipeline == GPU_WGMMA && (traits->bias || traits->dropout))
		return "has neither bias nor dropout with such caches";
	if (t->pipeline == GPU_WGMMA && family != ABI_FWD_SPLITKV &&
	    (family == ABI_FWD) == (traits->paged != 0))
		return "does not find its keys that way";
	if (t->pipeline == GPU_WGMMA && family == ABI_FWD_SPLITKV && traits->mask_data)
		return "has masks that are data without splits";
	if (has_halves(t->pipeline) && traits->dtype > ABI_BF16)
		return "computes with 16 bits";
	if (t->pipeline == GPU_LATENT && traits->softcap)
		return "has no soft cap";
	if (has_halves(t->pipeline) && (traits->bias || traits->descale))
		return "has no bias and no factors";
	if (t->pipeline == GPU_WGMMA && traits->dtype > ABI_E4M3)
		return "does not compute in this type";
	if (t->pipeline == GPU_AMD && family == ABI_FWD_SPLITKV && traits->paged)
		return "does not split keys in pages";
	return mask_data_misfit(traits, t);
}

static const char *make_forward(const struct gpu_arch *arch, enum abi_family family,
				const struct traits *traits, const struct gpu_tile *t,
				struct gpu_kernel *k)
{
	struct features f = features_of(family, traits);
	const char *why = forward_lacks(family, traits, t);

	if (!why && t->pipeline == GPU_AMD && amd_forward_spills(arch, traits, t))
		why = "this tile spills with these";
	if (!why)
		why = begin_kernel(arch, family, traits, t, k);
	if (why)
		return why;
	f.pack = gpu_pipelines[t->pipeline].pack;
	f.split = family == ABI_FWD_SPLITKV;
	f.logits = traits->bias || traits->softcap || traits->any_scale ||
		   (traits->descale && t->pipeline != GPU_AMD && t->pipeline != GPU_AMD_DECODE);
	f.buffers = t->pipeline == GPU_DECODE ? decode_stages(arch, traits, t) : 0;
	f.paired = f.paired && t->pipeline == GPU_LATENT;
	f.parked = t->pipeline != GPU_DECODE && !has_halves(t->pipeline) && is_parked(arch, t);
	f.tails = traits->tails && has_tails(t);
	/* To the others an approximate cap is an exact one. */
	f.cap_approx = traits->cap_approx && t->pipeline == GPU_WGMMA;
	f.by_key = t->pipeline == GPU_DECODE && decodes_by_key(traits);
	add_features(k, f);
	return finish_kernel(arch, k, forward_lds(arch, traits, t));
}

/* One pass; dQ in tiles. */
static const char *make_backward_wgmma(const struct gpu_arch *arch, const struct traits *traits,
				       const struct gpu_tile *t, struct gpu_kernel *k)
{
	struct features f = features_of(ABI_BWD_DQ_DK_DV, traits);
	const char *why = traits->dtype == ABI_F32 || traits->dtype > ABI_BF16
				  ? "computes with 16 bits"
				  : mask_data_misfit(traits, t);

	if (!why && traits->mask_data && traits->dropout)
		why = "has masks that are data with no dropout";
	if (!why && traits->mask_data && (t->tile_n < 128 || t->tile_m > 64))
		why = "has masks that are data with heads up to 128, by 64 queries";
	/* The formula would have it nearly as fast. */
	if (!why && lds_bwd_is_shared(t->tile_n) && suits_roles(t) && !traits->bias)
		why = "three warpgroups share 96 keys where there is no bias";
	if (!why)
		why = begin_kernel(arch, ABI_BWD_DQ_DK_DV, traits, t, k);
	if (why)
		return why;
	f.tails = f.dbias_sum = 0; /* its code is the same with and without */
	f.logits = traits->bias || traits->softcap || traits->any_scale;
	add_features(k, f);
	return finish_kernel(arch, k,
			     lds_bwd_wgmma(cut_of(arch, t)) +
				     (traits->mask_data ? lds_bwd_seen(t->tile_m, t->tile_n) : 0));
}

static const char *backward_lacks(const struct traits *traits, const struct gpu_tile *t)
{
	if (t->pipeline >= GPU_COMBINE || gpu_pipelines[t->pipeline].pack)
		return "has no gradients";
	if (traits->dtype > ABI_BF16)
		return "has no gradients of 8 bits";
	if (t->pipeline == GPU_AMD && traits->dropout)
		return "has no dropout";
	if (t->pipeline == GPU_AMD && traits->dbias_sum)
		return "does not sum a bias's gradient";
	return mask_data_misfit(traits, t);
}

static const char *make_backward(const struct gpu_arch *arch, const struct traits *traits,
				 const struct gpu_tile *t, struct gpu_kernel *k)
{
	enum gpu_core core = core_of(arch, t);
	int buffers = core == GPU_CORE_MMA && !lds_is_parted(cut_of(arch, t)) &&
				      backward_lds(arch, t, 2) <= (int32_t)arch->lds_bytes
			      ? 2
			      : 1;
	struct gpu_tile rows = dq_tile(arch, core, t, buffers);
	struct features f = features_of(ABI_BWD_DQ_DK_DV, traits);
	const char *why = backward_lacks(traits, t);

	if (!why)
		why = begin_kernel(arch, ABI_BWD_DQ_DK_DV, traits, t, k);
	if (why)
		return why;
	f.split = traits->dq_acc;
	f.logits = traits->bias || traits->softcap || traits->any_scale;
	f.buffers = buffers;
	f.split_dkdv = splits_dkdv(core, t);
	f.tails = traits->tails && has_tails(t);
	add_features(k, f);
	k->dq_tile_n = rows.tile_n;
	add_option(k, "-DFMHA_DQ_TILE_M=%d", rows.tile_m);
	add_option(k, "-DFMHA_DQ_TILE_N=%d", rows.tile_n);
	return finish_kernel(
		arch, k, max32(backward_lds(arch, t, buffers), backward_lds(arch, &rows, buffers)));
}

/* The families that go row by row, a wave a row: no matrix core, no tile. */
static const char *make_rows(const struct gpu_arch *arch, enum abi_family family,
			     const struct traits *traits, const struct gpu_tile *t,
			     struct gpu_kernel *k)
{
	struct features f = features_of(family, traits);
	const char *why = t->pipeline == (int32_t)rows_pipeline(family)
				  ? begin_kernel(arch, family, traits, t, k)
				  : "is another family's";

	if (why)
		return why;
	/* Hopper's loop takes keys in the order of intervals; merges of wide rows were measured
	 * there alone. */
	if (!(gpu_pipelines[GPU_WGMMA].cores & BIT(arch->core)))
		f.mask_data = f.wide = 0;
	if (f.mask_data == 2)
		f.mask_data = 0;
	add_features(k, f);
	return finish_kernel(arch, k,
			     f.mask_data                    ? GRID_ORDER_LDS
			     : family == ABI_BWD_DOT_DO_O   ? t->waves_m * 4
			     : family == ABI_BWD_CONVERT_DQ ? lds_convert()
			     : family == ABI_FWD_SPLITKV_COMBINE
				     ? t->waves_m * arch->wave * GRID_COMBINE_BYTES
				     : 0);
}

void gpu_kernel_make_prepare(const char *arch, struct gpu_kernel *ret_kernel)
{
	*ret_kernel = (struct gpu_kernel){.build = {.source = "prepare.hip"},
					  .entry = "fmha_prepare",
					  .block = {PREPARE_THREADS, 1, 1},
					  .overlaps = can_wait(arch)};
	snprintf(ret_kernel->build.arch, BUILD_WORD_BYTES, "%s", arch);
	snprintf(ret_kernel->build.name, BUILD_NAME_BYTES, "fmha_prepare_%s", arch);
}

/* The tile that a row's code has: where wide heads have an approximate cap and nothing more there
 * are registers for as many keys as without one. */
static struct gpu_tile tile_of_code(const struct traits *traits, const struct gpu_tile *t)
{
	struct traits bare = *traits;
	struct gpu_tile tile = *t;
	int32_t keys;

	bare.softcap = 0;
	keys = wide_keys(&bare, t);
	if (t->pipeline == GPU_WGMMA && traits->cap_approx && !traits->bias && !traits->descale &&
	    !traits->mask_data && t->hdim_v > 192 && t->tile_n == wide_keys(traits, t))
		tile.tile_n = keys;
	return tile;
}

const char *gpu_kernel_make(const struct gpu_arch *arch, enum abi_family family,
			    const struct traits *traits, const struct gpu_tile *tile,
			    struct gpu_kernel *ret_kernel)
{
	const char *why = knows(arch, traits, tile) ? gpu_tile_misfit(arch, family, traits, tile)
						    : "is not on this arch, or not for this type";
	struct gpu_tile own = tile_of_code(traits, tile);

	if (why)
		return why;
	if (is_forward(family))
		return make_forward(arch, family, traits, &own, ret_kernel);
	if (family == ABI_BWD_DQ_DK_DV && tile->pipeline == GPU_WGMMA)
		return make_backward_wgmma(arch, traits, tile, ret_kernel);
	if (family == ABI_BWD_DQ_DK_DV)
		return make_backward(arch, traits, tile, ret_kernel);
	return make_rows(arch, family, traits, tile, ret_kernel);
}
