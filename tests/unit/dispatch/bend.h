/* SPDX-License-Identifier: MIT */
/*
 * bend.h: problems on both sides of the border of what the validator accepts. A sound problem is
 * bent field by field; mending takes it back just far enough, so that most of what runs lies where
 * no well-behaved client goes.
 */
#ifndef TESTS_DISPATCH_BEND_H
#define TESTS_DISPATCH_BEND_H

#include <stdio.h>

#include "random_case.h"

/* A case of its own seed: operation, level, threads, tiny sizes. */
void bend_begin(struct runner *r, unsigned seed, enum cpu_level most);
/* The same for another device than the CPU. */
void bend_begin_on(struct runner *r, unsigned seed, const struct plan_device *device);

/* A sound problem for r->f.problem.op, then up to @most_bends changes. */
void bend_problem(struct runner *r, int most_bends);

/* Sets what problem_check() names to something more likely; true when it has become sound. */
bool bend_mend(struct runner *r);

/*
 * Fills the integer tensors of a built plan, which lie at bindings[].host, as a client would; then,
 * in some cases, puts values into them that no client should.
 */
void bend_indices(struct runner *r);
/* Writes a hostile value somewhere into one integer tensor. May race with readers. */
void bend_scribble(struct runner *r);

/* Every field that is not neutral, every tensor with its extents. */
void bend_print(const struct runner *r, FILE *file);

#endif
