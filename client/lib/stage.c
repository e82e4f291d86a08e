/* SPDX-License-Identifier: MIT */
#include "stage.h"

#include <stdio.h>
#include <string.h>

#include <proto/error.h>
#include <proto/problem.h>

void stage_view_compact(struct stage_view *view)
{
	int order[STAGE_MAX_DIMS] = {0};
	int64_t next = 1;
	bool empty = false;
	int i, j;

	/* Axes by descending stride; equal strides (extent 1) keep their order. */
	for (i = 0; i < view->n_dims; i++) {
		for (j = i; j > 0 && view->stride[order[j - 1]] < view->stride[i]; j--)
			order[j] = order[j - 1];
		order[j] = i;
	}
	for (i = view->n_dims - 1; i >= 0; i--) {
		int axis = order[i];

		if (view->stride[axis] == 0) {
			view->compact[axis] = 0;
			continue;
		}
		view->compact[axis] = next;
		if (view->dims[axis] > 0)
			next *= view->dims[axis];
		else
			empty = true;
	}
	view->bytes = empty ? 0 : (uint64_t)next * view->element_bytes;
}

/* The axes worth looping over: no broadcast axes, and neighbours that are dense on both sides
 * merged. */
struct loops {
	int n;
	int64_t dims[STAGE_MAX_DIMS], memory[STAGE_MAX_DIMS], compact[STAGE_MAX_DIMS];
};

static void loops_init(struct loops *loops, const struct stage_view *view)
{
	bool used[STAGE_MAX_DIMS] = {false};

	memset(loops, 0, sizeof(*loops));
	for (;;) {
		int64_t stride = -1;
		int best = -1, last = loops->n - 1;

		for (int i = 0; i < view->n_dims; i++) {
			if (used[i] || view->dims[i] == 1 || view->stride[i] == 0)
				continue;
			if (view->compact[i] > stride) {
				stride = view->compact[i];
				best = i;
			}
		}
		if (best < 0)
			break;
		used[best] = true;
		if (last >= 0 && loops->memory[last] == view->stride[best] * view->dims[best] &&
		    loops->compact[last] == view->compact[best] * view->dims[best]) {
			loops->dims[last] *= view->dims[best];
		} else {
			last = loops->n++;
			loops->dims[last] = view->dims[best];
		}
		loops->memory[last] = view->stride[best];
		loops->compact[last] = view->compact[best];
	}
	if (loops->n == 0) {
		loops->n = 1;
		loops->dims[0] = loops->memory[0] = loops->compact[0] = 1;
	}
}

/* The innermost axis; element sizes are constants so that the loops become plain moves. */
static void copy_row(uint8_t *to, int64_t to_stride, const uint8_t *from, int64_t from_stride,
		     int64_t n, uint32_t element_bytes)
{
	if (to_stride == 1 && from_stride == 1) {
		memcpy(to, from, (size_t)n * element_bytes);
		return;
	}
	for (int64_t i = 0; i < n; i++) {
		uint8_t *t = to + i * to_stride * element_bytes;
		const uint8_t *f = from + i * from_stride * element_bytes;

		if (element_bytes == 4)
			memcpy(t, f, 4);
		else if (element_bytes == 2)
			memcpy(t, f, 2);
		else
			*t = *f;
	}
}

void stage_view_copy(const struct stage_view *view, void *memory, void *compact, bool to_compact)
{
	int64_t index[STAGE_MAX_DIMS] = {0};
	struct loops loops;
	int inner;

	for (int i = 0; i < view->n_dims; i++) {
		if (view->dims[i] == 0)
			return;
	}
	loops_init(&loops, view);
	inner = loops.n - 1;
	for (;;) {
		int64_t m = 0, c = 0;
		int axis;

		for (int i = 0; i < inner; i++) {
			m += index[i] * loops.memory[i];
			c += index[i] * loops.compact[i];
		}
		{
			uint8_t *mp = (uint8_t *)memory + m * view->element_bytes;
			uint8_t *cp = (uint8_t *)compact + c * view->element_bytes;

			if (to_compact)
				copy_row(cp, loops.compact[inner], mp, loops.memory[inner],
					 loops.dims[inner], view->element_bytes);
			else
				copy_row(mp, loops.memory[inner], cp, loops.compact[inner],
					 loops.dims[inner], view->element_bytes);
		}
		for (axis = inner - 1; axis >= 0; axis--) {
			if (++index[axis] < loops.dims[axis])
				break;
			index[axis] = 0;
		}
		if (axis < 0)
			return;
	}
}

/* Vectorized caches have an order of their own and are packed: one run of elements. */
static bool is_vectorized(const struct fmha_problem *problem, uint32_t role)
{
	return (role == FMHA_T_K || role == FMHA_T_V) && problem->page_size > 0 &&
	       problem->kv_layout == FMHA_KV_VECTORIZED;
}

/* ---- caches that grow ---- */

#define MOST_ROWS  16 /* of queries: more are a prompt */
#define LEAST_STEP 64 /* keys */

static bool is_staged(const struct fmha_problem *problem, uint32_t role)
{
	return problem->tensor[role].data && problem->tensor[role].buffer == 0;
}

/* Nothing but K and V has extents that depend on the number of keys, nor has the problem lengths. */
static bool may_have_room(const struct fmha_problem *p)
{
	const uint32_t roles = 1u << FMHA_T_Q | 1u << FMHA_T_K | 1u << FMHA_T_V | 1u << FMHA_T_O |
			       1u << FMHA_T_LSE | 1u << FMHA_T_SINK;

	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++)
		if (fmha_tensor_present(&p->tensor[role]) && (role >= 32 || !(roles >> role & 1)))
			return false;
	return p->op == FMHA_FORWARD && p->mode == FMHA_BATCH && p->page_size == 0 &&
	       p->seqlen_q <= MOST_ROWS && p->seqlen_k > 0 && p->seqlen_k < 1 << 28 &&
	       p->n_splits == 0 && p->split_size == 0 && p->dropout_p == 0 &&
	       is_staged(p, FMHA_T_K) && is_staged(p, FMHA_T_V);
}

/* The next quarter of a power of two, of at least 64 keys: a function of the length alone. */
static int32_t keys_with_room(int32_t keys)
{
	int32_t power = LEAST_STEP, step;

	while (power < keys)
		power *= 2;
	step = power / 8 > LEAST_STEP ? power / 8 : LEAST_STEP;
	return (keys + step - 1) / step * step;
}

/*
 * The copies of K and V get room for more keys than there are, whose number goes along as a tensor: the
 * next keys make the same problem again, and need no plan. What lies in that room is not read.
 */
static void make_room(struct fmha_problem *problem, struct stage *stage)
{
	stage->seqlen_k = problem->seqlen_k;
	problem->seqlen_k = keys_with_room(problem->seqlen_k);
	for (uint32_t role = FMHA_T_K; role <= FMHA_T_V; role++)
		if (problem->tensor[role].n_dims > 0)
			problem->tensor[role].extent[1] = problem->seqlen_k;
	problem->seqlen_k_per_batch = (struct fmha_tensor){.data = &stage->seqlen_k,
							   .dtype = FMHA_I32,
							   .n_dims = 1,
							   .extent = {problem->batch}};
}

static int view_of_role(const struct fmha_problem *problem, uint32_t role, struct stage_view *view,
			struct fmha_error *err)
{
	uint64_t span;
	int r;

	memset(view, 0, sizeof(*view));
	view->element_bytes = fmha_dtype_bytes(problem->tensor[role].dtype);
	r = problem_span_bytes(problem, role, &span, err);
	if (r < 0)
		return r;
	if (is_vectorized(problem, role)) {
		view->n_dims = 1;
		view->dims[0] = (int64_t)(span / view->element_bytes);
		view->stride[0] = 1;
	} else {
		view->n_dims = proto_roles[role].n_dims;
		problem_extents(problem, role, view->dims);
		problem_strides(problem, role, view->stride);
	}
	stage_view_compact(view);
	return 0;
}

/* Rows or columns that belong to no sequence keep what they held, so outputs go in as well. */
static bool has_untouched_rows(const struct fmha_problem *problem)
{
	return problem->mode == FMHA_GROUP || fmha_tensor_present(&problem->seqlen_q_per_batch) ||
	       fmha_tensor_present(&problem->seqlen_k_per_batch) ||
	       fmha_tensor_present(&problem->leftpad_k);
}

static void directions(const struct fmha_problem *problem, struct stage_tensor *tensor)
{
	bool appends = fmha_tensor_present(&problem->k_new);
	uint32_t role = tensor->role;

	tensor->copy_in = proto_roles[role].input;
	tensor->copy_out = proto_roles[role].output;
	if (problem->op == FMHA_BACKWARD &&
	    (role == FMHA_T_O || role == FMHA_T_LSE || role == FMHA_T_RANDVAL)) {
		tensor->copy_in = true;
		tensor->copy_out = false;
	} else if ((role == FMHA_T_K || role == FMHA_T_V) && appends) {
		tensor->copy_in = tensor->copy_out = true;
	} else if ((role == FMHA_T_K_DESCALE || role == FMHA_T_V_DESCALE) &&
		   problem->descale_computed) {
		tensor->copy_in = tensor->copy_out = true;
	} else if (tensor->copy_out && has_untouched_rows(problem)) {
		tensor->copy_in = true;
	}
}

int stage_plan(struct fmha_problem *problem, uint64_t buffer, struct stage *ret_stage,
	       struct fmha_error *err)
{
	const struct fmha_problem asked = *problem;
	bool has_room = may_have_room(problem);
	struct fmha_problem original;

	ret_stage->n_tensors = 0;
	ret_stage->bytes = 0;
	if (has_room)
		make_room(problem, ret_stage);
	original = *problem;
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &problem->tensor[role];
		struct stage_tensor *staged = &ret_stage->tensors[ret_stage->n_tensors];
		int r;

		if (tensor->buffer != 0 || !tensor->data)
			continue;
		if (role == FMHA_T_WORKSPACE) {
			memset(tensor, 0, sizeof(*tensor));
			continue;
		}
		if (tensor->offset != 0) {
			char field[48];

			(void)snprintf(field, sizeof(field), "tensor.%s.offset",
				       proto_roles[role].name);
			return fmha_error_set_field(err, FMHA_EINVAL, field,
						    "%s: a tensor with data has offset 0", field);
		}
		staged->role = role;
		staged->data = tensor->data;
		staged->offset = ret_stage->bytes;
		directions(&asked, staged);
		r = view_of_role(&original, role, &staged->view, err);
		if (r < 0)
			return r;
		if (has_room && (role == FMHA_T_K || role == FMHA_T_V))
			staged->view.dims[1] = ret_stage->seqlen_k;
		ret_stage->bytes += (staged->view.bytes + STAGE_ALIGNMENT - 1) &
				    ~(uint64_t)(STAGE_ALIGNMENT - 1);
		ret_stage->n_tensors++;

		tensor->buffer = buffer;
		tensor->offset = staged->offset;
		tensor->data = NULL;
		/* A vectorized cache keeps its all-zero strides: packed. */
		memset(tensor->stride, 0, sizeof(tensor->stride));
		if (!is_vectorized(&original, role))
			memcpy(tensor->stride, staged->view.compact,
			       (size_t)staged->view.n_dims * sizeof(tensor->stride[0]));
	}
	return 0;
}

void stage_in(const struct stage *stage, void *arena)
{
	for (uint32_t i = 0; i < stage->n_tensors; i++) {
		const struct stage_tensor *tensor = &stage->tensors[i];

		if (tensor->copy_in)
			stage_view_copy(&tensor->view, tensor->data,
					(uint8_t *)arena + tensor->offset, true);
	}
}

void stage_out(const struct stage *stage, void *arena)
{
	for (uint32_t i = 0; i < stage->n_tensors; i++) {
		const struct stage_tensor *tensor = &stage->tensors[i];

		if (tensor->copy_out)
			stage_view_copy(&tensor->view, tensor->data,
					(uint8_t *)arena + tensor->offset, false);
	}
}
