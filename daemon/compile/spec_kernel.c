/* SPDX-License-Identifier: MIT */
#include "spec_kernel.h"

#include <stdio.h>
#include <string.h>

/* Stands for a tensor that is there; never followed. */
static char placeholder[1];
#define PRESENT ((void *)placeholder)

union any_args {
	struct abi_fwd_args fwd;
	struct abi_combine_args combine;
	struct abi_appendkv_args appendkv;
	struct abi_bwd_args bwd;
};

struct types {
	uint32_t input, output;
};

static struct types types_of(enum spec_dtype dtype)
{
	switch (dtype) {
	case SPEC_FP32:
		return (struct types){ABI_F32, ABI_F32};
	case SPEC_FP16:
		return (struct types){ABI_F16, ABI_F16};
	case SPEC_FP8FP16:
		return (struct types){ABI_E4M3, ABI_F16};
	case SPEC_FP8FP32:
		return (struct types){ABI_E4M3, ABI_F32};
	case SPEC_FP8:
	case SPEC_FP8BF16:
		return (struct types){ABI_E4M3, ABI_BF16};
	case SPEC_BF8:
		return (struct types){ABI_E5M2, ABI_BF16};
	default:
		return (struct types){ABI_BF16, ABI_BF16};
	}
}

static struct abi_band band_of(const struct kernel_signature *s)
{
	struct abi_band band = {.window_left = -1, .window_right = -1};

	if (s->mask == SPEC_MASK_NO)
		return band;
	band.mask = s->mask == SPEC_MASK_TOP_LEFT ? ABI_MASK_TOP_LEFT : ABI_MASK_BOTTOM_RIGHT;
	band.window_right = 0;
	if (s->mask == SPEC_MASK_GENERIC)
		band.window_left = 64;
	return band;
}

static struct abi_dropout dropout_of(const struct kernel_signature *s)
{
	struct abi_dropout dropout = {0};

	if (s->dropout) {
		dropout.p_drop = 0.5f;
		dropout.p_keep_inverse = 2.0f;
	}
	return dropout;
}

static struct abi_sequences sequences_of(const struct kernel_signature *s, int pack)
{
	struct abi_sequences sequences = {
		.batch = 1,
		.seqlen_q_max = pack ? 1 : 4096,
		.seqlen_k_max = 4096,
		.total_q = pack ? 1 : 4096,
		.total_k = 4096,
	};

	if (s->mode == SPEC_MODE_GROUP)
		sequences.seqstart_q = sequences.seqstart_k = PRESENT;
	return sequences;
}

static struct abi_kv_cache cache_of(const struct kernel_signature *s)
{
	struct abi_kv_cache cache = {0};

	if (!s->paged_kv)
		return cache;
	cache.page_size = s->page_size > 1 ? s->page_size : 16;
	cache.n_pages = 4096;
	cache.layout = s->kv_memory_layout == SPEC_KV_LINEAR ? ABI_KV_LINEAR : ABI_KV_VECTORIZED;
	if (s->kv_lookup_table == SPEC_KV_VLLM)
		cache.block_table = PRESENT;
	else
		cache.kv_indptr = cache.kv_page_indices = cache.kv_last_page_len = PRESENT;
	return cache;
}

static struct abi_descale descale_of(const struct kernel_signature *s)
{
	struct abi_descale descale = {0};

	if (s->qscale == SPEC_QSCALE_NO)
		return descale;
	descale.data = PRESENT;
	descale.block = s->qscale == SPEC_QSCALE_BLOCKSCALE ? 128 : 0;
	descale.per_page = s->qscale == SPEC_QSCALE_KV_BLOCKSCALE;
	return descale;
}

static void fill_fwd(struct abi_fwd_args *a, const struct kernel_signature *s, int pack)
{
	struct types types = types_of((enum spec_dtype)s->data_type);

	a->q.data = a->k.data = a->v.data = a->o.data = PRESENT;
	if (s->lse)
		a->lse.data = PRESENT;
	if (s->bias == SPEC_BIAS_BIAS)
		a->bias.data = PRESENT;
	if (s->bias == SPEC_BIAS_ALIBI)
		a->alibi_slopes = PRESENT;
	if (s->sink)
		a->sink = PRESENT;
	if (s->family == SPEC_FWD_SPLITKV) {
		a->o_acc = a->lse_acc = PRESENT;
		a->n_splits = 2;
		a->split_size = 2048;
	}
	a->q_descale = a->k_descale = a->v_descale = descale_of(s);
	a->sequences = sequences_of(s, pack);
	a->cache = cache_of(s);
	a->band = band_of(s);
	a->dropout = dropout_of(s);
	a->nhead_q = 8;
	a->nhead_k = pack ? 1 : 8;
	a->hdim_q = s->hdim_q;
	a->hdim_v = s->hdim_v;
	a->min_seqlen_q = s->skip_min_seqlen_q;
	a->scale = 1.0f;
	a->logits_soft_cap = s->logits ? 1.0f : 0.0f;
	a->dtype = (abi_i32)types.input;
	a->o_dtype = (abi_i32)types.output;
	a->bias_dtype = a->o_dtype;
}

static void fill_bwd(struct abi_bwd_args *a, const struct kernel_signature *s)
{
	a->q.data = a->k.data = a->v.data = a->o.data = a->d_o.data = PRESENT;
	a->dq.data = a->dk.data = a->dv.data = a->lse.data = a->d.data = PRESENT;
	if (s->bias == SPEC_BIAS_BIAS)
		a->bias.data = PRESENT;
	if (s->bias == SPEC_BIAS_ALIBI)
		a->alibi_slopes = PRESENT;
	if (s->dbias)
		a->dbias.data = PRESENT;
	a->sequences = sequences_of(s, 0);
	a->band = band_of(s);
	a->dropout = dropout_of(s);
	if (s->dropout_variant == SPEC_DROPOUT_WG16_STORERANDVAL)
		a->dropout.randval.data = PRESENT;
	a->nhead_q = a->nhead_k = 8;
	a->hdim_q = s->hdim_q;
	a->hdim_v = s->hdim_v;
	a->deterministic = s->deterministic;
	a->scale = 1.0f;
	a->logits_soft_cap = s->logits ? 1.0f : 0.0f;
	a->dtype = (abi_i32)types_of((enum spec_dtype)s->data_type).input;
	a->bias_dtype = a->dtype;
}

static void fill_combine(struct abi_combine_args *a, const struct kernel_signature *s)
{
	a->o_parts.data = a->o.data = PRESENT;
	a->lse_parts.data = PRESENT;
	if (s->lse)
		a->lse.data = PRESENT;
	a->sequences = sequences_of(s, 0);
	a->n_splits = 2;
	a->nhead_q = 8;
	a->hdim_v = s->hdim_v;
	a->o_parts_dtype = ABI_F32;
	a->o_dtype = (abi_i32)types_of((enum spec_dtype)s->data_type).output;
}

static void fill_appendkv(struct abi_appendkv_args *a, const struct kernel_signature *s)
{
	a->k_new.data = a->v_new.data = a->k.data = a->v.data = PRESENT;
	if (s->rope != SPEC_ROPE_NONE)
		a->q.data = a->q_rotated.data = a->rotary_cos.data = a->rotary_sin.data = PRESENT;
	a->sequences = sequences_of(s, 0);
	a->sequences.seqlen_k = PRESENT;
	a->cache = cache_of(s);
	a->seqlen_new = 1;
	a->rope = (abi_i32)s->rope;
	a->rotary_dim = 32;
	a->rotary_max_pos = 4096;
	a->nhead_q = a->nhead_k = 8;
	a->hdim_q = s->hdim_q;
	a->hdim_v = s->hdim_v;
	a->dtype = (abi_i32)types_of((enum spec_dtype)s->data_type).input;
	a->rotary_dtype = ABI_F32;
}

int spec_kernel(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		struct gpu_kernel *ret_kernel)
{
	const char *arch = spec_word(catalog, SPEC_FIELD_gfx_arch, spec->gfx_arch);
	const char *pipeline = spec_word(catalog, SPEC_FIELD_pipeline, spec->pipeline);
	const struct kernel_signature *s = &spec->signature;
	struct gpu_tile tile = {.tile_m = spec->tile.tile_m0,
				.tile_n = spec->tile.tile_n0,
				.hdim_q = spec->tile.tile_k0max,
				.hdim_v = spec->tile.tile_n1,
				.waves_m = spec->tile.wave_m0,
				.waves_n = spec->tile.wave_n0,
				.blocks_per_cu = spec->block_per_cu};
	enum abi_family family = (enum abi_family)s->family;
	struct types types = types_of((enum spec_dtype)s->data_type);
	union any_args args;
	size_t n;
	int pack;

	if (!arch || !pipeline)
		return 1;
	n = strlen(pipeline);
	pack = n > 5 && strcmp(pipeline + n - 5, "_pack") == 0;
	(void)snprintf(tile.pipeline, sizeof(tile.pipeline), "%s", pipeline);
	memset(&args, 0, sizeof(args));
	switch (family) {
	case ABI_FWD_SPLITKV_COMBINE:
		fill_combine(&args.combine, s);
		return gpu_kernel_make(arch, family, types.output, &args, &tile, ret_kernel);
	case ABI_FWD_APPENDKV:
		fill_appendkv(&args.appendkv, s);
		break;
	case ABI_BWD_DOT_DO_O:
	case ABI_BWD_DQ_DK_DV:
	case ABI_BWD_CONVERT_DQ:
		fill_bwd(&args.bwd, s);
		break;
	default:
		fill_fwd(&args.fwd, s, pack);
		break;
	}
	return gpu_kernel_make(arch, family, types.input, &args, &tile, ret_kernel);
}
