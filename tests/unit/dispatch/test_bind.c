/* SPDX-License-Identifier: MIT */
/* bind_plan(): buffers that are too small, views that overlap, and the arguments themselves. */
#include "fixture.h"

#include "internal.h"

static void tensors_become_named_strides(void **state)
{
	struct fixture f;
	struct abi_fwd_args *a = &f.args[0].fwd;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	fixture_add(&f, FMHA_T_LSE, FMHA_F32);
	fixture_add(&f, FMHA_T_BIAS, FMHA_F32);
	f.problem.bias.stride[1] = 100; /* [1, nhead_q, 1, seqlen_k] */
	f.problem.bias.stride[3] = 1;
	f.problem.mask = FMHA_MASK_TOP_LEFT;
	f.problem.window_left = 3;
	f.problem.window_right = 0;
	f.problem.sink_tokens = 2;
	/* v in BHSD order */
	f.problem.v.stride[0] = 2 * 7 * 8;
	f.problem.v.stride[2] = 7 * 8;
	f.problem.v.stride[1] = 8;
	f.problem.v.stride[3] = 1;
	assert_works(&f, fixture_bind(&f));
	assert_ptr_equal(a->q.data, f.bindings[FMHA_T_Q].device);
	assert_int_equal(a->q.stride_batch, 5 * 4 * 16);
	assert_int_equal(a->q.stride_seq, 4 * 16);
	assert_int_equal(a->q.stride_head, 16);
	assert_int_equal(a->q.stride_dim, 1);
	assert_int_equal(a->v.stride_seq, 8);
	assert_int_equal(a->v.stride_head, 56);
	assert_int_equal(a->lse.stride_batch, 4 * 5);
	assert_int_equal(a->lse.stride_head, 5);
	assert_int_equal(a->lse.stride_seq, 1);
	assert_int_equal(a->bias.stride_batch, 0);
	assert_int_equal(a->bias.stride_head, 100);
	assert_int_equal(a->bias.stride_seq, 0);
	assert_int_equal(a->bias.stride_dim, 1);
	assert_int_equal(a->band.mask, ABI_MASK_TOP_LEFT);
	assert_int_equal(a->band.window_left, 3);
	assert_int_equal(a->band.window_right, 0);
	assert_int_equal(a->band.sink_tokens, 2);
	assert_int_equal(a->sequences.batch, 2);
	assert_int_equal(a->sequences.seqlen_q_max, 5);
	assert_int_equal(a->sequences.seqlen_k_max, 7);
	assert_int_equal(a->sequences.total_q, 10);
	assert_null(a->sequences.seqstart_q);
	assert_int_equal(a->nhead_q, 4);
	assert_int_equal(a->nhead_k, 2);
	assert_int_equal(a->hdim_q, 16);
	assert_int_equal(a->hdim_v, 8);
	assert_int_equal(a->n_splits, 0);
	assert_null(a->alibi_slopes);
	assert_null(a->sink);
	assert_null(f.indices);
	fixture_deinit(&f);
}

static void group_mode_gets_private_copies(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_GROUP);
	assert_works(&f, fixture_bind(&f));
	assert_non_null(f.indices);
	assert_ptr_not_equal(f.args[0].fwd.sequences.seqstart_q,
			     f.bindings[FMHA_T_SEQSTART_Q].host);
	/* The client changes its mind during the run. */
	fixture_ints(&f, FMHA_T_SEQSTART_Q)[1] = 1 << 30;
	assert_int_equal(f.args[0].fwd.sequences.seqstart_q[1], 5);
	assert_int_equal(f.args[0].fwd.sequences.seqstart_k[2], 12);
	assert_int_equal(f.args[0].fwd.sequences.total_q, 8);
	fixture_deinit(&f);
}

static void strided_integers_are_read_by_stride(void **state)
{
	struct fixture f;
	int32_t *starts;

	(void)state;
	fixture_forward(&f, FMHA_GROUP);
	free(f.bindings[FMHA_T_SEQSTART_Q].host);
	f.bindings[FMHA_T_SEQSTART_Q] = (struct plan_binding){0};
	f.problem.seqstart_q.stride[0] = 3;
	starts = fixture_ints(&f, FMHA_T_SEQSTART_Q);
	starts[3] = 4;
	starts[6] = 8;
	starts[1] = starts[2] = -1;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.args[0].fwd.sequences.seqstart_q[1], 4);
	assert_int_equal(f.args[0].fwd.sequences.seqstart_q[2], 8);
	fixture_deinit(&f);
}

/* Bound elsewhere, a record's pointers move with their bases, and nothing else changes. */
static void a_record_is_bound_by_its_bases(void **state)
{
	struct launch_bases bases = {{0}}, moved = {{0}};
	const struct launch_record *record;
	union abi_args args, other;
	struct fixture f;

	(void)state;
	fixture_backward(&f, FMHA_GROUP);
	f.decree.needs_dq_acc = true;
	assert_works(&f, fixture_build(&f));
	record = &f.plan.stages[1].launch;
	for (uint32_t i = 0; i < LAUNCH_N_BASES; i++)
		bases.at[i] = (uint64_t)(i + 1) << 32;
	launch_bind(record, &bases, &args);
	assert_int_equal((uintptr_t)args.bwd.q.data, bases.at[FMHA_T_Q]);
	assert_int_equal((uintptr_t)args.bwd.dk.data, bases.at[FMHA_T_DK]);
	assert_int_equal((uintptr_t)args.bwd.dq_acc,
			 bases.at[LAUNCH_WORKSPACE] + f.plan.layout.dq_acc);
	assert_int_equal((uintptr_t)args.bwd.sequences.seqstart_k, bases.at[LAUNCH_INDICES] + 12);
	assert_null(args.bwd.bias.data);
	/* An absent base has no pointers, whatever lies behind it. */
	launch_bind(record, &moved, &other);
	assert_null(other.bwd.dq_acc);
	assert_null(other.bwd.sequences.seqstart_k);
	assert_memory_equal(&other, &record->args, sizeof(other));
	assert_int_equal(other.bwd.q.stride_seq, args.bwd.q.stride_seq);
	assert_true(other.bwd.scale == args.bwd.scale);
	fixture_deinit(&f);
}

static void dropout_threshold_is_fa2s(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	f.problem.dropout_p = 0.1F;
	f.problem.dropout_seed = 7;
	f.problem.dropout_offset = 9;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.args[0].fwd.dropout.keep_at_most, 229); /* floor(255 * 0.9) */
	assert_true(f.args[0].fwd.dropout.p_keep_inverse == 1.0F / 0.9F);
	assert_int_equal(f.args[0].fwd.dropout.seed, 7);
	launch_set_dropout(&f.plan.stages[0].launch,
			   &(struct launch_dropout){.seed = 100, .offset = 200}, f.args);
	assert_int_equal(f.args[0].fwd.dropout.seed, 100);
	assert_int_equal(f.args[0].fwd.dropout.offset, 200);
	f.problem.dropout_p = 0;
	assert_works(&f, fixture_bind(&f));
	assert_int_equal(f.args[0].fwd.dropout.keep_at_most, 255);
	fixture_deinit(&f);
}

static void last_byte_must_lie_inside(void **state)
{
	static const enum fmha_tensor_role roles[] = {FMHA_T_Q, FMHA_T_K, FMHA_T_V, FMHA_T_O};
	static const char *const fields[] = {"tensor.q", "tensor.k", "tensor.v", "tensor.o"};
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	assert_works(&f, fixture_bind(&f));
	for (int i = 0; i < 4; i++) {
		f.bindings[roles[i]].bytes--;
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, fields[i]);
		f.bindings[roles[i]].bytes = 0;
		assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, fields[i]);
		f.bindings[roles[i]].bytes = f.plan.views[i].span_bytes;
		assert_works(&f, fixture_bind(&f));
	}
	fixture_deinit(&f);
}

static void group_lists_need_their_last_word(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_GROUP);
	f.bindings[FMHA_T_SEQSTART_K].bytes = 11;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.seqstart_k");
	fixture_deinit(&f);
}

static void misaligned_buffer_is_refused(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	f.bindings[FMHA_T_K].device = (char *)f.bindings[FMHA_T_K].host + 2;
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.k.offset");
	fixture_deinit(&f);
}

static void workspace_must_be_there_and_aligned(void **state)
{
	struct fixture f;
	void *ok;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	f.problem.n_splits = 2;
	assert_works(&f, fixture_bind(&f));
	ok = f.workspace;
	assert_fails(&f, bind_plan(&f.plan, f.bindings, NULL, NULL, f.args, &f.indices, &f.err),
		     FMHA_EINVAL, "tensor.workspace");
	assert_fails(
		&f,
		bind_plan(&f.plan, f.bindings, (char *)ok + 64, NULL, f.args, &f.indices, &f.err),
		FMHA_EINVAL, "tensor.workspace");
	fixture_deinit(&f);
}

/* Lays @role over the memory of @over, @shift bytes in. */
static void lay_over(struct fixture *f, enum fmha_tensor_role role, enum fmha_tensor_role over,
		     int64_t shift)
{
	f->bindings[role].device = (char *)f->bindings[over].host + shift;
	f->bindings[role].bytes = 1 << 20;
}

static void outputs_may_not_overlap_anything(void **state)
{
	const int64_t v_bytes = 4 * 2 * 7 * 2 * 8;
	struct fixture f;
	char *block = calloc(1, 1 << 16); /* V and O, far from everything else */

	(void)state;
	assert_non_null(block);
	fixture_forward(&f, FMHA_BATCH);
	lay_over(&f, FMHA_T_O, FMHA_T_Q, 0);
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.o");
	f.bindings[FMHA_T_V].device = block;
	f.bindings[FMHA_T_O].bytes = 1 << 15;
	f.bindings[FMHA_T_O].device = block + v_bytes - 4; /* the last element of v */
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.o");
	f.bindings[FMHA_T_O].device = block + v_bytes; /* right behind it */
	assert_works(&f, fixture_bind(&f));
	/* Inputs may overlap each other. */
	f.bindings[FMHA_T_V].device = f.bindings[FMHA_T_K].device;
	assert_works(&f, fixture_bind(&f));
	fixture_deinit(&f);
	free(block);
}

static void outputs_may_not_overlap_each_other(void **state)
{
	struct fixture f;

	(void)state;
	fixture_backward(&f, FMHA_BATCH);
	assert_works(&f, fixture_bind(&f));
	lay_over(&f, FMHA_T_DQ, FMHA_T_DK, 8);
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.dq");
	f.bindings[FMHA_T_DQ].device = f.bindings[FMHA_T_DQ].host;
	/* O is an input of backward: it may share with another input. */
	f.problem.hdim_v = f.problem.hdim_q;
	fixture_deinit(&f);
	fixture_backward(&f, FMHA_BATCH);
	lay_over(&f, FMHA_T_O, FMHA_T_DO, 0);
	assert_works(&f, fixture_bind(&f));
	fixture_deinit(&f);
}

static void workspace_may_not_overlap_a_tensor(void **state)
{
	struct fixture f;
	void *block = aligned_alloc(256, 1 << 16);

	(void)state;
	assert_non_null(block);
	fixture_forward(&f, FMHA_BATCH);
	f.problem.n_splits = 2;
	assert_works(&f, fixture_bind(&f));
	free(f.bindings[FMHA_T_Q].host);
	f.bindings[FMHA_T_Q] = (struct plan_binding){NULL, (char *)block + 512, 1 << 15};
	assert_fails(&f, bind_plan(&f.plan, f.bindings, block, NULL, f.args, &f.indices, &f.err),
		     FMHA_EINVAL, "tensor.q");
	fixture_deinit(&f);
	free(block);
}

/* dQ, dK and dV interleaved in one [batch, seq, 3, heads, dim] tensor do not share a byte. */
static void packed_gradients_are_accepted(void **state)
{
	static const enum fmha_tensor_role parts[] = {FMHA_T_DQ, FMHA_T_DK, FMHA_T_DV};
	struct fixture f;
	float *block;

	(void)state;
	fixture_init(&f, FMHA_BACKWARD, FMHA_BATCH);
	f.problem.batch = 2;
	f.problem.nhead_q = f.problem.nhead_k = 3;
	f.problem.seqlen_q = f.problem.seqlen_k = 5;
	f.problem.hdim_q = f.problem.hdim_v = 8;
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (role <= FMHA_T_LSE || (role >= FMHA_T_DO && role <= FMHA_T_DV))
			fixture_add(&f, (enum fmha_tensor_role)role, FMHA_F32);
	fixture_allocate(&f);
	block = calloc(2 * 5 * 3 * 3 * 8, sizeof(float));
	for (int i = 0; i < 3; i++) {
		struct fmha_tensor *t = &f.problem.tensor[parts[i]];

		t->stride[0] = 5 * 3 * 3 * 8;
		t->stride[1] = 3 * 3 * 8;
		t->stride[2] = 8;
		t->stride[3] = 1;
		t->buffer = 77;
		t->offset = (uint64_t)i * 3 * 8 * 4;
		free(f.bindings[parts[i]].host);
		f.bindings[parts[i]].host = NULL;
		f.bindings[parts[i]].device = block + i * 3 * 8;
		f.bindings[parts[i]].bytes = (2 * 5 * 3 * 3 * 8 - (uint64_t)i * 3 * 8) * 4;
	}
	assert_works(&f, fixture_build(&f));
	f.workspace = aligned_alloc(256, (f.plan.workspace_bytes + 255) / 256 * 256);
	assert_works(&f, bind_plan(&f.plan, f.bindings, f.workspace, f.workspace, f.args,
				   &f.indices, &f.err));
	/* One element off, and they collide. */
	f.bindings[FMHA_T_DK].device = block + 3 * 8 - 1;
	assert_fails(&f,
		     bind_plan(&f.plan, f.bindings, f.workspace, f.workspace, f.args, &f.indices,
			       &f.err),
		     FMHA_EINVAL, "tensor.dq");
	for (int i = 0; i < 3; i++)
		f.bindings[parts[i]] = (struct plan_binding){0};
	fixture_deinit(&f);
	free(block);
}

/* Stride 0 tells kernels of a single row that receives a sum; a gradient without rows has none. */
static void empty_dbias_receives_no_sum(void **state)
{
	(void)state;
	for (int shared = 0; shared < 2; shared++) {
		struct fixture f;
		int found = 0;

		fixture_init(&f, FMHA_BACKWARD, FMHA_BATCH);
		f.problem.batch = 2;
		f.problem.nhead_q = f.problem.nhead_k = 3;
		f.problem.seqlen_k = 5;
		f.problem.hdim_q = f.problem.hdim_v = 8;
		for (int role = 0; role < FMHA_N_TENSORS; role++)
			if (role <= FMHA_T_LSE || (role >= FMHA_T_DO && role <= FMHA_T_DV))
				fixture_add(&f, (enum fmha_tensor_role)role, FMHA_F32);
		fixture_add(&f, FMHA_T_BIAS, FMHA_F32);
		fixture_add(&f, FMHA_T_DBIAS, FMHA_F32);
		memcpy(f.problem.bias.stride, (int64_t[]){15, 5, shared ? 0 : 8, 1}, 32);
		memcpy(f.problem.dbias.stride, (int64_t[]){15, 5, 0, 1}, 32);
		assert_works(&f, fixture_bind(&f));
		for (uint32_t i = 0; i < f.plan.n_stages; i++) {
			if (f.plan.stages[i].family != ABI_BWD_DQ_DK_DV)
				continue;
			found = 1;
			assert_int_equal(f.args[i].bwd.dbias.stride_seq == 0, shared);
		}
		assert_int_equal(found, 1);
		fixture_deinit(&f);
	}
}

/* The strided overlap test against a map of bytes, small random views. */
static bool overlap_by_map(const struct plan_view *a, int64_t a_at, const struct plan_view *b,
			   int64_t b_at)
{
	static uint8_t map[4096];
	bool hit = false;

	memset(map, 0, sizeof(map));
	for (int which = 0; which < 2; which++) {
		const struct plan_view *v = which ? b : a;
		int64_t at = which ? b_at : a_at;
		int64_t n[3] = {1, 1, 1}, s[3] = {0, 0, 0};

		for (int i = 0; i < v->n_axes; i++) {
			n[i] = v->axes[i].extent;
			s[i] = v->axes[i].stride;
		}
		for (int64_t x = 0; x < n[0]; x++)
			for (int64_t y = 0; y < n[1]; y++)
				for (int64_t z = 0; z < n[2]; z++)
					for (uint32_t e = 0; e < v->element_bytes; e++) {
						int64_t i = at + x * s[0] + y * s[1] + z * s[2] + e;

						if (which)
							hit |= map[i] != 0;
						else
							map[i] = 1;
					}
	}
	return hit;
}

static void random_view(struct plan_view *v, unsigned *seed)
{
	*v = (struct plan_view){.element_bytes = 1U << (rand_r(seed) % 3)};
	v->n_axes = (uint8_t)(rand_r(seed) % 4);
	v->span_bytes = v->element_bytes;
	for (int i = v->n_axes - 1; i >= 0; i--) { /* longest first */
		int64_t least = i == v->n_axes - 1 ? v->element_bytes : v->axes[i + 1].stride;

		v->axes[i].extent = 2 + rand_r(seed) % 3;
		v->axes[i].stride = least + v->element_bytes * (rand_r(seed) % 12);
		v->span_bytes += (uint64_t)((v->axes[i].extent - 1) * v->axes[i].stride);
	}
}

static void overlap_test_is_exact_on_small_views(void **state)
{
	unsigned seed = 3;
	int hits = 0;

	(void)state;
	for (int i = 0; i < 200000; i++) {
		struct plan_view a, b;
		int64_t a_at, b_at;
		bool want;

		random_view(&a, &seed);
		random_view(&b, &seed);
		a_at = rand_r(&seed) % 300;
		b_at = rand_r(&seed) % 300;
		want = overlap_by_map(&a, a_at, &b, b_at);
		hits += want;
		if (views_overlap(&a, (uintptr_t)a_at, &b, (uintptr_t)b_at) != want)
			fail_msg("case %d: %d", i, want);
	}
	assert_in_range(hits, 20000, 180000); /* both answers were tested */
}

static void append_cannot_write_what_it_reads(void **state)
{
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	f.problem.seqlen_new = 2;
	fixture_add(&f, FMHA_T_K_NEW, FMHA_F32);
	fixture_add(&f, FMHA_T_V_NEW, FMHA_F32);
	assert_works(&f, fixture_bind(&f));
	lay_over(&f, FMHA_T_K_NEW, FMHA_T_K, 64);
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.k");
	f.bindings[FMHA_T_K_NEW].device = f.bindings[FMHA_T_K_NEW].host;
	lay_over(&f, FMHA_T_V, FMHA_T_K, 0);
	assert_fails(&f, fixture_bind(&f), FMHA_EINVAL, "tensor.k");
	fixture_deinit(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(tensors_become_named_strides),
		cmocka_unit_test(group_mode_gets_private_copies),
		cmocka_unit_test(strided_integers_are_read_by_stride),
		cmocka_unit_test(a_record_is_bound_by_its_bases),
		cmocka_unit_test(dropout_threshold_is_fa2s),
		cmocka_unit_test(last_byte_must_lie_inside),
		cmocka_unit_test(group_lists_need_their_last_word),
		cmocka_unit_test(misaligned_buffer_is_refused),
		cmocka_unit_test(workspace_must_be_there_and_aligned),
		cmocka_unit_test(outputs_may_not_overlap_anything),
		cmocka_unit_test(outputs_may_not_overlap_each_other),
		cmocka_unit_test(workspace_may_not_overlap_a_tensor),
		cmocka_unit_test(packed_gradients_are_accepted),
		cmocka_unit_test(empty_dbias_receives_no_sum),
		cmocka_unit_test(overlap_test_is_exact_on_small_views),
		cmocka_unit_test(append_cannot_write_what_it_reads),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
