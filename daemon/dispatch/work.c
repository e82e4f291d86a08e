/* SPDX-License-Identifier: MIT */
/*
 * work.c: what one run will do, from its arguments. estimate.c tells what a problem costs at least,
 * before lengths are known, and takes the mean of those of group mode; whoever lets a run have a
 * thread that others wait for needs what this run has really been given.
 */
#include "internal.h"

#define PER_HEAD 256.0 /* for a sequence and head, however short: its tasks */

struct lengths {
	double rows, keys, pairs;
};

static double difference(const abi_i32 *prefix, abi_i32 b)
{
	return (double)prefix[b + 1] - prefix[b];
}

/* How many rows sequences have that a stage serves. */
struct served {
	abi_i32 least, most;
};

static double sequence_rows(const struct abi_sequences *s, const struct index_tables *t, abi_i32 b)
{
	return t->seqlen_q     ? t->seqlen_q[b]
	       : s->seqstart_q ? difference(t->seqstart_q, b)
			       : s->seqlen_q_max;
}

/* What the lengths of sequences that have some are read from: @t, on this host. That kernels have lengths of rows says
 * nothing of it: a stage before may have written them. */
static struct lengths lengths_of(const struct abi_sequences *s, const struct index_tables *t,
				 struct served served)
{
	bool differ = s->seqlen_q || s->seqstart_q || s->seqlen_k || s->seqstart_k;
	struct lengths sum = {.rows = (double)s->batch * s->seqlen_q_max,
			      .keys = (double)s->batch * s->seqlen_k_max,
			      .pairs = (double)s->batch * s->seqlen_q_max * s->seqlen_k_max};

	if (differ)
		sum = (struct lengths){0};
	for (abi_i32 b = 0; differ && b < s->batch; b++) {
		double rows = sequence_rows(s, t, b);
		double keys = s->seqlen_k     ? t->seqlen_k[b]
			      : s->seqstart_k ? difference(t->seqstart_k, b)
					      : s->seqlen_k_max;

		if (rows < served.least || rows > served.most)
			continue;
		sum.rows += rows;
		sum.keys += keys;
		sum.pairs += rows * keys;
	}
	return sum;
}

/* @chosen: keys that a row has, 0: all; @per_pair: multiplications and additions of one query head */
static double attention(const struct abi_sequences *s, const struct index_tables *t,
			struct served served, int32_t chosen, double nhead_q, double nhead_k,
			double hdims, double per_pair)
{
	struct lengths n = lengths_of(s, t, served);

	if (chosen > 0)
		n.keys = n.pairs = n.rows * chosen;
	return n.pairs * nhead_q * per_pair + n.rows * nhead_q * hdims + n.keys * nhead_k * hdims +
	       s->batch * nhead_q * PER_HEAD;
}

static double stage_work(enum abi_family family, const union abi_args *args,
			 const struct index_tables *tables, struct served served)
{
	const struct abi_fwd_args *fwd = &args->fwd;
	const struct abi_bwd_args *bwd = &args->bwd;
	const struct abi_combine_args *combine = &args->combine;
	const struct abi_appendkv_args *append = &args->appendkv;
	double rows;

	switch (family) {
	case ABI_FWD:
	case ABI_FWD_SPLITKV:
	case ABI_FWD_PAGEDKV:
	case ABI_BATCH_PREFILL:
		return attention(&fwd->sequences, tables, served, fwd->chosen.n, fwd->nhead_q,
				 fwd->nhead_k, fwd->hdim_q + fwd->hdim_v,
				 2.0 * (fwd->hdim_q + fwd->hdim_v));
	case ABI_BWD_DQ_DK_DV:
		return attention(&bwd->sequences, tables, served, 0, bwd->nhead_q, bwd->nhead_k,
				 bwd->hdim_q + bwd->hdim_v,
				 2.0 * (3.0 * bwd->hdim_q + 2.0 * bwd->hdim_v));
	case ABI_BWD_DOT_DO_O:
	case ABI_BWD_CONVERT_DQ:
		rows = bwd->sequences.total_q;
		return rows * bwd->nhead_q * (bwd->hdim_q + bwd->hdim_v);
	case ABI_FWD_SPLITKV_COMBINE:
		rows = lengths_of(&combine->sequences, tables, served).rows;
		return 3.0 * combine->n_splits * rows * combine->nhead_q * combine->hdim_v +
		       (double)combine->sequences.batch * combine->nhead_q * PER_HEAD;
	case ABI_FWD_APPENDKV:
		rows = append->widens ? lengths_of(&append->sequences, tables, served).keys
				      : (double)append->sequences.batch * append->seqlen_new;
		rows *= append->nhead_k;
		if (append->q.data)
			rows += (double)append->sequences.total_q * append->nhead_q;
		return 3.0 * rows * (append->hdim_q + append->hdim_v) +
		       (double)append->sequences.batch * append->nhead_k * PER_HEAD;
	case ABI_N_FAMILIES:
		break;
	}
	return 0;
}

/* Rows that sequences have at most which stay as they are: the widening finds the same on the device. */
static abi_i32 most_few_rows(const struct plan *plan, const struct abi_sequences *s,
			     const struct index_tables *t)
{
	abi_i32 few = plan->few_rows;

	for (;; few *= 2) {
		abi_i32 n_more = 0;

		for (abi_i32 b = 0; b < s->batch; b++)
			n_more += sequence_rows(s, t, b) > few;
		if (n_more <= plan->wide_places || few > s->seqlen_q_max)
			return few;
	}
}

double plan_work(const struct plan *plan, const union abi_args args[PLAN_MAX_STAGES],
		 const struct plan_indices *indices)
{
	struct index_tables tables = indices_tables(indices);
	abi_i32 few = plan->few
			      ? most_few_rows(plan, &args[plan->append].appendkv.sequences, &tables)
			      : 0;
	double work = 0;

	for (uint32_t i = 0; i < plan->n_stages; i++) {
		struct served served = {.most = INT32_MAX};

		if (plan_stage_few(plan, i))
			served.most = few;
		else if (plan->few)
			served.least = few + 1;
		work += stage_work(plan->stages[i].family, &args[i], &tables, served);
	}
	return work;
}
