/* SPDX-License-Identifier: MIT */
#include "tensor_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shapes.h"

#define OP(op) (1u << FMHA_##op)

/* X(ID, option, role, the operations in which it names a file to read, and to write, help) */
#define FILES(X)                                                                                   \
	X(Q, "q", FMHA_T_Q, OP(FORWARD) | OP(BACKWARD) | OP(APPEND_KV), 0, "Q")                    \
	X(K, "k", FMHA_T_K, OP(FORWARD) | OP(BACKWARD) | OP(APPEND_KV), 0, "K, or its cache")      \
	X(V, "v", FMHA_T_V, OP(FORWARD) | OP(BACKWARD) | OP(APPEND_KV), 0, "V, or its cache")      \
	X(O, "o", FMHA_T_O, OP(BACKWARD), 0, "backward: the forward pass's result")                \
	X(DO, "do", FMHA_T_DO, OP(BACKWARD), 0, "backward: O's gradient")                          \
	X(LSE, "lse", FMHA_T_LSE, OP(BACKWARD), OP(FORWARD),                                       \
	  "forward: write the log of the sum of exponentials; backward: read it")                  \
	X(DLSE, "dlse", FMHA_T_DLSE, OP(BACKWARD), 0, "backward: LSE's gradient, if it has one")   \
	X(BIAS, "bias", FMHA_T_BIAS, OP(FORWARD) | OP(BACKWARD), 0, "added to the scores")         \
	X(ALIBI, "alibi", FMHA_T_ALIBI_SLOPES, OP(FORWARD) | OP(BACKWARD), 0,                      \
	  "slopes of a bias that grows with the distance")                                         \
	X(SINK, "sink", FMHA_T_SINK, OP(FORWARD) | OP(BACKWARD), 0,                                \
	  "a logit a head that takes a share of each row")                                         \
	X(MASK_INTERVALS, "mask-intervals", FMHA_T_MASK_INTERVALS, OP(FORWARD) | OP(BACKWARD), 0,  \
	  "endpoints of the intervals of keys that each row sees: int32, [heads, n, rows]")        \
	X(MASK_BITS, "mask-bits", FMHA_T_MASK_BITS, OP(FORWARD) | OP(BACKWARD), 0,                 \
	  "a bit for each key that a row sees: uint8, [heads, rows, keys / 8]")                    \
	X(SEQSTART_Q, "seqstart-q", FMHA_T_SEQSTART_Q, OP(FORWARD) | OP(BACKWARD), 0,              \
	  "prefix sums of packed sequences, rows of Q")                                            \
	X(SEQSTART_K, "seqstart-k", FMHA_T_SEQSTART_K, OP(FORWARD) | OP(BACKWARD), 0,              \
	  "prefix sums of packed sequences, keys")                                                 \
	X(SEQLEN_Q, "seqlen-q", FMHA_T_SEQLEN_Q, OP(FORWARD) | OP(BACKWARD), 0,                    \
	  "rows of Q of each sequence")                                                            \
	X(SEQLEN_K, "seqlen-k", FMHA_T_SEQLEN_K, OP(FORWARD) | OP(BACKWARD) | OP(APPEND_KV), 0,    \
	  "keys of each sequence")                                                                 \
	X(BLOCK_TABLE, "block-table", FMHA_T_BLOCK_TABLE, OP(FORWARD) | OP(APPEND_KV), 0,          \
	  "a paged cache: pages of each sequence")                                                 \
	X(KV_INDPTR, "kv-indptr", FMHA_T_KV_INDPTR, OP(FORWARD) | OP(APPEND_KV), 0,                \
	  "a paged cache: where the next one's pages of each sequence begin")                      \
	X(KV_PAGE_INDICES, "kv-page-indices", FMHA_T_KV_PAGE_INDICES, OP(FORWARD) | OP(APPEND_KV), \
	  0, "a paged cache: pages")                                                               \
	X(KV_LAST_PAGE_LEN, "kv-last-page-len", FMHA_T_KV_LAST_PAGE_LEN,                           \
	  OP(FORWARD) | OP(APPEND_KV), 0, "a paged cache: keys in the last page of each sequence") \
	X(CACHE_BATCH_IDX, "cache-batch-idx", FMHA_T_CACHE_BATCH_IDX, OP(FORWARD) | OP(APPEND_KV), \
	  0, "which sequence of the cache each one is")                                            \
	X(LEFTPAD_K, "leftpad-k", FMHA_T_LEFTPAD_K, OP(FORWARD), 0,                                \
	  "keys of each sequence that are padding")                                                \
	X(Q_DESCALE, "q-descale", FMHA_T_Q_DESCALE, OP(FORWARD), 0, "fp8: factor of Q")            \
	X(K_DESCALE, "k-descale", FMHA_T_K_DESCALE, OP(FORWARD), 0, "fp8: factor of K")            \
	X(V_DESCALE, "v-descale", FMHA_T_V_DESCALE, OP(FORWARD), 0, "fp8: factor of V")            \
	X(K_NEW, "k-new", FMHA_T_K_NEW, OP(APPEND_KV), 0, "keys to append")                        \
	X(V_NEW, "v-new", FMHA_T_V_NEW, OP(APPEND_KV), 0, "values to append")                      \
	X(COS, "cos", FMHA_T_ROTARY_COS, OP(APPEND_KV), 0, "rotary embedding: cosines")            \
	X(SIN, "sin", FMHA_T_ROTARY_SIN, OP(APPEND_KV), 0, "rotary embedding: sines")              \
	X(OUT, "out", FMHA_T_O, 0, OP(FORWARD), "write O")                                         \
	X(RANDVAL, "randval", FMHA_T_RANDVAL, 0, OP(FORWARD), "write the dropout's random bytes")  \
	X(DQ, "dq", FMHA_T_DQ, 0, OP(BACKWARD), "write Q's gradient")                              \
	X(DK, "dk", FMHA_T_DK, 0, OP(BACKWARD), "write K's gradient")                              \
	X(DV, "dv", FMHA_T_DV, 0, OP(BACKWARD), "write V's gradient")                              \
	X(DBIAS, "dbias", FMHA_T_DBIAS, 0, OP(BACKWARD), "write the bias's gradient")              \
	X(DSINK, "dsink", FMHA_T_DSINK, 0, OP(BACKWARD), "write the sinks' gradient")              \
	X(K_OUT, "k-out", FMHA_T_K, 0, OP(APPEND_KV), "write the cache of K")                      \
	X(V_OUT, "v-out", FMHA_T_V, 0, OP(APPEND_KV), "write the cache of V")                      \
	X(Q_ROTATED, "q-rotated", FMHA_T_Q_ROTATED, 0, OP(APPEND_KV),                              \
	  "write Q with its rotary embedding")

static const struct {
	const char *name;
	uint32_t role, reads, writes;
} table[] = {
#define FILE_ROLE(ID, name, role, reads, writes, help) {name, role, reads, writes},
	FILES(FILE_ROLE)
#undef FILE_ROLE
};

#define N_TABLE (sizeof(table) / sizeof(table[0]))

enum {
	FILE_BEFORE = FILES_OPTION_BASE - 1,
#define FILE_ID(ID, name, role, reads, writes, help) FILE_##ID,
	FILES(FILE_ID)
#undef FILE_ID
};

const struct cli_option files_options[] = {
#define FILE_OPTION(ID, name, role, reads, writes, help) {name, FILE_##ID, "FILE", help, CLI_OWN},
	FILES(FILE_OPTION)
#undef FILE_OPTION
		CLI_END};

/* A pointer that says "there is one" before the buffer exists. */
static uint8_t marker[1];

const char *files_option_name(int option)
{
	size_t i = (size_t)(option - FILES_OPTION_BASE);

	return option >= FILES_OPTION_BASE && i < N_TABLE ? table[i].name : NULL;
}

int files_option(struct files *files, int option, const char *value)
{
	size_t i = (size_t)(option - FILES_OPTION_BASE);

	if (option < FILES_OPTION_BASE || i >= N_TABLE)
		return CTL_USAGE;
	if (table[i].reads & (1u << files->op))
		files->in[table[i].role] = value;
	else if (table[i].writes & (1u << files->op))
		files->out[table[i].role] = value;
	else
		return ctl_usage_error("--%s: not for this operation", table[i].name);
	return 0;
}

/* ---- reading ---- */

static uint32_t dtype_of(const struct files *files, uint32_t role, enum npy_type type)
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
	case NPY_I1:
		return FMHA_I8;
	case NPY_U1:
		break;
	}
	if (role == FMHA_T_MASK_BITS)
		return FMHA_U8;
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
	case FMHA_I8:
		return NPY_I1;
	default:
		return NPY_U1;
	}
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
	tensor->dtype = dtype_of(files, role, files->npy[role].type);
	r = shapes_match(files, p, role, stride);
	if (r != 0 || shapes_vectorized(p, role)) /* packed by definition */
		return r;
	if (shapes_heads_first(files, p, role))
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
	int n = shapes_expected(files, p, role, dims);

	tensor->data = marker;
	tensor->dtype = dtype;
	memset(tensor->stride, 0, sizeof(tensor->stride));
	for (int i = n - 1; i >= 0; i--) {
		tensor->stride[i] = step;
		step *= dims[i];
	}
	if (shapes_heads_first(files, p, role))
		swap_heads(tensor->stride);
}

static void set_outputs(const struct files *files, struct fmha_problem *p)
{
	uint32_t type = p->op == FMHA_FORWARD ? p->q.dtype : p->k.dtype;
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
	r = shapes_infer(files, problem);
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

bool files_given(const struct files *files)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (files->in[role])
			return true;
	}
	return false;
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

			npy.n_dims = shapes_expected(files, problem, role, dims);
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
