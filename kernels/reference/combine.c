/* SPDX-License-Identifier: MIT */
/*
 * combine.c: the merge of partial results. With LSE = ln(e^sink + sum_s e^LSE_s),
 *   O = sum_s e^(LSE_s - LSE) O_s.
 * A part with LSE_s = -inf is empty: its O_s is not read, since it may hold anything.
 */
#include <math.h>
#include <stddef.h>

#include <kernels/reference.h>
#include <kernels/view.h>

static void row_combine(const struct abi_combine_args *a, const struct view_sequence *v,
			int32_t head, int32_t row, double *o, double *lse)
{
	int64_t o_offset = view_q_offset(&a->o_parts, v, row, head);
	int64_t lse_offset = view_rows_offset(&a->lse_parts, v, row, head);
	double max = a->sink ? a->sink[head] : -INFINITY, sum = 0;

	for (int32_t s = 0; s < a->n_splits; s++) {
		double part = a->lse_parts.data[lse_offset + s * a->lse_parts_stride_split];

		if (part > max || isnan(part))
			max = part;
	}
	for (int32_t d = 0; d < a->hdim_v; d++)
		o[d] = 0;
	*lse = max;
	if (max == -INFINITY)
		return;
	if (a->sink)
		sum = exp(a->sink[head] - max);
	for (int32_t s = 0; s < a->n_splits; s++) {
		double part = a->lse_parts.data[lse_offset + s * a->lse_parts_stride_split];
		double weight = exp(part - max);

		if (part == -INFINITY)
			continue;
		sum += weight;
		for (int32_t d = 0; d < a->hdim_v; d++)
			o[d] += weight * reference_load(a->o_parts.data, a->o_parts_dtype,
							o_offset + s * a->o_parts_stride_split +
								d * a->o_parts.stride_dim);
	}
	for (int32_t d = 0; d < a->hdim_v; d++)
		o[d] /= sum;
	*lse = max + log(sum);
}

int reference_combine(const struct abi_combine_args *args, double *o, double *lse)
{
	const struct abi_sequences *s = &args->sequences;

	for (int32_t b = 0; b < s->batch; b++) {
		struct view_sequence v = view_sequence(s, NULL, b);
		int64_t first_row = v.packed_q ? v.q_start : (int64_t)b * s->seqlen_q_max;

		if (v.q_len < args->min_seqlen_q)
			continue;
		for (int32_t h = 0; h < args->nhead_q; h++) {
			double *lse_row = NULL, unwanted;

			if (lse && v.packed_q)
				lse_row = lse + (int64_t)h * s->total_q + v.q_start;
			else if (lse)
				lse_row = lse + ((int64_t)b * args->nhead_q + h) * s->seqlen_q_max;
			for (int32_t i = 0; i < v.q_len; i++)
				row_combine(args, &v, h, i,
					    o + ((first_row + i) * args->nhead_q + h) *
							    args->hdim_v,
					    lse_row ? &lse_row[i] : &unwanted);
		}
	}
	return 0;
}
