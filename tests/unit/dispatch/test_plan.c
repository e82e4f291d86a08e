/* SPDX-License-Identifier: MIT */
/* Which stages a problem becomes, how its workspace is laid out, what it costs. */
#include "fixture.h"

#include <time.h>
#include <math.h>

#include "internal.h"

static void assert_families(const struct plan *plan, uint32_t n, const enum abi_family *families)
{
	assert_int_equal(plan->n_stages, n);
	for (uint32_t i = 0; i < n; i++)
		assert_int_equal(plan->stages[i].family, families[i]);
}
#define ASSERT_STAGES(plan, ...)                                                                   \
	assert_families(plan, sizeof((enum abi_family[]){__VA_ARGS__}) / sizeof(enum abi_family),  \
			(enum abi_family[]){__VA_ARGS__})

static void forward_is_one_stage(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD);
	assert_string_equal(f.plan.stages[0].kernel, "decree_fwd");
	assert_int_equal(f.plan.workspace_bytes, 0);
	assert_int_equal(f.plan.n_splits, 0);
	assert_true(fabsf(f.plan.problem.scale - 0.25F) < 1e-7F);
	assert_int_equal(f.plan.problem.q.stride[0], 5 * 4 * 16);
	assert_int_equal(f.plan.problem.q.stride[3], 1);
	assert_int_equal(f.plan.problem.o.stride[1], 4 * 8);
	fixture_deinit(&f);
}

static void zero_scale_stays_zero(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	f.problem.scale = 0;
	assert_works(&f, fixture_build(&f));
	assert_true(f.plan.problem.scale == 0);
	fixture_deinit(&f);
}

static void mask_that_hides_nothing_is_none(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	f.problem.mask = FMHA_MASK_BOTTOM_RIGHT;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.problem.mask, FMHA_MASK_NONE);
	fixture_deinit(&f);
}

static void make_paged(struct fixture *f)
{
	struct fmha_problem *p = &f->problem;

	p->page_size = 4;
	p->n_pages = 6;
	p->max_blocks = 2;
	fixture_add(f, FMHA_T_BLOCK_TABLE, FMHA_I32);
	fixture_add(f, FMHA_T_SEQLEN_K, FMHA_I32);
	p->total_k = 0;
	p->seqstart_k = (struct fmha_tensor){0};
}

static void paged_forward_takes_its_families(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	make_paged(&f);
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD_PAGEDKV);
	fixture_deinit(&f);

	fixture_forward(&f, FMHA_GROUP);
	make_paged(&f);
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_BATCH_PREFILL);
	f.decree.missing = 1U << ABI_BATCH_PREFILL;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD_PAGEDKV);
	f.decree.missing |= 1U << ABI_FWD_PAGEDKV;
	assert_fails(&f, fixture_build(&f), FMHA_ENOKERNEL, "");
	fixture_deinit(&f);
}

static void make_decode(struct fixture *f)
{
	struct fmha_problem *p = &f->problem;

	p->batch = 1;
	p->nhead_q = 32;
	p->nhead_k = 8;
	p->seqlen_q = 1;
	p->seqlen_k = 8192;
	p->hdim_q = p->hdim_v = 128;
}

static void decode_is_split_and_combined(void **state)
{
	struct fixture f;
	uint64_t o_acc = 15ULL * 32 * 1 * 128 * 4, lse_acc = 15ULL * 32 * 4;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	make_decode(&f);
	decree_init(&f.decree, 132);
	f.decree.workspace_bytes = 1000;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD_SPLITKV, ABI_FWD_SPLITKV_COMBINE);
	assert_int_equal(f.plan.n_splits, 15);
	assert_int_equal(f.plan.split_size, 576);
	assert_int_equal(f.plan.layout.o_acc, 0);
	assert_int_equal(f.plan.layout.lse_acc, o_acc);
	/* 245760 + 1920 = 247680, up to 256: 247808; then 1000 private bytes, shared by both. */
	assert_int_equal(f.plan.stages[0].workspace_offset, 247808);
	assert_int_equal(f.plan.stages[1].workspace_offset, 247808);
	assert_int_equal(f.plan.workspace_bytes, 247808 + 1000);
	assert_int_equal(o_acc + lse_acc, 247680);
	fixture_deinit(&f);
}

static void split_falls_back_or_is_refused(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	make_decode(&f);
	decree_init(&f.decree, 132);
	f.decree.missing = 1U << ABI_FWD_SPLITKV_COMBINE;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD);
	assert_int_equal(f.plan.n_splits, 0);
	f.problem.n_splits = 4;
	assert_fails(&f, fixture_build(&f), FMHA_ENOKERNEL, "");
	f.decree.missing = 0;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_splits, 4);
	assert_int_equal(f.plan.split_size, 2048);
	f.problem.n_splits = 1;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD);
	f.problem.n_splits = PLAN_MAX_SPLITS + 1;
	assert_fails(&f, fixture_build(&f), FMHA_EINVAL, "n_splits");
	f.problem.n_splits = 0;
	f.problem.split_size = 3000;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_splits, 3);
	assert_int_equal(f.plan.split_size, 3000);
	f.problem.split_size = 7;
	assert_fails(&f, fixture_build(&f), FMHA_EINVAL, "split_size");
	/* One split of a fixed size still goes through the combine: the same rounding for all. */
	f.problem.split_size = 10000;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD_SPLITKV, ABI_FWD_SPLITKV_COMBINE);
	fixture_deinit(&f);
}

/* Whatever is asked for: a split is no longer than the keys, and none has no keys. */
static void splits_end_with_the_keys(void **state)
{
	struct fixture f;
	uint64_t bytes;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	make_decode(&f);
	decree_init(&f.decree, 132);
	f.problem.split_size = 8192;
	assert_works(&f, fixture_build(&f));
	bytes = f.plan.workspace_bytes;
	f.problem.split_size = INT32_MAX / 256 * 256;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_splits, 1);
	assert_int_equal(f.plan.split_size, 8192);
	assert_int_equal(f.plan.workspace_bytes, bytes);
	f.problem.split_size = 0;
	f.problem.n_splits = PLAN_MAX_SPLITS;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_splits, 128);
	assert_int_equal(f.plan.split_size, 64);
	fixture_deinit(&f);
}

static void many_rows_are_not_split(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	make_decode(&f);
	decree_init(&f.decree, 132);
	f.problem.batch = 64;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD);
	f.problem.batch = 1;
	f.problem.seqlen_k = 400;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD);
	fixture_deinit(&f);
}

/* A decode, and how many splits it may get. */
struct decode {
	int batch, nhead_k, seqlen_q, seqlen_k, page_size;
	struct split_device device;
	int n_least, n_most;
};

static void assert_splits(const struct decode *cases, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		const struct decode *decode = &cases[i];
		struct fixture f;
		struct split_choice split;

		fixture_init(&f, FMHA_FORWARD, FMHA_BATCH);
		make_decode(&f);
		f.problem.batch = decode->batch;
		f.problem.nhead_k = decode->nhead_k;
		f.problem.nhead_q = 4 * decode->nhead_k;
		f.problem.seqlen_q = decode->seqlen_q;
		f.problem.seqlen_k = decode->seqlen_k;
		f.problem.page_size = decode->page_size;
		f.problem.q.dtype = f.problem.k.dtype = f.problem.v.dtype = FMHA_BF16;
		split_choose(&f.problem, &decode->device, &split);
		if (split.n < decode->n_least || split.n > decode->n_most)
			fail_msg("case %zu: %d splits, %s", i, split.n, split.why);
		assert_int_not_equal(split.why[0], 0);
	}
}

/* The examples of split.c, and what else decides: memory has to be busy, a second kernel costs. */
static void splits_keep_memory_busy(void **state)
{
	const struct split_device h200 = {.units = 132, .gpu = true}, cpu = {.units = 132};
	const struct decode cases[] = {
		{1, 1, 1, 131072, 0, h200, 112, 128},
		{1, 8, 1, 8192, 0, h200, 14, 16},
		{8, 8, 1, 16384, 0, h200, 2, 2},
		{64, 8, 1, 4096, 0, h200, 1, 1},
		{1, 8, 1, 200, 0, h200, 1, 1},
		{1, 8, 8, 8192, 0, h200, 16, 33}, /* 32 packed rows want two blocks in a unit */
		{1, 8, 64, 8192, 0, h200, 2, 9},  /* 256: products take the time */
		{16, 8, 1, 8192, 0, cpu, 1, 1},   /* a thread is one place */
		{1, 8, 1, 8192, 0, cpu, 15, 15},  /* as balance has it */
		{8, 8, 1, 16384, 16, h200, 4,
		 4}, /* not 3: two blocks in some units, one in others */
	};

	(void)state;
	assert_splits(cases, sizeof(cases) / sizeof(cases[0]));
}

/* By data sheets: few blocks ask for all that memory gives, and units are many. */
static void splits_of_amd_merge_few_parts(void **state)
{
	const struct split_device mi300 = {.units = 304,
					   .gpu = true,
					   .amd_unit_rate = 5300e3 / 304},
				  rx7900 = {.units = 96, .gpu = true, .amd_unit_rate = 960e3 / 96};
	const struct decode cases[] = {
		{1, 8, 1, 8192, 0, mi300, 12, 22}, {1, 1, 1, 131072, 0, mi300, 120, 180},
		{64, 8, 1, 4096, 0, mi300, 1, 1},  {1, 8, 1, 256, 0, mi300, 1, 1},
		{1, 8, 1, 8192, 0, rx7900, 3, 5},  {8, 8, 1, 8192, 0, rx7900, 1, 1},
	};

	(void)state;
	assert_splits(cases, sizeof(cases) / sizeof(cases[0]));
}

/* Sequences of lengths that only the device knows, and windows, go by shares where a device has them. */
static void uneven_rows_are_shared(void **state)
{
	const struct split_device h200 = {.units = 132, .gpu = true, .shares = true};
	struct split_device old = h200;
	struct split_choice split;
	struct fixture f;

	(void)state;
	old.shares = false;
	fixture_init(&f, FMHA_FORWARD, FMHA_BATCH);
	make_decode(&f);
	f.problem.batch = 16;
	f.problem.nhead_k = 8;
	f.problem.nhead_q = 32;
	f.problem.seqlen_q = 1;
	f.problem.seqlen_k = 12288;
	split_choose(&f.problem, &h200, &split);
	assert_false(split.shares); /* all of one length */
	fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
	split_choose(&f.problem, &old, &split);
	assert_false(split.shares);
	split_choose(&f.problem, &h200, &split);
	assert_true(split.shares);
	assert_int_equal(split.n, 8);
	assert_true((int64_t)split.n * split.size >= f.problem.seqlen_k);
	f.problem.batch = 1; /* a short table: what is in it is most of it */
	split_choose(&f.problem, &h200, &split);
	assert_false(split.shares);
	f.problem.seqlen_k = 32768;
	split_choose(&f.problem, &h200, &split);
	assert_true(split.shares && split.n == 32);
	f.problem.seqlen_k = 12288;
	f.problem.batch = 128; /* many short ones balance by themselves, long ones do not */
	split_choose(&f.problem, &h200, &split);
	assert_true(split.shares && split.n == 4);
	f.problem.seqlen_k = 2048;
	split_choose(&f.problem, &h200, &split);
	assert_false(split.shares);
	f.problem.batch = 2;
	f.problem.seqlen_k = 200;
	split_choose(&f.problem, &h200, &split);
	assert_false(split.shares || split.n > 1);
	f.problem.seqlen_k = 12288;
	f.problem.seqlen_q = 5; /* 20 packed rows */
	split_choose(&f.problem, &h200, &split);
	assert_false(split.shares);
	f.problem.seqlen_q = 1;
	f.problem.n_splits = 4; /* as asked */
	split_choose(&f.problem, &h200, &split);
	assert_true(!split.shares && split.n == 4);
	f.problem.n_splits = 0;
	f.problem.deterministic = 1; /* the others' lengths must not change a row's bits */
	split_choose(&f.problem, &h200, &split);
	assert_false(split.shares);
}

/* One row of each sequence, over latents in pages. */
static void init_latents(struct fixture *f, int32_t batch, int32_t heads, int32_t keys)
{
	fixture_init(f, FMHA_FORWARD, FMHA_BATCH);
	make_decode(f);
	f->problem.v_in_k = 1;
	f->problem.hdim_q = 576;
	f->problem.hdim_v = 512;
	f->problem.batch = batch;
	f->problem.nhead_k = 1;
	f->problem.nhead_q = heads;
	f->problem.seqlen_q = 1;
	f->problem.seqlen_k = keys;
	f->problem.page_size = 64;
	f->problem.q.dtype = f->problem.k.dtype = f->problem.v.dtype = FMHA_BF16;
	fixture_add(f, FMHA_T_SEQLEN_K, FMHA_I32);
}

/* The fastest of those measured (split.c). Where the cache has pages for a third of such lengths and less, those that are
 * split share all keys, and a row may be in as many parts as equal ones and more. */
static void latents_are_split_as_one_block_a_unit(void **state)
{
	static const struct {
		int32_t batch, heads, keys, n_splits, parts;
	} cases[] = {{128, 16, 1024, 1, 1}, {2, 16, 1024, 16, 16},   {32, 16, 8192, 4, 12},
		     {64, 128, 4096, 1, 1}, {4, 128, 32768, 16, 36}, {1, 128, 65536, 64, 66},
		     {8, 128, 16384, 8, 20}};

	const struct split_device h200 = {.units = 132, .gpu = true, .shares = true};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct split_choice split;
		struct fixture f;

		init_latents(&f, cases[i].batch, cases[i].heads, cases[i].keys);
		f.problem.n_pages = cases[i].batch * cases[i].keys / 64;
		split_choose(&f.problem, &h200, &split);
		assert_false(split.shares);
		assert_int_equal(split.n, cases[i].n_splits);
		f.problem.n_pages = f.problem.n_pages / 3 - 1;
		split_choose(&f.problem, &h200, &split);
		assert_int_equal(split.shares, cases[i].n_splits > 1);
		assert_int_equal(split.n, cases[i].parts);
		if (cases[i].batch == 32) { /* values in keys of other sizes have no such loop */
			f.problem.hdim_q = f.problem.hdim_v = 128;
			split_choose(&f.problem, &h200, &split);
			assert_true(split.shares);
		}
	}
}

/* A tile takes longer to widen than to bring: as many splits as 16 bits have, or more. */
static void latents_of_fp8_are_split_by_tiles(void **state)
{
	static const struct {
		int32_t batch, heads, keys, topk, n_splits;
	} cases[] = {{64, 128, 8192, 2048, 1}, {64, 64, 8192, 2048, 2}, {64, 16, 8192, 2048, 2},
		     {2, 128, 8192, 2048, 16}, {32, 16, 8192, 0, 4},    {64, 128, 4096, 0, 1}};

	const struct split_device h200 = {.units = 132, .gpu = true, .shares = true};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct split_choice split;
		struct fixture f;

		init_latents(&f, cases[i].batch, cases[i].heads, cases[i].keys);
		f.problem.kv_layout = FMHA_KV_LATENT_FP8;
		f.problem.topk = cases[i].topk;
		f.problem.k.dtype = FMHA_E4M3;
		split_choose(&f.problem, &h200, &split);
		assert_false(split.shares);
		assert_int_equal(split.n, cases[i].n_splits);
	}
}

static void windows_are_shared(void **state)
{
	const struct split_device h200 = {.units = 132, .gpu = true, .shares = true};
	struct split_choice split;
	struct fixture f;

	(void)state;
	fixture_init(&f, FMHA_FORWARD, FMHA_BATCH);
	make_decode(&f);
	f.problem.seqlen_q = 1;
	f.problem.seqlen_k = 16384;
	f.problem.mask = FMHA_MASK_BOTTOM_RIGHT;
	f.problem.window_left = -1;
	f.problem.window_right = 0;
	split_choose(&f.problem, &h200, &split);
	assert_false(split.shares);
	f.problem.window_left = 4095;
	split_choose(&f.problem, &h200, &split);
	assert_true(split.shares);
	f.problem.window_left = 16383; /* wider than what there is */
	split_choose(&f.problem, &h200, &split);
	assert_false(split.shares);
}

static void splits_cover_all_keys(void **state)
{
	(void)state;
	for (int keys = 0; keys < 40000; keys += 177)
		for (uint32_t units = 1; units < 400; units += 57) {
			struct fixture f;
			struct split_choice split;

			fixture_init(&f, FMHA_FORWARD, FMHA_BATCH);
			make_decode(&f);
			f.problem.seqlen_k = keys;
			split_choose(&f.problem,
				     &(struct split_device){.units = units,
							    .gpu = keys % 2,
							    .amd_unit_rate = keys % 4 * 5000},
				     &split);
			assert_true((int64_t)split.n * split.size >= keys);
			assert_true(split.n == 1 || (int64_t)(split.n - 1) * split.size < keys);
			assert_true(split.n <= 512);
		}
}

static void make_append(struct fixture *f, uint32_t rope)
{
	struct fmha_problem *p = &f->problem;

	p->seqlen_new = 2;
	p->rope = rope;
	fixture_add(f, FMHA_T_K_NEW, FMHA_F32);
	fixture_add(f, FMHA_T_V_NEW, FMHA_F32);
	fixture_add(f, FMHA_T_SEQLEN_K, FMHA_I32);
	if (rope == FMHA_ROPE_NONE)
		return;
	p->rotary_dim = 16;
	p->rotary_max_pos = 32;
	fixture_add(f, FMHA_T_ROTARY_COS, FMHA_F32);
	fixture_add(f, FMHA_T_ROTARY_SIN, FMHA_F32);
}

/* What is quantized already does not turn, and the error says that and not that a kernel lacks. */
static void fp8_does_not_rotate(void **state)
{
	struct fixture f;

	(void)state;
	for (uint32_t rope = FMHA_ROPE_NONE; rope <= FMHA_ROPE_HALF_ROTATED; rope++) {
		fixture_forward(&f, FMHA_BATCH);
		make_append(&f, rope);
		f.problem.q.dtype = f.problem.k.dtype = f.problem.v.dtype = FMHA_E4M3;
		f.problem.k_new.dtype = f.problem.v_new.dtype = FMHA_E4M3;
		f.problem.o.dtype = FMHA_BF16;
		if (rope == FMHA_ROPE_NONE) {
			assert_works(&f, fixture_build(&f));
		} else {
			assert_fails(&f, fixture_build(&f), FMHA_ENOTSUP, "rope");
			assert_non_null(
				strstr(f.err.msg, "not e4m3: give it as it was before quantizing"));
		}
		fixture_deinit(&f);
	}
}

static void append_comes_first(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	make_append(&f, FMHA_ROPE_NONE);
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD_APPENDKV, ABI_FWD);
	assert_int_equal(f.plan.workspace_bytes, 0);
	assert_null(f.decree.seen[ABI_FWD_APPENDKV].appendkv.q_rotated.data);
	fixture_deinit(&f);

	fixture_forward(&f, FMHA_BATCH);
	make_append(&f, FMHA_ROPE_INTERLEAVED);
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD_APPENDKV, ABI_FWD);
	assert_int_equal(f.plan.workspace_bytes, 2560); /* 2 * 5 * 4 * 16 * 4, a multiple of 256 */
	assert_int_equal(f.decree.seen[ABI_FWD_APPENDKV].appendkv.q_rows_same_position, 1);
	f.problem.n_splits = 2;
	f.problem.mask = FMHA_MASK_BOTTOM_RIGHT;
	f.problem.window_right = 0;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD_APPENDKV, ABI_FWD_SPLITKV, ABI_FWD_SPLITKV_COMBINE);
	assert_int_equal(f.decree.seen[ABI_FWD_APPENDKV].appendkv.q_rows_same_position, 0);
	assert_int_equal(f.plan.layout.o_acc, 2560);
	fixture_deinit(&f);
}

static void backward_is_two_or_three_stages(void **state)
{
	struct fixture f;

	(void)state;
	fixture_backward(&f, FMHA_BATCH);
	f.problem.mask = FMHA_MASK_TOP_LEFT; /* masked plans work: helper stages ignore the mask */
	f.problem.window_right = 0;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_BWD_DOT_DO_O, ABI_BWD_DQ_DK_DV);
	assert_int_equal(f.plan.dq_acc_bytes, 0);
	f.decree.needs_dq_acc = true;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_BWD_DOT_DO_O, ABI_BWD_DQ_DK_DV, ABI_BWD_CONVERT_DQ);
	assert_int_equal(f.plan.dq_acc_bytes, 2 * 4 * 5 * 16 * 4);
	fixture_deinit(&f);
}

static void masked_split_plan_works(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	f.problem.mask = FMHA_MASK_BOTTOM_RIGHT;
	f.problem.window_left = 3;
	f.problem.window_right = 0;
	f.problem.n_splits = 2;
	assert_works(&f, fixture_build(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD_SPLITKV, ABI_FWD_SPLITKV_COMBINE);
	fixture_deinit(&f);
}

static void merge_is_one_combine(void **state)
{
	struct fixture f;
	struct fmha_problem *p = &f.problem;

	(void)state;
	fixture_init(&f, FMHA_MERGE_STATES, FMHA_BATCH);
	p->batch = 2;
	p->nhead_q = p->nhead_k = 4;
	p->seqlen_q = 5;
	p->hdim_q = p->hdim_v = 8;
	p->n_parts = 3;
	fixture_add(&f, FMHA_T_O_PARTS, FMHA_F32);
	fixture_add(&f, FMHA_T_LSE_PARTS, FMHA_F32);
	fixture_add(&f, FMHA_T_O, FMHA_BF16);
	assert_works(&f, fixture_bind(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD_SPLITKV_COMBINE);
	assert_int_equal(f.plan.stages[0].dtype, ABI_BF16);
	assert_int_equal(f.args[0].combine.n_splits, 3);
	assert_int_equal(f.args[0].combine.o_parts_stride_split, 2 * 5 * 4 * 8);
	assert_int_equal(f.args[0].combine.o_parts.stride_batch, 5 * 4 * 8);
	assert_int_equal(f.args[0].combine.o_parts.stride_head, 8);
	assert_int_equal(f.args[0].combine.lse_parts_stride_split, 2 * 4 * 5);
	assert_int_equal(f.args[0].combine.lse_parts.stride_head, 5);
	fixture_deinit(&f);
}

static void nothing_to_write_is_no_stage(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	f.problem.batch = 0;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.plan.n_stages, 0);
	fixture_deinit(&f);

	fixture_forward(&f, FMHA_BATCH);
	f.problem.seqlen_q = 0;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.plan.n_stages, 0);
	assert_true(f.plan.flops == 0);
	fixture_deinit(&f);

	/* No keys: every row is empty, and somebody must write that. */
	fixture_forward(&f, FMHA_BATCH);
	f.problem.seqlen_k = 0;
	assert_works(&f, fixture_bind(&f));
	ASSERT_STAGES(&f.plan, ABI_FWD);
	fixture_deinit(&f);
}

static void too_large_workspace_is_refused(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	f.problem.nhead_q = f.problem.nhead_k = 1 << 15;
	f.problem.batch = 1;
	f.problem.seqlen_q = INT32_MAX;
	f.problem.hdim_q = f.problem.hdim_v = 256;
	f.problem.n_splits = 1024;
	/* 2^10 * 2^15 * 2^31 * 2^8 * 4 = 2^66; any layer may refuse it, none may wrap. */
	assert_fails(&f, fixture_build(&f), FMHA_ENOTSUP, "seqlen_q");
	f.problem.seqlen_q = 1 << 30;
	assert_fails(&f, fixture_build(&f), FMHA_ENOTSUP, "nhead_q");
	fixture_deinit(&f);
}

static void too_many_rows_are_refused(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	f.problem.batch = 1 << 16;
	f.problem.seqlen_q = 1 << 16;
	assert_int_equal(fixture_build(&f), FMHA_EINVAL);
	fixture_deinit(&f);
}

/* Sound problems with some words replaced: a plan or an error, never anything else. */
static void wild_problems_are_plans_or_errors(void **state)
{
	static const int32_t wild[] = {-1,  0,    1,       2,       3,         7,        8,
				       255, 4096, 1 << 20, 1 << 30, INT32_MAX, INT32_MIN};
	unsigned seed = 11;
	int n_plans = 0;

	(void)state;
	for (int i = 0; i < 30000; i++) {
		struct fixture f;
		int n = 1 + rand_r(&seed) % 4, r;
		uint32_t mode = (uint32_t)rand_r(&seed) % 2;

		if (rand_r(&seed) % 2)
			fixture_forward(&f, mode);
		else
			fixture_backward(&f, mode);
		if (rand_r(&seed) % 3 == 0 && mode == FMHA_BATCH && f.problem.op == FMHA_FORWARD)
			make_append(&f, (uint32_t)rand_r(&seed) % 3);
		f.decree.needs_dq_acc = rand_r(&seed) % 2;
		f.decree.device.compute_units = (uint32_t)rand_r(&seed) % 200;
		while (n-- > 0) {
			size_t words = rand_r(&seed) % 4 ? offsetof(struct fmha_problem, tensor) / 4
							 : sizeof(struct fmha_problem) / 4;
			size_t word = 1 + (size_t)rand_r(&seed) % (words - 1);

			memcpy((char *)&f.problem + word * 4,
			       &wild[(size_t)rand_r(&seed) % (sizeof(wild) / sizeof(wild[0]))], 4);
		}
		r = fixture_build(&f);
		assert_true(r <= 0);
		if (r < 0) {
			assert_int_equal(f.err.code, r);
			assert_true(f.err.msg[0] != '\0');
		} else {
			n_plans++;
			assert_true(f.plan.flops >= 0);
			for (uint32_t s = 0; s < f.plan.n_stages; s++)
				assert_true(f.plan.stages[s].workspace_offset +
						    f.plan.stages[s].workspace_bytes <=
					    f.plan.workspace_bytes);
		}
		fixture_deinit(&f);
	}
	assert_in_range(n_plans, 1000, 29000); /* both were tried */
}

static double pairs_by_hand(int q, int k, const struct fmha_problem *p)
{
	int anchor = p->mask == FMHA_MASK_BOTTOM_RIGHT ? k - q : 0;
	double n = 0;

	for (int i = 0; i < q; i++)
		for (int j = 0; j < k; j++) {
			bool left = p->window_left < 0 || j >= anchor + i - p->window_left ||
				    j < p->sink_tokens;
			bool right = p->window_right < 0 || j <= anchor + i + p->window_right;

			n += p->mask == FMHA_MASK_NONE || (left && right);
		}
	return n;
}

static void visible_pairs_equal_counting(void **state)
{
	struct fmha_problem p;
	unsigned seed = 7;

	(void)state;
	for (int i = 0; i < 20000; i++) {
		int q = rand_r(&seed) % 40, k = rand_r(&seed) % 40;

		fmha_problem_init(&p);
		p.mask = (uint32_t)(rand_r(&seed) % 3);
		p.window_left = rand_r(&seed) % 20 - 1;
		p.window_right = rand_r(&seed) % 20 - 1;
		p.sink_tokens = rand_r(&seed) % 8;
		assert_true(cost_visible_pairs(q, k, &p) == pairs_by_hand(q, k, &p));
	}
	/* Long sequences cost no time. */
	p.mask = FMHA_MASK_TOP_LEFT;
	p.window_left = -1;
	p.window_right = 0;
	assert_true(cost_visible_pairs(INT32_MAX, INT32_MAX, &p) ==
		    (double)INT32_MAX * ((double)INT32_MAX + 1) / 2);
}

static void flops_are_the_worked_numbers(void **state)
{
	struct fixture f;
	struct fmha_problem *p = &f.problem;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	p->batch = 2;
	p->nhead_q = p->nhead_k = 16;
	p->seqlen_q = p->seqlen_k = 1024;
	p->hdim_q = p->hdim_v = 128;
	assert_works(&f, fixture_build(&f));
	assert_true(f.plan.flops == 17179869184.0);
	/* q, k, v and o: 2 * 1024 * 16 * 128 floats each. */
	assert_int_equal(f.plan.bytes, 4ULL * 2 * 1024 * 16 * 128 * 4);
	p->mask = FMHA_MASK_TOP_LEFT;
	p->window_right = 0;
	assert_works(&f, fixture_build(&f));
	assert_true(f.plan.flops == 8598323200.0);
	p->mask = FMHA_MASK_NONE;
	p->window_right = -1;
	p->op = FMHA_BACKWARD;
	assert_true(cost_flops(p) == 42949672960.0);
	fixture_deinit(&f);
}

/* Broadcast axes make these free of memory; padded, they would not fit a kernel's numbers. */
static void work_is_bounded(void **state)
{
	struct fixture f;
	struct fmha_problem *p = &f.problem;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	fixture_deinit(&f);
	for (int role = FMHA_T_K; role <= FMHA_T_V; role++)
		p->tensor[role].stride[3] = 1; /* one key, for all sequences and heads */
	p->seqlen_k = INT32_MAX;
	assert_fails(&f, fixture_build(&f), FMHA_ENOTSUP, "seqlen_k");
	p->seqlen_k = 1 << 30;
	assert_works(&f, fixture_build(&f));
	p->batch = 1 << 20;
	p->nhead_k = p->nhead_q = 1 << 16;
	p->seqlen_q = 1;
	assert_fails(&f, fixture_build(&f), FMHA_ENOTSUP, "nhead_k");
	p->batch = 2;
	p->nhead_k = p->nhead_q = 1;
	p->op = FMHA_BACKWARD;
	for (int role = FMHA_T_DO; role <= FMHA_T_DV; role++)
		fixture_add(&f, (enum fmha_tensor_role)role, FMHA_F32);
	fixture_add(&f, FMHA_T_LSE, FMHA_F32);
	assert_fails(&f, fixture_build(&f), FMHA_ENOTSUP, "seqlen_k"); /* 2^31 keys in all */
	fixture_deinit(&f);
}

/* A step that is never taken may be any number, and is one that kernels can add to. */
static void idle_strides_are_limited(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	fixture_deinit(&f);
	f.problem.batch = 1;
	memcpy(f.problem.q.stride, (int64_t[]){INT64_MAX, 64, 16, 1, 0},
	       sizeof(f.problem.q.stride));
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.problem.q.stride[0], (int64_t)1 << 40);
	assert_int_equal(f.plan.problem.q.stride[1], 64);
	fixture_deinit(&f);
}

/* Sixteen positions a level add up over levels: what takes too many counts as overlapping, soon. */
static void comparing_views_is_bounded(void **state)
{
	struct plan_view a = {.element_bytes = 4, .n_axes = 5}, b = a;
	struct timespec start, end;
	const int n = 1000;

	(void)state;
	/* Unrelated strides of nearly the same length. */
	for (int i = 0; i < 5; i++) {
		a.axes[i] = (struct plan_axis){16, 4096 - 64 * i};
		b.axes[i] = (struct plan_axis){16, 4080 - 64 * i};
	}
	a.span_bytes = b.span_bytes = UINT64_C(16) * 4096 * 5;
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (int i = 0; i < n; i++)
		assert_true(views_overlap(&a, 1 << 20, &b, (1 << 20) + 2));
	clock_gettime(CLOCK_MONOTONIC, &end);
	/* A microsecond or ten each; unbounded it was milliseconds. */
	assert_true((double)(end.tv_sec - start.tv_sec) * 1e9 +
			    (double)(end.tv_nsec - start.tv_nsec) <
		    n * 200e3);
}

/* Each of K's and V's factors on its own may be by page. */
static void one_descale_by_page_is_enough(void **state)
{
	static const enum fmha_tensor_role roles[] = {FMHA_T_K_DESCALE, FMHA_T_V_DESCALE};

	(void)state;
	for (size_t i = 0; i < 2; i++) {
		struct fixture f;
		struct fmha_problem *p = &f.problem;

		fixture_init(&f, FMHA_FORWARD, FMHA_BATCH);
		p->batch = 96;
		p->nhead_q = p->nhead_k = 1;
		p->seqlen_q = p->seqlen_k = 4;
		p->hdim_q = p->hdim_v = 16;
		p->page_size = 4;
		p->n_pages = 2;
		p->max_blocks = 1;
		p->descale_per_page = 1;
		for (int role = FMHA_T_Q; role <= FMHA_T_V; role++)
			fixture_add(&f, (enum fmha_tensor_role)role, FMHA_E4M3);
		fixture_add(&f, FMHA_T_O, FMHA_F16);
		fixture_add(&f, FMHA_T_BLOCK_TABLE, FMHA_I32);
		fixture_add(&f, roles[i], FMHA_F32);
		assert_works(&f, fixture_build(&f));
		fixture_deinit(&f);
	}
}

/* Products of weights and factors would leave f16, on GPUs only, and where a head has several of V only. */
static void weights_of_f16_take_no_factors_on_gpus(void **state)
{
	(void)state;
	for (unsigned i = 0; i < 8; i++) {
		bool gpu = i & 1, f16 = i & 2, several = i & 4;
		struct fixture f;

		fixture_forward(&f, FMHA_BATCH);
		f.problem.q.dtype = f.problem.o.dtype = f16 ? FMHA_F16 : FMHA_BF16;
		f.problem.k.dtype = f.problem.v.dtype = FMHA_E4M3;
		f.problem.descale_block_k = several ? 1 : 0;
		fixture_add(&f, FMHA_T_K_DESCALE, FMHA_F32);
		fixture_add(&f, FMHA_T_V_DESCALE, FMHA_F32);
		f.decree.device.lds_bytes = gpu ? 65536 : 0;
		if (gpu && f16 && several)
			assert_fails(&f, fixture_build(&f), FMHA_ENOTSUP, "v_descale");
		else
			assert_works(&f, fixture_build(&f));
		fixture_deinit(&f);
	}
}

/* What a kernel would reach, from its arguments alone, against what was checked. */
static void arguments_reach_what_was_checked(void **state)
{
	struct fixture f;
	union abi_args args[PLAN_MAX_STAGES];

	(void)state;
	fixture_forward(&f, FMHA_GROUP);
	assert_works(&f, fixture_build(&f));
	plan_placeholder_args(&f.plan, args);
	assert_int_equal(reach_check(&f.plan, 0, args, &f.err), 0);
	args[0].fwd.sequences.seqstart_q = NULL; /* batch 2 x 5 rows, but total_q is 8 */
	assert_fails(&f, reach_check(&f.plan, 0, args, &f.err), FMHA_EINTERNAL,
		     "tensor.seqstart_q");
	plan_placeholder_args(&f.plan, args);
	args[0].fwd.sequences.total_q++;
	assert_fails(&f, reach_check(&f.plan, 0, args, &f.err), FMHA_EINTERNAL, "tensor.q");
	plan_placeholder_args(&f.plan, args);
	args[0].fwd.v.stride_seq++;
	assert_fails(&f, reach_check(&f.plan, 0, args, &f.err), FMHA_EINTERNAL, "tensor.v");
	plan_placeholder_args(&f.plan, args);
	args[0].fwd.o.stride_head = INT64_MAX;
	assert_fails(&f, reach_check(&f.plan, 0, args, &f.err), FMHA_EINTERNAL, "tensor.o");
	fixture_deinit(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(forward_is_one_stage),
		cmocka_unit_test(zero_scale_stays_zero),
		cmocka_unit_test(mask_that_hides_nothing_is_none),
		cmocka_unit_test(paged_forward_takes_its_families),
		cmocka_unit_test(decode_is_split_and_combined),
		cmocka_unit_test(split_falls_back_or_is_refused),
		cmocka_unit_test(splits_end_with_the_keys),
		cmocka_unit_test(many_rows_are_not_split),
		cmocka_unit_test(splits_keep_memory_busy),
		cmocka_unit_test(splits_of_amd_merge_few_parts),
		cmocka_unit_test(uneven_rows_are_shared),
		cmocka_unit_test(latents_are_split_as_one_block_a_unit),
		cmocka_unit_test(latents_of_fp8_are_split_by_tiles),
		cmocka_unit_test(windows_are_shared),
		cmocka_unit_test(splits_cover_all_keys),
		cmocka_unit_test(append_comes_first),
		cmocka_unit_test(fp8_does_not_rotate),
		cmocka_unit_test(backward_is_two_or_three_stages),
		cmocka_unit_test(masked_split_plan_works),
		cmocka_unit_test(merge_is_one_combine),
		cmocka_unit_test(nothing_to_write_is_no_stage),
		cmocka_unit_test(too_large_workspace_is_refused),
		cmocka_unit_test(too_many_rows_are_refused),
		cmocka_unit_test(wild_problems_are_plans_or_errors),
		cmocka_unit_test(visible_pairs_equal_counting),
		cmocka_unit_test(flops_are_the_worked_numbers),
		cmocka_unit_test(work_is_bounded),
		cmocka_unit_test(idle_strides_are_limited),
		cmocka_unit_test(comparing_views_is_bounded),
		cmocka_unit_test(weights_of_f16_take_no_factors_on_gpus),
		cmocka_unit_test(one_descale_by_page_is_enough),
		cmocka_unit_test(arguments_reach_what_was_checked),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
