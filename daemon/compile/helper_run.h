/* SPDX-License-Identifier: MIT */
/* helper_run.h: one run of the helper program, fmhad-compile, to its end or its deadline. */
#ifndef FMHAD_COMPILE_HELPER_RUN_H
#define FMHAD_COMPILE_HELPER_RUN_H

#include <compile/compile.h>

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

/*
 * @code: borrowed, becomes HELPER_CODE_FD; -1: none
 * Return: 0, whatever the helper's exit status; FMHA_EIO (it cannot be started), FMHA_ETIMEDOUT,
 * FMHA_ECANCELED.
 */
int helper_run(const struct compile_config *config, char *const argv[], int code,
	       struct helper_result *ret_result, struct fmha_error *err);
void helper_result_deinit(struct helper_result *result);

/* With the default in place. */
uint32_t compile_deadline_ms(const struct compile_config *config);

#endif
