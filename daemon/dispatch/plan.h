/* SPDX-License-Identifier: MIT */
/*
 * plan.h: problem -> signature -> candidates -> plan.
 *
 * A plan is plain data: the validated problem, up to four stages, each naming one kernel with its
 * share of one workspace. It holds no pointer into a device or a buffer, so it can be printed,
 * exported and compared. plan_bind() turns it into argument structs for one run.
 */
#ifndef FMHAD_DISPATCH_PLAN_H
#define FMHAD_DISPATCH_PLAN_H

#include <stdint.h>

#include <fmha/base.h>
#include <abi.h>

#define PLAN_MAX_STAGES   4
#define PLAN_KERNEL_BYTES 256

union plan_args {
	struct abi_fwd_args fwd;
	struct abi_combine_args combine;
	struct abi_appendkv_args appendkv;
	struct abi_bwd_args bwd;
};

struct plan_stage {
	enum abi_family family;
	char kernel[PLAN_KERNEL_BYTES]; /* canonical name: the key in the registry and the device */
	uint32_t dtype;                 /* enum abi_dtype of the stage's inputs */
	uint32_t grid[3], block[3];     /* GPU launch geometry; zero on the CPU */
	uint32_t lds_bytes;             /* dynamic LDS or shared memory */
	uint64_t workspace_offset;      /* the stage's own share */
	uint64_t workspace_bytes;
};

struct plan {
	struct fmha_problem problem; /* strides and scale filled in */
	uint32_t n_stages;
	struct plan_stage stages[PLAN_MAX_STAGES];
	uint64_t workspace_bytes;
	uint64_t workspace_head_bytes; /* backward: the part that the host prepares */
	uint32_t workspace_zero;       /* 1: dq_acc must be zeroed before every run */
	int32_t n_splits, split_size;  /* what the planner chose */
	double flops;
	uint64_t bytes; /* least traffic: every input read once, every output written once */
};

/* What dispatch may ask of a device, without knowing which one it is. */
struct plan_device {
	const char *arch;
	uint32_t compute_units; /* cores, CUs or SMs */
	uint64_t lds_bytes;     /* per workgroup; 0 on a CPU */
	/* The kernel for a stage and its private workspace. Returns 0, or 1 when nothing fits. */
	int (*find)(void *owner, enum abi_family family, uint32_t dtype,
		    const union plan_args *args, struct plan_stage *stage);
	void *owner;
};

/* One bound tensor: where the first byte of the view lies and how much of the buffer follows. */
struct plan_binding {
	void *host;      /* readable by the worker's CPU; NULL on a GPU */
	void *device;    /* what kernels get; equals host on the CPU */
	uint64_t bytes;  /* from there to the buffer's end */
};

/*
 * Builds a plan. Judges the whole problem; buffers are judged by plan_bind().
 * Return: 0, FMHA_EINVAL, FMHA_ENOTSUP (naming the field) or FMHA_ENOKERNEL.
 */
int plan_build(const struct fmha_problem *problem, const struct plan_device *device,
	       struct plan *ret_plan, struct fmha_error *err);

/*
 * Fills one argument struct a stage. Small integer tensors (prefix sums, lengths, page tables) are
 * copied out of client memory into @indices, which the caller frees after the run, and only the copy
 * is validated and used: a client that writes during a run cannot move a kernel out of bounds.
 * @bindings: one a role, zero where the tensor is absent
 * @workspace: plan->workspace_bytes, device memory; its head is written here through @workspace_head
 * Return: 0, FMHA_EINVAL naming the field, FMHA_ENOMEM.
 */
struct plan_indices;
int plan_bind(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
	      void *workspace, void *workspace_head, union plan_args args[PLAN_MAX_STAGES],
	      struct plan_indices **ret_indices, struct fmha_error *err);
struct plan_indices *plan_indices_free(struct plan_indices *indices);

/* JSON for people and programs: candidates considered, why each was rejected, the choice and why.
 * Given to the caller, who frees it with free(). */
int plan_explain(const struct fmha_problem *problem, const struct plan_device *device,
		 char **ret_json, struct fmha_error *err);

#endif
