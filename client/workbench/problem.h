/* SPDX-License-Identifier: MIT */
/* problem.h: attention problems from command line options, shared by run, plan and verify. */
#ifndef CTL_PROBLEM_H
#define CTL_PROBLEM_H

#include <proto/problem.h>

#include "ctl.h"

/* cli_next() returns these for the options below, or a field's number and one of the last two. */
enum problem_option {
	PROBLEM_CAUSAL = 2000,
	PROBLEM_MASK,
	PROBLEM_WINDOW,
	PROBLEM_OF_FIELD = 2100,
	PROBLEM_ALIAS_OF_FIELD = 2200,
	PROBLEM_LAST = PROBLEM_ALIAS_OF_FIELD + PROBLEM_N_FIELDS
};

/* The help of --kernel NAME, in every command that has it. */
extern const char problem_kernel_help[];

extern const struct cli_option problem_options[];
/* The first option that FMHA_PROBLEM_FIELDS gives the field; NULL: none. */
const struct cli_option *problem_option_of(enum problem_field_id field);

/* Whether @option is one of these; then it is applied to @problem. Return: 0, or CTL_USAGE (a line
 * is printed). */
bool problem_is_option(int option);
int problem_option(struct fmha_problem *problem, int option, const char *value);

/* "forward", "backward", "append", "merge". Return: 0, or -1. */
int problem_parse_op(const char *word, uint32_t *ret_op);
extern const char *const problem_op_words[4]; /* by enum fmha_op */

/*
 * O and LSE of a backward problem whose tensors lie in buffers (and its stored dropout bytes, when
 * there are any): one run forward. Return: 0 or a negative FMHA_E* code.
 */
int problem_run_forward(struct fmha_device *device, const struct fmha_problem *backward,
			struct fmha_error *err);

/* plan.c: what a command line of `fmhactl plan` describes; each tensor that is there has a buffer id of its own. argv[0]: for
 * complaints. Return: 0 or CTL_USAGE. */
int plan_read_problem(int argc, char **argv, struct fmha_problem *ret_problem);

/* @kernels: of --kernel, kept */
struct fmha_plan_options problem_plan_options(const struct cli_texts *kernels);

/* "batch 2, heads 16/4, seqlen 1024/1024, hdim 128, bf16, causal" */
void problem_describe(const struct fmha_problem *problem, char *text, size_t n);

#endif
