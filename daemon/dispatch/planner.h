/* SPDX-License-Identifier: MIT */
/* planner.h: a plan in the making; what plan.c and options.c share. */
#ifndef FMHAD_DISPATCH_PLANNER_H
#define FMHAD_DISPATCH_PLANNER_H

#include "select.h"

struct planner {
	struct plan *plan;
	const struct plan_device *device;
	struct plan_report *report; /* NULL: nobody wants to know */
	struct naming naming;
	struct shape_words shapes; /* where there is a registry */
	struct fmha_error *err;
	/* The stage that was found while numbers of splits were weighed up, of the best one: it is not looked for
	 * again. */
	bool has_found;
	int32_t found_splits;
	struct plan_stage found;
};

/* Judges the problem and brings it into one form; no stage is chosen yet. Return: 0, FMHA_E*. */
int planner_start(struct planner *b, const struct fmha_problem *problem,
		  const struct plan_choice *choice);
/* The stage that appends keys, if the problem has one. */
int planner_append(struct planner *b);
/* The stage of @family that would be chosen, as the plan stands, and what from: it is not added. @ask_all: the
 * device judges all of them. @ret_report: to be given back with select_report_deinit(). Return: as
 * select_kernel(). */
int planner_peek(struct planner *b, enum abi_family family, uint32_t dtype, bool ask_all,
		 struct plan_stage *ret_stage, struct select_report *ret_report, double *ret_scale);
/* The family of a forward problem that takes all keys at once, in the order of trying. Return: false:
 * there is no number @i. */
bool planner_unsplit_family(struct planner *b, int i, enum abi_family *ret_family);

/*
 * options.c: how many splits, of those that are worth a try, will be fastest: as measured, as
 * predicted, else what split.c says. 1: none. Not for problems that say it. Return: 0, FMHA_ENOMEM.
 */
int options_choose_splits(struct planner *b, struct split_choice *ret_split);
/* Begins as the planner that has looked at the same request did. Return: whether there is one. */
bool options_take_looking(struct planner *b, const struct fmha_problem *problem);
/* Was a backward pipeline that sums dQ in the workspace measured as the fastest? */
bool options_prefer_buffered_dq(struct planner *b);

#endif
