/* SPDX-License-Identifier: MIT */
#include "fixture.h"

#include <stdio.h>

static int decree_find(void *owner, enum abi_family family, uint32_t dtype,
		       const union abi_args *args, struct plan_stage *stage, const char **ret_why)
{
	struct decree *decree = owner;

	(void)ret_why;
	decree->seen[family] = *args;
	decree->seen_dtype[family] = dtype;
	if (decree->missing & (1U << family))
		return 1;
	if (family == ABI_BWD_DQ_DK_DV && decree->needs_dq_acc != (args->bwd.dq_acc != NULL))
		return 1;
	(void)snprintf(stage->kernel, sizeof(stage->kernel), "decree_%s", plan_family_name(family));
	stage->workspace_bytes = decree->workspace_bytes;
	return 0;
}

void decree_init(struct decree *decree, uint32_t compute_units)
{
	*decree = (struct decree){
		.device = {.arch = "decree", .compute_units = compute_units, .find = decree_find}};
	decree->device.owner = decree;
}

void fixture_init(struct fixture *f, uint32_t op, uint32_t mode)
{
	memset(f, 0, sizeof(*f));
	fmha_problem_init(&f->problem);
	f->problem.op = op;
	f->problem.mode = mode;
	decree_init(&f->decree, 1);
}

void fixture_deinit(struct fixture *f)
{
	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		free(f->bindings[i].host);
		f->bindings[i] = (struct plan_binding){0};
	}
	free(f->workspace);
	f->workspace = NULL;
	f->indices = plan_indices_free(f->indices);
}

void fixture_add(struct fixture *f, enum fmha_tensor_role role, uint32_t dtype)
{
	f->problem.tensor[role] = (struct fmha_tensor){.buffer = (uint64_t)role + 1,
						       .dtype = dtype};
}

static void sizes(struct fixture *f, uint32_t mode)
{
	struct fmha_problem *p = &f->problem;

	p->batch = 2;
	p->nhead_q = 4;
	p->nhead_k = 2;
	p->seqlen_q = 5;
	p->seqlen_k = 7;
	p->hdim_q = 16;
	p->hdim_v = 8;
	fixture_add(f, FMHA_T_Q, FMHA_F32);
	fixture_add(f, FMHA_T_K, FMHA_F32);
	fixture_add(f, FMHA_T_V, FMHA_F32);
	fixture_add(f, FMHA_T_O, FMHA_F32);
	if (mode == FMHA_GROUP) {
		p->total_q = 8;
		p->total_k = 12;
		fixture_add(f, FMHA_T_SEQSTART_Q, FMHA_I32);
		fixture_add(f, FMHA_T_SEQSTART_K, FMHA_I32);
	}
}

static void group_ints(struct fixture *f)
{
	static const int32_t q[3] = {0, 5, 8}, k[3] = {0, 7, 12};

	if (f->problem.mode != FMHA_GROUP || f->problem.batch != 2)
		return;
	memcpy(fixture_ints(f, FMHA_T_SEQSTART_Q), q, sizeof(q));
	if (f->problem.seqstart_k.buffer)
		memcpy(fixture_ints(f, FMHA_T_SEQSTART_K), k, sizeof(k));
}

void fixture_forward(struct fixture *f, uint32_t mode)
{
	fixture_init(f, FMHA_FORWARD, mode);
	sizes(f, mode);
	fixture_allocate(f);
	group_ints(f);
}

void fixture_backward(struct fixture *f, uint32_t mode)
{
	fixture_init(f, FMHA_BACKWARD, mode);
	sizes(f, mode);
	fixture_add(f, FMHA_T_LSE, FMHA_F32);
	fixture_add(f, FMHA_T_DO, FMHA_F32);
	fixture_add(f, FMHA_T_DQ, FMHA_F32);
	fixture_add(f, FMHA_T_DK, FMHA_F32);
	fixture_add(f, FMHA_T_DV, FMHA_F32);
	fixture_allocate(f);
	group_ints(f);
}

void fixture_allocate(struct fixture *f)
{
	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		uint64_t bytes;

		if (!fmha_tensor_present(&f->problem.tensor[i]) || f->bindings[i].host)
			continue;
		assert_int_equal(
			problem_span_bytes(&f->problem, (enum fmha_tensor_role)i, &bytes, NULL), 0);
		assert_true(bytes < 64 << 20);
		f->bindings[i].host = calloc(1, bytes ? bytes : 1);
		assert_non_null(f->bindings[i].host);
		f->bindings[i].device = f->bindings[i].host;
		f->bindings[i].bytes = bytes;
	}
}

int32_t *fixture_ints(struct fixture *f, enum fmha_tensor_role role)
{
	fixture_allocate(f);
	return f->bindings[role].host;
}

int fixture_build(struct fixture *f)
{
	f->err = (struct fmha_error){0};
	return plan_build(&f->problem, &f->choice, &f->decree.device, &f->plan, &f->err);
}

int bind_plan(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
	      void *workspace, void *head, union abi_args args[PLAN_MAX_STAGES],
	      struct plan_indices **ret_indices, struct fmha_error *err)
{
	const struct plan_memory memory = {.workspace = workspace, .head = head};
	struct plan_indices *indices = NULL;
	int r = plan_read(plan, bindings, &indices, err);

	if (r == 0)
		r = plan_place(plan, bindings, indices, &memory, args, err);
	if (r < 0)
		indices = plan_indices_free(indices);
	else
		*ret_indices = indices;
	return r;
}

int fixture_bind(struct fixture *f)
{
	int r = fixture_build(f);

	if (r < 0)
		return r;
	fixture_allocate(f);
	free(f->workspace);
	f->workspace = NULL;
	if (f->plan.workspace_bytes > 0)
		f->workspace = aligned_alloc(PLAN_ALIGNMENT,
					     (f->plan.workspace_bytes + 255) / 256 * 256);
	f->indices = plan_indices_free(f->indices);
	return bind_plan(&f->plan, f->bindings, f->workspace, f->workspace, f->args, &f->indices,
			 &f->err);
}
