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
 * The first task that meets a chunk clears its accumulators, the last one of a key chunk writes dK
 * and dV, while they are in the cache.
 *
 * Phases: what no task of the square would clear; MAX_CHUNKS times the square; dBias summed over
 * broadcast axes, which recomputes its tiles so that no sum crosses tasks.
 */
#include "bwd_tile.h"

enum {
	MAX_CHUNKS = 128, /* longer sequences get longer chunks */
	PHASE_CLEAR = 0,
	PHASE_SQUARE = 1,
	PHASE_DBIAS = PHASE_SQUARE + MAX_CHUNKS,
	N_PHASES
};

/* --- geometry -----------------------------------------------------------------------------------
 */

static int32_t chunk_of(int32_t length, int32_t unit)
{
	int32_t chunk = unit;

	while ((length + chunk - 1) / chunk > MAX_CHUNKS)
		chunk *= 2;
	return chunk;
}

/* A kv head's task does the work of its whole group: shorter query chunks for larger groups. */
static int32_t query_unit(const struct abi_bwd_args *a)
{
	int32_t group = a->nhead_q / a->nhead_k;

	return group == 1 ? 4 * TILE_ROWS : group == 2 ? 2 * TILE_ROWS : TILE_ROWS;
}

struct square {
	int32_t chunk_q, chunk_k;
	int32_t n_q, n_k, n; /* n: the larger */
};

/* Chunks are cut by the longest sequence's lengths, so that task numbers mean the same for all. */
static struct square square_of(const struct abi_bwd_args *a, int32_t q_len, int32_t k_len)
{
	struct square s = {
		.chunk_q = chunk_of(a->sequences.seqlen_q_max, query_unit(a)),
		.chunk_k = chunk_of(a->sequences.seqlen_k_max, tile_columns(a)),
	};

	s.n_q = (q_len + s.chunk_q - 1) / s.chunk_q;
	s.n_k = (k_len + s.chunk_k - 1) / s.chunk_k;
	s.n = s.n_q > s.n_k ? s.n_q : s.n_k;
	return s;
}

static int64_t key_rows(const struct abi_bwd_args *a)
{
	const struct abi_sequences *s = &a->sequences;

	return s->total_k > 0 ? s->total_k : (int64_t)s->batch * s->seqlen_k_max;
}

/* Row @column of the accumulator of dK (@of_v: dV): [nhead_k, key_rows, width] each, dK's first. */
static float *key_accumulator(const struct tile *t, void *workspace, const struct view_sequence *v,
			      int32_t head_k, int32_t column, bool of_v)
{
	const struct abi_bwd_args *a = t->args;
	int64_t first = v->packed_k ? v->k_start : (int64_t)v->batch * a->sequences.seqlen_k_max;
	int64_t row = head_k * key_rows(a) + first + v->leftpad + column;
	float *base = workspace;

	if (of_v)
		return base + a->nhead_k * key_rows(a) * t->width_q + row * t->width_v;
	return base + row * t->width_q;
}

/* Over which axes dbias is a sum: those of stride 0 and more than one element. */
struct summed {
	bool batch, head, row, column;
};

static struct summed dbias_summed(const struct abi_bwd_args *a)
{
	const struct abi_sequences *s = &a->sequences;
	bool packed = s->seqstart_q;
	struct summed axes = {
		.head = !a->dbias.stride_head && a->nhead_q > 1,
		.row = !a->dbias.stride_seq && (packed ? s->total_q : s->seqlen_q_max) > 1,
		.column = !a->dbias.stride_dim && s->seqlen_k_max > 1,
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

/* dQ where there are no keys, and dBias, which masked tiles never reach. */
static void clear(struct tile *t, const struct view_sequence *v, int32_t head)
{
	const struct abi_bwd_args *a = t->args;
	int32_t n_columns = a->sequences.seqlen_k_max;

	if (v->k_len == 0)
		memset(bwd_dq_acc(a, v, head, 0, 0), 0,
		       sizeof(float) * bwd_n_splits(a, v->batch) * v->q_physical * a->hdim_q);
	if (!a->dbias.data || dbias_is_summed(a))
		return;
	memset(t->dz, 0, sizeof(float) * TILE_LD);
	for (int32_t i = 0; i < v->q_len; i++)
		for (int32_t j = 0; j < n_columns; j += TILE_COLUMNS)
			store_row(a->dbias.data, a->bias_dtype,
				  view_q_offset(&a->dbias, v, i, head) + j * a->dbias.stride_dim,
				  a->dbias.stride_dim, t->dz,
				  n_columns - j < TILE_COLUMNS ? n_columns - j : TILE_COLUMNS);
}

/* --- phase: square ------------------------------------------------------------------------------
 */

/* dQ of the tile, from scratch to split 0 of dq_acc, whose rows are hdim_q long. */
static void add_dq(const struct tile *t)
{
	const struct abi_bwd_args *a = t->args;

	for (int32_t i = 0; i < t->n_rows; i++) {
		float *to = bwd_dq_acc(a, &t->sequence, t->head, 0, t->row + i);
		const float *from = t->dq + (int64_t)i * t->width_q;

		for (int32_t d = 0; d < a->hdim_q; d++)
			to[d] += from[d];
	}
}

static void accumulate(struct tile *t, float *dk, float *dv)
{
	const struct abi_bwd_args *a = t->args;
	int32_t n = t->end - t->begin;
	struct gemm_a ds = {t->dp + t->begin, TILE_LD, 1};
	struct gemm_b k = {t->k_rows + t->begin * PANEL, (int64_t)tile_columns(a) * PANEL};

	gemm(n, a->hdim_v, t->n_rows, (struct gemm_a){t->s + t->begin, 1, TILE_LD},
	     (struct gemm_b){t->d_o_rows, TILE_ROWS * PANEL}, dv + (int64_t)t->begin * t->width_v,
	     t->width_v, true);
	gemm(n, a->hdim_q, t->n_rows, (struct gemm_a){t->dp + t->begin, 1, TILE_LD},
	     (struct gemm_b){t->q_rows, TILE_ROWS * PANEL}, dk + (int64_t)t->begin * t->width_q,
	     t->width_q, true);
	/* The product writes whole vectors, and rows of dq_acc follow each other directly. */
	if (a->hdim_q % LANES == 0) {
		gemm(t->n_rows, a->hdim_q, n, ds, k,
		     bwd_dq_acc(a, &t->sequence, t->head, 0, t->row), a->hdim_q, true);
		return;
	}
	gemm(t->n_rows, a->hdim_q, n, ds, k, t->dq, t->width_q, false);
	add_dq(t);
}

/*
 * The same for a tile with infinities or NaN among its inputs and elements that are masked: 0 * NaN
 * in a product would carry them to rows that do not see them, so only visible pairs are added.
 */
static void accumulate_visible(struct tile *t, float *dk, float *dv)
{
	const struct abi_bwd_args *a = t->args;
	const struct view_sequence *v = &t->sequence;

	for (int32_t i = 0; i < t->n_rows; i++) {
		int64_t lse = view_rows_offset(&a->lse, v, t->row + i, t->head);
		float *dq = t->dq + (int64_t)i * t->width_q;
		const float *q = t->q.data + i * t->q.row_stride;
		const float *d_o = t->d_o.data + i * t->d_o.row_stride;

		memset(dq, 0, sizeof(float) * t->width_q);
		if (a->lse.data[lse] == -INFINITY)
			continue;
		for (int32_t j = t->begin; j < t->end; j++) {
			float p = t->s[i * TILE_LD + j], ds = t->dp[i * TILE_LD + j];
			/* k_rows is in panels; element d of key j */
			const float *k = t->k_rows + j * PANEL;

			if (!view_visible(&a->band, v, t->row + i, t->column + j))
				continue;
			for (int32_t d = 0; d < a->hdim_v; d++)
				dv[(int64_t)j * t->width_v + d] += p * d_o[d];
			for (int32_t d = 0; d < a->hdim_q; d++) {
				dk[(int64_t)j * t->width_q + d] += ds * q[d];
				dq[d] += ds * k[d / PANEL * tile_columns(a) * PANEL + d % PANEL];
			}
		}
	}
	add_dq(t);
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

static int32_t min_int(int32_t a, int32_t b)
{
	return a < b ? a : b;
}

/* All tiles of a query chunk and a key chunk. */
static void square_tiles(struct tile *t, const struct view_sequence *v, int32_t head_k,
			 struct square square, int32_t chunk_q, int32_t chunk_k, void *workspace)
{
	const struct abi_bwd_args *a = t->args;
	int32_t group = a->nhead_q / a->nhead_k, n_columns = tile_columns(a);
	int32_t row_end = min_int((chunk_q + 1) * square.chunk_q, v->q_len);
	int32_t column_end = min_int((chunk_k + 1) * square.chunk_k, v->k_len);
	bool store = a->dbias.data && !dbias_is_summed(a);

	for (int32_t j = chunk_k * square.chunk_k; j < column_end; j += n_columns) {
		int32_t columns = min_int(n_columns, column_end - j);
		float *dk = key_accumulator(t, workspace, v, head_k, j, false);
		float *dv = key_accumulator(t, workspace, v, head_k, j, true);
		bool loaded = false;

		for (int32_t h = head_k * group; h < (head_k + 1) * group; h++)
			for (int32_t i = chunk_q * square.chunk_q; i < row_end; i += TILE_ROWS) {
				if (!tile_place(t, v, h, i, min_int(TILE_ROWS, row_end - i), j,
						columns))
					continue;
				if (!loaded)
					tile_load_kv(t, v, head_k, j, columns);
				loaded = true;
				tile_load_q(t);
				tile_scores(t);
				if (t->masked && !(t->all_finite_k && t->all_finite_q))
					accumulate_visible(t, dk, dv);
				else
					accumulate(t, dk, dv);
				if (store)
					store_dbias(t);
			}
	}
}

/* Every split of the chunk's rows of dq_acc; only split 0 is ever added to. */
static void clear_queries(const struct tile *t, const struct view_sequence *v, int32_t head_k,
			  int32_t row, int32_t row_end)
{
	const struct abi_bwd_args *a = t->args;
	int32_t group = a->nhead_q / a->nhead_k;

	for (int32_t h = head_k * group; h < (head_k + 1) * group; h++)
		for (int32_t split = 0; split < bwd_n_splits(a, v->batch); split++)
			memset(bwd_dq_acc(a, v, h, split, row), 0,
			       sizeof(float) * (row_end - row) * a->hdim_q);
}

static void write_keys(struct tile *t, const struct view_sequence *v, int32_t head_k, int32_t begin,
		       int32_t end, void *workspace)
{
	const struct abi_bwd_args *a = t->args;
	float *dk = key_accumulator(t, workspace, v, head_k, begin, false);
	float *dv = key_accumulator(t, workspace, v, head_k, begin, true);

	for (int32_t j = begin; j < end; j++, dk += t->width_q, dv += t->width_v) {
		for (int32_t d = 0; d < t->width_q; d += LANES)
			vf_store(dk + d, vf_load(dk + d) * a->scale);
		store_row(a->dk.data, a->dtype, view_k_offset(&a->dk, v, j, head_k),
			  a->dk.stride_dim, dk, a->hdim_q);
		store_row(a->dv.data, a->dtype, view_k_offset(&a->dv, v, j, head_k),
			  a->dv.stride_dim, dv, a->hdim_v);
	}
}

/* The key chunk's turn in phase @turn of its sequence's square. */
static void square_task(struct tile *t, const struct view_sequence *v, int32_t head_k,
			struct square square, int32_t turn, int32_t chunk_k, void *workspace)
{
	int32_t chunk_q = (chunk_k + turn) % square.n;
	int32_t key = chunk_k * square.chunk_k, key_end = min_int(key + square.chunk_k, v->k_len);
	int32_t row = chunk_q * square.chunk_q, row_end = min_int(row + square.chunk_q, v->q_len);
	/* Key chunk n meets query chunk m in turn m - n; where there are fewer key chunks, the last
	 * of them comes first to the query chunks past them. */
	int32_t first_turn = chunk_q < square.n_k ? 0 : chunk_q - square.n_k + 1;

	if (turn == 0) {
		memset(key_accumulator(t, workspace, v, head_k, key, false), 0,
		       sizeof(float) * (key_end - key) * t->width_q);
		memset(key_accumulator(t, workspace, v, head_k, key, true), 0,
		       sizeof(float) * (key_end - key) * t->width_v);
	}
	if (chunk_q < square.n_q) {
		if (turn == first_turn)
			clear_queries(t, v, head_k, row, row_end);
		square_tiles(t, v, head_k, square, chunk_q, chunk_k, workspace);
	}
	if (turn == square.n - 1)
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

/* Everything of one sequence and head that the task's part of dbias receives. */
static void dbias_visit(struct tile *t, const struct view_sequence *v, int32_t head,
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
	int32_t n_rows, row = row_block * TILE_ROWS, column = column_block * n_columns;

	memset(sum, 0, sizeof(float) * TILE_ROWS * TILE_LD);
	for (int32_t b = batch; b < batch_end; b++) {
		struct view_sequence v = view_sequence(s, NULL, b);

		for (int32_t h = head; h < head_end; h++)
			dbias_visit(t, &v, h, &grid, row_block, column_block, sum);
	}
	/* Rows that some sequence may have: all of them when sequences are summed. */
	n_rows = grid.axes.batch ? s->seqlen_q_max : first.q_len;
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
	struct square square = square_of(a, s->seqlen_q_max, s->seqlen_k_max);

	(void)n_threads;
	if (phase == PHASE_CLEAR)
		return (int64_t)s->batch * a->nhead_q;
	if (phase == PHASE_DBIAS) {
		struct dbias_grid grid = dbias_grid(a);

		if (!a->dbias.data || !dbias_is_summed(a))
			return 0;
		return grid.n_batch * grid.n_head * grid.n_row * grid.n_column;
	}
	return phase - PHASE_SQUARE < square.n ? heads * square.n_k : 0;
}

static void dq_dk_dv_run(const void *args, int phase, int64_t task, int n_threads, void *workspace,
			 void *scratch)
{
	const struct abi_bwd_args *a = args;
	const struct abi_sequences *s = &a->sequences;
	struct square longest = square_of(a, s->seqlen_q_max, s->seqlen_k_max), square;
	struct view_sequence v;
	struct tile t;
	size_t tile_bytes = ROUND_UP(tile_init(&t, a, scratch), 64);
	int64_t head;
	int32_t chunk_k;

	(void)n_threads;
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
	square = square_of(a, v.q_len, v.k_len);
	if (chunk_k < square.n_k && phase - PHASE_SQUARE < square.n)
		square_task(&t, &v, (int32_t)(head % a->nhead_k), square, phase - PHASE_SQUARE,
			    chunk_k, workspace);
}

static int dq_dk_dv_accepts(const void *args)
{
	const struct abi_bwd_args *a = args;

	return a->dtype <= ABI_BF16 && a->dq_acc && a->hdim_q <= 256 && a->hdim_v <= 256;
}

static size_t dq_dk_dv_workspace(const void *args, int n_threads)
{
	const struct abi_bwd_args *a = args;
	struct tile t;

	(void)n_threads;
	(void)tile_init(&t, a, NULL);
	return sizeof(float) * a->nhead_k * key_rows(a) * (t.width_q + t.width_v);
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
	DQ_DK_DV(ABI_F32),
	DQ_DK_DV(ABI_F16),
	DQ_DK_DV(ABI_BF16),
};
const size_t CPU_NAME(cpu_bwd_tile_n_kernels) = 3;
