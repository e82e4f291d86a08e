// SPDX-License-Identifier: MIT
/* Counts, receipts, lists and lookups of kernel spaces. The figures are those of AMD's dispatcher.
 */
#include "specs_test.h"

struct count_row {
	const char *arch, *config;
	int receipt;
	uint64_t n;
};

static const struct count_row counts[] = {
	{"gfx950", "receipt0_fwd", 0, 864300},
	{"gfx950", "splitkv", 0, 620010},
	{"gfx950", "pagedkv", 0, 245952},
	{"gfx950", "appendkv", 0, 220},
	{"gfx950", "batch_prefill", 0, 1055120},
	{"gfx950", "bwd", 0, 12192},
	{"gfx950", "fwd", 0, 236800},
	{"gfx950", "fwd_ci", 0, 1860},
	{"gfx942", "receipt0_fwd", 0, 1062588},
	{"gfx942", "splitkv", 0, 620010},
	{"gfx942", "pagedkv", 0, 245952},
	{"gfx942", "appendkv", 0, 220},
	{"gfx942", "batch_prefill", 0, 1055120},
	{"gfx942", "bwd", 0, 12192},
	{"gfx942", "fwd", 0, 332032},
	{"gfx942", "fwd_ci", 0, 2852},
	{"gfx1100", "receipt0_fwd", 0, 1338048},
	{"gfx1100", "splitkv", 0, 607992},
	{"gfx1100", "pagedkv", 0, 227952},
	{"gfx1100", "appendkv", 0, 216},
	{"gfx1100", "batch_prefill", 0, 1013120},
	{"gfx1100", "bwd", 0, 12192},
	{"gfx1100", "fwd", 0, 447360},
	{"gfx1100", "fwd_ci", 0, 3500},
};

static void counts_of_shipped_sweeps(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
		struct spec_space_options options = {.arch = counts[i].arch,
						     .config = counts[i].config};
		uint64_t n = count_space(&options);

		if (n != counts[i].n)
			fail_msg("%s %s: %llu kernels", counts[i].arch, counts[i].config,
				 (unsigned long long)n);
	}
}

static void counts_of_archs(void **state)
{
	static const struct count_row rows[] = {
		{"gfx942", NULL, 0, 2996082},
		{"gfx950", NULL, 0, 2797794},
		{"gfx1100", NULL, 0, 3199520},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct spec_space_options options = amd_space(rows[i].arch);

		assert_int_equal(count_space(&options), rows[i].n);
	}
}

static void counts_by_receipt(void **state)
{
	static const int receipts[] = {0, 1, 2, 4, 100, 200, 800, 888};
	static const struct {
		const char *arch, *config;
		uint64_t n[8];
	} rows[] = {
		{"gfx950",
		 "receipt0_fwd",
		 {864300, 1360236, 144168, 255408, 863976, 863976, 0, 18684}},
		{"gfx950",
		 "splitkv",
		 {620010, 620010, 228090, 228090, 620010, 608010, 138, 620010}},
		{"gfx950", "pagedkv", {245952, 245952, 85482, 113976, 227952, 227952, 0, 0}},
		{"gfx942",
		 "receipt0_fwd",
		 {1062588, 1558524, 186768, 270336, 1062264, 1062264, 0, 23868}},
		{"gfx942",
		 "splitkv",
		 {620010, 620010, 228090, 228090, 620010, 608010, 138, 620010}},
		{"gfx942", "pagedkv", {245952, 245952, 85482, 113976, 227952, 227952, 0, 0}},
		{"gfx1100",
		 "receipt0_fwd",
		 {1338048, 1833984, 251640, 333504, 1338048, 1338048, 0, 0}},
		{"gfx1100",
		 "splitkv",
		 {607992, 607992, 228072, 228072, 607992, 607992, 120, 607992}},
		{"gfx1100", "pagedkv", {227952, 227952, 85482, 113976, 227952, 227952, 0, 0}},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
		for (size_t j = 0; j < 8; j++) {
			struct spec_space_options options = {.arch = rows[i].arch,
							     .config = rows[i].config,
							     .receipt = receipts[j]};
			uint64_t n = count_space(&options);

			if (n != rows[i].n[j])
				fail_msg("%s %s receipt %d: %llu kernels", rows[i].arch,
					 rows[i].config, receipts[j], (unsigned long long)n);
		}
}

static uint64_t count_filtered(const struct spec_space_options *options, const char *text)
{
	struct spec_space *space = make_space(options);
	struct spec_filter *filter = NULL;
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

static void closed_forms(void **state)
{
	const struct spec_space_options bwd = {.arch = "gfx950", .config = "bwd"};
	const struct spec_space_options split = {.arch = "gfx950", .config = "splitkv"};
	const struct spec_space_options append = {.arch = "gfx950", .config = "appendkv"};
	const struct spec_space_options paged = {.arch = "gfx950", .config = "pagedkv"};
	const struct spec_space_options prefill = {.arch = "gfx950", .config = "batch_prefill"};

	(void)state;
	assert_int_equal(count_filtered(&bwd, "family == 'bwd_dot_do_o'"), 60);
	assert_int_equal(count_filtered(&bwd, "family == 'bwd_dq_dk_dv'"), 12000);
	assert_int_equal(count_filtered(&bwd, "family == 'bwd_convert_dq'"), 132);
	assert_int_equal(count_filtered(&bwd, "tile_tag == '' and family == 'bwd_dq_dk_dv'"),
			 2 * 5 * 2 * 504);
	assert_int_equal(count_filtered(&bwd, "tile_tag in ('trload', 'bn192')"), 2 * 3 * 2 * 144);
	assert_int_equal(count_filtered(&bwd, "tile_tag == 'small'"), 2 * 2 * 48);
	assert_int_equal(count_filtered(&split, "family == 'fwd_splitkv_combine' and "
						"data_type == 'fp16'"),
			 60);
	assert_int_equal(count_filtered(&split, "family == 'fwd_splitkv_combine' and "
						"data_type == 'fp8'"),
			 18);
	assert_int_equal(count_filtered(&split, "family == 'fwd_splitkv' and data_type == 'bf16'"),
			 1583 * 192);
	assert_int_equal(count_filtered(&split, "family == 'fwd_splitkv' and data_type == 'fp8'"),
			 500 * 24);
	assert_int_equal(count_filtered(&append, "data_type == 'bf16'"), 108);
	assert_int_equal(count_filtered(&append, "data_type == 'fp8'"), 4);
	assert_int_equal(count_filtered(&paged, "data_type == 'fp16'"), 1583 * 72);
	assert_int_equal(count_filtered(&paged, "data_type == 'fp8'"), 500 * 36);
	assert_int_equal(count_filtered(&prefill, "data_type == 'fp16'"), 1583 * 320);
	assert_int_equal(count_filtered(&prefill, "qscale == 'pertensor'"), 500 * 60);
}

/* No kernel appears twice: the dedup key of the dispatcher, which leaves out much of the name. */
static int compare_names(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static void exhaustive_mode_keeps_one_of_equal_tiles(void **state)
{
	const struct spec_space_options options = {
		.arch = "gfx942",
		.exhaustive = 1,
		.config_json = "{\"variant\": \"bwd\", \"trait_config\": {\"data_type\": "
			       "{\"values\": [\"fp16\"]}, \"mask\": {\"values\": [\"no\"]}}}",
	};
	struct spec_space *space = make_space(&options);
	struct spec_iter *iter = spec_iter_new(space, NULL);
	size_t n = 0, n_max = spec_space_count(space);
	char **names = calloc(n_max, sizeof(*names));
	const struct kernel_spec *spec;
	char name[SPEC_NAME_BYTES];

	(void)state;
	assert_true(n_max > 1000);
	while ((spec = spec_iter_next(iter))) {
		assert_true(n < n_max);
		assert_true(spec_name_format(catalog, spec, name) > 0);
		names[n++] = strdup(name);
	}
	assert_int_equal(n, n_max);
	qsort(names, n, sizeof(*names), compare_names);
	for (size_t i = 1; i < n; i++)
		assert_string_not_equal(names[i - 1], names[i]);
	for (size_t i = 0; i < n; i++)
		free(names[i]);
	free(names);
	spec_iter_free(iter);
	spec_space_free(space);
}

static void archs_without_figures_enumerate_too(void **state)
{
	/* gfx90a differs from gfx942 only by data types, gfx1201 from gfx1100 by fp8. */
	const struct spec_space_options on_90a = {.arch = "gfx90a", .config = "fwd"};
	const struct spec_space_options on_942 = {.arch = "gfx942", .config = "fwd"};
	const struct spec_space_options on_1201 = {.arch = "gfx1201", .config = "fwd"};
	const struct spec_space_options on_1100 = {.arch = "gfx1100", .config = "fwd"};
	const struct spec_space_options fp8 = {.arch = "gfx1201", .config = "receipt0_fwd"};

	(void)state;
	assert_int_equal(count_space(&on_90a), count_space(&on_942));
	assert_int_equal(count_space(&on_1201), count_space(&on_1100));
	assert_true(count_filtered(&fp8, "data_type == 'fp8bf16'") > 0);
	assert_int_equal(count_filtered(&fp8, "data_type == 'fp8fp32'"), 0);
}

static void every_arch_has_every_family(void **state)
{
	(void)state;
	for (int arch = 0; arch < spec_arch_count(catalog); arch++)
		for (int i = 0; spec_arch_rules(catalog, arch, i); i++) {
			struct spec_space_options options = {
				.arch = spec_arch_name(catalog, arch),
				.rules = spec_arch_rules(catalog, arch, i)};
			struct spec_space *space = make_space(&options);
			struct spec_head_dims pairs[64];

			assert_true(spec_space_count(space) > 0);
			assert_true(spec_space_head_dims(space, SPEC_FWD, SPEC_BF16, pairs, 64) >
				    0);
			/* CPU levels that multiply bfloat16 natively run the others of those below.
			 */
			if (spec_arch_has_dtype(catalog, arch, SPEC_FP16))
				assert_true(spec_space_head_dims(space, SPEC_FWD_SPLITKV_COMBINE,
								 SPEC_BF16, pairs, 64) > 0);
			spec_space_free(space);
		}
}

/* What a lookup walks is exactly what a scan with the signature as a filter finds. */
static void check_lookups(const char *arch, const char *rules, uint64_t stride)
{
	struct spec_space_options options = {.arch = arch, .rules = rules};
	struct spec_space *space = make_space(&options);
	struct spec_iter *all = spec_iter_new(space, NULL);
	struct spec_iter *some = spec_iter_new(space, NULL);
	const struct kernel_spec *spec;
	struct kernel_signature last = {0};
	uint64_t n = 0, n_same = 0, walked = 0, left = stride;

	/* Specs of one signature do not lie together, so count them by hash of the signature. */
	(void)walked;
	while ((spec = spec_iter_next(all))) {
		const struct kernel_spec *found;
		struct kernel_signature reduced = spec->signature;
		int seen = 0;

		if (--left)
			continue;
		left = stride;
		last = spec->signature;
		spec_signature_reduce(space, &reduced);
		assert_true(spec_signature_equal(&reduced, &last));
		spec_iter_restart_signature(some, &last);
		while ((found = spec_iter_next(some))) {
			assert_true(spec_signature_equal(&found->signature, &last));
			seen += spec_compare(found, spec) == 0;
			n_same++;
		}
		assert_int_equal(seen, 1);
		assert_true(spec_space_contains(space, spec));
		n++;
	}
	assert_true(n > 10 && n_same >= n);
	spec_iter_free(all);
	spec_iter_free(some);
	spec_space_free(space);
}

static void lookups_find_their_spec(void **state)
{
	(void)state;
	check_lookups("gfx950", "ck", 9973);
	check_lookups("gfx1100", "gpu", 997);
	check_lookups("sm_90a", "gpu", 997);
	check_lookups("x86_64_v4", "cpu", 7);
}

static void lookups_find_all_of_a_signature(void **state)
{
	static const char *const texts[] = {
		"family == 'fwd' and data_type == 'bf16' and mode == 'group' and hdim_q == 128 and "
		"hdim_v == 128 and mask == 'top_left' and bias == 'no' and lse and not dropout and "
		"not logits and not sink and not skip_min_seqlen_q",
		"family == 'batch_prefill' and data_type == 'fp8bf16' and hdim_q == 64 and mask == "
		"'no' "
		"and qscale == 'kv_blockscale' and page_size == 1024 and kv_memory_layout == "
		"'linear' and "
		"kv_lookup_table == 'vllm' and not logits",
		"family == 'bwd_dq_dk_dv' and data_type == 'fp16' and mode == 'batch' and hdim_q "
		"== 64 "
		"and mask == 'no' and bias == 'no' and dropout_variant == 'no' and not "
		"deterministic",
	};
	struct spec_space_options options = amd_space("gfx950");
	struct spec_space *space = make_space(&options);

	(void)state;
	for (size_t i = 0; i < 3; i++) {
		struct kernel_spec spec = find_spec("gfx950", texts[i]);
		struct spec_iter *iter = spec_iter_new_signature(space, &spec.signature);
		uint64_t n = 0;

		while (spec_iter_next(iter))
			n++;
		assert_true(n > 0);
		assert_int_equal(n, count_filtered(&options, texts[i]));
		spec_iter_free(iter);
	}
	spec_space_free(space);
}

static void lookups_of_nothing_find_nothing(void **state)
{
	struct spec_space_options options = amd_space("gfx950");
	struct spec_space *space = make_space(&options);
	struct kernel_signature signature;
	struct spec_iter *iter;

	(void)state;
	spec_signature_init(&signature);
	signature.hdim_q = 72;
	iter = spec_iter_new_signature(space, &signature);
	assert_null(spec_iter_next(iter));
	signature.hdim_q = 128;
	signature.mask = SPEC_MASK_BOTTOM_RIGHT; /* rules mode has none */
	spec_iter_restart_signature(iter, &signature);
	assert_null(spec_iter_next(iter));
	signature.family = 200;
	spec_signature_reduce(space, &signature);
	spec_iter_restart_signature(iter, &signature);
	assert_null(spec_iter_next(iter));
	assert_null(spec_iter_next(iter));
	spec_iter_free(iter);
	spec_space_free(space);
}

/* A combine kernel knows no mask, so a masked split-KV problem must still find one. */
static void stages_keep_only_their_own_traits(void **state)
{
	struct spec_space_options options = amd_space("gfx942");
	struct spec_space *space = make_space(&options);
	static const struct {
		enum spec_family family;
		int lse;
	} stages[] = {{SPEC_FWD_SPLITKV, 1},
		      {SPEC_FWD_SPLITKV_COMBINE, 0},
		      {SPEC_BWD_DOT_DO_O, 0},
		      {SPEC_BWD_CONVERT_DQ, 0}};

	(void)state;
	for (size_t i = 0; i < 4; i++) {
		struct kernel_signature signature;
		struct spec_iter *iter;

		spec_signature_init(&signature);
		signature.family = (uint8_t)stages[i].family;
		signature.data_type = SPEC_BF16;
		signature.mask = SPEC_MASK_TOP_LEFT;
		signature.bias = SPEC_BIAS_ALIBI;
		signature.dropout = 1;
		signature.dropout_variant = SPEC_DROPOUT_WG16;
		signature.page_size = 16;
		spec_signature_reduce(space, &signature);
		assert_int_equal(signature.lse, stages[i].lse);
		assert_int_equal(signature.dropout, 0);
		assert_int_equal(signature.page_size, 1);
		iter = spec_iter_new_signature(space, &signature);
		assert_non_null(spec_iter_next(iter));
		spec_iter_free(iter);
	}
	spec_space_free(space);
}

static void head_dims_ascend(void **state)
{
	struct spec_space_options options = amd_space("gfx942");
	struct spec_space *space = make_space(&options);
	struct spec_head_dims pairs[16];

	(void)state;
	assert_int_equal(spec_space_head_dims(space, SPEC_FWD, SPEC_FP16, pairs, 16), 9);
	for (int i = 1; i < 9; i++)
		assert_true(pairs[i - 1].hdim_q < pairs[i].hdim_q ||
			    (pairs[i - 1].hdim_q == pairs[i].hdim_q &&
			     pairs[i - 1].hdim_v < pairs[i].hdim_v));
	assert_int_equal(pairs[2].hdim_q, 80);
	assert_int_equal(pairs[2].hdim_v, 96);
	assert_int_equal(spec_space_head_dims(space, SPEC_FWD, SPEC_FP32, pairs, 16), 0);
	spec_space_free(space);
}

static void restricted_head_dims(void **state)
{
	const struct spec_head_dims only[] = {{128, 128}};
	struct spec_space_options options = {.arch = "gfx950",
					     .config = "receipt0_fwd",
					     .restrict_hdims = only,
					     .n_restrict_hdims = 1};

	(void)state;
	const struct spec_space_options whole = {.arch = "gfx950", .config = "receipt0_fwd"};

	assert_int_equal(count_space(&options),
			 count_filtered(&whole, "hdim_q == 128 and hdim_v == 128"));
	/* Backward and combine kernels ignore the list in rules mode ... */
	options.config = "bwd";
	assert_int_equal(count_space(&options), 12192);
	options.config = "splitkv";
	assert_int_equal(count_filtered(&options, "family == 'fwd_splitkv_combine'"), 60 + 60 + 18);
	/* ... backward honours it in exhaustive mode. */
	options.config = NULL;
	options.variant = "bwd";
	options.exhaustive = 1;
	assert_int_equal(count_filtered(&options, "hdim_q != 128"), 0);
	assert_int_equal(count_filtered(&options, "family == 'bwd_dot_do_o'"), 2 * 2 * 4);
	options.n_restrict_hdims = 0; /* an empty list lets nothing through */
	assert_int_equal(count_space(&options), 0);
}

static uint64_t count_json(const char *json)
{
	struct spec_space_options options = {.arch = "gfx942", .config_json = json};

	return count_space(&options);
}

static void lists_of_a_sweep(void **state)
{
	(void)state;
	/* A missing and an empty list of data types mean all of them, fp8 and bf8 too. */
	assert_true(count_json("{}") > 1062588);
	assert_int_equal(count_json("{}"),
			 count_json("{\"trait_config\": {\"data_type\": {\"values\": []}}}"));
	/* Every other empty list rejects everything. */
	assert_int_equal(count_json("{\"trait_config\": {\"mask\": {\"values\": []}}}"), 0);
	assert_int_equal(count_json("{\"trait_config\": {\"lse\": {\"values\": []}}}"), 0);
	/* block_per_cu multiplies, takes a number, and counts a repeated value once. */
	assert_int_equal(count_json("{\"trait_config\": {\"block_per_cu\": [1, 2, 2]}}"),
			 2 * count_json("{}"));
	assert_int_equal(count_json("{\"trait_config\": {\"block_per_cu\": 2}}"), count_json("{}"));
	/* Lists of variants that do not honour them are ignored. */
	assert_int_equal(count_json("{\"variant\": \"appendkv\", \"trait_config\": {\"data_type\": "
				    "{\"values\": [\"fp16\"]}, \"mode\": {\"values\": []}}}"),
			 108);
	assert_int_equal(count_json("{\"variant\": \"splitkv\", \"trait_config\": {\"mask\": "
				    "{\"values\": []}, \"data_type\": {\"values\": [\"fp16\"]}}}"),
			 60);
	/* In rules mode, a variant that does not exist is an empty list. */
	assert_int_equal(count_json("{\"variant\": \"nonesuch\"}"), 0);
}

static void exhaustive_mode(void **state)
{
	struct spec_space_options options = {
		.arch = "gfx1100",
		.exhaustive = 1,
		.config_json =
			"{\"variant\": \"fwd\", \"trait_config\": {\"data_type\": {\"values\": "
			"[\"fp16\"]}, \"pipeline\": {\"values\": [\"qr\"]}, \"mask\": {\"values\": "
			"[\"bottom_right\"]}, \"bias\": {\"values\": [\"no\"]}, \"mode\": "
			"{\"values\": "
			"[\"batch\"]}, \"lse\": {\"values\": [false]}, \"dropout\": {\"values\": "
			"[false]}, \"logits\": {\"values\": [false]}, \"block_per_cu\": []}}"};
	struct spec_space *space;
	struct fmha_error err = {0};
	const uint64_t n = count_space(&options);

	(void)state;
	/* The empty list of blocks per CU means -1, 1, 2; everything else is one value. */
	assert_true(n > 0 && n % 3 == 0);
	assert_int_equal(count_filtered(&options, "pad_s or pad_sk or pad_d or pad_dv"), 0);
	assert_int_equal(count_filtered(&options, "mask == 'bottom_right'"), n);
	options.config_json = "{\"variant\": \"nonesuch\"}";
	assert_int_equal(spec_space_new(catalog, &options, &space, &err), FMHA_EINVAL);
	/* appendkv is the same in both modes. */
	options.config_json = NULL;
	options.variant = "appendkv";
	options.receipt = 800;
	assert_int_equal(count_space(&options), 216);
}

static void refuses_what_does_not_exist(void **state)
{
	struct spec_space *space;
	struct fmha_error err = {0};
	struct spec_space_options options = {.arch = "gfx9999"};

	(void)state;
	assert_int_equal(spec_space_new(catalog, &options, &space, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "arch");
	options = (struct spec_space_options){.arch = "gfx942", .rules = "cpu"};
	assert_int_equal(spec_space_new(catalog, &options, &space, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "rules");
	options = (struct spec_space_options){.arch = "gfx942", .variant = "nonesuch"};
	assert_int_equal(spec_space_new(catalog, &options, &space, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "variant");
	/* A sweep is AMD's, and asks for its space; this build's rows are what they are. */
	options = (struct spec_space_options){.arch = "gfx942", .rules = "gpu", .config = "fwd"};
	assert_int_equal(spec_space_new(catalog, &options, &space, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "config");
	options = (struct spec_space_options){.arch = "gfx942", .config = "nonesuch"};
	assert_int_equal(spec_space_new(catalog, &options, &space, &err), FMHA_EIO);
	options = (struct spec_space_options){.arch = "gfx942", .config = "a", .variant = "b"};
	assert_int_equal(spec_space_new(catalog, &options, &space, &err), FMHA_EINVAL);
}

static void profiles_keep_what_they_say(void **state)
{
	struct kernel_spec fp32 = find_spec("gfx942", "family == 'fwd' and data_type == 'bf16'");

	(void)state;
	assert_int_equal(spec_profile_count(catalog), 14);
	assert_int_equal(spec_profile_find(catalog, "nonesuch"), -1);
	assert_int_equal(spec_profile_receipt(catalog, spec_profile_find(catalog, "aiter_cpp")),
			 600);
	assert_int_equal(spec_profile_receipt(catalog, spec_profile_find(catalog, "all")), -1);
	fp32.signature.data_type = SPEC_FP32;
	fp32.signature.hdim_q = 48;
	assert_true(spec_profile_keeps(catalog, spec_profile_find(catalog, "all"), &fp32));
	assert_false(spec_profile_keeps(catalog, spec_profile_find(catalog, "ck_default"), &fp32));
	fp32.signature.mode = SPEC_MODE_BATCH;
	fp32.signature.hdim_v = 48;
	fp32.signature.bias = fp32.signature.lse = fp32.signature.dropout = 0;
	assert_true(spec_profile_keeps(catalog, spec_profile_find(catalog, "fp32_min"), &fp32));
	fp32.signature.lse = 1;
	assert_false(spec_profile_keeps(catalog, spec_profile_find(catalog, "fp32_min"), &fp32));
}

static int compare_hashes(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

/* How many kernels a sweep has when those that differ by their tile alone count once. */
static size_t count_features(const char *config, int without_skip)
{
	struct spec_space_options options = {.arch = "gfx950", .rules = "ck", .config = config};
	struct spec_space *space = make_space(&options);
	struct spec_iter *iter = spec_iter_new(space, NULL);
	uint64_t *hashes = NULL, last = 0;
	const struct kernel_spec *found;
	size_t n = 0, n_allocated = 0, n_distinct = 0;

	assert_non_null(iter);
	while ((found = spec_iter_next(iter))) {
		struct kernel_spec spec = *found;
		uint64_t hash;

		memset(&spec.tile, 0, sizeof(spec.tile));
		hash = spec_hash(&spec);
		/* Tiles come one after the other. */
		if (hash == last || (without_skip && spec.signature.skip_min_seqlen_q))
			continue;
		last = hash;
		if (n == n_allocated) {
			n_allocated = n ? 2 * n : 1024;
			hashes = realloc(hashes, n_allocated * sizeof(*hashes));
			assert_non_null(hashes);
		}
		hashes[n++] = hash;
	}
	qsort(hashes, n, sizeof(*hashes), compare_hashes);
	for (size_t i = 0; i < n; i++)
		n_distinct += i == 0 || hashes[i] != hashes[i - 1];
	free(hashes);
	spec_iter_free(iter);
	spec_space_free(space);
	return n_distinct;
}

/* docs/seeds.md: "about 12K" of receipt0_fwd, 16 of fwd_ci, 33,541 of all. */
static void without_tiles_as_published(void **state)
{
	static const struct {
		const char *config;
		size_t n;
	} sweeps[] = {{"receipt0_fwd", 11788}, {"splitkv", 3690},       {"pagedkv", 1440},
		      {"appendkv", 220},       {"batch_prefill", 6096}, {"bwd", 10272}};
	size_t sum = 0;

	(void)state;
	for (size_t i = 0; i < sizeof(sweeps) / sizeof(sweeps[0]); i++) {
		assert_int_equal(count_features(sweeps[i].config, 0), sweeps[i].n);
		sum += sweeps[i].n;
	}
	assert_int_equal(sum, 33506);
	assert_int_equal(count_features("fwd_ci", 1), 16);
	assert_int_equal(count_features("fwd_ci", 0), 32);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(without_tiles_as_published),
		cmocka_unit_test(counts_of_shipped_sweeps),
		cmocka_unit_test(counts_of_archs),
		cmocka_unit_test(counts_by_receipt),
		cmocka_unit_test(closed_forms),
		cmocka_unit_test(exhaustive_mode_keeps_one_of_equal_tiles),
		cmocka_unit_test(archs_without_figures_enumerate_too),
		cmocka_unit_test(every_arch_has_every_family),
		cmocka_unit_test(lookups_find_their_spec),
		cmocka_unit_test(lookups_find_all_of_a_signature),
		cmocka_unit_test(lookups_of_nothing_find_nothing),
		cmocka_unit_test(stages_keep_only_their_own_traits),
		cmocka_unit_test(head_dims_ascend),
		cmocka_unit_test(restricted_head_dims),
		cmocka_unit_test(lists_of_a_sweep),
		cmocka_unit_test(exhaustive_mode),
		cmocka_unit_test(refuses_what_does_not_exist),
		cmocka_unit_test(profiles_keep_what_they_say),
	};

	return cmocka_run_group_tests(tests, load_catalog, free_catalog);
}
