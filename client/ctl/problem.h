/* SPDX-License-Identifier: MIT */
/* problem.h: attention problems from command line options, shared by run, plan and verify. */
#ifndef CTL_PROBLEM_H
#define CTL_PROBLEM_H

#include <getopt.h>

#include "ctl.h"

/* What getopt_long() returns for the options below. */
enum problem_option {
	PROBLEM_CAUSAL = 2000,
	PROBLEM_MASK,
	PROBLEM_WINDOW,
	PROBLEM_SINK_TOKENS,
	PROBLEM_SCALE,
	PROBLEM_SOFTCAP,
	PROBLEM_DROPOUT,
	PROBLEM_SEED,
	PROBLEM_OFFSET,
	PROBLEM_DETERMINISTIC,
	PROBLEM_SPLITS,
	PROBLEM_SPLIT_SIZE,
	PROBLEM_PAGE_SIZE,
	PROBLEM_KV_LAYOUT,
	PROBLEM_ROPE,
	PROBLEM_LAST
};

/* Kernels that options name, for fmha_plan_options. */
struct problem_kernels {
	uint32_t n;
	const char *names[FMHA_MAX_STAGES]; /* borrowed */
};

extern const struct option problem_long_options[];
extern const size_t n_problem_long_options;

#define PROBLEM_HELP                                                                               \
	"  --causal         the same as --mask bottom_right --window -1,0\n"                       \
	"  --mask M         none, top_left or bottom_right: the corner that the band is tied to\n" \
	"  --window L,R     columns visible left and right of the diagonal, -1: all\n"             \
	"  --sink-tokens N  leading keys visible left of any window\n"                             \
	"  --scale S        factor on Q K^T (default 1/sqrt(hdim_q))\n"                            \
	"  --softcap C      C * tanh(S / C)\n"                                                     \
	"  --dropout P      probability of dropping; --seed N, --offset N: its state\n"            \
	"  --deterministic  backward: the same bits on every run\n"                                \
	"  --splits N       split-KV into exactly N parts (1: never); --split-size KEYS\n"         \
	"  --page-size N    the cache is paged; --kv-layout linear|vectorized\n"                   \
	"  --rope R         interleaved or half: rotary embedding of what is appended\n"
#define PROBLEM_KERNEL_HELP                                                                        \
	"  --kernel NAME    the kernel of this name and no other; once for each stage\n"

/* Whether @option is one of these; then it is applied to @problem. Return: 0, or CTL_USAGE (a line
 * is printed). */
bool problem_is_option(int option);
int problem_option(struct fmha_problem *problem, int option, const char *value);

/* --kernel NAME. Return: 0 or CTL_USAGE. */
int problem_add_kernel(struct problem_kernels *kernels, const char *name);
struct fmha_plan_options problem_plan_options(const struct problem_kernels *kernels);

/* "f32", "bf16", ... Return: 0 or CTL_USAGE. */
int problem_parse_dtype(const char *option, const char *text, uint32_t *ret_dtype);

/* "batch 2, heads 16/4, seqlen 1024/1024, hdim 128, bf16, causal" */
void problem_describe(const struct fmha_problem *problem, char *text, size_t n);

/* A getopt_long() array made of several; the caller's storage has room for @capacity. */
void options_concat(struct option *out, size_t capacity, const struct option *a, size_t n_a,
		    const struct option *b, size_t n_b);

#endif
