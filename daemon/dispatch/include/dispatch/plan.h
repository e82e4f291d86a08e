/* SPDX-License-Identifier: MIT */
/*
 * plan.h: problem -> traits -> candidates -> plan.
 *
 * A plan is plain data: the validated problem, up to five stages, each naming one kernel with its
 * share of one workspace. It holds no pointer into a device or a buffer, so it can be printed,
 * exported and compared. plan_place() turns it into argument structs for one run.
 *
 * Stages: forward 1 (fwd, fwd_pagedkv or batch_prefill), split-KV 2 (fwd_splitkv, combine), k_new
 * in front of attention one more (fwd_appendkv), and a cache of 8 bits that is widened in front of many
 * rows another (fwd_appendkv, the other way round), behind which sequences of few rows may have two of
 * their own (fwd_splitkv, combine), backward 3 (dot_do_o, dq_dk_dv, convert_dq; 2 when
 * the pipeline writes dQ itself), append_kv 1, merge_states 1 (combine). A problem that writes
 * nothing (batch 0, no query rows) has none: running it is a success that touches nothing.
 */
#ifndef FMHAD_DISPATCH_PLAN_H
#define FMHAD_DISPATCH_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include <fmha/base.h>
#include <kernels/launch.h>
#include <kernels/traits.h>
#include <proto/problem.h>
#include <specs/spec.h>

#define PLAN_MAX_STAGES   5
#define PLAN_MAX_SPLITS   1024
#define PLAN_KERNEL_BYTES 256
#define PLAN_ALIGNMENT    256 /* of the workspace and of every stage's share */

/* The sources of a kernel's time when it was chosen, in the order of trust: see estimate.c. */
#define PLAN_BASES(X)                                                                              \
	X(FORMULA, "formula")                                                                      \
	X(MODEL, "model")                                                                          \
	X(NEARBY, "nearby")                                                                        \
	X(MEASURED, "measured")
enum plan_basis {
#define PLAN_BASIS_ID(ID, name) PLAN_BY_##ID,
	PLAN_BASES(PLAN_BASIS_ID)
#undef PLAN_BASIS_ID
		PLAN_N_BASES
};
const char *plan_basis_name(enum plan_basis basis);

#define PLAN_FEW_STAGES 2

struct plan_stage {
	enum abi_family family;
	enum plan_basis basis;
	char kernel[PLAN_KERNEL_BYTES]; /* canonical name: the key in the registry and the device */
	char pipeline[32], arch[32]; /* two words of that name; arch: of a CPU the kernel's level */
	struct kernel_spec spec;     /* what the name stands for; has_spec 0: nothing */
	uint32_t has_spec;
	uint32_t
		is_general; /* a GPU's loop over keys that is for every arch, not made for this one */
	struct traits traits; /* what the problem asks of its code */
	uint64_t code;  /* which code the device runs for it, 0: not said; names of the registry
			 * that differ in nothing that is compiled have one */
	uint32_t dtype; /* enum abi_dtype: of q; combine: of o */
	struct launch_record launch;
	uint32_t spills;  /* bytes of registers that a lane's code keeps in memory; 0: none,
			   * or the code has not been seen yet */
	uint32_t tile_n0; /* keys a tile: sizes dq_acc; 0: not said */
	uint64_t workspace_offset; /* the stage's own share; stages run one after the other, */
	uint64_t workspace_bytes;  /* so the private shares lie on top of each other */
};

/* Where the stages' common data lies in the workspace, bytes; meaningful where the plan uses it. */
struct plan_layout {
	uint64_t q_rotated; /* append + attention: q after the rotary embedding, packed */
	uint64_t wide_k,
		wide_v; /* widens: [places, nhead_k, seqlen_k, hdim] or [nhead_k, total_k, hdim] */
	uint64_t by_rows;                /* few: int32 [3, batch], as abi_appendkv_args has them */
	uint64_t few_o_acc, few_lse_acc; /* few: their partials, f32 */
	uint64_t o_acc, lse_acc;         /* split-KV partials, f32 */
	uint64_t nsplits;                /* backward head: int32 [batch or 1] */
	uint64_t dq_acc_offsets; /* backward head, group mode: int64 [batch + 1], elements */
	uint64_t d;              /* f32 [batch, nhead_q, seqlen_q] or [nhead_q, total_q] */
	uint64_t kv_acc; /* f32 [nhead_k, kv_parts, keys of all sequences, hdim_q], .., hdim_v */
	uint64_t dq_acc; /* f32, compact; ends the workspace */
	/* forward, as abi_rest has them; the latter end the workspace */
	uint64_t rest_parts, rest_arrivals;
};

/* One axis of a view: how often, and how far apart in bytes. */
struct plan_axis {
	int64_t extent, stride;
};

/* A present tensor, ready for the checks of a run: its axes longest stride first, without those of
 * extent 1. */
struct plan_view {
	uint32_t role;
	bool written;
	uint8_t n_axes;
	uint32_t element_bytes;
	uint32_t alignment;  /* of the first byte's address, as the kernels take it; bytes */
	uint64_t span_bytes; /* from the first byte to one past the last; 0: nothing there */
	struct plan_axis axes[5];
};

/* How many keys a run of it may have instead of the problem's; most 0: none. */
struct plan_keys {
	int32_t least, most;
	uint32_t
		stride_unit; /* elements: K's and V's steps of a batch entry and a head are multiples */
};

struct plan {
	struct fmha_problem problem; /* strides and scale filled in */
	struct problem_axes axes;    /* of that problem: what extents and loop bounds follow from */
	uint32_t n_stages;
	uint32_t named; /* bit i: the caller named the kernel of stage i */
	struct plan_stage stages[PLAN_MAX_STAGES];
	struct plan_layout layout;
	uint64_t workspace_bytes;      /* of any run at most */
	uint64_t workspace_head_bytes; /* backward: the part that the host prepares */
	uint64_t dq_acc_bytes;         /* likewise at most; 0: dq_dk_dv writes dQ itself */
	uint32_t workspace_zero;       /* 1: dq_acc, or the counters of parts of the last tiles,
					* must be zeroed before every run, as far as the run
					* needs them; the stage's record says the most */
	int32_t n_splits, split_size;  /* forward: what the planner chose; n_splits 0: not split */
	bool shares;                   /* blocks cut by themselves, into parts of any size */
	int32_t rest_splits, rest_parts; /* unsplit: of the last tiles; 0: they are whole */
	uint64_t rest_bytes;             /* of their arrivals, zeroed before every run */
	uint32_t dq_buffered;            /* backward: dq_dk_dv sums in dq_acc, convert_dq follows */
	int32_t dq_splits;               /* the largest nsplits_i */
	uint32_t dq_per_sequence;        /* 1: nsplits_i = ceil(seqlen_k_i / dq_tile_n0) */
	uint32_t dq_tile_n0;
	int32_t dq_split_keys; /* keys that blocks or tasks of one split take; 0: not split so */
	int32_t dq_tile_rows, dq_tile_floats; /* dq_acc in tiles, as the stage has it; 0: by rows */
	int32_t kv_parts; /* of the heads that share keys; up to 1: dq_dk_dv writes dK and dV itself */
	int32_t order_words; /* of the order in which dq_dk_dv takes keys, before d; 0: it has its own */
	uint32_t append; /* stage 0 writes k_new, v_new into the cache */
	uint32_t widens; /* the next stage writes the cache's keys as q's type into the workspace */
	uint32_t
		few; /* the stages behind that one, splits and their merge, which serve sequences of
			  * few rows over the cache as it is: PLAN_FEW_STAGES, or 0: all are widened */
	int32_t few_rows, few_parts; /* up to how many; parts that a row may have */
	int32_t wide_places;         /* few: for so many sequences, longer ones in their order */
	uint8_t misaligned[FMHA_N_TENSORS]; /* bytes past a multiple of LAUNCH_ALIGNMENT */
	uint32_t n_views;
	struct plan_view views[FMHA_N_TENSORS];
	struct plan_keys keys; /* of local launches */
	double flops;
	uint64_t bytes; /* least traffic: every input read once, every output written once */
};

struct registry;
struct predict_model;
struct select_foreign;

/* The questions that dispatch may ask a device, without knowing which one it is. */
struct plan_device {
	const char *arch;
	struct registry
		*registry; /* its kernels; NULL: find() alone chooses, with an empty pipeline */
	uint32_t compute_units;  /* cores, CUs or SMs */
	uint64_t lds_bytes;      /* per workgroup; 0 on a CPU */
	uint32_t wave;           /* lanes of a wave; without find() only */
	uint64_t workspace_most; /* bytes of a stage's private workspace; 0: any */
	/*
	 * The kernel for a stage. With stage->pipeline set, dispatch has chosen a spec (kernel,
	 * arch and pipeline are its): can this device run it with @args? With an empty pipeline the
	 * device chooses and sets the three. Either way fills workspace_bytes, spills, tile_n0 and
	 * launch but for its args and relocations. The pointers in @args are placeholders: not NULL
	 * where the tensor will be there, aligned as it will be, never to be followed; lengths are
	 * the maxima. Returns 0, or 1 when it does not fit; then *@ret_why is a reason, or as it was.
	 */
	int (*find)(void *owner, enum abi_family family, uint32_t dtype, const union abi_args *args,
		    struct plan_stage *stage, const char **ret_why);
	const struct select_foreign *foreign; /* kernels that are not this build's; NULL: none */
	/* Where a tensor of the problem lies, as far as its alignment goes; NULL: buffers are aligned. */
	uint64_t (*locate)(void *tensors, const struct fmha_tensor *tensor);
	void *owner, *tensors;
	/* Predicts times that nobody measured; NULL: the cost formula alone. */
	const struct predict_model *model;
	/* Holds what was judged of the problem before (plan_looking_new()); NULL: nothing. */
	const struct plan_looking *looking;
	bool explain_features; /* explanations show what the model sees, */
	int32_t *const
		*explain_integers; /* and how large the workspace is of a run with these; or NULL */
};

/* One bound tensor: where the first byte of the view lies and how much of the buffer follows. */
struct plan_binding {
	void *host;     /* readable by the worker's CPU; NULL on a GPU */
	void *device;   /* what kernels get; equals host on the CPU */
	uint64_t bytes; /* from there to the buffer's end */
};

/*
 * Kernels that the caller names: each is what the stage of its family runs, if it can; dispatch
 * chooses those of the others. Where the problem leaves it open, naming an unsplit forward kernel
 * means that keys are not split.
 */
struct plan_choice {
	uint32_t n;
	char kernel[PLAN_MAX_STAGES][PLAN_KERNEL_BYTES];
};

/*
 * Builds a plan. Judges the whole problem; buffers are judged by plan_read() and plan_place().
 * @choice: NULL: none
 * Return: 0, FMHA_EINVAL, FMHA_ENOTSUP (naming the field) or FMHA_ENOKERNEL. With the field
 * "kernels": FMHA_EINVAL, a name is no kernel of the device or has no stage in this plan;
 * FMHA_ENOKERNEL, it does not fit, and why.
 */
int plan_build(const struct fmha_problem *problem, const struct plan_choice *choice,
	       const struct plan_device *device, struct plan *ret_plan, struct fmha_error *err);

/*
 * The numbers of splits that plan_build() would weigh up for a problem, judged one at a time, for whoever
 * does not want to wait for all of them: what takes longest where a model knows many kernels. With @device's
 * looking set to it plan_build() of the same problem and choice takes what was found.
 * @device: kept
 * Return: given; NULL: plan_build() need not be helped, or memory lacks.
 */
struct plan_looking;
struct plan_looking *plan_looking_new(const struct fmha_problem *problem,
				      const struct plan_choice *choice,
				      const struct plan_device *device);
/* Judges one. Return: whether there are more. */
bool plan_look(struct plan_looking *looking);
struct plan_looking *plan_looking_free(struct plan_looking *looking);

/* The word under which the times of a problem's plans are kept, at most PLAN_SHAPE_BYTES. The problem
 * is one that plan_build() has taken: struct plan has it in one form. */
#define PLAN_SHAPE_BYTES 160
void plan_shape(const struct fmha_problem *problem, char shape[PLAN_SHAPE_BYTES]);

/*
 * What may run a problem: each main kernel (whose stage takes the time) with each number of splits
 * that is worth a try, the one that is expected to be fastest first. What was named or fixed by the
 * problem stays.
 */
struct plan_option {
	char kernel[PLAN_KERNEL_BYTES];
	int32_t n_splits; /* 0: the plan does not split */
	bool cuts_rest;   /* unsplit, but for the last tiles */
	double time;      /* expected; comparable within one list only */
};
#define PLAN_MAX_OPTIONS 512
/* @options: room for PLAN_MAX_OPTIONS. Return: how many, or as plan_build(). */
int plan_options(const struct fmha_problem *problem, const struct plan_device *device,
		 struct plan_option *options, struct fmha_error *err);
/* The plan of one of them, and what is kept of it: the kernel and splits by which it is known. */
int plan_build_option(const struct fmha_problem *problem, const struct plan_option *option,
		      const struct plan_device *device, struct plan *ret_plan,
		      struct fmha_error *err);
bool plan_has_same_kernels(const struct plan *a, const struct plan *b);
/* The stage whose kernel a plan is known by. */
const struct plan_stage *plan_main_stage(const struct plan *plan);

/* The kernels that were named when @plan was built. */
void plan_chosen(const struct plan *plan, struct plan_choice *ret_choice);

/*
 * Small integer tensors (prefix sums, lengths, page tables) are copied out of client memory into
 * @ret_indices, which the caller frees after the run, and only the copy is validated and used: a
 * client that writes during a run cannot move a kernel out of bounds.
 *
 * @bindings: one a role, zero where the tensor is absent
 * @ret_indices: given; NULL when there are no such tensors
 * Return: 0, FMHA_EINVAL naming the field, FMHA_ENOMEM.
 */
struct plan_indices;
int plan_read(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
	      struct plan_indices **ret_indices, struct fmha_error *err);

/* Whether a run's lengths decide how large its workspace is, and how large it is. */
bool plan_workspace_varies(const struct plan *plan);
uint64_t plan_workspace_bytes(const struct plan *plan, const struct plan_indices *indices);

/* From there on the workspace is zeroed, where workspace_zero says so. */
uint64_t plan_zero_from(const struct plan *plan);

/* The private memory of a run. */
struct plan_memory {
	void *workspace; /* device memory, plan_workspace_bytes(), aligned to PLAN_ALIGNMENT */
	void *head; /* host memory that gets the plan's workspace_head_bytes of the head: equals
		     * workspace where the two share memory; NULL: not wanted */
	const void *indices; /* where kernels read the plan_indices_bytes() of plan_indices_data(),
			      * which the caller copies there; NULL: where they are */
};

/*
 * Fills one argument struct a stage.
 *
 * A tensor that the plan writes must not share a byte with any other tensor of the problem, the
 * workspace included, nor with itself through its strides: FMHA_EINVAL names it. Interleaved views
 * (dQ, dK and dV inside one packed dQKV) are told apart exactly as long as their strides nest.
 *
 * @indices: of plan_read() with the same bindings
 * Return: 0, FMHA_EINVAL naming the field.
 */
int plan_place(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
	       const struct plan_indices *indices, const struct plan_memory *memory,
	       union abi_args args[PLAN_MAX_STAGES], struct fmha_error *err);

/* About how many operations a run is, whatever it hides behind a mask. @args, @indices: of plan_place() */
double plan_work(const struct plan *plan, const union abi_args args[PLAN_MAX_STAGES],
		 const struct plan_indices *indices);
/* Arguments as find() saw them: lengths are maxima, pointers say only whether a tensor is there. */
void plan_placeholder_args(const struct plan *plan, union abi_args args[PLAN_MAX_STAGES]);
struct plan_indices *plan_indices_free(struct plan_indices *indices);
/* The judged copies: one block, in which every plan's tables lie at places of their own. */
const void *plan_indices_data(const struct plan_indices *indices);
uint64_t plan_indices_bytes(const struct plan *plan);
/*
 * At most this many integers are copied and checked by plan_read(), whatever they are: its cost
 * beyond some microseconds. It grows with the integer tensors' own sizes, never with their
 * broadcast extents, except for lists of one word a sequence.
 */
uint64_t plan_index_entries(const struct plan *plan);

/* Whether a run judges what lies there. */
static inline bool plan_view_is_integer(const struct plan *plan, const struct plan_view *view)
{
	return view->span_bytes > 0 && plan->problem.tensor[view->role].dtype == FMHA_I32;
}

/* Counts slots, positions and factors of new rows among these, which have no copy, so that every run's are judged. */
uint64_t plan_row_entries(const struct plan *plan);

/* A plan as its launches, for a client that has its own context on the device. */
struct plan_local {
	uint64_t workspace_bytes; /* more than the plan's: the indices are made there */
	bool prepares; /* launches[0] makes what the others take from lengths and tables; the others
			* are the stages */
	uint32_t n_launches;
	struct launch_record launches[1 + PLAN_MAX_STAGES]; /* grid, block, entry of the first, and
							     * all hashes, are the device's to say */
};
/* Return: 0, or FMHA_EINVAL naming the field of a problem that no run could satisfy. */
int plan_local(const struct plan *plan, struct plan_local *ret_local, struct fmha_error *err);

/* "fwd", "fwd_splitkv", ...: never NULL. */
const char *plan_family_name(enum abi_family family);

/*
 * JSON for people and programs: the plan as plan_build() makes it, and for each kernel that was
 * looked for the signature, the candidates with the reason of each rejection, and what decided. A
 * problem without a kernel is explained too: then "plan" is null and "error" says so. Given to the
 * caller, who frees it with free(). Return: as plan_build(), but 0 for FMHA_ENOKERNEL.
 */
int plan_explain(const struct fmha_problem *problem, const struct plan_choice *choice,
		 const struct plan_device *device, char **ret_json, struct fmha_error *err);

#endif
