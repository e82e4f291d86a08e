/* SPDX-License-Identifier: MIT */
/*
 * indices.c: the integers that decide where kernels read and write: prefix sums, lengths, page
 * tables. They live in client memory, so they are copied first, each word read once, and only the
 * copy is judged and used.
 *
 * The work of a check is bounded by the tensors' sizes, which the buffers bound: integer tensors do
 * not overlap themselves (check_limits() in plan.c), a table that all sequences share is copied and
 * checked once, and lists have a word a sequence at most.
 */
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
	int32_t *next; /* free words of the block */
	/* The copies, writable. */
	int32_t *seqstart_q, *seqstart_k, *seqlen_q, *seqlen_k, *seqlen_k_before, *leftpad_k;
	int32_t *block_table, *kv_indptr, *kv_page_indices, *kv_last_page_len, *cache_batch_idx;
	int64_t table_columns, table_stride; /* of the copy of block_table */
};

int64_t plan_table_columns(const struct fmha_problem *p)
{
	int64_t needed = p->page_size > 0 ? ceil_div(p->seqlen_k, p->page_size) : 0;

	return needed < p->max_blocks ? needed : p->max_blocks;
}

int64_t plan_table_stride(const struct fmha_problem *p)
{
	return p->block_table.stride[0] == 0 ? 0 : plan_table_columns(p);
}

/* Rows of the copy. */
static int64_t table_rows(const struct fmha_problem *p)
{
	return plan_table_stride(p) == 0 && p->batch > 0 ? 1 : p->batch;
}

static uint64_t table_words(const struct fmha_problem *p)
{
	return (uint64_t)table_rows(p) * (uint64_t)plan_table_columns(p);
}

static uint64_t words_needed(const struct fmha_problem *p)
{
	uint64_t batch = (uint64_t)p->batch, n = 0;

	n += plan_present(p, FMHA_T_SEQSTART_Q) ? batch + 1 : 0;
	n += plan_present(p, FMHA_T_SEQSTART_K) ? batch + 1 : 0;
	n += plan_present(p, FMHA_T_SEQLEN_Q) ? batch : 0;
	n += plan_has_lengths_k(p) ? 2 * batch : 0; /* before and after an append */
	n += plan_present(p, FMHA_T_LEFTPAD_K) ? batch : 0;
	n += plan_present(p, FMHA_T_BLOCK_TABLE) ? table_words(p) : 0;
	n += plan_present(p, FMHA_T_KV_INDPTR) ? batch + 1 : 0;
	n += plan_present(p, FMHA_T_KV_PAGE_INDICES) ? (uint64_t)p->n_page_indices : 0;
	n += plan_present(p, FMHA_T_KV_LAST_PAGE_LEN) ? batch : 0;
	n += plan_present(p, FMHA_T_CACHE_BATCH_IDX) ? batch : 0;
	return n;
}

/* Copies @rows x @columns words of @role; the strides are the view's. */
static int32_t *copy_words(struct reader *r, enum fmha_tensor_role role, int64_t rows,
			   int64_t columns, int64_t row_stride, int64_t column_stride)
{
	const volatile int32_t *from = r->bindings[role].host;
	int32_t *to = r->next;

	r->next += rows * columns;
	for (int64_t i = 0; i < rows; i++) {
		const volatile int32_t *row = from + i * row_stride;

		if (column_stride == 1) {
			memcpy(to + i * columns, (const void *)row, (size_t)columns * 4);
			continue;
		}
		for (int64_t j = 0; j < columns; j++)
			to[i * columns + j] = row[j * column_stride];
	}
	return to;
}

static int32_t *copy_list(struct reader *r, enum fmha_tensor_role role, int64_t n)
{
	if (!plan_present(r->problem, role))
		return NULL;
	return copy_words(r, role, 1, n, 0, r->problem->tensor[role].stride[0]);
}

static void copy_tables(struct reader *r)
{
	const struct fmha_problem *p = r->problem;
	const int64_t *stride = p->block_table.stride;
	int64_t batch = p->batch;

	r->seqstart_q = copy_list(r, FMHA_T_SEQSTART_Q, batch + 1);
	r->seqstart_k = copy_list(r, FMHA_T_SEQSTART_K, batch + 1);
	r->seqlen_q = copy_list(r, FMHA_T_SEQLEN_Q, batch);
	r->leftpad_k = copy_list(r, FMHA_T_LEFTPAD_K, batch);
	r->kv_indptr = copy_list(r, FMHA_T_KV_INDPTR, batch + 1);
	r->kv_page_indices = copy_list(r, FMHA_T_KV_PAGE_INDICES, p->n_page_indices);
	r->kv_last_page_len = copy_list(r, FMHA_T_KV_LAST_PAGE_LEN, batch);
	r->cache_batch_idx = copy_list(r, FMHA_T_CACHE_BATCH_IDX, batch);
	r->seqlen_k_before = copy_list(r, FMHA_T_SEQLEN_K, batch);
	if (plan_has_lengths_k(p)) {
		if (!r->seqlen_k_before) {
			r->seqlen_k_before = r->next;
			r->next += batch;
		}
		r->seqlen_k = r->next;
		r->next += batch;
	}
	if (plan_present(p, FMHA_T_BLOCK_TABLE)) {
		r->table_columns = plan_table_columns(p);
		r->table_stride = plan_table_stride(p);
		r->block_table = copy_words(r, FMHA_T_BLOCK_TABLE, table_rows(p), r->table_columns,
					    stride[0], stride[1]);
	}
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

	if (r->seqstart_q) {
		e = check_prefix(r, r->seqstart_q, "seqstart_q", p->total_q);
		if (e < 0)
			return e;
	}
	for (int32_t b = 0; b < p->batch; b++) {
		int32_t physical = r->seqstart_q ? r->seqstart_q[b + 1] - r->seqstart_q[b]
						 : p->seqlen_q;
		int32_t length = r->seqlen_q ? r->seqlen_q[b] : physical;

		if (r->seqlen_q && (length < 0 || length > physical))
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
	int64_t pages = r->kv_indptr[b + 1] - (int64_t)r->kv_indptr[b];

	if (pages == 0) {
		/* (0 - 1) * page_size + page_size is 0 for whoever computes the length again. */
		r->kv_last_page_len[b] = p->page_size;
		*ret_length = 0;
		return 0;
	}
	if (r->kv_last_page_len[b] < 1 || r->kv_last_page_len[b] > p->page_size)
		return BAD(r, "kv_last_page_len", "[%d] is %d: a last page holds 1 to %d keys", b,
			   r->kv_last_page_len[b], p->page_size);
	*ret_length = (pages - 1) * p->page_size + r->kv_last_page_len[b];
	return 0;
}

/* Keys of sequence @b before and after an append, and what its storage can hold. */
static int check_keys_of(struct reader *r, int32_t b)
{
	const struct fmha_problem *p = r->problem;
	int64_t appended = r->plan->append || p->op == FMHA_APPEND_KV ? p->seqlen_new : 0;
	int64_t capacity = p->seqlen_k, before, after;
	int e;

	if (r->seqstart_k)
		capacity = r->seqstart_k[b + 1] - r->seqstart_k[b];
	if (r->block_table && capacity > r->table_columns * p->page_size)
		capacity = r->table_columns * p->page_size;
	if (r->kv_indptr) {
		e = sglang_length(r, b, &capacity);
		if (e < 0)
			return e;
		if (capacity > p->seqlen_k)
			return BAD(r, "kv_indptr", ": sequence %d has %lld keys, seqlen_k says %d",
				   b, (long long)capacity, p->seqlen_k);
		before = capacity - appended;
		if (plan_present(p, FMHA_T_SEQLEN_K))
			before = r->seqlen_k_before[b];
	} else {
		before = plan_present(p, FMHA_T_SEQLEN_K) ? r->seqlen_k_before[b]
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
	if (r->leftpad_k && (r->leftpad_k[b] < 0 || r->leftpad_k[b] > after))
		return BAD(r, "leftpad_k", "[%d] is %d: the sequence has %lld keys", b,
			   r->leftpad_k[b], (long long)after);
	if (r->seqlen_k) {
		r->seqlen_k_before[b] = (int32_t)before;
		r->seqlen_k[b] = (int32_t)after;
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

	if (r->seqstart_k) {
		e = check_prefix(r, r->seqstart_k, "seqstart_k", p->total_k);
		if (e < 0)
			return e;
	}
	if (r->kv_indptr) {
		e = check_prefix(r, r->kv_indptr, "kv_indptr", p->n_page_indices);
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
	int64_t keys = r->seqlen_k ? 0 : p->seqlen_k;

	for (int32_t b = first; r->seqlen_k && b <= last; b++)
		if (r->seqlen_k[b] > keys)
			keys = r->seqlen_k[b];
	return ceil_div(keys, p->page_size);
}

static int check_table(struct reader *r)
{
	int32_t batch = r->problem->batch;
	bool shared = r->table_stride == 0;
	int e = 0;

	if (!r->block_table || batch == 0)
		return 0;
	for (int32_t b = 0; b < (shared ? 1 : batch) && e == 0; b++)
		e = check_pages(r, r->block_table + b * r->table_stride,
				pages_used(r, b, shared ? batch - 1 : b), r->table_columns,
				"tensor.block_table");
	return e;
}

static int check_cache(struct reader *r)
{
	const struct fmha_problem *p = r->problem;
	int32_t rows = p->cache_batch ? p->cache_batch : p->batch;
	int e = check_table(r);

	if (e == 0 && r->kv_page_indices && p->batch > 0) {
		int64_t first = r->kv_indptr[0], end = r->kv_indptr[p->batch];

		memset(r->kv_page_indices, 0, (size_t)first * sizeof(int32_t));
		e = check_pages(r, r->kv_page_indices + first, end - first,
				p->n_page_indices - first, "tensor.kv_page_indices");
	}
	for (int32_t b = 0; r->cache_batch_idx && b < p->batch && e == 0; b++)
		if (r->cache_batch_idx[b] < 0 || r->cache_batch_idx[b] >= rows)
			e = BAD(r, "cache_batch_idx", "[%d] is %d: the cache has %d rows", b,
				r->cache_batch_idx[b], rows);
	return e;
}

static int compare_words(const void *a, const void *b)
{
	int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;

	return (x > y) - (x < y);
}

static const char *targets_field(const struct reader *r)
{
	if (r->cache_batch_idx)
		return "tensor.cache_batch_idx";
	return r->kv_indptr ? "tensor.kv_page_indices" : "tensor.block_table";
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
	int64_t before = r->seqlen_k ? r->seqlen_k_before[b] : p->seqlen_k - p->seqlen_new, first;
	const int32_t *pages;

	if (r->cache_batch_idx)
		return (struct targets){r->cache_batch_idx + b, 1};
	pages = r->kv_indptr ? r->kv_page_indices + r->kv_indptr[b]
			     : r->block_table + b * r->table_stride;
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

int indices_read(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
		 struct plan_indices **ret_indices, struct fmha_error *err)
{
	struct reader r = {
		.plan = plan, .problem = &plan->problem, .bindings = bindings, .err = err};
	uint64_t words = words_needed(&plan->problem);
	struct plan_indices *indices;
	int e;

	*ret_indices = NULL;
	if (words > SIZE_MAX / 8)
		return fmha_error_set(err, FMHA_ENOMEM, "integer tensors: out of memory");
	indices = words ? malloc(sizeof(*indices) + words * sizeof(int32_t)) : NULL;
	if (words && !indices)
		return fmha_error_set(err, FMHA_ENOMEM, "integer tensors: out of memory");
	if (indices) {
		r.next = indices->words;
		copy_tables(&r);
	}
	e = check_rows(&r);
	if (e == 0)
		e = check_keys(&r);
	if (e == 0)
		e = check_cache(&r);
	if (e == 0)
		e = check_append_targets(&r);
	if (e < 0) {
		free(indices);
		return e;
	}
	*ret_indices = indices;
	if (!indices)
		return 0;
	indices->tables = (struct index_tables){
		.seqstart_q = r.seqstart_q,
		.seqstart_k = r.seqstart_k,
		.seqlen_q = r.seqlen_q,
		.seqlen_k = r.seqlen_k,
		.seqlen_k_before = r.seqlen_k_before,
		.leftpad_k = r.leftpad_k,
		.block_table = r.block_table,
		.block_table_stride = r.table_stride,
		.table_columns = r.table_columns,
		.kv_indptr = r.kv_indptr,
		.kv_page_indices = r.kv_page_indices,
		.kv_last_page_len = r.kv_last_page_len,
		.cache_batch_idx = r.cache_batch_idx,
	};
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

uint64_t plan_indices_bytes(const struct plan *plan)
{
	return words_needed(&plan->problem) * sizeof(int32_t);
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

uint64_t plan_index_entries(const struct plan *plan)
{
	return words_needed(&plan->problem) + append_entries(plan) +
	       (plan->workspace_head_bytes > 0 ? (uint64_t)plan->problem.batch : 0);
}

const void *plan_indices_data(const struct plan_indices *indices)
{
	return indices->words;
}

/* Every field of an argument struct that may point into the copies. */
static size_t index_fields(union plan_args *args, enum abi_family family,
			   const abi_i32 **ret_fields[10])
{
	struct abi_sequences *sequences = NULL;
	struct abi_kv_cache *cache = NULL;
	size_t n = 0;

	switch (family) {
	case ABI_FWD_SPLITKV_COMBINE:
		sequences = &args->combine.sequences;
		break;
	case ABI_FWD_APPENDKV:
		sequences = &args->appendkv.sequences;
		cache = &args->appendkv.cache;
		break;
	case ABI_BWD_DOT_DO_O:
	case ABI_BWD_DQ_DK_DV:
	case ABI_BWD_CONVERT_DQ:
		sequences = &args->bwd.sequences;
		break;
	default:
		sequences = &args->fwd.sequences;
		cache = &args->fwd.cache;
		break;
	}
	ret_fields[n++] = &sequences->seqstart_q;
	ret_fields[n++] = &sequences->seqstart_k;
	ret_fields[n++] = &sequences->seqlen_q;
	ret_fields[n++] = &sequences->seqlen_k;
	ret_fields[n++] = &sequences->leftpad_k;
	if (cache) {
		ret_fields[n++] = &cache->block_table;
		ret_fields[n++] = &cache->kv_indptr;
		ret_fields[n++] = &cache->kv_page_indices;
		ret_fields[n++] = &cache->kv_last_page_len;
		ret_fields[n++] = &cache->cache_batch_idx;
	}
	return n;
}

void plan_indices_move(const struct plan *plan, const struct plan_indices *indices,
		       const void *device, union plan_args args[PLAN_MAX_STAGES])
{
	uintptr_t from = (uintptr_t)indices->words, bytes = plan_indices_bytes(plan);

	for (uint32_t i = 0; i < plan->n_stages; i++) {
		const abi_i32 **fields[10];
		size_t n = index_fields(&args[i], plan->stages[i].family, fields);

		for (size_t k = 0; k < n; k++) {
			uintptr_t offset = (uintptr_t)*fields[k] - from;

			if (*fields[k] && offset < bytes)
				*fields[k] = (const abi_i32 *)((uintptr_t)device + offset);
		}
	}
}
