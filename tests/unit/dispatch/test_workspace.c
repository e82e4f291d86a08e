/* SPDX-License-Identifier: MIT */
/* The unified backward workspace: every row of the paragraph in issue 3, computed by hand. */
#include "fixture.h"

#include <kernels/square.h>

#include "internal.h"

/* 3 sequences, 4 heads, hdim 32; batch mode: 10 x 300 keys. */
static void problem_init(struct fmha_problem *p, uint32_t mode)
{
	fmha_problem_init(p);
	p->op = FMHA_BACKWARD;
	p->mode = mode;
	p->batch = 3;
	p->nhead_q = p->nhead_k = 4;
	p->seqlen_q = 10;
	p->seqlen_k = 300;
	p->hdim_q = p->hdim_v = 32;
	if (mode == FMHA_GROUP) {
		p->total_q = 22; /* 10 + 5 + 7 */
		p->total_k = 500;
	}
}

static struct plan plan_of(const struct fmha_problem *p)
{
	struct plan plan = {.problem = *p};

	problem_axes(p, &plan.axes);
	return plan;
}

static struct bwd_workspace size_of(const struct fmha_problem *p, enum dq_mode mode,
				    int64_t workers)
{
	struct plan plan = plan_of(p);
	struct bwd_workspace w;
	struct fmha_error err;

	assert_int_equal(bwd_workspace_size(&plan, mode, 128, workers, &w, &err), 0);
	return w;
}

static void heads_are_rounded_to_16_bytes(void **state)
{
	struct fmha_problem p;
	struct bwd_workspace w;

	(void)state;
	/* Batch mode: one int32, 4 -> 16. */
	problem_init(&p, FMHA_BATCH);
	w = size_of(&p, DQ_ATOMIC, 1);
	assert_int_equal(w.nsplits, 0);
	assert_int_equal(w.head_bytes, 16);
	assert_int_equal(w.d, 16);
	/* Group mode: 3 int32 = 12 -> 16; 4 int64 = 32; data at 48. */
	problem_init(&p, FMHA_GROUP);
	p.deterministic = 1;
	w = size_of(&p, DQ_PER_TILE, 1);
	assert_int_equal(w.dq_acc_offsets, 16);
	assert_int_equal(w.head_bytes, 48);
	assert_int_equal(w.d, 48);
	/* 4 sequences: 16 -> 16; 5 int64 = 40 -> 48; data at 64. 5: 20 -> 32; 48; 80. */
	p.batch = 4;
	w = size_of(&p, DQ_PER_TILE, 1);
	assert_int_equal(w.dq_acc_offsets, 16);
	assert_int_equal(w.head_bytes, 64);
	p.batch = 5;
	w = size_of(&p, DQ_PER_TILE, 1);
	assert_int_equal(w.dq_acc_offsets, 32);
	assert_int_equal(w.head_bytes, 80);
	/* Not deterministic: one number for all, 4 -> 16; 6 int64 = 48; 64. */
	p.deterministic = 0;
	w = size_of(&p, DQ_ATOMIC, 1);
	assert_int_equal(w.dq_acc_offsets, 16);
	assert_int_equal(w.head_bytes, 64);
}

static void writing_dq_directly_needs_no_data(void **state)
{
	struct fmha_problem p;
	struct bwd_workspace w;

	(void)state;
	problem_init(&p, FMHA_BATCH);
	w = size_of(&p, DQ_DIRECT, 1);
	assert_int_equal(w.dq_splits, 0);
	assert_int_equal(w.dq_acc_bytes, 0);
	assert_false(w.zero);
	/* d and nothing else: 3 * 10 rows * 4 heads * 4 bytes = 480; packed 22 * 4 * 4. */
	assert_int_equal(w.head_bytes, 0);
	assert_int_equal(w.d, 0);
	assert_int_equal(w.bytes, 480);
	problem_init(&p, FMHA_GROUP);
	p.deterministic = 1;
	w = size_of(&p, DQ_DIRECT, 1);
	assert_int_equal(w.head_bytes, 0);
	assert_int_equal(w.bytes, 352);
	/* Without rows there is nothing to keep. */
	p.total_q = 0;
	assert_int_equal(size_of(&p, DQ_DIRECT, 1).bytes, 0);
}

static void atomic_adds_share_one_zeroed_buffer(void **state)
{
	struct fmha_problem p;
	struct bwd_workspace w;

	(void)state;
	problem_init(&p, FMHA_BATCH);
	w = size_of(&p, DQ_ATOMIC, 132);
	assert_int_equal(w.dq_splits, 1);
	/* 3 * 4 * 1 * 10 * 32 floats = 15360 bytes. */
	assert_int_equal(w.dq_acc_bytes, 15360);
	assert_int_equal(w.bytes, 16 + 480);
	assert_true(w.zero);
	problem_init(&p, FMHA_GROUP);
	w = size_of(&p, DQ_ATOMIC, 132);
	/* 22 rows * 4 * 32 floats = 11264 bytes; d: 22 * 4 * 4 = 352. */
	assert_int_equal(w.dq_acc_bytes, 11264);
	assert_int_equal(w.bytes, 48 + 352);
	assert_true(w.zero);
}

static void tiles_hold_whole_rows_of_tiles(void **state)
{
	struct fmha_problem p;
	struct bwd_workspace w;
	struct fmha_error err;

	(void)state;
	for (int group = 0; group < 2; group++) {
		problem_init(&p, group ? FMHA_GROUP : FMHA_BATCH);
		struct plan plan = plan_of(&p);

		plan.dq_tile_rows = 8;
		plan.dq_tile_floats = 600;
		assert_int_equal(bwd_workspace_size(&plan, DQ_TILES, 128, 132, &w, &err), 0);
		/* 3 sequences of 10 rows: two tiles each. 22 packed rows: at most (22 + 3 * 7) / 8 = 5, as 9 +
		 * 9 + 4 have. */
		assert_int_equal(w.dq_acc_bytes, (group ? 5 : 3 * 2) * 4 * 600 * 4);
		assert_int_equal(w.dq_splits, 1);
		assert_true(w.zero);
	}
}

/* The most tiles of @n sequences that have @total rows together: every way to cut them. */
static int64_t most_tiles(int32_t total, int32_t n, int32_t rows)
{
	int64_t most = 0;

	if (n == 1)
		return (total + rows - 1) / rows;
	for (int32_t first = 0; first <= total; first++) {
		int64_t tiles = (first + rows - 1) / rows + most_tiles(total - first, n - 1, rows);

		most = tiles > most ? tiles : most;
	}
	return most;
}

static void packed_tiles_are_what_the_worst_lengths_take(void **state)
{
	struct fmha_problem p;

	(void)state;
	for (int32_t total = 0; total < 30; total++)
		for (int32_t n = 1; n <= 4; n++)
			for (int32_t rows = 1; rows <= 9; rows += 4) {
				struct plan plan;

				problem_init(&p, FMHA_GROUP);
				p.total_q = total;
				p.batch = n;
				p.nhead_q = 2;
				plan = plan_of(&p);
				plan.dq_tile_rows = rows;
				plan.dq_tile_floats = 600;
				/* With more sequences than rows some are empty, and have no tile. */
				if (n <= total)
					assert_int_equal(bwd_workspace_tiles(&plan),
							 2 * most_tiles(total, n, rows));
				else
					assert_true(bwd_workspace_tiles(&plan) >=
						    2 * most_tiles(total, n, rows));
			}
}

/* Behind D: of 2 KV heads in 3 parts each key's dK and dV. What a run takes still ends with its sums of dQ. */
static void parts_of_heads_have_sums_of_keys(void **state)
{
	struct fmha_problem p;
	struct bwd_workspace w;
	struct fmha_error err;

	(void)state;
	for (int group = 0; group < 2; group++) {
		problem_init(&p, group ? FMHA_GROUP : FMHA_BATCH);
		p.nhead_q = 12;
		p.nhead_k = 2;
		p.hdim_v = 40;
		struct plan plan = plan_of(&p);

		plan.dq_tile_rows = 8;
		plan.dq_tile_floats = 600;
		for (plan.kv_parts = 1; plan.kv_parts <= 3; plan.kv_parts += 2) {
			/* 22 packed rows, or 3 * 10; 500 packed keys, or 3 * 300. */
			uint64_t d = (group ? 48 : 16) + (group ? 22 : 30) * 12 * 4;
			uint64_t sums = plan.kv_parts < 2 ? 0
							  : 2 * 3 * (group ? 500 : 900) * 72 * 4;

			assert_int_equal(bwd_workspace_size(&plan, DQ_TILES, 128, 132, &w, &err),
					 0);
			assert_int_equal(w.kv_acc, (d + 15) / 16 * 16);
			assert_int_equal(w.bytes, w.kv_acc + sums);
			assert_int_equal(w.dq_acc_bytes, (group ? 5 : 3 * 2) * 12 * 600 * 4);
		}
		plan.kv_parts = INT32_MAX;
		plan.problem.nhead_k = INT32_MAX;
		assert_int_equal(bwd_workspace_size(&plan, DQ_TILES, 128, 132, &w, &err),
				 FMHA_EINVAL);
	}
}

static void deterministic_group_mode_splits_by_tile(void **state)
{
	struct fmha_problem p;
	struct bwd_workspace w;

	(void)state;
	problem_init(&p, FMHA_GROUP);
	w = size_of(&p, DQ_PER_TILE, 132);
	/* The longest, 300 keys in tiles of 128: 3. A plan counts every row with 3: 33792 bytes. */
	assert_int_equal(w.dq_splits, 3);
	assert_int_equal(w.dq_acc_bytes, 3 * 11264);
	assert_false(w.zero);
	p.mask = FMHA_MASK_TOP_LEFT; /* skipped tiles leave their buffer untouched */
	p.window_right = 0;
	assert_true(size_of(&p, DQ_PER_TILE, 132).zero);
}

static void deterministic_batch_mode_follows_the_workers(void **state)
{
	struct fmha_problem p;

	(void)state;
	problem_init(&p, FMHA_BATCH);
	/* 300 keys: 3 tiles a head; 12 heads: 36 tiles. */
	assert_int_equal(size_of(&p, DQ_PERSISTENT, 36).dq_splits, 3); /* a tile each: 3 / 1 */
	assert_int_equal(size_of(&p, DQ_PERSISTENT, 132).dq_splits, 3);
	assert_int_equal(size_of(&p, DQ_PERSISTENT, 18).dq_splits, 2); /* runs of 2: 1 + 2 / 2 */
	assert_int_equal(size_of(&p, DQ_PERSISTENT, 12).dq_splits, 1); /* runs of 3: a head each */
	assert_int_equal(size_of(&p, DQ_PERSISTENT, 9).dq_splits, 2);  /* runs of 4 */
	assert_int_equal(size_of(&p, DQ_PERSISTENT, 6).dq_splits, 1);  /* runs of 6: 2 heads */
	assert_int_equal(size_of(&p, DQ_PERSISTENT, 1).dq_splits, 1);
	assert_true(size_of(&p, DQ_PERSISTENT, 12).zero);
	/* 3 * 4 * 3 * 10 * 32 * 4 bytes */
	assert_int_equal(size_of(&p, DQ_PERSISTENT, 36).dq_acc_bytes, 46080);
	/* No keys at all: still one buffer, for zeros. */
	p.seqlen_k = 0;
	assert_int_equal(size_of(&p, DQ_PERSISTENT, 36).dq_splits, 1);
}

/* The formula against walking the list: a head needs as many buffers as runs can meet it. */
static void persistent_splits_suffice(void **state)
{
	(void)state;
	for (int batch = 1; batch < 4; batch++)
		for (int tiles = 1; tiles < 14; tiles++)
			for (int workers = 1; workers < 50; workers++) {
				struct fmha_problem p;
				int n, run, most = 0, total;

				problem_init(&p, FMHA_BATCH);
				p.batch = batch;
				p.seqlen_k = tiles * 128;
				n = bwd_persistent_splits(&p, 128, workers);
				total = batch * 4 * tiles;
				run = (total + workers - 1) / workers;
				for (int head = 0; head < batch * 4; head++) {
					int first = head * tiles / run;
					int last = ((head + 1) * tiles - 1) / run;

					if (last - first + 1 > most)
						most = last - first + 1;
				}
				assert_true(n >= most);
				assert_true(n <= most + 1);
			}
}

/* split.c's worked numbers, and where splitting gains nothing. */
static void few_rows_and_many_keys_are_split(void **state)
{
	const struct split_device mi300 = {.units = 304, .gpu = true, .amd_unit_rate = 17000};
	const struct split_device h200 = {.units = 132, .gpu = true, .shares = true};
	struct split_device cpu = {.units = 64};
	struct abi_bwd_args a = {.nhead_q = 8, .nhead_k = 8};
	struct fmha_problem p;
	struct split_choice split;
	struct square square;

	(void)state;
	problem_init(&p, FMHA_BATCH);
	p.batch = a.sequences.batch = 1;
	p.nhead_q = p.nhead_k = 8;
	p.seqlen_q = a.sequences.seqlen_q_max = 384;
	p.seqlen_k = a.sequences.seqlen_k_max = 32768;
	square = square_of(&a, 96, 192, 384, 32768);
	assert_int_equal(square.n_q, 1);
	assert_int_equal(square.n_k, 86);
	split_choose_dq(&p, &cpu, &square, &split);
	assert_int_equal(split.n, 8);
	assert_int_equal(split.size, 11 * 384);
	cpu.units = 2;
	split_choose_dq(&p, &cpu, &square, &split);
	assert_int_equal(split.n, 1);
	a.nhead_q = a.nhead_k = p.nhead_q = p.nhead_k = 1;
	split_choose_dq(&p, &cpu, &square, &split);
	assert_int_equal(split.n, 2);
	p.n_splits = 1; /* as asked */
	split_choose_dq(&p, &cpu, &square, &split);
	assert_int_equal(split.n, 1);
	p.n_splits = 0;
	p.nhead_q = p.nhead_k = 8;
	p.seqlen_q = 256;
	p.seqlen_k = 65536;
	split_choose_dq(&p, &mi300, NULL, &split);
	assert_int_equal(split.n, 5);
	p.batch = 16; /* blocks enough */
	split_choose_dq(&p, &mi300, NULL, &split);
	assert_int_equal(split.n, 1);
	p.batch = 1;
	p.seqlen_q = 65536; /* what owns keys takes as long */
	split_choose_dq(&p, &mi300, NULL, &split);
	assert_int_equal(split.n, 1);
	p.seqlen_q = 256;
	split_choose_dq(&p, &h200, NULL, &split);
	assert_int_equal(split.n, 1);
	/* Packed: one long sequence among short ones is as one. */
	p.mode = FMHA_GROUP;
	p.batch = 16;
	p.total_q = 256 + 15;
	split_choose_dq(&p, &mi300, NULL, &split);
	assert_true(split.n > 1);
	p.seqlen_k = 0;
	split_choose_dq(&p, &mi300, NULL, &split);
	assert_int_equal(split.n, 1);
}

static void sizes_that_overflow_are_refused(void **state)
{
	struct fmha_problem p;
	struct bwd_workspace w;
	struct fmha_error err = {0};
	struct plan plan;

	(void)state;
	problem_init(&p, FMHA_GROUP);
	p.total_q = INT32_MAX;
	p.nhead_q = 1 << 16;
	p.seqlen_k = INT32_MAX;
	p.hdim_q = 256;
	plan = plan_of(&p);
	assert_int_equal(bwd_workspace_size(&plan, DQ_PER_TILE, 16, 1, &w, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "workspace");
}

static void head_tells_where_each_sequence_lies(void **state)
{
	struct index_tables tables;
	struct fixture f;
	const int32_t *nsplits;
	const abi_i64 *offsets;

	(void)state;
	fixture_backward(&f, FMHA_GROUP); /* 5 and 3 rows, 7 and 5 keys, 4 heads, hdim 16 */
	f.decree.needs_dq_acc = true;
	f.decree.device.lds_bytes = 65536; /* a GPU's modes */
	f.problem.deterministic = 1;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.plan.workspace_head_bytes, 16 + 32); /* 2 int32; 3 int64 = 24 -> 32 */
	assert_int_equal(f.plan.dq_per_sequence, 1);
	nsplits = f.args[1].bwd.nsplits;
	offsets = f.args[1].bwd.dq_acc_offsets;
	assert_ptr_equal(nsplits, f.workspace);
	assert_ptr_equal(offsets, (char *)f.workspace + 16);
	/* d: 8 rows * 4 heads * 4 bytes; dq_acc at the next multiple of 256 */
	assert_ptr_equal(f.args[0].bwd.d.data, (char *)f.workspace + 48);
	assert_ptr_equal(f.args[1].bwd.dq_acc, (char *)f.workspace + 256);
	assert_ptr_equal(f.args[2].bwd.dq_acc, f.args[1].bwd.dq_acc);
	assert_int_equal(nsplits[0], 1); /* 7 keys in a tile of 128 */
	assert_int_equal(offsets[0], 0);
	assert_int_equal(offsets[1], 5 * 4 * 16);
	assert_int_equal(offsets[2], 8 * 4 * 16);
	f.plan.dq_tile_n0 = 4; /* ceil(7 / 4) = ceil(5 / 4) = 2 */
	tables = indices_tables(f.indices);
	bwd_workspace_head(&f.plan, &tables, f.workspace);
	assert_int_equal(nsplits[1], 2);
	assert_int_equal(offsets[1], 5 * 4 * 16 * 2);
	assert_int_equal(offsets[2], 8 * 4 * 16 * 2);
	assert_int_equal(f.args[0].bwd.d.stride_head, 8);
	fixture_deinit(&f);
}

/*
 * 10, 5 and 7 rows, 300, 128 and 72 keys in tiles of 128: 3, 1 and 1 splits. 30 + 5 + 7 = 42 rows
 * of 4 heads and 32 floats are 21,504 bytes, where a plan counts all 22 with 3: 33,792.
 */
static void a_run_takes_what_its_lengths_need(void **state)
{
	struct fixture f;
	struct plan_indices *indices = NULL;
	struct plan_memory memory = {0};
	int32_t *rows, *keys;

	(void)state;
	fixture_init(&f, FMHA_BACKWARD, FMHA_GROUP);
	problem_init(&f.problem, FMHA_GROUP);
	f.problem.deterministic = 1;
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (role <= FMHA_T_LSE || (role >= FMHA_T_DO && role <= FMHA_T_DV))
			fixture_add(&f, (enum fmha_tensor_role)role, FMHA_F32);
	fixture_add(&f, FMHA_T_SEQSTART_Q, FMHA_I32);
	fixture_add(&f, FMHA_T_SEQSTART_K, FMHA_I32);
	f.decree.needs_dq_acc = true;
	f.decree.device.lds_bytes = 65536;
	rows = fixture_ints(&f, FMHA_T_SEQSTART_Q);
	keys = fixture_ints(&f, FMHA_T_SEQSTART_K);
	memcpy(rows, (int32_t[]){0, 10, 15, 22}, 16);
	memcpy(keys, (int32_t[]){0, 300, 428, 500}, 16);
	assert_works(&f, fixture_build(&f));
	assert_true(plan_workspace_varies(&f.plan));
	assert_int_equal(f.plan.dq_acc_bytes, 33792);
	assert_int_equal(f.plan.workspace_bytes, f.plan.layout.dq_acc + 33792);
	assert_works(&f, plan_read(&f.plan, f.bindings, &indices, &f.err));
	assert_int_equal(plan_workspace_bytes(&f.plan, indices), f.plan.layout.dq_acc + 21504);

	f.workspace = aligned_alloc(PLAN_ALIGNMENT, f.plan.layout.dq_acc + 21504);
	memory.workspace = memory.head = f.workspace;
	assert_works(&f, plan_place(&f.plan, f.bindings, indices, &memory, f.args, &f.err));
	assert_int_equal(f.args[1].bwd.nsplits[0], 3);
	assert_int_equal(f.args[1].bwd.nsplits[2], 1);
	assert_int_equal(f.args[1].bwd.dq_acc_offsets[1], 30 * 4 * 32);
	assert_int_equal(f.args[1].bwd.dq_acc_offsets[3] * 4, 21504);
	/* The client's memory says something else by now: the size is that of the copy. */
	memcpy(keys, (int32_t[]){0, 100, 200, 500}, 16);
	assert_int_equal(plan_workspace_bytes(&f.plan, indices), f.plan.layout.dq_acc + 21504);
	(void)plan_indices_free(indices);
	fixture_deinit(&f);
}

static void batch_head_is_one_number(void **state)
{
	struct fixture f;

	(void)state;
	fixture_backward(&f, FMHA_BATCH);
	f.decree.needs_dq_acc = true;
	f.decree.device.lds_bytes = 65536;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.plan.workspace_head_bytes, 16);
	assert_int_equal(f.plan.workspace_zero, 1);
	assert_int_equal(f.args[1].bwd.nsplits[0], 1);
	assert_null(f.args[1].bwd.dq_acc_offsets);
	assert_int_equal(f.args[0].bwd.d.stride_batch, 4 * 5);
	assert_int_equal(f.args[0].bwd.d.stride_head, 5);
	fixture_deinit(&f);
	/* Group mode, not deterministic: one as well, and the offsets behind it. */
	fixture_backward(&f, FMHA_GROUP);
	f.decree.needs_dq_acc = true;
	f.decree.device.lds_bytes = 65536;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.plan.workspace_head_bytes, 16 + 32);
	assert_int_equal(f.args[1].bwd.nsplits[0], 1);
	assert_int_equal(f.args[1].bwd.nsplits[1], 0);
	assert_int_equal(f.args[1].bwd.dq_acc_offsets[1], 5 * 4 * 16);
	assert_int_equal(f.args[1].bwd.dq_acc_offsets[2], 8 * 4 * 16);
	fixture_deinit(&f);
	/* A CPU pipeline that writes dQ itself: neither head nor data. */
	fixture_backward(&f, FMHA_BATCH);
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.plan.workspace_head_bytes, 0);
	assert_null(f.args[1].bwd.nsplits);
	assert_null(f.args[1].bwd.dq_acc);
	assert_int_equal(f.plan.workspace_zero, 0);
	fixture_deinit(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(heads_are_rounded_to_16_bytes),
		cmocka_unit_test(writing_dq_directly_needs_no_data),
		cmocka_unit_test(atomic_adds_share_one_zeroed_buffer),
		cmocka_unit_test(tiles_hold_whole_rows_of_tiles),
		cmocka_unit_test(packed_tiles_are_what_the_worst_lengths_take),
		cmocka_unit_test(parts_of_heads_have_sums_of_keys),
		cmocka_unit_test(deterministic_group_mode_splits_by_tile),
		cmocka_unit_test(deterministic_batch_mode_follows_the_workers),
		cmocka_unit_test(persistent_splits_suffice),
		cmocka_unit_test(few_rows_and_many_keys_are_split),
		cmocka_unit_test(sizes_that_overflow_are_refused),
		cmocka_unit_test(head_tells_where_each_sequence_lies),
		cmocka_unit_test(a_run_takes_what_its_lengths_need),
		cmocka_unit_test(batch_head_is_one_number),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
