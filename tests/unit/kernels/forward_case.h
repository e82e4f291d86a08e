/* SPDX-License-Identifier: MIT */
/*
 * forward_case.h: random forward problems for the kernel tests: an argument struct whose tensors
 * are real memory, everything that a kernel must not read filled with NaN (i8: with its ends), everything that it must
 * not write filled with a pattern that is checked afterwards.
 */
#ifndef FMHA_TEST_FORWARD_CASE_H
#define FMHA_TEST_FORWARD_CASE_H

#include <stddef.h>
#include <stdint.h>

#include <kernels/abi.h>
#include <kernels/cpu_kernels.h>

#include "mask_case.h"

/* splitmix64: small, and the same everywhere. */
struct random {
	uint64_t state;
};
uint64_t random_next(struct random *r);
/* An integer in [lo, hi]. */
int32_t random_int(struct random *r, int32_t lo, int32_t hi);
/* 1 with probability 1 / n. */
int random_chance(struct random *r, int n);
/* A type of 8 bits that K and V have under a 16-bit Q. */
int32_t random_kv_dtype(struct random *r);
float random_uniform(struct random *r, float lo, float hi);
float random_normal(struct random *r);

#define CASE_MAX_ALLOCATIONS 48

/* What to make. Zero: nothing special; the generator fills one in at random. */
struct forward_options {
	uint32_t family; /* enum abi_family */
	int32_t dtype, o_dtype;
	int32_t kv_dtype; /* of K and V under a 16-bit Q, or 0 */
	int32_t batch, seqlen_q, seqlen_k, nhead_k, group, hdim_q, hdim_v;
	int varlen;    /* group mode: random lengths up to seqlen_q and seqlen_k */
	int padded;    /* group mode with padding between sequences, or per-batch lengths */
	int layout;    /* 0: BSHD, 1: BHSD, 2: strange strides */
	int v_columns; /* V column-major */
	int mask;      /* enum abi_mask */
	int window_left, window_right, sink_tokens;
	int bias; /* 0: none, 1: float, 2: type of q; broadcast at random */
	int alibi;
	int sink;
	float soft_cap, p_drop;
	int store_bytes;
	int n_splits, split_size;
	int page_size; /* 0: contiguous */
	int indptr;    /* page table form */
	int vectorized;
	int leftpad, batch_index;
	/* 0: none, 1: per tensor, 2: per head, 3: blocks, 4: keys, 5: per page (k, v), 6: per slot */
	int descale;
	int powers;   /* factors are powers of two */
	int one_sign; /* K and V are positive: nothing cancels */
	int min_seqlen_q;
	float scale;
	float magnitude; /* of Q and K; 0: 1 */
	enum mask_kind mask_data;
	int n_endpoints;
};

struct forward_case {
	struct abi_fwd_args args;
	struct forward_options options;
	struct mask_shape mask_shape;
	void *allocations[CASE_MAX_ALLOCATIONS];
	size_t sizes[CASE_MAX_ALLOCATIONS];
	int n_allocations;
	size_t o_bytes, lse_bytes, randval_bytes, o_acc_bytes;
	struct judgement *judgement; /* the reference's, once it was asked */
};

void forward_options_random(struct forward_options *o, struct random *r, uint32_t family,
			    int32_t dtype);
void forward_options_print(const struct forward_options *o);

/* Never fails: tests abort when memory is exhausted. */
void forward_case_init(struct forward_case *c, const struct forward_options *o, struct random *r);
void forward_case_deinit(struct forward_case *c);

/* Runs every phase, all tasks in turn, in workspace and scratch of exactly the sizes asked for. */
void kernel_run(const struct cpu_kernel *kernel, const void *args, int n_threads);

/*
 * Runs @kernel and compares O, LSE and stored bytes with the reference. Returns 0, or -1 after
 * printing what differs. @tolerance: multiplies the accuracy bar, 1 normally.
 */
int forward_case_check(struct forward_case *c, const struct cpu_kernel *kernel, float tolerance);

/* Runs @kernel and looks only at what it must not write. */
int forward_case_check_untouched(struct forward_case *c, const struct cpu_kernel *kernel);

#endif
