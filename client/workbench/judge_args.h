/* SPDX-License-Identifier: MIT */
/* judge_args.h: a problem in ordinary memory as the reference's argument structs. Written apart
 * from the daemon's own mapping on purpose: two readings of base.h have to agree. */
#ifndef CTL_JUDGE_ARGS_H
#define CTL_JUDGE_ARGS_H

#include <fmha/base.h>
#include <kernels/abi.h>

/* How many elements the role's tensor has, packed. */
int64_t judge_elements(const struct fmha_problem *problem, uint32_t role);

void judge_fwd_args(const struct fmha_problem *problem, struct abi_fwd_args *ret);
void judge_bwd_args(const struct fmha_problem *problem, struct abi_bwd_args *ret);
void judge_append_args(const struct fmha_problem *problem, struct abi_appendkv_args *ret);
void judge_merge_args(const struct fmha_problem *problem, struct abi_combine_args *ret);

#endif
