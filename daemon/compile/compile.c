/* SPDX-License-Identifier: MIT */
#include "compile.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include <proto/error.h>

#include "cleanup.h"

#define CODE_FORMAT          "fmhad code 1" /* bump when options are built differently */
#define DEFAULT_DEADLINE_MS  60000
#define DEFAULT_MEMORY_BYTES (8ull << 30)
#define MAX_OUTPUT_BYTES     (1u << 20)
#define MAX_SOURCE_BYTES     (4u << 20)
#define MAX_OPTIONS          256
#define MAX_SOURCES          128
#define VERSION_TRUSTED_MS   60000
#define N_KNOWN                                                                                    \
	(sizeof(((struct compile_versions *)0)->known) / sizeof(struct compile_known_version))
#define N_HEADS 8 /* the helper's arguments before the options: see helper.c */

/* What a helper run printed, and how it ended. */
struct helper_result {
	char *text[2]; /* stdout, stderr; NUL-terminated */
	size_t bytes[2];
	int status; /* of waitpid() */
	uint32_t elapsed_ms;
};

static void helper_result_deinit(struct helper_result *result)
{
	free(result->text[0]);
	free(result->text[1]);
}

const char *compile_default(const char *arch)
{
	if (strncmp(arch, "sm_", 3) == 0)
		return "nvrtc";
	if (strncmp(arch, "gfx", 3) == 0)
		return "clang";
	return NULL;
}

static int64_t now_ms(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
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

static int helper_spawn(const struct compile_config *config, char *const argv[],
			const int write_ends[2], pid_t *ret_pid, struct fmha_error *err)
{
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	char library_path[PATH_MAX];
	char *env[4];
	sigset_t none;
	int r;

	if (helper_environment(config, library_path, sizeof(library_path), env) < 0)
		return fmha_error_set(err, FMHA_EINVAL, "library_path: too long");
	(void)sigemptyset(&none);
	(void)posix_spawn_file_actions_init(&actions);
	(void)posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
	(void)posix_spawn_file_actions_adddup2(&actions, write_ends[0], 1);
	(void)posix_spawn_file_actions_adddup2(&actions, write_ends[1], 2);
	(void)posix_spawnattr_init(&attributes);
	/* A group of its own, so that a compiler that the helper started ends with it. */
	(void)posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
	(void)posix_spawnattr_setpgroup(&attributes, 0);
	(void)posix_spawnattr_setsigmask(&attributes, &none);
	r = posix_spawn(ret_pid, config->helper, &actions, &attributes, argv, env);
	(void)posix_spawn_file_actions_destroy(&actions);
	(void)posix_spawnattr_destroy(&attributes);
	if (r != 0)
		return fmha_error_set(err, FMHA_EIO, "%s: %s", config->helper, strerror(r));
	return 0;
}

/* Takes what is there; returns false at the end of the stream. Output beyond the cap is dropped. */
static bool drain(int fd, char **text, size_t *bytes)
{
	char chunk[4096];
	ssize_t n = read(fd, chunk, sizeof(chunk));

	if (n < 0)
		return errno == EINTR || errno == EAGAIN;
	if (n == 0)
		return false;
	if (*bytes + (size_t)n <= MAX_OUTPUT_BYTES) {
		char *grown = realloc(*text, *bytes + (size_t)n + 1);

		if (!grown)
			return false;
		memcpy(grown + *bytes, chunk, (size_t)n);
		*text = grown;
		*bytes += (size_t)n;
		grown[*bytes] = '\0';
	}
	return true;
}

/* Reads both streams until they end: 0; or FMHA_ETIMEDOUT, or FMHA_ECANCELED by @stop. */
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
		for (int i = 0; i < 2; i++)
			if (fds[i].fd >= 0 && fds[i].revents &&
			    !drain(fds[i].fd, &result->text[i], &result->bytes[i]))
				fds[i].fd = -1;
	}
	return 0;
}

/* Runs the helper to its end or to the deadline. */
static int helper_run(const struct compile_config *config, char *const argv[],
		      struct helper_result *ret_result, struct fmha_error *err)
{
	uint32_t deadline_ms = config->deadline_ms ? config->deadline_ms : DEFAULT_DEADLINE_MS;
	struct helper_result result = {0};
	int out[2], errors[2], r;
	int64_t start = now_ms();
	pid_t pid;

	if (pipe2(out, O_CLOEXEC) < 0)
		return fmha_error_set(err, FMHA_EIO, "pipe: %s", strerror(errno));
	if (pipe2(errors, O_CLOEXEC) < 0) {
		(void)close(out[0]);
		(void)close(out[1]);
		return fmha_error_set(err, FMHA_EIO, "pipe: %s", strerror(errno));
	}
	r = helper_spawn(config, argv, (int[]){out[1], errors[1]}, &pid, err);
	(void)close(out[1]);
	(void)close(errors[1]);
	if (r == 0) {
		r = helper_collect(out[0], errors[0], config->stop_fd, start + deadline_ms,
				   &result);
		/* After a clean end only stragglers of the group are left to be ended: before the
		 * leader is reaped, while its number cannot belong to anybody else. */
		if (r == 0)
			(void)waitid(P_PID, (id_t)pid, &(siginfo_t){0}, WEXITED | WNOWAIT);
		(void)kill(-pid, SIGKILL);
		while (waitpid(pid, &result.status, 0) < 0 && errno == EINTR)
			;
		result.elapsed_ms = (uint32_t)(now_ms() - start);
		if (r == FMHA_ETIMEDOUT)
			r = fmha_error_set(err, r, "the compiler did not end within %u ms",
					   deadline_ms);
		else if (r < 0)
			r = fmha_error_set(err, r, "the build was cancelled");
	}
	(void)close(out[0]);
	(void)close(errors[0]);
	if (r < 0) {
		helper_result_deinit(&result);
		return r;
	}
	*ret_result = result;
	return 0;
}

int compile_version(const struct compile_config *config, const char *compiler, char ret_version[96],
		    struct fmha_error *err)
{
	char *argv[] = {(char *)config->helper, "--version", (char *)compiler,
			(char *)(config->clang ? config->clang : ""), NULL};
	_cleanup_(helper_result_deinit) struct helper_result result = {0};
	int r = helper_run(config, argv, &result, err);

	if (r < 0)
		return r;
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
	int r;

	if (config->versions && recall_version(config->versions, compiler, ret_version))
		return 0;
	r = compile_version(config, compiler, ret_version, err);
	if (r == 0 && config->versions)
		remember_version(config->versions, compiler, ret_version);
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

/* Adds every source of @dir, in the order of names, as two parts each: name and content. */
static int add_sources(const char *dir, struct cache_key_part *parts, size_t *n_parts, char **owned,
		       size_t *n_owned, struct fmha_error *err)
{
	_cleanup_(closedirp) DIR *stream = opendir(dir);
	char *names[MAX_SOURCES];
	struct dirent *item;
	size_t n = 0;
	int r = 0;

	if (!stream)
		return fmha_error_set(err, FMHA_EIO, "kernel sources %s: %s", dir, strerror(errno));
	while ((item = readdir(stream)) && n < MAX_SOURCES)
		if (is_source(item->d_name) && (names[n] = strdup(item->d_name)))
			n++;
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
	struct cache_key_part parts[4 + MAX_OPTIONS + 4 * MAX_SOURCES];
	char *owned[4 * MAX_SOURCES], above[PATH_MAX];
	size_t n_parts = 0, n_owned = 0;
	int r;

	if (request->n_options > MAX_OPTIONS)
		return fmha_error_set(err, FMHA_EINVAL, "%s: %zu options, at most %d",
				      request->kernel, request->n_options, MAX_OPTIONS);
	const char *heads[] = {CODE_FORMAT, version, request->arch, request->source};
	for (size_t i = 0; i < 4; i++)
		parts[n_parts++] = (struct cache_key_part){heads[i], strlen(heads[i])};
	for (size_t i = 0; i < request->n_options; i++)
		parts[n_parts++] = (struct cache_key_part){request->options[i],
							   strlen(request->options[i])};
	r = add_sources(config->source_dir, parts, &n_parts, owned, &n_owned, err);
	(void)snprintf(above, sizeof(above), "%s/..", config->source_dir);
	if (r == 0)
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

static int read_code(const char *path, struct cache_entry *entry, struct fmha_error *err)
{
	_cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0 || st.st_size <= 0 || st.st_size > CACHE_MAX_ENTRY_BYTES)
		return fmha_error_set(err, FMHA_EIO, "%s: the compiler left no code object",
				      entry->info.kernel);
	entry->code = malloc((size_t)st.st_size);
	if (!entry->code)
		return fmha_error_set(err, FMHA_ENOMEM, "%s: out of memory", entry->info.kernel);
	if (read(fd, entry->code, (size_t)st.st_size) != st.st_size)
		return fmha_error_set(err, FMHA_EIO, "%s: cannot read the code object",
				      entry->info.kernel);
	entry->code_bytes = (size_t)st.st_size;
	return 0;
}

static int judge(const struct helper_result *result, const char *output, struct cache_entry *entry,
		 struct fmha_error *err)
{
	char line[160] = "";

	if (WIFSIGNALED(result->status))
		return fmha_error_set(err, FMHA_EIO, "%s for %s: the compiler died of signal %d",
				      entry->info.kernel, entry->info.arch,
				      WTERMSIG(result->status));
	if (WEXITSTATUS(result->status) != 0) {
		first_error(entry->log, line, sizeof(line));
		return fmha_error_set(err, FMHA_EINVAL, "%s: %s", entry->info.kernel, line);
	}
	parse_info(result->text[0] ? result->text[0] : "", &entry->info);
	return read_code(output, entry, err);
}

int compile_run(const struct compile_config *config, const struct compile_request *request,
		const char *version, struct cache_entry **ret_entry, struct fmha_error *err)
{
	const char *compiler = request->compiler ? request->compiler
						 : compile_default(request->arch);
	uint64_t memory = config->memory_bytes ? config->memory_bytes : DEFAULT_MEMORY_BYTES;
	uint32_t deadline_ms = config->deadline_ms ? config->deadline_ms : DEFAULT_DEADLINE_MS;
	_cleanup_(helper_result_deinit) struct helper_result result = {0};
	_cleanup_(cache_entry_freep) struct cache_entry *entry = NULL;
	char folder[] = "/tmp/fmhad-compile-XXXXXX", output[64], limits[64];
	_cleanup_(freep) char **argv = NULL;
	int r;

	if (!compiler)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "arch",
					    "arch %s: no compiler for it", request->arch);
	if (request->n_options > MAX_OPTIONS)
		return fmha_error_set(err, FMHA_EINVAL, "%s: too many options", request->kernel);
	entry = calloc(1, sizeof(*entry));
	argv = calloc(N_HEADS + request->n_options + 1, sizeof(*argv));
	if (!entry || !argv)
		return fmha_error_set(err, FMHA_ENOMEM, "compile: out of memory");
	if (!mkdtemp(folder))
		return fmha_error_set(err, FMHA_EIO, "%s: %s", folder, strerror(errno));
	(void)snprintf(output, sizeof(output), "%s/code", folder);
	(void)snprintf(limits, sizeof(limits), "%llu,%u", (unsigned long long)memory,
		       deadline_ms / 1000 + 1);
	const char *const heads[N_HEADS] = {
		config->helper,  compiler, request->arch, config->source_dir,
		request->source, output,   limits,        config->clang ? config->clang : ""};
	memcpy(argv, heads, sizeof(heads));
	for (size_t i = 0; i < request->n_options; i++)
		argv[N_HEADS + i] = (char *)request->options[i];
	r = helper_run(config, argv, &result, err);
	if (r == 0) {
		(void)snprintf(entry->info.kernel, sizeof(entry->info.kernel), "%s",
			       request->kernel);
		(void)snprintf(entry->info.arch, sizeof(entry->info.arch), "%s", request->arch);
		(void)snprintf(entry->info.compiler, sizeof(entry->info.compiler), "%s", version);
		entry->info.compile_ms = result.elapsed_ms;
		entry->log = result.text[1] ? result.text[1] : strdup("");
		result.text[1] = NULL;
		r = entry->log ? judge(&result, output, entry, err)
			       : fmha_error_set(err, FMHA_ENOMEM, "compile: out of memory");
	}
	(void)unlink(output);
	(void)rmdir(folder);
	if (r == 0 || (r == FMHA_EINVAL && entry->log)) {
		*ret_entry = entry;
		entry = NULL;
	}
	return r;
}

int compile_cached(const struct compile_config *config, struct cache *cache,
		   const struct compile_request *request, struct cache_entry **ret_entry,
		   bool *ret_hit, struct fmha_error *err)
{
	const char *compiler = request->compiler ? request->compiler
						 : compile_default(request->arch);
	struct cache_key key;
	char version[96];
	bool hit = true;
	int lock, r;

	if (!compiler)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "arch",
					    "arch %s: no compiler for it", request->arch);
	r = known_version(config, compiler, version, err);
	if (r == 0)
		r = compile_key(config, request, version, &key, err);
	if (r < 0)
		return r;
	if (cache_load(cache, &key, ret_entry) != 0) {
		lock = cache_lock(cache, &key, err);
		if (lock < 0 && lock != FMHA_EPERM)
			return lock;
		/* Somebody else may have built it while we waited. */
		hit = lock >= 0 && cache_load(cache, &key, ret_entry) == 0;
		if (!hit)
			r = compile_run(config, request, version, ret_entry, err);
		if (!hit && r == 0 && lock >= 0)
			r = cache_store(cache, &key, *ret_entry, err);
		if (lock >= 0)
			cache_unlock(cache, &key, lock);
	}
	if (ret_hit)
		*ret_hit = hit;
	return r;
}
