/* SPDX-License-Identifier: MIT */
/*
 * fmha_local.h: attention that this process launches itself, on its own stream, in its own GPU context.
 *
 * The daemon chooses, tunes and compiles kernels, once for everybody; a plan comes over as plain data, with
 * its code. From then on a run is what any library's launch is: no message, no lock, no allocation, no
 * waiting, safe to capture in a CUDA or HIP graph. What fmha.h runs in the daemon's worker, this runs here:
 * for processes that have a context of their own. Which to use when: client/docs/streams.md.
 *
 * fmha.h's rules hold, and besides:
 * - The library links no GPU runtime. It uses the CUDA driver or the HIP runtime that the process has loaded
 *   already; plans are made and freed with the GPU that the device stands for current, outside of captures.
 * - A plan belongs to the context that was current when it was made, and runs there. It must exist until its last
 *   run is done, and until graphs that captured one are destroyed.
 * - Runs read and write memory of this process, which nobody else checks: tensors must be as large as
 *   fmha_local_plan_tensor() says, and what is written must overlap nothing else. Contents are safe: lengths, prefix
 *   sums and page tables are read on the device at each run (also by each replay of a graph), and wrong ones make wrong
 *   results, never a fault.
 * - A plan goes on running when the daemon is away.
 * - A plan takes another kernel when the daemon knows a faster one, unless it is pinned: see struct fmha_local_options.
 * - This process executes code that the daemon gave it, as it does of any shared library.
 */
#ifndef FMHA_FMHA_LOCAL_H
#define FMHA_FMHA_LOCAL_H

#include <stddef.h>
#include <stdint.h>

#include <fmha/fmha.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FMHA_MAX_LAUNCHES 6

struct fmha_local_pack;
struct fmha_local_plan; /* a problem's kernels, loaded into one context of this process */

/*
 * At most once in @refresh_ms a run outside of captures also tells the daemon how many there were, without waiting for
 * the answer: it tunes what is used most. Is another kernel known to be faster, then a later run fetches and loads it, within
 * some milliseconds, and the runs after that launch it; workspace, alignments and tensors stay good, results may
 * differ in their last bits. Captured launches stay what they are, and so do plans that are deterministic, that fix
 * n_splits or split_size, that come from a pack, and pinned ones.
 */
struct fmha_local_options {
	uint32_t struct_size;
	uint32_t timeout_ms; /* of the call, compiling included; 0: the client's */
	uint32_t refresh_ms; /* 0: a minute */
	uint32_t pinned;     /* 1: every run launches the same kernels */
};

/**
 * fmha_local_plan_new() - a problem's kernels, to be launched by this process
 * @device:    a GPU, which is the current one of this process's runtime
 * @problem:   from fmha_problem_init(); each tensor that there will be has buffer 0 and as `data` its device address,
 *             or, where that is not known yet, any address but NULL that is as well aligned: only its last four bits
 *             count, which choose kernels (multiples of 16 bytes are best) and are then promised for every run;
 *             shapes, strides and roles: FMHA_TENSORS in <fmha/base.h>; borrowed
 * @options:   NULL: defaults; borrowed
 * @ret_plan:  given: fmha_local_plan_free()
 *
 * The first plan that needs a kernel waits for its compiler, for seconds; code is loaded once a process and context,
 * whatever plans share it.
 *
 * Return: 0, or
 *   FMHA_EINVAL     a documented rule is broken; err->field names the field
 *   FMHA_ENOTSUP    a device that is no GPU; no runtime, or an old one, in this process; a problem that the device does
 *                   not do; a daemon that is newer than this library
 *   FMHA_ENOKERNEL  no kernel of this device fits, or its build failed
 *   FMHA_EIO        the runtime refused the code (is another GPU current?); the sentence has its reason
 *   any call of fmha.h
 */
FMHA_API int fmha_local_plan_new(struct fmha_device *device, const struct fmha_problem *problem,
				 const struct fmha_local_options *options,
				 struct fmha_local_plan **ret_plan, struct fmha_error *err);

/**
 * fmha_local_warm() - has a problem's kernels compiled, for whoever plans it next, and loads nothing
 *
 * As fmha_local_plan_new(), but that this process needs neither a runtime nor a context, and may call
 * it from many threads to keep as many compilers busy.
 */
FMHA_API int fmha_local_warm(struct fmha_device *device, const struct fmha_problem *problem,
			     const struct fmha_local_options *options, struct fmha_error *err);

/* Unloads code that no other plan has. In a forked child it only frees memory. Return: NULL. */
FMHA_API struct fmha_local_plan *fmha_local_plan_free(struct fmha_local_plan *plan);

struct fmha_local_launch_info {
	char family[FMHA_NAME_BYTES];   /* fwd, ...; prepare: of lengths and pages */
	char kernel[FMHA_KERNEL_BYTES]; /* canonical name */
	uint8_t code[32];               /* SHA-256 of the code object */
	uint32_t grid[3], block[3];     /* blocks, threads; a grid with a 0 is not launched */
	uint32_t lds_bytes;             /* dynamic LDS or shared memory */
	uint32_t reserved;
};

struct fmha_local_plan_info {
	uint64_t workspace_bytes;     /* device memory that each run needs to itself; 0: none */
	uint32_t workspace_alignment; /* of its address, bytes */
	uint32_t n_launches;
	double flops;    /* of one run: multiply and add counted apart, masked blocks left out */
	uint64_t n_runs; /* so far, captured ones once */
	/* How many keys a run may bring instead of the problem's (struct fmha_local_keys); most 0: only those. */
	int32_t seqlen_k_least, seqlen_k_most;
	uint32_t
		key_stride_unit; /* elements: what K's and V's strides of batch and head are multiples of then */
	uint32_t reserved;
	/* In their order on the stream. */
	struct fmha_local_launch_info launches[FMHA_MAX_LAUNCHES];
};

/* Copies what the plan is to @ret_info. Return: 0 or FMHA_EINVAL (NULL). */
FMHA_API int fmha_local_plan_info(const struct fmha_local_plan *plan,
				  struct fmha_local_plan_info *ret_info, struct fmha_error *err);

struct fmha_local_tensor {
	uint64_t bytes;     /* from element 0 to one past the last one reached */
	uint32_t alignment; /* what its address has to be a multiple of */
	uint32_t reserved;
};

/* Describes the tensor of @role (enum fmha_tensor_role) as the plan takes it. Return: 0, FMHA_ENOENT (the problem has none),
 * FMHA_EINVAL. */
FMHA_API int fmha_local_plan_tensor(const struct fmha_local_plan *plan, uint32_t role,
				    struct fmha_local_tensor *ret_tensor, struct fmha_error *err);

/*
 * Keys and values of a run where they are not as many as the problem's: a cache that grows from run to run, each time
 * in other memory perhaps. K and V then have seqlen_k rows; what is not said here they share with the problem.
 */
struct fmha_local_keys {
	int32_t seqlen_k;  /* seqlen_k_least to seqlen_k_most of the plan */
	uint32_t reserved; /* 0 */
	/* elements: multiples of the plan's key_stride_unit, above 0, of an axis of one element too */
	int64_t k_stride_batch, k_stride_head, v_stride_batch, v_stride_head;
};

/* One run. All of it is borrowed until fmha_local_plan_run() returns; what lies behind device addresses, until the stream
 * has got past the run (and a graph's every replay). */
struct fmha_local_run {
	uint32_t struct_size;
	uint32_t n_tensors; /* entries of @tensors: FMHA_N_TENSORS */
	const void *const *
		tensors; /* [enum fmha_tensor_role]: device address of element 0; NULL where the problem has no
				     * such tensor */
	void *workspace; /* device address, workspace_bytes at workspace_alignment; NULL where 0. Its content
				     * does not matter and is lost */
	void *stream; /* CUstream or hipStream_t; NULL: the default stream */
	/* 1: dropout counts from dropout_seed and dropout_offset instead of the problem's seed and offset, plus, where they are
	 * not NULL, the words at dropout_seed_at and dropout_offset_at in device memory, as the run (or a replay)
	 * finds them when it gets there. For PyTorch: philox_args' two pointers, and the offset within the graph as
	 * dropout_offset. */
	uint32_t has_dropout_state;
	uint32_t reserved; /* 0 */
	uint64_t dropout_seed, dropout_offset;
	const uint64_t *dropout_seed_at, *dropout_offset_at; /* 8-byte aligned */
	const struct fmha_local_keys *keys;                  /* NULL: the problem's */
};

/**
 * fmha_local_plan_run() - put a plan's launches on a stream
 * @plan:  of this process; the context that it was made in is current
 * @run:   borrowed
 *
 * Returns when everything is queued. Sends, allocates and waits for nothing, but as struct fmha_local_options says. Any number of threads may run one plan at the same time, each with a workspace of its
 * own. Errors of the kernels themselves show at the caller's next synchronisation, as with any launch.
 *
 * Return: 0, or
 *   FMHA_EINVAL  a tensor or the workspace is missing or not aligned, or keys that the plan is not for (err->field names
 *                it); struct_size, n_tensors
 *   FMHA_ECONN   a plan that a parent process made: make one here
 *   FMHA_EIO     the runtime refused a launch; the sentence has its reason. Launches before it are queued
 */
FMHA_API int fmha_local_plan_run(struct fmha_local_plan *plan, const struct fmha_local_run *run,
				 struct fmha_error *err);

/* ---- without a daemon ---- */

/**
 * fmha_local_pack_write() - plans and their code in a file, for processes that have no daemon
 * @problems:  [n_problems], as for fmha_local_plan_new(); borrowed
 * @options:   of the whole call; NULL: defaults; borrowed
 * @path:      replaced at once when everything is there; borrowed
 *
 * Needs no runtime in this process. A pack is for the device model that the daemon has.
 *
 * Return: 0, FMHA_EIO (the file), or as fmha_local_plan_new() for the first problem that fails.
 */
FMHA_API int fmha_local_pack_write(struct fmha_device *device, const struct fmha_problem *problems,
				   size_t n_problems, const struct fmha_local_options *options,
				   const char *path, struct fmha_error *err);

/**
 * fmha_local_open_pack() - the plans of such a file
 * @path:      borrowed
 * @ret_pack:  given: fmha_local_pack_free()
 *
 * A process that opens a pack executes its code: who may write the file decides what runs.
 *
 * Return: 0, FMHA_EIO (the file cannot be read), FMHA_EINVAL (it is no pack, or damaged), FMHA_ENOMEM.
 */
FMHA_API int fmha_local_open_pack(const char *path, struct fmha_local_pack **ret_pack,
				  struct fmha_error *err);

/* Plans made from it stay good. Return: NULL. */
FMHA_API struct fmha_local_pack *fmha_local_pack_free(struct fmha_local_pack *pack);

/* As fmha_local_plan_new(), of the problems that the pack was written for: FMHA_ENOENT for any other, also for
 * one whose tensors are aligned otherwise. From any thread. */
FMHA_API int fmha_local_pack_plan(struct fmha_local_pack *pack, const struct fmha_problem *problem,
				  struct fmha_local_plan **ret_plan, struct fmha_error *err);

#ifdef __cplusplus
}
#endif

#endif
