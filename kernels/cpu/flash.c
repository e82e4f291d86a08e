/* SPDX-License-Identifier: MIT */
/*
 * flash.c: attention forward in tiles ("cpu_flash"), compiled once a level.
 *
 * Phase 0 packs K and V once per key head, for all the query heads and rows that read them. Phase 1
 * runs one task a tile of up to ROWS rows: for each block of keys, which stays in the second-level
 * cache, and each group of GROUP_ROWS rows, whose scores stay in the first,
 *
 *   S = Q K^T                    [GROUP_ROWS, keys]
 *   modifiers, mask, row max, P = 2^(S - max), row sums
 *   O = O * 2^(old max - max) + P V
 *
 * and divides by the row sums at the end. A tile's rows belong to one query head, or, when
 * sequences are shorter than a tile, to all query heads that share a key head. Each group of
 * rows has its own range of columns, so a mask costs no work far from its edge.
 */
#include "flash_scratch.h"

/* Which dropout bytes the scratch holds. */
struct bytes_made {
	int32_t head, row;
	int32_t begin, end; /* columns; none: end 0 */
};

/* What is still to be fetched of the next block of K and V. */
struct ahead {
	struct {
		const char *at;
		int64_t lines;
	} part[1 + CPU_MAX_HDIM_V / PANEL]; /* K, panels of V */
	int32_t n, current;
};

/* What a group of rows sees, within the split. */
struct group {
	int32_t first, last; /* columns that some row sees: [first, last); none: last 0 */
	int32_t lo, hi;      /* every row sees all of [lo, hi) */
	int32_t started;     /* O has been written */
	int32_t partial;     /* some row does not see all of the block's range: data */
};

struct tile {
	const struct abi_fwd_args *a;
	struct view_sequence s;
	struct score_ops ops;
	struct scratch scratch;
	const operand *k, *v; /* packed, of this sequence and head */
	const uint8_t *finite;
	const float *factors; /* by which columns of S are still to be multiplied, or NULL */
	int32_t k_padded, q_padded, v_padded;
	int32_t keys; /* columns a block */
	int32_t n_rows, most_rows;
	int32_t split;
	struct score_row row[ROWS];
	struct group group[ROW_GROUPS];
	struct ahead ahead;
	struct bytes_made bytes;
	/* The base of a row's probabilities: about its maximum so far, -inf before anything is
	 * seen; and what O is to be multiplied with. */
	float base[ROWS], alpha[ROWS];
};

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
	operand *k, *v;

	(void)scratch_init(&scratch, a, scratch_base);
	(void)workspace_init(&w, a, workspace);
	k = w.k + keys.start * q_padded(a);
	v = w.v + keys.start * v_padded(a);
	for (int32_t c = c0; factors_apart(a) && c < end; c++)
		w.factors[keys.start + c] = c < s.k_len ? key_factor(a, &a->k_descale, &s, head, c)
							: 1;
	for (int32_t c = c0; c < end; c += PANEL) {
		pack_k_panel(k + (int64_t)c * q_padded(a), a, &s, head, c, (operand *)scratch.temp);
		w.finite[(keys.start + c) / PANEL] = pack_v_panel(v + (int64_t)c * PANEL,
								  (int64_t)keys.n * PANEL, a, &s,
								  head, c, (operand *)scratch.temp);
	}
}

/* Phase 1: which rows a task has. */

static int32_t group_size(const struct abi_fwd_args *a)
{
	return a->nhead_q / a->nhead_k;
}

/* Short sequences share a tile of @most rows between the heads of a group. */
static int shares_tiles(const struct abi_fwd_args *a, int32_t most)
{
	return a->sequences.seqlen_q_max <= most / 2;
}

static int64_t tiles_per_head(const struct abi_fwd_args *a, int32_t most)
{
	int64_t rows = a->sequences.seqlen_q_max;

	if (shares_tiles(a, most))
		rows *= group_size(a);
	return (rows + most - 1) / most;
}

static int64_t tile_heads(const struct abi_fwd_args *a, int32_t most)
{
	return shares_tiles(a, most) ? a->nhead_k : a->nhead_q;
}

static int32_t n_splits(const struct abi_fwd_args *a)
{
	return a->n_splits > 0 ? a->n_splits : 1;
}

/* Fills in the tile's rows; returns the key head, or -1 when there is nothing to do. */
static int32_t tile_rows(struct tile *t, int64_t task)
{
	const struct abi_fwd_args *a = t->a;
	int32_t most = t->most_rows;
	int64_t tiles = tiles_per_head(a, most), heads = tile_heads(a, most);
	/* Later rows of a causal problem see more: they start first. */
	int64_t first = (tiles - 1 - task % tiles) * most;
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
	rows = shares_tiles(a, most) ? (int64_t)t->s.q_len * group : t->s.q_len;
	if (first >= rows)
		return -1;
	t->n_rows = rows - first < most ? (int32_t)(rows - first) : most;
	for (int32_t r = 0; r < t->n_rows; r++) {
		int32_t row = (int32_t)first + r;

		if (shares_tiles(a, most))
			t->row[r] = score_row_at(&a->band, &t->s, head * group + row / t->s.q_len,
						 row % t->s.q_len, (int32_t)begin, (int32_t)end);
		else
			t->row[r] = score_row_at(&a->band, &t->s, head, row, (int32_t)begin,
						 (int32_t)end);
		t->base[r] = -INFINITY;
	}
	return shares_tiles(a, most) ? head : head / group;
}

/* Rows of group g. */
static int32_t group_rows(const struct tile *t, int32_t g)
{
	int32_t left = t->n_rows - g * GROUP_ROWS;

	return left < GROUP_ROWS ? left : GROUP_ROWS;
}

static int32_t n_groups(const struct tile *t)
{
	return (t->n_rows + GROUP_ROWS - 1) / GROUP_ROWS;
}

static int32_t at_most(int32_t x, int32_t limit)
{
	return x < limit ? x : limit;
}

/* The part of a row's range [lo, hi) that lies in the block at @c0. */
struct range {
	int32_t lo, hi;
};

static struct range range_in_block(const struct tile *t, int32_t lo, int32_t hi, int32_t c0)
{
	return (struct range){clamp_i64((int64_t)lo - c0, 0, t->keys),
			      clamp_i64((int64_t)hi - c0, 0, t->keys)};
}

static void group_init(struct tile *t, int32_t g)
{
	struct group *group = &t->group[g];

	*group = (struct group){.first = INT32_MAX, .hi = INT32_MAX};
	for (int32_t i = 0; i < group_rows(t, g); i++) {
		const struct score_row *r = &t->row[g * GROUP_ROWS + i];
		int32_t first = score_row_first(r), last = r->hi > r->sink_hi ? r->hi : r->sink_hi;

		group->lo = r->lo > group->lo ? r->lo : group->lo;
		group->hi = at_most(r->hi, group->hi);
		if (score_row_empty(r))
			continue;
		/* Endpoints tell at once where a row begins and ends; bits would all be read. */
		if (t->a->mask_data.intervals.data) {
			struct seen_range hull = seen_hull(&t->a->mask_data, &t->s, r, first, last);

			if (hull.lo >= hull.hi)
				continue;
			first = hull.lo;
			last = hull.hi;
		}
		group->first = at_most(first, group->first);
		group->last = last > group->last ? last : group->last;
	}
}

/* What row @i of group @g sees of the block that its group came to last. */
static uint8_t *group_seen(const struct tile *t, int32_t g, int32_t i)
{
	return t->scratch.seen + (g % 2 * GROUP_ROWS + i) * MAX_KEYS;
}

/* group_range() by a mask that is data, of columns @within the block. */
static struct range group_range_data(struct tile *t, int32_t g, int32_t c0, struct range within)
{
	const struct abi_mask_data *mask = &t->a->mask_data;
	struct seen_range all = {0, 0};
	struct range range;

	t->group[g].partial = 0;
	for (int32_t i = 0; within.lo < within.hi && i < group_rows(t, g); i++) {
		struct seen_range hull = seen_hull(mask, &t->s, &t->row[g * GROUP_ROWS + i],
						   c0 + within.lo, c0 + within.hi);

		seen_join(&all, hull.lo - c0, hull.hi - c0);
	}
	if (all.lo >= all.hi)
		return (struct range){0, 0};
	range = (struct range){all.lo / COLUMN_UNIT * COLUMN_UNIT,
			       (int32_t)round_up(all.hi, COLUMN_UNIT)};
	for (int32_t i = 0; i < group_rows(t, g); i++) {
		uint8_t *seen = group_seen(t, g, i) + range.lo;

		seen_fill(mask, &t->s, &t->row[g * GROUP_ROWS + i], c0 + range.lo, c0 + range.hi,
			  seen);
		t->group[g].partial |= !seen_all(seen, range.hi - range.lo);
	}
	return range;
}

/* The columns of the block at @c0 that some row of group @g sees: whole vectors, or nothing.
 * Between sink columns and a band may lie blocks that nobody sees. */
static struct range group_range(struct tile *t, int32_t g, int32_t c0)
{
	const struct group *group = &t->group[g];
	struct range all = range_in_block(t, group->first, group->last, c0);

	if (seen_is_data(&t->a->mask_data))
		return group_range_data(t, g, c0, all);
	if (t->a->band.sink_tokens > 0 && all.lo < all.hi) {
		all = (struct range){t->keys, 0};
		for (int32_t i = 0; i < group_rows(t, g); i++) {
			const struct score_row *r = &t->row[g * GROUP_ROWS + i];
			const struct range parts[2] = {
				range_in_block(t, r->sink_lo, r->sink_hi, c0),
				range_in_block(t, r->lo, r->hi, c0)};

			for (int k = 0; k < 2; k++) {
				if (parts[k].lo >= parts[k].hi)
					continue;
				all.lo = at_most(parts[k].lo, all.lo);
				all.hi = parts[k].hi > all.hi ? parts[k].hi : all.hi;
			}
		}
	}
	if (all.lo >= all.hi)
		return (struct range){0, 0};
	return (struct range){all.lo / COLUMN_UNIT * COLUMN_UNIT,
			      (int32_t)round_up(all.hi, COLUMN_UNIT)};
}

/*
 * The next block of K and V comes from the third-level cache or memory; the scores of this one
 * leave time to fetch it.
 */
static void ahead_init(struct tile *t, int32_t c0)
{
	struct ahead *ahead = &t->ahead;
	int32_t keys = at_most(t->k_padded - c0, t->keys);

	ahead->n = 0;
	ahead->current = 0;
	if (keys <= 0)
		return;
	ahead->part[ahead->n].at = (const char *)(t->k + (int64_t)c0 * t->q_padded);
	ahead->part[ahead->n++].lines = (int64_t)keys * t->q_padded * (int)sizeof(operand) / 64;
	for (int32_t d = 0; d < t->v_padded; d += PANEL) {
		ahead->part[ahead->n].at = (const char *)(t->v + (int64_t)d * t->k_padded +
							  (int64_t)c0 * PANEL);
		ahead->part[ahead->n++].lines = (int64_t)keys * PANEL * (int)sizeof(operand) / 64;
	}
}

/* The next @n lines to fetch, or NULL. */
static const char *ahead_take(struct ahead *ahead, int32_t n)
{
	const char *at;

	if (ahead->current == ahead->n)
		return NULL;
	at = ahead->part[ahead->current].at;
	ahead->part[ahead->current].at += 64 * n;
	ahead->part[ahead->current].lines -= n;
	if (ahead->part[ahead->current].lines <= 0)
		ahead->current++;
	return at;
}

static float *group_s(const struct tile *t, int32_t g)
{
	return t->scratch.s + g % SCORE_BUFFERS * (GROUP_ROWS * S_STRIDE);
}

/* Asks for the bias of columns [column, column + n), needed when all of the group's scores are
 * there.
 */
static void group_prefetch_bias(const struct tile *t, int32_t g, int32_t column, int32_t n)
{
	const struct abi_tensor *bias = &t->a->bias;
	int32_t bytes = dtype_bytes(t->a->bias_dtype);

	if (!bias->data || bias->stride_dim != 1)
		return;
	for (int32_t i = 0; i < group_rows(t, g); i++) {
		const struct score_row *r = &t->row[g * GROUP_ROWS + i];

		prefetch_row(bias->data, view_q_offset(bias, &t->s, r->i, r->head) + column, n,
			     bytes);
	}
}

/* S = Q K^T */
static void group_scores(struct tile *t, int32_t g, int32_t c0, struct range range)
{
	for (int32_t c = range.lo, n; c < range.hi; c += n) {
		int32_t lane = c % PANEL; /* blocks start at panels, ranges anywhere inside */

		n = at_most(range.hi - c, PANEL - lane);
		group_prefetch_bias(t, g, c0 + c, n);
		operand_multiply((struct gemm_a){t->scratch.q + g * GROUP_ROWS * t->q_padded,
						 t->q_padded, 1},
				 (struct gemm_b){t->k + (int64_t)(c0 + c - lane) * t->q_padded +
							 lane * OPERAND_PAIR,
						 0, PANEL},
				 group_s(t, g) + c, S_STRIDE, t->q_padded, NULL, group_rows(t, g),
				 n, ahead_take(&t->ahead, operand_lines(t->q_padded, n)));
	}
}

/*
 * The dropout bytes of a row, column @c0 first. Rows come in order of head and number, and 16 of
 * them share one set of patches: it is made for the first one, over the whole block.
 */
static const uint8_t *row_bytes(struct tile *t, const struct score_row *r, int32_t c0, int32_t n)
{
	const struct abi_dropout *d = &t->a->dropout;
	int32_t row = r->i / DROPOUT_PATCH_ROWS * DROPOUT_PATCH_ROWS;
	int32_t column = c0 / DROPOUT_PATCH_COLUMNS * DROPOUT_PATCH_COLUMNS;
	struct bytes_made *made = &t->bytes;

	if (made->head != r->head || made->row != row || column < made->begin ||
	    c0 + n > made->end) {
		*made = (struct bytes_made){r->head, row, column, c0 + n};
		dropout_tile(t->scratch.bytes, BYTES, d,
			     (uint64_t)t->s.batch * (uint64_t)t->a->nhead_q + (uint64_t)r->head,
			     row, DROPOUT_PATCH_ROWS, column, c0 + n - column);
	}
	return t->scratch.bytes + (r->i - row) * BYTES + c0 - made->begin;
}

/* Dropped elements of P become 0; kept ones are scaled with the sum at the end. */
static void drop(struct tile *t, operand *p, int32_t n, int32_t c0, const struct score_row *r)
{
	const uint8_t *bytes = row_bytes(t, r, c0, n);
	int32_t keep_at_most = t->a->dropout.keep_at_most;

	for (int32_t j = 0; j < n; j++)
		p[j] = bytes[j] <= keep_at_most ? p[j] : 0;
}

/* One row of S, columns [c0, c0 + n), to its final value in base 2; returns by what it is still to
 * be multiplied, which is more than 0. @seen: of these columns, where a mask is data. */
static float row_scores(struct tile *t, float *s, int32_t n, int32_t c0, const struct score_row *r,
			int masked, const uint8_t *seen)
{
	float factor = SCALES_Q ? 1 : t->ops.q_factor;

	for (int32_t j = 0; t->factors && j < n; j += LANES)
		vf_store(s + j, vf_load(s + j) * vf_load(t->factors + c0 + j));
	if (!SCALES_Q && (t->ops.modifies || !(factor > 0))) {
		scale_row(s, n, factor);
		factor = 1;
	}
	if (t->ops.modifies)
		score_modify(s, n, c0, &t->ops, &t->s, r, t->scratch.temp);
	if (masked && seen)
		seen_mask(s, n, seen);
	else if (masked)
		score_mask(s, n, c0, r);
	return factor;
}

/*
 * Rows [first, first + n_rows) of group @g: S becomes P; notes by how much what came before
 * shrinks. All maxima first, then all exponentials: a row's own chain from one to the other would
 * leave the vector units waiting.
 */
static void rows_softmax(struct tile *t, int32_t g, int32_t c0, struct range range, int32_t first,
			 int32_t n_rows)
{
	int32_t row = g * GROUP_ROWS + first, n = range.hi - range.lo;
	float factor = 1, most[SOFTMAX_ROWS], base[SOFTMAX_ROWS];
	float *all = group_s(t, g) + first * S_STRIDE + range.lo;
	operand *p = (operand *)(group_s(t, g) + first * S_STRIDE) + range.lo;
	int masked = t->group[g].lo > c0 + range.lo || t->group[g].hi < c0 + range.hi, is_data;

	is_data = seen_is_data(&t->a->mask_data);
	if (is_data)
		masked = t->group[g].partial;
	for (int32_t i = 0; i < n_rows; i++)
		factor = row_scores(t, all + i * S_STRIDE, n, c0 + range.lo, &t->row[row + i],
				    masked,
				    is_data ? group_seen(t, g, first + i) + range.lo : NULL);
	score_max_rows(all, S_STRIDE, n_rows, n, most);
	for (int32_t i = 0; i < n_rows; i++) {
		float old = t->base[row + i], max = most[i] * factor;

		t->alpha[row + i] = 1;
		if (max > old + BASE_SLACK || old == -INFINITY) {
			t->base[row + i] = max;
			t->alpha[row + i] = exp2f(old - max);
		}
		/* Nothing seen yet: any finite number serves, all exponentials are 0. */
		base[i] = t->base[row + i];
		if (base[i] == -INFINITY)
			base[i] = t->alpha[row + i] = 0;
	}
	score_exponentials_rows(p, P_STRIDE, all, S_STRIDE, n_rows, n, SCALES_Q ? 1 : factor, base,
				&t->alpha[row], t->scratch.sum + row * LANES);
	for (int32_t i = 0; t->a->dropout.p_drop > 0 && i < n_rows; i++)
		drop(t, p + i * P_STRIDE, n, c0 + range.lo, &t->row[row + i]);
}

/* O = alpha O + P V */
static void group_values(struct tile *t, int32_t g, int32_t c0, struct range range)
{
	int32_t row = g * GROUP_ROWS;

	for (int32_t d = 0; d < t->v_padded; d += PANEL)
		operand_multiply((struct gemm_a){(operand *)group_s(t, g) + range.lo, P_STRIDE, 1},
				 (struct gemm_b){t->v + (int64_t)d * t->k_padded +
							 (int64_t)(c0 + range.lo) * PANEL,
						 0, PANEL},
				 t->scratch.o + row * t->v_padded + d, t->v_padded,
				 range.hi - range.lo, t->group[g].started ? &t->alpha[row] : NULL,
				 group_rows(t, g), at_most(t->a->hdim_v - d, PANEL), NULL);
}

/* The same for one row where V holds an infinity or a NaN: over exactly what the row sees. */
static void row_values_exact(struct tile *t, int32_t g, int32_t i, int32_t c0, struct range range)
{
	int32_t row = g * GROUP_ROWS + i;
	const struct score_row *r = &t->row[row];
	const uint8_t *seen = seen_is_data(&t->a->mask_data) ? group_seen(t, g, i) : NULL;
	const struct range none = {0, 0};
	const struct range parts[2] = {seen ? none : range_in_block(t, r->sink_lo, r->sink_hi, c0),
				       seen ? range : range_in_block(t, r->lo, r->hi, c0)};
	const operand *p = (operand *)group_s(t, g) + i * P_STRIDE;

	for (int32_t d = 0; d < t->a->hdim_v; d++) {
		float *o = t->scratch.o + row * t->v_padded + d;
		const operand *v = t->v + (int64_t)(d / PANEL * PANEL) * t->k_padded +
				   (int64_t)c0 * PANEL + d % PANEL * OPERAND_PAIR;

		*o = t->group[g].started ? *o * t->alpha[row] : 0;
		for (int k = 0; k < 2; k++)
			for (int32_t j = parts[k].lo; j < parts[k].hi; j++)
				if (!seen || seen[j])
					*o += operand_value(p[j]) *
					      operand_value(
						      v[j / OPERAND_PAIR * OPERAND_PAIR * PANEL +
							j % OPERAND_PAIR]);
	}
}

static int range_is_finite(const struct tile *t, int32_t c0, struct range range)
{
	for (int32_t c = range.lo / PANEL * PANEL; c < range.hi; c += PANEL)
		if (!t->finite[(c0 + c) / PANEL])
			return 0;
	return 1;
}

/*
 * Group @g against the block at @c0, whose scores are there with tiles, else not yet. S stays in
 * the first-level cache.
 */
static void group_run(struct tile *t, int32_t g, int32_t c0, struct range range, struct range next)
{
	const int32_t parts = GROUP_ROWS / SOFTMAX_ROWS, columns = MAX_KEYS / parts;

	if (!OPERAND_TILES)
		group_scores(t, g, c0, range);
	for (int32_t part = 0; part < parts; part++) {
		int32_t first = part * SOFTMAX_ROWS,
			n = at_most(group_rows(t, g) - first, SOFTMAX_ROWS);
		int32_t lo = part * columns, hi = lo + columns;

		if (OPERAND_TILES)
			group_scores(
				t, g + 1, c0,
				(struct range){next.lo > lo ? next.lo : lo, at_most(next.hi, hi)});
		if (n > 0 && range.lo < range.hi)
			rows_softmax(t, g, c0, range, first, n);
	}
	if (range.lo >= range.hi)
		return;
	if (range_is_finite(t, c0, range))
		group_values(t, g, c0, range);
	else
		for (int32_t i = 0; i < group_rows(t, g); i++)
			row_values_exact(t, g, i, c0, range);
	t->group[g].started = 1;
}

/* Brings in Q of group @g and asks for the next one's. */
static void group_fetch(struct tile *t, int32_t g)
{
	int32_t first = g * GROUP_ROWS;

	for (int32_t r = first; r < first + group_rows(t, g); r++) {
		operand *q = t->scratch.q + r * t->q_padded;

		fetch_query(q, t->a, &t->s, t->row[r].head, t->row[r].i, t->ops.q_factor);
		for (int32_t d = t->a->hdim_q; d < t->q_padded; d++)
			q[d] = 0;
	}
	for (int32_t r = first + GROUP_ROWS; r < at_most(first + 2 * GROUP_ROWS, t->n_rows); r++)
		prefetch_row(t->a->q.data,
			     view_q_offset(&t->a->q, &t->s, t->row[r].i, t->row[r].head),
			     t->a->hdim_q, dtype_bytes(t->a->dtype));
}

/* Asks for the lines that the group's O will be written to. */
static void group_prefetch_output(const struct tile *t, int32_t g)
{
	for (int32_t i = 0; i < group_rows(t, g); i++) {
		const struct score_row *r = &t->row[g * GROUP_ROWS + i];

		prefetch_row(t->a->o.data, view_q_offset(&t->a->o, &t->s, r->i, r->head),
			     t->a->hdim_v, dtype_bytes(t->a->o_dtype));
	}
}

/* All rows against one block of keys; what a group needs from memory or will write comes and goes
 * while others compute. */
static void block_run(struct tile *t, int32_t c0, int first, int last)
{
	const struct range none = {0, 0};
	struct range range = group_range(t, 0, c0), next;

	if (OPERAND_TILES)
		group_scores(t, 0, c0, range);
	for (int32_t g = 0; g < n_groups(t); g++, range = next) {
		next = g + 1 < n_groups(t) ? group_range(t, g + 1, c0) : none;
		if (first && g + 1 < n_groups(t))
			group_fetch(t, g + 1);
		if (last && t->a->n_splits == 0)
			group_prefetch_output(t, g);
		group_run(t, g, c0, range, next);
	}
}

/* Stores the dropout bytes of a row, over all columns: what a mask hides has bytes too. */
static void row_store_bytes(struct tile *t, int32_t row)
{
	const struct abi_fwd_args *a = t->a;
	const struct abi_tensor *randval = &a->dropout.randval;
	const struct score_row *r = &t->row[row];
	uint8_t *to = (uint8_t *)randval->data + view_q_offset(randval, &t->s, r->i, r->head);

	for (int32_t c = 0; c < t->s.k_len && cpu_goes_on(); c += MAX_KEYS) {
		int32_t n = at_most(t->s.k_len - c, MAX_KEYS);
		const uint8_t *bytes = row_bytes(t, r, c, n);

		for (int32_t j = 0; j < n; j++)
			to[(c + j) * randval->stride_dim] = bytes[j];
	}
}

static void tile_run(struct tile *t)
{
	int32_t begin = INT32_MAX, end = 0;

	for (int32_t g = 0; g < n_groups(t); g++) {
		group_init(t, g);
		begin = at_most(t->group[g].first, begin);
		end = t->group[g].last > end ? t->group[g].last : end;
	}
	for (int32_t r = 0; r < t->n_rows; r++)
		vf_store(t->scratch.sum + r * LANES, (vf){0});
	group_fetch(t, 0);
	begin = begin / PANEL * PANEL;
	for (int32_t c0 = begin; c0 < end; c0 += t->keys) {
		int32_t last = c0 + t->keys >= end;

		if (!cpu_goes_on())
			return;
		ahead_init(t, last ? t->k_padded : c0 + t->keys);
		block_run(t, c0, c0 == begin, last);
	}
	for (int32_t r = 0; r < t->n_rows; r++) {
		output_row(t->a, &t->s, &t->row[r], t->split,
			   (struct row_state){
				   t->base[r],
				   vf_reduce_add(vf_load(t->scratch.sum + r * LANES)),
				   t->scratch.o + r * t->v_padded,
			   });
		if (t->a->dropout.randval.data && t->split == 0)
			row_store_bytes(t, r);
	}
}

/* The kernel. */

static int flash_accepts(const void *args)
{
	const struct abi_fwd_args *a = args;

	/* Shorter vectors that read few rows' keys as they are beat longer ones that pack them. */
	if (LANES == 16 && !decode_reads(a, LANES) && decode_reads(a, LANES / 2))
		return 0;
	return reads_rows(a) &&
	       (a->o_dtype == ABI_F32 || a->o_dtype == ABI_F16 || a->o_dtype == ABI_BF16);
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

static int64_t flash_n_tasks(const struct abi_fwd_args *a, int phase, int32_t most_rows)
{
	if (phase == 0)
		return (int64_t)a->sequences.batch * a->nhead_k * pack_chunks(a);
	return a->sequences.batch * tile_heads(a, most_rows) * tiles_per_head(a, most_rows) *
	       n_splits(a);
}

static void tile_task(const struct abi_fwd_args *a, int64_t task, int32_t most_rows,
		      void *workspace, void *scratch)
{
	struct tile t = {
		.a = a,
		.most_rows = most_rows,
		.ops = score_ops_init(a),
		.q_padded = q_padded(a),
		.v_padded = v_padded(a),
		.keys = cpu_flash_keys(a->hdim_q, a->hdim_v, MAX_KEYS),
	};
	struct packed_keys keys;
	struct workspace w;
	int32_t head = tile_rows(&t, task);

	if (head < 0)
		return;
	(void)scratch_init(&t.scratch, a, scratch);
	(void)workspace_init(&w, a, workspace);
	keys = packed_keys_at(&a->sequences, &t.s, a->nhead_k, head);
	t.k = w.k + keys.start * t.q_padded;
	t.v = w.v + keys.start * t.v_padded;
	t.finite = w.finite + keys.start / PANEL;
	t.factors = factors_apart(a) ? w.factors + keys.start : NULL;
	t.k_padded = keys.n;
	tile_run(&t);
}

static void flash_run(const void *args, int phase, int64_t task, int32_t most_rows, void *workspace,
		      void *scratch)
{
	uint32_t mode = subnormals_off();

	operand_begin();
	if (phase == 0)
		pack_run(args, task, workspace, scratch);
	else
		tile_task(args, task, most_rows, workspace, scratch);
	operand_end();
	subnormals_restore(mode);
}

/* The functions of a kernel whose tiles have @rows rows. */
#define FLASH_ROWS(rows)                                                                           \
	_Static_assert((rows) <= ROWS && (rows) % GROUP_ROWS == 0, "whole groups");                \
	static int64_t flash_n_tasks_##rows(const void *args, int phase, int n_threads)            \
	{                                                                                          \
		(void)n_threads;                                                                   \
		return flash_n_tasks(args, phase, rows);                                           \
	}                                                                                          \
	static void flash_run_##rows(const void *args, int phase, int64_t task, int n_threads,     \
				     void *workspace, void *scratch)                               \
	{                                                                                          \
		(void)n_threads;                                                                   \
		flash_run(args, phase, task, rows, workspace, scratch);                            \
	}
FLASH_ROWS(96)
#if !OPERAND_TILES /* 48 are not whole groups of a tile unit */
FLASH_ROWS(48)
#endif
_Static_assert(CPU_FLASH_ROWS == 96 && CPU_FLASH_FEW_ROWS == 48, "the tiles of tile.h");

#define FLASH_KERNEL(family_, dtype_, rows)                                                        \
	{                                                                                          \
		.family = family_, .dtype = dtype_, .level = CPU_LEVEL, .pipeline = "cpu_flash",   \
		.tile_m = rows, .accepts = flash_accepts,                                          \
		.workspace_bytes = flash_workspace_bytes, .scratch_bytes = flash_scratch_bytes,    \
		.n_phases = 2, .n_tasks = flash_n_tasks_##rows, .run = flash_run_##rows,           \
	}
#define FLASH_TILES(dtype, rows)                                                                   \
	FLASH_KERNEL(ABI_FWD, dtype, rows), FLASH_KERNEL(ABI_FWD_SPLITKV, dtype, rows),            \
		FLASH_KERNEL(ABI_FWD_PAGEDKV, dtype, rows),                                        \
		FLASH_KERNEL(ABI_BATCH_PREFILL, dtype, rows)
#if OPERAND_TILES
#define FLASH_FAMILIES(dtype) FLASH_TILES(dtype, 96)
#else
#define FLASH_FAMILIES(dtype) FLASH_TILES(dtype, 96), FLASH_TILES(dtype, 48)
#endif

extern const struct cpu_kernel CPU_NAME(cpu_flash_kernels)[];
extern const size_t CPU_NAME(cpu_flash_n_kernels);

const struct cpu_kernel CPU_NAME(cpu_flash_kernels)[] = {
	FLASH_FAMILIES(ABI_BF16),
#if SCALES_Q
	FLASH_FAMILIES(ABI_F32),  FLASH_FAMILIES(ABI_F16),
	FLASH_FAMILIES(ABI_E4M3), FLASH_FAMILIES(ABI_E5M2),
#endif
};
const size_t CPU_NAME(cpu_flash_n_kernels) = sizeof(CPU_NAME(cpu_flash_kernels)) /
					     sizeof(CPU_NAME(cpu_flash_kernels)[0]);
