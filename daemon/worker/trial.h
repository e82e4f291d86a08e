/* SPDX-License-Identifier: MIT */
/*
 * trial.h: memory and arguments for running a plan on nobody's behalf: tensors with random numbers,
 * lengths and tables that fit the problem.
 */
#ifndef FMHAD_WORKER_TRIAL_H
#define FMHAD_WORKER_TRIAL_H

#include "staging.h"
#include "worker.h"

/* The tensors of one problem. All zero: none. */
struct trial_tensors {
	struct device_memory memory;
	uint64_t offsets[FMHA_N_TENSORS];
	uint64_t bytes;  /* all together */
	uint64_t filled; /* with numbers, so far */
	void *tables;    /* host copies of integer tensors, each at its offset in them */
	uint64_t table_offsets[FMHA_N_TENSORS];
	struct device_memory pattern; /* the numbers, on a device that does not share memory */
};

/* @most: bytes. Return: 0, FMHA_EQUOTA: the problem needs more; FMHA_ENOMEM. */
int trial_tensors_init(struct worker *worker, const struct plan *plan, uint64_t most,
		       struct trial_tensors *tensors, struct fmha_error *err);
void trial_tensors_deinit(struct worker *worker, struct trial_tensors *tensors);
/*
 * Fills a part of them with numbers. On a device that shares memory it is done when this returns;
 * elsewhere @launch is made one that copies. Return: true: submit @launch and call again.
 */
bool trial_tensors_fill(struct worker *worker, struct trial_tensors *tensors,
			struct device_launch *launch);

/* A plan with its arguments. All zero: none. */
struct trial_run {
	struct plan plan;
	const struct device_kernel *kernels[PLAN_MAX_STAGES];
	struct culprit culprits[PLAN_MAX_STAGES];
	struct plan_binding bindings[FMHA_N_TENSORS];
	struct plan_indices *indices;
	struct device_memory workspace;
	struct staging staging;
};

/* run->plan and run->kernels are there. Makes @launch one of the plan. Return: 0, FMHA_E*. */
int trial_run_bind(struct worker *worker, struct trial_run *run,
		   const struct trial_tensors *tensors, struct device_launch *launch,
		   struct fmha_error *err);
void trial_run_deinit(struct worker *worker, struct trial_run *run);

#endif
