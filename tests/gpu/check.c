/* SPDX-License-Identifier: MIT */
/*
 * The shared library that tests/gpu/abi.py loads. What is not from the archives: choosing a kernel
 * for argument structs alone, since the programs there drive kernels without a plan. A daemon never
 * does that: it goes from a problem's signature to a spec.
 */
#include <string.h>

#include <kernels/gpu_catalogue.h>

#define EXPORT __attribute__((visibility("default")))

/* So that the Python side can check its reading of the headers. */
extern const size_t fmha_gpu_check_sizes[6];
EXPORT const size_t fmha_gpu_check_sizes[6] = {
	sizeof(struct abi_fwd_args),      sizeof(struct abi_combine_args),
	sizeof(struct abi_appendkv_args), sizeof(struct abi_bwd_args),
	sizeof(struct gpu_tile),          sizeof(struct gpu_kernel),
};

const char *check_pipeline(int pipeline);
int check_make(const char *arch, int family, uint32_t dtype, const void *args,
	       const struct gpu_tile *tile, struct gpu_kernel *ret_kernel);
int check_tile(const char *arch, int family, uint32_t dtype, const void *args, int candidate,
	       struct gpu_tile *ret_tile);

EXPORT const char *check_pipeline(int pipeline)
{
	return pipeline >= 0 && pipeline < GPU_N_PIPELINES ? gpu_pipelines[pipeline].name : NULL;
}

static int is_masked(const struct abi_band *band)
{
	return band->mask != ABI_MASK_NONE && (band->window_left >= 0 || band->window_right >= 0);
}

static struct gpu_traits backward_traits(uint32_t dtype, const struct abi_bwd_args *a)
{
	return (struct gpu_traits){.dtype = dtype,
				   .mask = is_masked(&a->band),
				   .bias = a->bias.data      ? 1
					   : a->alibi_slopes ? 2
							     : 0,
				   .softcap = a->logits_soft_cap > 0,
				   .dropout = a->dropout.p_drop > 0,
				   .any_scale = !(a->scale > 0),
				   .dq_acc = a->dq_acc != NULL,
				   .dbias_sum = gpu_sums_dbias(a),
				   .tails = gpu_has_tails(a->hdim_q, a->hdim_v)};
}

static struct gpu_traits forward_traits(uint32_t dtype, const struct abi_fwd_args *a)
{
	return (struct gpu_traits){.dtype = dtype,
				   .mask = is_masked(&a->band),
				   .bias = a->bias.data      ? 1
					   : a->alibi_slopes ? 2
							     : 0,
				   .softcap = a->logits_soft_cap > 0,
				   .dropout = a->dropout.p_drop > 0,
				   .paged = a->cache.page_size > 0,
				   .descale = a->q_descale.data || a->k_descale.data ||
					      a->v_descale.data,
				   .any_scale = !(a->scale > 0),
				   .tails = gpu_has_tails(a->hdim_q, a->hdim_v)};
}

static int is_forward(int family)
{
	return family == ABI_FWD || family == ABI_FWD_SPLITKV || family == ABI_FWD_PAGEDKV ||
	       family == ABI_BATCH_PREFILL;
}

static struct gpu_traits traits_of(int family, uint32_t dtype, const void *args)
{
	int32_t hdim_v;

	switch (family) {
	case ABI_FWD_SPLITKV_COMBINE:
		hdim_v = ((const struct abi_combine_args *)args)->hdim_v;
		return (struct gpu_traits){.dtype = dtype, .tails = gpu_has_tails(hdim_v, hdim_v)};
	case ABI_BWD_DOT_DO_O:
	case ABI_BWD_CONVERT_DQ:
		return (struct gpu_traits){.dtype = dtype};
	case ABI_FWD_APPENDKV:
		return (struct gpu_traits){
			.dtype = dtype,
			.paged = ((const struct abi_appendkv_args *)args)->cache.page_size > 0};
	case ABI_BWD_DQ_DK_DV:
		return backward_traits(dtype, args);
	default:
		return forward_traits(dtype, args);
	}
}

EXPORT int check_make(const char *arch, int family, uint32_t dtype, const void *args,
		      const struct gpu_tile *tile, struct gpu_kernel *ret_kernel)
{
	const struct gpu_traits traits = traits_of(family, dtype, args);
	const struct gpu_arch *found = gpu_arch_find(arch);
	struct launch_record ignored;

	return !found || gpu_kernel_make(found, family, &traits, tile, ret_kernel) ||
	       ((tile->pipeline == GPU_AMD || tile->pipeline == GPU_AMD_DECODE) &&
		gpu_kernel_maps(ret_kernel, args, &ignored));
}

/* ---- the tiles for a problem ---- */

static uint8_t data_type_of(uint32_t dtype)
{
	static const uint8_t types[] = {SPEC_FP32, SPEC_FP16, SPEC_BF16, SPEC_FP8BF16, SPEC_BF8};

	return types[dtype];
}

static uint16_t padded(int32_t hdim)
{
	return (uint16_t)((hdim + 31) / 32 * 32);
}

/* A spec of the traits, whatever else the problem is. */
static struct kernel_spec spec_of(int family, const struct gpu_traits *t, const void *args)
{
	const struct abi_fwd_args *fwd = args;
	const struct abi_bwd_args *bwd = args;
	struct kernel_spec spec = {0};
	struct kernel_signature *s = &spec.signature;

	s->family = (uint8_t)family;
	s->data_type = data_type_of(t->dtype);
	s->mask = t->mask ? SPEC_MASK_GENERIC : SPEC_MASK_NO;
	s->bias = t->bias == 1 ? SPEC_BIAS_BIAS : t->bias ? SPEC_BIAS_ALIBI : SPEC_BIAS_NO;
	s->logits = (uint8_t)t->softcap;
	s->dropout = (uint8_t)t->dropout;
	s->paged_kv = (uint8_t)t->paged;
	s->hdim_q = s->hdim_v = 32;
	if (family == ABI_BWD_DQ_DK_DV) {
		s->hdim_q = padded(bwd->hdim_q);
		s->hdim_v = padded(bwd->hdim_v);
	} else if (is_forward(family)) {
		s->hdim_q = padded(fwd->hdim_q);
		s->hdim_v = padded(fwd->hdim_v);
	}
	return spec;
}

/* 0 first: packed tiles are for few rows, but plans choose them for many, too; the scalar core is for whoever finds nothing
 * else. */
static int rank(const struct spec_row *row, int64_t n_rows)
{
	int scalar = row->pipeline <= GPU_SCALAR_PACK, pack = gpu_pipelines[row->pipeline].pack;

	if (row->pipeline ==
	    GPU_WGMMA) /* takes more than arguments: hopper.py, and through fmhad */
		return -1;
	if (pack && row->tile_m > 16 && row->tile_m >= 2 * n_rows)
		return -1;
	return 4 * scalar + (!pack ? 2 : n_rows > 64 ? 3 : n_rows > row->tile_m);
}

EXPORT int check_tile(const char *arch_name, int family, uint32_t dtype, const void *args,
		      int candidate, struct gpu_tile *ret_tile)
{
	const struct gpu_traits traits = traits_of(family, dtype, args);
	const struct kernel_spec plain = spec_of(family, &traits, args);
	const struct abi_fwd_args *fwd = args;
	int64_t n_rows = is_forward(family) && fwd->nhead_k ? (int64_t)fwd->sequences.seqlen_q_max *
								      (fwd->nhead_q / fwd->nhead_k)
							    : 0;
	size_t a = 0;

	while (a < gpu_backend.n_archs && strcmp(gpu_backend.archs[a].name, arch_name) != 0)
		a++;
	for (int r = 0; a < gpu_backend.n_archs && r < 8; r++)
		for (size_t i = 0; i < gpu_backend.n_rows; i++) {
			const struct spec_row *row = &gpu_backend.rows[i];
			struct kernel_spec spec = plain;
			enum spec_field ignored;

			if (rank(row, n_rows) != r || !(row->families >> family & 1) ||
			    !(row->cores & gpu_backend.archs[a].cores) ||
			    !(row->data_types >> spec.signature.data_type & 1) ||
			    row->hdim_most < spec.signature.hdim_q ||
			    row->hdim_most < spec.signature.hdim_v ||
			    (row->without >> SPEC_FIELD_dropout & 1 && traits.dropout))
				continue;
			gpu_backend.cut(&gpu_backend.archs[a], row, &spec);
			if (gpu_backend.misfit(&gpu_backend.archs[a], row->pipeline, &spec,
					       &ignored) ||
			    candidate--)
				continue;
			*ret_tile = (struct gpu_tile){row->pipeline,     spec.tile.tile_m0,
						      spec.tile.tile_n0, spec.tile.tile_k0max,
						      spec.tile.tile_n1, spec.tile.wave_m0,
						      spec.tile.wave_n0, spec.block_per_cu};
			return 0;
		}
	return 1;
}
