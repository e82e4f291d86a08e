/* SPDX-License-Identifier: MIT */
/*
 * bwd_tile.h: one tile of backward: P and dS of TILE_ROWS query rows and up to TILE_COLUMNS keys.
 *
 *   S = scale Q K^T, dP = dO V^T;  P = exp(S - LSE);  dS = P (r dP - d)
 *
 * S is made like forward's, out of the same operands, so that it has forward's very bits: large
 * logits carry rounding errors that LSE carries, too, and that cancel in the difference.
 *
 * S and dP live in scratch, are turned into r P and dS in place, as operands, and then feed the
 * three products that accumulate dV, dK and dQ. Masked elements are exactly 0 in both, and so are
 * columns up to a whole COLUMN_UNIT. Operands that go in pairs lie as their products read them: K,
 * Q and dO in panels besides their rows, P and dS once more by columns.
 */
#ifndef FMHA_CPU_BWD_TILE_H
#define FMHA_CPU_BWD_TILE_H

#include <math.h>

#include "bwd.h"
#include "dropout_tile.h"
#include "pack.h"
#include "score.h"
#include "seen.h"
#include "tile.h"

enum {
	/* Multiples of the micro-kernel's rows, of panels and of dropout patches. */
	TILE_ROWS = CPU_BACKWARD_ROWS,
	TILE_COLUMNS = CPU_BACKWARD_KEYS,
	/* S and dP are made and passed over in blocks of this size, which stay in the first-level
	 * cache meanwhile. Masks that hide a whole strip's columns save the work on them. */
	STRIP_ROWS = OPERAND_TILES ? GROUP_ROWS : 4 * GROUP_ROWS,
	STRIP_COLUMNS = 64,
	N_STRIPS = TILE_ROWS / STRIP_ROWS,
	/* Row stride of S and dP: not a power of two, so that a column of them does not fall into
	 * one set of the first-level cache. */
	TILE_LD = TILE_COLUMNS + 16,
	/* NOLINTNEXTLINE: an operand may be a float */
	P_LD = TILE_LD * (int)(sizeof(float) / sizeof(operand)), /* P lies where S lay */
	COLUMN_LD = 2 * PANEL, /* of P and dS by columns, where they have to lie so */
	LINE = 64 / (int)sizeof(operand),
	MAX_STRIDE = 16 * LINE, /* of a caller's rows that are read in place */
	GROUP = 4 * LANES,      /* columns of a row that are passed over at a time */
};

_Static_assert(TILE_ROWS % STRIP_ROWS == 0 && STRIP_COLUMNS % PANEL == 0, "whole strips");
_Static_assert(OPERAND_PAIR == 1 || TILE_ROWS <= COLUMN_LD, "a column has room for all rows");

/* Keys in a tile: fewer of the long ones, so that a tile stays in the second-level cache. */
static inline int32_t tile_columns(const struct abi_bwd_args *a)
{
	return cpu_backward_keys(a->hdim_q, a->hdim_v);
}

/* Between rows of copies: an odd number of cache lines, so that a panel's width of rows spreads
 * over all sets of the first-level cache. */
static inline int32_t row_stride(int32_t hdim)
{
	return (ROUND_UP(hdim, LINE) / LINE | 1) * LINE;
}

/* Whole steps of K_UNIT a row. */
struct rows {
	const operand *data;
	int64_t ld;
};

/* What a row needs to know besides its numbers. */
struct tile_row {
	float lse, delta, slope; /* slope: times log2(e) */
	int32_t diagonal;        /* column of alibi's 0 */
	int32_t first, last;     /* visible columns, sink tokens apart */
	bool holes;              /* not all of them: a mask is data */
};

/* Columns of the tile that some row of the strip may see; begin starts a panel. */
struct strip {
	int32_t begin, end;
	int32_t full_begin, full_end; /* that every row sees */
};

struct tile {
	const struct abi_bwd_args *args;
	struct view_sequence sequence;
	int32_t width_q, width_v; /* head dims rounded up to panels */
	int32_t head, row, n_rows;
	int32_t split; /* of dq_acc, that its dQ belongs to */
	int32_t column, n_columns;
	int32_t begin,
		end; /* the columns of the tile that some row may see; begin starts a panel */
	bool masked; /* some row does not see all of them */
	enum { UNKNOWN, FINITE, NOT_FINITE } finite_k; /* K of the tile */
	struct rows k, v, q, d_o;
	struct rows logit_q;                          /* Q times logit_factor(), where SCALES_Q */
	struct gemm_b k_panels, q_panels, d_o_panels; /* the same once more, as B */
	/* scratch */
	operand *k_columns, *v_columns;         /* panels of K^T, V^T */
	operand *k_rows, *v_rows;               /* copies of rows, row_stride() apart */
	operand *q_rows, *d_o_rows;             /* likewise */
	operand *logit_q_rows;                  /* likewise */
	operand *k_pairs, *q_pairs, *d_o_pairs; /* what the panels lie in */
	operand *pairs, *by_column; /* of P or dS: [TILE_ROWS, PANEL], [columns, COLUMN_LD] */
	float *s, *dp;              /* [TILE_ROWS, TILE_LD] */
	float *dz;                  /* likewise, before the soft cap's derivative; for dbias */
	float *dq;                  /* [TILE_ROWS, width_q] */
	float *bias;                /* [TILE_LD] */
	uint8_t *bytes;             /* [TILE_ROWS, TILE_COLUMNS] dropout bytes */
	uint8_t *seen;              /* likewise, 1 where a mask that is data lets a row see */
	struct fetches fetches;     /* what the next tile reads */
	struct strip strips[N_STRIPS];
	struct tile_row facts[TILE_ROWS];
};

static inline void *take(uintptr_t *at, int64_t bytes)
{
	void *array = (void *)*at;

	*at += ROUND_UP(bytes, 64);
	return array;
}

/* Lays the arrays out in @scratch; returns its size. @scratch may be NULL. */
static inline size_t tile_init(struct tile *t, const struct abi_bwd_args *a, void *scratch)
{
	/* Rows that products read or write in whole groups. */
	const int64_t columns = ROUND_UP(tile_columns(a), GROUP_ROWS);
	const int64_t whole = sizeof(operand), single = sizeof(float);
	const int64_t pair = OPERAND_PAIR > 1 ? whole : 0; /* of what only pairs need */
	uintptr_t at = (uintptr_t)scratch;

	t->args = a;
	t->width_q = ROUND_UP(a->hdim_q, PANEL);
	t->width_v = ROUND_UP(a->hdim_v, PANEL);
	t->fetches.n = t->fetches.first = 0;
	t->k_columns = take(&at, whole * t->width_q * columns);
	t->v_columns = take(&at, whole * t->width_v * columns);
	t->k_rows = take(&at, whole * row_stride(a->hdim_q) * columns);
	t->v_rows = take(&at, whole * row_stride(a->hdim_v) * columns);
	t->q_rows = take(&at, whole * row_stride(a->hdim_q) * TILE_ROWS);
	t->d_o_rows = take(&at, whole * row_stride(a->hdim_v) * TILE_ROWS);
	t->logit_q_rows = take(&at, whole * SCALES_Q * row_stride(a->hdim_q) * TILE_ROWS);
	t->k_pairs = take(&at, pair * t->width_q * columns);
	t->q_pairs = take(&at, pair * t->width_q * TILE_ROWS);
	t->d_o_pairs = take(&at, pair * t->width_v * TILE_ROWS);
	t->pairs = take(&at, pair * TILE_ROWS * PANEL);
	t->by_column = take(&at, pair * COLUMN_LD * columns);
	t->s = take(&at, single * TILE_ROWS * TILE_LD);
	t->dp = take(&at, single * TILE_ROWS * TILE_LD);
	t->dz = a->dbias.data ? take(&at, single * TILE_ROWS * TILE_LD) : NULL;
	t->dq = take(&at, single * t->width_q * TILE_ROWS);
	t->bias = take(&at, single * TILE_LD);
	t->bytes = take(&at, a->dropout.p_drop > 0 ? TILE_ROWS * TILE_COLUMNS + GROUP : 0);
	t->seen = take(&at, seen_is_data(&a->mask_data) ? TILE_ROWS * TILE_COLUMNS + GROUP : 0);
	return at - (uintptr_t)scratch;
}

/*
 * @n rows from @offset on: the tensor's own, or operands copied to @copies, zeros up to whole
 * ROW_UNITs. A stride of many lines would leave the caches few sets, so such rows are copied, too.
 */
static inline struct rows load_rows(const struct abi_bwd_args *a, const struct abi_tensor *t,
				    int64_t offset, int32_t n, int32_t hdim, operand *copies)
{
	int32_t width = ROUND_UP(hdim, K_UNIT), ld = row_stride(hdim);

	if (a->dtype == OPERAND_DTYPE && t->stride_dim == 1 && hdim == width && n % ROW_UNIT == 0 &&
	    t->stride_seq >= hdim && t->stride_seq <= MAX_STRIDE &&
	    t->stride_seq % OPERAND_PAIR == 0)
		return (struct rows){(const operand *)t->data + offset, t->stride_seq};
	for (int32_t i = 0; i < ROUND_UP(n, ROW_UNIT); i++) {
		operand *row = copies + (int64_t)i * ld;
		int32_t filled = i < n ? hdim : 0;

		operand_load_row(row, t->data, a->dtype, offset + i * t->stride_seq, t->stride_dim,
				 filled);
		memset(row + filled, 0, sizeof(*row) * (width - filled));
	}
	return (struct rows){copies, ld};
}

/* @n rows as B, in @pairs where operands go in pairs. */
static inline struct gemm_b rows_as_b(struct rows x, int32_t n, int32_t hdim, operand *pairs)
{
	int64_t padded = ROUND_UP(n, ROW_UNIT);
	vf zeros = {0};

	if (OPERAND_PAIR == 1)
		return (struct gemm_b){x.data, PANEL, x.ld};
	pack_rows(pairs, padded * PANEL, x.data, x.ld, padded, ROUND_UP(hdim, K_UNIT), &zeros);
	return (struct gemm_b){pairs, padded * PANEL, PANEL};
}

/* Neither an infinity nor a NaN among them. */
static inline bool rows_are_finite(struct rows x, int32_t n, int32_t hdim)
{
	vf sum = {0};

	for (int32_t i = 0; i < n; i++)
		for (int32_t d = 0; d < hdim; d += LANES)
			sum += operand_load(x.data + i * x.ld + d) * 0.0f;
	return vf_reduce_add(sum) == 0;
}

static inline void tile_load_kv(struct tile *t, const struct view_sequence *v, int32_t head_k,
				int32_t column, int32_t n_columns)
{
	const struct abi_bwd_args *a = t->args;
	struct gemm_a next;

	t->sequence = *v;
	t->column = column;
	t->n_columns = n_columns;
	t->k = load_rows(a, &a->k, view_k_offset(&a->k, v, column, head_k), n_columns, a->hdim_q,
			 t->k_rows);
	t->v = load_rows(a, &a->v, view_k_offset(&a->v, v, column, head_k), n_columns, a->hdim_v,
			 t->v_rows);
	/* The transposing pass jumps between rows: V is fetched while K is transposed. */
	next = (struct gemm_a){t->v.data, t->v.ld, 1};
	pack_columns(t->k_columns, t->k.data, t->k.ld, n_columns, a->hdim_q,
		     a->hdim_q == a->hdim_v ? &next : NULL);
	pack_columns(t->v_columns, t->v.data, t->v.ld, n_columns, a->hdim_v, NULL);
	t->k_panels = rows_as_b(t->k, n_columns, a->hdim_q, t->k_pairs);
	t->finite_k = UNKNOWN;
}

/* Whether K, Q and dO of the tile, which zeros of P and dS multiply, are free of infinities and
 * NaN. */
static inline bool tile_is_finite(struct tile *t)
{
	const struct abi_bwd_args *a = t->args;

	if (t->finite_k == UNKNOWN)
		t->finite_k = rows_are_finite(t->k, t->n_columns, a->hdim_q) ? FINITE : NOT_FINITE;
	return t->finite_k == FINITE && rows_are_finite(t->q, t->n_rows, a->hdim_q) &&
	       rows_are_finite(t->d_o, t->n_rows, a->hdim_v);
}

static inline int32_t clamp(int64_t x, int32_t low, int32_t high)
{
	return x < low ? low : x > high ? high : (int32_t)x;
}

/* The columns that a row may see, as a range, sink tokens apart. */
struct columns {
	int64_t first, last;
};

/* What row 0 would see if keys had no ends; every other row sees as much further right. */
static inline struct columns visible_window(const struct abi_band *band,
					    const struct view_sequence *v)
{
	const int64_t unlimited = (int64_t)1 << 40;
	int64_t shift = band->mask == ABI_MASK_BOTTOM_RIGHT ? (int64_t)v->k_len - v->q_len : 0;
	struct columns c = {-unlimited, unlimited};

	if (band->mask != ABI_MASK_NONE && band->window_left >= 0)
		c.first = shift - band->window_left;
	if (band->mask != ABI_MASK_NONE && band->window_right >= 0)
		c.last = shift + band->window_right;
	return c;
}

static inline struct columns visible_columns(const struct abi_band *band,
					     const struct view_sequence *v, int32_t row)
{
	struct columns c = visible_window(band, v);

	c.first = row + c.first > 0 ? row + c.first : 0;
	c.last = row + c.last < v->k_len ? row + c.last : v->k_len - 1;
	return c;
}

/* The same by a mask that is data, which then leaves the tile's columns in t->seen, and what there is
 * of each row in its facts. */
static inline bool tile_place_data(struct tile *t, const struct view_sequence *v, int32_t column)
{
	const struct abi_mask_data *mask = &t->args->mask_data;
	int32_t lo = column + t->begin, hi = column + t->end;
	struct seen_range all = {0, 0};

	for (int32_t i = 0; i < t->n_rows; i++) {
		struct score_row r = score_row_at(&t->args->band, v, t->head, t->row + i, lo, hi);
		struct seen_range hull = seen_hull(mask, v, &r, lo, hi);

		seen_join(&all, hull.lo, hull.hi);
		t->facts[i].first = hull.lo;
		t->facts[i].last = hull.hi - 1;
	}
	if (all.lo >= all.hi)
		return false;
	t->begin = (all.lo - column) / PANEL * PANEL;
	t->end = all.hi - column;
	memset(t->seen, 0, (size_t)t->n_rows * TILE_COLUMNS + GROUP);
	for (int32_t i = 0; i < t->n_rows; i++) {
		struct tile_row *fact = &t->facts[i];
		uint8_t *seen = t->seen + i * TILE_COLUMNS;
		struct score_row r = score_row_at(&t->args->band, v, t->head, t->row + i, lo, hi);

		if (fact->last < fact->first)
			continue;
		seen_fill(mask, v, &r, fact->first, fact->last + 1, seen + (fact->first - column));
		fact->holes = !seen_all(seen + (fact->first - column),
					fact->last + 1 - fact->first);
	}
	return true;
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
	return !seen_is_data(&t->args->mask_data) || tile_place_data(t, v, column);
}

/* @rows: of the strip. */
static inline void strip_init(struct tile *t, struct strip *strip, const struct tile_row *rows,
			      int32_t n_rows)
{
	int32_t first = INT32_MAX, last = -1, full_first = 0, full_last = INT32_MAX;

	for (int32_t i = 0; i < n_rows; i++) {
		first = rows[i].first < first ? rows[i].first : first;
		last = rows[i].last > last ? rows[i].last : last;
		full_first = rows[i].first > full_first ? rows[i].first : full_first;
		full_last = rows[i].last < full_last ? rows[i].last : full_last;
		if (rows[i].holes)
			full_last = -1;
	}
	if (t->args->band.mask != ABI_MASK_NONE && t->args->band.sink_tokens > t->column &&
	    !seen_is_data(&t->args->mask_data))
		first = t->column;
	*strip = (struct strip){
		.begin = clamp((int64_t)first - t->column, t->begin, t->end) / PANEL * PANEL,
		.end = clamp((int64_t)last - t->column + 1, t->begin, t->end),
		.full_begin = clamp((int64_t)full_first - t->column, t->begin, INT32_MAX),
		.full_end = clamp((int64_t)full_last - t->column + 1, t->begin, t->end),
	};
	if (strip->begin >= strip->end)
		strip->begin = strip->end = t->begin;
	t->masked |= strip->full_begin > t->begin || strip->full_end < t->end;
}

/* Fills what the passes need to know of the rows that tile_place() found. */
static inline void tile_load_facts(struct tile *t)
{
	const struct abi_bwd_args *a = t->args;
	const struct view_sequence *v = &t->sequence;
	const float *lse = a->lse.data + view_rows_offset(&a->lse, v, t->row, t->head);
	const float *delta = a->d.data + view_rows_offset(&a->d, v, t->row, t->head);
	struct columns window = visible_window(&a->band, v);
	float slope = a->alibi_slopes ? a->alibi_slopes[v->batch * a->alibi_stride_batch + t->head]
				      : 0;

	for (int32_t i = 0; i < t->n_rows; i++) {
		float row_lse = lse[i * a->lse.stride_seq];
		/* A row with nothing to attend to sees nothing. */
		bool empty = row_lse == -INFINITY;
		bool is_data = seen_is_data(&a->mask_data);
		struct tile_row fact = {
			.lse = empty ? 0 : row_lse,
			.delta = delta[i * a->d.stride_seq],
			.slope = slope * LOG2_E,
			.diagonal = t->row + i + v->k_len - v->q_len,
			.first = empty ? INT32_MAX : clamp(t->row + i + window.first, 0, v->k_len),
			.last = empty ? -1 : clamp(t->row + i + window.last, -1, v->k_len - 1),
		};
		if (is_data && (empty || t->facts[i].last < t->facts[i].first)) {
			fact.first = INT32_MAX;
			fact.last = -1;
			memset(t->seen + i * TILE_COLUMNS, 0, TILE_COLUMNS);
		} else if (is_data) { /* as tile_place_data() left it */
			fact.first = t->facts[i].first;
			fact.last = t->facts[i].last;
			fact.holes = t->facts[i].holes;
		}
		t->facts[i] = fact;
	}
	t->masked = false;
	for (int32_t i = 0; i < t->n_rows; i += STRIP_ROWS)
		strip_init(t, &t->strips[i / STRIP_ROWS], &t->facts[i],
			   t->n_rows - i < STRIP_ROWS ? t->n_rows - i : STRIP_ROWS);
}

/* By which forward multiplies Q or S: see score_ops_init(). */
static inline float logit_factor(const struct abi_bwd_args *a)
{
	return a->logits_soft_cap > 0 ? a->scale / a->logits_soft_cap : a->scale * LOG2_E;
}

static inline struct rows scale_rows(struct rows x, int32_t n, int32_t hdim, float factor,
				     operand *copies)
{
	int32_t ld = row_stride(hdim);

	if (!SCALES_Q)
		return x;
	for (int32_t i = 0; i < n; i++)
		for (int32_t d = 0; d < hdim; d += LANES)
			operand_store(copies + (int64_t)i * ld + d,
				      operand_load(x.data + i * x.ld + d) * factor);
	return (struct rows){copies, ld};
}

static inline void tile_load_q(struct tile *t)
{
	const struct abi_bwd_args *a = t->args;
	const struct view_sequence *v = &t->sequence;

	t->q = load_rows(a, &a->q, view_q_offset(&a->q, v, t->row, t->head), t->n_rows, a->hdim_q,
			 t->q_rows);
	t->logit_q = scale_rows(t->q, t->n_rows, a->hdim_q, logit_factor(a), t->logit_q_rows);
	t->d_o = load_rows(a, &a->d_o, view_q_offset(&a->d_o, v, t->row, t->head), t->n_rows,
			   a->hdim_v, t->d_o_rows);
	t->q_panels = rows_as_b(t->q, t->n_rows, a->hdim_q, t->q_pairs);
	t->d_o_panels = rows_as_b(t->d_o, t->n_rows, a->hdim_v, t->d_o_pairs);
	tile_load_facts(t);
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

/* @yes where the mask is -1, 0 where it is 0. */
static inline vf vf_keep(vi mask, vf yes)
{
	return (vf)(mask & (vi)yes);
}

/* A block of S and dP: rows and columns of the tile. */
struct block {
	int32_t row, row_end, begin, end;
};

/* The bias of columns [begin, end) of row @i, where whole groups of vectors may be read. */
static inline const float *block_bias(struct tile *t, int32_t i, int32_t begin, int32_t end)
{
	const struct abi_bwd_args *a = t->args;
	const struct view_sequence *v = &t->sequence;
	int64_t offset = view_q_offset(&a->bias, v, t->row + i, t->head) +
			 (t->column + begin) * a->bias.stride_dim;

	if (a->bias_dtype == ABI_F32 && a->bias.stride_dim == 1 && (end - begin) % GROUP == 0)
		return (const float *)a->bias.data + offset;
	load_row(t->bias, a->bias.data, a->bias_dtype, offset, a->bias.stride_dim, end - begin);
	return t->bias;
}

/* What the passes do besides the plain formula; constants of each instance. */
struct pass {
	bool extras; /* bias, alibi, soft cap, dropout or dbias may be on */
	bool masked; /* some elements are not visible */
	bool data;   /* which ones, t->seen says */
};

/* P and dS, [TILE_ROWS, P_LD] each. */
static inline operand *tile_p(const struct tile *t)
{
	return (operand *)t->s;
}

static inline operand *tile_ds(const struct tile *t)
{
	return (operand *)t->dp;
}

/*
 * A group of vectors of row @i, from column @j on: S and dP become r P and dS. The vectors go side
 * by side, see vf_exp2_some().
 */
static inline __attribute__((always_inline)) void group_pass(struct tile *t, int32_t i, int32_t j,
							     const struct tile_row *row,
							     const float *bias,
							     const struct pass pass)
{
	const struct abi_bwd_args *a = t->args;
	const float cap = pass.extras ? a->logits_soft_cap : 0, factor = logit_factor(a);
	const vi iota = __builtin_convertvector(vf_iota(), vi) + (t->column + j);
	const float *s = t->s + i * TILE_LD + j, *dp = t->dp + i * TILE_LD + j;
	operand *to_p = tile_p(t) + i * P_LD + j, *to_ds = tile_ds(t) + i * P_LD + j;
	const vf lse = vf_set1(row->lse);
	vf x[4], p[4], slope_of_cap[4], r[4];

#pragma GCC unroll 4
	for (int u = 0; u < 4; u++) {
		x[u] = vf_load(s + u * LANES);
		if (!SCALES_Q)
			x[u] *= factor;
		if (cap > 0) {
			vf tanh = vf_tanh(x[u]);

			x[u] = tanh * (cap * LOG2_E);
			slope_of_cap[u] = 1 - tanh * tanh;
		}
		if (pass.extras && bias)
			x[u] += score_bias(vf_load(bias + u * LANES));
		if (pass.extras && a->alibi_slopes)
			x[u] -= row->slope * vf_abs(__builtin_convertvector(
						     iota + (u * LANES - row->diagonal), vf));
		p[u] = x[u] - lse * LOG2_E; /* rounded once, where it is a fused operation */
	}
	vf_exp2_some(p, 4);
#pragma GCC unroll 4
	for (int u = 0; u < 4; u++) {
		vf y = vf_load(dp + u * LANES), dz;

		r[u] = p[u];
		if (pass.extras && a->dropout.p_drop > 0) {
			vi byte = __builtin_convertvector(
				*(const vb_memory *)(t->bytes + i * TILE_COLUMNS + j + u * LANES),
				vi);
			vf keep = vf_keep(byte <= a->dropout.keep_at_most,
					  vf_set1(a->dropout.p_keep_inverse));

			r[u] *= keep;
			y *= keep;
		}
		dz = p[u] * (y - row->delta);
		if (pass.masked) {
			vi column = iota + u * LANES;
			vi seen = (column >= row->first) | (column < a->band.sink_tokens);

			seen &= column <= row->last;
			if (pass.data)
				seen = __builtin_convertvector(
					       *(const vb_memory *)(t->seen + i * TILE_COLUMNS + j +
								    u * LANES),
					       vi) != 0;
			r[u] = vf_keep(seen, r[u]);
			dz = vf_keep(seen, dz);
		}
		if (pass.extras && t->dz)
			vf_store(t->dz + i * TILE_LD + j + u * LANES, dz);
		/* A masked element's slope may be NaN: 0 stays 0. */
		if (cap > 0)
			dz = vf_keep(dz != 0, dz * slope_of_cap[u]);
		operand_store(to_p + u * LANES, r[u]);
		operand_store(to_ds + u * LANES, dz);
	}
}

/* Every row of the block. Its last group may reach past it, into columns that come later. */
static inline __attribute__((always_inline)) void block_pass(struct tile *t, const struct block *b,
							     const struct pass pass)
{
	for (int32_t i = b->row; i < b->row_end; i++) {
		const struct tile_row row = t->facts[i];
		const float *bias = NULL;

		if (pass.extras && t->args->bias.data)
			bias = block_bias(t, i, b->begin, b->end);
		for (int32_t j = b->begin; j < b->end; j += GROUP)
			group_pass(t, i, j, &row, bias ? bias + (j - b->begin) : NULL, pass);
	}
}

/* One function each, not inlined: their constants want all the registers. */
#define BLOCK_PASS(name, extras, masked, data)                                                     \
	static __attribute__((noinline, unused)) void name(struct tile *t, const struct block *b)  \
	{                                                                                          \
		block_pass(t, b, (struct pass){extras, masked, data});                             \
	}
BLOCK_PASS(block_pass_plain, false, false, false)
BLOCK_PASS(block_pass_masked, false, true, false)
BLOCK_PASS(block_pass_data, false, true, true)
BLOCK_PASS(block_pass_extras, true, false, false)
BLOCK_PASS(block_pass_masked_extras, true, true, false)
BLOCK_PASS(block_pass_data_extras, true, true, true)

/* Zeros in columns [begin, end) of the strip's rows. */
static inline void strip_clear(struct tile *t, int32_t row, int32_t row_end, int32_t begin,
			       int32_t end)
{
	for (int32_t i = row; i < row_end; i++)
		for (int32_t j = begin; j < end; j += LANES) {
			operand_store(tile_p(t) + i * P_LD + j, (vf){0});
			operand_store(tile_ds(t) + i * P_LD + j, (vf){0});
			if (t->dz)
				vf_store(t->dz + i * TILE_LD + j, (vf){0});
		}
}

/* The panels of K^T or V^T from column @begin on. */
static inline struct gemm_b tile_panels(const operand *columns, int32_t begin, int32_t hdim)
{
	int64_t steps = ROUND_UP(hdim, K_UNIT);

	return (struct gemm_b){columns + begin * steps, steps * PANEL, PANEL};
}

/* From row @row on, as the one operand or the other. @row: even as B. */
static inline struct gemm_a rows_a(struct rows x, int32_t row)
{
	return (struct gemm_a){x.data + row * x.ld, x.ld, 1};
}

static inline struct gemm_b rows_b(struct gemm_b panels, int32_t row)
{
	panels.data += row * panels.k_stride;
	return panels;
}

static inline void block_scores(struct tile *t, const struct block *b, const struct strip *strip)
{
	const struct abi_bwd_args *a = t->args;
	bool extras = a->bias.data || a->alibi_slopes || a->logits_soft_cap > 0 ||
		      a->dropout.p_drop > 0 || t->dz;
	bool masked = strip->full_begin > b->begin ||
		      strip->full_end < ROUND_UP(b->end, COLUMN_UNIT);
	int32_t m = b->row_end - b->row, n = b->end - b->begin;

	gemm(m, n, ROUND_UP(a->hdim_q, K_UNIT), rows_a(t->logit_q, b->row),
	     tile_panels(t->k_columns, b->begin, a->hdim_q), t->s + b->row * TILE_LD + b->begin,
	     TILE_LD, false, &t->fetches);
	gemm(m, n, ROUND_UP(a->hdim_v, K_UNIT), rows_a(t->d_o, b->row),
	     tile_panels(t->v_columns, b->begin, a->hdim_v), t->dp + b->row * TILE_LD + b->begin,
	     TILE_LD, false, &t->fetches);
	if (masked && seen_is_data(&a->mask_data))
		(extras ? block_pass_data_extras : block_pass_data)(t, b);
	else if (extras)
		(masked ? block_pass_masked_extras : block_pass_extras)(t, b);
	else
		(masked ? block_pass_masked : block_pass_plain)(t, b);
}

/* Fills s with r P and dp with dS, and dz where dbias is wanted, of all columns [begin, end). */
static inline void tile_scores(struct tile *t)
{
	if (t->args->dropout.p_drop > 0)
		tile_load_bytes(t);
	for (int32_t row = 0; row < t->n_rows; row += STRIP_ROWS) {
		const struct strip *strip = &t->strips[row / STRIP_ROWS];
		int32_t end = t->n_rows - row < STRIP_ROWS ? t->n_rows : row + STRIP_ROWS;

		strip_clear(t, row, end, t->begin, strip->begin);
		for (int32_t j = strip->begin; j < strip->end; j += STRIP_COLUMNS) {
			int32_t n = strip->end - j;
			struct block b = {row, end, j, j + (n < STRIP_COLUMNS ? n : STRIP_COLUMNS)};

			block_scores(t, &b, strip);
		}
		strip_clear(t, row, end, ROUND_UP(strip->end, COLUMN_UNIT),
			    ROUND_UP(t->end, COLUMN_UNIT));
	}
	/* The other half of the last pair. */
	strip_clear(t, t->n_rows, ROUND_UP(t->n_rows, OPERAND_PAIR), t->begin, t->end);
}

/*
 * The transpose of P or dS as A, from row 0 and column 0 of the tile on: floats where they are,
 * pairs in by_column, which holds one of the two at a time.
 */
static inline struct gemm_a tile_by_column(struct tile *t, const operand *x)
{
	int32_t n_pairs = (t->n_rows + OPERAND_PAIR - 1) / OPERAND_PAIR;
	vf zeros = {0};

	if (OPERAND_PAIR == 1)
		return (struct gemm_a){x, 1, P_LD};
	for (int32_t j = t->begin; j < t->end; j += PANEL) {
		int32_t n = t->end - j < PANEL ? ROUND_UP(t->end - j, COLUMN_UNIT) : PANEL;

		pack_rows(t->pairs, 0, x + j, P_LD, n_pairs * OPERAND_PAIR, n, &zeros);
		pack_transposed((float *)(t->by_column + j * COLUMN_LD), (float *)t->pairs, PANEL,
				n_pairs, n, NULL);
	}
	return (struct gemm_a){t->by_column, COLUMN_LD, 1};
}

#endif
