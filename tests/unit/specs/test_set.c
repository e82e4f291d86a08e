// SPDX-License-Identifier: MIT
/* Kernel sets: what a declaration comes to, and what it is told when it comes to nothing. */
#include <unistd.h>

#include <specs/row.h>
#include <specs/set.h>
#include <specs/validate.h>

#include "specs_test.h"

#define FWD                                                                                        \
	"\"family\": \"fwd\", \"data_type\": \"fp16\", \"hdim\": 128, \"gfx_arch\": \"gfx950\", "  \
	"\"pipeline\": \"qr_async\""

/* Adds the declarations of @kernels, the inside of a list. */
static int add(struct spec_set *set, const char *head, const char *kernels, const char *arch,
	       const char *rules, struct fmha_error *err)
{
	char path[] = "/tmp/fmha_test_set_XXXXXX";
	int fd = mkstemp(path), r;
	FILE *file = fdopen(fd, "w");

	assert_non_null(file);
	assert_true(fprintf(file, "{\"set\": \"test\", %s\"kernels\": [%s]}", head, kernels) > 0);
	assert_int_equal(fclose(file), 0);
	r = spec_set_add_file(set, path, arch, rules, err);
	assert_int_equal(unlink(path), 0);
	return r;
}

static struct spec_set *make(const char *kernels, const char *arch, const char *rules)
{
	struct spec_set *set = spec_set_new(catalog);
	struct fmha_error err = {0};

	assert_non_null(set);
	if (add(set, "", kernels, arch, rules, &err) < 0)
		fail_msg("%s: %s", kernels, err.msg);
	return set;
}

static struct kernel_spec only(const char *kernels)
{
	struct spec_set *set = make(kernels, NULL, NULL);
	struct kernel_spec spec;

	assert_int_equal(spec_set_size(set), 1);
	spec = *spec_set_at(set, 0);
	assert_int_equal(spec_validate(catalog, &spec, NULL), 0);
	spec_set_free(set);
	return spec;
}

static void wants(const struct kernel_spec *spec, enum spec_field field, int64_t value)
{
	if (spec_get(spec, field) != value)
		fail_msg("%s is %lld", spec_field_name(field), (long long)spec_get(spec, field));
}

/* Silent on waves, warps and the second product: all of it as the dispatcher's own list has it. */
static void what_is_not_said_is_filled_in(void **state)
{
	struct kernel_spec spec = only("{" FWD ", \"tile\": [128, 128, 32]}");
	struct spec_space_options options = amd_space("gfx950");
	struct spec_space *space = make_space(&options);

	(void)state;
	assert_true(spec_space_contains(space, &spec));
	wants(&spec, SPEC_FIELD_tile_n1, 128);
	wants(&spec, SPEC_FIELD_tile_k1, 32);
	wants(&spec, SPEC_FIELD_tile_k0max, 128);
	wants(&spec, SPEC_FIELD_wave_m0, 4);
	wants(&spec, SPEC_FIELD_warp_m0, 32);
	/* 0 is not said either, and the smaller warp makes more waves. */
	spec = only("{" FWD ", \"tile\": [128, 128, 32, 0, 0, 0], \"warp\": [16, 16, 32]}");
	assert_true(spec_space_contains(space, &spec));
	wants(&spec, SPEC_FIELD_wave_m0, 8);
	wants(&spec, SPEC_FIELD_warp_k1, 32);
	/* Every size one by one is the same as the lists. */
	struct kernel_spec one = only("{" FWD ", \"tile_m0\": 128, \"tile_n0\": 128, \"tile_k0\": "
				      "32, \"warp_m0\": 16, \"warp_n0\": 16, \"warp_k0\": 32}");
	assert_int_equal(spec_compare(&one, &spec), 0);
	/* Waves that were said stay, although no list has them. */
	spec = only("{" FWD ", \"tile\": [128, 128, 32], \"wave\": [2, 2, 1]}");
	assert_false(spec_space_contains(space, &spec));
	wants(&spec, SPEC_FIELD_wave_m0, 2);
	wants(&spec, SPEC_FIELD_wave_n0, 2);
	wants(&spec, SPEC_FIELD_wave_m1, 2);
	spec_space_free(space);
}

/* Each family's kernels, named by nothing but what they are for, are in the dispatcher's lists. */
static void every_family_is_filled_in(void **state)
{
	static const char *const kernels[] = {
		"\"family\": \"fwd\", \"pipeline\": \"qr_async\"",
		"\"family\": \"fwd_splitkv\", \"pads\": \"tttt\"",
		"\"family\": \"fwd_splitkv_combine\"",
		"\"family\": \"fwd_pagedkv\", \"pads\": \"ttff\"",
		"\"family\": \"fwd_appendkv\"",
		"\"family\": \"batch_prefill\", \"kv_memory_layout\": \"linear\"",
		"\"family\": \"bwd_dot_do_o\"",
		"\"family\": \"bwd_dq_dk_dv\"",
		"\"family\": \"bwd_dq_dk_dv\", \"dropout\": true",
		"\"family\": \"bwd_dq_dk_dv\", \"dropout_variant\": \"dropout_wg16_storerandval\"",
		"\"family\": \"bwd_dq_dk_dv\", \"hdim\": 256",
		"\"family\": \"bwd_dq_dk_dv\", \"hdim\": 32",
		"\"family\": \"bwd_dq_dk_dv\", \"hdim\": 64, \"tile_tag\": \"trload\", "
		"\"use_trload\": true, \"pads\": \"ttff\"",
		"\"family\": \"bwd_dq_dk_dv\", \"hdim\": 64, \"tile_tag\": \"small\", \"tile\": "
		"[32, "
		"16], \"pads\": \"ttff\"",
		"\"family\": \"bwd_convert_dq\"",
	};
	struct spec_space_options options = amd_space("gfx950");
	struct spec_space *space = make_space(&options);

	(void)state;
	for (size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
		char text[512], name[SPEC_NAME_BYTES];
		struct kernel_spec spec;

		(void)snprintf(text, sizeof(text),
			       "{%s, \"data_type\": \"bf16\", \"gfx_arch\": \"gfx950\"}",
			       kernels[i]);
		spec = only(text);
		(void)spec_name_format(catalog, &spec, name);
		if (!spec_space_contains(space, &spec))
			fail_msg("%s: %s", kernels[i], name);
	}
	spec_space_free(space);
}

static uint64_t count_filtered(const char *arch, const char *rules, const char *text)
{
	struct spec_space_options options = {.arch = arch, .rules = rules};
	struct spec_space *space = make_space(&options);
	struct spec_filter *filter;
	struct spec_iter *iter;
	uint64_t n = 0;

	assert_int_equal(spec_filter_compile(catalog, text, &filter, NULL, NULL), 0);
	iter = spec_iter_new(space, filter);
	while (spec_iter_next(iter))
		n++;
	spec_iter_free(iter);
	spec_filter_free(filter);
	spec_space_free(space);
	return n;
}

/* "*" of a tile means the tiles that the arch's list has with everything else as it was said. */
static void any_tile_is_the_lists(void **state)
{
	static const struct {
		const char *kernels, *arch, *filter;
	} cases[] = {
		{"{\"family\": \"fwd\", \"data_type\": \"bf16\", \"hdim\": 64, \"pipeline\": "
		 "\"qr_async\", \"mask\": \"causal\", \"tile\": \"*\", \"gfx_arch\": \"gfx942\"}",
		 "gfx942",
		 "family == 'fwd' and data_type == 'bf16' and hdim_q == 64 and hdim_v == 64 and "
		 "pipeline == 'qr_async' and mask == 'top_left' and bias == 'no' and mode == "
		 "'batch' and pad_s and pad_sk and pad_d and pad_dv and not (lse or dropout or "
		 "logits or sink or skip_min_seqlen_q)"},
		{"{\"family\": \"fwd_pagedkv\", \"data_type\": [\"fp16\", \"bf16\"], \"hdim\": "
		 "[32, \"192x128\"], \"mask\": \"*\", \"tile\": [64, \"*\", 32], \"pads\": "
		 "\"ttff\", \"mode\": \"group\", \"gfx_arch\": \"gfx950\"}",
		 "gfx950",
		 "family == 'fwd_pagedkv' and data_type in ('fp16', 'bf16') and (hdim_q == 32 or "
		 "hdim_q == 192 and hdim_v == 128) and bias == 'no' and mode == 'group' and not "
		 "(logits or sink) and tile_m0 == 64 and tile_k0 == 32 and pad_s == 1 and pad_sk "
		 "== 1 and pad_d == 0 and pad_dv == 0"},
		{"{\"family\": \"bwd_dq_dk_dv\", \"data_type\": \"fp16\", \"hdim\": \"*\", "
		 "\"bias\": "
		 "[\"no\", \"alibi\"], \"deterministic\": \"*\", \"tile\": \"*\", \"tile_tag\": "
		 "\"*\", \"use_trload\": \"*\", \"pads\": \"tt**\", \"gfx_arch\": \"gfx950\"}",
		 "gfx950",
		 "family == 'bwd_dq_dk_dv' and data_type == 'fp16' and bias in ('no', 'alibi') and "
		 "mask == 'no' and mode == 'batch' and not dropout and not dbias"},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct spec_set *set = make(cases[i].kernels, NULL, NULL);
		uint64_t expected = count_filtered(cases[i].arch, "ck", cases[i].filter);

		assert_true(expected > 1);
		if (spec_set_size(set) != expected)
			fail_msg("%zu: %zu of %llu", i, spec_set_size(set),
				 (unsigned long long)expected);
		spec_set_free(set);
	}
}

/* "*" of the arch is every arch that AMD's rules know, but only where the kernel can be. */
static void any_arch(void **state)
{
	struct spec_set *set = make("{\"family\": \"fwd\", \"data_type\": \"bf16\", \"hdim\": 64, "
				    "\"gfx_arch\": \"*\", \"pipeline\": [\"qr\", \"qr_async\"], "
				    "\"tile\": [128, 64, 32]}",
				    NULL, NULL);
	int n_async = 0, n_plain = 0;

	(void)state;
	for (size_t i = 0; i < spec_set_size(set); i++) {
		const struct kernel_spec *spec = spec_set_at(set, i);
		const char *pipeline = spec_word(catalog, SPEC_FIELD_pipeline, spec->pipeline);

		n_async += strcmp(pipeline, "qr_async") == 0;
		n_plain += strcmp(pipeline, "qr") == 0;
	}
	assert_int_equal(n_plain, 5); /* the files of specs/arch */
	assert_int_equal(n_async, 3); /* RDNA has no asynchronous loads */
	spec_set_free(set);
}

/* Sets are merged; a kernel that two declarations mean is in once, where it came first. */
static void sets_merge(void **state)
{
	struct spec_set *set = make("{" FWD ", \"tile\": [128, 128, 32]}, {" FWD
				    ", \"tile\": [128, 128, \"*\"]}",
				    NULL, NULL);
	size_t n = spec_set_size(set);
	struct fmha_error err = {0};

	(void)state;
	assert_true(n > 1);
	wants(spec_set_at(set, 0), SPEC_FIELD_tile_k0, 32);
	assert_int_equal(add(set, "", "{" FWD ", \"tile\": [128, 128, \"*\"]}", NULL, NULL, &err),
			 0);
	assert_int_equal(spec_set_size(set), n);
	assert_int_equal(add(set, "", "{" FWD ", \"tile\": [128, 128, 32], \"lse\": true}", NULL,
			     NULL, &err),
			 0);
	assert_int_equal(spec_set_size(set), n + 1);
	spec_set_free(set);
}

#define IS_OFF(name, NAME, word, kind, families, asked) " and " #name " == 0"

/* Of this build's own kernels the rows have the tiles. */
static void own_kernels(void **state)
{
	struct spec_set *set = make("{\"family\": \"fwd\", \"data_type\": \"bf16\", \"hdim\": 128, "
				    "\"pipeline\": \"gpu_wgmma\"}",
				    "sm_90a", NULL);
	struct spec_set *all = make("{\"family\": \"fwd\", \"data_type\": \"bf16\", \"hdim\": 128}",
				    "gfx942", "gpu");

	(void)state;
	assert_true(spec_set_size(set) > 0);
	for (size_t i = 0; i < spec_set_size(set); i++) {
		assert_int_equal(spec_validate(catalog, spec_set_at(set, i), NULL), 0);
		assert_true(spec_pipeline_flags(catalog, spec_set_at(set, i)->pipeline) >= 0);
	}
	assert_int_equal(
		spec_set_size(all),
		count_filtered("gfx942", "gpu",
			       "family == 'fwd' and data_type == 'bf16' and hdim_q == 128 "
			       "and hdim_v == 128 and mask == 'no' and bias == 'no' and not "
			       "(dropout or logits) and qscale == 'no'" FMHA_OWN_TRAITS(IS_OFF)));
	spec_set_free(set);
	spec_set_free(all);
}

static void profiles_keep(void **state)
{
	struct spec_set *set = make(
		"{\"family\": \"fwd\", \"data_type\": [\"fp16\", \"bf16\"], \"hdim\": 128, "
		"\"bias\": "
		"\"*\", \"tile\": \"*\", \"pipeline\": \"*\", \"profile\": \"flash_fwd\", "
		"\"gfx_arch\": \"gfx942\"}",
		NULL, NULL);
	struct spec_set *fp32 = make("{\"family\": \"fwd\", \"data_type\": \"fp32\", \"hdim\": "
				     "\"*\", \"tile\": \"*\", \"receipt\": \"fp32_min\", "
				     "\"gfx_arch\": \"gfx942\"}",
				     NULL, NULL);

	(void)state;
	assert_true(spec_set_size(set) > 0);
	for (size_t i = 0; i < spec_set_size(set); i++)
		assert_true(spec_get(spec_set_at(set, i), SPEC_FIELD_bias) != SPEC_BIAS_BIAS);
	assert_true(spec_set_size(fp32) > 0);
	for (size_t i = 0; i < spec_set_size(fp32); i++)
		assert_true(spec_get(spec_set_at(fp32, i), SPEC_FIELD_hdim_q) == 48 ||
			    spec_get(spec_set_at(fp32, i), SPEC_FIELD_hdim_q) == 128);
	spec_set_free(set);
	spec_set_free(fp32);
}

static void mistakes_are_explained(void **state)
{
	static const struct {
		const char *head, *kernels, *message;
	} mistakes[] = {
		{"", "{" FWD ", \"tile\": [128, 64, 32]}", "/kernels/0: tile 128x64x32: pipeline"},
		{"", "{" FWD ", \"tile\": [128, [64], 32]}", "/kernels/0/tile/1: "},
		{"", "{" FWD ", \"tiles\": 1}", "/kernels/0/tiles: there is no field 'tiles'"},
		{"", "{" FWD ", \"mask\": \"casual\"}", "/kernels/0/mask: 'casual' is not a mask"},
		{"", "{" FWD ", \"mask\": []}", "/kernels/0/mask: an empty list means no kernel"},
		{"", "{" FWD ", \"hdim_q\": 64}", "/kernels/0/hdim_q: is said twice"},
		{"", "{" FWD ", \"pads\": \"ttt\"}", "must be four of f, t, 8 and *"},
		{"", "{" FWD ", \"page_size\": \"*\"}",
		 "/kernels/0/page_size: '*': it has no list"},
		{"", "{" FWD ", \"profile\": \"nonesuch\"}", "there is no such profile"},
		{"", "{" FWD ", \"profile\": \"pytorch\", \"bias\": \"alibi\"}",
		 "profile pytorch: it keeps no such kernel"},
		{"", "{\"data_type\": \"bf16\"}", "/kernels/0: family is missing"},
		{"", "{\"family\": \"fwd\"}", "gfx_arch is missing"},
		{"", "{\"family\": \"fwd_splitkv\", \"lse\": false, \"gfx_arch\": \"gfx942\"}",
		 "/kernels/0: lse: fwd_splitkv kernels have 1 only"},
		{"",
		 "{\"family\": \"fwd\", \"data_type\": \"bf16\", \"hdim\": 128, \"pipeline\": "
		 "\"qr\", "
		 "\"tile\": [48, \"*\"], \"gfx_arch\": \"gfx942\"}",
		 "/kernels/0: means no kernel that there is"},
		{"", "{" FWD ", \"data_type\": \"mxfp8\"}", "data_type: the key appears twice"},
		{"", "{\"family\": \"fwd\", \"data_type\": \"mxfp8\", \"gfx_arch\": \"gfx950\"}",
		 "data_type mxfp8: not one of arch gfx950"},
		{"\"rule\": \"ck\", ", "{" FWD "}", "/rule: "},
		{"\"rules\": \"ck\", ", "{\"family\": \"fwd\", \"gfx_arch\": \"sm_90a\"}",
		 "arch sm_90a has no kernels by the rules 'ck'"},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(mistakes) / sizeof(mistakes[0]); i++) {
		struct spec_set *set = spec_set_new(catalog);
		struct fmha_error err = {0};

		assert_int_equal(add(set, mistakes[i].head, mistakes[i].kernels, NULL, NULL, &err),
				 FMHA_EINVAL);
		if (!strstr(err.msg, mistakes[i].message))
			fail_msg("%zu: '%s' is not in: %s", i, mistakes[i].message, err.msg);
		spec_set_free(set);
	}
}

/* A product that nobody means is refused before it is walked. */
static void products_are_bounded(void **state)
{
	struct spec_set *set = spec_set_new(catalog);
	struct fmha_error err = {0};

	(void)state;
	assert_int_equal(
		add(set, "",
		    "{\"family\": \"*\", \"gfx_arch\": \"*\", \"data_type\": \"*\", \"hdim\": "
		    "\"*\", "
		    "\"mask\": \"*\", \"bias\": \"*\", \"lse\": \"*\", \"dropout\": \"*\", "
		    "\"logits\": \"*\", \"sink\": \"*\", \"paged_kv\": \"*\", \"qscale\": \"*\", "
		    "\"rope\": \"*\", \"deterministic\": \"*\", \"dbias\": \"*\", \"pads\": \"*\", "
		    "\"mode\": \"*\", \"kv_memory_layout\": \"*\", \"kv_lookup_table\": \"*\"}",
		    NULL, NULL, &err),
		FMHA_EINVAL);
	if (!strstr(err.msg, "combinations"))
		fail_msg("%s", err.msg);
	spec_set_free(set);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_is_not_said_is_filled_in),
		cmocka_unit_test(every_family_is_filled_in),
		cmocka_unit_test(any_tile_is_the_lists),
		cmocka_unit_test(any_arch),
		cmocka_unit_test(sets_merge),
		cmocka_unit_test(own_kernels),
		cmocka_unit_test(profiles_keep),
		cmocka_unit_test(mistakes_are_explained),
		cmocka_unit_test(products_are_bounded),
	};

	return cmocka_run_group_tests(tests, load_catalog, free_catalog);
}
