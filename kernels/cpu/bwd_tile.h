/* SPDX-License-Identifier: MIT */
/*
 * bwd_tile.h: one tile of backward: P and dS of TILE_ROWS query rows and up to TILE_COLUMNS keys.
 *
 *   S = Q K^T, dP = dO V^T;  P = exp(scale S - LSE);  dS = P (r dP - d)
 *
 * S and dP live in scratch, are turned into r P and dS in place, and then feed the three products
 * that accumulate dV, dK and dQ. Masked elements are exactly 0 in both.
 */
#ifndef FMHA_CPU_BWD_TILE_H
#define FMHA_CPU_BWD_TILE_H

#include <math.h>

#include "bwd.h"
#include "dropout_tile.h"

enum {
	/* Multiples of the micro-kernel's rows, of panels and of dropout patches. */
	TILE_ROWS = 96,
	TILE_COLUMNS = 192,
	/* Row stride of S and dP: not a power of two, so that a column of them does not fall into
	 * one set of the first-level cache. */
	TILE_LD = TILE_COLUMNS + 16,
};

#define LOG2_E 1.44269504088896340736f

/* Keys in a tile: fewer of the long ones, so that a tile stays in the second-level cache. */
static inline int32_t tile_columns(const struct abi_bwd_args *a)
{
	return a->hdim_q > 128 || a->hdim_v > 128 ? 2 * TILE_COLUMNS / 3 : TILE_COLUMNS;
}

struct tile {
	const struct abi_bwd_args *args;
	struct view_sequence sequence;
	int32_t width_q, width_v; /* head dims rounded up to panels */
	int32_t head, row, n_rows;
	int32_t column, n_columns;
	int32_t begin,
		end; /* the columns of the tile that some row may see; begin starts a panel */
	bool masked; /* some row does not see all of them */
	bool all_finite_k, all_finite_q; /* K and V, Q and dO */
	/* scratch */
	float *k_columns, *v_columns; /* panels of K^T, V^T */
	float *k_rows;                /* panels of K */
	struct gemm_a q, d_o;         /* rows: of the tensors themselves, or of float copies */
	float *q_rows, *d_o_rows;     /* panels */
	float *s, *dp;                /* [TILE_ROWS, TILE_LD] */
	float *dz;                    /* likewise, before the soft cap's derivative; for dbias */
	float *dq;                    /* [TILE_ROWS, width_q] */
	float *rows;                  /* float copies of K and V, or of Q and dO */
	float *bias;                  /* [TILE_COLUMNS] */
	uint8_t *bytes;               /* [TILE_ROWS, TILE_COLUMNS] dropout bytes */
};

/* Lays the arrays out in @scratch; returns its size. @scratch may be NULL. */
static inline size_t tile_init(struct tile *t, const struct abi_bwd_args *a, void *scratch)
{
	int64_t columns = tile_columns(a), at = 0;
	float *base = scratch;

	*t = (struct tile){.args = a,
			   .width_q = ROUND_UP(a->hdim_q, PANEL),
			   .width_v = ROUND_UP(a->hdim_v, PANEL)};
	struct {
		float **array;
		int64_t floats;
	} arrays[] = {
		{&t->k_columns, t->width_q * columns},
		{&t->v_columns, t->width_v * columns},
		{&t->k_rows, t->width_q * columns},
		{&t->q_rows, t->width_q * TILE_ROWS},
		{&t->d_o_rows, t->width_v * TILE_ROWS},
		{&t->s, TILE_ROWS * TILE_LD},
		{&t->dp, TILE_ROWS * TILE_LD},
		{&t->dz, a->dbias.data ? TILE_ROWS * TILE_LD : 0},
		{&t->dq, t->width_q * TILE_ROWS},
		{&t->rows, (t->width_q + t->width_v) * (columns > TILE_ROWS ? columns : TILE_ROWS)},
		{&t->bias, TILE_LD},
	};

	for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
		*arrays[i].array = base && arrays[i].floats ? base + at : NULL;
		at += ROUND_UP(arrays[i].floats, 16);
	}
	t->bytes = base ? (uint8_t *)(base + at) : NULL;
	return at * sizeof(float) + (a->dropout.p_drop > 0 ? TILE_ROWS * TILE_COLUMNS : 0);
}

/* May the tensor's own memory stand for rows of whole float vectors? */
static inline bool is_float_rows(const struct abi_bwd_args *a, const struct abi_tensor *t,
				 int32_t hdim)
{
	return a->dtype == ABI_F32 && t->stride_dim == 1 && hdim % LANES == 0;
}

static inline struct gemm_a copy_rows(const struct abi_bwd_args *a, const struct abi_tensor *t,
				      int64_t offset, int32_t n, int32_t hdim, float *copies)
{
	int32_t width = ROUND_UP(hdim, PANEL);

	for (int32_t i = 0; i < n; i++)
		bwd_load_row(copies + (int64_t)i * width, ROUND_UP(hdim, LANES), t,
			     offset + i * t->stride_seq, hdim, a->dtype);
	return (struct gemm_a){copies, width, 1};
}

/*
 * Packs @n rows from @offset on into @panels of @steps rows, and returns them as rows that lie
 * close together: a caller's stride of whole pages would leave the first-level cache few sets. A
 * single panel is such rows itself, and more of them are copied to @copies.
 */
static inline struct gemm_a pack_rows(const struct abi_bwd_args *a, const struct abi_tensor *t,
				      int64_t offset, int32_t n, int32_t hdim, float *copies,
				      float *panels, int32_t steps, vf *zeros)
{
	struct gemm_a rows = {(const float *)t->data + offset, t->stride_seq, 1};

	if (!is_float_rows(a, t, hdim) || hdim > PANEL)
		rows = copy_rows(a, t, offset, n, hdim, copies);
	pack(panels, rows.data, rows.row_stride, n, ROUND_UP(hdim, LANES), steps, zeros);
	return hdim > PANEL ? rows : (struct gemm_a){panels, PANEL, 1};
}

static inline bool is_zero(vf x)
{
	return vf_reduce_add(x) == 0;
}

static inline void tile_load_kv(struct tile *t, const struct view_sequence *v, int32_t head_k,
				int32_t column, int32_t n_columns)
{
	const struct abi_bwd_args *a = t->args;
	int32_t steps_q = ROUND_UP(a->hdim_q, LANES), steps_v = ROUND_UP(a->hdim_v, LANES);
	int64_t offset = view_k_offset(&a->v, v, column, head_k);
	struct gemm_a k, v_rows = {(const float *)a->v.data + offset, a->v.stride_seq, 1};
	vf zeros = {0};

	t->sequence = *v;
	t->column = column;
	t->n_columns = n_columns;
	k = pack_rows(a, &a->k, view_k_offset(&a->k, v, column, head_k), n_columns, a->hdim_q,
		      t->rows, t->k_rows, tile_columns(a), &zeros);
	if (is_float_rows(a, &a->v, a->hdim_v)) {
		/* The transposing pass jumps between rows: V is fetched while K is transposed. */
		pack_transposed(t->k_columns, k.data, k.row_stride, n_columns, steps_q,
				steps_q == steps_v ? &v_rows : NULL, &zeros);
	} else {
		pack_transposed(t->k_columns, k.data, k.row_stride, n_columns, steps_q, NULL,
				&zeros);
		v_rows = copy_rows(a, &a->v, offset, n_columns, a->hdim_v, t->rows);
	}
	pack_transposed(t->v_columns, v_rows.data, v_rows.row_stride, n_columns, steps_v, NULL,
			&zeros);
	t->all_finite_k = is_zero(zeros);
}

/* The columns that @row may see, as a range, sink tokens apart. */
struct columns {
	int64_t first, last;
};

static inline struct columns visible_columns(const struct abi_band *band,
					     const struct view_sequence *v, int32_t row)
{
	struct columns c = {.first = 0, .last = v->k_len - 1};
	int64_t diagonal = row +
			   (band->mask == ABI_MASK_BOTTOM_RIGHT ? (int64_t)v->k_len - v->q_len : 0);

	if (band->mask == ABI_MASK_NONE)
		return c;
	if (band->window_left >= 0 && diagonal - band->window_left > 0)
		c.first = diagonal - band->window_left;
	if (band->window_right >= 0 && diagonal + band->window_right < c.last)
		c.last = diagonal + band->window_right;
	return c;
}

/*
 * Places the tile's rows and finds the columns that matter; false when no row sees any. Rows
 * further down see columns further right, so the first and the last row decide.
 */
static inline bool tile_place(struct tile *t, const struct view_sequence *v, int32_t head,
			      int32_t row, int32_t n_rows, int32_t column, int32_t n_columns)
{
	const struct abi_band *band = &t->args->band;
	struct columns top = visible_columns(band, v, row);
	struct columns bottom = visible_columns(band, v, row + n_rows - 1);
	int64_t first = top.first, last = bottom.last, end = column + n_columns;

	if (band->mask != ABI_MASK_NONE && band->sink_tokens > column)
		first = column;
	if (first < column)
		first = column;
	if (last >= end)
		last = end - 1;
	if (first > last)
		return false;
	t->head = head;
	t->row = row;
	t->n_rows = n_rows;
	t->begin = (int32_t)(first - column) / PANEL * PANEL;
	t->end = (int32_t)(last - column) + 1;
	t->masked = top.last < last || bottom.first > column + t->begin;
	return true;
}

static inline void tile_load_q(struct tile *t)
{
	const struct abi_bwd_args *a = t->args;
	const struct view_sequence *v = &t->sequence;
	vf zeros = {0};

	t->q = pack_rows(a, &a->q, view_q_offset(&a->q, v, t->row, t->head), t->n_rows, a->hdim_q,
			 t->rows, t->q_rows, TILE_ROWS, &zeros);
	t->d_o = pack_rows(a, &a->d_o, view_q_offset(&a->d_o, v, t->row, t->head), t->n_rows,
			   a->hdim_v, t->rows + (int64_t)TILE_ROWS * t->width_q, t->d_o_rows,
			   TILE_ROWS, &zeros);
	t->all_finite_q = is_zero(zeros);
}

static inline void tile_load_bytes(struct tile *t)
{
	const struct abi_dropout *dropout = &t->args->dropout;
	const struct abi_tensor *stored = &dropout->randval;
	const struct view_sequence *v = &t->sequence;
	int32_t begin = t->begin / DROPOUT_PATCH_COLUMNS * DROPOUT_PATCH_COLUMNS;

	if (!stored->data) {
		dropout_tile(t->bytes + begin, TILE_COLUMNS, dropout,
			     (uint64_t)v->batch * t->args->nhead_q + t->head, t->row, t->n_rows,
			     t->column + begin, t->end - begin);
		return;
	}
	for (int32_t i = 0; i < t->n_rows; i++) {
		const uint8_t *from = (const uint8_t *)stored->data +
				      view_q_offset(stored, v, t->row + i, t->head);

		for (int32_t j = t->begin; j < t->end; j++)
			t->bytes[i * TILE_COLUMNS + j] = from[(t->column + j) * stored->stride_dim];
	}
}

/* tanh(x): an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel. */
static inline vf vf_tanh(vf x)
{
	vf z = x * x, size = vf_abs(x);
	vf near = z * -6.096999102e-3f + 2.099740836e-2f;
	vf far = 1 - 2 / (vf_exp2(vf_min(size * (2 * LOG2_E), vf_set1(100))) + 1);
	vi is_near = size < 0.625f;

	near = near * z - 5.385096846e-2f;
	near = near * z + 1.333277025e-1f;
	near = near * z - 3.333332895e-1f;
	near = near * z * x + x;
	far = (vf)((vi)far | ((vi)x & INT32_MIN));
	return (vf)((is_near & (vi)near) | (~is_near & (vi)far));
}

typedef uint8_t vb_memory __attribute__((vector_size(LANES), aligned(1), may_alias));

/* @yes where the mask is -1, 0 where it is 0. */
static inline vf vf_keep(vi mask, vf yes)
{
	return (vf)(mask & (vi)yes);
}

/* What a row needs to know besides its numbers. */
struct row {
	float lse, delta, slope;
	int32_t diagonal; /* column of alibi's 0 */
	struct columns visible;
};

/*
 * Row @i of S and dP becomes r P and dS. @extras: bias, alibi, soft cap, dropout or dbias may be
 * on;
 * @masked: some columns are not visible. Both are constants, so that the plain row stays short.
 */
static inline __attribute__((always_inline)) void
row_pass(struct tile *t, int32_t i, struct row row, const bool extras, const bool masked)
{
	const struct abi_bwd_args *a = t->args;
	float *s = t->s + i * TILE_LD, *dp = t->dp + i * TILE_LD;
	const float cap = extras ? a->logits_soft_cap : 0;
	const vi iota = __builtin_convertvector(vf_iota(), vi) + t->column;

	for (int32_t j = t->begin; j < t->end; j += LANES) {
		vf x = vf_load(s + j), y = vf_load(dp + j), p, dz, slope_of_cap = {0}, rp;

		if (extras) {
			x *= a->scale;
			if (cap > 0) {
				vf tanh = vf_tanh(x * (1 / cap));

				x = tanh * cap;
				slope_of_cap = 1 - tanh * tanh;
			}
			if (a->bias.data)
				x += vf_load(t->bias + j);
			if (a->alibi_slopes)
				x -= row.slope *
				     vf_abs(__builtin_convertvector(iota + (j - row.diagonal), vf));
			x = x * LOG2_E - row.lse * LOG2_E;
		} else {
			x = x * (a->scale * LOG2_E) - row.lse * LOG2_E;
		}
		/* Below 2^-100 it adds nothing, and products of subnormal numbers are slow. */
		rp = p = vf_keep(~(x <= -100.0f), vf_exp2(x));
		if (extras && a->dropout.p_drop > 0) {
			vi byte = __builtin_convertvector(
				*(const vb_memory *)(t->bytes + i * TILE_COLUMNS + j), vi);
			vf r = vf_keep(byte <= a->dropout.keep_at_most,
				       vf_set1(a->dropout.p_keep_inverse));

			rp *= r;
			y *= r;
		}
		dz = p * (y - row.delta);
		if (masked) {
			vi column = iota + j;
			vi seen = (column >= (int32_t)row.visible.first) |
				  (column < a->band.sink_tokens);

			seen &= column <= (int32_t)row.visible.last;
			rp = vf_keep(seen, rp);
			dz = vf_keep(seen, dz);
		}
		if (extras && t->dz)
			vf_store(t->dz + i * TILE_LD + j, dz);
		/* A masked element's slope may be NaN: 0 stays 0. */
		if (extras && cap > 0)
			dz = vf_keep(dz != 0, dz * slope_of_cap);
		vf_store(s + j, rp);
		vf_store(dp + j, dz);
	}
}

/* A row with nothing to attend to. */
static inline void row_clear(struct tile *t, int32_t i)
{
	for (int32_t j = t->begin; j < ROUND_UP(t->end, LANES); j += LANES) {
		vf_store(t->s + i * TILE_LD + j, (vf){0});
		vf_store(t->dp + i * TILE_LD + j, (vf){0});
		if (t->dz)
			vf_store(t->dz + i * TILE_LD + j, (vf){0});
	}
	t->masked = true;
}

/* The panels of K^T or V^T from column @begin on. */
static inline struct gemm_b tile_panels(const float *columns, int32_t begin, int32_t hdim)
{
	int64_t steps = ROUND_UP(hdim, LANES);

	return (struct gemm_b){columns + begin * steps, steps * PANEL};
}

/* Fills s with r P and dp with dS, and dz where dbias is wanted, of all visible columns. */
static inline void tile_scores(struct tile *t)
{
	const struct abi_bwd_args *a = t->args;
	const struct view_sequence *v = &t->sequence;
	bool extras = a->bias.data || a->alibi_slopes || a->logits_soft_cap > 0 ||
		      a->dropout.p_drop > 0 || t->dz;
	int32_t n = t->end - t->begin;

	gemm(t->n_rows, n, a->hdim_q, t->q, tile_panels(t->k_columns, t->begin, a->hdim_q),
	     t->s + t->begin, TILE_LD, false);
	gemm(t->n_rows, n, a->hdim_v, t->d_o, tile_panels(t->v_columns, t->begin, a->hdim_v),
	     t->dp + t->begin, TILE_LD, false);
	if (a->dropout.p_drop > 0)
		tile_load_bytes(t);
	for (int32_t i = 0; i < t->n_rows; i++) {
		int32_t row_index = t->row + i;
		struct row row = {
			.lse = a->lse.data[view_rows_offset(&a->lse, v, row_index, t->head)],
			.delta = a->d.data[view_rows_offset(&a->d, v, row_index, t->head)],
			.diagonal = row_index + v->k_len - v->q_len,
			.visible = visible_columns(&a->band, v, row_index),
		};

		if (row.lse == -INFINITY) {
			row_clear(t, i);
			continue;
		}
		if (a->alibi_slopes)
			row.slope = a->alibi_slopes[v->batch * a->alibi_stride_batch + t->head];
		if (a->bias.data)
			load_row(t->bias + t->begin, a->bias.data, a->bias_dtype,
				 view_q_offset(&a->bias, v, row_index, t->head) +
					 (t->column + t->begin) * a->bias.stride_dim,
				 a->bias.stride_dim, n);
		if (extras && t->masked)
			row_pass(t, i, row, true, true);
		else if (extras)
			row_pass(t, i, row, true, false);
		else if (t->masked)
			row_pass(t, i, row, false, true);
		else
			row_pass(t, i, row, false, false);
	}
}

#endif
