/* SPDX-License-Identifier: MIT */
/*
 * Random problems that the validator accepts, on a GPU: planned, bound and launched as a worker
 * does, with every tensor, workspace and checked copy in an allocation of exactly its size. Under
 * compute-sanitizer's memcheck a byte beyond one is found; without it each lies between canaries,
 * inputs must stay as they were, and what nobody has bent is compared with the oracle. Integer
 * tensors lie where the device has no memory: kernels get checked copies only.
 *
 *   guard_gpu choose --list FILE   draws problems, builds their kernels, writes the problems' seeds
 *   guard_gpu run --list FILE      runs them
 *
 * tests/gpu/guard.py does both. What is printed of a case is enough to find it: its seed.
 */
#include <getopt.h>
#include <stdio.h>
#include <time.h>

#include <bend.h>

#include <device/device.h>
#include <catalogue/backends.h>
#include <registry/registry.h>

#include "guard_blocks.h"
#include "guard_code.h"

#define EXIT_SKIP  77
#define EXIT_USAGE 2

#define MOST_BENDS   4
#define CANARY_BYTES 4096
#define WAIT_S       60

/* What a case may cost. */
#define MOST_FLOPS     1e9
#define JUDGED_FLOPS   1e7 /* by the oracle, in double */
#define MOST_BLOCKS    (1 << 16)
#define MOST_WORKSPACE ((uint64_t)256 << 20)
#define MOST_INDICES   ((uint64_t)64 << 20) /* bytes that an integer tensor spans: as staging.c */
#define MOST_WORDS     (1 << 14)            /* of integer tensors */

static struct {
	const char *list, *cache, *sources, *helper, *libraries;
	uint32_t problems, kernels, jobs, first, step;
	unsigned seed;
	uint64_t most_bytes; /* of a problem's tensors */
	bool canaries, no_judge;
} options = {.problems = 500,
	     .kernels = 300,
	     .jobs = 1,
	     .step = 1,
	     .seed = 1,
	     .most_bytes = (uint64_t)6 << 30};

static struct device *device;
static struct plan_device plan_device;
static struct registry *registry;
static struct spec_catalog *catalog;
static struct guard_code *code;

static struct {
	unsigned ran, refused, judged, no_room;
} counts;

/* The case under way. */
static struct {
	struct runner r;
	unsigned seed; /* of where its memory lies and what is in it: the runner's tells the rest */
	int fill;
	struct guard_block tensors[FMHA_N_TENSORS], workspace, tables;
	char *head;
} current;

/* ---- the device ---- */

static void wake(void *owner)
{
	(void)owner; /* wait_for() looks by itself */
}

/* As a worker does. */
static int open_device(struct fmha_error *err)
{
	static const struct device_calls calls = {.wake = wake};
	const struct config_device config = {.backend = "cuda"};
	struct registry_device kind = {0};
	const struct device_info *info;
	int r = device_open(&config, &calls, NULL, &device, err);

	if (r < 0)
		return r;
	info = device_get_info(device);
	(void)snprintf(kind.name, sizeof(kind.name), "%s", info->arch);
	registry_device_archs(&kind, info->arch);
	r = spec_catalog_own(fmha_backends, &catalog, err);
	if (r == 0)
		r = registry_new(catalog, &kind, &registry, err);
	plan_device = (struct plan_device){.arch = info->arch,
					   .registry = registry,
					   .compute_units = info->compute_units,
					   .lds_bytes = info->lds_bytes,
					   .find = device_find_kernel,
					   .owner = device};
	return r;
}

static void close_device(void)
{
	device = device_close(device);
	registry = registry_free(registry);
	catalog = spec_catalog_free(catalog);
}

/* ---- problems ---- */

static bool is_integer(const struct plan *plan, const struct plan_view *view)
{
	return plan->problem.tensor[view->role].dtype == FMHA_I32;
}

static bool indices_fit(const struct plan *plan)
{
	const struct fmha_problem *p = &plan->problem;

	for (uint32_t i = 0; i < plan->n_views; i++)
		if (is_integer(plan, &plan->views[i]) && plan->views[i].span_bytes > MOST_INDICES)
			return false;
	return p->batch <= MOST_WORDS && p->n_page_indices <= MOST_WORDS &&
	       (int64_t)p->max_blocks * p->batch <= MOST_WORDS;
}

static bool fits(const struct plan *plan)
{
	uint64_t bytes = 0, blocks = 0;

	for (uint32_t i = 0; i < plan->n_views; i++) {
		if (plan->views[i].span_bytes > options.most_bytes)
			return false;
		bytes += plan->views[i].span_bytes;
	}
	for (uint32_t i = 0; i < plan->n_stages; i++) {
		const uint32_t *grid = plan->stages[i].launch.grid;

		blocks += (uint64_t)grid[0] * grid[1] * grid[2];
	}
	return bytes <= options.most_bytes && blocks <= MOST_BLOCKS && indices_fit(plan) &&
	       plan->flops <= MOST_FLOPS && plan->workspace_bytes <= MOST_WORKSPACE;
}

/* A third of the problems is left as sound as they were drawn: their results can be judged. */
static bool is_bent(void)
{
	return current.r.first_seed % 3 != 0;
}

static bool is_judged(void)
{
	return !is_bent() && current.r.f.plan.flops <= JUDGED_FLOPS;
}

/* Return: whether the seed gives a problem that writes something and is not too large. */
static bool make_case(unsigned seed)
{
	struct runner *r = &current.r;
	int e;

	bend_begin_on(r, seed, &plan_device);
	current.seed = ~seed;
	r->tiled = seed % 2 != 0;
	r->tiny = r->tiny && !r->tiled;
	bend_problem(r, is_bent() ? MOST_BENDS : 0);
	if (!bend_mend(r))
		return false;
	e = fixture_build(&r->f);
	if (e == FMHA_EINTERNAL)
		fail_msg("%s: %s", r->f.err.field, r->f.err.msg);
	return e == 0 && r->f.plan.n_stages > 0 && fits(&r->f.plan);
}

/* ---- memory ---- */

static int pick_fill(void)
{
	static const int fills[] = {0x3c, 0x3c, 0x3c, 0x00, 0xff, 0x7c};

	return fills[(unsigned)rand_r(&current.seed) % (sizeof(fills) / sizeof(fills[0]))];
}

/* Most tensors lie where an allocation begins, the others at any element. */
static uint64_t pick_shift(const struct plan_view *view)
{
	int kind = rand_r(&current.seed) % 4;

	return kind ? 0 : (uint64_t)(rand_r(&current.seed) % 16) * view->element_bytes;
}

/* No tensor is so large that the next one's would not be another address; no device has it. */
static void *nowhere(uint32_t role)
{
	return (void *)((uintptr_t)(role + 1) << 40);
}

static void place_integers(struct plan_binding *binding, const struct plan_view *view)
{
	if (!binding->host)
		binding->host = malloc(view->span_bytes + 1);
	assert_non_null(binding->host);
	memset(binding->host, current.fill, view->span_bytes);
	*binding = (struct plan_binding){binding->host, nowhere(view->role), view->span_bytes};
}

/* A tensor's own allocation, filled as the host has it, or with one byte. */
static bool place_tensor(struct plan_binding *binding, const struct plan_view *view)
{
	const uint64_t canary = options.canaries ? CANARY_BYTES : 0;
	struct guard_block *block = &current.tensors[view->role];

	if (!guard_block_new(block, canary + pick_shift(view), view->span_bytes, canary,
			     current.fill))
		return false;
	binding->device = guard_block_data(block);
	binding->bytes = view->span_bytes;
	return true;
}

/* Where the tensors will lie, without any memory but that of integers. */
static void place_nowhere(void)
{
	struct fixture *f = &current.r.f;

	current.fill = pick_fill();
	if (is_judged())
		fixture_allocate(f);
	for (uint32_t i = 0; i < f->plan.n_views; i++) {
		const struct plan_view *view = &f->plan.views[i];
		struct plan_binding *binding = &f->bindings[view->role];

		if (is_integer(&f->plan, view))
			place_integers(binding, view);
		else
			*binding = (struct plan_binding){binding->host, nowhere(view->role),
							 view->span_bytes};
	}
}

/* After place_nowhere(). Return: false when the device has no room. */
static bool place_on_device(void)
{
	const uint64_t canary = options.canaries ? CANARY_BYTES : 0;
	struct fixture *f = &current.r.f;

	for (uint32_t i = 0; i < f->plan.n_views; i++) {
		const struct plan_view *view = &f->plan.views[i];

		if (!is_integer(&f->plan, view) && !place_tensor(&f->bindings[view->role], view))
			return false;
	}
	return guard_block_new(&current.workspace, canary, f->plan.workspace_bytes, canary, 0xff) &&
	       guard_block_new(&current.tables, canary, plan_indices_bytes(&f->plan), canary, 0xff);
}

static void fill_tensors(void)
{
	if (is_judged())
		random_data(&current.r);
	else
		bend_indices(&current.r);
}

/* What random_data() has made, to the device; of what will be written, as the judge wants it. */
static void upload_data(void)
{
	struct runner *r = &current.r;

	for (uint32_t i = 0; i < r->f.plan.n_views; i++) {
		const struct plan_view *view = &r->f.plan.views[i];
		const struct plan_binding *binding = &r->f.bindings[view->role];

		if (is_integer(&r->f.plan, view))
			continue;
		guard_block_write(&current.tensors[view->role], binding->host);
		if (!view->written)
			continue;
		r->before[view->role] = malloc(binding->bytes + 1);
		assert_non_null(r->before[view->role]);
		memcpy(r->before[view->role], binding->host, binding->bytes);
	}
}

static void end_case(void)
{
	struct runner *r = &current.r;

	for (int role = 0; role < FMHA_N_TENSORS; role++) {
		guard_block_free(&current.tensors[role]);
		free(r->before[role]);
	}
	guard_block_free(&current.workspace);
	guard_block_free(&current.tables);
	free(current.head);
	current.head = NULL;
	r->f.workspace = NULL;
	fixture_deinit(&r->f);
	r->first_seed = 0;
}

/* ---- runs ---- */

/* Return: 0, or FMHA_EINVAL for integers that no run may have. */
static int bind(void)
{
	struct fixture *f = &current.r.f;
	void *workspace = current.workspace.allocation ? guard_block_data(&current.workspace)
						       : nowhere(FMHA_N_TENSORS);
	int e;

	current.head = calloc(1, f->plan.workspace_head_bytes + 1);
	assert_non_null(current.head);
	e = plan_read(&f->plan, f->bindings, &f->indices, &f->err);
	if (e == 0) {
		const struct plan_memory memory = {workspace, current.head,
						   guard_block_data(&current.tables)};

		e = plan_place(&f->plan, f->bindings, f->indices, &memory, f->args, &f->err);
	}
	if (e < 0 && (e != FMHA_EINVAL || is_judged()))
		fail_msg("%s: %s", f->err.field, f->err.msg);
	return e;
}

static void on_done(struct device_launch *launch)
{
	*(bool *)launch->owner = true;
}

static void wait_for(const bool *done)
{
	const struct timespec pause = {.tv_nsec = 20000};
	time_t end = time(NULL) + WAIT_S;

	while (!*done && time(NULL) < end) {
		(void)nanosleep(&pause, NULL);
		device_collect(device);
	}
	if (!*done)
		fail_msg("the kernels do not end");
}

/* As staging_upload(), with the checked copies in an allocation of their own. */
static void add_uploads(struct device_launch *launch)
{
	const struct fixture *f = &current.r.f;
	char *workspace = guard_block_data(&current.workspace);
	void *tables = guard_block_data(&current.tables);

	if (f->plan.workspace_head_bytes > 0)
		launch->uploads[launch->n_uploads++] = (struct device_copy){
			current.head, workspace, f->plan.workspace_head_bytes};
	if (plan_indices_bytes(&f->plan) > 0)
		launch->uploads[launch->n_uploads++] = (struct device_copy){
			(void *)(uintptr_t)plan_indices_data(f->indices), tables,
			plan_indices_bytes(&f->plan)};
	launch->zero = workspace + f->plan.layout.dq_acc;
	launch->zero_bytes = f->plan.workspace_zero ? f->plan.dq_acc_bytes : 0;
}

static void fill_launch(struct device_launch *launch)
{
	const struct fixture *f = &current.r.f;
	union abi_args args[PLAN_MAX_STAGES];
	struct device_waiter nobody = {0};
	struct fmha_error err = {0};

	plan_placeholder_args(&f->plan, args);
	memcpy(launch->args, f->args, sizeof(launch->args));
	add_uploads(launch);
	launch->n_stages = f->plan.n_stages;
	for (uint32_t i = 0; i < f->plan.n_stages; i++) {
		const struct plan_stage *stage = &f->plan.stages[i];

		/* Loaded before, so ready at once. */
		if (device_prepare(device, stage, &args[i], &nobody, &launch->kernels[i], &err) !=
		    0)
			fail_msg("%s: not ready: %s", stage->kernel, err.msg);
		launch->records[i] = &stage->launch;
		launch->names[i] = stage->kernel;
		launch->workspaces[i] = (char *)guard_block_data(&current.workspace) +
					stage->workspace_offset;
	}
}

static void launch_case(void)
{
	struct device_launch *launch = device_launch_new(device);
	struct fmha_error err = {0};
	bool done = false;

	assert_non_null(launch);
	if (device_stream_new(device, 0, 1, &launch->stream, &err) < 0)
		fail_msg("%s", err.msg);
	fill_launch(launch);
	launch->on_done = on_done;
	launch->owner = &done;
	device_submit(device, launch);
	wait_for(&done);
	if (launch->error.code != FMHA_OK)
		fail_msg("%s", launch->error.msg);
	(void)device_stream_free(device, launch->stream);
	(void)device_launch_free(device, launch);
}

/* What a run may not have touched. */
static void check_memory(void)
{
	const struct fixture *f = &current.r.f;

	for (uint32_t i = 0; i < f->plan.n_views; i++) {
		const struct plan_view *view = &f->plan.views[i];
		const struct guard_block *block = &current.tensors[view->role];
		const char *name = proto_roles[view->role].name;
		const void *data = is_judged() ? f->bindings[view->role].host : NULL;

		if (is_integer(&f->plan, view))
			continue;
		if (!guard_block_is_intact(block))
			fail_msg("tensor.%s: bytes beside it have changed", name);
		if (!view->written && block->bytes <= MOST_INDICES &&
		    !guard_block_holds(block, data, current.fill))
			fail_msg("tensor.%s: an input has changed", name);
	}
	if (!guard_block_is_intact(&current.workspace))
		fail_msg("workspace: bytes beside it have changed");
	if (!guard_block_is_intact(&current.tables) ||
	    !guard_block_holds(&current.tables, plan_indices_data(f->indices), 0))
		fail_msg("the checked copies of integers have changed");
}

static void judge_results(void)
{
	struct runner *r = &current.r;

	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (r->before[role])
			guard_block_read(&current.tensors[role], r->f.bindings[role].host);
	judge_run(r);
	counts.judged++;
}

static void run_bound(void)
{
	struct fmha_error err = {0};

	if (guard_code_prepare(code, &current.r.f.plan, &err) < 0)
		fail_msg("%s", err.msg);
	if (guard_code_wait(code) > 0)
		fail_msg("a kernel is missing");
	launch_case();
	counts.ran++;
	if (!options.canaries)
		return; /* memcheck looks */
	check_memory();
	if (is_judged() && !options.no_judge)
		judge_results();
}

static void run_case(unsigned seed)
{
	if (!make_case(seed))
		fail_msg("seed %u: chosen for another device or another fmhad", seed);
	place_nowhere();
	if (!place_on_device()) {
		counts.no_room++;
	} else {
		fill_tensors();
		if (is_judged())
			upload_data();
		if (bind() < 0)
			counts.refused++;
		else
			run_bound();
	}
	end_case();
}

/* ---- modes ---- */

static int name_the_case(void **state)
{
	(void)state;
	if (current.r.first_seed) {
		(void)fflush(stdout);
		bend_print(&current.r, stderr);
	}
	return 0;
}

/* Return: whether it is one of the problems: its kernels are among those that are wanted. */
static bool choose_case(unsigned seed)
{
	struct fmha_error err = {0};
	bool is_chosen = make_case(seed);
	int e = is_chosen ? guard_code_prepare(code, &current.r.f.plan, &err) : 0;

	if (e < 0 && e != FMHA_EQUOTA)
		fail_msg("%s", err.msg);
	is_chosen = is_chosen && e == 0;
	if (is_chosen) {
		place_nowhere();
		fill_tensors();
		if (bind() < 0)
			counts.refused++;
		else
			counts.ran++;
	}
	end_case();
	return is_chosen;
}

static void choose_problems(void **state)
{
	FILE *list = fopen(options.list, "w");
	uint32_t failed;

	(void)state;
	assert_non_null(list);
	for (unsigned seed = options.seed; counts.ran < options.problems; seed++)
		if (choose_case(seed))
			(void)fprintf(list, "%u\n", seed);
	assert_int_equal(fclose(list), 0);
	failed = guard_code_wait(code);
	print_message("chosen: %u to run, %u to refuse, %u kernels, %u failed\n", counts.ran,
		      counts.refused, guard_code_kernels(code), failed);
	assert_int_equal(failed, 0);
}

static void run_problems(void **state)
{
	FILE *list = fopen(options.list, "r");
	unsigned seed;

	(void)state;
	assert_non_null(list);
	guard_blocks_open();
	for (uint32_t i = 0; fscanf(list, "%u", &seed) == 1; i++) {
		if (i < options.first || (i - options.first) % options.step != 0)
			continue;
		(void)printf("case %u\n", i);
		(void)fflush(stdout);
		run_case(seed);
	}
	(void)fclose(list);
	print_message("done: %u ran, %u judged, %u refused, %u without room, %u kernels\n",
		      counts.ran, counts.judged, counts.refused, counts.no_room,
		      guard_code_kernels(code));
}

static int usage(void)
{
	(void)fprintf(
		stderr,
		"usage: guard_gpu choose|run --list FILE --cache DIR "
		"[--sources DIR] [--helper FILE] [--libraries PATH] [--problems N] [--kernels N] "
		"[--jobs N] [--seed N] "
		"[--first I] [--step N] [--canaries [--no-judge]] [--most-mib N]\n");
	return EXIT_USAGE;
}

static bool read_option(int option)
{
	uint64_t number = optarg ? strtoull(optarg, NULL, 10) : 0;

	switch (option) {
	case 'l':
		options.list = optarg;
		break;
	case 'c':
		options.cache = optarg;
		break;
	case 's':
		options.sources = optarg;
		break;
	case 'h':
		options.helper = optarg;
		break;
	case 'i':
		options.libraries = optarg;
		break;
	case 'm':
		options.most_bytes = number << 20;
		break;
	case 'a':
		options.canaries = true;
		break;
	case 'n':
		options.no_judge = true;
		break;
	case 'p':
		options.problems = (uint32_t)number;
		break;
	case 'k':
		options.kernels = (uint32_t)number;
		break;
	case 'j':
		options.jobs = (uint32_t)number;
		break;
	case 'e':
		options.seed = (unsigned)number;
		break;
	case 'f':
		options.first = (uint32_t)number;
		break;
	case 't':
		options.step = number ? (uint32_t)number : 1;
		break;
	default:
		return false;
	}
	return true;
}

static bool read_options(int argc, char **argv)
{
	static const struct option names[] = {{"list", required_argument, NULL, 'l'},
					      {"cache", required_argument, NULL, 'c'},
					      {"sources", required_argument, NULL, 's'},
					      {"problems", required_argument, NULL, 'p'},
					      {"kernels", required_argument, NULL, 'k'},
					      {"jobs", required_argument, NULL, 'j'},
					      {"seed", required_argument, NULL, 'e'},
					      {"first", required_argument, NULL, 'f'},
					      {"step", required_argument, NULL, 't'},
					      {"most-mib", required_argument, NULL, 'm'},
					      {"helper", required_argument, NULL, 'h'},
					      {"libraries", required_argument, NULL, 'i'},
					      {"canaries", no_argument, NULL, 'a'},
					      {"no-judge", no_argument, NULL, 'n'},
					      {0}};
	int option;

	while ((option = getopt_long(argc, argv, "", names, NULL)) != -1)
		if (!read_option(option))
			return false;
	return optind == argc - 1 && options.list && options.cache;
}

int main(int argc, char **argv)
{
	const struct CMUnitTest choose[] = {
		cmocka_unit_test_teardown(choose_problems, name_the_case)};
	const struct CMUnitTest run[] = {cmocka_unit_test_teardown(run_problems, name_the_case)};
	struct fmha_error err = {0};
	int failed;

	if (!read_options(argc, argv))
		return usage();
	if (open_device(&err) < 0) {
		(void)fprintf(stderr, "%s\n", err.msg);
		return EXIT_SKIP;
	}
	code = guard_code_new(device,
			      &(struct guard_files){options.cache, options.sources, options.helper,
						    options.libraries},
			      (int)options.jobs, options.kernels);
	failed = strcmp(argv[optind], "choose") == 0 ? cmocka_run_group_tests(choose, NULL, NULL)
						     : cmocka_run_group_tests(run, NULL, NULL);
	if (failed)
		return 1; /* the device may be beyond closing */
	code = guard_code_free(code);
	close_device();
	return 0;
}
