/* SPDX-License-Identifier: MIT */
/*
 * bwd_tile.c: the middle stage of backward, dq_dk_dv.
 *
 * Five products for every visible tile: S, dP, dV += P^T dO, dK += dS^T Q, dQ += dS K. Each tile is
 * computed once, so every gradient is a sum over tasks, and the sums must not depend on who runs
 * first. Therefore a latin square: queries and keys of one (sequence, kv head) are cut into chunks,
 * and in phase p the task of key chunk n works on query chunk (n + p) mod C. Within a phase no two
 * tasks share a chunk of either kind, so dK, dV (float accumulators in the workspace) and dQ
 * (dq_acc) need neither locks nor atomics, and each element is summed in the order of the phases:
 * the same bits for any number of threads, every time.
 *
 * Few rows and many keys make a square with work in few of its fields. Where the plan says so, key
 * chunks are cut into groups of dq_split_keys, each with a square and a split of dq_acc of its own,
 * and so many times as many tasks at once; convert_dq adds the splits in their order.
 *
 * The first task that meets a chunk clears its accumulators, the last one of a key chunk writes dK
 * and dV, while they are in the cache.
 *
 * Phases: what no task of the square would clear; SQUARE_CHUNKS times the square; dBias summed over
 * broadcast axes, which recomputes its tiles so that no sum crosses tasks.
 */
#include <kernels/square.h>

#include "bwd_tile.h"

enum { PHASE_CLEAR = 0, PHASE_SQUARE = 1, PHASE_DBIAS = PHASE_SQUARE + SQUARE_CHUNKS, N_PHASES };

static int32_t min_int(int32_t a, int32_t b)
{
	return a < b ? a : b;
}

/* --- geometry -----------------------------------------------------------------------------------
 */

static struct square square_at(const struct abi_bwd_args *a, int32_t rows, int32_t keys)
{
	return square_of(a, TILE_ROWS, tile_columns(a), rows, keys);
}

/* Groups of key chunks: splits of dq_acc that are added to. */
static int32_t square_groups(struct square square)
{
	return square.n_k > 0 ? (square.n_k + square.group - 1) / square.group : 0;
}

/* Rows of an accumulator; every head of a sequence has room for whole panels. */
static int64_t key_rows(const struct abi_bwd_args *a)
{
	return packed_keys_total(&a->sequences) * a->nhead_k;
}

/* Row @column of the accumulator of dK (@of_v: dV): [key_rows, width] each, dK's first. */
static float *key_accumulator(const struct tile *t, void *workspace, const struct view_sequence *v,
			      int32_t head_k, int32_t column, bool of_v)
{
	const struct abi_bwd_args *a = t->args;
	int64_t row = packed_keys_at(&a->sequences, v, a->nhead_k, head_k).start + column;
	float *base = workspace;

	if (of_v)
		return base + key_rows(a) * t->width_q + row * t->width_v;
	return base + row * t->width_q;
}

static void clear_keys(const struct tile *t, float *dk, float *dv, int32_t n)
{
	memset(dk, 0, sizeof(float) * n * t->width_q);
	memset(dv, 0, sizeof(float) * n * t->width_v);
}

/* Over which axes dbias is a sum: those of stride 0, but for one element. Of none it is 0. */
struct summed {
	bool batch, head, row, column;
};

static struct summed dbias_summed(const struct abi_bwd_args *a)
{
	const struct abi_sequences *s = &a->sequences;
	bool packed = s->seqstart_q;
	struct summed axes = {
		.head = !a->dbias.stride_head && a->nhead_q > 1,
		.row = !a->dbias.stride_seq && (packed ? s->total_q : s->seqlen_q_max) != 1,
		.column = !a->dbias.stride_dim && s->seqlen_k_max != 1,
	};

	axes.batch = packed ? axes.row : !a->dbias.stride_batch && s->batch > 1;
	return axes;
}

static bool dbias_is_summed(const struct abi_bwd_args *a)
{
	struct summed axes = dbias_summed(a);

	return axes.batch || axes.head || axes.row || axes.column;
}

/* --- phase: clear -------------------------------------------------------------------------------
 */

static void clear_floats(float *to, int64_t n)
{
	enum { PIECE = 1 << 18 };

	for (; n > 0 && cpu_goes_on(); to += PIECE, n -= PIECE)
		memset(to, 0, sizeof(float) * (n < PIECE ? n : PIECE));
}

/* Splits of dQ that no keys belong to, and dBias, which masked tiles never reach. */
static void clear(struct tile *t, const struct view_sequence *v, int32_t head)
{
	const struct abi_bwd_args *a = t->args;
	int32_t n_columns = a->sequences.seqlen_k_max, n_splits = bwd_n_splits(a, v->batch);
	int32_t groups = square_groups(square_at(a, v->q_len, v->k_len));

	if (groups < n_splits)
		clear_floats(bwd_dq_acc(a, v, head, groups, 0),
			     (int64_t)(n_splits - groups) * v->q_physical * a->hdim_q);
	if (!a->dbias.data || dbias_is_summed(a))
		return;
	memset(t->dz, 0, sizeof(float) * TILE_LD);
	for (int32_t i = 0; i < v->q_len && cpu_goes_on(); i++)
		for (int32_t j = 0; j < n_columns; j += TILE_COLUMNS)
			store_row(a->dbias.data, a->bias_dtype,
				  view_q_offset(&a->dbias, v, i, head) + j * a->dbias.stride_dim,
				  a->dbias.stride_dim, t->dz,
				  n_columns - j < TILE_COLUMNS ? n_columns - j : TILE_COLUMNS);
}

/* --- phase: square ------------------------------------------------------------------------------
 */

/* dQ of the tile, from scratch to the task's split of dq_acc, whose rows are hdim_q long. */
static void add_dq(const struct tile *t, bool fresh)
{
	const struct abi_bwd_args *a = t->args;

	for (int32_t i = 0; i < t->n_rows; i++) {
		float *to = bwd_dq_acc(a, &t->sequence, t->head, t->split, t->row + i);
		const float *from = t->dq + (int64_t)i * t->width_q;

		for (int32_t d = 0; d < a->hdim_q; d++)
			to[d] = fresh ? from[d] : to[d] + from[d];
	}
}

/* Adds X^T Y to @to (or writes it when @fresh), X being P or dS and Y dO or Q. */
static void accumulate_keys(struct tile *t, const operand *x, struct gemm_b y, int32_t hdim,
			    float *to, int64_t width, bool fresh)
{
	/* A multiple of vectors and of a product's rows. */
	const int32_t unit = !t->masked ? TILE_COLUMNS : OPERAND_TILES ? 2 * GROUP_ROWS : 48;
	const struct gemm_a columns = tile_by_column(t, x);

	for (int32_t j = t->begin; j < t->end; j += unit) {
		int32_t n = min_int(unit, t->end - j), row = 0, row_end = t->n_rows;

		/* Strips above and below that see none of these keys hold zeros. */
		while (row < row_end && t->strips[row / STRIP_ROWS].end <= j)
			row += STRIP_ROWS;
		while (row < row_end && t->strips[(row_end - 1) / STRIP_ROWS].begin >= j + n)
			row_end = (row_end - 1) / STRIP_ROWS * STRIP_ROWS;
		if (row < row_end)
			gemm(n, hdim, ROUND_UP(row_end - row, ROW_UNIT),
			     (struct gemm_a){columns.data + j * columns.row_stride +
						     row * columns.k_stride,
					     columns.row_stride, columns.k_stride},
			     rows_b(y, row), to + j * width, width, !fresh, &t->fetches);
	}
}

/* dQ += dS K, or = when @fresh; of a masked tile strip by strip, each no wider than it need be. */
static void accumulate_queries(struct tile *t, float *dq, int64_t width, bool fresh)
{
	const int32_t unit = t->masked ? STRIP_ROWS : TILE_ROWS;

	for (int32_t row = 0; row < t->n_rows; row += unit) {
		int32_t begin = t->masked ? t->strips[row / STRIP_ROWS].begin : t->begin;
		int32_t end = t->masked ? t->strips[row / STRIP_ROWS].end : t->end;

		gemm(min_int(unit, t->n_rows - row), t->args->hdim_q,
		     ROUND_UP(end - begin, ROW_UNIT),
		     (struct gemm_a){tile_ds(t) + row * P_LD + begin, P_LD, 1},
		     rows_b(t->k_panels, begin), dq + row * width, width, !fresh, &t->fetches);
	}
}

/* @fresh_keys, @fresh_queries: nothing has been added to these rows of dK and dV, of dQ before. */
static void accumulate(struct tile *t, float *dk, float *dv, bool fresh_keys, bool fresh_queries)
{
	const struct abi_bwd_args *a = t->args;

	accumulate_keys(t, tile_p(t), t->d_o_panels, a->hdim_v, dv, t->width_v, fresh_keys);
	accumulate_keys(t, tile_ds(t), t->q_panels, a->hdim_q, dk, t->width_q, fresh_keys);
	/* The product writes whole vectors, with a tile unit whole groups of rows, and rows of
	 * dq_acc follow each other directly. */
	if (a->hdim_q % COLUMN_UNIT == 0 && (!OPERAND_TILES || t->n_rows % GROUP_ROWS == 0)) {
		accumulate_queries(t, bwd_dq_acc(a, &t->sequence, t->head, t->split, t->row),
				   a->hdim_q, fresh_queries);
		return;
	}
	accumulate_queries(t, t->dq, t->width_q, true);
	add_dq(t, fresh_queries);
}

/*
 * The same for a tile with infinities or NaN among its inputs and elements that are masked: 0 * NaN
 * in a product would carry them to rows that do not see them, so only visible pairs are added.
 */
static void accumulate_visible(struct tile *t, float *dk, float *dv, bool fresh_queries)
{
	const struct abi_bwd_args *a = t->args;
	const struct view_sequence *v = &t->sequence;

	for (int32_t i = 0; i < t->n_rows; i++) {
		int64_t lse = view_rows_offset(&a->lse, v, t->row + i, t->head);
		float *dq = t->dq + (int64_t)i * t->width_q;
		const operand *q = rows_a(t->q, i).data;
		const operand *d_o = rows_a(t->d_o, i).data;

		memset(dq, 0, sizeof(float) * t->width_q);
		if (a->lse.data[lse] == -INFINITY)
			continue;
		for (int32_t j = t->begin; j < t->end; j++) {
			float p = operand_value(tile_p(t)[i * P_LD + j]);
			float ds = operand_value(tile_ds(t)[i * P_LD + j]);
			const operand *k = rows_a(t->k, j).data;

			if (seen_is_data(&a->mask_data)
				    ? !t->seen[i * TILE_COLUMNS + j]
				    : !view_visible(&a->band, v, t->row + i, t->column + j))
				continue;
			for (int32_t d = 0; d < a->hdim_v; d++)
				dv[(int64_t)j * t->width_v + d] += p * operand_value(d_o[d]);
			for (int32_t d = 0; d < a->hdim_q; d++) {
				dk[(int64_t)j * t->width_q + d] += ds * operand_value(q[d]);
				dq[d] += ds * operand_value(k[d]);
			}
		}
	}
	add_dq(t, fresh_queries);
}

static void store_dbias(const struct tile *t)
{
	const struct abi_bwd_args *a = t->args;

	for (int32_t i = 0; i < t->n_rows; i++)
		store_row(a->dbias.data, a->bias_dtype,
			  view_q_offset(&a->dbias, &t->sequence, t->row + i, t->head) +
				  (t->column + t->begin) * a->dbias.stride_dim,
			  a->dbias.stride_dim, t->dz + i * TILE_LD + t->begin, t->end - t->begin);
}

/* Asks for row @row on of a tensor of queries while the tile is worked on. */
static void fetch_queries(struct tile *t, const struct abi_tensor *x, int32_t hdim, int32_t head,
			  int32_t row, int32_t n_rows)
{
	int64_t bytes = dtype_bytes((int32_t)t->args->dtype);

	if (x->stride_dim == 1)
		fetches_add(&t->fetches,
			    (const char *)x->data +
				    bytes * view_q_offset(x, &t->sequence, row, head),
			    bytes * x->stride_seq, bytes * hdim, n_rows);
}

/* Register tiles of the five products together, if nothing is masked. */
static int32_t tile_steps(const struct tile *t)
{
	int32_t rows = t->n_rows / GROUP_ROWS, keys = (t->end - t->begin) / GROUP_ROWS;
	int32_t columns = (t->end - t->begin + PANEL - 1) / PANEL;
	int32_t panels_q = t->width_q / PANEL, panels_v = t->width_v / PANEL;

	return rows * (2 * columns + panels_q) + keys * (panels_q + panels_v) + 1;
}

/* What a task adds to and in which order its tiles come. */
struct square_work {
	struct square square;
	int32_t head_k, chunk_q, chunk_k;
	bool fresh_keys, fresh_queries; /* the task is the first to meet its chunk */
	void *workspace;
};

/* The tile after (@head, @row) in the order of square_tiles(). */
static void fetch_next(struct tile *t, const struct square_work *w, int32_t head, int32_t row,
		       int32_t row_end)
{
	const struct abi_bwd_args *a = t->args;
	int32_t group = a->nhead_q / a->nhead_k;

	t->fetches.n = t->fetches.first = 0;
	row += TILE_ROWS;
	if (row >= row_end) {
		row = w->chunk_q * w->square.chunk_q;
		head++;
	}
	if (head >= (w->head_k + 1) * group)
		return;
	fetch_queries(t, &a->q, a->hdim_q, head, row, min_int(TILE_ROWS, row_end - row));
	fetch_queries(t, &a->d_o, a->hdim_v, head, row, min_int(TILE_ROWS, row_end - row));
	if (!w->fresh_queries)
		fetches_add(&t->fetches, bwd_dq_acc(a, &t->sequence, head, t->split, row),
			    (int64_t)sizeof(float) * a->hdim_q, (int64_t)sizeof(float) * a->hdim_q,
			    min_int(TILE_ROWS, row_end - row));
	fetches_begin(&t->fetches, tile_steps(t));
}

static void clear_queries(const struct tile *t, const struct view_sequence *v, int32_t head,
			  int32_t row, int32_t row_end)
{
	memset(bwd_dq_acc(t->args, v, head, t->split, row), 0,
	       sizeof(float) * (row_end - row) * t->args->hdim_q);
}

/* All tiles of a query chunk and up to a tile's width of keys, from @column on. Return: false: the
 * task is to end. */
static bool square_column(struct tile *t, const struct view_sequence *v,
			  const struct square_work *w, int32_t column, int32_t n_columns,
			  bool fresh_queries)
{
	const struct abi_bwd_args *a = t->args;
	int32_t group = a->nhead_q / a->nhead_k;
	int32_t row_end = min_int((w->chunk_q + 1) * w->square.chunk_q, v->q_len);
	float *dk = key_accumulator(t, w->workspace, v, w->head_k, column, false);
	float *dv = key_accumulator(t, w->workspace, v, w->head_k, column, true);
	bool fresh_keys = w->fresh_keys, loaded = false;

	for (int32_t h = w->head_k * group; h < (w->head_k + 1) * group; h++)
		for (int32_t i = w->chunk_q * w->square.chunk_q; i < row_end; i += TILE_ROWS) {
			int32_t n_rows = min_int(TILE_ROWS, row_end - i);

			if (!cpu_goes_on())
				return false;
			if (!tile_place(t, v, h, i, n_rows, column, n_columns)) {
				if (fresh_queries)
					clear_queries(t, v, h, i, i + n_rows);
				continue;
			}
			if (!loaded)
				tile_load_kv(t, v, w->head_k, column, n_columns);
			loaded = true;
			tile_load_q(t);
			fetch_next(t, w, h, i, row_end);
			if (fresh_keys && (t->masked || t->end - t->begin < n_columns)) {
				clear_keys(t, dk, dv, n_columns);
				fresh_keys = false;
			}
			tile_scores(t);
			if (t->masked && !tile_is_finite(t)) {
				accumulate_visible(t, dk, dv, fresh_queries);
			} else {
				accumulate(t, dk, dv, fresh_keys, fresh_queries);
				fresh_keys = false;
			}
			if (a->dbias.data && !dbias_is_summed(a))
				store_dbias(t);
		}
	if (fresh_keys)
		clear_keys(t, dk, dv, n_columns);
	return true;
}

/* All tiles of a query chunk and a key chunk. Return: likewise. */
static bool square_tiles(struct tile *t, const struct view_sequence *v, const struct square_work *w)
{
	const struct abi_bwd_args *a = t->args;
	int32_t n_columns = tile_columns(a), first = w->chunk_k * w->square.chunk_k;
	int32_t end = min_int(first + w->square.chunk_k, v->k_len);

	for (int32_t j = first; j < end; j += n_columns)
		if (!square_column(t, v, w, j, min_int(n_columns, end - j),
				   w->fresh_queries && j == first))
			return false;
	return true;
}

static void write_keys(struct tile *t, const struct view_sequence *v, int32_t head_k, int32_t begin,
		       int32_t end, void *workspace)
{
	const struct abi_bwd_args *a = t->args;
	float *dk = key_accumulator(t, workspace, v, head_k, begin, false);
	float *dv = key_accumulator(t, workspace, v, head_k, begin, true);

	for (int32_t j = begin; j < end; j++, dk += t->width_q, dv += t->width_v) {
		if (j % TILE_ROWS == 0 && !cpu_goes_on())
			return;
		for (int32_t d = 0; d < a->hdim_q; d += LANES)
			vf_store(dk + d, vf_load(dk + d) * a->scale);
		store_row(a->dk.data, a->dtype, view_k_offset(&a->dk, v, j, head_k),
			  a->dk.stride_dim, dk, a->hdim_q);
		store_row(a->dv.data, a->dtype, view_k_offset(&a->dv, v, j, head_k),
			  a->dv.stride_dim, dv, a->hdim_v);
	}
}

/* The key chunk's turn in phase @turn of its group's square. */
static void square_task(struct tile *t, const struct view_sequence *v, int32_t head_k,
			struct square square, int32_t turn, int32_t chunk_k, void *workspace)
{
	/* NOLINTNEXTLINE(clang-analyzer-core.DivideZero): a group has a chunk at least */
	int32_t place = chunk_k % square.group, first = chunk_k - place;
	int32_t n_k = min_int(square.group, square.n_k - first);
	int32_t turns = n_k > square.n_q ? n_k : square.n_q, chunk_q;
	int32_t key = chunk_k * square.chunk_k, key_end = min_int(key + square.chunk_k, v->k_len);
	struct square_work w = {
		.square = square,
		.head_k = head_k,
		.chunk_k = chunk_k,
		.fresh_keys = turn == 0,
		.workspace = workspace,
	};

	if (turn >= turns)
		return;
	t->split = chunk_k / square.group;
	w.chunk_q = chunk_q = (place + turn) % turns;
	/* Key chunk n meets query chunk m in turn m - n; where there are fewer key chunks, the last of
	 * them comes first to the query chunks past them. */
	w.fresh_queries = turn == (chunk_q < n_k ? 0 : chunk_q - n_k + 1);
	if (chunk_q < square.n_q) {
		if (!square_tiles(t, v, &w))
			return;
	} else if (w.fresh_keys) {
		clear_keys(t, key_accumulator(t, workspace, v, head_k, key, false),
			   key_accumulator(t, workspace, v, head_k, key, true), key_end - key);
	}
	if (turn == turns - 1)
		write_keys(t, v, head_k, key, key_end, workspace);
}

/* --- phase: dbias over broadcast axes -----------------------------------------------------------
 */

/* One task owns these indices of dbias; a summed axis has a single one. */
struct dbias_grid {
	struct summed axes;
	int64_t n_batch, n_head, n_row, n_column;
};

static struct dbias_grid dbias_grid(const struct abi_bwd_args *a)
{
	const struct abi_sequences *s = &a->sequences;
	struct summed axes = dbias_summed(a);
	int32_t columns = tile_columns(a);

	return (struct dbias_grid){
		.axes = axes,
		.n_batch = axes.batch ? 1 : s->batch,
		.n_head = axes.head ? 1 : a->nhead_q,
		.n_row = axes.row ? 1 : (s->seqlen_q_max + TILE_ROWS - 1) / TILE_ROWS,
		.n_column = axes.column ? 1 : (s->seqlen_k_max + columns - 1) / columns,
	};
}

/* Adds the tile's dz to @sum, over rows and columns where they are summed. */
static void dbias_add(const struct tile *t, struct summed axes, float *sum)
{
	for (int32_t i = 0; i < t->n_rows; i++) {
		float *to = sum + (axes.row ? 0 : i * TILE_LD);

		for (int32_t j = t->begin; j < t->end; j++)
			to[axes.column ? 0 : j] += t->dz[i * TILE_LD + j];
	}
}

/* Everything of one sequence and head that the task's part of dbias receives. Return: likewise. */
static bool dbias_visit(struct tile *t, const struct view_sequence *v, int32_t head,
			const struct dbias_grid *grid, int64_t row_block, int64_t column_block,
			float *sum)
{
	const struct abi_bwd_args *a = t->args;
	int32_t n_columns = tile_columns(a), head_k = head / (a->nhead_q / a->nhead_k);
	int32_t row_begin = (int32_t)row_block * TILE_ROWS;
	int32_t row_end = grid->axes.row ? v->q_len : min_int(row_begin + TILE_ROWS, v->q_len);
	int32_t column_begin = (int32_t)column_block * n_columns;
	int32_t column_end = grid->axes.column ? v->k_len
					       : min_int(column_begin + n_columns, v->k_len);

	for (int32_t j = column_begin; j < column_end; j += n_columns) {
		int32_t columns = min_int(n_columns, column_end - j);
		bool loaded = false;

		for (int32_t i = row_begin; i < row_end; i += TILE_ROWS) {
			if (!cpu_goes_on())
				return false;
			if (!tile_place(t, v, head, i, min_int(TILE_ROWS, row_end - i), j, columns))
				continue;
			if (!loaded)
				tile_load_kv(t, v, head_k, j, columns);
			loaded = true;
			tile_load_q(t);
			tile_scores(t);
			dbias_add(t, grid->axes, sum);
		}
	}
	return true;
}

static void dbias_task(struct tile *t, int64_t task, float *sum)
{
	const struct abi_bwd_args *a = t->args;
	const struct abi_sequences *s = &a->sequences;
	struct dbias_grid grid = dbias_grid(a);
	int32_t column_block = task % grid.n_column, n_columns = tile_columns(a);
	int32_t row_block = task / grid.n_column % grid.n_row;
	int32_t head = task / grid.n_column / grid.n_row % grid.n_head;
	int32_t batch = task / grid.n_column / grid.n_row / grid.n_head;
	int32_t batch_end = grid.axes.batch ? s->batch : batch + 1;
	int32_t head_end = grid.axes.head ? a->nhead_q : head + 1;
	struct view_sequence first = view_sequence(s, NULL, batch);
	int32_t n_rows = 0, row = row_block * TILE_ROWS, column = column_block * n_columns;

	memset(sum, 0, sizeof(float) * TILE_ROWS * TILE_LD);
	for (int32_t b = batch; b < batch_end; b++) {
		struct view_sequence v = view_sequence(s, NULL, b);

		n_rows = v.q_len > n_rows ? v.q_len : n_rows;
		for (int32_t h = head; h < head_end; h++)
			if (!dbias_visit(t, &v, h, &grid, row_block, column_block, sum))
				return;
	}
	/* Rows that some sequence has: the others are nobody's, and keep what they held. */
	n_rows = grid.axes.row ? 1 : min_int(n_rows - row, TILE_ROWS);
	n_columns = grid.axes.column ? 1 : min_int(s->seqlen_k_max - column, n_columns);
	for (int32_t i = 0; i < n_rows; i++)
		store_row(a->dbias.data, a->bias_dtype,
			  view_q_offset(&a->dbias, &first, row + i, head) +
				  column * a->dbias.stride_dim,
			  a->dbias.stride_dim, sum + i * TILE_LD, n_columns);
}

/* --- the kernel ---------------------------------------------------------------------------------
 */

static int64_t dq_dk_dv_tasks(const void *args, int phase, int n_threads)
{
	const struct abi_bwd_args *a = args;
	const struct abi_sequences *s = &a->sequences;
	int64_t heads = (int64_t)s->batch * a->nhead_k;
	struct square square = square_at(a, s->seqlen_q_max, s->seqlen_k_max);

	(void)n_threads;
	if (phase == PHASE_CLEAR)
		return (int64_t)s->batch * a->nhead_q;
	if (phase == PHASE_DBIAS) {
		struct dbias_grid grid = dbias_grid(a);

		if (!a->dbias.data || !dbias_is_summed(a))
			return 0;
		return grid.n_batch * grid.n_head * grid.n_row * grid.n_column;
	}
	return phase - PHASE_SQUARE < square.turns ? heads * square.n_k : 0;
}

static void dq_dk_dv_task(const struct abi_bwd_args *a, int phase, int64_t task, void *workspace,
			  void *scratch)
{
	const struct abi_sequences *s = &a->sequences;
	struct square longest = square_at(a, s->seqlen_q_max, s->seqlen_k_max), square;
	struct view_sequence v;
	struct tile t;
	size_t tile_bytes = ROUND_UP(tile_init(&t, a, scratch), 64);
	int64_t head;
	int32_t chunk_k;

	if (phase == PHASE_DBIAS) {
		dbias_task(&t, task, (float *)((char *)scratch + tile_bytes));
		return;
	}
	if (phase == PHASE_CLEAR) {
		v = view_sequence(s, NULL, (int32_t)(task / a->nhead_q));
		clear(&t, &v, (int32_t)(task % a->nhead_q));
		return;
	}
	chunk_k = (int32_t)(task % longest.n_k);
	head = task / longest.n_k;
	v = view_sequence(s, NULL, (int32_t)(head / a->nhead_k));
	square = square_at(a, v.q_len, v.k_len);
	if (chunk_k < square.n_k)
		square_task(&t, &v, (int32_t)(head % a->nhead_k), square, phase - PHASE_SQUARE,
			    chunk_k, workspace);
}

static void dq_dk_dv_run(const void *args, int phase, int64_t task, int n_threads, void *workspace,
			 void *scratch)
{
	uint32_t mode = subnormals_off();

	(void)n_threads;
	operand_begin();
	dq_dk_dv_task(args, phase, task, workspace, scratch);
	operand_end();
	subnormals_restore(mode);
}

static int dq_dk_dv_accepts(const void *args)
{
	const struct abi_bwd_args *a = args;

	return a->dtype <= ABI_BF16 && a->dq_acc && a->hdim_q <= CPU_MAX_HDIM_Q &&
	       a->hdim_v <= CPU_MAX_HDIM_V;
}

static size_t dq_dk_dv_workspace(const void *args, int n_threads)
{
	const struct abi_bwd_args *a = args;
	struct tile t;

	(void)n_threads;
	(void)tile_init(&t, a, NULL);
	return sizeof(float) * key_rows(a) * (t.width_q + t.width_v);
}

static size_t dq_dk_dv_scratch(const void *args)
{
	const struct abi_bwd_args *a = args;
	struct tile t;
	size_t bytes = ROUND_UP(tile_init(&t, a, NULL), 64);

	return bytes + (a->dbias.data ? sizeof(float) * TILE_ROWS * TILE_LD : 0);
}

#define DQ_DK_DV(type)                                                                             \
	{                                                                                          \
		.family = ABI_BWD_DQ_DK_DV, .dtype = type, .level = CPU_LEVEL,                     \
		.pipeline = "cpu_tile", .accepts = dq_dk_dv_accepts,                               \
		.workspace_bytes = dq_dk_dv_workspace, .scratch_bytes = dq_dk_dv_scratch,          \
		.n_phases = N_PHASES, .n_tasks = dq_dk_dv_tasks, .run = dq_dk_dv_run,              \
	}

const struct cpu_kernel CPU_NAME(cpu_bwd_tile_kernels)[] = {
	DQ_DK_DV(ABI_BF16),
#if SCALES_Q
	DQ_DK_DV(ABI_F32),
	DQ_DK_DV(ABI_F16),
#endif
};
const size_t CPU_NAME(cpu_bwd_tile_n_kernels) = sizeof(CPU_NAME(cpu_bwd_tile_kernels)) /
						sizeof(CPU_NAME(cpu_bwd_tile_kernels)[0]);
