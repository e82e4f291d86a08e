/* SPDX-License-Identifier: MIT */
/*
 * census.h: which shapes this worker serves: how often, for how long, for whom. The one record that
 * tuning, metrics and warming use.
 *
 * Bounded: a user has CENSUS_PER_USER shapes, all together CENSUS_SHAPES; the one that took least
 * time goes, of the user who has most. So nobody's flood of shapes drives out another user's.
 */
#ifndef FMHAD_WORKER_CENSUS_H
#define FMHAD_WORKER_CENSUS_H

#include <stdbool.h>
#include <stdint.h>

#include <dispatch/plan.h>

#define CENSUS_SHAPES   1024
#define CENSUS_PER_USER 64

struct census_entry {
	uint32_t uid;
	uint32_t generation; /* of the place: whoever keeps a handle sees that it is another's */
	char shape[PLAN_SHAPE_BYTES];
	struct fmha_problem problem;    /* the first of that shape, wherever it lay */
	uint64_t n_runs, ns;            /* of the device */
	uint64_t timed_ns;              /* of ns, for which the roof allows... */
	double roof_ns;                 /* ...so much */
	char kernel[PLAN_KERNEL_BYTES]; /* the main one of the latest plan; empty: it needs none */
	int32_t n_splits;
	bool is_general; /* that kernel's loop is for every arch */
	bool settled;    /* nothing is left to be measured by itself */
};

/* All zero is an empty one. */
struct census {
	struct census_entry
		*entries[CENSUS_SHAPES]; /* made when first used; NULL, or n_runs 0: free */
	uint32_t n_used;
	uint64_t n_evicted;
};

/* Where a plan's runs are counted. All zero: not looked up yet. */
struct census_handle {
	uint32_t place, generation;
};

/* Where a problem's tensors lie is nobody's business: each gets a buffer of its own number. */
void census_forget_places(struct fmha_problem *problem);
/* Runs of one plan. */
struct census_runs {
	uint64_t n, ns; /* ns: of all of them */
	double roof_ns; /* that the roof allows for them; 0: it is not known, or ns is a guess */
};
void census_count(struct census *census, uint32_t uid, const struct plan *plan,
		  const struct census_runs *runs, struct census_handle *handle);
/* NULL: it has been dropped, or never was. */
const struct census_entry *census_get(const struct census *census,
				      const struct census_handle *handle);
/* NULL: it has been dropped, or never was. */
struct census_entry *census_find(struct census *census, uint32_t uid, const char *shape);
/* Finds a shape's entry, of whomever. */
struct census_entry *census_any(struct census *census, const char *shape);
/* All entries are to be measured again: kernels have come or gone. */
void census_unsettle(struct census *census);
/* Finds what is to be measured next: of the users whose shapes are not settled the one after @*uid, and of
 * that user's the one that took most time. NULL: nothing. */
struct census_entry *census_next(struct census *census, uint32_t *uid);
/* The shapes of @uid, or (@all) of everybody, what took most time first. Entries stay where they are until
 * the process's end, but may become another shape's: their generation tells. Return: how many. */
uint32_t census_list(const struct census *census, uint32_t uid, bool all,
		     const struct census_entry *ret_entries[CENSUS_SHAPES]);

#endif
