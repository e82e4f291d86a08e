/* SPDX-License-Identifier: MIT */
/* recipe_tables.c: how long a recipe's sequences are and where their keys lie. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>

#include "random.h"
#include "recipe.h"

static uint8_t marker[1];

void recipe_mark(struct recipe *recipe, uint32_t role, uint32_t dtype)
{
	recipe->problem.tensor[role].data = marker;
	recipe->problem.tensor[role].dtype = dtype;
}

/* Of one axis, a number a sequence. */
struct extents {
	int32_t *length, *room; /* room at least the length */
	int32_t most_length, most_room;
	int64_t total;
};

static int32_t *new_indices(struct recipe *recipe, uint32_t role, int64_t n)
{
	recipe_mark(recipe, role, FMHA_I32);
	recipe->indices[role] = calloc((size_t)(n > 0 ? n : 1), sizeof(int32_t));
	recipe->n_indices[role] = n;
	return recipe->indices[role];
}

static int32_t of_list(const struct recipe_list *list, int32_t i)
{
	return list->values[i < list->n ? i : list->n - 1];
}

static int32_t by_pattern(const struct recipe *recipe, uint64_t *state, int32_t i, int32_t longest)
{
	int32_t batch = recipe->problem.batch, any = longest;

	if (longest > 0)
		any = 1 + (int32_t)(random_next(state) % (uint64_t)longest);
	switch ((enum recipe_lengths)recipe->lengths) {
	case RECIPE_MIXED:
		return i == 0 ? longest : any;
	case RECIPE_RAMP:
		return (int32_t)((int64_t)longest * (i + 1) / batch);
	case RECIPE_ONE_LONG:
		return i == 0 || longest < 16 ? longest : longest / 16;
	case RECIPE_WITH_EMPTY:
		return i == 0 ? longest : i % 2 ? 0 : any;
	case RECIPE_PADDED:
		return i == 0 ? longest : longest - any / 2;
	case RECIPE_EQUAL:
		break;
	}
	return longest;
}

static void extents_deinit(struct extents *e)
{
	free(e->length);
	free(e->room);
}

static int extents_init(struct extents *e, const struct recipe *recipe,
			const struct recipe_list *lengths, const struct recipe_list *rooms,
			int32_t longest, struct fmha_error *err)
{
	int32_t n = recipe->problem.batch;
	uint64_t state = recipe->seed * 977 + 13;

	*e = (struct extents){.length = calloc((size_t)(n > 0 ? n : 1), sizeof(int32_t)),
			      .room = calloc((size_t)(n > 0 ? n : 1), sizeof(int32_t))};
	if (!e->length || !e->room)
		return fmha_error_set(err, FMHA_ENOMEM, "lengths: out of memory");
	for (int32_t i = 0; i < n; i++) {
		e->length[i] = lengths->n > 0 ? of_list(lengths, i)
					      : by_pattern(recipe, &state, i, longest);
		e->room[i] = rooms->n > 0                       ? of_list(rooms, i)
			     : recipe->lengths == RECIPE_PADDED ? longest
								: e->length[i];
		if (e->room[i] < e->length[i])
			return fmha_error_set(err, FMHA_EINVAL,
					      "sequence %d has %d elements, but room for %d", i,
					      e->length[i], e->room[i]);
		e->most_length = e->length[i] > e->most_length ? e->length[i] : e->most_length;
		e->most_room = e->room[i] > e->most_room ? e->room[i] : e->most_room;
		e->total += e->room[i];
	}
	if (e->total > INT32_MAX)
		return fmha_error_set(err, FMHA_EINVAL, "the sequences have 2^31 rows and more");
	return 0;
}

static bool differ(const struct extents *e, int32_t n)
{
	for (int32_t i = 0; i < n; i++)
		if (e->length[i] != e->room[i] || e->length[i] != e->length[0])
			return true;
	return false;
}

static int out_of_memory(struct fmha_error *err)
{
	return fmha_error_set(err, FMHA_ENOMEM, "lengths: out of memory");
}

/* ---- pages ---- */

static int32_t pages_of(const struct fmha_problem *p, int32_t keys)
{
	return keys / p->page_size + (keys % p->page_size != 0);
}

/* All pages of the cache in an order that no sequence follows. */
static int32_t *shuffled_pages(const struct recipe *recipe, int64_t n)
{
	int32_t *pages = malloc((size_t)(n > 0 ? n : 1) * sizeof(*pages));
	uint64_t state = recipe->seed + 7;

	for (int64_t i = 0; pages && i < n; i++)
		pages[i] = (int32_t)i;
	for (int64_t i = n - 1; pages && i > 0; i--) {
		int64_t j = (int64_t)(random_next(&state) % (uint64_t)(i + 1));
		int32_t page = pages[i];

		pages[i] = pages[j];
		pages[j] = page;
	}
	return pages;
}

static int make_block_table(struct recipe *recipe, const struct extents *k, const int32_t *pages)
{
	struct fmha_problem *p = &recipe->problem;
	int32_t *table, *next;

	p->max_blocks = pages_of(p, k->most_room);
	table = new_indices(recipe, FMHA_T_BLOCK_TABLE, (int64_t)p->batch * p->max_blocks);
	if (!table)
		return -1;
	for (int32_t b = 0, at = 0; b < p->batch; b++)
		for (int32_t i = 0; i < pages_of(p, k->room[b]); i++)
			table[(int64_t)b * p->max_blocks + i] = pages[at++];
	next = new_indices(recipe, FMHA_T_SEQLEN_K, p->batch);
	for (int32_t b = 0; next && b < p->batch; b++)
		next[b] = k->length[b] - p->seqlen_new;
	return next ? 0 : -1;
}

static int make_page_lists(struct recipe *recipe, const struct extents *k, const int32_t *pages)
{
	struct fmha_problem *p = &recipe->problem;
	int32_t *starts = new_indices(recipe, FMHA_T_KV_INDPTR, (int64_t)p->batch + 1);
	int32_t *last = new_indices(recipe, FMHA_T_KV_LAST_PAGE_LEN, p->batch), *list;

	if (!starts || !last)
		return -1;
	for (int32_t b = 0; b < p->batch; b++) {
		starts[b + 1] = starts[b] + pages_of(p, k->length[b]);
		last[b] = k->length[b] > 0 ? (k->length[b] - 1) % p->page_size + 1 : 1;
	}
	p->n_page_indices = starts[p->batch];
	list = new_indices(recipe, FMHA_T_KV_PAGE_INDICES, p->n_page_indices);
	if (!list)
		return -1;
	memcpy(list, pages, (size_t)p->n_page_indices * sizeof(*list));
	return 0;
}

static int make_pages(struct recipe *recipe, const struct extents *k, struct fmha_error *err)
{
	struct fmha_problem *p = &recipe->problem;
	int64_t n = 0;
	int32_t *pages;
	int r;

	for (int32_t b = 0; b < p->batch; b++)
		n += pages_of(p, k->room[b]);
	if (n > INT32_MAX)
		return fmha_error_set(err, FMHA_EINVAL, "the cache has 2^31 pages and more");
	p->n_pages = n > 0 ? (int32_t)n : 1;
	pages = shuffled_pages(recipe, n);
	r = !pages           ? -1
	    : recipe->indptr ? make_page_lists(recipe, k, pages)
			     : make_block_table(recipe, k, pages);
	free(pages);
	return r == 0 ? 0 : out_of_memory(err);
}

/* Each row has a slot of its own, in no order, and a position of its sequence; every seventh is left out. */
static int make_slots(struct recipe *recipe, struct fmha_error *err)
{
	struct fmha_problem *p = &recipe->problem;
	int64_t rows = (int64_t)p->batch * p->seqlen_new;
	int32_t *slots, *order, *positions;

	p->n_pages = pages_of(p, (int32_t)rows) + 1;
	slots = new_indices(recipe, FMHA_T_SLOT_MAPPING, rows);
	order = shuffled_pages(recipe, rows);
	for (int64_t i = 0; slots && order && i < rows; i++)
		slots[i] = i % 7 == 6 ? -1 : order[i] + p->page_size / 2;
	free(order);
	recipe->want[FMHA_T_SLOT_MAPPING] = true;
	if (p->rope == FMHA_ROPE_NONE)
		return slots && order ? 0 : out_of_memory(err);
	positions = new_indices(recipe, FMHA_T_POSITIONS, rows);
	p->rotary_max_pos = p->seqlen_new;
	for (int64_t i = 0; positions && i < rows; i++)
		positions[i] = (int32_t)(i % p->seqlen_new);
	recipe->want[FMHA_T_POSITIONS] = true;
	return slots && order && positions ? 0 : out_of_memory(err);
}

/* ---- lengths ---- */

static int make_list(struct recipe *recipe, uint32_t role, const int32_t *values, int32_t minus)
{
	int32_t *list = new_indices(recipe, role, recipe->problem.batch);

	for (int32_t b = 0; list && b < recipe->problem.batch; b++)
		list[b] = values[b] - minus;
	return list ? 0 : -1;
}

static int make_starts(struct recipe *recipe, uint32_t role, const struct extents *e)
{
	int32_t *starts = new_indices(recipe, role, (int64_t)recipe->problem.batch + 1);

	for (int32_t b = 0; starts && b < recipe->problem.batch; b++)
		starts[b + 1] = starts[b] + e->room[b];
	return starts ? 0 : -1;
}

static bool is_padded(const struct extents *e, int32_t n)
{
	for (int32_t i = 0; i < n; i++)
		if (e->length[i] != e->room[i])
			return true;
	return false;
}

static int make_group(struct recipe *recipe, const struct extents *q, const struct extents *k)
{
	struct fmha_problem *p = &recipe->problem;
	int r = make_starts(recipe, FMHA_T_SEQSTART_Q, q);

	p->total_q = (int32_t)q->total;
	if (r == 0 && is_padded(q, p->batch))
		r = make_list(recipe, FMHA_T_SEQLEN_Q, q->length, 0);
	if (r != 0 || p->page_size > 0)
		return r;
	p->total_k = (int32_t)k->total;
	r = make_starts(recipe, FMHA_T_SEQSTART_K, k);
	if (r == 0 && (is_padded(k, p->batch) || p->seqlen_new > 0))
		r = make_list(recipe, FMHA_T_SEQLEN_K, k->length, p->seqlen_new);
	return r;
}

static int make_batch(struct recipe *recipe, const struct extents *q, const struct extents *k)
{
	struct fmha_problem *p = &recipe->problem;
	int r = 0;

	if (p->op != FMHA_APPEND_KV && differ(q, p->batch))
		r = make_list(recipe, FMHA_T_SEQLEN_Q, q->length, 0);
	if (r == 0 && p->page_size == 0 && (differ(k, p->batch) || p->seqlen_new > 0))
		r = make_list(recipe, FMHA_T_SEQLEN_K, k->length, p->seqlen_new);
	return r;
}

static int make_cache_rows(struct recipe *recipe)
{
	struct fmha_problem *p = &recipe->problem;
	int32_t *rows;

	if (recipe->leftpad > 0) {
		int32_t *pads = new_indices(recipe, FMHA_T_LEFTPAD_K, p->batch);

		for (int32_t b = 0; pads && b < p->batch; b++)
			pads[b] = b % (recipe->leftpad + 1);
		if (!pads)
			return -1;
	}
	if (!recipe->cache_rows)
		return 0;
	p->cache_batch = p->batch;
	rows = new_indices(recipe, FMHA_T_CACHE_BATCH_IDX, p->batch);
	for (int32_t b = 0; rows && b < p->batch; b++)
		rows[b] = p->batch - 1 - b;
	return rows ? 0 : -1;
}

/* Lists of lengths mean packed sequences, unless the caller says batch mode; keys alone may differ
 * in that, too: then they are what a cache holds. */
static void settle_mode(struct recipe *recipe)
{
	struct fmha_problem *p = &recipe->problem;
	int32_t n = recipe->q.n > recipe->k.n ? recipe->q.n : recipe->k.n;

	if (!recipe->mode_given && recipe->q.n > 1)
		p->mode = FMHA_GROUP;
	if (!recipe->batch_given && n > p->batch)
		p->batch = n;
}

static int check_appended(const struct recipe *recipe, const struct extents *k,
			  struct fmha_error *err)
{
	const struct fmha_problem *p = &recipe->problem;

	for (int32_t b = 0; b < p->batch; b++)
		if (k->length[b] < p->seqlen_new)
			return fmha_error_set(err, FMHA_EINVAL,
					      "sequence %d has %d keys, of which %d cannot be new",
					      b, k->length[b], p->seqlen_new);
	return 0;
}

/* Columns that rows see, sequence by sequence; every row is visited, so no formula can be wrong. */
static double visible_pairs(const struct fmha_problem *p, int64_t rows, int64_t keys)
{
	int64_t anchor = p->mask == FMHA_MASK_BOTTOM_RIGHT ? keys - rows : 0;
	double pairs = 0;

	if (p->mask == FMHA_MASK_NONE)
		return (double)rows * (double)keys;
	for (int64_t i = 0; i < rows; i++) {
		int64_t low = p->window_left < 0 ? 0 : anchor + i - p->window_left;
		int64_t high = p->window_right < 0 ? keys - 1 : anchor + i + p->window_right;
		int64_t sinks = p->sink_tokens;

		low = low < 0 ? 0 : low;
		high = high > keys - 1 ? keys - 1 : high;
		sinks = sinks < low ? sinks : low;
		sinks = sinks < high + 1 ? sinks : high + 1;
		pairs += (double)(high >= low ? high - low + 1 : 0) +
			 (double)(sinks > 0 ? sinks : 0);
	}
	return pairs;
}

static void count(struct recipe *recipe, const struct extents *q, const struct extents *k)
{
	for (int32_t b = 0; b < recipe->problem.batch; b++) {
		recipe->rows += q->length[b];
		recipe->keys += k->length[b];
		recipe->pairs += visible_pairs(&recipe->problem, q->length[b], k->length[b]);
	}
}

/* ---- a mask of intervals ---- */

#define MASK_DOCUMENTS 8  /* a sequence is cut into about so many */
#define MASK_SPECK     16 /* keys that a row sees elsewhere, for each further interval */

/* What row @i sees: the document that lies beside it, and specks. */
static void make_endpoints(const struct fmha_problem *p, int64_t i, int64_t rows, int64_t keys,
			   uint64_t *state, int32_t *f)
{
	int64_t document = keys / MASK_DOCUMENTS > 0 ? keys / MASK_DOCUMENTS : 1;
	int64_t begin = rows > 0 ? i * keys / rows / document * document : 0;

	f[0] = p->mask_endpoints == 1 ? (int32_t)(begin + document) : 0;
	for (int32_t e = 1; e + 1 < p->mask_endpoints; e += 2) {
		if (e > 1)
			begin = (int64_t)(random_next(state) % (uint64_t)(keys > 0 ? keys : 1));
		f[e] = (int32_t)begin;
		f[e + 1] = (int32_t)(begin + (e > 1 ? MASK_SPECK : document));
	}
}

/* Columns of row @i that band and endpoints both let it see. */
static int64_t visible_columns(const struct fmha_problem *p, int64_t i, int64_t rows, int64_t keys,
			       const int32_t *f, uint8_t *seen)
{
	int64_t anchor = i + (p->mask == FMHA_MASK_BOTTOM_RIGHT ? keys - rows : 0), n = 0;

	memset(seen, 0, (size_t)keys);
	for (int32_t e = -1; e + 1 < p->mask_endpoints; e += 2)
		for (int64_t j = e < 0 ? 0 : f[e]; j < f[e + 1] && j < keys; j++)
			seen[j] = 1;
	for (int64_t j = 0; j < keys; j++) {
		bool left = p->mask == FMHA_MASK_NONE || p->window_left < 0 ||
			    j >= anchor - p->window_left || j < p->sink_tokens;
		bool right = p->mask == FMHA_MASK_NONE || p->window_right < 0 ||
			     j <= anchor + p->window_right;

		n += seen[j] && left && right;
	}
	return n;
}

/* One mask for all heads; counts anew what rows see. */
static int make_intervals(struct recipe *recipe, const struct extents *q, const struct extents *k)
{
	struct fmha_problem *p = &recipe->problem;
	bool group = p->mode == FMHA_GROUP;
	int64_t step = group ? p->total_q : p->seqlen_q, first = 0, n = p->mask_endpoints;
	int32_t *list = new_indices(recipe, FMHA_T_MASK_INTERVALS,
				    (group ? 1 : p->batch) * n * step);
	uint8_t *seen = malloc((size_t)k->most_length + 1);
	int32_t *f = calloc((size_t)n, sizeof(*f));
	uint64_t state = recipe->seed * 31 + 5;

	recipe->pairs = 0;
	for (int32_t b = 0; list && seen && f && b < p->batch; b++) {
		for (int64_t i = 0; i < q->length[b]; i++) {
			make_endpoints(p, i, q->length[b], k->length[b], &state, f);
			for (int64_t e = 0; e < n; e++)
				list[first + e * step + i] = f[e];
			recipe->pairs += (double)visible_columns(p, i, q->length[b], k->length[b],
								 f, seen);
		}
		first += group ? q->room[b] : n * step;
	}
	free(seen);
	free(f);
	return list && seen && f ? 0 : -1;
}

/* ---- chosen keys ---- */

/* Row by row, of its sequence's keys or of all slots; every sixteenth is left out. Counts anew. */
static int make_chosen(struct recipe *recipe, const struct extents *q, const struct extents *k)
{
	struct fmha_problem *p = &recipe->problem;
	bool group = p->mode == FMHA_GROUP;
	int64_t rows = group ? p->total_q : (int64_t)p->batch * p->seqlen_q, first = 0;
	int32_t *list = new_indices(recipe, FMHA_T_INDICES, rows * p->topk);
	uint64_t state = recipe->seed * 31 + 7;

	recipe->pairs = recipe->keys = 0;
	for (int32_t b = 0; list && b < p->batch; b++) {
		int64_t keys = recipe->slots ? (int64_t)p->n_pages * p->page_size : k->length[b];

		for (int64_t e = 0; e < (int64_t)q->length[b] * p->topk; e++)
			list[first + e] = e % 16 == 15 || keys == 0
						  ? -1
						  : (int32_t)(random_next(&state) % (uint64_t)keys);
		first += (int64_t)(group ? q->room[b] : p->seqlen_q) * p->topk;
		recipe->pairs += (double)q->length[b] * p->topk;
	}
	recipe->keys = recipe->pairs;
	return list ? 0 : -1;
}

/* Pages that no table leads to. */
static int make_slot_pages(struct recipe *recipe, const struct extents *k)
{
	struct fmha_problem *p = &recipe->problem;
	int64_t n = 1;

	for (int32_t b = 0; b < p->batch; b++)
		n += pages_of(p, k->length[b]);
	p->n_pages = n < INT32_MAX ? (int32_t)n : INT32_MAX;
	p->seqlen_k = 0;
	return 0;
}

int recipe_make_tables(struct recipe *recipe, struct fmha_error *err)
{
	struct fmha_problem *p = &recipe->problem;
	struct extents q = {0}, k = {0};
	int r;

	if (recipe->slots && p->op == FMHA_APPEND_KV)
		return make_slots(recipe, err);
	settle_mode(recipe);
	r = extents_init(&q, recipe, &recipe->q, &recipe->q_room, p->seqlen_q, err);
	if (r == 0)
		r = extents_init(&k, recipe, &recipe->k, &recipe->k_room, p->seqlen_k, err);
	if (r == 0)
		r = check_appended(recipe, &k, err);
	if (r == 0) {
		bool group = p->mode == FMHA_GROUP;

		count(recipe, &q, &k);
		p->seqlen_q = q.most_room;
		if (p->op != FMHA_MERGE_STATES)
			p->seqlen_k = k.most_room;
		if (p->page_size > 0)
			r = recipe->slots ? make_slot_pages(recipe, &k)
					  : make_pages(recipe, &k, err);
		if (r == 0 && p->op != FMHA_MERGE_STATES &&
		    ((group ? make_group(recipe, &q, &k) : make_batch(recipe, &q, &k)) != 0 ||
		     make_cache_rows(recipe) != 0))
			r = out_of_memory(err);
		if (r == 0 && p->topk > 0 && make_chosen(recipe, &q, &k) != 0)
			r = out_of_memory(err);
		if (r == 0 && p->mask_endpoints > 0 && make_intervals(recipe, &q, &k) != 0)
			r = out_of_memory(err);
	}
	extents_deinit(&q);
	extents_deinit(&k);
	return r;
}
