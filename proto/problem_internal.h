/* SPDX-License-Identifier: MIT */
/* problem_internal.h: what problem_check.c and problem_tensors.c share. */
#ifndef PROTO_PROBLEM_INTERNAL_H
#define PROTO_PROBLEM_INTERNAL_H

#include <proto/problem.h>

#define OP_BIT(op)    (1u << (op))
#define OP_FORWARD    OP_BIT(FMHA_FORWARD)
#define OP_BACKWARD   OP_BIT(FMHA_BACKWARD)
#define OP_APPEND     OP_BIT(FMHA_APPEND_KV)
#define OP_MERGE      OP_BIT(FMHA_MERGE_STATES)
#define OPS_ATTENTION (OP_FORWARD | OP_BACKWARD)
#define OPS_ALL       (OPS_ATTENTION | OP_APPEND | OP_MERGE)

/* Whether the extents that are said, of a settled problem, are the role's. Return: 0 or FMHA_EINVAL. */
int problem_check_extents(const struct fmha_problem *problem, enum fmha_tensor_role role,
			  struct fmha_error *err);

/* Each tensor: needed, allowed or superfluous; type, strides, alignment, extent. */
int problem_check_tensors(const struct fmha_problem *problem, struct fmha_error *err);

#endif
