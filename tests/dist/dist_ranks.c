/* SPDX-License-Identifier: MIT */
/*
 * dist_ranks.c: libfmha_dist by each schedule, against fmha_forward() and fmha_backward() on the whole.
 *
 *   mpirun -n 4 dist_ranks          every problem below, by every schedule that so many ranks have
 *   mpirun -n 4 dist_ranks --fail   rank 1 is refused by its daemon: all ranks return an error
 *
 * A line for each problem and rank that is further off than is allowed; exit 0: there is none. In f16 and
 * bf16 the whole is computed in f32, from the same numbers, and what is allowed is a few roundings.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fmha/dist.h>

struct sizes {
	const char *name;
	int32_t batch, seqlen, nhead_q, nhead_k, hdim_q, hdim_v, left, right;
	uint32_t shares, dtype;
	float cap;
	uint32_t deterministic;
};

static const struct sizes PROBLEMS[] = {
	{"causal", 2, 192, 12, 12, 32, 32, -1, 0, FMHA_DIST_HEAD_TAIL, FMHA_F32, 0, 0},
	{"causal, odd length, gqa", 2, 203, 12, 2, 32, 64, -1, 0, FMHA_DIST_HEAD_TAIL, FMHA_F32, 0,
	 1},
	{"causal, contiguous, mqa", 1, 251, 12, 1, 32, 32, -1, 0, FMHA_DIST_CONTIGUOUS, FMHA_F32, 0,
	 0},
	{"full", 2, 160, 12, 4, 32, 32, -1, -1, FMHA_DIST_CONTIGUOUS, FMHA_F32, 0, 0},
	{"window, causal, cap", 1, 300, 12, 6, 32, 32, 40, 0, FMHA_DIST_HEAD_TAIL, FMHA_F32, 5, 0},
	{"window, both sides", 1, 256, 12, 3, 32, 32, 33, 50, FMHA_DIST_CONTIGUOUS, FMHA_F32, 0, 0},
	{"short window", 1, 512, 12, 12, 32, 32, 3, 0, FMHA_DIST_HEAD_TAIL, FMHA_F32, 0, 0},
	{"bf16", 2, 256, 12, 2, 64, 64, -1, 0, FMHA_DIST_HEAD_TAIL, FMHA_BF16, 0, 0},
	{"f16", 2, 256, 12, 12, 64, 64, -1, 0, FMHA_DIST_HEAD_TAIL, FMHA_F16, 0, 0},
	{"few rows", 1, 3, 12, 12, 32, 32, -1, 0, FMHA_DIST_HEAD_TAIL, FMHA_F32, 0, 0},
};
static const char *const SCHEDULES[] = {"all_gather", "a2a", "p2p"};

/* Q, K, V, dO, O, dQ, dK, dV of all rows, in float; LSE. */
enum { Q, K, V, D_O, O, DQ, DK, DV, LSE, N };
static const char *const NAMES[] = {"q", "k", "v", "d_o", "o", "dq", "dk", "dv", "lse"};

struct tensor {
	int32_t heads, hdim;
	float *all; /* [batch, seqlen, heads, hdim]; LSE [batch, heads, seqlen] */
	void *mine; /* this rank's rows, of the problem's type */
};

static void *must(void *p)
{
	if (!p) {
		fprintf(stderr, "out of memory\n");
		MPI_Abort(MPI_COMM_WORLD, 1);
		exit(1);
	}
	return p;
}

static uint32_t bits_of(float x)
{
	uint32_t bits;

	memcpy(&bits, &x, sizeof(bits));
	return bits;
}

/* A number near @x, below 2, that the type has: cut off, and in f16 none so small that it has fewer bits. */
static float narrowed(uint32_t dtype, float x)
{
	uint32_t bits = bits_of(x) & (dtype == FMHA_F32   ? 0xffffffffU
				      : dtype == FMHA_F16 ? 0xffffe000U
							  : 0xffff0000U);

	memcpy(&x, &bits, sizeof(x));
	return dtype == FMHA_F16 && fabsf(x) < 0x1p-14F ? 0 : x;
}

static void store(uint32_t dtype, void *to, size_t i, float x)
{
	uint32_t bits = bits_of(x);

	if (dtype == FMHA_F32)
		((float *)to)[i] = x;
	else if (dtype == FMHA_F16 && x == 0)
		((uint16_t *)to)[i] = 0;
	else if (dtype == FMHA_F16)
		((uint16_t *)to)[i] = (uint16_t)((bits >> 16 & 0x8000) |
						 ((bits & 0x7fffffffU) - (112U << 23)) >> 13);
	else
		((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
}

static float loaded(uint32_t dtype, const void *from, size_t i)
{
	uint32_t bits;
	int exponent;
	float x;

	if (dtype == FMHA_F32)
		return ((const float *)from)[i];
	bits = ((const uint16_t *)from)[i];
	if (dtype == FMHA_F16) {
		exponent = (int)(bits >> 10 & 31);
		if (exponent == 31)
			return NAN;
		x = ldexpf((float)(bits & 1023) + (exponent ? 1024.0F : 0),
			   (exponent ? exponent : 1) - 25);
		return bits & 0x8000 ? -x : x;
	}
	bits <<= 16;
	memcpy(&x, &bits, sizeof(x));
	return x;
}

static void init(struct tensor t[N], const struct sizes *s, int32_t rows)
{
	const int32_t heads[N] = {s->nhead_q, s->nhead_k, s->nhead_k, s->nhead_q, s->nhead_q,
				  s->nhead_q, s->nhead_k, s->nhead_k, s->nhead_q};
	const int32_t hdim[N] = {s->hdim_q, s->hdim_q, s->hdim_v, s->hdim_v, s->hdim_v,
				 s->hdim_q, s->hdim_q, s->hdim_v, 1};
	uint64_t state = 7;

	for (int i = 0; i < N; i++) {
		size_t row = (size_t)heads[i] * (size_t)hdim[i] * (size_t)s->batch;
		size_t n = row * (size_t)s->seqlen;

		t[i] = (struct tensor){heads[i], hdim[i], must(calloc(n, sizeof(float))),
				       must(calloc(row * (size_t)rows + 1, sizeof(float)))};
		for (size_t e = 0; i < O && e < n; e++) {
			state = state * 6364136223846793005u + 1442695040888963407u;
			t[i].all[e] = narrowed(s->dtype,
					       (float)(int32_t)(state >> 33) / 1.1e9F - 1);
		}
	}
}

static void deinit(struct tensor t[N])
{
	for (int i = 0; i < N; i++) {
		free(t[i].all);
		free(t[i].mine);
	}
}

/* Where element (b, row i, head h, d) of @t lies among @rows rows. */
static size_t place(const struct tensor *t, int which, int32_t rows, int32_t b, int32_t i,
		    int32_t h, int32_t d)
{
	if (which == LSE)
		return ((size_t)b * (size_t)t->heads + (size_t)h) * (size_t)rows + (size_t)i;
	return (((size_t)b * (size_t)rows + (size_t)i) * (size_t)t->heads + (size_t)h) *
		       (size_t)t->hdim +
	       (size_t)d;
}

static void whole(struct fmha_device *device, const struct sizes *s, struct tensor t[N])
{
	struct fmha_problem p;
	struct fmha_error err;

	fmha_problem_init(&p);
	p.batch = s->batch, p.seqlen_q = p.seqlen_k = s->seqlen;
	p.nhead_q = s->nhead_q, p.nhead_k = s->nhead_k, p.hdim_q = s->hdim_q, p.hdim_v = s->hdim_v;
	p.mask = s->left < 0 && s->right < 0 ? FMHA_MASK_NONE : FMHA_MASK_TOP_LEFT;
	p.window_left = s->left, p.window_right = s->right, p.logits_soft_cap = s->cap;
	p.q.data = t[Q].all, p.k.data = t[K].all, p.v.data = t[V].all;
	p.o.data = t[O].all, p.lse.data = t[LSE].all;
	if (fmha_forward(device, &p, NULL, NULL, &err))
		goto failed;
	p.d_o.data = t[D_O].all, p.dq.data = t[DQ].all, p.dk.data = t[DK].all,
	p.dv.data = t[DV].all;
	if (fmha_backward(device, &p, NULL, NULL, &err) == 0)
		return;
failed:
	fprintf(stderr, "the whole: %s\n", err.msg);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

/* This rank's rows of the inputs. */
static void take(const struct sizes *s, struct tensor t[N], const struct fmha_dist_interval *at,
		 int n, int32_t rows)
{
	for (int which = 0; which < O; which++)
		for (int32_t b = 0; b < s->batch; b++)
			for (int32_t k = 0, i = 0; k < n; k++)
				for (int32_t row = at[k].begin; row < at[k].end; row++, i++)
					for (int32_t h = 0; h < t[which].heads; h++)
						for (int32_t d = 0; d < t[which].hdim; d++)
							store(s->dtype, t[which].mine,
							      place(&t[which], which, rows, b, i, h,
								    d),
							      t[which].all[place(&t[which], which,
										 s->seqlen, b, row,
										 h, d)]);
}

/* The largest difference of @which, and the largest number. */
static void compare(const struct sizes *s, const struct tensor *t, int which,
		    const struct fmha_dist_interval *at, int n, int32_t rows, float *error,
		    float *largest)
{
	uint32_t dtype = which == LSE ? FMHA_F32 : s->dtype;

	*error = *largest = 0;
	for (int32_t b = 0; b < s->batch; b++)
		for (int32_t k = 0, i = 0; k < n; k++)
			for (int32_t row = at[k].begin; row < at[k].end; row++, i++)
				for (int32_t h = 0; h < t->heads; h++)
					for (int32_t d = 0; d < t->hdim; d++) {
						float want = t->all[place(t, which, s->seqlen, b,
									  row, h, d)];
						float got = loaded(
							dtype, t->mine,
							place(t, which, rows, b, i, h, d));

						*largest = fmaxf(*largest, fabsf(want));
						/* Written so that NaN counts, too. */
						if (!(fabsf(got - want) <= *error))
							*error = fabsf(got - want);
					}
}

static int judge(const struct sizes *s, const struct tensor t[N], const char *schedule, int rank,
		 const struct fmha_dist_interval *at, int n, int32_t rows)
{
	const float rounding = s->dtype == FMHA_F32   ? 1e-5F
			       : s->dtype == FMHA_F16 ? 0x1p-9F
						      : 0x1p-6F;
	int wrong = 0;

	for (int which = O; which < N; which++) {
		float error, largest;

		compare(s, &t[which], which, at, n, rows, &error, &largest);
		if (error <= rounding * fmaxf(1, largest))
			continue;
		printf("%s, %s, rank %d: %s is %g off, the largest number %g\n", s->name, schedule,
		       rank, NAMES[which], (double)error, (double)largest);
		wrong++;
	}
	return wrong;
}

/* Return: how many tensors are wrong; @n_run grows by 1 unless so many ranks have no such schedule. */
static int check(struct fmha_device *device, const struct sizes *s, uint32_t schedule, int rank,
		 int n_ranks, int *n_run)
{
	struct fmha_dist_problem p;
	struct fmha_dist_plan *plan;
	struct fmha_dist_interval at[2] = {{0, 0}, {0, 0}};
	struct fmha_error err;
	struct tensor t[N];
	int32_t rows = 0;
	int n, r, wrong;

	fmha_dist_problem_init(&p);
	p.schedule = schedule, p.shares = s->shares, p.dtype = s->dtype, p.batch = s->batch;
	p.seqlen = s->seqlen, p.nhead_q = s->nhead_q, p.nhead_k = s->nhead_k;
	p.hdim_q = s->hdim_q, p.hdim_v = s->hdim_v, p.window_left = s->left,
	p.window_right = s->right;
	p.logits_soft_cap = s->cap, p.deterministic = s->deterministic;
	r = fmha_dist_plan_new(MPI_COMM_WORLD, device, &p, &plan, &err);
	if (r == FMHA_EINVAL && schedule == FMHA_DIST_A2A && s->nhead_k % n_ranks &&
	    n_ranks % s->nhead_k)
		return 0;
	if (r) {
		printf("%s, %s: %s\n", s->name, SCHEDULES[schedule], err.msg);
		return 1;
	}
	n = fmha_dist_rows(plan, at);
	for (int i = 0; i < n; i++)
		rows += at[i].end - at[i].begin;
	init(t, s, rows);
	whole(device, s, t);
	take(s, t, at, n, rows);
	r = fmha_dist_forward(plan, t[Q].mine, t[K].mine, t[V].mine, t[O].mine, t[LSE].mine, &err);
	if (r == 0)
		r = fmha_dist_backward(plan, t[Q].mine, t[K].mine, t[V].mine, t[O].mine,
				       t[LSE].mine, t[D_O].mine, t[DQ].mine, t[DK].mine, t[DV].mine,
				       &err);
	if (r)
		printf("%s, %s, rank %d: %s\n", s->name, SCHEDULES[schedule], rank, err.msg);
	wrong = r ? 1 : judge(s, t, SCHEDULES[schedule], rank, at, n, rows);
	deinit(t);
	plan = fmha_dist_plan_free(plan);
	(*n_run)++;
	return wrong;
}

/* Rank 1 asks its daemon for what is refused; the others only hear of it. */
static int check_failure(struct fmha_device *device, int rank)
{
	struct fmha_dist_problem p;
	struct fmha_dist_plan *plan;
	struct fmha_error err;
	float *some = must(calloc(40000, sizeof(float)));
	int wrong = 0;

	for (uint32_t schedule = 0; schedule <= FMHA_DIST_P2P; schedule++) {
		int r;

		fmha_dist_problem_init(&p);
		p.schedule = schedule, p.batch = 1, p.seqlen = 64, p.nhead_q = p.nhead_k = 12;
		p.hdim_q = p.hdim_v = 32;
		p.logits_soft_cap = rank == 1 ? -1 : 0; /* every daemon refuses it */
		if (fmha_dist_plan_new(MPI_COMM_WORLD, device, &p, &plan, &err))
			return 1;
		r = fmha_dist_forward(plan, some, some, some, some + 16384, some + 32768, &err);
		if (r != (rank == 1 ? FMHA_EINVAL : FMHA_ECANCELED)) {
			printf("%s, rank %d: %d, %s\n", SCHEDULES[schedule], rank, r, err.msg);
			wrong++;
		}
		plan = fmha_dist_plan_free(plan);
	}
	free(some);
	return wrong;
}

int main(int argc, char **argv)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_error err;
	int rank, n_ranks, wrong = 0, all_wrong = 0, n_run = 0;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
	if (fmha_connect(NULL, &client, &err) ||
	    fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err)) {
		fprintf(stderr, "%s\n", err.msg);
		MPI_Abort(MPI_COMM_WORLD, 1);
		return 1;
	}
	if (argc > 1 && strcmp(argv[1], "--fail") == 0)
		wrong = check_failure(device, rank);
	else
		for (size_t i = 0; i < sizeof(PROBLEMS) / sizeof(*PROBLEMS); i++)
			for (uint32_t s = 0; s <= FMHA_DIST_P2P; s++)
				wrong += check(device, &PROBLEMS[i], s, rank, n_ranks, &n_run);
	MPI_Allreduce(&wrong, &all_wrong, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	if (rank == 0)
		printf("%d ranks: %d runs, %d wrong\n", n_ranks, n_run, all_wrong);
	fmha_device_free(device);
	fmha_client_free(client);
	MPI_Finalize();
	return all_wrong != 0;
}
