/* SPDX-License-Identifier: MIT */
#include "shapes.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <proto/problem.h>

#define SHAPE_BYTES 192 /* NPY_MAX_DIMS numbers and what parts them */

static bool is_bshd(uint32_t role)
{
	switch (role) {
	case FMHA_T_Q:
	case FMHA_T_K:
	case FMHA_T_V:
	case FMHA_T_O:
	case FMHA_T_DO:
	case FMHA_T_DQ:
	case FMHA_T_DK:
	case FMHA_T_DV:
	case FMHA_T_K_NEW:
	case FMHA_T_V_NEW:
	case FMHA_T_Q_ROTATED:
		return true;
	default:
		return false;
	}
}

/* Four dimensions in the order of --layout bhsd; packed rows and vectorized pages have no such
 * order. */
bool shapes_heads_first(const struct files *files, const struct fmha_problem *p, uint32_t role)
{
	if (!files->heads_first || !is_bshd(role))
		return false;
	return files->in[role] ? files->npy[role].n_dims == 4 : p->mode == FMHA_BATCH;
}

bool shapes_vectorized(const struct fmha_problem *p, uint32_t role)
{
	return (role == FMHA_T_K || role == FMHA_T_V) && p->kv_layout == FMHA_KV_VECTORIZED;
}

static bool is_paged(const struct files *files)
{
	return files->in[FMHA_T_BLOCK_TABLE] || files->in[FMHA_T_KV_INDPTR];
}

static void swap(int64_t *a, int64_t *b)
{
	int64_t first = *a;

	*a = *b;
	*b = first;
}

/* As NumPy prints a shape: "(2, 8, 64)", "(4,)". */
static const char *shape_text(const int64_t *dims, int n, char text[SHAPE_BYTES])
{
	int used = snprintf(text, SHAPE_BYTES, "(");

	for (int i = 0; i < n; i++)
		used += snprintf(text + used, SHAPE_BYTES - (size_t)used, "%s%" PRId64,
				 i ? ", " : "", dims[i]);
	(void)snprintf(text + used, SHAPE_BYTES - (size_t)used, n == 1 ? ",)" : ")");
	return text;
}

/* What is wrong with a file's shape, as one line. */
static int complain(const struct files *files, uint32_t role, const char *what)
{
	const struct npy *npy = &files->npy[role];
	char shape[SHAPE_BYTES];

	(void)fprintf(stderr, "fmhactl: %s: the shape is %s, %s\n", files->in[role],
		      shape_text(npy->dims, npy->n_dims, shape), what);
	return CTL_IO;
}

/* Batch, sequence, heads, head dimension of a file; batch 1 for three dimensions (packed). */
static int four_dims(const struct files *files, uint32_t role, int32_t ret[4])
{
	const struct npy *npy = &files->npy[role];
	int64_t dims[4] = {1};
	int shift = 4 - npy->n_dims;

	if (npy->n_dims != 3 && npy->n_dims != 4)
		return complain(files, role,
				"but it needs 4 dimensions, or 3 when packed: [batch, seqlen, "
				"heads, hdim] or [rows, heads, hdim]");
	for (int i = 0; i < npy->n_dims; i++)
		dims[shift + i] = npy->dims[i];
	if (files->heads_first && shift == 0)
		swap(&dims[1], &dims[2]);
	for (int i = 0; i < 4; i++) {
		if (dims[i] > INT32_MAX)
			return complain(files, role, "where a dimension exceeds 2^31 - 1");
		ret[i] = (int32_t)dims[i];
	}
	return 0;
}

static const int32_t *indices(const struct files *files, uint32_t role, int64_t *ret_n)
{
	const struct npy *npy = &files->npy[role];

	*ret_n = npy->n_dims == 1 ? npy->dims[0] : 0;
	return npy->data && npy->type == NPY_I4 && npy->n_dims == 1 ? npy->data : NULL;
}

/* The longest sequence of prefix sums, at most @total: when they are none the daemon says what is
 * wrong with the tensor, and not with a length that follows from it. */
static int32_t longest(const int32_t *starts, int64_t n, int32_t total)
{
	int32_t most = 0;

	for (int64_t i = 0; i + 1 < n; i++) {
		if (starts[i] >= 0 && starts[i + 1] > starts[i] && starts[i + 1] - starts[i] > most)
			most = starts[i + 1] - starts[i];
	}
	return most < total ? most : total;
}

static int32_t greatest(const int32_t *values, int64_t n)
{
	int32_t most = 0;

	for (int64_t i = 0; i < n; i++)
		most = values[i] > most ? values[i] : most;
	return most;
}

static int32_t saturated(int64_t value)
{
	return value < INT32_MAX ? (int32_t)value : INT32_MAX;
}

/* Keys of the longest sequence of a paged cache. */
static int32_t paged_keys(const struct files *files, const struct fmha_problem *p)
{
	int64_t n, n_last;
	const int32_t *lengths = indices(files, FMHA_T_SEQLEN_K, &n);
	const int32_t *starts, *last;
	int64_t most = 0;

	if (lengths)
		return saturated((int64_t)greatest(lengths, n) + p->seqlen_new);
	if (files->in[FMHA_T_BLOCK_TABLE])
		return saturated((int64_t)p->max_blocks * p->page_size);
	starts = indices(files, FMHA_T_KV_INDPTR, &n);
	last = indices(files, FMHA_T_KV_LAST_PAGE_LEN, &n_last);
	for (int64_t b = 0; starts && last && b + 1 < n && b < n_last; b++) {
		int64_t keys = ((int64_t)starts[b + 1] - starts[b] - 1) * p->page_size + last[b];

		most = keys > most ? keys : most;
	}
	return saturated(most);
}

static int infer_vectorized(const struct files *files, struct fmha_problem *p)
{
	const struct npy *k = &files->npy[FMHA_T_K], *v = &files->npy[FMHA_T_V];

	for (uint32_t role = FMHA_T_K; role <= FMHA_T_V; role++) {
		if (files->npy[role].n_dims != 5)
			return complain(
				files, role,
				"but a vectorized cache has 5 dimensions: K [pages, heads, hdim / "
				"x, page_size, x], V [pages, heads, page_size / x, hdim, x]");
	}
	p->n_pages = saturated(k->dims[0]);
	p->nhead_k = saturated(k->dims[1]);
	p->hdim_q = saturated(saturated(k->dims[2]) * k->dims[4]);
	p->page_size = saturated(k->dims[3]);
	p->hdim_v = saturated(v->dims[3]);
	return 0;
}

static int infer_linear(const struct files *files, struct fmha_problem *p)
{
	int32_t k[4], v[4];
	int r = four_dims(files, FMHA_T_K, k);

	if (r == 0)
		r = four_dims(files, FMHA_T_V, v);
	if (r != 0)
		return r;
	p->nhead_k = k[2];
	p->hdim_q = k[3];
	p->hdim_v = v[3];
	if (is_paged(files)) {
		p->n_pages = k[0];
		p->page_size = k[1];
	} else if (p->mode == FMHA_GROUP && !files->in[FMHA_T_CACHE_BATCH_IDX]) {
		p->total_k = k[1];
	} else {
		p->seqlen_k = k[1];
		if (files->in[FMHA_T_CACHE_BATCH_IDX])
			p->cache_batch = k[0];
		else
			p->batch = k[0];
	}
	return 0;
}

static void infer_pages(const struct files *files, struct fmha_problem *p)
{
	const struct npy *blocks = &files->npy[FMHA_T_BLOCK_TABLE];
	const struct npy *pages = &files->npy[FMHA_T_KV_PAGE_INDICES];

	if (blocks->n_dims == 2) {
		p->batch = saturated(blocks->dims[0]);
		p->max_blocks = saturated(blocks->dims[1]);
	}
	if (pages->n_dims == 1)
		p->n_page_indices = saturated(pages->dims[0]);
	p->seqlen_k = paged_keys(files, p);
}

/* @asked: --page-size, or 0. The pages themselves say how large they are. */
static int check_page_size(const struct files *files, const struct fmha_problem *p, int32_t asked)
{
	if (asked == 0)
		return 0;
	if (!is_paged(files))
		return ctl_usage_error("run: --page-size %d needs --block-table or --kv-indptr",
				       asked);
	if (asked != p->page_size)
		return ctl_usage_error("run: --page-size %d, but %s has pages of %d keys", asked,
				       files->in[FMHA_T_K], p->page_size);
	return 0;
}

static int infer_keys(const struct files *files, struct fmha_problem *p)
{
	int32_t asked = p->page_size;
	int r = p->kv_layout == FMHA_KV_VECTORIZED ? infer_vectorized(files, p)
						   : infer_linear(files, p);

	if (r == 0)
		r = check_page_size(files, p, asked);
	if (r == 0 && is_paged(files))
		infer_pages(files, p);
	return r;
}

/* K and V that agree outvote Q, which is then what does not fit. */
static bool keys_have_the_batch(const struct files *files, const struct fmha_problem *p)
{
	const struct npy *k = &files->npy[FMHA_T_K], *v = &files->npy[FMHA_T_V];

	return p->mode == FMHA_BATCH && !is_paged(files) && !files->in[FMHA_T_CACHE_BATCH_IDX] &&
	       k->n_dims == 4 && v->n_dims == 4 && k->dims[0] == v->dims[0];
}

static int infer_rows(const struct files *files, struct fmha_problem *p)
{
	int32_t q[4];
	int r = four_dims(files, FMHA_T_Q, q);

	if (r != 0)
		return r;
	p->nhead_q = q[2];
	p->hdim_q = q[3];
	if (p->mode == FMHA_GROUP) {
		p->total_q = q[1];
		return 0;
	}
	p->seqlen_q = q[1];
	if (!keys_have_the_batch(files, p))
		p->batch = q[0];
	return 0;
}

static void infer_groups(const struct files *files, struct fmha_problem *p)
{
	int64_t n;
	const int32_t *starts = indices(files, FMHA_T_SEQSTART_Q, &n);

	if (starts) {
		p->batch = n > 0 ? saturated(n - 1) : 0;
		p->seqlen_q = longest(starts, n, p->total_q);
	}
	starts = indices(files, FMHA_T_SEQSTART_K, &n);
	if (starts)
		p->seqlen_k = longest(starts, n, p->total_k);
}

int shapes_infer(const struct files *files, struct fmha_problem *p)
{
	const struct npy *cosines = &files->npy[FMHA_T_ROTARY_COS];
	const struct npy *intervals = &files->npy[FMHA_T_MASK_INTERVALS];
	int32_t dims[4];
	int r = 0;

	p->mode = files->in[FMHA_T_SEQSTART_Q] ? FMHA_GROUP : FMHA_BATCH;
	if (files->in[FMHA_T_K_NEW]) {
		r = four_dims(files, FMHA_T_K_NEW, dims);
		if (r != 0)
			return r;
		p->seqlen_new = dims[1];
	}
	r = infer_keys(files, p);
	if (r == 0 && files->in[FMHA_T_Q])
		r = infer_rows(files, p);
	if (r != 0)
		return r;
	infer_groups(files, p);
	if (files->in[FMHA_T_MASK_INTERVALS] && intervals->n_dims >= 2)
		p->mask_endpoints = saturated(intervals->dims[intervals->n_dims - 2]);
	if (cosines->n_dims == 2) {
		p->rotary_max_pos = saturated(cosines->dims[0]);
		p->rotary_dim = saturated(2 * (int64_t)saturated(cosines->dims[1]));
	}
	return 0;
}

/* A vectorized page: fmha_kv_layout in <fmha/base.h>. */
static void vectorized_dims(const struct files *files, const struct fmha_problem *p, uint32_t role,
			    int64_t dims[5])
{
	int64_t x = 16 / npy_type_bytes(files->npy[role].type);

	dims[0] = p->n_pages;
	dims[1] = p->nhead_k;
	dims[2] = (role == FMHA_T_K ? p->hdim_q : p->page_size) / x;
	dims[3] = role == FMHA_T_K ? p->page_size : p->hdim_v;
	dims[4] = x;
}

/* The role's extents in the order that its file must have them. Return: how many. */
int shapes_expected(const struct files *files, const struct fmha_problem *p, uint32_t role,
		    int64_t dims[5])
{
	if (shapes_vectorized(p, role)) {
		vectorized_dims(files, p, role, dims);
		return 5;
	}
	problem_extents(p, role, dims);
	if (shapes_heads_first(files, p, role))
		swap(&dims[1], &dims[2]);
	return proto_roles[role].n_dims;
}

/* Leading 1s may be left out, and an extent of 1 broadcasts a bias or slopes. */
static bool fits(uint32_t role, const struct npy *npy, const int64_t *dims, int n, int i)
{
	bool is_mask = role == FMHA_T_MASK_INTERVALS || role == FMHA_T_MASK_BITS;
	bool may_broadcast = role == FMHA_T_BIAS || role == FMHA_T_ALIBI_SLOPES ||
			     (is_mask && i < (role == FMHA_T_MASK_BITS ? 3 : 2));
	int shift = n - npy->n_dims;
	int64_t have = i < shift ? 1 : npy->dims[i - shift];

	return have == dims[i] || (have == 1 && may_broadcast);
}

/* One dimension of a role, as FMHA_TENSORS names it. */
struct dimension {
	const char *name;
	int length; /* of the name */
	int64_t size;
};

static struct dimension dimension(const struct files *files, const struct fmha_problem *p,
				  uint32_t role, const int64_t *dims, int i)
{
	struct dimension d = {.name = proto_roles[role].dims, .size = dims[i]};
	bool is_cache = role == FMHA_T_K || role == FMHA_T_V;

	if (shapes_heads_first(files, p, role) && (i == 1 || i == 2))
		i = 3 - i;
	if (is_cache && is_paged(files) && i < 2)
		d.name = i == 0 ? "n_pages" : "page_size";
	for (; i > 0 && strchr(d.name, ','); i--)
		d.name = strchr(d.name, ',') + 2;
	d.length = (int)strcspn(d.name, ",;");
	return d;
}

static bool is_called(const struct dimension *d, const char *name)
{
	return (size_t)d->length == strlen(name) && !strncmp(d->name, name, strlen(name));
}

/* The file that says how many sequences there are. */
static const char *batch_source(const struct files *files, const struct fmha_problem *p)
{
	if (p->mode == FMHA_GROUP)
		return files->in[FMHA_T_SEQSTART_Q];
	if (files->in[FMHA_T_Q] && !keys_have_the_batch(files, p))
		return files->in[FMHA_T_Q];
	return is_paged(files) ? files->in[FMHA_T_BLOCK_TABLE] : files->in[FMHA_T_K];
}

/* The file that says how large a dimension is, or NULL. */
static const char *size_source(const struct files *files, const struct fmha_problem *p,
			       const struct dimension *d)
{
	static const struct {
		const char *name;
		uint32_t role;
	} sources[] = {
		{"seqlen_q", FMHA_T_Q},       {"nhead_q", FMHA_T_Q}, {"hdim_q", FMHA_T_Q},
		{"seqlen_k", FMHA_T_K},       {"nhead_k", FMHA_T_K}, {"hdim_q", FMHA_T_K},
		{"hdim_v", FMHA_T_V},         {"n_pages", FMHA_T_K}, {"page_size", FMHA_T_K},
		{"seqlen_new", FMHA_T_K_NEW},
	};

	/* Where sequences are packed, that axis is 1. */
	if ((is_called(d, "batch") && d->size == p->batch) || is_called(d, "batch + 1"))
		return batch_source(files, p);
	for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); i++) {
		if (is_called(d, sources[i].name) && files->in[sources[i].role])
			return files->in[sources[i].role];
	}
	return NULL;
}

/* Says which shape @role should have, and which other file wants dimension @wrong to be that. */
static int complain_of_shape(const struct files *files, const struct fmha_problem *p, uint32_t role,
			     const int64_t *dims, int n, int wrong)
{
	const struct dimension d = dimension(files, p, role, dims, wrong);
	const char *source = shapes_vectorized(p, role) ? NULL : size_source(files, p, &d);
	char shape[SHAPE_BYTES], what[2 * SHAPE_BYTES + 256];
	int used = snprintf(what, sizeof(what), "it should be %s", shape_text(dims, n, shape));

	if (source && source != files->in[role])
		(void)snprintf(what + used, sizeof(what) - (size_t)used,
			       ": %.*s is %" PRId64 " by %.200s", d.length, d.name, d.size, source);
	return complain(files, role, what);
}

/* [heads, endpoints, rows of all sequences], as others have it. */
static bool rows_of_all(const struct npy *npy, const struct fmha_problem *p)
{
	return p->mode == FMHA_BATCH && p->batch > 1 && npy->n_dims == 3 &&
	       (npy->dims[0] == 1 || npy->dims[0] == p->nhead_q) &&
	       npy->dims[1] == p->mask_endpoints && npy->dims[2] == (int64_t)p->batch * p->seqlen_q;
}

/* Strides of a packed tensor of these dims; an extent of 1 where more are expected broadcasts. */
int shapes_match(const struct files *files, const struct fmha_problem *p, uint32_t role,
		 int64_t stride[5])
{
	const struct npy *npy = &files->npy[role];
	int64_t dims[5], step = 1;
	int n = shapes_expected(files, p, role, dims), shift = n - npy->n_dims;

	memset(stride, 0, 5 * sizeof(*stride));
	if (role == FMHA_T_MASK_INTERVALS && rows_of_all(npy, p)) {
		stride[3] = 1;
		stride[0] = p->seqlen_q;
		stride[2] = p->batch * stride[0];
		stride[1] = npy->dims[0] == 1 ? 0 : stride[2] * p->mask_endpoints;
		return 0;
	}
	if (shift < 0)
		return complain_of_shape(files, p, role, dims, n, 0);
	for (int i = n - 1; i >= 0; i--) {
		int64_t have = i < shift ? 1 : npy->dims[i - shift];

		if (!fits(role, npy, dims, n, i))
			return complain_of_shape(files, p, role, dims, n, i);
		stride[i] = have == 1 && dims[i] != 1 ? 0 : step;
		step *= have;
	}
	return 0;
}
