/* SPDX-License-Identifier: MIT */
/*
 * messages.h: the decoded form of every request and answer. Each struct is described once more by
 * a field table in messages.c, from which the encoder, the decoder and PROTOCOL.md's tables come,
 * so that both directions agree by construction.
 *
 * Strings are copied into fixed arrays: a decoded message holds no pointer into the frame.
 */
#ifndef PROTO_MESSAGES_H
#define PROTO_MESSAGES_H

#include <stdint.h>

#include <fmha/base.h>

#define PROTO_VERSION      2 /* 2: tensors may say their extents */
#define PROTO_VERSION_OLD  1 /* the lowest that the daemon speaks */
#define PROTO_MAX_DEVICES  16
#define PROTO_MAX_STAGES   4
#define PROTO_MAX_REBINDS  16
#define PROTO_MAX_FENCES   4
#define PROTO_NAME_BYTES   64  /* device, client and set names, NUL included */
#define PROTO_KERNEL_BYTES 256 /* canonical kernel names, NUL included */
#define PROTO_SHAPE_BYTES  160 /* the words under which times are kept, NUL included */

/* A method without params or results: an empty map on the wire. */
struct proto_empty {
	char unused;
};

struct proto_hello_params {
	uint32_t version;
	char client[PROTO_NAME_BYTES]; /* for logs and status: "fmhactl", "libfmha_client/0.1" */
};

struct proto_hello_result {
	uint32_t version;
	char server[PROTO_NAME_BYTES];
	uint32_t pid;
	uint32_t max_frame_bytes;
	uint32_t max_in_flight; /* requests a connection may have unanswered */
	uint32_t n_devices;
};

struct proto_device {
	uint32_t device; /* index, stable while the daemon runs */
	char name[PROTO_NAME_BYTES];
	char arch[PROTO_NAME_BYTES];
	char backend[PROTO_NAME_BYTES]; /* cpu, fake, hip, cuda */
	char state[PROTO_NAME_BYTES];   /* ready, starting, restarting, failed */
	uint32_t compute_units;         /* cores or CUs or SMs */
	uint64_t memory_bytes;
	uint32_t fences; /* 1: runs wait for and write counters in its memory */
	uint32_t events; /* 1: runs wait for and record other processes' events */
};

struct proto_devices_result {
	uint32_t n_devices;
	struct proto_device devices[PROTO_MAX_DEVICES];
};

struct proto_open_device_params {
	uint32_t device;
};

struct proto_open_device_result {
	struct proto_device device;
	uint32_t worker_pid;
};

struct proto_buffer_create_params {
	uint64_t size; /* bytes */
};

enum proto_memory_kind { PROTO_MEMFD = 0, PROTO_IPC_HANDLE = 1, PROTO_VMM_FD = 2 };

struct proto_buffer_import_params {
	uint32_t kind;         /* enum proto_memory_kind */
	uint64_t size;         /* bytes of the extent */
	uint64_t base_offset;  /* of the extent inside the allocation that the handle names */
	uint8_t handle[64];    /* PROTO_IPC_HANDLE */
	uint32_t handle_bytes; /* bytes of handle in use; 0 for fds */
};

struct proto_buffer_result {
	uint64_t buffer;
	uint64_t size;
	uint32_t kind; /* enum proto_memory_kind of the descriptor */
	uint64_t
		allocation_bytes; /* PROTO_VMM_FD: bytes behind it, a multiple of the granularity */
};

struct proto_buffer_release_params {
	uint64_t buffer;
};

struct proto_event_import_params {
	uint8_t handle[64];
	uint32_t handle_bytes;
};

struct proto_event_result {
	uint64_t event;
};

struct proto_event_release_params {
	uint64_t event;
};

struct proto_kernel {
	char kernel[PROTO_KERNEL_BYTES];
};

struct proto_plan_params {
	struct fmha_problem problem;
	uint32_t n_kernels; /* that the caller names, at most one a stage */
	struct proto_kernel kernels[PROTO_MAX_STAGES];
};

struct proto_stage {
	char family[PROTO_NAME_BYTES];
	char kernel[PROTO_KERNEL_BYTES];
	uint64_t workspace_offset;
	uint64_t workspace_bytes;
};

struct proto_plan_result {
	uint64_t plan;
	uint64_t workspace_bytes;
	double flops; /* of the whole plan, multiply and add counted apart, masked blocks left out
		       */
	uint32_t n_stages;
	struct proto_stage stages[PROTO_MAX_STAGES];
};

/* One kernel launch: struct launch_record of <kernels/launch.h>, which says what the numbers mean. */
#define PROTO_MAX_LAUNCHES    6
#define PROTO_MAX_RELOCATIONS 32
#define PROTO_MAX_MAPS        4
#define PROTO_MAX_RANGES      2
#define PROTO_ARGUMENT_BYTES  1024
#define PROTO_HASH_BYTES      32

struct proto_relocation {
	uint32_t offset; /* of the pointer in the arguments */
	uint32_t base;   /* enum fmha_tensor_role; FMHA_T_WORKSPACE: the run's */
	uint64_t plus;   /* bytes */
};

struct proto_tensor_map {
	uint32_t offset; /* of the pointer in the arguments */
	uint32_t dtype;  /* enum fmha_dtype */
	uint32_t swizzle;
	uint64_t box[4], extents[4], strides[3];
};

struct proto_range {
	uint64_t offset, bytes; /* of the workspace */
};

struct proto_launch {
	char family[PROTO_NAME_BYTES];   /* "prepare": what makes tables of lengths and pages */
	char kernel[PROTO_KERNEL_BYTES]; /* canonical name */
	char entry[PROTO_NAME_BYTES];    /* the function in the code object */
	uint8_t code[PROTO_HASH_BYTES];
	uint32_t code_bytes; /* of the hash: all of it */
	uint64_t grid[3], block[3];
	uint32_t lds_bytes;
	uint32_t dropout_offset;
	uint32_t sequences_offset, k_offset, v_offset;
	uint32_t overlaps; /* 1: it may begin before the launch in front of it has ended */
	uint8_t arguments[PROTO_ARGUMENT_BYTES];
	uint32_t argument_bytes;
	uint32_t n_relocations, n_maps, n_zeroes;
	struct proto_relocation relocations[PROTO_MAX_RELOCATIONS];
	struct proto_tensor_map maps[PROTO_MAX_MAPS];
	struct proto_range zeroes[PROTO_MAX_RANGES];
};

/* What the launches take a tensor to be. */
struct proto_local_tensor {
	uint32_t role; /* enum fmha_tensor_role */
	uint64_t bytes;
	uint32_t alignment; /* of the first byte's address */
};

struct proto_local_plan_result {
	uint64_t workspace_bytes, workspace_alignment;
	double flops;
	uint64_t version; /* another one: other kernels */
	/* Other numbers of keys that it may be run with; most 0: none. */
	int32_t seqlen_k_least, seqlen_k_most;
	uint32_t
		key_stride_unit; /* elements: K's and V's steps of a batch entry and a head are multiples then */
	uint32_t n_tensors, n_launches;
	struct proto_local_tensor tensors[FMHA_N_TENSORS];
	struct proto_launch launches[PROTO_MAX_LAUNCHES]; /* in the order of one stream */
};

/* How often a client has run a plan of its own since it told so last. */
struct proto_local_runs_params {
	struct fmha_problem problem; /* as for local_plan */
	uint64_t runs, version;
};

struct proto_local_runs_result {
	uint64_t version; /* of the plan that local_plan would hand out now */
};

struct proto_code_params {
	uint8_t hash[PROTO_HASH_BYTES];
	uint32_t hash_bytes; /* all of it */
};

struct proto_code_result {
	uint64_t size; /* bytes of the code object in the memfd that comes along */
};

struct proto_plan_release_params {
	uint64_t plan;
};

struct proto_rebind {
	uint32_t role; /* enum fmha_tensor_role; on the wire its name */
	uint64_t buffer;
	uint64_t offset;
};

/* A 32-bit counter in a shared buffer, or an event of the client's. */
struct proto_fence {
	uint64_t buffer; /* 0: an event */
	uint64_t offset; /* bytes, a multiple of 4 */
	uint32_t value;
	uint64_t event; /* 0: a counter */
};

struct proto_run_params {
	uint64_t plan;
	uint64_t dropout_seed, dropout_offset;
	uint32_t has_dropout_state; /* 0: keep what the plan was made with */
	uint32_t timeout_ms;        /* 0: the daemon's own deadline */
	uint32_t n_rebinds, n_waits, n_signals;
	struct proto_rebind rebinds[PROTO_MAX_REBINDS];
	struct proto_fence waits[PROTO_MAX_FENCES];   /* what must be reached before */
	struct proto_fence signals[PROTO_MAX_FENCES]; /* what is written or recorded afterwards */
};

struct proto_run_result {
	uint64_t queued_ns; /* from arrival to the first stage */
	uint64_t kernel_ns; /* all stages */
};

struct proto_cancel_params {
	uint32_t request; /* message id of the run */
};

struct proto_json_result {
	uint64_t size; /* bytes of UTF-8 JSON in the memfd that comes along */
};

struct proto_registry_export_params {
	char filter[1024]; /* empty: everything */
};

struct proto_registry_set_params {
	char set[PROTO_NAME_BYTES];
};

struct proto_registry_result {
	uint64_t n_kernels; /* forget: results */
	uint32_t stored;    /* 1: a restart keeps what was changed */
};

struct proto_registry_kernel_params {
	char kernel[PROTO_KERNEL_BYTES];
};

struct proto_registry_priority_params {
	char kernel[PROTO_KERNEL_BYTES];
	int32_t priority; /* 0: none, as at first */
};

struct proto_registry_forget_params {
	char kernel[PROTO_KERNEL_BYTES]; /* pattern with * and ?; empty: all */
	char shape[PROTO_SHAPE_BYTES];   /* empty: all */
};

struct proto_tune_params {
	struct fmha_problem problem; /* of its tensors only dtypes and strides count */
	char shape
		[PROTO_SHAPE_BYTES]; /* of the census, in place of the problem; empty: the problem */
	uint32_t budget_ms;          /* of device time; 0: until all candidates are measured */
	uint32_t again;              /* 1: also what was measured before */
	uint32_t thorough;           /* 1: also what is estimated to be far too slow */
};

struct proto_tune_result {
	char shape[PROTO_SHAPE_BYTES];
	char kernel[PROTO_KERNEL_BYTES]; /* the fastest; empty: nothing was measured */
	int32_t n_splits;
	double us; /* of its whole plan */
	uint32_t n_candidates, n_measured, n_failed;
};

struct proto_inject_params {
	char fault[PROTO_NAME_BYTES]; /* hang, abort, oom, sticky: see daemon/device/fake.c */
	uint32_t after;               /* launches that still succeed */
};

struct proto_worker_ready_params {
	struct proto_device device;
	/* What measured times hold for; empty compiler and sources: those of the front's compiler. */
	char model[PROTO_NAME_BYTES], driver[PROTO_NAME_BYTES];
	char compiler[96], sources[80];
};

/* A measured time: from the worker that has measured it, then to the others of its model. */
struct proto_tuned_result_params {
	char kernel[PROTO_KERNEL_BYTES];
	char shape[PROTO_SHAPE_BYTES];
	int32_t n_splits;
	double us;
	uint64_t when_s;
};

enum proto_change {
	PROTO_CHANGE_PRIORITY,
	PROTO_CHANGE_LIFT,
	PROTO_CHANGE_FORGET,
	PROTO_CHANGE_LOAD, /* with a set's document */
	PROTO_CHANGE_UNLOAD,
	PROTO_CHANGE_MERGE, /* with results and priorities */
};

/* What an administrator has asked a worker for, judged there, to be kept and passed on. */
struct proto_registry_change_params {
	uint32_t change; /* enum proto_change */
	uint32_t uid;
	char name[PROTO_KERNEL_BYTES]; /* kernel, pattern or set */
	char shape[PROTO_SHAPE_BYTES];
	int32_t priority;
};

struct proto_worker_attach_params {
	uint64_t session;
	uint32_t uid, gid, pid;
	char client[PROTO_NAME_BYTES];
};

enum proto_urgency { PROTO_URGENT, PROTO_SOON, PROTO_BACKGROUND };

#define PROTO_MAX_OPTIONS 32

struct proto_compile_option {
	char text[64]; /* -DNAME=VALUE */
};

/* A worker asks its front for a kernel's code. */
struct proto_compile_params {
	uint32_t uid;     /* on whose behalf */
	uint32_t urgency; /* enum proto_urgency */
	char kernel[PROTO_KERNEL_BYTES];
	char arch[PROTO_NAME_BYTES];
	char source[PROTO_NAME_BYTES];
	uint32_t n_options;
	struct proto_compile_option options[PROTO_MAX_OPTIONS];
};

struct proto_compile_result {
	uint64_t size;
	uint32_t registers, spills, lds_bytes, compile_ms;
};

/* Nobody waits for it any more; it is answered all the same, with FMHA_ECANCELED unless it is done.
 */
struct proto_compile_cancel_params {
	uint32_t request; /* message id of the compile */
};

#endif
