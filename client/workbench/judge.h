/* SPDX-License-Identifier: MIT */
/*
 * judge.h: results against kernels/reference, which computes in double.
 *
 * The bar is the contract's: for f16 and bf16 twice the error that the same formula makes when it
 * is evaluated in that type with float sums, plus half a unit in the last place of the largest
 * value (no result in that type can be closer); for f32 1e-5 of the largest value. Where no rounded
 * reference exists (backward) a bound relative to the largest value stands in.
 */
#ifndef CTL_JUDGE_H
#define CTL_JUDGE_H

#include "ctl.h"

#define JUDGE_MAX_OUTPUTS 8

struct judge_verdict {
	uint32_t role;
	bool ok;
	double max_error; /* of an element; +inf when a NaN or infinity is wrong */
	double bar;
	int64_t at; /* index of the worst element in the packed tensor */
	double expected, got;
	double norm, expected_norm; /* of all elements that were compared: square root of the sum
				     * of squares */
	double distance;            /* of the two, relative to expected_norm */
};

struct judge;

/*
 * Computes what the outputs of @problem must be. Inputs, also the cache that an append changes,
 * must be as they were before the run. The tensors are ordinary memory (`data`), index tensors
 * packed; the problem has passed problem_check(), and what integer tensors hold has been judged as
 * well, as fmhad does before a run: nothing is checked here. Runs on all cores. Return: 0,
 * FMHA_ENOTSUP for what the reference does not cover, FMHA_ENOMEM.
 */
int judge_new(const struct fmha_problem *problem, struct judge **ret_judge, struct fmha_error *err);

/* Compares the outputs of @problem, the one that was judged, after the run. Return: how many
 * verdicts there are; all of them are ok when the run was right. */
int judge_compare(const struct judge *judge, const struct fmha_problem *problem,
		  struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS]);

struct judge *judge_free(struct judge *judge);

#endif
