/* SPDX-License-Identifier: MIT */
/*
 * dist.h: attention over a sequence that the ranks of an MPI communicator share, each with some of the
 * rows. The traffic is MPI's, in the calling processes; each rank computes on a device of the daemon of
 * its own machine. libfmha_dist is built where MPI was found; fmha.torch.cp is the same for PyTorch.
 *
 * Every rank calls the same functions with the same problem, and all of them return success or all an
 * error: a rank that fails takes part in the traffic to the end. What a rank that dies does to the
 * others is MPI's to say: mpirun ends them.
 *
 * Tensors are ordinary memory, packed: q, o, d_o, dq [batch, rows, nhead_q, hdim], k, v, dk, dv [batch,
 * rows, nhead_k, hdim], lse float [batch, nhead_q, rows]; rows: this rank's, in rising order.
 */
#ifndef FMHA_DIST_H
#define FMHA_DIST_H

#include <mpi.h>

#include <fmha/fmha.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How keys come to rows. */
enum fmha_dist_schedule {
	FMHA_DIST_ALL_GATHER = 0, /* every rank gets all keys, some KV heads at a time */
	FMHA_DIST_A2A = 1,        /* rows in exchange for heads: a rank computes all rows of some */
	FMHA_DIST_P2P = 2,        /* keys go around a ring, results are merged in float */
};

/* Who has which rows. */
enum fmha_dist_shares {
	FMHA_DIST_CONTIGUOUS = 0, /* equal parts, one behind the other */
	FMHA_DIST_HEAD_TAIL =
		1, /* of 2n equal parts number r and 2n - 1 - r: equal work when causal */
};

struct fmha_dist_problem {
	uint32_t struct_size; /* set by fmha_dist_problem_init() */
	uint32_t schedule;    /* enum fmha_dist_schedule */
	uint32_t shares;      /* enum fmha_dist_shares */
	uint32_t dtype;       /* FMHA_F32, FMHA_F16 or FMHA_BF16, of all tensors but lse */
	int32_t batch;
	int32_t seqlen; /* of all ranks' rows */
	int32_t nhead_q,
		nhead_k; /* A2A: ranks divide nhead_q, and divide or are a multiple of nhead_k */
	int32_t hdim_q, hdim_v;
	int32_t window_left, window_right; /* -1: unlimited; causal is -1, 0 */
	float scale;                       /* NaN: 1 / sqrt(hdim_q) */
	float logits_soft_cap;             /* 0: none */
	uint32_t deterministic;            /* backward: the same bits on every run */
	int32_t chunks;                    /* ALL_GATHER: parts of the KV heads; 0: up to 4 */
};

/* Rows [begin, end) of the sequence. */
struct fmha_dist_interval {
	int32_t begin, end;
};

struct fmha_dist_plan;

/* Neutral values everywhere: no mask, the default scale. */
FMHA_API void fmha_dist_problem_init(struct fmha_dist_problem *problem);

/**
 * fmha_dist_plan_new() - what the ranks of @comm do for a problem; collective
 * @comm:      duplicated; every rank of it takes part
 * @device:    a CPU device of this rank's daemon; kept
 * @problem:   the same on all ranks; borrowed
 * @ret_plan:  given: fmha_dist_plan_free()
 *
 * Return: 0, or FMHA_EINVAL naming the field, FMHA_ENOTSUP (a GPU: through fmha.torch.cp with NCCL; a
 * block of more than 2 GiB for one rank), FMHA_ENOMEM, FMHA_EIO (MPI's sentence).
 */
FMHA_API int fmha_dist_plan_new(MPI_Comm comm, struct fmha_device *device,
				const struct fmha_dist_problem *problem,
				struct fmha_dist_plan **ret_plan, struct fmha_error *err);

/* Frees; collective. NULL: nothing. Return: NULL. */
FMHA_API struct fmha_dist_plan *fmha_dist_plan_free(struct fmha_dist_plan *plan);

/* This rank's rows: at most two intervals to @ret_intervals. Return: how many. */
FMHA_API int fmha_dist_rows(const struct fmha_dist_plan *plan,
			    struct fmha_dist_interval ret_intervals[2]);

/**
 * fmha_dist_forward() - O and LSE of this rank's rows; collective
 * @q, @k, @v:  borrowed
 * @o, @lse:    undefined on failure; LSE as fmha_forward() has it, of all keys
 *
 * Return: 0, the errors of fmha_forward() on this rank, FMHA_EIO for MPI's, FMHA_ECANCELED when another
 * rank failed (it has the reason), FMHA_ENOMEM.
 */
FMHA_API int fmha_dist_forward(struct fmha_dist_plan *plan, const void *q, const void *k,
			       const void *v, void *o, float *lse, struct fmha_error *err);

/* dQ, dK and dV of this rank's rows from what fmha_dist_forward() gave and dO; dK and dV are added up in
 * float. Otherwise as fmha_dist_forward(). */
FMHA_API int fmha_dist_backward(struct fmha_dist_plan *plan, const void *q, const void *k,
				const void *v, const void *o, const float *lse, const void *d_o,
				void *dq, void *dk, void *dv, struct fmha_error *err);

#ifdef __cplusplus
}
#endif

#endif
