/* SPDX-License-Identifier: MIT */
/*
 * Compiling through the helper process, with each compiler that this machine has: a kernel that
 * builds, one that does not, a compiler that aborts, one that never ends. A compiler that is not
 * installed skips its tests, saying so.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <compile/build_identity.h>
#include <compile/compile.h>

static const char good_source[] =
	"extern \"C\" __attribute__((global)) void scale(float *x, float by)\n"
	"{\n"
	"	x[0] *= by * FACTOR;\n"
	"}\n";
static const char bad_source[] =
	"extern \"C\" __attribute__((global)) void scale(float *x) { x[0] = undeclared_name; }\n";

/* More values than registers. */
static const char spilling_source[] =
	"#ifdef __CUDACC_RTC__\n"
	"#define FEW __launch_bounds__(1024, 2)\n"
	"#define LANE threadIdx.x\n"
	"#else\n"
	"#define FEW __attribute__((amdgpu_num_vgpr(32)))\n"
	"#define LANE __builtin_amdgcn_workitem_id_x()\n"
	"#endif\n"
	"extern \"C\" __attribute__((global)) void FEW mix(float *x)\n"
	"{\n"
	"	float v[80];\n"
	"	x += 80 * LANE;\n"
	"#pragma unroll\n"
	"	for (int i = 0; i < 80; i++)\n"
	"		v[i] = x[i];\n"
	"#pragma unroll 1\n"
	"	for (int n = 0; n < 99; n++)\n"
	"#pragma unroll\n"
	"		for (int i = 0; i < 80; i++)\n"
	"			v[i] = v[i] * v[(i + 7) % 80] + x[n];\n"
	"#pragma unroll\n"
	"	for (int i = 0; i < 80; i++)\n"
	"		x[i] = v[i];\n"
	"}\n";

struct fixture {
	char root[64], sources[96], cache_dir[96];
	struct compile_config config;
	struct cache *cache;
};

static void write_source(const struct fixture *f, const char *name, const char *text)
{
	char path[256];
	FILE *file;

	(void)snprintf(path, sizeof(path), "%s/%s", f->sources, name);
	file = fopen(path, "w");
	assert_non_null(file);
	(void)fputs(text, file);
	(void)fclose(file);
}

static void write_folder(const struct fixture *f, const char *name)
{
	char path[256];

	(void)snprintf(path, sizeof(path), "%s/%s", f->sources, name);
	assert_int_equal(mkdir(path, 0700), 0);
}

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));

	strcpy(f->root, "/tmp/fmhad-compile-test-XXXXXX");
	if (!mkdtemp(f->root))
		return -1;
	(void)snprintf(f->sources, sizeof(f->sources), "%s/gpu", f->root);
	(void)snprintf(f->cache_dir, sizeof(f->cache_dir), "%s/cache", f->root);
	if (mkdir(f->sources, 0700) < 0 ||
	    cache_new(&(struct cache_config){.writable = f->cache_dir}, &f->cache, NULL) != 0)
		return -1;
	f->config = (struct compile_config){.helper = COMPILE_HELPER, .source_dir = f->sources};
	write_source(f, "good.hip", good_source);
	write_source(f, "bad.hip", bad_source);
	write_source(f, "spilling.hip", spilling_source);
	*state = f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;
	char command[128];

	(void)cache_free(f->cache);
	(void)snprintf(command, sizeof(command), "rm -rf '%s'", f->root);
	if (system(command) != 0)
		return -1;
	free(f);
	return 0;
}

/* Skips the calling test when @compiler is not there. */
static void need(const struct fixture *f, const char *compiler)
{
	struct fmha_error err = {0};
	char version[96];
	int r = compile_version(&f->config, compiler, version, &err);

	if (r == FMHA_ENOTSUP) {
		print_message("%s is not installed here: skipped (%s)\n", compiler, err.msg);
		skip();
	}
	assert_int_equal(r, 0);
	assert_int_equal(strncmp(version, compiler, strlen(compiler)), 0);
}

static struct compile_request request_for(const char *compiler, const char *arch,
					  const char *source)
{
	struct compile_request request = {
		.build = {.name = "scale_test", .n_options = 1, .options = {"-DFACTOR=2.0f"}},
		.compiler = compiler};

	(void)snprintf(request.build.arch, BUILD_WORD_BYTES, "%s", arch);
	(void)snprintf(request.build.source, BUILD_WORD_BYTES, "%s", source);
	return request;
}

/* All of what the queue does in steps. */
static int compile_cached(struct fixture *f, const struct compile_request *request,
			  struct cache_entry **ret_entry, bool *ret_hit, struct fmha_error *err)
{
	struct compile_target target;
	int r = compile_identify(&f->config, request, &target, err);

	*ret_hit = r == 0 && cache_load(f->cache, &target.key, ret_entry) == 0;
	if (r < 0 || *ret_hit)
		return r;
	return compile_build(&f->config, f->cache, request, &target, COMPILE_PATIENT, ret_entry,
			     ret_hit, err);
}

static void builds_once(struct fixture *f, const char *compiler, const char *arch)
{
	struct compile_request request = request_for(compiler, arch, "good.hip");
	struct cache_entry *first = NULL, *second = NULL;
	struct fmha_error err = {0};
	bool hit;

	need(f, compiler);
	if (compile_cached(f, &request, &first, &hit, &err) != 0)
		fail_msg("%s for %s: %s", compiler, arch, err.msg);
	assert_memory_equal(first->code, "\177ELF", 4);
	if (strcmp(compiler, "clang") == 0) /* version 5, as ELF files tell it */
		assert_int_equal(((const unsigned char *)first->code)[EI_ABIVERSION], 3);
	assert_string_equal(first->info.arch, arch);
	assert_true(first->info.registers > 0 && first->info.registers < 64);
	assert_int_equal(first->info.spills, 0);
	assert_false(hit);
	assert_int_equal(compile_cached(f, &request, &second, &hit, &err), 0);
	assert_true(hit);
	assert_memory_equal(&first->info, &second->info, sizeof(first->info));
	assert_int_equal(first->code_bytes, second->code_bytes);
	(void)cache_entry_free(first);
	(void)cache_entry_free(second);
}

/* Bytes of registers, whatever the compiler counts, and the cache has them. */
static void says_what_spills(struct fixture *f, const char *compiler, const char *arch)
{
	struct compile_request request = request_for(compiler, arch, "spilling.hip");
	struct cache_entry *first = NULL, *second = NULL;
	struct fmha_error err = {0};
	bool hit;

	need(f, compiler);
	if (compile_cached(f, &request, &first, &hit, &err) != 0)
		fail_msg("%s for %s: %s", compiler, arch, err.msg);
	assert_true(first->info.spills >= 4 * 40 && first->info.spills % 4 == 0);
	assert_true(first->info.spills < 4096);
	assert_true(first->info.scratch_bytes > 0);
	assert_int_equal(compile_cached(f, &request, &second, &hit, &err), 0);
	assert_true(hit);
	assert_int_equal(second->info.spills, first->info.spills);
	(void)cache_entry_free(first);
	(void)cache_entry_free(second);
}

static void names_the_kernel_and_the_error(struct fixture *f, const char *compiler,
					   const char *arch)
{
	struct compile_request request = request_for(compiler, arch, "bad.hip");
	struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	char version[96];

	need(f, compiler);
	assert_int_equal(compile_version(&f->config, compiler, version, &err), 0);
	assert_int_equal(compile_run(&f->config, &request, version, &entry, &err), FMHA_EINVAL);
	assert_non_null(strstr(err.msg, "scale_test"));
	assert_non_null(strstr(err.msg, "undeclared_name"));
	assert_non_null(strstr(entry->log, "undeclared_name"));
	(void)cache_entry_free(entry);
}

static void nvrtc_builds(void **state)
{
	builds_once(*state, "nvrtc", "sm_80");
	builds_once(*state, "nvrtc", "sm_90a");
}

static void nvrtc_says_what_spills(void **state)
{
	says_what_spills(*state, "nvrtc", "sm_90a");
}

static void clang_says_what_spills(void **state)
{
	says_what_spills(*state, "clang", "gfx1100");
}

static void nvrtc_reports_errors(void **state)
{
	names_the_kernel_and_the_error(*state, "nvrtc", "sm_90a");
}

static void clang_builds(void **state)
{
	builds_once(*state, "clang", "gfx90a");
	builds_once(*state, "clang", "gfx942");
	builds_once(*state, "clang", "gfx1100");
}

static void clang_reports_errors(void **state)
{
	names_the_kernel_and_the_error(*state, "clang", "gfx942");
}

static void hiprtc_builds(void **state)
{
	builds_once(*state, "hiprtc", "gfx90a");
}

/* Debian's hipRTC 5.2 aborts on an arch it does not know; newer ones refuse it. */
static void survives_a_compiler_that_aborts(void **state)
{
	struct fixture *f = *state;
	struct compile_request request = request_for("hiprtc", "gfx9999", "good.hip");
	struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	bool hit;
	int r;

	need(f, "hiprtc");
	r = compile_cached(f, &request, &entry, &hit, &err);
	assert_true(r == FMHA_EIO || r == FMHA_EINVAL);
	assert_non_null(strstr(err.msg, "scale_test"));
	(void)cache_entry_free(entry); /* the log of one that refused */
}

static void write_script(struct fixture *f, const char *name, char *path, size_t size,
			 const char *body)
{
	FILE *file;

	(void)snprintf(path, size, "%s/%s", f->root, name);
	file = fopen(path, "w");
	assert_non_null(file);
	(void)fprintf(file, "#!/bin/sh\n[ \"$1\" = --version ] && echo version 1 && exit 0\n%s\n",
		      body);
	(void)fclose(file);
	assert_int_equal(chmod(path, 0700), 0);
}

/* A "compiler" that is a shell script. @body also gets the question whether an option is known,
 * which has /dev/null for a source. */
static void fake_clang(struct fixture *f, char *path, size_t size, const char *body)
{
	write_script(f, "clang", path, size, body);
	f->config.clang = path;
}

static void ends_a_compiler_at_its_deadline(void **state)
{
	struct fixture *f = *state;
	struct compile_request request = request_for("clang", "gfx942", "good.hip");
	struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	bool hit;
	char path[128];

	fake_clang(f, path, sizeof(path), "sleep 1000");
	f->config.deadline_ms = 300;
	assert_int_equal(compile_cached(f, &request, &entry, &hit, &err), FMHA_ETIMEDOUT);
	assert_null(entry);
}

static void refuses_a_compiler_that_leaves_nothing(void **state)
{
	struct fixture *f = *state;
	struct compile_request request = request_for("clang", "gfx942", "good.hip");
	struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	bool hit;
	char path[128];

	fake_clang(f, path, sizeof(path), "exit 0");
	assert_true(compile_cached(f, &request, &entry, &hit, &err) < 0);
	assert_non_null(strstr(err.msg, "scale_test"));
	entry = cache_entry_free(entry);
	/* Nothing of it was stored. */
	fake_clang(f, path, sizeof(path), "exit 1");
	assert_true(compile_cached(f, &request, &entry, &hit, &err) < 0);
	(void)cache_entry_free(entry);
}

/* A clang that compiles and assembles, and whose own linker knows no AMD GPUs. */
static void links_with_the_linker_that_is_named(void **state)
{
	struct fixture *f = *state;
	struct compile_request request = request_for("clang", "gfx942", "good.hip");
	struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	bool hit;
	char clang[128], linker[128];

	fake_clang(f, clang, sizeof(clang),
		   "case \"$*\" in *' -S '*) echo text;; *' -c '*) cat; echo object;; *) exit 1;; "
		   "esac");
	assert_int_equal(compile_cached(f, &request, &entry, &hit, &err), FMHA_EINVAL);
	entry = cache_entry_free(entry);
	f->config.linker = "/nonexistent/ld.lld";
	assert_true(compile_cached(f, &request, &entry, &hit, &err) < 0);
	assert_non_null(strstr(entry->log, "linker /nonexistent/ld.lld: not found"));
	entry = cache_entry_free(entry);
	write_script(f, "ld.lld", linker, sizeof(linker), "cat \"$5\"; echo \"$1 $2\"");
	f->config.linker = linker;
	assert_int_equal(compile_cached(f, &request, &entry, &hit, &err), 0);
	assert_int_equal(entry->code_bytes, strlen("text\nobject\n--no-undefined -shared\n"));
	assert_memory_equal(entry->code, "text\nobject\n--no-undefined -shared\n",
			    entry->code_bytes);
	(void)cache_entry_free(entry);
}

static void survives_a_compiler_that_floods_its_log(void **state)
{
	struct fixture *f = *state;
	struct compile_request request = request_for("clang", "gfx942", "good.hip");
	struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	bool hit;
	char path[128];

	fake_clang(f, path, sizeof(path), "head -c 20000000 /dev/zero | tr '\\0' e >&2; exit 1");
	assert_int_equal(compile_cached(f, &request, &entry, &hit, &err), FMHA_EINVAL);
	assert_true(strlen(entry->log) <= 1 << 20);
	(void)cache_entry_free(entry);
}

/* Whether the words of a build by a clang that takes them or not hold the options. */
static bool builds_with_options(struct fixture *f, const char *answer, const char *wanted)
{
	struct compile_request request = request_for("clang", "gfx942", "good.hip");
	struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	char path[128], body[256];
	bool hit, found;

	(void)snprintf(body, sizeof(body),
		       "case \"$*\" in *' /dev/null') %s;; esac\necho \"$*\" >&2; exit 1", answer);
	fake_clang(f, path, sizeof(path), body);
	assert_int_equal(compile_cached(f, &request, &entry, &hit, &err), FMHA_EINVAL);
	assert_non_null(strstr(entry->log, "-DFACTOR=2.0f"));
	found = strstr(entry->log, wanted);
	(void)cache_entry_free(entry);
	return found;
}

/* clang 19's post-RA sinking made a wrong kernel: it is switched off wherever it can be. */
static void switches_sinking_off_where_it_can(void **state)
{
	static const char option[] = "-mllvm -disable-postra-machine-sink";

	assert_true(builds_with_options(*state, "exit 0", option));
	assert_false(builds_with_options(*state, "exit 1", option));
}

/* clang 22 would write version 6, which runtimes before ROCm 6.3 do not load. */
static void asks_for_a_code_object_that_runtimes_load(void **state)
{
	static const char option[] = "-mcode-object-version=5";

	assert_true(builds_with_options(*state, "exit 0", option));
	assert_true(builds_with_options(
		*state, "case \"$*\" in *postra*) exit 1;; *) exit 0;; esac", option));
	assert_false(builds_with_options(*state, "exit 1", option));
}

/* Before clang 20 code for GFX12 lacks waits: refused, with what to install, before anything is
 * looked up or compiled. */
static void refuses_clang_19_for_gfx12(void **state)
{
	static const struct {
		const char *version, *arch;
		bool fits;
	} cases[] = {
		{"clang 19.1.7 -mcode-object-version=5", "gfx1201", false},
		{"clang 19.0.0git", "gfx1200", false},
		{"clang unknown", "gfx1201", false},
		{"clang 20.1.0", "gfx1201", true},
		{"clang 22.1.8 -mcode-object-version=5", "gfx1200", true},
		{"hiprtc 9.0", "gfx1201", false},
		{"clang 19.1.7", "gfx1100", true},
		{"clang 19.1.7", "gfx942", true},
		{"hiprtc 9.0", "gfx90a", true},
		{"nvrtc 13.0", "sm_90a", true},
	};
	struct fixture *f = *state;
	struct compile_request request = request_for("clang", "gfx1201", "good.hip");
	struct compile_target target;
	struct fmha_error err = {0};
	char path[128];

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		if (compile_check_fit(cases[i].version, cases[i].arch, NULL) !=
		    (cases[i].fits ? 0 : FMHA_ENOTSUP))
			fail_msg("%s for %s", cases[i].version, cases[i].arch);
	fake_clang(f, path, sizeof(path), "exit 0"); /* says that it is version 1 */
	assert_int_equal(compile_identify(&f->config, &request, &target, &err), FMHA_ENOTSUP);
	assert_string_equal(err.field, "arch");
	assert_non_null(strstr(err.msg, "clang 1 "));
	assert_non_null(strstr(err.msg, "clang 20 or newer"));
	assert_non_null(strstr(err.msg, "ziglang"));
	assert_non_null(strstr(err.msg, "README)")); /* to its end */
	(void)strcpy(request.build.arch, "gfx1100");
	assert_int_equal(compile_identify(&f->config, &request, &target, &err), 0);
}

static void knows_what_clang_takes(void **state)
{
	struct fixture *f = *state;
	char version[96];

	need(f, "clang");
	assert_int_equal(compile_version(&f->config, "clang", version, NULL), 0);
	assert_non_null(strstr(version, " -mcode-object-version=5"));
	assert_non_null(strstr(version, " -mllvm -disable-postra-machine-sink"));
}

static void key_follows_every_input(void **state)
{
	struct fixture *f = *state;
	struct compile_request request = request_for("clang", "gfx942", "good.hip"), changed;
	struct cache_key base, key;

	assert_int_equal(compile_key(&f->config, &request, "clang 19", &base, NULL), 0);
	assert_int_equal(compile_key(&f->config, &request, "clang 19", &key, NULL), 0);
	assert_memory_equal(&base, &key, sizeof(key));
	assert_int_equal(compile_key(&f->config, &request, "clang 20", &key, NULL), 0);
	assert_memory_not_equal(&base, &key, sizeof(key));
	changed = request;
	(void)strcpy(changed.build.arch, "gfx90a");
	assert_int_equal(compile_key(&f->config, &changed, "clang 19", &key, NULL), 0);
	assert_memory_not_equal(&base, &key, sizeof(key));
	changed = request;
	(void)strcpy(changed.build.options[0], "-DFACTOR=3.0f");
	assert_int_equal(compile_key(&f->config, &changed, "clang 19", &key, NULL), 0);
	assert_memory_not_equal(&base, &key, sizeof(key));
	write_source(f, "header.h", "/* included by somebody */\n");
	assert_int_equal(compile_key(&f->config, &request, "clang 19", &key, NULL), 0);
	assert_memory_not_equal(&base, &key, sizeof(key));
	base = key;
	write_folder(f, "host");
	write_source(f, "host/table.h", "/* no device code */\n");
	assert_int_equal(compile_key(&f->config, &request, "clang 19", &key, NULL), 0);
	assert_memory_equal(&base, &key, sizeof(key));
	write_folder(f, "loops");
	write_source(f, "loops/loop.h", "int one;\n");
	assert_int_equal(compile_key(&f->config, &request, "clang 19", &key, NULL), 0);
	assert_memory_not_equal(&base, &key, sizeof(key));
	base = key;
	write_source(f, "loops/loop.h", "int two;\n");
	assert_int_equal(compile_key(&f->config, &request, "clang 19", &key, NULL), 0);
	assert_memory_not_equal(&base, &key, sizeof(key));
}

static int same_identity(const struct kernel_build *one, const struct kernel_build *other)
{
	const struct build_identity a = build_identity(one), b = build_identity(other);

	return memcmp(&a, &b, sizeof(a)) == 0;
}

/* Of what makes the code, and of nothing else. */
static void an_identity_is_of_arch_source_and_options(void **state)
{
	const struct kernel_build build = {.name = "one",
					   .arch = "gfx942",
					   .source = "fmha.hip",
					   .n_options = 2,
					   .options = {"-DA=1", "-DB=2"}};
	struct kernel_build other = build;

	(void)state;
	(void)strcpy(other.name, "another");
	(void)strcpy(other.options[2], "-DNOT=told");
	assert_true(same_identity(&build, &other));
	(void)strcpy(other.arch, "gfx90a");
	assert_false(same_identity(&build, &other));
	other = build;
	(void)strcpy(other.source, "prepare.hip");
	assert_false(same_identity(&build, &other));
	other = build;
	other.n_options = 1;
	assert_false(same_identity(&build, &other));
	(void)strcpy(other.options[0], "-DB=2");
	(void)strcpy(other.options[1], "-DA=1");
	other.n_options = 2;
	assert_false(same_identity(&build, &other)); /* a later macro wins */
	(void)strcpy(other.options[0], "-DA=1-DB=2");
	(void)strcpy(other.options[1], "");
	assert_false(same_identity(&build, &other));
}

static void missing_helper_is_an_error(void **state)
{
	struct fixture *f = *state;
	struct compile_request request = request_for("clang", "gfx942", "good.hip");
	struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	bool hit;

	f->config.helper = "/nonexistent/fmhad-compile";
	assert_int_equal(compile_cached(f, &request, &entry, &hit, &err), FMHA_EIO);
	assert_non_null(strstr(err.msg, "/nonexistent/fmhad-compile"));
}

int main(void)
{
#define COMPILE_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		COMPILE_TEST(nvrtc_builds),
		COMPILE_TEST(nvrtc_says_what_spills),
		COMPILE_TEST(nvrtc_reports_errors),
		COMPILE_TEST(clang_builds),
		COMPILE_TEST(clang_says_what_spills),
		COMPILE_TEST(clang_reports_errors),
		COMPILE_TEST(hiprtc_builds),
		COMPILE_TEST(survives_a_compiler_that_aborts),
		COMPILE_TEST(ends_a_compiler_at_its_deadline),
		COMPILE_TEST(refuses_a_compiler_that_leaves_nothing),
		COMPILE_TEST(links_with_the_linker_that_is_named),
		COMPILE_TEST(survives_a_compiler_that_floods_its_log),
		COMPILE_TEST(switches_sinking_off_where_it_can),
		COMPILE_TEST(asks_for_a_code_object_that_runtimes_load),
		COMPILE_TEST(refuses_clang_19_for_gfx12),
		COMPILE_TEST(knows_what_clang_takes),
		COMPILE_TEST(key_follows_every_input),
		cmocka_unit_test(an_identity_is_of_arch_source_and_options),
		COMPILE_TEST(missing_helper_is_an_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
