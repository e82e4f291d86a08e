/* SPDX-License-Identifier: MIT */
/*
 * all_gather.c: every rank gets all keys, a chunk of KV heads at a time; the next chunk's blocks are under
 * way while one is computed on, as far as the MPI library moves anything between calls of it.
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* K or V of one chunk. */
struct side {
	int32_t hdim;
	char *mine,
		*blocks[2]; /* [batch][most][..], [n_ranks] of them: one chunk's and the next one's */
	char *whole, *part; /* [batch][seqlen][..]: keys, and a call's gradient of them */
	float *sum;         /* as @whole */
	float *sums;        /* as @blocks */
	MPI_Request request;
};

struct gathering {
	struct side k, v;
	int32_t heads; /* of a chunk */
};

static void side_deinit(struct side *s)
{
	void *const all[] = {s->mine, s->blocks[0], s->blocks[1], s->whole,
			     s->part, s->sum,       s->sums};

	for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
		free(all[i]);
}

static int side_init(struct fmha_dist_plan *plan, struct side *s, int32_t heads, int32_t hdim,
		     bool backward, struct fmha_error *err)
{
	size_t block = dist_block(plan, heads, hdim), n = (size_t)plan->n_ranks;
	size_t whole = (size_t)plan->p.batch * (size_t)plan->p.seqlen * (size_t)heads *
		       (size_t)hdim;

	s->hdim = hdim;
	s->mine = dist_alloc(err, block, plan->element);
	s->blocks[0] = dist_alloc(err, block * n, plan->element);
	s->blocks[1] = dist_alloc(err, block * n, plan->element);
	s->whole = dist_alloc(err, whole, plan->element);
	if (!s->mine || !s->blocks[0] || !s->blocks[1] || !s->whole)
		return FMHA_ENOMEM;
	if (!backward)
		return 0;
	s->part = dist_alloc(err, whole, plan->element);
	s->sum = dist_alloc(err, whole, sizeof(float));
	s->sums = dist_alloc(err, block * n, sizeof(float));
	return s->part && s->sum && s->sums ? 0 : FMHA_ENOMEM;
}

static int send(struct fmha_dist_plan *plan, struct side *s, struct dense from, int32_t first,
		int32_t heads, int slot, struct fmha_error *err)
{
	size_t row = (size_t)heads * (size_t)s->hdim * plan->element;
	size_t all = (size_t)from.row_stride * plan->element;
	int n = (int)(dist_block(plan, heads, s->hdim) * plan->element);

	from = dist_heads(plan, from, first, heads);
	for (int32_t b = 0; b < plan->p.batch; b++)
		for (int32_t i = 0; i < from.rows; i++)
			memcpy(s->mine + ((size_t)b * (size_t)plan->most + (size_t)i) * row,
			       from.data + ((size_t)b * (size_t)from.rows + (size_t)i) * all, row);
	return dist_mpi(err, MPI_Iallgather(s->mine, n, MPI_BYTE, s->blocks[slot], n, MPI_BYTE,
					    plan->comm, &s->request));
}

/* @from, rows [k0, k1) of it, is added to @s's sum. */
static void add(struct fmha_dist_plan *plan, struct side *s, int32_t heads,
		const struct piece *piece, float *row)
{
	size_t n = (size_t)heads * (size_t)s->hdim;

	for (int32_t b = 0; b < plan->p.batch; b++)
		for (int32_t j = piece->k0; j < piece->k1; j++) {
			size_t at = ((size_t)b * (size_t)plan->p.seqlen + (size_t)j) * n;

			dist_widen(plan, row, s->part + at * plan->element, n);
			for (size_t i = 0; i < n; i++)
				s->sum[at + i] += row[i];
		}
}

/* This rank's intervals against all keys. */
static int compute(struct fmha_dist_plan *plan, bool backward, struct gathering *g,
		   struct call *call, float *row, struct fmha_error *err)
{
	const struct shares *mine = &plan->shares[plan->rank];
	struct fmha_dist_interval all = {0, plan->p.seqlen};
	int32_t at = 0;
	int r = 0;

	for (int i = 0; i < mine->n && r == 0; i++) {
		struct piece piece;

		if (dist_piece(mine->at[i], at, all, 0, plan->p.window_left, plan->p.window_right,
			       &piece)) {
			r = dist_compute(plan, backward, call, &piece, err);
			if (backward && r == 0) {
				add(plan, &g->k, g->heads, &piece, row);
				add(plan, &g->v, g->heads, &piece, row);
			}
		}
		at += mine->at[i].end - mine->at[i].begin;
	}
	return r;
}

/* The part of @all that chunk @i is about; K and V are @g's. */
static struct call chunk_of(const struct fmha_dist_plan *plan, const struct gathering *g,
			    const struct call *all, int32_t i)
{
	struct call call = *all;
	int32_t group = plan->p.nhead_q / plan->p.nhead_k, n = g->heads * group, first = i * n;

	call.q = dist_heads(plan, all->q, first, n);
	call.o = dist_heads(plan, all->o, first, n);
	if (all->d_o.data) {
		call.d_o = dist_heads(plan, all->d_o, first, n);
		call.dq = dist_heads(plan, all->dq, first, n);
		call.dk = dist_dense(g->k.part, plan->p.seqlen, g->heads, g->k.hdim);
		call.dv = dist_dense(g->v.part, plan->p.seqlen, g->heads, g->v.hdim);
	}
	call.lse += (int64_t)first * all->lse_rows;
	call.k = dist_dense(g->k.whole, plan->p.seqlen, g->heads, g->k.hdim);
	call.v = dist_dense(g->v.whole, plan->p.seqlen, g->heads, g->v.hdim);
	return call;
}

/* The chunk's dK or dV to its owners, who add it up in @to. */
static int give(struct fmha_dist_plan *plan, struct side *s, int32_t heads, struct dense to,
		struct fmha_error *err)
{
	size_t whole = (size_t)plan->p.batch * (size_t)plan->p.seqlen * (size_t)heads *
		       (size_t)s->hdim;

	dist_blocks_from_whole(plan, sizeof(float), (char *)s->sums, (const char *)s->sum, heads,
			       s->hdim);
	memset(s->sum, 0, whole * sizeof(float));
	return dist_add_up(plan, s->sums, to, err);
}

static int chunk_send(struct fmha_dist_plan *plan, struct gathering *g, const struct call *call,
		      int32_t i, struct fmha_error *err)
{
	int r = send(plan, &g->k, call->k, i * g->heads, g->heads, i % 2, err);

	return dist_first(r, send(plan, &g->v, call->v, i * g->heads, g->heads, i % 2, err));
}

static int side_wait(struct fmha_dist_plan *plan, struct side *s, int32_t heads, int slot,
		     struct fmha_error *err)
{
	int r = dist_mpi(err, MPI_Wait(&s->request, MPI_STATUS_IGNORE));

	dist_whole_from_blocks(plan, plan->element, s->whole, s->blocks[slot], heads, s->hdim);
	return r;
}

static int all_gather_run(struct fmha_dist_plan *plan, bool backward, struct gathering *g,
			  struct call *call, float *row, struct fmha_error *err)
{
	int r = chunk_send(plan, g, call, 0, err);

	/* What fails is kept, and the traffic goes on: the others wait for it. */
	for (int32_t i = 0; i < plan->chunks; i++) {
		struct call chunk;

		r = dist_first(r, side_wait(plan, &g->k, g->heads, i % 2, r ? NULL : err));
		r = dist_first(r, side_wait(plan, &g->v, g->heads, i % 2, r ? NULL : err));
		if (i + 1 < plan->chunks)
			r = dist_first(r, chunk_send(plan, g, call, i + 1, r ? NULL : err));
		chunk = chunk_of(plan, g, call, i);
		if (r == 0)
			r = compute(plan, backward, g, &chunk, row, err);
		if (backward) {
			struct dense dk = dist_heads(plan, call->dk, i * g->heads, g->heads);
			struct dense dv = dist_heads(plan, call->dv, i * g->heads, g->heads);

			r = dist_first(r, give(plan, &g->k, g->heads, dk, r ? NULL : err));
			r = dist_first(r, give(plan, &g->v, g->heads, dv, r ? NULL : err));
		}
	}
	return r;
}

int dist_all_gather(struct fmha_dist_plan *plan, bool backward, struct call *call,
		    struct fmha_error *err)
{
	struct gathering g = {.heads = plan->p.nhead_k / plan->chunks};
	int32_t hdim = plan->p.hdim_q > plan->p.hdim_v ? plan->p.hdim_q : plan->p.hdim_v;
	float *row = dist_alloc(err, (size_t)g.heads * (size_t)hdim, sizeof(float));
	int r = row ? 0 : FMHA_ENOMEM;

	r = dist_first(r, side_init(plan, &g.k, g.heads, plan->p.hdim_q, backward, err));
	r = dist_first(r, side_init(plan, &g.v, g.heads, plan->p.hdim_v, backward, err));
	r = dist_agree(plan, r, err);
	if (r == 0 && row) /* it is: for readers that do not see into dist_agree() */
		r = all_gather_run(plan, backward, &g, call, row, err);
	side_deinit(&g.k);
	side_deinit(&g.v);
	free(row);
	return r;
}
