/* SPDX-License-Identifier: MIT */
/* bwd.h: what the stages of backward share: the layout of dq_acc. */
#ifndef FMHA_CPU_BWD_H
#define FMHA_CPU_BWD_H

#define MICRO_AHEAD 0

#include <kernels/dq_acc.h>
#include <kernels/view.h>

#include "convert.h"
#include "operand.h"

static inline int32_t bwd_n_splits(const struct abi_bwd_args *a, int32_t batch)
{
	return a->nsplits[a->sequences.seqstart_q && a->deterministic ? batch : 0];
}

/* Row @row of split @split: dq_acc is [nhead_q, nsplits, q_physical, hdim_q] for each sequence. */
static inline float *bwd_dq_acc(const struct abi_bwd_args *a, const struct view_sequence *v,
				int32_t head, int32_t split, int32_t row)
{
	const struct dq_acc_layout layout = {.nhead_q = a->nhead_q, .hdim_q = a->hdim_q};
	int32_t n_splits = bwd_n_splits(a, v->batch);
	int64_t base = a->dq_acc_offsets
			       ? a->dq_acc_offsets[v->batch]
			       : v->batch * dq_acc_sequence(&layout, v->q_physical, n_splits);

	return a->dq_acc + base + head * dq_acc_head(&layout, v->q_physical, n_splits) +
	       ((int64_t)split * v->q_physical + row) * a->hdim_q;
}

#endif
