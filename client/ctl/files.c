/* SPDX-License-Identifier: MIT */
#include "files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/problem.h>

#define OP(op) (1u << FMHA_##op)

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

/* What is wrong with a file's tensor, as one line. */
static int complain(const char *path, const char *what)
{
	(void)fprintf(stderr, "fmhactl: %s: %s\n", path, what);
	return CTL_IO;
}

/* Batch, sequence, heads, head dimension of a file; batch 1 for three dimensions (packed). */
static int four_dims(const struct files *files, uint32_t role, int32_t ret[4])
{
	const struct npy *npy = &files->npy[role];
	int64_t dims[4] = {1};
	int shift = 4 - npy->n_dims;

	if (npy->n_dims != 3 && npy->n_dims != 4)
		return complain(files->in[role], "needs 4 dimensions, or 3 when packed");
	for (int i = 0; i < npy->n_dims; i++)
		dims[shift + i] = npy->dims[i];
	if (files->heads_first && shift == 0) {
		int64_t heads = dims[1];

		dims[1] = dims[2];
		dims[2] = heads;
	}
	for (int i = 0; i < 4; i++) {
		if (dims[i] > INT32_MAX)
			return complain(files->in[role], "a dimension exceeds 2^31 - 1");
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

/* The longest sequence of prefix sums; 0 for what are none: the daemon says what is wrong. */
static int32_t longest(const int32_t *starts, int64_t n)
{
	int32_t most = 0;

	for (int64_t i = 0; i + 1 < n; i++) {
		if (starts[i] >= 0 && starts[i + 1] > starts[i] && starts[i + 1] - starts[i] > most)
			most = starts[i + 1] - starts[i];
	}
	return most;
}

static int32_t greatest(const int32_t *values, int64_t n)
{
	int32_t most = 0;

	for (int64_t i = 0; i < n; i++)
		most = values[i] > most ? values[i] : most;
	return most;
}

/* Keys of the longest sequence of a paged cache. */
static int32_t paged_keys(const struct files *files, const struct fmha_problem *p)
{
	int64_t n, n_last;
	const int32_t *lengths = indices(files, FMHA_T_SEQLEN_K, &n);
	const int32_t *starts, *last;
	int64_t most = 0;

	if (lengths)
		return greatest(lengths, n) + p->seqlen_new;
	if (files->in[FMHA_T_BLOCK_TABLE])
		return p->max_blocks < INT32_MAX / 1024 ? p->max_blocks * p->page_size : INT32_MAX;
	starts = indices(files, FMHA_T_KV_INDPTR, &n);
	last = indices(files, FMHA_T_KV_LAST_PAGE_LEN, &n_last);
	for (int64_t b = 0; starts && last && b + 1 < n && b < n_last; b++) {
		int64_t keys = ((int64_t)starts[b + 1] - starts[b] - 1) * p->page_size + last[b];

		most = keys > most ? keys : most;
	}
	return most < INT32_MAX ? (int32_t)most : INT32_MAX;
}

static int infer_vectorized(const struct files *files, struct fmha_problem *p)
{
	const struct npy *k = &files->npy[FMHA_T_K], *v = &files->npy[FMHA_T_V];

	if (k->n_dims != 5 || v->n_dims != 5)
		return complain(files->in[FMHA_T_K],
				"a vectorized cache has 5 dimensions: K [pages, heads, hdim / x, "
				"page_size, x], V [pages, heads, page_size / x, hdim, x]");
	p->n_pages = (int32_t)k->dims[0];
	p->nhead_k = (int32_t)k->dims[1];
	p->hdim_q = (int32_t)(k->dims[2] * k->dims[4]);
	p->page_size = (int32_t)k->dims[3];
	p->hdim_v = (int32_t)v->dims[3];
	return 0;
}

static int infer_keys(const struct files *files, struct fmha_problem *p)
{
	bool paged = files->in[FMHA_T_BLOCK_TABLE] || files->in[FMHA_T_KV_INDPTR];
	int32_t k[4], v[4];
	int r;

	if (p->kv_layout == FMHA_KV_VECTORIZED) {
		r = infer_vectorized(files, p);
	} else {
		r = four_dims(files, FMHA_T_K, k);
		if (r == 0)
			r = four_dims(files, FMHA_T_V, v);
		if (r != 0)
			return r;
		p->nhead_k = k[2];
		p->hdim_q = k[3];
		p->hdim_v = v[3];
		if (paged) {
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
	}
	if (r == 0 && paged) {
		if (files->npy[FMHA_T_BLOCK_TABLE].n_dims == 2) {
			p->batch = (int32_t)files->npy[FMHA_T_BLOCK_TABLE].dims[0];
			p->max_blocks = (int32_t)files->npy[FMHA_T_BLOCK_TABLE].dims[1];
		}
		if (files->npy[FMHA_T_KV_PAGE_INDICES].n_dims == 1)
			p->n_page_indices = (int32_t)files->npy[FMHA_T_KV_PAGE_INDICES].dims[0];
		p->seqlen_k = paged_keys(files, p);
	}
	return r;
}

/* Sizes, from the files' shapes. */
static int infer(const struct files *files, struct fmha_problem *p)
{
	const int32_t *starts;
	int32_t dims[4] = {0};
	int64_t n;
	int r = 0;

	p->mode = files->in[FMHA_T_SEQSTART_Q] ? FMHA_GROUP : FMHA_BATCH;
	if (files->in[FMHA_T_K_NEW]) {
		r = four_dims(files, FMHA_T_K_NEW, dims);
		p->seqlen_new = dims[1];
	}
	if (r == 0)
		r = infer_keys(files, p);
	if (r == 0 && files->in[FMHA_T_Q]) {
		r = four_dims(files, FMHA_T_Q, dims);
		p->nhead_q = dims[2];
		p->hdim_q = dims[3];
		if (p->mode == FMHA_GROUP) {
			p->total_q = dims[1];
		} else {
			p->seqlen_q = dims[1];
			p->batch = dims[0];
		}
	}
	if (r != 0)
		return r;
	starts = indices(files, FMHA_T_SEQSTART_Q, &n);
	if (starts) {
		p->batch = n > 0 ? (int32_t)(n - 1) : 0;
		p->seqlen_q = longest(starts, n);
	}
	starts = indices(files, FMHA_T_SEQSTART_K, &n);
	if (starts)
		p->seqlen_k = longest(starts, n);
	if (files->npy[FMHA_T_ROTARY_COS].n_dims == 2) {
		p->rotary_max_pos = (int32_t)files->npy[FMHA_T_ROTARY_COS].dims[0];
		p->rotary_dim = (int32_t)(2 * files->npy[FMHA_T_ROTARY_COS].dims[1]);
	}
	return 0;
}

/* The role's extents as the file must have them, heads first if asked; leading 1s may be left out.
 */
static int expected_dims(const struct files *files, const struct fmha_problem *p, uint32_t role,
			 int64_t dims[5])
{
	int n = proto_roles[role].n_dims;

	problem_extents(p, role, dims);
	if (files->heads_first && is_bshd(role) && dims[0] >= 0 && p->mode == FMHA_BATCH &&
	    !(p->page_size > 0 && (role == FMHA_T_K || role == FMHA_T_V))) {
		int64_t seq = dims[1];

		dims[1] = dims[2];
		dims[2] = seq;
	}
	return n;
}

/* Strides of a packed tensor of these dims; an extent of 1 where more are expected broadcasts. */
static int match_shape(const struct files *files, const struct fmha_problem *p, uint32_t role,
		       int64_t stride[5])
{
	const struct npy *npy = &files->npy[role];
	bool may_broadcast = role == FMHA_T_BIAS || role == FMHA_T_ALIBI_SLOPES;
	int64_t dims[5], step = 1;
	int n = expected_dims(files, p, role, dims), shift = n - npy->n_dims;
	char text[160];
	int used;

	memset(stride, 0, 5 * sizeof(*stride));
	for (int i = n - 1; shift >= 0 && i >= 0; i--) {
		int64_t have = i < shift ? 1 : npy->dims[i - shift];

		if (have != dims[i] && !(have == 1 && (may_broadcast || i < shift) &&
					 (may_broadcast || dims[i] == 1))) {
			shift = -1;
			break;
		}
		stride[i] = have == 1 && dims[i] != 1 ? 0 : step;
		step *= have;
	}
	if (shift >= 0)
		return 0;
	used = snprintf(text, sizeof(text), "the shape should be (");
	for (int i = 0; i < n; i++)
		used += snprintf(text + used, sizeof(text) - (size_t)used, "%lld%s",
				 (long long)dims[i], i + 1 < n ? ", " : ",)");
	return complain(files->in[role], text);
}

static void swap_heads(int64_t stride[5])
{
	int64_t second = stride[1];

	stride[1] = stride[2];
	stride[2] = second;
}

static int set_input(const struct files *files, struct fmha_problem *p, uint32_t role)
{
	struct fmha_tensor *tensor = &p->tensor[role];
	int64_t stride[5];
	int r;

	tensor->data = marker;
	tensor->dtype = dtype_of(files, files->npy[role].type);
	if ((role == FMHA_T_K || role == FMHA_T_V) && p->kv_layout == FMHA_KV_VECTORIZED)
		return 0; /* packed by definition */
	r = match_shape(files, p, role, stride);
	if (r != 0)
		return r;
	if (files->heads_first && is_bshd(role) && p->mode == FMHA_BATCH)
		swap_heads(stride);
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
	if (files->heads_first && is_bshd(role) && p->mode == FMHA_BATCH)
		swap_heads(tensor->stride);
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
