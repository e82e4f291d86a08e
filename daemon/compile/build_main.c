/* SPDX-License-Identifier: MIT */
/*
 * fmhad-build: fills a cache of compiled kernels ahead of time, on a machine that needs no GPU. Run
 * by `fmhactl build`.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <compile/build_identity.h>
#include <compile/build_usage.h>
#include <compile/config.h>
#include <compile/queue.h>
#include <catalogue/backends.h>
#include <catalogue/gpu_catalogue.h>
#include <proto/error.h>
#include <specs/filter.h>
#include <specs/set.h>
#include <specs/space.h>

#define EXIT_FAILED 1
#define EXIT_USAGE  2
#define EXIT_FILES  5
#define SLOTS       (1 << 19) /* of the table of identities; a power of two */

static const struct cli_usage build_usage = BUILD_USAGE;

/* A kernel that was asked for by name; by a plan's name all code that the spec has. */
struct wanted {
	const char *name;
	bool found, is_spec;
	struct gpu_kernel kernel;
	struct kernel_spec spec;
};

struct build {
	struct build_request asked;
	struct compile_config config;
	struct compile_paths paths;
	struct wanted wanted[CLI_MOST_TEXTS];              /* asked.kernels */
	struct spec_filter *filters[1 + BUILD_MOST_FILES]; /* all of them have to hold */
	int n_filters;
	struct spec_catalog *catalog;
	/* Words of identities, open addressing: many specs share a kernel. */
	uint64_t *seen;
	size_t n_seen;
	atomic_uint n_done, n_failed, n_spilling;
	int is_terminal;
};

/* What the queue hands back for one kernel. */
struct ticket {
	struct build *build;
	struct compile_waiter waiter;
	char name[BUILD_NAME_BYTES];
};

static int usage(const char *fmt, const char *value)
{
	(void)fputs("fmhactl build: ", stderr);
	(void)fprintf(stderr, fmt, value);
	(void)fputs("\nTry `fmhactl build --help`.\n", stderr);
	return EXIT_USAGE;
}

static int build_parse(struct build *build, int argc, char **argv)
{
	const struct build_request *asked = &build->asked;

	if (cli_next(&build_usage, argc, argv, &build->asked) != -1)
		return EXIT_USAGE; /* it has said why */
	build->config.clang = asked->clang;
	build->config.linker = asked->linker;
	build->config.source_dir = asked->sources;
	build->config.helper = asked->helper;
	build->config.library_path = asked->library_path;
	for (uint32_t i = 0; i < asked->kernels.n; i++)
		build->wanted[i].name = asked->kernels.at[i];
	if (optind < argc)
		return usage("%s: not an option", argv[optind]);
	return asked->arch ? 0 : usage("--arch is needed%s", "");
}

/* Returns 1 the first time that it sees code of this identity; -1 when the table is full. */
static int is_new(struct build *build, const struct kernel_build *code)
{
	const struct build_identity identity = build_identity(code);
	uint64_t word = build_identity_word(&identity);
	size_t i = word & (SLOTS - 1);

	while (build->seen[i]) {
		if (build->seen[i] == word)
			return 0;
		i = (i + 1) & (SLOTS - 1);
	}
	if (build->n_seen == SLOTS / 2)
		return -1;
	build->seen[i] = word;
	build->n_seen++;
	return 1;
}

static void on_built(void *owner, int result, const struct cache_entry *entry,
		     const struct fmha_error *err)
{
	struct ticket *ticket = owner;
	struct build *build = ticket->build;
	unsigned done = atomic_fetch_add(&build->n_done, 1) + 1;

	if (result < 0) {
		atomic_fetch_add(&build->n_failed, 1);
		(void)fprintf(stderr, "%sfailed: %s: %s\n", build->is_terminal ? "\r\033[K" : "",
			      ticket->name, err->msg);
		if (entry && entry->log)
			(void)fprintf(stderr, "%.4000s\n", entry->log);
	} else if (entry->info.spills > 0) {
		atomic_fetch_add(&build->n_spilling, 1);
		(void)fprintf(stderr, "%sspills %u bytes: %s\n",
			      build->is_terminal ? "\r\033[K" : "", entry->info.spills,
			      ticket->name);
	}
	if (build->is_terminal)
		(void)fprintf(stderr, "\r\033[K%u built, %u failed", done,
			      atomic_load(&build->n_failed));
	free(ticket);
}

static int submit(struct build *build, struct compile_queue *queue, const struct gpu_kernel *kernel,
		  struct fmha_error *err)
{
	struct ticket *ticket = malloc(sizeof(*ticket));
	const struct compile_request request = {
		.build = kernel->build, .compiler = build->asked.compiler, .uid = getuid()};
	int r;

	if (!ticket)
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	ticket->build = build;
	memcpy(ticket->name, kernel->build.name, sizeof(ticket->name));
	r = compile_queue_submit(queue, &request, COMPILE_BACKGROUND, on_built, ticket,
				 &ticket->waiter, err);
	if (r < 0)
		free(ticket);
	return r;
}

/* Code of an append that its name does not tell apart: how rows turn, or that it is the way back. */
#define VARIANT_WIDENS (ABI_ROPE_HALF_ROTATED + 1)
#define VARIANTS       (VARIANT_WIDENS + 1)

static bool make_kernel(const struct build *build, const struct kernel_spec *spec, int variant,
			struct gpu_kernel *ret_kernel)
{
	struct traits traits;

	spec_traits(&spec->signature, &traits);
	if (variant > 0 && spec->signature.family != SPEC_FWD_APPENDKV)
		return false;
	traits.widens = variant == VARIANT_WIDENS;
	traits.turns = (unsigned char)(traits.widens ? ABI_ROPE_NONE : variant);
	if (traits.widens && traits.dtype <= ABI_BF16) /* caches of 8 bits are */
		return false;
	return !gpu_kernel_of_spec(build->asked.arch,
				   spec_word(build->catalog, SPEC_FIELD_pipeline, spec->pipeline),
				   spec, &traits, ret_kernel);
}

/* Builds the kernel, or prints its name where there is no queue; the same one once. */
static int add_kernel(struct build *build, struct compile_queue *queue,
		      const struct gpu_kernel *kernel, struct fmha_error *err)
{
	switch (is_new(build, &kernel->build)) {
	case 1:
		if (queue)
			return submit(build, queue, kernel, err);
		(void)printf("%s\n", kernel->build.name);
		return 0;
	case -1:
		return fmha_error_set(err, FMHA_EINVAL, "more than %d kernels: use a filter",
				      SLOTS / 2);
	default:
		return 0;
	}
}

/* ---- every kernel that the options keep ---- */

/* Called for each spec; 0 goes on, 1 ends the walk. */
typedef int (*spec_visitor)(struct build *build, struct compile_queue *queue,
			    const struct kernel_spec *spec, struct fmha_error *err);

/* Do the filters and the profile let it through? */
static bool is_kept(const struct build *build, int profile, const struct kernel_spec *spec)
{
	for (int i = 0; i < build->n_filters; i++)
		if (!spec_filter_match(build->filters[i], spec))
			return false;
	return profile < 0 || spec_profile_keeps(build->catalog, profile, spec);
}

static int profile_of(const struct build *build)
{
	return build->asked.profile ? spec_profile_parse(build->catalog, build->asked.profile) : -1;
}

static int visit_space(struct build *build, struct compile_queue *queue, spec_visitor visit,
		       struct fmha_error *err)
{
	struct spec_space_options options = SPEC_SPACE_OPTIONS(build->asked.arch);
	int profile = profile_of(build);
	struct spec_space *space = NULL;
	struct spec_iter *iter = NULL;
	const struct kernel_spec *spec;
	int r = spec_space_new(build->catalog, &options, &space, err);

	if (r == 0) {
		iter = spec_iter_new(space, NULL);
		if (!iter)
			r = fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	}
	while (r == 0 && (spec = spec_iter_next(iter)))
		if (is_kept(build, profile, spec))
			r = visit(build, queue, spec, err);
	(void)spec_iter_free(iter);
	(void)spec_space_free(space);
	return r < 0 ? r : 0;
}

/* The kernels of the files of --set: of this build's own, whatever else a file may declare. */
static int visit_sets(struct build *build, struct compile_queue *queue, spec_visitor visit,
		      struct fmha_error *err)
{
	int profile = profile_of(build);
	struct spec_set *set = spec_set_new(build->catalog);
	int r = set ? 0 : fmha_error_set(err, FMHA_ENOMEM, "out of memory");

	for (uint32_t i = 0; i < build->asked.sets.n && r == 0; i++)
		r = spec_set_add_file(set, build->asked.sets.at[i], build->asked.arch, "gpu", err);
	for (size_t i = 0; r == 0 && i < spec_set_size(set); i++)
		if (is_kept(build, profile, spec_set_at(set, i)))
			r = visit(build, queue, spec_set_at(set, i), err);
	(void)spec_set_free(set);
	return r < 0 ? r : 0;
}

static int read_filters(struct build *build, struct fmha_error *err)
{
	char diagram[SPEC_EXPLAIN_BYTES] = "";
	int r = 0;

	if (build->asked.filter) {
		r = spec_filter_compile(build->catalog, build->asked.filter,
					&build->filters[build->n_filters], diagram, err);
		build->n_filters += r == 0;
	}
	for (uint32_t i = 0; i < build->asked.filter_files.n && r == 0; i++) {
		r = spec_filter_read(build->catalog, build->asked.filter_files.at[i],
				     &build->filters[build->n_filters], diagram, err);
		build->n_filters += r == 0;
		if (r < 0 && diagram[0])
			(void)fprintf(stderr, "%s: ", build->asked.filter_files.at[i]);
	}
	if (r < 0 && diagram[0])
		(void)fprintf(stderr, "%s\n", diagram);
	return r;
}

static int build_walk(struct build *build, struct compile_queue *queue, spec_visitor visit,
		      struct fmha_error *err)
{
	return build->asked.sets.n > 0 ? visit_sets(build, queue, visit, err)
				       : visit_space(build, queue, visit, err);
}

static int visit_all(struct build *build, struct compile_queue *queue,
		     const struct kernel_spec *spec, struct fmha_error *err)
{
	struct gpu_kernel kernel;
	int r = 0;

	for (int variant = 0; variant < VARIANTS && r == 0; variant++)
		if (make_kernel(build, spec, variant, &kernel))
			r = add_kernel(build, queue, &kernel, err);
	return r;
}

/* ---- kernels by name ---- */

/* What costs little to compare, of names as --list prints them; making the name of every spec would
 * take seconds. */
static bool may_be(const struct kernel_spec *spec, const char *name)
{
	const struct kernel_tile *t = &spec->tile;
	char tile[64];

	(void)snprintf(tile, sizeof(tile), "_h%ux%u_t%ux%u_", t->tile_k0max, t->tile_n1, t->tile_m0,
		       t->tile_n0);
	return strstr(name, tile);
}

static int visit_wanted(struct build *build, struct compile_queue *queue,
			const struct kernel_spec *spec, struct fmha_error *err)
{
	int n_missing = 0;

	(void)queue, (void)err;
	for (uint32_t i = 0; i < build->asked.kernels.n; i++) {
		struct wanted *wanted = &build->wanted[i];

		for (int v = 0; v < VARIANTS && !wanted->found && may_be(spec, wanted->name); v++)
			wanted->found = make_kernel(build, spec, v, &wanted->kernel) &&
					strcmp(wanted->kernel.build.name, wanted->name) == 0;
		n_missing += !wanted->found;
	}
	return n_missing == 0;
}

/* A name of `fmhactl plan` says all by itself. */
static void find_planned(struct build *build, struct wanted *wanted)
{
	const char *arch;

	gpu_kernel_make_prepare(build->asked.arch, &wanted->kernel);
	wanted->found = strcmp(wanted->name, wanted->kernel.build.name) == 0;
	if (wanted->found)
		return;
	if (spec_name_parse(build->catalog, wanted->name, &wanted->spec, NULL) != 0)
		return;
	arch = spec_word(build->catalog, SPEC_FIELD_gfx_arch, wanted->spec.gfx_arch);
	wanted->found = arch && strcmp(arch, build->asked.arch) == 0 &&
			make_kernel(build, &wanted->spec, 0, &wanted->kernel);
	wanted->is_spec = wanted->found;
}

static int find_wanted(struct build *build, struct fmha_error *err)
{
	int n_missing = 0, r = 0;

	for (uint32_t i = 0; i < build->asked.kernels.n; i++) {
		find_planned(build, &build->wanted[i]);
		n_missing += !build->wanted[i].found;
	}
	if (n_missing > 0)
		r = build_walk(build, NULL, visit_wanted, err);
	for (uint32_t i = 0; i < build->asked.kernels.n && r == 0; i++)
		if (!build->wanted[i].found)
			r = fmha_error_set(err, FMHA_EINVAL,
					   "--kernel %.120s: %s has no such kernel%s; --list names "
					   "them",
					   build->wanted[i].name, build->asked.arch,
					   build->n_filters > 0 || build->asked.profile ||
							   build->asked.sets.n > 0
						   ? " in this selection"
						   : "");
	return r;
}

static int add_kernels(struct build *build, struct compile_queue *queue, struct fmha_error *err)
{
	struct gpu_kernel tables;
	int r = 0;

	/* No spec has it, and any plan that a client launches itself may need it. */
	gpu_kernel_make_prepare(build->asked.arch, &tables);
	if (build->asked.kernels.n == 0)
		r = add_kernel(build, queue, &tables, err);
	if (build->asked.kernels.n == 0 && r == 0)
		return build_walk(build, queue, visit_all, err);
	for (uint32_t i = 0; i < build->asked.kernels.n && r == 0; i++)
		r = build->wanted[i].is_spec
			    ? visit_all(build, queue, &build->wanted[i].spec, err)
			    : add_kernel(build, queue, &build->wanted[i].kernel, err);
	return r;
}

/* ---- compiling ---- */

/* Once, and not of every kernel, that there is no compiler. */
static int check_compiler(const struct build *build, struct fmha_error *err)
{
	static const struct {
		const char *compiler, *origin;
	} origins[] = {
		{"nvrtc",
		 "libnvrtc.so.12 or .13 comes with the CUDA toolkit, or with pip's "
		 "nvidia-cuda-nvrtc, whose folder ldconfig or --library-path then has to name"},
		{"hiprtc", "libhiprtc comes with ROCm, or with Debian's libamdhip64-5"},
		{"clang", "Debian's clang-19 and lld-19, or ROCm's amdclang++; --clang names it"},
	};
	const char *compiler = build->asked.compiler ? build->asked.compiler
						     : compile_default(build->asked.arch);
	char version[96];
	int r;

	if (!compiler)
		return 0; /* the arch is not known, either, and that is said */
	r = compile_version(&build->config, compiler, version, err);
	for (size_t i = 0; r == FMHA_ENOTSUP && i < sizeof(origins) / sizeof(origins[0]); i++)
		if (strcmp(origins[i].compiler, compiler) == 0)
			return fmha_error_set(err, r, "%s is not installed: %s", compiler,
					      origins[i].origin);
	return r < 0 ? r : compile_check_fit(version, build->asked.arch, err);
}

static int compile_all(struct build *build, struct cache *cache, struct fmha_error *err)
{
	struct compile_queue_status status;
	struct compile_queue *queue = NULL;
	struct timespec start, end;
	double seconds;
	int r = compile_queue_new(&build->config, cache, (int)build->asked.jobs, false, &queue,
				  err);

	if (r < 0)
		return r;
	(void)clock_gettime(CLOCK_MONOTONIC, &start);
	r = add_kernels(build, queue, err);
	if (r == 0)
		compile_queue_drain(queue);
	(void)clock_gettime(CLOCK_MONOTONIC, &end);
	seconds = (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) / 1e9;
	compile_queue_status(queue, &status);
	(void)compile_queue_free(queue);
	if (r < 0)
		return r;
	if (build->is_terminal)
		(void)fputs("\r\033[K", stderr);
	(void)printf("%s: %zu kernels: %llu built, %llu in the cache already, %u failed, "
		     "%u spill registers; %.1f s, %.2f built a second with %d at a time\n",
		     build->asked.arch, build->n_seen, (unsigned long long)status.built,
		     (unsigned long long)status.hits, atomic_load(&build->n_failed),
		     atomic_load(&build->n_spilling), seconds,
		     (double)status.built / (seconds > 0 ? seconds : 1), (int)build->asked.jobs);
	return 0;
}

/* A service goes on when its cache takes nothing more; what fills one has failed. */
static int check_stored(struct cache *cache, struct fmha_error *err)
{
	struct cache_status status;

	cache_get_status(cache, &status);
	if (status.unstored == 0)
		return 0;
	return fmha_error_set(err, FMHA_EIO, "%llu kernels could not be stored: %s",
			      (unsigned long long)status.unstored,
			      status.usable ? "larger than is kept" : status.reason);
}

static int check_arch(const struct build *build, struct fmha_error *err)
{
	size_t plain = strcspn(build->asked.arch, ":");
	char name[32];

	(void)snprintf(name, sizeof(name), "%.*s", (int)plain, build->asked.arch);
	if (gpu_arch_find(build->asked.arch))
		return 0;
	if (gpu_arch_find(name))
		return fmha_error_set(err, FMHA_EINVAL,
				      "arch %s: code for %s serves it whatever its features are",
				      build->asked.arch, name);
	return fmha_error_set(err, FMHA_EINVAL,
			      "arch %s: there is none; `fmhactl archs` lists them",
			      build->asked.arch);
}

static int check_profile(const struct build *build, struct fmha_error *err)
{
	if (!build->asked.profile || spec_profile_parse(build->catalog, build->asked.profile) >= 0)
		return 0;
	return fmha_error_set(err, FMHA_EINVAL,
			      "profile %s: there is none; `fmhactl profiles` lists them",
			      build->asked.profile);
}

static int compile_into(struct build *build, struct cache *cache, struct fmha_error *err)
{
	int r = cache_check(cache, err);

	if (r < 0)
		return r;
	r = compile_all(build, cache, err);
	return r < 0 ? r : check_stored(cache, err);
}

static int pack(const struct build *build, struct cache *cache, struct fmha_error *err)
{
	int64_t packed = cache_pack(cache, build->asked.pack, err);

	if (packed < 0)
		return (int)packed;
	(void)printf("%s: %lld kernels\n", build->asked.pack, (long long)packed);
	return 0;
}

static int compile_and_pack(struct build *build, struct fmha_error *err)
{
	const struct cache_config config = {.writable = build->asked.cache};
	struct cache *cache = NULL;
	int r = check_compiler(build, err);

	if (r < 0)
		return r;
	r = cache_new(&config, &cache, err);
	if (r < 0)
		return r;
	r = compile_into(build, cache, err);
	if (r == 0 && build->asked.pack)
		r = pack(build, cache, err);
	(void)cache_free(cache);
	return r;
}

static int list_or_compile(struct build *build, struct fmha_error *err)
{
	int r = spec_catalog_load(NULL, fmha_backends, &build->catalog, err);

	if (r < 0)
		return r;
	r = check_arch(build, err);
	if (r < 0)
		return r;
	r = check_profile(build, err);
	if (r < 0)
		return r;
	r = read_filters(build, err);
	if (r < 0)
		return r;
	if (build->asked.kernels.n > 0)
		r = find_wanted(build, err);
	if (r < 0)
		return r;
	return build->asked.list ? add_kernels(build, NULL, err) : compile_and_pack(build, err);
}

static int run(struct build *build, struct fmha_error *err)
{
	int r = list_or_compile(build, err);

	for (int i = 0; i < build->n_filters; i++)
		(void)spec_filter_free(build->filters[i]);
	build->catalog = spec_catalog_free(build->catalog);
	return r;
}

static int exit_status(int code)
{
	switch (code) {
	case FMHA_EINVAL:
		return EXIT_USAGE;
	case FMHA_ENOTSUP: /* no compiler */
		return EXIT_FAILED;
	default:
		return EXIT_FILES;
	}
}

int main(int argc, char **argv)
{
	struct build build = {.is_terminal = isatty(STDERR_FILENO)};
	struct fmha_error err = {0};
	int r;

	compile_paths_default(&build.paths);
	build.asked = (struct build_request){.jobs = sysconf(_SC_NPROCESSORS_ONLN),
					     .cache = build.paths.cache,
					     .helper = build.paths.helper,
					     .sources = build.paths.sources};
	r = build_parse(&build, argc, argv);
	if (r != 0)
		return r;
	build.seen = calloc(SLOTS, sizeof(*build.seen));
	if (!build.seen)
		return EXIT_FAILED;
	r = run(&build, &err);
	free(build.seen);
	if (r < 0) {
		(void)fprintf(stderr, "fmhactl build: %s\n", err.msg);
		return exit_status(r);
	}
	if (atomic_load(&build.n_failed) > 0)
		return EXIT_FAILED;
	return build.asked.spills_fail && atomic_load(&build.n_spilling) > 0 ? EXIT_FAILED : 0;
}
