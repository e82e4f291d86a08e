/* SPDX-License-Identifier: MIT */
/*
 * indices.c: what a run is asked for, against its plan: first of all the integers that decide where kernels read and
 * write: prefix sums, lengths, page tables. They live in client memory, so they are copied first, each word read once, and only the
 * copy is judged and used.
 *
 * The work of a check is bounded by the tensors' sizes, which the buffers bound: integer tensors do
 * not overlap themselves (check_limits() in plan.c), a table that all sequences share is copied and
 * checked once, and lists have a word a sequence at most.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct plan_indices {
	uint64_t dq_acc_bytes;      /* where plan_workspace_varies() */
	struct index_tables tables; /* they point into: */
	int32_t words[];
};

struct plan_indices *plan_indices_free(struct plan_indices *indices)
{
	free(indices);
	return NULL;
}

struct reader {
	const struct plan *plan;
	const struct fmha_problem *problem;
	const struct plan_binding *bindings;
	struct fmha_error *err;
	struct index_tables copy;
};

/* Copies @rows x @columns words of @role; the strides are the view's. */
static void copy_words(const struct reader *r, enum fmha_tensor_role role, abi_i32 *to,
		       int64_t rows, int64_t columns)
{
	const volatile int32_t *from = r->bindings[role].host;
	const int64_t *stride = r->problem->tensor[role].stride;
	int64_t row_stride = rows > 1 ? stride[0] : 0;
	int64_t column_stride = role == FMHA_T_BLOCK_TABLE ? stride[1] : stride[0];

	for (int64_t i = 0; i < rows; i++) {
		const volatile int32_t *row = from + i * row_stride;

		if (column_stride == 1) {
			memcpy(to + i * columns, (const void *)row, (size_t)columns * 4);
			continue;
		}
		for (int64_t j = 0; j < columns; j++)
			to[i * columns + j] = row[j * column_stride];
	}
}

static void copy_tables(const struct reader *r)
{
	const struct fmha_problem *p = r->problem;
	const struct index_tables *t = &r->copy;
	const struct {
		enum fmha_tensor_role role;
		abi_i32 *to;
		int64_t n;
	} lists[] = {
		{FMHA_T_SEQSTART_Q, t->seqstart_q, p->batch + 1},
		{FMHA_T_SEQSTART_K, t->seqstart_k, p->batch + 1},
		{FMHA_T_SEQLEN_Q, t->seqlen_q, p->batch},
		{FMHA_T_SEQLEN_K, t->seqlen_k_before, p->batch},
		{FMHA_T_LEFTPAD_K, t->leftpad_k, p->batch},
		{FMHA_T_KV_INDPTR, t->kv_indptr, p->batch + 1},
		{FMHA_T_KV_PAGE_INDICES, t->kv_page_indices, p->n_page_indices},
		{FMHA_T_KV_LAST_PAGE_LEN, t->kv_last_page_len, p->batch},
		{FMHA_T_CACHE_BATCH_IDX, t->cache_batch_idx, p->batch},
	};

	for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++)
		if (plan_present(p, lists[i].role))
			copy_words(r, lists[i].role, lists[i].to, 1, lists[i].n);
	if (t->block_table)
		copy_words(r, FMHA_T_BLOCK_TABLE, t->block_table,
			   t->block_table_stride == 0 && p->batch > 0 ? 1 : p->batch,
			   t->table_columns);
}

#define BAD(r, name, ...)                                                                          \
	fmha_error_set_field((r)->err, FMHA_EINVAL, "tensor." name, "tensor." name __VA_ARGS__)

/* Monotone, not negative, within @total. */
static int check_prefix(struct reader *r, const int32_t *prefix, const char *name, int64_t total)
{
	char field[48];
	int32_t batch = r->problem->batch;

	(void)snprintf(field, sizeof(field), "tensor.%s", name);
	if (prefix[0] < 0)
		return fmha_error_set_field(r->err, FMHA_EINVAL, field,
					    "%s[0] is %d: prefix sums start at 0 or above", field,
					    prefix[0]);
	for (int32_t b = 0; b < batch; b++)
		if (prefix[b + 1] < prefix[b])
			return fmha_error_set_field(r->err, FMHA_EINVAL, field,
						    "%s[%d] is %d, less than %d before it", field,
						    b + 1, prefix[b + 1], prefix[b]);
	if (prefix[batch] > total)
		return fmha_error_set_field(r->err, FMHA_EINVAL, field,
					    "%s[%d] is %d, past the end %lld", field, batch,
					    prefix[batch], (long long)total);
	return 0;
}

static int check_rows(struct reader *r)
{
	const struct fmha_problem *p = r->problem;
	int e;

	if (r->copy.seqstart_q) {
		e = check_prefix(r, r->copy.seqstart_q, "seqstart_q", p->total_q);
		if (e < 0)
			return e;
	}
	for (int32_t b = 0; b < p->batch; b++) {
		int32_t physical = r->copy.seqstart_q
					   ? r->copy.seqstart_q[b + 1] - r->copy.seqstart_q[b]
					   : p->seqlen_q;
		int32_t length = r->copy.seqlen_q ? r->copy.seqlen_q[b] : physical;

		if (r->copy.seqlen_q && (length < 0 || length > physical))
			return BAD(r, "seqlen_q_per_batch",
				   "[%d] is %d: sequence %d holds 0 to %d rows", b, length, b,
				   physical);
		if (length > p->seqlen_q)
			return BAD(r, "seqstart_q", ": sequence %d has %d rows, seqlen_q says %d",
				   b, length, p->seqlen_q);
	}
	return 0;
}

/* The keys of sequence @b that the SGLang tables describe. */
static int sglang_length(struct reader *r, int32_t b, int64_t *ret_length)
{
	const struct fmha_problem *p = r->problem;
	int64_t pages = r->copy.kv_indptr[b + 1] - (int64_t)r->copy.kv_indptr[b];

	if (pages == 0) {
		/* (0 - 1) * page_size + page_size is 0 for whoever computes the length again. */
		r->copy.kv_last_page_len[b] = p->page_size;
		*ret_length = 0;
		return 0;
	}
	if (r->copy.kv_last_page_len[b] < 1 || r->copy.kv_last_page_len[b] > p->page_size)
		return BAD(r, "kv_last_page_len", "[%d] is %d: a last page holds 1 to %d keys", b,
			   r->copy.kv_last_page_len[b], p->page_size);
	*ret_length = (pages - 1) * p->page_size + r->copy.kv_last_page_len[b];
	return 0;
}

/* Keys of sequence @b before and after an append, and what its storage can hold. */
static int check_keys_of(struct reader *r, int32_t b)
{
	const struct fmha_problem *p = r->problem;
	int64_t appended = r->plan->append || p->op == FMHA_APPEND_KV ? p->seqlen_new : 0;
	int64_t capacity = p->seqlen_k, before, after;
	int e;

	if (r->plan->axes.k.storage == STORED_SLOTS)
		return 0;
	if (r->copy.seqstart_k)
		capacity = r->copy.seqstart_k[b + 1] - r->copy.seqstart_k[b];
	if (r->copy.block_table && capacity > r->copy.table_columns * p->page_size)
		capacity = r->copy.table_columns * p->page_size;
	if (r->copy.kv_indptr) {
		e = sglang_length(r, b, &capacity);
		if (e < 0)
			return e;
		if (capacity > p->seqlen_k)
			return BAD(r, "kv_indptr", ": sequence %d has %lld keys, seqlen_k says %d",
				   b, (long long)capacity, p->seqlen_k);
		before = capacity - appended;
		if (plan_present(p, FMHA_T_SEQLEN_K))
			before = r->copy.seqlen_k_before[b];
	} else {
		before = plan_present(p, FMHA_T_SEQLEN_K) ? r->copy.seqlen_k_before[b]
							  : capacity - appended;
	}
	after = before + appended;
	if (before < 0 || after > capacity)
		return BAD(r, "seqlen_k_per_batch",
			   ": sequence %d has %lld keys and gets %lld more; it can hold %lld", b,
			   (long long)before, (long long)appended, (long long)capacity);
	if (after > p->seqlen_k)
		return BAD(r, "seqstart_k", ": sequence %d has %lld keys, seqlen_k says %d", b,
			   (long long)after, p->seqlen_k);
	if (r->copy.leftpad_k && (r->copy.leftpad_k[b] < 0 || r->copy.leftpad_k[b] > after))
		return BAD(r, "leftpad_k", "[%d] is %d: the sequence has %lld keys", b,
			   r->copy.leftpad_k[b], (long long)after);
	if (r->copy.seqlen_k) {
		r->copy.seqlen_k_before[b] = (int32_t)before;
		r->copy.seqlen_k[b] = (int32_t)after;
	}
	if (p->rope != FMHA_ROPE_NONE && appended > 0) {
		/* Rows of q rotate by before + i under a mask, all by before without one. */
		int64_t q_last = p->mask == FMHA_MASK_NONE ? 1 : p->seqlen_q;
		int64_t last = appended > q_last ? appended : q_last;

		if (p->op == FMHA_APPEND_KV && !plan_present(p, FMHA_T_Q_ROTATED))
			last = appended;
		if (before + last > p->rotary_max_pos)
			return fmha_error_set_field(
				r->err, FMHA_EINVAL, "rotary_max_pos",
				"rotary_max_pos %d: sequence %d needs positions up to %lld",
				p->rotary_max_pos, b, (long long)(before + last - 1));
	}
	return 0;
}

static int check_keys(struct reader *r)
{
	const struct fmha_problem *p = r->problem;
	int e;

	if (r->copy.seqstart_k) {
		e = check_prefix(r, r->copy.seqstart_k, "seqstart_k", p->total_k);
		if (e < 0)
			return e;
	}
	if (r->copy.kv_indptr) {
		e = check_prefix(r, r->copy.kv_indptr, "kv_indptr", p->n_page_indices);
		if (e < 0)
			return e;
	}
	for (int32_t b = 0; b < p->batch; b++) {
		e = check_keys_of(r, b);
		if (e < 0)
			return e;
	}
	return 0;
}

/* Page numbers that are used must exist; the others are cleared. */
static int check_pages(struct reader *r, int32_t *pages, int64_t n_used, int64_t n,
		       const char *field)
{
	for (int64_t i = 0; i < n_used; i++)
		if (pages[i] < 0 || pages[i] >= r->problem->n_pages)
			return fmha_error_set_field(r->err, FMHA_EINVAL, field,
						    "%s: page number %d, the cache has %d pages",
						    field, pages[i], r->problem->n_pages);
	if (n > n_used)
		memset(pages + n_used, 0, (size_t)(n - n_used) * sizeof(*pages));
	return 0;
}

/* Pages that rows [first, last] of the table, which may be one and the same, must have. */
static int64_t pages_used(const struct reader *r, int32_t first, int32_t last)
{
	const struct fmha_problem *p = r->problem;
	int64_t keys = r->copy.seqlen_k ? 0 : p->seqlen_k;

	for (int32_t b = first; r->copy.seqlen_k && b <= last; b++)
		if (r->copy.seqlen_k[b] > keys)
			keys = r->copy.seqlen_k[b];
	return ceil_div(keys, p->page_size);
}

static int check_table(struct reader *r)
{
	int32_t batch = r->problem->batch;
	bool shared = r->copy.block_table_stride == 0;
	int e = 0;

	if (!r->copy.block_table || batch == 0)
		return 0;
	for (int32_t b = 0; b < (shared ? 1 : batch) && e == 0; b++)
		e = check_pages(r, r->copy.block_table + b * r->copy.block_table_stride,
				pages_used(r, b, shared ? batch - 1 : b), r->copy.table_columns,
				"tensor.block_table");
	return e;
}

static int check_cache(struct reader *r)
{
	const struct fmha_problem *p = r->problem;
	int32_t rows = p->cache_batch ? p->cache_batch : p->batch;
	int e = check_table(r);

	if (e == 0 && r->copy.kv_page_indices && p->batch > 0) {
		int64_t first = r->copy.kv_indptr[0], end = r->copy.kv_indptr[p->batch];

		memset(r->copy.kv_page_indices, 0, (size_t)first * sizeof(int32_t));
		e = check_pages(r, r->copy.kv_page_indices + first, end - first,
				p->n_page_indices - first, "tensor.kv_page_indices");
	}
	for (int32_t b = 0; r->copy.cache_batch_idx && b < p->batch && e == 0; b++)
		if (r->copy.cache_batch_idx[b] < 0 || r->copy.cache_batch_idx[b] >= rows)
			e = BAD(r, "cache_batch_idx", "[%d] is %d: the cache has %d rows", b,
				r->copy.cache_batch_idx[b], rows);
	return e;
}

static int compare_words(const void *a, const void *b)
{
	int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;

	return (x > y) - (x < y);
}

static const char *targets_field(const struct reader *r)
{
	if (r->copy.cache_batch_idx)
		return "tensor.cache_batch_idx";
	return r->copy.kv_indptr ? "tensor.kv_page_indices" : "tensor.block_table";
}

static int shared_target(struct reader *r, int32_t word)
{
	const char *field = targets_field(r);

	return fmha_error_set_field(r->err, FMHA_EINVAL, field,
				    "%s: two sequences of an append write to %s %d", field,
				    r->problem->page_size ? "page" : "cache row", word);
}

static int check_unique(struct reader *r, int32_t *words, int64_t n)
{
	qsort(words, (size_t)n, sizeof(*words), compare_words);
	for (int64_t i = 1; i < n; i++)
		if (words[i] == words[i - 1])
			return shared_target(r, words[i]);
	return 0;
}

/* Positions of sequence @b in the pages, or just its row, that an append writes. */
struct targets {
	const int32_t *words;
	int64_t n;
};

static struct targets targets_of(const struct reader *r, int32_t b)
{
	const struct fmha_problem *p = r->problem;
	int64_t before = r->copy.seqlen_k ? r->copy.seqlen_k_before[b]
					  : p->seqlen_k - p->seqlen_new,
		first;
	const int32_t *pages;

	if (r->copy.cache_batch_idx)
		return (struct targets){r->copy.cache_batch_idx + b, 1};
	pages = r->copy.kv_indptr ? r->copy.kv_page_indices + r->copy.kv_indptr[b]
				  : r->copy.block_table + b * r->copy.block_table_stride;
	first = before / p->page_size;
	/* NOLINTNEXTLINE: a paged cache has one of the two */
	return (struct targets){pages + first,
				ceil_div(before + p->seqlen_new, p->page_size) - first};
}

/*
 * Two sequences that append into the same page or cache row would race. Shared prefixes, which no
 * append writes, are fine. More targets than pages or rows means some are shared: nothing larger
 * than the cache is ever sorted.
 */
static int check_append_targets(struct reader *r)
{
	const struct fmha_problem *p = r->problem;
	const struct problem_axis *k = &r->plan->axes.k;
	int64_t n = 0;
	int32_t *words;
	int e;

	if (p->seqlen_new == 0 || (k->storage != STORED_INDEXED && !problem_axis_is_paged(k)))
		return 0;
	for (int32_t b = 0; b < p->batch; b++) {
		n += targets_of(r, b).n;
		if (n > k->outer)
			/* NOLINTNEXTLINE: as in targets_of() */
			return shared_target(r, targets_of(r, b).words[0]);
	}
	words = malloc((size_t)n * sizeof(*words) + 1);
	if (!words)
		return fmha_error_set(r->err, FMHA_ENOMEM, "append: out of memory");
	n = 0;
	for (int32_t b = 0; b < p->batch; b++) {
		struct targets targets = targets_of(r, b);

		/* NOLINTNEXTLINE: as in targets_of() */
		memcpy(words + n, targets.words, (size_t)targets.n * sizeof(*words));
		n += targets.n;
	}
	e = check_unique(r, words, n);
	free(words);
	return e;
}

/* ---- places of new rows ---- */

/* Number (b, i) of slot_mapping or positions, where the host has them. */
static int64_t row_number(const struct reader *r, enum fmha_tensor_role role, int32_t b, int32_t i)
{
	const volatile int64_t *from = r->bindings[role].host;
	const int64_t *stride = r->problem->tensor[role].stride;

	return from[b * stride[0] + i * stride[1]];
}

/* What kernels leave out, or take the nearest of, is refused where it can be seen, before any is written. */
static int check_row_numbers(struct reader *r, enum fmha_tensor_role role, int64_t least,
			     int64_t most, const char *of)
{
	const struct fmha_problem *p = r->problem;
	char field[48];

	if (!plan_present(p, role) || !r->bindings[role].host)
		return 0;
	(void)snprintf(field, sizeof(field), "tensor.%s", proto_roles[role].name);
	for (int32_t b = 0; b < p->batch; b++)
		for (int32_t i = 0; i < p->seqlen_new; i++) {
			int64_t number = row_number(r, role, b, i);

			if (number < least || number > most)
				return fmha_error_set_field(
					r->err, FMHA_EINVAL, field, "%s[%d][%d] is %lld: %s %lld",
					field, b, i, (long long)number, of, (long long)most);
		}
	return 0;
}

/* The page and slot, or position, of new row @i of sequence @b. False: it is left out. */
static bool place_of(const struct reader *r, int32_t b, int32_t i, int64_t *ret_page,
		     int64_t *ret_place)
{
	const struct fmha_problem *p = r->problem;
	int64_t position = r->copy.seqlen_k_before ? r->copy.seqlen_k_before[b]
						   : p->seqlen_k - p->seqlen_new;
	const int32_t *pages;

	*ret_page = 0;
	if (plan_present(p, FMHA_T_SLOT_MAPPING)) {
		position = r->bindings[FMHA_T_SLOT_MAPPING].host
				   ? row_number(r, FMHA_T_SLOT_MAPPING, b, i)
				   : -1;
		if (position < 0 || position >= (int64_t)p->n_pages * p->page_size)
			return false; /* it may have changed since it was looked at */
		*ret_page = position / p->page_size;
		*ret_place = position % p->page_size;
		return true;
	}
	position += i;
	*ret_place = p->descale_per_page ? position % p->page_size : position;
	if (!p->descale_per_page)
		return true;
	pages = r->copy.kv_indptr ? r->copy.kv_page_indices + r->copy.kv_indptr[b]
				  : r->copy.block_table + b * r->copy.block_table_stride;
	*ret_page = pages[position / p->page_size];
	return true;
}

static int check_factor(struct reader *r, enum fmha_tensor_role role, int32_t b, int64_t page,
			int64_t place, int32_t head)
{
	const struct fmha_problem *p = r->problem;
	const volatile float *factors = r->bindings[role].host;
	const int64_t *stride = p->tensor[role].stride;
	int64_t at = (p->descale_per_page ? page : b) * stride[0] + head * stride[1];
	char field[48];
	float factor;

	if (p->descale_block_k)
		at += place / p->descale_block_k * stride[2];
	factor = factors[at];
	if (factor > 0 && isfinite(factor))
		return 0;
	(void)snprintf(field, sizeof(field), "tensor.%s", proto_roles[role].name);
	return fmha_error_set_field(r->err, FMHA_EINVAL, field,
				    "%s: %g is no positive number, and new rows of head %d are "
				    "divided by it",
				    field, (double)factor, head);
}

/* The factors that new rows will be divided by. */
static int check_new_factors(struct reader *r, enum fmha_tensor_role role)
{
	const struct fmha_problem *p = r->problem;
	bool appends = r->plan->append || p->op == FMHA_APPEND_KV;
	int64_t page, place;
	int e = 0;

	if (!appends || !plan_present(p, role) || !r->bindings[role].host || p->descale_computed ||
	    p->k_new.dtype == p->k.dtype)
		return 0;
	for (int32_t b = 0; b < p->batch; b++)
		for (int32_t i = 0; i < p->seqlen_new; i++) {
			if (!place_of(r, b, i, &page, &place))
				continue;
			for (int32_t h = 0; h < p->nhead_k && e == 0; h++)
				e = check_factor(r, role, b, page, place, h);
			if (e < 0)
				return e;
			/* One for all rows of the sequence has been seen. */
			if (!p->descale_per_page && !p->descale_block_k)
				break;
		}
	return 0;
}

static int check_new_rows(struct reader *r)
{
	const struct fmha_problem *p = r->problem;
	int e = check_row_numbers(r, FMHA_T_SLOT_MAPPING, -1,
				  (int64_t)p->n_pages * p->page_size - 1, "-1, or a slot up to");

	if (e == 0)
		e = check_row_numbers(r, FMHA_T_POSITIONS, 0, (int64_t)p->rotary_max_pos - 1,
				      "the rotary tables have positions up to");
	if (e == 0)
		e = check_new_factors(r, FMHA_T_K_DESCALE);
	return e == 0 ? check_new_factors(r, FMHA_T_V_DESCALE) : e;
}

/* Copies and judges the integer tensors. *@ret_indices is NULL when there are none. */
static int read_indices(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
			struct plan_indices **ret_indices, struct fmha_error *err)
{
	struct reader r = {
		.plan = plan, .problem = &plan->problem, .bindings = bindings, .err = err};
	uint64_t words = indices_words(&plan->problem);
	struct plan_indices *indices;
	int e;

	*ret_indices = NULL;
	if (words > SIZE_MAX / 8)
		return fmha_error_set(err, FMHA_ENOMEM, "integer tensors: out of memory");
	indices = words ? malloc(sizeof(*indices) + words * sizeof(int32_t)) : NULL;
	if (words && !indices)
		return fmha_error_set(err, FMHA_ENOMEM, "integer tensors: out of memory");
	if (indices) {
		r.copy = indices_layout(&plan->problem, (uintptr_t)indices->words);
		copy_tables(&r);
	}
	e = check_rows(&r);
	if (e == 0)
		e = check_keys(&r);
	if (e == 0)
		e = check_cache(&r);
	if (e == 0)
		e = check_append_targets(&r);
	if (e == 0)
		e = check_new_rows(&r);
	if (e < 0) {
		free(indices);
		return e;
	}
	*ret_indices = indices;
	if (!indices)
		return 0;
	indices->tables = r.copy;
	indices->dq_acc_bytes = plan_workspace_varies(plan)
					? bwd_workspace_dq_acc(plan, &indices->tables)
					: 0;
	return 0;
}

struct index_tables indices_tables(const struct plan_indices *indices)
{
	return indices ? indices->tables : (struct index_tables){0};
}

bool plan_workspace_varies(const struct plan *plan)
{
	return plan->dq_acc_bytes > 0 && plan_packed_q(plan);
}

uint64_t plan_workspace_bytes(const struct plan *plan, const struct plan_indices *indices)
{
	if (!plan_workspace_varies(plan))
		return plan->workspace_bytes;
	return plan->layout.dq_acc + indices->dq_acc_bytes;
}

const void *plan_indices_data(const struct plan_indices *indices)
{
	return indices->words;
}

/* ---- bind ---- */

/*
 * Plan + buffers -> argument structs for one run. Everything that depends on where the
 * tensors lie is judged here, on every run, because a run may name other buffers than the plan did.
 * Two steps: what the run's integers are, from which follows how large its workspace is; then, in
 * that workspace, the arguments.
 */

static int view_error(struct fmha_error *err, const struct plan_view *view, const char *part,
		      const char *why)
{
	const char *name = proto_roles[view->role].name;
	char field[48];

	(void)snprintf(field, sizeof(field), "tensor.%s%s", name, part);
	return fmha_error_set_field(err, FMHA_EINVAL, field, "tensor.%s: %s", name, why);
}

static int check_ranges(const struct plan *plan, const struct plan_binding *bindings,
			struct fmha_error *err)
{
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		const struct plan_binding *b = &bindings[view->role];

		if (view->span_bytes == 0)
			continue;
		if (!b->device)
			return view_error(err, view, "", "no buffer is bound");
		if (view->span_bytes > b->bytes) {
			char why[96];

			(void)snprintf(why, sizeof(why),
				       "needs %llu bytes, the buffer has %llu from its offset on",
				       (unsigned long long)view->span_bytes,
				       (unsigned long long)b->bytes);
			return view_error(err, view, "", why);
		}
		if ((uintptr_t)b->device % view->alignment != 0) {
			char why[64];

			(void)snprintf(why, sizeof(why), "not at a multiple of %u bytes",
				       view->alignment);
			return view_error(err, view, ".offset", why);
		}
	}
	return 0;
}

/* Written tensors against everything else: see plan.h. */
static int check_aliasing(const struct plan *plan, const struct plan_binding *bindings,
			  const void *workspace, uint64_t workspace_bytes, struct fmha_error *err)
{
	struct plan_view block = {.span_bytes = workspace_bytes,
				  .element_bytes = 1,
				  .n_axes = 1,
				  .axes = {{(int64_t)workspace_bytes, 1}}};

	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *a = &plan->views[i];
		uintptr_t a_at = (uintptr_t)bindings[a->role].device;

		if (workspace && views_overlap(a, a_at, &block, (uintptr_t)workspace))
			return view_error(err, a, "", "overlaps the workspace");
		if (!a->written)
			continue;
		for (uint32_t j = 0; j < plan->n_views; j++) {
			const struct plan_view *b = &plan->views[j];
			char why[96];

			if (j == i || (b->written && j < i)) /* pairs of outputs once */
				continue;
			if (!views_overlap(a, a_at, b, (uintptr_t)bindings[b->role].device))
				continue;
			(void)snprintf(why, sizeof(why), "is written and overlaps tensor.%s",
				       proto_roles[b->role].name);
			return view_error(err, a, "", why);
		}
	}
	return 0;
}

int plan_read(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
	      struct plan_indices **ret_indices, struct fmha_error *err)
{
	int r = check_ranges(plan, bindings, err);

	return r < 0 ? r : read_indices(plan, bindings, ret_indices, err);
}

int plan_place(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
	       const struct plan_indices *indices, const struct plan_memory *memory,
	       union abi_args args[PLAN_MAX_STAGES], struct fmha_error *err)
{
	struct launch_bases bases = {.at = {[LAUNCH_WORKSPACE] = (uintptr_t)memory->workspace}};
	struct index_tables tables = indices_tables(indices);
	uint64_t bytes = plan_workspace_bytes(plan, indices);
	int r;

	if (bytes > 0 && (!memory->workspace || bases.at[LAUNCH_WORKSPACE] % PLAN_ALIGNMENT != 0))
		return fmha_error_set_field(err, FMHA_EINVAL, "tensor.workspace",
					    "workspace: %llu bytes aligned to %d are needed",
					    (unsigned long long)bytes, PLAN_ALIGNMENT);
	r = check_aliasing(plan, bindings, memory->workspace, bytes, err);
	if (r < 0)
		return r;
	if (plan->workspace_head_bytes > 0 && memory->head)
		bwd_workspace_head(plan, &tables, memory->head);
	for (uint32_t i = 0; i < plan->n_views; i++)
		bases.at[plan->views[i].role] = (uintptr_t)bindings[plan->views[i].role].device;
	if (indices)
		bases.at[LAUNCH_INDICES] = (uintptr_t)(memory->indices
							       ? memory->indices
							       : plan_indices_data(indices));
	for (uint32_t i = 0; i < plan->n_stages; i++)
		launch_bind(&plan->stages[i].launch, &bases, &args[i]);
	return 0;
}
