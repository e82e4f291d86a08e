/* SPDX-License-Identifier: MIT */
/*
 * fmhad-compile: one build, in a process that may crash or hang freely.
 *
 *   fmhad-compile COMPILER ARCH SOURCE_DIR SOURCE OUTPUT MEMORY,SECONDS CLANG LINKER [OPTION...]
 *   fmhad-compile --version COMPILER CLANG [ARCH]
 *
 * The version is name, number, and the options that each build by that compiler is to get; with an
 * arch it is told only where the compiler will do for that, and why it will not otherwise.
 * The log goes to stderr, "key value" lines about the kernel's resources to stdout, the code object
 * to OUTPUT, which exists: fmhad gives a file without a name. Exit status: 0, 1 (the compiler
 * refused the source), 3 (no such compiler), 4 (memory, files or processes lacked here, which says
 * nothing about the source). CLANG is a command, or empty for the first one found;
 * LINKER an ld.lld, or empty for the one that clang itself starts.
 *
 * Whoever is killed, nothing stays behind: what passes between a compiler's steps is in memory, and
 * when fmhad dies, this process and every compiler that it has started die with it.
 *
 * NVRTC and hipRTC have the same C interface under two prefixes; both are opened at run time, so
 * that this program starts on a machine that has neither.
 */
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <msgpack.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fit.h"

#define EXIT_REFUSED     1
#define EXIT_NO_COMPILER 3
#define EXIT_LACKED      4 /* HELPER_LACKED of compile.c */
#define MAX_SOURCE_BYTES (4u << 20)
#define MAX_CODE_BYTES   (64u << 20)
#define MAX_ARGUMENTS    300

struct build {
	const char *compiler, *arch, *source_dir, *source, *output, *clang, *linker;
	char **options;
	int n_options;
};

/* What both run-time compilers offer. */
struct rtc {
	int (*version)(int *, int *);
	int (*create)(void **, const char *, const char *, int, const char **, const char **);
	int (*compile)(void *, int, const char **);
	int (*log_size)(void *, size_t *);
	int (*log)(void *, char *);
	int (*code_size)(void *, size_t *);
	int (*code)(void *, char *);
	const char *(*error)(int);
};

static const char *const nvrtc_libraries[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so",
					      "/usr/local/cuda/lib64/libnvrtc.so", NULL};
static const char *const hiprtc_libraries[] = {"libhiprtc.so.7",   "libhiprtc.so.6",
					       "libamdhip64.so.7", "libamdhip64.so.6",
					       "libamdhip64.so.5", NULL};
static const char *const clangs[] = {"amdclang++", "/opt/rocm/llvm/bin/clang++",
				     "clang-22",   "clang-21",
				     "clang-20",   "clang-19",
				     "clang",      NULL};

/*
 * Given to every build by a compiler that knows it. clang 19's sinking of copies after register
 * allocation moves one past a later write of its source: seen in f32 backward of gfx942, which
 * then gave dQ = 0. hipRTC takes the option, though whether it reaches code generation is up to
 * its version.
 */
#define CAREFUL "-disable-postra-machine-sink"

/*
 * The same for what a code object's head says. Newer clangs (22) write version 6 when they are not told,
 * which runtimes before ROCm 6.3 refuse; what 6 adds, generic targets, is not used here.
 */
#define CODE_OBJECT "-mcode-object-version=5"

static bool rtc_open(const char *compiler, struct rtc *rtc)
{
	bool nvrtc = strcmp(compiler, "nvrtc") == 0;
	const char *const *library = nvrtc ? nvrtc_libraries : hiprtc_libraries;
	const struct {
		void **function;
		const char *name;
	} symbols[] = {
		{(void **)&rtc->version, "Version"},
		{(void **)&rtc->create, "CreateProgram"},
		{(void **)&rtc->compile, "CompileProgram"},
		{(void **)&rtc->log_size, "GetProgramLogSize"},
		{(void **)&rtc->log, "GetProgramLog"},
		{(void **)&rtc->code_size, nvrtc ? "GetCUBINSize" : "GetCodeSize"},
		{(void **)&rtc->code, nvrtc ? "GetCUBIN" : "GetCode"},
		{(void **)&rtc->error, "GetErrorString"},
	};
	void *handle = NULL;
	char name[64];

	for (; *library && !handle; library++)
		handle = dlopen(*library, RTLD_NOW | RTLD_LOCAL);
	if (!handle) {
		(void)fprintf(stderr, "no library of this compiler: %s\n", dlerror());
		return false;
	}
	for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
		(void)snprintf(name, sizeof(name), "%s%s", compiler, symbols[i].name);
		*symbols[i].function = dlsym(handle, name);
		if (!*symbols[i].function) {
			(void)fprintf(stderr, "the library lacks %s\n", name);
			return false;
		}
	}
	return true;
}

static char *read_file(const char *path, size_t limit, size_t *ret_bytes)
{
	FILE *file = fopen(path, "re");
	char *text = NULL;
	struct stat st;

	if (file && fstat(fileno(file), &st) == 0 && (size_t)st.st_size <= limit &&
	    (text = malloc((size_t)st.st_size + 1))) {
		*ret_bytes = fread(text, 1, (size_t)st.st_size, file);
		text[*ret_bytes] = '\0';
	}
	if (text && *ret_bytes < (size_t)st.st_size) { /* half a source may compile, too */
		free(text);
		text = NULL;
	}
	if (!text)
		(void)fprintf(stderr, "error: %s: %s\n", path, strerror(errno));
	if (file)
		(void)fclose(file);
	return text;
}

static bool write_file(const char *path, const void *data, size_t bytes)
{
	FILE *file = fopen(path, "we");
	bool ok = file && fwrite(data, 1, bytes, file) == bytes;

	if (file && fclose(file) != 0)
		ok = false;
	if (!ok)
		(void)fprintf(stderr, "error: %s: %s\n", path, strerror(errno));
	return ok;
}

/* "ptxas info : Used 168 registers, ..., 1024 bytes smem" and "N bytes spill stores": the log of
 * --ptxas-options=-v is the only place where NVRTC tells. */
static void report_nvidia(const char *log)
{
	unsigned registers = 0, shared = 0, stack = 0, stores = 0;
	const char *at;

	at = strstr(log, "Used ");
	if (at)
		(void)sscanf(at, "Used %u registers", &registers);
	at = strstr(log, " bytes smem");
	if (at) {
		while (at > log && at[-1] >= '0' && at[-1] <= '9')
			at--;
		(void)sscanf(at, "%u", &shared);
	}
	at = strstr(log, " bytes stack frame");
	if (at) {
		while (at > log && at[-1] >= '0' && at[-1] <= '9')
			at--;
		(void)sscanf(at, "%u bytes stack frame, %u bytes spill stores", &stack, &stores);
	}
	(void)printf("registers %u\nspills %u\nscratch_bytes %u\nlds_bytes %u\n", registers, stores,
		     stack, shared);
	if (registers)
		(void)printf("occupancy %u\n", 65536 / (((registers + 7) & ~7u) * 32));
}

static bool is_word(const msgpack_object *key, const char *word)
{
	return key->type == MSGPACK_OBJECT_STR && key->via.str.size == strlen(word) &&
	       memcmp(key->via.str.ptr, word, key->via.str.size) == 0;
}

/*
 * Scalar registers are spilled to lanes of vector registers, and vector registers to accumulators
 * where there are some, which costs no memory: what counts is in the private segment.
 */
static void report_amd_kernel(const msgpack_object_map *kernel)
{
	static const char *const names[][2] = {
		{".vgpr_count", "registers"},
		{".sgpr_count", "scalar_registers"},
		{".agpr_count", "accumulators"},
		{".group_segment_fixed_size", "lds_bytes"},
		{".private_segment_fixed_size", "scratch_bytes"},
	};
	uint64_t spilled = 0, private_bytes = 0;

	for (uint32_t i = 0; i < kernel->size; i++) {
		const msgpack_object *key = &kernel->ptr[i].key, *value = &kernel->ptr[i].val;

		if (value->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
			continue;
		for (size_t k = 0; k < sizeof(names) / sizeof(names[0]); k++)
			if (is_word(key, names[k][0]))
				(void)printf("%s %llu\n", names[k][1],
					     (unsigned long long)value->via.u64);
		if (is_word(key, ".vgpr_spill_count"))
			spilled = 4 * value->via.u64;
		if (is_word(key, ".private_segment_fixed_size"))
			private_bytes = value->via.u64;
	}
	(void)printf("spills %llu\n",
		     (unsigned long long)(spilled < private_bytes ? spilled : private_bytes));
}

/* The metadata note of a code object: a msgpack map with a list "amdhsa.kernels". Our own compiler
 * wrote it a moment ago, so msgpack-c reads it directly. Return: false: out of memory. */
static bool report_amd_note(const char *data, size_t bytes)
{
	msgpack_unpacked unpacked;
	msgpack_unpack_return r;
	size_t offset = 0;

	msgpack_unpacked_init(&unpacked);
	r = msgpack_unpack_next(&unpacked, data, bytes, &offset);
	if (r == MSGPACK_UNPACK_SUCCESS && unpacked.data.type == MSGPACK_OBJECT_MAP)
		for (uint32_t i = 0; i < unpacked.data.via.map.size; i++) {
			const msgpack_object_kv *item = &unpacked.data.via.map.ptr[i];

			if (is_word(&item->key, "amdhsa.kernels") &&
			    item->val.type == MSGPACK_OBJECT_ARRAY &&
			    item->val.via.array.size > 0 &&
			    item->val.via.array.ptr[0].type == MSGPACK_OBJECT_MAP)
				report_amd_kernel(&item->val.via.array.ptr[0].via.map);
		}
	msgpack_unpacked_destroy(&unpacked);
	if (r == MSGPACK_UNPACK_NOMEM_ERROR)
		(void)fprintf(stderr, "error: no memory for the code's metadata\n");
	return r != MSGPACK_UNPACK_NOMEM_ERROR;
}

/* Return: false: out of memory. Without its resources a kernel would be launched wrongly. */
static bool report_amd(const char *code, size_t bytes)
{
	const Elf64_Ehdr *elf = (const Elf64_Ehdr *)(const void *)code;

	if (bytes < sizeof(*elf) || memcmp(elf->e_ident, ELFMAG, SELFMAG) != 0 ||
	    elf->e_phoff > bytes || elf->e_phnum > (bytes - elf->e_phoff) / sizeof(Elf64_Phdr))
		return true;
	const Elf64_Phdr *segments = (const Elf64_Phdr *)(const void *)(code + elf->e_phoff);
	for (int i = 0; i < elf->e_phnum; i++) {
		const Elf64_Nhdr *note = (const Elf64_Nhdr *)(const void *)(code +
									    segments[i].p_offset);

		if (segments[i].p_type != PT_NOTE || segments[i].p_offset > bytes ||
		    segments[i].p_filesz > bytes - segments[i].p_offset ||
		    segments[i].p_filesz < sizeof(*note))
			continue;
		size_t head = sizeof(*note) + ((note->n_namesz + 3) & ~3u);

		if (head + note->n_descsz <= segments[i].p_filesz &&
		    !report_amd_note((const char *)note + head, note->n_descsz))
			return false;
	}
	return true;
}

/* hipRTC 5.2 and later wrap the code object in an offload bundle: skip to the device's ELF file. */
static const char *unbundle(const char *code, size_t *bytes)
{
	static const char magic[] = "__CLANG_OFFLOAD_BUNDLE__";
	uint64_t n, entry[3];
	const char *at = code + sizeof(magic) - 1;

	if (*bytes < sizeof(magic) - 1 + sizeof(n) || memcmp(code, magic, sizeof(magic) - 1) != 0)
		return code;
	memcpy(&n, at, sizeof(n));
	at += sizeof(n);
	for (uint64_t i = 0; i < n && at + sizeof(entry) <= code + *bytes; i++) {
		memcpy(entry, at, sizeof(entry)); /* offset, size, bytes of the triple */
		at += sizeof(entry);
		if (entry[2] > *bytes || at + entry[2] > code + *bytes)
			break;
		if (entry[2] >= 3 && memcmp(at, "hip", 3) == 0 && entry[0] <= *bytes &&
		    entry[1] <= *bytes - entry[0]) {
			*bytes = entry[1];
			return code + entry[0];
		}
		at += entry[2];
	}
	return code;
}

static int rtc_build(const struct build *build)
{
	bool nvrtc = strcmp(build->compiler, "nvrtc") == 0;
	char path[4096], include[2][4100], arch[64], *text, *log, *code;
	const char *options[MAX_ARGUMENTS], *object;
	size_t bytes = 0, log_bytes = 0;
	void *program = NULL;
	struct rtc rtc;
	int n = 0, r;

	if (!rtc_open(build->compiler, &rtc))
		return EXIT_NO_COMPILER;
	(void)snprintf(path, sizeof(path), "%s/%s", build->source_dir, build->source);
	text = read_file(path, MAX_SOURCE_BYTES, &bytes);
	if (!text)
		return EXIT_LACKED;
	(void)snprintf(arch, sizeof(arch), nvrtc ? "--gpu-architecture=%s" : "--offload-arch=%s",
		       build->arch);
	(void)snprintf(include[0], sizeof(include[0]), "-I%s", build->source_dir);
	(void)snprintf(include[1], sizeof(include[1]), "-I%s/../include", build->source_dir);
	options[n++] = arch;
	options[n++] = include[0];
	options[n++] = include[1];
	options[n++] = "-std=c++17";
	if (nvrtc) {
		options[n++] = "-default-device";
		options[n++] = "--ptxas-options=-v";
	} else {
		options[n++] = "-O3";
	}
	for (int i = 0; i < build->n_options; i++)
		options[n++] = build->options[i];

	r = rtc.create(&program, text, build->source, 0, NULL, NULL);
	if (r == 0)
		r = rtc.compile(program, n, options);
	if (program && rtc.log_size(program, &log_bytes) == 0 && log_bytes > 1) {
		log = calloc(1, log_bytes + 1);
		if (!log || rtc.log(program, log) != 0) {
			(void)fprintf(stderr, "error: no log\n");
			return EXIT_LACKED;
		}
		(void)fputs(log, stderr);
		if (r == 0 && nvrtc)
			report_nvidia(log);
	}
	if (r != 0) {
		(void)fprintf(stderr, "error: %s\n", rtc.error(r));
		return EXIT_REFUSED;
	}
	if (rtc.code_size(program, &bytes) != 0 || bytes == 0 || bytes > MAX_CODE_BYTES ||
	    !(code = malloc(bytes)) || rtc.code(program, code) != 0) {
		(void)fprintf(stderr, "error: no code object\n");
		return EXIT_LACKED;
	}
	object = code;
	if (!nvrtc)
		object = unbundle(code, &bytes);
	if (!nvrtc && !report_amd(object, bytes))
		return EXIT_LACKED;
	return write_file(build->output, object, bytes) ? 0 : EXIT_LACKED;
}

/* Whether @command can be run: a path that is executable, or a name found in PATH. */
static bool find_command(const char *command)
{
	const char *path = getenv("PATH");
	char candidate[4096];

	if (strchr(command, '/'))
		return access(command, X_OK) == 0;
	while (path && *path) {
		int n = (int)strcspn(path, ":");

		(void)snprintf(candidate, sizeof(candidate), "%.*s/%s", n, path, command);
		if (access(candidate, X_OK) == 0)
			return true;
		path += n;
		path += *path == ':';
	}
	return false;
}

static const char *pick_clang(const char *wanted)
{
	if (*wanted)
		return find_command(wanted) ? wanted : NULL;
	for (const char *const *name = clangs; *name; name++)
		if (find_command(*name))
			return *name;
	return NULL;
}

/* Runs @argv with these as its stdin and stdout; its log goes to ours. Return: of this program. */
static int run_step(char *const argv[], int in, int out)
{
	int status = -1;
	pid_t pid = fork();

	if (pid == 0) {
		if (dup2(in, 0) == 0 && dup2(out, 1) == 1)
			(void)execvp(argv[0], argv);
		_exit(127);
	}
	while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	if (pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0)
		return 0;
	(void)fprintf(stderr, "error: %s failed\n", argv[0]);
	return pid < 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 127) ? EXIT_LACKED
									    : EXIT_REFUSED;
}

/*
 * Left to itself clang writes an object file to /tmp between compiling and linking, which stays
 * there when clang is killed. As three steps it writes nothing but its stdout: assembly, object,
 * code object. The linker needs a name for its input, and a file in memory has one. Return: of this
 * program.
 */
static int clang_steps(const struct build *build, char *compile[], int output)
{
	char machine[64], object_path[64];
	int text = memfd_create("assembly", MFD_CLOEXEC), object = memfd_create("object", 0);
	char *assemble[] = {compile[0], "--target=amdgcn-amd-amdhsa",
			    machine,    "-nogpulib",
			    "-x",       "assembler",
			    "-c",       "-o",
			    "-",        "-",
			    NULL};
	char *clang_links[] = {compile[0],  "--target=amdgcn-amd-amdhsa",
			       machine,     "-nogpulib",
			       "-o",        "-",
			       object_path, NULL};
	char *linker_links[] = {
		(char *)build->linker, "--no-undefined", "-shared", "-o", "-", object_path, NULL};

	int r;

	(void)snprintf(machine, sizeof(machine), "-mcpu=%s", build->arch);
	(void)snprintf(object_path, sizeof(object_path), "/proc/self/fd/%d", object);
	if (text < 0 || object < 0) {
		(void)fprintf(stderr, "error: memfd_create: %s\n", strerror(errno));
		return EXIT_LACKED;
	}
	r = run_step(compile, 0, text);
	if (r == 0 && lseek(text, 0, SEEK_SET) != 0)
		r = EXIT_LACKED;
	if (r == 0)
		r = run_step(assemble, text, object);
	return r == 0 ? run_step(*build->linker ? linker_links : clang_links, 0, output) : r;
}

static int clang_build(const struct build *build)
{
	const char *clang = pick_clang(build->clang);
	char path[4096], include[2][4100], arch[64], *code;
	char *argv[MAX_ARGUMENTS];
	size_t bytes = 0;
	int n = 0, output, r;

	if (!clang) {
		(void)fprintf(stderr, "no clang found\n");
		return EXIT_NO_COMPILER;
	}
	if (*build->linker && !find_command(build->linker)) {
		(void)fprintf(stderr, "error: linker %s: not found\n", build->linker);
		return EXIT_NO_COMPILER;
	}
	(void)snprintf(path, sizeof(path), "%s/%s", build->source_dir, build->source);
	(void)snprintf(arch, sizeof(arch), "--offload-arch=%s", build->arch);
	(void)snprintf(include[0], sizeof(include[0]), "-I%s", build->source_dir);
	(void)snprintf(include[1], sizeof(include[1]), "-I%s/../include", build->source_dir);
	char *const heads[] = {(char *)clang,
			       "-x",
			       "hip",
			       "--cuda-device-only",
			       "--no-gpu-bundle-output",
			       "-nogpulib",
			       "-nogpuinc",
			       "-O3",
			       "-std=c++17",
			       arch,
			       include[0],
			       include[1],
			       "-S",
			       "-o",
			       "-"};
	for (size_t i = 0; i < sizeof(heads) / sizeof(heads[0]); i++)
		argv[n++] = heads[i];
	for (int i = 0; i < build->n_options; i++)
		argv[n++] = build->options[i];
	argv[n++] = path;
	argv[n] = NULL;
	output = open(build->output, O_WRONLY | O_TRUNC | O_CLOEXEC);
	if (output < 0) {
		(void)fprintf(stderr, "error: %s: %s\n", build->output, strerror(errno));
		return EXIT_LACKED;
	}
	r = clang_steps(build, argv, output);
	if (r != 0)
		return r;
	code = read_file(build->output, MAX_CODE_BYTES, &bytes);
	return code && report_amd(code, bytes) ? 0 : EXIT_LACKED;
}

/* Asked by compiling nothing, with an arch that every clang for AMD knows. */
static bool rtc_is_careful(const struct rtc *rtc)
{
	const char *options[] = {"--offload-arch=gfx90a", "-mllvm", CAREFUL};
	void *program = NULL;

	return rtc->create(&program, "\n", "empty", 0, NULL, NULL) == 0 &&
	       rtc->compile(program, 3, options) == 0;
}

static int print_rtc_version(const char *compiler, const char *arch)
{
	int major = 0, minor = 0;
	char sentence[400];
	bool careful;
	struct rtc rtc;

	if (!compile_fits(compiler, arch, sentence, sizeof(sentence))) {
		(void)fprintf(stderr, "%s\n", sentence);
		return EXIT_NO_COMPILER;
	}
	if (!rtc_open(compiler, &rtc) || rtc.version(&major, &minor) != 0)
		return EXIT_NO_COMPILER;
	careful = strcmp(compiler, "hiprtc") == 0 && rtc_is_careful(&rtc);
	(void)printf("%s %d.%d%s\n", compiler, major, minor, careful ? " -mllvm " CAREFUL : "");
	return 0;
}

/* clang comes from the configuration or the list above, never from a client. Return: -1: it could not
 * be asked; another version would be another compiler's, with other options. */
static int clang_takes(const char *clang, const char *option)
{
	int status;

	char command[4400];

	(void)snprintf(command, sizeof(command),
		       "'%s' -x hip --cuda-device-only --no-gpu-bundle-output -nogpulib -nogpuinc "
		       "--offload-arch=gfx90a %s -S -o - /dev/null >/dev/null 2>&1",
		       clang, option);
	status = system(command);
	if (status < 0 || !WIFEXITED(status) || WEXITSTATUS(status) == 127)
		return -1;
	return WEXITSTATUS(status) == 0;
}

/* "clang NUMBER", with nothing behind it. Return: of this program. */
static int ask_clang_version(const char *clang, char *version, size_t size)
{
	char command[4200], line[256] = "";
	const char *at;
	FILE *out;

	(void)snprintf(command, sizeof(command), "'%s' --version", clang);
	out = popen(command, "re");
	if (!out || !fgets(line, sizeof(line), out)) {
		(void)fprintf(stderr, "%s does not tell its version\n", clang);
		return EXIT_NO_COMPILER;
	}
	(void)pclose(out);
	at = strstr(line, "version ");
	at = at ? at + 8 : "unknown";
	(void)snprintf(version, size, "clang %.*s", (int)strcspn(at, " \n"), at);
	return 0;
}

static int print_clang_version(const char *wanted_clang, const char *arch)
{
	static const char *const wanted[] = {CODE_OBJECT, "-mllvm " CAREFUL};
	const char *clang = pick_clang(wanted_clang);
	char version[256], sentence[400];
	int taken[2], r;

	if (!clang) {
		(void)fprintf(stderr, "no clang found\n");
		return EXIT_NO_COMPILER;
	}
	r = ask_clang_version(clang, version, sizeof(version));
	if (r != 0)
		return r;
	if (!compile_fits(version, arch, sentence, sizeof(sentence))) {
		(void)fprintf(stderr, "%s\n", sentence);
		return EXIT_NO_COMPILER;
	}
	for (int i = 0; i < 2; i++) {
		taken[i] = clang_takes(clang, wanted[i]);
		if (taken[i] < 0) {
			(void)fprintf(stderr, "%s cannot be asked\n", clang);
			return EXIT_LACKED;
		}
	}
	(void)printf("%s", version);
	for (int i = 0; i < 2; i++)
		if (taken[i])
			(void)printf(" %s", wanted[i]);
	(void)printf("\n");
	return 0;
}

static int print_version(const char *compiler, const char *wanted_clang, const char *arch)
{
	if (strcmp(compiler, "nvrtc") == 0 || strcmp(compiler, "hiprtc") == 0)
		return print_rtc_version(compiler, arch);
	if (strcmp(compiler, "clang") == 0)
		return print_clang_version(wanted_clang, arch);
	(void)fprintf(stderr, "compiler %s is not known\n", compiler);
	return EXIT_NO_COMPILER;
}

/* Sanitizers reserve terabytes of address space. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MEMORY_LIMIT RLIM_INFINITY
#else
#define MEMORY_LIMIT memory
#endif

/* Compilers leak. */
#ifdef __SANITIZE_ADDRESS__
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
	return "detect_leaks=0";
}
#endif

static void limit(const char *text)
{
	unsigned long long memory = 0;
	unsigned seconds = 0;

	if (sscanf(text, "%llu,%u", &memory, &seconds) != 2)
		return;
	const struct {
		__rlimit_resource_t resource;
		rlim_t value;
	} limits[] = {
		{RLIMIT_AS, MEMORY_LIMIT},
		{RLIMIT_CPU, seconds},
		{RLIMIT_FSIZE, MAX_CODE_BYTES},
		{RLIMIT_CORE, 0},
	};
	for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
		struct rlimit rlimit = {limits[i].value, limits[i].value};

		(void)setrlimit(limits[i].resource, &rlimit);
	}
}

static void on_orphaned(int number)
{
	(void)number;
	(void)kill(0, SIGKILL);
}

/* fmhad makes this process the leader of a group, in which its compilers are, too. The signal comes
 * when the thread that started us ends, which waits for us unless all of fmhad ends. */
static void die_with_parent(void)
{
	struct pollfd reader = {.fd = STDOUT_FILENO};

	if (getpgrp() != getpid())
		return; /* started by hand */
	(void)signal(SIGTERM, on_orphaned);
	(void)prctl(PR_SET_PDEATHSIG, SIGTERM, 0, 0, 0);
	/* It may have died before that: then nobody reads what we print. */
	if (poll(&reader, 1, 0) == 1 && (reader.revents & POLLERR))
		_exit(EXIT_REFUSED);
}

static int serve(int argc, char **argv)
{
	if ((argc == 4 || argc == 5) && strcmp(argv[1], "--version") == 0)
		return print_version(argv[2], argv[3], argc == 5 ? argv[4] : "");
	if (argc < 9 || argc - 9 > MAX_ARGUMENTS - 16) {
		(void)fprintf(stderr, "fmhad-compile is started by fmhad; see \"fmhactl build\"\n");
		return 2;
	}
	struct build build = {
		.compiler = argv[1],
		.arch = argv[2],
		.source_dir = argv[3],
		.source = argv[4],
		.output = argv[5],
		.clang = argv[7],
		.linker = argv[8],
		.options = argv + 9,
		.n_options = argc - 9,
	};
	limit(argv[6]);
	if (strcmp(build.compiler, "clang") == 0)
		return clang_build(&build);
	if (strcmp(build.compiler, "nvrtc") == 0 || strcmp(build.compiler, "hiprtc") == 0)
		return rtc_build(&build);
	(void)fprintf(stderr, "compiler %s is not known\n", build.compiler);
	return EXIT_NO_COMPILER;
}

int main(int argc, char **argv)
{
	int r;

	die_with_parent();
	(void)prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	(void)prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	r = serve(argc, argv);
	/* Resources that were not told would be taken for none. */
	if (fflush(stdout) == 0 && !ferror(stdout))
		return r;
	(void)fprintf(stderr, "error: what is told of the code was not written\n");
	return EXIT_LACKED;
}
