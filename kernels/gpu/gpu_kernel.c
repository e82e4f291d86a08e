/* SPDX-License-Identifier: MIT */
/*
 * gpu_kernel.c: tiles, options and geometry of the GPU kernels. The LDS sums repeat what the
 * kernels add up at compile time; each kernel asserts that it got enough.
 */
#include "gpu_kernel.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HDIM 256

static int32_t max32(int32_t a, int32_t b)
{
	return a > b ? a : b;
}

static int32_t ceil_div(int32_t a, int32_t b)
{
	return a / b + (a % b != 0);
}

int gpu_arch_find(const char *name, struct gpu_arch *ret_arch)
{
	struct gpu_arch a = {.wave = 32, .core = GPU_CORE_SCALAR, .lds_bytes = 65536};

	if (strlen(name) >= sizeof(a.name))
		return -1;
	snprintf(a.name, sizeof(a.name), "%s", name);
	if (!strncmp(name, "sm_", 3)) {
		int version = atoi(name + 3);

		if (version <= 0)
			return -1;
		a.nvidia = 1;
		a.core = version >= 80 ? GPU_CORE_MMA : GPU_CORE_SCALAR;
		a.tight = version < 90;
		/* From the programming guide: a block's limit, 1 KiB below the SM's. */
		if (version == 80 || version == 87)
			a.lds_bytes = 163 * 1024;
		else if (version == 86 || version == 89 || version >= 120)
			a.lds_bytes = 99 * 1024;
		else if (version >= 90)
			a.lds_bytes = 227 * 1024;
	} else if (!strncmp(name, "gfx9", 4)) {
		a.wave = 64;
		if (!strcmp(name, "gfx90a") || !strcmp(name, "gfx942") || !strcmp(name, "gfx950"))
			a.core = GPU_CORE_MFMA;
		if (!strcmp(name, "gfx950"))
			a.lds_bytes = 160 * 1024;
	} else if (!strncmp(name, "gfx11", 5)) {
		a.core = GPU_CORE_WMMA11;
		a.tight = 1;
	} else if (!strncmp(name, "gfx12", 5)) {
		a.core = GPU_CORE_WMMA12;
	} else if (strncmp(name, "gfx", 3)) {
		return -1;
	}
	*ret_arch = a;
	return 0;
}

/* "gpu_mma_pack" -> core and pack. Returns -1 for a pipeline that this arch has not. */
static int pipeline_parse(const struct gpu_arch *arch, const char *pipeline,
			  enum gpu_core *ret_core, int *ret_pack)
{
	static const char *const words[] = {"gpu_scalar", "gpu_mma", "gpu_mfma", "gpu_wmma",
					    "gpu_wmma"};
	const enum gpu_core cores[] = {GPU_CORE_SCALAR, arch->core};

	for (int i = 0; i < 2; i++) {
		size_t n = strlen(words[cores[i]]);

		if (strncmp(pipeline, words[cores[i]], n))
			continue;
		if (pipeline[n] && strcmp(pipeline + n, "_pack"))
			continue;
		*ret_core = cores[i];
		*ret_pack = pipeline[n] != 0;
		return 0;
	}
	return -1;
}

static const char *core_word(enum gpu_core core)
{
	switch (core) {
	case GPU_CORE_SCALAR:
		return "gpu_scalar";
	case GPU_CORE_MMA:
		return "gpu_mma";
	case GPU_CORE_MFMA:
		return "gpu_mfma";
	default:
		return "gpu_wmma";
	}
}

static int32_t padded_hdim(int32_t hdim)
{
	return ceil_div(hdim, 32) * 32;
}

static const char *rows_pipeline(enum abi_family family)
{
	switch (family) {
	case ABI_FWD_SPLITKV_COMBINE:
		return "gpu_combine";
	case ABI_FWD_APPENDKV:
		return "gpu_append";
	case ABI_BWD_DOT_DO_O:
		return "gpu_dot";
	default:
		return "gpu_convert";
	}
}

static int is_forward(enum abi_family family)
{
	return family == ABI_FWD || family == ABI_FWD_SPLITKV || family == ABI_FWD_PAGEDKV ||
	       family == ABI_BATCH_PREFILL;
}

/* Elements that a lane holds of a 16 x 16 tile, and how many rows they belong to. */
static void core_shape(enum gpu_core core, int wave, int32_t *ret_elements, int32_t *ret_stats)
{
	*ret_elements = 256 / wave;
	if (core == GPU_CORE_SCALAR)
		*ret_stats = 16 / (wave / 8);
	else
		*ret_stats = core == GPU_CORE_MMA ? 2 : 1;
}

/* A streamed tile of rows x cols elements, readable by rows and/or by columns. */
static int32_t tile_bytes(enum gpu_core core, int32_t rows, int32_t cols, int by_rows,
			  int by_columns)
{
	switch (core) {
	case GPU_CORE_SCALAR:
		return rows * cols * 4;
	case GPU_CORE_MMA:
		return rows * cols * 2;
	default:
		return (by_rows ? rows * (cols * 2 + 16) : 0) +
		       (by_columns ? cols * (rows * 2 + 16) : 0);
	}
}

static int32_t stationary_bytes(enum gpu_core core, int32_t rows, int32_t cols)
{
	return core == GPU_CORE_MFMA ? 0 : tile_bytes(core, rows, cols, 1, 0);
}

/* What describes the streamed tensors, where registers are dear. */
static int32_t views_bytes(enum gpu_core core)
{
	return core == GPU_CORE_MMA ? 320 : 0;
}

/* A wave's 16 rows of a result, as floats. */
static int32_t stage_bytes(int32_t waves, int32_t hdim)
{
	return waves * 16 * (hdim >= 256 ? hdim : hdim + 4) * 4;
}

/* A tile whose accumulators fill the registers, asked for with one block a unit (two fit all the
 * same): what can wait does so in LDS, and nothing spills. */
static int lean(enum gpu_core core, const struct gpu_tile *t)
{
	return core == GPU_CORE_MMA && t->blocks_per_cu == 1 && t->waves_n == 1 &&
	       t->tile_m / t->waves_m > 16;
}

static int32_t forward_lds(const struct gpu_arch *arch, enum gpu_core core,
			   const struct gpu_tile *t)
{
	int32_t elements, stats, tiles = t->tile_m / 16 / t->waves_m, merge, stage, kept = 0;

	core_shape(core, arch->wave, &elements, &stats);
	merge = (t->waves_n - 1) * t->waves_m * arch->wave * 4 *
		(tiles * (t->hdim_v / 16) * elements + 2 * tiles * stats);
	stage = stage_bytes(t->waves_m, t->hdim_v);
	if (lean(core, t)) /* the band, maxima and sums of rows */
		kept = 32 + 2 * tiles * stats * t->waves_m * t->waves_n * arch->wave * 4;
	return max32(max32(merge, stage), stationary_bytes(core, t->tile_m, t->hdim_q) +
						  tile_bytes(core, t->tile_n, t->hdim_q, 1, 0) +
						  tile_bytes(core, t->tile_n, t->hdim_v, 0, 1) +
						  kept);
}

__attribute__((format(printf, 2, 3))) static void add_option(struct gpu_kernel *k,
							     const char *format, ...)
{
	va_list list;

	va_start(list, format);
	if (k->n_options < GPU_KERNEL_OPTIONS)
		(void)vsnprintf(k->options[k->n_options++], GPU_KERNEL_OPTION, format, list);
	va_end(list);
}

static int masked(const struct abi_band *band)
{
	return band->mask != ABI_MASK_NONE && (band->window_left >= 0 || band->window_right >= 0);
}

static int bias_kind(const struct abi_tensor *bias, const float *slopes)
{
	return bias->data ? 1 : slopes ? 2 : 0;
}

/* What all kernels with tiles share. */
static int begin_kernel(const struct gpu_arch *arch, enum abi_family family, uint32_t dtype,
			const struct gpu_tile *tile, enum gpu_core core, struct gpu_kernel *k)
{
	static const char *const entries[] = {"fwd",          "fwd_splitkv",  "fwd_splitkv_combine",
					      "fwd_pagedkv",  "fwd_appendkv", "batch_prefill",
					      "bwd_dot_do_o", "bwd_dq_dk_dv", "bwd_convert_dq"};
	static const char *const dtypes[] = {"f32", "f16", "bf16", "e4m3", "e5m2"};
	int32_t threads = tile->waves_m * tile->waves_n * arch->wave;

	if (dtype > ABI_E5M2 || threads <= 0 || threads > 1024)
		return 1;
	*k = (struct gpu_kernel){.family = family, .tile = *tile, .block = {threads, 1, 1}};
	snprintf(k->source, sizeof(k->source), "fmha.hip");
	snprintf(k->entry, sizeof(k->entry), "fmha_%s", entries[family]);
	snprintf(k->name, sizeof(k->name), "%s_%s_%s_%s_h%dx%d_t%dx%d_w%dx%d_b%d", k->entry,
		 dtypes[dtype], arch->name, tile->pipeline, tile->hdim_q, tile->hdim_v,
		 tile->tile_m, tile->tile_n, tile->waves_m, tile->waves_n, tile->blocks_per_cu);
	add_option(k, "-DFMHA_FAMILY=%d", family);
	add_option(k, "-DFMHA_ENTRY=%s", k->entry);
	add_option(k, "-DFMHA_CORE=%d", core);
	add_option(k, "-DFMHA_DTYPE=%u", dtype);
	add_option(k, "-DFMHA_HDIM_Q=%d", tile->hdim_q);
	add_option(k, "-DFMHA_HDIM_V=%d", tile->hdim_v);
	add_option(k, "-DFMHA_TILE_M=%d", tile->tile_m);
	add_option(k, "-DFMHA_TILE_N=%d", tile->tile_n);
	add_option(k, "-DFMHA_WAVES_M=%d", tile->waves_m);
	add_option(k, "-DFMHA_WAVES_N=%d", tile->waves_n);
	add_option(k, "-DFMHA_BLOCKS_PER_CU=%d", tile->blocks_per_cu > 0 ? tile->blocks_per_cu : 1);
	return 0;
}

/* A feature: an option, and a word in the name when it is on. */
static void add_feature(struct gpu_kernel *k, const char *option, const char *word, int value)
{
	size_t n = strlen(k->name);

	add_option(k, "-DFMHA_%s=%d", option, value);
	if (value && n < sizeof(k->name))
		(void)snprintf(k->name + n, sizeof(k->name) - n, value > 1 ? "_%s%d" : "_%s", word,
			       value);
}

struct features {
	int pack, split, mask, bias, softcap, dropout, paged, descale, logits, buffers, apart, lean;
	int acc, bias_sum;
};

static void add_features(struct gpu_kernel *k, struct features f)
{
	k->pack = f.pack;
	k->apart = f.apart;
	add_feature(k, "PACK", "pack", f.pack);
	add_feature(k, "SPLIT", "split", f.split);
	add_feature(k, "MASK", "mask", f.mask);
	add_feature(k, "BIAS", "bias", f.bias);
	add_feature(k, "SOFTCAP", "cap", f.softcap);
	add_feature(k, "DROPOUT", "drop", f.dropout);
	add_feature(k, "PAGED", "paged", f.paged);
	add_feature(k, "DESCALE", "descale", f.descale);
	add_feature(k, "LOGITS", "logits", f.logits);
	add_feature(k, "BUFFERS", "buffers", f.buffers);
	add_feature(k, "APART", "apart", f.apart);
	add_feature(k, "LEAN", "lean", f.lean);
	add_feature(k, "ACC", "acc", f.acc);
	add_feature(k, "BIAS_SUM", "dbsum", f.bias_sum);
}

static int finish_kernel(const struct gpu_arch *arch, struct gpu_kernel *k, int32_t lds_bytes)
{
	if (!k->rows_n) {
		add_option(k, "-DFMHA_ROWS_M=16");
		add_option(k, "-DFMHA_ROWS_N=16");
	}
	if (lds_bytes < 0 || (uint32_t)lds_bytes > arch->lds_bytes)
		return 1;
	k->lds_bytes = lds_bytes;
	add_option(k, "-DFMHA_LDS_BYTES=%d", lds_bytes);
	return k->n_options >= GPU_KERNEL_OPTIONS;
}

/* Core, pack and the rules that hold for every kernel with tiles. */
static int check_tile(const struct gpu_arch *arch, uint32_t dtype, const struct gpu_tile *t,
		      int32_t hdim_q, int32_t hdim_v, enum gpu_core *ret_core, int *ret_pack)
{
	if (pipeline_parse(arch, t->pipeline, ret_core, ret_pack))
		return 1;
	if (dtype == ABI_F32 && *ret_core != GPU_CORE_SCALAR)
		return 1;
	if (t->hdim_q % 32 || t->hdim_v % 32 || t->hdim_q < hdim_q || t->hdim_v < hdim_v ||
	    t->hdim_q > MAX_HDIM || t->hdim_v > MAX_HDIM)
		return 1;
	if (t->waves_m <= 0 || t->waves_n <= 0 || t->waves_m > 16 || t->waves_n > 16)
		return 1;
	if (t->tile_m <= 0 || t->tile_n <= 0 || t->tile_m > 512 || t->tile_n > 512)
		return 1;
	return 0;
}

static int make_forward(const struct gpu_arch *arch, enum abi_family family, uint32_t dtype,
			const struct abi_fwd_args *a, const struct gpu_tile *t,
			struct gpu_kernel *k)
{
	enum gpu_core core;
	int pack, bias, logits, descale;

	if (check_tile(arch, dtype, t, a->hdim_q, a->hdim_v, &core, &pack))
		return 1;
	if (t->tile_m % (16 * t->waves_m) || t->tile_n % (16 * t->waves_n))
		return 1;
	if (pack && a->dropout.p_drop > 0)
		return 1;
	if (begin_kernel(arch, family, dtype, t, core, k))
		return 1;
	bias = bias_kind(&a->bias, a->alibi_slopes);
	descale = a->q_descale.data || a->k_descale.data || a->v_descale.data;
	logits = bias || descale || a->logits_soft_cap > 0 || !(a->scale > 0);
	add_features(k, (struct features){.pack = pack,
					  .split = family == ABI_FWD_SPLITKV,
					  .mask = masked(&a->band),
					  .bias = bias,
					  .softcap = a->logits_soft_cap > 0,
					  .dropout = a->dropout.p_drop > 0,
					  .paged = a->cache.page_size > 0,
					  .descale = descale,
					  .logits = logits,
					  .lean = lean(core, t)});
	return finish_kernel(arch, k, forward_lds(arch, core, t));
}

/* dK and dV of 16 rows, in 32-lane waves, must leave registers for the scores. */
static int apart(enum gpu_core core, const struct gpu_tile *t)
{
	int32_t most = core == GPU_CORE_MMA ? 320 : 256;

	return core != GPU_CORE_MFMA && t->hdim_q + t->hdim_v > most;
}

static int32_t backward_lds(const struct gpu_arch *arch, enum gpu_core core,
			    const struct gpu_tile *t, int buffers)
{
	int32_t stay = stationary_bytes(core, t->tile_n, t->hdim_q) +
		       stationary_bytes(core, t->tile_n, t->hdim_v);
	int32_t walk = tile_bytes(core, t->tile_m, t->hdim_q, 1, 1) +
		       tile_bytes(core, t->tile_m, t->hdim_v, 1, 1);

	int32_t stats = max32(buffers * t->tile_m, core == GPU_CORE_MMA ? t->tile_n : 0) * 2 * 4;
	int32_t tiles = stay + buffers * walk + views_bytes(core);

	/* Row statistics may stay in memory where the scalar core's tiles take all of LDS. */
	if (core == GPU_CORE_SCALAR && tiles + stats > (int32_t)arch->lds_bytes)
		stats = 0;
	return max32(tiles + stats, stage_bytes(t->waves_m, max32(t->hdim_q, t->hdim_v)));
}

/* The tile of the pass whose rows stay: its one gradient leaves registers for more rows. */
static struct gpu_tile rows_pass_tile(const struct gpu_arch *arch, enum gpu_core core,
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
	return backward_lds(arch, core, &r, buffers) <= (int32_t)arch->lds_bytes ? r : *t;
}

/* Whether the rows of dBias are one. Where there are none to sum it is 0, and to be written. */
static int rows_are_one(const struct abi_bwd_args *a)
{
	const struct abi_sequences *s = &a->sequences;

	return !a->dbias.stride_seq && (s->seqstart_q ? s->total_q : s->seqlen_q_max) != 1;
}

/* Whether there is a dBias that is a sum over anything. */
static int sums_dbias(const struct abi_bwd_args *a)
{
	const struct abi_tensor *t = &a->dbias;

	return t->data &&
	       ((a->nhead_q > 1 && t->stride_head == 0) || rows_are_one(a) ||
		(!a->sequences.seqstart_q && a->sequences.batch > 1 && t->stride_batch == 0));
}

static int make_backward(const struct gpu_arch *arch, uint32_t dtype, const struct abi_bwd_args *a,
			 const struct gpu_tile *t, struct gpu_kernel *k)
{
	enum gpu_core core;
	struct gpu_tile rows;
	int pack, bias, buffers;

	if (check_tile(arch, dtype, t, a->hdim_q, a->hdim_v, &core, &pack) || pack)
		return 1;
	if (t->tile_n != 16 * t->waves_m && t->tile_n != 32 * t->waves_m)
		return 1;
	if (t->tile_m % 16 || t->waves_n != 1 || dtype > ABI_BF16)
		return 1;
	/* A bias may repeat over batches, heads and rows, never over columns. */
	if (a->dbias.data && !a->dbias.stride_dim && a->sequences.seqlen_k_max > 1)
		return 1;
	if (begin_kernel(arch, ABI_BWD_DQ_DK_DV, dtype, t, core, k))
		return 1;
	bias = bias_kind(&a->bias, a->alibi_slopes);
	buffers = core == GPU_CORE_MMA && backward_lds(arch, core, t, 2) <= (int32_t)arch->lds_bytes
			  ? 2
			  : 1;
	k->bias_sum = sums_dbias(a);
	add_features(k,
		     (struct features){.mask = masked(&a->band),
				       .bias = bias,
				       .softcap = a->logits_soft_cap > 0,
				       .dropout = a->dropout.p_drop > 0,
				       .logits = bias || a->logits_soft_cap > 0 || !(a->scale > 0),
				       .buffers = buffers,
				       .apart = apart(core, t),
				       .acc = a->dq_acc != NULL,
				       .bias_sum = k->bias_sum});
	rows = rows_pass_tile(arch, core, t, buffers);
	k->rows_n = rows.tile_n;
	add_option(k, "-DFMHA_ROWS_M=%d", rows.tile_m);
	add_option(k, "-DFMHA_ROWS_N=%d", rows.tile_n);
	return finish_kernel(arch, k,
			     max32(backward_lds(arch, core, t, buffers),
				   backward_lds(arch, core, &rows, buffers)));
}

/* The families that go row by row, a wave a row: no matrix core, no tile. */
static int make_rows(const struct gpu_arch *arch, enum abi_family family, uint32_t dtype,
		     const void *args, const struct gpu_tile *t, struct gpu_kernel *k)
{
	const struct abi_appendkv_args *append = args;

	if (strcmp(t->pipeline, rows_pipeline(family)))
		return 1;
	if (begin_kernel(arch, family, dtype, t, GPU_CORE_SCALAR, k))
		return 1;
	add_features(k, (struct features){.paged = family == ABI_FWD_APPENDKV &&
						   append->cache.page_size > 0});
	return finish_kernel(arch, k, family == ABI_BWD_DOT_DO_O ? t->waves_m * 4 : 0);
}

int gpu_kernel_make(const char *arch_name, enum abi_family family, uint32_t dtype, const void *args,
		    const struct gpu_tile *tile, struct gpu_kernel *ret_kernel)
{
	struct gpu_arch arch;

	if (gpu_arch_find(arch_name, &arch))
		return 1;
	if (is_forward(family))
		return make_forward(&arch, family, dtype, args, tile, ret_kernel);
	if (family == ABI_BWD_DQ_DK_DV)
		return make_backward(&arch, dtype, args, tile, ret_kernel);
	return make_rows(&arch, family, dtype, args, tile, ret_kernel);
}

/* Tiles of one kind, the best one first. */
struct tile_row {
	int32_t max_hdim; /* of the larger head dimension */
	int32_t tile_m, tile_n, waves_m, waves_n, blocks_per_cu;
};

struct tile_table {
	const struct tile_row *rows;
	size_t n;
};

/* Pack: few rows; the waves of a block share the keys of a tile. */
static const struct tile_row pack_mma[] = {
	{128, 16, 128, 1, 4, 1}, {128, 16, 64, 1, 4, 1}, {256, 16, 64, 1, 4, 1}};
static const struct tile_row pack_mma_64[] = {{256, 64, 64, 4, 1, 1}};
static const struct tile_row pack_mfma[] = {{128, 16, 64, 1, 4, 1}, {256, 16, 32, 1, 2, 1}};
static const struct tile_row pack_wmma[] = {{128, 16, 64, 1, 4, 1}, {256, 16, 32, 1, 2, 1}};
static const struct tile_row pack_scalar[] = {{128, 16, 32, 1, 2, 1}, {256, 16, 16, 1, 1, 1}};
static const struct tile_row rows_mma[] = {
	{64, 128, 128, 4, 1, 2}, {64, 128, 64, 4, 1, 2}, {128, 128, 64, 4, 1, 1},
	{128, 64, 64, 4, 1, 3},  {128, 64, 64, 4, 1, 2}, {256, 128, 64, 8, 1, 1},
	{256, 64, 32, 4, 1, 1},
};
/* With dropout: room for the random words. */
static const struct tile_row drop_mma[] = {{64, 128, 64, 4, 1, 2}, {128, 128, 32, 4, 1, 1}};
static const struct tile_row rows_mfma[] = {{128, 128, 64, 8, 1, 1}, {256, 64, 32, 4, 1, 1}};
static const struct tile_row rows_wmma[] = {{128, 128, 32, 8, 1, 1}, {256, 64, 16, 4, 1, 1}};
static const struct tile_row rows_scalar[] = {
	{64, 64, 32, 4, 1, 1}, {128, 32, 32, 2, 1, 1}, {256, 16, 16, 1, 1, 1}};

/* Backward: tile_m walks, tile_n stays. */
static const struct tile_row bwd_mma[] = {
	{64, 32, 128, 4, 1, 2},  {64, 64, 128, 8, 1, 1}, {128, 64, 64, 4, 1, 2},
	{128, 64, 128, 8, 1, 1}, {128, 32, 64, 4, 1, 1}, {256, 32, 64, 4, 1, 1},
};
static const struct tile_row bwd_mfma[] = {{128, 32, 64, 4, 1, 1}, {256, 16, 64, 4, 1, 1}};
static const struct tile_row bwd_wmma[] = {
	{64, 32, 64, 4, 1, 1}, {128, 16, 64, 4, 1, 1}, {256, 16, 16, 1, 1, 1}};
static const struct tile_row bwd_scalar[] = {
	{64, 32, 32, 2, 1, 1}, {128, 16, 32, 2, 1, 1}, {256, 16, 16, 1, 1, 1}};

#define TABLE(x)                                                                                   \
	{                                                                                          \
		(x), sizeof(x) / sizeof((x)[0])                                                    \
	}

static const struct tile_table pack_tables[] = {
	[GPU_CORE_SCALAR] = TABLE(pack_scalar), [GPU_CORE_MMA] = TABLE(pack_mma),
	[GPU_CORE_MFMA] = TABLE(pack_mfma),     [GPU_CORE_WMMA11] = TABLE(pack_wmma),
	[GPU_CORE_WMMA12] = TABLE(pack_wmma),
};
static const struct tile_table rows_tables[] = {
	[GPU_CORE_SCALAR] = TABLE(rows_scalar), [GPU_CORE_MMA] = TABLE(rows_mma),
	[GPU_CORE_MFMA] = TABLE(rows_mfma),     [GPU_CORE_WMMA11] = TABLE(rows_wmma),
	[GPU_CORE_WMMA12] = TABLE(rows_wmma),
};
static const struct tile_table bwd_tables[] = {
	[GPU_CORE_SCALAR] = TABLE(bwd_scalar), [GPU_CORE_MMA] = TABLE(bwd_mma),
	[GPU_CORE_MFMA] = TABLE(bwd_mfma),     [GPU_CORE_WMMA11] = TABLE(bwd_wmma),
	[GPU_CORE_WMMA12] = TABLE(bwd_wmma),
};
static const struct tile_table pack_mma_64_table = TABLE(pack_mma_64);
static const struct tile_table drop_mma_table = TABLE(drop_mma);

/* What is looked for: *candidate counts down over the rows that are wide enough; the row that finds
 * it 0 is taken. */
struct tile_search {
	int32_t hdim_q, hdim_v;
	int candidate;
};

static int pick(const struct tile_table *table, enum gpu_core core, int pack, struct tile_search *s,
		struct gpu_tile *ret_tile)
{
	for (size_t i = 0; i < table->n; i++) {
		const struct tile_row *row = &table->rows[i];

		if (row->max_hdim < max32(s->hdim_q, s->hdim_v) || s->candidate--)
			continue;
		*ret_tile = (struct gpu_tile){.tile_m = row->tile_m,
					      .tile_n = row->tile_n,
					      .hdim_q = padded_hdim(s->hdim_q),
					      .hdim_v = padded_hdim(s->hdim_v),
					      .waves_m = row->waves_m,
					      .waves_n = row->waves_n,
					      .blocks_per_cu = row->blocks_per_cu};
		snprintf(ret_tile->pipeline, sizeof(ret_tile->pipeline), "%s%s", core_word(core),
			 pack ? "_pack" : "");
		return 0;
	}
	return 1;
}

/* Tiles whose scores and accumulators leave no room for what these features need: they would spill.
 * From tests/gpu/spill_check.py. */
static int crowded(const struct gpu_arch *arch, enum abi_family family, uint32_t dtype,
		   const struct gpu_tile *t, const struct abi_fwd_args *a)
{
	int bias = a->bias.data || a->alibi_slopes, dropout = a->dropout.p_drop > 0;
	int paged = a->cache.page_size > 0, logits = bias || a->logits_soft_cap > 0;
	int32_t scores = t->tile_m / t->waves_m * t->tile_n;
	int fp8_mask = (dtype == ABI_E4M3 || dtype == ABI_E5M2) && masked(&a->band);
	int cap_mask = a->logits_soft_cap > 0 && masked(&a->band);
	int split_mask = family == ABI_FWD_SPLITKV && masked(&a->band);
	int wide = t->hdim_v > 96, rows = t->tile_m / t->waves_m;

	if (arch->tight && split_mask && paged && logits && t->hdim_v > 192 && t->waves_n == 1 &&
	    scores >= 16 * 64 && !strncmp(t->pipeline, "gpu_mma", 7))
		return 1;
	if (strcmp(t->pipeline, "gpu_mma") != 0)
		return 0;
	if (arch->tight && masked(&a->band)) {
		if (t->blocks_per_cu > 2 || (rows > 16 && t->hdim_v > 64))
			return 1;
	} else if (arch->tight && scores >= 32 * 128) {
		return 1;
	}
	if (scores >= 32 * 128)
		return family == ABI_FWD_SPLITKV || paged || logits || dropout;
	if (rows > 16 && t->blocks_per_cu > 1)
		return t->hdim_v > 64 || (dropout && (bias || paged));
	if (scores >= 32 * 64 && t->hdim_v > 64)
		return dropout || (wide && (logits || paged || fp8_mask || split_mask));
	if (rows > 16 && wide && dropout && paged)
		return 1;
	if (t->hdim_v > 192 && scores >= 16 * 64 && masked(&a->band) && bias && dropout)
		return 1;
	if (t->blocks_per_cu <= 2)
		return 0;
	return dropout || paged ||
	       (wide &&
		(fp8_mask || cap_mask || split_mask || (family == ABI_FWD_SPLITKV && logits)));
}

/* The tiles of one core, in the order in which they are tried. */
static int forward_tile_of(enum gpu_core core, int64_t rows, int dropout, struct tile_search *s,
			   struct gpu_tile *ret_tile)
{
	int pack = rows <= 64 && !dropout, found = 1;

	if (pack && core == GPU_CORE_MMA && rows > 16)
		found = pick(&pack_mma_64_table, core, 1, s, ret_tile);
	if (found && pack)
		found = pick(&pack_tables[core], core, 1, s, ret_tile);
	if (found && core == GPU_CORE_MMA && dropout)
		found = pick(&drop_mma_table, core, 0, s, ret_tile);
	if (found)
		found = pick(&rows_tables[core], core, 0, s, ret_tile);
	return found;
}

/* The scalar core is the fallback for everything. */
static int forward_tile(const struct gpu_arch *arch, uint32_t dtype, const struct abi_fwd_args *a,
			int candidate, struct gpu_tile *ret_tile)
{
	int64_t group = a->nhead_k ? a->nhead_q / a->nhead_k : 1;
	int64_t rows = a->sequences.seqlen_q_max * group;
	int dropout = a->dropout.p_drop > 0, found = 1;
	struct tile_search s = {a->hdim_q, a->hdim_v, candidate};

	if (dtype != ABI_F32 && arch->core != GPU_CORE_SCALAR)
		found = forward_tile_of(arch->core, rows, dropout, &s, ret_tile);
	if (found)
		found = forward_tile_of(GPU_CORE_SCALAR, rows, dropout, &s, ret_tile);
	return found;
}

/* The same for gradients. */
static int crowded_backward(const struct gpu_arch *arch, uint32_t dtype, const struct gpu_tile *t,
			    const struct abi_bwd_args *a)
{
	int cap = a->logits_soft_cap > 0, logits = a->bias.data || a->alibi_slopes || cap;
	int dropout = a->dropout.p_drop > 0;
	int32_t rows = t->tile_n / t->waves_m, wide = t->hdim_q + t->hdim_v;

	if (arch->core == GPU_CORE_WMMA11)
		return dtype != ABI_F32 && wide > 192 && t->waves_m > 1 && a->bias.data &&
		       dropout && !masked(&a->band);
	if (arch->core != GPU_CORE_MMA || !(logits || dropout))
		return 0;
	if (!strcmp(t->pipeline, "gpu_scalar")) /* nothing else is there for f32 */
		return dtype != ABI_F32 && (wide > 448 || (wide > 192 && logits && dropout));
	if (!logits)
		return 0;
	return rows > 16 || (rows * t->tile_m > 16 * 32 && wide > 192 && (dropout || cap));
}

static int backward_tile(const struct gpu_arch *arch, uint32_t dtype, const struct abi_bwd_args *a,
			 int candidate, struct gpu_tile *ret_tile)
{
	struct tile_search s = {a->hdim_q, a->hdim_v, candidate};
	int found = 1;

	if (dtype != ABI_F32 && arch->core != GPU_CORE_SCALAR)
		found = pick(&bwd_tables[arch->core], arch->core, 0, &s, ret_tile);
	if (found)
		found = pick(&bwd_tables[GPU_CORE_SCALAR], GPU_CORE_SCALAR, 0, &s, ret_tile);
	return found;
}

static int rows_tile(enum abi_family family, int candidate, struct gpu_tile *ret_tile)
{
	if (candidate > 0)
		return 1;
	*ret_tile = (struct gpu_tile){.tile_m = 16,
				      .tile_n = 16,
				      .hdim_q = 32,
				      .hdim_v = 32,
				      .waves_m = 4,
				      .waves_n = 1,
				      .blocks_per_cu = 1};
	snprintf(ret_tile->pipeline, sizeof(ret_tile->pipeline), "%s", rows_pipeline(family));
	return 0;
}

int gpu_kernel_default_tile(const char *arch_name, enum abi_family family, uint32_t dtype,
			    const void *args, int candidate, struct gpu_tile *ret_tile)
{
	struct gpu_arch arch;

	if (gpu_arch_find(arch_name, &arch))
		return 1;
	if (is_forward(family)) {
		for (int c = 0; !forward_tile(&arch, dtype, args, c, ret_tile); c++)
			if (!crowded(&arch, family, dtype, ret_tile, args) && !candidate--)
				return 0;
		return 1;
	}
	if (family == ABI_BWD_DQ_DK_DV) {
		for (int c = 0; !backward_tile(&arch, dtype, args, c, ret_tile); c++)
			if (!crowded_backward(&arch, dtype, ret_tile, args) && !candidate--)
				return 0;
		return 1;
	}
	return rows_tile(family, candidate, ret_tile);
}

int gpu_kernel_choose(const char *arch, enum abi_family family, uint32_t dtype, const void *args,
		      struct gpu_kernel *ret_kernel)
{
	struct gpu_tile tile;

	for (int candidate = 0;
	     !gpu_kernel_default_tile(arch, family, dtype, args, candidate, &tile); candidate++)
		if (!gpu_kernel_make(arch, family, dtype, args, &tile, ret_kernel))
			return 0;
	return 1;
}

static void forward_grid(const struct gpu_kernel *k, const struct abi_fwd_args *a, uint32_t grid[3])
{
	int32_t group = a->nhead_q / a->nhead_k;
	int32_t n_splits = k->family == ABI_FWD_SPLITKV ? max32(a->n_splits, 1) : 1;

	grid[0] = (uint32_t)ceil_div(a->sequences.seqlen_q_max * (k->pack ? group : 1),
				     k->tile.tile_m) *
		  n_splits;
	grid[1] = k->pack ? a->nhead_k : a->nhead_q;
	grid[2] = a->sequences.batch;
}

static void backward_grid(const struct gpu_kernel *k, const struct abi_bwd_args *a,
			  uint32_t grid[3])
{
	int32_t parts = k->apart ? 2 : 1,
		n_keys = ceil_div(a->sequences.seqlen_k_max, k->tile.tile_n);

	grid[0] = parts * n_keys + ceil_div(a->sequences.seqlen_q_max, k->rows_n);
	if (k->bias_sum)
		grid[0] += n_keys * (rows_are_one(a)
					     ? 1
					     : ceil_div(a->sequences.seqlen_q_max, k->tile.tile_m));
	grid[1] = a->nhead_q;
	grid[2] = a->sequences.batch;
}

/* A wave a row of every head. */
static void rows_grid(const struct gpu_kernel *k, int64_t rows, int32_t batch, uint32_t grid[3])
{
	grid[0] = (uint32_t)((rows + k->tile.waves_m - 1) / k->tile.waves_m);
	grid[1] = 1;
	grid[2] = batch;
}

/* 16 lanes a row; a second row of blocks, one a head, sums dSink. */
static void dot_grid(const struct gpu_kernel *k, const struct abi_bwd_args *a, uint32_t grid[3])
{
	int64_t rows = (int64_t)a->sequences.seqlen_q_max * a->nhead_q, block = k->block[0] / 16;

	grid[0] = (uint32_t)((rows + block - 1) / block);
	grid[1] = a->dsink ? 2 : 1;
	grid[2] = a->sequences.batch;
	if (a->dsink)
		grid[0] = max32(grid[0], a->nhead_q);
}

void gpu_kernel_grid(const struct gpu_kernel *kernel, const void *args, uint32_t ret_grid[3])
{
	const struct abi_combine_args *combine = args;
	const struct abi_appendkv_args *append = args;
	const struct abi_bwd_args *bwd = args;

	switch (kernel->family) {
	case ABI_FWD_SPLITKV_COMBINE:
		rows_grid(kernel, (int64_t)combine->sequences.seqlen_q_max * combine->nhead_q,
			  combine->sequences.batch, ret_grid);
		break;
	case ABI_FWD_APPENDKV:
		rows_grid(
			kernel,
			2LL * append->seqlen_new * append->nhead_k +
				(append->q_rotated.data
					 ? (int64_t)append->sequences.seqlen_q_max * append->nhead_q
					 : 0),
			append->sequences.batch, ret_grid);
		break;
	case ABI_BWD_DQ_DK_DV:
		backward_grid(kernel, bwd, ret_grid);
		break;
	case ABI_BWD_DOT_DO_O:
		dot_grid(kernel, bwd, ret_grid);
		break;
	case ABI_BWD_CONVERT_DQ:
		rows_grid(kernel, (int64_t)bwd->sequences.seqlen_q_max * bwd->nhead_q,
			  bwd->sequences.batch, ret_grid);
		break;
	default:
		forward_grid(kernel, args, ret_grid);
	}
}

uint64_t gpu_kernel_workspace_bytes(const struct gpu_kernel *kernel, const void *args)
{
	(void)kernel;
	(void)args;
	return 0;
}
