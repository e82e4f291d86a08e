/* SPDX-License-Identifier: MIT */
/*
 * flash.c: attention forward in tiles ("cpu_flash"), compiled once a level.
 *
 * Phase 0 packs K and V once per key head, for all the query heads and rows that read them. Phase 1
 * runs one task a tile of ROWS rows: for each block of keys
 *
 *   S = Q K^T                    [ROWS, KEYS]   in scratch, never larger
 *   modifiers, mask, row max, P = 2^(S - max), row sums
 *   O = O * 2^(old max - max) + P V
 *
 * and divides by the row sums at the end. A tile's rows belong to one query head, or, when
 * sequences are shorter than a tile, to all query heads that share a key head. Each group of
 * MICRO_ROWS rows has its own range of columns, so a mask costs no work far from its edge.
 */
#include "dropout.h"
#include "pack.h"
#include "score.h"

#define ROWS      48
#define KEYS      512 /* columns a block */
#define PACK_KEYS 256 /* columns a packing task */
/* Rows of S lie one cache line off a power of two: else all rows of a group share one set of the
 * cache. */
#define S_STRIDE   (KEYS + 16)
#define ROW_GROUPS (ROWS / MICRO_ROWS)
#define BYTES      (KEYS + 128) /* a block may start inside a dropout patch */

_Static_assert(ROWS % MICRO_ROWS == 0, "a tile is made of whole groups");
_Static_assert(KEYS % 128 == 0 && KEYS % PANEL == 0, "blocks start at dropout patches and panels");
_Static_assert(PACK_KEYS % PANEL == 0, "packing tasks end at panels");

/* A thread's scratch; the arrays follow each other, sized by the launch. */
struct scratch {
	float *q;       /* [ROWS, hdim_q], scaled */
	float *s;       /* [ROWS, KEYS] */
	float *o;       /* [ROWS, v_padded] */
	float *sum;     /* [ROWS, LANES] partial sums */
	float *temp;    /* [max(KEYS, PANEL * hdim_q, v_padded)] */
	uint8_t *bytes; /* [BYTES] dropout */
};

struct workspace {
	float *k, *v;
	uint8_t *finite; /* [keys / PANEL] */
};

struct tile {
	const struct abi_fwd_args *a;
	struct view_sequence s;
	struct score_ops ops;
	struct scratch scratch;
	const float *k, *v; /* packed, of this sequence and head */
	const uint8_t *finite;
	int32_t k_padded, v_padded;
	int32_t n_rows;
	int32_t split;
	struct score_row row[ROWS];
	float max[ROWS], alpha[ROWS];
	uint8_t started[ROW_GROUPS];
	/* Per group, within the current block: the columns that some row sees: from the start of a
	 * panel to the end of a vector. */
	int32_t begin[ROW_GROUPS], end[ROW_GROUPS];
};

static int32_t v_padded(const struct abi_fwd_args *a)
{
	return (int32_t)round_up(a->hdim_v, PANEL);
}

static size_t align_bytes(size_t bytes)
{
	return (bytes + 63) / 64 * 64;
}

static size_t temp_floats(const struct abi_fwd_args *a)
{
	size_t n = (size_t)PANEL * (size_t)a->hdim_q;

	if (n < KEYS)
		n = KEYS;
	return n < (size_t)v_padded(a) ? (size_t)v_padded(a) : n;
}

/* Lays the arrays out from @base (NULL: only to measure); returns the bytes. */
static size_t scratch_init(struct scratch *s, const struct abi_fwd_args *a, void *base)
{
	const size_t floats[] = {
		ROWS * (size_t)a->hdim_q, ROWS * S_STRIDE, ROWS * (size_t)v_padded(a), ROWS * LANES,
		temp_floats(a),
	};
	float **const arrays[] = {&s->q, &s->s, &s->o, &s->sum, &s->temp};
	uintptr_t at = (uintptr_t)base;

	for (int i = 0; i < 5; i++) {
		*arrays[i] = (float *)at;
		at += align_bytes(floats[i] * sizeof(float));
	}
	s->bytes = (uint8_t *)at;
	return at + BYTES - (uintptr_t)base;
}

static size_t workspace_init(struct workspace *w, const struct abi_fwd_args *a, void *base)
{
	size_t keys = (size_t)(packed_keys_total(&a->sequences) * a->nhead_k);
	uintptr_t at = (uintptr_t)base;

	w->k = (float *)at;
	at += align_bytes(keys * (size_t)a->hdim_q * sizeof(float));
	w->v = (float *)at;
	at += align_bytes(keys * (size_t)v_padded(a) * sizeof(float));
	w->finite = (uint8_t *)at;
	return at + align_bytes(keys / PANEL) - (uintptr_t)base;
}

/* Phase 0. */

static int64_t pack_chunks(const struct abi_fwd_args *a)
{
	return (a->sequences.seqlen_k_max + PACK_KEYS - 1) / PACK_KEYS;
}

static void pack_run(const struct abi_fwd_args *a, int64_t task, void *workspace,
		     void *scratch_base)
{
	int64_t chunks = pack_chunks(a);
	int32_t c0 = (int32_t)(task % chunks) * PACK_KEYS;
	int32_t head = (int32_t)(task / chunks % a->nhead_k);
	int32_t b = (int32_t)(task / chunks / a->nhead_k);
	struct view_sequence s = view_sequence(&a->sequences, &a->cache, b);
	struct packed_keys keys = packed_keys_at(&a->sequences, &s, a->nhead_k, head);
	int32_t end = c0 + PACK_KEYS < keys.n ? c0 + PACK_KEYS : keys.n;
	struct scratch scratch;
	struct workspace w;
	float *k, *v;

	(void)scratch_init(&scratch, a, scratch_base);
	(void)workspace_init(&w, a, workspace);
	k = w.k + keys.start * a->hdim_q;
	v = w.v + keys.start * v_padded(a);
	for (int32_t c = c0; c < end; c += PANEL) {
		pack_k_panel(k + (int64_t)c * a->hdim_q, a, &s, head, c, scratch.temp);
		w.finite[(keys.start + c) / PANEL] = pack_v_panel(v + (int64_t)c * PANEL,
								  (int64_t)keys.n * PANEL, a, &s,
								  head, c, scratch.temp);
	}
}

/* Phase 1: which rows a task has. */

static int32_t group_size(const struct abi_fwd_args *a)
{
	return a->nhead_q / a->nhead_k;
}

/* Short sequences share a tile between the heads of a group. */
static int shares_tiles(const struct abi_fwd_args *a)
{
	return a->sequences.seqlen_q_max <= ROWS / 2;
}

static int64_t tiles_per_head(const struct abi_fwd_args *a)
{
	int64_t rows = a->sequences.seqlen_q_max;

	if (shares_tiles(a))
		rows *= group_size(a);
	return (rows + ROWS - 1) / ROWS;
}

static int64_t tile_heads(const struct abi_fwd_args *a)
{
	return shares_tiles(a) ? a->nhead_k : a->nhead_q;
}

static int32_t n_splits(const struct abi_fwd_args *a)
{
	return a->n_splits > 0 ? a->n_splits : 1;
}

/* Fills in the tile's rows; returns the key head, or -1 when there is nothing to do. */
static int32_t tile_rows(struct tile *t, int64_t task)
{
	const struct abi_fwd_args *a = t->a;
	int64_t tiles = tiles_per_head(a), heads = tile_heads(a);
	/* Later rows of a causal problem see more: they start first. */
	int64_t first = (tiles - 1 - task % tiles) * ROWS;
	int32_t head = (int32_t)(task / tiles % heads), group = group_size(a);
	int64_t rest = task / tiles / heads, begin = 0, end = INT32_MAX, rows;

	t->split = (int32_t)(rest % n_splits(a));
	t->s = view_sequence(&a->sequences, &a->cache, (int32_t)(rest / n_splits(a)));
	if (t->s.q_len < a->min_seqlen_q)
		return -1;
	if (a->n_splits > 0) {
		begin = (int64_t)t->split * a->split_size;
		end = begin + a->split_size;
	}
	begin = begin < t->s.k_len ? begin : t->s.k_len;
	end = end < t->s.k_len ? end : t->s.k_len;
	rows = shares_tiles(a) ? (int64_t)t->s.q_len * group : t->s.q_len;
	if (first >= rows)
		return -1;
	t->n_rows = rows - first < ROWS ? (int32_t)(rows - first) : ROWS;
	for (int32_t r = 0; r < t->n_rows; r++) {
		int32_t row = (int32_t)first + r;

		if (shares_tiles(a))
			t->row[r] = score_row_at(&a->band, &t->s, head * group + row % group,
						 row / group, (int32_t)begin, (int32_t)end);
		else
			t->row[r] = score_row_at(&a->band, &t->s, head, row, (int32_t)begin,
						 (int32_t)end);
		t->max[r] = -INFINITY;
	}
	return shares_tiles(a) ? head : head / group;
}

/* Rows of group g. */
static int32_t group_rows(const struct tile *t, int32_t g)
{
	int32_t left = t->n_rows - g * MICRO_ROWS;

	return left < MICRO_ROWS ? left : MICRO_ROWS;
}

static int32_t n_groups(const struct tile *t)
{
	return (t->n_rows + MICRO_ROWS - 1) / MICRO_ROWS;
}

/* Each group's columns within the block at @c0; returns 0 when there are none at all. */
static int block_ranges(struct tile *t, int32_t c0)
{
	int any = 0;

	for (int32_t g = 0; g < n_groups(t); g++) {
		int32_t begin = KEYS, end = 0;

		for (int32_t i = 0; i < group_rows(t, g); i++) {
			const struct score_row *r = &t->row[g * MICRO_ROWS + i];
			const int32_t ranges[2][2] = {{r->sink_lo, r->sink_hi}, {r->lo, r->hi}};

			for (int k = 0; k < 2; k++) {
				int32_t lo = clamp_i64((int64_t)ranges[k][0] - c0, 0, KEYS);
				int32_t hi = clamp_i64((int64_t)ranges[k][1] - c0, 0, KEYS);

				if (lo >= hi)
					continue;
				begin = lo < begin ? lo : begin;
				end = hi > end ? hi : end;
			}
		}
		t->begin[g] = begin / PANEL * PANEL;
		t->end[g] = begin < end ? (int32_t)round_up(end, LANES) : t->begin[g];
		any |= begin < end;
	}
	return any;
}

/* S = Q K^T. A panel of K stays in the first-level cache while all groups use it. */
static void block_scores(struct tile *t, int32_t c0)
{
	int32_t hdim = t->a->hdim_q;

	for (int32_t c = 0; c < KEYS; c += PANEL) {
		for (int32_t g = 0; g < n_groups(t); g++) {
			struct micro_args m = {
				.a = t->scratch.q + g * MICRO_ROWS * hdim,
				.a_row = hdim,
				.a_step = 1,
				.b = t->k + (int64_t)(c0 + c) * hdim,
				.c = t->scratch.s + g * MICRO_ROWS * S_STRIDE + c,
				.c_row = S_STRIDE,
				.k = hdim,
			};

			if (c >= t->begin[g] && c < t->end[g])
				micro_multiply(&m, group_rows(t, g),
					       t->end[g] - c < PANEL ? t->end[g] - c : PANEL);
		}
	}
}

static void drop(struct tile *t, float *p, int32_t n, int32_t c0, const struct score_row *r)
{
	const struct abi_dropout *d = &t->a->dropout;
	int32_t skew = c0 % 32; /* the bytes start at a patch */
	const uint8_t *bytes = t->scratch.bytes + skew;

	dropout_bytes(t->scratch.bytes, d, (uint32_t)t->s.batch, (uint32_t)r->head,
		      (uint32_t)t->a->nhead_q, (uint32_t)r->i, (uint32_t)(c0 - skew), n + skew);
	for (int32_t j = 0; j < n; j++)
		p[j] = bytes[j] <= d->keep_at_most ? p[j] : 0;
}

/* One row of S becomes P; notes by how much what came before shrinks. */
static void row_softmax(struct tile *t, int32_t row, int32_t c0, int32_t begin, int32_t end)
{
	const struct score_row *r = &t->row[row];
	float *s = t->scratch.s + row * S_STRIDE + begin;
	float *sum = t->scratch.sum + row * LANES;
	float old = t->max[row], max;
	int32_t n = end - begin;

	c0 += begin;
	if (t->ops.modifies)
		score_modify(s, n, c0, &t->ops, &t->s, r, t->scratch.temp);
	if (r->sink_lo < r->sink_hi || r->lo > c0 || r->hi < c0 + n)
		score_mask(s, n, c0, r);
	max = score_max(s, n);
	max = max > old ? max : old;
	t->max[row] = max;
	/* Nothing seen yet: any finite number serves, all exponentials are 0. */
	max = max == -INFINITY ? 0 : max;
	t->alpha[row] = vf_exp2(vf_set1(old - max))[0];
	vf_store(sum, vf_load(sum) * t->alpha[row]);
	score_exponentials(s, n, max, sum);
	if (t->a->dropout.p_drop > 0)
		drop(t, s, n, c0, r);
}

/* O = alpha O + P V where V holds an infinity or a NaN: over exactly what each row sees. */
static void group_values_exact(struct tile *t, int32_t g, int32_t c0)
{
	static const float one = 1.0f;

	for (int32_t i = 0; i < group_rows(t, g); i++) {
		int32_t row = g * MICRO_ROWS + i;
		const struct score_row *r = &t->row[row];
		const int32_t ranges[2][2] = {{r->sink_lo, r->sink_hi}, {r->lo, r->hi}};

		for (int32_t d = 0; d < t->v_padded; d += PANEL) {
			int32_t columns = t->a->hdim_v - d < PANEL ? t->a->hdim_v - d : PANEL;
			struct micro_args m = {
				.a_step = 1,
				.c = t->scratch.o + row * t->v_padded + d,
				.first = t->started[g] ? &t->alpha[row] : NULL,
			};

			for (int k = 0; k < 2; k++) {
				int32_t lo = clamp_i64((int64_t)ranges[k][0] - c0, 0, KEYS);
				int32_t hi = clamp_i64((int64_t)ranges[k][1] - c0, 0, KEYS);

				m.a = t->scratch.s + row * S_STRIDE + lo;
				m.b = t->v + (int64_t)d * t->k_padded + (int64_t)(c0 + lo) * PANEL;
				m.k = hi > lo ? hi - lo : 0;
				micro_multiply(&m, 1, columns);
				m.first = &one;
			}
		}
	}
}

static int group_is_finite(const struct tile *t, int32_t g, int32_t c0)
{
	for (int32_t c = t->begin[g]; c < t->end[g]; c += PANEL)
		if (!t->finite[(c0 + c) / PANEL])
			return 0;
	return 1;
}

/* O = alpha O + P V for every group that has columns in this block. */
static void block_values(struct tile *t, int32_t c0)
{
	uint8_t exact[ROW_GROUPS];

	for (int32_t g = 0; g < n_groups(t); g++) {
		exact[g] = !group_is_finite(t, g, c0);
		if (exact[g] && t->begin[g] < t->end[g])
			group_values_exact(t, g, c0);
	}
	for (int32_t d = 0; d < t->v_padded; d += PANEL) {
		int32_t columns = t->a->hdim_v - d < PANEL ? t->a->hdim_v - d : PANEL;

		for (int32_t g = 0; g < n_groups(t); g++) {
			int32_t row = g * MICRO_ROWS;
			struct micro_args m = {
				.a = t->scratch.s + row * S_STRIDE + t->begin[g],
				.a_row = S_STRIDE,
				.a_step = 1,
				.b = t->v + (int64_t)d * t->k_padded +
				     (int64_t)(c0 + t->begin[g]) * PANEL,
				.c = t->scratch.o + row * t->v_padded + d,
				.c_row = t->v_padded,
				.k = t->end[g] - t->begin[g],
				.first = t->started[g] ? &t->alpha[row] : NULL,
			};

			if (!exact[g] && m.k > 0)
				micro_multiply(&m, group_rows(t, g), columns);
		}
	}
	for (int32_t g = 0; g < n_groups(t); g++)
		t->started[g] |= t->begin[g] < t->end[g];
}

/* Divides by the row's sum, stores O and LSE; the attention sink joins the sum here. */
static void row_finish(struct tile *t, int32_t row)
{
	const struct abi_fwd_args *a = t->a;
	const struct score_row *r = &t->row[row];
	float *o = t->scratch.o + row * t->v_padded;
	float sum = vf_reduce_add(vf_load(t->scratch.sum + row * LANES)), max = t->max[row], lse;
	float factor, sink, with_sink;
	int64_t packed_row;

	factor = a->dropout.p_drop > 0 ? a->dropout.p_keep_inverse : 1.0f;
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
	if (!t->started[row / MICRO_ROWS] || t->max[row] == -INFINITY)
		/* O was never written, or is 0 times whatever V holds. A NaN in the sum stays. */
		for (int32_t d = 0; d < a->hdim_v; d++)
			o[d] = sum != sum ? sum : 0;
	else
		scale_row(o, a->hdim_v, factor);
	if (a->n_splits > 0) {
		packed_row = t->s.packed_q ? t->s.q_start + r->i
					   : (int64_t)t->s.batch * a->sequences.seqlen_q_max + r->i;
		packed_row += ((int64_t)t->split * a->nhead_q + r->head) * a->sequences.total_q;
		memcpy(a->o_acc + packed_row * a->hdim_v, o, (size_t)a->hdim_v * sizeof(*o));
		a->lse_acc[packed_row] = lse;
		return;
	}
	store_row(a->o.data, a->o_dtype, view_q_offset(&a->o, &t->s, r->i, r->head),
		  a->o.stride_dim, o, a->hdim_v);
	if (a->lse.data)
		a->lse.data[view_rows_offset(&a->lse, &t->s, r->i, r->head)] = lse;
}

/* Stores the dropout bytes of a row, over all columns: what a mask hides has bytes too. */
static void row_store_bytes(struct tile *t, int32_t row)
{
	const struct abi_fwd_args *a = t->a;
	const struct abi_tensor *randval = &a->dropout.randval;
	const struct score_row *r = &t->row[row];
	uint8_t *to = (uint8_t *)randval->data + view_q_offset(randval, &t->s, r->i, r->head);

	for (int32_t c = 0; c < t->s.k_len; c += KEYS) {
		int32_t n = t->s.k_len - c < KEYS ? t->s.k_len - c : KEYS;

		dropout_bytes(t->scratch.bytes, &a->dropout, (uint32_t)t->s.batch,
			      (uint32_t)r->head, (uint32_t)a->nhead_q, (uint32_t)r->i, (uint32_t)c,
			      n);
		for (int32_t j = 0; j < n; j++)
			to[(c + j) * randval->stride_dim] = t->scratch.bytes[j];
	}
}

static void tile_run(struct tile *t)
{
	int32_t begin = INT32_MAX, end = 0;

	for (int32_t r = 0; r < t->n_rows; r++) {
		fetch_query(t->scratch.q + r * t->a->hdim_q, t->a, &t->s, t->row[r].head,
			    t->row[r].i, t->ops.q_factor);
		vf_store(t->scratch.sum + r * LANES, (vf){0});
		if (score_row_empty(&t->row[r]))
			continue;
		if (score_row_first(&t->row[r]) < begin)
			begin = score_row_first(&t->row[r]);
		end = t->row[r].hi > end ? t->row[r].hi : end;
		end = t->row[r].sink_hi > end ? t->row[r].sink_hi : end;
	}
	for (int32_t c0 = begin / PANEL * PANEL; c0 < end; c0 += KEYS) {
		if (!block_ranges(t, c0))
			continue;
		block_scores(t, c0);
		for (int32_t g = 0; g < n_groups(t); g++)
			for (int32_t i = 0; i < group_rows(t, g) && t->begin[g] < t->end[g]; i++)
				row_softmax(t, g * MICRO_ROWS + i, c0, t->begin[g], t->end[g]);
		block_values(t, c0);
	}
	for (int32_t r = 0; r < t->n_rows; r++) {
		row_finish(t, r);
		if (t->a->dropout.randval.data && t->split == 0)
			row_store_bytes(t, r);
	}
}

/* The kernel. */

static int flash_accepts(const void *args)
{
	const struct abi_fwd_args *a = args;

	return a->o_dtype == ABI_F32 || a->o_dtype == ABI_F16 || a->o_dtype == ABI_BF16;
}

static size_t flash_workspace_bytes(const void *args, int n_threads)
{
	struct workspace w;

	(void)n_threads;
	return workspace_init(&w, args, NULL);
}

static size_t flash_scratch_bytes(const void *args)
{
	struct scratch s;

	return scratch_init(&s, args, NULL);
}

static int64_t flash_n_tasks(const void *args, int phase, int n_threads)
{
	const struct abi_fwd_args *a = args;

	(void)n_threads;
	if (phase == 0)
		return a->sequences.batch * a->nhead_k * pack_chunks(a);
	return a->sequences.batch * tile_heads(a) * tiles_per_head(a) * n_splits(a);
}

static void flash_run(const void *args, int phase, int64_t task, int n_threads, void *workspace,
		      void *scratch)
{
	const struct abi_fwd_args *a = args;
	struct tile t = {.a = a, .ops = score_ops_init(a), .v_padded = v_padded(a)};
	struct packed_keys keys;
	struct workspace w;
	int32_t head;

	(void)n_threads;
	if (phase == 0) {
		pack_run(a, task, workspace, scratch);
		return;
	}
	head = tile_rows(&t, task);
	if (head < 0)
		return;
	(void)scratch_init(&t.scratch, a, scratch);
	(void)workspace_init(&w, a, workspace);
	keys = packed_keys_at(&a->sequences, &t.s, a->nhead_k, head);
	t.k = w.k + keys.start * a->hdim_q;
	t.v = w.v + keys.start * t.v_padded;
	t.finite = w.finite + keys.start / PANEL;
	t.k_padded = keys.n;
	tile_run(&t);
}

#define FLASH_KERNEL(family_, dtype_)                                                              \
	{                                                                                          \
		.family = family_, .dtype = dtype_, .level = CPU_LEVEL, .pipeline = "cpu_flash",   \
		.accepts = flash_accepts, .workspace_bytes = flash_workspace_bytes,                \
		.scratch_bytes = flash_scratch_bytes, .n_phases = 2, .n_tasks = flash_n_tasks,     \
		.run = flash_run,                                                                  \
	}
#define FLASH_FAMILIES(dtype)                                                                      \
	FLASH_KERNEL(ABI_FWD, dtype), FLASH_KERNEL(ABI_FWD_SPLITKV, dtype),                        \
		FLASH_KERNEL(ABI_FWD_PAGEDKV, dtype), FLASH_KERNEL(ABI_BATCH_PREFILL, dtype)

extern const struct cpu_kernel CPU_NAME(cpu_flash_kernels)[];
extern const size_t CPU_NAME(cpu_flash_n_kernels);

const struct cpu_kernel CPU_NAME(cpu_flash_kernels)[] = {
	FLASH_FAMILIES(ABI_F32),  FLASH_FAMILIES(ABI_F16),  FLASH_FAMILIES(ABI_BF16),
	FLASH_FAMILIES(ABI_E4M3), FLASH_FAMILIES(ABI_E5M2),
};
const size_t CPU_NAME(cpu_flash_n_kernels) = sizeof(CPU_NAME(cpu_flash_kernels)) /
					     sizeof(CPU_NAME(cpu_flash_kernels)[0]);
