// SPDX-License-Identifier: MIT
/*
 * specs/rules/gpu.json repeats the tile tables and the LDS sum of kernels/gpu/gpu_kernel.c, so that
 * kernels can be enumerated without it. The two are held together here, in both directions.
 */
#include <gpu_kernel.h>

#include "specs_test.h"

static int is_forward(int family)
{
	return family == SPEC_FWD || family == SPEC_FWD_SPLITKV || family == SPEC_FWD_PAGEDKV ||
	       family == SPEC_BATCH_PREFILL;
}

static uint32_t abi_dtype_of(int data_type)
{
	switch (data_type) {
	case SPEC_FP32:
		return ABI_F32;
	case SPEC_FP16:
		return ABI_F16;
	case SPEC_BF16:
		return ABI_BF16;
	case SPEC_BF8:
		return ABI_E5M2;
	default:
		return ABI_E4M3;
	}
}

/* A problem of the spec's features; pointers only say what is there. */
static void fill_args(const struct kernel_spec *spec, struct abi_fwd_args *args)
{
	static float present;
	const struct kernel_signature *s = &spec->signature;

	*args = (struct abi_fwd_args){.nhead_q = 8, .nhead_k = 2, .scale = 0.125f};
	args->hdim_q = s->hdim_q;
	args->hdim_v = s->hdim_v;
	args->sequences.batch = 2;
	args->sequences.seqlen_q_max = 300;
	args->sequences.seqlen_k_max = 300;
	args->band = (struct abi_band){.window_left = -1, .window_right = -1};
	if (s->mask != SPEC_MASK_NO)
		args->band = (struct abi_band){ABI_MASK_TOP_LEFT, -1, 0, 0};
	if (s->bias == SPEC_BIAS_BIAS)
		args->bias.data = &present;
	if (s->bias == SPEC_BIAS_ALIBI)
		args->alibi_slopes = &present;
	if (s->dropout)
		args->dropout.p_drop = 0.1f;
	if (s->logits)
		args->logits_soft_cap = 30;
	if (s->qscale != SPEC_QSCALE_NO)
		args->q_descale.data = &present;
	if (s->paged_kv)
		args->cache.page_size = 16;
	args->dtype = (abi_i32)abi_dtype_of(s->data_type);
}

/* The small families look at nothing of this but the sizes, or not even these. */
static void fill_backward(const struct kernel_spec *spec, struct abi_bwd_args *args)
{
	static float present;
	const struct kernel_signature *s = &spec->signature;

	*args = (struct abi_bwd_args){.nhead_q = 8, .nhead_k = 2, .scale = 0.125f};
	args->hdim_q = s->hdim_q;
	args->hdim_v = s->hdim_v;
	args->sequences.batch = 2;
	args->band = (struct abi_band){.window_left = -1, .window_right = -1};
	args->dtype = (abi_i32)abi_dtype_of(s->data_type);
	if (s->mask != SPEC_MASK_NO)
		args->band = (struct abi_band){ABI_MASK_TOP_LEFT, -1, 0, 0};
	if (s->bias == SPEC_BIAS_BIAS)
		args->bias.data = &present;
	if (s->bias == SPEC_BIAS_ALIBI)
		args->alibi_slopes = &present;
	if (s->dropout)
		args->dropout.p_drop = 0.1f;
	if (s->logits)
		args->logits_soft_cap = 30;
}

static void fill_tile(const struct kernel_spec *spec, struct gpu_tile *tile)
{
	*tile = (struct gpu_tile){.tile_m = spec->tile.tile_m0,
				  .tile_n = spec->tile.tile_n0,
				  .hdim_q = spec->tile.tile_k0max,
				  .hdim_v = spec->tile.tile_n1,
				  .waves_m = spec->tile.wave_m0,
				  .waves_n = spec->tile.wave_n0,
				  .blocks_per_cu = spec->block_per_cu};
	(void)snprintf(tile->pipeline, sizeof(tile->pipeline), "%s",
		       spec_word(catalog, SPEC_FIELD_pipeline, spec->pipeline));
}

static struct spec_space *gpu_space(int arch)
{
	struct spec_space_options options = {.arch = spec_arch_name(catalog, arch), .rules = "gpu"};

	return make_space(&options);
}

static int has_gpu_rules(int arch)
{
	const char *rules;

	for (int i = 0; (rules = spec_arch_rules(catalog, arch, i)); i++)
		if (strcmp(rules, "gpu") == 0)
			return 1;
	return 0;
}

/* What can be enumerated can be compiled. */
static void every_spec_makes_a_kernel(void **state)
{
	(void)state;
	for (int arch = 0; arch < spec_arch_count(catalog); arch++) {
		struct spec_space *space;
		struct spec_iter *iter;
		const struct kernel_spec *spec;
		uint64_t n = 0;

		if (!has_gpu_rules(arch) || !is_walked(arch, "gpu"))
			continue;
		space = gpu_space(arch);
		iter = spec_iter_new(space, NULL);
		while ((spec = spec_iter_next(iter))) {
			union {
				struct abi_fwd_args fwd;
				struct abi_bwd_args bwd;
				struct abi_appendkv_args append;
			} args = {0};
			struct gpu_tile tile;
			struct gpu_kernel kernel;

			if (n++ % 97)
				continue;
			if (is_forward(spec->signature.family))
				fill_args(spec, &args.fwd);
			else
				fill_backward(spec, &args.bwd);
			fill_tile(spec, &tile);
			if (gpu_kernel_make(spec_arch_name(catalog, arch),
					    (enum abi_family)spec->signature.family,
					    abi_dtype_of(spec->signature.data_type), &args, &tile,
					    &kernel) != 0) {
				char name[SPEC_NAME_BYTES];

				(void)spec_name_format(catalog, spec, name);
				fail_msg("%s", name);
			}
		}
		assert_true(n > 1000);
		spec_iter_free(iter);
		spec_space_free(space);
	}
}

static int is_same(const struct gpu_tile *a, const struct gpu_tile *b)
{
	return strcmp(a->pipeline, b->pipeline) == 0 && a->tile_m == b->tile_m &&
	       a->tile_n == b->tile_n && a->hdim_q == b->hdim_q && a->hdim_v == b->hdim_v &&
	       a->waves_m == b->waves_m && a->waves_n == b->waves_n &&
	       a->blocks_per_cu == b->blocks_per_cu;
}

/* Every tile that gpu_kernel.c would take by itself for these args is one of the signature's. */
static void check_default_tiles(struct spec_iter *iter, const struct kernel_signature *signature,
				const char *arch, const void *args)
{
	enum abi_family family = (enum abi_family)signature->family;
	uint32_t dtype = abi_dtype_of(signature->data_type);
	const struct kernel_spec *spec;
	struct gpu_tile tile, has;
	struct gpu_kernel kernel;

	for (int c = 0; gpu_kernel_default_tile(arch, family, dtype, args, c, &tile) == 0; c++) {
		int found = 0;

		/* A row of the tables may be too large for this arch's LDS. */
		if (gpu_kernel_make(arch, family, dtype, args, &tile, &kernel) != 0)
			continue;
		spec_iter_restart_signature(iter, signature);
		while ((spec = spec_iter_next(iter))) {
			fill_tile(spec, &has);
			found |= is_same(&has, &tile);
		}
		if (!found)
			fail_msg("%s family %d type %u hdim %d: %s %dx%d waves %dx%d", arch,
				 (int)family, dtype, signature->hdim_q, tile.pipeline, tile.tile_m,
				 tile.tile_n, tile.waves_m, tile.waves_n);
	}
}

static void check_signature(struct spec_iter *iter, struct kernel_spec *wanted, const char *arch)
{
	struct abi_fwd_args fwd;
	struct abi_bwd_args bwd;

	wanted->signature.family = SPEC_FWD;
	fill_args(wanted, &fwd);
	check_default_tiles(iter, &wanted->signature, arch, &fwd);
	if (!wanted->signature.dropout) {
		fwd.sequences.seqlen_q_max = 1; /* few rows: packed */
		check_default_tiles(iter, &wanted->signature, arch, &fwd);
	}
	if (wanted->signature.data_type == SPEC_FP8BF16)
		return;
	fill_backward(wanted, &bwd);
	wanted->signature.family = SPEC_BWD_DQ_DK_DV;
	check_default_tiles(iter, &wanted->signature, arch, &bwd);
}

/* The families without features. */
static void check_small(struct spec_iter *iter, struct kernel_spec *wanted, const char *arch)
{
	static const int families[] = {SPEC_BWD_DOT_DO_O, SPEC_BWD_CONVERT_DQ};
	struct abi_bwd_args bwd;

	fill_backward(wanted, &bwd);
	for (int i = 0; i < 2; i++) {
		wanted->signature.family = (uint8_t)families[i];
		check_default_tiles(iter, &wanted->signature, arch, &bwd);
	}
}

static void every_default_tile_is_a_spec(void **state)
{
	static const int dtypes[] = {SPEC_FP32, SPEC_BF16, SPEC_FP8BF16};
	static const int hdims[] = {32, 64, 96, 128, 192, 256};

	(void)state;
	for (int arch = 0; arch < spec_arch_count(catalog); arch++) {
		const char *name = spec_arch_name(catalog, arch);
		struct kernel_spec wanted;
		struct spec_space *space;
		struct spec_iter *iter;

		if (!has_gpu_rules(arch))
			continue;
		space = gpu_space(arch);
		spec_init(&wanted);
		iter = spec_iter_new_signature(space, &wanted.signature);
		for (int i = 0; i < 3 * 6; i++) {
			wanted.signature.data_type = (uint8_t)dtypes[i % 3];
			wanted.signature.hdim_q = (uint16_t)hdims[i / 3];
			wanted.signature.hdim_v = (uint16_t)hdims[i / 3];
			for (int features = 0; features < 16; features++) {
				wanted.signature.bias = features & 1 ? SPEC_BIAS_BIAS
								     : SPEC_BIAS_NO;
				wanted.signature.dropout = features >> 1 & 1;
				wanted.signature.logits = features >> 2 & 1;
				wanted.signature.mask = features >> 3 ? SPEC_MASK_GENERIC
								      : SPEC_MASK_NO;
				check_signature(iter, &wanted, name);
			}
			wanted.signature.bias = SPEC_BIAS_NO;
			wanted.signature.mask = SPEC_MASK_NO;
			wanted.signature.dropout = wanted.signature.logits = 0;
			if (dtypes[i % 3] != SPEC_FP8BF16)
				check_small(iter, &wanted, name);
		}
		spec_iter_free(iter);
		spec_space_free(space);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_spec_makes_a_kernel),
		cmocka_unit_test(every_default_tile_is_a_spec),
	};

	return cmocka_run_group_tests(tests, load_catalog, free_catalog);
}
