/* SPDX-License-Identifier: MIT */
#include "helper_run.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <proto/error.h>

#include "now.h"

#define MAX_OUTPUT_BYTES (1u << 20)

void helper_result_deinit(struct helper_result *result)
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

int helper_run(const struct compile_config *config, char *const argv[], int code,
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
