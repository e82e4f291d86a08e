/* SPDX-License-Identifier: MIT */
/*
 * backward_case.h: random backward problems with every feature, their reference gradients, and a
 * run of the three CPU stages on them.
 */
#ifndef TEST_KERNELS_BACKWARD_CASE_H
#define TEST_KERNELS_BACKWARD_CASE_H

#include <stdbool.h>
#include <stdint.h>

#include <kernels/cpu_level.h>

#include "mask_case.h"

#define MAX_BATCH 6

/* Zero means: not wanted, except for the sizes. */
struct backward_case {
	uint32_t dtype;
	int32_t batch, nhead_q, nhead_k, seqlen_q, seqlen_k, hdim_q, hdim_v;
	uint32_t mask;
	int32_t window_left, window_right; /* used with a mask */
	int32_t sink_tokens;
	float scale; /* 0: 1 / sqrt(hdim_q); use zero_scale for 0 */
	bool zero_scale;
	float soft_cap, p_drop;
	bool alibi, sink, bias;
	bool bias_batch, bias_head, bias_row; /* broadcast over these axes */
	bool bias_narrow;                     /* bias in dtype instead of f32 */
	bool randval;                         /* bytes stored by the forward pass */
	bool group, padded; /* padded: logical lengths shorter than physical ones */
	bool head_major;    /* BHSD instead of BSHD */
	float magnitude;    /* of q and k; 0: 1 */
	enum mask_kind mask_data;
	int32_t n_endpoints;
	int32_t split_keys;           /* of a split of dq_acc; 0: all */
	enum cpu_level forward_level; /* whose kernel makes O and LSE; 0: the reference does */
	int32_t lengths_q[MAX_BATCH], lengths_k[MAX_BATCH]; /* group mode: physical; 0: derived */
};

struct backward_problem {
	struct backward_case c;
	struct abi_bwd_args args;
	struct mask_shape mask_shape;
	int32_t seqstart_q[MAX_BATCH + 1], seqstart_k[MAX_BATCH + 1];
	int32_t seqlen_q[MAX_BATCH], seqlen_k[MAX_BATCH];
	int64_t rows_q, rows_k; /* of the packed or batched tensors */
	int64_t n_q, n_k, n_v, n_o, n_bias, n_dbias, dq_acc_floats;
	int32_t nsplits[MAX_BATCH];
	abi_i64 dq_acc_offsets[MAX_BATCH + 1];
	double *dq, *dk, *dv, *dbias, *dsink; /* of the reference; dbias summed */
};

/* Builds tensors, runs the reference forward and backward. */
struct backward_problem *backward_problem_new(const struct backward_case *c, uint64_t seed);
struct backward_problem *backward_problem_free(struct backward_problem *p);

/* Gradient tensors back to a byte pattern that no kernel writes. */
void backward_problem_poison(struct backward_problem *p);

/* The three stages at @level. */
void backward_problem_run(struct backward_problem *p, enum cpu_level level, int n_threads);

/* Every gradient against the reference, and padding untouched. @tolerance is relative to the
 * largest absolute value of each gradient. Prints and fails on a difference. */
void backward_problem_check(const struct backward_problem *p, double tolerance);

/* Only that padding is untouched. */
void backward_problem_check_padding(const struct backward_problem *p);

/* A hash of all gradient bytes. */
uint64_t backward_problem_hash(const struct backward_problem *p);

/* Every feature with some probability. */
void backward_case_random(struct backward_case *c, uint64_t seed);

/* Named in a failure's message when it is not 0. */
extern uint64_t backward_case_seed;

double backward_tolerance(uint32_t dtype);

#endif
