/* SPDX-License-Identifier: MIT */
/*
 * ring.c: keys go from rank to rank. Each computes on those that it has; O is merged by LSE in float, and
 * in backward the sums of dK and dV follow their keys, one step behind, and arrive at home after the last.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { TAG_KEYS = 1, TAG_SUMS = 2 };

/* K, then V, of one rank's rows: [batch][most][..] each. */
struct ring {
	size_t n_k, n_v;      /* elements */
	char *keys[2], *part; /* part: a call's gradients */
	float *sums[2];       /* dK and dV of all ranks so far */
	char *rows;           /* a call's O or dQ, [batch][rows][..] */
	float *row_sum;       /* O or dQ so far */
	float *lse, *some;    /* a call's; numbers on their way */
	MPI_Request requests[4];
};

static int ring_init(struct fmha_dist_plan *plan, struct ring *g, const struct call *call,
		     bool backward, struct fmha_error *err)
{
	int32_t hdim = backward ? plan->p.hdim_q : plan->p.hdim_v;
	size_t rows = (size_t)plan->p.batch * (size_t)call->q.rows * (size_t)plan->p.nhead_q;
	size_t n, most;

	g->n_k = dist_block(plan, plan->p.nhead_k, plan->p.hdim_q);
	g->n_v = dist_block(plan, plan->p.nhead_k, plan->p.hdim_v);
	n = g->n_k + g->n_v;
	most = n > rows * (size_t)hdim ? n : rows * (size_t)hdim;
	g->rows = dist_alloc(err, rows * (size_t)hdim, plan->element);
	g->row_sum = dist_alloc(err, rows * (size_t)hdim, sizeof(float));
	g->lse = dist_alloc(err, rows, sizeof(float));
	g->some = dist_alloc(err, most, sizeof(float));
	for (int i = 0; i < 2; i++) {
		g->keys[i] = dist_alloc(err, n, plan->element);
		g->sums[i] = dist_alloc(err, backward ? n : 0, sizeof(float));
	}
	g->part = dist_alloc(err, backward ? n : 0, plan->element);
	return g->rows && g->row_sum && g->lse && g->some && g->keys[0] && g->keys[1] &&
			       g->sums[0] && g->sums[1] && g->part
		       ? 0
		       : FMHA_ENOMEM;
}

static void ring_deinit(struct ring *g)
{
	void *const all[] = {g->keys[0], g->keys[1], g->part,    g->sums[0], g->sums[1],
			     g->rows,    g->lse,     g->row_sum, g->some};

	for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
		free(all[i]);
}

static void copy_rows(const struct fmha_dist_plan *plan, char *to, struct dense from)
{
	size_t n = (size_t)from.rows * (size_t)from.row_stride * plan->element;

	for (int32_t b = 0; b < plan->p.batch; b++)
		memcpy(to + (size_t)b * (size_t)plan->most * (size_t)from.row_stride *
				       plan->element,
		       from.data + (size_t)b * n, n);
}

static int pass(struct fmha_dist_plan *plan, void *from, void *to, size_t bytes, int tag,
		MPI_Request requests[2], struct fmha_error *err)
{
	int n = plan->n_ranks, next = (plan->rank + 1) % n, before = (plan->rank + n - 1) % n;
	int r = dist_mpi(
		err, MPI_Irecv(to, (int)bytes, MPI_BYTE, before, tag, plan->comm, &requests[0]));

	return dist_first(r, dist_mpi(err, MPI_Isend(from, (int)bytes, MPI_BYTE, next, tag,
						     plan->comm, &requests[1])));
}

static int wait_for(MPI_Request requests[2], struct fmha_error *err)
{
	return dist_mpi(err, MPI_Waitall(2, requests, MPI_STATUSES_IGNORE));
}

/* O of rows [q0, q1) and its LSE join what is known of them. */
static void merge(struct fmha_dist_plan *plan, struct ring *g, const struct call *call,
		  const struct piece *piece)
{
	size_t heads = (size_t)plan->p.nhead_q, hdim = (size_t)plan->p.hdim_v,
	       rows = (size_t)call->q.rows;

	for (size_t b = 0; b < (size_t)plan->p.batch; b++)
		for (size_t i = (size_t)piece->q0; i < (size_t)piece->q1; i++)
			for (size_t h = 0; h < heads; h++) {
				float *lse = &call->lse[(b * heads + h) * rows + i];
				float part = g->lse[(b * heads + h) * rows + i], both, weight,
				      other;
				size_t at = ((b * rows + i) * heads + h) * hdim;

				if (part == -INFINITY)
					continue;
				both = fmaxf(*lse, part);
				both += logf(expf(*lse - both) + expf(part - both));
				weight = expf(*lse - both), other = expf(part - both);
				dist_widen(plan, g->some, g->rows + at * plan->element, hdim);
				for (size_t d = 0; d < hdim; d++)
					g->row_sum[at + d] = g->row_sum[at + d] * weight +
							     g->some[d] * other;
				*lse = both;
			}
}

static void add_some(struct fmha_dist_plan *plan, struct ring *g, float *to, const char *from,
		     size_t at, size_t n)
{
	dist_widen(plan, g->some, from + at * plan->element, n);
	for (size_t i = 0; i < n; i++)
		to[at + i] += g->some[i];
}

/* A call's dQ, dK and dV join the sums. */
static void add(struct fmha_dist_plan *plan, struct ring *g, const struct call *call,
		const struct piece *piece, float *sums)
{
	size_t q = (size_t)plan->p.nhead_q * (size_t)plan->p.hdim_q;
	size_t k = (size_t)plan->p.nhead_k * (size_t)plan->p.hdim_q;
	size_t v = (size_t)plan->p.nhead_k * (size_t)plan->p.hdim_v;

	for (size_t b = 0; b < (size_t)plan->p.batch; b++) {
		size_t first = b * (size_t)plan->most + (size_t)piece->k0;
		size_t n = (size_t)(piece->k1 - piece->k0);

		add_some(plan, g, g->row_sum, g->rows,
			 (b * (size_t)call->q.rows + (size_t)piece->q0) * q,
			 (size_t)(piece->q1 - piece->q0) * q);
		add_some(plan, g, sums, g->part, first * k, n * k);
		add_some(plan, g, sums + g->n_k, g->part + g->n_k * plan->element, first * v,
			 n * v);
	}
}

/* All rows against the keys of @owner, which are in @keys. */
static int compute(struct fmha_dist_plan *plan, bool backward, struct ring *g, struct call *all,
		   int owner, char *keys, float *sums, struct fmha_error *err)
{
	const struct shares *mine = &plan->shares[plan->rank], *theirs = &plan->shares[owner];
	const struct fmha_dist_problem *p = &plan->p;
	struct call call = *all;
	int32_t q_at = 0;
	int r = 0;

	call.k = dist_dense(keys, plan->most, p->nhead_k, p->hdim_q);
	call.v = dist_dense(keys + g->n_k * plan->element, plan->most, p->nhead_k, p->hdim_v);
	if (backward) {
		call.dq = dist_dense(g->rows, all->q.rows, p->nhead_q, p->hdim_q);
		call.dk = dist_dense(g->part, plan->most, p->nhead_k, p->hdim_q);
		call.dv = dist_dense(g->part + g->n_k * plan->element, plan->most, p->nhead_k,
				     p->hdim_v);
	} else {
		call.o = dist_dense(g->rows, all->q.rows, p->nhead_q, p->hdim_v);
		call.lse = g->lse;
	}
	for (int i = 0; i < mine->n; q_at += mine->at[i].end - mine->at[i].begin, i++) {
		int32_t k_at = 0;

		for (int j = 0; j < theirs->n;
		     k_at += theirs->at[j].end - theirs->at[j].begin, j++) {
			struct piece piece;

			if (!dist_piece(mine->at[i], q_at, theirs->at[j], k_at, p->window_left,
					p->window_right, &piece))
				continue;
			r = dist_compute(plan, backward, &call, &piece, err);
			if (r)
				return r;
			if (backward)
				add(plan, g, all, &piece, sums);
			else
				merge(plan, g, all, &piece);
		}
	}
	return 0;
}

static int ring_run(struct fmha_dist_plan *plan, bool backward, struct ring *g, struct call *call,
		    struct fmha_error *err)
{
	size_t n = g->n_k + g->n_v;
	int n_ranks = plan->n_ranks, r = 0;
	float *mine = g->sums[0], *theirs = g->sums[1];
	float *own = backward ? calloc(n, sizeof(float)) : NULL;

	r = dist_agree(
		plan, backward && !own ? dist_fail(err, FMHA_ENOMEM, "", "out of memory") : 0, err);
	for (int step = 0; step < n_ranks && (own || !backward); step++) {
		MPI_Request keys[2], sums[2];
		bool last = step + 1 == n_ranks;
		int owner = (plan->rank + n_ranks - step) % n_ranks;

		if (!last)
			r = dist_first(r, pass(plan, g->keys[step % 2], g->keys[(step + 1) % 2],
					       n * plan->element, TAG_KEYS, keys, r ? NULL : err));
		if (backward)
			memset(own, 0, n * sizeof(float));
		if (r == 0)
			r = compute(plan, backward, g, call, owner, g->keys[step % 2], own, err);
		if (backward) {
			/* @mine: what the rank before had added up for these keys. */
			for (size_t i = 0; i < n; i++)
				mine[i] += own[i];
			r = dist_first(r, pass(plan, mine, theirs, n * sizeof(float), TAG_SUMS,
					       sums, r ? NULL : err));
			r = dist_first(r, wait_for(sums, r ? NULL : err));
			mine = g->sums[(step + 1) % 2], theirs = g->sums[step % 2];
		}
		if (!last)
			r = dist_first(r, wait_for(keys, r ? NULL : err));
	}
	if (r == 0 && backward) {
		dist_rows_from_block(plan, call->dk, mine, (size_t)call->dk.row_stride);
		dist_rows_from_block(plan, call->dv, mine + g->n_k, (size_t)call->dv.row_stride);
	}
	free(own);
	return r;
}

int dist_ring(struct fmha_dist_plan *plan, bool backward, struct call *call, struct fmha_error *err)
{
	struct ring g = {0};
	size_t rows = (size_t)plan->p.batch * (size_t)call->q.rows * (size_t)plan->p.nhead_q;
	int r = dist_agree(plan, ring_init(plan, &g, call, backward, err), err);

	if (r == 0) {
		copy_rows(plan, g.keys[0], call->k);
		copy_rows(plan, g.keys[0] + g.n_k * plan->element, call->v);
		for (size_t i = 0; i < rows && !backward; i++)
			call->lse[i] = -INFINITY;
		r = ring_run(plan, backward, &g, call, err);
	}
	if (r == 0 && backward)
		dist_narrow(plan, call->dq.data, g.row_sum, rows * (size_t)plan->p.hdim_q);
	else if (r == 0)
		dist_narrow(plan, call->o.data, g.row_sum, rows * (size_t)plan->p.hdim_v);
	ring_deinit(&g);
	return r;
}
