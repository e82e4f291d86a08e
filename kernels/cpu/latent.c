/* SPDX-License-Identifier: MIT */
/*
 * latent.c: attention forward where many rows share keys that are read once ("cpu_latent"), compiled once a
 * level: multi-head latent attention, whose values are part of its keys, latents of fp8, and keys that
 * indices name.
 *
 * A task has up to ROWS rows of one key head, all heads of a row side by side, and goes through its keys in
 * blocks of KEYS. A block becomes floats, row by row as it lies, and these serve twice:
 *
 *   S^T = K Q^T      K is read one float at a time and broadcast, Q^T lies in panels
 *   S, P             transposed, which costs what one row of the product does; softmax as everywhere
 *   O += P V         V is the block's first columns, again as they lie
 *
 * so no key is packed or transposed. Keys that are chosen are gathered in that first step; entries that name
 * none are left out there, and no one masks them. Where there are few tasks, keys are cut into chunks, whose
 * results a second phase puts together.
 */
#define OPERAND_FLOAT
#define MICRO_AHEAD 0
#include "pack.h"
#include "partials.h"

#define ROWS       CPU_LATENT_ROWS
#define KEYS       CPU_LATENT_KEYS
#define S_STRIDE   (KEYS + 16)
#define ST_STRIDE  (ROWS + 16)
#define FEW_KEYS   (5 * KEYS) /* a chunk has at least so many */
#define TASKS      4          /* wanted for each thread */
#define MANY_ROWS  512        /* of a sequence: enough tasks without chunks */
#define BASE_SLACK 8          /* as in flash_scratch.h */

_Static_assert(KEYS % LANES == 0 && ROWS % PANEL == 0, "whole vectors and panels");

struct scratch {
	float *q;       /* Q^T: panels of rows [ROWS / PANEL][q_padded][PANEL] */
	float *row;     /* [LANES, q_padded] rows of Q on their way there */
	float *k;       /* [KEYS, k_stride] */
	float *v;       /* [KEYS, v_stride], or k */
	float *st;      /* [KEYS, ST_STRIDE] */
	float *s;       /* [ROWS, S_STRIDE] */
	float *temp;    /* [S_STRIDE] */
	float *sum;     /* [ROWS, LANES] */
	float *o;       /* [ROWS, row_floats], where there are no chunks */
	int32_t *picks; /* [2, KEYS] columns of this block and the next */
};

struct latent {
	const struct abi_fwd_args *a;
	struct view_sequence s;
	struct score_ops ops;
	struct scratch scratch;
	int32_t q_padded, k_stride, v_stride;
	int32_t head, split, n_rows;
	struct score_row row[ROWS];
	float base[ROWS], alpha[ROWS];
	int32_t begin, end; /* columns that some row sees */
	int32_t next;       /* column after the last that was picked */
	float *o;
	int64_t o_row;
	int32_t started, finite;
};

static int32_t group_size(const struct abi_fwd_args *a)
{
	return a->nhead_q / a->nhead_k;
}

static int32_t n_splits(const struct abi_fwd_args *a)
{
	return a->n_splits > 0 ? a->n_splits : 1;
}

/* Rows that have the same keys: heads of a row, of all rows where nothing is chosen for each. */
static int64_t alike_rows(const struct abi_fwd_args *a)
{
	return a->chosen.data ? group_size(a) : max_head_rows(a);
}

static int64_t tiles(const struct abi_fwd_args *a)
{
	int64_t alike = (alike_rows(a) + ROWS - 1) / ROWS;

	return a->chosen.data ? alike * a->sequences.seqlen_q_max : alike;
}

static int64_t n_units(const struct abi_fwd_args *a)
{
	return (int64_t)a->sequences.batch * a->nhead_k * tiles(a) * n_splits(a);
}

struct chunks {
	int64_t n;
	int32_t keys;
};

/* Splits and many rows are tasks enough. */
static struct chunks chunks_of(const struct abi_fwd_args *a, int n_threads)
{
	int64_t keys = a->chosen.data ? a->chosen.n
		       : a->n_splits  ? a->split_size
				      : a->sequences.seqlen_k_max;
	int64_t units = n_units(a), wanted = (int64_t)TASKS * n_threads, n = 1, size;

	if (a->n_splits == 0 && units > 0 && max_head_rows(a) <= MANY_ROWS)
		n = (wanted + units - 1) / units;
	size = round_up((keys + n - 1) / n, KEYS);
	size = size > FEW_KEYS ? size : FEW_KEYS;
	n = (keys + size - 1) / size;
	return (struct chunks){n > 0 ? n : 1, (int32_t)(size < INT32_MAX ? size : INT32_MAX)};
}

static int64_t row_floats(const struct abi_fwd_args *a)
{
	return round_up(a->hdim_v, LANES) + PARTIALS_NUMBERS;
}

static struct partials partials_at(const struct abi_fwd_args *a, void *workspace, int64_t unit)
{
	struct partials p = {.row_floats = row_floats(a)};
	int64_t most = alike_rows(a) < ROWS ? alike_rows(a) : ROWS;

	p.chunk_floats = p.row_floats * most;
	p.at = (float *)workspace + unit * p.chunk_floats;
	return p;
}

/* Strides of an odd number of lines, so that rows do not share a set of the cache. */
static int32_t odd_lines(int32_t n)
{
	return (int32_t)(round_up(n, 16) | 16);
}

static size_t scratch_init(struct scratch *s, const struct abi_fwd_args *a, void *base)
{
	int32_t q_padded = (int32_t)round_up(a->hdim_q, LANES);
	const size_t floats[] = {
		(size_t)ROWS * (size_t)q_padded,
		(size_t)LANES * (size_t)q_padded,
		(size_t)KEYS * (size_t)odd_lines(q_padded),
		a->v_in_k ? 0 : (size_t)KEYS * (size_t)odd_lines(a->hdim_v),
		KEYS * ST_STRIDE,
		ROWS * S_STRIDE,
		S_STRIDE,
		ROWS * LANES,
		(size_t)ROWS * (size_t)row_floats(a),
		2 * KEYS,
	};
	float *picks, **const arrays[] = {&s->q, &s->row,  &s->k,   &s->v, &s->st,
					  &s->s, &s->temp, &s->sum, &s->o, &picks};
	uintptr_t at = (uintptr_t)base;

	for (int i = 0; i < 10; i++) {
		*arrays[i] = (float *)at;
		at += ROUND_UP(floats[i] * sizeof(float), 64);
	}
	s->picks = (int32_t *)picks;
	if (a->v_in_k)
		s->v = s->k;
	return at - (uintptr_t)base;
}

/* The rows of tile @tile and what they see of [begin, end); false: none. */
static bool tile_rows(struct latent *t, int64_t tile, int64_t begin, int64_t end)
{
	const struct abi_fwd_args *a = t->a;
	int64_t alike = (alike_rows(a) + ROWS - 1) / ROWS;
	int32_t group = group_size(a), i = (int32_t)(tile / alike);
	int64_t first = tile % alike * ROWS,
		rows = a->chosen.data ? group : (int64_t)t->s.q_len * group;

	if (t->s.q_len < a->min_seqlen_q || first >= rows || (a->chosen.data && i >= t->s.q_len))
		return false;
	t->n_rows = rows - first < ROWS ? (int32_t)(rows - first) : ROWS;
	t->begin = INT32_MAX;
	t->end = 0;
	for (int32_t r = 0; r < t->n_rows; r++) {
		struct score_row *row = &t->row[r];
		int64_t at = first + r;

		t->base[r] = -INFINITY;
		if (a->chosen.data) { /* columns are entries that name a key */
			*row = (struct score_row){.head = t->head * group + (int32_t)at, .i = i};
			row->sink_lo = row->sink_hi = row->lo = (int32_t)begin;
			row->hi = (int32_t)end;
		} else {
			*row = score_row_at(&a->band, &t->s,
					    t->head * group + (int32_t)(at % group),
					    (int32_t)(at / group), (int32_t)begin, (int32_t)end);
		}
		if (score_row_empty(row))
			continue;
		t->begin = score_row_first(row) < t->begin ? score_row_first(row) : t->begin;
		t->end = row->hi > t->end ? row->hi : t->end;
		t->end = row->sink_hi > t->end ? row->sink_hi : t->end;
	}
	return true;
}

/* Q^T of the tile, scaled, in panels; columns past the rows are zero. */
static void fetch_rows(struct latent *t)
{
	for (int32_t first = 0; first < ROUND_UP(t->n_rows, PANEL); first += LANES) {
		int32_t n = t->n_rows - first < LANES ? t->n_rows - first : LANES;
		float *panel = t->scratch.q + first / PANEL * (int64_t)t->q_padded * PANEL +
			       first % PANEL;

		for (int32_t i = 0; i < LANES; i++) {
			float *row = t->scratch.row + i * t->q_padded;

			for (int32_t d = i < n ? t->a->hdim_q : 0; d < t->q_padded; d++)
				row[d] = 0;
			if (i < n)
				fetch_query(row, t->a, &t->s, t->row[first + i].head,
					    t->row[first + i].i, t->ops.q_factor);
		}
		for (int32_t d = 0; d < t->q_padded; d += LANES) {
			vf block[LANES];

			for (int i = 0; i < LANES; i++)
				block[i] = vf_load(t->scratch.row + i * t->q_padded + d);
			transpose(block);
			for (int i = 0; i < LANES; i++)
				vf_store(panel + (int64_t)(d + i) * PANEL, block[i]);
		}
	}
}

/* Where the key of column @column lies; false: there is none. */
static bool key_place(const struct latent *t, int32_t column, struct view_place *ret)
{
	const struct abi_fwd_args *a = t->a;

	if (a->chosen.data)
		return view_chosen_place(a, &t->s, t->row[0].i, column, ret);
	*ret = (struct view_place){.position = t->s.leftpad + column};
	if (a->cache.page_size) {
		ret->page = view_page(&a->cache, &t->s, ret->position);
		ret->slot = ret->position % a->cache.page_size;
	}
	return true;
}

static const char *key_at(const struct latent *t, const struct abi_tensor *tensor,
			  const struct view_place *place)
{
	return (const char *)tensor->data +
	       view_chosen_offset(t->a, tensor, &t->s, place, t->head, 0) *
		       dtype_bytes(view_kv_dtype(t->a));
}

static float factor_at(const struct latent *t, const struct abi_descale *d,
		       const struct view_place *place)
{
	return view_descale(d, t->s.batch, t->head, d->per_page ? place->slot : place->position,
			    place->page, t->a->cache.page_size);
}

static void load_latent(float *to, const char *key, int32_t hdim)
{
	for (int32_t d = 0; d < ABI_LATENT_CODES; d += ABI_LATENT_BLOCK) {
		float factor;

		memcpy(&factor, key + ABI_LATENT_FACTORS + d / ABI_LATENT_BLOCK * 4,
		       sizeof(factor));
		for (int32_t i = d; i < d + ABI_LATENT_BLOCK; i += LANES)
			vf_store(to + i, vf_load_as(key + i, ABI_E4M3) * factor);
	}
	load_row(to + ABI_LATENT_CODES, key + ABI_LATENT_REST, ABI_BF16, 0, 1,
		 hdim - ABI_LATENT_CODES);
}

static void load_key(float *to, const struct latent *t, const struct abi_tensor *tensor,
		     const struct abi_descale *descale, const struct view_place *place,
		     int32_t hdim)
{
	load_row(to, key_at(t, tensor, place), view_kv_dtype(t->a), 0, tensor->stride_dim, hdim);
	if (descale->data)
		scale_row(to, hdim, factor_at(t, descale, place));
}

/* The next block's keys, as floats. Return: how many. Indices are read here, and nowhere else. */
static int32_t fetch_block(struct latent *t)
{
	const struct abi_fwd_args *a = t->a;
	int32_t n = 0;
	vf zeros = {0};

	for (; n < KEYS && t->next < t->end; t->next++) {
		float *k = t->scratch.k + n * t->k_stride, *v = t->scratch.v + n * t->v_stride;
		struct view_place place;

		if (!key_place(t, t->next, &place))
			continue;
		if (a->cache.layout == ABI_KV_LATENT_FP8)
			load_latent(k, key_at(t, &a->k, &place), a->hdim_q);
		else
			load_key(k, t, &a->k, &a->k_descale, &place, a->hdim_q);
		if (!a->v_in_k)
			load_key(v, t, &a->v, &a->v_descale, &place, a->hdim_v);
		for (int32_t d = 0; d < a->hdim_v; d += LANES)
			zeros += vf_load(v + d) * 0.0f;
		n++;
	}
	t->finite = vf_reduce_add(zeros) == 0;
	return n;
}

/* S of the block: [n_rows, KEYS]. */
static void block_scores(struct latent *t, int32_t n)
{
	const struct scratch *s = &t->scratch;

	for (int32_t panel = 0; panel < t->n_rows; panel += PANEL) {
		int32_t columns = t->n_rows - panel < PANEL ? t->n_rows - panel : PANEL;

		for (int32_t j = 0; j < n; j += MICRO_ROWS) {
			const struct micro_args m = {
				.a = s->k + j * t->k_stride,
				.a_row = t->k_stride,
				.a_step = 1,
				.b = s->q + panel * (int64_t)t->q_padded,
				.c = s->st + j * ST_STRIDE + panel,
				.c_row = ST_STRIDE,
				.k = t->q_padded,
			};

			micro_multiply(&m, n - j < MICRO_ROWS ? n - j : MICRO_ROWS, columns);
		}
	}
	for (int32_t r = 0; r < t->n_rows; r += LANES)
		for (int32_t j = 0; j < n; j += LANES) {
			vf block[LANES];

#pragma GCC unroll 16
			for (int i = 0; i < LANES; i++)
				block[i] = vf_load(s->st + (j + i) * ST_STRIDE + r);
			transpose(block);
#pragma GCC unroll 16
			for (int i = 0; i < LANES; i++)
				vf_store(s->s + (r + i) * S_STRIDE + j, block[i]);
		}
}

/* S becomes P over columns [c0, c0 + n); notes by how much what came before shrinks. */
static void block_softmax(struct latent *t, int32_t c0, int32_t n)
{
	int32_t whole = (int32_t)round_up(n, LANES);
	float most[ROWS], base[ROWS];

	for (int32_t r = 0; r < t->n_rows; r++) {
		float *s = t->scratch.s + r * S_STRIDE;

		if (t->ops.modifies)
			score_modify(s, whole, c0, &t->ops, &t->s, &t->row[r], t->scratch.temp);
		if (t->a->chosen.data)
			score_hide(s, n, whole);
		else
			score_mask(s, whole, c0, &t->row[r]);
	}
	score_max_rows(t->scratch.s, S_STRIDE, t->n_rows, whole, most);
	for (int32_t r = 0; r < t->n_rows; r++) {
		float old = t->base[r];

		t->alpha[r] = 1;
		if (most[r] > old + BASE_SLACK || old == -INFINITY) {
			t->base[r] = most[r];
			t->alpha[r] = exp2f(old - most[r]);
		}
		/* Nothing seen yet: any finite number serves, all exponentials are 0. */
		base[r] = t->base[r];
		if (base[r] == -INFINITY)
			base[r] = t->alpha[r] = 0;
	}
	score_exponentials_rows(t->scratch.s, S_STRIDE, t->scratch.s, S_STRIDE, t->n_rows, whole, 1,
				base, t->alpha, t->scratch.sum);
}

/* O = alpha O + P V */
static void block_values(struct latent *t, int32_t n)
{
	for (int32_t d = 0; d < t->a->hdim_v; d += PANEL)
		for (int32_t r = 0; r < t->n_rows; r += MICRO_ROWS) {
			const struct micro_args m = {
				.a = t->scratch.s + r * S_STRIDE,
				.a_row = S_STRIDE,
				.a_step = 1,
				.b = t->scratch.v + d,
				.b_step = t->v_stride,
				.c = t->o + r * t->o_row + d,
				.c_row = t->o_row,
				.k = n,
				.first = t->started ? t->alpha + r : NULL,
			};

			micro_multiply(&m, t->n_rows - r < MICRO_ROWS ? t->n_rows - r : MICRO_ROWS,
				       t->a->hdim_v - d < PANEL ? t->a->hdim_v - d : PANEL);
		}
}

/* The same where V holds an infinity or a NaN: each row over exactly what it sees. */
static void block_values_exact(struct latent *t, int32_t c0, int32_t n)
{
	for (int32_t r = 0; r < t->n_rows; r++) {
		const struct score_row *row = &t->row[r];
		const float *p = t->scratch.s + r * S_STRIDE;
		float *o = t->o + r * t->o_row;

		for (int32_t d = 0; d < t->a->hdim_v; d++)
			o[d] = t->started ? o[d] * t->alpha[r] : 0;
		for (int32_t j = 0; j < n; j++) {
			int32_t column = c0 + j;

			if (!t->a->chosen.data && (column < row->lo || column >= row->hi) &&
			    (column < row->sink_lo || column >= row->sink_hi))
				continue;
			for (int32_t d = 0; d < t->a->hdim_v; d++)
				o[d] += p[j] * t->scratch.v[j * t->v_stride + d];
		}
	}
}

/* All keys of the chunk. False: nobody wants the result any more. */
static bool tile_run(struct latent *t)
{
	fetch_rows(t);
	for (int32_t r = 0; r < t->n_rows; r++)
		vf_store(t->scratch.sum + r * LANES, (vf){0});
	/* Padding is multiplied: it must be a number. */
	for (int32_t j = 0; j < KEYS; j++)
		for (int32_t d = t->a->hdim_q; d < t->q_padded; d++)
			t->scratch.k[j * t->k_stride + d] = 0;
	for (int32_t j = 0; j < KEYS && !t->a->v_in_k; j++)
		for (int32_t d = t->a->hdim_v; d < t->v_stride; d++)
			t->scratch.v[j * t->v_stride + d] = 0;
	for (t->next = t->begin; t->next < t->end;) {
		int32_t c0 = t->next, n = fetch_block(t);

		if (!cpu_goes_on())
			return false;
		if (n == 0)
			continue;
		block_scores(t, n);
		block_softmax(t, c0, n);
		if (t->finite)
			block_values(t, n);
		else
			block_values_exact(t, c0, n);
		t->started = 1;
	}
	return true;
}

/* The sequence, head, split and tile of unit @unit; its keys are [begin, end) of the split's. */
static bool unit_init(struct latent *t, int64_t unit, int64_t begin, int64_t end)
{
	const struct abi_fwd_args *a = t->a;
	int64_t split_begin, n;

	t->split = (int32_t)(unit % n_splits(a));
	unit /= n_splits(a);
	t->head = (int32_t)(unit / tiles(a) % a->nhead_k);
	t->s = view_sequence(&a->sequences, &a->cache, (int32_t)(unit / tiles(a) / a->nhead_k));
	n = a->chosen.data ? a->chosen.n : t->s.k_len;
	split_begin = a->n_splits > 0 ? (int64_t)t->split * a->split_size : 0;
	if (a->n_splits > 0 && end > a->split_size)
		end = a->split_size;
	begin = split_begin + begin < n ? split_begin + begin : n;
	end = split_begin + end < n ? split_begin + end : n;
	return tile_rows(t, unit % tiles(a), begin, end);
}

static void chunk_task(const struct abi_fwd_args *a, int64_t task, struct chunks chunks,
		       void *workspace, void *scratch)
{
	struct latent t = {.a = a,
			   .ops = score_ops_init(a),
			   .q_padded = (int32_t)round_up(a->hdim_q, LANES),
			   .o_row = row_floats(a)};
	struct partials out = partials_at(a, workspace, task);
	int64_t begin = task % chunks.n * chunks.keys;

	if (!unit_init(&t, task / chunks.n, begin, begin + chunks.keys))
		return;
	(void)scratch_init(&t.scratch, a, scratch);
	t.k_stride = odd_lines(t.q_padded);
	t.v_stride = a->v_in_k ? t.k_stride : odd_lines(a->hdim_v);
	t.o = chunks.n > 1 ? out.at : t.scratch.o;
	if (!tile_run(&t))
		return;
	for (int32_t r = 0; r < t.n_rows; r++) {
		struct row_state state = {t.base[r],
					  vf_reduce_add(vf_load(t.scratch.sum + r * LANES)),
					  t.o + r * t.o_row};

		if (chunks.n == 1) {
			output_row(a, &t.s, &t.row[r], t.split, state);
			continue;
		}
		partials_numbers(out, r)[0] = state.max;
		partials_numbers(out, r)[1] = state.sum;
	}
}

static void merge_task(const struct abi_fwd_args *a, int64_t task, int64_t chunks, void *workspace)
{
	struct partials first = partials_at(a, workspace, task * chunks);
	struct latent t = {.a = a};

	if (!unit_init(&t, task, 0, 0))
		return;
	for (int32_t r = 0; r < t.n_rows && cpu_goes_on(); r++)
		output_row(a, &t.s, &t.row[r], t.split, merge_chunks(first, chunks, r, a->hdim_v));
}

/* The kernel. */

static int latent_accepts(const void *args)
{
	const struct abi_fwd_args *a = args;

	return (a->v_in_k || a->chosen.data) && a->dropout.p_drop == 0 &&
	       !a->mask_data.intervals.data && !a->mask_data.bits.data &&
	       a->cache.layout != ABI_KV_VECTORIZED &&
	       (a->o_dtype == ABI_F32 || a->o_dtype == ABI_F16 || a->o_dtype == ABI_BF16);
}

static size_t latent_workspace_bytes(const void *args, int n_threads)
{
	struct chunks chunks = chunks_of(args, n_threads);

	if (chunks.n == 1)
		return 0;
	return (size_t)(n_units(args) * chunks.n * partials_at(args, NULL, 0).chunk_floats) *
	       sizeof(float);
}

static size_t latent_scratch_bytes(const void *args)
{
	struct scratch s;

	return scratch_init(&s, args, NULL);
}

static int64_t latent_n_tasks(const void *args, int phase, int n_threads)
{
	struct chunks chunks = chunks_of(args, n_threads);

	if (phase == 0)
		return n_units(args) * chunks.n;
	return chunks.n > 1 ? n_units(args) : 0;
}

static void latent_run(const void *args, int phase, int64_t task, int n_threads, void *workspace,
		       void *scratch)
{
	struct chunks chunks = chunks_of(args, n_threads);
	uint32_t mode = subnormals_off();

	if (phase == 0)
		chunk_task(args, task, chunks, workspace, scratch);
	else
		merge_task(args, task, chunks.n, workspace);
	subnormals_restore(mode);
}

CPU_CHUNKED_KERNELS(latent)
