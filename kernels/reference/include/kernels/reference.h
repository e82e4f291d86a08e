/* SPDX-License-Identifier: MIT */
/*
 * reference.h: attention in double precision, written from the formulas, slow and obviously right.
 * Takes the same argument structs as the kernels, reads the tensors in their own types, computes in
 * double, keeps one row of S at a time and writes double results into plain packed arrays, so that
 * a comparison never rounds the judge.
 */
#ifndef FMHA_KERNELS_REFERENCE_H
#define FMHA_KERNELS_REFERENCE_H

#include <stdint.h>

#include <kernels/abi.h>

/*
 * Forward, paged or contiguous, split or not (splits are ignored: the result is the same).
 * @o:       [batch, seqlen_q_max, nhead_q, hdim_v], or [total_q, nhead_q, hdim_v] in group mode;
 *           rows that belong to no sequence are left as they are
 * @lse:     [batch, nhead_q, seqlen_q_max] or [nhead_q, total_q]; NULL: not wanted
 * @randval: dropout bytes [batch, nhead_q, seqlen_q_max, seqlen_k_max] or
 *           [nhead_q, total_q, seqlen_k_max]; NULL: not wanted
 * Return: 0, or -1 when out of memory.
 */
int reference_forward(const struct abi_fwd_args *args, double *o, double *lse, uint8_t *randval);

/*
 * The same formula evaluated with each step rounded to @round_dtype (enum abi_dtype: S and O held in
 * that type, sums in float) and P, whose largest is 1, to @weight_dtype: the yardstick of the accuracy bar.
 */
int reference_forward_rounded(const struct abi_fwd_args *args, uint32_t round_dtype,
			      uint32_t weight_dtype, double *o, double *lse);

/*
 * Gradients, packed double, in the layouts of the tensors they belong to (group mode: packed axes);
 * dk and dv have nhead_k heads. dbias [batch, nhead_q, seqlen_q_max, seqlen_k_max] or
 * [nhead_q, total_q, seqlen_k_max], not summed over broadcast axes; dsink [nhead_q]. Any of dbias,
 * dsink may be NULL. LSE and O are recomputed, never read.
 */
int reference_backward(const struct abi_bwd_args *args, double *dq, double *dk, double *dv,
		       double *dbias, double *dsink);

/* Merge of partial results: o [batch, seqlen_q_max, nhead_q, hdim_v],
 * lse [batch, nhead_q, seqlen_q_max]. */
int reference_combine(const struct abi_combine_args *args, double *o, double *lse);

/*
 * Append with rotary embedding: writes the cache tensors of @args themselves, rounding once from
 * double, so that a kernel's cache can be compared bit by bit.
 */
int reference_appendkv(const struct abi_appendkv_args *args);

/* One byte of the dropout mask: a function of logical coordinates alone (DESIGN, numerics). */
uint8_t reference_dropout_byte(uint64_t seed, uint64_t offset, uint32_t batch, uint32_t head,
			       uint32_t nhead_q, uint32_t row, uint32_t column);

/* Conversions, exact both ways where the value is representable; round to nearest even. */
double reference_load(const void *data, uint32_t dtype, int64_t index);
void reference_store(void *data, uint32_t dtype, int64_t index, double value);

#endif
