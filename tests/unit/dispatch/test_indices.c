/* SPDX-License-Identifier: MIT */
/* Hostile integer tensors: each rule is broken by one, by much, and by the extremes of int32. */
#include "fixture.h"

#include <limits.h>

#include "internal.h"

static const int32_t wild[] = {-1, INT32_MIN, INT32_MAX};
#define N_WILD 3

static void prefix_sums_are_judged(void **state)
{
	static const struct {
		int32_t q[3], k[3];
		const char *field;
	} cases[] = {
		{{-1, 4, 8}, {0, 7, 12}, "tensor.seqstart_q"},
		{{0, 5, 9}, {0, 7, 12}, "tensor.seqstart_q"}, /* total_q is 8 */
		{{0, 5, 4}, {0, 7, 12}, "tensor.seqstart_q"}, /* decreasing */
		{{0, 6, 8}, {0, 7, 12}, "tensor.seqstart_q"}, /* longer than seqlen_q 5 */
		{{0, 0, 6}, {0, 7, 12}, "tensor.seqstart_q"},
		{{0, INT32_MAX, 8}, {0, 7, 12}, "tensor.seqstart_q"},
		{{0, INT32_MIN, 8}, {0, 7, 12}, "tensor.seqstart_q"},
		{{INT32_MIN, 5, 8}, {0, 7, 12}, "tensor.seqstart_q"},
		{{0, 5, 8}, {0, 7, 13}, "tensor.seqstart_k"}, /* total_k is 12 */
		{{0, 5, 8}, {0, 8, 12}, "tensor.seqstart_k"}, /* longer than seqlen_k 7 */
		{{0, 5, 8}, {0, 7, 6}, "tensor.seqstart_k"},
		{{0, 5, 8}, {-7, 0, 7}, "tensor.seqstart_k"},
		{{0, 5, 8}, {INT32_MAX, INT32_MAX, INT32_MAX}, "tensor.seqstart_k"},
	};
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_GROUP);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		memcpy(fixture_ints(&f, FMHA_T_SEQSTART_Q), cases[i].q, 12);
		memcpy(fixture_ints(&f, FMHA_T_SEQSTART_K), cases[i].k, 12);
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, cases[i].field);
		assert_null(f.indices);
	}
	/* Gaps before, between and after sequences, and empty ones, are fine. */
	memcpy(fixture_ints(&f, FMHA_T_SEQSTART_Q), (int32_t[]){2, 2, 7}, 12);
	memcpy(fixture_ints(&f, FMHA_T_SEQSTART_K), (int32_t[]){0, 0, 0}, 12);
	assert_works(&f, fixture_bind(&f));
	fixture_deinit(&f);
}

static void lengths_stay_within_storage(void **state)
{
	struct fixture f;
	int32_t *q, *k;

	(void)state;
	fixture_forward(&f, FMHA_GROUP);
	fixture_add(&f, FMHA_T_SEQLEN_Q, FMHA_I32);
	fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
	q = fixture_ints(&f, FMHA_T_SEQLEN_Q);
	k = fixture_ints(&f, FMHA_T_SEQLEN_K);
	k[0] = 7;
	k[1] = 5;
	q[0] = 0;
	q[1] = 3;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.args[0].fwd.sequences.seqlen_q[1], 3);
	assert_int_equal(f.args[0].fwd.sequences.seqlen_k[1], 5);
	q[1] = 4;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.seqlen_q_per_batch");
	q[1] = 3;
	k[1] = 6;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.seqlen_k_per_batch");
	k[1] = 5;
	for (int i = 0; i < N_WILD; i++) {
		q[0] = wild[i];
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.seqlen_q_per_batch");
		q[0] = 5;
		k[0] = wild[i];
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.seqlen_k_per_batch");
		k[0] = 7;
	}
	fixture_deinit(&f);
}

static void batch_mode_lengths_too(void **state)
{
	struct fixture f;
	int32_t *k;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
	k = fixture_ints(&f, FMHA_T_SEQLEN_K);
	k[0] = 7;
	assert_works(&f, fixture_bind(&f));
	k[1] = 8;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.seqlen_k_per_batch");
	fixture_deinit(&f);
}

static void leftpad_stays_within_keys(void **state)
{
	struct fixture f;
	int32_t *pad;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	fixture_add(&f, FMHA_T_LEFTPAD_K, FMHA_I32);
	pad = fixture_ints(&f, FMHA_T_LEFTPAD_K);
	pad[1] = 7;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.args[0].fwd.sequences.leftpad_k[1], 7);
	pad[1] = 8;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.leftpad_k");
	for (int i = 0; i < N_WILD; i++) {
		pad[1] = wild[i];
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.leftpad_k");
	}
	fixture_deinit(&f);
}

static void cache_rows_exist(void **state)
{
	struct fixture f;
	int32_t *row;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	fixture_deinit(&f);
	fixture_forward(&f, FMHA_BATCH);
	f.problem.cache_batch = 5;
	fixture_add(&f, FMHA_T_CACHE_BATCH_IDX, FMHA_I32);
	free(f.bindings[FMHA_T_K].host);
	free(f.bindings[FMHA_T_V].host);
	f.bindings[FMHA_T_K].host = f.bindings[FMHA_T_V].host = NULL;
	row = fixture_ints(&f, FMHA_T_CACHE_BATCH_IDX);
	row[0] = row[1] = 4; /* sharing a row is fine as long as nobody writes */
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.args[0].fwd.cache.cache_batch_idx[0], 4);
	assert_int_equal(f.args[0].fwd.cache.cache_batch, 5);
	row[0] = 5;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.cache_batch_idx");
	for (int i = 0; i < N_WILD; i++) {
		row[0] = wild[i];
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.cache_batch_idx");
	}
	row[0] = 4;
	f.problem.seqlen_new = 2;
	fixture_add(&f, FMHA_T_K_NEW, FMHA_F32);
	fixture_add(&f, FMHA_T_V_NEW, FMHA_F32);
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.cache_batch_idx");
	row[0] = 3;
	assert_works(&f, fixture_bind(&f));
	fixture_deinit(&f);
}

/* 2 sequences of up to 7 keys in pages of 4, 6 pages. */
static void make_paged(struct fixture *f, uint32_t mode, bool sglang)
{
	struct fmha_problem *p = &f->problem;

	fixture_forward(f, mode);
	fixture_deinit(f);
	p->page_size = 4;
	p->n_pages = 6;
	p->total_k = 0;
	p->seqstart_k = (struct fmha_tensor){0};
	if (mode == FMHA_GROUP)
		memcpy(fixture_ints(f, FMHA_T_SEQSTART_Q), (int32_t[]){0, 5, 8}, 12);
	if (sglang) {
		p->n_page_indices = 5;
		fixture_add(f, FMHA_T_KV_INDPTR, FMHA_I32);
		fixture_add(f, FMHA_T_KV_PAGE_INDICES, FMHA_I32);
		fixture_add(f, FMHA_T_KV_LAST_PAGE_LEN, FMHA_I32);
		memcpy(fixture_ints(f, FMHA_T_KV_INDPTR), (int32_t[]){1, 3, 4}, 12);
		memcpy(fixture_ints(f, FMHA_T_KV_PAGE_INDICES), (int32_t[]){99, 5, 2, 0, -1}, 20);
		memcpy(fixture_ints(f, FMHA_T_KV_LAST_PAGE_LEN), (int32_t[]){3, 4}, 8);
	} else {
		p->max_blocks = 3;
		fixture_add(f, FMHA_T_BLOCK_TABLE, FMHA_I32);
		fixture_add(f, FMHA_T_SEQLEN_K, FMHA_I32);
		memcpy(fixture_ints(f, FMHA_T_BLOCK_TABLE), (int32_t[]){5, 2, -1, 0, -7, 99}, 24);
		memcpy(fixture_ints(f, FMHA_T_SEQLEN_K), (int32_t[]){7, 4}, 8);
	}
}

static void make_append(struct fixture *f, int32_t seqlen_new, uint32_t rope)
{
	struct fmha_problem *p = &f->problem;

	p->seqlen_new = seqlen_new;
	fixture_add(f, FMHA_T_K_NEW, FMHA_F32);
	fixture_add(f, FMHA_T_V_NEW, FMHA_F32);
	if (rope == FMHA_ROPE_NONE)
		return;
	p->rope = rope;
	p->rotary_dim = 16;
	p->rotary_max_pos = p->seqlen_k;
	fixture_add(f, FMHA_T_ROTARY_COS, FMHA_F32);
	fixture_add(f, FMHA_T_ROTARY_SIN, FMHA_F32);
}

static void block_table_entries_exist(void **state)
{
	struct fixture f;
	struct abi_kv_cache *cache = &f.args[0].fwd.cache;
	int32_t *table;

	(void)state;
	make_paged(&f, FMHA_BATCH, false);
	table = fixture_ints(&f, FMHA_T_BLOCK_TABLE);
	assert_works(&f, fixture_bind(&f)); /* entries that nobody uses may be anything */
	assert_int_equal(cache->block_table_stride, 2);
	assert_int_equal(cache->block_table[0], 5);
	assert_int_equal(cache->block_table[1], 2);
	assert_int_equal(cache->block_table[2], 0);
	assert_int_equal(cache->block_table[3], 0); /* was -7 */
	assert_int_equal(cache->n_pages, 6);
	assert_int_equal(cache->page_size, 4);
	table[1] = 6;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.block_table");
	for (int i = 0; i < N_WILD; i++) {
		table[1] = wild[i];
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.block_table");
	}
	table[1] = 2;
	fixture_ints(&f, FMHA_T_SEQLEN_K)[1] = 5; /* now -7 is used */
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.block_table");
	fixture_ints(&f, FMHA_T_SEQLEN_K)[1] = 8;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.seqlen_k_per_batch");
	fixture_deinit(&f);
}

/* One row for all sequences: copied once, and judged for the longest of them. */
static void shared_table_is_read_once(void **state)
{
	struct fixture f;
	struct abi_kv_cache *cache = &f.args[0].fwd.cache;
	uint64_t entries, bytes;
	int32_t *table;

	(void)state;
	make_paged(&f, FMHA_BATCH, false);
	table = fixture_ints(&f, FMHA_T_BLOCK_TABLE);
	assert_works(&f, fixture_bind(&f));
	entries = plan_index_entries(&f.plan);
	bytes = plan_indices_bytes(&f.plan);
	f.problem.block_table.stride[1] = 1;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(cache->block_table_stride, 0);
	assert_int_equal(cache->max_blocks, 2);
	assert_int_equal(cache->block_table[1], 2);
	assert_int_equal(plan_index_entries(&f.plan), entries - 2);
	assert_int_equal(plan_indices_bytes(&f.plan), bytes - 2 * sizeof(int32_t));
	table[1] = 6; /* sequence 1 has one page, but sequence 0 uses this one */
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.block_table");
	fixture_ints(&f, FMHA_T_SEQLEN_K)[0] = 4;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(cache->block_table[1], 0);
	/* Its size does not count: 2^20 sequences of 2^20 pages are a table of 4 MiB. */
	f.problem.batch = f.problem.max_blocks = 1 << 20;
	f.problem.nhead_q = f.problem.nhead_k = f.problem.seqlen_q = 1;
	f.problem.page_size = 1;
	f.problem.seqlen_k = 1 << 20;
	assert_works(&f, fixture_build(&f));
	assert_in_range(plan_index_entries(&f.plan), 1 << 20, 4 << 20);
	fixture_deinit(&f);
}

/* Words that count several times would make work that no memory pays for. */
static void words_do_not_count_twice(void **state)
{
	struct fixture f;

	(void)state;
	make_paged(&f, FMHA_BATCH, false);
	f.problem.block_table.stride[0] = 3;
	f.problem.block_table.stride[1] = 0;
	assert_fails(&f, fixture_build(&f), FMHA_ENOTSUP, "tensor.block_table.stride");
	f.problem.block_table.stride[0] = f.problem.block_table.stride[1] = 1;
	assert_fails(&f, fixture_build(&f), FMHA_ENOTSUP, "tensor.block_table.stride");
	f.problem.block_table.stride[0] = 1;
	f.problem.block_table.stride[1] = 2; /* columns first */
	assert_works(&f, fixture_build(&f));
	fixture_deinit(&f);
}

static void append_targets_are_bounded_by_the_cache(void **state)
{
	struct fixture f;

	(void)state;
	make_paged(&f, FMHA_BATCH, false);
	make_append(&f, 2, FMHA_ROPE_NONE);
	f.problem.n_pages = 1;
	memcpy(fixture_ints(&f, FMHA_T_BLOCK_TABLE), (int32_t[]){0, 0, 0, 0, 0, 0}, 24);
	memcpy(fixture_ints(&f, FMHA_T_SEQLEN_K), (int32_t[]){0, 0}, 8);
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.block_table");
	fixture_deinit(&f);
}

static void sglang_lists_are_judged(void **state)
{
	struct fixture f;
	struct abi_fwd_args *a = &f.args[0].fwd;
	int32_t *indptr, *last, *pages;

	(void)state;
	make_paged(&f, FMHA_GROUP, true);
	indptr = fixture_ints(&f, FMHA_T_KV_INDPTR);
	last = fixture_ints(&f, FMHA_T_KV_LAST_PAGE_LEN);
	pages = fixture_ints(&f, FMHA_T_KV_PAGE_INDICES);
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(a->sequences.seqlen_k[0], 7);
	assert_int_equal(a->sequences.seqlen_k[1], 4);
	assert_int_equal(a->cache.kv_page_indices[0], 0); /* was 99, belongs to nobody */
	assert_int_equal(a->cache.kv_page_indices[1], 5);
	assert_int_equal(a->cache.kv_page_indices[4], 0); /* was -1 */
	for (int i = 0; i < N_WILD; i++) {
		int32_t keep = indptr[1];

		indptr[1] = wild[i];
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.kv_indptr");
		indptr[1] = keep;
		keep = last[0];
		last[0] = wild[i];
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.kv_last_page_len");
		last[0] = keep;
		keep = pages[2];
		pages[2] = wild[i];
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.kv_page_indices");
		pages[2] = keep;
	}
	indptr[2] = 6; /* n_page_indices is 5 */
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.kv_indptr");
	indptr[2] = 2;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.kv_indptr");
	indptr[2] = 4;
	last[0] = 0;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.kv_last_page_len");
	last[0] = 5;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.kv_last_page_len");
	last[0] = 4; /* 8 keys; seqlen_k says 7 */
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.kv_indptr");
	last[0] = 3;
	pages[2] = 6;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.kv_page_indices");
	pages[2] = 2;
	/* A sequence without pages has no keys, whatever its last page says. */
	indptr[2] = 3;
	last[1] = -5;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(a->sequences.seqlen_k[1], 0);
	assert_int_equal(a->cache.kv_last_page_len[1], 4);
	fixture_deinit(&f);
}

static void append_counts_before_and_after(void **state)
{
	struct fixture f;
	int32_t *lengths;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	make_append(&f, 2, FMHA_ROPE_NONE);
	fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
	lengths = fixture_ints(&f, FMHA_T_SEQLEN_K);
	lengths[0] = 5;
	lengths[1] = 0;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.args[0].appendkv.sequences.seqlen_k[0], 5);
	assert_int_equal(f.args[1].fwd.sequences.seqlen_k[0], 7);
	assert_int_equal(f.args[0].appendkv.sequences.seqlen_k[1], 0);
	assert_int_equal(f.args[1].fwd.sequences.seqlen_k[1], 2);
	lengths[0] = 6; /* 6 + 2 do not fit in 7 */
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.seqlen_k_per_batch");
	for (int i = 0; i < N_WILD; i++) {
		lengths[0] = wild[i];
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.seqlen_k_per_batch");
	}
	fixture_deinit(&f);
}

static void append_may_not_write_a_page_twice(void **state)
{
	struct fixture f;
	int32_t *table;

	(void)state;
	make_paged(&f, FMHA_BATCH, false);
	make_append(&f, 2, FMHA_ROPE_NONE);
	table = fixture_ints(&f, FMHA_T_BLOCK_TABLE);
	memcpy(fixture_ints(&f, FMHA_T_SEQLEN_K), (int32_t[]){4, 5}, 8);
	/* Both write their second page; a shared first page is a shared prefix. */
	memcpy(table, (int32_t[]){3, 1, -1, 3, 2, -1}, 24);
	assert_works(&f, fixture_bind(&f));
	table[4] = 1;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.block_table");
	fixture_deinit(&f);
}

static void sglang_tables_count_after_the_append(void **state)
{
	struct fixture f;

	(void)state;
	make_paged(&f, FMHA_BATCH, true);
	make_append(&f, 3, FMHA_ROPE_NONE);
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.args[0].appendkv.sequences.seqlen_k[0], 4);
	assert_int_equal(f.args[0].appendkv.sequences.seqlen_k[1], 1);
	assert_int_equal(f.args[1].fwd.sequences.seqlen_k[0], 7);
	f.problem.seqlen_new = 5; /* sequence 1 has only 4 keys after the append */
	f.bindings[FMHA_T_K_NEW].bytes = f.bindings[FMHA_T_V_NEW].bytes = 1 << 20;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.seqlen_k_per_batch");
	fixture_deinit(&f);
}

static void rotary_positions_stay_in_the_table(void **state)
{
	struct fixture f;
	int32_t *lengths;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	make_append(&f, 2, FMHA_ROPE_HALF_ROTATED);
	fixture_add(&f, FMHA_T_SEQLEN_K, FMHA_I32);
	lengths = fixture_ints(&f, FMHA_T_SEQLEN_K);
	lengths[0] = lengths[1] = 5;
	assert_works(&f, fixture_bind(&f)); /* no mask: all 5 rows of q have position 5 */
	f.problem.mask = FMHA_MASK_BOTTOM_RIGHT;
	f.problem.window_right = 0;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "rotary_max_pos"); /* positions 5 to 9 */
	lengths[0] = lengths[1] = 2;
	assert_works(&f, fixture_bind(&f));
	lengths[1] = 3;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "rotary_max_pos");
	fixture_deinit(&f);
}

/* A device without host memory: the copies move, and every pointer to them with them. */
static void copies_can_be_moved_to_a_device(void **state)
{
	struct plan_memory memory = {0};
	struct abi_sequences before, *after;
	struct fixture f;
	int32_t *moved;
	uint64_t bytes;

	(void)state;
	fixture_forward(&f, FMHA_GROUP);
	fixture_add(&f, FMHA_T_SEQLEN_Q, FMHA_I32);
	memcpy(fixture_ints(&f, FMHA_T_SEQSTART_Q), (int32_t[]){0, 5, 8}, 12);
	memcpy(fixture_ints(&f, FMHA_T_SEQSTART_K), (int32_t[]){0, 7, 12}, 12);
	memcpy(fixture_ints(&f, FMHA_T_SEQLEN_Q), (int32_t[]){4, 3}, 8);
	assert_works(&f, fixture_bind(&f));
	before = f.args[0].fwd.sequences;
	bytes = plan_indices_bytes(&f.plan);
	assert_true(bytes >= 8 * sizeof(int32_t));
	moved = malloc(bytes);
	memcpy(moved, plan_indices_data(f.indices), bytes);
	memory = (struct plan_memory){f.workspace, f.workspace, moved};
	assert_works(&f, plan_place(&f.plan, f.bindings, f.indices, &memory, f.args, &f.err));
	after = &f.args[0].fwd.sequences;
	assert_ptr_not_equal(after->seqstart_q, before.seqstart_q);
	assert_true(after->seqstart_q >= moved && after->seqstart_q + 3 <= moved + bytes / 4);
	assert_memory_equal(after->seqstart_q, before.seqstart_q, 12);
	assert_memory_equal(after->seqstart_k, before.seqstart_k, 12);
	assert_memory_equal(after->seqlen_q, before.seqlen_q, 8);
	assert_null(after->leftpad_k);
	free(moved);
	fixture_deinit(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(copies_can_be_moved_to_a_device),
		cmocka_unit_test(prefix_sums_are_judged),
		cmocka_unit_test(lengths_stay_within_storage),
		cmocka_unit_test(batch_mode_lengths_too),
		cmocka_unit_test(leftpad_stays_within_keys),
		cmocka_unit_test(cache_rows_exist),
		cmocka_unit_test(block_table_entries_exist),
		cmocka_unit_test(shared_table_is_read_once),
		cmocka_unit_test(words_do_not_count_twice),
		cmocka_unit_test(append_targets_are_bounded_by_the_cache),
		cmocka_unit_test(sglang_lists_are_judged),
		cmocka_unit_test(append_counts_before_and_after),
		cmocka_unit_test(append_may_not_write_a_page_twice),
		cmocka_unit_test(sglang_tables_count_after_the_append),
		cmocka_unit_test(rotary_positions_stay_in_the_table),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
