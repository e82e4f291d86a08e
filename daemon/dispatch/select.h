/* SPDX-License-Identifier: MIT */
/*
 * select.h: which kernel runs a stage.
 *
 * Every kernel of the registry that has the stage's traits (what the problem asks of code) is a
 * candidate. A candidate that cannot run the problem is rejected with a reason. The others are put in order by strategies, each asked in turn until one can tell
 * two candidates apart; the first that the device accepts is taken, unless its code is known to
 * spill: then it costs more, and the first of the new order is.
 */
#ifndef FMHAD_DISPATCH_SELECT_H
#define FMHAD_DISPATCH_SELECT_H

#include <registry/registry.h>

#include "internal.h"
#include "traits.h"

#define SELECT_REASON_BYTES 112
#define SELECT_BY_NAME      "named" /* instead of a strategy */

/* A kernel that the caller named, and what became of it. */
struct select_named {
	struct kernel_spec spec;
	char reason[SELECT_REASON_BYTES]; /* of its last rejection; empty: no stage has seen it */
};

/* A problem's own word and its neighbours', the nearest first; none where no time was measured at all. */
struct shape_words {
	size_t n;
	char word[7][PROTO_SHAPE_BYTES];
};

/* One stage to find a kernel for. */
struct select_stage {
	const struct plan *plan;
	const struct plan_device *device;
	enum abi_family family;
	uint32_t dtype;
	const union abi_args *args;       /* placeholders for pointers */
	struct traits traits;             /* set by select_kernel() */
	struct select_named *named;       /* the only one that may be chosen; NULL: any may */
	const struct shape_words *shapes; /* the keys of tuned results */
	bool ask_all;       /* the device judges every candidate, not the first only */
	bool too_large;     /* set: a candidate was rejected for its workspace */
	bool any_workspace; /* none is, since then there would be no candidate */
	double scale; /* microseconds for an estimate of 1, from what was measured; 0: nothing was */
	char why[SELECT_REASON_BYTES]; /* nothing fits: what most candidates lack; empty: none was */
};

struct candidate {
	struct kernel_spec spec;
	struct registry_info info;
	bool accepted;                    /* by the checks */
	double tuned_us;                  /* measured at this shape; 0: never */
	double nearby_us;                 /* measured at the nearest shape that was; 0: never */
	double predicted_us;              /* by the model of this device; 0: there is none */
	double cost;                      /* the heuristic's, arbitrary unit, lower is better */
	double time;                      /* what counts: see estimate.c */
	uint32_t spills;                  /* bytes, as its code says; 0: none, or not seen yet */
	char reason[SELECT_REASON_BYTES]; /* of the rejection, or what speaks against it */
};

struct select_strategy {
	const char *name, *about;
	/* Negative: a first; positive: b first; 0: this strategy cannot tell. */
	int (*compare)(const struct candidate *a, const struct candidate *b);
};
/* In the order in which they are asked. */
extern const struct select_strategy select_strategies[];
extern const size_t select_n_strategies;

/* Everything that one selection saw; for explanations. */
struct select_report {
	struct candidate *candidates; /* in the order of preference, rejected ones last */
	size_t n, capacity;
	size_t n_rejected;
	long chosen;          /* index, -1: none */
	double time;          /* of the chosen one */
	size_t first;         /* the first of those that it was chosen among */
	const char *strategy; /* what put the choice before the runner-up; "only one", "named" */
	struct kernel_signature signature; /* that kernels would have */
	bool found_none;                   /* no spec has this signature */
	const char
		*lacks; /* what kernels with the problem's traits lack; NULL: nothing, or unknown */
};

void select_report_deinit(struct select_report *report);

/*
 * Fills stage's kernel, pipeline, arch and what the device adds. @report: NULL, or zeroed.
 * Return: 0, 1 when nothing fits, SELECT_NO_SPEC when the registry has no spec of the signature,
 * FMHA_ENOMEM.
 */
#define SELECT_NO_SPEC 2
int select_kernel(struct select_stage *stage, struct plan_stage *ret_stage,
		  struct select_report *report);

/*
 * estimate.c. Fills measured and estimated times of the accepted candidates, which are all that compete,
 * and @stage->scale. The second: of one whose code has turned out to spill.
 */
#define ESTIMATE_UNMEASURED 1.15 /* it has to be so much shorter to go before a measurement */
void estimate_times(struct select_stage *stage, struct candidate *candidates, size_t n);
void estimate_again(const struct select_stage *stage, struct candidate *candidate);
/* By the model, in microseconds, else by the formula, in its own unit. */
double estimate_guess(const struct candidate *candidate);
/* Where @candidate->time comes from. */
enum plan_basis estimate_basis(const struct candidate *candidate);
/* Is the kernel of @family that by which the plan's times are kept? */
bool estimate_is_main(const struct plan *plan, enum abi_family family);

/*
 * shape.c: the word under which a problem's times are kept, as plan_shape() has it, and those one step away in a
 * length, the nearest first. Two problems share one when the answer to "which kernel is fastest" is the same for
 * both as far as anybody can tell: everything that decides it is in there, lengths in steps of a quarter of a
 * power of two.
 */
void shape_words_make(const struct fmha_problem *problem, struct shape_words *ret_words);

/* Writes why a candidate is rejected. Return: false. */
__attribute__((format(printf, 2, 3))) bool select_reject(struct candidate *c, const char *fmt, ...);

/*
 * Kernels that are not this build's, where a plan asks for some: how a stage's are found, and which of them
 * can run it. The daemon has none (ck.c).
 */
struct select_foreign {
	/* As select_pairs(), over what it knows of. */
	int (*select)(struct select_stage *stage, size_t arch, struct select_report *report,
		      struct plan_stage *ret_stage);
	/* The signature that is looked for first. */
	void (*signature)(const struct select_stage *stage, struct kernel_signature *ret_signature);
	/* The reason is written on false. */
	bool (*judge)(const struct select_stage *stage, struct candidate *candidate);
};

/*
 * Of @n pairs of head dims those that hold the problem's are tried, the least padding first, until one has a
 * kernel: @add adds the candidates of each to @report by select_add(). Return: 0 chosen, 1 none; FMHA_ENOMEM.
 */
typedef int (*select_adder)(void *owner, struct select_stage *stage, size_t arch,
			    struct spec_head_dims dims, struct select_report *report);
int select_pairs(struct select_stage *stage, size_t arch, struct spec_head_dims *pairs, size_t n,
		 select_adder add, void *owner, struct select_report *report,
		 struct plan_stage *ret_stage);
int select_add(const struct select_stage *stage, const struct kernel_spec *spec,
	       const struct registry_info *info, struct select_report *report);

/* A field of a signature that a stage of one family can be of another value in than a problem. */
static inline bool select_explains(enum spec_field field)
{
	return spec_field_is_trait(field) && field != SPEC_FIELD_family &&
	       field != SPEC_FIELD_vlayout;
}

/* Does @family read that head dim? */
bool select_uses_hdim_q(enum abi_family family);
bool select_uses_hdim_v(enum abi_family family);

/* The caller's kernels while a plan is built. */
struct naming {
	uint32_t n;
	struct select_named named[PLAN_MAX_STAGES];
};

/* @choice: NULL: none. Return: 0, FMHA_EINVAL naming "kernels". */
int naming_init(struct naming *naming, const struct plan_choice *choice,
		const struct plan_device *device, struct fmha_error *err);
/* The one for @family, NULL when there is none. */
struct select_named *naming_of(struct naming *naming, enum abi_family family);
/*
 * Once the stages are there, or (@r: FMHA_ENOKERNEL) cannot be: marks those whose kernel was named.
 * Return: @r, or the reason why a named kernel runs no stage: FMHA_ENOKERNEL, FMHA_EINVAL.
 */
int naming_settle(const struct naming *naming, struct plan *plan, int r, struct fmha_error *err);

#endif
