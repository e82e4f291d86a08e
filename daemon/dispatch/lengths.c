/* SPDX-License-Identifier: MIT */
/*
 * lengths.c: for which other numbers of keys a plan is as good. A cache that grows asks for one more key with
 * each token. Kernels run right with any number: they take it, and where K and V lie, from their arguments
 * (launch.h). What was chosen for a number, the kernel and its splits, stays a good choice for its neighbours.
 *
 * Splits: as long as each has keys and the last none beyond its size. 1,000 keys in 8 splits of 128: 897 to 1,024.
 * Otherwise: the quarters of a power of two, in which shape.c keeps times, at least 64 keys wide: 1,025 to 1,280
 * for 1,100; 65 to 128 for 100.
 */
#include "internal.h"

#define MOST_ROWS                                                                                  \
	16 /* of a sequence: more are a prompt, whose kernels look at the number of keys closely */
#define LEAST_WIDTH 64
#define ALIGNMENT   LAUNCH_ALIGNMENT

/* Of what the problem has, is K and V all that the number of keys changes? Integer tensors are checked
 * against it, a bias has a column for each; a role that is not known here is taken for one of those. */
static bool only_keys_grow(const struct fmha_problem *p)
{
	const uint64_t known = 1ull << FMHA_T_Q | 1ull << FMHA_T_K | 1ull << FMHA_T_V |
			       1ull << FMHA_T_O | 1ull << FMHA_T_LSE | 1ull << FMHA_T_SINK |
			       1ull << FMHA_T_ALIBI_SLOPES | 1ull << FMHA_T_Q_DESCALE;

	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (!(known >> role & 1) && plan_present(p, (enum fmha_tensor_role)role))
			return false;
	return true;
}

/* Of a batch entry and of a head; rows do not move when there are more of them. */
static bool steps_are_multiples(const struct fmha_problem *p, enum fmha_tensor_role role,
				int64_t unit)
{
	const int64_t *stride = p->tensor[role].stride;
	const int32_t extents[] = {p->batch, p->nhead_k};
	const int64_t steps[] = {stride[0], stride[2]};

	for (int i = 0; i < 2; i++)
		if (extents[i] > 1 && (steps[i] <= 0 || steps[i] % unit != 0))
			return false;
	return true;
}

static bool may_vary(const struct plan *plan, int64_t unit)
{
	const struct fmha_problem *p = &plan->problem;

	if (p->mode != FMHA_BATCH || plan->n_stages == 0 || p->seqlen_q > MOST_ROWS ||
	    p->seqlen_k < 2 || !only_keys_grow(p))
		return false;
	/* The same bits each time, whatever lengths came before. */
	if (p->deterministic || p->n_splits > 0 || p->split_size > 0)
		return false;
	/* Kernels of square masks have the corners in one place. */
	if (p->mask != FMHA_MASK_NONE && p->seqlen_q == p->seqlen_k)
		return false;
	for (uint32_t i = 0; i < plan->n_stages; i++)
		if (plan->stages[i].has_spec && !plan->stages[i].spec.pad_sk &&
		    plan->stages[i].family != ABI_FWD_SPLITKV_COMBINE)
			return false; /* whole tiles of keys */
	return steps_are_multiples(p, FMHA_T_K, unit) && steps_are_multiples(p, FMHA_T_V, unit);
}

static int64_t quarter_of_power(int64_t n)
{
	int64_t power = 1;

	while (power * 2 < n)
		power *= 2;
	return power / 4 > LEAST_WIDTH ? power / 4 : LEAST_WIDTH;
}

void lengths_choose(struct plan *plan)
{
	int64_t unit, n = plan->problem.seqlen_k, width = quarter_of_power(n), least, most;

	plan->keys = (struct plan_keys){0};
	if (plan->problem.op != FMHA_FORWARD)
		return; /* a merge has no keys, nor are they of a type */
	unit = ALIGNMENT / fmha_dtype_bytes(plan->problem.k.dtype);
	if (!may_vary(plan, unit))
		return;
	most = ceil_div(n, width) * width;
	least = most - width + 1;
	if (plan->n_splits > 1) {
		most = (int64_t)plan->n_splits * plan->split_size;
		least = most - plan->split_size + 1;
	}
	if (least > n || most < n || most > INT32_MAX || most * plan->problem.batch > INT32_MAX)
		return;
	plan->keys = (struct plan_keys){.least = (int32_t)(least > 2 ? least : 2),
					.most = (int32_t)most,
					.stride_unit = (uint32_t)unit};
}
