/* SPDX-License-Identifier: MIT */
/*
 * The code objects that GPUs are given for random problems: each has compiled in what the problem asks
 * for, by a reading of the problem that knows nothing of signatures and rows, and planning again chooses
 * the same.
 *
 * `test_dispatch_choice ARCH N` writes the objects of N problems, a line for each, and how long a plan
 * took: two builds that choose alike write the same lines.
 */
#include <stdio.h>
#include <time.h>

#include <dispatch/model.h>
#include <catalogue/backends.h>
#include <catalogue/gpu_catalogue.h>
#include <registry/registry.h>
#include <specs/backend.h>

#include "random_case.h"

#define CASES      500 /* an arch */
#define MOST_FOUND 128 /* kernels that the device is asked for, for one plan */

struct found {
	struct kernel_spec spec;
	struct gpu_kernel kernel;
};

struct gpu {
	const char *arch;
	struct spec_catalog *catalog;
	struct registry *registry;
	struct predict_model *model;
	struct found found[MOST_FOUND]; /* of the plan built last */
	size_t n_found;
};

static struct found *find_found(struct gpu *gpu, const struct kernel_spec *spec)
{
	for (size_t i = 0; i < gpu->n_found; i++)
		if (spec_compare(&gpu->found[i].spec, spec) == 0)
			return &gpu->found[i];
	return NULL;
}

static void keep_found(struct gpu *gpu, const struct kernel_spec *spec,
		       const struct gpu_kernel *kernel)
{
	struct found *found = find_found(gpu, spec);

	if (!found) {
		assert_true(gpu->n_found < MOST_FOUND);
		found = &gpu->found[gpu->n_found++];
	}
	*found = (struct found){*spec, *kernel};
}

/* As daemon/device/hip says it, with no code compiled yet. */
static int find_kernel(void *owner, enum abi_family family, uint32_t dtype,
		       const union abi_args *args, struct plan_stage *stage, const char **ret_why)
{
	struct gpu *gpu = owner;
	struct gpu_kernel kernel;
	const char *why;

	(void)family;
	(void)dtype;
	if (!stage->has_spec)
		return 1;
	why = gpu_kernel_of_spec(gpu->arch, stage->pipeline, &stage->spec, &stage->traits, &kernel);
	if (!why)
		why = gpu_kernel_maps(&kernel, args, &stage->launch);
	if (!why && gpu_kernel_grid(&kernel, 128, args, stage->launch.grid) != 0)
		why = "its blocks are more than a launch takes";
	if (why) {
		*ret_why = why;
		return 1;
	}
	(void)snprintf(stage->launch.entry, sizeof(stage->launch.entry), "%s", kernel.entry);
	stage->tile_n0 = (uint32_t)kernel.tile.tile_n;
	keep_found(gpu, &stage->spec, &kernel);
	return 0;
}

static void open_gpu(struct gpu *gpu, const char *arch)
{
	struct registry_device device = {0};
	struct fmha_error err = {0};

	memset(gpu, 0, sizeof(*gpu));
	gpu->arch = arch;
	registry_device_archs(&device, arch);
	if (spec_catalog_own(fmha_backends, &gpu->catalog, &err) < 0 ||
	    registry_new(gpu->catalog, &device, &gpu->registry, &err) < 0 ||
	    predict_model_load(arch, &gpu->model, &err) < 0)
		fail_msg("%s: %s", arch, err.msg);
}

static void close_gpu(struct gpu *gpu)
{
	predict_model_free(gpu->model);
	registry_free(gpu->registry);
	spec_catalog_free(gpu->catalog);
}

static void start_case(struct runner *r, struct gpu *gpu, unsigned seed)
{
	static const uint32_t ops[] = {FMHA_FORWARD, FMHA_FORWARD, FMHA_BACKWARD, FMHA_APPEND_KV,
				       FMHA_MERGE_STATES};
	int arch = spec_arch_find(gpu->catalog, gpu->arch);
	const struct spec_backend_arch *model = spec_arch_model(gpu->catalog, arch);

	memset(r, 0, sizeof(*r));
	r->first_seed = seed;
	r->seed = seed * 2654435761U;
	fixture_init(&r->f, ops[seed % 5], FMHA_BATCH);
	r->tiled = seed % 4 != 0;
	r->f.decree.device = (struct plan_device){.arch = gpu->arch,
						  .registry = gpu->registry,
						  .compute_units = model->units,
						  .lds_bytes = model->lds_bytes,
						  .wave = model->wave,
						  .find = find_kernel,
						  .owner = gpu,
						  .model = gpu->model};
	random_problem(r);
}

static int build(struct runner *r, struct gpu *gpu)
{
	gpu->n_found = 0;
	return fixture_build(&r->f);
}

static const struct gpu_kernel *object_of(struct gpu *gpu, const struct plan_stage *stage)
{
	const struct found *found = find_found(gpu, &stage->spec);

	assert_non_null(found);
	return &found->kernel;
}

static int option_of(const struct gpu_kernel *kernel, const char *name)
{
	char start[BUILD_WORD_BYTES];
	size_t n = (size_t)snprintf(start, sizeof(start), "-DFMHA_%s=", name);

	for (uint32_t i = 0; i < kernel->build.n_options; i++)
		if (strncmp(kernel->build.options[i], start, n) == 0)
			return atoi(kernel->build.options[i] + n);
	fail_msg("%s: no option %s", kernel->build.name, name);
	return -1;
}

static void expect_option(const struct runner *r, const struct gpu_kernel *kernel, const char *name,
			  int want)
{
	if (option_of(kernel, name) != want)
		fail_msg("seed %u: %s: %s is %d, the problem asks for %d", r->first_seed,
			 kernel->build.name, name, option_of(kernel, name), want);
}

/* By the public problem alone. */
static void expect_traits(const struct runner *r, const struct gpu_kernel *kernel)
{
	const struct fmha_problem *p = &r->f.problem;
	bool forward = kernel->family == ABI_FWD || kernel->family == ABI_FWD_SPLITKV ||
		       kernel->family == ABI_FWD_PAGEDKV || kernel->family == ABI_BATCH_PREFILL;
	bool scored = forward || kernel->family == ABI_BWD_DQ_DK_DV;
	bool windowed = p->window_left >= 0 || p->window_right >= 0;
	int bias = p->bias.buffer ? 1 : p->alibi_slopes.buffer ? 2 : 0;
	/* A cache may be widened first; then it lies in no pages, either, and keys that had factors of
	 * their own have them no more. */
	bool widened = forward && r->f.plan.widens;
	bool of_keys = p->k_descale.buffer || p->v_descale.buffer;
	bool by_key = of_keys && (p->descale_block_k > 0 || p->descale_per_page);
	bool described = p->q_descale.buffer || (of_keys && !(widened && by_key));
	int narrow = p->k.dtype == p->q.dtype || widened ? 0
		     : p->k.dtype == FMHA_E4M3           ? 1
		     : p->k.dtype == FMHA_E5M2           ? 2
							 : 3;

	expect_option(r, kernel, "MASK", scored && p->mask != FMHA_MASK_NONE && windowed);
	expect_option(r, kernel, "BIAS", scored ? bias : 0);
	expect_option(r, kernel, "SOFTCAP", scored && p->logits_soft_cap > 0);
	expect_option(r, kernel, "DROPOUT", scored && p->dropout_p > 0);
	expect_option(r, kernel, "PAGED",
		      (forward || kernel->family == ABI_FWD_APPENDKV) && p->page_size > 0 &&
			      !widened);
	expect_option(r, kernel, "DESCALE", forward && described);
	expect_option(r, kernel, "NARROW", forward ? narrow : 0);
	expect_option(r, kernel, "BY_KEY",
		      forward && kernel->tile.pipeline == GPU_DECODE && by_key && !widened);
	if (!r->f.plan.append || !r->f.plan.widens) { /* else it may be of either stage */
		bool appends = kernel->family == ABI_FWD_APPENDKV, widens = r->f.plan.widens;

		expect_option(r, kernel, "WIDENS", appends && widens);
		expect_option(r, kernel, "TURNS", appends && !widens ? (int)p->rope : 0);
	}
	if (forward)
		expect_option(r, kernel, "SPLIT", kernel->family == ABI_FWD_SPLITKV);
	if (forward)
		expect_option(r, kernel, "SHARES",
			      kernel->family == ABI_FWD_SPLITKV && r->f.plan.shares);
	/* A row's bits depend on the other rows' lengths then, and splits are nobody's wish. */
	assert_false(r->f.plan.shares && (p->deterministic || p->n_splits || p->split_size));
	/* Real logits before the softmax where products alone do not order them. */
	if (scored && (bias || p->logits_soft_cap > 0 || p->scale < 0))
		expect_option(r, kernel, "LOGITS", 1);
	if (forward && kernel->tile.pipeline < GPU_WGMMA)
		expect_option(r, kernel, "TAILS", p->hdim_q % 8 || p->hdim_v % 8);
}

/* What a plan says that a GPU does not do. */
static bool may_refuse(const struct gpu *gpu, const struct runner *r)
{
	const struct fmha_problem *p = &r->f.problem;

	if (strcmp(r->f.err.field, "n_splits") == 0) /* NVIDIA's sum dQ over all keys */
		return p->op == FMHA_BACKWARD && p->n_splits > 1 &&
		       strncmp(gpu->arch, "sm_", 3) == 0;
	return strcmp(r->f.err.field, "v_descale") == 0;
}

static void check_case(struct gpu *gpu, unsigned seed, int *ret_n_objects)
{
	char names[PLAN_MAX_STAGES][sizeof(gpu->found[0].kernel.build.name)];
	struct runner r;
	int e;

	start_case(&r, gpu, seed);
	e = build(&r, gpu);
	for (uint32_t i = 0; e == 0 && i < r.f.plan.n_stages; i++) {
		const struct gpu_kernel *object = object_of(gpu, &r.f.plan.stages[i]);

		expect_traits(&r, object);
		(void)snprintf(names[i], sizeof(names[i]), "%s", object->build.name);
		++*ret_n_objects;
	}
	if (e != FMHA_ENOKERNEL && !(e == FMHA_ENOTSUP && may_refuse(gpu, &r)))
		assert_works(&r.f, e);
	assert_int_equal(build(&r, gpu), e);
	for (uint32_t i = 0; e == 0 && i < r.f.plan.n_stages; i++)
		assert_string_equal(object_of(gpu, &r.f.plan.stages[i])->build.name, names[i]);
	fixture_deinit(&r.f);
}

static void code_has_what_the_problem_asks_for(void **state)
{
	static const char *const archs[] = {"sm_90a", "gfx942", "gfx1100"};
	static struct gpu gpu;

	(void)state;
	for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++) {
		int n_objects = 0;

		open_gpu(&gpu, archs[i]);
		for (unsigned seed = 1; seed <= CASES; seed++)
			check_case(&gpu, seed, &n_objects);
		assert_true(n_objects > CASES);
		close_gpu(&gpu);
	}
}

static void write_choices(const char *arch, unsigned n)
{
	static struct gpu gpu;
	double us = 0;

	open_gpu(&gpu, arch);
	for (unsigned seed = 1; seed <= n; seed++) {
		struct timespec a, b;
		struct runner r;
		int e;

		start_case(&r, &gpu, seed);
		(void)clock_gettime(CLOCK_MONOTONIC, &a);
		e = build(&r, &gpu);
		(void)clock_gettime(CLOCK_MONOTONIC, &b);
		us += (double)(b.tv_sec - a.tv_sec) * 1e6 + (double)(b.tv_nsec - a.tv_nsec) / 1e3;
		(void)printf("%u: %d %d", seed, e, e == 0 ? r.f.plan.n_splits : 0);
		for (uint32_t i = 0; e == 0 && i < r.f.plan.n_stages; i++)
			(void)printf(" %s", object_of(&gpu, &r.f.plan.stages[i])->build.name);
		(void)printf("\n");
		fixture_deinit(&r.f);
	}
	(void)fprintf(stderr, "%s: %u plans, %.1f us each\n", arch, n, us / n);
	close_gpu(&gpu);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(code_has_what_the_problem_asks_for),
	};

	if (argc == 3) {
		write_choices(argv[1], (unsigned)atoi(argv[2]));
		return 0;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}
