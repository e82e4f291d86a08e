/* SPDX-License-Identifier: MIT */
/*
 * check_grad.h: gradients against the loss itself. An element of Q, K or V is moved by eps both ways, and
 * the loss, the sum of O times dO in double precision, says what its gradient is: no formula of backward is
 * believed, neither the kernels' nor the reference's.
 */
#ifndef CTL_CHECK_GRAD_H
#define CTL_CHECK_GRAD_H

#include "judge.h"

#define CHECK_GRAD_ELEMENTS 32 /* of each tensor; of smaller ones all */

struct check_grad {
	uint32_t role;    /* dq, dk, dv */
	int64_t n;        /* elements that were moved */
	double l2;        /* of the differences, relative to that of the gradient there */
	double max, mean; /* of the differences */
	double allowed;   /* for the largest: the kernels' bar and what eps leaves open */
	double open;      /* the latter: from moving by half as much */
	bool ok;
};

/*
 * @inputs:  in ordinary memory, as before the run; the moved elements are put back
 * @outputs: after the run
 * @bars:    what judge_compare() said of the same run, @n_bars of them
 * Return: 0, FMHA_EINVAL (eps), FMHA_ENOTSUP (what is in the loss besides O), FMHA_ENOMEM.
 */
int check_grad(const struct fmha_problem *inputs, const struct fmha_problem *outputs,
	       const struct judge_verdict *bars, int n_bars, double eps, uint64_t seed,
	       struct check_grad ret[3], struct fmha_error *err);

#endif
