/* SPDX-License-Identifier: MIT */
/*
 * problem_tensors.c: the tensors of a problem. A table says which operation takes which role; the
 * rest is one small function a rule.
 */
#include <proto/problem.h>

#include <stdio.h>

#include <proto/error.h>

#include "problem_internal.h"

static int refuse(struct fmha_error *err, enum fmha_tensor_role role, const char *part,
		  const char *rule)
{
	char field[sizeof(err->field)];

	(void)snprintf(field, sizeof(field), "tensor.%s%s", proto_roles[role].name, part);
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s: %s", field, rule);
}

static bool has(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	return fmha_tensor_present(&p->tensor[role]);
}

/* ---- which tensors ---- */

/* Operations that need a role, and those that take it. What depends on options is in
 * check_conditions(). */
static const struct usage {
	uint32_t needed, taken;
} usage[FMHA_N_TENSORS] = {
	[FMHA_T_Q] = {OPS_ATTENTION, OPS_ATTENTION | OP_APPEND},
	[FMHA_T_K] = {OPS_ATTENTION | OP_APPEND, OPS_ATTENTION | OP_APPEND},
	[FMHA_T_V] = {OP_BACKWARD, OPS_ATTENTION | OP_APPEND}, /* else: but for v_in_k */
	[FMHA_T_O] = {OPS_ATTENTION | OP_MERGE, OPS_ATTENTION | OP_MERGE},
	[FMHA_T_LSE] = {OP_BACKWARD, OPS_ATTENTION | OP_MERGE},
	[FMHA_T_BIAS] = {0, OPS_ATTENTION},
	[FMHA_T_ALIBI_SLOPES] = {0, OPS_ATTENTION},
	[FMHA_T_SINK] = {0, OPS_ATTENTION | OP_MERGE},
	[FMHA_T_RANDVAL] = {0, OPS_ATTENTION},
	[FMHA_T_SEQSTART_Q] = {0, OPS_ALL},
	[FMHA_T_SEQSTART_K] = {0, OPS_ATTENTION},
	[FMHA_T_SEQLEN_Q] = {0, OPS_ALL},
	[FMHA_T_SEQLEN_K] = {0, OPS_ATTENTION | OP_APPEND},
	[FMHA_T_BLOCK_TABLE] = {0, OP_FORWARD | OP_APPEND},
	[FMHA_T_KV_INDPTR] = {0, OP_FORWARD | OP_APPEND},
	[FMHA_T_KV_PAGE_INDICES] = {0, OP_FORWARD | OP_APPEND},
	[FMHA_T_KV_LAST_PAGE_LEN] = {0, OP_FORWARD | OP_APPEND},
	[FMHA_T_CACHE_BATCH_IDX] = {0, OP_FORWARD | OP_APPEND},
	[FMHA_T_LEFTPAD_K] = {0, OP_FORWARD},
	[FMHA_T_Q_DESCALE] = {0, OP_FORWARD},
	[FMHA_T_K_DESCALE] = {0, OP_FORWARD | OP_APPEND},
	[FMHA_T_V_DESCALE] = {0, OP_FORWARD | OP_APPEND},
	[FMHA_T_K_NEW] = {OP_APPEND, OP_FORWARD | OP_APPEND},
	[FMHA_T_V_NEW] = {0, OP_FORWARD | OP_APPEND},
	[FMHA_T_ROTARY_COS] = {0, OP_FORWARD | OP_APPEND},
	[FMHA_T_ROTARY_SIN] = {0, OP_FORWARD | OP_APPEND},
	[FMHA_T_Q_ROTATED] = {0, OP_APPEND},
	[FMHA_T_DO] = {OP_BACKWARD, OP_BACKWARD},
	[FMHA_T_DQ] = {OP_BACKWARD, OP_BACKWARD},
	[FMHA_T_DK] = {OP_BACKWARD, OP_BACKWARD},
	[FMHA_T_DV] = {OP_BACKWARD, OP_BACKWARD},
	[FMHA_T_DBIAS] = {0, OP_BACKWARD},
	[FMHA_T_DSINK] = {0, OP_BACKWARD},
	[FMHA_T_DLSE] = {0, OP_BACKWARD},
	[FMHA_T_O_PARTS] = {OP_MERGE, OP_MERGE},
	[FMHA_T_LSE_PARTS] = {OP_MERGE, OP_MERGE},
	[FMHA_T_WORKSPACE] = {0, OPS_ALL},
	[FMHA_T_MASK_INTERVALS] = {0, OPS_ATTENTION},
	[FMHA_T_MASK_BITS] = {0, OPS_ATTENTION},
	[FMHA_T_SLOT_MAPPING] = {0, OP_APPEND},
	[FMHA_T_POSITIONS] = {0, OP_APPEND},
	[FMHA_T_INDICES] = {0, OP_FORWARD},
};

static int check_usage(const struct fmha_problem *p, struct fmha_error *err)
{
	char rule[64];

	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		const char *said = NULL;

		if (has(p, role) && !(usage[role].taken & OP_BIT(p->op)))
			said = "takes none";
		else if (!has(p, role) && usage[role].needed & OP_BIT(p->op))
			said = "needs it";
		if (!said)
			continue;
		(void)snprintf(rule, sizeof(rule), "%s %s", problem_op_name(p->op), said);
		return refuse(err, role, "", rule);
	}
	return 0;
}

struct condition {
	enum fmha_tensor_role role;
	bool wrong;
	const char *rule;
};

static int first_wrong(const struct condition *conditions, size_t n, struct fmha_error *err)
{
	for (size_t i = 0; i < n; i++)
		if (conditions[i].wrong)
			return refuse(err, conditions[i].role, "", conditions[i].rule);
	return 0;
}

/* By slots, nothing else says where rows go or how long sequences are. */
static int check_slots(const struct fmha_problem *p, struct fmha_error *err)
{
	static const enum fmha_tensor_role others[] = {
		FMHA_T_SEQSTART_Q,       FMHA_T_SEQLEN_Q,       FMHA_T_SEQLEN_K,
		FMHA_T_BLOCK_TABLE,      FMHA_T_KV_INDPTR,      FMHA_T_KV_PAGE_INDICES,
		FMHA_T_KV_LAST_PAGE_LEN, FMHA_T_CACHE_BATCH_IDX};
	bool slots = has(p, FMHA_T_SLOT_MAPPING), turns = p->rope != FMHA_ROPE_NONE;
	const struct condition conditions[] = {
		{FMHA_T_SLOT_MAPPING, slots && p->page_size == 0, "needs page_size"},
		{FMHA_T_SLOT_MAPPING, slots && p->mode == FMHA_GROUP, "needs batch mode"},
		{FMHA_T_POSITIONS, has(p, FMHA_T_POSITIONS) && !(slots && turns),
		 slots ? "needs rope" : "needs slot_mapping"},
		{FMHA_T_POSITIONS, slots && turns && !has(p, FMHA_T_POSITIONS),
		 "rope by slots needs it"},
	};

	for (size_t i = 0; slots && i < sizeof(others) / sizeof(others[0]); i++)
		if (has(p, others[i]))
			return refuse(err, others[i], "", "slot_mapping says where rows go");
	return first_wrong(conditions, sizeof(conditions) / sizeof(conditions[0]), err);
}

/*
 * What finds the sequences: each kind of storage has its tensors, needed by it and by nothing else.
 * No operation is exempt: a kernel that misses one takes the sequences for another kind.
 */
static int check_sequence_tensors(const struct fmha_problem *p, struct fmha_error *err)
{
	struct problem_axes axes;
	bool table = has(p, FMHA_T_BLOCK_TABLE), indptr = has(p, FMHA_T_KV_INDPTR);
	bool indices = has(p, FMHA_T_KV_PAGE_INDICES), last = has(p, FMHA_T_KV_LAST_PAGE_LEN);
	bool group = p->mode == FMHA_GROUP, rows, packed_q, packed_k, paged, chosen;

	problem_axes(p, &axes);
	rows = axes.q.storage != STORED_NOT;
	packed_q = axes.q.storage == STORED_PACKED;
	packed_k = axes.k.storage == STORED_PACKED;
	paged = problem_axis_is_paged(&axes.k);
	chosen = axes.k.storage == STORED_SLOTS && p->topk > 0;
	const struct condition conditions[] = {
		{FMHA_T_SEQSTART_Q, packed_q && !has(p, FMHA_T_SEQSTART_Q), "group mode needs it"},
		{FMHA_T_SEQSTART_Q, !packed_q && has(p, FMHA_T_SEQSTART_Q),
		 group ? "needs q" : "batch mode takes none"},
		{FMHA_T_SEQLEN_Q, !rows && has(p, FMHA_T_SEQLEN_Q), "needs q"},
		{FMHA_T_SEQSTART_K, packed_k && !has(p, FMHA_T_SEQSTART_K), "group mode needs it"},
		{FMHA_T_SEQSTART_K, !packed_k && has(p, FMHA_T_SEQSTART_K),
		 group ? "a paged or indexed cache takes none" : "batch mode takes none"},
		{FMHA_T_BLOCK_TABLE, table && !paged, "needs page_size"},
		{FMHA_T_KV_INDPTR, indptr && !paged, "needs page_size"},
		{FMHA_T_KV_PAGE_INDICES, indices && !paged, "needs page_size"},
		{FMHA_T_KV_LAST_PAGE_LEN, last && !paged, "needs page_size"},
		{FMHA_T_BLOCK_TABLE, paged && !table && !indptr,
		 "a paged cache needs it, or kv_indptr"},
		{FMHA_T_KV_INDPTR, table && indptr, "block_table is given as well"},
		{FMHA_T_KV_PAGE_INDICES, indices != indptr && (paged || chosen),
		 indptr ? "kv_indptr needs it" : "needs kv_indptr"},
		{FMHA_T_KV_LAST_PAGE_LEN, last != indptr && (paged || chosen),
		 indptr ? "kv_indptr needs it" : "needs kv_indptr"},
		{FMHA_T_CACHE_BATCH_IDX, p->page_size > 0 && has(p, FMHA_T_CACHE_BATCH_IDX),
		 "a paged cache has no rows"},
		{FMHA_T_SEQLEN_K, chosen && has(p, FMHA_T_SEQLEN_K), "indices are slots"},
	};

	return first_wrong(conditions, sizeof(conditions) / sizeof(conditions[0]), err);
}

/* Values of their own, or none. */
static int check_values(const struct fmha_problem *p, struct fmha_error *err)
{
	static const enum fmha_tensor_role own[] = {FMHA_T_V, FMHA_T_V_NEW, FMHA_T_V_DESCALE};
	bool appends = p->seqlen_new > 0, attends = p->op == FMHA_FORWARD;
	const struct condition conditions[] = {
		{FMHA_T_V, (attends || p->op == FMHA_APPEND_KV) && !has(p, FMHA_T_V),
		 attends ? "forward needs it" : "append_kv needs it"},
		{FMHA_T_V_NEW, appends && !has(p, FMHA_T_V_NEW), "seqlen_new needs it"},
		{FMHA_T_V_DESCALE, p->descale_computed && !has(p, FMHA_T_V_DESCALE),
		 "descale_computed needs it"},
	};

	if (!p->v_in_k)
		return first_wrong(conditions, sizeof(conditions) / sizeof(conditions[0]), err);
	for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
		if (has(p, own[i]))
			return refuse(err, own[i], "", "v_in_k: the values are in k");
	return 0;
}

/* What names the keys of a row, and what has no meaning beside it. */
static int check_chosen(const struct fmha_problem *p, struct fmha_error *err)
{
	static const enum fmha_tensor_role others[] = {FMHA_T_BIAS, FMHA_T_ALIBI_SLOPES,
						       FMHA_T_LEFTPAD_K, FMHA_T_MASK_INTERVALS,
						       FMHA_T_MASK_BITS};

	if (has(p, FMHA_T_INDICES) != (p->topk > 0))
		return refuse(err, FMHA_T_INDICES, "",
			      p->topk > 0 ? "topk needs it" : "needs topk");
	for (size_t i = 0; p->topk > 0 && i < sizeof(others) / sizeof(others[0]); i++)
		if (has(p, others[i]))
			return refuse(err, others[i], "", "topk: indices say what a row sees");
	return 0;
}

/* Options of the operation itself. */
static int check_option_tensors(const struct fmha_problem *p, struct fmha_error *err)
{
	bool appends = p->seqlen_new > 0, rope = p->rope != FMHA_ROPE_NONE;
	bool finds = p->descale_computed;
	const struct condition conditions[] = {
		{FMHA_T_K_DESCALE, finds && !has(p, FMHA_T_K_DESCALE), "descale_computed needs it"},
		{FMHA_T_ALIBI_SLOPES, has(p, FMHA_T_ALIBI_SLOPES) && has(p, FMHA_T_BIAS),
		 "bias is given as well"},
		{FMHA_T_RANDVAL, has(p, FMHA_T_RANDVAL) && p->dropout_p == 0, "needs dropout_p"},
		{FMHA_T_MASK_INTERVALS, has(p, FMHA_T_MASK_INTERVALS) && p->mask_endpoints == 0,
		 "needs mask_endpoints"},
		{FMHA_T_MASK_BITS, has(p, FMHA_T_MASK_BITS) && has(p, FMHA_T_MASK_INTERVALS),
		 "mask_intervals is given as well"},
		{FMHA_T_DBIAS, has(p, FMHA_T_DBIAS) && !has(p, FMHA_T_BIAS), "needs bias"},
		{FMHA_T_DSINK, has(p, FMHA_T_DSINK) && !has(p, FMHA_T_SINK), "needs sink"},
		{FMHA_T_K_NEW, appends && !has(p, FMHA_T_K_NEW), "seqlen_new needs it"},
		{FMHA_T_K_NEW, !appends && has(p, FMHA_T_K_NEW), "needs seqlen_new"},
		{FMHA_T_V_NEW, !appends && has(p, FMHA_T_V_NEW), "needs seqlen_new"},
		{FMHA_T_ROTARY_COS, rope && !has(p, FMHA_T_ROTARY_COS), "rope needs it"},
		{FMHA_T_ROTARY_SIN, rope && !has(p, FMHA_T_ROTARY_SIN), "rope needs it"},
		{FMHA_T_ROTARY_COS, !rope && has(p, FMHA_T_ROTARY_COS), "needs rope"},
		{FMHA_T_ROTARY_SIN, !rope && has(p, FMHA_T_ROTARY_SIN), "needs rope"},
		{FMHA_T_Q_ROTATED, has(p, FMHA_T_Q_ROTATED) && !rope, "needs rope"},
		{FMHA_T_Q_ROTATED, has(p, FMHA_T_Q_ROTATED) && !has(p, FMHA_T_Q), "needs q"},
		{FMHA_T_Q, p->op == FMHA_APPEND_KV && has(p, FMHA_T_Q) && !has(p, FMHA_T_Q_ROTATED),
		 "append_kv only rotates it, but there is no q_rotated"},
	};

	return first_wrong(conditions, sizeof(conditions) / sizeof(conditions[0]), err);
}

/* ---- data types ---- */

#define TYPE(dtype) (1u << (dtype))
enum {
	TYPES_WIDE = TYPE(FMHA_F32) | TYPE(FMHA_F16) | TYPE(FMHA_BF16),
	TYPES_HALF = TYPE(FMHA_F16) | TYPE(FMHA_BF16),
	TYPES_FP8 = TYPE(FMHA_E4M3) | TYPE(FMHA_E5M2),
};

static bool is_fp8(uint32_t dtype)
{
	return dtype == FMHA_E4M3 || dtype == FMHA_E5M2;
}

/* Of keys and values: what has scale factors. */
static bool is_byte(uint32_t dtype)
{
	return is_fp8(dtype) || dtype == FMHA_I8;
}

/* 16-bit queries over keys and values of 8 bits; those of i8 have no others. */
static bool is_mixed(const struct fmha_problem *p)
{
	return p->op == FMHA_FORWARD && is_byte(p->k.dtype) && !is_fp8(p->q.dtype);
}

/* The types that a role may have; those of q, k and v equal each other, but for a q of 16 bits over
 * 8. */
static uint32_t allowed_types(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	/* append_kv may come without q: the cache decides. */
	uint32_t type = p->op == FMHA_MERGE_STATES ? p->o_parts.dtype : p->k.dtype;
	uint32_t output = is_mixed(p) ? TYPE(p->q.dtype) : is_fp8(type) ? TYPES_WIDE : TYPE(type);
	/* New rows are the cache's, or 16 bits over 8; in one call with q they are as q is. */
	uint32_t new_row = p->op == FMHA_FORWARD ? p->q.dtype : p->k_new.dtype;

	switch (role) {
	case FMHA_T_K:
		return p->op == FMHA_BACKWARD ? TYPES_WIDE : TYPES_WIDE | TYPES_FP8 | TYPE(FMHA_I8);
	case FMHA_T_Q:
		return p->op == FMHA_APPEND_KV                  ? TYPE(new_row)
		       : p->op == FMHA_FORWARD && is_fp8(type)  ? TYPE(type) | TYPES_HALF
		       : p->op == FMHA_FORWARD && is_byte(type) ? (uint32_t)TYPES_HALF
								: TYPE(type);
	case FMHA_T_K_NEW:
		return p->op == FMHA_FORWARD ? TYPE(new_row)
		       : is_byte(type)       ? TYPE(type) | TYPES_HALF
					     : TYPE(type);
	case FMHA_T_V_NEW:
	case FMHA_T_Q_ROTATED:
		return TYPE(new_row);
	case FMHA_T_V:
	case FMHA_T_DO:
	case FMHA_T_DQ:
	case FMHA_T_DK:
	case FMHA_T_DV:
		return TYPE(type);
	case FMHA_T_O_PARTS:
		return TYPES_WIDE;
	case FMHA_T_O: /* partial results may be kept in f32 and merged into a narrower type */
		return p->op == FMHA_MERGE_STATES && type == FMHA_F32 ? (uint32_t)TYPES_WIDE
								      : output;
	case FMHA_T_BIAS:
	case FMHA_T_DBIAS:
		return output | TYPE(FMHA_F32);
	case FMHA_T_ROTARY_COS:
	case FMHA_T_ROTARY_SIN:
		return TYPE(FMHA_F32) | TYPE(new_row);
	case FMHA_T_SLOT_MAPPING:
	case FMHA_T_POSITIONS:
		return TYPE(FMHA_I64);
	case FMHA_T_LSE:
	case FMHA_T_ALIBI_SLOPES:
	case FMHA_T_SINK:
	case FMHA_T_DSINK:
	case FMHA_T_DLSE:
	case FMHA_T_LSE_PARTS:
	case FMHA_T_Q_DESCALE:
	case FMHA_T_K_DESCALE:
	case FMHA_T_V_DESCALE:
		return TYPE(FMHA_F32);
	case FMHA_T_RANDVAL:
	case FMHA_T_MASK_BITS:
	case FMHA_T_WORKSPACE:
		return TYPE(FMHA_U8);
	default:
		return TYPE(FMHA_I32);
	}
}

/* Rules speak of each other's types: each has to be one before the first of them is asked. */
static int check_dtypes_known(const struct fmha_problem *p, struct fmha_error *err)
{
	char rule[48];

	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (!has(p, role) || p->tensor[role].dtype < FMHA_N_DTYPES)
			continue;
		(void)snprintf(rule, sizeof(rule), "%u is no data type", p->tensor[role].dtype);
		return refuse(err, role, ".dtype", rule);
	}
	return 0;
}

static int check_dtype(const struct fmha_problem *p, enum fmha_tensor_role role,
		       struct fmha_error *err)
{
	uint32_t dtype = p->tensor[role].dtype, allowed = allowed_types(p, role);
	char rule[96];
	size_t used;

	if (allowed & TYPE(dtype))
		return 0;
	used = (size_t)snprintf(rule, sizeof(rule), "%s, must be", fmha_dtype_name(dtype));
	for (uint32_t i = 0, n = 0; i < FMHA_N_DTYPES; i++)
		if (allowed & TYPE(i))
			used += (size_t)snprintf(rule + used, sizeof(rule) - used, "%s %s",
						 n++ ? " or" : "", fmha_dtype_name(i));
	return refuse(err, role, ".dtype", rule);
}

static int check_related_types(const struct fmha_problem *p, struct fmha_error *err)
{
	static const enum fmha_tensor_role descales[] = {FMHA_T_Q_DESCALE, FMHA_T_K_DESCALE,
							 FMHA_T_V_DESCALE};

	for (size_t i = 0; i < sizeof(descales) / sizeof(descales[0]); i++)
		if (has(p, descales[i]) && !is_byte(p->k.dtype))
			return refuse(err, descales[i], "",
				      "only inputs of 8 bits have scale factors");
	if (has(p, FMHA_T_Q_DESCALE) && is_mixed(p))
		return refuse(err, FMHA_T_Q_DESCALE, "",
			      "only inputs of 8 bits have scale factors");
	/* What is appended as it comes has the factors that it was made with. */
	for (size_t i = 1; p->op == FMHA_APPEND_KV && i < sizeof(descales) / sizeof(descales[0]);
	     i++)
		if (has(p, descales[i]) && is_byte(p->k_new.dtype))
			return refuse(err, descales[i], "",
				      "k_new and v_new are of 8 bits already");
	if (has(p, FMHA_T_DBIAS) && p->dbias.dtype != p->bias.dtype)
		return refuse(err, FMHA_T_DBIAS, ".dtype", "differs from that of bias");
	if (has(p, FMHA_T_ROTARY_COS) && p->rotary_cos.dtype != p->rotary_sin.dtype)
		return refuse(err, FMHA_T_ROTARY_SIN, ".dtype", "differs from that of rotary_cos");
	return 0;
}

/* ---- where it lies ---- */

bool problem_writes(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	switch (role) {
	case FMHA_T_O:
	case FMHA_T_LSE:
	case FMHA_T_RANDVAL:
		return p->op != FMHA_BACKWARD;
	case FMHA_T_K:
	case FMHA_T_V:
		return p->seqlen_new > 0;
	case FMHA_T_K_DESCALE:
	case FMHA_T_V_DESCALE:
		return p->descale_computed;
	default:
		return proto_roles[role].output;
	}
}

/*
 * No two elements of an output may share an address: two threads would write it. Enough, and kept
 * by every sensible layout: taken by growing stride, each axis steps over all that lies within the
 * axes before it.
 */
static bool overlaps_itself(const int64_t dims[5], const int64_t stride[5], int n_dims)
{
	int64_t reach = 0; /* of the axes so far */
	int order[5] = {0}, n = 0;

	for (int i = 0; i < n_dims; i++) {
		int at = n++;

		for (; at > 0 && stride[order[at - 1]] > stride[i]; at--)
			order[at] = order[at - 1];
		order[at] = i;
	}
	for (int i = 0; i < n; i++) {
		int axis = order[i];

		if (dims[axis] <= 1)
			continue;
		if (stride[axis] <= reach)
			return true;
		reach += (dims[axis] - 1) * stride[axis];
	}
	return false;
}

static int check_strides(const struct fmha_problem *p, enum fmha_tensor_role role,
			 struct fmha_error *err)
{
	const struct fmha_tensor *tensor = &p->tensor[role];
	int n_dims = proto_roles[role].n_dims;
	struct problem_view view;
	char part[24];
	int r;

	for (int i = 0; i < 5; i++) {
		(void)snprintf(part, sizeof(part), ".stride[%d]", i);
		if (i >= n_dims && tensor->stride[i] != 0)
			return refuse(err, role, part,
				      "not 0, but the tensor has no such dimension");
		if (tensor->stride[i] < 0)
			return refuse(err, role, part, "negative");
		if (tensor->stride[i] != 0 && p->kv_layout == FMHA_KV_VECTORIZED &&
		    (role == FMHA_T_K || role == FMHA_T_V))
			return refuse(err, role, part, "a vectorized cache is packed: must be 0");
	}
	r = problem_view(p, role, &view, err);
	if (r < 0)
		return r;
	if (tensor->offset > UINT64_MAX - view.bytes)
		return refuse(err, role, ".offset", "offset and extent overflow 64 bits");
	if (view.bytes > 0 && problem_writes(p, role) &&
	    overlaps_itself(view.extent, view.stride, n_dims))
		return refuse(err, role, ".stride", "elements of an output overlap");
	return 0;
}

static int check_view(const struct fmha_problem *p, enum fmha_tensor_role role,
		      struct fmha_error *err)
{
	const struct fmha_tensor *tensor = &p->tensor[role];
	bool latent = role == FMHA_T_K && p->kv_layout == FMHA_KV_LATENT_FP8;
	uint32_t alignment = role == FMHA_T_WORKSPACE ? 256
			     : latent                 ? 16
						      : fmha_dtype_bytes(tensor->dtype);
	char rule[64], part[24];
	int64_t stride[5];
	int r = problem_check_extents(p, role, err);

	if (r < 0)
		return r;
	if (tensor->buffer != 0 && tensor->data)
		return refuse(err, role, ".data", "a buffer is given as well");
	if ((tensor->offset + (uintptr_t)tensor->data) % alignment != 0) {
		(void)snprintf(rule, sizeof(rule), "%llu is not a multiple of %u bytes",
			       (unsigned long long)tensor->offset, alignment);
		return refuse(err, role, ".offset", rule);
	}
	problem_strides(p, role, stride);
	for (int i = 0; latent && i < 4; i++) {
		(void)snprintf(part, sizeof(part), ".stride[%d]", i);
		if (i < 3 ? stride[i] % 16 != 0 : stride[i] != 1)
			return refuse(err, role, part,
				      i < 3 ? "of latents of fp8: not a multiple of 16"
					    : "of latents of fp8: not 1");
	}
	return check_strides(p, role, err);
}

int problem_check_tensors(const struct fmha_problem *p, struct fmha_error *err)
{
	int r = check_usage(p, err);

	if (r == 0)
		r = check_slots(p, err);
	if (r == 0)
		r = check_sequence_tensors(p, err);
	if (r == 0)
		r = check_option_tensors(p, err);
	if (r == 0)
		r = check_values(p, err);
	if (r == 0)
		r = check_chosen(p, err);
	if (r == 0)
		r = check_dtypes_known(p, err);
	/* The type that the others follow comes first, so that it gets the blame. */
	if (r == 0 && has(p, FMHA_T_K))
		r = check_dtype(p, FMHA_T_K, err);
	if (r == 0 && has(p, FMHA_T_O_PARTS))
		r = check_dtype(p, FMHA_T_O_PARTS, err);
	if (r == 0 && p->op == FMHA_APPEND_KV)
		r = check_dtype(p, FMHA_T_K_NEW, err);
	for (uint32_t role = 0; r == 0 && role < FMHA_N_TENSORS; role++)
		if (has(p, role))
			r = check_dtype(p, role, err);
	if (r == 0)
		r = check_related_types(p, err);
	for (uint32_t role = 0; r == 0 && role < FMHA_N_TENSORS; role++)
		if (has(p, role))
			r = check_view(p, role, err);
	return r;
}

/* ---- aliasing ---- */

/* A view as bytes: axes of extent 1 are left out. */
struct footprint {
	uint64_t base;
	uint64_t span;
	uint64_t element;
	uint64_t extent[5], stride[5];
	int n_axes;
};

/* Return: 1 with elements, 0 without. */
static int footprint_of(const struct fmha_problem *p, enum fmha_tensor_role role,
			struct footprint *ret)
{
	const struct fmha_tensor *tensor = &p->tensor[role];
	struct problem_view view;

	*ret = (struct footprint){.base = tensor->offset + (uintptr_t)tensor->data,
				  .element = fmha_dtype_bytes(tensor->dtype)};
	if (problem_view(p, role, &view, NULL) < 0 || view.bytes == 0)
		return 0;
	ret->span = view.bytes;
	for (int i = 0; i < proto_roles[role].n_dims; i++) {
		if (view.extent[i] <= 1 || view.stride[i] == 0)
			continue;
		ret->extent[ret->n_axes] = (uint64_t)view.extent[i];
		ret->stride[ret->n_axes] = (uint64_t)view.stride[i] * ret->element;
		ret->n_axes++;
	}
	return 1;
}

/* Bytes that the axes cover which are not multiples of @period; 0 when that exceeds @period. */
static uint64_t span_within(const struct footprint *f, uint64_t period)
{
	uint64_t span = f->element;

	for (int i = 0; i < f->n_axes; i++)
		if (f->stride[i] % period != 0)
			span += (f->extent[i] - 1) * f->stride[i];
	return span <= period ? span : 0;
}

/*
 * Whether two views are certain to share no byte. Disjoint ranges are. So are views interleaved
 * with a common period, as the parts of a packed QKV tensor: when each keeps within its own slice
 * of every period, the slices tell.
 */
static bool are_apart(const struct footprint *a, const struct footprint *b)
{
	if (a->base >= b->base + b->span || b->base >= a->base + a->span)
		return true;
	for (int i = 0; i < a->n_axes; i++) {
		uint64_t period = a->stride[i], in_a = span_within(a, period);
		uint64_t in_b = span_within(b, period), gap;

		if (in_a == 0 || in_b == 0)
			continue;
		gap = (b->base - a->base) % period; /* b's slice, seen from the start of a's */
		if (b->base < a->base)
			gap = (period - (a->base - b->base) % period) % period;
		if (gap >= in_a && gap + in_b <= period)
			return true;
	}
	return false;
}

int problem_check_aliasing(const struct fmha_problem *p, struct fmha_error *err)
{
	struct footprint written, other;
	char rule[64];

	for (uint32_t i = 0; i < FMHA_N_TENSORS; i++) {
		if (!has(p, i) || !problem_writes(p, i) || !footprint_of(p, i, &written))
			continue;
		for (uint32_t j = 0; j < FMHA_N_TENSORS; j++) {
			if (j == i || !has(p, j) || p->tensor[j].buffer != p->tensor[i].buffer ||
			    !footprint_of(p, j, &other) || are_apart(&written, &other))
				continue;
			(void)snprintf(rule, sizeof(rule), "an output, overlaps tensor.%s",
				       proto_roles[j].name);
			return refuse(err, i, "", rule);
		}
	}
	return 0;
}
