/* SPDX-License-Identifier: MIT */
/* plan_offline.h: explaining a plan for a device that is not here. All that fmhactl sees of
 * dispatch. */
#ifndef FMHAD_PLAN_OFFLINE_H
#define FMHAD_PLAN_OFFLINE_H

#include <stdbool.h>
#include <stdint.h>

#include <fmha/base.h>

struct plan_offline_options {
	const char *arch;           /* "gfx942", "sm_90a", "x86_64_v4", ... */
	const char *rules;          /* NULL: what this build can run; "ck": AMD's kernels */
	bool features;              /* show what the model of times sees */
	uint32_t compute_units;     /* 0: of the arch's usual card, 8 for a CPU */
	const char *const *kernels; /* that are asked for by name, as fmha_plan_options has it */
	uint32_t n_kernels;
	int32_t *const *
		integers; /* tables by role, or NULL, of a run whose workspace is told, too; borrowed */
};

/*
 * What plan_explain() says (daemon/dispatch/explain.c describes the document) when every kernel
 * that specs/ allows on the arch is at hand. A tensor of @problem is present when its buffer is not
 * 0.
 * Sizes that only the device knows (private workspaces, dynamic LDS) are 0 in it.
 * @ret_json: given, free()
 * Return: 0; FMHA_ENOENT: no such arch; FMHA_EINVAL or FMHA_ENOTSUP: the problem; FMHA_ENOMEM,
 * FMHA_EIO.
 */
int plan_explain_offline(const struct plan_offline_options *options,
			 const struct fmha_problem *problem, char **ret_json,
			 struct fmha_error *err);

#endif
