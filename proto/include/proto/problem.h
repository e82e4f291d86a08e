/* SPDX-License-Identifier: MIT */
/* problem.h: what client and daemon both must know of a problem: roles, extents, sizes. */
#ifndef PROTO_PROBLEM_H
#define PROTO_PROBLEM_H

#include <stdbool.h>
#include <stdint.h>

#include <fmha/base.h>

struct proto_role {
	const char *name;
	const char *dims; /* for people */
	int n_dims;
	bool output;
	bool input; /* inout: both */
};

extern const struct proto_role proto_roles[FMHA_N_TENSORS];

/* The words of an enum's values 0, 1, 2, ... on the wire. */
struct proto_words {
	const char *const *names;
	uint32_t n;
};
extern const struct proto_words proto_dtype_words, proto_op_words, proto_mode_words;
extern const struct proto_words proto_mask_words, proto_rope_words, proto_kv_layout_words;

const char *problem_op_name(uint32_t op); /* "forward", ...; "unknown" */

enum problem_field_type {
	PROBLEM_CHOICE,
	PROBLEM_FLAG,
	PROBLEM_SIZE,
	PROBLEM_NUMBER,
	PROBLEM_COUNTER,
	PROBLEM_REAL,
	PROBLEM_ABSENT_REAL,
};

/* A row of FMHA_PROBLEM_FIELDS. */
struct problem_field {
	const char *name;
	enum problem_field_type type;
	size_t offset;       /* in struct fmha_problem */
	int32_t neutral;     /* of a scale, that is none: 0 */
	int64_t least, most; /* of numbers */
	uint32_t ops;        /* 1 << enum fmha_op: those that take it */
	const char *word;    /* NULL: PLACED */
};

enum problem_field_id {
#define PROBLEM_FIELD_ID(type, name, ...) PROBLEM_FIELD_##name,
	FMHA_PROBLEM_FIELDS(PROBLEM_FIELD_ID)
#undef PROBLEM_FIELD_ID
		PROBLEM_N_FIELDS
};

extern const struct problem_field problem_fields[PROBLEM_N_FIELDS];

/* The value of @field; of COUNTER and REAL whether it is not 0. */
int64_t problem_field_value(const struct fmha_problem *problem, const struct problem_field *field);

/* Whether the operation writes @role, which has been checked: a cache when there are new keys. */
bool problem_writes(const struct fmha_problem *problem, enum fmha_tensor_role role);

/* Lengths, prefix sums, page tables: integers that say where other tensors are read. */
static inline bool fmha_role_is_index(uint32_t role)
{
	return role >= FMHA_T_SEQSTART_Q && role <= FMHA_T_LEFTPAD_K;
}

/* Bytes of an element, 0 for a value that is no enum fmha_dtype. */
uint32_t fmha_dtype_bytes(uint32_t dtype);
const char *fmha_dtype_name(uint32_t dtype); /* "f32", "bf16", ...; NULL when unknown */

/* The largest byte that dropout keeps at this rate; 255 at 0. */
uint32_t fmha_dropout_threshold(float dropout_p);

/* Neutral values everywhere: no mask (windows -1), scale NaN (default), all tensors absent. */
void fmha_problem_init(struct fmha_problem *problem);

static inline bool fmha_tensor_present(const struct fmha_tensor *tensor)
{
	return tensor->buffer != 0 || tensor->data;
}

/* How the sequences of a problem lie along an axis, which decides what finds them. */
enum problem_storage {
	STORED_NOT,     /* the problem has no such axis */
	STORED_BATCHED, /* one place of the outermost dimension a sequence */
	STORED_PACKED,  /* behind each other on one axis: seqstart_q, seqstart_k */
	STORED_INDEXED, /* a row of a contiguous cache: cache_batch_idx */
	STORED_TABLE,   /* pages: block_table */
	STORED_LIST,    /* pages: kv_indptr, kv_page_indices, kv_last_page_len */
	STORED_SLOTS, /* pages: slot_mapping says where each new row goes, or indices what is read */
};

struct problem_axis {
	enum problem_storage storage;
	int64_t outer;   /* sequences, cache rows or pages; 1 when packed */
	int64_t length;  /* rows or keys of each; packed: of all */
	int64_t longest; /* of one sequence */
};

/*
 * Where the sequences lie: the one place that this is derived. Extents, the tensors that a mode
 * needs and the kernels' loop bounds all follow from it, so that they cannot differ.
 */
struct problem_axes {
	int64_t sequences;
	struct problem_axis q, k;
};

void problem_axes(const struct fmha_problem *problem, struct problem_axes *ret_axes);

static inline bool problem_axis_is_paged(const struct problem_axis *axis)
{
	return axis->storage == STORED_TABLE || axis->storage == STORED_LIST;
}

/*
 * The extents of @role in @problem, in the order of its dimensions; a broadcast axis counts with
 * its full extent, except in dbias, where it counts 1. Unused dimensions are 1; a workspace, whose
 * size is the plan's, has extent 0. A vectorized cache has the extents of a linear one. Sizes that
 * are negative give nonsense, never undefined behaviour.
 */
void problem_extents(const struct fmha_problem *problem, enum fmha_tensor_role role,
		     int64_t ret_dims[5]);

/*
 * Of a view whose extents are not said, replaces an all-zero stride by the packed strides of the role's
 * dimensions. dbias gets stride 0 on the axes that it is summed over. Not meaningful for k and v in a
 * vectorized cache.
 */
void problem_strides(const struct fmha_problem *problem, enum fmha_tensor_role role,
		     int64_t ret_stride[5]);

/* All three: what a tensor's role, its strides and its type come to. Return: as problem_span_bytes(). */
struct problem_view {
	int64_t extent[5], stride[5];
	uint64_t bytes;
};
int problem_view(const struct fmha_problem *problem, enum fmha_tensor_role role,
		 struct problem_view *ret_view, struct fmha_error *err);

/*
 * Bytes from a view's offset to one past its last element, 0 for a role without elements; every
 * step is checked for overflow. Vectorized caches are packed and counted as such. Return: 0, or
 * FMHA_EINVAL with "tensor.<role>" as the field.
 */
int problem_span_bytes(const struct fmha_problem *problem, enum fmha_tensor_role role,
		       uint64_t *ret_bytes, struct fmha_error *err);

/*
 * Brings the extents that were said into one form, in place: each such tensor has as many dimensions as
 * its role, an axis that broadcasts has extent 1 and stride 0. Before anything else that reads extents
 * or strides; costs next to nothing where none are said. Return: 0, or FMHA_EINVAL naming the tensor,
 * its extents and those wanted.
 */
int problem_settle(struct fmha_problem *problem, struct fmha_error *err);

/*
 * Everything about a problem that can be checked without a device: sizes, options that exclude each
 * other, tensors that are missing, superfluous or of a wrong type, extents, strides, alignment. The
 * problem is settled, or no extents are said. The error names the field, as in "tensor.k.stride" or
 * "hdim_q".
 */
int problem_check(const struct fmha_problem *problem, struct fmha_error *err);

/*
 * The part of problem_check() that depends on buffers and offsets: no output shares a byte with
 * another tensor. For runs that bind other buffers than the plan did.
 */
int problem_check_aliasing(const struct fmha_problem *problem, struct fmha_error *err);

#endif
