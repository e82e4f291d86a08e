/* SPDX-License-Identifier: MIT */
#include "files.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/problem.h>

#define OP(op)      (1u << FMHA_##op)
#define SHAPE_BYTES 192 /* NPY_MAX_DIMS numbers and what parts them */

/* One option: in which operations it names a file to read, and in which one to write. */
static const struct {
	const char *name;
	uint32_t role, reads, writes;
} table[] = {
	{"q", FMHA_T_Q, OP(FORWARD) | OP(BACKWARD) | OP(APPEND_KV), 0},
	{"k", FMHA_T_K, OP(FORWARD) | OP(BACKWARD) | OP(APPEND_KV), 0},
	{"v", FMHA_T_V, OP(FORWARD) | OP(BACKWARD) | OP(APPEND_KV), 0},
	{"o", FMHA_T_O, OP(BACKWARD), 0},
	{"do", FMHA_T_DO, OP(BACKWARD), 0},
	{"lse", FMHA_T_LSE, OP(BACKWARD), OP(FORWARD)},
	{"bias", FMHA_T_BIAS, OP(FORWARD) | OP(BACKWARD), 0},
	{"alibi", FMHA_T_ALIBI_SLOPES, OP(FORWARD) | OP(BACKWARD), 0},
	{"sink", FMHA_T_SINK, OP(FORWARD) | OP(BACKWARD), 0},
	{"seqstart-q", FMHA_T_SEQSTART_Q, OP(FORWARD) | OP(BACKWARD), 0},
	{"seqstart-k", FMHA_T_SEQSTART_K, OP(FORWARD) | OP(BACKWARD), 0},
	{"seqlen-q", FMHA_T_SEQLEN_Q, OP(FORWARD) | OP(BACKWARD), 0},
	{"seqlen-k", FMHA_T_SEQLEN_K, OP(FORWARD) | OP(BACKWARD) | OP(APPEND_KV), 0},
	{"block-table", FMHA_T_BLOCK_TABLE, OP(FORWARD) | OP(APPEND_KV), 0},
	{"kv-indptr", FMHA_T_KV_INDPTR, OP(FORWARD) | OP(APPEND_KV), 0},
	{"kv-page-indices", FMHA_T_KV_PAGE_INDICES, OP(FORWARD) | OP(APPEND_KV), 0},
	{"kv-last-page-len", FMHA_T_KV_LAST_PAGE_LEN, OP(FORWARD) | OP(APPEND_KV), 0},
	{"cache-batch-idx", FMHA_T_CACHE_BATCH_IDX, OP(FORWARD) | OP(APPEND_KV), 0},
	{"leftpad-k", FMHA_T_LEFTPAD_K, OP(FORWARD), 0},
	{"q-descale", FMHA_T_Q_DESCALE, OP(FORWARD), 0},
	{"k-descale", FMHA_T_K_DESCALE, OP(FORWARD), 0},
	{"v-descale", FMHA_T_V_DESCALE, OP(FORWARD), 0},
	{"k-new", FMHA_T_K_NEW, OP(APPEND_KV), 0},
	{"v-new", FMHA_T_V_NEW, OP(APPEND_KV), 0},
	{"cos", FMHA_T_ROTARY_COS, OP(APPEND_KV), 0},
	{"sin", FMHA_T_ROTARY_SIN, OP(APPEND_KV), 0},
	{"out", FMHA_T_O, 0, OP(FORWARD)},
	{"randval", FMHA_T_RANDVAL, 0, OP(FORWARD)},
	{"dq", FMHA_T_DQ, 0, OP(BACKWARD)},
	{"dk", FMHA_T_DK, 0, OP(BACKWARD)},
	{"dv", FMHA_T_DV, 0, OP(BACKWARD)},
	{"dbias", FMHA_T_DBIAS, 0, OP(BACKWARD)},
	{"dsink", FMHA_T_DSINK, 0, OP(BACKWARD)},
	{"k-out", FMHA_T_K, 0, OP(APPEND_KV)},
	{"v-out", FMHA_T_V, 0, OP(APPEND_KV)},
	{"q-rotated", FMHA_T_Q_ROTATED, 0, OP(APPEND_KV)},
};

#define N_TABLE (sizeof(table) / sizeof(table[0]))

/* A pointer that says "there is one" before the buffer exists. */
static uint8_t marker[1];

size_t files_options(uint32_t op, struct option *options, size_t capacity)
{
	size_t n = 0;

	for (size_t i = 0; i < N_TABLE && n + 1 < capacity; i++) {
		if (((table[i].reads | table[i].writes) & (1u << op)) == 0)
			continue;
		options[n++] = (struct option){table[i].name, required_argument, NULL,
					       FILES_OPTION_BASE + (int)i};
	}
	memset(&options[n], 0, sizeof(options[n]));
	return n;
}

int files_option(struct files *files, int option, const char *value)
{
	size_t i = (size_t)(option - FILES_OPTION_BASE);

	if (option < FILES_OPTION_BASE || i >= N_TABLE)
		return CTL_USAGE;
	if (table[i].reads & (1u << files->op))
		files->in[table[i].role] = value;
	else
		files->out[table[i].role] = value;
	return 0;
}

/* ---- reading ---- */

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
static bool is_heads_first(const struct files *files, const struct fmha_problem *p, uint32_t role)
{
	if (!files->heads_first || !is_bshd(role))
		return false;
	return files->in[role] ? files->npy[role].n_dims == 4 : p->mode == FMHA_BATCH;
}

static bool is_vectorized(const struct fmha_problem *p, uint32_t role)
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

static uint32_t dtype_of(const struct files *files, enum npy_type type)
{
	switch (type) {
	case NPY_F4:
		return FMHA_F32;
	case NPY_F2:
		return FMHA_F16;
	case NPY_U2:
		return FMHA_BF16;
	case NPY_I4:
		return FMHA_I32;
	case NPY_U1:
		break;
	}
	return files->fp8_is_e5m2 ? FMHA_E5M2 : FMHA_E4M3;
}

static enum npy_type npy_type_of(uint32_t dtype)
{
	switch (dtype) {
	case FMHA_F32:
		return NPY_F4;
	case FMHA_F16:
		return NPY_F2;
	case FMHA_BF16:
		return NPY_U2;
	case FMHA_I32:
		return NPY_I4;
	default:
		return NPY_U1;
	}
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

/* Sizes, from the files' shapes. */
static int infer(const struct files *files, struct fmha_problem *p)
{
	const struct npy *cosines = &files->npy[FMHA_T_ROTARY_COS];
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
static int expected_dims(const struct files *files, const struct fmha_problem *p, uint32_t role,
			 int64_t dims[5])
{
	if (is_vectorized(p, role)) {
		vectorized_dims(files, p, role, dims);
		return 5;
	}
	problem_extents(p, role, dims);
	if (is_heads_first(files, p, role))
		swap(&dims[1], &dims[2]);
	return proto_roles[role].n_dims;
}

/* Leading 1s may be left out, and an extent of 1 broadcasts a bias or slopes. */
static bool fits(uint32_t role, const struct npy *npy, const int64_t *dims, int n, int i)
{
	bool may_broadcast = role == FMHA_T_BIAS || role == FMHA_T_ALIBI_SLOPES;
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

	if (is_heads_first(files, p, role) && (i == 1 || i == 2))
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
	const char *source = is_vectorized(p, role) ? NULL : size_source(files, p, &d);
	char shape[SHAPE_BYTES], what[2 * SHAPE_BYTES + 256];
	int used = snprintf(what, sizeof(what), "it should be %s", shape_text(dims, n, shape));

	if (source && source != files->in[role])
		(void)snprintf(what + used, sizeof(what) - (size_t)used,
			       ": %.*s is %" PRId64 " by %.200s", d.length, d.name, d.size, source);
	return complain(files, role, what);
}

/* Strides of a packed tensor of these dims; an extent of 1 where more are expected broadcasts. */
static int match_shape(const struct files *files, const struct fmha_problem *p, uint32_t role,
		       int64_t stride[5])
{
	const struct npy *npy = &files->npy[role];
	int64_t dims[5], step = 1;
	int n = expected_dims(files, p, role, dims), shift = n - npy->n_dims;

	memset(stride, 0, 5 * sizeof(*stride));
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

static int set_input(const struct files *files, struct fmha_problem *p, uint32_t role)
{
	struct fmha_tensor *tensor = &p->tensor[role];
	int64_t stride[5];
	int r;

	tensor->data = marker;
	tensor->dtype = dtype_of(files, files->npy[role].type);
	r = match_shape(files, p, role, stride);
	if (r != 0 || is_vectorized(p, role)) /* packed by definition */
		return r;
	if (is_heads_first(files, p, role))
		swap(&stride[1], &stride[2]);
	memcpy(tensor->stride, stride, sizeof(stride));
	return 0;
}

/* Packed, in the order that the inputs have. */
static void set_output(const struct files *files, struct fmha_problem *p, uint32_t role,
		       uint32_t dtype)
{
	struct fmha_tensor *tensor = &p->tensor[role];
	int64_t dims[5], step = 1;
	int n = expected_dims(files, p, role, dims);

	tensor->data = marker;
	tensor->dtype = dtype;
	memset(tensor->stride, 0, sizeof(tensor->stride));
	for (int i = n - 1; i >= 0; i--) {
		tensor->stride[i] = step;
		step *= dims[i];
	}
	if (is_heads_first(files, p, role))
		swap(&tensor->stride[1], &tensor->stride[2]);
}

static void set_outputs(const struct files *files, struct fmha_problem *p)
{
	uint32_t type = p->k.dtype;
	bool fp8 = type == FMHA_E4M3 || type == FMHA_E5M2;

	if (p->op == FMHA_FORWARD) {
		set_output(files, p, FMHA_T_O, fp8 ? FMHA_F32 : type);
		if (files->out[FMHA_T_LSE])
			set_output(files, p, FMHA_T_LSE, FMHA_F32);
		if (files->out[FMHA_T_RANDVAL])
			set_output(files, p, FMHA_T_RANDVAL, FMHA_U8);
	} else if (p->op == FMHA_BACKWARD) {
		/* O and LSE that are not given are computed first. */
		if (!files->in[FMHA_T_O])
			set_output(files, p, FMHA_T_O, type);
		if (!files->in[FMHA_T_LSE])
			set_output(files, p, FMHA_T_LSE, FMHA_F32);
		set_output(files, p, FMHA_T_DQ, type);
		set_output(files, p, FMHA_T_DK, type);
		set_output(files, p, FMHA_T_DV, type);
		if (files->out[FMHA_T_DBIAS])
			set_output(files, p, FMHA_T_DBIAS, p->bias.dtype);
		if (files->out[FMHA_T_DSINK])
			set_output(files, p, FMHA_T_DSINK, FMHA_F32);
	} else if (files->in[FMHA_T_Q] && files->in[FMHA_T_ROTARY_COS]) {
		set_output(files, p, FMHA_T_Q_ROTATED, type);
	}
}

static int check_needed(const struct files *files)
{
	static const struct {
		uint32_t op, role;
		const char *option;
	} needed[] = {
		{FMHA_FORWARD, FMHA_T_Q, "--q"},
		{FMHA_FORWARD, FMHA_T_K, "--k"},
		{FMHA_FORWARD, FMHA_T_V, "--v"},
		{FMHA_BACKWARD, FMHA_T_Q, "--q"},
		{FMHA_BACKWARD, FMHA_T_K, "--k"},
		{FMHA_BACKWARD, FMHA_T_V, "--v"},
		{FMHA_BACKWARD, FMHA_T_DO, "--do"},
		{FMHA_APPEND_KV, FMHA_T_K, "--k"},
		{FMHA_APPEND_KV, FMHA_T_V, "--v"},
		{FMHA_APPEND_KV, FMHA_T_K_NEW, "--k-new"},
		{FMHA_APPEND_KV, FMHA_T_V_NEW, "--v-new"},
	};

	for (size_t i = 0; i < sizeof(needed) / sizeof(needed[0]); i++) {
		if (needed[i].op == files->op && !files->in[needed[i].role])
			return ctl_usage_error("run: %s FILE is missing", needed[i].option);
	}
	return 0;
}

int files_load(struct files *files, struct fmha_problem *problem)
{
	struct fmha_error err = {0};
	int r = check_needed(files);

	if (r != 0)
		return r;
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (files->in[role] && npy_read(files->in[role], &files->npy[role], &err) < 0) {
			(void)fprintf(stderr, "fmhactl: %s\n", err.msg);
			return CTL_IO;
		}
	}
	problem->op = files->op;
	r = infer(files, problem);
	if (r != 0)
		return r;
	/* Extents depend on which tensors there are. */
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (files->in[role])
			problem->tensor[role].data = marker;
	}
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (!files->in[role])
			continue;
		r = set_input(files, problem, role);
		if (r != 0)
			return r;
	}
	set_outputs(files, problem);
	return 0;
}

void files_fill(const struct files *files, const struct tensors *tensors)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (files->npy[role].data)
			memcpy(tensors_data(tensors, role), files->npy[role].data,
			       files->npy[role].bytes);
	}
}

void files_point(const struct files *files, struct fmha_problem *problem)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (files->npy[role].data)
			problem->tensor[role].data = files->npy[role].data;
	}
}

bool files_keep(const struct files *files)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (files->out[role])
			return true;
	}
	return false;
}

int files_store(const struct files *files, const struct fmha_problem *problem,
		const struct tensors *tensors)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_error err = {0};
		struct npy npy = {0};

		if (!files->out[role] || !tensors->present[role])
			continue;
		npy.type = npy_type_of(problem->tensor[role].dtype);
		if (files->npy[role].data) { /* a cache: as it came */
			npy = files->npy[role];
		} else {
			int64_t dims[5];

			npy.n_dims = expected_dims(files, problem, role, dims);
			npy.bytes = npy_type_bytes(npy.type);
			for (int i = 0; i < npy.n_dims; i++) {
				npy.dims[i] = dims[i];
				npy.bytes *= (size_t)dims[i];
			}
			if (problem->mode == FMHA_GROUP && npy.n_dims == 4 && npy.dims[0] == 1) {
				memmove(&npy.dims[0], &npy.dims[1], 3 * sizeof(npy.dims[0]));
				npy.n_dims = 3; /* packed tensors have no batch */
			}
		}
		npy.data = tensors_data(tensors, role);
		if (npy_write(files->out[role], &npy, &err) < 0) {
			(void)fprintf(stderr, "fmhactl: %s\n", err.msg);
			return CTL_IO;
		}
	}
	return 0;
}

void files_deinit(struct files *files)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++)
		npy_deinit(&files->npy[role]);
}
