/* SPDX-License-Identifier: MIT */
/*
 * tuner.h: measures kernels on this worker's device: for administrators who ask for it, and by itself,
 * while the device is idle, for what clients have used.
 *
 * One launch at a time, only while no client's run is pending, on memory of its own. A run that comes
 * meanwhile waits for at most that launch; on a device that shares the host's memory it does not even
 * wait, since the launch is ended. What was measured goes to the registry and, through the front, to
 * disk and to the other workers of the model.
 */
#ifndef FMHAD_WORKER_TUNER_H
#define FMHAD_WORKER_TUNER_H

#include <stdbool.h>
#include <stdint.h>

#include "run/request.h"
#include "worker.h"

struct tuner;

/* Return: 0, FMHA_ENOMEM. */
int tuner_new(struct worker *worker, struct tuner **ret_tuner, struct fmha_error *err);

/* Answers request @id when it is done, or the budget is used up. Return: 0, or an error to answer. */
int tuner_request(struct session *session, uint32_t id, const struct proto_tune_params *params,
		  struct fmha_error *err);
/* The client is gone. */
void tuner_forget(struct session *session);

/* A client's run has come: the device is its. */
void tuner_yield(struct tuner *tuner);
/* The last pending run has ended. */
void tuner_resume(struct tuner *tuner);

/* Clients have launched on the device themselves, and tell so once a minute. */
void tuner_used_by_clients(struct tuner *tuner);

/* {"measured", "busy", "device_ns", ...} for status; given. */
struct cJSON *tuner_status_json(const struct tuner *tuner);

/* ---- trial ---- */

/*
 * Memory and arguments for running a plan on nobody's behalf: tensors with random numbers,
 * lengths and tables that fit the problem.
 */

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

/* ---- samples ---- */

/*
 * How often an option is run until its time is known: seldom, and never on the word of one
 * short run, which may have been disturbed.
 */

#define SAMPLES_MOST 15

/* All zero: none yet. */
struct samples {
	double us[SAMPLES_MOST];
	uint32_t n;
	uint64_t spent_ns;
};

void samples_add(struct samples *samples, uint64_t took_ns);

/* Whether another sample would change nothing. @best_us: of another option; 0: there is none */
bool samples_are_enough(const struct samples *samples, double best_us);

/* Their median, the lower one of two; there has to be a sample. */
double samples_time(struct samples *samples);

#endif
