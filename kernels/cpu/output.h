/* SPDX-License-Identifier: MIT */
/* output.h: how a row ends, in every forward kernel. */
#ifndef FMHA_CPU_OUTPUT_H
#define FMHA_CPU_OUTPUT_H

#include "score.h"
#include "tile.h"

/* Query rows that share a key head. */
static inline int64_t max_head_rows(const struct abi_fwd_args *a)
{
	return (int64_t)a->sequences.seqlen_q_max * (a->nhead_q / a->nhead_k);
}

/* Whether a row sees keys that lie as tensors do: what is not so, latent.c reads. */
static inline int reads_rows(const struct abi_fwd_args *a)
{
	return !a->chosen.data && a->cache.layout != ABI_KV_LATENT_FP8;
}

/* Does decode.c run this with vectors of @lanes? Its rows are few, and read as they are. */
static inline int decode_reads(const struct abi_fwd_args *a, int32_t lanes)
{
	return max_head_rows(a) <= CPU_DECODE_ROWS && a->dropout.p_drop == 0 && reads_rows(a) &&
	       !a->mask_data.intervals.data && !a->mask_data.bits.data && a->hdim_q % lanes == 0 &&
	       a->hdim_v % lanes == 0 && a->k.stride_dim == 1 && a->v.stride_dim == 1 &&
	       (!a->cache.page_size || a->cache.layout == ABI_KV_LINEAR) &&
	       (a->o_dtype == ABI_F32 || a->o_dtype == ABI_F16 || a->o_dtype == ABI_BF16);
}

/* The state of the online softmax of one row. */
struct row_state {
	float max, sum;
	float *o; /* [hdim_v] sum of p v; not read when nothing was summed */
};

/*
 * Divides by the sum, stores O and LSE, or the partial ones of split @split. The attention sink
 * joins the sum here. A row that saw nothing gives 0 and -inf (with a sink: the sink).
 */
static inline void output_row(const struct abi_fwd_args *a, const struct view_sequence *s,
			      const struct score_row *r, int32_t split, struct row_state state)
{
	float factor = a->dropout.p_drop > 0 ? a->dropout.p_keep_inverse : 1.0f;
	float sum = state.sum, max = state.max, *o = state.o, sink, with_sink, lse;
	int64_t at;

	if (a->sink && a->n_splits == 0) {
		sink = a->sink[r->head] * LOG2_E;
		with_sink = sink > max ? sink : max;
		if (with_sink != -INFINITY) {
			factor *= exp2f(max - with_sink);
			sum = sum * exp2f(max - with_sink) + exp2f(sink - with_sink);
			max = with_sink;
		}
	}
	lse = sum == 0 ? -INFINITY : (max + log2f(sum)) * LN_2;
	factor = sum == 0 ? 0 : factor / sum;
	if (state.max == -INFINITY) /* O may never have been written; a NaN in the sum stays */
		for (int32_t d = 0; d < a->hdim_v; d++)
			o[d] = sum != sum ? sum : 0;
	else
		scale_row(o, a->hdim_v, factor);
	if (a->n_splits > 0) {
		at = s->packed_q ? s->q_start + r->i
				 : (int64_t)s->batch * a->sequences.seqlen_q_max + r->i;
		at += ((int64_t)split * a->nhead_q + r->head) * a->sequences.total_q;
		store_row(a->o_acc, ABI_F32, at * a->hdim_v, 1, o, a->hdim_v);
		a->lse_acc[at] = lse;
		return;
	}
	store_row(a->o.data, a->o_dtype, view_q_offset(&a->o, s, r->i, r->head), a->o.stride_dim, o,
		  a->hdim_v);
	if (a->lse.data)
		a->lse.data[view_rows_offset(&a->lse, s, r->i, r->head)] = lse;
}

#endif
