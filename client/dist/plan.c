/* SPDX-License-Identifier: MIT */
/* plan.c: what a problem may be, who has which rows, and the two calls. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define MOST_CHUNKS 4

void fmha_dist_problem_init(struct fmha_dist_problem *problem)
{
	*problem = (struct fmha_dist_problem){.struct_size = sizeof(*problem),
					      .window_left = -1,
					      .window_right = -1,
					      .scale = NAN};
}

static int check_sizes(const struct fmha_dist_problem *p, struct fmha_error *err)
{
	const struct {
		const char *name;
		int32_t value, least;
	} sizes[] = {{"batch", p->batch, 1},
		     {"seqlen", p->seqlen, 1},
		     {"nhead_q", p->nhead_q, 1},
		     {"nhead_k", p->nhead_k, 1},
		     {"hdim_q", p->hdim_q, 1},
		     {"hdim_v", p->hdim_v, 1},
		     {"window_left", p->window_left, -1},
		     {"window_right", p->window_right, -1},
		     {"chunks", p->chunks, 0}};

	if (p->struct_size != sizeof(*p))
		return dist_fail(err, FMHA_EINVAL, "struct_size",
				 "struct_size %u: this build's is %zu", p->struct_size, sizeof(*p));
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
		if (sizes[i].value < sizes[i].least)
			return dist_fail(err, FMHA_EINVAL, sizes[i].name, "%s %d: below %d",
					 sizes[i].name, sizes[i].value, sizes[i].least);
	if (p->nhead_q % p->nhead_k)
		return dist_fail(err, FMHA_EINVAL, "nhead_q",
				 "nhead_q %d: not a multiple of nhead_k %d", p->nhead_q,
				 p->nhead_k);
	if (p->schedule > FMHA_DIST_P2P)
		return dist_fail(err, FMHA_EINVAL, "schedule", "schedule %u: above %d", p->schedule,
				 FMHA_DIST_P2P);
	if (p->shares > FMHA_DIST_HEAD_TAIL)
		return dist_fail(err, FMHA_EINVAL, "shares", "shares %u: above %d", p->shares,
				 FMHA_DIST_HEAD_TAIL);
	if (p->dtype != FMHA_F32 && p->dtype != FMHA_F16 && p->dtype != FMHA_BF16)
		return dist_fail(err, FMHA_EINVAL, "dtype", "dtype %u: f32, f16 and bf16 are known",
				 p->dtype);
	return 0;
}

static int check_ranks(const struct fmha_dist_plan *plan, struct fmha_error *err)
{
	const struct fmha_dist_problem *p = &plan->p;
	int n = plan->n_ranks;
	int32_t heads = p->nhead_k > p->nhead_q / n ? p->nhead_k : p->nhead_q / n;
	int32_t hdim = p->hdim_q > p->hdim_v ? p->hdim_q : p->hdim_v;

	if (p->chunks && p->nhead_k % p->chunks)
		return dist_fail(err, FMHA_EINVAL, "chunks",
				 "chunks %d: %d KV heads are no multiple", p->chunks, p->nhead_k);
	if (p->schedule == FMHA_DIST_A2A && p->nhead_q % n)
		return dist_fail(err, FMHA_EINVAL, "nhead_q",
				 "nhead_q %d: not a multiple of %d ranks", p->nhead_q, n);
	if (p->schedule == FMHA_DIST_A2A && p->nhead_k % n && n % p->nhead_k)
		return dist_fail(err, FMHA_EINVAL, "nhead_k",
				 "nhead_k %d and %d ranks: neither is a multiple of the other",
				 p->nhead_k, n);
	if ((double)p->batch * plan->most * heads * hdim * sizeof(float) > (double)INT32_MAX)
		return dist_fail(
			err, FMHA_ENOTSUP, "seqlen",
			"seqlen %d: a rank's block has more than 2 GiB, which MPI does not count",
			p->seqlen);
	return 0;
}

static int32_t cut(const struct fmha_dist_plan *plan, int i, int n)
{
	return (int32_t)((int64_t)plan->p.seqlen * i / n);
}

static void add_interval(struct shares *s, int32_t begin, int32_t end)
{
	if (begin == end)
		return;
	s->rows += end - begin;
	if (s->n && s->at[s->n - 1].end == begin)
		s->at[s->n - 1].end = end;
	else
		s->at[s->n++] = (struct fmha_dist_interval){begin, end};
}

static void share_rows(struct fmha_dist_plan *plan)
{
	int n = plan->n_ranks;

	for (int r = 0; r < n; r++) {
		struct shares *s = &plan->shares[r];

		if (plan->p.shares == FMHA_DIST_CONTIGUOUS) {
			add_interval(s, cut(plan, r, n), cut(plan, r + 1, n));
		} else {
			add_interval(s, cut(plan, r, 2 * n), cut(plan, r + 1, 2 * n));
			add_interval(s, cut(plan, 2 * n - 1 - r, 2 * n),
				     cut(plan, 2 * n - r, 2 * n));
		}
		if (s->rows > plan->most)
			plan->most = s->rows;
	}
}

/* Chunks of KV heads: as asked for, or as many as four that divide them. */
static int32_t count_chunks(const struct fmha_dist_plan *plan)
{
	int32_t n = MOST_CHUNKS;

	if (plan->p.chunks)
		return plan->p.chunks;
	while (plan->p.nhead_k % n)
		n--;
	return plan->n_ranks == 1 ? 1 : n;
}

static int open_plan(struct fmha_dist_plan *plan, MPI_Comm comm, struct fmha_error *err)
{
	struct fmha_device_info info;
	int r = dist_mpi(err, MPI_Comm_dup(comm, &plan->comm));

	if (r == 0)
		r = dist_mpi(err, MPI_Comm_set_errhandler(plan->comm, MPI_ERRORS_RETURN));
	if (r == 0)
		r = dist_mpi(err, MPI_Comm_rank(plan->comm, &plan->rank));
	if (r == 0)
		r = dist_mpi(err, MPI_Comm_size(plan->comm, &plan->n_ranks));
	if (r == 0)
		r = fmha_device_info(plan->device, &info, err);
	if (r)
		return r;
	if (strcmp(info.backend, "cpu") != 0 && strcmp(info.backend, "fake") != 0)
		return dist_fail(
			err, FMHA_ENOTSUP, "device",
			"device is a %s: this library computes on CPUs; fmha.torch.cp does on GPUs",
			info.backend);
	plan->shares = dist_alloc(err, (size_t)plan->n_ranks, sizeof(*plan->shares));
	if (!plan->shares)
		return FMHA_ENOMEM;
	share_rows(plan);
	plan->chunks = count_chunks(plan);
	return check_ranks(plan, err);
}

int fmha_dist_plan_new(MPI_Comm comm, struct fmha_device *device,
		       const struct fmha_dist_problem *problem, struct fmha_dist_plan **ret_plan,
		       struct fmha_error *err)
{
	struct fmha_dist_plan *plan;
	int r;

	if (!device || !problem || !ret_plan)
		return dist_fail(err, FMHA_EINVAL, "", "device, problem and ret_plan are needed");
	r = check_sizes(problem, err);
	if (r)
		return r;
	plan = dist_alloc(err, 1, sizeof(*plan));
	if (!plan)
		return FMHA_ENOMEM;
	plan->comm = MPI_COMM_NULL;
	plan->device = device;
	plan->p = *problem;
	plan->element = fmha_dtype_bytes(problem->dtype);
	r = open_plan(plan, comm, err);
	if (r) {
		(void)fmha_dist_plan_free(plan);
		return r;
	}
	*ret_plan = plan;
	return 0;
}

struct fmha_dist_plan *fmha_dist_plan_free(struct fmha_dist_plan *plan)
{
	if (!plan)
		return NULL;
	if (plan->comm != MPI_COMM_NULL)
		(void)MPI_Comm_free(&plan->comm);
	free(plan->shares);
	free(plan);
	return NULL;
}

int fmha_dist_rows(const struct fmha_dist_plan *plan, struct fmha_dist_interval ret_intervals[2])
{
	const struct shares *s = &plan->shares[plan->rank];

	memcpy(ret_intervals, s->at, sizeof(s->at));
	return s->n;
}

static int plan_run(struct fmha_dist_plan *plan, bool backward, struct call *call,
		    struct fmha_error *err)
{
	int (*const schedules[])(struct fmha_dist_plan *, bool, struct call *,
				 struct fmha_error *) = {dist_all_gather, dist_a2a, dist_ring};

	return dist_agree(plan, schedules[plan->p.schedule](plan, backward, call, err), err);
}

static struct call call_of(const struct fmha_dist_plan *plan, const void *q, const void *k,
			   const void *v, const void *o, const float *lse)
{
	const struct fmha_dist_problem *p = &plan->p;
	int32_t rows = plan->shares[plan->rank].rows;

	return (struct call){.q = dist_dense(q, rows, p->nhead_q, p->hdim_q),
			     .k = dist_dense(k, rows, p->nhead_k, p->hdim_q),
			     .v = dist_dense(v, rows, p->nhead_k, p->hdim_v),
			     .o = dist_dense(o, rows, p->nhead_q, p->hdim_v),
			     .lse = (float *)(uintptr_t)lse,
			     .lse_heads = p->nhead_q,
			     .lse_rows = rows};
}

int fmha_dist_forward(struct fmha_dist_plan *plan, const void *q, const void *k, const void *v,
		      void *o, float *lse, struct fmha_error *err)
{
	struct call call;

	if (!plan || !q || !k || !v || !o || !lse)
		return dist_fail(err, FMHA_EINVAL, "", "plan, q, k, v, o and lse are needed");
	call = call_of(plan, q, k, v, o, lse);
	return plan_run(plan, false, &call, err);
}

int fmha_dist_backward(struct fmha_dist_plan *plan, const void *q, const void *k, const void *v,
		       const void *o, const float *lse, const void *d_o, void *dq, void *dk,
		       void *dv, struct fmha_error *err)
{
	struct call call;

	if (!plan || !q || !k || !v || !o || !lse || !d_o || !dq || !dk || !dv)
		return dist_fail(err, FMHA_EINVAL, "", "plan and all tensors are needed");
	call = call_of(plan, q, k, v, o, lse);
	call.d_o = dist_dense(d_o, call.q.rows, call.q.heads, call.o.hdim);
	call.dq = dist_dense(dq, call.q.rows, call.q.heads, call.q.hdim);
	call.dk = dist_dense(dk, call.k.rows, call.k.heads, call.k.hdim);
	call.dv = dist_dense(dv, call.v.rows, call.v.heads, call.v.hdim);
	return plan_run(plan, true, &call, err);
}
