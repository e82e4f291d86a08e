/* SPDX-License-Identifier: MIT */
/*
 * score.h: what happens to one row of S between the two matrix products.
 *
 * Scores are kept in base 2 (already multiplied by log2(e)), so that every exponential is one exp2.
 * A row sees two ranges of columns: the band [lo, hi), and the sink columns left of a window.
 * Whatever else a tile computed is overwritten with -inf before the maximum is taken, so a masked
 * column never counts, even when its key holds a NaN.
 */
#ifndef FMHA_CPU_SCORE_H
#define FMHA_CPU_SCORE_H

#include <float.h>
#include <math.h>

#include <kernels/view.h>

#include "operand.h"

#define LOG2_E 1.44269504088896340736f
#define LN_2   0.69314718055994530942f

/* Bytes beside a vector of floats, one for each. */
typedef uint8_t vb_memory __attribute__((vector_size(LANES), aligned(1), may_alias));

struct score_row {
	int32_t head, i;
	int32_t sink_lo, sink_hi; /* visible columns left of the band, sink_hi <= lo */
	int32_t lo, hi;           /* the band, within the split */
};

static inline int32_t clamp_i64(int64_t x, int32_t lo, int32_t hi)
{
	return x < lo ? lo : x > hi ? hi : (int32_t)x;
}

/* The columns of [begin, end) that row i of head @head sees. */
static inline struct score_row score_row_at(const struct abi_band *band,
					    const struct view_sequence *s, int32_t head, int32_t i,
					    int32_t begin, int32_t end)
{
	struct score_row r = {.head = head, .i = i};
	int64_t diagonal = i, lo = 0, hi = s->k_len, sink = 0;

	if (band->mask == ABI_MASK_BOTTOM_RIGHT)
		diagonal += (int64_t)s->k_len - s->q_len;
	if (band->mask != ABI_MASK_NONE && band->window_right >= 0)
		hi = diagonal + band->window_right + 1;
	if (band->mask != ABI_MASK_NONE && band->window_left >= 0) {
		lo = diagonal - band->window_left;
		sink = band->sink_tokens;
	}
	hi = hi < s->k_len ? hi : s->k_len;
	sink = sink < lo ? sink : lo;
	sink = sink < hi ? sink : hi;
	r.hi = clamp_i64(hi, begin, end);
	r.lo = clamp_i64(lo, begin, r.hi);
	r.sink_lo = begin;
	r.sink_hi = clamp_i64(sink, begin, r.lo);
	return r;
}

static inline int32_t score_row_first(const struct score_row *r)
{
	return r->sink_hi > r->sink_lo ? r->sink_lo : r->lo;
}

static inline int32_t score_row_empty(const struct score_row *r)
{
	return r->lo >= r->hi && r->sink_lo >= r->sink_hi;
}

/* What scores go through besides scale and mask; constant for a launch. */
struct score_ops {
	const struct abi_fwd_args *args;
	float q_factor;   /* multiplies Q: scale * log2(e), or scale / soft cap */
	float cap;        /* soft cap * log2(e); 0: none */
	int32_t modifies; /* soft cap, bias or ALiBi is there */
};

static inline struct score_ops score_ops_init(const struct abi_fwd_args *a)
{
	struct score_ops ops = {.args = a, .q_factor = a->scale * LOG2_E};

	if (a->logits_soft_cap > 0) {
		ops.q_factor = a->scale / a->logits_soft_cap;
		ops.cap = a->logits_soft_cap * LOG2_E;
	}
	ops.modifies = ops.cap > 0 || a->bias.data || a->alibi_slopes;
	return ops;
}

/* tanh within 3e-7: x P(x^2) / Q(x^2), minimax over [0, 9]; beyond that tanh is 1 in float. */
static inline vf vf_tanh(vf x)
{
	vf z, p, q;

	x = vf_min(vf_set1(9.0f), vf_max(vf_set1(-9.0f), x));
	z = x * x;
	p = z * 1.33545521e-8f + 2.06090005e-5f;
	p = p * z + 3.49558308e-3f;
	p = p * z + 1.33810214e-1f;
	p = p * z + 9.99999979e-1f;
	q = z * 7.77651259e-7f + 3.28562661e-4f;
	q = q * z + 2.5876963e-2f;
	q = q * z + 4.6714337e-1f;
	q = q * z + 1.0f;
	return x * p * vf_reciprocal(q);
}

static inline void score_soft_cap(float *t, int32_t n, float cap)
{
	for (int32_t j = 0; j < n; j += LANES)
		vf_store(t + j, vf_tanh(vf_load(t + j)) * cap);
}

/*
 * A bias in base 2. The largest finite numbers would become infinite there, and a row of nothing else
 * would be taken for one that is masked, where it has an average: they count as BIAS_MOST, whose
 * product is finite and leaves room for a score. Infinities stay what they are.
 */
#define BIAS_MOST 2.2e38f

static inline vf score_bias(vf bias)
{
	vf limited = vf_min(vf_set1(BIAS_MOST), vf_max(vf_set1(-BIAS_MOST), bias));
	vi is_finite = vf_abs(bias) <= FLT_MAX;

	return (vf)((is_finite & (vi)limited) | (~is_finite & (vi)bias)) * LOG2_E;
}

/* @t: columns [c0, c0 + n) of the row; @temp: n floats. Columns beyond k_len keep garbage. */
static inline void score_add_bias(float *t, int32_t n, int32_t c0, const struct abi_fwd_args *a,
				  const struct view_sequence *s, const struct score_row *r,
				  float *temp)
{
	int64_t at = view_q_offset(&a->bias, s, r->i, r->head) + c0 * a->bias.stride_dim;
	int32_t readable = s->k_len - c0 < n ? s->k_len - c0 : n, j = 0;
	const float *bias = (const float *)a->bias.data + at;

	if (a->bias_dtype == ABI_F32 && a->bias.stride_dim == 1)
		for (; j + LANES <= readable; j += LANES)
			vf_store(t + j, vf_load(t + j) + score_bias(vf_load(bias + j)));
	if (j == readable)
		return;
	load_row(temp + j, a->bias.data, a->bias_dtype, at + j * a->bias.stride_dim,
		 a->bias.stride_dim, readable - j);
	for (int32_t i = readable; i < n; i++)
		temp[i] = 0;
	for (; j < n; j += LANES)
		vf_store(t + j, vf_load(t + j) + score_bias(vf_load(temp + j)));
}

static inline void score_add_alibi(float *t, int32_t n, int32_t c0, const struct abi_fwd_args *a,
				   const struct view_sequence *s, const struct score_row *r)
{
	float slope = a->alibi_slopes[s->batch * a->alibi_stride_batch + r->head] * LOG2_E;
	vf distance = vf_iota() + (float)(c0 - (r->i + s->k_len - s->q_len));

	for (int32_t j = 0; j < n; j += LANES) {
		vf_store(t + j, vf_load(t + j) - vf_abs(distance) * slope);
		distance += (float)LANES;
	}
}

static inline void score_modify(float *t, int32_t n, int32_t c0, const struct score_ops *ops,
				const struct view_sequence *s, const struct score_row *r,
				float *temp)
{
	if (ops->cap > 0)
		score_soft_cap(t, n, ops->cap);
	if (ops->args->bias.data)
		score_add_bias(t, n, c0, ops->args, s, r, temp);
	if (ops->args->alibi_slopes)
		score_add_alibi(t, n, c0, ops->args, s, r);
}

/* Columns [from, to) become -inf, whole vectors and the parts of two. */
static inline void score_hide(float *t, int32_t from, int32_t to)
{
	const vf hidden = vf_set1(-INFINITY);

	for (int32_t j = from / LANES * LANES; j < to; j += LANES) {
		vf column = vf_iota() + (float)j;
		vi inside = (column >= (float)from) & (column < (float)to);

		vf_store(t + j, (vf)((inside & (vi)hidden) | (~inside & (vi)vf_load(t + j))));
	}
}

/* Overwrites what the row does not see of columns [c0, c0 + n). */
static inline void score_mask(float *t, int32_t n, int32_t c0, const struct score_row *r)
{
	int32_t sink_lo = clamp_i64((int64_t)r->sink_lo - c0, 0, n);
	int32_t sink_hi = clamp_i64((int64_t)r->sink_hi - c0, 0, n);
	int32_t lo = clamp_i64((int64_t)r->lo - c0, 0, n),
		hi = clamp_i64((int64_t)r->hi - c0, 0, n);

	if (r->lo >= r->hi)
		lo = hi = n;
	if (r->sink_lo >= r->sink_hi)
		sink_lo = sink_hi = 0;
	score_hide(t, 0, sink_lo);
	score_hide(t, sink_hi, lo);
	score_hide(t, hi, n);
}

/* Several accumulators each: one would wait for itself. */
#define SCORE_CHAINS 4

static inline float score_max(const float *t, int32_t n)
{
	vf max[SCORE_CHAINS];
	int32_t j = 0;

	/* A NaN is dropped here; its exponential puts it into the sum. */
	for (int u = 0; u < SCORE_CHAINS; u++)
		max[u] = vf_set1(-INFINITY);
	for (; j + SCORE_CHAINS * LANES <= n; j += SCORE_CHAINS * LANES)
#pragma GCC unroll 4
		for (int u = 0; u < SCORE_CHAINS; u++)
			max[u] = vf_max(vf_load(t + j + u * LANES), max[u]);
	for (; j < n; j += LANES)
		max[0] = vf_max(vf_load(t + j), max[0]);
	return vf_reduce_max(vf_max(vf_max(max[0], max[1]), vf_max(max[2], max[3])));
}

/* The largest element of each of four vectors. */
static inline void score_max_four(float *max, const vf x[4])
{
#if defined(__AVX512F__)
	__m512 ab = _mm512_max_ps(_mm512_unpacklo_ps((__m512)x[0], (__m512)x[1]),
				  _mm512_unpackhi_ps((__m512)x[0], (__m512)x[1]));
	__m512 cd = _mm512_max_ps(_mm512_unpacklo_ps((__m512)x[2], (__m512)x[3]),
				  _mm512_unpackhi_ps((__m512)x[2], (__m512)x[3]));
	__m512 all = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44),
				   _mm512_shuffle_ps(ab, cd, 0xee));
	__m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));

	_mm_storeu_ps(max,
		      _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
	for (int r = 0; r < 4; r++)
		max[r] = vf_reduce_max(x[r]);
#endif
}

/* score_max() of each row, four at a time: one alone spends most of its time waiting for its last
 * few steps. */
static inline void score_max_rows(const float *t, int64_t stride, int32_t rows, int32_t n,
				  float *max)
{
	int32_t r = 0;

	for (; r + 4 <= rows; r += 4, t += 4 * stride) {
		vf most[4], more[4];
		int32_t j = 0;

		for (int i = 0; i < 4; i++)
			most[i] = more[i] = vf_set1(-INFINITY);
		for (; j + 2 * LANES <= n; j += 2 * LANES) {
#pragma GCC unroll 4
			for (int i = 0; i < 4; i++) {
				most[i] = vf_max(vf_load(t + i * stride + j), most[i]);
				more[i] = vf_max(vf_load(t + i * stride + j + LANES), more[i]);
			}
		}
#pragma GCC unroll 4
		for (int i = 0; i < 4; i++) {
			if (j < n)
				most[i] = vf_max(vf_load(t + i * stride + j), most[i]);
			most[i] = vf_max(most[i], more[i]);
		}
		score_max_four(max + r, most);
	}
	for (; r < rows; r++, t += stride)
		max[r] = score_max(t, n);
}

/* p = 2^(factor * t - max); the sums are added to sum [LANES]. @p may lie where @t lies. */
static inline void score_exponentials(operand *p, const float *t, int32_t n, float factor,
				      float max, float *sum)
{
	vf total[SCORE_CHAINS] = {vf_load(sum)};
	int32_t j = 0;

	for (; j + SCORE_CHAINS * LANES <= n; j += SCORE_CHAINS * LANES) {
		vf x[SCORE_CHAINS];

#pragma GCC unroll 4
		for (int u = 0; u < SCORE_CHAINS; u++)
			x[u] = vf_load(t + j + u * LANES) * factor - max;
		vf_exp2_some(x, SCORE_CHAINS);
#pragma GCC unroll 4
		for (int u = 0; u < SCORE_CHAINS; u++) {
			total[u] += x[u];
			operand_store(p + j + u * LANES, x[u]);
		}
	}
	for (; j < n; j += LANES) {
		vf x = vf_exp2(vf_load(t + j) * factor - max);

		total[0] += x;
		operand_store(p + j, x);
	}
	vf_store(sum, (total[0] + total[1]) + (total[2] + total[3]));
}

/* The same for some rows side by side: @p rows of @p_stride, @t rows of @stride, sum [rows][LANES],
 * each multiplied by its row's @alpha first. */
static inline __attribute__((always_inline)) void
score_exponentials_some(operand *p, int64_t p_stride, const float *t, int64_t stride, int32_t n,
			float factor, const float *max, const float *alpha, float *sum,
			const int rows)
{
	vf total[4], base[4], x[4];

#pragma GCC unroll 4
	for (int r = 0; r < rows; r++) {
		total[r] = vf_load(sum + r * LANES) * alpha[r];
		base[r] = vf_set1(max[r]);
	}
	for (int32_t j = 0; j < n; j += LANES) {
#pragma GCC unroll 4
		for (int r = 0; r < rows; r++)
			x[r] = vf_load(t + r * stride + j) * factor - base[r];
		vf_exp2_some(x, rows);
#pragma GCC unroll 4
		for (int r = 0; r < rows; r++) {
			total[r] += x[r];
			operand_store(p + r * p_stride + j, x[r]);
		}
	}
#pragma GCC unroll 4
	for (int r = 0; r < rows; r++)
		vf_store(sum + r * LANES, total[r]);
}

static inline void score_exponentials_rows(operand *p, int64_t p_stride, const float *t,
					   int64_t stride, int32_t rows, int32_t n, float factor,
					   const float *max, const float *alpha, float *sum)
{
	int32_t r = 0;

	for (; rows % 4 && r + 3 <= rows; r += 3)
		score_exponentials_some(p + r * p_stride, p_stride, t + r * stride, stride, n,
					factor, max + r, alpha + r, sum + r * LANES, 3);
	for (; r + 4 <= rows; r += 4)
		score_exponentials_some(p + r * p_stride, p_stride, t + r * stride, stride, n,
					factor, max + r, alpha + r, sum + r * LANES, 4);
	for (; r < rows; r++)
		score_exponentials_some(p + r * p_stride, p_stride, t + r * stride, stride, n,
					factor, max + r, alpha + r, sum + r * LANES, 1);
}

#endif
