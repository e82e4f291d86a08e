// SPDX-License-Identifier: MIT
/* The catalogues of this build: what they offer can be compiled, and what relatives share. */
#include "specs_test.h"

#include <kernels/cpu_kernels.h>
#include <catalogue/gpu_catalogue.h>
#include <specs/validate.h>

static int is_gpu(int arch)
{
	return strcmp(spec_arch_rules(catalog, arch, 0), "gpu") == 0;
}

static struct spec_space *own_space(int arch)
{
	struct spec_space_options options = SPEC_SPACE_OPTIONS(spec_arch_name(catalog, arch));

	return make_space(&options);
}

static void make_kernel(int arch, const struct kernel_spec *spec)
{
	const char *pipeline = spec_word(catalog, SPEC_FIELD_pipeline, spec->pipeline);
	const struct gpu_arch *gpu = gpu_arch_find(spec_arch_name(catalog, arch));
	struct gpu_kernel kernel;
	struct traits traits;
	char name[SPEC_NAME_BYTES];

	(void)spec_name_format(catalog, spec, name);
	spec_traits(&spec->signature, &traits);
	if (gpu_kernel_of_spec(gpu->name, pipeline, spec, &traits, &kernel))
		fail_msg("%s: no kernel", name);
	if (kernel.lds_bytes > gpu->lds_bytes || kernel.block[0] % (uint32_t)gpu->wave)
		fail_msg("%s: LDS %u, block %u", name, kernel.lds_bytes, kernel.block[0]);
	if (!strstr(kernel.build.name, pipeline))
		fail_msg("%s is %s", name, kernel.build.name);
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

		if (!is_gpu(arch) || !is_walked(arch, "gpu"))
			continue;
		space = own_space(arch);
		iter = spec_iter_new(space, NULL);
		while ((spec = spec_iter_next(iter)))
			if (n++ % 97 == 0)
				make_kernel(arch, spec);
		assert_true(n > 1000);
		spec_iter_free(iter);
		spec_space_free(space);
	}
}

/* Kernels that differ in their names differ in their code. */
static int compare_texts(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static void a_name_is_a_piece_of_code(void **state)
{
	struct spec_space *space = own_space(spec_arch_find(catalog, "sm_90a"));
	struct spec_iter *iter = spec_iter_new(space, NULL);
	char **names = calloc(spec_space_count(space), sizeof(*names));
	const struct kernel_spec *spec;
	size_t n = 0;

	(void)state;
	while ((spec = spec_iter_next(iter))) {
		const char *pipeline = spec_word(catalog, SPEC_FIELD_pipeline, spec->pipeline);
		struct gpu_kernel kernel;
		struct traits traits;

		spec_traits(&spec->signature, &traits);
		if (!gpu_kernel_of_spec("sm_90a", pipeline, spec, &traits, &kernel))
			names[n++] = strdup(kernel.build.name);
	}
	assert_true(n > 50000);
	qsort(names, n, sizeof(*names), compare_texts);
	for (size_t i = 1; i < n; i++)
		if (strcmp(names[i - 1], names[i]) == 0)
			fail_msg("%s has two names", names[i]);
	for (size_t i = 0; i < n; i++)
		free(names[i]);
	free(names);
	spec_iter_free(iter);
	spec_space_free(space);
}

/* What people have written down is good still: old names lead to the code that ran under them. */
static void old_names_lead_to_their_kernel(void **state)
{
	static const struct {
		const char *old, *now;
	} names[] = {
		{"fwd-bf16-group-h128-gpu_wgmma-t128x128x128x128x128x128-r8x1x1-w16x16x16-p1111-"
		 "top_left-"
		 "no-lse-bpc1-sm_90a",
		 "fwd-bf16-h128-gpu_wgmma-t128x128x128x128x128x128-r8x1x1-w16x16x16-p1111-generic-"
		 "no-"
		 "bpc1-sm_90a"},
		{"fwd-fp8bf16-batch-h128-gpu_mma-t64x64x128x128x64x128-r4x1x1-w16x16x16-p1111-no-"
		 "bias-"
		 "drop-cap-skip-qs.kv_blockscale-bpc2-sm_90a",
		 "fwd-fp8-h128-gpu_mma-t64x64x128x128x64x128-r4x1x1-w16x16x16-p1111-no-bias-drop-"
		 "cap-"
		 "qs.pertensor-bpc2-sm_90a"},
		{"bwd_convert_dq-bf16-batch-h64-gpu_convert-t16x16x32x32x32x32-r4x1x1-w16x16x16-"
		 "p1111-no-"
		 "no-bpc1-sm_90a",
		 "bwd_convert_dq-bf16-h576-gpu_convert-t16x16x32x32x32x32-r4x1x1-w16x16x16-p1111-"
		 "no-no-"
		 "bpc1-sm_90a"},
		{"fwd_splitkv_combine-bf16-group-h64-cpu_rows-t32x64x64x64x64x64-r1x1x1-w1x16x1-"
		 "p1111-no-no-"
		 "lse-x86_64_v3",
		 "fwd_splitkv_combine-bf16-h576-cpu_rows-t32x576x576x576x576x576-r1x1x1-w1x16x1-"
		 "p1111-"
		 "no-no-x86_64_v3"},
		{"fwd-fp32-group-h64-cpu_flash-t96x512x64x64x512x64-r1x1x1-w6x16x1-p1111-generic-"
		 "alibi-"
		 "lse-drop-x86_64_v3",
		 "fwd-fp32-h64-cpu_flash-t96x512x64x64x512x64-r1x1x1-w6x16x1-p1111-no-no-x86_64_"
		 "v3"},
	};
	char name[SPEC_NAME_BYTES];

	(void)state;
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		struct fmha_error err = {0};
		struct kernel_spec spec;

		if (spec_name_parse(catalog, names[i].old, &spec, &err) < 0)
			fail_msg("%s: %s", names[i].old, err.msg);
		assert_int_equal(spec_validate(catalog, &spec, NULL), 0);
		spec_reduce(catalog, &spec);
		(void)spec_name_format(catalog, &spec, name);
		assert_string_equal(name, names[i].now);
		assert_true(spec_old_names_match(catalog, &spec, names[i].old));
		assert_false(spec_old_names_match(catalog, &spec, name));
		assert_true(spec_is_old_pattern(catalog, spec.gfx_arch, names[i].old));
		assert_false(spec_is_old_pattern(catalog, spec.gfx_arch, name));
	}
}

static void old_patterns_match_old_names(void **state)
{
	static const struct {
		const char *pattern;
		int matches;
	} patterns[] = {
		{"*", 1},
		{"fwd-bf16-*", 1},
		{"fwd-bf16-group-*", 1},
		{"fwd-bf16-*-h128-*", 1},
		{"*-generic-*", 1},
		{"*-top_left-*-lse-*", 1},
		{"*-group-*-lse-sink-*", 1},
		{"*-?roup-h128-gpu_wgmma-*-sm_90?", 1},
		{"fwd-bf16-group-h128-gpu_wgmma-*-generic-no-lse-sink-skip-bpc1-sm_90a", 1},
		{"*-sink-lse-*", 0},
		{"*-p1111-no-*", 0}, /* a mask is compiled in */
		{"*-drop-*", 0},
		{"*-det-*", 0},
		{"fwd-bf16-h128-*", 0},
		{"fwd-fp16-group-*", 0},
		{"fwd-bf16-group", 0},
		{"", 0},
	};
	struct fmha_error err = {0};
	struct kernel_spec spec;

	(void)state;
	assert_int_equal(spec_name_parse(catalog,
					 "fwd-bf16-h128-gpu_wgmma-t128x128x128x128x128x128-r8x1x1-"
					 "w16x16x16-p1111-generic-no-bpc1-sm_90a",
					 &spec, &err),
			 0);
	for (size_t i = 0; i < sizeof(patterns) / sizeof(patterns[0]); i++)
		if (spec_old_names_match(catalog, &spec, patterns[i].pattern) !=
		    patterns[i].matches)
			fail_msg("'%s'", patterns[i].pattern);
}

/* What a row of its own covers is what the list of all kernels has. */
static void candidates_are_those_of_the_list(void **state)
{
	struct spec_space *space = own_space(spec_arch_find(catalog, "gfx942"));
	struct spec_iter *iter = spec_iter_new(space, NULL), *some = spec_iter_new(space, NULL);
	int arch = spec_arch_find(catalog, "gfx942");
	struct kernel_spec found[SPEC_MAX_CANDIDATES];
	const struct kernel_spec *spec, *listed;
	uint64_t k = 0, n_found = 0;

	(void)state;
	while ((spec = spec_iter_next(iter))) {
		struct spec_head_dims dims = {spec->signature.hdim_q, spec->signature.hdim_v};
		struct traits wanted;
		const char *why;
		size_t n, at = 0;

		if (k++ % 101)
			continue;
		spec_traits(&spec->signature, &wanted);
		/* No name tells code apart by these. */
		wanted.tails = wanted.any_scale = 1;
		n = spec_candidates(catalog, arch, &wanted, dims, found, &why);
		n_found += n;
		spec_iter_restart_signature(some, &spec->signature);
		while ((listed = spec_iter_next(some))) {
			for (at = 0; at < n && spec_compare(&found[at], listed) != 0; at++) {
			}
			assert_true(at < n);
			memmove(&found[at], &found[at + 1], (--n - at) * sizeof(found[0]));
		}
		assert_int_equal(n, 0);
	}
	assert_true(n_found > 1000);
	spec_iter_free(iter);
	spec_iter_free(some);
	spec_space_free(space);
}

/* ---- CPU ---- */

static uint32_t abi_dtype_of(int data_type)
{
	static const uint8_t types[SPEC_N_DTYPES] = {
		[SPEC_FP32] = ABI_F32,     [SPEC_FP16] = ABI_F16,     [SPEC_BF16] = ABI_BF16,
		[SPEC_BF8] = ABI_E5M2,     [SPEC_FP8] = ABI_E4M3,     [SPEC_FP8FP16] = ABI_E4M3,
		[SPEC_FP8BF16] = ABI_E4M3, [SPEC_FP8FP32] = ABI_E4M3, [SPEC_INT8] = ABI_I8,
	};

	return types[data_type];
}

static int is_of_spec(const struct cpu_kernel *kernel, const struct kernel_spec *spec)
{
	const char *pipeline = spec_word(catalog, SPEC_FIELD_pipeline, spec->pipeline);

	return kernel->family == (enum abi_family)spec->signature.family &&
	       kernel->dtype == abi_dtype_of(spec->signature.data_type) &&
	       strcmp(kernel->pipeline, pipeline) == 0 &&
	       (!kernel->tile_m || kernel->tile_m == spec->tile.tile_m0);
}

/* A level's specs are its kernels, and its kernels its specs. */
static void check_level(enum cpu_level level)
{
	int arch = spec_arch_find(catalog, cpu_level_name(level));
	struct spec_space *space = own_space(arch);
	struct spec_iter *iter = spec_iter_new(space, NULL);
	const struct kernel_spec *spec;
	uint8_t has_spec[256] = {0};
	size_t n;
	const struct cpu_kernel *const *kernels = cpu_kernels(level, &n);

	assert_true(n < sizeof(has_spec));
	while ((spec = spec_iter_next(iter))) {
		size_t k = 0;

		while (k < n && !is_of_spec(kernels[k], spec))
			k++;
		if (k == n)
			fail_msg("%s: family %d type %d tile %d: no kernel", cpu_level_name(level),
				 spec->signature.family, spec->signature.data_type,
				 spec->tile.tile_m0);
		has_spec[k] = 1;
	}
	for (size_t k = 0; k < n; k++)
		if (!has_spec[k])
			fail_msg("%s: %s of family %d, %d rows: no spec", cpu_level_name(level),
				 kernels[k]->pipeline, (int)kernels[k]->family, kernels[k]->tile_m);
	spec_iter_free(iter);
	spec_space_free(space);
}

static void cpu_specs_are_cpu_kernels(void **state)
{
	(void)state;
	for (int level = 0; level < CPU_N_LEVELS; level++)
		check_level((enum cpu_level)level);
}

/* ---- both ---- */

static size_t count_specs(struct spec_iter *iter, const struct kernel_signature *signature)
{
	size_t n = 0;

	spec_iter_restart_signature(iter, signature);
	while (spec_iter_next(iter))
		n++;
	return n;
}

/* Whatever a problem asks for, no arch is without a kernel. */
static void every_signature_has_a_spec(void **state)
{
	static const uint8_t types[] = {SPEC_FP32, SPEC_BF16, SPEC_FP8BF16};
	static const uint8_t families[] = {SPEC_FWD, SPEC_FWD_SPLITKV, SPEC_BWD_DQ_DK_DV};

	(void)state;
	for (int arch = 0; arch < spec_arch_count(catalog); arch++) {
		struct spec_space *space = is_gpu(arch) ? own_space(arch) : NULL;
		struct kernel_signature s;
		struct spec_iter *iter;

		if (!space)
			continue;
		spec_signature_init(&s);
		iter = spec_iter_new_signature(space, &s);
		for (int i = 0; i < 3 * 3 * 5 * 16; i++) {
			struct kernel_signature wanted = s;

			wanted.family = families[i % 3];
			wanted.data_type = types[i / 3 % 3];
			wanted.hdim_q = wanted.hdim_v = (uint16_t)((i / 9 % 5 ? i / 9 % 5 : 3) *
								   64);
			wanted.mask = i / 45 & 1 ? SPEC_MASK_GENERIC : SPEC_MASK_NO;
			wanted.bias = i / 45 & 2 ? SPEC_BIAS_BIAS : SPEC_BIAS_NO;
			wanted.dropout = i / 45 >> 2 & 1;
			wanted.logits = i / 45 >> 3 & 1;
			spec_signature_reduce(space, &wanted);
			if (wanted.family == SPEC_BWD_DQ_DK_DV && wanted.data_type == SPEC_FP8)
				continue;
			if (count_specs(iter, &wanted) == 0)
				fail_msg("%s: family %d type %d hdim %d traits %d",
					 spec_arch_name(catalog, arch), wanted.family,
					 wanted.data_type, wanted.hdim_q, i / 45);
		}
		spec_iter_free(iter);
		spec_space_free(space);
	}
}

static uint64_t count_own(const char *arch)
{
	struct spec_space_options options = SPEC_SPACE_OPTIONS(arch);

	return count_space(&options);
}

/* Siblings differ by their LDS at most. */
static void relatives_share_their_rows(void **state)
{
	static const char *const pairs[][2] = {{"sm_86", "sm_89"},     {"sm_87", "sm_80"},
					       {"sm_103a", "sm_100a"}, {"sm_121a", "sm_120a"},
					       {"gfx1101", "gfx1100"}, {"gfx1200", "gfx1201"}};

	(void)state;
	for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
		assert_int_equal(count_own(pairs[i][0]), count_own(pairs[i][1]));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_spec_makes_a_kernel),
		cmocka_unit_test(a_name_is_a_piece_of_code),
		cmocka_unit_test(old_names_lead_to_their_kernel),
		cmocka_unit_test(old_patterns_match_old_names),
		cmocka_unit_test(candidates_are_those_of_the_list),
		cmocka_unit_test(cpu_specs_are_cpu_kernels),
		cmocka_unit_test(every_signature_has_a_spec),
		cmocka_unit_test(relatives_share_their_rows),
	};

	return cmocka_run_group_tests(tests, load_catalog, free_catalog);
}
