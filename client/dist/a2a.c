/* SPDX-License-Identifier: MIT */
/*
 * a2a.c: each rank gives all others some heads of its rows and gets its own heads of theirs; computes all
 * rows; and gives the rows back. A KV head that several ranks read goes to each of them.
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* A tensor of all rows and some heads, and its blocks. */
struct dealt {
	int32_t heads, hdim, repeats; /* heads: here; repeats: ranks that read one of them */
	size_t size;                  /* bytes an element */
	char *whole, *blocks;
};

enum { Q, K, V, O, LSE, D_O, DQ, DK, DV, N_TENSORS };

static int dealt_init(struct fmha_dist_plan *plan, struct dealt *d, int32_t heads, int32_t hdim,
		      size_t size, struct fmha_error *err)
{
	int32_t n = plan->n_ranks;

	d->repeats = heads < n ? n / heads : 1;
	d->heads = heads < n ? 1 : heads / n;
	d->hdim = hdim;
	d->size = size;
	d->whole = dist_alloc(err, (size_t)plan->p.batch * (size_t)plan->p.seqlen,
			      (size_t)d->heads * (size_t)hdim * size);
	d->blocks = dist_alloc(err, dist_block(plan, d->heads, hdim) * (size_t)n, size);
	return d->whole && d->blocks ? 0 : FMHA_ENOMEM;
}

/* Row @i of block @rank. */
static char *block_row(const struct fmha_dist_plan *plan, const struct dealt *d, int rank,
		       int32_t b, int32_t i)
{
	size_t at = ((size_t)rank * (size_t)plan->p.batch + (size_t)b) * (size_t)plan->most +
		    (size_t)i;

	return d->blocks + at * (size_t)d->heads * (size_t)d->hdim * d->size;
}

static int exchange(struct fmha_dist_plan *plan, struct dealt *d, struct fmha_error *err)
{
	int n = (int)(dist_block(plan, d->heads, d->hdim) * d->size);

	return dist_mpi(err, MPI_Alltoall(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, d->blocks, n,
					  MPI_BYTE, plan->comm));
}

/* This rank's rows of all heads: all rows of this rank's heads. */
static int to_heads(struct fmha_dist_plan *plan, struct dealt *d, struct dense from,
		    struct fmha_error *err)
{
	size_t n = (size_t)d->heads * (size_t)d->hdim * d->size;
	int r;

	for (int rank = 0; rank < plan->n_ranks; rank++)
		for (int32_t b = 0; b < plan->p.batch; b++)
			for (int32_t i = 0; i < from.rows; i++) {
				size_t row = ((size_t)b * (size_t)from.rows + (size_t)i) *
					     (size_t)from.row_stride * d->size;

				memcpy(block_row(plan, d, rank, b, i),
				       from.data + row + (size_t)(rank / d->repeats) * n, n);
			}
	r = exchange(plan, d, err);
	dist_whole_from_blocks(plan, d->size, d->whole, d->blocks, d->heads, d->hdim);
	return r;
}

/* LSE [batch, heads, rows] as a dense tensor of one element a head, or back. */
static void turn_lse(const struct fmha_dist_plan *plan, float *by_head, float *by_row,
		     int32_t heads, int32_t rows, bool to_rows)
{
	for (int32_t b = 0; b < plan->p.batch; b++)
		for (int32_t h = 0; h < heads; h++)
			for (int32_t i = 0; i < rows; i++) {
				size_t head = ((size_t)b * (size_t)heads + (size_t)h) *
						      (size_t)rows +
					      (size_t)i;
				size_t row = ((size_t)b * (size_t)rows + (size_t)i) *
						     (size_t)heads +
					     (size_t)h;

				if (to_rows)
					by_row[row] = by_head[head];
				else
					by_head[head] = by_row[row];
			}
}

/* to_heads() backwards. Of repeated heads each rank has a gradient: they are added up in float. */
static int to_rows(struct fmha_dist_plan *plan, struct dealt *d, struct dense to, float *sum,
		   struct fmha_error *err)
{
	size_t n = (size_t)d->heads * (size_t)d->hdim;
	int r;

	dist_blocks_from_whole(plan, d->size, d->blocks, d->whole, d->heads, d->hdim);
	r = exchange(plan, d, err);
	for (int32_t b = 0; b < plan->p.batch; b++)
		for (int32_t i = 0; i < to.rows; i++)
			for (int rank = 0; rank < plan->n_ranks; rank += d->repeats) {
				size_t row = ((size_t)b * (size_t)to.rows + (size_t)i) *
					     (size_t)to.row_stride * d->size;
				char *into = to.data + row +
					     (size_t)(rank / d->repeats) * n * d->size;

				if (d->repeats == 1) {
					memcpy(into, block_row(plan, d, rank, b, i), n * d->size);
					continue;
				}
				memset(sum, 0, n * sizeof(float));
				for (int k = 0; k < d->repeats; k++) {
					dist_widen(plan, sum + n,
						   block_row(plan, d, rank + k, b, i), n);
					for (size_t e = 0; e < n; e++)
						sum[e] += sum[n + e];
				}
				dist_narrow(plan, into, sum, n);
			}
	return r;
}

static int deal_init(struct fmha_dist_plan *plan, bool backward, struct dealt *d,
		     struct fmha_error *err)
{
	const struct fmha_dist_problem *p = &plan->p;
	const struct {
		int32_t heads, hdim;
	} of[N_TENSORS] = {
		{p->nhead_q, p->hdim_q}, {p->nhead_k, p->hdim_q}, {p->nhead_k, p->hdim_v},
		{p->nhead_q, p->hdim_v}, {p->nhead_q, 1},         {p->nhead_q, p->hdim_v},
		{p->nhead_q, p->hdim_q}, {p->nhead_k, p->hdim_q}, {p->nhead_k, p->hdim_v}};
	int r = 0;

	for (int i = 0; i < (backward ? N_TENSORS : D_O); i++)
		r = dist_first(r, dealt_init(plan, &d[i], of[i].heads, of[i].hdim,
					     i == LSE ? sizeof(float) : plan->element, err));
	return r;
}

static struct dense whole_of(const struct fmha_dist_plan *plan, const struct dealt *d)
{
	return dist_dense(d->whole, plan->p.seqlen, d->heads, d->hdim);
}

static int compute(struct fmha_dist_plan *plan, bool backward, struct dealt *d, float *lse,
		   struct fmha_error *err)
{
	struct fmha_dist_interval all = {0, plan->p.seqlen};
	struct call call = {.q = whole_of(plan, &d[Q]),
			    .k = whole_of(plan, &d[K]),
			    .v = whole_of(plan, &d[V]),
			    .o = whole_of(plan, &d[O]),
			    .lse = lse,
			    .lse_heads = d[Q].heads,
			    .lse_rows = plan->p.seqlen};
	struct piece piece;

	if (backward) {
		call.d_o = whole_of(plan, &d[D_O]);
		call.dq = whole_of(plan, &d[DQ]);
		call.dk = whole_of(plan, &d[DK]);
		call.dv = whole_of(plan, &d[DV]);
	}
	(void)dist_piece(all, 0, all, 0, plan->p.window_left, plan->p.window_right, &piece);
	return dist_compute(plan, backward, &call, &piece, err);
}

/* @lse: of this rank's heads, all rows; @mine: of its rows, all heads, as a dense tensor. */
static int a2a_run(struct fmha_dist_plan *plan, bool backward, struct call *call, struct dealt *d,
		   float *lse, float *mine, float *sum, struct fmha_error *err)
{
	struct dense dense_lse = dist_dense(mine, call->lse_rows, call->lse_heads, 1);
	int32_t heads = d[LSE].heads;
	int r = to_heads(plan, &d[Q], call->q, err);

	r = dist_first(r, to_heads(plan, &d[K], call->k, r ? NULL : err));
	r = dist_first(r, to_heads(plan, &d[V], call->v, r ? NULL : err));
	if (backward) {
		turn_lse(plan, call->lse, mine, call->lse_heads, call->lse_rows, true);
		r = dist_first(r, to_heads(plan, &d[O], call->o, r ? NULL : err));
		r = dist_first(r, to_heads(plan, &d[LSE], dense_lse, r ? NULL : err));
		r = dist_first(r, to_heads(plan, &d[D_O], call->d_o, r ? NULL : err));
		turn_lse(plan, lse, (float *)d[LSE].whole, heads, plan->p.seqlen, false);
	}
	if (r == 0)
		r = compute(plan, backward, d, lse, err);
	if (backward) {
		r = dist_first(r, to_rows(plan, &d[DQ], call->dq, sum, r ? NULL : err));
		r = dist_first(r, to_rows(plan, &d[DK], call->dk, sum, r ? NULL : err));
		return dist_first(r, to_rows(plan, &d[DV], call->dv, sum, r ? NULL : err));
	}
	turn_lse(plan, lse, (float *)d[LSE].whole, heads, plan->p.seqlen, true);
	r = dist_first(r, to_rows(plan, &d[O], call->o, sum, r ? NULL : err));
	r = dist_first(r, to_rows(plan, &d[LSE], dense_lse, sum, r ? NULL : err));
	turn_lse(plan, call->lse, mine, call->lse_heads, call->lse_rows, false);
	return r;
}

int dist_a2a(struct fmha_dist_plan *plan, bool backward, struct call *call, struct fmha_error *err)
{
	size_t rows = (size_t)plan->p.batch * (size_t)plan->p.seqlen, n = (size_t)plan->n_ranks;
	int32_t hdim = plan->p.hdim_q > plan->p.hdim_v ? plan->p.hdim_q : plan->p.hdim_v;
	struct dealt d[N_TENSORS] = {{0}};
	float *lse = dist_alloc(err, rows * ((size_t)plan->p.nhead_q / n), sizeof(float));
	float *mine = dist_alloc(err, rows * (size_t)plan->p.nhead_q, sizeof(float));
	float *sum = dist_alloc(err, 2 * (size_t)hdim, sizeof(float));
	int r = lse && mine && sum ? 0 : FMHA_ENOMEM;

	r = dist_first(r, deal_init(plan, backward, d, err));
	r = dist_agree(plan, r, err);
	if (r == 0 && lse && mine &&
	    sum) /* they are: for readers that do not see into dist_agree() */
		r = a2a_run(plan, backward, call, d, lse, mine, sum, err);
	for (int i = 0; i < N_TENSORS; i++) {
		free(d[i].whole);
		free(d[i].blocks);
	}
	free(lse);
	free(mine);
	free(sum);
	return r;
}
