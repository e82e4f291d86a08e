/* SPDX-License-Identifier: MIT */
/*
 * Tables that the device makes against those that the host makes: sound problems get the same ones, and
 * whatever lies in the integer tensors, nothing leads outside of the others. The text of the GPU's kernel
 * runs here thread by thread.
 */
#include <dispatch/ck.h>
#include <stdio.h>

#include <catalogue/backends.h>
#include <catalogue/gpu_catalogue.h>
#include <prepare_on_host.h>
#include <registry/registry.h>

#include "bend.h"
#include "internal.h"

#define CASES 400

struct prepared {
	struct plan_local local;
	void *workspace;
	struct abi_prepare_args args;
};

/* False: the plan needs no tables. */
static bool prepare(struct runner *r, struct prepared *p)
{
	struct launch_bases bases = {{0}};
	union abi_args args;

	assert_works(&r->f, plan_local(&r->f.plan, &p->local, &r->f.err));
	if (!p->local.prepares)
		return false;
	p->workspace = aligned_alloc(PLAN_ALIGNMENT,
				     p->local.workspace_bytes / PLAN_ALIGNMENT * PLAN_ALIGNMENT +
					     PLAN_ALIGNMENT);
	memset(p->workspace, 0xa5, p->local.workspace_bytes);
	for (uint32_t i = 0; i < r->f.plan.n_views; i++) {
		uint32_t role = r->f.plan.views[i].role;

		bases.at[role] = (uintptr_t)r->f.bindings[role].host;
	}
	bases.at[LAUNCH_WORKSPACE] = (uintptr_t)p->workspace;
	launch_bind(&p->local.launches[0], &bases, &args);
	p->args = args.prepare;
	p->args.grid = 2 + random_pick(r, 3); /* as a device would say */
	prepare_on_host(&p->args);
	return true;
}

static bool lies_in(const abi_i32 *word, const abi_i32 *list, int64_t n)
{
	return list && word >= list && word < list + n;
}

/* Pages that no sequence uses the host clears, and the device only cuts. */
static void expect_same_tables(struct runner *r, const struct prepared *p)
{
	const struct plan *plan = &r->f.plan;
	uint64_t n = plan_indices_bytes(plan) / sizeof(abi_i32);
	const abi_i32 *want = n ? plan_indices_data(r->f.indices) : NULL;
	const abi_i32 *got = (const abi_i32 *)((const char *)p->workspace +
					       p->local.workspace_bytes) -
			     n;
	const struct abi_kv_cache *cache = &p->args.cache;

	for (uint64_t i = 0; i < n; i++) {
		bool is_page = lies_in(got + i, cache->kv_page_indices, cache->n_page_indices) ||
			       lies_in(got + i, cache->block_table,
				       (int64_t)p->args.table_rows * cache->max_blocks);

		if (is_page && want[i] == 0)
			assert_true(got[i] >= 0 && got[i] < plan->problem.n_pages);
		else if (got[i] != want[i])
			fail_msg("word %llu is %d, the host's %d", (unsigned long long)i, got[i],
				 want[i]);
	}
}

static void expect_same_head(struct runner *r, const struct prepared *p)
{
	const struct plan *plan = &r->f.plan;
	const struct plan_memory memory = {.workspace = p->workspace,
					   .head = calloc(1, plan->workspace_head_bytes + 1)};
	const char *want = memory.head, *got = p->workspace;

	assert_works(&r->f,
		     plan_place(plan, r->f.bindings, r->f.indices, &memory, r->f.args, &r->f.err));
	if (p->args.nsplits)
		assert_memory_equal(got + plan->layout.nsplits, want + plan->layout.nsplits,
				    (size_t)p->args.nsplits_entries * sizeof(abi_i32));
	if (p->args.dq_acc_offsets)
		assert_memory_equal(got + plan->layout.dq_acc_offsets,
				    want + plan->layout.dq_acc_offsets,
				    ((size_t)plan->problem.batch + 1) * sizeof(abi_i64));
	free(memory.head);
}

/* Starts in order on their axis, each sequence's length within it. */
static void expect_within(const abi_i32 *starts, const abi_i32 *lengths, int64_t batch,
			  int64_t total, int64_t most)
{
	for (int64_t b = 0; b < batch; b++) {
		int64_t room = starts ? starts[b + 1] - starts[b] : most;

		if (starts)
			assert_true(starts[b] >= 0 && room >= 0 && starts[b + 1] <= total);
		if (lengths)
			assert_true(lengths[b] >= 0 && lengths[b] <= room && lengths[b] <= most);
	}
}

static void expect_inside(struct runner *r, const struct prepared *p)
{
	const struct fmha_problem *problem = &r->f.plan.problem;
	const struct abi_sequences *s = &p->args.sequences;
	const struct abi_kv_cache *c = &p->args.cache;

	expect_within(s->seqstart_q, s->seqlen_q, s->batch, s->total_q,
		      s->seqstart_q ? s->total_q : s->seqlen_q_max);
	expect_within(s->seqstart_k, p->args.seqlen_new ? NULL : s->seqlen_k, s->batch, s->total_k,
		      s->seqlen_k_max);
	expect_within(c->kv_indptr, NULL, s->batch, c->n_page_indices, 0);
	for (int64_t b = 0; b < s->batch; b++) {
		if (s->leftpad_k)
			assert_true(s->leftpad_k[b] >= 0);
		if (s->leftpad_k && s->seqlen_k)
			assert_true(s->leftpad_k[b] <= s->seqlen_k[b]);
		if (c->kv_last_page_len)
			assert_true(c->kv_last_page_len[b] >= 1 &&
				    c->kv_last_page_len[b] <= c->page_size);
		if (c->cache_batch_idx)
			assert_true(c->cache_batch_idx[b] >= 0 &&
				    c->cache_batch_idx[b] < c->cache_batch);
		if (s->seqlen_k)
			assert_true(p->args.seqlen_k_before[b] >= 0 &&
				    p->args.seqlen_k_before[b] <= s->seqlen_k[b] &&
				    s->seqlen_k[b] <= s->seqlen_k_max);
	}
	for (int64_t i = 0; c->block_table && i < (int64_t)p->args.table_rows * c->max_blocks; i++)
		assert_true(c->block_table[i] >= 0 &&
			    (c->block_table[i] < problem->n_pages || problem->n_pages == 0));
	for (int64_t i = 0; c->kv_page_indices && i < c->n_page_indices; i++)
		assert_true(c->kv_page_indices[i] >= 0 &&
			    (c->kv_page_indices[i] < problem->n_pages || problem->n_pages == 0));
	if (p->args.dq_acc_offsets && r->f.plan.dq_acc_bytes > 0)
		assert_true((uint64_t)p->args.dq_acc_offsets[s->batch] * sizeof(float) <=
			    r->f.plan.dq_acc_bytes);
}

static unsigned n_prepared, n_hostile, n_records;

/* What a record comes to at some bases is what arguments filled in for them are. */
static void expect_records_bind(const struct plan *plan)
{
	struct launch_bases bases = {{0}};
	union abi_args filled, bound;

	for (uint32_t i = 0; i < FMHA_N_TENSORS; i++)
		if (fmha_tensor_present(&plan->problem.tensor[i]))
			bases.at[i] = ((uint64_t)i + 1) << 33;
	bases.at[LAUNCH_WORKSPACE] = UINT64_C(3) << 43;
	bases.at[LAUNCH_INDICES] = UINT64_C(5) << 43;
	for (uint32_t i = 0; i < plan->n_stages; i++, n_records++) {
		args_fill(plan, i, &bases, &filled);
		launch_bind(&plan->stages[i].launch, &bases, &bound);
		assert_memory_equal(&bound, &filled, sizeof(filled));
	}
}

static void run_case(struct runner *r)
{
	struct prepared p = {0};

	random_problem(r);
	if (fixture_build(&r->f) < 0)
		return;
	expect_records_bind(&r->f.plan);
	fixture_allocate(&r->f);
	random_data(r);
	assert_works(&r->f, plan_read(&r->f.plan, r->f.bindings, &r->f.indices, &r->f.err));
	if (!prepare(r, &p))
		return;
	n_prepared++;
	expect_same_tables(r, &p);
	expect_same_head(r, &p);
	expect_inside(r, &p);
	free(p.workspace);
	for (int i = 0; i < 5; i++) {
		bend_scribble(r);
		(void)prepare(r, &p);
		expect_inside(r, &p);
		free(p.workspace);
		n_hostile++;
	}
}

static struct runner current;

static int name_the_case(void **state)
{
	(void)state;
	if (current.first_seed) {
		print_message("failed: seed %u\n", current.first_seed);
		bend_print(&current, stdout);
	}
	return 0;
}

static void tables_are_the_hosts(void **state)
{
	(void)state;
	for (unsigned seed = 1; seed <= CASES; seed++) {
		memset(&current, 0, sizeof(current));
		bend_begin(&current, seed, CPU_PORTABLE);
		run_case(&current);
		fixture_deinit(&current.f);
		current.first_seed = 0;
	}
	print_message("%u with tables, %u times damaged, %u records\n", n_prepared, n_hostile,
		      n_records);
	assert_true(n_prepared > CASES / 4 && n_records > CASES / 2);
}

/* ---- what GPUs' backward kernels find in the workspace ---- */

#define MOST_ROWS 192

/* Rows of kernels/gpu's catalogue that a plan was made of. */
static bool met[MOST_ROWS];
static unsigned n_in_tiles, n_split;

static void note_row(const struct plan *plan)
{
	const struct plan_stage *stage = plan_main_stage(plan);

	for (size_t i = 0; i < gpu_backend.n_rows; i++) {
		const struct spec_row *row = &gpu_backend.rows[i];

		met[i] = met[i] ||
			 (row->families & SPEC_BIT(SPEC_BWD_DQ_DK_DV) &&
			  strcmp(gpu_backend.pipelines[row->pipeline].name, stage->pipeline) == 0 &&
			  row->tile_m == stage->spec.tile.tile_m0 &&
			  row->tile_n == stage->spec.tile.tile_n0 &&
			  row->waves_m == stage->spec.tile.wave_m0 &&
			  row->blocks_per_cu == stage->spec.block_per_cu);
	}
}

/* Several sequences of several tiles each, some of them none, with rows between and behind them. */
static void packed_backward(struct runner *r, int hdim_q, int hdim_v, bool deterministic)
{
	static const int heads[][2] = {{1, 1}, {2, 2}, {6, 2}, {3, 1}};
	struct fmha_problem *p = &r->f.problem;
	const int *nheads = heads[random_pick(r, 4)];

	fixture_init(&r->f, FMHA_BACKWARD, FMHA_GROUP);
	p->batch = 1 + random_pick(r, 5);
	p->nhead_q = nheads[0];
	p->nhead_k = nheads[1];
	p->hdim_q = hdim_q;
	p->hdim_v = hdim_v;
	p->seqlen_q = 1 + random_pick(r, 400);
	p->seqlen_k = 1 + random_pick(r, 400);
	p->total_q = p->batch * p->seqlen_q;
	p->total_k = p->batch * p->seqlen_k;
	p->mask = (uint32_t)random_pick(r, 3);
	if (p->mask != FMHA_MASK_NONE)
		p->window_right = 0;
	p->deterministic = deterministic;
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (role <= FMHA_T_O || (role >= FMHA_T_DO && role <= FMHA_T_DV))
			fixture_add(&r->f, (enum fmha_tensor_role)role, FMHA_F16);
	fixture_add(&r->f, FMHA_T_LSE, FMHA_F32);
	fixture_add(&r->f, FMHA_T_SEQSTART_Q, FMHA_I32);
	fixture_add(&r->f, FMHA_T_SEQSTART_K, FMHA_I32);
	if (random_chance(r, 50))
		fixture_add(&r->f, FMHA_T_SEQLEN_Q, FMHA_I32);
	if (random_chance(r, 50))
		fixture_add(&r->f, FMHA_T_SEQLEN_K, FMHA_I32);
	fixture_allocate(&r->f);
}

static void put_lengths(struct runner *r, enum fmha_tensor_role starts_role,
			enum fmha_tensor_role lengths_role, int most)
{
	int32_t *starts = fixture_ints(&r->f, starts_role);
	int32_t *lengths = r->f.bindings[lengths_role].host; /* or none */

	starts[0] = 0;
	for (int b = 0; b < r->f.problem.batch; b++) {
		starts[b + 1] = starts[b] + (random_chance(r, 20) ? 0 : random_pick(r, most + 1));
		if (lengths)
			lengths[b] = random_pick(r, starts[b + 1] - starts[b] + 1);
	}
}

static void check_head(struct runner *r)
{
	const struct plan *plan = &r->f.plan;
	struct prepared p = {0};

	put_lengths(r, FMHA_T_SEQSTART_Q, FMHA_T_SEQLEN_Q, plan->problem.seqlen_q);
	put_lengths(r, FMHA_T_SEQSTART_K, FMHA_T_SEQLEN_K, plan->problem.seqlen_k);
	assert_works(&r->f, plan_read(plan, r->f.bindings, &r->f.indices, &r->f.err));
	assert_true(prepare(r, &p));
	expect_same_tables(r, &p);
	expect_same_head(r, &p);
	expect_inside(r, &p);
	if (plan->dq_acc_bytes > 0) /* the run's share, of the same lengths */
		assert_int_equal(plan_workspace_bytes(plan, r->f.indices),
				 plan->layout.dq_acc +
					 (uint64_t)p.args.dq_acc_offsets[plan->problem.batch] *
						 sizeof(float));
	free(p.workspace);
	for (int i = 0; i < 6; i++) {
		bend_scribble(r);
		(void)prepare(r, &p);
		expect_inside(r, &p);
		free(p.workspace);
	}
	r->f.indices = plan_indices_free(r->f.indices);
}

/* Every kernel that may run the problem. */
static void check_kernels(struct runner *r, struct plan_option *options)
{
	struct plan_device *device = &r->f.decree.device;
	int n = plan_options(&r->f.problem, device, options, &r->f.err);

	assert_works(&r->f, n);
	for (int i = 0; i < n; i++) {
		assert_works(&r->f, plan_build_option(&r->f.problem, &options[i], device,
						      &r->f.plan, &r->f.err));
		note_row(&r->f.plan);
		n_in_tiles += r->f.plan.dq_tile_rows > 0;
		n_split += r->f.plan.dq_per_sequence;
		check_head(r);
	}
}

static void check_device(const struct spec_catalog *catalog, const char *arch, const char *rules)
{
	static const int hdims[][2] = {{32, 32},   {64, 64},   {96, 96},   {128, 128}, {160, 160},
				       {192, 128}, {192, 192}, {224, 224}, {256, 256}};
	struct plan_option *options = calloc(PLAN_MAX_OPTIONS, sizeof(*options));
	struct registry_source *foreign = NULL;
	struct registry_device model = {0};
	struct registry *registry;
	struct fmha_error err;

	(void)snprintf(model.name, sizeof(model.name), "%s", arch);
	registry_device_archs(&model, arch);
	if (rules)
		assert_int_equal(ck_source_new(catalog, &model, rules, &foreign, &err), 0);
	model.source = foreign;
	assert_int_equal(registry_new(catalog, &model, &registry, &err), 0);
	for (unsigned i = 0; i < 2 * sizeof(hdims) / sizeof(hdims[0]); i++) {
		struct runner r = {.seed = 1 + i};

		packed_backward(&r, hdims[i / 2][0], hdims[i / 2][1], i % 2);
		r.f.decree.device = (struct plan_device){.arch = arch,
							 .registry = registry,
							 .compute_units = 100,
							 .lds_bytes = 65536,
							 .foreign = ck_foreign(foreign)};
		check_kernels(&r, options);
		fixture_deinit(&r.f);
	}
	registry_free(registry);
	ck_source_free(foreign);
	free(options);
}

static void backward_heads_are_the_hosts_for_every_kernel(void **state)
{
	static const struct {
		const char *arch, *rules;
	} devices[] = {{"sm_80", NULL},   {"sm_90a", NULL},  {"gfx90a", NULL}, {"gfx942", NULL},
		       {"gfx1100", NULL}, {"gfx1201", NULL}, {"gfx942", "ck"}};
	struct spec_catalog *catalog;
	struct fmha_error err;

	(void)state;
	assert_true(gpu_backend.n_rows <= MOST_ROWS);
	assert_int_equal(spec_catalog_load(NULL, fmha_backends, &catalog, &err), 0);
	for (size_t i = 0; i < sizeof(devices) / sizeof(devices[0]); i++)
		check_device(catalog, devices[i].arch, devices[i].rules);
	spec_catalog_free(catalog);
	for (size_t i = 0; i < gpu_backend.n_rows; i++)
		if (gpu_backend.rows[i].families & SPEC_BIT(SPEC_BWD_DQ_DK_DV) && !met[i])
			fail_msg("no plan had %s %dx%d",
				 gpu_backend.pipelines[gpu_backend.rows[i].pipeline].name,
				 gpu_backend.rows[i].tile_m, gpu_backend.rows[i].tile_n);
	print_message("%u plans with dQ in tiles, %u with splits\n", n_in_tiles, n_split);
	assert_true(n_in_tiles > 0 && n_split > 0);
}

/* No table helps an append that nothing has room for: told when it is planned. */
static void an_append_without_room_is_refused(void **state)
{
	struct plan_local local;
	struct fixture f;

	(void)state;
	fixture_forward(&f, FMHA_BATCH);
	assert_works(&f, fixture_build(&f));
	f.plan.problem.seqlen_new = 3;
	f.plan.problem.page_size = 16;
	f.plan.problem.n_pages = 0;
	assert_fails(&f, plan_local(&f.plan, &local, &f.err), FMHA_EINVAL, "n_pages");
	fixture_deinit(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(tables_are_the_hosts, name_the_case),
		cmocka_unit_test(backward_heads_are_the_hosts_for_every_kernel),
		cmocka_unit_test(an_append_without_room_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, cpu_runner_free_registries);
}
