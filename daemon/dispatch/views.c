/* SPDX-License-Identifier: MIT */
/*
 * views.c: which bytes a tensor view touches, and whether two views touch the same ones; where the checked copies of
 * integer tensors lie.
 *
 * Byte ranges alone would refuse what people really do: dQ, dK and dV interleaved in one packed
 * tensor share a range without sharing a byte. So two views are compared axis by axis, the longest
 * stride first: along it, the remainder of one view meets the remainder of the other at a few
 * relative positions only (ranges that do not meet are dropped), and each of them is compared along
 * the next axis. Views with unrelated strides would need many positions, and many levels of a few
 * add up; they count as overlapping.
 */
#include <stdio.h>

#include "internal.h"

#define MAX_POSITIONS   16
#define MAX_COMPARISONS 512 /* of a pair in all: a run makes them on the worker's loop */

static void sort_axes(struct plan_view *view)
{
	for (int i = 1; i < view->n_axes; i++)
		for (int j = i; j > 0 && view->axes[j].stride > view->axes[j - 1].stride; j--) {
			struct plan_axis swap = view->axes[j];

			view->axes[j] = view->axes[j - 1];
			view->axes[j - 1] = swap;
		}
}

static void view_axes(const struct fmha_problem *p, enum fmha_tensor_role role,
		      const int64_t dims[5], struct plan_view *view)
{
	bool vectorized = p->page_size > 0 && p->kv_layout == FMHA_KV_VECTORIZED &&
			  (role == FMHA_T_K || role == FMHA_T_V);
	const int64_t *stride = p->tensor[role].stride;

	view->n_axes = 0;
	if (view->span_bytes == 0)
		return;
	if (vectorized) { /* packed: one axis of bytes */
		view->axes[0] = (struct plan_axis){
			(int64_t)(view->span_bytes / view->element_bytes), view->element_bytes};
		view->n_axes = 1;
		return;
	}
	for (int i = 0; i < proto_roles[role].n_dims; i++) {
		/* A broadcast axis (stride 0) repeats the same bytes. */
		if (dims[i] <= 1 || stride[i] == 0)
			continue;
		view->axes[view->n_axes++] = (struct plan_axis){dims[i],
								stride[i] * view->element_bytes};
	}
	sort_axes(view);
}

/* Bytes from the first element to one past the last of the axes from @first on. */
static int64_t axes_span(const struct plan_view *view, int first)
{
	int64_t span = view->element_bytes;

	for (int i = first; i < view->n_axes; i++)
		span += (view->axes[i].extent - 1) * view->axes[i].stride;
	return span;
}

/* Does an element of a view share a byte with another of the same view? */
static bool view_overlaps_itself(const struct plan_view *view)
{
	/* Nested axes cannot: each stride steps over all that lies inside. */
	for (int i = 0; i < view->n_axes; i++)
		if (view->axes[i].stride < axes_span(view, i + 1))
			return true;
	return false;
}

/*
 * Integer tensors are copied and checked word by word, so their words must be there: no words that
 * count several times, but for a list's of one word a sequence and a block_table's rows, which may
 * all be the same one.
 */
static bool index_repeats(const struct fmha_problem *p, const struct plan_view *view)
{
	const struct fmha_tensor *tensor = &p->tensor[view->role];

	if (!fmha_role_is_index(view->role) || view->span_bytes == 0)
		return false;
	if (view->role == FMHA_T_BLOCK_TABLE && p->max_blocks > 1 && tensor->stride[1] == 0)
		return true;
	if (view->role == FMHA_T_KV_PAGE_INDICES && p->n_page_indices > 1 && tensor->stride[0] == 0)
		return true;
	return view_overlaps_itself(view);
}

static int check_layout(const struct fmha_problem *p, const struct plan_view *view,
			struct fmha_error *err)
{
	const char *name = proto_roles[view->role].name;
	char field[48];

	(void)snprintf(field, sizeof(field), "tensor.%s.stride", name);
	if (view->written && view_overlaps_itself(view))
		return fmha_error_set_field(err, FMHA_EINVAL, field,
					    "tensor.%s: its strides make the written tensor "
					    "overlap itself",
					    name);
	if (index_repeats(p, view))
		return fmha_error_set_field(err, FMHA_ENOTSUP, field,
					    "tensor.%s: its strides make one word count several "
					    "times",
					    name);
	return 0;
}

int views_build(struct plan *plan, struct fmha_error *err)
{
	const struct fmha_problem *p = &plan->problem;
	struct problem_view of;
	int r;

	plan->n_views = 0;
	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		enum fmha_tensor_role role = (enum fmha_tensor_role)i;
		struct plan_view *view = &plan->views[plan->n_views];

		if (role == FMHA_T_WORKSPACE || !plan_present(p, role))
			continue;
		*view = (struct plan_view){
			.role = (uint32_t)i,
			.written = problem_writes(p, role),
			.element_bytes = fmha_dtype_bytes(p->tensor[role].dtype),
			.alignment = fmha_dtype_bytes(p->tensor[role].dtype),
		};
		r = problem_view(p, role, &of, err);
		if (r < 0)
			return r;
		view->span_bytes = of.bytes;
		view_axes(p, role, of.extent, view);
		r = check_layout(p, view, err);
		if (r < 0)
			return r;
		plan->n_views++;
	}
	return 0;
}

static int64_t floor_div(int64_t a, int64_t b)
{
	return a >= 0 ? a / b : -((-a + b - 1) / b);
}

/* @delta: bytes from a's first element to b's, of the axes from @ia and @ib on. */
static bool axes_overlap(const struct plan_view *a, int ia, const struct plan_view *b, int ib,
			 int64_t delta, int *n_left)
{
	int64_t stride_a = ia < a->n_axes ? a->axes[ia].stride : 0;
	int64_t stride_b = ib < b->n_axes ? b->axes[ib].stride : 0;
	int64_t stride = stride_a > stride_b ? stride_a : stride_b;
	int64_t low, high, first, last, inner_a, inner_b;
	int next_a = ia, next_b = ib;

	if (delta >= axes_span(a, ia) || -delta >= axes_span(b, ib))
		return false;
	if (stride == 0)
		return true; /* two elements whose bytes meet */
	if ((*n_left)-- == 0)
		return true;
	/* Position k shifts b by k strides against a: b's index minus a's. */
	low = stride_a == stride ? -(a->axes[next_a++].extent - 1) : 0;
	high = stride_b == stride ? b->axes[next_b++].extent - 1 : 0;
	/* Of these, only where -inner_b < delta + k * stride < inner_a. */
	inner_a = axes_span(a, next_a);
	inner_b = axes_span(b, next_b);
	first = -floor_div(inner_b - 1 + delta, stride);
	last = floor_div(inner_a - 1 - delta, stride);
	low = low > first ? low : first;
	high = high < last ? high : last;
	if (high - low >= MAX_POSITIONS)
		return true;
	for (int64_t k = low; k <= high; k++)
		if (axes_overlap(a, next_a, b, next_b, delta + k * stride, n_left))
			return true;
	return false;
}

bool views_overlap(const struct plan_view *a, uintptr_t a_at, const struct plan_view *b,
		   uintptr_t b_at)
{
	int n_left = MAX_COMPARISONS;

	if (a->span_bytes == 0 || b->span_bytes == 0)
		return false;
	if (a_at + a->span_bytes <= b_at || b_at + b->span_bytes <= a_at)
		return false;
	return axes_overlap(a, 0, b, 0, (int64_t)(b_at - a_at), &n_left);
}

/* ---- lengths ---- */

/*
 * For which other numbers of keys a plan is as good. A cache that grows asks for one more key with
 * each token. Kernels run right with any number: they take it, and where K and V lie, from their arguments
 * (launch.h). What was chosen for a number, the kernel and its splits, stays a good choice for its neighbours.
 *
 * Splits: as long as each has keys and the last none beyond its size. 1,000 keys in 8 splits of 128: 897 to 1,024. (Shares are of
 * any length.)
 * Otherwise: the quarters of a power of two, in which shape.c keeps times, at least 64 keys wide: 1,025 to 1,280
 * for 1,100; 65 to 128 for 100.
 */

#define MOST_ROWS                                                                                  \
	16 /* of a sequence: more are a prompt, whose kernels look at the number of keys closely */
#define LEAST_WIDTH 64
#define ALIGNMENT   LAUNCH_ALIGNMENT

/* Of what the problem has, is K and V all that the number of keys changes? Integer tensors are checked
 * against it, a bias has a column for each; a role that is not known here is taken for one of those. */
static bool only_keys_grow(const struct fmha_problem *p)
{
	const uint64_t known = 1ull << FMHA_T_Q | 1ull << FMHA_T_K | 1ull << FMHA_T_V |
			       1ull << FMHA_T_O | 1ull << FMHA_T_LSE | 1ull << FMHA_T_SINK |
			       1ull << FMHA_T_ALIBI_SLOPES | 1ull << FMHA_T_Q_DESCALE;

	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (!(known >> role & 1) && plan_present(p, (enum fmha_tensor_role)role))
			return false;
	return true;
}

/* Of a batch entry and of a head; rows do not move when there are more of them. */
static bool steps_are_multiples(const struct fmha_problem *p, enum fmha_tensor_role role,
				int64_t unit)
{
	const int64_t *stride = p->tensor[role].stride;
	const int32_t extents[] = {p->batch, p->nhead_k};
	const int64_t steps[] = {stride[0], stride[2]};

	for (int i = 0; i < 2; i++)
		if (extents[i] > 1 && (steps[i] <= 0 || steps[i] % unit != 0))
			return false;
	return true;
}

static bool may_vary(const struct plan *plan, int64_t unit)
{
	const struct fmha_problem *p = &plan->problem;

	if (p->mode != FMHA_BATCH || plan->n_stages == 0 || plan->widens ||
	    p->seqlen_q > MOST_ROWS || p->seqlen_k < 2 || p->v_in_k || !only_keys_grow(p))
		return false;
	/* The same bits each time, whatever lengths came before. */
	if (p->deterministic || p->n_splits > 0 || p->split_size > 0)
		return false;
	/* Kernels of square masks have the corners in one place. */
	if (p->mask != FMHA_MASK_NONE && p->seqlen_q == p->seqlen_k)
		return false;
	for (uint32_t i = 0; i < plan->n_stages; i++)
		if (plan->stages[i].has_spec && !plan->stages[i].spec.pad_sk &&
		    plan->stages[i].family != ABI_FWD_SPLITKV_COMBINE)
			return false; /* whole tiles of keys */
	return steps_are_multiples(p, FMHA_T_K, unit) && steps_are_multiples(p, FMHA_T_V, unit);
}

static int64_t quarter_of_power(int64_t n)
{
	int64_t power = 1;

	while (power * 2 < n)
		power *= 2;
	return power / 4 > LEAST_WIDTH ? power / 4 : LEAST_WIDTH;
}

void lengths_choose(struct plan *plan)
{
	int64_t unit, n = plan->problem.seqlen_k, width = quarter_of_power(n), least, most;

	plan->keys = (struct plan_keys){0};
	if (plan->problem.op != FMHA_FORWARD)
		return; /* a merge has no keys, nor are they of a type */
	unit = ALIGNMENT / fmha_dtype_bytes(plan->problem.k.dtype);
	if (!may_vary(plan, unit))
		return;
	most = ceil_div(n, width) * width;
	least = most - width + 1;
	if (plan->n_splits > 1 && !plan->shares) {
		most = (int64_t)plan->n_splits * plan->split_size;
		least = most - plan->split_size + 1;
	}
	if (least > n || most < n || most > INT32_MAX || most * plan->problem.batch > INT32_MAX)
		return;
	plan->keys = (struct plan_keys){.least = (int32_t)(least > 2 ? least : 2),
					.most = (int32_t)most,
					.stride_unit = (uint32_t)unit};
}

/* ---- the tables of a run's integers ---- */

/* What a sequence can need. */
static int64_t table_columns(const struct fmha_problem *p)
{
	int64_t needed = p->page_size > 0 ? ceil_div(p->seqlen_k, p->page_size) : 0;

	return needed < p->max_blocks ? needed : p->max_blocks;
}

/* 0 when the client's rows are one and the same. */
static int64_t table_stride(const struct fmha_problem *p)
{
	return p->block_table.stride[0] == 0 ? 0 : table_columns(p);
}

/* Rows of the copy. */
static int64_t table_rows(const struct fmha_problem *p)
{
	return table_stride(p) == 0 && p->batch > 0 ? 1 : p->batch;
}

/* The next @n words of the block. */
static abi_i32 *next_words(uint64_t block, uint64_t *words, bool present, uint64_t n)
{
	uint64_t first = *words;

	if (!present)
		return NULL;
	*words += n;
	return (abi_i32 *)(uintptr_t)(block + first * sizeof(abi_i32));
}

static struct index_tables lay_out(const struct fmha_problem *p, uint64_t block,
				   uint64_t *ret_words)
{
	uint64_t batch = (uint64_t)p->batch, words = 0;
	bool paged = plan_present(p, FMHA_T_BLOCK_TABLE), lengths = plan_has_lengths_k(p);
	struct index_tables t = {0};

#define NEXT(role, n) next_words(block, &words, plan_present(p, FMHA_T_##role), n)
	t.seqstart_q = NEXT(SEQSTART_Q, batch + 1);
	t.seqstart_k = NEXT(SEQSTART_K, batch + 1);
	t.seqlen_q = NEXT(SEQLEN_Q, batch);
	t.leftpad_k = NEXT(LEFTPAD_K, batch);
	t.kv_indptr = NEXT(KV_INDPTR, batch + 1);
	t.kv_page_indices = NEXT(KV_PAGE_INDICES, (uint64_t)p->n_page_indices);
	t.kv_last_page_len = NEXT(KV_LAST_PAGE_LEN, batch);
	t.cache_batch_idx = NEXT(CACHE_BATCH_IDX, batch);
#undef NEXT
	t.seqlen_k_before = next_words(block, &words, lengths, batch);
	t.seqlen_k = next_words(block, &words, lengths, batch);
	if (paged) {
		t.table_columns = table_columns(p);
		t.block_table_stride = table_stride(p);
		t.block_table = next_words(block, &words, true,
					   (uint64_t)table_rows(p) * (uint64_t)t.table_columns);
	}
	*ret_words = words;
	return t;
}

struct index_tables indices_layout(const struct fmha_problem *p, uint64_t block)
{
	uint64_t words;

	return block ? lay_out(p, block, &words) : (struct index_tables){0};
}

uint64_t indices_words(const struct fmha_problem *p)
{
	uint64_t words;

	(void)lay_out(p, 0, &words);
	return words;
}

uint64_t plan_indices_bytes(const struct plan *plan)
{
	return indices_words(&plan->problem) * sizeof(int32_t);
}

/* An append's targets: no more than the cache has, or its check stops early. */
static uint64_t append_entries(const struct plan *plan)
{
	const struct fmha_problem *p = &plan->problem;
	uint64_t most = (uint64_t)p->batch, have = (uint64_t)plan->axes.k.outer;

	if (p->seqlen_new == 0)
		return 0;
	if (plan_paged(p))
		most *= (uint64_t)(p->seqlen_new / p->page_size) + 2;
	return most < have ? most : have;
}

uint64_t plan_row_entries(const struct plan *plan)
{
	const struct fmha_problem *p = &plan->problem;
	uint64_t rows = (uint64_t)p->batch * (uint64_t)p->seqlen_new, each = 0;

	each += plan_present(p, FMHA_T_SLOT_MAPPING) + plan_present(p, FMHA_T_POSITIONS);
	if (plan_present(p, FMHA_T_K_NEW) && p->k_new.dtype != p->k.dtype && !p->descale_computed)
		each += 2 * (uint64_t)p->nhead_k;
	return rows * each;
}

uint64_t plan_index_entries(const struct plan *plan)
{
	return indices_words(&plan->problem) + append_entries(plan) + plan_row_entries(plan) +
	       (plan->workspace_head_bytes > 0 ? (uint64_t)plan->problem.batch : 0);
}
