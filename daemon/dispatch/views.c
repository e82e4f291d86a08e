/* SPDX-License-Identifier: MIT */
/*
 * views.c: which bytes a tensor view touches, and whether two views touch the same ones.
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

/* Which roles does the plan write? K and V when keys are appended. */
static bool role_written(const struct fmha_problem *p, int role)
{
	switch (role) {
	case FMHA_T_K:
	case FMHA_T_V:
		return p->seqlen_new > 0 && plan_present(p, FMHA_T_K_NEW);
	case FMHA_T_O:
	case FMHA_T_LSE:
		return p->op != FMHA_BACKWARD;
	case FMHA_T_RANDVAL:
		return p->op != FMHA_BACKWARD;
	default:
		return proto_roles[role].output;
	}
}

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
		      struct plan_view *view)
{
	bool vectorized = p->page_size > 0 && p->kv_layout == FMHA_KV_VECTORIZED &&
			  (role == FMHA_T_K || role == FMHA_T_V);
	const int64_t *stride = p->tensor[role].stride;
	int64_t dims[5];

	view->n_axes = 0;
	if (view->span_bytes == 0)
		return;
	if (vectorized) { /* packed: one axis of bytes */
		view->axes[0] = (struct plan_axis){
			(int64_t)(view->span_bytes / view->element_bytes), view->element_bytes};
		view->n_axes = 1;
		return;
	}
	problem_extents(p, role, dims);
	for (int i = 0; i < proto_roles[role].n_dims; i++) {
		/* A broadcast axis (stride 0) repeats the same bytes. */
		if (dims[i] <= 1 || stride[i] == 0)
			continue;
		view->axes[view->n_axes++] = (struct plan_axis){dims[i],
								stride[i] * view->element_bytes};
	}
	sort_axes(view);
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
	int r;

	plan->n_views = 0;
	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		enum fmha_tensor_role role = (enum fmha_tensor_role)i;
		struct plan_view *view = &plan->views[plan->n_views];

		if (role == FMHA_T_WORKSPACE || !plan_present(p, role))
			continue;
		*view = (struct plan_view){
			.role = (uint32_t)i,
			.written = role_written(p, i),
			.element_bytes = fmha_dtype_bytes(p->tensor[role].dtype),
			.alignment = fmha_dtype_bytes(p->tensor[role].dtype),
		};
		r = problem_span_bytes(p, role, &view->span_bytes, err);
		if (r < 0)
			return r;
		view_axes(p, role, view);
		r = check_layout(p, view, err);
		if (r < 0)
			return r;
		plan->n_views++;
	}
	return 0;
}

/* Bytes from the first element to one past the last of the axes from @first on. */
static int64_t axes_span(const struct plan_view *view, int first)
{
	int64_t span = view->element_bytes;

	for (int i = first; i < view->n_axes; i++)
		span += (view->axes[i].extent - 1) * view->axes[i].stride;
	return span;
}

bool view_overlaps_itself(const struct plan_view *view)
{
	/* Nested axes cannot: each stride steps over all that lies inside. */
	for (int i = 0; i < view->n_axes; i++)
		if (view->axes[i].stride < axes_span(view, i + 1))
			return true;
	return false;
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
