/* SPDX-License-Identifier: MIT */
/*
 * problem_settle.c: the extents that a caller says of its tensors. Memory behind a tensor is read as
 * far as the problem's sizes and the role say; here what they say is held against what there is. One
 * rule for every role, and a table of the exceptions.
 */
#include <proto/problem.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <proto/error.h>

#include "problem_internal.h"

#define EXTENTS_BYTES 112 /* of five numbers and what parts them */

/* Bit i: where the problem has more, axis i may have extent 1. Inputs only: dbias has those of bias. */
static uint32_t broadcast_axes(enum fmha_tensor_role role)
{
	switch (role) {
	case FMHA_T_BIAS:
		return 0xf;
	case FMHA_T_ALIBI_SLOPES:
		return 0x1;
	case FMHA_T_Q_DESCALE:
	case FMHA_T_K_DESCALE:
	case FMHA_T_V_DESCALE:
		return 0x3;
	default:
		return 0;
	}
}

/* One number, [batch, heads] or [batch, heads, blocks]: what is missing is at the end. */
static bool lacks_trailing(enum fmha_tensor_role role)
{
	return role == FMHA_T_Q_DESCALE || role == FMHA_T_K_DESCALE || role == FMHA_T_V_DESCALE;
}

static bool is_vectorized(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	return (role == FMHA_T_K || role == FMHA_T_V) && p->kv_layout == FMHA_KV_VECTORIZED;
}

/* "[2, 64, 4, 128]" */
static const char *extents_text(const int64_t *extent, int n, char text[EXTENTS_BYTES])
{
	int used = snprintf(text, EXTENTS_BYTES, "[");

	for (int i = 0; i < n; i++)
		used += snprintf(text + used, EXTENTS_BYTES - (size_t)used, "%s%" PRId64,
				 i ? ", " : "", extent[i]);
	(void)snprintf(text + used, EXTENTS_BYTES - (size_t)used, "]");
	return text;
}

/* @said, @n_said: as the caller did. */
static int refuse(enum fmha_tensor_role role, const int64_t *said, int n_said,
		  const int64_t *wanted, int n_wanted, struct fmha_error *err)
{
	const struct proto_role *r = &proto_roles[role];
	char field[sizeof(err->field)], has[EXTENTS_BYTES], wants[EXTENTS_BYTES];

	(void)snprintf(field, sizeof(field), "tensor.%s", r->name);
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s is %s: %s is wanted (%.*s)", field,
				    extents_text(said, n_said < 5 ? n_said : 5, has),
				    extents_text(wanted, n_wanted, wants),
				    (int)strcspn(r->dims, ";"), r->dims);
}

/* K [n_pages, nhead_k, hdim_q / x, page_size, x], V [n_pages, nhead_k, page_size / x, hdim_v, x], packed. */
static int settle_vectorized(const struct fmha_problem *p, enum fmha_tensor_role role,
			     struct fmha_tensor *t, struct fmha_error *err)
{
	int64_t bytes = fmha_dtype_bytes(t->dtype), x = bytes > 0 ? 16 / bytes : 1, step = 1;
	const int64_t wanted[5] = {p->n_pages, p->nhead_k,
				   (role == FMHA_T_K ? p->hdim_q : p->page_size) / x,
				   role == FMHA_T_K ? p->page_size : p->hdim_v, x};
	char field[sizeof(err->field)];

	if (t->n_dims != 5 || memcmp(t->extent, wanted, sizeof(wanted)) != 0)
		return refuse(role, t->extent, (int)t->n_dims, wanted, 5, err);
	for (int i = 4; i >= 0; step *= wanted[i--]) {
		if (t->stride[i] == step || wanted[i] <= 1)
			continue;
		(void)snprintf(field, sizeof(field), "tensor.%s.stride", proto_roles[role].name);
		return fmha_error_set_field(err, FMHA_EINVAL, field,
					    "%s: a vectorized cache is packed", field);
	}
	t->n_dims = 0;
	memset(t->stride, 0, sizeof(t->stride));
	memset(t->extent, 0, sizeof(t->extent));
	return 0;
}

int problem_check_extents(const struct fmha_problem *p, enum fmha_tensor_role role,
			  struct fmha_error *err)
{
	const struct fmha_tensor *t = &p->tensor[role];
	int n = proto_roles[role].n_dims;
	int64_t dims[5];

	if (t->n_dims == 0)
		return 0;
	problem_extents(p, role, dims);
	if (role == FMHA_T_WORKSPACE) /* its size is the plan's */
		dims[0] = t->extent[0];
	if (t->n_dims != (uint32_t)n || is_vectorized(p, role))
		return refuse(role, t->extent, (int)t->n_dims, dims, n, err);
	for (int i = 0; i < n; i++)
		if (t->extent[i] != dims[i] &&
		    !(t->extent[i] == 1 && t->stride[i] == 0 && (broadcast_axes(role) >> i & 1)))
			return refuse(role, t->extent, n, dims, n, err);
	return 0;
}

/* As many dimensions as the role has. */
static void align(struct fmha_tensor *t, const struct fmha_tensor *said, int n, int shift)
{
	memset(t->extent, 0, sizeof(t->extent));
	memset(t->stride, 0, sizeof(t->stride));
	for (int i = 0; i < n; i++) {
		int from = i - shift;
		bool there = from >= 0 && from < (int)said->n_dims;

		t->extent[i] = there ? said->extent[from] : 1;
		t->stride[i] = there ? said->stride[from] : 0;
	}
	t->n_dims = (uint32_t)n;
}

static int settle(struct fmha_problem *p, enum fmha_tensor_role role, struct fmha_error *err)
{
	struct fmha_tensor *t = &p->tensor[role], said = *t;
	int n = proto_roles[role].n_dims;
	int64_t dims[5];
	int r;

	if (is_vectorized(p, role))
		return settle_vectorized(p, role, t, err);
	problem_extents(p, role, dims);
	if (said.n_dims > (uint32_t)n)
		return refuse(role, said.extent, (int)said.n_dims, dims, n, err);
	align(t, &said, n, lacks_trailing(role) ? 0 : n - (int)said.n_dims);
	for (int i = 0; i < n; i++)
		if (t->extent[i] == 1 && (dims[i] != 1 || t->stride[i] < 0))
			t->stride[i] = 0;
	r = problem_check_extents(p, role, err);
	return r < 0 ? refuse(role, said.extent, (int)said.n_dims, dims, n, err) : 0;
}

int problem_settle(struct fmha_problem *problem, struct fmha_error *err)
{
	int r = 0;

	/* dbias's extents are bias's, which comes before it. */
	for (uint32_t role = 0; r == 0 && role < FMHA_N_TENSORS; role++)
		if (problem->tensor[role].n_dims > 0 && fmha_tensor_present(&problem->tensor[role]))
			r = settle(problem, role, err);
	return r;
}
