/* SPDX-License-Identifier: MIT */
/*
 * internal.h: a plan and the few things that all schedules do.
 *
 * A rank has one or two intervals of rows, in rising order. Keys lie in a buffer with intervals of their
 * own; a pair of the two is a call of attention, whose mask is a band again. Whatever travels does so in
 * blocks, one a rank, of as many rows as the rank with most has.
 */
#ifndef FMHA_DIST_INTERNAL_H
#define FMHA_DIST_INTERNAL_H

#include <stdbool.h>

#include <fmha/dist.h>

struct shares {
	int32_t n;
	struct fmha_dist_interval at[2];
	int32_t rows;
};

/* Rows [q0, q1) and keys [k0, k1) by where they lie, and the band between them. */
struct piece {
	int32_t q0, q1, k0, k1;
	uint32_t mask;
	int32_t left, right;
};

struct fmha_dist_plan {
	MPI_Comm comm;
	struct fmha_device *device;
	struct fmha_dist_problem p;
	int rank, n_ranks;
	int32_t most;          /* rows of the rank with most */
	int32_t chunks;        /* ALL_GATHER */
	size_t element;        /* bytes */
	struct shares *shares; /* [n_ranks] */
};

/* A dense tensor [batch, rows, heads, hdim], or some of its heads. */
struct dense {
	char *data;
	int32_t rows, heads, hdim; /* heads: of the view */
	int64_t row_stride;        /* elements: of all heads */
};

/* The tensors of one call; absent: data NULL. LSE [batch, all heads, all rows] from its own first head. */
struct call {
	struct dense q, k, v, o, d_o, dq, dk, dv;
	float *lse;
	int32_t lse_heads, lse_rows;
};

int dist_fail(struct fmha_error *err, int code, const char *field, const char *format, ...)
	__attribute__((format(printf, 4, 5)));
int dist_mpi(struct fmha_error *err, int code);
/* The first thing that went wrong. */
static inline int dist_first(int first, int r)
{
	return first ? first : r;
}

/* Zeros; NULL and an error when there is no memory. */
void *dist_alloc(struct fmha_error *err, size_t n, size_t size);

/* @dense's heads from @first on, @n of them. */
struct dense dist_heads(const struct fmha_dist_plan *plan, struct dense whole, int32_t first,
			int32_t n);
struct dense dist_dense(const void *data, int32_t rows, int32_t heads, int32_t hdim);

/* Rows of @q against keys of @k where row i sees [i - left, i + right]. Return: whether it sees any. */
bool dist_piece(struct fmha_dist_interval q, int32_t q_at, struct fmha_dist_interval k,
		int32_t k_at, int32_t left, int32_t right, struct piece *ret_piece);

/* fmha_forward() or fmha_backward() on a piece of @call. */
int dist_compute(struct fmha_dist_plan *plan, bool backward, const struct call *call,
		 const struct piece *piece, struct fmha_error *err);

/* Numbers of @plan's type as float and back. */
void dist_widen(const struct fmha_dist_plan *plan, float *to, const void *from, size_t n);
void dist_narrow(const struct fmha_dist_plan *plan, void *to, const float *from, size_t n);

/*
 * Blocks [n_ranks][batch][most][heads][hdim] of a dense tensor's rows: of each rank's own (by_rows), or
 * all ranks' the same rows and heads of their own (by heads). @size: bytes an element.
 */
size_t dist_block(const struct fmha_dist_plan *plan, int32_t heads, int32_t hdim);
void dist_whole_from_blocks(const struct fmha_dist_plan *plan, size_t size, char *whole,
			    const char *blocks, int32_t heads, int32_t hdim);
void dist_blocks_from_whole(const struct fmha_dist_plan *plan, size_t size, char *blocks,
			    const char *whole, int32_t heads, int32_t hdim);

/* All ranks go on or none does: @r of this one; the reason of one that fails is its own. */
int dist_agree(struct fmha_dist_plan *plan, int r, struct fmha_error *err);

int dist_all_gather(struct fmha_dist_plan *plan, bool backward, struct call *call,
		    struct fmha_error *err);
int dist_a2a(struct fmha_dist_plan *plan, bool backward, struct call *call, struct fmha_error *err);
int dist_ring(struct fmha_dist_plan *plan, bool backward, struct call *call,
	      struct fmha_error *err);

/* Rows of @to from a float block [batch][most][row]. */
void dist_rows_from_block(const struct fmha_dist_plan *plan, struct dense to, const float *block,
			  size_t row);

/*
 * The sum over ranks of float blocks [n_ranks][..] that each rank has for all, as numbers of the plan's
 * type in @to [batch, rows, .., ..]: rank by rank, so that every run has the same bits.
 */
int dist_add_up(struct fmha_dist_plan *plan, float *blocks, struct dense to,
		struct fmha_error *err);

#endif
