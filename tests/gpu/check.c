/* SPDX-License-Identifier: MIT */
/*
 * The shared library that tests/gpu/abi.py loads. What is not from the archives: choosing a kernel
 * for argument structs alone, since the programs there drive kernels without a plan. A daemon never
 * does that: it goes from a problem's signature to a spec.
 */
#include <stdbool.h>
#include <string.h>

#include <catalogue/gpu_catalogue.h>

#include "traits.h"

#define EXPORT __attribute__((visibility("default")))

/* What a launch is beside its arguments and its code. */
struct check_launch {
	uint64_t maps[4][16]; /* struct launch_tensor_map: at a multiple of 64 bytes */
	uint32_t grid[3], block[3];
	uint32_t lds_bytes;
	uint32_t n_maps;
};
_Static_assert(sizeof(((struct check_launch *)0)->maps) ==
		       LAUNCH_MAPS * sizeof(struct launch_tensor_map),
	       "room for the maps");

/* So that the Python side can check its reading of the headers. */
extern const size_t fmha_gpu_check_sizes[7];
EXPORT const size_t fmha_gpu_check_sizes[7] = {
	sizeof(struct abi_fwd_args),      sizeof(struct abi_combine_args),
	sizeof(struct abi_appendkv_args), sizeof(struct abi_bwd_args),
	sizeof(struct gpu_tile),          sizeof(struct gpu_kernel),
	sizeof(struct check_launch),
};

const char *check_pipeline(int pipeline);
int check_make(const char *arch, int family, uint32_t dtype, const void *args,
	       const struct gpu_tile *tile, int approximate, struct gpu_kernel *ret_kernel);
int check_tile(const char *arch, int family, uint32_t dtype, const void *args, int candidate,
	       struct gpu_tile *ret_tile);
const char *check_launch(const struct gpu_kernel *kernel, uint32_t units, const void *args,
			 launch_encoder encode, struct check_launch *ret_launch);
int check_overlap(const struct check_launch *l, launch_launcher launch, void *function,
		  void *stream, void **parameters);

EXPORT const char *check_pipeline(int pipeline)
{
	return pipeline >= 0 && pipeline < GPU_N_PIPELINES ? gpu_pipelines[pipeline].name : NULL;
}

static int is_forward(int family)
{
	return family == ABI_FWD || family == ABI_FWD_SPLITKV || family == ABI_FWD_PAGEDKV ||
	       family == ABI_BATCH_PREFILL;
}

/* What a problem says of traits, as arguments have it. */
static void set_scores(struct fmha_problem *p, const struct abi_band *band, float cap,
		       const struct abi_dropout *dropout)
{
	bool hides = band->window_left >= 0 || band->window_right >= 0;

	p->mask = hides ? (uint32_t)band->mask : FMHA_MASK_NONE;
	p->window_left = band->window_left;
	p->window_right = band->window_right;
	p->sink_tokens = band->sink_tokens;
	p->logits_soft_cap = cap;
	p->dropout_p = dropout->p_drop;
}

static void set_tensor(struct fmha_problem *p, enum fmha_tensor_role role, const void *data)
{
	p->tensor[role].buffer = data != NULL;
}

static void set_forward(struct fmha_problem *p, const struct abi_fwd_args *a)
{
	set_scores(p, &a->band, a->logits_soft_cap, &a->dropout);
	set_tensor(p, FMHA_T_BIAS, a->bias.data);
	set_tensor(p, FMHA_T_MASK_INTERVALS, a->mask_data.intervals.data);
	set_tensor(p, FMHA_T_MASK_BITS, a->mask_data.bits.data);
	set_tensor(p, FMHA_T_ALIBI_SLOPES, a->alibi_slopes);
	set_tensor(p, FMHA_T_Q_DESCALE, a->q_descale.data);
	set_tensor(p, FMHA_T_K_DESCALE, a->k_descale.data);
	set_tensor(p, FMHA_T_V_DESCALE, a->v_descale.data);
	p->descale_block_k = a->k_descale.data ? a->k_descale.block : a->v_descale.block;
	p->descale_per_page = (uint32_t)(a->k_descale.data ? a->k_descale.per_page
							   : a->v_descale.per_page);
	p->page_size = a->cache.page_size;
	p->topk = a->chosen.n;
	p->v_in_k = a->v_in_k;
	p->kv_layout = (uint32_t)a->cache.layout;
	p->scale = a->scale;
	p->hdim_q = a->hdim_q;
	p->hdim_v = a->hdim_v;
	p->q.dtype = (uint32_t)a->dtype;
	p->k.dtype = (uint32_t)(a->kv_dtype ? a->kv_dtype : a->dtype);
}

static void set_backward(struct fmha_problem *p, const struct abi_bwd_args *a)
{
	set_scores(p, &a->band, a->logits_soft_cap, &a->dropout);
	set_tensor(p, FMHA_T_BIAS, a->bias.data);
	set_tensor(p, FMHA_T_MASK_INTERVALS, a->mask_data.intervals.data);
	set_tensor(p, FMHA_T_MASK_BITS, a->mask_data.bits.data);
	set_tensor(p, FMHA_T_ALIBI_SLOPES, a->alibi_slopes);
	set_tensor(p, FMHA_T_DBIAS, a->dbias.data);
	p->scale = a->scale;
	p->hdim_q = a->hdim_q;
	p->hdim_v = a->hdim_v;
}

static struct traits traits_for(int family, uint32_t dtype, const void *args)
{
	struct fmha_problem p = {0};
	struct traits traits;

	if (family == ABI_FWD_SPLITKV_COMBINE)
		p.hdim_v = ((const struct abi_combine_args *)args)->hdim_v;
	else if (family == ABI_FWD_APPENDKV)
		p.page_size = ((const struct abi_appendkv_args *)args)->cache.page_size;
	else if (is_forward(family))
		set_forward(&p, args);
	else
		set_backward(&p, args);
	traits_of(&p, (enum abi_family)family, dtype, args, &traits);
	if (family == ABI_BWD_DQ_DK_DV)
		traits.dq_acc = ((const struct abi_bwd_args *)args)->dq_acc != NULL;
	return traits;
}

/* @approximate: soft caps may be, which no argument says. */
EXPORT int check_make(const char *arch, int family, uint32_t dtype, const void *args,
		      const struct gpu_tile *tile, int approximate, struct gpu_kernel *ret_kernel)
{
	struct traits traits = traits_for(family, dtype, args);
	const struct gpu_arch *found = gpu_arch_find(arch);
	struct launch_record ignored;

	traits.cap_approx = traits.softcap && approximate;
	return !found || gpu_kernel_make(found, family, &traits, tile, ret_kernel) ||
	       ((tile->pipeline == GPU_AMD || tile->pipeline == GPU_AMD_DECODE) &&
		gpu_kernel_maps(ret_kernel, args, &ignored));
}

/* As a device does. Return: NULL, or why it is not to be launched. */
EXPORT const char *check_launch(const struct gpu_kernel *kernel, uint32_t units, const void *args,
				launch_encoder encode, struct check_launch *ret_launch)
{
	struct launch_record record = {0};
	const char *why = gpu_kernel_launch(kernel, units, args, &record);

	if (why)
		return why;
	for (uint32_t i = 0; i < record.n_maps; i++) {
		struct launch_tensor_map map;

		if (launch_encode_map(encode, &record.maps[i], args, &map))
			return "the driver makes no tensor map";
		memcpy(ret_launch->maps[i], &map, sizeof(map));
	}
	memcpy(ret_launch->grid, record.grid, sizeof(record.grid));
	memcpy(ret_launch->block, record.block, sizeof(record.block));
	ret_launch->lds_bytes = record.lds_bytes;
	ret_launch->n_maps = record.n_maps;
	return NULL;
}

/* Of a kernel that may begin while the one before it runs. Return: the driver's status. */
EXPORT int check_overlap(const struct check_launch *l, launch_launcher launch, void *function,
			 void *stream, void **parameters)
{
	struct launch_record record = {.lds_bytes = l->lds_bytes};

	memcpy(record.grid, l->grid, sizeof(record.grid));
	memcpy(record.block, l->block, sizeof(record.block));
	return launch_overlapping(launch, function, &record, stream, parameters);
}

/* ---- the tiles for a problem ---- */

static uint8_t data_type_of(uint32_t dtype)
{
	static const uint8_t types[] = {
		[ABI_F32] = SPEC_FP32, [ABI_F16] = SPEC_FP16, [ABI_BF16] = SPEC_BF16,
		[ABI_E4M3] = SPEC_FP8, [ABI_E5M2] = SPEC_BF8, [ABI_I8] = SPEC_INT8};

	return types[dtype];
}

/* As dispatch does where it has halves of columns. */
static uint16_t padded(int32_t hdim, int32_t other)
{
	int32_t most = hdim > other ? hdim : other;

	if (most > 256)
		return hdim > 512 ? 576 : most > 384 ? 512 : 384;
	return (uint16_t)((hdim + 31) / 32 * 32);
}

/* A spec that has the type and the head dims. */
static struct kernel_spec spec_of(int family, uint32_t dtype, const void *args)
{
	const struct abi_fwd_args *fwd = args;
	const struct abi_bwd_args *bwd = args;
	struct kernel_spec spec = {0};
	struct kernel_signature *s = &spec.signature;

	s->family = (uint8_t)family;
	s->data_type = data_type_of(dtype);
	s->hdim_q = s->hdim_v = 32;
	if (family == ABI_BWD_DQ_DK_DV) {
		s->hdim_q = padded(bwd->hdim_q, bwd->hdim_v);
		s->hdim_v = padded(bwd->hdim_v, bwd->hdim_q);
	} else if (is_forward(family)) {
		s->hdim_q = padded(fwd->hdim_q, fwd->hdim_v);
		s->hdim_v = padded(fwd->hdim_v, fwd->hdim_q);
	}
	return spec;
}

/* 0 first: packed tiles are for few rows, but plans choose them for many, too; the scalar core is for whoever finds nothing
 * else. */
static int rank(const struct spec_row *row, int64_t n_rows)
{
	int scalar = row->pipeline <= GPU_SCALAR_PACK, pack = gpu_pipelines[row->pipeline].pack;

	/* These take more than arguments: hopper.py, latent.py, and through fmhad. */
	if (row->pipeline == GPU_WGMMA || row->pipeline == GPU_LATENT || row->pipeline == GPU_WIDE)
		return -1;
	if (pack && row->tile_m > 16 && row->tile_m >= 2 * n_rows)
		return -1;
	return 4 * scalar + (!pack ? 2 : n_rows > 64 ? 3 : n_rows > row->tile_m);
}

EXPORT int check_tile(const char *arch_name, int family, uint32_t dtype, const void *args,
		      int candidate, struct gpu_tile *ret_tile)
{
	const struct traits traits = traits_for(family, dtype, args);
	const struct kernel_spec plain = spec_of(family, dtype, args);
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
			    (row->without & TRAIT_BIT(dropout) && traits.dropout))
				continue;
			gpu_backend.cut(&gpu_backend.archs[a], row, &spec);
			if (gpu_backend.misfit(&gpu_backend.archs[a], row->pipeline, &spec, &traits,
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
