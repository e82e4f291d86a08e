/* SPDX-License-Identifier: MIT */
/* Candidates, the reasons of rejections, the order of strategies, and explanations without a
 * device. */
#include "fixture.h"

#include <dispatch/ck.h>
#include <stdio.h>

#include <cjson/cJSON.h>

#include <dispatch/plan_offline.h>
#include <catalogue/backends.h>

#include "select.h"

static struct spec_catalog *catalog;

static int load_catalog(void **state)
{
	struct fmha_error err;

	(void)state;
	return spec_catalog_load(NULL, fmha_backends, &catalog, &err);
}

static int free_catalog(void **state)
{
	(void)state;
	catalog = spec_catalog_free(catalog);
	return 0;
}

static struct registry_source *foreign; /* of the fixture, where its kernels are not this build's */

/* A registry and a device with no find(): every spec is as good as built. */
static void offline_device(struct fixture *f, const char *arch, const char *rules, uint32_t units)
{
	struct registry_device model = {0};
	struct registry *registry;

	(void)snprintf(model.name, sizeof(model.name), "%s", arch);
	registry_device_archs(&model, arch);
	if (rules)
		assert_works(f, ck_source_new(catalog, &model, rules, &foreign, &f->err));
	model.source = foreign;
	assert_works(f, registry_new(catalog, &model, &registry, &f->err));
	f->decree.device = (struct plan_device){.arch = arch,
						.registry = registry,
						.compute_units = units,
						.foreign = ck_foreign(foreign)};
	if (spec_arch_model(catalog, spec_arch_find(catalog, arch)))
		f->decree.device.lds_bytes =
			spec_arch_model(catalog, spec_arch_find(catalog, arch))->lds_bytes;
}

static void release(struct fixture *f)
{
	registry_free(f->decree.device.registry);
	foreign = ck_source_free(foreign);
	fixture_deinit(f);
}

/* bf16, 2 x 16 heads over 4, 1024 x 1024, hdim 128. */
static void big_forward(struct fixture *f)
{
	struct fmha_problem *p = &f->problem;

	fixture_init(f, FMHA_FORWARD, FMHA_BATCH);
	p->batch = 2;
	p->nhead_q = 16;
	p->nhead_k = 4;
	p->seqlen_q = p->seqlen_k = 1024;
	p->hdim_q = p->hdim_v = 128;
	fixture_add(f, FMHA_T_Q, FMHA_BF16);
	fixture_add(f, FMHA_T_K, FMHA_BF16);
	fixture_add(f, FMHA_T_V, FMHA_BF16);
	fixture_add(f, FMHA_T_O, FMHA_BF16);
}

static void big_backward(struct fixture *f)
{
	big_forward(f);
	f->problem.op = FMHA_BACKWARD;
	f->problem.mask = FMHA_MASK_TOP_LEFT;
	f->problem.window_right = 0;
	fixture_add(f, FMHA_T_LSE, FMHA_F32);
	fixture_add(f, FMHA_T_DO, FMHA_BF16);
	fixture_add(f, FMHA_T_DQ, FMHA_BF16);
	fixture_add(f, FMHA_T_DK, FMHA_BF16);
	fixture_add(f, FMHA_T_DV, FMHA_BF16);
}

/* What one selection saw for the forward stage of the fixture's problem. */
static void report_of(struct fixture *f, enum abi_family family, struct select_report *report)
{
	struct plan_stage chosen;
	struct launch_bases bases;
	struct shape_words shapes;
	union abi_args args;
	struct select_stage stage = {.plan = &f->plan,
				     .device = &f->decree.device,
				     .family = family,
				     .dtype = f->problem.q.dtype,
				     .args = &args,
				     .shapes = &shapes};

	shape_words_make(&f->plan.problem, &shapes);
	f->plan.stages[0].family = family;
	bases = args_placeholders(&f->plan);
	args_fill(&f->plan, 0, &bases, &args);
	*report = (struct select_report){0};
	assert_true(select_kernel(&stage, &chosen, report) >= 0);
}

static bool has_reason(const struct select_report *report, const char *reason)
{
	for (size_t i = 0; i < report->n; i++)
		if (!report->candidates[i].accepted && strstr(report->candidates[i].reason, reason))
			return true;
	return false;
}

static void plans_carry_canonical_names(void **state)
{
	static const char *const archs[] = {"gfx90a",  "gfx942", "gfx950",    "gfx1100",
					    "gfx1201", "sm_90a", "x86_64_v4", "portable"};

	(void)state;
	for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++) {
		struct fixture f;
		struct kernel_spec spec;
		char name[SPEC_NAME_BYTES];

		big_forward(&f);
		offline_device(&f, archs[i], NULL, 100);
		assert_works(&f, fixture_build(&f));
		assert_int_equal(f.plan.n_stages, 1);
		assert_int_equal(f.plan.stages[0].has_spec, 1);
		assert_int_equal(spec_name_parse(catalog, f.plan.stages[0].kernel, &spec, NULL), 0);
		assert_int_equal(spec_compare(&spec, &f.plan.stages[0].spec), 0);
		(void)spec_name_format(catalog, &spec, name);
		assert_string_equal(name, f.plan.stages[0].kernel);
		assert_int_equal(registry_find(f.decree.device.registry, name, NULL, NULL, NULL),
				 0);
		release(&f);
	}
}

static void choice_is_deterministic(void **state)
{
	char first[PLAN_KERNEL_BYTES] = "";

	(void)state;
	for (int i = 0; i < 3; i++) {
		struct fixture f;

		big_forward(&f);
		offline_device(&f, "gfx942", "ck", 304);
		assert_works(&f, fixture_build(&f));
		if (i > 0)
			assert_string_equal(first, f.plan.stages[0].kernel);
		strcpy(first, f.plan.stages[0].kernel);
		release(&f);
	}
}

static void a_band_without_edges_is_no_mask(void **state)
{
	struct fixture f;

	(void)state;
	big_forward(&f);
	f.problem.mask = FMHA_MASK_BOTTOM_RIGHT;
	f.problem.window_left = f.problem.window_right = -1;
	offline_device(&f, "sm_90a", NULL, 132);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.signature.mask, SPEC_MASK_NO);
	release(&f);
	big_forward(&f);
	f.problem.mask = FMHA_MASK_BOTTOM_RIGHT;
	f.problem.window_right = 5;
	offline_device(&f, "sm_90a", NULL, 132);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.signature.mask, SPEC_MASK_GENERIC);
	release(&f);
}

/* Hopper's backward sums dQ in tiles of its own: a buffer, zeros, a third stage. */
static void hopper_sums_dq_in_tiles(void **state)
{
	const struct fmha_problem *p;
	union abi_args args[PLAN_MAX_STAGES];
	struct fixture f;

	(void)state;
	for (int deterministic = 0; deterministic < 2; deterministic++) {
		big_backward(&f);
		f.problem.deterministic = (uint32_t)deterministic;
		offline_device(&f, "sm_90a", NULL, 132);
		assert_works(&f, fixture_build(&f));
		p = &f.plan.problem;
		assert_int_equal(f.plan.n_stages, 3);
		assert_string_equal(f.plan.stages[1].pipeline, "gpu_wgmma");
		assert_int_equal(f.plan.stages[2].family, ABI_BWD_CONVERT_DQ);
		assert_int_equal(f.plan.workspace_zero, 1);
		assert_true(f.plan.dq_tile_rows >= 32);
		assert_true(f.plan.dq_tile_floats >= f.plan.dq_tile_rows * p->hdim_q);
		assert_int_equal(f.plan.dq_acc_bytes,
				 (uint64_t)p->batch * (uint64_t)p->nhead_q *
					 (uint64_t)((p->seqlen_q + f.plan.dq_tile_rows - 1) /
						    f.plan.dq_tile_rows) *
					 (uint64_t)f.plan.dq_tile_floats * 4);
		plan_placeholder_args(&f.plan, args);
		for (int i = 1; i < 3; i++) {
			assert_non_null(args[i].bwd.dq_acc);
			assert_int_equal(args[i].bwd.dq_tile_rows, f.plan.dq_tile_rows);
			assert_int_equal(args[i].bwd.dq_tile_floats, f.plan.dq_tile_floats);
		}
		release(&f);
	}
	big_backward(&f);
	offline_device(&f, "sm_80", NULL, 108);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_stages, 2);
	assert_int_equal(f.plan.dq_tile_rows, 0);
	release(&f);
}

/* A device that launches stages, of parts of heads unless it refuses them. */
struct cutter {
	bool refuses;
	int32_t parts[8]; /* that it was asked for */
	int n_asked;
};

static int find_in_parts(void *owner, enum abi_family family, uint32_t dtype,
			 const union abi_args *args, struct plan_stage *stage, const char **ret_why)
{
	struct cutter *cutter = owner;

	(void)dtype, (void)ret_why;
	stage->launch.grid[0] = 1;
	if (family != ABI_BWD_DQ_DK_DV)
		return 0;
	assert_true(cutter->n_asked < 8);
	cutter->parts[cutter->n_asked++] = args->bwd.kv_parts;
	stage->launch.grid[0] = args->bwd.kv_parts > 1 ? (uint32_t)args->bwd.kv_parts : 1;
	return cutter->refuses && args->bwd.kv_parts > 1;
}

/* 2 * 4 * 8 blocks of 132 units: heads that share keys are in parts, and the kernel is launched for as many. */
static void few_heads_of_keys_are_cut(void **state)
{
	(void)state;
	for (int refuses = 0; refuses < 2; refuses++) {
		struct cutter cutter = {.refuses = refuses};
		union abi_args args[PLAN_MAX_STAGES];
		struct fixture f;

		big_backward(&f);
		offline_device(&f, "sm_90a", NULL, 132);
		f.decree.device.find = find_in_parts;
		f.decree.device.owner = &cutter;
		assert_works(&f, fixture_build(&f));
		assert_string_equal(f.plan.stages[1].pipeline, "gpu_wgmma");
		assert_int_equal(f.plan.kv_parts, refuses ? 1 : 4);
		assert_int_equal(cutter.n_asked, refuses ? 3 : 2);
		assert_int_equal(cutter.parts[0], 0);
		assert_int_equal(cutter.parts[1], 4);
		assert_int_equal(f.plan.stages[1].launch.grid[0], refuses ? 1 : 4);
		plan_placeholder_args(&f.plan, args);
		for (int i = 0; i < 3; i++) {
			assert_int_equal(args[i].bwd.kv_parts, refuses ? 0 : 4);
			assert_true((args[i].bwd.kv_acc != NULL) == !refuses);
		}
		/* 4 * 4 parts of 2 * 1024 keys. */
		assert_true(f.plan.layout.dq_acc - f.plan.layout.kv_acc >=
			    (refuses ? 0 : UINT64_C(16) * 2048 * 256 * 4));
		assert_true(f.plan.layout.dq_acc - f.plan.layout.kv_acc <
			    512 + (refuses ? 0 : UINT64_C(16) * 2048 * 256 * 4));
		release(&f);
	}
}

/* 20 * 40 tiles are six rounds of 132 units and eight tiles, which all units share; under a mask, or where rounds are
 * full, tiles stay whole. */
static void the_last_tiles_are_cut(void **state)
{
	static const struct {
		int32_t rows, heads;
		enum fmha_mask mask;
		int32_t asked, splits;
	} cases[] = {{5000, 20, FMHA_MASK_NONE, 0, 8},
		     {5000, 20, FMHA_MASK_NONE, 1, 0},
		     {5000, 20, FMHA_MASK_BOTTOM_RIGHT, 0, 0},
		     {33 * 128, 20, FMHA_MASK_NONE, 0, 0},
		     {2048, 4, FMHA_MASK_NONE, 0, 0}};

	(void)state;
	for (int i = 0; i < 5; i++) {
		union abi_args args[PLAN_MAX_STAGES];
		const struct launch_record *launch;
		struct fixture f;

		big_forward(&f);
		f.problem.batch = 1;
		f.problem.nhead_q = cases[i].heads;
		f.problem.seqlen_q = f.problem.seqlen_k = cases[i].rows;
		f.problem.n_splits = cases[i].asked;
		f.problem.mask = cases[i].mask;
		if (cases[i].mask != FMHA_MASK_NONE)
			f.problem.window_right = 0;
		offline_device(&f, "sm_90a", NULL, 132);
		assert_works(&f, fixture_build(&f));
		launch = &f.plan.stages[0].launch;
		plan_placeholder_args(&f.plan, args);
		assert_int_equal(f.plan.n_stages, 1);
		assert_int_equal(f.plan.n_splits, 0);
		assert_string_equal(f.plan.stages[0].pipeline, "gpu_wgmma");
		assert_int_equal(args[0].fwd.rest.n_splits, cases[i].splits);
		assert_int_equal(f.plan.workspace_zero, cases[i].splits > 0);
		assert_int_equal(launch->n_zeroes, cases[i].splits > 0);
		if (cases[i].splits > 0) {
			assert_int_equal(f.plan.stages[0].family, ABI_FWD_SPLITKV);
			assert_int_equal(args[0].fwd.rest.n_parts, 8 * cases[i].splits);
			assert_non_null(args[0].fwd.rest.parts);
			assert_non_null(args[0].fwd.rest.arrivals);
			assert_true(f.plan.layout.rest_arrivals - f.plan.layout.rest_parts >=
				    (uint64_t)args[0].fwd.rest.n_parts * 128 * 136 * 4);
			/* eight tiles of eight waves */
			assert_int_equal(launch->zeroes[0].bytes, 8 * 8 * 4);
			assert_int_equal(launch->zeroes[0].offset, f.plan.layout.rest_arrivals);
			assert_int_equal(launch->zeroes[0].offset, plan_zero_from(&f.plan));
			assert_true(launch->zeroes[0].offset + launch->zeroes[0].bytes <=
				    f.plan.workspace_bytes);
		}
		release(&f);
	}
}

/* Heads of 96: 24 * 24 tiles of 192 rows are 5 rounds of 132 units where 24 * 36 of 128 are 7, and 8 * 16 are one. */
static void tall_tiles_are_for_fewer_rounds(void **state)
{
	static const struct {
		int32_t rows, heads;
		enum fmha_mask mask;
		int32_t tile;
	} cases[] = {{4600, 24, FMHA_MASK_NONE, 192},
		     {4600, 24, FMHA_MASK_BOTTOM_RIGHT, 128},
		     {2000, 8, FMHA_MASK_NONE, 128}};

	(void)state;
	for (int i = 0; i < 3; i++) {
		struct fixture f;

		big_forward(&f);
		f.problem.batch = 1;
		f.problem.hdim_q = f.problem.hdim_v = 96;
		f.problem.nhead_q = f.problem.nhead_k = cases[i].heads;
		f.problem.seqlen_q = f.problem.seqlen_k = cases[i].rows;
		f.problem.mask = cases[i].mask;
		if (cases[i].mask != FMHA_MASK_NONE)
			f.problem.window_right = 0;
		offline_device(&f, "sm_90a", NULL, 132);
		assert_works(&f, fixture_build(&f));
		assert_int_equal(f.plan.n_stages, 1);
		assert_string_equal(f.plan.stages[0].pipeline, "gpu_wgmma");
		assert_int_equal(f.plan.stages[0].spec.tile.tile_m0, cases[i].tile);
		release(&f);
	}
}

/* A device that launches stages, but refuses an order of keys if it is told to. */
struct orderer {
	bool refuses;
	int32_t words; /* that the first stage was asked for last */
};

static int find_with_order(void *owner, enum abi_family family, uint32_t dtype,
			   const union abi_args *args, struct plan_stage *stage,
			   const char **ret_why)
{
	struct orderer *orderer = owner;

	(void)dtype, (void)ret_why;
	stage->launch.grid[0] = 1;
	if (family != ABI_BWD_DOT_DO_O)
		return 0;
	orderer->words = args->bwd.order_words;
	return orderer->refuses && args->bwd.order_words > 0;
}

/* 1024 keys are 8 blocks of 3 words in a list for each of 2 batch entries, or for each of their 4 heads, too. */
static void intervals_have_an_order_of_keys(void **state)
{
	(void)state;
	for (int i = 0; i < 8; i++) {
		struct orderer orderer = {.refuses = i & 1};
		bool by_head = i & 2, is_bits = i & 4;
		union abi_args args[PLAN_MAX_STAGES];
		struct fixture f;
		int32_t words;

		big_backward(&f);
		f.problem.mask_endpoints = is_bits ? 0 : 3;
		fixture_add(&f, is_bits ? FMHA_T_MASK_BITS : FMHA_T_MASK_INTERVALS,
			    is_bits ? FMHA_U8 : FMHA_I32);
		for (int axis = 0; !is_bits && !by_head && axis < 4; axis++)
			f.problem.tensor[FMHA_T_MASK_INTERVALS].stride[axis] = (const int64_t[]){
				3 * 1024, 0, 1024, 1}[axis];
		offline_device(&f, "sm_90a", NULL, 132);
		f.decree.device.find = find_with_order;
		f.decree.device.owner = &orderer;
		assert_works(&f, fixture_build(&f));
		assert_string_equal(f.plan.stages[1].pipeline, "gpu_wgmma");
		words = is_bits || orderer.refuses ? 0 : 2 * (by_head ? 4 : 1) * 8 * 3;
		assert_int_equal(f.plan.order_words, words);
		assert_int_equal(orderer.words, words);
		plan_placeholder_args(&f.plan, args);
		for (int stage = 0; stage < 2; stage++)
			assert_int_equal(args[stage].bwd.order_words, words);
		assert_true(f.plan.layout.d >=
			    f.plan.workspace_head_bytes + (uint64_t)words * sizeof(abi_i32));
		release(&f);
	}
}

/* Whatever number of heads: their tiles have heads of one row of queries. */
static void hopper_has_a_loop_for_chosen_latents(void **state)
{
	static const int32_t heads[] = {8, 16, 64, 128};

	(void)state;
	for (int i = 0; i < 4; i++) {
		struct fixture f;

		big_forward(&f);
		f.problem.hdim_q = 576, f.problem.hdim_v = 512;
		f.problem.nhead_q = heads[i], f.problem.nhead_k = 1;
		f.problem.v_in_k = true;
		f.problem.n_splits = 1;
		f.problem.topk = 256;
		fixture_add(&f, FMHA_T_INDICES, FMHA_I32);
		f.problem.v = (struct fmha_tensor){0};
		offline_device(&f, "sm_90a", NULL, 132);
		assert_works(&f, fixture_build(&f));
		assert_string_equal(f.plan.stages[0].pipeline, "gpu_latent");
		release(&f);
	}
}

/* Of all keys and of chosen ones. */
static void hopper_has_a_loop_for_latents_of_fp8(void **state)
{
	(void)state;
	for (int chosen = 0; chosen < 2; chosen++) {
		struct fixture f;

		big_forward(&f);
		f.problem.hdim_q = 576, f.problem.hdim_v = 512;
		f.problem.nhead_q = 16, f.problem.nhead_k = 1;
		f.problem.v_in_k = true;
		f.problem.n_splits = 1;
		f.problem.v = (struct fmha_tensor){0};
		if (chosen) {
			f.problem.topk = 256;
			fixture_add(&f, FMHA_T_INDICES, FMHA_I32);
		}
		f.problem.kv_layout = FMHA_KV_LATENT_FP8;
		f.problem.k.dtype = FMHA_E4M3;
		f.problem.k.stride[0] = (int64_t)f.problem.seqlen_k * FMHA_LATENT_BYTES;
		f.problem.k.stride[1] = f.problem.k.stride[2] = FMHA_LATENT_BYTES;
		f.problem.k.stride[3] = 1;
		offline_device(&f, "sm_90a", NULL, 132);
		assert_works(&f, fixture_build(&f));
		assert_string_equal(f.plan.stages[0].pipeline, "gpu_latent");
		release(&f);
	}
}

/* Few heads or many, in pages or not; what that loop has not another one does. */
static void hopper_has_a_loop_for_latents(void **state)
{
	static const int32_t heads[] = {8, 16, 128}, rows[] = {1, 4};

	(void)state;
	for (int i = 0; i < 24; i++) {
		bool caps = i % 2, elsewhere = i / 2 % 2;
		struct fixture f;

		big_forward(&f);
		f.problem.hdim_q = 576, f.problem.hdim_v = 512;
		f.problem.nhead_q = heads[i / 4 % 3], f.problem.nhead_k = 1;
		f.problem.seqlen_q = rows[i / 12];
		f.problem.v_in_k = !elsewhere;
		f.problem.n_splits = 1;
		f.problem.logits_soft_cap = caps ? 30 : 0;
		if (!elsewhere)
			f.problem.v = (struct fmha_tensor){0};
		offline_device(&f, "sm_90a", NULL, 132);
		assert_works(&f, fixture_build(&f));
		assert_string_equal(f.plan.stages[0].pipeline,
				    caps || elsewhere ? "gpu_mma_pack" : "gpu_latent");
		release(&f);
	}
}

/* Many rows of heads above 256, in pages or not; what that loop has not a general one does. */
static void hopper_has_a_loop_for_wide_heads(void **state)
{
	static const int32_t dims[] = {264, 384, 400, 512};

	(void)state;
	for (int i = 0; i < 8; i++) {
		bool sloped = i % 2;
		struct fixture f;

		big_forward(&f);
		f.problem.hdim_q = f.problem.hdim_v = dims[i / 2];
		f.problem.seqlen_q = 2048;
		f.problem.n_splits = 1;
		f.problem.logits_soft_cap = 30;
		if (sloped)
			fixture_add(&f, FMHA_T_ALIBI_SLOPES, FMHA_F32);
		offline_device(&f, "sm_90a", NULL, 132);
		assert_works(&f, fixture_build(&f));
		if (sloped)
			assert_memory_equal(f.plan.stages[0].pipeline, "gpu_mma", 7);
		else
			assert_string_equal(f.plan.stages[0].pipeline, "gpu_wide");
		release(&f);
	}
}

static void short_problems_get_short_tiles(void **state)
{
	struct fixture f;

	(void)state;
	big_forward(&f);
	f.problem.mode = FMHA_BATCH;
	f.problem.seqlen_q = 16;
	f.problem.n_splits = 4;
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.tile.tile_m0, 16);
	f.problem.seqlen_q = 4096;
	assert_works(&f, fixture_build(&f));
	assert_true(f.plan.stages[0].spec.tile.tile_m0 >= 64);
	release(&f);
}

/* Rows of the tile that @units threads of @arch get for bf16, hdim 128, over 1024 keys. */
static int cpu_tile_rows(const char *arch, int heads, int rows, uint32_t units)
{
	struct fixture f;
	int m0;

	big_forward(&f);
	f.problem.batch = 1;
	f.problem.nhead_q = f.problem.nhead_k = heads;
	f.problem.seqlen_q = rows;
	offline_device(&f, arch, NULL, units);
	assert_works(&f, fixture_build(&f));
	m0 = f.plan.stages[0].spec.tile.tile_m0;
	release(&f);
	return m0;
}

/* As they were measured: see cost_cpu_rows(). */
static void cpu_tiles_balance_threads(void **state)
{
	(void)state;
	for (uint32_t units = 2; units <= 8; units += 6) {
		assert_int_equal(cpu_tile_rows("x86_64_v4_bf16", 8, 64, units), 96);
		assert_int_equal(cpu_tile_rows("x86_64_v4_bf16", 8, 96, units), 96);
		assert_int_equal(cpu_tile_rows("x86_64_v4_bf16", 8, 192, units), 96);
		assert_int_equal(cpu_tile_rows("x86_64_v4_bf16", 8, 128, units), 48);
		assert_int_equal(cpu_tile_rows("x86_64_v4_bf16", 8, 144, units), 48);
		assert_int_equal(cpu_tile_rows("x86_64_v4_bf16", 1, 96, units), 48);
		assert_int_equal(cpu_tile_rows("x86_64_v4_bf16", 3, 96, units), 48);
	}
	assert_int_equal(cpu_tile_rows("x86_64_v4_bf16", 8, 1024, 2), 96);
}

/* Packing keys takes as long as some dozen rows. */
static void few_rows_are_not_packed_for(void **state)
{
	static const int32_t shapes[][3] = {{32768, 1, 1}, {4, 8, 2}, {4, 16, 1}, {1, 1, 16}};

	(void)state;
	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
		struct fixture f;

		big_forward(&f);
		f.problem.batch = shapes[i][0];
		f.problem.nhead_q = shapes[i][1];
		f.problem.nhead_k = 1;
		f.problem.seqlen_q = shapes[i][2];
		f.problem.n_splits = 1;
		offline_device(&f, "x86_64_v4_bf16", NULL, 2);
		assert_works(&f, fixture_build(&f));
		assert_int_equal(f.plan.stages[0].spec.tile.tile_m0, 16);
		release(&f);
	}
}

/* Every kernel is there; tiles of fewer rows want less. */
static int find_by_rows(void *owner, enum abi_family family, uint32_t dtype,
			const union abi_args *args, struct plan_stage *stage, const char **ret_why)
{
	(void)family, (void)dtype, (void)args, (void)ret_why;
	stage->workspace_bytes = *(const uint64_t *)owner * stage->spec.tile.tile_m0;
	return 0;
}

static void a_workspace_beyond_the_device_is_no_choice(void **state)
{
	struct fixture f;
	struct select_report report;
	uint64_t a_row = 1;

	(void)state;
	big_forward(&f);
	offline_device(&f, "x86_64_v4_bf16", NULL, 8);
	f.decree.device.find = find_by_rows;
	f.decree.device.owner = &a_row;
	f.decree.device.workspace_most = 96;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.tile.tile_m0, 96);
	f.decree.device.workspace_most = 95;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.tile.tile_m0, 48);
	report_of(&f, ABI_FWD, &report);
	assert_true(has_reason(&report, "a workspace of 96 bytes: the device gives 95 at most"));
	select_report_deinit(&report);
	/* Where none fits, the best is taken after all, and the run says what is missing. */
	a_row = 100;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.tile.tile_m0, 96);
	release(&f);
}

static void padding_flags_are_compared_with_lengths(void **state)
{
	struct select_report report;
	struct fixture f;

	(void)state;
	big_forward(&f);
	f.problem.hdim_q = f.problem.hdim_v = 256; /* qr with pads ffff, ttff, tttt */
	f.problem.nhead_q = f.problem.nhead_k = 4;
	f.problem.seqlen_q = f.problem.seqlen_k = 1000;
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.pad_s, 1);
	assert_int_equal(f.plan.stages[0].spec.pad_sk, 1);
	assert_int_equal(f.plan.stages[0].spec.pad_d, 0);
	report_of(&f, ABI_FWD, &report);
	assert_true(has_reason(&report, "pad_s 0: seqlen_q 1000 is no multiple"));
	select_report_deinit(&report);
	/* Multiples of every tile: no padding at all. */
	f.problem.seqlen_q = f.problem.seqlen_k = 6 * 1024;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.pad_s, 0);
	assert_int_equal(f.plan.stages[0].spec.pad_sk, 0);
	/* Lengths that differ from sequence to sequence need both. */
	fixture_add(&f, FMHA_T_SEQLEN_Q, FMHA_I32);
	fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.pad_s, 1);
	report_of(&f, ABI_FWD, &report);
	assert_true(has_reason(&report, "pad_s 0: row counts vary"));
	select_report_deinit(&report);
	release(&f);
}

static void smaller_heads_use_a_padded_larger_kernel(void **state)
{
	struct fixture f;

	(void)state;
	big_forward(&f);
	f.problem.hdim_q = 72;
	f.problem.hdim_v = 72;
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.signature.hdim_q, 80); /* 80 x 96 is the smallest */
	assert_int_equal(f.plan.stages[0].spec.signature.hdim_v, 96);
	assert_int_equal(f.plan.stages[0].spec.pad_d, 1);
	assert_int_equal(f.plan.stages[0].spec.pad_dv, 1);
	f.problem.hdim_q = f.problem.hdim_v = 64;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.signature.hdim_q, 64);
	release(&f);
}

static void set_head_dim(struct fixture *f, int32_t hdim_q, int32_t hdim_v)
{
	struct fmha_problem *p = &f->problem;

	p->hdim_q = hdim_q;
	p->hdim_v = hdim_v;
}

/* Any head dim has a kernel everywhere: on a GPU a general loop of the next larger tile. */
static void any_head_dim_has_a_kernel(void **state)
{
	static const struct {
		const char *arch, *pipeline;
	} archs[] = {{"sm_90a", "gpu_mma"},     {"sm_80", "gpu_mma"},    {"gfx90a", "gpu_mfma"},
		     {"gfx942", "gpu_mfma"},    {"gfx1100", "gpu_wmma"}, {"gfx1201", "gpu_wmma"},
		     {"x86_64_v3", "cpu_flash"}};
	static const int32_t dims[][2] = {{59, 59}, {64, 59}, {59, 64}, {1, 255}};
	struct select_report report;
	struct fixture f;

	(void)state;
	for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++)
		for (size_t d = 0; d < 4; d++) {
			bool is_cpu = archs[i].pipeline[0] == 'c';

			big_backward(&f);
			set_head_dim(&f, dims[d][0], dims[d][1]);
			offline_device(&f, archs[i].arch, is_cpu ? "cpu" : NULL, 100);
			assert_works(&f, fixture_build(&f));
			release(&f);
			big_forward(&f);
			set_head_dim(&f, dims[d][0], dims[d][1]);
			offline_device(&f, archs[i].arch, is_cpu ? "cpu" : NULL, 100);
			assert_works(&f, fixture_build(&f));
			assert_ptr_equal(strstr(f.plan.stages[0].pipeline, archs[i].pipeline),
					 f.plan.stages[0].pipeline);
			if (d == 0) {
				assert_int_equal(f.plan.stages[0].spec.signature.hdim_q, 64);
				assert_int_equal(f.plan.stages[0].spec.pad_d, 1);
			}
			report_of(&f, ABI_FWD, &report);
			if (i == 0)
				assert_true(has_reason(&report, "no multiple of 8"));
			select_report_deinit(&report);
			release(&f);
		}
}

/* Padding by eights means whole eights, even where rows are aligned. */
static void padding_by_eights_is_no_padding_by_ones(void **state)
{
	static const enum fmha_tensor_role roles[] = {FMHA_T_Q,  FMHA_T_K,  FMHA_T_V,  FMHA_T_O,
						      FMHA_T_DO, FMHA_T_DQ, FMHA_T_DK, FMHA_T_DV};
	struct select_report report;
	struct fixture f;

	(void)state;
	for (int32_t hdim = 59; hdim >= 56; hdim -= 3) {
		bool found = false;

		big_backward(&f);
		f.problem.nhead_k = f.problem.nhead_q;
		set_head_dim(&f, hdim, hdim);
		for (int i = 0; i < 8; i++) {
			struct fmha_tensor *t = &f.problem.tensor[roles[i]];

			t->stride[0] = (int64_t)1024 * 16 * 64;
			t->stride[1] = (int64_t)16 * 64;
			t->stride[2] = 64;
			t->stride[3] = 1;
		}
		offline_device(&f, "gfx942", "ck", 304);
		assert_works(&f, fixture_build(&f));
		report_of(&f, ABI_BWD_DQ_DK_DV, &report);
		for (size_t i = 0; i < report.n; i++)
			found |= report.candidates[i].accepted &&
				 report.candidates[i].spec.pad_d == 8;
		select_report_deinit(&report);
		assert_int_equal(found, hdim == 56);
		release(&f);
	}
}

static void misaligned_rows_need_padding_of_head_dims(void **state)
{
	struct select_report report;
	struct fixture f;

	(void)state;
	big_forward(&f);
	f.problem.hdim_q = f.problem.hdim_v = 256;
	f.problem.nhead_q = f.problem.nhead_k = 4;
	f.problem.seqlen_q = f.problem.seqlen_k = 6 * 1024;
	f.problem.k.stride[0] = 6 * 1024 * 4 * 260;
	f.problem.k.stride[1] = 4 * 260;
	f.problem.k.stride[2] = 260; /* 520 bytes: not a multiple of 16 */
	f.problem.k.stride[3] = 1;
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].spec.pad_d, 1);
	report_of(&f, ABI_FWD, &report);
	assert_true(has_reason(&report, "tensor.k is not aligned"));
	select_report_deinit(&report);
	release(&f);
}

static void pages_nest_with_tiles(void **state)
{
	struct select_report report;
	struct fixture f;
	struct fmha_problem *p = &f.problem;

	(void)state;
	big_forward(&f);
	p->seqlen_q = 64;
	p->seqlen_k = 960;
	p->page_size = 48;
	p->n_pages = 100;
	p->max_blocks = 20;
	p->n_splits = 1;
	fixture_add(&f, FMHA_T_BLOCK_TABLE, FMHA_I32);
	fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].family, ABI_FWD_PAGEDKV);
	assert_int_equal(48 % f.plan.stages[0].spec.tile.tile_n0 == 0 ||
				 f.plan.stages[0].spec.tile.tile_n0 % 48 == 0,
			 1);
	report_of(&f, ABI_FWD_PAGEDKV, &report);
	assert_true(has_reason(&report, "page_size 48: does not nest with tile_n0 128"));
	select_report_deinit(&report);
	release(&f);
}

static void prefill_needs_its_page_size(void **state)
{
	struct fixture f;
	struct fmha_problem *p = &f.problem;

	(void)state;
	big_forward(&f);
	p->mode = FMHA_GROUP;
	p->total_q = 2048;
	p->page_size = 16;
	p->n_pages = 100;
	p->max_blocks = 64;
	fixture_add(&f, FMHA_T_SEQSTART_Q, FMHA_I32);
	fixture_add(&f, FMHA_T_BLOCK_TABLE, FMHA_I32);
	fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].family, ABI_BATCH_PREFILL);
	assert_int_equal(f.plan.stages[0].spec.signature.page_size, 16);
	assert_int_equal(f.plan.stages[0].spec.signature.kv_lookup_table, SPEC_KV_VLLM);
	p->page_size = 32; /* no batch_prefill of that page size: fwd_pagedkv in group mode */
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[0].family, ABI_FWD_PAGEDKV);
	release(&f);
}

static void invalid_specs_are_rejected_with_the_finding(void **state)
{
	struct select_report report;
	struct fixture f;

	(void)state;
	big_forward(&f); /* RDNA lists have qr_async kernels that RDNA does not support */
	offline_device(&f, "gfx1100", "ck", 96);
	assert_works(&f, fixture_build(&f));
	report_of(&f, ABI_FWD, &report);
	assert_true(has_reason(&report, "invalid: pipeline"));
	select_report_deinit(&report);
	release(&f);
}

static void helper_stages_ignore_what_they_do_not_use(void **state)
{
	struct fixture f;

	(void)state;
	big_forward(&f);
	f.problem.seqlen_q = 1;
	f.problem.seqlen_k = 8192;
	f.problem.batch = 1;
	f.problem.mask = FMHA_MASK_TOP_LEFT;
	f.problem.window_right = 0;
	fixture_add(&f, FMHA_T_ALIBI_SLOPES, FMHA_F32);
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_stages, 2);
	assert_int_equal(f.plan.stages[1].spec.signature.mask, SPEC_MASK_NO);
	release(&f);

	big_backward(&f);
	f.problem.dropout_p = 0.25F;
	fixture_add(&f, FMHA_T_BIAS, FMHA_BF16);
	fixture_add(&f, FMHA_T_DBIAS, FMHA_BF16);
	f.problem.deterministic = 1;
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_stages, 3);
	assert_int_equal(f.plan.stages[1].spec.signature.mask, SPEC_MASK_TOP_LEFT);
	assert_int_equal(f.plan.stages[1].spec.signature.dbias, 1);
	assert_int_equal(f.plan.stages[1].spec.signature.dropout_variant, SPEC_DROPOUT_WG16);
	assert_int_equal(f.plan.stages[0].spec.signature.mask, SPEC_MASK_NO);
	/* Deterministic batch mode: the persistent kernel's worker split, zeroed. */
	assert_true(f.plan.dq_splits >= 1);
	assert_int_equal(f.plan.workspace_zero, 1);
	release(&f);
}

static void trload_tiles_need_the_arch(void **state)
{
	struct fixture f;

	(void)state;
	big_backward(&f);
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.stages[1].spec.tile.use_trload, 0);
	release(&f);
}

static void quarantined_kernels_are_passed_by(void **state)
{
	char first[PLAN_KERNEL_BYTES];
	struct select_report report;
	struct registry *registry;
	struct fixture f;

	(void)state;
	big_forward(&f);
	offline_device(&f, "gfx942", "ck", 304);
	registry = f.decree.device.registry;
	assert_works(&f, fixture_build(&f));
	strcpy(first, f.plan.stages[0].kernel);
	assert_works(&f, registry_quarantine(registry, first, &f.err));
	assert_works(&f, fixture_build(&f));
	assert_string_not_equal(first, f.plan.stages[0].kernel);
	report_of(&f, ABI_FWD, &report);
	assert_true(has_reason(&report, "quarantined"));
	select_report_deinit(&report);
	release(&f);
}

/* A device that has seen the code of every kernel: the first @n of the names spill, or all do. */
struct seen {
	char names[4][PLAN_KERNEL_BYTES];
	int n, n_asked;
	bool all;
};

static int find_seen(void *owner, enum abi_family family, uint32_t dtype,
		     const union abi_args *args, struct plan_stage *stage, const char **ret_why)
{
	struct seen *seen = owner;
	bool spills = seen->all;

	(void)family, (void)dtype, (void)args, (void)ret_why;
	for (int i = 0; i < seen->n; i++)
		spills |= strcmp(seen->names[i], stage->kernel) == 0;
	stage->spills = spills ? 152 : 0;
	seen->n_asked++;
	return 0;
}

static void seeing_device(struct fixture *f, struct seen *seen)
{
	big_forward(f);
	offline_device(f, "sm_90a", NULL, 132);
	f->decree.device.find = find_seen;
	f->decree.device.owner = seen;
	assert_works(f, fixture_build(f));
	assert_int_equal(seen->n_asked, 1);
}

/* The choice is found to spill. */
static void spill_chosen(struct fixture *f, struct seen *seen)
{
	strcpy(seen->names[seen->n++], f->plan.stages[0].kernel);
	assert_works(f, fixture_build(f));
}

/* The kernel has taken so long at the problem's shape. */
static void measure(struct fixture *f, const char *name, double us)
{
	struct proto_measured result = {.us = us, .when_s = 1};

	plan_shape(&f->problem, result.shape);
	(void)snprintf(result.kernel, sizeof(result.kernel), "%s", name);
	assert_works(f, registry_set_tuned(f->decree.device.registry, &result, TIMES_OWN, &f->err));
}

static void kernels_that_spill_are_set_aside(void **state)
{
	struct seen seen = {0};
	struct fixture f;

	(void)state;
	seeing_device(&f, &seen);
	/* The next one, and the next, as long as they have matrix instructions. */
	for (int i = 0; i < 4; i++) {
		spill_chosen(&f, &seen);
		for (int k = 0; k <= i; k++)
			assert_string_not_equal(f.plan.stages[0].kernel, seen.names[k]);
		assert_int_equal(f.plan.stages[0].spills, 0);
		assert_null(strstr(f.plan.stages[0].pipeline, "scalar"));
	}
	/* Where all spill, the first one still costs least: what has no matrix instructions, and is
	 * sixteen times as slow, is no way out. */
	seen.all = true;
	assert_works(&f, fixture_build(&f));
	assert_string_equal(f.plan.stages[0].kernel, seen.names[0]);
	assert_int_equal(f.plan.stages[0].spills, 152);
	/* A measurement knows better. */
	seen.all = false;
	measure(&f, seen.names[1], 40);
	assert_works(&f, fixture_build(&f));
	assert_string_equal(f.plan.stages[0].kernel, seen.names[1]);
	release(&f);
}

static void explains_what_is_set_aside(void **state)
{
	const cJSON *selection, *candidate;
	struct seen seen = {0};
	struct fixture f;
	cJSON *root;
	char *json;
	int n = 0;

	(void)state;
	seeing_device(&f, &seen);
	spill_chosen(&f, &seen);
	assert_works(&f, plan_explain(&f.problem, &f.choice, &f.decree.device, &json, &f.err));
	root = cJSON_Parse(json);
	selection = cJSON_GetArrayItem(cJSON_GetObjectItem(root, "selections"), 0);
	cJSON_ArrayForEach(candidate, cJSON_GetObjectItem(selection, "candidates"))
	{
		if (strcmp(cJSON_GetObjectItem(candidate, "verdict")->valuestring, "set aside"))
			continue;
		assert_string_equal(cJSON_GetObjectItem(candidate, "name")->valuestring,
				    seen.names[0]);
		assert_string_equal(cJSON_GetObjectItem(candidate, "reason")->valuestring,
				    "spills 152 bytes of registers");
		n++;
	}
	assert_int_equal(n, 1);
	cJSON_Delete(root);
	free(json);
	release(&f);
}

/* The runner-up of a selection. */
static void second_name(struct fixture *f, char name[SPEC_NAME_BYTES])
{
	struct select_report report;

	report_of(f, ABI_FWD, &report);
	assert_true(report.n >= 2 && report.candidates[1].accepted);
	(void)spec_name_format(catalog, &report.candidates[1].spec, name);
	select_report_deinit(&report);
}

static void strategies_are_asked_in_order(void **state)
{
	char best[PLAN_KERNEL_BYTES], second[SPEC_NAME_BYTES], set[SPEC_NAME_BYTES + 8];
	struct registry *registry;
	struct fixture f;

	(void)state;
	big_forward(&f);
	offline_device(&f, "gfx942", "ck", 304);
	registry = f.decree.device.registry;
	assert_works(&f, fixture_build(&f));
	strcpy(best, f.plan.stages[0].kernel);
	second_name(&f, second);
	/* Measured times go before estimates, */
	measure(&f, best, 40);
	measure(&f, second, 39);
	assert_works(&f, fixture_build(&f));
	assert_string_equal(f.plan.stages[0].kernel, second);
	/* what the administrator prefers before both: a priority, */
	assert_works(&f, registry_set_priority(registry, best, 5, &f.err));
	assert_works(&f, fixture_build(&f));
	assert_string_equal(f.plan.stages[0].kernel, best);
	/* and a kernel set before that. */
	(void)snprintf(set, sizeof(set), "[\"%s\"]", second);
	assert_works(&f, registry_load_set(registry, "mine", set, strlen(set), NULL, &f.err));
	assert_works(&f, fixture_build(&f));
	assert_string_equal(f.plan.stages[0].kernel, second);
	release(&f);
}

/* One slow candidate that happens to have been measured says what the others will take. */
static void a_slow_measurement_does_not_win(void **state)
{
	char best[PLAN_KERNEL_BYTES], last[SPEC_NAME_BYTES];
	struct select_report report;
	struct fixture f;
	double ratio;

	(void)state;
	big_forward(&f);
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	strcpy(best, f.plan.stages[0].kernel);
	report_of(&f, ABI_FWD, &report);
	for (size_t i = 0; i < report.n && report.candidates[i].accepted; i++) {
		(void)spec_name_format(catalog, &report.candidates[i].spec, last);
		ratio = report.candidates[i].cost / report.candidates[0].cost;
	}
	select_report_deinit(&report);
	assert_true(ratio > 1.2);
	measure(&f, last, 1000);
	assert_works(&f, fixture_build(&f));
	assert_string_equal(f.plan.stages[0].kernel, best);
	/* Far faster than it was thought to be, it does. */
	measure(&f, best, 3000);
	assert_works(&f, fixture_build(&f));
	assert_string_not_equal(f.plan.stages[0].kernel, best);
	release(&f);
}

static void shape_is(const struct fmha_problem *problem, const char *want)
{
	char shape[PROTO_SHAPE_BYTES];

	plan_shape(problem, shape);
	assert_string_equal(shape, want);
}

/* Whatever changes which kernel is fastest is in the word; what does not, is not. */
static void words_of_shapes_hold_what_matters(void **state)
{
	char word[PROTO_SHAPE_BYTES];
	struct shape_words words;
	struct fmha_problem p;
	struct fixture f;

	(void)state;
	big_forward(&f);
	p = f.problem;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q1024ak1024a.no");
	p.mask = FMHA_MASK_BOTTOM_RIGHT;
	p.window_right = 0;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q1024ak1024a.br-x,0");
	p.window_left = 16;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q1024ak1024a.br-16,0");
	p.mask = FMHA_MASK_TOP_LEFT;
	p.sink_tokens = 4;
	p.n_splits = 3;
	p.logits_soft_cap = 30;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q1024ak1024a.tl-16,0,4+n3+cap1");
	p.softcap_approx = 1;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q1024ak1024a.tl-16,0,4+n3+cap1+ca1");
	/* Tuned files are sorted by the options in this order, whatever that of the struct. */
	p = f.problem;
	p.n_splits = 3;
	p.split_size = 5;
	p.page_size = 16;
	p.min_seqlen_q = 7;
	p.dropout_p = 0.5F;
	p.logits_soft_cap = 30;
	p.deterministic = p.kv_layout = p.descale_per_page = 1;
	p.descale_block_q = 2;
	p.descale_block_k = 3;
	p.rope = FMHA_ROPE_HALF_ROTATED;
	p.rotary_dim = 32;
	p.seqlen_new = 4;
	p.dropout_seed = 1;
	p.scale = 2;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q1024ak1024a.no+det1+n3+z5+p16+vec1+min1+cap1+drop1"
		     "+kq2+kk3+kp1+r2032+w4");
	/* Elements that repeat are in a cache: no other problem's time. */
	p = f.problem;
	problem_strides(&p, FMHA_T_K, p.k.stride);
	p.k.stride[1] = 0;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q1024ak1024a.no+0k2");
	p.batch = 1; /* nothing repeats along one */
	problem_strides(&f.problem, FMHA_T_K, p.k.stride);
	p.k.stride[0] = 0;
	shape_is(&p, "f.b.bf16.h128x128.b1h16x4.q1024ak1024a.no");
	/* Lengths go in steps of a quarter, and keep whether tiles come out even. */
	p = f.problem;
	p.seqlen_k = 1100;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q1024ak1280o.no");
	p.seqlen_k = 1152;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q1024ak1280a.no");
	p.seqlen_q = 5;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q5ok1280a.no");
	p.page_size = 16;
	shape_is(&p, "f.b.bf16.h128x128.b2h16x4.q5ok1280a.no+p16");
	/* Neighbours differ in a length, and are neighbours of each other. */
	p = f.problem;
	shape_words_make(&p, &words);
	assert_string_equal(words.word[1], "f.b.bf16.h128x128.b2h16x4.q1024ak1280a.no");
	p.seqlen_k = 1280;
	shape_words_make(&p, &words);
	plan_shape(&f.problem, word);
	assert_string_equal(words.word[2], word);
	release(&f);
}

/* ---- kernels that the caller names ---- */

static void name(struct fixture *f, const char *kernel)
{
	(void)snprintf(f->choice.kernel[f->choice.n++], PLAN_KERNEL_BYTES, "%s", kernel);
}

static void named_kernels_are_taken(void **state)
{
	char best[PLAN_KERNEL_BYTES], second[SPEC_NAME_BYTES];
	struct plan_choice chosen;
	struct fixture f;

	(void)state;
	big_forward(&f);
	offline_device(&f, "sm_90a", NULL, 132);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.named, 0);
	strcpy(best, f.plan.stages[0].kernel);
	second_name(&f, second);
	assert_string_not_equal(best, second);
	name(&f, second);
	assert_works(&f, fixture_build(&f));
	assert_string_equal(f.plan.stages[0].kernel, second);
	assert_int_equal(f.plan.named, 1);
	/* Whoever plans it again names the same. */
	plan_chosen(&f.plan, &chosen);
	assert_int_equal(chosen.n, 1);
	assert_string_equal(chosen.kernel[0], second);
	/* Nothing that dispatch goes by outweighs a name. */
	assert_works(&f, registry_set_priority(f.decree.device.registry, best, 9, &f.err));
	assert_works(&f, fixture_build(&f));
	assert_string_equal(f.plan.stages[0].kernel, second);
	release(&f);
}

static void names_say_whether_keys_are_split(void **state)
{
	char split[PLAN_KERNEL_BYTES], unsplit[PLAN_KERNEL_BYTES];
	struct fixture f;

	(void)state;
	big_forward(&f);
	offline_device(&f, "sm_90a", NULL, 132);
	f.problem.batch = 1;
	f.problem.seqlen_q = 1;
	f.problem.seqlen_k = 8192;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_stages, 2);
	strcpy(split, f.plan.stages[0].kernel);
	f.problem.n_splits = 1;
	assert_works(&f, fixture_build(&f));
	strcpy(unsplit, f.plan.stages[0].kernel);
	f.problem.n_splits = 0;
	name(&f, unsplit);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_stages, 1);
	assert_int_equal(f.plan.n_splits, 0);
	assert_string_equal(f.plan.stages[0].kernel, unsplit);
	f.problem.n_splits = 4;
	assert_fails(&f, fixture_build(&f), FMHA_EINVAL, "kernels");
	assert_string_equal(f.err.msg, "kernels: this plan has no fwd");
	f.choice.n = 0;
	name(&f, split);
	assert_works(&f, fixture_build(&f));
	assert_string_equal(f.plan.stages[0].kernel, split);
	assert_int_equal(f.plan.named, 1);
	assert_int_equal(f.plan.n_splits, 4);
	release(&f);
}

/* Also where kernels of splits would cut the last tiles of all keys. */
static void a_named_kernel_cuts_no_tiles(void **state)
{
	static const char plain[] = "fwd-bf16-h128-gpu_wgmma-t128x128x128x128x128x128-r8x1x1-"
				    "w16x16x16-p1111-no-no-bpc1-sm_90a";
	struct fixture f;

	(void)state;
	big_forward(&f);
	f.problem.batch = 1;
	f.problem.nhead_q = 20;
	f.problem.seqlen_q = f.problem.seqlen_k = 5000;
	offline_device(&f, "sm_90a", NULL, 132);
	name(&f, plain);
	assert_works(&f, fixture_build(&f));
	assert_string_equal(f.plan.stages[0].kernel, plain);
	assert_int_equal(f.plan.rest_splits, 0);
	assert_int_equal(f.plan.workspace_zero, 0);
	release(&f);
}

static void names_that_do_not_fit_say_why(void **state)
{
	char kernel[PLAN_KERNEL_BYTES], second[SPEC_NAME_BYTES];
	struct fixture f;

	(void)state;
	big_forward(&f);
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	strcpy(kernel, f.plan.stages[0].kernel);
	second_name(&f, second);
	/* Not a name; not of this device; twice the same family; no such stage. */
	name(&f, "fwd-bf17");
	assert_fails(&f, fixture_build(&f), FMHA_EINVAL, "kernels");
	assert_non_null(strstr(f.err.msg, "bf17"));
	f.choice.n = 0;
	name(&f, kernel);
	name(&f, second);
	assert_fails(&f, fixture_build(&f), FMHA_EINVAL, "kernels");
	assert_string_equal(f.err.msg, "kernels: two are of fwd");
	f.choice.n = 1;
	f.problem.split_size = 256;
	assert_fails(&f, fixture_build(&f), FMHA_EINVAL, "kernels");
	f.problem.split_size = 0;
	/* Another signature, a check that fails, a state of the registry. */
	f.problem.logits_soft_cap = 2;
	assert_fails(&f, fixture_build(&f), FMHA_ENOKERNEL, "kernels");
	assert_string_equal(f.err.msg,
			    "kernels: the fwd that is named: logits 0: the problem's is 1");
	f.problem.logits_soft_cap = 0;
	f.problem.seqlen_q = 1000;
	f.problem.seqlen_k = 1001;
	assert_fails(&f, fixture_build(&f), FMHA_ENOKERNEL, "kernels");
	assert_non_null(strstr(f.err.msg, "is no multiple of tile"));
	f.problem.seqlen_q = f.problem.seqlen_k = 1024;
	assert_works(&f, registry_quarantine(f.decree.device.registry, kernel, &f.err));
	assert_fails(&f, fixture_build(&f), FMHA_ENOKERNEL, "kernels");
	assert_string_equal(f.err.msg, "kernels: the fwd that is named: quarantined");
	release(&f);
}

/* The stage is tried twice, with and without a buffer for partial sums. */
static void backward_stages_are_named_apart(void **state)
{
	char main[PLAN_KERNEL_BYTES], last[PLAN_KERNEL_BYTES];
	struct fixture f;

	(void)state;
	big_backward(&f);
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_stages, 3);
	strcpy(main, f.plan.stages[1].kernel);
	strcpy(last, f.plan.stages[2].kernel);
	name(&f, last);
	name(&f, main);
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.named, 6);
	assert_string_equal(f.plan.stages[1].kernel, main);
	release(&f);
}

static void sets_limit_the_choice(void **state)
{
	static const char none[] = "[\"bwd_*\"]", all_but[] = "[\"*\", \"!*-t128x128x*\"]";
	struct fixture f;

	(void)state;
	big_forward(&f);
	offline_device(&f, "gfx942", "ck", 304);
	assert_works(&f, registry_load_set(f.decree.device.registry, "default", none,
					   sizeof(none) - 1, NULL, &f.err));
	assert_fails(&f, fixture_build(&f), FMHA_ENOKERNEL, "");
	assert_works(&f, registry_load_set(f.decree.device.registry, "default", all_but,
					   sizeof(all_but) - 1, NULL, &f.err));
	f.problem.hdim_q = f.problem.hdim_v = 64;
	assert_works(&f, fixture_build(&f));
	assert_null(strstr(f.plan.stages[0].kernel, "-t128x128x"));
	release(&f);
}

/* ---- explanations ---- */

static cJSON *explain(const char *arch, const char *rules, const struct fmha_problem *problem)
{
	struct plan_offline_options options = {.arch = arch, .rules = rules};
	struct fmha_error err = {0};
	char *json;
	cJSON *root;

	if (plan_explain_offline(&options, problem, &json, &err) != 0)
		fail_msg("%s: %s: %s", arch, err.field, err.msg);
	root = cJSON_Parse(json);
	assert_non_null(root);
	free(json);
	return root;
}

static int n_stages(const cJSON *root)
{
	const cJSON *plan = cJSON_GetObjectItem(root, "plan");

	return cJSON_GetArraySize(cJSON_GetObjectItem(plan, "stages"));
}

/* Each candidate has a verdict, each rejection a reason, each choice a why. */
static void assert_explained(const cJSON *root)
{
	const cJSON *selection, *candidate;

	cJSON_ArrayForEach(selection, cJSON_GetObjectItem(root, "selections"))
	{
		const cJSON *why = cJSON_GetObjectItem(selection, "why");
		int chosen = 0;

		assert_true(why->valuestring[0] != '\0');
		cJSON_ArrayForEach(candidate, cJSON_GetObjectItem(selection, "candidates"))
		{
			const char *verdict =
				cJSON_GetObjectItem(candidate, "verdict")->valuestring;

			chosen += strcmp(verdict, "chosen") == 0;
			if (strcmp(verdict, "rejected") == 0)
				assert_true(
					cJSON_GetObjectItem(candidate, "reason")->valuestring[0] !=
					'\0');
		}
		assert_int_equal(chosen, cJSON_IsString(cJSON_GetObjectItem(selection, "chosen")));
	}
}

static void explains_without_a_device(void **state)
{
	static const struct {
		const char *arch;
		int decode_stages;
	} archs[] = {{"gfx942", 2}, {"sm_90a", 2}, {"x86_64_v4", 1}};

	(void)state;
	for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++) {
		struct fixture f;
		cJSON *root;

		big_forward(&f);
		root = explain(archs[i].arch, NULL, &f.problem);
		assert_int_equal(n_stages(root), 1);
		assert_explained(root);
		cJSON_Delete(root);
		f.problem.batch = 1;
		f.problem.seqlen_q = 1;
		f.problem.seqlen_k = 8192;
		f.problem.nhead_k = 8;
		root = explain(archs[i].arch, NULL, &f.problem);
		assert_int_equal(n_stages(root), archs[i].decode_stages);
		assert_explained(root);
		cJSON_Delete(root);
		f.problem.page_size = 16;
		f.problem.n_pages = 600;
		f.problem.max_blocks = 512;
		f.problem.n_splits = 1;
		fixture_add(&f, FMHA_T_BLOCK_TABLE, FMHA_I32);
		fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
		root = explain(archs[i].arch, NULL, &f.problem);
		assert_int_equal(n_stages(root), 1);
		assert_explained(root);
		cJSON_Delete(root);
	}
}

/* Offline as on a device: AMD's decode loop takes pages by runs of 16 keys, and rows by 16 bytes. */
static void what_a_device_would_refuse_is_not_chosen_offline(void **state)
{
	static const int32_t page_sizes[] = {16, 1};

	(void)state;
	for (size_t i = 0; i < 2; i++) {
		const char *kernel, *reason = "";
		const cJSON *root, *first, *candidate;
		struct fixture f;

		big_forward(&f);
		f.problem.batch = 1;
		f.problem.seqlen_q = 1;
		f.problem.seqlen_k = 8192;
		f.problem.nhead_k = 8;
		f.problem.page_size = page_sizes[i];
		f.problem.n_pages = f.problem.max_blocks = 8192 / page_sizes[i];
		f.problem.n_splits = 1;
		fixture_add(&f, FMHA_T_BLOCK_TABLE, FMHA_I32);
		fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
		root = explain("gfx942", NULL, &f.problem);
		first = cJSON_GetArrayItem(cJSON_GetObjectItem(root, "selections"), 0);
		kernel = cJSON_GetObjectItem(first, "chosen")->valuestring;
		assert_true((page_sizes[i] == 16) == (strstr(kernel, "gpu_amd_decode") != NULL));
		cJSON_ArrayForEach(
			candidate,
			cJSON_GetObjectItem(
				first,
				"candidates")) if (strstr(cJSON_GetObjectItem(candidate, "name")
								  ->valuestring,
							  "gpu_amd_decode") &&
						   cJSON_GetObjectItem(candidate, "reason"))
			reason = cJSON_GetObjectItem(candidate, "reason")->valuestring;
		if (page_sizes[i] == 1 && !strstr(reason, "page"))
			fail_msg("rejected: '%s'", reason);
		cJSON_Delete((cJSON *)root);
	}
}

static void explains_backward_and_its_workspace(void **state)
{
	struct fixture f;
	cJSON *root;
	const cJSON *plan;

	(void)state;
	big_backward(&f);
	root = explain("gfx942", "ck", &f.problem);
	plan = cJSON_GetObjectItem(root, "plan");
	assert_int_equal(n_stages(root), 3);
	/* 16 of head; dq_acc 2 * 16 * 1024 * 128 floats; d 2 * 16 * 1024 floats. */
	assert_true(cJSON_GetObjectItem(plan, "dq_acc_bytes")->valuedouble == 16777216);
	assert_true(cJSON_GetObjectItem(plan, "workspace_bytes")->valuedouble ==
		    (16 + 16777216 + 131072 + 255) / 256 * 256);
	assert_explained(root);
	cJSON_Delete(root);
	root = explain("x86_64_v4", NULL, &f.problem);
	assert_int_equal(n_stages(root), 3);
	cJSON_Delete(root);
}

static void explains_why_there_is_nothing(void **state)
{
	struct fixture f;
	cJSON *root;

	(void)state;
	big_forward(&f);
	f.problem.logits_soft_cap = 30;
	fixture_add(&f, FMHA_T_BIAS, FMHA_BF16); /* soft cap and bias: no kernel of ck's */
	root = explain("gfx942", "ck", &f.problem);
	assert_true(cJSON_IsNull(cJSON_GetObjectItem(root, "plan")));
	assert_string_equal(
		cJSON_GetObjectItem(cJSON_GetObjectItem(root, "error"), "name")->valuestring,
		"ENOKERNEL");
	cJSON_Delete(root);
}

/* Nothing has executed such a loop of a wide head and found it right; who has no mask as data is served. */
static void masks_as_data_go_with_every_head(void **state)
{
	static const char *const archs[] = {"gfx90a",  "gfx942",  "gfx950",
					    "gfx1100", "gfx1201", "sm_90a"};
	static const enum fmha_tensor_role roles[] = {FMHA_N_TENSORS, FMHA_T_MASK_INTERVALS,
						      FMHA_T_MASK_BITS};

	(void)state;
	for (int i = 0; i < 6 * 3 * 2 * 2; i++) {
		const char *arch = archs[i / 12];
		enum fmha_tensor_role role = roles[i / 4 % 3];
		int32_t dim = i & 2 ? 512 : 256;
		struct fixture f;
		cJSON *root;

		(i & 1 ? big_backward : big_forward)(&f);
		set_head_dim(&f, dim, dim);
		f.problem.mask_endpoints = role == FMHA_T_MASK_INTERVALS ? 3 : 0;
		if (role != FMHA_N_TENSORS)
			fixture_add(&f, role, role == FMHA_T_MASK_BITS ? FMHA_U8 : FMHA_I32);
		root = explain(arch, NULL, &f.problem);
		if (cJSON_IsNull(cJSON_GetObjectItem(root, "plan")))
			fail_msg("%s, case %d: %s", arch, i % 12,
				 cJSON_PrintUnformatted(cJSON_GetObjectItem(root, "error")));
		cJSON_Delete(root);
	}
}

/* Neither a soft cap nor ALiBi takes a mask as data to the general loops. */
static void masks_as_data_go_with_capped_scores(void **state)
{
	(void)state;
	for (int i = 0; i < 8; i++) {
		bool backward = i & 1, has_slopes = i & 2, is_bits = i & 4;
		struct fixture f;

		(backward ? big_backward : big_forward)(&f);
		f.problem.logits_soft_cap = 30;
		f.problem.mask_endpoints = is_bits ? 0 : 3;
		fixture_add(&f, is_bits ? FMHA_T_MASK_BITS : FMHA_T_MASK_INTERVALS,
			    is_bits ? FMHA_U8 : FMHA_I32);
		if (has_slopes)
			fixture_add(&f, FMHA_T_ALIBI_SLOPES, FMHA_F32);
		offline_device(&f, "sm_90a", NULL, 132);
		assert_works(&f, fixture_build(&f));
		assert_string_equal(f.plan.stages[backward].pipeline, "gpu_wgmma");
		release(&f);
	}
}

static void a_refusal_says_what_kernels_lack(void **state)
{
	const cJSON *error;
	struct fixture f;
	cJSON *root;

	(void)state;
	big_forward(&f);
	set_head_dim(&f, 576, 512);
	fixture_add(&f, FMHA_T_BIAS, FMHA_BF16);
	root = explain("gfx942", NULL, &f.problem);
	error = cJSON_GetObjectItem(root, "error");
	assert_string_equal(cJSON_GetObjectItem(error, "name")->valuestring, "ENOKERNEL");
	assert_non_null(strstr(cJSON_GetObjectItem(error, "message")->valuestring,
			       ": no loop with such heads has bias"));
	cJSON_Delete(root);
}

static void explaining_refuses_bad_input(void **state)
{
	struct plan_offline_options options = {.arch = "gfx7"};
	struct fmha_error err = {0};
	struct fixture f;
	char *json;

	(void)state;
	big_forward(&f);
	assert_int_equal(plan_explain_offline(&options, &f.problem, &json, &err), FMHA_ENOENT);
	assert_string_equal(err.field, "arch");
	options.arch = "gfx942";
	f.problem.hdim_q = 584;
	assert_int_equal(plan_explain_offline(&options, &f.problem, &json, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "hdim_q");
}

/* Decodes beside a chunk over fp8: what a run is said to take counts each row once, by whichever stage has it. Who
 * serves which rows is written by a stage, and nothing that the host could read. */
static void the_work_of_stages_by_rows(void **state)
{
	const double per_pair = 8 * 2.0 * 256, widening = 3 * 8192.0 * 2 * 256;
	struct fixture f;
	double work, pairs = (32 + 512) * 8192.0;

	(void)state;
	fixture_init(&f, FMHA_FORWARD, FMHA_GROUP);
	f.problem.batch = 33;
	f.problem.nhead_q = 8;
	f.problem.nhead_k = 2;
	f.problem.hdim_q = f.problem.hdim_v = 128;
	f.problem.seqlen_q = 512;
	f.problem.total_q = 32 + 512;
	f.problem.seqlen_k = 8192;
	f.problem.page_size = 16;
	f.problem.n_pages = 64;
	f.problem.max_blocks = 512;
	f.problem.mask = FMHA_MASK_BOTTOM_RIGHT;
	f.problem.window_left = -1;
	f.problem.window_right = 0;
	fixture_add(&f, FMHA_T_Q, FMHA_BF16);
	fixture_add(&f, FMHA_T_O, FMHA_BF16);
	fixture_add(&f, FMHA_T_K, FMHA_E4M3);
	fixture_add(&f, FMHA_T_V, FMHA_E4M3);
	fixture_add(&f, FMHA_T_SEQSTART_Q, FMHA_I32);
	fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
	fixture_add(&f, FMHA_T_BLOCK_TABLE, FMHA_I32);
	offline_device(&f, "sm_90a", NULL, 132);
	fixture_allocate(&f);
	for (int32_t i = 0; i < 33; i++) {
		fixture_ints(&f, FMHA_T_SEQSTART_Q)[i] = i;
		fixture_ints(&f, FMHA_T_SEQLEN_K)[i] = 8192;
	}
	fixture_ints(&f, FMHA_T_SEQSTART_Q)[33] = f.problem.total_q;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.plan.few, PLAN_FEW_STAGES);
	work = plan_work(&f.plan, f.args, f.indices);
	assert_true(work > pairs * per_pair && work < 1.01 * pairs * per_pair + widening);
	/* More sequences have more rows than there are places: none is widened that has none. */
	for (int32_t i = 0; i < 33; i++)
		fixture_ints(&f, FMHA_T_SEQSTART_Q)[i] = i * f.problem.total_q / 33;
	assert_works(&f, fixture_bind(&f));
	work = plan_work(&f.plan, f.args, f.indices);
	assert_true(work > pairs * per_pair &&
		    work < 1.01 * pairs * per_pair + f.plan.wide_places * widening);
	/* Limits of memory hold for all that lies there together. */
	f.decree.device.workspace_most = 3 * f.plan.workspace_bytes / 2;
	assert_works(&f, fixture_build(&f));
	assert_true(f.plan.workspace_bytes <= f.decree.device.workspace_most);
	release(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(plans_carry_canonical_names),
		cmocka_unit_test(choice_is_deterministic),
		cmocka_unit_test(a_band_without_edges_is_no_mask),
		cmocka_unit_test(hopper_sums_dq_in_tiles),
		cmocka_unit_test(few_heads_of_keys_are_cut),
		cmocka_unit_test(the_last_tiles_are_cut),
		cmocka_unit_test(tall_tiles_are_for_fewer_rounds),
		cmocka_unit_test(intervals_have_an_order_of_keys),
		cmocka_unit_test(hopper_has_a_loop_for_latents),
		cmocka_unit_test(hopper_has_a_loop_for_latents_of_fp8),
		cmocka_unit_test(hopper_has_a_loop_for_wide_heads),
		cmocka_unit_test(hopper_has_a_loop_for_chosen_latents),
		cmocka_unit_test(short_problems_get_short_tiles),
		cmocka_unit_test(cpu_tiles_balance_threads),
		cmocka_unit_test(few_rows_are_not_packed_for),
		cmocka_unit_test(a_workspace_beyond_the_device_is_no_choice),
		cmocka_unit_test(padding_flags_are_compared_with_lengths),
		cmocka_unit_test(smaller_heads_use_a_padded_larger_kernel),
		cmocka_unit_test(any_head_dim_has_a_kernel),
		cmocka_unit_test(padding_by_eights_is_no_padding_by_ones),
		cmocka_unit_test(misaligned_rows_need_padding_of_head_dims),
		cmocka_unit_test(pages_nest_with_tiles),
		cmocka_unit_test(prefill_needs_its_page_size),
		cmocka_unit_test(invalid_specs_are_rejected_with_the_finding),
		cmocka_unit_test(helper_stages_ignore_what_they_do_not_use),
		cmocka_unit_test(trload_tiles_need_the_arch),
		cmocka_unit_test(quarantined_kernels_are_passed_by),
		cmocka_unit_test(kernels_that_spill_are_set_aside),
		cmocka_unit_test(explains_what_is_set_aside),
		cmocka_unit_test(strategies_are_asked_in_order),
		cmocka_unit_test(a_slow_measurement_does_not_win),
		cmocka_unit_test(words_of_shapes_hold_what_matters),
		cmocka_unit_test(named_kernels_are_taken),
		cmocka_unit_test(names_say_whether_keys_are_split),
		cmocka_unit_test(a_named_kernel_cuts_no_tiles),
		cmocka_unit_test(names_that_do_not_fit_say_why),
		cmocka_unit_test(backward_stages_are_named_apart),
		cmocka_unit_test(sets_limit_the_choice),
		cmocka_unit_test(explains_without_a_device),
		cmocka_unit_test(what_a_device_would_refuse_is_not_chosen_offline),
		cmocka_unit_test(explains_backward_and_its_workspace),
		cmocka_unit_test(explains_why_there_is_nothing),
		cmocka_unit_test(masks_as_data_go_with_every_head),
		cmocka_unit_test(masks_as_data_go_with_capped_scores),
		cmocka_unit_test(a_refusal_says_what_kernels_lack),
		cmocka_unit_test(explaining_refuses_bad_input),
		cmocka_unit_test(the_work_of_stages_by_rows),
	};

	return cmocka_run_group_tests(tests, load_catalog, free_catalog);
}
