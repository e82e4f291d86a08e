/* SPDX-License-Identifier: MIT */
/* compute.c: a rank's own calls, and the copies between dense tensors and what travels. */
#include <math.h>
#include <string.h>

#include "internal.h"

struct dense dist_dense(const void *data, int32_t rows, int32_t heads, int32_t hdim)
{
	return (struct dense){(char *)(uintptr_t)data, rows, heads, hdim, (int64_t)heads * hdim};
}

struct dense dist_heads(const struct fmha_dist_plan *plan, struct dense whole, int32_t first,
			int32_t n)
{
	whole.data += (size_t)first * (size_t)whole.hdim * plan->element;
	whole.heads = n;
	return whole;
}

bool dist_piece(struct fmha_dist_interval q, int32_t q_at, struct fmha_dist_interval k,
		int32_t k_at, int32_t left, int32_t right, struct piece *ret_piece)
{
	int64_t a = q.begin, b = q.end, c = k.begin, d = k.end;
	int64_t of_left, of_right, shift;

	if (right >= 0 && c - right > a)
		a = c - right; /* rows before see none of the keys */
	if (left >= 0 && d + left < b)
		b = d + left;
	if (left >= 0 && a - left > c)
		c = a - left; /* keys before are seen by none of the rows */
	if (right >= 0 && b + right < d)
		d = b + right;
	if (a >= b || c >= d)
		return false;
	/* From the top left corner, which is tied to the bottom right one where that has no negative
	 * widths: causal masks are then what kernels call causal. */
	of_left = left < 0 || left - (a - c) >= b - a - 1 ? -1 : left - (a - c);
	of_right = right < 0 || right + (a - c) >= d - c - 1 ? -1 : right + (a - c);
	shift = (d - c) - (b - a);
	*ret_piece = (struct piece){(int32_t)(q_at + a - q.begin),
				    (int32_t)(q_at + b - q.begin),
				    (int32_t)(k_at + c - k.begin),
				    (int32_t)(k_at + d - k.begin),
				    FMHA_MASK_TOP_LEFT,
				    (int32_t)of_left,
				    (int32_t)of_right};
	if (of_left < 0 && of_right < 0) {
		ret_piece->mask = FMHA_MASK_NONE;
	} else if ((of_left < 0 || of_left + shift >= 0) &&
		   (of_right < 0 || of_right - shift >= 0)) {
		ret_piece->mask = FMHA_MASK_BOTTOM_RIGHT;
		ret_piece->left = of_left < 0 ? -1 : (int32_t)(of_left + shift);
		ret_piece->right = of_right < 0 ? -1 : (int32_t)(of_right - shift);
	}
	return true;
}

/* Rows [begin, end) of @from as a problem's tensor. */
static void set_tensor(const struct fmha_dist_plan *plan, struct fmha_tensor *t, struct dense from,
		       int32_t begin, int32_t end)
{
	if (!from.data)
		return;
	*t = (struct fmha_tensor){
		.data = from.data + (size_t)begin * (size_t)from.row_stride * plan->element,
		.dtype = plan->p.dtype,
		.n_dims = 4,
		.stride = {from.rows * from.row_stride, from.row_stride, from.hdim, 1},
		.extent = {plan->p.batch, end - begin, from.heads, from.hdim}};
}

int dist_compute(struct fmha_dist_plan *plan, bool backward, const struct call *call,
		 const struct piece *piece, struct fmha_error *err)
{
	struct fmha_problem p;
	int32_t q0 = piece->q0, q1 = piece->q1, k0 = piece->k0, k1 = piece->k1;

	fmha_problem_init(&p);
	p.batch = plan->p.batch;
	p.seqlen_q = q1 - q0, p.seqlen_k = k1 - k0;
	p.nhead_q = call->q.heads, p.nhead_k = call->k.heads;
	p.hdim_q = plan->p.hdim_q, p.hdim_v = plan->p.hdim_v;
	p.mask = piece->mask, p.window_left = piece->left, p.window_right = piece->right;
	p.scale = plan->p.scale, p.logits_soft_cap = plan->p.logits_soft_cap;
	p.deterministic = backward && plan->p.deterministic;
	set_tensor(plan, &p.q, call->q, q0, q1);
	set_tensor(plan, &p.k, call->k, k0, k1);
	set_tensor(plan, &p.v, call->v, k0, k1);
	set_tensor(plan, &p.o, call->o, q0, q1);
	p.lse = (struct fmha_tensor){
		.data = call->lse + q0,
		.dtype = FMHA_F32,
		.n_dims = 3,
		.stride = {(int64_t)call->lse_heads * call->lse_rows, call->lse_rows, 1},
		.extent = {plan->p.batch, call->q.heads, q1 - q0}};
	if (!backward)
		return fmha_forward(plan->device, &p, NULL, NULL, err);
	set_tensor(plan, &p.d_o, call->d_o, q0, q1);
	set_tensor(plan, &p.dq, call->dq, q0, q1);
	set_tensor(plan, &p.dk, call->dk, k0, k1);
	set_tensor(plan, &p.dv, call->dv, k0, k1);
	return fmha_backward(plan->device, &p, NULL, NULL, err);
}

/* ---- numbers ---- */

static float of_bits(uint32_t bits)
{
	float x;

	memcpy(&x, &bits, sizeof(x));
	return x;
}

#define F16_BIAS ((127U - 15) << 23) /* between the exponents of float and half */

static float of_f16(uint16_t bits)
{
	uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31;
	uint32_t mantissa = bits & 1023;

	if (exponent == 0)
		return (sign ? -1.0F : 1.0F) * (float)mantissa * 0x1p-24F;
	if (exponent == 31)
		return of_bits(sign | 0x7f800000U | mantissa << 13);
	return of_bits(sign | ((exponent << 23 | mantissa << 13) + F16_BIAS));
}

/* To the nearest, ties to even; NaN stays one. */
static uint16_t to_f16(float x)
{
	uint32_t bits, sign, size;

	memcpy(&bits, &x, sizeof(bits));
	sign = bits >> 16 & 0x8000, size = bits & 0x7fffffffU;
	if (size > 0x7f800000U)
		return (uint16_t)(sign | 0x7e00);
	if (size >= 0x477ff000U) /* 65520: half a step beyond the largest */
		return (uint16_t)(sign | 0x7c00);
	if (size < 0x38800000U) /* below 2^-14: multiples of 2^-24 */
		return (uint16_t)(sign | (uint32_t)lrintf(fabsf(x) * 0x1p24F));
	return (uint16_t)(sign | (size - F16_BIAS + 0xfff + (size >> 13 & 1)) >> 13);
}

static float of_bf16(uint16_t bits)
{
	return of_bits((uint32_t)bits << 16);
}

/* To the nearest, ties to even; NaN stays one. */
static uint16_t to_bf16(float x)
{
	uint32_t bits;

	memcpy(&bits, &x, sizeof(bits));
	if ((bits & 0x7fffffffu) > 0x7f800000u)
		return (uint16_t)(bits >> 16 | 0x40);
	return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

void dist_widen(const struct fmha_dist_plan *plan, float *to, const void *from, size_t n)
{
	const uint16_t *narrow = from;

	if (plan->p.dtype == FMHA_F32)
		memcpy(to, from, n * sizeof(float));
	else
		for (size_t i = 0; i < n; i++)
			to[i] = plan->p.dtype == FMHA_F16 ? of_f16(narrow[i]) : of_bf16(narrow[i]);
}

void dist_narrow(const struct fmha_dist_plan *plan, void *to, const float *from, size_t n)
{
	uint16_t *narrow = to;

	if (plan->p.dtype == FMHA_F32)
		memcpy(to, from, n * sizeof(float));
	else
		for (size_t i = 0; i < n; i++)
			narrow[i] = plan->p.dtype == FMHA_F16 ? to_f16(from[i]) : to_bf16(from[i]);
}

/* ---- what travels ---- */

size_t dist_block(const struct fmha_dist_plan *plan, int32_t heads, int32_t hdim)
{
	return (size_t)plan->p.batch * (size_t)plan->most * (size_t)heads * (size_t)hdim;
}

/* Each rank's rows, @to_whole or back. */
static void move_rows(const struct fmha_dist_plan *plan, size_t row, char *whole, char *blocks,
		      bool to_whole)
{
	for (int r = 0; r < plan->n_ranks; r++)
		for (int32_t b = 0; b < plan->p.batch; b++) {
			const struct shares *s = &plan->shares[r];
			size_t at = ((size_t)r * (size_t)plan->p.batch + (size_t)b) *
				    (size_t)plan->most;

			for (int i = 0; i < s->n; i++) {
				size_t n = (size_t)(s->at[i].end - s->at[i].begin);
				size_t first = (size_t)b * (size_t)plan->p.seqlen +
					       (size_t)s->at[i].begin;

				if (to_whole)
					memcpy(whole + first * row, blocks + at * row, n * row);
				else
					memcpy(blocks + at * row, whole + first * row, n * row);
				at += n;
			}
		}
}

void dist_whole_from_blocks(const struct fmha_dist_plan *plan, size_t size, char *whole,
			    const char *blocks, int32_t heads, int32_t hdim)
{
	move_rows(plan, size * (size_t)heads * (size_t)hdim, whole, (char *)(uintptr_t)blocks,
		  true);
}

void dist_blocks_from_whole(const struct fmha_dist_plan *plan, size_t size, char *blocks,
			    const char *whole, int32_t heads, int32_t hdim)
{
	move_rows(plan, size * (size_t)heads * (size_t)hdim, (char *)(uintptr_t)whole, blocks,
		  false);
}

void dist_rows_from_block(const struct fmha_dist_plan *plan, struct dense to, const float *block,
			  size_t row)
{
	for (int32_t b = 0; b < plan->p.batch; b++)
		for (int32_t i = 0; i < to.rows; i++)
			dist_narrow(plan,
				    to.data + ((size_t)b * (size_t)to.rows + (size_t)i) *
						      (size_t)to.row_stride * plan->element,
				    block + ((size_t)b * (size_t)plan->most + (size_t)i) * row,
				    row);
}

int dist_add_up(struct fmha_dist_plan *plan, float *blocks, struct dense to, struct fmha_error *err)
{
	size_t n = dist_block(plan, to.heads, to.hdim);
	size_t row = (size_t)to.heads * (size_t)to.hdim;
	int r = dist_mpi(err, MPI_Alltoall(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, blocks, (int)n,
					   MPI_FLOAT, plan->comm));

	for (int rank = 1; rank < plan->n_ranks; rank++)
		for (size_t i = 0; i < n; i++)
			blocks[i] += blocks[(size_t)rank * n + i];
	dist_rows_from_block(plan, to, blocks, row);
	return r;
}
