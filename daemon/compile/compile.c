/* SPDX-License-Identifier: MIT */
#include <compile/compile.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <compile/config.h>
#include <files/files.h>
#include <fmha/base.h>
#include <proto/error.h>

#include "cleanup.h"
#include "fit.h"
#include "now.h"

/* ---- helper run ---- */

/* One run of the helper program, fmhad-compile, to its end or its deadline. */

/* Exit status: memory, files or processes lacked; the source is not judged. */
#define HELPER_LACKED 4

/* The helper's descriptor of the file that takes the code object, and its name there. A file
 * without a name: nothing is left of it, whoever is killed. */
#define HELPER_CODE_FD   3
#define HELPER_CODE_PATH "/proc/self/fd/3"

/* What a helper run printed, and how it ended. */
struct helper_result {
	char *text[2]; /* stdout, stderr; NUL-terminated, NULL: nothing */
	size_t bytes[2];
	int status; /* of waitpid() */
	uint32_t elapsed_ms;
};

#define DEFAULT_DEADLINE_MS 60000

uint32_t compile_deadline_ms(const struct compile_config *config)
{
	return config->deadline_ms ? config->deadline_ms : DEFAULT_DEADLINE_MS;
}

#define MAX_OUTPUT_BYTES (1u << 20)

static void helper_result_deinit(struct helper_result *result)
{
	free(result->text[0]);
	free(result->text[1]);
}

/* The helper's whole environment: nothing of ours leaks in, LD_PRELOAD and HSA_* least of all. */
static int helper_environment(const struct compile_config *config, char *storage, size_t size,
			      char *ret_env[4])
{
	size_t n = 0;
	int used;

	ret_env[n++] = "PATH=/usr/local/bin:/usr/bin:/bin:/opt/rocm/bin";
	ret_env[n++] = "LC_ALL=C";
	if (config->library_path) {
		used = snprintf(storage, size, "LD_LIBRARY_PATH=%s", config->library_path);
		if (used < 0 || (size_t)used >= size)
			return -1;
		ret_env[n++] = storage;
	}
	ret_env[n] = NULL;
	return 0;
}

/* @code: -1, or what becomes HELPER_CODE_FD. */
static int helper_spawn(const struct compile_config *config, char *const argv[],
			const int write_ends[2], int code, pid_t *ret_pid, struct fmha_error *err)
{
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	char library_path[PATH_MAX];
	char *env[4];
	sigset_t none;
	int r, lacking;

	if (helper_environment(config, library_path, sizeof(library_path), env) < 0)
		return fmha_error_set(err, FMHA_EINVAL, "library_path: too long");
	(void)sigemptyset(&none);
	(void)posix_spawn_file_actions_init(&actions);
	/* Each fails for want of memory only. */
	lacking = posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
	lacking |= posix_spawn_file_actions_adddup2(&actions, write_ends[0], 1);
	lacking |= posix_spawn_file_actions_adddup2(&actions, write_ends[1], 2);
	if (code >= 0)
		lacking |= posix_spawn_file_actions_adddup2(&actions, code, HELPER_CODE_FD);
	(void)posix_spawnattr_init(&attributes);
	/* A group of its own, so that a compiler that the helper started ends with it. */
	(void)posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
	(void)posix_spawnattr_setpgroup(&attributes, 0);
	(void)posix_spawnattr_setsigmask(&attributes, &none);
	r = lacking ? ENOMEM
		    : posix_spawn(ret_pid, config->helper, &actions, &attributes, argv, env);
	(void)posix_spawn_file_actions_destroy(&actions);
	(void)posix_spawnattr_destroy(&attributes);
	if (r != 0)
		return fmha_error_set(err, FMHA_EIO, "%s: %s", config->helper, strerror(r));
	return 0;
}

enum { DRAIN_MORE, DRAIN_ENDED };

/* Takes what is there. Output beyond the cap is dropped. Return: also FMHA_ENOMEM. */
static int drain(int fd, char **text, size_t *bytes)
{
	char chunk[4096];
	ssize_t n = read(fd, chunk, sizeof(chunk));

	if (n < 0)
		return errno == EINTR || errno == EAGAIN ? DRAIN_MORE : DRAIN_ENDED;
	if (n == 0)
		return DRAIN_ENDED;
	if (*bytes + (size_t)n <= MAX_OUTPUT_BYTES) {
		char *grown = realloc(*text, *bytes + (size_t)n + 1);

		if (!grown)
			return FMHA_ENOMEM;
		memcpy(grown + *bytes, chunk, (size_t)n);
		*text = grown;
		*bytes += (size_t)n;
		grown[*bytes] = '\0';
	}
	return DRAIN_MORE;
}

/* Reads both streams until they end: 0; or FMHA_ETIMEDOUT, or FMHA_ECANCELED by @stop, or
 * FMHA_ENOMEM. */
static int helper_collect(int out, int errors, int stop, int64_t deadline,
			  struct helper_result *result)
{
	struct pollfd fds[3] = {{.fd = out, .events = POLLIN},
				{.fd = errors, .events = POLLIN},
				{.fd = stop > 0 ? stop : -1, .events = POLLIN}};

	while (fds[0].fd >= 0 || fds[1].fd >= 0) {
		int64_t left = deadline - now_ms();

		if (left <= 0)
			return FMHA_ETIMEDOUT;
		if (poll(fds, 3, (int)left) < 0)
			continue; /* EINTR: revents are undefined */
		if (fds[2].revents)
			return FMHA_ECANCELED;
		for (int i = 0; i < 2; i++) {
			int r = fds[i].fd >= 0 && fds[i].revents
					? drain(fds[i].fd, &result->text[i], &result->bytes[i])
					: DRAIN_MORE;

			if (r < 0)
				return r;
			if (r == DRAIN_ENDED)
				fds[i].fd = -1;
		}
	}
	return 0;
}

/* Waits for the helper, or ends it: after a clean end only stragglers of the group are left to be
 * ended, before the leader is reaped, while its number cannot belong to anybody else. */
static int helper_reap(pid_t pid, bool ended)
{
	int status = 0;

	if (ended)
		(void)waitid(P_PID, (id_t)pid, &(siginfo_t){0}, WEXITED | WNOWAIT);
	(void)kill(-pid, SIGKILL);
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	return status;
}

static int helper_talk(const struct compile_config *config, char *const argv[], int code,
		       const int out[2], const int errors[2], struct helper_result *result,
		       struct fmha_error *err)
{
	int64_t start = now_ms();
	pid_t pid;
	int r = helper_spawn(config, argv, (int[]){out[1], errors[1]}, code, &pid, err);

	(void)close(out[1]);
	(void)close(errors[1]);
	if (r < 0)
		return r;
	if (config->nice > 0)
		(void)setpriority(PRIO_PGRP, (id_t)pid,
				  getpriority(PRIO_PROCESS, 0) + config->nice);
	r = helper_collect(out[0], errors[0], config->stop_fd, start + compile_deadline_ms(config),
			   result);
	result->status = helper_reap(pid, r == 0);
	result->elapsed_ms = (uint32_t)(now_ms() - start);
	if (r == FMHA_ETIMEDOUT)
		return fmha_error_set(err, r, "the compiler did not end within %u ms",
				      compile_deadline_ms(config));
	if (r == FMHA_ENOMEM)
		return fmha_error_set(err, r, "no memory for what the compiler says");
	return r < 0 ? fmha_error_set(err, r, "the build was cancelled") : 0;
}

/*
 * @code: borrowed, becomes HELPER_CODE_FD; -1: none
 * Return: 0, whatever the helper's exit status; FMHA_EIO (it cannot be started), FMHA_ETIMEDOUT,
 * FMHA_ECANCELED.
 */
static int helper_run(const struct compile_config *config, char *const argv[], int code,
		      struct helper_result *ret_result, struct fmha_error *err)
{
	struct helper_result result = {0};
	int out[2], errors[2], r;

	if (pipe2(out, O_CLOEXEC) < 0)
		return fmha_error_set(err, FMHA_EIO, "pipe: %s", strerror(errno));
	if (pipe2(errors, O_CLOEXEC) < 0) {
		(void)close(out[0]);
		(void)close(out[1]);
		return fmha_error_set(err, FMHA_EIO, "pipe: %s", strerror(errno));
	}
	r = helper_talk(config, argv, code, out, errors, &result, err);
	(void)close(out[0]);
	(void)close(errors[0]);
	if (r < 0)
		helper_result_deinit(&result);
	else
		*ret_result = result;
	return r;
}

#define CODE_FORMAT          "fmhad code 2" /* bump when options are built differently */
#define DEFAULT_MEMORY_BYTES (8ull << 30)
#define MAX_SOURCE_BYTES     (4u << 20)
#define MAX_SOURCES          128
#define VERSION_TRUSTED_MS   60000
#define N_KNOWN                                                                                    \
	(sizeof(((struct compile_versions *)0)->known) / sizeof(struct compile_known_version))
#define MAX_STANDING 4 /* options that each build by a compiler gets: see compile_version() */
#define N_HEADS      9 /* the helper's arguments before the options: see helper.c */

const char *compile_default(const char *arch)
{
	if (strncmp(arch, "sm_", 3) == 0)
		return "nvrtc";
	if (strncmp(arch, "gfx", 3) == 0)
		return "clang";
	return NULL;
}

static const char *compiler_of(const struct compile_request *request)
{
	return request->compiler ? request->compiler : compile_default(request->build.arch);
}

int compile_version(const struct compile_config *config, const char *compiler, char ret_version[96],
		    struct fmha_error *err)
{
	char *argv[] = {(char *)config->helper, "--version", (char *)compiler,
			(char *)(config->clang ? config->clang : ""), NULL};
	_cleanup_(helper_result_deinit) struct helper_result result = {0};
	int r = helper_run(config, argv, -1, &result, err);

	if (r < 0)
		return r;
	if (WIFEXITED(result.status) && WEXITSTATUS(result.status) == HELPER_LACKED)
		return fmha_error_set(err, FMHA_EIO, "compiler %s: %.150s", compiler,
				      result.text[1] ? result.text[1] : "it could not be asked");
	if (!WIFEXITED(result.status) || WEXITSTATUS(result.status) != 0 || !result.text[0])
		return fmha_error_set(err, FMHA_ENOTSUP, "compiler %s: %.150s", compiler,
				      result.text[1] ? result.text[1] : "the helper died");
	result.text[0][strcspn(result.text[0], "\n")] = '\0';
	(void)snprintf(ret_version, 96, "%s", result.text[0]);
	return 0;
}

/* A version asked for lately. */
static bool recall_version(struct compile_versions *versions, const char *compiler,
			   char ret_version[96])
{
	bool found = false;

	(void)pthread_mutex_lock(&versions->lock);
	for (size_t i = 0; i < N_KNOWN && !found; i++) {
		const struct compile_known_version *known = &versions->known[i];

		found = strcmp(known->compiler, compiler) == 0 &&
			now_ms() - known->asked_ms < VERSION_TRUSTED_MS;
		if (found)
			memcpy(ret_version, known->version, sizeof(known->version));
	}
	(void)pthread_mutex_unlock(&versions->lock);
	return found;
}

/* In the compiler's own place, or else in the oldest. */
static void remember_version(struct compile_versions *versions, const char *compiler,
			     const char version[96])
{
	struct compile_known_version *place = &versions->known[0];

	(void)pthread_mutex_lock(&versions->lock);
	for (size_t i = 0; i < N_KNOWN; i++) {
		struct compile_known_version *known = &versions->known[i];

		if (known->asked_ms < place->asked_ms)
			place = known;
		if (strcmp(known->compiler, compiler) == 0) {
			place = known;
			break;
		}
	}
	(void)snprintf(place->compiler, sizeof(place->compiler), "%s", compiler);
	memcpy(place->version, version, sizeof(place->version));
	place->asked_ms = now_ms();
	(void)pthread_mutex_unlock(&versions->lock);
}

static int known_version(const struct compile_config *config, const char *compiler,
			 char ret_version[96], struct fmha_error *err)
{
	struct compile_versions *versions = config->versions;
	int r = 0;

	if (!versions)
		return compile_version(config, compiler, ret_version, err);
	if (recall_version(versions, compiler, ret_version))
		return 0;
	(void)pthread_mutex_lock(&versions->asking);
	if (!recall_version(versions, compiler, ret_version)) {
		r = compile_version(config, compiler, ret_version, err);
		if (r == 0)
			remember_version(versions, compiler, ret_version);
	}
	(void)pthread_mutex_unlock(&versions->asking);
	return r;
}

static int compare_strings(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static int read_source(const char *dir, const char *name, char **ret_text, size_t *ret_bytes,
		       struct fmha_error *err)
{
	_cleanup_(freep) char *text = NULL;
	_cleanup_(closep) int fd = -1;
	char path[PATH_MAX];
	struct stat st;

	(void)snprintf(path, sizeof(path), "%s/%s", dir, name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > MAX_SOURCE_BYTES)
		return fmha_error_set(err, FMHA_EIO, "kernel source %s: %s", path,
				      errno ? strerror(errno) : "not a source file");
	text = malloc((size_t)st.st_size + 1);
	if (!text)
		return fmha_error_set(err, FMHA_ENOMEM, "kernel source %s: out of memory", path);
	if (read(fd, text, (size_t)st.st_size) != st.st_size)
		return fmha_error_set(err, FMHA_EIO, "kernel source %s: cannot read", path);
	*ret_text = text;
	*ret_bytes = (size_t)st.st_size;
	text = NULL;
	return 0;
}

static bool is_source(const char *name)
{
	const char *dot = strrchr(name, '.');

	return dot && name[0] != '.' && (strcmp(dot, ".h") == 0 || strcmp(dot, ".hip") == 0);
}

/* The sources of @dir, and after them what lies in its folders but for host code, by their paths from @top. */
static void find_sources(const char *top, const char *under, char **names, size_t *n)
{
	_cleanup_(closedirp) DIR *stream = NULL;
	char path[PATH_MAX];
	struct dirent *item;

	(void)snprintf(path, sizeof(path), "%s/%s", top, under);
	stream = opendir(path);
	while (stream && (item = readdir(stream)) && *n < MAX_SOURCES) {
		(void)snprintf(path, sizeof(path), "%s%s", under, item->d_name);
		if (is_source(item->d_name))
			*n += (names[*n] = strdup(path)) != NULL;
		else if (!*under && item->d_name[0] != '.' && strcmp(item->d_name, "host") != 0)
			find_sources(top, strcat(path, "/"), names, n);
	}
}

/* Adds every source of @dir and its folders, in the order of names, as two parts each: name and content. */
static int add_sources(const char *dir, struct cache_key_part *parts, size_t *n_parts, char **owned,
		       size_t *n_owned, struct fmha_error *err)
{
	char *names[MAX_SOURCES];
	size_t n = 0;
	int r = 0;

	if (access(dir, R_OK | X_OK) != 0)
		return fmha_error_set(err, FMHA_EIO, "kernel sources %s: %s", dir, strerror(errno));
	find_sources(dir, "", names, &n);
	qsort(names, n, sizeof(names[0]), compare_strings);
	for (size_t i = 0; i < n; i++) {
		size_t bytes = 0;
		char *text = NULL;

		owned[(*n_owned)++] = names[i];
		if (r == 0)
			r = read_source(dir, names[i], &text, &bytes, err);
		if (r < 0)
			continue; /* keep collecting names: they are freed by the caller */
		owned[(*n_owned)++] = text;
		parts[(*n_parts)++] = (struct cache_key_part){names[i], strlen(names[i])};
		parts[(*n_parts)++] = (struct cache_key_part){text, bytes};
	}
	return r;
}

int compile_key(const struct compile_config *config, const struct compile_request *request,
		const char *version, struct cache_key *ret_key, struct fmha_error *err)
{
	/* format, version, arch, source, options, sources of two folders */
	struct cache_key_part parts[4 + BUILD_OPTIONS + 4 * MAX_SOURCES];
	const struct kernel_build *build = &request->build;
	const char *heads[] = {CODE_FORMAT, version, build->arch, build->source};
	char *owned[4 * MAX_SOURCES], above[PATH_MAX];
	size_t n_parts = 0, n_owned = 0;
	int r;

	for (size_t i = 0; i < 4; i++)
		parts[n_parts++] = (struct cache_key_part){heads[i], strlen(heads[i])};
	for (uint32_t i = 0; i < build->n_options; i++)
		parts[n_parts++] = (struct cache_key_part){build->options[i],
							   strlen(build->options[i])};
	r = add_sources(config->source_dir, parts, &n_parts, owned, &n_owned, err);
	(void)snprintf(above, sizeof(above), "%s/../include/kernels", config->source_dir);
	if (r == 0 && access(above, F_OK) == 0)
		r = add_sources(above, parts, &n_parts, owned, &n_owned, err); /* abi.h */
	if (r == 0)
		*ret_key = cache_key_of(parts, n_parts);
	for (size_t i = 0; i < n_owned; i++)
		free(owned[i]);
	return r;
}

/* "key value" lines of the helper's stdout. */
static void parse_info(const char *text, struct compile_info *info)
{
	const struct {
		const char *name;
		uint32_t *value;
	} fields[] = {
		{"registers", &info->registers},
		{"scalar_registers", &info->scalar_registers},
		{"accumulators", &info->accumulators},
		{"spills", &info->spills},
		{"scratch_bytes", &info->scratch_bytes},
		{"lds_bytes", &info->lds_bytes},
		{"occupancy", &info->occupancy},
	};
	const char *line = text;
	char name[32];
	unsigned value;

	while (line && *line) {
		if (sscanf(line, "%31s %u", name, &value) == 2)
			for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
				if (strcmp(name, fields[i].name) == 0)
					*fields[i].value = value;
		line = strchr(line, '\n');
		if (line)
			line++;
	}
}

/* The first line of the log that speaks of an error, for the sentence. */
static void first_error(const char *log, char *ret_line, size_t size)
{
	const char *at = strstr(log, "error");
	const char *start = at;

	if (!at) {
		(void)snprintf(ret_line, size, "%.*s", (int)strcspn(log, "\n"), log);
		return;
	}
	while (start > log && start[-1] != '\n')
		start--;
	(void)snprintf(ret_line, size, "%.*s", (int)strcspn(start, "\n"), start);
}

static int read_code(int fd, struct cache_entry *entry, struct fmha_error *err)
{
	struct stat st;

	if (fstat(fd, &st) < 0 || st.st_size <= 0 || st.st_size > CACHE_MAX_ENTRY_BYTES)
		return fmha_error_set(err, FMHA_EIO, "%s: the compiler left no code object",
				      entry->info.kernel);
	entry->code = malloc((size_t)st.st_size);
	if (!entry->code)
		return fmha_error_set(err, FMHA_ENOMEM, "%s: out of memory", entry->info.kernel);
	if (files_read_all(fd, entry->code, (size_t)st.st_size) < 0)
		return fmha_error_set(err, FMHA_EIO, "%s: cannot read the code object",
				      entry->info.kernel);
	entry->code_bytes = (size_t)st.st_size;
	return 0;
}

/* hipRTC has no error for that. */
static const char *of_unknown_arch(const struct cache_entry *entry, int status)
{
	return WTERMSIG(status) == SIGABRT && strncmp(entry->info.compiler, "hiprtc", 6) == 0
		       ? ", as hipRTC does when it does not know the arch"
		       : "";
}

static int helper_judge(const struct helper_result *result, int code, struct cache_entry *entry,
			struct fmha_error *err)
{
	char line[160] = "";

	if (WIFSIGNALED(result->status))
		return fmha_error_set(err, FMHA_EIO, "%s for %s: the compiler died of signal %d%s",
				      entry->info.kernel, entry->info.arch,
				      WTERMSIG(result->status),
				      of_unknown_arch(entry, result->status));
	if (WEXITSTATUS(result->status) == HELPER_LACKED) {
		first_error(entry->log, line, sizeof(line));
		return fmha_error_set(err, FMHA_EIO, "%s was not compiled: %s", entry->info.kernel,
				      line);
	}
	if (WEXITSTATUS(result->status) != 0 && strstr(entry->log, "invalid target ID"))
		return fmha_error_set(err, FMHA_EINVAL,
				      "%s: this clang does not know %s; a newer one may, or ROCm's "
				      "amdclang++ (compile.clang, --clang)",
				      entry->info.kernel, entry->info.arch);
	if (WEXITSTATUS(result->status) != 0) {
		first_error(entry->log, line, sizeof(line));
		return fmha_error_set(err, FMHA_EINVAL, "%s: %s", entry->info.kernel, line);
	}
	parse_info(result->text[0] ? result->text[0] : "", &entry->info);
	return read_code(code, entry, err);
}

/* Cuts what follows the number in @version into words. They are part of the key, being part of it.
 */
static size_t standing_options(char *version, char *ret_options[MAX_STANDING])
{
	char *rest = version, *word;
	size_t n = 0;

	for (int place = 0; (word = strsep(&rest, " ")) && n < MAX_STANDING; place++)
		if (place >= 2) /* after name and number */
			ret_options[n++] = word;
	return n;
}

/* What a build's command line needs to be kept. */
struct helper_words {
	char limits[64], version[96];
};

/* The helper's command line, given, in words kept by the caller; NULL: out of memory. */
static char **helper_arguments(const struct compile_config *config,
			       const struct compile_request *request, const char *version,
			       struct helper_words *words)
{
	uint64_t memory = config->memory_bytes ? config->memory_bytes : DEFAULT_MEMORY_BYTES;
	const char *compiler = compiler_of(request);
	const char *const heads[N_HEADS] = {config->helper,
					    compiler,
					    request->build.arch,
					    config->source_dir,
					    request->build.source,
					    HELPER_CODE_PATH,
					    words->limits,
					    config->clang ? config->clang : "",
					    config->linker ? config->linker : ""};
	char **argv = calloc(N_HEADS + MAX_STANDING + request->build.n_options + 1, sizeof(*argv));
	size_t n = N_HEADS;

	if (!argv)
		return NULL;
	(void)snprintf(words->limits, sizeof(words->limits), "%llu,%u", (unsigned long long)memory,
		       compile_deadline_ms(config) / 1000 + 1);
	(void)snprintf(words->version, sizeof(words->version), "%s", version);
	memcpy(argv, heads, sizeof(heads));
	n += standing_options(words->version, argv + n);
	for (uint32_t i = 0; i < request->build.n_options; i++)
		argv[n++] = (char *)request->build.options[i];
	return argv;
}

/* Fills in what is known of a finished run, then judges it. Takes the log out of @result. */
static int take_result(const struct compile_request *request, const char *version,
		       struct helper_result *result, int code, struct cache_entry *entry,
		       struct fmha_error *err)
{
	struct compile_info *info = &entry->info;

	(void)snprintf(info->kernel, sizeof(info->kernel), "%s", request->build.name);
	(void)snprintf(info->arch, sizeof(info->arch), "%.31s", request->build.arch);
	(void)snprintf(info->compiler, sizeof(info->compiler), "%s", version);
	info->compile_ms = result->elapsed_ms;
	entry->uid = request->uid;
	entry->log = result->text[1] ? result->text[1] : strdup("");
	result->text[1] = NULL;
	if (!entry->log)
		return fmha_error_set(err, FMHA_ENOMEM, "compile: out of memory");
	return helper_judge(result, code, entry, err);
}

int compile_run(const struct compile_config *config, const struct compile_request *request,
		const char *version, struct cache_entry **ret_entry, struct fmha_error *err)
{
	_cleanup_(helper_result_deinit) struct helper_result result = {0};
	_cleanup_(cache_entry_freep) struct cache_entry *entry = calloc(1, sizeof(*entry));
	_cleanup_(closep) int code = memfd_create("fmhad-code", MFD_CLOEXEC);
	_cleanup_(freep) char **argv = NULL;
	struct helper_words words;
	int r;

	argv = helper_arguments(config, request, version, &words);
	if (!entry || !argv || code < 0 || fchmod(code, 0600) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "compile: out of memory");
	r = helper_run(config, argv, code, &result, err);
	if (r == 0)
		r = take_result(request, version, &result, code, entry, err);
	if (r == 0 || (r == FMHA_EINVAL && entry->log)) {
		*ret_entry = entry;
		entry = NULL;
	}
	return r;
}

int compile_check_fit(const char *version, const char *arch, struct fmha_error *err)
{
	char sentence[sizeof(err->msg)];

	if (compile_fits(version, arch, sentence, sizeof(sentence)))
		return 0;
	return fmha_error_set_field(err, FMHA_ENOTSUP, "arch", "%s", sentence);
}

int compile_identify(const struct compile_config *config, const struct compile_request *request,
		     struct compile_target *ret_target, struct fmha_error *err)
{
	const char *compiler = compiler_of(request);
	struct compile_target target;
	int r;

	if (!compiler)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "arch",
					    "arch %s: no compiler for it", request->build.arch);
	r = known_version(config, compiler, target.version, err);
	if (r == 0)
		r = compile_check_fit(target.version, request->build.arch, err);
	if (r == 0)
		r = compile_key(config, request, target.version, &target.key, err);
	if (r == 0)
		*ret_target = target;
	return r;
}

int compile_build(const struct compile_config *config, struct cache *cache,
		  const struct compile_request *request, const struct compile_target *target,
		  enum compile_patience patience, struct cache_entry **ret_entry, bool *ret_hit,
		  struct fmha_error *err)
{
	int lock = -1, r = cache_try_lock(cache, &target->key, &lock, NULL);
	bool hit;

	if (r == CACHE_BUSY && patience == COMPILE_PATIENT)
		return COMPILE_BUSY;
	/* Somebody else may have built it meanwhile. */
	hit = cache_load(cache, &target->key, ret_entry) == 0;
	r = hit ? 0 : compile_run(config, request, target->version, ret_entry, err);
	if (r == 0 && !hit) /* what the disk does not take is delivered all the same */
		(void)cache_store(cache, &target->key, *ret_entry, NULL);
	if (lock >= 0)
		cache_unlock(cache, &target->key, lock);
	*ret_hit = hit;
	return r;
}
