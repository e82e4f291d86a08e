// SPDX-License-Identifier: MIT
/* Every error and warning of the rules, each from a good spec with one thing changed. */
#include <specs/validate.h>

#include "specs_test.h"

#define MAX_CHANGES 8

struct change {
	enum spec_field field;
	const char *word; /* NULL: */
	int64_t value;
};

struct fault {
	const char *arch, *good; /* a filter that finds a valid spec without warnings */
	struct change changes[MAX_CHANGES];
	const char *field, *message;
	int is_warning;
};

#define WORD(name, text)                                                                           \
	{                                                                                          \
		SPEC_FIELD_##name, text, 0                                                         \
	}
#define NUMBER(name, n)                                                                            \
	{                                                                                          \
		SPEC_FIELD_##name, NULL, n                                                         \
	}
#define END                                                                                        \
	{                                                                                          \
		SPEC_FIELD_family, NULL, -1                                                        \
	}
#define FWD "family == 'fwd' and hdim_q == 128 and bias == 'no'"
#define BWD "family == 'bwd_dq_dk_dv'"

static const struct fault faults[] = {
	{"gfx1100",
	 FWD " and pipeline == 'qr' and 0 or family == 'fwd' and pipeline == 'qr'",
	 {WORD(data_type, "fp8"), END},
	 "data_type",
	 "data_type fp8: not one of arch gfx1100",
	 0},
	{"gfx942",
	 BWD,
	 {WORD(data_type, "fp8"), END},
	 "data_type",
	 "data_type fp8: backward kernels are fp32, fp16 or bf16",
	 0},
	{"gfx942",
	 FWD,
	 {WORD(data_type, "mxfp8"), END},
	 "data_type",
	 "data_type mxfp8: forward kernels have no such type",
	 0},
	{"gfx950",
	 FWD,
	 {WORD(data_type, "mxfp4"), END},
	 "data_type",
	 "data_type mxfp4: not supported: AMD's dispatcher names it, but has no kernels of it on "
	 "any arch",
	 0},
	{"gfx942",
	 FWD " and pipeline == 'qr_async' and tile_m0 == 128 and tile_k0 == 32",
	 {NUMBER(tile_n0, 64), END},
	 "tile_m0",
	 "tile 128x64x32: pipeline qr_async has no such tile for head dims 128, 128 on gfx9",
	 0},
	{"gfx90a",
	 FWD " and pipeline == 'qr_async' and tile_m0 == 128",
	 {NUMBER(tile_m0, 64), END},
	 "tile_m0",
	 "has no such tile for head dims 128, 128 on gfx9",
	 0},
	{"gfx950",
	 "family == 'fwd' and pipeline == 'qr' and hdim_q == 128 and tile_k0 == 32",
	 {NUMBER(tile_k0, 64), END},
	 "tile_m0",
	 "pipeline qr has no such tile for head dims 128, 128 on gfx9",
	 0},
	{"gfx942",
	 "family == 'fwd' and pipeline == 'qr' and hdim_q == 256",
	 {NUMBER(tile_m0, 32), END},
	 "tile_m0",
	 "has no such tile for head dims 256, 256 on gfx9",
	 0},
	{"gfx950",
	 "pipeline == 'qr_async_trload_v3' and tile_m0 == 256",
	 {NUMBER(tile_m0, 128), END},
	 "tile_m0",
	 "pipeline qr_async_trload_v3 has no such tile for head dims 128, 128 on gfx950",
	 0},
	{"gfx950",
	 "pipeline == 'qr_async_trload' and hdim_q == 128 and tile_n0 == 64",
	 {NUMBER(tile_n0, 128), END},
	 "tile_m0",
	 "pipeline qr_async_trload has no such tile for head dims 128, 128 on gfx950",
	 0},
	{"gfx942",
	 "family == 'fwd' and pipeline == 'qr_async' and hdim_q == 64 and tile_m0 == 64 and "
	 "warp_m0 == 16 and tile_n0 == 32 and tile_k0 == 32",
	 {NUMBER(tile_n0, 16), NUMBER(tile_k0, 16), NUMBER(warp_k0, 16), END},
	 "tile_n0",
	 "asynchronous loads do not bring K in whole rounds",
	 0},
	{"gfx942",
	 "family == 'fwd' and hdim_q == 96",
	 {NUMBER(tile_k0, 64), END},
	 "tile_k0",
	 "tile_k0 64: does not divide hdim_q 96",
	 0},
	{"gfx942",
	 "family == 'fwd_pagedkv' and hdim_q == 64",
	 {NUMBER(tile_k0, 96), END},
	 "tile_k0",
	 "tile_k0 96: more than hdim_q 64",
	 0},
	{"gfx1100",
	 "family == 'fwd' and pipeline == 'qr'",
	 {WORD(pipeline, "qr_async"), END},
	 "pipeline",
	 "pipeline qr_async: not one of arch gfx1100",
	 0},
	{"gfx942",
	 FWD,
	 {WORD(pipeline, "qr_async_trload"), END},
	 "pipeline",
	 "pipeline qr_async_trload: arch gfx942 has no transposing loads",
	 0},
	{"gfx942", FWD, {NUMBER(hdim_q, 63), END}, "hdim_q", "hdim_q 63: not a multiple of 8", 0},
	{"gfx942", FWD, {NUMBER(hdim_v, 4), END}, "hdim_v", "hdim_v 4: not a multiple of 8", 0},
	{"gfx942",
	 FWD,
	 {NUMBER(logits, 1), WORD(bias, "alibi"), END},
	 "bias",
	 "bias alibi: excludes a soft cap",
	 0},
	{"gfx950",
	 "pipeline == 'qr_async_trload'",
	 {NUMBER(hdim_q, 96), END},
	 "hdim_q",
	 "pipeline qr_async_trload has 64, 64 and 128, 128 only",
	 0},
	{"gfx950",
	 "pipeline == 'qr_async_trload_v3'",
	 {NUMBER(hdim_q, 256), NUMBER(hdim_v, 256), END},
	 "hdim_q",
	 "head dims 256, 256: pipeline qr_async_trload_v3 has 64, 64 and 128, 128 only",
	 0},
	{"gfx950",
	 FWD,
	 {WORD(pipeline, "v3"), NUMBER(hdim_q, 64), END},
	 "hdim_q",
	 "pipeline v3 has 64, 64 and 128, 128 only",
	 0},
	{"gfx942",
	 FWD,
	 {NUMBER(tile_k1, 0), END},
	 "tile_m0",
	 "tile: must have 6 positive numbers",
	 0},
	{"gfx942",
	 BWD,
	 {NUMBER(tile_bwd7, 0), END},
	 "tile_bwd6",
	 "tile: must have 9 positive numbers for bwd_dq_dk_dv",
	 0},
	{"gfx942",
	 FWD,
	 {NUMBER(tile_bwd8, 32), END},
	 "tile_bwd6",
	 "tile: has 9 numbers, fwd takes 6",
	 0},
	{"gfx942",
	 FWD,
	 {NUMBER(wave_k2, 0), END},
	 "wave_m0",
	 "wave: must have 9 positive numbers",
	 0},
	{"gfx942",
	 FWD,
	 {NUMBER(warp_n1, 0), END},
	 "warp_m0",
	 "warp: must have 9 positive numbers",
	 0},
	{"gfx942",
	 "family == 'fwd' and hdim_q == 256 and warp_k0 == 16",
	 {NUMBER(tile_n0, 48), NUMBER(tile_k0, 16), END},
	 "tile_m0",
	 "matrix instructions a wave are not a multiple of 8",
	 0},
	{"gfx942",
	 FWD,
	 {NUMBER(block_per_cu, 0), END},
	 "block_per_cu",
	 "block_per_cu 0: must be positive or -1",
	 0},
	{"gfx942",
	 FWD,
	 {NUMBER(block_per_cu, -2), END},
	 "block_per_cu",
	 "block_per_cu -2: must be positive or -1",
	 0},
	{"gfx942",
	 FWD,
	 {NUMBER(num_wave_groups, 0), END},
	 "num_wave_groups",
	 "num_wave_groups 0: must be positive",
	 0},
	{"gfx942",
	 "family == 'batch_prefill'",
	 {WORD(vlayout, "c"), END},
	 "vlayout",
	 "vlayout c: batch_prefill takes r only",
	 0},
	{"gfx942",
	 "family == 'batch_prefill'",
	 {NUMBER(paged_kv, 0), END},
	 "paged_kv",
	 "paged_kv 0: batch_prefill is always paged",
	 0},
	{"gfx942",
	 "family == 'batch_prefill'",
	 {NUMBER(page_size, 24), END},
	 "page_size",
	 "page_size 24: not a power of two",
	 0},
	{"gfx942",
	 "family == 'batch_prefill'",
	 {NUMBER(page_size, 0), END},
	 "page_size",
	 "page_size 0: not a power of two",
	 0},
	{"gfx942",
	 "family == 'batch_prefill'",
	 {WORD(mode, "batch"), END},
	 "mode",
	 "mode batch: batch_prefill takes group only",
	 0},
	{"gfx942",
	 "family == 'batch_prefill'",
	 {WORD(pipeline, "qr"), END},
	 "pipeline",
	 "pipeline qr: batch_prefill takes qr_async only",
	 0},
	{"gfx942",
	 "family == 'fwd_appendkv'",
	 {WORD(mode, "group"), END},
	 "mode",
	 "mode group: fwd_appendkv takes batch only",
	 0},
	{"gfx942",
	 "family == 'fwd_appendkv'",
	 {WORD(pipeline, "qr"), END},
	 "pipeline",
	 "pipeline qr: fwd_appendkv takes appendkv only",
	 0},
	{"gfx942",
	 "family == 'fwd_appendkv'",
	 {WORD(vlayout, "c"), END},
	 "vlayout",
	 "vlayout c: fwd_appendkv takes r only",
	 0},
	{"gfx942",
	 "family == 'fwd_splitkv_combine'",
	 {NUMBER(tile_n1, 16), END},
	 "tile_n1",
	 "tile_n1 16: must be 32 in fwd_splitkv_combine",
	 0},
	{"gfx942",
	 "family == 'fwd_splitkv_combine'",
	 {NUMBER(hdim_v, 48), END},
	 "hdim_v",
	 "hdim_v 48: not a positive multiple of tile_n1 32",
	 0},
	{"gfx942",
	 "family == 'fwd_splitkv_combine'",
	 {NUMBER(hdim_v, 16), END},
	 "hdim_v",
	 "hdim_v 16: not a positive multiple of tile_n1 32",
	 0},
	{"gfx942",
	 "family == 'fwd_pagedkv'",
	 {WORD(pipeline, "qr"), END},
	 "pipeline",
	 "pipeline qr: fwd_pagedkv takes qr_pagedkv only",
	 0},
	{"gfx942",
	 "family == 'fwd_pagedkv'",
	 {NUMBER(paged_kv, 0), END},
	 "paged_kv",
	 "paged_kv 0: fwd_pagedkv is always paged",
	 0},
	{"gfx942",
	 "family == 'fwd_pagedkv'",
	 {WORD(vlayout, "c"), END},
	 "vlayout",
	 "vlayout c: fwd_pagedkv takes r only",
	 0},
	{"gfx942",
	 "family == 'fwd_splitkv'",
	 {WORD(pipeline, "qr_async"), END},
	 "pipeline",
	 "pipeline qr_async: fwd_splitkv takes qr or qr_nwarp_sshuffle",
	 0},
	{"gfx942",
	 "family == 'fwd_splitkv'",
	 {WORD(vlayout, "c"), END},
	 "vlayout",
	 "vlayout c: fwd_splitkv takes r only",
	 0},
	{"gfx942",
	 FWD,
	 {WORD(pipeline, "v3"), END},
	 "pipeline",
	 "pipeline v3: arch gfx942 does not support the third generation",
	 1},
	{"gfx942",
	 "family == 'fwd' and hdim_q == 192 and hdim_v == 128 and bias == 'no' and not dropout",
	 {NUMBER(dropout, 1), END},
	 "hdim_q",
	 "head dims 192, 128: bias and dropout are not expected",
	 1},
	{"gfx942",
	 FWD,
	 {WORD(vlayout, "c"), END},
	 "vlayout",
	 "vlayout c: fwd kernels are made for r",
	 1},
	{"gfx942",
	 "family == 'fwd' and pipeline == 'qr' and hdim_q == 64",
	 {NUMBER(tile_m0, 40), END},
	 "tile_m0",
	 "do not divide it",
	 0},
	{"gfx942",
	 "family == 'fwd_splitkv' and hdim_q == 128",
	 {NUMBER(tile_m0, 8192), END},
	 "tile_m0",
	 "does not fit in the LDS of gfx942",
	 0},
	{"gfx942",
	 "family == 'fwd' and mode == 'group'",
	 {NUMBER(pad_sk, 0), END},
	 "pad_s",
	 "lengths of mode group vary",
	 0},
	{"x86_64_v4",
	 "family == 'fwd'",
	 {WORD(pipeline, "cpu_rows"), END},
	 "pipeline",
	 "pipeline cpu_rows: fwd is not made by it",
	 0},
	{"x86_64_v4",
	 "family == 'fwd' and data_type == 'bf16'",
	 {WORD(qscale, "pertensor"), END},
	 "qscale",
	 "qscale pertensor: not with data_type bf16",
	 0},
	{"sm_90a",
	 "family == 'fwd' and pipeline == 'gpu_mma' and hdim_q == 256",
	 {NUMBER(tile_m0, 512), NUMBER(tile_n0, 512), END},
	 "tile_m0",
	 "tile 512x512: does not fit in the LDS of the arch",
	 0},
	{"sm_90a",
	 "family == 'fwd' and pipeline == 'gpu_mma'",
	 {WORD(data_type, "fp32"), END},
	 "data_type",
	 "data_type fp32: pipeline gpu_mma has no such type",
	 0},
	{"sm_90a",
	 "family == 'fwd' and pipeline == 'gpu_mma' and tile_n0 == 64 and hdim_q == 128",
	 {NUMBER(tile_n0, 96), NUMBER(tile_k1, 96), END},
	 "tile_m0",
	 "no tile of gpu_mma is cut like this for fwd",
	 0},
	{"sm_90a",
	 "family == 'fwd'",
	 {NUMBER(pad_s, 0), END},
	 "pad_s",
	 "pad_s 0: every kernel of this build takes lengths",
	 0},
	{"x86_64_v4",
	 "family == 'fwd' and pipeline == 'cpu_decode'",
	 {NUMBER(dropout, 1), END},
	 "dropout",
	 "dropout 1: not with pipeline cpu_decode",
	 0},
	{"sm_90a",
	 "family == 'fwd'",
	 {WORD(pipeline, "gpu_mfma"), END},
	 "pipeline",
	 "pipeline gpu_mfma: not one of arch sm_90a",
	 0},
};

static void apply(struct kernel_spec *spec, const struct change *change)
{
	int64_t value = change->value;

	if (change->word) {
		value = spec_word_find(catalog, change->field, change->word);
		assert_true(value >= 0);
	}
	spec_set(spec, change->field, value);
}

static int reports(const struct spec_findings *findings, const struct fault *fault)
{
	for (int i = 0; i < findings->n; i++)
		if (strstr(findings->finding[i].msg, fault->message) &&
		    findings->finding[i].is_warning == fault->is_warning &&
		    strcmp(findings->finding[i].field, fault->field) == 0)
			return 1;
	return 0;
}

static void each_fault_has_its_message(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
		const struct fault *fault = &faults[i];
		struct kernel_spec spec = find_spec(fault->arch, fault->good);
		struct spec_findings findings;

		if (spec_validate(catalog, &spec, &findings) > 0)
			fail_msg("%zu: the good spec: %s", i, findings.finding[0].msg);
		assert_int_equal(reports(&findings, fault), 0);
		for (const struct change *c = fault->changes; c->word || c->value != -1; c++)
			apply(&spec, c);
		(void)spec_validate(catalog, &spec, &findings);
		if (!reports(&findings, fault))
			fail_msg("%zu: no \"%s\"; %d findings, the first: %s", i, fault->message,
				 findings.n, findings.n ? findings.finding[0].msg : "none");
		assert_int_equal(spec_validate(catalog, &spec, NULL), findings.n_errors);
	}
}

static void unknown_arch_and_family_stop(void **state)
{
	struct kernel_spec spec = find_spec("gfx942", FWD);
	struct spec_findings findings;

	(void)state;
	spec.gfx_arch = 200;
	spec.signature.hdim_q = 63;
	assert_int_equal(spec_validate(catalog, &spec, &findings), 1);
	assert_int_equal(findings.n, 1);
	assert_string_equal(findings.finding[0].msg, "gfx_arch 200: there is none");
	spec.gfx_arch = 0;
	spec.signature.family = 77;
	assert_int_equal(spec_validate(catalog, &spec, &findings), 1);
	assert_string_equal(findings.finding[0].msg, "family 77: there is none");
}

/* Rules mode does not look at an arch's pipelines, so it makes kernels that validation rejects:
 * those and only those, and only for RDNA. */
static void enumerated_specs_are_valid(void **state)
{
	(void)state;
	for (int arch = 0; arch < spec_arch_count(catalog); arch++)
		for (int i = 0; spec_arch_rules(catalog, arch, i); i++) {
			struct spec_space_options options = {
				.arch = spec_arch_name(catalog, arch),
				.rules = spec_arch_rules(catalog, arch, i)};
			struct spec_space *space;
			struct spec_iter *iter;
			const struct kernel_spec *spec;
			uint64_t n = 0;

			if (!is_walked(arch, options.rules))
				continue;
			space = make_space(&options);
			iter = spec_iter_new(space, NULL);

			while ((spec = spec_iter_next(iter))) {
				int listed = spec_arch_has_pipeline(catalog, arch,
								    spec->pipeline) ||
					     spec->signature.family == SPEC_FWD_SPLITKV_COMBINE;

				if (n++ % 101)
					continue;
				if (listed && spec->signature.family == SPEC_FWD_SPLITKV &&
				    spec->signature.hdim_q == 256)
					continue;
				if (spec_validate(catalog, spec, NULL) != !listed) {
					char name[SPEC_NAME_BYTES];

					(void)spec_name_format(catalog, spec, name);
					fail_msg("%s", name);
				}
			}
			spec_iter_free(iter);
			spec_space_free(space);
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(each_fault_has_its_message),
		cmocka_unit_test(unknown_arch_and_family_stop),
		cmocka_unit_test(enumerated_specs_are_valid),
	};

	return cmocka_run_group_tests(tests, load_catalog, free_catalog);
}
