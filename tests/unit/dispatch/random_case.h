/* SPDX-License-Identifier: MIT */
/* random_case.h: one random problem with its data, and the verdict on its results. */
#ifndef TESTS_DISPATCH_RANDOM_CASE_H
#define TESTS_DISPATCH_RANDOM_CASE_H

#include "oracle.h"

#include "cpu_runner.h"

struct runner {
	struct fixture f;
	unsigned first_seed, seed;
	bool tiny;  /* sizes of a few elements: thousands of problems a second */
	bool tiled; /* head dims and lengths that a GPU's matrix cores are used for */
	struct cpu_runner cpu;
	uint8_t *before[FMHA_N_TENSORS]; /* the written tensors' bytes, before the run */
};

int random_pick(struct runner *r, int n);
bool random_chance(struct runner *r, int percent);
/* A problem for r->f.problem.op. */
void random_problem(struct runner *r);
/* Numbers into everything that exists, NaN into everything else. The plan is built. */
void random_data(struct runner *r);

/* Every result against the oracle, every other byte against r->before. */
void judge_run(struct runner *r);

#endif
