/* SPDX-License-Identifier: MIT */
/* internal.h: what the files of dispatch share. */
#ifndef FMHAD_DISPATCH_INTERNAL_H
#define FMHAD_DISPATCH_INTERNAL_H

#include <dispatch/plan.h>
#include <proto/error.h>
#include <proto/problem.h>

/* Integer tensors as kernels get them: dense private copies, or placeholders while planning. */
struct index_tables {
	abi_i32 *seqstart_q, *seqstart_k;
	abi_i32 *seqlen_q;
	abi_i32 *seqlen_k;        /* of attention: after the append */
	abi_i32 *seqlen_k_before; /* of the append */
	abi_i32 *leftpad_k;
	abi_i32 *block_table;
	int64_t block_table_stride; /* 0: all sequences share one row */
	int64_t table_columns;      /* of a row of block_table */
	abi_i32 *kv_indptr, *kv_page_indices, *kv_last_page_len;
	abi_i32 *cache_batch_idx;
};

/* The arguments of plan->stages[stage] in a run whose memory lies there. */
void args_fill(const struct plan *plan, uint32_t stage, const struct launch_bases *bases,
	       union abi_args *ret_args);
/* Args and relocations of @ret_record, from @args as args_placeholders() have them. */
void args_record(const struct plan *plan, enum abi_family family, const union abi_args *args,
		 struct launch_record *ret_record);
/* What launch_set_keys() changes in it, once plan->keys is known. */
void args_record_keys(const struct plan *plan, enum abi_family family,
		      struct launch_record *ret_record);
/* The launch that makes the indices, and the head, of a run whose integers no host has seen. */
void args_record_prepare(const struct plan *plan, struct launch_record *ret_record);

/* views.c: the tables of a plan's runs in one block that begins at @block, an address; all NULL
 * when it is 0. */
struct index_tables indices_layout(const struct fmha_problem *problem, uint64_t block);
/* The words of that block; may be more than an address space has. */
uint64_t indices_words(const struct fmha_problem *problem);

/* views.c: sets plan->keys of a plan that has its stages. */
void lengths_choose(struct plan *plan);

/* Bases that are not to be followed: not NULL where a run has one, and each tells by itself which. */
struct launch_bases args_placeholders(const struct plan *plan);

/*
 * reach.c: the last element that each tensor of an argument struct can be asked for, from its
 * strides and the struct's own loop bounds alone, lies within the view that was checked, or within
 * the workspace. FMHA_EINTERNAL names what does not: a bug of ours.
 */
int reach_check(const struct plan *plan, uint32_t stage, const union abi_args *args,
		struct fmha_error *err);

static inline bool plan_present(const struct fmha_problem *problem, enum fmha_tensor_role role)
{
	return fmha_tensor_present(&problem->tensor[role]);
}

/* Do key lengths differ from sequence to sequence, or before and after an append? */
static inline bool plan_has_lengths_k(const struct fmha_problem *problem)
{
	return plan_present(problem, FMHA_T_SEQLEN_K) || plan_present(problem, FMHA_T_KV_INDPTR) ||
	       (plan_present(problem, FMHA_T_SEQSTART_K) && problem->seqlen_new > 0);
}

/* Rows of the partial results' query axis. */
static inline int64_t plan_total_q(const struct plan *plan)
{
	return plan->axes.q.outer * plan->axes.q.length;
}

static inline bool plan_packed_q(const struct plan *plan)
{
	return plan->axes.q.storage == STORED_PACKED;
}

/* Does that stage write the cache's keys as q's type? */
static inline bool plan_stage_widens(const struct plan *plan, uint32_t stage)
{
	return plan->widens && stage == plan->append;
}

/* Is it one of those that serve sequences of few rows? */
static inline bool plan_stage_few(const struct plan *plan, uint32_t stage)
{
	uint32_t first = plan->append + plan->widens;

	return stage >= first && stage < first + plan->few;
}
/* Does a stage of attention read widened keys? */
static inline bool plan_stage_wide(const struct plan *plan, uint32_t stage)
{
	return plan->widens && !plan_stage_few(plan, stage);
}

/* Have keys of a head several factors? They are multiplied with them when they are widened, and else by the loop. */
static inline bool plan_varied_factors(const struct fmha_problem *problem)
{
	return problem->descale_block_k > 0 || problem->descale_per_page;
}

/* Keys of an axis of wide_k and wide_v, and how many of those there are. */
static inline int64_t plan_wide_keys(const struct plan *plan)
{
	return plan->axes.k.storage == STORED_PACKED ? plan->axes.k.length : plan->axes.k.longest;
}
static inline int64_t plan_wide_sequences(const struct plan *plan)
{
	return plan->axes.k.storage == STORED_PACKED ? 1
	       : plan->few                           ? plan->wide_places
						     : plan->axes.sequences;
}

static inline bool plan_paged(const struct fmha_problem *problem)
{
	return problem->page_size > 0;
}

static inline int64_t ceil_div(int64_t a, int64_t b)
{
	return a / b + (a % b != 0);
}

/* Query rows that share a key head, of one sequence. */
static inline int64_t plan_packed_rows(const struct fmha_problem *problem)
{
	return (int64_t)problem->seqlen_q * (problem->nhead_q / problem->nhead_k);
}
#define TILE_ROWS 64 /* of them, that one tile of a loop that streams keys packs */

#define WORKSPACE_MOST ((uint64_t)1 << 62)

/* Adds @bytes at the end of *@total, aligned; false on overflow. */
static inline bool workspace_add(uint64_t *total, uint64_t alignment, uint64_t bytes,
				 uint64_t *ret_offset)
{
	uint64_t offset = (*total + alignment - 1) / alignment * alignment;

	if (bytes > WORKSPACE_MOST || offset > WORKSPACE_MOST - bytes)
		return false;
	*ret_offset = offset;
	*total = offset + bytes;
	return true;
}

/* a * b * ..., FMHA_EINVAL "workspace" when it does not fit in 62 bits. */
static inline int workspace_product(uint64_t *ret_bytes, struct fmha_error *err, int n,
				    const int64_t *factors)
{
	uint64_t product = 1;

	for (int i = 0; i < n; i++)
		if (__builtin_mul_overflow(product, (uint64_t)factors[i], &product) ||
		    product > WORKSPACE_MOST)
			return fmha_error_refuse(err, "workspace",
						 "its size does not fit in 62 bits");
	*ret_bytes = product;
	return 0;
}

/* views.c: fills plan->views from the normalised problem. */
int views_build(struct plan *plan, struct fmha_error *err);
/* May elements of the two views, at these addresses, share a byte? Exact when strides nest. */
bool views_overlap(const struct plan_view *a, uintptr_t a_at, const struct plan_view *b,
		   uintptr_t b_at);

/* indices.c: the copies by name; all NULL when there are none. */
struct index_tables indices_tables(const struct plan_indices *indices);

/*
 * split.c: how many splits, keys a split, and why; 1 split: do not split. Pure, worked numbers
 * there.
 */
#define SPLIT_WHY_BYTES 120
struct split_choice {
	int32_t n, size;
	bool settled; /* it knows the loop better than models do that were fitted before */
	bool groups;  /* n is 1, for kernels of splits, whose tiles have rows of several heads */
	int32_t rest; /* n is 1, for kernels of splits: parts of each of the last tiles; 0: whole */
	int32_t rest_parts; /* of all of them at most */
	bool shares; /* blocks find their share of all keys; n is how many parts a row may have */
	char why[SPLIT_WHY_BYTES];
};
struct split_device {
	int64_t units; /* at least 1 */
	bool gpu;
	bool shares;     /* it has a loop that does */
	bool warpgroups; /* and one of tiles of 128 rows of a head */
	double amd_unit_rate; /* AMD: bytes a microsecond of a unit's memory, by the data sheet; else 0 */
};
void split_choose(const struct fmha_problem *problem, const struct split_device *device,
		  struct split_choice *ret_choice);
/* Have tiles of Hopper's loop for many rows, in kernels of splits, rows of all heads that share keys? Where that
 * leaves a tenth fewer: core/grid.h. */
bool split_groups_heads(const struct fmha_problem *problem, int64_t tile_rows);
/*
 * Into how many parts a row may be cut where sequences of up to @few_rows rows share the blocks of decode's loop,
 * beside others that have more and may end up there, too; 0: no such plan. The parts hold whatever ends up there.
 */
int32_t split_few(const struct fmha_problem *problem, const struct split_device *device,
		  int32_t few_rows);
/* Backward: how many sums of dQ there are, each over so many keys. @square: a CPU's, else NULL. */
struct square;
void split_choose_dq(const struct fmha_problem *problem, const struct split_device *device,
		     const struct square *square, struct split_choice *ret_choice);

/* estimate.c */
double cost_visible_pairs(int64_t seqlen_q, int64_t seqlen_k, const struct fmha_problem *problem);
/* That a row may see. */
static inline int64_t cost_keys(const struct fmha_problem *problem)
{
	return problem->topk > 0 ? problem->topk : problem->seqlen_k;
}

double cost_flops(const struct fmha_problem *problem);
uint64_t cost_bytes(const struct fmha_problem *problem);
double cost_cpu_shared_rows(const struct fmha_problem *problem, int64_t m0, int64_t n_splits,
			    int64_t units);
double cost_cpu_rows(const struct fmha_problem *problem, int64_t m0, int64_t n_splits,
		     int64_t units, bool packs);

/*
 * workspace.c: the unified backward block. How a dq_dk_dv pipeline splits dQ's partial sums.
 */
enum dq_mode {
	DQ_DIRECT, /* the pipeline writes dQ itself: no head, no data */
	DQ_ATOMIC, /* not deterministic: atomic adds into one buffer */
	DQ_PER_TILE, /* deterministic: ceil(seqlen_k_i / tile_n0) a sequence; of batch mode the longest's */
	DQ_PERSISTENT, /* deterministic, batch mode: as many as workers share one head */
	DQ_SINGLE,     /* deterministic by construction with one buffer that is fully written */
	DQ_TILES,      /* adds into one buffer of the pipeline's own tiles, in order where asked */
};

struct bwd_workspace {
	uint64_t nsplits, dq_acc_offsets, d, kv_acc, bytes; /* offsets; total but for dq_acc */
	uint64_t head_bytes, dq_acc_bytes;
	int32_t dq_splits; /* the largest */
	bool zero;
};

/* Keys of all sequences: rows of a head in kv_acc. */
static inline int64_t plan_total_k(const struct plan *plan)
{
	return plan->axes.k.outer * plan->axes.k.length;
}
/* DQ_TILES: those of all heads and sequences, at most. */
int64_t bwd_workspace_tiles(const struct plan *plan);
int32_t bwd_persistent_splits(const struct fmha_problem *problem, int64_t tile_n0, int64_t workers);
/* Sizes for a plan, before lengths are known: group mode counts every sequence as the longest. */
int bwd_workspace_size(const struct plan *plan, enum dq_mode mode, int64_t tile_n0, int64_t workers,
		       struct bwd_workspace *ret_workspace, struct fmha_error *err);
/* Group mode: bytes of dq_acc for a run, at most the plan's. */
uint64_t bwd_workspace_dq_acc(const struct plan *plan, const struct index_tables *tables);
/* Writes the head for a run. */
void bwd_workspace_head(const struct plan *plan, const struct index_tables *tables, void *head);

#endif
