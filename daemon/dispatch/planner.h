/* SPDX-License-Identifier: MIT */
/* planner.h: a plan in the making. */
#ifndef FMHAD_DISPATCH_PLANNER_H
#define FMHAD_DISPATCH_PLANNER_H

#include "select.h"

/* Who wants to know why a plan is as it is. */
struct plan_report {
	/* After every selection; @chosen: NULL: it found nothing. */
	void (*selected)(struct plan_report *report, const struct select_stage *stage,
			 const struct plan_stage *chosen, const struct select_report *selection);
	char split_why[SPLIT_WHY_BYTES];
	char shape[PLAN_SHAPE_BYTES]; /* the problem's own word */
};
/* plan.c: plan_build(); @report: NULL: nobody wants to know. */
int plan_build_reported(const struct fmha_problem *problem, const struct plan_choice *choice,
			const struct plan_device *device, struct plan *ret_plan,
			struct plan_report *report, struct fmha_error *err);

/* Numbers of splits that are looked at for one problem. */
#define PLANNER_MOST_SPLITS 24

/* What a number of splits promises. */
struct outlook {
	int32_t n_splits, split_size;
	double time;  /* of the best candidate; < 0: there is none */
	double scale; /* microseconds for an estimate of 1; 0: unknown here */
	bool measured, predicted;
	struct plan_stage stage; /* of that candidate */
};
struct outlooks {
	struct outlook list[PLANNER_MOST_SPLITS];
	size_t n;
};

struct planner {
	struct plan *plan;
	const struct plan_device *device;
	struct plan_report *report; /* NULL: nobody wants to know */
	struct naming naming;
	struct shape_words shapes; /* where any time was measured */
	struct fmha_error *err;
	struct outlooks outlooks; /* their stages are not looked for again */
	uint64_t before_widening; /* bytes of the workspace */
	bool groups; /* unsplit, a kernel of splits comes first: see struct split_choice */
	int32_t rest, rest_parts;      /* likewise, and then its last tiles are cut */
	char why[SELECT_REASON_BYTES]; /* nothing was found for the stage before; may be empty */
};

/* Judges the problem and brings it into one form; no stage is chosen yet. Return: 0, FMHA_E*. */
int planner_start(struct planner *b, const struct fmha_problem *problem,
		  const struct plan_choice *choice);
/* The stage that appends keys, if the problem has one. */
int planner_append(struct planner *b);
/* The stage that writes a cache of 8 bits as queries' type, where that is possible and worth it: attention is
 * then of family fwd, over keys that are not narrow. @by_rows: sequences of few rows may have stages of their own.
 * Return: 0, 1 when there is none, FMHA_E*. */
int planner_widen(struct planner *b, bool by_rows);
/* Takes it back: no loop is fast over such keys. */
void planner_unwiden(struct planner *b);
/* The stage of @family that would be chosen, as the plan stands, and what from: it is not added. @ask_all: the
 * device judges all of them. @ret_report: to be given back with select_report_deinit(). Return: as
 * select_kernel(). */
int planner_peek(struct planner *b, enum abi_family family, uint32_t dtype, bool ask_all,
		 struct plan_stage *ret_stage, struct select_report *ret_report, double *ret_scale);
/* The family of a forward problem that takes all keys at once, in the order of trying. Return: false:
 * there is no number @i. */
bool planner_unsplit_family(struct planner *b, int i, enum abi_family *ret_family);
/* Is a kernel named that takes all keys at once? */
bool planner_names_unsplit(struct planner *b);

/* Adds a stage and looks for its kernel. Return: 0, 1 when nothing fits, and no stage was added; FMHA_E*. */
int planner_add_stage(struct planner *b, enum abi_family family, uint32_t dtype);
/* Asks the device how it launches the kernel of a stage, of whose arguments more is known now. Return: whether it
 * can. */
bool planner_launch_again(struct planner *b, uint32_t index);
/* The same where there has to be one. */
int planner_need_stage(struct planner *b, enum abi_family family, uint32_t dtype);
/* Return: FMHA_ENOKERNEL, FMHA_EINVAL, with their sentences. */
int planner_no_kernel(struct planner *b, enum abi_family family, uint32_t dtype);
int planner_too_large(struct planner *b);
/* Allocates @n factors' product of bytes in the common part of the workspace. */
int planner_place(struct planner *b, int n, const int64_t *factors, uint64_t *ret_offset);
/* Allocates what the parts of split-KV hand to their combine. */
int planner_place_partials(struct planner *b);

/* ---- into how many splits keys are cut ---- */

struct planner_splits {
	int32_t n[PLANNER_MOST_SPLITS], size[PLANNER_MOST_SPLITS];
	size_t count;
};

/* Whether the problem leaves the number to the plan. */
bool planner_is_free(const struct planner *b);
void planner_take_choice(struct planner *b, const struct split_choice *split);
int planner_place_rest(struct planner *b);
struct split_device planner_split_device(const struct plan_device *device);
/* The default first, then no split, then what lies around. */
void planner_list_splits(const struct planner *b, int32_t n_default, struct planner_splits *list);
/* The candidates for so many splits. Return: 0 and a report, or as select_kernel(). */
int planner_peek_splits(struct planner *b, int32_t n, int32_t size, bool ask_all,
			struct plan_stage *ret_stage, struct select_report *report,
			double *ret_scale);

/*
 * How many splits, of those that are worth a try, will be fastest: as measured, as
 * predicted, else what split.c says. 1: none. Not for problems that say it. Return: 0, FMHA_ENOMEM.
 */
int planner_choose_splits(struct planner *b, struct split_choice *ret_split);
/* Chooses as if there were no shares. Return: whether that is to split at all. */
bool planner_without_shares(struct planner *b, struct split_choice *ret_split);
/* Begins as the planner that has looked at the same request did. Return: whether there is one. */
bool planner_take_looking(struct planner *b, const struct fmha_problem *problem);
/* Was a backward pipeline that sums dQ in the workspace measured as the fastest? */
bool planner_prefer_buffered_dq(struct planner *b);

#endif
